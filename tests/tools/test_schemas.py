"""The JSON Schemas: they accept the shipped data and refuse what attnreg refuses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from support import ROOT
from support.pages.schemas import validator

from attnreg.language.numbers import as_data
from attnreg.models.reader import bundled_families

SCHEMAS = sorted((ROOT / "docs/schema").glob("*.schema.json"))


class Core(yaml.SafeLoader):
    """Reads as editors do: YAML 1.2 has numbers, but no dates."""


Core.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":timestamp")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def data_of(name: str) -> Any:
    return yaml.load((ROOT / f"registry/{name}.yaml").read_text(encoding="utf-8"), Core)


def test_there_is_a_schema_for_every_kind_of_file() -> None:
    names = {
        "vocabulary",
        "backends",
        "priorities",
        "steps",
        "invariants",
        "architectures",
        "models",
        "overlay",
        "logs",
    }
    assert {path.name.removesuffix(".schema.json") for path in SCHEMAS} == names


@pytest.mark.parametrize("name", ["vocabulary", "backends", "priorities", "invariants", "logs"])
def test_shipped_data_satisfies_its_schema(name: str) -> None:
    validator(name).validate(data_of(name))


def test_shipped_families_satisfy_their_schema() -> None:
    found = {}
    for name in bundled_families().files:
        data = as_data(data_of(f"models/{name}"))
        if name != "_sources" and (error := next(validator("models").iter_errors(data), None)):
            found[name] = error.message
    assert found == {}


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("vocabulary", ("features", "sinks"), 3),
        ("models/llama", ("haeds",), "num_heads"),
        ("models/llama", ("heads",), {"plus": [1, 2]}),
        ("models/llama", ("heads",), {"when": {"a": {"moer": 3}}, "value": 1}),
        ("models/llama", ("heads",), {"quotient": [1, 2, 3]}),
        ("models/llama", ("pattern",), {"evry": 2}),
        ("models/llama", ("pattern",), {"every": 2, "is": "full_attention"}),
        ("models/llama", ("words",), {"full_attention": {"kind": "ful"}}),
        ("models/llama", ("at",), "text_config"),
        ("models/llama", ("model_type",), 3),
        ("models/aria", ("parts", 0, "source"), "here:f.py#N"),
        ("vocabulary", ("facets", "arch", "kind"), "number"),
        ("vocabulary", ("facts",), {}),
        ("backends", ("backends", "FLASH_ATTN", "head_sizes"), [64]),
        ("backends", ("backends", "FLASH_ATTN", "capabilities", "dtypes"), ["fp16"]),
        ("backends", ("backends", "FLASH_ATTN", "capabilities", "head_sizes"), {"multiple": 8}),
        ("backends", ("backends", "FLASH_ATTN", "capabilities", "features"), ["sink"]),
        ("backends", ("backends", "FLASH_ATTN", "capabilities", "head_sizes_v"), "smae"),
        ("backends", ("backends", "FLASH_ATTN", "capabilities", "num_heads"), "same"),
        ("backends", ("backends", "FLASH_ATTN", "capabilities"), {"dtypes": "any", "features": []}),
        ("backends", ("backends", "FLASH_ATTN", "requires"), {"packages": ["flash-atn>=2.7"]}),
        ("backends", ("backends", "FLASH_ATTN", "requires"), {"flags": ["aiterr"]}),
        ("backends", ("backends", "FLASH_ATTN", "platforms"), ["cud"]),
        ("backends", ("backends", "FLASH_ATTN", "emulated"), {"sink": "slow"}),
        ("priorities", ("cuda", 0, "order"), ["FLASH_ATN"]),
        ("priorities", ("cuda", 0, "order"), []),
        ("priorities", ("cuda", 0, "when"), {"arhc": "sm90"}),
        ("priorities", ("cuda", 0, "when"), {"arch": {"min": "sm91"}}),
        ("priorities", ("cuda", 0, "when"), {"head_size": "64"}),
        ("priorities", ("cuda", 0, "when"), {"any": []}),
        ("priorities", ("cuda", 0, "when"), {"kv_quantized": "yes"}),
        ("priorities", ("cuda", 0, "because"), 1),
        ("priorities", ("metal",), []),
        ("invariants", ("invariants", 0, "never"), ["NOBODY"]),
        ("invariants", ("invariants", 0, "finds"), False),
    ],
)
def test_wrong_data_does_not(name: str, path: tuple[str | int, ...], value: Any) -> None:
    data = data_of(name)
    target = data
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    assert not validator(name.partition("/")[0]).is_valid(data)


@pytest.mark.parametrize(
    ("overlay", "valid"),
    [
        ({"choices": [{"when": {"role": "draft"}, "prefer": "TRITON_ATTN"}, {"deny": ["FLASHINFER"]}]}, True),
        ({"backends": {"FLASH_ATTN": {"status": "experimental"}}, "place": []}, True),
        ({"choices": [{"require": "MY_ATTN"}]}, True),
        ({"choises": []}, False),
        ({"choices": [{"prefer": "triton"}]}, False),
        ({"backends": {"FLASH_ATTN": {"platforms": ["cuda"]}}}, False),
        ({"backends": {"MY_ATTN": {"summary": 1}}}, False),
        ({"orders": {"cuda": [{"name": "mine"}]}}, False),
    ],
)
def test_overlay_schema(overlay: dict[str, Any], valid: bool) -> None:
    assert validator("overlay").is_valid(overlay) is valid


def test_patterns_are_read_alike_everywhere() -> None:
    """Editors compile patterns as ECMAScript with the u flag, which refuses needless escapes."""
    for path in SCHEMAS:
        text = path.read_text(encoding="utf-8")
        for pattern in re.findall(r'"pattern": ("(?:[^"\\]|\\.)*")', text):
            assert set(re.findall(r"\\(.)", json.loads(pattern))) <= {"s"}
