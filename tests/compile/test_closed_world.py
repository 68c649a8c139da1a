"""The closed world: every row states every claim, wherever the row comes from, or nothing loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.registries import tiny
from support.registries.files import brief, refusal, row, write
from support.registries.overlays import ask, chosen

import attnreg
from attnreg import Registry

ALL = "dtypes: any, kv_dtypes: any, head_sizes: any, head_sizes_v: any, block_sizes: any, num_heads: any"

# the beginning of a row that an overlay adds
NEW = 'C: {summary: s, platforms: [gpu], attention: mha, source: "s:p#q"'


def rows(capabilities: str, unchecked: str = "[]", sources: str = "") -> str:
    """backends.yaml with the rows A and B, of which A states what a test is about."""
    return f"""\
unchecked: {unchecked}
backends:
  A: {{summary: s, platforms: [gpu], attention: mha, source: "s:p#q",
      capabilities: {{{capabilities}}}}}
  B: {{summary: s, platforms: [gpu, npu], attention: mha, source: "s:p#q",
      capabilities: {{{ALL}, num_kv_heads: any}}}}
sources: {{s: {{url: u, version: "1"}}}}
{sources}"""


LEFT_OUT = [
    (
        "head_sizes_v",
        ALL.replace("head_sizes_v: any, ", "") + ", num_kv_heads: 1",
        """\
backends.yaml:4:7: backends.A.capabilities: `head_sizes_v` is missing
  help: every row states every claim: `head_sizes_v: [8, 16]` (a list or a matcher of values), `any` (every value) or \
`head_sizes_v: same` (as wide as head_size)""",
    ),
    (
        "num_kv_heads",
        ALL,
        """\
backends.yaml:4:7: backends.A.capabilities: `num_kv_heads` is missing
  help: every row states every claim: `num_kv_heads: [8, 16]` (a list or a matcher of values) or `any` (every value)""",
    ),
    (
        "several",
        "features: [sinks]",
        """\
