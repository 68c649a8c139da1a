"""JSON Schemas for editors: the shapes of compile/schema/ and models/schema.py, with the words of a registry."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonRef, models_json_schema

from attnreg.compile.conditions import ARCH_OPERATORS, INTEGER_OPERATORS, WORD_OPERATORS
from attnreg.compile.schema import tables as schema
from attnreg.compile.schema.architectures import ArchitecturesFile
from attnreg.compile.schema.logs import LogsFile
from attnreg.compile.schema.steps import StepsFile
from attnreg.compile.schema.values import SENTENCE
from attnreg.language.facets import SAME_AS
from attnreg.language.vocabulary import Facet
from attnreg.models import schema as model_schema
from attnreg.models.patterns import BESIDE, PATTERNS
from attnreg.models.values import FORMS
from attnreg.registry import Registry

Schema = dict[str, Any]
FILES: dict[str, type[BaseModel]] = {
    "vocabulary": schema.VocabularyFile,
    "backends": schema.BackendsFile,
    "priorities": schema.PrioritiesFile,
    "steps": StepsFile,
    "invariants": schema.InvariantsFile,
    "architectures": ArchitecturesFile,
    "overlay": schema.OverlayFile,
    "models": model_schema.FamilyData,
    "logs": LogsFile,
}
_MORE: tuple[type[BaseModel], ...] = (
    *(schema.BackendData, schema.BackendPatch, schema.EntryData),
    *(model_schema.CallData, model_schema.MlaData, model_schema.IndexerData),
)
_GLOB = {"type": "string", "pattern": "[*?]"}
_TEXT = {"type": "string", "pattern": "^[^*?]*$"}
_BACKEND = {"$ref": "#/$defs/backend_id"}
# a backend, or one variant of it
_NAMED = {"$ref": "#/$defs/backend_or_variant"}
_LOCAL = (
    "Completion and checks know the words of the default registry. An overlay may name backends that it adds, written "
    "in capitals; facets and features that it adds are for `attnreg check` to judge."
)


def schemas(registry: Registry) -> dict[str, str]:
    """Name of each kind of file -> its JSON Schema, as text."""
    models: list[type[BaseModel]] = [*FILES.values(), *_MORE]
    _, generated = models_json_schema([(m, "validation") for m in models], by_alias=True, schema_generator=_Generator)
    out = {}
    for name, model in FILES.items():
        definitions = {key: _tidy(value) for key, value in generated["$defs"].items()}
        definitions |= _words(registry, closed=name not in ("overlay", "steps"))
        definitions |= _family_language()
        _refine(definitions, registry)
        _files_and_parts(definitions)
        top = definitions.pop(model.__name__)
        if name == "overlay":
            top["description"] = f"{top['description']} {_LOCAL}"
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"attnreg {name}"}
        whole = {**head, **top, "$defs": {key: definitions[key] for key in _reached(top, definitions)}}
        out[name] = json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
    return out


class _Generator(GenerateJsonSchema):
    """A generator of pydantic that accepts references to definitions which this module adds."""

    def get_schema_from_definitions(self, json_ref: JsonRef) -> Schema | None:
        return super().get_schema_from_definitions(json_ref) if json_ref in self.json_to_defs_refs else None


def _tidy(value: Any) -> Any:
    """A schema without titles that repeat names, and without empty defaults.

    Every key must match a pattern of keys. In pydantic's form of the schema, a key that does not match is not checked.
    """
    if isinstance(value, list):
        return [_tidy(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {k: v for k, v in value.items() if not (k == "title" and isinstance(v, str))}
    if kept.get("default", 0) in (None, [], {}) or isinstance(kept.get("default"), dict):
        del kept["default"]
    if "patternProperties" in kept:
        ((pattern, kept["additionalProperties"]),) = kept.pop("patternProperties").items()
        kept["propertyNames"] = {"pattern": pattern}
    return {k: _tidy(v) for k, v in kept.items()}


def _reached(top: Schema, definitions: dict[str, Schema]) -> list[str]:
    """Names of the definitions that a schema uses, directly or through others, sorted."""
    used: set[str] = set()
    waiting = [top]
    while waiting:
        names = set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(waiting.pop()))) - used
        used |= names
        waiting += [definitions[name] for name in names]
    return sorted(used)


def _family_language() -> dict[str, Schema]:
    """The definitions that families refer to: values, patterns of layers, and conditions over a config's fields."""
    value, pattern, matcher = ({"$ref": f"#/$defs/{name}"} for name in ("value", "pattern", "field_matcher"))
    condition, text = {"$ref": "#/$defs/field_condition"}, {"type": "string"}
    plain: Schema = {"type": ["string", "number", "boolean", "null"]}
    operators: dict[str, Schema] = {op: {"type": "number"} for op in INTEGER_OPERATORS}
    operators |= {"multiple_of": {"type": "integer", "minimum": 1}, "not": matcher}
    # name of a kind of value in values.FORMS and patterns.PATTERNS -> its schema
    under: dict[str, Schema] = {
        **dict.fromkeys(("value", "flag"), value),
        **dict.fromkeys(("text", "field", "word"), text),
        "condition": condition,
        "pattern": pattern,
        "integer": {"type": "integer"},
        "boolean": {"type": "boolean"},
        "values": {"type": "array", "items": value, "minItems": 2},
        "two values": {"type": "array", "items": value, "minItems": 2, "maxItems": 2},
        "words": {"type": "object", "additionalProperties": text},
        "cycle": {"anyOf": [text, {"type": "array", "items": text, "minItems": 1}]},
        "indices": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, value]},
    }

    def forms(table: Mapping[str, Mapping[str, str]], beside: Mapping[str, str]) -> list[Schema]:
        keys = [{**own, **beside} for own in table.values()]
        needed = [[key for key, what in own.items() if not what.endswith("?")] for own in keys]
        properties = [{key: under[what.rstrip("?")] for key, what in own.items()} for own in keys]
        return [_closed(p, required=n) for p, n in zip(properties, needed, strict=True)]

    several = {"type": "array", "minItems": 1}
    said = {"any": {**several, "items": condition}, "not": condition}
    return {
        "value": {"anyOf": [plain, {**several, "items": value}, *forms(FORMS, {})]},
        "pattern": {"anyOf": [text, {**several, "items": pattern}, *forms(PATTERNS, BESIDE)]},
        "field_condition": {
            "type": "object",
            "description": "Fields of the config and what each must be; all of them must hold.",
            "properties": said,
            "additionalProperties": matcher,
        },
        "field_matcher": {"anyOf": [plain, {**several, "items": matcher}, _closed(operators, minProperties=1)]},
    }


