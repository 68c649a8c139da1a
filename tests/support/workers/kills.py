"""Kills workers of runs at random moments: each must be named, the others go on, and no run may hang.

python tests/support/workers/kills.py --kills 50 --seed 1  # 50 of each kind of run; a line for each, and the sums
"""

from __future__ import annotations

import argparse
import contextlib
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

ROOT = Path(__file__).resolve().parents[3]
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
from support.registries import tiny
from support.workers import tuning_benches
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
    """What came of one run. killed: how many workers were there to be killed. named: how many its output names."""

    run: str
    killed: int
    hung: bool
    named: int
    status: int | None
    output: str

    @property
    def good(self) -> bool:
        """Whether the run ended, and names each kill."""
        return not self.hung and self.named == self.killed


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


def kill_some(kind: str, rng: random.Random, each: int, longest: float) -> Killed:
    """One run, of which some workers are killed, at moments that are drawn."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
                   "ATTNREG_PLUGINS": "off", "OMP_NUM_THREADS": "1"}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "verify_script.py").write_text(_SCRIPT, encoding="utf-8")
        Path(folder, "tune_script.py").write_text(_TUNE, encoding="utf-8")
        with Path(folder, "out").open("w+", encoding="utf-8") as out:
            command = [sys.executable, *RUNS[kind]]
            run = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT, env=environment)
            gone = set[int]()
            while len(gone) < each and _kill(run, rng, gone, longest):
                pass
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(HANGS)
            hung = run.poll() is None
            if hung:
                run.kill()
                run.wait()
            out.seek(0)
            output = out.read()
    return Killed(kind, len(gone), hung, " ".join(output.split()).count(NAMED), run.returncode, output)


def _kill(run: subprocess.Popen[bytes], rng: random.Random, gone: set[int], longest: float) -> bool:
    """Whether one more worker was killed, some time after it was first seen; half of the times are those of a start."""
    until = time.monotonic() + HANGS
    while run.poll() is None and time.monotonic() < until:
        if not set(workers_of(run.pid)) - gone:
            time.sleep(0.002)
            continue
        time.sleep(rng.uniform(0, 0.3 if rng.random() < 0.5 else longest))
        found = sorted(set(workers_of(run.pid)) - gone)
        if found:
            number = rng.choice(found)
            # nobody else waits for it, so its number is not another's; one that was ended by its run is no kill
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
                gone.add(number)
                return True
    return False


def kills(kind: str, count: int, seed: str, each: int = 4, longest: float = 4.0) -> Iterator[Killed]:
    """Runs of one kind until so many workers of them were killed, ``each`` of a run at the most."""
    rng, done = random.Random(f"{seed} {kind}"), 0
    while done < count:
        found = kill_some(kind, rng, min(each, count - done), longest)
        done += found.killed + int(found.hung)
        yield found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--each", type=int, default=4, help="kills of one run; five crashes end the run of a backend")
    parser.add_argument("--longest", type=float, default=4.0, help="seconds after a worker is seen until it is killed")
    options = parser.parse_args(arguments)
    bad = 0
    for kind in options.runs:
        sums: Counter[str] = Counter()
        for found in kills(kind, options.kills, options.seed, options.each, options.longest):
            sums.update(runs=1, killed=found.killed, named=found.named, hung=int(found.hung))
            bad += not found.good
            if not found.good:
                sys.stdout.write(
                    f"{kind}: {found.killed} killed, {found.named} named, status {found.status}:\n{found.output}\n"
                )
                sys.stdout.flush()
        words = f"{sums['killed']} killed, {sums['named']} named, {sums['hung']} hung"
        sys.stdout.write(f"{kind}: {sums['runs']} runs, {words}\n")
        sys.stdout.flush()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
