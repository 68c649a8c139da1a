"""Which row of attnreg's own registry computes a layer of vLLM, and what the log says of those before it."""

from __future__ import annotations

import logging

import pytest

import attnreg
from attnreg.integrations.vllm import kernels

REQUEST = attnreg.AttentionRequest(head_size=128, num_heads=8, block_size=16, dtype="bfloat16")


@pytest.mark.parametrize(
    ("arch", "row", "said"),
    [
        (
            "sm80",
            "TRITON_ATTN",
            "attnreg: TRITON_ATTN computes the layers of ATTNREG. HOPPER_ATTN does not: arch is sm80; needs sm90",
        ),
        ("sm90", "HOPPER_ATTN", "attnreg: HOPPER_ATTN computes the layers of ATTNREG"),
    ],
)
def test_the_log_says_once_which_row_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, arch: str, row: str, said: str
) -> None:
    # the row's module imports it; the environment of test-vllm has none
    pytest.importorskip("triton")
    packages = {"torch": "2.14.0", "triton": "3.8.0"}
    here = attnreg.Platform(platform="cuda", arch=arch, packages=packages)  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "here", lambda: here)
    monkeypatch.setattr(kernels, "_own", kernels._own._replace(told=set()))
    with caplog.at_level(logging.INFO, logger="vllm.attnreg"):
        for _ in range(2):
            selection = kernels.select_kernel(REQUEST)
            assert selection.backend is not None
            assert selection.backend.name == row
    assert [record.message for record in caplog.records] == [said]


def test_one_that_nothing_computes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"torch": "2.9.1", "triton": "3.5.1"}
    here = attnreg.Platform(platform="cuda", arch="sm90", packages=packages)  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "here", lambda: here)
    with pytest.raises(
        ValueError, match=r"(?s)^attnreg \(ATTNREG\): .*package triton is version 3\.5\.1; needs >=3\.6"
    ):
        kernels.select_kernel(REQUEST)
