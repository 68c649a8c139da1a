"""What an engine does on a GPU: odd addresses, graphs of dummy batches, streams, bounds, and tensors of another device.

An illegal access ends a process's CUDA context, so each test of this file runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from support import ROOT
from support.layers.engine_conditions import CONDITIONS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use")


@pytest.mark.parametrize("name", CONDITIONS)
def test_what_an_engine_does(name: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "support.layers.engine_conditions", name],
        capture_output=True, text=True, env=environment, cwd=ROOT, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
