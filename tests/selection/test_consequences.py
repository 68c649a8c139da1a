"""What follows from a choice: said beside the answer, and never a part of the decision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.registries.asking import BASE, at

import attnreg
from attnreg import AttentionRequest, Platform, Registry, Selection
from attnreg.language.engine.pages import KernelBlocks
from attnreg.selection.consequences import consequence_words
from attnreg.selection.selector import evaluate


@pytest.fixture(scope="module")
def vllm() -> Registry:
    return attnreg.load_registry("vllm-0.33.0")


def asked(registry: Registry, where: str, backend: str | None = None, **fields: Any) -> Selection:
    request = AttentionRequest(**{**BASE, **fields})
    return evaluate(request, at(where, registry), registry, backend)


def said(selection: Selection) -> list[tuple[str, str]]:
    return [(follows.kind, follows.text) for follows in selection.consequences]


LATE = {
    "below SM 8.9": ("sm86", "TRITON_ATTN", {"kv_dtype": "fp8"}, "read an fp8 cache from SM 8.9"),
    "an fp8 cache with scales by token": (
        "sm80",
        "TRITON_ATTN",
        {"kv_dtype": "fp8_per_token_head"},
        "read an fp8 cache from SM 8.9",
    ),
    "bfloat16 before Ampere": (
        "sm75",
        "TRITON_ATTN",
        {"kv_dtype": "bfloat16", "dtype": "float16", "role": "draft"},
        "needs SM 8.0",
    ),
    "fp8_e5m2 on Hopper": ("sm90", "TRITON_ATTN", {"kv_dtype": "fp8_e5m2"}, "stops at an assertion"),
    "fp8_e5m2 on CDNA 3": ("gfx942", "TRITON_ATTN", {"kv_dtype": "fp8_e5m2"}, "stops at an assertion"),
    "MLA": (
        "sm80",
        "TRITON_MLA",
        {"kv_dtype": "fp8", "attention": "mla", "head_size": 576, "num_kv_heads": 1},
        "read an fp8 cache from SM 8.9",
    ),
    "ALiBi on Hopper": (
        "sm90",
        "FLASH_ATTN",
        {"kv_dtype": "fp8", "features": {"alibi"}},
        "falls back to FlashAttention 2",
    ),
    "a softcap": ("sm90", "FLEX_ATTENTION", {"features": {"softcap"}}, "takes neither ALiBi nor a softcap"),
    "a page that no block divides": (
        "xe2",
        None,
        {"block_size": 16},
        "the kernel reads blocks of multiples of 64 tokens, and none divides a page of 16",
    ),
}


@pytest.mark.parametrize(("where", "backend", "fields", "text"), LATE.values(), ids=LATE)
def test_a_choice_that_then_fails_says_so(
    where: str, backend: str | None, fields: dict[str, Any], text: str, vllm: Registry
) -> None:
    selection = asked(vllm, where, backend, **fields)
    assert selection.backend is not None
    assert selection.fails
    (warning,) = [w for w in selection.warnings if "and then fails" in w]
    assert text in warning
    assert f"backends.yaml:{selection.consequences[0].where.line}" in warning
    assert warning in str(selection)


@pytest.mark.parametrize(
    ("where", "kv_dtype"), [("sm89", "fp8"), ("sm90", "fp8_e4m3"), ("gfx90a", "fp8_e5m2"), ("sm75", "float16")]
)
def test_what_runs_is_not_said_to_fail(where: str, kv_dtype: str, vllm: Registry) -> None:
    selection = asked(vllm, where, "TRITON_ATTN", kv_dtype=kv_dtype, dtype="float16")
    assert selection.backend is not None
    assert not selection.fails
    assert selection.warnings == ()


SPARSE: dict[str, Any] = {
    "attention": "mla_sparse",
    "head_size": 576,
    "num_kv_heads": 1,
    "dtype": "bfloat16",
    "block_size": 64,
}


@pytest.mark.parametrize(
    ("where", "kv_dtype", "stored"),
    [
        ("sm120", "auto", "fp8_ds_mla"),
        ("sm120", "fp8_e4m3", "fp8_ds_mla"),
        ("sm120", "fp8_ds_mla", None),
        ("sm90", "fp8", "fp8_ds_mla"),
        ("sm90", "auto", None),
    ],
)
def test_what_is_stored_otherwise_than_asked_for_is_said(
    where: str, kv_dtype: str, stored: str | None, vllm: Registry
) -> None:
    facts = [c for c in asked(vllm, where, kv_dtype=kv_dtype, **SPARSE).consequences if c.kind == "stores"]
    assert [c.value for c in facts] == ([stored] if stored else [])
    assert [c.text for c in facts] == ([f"the KV cache is stored as {stored}"] if stored else [])


def test_what_the_table_does_not_hold_is_not_known(vllm: Registry) -> None:
    selection = asked(vllm, "sm90", model="deepseek_v4", **{**SPARSE, "head_size": 512})
    assert (selection.backend, selection.unknown, selection.title) == (None, True, "not known")
    assert selection.start is not None
    assert selection.start.to_dict()["refused"]["unknown"] is True
    assert "not known for" in str(selection)
    assert "said by DeepseekV4Attention, steps.yaml:" in str(selection)
    with pytest.raises(
        attnreg.NoBackendError, match="The answer is not known on cuda sm90: vLLM's code for this model"
    ):
        attnreg.select(selection.request, selection.platform, vllm)
    assert not asked(vllm, "sm90", model="deepseek_v32", **SPARSE).unknown


def test_what_the_start_refuses_is_not_said_to_fail_late(vllm: Registry) -> None:
    fields = {"kv_dtype": "bfloat16", "dtype": "float16"}
    started, chosen = (asked(registry, "sm75", "TRITON_ATTN", **fields) for registry in (vllm, vllm.selector))
    assert (started.backend, started.fails) == (None, False)
    assert "refused by _reject_mismatched_float_kv_cache" in repr(started)
    assert chosen.fails


def test_a_failure_moves_no_choice(vllm: Registry) -> None:
    """vLLM's selector does not know it, and the table says what vLLM's selector says."""
    assert asked(vllm, "sm86 -flashinfer-python", kv_dtype="fp8").backend.name == "TRITON_ATTN"  # type: ignore[union-attr]


def test_a_workspace_is_stated_for_the_heads_that_are_asked_for(vllm: Registry) -> None:
    (workspace,) = [c for c in asked(vllm, "sm80", kv_dtype="fp8", num_heads=64).consequences if c.kind == "workspace"]
    assert workspace.value == 394 << 20
    assert "a workspace of 394 MiB on each GPU, beside the KV cache; 128 KiB for each token" in workspace.text
    assert workspace.source is not None
    assert "_get_workspace_buffer" in workspace.source
    unknown = asked(vllm, "sm80", kv_dtype="fp8", num_heads=None, num_kv_heads=None)
    assert "2.0 KiB for each token and query head" in dict(said(unknown))["workspace"]


def test_a_workspace_follows_the_request(vllm: Registry) -> None:
    mla: dict[str, Any] = {"attention": "mla", "head_size": 576, "num_kv_heads": 1, "block_size": 128}
    sizes = {
        name: [
            c.value for c in asked(vllm, "sm100", name, **mla, features=features).consequences if c.kind == "workspace"
        ]
        for name, features in {"FLASHINFER_MLA": frozenset[str](), "CUTLASS_MLA": frozenset({"dcp"})}.items()
    }
    assert sizes == {"FLASHINFER_MLA": [128 << 20], "CUTLASS_MLA": [128 << 20]}
    split = asked(vllm, "sm100", "FLASHINFER_MLA", **mla, features={"dcp"})
    assert [c.value for c in split.consequences if c.kind == "workspace"] == [256 << 20]


@pytest.mark.parametrize(
    ("page", "block"), [(16, 16), (32, 32), (48, 16), (64, 64), (96, 32), (128, 64), (4096, 64), (1 << 40, 64)]
)
def test_the_page_and_the_block_that_the_kernel_reads_are_two_facts(page: int, block: int, vllm: Registry) -> None:
    """In an order and by name alike: one code judges both."""
    for backend in (None, "FLASHINFER"):
        selection = asked(vllm, "sm80", backend, kv_dtype="fp8", block_size=page)
        assert selection.backend is not None
        assert selection.backend.name == "FLASHINFER"
        (read,) = [c for c in selection.consequences if c.kind == "kernel_block"]
        assert read.value == block
        assert read.text.startswith(f"pages of {page} tokens, which the kernel reads ")


@pytest.mark.parametrize("name", ["vllm-0.33.0", "vllm-0.24.0", "default"])
def test_on_blackwell_the_heads_decide_which_blocks_flashinfer_reads(name: str) -> None:
    """vLLM's class states 64 at most where each KV head has one query head; without both counts the answer has both."""
    registry = attnreg.load_registry(name)

    def read(**facets: Any) -> list[tuple[int | str | None, bool]]:
        selection = asked(registry, "sm100", "FLASHINFER", **{"block_size": 256, **facets})
        return [(c.value, "as many KV heads" in c.text) for c in selection.consequences if c.kind == "kernel_block"]

    assert read(num_heads=32, num_kv_heads=32) == [(64, False)]
    assert read(num_heads=32, num_kv_heads=8) == [(256, False)]
    assert read(num_heads=32, num_kv_heads=None) == [(256, True)]
    assert read(num_heads=None, num_kv_heads=None) == [(256, True)]
    # NVIDIA's kernels are why a page may be one block
    if name != "default":
        assert read(num_heads=32, num_kv_heads=8, extra={"use_trtllm_attention": False}) == [(64, False)]


