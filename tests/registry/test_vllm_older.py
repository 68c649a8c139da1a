"""What the tables of older releases of vLLM say otherwise than the newer ones."""

from __future__ import annotations

from typing import Any

import pytest

import attnreg
from attnreg import AttentionRequest, Platform
from attnreg.request import with_extra
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import Selection


def asked(release: str, arch: str, **facets: Any) -> Selection:
    """The selection of a release for a bfloat16 layer."""
    layer = AttentionRequest(**with_extra({"head_size": 128, "dtype": "bfloat16", **facets}))
    return evaluate(layer, Platform(platform="cuda", arch=arch), attnreg.load_registry(f"vllm-{release}"))


def stored(release: str, arch: str, **facets: Any) -> Any:
    """How the layer stores its cache after the start."""
    chosen = asked(release, arch, **facets)
    assert chosen.start is not None
    return chosen.start.facts["kv_dtype"]


@pytest.mark.parametrize("release", ["0.20.0", "0.21.0", "0.22.0"])
@pytest.mark.parametrize("model", ["falcon", "mimo_v2_flash"])
def test_models_that_do_not_tell_their_layers_keep_a_plain_cache(release: str, model: str) -> None:
    # FlashAttention 2 reads no fp8 cache
    facets = {"head_size_v": 64, "kv_dtype": "fp8", "model": model}
    assert stored(release, "sm80", **facets) == "auto"
    assert asked(release, "sm80", **facets).backend is not None


@pytest.mark.parametrize(("release", "kept"), [("0.21.0", "fp8"), ("0.22.0", "bfloat16")])
def test_the_scheme_of_a_checkpoint_counts_before_the_users_kv_dtype_until_0_21(release: str, kept: str) -> None:
    scheme = {"compressed_tensors": True, "kv_scheme_bits": 8, "kv_scheme_float": True}
    assert stored(release, "sm90", kv_dtype="bfloat16", **scheme) == kept


def test_layers_at_the_edges_of_a_packed_run_stay_plain_beside_a_scheme() -> None:
    scheme = {"compressed_tensors": True, "kv_scheme_bits": 8, "kv_scheme_float": True}
    plain = {"kv_dtype": "auto", "run_kv_dtype": "turboquant_3bit_nc"}
    assert stored("0.21.0", "sm80", **plain, **scheme) == "auto"
    # the code of Falcon reads the scheme, and nothing else of the cache
    assert stored("0.33.0", "sm80", model="falcon", kv_dtype="fp8_e5m2", **scheme) == "fp8"


@pytest.mark.parametrize("release", ["0.20.0", "0.27.0", "0.33.0"])
def test_layers_at_the_edges_of_a_packed_run_stay_plain_beside_modelopts_scheme(release: str) -> None:
    scheme = {"modelopt": True, "kv_scheme_bits": 8, "kv_scheme_float": True, "kv_scheme_dynamic": False}
    assert stored(release, "sm100", kv_dtype="auto", run_kv_dtype="turboquant_3bit_nc", **scheme) == "auto"
    assert stored(release, "sm100", kv_dtype="auto", **scheme) == "fp8_e4m3"


@pytest.mark.parametrize(
    ("model", "releases"),
    [
        ("qwen3_vl", {"0.28.0", "0.29.0"}),
        ("interns1_pro", {"0.28.0", "0.29.0"}),
        ("voxtral", {"0.28.0", "0.29.0", "0.30.0"}),
        ("bailing_moe_v3_vl", {"0.30.0"}),
    ],
)
@pytest.mark.parametrize("release", ["0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0"])
def test_whether_parts_without_a_class_start_on_processors_is_not_known(
    release: str, model: str, releases: set[str]
) -> None:
    layer = AttentionRequest(head_size=128, dtype="bfloat16", model=model)
    registry = attnreg.load_registry(f"vllm-{release}")
    for platform, arch, stops in (("cpu", "x86_64_avx512", release in releases), ("cuda", "sm90", False)):
        found = evaluate(layer, Platform(platform=platform, arch=arch), registry)
        assert bool(found.unknown) is stops, (platform, found.unknown)


@pytest.mark.parametrize(("release", "kept"), [("0.21.0", "auto"), ("0.22.0", "fp8")])
def test_layers_of_a_draft_by_diffusion_are_not_told_of_the_cache_until_0_21(release: str, kept: str) -> None:
    assert stored(release, "sm100", role="draft", draft_method="dflash", kv_dtype="fp8") == kept


@pytest.mark.parametrize(
    ("release", "method", "given", "refused"),
    [
        ("0.21.0", "eagle3", False, True),
        ("0.21.0", "dflash", False, True),
        ("0.21.0", "eagle3", True, False),
        ("0.21.0", "eagle", False, False),
    ],
)
def test_which_targets_give_a_draft_their_hidden_states(release: str, method: str, given: bool, refused: bool) -> None:
    draft = asked(release, "sm90", role="draft", draft_method=method, hidden_states_given=given)
    assert draft.start is not None
    assert (draft.start.refusal is not None) == refused


