"""A registry as JSON: all that a selection depends on, for the evaluator in `docs_site/assets/picker/selector.js`.

Conditions and matchers become small expressions, each with the texts that messages quote, so that the evaluator knows
no backend and no word. Parts that are equal are written once and named by their index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from attnreg.errors import Location
from attnreg.language.computed import Computed, From
from attnreg.language.conditions import Clause, Condition
from attnreg.language.facets import CORE, LINKED
from attnreg.language.matchers import Matcher
from attnreg.language.vocabulary import Facet, Vocabulary, Word
from attnreg.models.questions import phases_of
from attnreg.packages.proven import needed_of, proofs_of
from attnreg.registry import (
    Backend,
    Claim,
    Consequence,
    Derived,
    Effect,
    Order,
    Registry,
    Step,
    Switched,
    Variant,
)
from attnreg.selection.judge import denial
from attnreg.selection.wording import unsaid
from picker.expressions import ExpressionError, Tables, expression, mentions

# a change of what these pages can evaluate; a page refuses data of another version
FORMAT = 4

_KINDS = ("word", "arch", "integer", "text", "words", "packages", "boolean", "derived")
_OWNERS = ("request", "platform", "selection", "start", "derived")


# what the evaluator reads or what changes no selection: data with anything else is not expressed
_READ = {
    Registry: "name fingerprint vocabulary backends orders derived choices fallbacks waivers imports steps",
    Backend: "name summary status platforms attention variants where",
    Variant: "name when requires claims features features_at emulated unchecked rules where served consequences module"
    " run_on_request",
    Order: "platform name when entries where because measured",
    Facet: "name of kind legend where words claim word_set config like unless known",
    Step: "name when effects where",
    Effect: "when where sets refuses unknown because",
    Derived: "name cases where",
    Consequence: "when where fails runs workspace per_query_element kernel_blocks stores says source",
}
_WITHOUT_EFFECT = {
    # the block size of a run, which is settled after the selections, is not answered by the evaluator
    Registry: "invariants known sources files trusted base left_out page",
    Backend: "module phases source since notes only_on_request contract options",
    Variant: "source notes open module_at",
    Order: "source",
    Step: "source title",
    Effect: "id",
    Consequence: "prefers id",
}


def _evidence(order: Order) -> list[str] | None:
    """The backend that an order's evidence is of, and the evidence."""
    return [m.of, f"{m.text} ({m.where.short})"] if (m := order.measured) is not None else None


def registry_document(registry: Registry) -> dict[str, Any]:
    """The registry as JSON-ready values. Raises `ExpressionError` for what the evaluator would not understand."""
    _refuse_what_is_new(registry)
    write = _Writer(registry)
    document = {
        **_head(registry),
        "derived": {
            d.name: {
                "cases": [[write.condition(when), _set(value), write.where(at)] for when, value, at in d.cases],
                "where": write.where(d.where),
            }
            for d in registry.derived.values()
        },
        "steps": [
            {
                "name": step.name,
                "when": write.condition(step.when),
                "effects": [write.effect(e) for e in step.effects],
            }
            for step in registry.steps
        ],
        "orders": {
            platform: [
                {
                    "title": order.title,
                    "when": write.condition(order.when),
                    "where": write.where(order.where),
                    "because": order.because,
                    "evidence": _evidence(order),
                    "entries": [[e.backend, write.condition(e.condition), write.where(e.where)] for e in order.entries],
                }
                for order in orders
            ]
            for platform, orders in registry.orders.items()
        },
        "choices": [
            {
                "strength": c.strength,
                "backends": list(c.backends),
                "when": write.condition(c.when),
                "where": write.where(c.where),
                "denial": denial(c).sentence,
            }
            for c in registry.choices
        ],
        "fallbacks": [
            {
                "when": write.condition(f.when),
                "only": sorted(f.only),
                "because": f.because,
                "where": write.where(f.where),
            }
            for f in registry.fallbacks
        ],
        "waivers": [
            {
                "when": write.condition(w.when),
                "facets": sorted(w.facets),
                "because": w.because,
                "where": write.where(w.where),
            }
            for w in registry.waivers
        ],
        "backends": {name: write.backend(row) for name, row in registry.backends.items()},
    }
    return {**document, "tables": write.tables.to_dict()}


def page_document(registry: Registry) -> dict[str, Any]:
    """The document of a registry for the picker's page.

    One that the evaluator cannot express has no conditions: ``byPython`` says why, and Python answers its questions.
    """
    try:
        return registry_document(registry)
    except ExpressionError as e:
        rows = {
            row.name: {"where": 0, "variants": [{"name": name} for name in row.variant_names]}
            for row in registry.backends.values()
        }
        return {**_head(registry), "byPython": str(e), "backends": rows}


