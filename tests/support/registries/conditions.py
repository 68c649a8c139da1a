"""Conditions over a small vocabulary, and matchers with examples of accepted and refused values."""

from __future__ import annotations

import functools
import json
from typing import Any

from attnreg.compile.conditions import Parser
from attnreg.compile.source.yaml_source import Document
from attnreg.errors import Problem
from attnreg.language.conditions import Condition
from attnreg.language.vocabulary import Vocabulary
from support.registries import tiny

WORDS = {
    "words": {
        **tiny.VOCABULARY["words"],
        "kv_dtypes": dict.fromkeys(["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4"], "l"),
    },
    "flags": {"fast": "l", "slow": "l"},
    "packages": {"lib": "l", "flash-attn": "l"},
    "architectures": {
        "gpu": {
            "g9": {"family": "f"},
            "g10": {"family": "f"},
            "g100": {"family": "f"},
            "r1": {"family": "f", "series": "r"},
        },
        "npu": {"n1": {"family": "f"}},
    },
    "derived": {
        "quantized": {
            "legend": "l",
            "cases": [{"when": {"kv_dtype": [None, "auto"]}, "value": False}, {"value": True}],
        },
        "version": {
            "legend": "l",
            "cases": [{"when": {"arch": "g100"}, "value": 4}, {"when": {"arch": "g10"}, "value": 3}],
        },
        "kind": {"legend": "l", "cases": [{"when": {"arch": "g9"}, "value": "old"}, {"value": "new"}]},
    },
}


@functools.cache
def words() -> Vocabulary:
    return tiny.load({"A": tiny.row()}, vocabulary=WORDS).vocabulary


def parse(text: str) -> tuple[Condition, list[Problem]]:
    document, problems = Document(text, "c.yaml"), list[Problem]()
    return Parser(words(), document, problems).condition(document.data, ()), problems


def condition(raw: Any) -> Condition:
    parsed, problems = parse(json.dumps(raw))
    assert problems == []
    return parsed


PACKAGES = {
    "none": (),
    "any": None,
    "lib": (("lib", "1.0"),),
    "lib 2": (("lib", "2.1"),),
    "lib ?": (("lib", ""),),
    "lib x": (("lib", "nightly"),),
    "both": (("flash-attn", "2.7.4"), ("lib", "2.1")),
    "flash": (("flash-attn", "2.6"),),
}

