"""Rows of backends.yaml -> `Backend`: claims are resolved and each variant is unfolded into a complete alternative."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from attnreg import schema
from attnreg.conditions import ALWAYS, Condition
from attnreg.errors import Location, Problem, did_you_mean
from attnreg.matchers import ANY, any_of, one_of
from attnreg.parts import Part, Parts, Reporter
from attnreg.registry import Backend, Claim, Rule, Variant
from attnreg.vocabulary import Vocabulary

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+\Z")


@dataclass(slots=True)
class _Capabilities:
    """What a row claims, while variants and overlays still change it."""

    claims: dict[str, Claim]
    features: dict[str, Location]
    features_at: Location
    emulated: dict[str, tuple[str, Location]]
    unchecked: dict[str, Location]

    def copy(self) -> _Capabilities:
        return _Capabilities(
            dict(self.claims), dict(self.features), self.features_at, dict(self.emulated), dict(self.unchecked)
        )


class RowCompiler(Reporter):
    """Compiles rows; ``imports`` says whether modules are to be imported, ``trusted`` from which packages."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        sources: Iterable[str],
        problems: list[Problem],
        trusted: frozenset[str],
        imports: bool,
    ) -> None:
        super().__init__(vocabulary, sources, problems)
        self.trusted = trusted
        self.imports = imports
        self.unchecked: dict[str, Location] = {}

    def backends(self, parts: Parts) -> dict[str, Backend]:
        """Every row, by name, as the files and then the overlays describe it."""
        rows: dict[str, list[Part]] = {}
        for part in parts.backends:
            self.unchecked |= self._unchecked(part, part.model.unchecked)
            for name, data in part.model.backends.items():
                rows[name] = [Part(data, part.document, (*part.path, "backends", name))]
        for part in parts.patches:
            name = part.path[-1]
            if isinstance(part.model, schema.BackendData):
                rows[str(name)] = [part]
            elif self.name(part, (), str(name), rows, "backend"):
                rows[str(name)].append(part)
        return {name: self._backend(name, layers) for name, layers in sorted(rows.items())}

    def _backend(self, name: str, layers: list[Part]) -> Backend:
        base = layers[0]
        data: schema.BackendData = base.model
        capabilities = _Capabilities({}, {}, base.document.key_at(*base.path, "capabilities"), {}, dict(self.unchecked))
        self._identity(base, data, capabilities)
        self._stated(base, data)
        requires, rules, notes = ALWAYS, list[Rule](), list[str]()
        variants: dict[str, Part] = {}
        summary, status, module, module_at, source = data.summary, data.status, None, None, data.source
        for part in layers:
            self._patch(capabilities, part)
            requires = _both(requires, self.condition(part, part.model.requires, "requires"))
            rules += self._rules(part, part.model.rules)
            notes += part.model.notes
            for i, variant in enumerate(part.model.variants):
                if variant.name in variants and part is base:
                    self.report(part, ("variants", i), f"the variant {variant.name} is given twice")
                variants[variant.name] = Part(variant, part.document, (*part.path, "variants", i))
            if part.model.module is not None:
                module, module_at = part.model.module, part.document.key_at(*part.path, "module")
                self._module(part, module)
            summary, status = part.model.summary or summary, part.model.status or status
            source = part.model.source or source
            if part.model.source is not None:
                self.source(part, part.model.source)
        alternatives = tuple(self._variant(v, capabilities, requires, rules) for v in variants.values())
        if not alternatives:
            alternatives = (self._unfold(None, ALWAYS, requires, capabilities, rules, base),)
        return Backend(
            name=name,
            summary=summary,
            module=module,
            status=status,
            platforms=frozenset(data.platforms),
            attention=frozenset(data.attention),
            phases=frozenset(data.phase) if data.phase is not None else None,
            variants=alternatives,
            source=source,
            where=base.document.key_at(*base.path),
            since=data.since,
            notes=tuple(notes),
            module_at=module_at,
            only_on_request=data.only_on_request,
        )

    def _identity(self, part: Part, data: schema.BackendData, capabilities: _Capabilities) -> None:
        for facet, words in (("platform", data.platforms), ("attention", data.attention), ("phase", data.phase)):
            if words is None:
                continue
            key = "platforms" if facet == "platform" else facet
            matcher = self.parser(part).matcher(words, self.vocabulary.facets[facet], (*part.path, key))
            capabilities.claims[key] = Claim(facet, key, matcher, part.document.key_at(*part.path, key))

    def _stated(self, part: Part, data: schema.BackendData) -> None:
        for key, facet in self.vocabulary.claims.items():
            if facet.stated and key not in data.capabilities:
                help_ = "every backend states it; `any` accepts every value"
                self.report(part, ("capabilities",), f"`{key}` is missing", help_, key=True)

    def _patch(self, capabilities: _Capabilities, part: Part) -> None:
        """Apply a part's claims (replaced, added or removed), emulated features and unchecked words."""
        for key, raw in part.model.capabilities.items():
            if key in ("add", "remove") and isinstance(raw, dict):
                for claim, words in raw.items():
                    self._adjust(capabilities, part, key, claim, words)
            elif key == "features":
                capabilities.features_at = part.document.key_at(*part.path, "capabilities", key)
                capabilities.features = self._features(part, raw, "capabilities", key)
            elif key in self.vocabulary.claims:
                capabilities.claims[key] = self._claim(part, key, raw, "capabilities", key)
            else:
                known = [*self.vocabulary.claims, "features", "add", "remove"]
                self.report(
                    part, ("capabilities", key), f"unknown capability `{key}`", did_you_mean(key, known), key=True
                )
        capabilities.unchecked |= self._unchecked(part, part.model.unchecked)
        for feature, reason in part.model.emulated.items():
            if self.name(part, ("emulated", feature), feature, self.vocabulary.features, "feature"):
                capabilities.emulated[feature] = (reason, part.document.key_at(*part.path, "emulated", feature))
                if feature in capabilities.features:
                    self.report(part, ("emulated", feature), "is listed under `features` too", "keep one of the two")

    def _unchecked(self, part: Part, words: list[str]) -> dict[str, Location]:
        known = [*self.vocabulary.features, *(f.name for f in self.vocabulary.claims.values())]
        named = [w for i, w in enumerate(words) if self.name(part, ("unchecked", i), w, known, "feature or facet")]
        return {word: part.document.key_at(*part.path, "unchecked") for word in named}

    def _adjust(self, capabilities: _Capabilities, part: Part, verb: str, key: str, words: Any) -> None:
        path = ("capabilities", verb, key)
        if key == "features":
            named = self._features(part, words, *path)
            kept = {f: at for f, at in capabilities.features.items() if verb == "add" or f not in named}
            capabilities.features = kept | named if verb == "add" else kept
            return
        if key not in self.vocabulary.claims:
            known = [*self.vocabulary.claims, "features"]
            self.report(part, path, f"unknown capability `{key}`", did_you_mean(key, known), key=True)
            return
        change, base = self._claim(part, key, words, *path), capabilities.claims.get(key)
        if base is None or base.matcher is ANY:
            self.report(part, path, f"there is no list of {key} to {verb} to", "state the whole claim instead")
        elif verb == "add":
            capabilities.claims[key] = replace(change, matcher=any_of([base.matcher, change.matcher]))
        else:
            left = base.matcher.mentions - change.matcher.mentions
            if not change.matcher.mentions <= base.matcher.mentions:
                self.report(part, path, "names what the row does not claim", f"claimed: {base.matcher.text}")
            elif left:
                capabilities.claims[key] = replace(change, matcher=one_of(left, ", ".join(sorted(map(str, left)))))
            else:
                self.report(part, path, "leaves nothing")

    def _features(self, part: Part, raw: Any, *path: str) -> dict[str, Location]:
        if not isinstance(raw, list):
            self.report(part, path, "expected a list of features")
            return {}
        here = (*part.path, *path)
        for i, word in enumerate(raw):
            self.name(part, (*path, i), word, self.vocabulary.features, "feature")
        return {word: part.document.at(*here, i) for i, word in enumerate(raw) if word in self.vocabulary.features}

    def _claim(self, part: Part, key: str, raw: Any, *path: str) -> Claim:
        facet = self.vocabulary.claims[key]
        here = (*part.path, *path)
        matcher = ANY if raw == "any" else self.parser(part).matcher(raw, facet, here)
        return Claim(facet.name, key, matcher, part.document.key_at(*here))

    def _rules(self, part: Part, rules: list[schema.RuleData]) -> list[Rule]:
        self.shadowed(part, rules, ("rules",), "rule")
        out = []
        for i, rule in enumerate(rules):
            when = self.condition(part, rule.when, "rules", i, "when")
            for j, facet in enumerate(rule.facets):
                self.name(part, ("rules", i, "facets", j), facet, self.vocabulary.facets, "facet")
            if not rule.when:
                self.report(part, ("rules", i, "when"), "the rule rejects everything", "say which combination fails")
            self.source(part, rule.source, "rules", i)
            facets = tuple(rule.facets) or when.facets
            out.append(Rule(when, rule.reject, facets, part.document.at(*part.path, "rules", i), rule.source))
        return out

    def _variant(self, part: Part, base: _Capabilities, requires: Condition, rules: list[Rule]) -> Variant:
        data: schema.VariantData = part.model
        capabilities = base.copy()
        self._patch(capabilities, part)
        self.source(part, data.source)
        when = self.condition(part, data.when, "when")
        requires = _both(requires, self.condition(part, data.requires, "requires"))
        return self._unfold(data.name, when, requires, capabilities, [*rules, *self._rules(part, data.rules)], part)

    def _unfold(
        self,
        name: str | None,
        when: Condition,
        requires: Condition,
        capabilities: _Capabilities,
        rules: list[Rule],
        part: Part,
    ) -> Variant:
        order = ["platforms", "attention", "phase", *self.vocabulary.claims]
        claims = [capabilities.claims[key] for key in order if key in capabilities.claims]
        return Variant(
            name=name,
            when=when,
            requires=requires,
            claims=tuple(c for c in claims if c.matcher is not ANY),
            features=capabilities.features,
            features_at=capabilities.features_at,
            emulated=capabilities.emulated,
            unchecked={w: at for w, at in capabilities.unchecked.items() if w not in capabilities.features},
            rules=tuple(rules),
            where=part.document.at(*part.path) if name else part.document.key_at(*part.path),
            source=part.model.source,
            notes=tuple(part.model.notes) if name else (),
        )

    def _module(self, part: Part, module: str) -> None:
        if not _MODULE.match(module):
            self.report(part, ("module",), f"`{module}` is not a dotted module path")
        elif self.imports and not module.startswith("attnreg.kernels.") and module.split(".")[0] not in self.trusted:
            root = module.split(".")[0]
            help_ = f"trust it explicitly: load_registry(..., trust=['{root}']), --trust {root}, or an entry point"
            self.report(part, ("module",), f"the package {root} is not trusted to be imported", help_)


def _both(a: Condition, b: Condition) -> Condition:
    if a is ALWAYS:
        return b
    return a if b is ALWAYS else Condition(a.clauses + b.clauses, a.any_of + b.any_of, a.none_of + b.none_of, b.where)