def test_vllm_takes_the_heads_of_the_model_that_it_serves(vllm: Registry) -> None:
    def read(**facets: Any) -> list[tuple[int | str | None, bool]]:
        heads = {"num_heads": 32, "num_kv_heads": 32}
        selection = asked(vllm, "sm100", "FLASHINFER", block_size=256, **{**heads, **facets})
        return [(c.value, "as many KV heads" in c.text) for c in selection.consequences if c.kind == "kernel_block"]

    for role in ("target", "draft"):
        assert read(role=role, model="llama", extra={"run_queries_per_kv_head": 4}) == [(256, False)]
        assert read(role=role, model="llama", extra={"run_queries_per_kv_head": 1}) == [(64, False)]
        # layers with one query head for each KV head stand beside others, or nothing is known of the run: no such layer
        # ever has larger blocks
        assert read(role=role, model="llama") == [(64, False)]
        assert read(role=role, model="llama", num_kv_heads=8) == [(256, True)]
    assert read(role="draft") == [(64, False)]


def test_no_block_is_said_without_a_page_or_a_cache(vllm: Registry) -> None:
    assert "kernel_block" not in dict(said(asked(vllm, "sm90", block_size=None)))
    encoder = asked(vllm, "sm90", attn_type="encoder_only", block_size=16)
    assert encoder.backend is not None
    assert "kernel_block" not in dict(said(encoder))