def _closed(properties: Schema, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, **more, "additionalProperties": False}


def _files_and_parts(definitions: dict[str, Schema]) -> None:
    """Make two schemas of `FamilyData`: of a family's file, and of a part in it. Each has some keys of its own."""
    both = definitions["FamilyData"]
    for name, foreign in (("FamilyData", model_schema.OF_PART), ("part", model_schema.OF_FILE)):
        properties = {key: value for key, value in both["properties"].items() if key not in foreign}
        properties["parts"] = {**properties["parts"], "items": {"$ref": "#/$defs/part"}}
        definitions[name] = {**both, "properties": properties}
    definitions["part"]["description"] = "A stack of a model of several: a family, and where its config stands."
    definitions["FamilyData"]["anyOf"] = [{"required": ["model_type", "source"]}, {"required": ["summary"]}]


def _words(registry: Registry, *, closed: bool) -> dict[str, Schema]:
    """The definitions that the models refer to: conditions, claims and names.

    closed: whether a file may only name backends of the registry, and add none.
    """
    vocabulary = registry.vocabulary
    features = {"enum": list(vocabulary.features)}
    out = {f"matcher_{f.name}": _matcher(registry, f) for f in vocabulary.facets.values()}
    facets = {f.name: _described(f"matcher_{f.name}", f.legend) for f in vocabulary.facets.values()}
    condition = {"$ref": "#/$defs/condition"}
    out["feature"] = features
    out["architecture"] = {"enum": list(vocabulary.architectures)}
    names = list(vocabulary.packages)
    # editors read patterns as ECMAScript does, which allows only necessary escapes
    pattern = f"^({'|'.join(name.replace('.', '[.]') for name in names)})\\s*([<>=!~]=?|===)[^;@]*$"
    out["package"] = {"anyOf": [{"enum": names}, {"type": "string", "pattern": pattern}]}
    out["condition"] = {
        "type": "object",
        "description": "Facets and what each must be; all of them must hold.",
        "properties": {
            **facets,
            "any": {"type": "array", "items": condition, "minItems": 1, "description": "One of these holds."},
            "not": {**condition, "description": "This does not hold."},
            "without": {**_list([*vocabulary.features, *vocabulary.flags]), "description": "None of these."},
        },
        "additionalProperties": False,
    }
    claims = {key: _claim(facet) for key, facet in vocabulary.claims.items()}
    listed = {"type": "array", "items": {"$ref": "#/$defs/feature"}, "uniqueItems": True}
    out["capabilities"] = {
        "type": "object",
        "properties": {
            **claims,
            "features": {**listed, "description": "What is served natively; all else is refused."},
        },
        "required": list(vocabulary.claims),
        "additionalProperties": False,
    }
    change = {"type": "object", "properties": {**claims, "features": listed}, "additionalProperties": False}
    out["capability_patch"] = {
        "type": "object",
        "description": "Claims that replace the row's; `add` and `remove` change its lists.",
        "properties": {**claims, "features": listed, "add": change, "remove": change},
        "additionalProperties": False,
    }
    variants = [f"{row.name}/{name}" for row in registry.backends.values() for name in row.variant_names]
    for name, known, pattern in (
        ("backend_id", list(registry.backends), "^[A-Z][A-Z0-9_]*$"),
        ("backend_or_variant", [*registry.backends, *variants], "^[A-Z][A-Z0-9_]*(/.+)?$"),
    ):
        out[name] = {"enum": known} if closed else {"anyOf": [{"enum": known}, {"type": "string", "pattern": pattern}]}
    out["unchecked"] = _list([*vocabulary.features, *(f.name for f in vocabulary.claims.values())])
    return out