# facet, matcher, the clause in words, accepted values, refused values
MATCHERS: list[tuple[str, str, str, list[Any], list[Any]]] = [
    ("kv_dtype", "fp8", "fp8", ["fp8"], ["fp8_e4m3", "auto", None]),
    ("kv_dtype", "'fp8*'", "fp8*", ["fp8", "fp8_e4m3", "fp8_e5m2"], ["nvfp4", None]),
    ("kv_dtype", "fp8_e?m?", "fp8_e?m?", ["fp8_e4m3", "fp8_e5m2"], ["fp8", None]),
    ("kv_dtype", "[auto, 'fp8_*']", "auto, fp8_*", ["auto", "fp8_e4m3"], ["fp8", None]),
    ("kv_dtype", "[auto, {not: 'fp8*'}]", "auto, not fp8*", ["auto", "nvfp4", None], ["fp8"]),
    ("kv_dtype", "null", "not given", [None], ["auto"]),
    ("kv_dtype", "[null, auto]", "not given, auto", [None, "auto"], ["fp8"]),
    ("kv_dtype", "{not: fp8}", "not fp8", ["auto", None], ["fp8"]),
    ("kv_dtype", "{not: [fp8, auto]}", "not fp8, auto", ["nvfp4", None], ["fp8", "auto"]),
    ("kv_dtype", "{not: null}", "given", ["auto", "fp8"], [None]),
    ("kv_dtype", "{not: [null, 'fp8*']}", "given and not fp8*", ["auto", "nvfp4"], [None, "fp8", "fp8_e5m2"]),
    ("kv_dtype", "{not: {not: fp8}}", "not not fp8", ["fp8"], ["auto", None]),
    ("role", "draft", "draft", ["draft"], ["target"]),
    # architectures compare as the vocabulary orders them, not as text, and only within their series
    ("arch", "g10", "g10", ["g10"], ["g100", "g9"]),
    ("arch", "'g10*'", "g10, g100", ["g10", "g100"], ["g9"]),
    ("arch", "{min: g10}", "g10 or later", ["g10", "g100"], ["g9", "r1", "n1", None]),
    ("arch", "{max: g10}", "up to g10", ["g9", "g10"], ["g100", "r1", "n1", None]),
    ("arch", "{below: g10}", "before g10", ["g9"], ["g10", "g100", "r1", "n1"]),
    ("arch", "{min: g9, below: g100}", "g9 or later, before g100", ["g9", "g10"], ["g100", "r1"]),
    ("arch", "{min: g9, not: g10}", "g9 or later, not g10", ["g9", "g100"], ["g10", "n1"]),
    ("arch", "{not: {min: g10}}", "not g10 or later", ["g9", "r1", "n1"], ["g10", "g100"]),
    ("arch", "[n1, {min: g100}]", "n1, g100 or later", ["n1", "g100"], ["g10"]),
    # integers
    ("head_size", "64", "64", [64], [65, None]),
    ("head_size", "[64, {min: 128, max: 256}]", "64, 128 to 256", [64, 128, 200, 256], [63, 127, 257, None]),
    ("head_size", "{min: 64}", "64 or more", [64, 65], [63, None]),
    ("head_size", "{max: 64}", "up to 64", [1, 64], [65, None]),
    ("head_size", "{below: 64}", "up to 63", [63], [64, None]),
    ("head_size", "{below: 64, max: 32}", "up to 32", [32], [33, None]),
    ("head_size", "{below: 32, max: 64}", "up to 31", [31], [32, None]),
    ("head_size", "{multiple_of: 8}", "multiples of 8", [8, 16], [12, None]),
    ("head_size", "{multiple_of: 8, max: 256}", "multiples of 8 up to 256", [8, 256], [264, 12, None]),
    ("head_size", "{multiple_of: 8, min: 16}", "multiples of 8 from 16", [16, 24], [8, 17, None]),
    ("head_size", "{multiple_of: 8, min: 16, max: 32}", "multiples of 8 from 16 to 32", [16, 32], [8, 40, None]),
    ("head_size", "{multiple_of: 1}", "given", [1, 7], [None]),
    ("head_size", "{multiple_of: 8, not: 64}", "multiples of 8, not 64", [8, 128], [64, 12, None]),
    ("head_size", "{not: 64}", "not 64", [63, None], [64]),
    ("head_size", "{not: {min: 64}}", "not 64 or more", [63, None], [64]),
    ("head_size", "[null, {multiple_of: 16}]", "not given, multiples of 16", [None, 16], [8]),
    ("head_size", "1", "1", [1], [2, None]),
    ("ranks", "{min: 2}", "2 or more", [2], [1, None]),
    # text
    ("model", "deepseek_v3", "deepseek_v3", ["deepseek_v3"], ["deepseek", None]),
    ("model", "[llama, deepseek]", "llama, deepseek", ["deepseek", "llama"], ["deepseek_v3", None]),
    ("model", "{not: deepseek}", "not deepseek", ["llama", None], ["deepseek"]),
    ("model", "{not: null}", "given", ["llama"], [None]),
    ("model", "null", "not given", [None], ["llama"]),
    ("model", "'9.10'", "9.10", ["9.10"], ["9.1", None]),
    # booleans and derived facets
    ("eager", "true", "true", [True], [False, None]),
    ("eager", "{not: true}", "not true", [False, None], [True]),
    ("quantized", "false", "false", [False], [True]),
    ("version", "3", "3", [3], [4, None]),
    ("version", "[null, 3]", "not given, 3", [3, None], [4]),
    ("version", "{min: 4}", "4 or more", [4], [3, None]),
    ("version", "{not: {min: 4}}", "not 4 or more", [3, None], [4]),
    ("kind", "old", "old", ["old"], ["new"]),
    ("kind", "'*'", "*", ["old", "new"], [None]),
]


SET_MATCHERS: list[tuple[str, str, str, list[set[str]], list[set[str]]]] = [
    ("features", "[sinks]", "sinks", [{"sinks"}, {"sinks", "alibi"}], [set(), {"alibi"}]),
    ("features", "sinks", "sinks", [{"sinks"}], [set()]),
    ("features", "[sinks, alibi]", "alibi and sinks", [{"sinks", "alibi"}], [{"sinks"}]),
    ("features", "{any: [sinks, alibi]}", "(alibi or sinks)", [{"sinks"}, {"sinks", "alibi"}, {"alibi"}], [set()]),
    ("features", "{any: [sinks]}", "sinks", [{"sinks"}, {"sinks", "alibi"}], [{"alibi"}, set()]),
    ("features", "{any: sinks}", "sinks", [{"sinks"}], [{"alibi"}]),
    ("flags", "{any: [fast, slow]}", "(flag fast or flag slow)", [{"slow"}], [set()]),
    ("features", "{only: [sinks]}", "features no other than sinks", [set(), {"sinks"}], [{"sinks", "alibi"}]),
    ("features", "{only: sinks}", "features no other than sinks", [{"sinks"}], [{"alibi"}]),
    ("features", "{only: []}", "features none", [set()], [{"sinks"}]),
    ("flags", "[fast, slow]", "flag fast and flag slow", [{"fast", "slow"}], [{"fast"}]),
]
