"""The written pages of docs/ as pages of the site: Markdown as HTML, with links that lead to the site's pages."""

from __future__ import annotations

import itertools
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from markupsafe import Markup, escape

from attnreg.compile.inputs.bundled import registry_root
from attnreg.loader import bundled_registries
from docs_site import tables
from docs_site.charts import Chart
from docs_site.code import highlighted
from docs_site.frame import Asset, Page, Site
from docs_site.measured import peers_chart, quality_charts

# pages of the checkout beside docs/
_ALSO = ("CHANGELOG.md", "CONTRIBUTING.md")
# readers, in whose group a guide stands -> what they do, and the prefixes of their guides' files
_READERS = {
    "Operators": (
        "You run an engine, and ask which kernel it takes.",
        (
            "docs/getting_started",
            "docs/glossary",
            "docs/explain",
            "docs/plan",
            "docs/why",
            "docs/check",
            "docs/findings",
            "docs/field_problems",
            "docs/picker",
            "docs/commands/",
            "docs/attention_backends",
            "docs/orders",
            "docs/legend",
            "docs/proofs",
            "docs/model",
            "docs/engines/",
            "docs/speed",
            "docs/kv_quality",
            "docs/exactness",
            "docs/security",
            "docs/stability",
            "CHANGELOG",
        ),
    ),
    "Engine developers": (
        "You run attention through attnreg, in an engine or a library.",
        (
            "docs/running",
            "docs/python_api",
            "docs/vllm",
            "docs/sglang",
            "docs/transformers",
            "docs/diffusers",
            "docs/stacks",
        ),
    ),
    "Authors of kernels and data": (
        "You add a backend, a model or a measurement, or change attnreg itself.",
        ("docs/writing", "docs/contributing", "docs/tiles", "docs/architecture", "docs/site", "CONTRIBUTING"),
    ),
}
# words of the glossary that guides also use in their everyday sense: an explanation would often be wrong
_EVERYDAY = {"row", "claim", "feature", "condition", "order", "step", "finding", "evidence", "request", "platform"}
_EVERYDAY |= {"selection", "page", "block", "layout"}
_GLOSSARY = "docs/glossary.md"
_COMMENT = re.compile(r"<!--.*?-->\s*", re.DOTALL)
# an anchor of a table: the first one of each name is kept
_HERE = re.compile(r'<a id="([^"]*)">')
# a narrow page stacks the rows of a table with so few columns; another one scrolls
_MOST_STACKED = 5
# the deepest level of headings in the contents of a page
_DEEPEST = 3
_ELSEWHERE = re.compile(r"[a-z]+:|//")


class _Renderer(RendererHTML):
    """HTML with wide tables and code that scroll, also by the keyboard."""

    def table_open(self, tokens: Sequence[Token], number: int, *_: object) -> str:
        label = escape(tokens[number].meta["label"])
        head = f'<div class="scroll" role="region" tabindex="0" aria-label="Table: {label}">'
        stack = " stack" * (len(tokens[number].meta["columns"]) <= _MOST_STACKED)
        return f'{head}<table class="filter{stack}">\n'

    def table_close(self, *_: object) -> str:
        return "</table></div>\n"

    def th_open(self, tokens: Sequence[Token], number: int, options: OptionsDict, env: EnvType) -> str:
        """A cell with its alignment as a class, because a page's policy allows no inline style."""
        attributes = tokens[number].attrs
        if style := attributes.pop("style", None):
            attributes["class"] = str(style).removeprefix("text-align:")
        return self.renderToken(tokens, number, options, env)

    td_open = th_open

    def fence(self, tokens: Sequence[Token], number: int, *_: object) -> str:
        token = tokens[number]
        code = highlighted(token.info, token.content)
        # a narrow page breaks commands; their output is a table, which scrolls
        commands = all(line.startswith("$ ") or not line for line in token.content.split("\n"))
        return f'<div class="code{" commands" * commands}"><pre tabindex="0"><code>{code}</code></pre></div>\n'


class Heading(NamedTuple):
    """A heading of a guide: its level, its text and its anchor."""

    level: int
    text: str
    anchor: str


class Rendered(NamedTuple):
    """A guide: its title, its HTML, its headings below the title, and its first paragraph as text."""

    title: str
    html: Markup
    headings: list[Heading]
    first: str


