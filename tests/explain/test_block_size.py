"""The block size that an engine settles for a whole model: by its rules, of small registries, and how it is said."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support import ROOT
from support.registries.asking import at
from support.registries.files import row
from support.registries.starts import load
from support.suite.examples import examples

import attnreg
from attnreg import AttentionRequest, Platform, Registry, Selection
from attnreg.errors import Location
from attnreg.explain import explain, render
from attnreg.explain.block_size import BlockSize, pages_of
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.selection.question import Question
from attnreg.selection.selector import evaluate

DEFAULT, READS = "default: [{tokens: 16}]", "the default, which A reads"
RAISED = "agree: common, raised: [{when: {dtype: bfloat16}, units: 3, because: r}]"
G2 = Platform(platform="gpu", arch="g2")


def layers(*facets: dict[str, Any], role: str = "target") -> list[Question]:
    """A question for each layer of a model. `kind` is that of the layer, `draft` its role."""
    out = []
    for index, given_ in enumerate(facets):
        kind = given_.pop("kind", "full")
        members = frozenset({("", "", False, index)})
        out.append(Question(AttentionRequest(**{"head_size": 64, "dtype": "float16", **given_}), "", "", members, kind))
    return out


def page(
    registry: Registry, *facets: dict[str, Any], given: int | None = None, mixers: bool = False
) -> BlockSize | None:
    """What is said of a model of these layers."""

    def ask(request: AttentionRequest, platform: Platform) -> Selection:
        return evaluate(request, platform, registry, None)

    questions = [*layers(*facets), *([Question(None, "Mamba")] if mixers else [])]
    return next(iter(pages_of(questions, [G2], registry, ask, given)), None)


def with_blocks(directory: Path, rules: str, a: str = "16", b: str = "16", *more: str) -> Registry:
    """A registry whose row A serves float16 and B bfloat16, with kernels that read these blocks."""
    rows = row("capabilities: {dtypes: [float16]}", f"consequences: [{{kernel_blocks: {a}}}]", *more)
    rows = rows.replace(
        "    capabilities: {dtypes: [float16, bfloat16]",
        f"    consequences: [{{kernel_blocks: {b}}}]\n    capabilities: {{dtypes: [bfloat16]",
        1,
    )
    return load(directory, f"page: {{{rules}}}\n", backends=rows)


A, B = {"dtype": "float16"}, {"dtype": "bfloat16"}
SETTLED: dict[str, tuple[str, str, str, list[dict[str, Any]], int | None, str]] = {
    "one that reads the default": ("agree: common", "{multiple_of: 8}", "16", [A], 16, READS),
    "one that does not": ("agree: common", "[32, 64]", "16", [A], 32, "the smallest that A reads"),
    "one that prefers another": ("agree: common", "16, prefers: 48", "16", [A, A], 48, "which A asks for"),
    "two that read the default": ("agree: common", "16", "[8, 4]", [A, B], 16, "the default, which A and B all read"),
    "two of which one prefers": (
        "agree: common",
        "16, prefers: 48",
        "16",
        [A, B],
        16,
        "the default, which A and B all read",
    ),
    "two that need another": ("agree: common", "[48, 32]", "[64, 36]", [A, B], 64, "the smallest that A and B read"),
    "two without a size": (
        "agree: common",
        "[{multiple_of: 7}]",
        "[{multiple_of: 9}]",
        [B, A],
        63,
        "the smallest that B and A read",
    ),
    "the first layer's": ("agree: first", "[32]", "64", [A, B], 32, "the smallest that A reads"),
    "the other first layer's": ("agree: first", "[32]", "64", [B, A], 64, "the smallest that B reads"),
    "the first prefers": ("agree: first", "16, prefers: 48", "64", [A, B], 48, "which A asks for"),
    "a kind apart": (
        "agree: common, apart: [cross]",
        "16, prefers: 48",
        "16",
        [A, A | {"kind": "cross"}],
        16,
        "the default, which all layers of A read",
    ),
    "a kind that is not apart": (
        "agree: common, apart: [chunked]",
        "16, prefers: 48",
        "16",
        [A, A | {"kind": "cross"}],
        48,
        "which A asks for",
    ),
    "a cache beside": (
        "agree: common, beside: [{when: {dtype: float16}, name: I, kernel_blocks: 64}]",
        "{multiple_of: 32}",
        "16",
        [A],
        64,
        "the smallest that I and A read",
    ),
    "a cache beside comes first": (
        "agree: first, beside: [{when: {dtype: float16}, name: I, kernel_blocks: 64}]",
        "[32]",
        "16",
        [A],
        64,
        "the smallest that I reads",
    ),
    "raised": (RAISED, "8", "8", [A, B], 32, "raised from 16: r"),
    "not raised": (RAISED, "8", "8", [A], 16, READS),
    "raised by less than it is": (
        "agree: common, raised: [{when: {dtype: float16}, units: 2, because: r}]",
        "8",
        "8",
        [A],
        16,
        READS,
    ),
    "unknown": ("agree: common, unknown: [{when: {dtype: bfloat16}, because: u}]", "16", "16", [A, B], None, "u"),
    "another is unknown": (
        "agree: common, unknown: [{when: {dtype: bfloat16}, because: u}]",
        "16",
        "16",
        [A],
        16,
        READS,
    ),
}


@pytest.mark.parametrize("what", SETTLED)
def test_a_size_is_settled_by_the_rules(what: str, tmp_path: Path) -> None:
    rules, a, b, model, tokens, text = SETTLED[what]
    found = page(with_blocks(tmp_path, f"{DEFAULT}, {rules}", a, b), *(dict(layer) for layer in model))
    assert found is not None
    assert (found.tokens, found.text) == (tokens, text)


@pytest.mark.parametrize("size", [16, 32, 48])
def test_the_users_size_is_the_answer_and_may_be_raised(size: int, tmp_path: Path) -> None:
    raised = "raised: [{when: {dtype: bfloat16}, units: 2, because: r}]"
    registry = with_blocks(tmp_path, f"agree: common, {DEFAULT}, {raised}", "16, prefers: 64")
    asked = {"block_size": size}
    plain, both = page(registry, A | asked, given=size), page(registry, A | asked, B | asked, given=size)
    assert plain is not None
    assert both is not None
    assert (plain.tokens, plain.text) == (size, "as asked for")
    assert both.tokens == max(size, 32)


def test_layers_without_softmax_matter_where_the_rules_say_so(tmp_path: Path) -> None:
    registry = with_blocks(tmp_path, f"agree: common, {DEFAULT}, unknown: [{{mixers: true, because: states}}]")
    plain, mixed, alone = page(registry, A), page(registry, A, mixers=True), page(registry, mixers=True)
    assert plain is not None
    assert mixed is not None
    assert alone is not None
    assert (plain.tokens, mixed.tokens, mixed.text) == (16, None, "states")
    # no layer keeps keys and values, and the engine leaves the size as it is
    assert (alone.tokens, alone.text) == (16, "which no layer reads")


@pytest.mark.parametrize(("platform", "tokens"), [("gpu", None), ("npu", 16)])
def test_the_default_of_a_platform_is_that_of_runs_with_layers(
    platform: str, tokens: int | None, tmp_path: Path
) -> None:
    own = f"{{when: {{platform: {platform}}}, tokens: 128}}"
    registry = with_blocks(tmp_path, f"agree: common, default: [{own}, {{tokens: 16}}]")
    alone = page(registry, mixers=True)
    assert alone is not None
    assert alone.tokens == tokens
    assert ("was not recorded" in alone.text) == (tokens is None)


def test_nothing_is_certain_where_the_data_contradict_each_other_or_the_run_stops(tmp_path: Path) -> None:
    torn = with_blocks(tmp_path / "torn", f"agree: common, {DEFAULT}", "8, when: {head_size: 64}}, {kernel_blocks: 32")
    found = page(torn, A, A | {"head_size": 128})
    assert found is not None
    assert (found.tokens, found.text) == (None, "A reads other blocks in other layers, and the engine asks it once")
    stops = with_blocks(tmp_path / "stops", f"agree: common, {DEFAULT}", "16}, {fails: it stops, when: {head_size: 64}")
    found, other = page(stops, A), page(stops, A | {"head_size": 128})
    assert found is not None
    assert other is not None
    assert (found.tokens, found.text) == (None, "the engine is known to stop with a backend that it chose")
    assert other.tokens == 16


def test_no_size_of_which_all_read_one_is_none(tmp_path: Path) -> None:
    exact = row("capabilities: {dtypes: [float16], block_sizes: [24]}").replace("block_sizes, ", "")
    exact = exact.replace("features: [sinks]}", "features: [sinks], block_sizes: {multiple_of: 16}}")
    registry = load(tmp_path, f"page: {{agree: common, {DEFAULT}}}\n", backends=exact)
    alone, both = page(registry, A), page(registry, A, B)
    assert alone is not None
    assert both is not None
    assert (alone.tokens, alone.text) == (24, "the smallest that A reads")
    assert (both.tokens, both.text) == (None, "A and B read no blocks of one size, and the engine stops")


def test_where_a_layer_gets_no_backend_nothing_is_said(tmp_path: Path) -> None:
    registry = with_blocks(tmp_path, f"agree: common, {DEFAULT}")
    assert page(registry, A | {"features": frozenset({"alibi"})}) is None


def test_a_registry_without_rules_says_nothing(tmp_path: Path) -> None:
    assert page(load(tmp_path, "steps: []\n"), A) is None


SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24, 32, 64]), min_size=1, max_size=3)


@given(a=SIZES, b=SIZES, default=st.integers(1, 40), multiples=st.booleans())
@examples(60)
def test_the_smallest_of_all_is_found_by_trying_each(
    a: list[int], b: list[int], default: int, multiples: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The default where both read it, else the least page that some block of each divides."""
    stated = [[{"multiple_of": n} if multiples else n for n in sizes] for sizes in (a, b)]
    registry = with_blocks(
        tmp_path_factory.mktemp("r"), f"agree: common, default: [{{tokens: {default}}}]", *map(json.dumps, stated)
    )
    found = page(registry, A, B)
    assert found is not None

    def read(tokens: int) -> bool:
        return all(any(tokens % n == 0 for n in sizes) for sizes in (a, b))

    assert found.tokens == (default if read(default) else next(n for n in range(1, 10_000) if read(n)))