backends.yaml:4:7: backends.A.capabilities: `dtypes`, `kv_dtypes`, `head_sizes`, `head_sizes_v`, `block_sizes`, \
`num_heads`, `num_kv_heads` are missing
  help: every row states every claim: `dtypes: [float16, bfloat16]` (a list or a matcher of values), `any` (every \
value) or `head_sizes_v: same` (as wide as head_size)""",
    ),
]


@pytest.mark.parametrize(("capabilities", "message"), [c[1:] for c in LEFT_OUT], ids=[c[0] for c in LEFT_OUT])
def test_a_row_that_leaves_a_claim_out_does_not_load(capabilities: str, message: str, tmp_path: Path) -> None:
    assert brief(refusal(write(tmp_path, backends=rows(capabilities)))) == message


def test_a_variant_cannot_state_what_its_row_leaves_out(tmp_path: Path) -> None:
    text = rows(ALL).replace(f"capabilities: {{{ALL}}}", f"capabilities: {{{ALL}}}, variants: [{{name: v}}]")
    text = text.replace("{name: v}", "{name: v, capabilities: {num_kv_heads: 1}}")
    message = "backends.yaml:4:7: backends.A.capabilities: `num_kv_heads` is missing"
    assert brief(refusal(write(tmp_path, backends=text))).startswith(message)


@pytest.mark.parametrize("claim", tiny.CLAIMS)
def test_no_claim_may_be_left_out(claim: str) -> None:
    row = tiny.row()
    del row["capabilities"][claim]
    with pytest.raises(attnreg.RegistryError, match=rf"backends\.A\.capabilities: `{claim}` is missing"):
        tiny.load({"A": row})


def test_a_file_states_for_its_own_rows_what_none_looks_at(load: Callable[..., Registry]) -> None:
    registry = load(backends=rows(ALL, "[num_kv_heads, sinks]"))
    variant = registry.backends["A"].variants[0]
    # where it says so; a facet that no row looks at is no surprise, a feature that is let through is one
    assert variant.open["num_kv_heads"].line == 1
    assert set(variant.unchecked) == {"sinks"}
    assert chosen(registry, num_heads=4, num_kv_heads=2) == "A"


def test_what_a_file_does_not_look_at_is_no_statement_for_the_rows_of_another(tmp_path: Path) -> None:
    source = write(tmp_path / "r", backends=rows(ALL, "[num_kv_heads, sinks]"))
    new = (
        f'backends:\n  C: {{summary: s, platforms: [gpu], attention: mha, source: "s:p#q", capabilities: {{{ALL}}}}}\n'
    )
    overlay = tmp_path / "mine.yaml"
    overlay.write_text(new)
    assert brief(refusal(source, [overlay])).replace(f"{tmp_path}/", "") == (
        "mine.yaml:2:70: backends.C.capabilities: `num_kv_heads` is missing\n"
        "  help: every row states every claim: `num_kv_heads: [8, 16]` (a list or a matcher of values) or `any` (every "
        "value)"
    )
    overlay.write_text(new.replace("num_heads: any", "num_heads: any, num_kv_heads: any"))
    registry = attnreg.load_registry(source, overlay)
    # nor does it let features through there
    assert [sorted(registry.backends[name].variants[0].served) for name in "AC"] == [["sinks"], []]


def test_a_row_says_itself_what_it_does_not_look_at(load: Callable[..., Registry]) -> None:
    text = rows(ALL).replace(f"capabilities: {{{ALL}}}", f"capabilities: {{{ALL}}}, unchecked: [num_kv_heads]")
    assert set(load(backends=text).backends["A"].variants[0].unchecked) == {"num_kv_heads"}


def test_an_overlay_may_state_what_a_row_of_another_overlay_leaves_out(load: Callable[..., Registry]) -> None:
    new = f"{NEW}, capabilities: {{{ALL}}}}}"
    registry = load(f"backends: {{{new}}}", "backends: {C: {capabilities: {num_kv_heads: 1}}}")
    assert registry.backends["C"].variants[0].claims[-1].matcher.text == "1"


# claims of overlays --------------------------------------------------------------------------------------------------

TILES = "vocabulary: {facets: {tile: {of: request, kind: integer, legend: l, claim: tiles}}}"
VERSIONS = 'vocabulary: {derived: {v: {legend: l, claim: versions, cases: [{value: 1}], rows_below: "any"}}}'


def test_an_overlay_that_declares_a_claim_says_what_the_rows_below_accept(
    tmp_path: Path, load: Callable[..., Registry]
) -> None:
    (tmp_path / "tiles.yaml").write_text(TILES)
    message = brief(refusal(write(tmp_path / "r"), [tmp_path / "tiles.yaml"])).replace(f"{tmp_path}/", "")
    assert message == (
        "tiles.yaml:1:23: vocabulary.facets.tile: 2 rows below do not state `tiles`: A, B\n"
        "  help: add `rows_below: any` where they accept every value, or state it for each under `backends`"
    )
    said = load(TILES.replace("claim: tiles", "claim: tiles, rows_below: any"))
    assert {row.variants[0].open["tiles"].line for row in said.backends.values()} == {1}
    assert chosen(said, extra={"tile": 3}) == "A"
    patched = load(TILES + "\nbackends:\n  A: {capabilities: {tiles: [1, 2]}}\n  B: {capabilities: {tiles: any}}\n")
    assert chosen(patched, extra={"tile": 3}) == "B"


def test_a_row_that_comes_with_a_claim_or_after_it_states_it(tmp_path: Path) -> None:
    new = f"{NEW}, capabilities: {{{ALL}, num_kv_heads: 1}}}}"
    tiles, mine = tmp_path / "tiles.yaml", tmp_path / "mine.yaml"
    tiles.write_text(TILES.replace("claim: tiles", "claim: tiles, rows_below: any"))
    mine.write_text(f"backends: {{{new}}}")
    source = write(tmp_path / "r")
    assert "mine.yaml:1:79: backends.C.capabilities: `tiles` is missing" in refusal(source, [tiles, mine])
    # the other way round the row could not know it
    registry = attnreg.load_registry(source, [mine, tiles])
    assert registry.backends["C"].variants[0].open["tiles"].file == str(tiles)


REDECLARED = """\
vocabulary:
  facets: {head_size: {of: request, kind: integer, legend: l, claim: head_sizes, rows_below: any}}
"""
MEANINGLESS = [
    (
        TILES.replace("claim: tiles", "rows_below: any"),
        """\
<overlay>:1:69: vocabulary.facets.tile.rows_below: the facet has no claim
  help: give it a `claim`, or remove this""",
    ),
    (
        REDECLARED,
        """\
