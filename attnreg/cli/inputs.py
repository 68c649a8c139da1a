"""The values of shared options, as typed objects that make the registry, the platforms and the questions."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import click

from attnreg.cli.names import Place, engine_notes, places, release_of, with_table
from attnreg.cli.refusals import BadInput, refuse_unread
from attnreg.cli.screen.links import cite
from attnreg.compile.inputs.configs import example_note, find_config
from attnreg.errors import RegistryError, shown
from attnreg.language.facets import CORE, ordinary

if TYPE_CHECKING:
    from attnreg.analysis.lock import Lock
    from attnreg.language.vocabulary import Vocabulary
    from attnreg.models.families import Families
    from attnreg.models.kv_memory import Memory
    from attnreg.models.questions import ModelOptions, ModelQuestions
    from attnreg.platforms import Packages, Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest
    from attnreg.selection.question import Question

Value = str | int | bool | None
# a number with more digits stays text, which facets of integers refuse
_INTEGER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True)
class RegistryInputs:
    """The options of the registry. ``selector``: leave out the steps of the engine's start.

    ``engine`` becomes ``registry``. Raises `BadInput` if it is no release of an engine, or if both are given.
    """

    engine: str | None = None
    registry: str | None = None
    overlay: tuple[str, ...] = ()
    trust: tuple[str, ...] = ()
    allow_outside: bool = False
    selector: bool = False

    def __post_init__(self) -> None:
        if self.engine is not None and self.registry is not None:
            raise BadInput("--engine and --registry both name what is asked", "give one of them")
        if self.engine is not None:
            object.__setattr__(self, "registry", release_of(self.engine))
        elif self.registry is not None:
            with_table(self.registry, "--registry ")

    @property
    def bundled_default(self) -> bool:
        """Whether this is attnreg's own registry, without an overlay."""
        return not (self.registry or self.overlay or os.environ.get("ATTNREG_REGISTRY"))

    def load(
        self, choices: Sequence[Mapping[str, Any]] = (), *, default: str | None = None, quiet: bool = False
    ) -> Registry:
        """The registry, with choices as an overlay. ``default`` is loaded if no option names a registry.

        Prints problems of attnreg's environment variables on stderr, and warnings; with ``quiet`` neither. Raises
        `RegistryError`, and `BadInput` if a choice names an unknown backend.
        """
        from attnreg.environment import environment_problems
        from attnreg.loader import load_registry

        overlays: list[Any] = [*self.overlay, *([{"choices": list(choices)}] if choices else [])]
        try:
            with warnings.catch_warnings():
                if quiet:
                    warnings.simplefilter("ignore")
                allowed: dict[str, Any] = {"trust": self.trust, "allow_outside": self.allow_outside}
                loaded = load_registry(self.registry or default, overlays, **allowed)
        except RegistryError as e:
            wrong = next((p for p in e.problems if choices and p.where.file == "<overlay>"), None)
            if wrong is not None:
                # for a text that YAML cannot hold the message has no key
                option = "" if wrong.message.startswith("choices.") else "--prefer or --deny: "
                raise BadInput(option + wrong.message.replace("choices.", "--"), wrong.help) from None
            raise
        cite(loaded.files)
        for problem in () if quiet else environment_problems(os.environ, loaded.vocabulary):
            click.echo(f"attnreg: {problem}", err=True)
        return loaded.selector if self.selector else loaded

    def of_lock(self, lock: Lock) -> Registry:
        """The registry to compare a lock with: the lock's own with its overlays, unless an option names one."""
        if self.registry or self.overlay:
            return self.load(default=lock.registry)
        return replace(self, registry=lock.registry, overlay=lock.overlays).load()


