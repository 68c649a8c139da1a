"""`attnreg tune` on a GPU: a kernel that never ends is ended with its process, and the others are timed on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from support.registries import tiny
from support.workers import spinning
from support.workers.tuning_benches import Told

from attnreg import AttentionRequest, Platform
from attnreg.analysis.timings.samples import Cell
from attnreg.tuning.grid import PlannedCell
from attnreg.tuning.journal import Journal
from attnreg.tuning.run import LEAST_TURNS, TuningRun, new_samples, tune

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, on which a kernel spins")
PATIENCE = 20.0


def test_a_kernel_that_spins_is_ended(tmp_path: Path) -> None:
    registry, here = tiny.load({name: tiny.row() for name in ("SOUND", "SPINS")}), Platform(platform="gpu", arch="g1")
    layer = AttentionRequest(head_size=64, num_heads=4, num_kv_heads=2)
    planned = [PlannedCell(Cell(layer, 1, 1, 64), ("SOUND", "SPINS"), ())]
    journal, told = Journal(tmp_path / "s.jsonl", new_samples(registry, here, planned, "a GPU")), Told()
    running = TuningRun(registry, here, "cuda", PATIENCE, spinning.make)
    spins = running.process("SPINS")
    tune(running, planned, journal, seconds=60.0, report=told)
    assert told.problems == [
        ("SPINS", f"no answer within {PATIENCE:.0f} s: it hangs, or compiles for longer (--patience)")
    ]
    assert spins.process.returncode == -signal.SIGKILL
    assert len(journal.samples.turns[0, "SOUND"]) >= LEAST_TURNS
    # the device computes on: what spun is gone
    x = torch.arange(1000, device="cuda").sum()
    assert int(x) == 499500
