"""Random batches under the conditions of an engine, for as long as it is given, each against the float64 reference.

python tests/gpu/fuzz.py --minutes 10 --seed 1 --jobs 6    # on this machine's GPU; a failure prints how to repeat it
python tests/gpu/fuzz.py --case TRITON_ATTN:1:17           # one case again
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1])]

WORKER = [sys.executable, str(HERE)]
# how many cases are a backend's, beside those of the others
SHARES = {"TRITON_ATTN": 64, "ROCM_ATTN": 10, "TURBOQUANT": 16, "TORCH_SDPA": 7, "FLEX_ATTENTION": 3, "HOPPER_ATTN": 40}
# seconds in which a case ends, its compilation included
PATIENCE = 240


def usual(device: str) -> list[str]:
    """The backends whose cases run on a device, where none are named."""
    if device == "cpu":
        # the kernels of the others are PyTorch's for GPUs, or compiled for one
        return [name for name in SHARES if name not in ("TORCH_SDPA", "HOPPER_ATTN")]
    import torch

    hopper = torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
    return [name for name in SHARES if name != "HOPPER_ATTN" or hopper]


def backend_of(index: int, backends: list[str]) -> str:
    """The backend of a case, by its number."""
    from random import Random

    return Random(index).choices(backends, [SHARES.get(name, 10) for name in backends])[0]


def run(name: str, device: str, plain: frozenset[str]) -> tuple[int, str | None, list[str]]:
    """The number of batches of a case that were right, the first problem, and the case's choices."""
    from support.layers import fuzz

    backend, _, seed = name.partition(":")
    scale = fuzz.GPU if device == "cuda" else fuzz.PROCESSOR
    choices = fuzz.Choices(seed, plain)
    right = 0
    try:
        made = fuzz.stage(choices, backend, device, scale)
        for number in range(scale.steps):
            problem = made.step(number)
            if problem is not None:
                return right, problem, list(choices.made)
            right += 1
    # an accepted layer that cannot be made is a finding too
    except Exception as error:
        import traceback

        where = traceback.extract_tb(error.__traceback__)[-1]
        return right, f"{type(error).__name__} at {where.name}:{where.lineno}: {error}", list(choices.made)
    return right, None, list(choices.made)


def work(options: argparse.Namespace) -> int:
    """Runs every ``jobs``-th case from ``first`` on, a line for each, until the time is over; 3 after a problem."""
    index = options.first
    while time.time() < options.until:
        backend = backend_of(index, options.backends)
        print(f"case {index}", flush=True)
        right, problem, _ = run(f"{backend}:{options.seed}:{index}", options.device, frozenset())
        print(f"right {right}", flush=True)
        if problem is not None:
            print("wrong " + " ".join(problem.split())[:2000], flush=True)
            # what a kernel did wrong may have broken the process too
            return 3
        index += options.jobs
    return 0


