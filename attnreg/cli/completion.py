"""Shell completion of names, from the registry that the command line names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from attnreg.language.engine.runs import GraphMode
from attnreg.language.facets import CORE, options

if TYPE_CHECKING:
    from attnreg.language.vocabulary import Vocabulary
    from attnreg.registry import Registry

# a possible word, and its description
Named = tuple[str, str]
Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def completer(names: Callable[[Registry, str], Iterable[Named]]) -> Completer:
    """A completer for names of a registry: ``names(registry, typed)`` lists them."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from attnreg.loader import load_registry

        try:
            registry = load_registry(ctx.params.get("engine") or ctx.params.get("registry"))
        # no completions from an unreadable registry: an error would appear in the middle of the line
        except ValueError:
            return []
        return _matching(names(registry, incomplete), incomplete)

    return complete


def complete_option(ctx: click.Context, option: click.Option, incomplete: str) -> list[CompletionItem] | None:
    """Completions of an option's value, None for an option that attnreg does not complete."""
    complete = _BY_OPTION.get(option.opts[0])
    facet = option.opts[0].removeprefix("--").removeprefix("draft-").replace("-", "_")
    if complete is None and facet in (f.name for f in options("word")):
        complete = words_of(facet)
    return None if complete is None else complete(ctx, option, incomplete)


def words_of(facet: str) -> Completer:
    """Completion of a facet's words."""
    return completer(lambda registry, _: _words(registry.vocabulary, facet))


@completer
def backends(registry: Registry, incomplete: str) -> Iterator[Named]:
    """Backends; after a whole backend's name its variants too."""
    for row in registry.backends.values():
        yield row.name, row.summary
        if incomplete.casefold().startswith(row.name.casefold()):
            yield from ((f"{row.name}/{variant}", row.summary) for variant in row.variant_names)


@completer
def architectures(registry: Registry, incomplete: str) -> Iterator[Named]:
    """Architectures; after the first letter their products too."""
    for arch in registry.vocabulary.architectures.values():
        yield arch.name, f"{arch.family}: {', '.join(arch.products)}"
        if incomplete:
            yield from ((name.lower().replace(" ", "-"), arch.title) for name in arch.other_names)


@completer
def packages(registry: Registry, _: str) -> Iterator[Named]:
    """Packages that the registry knows."""
    return ((word.name, word.legend) for word in registry.vocabulary.packages.values())


@completer
def facets(registry: Registry, _: str) -> Iterator[Named]:
    """FACET=VALUE for each facet of a request."""
    return _pairs(registry, (f.name for f in registry.vocabulary.facets.values() if f.of == "request"))


@completer
def extra_facets(registry: Registry, _: str) -> Iterator[Named]:
    """FACET=VALUE for each facet of a request that has no option of its own, and that some answer depends on."""
    from attnreg.analysis.check.unused import read_facets

    declared, read = registry.vocabulary.facets.values(), read_facets(registry)
    return _pairs(registry, (f.name for f in declared if f.of == "request" and f.name in read - CORE.keys()))


@completer
def layouts(registry: Registry, _: str) -> Iterator[Named]:
    """Layouts of the KV cache, and their other names; none if the registry has no rules for them."""
    rules = registry.layout
    if rules is not None:
        yield from ((name, "a layout of the KV cache") for name in rules.layouts)
        yield from ((name, layout) for name, layout in rules.aliases.items())


@completer
def graph_modes(registry: Registry, _: str) -> Iterator[Named]:
    """Modes of CUDA graphs; none if the registry has no rules for them."""
    return ((mode, "a mode of CUDA graphs") for mode in (get_args(GraphMode) if registry.graphs else ()))