def _matcher(registry: Registry, facet: Facet) -> Schema:
    """The schema of a facet's matcher in a condition."""
    me = {"$ref": f"#/$defs/matcher_{facet.name}"}
    if facet.kind == "packages":
        one = {"$ref": "#/$defs/package"}
        return {"anyOf": [one, {"type": "array", "items": one}]}
    words = list(facet.words)
    if facet.kind == "words":
        forms: Schema = {
            "any": {**_list(words), "description": "At least one of these."},
            "only": {**_list(words, least=0), "description": "No others than these."},
        }
        mapping = {"type": "object", "properties": forms, "minProperties": 1, "maxProperties": 1}
        return {"anyOf": [{"enum": words}, _list(words), {**mapping, "additionalProperties": False}]}
    numeric = facet.kind == "integer" or (facet.kind == "derived" and all(type(w) is int for w in words))
    allowed = INTEGER_OPERATORS if numeric else ARCH_OPERATORS if facet.kind == "arch" else WORD_OPERATORS
    values: list[Schema] = [{"type": "null"}]
    bound: Schema = {"$ref": "#/$defs/architecture"} if facet.kind == "arch" else {"type": "integer"}
    if facet.kind == "arch":
        values.append(bound)
    else:
        values.append({"enum": words} if words else {"type": "integer"} if facet.kind == "integer" else _TEXT)
    values += [_GLOB] if any(isinstance(word, str) for word in words) else []
    operators = {op: {"type": "integer", "minimum": 1} if op == "multiple_of" else bound for op in allowed}
    operators["not"] = me
    mapping = {"type": "object", "properties": operators, "minProperties": 1, "additionalProperties": False}
    return {"anyOf": [*values, {"type": "array", "items": me, "minItems": 1}, mapping]}


