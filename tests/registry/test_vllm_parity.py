"""The vLLM registries against recorded decisions of vLLM's own selector: every choice, verdict and refused facet.

`support.selector_parity` says what is held of a row: of what the order tries, of what was asked for by name, and of all
other backends, those of other platforms included. By name vLLM does not look at the platform. No row is left out.
"""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
import support
from support.selector_parity import ask, differences, disagreement, name_of

from attnreg import AttentionRequest, NoBackendError, Platform, Registry, load_registry, select
from attnreg.engines.vllm_requests import request_from_selector_row

DATA = support.DATA / "vllm"
RELEASES = (*(f"0.{minor}.0" for minor in range(32, 20, -1)), "0.22.1")
VERSIONS = ("0.33.0", *RELEASES, "0.20.0")
ROWS = {
    "0.33.0": 4172,
    "0.32.0": 715,
    "0.31.0": 700,
    "0.30.0": 740,
    "0.29.0": 1507,
    "0.28.0": 700,
    "0.27.0": 277,
    "0.26.0": 700,
    "0.25.0": 230,
    "0.24.0": 700,
    "0.23.0": 285,
    "0.22.1": 279,
    "0.22.0": 271,
    "0.21.0": 283,
    "0.20.0": 1164,
}
# backends that vLLM was asked about beside those of the order: how many verdicts
VERDICTS = {"0.33.0": 16297, "0.20.0": 2314, **dict.fromkeys(RELEASES, 0)}

# backends that take heads of more than 256 only where FlashAttention 4 can be imported
WIDE = ("FLASH_ATTN", "FLASH_ATTN_DIFFKV")


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


def test_every_row_is_there(rows: list[dict[str, Any]], version: str) -> None:
    assert len(rows) == ROWS[version]


@pytest.mark.slow(reason="the recorded decisions once more, row by row")
def test_each_row_is_decided_alike(rows: list[dict[str, Any]], registry: Registry) -> None:
    wrong = [(row["in"].get("id"), text) for row in rows for text in differences(row, registry)]
    assert not wrong


def test_every_backend_has_the_same_verdict(rows: list[dict[str, Any]], registry: Registry, version: str) -> None:
    wrong, count = [], 0
    for row in rows:
        for name, reasons in (row["out"].get("all_backends") or {}).items():
            # these rows were recorded with the Python of FlashAttention 4, which builds for AMD GPUs lack
            if (
                version == "0.20.0"
                and row["in"]["platform"] == "rocm"
                and name in WIDE
                and row["in"]["head_size"] > 256
            ):
                continue
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
