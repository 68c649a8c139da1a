"""Kills workers of runs at random moments: each must be named, the others go on, and no run may hang.

python tests/support/kills.py --kills 50 --seed 1      # 50 of each kind of run; prints a line for each, and the sums
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NAMED = "signal 9 (SIGKILL)"
# seconds after which a run hangs
HANGS = 300.0
# the command of a worker has the name of its protocol
_MARK = b"attnreg.machine.worker"

_SCRIPT = """
import attnreg
(found,) = attnreg.verify(["CPU_ATTN"], size="claims", jobs=2)
print(*found.lines(), sep="\\n")
"""
_TUNE = """
from pathlib import Path
from support import tiny, tuning_benches
from attnreg import AttentionRequest, Platform
from attnreg.analysis.timings.samples import Cell
from attnreg.tuning.grid import Planned
from attnreg.tuning.journal import Journal
from attnreg.tuning.run import Run, new_samples, tune

class Told(tuning_benches.Told):
    def problem(self, planned, backend, text):
        print(backend, text, flush=True)
    def say(self, text):
        print(text, flush=True)

names = ("FAST", "SLOW", "ALIKE")
here = Platform(platform="gpu", arch="g1", packages={"lib": "1"})
registry = tiny.load({name: tiny.row() for name in names})
layer = AttentionRequest(head_size=64, num_heads=4, num_kv_heads=2)
plan = [Planned(Cell(layer, 1, 1, 64 + i), names, ()) for i in range(3)]
journal = Journal(Path("samples.jsonl"), new_samples(registry, here, plan, "a device"))
tune(Run(registry, here, "cpu", 60.0, tuning_benches.make), plan, journal, seconds=120.0, report=Told())
print("timed:", *sorted({name for _, name in journal.samples.turns}))
"""
RUNS = {
    "verify --jobs": ["-m", "attnreg", "verify", "CPU_ATTN", "--size", "claims", "--jobs", "2"],
    "attnreg.verify(jobs=)": ["verify_script.py"],
    "tune": ["tune_script.py"],
}


@dataclass(frozen=True)
class Killed:
    """What came of one kill. moment: seconds after the worker began. killed: a worker was there to be killed."""

    run: str
    moment: float
    killed: bool
    hung: bool
    named: bool
    status: int | None
    output: str

    @property
    def good(self) -> bool:
        """Whether the run ended, and names the kill if there was one."""
        return not self.hung and (self.named or not self.killed)


def workers_of(run: int) -> list[int]:
    """The processes of a run that answer it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == run and _MARK in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        # it has ended meanwhile
        except OSError:
            continue
    return sorted(found)


def kill_one(kind: str, rng: random.Random, longest: float) -> Killed:
    """One run, of which one worker is killed: at a moment that is drawn, up to ``longest`` seconds after it began."""
    # half of the moments are those of the start
    moment = rng.uniform(0, 0.3) if rng.random() < 0.5 else rng.uniform(0, longest)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
                   "ATTNREG_PLUGINS": "off", "OMP_NUM_THREADS": "1"}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "verify_script.py").write_text(_SCRIPT, encoding="utf-8")
        Path(folder, "tune_script.py").write_text(_TUNE, encoding="utf-8")
        with Path(folder, "out").open("w+", encoding="utf-8") as out:
            command = [sys.executable, *RUNS[kind]]
            run = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, env=environment)
            killed = _kill(run, moment, rng)
            try:
                run.wait(HANGS)
            except subprocess.TimeoutExpired:
                pass
            hung = run.poll() is None
            if hung:
                run.kill()
                run.wait()
            out.seek(0)
            output = out.read()
    return Killed(kind, moment, killed, hung, NAMED in " ".join(output.split()), run.returncode, output)


def _kill(run: subprocess.Popen[bytes], moment: float, rng: random.Random) -> bool:
    """Whether a worker was killed, some seconds after the first of them began."""
    until = time.monotonic() + HANGS
    while run.poll() is None and time.monotonic() < until:
        if workers_of(run.pid):
            time.sleep(moment)
            if found := workers_of(run.pid):
                try:
                    os.kill(rng.choice(found), signal.SIGKILL)
                except ProcessLookupError:
                    return False
                return True
            return False
        time.sleep(0.002)
    return False


def kills(kind: str, count: int, seed: str, longest: float = 4.0) -> Iterator[Killed]:
    """Runs of one kind until so many workers of them were killed."""
    rng, done = random.Random(f"{seed} {kind}"), 0
    while done < count:
        found = kill_one(kind, rng, longest)
        done += found.killed or found.hung
        yield found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--longest", type=float, default=4.0, help="seconds after a worker began until it is killed")
    options = parser.parse_args(arguments)
    bad = 0
    for kind in options.runs:
        sums: Counter[str] = Counter()
        for found in kills(kind, options.kills, options.seed, options.longest):
            sums.update(runs=1, killed=found.killed, named=found.killed and found.named, hung=found.hung)
            bad += not found.good
            if not found.good:
                sys.stdout.write(f"{kind}, killed after {found.moment:.3f} s, status {found.status}:\n{found.output}\n")
                sys.stdout.flush()
        words = f"{sums['killed']} killed, {sums['named']} named, {sums['hung']} hung"
        sys.stdout.write(f"{kind}: {sums['runs']} runs, {words}\n")
        sys.stdout.flush()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
