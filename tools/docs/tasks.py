"""The generated blocks of README.md, getting_started.md and why.md: commands, and what each prints in this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from attnreg.environment import PLUGINS_VARIABLE
from attnreg.language.frozen import FrozenDict

WIDTH = 100
_MODEL = "--model examples/configs/gpt-oss-120b"
_OVERLAY = "examples/attnreg-plugin/acme_attn/attnreg.yaml"
# block of README.md -> the arguments of `attnreg`
TASKS = {
    "task-model": f"explain --arch MI300X {_MODEL} --brief",
    "task-upgrade": f"diff vllm-0.20.0 vllm-0.33.0 --arch sm120 {_MODEL}",
    "task-backend": f"explain --overlay {_OVERLAY} --trust acme_attn --arch x86_64 --head-size 128 --brief",
}


# block of docs/why.md -> the arguments of `attnreg`
LOGS = {"why-chosen": "why examples/logs/gpt-oss.log", "why-refused": "why examples/logs/refused.log"}


# block of docs/getting_started.md -> the arguments of `attnreg`
START = {
    "start-model": f"explain --registry vllm-0.33.0 --arch H100 {_MODEL}",
    "start-log": "why examples/logs/gpt-oss.log",
    "start-recipe": "check examples/recipes/gpt-oss.yaml",
    "start-plan": f"plan --engine vllm-0.33 --arch H100 {_MODEL} --tp 2 --gpu-memory 80GiB --weights 32GiB",
}


def task_blocks(root: Path) -> dict[str, str]:
    """Name of each generated block of README.md -> a command and its output, as Markdown."""
    return _blocks(root, TASKS)


def log_blocks(root: Path) -> dict[str, str]:
    """Name of each generated block of docs/why.md -> a command and its output, as Markdown."""
    return _blocks(root, LOGS)


def _blocks(root: Path, commands: dict[str, str], statuses: Mapping[str, int] = FrozenDict()) -> dict[str, str]:
    shown = {name: output(root, text, status=statuses.get(name, 0)) for name, text in commands.items()}
    return {name: f"```console\n$ attnreg {commands[name]}\n{text}\n```" for name, text in shown.items()}


def start_blocks(root: Path) -> dict[str, str]:
    """Name of each generated block of docs/getting_started.md -> a command and its output, as Markdown."""
    return _blocks(root, START, {"start-recipe": 1})


@cache
def output(root: Path, command: str, *, status: int = 0, folder: str = "") -> str:
    """What a command of the checkout at ``root`` prints, without plugins. It runs there, or in another ``folder``.

    Raises CalledProcessError for another exit status than ``status``, which is 1 for a finding or a difference.
    """
    names = {name: value for name, value in os.environ.items() if not name.startswith("ATTNREG_")}
    environment = {**names, "PYTHONPATH": str(root), "COLUMNS": str(WIDTH), "NO_COLOR": "1", PLUGINS_VARIABLE: "off"}
    # `attnreg diff` has exit status 1 if there are differences, `attnreg why` 2 for an error that it does not know
    expected = command.startswith(("diff", "why examples/logs/refused.log"))
    done = subprocess.run(
        [sys.executable, "-m", "attnreg", *command.split()],
        cwd=folder or root,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=not (expected or status),
    )
    if status and done.returncode != status:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return "\n".join(line.rstrip() for line in done.stdout.strip().split("\n"))
