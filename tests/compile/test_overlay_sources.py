"""Where overlays come from: files that extend others, mappings, and overlays that say nothing."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.registries import asking
from support.registries.files import brief, refusal, write
from support.registries.overlays import NEW, chosen
from support.suite.examples import examples

import attnreg
from attnreg import Registry
from attnreg.errors import did_you_mean
from attnreg.selection.selector import evaluate

VLLM = [name for name in attnreg.bundled_registries() if name.startswith("vllm-")]


def test_an_overlay_is_a_registry_and_finds_what_it_extends_beside_itself(tree: Path) -> None:
    (tree / "over/team.yaml").write_text("extends: ../base\nchoices: [{prefer: B}]\n")
    (tree / "over/mine.yaml").write_text("extends: team.yaml\nchoices: [{deny: B, when: {arch: g1}}]\n")
    registry = attnreg.load_registry("over/mine.yaml", allow_outside=True)
    assert registry.name == "base+team+mine"
    assert registry.files[-2:] == ("over/team.yaml", "over/mine.yaml")
    assert chosen(registry) == "B"
    assert chosen(registry, "g1") == "A"


def test_an_overlay_extends_the_default_registry_by_default(tree: Path, default: Registry) -> None:
    (tree / "mine.yaml").write_text("choices: [{deny: FLASH_ATTN}]\n")
    registry = attnreg.load_registry("mine.yaml")
    assert registry.name == "default+mine"
    assert registry.backends.keys() == default.backends.keys()
    assert registry.fingerprint != default.fingerprint


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a": "extends: a.yaml\n"},
            "over/a.yaml:1:10: registries extend each other in a circle: over/a.yaml -> over/a.yaml",
        ),
        (
            {"a": "extends: ./b.yaml\n", "b": "choices: []\nextends: ../over/a.yaml\n"},
            (
                "over/b.yaml:2:10: registries extend each other in a circle: "
                "over/a.yaml -> over/b.yaml -> over/../over/a.yaml"
            ),
        ),
        ({"a": "extends: null\n"}, "over/a.yaml:1:10: extends: expected a word, or a list of words, got `null`"),
        (
            {"a": "choices: []\nextends: defualt\n"},
            (
                "over/a.yaml:2:10: `defualt` is neither a bundled registry nor a directory nor a file\n"
                "  help: did you mean `default`?"
            ),
        ),
        (
            {"a": "extends: b.yaml\n", "b": "extends: base\nchoices: [{prefer: C}]\n"},
            "over/b.yaml:2:20: choices.prefer: unknown backend `C`\n  help: known: A, B",
        ),
    ],
)
def test_what_extends_wrongly(files: dict[str, str], message: str, tree: Path) -> None:
    write(tree / "over/base")
    for name, text in files.items():
        (tree / f"over/{name}.yaml").write_text(text)
    said = brief(refusal("over/a.yaml"))
    assert said.startswith(message)
    assert said.count("\n") <= 1


def test_a_mapping_says_the_same_as_a_file(load: Callable[..., Registry]) -> None:
    mapping = yaml.safe_load(NEW)
    assert load(mapping).fingerprint == load(NEW).fingerprint
    assert load(mapping).name == "base+overlay"
    # any kind of mapping, and sets, in which order does not matter
    patch = types.MappingProxyType({"A": {"capabilities": {"dtypes": {"float16", "bfloat16"}}}})
    assert chosen(load({"backends": patch, "choices": ({"deny": ("B",)},)}), dtype="bfloat16") == "A"


@pytest.mark.parametrize(
    "text", ["1", "09", "9.10", "1e5", "0x10", "no", "null", "~", "", "a: b", "- x", "#", "é\n😀", "\ud7ff"]
)
def test_text_stays_text_in_a_mapping(text: str, load: Callable[..., Registry]) -> None:
    registry = load({"backends": {"A": {"notes": [text], "summary": "s"}}})
    assert registry.backends["A"].notes == (text,)


def test_one_overlay_needs_no_list(tree: Path) -> None:
    (tree / "mine.yaml").write_text("choices: [{prefer: B}]\n")
    one: list[Any] = ["mine.yaml", Path("mine.yaml"), {"choices": [{"prefer": "B"}]}]
    assert [chosen(attnreg.load_registry("base", overlay)) for overlay in one] == ["B", "B", "B"]


# what an overlay extends, when it is laid over a registry ------------------------------------------------------------


def test_without_a_source_the_registry_is_the_one_that_an_overlay_extends(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTNREG_REGISTRY", raising=False)
    (tree / "over/team.yaml").write_text("extends: ../base\nchoices: [{prefer: B}]\n")
    (tree / "over/mine.yaml").write_text("extends: team.yaml\nchoices: [{deny: B, when: {arch: g1}}]\n")
    (tree / "plain.yaml").write_text("choices: [{deny: B, when: {arch: g1}}]\n")
    names = {
        ("over/team.yaml",): "base+team",
        ("over/mine.yaml",): "base+team+mine",
        ("plain.yaml", "over/team.yaml"): "base+plain+team",
        ("over/team.yaml", "over/mine.yaml"): "base+team+mine",
    }
    for overlays, name in names.items():
        registry = attnreg.load_registry(overlays=overlays, allow_outside=True)
        assert registry.name == name
        # a source of that name is the same registry
        assert attnreg.load_registry(registry.base, overlays, allow_outside=True).title == registry.title
    assert attnreg.load_registry(overlays={"extends": "base", "choices": [{"prefer": "B"}]}).name == "base+overlay"
    assert attnreg.load_registry(overlays={"extends": "vllm-0.33.0"}).name == "vllm-0.33.0"


@pytest.mark.parametrize("source", ["base", "./over/../base", "over/team.yaml"])
def test_an_overlay_may_extend_what_it_is_laid_over(source: str, tree: Path) -> None:
    (tree / "over/team.yaml").write_text("extends: ../base\nchoices: [{prefer: B}]\n")
    (tree / "mine.yaml").write_text("extends: base\nchoices: [{prefer: B}]\n")
    assert attnreg.load_registry(source, "mine.yaml", allow_outside=True).name.startswith("base+")


LAID_WRONGLY: list[tuple[str, str | None, list[str], str]] = [
    (
        "another registry",
        "default",
        ["extends: vllm-0.33.0\nchoices: [{prefer: TRITON_ATTN}]\n"],
        (
            "0.yaml:1:10: the overlay extends vllm-0.33.0, and it is laid over default\n"
            "  help: remove `extends`, if the overlay is meant for any registry, or use it alone: --registry 0.yaml"
        ),
    ),
    (
        "two overlays that disagree",
        None,
        ["extends: base\n", "extends: vllm-0.33.0\nchoices: [{deny: B}]\n"],
        (
            "1.yaml:1:10: the overlay extends vllm-0.33.0, and it is laid over base\n"
            "  help: remove `extends`, if the overlay is meant for any registry, or use it alone: --registry 1.yaml"
        ),
    ),
    (
        "misspelt",
        None,
        ["extends: vllm-0.34.0\nchoices: [{deny: B}]\n"],
        (
            "0.yaml:1:10: `vllm-0.34.0` is neither a bundled registry nor a directory nor a file\n"
            f"  help: there are {', '.join(VLLM[:-1])} and {VLLM[-1]}; the nearest is `vllm-0.33.0`"
        ),
    ),
    (
        "misspelt beside a source",
        "base",
        ["choices: [{deny: B}]\nextends: nope\n"],
        (
            "0.yaml:2:10: `nope` is neither a bundled registry nor a directory nor a file\n"
            f"  help: {did_you_mean('nope', attnreg.bundled_registries())}"
        ),
    ),
    (
        "nothing but what it extends",
        "base",
        ["extends: default\n"],
        (
            "0.yaml:1:10: the overlay extends default, and it is laid over base\n"
            "  help: remove `extends`, if the overlay is meant for any registry, or use it alone: --registry 0.yaml"
        ),
    ),
    (
        "itself",
        None,
        ["extends: 0.yaml\n"],
        "0.yaml:1:10: registries extend each other in a circle: 0.yaml -> 0.yaml",
    ),
]


@pytest.mark.parametrize(
    ("source", "overlays", "message"), [row[1:] for row in LAID_WRONGLY], ids=[row[0] for row in LAID_WRONGLY]
)
def test_an_overlay_is_laid_over_what_it_extends_only(
    source: str | None, overlays: list[str], message: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTNREG_REGISTRY", raising=False)
    files = [tree / f"{i}.yaml" for i in range(len(overlays))]
    for file, text in zip(files, overlays, strict=True):
        file.write_text(text)
    assert brief(refusal(source, [file.name for file in files])) == message


def test_the_registry_of_the_environment_is_a_source_too(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREG_REGISTRY", "base")
    (tree / "mine.yaml").write_text("extends: default\n")
    assert "mine.yaml:1:10: the overlay extends default, and it is laid over base" in refusal(None, "mine.yaml")


def test_a_long_chain_of_overlays_is_refused_where_it_is_too_long(tree: Path) -> None:
    for i in range(1500):
        (tree / f"{i}.yaml").write_text(f"extends: {i + 1}.yaml\n")
    assert brief(refusal("0.yaml")) == "16.yaml:1:10: more than 16 overlays extend each other"


# nothing -------------------------------------------------------------------------------------------------------------

NOTHING: list[Any] = [
    *({}, {"extends": "base"}, {"choices": [], "backends": {}, "vocabulary": {}}),
    *("extends: base\n", "choices: []\n"),
]


@pytest.mark.parametrize("overlay", NOTHING)
def test_an_overlay_of_nothing_is_not_there(overlay: Any, load: Callable[..., Registry]) -> None:
    registry, base = load(overlay), load()
    assert (registry.title, registry.files) == (base.title, base.files)


EMPTY = ["", "\n\n", "# nothing\n", "---\n", "{}\n", "null\n", "~\n"]
SAYS_NOTHING = (
    "mine.yaml:1:1: the overlay says nothing\n"
    "  help: an overlay has some of these keys: backends, choices, extends, invariants, known, orders, place, sources, "
    "vocabulary"
)


@pytest.mark.parametrize("text", EMPTY)
def test_a_file_without_a_word_is_no_overlay(text: str, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "mine.yaml").write_text(text)
    (tree / "over/mine.yaml").write_text("extends: ../mine.yaml\nchoices: []\n")
    assert refusal("mine.yaml") == SAYS_NOTHING
    assert refusal("base", "mine.yaml") == SAYS_NOTHING
    monkeypatch.setenv("ATTNREG_REGISTRY", "mine.yaml")
    assert refusal(None) == SAYS_NOTHING


def test_an_overlay_file_of_nothing_is_what_it_extends(tree: Path) -> None:
    (tree / "mine.yaml").write_text("extends: base\n")
    assert attnreg.load_registry("mine.yaml").title == attnreg.load_registry("base").title


@examples(100)
@given(st.data())
def test_an_overlay_of_nothing_changes_no_selection(default: Registry, empty: Registry, data: st.DataObject) -> None:
    request, platform = data.draw(asking.requests(default)), data.draw(asking.platforms(default))
    answers = [evaluate(request, platform, registry) for registry in (default, empty)]
    assert answers[0].to_dict() == answers[1].to_dict()


@pytest.fixture(scope="module")
def empty() -> Registry:
    return attnreg.load_registry("default", [{}, {"extends": "default", "choices": []}])


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_measurement_of_a_mapping_has_finite_numbers(number: float) -> None:
    """YAML's .inf and .nan are no numbers of the data; Python's are floats."""
    measured = {"file": "f", "of": "A", "over": "B"}
    order = {"name": "x", "when": {"arch": "sm90"}, "order": ["TRITON_ATTN"]}
    order["measured"] = {**measured, "ratio": number, "noise": number}  # type: ignore[assignment]
    with pytest.raises(attnreg.RegistryError) as caught:
        attnreg.load_registry("default", [{"orders": {"cuda": [order]}}])
    places = [p.message.partition(":")[0] for p in caught.value.problems if "finite number" in p.message]
    assert places == ["orders.cuda.measured.ratio", "orders.cuda.measured.noise"]
