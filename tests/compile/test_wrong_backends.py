"""Wrong rows of backends.yaml: all that is wrong is said at once, with its place and the cure."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.registries.files import brief, refusal, row, write
from support.suite.sentences import Sentences

# the file's text, and what is printed (without the lines of source, which test_yaml_source covers)


WRONG = {
    "an unknown key": ("backends", row("capabilites: {}", "capabilities: {}"), "8:5"),
    "a missing key": ("backends", row(), "3:3"),
    "a value of the wrong kind": (
        "backends",
        row("capabilities: [float16]", "notes: one", "status: new", "since: 1"),
        "8:19 9:12 10:13 11:12",
    ),
    "a row that is no mapping": ("backends", "backends: {A: fast, B: }\n", "1:15 1:24"),
    "a duplicate backend": ("backends", row("capabilities: {}").replace("sources:", "  A: {}\nsources:"), "15:3"),
    "an unknown capability": ("backends", row("capabilities: {dtype: [float16]}"), "8:20"),
    "an unknown word in a claim": ("backends", row("capabilities: {dtypes: [float16, float61]}"), "8:38"),
    "an unknown feature": ("backends", row("capabilities: {features: [sink, 5]}"), "8:31 8:37"),
    "features as one word": ("backends", row("capabilities: {features: sinks}"), "8:30"),
    "an empty claim": ("backends", row("capabilities:", "  dtypes:", "  head_sizes: []"), "9:7 10:19"),
    "an empty range": ("backends", row("capabilities: {head_sizes: {min: 65, max: 64}}"), "8:32"),
    "an unknown platform": ("backends", row("capabilities: {}").replace("[gpu]", "[gpu, gpus]"), "5:22"),
    "a feature native and emulated": (
        "backends",
        row("capabilities: {features: [sinks]}", "emulated: {sinks: a detour}"),
        "9:16",
    ),
    "an unknown emulated feature": ("backends", row("capabilities: {}", "emulated: {snks: a detour}"), "9:16"),
    "an unknown word that is not checked": (
        "backends",
        row("capabilities: {}", "unchecked: [sinks, dtype, heads]"),
        "9:31",
    ),
    "an unknown source": ("backends", row("capabilities: {}").replace("s:path", "t:path", 1), "7:13"),
    "a source without a symbol": ("backends", row("capabilities: {}").replace("#symbol", "", 1), "7:13"),
    "a module that is no path": ("backends", row("capabilities: {}", "module: numpy"), "9:13"),
    "a module of a stranger": ("backends", row("capabilities: {}", "module: os.path"), "9:13"),
    "a module of attnreg that is no kernel": ("backends", row("capabilities: {}", "module: attnreg.cli"), "9:13"),
    "a package by its file": ("backends", row("capabilities: {}", "module: attnreg.kernels.__init__"), "9:13"),
    "a condition on an unknown facet": ("backends", row("capabilities: {}", "requires: {archs: g1}"), "9:16"),
    "a rule that rejects everything": (
        "backends",
        row("capabilities: {}", "rules:", "  - {when: {}, reject: never}"),
        "10:16",
    ),
    "a rule after its like": (
        "backends",
        row("capabilities: {}", "rules:", "  - {when: {arch: g1}, reject: a}", "  - {when: {arch: g1}, reject: b}"),
        "11:9",
    ),
    "a rule about an unknown facet": (
        "backends",
        row("capabilities: {}", "rules:", "  - {when: {arch: g1}, reject: a, facets: [arc]}"),
        "10:48",
    ),
    "a variant twice": (
        "backends",
        row("capabilities: {}", "variants:", "  - {name: v, when: {arch: g1}}", "  - {name: v}"),
        "11:9",
    ),
    "add that is no mapping": (
        "backends",
        row("capabilities: {}", "variants:", "  - name: v", "    capabilities: {add: [sinks]}"),
        "11:29",
    ),
    "add to a claim that is not there": (
        "backends",
        row(
            "capabilities: {kv_dtypes: any}",
            "variants:",
            "  - name: v",
            "    capabilities: {add: {dtypes: [float16], kv_dtypes: [fp8]}}",
        ),
        "11:38 11:60",
    ),
    "remove of what is not claimed": (
        "backends",
        row(
            "capabilities: {dtypes: [float16]}",
            "variants:",
            "  - name: v",
            "    capabilities: {remove: {dtypes: [float16, bfloat16], features: [sinks]}}",
        ),
        "11:41 11:51 11:73",
    ),
    "remove of what is no word": (
        "backends",
        row(
            "capabilities: {dtypes: [float16], features: [sinks]}",
            "variants:",
            "  - name: v",
            "    capabilities: {remove: {features: [sinks, {a: 1}, []]}}",
        ),
        "11:51 11:59",
    ),
    "remove of everything": (
        "backends",
        row(
            "capabilities: {dtypes: [float16]}",
            "variants:",
            "  - name: v",
            "    capabilities: {remove: {dtypes: [float16]}}",
        ),
        "11:41",
    ),
    "add and remove of the unknown": (
        "backends",
        row(
            "capabilities: {dtypes: [float16]}",
            "variants:",
            "  - name: v",
            "    capabilities: {add: {dtype: [float16]}, remove: {features: [snks]}}",
        ),
        "11:30 11:69",
    ),
}


@pytest.mark.parametrize(("file", "text", "places"), WRONG.values(), ids=WRONG)
def test_wrong_data(file: str, text: str, places: str, tmp_path: Path, sentences: Sentences) -> None:
    sentences.check(brief(refusal(write(tmp_path, **{file: text}))), places)