def pages(site: Site) -> Iterator[Page | Asset]:
    """A page for each Markdown file, their list, and the pictures and schemas that they link to."""
    files = sorted(p.relative_to(site.root).as_posix() for p in (site.root / "docs").rglob("*.md"))
    texts = {file: (site.root / file).read_text(encoding="utf-8") for file in (*files, *_ALSO)}
    texts |= dict(tables.guides(site.bundled))
    charts = {"docs/speed.md": [peers_chart(site.root)], "docs/kv_quality.md": quality_charts(site.root)[-1:]}
    groups = [(reader, does, _of_reader(texts, starts)) for reader, (does, starts) in _READERS.items()]
    if alone := texts.keys() - {file for _, _, some in groups for file in some}:
        raise ValueError(f"no reader of guides.py has {', '.join(sorted(alone))}")
    rendered = {file: render(site, file, text) for file, text in texts.items()}
    ordered = [file for _, _, some in groups for file in some]
    for before, file, after in zip([None, *ordered], ordered, [*ordered[1:], None], strict=False):
        beside = [(path_of(at), rendered[at].title) if at else None for at in (before, after)]
        yield guide(file, rendered[file], beside, charts.get(file, []))
    shown = [(reader, does, [(path_of(f), rendered[f]) for f in some]) for reader, does, some in groups]
    yield Page("guides/index.html", "guides.html.j2", "Guides", {"groups": shown}, kind="list")
    for folder in ("images", "schema"):
        for path in sorted((site.root / "docs" / folder).iterdir()):
            yield Asset(f"guides/{folder}/{path.name}", path.read_bytes())


def _of_reader(files: Iterable[str], starts: Sequence[str]) -> list[str]:
    """The guides of a reader, in the order of their prefixes."""
    return [file for start in starts for file in sorted(files) if file.startswith(start)]


def path_of(file: str) -> str:
    """The page of a Markdown file of the checkout: ``guides/engines/vllm-0.33.0.html``."""
    return f"guides/{file.removeprefix('docs/').removesuffix('.md').lower()}.html"


def guide(
    file: str, text: Rendered, beside: Sequence[tuple[str, str] | None] = (None, None), charts: Sequence[Chart] = ()
) -> Page:
    """The page of a rendered file of the checkout, with the guides before and after it."""
    above = (("Guides", "guides/index.html"),)
    head, end, rest = text.html.partition("</h1>")
    # charts stand below what the guide says first
    intro, section, below = rest.partition("<h2")
    values = {
        "head": Markup(head + end),
        "intro": Markup(intro),
        "html": Markup(section + below),
        "headings": [heading for heading in text.headings if heading.level <= _DEEPEST],
        "beside": beside,
        "charts": charts,
        "file": f"tools/docs_site/pages/{file.removeprefix('docs/')}" if file in tables.WRITTEN else file,
        "edit": edit_address(),
    }
    return Page(path_of(file), "guide.html.j2", text.title, values, kind="guide", above=above)


def edit_address() -> str:
    """Where a file of the checkout is edited: the repository whose workflow builds the site; "" for any other build."""
    server, repository = (os.environ.get(f"GITHUB_{name}", "") for name in ("SERVER_URL", "REPOSITORY"))
    return f"{server}/{repository}/edit/HEAD/" if server and repository else ""


@cache
def _glossary(root: Path) -> dict[str, str]:
    """The words of the glossary that have no everyday sense -> their meanings."""
    lines = (root / _GLOSSARY).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row[1].replace("`", "") for row in rows[2:] if len(row) == 2 and row[0] not in _EVERYDAY}


def render(site: Site, file: str, text: str, heading: str = "") -> Rendered:
    """A Markdown text, with its first heading as its title.

    ``file``: the links are relative to it. ``heading``: the text above it.
    """
    markdown = MarkdownIt("commonmark", {"html": True}, renderer_cls=_Renderer).enable(["table", "strikethrough"])
    tokens = markdown.parse(_COMMENT.sub("", text))
    title = ""
    tables: dict[str, int] = {}
    used: dict[str, int] = {}
    level = 0
    headings: list[Heading] = []
    first = ""
    words = dict(_glossary(site.root)) if file != _GLOSSARY and file.startswith("docs/") else {}
    columns: list[str] = []
    for token, inline in itertools.pairwise([*tokens, Token("", "", 0)]):
        if token.type == "heading_open":
            heading = _plain(inline)
            title = title or heading
            # levels of headings follow without gaps
            level = min(int(token.tag[1]), level + 1)
            token.tag = f"h{level}"
            anchor = _anchor(heading, used)
            token.attrSet("id", anchor)
            if headings or level > 1:
                headings.append(Heading(level, heading, anchor))
        elif token.type == "heading_close":
            token.tag = f"h{level}"
        elif token.type == "table_open":
            tables[heading] = tables.get(heading, 0) + 1
            token.meta["label"] = heading + (f", {tables[heading]}" if tables[heading] > 1 else "")
            columns = token.meta["columns"] = []
        elif token.type == "th_open":
            token.attrSet("scope", "col")
            columns.append(_plain(inline))
        elif token.type == "tr_open":
            column = 0
        elif token.type == "td_open":
            token.attrSet("data-label", columns[column])
            if file == _GLOSSARY and column == 0:
                token.attrSet("id", f"word-{_plain(inline)}")
            column += 1
        elif token.type == "paragraph_open":
            first = first or _plain(inline)
            if token.level == 0 and words:
                inline.children = [*_explained(site, file, inline.children or [], words)]
        for child in token.children or ():
            _relink(site, file, child)
            if child.type == "html_inline" and (here := _HERE.fullmatch(child.content)):
                child.content = "<a>" if here[1] in used else child.content
                used.setdefault(here[1], 1)
    return Rendered(title, Markup(markdown.renderer.render(tokens, markdown.options, {})), headings, first)


