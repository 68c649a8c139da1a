"""The pages: they name everything that the data has, their tables are tables, their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import ROOT
from support.pages.markdown import anchors, inline, links, tables

from attnreg.loader import load_registry
from attnreg.registry import Registry

# the pages about attnreg's own registry
ABOUT = ("attention_backends", "orders", "legend", "proofs")


PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


_FENCE = re.compile(r"^```(\S+) ?(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry("default")


@pytest.fixture(scope="module")
def page() -> str:
    return "\n".join((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ABOUT)


EVERY = sorted({*PAGES, *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")})
_GENERATED = re.compile(r"<!-- begin generated: \S+ -->\n.*?<!-- end generated: \S+ -->\n", re.DOTALL)
# a registry with its fingerprint, and a line of a registry's file
_CITED = re.compile(r"\b[\w.+-]+@[0-9a-f]{7}\b|\b(?:vocabulary|backends|priorities|steps|invariants|release)\.yaml:\d+")


@pytest.mark.parametrize("file", EVERY, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_cites_the_data_is_generated(file: Path) -> None:
    """A fingerprint and a line that somebody copied are those of that day."""
    assert _CITED.findall(_GENERATED.sub("", file.read_text(encoding="utf-8"))) == []


def test_copied_citations_are_found() -> None:
    cited = "registry default@64fedf9 (order cpu/mha, priorities.yaml:177); vllm-0.33.0+attention@834ffa9; mine.yaml:3"
    assert _CITED.findall(cited) == ["default@64fedf9", "priorities.yaml:177", "vllm-0.33.0+attention@834ffa9"]


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
    # attnreg's own modules are beside the pages
    homes = {s: "../" if s.startswith("attnreg:") else "https://github.com/" for s in sources}
    assert not [source for source, home in sorted(homes.items()) if f"[`{source}`]: {home}" not in page]


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
def test_orders_by_architecture_agree_with_the_selector(registry: Registry, arch: str) -> None:
    """The table of an architecture lists what the selector tries there, but for what can never run on it."""
    import attnreg

    page = (ROOT / "docs/attention_backends.md").read_text(encoding="utf-8")
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
        listed = [re.sub(r"[ /].*", "", name) for name in row[1].split(" → ")]
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


def test_the_glossary_has_the_words_that_are_used() -> None:
    glossary = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    [(_, rows)] = tables(glossary)
    words = [row[0] for row in rows]
    assert len(words) == len(set(words)) <= 20
    texts = " ".join(p.read_text(encoding="utf-8").lower() for p in PAGES if p.name != "glossary.md")
    assert {word for word in words if len(re.findall(rf"\b{word}s?\b", texts)) < 5} == set()


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_every_page_has_one_reader_on_the_site(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    from docs_site.guides import _READERS

    name = path.relative_to(ROOT).as_posix()
    assert len([reader for reader, (_, starts) in _READERS.items() if name.startswith(starts)]) == 1


# links ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EVERY, ids=lambda p: str(p.relative_to(ROOT)))
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


@pytest.mark.parametrize("path", EVERY, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_name_files_that_are_there(path: Path) -> None:
    blocks = re.findall(r"```console\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if line.lstrip().startswith(("$", "--"))]
    named = re.findall(r"(?<![\w./])(?:registry|examples|benchmarks|tests|tools)/[\w./+-]+", "\n".join(commands))
    assert [file for file in named if not (ROOT / file).exists()] == []


def test_anchors_are_unique(page: str) -> None:
    found = re.findall(r'<a id="([^"]+)"></a>', page)
    assert len(found) == len(set(found))


def test_the_page_of_the_backends_opens_quickly() -> None:
    """The answer stands on the first screen, and the page is small enough to be read."""
    text = (ROOT / "docs/attention_backends.md").read_text(encoding="utf-8")
    assert len(text.encode()) < 100_000
    assert text[:900].count("<!-- begin generated: glance -->") == 1


def test_the_glance_is_what_the_selector_answers(registry: Registry) -> None:
    """A row read back from the first table, for an architecture that shares its row with others."""
    import attnreg

    text = (ROOT / "docs/attention_backends.md").read_text(encoding="utf-8")
    header, rows = tables(text)[0]
    [row] = [row for row in rows if "sm86" in row[0]]
    answered = dict(zip(header, row, strict=True))
    platform = attnreg.Platform("cuda", "sm86")
    plain = attnreg.AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8)
    sinks = attnreg.AttentionRequest(head_size=64, num_heads=64, num_kv_heads=8, features={"sinks"})
    for column, request in (("Llama (heads of 128)", plain), ("gpt-oss (sinks)", sinks)):
        found = attnreg.select(request, platform, registry).backend
        assert found is not None
        assert answered[column].replace("[", "").replace("]", "") == found.title