def _claim(facet: Facet) -> Schema:
    value: Schema = {"$ref": f"#/$defs/matcher_{facet.name}"}
    if facet.name not in SAME_AS:
        return {"anyOf": [{"const": "any"}, value], "description": facet.legend}
    same: Schema = {"const": "same", "description": f"As wide as {SAME_AS[facet.name]}."}
    several = {"type": "array", "items": {"anyOf": [same, value]}, "minItems": 1}
    return {"anyOf": [{"const": "any"}, same, value, several], "description": facet.legend}


def _described(definition: str, legend: str) -> Schema:
    return {"$ref": f"#/$defs/{definition}", "description": legend}


def _list(words: list[Any], least: int = 1) -> Schema:
    return {"type": "array", "items": {"enum": words}, "minItems": least}


def _refine(definitions: dict[str, Schema], registry: Registry) -> None:
    """Allow only the registry's names where the models of pydantic allow any text."""
    vocabulary = registry.vocabulary
    for owner, key in (("InvariantData", "chosen"), ("InvariantData", "never")):
        item: Schema = {"anyOf": [_BACKEND, {"type": "null"}]} if key == "chosen" else _BACKEND
        definitions[owner]["properties"][key] |= {"anyOf": [{"type": "array", "items": item}, {"type": "null"}]}
    for owner, keys in (("ChoiceData", ("require", "prefer")), ("PlaceData", ("before", "after"))):
        for key in keys:
            definitions[owner]["properties"][key] |= {"anyOf": [_NAMED, {"type": "null"}]}
    deny = {"anyOf": [_NAMED, {"type": "array", "items": _NAMED}, {"type": "null"}]}
    definitions["ChoiceData"]["properties"]["deny"] |= deny
    definitions["entry"] = definitions.pop("EntryData")
    for owner in ("entry", "PlaceData"):
        definitions[owner]["properties"]["backend"] |= _NAMED

    for key, group in (("platforms", "platforms"), ("attention", "attention"), ("phase", "phases")):
        words = list(vocabulary.words[group])
        optional = [{"type": "null"}] if key == "phase" else []
        definitions["BackendData"]["properties"][key]["anyOf"] = [{"enum": words}, _list(words), *optional]
    for owner in ("BackendData", "BackendPatch", "VariantData"):
        properties = definitions[owner]["properties"]
        properties["emulated"]["propertyNames"] = {"$ref": "#/$defs/feature"}
        properties["unchecked"]["items"] = definitions["unchecked"]["items"]
    definitions["BackendsFile"]["properties"]["unchecked"]["items"] = definitions["unchecked"]["items"]
    definitions["RuleData"]["properties"]["facets"]["items"] = {"enum": list(vocabulary.facets)}
    platforms = {"enum": list(vocabulary.words["platforms"])}
    definitions["PrioritiesFile"]["propertyNames"] = platforms
    overlay = definitions["OverlayFile"]["properties"]
    overlay["orders"]["propertyNames"] = platforms

    # an existing row is changed by a patch, any other row is added
    patch, data = {"$ref": "#/$defs/BackendPatch"}, {"$ref": "#/$defs/BackendData"}
    overlay["backends"]["properties"] = dict.fromkeys(registry.backends, patch)
    overlay["backends"]["additionalProperties"] = {"anyOf": [data, patch]}

    # a word may be written as its legend alone
    for key in ("features", "flags", "packages"):
        _or_legend(definitions["VocabularyFile"]["properties"][key])
    _or_legend(definitions["VocabularyFile"]["properties"]["words"]["additionalProperties"])


def _or_legend(mapping: Schema) -> None:
    mapping["additionalProperties"] = {
        "anyOf": [{"type": "string", "pattern": SENTENCE}, mapping["additionalProperties"]]
    }
