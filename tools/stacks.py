"""Runs tests in a stack of tox.toml, in an environment that tox makes, and records their results.

    python tools/stacks.py vllm            run `TESTS` in the stack `vllm`
    python tools/stacks.py vllm --record   run them and write tests/data/stacks/vllm.json
    python tools/stacks.py --in-turn       print the stack whose turn it is in CI

docs/stacks.md is made of the records. tox calls it with `--here` within the environment.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path("tests/data/stacks")
TESTS = tuple(f"tests/{name}" for name in ("kernels", "runtime", "integrations", "conformance"))
# the stack of `make test`
CI = "ci"


def stacks(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Name of each stack -> its row in tox.toml."""
    table = tomllib.loads((root / "tox.toml").read_text(encoding="utf-8"))
    return {name: table["env"][name] for name in table["env_list"]}


def pins(row: Mapping[str, Any]) -> dict[str, str]:
    """Package -> the version that a stack pins. Its row has each pin as ``torch==2.14.0``."""
    stated = [pin for pin in row.get("deps", ()) if isinstance(pin, str)]
    return {name: version for name, _, version in (pin.partition("==") for pin in stated)}


def proven(names: Iterable[str], root: Path = ROOT) -> list[str]:
    """The stacks other than `CI` whose recorded run had no failure. A stack enters CI once it has such a record."""
    files = {name: root / RECORDS / f"{name}.json" for name in names if name != CI}
    records = {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()}
    return [name for name, record in records.items() if not record["failed"]]


def in_turn(commits: int, names: Sequence[str]) -> str:
    """The stack that CI runs in addition to its own. The number of ``commits`` decides, so each has its turn."""
    return names[commits % len(names)]


def main(arguments: list[str] | None = None) -> int:
    """Entry point: the exit status, which is that of the tests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("stack", nargs="?", default="", help=f"one of {', '.join(stacks())}")
    parser.add_argument("--record", action="store_true", help=f"write the results to {RECORDS}")
    parser.add_argument("--in-turn", action="store_true", help="print the further stack whose turn it is")
    parser.add_argument("--here", action="store_true", help="run in this Python, which has the stack's packages")
    options = parser.parse_args(arguments)
    if options.in_turn:
        commits = int(_output("git", "rev-list", "--count", "HEAD"))
        names = proven(stacks())
        if not names:
            print(f"No record in {RECORDS} is without a failure: make record-stack STACK=vllm", file=sys.stderr)
            return 0
        name = in_turn(commits, names)
        print(f"The stack in turn is {name}, of {', '.join(names)}, after {commits} commits.", file=sys.stderr)
        print(name)
        return 0
    if options.stack not in stacks():
        named = f"no stack is called {options.stack}" if options.stack else "no stack is named"
        parser.error(f"{named}; tox.toml has {', '.join(stacks())}: make test-stack STACK=vllm")
    if options.here:
        return _run_here(options.stack, options.record)
    record = ["--", "--record"] if options.record else []
    python = stacks()[options.stack]["base_python"][0]
    environment = os.environ | _of_pyenv(python)
    find = [sys.executable, "-m", "uv", "python", "find", "--quiet", "--system", "--no-python-downloads", python]
    if subprocess.run(find, env=environment, stdout=subprocess.DEVNULL, check=False).returncode:
        print(
            f"{options.stack} needs Python {python}, which is not on the path. uv downloads it, if it can.",
            file=sys.stderr,
        )
    command = [sys.executable, "-m", "tox", "run", "--root", str(ROOT), "-e", options.stack, *record]
    return subprocess.run(command, env=environment, check=False).returncode


def _of_pyenv(python: str) -> dict[str, str]:
    """The variable that lets pyenv's commands find its versions of a Python; empty if pyenv has none of them."""
    if not shutil.which("pyenv"):
        return {}
    versions = [v for v in _output("pyenv", "versions", "--bare").split() if v.startswith(f"{python}.")]
    return {"PYENV_VERSION": ":".join(versions)} if versions else {}


def _run_here(stack: str, record: bool) -> int:
    import pytest

    outcome = Outcome()
    status = int(pytest.main(["--numprocesses", "2", "--dist", "worksteal", *TESTS], plugins=[outcome]))
    # 1 is a run whose tests failed; anything else did not run to its end
    if record and status in (0, 1):
        file = ROOT / RECORDS / f"{stack}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(_identity() | outcome.counts, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {file.relative_to(ROOT)}")
    return status


class Outcome:
    """A plug-in of pytest that keeps a run's results: the number that passed, which failed, and why others skipped."""

    counts: dict[str, Any]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Count the reports, those of pytest-xdist's workers included."""
        stats = terminalreporter.stats
        skips = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in stats.get("skipped", ()))
        self.counts = {
            "passed": len(stats.get("passed", ())),
            "failed": sorted({report.nodeid for name in ("failed", "error") for report in stats.get(name, ())}),
            "skipped": dict(sorted(skips.items())),
        }


def _identity() -> dict[str, Any]:
    """The day, this Python, and the version of each package that attnreg requires or that a stack pins."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["kernels"], *extras["test"]]
    wanted = {Requirement(one).name for one in required} | {name for row in stacks().values() for name in pins(row)}
    names = sorted({canonicalize_name(name) for name in wanted})
    installed = {canonicalize_name(d.name): d.version for d in importlib.metadata.distributions()}
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": {name: installed[name] for name in names if name in installed},
    }


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
