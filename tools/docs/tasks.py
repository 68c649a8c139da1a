"""The generated blocks of README.md, getting_started.md, why.md and check.md: commands, and what each prints here."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from attnreg.environment import PLUGINS_VARIABLE

WIDTH = 100
_MODEL = "--model examples/configs/gpt-oss-120b"
_OVERLAY = "examples/attnreg-plugin/acme_attn/attnreg.yaml"
# block of README.md -> the arguments of `attnreg`
TASKS = {
    "task-model": f"explain --engine vllm --arch MI300X {_MODEL} --brief",
    "task-own": f"explain --arch MI300X {_MODEL} --brief",
    "task-upgrade": f"upgrade --from vllm-0.20 --to vllm-0.33 --arch sm120 {_MODEL}",
    "task-backend": f"explain --overlay {_OVERLAY} --trust acme_attn --arch x86_64 --head-size 128 --brief",
}


# block of docs/why.md -> the arguments of `attnreg`
LOGS = {"why-chosen": "why examples/logs/gpt-oss.log", "why-refused": "why examples/logs/refused.log"}


# block of docs/check.md -> the arguments of `attnreg`
CHECKS = {
    "check-manifest": "check examples/deploy/deployment.yaml",
    "check-script": "check examples/deploy/serve.sh --arch H100",
}
# block of docs/getting_started.md -> the arguments of `attnreg`
START = {
    "start-model": f"explain --engine vllm --arch H100 {_MODEL}",
    "start-log": "why examples/logs/gpt-oss.log",
    "start-recipe": "check examples/recipes/gpt-oss.yaml",
    "start-plan": f"plan --engine vllm-0.33 --arch H100 {_MODEL} --tp 2 --gpu-memory 80GiB --weights 32GiB",
}
# block -> its exit status: 1 for findings and for models that move, 2 of `why` for an error that it does not know
STATUSES = {"task-upgrade": 1, "why-refused": 2, "check-manifest": 1, "check-script": 1, "start-recipe": 1}


def task_blocks(root: Path) -> dict[str, str]:
    """Name of each generated block of README.md -> a command and its output, as Markdown."""
    return _blocks(root, TASKS)


def log_blocks(root: Path) -> dict[str, str]:
    """Name of each generated block of docs/why.md -> a command and its output, as Markdown."""
    return _blocks(root, LOGS)


def check_blocks(root: Path) -> dict[str, str]:
    """Name of each generated block of docs/check.md -> a command and its output, as Markdown."""
    return _blocks(root, CHECKS)


def _blocks(root: Path, commands: dict[str, str]) -> dict[str, str]:
    shown = {name: output(root, text, status=STATUSES.get(name, 0)) for name, text in commands.items()}
    return {name: f"```console\n$ attnreg {commands[name]}\n{text}\n```" for name, text in shown.items()}


def start_blocks(root: Path) -> dict[str, str]:
    """Name of each generated block of docs/getting_started.md -> a command and its output, as Markdown."""
    return _blocks(root, START)


@cache
def output(root: Path, command: str, *, status: int = 0, folder: str = "") -> str:
    """What a command of the checkout at ``root`` prints, without plugins. It runs there, or in another ``folder``.

    Raises CalledProcessError for another exit status than ``status``, which is 1 for a finding or a difference.
    """
    names = {name: value for name, value in os.environ.items() if not name.startswith("ATTNREG_")}
    environment = {**names, "PYTHONPATH": str(root), "COLUMNS": str(WIDTH), "NO_COLOR": "1", PLUGINS_VARIABLE: "off"}
    done = subprocess.run(
        [sys.executable, "-m", "attnreg", *command.split()],
        cwd=folder or root,
        env=environment,
        capture_output=True,
        encoding="utf-8",
    )
    if done.returncode != status:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return "\n".join(line.rstrip() for line in done.stdout.strip().split("\n"))
