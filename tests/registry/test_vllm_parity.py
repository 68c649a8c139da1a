"""The vLLM registries against recorded decisions of vLLM's own selector: every choice, verdict and refused facet.

What is held for each backend that vLLM evaluated: accepted or refused alike; and, where refused,

- every facet that one of vLLM's reasons names is refused here too (`FACETS`);
- of every reason about a combination at least one facet is (`COMBINATIONS`);
- nothing else is refused here. After the facets vLLM reports only the first combination that fails, attnreg all of
  them: where vLLM reports one, further combinations are let pass.

That holds of what the order tries, of what was asked for by name, and of all other backends, those of other platforms
included: by name vLLM does not look at the platform. No row is left out.
"""

from __future__ import annotations

import gzip
import json
import re
from typing import Any

import pytest
import support

from attnreg import AttentionRequest, NoBackendError, Platform, Registry, Selection, load_registry, select
from attnreg.engines.vllm_requests import request_from_selector_row
from attnreg.errors import RequestError
from attnreg.selection.trace import Candidate

DATA = support.DATA / "vllm"
RELEASES = ("0.32.0", "0.31.0", "0.30.0", "0.28.0", "0.26.0", "0.24.0")
VERSIONS = ("0.33.0", *RELEASES, "0.20.0")
ROWS = {
    "0.33.0": 4172,
    "0.32.0": 715,
    "0.31.0": 700,
    "0.30.0": 740,
    "0.28.0": 700,
    "0.26.0": 700,
    "0.24.0": 700,
    "0.20.0": 1164,
}
# backends that vLLM was asked about beside those of the order: how many verdicts
VERDICTS = {"0.33.0": 16297, "0.20.0": 2338, **dict.fromkeys(RELEASES, 0)}

