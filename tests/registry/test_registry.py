"""The shipped data: its order, its sources, nothing dead in it, and what it has in common with the field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
import yaml
from support import ROOT
from support.suite.examples import some

from attnreg import Registry, bundled_registries, load_registry
from attnreg.analysis.check.findings import check
from attnreg.compile.inputs.bundled import bundled_registries as whole

FIELD: dict[str, dict[str, Any]] = json.loads((ROOT / "tests/data/vllm_facts_sample.json").read_text())


# the rows of a release that is a difference to another stand in two files
@pytest.mark.parametrize("name", whole(releases=False))
def test_rows_stand_in_the_order_of_their_names(name: str) -> None:
    lines = {row.where.line: row.name for row in load_registry(name).backends.values()}
    assert [lines[line] for line in sorted(lines)] == sorted(lines.values())


def test_features_stand_in_the_order_of_their_names(default: Registry) -> None:
    words = [word.where.line for _, word in sorted(default.vocabulary.features.items())]
    assert words == sorted(words)


def sources(registry: Registry) -> Iterator[tuple[str, str | None]]:
    for row in registry.backends.values():
        yield row.name, row.source
        for variant in row.variants:
            yield f"{row.name}/{variant.name}", variant.source
            yield from ((f"{row.name}: {rule.reject}", rule.source) for rule in variant.rules)
    yield from ((order.title, order.source) for orders in registry.orders.values() for order in orders)


@pytest.mark.slow(reason="it decides whole registries")
@pytest.mark.parametrize("name", some([name for name in bundled_registries() if name != "default"], 3))
def test_a_table_has_no_finding(name: str) -> None:
    assert [f"{finding.where}: {finding.title}" for finding in check(load_registry(name)) if not finding.is_note] == []


@pytest.mark.parametrize("name", bundled_registries())
def test_every_source_is_pinned_and_names_a_symbol(name: str) -> None:
    registry = load_registry(name)
    for what, source in sources(registry):
        if source is not None:
            found = re.fullmatch(r"([\w.-]+):([^#\s]+)(#\S+)?", source)
            assert found, f"{what}: {source}"
            assert found[1] in registry.sources, f"{what}: {source}"
            # a line number would not outlive the next release
            assert not re.search(r":\d+$", source), f"{what}: {source}"
    for source in registry.sources.values():
        # attnreg's own modules are in this tree
        assert source.url.startswith("https://") or (source.name, source.url) == ("attnreg", ".")
        assert source.version
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", source.read or "")


def test_other_readers_take_every_file() -> None:
    """PyYAML refuses an anchor that stands twice in a file, which attnreg's own reader takes."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    files = sorted((ROOT / "registry").rglob("*.yaml"))
    assert len(files) > 60
    assert all(yaml.load(file.read_bytes(), loader) is not None for file in files)


def test_every_judgement_says_why(default: Registry) -> None:
    assert [o.title for orders in default.orders.values() for o in orders if not o.because] == []
    assert [r.name for r in default.backends.values() if not r.summary.endswith(".")] == []


def test_no_module_is_a_placeholder(default: Registry) -> None:
    modules = {row.name: row.module for row in default.backends.values() if row.module}
    missing = [n for n, m in modules.items() if not (ROOT / f"{m.replace('.', '/')}.py").exists()]
    assert missing == []


def test_what_users_rely_on_is_stated(default: Registry) -> None:
    says = {i.name: i.says for i in default.invariants}
    assert says["turboquant-cache"] == "a turboquant_* cache goes to TURBOQUANT or to nobody"
    assert says["sinks-natively"].startswith("a request with sinks goes to ROCM_ATTN only where no candidate serves")
    assert says["non-causal-unified"].startswith("a non-causal request never goes to ROCM_AITER_UNIFIED_ATTN")
    assert says["plain-decoder"].endswith("finds a backend on every architecture")


# the field -----------------------------------------------------------------------------------------------------------

# rows of the field that are variants of one row here
TOGETHER = {
    "CPU_MLA": ("CPU_MLA", "AMX_MLA"),
    "FLASHINFER_MLA_SPARSE": (
        "FLASHINFER_MLA_SPARSE",
        "FLASHINFER_MLA_SPARSE_SM90",
        "FLASHINFER_MLA_SPARSE_SM120",
    ),
    "FLASH_ATTN_MLA": ("FLASH_ATTN_MLA", "XPUFlashAttnMLABackend"),
}
# attnreg's own kernels behind the field's names: what these serve is no statement about the field's backends
OWN = {"CPU_ATTN", "FLEX_ATTENTION", "ROCM_ATTN", "TORCH_MLA", "TORCH_SDPA", "TRITON_ATTN", "TRITON_MLA", "TURBOQUANT"}
# what the field's selector does not ask about
UNASKED = {"alibi", "lse", "softcap"}
PROBES = {"head_sizes": range(1, 1100), "block_sizes": range(1, 1100)}

