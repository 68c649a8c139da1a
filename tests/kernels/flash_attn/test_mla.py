"""FLASH_ATTN_MLA/FA3 and FLASH_ATTN_PREFILL/FA3 against stand-ins with the schemas of both builds."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from support.layers.mla import latent_spec, refuses, refuses_packed_keys

from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.verify import verify
from attnreg.kernels import reference
from attnreg.loader import unloadable
from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call, SpecError, UnclaimedError
from attnreg.selection.selector import evaluate

Install = Callable[..., ModuleType]
MLA = "attnreg.kernels.flash_attn.mla"


def h200(*packages: str) -> Platform:
    return Platform(platform="cuda", arch="sm90", packages=tuple((name, "") for name in ("torch", "triton", *packages)))


def latents(**changes: Any) -> AttentionSpec:
    return latent_spec(**{"block_size": 16} | changes)


@pytest.mark.parametrize("build", ["vllm", "flash-attn-3"])
def test_every_claim_over_latents_holds(install: Install, build: str) -> None:
    install(build, module=MLA)
    (evidence,) = verify(["FLASH_ATTN_MLA/FA3"], platform=h200(build), device="cpu", size="claims")
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert {"lse", "batch_invariant"} <= evidence.claims["features"].keys()
    assert {"576", "320"} == evidence.claims["head_size"].keys()


def test_every_claim_of_prompts_holds(install: Install) -> None:
    install("vllm")
    (evidence,) = verify(["FLASH_ATTN_PREFILL/FA3"], platform=h200("vllm"), device="cpu")
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert {"lse", "batch_invariant"} <= evidence.claims["features"].keys()


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        (latents(block_size=64), UnclaimedError, "block_size 64: the kernel is compiled for .* blocks of 16, 32, 48"),
        (latents(head_size=512, head_size_v=448), UnclaimedError, "head sizes 512 and 448"),
        (latents(kv_dtype="fp8"), UnclaimedError, "queries and latents must have one dtype"),
        (latents(latent=False), SpecError, "not MLA in its latent form"),
    ],
)
def test_other_layers_are_refused(install: Install, spec: AttentionSpec, error: type[Exception], words: str) -> None:
    refuses(install("vllm", module=MLA), spec, error, words)


def test_a_batch_without_a_cache_is_refused(install: Install) -> None:
    refuses_packed_keys(install("vllm", module=MLA), latents())


def test_small_pages_are_left_to_fa3_and_whole_tiles_to_the_next_backend(install: Install, default: Registry) -> None:
    install("vllm", module=MLA)
    request = {"attention": "mla", "head_size": 576, "num_heads": 128, "num_kv_heads": 1}
    packages = {"torch": "2.11", "vllm": "0.33.0", "triton": "3.8.0"}
    platform = Platform(platform="cuda", arch="sm90", packages=packages)
    for block_size, expected in ((16, "FLASH_ATTN_MLA/FA3"), (64, "TRITON_MLA")):
        asked = AttentionRequest(**request, block_size=block_size)
        accepted = [
            c.title for c in evaluate(asked, platform, default, unloadable=unloadable).candidates if not c.reasons
        ]
        assert next(title for title in accepted if title != "HOPPER_MLA") == expected


def test_tokens_that_only_the_queries_count_are_no_keys(install: Install) -> None:
    # padding of a batch: 2 queries of a request without a key, between others; and fewer rows than memory has
    module = install("vllm")
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=4, head_size=192, head_size_v=128, dtype=torch.bfloat16, softmax_scale=0.1,
        features=frozenset({"lse"}),
    )  # fmt: skip
    lengths = torch.tensor([3, 0, 4], dtype=torch.int32)
    starts = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    batch = BatchMetadata(
        query_start_loc=starts, seq_lens=lengths, max_query_len=4, max_seq_len=4, query_start_loc_cpu=starts,
        seq_lens_cpu=lengths,
    )  # fmt: skip
    query, key, value = (torch.randn(9, 4, n).bfloat16() for n in (192, 192, 128))
    output, lse = torch.full((12, 4, 128), torch.nan).bfloat16(), torch.full((4, 12), torch.nan)
    module.forward(spec, module.plan(spec, batch), Call(query, None, output, key, value, lse))
    for first, last in ((0, 3), (5, 9)):
        own = slice(first, last)
        alone = BatchMetadata.build([last - first])
        exact = reference.attention(spec, alone, query[own], key=key[own], value=value[own])
        torch.testing.assert_close(output[own].double(), exact.output, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse[:, own].double(), exact.lse, atol=1e-4, rtol=1e-4)
    assert (output[3:5] == 0).all()
    assert (lse[:, 3:5] == -torch.inf).all()
    # memory past the queries stays as it is
    assert output[9:].isnan().all()
    assert lse[:, 9:].isnan().all()