class Fuzzer:
    """Worker processes, and what they found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.cases, self.batches = options, 0, 0
        self.failures: list[tuple[str, str]] = []
        self.until = time.time() + 60 * options.minutes

    def watch(self, slot: int) -> None:
        """Keeps one worker running until the time is over."""
        index = slot
        while time.time() < self.until:
            o = self.options
            command = [*WORKER, "--seed", o.seed, "--device", o.device, "--jobs", str(o.jobs)]
            command += ["--backends", ",".join(o.backends), "--first", str(index), "--until", str(self.until)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as worker:
                assert worker.stdout is not None
                assert worker.stderr is not None
                said: list[str] = []
                errors = threading.Thread(target=lambda w=worker, s=said: s.append(w.stderr.read()))
                errors.start()
                found, late = None, threading.Timer(PATIENCE, worker.kill)
                late.start()
                for line in worker.stdout:
                    word, _, rest = line.strip().partition(" ")
                    late.cancel()
                    late = threading.Timer(PATIENCE, worker.kill)
                    late.start()
                    if word == "case":
                        index, self.cases = int(rest), self.cases + 1
                    elif word == "right":
                        self.batches += int(rest)
                    elif word == "wrong":
                        found = rest
                late.cancel()
                errors.join()
            if worker.returncode:
                name = f"{backend_of(index, o.backends)}:{o.seed}:{index}"
                last = "".join(said).strip().splitlines()[-1:] or [""]
                ended = f"ended its process ({worker.returncode}): {last[0]}"
                if worker.returncode == -signal.SIGKILL:
                    ended = f"was killed: by something else, or because it took more than {PATIENCE} s"
                self.report(name, found or ended)
                index += o.jobs
            else:
                return

    def report(self, name: str, problem: str) -> None:
        """Prints a failure, and the command that repeats it."""
        self.failures.append((name, problem))
        print(f"{name}: {problem}\n  python tests/gpu/fuzz.py --case {name}", flush=True)

    def run(self) -> int:
        """Runs the workers; 1 if anything was wrong."""
        watchers = [threading.Thread(target=self.watch, args=(slot,)) for slot in range(self.options.jobs)]
        for one in watchers:
            one.start()
        for one in watchers:
            one.join()
        print(f"seed {self.options.seed}: {self.cases} cases, {self.batches} batches right, {len(self.failures)} wrong")
        if self.options.record is not None and not self.failures:
            self.keep()
        for name, _ in self.failures[:3]:
            print(f"  python tests/gpu/fuzz.py --case {name}{shrunk(name, self.options.device)}", flush=True)
        return 1 if self.failures else 0

    def keep(self) -> None:
        """Records what was run, in the evidence of this device; runs of one commit are added up."""
        import torch
        from support.suite.commits import commit

        from attnreg.conformance.evidence import read_record, save_run

        o, device = self.options, torch.device(self.options.device)
        result = {"cases": self.cases, "batches": self.batches, "minutes": o.minutes}
        tested, seeds = o.commit or commit(), [o.seed]
        earlier = read_record(o.record, device)["runs"].get("fuzz", {})
        if tested is not None and earlier.get("commit") == tested:
            result = {name: earlier[name] + number for name, number in result.items()}
            seeds = [*earlier["seeds"], *seeds]
        save_run("fuzz", {**result, "seeds": seeds, "errors": 0, "commit": tested}, o.record, device, {})


def fails(name: str, device: str, plain: list[str]) -> tuple[bool, list[str]]:
    """Whether a case fails in a process of its own, and its choices."""
    command = [
        *WORKER,
        "--case",
        name,
        "--device",
        device,
        *(["--plain", ",".join(plain)] if plain else []),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired:
        return True, []
    made = [line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith("choices: ")]
    return done.returncode != 0, made[0].split(", ") if made and made[0] else []


def shrunk(name: str, device: str) -> str:
    """`--plain` with the choices of a failing case that do not matter; it takes a run for each."""
    plain: list[str] = []
    _, made = fails(name, device, plain)
    until = time.time() + 120
    for choice in made:
        if time.time() < until and fails(name, device, [*plain, choice])[0]:
            plain.append(choice)
    return f" --plain '{','.join(plain)}'" if plain else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", default="1", help="any word; the cases are SEED:0, SEED:1 and so on")
    parser.add_argument("--jobs", type=int, default=4, help="processes; a case compiles for longer than it runs")
    parser.add_argument("--backends", type=lambda text: text.split(","), default=None)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--record", type=Path, metavar="FILE|DIR", help="where the evidence of this device is kept")
    parser.add_argument("--commit", help="the commit that runs, where git cannot say it")
    parser.add_argument("--case", help="BACKEND:SEED:NUMBER, one case in full")
    parser.add_argument(
        "--plain", type=lambda text: frozenset(text.split(",")), default=frozenset(), help="its choices to leave out"
    )
    parser.add_argument("--shrink", action="store_true", help="with --case: print which choices it fails without")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    os.environ["ATTNREG_PLUGINS"] = "off"
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        import torch

        if not torch.cuda.is_available():
            parser.error(
                "it tries a GPU's kernels, and torch sees no GPU; --device cpu tries them in Triton's interpreter"
            )
    options.backends = options.backends or usual(options.device)
    if options.case and options.shrink:
        print(f"--case {options.case}{shrunk(options.case, options.device)}")
        return 0
    if options.case:
        right, problem, made = run(options.case, options.device, options.plain)
        print(f"choices: {', '.join(made)}\n{right} batches right; {problem or 'nothing wrong'}")
        return 1 if problem else 0
    if options.first is not None:
        return work(options)
    return Fuzzer(options).run()


if __name__ == "__main__":
    sys.exit(main())
