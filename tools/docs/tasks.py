"""The generated blocks of README.md, docs/why.md and docs/check.md: commands, and what each prints in this checkout."""

from __future__ import annotations

import os
import subprocess
import sys
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
    return {name: f"```console\n$ attnreg {text}\n{output(root, text)}\n```" for name, text in commands.items()}


def output(root: Path, command: str) -> str:
    """What a command prints in the checkout at ``root``, without plugins. Raises CalledProcessError if it fails."""
    names = {name: value for name, value in os.environ.items() if not name.startswith("ATTNREG_")}
    environment = {**names, "PYTHONPATH": str(root), "COLUMNS": str(WIDTH), "NO_COLOR": "1", PLUGINS_VARIABLE: "off"}
    # exit status 1 of `upgrade` and `check` is an answer, and so is 2 of `why` for an error that it does not know
    expected = command.startswith(("upgrade", "check", "why examples/logs/refused.log"))
    done = subprocess.run(
        [sys.executable, "-m", "attnreg", *command.split()],
        cwd=root,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=not expected,
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip().split("\n"))
