"""Packed formats: their bytes follow from the data, and wrong data is refused with its place."""

from __future__ import annotations

from typing import Any

import pytest

from attnreg import Registry
from attnreg.language.packed import Packed, Side, packed_formats, packed_problems
from attnreg.runtime.turboquant.cache_bytes import PackedBlock

LEVELS = {"bits": 4, "rotation": "hadamard", "scale": "norm"}
# keys and values of head size 128, in bytes
SIZES = {
    "turboquant_k8v4": (128, 68),
    "turboquant_4bit_nc": (66, 68),
    "turboquant_k3v4_nc": (50, 68),
    "turboquant_3bit_nc": (50, 52),
    "turboquant_4bit_ub": (66, 66),
    "turboquant_3bit_ub": (50, 50),
    "turboquant_4bit_ls": (66, 66),
    "turboquant_3bit_ls": (50, 50),
}


def test_the_bytes_of_every_format_follow_from_its_data(default: Registry) -> None:
    formats = packed_formats(default.vocabulary.words["kv_dtypes"])
    assert {n: (f.keys.row_bytes(128), f.values.row_bytes(128)) for n, f in formats.items()} == SIZES
    assert {n: round(f.ratio(128), 2) for n, f in formats.items()} == {
        "turboquant_k8v4": 2.61,
        "turboquant_4bit_nc": 3.82,
        "turboquant_k3v4_nc": 4.34,
        "turboquant_3bit_nc": 5.02,
        "turboquant_4bit_ub": 3.88,
        "turboquant_3bit_ub": 5.12,
        "turboquant_4bit_ls": 3.88,
        "turboquant_3bit_ls": 5.12,
    }


@pytest.mark.parametrize(
    ("side", "size", "columns", "groups", "row_bytes"),
    [
        # rotated rows are filled up to a power of two, uniform ones to whole groups of codes
        (Side(4, "hadamard", "norm"), 96, 128, 1, 66),
        (Side(3, "hadamard", "unbiased"), 80, 128, 1, 50),
        (Side(2, "hadamard", "norm"), 5, 16, 1, 6),
        (Side(4), 100, 104, 1, 56),
        (Side(3, group=32), 100, 104, 4, 39 + 16),
        (Side(8), 100, 100, 0, 100),
    ],
)
def test_padding_is_part_of_the_format(side: Side, size: int, columns: int, groups: int, row_bytes: int) -> None:
    assert (side.columns(size), side.groups(size), side.row_bytes(size)) == (columns, groups, row_bytes)
    page = PackedBlock(side, size, 32)
    assert sum(page.planes()) == row_bytes
    assert page.bytes == 32 * row_bytes
    # every plane begins where 16 bytes can be loaded at once
    assert all(16 * n % 16 == 0 for n in page.planes())


@pytest.mark.parametrize(
    ("data", "path", "message"),
    [
        ({"keys": LEVELS}, (), "`values` is missing"),
        ({"keys": LEVELS, "values": 4}, ("values",), "`values` is 4; expected a mapping"),
        ({"keys": LEVELS, "values": {}}, ("values",), "bits is missing; expected 2, 3, 4 or, for float8_e4m3fn, 8"),
        ({"keys": {"bits": 5}, "values": LEVELS}, ("keys", "bits"), "bits is 5; expected 2, 3, 4, 8"),
        ({"keys": {"bits": True}, "values": LEVELS}, ("keys", "bits"), "bits is True; expected 2, 3, 4, 8"),
        (
            {"keys": {"bits": 4, "rotation": "random"}, "values": LEVELS},
            ("keys", "rotation"),
            "rotation is 'random'; expected none, hadamard",
        ),
        (
            {"keys": {"bits": 4, "rotation": "hadamard"}, "values": LEVELS},
            ("keys",),
            "scale is missing: rotated keys or values have a factor: `norm`, `unbiased` or `fitted`",
        ),
        (
            {"keys": {**LEVELS, "bits": 8}, "values": LEVELS},
            ("keys",),
            "bits is 8, which is float8_e4m3fn; rotated keys or values are stored in 2, 3 or 4",
        ),
        (
            {"keys": {**LEVELS, "group": 32}, "values": LEVELS},
            ("keys",),
            "group is 32; rotated keys or values have one scale",
        ),
        (
            {"keys": {"bits": 4, "scale": "norm"}, "values": LEVELS},
            ("keys",),
            "scale is norm, which is the factor of rotated keys or values; add `rotation: hadamard`",
        ),
        (
            {"keys": LEVELS, "values": {"bits": 4, "group": 48}},
            ("values",),
            "group is 48; expected a power of two from 8, for codes of 2, 3 or 4 bits",
        ),
        (
            {"keys": LEVELS, "values": {"bits": 4, "group": -1}},
            ("values", "group"),
            "group is -1; expected an integer from 0 to 1024",
        ),
        (
            {"keys": LEVELS, "values": {"bits": 4, "groups": 8}},
            ("values", "groups"),
            "unknown key `groups`; there are bits, rotation, scale, group",
        ),
        ({"keys": LEVELS, "values": LEVELS, "value": {}}, ("value",), "unknown key `value`"),
    ],
)
def test_wrong_formats_are_refused(data: Any, path: tuple[str, ...], message: str) -> None:
    assert [(p, m) for p, m, _ in packed_problems(data)] == [(path, message)]


def test_a_word_without_the_fact_is_no_format(default: Registry) -> None:
    assert Packed.of("fp8", default.vocabulary.words["kv_dtypes"]["fp8"].facts) is None
    assert Packed.among(default.vocabulary.words, None) is None


def test_an_unknown_preset_is_told_all_that_there_are(default: Registry) -> None:
    help_ = default.vocabulary.help_for("kv_dtype", "turboquant_5bit_nc")
    assert all(name in help_ for name in SIZES)
    assert "fp8" not in help_
