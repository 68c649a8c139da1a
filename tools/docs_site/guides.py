"""The written pages of docs/ as pages of the site: Markdown as HTML, with links that lead to the site's pages."""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from markupsafe import Markup, escape

from attnreg.compile.inputs.bundled import registry_root
from attnreg.loader import bundled_registries
from docs_site import tables
from docs_site.frame import Asset, Page, Site

# pages of the checkout beside docs/
_ALSO = ("CHANGELOG.md", "CONTRIBUTING.md")
# titles of the groups on the page of all guides -> the prefixes of their files
_GROUPS = {
    "Start": ("docs/getting_started", "docs/glossary"),
    "Commands": ("docs/commands/",),
    "Using it": (
        "docs/explain",
        "docs/plan",
        "docs/why",
        "docs/check",
        "docs/running",
        "docs/speed",
        "docs/transformers",
        "docs/diffusers",
        "docs/vllm",
        "docs/sglang",
        "docs/kv_quality",
        "docs/findings",
        "docs/stacks",
        "docs/security",
        "docs/stability",
        "docs/python_api",
    ),
    "Everything in one table": (
        "docs/attention_backends",
        "docs/orders",
        "docs/legend",
        "docs/proofs",
        "docs/tiles",
        "docs/model",
        "docs/engines/",
        "docs/exactness",
        "docs/field_problems",
    ),
    "Writing data and code": (
        "docs/writing",
        "docs/contributing",
        "docs/architecture",
        "docs/site",
        "docs/picker",
        "CONTRIBUTING",
        "CHANGELOG",
    ),
}
_COMMENT = re.compile(r"<!--.*?-->\s*", re.DOTALL)
# an anchor of a table: the first one of each name is kept
_HERE = re.compile(r'<a id="([^"]*)">')
_ELSEWHERE = re.compile(r"[a-z]+:|//")


class _Renderer(RendererHTML):
    """HTML with wide tables and code that scroll, also by the keyboard."""

    def table_open(self, tokens: Sequence[Token], number: int, *_: object) -> str:
        label = escape(tokens[number].meta["label"])
        return f'<div class="scroll" role="region" tabindex="0" aria-label="Table: {label}"><table class="filter">\n'

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
        return f'<pre tabindex="0"><code>{escape(tokens[number].content)}</code></pre>\n'


def pages(site: Site) -> Iterator[Page | Asset]:
    """A page for each Markdown file, their list, and the pictures and schemas that they link to."""
    files = sorted(p.relative_to(site.root).as_posix() for p in (site.root / "docs").rglob("*.md"))
    texts = {file: (site.root / file).read_text(encoding="utf-8") for file in (*files, *_ALSO)}
    titles = {}
    for file, text in sorted((texts | dict(tables.guides())).items()):
        page = guide(site, file, text)
        titles[file] = page
        yield page
    groups = []
    for name, starts in _GROUPS.items():
        groups.append((name, [page for file, page in titles.items() if file.startswith(starts)]))
    named = {page.path for _, some in groups for page in some}
    groups.append(("More", [page for page in titles.values() if page.path not in named]))
    yield Page("guides/index.html", "guides.html.j2", "Guides", {"groups": [g for g in groups if g[1]]}, kind="list")
    for folder in ("images", "schema"):
        for path in sorted((site.root / "docs" / folder).iterdir()):
            yield Asset(f"guides/{folder}/{path.name}", path.read_bytes())


def path_of(file: str) -> str:
    """The page of a Markdown file of the checkout: ``guides/engines/vllm-0.33.0.html``."""
    return f"guides/{file.removeprefix('docs/').removesuffix('.md').lower()}.html"


def guide(site: Site, file: str, text: str) -> Page:
    """The page of a Markdown text. file: the file of the checkout in whose place the text stands."""
    title, html = render(site, file, text)
    above = (("Guides", "guides/index.html"),)
    return Page(path_of(file), "guide.html.j2", title, {"html": html}, kind="guide", above=above)


def render(site: Site, file: str, text: str, heading: str = "") -> tuple[str, Markup]:
    """The title of a Markdown text, its first heading, and its HTML.

    ``file``: the links are relative to it. ``heading``: the text above it.
    """
    markdown = MarkdownIt("commonmark", {"html": True}, renderer_cls=_Renderer).enable(["table", "strikethrough"])
    tokens = markdown.parse(_COMMENT.sub("", text))
    title = ""
    tables: dict[str, int] = {}
    used: dict[str, int] = {}
    level = 0
    for token, inline in itertools.pairwise([*tokens, Token("", "", 0)]):
        if token.type == "heading_open":
            heading = _plain(inline)
            title = title or heading
            # levels of headings follow without gaps
            level = min(int(token.tag[1]), level + 1)
            token.tag = f"h{level}"
            anchor = _anchor(heading, used)
            token.attrSet("id", anchor)
        elif token.type == "heading_close":
            token.tag = f"h{level}"
        elif token.type == "table_open":
            tables[heading] = tables.get(heading, 0) + 1
            token.meta["label"] = heading + (f", {tables[heading]}" if tables[heading] > 1 else "")
        elif token.type == "th_open":
            token.attrSet("scope", "col")
        for child in token.children or ():
            _relink(site, file, child)
            if child.type == "html_inline" and (here := _HERE.fullmatch(child.content)):
                child.content = "<a>" if here[1] in used else child.content
                used.setdefault(here[1], 1)
    return title, Markup(markdown.renderer.render(tokens, markdown.options, {}))


def _plain(inline: Token) -> str:
    """The text of a heading, without its markup."""
    return "".join(child.content for child in inline.children or () if child.type in ("text", "code_inline"))


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