@dataclass(frozen=True, kw_only=True)
class PlatformInputs:
    """The options of the platforms: ``--platform``, ``--arch``, ``--device-name``, ``--flag`` and ``--package``."""

    platform: str | None = None
    arch: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    @property
    def named(self) -> bool:
        """Whether a platform, an architecture or a device is named."""
        return bool(self.platform or self.arch or self.device)

    def platforms(self, registry: Registry) -> list[Platform]:
        """A platform for each named architecture, or for all of the named platform; by default this machine's device.

        Raises `BadInput` for a word that the registry does not know, and `attnreg.errors.RequestError` for an
        architecture that does not belong to the named platform.
        """
        from attnreg.machine.detect import detect
        from attnreg.platforms import Platform

        vocabulary = registry.vocabulary
        if self.platform is not None and self.platform not in vocabulary.words["platforms"]:
            raise BadInput(f"unknown platform {self.platform!r}", vocabulary.help_for("platform", self.platform))
        installed = self.installed(vocabulary)
        if not self.named:
            machine = detect(vocabulary)
            return [
                Platform(
                    platform=machine.platform,
                    arch=machine.arch,
                    flags=machine.flags | set(self.flags),
                    packages=machine.packages if installed is None else installed,
                    device=machine.device,
                )
            ]
        named = places(self.arch, self.device, vocabulary) or [
            Place(arch.platform, arch.name) for arch in vocabulary.architectures_of(self.platform or "")
        ]
        return self._at(named, installed)

    def of_both(self, before: Registry, after: Registry) -> list[Platform]:
        """A platform for each named architecture; by default for each architecture that both registries know.

        Raises `BadInput` for a word that neither registry knows, and if no architecture is left. Raises
        `attnreg.errors.RequestError` for an architecture that does not belong to the named platform.
        """
        both = after.vocabulary, before.vocabulary
        known = {a.name: a.platform for v in reversed(both) for a in v.architectures.values()}
        if self.platform is not None and not any(self.platform in v.words["platforms"] for v in both):
            raise BadInput(f"unknown platform {self.platform!r}", both[0].help_for("platform", self.platform))
        for flag in self.flags:
            if not any(flag in v.flags for v in both):
                raise BadInput(f"unknown flag {flag!r}", both[0].help_for("flags", flag))
        installed = self.installed(*both)
        shared = [name for name in known if all(name in v.architectures for v in both)]
        named = places(self.arch, self.device, *both) or [
            Place(known[name], name) for name in shared if self.platform in (None, known[name])
        ]
        if not named:
            raise BadInput(f"no architecture of platform {self.platform} is in both registries", "name one with --arch")
        return self._at(named, installed)

    def _at(self, named: Sequence[Place], installed: Packages | None) -> list[Platform]:
        """The platforms of some places. Raises `attnreg.errors.RequestError` for a place of another platform."""
        from attnreg.platforms import Platform, refuse_other

        for place in named:
            refuse_other(place.arch, place.platform, self.platform or place.platform)
        return [Platform(**place._asdict(), flags=frozenset(self.flags), packages=installed) for place in named]

    def installed(self, *vocabularies: Vocabulary) -> tuple[tuple[str, str], ...] | None:
        """(name, version) of each ``--package``; None without the option, which means that all packages are installed.

        ``--package none`` means that no package is installed. Raises `BadInput` for a package that none of the
        vocabularies has, and for an invalid version.
        """
        from attnreg.platforms import is_version

        if self.packages == ("none",):
            return ()
        parted = [package.partition("==") for package in self.packages]
        for name, equals, version in parted:
            if not any(name in v.packages for v in vocabularies):
                raise BadInput(f"unknown package {name!r}", vocabularies[0].help_for("packages", name))
            if equals and not is_version(version):
                help_ = f"write {name}==1.2.3, or {name} alone for any version"
                raise BadInput(f"--package {name}: {shown(version)} is no version", help_)
        return tuple((name, version) for name, _, version in parted) or None


