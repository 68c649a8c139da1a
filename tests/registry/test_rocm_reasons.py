"""Installed, switched on, supported: three facts about an AITER row, and each has its own reason, word for word."""

from __future__ import annotations

import pytest

from attnreg import AttentionRequest, Platform, Registry
from attnreg.loader import unloadable
from attnreg.selection.selector import evaluate

PLAIN = AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8, block_size=16)
MLA = AttentionRequest(attention="mla", head_size=576, num_heads=16, num_kv_heads=1, block_size=16)
BOTH = ("aiter", "aiter_mha", "aiter_mla")
NOT_INSTALLED, AITER_OFF = "package aiter is not installed", "flag aiter is off"

# row, architecture, flags, whether aiter is installed, and all that speaks against the row
CASES = [
    ("ROCM_AITER_FA", "gfx942", BOTH, True, []),
    ("ROCM_AITER_FA", "gfx942", BOTH, False, [NOT_INSTALLED]),
    ("ROCM_AITER_FA", "gfx942", ("aiter",), True, ["flag aiter_mha is off"]),
    ("ROCM_AITER_FA", "gfx942", ("aiter", "aiter_mla"), True, ["flag aiter_mha is off"]),
    ("ROCM_AITER_FA", "gfx942", ("aiter_mha",), True, [AITER_OFF]),
    ("ROCM_AITER_FA", "gfx90a", BOTH, True, ["arch is gfx90a; needs gfx942, gfx950 or gfx1250"]),
    ("ROCM_AITER_FA", "gfx1201", BOTH, True, ["arch is gfx1201; needs gfx942, gfx950 or gfx1250"]),
    (
        "ROCM_AITER_FA",
        "gfx1100",
        (),
        False,
        ["arch is gfx1100; needs gfx942, gfx950 or gfx1250", NOT_INSTALLED, AITER_OFF, "flag aiter_mha is off"],
    ),
    ("ROCM_AITER_UNIFIED_ATTN", "gfx1201", ("aiter",), True, []),
    ("ROCM_AITER_UNIFIED_ATTN", "gfx1201", ("aiter",), False, [NOT_INSTALLED]),
    ("ROCM_AITER_UNIFIED_ATTN", "gfx1201", ("aiter_mha", "aiter_mla"), True, [AITER_OFF]),
    (
        "ROCM_AITER_UNIFIED_ATTN",
        "gfx90a",
        BOTH,
        True,
        ["arch is gfx90a; needs gfx942, gfx950, gfx1200, gfx1201 or gfx1250"],
    ),
    ("ROCM_AITER_MLA", "gfx950", ("aiter", "aiter_mla"), True, []),
    ("ROCM_AITER_MLA", "gfx950", ("aiter", "aiter_mha"), True, ["flag aiter_mla is off"]),
    ("ROCM_AITER_MLA", "gfx950", (), True, [AITER_OFF, "flag aiter_mla is off"]),
    ("ROCM_AITER_MLA", "gfx950", BOTH, False, [NOT_INSTALLED]),
    ("ROCM_AITER_MLA", "gfx1201", BOTH, True, ["arch is gfx1201; needs gfx942, gfx950 or gfx1250"]),
]


@pytest.mark.parametrize(
    ("row", "arch", "flags", "installed", "reasons"),
    CASES,
    ids=[
        f"{row} {arch} {'+'.join(flags)}{'' if installed else ' without aiter'}"
        for row, arch, flags, installed, _ in CASES
    ],
)
def test_each_fact_is_a_reason_of_its_own(
    default: Registry, row: str, arch: str, flags: tuple[str, ...], installed: bool, reasons: list[str]
) -> None:
    packages = [p for p in default.vocabulary.packages if installed or p != "aiter"]
    platform = Platform(platform="rocm", arch=arch, flags=frozenset(flags), packages=packages)
    selection = evaluate(MLA if "MLA" in row else PLAIN, platform, default, row)
    assert sorted(r.text for r in selection.candidates[0].reasons) == sorted(reasons)
    assert (selection.backend is None) == bool(reasons)
    # each is cited where the data says it
    for reason in selection.candidates[0].reasons:
        assert reason.kind == "requires"
        assert reason.where.file == "registry/backends.yaml"


@pytest.mark.slow(reason="imports a kernel module, and torch with it")
def test_without_aiter_to_run_is_one_more_reason(default: Registry) -> None:
    platform = Platform(platform="rocm", arch="gfx942", flags=frozenset(BOTH), packages=())
    selection = evaluate(PLAIN, platform, default, "ROCM_AITER_FA", unloadable=unloadable)
    assert [r.text for r in selection.candidates[0].reasons] == [
        NOT_INSTALLED,
        "cannot be run: UpstreamError: aiter.utility.dtypes cannot be imported: No module named 'aiter'",
    ]
