"""The guide's examples load, and show every kind of matcher."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import ROOT
from support.pages.schemas import validator
from support.suite.examples import some

from attnreg.analysis.check.findings import check, violation
from attnreg.analysis.space import Space
from attnreg.analysis.symbolic.model import Model
from attnreg.compile.conditions import Parser
from attnreg.compile.schema.architectures import ArchitecturesFile
from attnreg.compile.source.yaml_source import Document
from attnreg.errors import Problem, RegistryError
from attnreg.language.engine.pages import PageRules
from attnreg.loader import load_registry
from attnreg.registry import Registry

GUIDE = ROOT / "docs/writing_data.md"


_FENCE = re.compile(r"^```(\S+) ?(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry("default")


def examples() -> list[Any]:
    text = GUIDE.read_text(encoding="utf-8")
    found = [(m[2], m[3]) for m in _FENCE.finditer(text) if m[1] == "yaml"]
    return [pytest.param(kind, body, id=f"{kind}-{i}") for i, (kind, body) in enumerate(found)]


@pytest.mark.parametrize(("kind", "body"), examples())
def test_examples_load(kind: str, body: str, tmp_path: Path, registry: Registry) -> None:
    if kind == "conditions":
        document = Document(body, "example.yaml")
        problems: list[Problem] = []
        conditions = [
            Parser(registry.vocabulary, document, problems).condition(c, (i,)) for i, c in enumerate(document.data)
        ]
        assert not problems
        assert all(condition.describe() != "always" for condition in conditions)
        return
    if kind == "steps.yaml":
        loaded = load_registry(with_steps(body, tmp_path))
        if body.startswith("page:"):
            assert loaded.page is not None
            assert all(getattr(loaded.page, key) for key in PageRules.__dataclass_fields__ if key != "source")
            return
        if body.startswith("layout:"):
            assert None not in (loaded.layout, loaded.graphs)
            return
        if body.startswith("options:"):
            assert [option.name for option in loaded.options] == ["vision_backend", "prefill_backend", "backend"]
            return
        steps = loaded.steps
        words = {key for step in yaml.safe_load(body)["steps"] for key in step}
        assert {"step", "when", "cases", "sets", "refuses", "source"} <= words
        assert len(steps) == body.count("- step:")
        return
    if kind == "architectures.yaml":
        served = ArchitecturesFile.model_validate(yaml.safe_load(body)).served
        assert "MPTForCausalLM" in served.native
        return
    nested = {"vocabulary.yaml": "vocabulary", "priorities.yaml": "orders"}.get(kind)
    assert kind in ("overlay", "error", "backends.yaml", "invariants.yaml") or nested
    file = tmp_path / "mine.yaml"
    file.write_text(f"{nested}:\n{textwrap.indent(body, '  ')}" if nested else body, encoding="utf-8")
    if kind == "error":
        with pytest.raises(RegistryError):
            load_registry("default", [file])
        return
    load_registry(*([file] if "extends:" in body else ["default", [file]]))
    if nested != "vocabulary":
        validator("overlay").validate(Document.load(file).data)


def with_steps(text: str, directory: Path) -> Path:
    """vLLM's registry with other steps, and with the facets that the page declares beside them."""
    source = ROOT / "registry/engines/vllm-0.33.0"
    for name in ("backends.yaml", "priorities.yaml", "vocabulary.yaml", "invariants.yaml"):
        (directory / name).write_text((source / name).read_text(encoding="utf-8"), encoding="utf-8")
    (directory / "steps.yaml").write_text(text, encoding="utf-8")
    facets = next(b for k, b in (p.values for p in examples()) if k == "vocabulary.yaml" and "of: start" in b)
    words = directory / "vocabulary.yaml"
    words.write_text(words.read_text(encoding="utf-8").replace("facets:\n", facets, 1), encoding="utf-8")
    return directory


# what `attnreg check` finds in an example that is about something else
FINDINGS = {
    "unplaced-row [EXAMPLE_ATTN]": "a row alone; the page shows orders below it",
    "failing-choice [FLASHINFER/native, e5m2-queries]": "shows a consequence alone",
    "violated-invariant [draft-not-sdpa]": "shows how a violation reads",
}
PAGES = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")})


def overlays() -> list[Any]:
    """Kind and text of each overlay on a page, but for field_problems.md, whose test runs them as they are shown."""
    found = []
    for page in PAGES:
        for m in _FENCE.finditer(page.read_text(encoding="utf-8")):
            keys = set(re.findall(r"^(\w+):", m[3], re.MULTILINE)) if m[1] == "yaml" else set()
            whole = m[2] in ("overlay", "backends.yaml", "invariants.yaml") or keys & {"extends", "choices", "place"}
            # the file of a plugin is checked where it is installed
            if (
                whole
                and m[2] not in ("error", "architectures.yaml")
                and page.name not in ("field_problems.md", "writing_backends.md")
            ):
                found.append(pytest.param(m[2], m[3], id=f"{page.name}-{len(found)}"))
    return found


def test_overlays_of_the_pages_are_found() -> None:
    pages = [str(parameter.id).rpartition("-")[0] for parameter in overlays()]
    assert set(pages) == {"vllm.md", "writing_data.md"}
    assert len(pages) == 11


def violated_in(registry: Registry) -> set[str]:
    """The titles of the findings about a registry's invariants that are violated."""
    model = Model(Space([registry]), registry.selector if registry.steps else registry)
    return {f"violated-invariant [{i.name}]" for i in registry.invariants if violation(model, i)[1] != model.d.false}


# each decides a whole registry, which takes seconds
@pytest.mark.parametrize(("kind", "body"), some(overlays(), 3))
def test_overlays_that_pages_show_pass_the_check(kind: str, body: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(body, encoding="utf-8")
    found = check(load_registry(tmp_path / "mine.yaml"))
    new = [finding for finding in found if finding.title not in FINDINGS]
    # the page says so of an overlay that requires
    assert bool(new) == (kind == "requires"), [str(finding) for finding in new]
    assert kind != "requires" or all(finding.code == "violated-invariant" for finding in new)
    if new:
        # and nothing of it is a fault of the registry below
        below = violated_in(load_registry(yaml.safe_load(body).get("extends", "default")))
        assert not [finding.title for finding in new if finding.title in below]


def test_the_guide_shows_every_kind_of_matcher() -> None:
    [body] = [m[3] for m in _FENCE.finditer(GUIDE.read_text(encoding="utf-8")) if m[2] == "conditions"]
    words = ("min", "max", "below", "multiple_of", "not", "only", "any", "without", "packages", "flags", "features")
    assert not [word for word in words if not re.search(rf"\b{word}:", body)]
    assert not [sign for sign in ("*", "?", "null", "[") if sign not in body]


def test_the_families_that_are_shown_are_the_files() -> None:
    text = (ROOT / "docs/writing_models.md").read_text(encoding="utf-8")
    shown = {m[3].splitlines()[0].removeprefix("# "): m[3].partition("\n")[2] for m in _FENCE.finditer(text)}
    assert len(shown) == 2
    assert {name: (ROOT / name).read_text(encoding="utf-8") for name in shown} == shown