@pytest.mark.parametrize(("release", "backend"), [("0.21.0", "FLASH_ATTN"), ("0.22.0", "TRITON_ATTN")])
def test_hopper_took_every_quantised_cache_until_0_21(release: str, backend: str) -> None:
    chosen = asked(release, "sm90", kv_dtype="fp8_per_token_head")
    assert chosen.backend is not None
    # FlashAttention 3 stops at the first forward
    assert (chosen.backend.name, chosen.fails) == (backend, backend == "FLASH_ATTN")


@pytest.mark.parametrize(
    ("release", "heads", "stops"),
    [
        ("0.20.0", 20, True),
        ("0.26.0", 3, True),
        ("0.26.0", 4, False),
        ("0.28.0", 3, False),
        ("0.28.0", 20, True),
        ("0.30.0", 20, False),
    ],
)
def test_the_query_heads_that_aiters_kernels_for_mla_take(release: str, heads: int, stops: bool) -> None:
    layer = AttentionRequest(head_size=576, dtype="bfloat16", attention="mla", num_heads=heads)
    instinct = Platform(platform="rocm", arch="gfx942")
    assert evaluate(layer, instinct, attnreg.load_registry(f"vllm-{release}"), "ROCM_AITER_MLA").fails == stops


@pytest.mark.parametrize("release", ["0.21.0", "0.25.0", "0.26.0"])
def test_when_an_fp8_cache_of_mla_stops_on_turing(release: str) -> None:
    chosen = asked(release, "sm75", dtype="float16", attention="mla", head_size=576, kv_dtype="fp8")
    assert chosen.fails
    # since 0.26 the constructor asks
    assert any("builds the layer" in warning for warning in chosen.warnings) == (release == "0.26.0")


@pytest.mark.parametrize(("release", "how"), [("0.22.0", "unbuilt"), ("0.22.1", "native"), ("0.23.0", "native")])
def test_a_patch_release_brought_a_class_for_mellum(release: str, how: str) -> None:
    architectures = attnreg.load_registry(f"vllm-{release}").architectures
    assert architectures is not None
    served = architectures.of(["MellumForCausalLM"], remote=False)
    assert served is not None
    assert served.how == how


@pytest.mark.parametrize(
    ("release", "built"), [("0.20.0", False), ("0.22.0", False), ("0.22.1", False), ("0.26.0", False), ("0.27.0", True)]
)
def test_when_alibi_over_an_fp8_cache_stops(release: str, built: bool) -> None:
    chosen = asked(release, "sm90", dtype="bfloat16", head_size=128, kv_dtype="fp8", features=frozenset({"alibi"}))
    [failure] = [follows.text for follows in chosen.consequences if follows.kind == "fails"]
    # since 0.27 the constructor asks the version that runs
    assert failure.startswith("vLLM raises when it builds the layer" if built else "the first forward raises")


@pytest.mark.parametrize("release", ["0.20.0", "0.25.0", "0.33.0"])
def test_layers_without_latents_have_one_answer_for_prompts_and_tokens(release: str) -> None:
    registry = attnreg.load_registry(f"vllm-{release}", plugins=())
    names = [None, *(row.name for row in registry.backends.values() if row.attention == {"mha"})]
    for arch in sorted({"sm100", "gfx942", "xe2", "x86_64"}.difference(registry.vocabulary.unread)):
        where = Platform(platform=registry.vocabulary.architectures[arch].platform, arch=arch)
        for name in names:
            layers = (AttentionRequest(head_size=128, dtype="bfloat16", phase=p) for p in ("any", "prefill", "decode"))
            assert len({evaluate(layer, where, registry, name).title for layer in layers}) == 1, (arch, name)


@pytest.mark.parametrize(
    ("release", "arch", "known", "run"),
    [
        ("0.33.0", "gfx942", True, True),
        ("0.31.0", "gfx942", False, False),
        ("0.28.0", "gfx942", False, False),
        ("0.26.0", "sm100", True, True),
        # a kernel for prompts is chosen, and not run
        ("0.25.0", "sm100", True, False),
        ("0.20.0", "gfx942", True, False),
    ],
)
def test_what_runs_the_prompts_of_sparse_mla(release: str, arch: str, known: bool, run: bool) -> None:
    plan = attnreg.plan("DeepSeek-V3.2-Exp", arch, f"vllm-{release}", tp=8)
    [prompts] = [group.prompts for group in plan.groups if group.prompts is not None]
    assert prompts.unknown is not known
    if known:
        assert any(follows.text.startswith("no prompt;") for follows in prompts.consequences) is not run