def registries(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Bundled registries and overlays, and files."""
    from attnreg.compile.inputs.bundled import bundled_overlays, bundled_registries

    words = [(name, "a bundled registry") for name in bundled_registries()]
    words += [(name, "a bundled overlay") for name in bundled_overlays()]
    return _or_files(words, incomplete)


def releases(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Engines and their bundled releases."""
    from attnreg.compile.inputs.bundled import bundled_registries, engines

    words = [(name, "the newest bundled release") for name in engines()]
    words += [(name, "a bundled release") for name in bundled_registries() if name != "default"]
    return _matching(words, incomplete)


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Models in the hub's cache, attnreg's examples, and files."""
    from attnreg.compile.inputs.configs import model_names

    return _or_files(((name, "") for name in model_names()), incomplete)


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The shell's own files."""
    return [CompletionItem(incomplete, type="file")]


def families(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Model families."""
    from attnreg.models.reader import bundled_families

    return _matching(((name, "a model family") for name in bundled_families()), incomplete)


@completer
def entries(registry: Registry, _: str) -> Iterator[Named]:
    """Orders, features, architectures and start-up steps."""
    from attnreg.explain.entries import entry_names

    yield from entry_names(registry)


def shown(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What `attnreg show` shows: backends, model families, orders, features, architectures and start-up steps."""
    return [item for complete in (backends, families, entries) for item in complete(ctx, param, incomplete)]


def commands(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The commands."""
    group = ctx.find_root().command
    assert isinstance(group, click.Group)
    named = ((name, group.get_command(ctx, name)) for name in group.list_commands(ctx))
    return _matching(((name, command.get_short_help_str()) for name, command in named if command), incomplete)


def script(cli: click.Command, shell: str) -> str:
    """The script that completes attnreg's words in a shell."""
    kind = get_completion_class(shell)
    assert kind is not None, shell
    return kind(cli, {}, "attnreg", "_ATTNREG_COMPLETE").source()


_BY_OPTION: dict[str, Completer] = {
    **dict.fromkeys(
        ("--backend", "--draft-backend", "--vision-backend", "--prefill-backend", "--prefer", "--deny"), backends
    ),
    **dict.fromkeys(("--model", "--draft"), models),
    **dict.fromkeys(("--overlay", "--lock", "--output", "--record", "--from"), files),
    **dict.fromkeys(("--layout", "--connector-layout"), layouts),
    "--arch": architectures,
    "--device-name": words_of("device"),
    "--facet": facets,
    "--feature": words_of("features"),
    "--flag": words_of("flags"),
    "--graphs": graph_modes,
    "--package": packages,
    "--platform": words_of("platform"),
    **dict.fromkeys(("--registry", "--release", "--from", "--to", "--since"), registries),
    "--engine": releases,
    "--set": extra_facets,
}


class _Bash(BashComplete):
    """Completion for bash, which takes ``=`` for a word of its own: ``--set cache_layout = NH``."""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The words before the current one, and the current one; words that bash split at ``=`` are joined again."""
        words, typed = split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
        # COMP_WORDS lacks the current word if it is empty
        words = [*words, ""][: typed + 1]
        joined: list[str] = []
        for word in words[1:]:
            if joined and (word == "=" or joined[-1].endswith("=")):
                joined[-1] += word
            else:
                joined.append(word)
        self.typed = joined[-1] if joined else ""
        return joined[:-1], self.typed

    def format_completion(self, item: CompletionItem) -> str:
        """The text that bash inserts: the part after the last ``=``."""
        name, equals, value = str(item.value).rpartition("=")
        split = equals and self.typed.startswith(f"{name}=")
        return f"{item.type},{value if split else item.value}"


add_completion_class(_Bash)


def _words(vocabulary: Vocabulary, facet: str) -> Iterable[Named]:
    words = vocabulary.words_of(facet)
    if words:
        return ((word.name, word.legend) for word in words.values())
    return ((str(word).lower(), "") for word in vocabulary.facets[facet].words)


def _pairs(registry: Registry, names: Iterable[str]) -> Iterator[Named]:
    """FACET=VALUE for each value of each facet; FACET= for a facet without words."""
    for name in names:
        words = [(f"{name}={word}", legend) for word, legend in _words(registry.vocabulary, name)]
        yield from words or [(f"{name}=", registry.vocabulary.facets[name].legend)]


def _matching(names: Iterable[Named], incomplete: str) -> list[CompletionItem]:
    typed = incomplete.casefold()
    return [CompletionItem(name, help=help_ or None) for name, help_ in names if name.casefold().startswith(typed)]


def _or_files(names: Iterable[Named], incomplete: str) -> list[CompletionItem]:
    """The names and directories that begin with the typed text; if there are none, the shell's own files."""
    items = _matching(names, incomplete)
    if not items or incomplete.startswith((".", "/", "~")):
        return [CompletionItem(incomplete, type="file")]
    here = sorted(path.name for path in Path().glob("*") if path.is_dir() and not path.name.startswith("."))
    return items + _matching(((f"{name}/", "a directory") for name in here), incomplete)
