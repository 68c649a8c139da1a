"""Launch recipes of engines, checked: what a release ignores, has not, refuses or changes, and what is in vain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any

from attnreg.compile.bundled import bundled_registries, release_name
from attnreg.engines.recipes import Recipe, RecipeError, known_engines, version_parts
from attnreg.engines.shell import is_written
from attnreg.errors import Location, Problem, RequestError, did_you_mean
from attnreg.language.vocabulary import Facet
from attnreg.loader import load_registry
from attnreg.models.fields import ConfigError
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.platforms import Platform
from attnreg.registry import Registry
from attnreg.request import AttentionRequest
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import Selection, verdict_words

_AUTO = ("auto", "AUTO")
# how alike an option and a known one are that is taken for a slip of the pen
_ALIKE = 0.9
_MOST_DIGITS = 18
# vLLM and SGLang take these for dtypes too
_SHORT_DTYPES = {"half": "float16", "float": "float32"}


def check_recipe(recipe: Recipe, release: str | None = None) -> list[Problem]:
    """What is wrong with a recipe, or in vain, by its place.

    release: a registry's name in place of the recipe's own version. Raises `RecipeError` for a GPU that there is not,
    and for a model that cannot be read.
    """
    return sorted(_problems(recipe, release), key=lambda problem: (problem.where.line, problem.where.column))


def _problems(recipe: Recipe, release: str | None) -> Iterator[Problem]:
    about = known_engines()[recipe.engine]
    registry = _registry(recipe, release)
    version = registry.sources[recipe.engine].version
    for variable, where in recipe.variables:
        gone = about["variables"].get(variable)
        since = gone and (gone.get("removed") or gone["removed_by"])
        if since and version_parts(since) <= version_parts(version):
            how = f"in {since}" if "removed" in gone else f"by {since}"
            message = f"{variable} was removed {how} and is ignored by {recipe.engine} {version}"
            yield Problem(where, message, f"use {gone['use']}" if gone.get("use") else "remove it")
    launch = _Launch(recipe, registry, about["options"])
    yield from launch.problems
    if _not_written(recipe):
        return
    for name, (option, value, where) in launch.named.items():
        yield from launch.of_backend(name, option, value, where)
    if not launch.named and not launch.problems:
        yield from launch.of_run()


def not_judged(recipe: Recipe, release: str | None = None) -> str:
    """Why nobody looked at what the run gets, in words; none where it was looked at.

    release: a registry's name in place of the recipe's own version.
    """
    missing = [key for key in ("model", "arch") if not getattr(recipe, key)]
    reasons = [f"the recipe states no {' and no '.join(missing)}"] if missing else []
    unknown = _not_written(recipe)
    reasons += [f"only the shell knows {', '.join(unknown)}"] if unknown else []
    reasons = reasons or list(dict.fromkeys(_silences(recipe, release)))
    return f"what the run gets is not judged: {'; '.join(reasons)}" if reasons else ""


def _silences(recipe: Recipe, release: str | None) -> Iterator[str]:
    """What the release's table does not say of a recipe's model and GPU, in words."""
    launch = _Launch(recipe, _registry(recipe, release), known_engines()[recipe.engine]["options"])
    assert launch.platform is not None
    for request in launch._asked(launch.given):
        if silence := evaluate(request, launch.platform, launch.registry).silence:
            yield silence


def _registry(recipe: Recipe, release: str | None) -> Registry:
    return load_registry(release_name(release or f"{recipe.engine}-{recipe.version or 0}"))


def _not_written(recipe: Recipe) -> list[str]:
    """The options whose value matters, and is the shell's to tell, and the words that may hold options."""
    kinds = known_engines()[recipe.engine]["options"]
    unknown = [option for option, value, _ in recipe.options if not is_written(value)]
    # the model that is judged is the recipe's own
    matter = [option for option in unknown if kinds.get(option, "model") != "model" or _has_keys(option, kinds)]
    return list(dict.fromkeys([*matter, *map(_cut, recipe.expansions)]))


def _has_keys(option: str, kinds: Mapping[str, str]) -> bool:
    """Whether an option takes a JSON object one of whose keys is about attention."""
    return any(known.startswith(f"{option}.") for known in kinds)


