"""The closed world of the shipped data: every row states every claim, and what none accepts is refused by its line."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import pytest
from support import ROOT

import attnreg
from attnreg import AttentionRequest, Platform, Registry, bundled_registries, load_registry
from attnreg.compile.source.yaml_source import Document
from attnreg.selection.selector import evaluate

LATENT: dict[str, Any] = {"attention": "mla", "head_size": 576}
HOPPER = Platform(platform="cuda", arch="sm90")
PROCESSOR = Platform(platform="cpu", arch="x86_64")


@pytest.fixture(scope="module")
def default() -> Registry:
    return load_registry("default")


def line_of(row: str, claim: str) -> int:
    """The line of the shipped file in which a row states a claim."""
    return Document.load(ROOT / "registry/backends.yaml").key_at("backends", row, "capabilities", claim).line


def reasons(registry: Registry, platform: Platform, backend: str | None = None, **fields: Any) -> Mapping[str, Any]:
    """What is refused, and why: the text and the line of every reason. Something must refuse each candidate."""
    selection = evaluate(AttentionRequest(**fields), platform, registry, backend)
    assert selection.backend is None
    return {c.name: [(r.text, r.where.line) for r in c.reasons] for c in selection.candidates}


@pytest.mark.parametrize("name", bundled_registries())
def test_every_row_states_every_claim(name: str) -> None:
    registry = load_registry(name)
    identity = {"platforms", "attention", "phase"}
    for row in registry.backends.values():
        for variant in row.variants:
            stated = [c.key for c in variant.claims if c.key not in identity] + [*variant.open]
            assert sorted(stated) == sorted(registry.vocabulary.claims), row.name


def test_the_default_registry_leaves_no_claim_to_its_file() -> None:
    data = Document.load(ROOT / "registry/backends.yaml").data
    assert "unchecked" not in data
    claims = {*load_registry("default").vocabulary.claims, "features"}
    left_out = {name: claims - row["capabilities"].keys() for name, row in data["backends"].items()}
    assert [name for name, missing in left_out.items() if missing] == []


def test_no_rule_says_in_a_sentence_what_a_claim_says(default: Registry) -> None:
    alone = [
        (row.name, rule.reject)
        for row in default.backends.values()
        for variant in row.variants
        for rule in variant.rules
        if {clause.facet for clause in rule.when.walk()} == {"head_size_v"}
    ]
    assert alone == []


# what the file promised before it was so -----------------------------------------------------------------------------


def test_a_latent_with_values_of_another_width(default: Registry) -> None:
    refused = {
        c.name: [(r.text, r.where.line) for r in c.reasons]
        for c in evaluate(AttentionRequest(**LATENT, head_size_v=7), HOPPER, default).candidates
    }
    assert refused == {
        "TORCH_MLA": [],
        "FLASH_ATTN_MLA": [("head_size_v is 7; supported: 256, 512", line_of("FLASH_ATTN_MLA", "head_sizes_v"))],
        "FLASHMLA": [("head_size_v is 7; supported: 512", line_of("FLASHMLA", "head_sizes_v"))],
        "HOPPER_MLA": [("head_size_v is 7; supported: 512", line_of("HOPPER_MLA", "head_sizes_v"))],
        "TRITON_MLA": [
            ("head_size_v is 7; supported: multiples of 16 up to 512", line_of("TRITON_MLA", "head_sizes_v"))
        ],
    }
    # PyTorch's operations take any
    chosen = attnreg.select(AttentionRequest(**LATENT, head_size_v=7), HOPPER, default).backend
    assert chosen is not None
    assert chosen.name == "TORCH_MLA"


def test_a_latent_with_several_kv_heads(default: Registry) -> None:
    assert reasons(default, HOPPER, **LATENT, num_kv_heads=16) == {
        row: [("num_kv_heads is 16; supported: 1", line_of(row, "num_kv_heads"))]
        for row in ("FLASH_ATTN_MLA", "HOPPER_MLA", "FLASHMLA", "TRITON_MLA", "TORCH_MLA")
    }


def test_a_latent_in_a_layout_that_splits_heads(default: Registry) -> None:
    assert reasons(default, HOPPER, **LATENT, extra={"cache_layout": "SPLIT"}) == {
        row: [("cache_layout is SPLIT; supported: NHD, HND", line_of(row, "cache_layouts"))]
        for row in ("FLASH_ATTN_MLA", "HOPPER_MLA", "FLASHMLA", "TRITON_MLA", "TORCH_MLA")
    }


def test_prompts_with_values_wider_than_any(default: Registry) -> None:
    asked = {"attention": "mla", "phase": "prefill", "head_size": 192, "head_size_v": 9999}
    assert reasons(default, PROCESSOR, "CPU_PREFILL", **asked) == {
        "CPU_PREFILL": [
            ("head_size_v is 9999; supported: the same as head_size, up to 256", line_of("CPU_PREFILL", "head_sizes_v"))
        ]
    }


@pytest.mark.parametrize(
    ("size", "width"), [(576, 256), (320, 512), (512, 256)], ids=["576 is not 320", "320 is not 576", "neither"]
)
@pytest.mark.parametrize("backend", ["FLASH_ATTN_MLA", "FLASHINFER_MLA"])
def test_each_latent_has_one_width_of_values(default: Registry, backend: str, size: int, width: int) -> None:
    arch = "sm90" if backend == "FLASH_ATTN_MLA" else "sm100"
    asked = {**LATENT, "head_size": size, "head_size_v": width}
    found = reasons(default, Platform(platform="cuda", arch=arch), backend, **asked)
    text = "values are the first 512 elements of a latent of 576, or the first 256 of one of 320"
    assert [t for t, _ in found[backend]] == [text]


# every row, as a stranger tries it -----------------------------------------------------------------------------------

# rows whose kernels set no bound on the width of values
ANY_WIDTH = {"CPU_ATTN", "TORCH_MLA_SPARSE", "TORCH_PREFILL", "TORCH_SDPA"}


def platforms_of(registry: Registry, row: str) -> list[Platform]:
    """Where a row may run, with every flag on."""
    found = []
    for arch in registry.vocabulary.architectures.values():
        flags = {f for f, word in registry.vocabulary.flags.items() if arch.platform in word.facts["platforms"]}
        if arch.platform in registry.backends[row].platforms:
            found.append(Platform(platform=arch.platform, arch=arch.name, flags=flags))
    return found


def accepts(registry: Registry, row: str, **fields: Any) -> bool:
    """Whether a row accepts a request by name anywhere, for some width of keys, phase and cache."""
    backend = registry.backends[row]
    requests = [
        AttentionRequest(attention=a, phase=phase, head_size=size, kv_dtype=kv, **fields)
        for a in backend.attention
        for phase in backend.phases or {"any"}
        for size in (128, 512, 576)
        for kv in ("auto", "turboquant_k8v4")
    ]
    places = platforms_of(registry, row)
    return any(evaluate(request, on, registry, row).backend for request in requests for on in places)


def test_no_row_takes_values_of_any_width_unless_its_kernels_do(default: Registry) -> None:
    for row in default.backends:
        assert accepts(default, row, head_size_v=None), row
        assert accepts(default, row, head_size_v=9999) == (row in ANY_WIDTH), row


def test_no_row_for_latents_takes_several_kv_heads(default: Registry) -> None:
    for name, row in default.backends.items():
        latents = "mha" not in row.attention and row.phases != {"prefill"}
        assert accepts(default, name, num_kv_heads=1), name
        assert accepts(default, name, num_heads=16, num_kv_heads=16) != latents, name


def test_the_layout_of_amds_paged_kernels_is_read_by_one_row(default: Registry) -> None:
    rows = [name for name in default.backends if accepts(default, name, extra={"cache_layout": "SPLIT"})]
    assert rows == ["ROCM_ATTN"]


def test_engines_hand_trtllm_gen_one_layout(default: Registry) -> None:
    on = Platform(platform="cuda", arch="sm100")
    asked = {"head_size": 128, "features": {"sinks"}, "extra": {"cache_layout": "NHD"}}
    found = reasons(default, on, "FLASHINFER/trtllm-gen", **asked)
    assert found["FLASHINFER"][0][0] == "cache_layout is NHD; supported: HND"
    # as attnreg calls it, through strides, it reads both
    assert attnreg.select(AttentionRequest(**asked), on, default, "FLASHINFER/trtllm-gen-context").backend is not None
    asked["extra"] = {"cache_layout": "HND"}
    chosen = attnreg.select(AttentionRequest(**asked), on, default, "FLASHINFER").backend
    assert chosen is not None
    assert (chosen.name, chosen.variant) == ("FLASHINFER", "trtllm-gen")


# where the data says that it comes from ------------------------------------------------------------------------------


def test_attnregs_own_rows_cite_what_decides_what_they_can_do(default: Registry) -> None:
    own = {n: row for n, row in default.backends.items() if row.source.startswith("attnreg:")}
    assert sorted(own) == [
        "CPU_ATTN", "FLEX_ATTENTION", "HOPPER_ATTN", "HOPPER_MLA", "HOPPER_MLA_SPARSE", "HOPPER_PREFILL", "ROCM_ATTN",
        "TORCH_MLA", "TORCH_MLA_SPARSE", "TORCH_PREFILL", "TORCH_SDPA", "TRITON_ATTN", "TRITON_MLA",
        "TRITON_MLA_SPARSE", "TRITON_PREFILL", "TURBOQUANT",
    ]  # fmt: skip
    assert default.sources["attnreg"].version == attnreg.__version__
    for name, row in own.items():
        path, _, symbol = row.source.removeprefix("attnreg:").partition("#")
        assert path.removesuffix(".py").replace("/", ".") == row.module, name
        body = ast.parse((ROOT / path).read_text()).body
        defined = {node.name for node in body if isinstance(node, ast.FunctionDef)}
        defined |= {
            t.id for node in body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)
        }
        assert symbol in defined, name


def test_rows_without_a_module_are_knowledge_of_others_kernels(default: Registry) -> None:
    knowledge = [row.name for row in default.backends.values() if row.module is None]
    assert len(knowledge) == 15
    assert all(not default.backends[name].source.startswith("attnreg:") for name in knowledge)
