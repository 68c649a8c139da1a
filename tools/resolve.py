"""Resolves attnreg's extras together with releases that people install: `make test-resolve`.

Each line of the output is one run of `uv pip compile`, which reads metadata and installs nothing. If a run finds no
versions, the resolver's reason is printed, and the exit status is 1.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# an extra of attnreg, and the package that is installed with it
CASES = (
    ("kernels", ""),
    ("kernels", "torch==2.11.0"),
    ("kernels", "torch==2.14.0"),
    ("kernels", "torch==2.15.0"),
    ("kernels", "vllm==0.32.0"),
    ("kernels", "vllm==0.33.0"),
    ("kernels", "sglang==0.5.23"),
    ("dev", "vllm==0.33.0"),
    ("dev", "torch==2.15.0"),
)
PYTHONS = ("3.11", "3.12")
# SGLang's wheels need this C library or a later one
PLATFORM = "x86_64-manylinux_2_34"
SHOWN = ("torch", "triton", "transformers", "diffusers", "flashinfer-python")


def main() -> int:
    """Print the versions that each case resolves to."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        print("uv is not installed: pip install uv", file=sys.stderr)
        return 2
    failed = 0
    for python in PYTHONS:
        for extra, beside in CASES:
            answer = _resolve(uv, python, extra, beside)
            pins = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", answer.stdout, re.MULTILINE))
            title = f"Python {python}  attnreg[{extra}]{f' {beside}' if beside else ''}"
            if answer.returncode:
                failed += 1
                print(f"{title}: NO ANSWER\n{answer.stderr.rstrip()}")
            else:
                print(f"{title}: {', '.join(f'{name} {pins[name]}' for name in SHOWN if name in pins)}")
    return int(failed > 0)


def _resolve(uv: str, python: str, extra: str, beside: str) -> subprocess.CompletedProcess[str]:
    command = [uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-python-downloads"]
    command += ["--python-version", python, "--python-platform", PLATFORM, "-"]
    wanted = f"attnreg[{extra}] @ {ROOT.as_uri()}\n{beside}\n"
    return subprocess.run(command, input=wanted, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