def test_a_page_that_no_kernel_reads_is_refused_in_an_order_and_by_name(vllm: Registry) -> None:
    for backend in (None, "FLASHINFER"):
        selection = asked(vllm, "sm80", backend, kv_dtype="fp8", block_size=17)
        assert selection.backend is None
        reasons = {c.name: [r.text for r in c.reasons] for c in selection.candidates}
        assert reasons["FLASHINFER"] == ["block_size is 17; supported: multiples of 16"]


def test_a_page_is_read_in_the_block_that_vllm_chooses() -> None:
    """Recorded from vLLM's own `select_common_block_size`, run on the sizes that its classes state."""
    recorded = json.loads(Path("tests/data/vllm/kernel_blocks.json").read_text(encoding="utf-8"))
    compared = 0
    for version in ("0.33.0", "0.20.0"):
        for row in attnreg.load_registry(f"vllm-{version}").backends.values():
            for consequence in row.variants[0].consequences:
                symbol = (consequence.source or "").rpartition(".")[0]
                if consequence.kernel_blocks is None or symbol not in recorded[version]:
                    continue
                blocks = [consequence.kernel_blocks.of(page) for page in recorded["pages"]]
                assert blocks == recorded[version][symbol], (version, row.name)
                compared += 1
    assert compared >= 30


def test_a_mixture_of_sizes_and_multiples() -> None:
    blocks = KernelBlocks((1, 24), (16,))
    assert [blocks.of(page) for page in (1, 16, 24, 25, 32, 48, 72)] == [1, 16, 24, 1, 32, 48, 24]
    assert KernelBlocks((), (32,)).of(48) is None