@dataclass(frozen=True, kw_only=True)
class RequestInputs:
    """The options of the question: a model, several models, or one request, with the facets of the command line."""

    model: str | None = None
    models: tuple[str, ...] = ()
    draft: str | None = None
    draft_kv_dtype: str | None = None
    tp: int = 1
    layer: int | None = None
    lengths: tuple[int, ...] = ()
    facets: Mapping[str, str | int] = field(default_factory=dict)
    features: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def request_facets(self) -> dict[str, str | int | None]:
        """The facets for a request: the word of ``--kv-dtype none`` becomes None."""
        return {name: None if (name, value) == ("kv_dtype", "none") else value for name, value in self.facets.items()}

    @property
    def extra_facets(self) -> dict[str, Value]:
        """Name -> value of each facet from ``--set``. Raises `BadInput` for a facet with an option of its own."""
        facets = dict(facet_value("--set", item) for item in self.extra)
        for name, value in facets.items():
            if name in CORE and CORE[name].of == "request" and CORE[name].help:
                option = f"--{name.removesuffix('s' * CORE[name].is_set).replace('_', '-')}"
                raise BadInput(f"--set {name}: this facet has an option of its own", f"give {option} {value}")
        return facets

    def request(self) -> AttentionRequest:
        """The request with these facets. Raises `BadInput` for an option that needs a model."""
        from attnreg.request import AttentionRequest

        of_model = ("--draft", self.draft), ("--layer", self.layer), ("--length", self.lengths or None)
        for option, value in (*of_model, ("--draft-kv-dtype", self.draft_kv_dtype)):
            if value is not None:
                raise BadInput(f"{option} says something of a model", "give --model too")
        if self.tp != 1:
            raise BadInput("--tp shares out a model's heads", "without --model, give the heads of one rank")
        fields: dict[str, Any] = {"head_size": ordinary("head_size"), **self.request_facets}
        return AttentionRequest(**fields, features=frozenset(self.features), extra=tuple(self.extra_facets.items()))

    def questions(
        self,
        registry: Registry,
        models: Sequence[str],
        families: Families | None = None,
        left_out: dict[str, None] | None = None,
    ) -> dict[str, Sequence[Question]]:
        """Name -> the questions of each model; without a model, "" -> the request of these facets.

        families: the rules by which configs are read, the bundled ones if None. left_out: a dict that gets the error of
        each model without questions; if it is None, the first error is raised.
        """
        from attnreg.language.facets import undeclared
        from attnreg.models.fields import ConfigError
        from attnreg.selection.question import Question
        from attnreg.selection.wording import request_words

        if not models:
            request = self.request()
            words = request_words(request, without=undeclared(registry.vocabulary.facets))
            return {"": [Question(request, " · ".join(words))]}
        layers: dict[str, ModelQuestions] = {}
        for model in models:
            try:
                layers[model] = self.of_model(model, registry, families)
            except ConfigError as e:
                if left_out is None:
                    raise
                left_out[str(e)] = None
        names = [model.name for model in layers.values()]
        # models with the same name get their paths as names
        return {m.name if names.count(m.name) == 1 else path: m.questions for path, m in layers.items()}

    def options(self, families: Families | None = None) -> ModelOptions:
        """The options of a model's questions. Raises `BadInput` for a missing draft."""
        from attnreg.models.questions import MTP, ModelOptions

        if self.draft_kv_dtype is not None and self.draft is None:
            raise BadInput("--draft-kv-dtype says something of a draft", "give --draft too")
        draft_kv_dtype = None if self.draft_kv_dtype == "none" else self.draft_kv_dtype
        return ModelOptions(
            given=self.request_facets,
            features=frozenset(self.features),
            extra=self.extra_facets,
            ranks=self.tp,
            layer=self.layer,
            draft=self.draft if self.draft in (None, MTP) else find_config(self.draft, others=(MTP,)),
            draft_given={} if self.draft_kv_dtype is None else {"kv_dtype": draft_kv_dtype},
            lengths=tuple(sorted(set(self.lengths))),
            families=families,
        )

    def words(self) -> list[str]:
        """The question in words, without the names of models: ``["TP 2", "KV cache fp8"]``."""
        from attnreg.models.questions import option_words
        from attnreg.selection.wording import request_words

        if not self.models and "head_size" in self.facets:
            return request_words(self.request())
        options = self.options()
        return [*([f"draft {self.draft}"] if self.draft else []), *option_words(options, options.given.get("dtype"))]

    def of_model(self, model: str, registry: Registry, families: Families | None = None) -> ModelQuestions:
        """The questions of a model. Raises `BadInput`, `ConfigError`, and `RequestError` for the draft of another."""
        from attnreg.engines.drafts import refuse_encoders, refuse_foreign_draft
        from attnreg.models.questions import model_questions

        path, options = find_config(model), self.options(families)
        questions = model_questions(path, options, registry)
        refuse_encoders(questions)
        named = ((model, path), (self.draft, options.draft))
        files = [example_note(str(name), str(file)) or f"{name} is {file}" for name, file in named if name != file]
        files += refuse_foreign_draft(path, options.draft, registry)
        return questions._replace(notes=(*questions.notes, *files))