# Where this registry means to differ; an entry that no longer does fails the test. Row and claim: what only this
# registry accepts, what only the field accepts, and why.
INTENDED: dict[tuple[str, str], tuple[set[Any], set[Any], str]] = {
    ("CPU_MLA", "features"): (
        set(),
        {"adaptive_verification", "kv_connector"},
        "the field's default answers: nobody has tried either with these kernels",
    ),
    ("CUTLASS_MLA", "head_sizes"): (
        set(),
        {320, 512},
        "the field answers for all its MLA classes at once; this one's call asserts a latent of 512 + 64",
    ),
    ("FLASHINFER", "kv_dtypes"): (
        set(),
        {"nvfp4_ds_mla"},
        "a fault of the field: a test for the prefix nvfp4 takes DeepSeek's latent for that format",
    ),
    ("FLASHMLA", "head_sizes"): (
        set(),
        {320},
        "the same: FlashMLA's kernels check that keys are 512 or 576 wide, and values 512",
    ),
    ("ROCM_AITER_FA", "attn_types"): (
        {"encoder", "encoder_only"},
        set(),
        "vision towers are a variant here and a list of their own in the field",
    ),
    ("ROCM_AITER_FA", "head_sizes"): (
        set(range(8, 257, 8)) - {64, 128, 256},
        set(),
        "the same: the kernel for vision towers takes every multiple of 8",
    ),
    ("ROCM_AITER_FA", "kv_dtypes"): (
        set(),
        {"fp8_e5m2"},
        "a fault of the field: it reads such a cache as e4m3, and aiter's paged kernel knows no other",
    ),
    ("ROCM_AITER_MLA", "kv_dtypes"): (
        set(),
        {"float16", "fp8_e5m2"},
        "aiter's kernels for MLA are for bfloat16 and e4m3",
    ),
    ("ROCM_AITER_MLA", "head_sizes"): (
        set(),
        set(PROBES["head_sizes"]) - {576},
        "aiter's kernels for MLA are compiled for DeepSeek's latent, and are told no width",
    ),
    ("ROCM_AITER_UNIFIED_ATTN", "kv_dtypes"): (
        set(),
        {"fp8_e5m2"},
        "a fault of the field: it reads such a cache as e4m3",
    ),
    ("FLASH_ATTN", "features"): (
        {"fp8_query", "mm_prefix_in_window"},
        set(),
        "vLLM's layers make fp8 queries, and set where ranges end, without asking; the kernels serve both",
    ),
}


def field_says(name: str, key: str, value: Any) -> bool:
    tests = [test for row in TOGETHER.get(name, (name,)) for test in FIELD[row][key]]
    return any(_passes(test, value) for test in tests)


def _passes(test: Any, value: Any) -> bool:
    if test is True:
        return True
    if isinstance(test, dict):
        low, high, step = test.get("min", 1), test.get("max", value), test.get("multiple_of", 1)
        return low <= value <= high and value % step == 0
    return fnmatchcase(value, test) if isinstance(test, str) and value is not None else test == value


def differences(registry: Registry) -> dict[tuple[str, str], tuple[set[Any], set[Any]]]:
    """For each row and claim: what only this registry accepts in some case, and what only the field accepts."""
    out = {}
    shared = [row for row in registry.backends.values() if row.name in FIELD and row.name not in OWN]
    for row in shared:
        for key, facet in registry.vocabulary.claims.items():
            if key not in FIELD[row.name]:
                continue
            values = PROBES.get(key, sorted(facet.words))
            claims = [[c.matcher for c in v.claims if c.key == key] for v in row.variants]
            ours = {v for v in values if any(all(m.matches(v) for m in matchers) for matchers in claims)}
            theirs = {v for v in values if field_says(row.name, key, v)}
            out[row.name, key] = ours - theirs, theirs - ours
        ours = {f for v in row.variants for f in v.features} - UNASKED
        theirs = {f for name in TOGETHER.get(row.name, (row.name,)) for f in FIELD[name]["features"]}
        out[row.name, "features"] = ours - theirs, theirs - ours
        platforms = {p for name in TOGETHER.get(row.name, (row.name,)) for p in FIELD[name]["platforms"]}
        out[row.name, "platforms"] = set(row.platforms) - platforms, platforms - set(row.platforms)
    return {where: both for where, both in out.items() if any(both)}


def test_what_is_shared_with_the_field_agrees_but_for_a_few_intended_differences(default: Registry) -> None:
    assert differences(default) == {where: entry[:2] for where, entry in INTENDED.items()}
    assert len(INTENDED) == 11


def test_the_field_is_compared_with_every_row_that_both_have(default: Registry) -> None:
    listed = {name for row in default.backends for name in TOGETHER.get(row, (row,))}
    assert set(FIELD) <= listed
    assert len(set(FIELD) & set(default.backends) - OWN) == 14
    # what is left out is run from here, from nothing of the field's
    own = [default.backends[name] for name in sorted(OWN)]
    assert [r.name for r in own if not r.module or r.source.startswith("vllm")] == []
