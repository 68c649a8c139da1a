"""Every kernel compiles for every target without a GPU, in its default configurations, within the target's means.

ATTNREG_FULL=1 compiles all cases for all targets, which takes long.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support import ROOT
from support.compiling import DEFAULT, FULL, TARGETS, Usage

PATH = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"


@pytest.mark.parametrize("target", TARGETS)
def test_default_configurations_fit(target: str) -> None:
    full = bool(os.environ.get("ATTNREG_FULL"))
    cases = DEFAULT + FULL if full else DEFAULT
    # in six rare ones ptxas gives up a register or two, of 128, to keep two programs on a multiprocessor
    tolerated = 8 if full else 0
    # the layout SPLIT is AMD's
    cases = tuple(case for case in cases if case.layout != "SPLIT" or target.startswith("gfx"))
    program = [sys.executable, "-m", "support.compiling", target, *(case.name for case in cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": PATH}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [Usage(**json.loads(line)) for line in done.stdout.splitlines()]
    assert {usage.case for usage in found} == {case.name for case in cases}
    for usage in found:
        assert usage.shared <= usage.limit, usage
        assert usage.spills <= tolerated, usage
        assert not usage.serialised, usage


@pytest.mark.parametrize("target", ["sm90", "gfx942", "gfx1100"])
def test_a_causal_batch_pays_nothing_for_the_other_kind(target: str) -> None:
    environment = {**os.environ, "PYTHONPATH": PATH}
    program = [sys.executable, "-m", "support.causal_only", target]
    as_it_is, cut = (
        subprocess.run([*program, *more], capture_output=True, text=True, env=environment, check=True).stdout
        for more in ([], ["cut"])
    )
    assert as_it_is.count("attention_kernel") >= 5
    assert as_it_is == cut