def test_an_overlay_adds_to_a_row_and_its_blocks_come_first() -> None:
    stated = [
        {"when": {"dtype": "float16"}, "fails": "it was seen to"},
        {"kernel_blocks": 8, "says": "as measured"},
        {"workspace": "1 GiB"},
    ]
    registry = attnreg.load_registry("default", [{"backends": {"FLASHINFER": {"consequences": stated}}}])
    selection = asked(registry, "sm80", "FLASHINFER", dtype="float16")
    assert [text for _, text in said(selection)][:3] == [
        "it was seen to",
        "pages of 16 tokens, which the kernel reads in blocks of 8; as measured",
        "a workspace of 1.0 GiB on each GPU, beside the KV cache",
    ]
    assert [kind for kind, _ in said(selection)] == ["fails", "kernel_block", "workspace", "workspace"]
    assert not asked(registry, "sm80", "FLASHINFER").fails
    words = [consequence_words(c) for c in registry.backends["FLASHINFER"].variants[0].consequences]
    assert words[:3] == [
        "fails: it was seen to",
        "reads blocks of 8 tokens; as measured",
        "takes a workspace of 1.0 GiB on each GPU",
    ]


def test_consequences_are_data_too(vllm: Registry) -> None:
    data = asked(vllm, "sm86", "TRITON_ATTN", kv_dtype="fp8").to_dict()["consequences"]
    assert [(c["kind"], c["value"]) for c in data] == [("fails", None), ("kernel_block", 16)]
    assert json.loads(json.dumps(data)) == data
    assert (
        data[0]["where"].startswith("registry/engines/vllm-0.33.0/backends.yaml:")
        or "backends.yaml:" in data[0]["where"]
    )
    assert data[0]["source"].startswith("vllm:")


@pytest.mark.parametrize(
    ("arch", "facets", "fails"),
    [
        ("sm90", {"dtype": "float16", "kv_dtype": "fp8"}, "writes bfloat16 alone from an fp8 cache"),
        ("sm100", {"dtype": "float16", "kv_dtype": "fp8_e4m3"}, "writes bfloat16 alone from an fp8 cache"),
        ("sm90", {"attn_type": "encoder_only", "kv_dtype": "fp8"}, "takes no kv_cache_dtype of fp8"),
        ("sm90", {"kv_dtype": "fp8"}, None),
        ("sm90", {"dtype": "float16"}, None),
        # FA4 on Hopper takes 16-bit queries
        ("sm90", {"dtype": "float16", "kv_dtype": "fp8", "head_size": 512, "block_size": 64}, None),
    ],
)
def test_what_flash_attention_does_with_an_fp8_cache_in_vllm(
    vllm: Registry, arch: str, facets: dict[str, Any], fails: str | None
) -> None:
    selection = asked(vllm, arch, "FLASH_ATTN", **facets)
    failures = [c.text for c in selection.consequences if c.kind == "fails"]
    assert len(failures) == (fails is not None)
    assert all(fails in text for text in failures if fails)


FP8_QUERY = [
    ({"kv_dtype": "fp8"}, None),
    ({"kv_dtype": "fp8_e4m3"}, None),
    ({}, "FlashAttention takes queries, keys and values of one dtype, so fp8 queries need an fp8 cache"),
    (
        {"kv_dtype": "fp8", "dtype": "float16"},
        "FlashAttention writes bfloat16 alone where queries, keys and values are fp8",
    ),
]


@pytest.mark.parametrize(("facets", "reason"), FP8_QUERY)
@pytest.mark.parametrize(("arch", "backend"), [("sm90", "FLASH_ATTN/FA3-engine"), ("sm100", "FLASH_ATTN/FA4-engine")])
def test_flash_attention_takes_fp8_queries_with_an_fp8_cache(
    default: Registry, arch: str, backend: str, facets: dict[str, Any], reason: str | None
) -> None:
    packages = (("flash-attn-3", "3.0"), ("flash-attn-4", "4.0"))
    request = AttentionRequest(head_size=128, features={"fp8_query"}, **facets)
    selection = evaluate(request, Platform(platform="cuda", arch=arch, packages=packages), default, backend)
    assert [r.text for r in selection.candidates[0].reasons] == ([] if reason is None else [reason])
