"""The frame of the site: pages and assets, the templates that lay pages out, and the function that writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import docs.page
import jinja2
from docs.markdown import slug
from docs.registries import bundled
from docs.releases import versions
from markdown_it import MarkdownIt
from markdown_it.common.utils import normalizeReference
from markupsafe import Markup

from attnreg.analysis.space import Space
from attnreg.compile.inputs.bundled import registry_root
from attnreg.errors import Location
from attnreg.loader import bundled_registries
from attnreg.models.families import Families
from attnreg.models.reader import bundled_families
from attnreg.registry import Registry
from attnreg.version import __version__
from docs_site.icons import icon
from docs_site.search import Index
from docs_site.serving import Serving
from docs_site.ways import VERDICTS

HERE = Path(__file__).parent
_MARKDOWN = MarkdownIt("commonmark")
_NO_LINK = re.compile(r"\[(<code>[^<]*</code>)\]")
# title -> path; an entry is shown where the site has the page
NAVIGATION = {
    "Pick": "pick.html",
    "Grid": "grid.html",
    "Compare": "compare.html",
    "Measured": "measured.html",
    "Models": "models/index.html",
    "Engines": "registries.html",
    "Guides": "guides/index.html",
}


# What a page may run and load: the site's own files. Python in a page is a worker of a blob and WebAssembly.
CONTENT_SECURITY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self' blob: 'wasm-unsafe-eval'",
        "worker-src blob:",
        "style-src 'self'",
        "img-src 'self'",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
    )
)


@dataclass(frozen=True)
class Page:
    """A page: its path below the site, the template that lays it out, its title, and the template's values.

    ``kind`` names its subject in the results of the search. ``registry`` is the name of the registry that it shows.
    ``above`` has the (title, path) of the pages that it belongs to, the outermost first. The search finds a page of an
    older release only by its title and the release's name: all its words would make the index far larger.
    """

    path: str
    template: str
    title: str
    values: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "page"
    registry: str = ""
    above: tuple[tuple[str, str], ...] = ()
    searched: bool = True


@dataclass(frozen=True)
class Asset:
    """A file of the site that is no page."""

    path: str
    data: bytes


@dataclass(frozen=True)
class Site:
    """The sources of the pages: the checkout, and the bundled registries by name.

    shown: the names of the registries that have pages; empty for all. asked: the bundled models whose answers are
    computed for the picker; empty for all.
    """

    root: Path
    shown: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    # results computed for one page that other pages use too
    kept: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def families(self) -> Families:
        """The model families."""
        return bundled_families()

    @cached_property
    def bundled(self) -> Mapping[str, Registry]:
        """The bundled registries that are shown, by name. Pages show the lines of every one."""
        return {name: bundled(name) for name in bundled_registries() if not self.shown or name in self.shown}

    @cached_property
    def registries(self) -> Mapping[str, Registry]:
        """The registries that rank backends in orders, and state what each backend accepts.

        The steps of the other registries name the backend of a server; `docs_site.resolved` has pages for these.
        """
        return {name: registry for name, registry in self.bundled.items() if registry.orders}

    @cached_property
    def older(self) -> set[str]:
        """The registries of an engine's releases, but for the latest bundled one."""
        return {name for names in versions(self.bundled).values() for name in names[:-1]}

    @cached_property
    def environment(self) -> jinja2.Environment:
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(HERE / "templates"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {"slug": slug, "breaks": breaks, "inline": self._inline}
        environment.globals |= {"icon": icon, "verdicts": VERDICTS}
        return environment

    def serving(self, name: str) -> Serving:
        """Where the variants of a registry accept, whatever an engine's start makes of a request before."""
        if ("serving", name) not in self.kept:
            selector = self.registries[name].selector
            self.kept["serving", name] = Serving(selector, Space([selector]))
        serving: Serving = self.kept["serving", name]
        return serving

    def space(self, name: str) -> Space:
        """The requests that a registry tells apart, also by conditions of consequences; kept for all sites."""
        return _space(name)

    def at(self, where: Location) -> str:
        """The path below the site that shows a line of data."""
        folder, _, file = where.file.rpartition("/")
        if folder == "registry/models" and not file.startswith("_"):
            return f"families/{file.removesuffix('.yaml')}.html#L{where.line}"
        return f"files/{where.file}.html#L{where.line}"

    @jinja2.pass_context
    def _inline(self, context: jinja2.runtime.Context, text: str) -> Markup:
        """Markdown of the generated tables as HTML; a name in brackets, as ``[FLASH_ATTN]``, leads to its page."""
        registry, root = context["page"].registry, context["root"]
        # tables of many pages have the same sentences
        key = ("inline", registry, root, text)
        if key not in self.kept:
            references = self._references(registry, root)
            html = _MARKDOWN.renderInline(text, {"references": references})
            # a source without a page, as a module of attnreg's own, is no link
            self.kept[key] = Markup(_NO_LINK.sub(r"\1", html))
        kept: Markup = self.kept[key]
        return kept

    def _references(self, registry: str, root: str) -> Mapping[str, Mapping[str, str]]:
        """The targets of a registry in the form of the Markdown parser, for pages of one depth."""
        key = ("references", registry, root)
        if key not in self.kept:
            targets = self._targets(registry)
            self.kept[key] = {label: {"href": _rooted(root, to), "title": ""} for label, to in targets.items()}
        kept: Mapping[str, Mapping[str, str]] = self.kept[key]
        return kept

    def _targets(self, name: str) -> Mapping[str, str]:
        """Label of every shortcut link of a registry's tables -> its address, or its path below the site."""
        if name not in self.bundled:
            return {}
        if ("targets", name) not in self.kept:
            self.kept["targets", name] = _targets(name, self.bundled[name])
        targets: Mapping[str, str] = self.kept["targets", name]
        return targets

    def text(self, file: str) -> str:
        """The text of a data file, by the name that locations give it."""
        return (registry_root().parent / file).read_text(encoding="utf-8")

    def write(self, folder: Path, items: Iterable[Page | Asset]) -> list[str]:
        """Write pages and assets, with the index of the search, and return their paths.

        The folder must be empty or absent. Raises ValueError for two items with one path.
        """
        pages: list[Page] = []
        written: dict[str, None] = {}
        index = Index()
        items = list(items)
        paths = {item.path for item in items}
        navigation = [(title, path) for title, path in NAVIGATION.items() if path in paths]
        for item in items:
            if item.path in written:
                raise ValueError(f"two pages of the site are {item.path}")
            written[item.path] = None
            if isinstance(item, Page):
                text = self._rendered(item, navigation)
                if item.searched:
                    about = f"<main>{item.registry} {item.registry.rpartition('-')[2]}</main>"
                    index.add(item.path, item.title, item.kind, about if item.registry in self.older else text)
                pages.append(item)
                self._put(folder, item.path, text.encode())
            else:
                self._put(folder, item.path, item.data)
        self._put(folder, "assets/search-index.js", index.script().encode())
        return [*written, "assets/search-index.js"]

    def _rendered(self, page: Page, navigation: list[tuple[str, str]]) -> str:
        registry = self.bundled.get(page.registry)
        values = {
            "site": self,
            "page": page,
            "title": page.title,
            "root": "../" * page.path.count("/"),
            "navigation": navigation,
            "content_security": CONTENT_SECURITY,
            "registry": registry,
            "version": __version__,
        }
        return self.environment.get_template(page.template).render(values | dict(page.values))

    def _put(self, folder: Path, path: str, data: bytes) -> None:
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)


