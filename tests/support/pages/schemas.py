"""The JSON Schemas of docs/schema, as validators."""

from __future__ import annotations

import functools
import json

import jsonschema

from support import ROOT


@functools.cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((ROOT / f"docs/schema/{name}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)