# a reason of vLLM's about one thing, and the facet or feature that it names
FACETS = {
    "head_size not supported": "head_size",
    "dtype not supported": "dtype",
    "kv_cache_dtype not supported": "kv_dtype",
    "block_size not supported": "block_size",
    "partial multimodal token full attention not supported": "mm_prefix",
    "MLA not supported": "attention",
    "non-MLA not supported": "attention",
    "sparse not supported": "attention",
    "non-sparse not supported": "attention",
    "attention sinks not supported": "sinks",
    "per-head quant scales not supported": "per_head_quant_scales",
    "compute capability not supported": "arch",
    "attention type encoder not supported": "attn_type",
    "attention type encoder_only not supported": "attn_type",
    "attention type encoder_decoder not supported": "attn_type",
    "sliding window not supported": "sliding_window",
    "R-SWA not supported": "rswa",
    "non-causal attention not supported": "non_causal",
    "batch invariance not supported": "batch_invariant",
    "KV connector not supported": "kv_connector",
    "PCP not supported": "pcp",
    "DCP not supported": "dcp",
    "device-cpu query lens mismatch not supported, this is needed for adaptive verification": "adaptive_verification",
    "no KV cache layout in common with TURBOQUANT": "kv_layout",
    "no KV cache layout in common with ULTRAQUANT": "kv_layout",
}
# how a reason about a combination begins, and what it is about
COMBINATIONS = {
    # FlashAttention
    "(FLASH_ATTN: )?sink not supported on compute capability": {"sinks", "arch"},
    "SM90 FP8 KV with mm_prefix": {"mm_prefix", "kv_dtype", "arch"},
    "(FLASH_ATTN: )?FP8 KV cache requires": {"kv_dtype", "arch", "head_size"},
    "mm_prefix .* requires FlashAttention v4": {"mm_prefix", "head_size"},
    "FLASH_ATTN: causal route requires": {"arch", "head_size"},
    # FlashInfer
    "(FLASHINFER: )?fa2 prefill misreads an NVFP4": {"kv_dtype", "head_size"},
    "(FLASHINFER: )?the sink prefill wrapper cannot read an NVFP4": {"kv_dtype", "sinks"},
    # MLA. An ordinary layer is refused for being none, and so not for this
    "non-causal MLA attention with DCP": {"non_causal", "dcp", "attention"},
    "non-causal fp16 MLA decode": {"non_causal", "dtype"},
    "FlashAttention MLA not supported on this device": {"arch"},
    "FlashMLA Dense is only supported": {"arch"},
    "FlashInfer MLA kernel requires qk_nope": {"qk_nope_head_dim"},
    "tokenspeed_mla requires DeepSeek R1": {"qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"},
    # sparse MLA
    "FlashMLA Sparse is only supported": {"arch"},
    "FLASHMLA_SPARSE supports head_size 512 only with": {"head_size", "kv_dtype", "arch"},
    "FLASHMLA_SPARSE supports head_size 512 only for": {"head_size", "qk_rope_head_dim"},
    "FLASHMLA_SPARSE only supports the nvfp4": {"kv_dtype", "arch"},
    "FlashMLA mega attention requires": {"arch"},
    "vllm._flashmla_C was built without": {"flags"},
    # built for NVIDIA GPUs
    "vllm._flashmla_C is not available": {"arch"},
    "FlashInfer MLA Sparse kernel requires qk_nope": {"qk_nope_head_dim"},
    "FlashInfer native no-rope MLA requires": {"qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim"},
    "FlashInfer MLA Sparse requires model with index_topk": {"index_topk"},
    "FLASHINFER_MLA_SPARSE SM10 does not support fp8_ds_mla": {"kv_dtype"},
    "FLASH_ATTN_MLA_SPARSE_FA4 SM10 does not support fp8_ds_mla": {"kv_dtype"},
    r"\w+ does not support combined PCP\+DCP": {"pcp", "dcp"},
    "FLASHINFER_MLA_SPARSE_SM90 requires FlashInfer": {"packages"},
    "FLASHINFER_MLA_SPARSE_SM90 requires sparse MLA": {"attention"},
    "FLASHINFER_MLA_SPARSE_SM90 requires kv_lora_rank": {"kv_lora_rank"},
    "FLASHINFER_MLA_SPARSE_SM90 requires qk_rope": {"qk_rope_head_dim"},
    "FLASHINFER_MLA_SPARSE_SM120 requires FlashInfer's": {"packages"},
    "FLASHINFER_MLA_SPARSE_SM120 requires": {"index_topk"},
    "FLASHINFER_MLA_SPARSE_DSV4 SM10x uses": {"kv_dtype", "arch"},
    "FLASHINFER_MLA_SPARSE_DSV4 requires SM10x": {"arch"},
    "FlashAttention MLA Sparse currently supports only FP16": {"kv_dtype"},
    "FlashAttention MLA Sparse does not support DCP": {"dcp"},
    "FlashAttention MLA Sparse requires model with index_topk": {"index_topk"},
    "FA4 unavailable": {"arch"},
    "FA4 sparse MLA runs its prefill batches on FlashInfer's": {"packages"},
    "FA4 sparse MLA requires index_topk": {"index_topk"},
    r"FA4 sparse MLA requires \(kv_lora_rank": {"kv_lora_rank", "qk_rope_head_dim"},
    "FA4 sparse MLA requires .* gathered query heads": {"gathered_heads"},
    # others
    "ROCM_SEGMENTED_ATTN requires AMD RDNA": {"arch"},
    "FP8 segmented attention requires gfx12": {"kv_dtype", "arch"},
    "Install the b12x backend": {"packages"},
    "IMPORT ModuleNotFoundError: No module named 'flashinfer'": {"packages"},
    "IMPORT ModuleNotFoundError: No module named 'aiter'": {"packages"},
    "tokenspeed_mla package is not installed": {"packages"},
    "b12x currently requires bfloat16": {"dtype"},
    "b12x does not support float16": {"kv_dtype"},
    "b12x currently supports only fp8": {"kv_dtype"},
    "b12x paged attention is not supported on the current device": {"arch"},
    # a tag that only vision towers may use
    "IMPORT ValueError: Backend TORCH_SDPA must be registered": {"role"},
    # vLLM's own code fails on a model without the dimension, and so refuses
    "EXC AttributeError: .* no attribute 'qk_nope_head_dim'": {"qk_nope_head_dim"},
    "EXC AttributeError: .* no attribute 'kv_lora_rank'": {"kv_lora_rank"},
}
_COMBINATIONS = [(re.compile(begin), facets) for begin, facets in COMBINATIONS.items()]
# ROCM_ATTN where the model, or a KV connector, keeps it out of the list: here the entry's `if` does not hold
_LEFT_OUT = ["(removed from list before validation)"]