def _explained(site: Site, file: str, tokens: Sequence[Token], words: dict[str, str]) -> Iterator[Token]:
    """The tokens of a paragraph; the first use of a word of the glossary leads there, and is taken from ``words``."""
    inside = 0
    for token in tokens:
        inside += token.nesting if token.type.startswith("link_") else 0
        found = None if inside or not words or token.type != "text" else _word(words).search(token.content)
        while found:
            word = next(w for w in words if found[0].lower() in (w, f"{w}s", f"{w[:-1]}ies"))
            here = PurePosixPath(path_of(file)).parent.as_posix()
            to = f"{posixpath.relpath(path_of(_GLOSSARY), here)}#word-{word}"
            link = Markup('<a class="term" href="{}" title="{}">{}</a>').format(to, words.pop(word), found[0])
            yield Token("text", "", 0, content=token.content[: found.start()])
            yield Token("html_inline", "", 0, content=str(link))
            token = Token("text", "", 0, content=token.content[found.end() :])
            found = _word(words).search(token.content) if words else None
        yield token


def _word(words: Iterable[str]) -> re.Pattern[str]:
    forms = "|".join(f"{w}s?|{w[:-1]}ies" if w.endswith("y") else f"{w}s?" for w in words)
    return re.compile(rf"(?<![\w-])(?:{forms})(?![\w-])", re.IGNORECASE)


def _plain(inline: Token) -> str:
    """The text of a heading, without its markup."""
    kinds = {"softbreak": " "}
    parts = inline.children or ()
    return "".join(kinds.get(c.type, c.content) for c in parts if c.type in ("text", "code_inline", "softbreak"))


def _anchor(heading: str, used: dict[str, int]) -> str:
    """The anchor that GitHub gives a heading; a second one of the same text is numbered."""
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
    count = used.get(anchor, 0)
    used[anchor] = count + 1
    return f"{anchor}-{count}" if count else anchor


def _relink(site: Site, file: str, token: Token) -> None:
    """Let a link or a picture of a Markdown file lead to the site. A link to a missing file becomes a title."""
    name = {"link_open": "href", "image": "src"}.get(token.type)
    if name is None:
        return
    target = str(token.attrGet(name))
    path, hash_, anchor = target.partition("#")
    if not path or _ELSEWHERE.match(target):
        return
    place = posixpath.normpath(posixpath.join(PurePosixPath(file).parent.as_posix(), unquote(path)))
    there = _place_on_site(site, place)
    if there is None:
        # the checkout has it, the site does not
        token.attrs = {"title": place}
        return
    here = PurePosixPath(path_of(file)).parent.as_posix()
    token.attrSet(name, posixpath.relpath(there, here) + hash_ + anchor)


def _place_on_site(site: Site, place: str) -> str | None:
    """The path below the site of a file of the checkout; None if the site does not show it."""
    if place in _ALSO or (place.startswith("docs/") and place.endswith(".md")):
        return path_of(place)
    if place == "README.md":
        return "index.html"
    if place.startswith(("docs/images/", "docs/schema/")):
        return f"guides/{place.removeprefix('docs/')}"
    for name, folder in bundled_registries().items():
        if name in site.bundled and place == folder.relative_to(registry_root().parent).as_posix():
            return f"{name}/index.html"
    if place in {file for registry in site.bundled.values() for file in registry.files}:
        return f"files/{place}.html"
    return None
