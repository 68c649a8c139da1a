"""The layout of a run: what all backends read, what the user or the connector wishes, and the facts that conflict."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

import attnreg
from attnreg.planning.layout import agree_layout
from attnreg.planning.run import Agreed, CacheShape, RunGroup
from attnreg.selection.selector import evaluate

GQA = {"head_size": 128, "num_heads": 32, "num_kv_heads": 8}
SPARSE = {
    "attention": "mla_sparse",
    "head_size": 576,
    "head_size_v": 512,
    "num_heads": 128,
    "num_kv_heads": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_topk": 2048,
}


@functools.cache
def registry(release: str = "0.33.0") -> attnreg.Registry:
    return attnreg.load_registry(f"vllm-{release}", plugins=())


def group(
    arch: str, backend: str | None = None, label: str = "all", release: str = "0.33.0", **facets: Any
) -> RunGroup:
    """Layers on an architecture, with the backend that vLLM takes or that is named."""
    shapes, kind = facets.pop("shapes", None), facets.pop("kind", "full")
    request = attnreg.AttentionRequest(**{**GQA, **facets})
    of = registry(release)
    flags = {"aiter", "aiter_mha", "aiter_mla"} if arch.startswith("gfx9") else ()
    platform = attnreg.Platform(platform=of.vocabulary.architectures[arch].platform, arch=arch, flags=flags)
    return RunGroup(label, request.role, (0,), evaluate(request, platform, of, backend), request, kind, shapes)


def agreed(*groups: RunGroup, release: str = "0.33.0", **wishes: Any) -> Agreed:
    return agree_layout(groups, registry(release).layout, **wishes)


STATE = RunGroup("states", "target", (1,), None, None, "mamba")


@pytest.mark.parametrize(
    ("groups", "wishes", "value"),
    [
        # no backend states an order, so vLLM's is taken
        ([("sm90", None)], {}, "LBNHC"),
        ([("sm100", "FLASHINFER")], {}, "LBHNC"),
        ([("sm90", "FLEX_ATTENTION")], {}, "LBNHC"),
        ([("sm120", "B12X")], {}, "LBHNC"),
        ([("gfx942", "ROCM_ATTN")], {}, "LHBNC"),
        # each prefers another one: of equal votes the first of vLLM's own order counts
        ([("gfx942", "ROCM_AITER_UNIFIED_ATTN"), ("gfx942", "ROCM_ATTN")], {}, "LBHNC"),
        ([("sm90", None)], {"asked": "HND"}, "LBHNC"),
        ([("sm90", None)], {"asked": "BLHNC"}, "BLHNC"),
        ([("sm90", None)], {"connector": "HND"}, "LBHNC"),
        # the user's wish comes before the connector's
        ([("sm90", None)], {"asked": "NHD", "connector": "HND"}, "LBNHC"),
    ],
)
def test_a_run_has_one_layout(groups: list[tuple[str, str | None]], wishes: dict[str, str], value: str) -> None:
    found = agreed(*(group(*given) for given in groups), **wishes)
    assert (found.value, found.conflict, found.dropped) == (value, None, ())
    assert found.where is not None


def test_the_facts_of_a_conflict_are_the_fewest() -> None:
    groups = [
        group("gfx942", "TRITON_ATTN", "first"),
        group("gfx942", "FLEX_ATTENTION", "target"),
        group("gfx942", "ROCM_ATTN", "draft", role="draft"),
    ]
    found = agreed(*groups)
    assert found.value is None
    assert found.conflict is not None
    assert found.text == "no layout of the KV cache is read by every backend"
    facts = [(fact.group, fact.sentence) for fact in found.conflict.facts]
    assert facts == [("target", "FLEX_ATTENTION reads LBNHC"), ("draft", "ROCM_ATTN reads LHBNC or LBHNC")]
    # without one of the two the run has a layout
    assert agreed(*groups[:2]).value == "LBNHC"
    # two slots for heads are another shape than eight heads, so that the layout has to be compact
    assert agreed(groups[0], groups[2]).value == "LBHNC"
    assert agreed(groups[2]).value == "LHBNC"
    assert found.to_dict()["conflict"]["facts"][0]["where"].startswith("registry/engines/vllm-0.33.0/backends.yaml:")


def test_blocks_of_several_shapes_need_a_compact_layout() -> None:
    wide, narrow = group("gfx942", "ROCM_ATTN", "wide"), group("gfx942", "ROCM_ATTN", "narrow", head_size=64)
    assert agreed(wide).value == "LHBNC"
    assert agreed(wide, narrow).value == "LBHNC"
    # two slots of half as many heads, twice as wide, are the same block
    half = group("gfx942", "ROCM_ATTN", "half", head_size=64, num_heads=32, num_kv_heads=16)
    assert agreed(wide, half).value == "LHBNC"
    assert agreed(wide, STATE).value == "LBHNC"
    found = agreed(wide, narrow, asked="LHBNC")
    assert found.conflict is not None
    assert [fact.sentence for fact in found.conflict.facts] == [
        "VLLM_KV_CACHE_LAYOUT asks for LHBNC",
        "ROCM_ATTN keeps blocks of 2 slots of 8 heads of 128",
        "ROCM_ATTN keeps blocks of 2 slots of 8 heads of 64",
    ]


def test_blocks_whose_shapes_are_not_known_are_said_so() -> None:
    # the block of a packed cache may be as large as one of a plain cache
    wide = group("gfx942", "ROCM_ATTN", "wide")
    packed = group("gfx942", "ROCM_ATTN", "packed", kv_dtype="fp8")
    assert agreed(wide, packed).value is None
    assert agreed(wide, packed).conflict is None
    assert agreed(wide, packed).text.endswith("whether the blocks of all layers have one shape is not known")
    known = [g._replace(shapes=(CacheShape(8, 16, 1 << 16),)) for g in (wide, packed)]
    assert agreed(*known).value == "LHBNC"
    # where the preferred layout is compact anyway, the shapes do not matter
    assert agreed(group("sm90", None, "a"), group("sm90", None, "b", kv_dtype="fp8")).value == "LBNHC"


def test_an_indexer_keeps_a_cache_of_another_shape() -> None:
    sparse = group("gfx942", "ROCM_AITER_MLA_SPARSE", **SPARSE)
    assert agreed(sparse).value == "LBNHC"
    found = agreed(group("sm90", None, **SPARSE), asked="LHBNC")
    assert found.conflict is not None
    assert any("DEEPSEEK_V32_INDEXER" in fact.sentence for fact in found.conflict.facts)


def test_a_wish_that_some_backend_cannot_read_stops_the_engine_or_is_dropped() -> None:
    found = agreed(group("sm100", "FLASHINFER"), asked="NHD")
    assert found.conflict is not None
    assert [fact.sentence for fact in found.conflict.facts] == [
        "VLLM_KV_CACHE_LAYOUT asks for LBNHC", "FLASHINFER reads LBHNC or BLHNC"
    ]  # fmt: skip
    found = agreed(group("sm100", "FLEX_ATTENTION"), connector="HND")
    assert (found.value, found.conflict) == ("LBNHC", None)
    assert found.dropped == ("the KV connector wishes LBHNC, which is dropped: LBNHC can be read",)
    with pytest.raises(ValueError, match="HDN is no layout of the KV cache; known: LBHNC"):
        agreed(group("sm90"), asked="HDN")


@pytest.mark.parametrize("release", ["0.24.0", "0.26.0", "0.28.0"])
def test_before_030_a_backend_imposes_its_layout(release: str) -> None:
    plain = group("sm90", "FLASH_ATTN", release=release)
    assert agreed(plain, release=release).value == "NHD"
    assert agreed(plain, release=release, asked="HND").value == "HND"
    assert agreed(plain, release=release, connector="HND").value == "HND"
    head = group("sm100", "FLASHINFER", release=release)
    assert agreed(head, release=release).value == "HND"
    found = agreed(head, release=release, asked="NHD")
    assert (found.value, found.conflict) == ("HND", None)
    assert found.dropped == ("VLLM_KV_CACHE_LAYOUT asks for NHD, which FLASHINFER overrides",)


def test_what_is_not_known_is_said() -> None:
    assert agree_layout([group("sm90")], None).text == "this table has no rules for the layout of a run"
    refused = group("sm90", "ROCM_ATTN", "target", head_size=129)
    assert agreed(refused).text == "no backend is known for target"
    # towers keep no cache
    assert agreed(group("sm90"), group("sm90", None, "tower", role="vision", attn_type="encoder")).value == "LBNHC"
    ranks = group("sm90", None, "draft", role="draft", features={"dcp"})
    assert agreed(group("sm90", features={"dcp"}), ranks).value is None
    silent = group("sm90")
    assert silent.selection is not None
    assert silent.selection.variant is not None
    rows = {
        name: dataclasses.replace(
            row, variants=tuple(dataclasses.replace(variant, consequences=()) for variant in row.variants)
        )
        for name, row in registry().backends.items()
    }
    bare = dataclasses.replace(registry(), backends=rows)
    asked = evaluate(silent.selection.request, silent.selection.platform, bare)
    found = agreed(silent._replace(selection=asked))
    assert found.text == "the layouts that FLASH_ATTN/FA3-4 reads are not known"
