"""The JSON Schema of models.yaml for editors; what words and families mean is for `attnreg check` to judge."""

from __future__ import annotations

from typing import Any

from attnreg.models.families import ATTN_TYPES, FACTS, INDEXER, KINDS, MLA
from attnreg.models.patterns import KEYS
from attnreg.models.values import FORMS, OPERATIONS

Schema = dict[str, Any]


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def _open(*properties: str, of: Schema) -> Schema:
    return dict.fromkeys(properties, of)


VALUE, PATTERN, CONDITION = _ref("value"), _ref("pattern"), _ref("condition")
_TEXT: Schema = {"type": "string"}
_NAMES: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}
_PLAIN: Schema = {"type": ["string", "number", "boolean", "null"]}


def model_schema() -> Schema:
    """The schema, as JSON-ready values."""
    dimensions = {
        key: {
            "anyOf": [
                VALUE,
                {"type": "object", "properties": _open("used", *names, of=VALUE), "additionalProperties": False},
            ]
        }
        for key, names in (("mla", MLA), ("indexer", INDEXER))
    }
    call = {
        "kind": {"enum": list(KINDS)},
        "attn_type": {"enum": list(ATTN_TYPES)},
        "when": CONDITION,
        "fields": {"type": "object", "additionalProperties": VALUE},
        **_open(*FACTS, of=VALUE),
        **dimensions,
    }
    words = {"type": "object", "additionalProperties": _ref("call")}
    also = {"type": "object", "properties": {"pattern": PATTERN, "words": words}, "required": ["pattern", "words"]}
    refusal = {"type": "object", "properties": {"when": CONDITION, "because": _TEXT}, "required": ["when", "because"]}
    family = {
        **call,
        "like": _TEXT,
        "source": _TEXT,
        "note": _TEXT,
        "names": {"type": "object", "additionalProperties": _NAMES},
        "defaults": {"type": "object"},
        "layers": VALUE,
        "pattern": PATTERN,
        "words": {
            "type": "object",
            "additionalProperties": {"anyOf": [_ref("call"), {"type": "array", "items": _ref("call")}]},
        },
        "also": {"type": "object", "additionalProperties": also},
        "kv_shared": {"anyOf": [{"type": "null"}, _object({"last": VALUE, "list": VALUE})]},
        "refuse": {"type": "array", "items": refusal},
        "watch": {"type": "array", "items": _TEXT},
        "renamed": {"type": "object", "additionalProperties": _TEXT},
        "parts": {"type": "array", "items": _ref("part")},
    }
    part = {"at": _NAMES, "optional": {"type": "boolean"}, "absent": {"type": "object"}, "only": {"enum": [0, -1]}}
    source = _object({"url": _TEXT, "version": _TEXT, "read": _TEXT})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "attnreg models",
        "description": "models.yaml: how the config.json of a model family maps to its layers.",
        **_object(
            {
                "sources": {"type": "object", "additionalProperties": source},
                "general": _ref("family"),
                "families": {"type": "object", "additionalProperties": _ref("family")},
            }
        ),
        "$defs": {
            "call": _object(call),
            "condition": {"type": "object", "additionalProperties": _ref("matcher"), "minProperties": 1},
            "family": _object(family),
            "matcher": {
                "anyOf": [
                    _PLAIN,
                    {"type": "array", "items": _ref("matcher")},
                    _object(_open("min", "max", "below", of={"type": "number"}) | {"not": _ref("matcher")}),
                ]
            },
            "part": _object(family | part),
            "pattern": {"anyOf": [_TEXT, {"type": "array", "items": PATTERN}, *_patterns()]},
            "value": {"anyOf": [_PLAIN, {"type": "array", "items": VALUE}, _object(_forms())]},
        },
    }


def _object(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _forms() -> Schema:
    operations = {name: {"type": "array", "items": VALUE, "minItems": 2} for name in OPERATIONS}
    forms = dict.fromkeys(FORMS, _TEXT) | {"when": CONDITION, "index": {"type": "integer"}, "not": VALUE} | operations
    return {**forms, "value": VALUE, "otherwise": VALUE}


def _patterns() -> list[Schema]:
    kinds = {
        "means": {"type": "object", "additionalProperties": _TEXT},
        **_open("is", "others", of=PATTERN),
        **_open("every", "at", "from", "below", of=VALUE),
        **_open("list", "runs", of=_TEXT),
        **_open("decides_count", "longer_is_cut", of={"type": "boolean"}),
        "repeat": _NAMES,
        "layers": {"anyOf": [VALUE, {"type": "array", "items": {"type": "integer"}}]},
        "when": CONDITION,
        "note": _TEXT,
    }
    return [
        {**_object({key: kinds[key] for key in (kind, *sorted(beside), "when", "note")}), "required": [kind]}
        for kind, beside in KEYS.items()
    ]
