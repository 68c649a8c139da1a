"""The claims of every row that runs here hold, and what cannot be verified is said."""

from __future__ import annotations

from typing import Any

import pytest
from support.altered import altered

from attnreg import Platform, Registry, RequestError, loader
from attnreg.conformance.verify import verify

HOPPER = Platform(platform="cuda", arch="sm90")


@pytest.mark.parametrize("backend", ["CPU_ATTN", "TORCH_SDPA"])
def test_what_runs_on_a_processor_does_what_its_row_claims(default: Registry, cpu: Platform, backend: str) -> None:
    (evidence,) = verify([backend], registry=default, platform=cpu)
    assert evidence.problems == []
    assert evidence.unproven == []
    row = default.backends[backend].variants[0]
    for facet, key in (("dtype", "dtypes"), ("kv_dtype", "kv_dtypes"), ("attn_type", "attn_types")):
        (claim,) = (c for c in row.claims if c.key == key)
        words = {w for w in default.vocabulary.words[key] if claim.matcher.matches(w)}
        assert evidence.claims[facet].keys() == words
    assert evidence.claims["features"].keys() == row.served


def test_the_logic_of_flex_attention(default: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    # on a processor it runs without Triton, so nothing of it is interpreted
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    (evidence,) = verify(["FLEX_ATTENTION"], registry=default, platform=HOPPER, device="cpu", size="claims")
    assert (evidence.problems, evidence.unproven) == ([], [])


def test_what_a_kernel_raises_refutes_the_claim(
    default: Registry, cpu: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    def burst(*_: Any) -> None:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(loader, "load_kernel", lambda registry, backend: altered(after=burst))
    (evidence,) = verify(["CPU_ATTN"], registry=default, platform=cpu, size="claims")
    assert len(evidence.problems) == evidence.cases
    assert evidence.problems[0].endswith("RuntimeError: out of shared memory")


def test_only_what_runs_here_can_be_verified(default: Registry, cpu: Platform) -> None:
    with pytest.raises(
        RequestError, match=r"FLASH_ATTN cannot be verified here; with a kernel module there are: CPU_ATTN"
    ):
        verify(["FLASH_ATTN"], registry=default, platform=cpu)
