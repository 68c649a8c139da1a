"""Digests of what reaches a kernel, a lock, a hash or a record, as they are in this environment.

    PYTHONPATH=.:tests python -m support.suite.digests [--backwards]

Prints a JSON object: the facts of the environment, and a digest by the name of each thing. --backwards: directories are
listed in the opposite order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import locale
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import ROOT
from support.compilers.compiler import prepare_environment

# one with kernels in Gluon, one of AMD's, and one without matrix units
TARGETS = ("sm90", "gfx942", "sm75")
MODELS = ("gpt-oss-120b", "DeepSeek-V3")


class _Backwards:
    """The entries of a directory in the opposite order, as `os.scandir` returns them."""

    def __init__(self, *place: Any) -> None:
        with _scandir(*place) as entries:
            self._entries = iter([*entries][::-1])

    def __iter__(self) -> _Backwards:
        return self

    def __next__(self) -> os.DirEntry[Any]:
        return next(self._entries)

    def __enter__(self) -> _Backwards:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


_scandir, _listdir = os.scandir, os.listdir


def kernels(target: str) -> Iterator[tuple[str, Any]]:
    """The key of each kernel that the suite compiles: of its source, its constants and the globals that it reads."""
    from support.compilers.compiling import every_kernel

    for i, kernel in enumerate(every_kernel(target)):
        yield f"kernel {i} for {target}, {kernel.source.fn.__name__}", kernel.key


def constants() -> Iterator[tuple[str, Any]]:
    """Numbers that kernels are given, or compute where they are compiled."""
    from attnreg import AttentionRequest
    from attnreg.kernels.hopper.packed.plans import polynomial
    from attnreg.runtime.spec import AttentionSpec
    from attnreg.runtime.turboquant.codebooks import COEFFICIENTS, codebook
    from attnreg.runtime.turboquant.codec import FACTORS, signs

    for bits, columns in COEFFICIENTS:
        yield f"codebook of {bits} bits, {columns} columns", codebook(bits, columns)
        if bits > 2:
            yield f"polynomial for SM 9.0 of {bits} bits, {columns} columns", polynomial(bits, columns)
        yield f"factor of the rotation of {columns} columns", 1.0 / columns**0.5
    yield "factors of fitted rows", FACTORS
    yield "signs of the rotation", signs(256).tolist()
    specs = [
        AttentionSpec.from_request(AttentionRequest(head_size=n, num_heads=1, num_kv_heads=1)) for n in (64, 80, 112)
    ]
    yield "default softmax scales", [spec.softmax_scale for spec in specs]


def answers() -> Iterator[tuple[str, Any]]:
    """The fingerprints of registries, a lock, and what measurements are signed with and become."""
    from attnreg import load_registry
    from attnreg.analysis.timings.samples import fingerprint, kernel_hash, read_samples
    from attnreg.cli import main
    from attnreg.tuning.overlay import overlay_text

    registry = load_registry("default")
    yield "registry default", registry.fingerprint
    yield "registry vllm-0.33.0", load_registry("vllm-0.33.0").fingerprint
    for name in registry.backends:
        yield f"hash of the kernel of {name}", kernel_hash(registry, name)
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder, "attnreg.lock")
        models = [word for name in MODELS for word in ("--model", str(ROOT / "examples/configs" / name))]
        with contextlib.redirect_stdout(None):
            main(["lock", "--arch", "sm90", "--arch", "gfx942", *models, "-o", str(lock)])
        yield "lock", lock.read_bytes()
    for file in sorted((ROOT / "registry/measurements").glob("*heads_of_64*.jsonl")):
        samples = read_samples(file)
        yield f"machine of {file.name}", fingerprint(samples.machine)
        yield f"overlay of {file.name}", overlay_text(samples, registry, file.name)


def evidence() -> Iterator[tuple[str, Any]]:
    """The cases that prove claims, and the numbers that they are run on."""
    import torch

    from attnreg import Platform, load_registry
    from attnreg.conformance.claims import Claims
    from attnreg.conformance.trial import Draw

    platform = Platform(platform="cuda", arch="sm90")
    for backend in ("TRITON_ATTN", "TRITON_MLA"):
        cases = Claims(backend, platform, load_registry("default")).cases("claims")
        yield f"cases of {backend}", [case.words for case in cases]
    draw = Draw("any", torch.device("cpu"))
    for name in ("float32", "bfloat16", "float16"):
        yield f"normal numbers in {name}", draw.normal(100, 1000, dtype=getattr(torch, name)).tolist()
    yield "other random numbers", [x.tolist() for x in (draw.scales(64), draw.slopes(64), draw.order(1000))]


def environment() -> dict[str, Any]:
    """What is another in the other environment."""
    import torch

    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "encoding": locale.getpreferredencoding(False),
        "hash": hash("attnreg"),
        "directory": os.listdir(ROOT),
    }


def digests() -> dict[str, str]:
    """The name of each thing -> its digest."""
    found: dict[str, str] = {}
    for part in (*map(kernels, TARGETS), constants(), answers(), evidence()):
        for name, value in part:
            data = value if isinstance(value, bytes) else repr(value).encode()
            found[name] = hashlib.sha256(data).hexdigest()[:16]
    return found


if __name__ == "__main__":
    prepare_environment()
    if "--backwards" in sys.argv:
        os.scandir, os.listdir = _Backwards, lambda *place: _listdir(*place)[::-1]
    found = digests()
    sys.stdout.write(json.dumps({"environment": environment(), "digests": found}))
