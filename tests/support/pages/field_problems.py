"""Runs the steps of docs/field_problems.yaml: commands of attnreg, other commands, and Python."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from attnreg.cli import main
from support import ROOT

PROBLEMS: list[dict[str, Any]] = yaml.safe_load((ROOT / "docs/field_problems.yaml").read_text(encoding="utf-8"))[
    "problems"
]
# what a checkout has that the steps use
LINKED = ("examples", "registry", "tools")


def prepare(folder: Path) -> None:
    """Makes a folder look like a checkout to the steps."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)


def run(step: dict[str, Any]) -> tuple[int, str]:
    """Exit status and output of a step in the current directory, where its files are written first."""
    for name, text in step.get("files", {}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    if "python" in step:
        return _run(lambda: exec(compile(step["python"], "field_problems.yaml", "exec"), {}))
    program, *arguments = shlex.split(step["run"])
    if program == "attnreg" and "environment" not in step:
        return _run(lambda: main(arguments))
    # the step's own directory comes first on the path, whatever PYTHONPATH says of it
    words = [sys.executable, *(["-m", "attnreg"] if program == "attnreg" else []), *arguments]
    variables = os.environ | {"COLUMNS": "400"} | step.get("environment", {}) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=variables, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def _run(call: Callable[[], int | None]) -> tuple[int, str]:
    """What a call in this process returns and prints, on a wide terminal, so that no line is broken."""
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="400"),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        status = call() or 0
    return status, printed.getvalue()


def missing(step: dict[str, Any], printed: str) -> list[str]:
    """The parts of lines that a step should print, and that its output does not have in this order."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    return [part for part in step["prints"] if not any(" ".join(part.split()) in line for line in lines)]
