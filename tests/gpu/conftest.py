"""Several processes of tests share a machine: none of them starts many threads or compilers of its own."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from support.layers.fitting import launches_fit

__all__ = ["launches_fit"]

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    # each process of PyTorch's compiler would start a pool as large as the machine
    # PyTorch warns where two processes make the folder of its kernels at once
    Path(os.environ["XDG_CACHE_HOME"], "torch", "kernels").mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