@pytest.fixture(scope="module", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def registry(version: str) -> Registry:
    return load_registry(f"vllm-{version}").selector


@pytest.fixture(scope="module")
def rows(version: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / f"selector-{version}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def ask(row_in: dict[str, Any], registry: Registry, backend: str | None = None) -> Selection:
    request, platform = request_from_selector_row(row_in)
    try:
        return select(request, platform, registry, backend)
    except NoBackendError as e:
        return e.selection


def name_of(selection: Selection) -> str | None:
    return selection.backend.name if selection.backend else None


def named(reasons: list[str]) -> tuple[set[str], list[set[str]]]:
    """The facets that vLLM's reasons name, and those that its reasons about combinations are about."""
    facets, combinations = set(), []
    for i, text in enumerate(reasons):
        # the second time it is the answer of vLLM's check of combinations, after which it asks nothing more
        if text in reasons[:i]:
            combinations.append({FACETS[text]})
        elif text in FACETS:
            facets.add(FACETS[text])
        else:
            about = next((about for begin, about in _COMBINATIONS if begin.match(text)), None)
            assert about is not None, f"the tables of this test do not know vLLM's reason {text!r}"
            combinations.append(about)
    return facets, combinations


def refused(candidate: Candidate, registry: Registry) -> set[str]:
    """The facets that attnreg's reasons are about; of features, which."""
    rules = {rule.where: rule for v in registry.backends[candidate.name].variants for rule in v.rules}
    out: set[str] = set()
    for reason in candidate.reasons:
        out |= set(reason.facets)
        if reason.kind == "feature":
            out.add(str(reason.asked))
        elif reason.kind == "rule" and "features" in reason.facets:
            clauses = [c for c in rules[reason.where].when.clauses if c.facet == "features" and c.matcher.form == "all"]
            out |= {str(word) for c in clauses for word in c.matcher.mentions}
    return out - {"features"}


def disagreement(candidate: Candidate, reasons: list[str], registry: Registry) -> str:
    """How attnreg's verdict on a backend differs from vLLM's; empty where it does not."""
    if candidate.accepted != (not reasons):
        return f"vLLM says {reasons or 'accepted'}, attnreg {[r.text for r in candidate.reasons] or 'accepted'}"
    facets, combinations = named(reasons)
    here = refused(candidate, registry)
    if facets != {"kv_layout"}:
        # vLLM looks at the layout only where nothing else speaks against a backend
        here.discard("kv_layout")
    expected = facets.union(*combinations)
    more = here - expected if not combinations else set()
    if facets - here or more or not all(about & here for about in combinations):
        return f"vLLM refuses {sorted(expected)} ({reasons}), attnreg {sorted(here)}"
    return ""


def test_every_row_is_there(rows: list[dict[str, Any]], version: str) -> None:
    assert len(rows) == ROWS[version]


def test_the_same_backend_is_chosen(rows: list[dict[str, Any]], registry: Registry) -> None:
    automatic = [row for row in rows if row["in"]["requested_backend"] is None]
    wrong = [
        (row["id"], row["out"]["chosen"], name)
        for row in automatic
        if (name := name_of(ask(row["in"], registry))) != row["out"]["chosen"]
    ]
    assert not wrong


def test_every_candidate_has_the_same_verdict(rows: list[dict[str, Any]], registry: Registry) -> None:
    wrong = []
    for row in rows:
        listed = {c["backend"]: c["reasons"] for c in row["out"]["candidates"] if c["reasons"] != _LEFT_OUT}
        selection = ask(row["in"], registry)
        considered = [c for c in selection.candidates if not any(r.kind == "order" for r in c.reasons)]
        if [c.name for c in considered] != list(listed):
            wrong.append((row["id"], list(listed), [c.name for c in considered]))
            continue
        differences = {c.title: disagreement(c, listed[c.name], registry) for c in considered}
        wrong += [(row["id"], title, difference) for title, difference in differences.items() if difference]
    assert not wrong


def test_a_request_by_name_ends_alike(rows: list[dict[str, Any]], registry: Registry) -> None:
    wrong = []
    for row in rows:
        asked, granted, reasons = (
            row["in"]["requested_backend"],
            row["out"]["chosen"],
            row["out"].get("requested_reasons"),
        )
        if asked is None:
            continue
        if asked not in registry.backends:
            # CUSTOM and NO_ATTENTION: names without a backend
            assert granted is None
            with pytest.raises(RequestError):
                ask(row["in"], registry, asked)
            continue
        selection = ask(row["in"], registry, asked)
        name, gave_way = name_of(selection), selection.requested is None
        # a backend that gave way to the order may still be what the order chooses
        if name != granted or (granted not in (None, asked) and not gave_way):
            wrong.append((row["id"], asked, f"vLLM gives {granted} ({reasons}), attnreg {name}"))
        elif not gave_way:
            wrong += [(row["id"], asked, d) for d in [disagreement(selection.candidates[0], reasons, registry)] if d]
    assert not wrong


def test_every_backend_has_the_same_verdict(rows: list[dict[str, Any]], registry: Registry, version: str) -> None:
    wrong, count = [], 0
    for row in rows:
        for name, reasons in (row["out"].get("all_backends") or {}).items():
            selection = ask(row["in"], registry, name)
            if selection.requested is None:
                # it gave way to the order, so it was refused
                assert reasons == ["kv_cache_dtype not supported"]
                continue
            count += 1
            difference = disagreement(selection.candidates[0], reasons, registry)
            if difference:
                wrong.append((row["id"], name, difference))
    assert not wrong
    assert count == VERDICTS[version]


@pytest.mark.parametrize("release", RELEASES)
def test_a_backend_can_be_asked_for_where_vllm_knows_its_name(release: str) -> None:
    names = json.loads((DATA / "names.json").read_text())[release]
    backends = load_registry(f"vllm-{release}").backends.values()
    # those for prompts of MLA have a list of their own; two names stand for no backend
    decoding = {b.name for b in backends if not all(".mla.prefill." in (v.module or "") for v in b.variants)}
    assert decoding == set(names) - {"CUSTOM", "NO_ATTENTION"}


# what is not in the samples ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def latest() -> Registry:
    return load_registry("vllm-0.33.0").selector


ROW = {"platform": "cpu", "arch": "x86_64", "head_size": 128, "dtype": "bfloat16", "kv_cache_dtype": "auto"}
XPU = {"platform": "xpu", "arch": "xe2"}
HARDLY_CHECKED = [
    ("processors check the KV dtype alone", {"head_size": 65, "has_sink": True}, "CPU_ATTN"),
    ("fp8 needs AVX-512 there", {"kv_cache_dtype": "fp8"}, None),
    ("fp8 with AVX-512", {"kv_cache_dtype": "fp8", "arch": "x86_64_avx512"}, "CPU_ATTN"),
    ("MLA on processors", {"use_mla": True, "head_size": 576}, "CPU_MLA"),
    ("MLA with AMX", {"use_mla": True, "head_size": 576, "arch": None, "amx": True}, "AMX_MLA"),
    ("sparse layers on processors", {"use_sparse": True}, None),
    ("Intel GPUs check nothing", {**XPU, "head_size": 65, "has_sink": True}, "FLASH_ATTN"),
    ("float32 there", {**XPU, "dtype": "float32"}, "TRITON_ATTN"),
    ("turboquant there, even for MLA", {**XPU, "use_mla": True, "kv_cache_dtype": "turboquant_k8v4"}, "TURBOQUANT"),
    ("sparse layers there", {**XPU, "use_sparse": True}, "XPU_MLA_SPARSE"),
    ("mm_prefix there", {**XPU, "head_size": 256, "use_mm_prefix": True}, "TRITON_FLASH_ATTN"),
    ("MLA there is checked", {**XPU, "use_mla": True, "head_size": 576}, "FLASH_ATTN_MLA"),
    ("MLA there falls back unchecked", {**XPU, "use_mla": True, "head_size": 512}, "TRITON_MLA"),
]


@pytest.mark.parametrize(("change", "backend"), [c[1:] for c in HARDLY_CHECKED], ids=[c[0] for c in HARDLY_CHECKED])
def test_where_vllm_hardly_checks(latest: Registry, change: dict[str, Any], backend: str | None) -> None:
    assert name_of(ask({**ROW, **change}, latest)) == backend


def test_what_is_not_checked_is_said(latest: Registry) -> None:
    selection = ask({**ROW, "head_size": 65, "has_sink": True}, latest)
    assert any("does not test" in warning and "sinks" in warning for warning in selection.warnings)


def test_by_name_the_platform_is_not_looked_at_and_that_is_said(latest: Registry) -> None:
    row = {**ROW, "platform": "rocm", "arch": "gfx942", "use_mla": True, "use_sparse": True, "head_size": 576}
    assert name_of(ask(row, latest)) == "ROCM_AITER_MLA_SPARSE"
    selection = ask(row, latest, "FLASHMLA_SPARSE")
    assert name_of(selection) == "FLASHMLA_SPARSE"
    [warning] = selection.warnings
    assert warning.startswith(
        "platform is rocm, and FLASHMLA_SPARSE is for cuda: vLLM does not check the platform of a"
    )
    # the class is asked for a compute capability of 9 or 10, which CDNA has and RDNA has not
    assert name_of(ask({**row, "arch": "gfx1201"}, latest, "FLASHMLA_SPARSE")) is None
    # where vLLM looks: on processors; on Intel GPUs it has one backend for sparse layers, and does not look at the name
    assert name_of(ask({**row, "platform": "cpu", "arch": "x86_64"}, latest, "FLASHMLA_SPARSE")) is None
    assert name_of(ask({**row, "platform": "xpu", "arch": "xe2"}, latest, "FLASHMLA_SPARSE")) == "XPU_MLA_SPARSE"


@pytest.mark.parametrize(
    ("backend", "change", "chosen"),
    [
        (None, {}, "ROCM_ATTN"),
        # asked for its layout, it gives way; the order, which does not ask, comes back to it
        ("ROCM_ATTN", {}, "ROCM_ATTN"),
        ("ROCM_SEGMENTED_ATTN", {"arch": "gfx1100"}, "ROCM_ATTN"),
        ("FLASH_ATTN", {}, "FLASH_ATTN"),
        ("ULTRAQUANT", {"kv_cache_dtype": "ultraquant_4bit"}, "ULTRAQUANT"),
    ],
)
def test_only_by_name_a_backend_is_asked_for_ultraquants_layout(
    latest: Registry, backend: str | None, change: dict[str, Any], chosen: str
) -> None:
    row = {**ROW, "platform": "rocm", "arch": "gfx942", "run_kv_cache_dtype": "ultraquant_4bit", **change}
    selection = ask(row, latest, backend)
    assert name_of(selection) == chosen
    gave_way = backend is not None and selection.requested is None
    assert gave_way == (backend in ("ROCM_ATTN", "ROCM_SEGMENTED_ATTN"))
    if gave_way:
        assert "layout LBNHC" in selection.warnings[0]


OUTSIDE = [
    ("cuda", "sm75", {"role": "vision"}, "TORCH_SDPA"),
    ("cuda", "sm90", {"role": "vision"}, "FLASH_ATTN"),
    ("cuda", "sm90", {"role": "vision", "dtype": "float32"}, "TRITON_ATTN"),
    ("cuda", "sm90", {"role": "vision", "head_size": 16, "dtype": "float32"}, "TORCH_SDPA"),
    ("rocm", "gfx1100", {"role": "vision"}, "TORCH_SDPA"),
    ("cpu", "x86_64", {"role": "vision"}, "TORCH_SDPA"),
    ("cuda", "sm90", {"phase": "prefill", "qk_nope_head_dim": 128, "v_head_dim": 128}, "FLASH_ATTN_PREFILL"),
    ("cuda", "sm100", {"phase": "prefill", "qk_nope_head_dim": 192, "v_head_dim": 256}, "TRTLLM_RAGGED"),
    ("cuda", "sm100", {"phase": "prefill", "qk_nope_head_dim": 448, "v_head_dim": 512}, None),
    ("xpu", "xe2", {"phase": "prefill", "qk_nope_head_dim": 448, "v_head_dim": 512}, "FLASH_ATTN_PREFILL"),
]


@pytest.mark.parametrize(("platform", "arch", "fields", "backend"), OUTSIDE)
def test_vision_towers_and_prompts_of_mla(
    latest: Registry, platform: str, arch: str, fields: dict[str, Any], backend: str | None
) -> None:
    base = {"attention": "mla", "model": "deepseek", "qk_rope_head_dim": 64} if "phase" in fields else {}
    request = AttentionRequest(**{"head_size": 80, **base, **fields})
    try:
        selection = select(request, Platform(platform=platform, arch=arch), latest)
    except NoBackendError as e:
        selection = e.selection
    assert name_of(selection) == backend


def test_nonsense_in_a_config_is_no_error(latest: Registry) -> None:
    row = {**ROW, "platform": "cuda", "arch": "sm90", "use_mla": True, "use_sparse": True, "head_size": 512}
    row["model"] = {
        "num_heads": 7,
        "num_kv_heads": 2,
        "hf": {"kv_lora_rank": -24, "qk_rope_head_dim": -1, "index_topk": 0},
    }
    request, _ = request_from_selector_row(row)
    assert (request.kv_lora_rank, request.qk_rope_head_dim, request.index_topk) == (1, 1, 1)
    sm90 = next(c for c in ask(row, latest).candidates if c.name == "FLASHINFER_MLA_SPARSE_SM90")
    assert {f for r in sm90.reasons for f in r.facets} == {"kv_lora_rank", "qk_rope_head_dim"}


def test_a_missing_aiter_is_no_package_of_the_platform(latest: Registry) -> None:
    row = {**ROW, "platform": "rocm", "arch": "gfx942", "aiter": "pkg_missing"}
    _, platform = request_from_selector_row(row)
    known = set(latest.vocabulary.packages)
    assert platform.packages is not None
    assert {name for name, _ in platform.packages} < known - {"aiter"}


@pytest.mark.parametrize("release", ["0.33.0", *RELEASES])
def test_the_words_for_a_cache_are_those_of_the_release(release: str) -> None:
    """`CacheDType` of vllm/config/cache.py, as it was read in each release: vLLM refuses every other word."""
    words = json.loads((DATA / "kv_dtypes.json").read_text())[release]
    assert sorted(load_registry(f"vllm-{release}", plugins=()).vocabulary.words["kv_dtypes"]) == words