def _head(registry: Registry) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "name": registry.name,
        "fingerprint": registry.fingerprint,
        "title": registry.title,
        "silence": unsaid(registry),
        "core": [_core(name) for name in CORE],
        "linked": [[first, second] for first, second, _ in LINKED],
        "phases": list(phases_of(registry)),
        "imports": registry.imports,
        "vocabulary": _vocabulary(registry.vocabulary),
        "kvBytes": _kv_bytes(registry),
    }


def _kv_bytes(registry: Registry) -> dict[str, list[Any]]:
    """Word of a dtype -> the bits of an element, the bytes of a KV head's scales and those of a latent.

    Only a start stores a cache otherwise than the documents of models count it; a registry without one has none.
    """
    known = registry.vocabulary.words
    words = {**known["dtypes"], **known["kv_dtypes"]} if registry.steps else {}
    return {
        name: [facts.get("stored_bits", facts.get("bits", 32)), facts.get("head_bytes", 0), facts.get("latent_bytes")]
        for name, facts in ((word.name, word.facts) for word in words.values())
    }


def _refuse_what_is_new(registry: Registry) -> None:
    """Raise `ExpressionError` for a field that has come to the data since the evaluator was written, and is used."""
    rows = registry.backends.values()
    variants = [v for row in rows for v in row.variants]
    orders = [o for several in registry.orders.values() for o in several]
    following = (c for v in variants for c in v.consequences)
    facets, derived = registry.vocabulary.facets.values(), registry.derived.values()
    steps = [part for step in registry.steps for part in (step, *step.effects)]
    parts: list[Any] = [registry, *rows, *variants, *orders, *following, *facets, *derived, *steps]
    for part in parts:
        known = f"{_READ[type(part)]} {_WITHOUT_EFFECT.get(type(part), '')}".split()
        new = [f.name for f in fields(part) if f.name not in known and getattr(part, f.name)]
        if new:
            raise ExpressionError(f"{registry.title} has {', '.join(new)}, of which the evaluator knows nothing")
    words = registry.vocabulary.words["kv_dtypes"]
    if registry.steps and any("packed" in word.facts for word in words.values()):
        raise ExpressionError(
            f"{registry.title} has steps and packed formats, whose bytes the evaluator does not count"
        )
    odd = [f.name for f in registry.vocabulary.facets.values() if f.kind not in _KINDS or f.of not in _OWNERS]
    if odd:
        raise ExpressionError(
            f"{registry.title} has facets of a kind that the evaluator does not know: {', '.join(odd)}"
        )


def _core(name: str) -> dict[str, Any]:
    facet = CORE[name]
    return {
        "name": name,
        "of": facet.of,
        "kind": facet.kinds[0],
        "least": facet.least,
        "required": facet.required,
        "ordinary": None if facet.is_set else facet.ordinary,
        "decidedBy": facet.decided_by,
        "isSet": facet.is_set,
        "help": facet.help,
    }


def _vocabulary(vocabulary: Vocabulary) -> dict[str, Any]:
    def legends(words: Mapping[str, Word]) -> dict[str, str]:
        return {name: word.legend for name, word in words.items()}

    return {
        "facets": {
            f.name: {
                "of": f.of,
                "kind": f.kind,
                "legend": f.legend,
                "words": list(f.words),
                "legends": legends(vocabulary.words_of(f.name)),
                "follows": f.follows,
                "unless": f.unless,
            }
            for f in vocabulary.facets.values()
        },
        "packages": legends(vocabulary.packages),
        "brings": {
            name: {release: list(pins) for release, pins in word.facts["brings"].items()}
            for name, word in vocabulary.packages.items()
            if word.facts.get("brings")
        },
        "devices": {d: vocabulary.arch_of(d) for d in vocabulary.words_of("device")}
        if vocabulary.facet("device")
        else {},
        "architectures": {
            a.name: {"platform": a.platform, "title": a.title, "products": list(a.products), "aliases": list(a.aliases)}
            for a in vocabulary.architectures.values()
        },
    }


