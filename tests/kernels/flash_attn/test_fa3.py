"""FLASH_ATTN/FA3 against stand-ins with the schemas that vLLM's wheel and FlashAttention's own sources register."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.stand_ins import fake_varlen

from attnreg import AttentionRequest, Platform, Registry
from attnreg.conformance.verify import verify
from attnreg.kernels import reference, upstream
from attnreg.kernels.flash_attn import record
from attnreg.kernels.upstream import UpstreamError
from attnreg.loader import unloadable
from attnreg.runtime.interface import AttentionSpec, BatchError, BatchMetadata, Call, LayerParams
from attnreg.selection.selector import evaluate

BUILDS = ("vllm", "flash-attn-3")
Install = Callable[..., ModuleType]


def h200(*packages: str) -> Platform:
    return Platform(platform="cuda", arch="sm90", packages=tuple((name, "") for name in ("torch", "triton", *packages)))


@pytest.mark.parametrize("build", BUILDS)
def test_every_claim_holds(install: Install, build: str) -> None:
    install(build)
    (evidence,) = verify(["FLASH_ATTN/FA3"], platform=h200(build), device="cpu", size="claims")
    assert (evidence.problems, evidence.undecided) == ([], [])
    assert {"lse", "softcap", "sliding_window", "non_causal"} <= evidence.claims["features"].keys()
    # the package's kernel has none
    assert ("sinks" in evidence.claims["features"]) == (build == "vllm")


def test_vllms_build_is_taken_first(install: Install) -> None:
    assert install(*BUILDS).build.more == record.FA3_OF_VLLM


@pytest.mark.parametrize(("heads", "inside"), [(4, True), (66, False)])
def test_bfloat16_sinks_go_to_the_kernel(install: Install, heads: int, inside: bool) -> None:
    module = install("vllm")
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=2, head_size=64, head_size_v=64, dtype=torch.bfloat16, softmax_scale=0.125,
        features=frozenset({"sinks", "lse", "non_causal"}),
    )  # fmt: skip
    given: list[Any] = []
    inner = module.build.fwd
    module.build.fwd = lambda **arguments: given.append(arguments["s_aux"]) or inner(**arguments)
    batch = BatchMetadata.build([3, 38, 2], [3, 38, 0], causal=False)
    params = LayerParams(sinks=torch.randn(heads).bfloat16())
    # and of a request without keys, a head without a sink, and one whose sink takes all the weight
    params.tensors[0][1:3] = torch.tensor([-torch.inf, torch.inf])
    query, key, value = (torch.randn(45, n, 64).bfloat16() for n in (heads, 2, 2))
    output, lse = torch.full((45, heads, 64), torch.nan).bfloat16(), torch.full((heads, 45), torch.nan)
    module.forward(spec, module.plan(spec, batch), Call(query, None, output, key, value, lse, params))
    exact = reference.attention(spec, batch, query, key=key, value=value, params=params)
    torch.testing.assert_close(output[:43].double(), exact.output, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse[:, :43].double(), exact.lse, atol=1e-4, rtol=1e-4)
    assert output[43:].isnan().all()
    assert lse[:, 43:].isnan().all()
    assert (given[0] is not None) == inside


def tiles(module: ModuleType, size: int, window: int | None, invariant: bool) -> dict[Any, set[tuple[int, str]]]:
    """The tiles that FlashAttention takes in batches of many lengths, by block size and causality."""
    found: dict[Any, set[tuple[int, str]]] = {}
    for block, causal in itertools.product((None, 16, 48, 112, 144, 176), (True, False)):
        features = {"non_causal", "batch_invariant"} if invariant else {"non_causal"}
        spec = AttentionSpec(
            num_heads=4, num_kv_heads=4, head_size=size, head_size_v=size, dtype=torch.float16, softmax_scale=0.1,
            block_size=block, sliding_window=window,
            features=frozenset(features if window is None else features | {"sliding_window"}),
        )  # fmt: skip
        for queries, keys in (([1], [3]), ([1], [1000]), ([3, 1], [900, 1]), ([70], [70]), ([1, 600], [9, 600])):
            table = None if block is None else torch.zeros(len(keys), 70, dtype=torch.int32)
            batch = BatchMetadata.build(queries, keys, block_table=table, causal=causal)
            q, k = torch.empty(1, 4, size, device="meta"), torch.empty(9, block or 1, 4, size, device="meta")
            tile = fake_varlen.fa3_tile(q, k, k, module.build.arguments(spec, module.plan(spec, batch)))
            found.setdefault((block, causal), set()).add(tile)
    return found


@pytest.mark.parametrize("window", [None, 6, 301, 701])
@pytest.mark.parametrize("size", [8, 64, 96, 128, 192, 256])
def test_a_batch_invariant_layer_has_the_same_tiles_in_every_batch(
    install: Install, size: int, window: int | None
) -> None:
    module = install("vllm")
    assert all(len(found) == 1 for found in tiles(module, size, window, True).values())
    # which no other layer of these has
    assert any(len(found) > 1 for found in tiles(module, size, window, False).values())


def test_without_a_build_the_next_backend_is_taken(install: Install, default: Registry) -> None:
    request = AttentionRequest(head_size=64, num_heads=4, num_kv_heads=2, block_size=16)
    with pytest.raises(UpstreamError, match=r"package vllm is not installed.*package flash_attn_3 is not installed"):
        install()
    refused = evaluate(request, h200("vllm"), default, "FLASH_ATTN/FA3", unloadable=unloadable).candidates[0]
    assert "package vllm is not installed" in refused.reasons[0].text
    chosen = evaluate(
        dataclasses.replace(request, phase="prefill"), h200("vllm"), default, unloadable=unloadable
    ).chosen
    assert chosen is not None
    assert chosen.name != "FLASH_ATTN"


def test_it_runs_prompts_and_where_it_is_named(install: Install, default: Registry) -> None:
    install("vllm")
    registry, here = dataclasses.replace(default), h200("vllm")
    request = AttentionRequest(head_size=72, num_heads=4, num_kv_heads=2, block_size=16)
    prompts = dataclasses.replace(request, phase="prefill")
    named = evaluate(request, here, registry, "FLASH_ATTN/FA3", unloadable=unloadable).chosen
    first, automatic = (evaluate(r, here, registry, unloadable=unloadable) for r in (prompts, request))
    assert named is not None
    assert first.chosen is not None
    assert first.chosen.title == named.title == "FLASH_ATTN/FA3"
    assert automatic.chosen is not None
    assert automatic.chosen.name != "FLASH_ATTN"
    assert "HOPPER_ATTN was measured to be faster" in automatic.candidates[0].reasons[0].text
    # what is only explained is as before
    known = evaluate(request, here, registry).chosen
    assert known is not None
    assert known.title == "FLASH_ATTN/FA3"


def test_a_changed_schema_is_a_reason(install: Install) -> None:
    words = r"torch\.ops\._vllm_fa3_C\.fwd has no parameter `softcap` any more, and now requires `soft_cap`"
    with pytest.raises(UpstreamError, match=words):
        install("vllm", schema=lambda words: words.replace("softcap", "soft_cap"))


def test_a_library_is_loaded_from_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded: list[Path] = []
    package = tmp_path / "no_such_engine"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    with pytest.raises(UpstreamError, match="package no_such_engine is not installed"):
        upstream._load_library("no_such_engine", "_C*.so")
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    importlib.invalidate_caches()
    with pytest.raises(UpstreamError, match=r"package no_such_engine has no file _C\*\.so"):
        upstream._load_library("no_such_engine", "_C*.so")
    (package / "_C.abi3.so").write_text("")
    upstream._load_library("no_such_engine", "_C*.so")
    assert loaded == [package / "_C.abi3.so"]


def test_a_call_is_repeated_on_other_tensors(install: Install) -> None:
    module = install("vllm")
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=64, head_size_v=64, dtype=torch.bfloat16, softmax_scale=0.125
    )
    batch = BatchMetadata.build([3, 40])
    plan = module.plan(spec, batch)

    def tensors() -> list[torch.Tensor]:
        return [torch.randn(45, n, 64).bfloat16() for n in (4, 2, 2, 4)]

    query, key, value, output = tensors()
    again = module.repeat(spec, plan, Call(query, None, output, key, value))
    query, key, value, output = tensors()
    before = output.clone()
    again(query, key, value, output)
    exact = reference.attention(spec, batch, query, key=key, value=value).output
    torch.testing.assert_close(output[:43].double(), exact, atol=2e-2, rtol=2e-2)
    assert torch.equal(output[43:], before[43:])
    shifted = torch.randn(45 * 4 * 64 + 1).bfloat16()[1:].view(45, 4, 64)
    with pytest.raises(BatchError, match=r"query has strides .* 2 past a multiple of 16"):
        again(shifted, key, value, output)


@pytest.mark.parametrize(
    ("head_size", "block_size", "features", "reason"),
    [
        (80, 144, (), "pages of a whole tile"),
        (96, 1008, (), "pages of a whole tile"),
        (80, 160, (), None),
        (128, 176, ("non_causal",), "pages of a whole tile"),
        (128, 176, (), None),
        (192, 112, (), "pages of a whole tile"),
        (192, 128, (), None),
        # the next multiples after those that the row names
        (80, 1152, (), "pages of a whole tile"),
        (192, 1120, (), "pages of a whole tile"),
    ],
)
def test_pages_of_a_whole_tile_as_engines_call_it(
    default: Registry, head_size: int, block_size: int, features: tuple[str, ...], reason: str | None
) -> None:
    request = AttentionRequest(
        head_size=head_size, block_size=block_size, features=frozenset({"batch_invariant", *features})
    )
    found = evaluate(request, h200("vllm"), default, "FLASH_ATTN/FA3-engine")
    told = [r.text for c in found.candidates for r in c.reasons]
    assert [text for text in told if "batch" in text] == [text for text in told if reason and reason in text]
    assert (found.chosen is None) == (reason is not None), told
