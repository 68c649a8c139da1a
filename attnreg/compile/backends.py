"""Compiles rows of backends.yaml to `Backend` objects: resolves claims, and completes each variant from its row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from attnreg.compile.closed_world import Statements
from attnreg.compile.consequences import ConsequenceCompiler
from attnreg.compile.modules import Module, ModuleCompiler
from attnreg.compile.parts import RegistryParts, Reporter, RowData
from attnreg.compile.schema import tables as schema
from attnreg.compile.source.yaml_source import Document, as_written, shown
from attnreg.compile.validation import FilePart
from attnreg.errors import Location, Problem, did_you_mean
from attnreg.language.conditions import ALWAYS, Condition
from attnreg.language.consequence import Consequence
from attnreg.language.engine.runs import LayoutRules
from attnreg.language.facets import SAME_AS
from attnreg.language.matchers import ANY, Matcher, all_of, any_of, equals, integer_range, negation, one_of
from attnreg.language.vocabulary import Facet, Vocabulary
from attnreg.registry import Backend, Claim, Rule, Variant


@dataclass(slots=True)
class _Capabilities:
    """The capabilities of a row, while variants and overlays still change them."""

    claims: dict[str, Claim]
    features: dict[str, Location]
    features_at: Location
    emulated: dict[str, tuple[str, Location]]
    unchecked: dict[str, Location]

    def add(self, features: Mapping[str, Location]) -> None:
        """Serve features natively; they are no longer among the emulated ones."""
        self.features |= features
        for feature in features:
            self.emulated.pop(feature, None)

    def remove(self, feature: str) -> bool:
        """Refuse a feature. Returns whether it was served before."""
        served = False
        for group in (self.features, self.emulated, self.unchecked):
            served |= group.pop(feature, None) is not None
        return served

    def copy(self) -> _Capabilities:
        return _Capabilities(
            dict(self.claims), dict(self.features), self.features_at, dict(self.emulated), dict(self.unchecked)
        )


@dataclass(slots=True)
class _Row:
    """A row from its own file, and the changes of overlays."""

    base: FilePart[schema.BackendData]
    patches: list[FilePart[schema.BackendPatch]] = field(default_factory=list)

    @property
    def layers(self) -> list[FilePart[RowData]]:
        return [self.base, *self.patches]


class RowCompiler(Reporter):
    """Compiles rows. ``imports`` says whether modules may be imported, ``trusted`` from which packages."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        sources: Iterable[str],
        broken: Iterable[str],
        problems: list[Problem],
        trusted: frozenset[str],
        imports: bool,
        after: tuple[Consequence, ...] = (),
        layout: LayoutRules | None = None,
    ) -> None:
        """after: consequences of choosing any row. layout: the rules for the layout of a run."""
        super().__init__(vocabulary, sources, broken, problems)
        self.after = after
        self.consequences = ConsequenceCompiler(vocabulary, sources, broken, problems, layout)
        self.modules = ModuleCompiler(self, trusted, imports)
        # file -> the features and facets that its rows do not check
        self.unchecked: dict[Document, dict[str, Location]] = {}

    def backends(self, parts: RegistryParts) -> dict[str, Backend]:
        """Name -> backend, for every row, with the changes of all overlays applied."""
        rows: dict[str, _Row] = {}
        self.left_out = parts.left_out
        for file in parts.backends:
            self.unchecked[file.document] = self._unchecked(file, file.model.unchecked)
            for name, data in file.model.backends.items():
                rows[name] = _Row(file.piece(data, "backends", name))
        for part in parts.patches:
            name = str(part.path[-1])
            if isinstance(part.model, schema.BackendData):
                rows[name] = _Row(part.piece(part.model))
            elif self.name(part, (), name, rows, "backend", key=True):
                rows[name].patches.append(part.piece(part.model))
        statements = Statements(self, parts, self.unchecked)
        backends = {n: self._backend(n, row.base, row.layers, statements) for n, row in sorted(rows.items())}
        statements.report_missing()
        return backends

    def _backend(
        self, name: str, base: FilePart[schema.BackendData], layers: list[FilePart[RowData]], statements: Statements
    ) -> Backend:
        data = base.model
        features = self.vocabulary.features
        # a row inherits the unchecked features of its file, so that selections warn; it does not inherit unchecked
        # facets
        unchecked = {w: at for w, at in self.unchecked.get(base.document, {}).items() if w in features}
        capabilities = _Capabilities({}, {}, base.key_at("capabilities"), {}, unchecked)
        self._identity(base, capabilities)
        requires, rules, notes, consequences = ALWAYS, list[Rule](), list[str](), [*self.after]
        variants: dict[str, list[FilePart[schema.VariantData]]] = {}
        summary, status, module, source = data.summary, data.status, Module(), data.source
        for part in layers:
            self._patch(capabilities, part)
            requires = _both(requires, self.condition(part, part.model.requires, "requires"))
            rules += self._rules(part, part.model.rules)
            stated = self.consequences.of(part, part.model.consequences)
            consequences = [*stated, *self.consequences.of_run(part), *consequences]
            notes += part.model.notes
            for i, variant in enumerate(part.model.variants):
                if variant.name in [v.name for v in part.model.variants[:i]]:
                    self.report(part, ("variants", i), f"the variant {variant.name} is given twice")
                variants.setdefault(variant.name, []).append(part.piece(variant, "variants", i))
            module = self.modules.apply(module, part)
            summary, status = part.model.summary or summary, part.model.status or status
            source = part.model.source or source
            if part.model.source is not None:
                self.source(part, part.model.source)
        statements.complete(base, capabilities.claims, capabilities.unchecked)
        # a row without variants has one alternative
        states = requires, rules, consequences, module
        alternatives = [self._variant(v, base, capabilities, *states) for v in variants.values() or [[]]]
        return Backend(
            name=name,
            summary=summary,
            module=module.name,
            status=status,
            platforms=frozenset(data.platforms),
            attention=frozenset(data.attention),
            phases=frozenset(data.phase) if data.phase is not None else None,
            variants=tuple(alternatives),
            source=source,
            where=base.key_at(),
            since=data.since,
            notes=tuple(notes),
            only_on_request=data.only_on_request,
            contract=module.contract,
            options=module.options,
        )

    def _identity(self, part: FilePart[schema.BackendData], capabilities: _Capabilities) -> None:
        data = part.model
        for facet, words in (("platform", data.platforms), ("attention", data.attention), ("phase", data.phase)):
            if words is None:
                continue
            key = "platforms" if facet == "platform" else facet
            self.once(part, (key,), words)
            matcher = self.parser(part).matcher(words, self.vocabulary.facets[facet], (*part.path, key))
            capabilities.claims[key] = Claim(facet, key, matcher, part.key_at(key))

    def _patch(self, capabilities: _Capabilities, part: FilePart[RowData | schema.VariantData]) -> None:
        """Apply a part's claims (replaced, added or removed), emulated features and unchecked words."""
        for key, raw in part.model.capabilities.items():
            if key in ("add", "remove"):
                if not isinstance(raw, dict):
                    help_ = f"as in {key}: {{features: [...]}}"
                    self.report(part, ("capabilities", key), f"expected a mapping, got {shown(raw)}", help_)
                    continue
                added = part.model.capabilities.get("add") if key == "remove" else None
                added = added if isinstance(added, dict) else {}
                for claim, words in raw.items():
                    self.once(part, ("capabilities", key, claim), words, added.get(claim, ()))
                    self._adjust(capabilities, part, key, claim, words)
            elif key == "features":
                self.once(part, ("capabilities", key), raw)
                capabilities.features_at = part.key_at("capabilities", key)
                capabilities.features = {}
                capabilities.add(self._features(part, raw, "capabilities", key))
            elif key in self.vocabulary.claims:
                self.once(part, ("capabilities", key), raw)
                capabilities.claims[key] = self._claim(part, key, raw, "capabilities", key)
            else:
                known = [*self.vocabulary.claims, "features", "add", "remove"]
                self.report(
                    part, ("capabilities", key), f"unknown capability `{key}`", did_you_mean(key, known), key=True
                )
        capabilities.unchecked |= self._unchecked(part, part.model.unchecked)
        for feature, reason in part.model.emulated.items():
            if self.name(part, ("emulated", feature), feature, self.vocabulary.features, "feature", key=True):
                capabilities.emulated[feature] = (reason, part.key_at("emulated", feature))
                if feature in capabilities.features:
                    help_ = "keep one of the two"
                    self.report(part, ("emulated", feature), "is listed under `features` too", help_, key=True)

    def _unchecked(self, part: FilePart[object], words: list[str]) -> dict[str, Location]:
        known = [*self.vocabulary.features, *(f.name for f in self.vocabulary.claims.values())]
        self.once(part, ("unchecked",), words)
        named = [w for i, w in enumerate(words) if self.name(part, ("unchecked", i), w, known, "feature or facet")]
        return {word: part.key_at("unchecked") for word in named}

    def _adjust(self, capabilities: _Capabilities, part: FilePart[object], verb: str, key: str, words: object) -> None:
        path = ("capabilities", verb, key)
        if key == "features":
            named = self._features(part, words, *path)
            if verb == "add":
                # no problem if the row has the feature already: it may have gained it after the overlay was written
                capabilities.add(named)
                return
            for i, word in enumerate(words if isinstance(words, list) else ()):
                # `named` leaves out words that were reported; a mapping or a list cannot be a key
                if isinstance(word, str) and word in named and not capabilities.remove(word):
                    self.report(part, (*path, i), f"the row does not claim `{word}`")
        elif key in self.vocabulary.claims:
            self._adjust_claim(capabilities, part, verb, key, words if isinstance(words, list) else [words])
        else:
            known = [*self.vocabulary.claims, "features"]
            self.report(part, path, f"unknown capability `{key}`", did_you_mean(key, known), key=True)

    def _adjust_claim(
        self, capabilities: _Capabilities, part: FilePart[object], verb: str, key: str, items: list[object]
    ) -> None:
        path, facet, base = ("capabilities", verb, key), self.vocabulary.claims[key], capabilities.claims.get(key)
        if base is None or base.matcher is ANY or not (facet.words or facet.kind == "integer"):
            self.report(part, path, f"the row has no list of {key} to change", "state the whole claim instead")
            return
        before = len(self.problems)
        change = self._claim(part, key, items, *path)
        if len(self.problems) > before:
            return
        if verb == "add":
            capabilities.claims[key] = replace(change, matcher=any_of([base.matcher, change.matcher]))
        elif (claim := self._without(part, key, base.matcher, change, items)) is not None:
            capabilities.claims[key] = claim

    def _without(
        self, part: FilePart[object], key: str, base: Matcher, change: Claim, items: list[object]
    ) -> Claim | None:
        """A claim without ``items``; None if the claim cannot be changed. Reports each item that removes no value."""
        path, words = ("capabilities", "remove", key), self.vocabulary.claims[key].words
        try:
            values = words or integer_range([base, change.matcher])
        except ValueError as e:
            self.report(part, path, str(e), "smaller numbers will do")
            return None
        claimed = [v for v in values if base.matches(v)]
        left = [v for v in claimed if not change.matcher.matches(v)]
        for i, item in enumerate(items):
            matcher = self._claim(part, key, item, *path, i).matcher
            if not any(map(matcher.matches, claimed)):
                self.report(part, (*path, i), f"the row does not claim {shown(item)}", f"claimed: {base.text}")
        if not left:
            self.report(part, path, "leaves nothing", "state the whole claim instead")
            return None
        if words:
            return replace(change, matcher=one_of(frozenset(left), ", ".join(sorted(map(as_written, left)))))
        matcher = all_of([base, negation(change.matcher)])
        return replace(change, matcher=replace(matcher, text=f"{base.text} except {change.matcher.text}"))

    def _features(self, part: FilePart[object], raw: object, *path: str) -> dict[str, Location]:
        if not isinstance(raw, list):
            self.report(part, path, f"expected a list of features, got {shown(raw)}")
            return {}
        known = self.vocabulary.features
        return {
            word: part.at(*path, i) for i, word in enumerate(raw) if self.name(part, (*path, i), word, known, "feature")
        }

    def _claim(self, part: FilePart[object], key: str, raw: object, *path: str | int) -> Claim:
        facet = self.vocabulary.claims[key]
        here = (*part.path, *path)
        if raw is None:
            self.report(part, path, "the claim is empty", "state what is accepted; `any` accepts every value", key=True)
        return Claim(facet.name, key, self._accepted(part, facet, raw, *path), part.document.key_at(*here))

    def _accepted(self, part: FilePart[object], facet: Facet, raw: object, *path: str | int) -> Matcher:
        """The matcher of a claim: it accepts every value (`any`), only a missing value (`same`), or some values."""
        if raw == "any":
            return ANY
        if raw == "same" and raw not in facet.words:
            return self._same(part, facet, *path)
        if isinstance(raw, list) and "same" in raw:
            return any_of([self._accepted(part, facet, [x] if x == "any" else x, *path, i) for i, x in enumerate(raw)])
        return self.parser(part).matcher(raw, facet, (*part.path, *path))

    def _same(self, part: FilePart[object], facet: Facet, *path: str | int) -> Matcher:
        if facet.name in SAME_AS:
            return equals(None, f"the same as {SAME_AS[facet.name]}")
        known = [key for key, f in self.vocabulary.claims.items() if f.name in SAME_AS]
        help_ = "state the values that are accepted; `any` accepts every value"
        self.report(part, path, f"only {', '.join(known)} may be `same`", help_)
        return ANY

    def _rules(self, part: FilePart[object], rules: list[schema.RuleData]) -> list[Rule]:
        self.check_reachable(part, (rule.when for rule in rules), ("rules",), "rule")
        out = []
        for i, rule in enumerate(rules):
            when = self.condition(part, rule.when, "rules", i, "when")
            for j, facet in enumerate(rule.facets):
                self.name(part, ("rules", i, "facets", j), facet, self.vocabulary.facets, "facet")
            if not rule.when:
                self.report(part, ("rules", i, "when"), "the rule rejects everything", "say which combination fails")
            self.source(part, rule.source, "rules", i)
            facets = tuple(rule.facets) or when.facets
            out.append(Rule(when, rule.reject, facets, part.at("rules", i), rule.source))
        return out

    def _variant(
        self,
        layers: list[FilePart[schema.VariantData]],
        row: FilePart[schema.BackendData],
        base: _Capabilities,
        requires: Condition,
        rules: list[Rule],
        consequences: list[Consequence],
        module: Module,
    ) -> Variant:
        """One alternative: the row's data, changed by a variant and then by overlays of the variant."""
        capabilities, when, notes, source = base.copy(), ALWAYS, list[str](), None if layers else row.model.source
        for part in layers:
            data = part.model
            self._patch(capabilities, part)
            self.source(part, data.source)
            module = self.modules.named(module, part)
            source = data.source or source
            when = when if data.when is None else self.condition(part, data.when, "when")
            requires = _both(requires, self.condition(part, data.requires, "requires"))
            rules = [*rules, *self._rules(part, data.rules)]
            consequences = [*self.consequences.of(part, data.consequences), *consequences]
            notes += data.notes
        order = ["platforms", "attention", "phase", *self.vocabulary.claims]
        claims = [capabilities.claims[key] for key in order if key in capabilities.claims]
        return Variant(
            name=layers[0].model.name if layers else None,
            was=frozenset(name for layer in layers for name in layer.model.was),
            when=when,
            requires=requires,
            claims=tuple(c for c in claims if c.matcher is not ANY),
            open={c.key: c.where for c in claims if c.matcher is ANY},
            features=capabilities.features,
            features_at=capabilities.features_at,
            emulated=capabilities.emulated,
            unchecked={w: at for w, at in capabilities.unchecked.items() if w not in capabilities.features},
            rules=tuple(rules),
            where=layers[0].at() if layers else row.key_at(),
            source=source,
            notes=tuple(notes),
            consequences=tuple(consequences),
            module=module.name,
            module_at=module.where,
            run_on_request=next((p.model.run_on_request for p in reversed(layers) if p.model.run_on_request), None),
        )


def _both(a: Condition, b: Condition) -> Condition:
    if a is ALWAYS:
        return b
    return a if b is ALWAYS else Condition(a.clauses + b.clauses, a.any_of + b.any_of, a.none_of + b.none_of, b.where)