@cache
def _space(name: str) -> Space:
    registry = bundled(name)
    variants = [variant for row in registry.backends.values() for variant in row.variants]
    known = [consequence.when for variant in variants for consequence in variant.consequences]
    # the values of a quotient have no finite classes
    return Space([registry], [when for when in known if not registry.vocabulary.divides(when.facets)])


def _targets(name: str, registry: Registry) -> dict[str, str]:
    claims = registry.vocabulary.claims
    orders = [order for some in registry.orders.values() for order in some]
    targets = {label: url for label, url in docs.page.Page(registry).links().items() if url.startswith("https:")}
    targets |= {key: f"{name}/index.html#facet-{slug(facet.name)}" for key, facet in claims.items()}
    targets |= {row: f"{name}/backends/{row}.html" for row in registry.backends}
    if orders:
        targets |= {word: f"{name}/features/{word}.html" for word in registry.vocabulary.features}
    targets |= {order.title: f"{name}/orders.html#order-{slug(order.title)}" for order in orders}
    return {normalizeReference(label): to for label, to in targets.items()}


@cache
def breaks(name: str) -> Markup:
    """A name as HTML that may be broken after each underscore."""
    return Markup("_<wbr>").join(Markup.escape(part) for part in name.split("_"))


def _rooted(root: str, target: str) -> str:
    return target if target.startswith("https:") else root + target


def assets() -> Iterator[Asset]:
    """The files of assets/, as they are."""
    for file in sorted((HERE / "assets").rglob("*.*")):
        yield Asset(file.relative_to(HERE).as_posix(), file.read_bytes())


def yaml_lines(text: str) -> list[Markup]:
    """The lines of a YAML file as HTML, its keys and comments marked."""
    return [_yaml_line(line) for line in text.rstrip("\n").split("\n")]


def _yaml_line(line: str) -> Markup:
    stripped = line.lstrip()
    if stripped.startswith("#"):
        return Markup('<span class="c">{}</span>').format(line)
    head, colon, tail = line.partition(":")
    if not colon or not head.strip(" -").replace("_", "").replace("-", "").replace(".", "").isalnum():
        return Markup("{}").format(line)
    value, hash_, comment = tail.partition(" #")
    marked = Markup('<span class="k">{}</span>:{}').format(head, value)
    return marked + Markup('<span class="c">{}</span>').format(hash_ + comment) if hash_ else marked