class _Writer:
    """Writes the parts of one registry into its tables."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.tables = Tables()

    def where(self, location: Location) -> int:
        file = self.tables.add("files", location.file)
        return self.tables.add("places", [file, location.line, location.column])

    def condition(self, condition: Condition) -> int:
        part: dict[str, Any] = {
            "clauses": [self.clause(c) for c in condition.clauses],
            "any": [
                {
                    "of": [self.condition(c) for c in group],
                    "facets": list(dict.fromkeys(f for c in group for f in c.facets)),
                    "text": "needs " + " or ".join(c.describe() for c in group),
                    "where": self.where(group[0].where),
                }
                for group in condition.any_of
            ],
            "none": [
                {
                    "of": self.condition(c),
                    "facets": list(c.facets),
                    "text": f"not for {c.describe()}",
                    "where": self.where(c.where),
                }
                for c in condition.none_of
            ],
        }
        return self.tables.add("conditions", {name: value for name, value in part.items() if value})

    def clause(self, clause: Clause) -> int:
        nouns = {"nouns": list(clause.nouns)} if clause.matcher.form == "any" else {}
        matcher, where = self.matcher(clause.matcher), self.where(clause.where)
        return self.tables.add("clauses", {"facet": clause.facet, "matcher": matcher, "where": where, **nouns})

    def claim(self, claim: Claim) -> int:
        matcher, where = self.matcher(claim.matcher), self.where(claim.where)
        return self.tables.add("clauses", {"facet": claim.facet, "matcher": matcher, "where": where})

    def matcher(self, matcher: Matcher) -> int:
        part = {
            "text": matcher.text,
            "inWords": matcher.in_words if matcher.in_words != matcher.text else None,
            "test": expression(matcher),
            "form": matcher.form,
            "mentions": mentions(matcher) if matcher.form else [],
            "constants": sorted(matcher.constants),
            "moduli": sorted(matcher.moduli),
        }
        return self.tables.add("matchers", {name: value for name, value in part.items() if value})

    def backend(self, row: Backend) -> dict[str, Any]:
        return {
            "summary": row.summary,
            "status": row.status,
            "platforms": sorted(row.platforms),
            "attention": sorted(row.attention),
            "where": self.where(row.where),
            "variants": [self.variant(v) | self.proven(row, v) for v in row.variants],
        }

    def proven(self, row: Backend, variant: Variant) -> dict[str, Any]:
        """The runs that proved a variant, with the versions of the packages that it needs."""
        needed = needed_of(self.registry, variant)
        proofs = proofs_of(self.registry, row.name, variant) if needed else ()
        named = [{name: p.versions[name] for name in sorted(needed) if p.versions.get(name)} for p in proofs]
        runs = [[p.platform, p.arch, p.device, versions] for p, versions in zip(proofs, named, strict=True)]
        return {"proven": runs} if runs else {}

    def variant(self, variant: Variant) -> dict[str, Any]:
        return {
            "name": variant.name,
            "when": self.condition(variant.when),
            "requires": self.condition(variant.requires),
            "claims": [self.claim(c) for c in variant.claims],
            "featuresAt": self.where(variant.features_at),
            "served": sorted(variant.served),
            "emulated": {f: [why, self.where(where)] for f, (why, where) in sorted(variant.emulated.items())},
            # in the order of the data: a warning lists them so
            "unchecked": [[word, self.where(where)] for word, where in variant.unchecked.items()],
            "rules": [
                self.tables.add(
                    "rules",
                    {
                        "when": self.condition(r.when),
                        "reject": r.reject,
                        "facets": list(r.facets),
                        "where": self.where(r.where),
                    },
                )
                for r in variant.rules
            ],
            "consequences": [self.consequence(c) for c in variant.consequences],
            "where": self.where(variant.where),
            "runs": variant.module is not None,
            "runOnRequest": variant.run_on_request,
        }

    def effect(self, effect: Effect) -> dict[str, Any]:
        return {
            "when": self.condition(effect.when),
            "where": self.where(effect.where),
            "sets": {facet: _set(value) for facet, value in effect.sets.items()},
            "refuses": effect.refuses,
            "unknown": effect.unknown,
            "because": effect.because,
        }

    def consequence(self, known: Consequence) -> int:
        blocks = known.kernel_blocks
        part = {
            "when": self.condition(known.when),
            "where": self.where(known.where),
            "fails": known.fails,
            "runs": known.runs,
            "workspace": known.workspace,
            "perQueryElement": known.per_query_element,
            "blocks": None if blocks is None else [list(blocks.sizes), list(blocks.multiples), blocks.text],
            "stores": known.stores,
            "says": known.says,
            "source": known.source,
        }
        return self.tables.add("consequences", part)


def _set(value: Any) -> Any:
    """The value that a facet gets: a constant, another facet's at the moment, or words put into a set and taken out."""
    if isinstance(value, From):
        return {"from": value.facet}
    if isinstance(value, Computed):
        return {value.operation: list(value.operands)}
    if isinstance(value, Switched):
        return {"on": sorted(value.on), "off": sorted(value.off)}
    if value is not None and not isinstance(value, str | int | bool):
        raise ExpressionError(f"no expression for the value {value!r}")
    return value