# of engines -----------------------------------------------------------------------------------------------------------


def answer(engine: str, model: str, archs: str, **options: Any) -> Any:
    registry = attnreg.load_registry(engine, plugins=())
    registry = registry.selector if options.pop("selector", False) else registry
    found = model_questions(str(ROOT / "examples/configs" / model), ModelOptions(**options), registry)
    return explain(found.questions, [at(arch, registry) for arch in archs.split()], registry, memory=found.memory)


def test_platforms_that_agree_share_a_size_and_others_are_named() -> None:
    same = answer("vllm-0.33.0", "Llama-3.1-8B", "sm90")
    assert [(p.tokens, p.archs) for p in same.pages] == [(16, ())]
    pages = answer("vllm-0.33.0", "DeepSeek-V3", "sm90 sm100 sm103").pages
    assert [(p.tokens, p.archs) for p in pages] == [(16, ("sm90",)), (32, ("sm100", "sm103"))]


def test_a_size_is_said_in_text_and_in_json() -> None:
    said = answer("vllm-0.33.0", "DeepSeek-V3", "sm100")
    (data,) = said.to_dict()["block_sizes"]
    assert data["tokens"] == 32
    assert data["text"] == "the smallest that FLASHINFER_MLA reads"
    assert "get_supported_kernel_block_sizes" in data["source"]
    assert data["where"].startswith("registry/engines/vllm-0.33.0/backends.yaml:")
    console = Console(width=140, file=io.StringIO(), highlight=False)
    render(said, console)
    line = f"KV cache in blocks of 32 tokens, the smallest that FLASHINFER_MLA reads ({said.pages[0].where.short})"
    assert line in console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("model", "prompts"), [("Llama-3.1-8B", True), ("DeepSeek-V3", False)])
