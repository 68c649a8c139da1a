"""The docs say what the data says: generated files are fresh, links lead somewhere, examples load."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import re
import shutil
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from support import ROOT

from attnreg.cli.docs import stale_docs
from attnreg.compile.yaml_source import Document
from attnreg.errors import Problem, RegistryError
from attnreg.kernels.aiter.upstream import load_record, record
from attnreg.language.conditions import Parser
from attnreg.loader import load_registry
from attnreg.registry import Registry

PAGE = ROOT / "docs/attention_backends.md"
GUIDE = ROOT / "docs/writing_data.md"
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
SCHEMAS = sorted((ROOT / "docs/schema").glob("*.schema.json"))
COMMAND = "python tools/gen_docs.py"
_FENCE = re.compile(r"^```(\S+) ?(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry("default")


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture
def gen_docs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/gen_docs.py, imported as `stale_docs` does."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location("gen_docs_under_test", ROOT / "tools/gen_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path, gen_docs: ModuleType) -> Path:
    """A copy of what the generator reads and writes in a checkout, with fresh docs."""
    for name in ("docs", "tools", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in gen_docs.outputs(tmp_path).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


# the generated files -------------------------------------------------------------------------------------------------


def test_docs_are_fresh() -> None:
    """The failure is the diff and the command that mends it."""
    difference = stale_docs()
    assert difference == "", difference


def test_generating_twice_gives_the_same_bytes(gen_docs: ModuleType) -> None:
    assert gen_docs.outputs(ROOT) == gen_docs.outputs(ROOT)


@pytest.mark.parametrize(
    ("name", "text", "other"),
    [
        ("docs/attention_backends.md", "[TURBOQUANT]", "[TURBOJET]"),
        ("docs/explain.md", "TRITON_ATTN   4th", "TRITON_ATTN   1st"),
        ("docs/schema/overlay.schema.json", '"sm90"', '"sm91"'),
        ("docs/images/explain.svg", "TRITON_ATTN", "TRITON_BTTN"),
    ],
)
def test_stale_file_is_found(checkout: Path, name: str, text: str, other: str) -> None:
    assert stale_docs(checkout) == ""
    file = checkout / name
    before = file.read_text(encoding="utf-8")
    assert text in before
    file.write_text(before.replace(text, other), encoding="utf-8")
    difference = stale_docs(checkout)
    assert difference
    assert f"--- {name} (as it is)" in difference
    assert other in "".join(line for line in difference.splitlines() if line.startswith("-"))
    assert text in "".join(line for line in difference.splitlines() if line.startswith("+"))
    assert difference.endswith(f"Run: {COMMAND}")


def test_missing_file_is_stale(checkout: Path) -> None:
    (checkout / "docs/images/explain.svg").unlink()
    assert "+++ docs/images/explain.svg (generated)" in (stale_docs(checkout) or "")


def test_prose_is_left_alone(checkout: Path) -> None:
    """What people write between the blocks is theirs."""
    file = checkout / "docs/attention_backends.md"
    file.write_text(file.read_text(encoding="utf-8").replace("# Attention backends\n", "# Backends\n\nMore.\n", 1))
    assert stale_docs(checkout) == ""


def test_without_a_checkout_there_is_nothing_to_check(tmp_path: Path) -> None:
    assert stale_docs(tmp_path) is None


def test_the_module_path_is_left_as_it_was() -> None:
    before = list(sys.path)
    stale_docs()
    assert sys.path == before


def test_check_writes_nothing_and_exits_with_1(
    gen_docs: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gen_docs, "__file__", str(checkout / "tools/gen_docs.py"))
    assert gen_docs.main(["--check"]) == 0
    file = checkout / "docs/images/explain.svg"
    stale = file.read_text(encoding="utf-8").replace("TRITON_ATTN", "TRITON_BTTN")
    file.write_text(stale, encoding="utf-8")
    capsys.readouterr()
    assert gen_docs.main(["--check"]) == 1
    assert COMMAND in capsys.readouterr().out
    assert file.read_text(encoding="utf-8") == stale
    assert gen_docs.main([]) == 0
    assert capsys.readouterr().out == "wrote docs/images/explain.svg\n"
    assert gen_docs.main(["--check"]) == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "markers are missing for `a`"),
        ("<!-- begin generated: a -->\n<!-- end generated: b -->\n", "`a` is closed by the marker of `b`"),
        ("<!-- begin generated: a -->\n<!-- end generated: a -->\n" * 2, "the markers of `a` are there twice"),
        ("<!-- begin generated: c -->\n<!-- end generated: c -->\n", "no block is called `c`"),
        ("<!-- begin generated: a -->\n", "a marker stands alone"),
        ("<!-- begin generated: a --> <!-- end generated: a -->\n", "not on a line of its own"),
    ],
)
def test_malformed_markers_are_refused(gen_docs: ModuleType, text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)):
        gen_docs.fill("page.md", text, {"a": "text"})


# the page ------------------------------------------------------------------------------------------------------------


def test_page_names_everything(registry: Registry, page: str) -> None:
    vocabulary = registry.vocabulary
    words = {w for group in vocabulary.words.values() for w in group}
    names = {*vocabulary.facets, *vocabulary.features, *vocabulary.flags, *vocabulary.packages, *words}
    names |= {*vocabulary.architectures, *vocabulary.retired_environment}
    missing = [name for name in sorted(names) if f"`{name}`" not in page]
    titles = [f"{b.name}{f'/{v.name}' * bool(v.name)} " for b in registry.backends.values() for v in b.variants]
    missing += [title for title in titles if f"\n| {title}" not in page]
    missing += [f"**{o.name}**" for orders in registry.orders.values() for o in orders if f"**{o.name}**" not in page]
    missing += [i.name for i in registry.invariants if f"- **{i.name}**: " not in page]
    missing += [s.url for s in registry.sources.values() if s.url not in page]
    assert not missing


def test_page_has_every_reason(registry: Registry, page: str) -> None:
    """Rules, emulations, notes, orders: each with its sentence, and its source where it has one."""
    texts = {o.because for orders in registry.orders.values() for o in orders if o.because}
    sources = {o.source for orders in registry.orders.values() for o in orders if o.source}
    for row in registry.backends.values():
        texts |= {row.summary, *row.notes, *([row.only_on_request] if row.only_on_request else [])}
        sources.add(row.source)
        for variant in row.variants:
            texts |= {r.reject for r in variant.rules} | {text for text, _ in variant.emulated.values()}
            sources |= {r.source for r in variant.rules if r.source}
    plain = page.replace("\\", "")
    assert not [text for text in sorted(texts) if text not in plain]
    assert not [source for source in sorted(sources) if f"[`{source}`]: https://github.com/" not in page]


def test_features_are_marked_as_the_rows_claim_them(registry: Registry, page: str) -> None:
    """The matrix, read back from the page."""
    found: dict[str, dict[str, str]] = {}
    for header, rows in tables(page):
        if header[0] == "backend" and header[-1] in registry.vocabulary.features:
            for row in rows:
                found.setdefault(row[0], {}).update(dict(zip(header, row, strict=True)))
    assert len(found) == sum(len(b.variants) for b in registry.backends.values())
    for backend in registry.backends.values():
        for variant in backend.variants:
            marks = found[f"{backend.name}/{variant.name}" if variant.name else backend.name]
            for feature in registry.vocabulary.features:
                mark = marks.get(feature, "")
                assert (mark == "✓") == (feature in variant.features), (backend.name, variant.name, feature)
                assert mark.startswith("◐") == (feature in variant.emulated), (backend.name, variant.name, feature)


@pytest.mark.parametrize("arch", ["sm75", "sm90", "sm100", "gfx90a", "gfx942", "gfx1201"])
def test_orders_by_architecture_agree_with_the_selector(registry: Registry, page: str, arch: str) -> None:
    """The table of an architecture lists what the selector tries there, but for what can never run on it."""
    import attnreg

    section = re.split(r"^#{3,4} ", page, flags=re.MULTILINE)
    [text] = [part for part in section if arch in part.partition("\n")[0].split(", ")]
    [(_, rows)] = tables(text + "\n" + page[page.index("<!-- begin generated: links -->") :])
    platform = attnreg.Platform(
        platform=registry.vocabulary.architectures[arch].platform,
        arch=arch,
        flags=frozenset({"aiter", "aiter_mha", "aiter_mla"}) if arch.startswith("gfx") else frozenset(),
    )
    for attention, head_size in (("mha", 128), ("mla", 576)):
        request = attnreg.AttentionRequest(head_size=head_size, attention=attention)
        selection = attnreg.select(request, platform, registry)
        assert selection.order is not None
        assert selection.backend is not None
        [row] = [r for r in rows if r[2] == selection.order.title]
        listed = [re.sub(r" \(.*", "", name) for name in row[1].split(" → ")]
        able = [c.name for c in selection.candidates if not any("arch" in r.facets for r in c.reasons)]
        assert [name for name in listed if name in able] == able
        assert selection.backend.name in listed


def test_tables_are_tables(page: str) -> None:
    """Every line that looks like a row of a table is one, and every table has its columns throughout."""
    for text in (page, *(p.read_text(encoding="utf-8") for p in PAGES)):
        prose = _FENCE.sub("", text)
        rows = [line for line in prose.split("\n") if line.startswith("|")]
        parsed = tables(prose)
        assert sum(len(body) + 2 for _, body in parsed) == len(rows)
        for line in rows:
            assert line.endswith(" |")


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_no_trailing_spaces(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").split("\n")
    assert [i for i, line in enumerate(lines, 1) if line != line.rstrip()] == []


# links ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    broken = []
    for target in links(text):
        if re.match(r"https?://|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists():
            broken.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(there.read_text(encoding="utf-8")):
            broken.append(f"{target}: no such anchor")
    assert not broken
    # a label in brackets that no definition makes a link is printed as it stands
    shown = "".join(t.content for t in inline(text) if t.type == "text")
    assert not re.findall(r"\[[A-Za-z`][\w/`-]*\]", shown)


def test_anchors_are_unique(page: str) -> None:
    found = re.findall(r'<a id="([^"]+)"></a>', page)
    assert len(found) == len(set(found))


# schemas -------------------------------------------------------------------------------------------------------------


def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((ROOT / f"docs/schema/{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def data_of(name: str) -> Any:
    return Document.load(ROOT / f"registry/{name}.yaml").data


def test_there_is_a_schema_for_every_kind_of_file() -> None:
    names = {"vocabulary", "backends", "priorities", "invariants", "models", "overlay"}
    assert {path.name.removesuffix(".schema.json") for path in SCHEMAS} == names


@pytest.mark.parametrize("name", ["vocabulary", "backends", "priorities", "invariants", "models"])
def test_shipped_data_satisfies_its_schema(name: str) -> None:
    validator(name).validate(data_of(name))


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("vocabulary", ("features", "sinks"), 3),
        ("models", ("families", "llama", "haeds"), "num_heads"),
        ("models", ("families", "llama", "heads"), {"plus": [1, 2]}),
        ("models", ("families", "llama", "pattern"), {"evry": 2}),
        ("models", ("families", "llama", "words"), {"full_attention": {"kind": "ful"}}),
        ("vocabulary", ("facets", "arch", "kind"), "number"),
        ("vocabulary", ("facts",), {}),
        ("backends", ("backends", "FLASH_ATTN", "head_sizes"), [64]),
        ("backends", ("backends", "FLASH_ATTN", "capabilities", "dtypes"), ["fp16"]),
        ("backends", ("backends", "FLASH_ATTN", "capabilities", "head_sizes"), {"multiple": 8}),
        ("backends", ("backends", "FLASH_ATTN", "capabilities", "features"), ["sink"]),
        ("backends", ("backends", "FLASH_ATTN", "requires"), {"packages": ["flash-atn>=2.7"]}),
        ("backends", ("backends", "FLASH_ATTN", "requires"), {"flags": ["aiterr"]}),
        ("backends", ("backends", "FLASH_ATTN", "platforms"), ["cud"]),
        ("backends", ("backends", "FLASH_ATTN", "emulated"), {"sink": "slow"}),
        ("priorities", ("cuda", 0, "order"), ["FLASH_ATN"]),
        ("priorities", ("cuda", 0, "order"), []),
        ("priorities", ("cuda", 0, "when"), {"arhc": "sm90"}),
        ("priorities", ("cuda", 0, "when"), {"arch": {"min": "sm91"}}),
        ("priorities", ("cuda", 0, "when"), {"head_size": "64"}),
        ("priorities", ("cuda", 0, "when"), {"any": []}),
        ("priorities", ("cuda", 0, "when"), {"kv_quantized": "yes"}),
        ("priorities", ("cuda", 0, "because"), 1),
        ("priorities", ("metal",), []),
        ("invariants", ("invariants", 0, "never"), ["NOBODY"]),
        ("invariants", ("invariants", 0, "finds"), False),
    ],
)
def test_wrong_data_does_not(name: str, path: tuple[str | int, ...], value: Any) -> None:
    data = data_of(name)
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    assert not validator(name).is_valid(data)


@pytest.mark.parametrize(
    ("overlay", "valid"),
    [
        ({"choices": [{"when": {"role": "draft"}, "prefer": "TRITON_ATTN"}, {"deny": ["FLASHINFER"]}]}, True),
        ({"backends": {"FLASH_ATTN": {"status": "experimental"}}, "place": []}, True),
        ({"choices": [{"require": "MY_ATTN"}]}, True),
        ({"choises": []}, False),
        ({"choices": [{"prefer": "triton"}]}, False),
        ({"backends": {"FLASH_ATTN": {"platforms": ["cuda"]}}}, False),
        ({"backends": {"MY_ATTN": {"summary": 1}}}, False),
        ({"orders": {"cuda": [{"name": "mine"}]}}, False),
    ],
)
def test_overlay_schema(overlay: dict[str, Any], valid: bool) -> None:
    assert validator("overlay").is_valid(overlay) is valid


def test_patterns_are_read_alike_everywhere() -> None:
    """Editors compile patterns as ECMAScript with the u flag, which refuses needless escapes."""
    for path in SCHEMAS:
        text = path.read_text(encoding="utf-8")
        for pattern in re.findall(r'"pattern": ("(?:[^"\\]|\\.)*")', text):
            assert set(re.findall(r"\\(.)", json.loads(pattern))) <= {"s"}


# the guide -----------------------------------------------------------------------------------------------------------


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
    if kind == "upstream.yaml":
        (tmp_path / kind).write_text(f"sources:\n  aiter: {{url: '', read: 2026-11-21}}\n{body}", encoding="utf-8")
        (shown,) = load_record(tmp_path / kind).functions.values()
        recorded = record().functions[shown.name]
        assert (shown.signature, shown.revision) == (recorded.signature, recorded.revision)
        return
    nested = {"vocabulary.yaml": "vocabulary", "priorities.yaml": "orders"}.get(kind)
    assert kind in ("overlay", "error", "backends.yaml", "invariants.yaml") or nested
    file = tmp_path / "mine.yaml"
    file.write_text(f"{nested}:\n{textwrap.indent(body, '  ')}" if nested else body, encoding="utf-8")
    if kind == "error":
        with pytest.raises(RegistryError):
            load_registry("default", [file])
        return
    load_registry("default", [file])
    if nested != "vocabulary":
        validator("overlay").validate(Document.load(file).data)


def test_the_guide_shows_every_kind_of_matcher() -> None:
    [body] = [m[3] for m in _FENCE.finditer(GUIDE.read_text(encoding="utf-8")) if m[2] == "conditions"]
    words = ("min", "max", "below", "multiple_of", "not", "only", "any", "without", "packages", "flags", "features")
    assert not [word for word in words if not re.search(rf"\b{word}:", body)]
    assert not [sign for sign in ("*", "?", "null", "[") if sign not in body]


# reading Markdown ----------------------------------------------------------------------------------------------------


@functools.cache
def parsed(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)


def inline(text: str) -> list[Token]:
    return [child for token in parsed(text) for child in token.children or ()]


def links(text: str) -> list[str]:
    """The targets of all links and images."""
    keys = {"link_open": "href", "image": "src"}
    return [str(t.attrs[keys[t.type]]) for t in inline(text) if t.type in keys]


@functools.cache
def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of headings, and those written by hand."""
    found = set(re.findall(r'<a id="([^"]+)"></a>', text))
    tokens = parsed(text)
    for opening, heading in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            words = "".join(t.content for t in heading.children or ())
            slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
            found.add(slug if slug not in found else next(s for i in range(1, 99) if (s := f"{slug}-{i}") not in found))
    return found


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of every table, as the text that a reader sees."""
    out: list[tuple[list[str], list[list[str]]]] = []
    tokens = parsed(text)
    for opening, token in itertools.pairwise(tokens):
        if opening.type == "table_open":
            out.append(([], []))
        elif opening.type == "tr_open" and token.type == "td_open":
            out[-1][1].append([])
        elif opening.type in ("th_open", "td_open"):
            header, rows = out[-1]
            cells = header if opening.type == "th_open" else rows[-1]
            cells.append("".join(t.content for t in token.children or () if t.type in ("text", "code_inline")))
    return out
