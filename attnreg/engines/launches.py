"""Checks launches of engines: settings that a release ignores, lacks, refuses or changes, and redundant ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from attnreg.analysis.check.finding import Finding
from attnreg.compile.inputs.bundled import bundled_registries
from attnreg.compile.source.quoting import of_shell
from attnreg.engines.deploy.launch import EngineLaunch, LaunchError
from attnreg.engines.deploy.words import is_written
from attnreg.engines.drafts import compared_draft, refuse_encoders, without_draft
from attnreg.engines.outcomes import not_known, refusals, refused_at_start, runs
from attnreg.engines.settings import (
    NAMING,
    Setting,
    digits_note,
    known_engines,
    number_in,
    settings_of,
    switched,
    version_parts,
    words_of_option,
)
from attnreg.engines.spelling import abbreviated, slip
from attnreg.engines.surroundings import LaunchSurroundings, Surrounded, loaded, surround
from attnreg.errors import Location, Problem, RequestError, did_you_mean, few_of_many
from attnreg.explain.asked import Asker, asked_of
from attnreg.models.fields import ConfigError
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.platforms import Platform
from attnreg.request import AttentionRequest
from attnreg.selection.question import UNREAD
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import Selection

_AUTO = ("auto", "AUTO")
# further names of dtypes in vLLM and SGLang
_SHORT_DTYPES = {"half": "float16", "float": "float32"}


class Checked(NamedTuple):
    """The problems of a launch by place, a note on what was not checked, whether a part is not known, and by what."""

    findings: list[Finding]
    note: str
    unknown: bool
    by: Surrounded


def check_launch(launch: EngineLaunch, around: LaunchSurroundings) -> Checked:
    """The problems of a launch. Raises `LaunchError` for an unreadable model, and for an unknown GPU of a recipe."""
    surrounded = surround(launch, around)
    effect = _Effect(launch, surrounded)
    effect.judge()
    findings = sorted(effect.findings, key=lambda finding: (finding.where.line, finding.where.column))
    reasons = [*surrounded.missing, *effect.not_known]
    note = f"what the run gets is not checked: {'; '.join(reasons)}" if reasons else ""
    if effect.unknown and not note:
        note = f"what the run gets is partly not known: {'; '.join(effect.unknown)}"
    return Checked(findings, note, bool(effect.unknown or effect.silences), surrounded)


class _Effect:
    """The effect of a launch's options and variables on a release; ``named`` are its backends by option."""

    def __init__(self, launch: EngineLaunch, surrounded: Surrounded) -> None:
        self.launch, self.surrounded = launch, surrounded
        self.registry = surrounded.registry
        self.model = surrounded.model
        self.about = known_engines()[launch.engine]
        self.settings = settings_of(launch.engine)
        self.findings: list[Finding] = []
        self.given: dict[str, Any] = {}
        self.features: set[str] = set()
        self.flags: set[str] = set()
        self.named: dict[str, tuple[str, str, Location]] = {}
        self.ranks = 1
        # what cannot be checked: values of shell variables, options that attnreg does not read, backends of plug-ins
        self.unwritten: list[str] = []
        self.unread: list[str] = []
        self.branched: list[str] = []
        self.plugins: list[str] = []
        # sentences: the release's table has no data for the GPU, or does not hold what the model gets
        self.silences: list[str] = []
        self.unknown: list[str] = surrounded.unknown
        self._read_variables()
        ignored = len(self.findings)
        self._read_options()
        self._exclude()
        self.by_option = {facet: name for facet, name, _ in self.named.values()}
        self.options_are_right = len(self.findings) == ignored
        self.platform = self._platform()

    @property
    def not_known(self) -> list[str]:
        """The reasons, in words, why some deciding settings are unknown."""
        unwritten = list(dict.fromkeys([*self.unwritten, *map(of_shell, self.launch.expansions)]))
        reasons = [f"only the shell knows {', '.join(unwritten)}"] if unwritten else []
        branched = dict.fromkeys(self.branched)
        reasons += [f"a branch of the script decides {', '.join(branched)}"] if branched else []
        reasons += [f"attnreg does not read {', '.join(dict.fromkeys(self.unread))}"] if self.unread else []
        return [*reasons, *(f"{plugin} is a plug-in's backend" for plugin in self.plugins), *self.silences]

    def judge(self) -> None:
        """Report problems of the run's backends, if all deciding settings are known."""
        if self.model:
            self.findings += [] if self.not_known else compared_draft(self.launch, self.surrounded)
            asked, platform = self._asked(self.given), self.platform
            ask = Asker(self.registry, {} if self.resolves else self.by_option, asked)
            found = [ask(request, platform) for request in asked] if platform is not None else []
            self.silences = [*dict.fromkeys(selection.silence for selection in found if selection.silence)]
            self.unknown += dict.fromkeys(text for s in found if not s.silence for text in not_known(s))
        if self.not_known:
            return
        for option, (facet, name, where) in self.named.items():
            self.findings += self.of_backend(facet, option, name, where)
        if self.options_are_right and not (self.named and self.resolves):
            self.findings += self.of_run()

    def _read_options(self) -> None:
        """Apply the options, and report options that the release lacks, and redundant ones."""
        # engines use the last of repeated options
        last = {self._about(option): i for i, (option, *_) in enumerate(self.launch.options)}
        for i, (option, value, where, maybe) in enumerate(self.launch.options):
            setting, has_keys = self.settings.of_option(option), self.settings.has_keys(option)
            if not is_written(value):
                # a model that is known is checked, so an option for the model does not matter
                matters = has_keys or (setting is not None and setting.kind != "model")
                self.unwritten += [option] if matters else []
            elif value.startswith("{") and (has_keys or option.endswith("-config")):
                message = f"{option}: its value is no JSON object"
                self._report("malformed-option", option, where, message, "the engine refuses it")
            elif setting is None:
                self._slip(option, where)
            elif maybe:
                self._read(option, setting, value, where)
                self.branched += [option] if setting.kind != "model" else []
            elif last[self._about(option)] != i and not self.launch.options[last[self._about(option)]].maybe:
                message = f"{option} is given again behind it, which counts"
                self._report("repeated-option", option, where, message, "remove it")
            else:
                self._read(option, setting, value, where)

    def _about(self, option: str) -> object:
        """The key of an option: two options for the same setting, such as the ranks, share one."""
        setting = self.settings.of_option(option)
        return option if setting is None or setting.kind in (*NAMING, "draft", "unread") else setting

    def _exclude(self) -> None:
        """Report backends that the engine refuses together; they are then not checked one by one."""
        for group in self.about.get("exclusive", ()):
            both = [option for option in group if option in self.named]
            if len(both) > 1:
                where = max((self.named.pop(option)[2] for option in both), key=lambda at: (at.line, at.column))
                message = f"{' and '.join(both)} are both given: {self.registry.name} refuses the run"
                self._report("exclusive-options", both, where, message, "leave one of them out")

    def _read_variables(self) -> None:
        """Report variables that the release ignores, and apply the others."""
        version = self.registry.sources[self.launch.engine].version
        for variable, _, where in self.launch.variables:
            if gone := self.about["variables"].get(variable):
                since = gone.get("removed") or gone["removed_by"]
                if version_parts(since) > version_parts(version):
                    self.unread.append(variable)
                    continue
                how = f"in {since}" if "removed" in gone else f"by {since}"
                message = f"{variable} was removed {how} and is ignored by {self.launch.engine} {version}"
                help_ = f"use {gone['use']}" if gone.get("use") else "remove it"
                self._report("removed-variable", variable, where, message, help_)
        # of a variable that is set again, the last counts
        values = {variable: value for variable, value, _ in self.launch.variables}
        settings = self.settings.variables
        on = {name: self._switched(name, setting, values.get(name)) for name, setting in settings.items()}
        for name, setting in settings.items():
            if on[name] and (not setting.behind or on[setting.behind]):
                self._set(setting, True)

    def _switched(self, name: str, setting: Setting, value: str | None) -> bool:
        """Whether a variable is on; notes a value that cannot be read."""
        if value is None:
            return bool(setting.behind)
        on = switched(value or "0")
        if not is_written(value):
            self.unwritten.append(name)
        elif on is None or (on and setting.kind):
            self.unread.append(f"the value of {name}")
        return bool(on)

    def _set(self, setting: Setting, value: Any) -> None:
        """Apply a value or a switch, if the release knows its facet, feature or flag."""
        vocabulary = self.registry.vocabulary
        if setting.facet in vocabulary.facets:
            self.given[setting.facet] = value
        self.features |= {setting.feature} & {*vocabulary.features}
        self.flags |= {setting.flag} & {*vocabulary.flags}

    @property
    def where(self) -> Location:
        """The place of the model, else of the launch."""
        places = self.launch.places
        return places.get("model") or places.get("named_model") or self.launch.where

    @property
    def resolves(self) -> bool:
        """Whether steps of the engine resolve the backend; if not, a named backend is requested by name."""
        return bool(self.registry.steps) and not self.registry.orders

    def _platform(self) -> Platform | None:
        found, flags = self.surrounded.architecture, frozenset(self.flags)
        return None if found is None else Platform(platform=found.platform, arch=found.name, flags=flags)

    def _read(self, option: str, setting: Setting, value: str, where: Location) -> None:
        """Apply an option, and report a value that the release lacks."""
        unread = self.about.get("unread_names", {}).get(option, ())
        if setting.kind == "unread" or (value.upper() in unread and value.upper() in self.registry.backends):
            self.unread.append(option)
        elif setting.kind in NAMING:
            self._read_backend(option, setting.kind, value, where)
        elif setting.kind in ("draft", "model"):
            self._read_word(option, value, where)
        elif setting.kind == "ranks" or setting.takes in ("number", "count"):
            self._read_number(option, setting, value, where)
        elif setting.takes == "switch":
            self._read_switch(option, setting, value)
        elif setting.like:
            if value in (like := dict(setting.like)):
                self._set(setting, like[value])
        elif setting.takes == "name":
            if value:
                self._set(setting, value)
        elif setting.facet in ("kv_dtype", "dtype") and value == "auto":
            self._report("restated-default", option, where, f"{option} auto only restates the default", "remove it")
        elif setting.facet in self.registry.vocabulary.facets:
            self._read_facet(option, setting, value, where)

    def _read_number(self, option: str, setting: Setting, value: str, where: Location) -> None:
        number = number_in(value)
        if not number:
            message = f"{option}: expected a number of at least 1{digits_note(value)}, got {self.launch.shown(value)}"
            self._report("malformed-option", option, where, message)
        elif setting.kind == "ranks":
            self.ranks = number
        elif number > 1 or setting.takes == "count":
            self._set(setting, number)

    def _read_word(self, option: str, value: str, where: Location) -> None:
        """Report a word that the release does not take, such as a method of speculation."""
        words = words_of_option(self.launch.engine, option, self.registry.sources[self.launch.engine].version)
        if words and not words.get(value):
            help_ = "another release has it" if value in words else did_you_mean(value, [w for w in words if words[w]])
            message = f"{option}: {self.registry.name} has no method {self.launch.shown(value)}"
            self._report("absent-word", [option, self.launch.shown(value)], where, message, help_)

    def _read_switch(self, option: str, setting: Setting, value: str) -> None:
        on = switched(value or "1")
        if on is None:
            self.unread.append(f"{option} {self.launch.shown(value)}")
        elif on or setting.facet:
            self._set(setting, on)

    def _read_backend(self, option: str, kind: str, value: str, where: Location) -> None:
        words = next((o.names for o in self.registry.options if o.name == kind), {})
        name = value if self.resolves else words.get(value.upper(), value.upper())
        facet = option.removeprefix("--").replace("-", "_") if self.resolves else kind
        if not value:
            self._report("malformed-option", option, where, f"{option}: expected a backend, got nothing")
        elif name in _AUTO:
            message = f"{option} {value} only restates the default"
            self._report("restated-default", option, where, message, "remove it")
        elif name in self.registry.backends:
            self.given |= {facet: name} if self.resolves else {}
            self.named[option] = facet, name, where
        elif name in self.about.get("plugins", ()):
            self.plugins.append(f"{option} {name}")
        else:
            others = [r for r in bundled_registries() if r.startswith(f"{self.launch.engine}-")]
            have = [other for other in others if name in loaded(other).backends]
            help_ = (
                f"it is in {', '.join(have)}"
                if have
                else few_of_many(name, self.registry.backends, f"attnreg list --engine {self.registry.name}")
            )
            message = f"{option}: backend {self.launch.shown(value)} is not in {self.registry.name}"
            self._report("absent-backend", [option, self.launch.shown(value)], where, message, help_)

    def _read_facet(self, option: str, setting: Setting, text: str, where: Location) -> None:
        facet = self.registry.vocabulary.facets[setting.facet]
        words = self.registry.vocabulary.words.get(facet.word_set or "", {})
        text = _SHORT_DTYPES.get(text, text) if facet.name == "dtype" else text
        value: Any = next((name for name, word in words.items() if word.facts.get("written") == text), text)
        if facet.kind == "boolean":
            self._read_switch(option, setting, text)
            return
        if facet.kind == "integer":
            value = number_in(text)
            if value is None:
                message = f"{option}: expected a number{digits_note(text)}, got {self.launch.shown(text)}"
                self._report("malformed-option", option, where, message)
                return
        elif facet.known and value not in facet.known:
            help_ = self.registry.vocabulary.help_for(facet.name, value)
            message = f"{option}: {self.registry.name} has no {facet.name} {self.launch.shown(text)}"
            self._report("absent-word", [option, self.launch.shown(text)], where, message, help_)
            return
        self.given[facet.name] = value

    def _slip(self, option: str, where: Location) -> None:
        """Report an unknown option that resembles a known one, and a line that goes on by mistake."""
        shown = self.launch.shown(option.split()[0])
        if found := slip(self.launch.engine, option, shown):
            self._report(found.code, shown, where, found.message, found.help)
        elif abbreviated(self.launch.engine, option):
            self.unread.append(shown)

    def _report(self, code: str, subject: str | list[str], where: Location, message: str, help_: str = "") -> None:
        self.findings.append(
            Finding(code, (subject,) if isinstance(subject, str) else (*subject,), where, message, help_)
        )

    def _asked(self, given: Mapping[str, Any], kind: str = "") -> list[AttentionRequest]:
        """The requests of the model and its draft; of an option, those that it reaches. Raises `LaunchError`."""
        fields = AttentionRequest.__dataclass_fields__
        own, extra = ({n: v for n, v in given.items() if (n in fields) == ours} for ours in (True, False))
        options = ModelOptions(
            given=own,
            features=frozenset(self.features),
            extra=extra,
            ranks=self.ranks,
            draft=None if self.resolves else self.surrounded.draft or None,
        )
        try:
            model = model_questions(self.model, options, self.registry)
            refuse_encoders(model)
        except (ConfigError, RequestError) as error:
            if options.draft is not None:
                self.findings += without_draft(self.launch, self.surrounded, error)
                return self._asked(given, kind)
            raise LaunchError([Problem(self.where, self.launch.hidden(str(error)))]) from None
        if any(question.kind == UNREAD for question in model.questions):
            self.unknown = ["what attention the layers of its model ask for"]
        requests, place = [q.request for q in model.questions if q.request is not None], self.platform
        if place is None or self.resolves:
            return [r for r in requests if r.role == "target"]
        if not kind:
            return requests
        return [r for r in requests if asked_of(r, place, self.registry, {kind: ""}).by]

    def of_backend(self, facet: str, option: str, name: str, where: Location) -> Iterator[Finding]:
        """What becomes of a backend that a launch names for its model: restated, refused, or changed."""
        if not self.model or self.platform is None:
            return
        without = {key: value for key, value in self.given.items() if key != facet}
        kind = "backend" if self.resolves else facet
        usual = [evaluate(request, self.platform, self.registry) for request in self._asked(without, kind)]
        by = None if self.resolves else name
        named = [evaluate(request, self.platform, self.registry, by) for request in self._asked(self.given, kind)]
        if not named or any(selection.unknown for selection in (*usual, *named)):
            return
        chosen, here = {s.backend.name if s.backend else None for s in usual}, f"for this model on {self.platform.arch}"
        default = "without it the run is refused too"
        if None not in chosen:
            default = f"without it the model gets {', '.join(sorted(map(str, chosen)))}"
        for selection in named:
            if reasons := refusals(selection):
                message = f"{option} {name}: {self.registry.name} refuses it {here}: {'; '.join(reasons)}"
                yield Finding("refused-backend", (option, name), where, message, default)
                return
        same = [*map(runs, usual)] == [*map(runs, named)]
        if (self.resolves and same and not any(map(refusals, usual))) or (not self.resolves and chosen == {name}):
            message = f"{option} {name} only restates the default of {self.registry.name} {here}"
            help_ = "remove it: a later release may have a better default"
            yield Finding("restated-default", (option,), where, message, help_)
        elif facet == "attention_backend" and (changed := self._changed(name, named)):
            message = f"{option} {name}: {self.registry.name} takes {changed} in its place {here}"
            yield Finding("replaced-backend", (option, name), where, message, default)

    def of_run(self) -> Iterator[Finding]:
        """Why a run does not start although nobody names a backend for some of its layers."""
        if not self.model or self.platform is None:
            return
        for request in self._asked(self.given):
            if asked_of(request, self.platform, self.registry, self.by_option).by:
                continue
            selection = evaluate(request, self.platform, self.registry)
            if not selection.unknown and (reasons := refusals(selection)):
                message = f"{self.registry.name} does not start this model on {self.platform.arch}: "
                if selection.backend is None and selection.nearest and not refused_at_start(selection):
                    message += f"no backend accepts it; of the nearest, {selection.nearest.title}: "
                message += "; ".join(reasons)
                subject = self.registry.name, self.platform.arch
                yield Finding("refused-run", subject, self.where, message)
                return

    def _changed(self, name: str, named: list[Selection]) -> str:
        """The backend with which a step overwrites one that is named for both phases; "" if no step does."""
        value = named[0].start.facts.get("attention_backend") if named and named[0].start else None
        return str(value) if value not in (None, name) else ""