<overlay>:2:82: vocabulary.facets.head_size.rows_below: the rows below state `head_sizes` already
  help: remove it""",
    ),
    (
        TILES.replace("claim: tiles", "claim: tiles, rows_below: all"),
        "<overlay>:1:95: vocabulary.facets.tile.rows_below: expected `any`, got `all`",
    ),
]


@pytest.mark.parametrize(("overlay", "message"), MEANINGLESS)
def test_what_is_said_for_rows_below_must_have_a_meaning(overlay: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "o.yaml").write_text(overlay)
    text = brief(refusal(write(tmp_path / "r"), [tmp_path / "o.yaml"])).replace(f"{tmp_path}/o.yaml", "<overlay>")
    assert text == message


def test_only_an_overlay_has_rows_below_it(tmp_path: Path) -> None:
    words: dict[str, Any] = {**tiny.VOCABULARY["facets"]}
    words["head_size"] = {**words["head_size"], "rows_below": "any"}
    with pytest.raises(attnreg.RegistryError) as caught:
        tiny.load({"A": tiny.row()}, vocabulary={"facets": words})
    assert (
        "facets.head_size.rows_below: only an overlay has rows below it; those of this registry state `head_sizes` "
        "themselves"
    ) in str(caught.value)


def test_a_derived_facet_of_an_overlay_may_have_a_claim(load: Callable[..., Registry]) -> None:
    assert set(load(VERSIONS).backends["A"].variants[0].open) >= {"versions"}
    refused = VERSIONS.replace("{value: 1}", "{when: {arch: g1}, value: 2}, {value: 1}")
    assert chosen(load(refused, "backends: {A: {capabilities: {versions: [2]}}}")) == "B"


# same ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "accepted", "reason"),
    [
        ("same", {None, 64}, "head_size_v is 32; supported: the same as head_size"),
        ("[same, 32]", {None, 64, 32}, ""),
        ("[same, {min: 96}]", {None, 64, 128}, "head_size_v is 32; supported: the same as head_size, 96 or more"),
        ("[32, 128]", {None, 64, 32, 128}, ""),
        ("any", {None, 64, 32, 128}, ""),
    ],
)
def test_values_as_wide_as_the_keys(
    claim: str, accepted: set[int | None], reason: str, load: Callable[..., Registry]
) -> None:
    registry = load(f"backends: {{A: {{capabilities: {{head_sizes_v: {claim}}}}}}}")
    widths = (None, 64, 32, 128)
    assert {w for w in widths if chosen(registry, backend="A", head_size=64, head_size_v=w)} == accepted
    if reason:
        with pytest.raises(attnreg.NoBackendError) as caught:
            ask(registry, backend="A", head_size=64, head_size_v=32)
        assert [r.text for r in caught.value.selection.candidates[0].reasons] == [reason]


@pytest.mark.parametrize(
    ("overlay", "accepted"),
    [
        ("{capabilities: {head_sizes_v: same}, variants: [{name: v, capabilities: {add: {head_sizes_v: 32}}}]}", {32}),
        ("{capabilities: {head_sizes_v: [same, 32, 96], remove: {head_sizes_v: 32}}}", {96}),
        ("{capabilities: {head_sizes_v: [32], add: {head_sizes_v: same}}}", {32}),
    ],
)
def test_same_is_one_value_of_a_list(overlay: str, accepted: set[int], load: Callable[..., Registry]) -> None:
    registry = load(f"backends: {{A: {overlay}}}")
    assert {w for w in (32, 96, 128) if chosen(registry, backend="A", head_size=64, head_size_v=w)} == accepted
    assert chosen(registry, backend="A", head_size=64) == "A"


ONLY = "only head_sizes_v may be `same`\n  help: state the values that are accepted; `any` accepts every value"
WRONG = [
    ("head_sizes: same", f"8:32: backends.A.capabilities.head_sizes: {ONLY}"),
    ("dtypes: [same]", f"8:29: backends.A.capabilities.dtypes: {ONLY}"),
    (
        "head_sizes_v: [same, any]",
        "8:41: backends.A.capabilities.head_sizes_v: expected an integer, got `any`",
    ),
    (
        "head_sizes_v: [same, {min: 9, max: 8}]",
        """\
8:41: backends.A.capabilities.head_sizes_v: nothing is 9 to 8: the range is empty
  help: mend its bounds, or remove it""",
    ),
]


@pytest.mark.parametrize(("claim", "message"), WRONG)
def test_wrong_ways_to_say_same(claim: str, message: str, tmp_path: Path) -> None:
    text = row(f"capabilities: {{{claim}}}")
    assert brief(refusal(write(tmp_path, backends=text))) == f"backends.yaml:{message}"