@dataclass(frozen=True, kw_only=True)
class BackendInputs:
    """The backends that a user names: ``--backend``, ``--draft-backend``, ..., ``--prefer`` and ``--deny``."""

    backend: str | None = None
    draft_backend: str | None = None
    vision_backend: str | None = None
    prefill_backend: str | None = None
    prefer: str | None = None
    deny: tuple[str, ...] = ()

    @property
    def by_option(self) -> dict[str, Any]:
        """Option -> the backend that it names, as `attnreg.explain.asked.Asker` takes them."""
        return {name: getattr(self, name) for name in ("backend", "draft_backend", "vision_backend", "prefill_backend")}

    @property
    def choices(self) -> list[dict[str, Any]]:
        """``--prefer`` and ``--deny`` as the choices of an overlay."""
        return [{option: names} for option, names in (("prefer", self.prefer), ("deny", [*self.deny])) if names]

    @property
    def words(self) -> list[str]:
        """The words of these options in the title of an explanation: ``["backend FLASH_ATTN"]``."""
        named = {option.replace("_", " "): name for option, name in self.by_option.items()}
        named |= {"prefer": self.prefer, "deny": ", ".join(self.deny)}
        return [f"{option} {names}" for option, names in named.items() if names]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of one run of `attnreg explain`. ``notes`` are its assumptions, ``memory`` is a model's KV cache."""

    registry: Registry
    platforms: Sequence[Platform]
    questions: Sequence[Question]
    title: str
    notes: Sequence[str] = ()
    memory: Memory | None = None


def read_inputs(
    registry_inputs: RegistryInputs,
    platform_inputs: PlatformInputs,
    request_inputs: RequestInputs,
    backend_inputs: BackendInputs | None = None,
) -> Inputs:
    """The registry with the user's choices, the platforms, and the questions."""
    from attnreg.explain.answers import title_of
    from attnreg.language.facets import undeclared
    from attnreg.selection.question import Question
    from attnreg.selection.wording import request_words, unsaid

    backends = backend_inputs or BackendInputs()
    if backends.draft_backend and not (request_inputs.draft or request_inputs.facets.get("role") == "draft"):
        raise BadInput("--draft-backend says something of a draft", "give --draft too")
    registry = registry_inputs.load(backends.choices)
    refuse_unread(request_inputs.extra_facets, registry)
    platforms = platform_inputs.platforms(registry)
    here = not platform_inputs.named
    notes = [f"no --arch: this machine, {platforms[0].arch}"] if here else []
    notes += engine_notes(registry_inputs.engine, registry, own=registry_inputs.bundled_default)
    notes += [unsaid(registry)] if unsaid(registry) else []
    if request_inputs.model is None:
        request, memory = request_inputs.request(), None
        what = " · ".join(request_words(request, without=undeclared(registry.vocabulary.facets)))
        questions: Sequence[Question] = [Question(request, what)]
        if "head_size" not in request_inputs.facets:
            notes.append(f"no --head-size and no --model: head_size {request.head_size} was assumed")
        if request_inputs.facets.get("head_size_v") == request.head_size:
            notes.append(f"--head-size-v {request.head_size} is --head-size, as it is without that option")
    else:
        model = request_inputs.of_model(request_inputs.model, registry)
        questions, what, memory = model.questions, model.title, model.memory
        notes += model.notes
    installed = here and not platform_inputs.packages
    title = title_of(platforms, registry, what, choices=backends.words, here=here, installed=installed)
    return Inputs(registry=registry, platforms=platforms, questions=questions, title=title, notes=notes, memory=memory)


def facet_value(option: str, argument: str) -> tuple[str, Value]:
    """(name, value) of a ``FACET=VALUE``: the value is true, false, null, an integer, or else a word."""
    name, equals, text = argument.partition("=")
    if not equals or not name.strip():
        raise BadInput(f"{option} {argument}: expected FACET=VALUE", "name the facet before the =" if equals else "")
    values: dict[str, Value] = {"true": True, "false": False, "null": None}
    return name, values[text] if text in values else int(text) if _INTEGER.fullmatch(text) else text
