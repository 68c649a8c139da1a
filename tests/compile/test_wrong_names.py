"""Names that mean something else where they are written, that stand for two things, or for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.registries import tiny
from support.registries.files import brief, refusal, row, write
from support.suite.sentences import Sentences

import attnreg

NEW = "A.N: {summary: s, platforms: [gpu], attention: mha, capabilities: {}, source: 's:p#q'}"
EVERY = f"{{{', '.join(f'{claim}: any' for claim in tiny.CLAIMS)}}}"
FACET = "{of: request, kind: integer, legend: l"
WRONG: dict[str, tuple[str, str]] = {
    "a row that reads as a variant": (
        f"backends: {{{NEW.replace('A.N', 'A/N')}}}\nplace: [{{backend: A/N, before: A}}]",
        "1:12",
    ),
    "a row without a name": (f"backends: {{{NEW.replace('A.N', repr(''))}}}", "1:12"),
    "a row with a space behind": (f"backends: {{{NEW.replace('A.N', repr('N '))}}}", "1:12"),
    "a variant of a variant": ("backends: {A: {variants: [{name: v/w}]}}", "1:34"),
    "a feature that reads as a pattern": ("vocabulary: {features: {'s*': l}}", "1:25"),
    "a letter that not every keyboard has": ("vocabulary: {features: {é: l}}", "1:25"),
    "a package with a version": ("vocabulary: {packages: {'p>=2': l}}", "1:25"),
    "a source with a path": ("sources: {'s:p': {url: u, version: v}}", "1:11"),
    "another source of a name": ("sources: {s: {url: u, version: '2'}}", "1:11"),
    "an invariant of a name twice": (
        "invariants: [{name: i, says: s, never: [A]}, {name: i, says: t, never: [B]}]",
        "1:53",
    ),
    "invariants that say nothing": (
        "invariants: [{name: i, says: s, never: []}, {name: j, says: s, chosen: []}]",
        "1:40 1:72",
    ),
    "a place that is given twice": ("place: [{backend: B, before: A}, {backend: B, before: A}]", "1:34"),
    "no orders to be placed in": ("place: [{backend: B, before: A, orders: []}]", "1:41"),
    "a flag of an unknown platform": ("vocabulary: {flags: {f: {legend: l, platforms: [gpus]}}}", "1:49"),
    "facets that conditions read as something else": (
        f"vocabulary: {{facets: {{any: {FACET}}}}}, derived: {{without: {{legend: l, cases: [{{value: 1}}]}}}}}}",
        "1:23 1:80",
    ),
    "claims that are other keys of a row": (
        f"vocabulary: {{facets: {{x: {FACET}, claim: add, rows_below: any}}, y: {FACET}, claim: dtypes}}}}}}",
        "1:23 1:96",
    ),
    "a size of a skipped layer that is none": (
        "vocabulary: {words: {kv_dtypes: {q: {legend: l, skip_layers: [{ends: 1, ask: {head_size: wide}}]}}}}",
        "1:79",
    ),
    "words that are something else in a claim": (
        "vocabulary: {words: {dtypes: {any: l, same: l, not: l, 'null': l}, roles: {any: l, 'true': l}}}",
        "1:31 1:39 1:48 1:56 1:84",
    ),
    "words that are listed twice": (
        (
            "backends: {A: {capabilities: {dtypes: [float16, float16], features: [sinks, sinks]}, "
            "unchecked: [alibi, alibi]}}"
        ),
        "1:49 1:77 1:105",
    ),
    "a platform that is listed twice": (
        f"backends: {{{NEW.replace('[gpu]', '[gpu, gpu]').replace('{}', EVERY)}}}",
        "1:47",
    ),
    "words that are added and removed": (
        (
            "backends: {A: {capabilities: {add: {features: [alibi], dtypes: [bfloat16]}, "
            "remove: {features: [alibi], dtypes: bfloat16}}}}"
        ),
        "1:97 1:113",
    ),
    "texts without a word": ("backends: {A: {summary: '', emulated: {sinks: ' '}}}", "1:25 1:47"),
    "days that no calendar has": (
        "sources: {t: {url: u, version: v, read: 2026-02-30}, u: {url: u, version: v, read: 22.11.2026}}",
        "1:41 1:84",
    ),
    "a device of a measurement, which its samples have": (
        (
            "orders: {gpu: [{name: m, when: {arch: g1}, order: [A], "
            "measured: {device: d, file: f, ratio: 2, noise: 0.1, of: A, over: B}}]}"
        ),
        "1:67",
    ),
}


@pytest.mark.parametrize(("text", "places"), WRONG.values(), ids=WRONG)
def test_wrong_names(
    text: str, places: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentences: Sentences
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text + "\n", encoding="utf-8")
    sentences.check(brief(refusal(write(tmp_path / "tiny"), ["mine.yaml"])), places)


def test_a_text_that_is_missing_is_no_text_that_a_file_may_hold(tmp_path: Path) -> None:
    """What stands for a missing text lets the rest be looked up, and no file can write it."""
    without = {"backends": {"A": {"variants": [{"requires": {"arch": "g9"}}]}}}
    said = brief(refusal(write(tmp_path / "a"), [without]))
    assert "`name` is missing" in said
    assert "unknown architecture 'g9'" in said
    said = brief(refusal(write(tmp_path / "b", backends=row("capabilities: {}").replace("s:path#symbol", "?", 1))))
    assert said.endswith("backends.A.source: `?` is not <source>:<path>#<symbol>")


def test_the_same_source_may_be_stated_again(tmp_path: Path) -> None:
    same = {"sources": {"s": {"url": "u", "version": "1"}}}
    assert attnreg.load_registry(write(tmp_path), same).sources["s"].version == "1"