class _Launch:
    """The options of a recipe that are about attention, as facets of a release; ``named`` are its backends by facet."""

    def __init__(self, recipe: Recipe, registry: Registry, kinds: Mapping[str, str]) -> None:
        self.recipe = recipe
        self.registry = registry
        self.problems: list[Problem] = []
        self.given: dict[str, Any] = {}
        self.named: dict[str, tuple[str, str, Location]] = {}
        self.ranks = 1
        self.platform = self._platform()
        # of an option that is given again, engines take the last
        last = {_about(option, kinds): i for i, (option, *_) in enumerate(recipe.options)}
        for i, (option, value, where) in enumerate(recipe.options):
            if value.startswith("{") and is_written(value) and (_has_keys(option, kinds) or option.endswith("-config")):
                self._report(where, f"{option}: {_cut(value)} is no JSON object", "the engine refuses it")
            elif option not in kinds:
                self._slip(option, where, kinds)
            elif last[_about(option, kinds)] != i:
                self._report(where, f"{option} is given again behind it, which counts", "remove it")
            elif is_written(value):
                self._read(option, kinds[option], value, where)
        if recipe.model:
            self._asked(self.given)

    @property
    def resolves(self) -> bool:
        """Whether the engine resolves the arguments in steps, of which a backend is one; else a named one is asked."""
        return bool(self.registry.steps) and not self.registry.orders

    def _platform(self) -> Platform | None:
        if not self.recipe.arch:
            return None
        vocabulary = self.registry.vocabulary
        architecture = vocabulary.architecture(self.recipe.arch)
        if architecture is None:
            message = f"unknown architecture {self.recipe.arch}"
            help_ = vocabulary.help_for("arch", self.recipe.arch)
            raise RecipeError([Problem(self.recipe.places["arch"], message, help_)])
        return Platform(platform=architecture.platform, arch=architecture.name)

    def _read(self, option: str, kind: str, value: str, where: Location) -> None:
        """Take an option for what it is about, and report what the release has not."""
        if kind == "backend":
            self._read_backend(option, value, where)
        elif kind == "ranks" and (ranks := _number(value)):
            self.ranks = ranks
        elif kind == "ranks":
            self._report(where, f"{option}: expected a number of at least 1{_digits(value)}, got {_cut(value)}", "")
        elif kind in ("kv_dtype", "dtype") and value == "auto":
            self._report(where, f"{option} auto only restates the default", "remove it")
        elif kind in self.registry.vocabulary.facets:
            self._read_facet(option, self.registry.vocabulary.facets[kind], value, where)

    def _read_backend(self, option: str, value: str, where: Location) -> None:
        name = value if self.resolves else value.upper()
        facet = option.removeprefix("--").replace("-", "_") if self.resolves else "named"
        if not value:
            self._report(where, f"{option}: expected a backend, got nothing", "")
        elif name in _AUTO:
            self._report(where, f"{option} {value} only restates the default", "remove it")
        elif name in self.registry.backends:
            self.given |= {facet: name} if self.resolves else {}
            self.named[facet] = option, name, where
        else:
            others = [r for r in bundled_registries() if r.startswith(f"{self.recipe.engine}-")]
            have = [other for other in others if name in load_registry(other).backends]
            help_ = f"it is in {', '.join(have)}" if have else did_you_mean(name, self.registry.backends)
            self._report(where, f"{option}: backend {value} is not in {self.registry.name}", help_)

    def _read_facet(self, option: str, facet: Facet, text: str, where: Location) -> None:
        words = self.registry.vocabulary.words.get(facet.word_set or "", {})
        text = _SHORT_DTYPES.get(text, text) if facet.name == "dtype" else text
        value: Any = next((name for name, word in words.items() if word.facts.get("written") == text), text)
        if facet.kind == "boolean":
            value = text.casefold() != "false"
        elif facet.kind == "integer":
            value = _number(text)
            if value is None:
                self._report(where, f"{option}: expected a number{_digits(text)}, got {_cut(text)}", "")
                return
        elif facet.known and value not in facet.known:
            help_ = self.registry.vocabulary.help_for(facet.name, value)
            self._report(where, f"{option}: {self.registry.name} has no {facet.name} {text}", help_)
            return
        self.given[facet.name] = value

    def _slip(self, option: str, where: Location, kinds: Mapping[str, str]) -> None:
        """Report an option that is none of the known ones, and nearly one of them."""
        for known in kinds:
            alike = SequenceMatcher(None, option, known).ratio()
            if len(known) > len("--dtype") and abs(len(known) - len(option)) < 2 and _ALIKE < alike < 1:
                self._report(where, f"unknown option {option}", f"did you mean `{known}`?")

    def _report(self, where: Location, message: str, help_: str) -> None:
        self.problems.append(Problem(where, message, help_))

    def _asked(self, given: Mapping[str, Any]) -> list[AttentionRequest]:
        """The requests of the recipe's model. Raises `RecipeError` where it cannot be read."""
        fields = AttentionRequest.__dataclass_fields__
        own = {name: value for name, value in given.items() if name in fields}
        extra = {name: value for name, value in given.items() if name not in fields}
        options = ModelOptions(given=own, extra=extra, ranks=self.ranks)
        try:
            questions = model_questions(self.recipe.model, options, self.registry).questions
        except (ConfigError, RequestError) as error:
            raise RecipeError([Problem(self.recipe.places["model"], str(error))]) from None
        requests = [question.request for question in questions]
        return [r for r in requests if r is not None and r.role == "target" and (self.resolves or r.phase != "prefill")]

    def of_backend(self, facet: str, option: str, name: str, where: Location) -> Iterator[Problem]:
        """What becomes of a backend that a recipe names for its model: restated, refused, or changed."""
        if not self.recipe.model or self.platform is None:
            return
        without = {key: value for key, value in self.given.items() if key != facet}
        usual = [evaluate(request, self.platform, self.registry) for request in self._asked(without)]
        by_name = None if self.resolves else name
        named = [evaluate(request, self.platform, self.registry, by_name) for request in self._asked(self.given)]
        if any(selection.unknown for selection in (*usual, *named)):
            return
        chosen = {s.backend.name if s.backend else None for s in usual}
        here = f"for this model on {self.platform.arch}"
        default = "without it the run is refused too"
        if None not in chosen:
            default = f"without it the model gets {', '.join(sorted(map(str, chosen)))}"
        for selection in named:
            if reasons := _refusals(selection):
                message = f"{option} {name}: {self.registry.name} refuses it {here}: {'; '.join(reasons)}"
                yield Problem(where, message, default)
                return
        same = [s.backend and s.backend.name for s in usual] == [s.backend and s.backend.name for s in named]
        if (self.resolves and same and not any(map(_refusals, usual))) or (not self.resolves and chosen == {name}):
            message = f"{option} {name} only restates the default of {self.registry.name} {here}"
            yield Problem(where, message, "remove it: a later release may have a better default")
        elif facet == "attention_backend" and (changed := self._changed(name, named)):
            yield Problem(where, f"{option} {name}: {self.registry.name} takes {changed} in its place {here}", default)

    def of_run(self) -> Iterator[Problem]:
        """Why a run for which no backend is named does not start."""
        if not self.recipe.model or self.platform is None:
            return
        for request in self._asked(self.given):
            selection = evaluate(request, self.platform, self.registry)
            if not selection.unknown and (reasons := _refusals(selection)):
                message = (
                    f"{self.registry.name} does not start this model on {self.platform.arch}: {'; '.join(reasons)}"
                )
                yield Problem(self.recipe.places["model"], message)
                return

    def _changed(self, name: str, named: list[Selection]) -> str:
        """The backend that a step writes over one that is named for both phases; none where no step does."""
        start = named[0].start if named else None
        value = start.facts.get("attention_backend") if start else None
        return str(value) if value not in (None, name) else ""


def _number(text: str) -> int | None:
    """The number that a text is; None for another text, and for a number that no engine takes."""
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def _digits(text: str) -> str:
    return f" and of at most {_MOST_DIGITS} digits" if text.isdecimal() and len(text) > _MOST_DIGITS else ""


def _cut(text: str) -> str:
    """A value for a message, cut where it is long."""
    return f"{text[:40]}…" if len(text) > 60 else text or "nothing"


def _about(option: str, kinds: Mapping[str, str]) -> str:
    """What an option is about: options for the ranks, a dtype or a block size stand for one another."""
    kind = kinds.get(option, option)
    return option if kind == "backend" else kind


def _refusals(selection: Selection) -> list[str]:
    """Why a run with a selection does not start; none where it does."""
    if selection.start is not None and selection.start.refusal is not None:
        return [selection.start.refusal.effect.refuses]
    if selection.backend is None:
        return [text for candidate in selection.candidates[:1] for text, _ in verdict_words(candidate)]
    return [follows.text for follows in selection.consequences if follows.kind == "fails"]