def test_a_phase_alone_has_the_blocks_of_both(model: str, prompts: bool) -> None:
    def said(**given_: str) -> list[str]:
        return [page.sentence for page in answer("vllm-0.33.0", model, "sm90", given=given_).pages]

    both = said()
    assert both
    assert said(phase="decode") == both
    # of MLA, latents are what the cache holds, and prompts do not ask about them
    assert said(phase="prefill") == (both if prompts else [])


def test_a_size_that_is_not_known_has_its_reason() -> None:
    # no one has recorded the states of Intel GPUs
    (hybrid,) = answer("vllm-0.33.0", "Qwen3-Next-80B-A3B-Instruct", "xe2").pages
    assert hybrid.tokens is None
    assert hybrid.sentence.startswith("KV cache in blocks of a size that is not known: vLLM makes a block at least")


def test_the_size_that_the_user_gives_is_said_for_layers_that_keep_no_cache_too() -> None:
    (asked,) = answer("vllm-0.33.0", "bert-base-uncased", "sm90", given={"block_size": 32}).pages
    assert (asked.tokens, asked.text) == (32, "as asked for")


def test_mla_on_processors_has_one_size_whatever_is_asked_for() -> None:
    for given_ in ({}, {"block_size": 32}):
        (small,) = answer("vllm-0.33.0", "DeepSeek-V3", "x86_64_avx512", given=given_).pages
        assert small.tokens == 16


def test_one_layer_and_the_selector_alone_settle_nothing() -> None:
    assert answer("vllm-0.33.0", "Llama-3.1-8B", "sm90", layer=3).pages == ()
    assert answer("vllm-0.33.0", "Llama-3.1-8B", "sm90", selector=True).pages == ()
    assert "block_sizes" not in answer("default", "Llama-3.1-8B", "sm90").to_dict()


def test_the_page_that_a_step_of_sglang_sets_is_said_alike() -> None:
    (page_,) = answer("sglang-0.5.23", "DeepSeek-V3", "sm100").pages
    assert page_.tokens is not None
    assert page_.text.startswith("which ")
    assert page_.where.short.startswith("steps.yaml:")


def test_one_token_is_one_token() -> None:
    nowhere = Location("f.yaml", 1, 1)
    assert BlockSize(1, "which s sets", nowhere).sentence == "KV cache in blocks of 1 token, which s sets"
