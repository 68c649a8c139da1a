"""What the command's options mean: shared sets of them, and the registries, platforms and questions that they name."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from attnreg.language.facets import CORE, ordinary
from attnreg.language.facets import options as facet_options

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem
    from rich.console import Console

    from attnreg.language.vocabulary import Vocabulary
    from attnreg.platforms import Platform
    from attnreg.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])
_PIPED_WIDTH = 110


def _completer(words: Callable[[Vocabulary], Sequence[tuple[str, str]]]) -> Any:
    """Completion from the default registry's words, with their legends."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        from attnreg.loader import load_registry

        vocabulary = load_registry().vocabulary
        return [CompletionItem(w, help=h) for w, h in words(vocabulary) if w.startswith(incomplete)]

    return complete


def complete_backend(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from attnreg.loader import load_registry

    rows = load_registry(ctx.params.get("registry")).backends.values()
    return [CompletionItem(r.name, help=r.summary) for r in rows if r.name.startswith(incomplete)]


def _words_of(facet: str) -> Callable[[Vocabulary], Sequence[tuple[str, str]]]:
    return lambda vocabulary: [(word.name, word.legend) for word in vocabulary.words_of(facet).values()]


def registry_options(command: F) -> F:
    """``--registry``, ``--overlay`` and ``--trust``."""
    options = [
        click.option(
            "--registry", metavar="NAME|DIR|FILE", help="A bundled registry, a directory, or an overlay file."
        ),
        click.option("--overlay", multiple=True, metavar="FILE", help="Lay a file over the registry; repeatable."),
        click.option("--trust", multiple=True, metavar="PACKAGE", help="Let rows import modules of this package."),
    ]
    return _with_options(command, options)


def request_options(command: F) -> F:
    """An option for every facet of a request."""
    positive = click.IntRange(min=1)
    options = [
        click.option("--model", metavar="CONFIG", help="A config.json, or the directory that holds one."),
        click.option("--draft", metavar="CONFIG", help="The model that drafts for it; its layers have the draft role."),
        click.option(
            "--tp", type=positive, default=1, metavar="N", help="Ranks of tensor parallelism; heads per rank."
        ),
        click.option("--layer", type=click.IntRange(min=0), metavar="I", help="Only this layer of the model."),
        click.option(
            "--length",
            "lengths",
            type=positive,
            multiple=True,
            metavar="N",
            help="Count the KV cache at this many tokens; repeatable.",
        ),
    ]
    for facet in facet_options("word"):
        complete = _completer(_words_of(facet.name))
        options.append(click.option(_flag(facet.name), metavar="WORD", shell_complete=complete, help=facet.help))
    options += [
        click.option(_flag(facet.name), type=int, metavar="N", help=facet.help) for facet in facet_options("integer")
    ]
    options += [
        click.option(
            "--feature",
            "features",
            multiple=True,
            metavar="WORD",
            shell_complete=_completer(_words_of("features")),
            help=CORE["features"].help,
        ),
        click.option(
            "--set", "extra", multiple=True, metavar="FACET=VALUE", help="A facet that the registry declares."
        ),
    ]
    return _with_options(command, options)


def platform_options(command: F) -> F:
    """``--platform``, ``--arch``, ``--flag`` and ``--package``."""
    archs = _completer(lambda v: [(a.name, a.family) for a in v.architectures.values()])
    options = [
        click.option(
            "--platform",
            metavar="WORD",
            shell_complete=_completer(_words_of("platform")),
            help=CORE["platform"].help,
        ),
        click.option("--arch", multiple=True, metavar="WORD", shell_complete=archs, help=CORE["arch"].help),
        click.option(
            "--flag",
            "flags",
            multiple=True,
            metavar="WORD",
            shell_complete=_completer(_words_of("flags")),
            help=CORE["flags"].help,
        ),
        click.option(
            "--package",
            "packages",
            multiple=True,
            metavar="NAME[==VERSION]",
            help=CORE["packages"].help,
        ),
    ]
    return _with_options(command, options)


def _with_options(command: F, options: Sequence[Callable[[F], F]]) -> F:
    for option in reversed(options):
        command = option(command)
    return command


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def load(registry: str | None, overlay: Sequence[Any], trust: Sequence[str]) -> Registry:
    from attnreg.environment import environment_problems
    from attnreg.loader import load_registry

    loaded = load_registry(registry, overlay, trust=trust)
    for problem in environment_problems(os.environ, loaded.vocabulary):
        click.echo(f"attnreg: {problem}", err=True)
    return loaded


def terminal(width: int | None = None) -> Console:
    from rich.console import Console

    # a pipe has no width of its own
    return Console(
        width=width or (None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH), highlight=False
    )


def platforms_of(
    registry: Registry, platform: str | None, archs: Sequence[str], flags: Sequence[str], packages: Sequence[str]
) -> list[Platform]:
    """The platforms that the options name: each architecture of one, or this machine's first device."""
    from attnreg.errors import did_you_mean
    from attnreg.machine.detect import detect
    from attnreg.platforms import Platform

    vocabulary = registry.vocabulary
    known = vocabulary.words["platforms"]
    if platform is not None and platform not in known:
        raise click.UsageError(f"unknown platform {platform!r}; {did_you_mean(platform, known)}")
    for arch in archs:
        if arch not in vocabulary.architectures:
            raise click.UsageError(f"unknown architecture {arch!r}; {did_you_mean(arch, vocabulary.architectures, 20)}")
    installed = {name: version for name, _, version in (p.partition("==") for p in packages)} if packages else None
    for name in installed or ():
        if name not in vocabulary.packages:
            raise click.UsageError(f"unknown package {name!r}; {did_you_mean(name, vocabulary.packages)}")
    if platform is None and not archs:
        here = detect(vocabulary)
        found = installed if installed is not None else here.packages
        return [Platform(platform=here.platform, arch=here.arch, flags=here.flags | set(flags), packages=found)]  # type: ignore[arg-type]
    names = archs or [a.name for a in vocabulary.architectures_of(platform or "")]
    return [
        Platform(
            platform=platform or vocabulary.architectures[name].platform,
            arch=name,
            flags=frozenset(flags),
            packages=installed,  # type: ignore[arg-type]
        )
        for name in names
    ]


def questions_of(options: dict[str, Any], platforms: Sequence[Platform], registry: Registry) -> Any:
    """The questions that the options ask, the line that names them, what was assumed, and a model's KV cache."""
    from attnreg.explain.answers import title_of
    from attnreg.request import AttentionRequest
    from attnreg.selection.question import Question
    from attnreg.selection.wording import request_words

    names = [facet.name for kind in ("word", "integer") for facet in facet_options(kind)]
    given = {name: options[name] for name in names if options[name] is not None}
    if given.get("kv_dtype") == "none":
        given["kv_dtype"] = None
    features = frozenset(options["features"])
    extra = dict(pair(item) for item in options["extra"])
    if options["model"] is None:
        size = ordinary("head_size")
        request = AttentionRequest(**{"head_size": size, **given}, features=features, extra=extra)  # type: ignore[arg-type]
        assumed = [] if "head_size" in given else [f"no --head-size and no --model: head_size {size} was assumed"]
        for name in ("draft", "layer", "lengths"):
            if options[name] not in (None, ()):
                raise click.UsageError(f"--{name.removesuffix('s')} says something of a model; give --model too")
        if options["tp"] != 1:
            raise click.UsageError("--tp shares out a model's heads; without --model, give the heads of one rank")
        question = Question(request, " · ".join(request_words(request)))
        return [question], title_of(platforms, registry), assumed, None
    from attnreg.models.questions import ModelOptions, model_questions

    asked = model_questions(
        options["model"],
        ModelOptions(
            given=given,
            features=features,
            extra=extra,
            ranks=options["tp"],
            layer=options["layer"],
            draft=options["draft"],
            lengths=tuple(sorted(set(options["lengths"]))),
        ),
        registry,
    )
    return asked.questions, title_of(platforms, registry, asked.title), asked.notes, asked.memory


def pair(item: str) -> tuple[str, Any]:
    name, equals, text = item.partition("=")
    if not equals:
        raise click.UsageError(f"--set {item}: expected FACET=VALUE")
    values: dict[str, Any] = {"true": True, "false": False, "null": None}
    return name, values[text] if text in values else int(text) if text.lstrip("-").isdigit() else text
