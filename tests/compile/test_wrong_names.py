"""Names that mean something else where they are written, that stand for two things, or for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny
from support.files import brief, refusal, row, write

import attnreg

NAME = "expected a name of letters (A-Z, a-z), digits and the signs `_.#+-`"
TEXT = "expected a text with something in it"
NEW = "A.N: {summary: s, platforms: [gpu], attention: mha, capabilities: {}, source: 's:p#q'}"
EVERY = f"{{{', '.join(f'{claim}: any' for claim in tiny.CLAIMS)}}}"
FACET = "{of: request, kind: integer, legend: l"
WRONG: dict[str, tuple[str, str]] = {
    "a row that reads as a variant": (
        f"backends: {{{NEW.replace('A.N', 'A/N')}}}\nplace: [{{backend: A/N, before: A}}]",
        f"1:12: backends.A/N: {NAME}, got `A/N`",
    ),
    "a row without a name": (f"backends: {{{NEW.replace('A.N', repr(''))}}}", f"1:12: backends.: {NAME}, got ``"),
    "a row with a space behind": (
        f"backends: {{{NEW.replace('A.N', repr('N '))}}}",
        f"1:12: backends.N : {NAME}, got `N `",
    ),
    "a variant of a variant": (
        "backends: {A: {variants: [{name: v/w}]}}",
        f"1:34: backends.A.variants.name: {NAME}, got `v/w`",
    ),
    "a feature that reads as a pattern": (
        "vocabulary: {features: {'s*': l}}",
        f"1:25: vocabulary.features.s*: {NAME}, got `s*`",
    ),
    "a letter that not every keyboard has": (
        "vocabulary: {features: {é: l}}",
        f"1:25: vocabulary.features.é: {NAME}, got `é`",
    ),
    "a package with a version": (
        "vocabulary: {packages: {'p>=2': l}}",
        f"1:25: vocabulary.packages.p>=2: {NAME}, got `p>=2`",
    ),
    "a source with a path": (
        "sources: {'s:p': {url: u, version: v}}",
        f"1:11: sources.s:p: {NAME}, got `s:p`",
    ),
    "another source of a name": (
        "sources: {s: {url: u, version: '2'}}",
        "1:11: sources.s: there is a source s already, u at 1\n  help: give this one a name of its own",
    ),
    "an invariant of a name twice": (
        "invariants: [{name: i, says: s, never: [A]}, {name: i, says: t, never: [B]}]",
        "1:53: invariants.name: there is an invariant i already\n  help: give it a name of its own",
    ),
    "invariants that say nothing": (
        "invariants: [{name: i, says: s, never: []}, {name: j, says: s, chosen: []}]",
        (
            "1:40: invariants.never: expected at least one item, got an empty list\n"
            "mine.yaml:1:72: invariants.chosen: expected at least one item, got an empty list"
        ),
    ),
    "a place that is given twice": (
        "place: [{backend: B, before: A}, {backend: B, before: A}]",
        "1:34: place: B is placed so already\n  help: remove one of the two",
    ),
    "no orders to be placed in": (
        "place: [{backend: B, before: A, orders: []}]",
        "1:41: place.orders: expected at least one item, got an empty list",
    ),
    "a flag of an unknown platform": (
        "vocabulary: {flags: {f: {legend: l, platforms: [gpus]}}}",
        "1:49: flags.f.platforms: unknown platform `gpus`\n  help: did you mean `gpu`? (also: npu)",
    ),
    "facets that conditions read as something else": (
        f"vocabulary: {{facets: {{any: {FACET}}}}}, derived: {{without: {{legend: l, cases: [{{value: 1}}]}}}}}}",
        (
            "1:23: any: conditions have the key `any` for what is no facet\n  help: rename the facet\n"
            "mine.yaml:1:80: without: conditions have the key `without` for what is no facet\n  help: rename the facet"
        ),
    ),
    "claims that are other keys of a row": (
        f"vocabulary: {{facets: {{x: {FACET}, claim: add, rows_below: any}}, y: {FACET}, claim: dtypes}}}}}}",
        (
            "1:23: x: `add` is a key of a row itself already\n  help: give it a claim of its own\n"
            "mine.yaml:1:96: y: `dtypes` is a key of dtype already\n  help: give it a claim of its own"
        ),
    ),
    "a size of a spared layer that is none": (
        "vocabulary: {words: {kv_dtypes: {q: {legend: l, spares: [{ends: 1, ask: {head_size: wide}}]}}}}",
        "1:74: words.kv_dtypes.q.spares.0.ask: expected an integer, got `wide`",
    ),
    "words that are something else in a claim": (
        "vocabulary: {words: {dtypes: {any: l, same: l, not: l, 'null': l}, roles: {any: l, 'true': l}}}",
        "\nmine.yaml:".join(
            f"1:{column}: words.{group}: `{word}` is no word where values are written\n  help: rename it"
            for column, group, word in (
                (31, "dtypes", "any"),
                (39, "dtypes", "same"),
                (48, "dtypes", "not"),
                (56, "dtypes", "null"),
                (84, "roles", "true"),
            )
        ),
    ),
    "words that are listed twice": (
        (
            "backends: {A: {capabilities: {dtypes: [float16, float16], features: [sinks, sinks]}, "
            "unchecked: [alibi, alibi]}}"
        ),
        (
            "1:49: backends.A.capabilities.dtypes: `float16` is listed twice\n  help: remove one of the two\n"
            "mine.yaml:1:77: backends.A.capabilities.features: `sinks` is listed twice\n  help: remove one of the two\n"
            "mine.yaml:1:105: backends.A.unchecked: `alibi` is listed twice\n  help: remove one of the two"
        ),
    ),
    "a platform that is listed twice": (
        f"backends: {{{NEW.replace('[gpu]', '[gpu, gpu]').replace('{}', EVERY)}}}",
        "1:47: backends.A.N.platforms: `gpu` is listed twice\n  help: remove one of the two",
    ),
    "words that are added and removed": (
        (
            "backends: {A: {capabilities: {add: {features: [alibi], dtypes: [bfloat16]}, "
            "remove: {features: [alibi], dtypes: bfloat16}}}}"
        ),
        (
            "1:97: backends.A.capabilities.remove.features: `alibi` is under `add` too\n  help: keep one of the two\n"
            "mine.yaml:1:113: backends.A.capabilities.remove.dtypes: `bfloat16` is under `add` too\n"
            "  help: keep one of the two"
        ),
    ),
    "texts without a word": (
        "backends: {A: {summary: '', emulated: {sinks: ' '}}}",
        f"1:25: backends.A.summary: {TEXT}, got ``\nmine.yaml:1:47: backends.A.emulated.sinks: {TEXT}, got ` `",
    ),
    "days that no calendar has": (
        "sources: {t: {url: u, version: v, read: 2026-02-30}, u: {url: u, version: v, read: 22.11.2026}}",
        (
            "1:41: sources.t.read: expected a day, as 2026-11-22, got `2026-02-30`\n"
            "mine.yaml:1:84: sources.u.read: expected a day, as 2026-11-22, got `22.11.2026`"
        ),
    ),
    "a day of a measurement": (
        (
            "orders: {gpu: [{name: m, when: {arch: g1}, order: [A], "
            "measured: {device: d, packages: {}, date: 2026-1-1, "
            "file: f, ratio: 2, noise: 0.1, of: A, over: B, rows: {}}}]}"
        ),
        "1:98: orders.gpu.measured.date: expected a day, as 2026-11-22, got `2026-1-1`",
    ),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_wrong_names(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text + "\n", encoding="utf-8")
    assert brief(refusal(write(tmp_path / "tiny"), ["mine.yaml"])) == f"mine.yaml:{message}"


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
