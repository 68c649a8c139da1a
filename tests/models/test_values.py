"""Values and conditions over a config's fields."""

from __future__ import annotations

from typing import Any

import pytest
from support.registries.small_families import read

from attnreg.models.reader import ConfigError


@pytest.mark.parametrize(
    ("value", "config", "size"),
    [
        ("48", {}, 48),
        ("size", {"size": 80}, 80),
        ("a.b", {"a": {"b": 80}}, 80),
        ("[a.b, 96]", {"a": {}}, 96),
        ("[size, other]", {"size": None, "other": 96}, 96),
        ("{quotient: [width, heads]}", {"width": 640, "heads": 8}, 80),
        ("{floor_quotient: [width, heads]}", {"width": 650, "heads": 8}, 81),
        ("{sum: [size, 1]}", {"size": 79}, 80),
        ("{difference: [size, 1]}", {"size": 81}, 80),
        ("{product: [size, 2, 2]}", {"size": 20}, 80),
        ("{least: [size, width]}", {"size": 20, "width": 80}, 20),
        ("[{sum: [absent, 1]}, 96]", {}, 96),
        ("{when: {on: true}, value: 32, otherwise: 16}", {"on": True}, 32),
        ("{when: {on: true}, value: 32, otherwise: 16}", {}, 16),
        ("[{when: {on: true}, value: 32}, 24]", {}, 24),
        ("{item: sizes}", {"sizes": [40]}, 40),
        ("{item: sizes}", {"sizes": 40}, 40),
        ("{index: 33}", {}, 33),
    ],
)
def test_values(value: str, config: dict[str, Any], size: int) -> None:
    (layer,) = read(f"m:\n  head_size: {value}\n", layers=1, **config).layers
    assert layer.head_size == size


def test_layers_may_differ_by_their_entry_of_a_list() -> None:
    model = read("m:\n  heads: {item: heads}\n  kv_heads: 1\n", layers=3, size=64, heads=[4, 8, 4])
    assert [layer.num_heads for layer in model.layers] == [4, 8, 4]
    assert [group.layers for group in model.groups] == [(0, 2), (1,)]


@pytest.mark.parametrize(
    ("condition", "config", "holds"),
    [
        ("on: true", {"on": True}, True),
        ("on: true", {"on": False}, False),
        ("on: true", {}, False),
        ("on: false", {"on": False}, True),
        ("on: false", {}, False),
        ("on: [null, false]", {}, True),
        ("on: {not: true}", {}, True),
        ("on: {not: true}", {"on": None}, True),
        ("n: {min: 4}", {"n": 4}, True),
        ("n: {min: 4}", {}, False),
        ("n: {below: 4}", {"n": 4}, False),
        ("n: {max: 0.5}", {"n": 0.5}, True),
        ("d: {min: 64, max: 128}", {"d": 96}, True),
        ("d: {min: 64, max: 128}", {"d": 256}, False),
        ("d: {multiple_of: 16}", {"d": 96}, True),
        ("d: {multiple_of: 16}", {"d": 100}, False),
        ("d: {multiple_of: 16, max: 64, not: 32}", {"d": 32}, False),
        ('d: "fp8*"', {"d": "fp8_e4m3"}, True),
        ('d: "fp8*"', {"d": "float16"}, False),
        ('d: ["fp8*", null]', {}, True),
        ("w: {not: null}", {"w": 1}, True),
        ("w: {not: null}", {"w": []}, True),
        ("w: {not: null}", {"w": None}, False),
        ("w: [null, a]", {"w": "a"}, True),
        ("w: all", {"w": "all"}, True),
        ("a.b: 3", {"a": {"b": 3}}, True),
        ("ratio: [0.5, 2.0]", {"ratio": 0.5}, True),
        ("ratio: [0.5, 2.0]", {"ratio": 2}, True),
        ("ratio: [0.5, 2.0]", {"ratio": 0.75}, False),
        ("w: 1", {"w": True}, False),
        ("any: [{on: true}, {n: 3}]", {"n": 3}, True),
        ("not: {on: true, n: 3}", {"on": True, "n": 3}, False),
        ("not: {on: true, n: 3}", {"on": True}, True),
        # a word is no flag that is on
        ("w: true", {"w": "all"}, False),
    ],
)
def test_conditions_are_the_registrys_over_the_configs_fields(
    condition: str, config: dict[str, Any], holds: bool
) -> None:
    text = f"m:\n  head_size: {{when: {{{condition}}}, value: 1, otherwise: 64}}\n"
    (layer,) = read(text, layers=1, **config).layers
    assert layer.head_size == (1 if holds else 64)


@pytest.mark.parametrize(
    ("condition", "config", "message"),
    [
        ("n: {min: 3}", {"n": True}, "n is True; expected a number of at most 2147483647"),
        ("n: {min: 3}", {"n": "4"}, "n is '4'; expected a number of at most 2147483647 (write 4, without quotes)"),
        ("on: true", {"on": 1}, "on is 1; expected true or false"),
        ("on: {not: [true, null]}", {"on": []}, "on is []; expected true or false"),
    ],
)
def test_a_field_of_another_type_is_refused(condition: str, config: dict[str, Any], message: str) -> None:
    text = f"m:\n  head_size: {{when: {{{condition}}}, value: 1, otherwise: 64}}\n"
    with pytest.raises(ConfigError) as caught:
        read(text, layers=1, **config)
    assert str(caught.value) == message


def test_a_condition_reads_no_more_than_it_needs() -> None:
    text = """\
    m:
      watch: [n]
      head_size: {when: {on: true, n: 3}, value: 1, otherwise: 64}
    """
    assert read(text, layers=1, n=3).assumptions[0] == "n is 3; m does not look at it."
    assert "n is 3" not in read(text, layers=1, n=3, on=True).assumptions[0]


@pytest.mark.parametrize(
    ("value", "config", "message"),
    [
        (
            "{quotient: [width, heads]}",
            {"width": 100, "heads": 8},
            "width is 100 and heads is 8; the second must",
        ),
        ("{floor_quotient: [width, 0]}", {"width": 100}, "width is 100; the second must divide the first"),
        ("{floor_quotient: [1, 0]}", {}, "floor_quotient; the second must divide the first"),
        ("{difference: [size, 9]}", {"size": 8}, "size is 8; expected at least 1"),
        ("{power: [size, 99]}", {"size": 2**30}, "size is 1073741824; their power is too large"),
        ("{product: [size, 2]}", {"size": 2**30}, "size is 1073741824; expected at most 2147483647"),
        ("{item: sizes}", {"sizes": []}, "sizes has 0 entries; layer 0 has none: give one entry for each layer"),
    ],
)
def test_values_that_cannot_be_computed(value: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(f"m:\n  head_size: {value}\n", layers=1, **config)
    assert str(caught.value).startswith(message)


def test_what_is_the_same_for_all_layers_has_no_item() -> None:
    with pytest.raises(ConfigError, match=r"^n is \[1, 2\]; expected one value: a list has one for each layer"):
        read("m:\n  layers: {item: n}\n", n=[1, 2])
    with pytest.raises(ConfigError, match=r"^layers is missing and has no default; add it to the config$"):
        read("m:\n  layers: {index: 1}\n")
