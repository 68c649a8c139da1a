"""What the command's options mean: the registry, the platforms and the questions that they name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from attnreg.language.facets import ordinary

if TYPE_CHECKING:
    from attnreg.models.kv_memory import Memory
    from attnreg.models.questions import ModelQuestions
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest
    from attnreg.selection.question import Question

Value = str | int | bool | None


@dataclass(frozen=True, kw_only=True)
class RegistryInputs:
    """Which registry: ``--registry``, ``--overlay`` and ``--trust``."""

    registry: str | None = None
    overlay: tuple[str, ...] = ()
    trust: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        """Whether it is attnreg's own registry, as it is."""
        return not (self.registry or self.overlay or os.environ.get("ATTNREG_REGISTRY"))

    @property
    def source(self) -> str:
        """What `load_registry` reads before any overlay."""
        return self.registry or os.environ.get("ATTNREG_REGISTRY") or "default"

    def load(self, choices: Sequence[Mapping[str, Any]] = (), *, otherwise: str | None = None) -> Registry:
        """The registry, with choices laid over it; ``otherwise`` stands for the default where none is named.

        Says on stderr what is odd about attnreg's variables in the environment. Raises `RegistryError`.
        """
        from attnreg.environment import environment_problems
        from attnreg.loader import load_registry

        overlays: list[Any] = [*self.overlay, *([{"choices": list(choices)}] if choices else [])]
        loaded = load_registry(self.registry or otherwise, overlays, trust=self.trust)
        for problem in environment_problems(os.environ, loaded.vocabulary):
            click.echo(f"attnreg: {problem}", err=True)
        return loaded


@dataclass(frozen=True, kw_only=True)
class PlatformInputs:
    """Which platforms: ``--platform``, ``--arch``, ``--flag`` and ``--package``."""

    platform: str | None = None
    arch: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    @property
    def named(self) -> bool:
        """Whether a platform or an architecture is named."""
        return bool(self.platform or self.arch)

    def platforms(self, registry: Registry) -> list[Platform]:
        """Each architecture that is named, or each of a platform; this machine's first device, if neither is.

        Raises `click.UsageError` for a word that the registry does not know.
        """
        from attnreg.machine.detect import detect
        from attnreg.platforms import Platform

        vocabulary = registry.vocabulary
        if self.platform is not None:
            _validate("platform", self.platform, vocabulary.words["platforms"])
        for arch in self.arch:
            _validate("architecture", arch, vocabulary.architectures, 20)
        installed = self._installed(registry)
        if not self.named:
            here = detect(vocabulary)
            found = here.packages if installed is None else installed
            return [
                Platform(platform=here.platform, arch=here.arch, flags=here.flags | set(self.flags), packages=found)
            ]
        names = self.arch or [arch.name for arch in vocabulary.architectures_of(self.platform or "")]
        flags = frozenset(self.flags)
        return [
            Platform(
                platform=self.platform or vocabulary.architectures[name].platform,
                arch=name,
                flags=flags,
                packages=installed,
            )
            for name in names
        ]

    def _installed(self, registry: Registry) -> tuple[tuple[str, str], ...] | None:
        """Name and version of each package; None, which stands for all of them, where none is named."""
        pairs = tuple((name, version) for name, _, version in (package.partition("==") for package in self.packages))
        for name, _ in pairs:
            _validate("package", name, registry.vocabulary.packages)
        return pairs or None


@dataclass(frozen=True, kw_only=True)
class RequestInputs:
    """What is asked: a model and what is asked of it, or the facets of one request, as far as they are given."""

    model: str | None = None
    draft: str | None = None
    tp: int = 1
    layer: int | None = None
    lengths: tuple[int, ...] = ()
    facets: Mapping[str, str | int] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def given(self) -> dict[str, str | int | None]:
        """The facets as a request has them: a KV dtype of ``none`` is not given."""
        return {name: None if (name, value) == ("kv_dtype", "none") else value for name, value in self.facets.items()}

    @property
    def more(self) -> dict[str, Value]:
        """The facets of ``--set``, with their values."""
        return dict(facet_value("--set", item) for item in self.extra)

    def request(self) -> AttentionRequest:
        """The request that the facets make. Raises `click.UsageError` for options that say something of a model."""
        from attnreg.request import AttentionRequest

        for option, value in (("--draft", self.draft), ("--layer", self.layer), ("--length", self.lengths or None)):
            if value is not None:
                raise click.UsageError(f"{option} says something of a model; give --model too")
        if self.tp != 1:
            raise click.UsageError("--tp shares out a model's heads; without --model, give the heads of one rank")
        fields: dict[str, Any] = {"head_size": ordinary("head_size"), **self.given}
        return AttentionRequest(**fields, features=frozenset(self.features), extra=tuple(self.more.items()))

    def of_model(self, model: str, registry: Registry) -> ModelQuestions:
        """What the layers of a model ask."""
        from attnreg.models.questions import ModelOptions, model_questions

        options = ModelOptions(
            given=self.given,
            features=frozenset(self.features),
            extra=self.more,
            ranks=self.tp,
            layer=self.layer,
            draft=self.draft,
            lengths=tuple(sorted(set(self.lengths))),
        )
        return model_questions(model, options, registry)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run of `attnreg explain` is about; ``notes`` say what was assumed, ``memory`` is a model's KV cache."""

    registry: Registry
    platforms: Sequence[Platform]
    questions: Sequence[Question]
    title: str
    notes: Sequence[str] = ()
    memory: Memory | None = None


def read_inputs(
    source: RegistryInputs, where: PlatformInputs, asked: RequestInputs, choices: Sequence[Mapping[str, Any]] = ()
) -> Inputs:
    """The registry with the choices laid over it, the platforms, and what is asked on them."""
    from attnreg.explain.answers import title_of
    from attnreg.selection.question import Question
    from attnreg.selection.wording import request_words

    registry = source.load(choices)
    platforms = where.platforms(registry)
    if asked.model is not None:
        model = asked.of_model(asked.model, registry)
        return Inputs(
            registry=registry,
            platforms=platforms,
            questions=model.questions,
            title=title_of(platforms, registry, model.title),
            notes=model.notes,
            memory=model.memory,
        )
    request = asked.request()
    notes = [f"no --head-size and no --model: head_size {request.head_size} was assumed"]
    if "head_size" in asked.facets:
        notes = []
    question = Question(request, " · ".join(request_words(request)))
    title = title_of(platforms, registry)
    return Inputs(registry=registry, platforms=platforms, questions=[question], title=title, notes=notes)


def facet_value(option: str, item: str) -> tuple[str, Value]:
    """``FACET=VALUE`` as a name and a value: true, false, null, an integer, or else a word."""
    name, equals, text = item.partition("=")
    if not equals:
        raise click.UsageError(f"{option} {item}: expected FACET=VALUE")
    values: dict[str, Value] = {"true": True, "false": False, "null": None}
    return name, values[text] if text in values else int(text) if text.lstrip("-").isdigit() else text


def _validate(noun: str, word: str, known: Mapping[str, Any], most: int = 12) -> None:
    from attnreg.errors import did_you_mean

    if word not in known:
        raise click.UsageError(f"unknown {noun} {word!r}; {did_you_mean(word, known, most)}")
