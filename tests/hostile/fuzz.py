"""Strangers' files of every kind, spoiled by a seed, given to every command that reads them.

    python tests/hostile/fuzz.py                   2,000 files
    python tests/hostile/fuzz.py --minutes 10      as many as ten minutes take
    python tests/hostile/fuzz.py --kind lock --only 17 -v    one file of a kind, with what is printed

No command may run anything, print a secret or a traceback, write outside its directory, or take more than 10 seconds of
the processor or 500 MB.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hostile.commands import call
from hostile.kinds import FILE, KINDS, PLACE, SECRET, Kind
from hostile.running import Ran, run
from hostile.spoil import OUTSIDE, TOUCHED, spoil

KEY = f"-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk {SECRET}\n-----END OPENSSH PRIVATE KEY-----\n"


@dataclass(frozen=True)
class Trial:
    """One spoiled file, the command that read it, and what came of it."""

    kind: str
    number: int
    done: str
    arguments: tuple[str, ...]
    ran: Ran
    problems: list[str]


class Fuzz:
    """Trials of a seed, in a directory of their own, which `with` removes."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._folder = Path(tempfile.mkdtemp(prefix="hostile-"))
        (self._folder / OUTSIDE).write_text(KEY, encoding="utf-8")
        (self._folder / "cache").mkdir()
        (self._folder / "valid").mkdir()
        self._valid = {kind.name: kind.valid(self._folder / "valid") for kind in KINDS}

    def __enter__(self) -> Fuzz:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder)

    def trial(self, kind: Kind, number: int) -> Trial:
        """The trial of a kind with a number: the same for the same seed."""
        draw = random.Random(f"{self.seed} {kind.name} {number}")
        place = self._folder / f"{kind.name}-{number}"
        place.mkdir()
        os.symlink(self._folder, place / "link")
        done = spoil(kind, self._valid[kind.name], place, draw)
        command = draw.choice(kind.commands)
        arguments = [one.replace(FILE, str(place / kind.file)).replace(PLACE, str(place)) for one in command]
        ran = run(call, arguments, place, self._environment(draw))
        problems = ran.problems([SECRET])
        if (place / TOUCHED).exists():
            problems.append("it ran what a file holds")
        if (self._folder / OUTSIDE).read_text(encoding="utf-8") != KEY:
            problems.append("it changed a file outside")
        shutil.rmtree(place)
        return Trial(kind.name, number, done, tuple(arguments), ran, problems)

    def _environment(self, draw: random.Random) -> dict[str, str]:
        variables = {
            "MYTOKEN": SECRET,
            "XDG_CACHE_HOME": str(self._folder / "cache"),
            "ATTNREG_PLUGINS": "off",
            "NO_COLOR": "1",
            "COLUMNS": draw.choice(("80", "80", "80", "1", "0", "100000", "x")),
        }
        if draw.randrange(4) == 0:
            # a home and a cache that are not there, are files, or may not be written
            nowhere = ("/nonexistent", str(self._folder / OUTSIDE), "/proc", "", "/")
            variables |= {"XDG_CACHE_HOME": draw.choice(nowhere), "HOME": draw.choice(nowhere)}
        if draw.randrange(8) == 0:
            variables |= {"LC_ALL": draw.choice(("C", "xx_XX")), "TMPDIR": "/nonexistent", "TERM": "dumb"}
        if draw.randrange(8) == 0:
            variables["ATTNREG_REGISTRY"] = draw.choice(("/proc/self/environ", f"../{OUTSIDE}", "nowhere", ""))
        return variables


def trials(fuzz: Fuzz, kinds: Sequence[Kind], count: int, minutes: float) -> Iterator[Trial]:
    """As many trials as asked for, or as there is time for: the kinds in turn."""
    end = time.monotonic() + 60 * minutes
    number = 0
    while number < count and time.monotonic() < end:
        yield fuzz.trial(kinds[number % len(kinds)], number // len(kinds))
        number += 1


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def main(given: Sequence[str] | None = None) -> int:
    """Entry point: 1 where a command did what it may not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", type=int, default=0, help="how many; by default 2,000, or what the minutes allow")
    parser.add_argument("--minutes", type=float, default=0)
    parser.add_argument("--kind", choices=[kind.name for kind in KINDS], action="append")
    parser.add_argument("--only", type=int, help="the trial of this number alone, of the kinds")
    parser.add_argument("-v", action="store_true", help="print what commands print")
    options = parser.parse_args(given)
    kinds = [kind for kind in KINDS if not options.kind or kind.name in options.kind]
    minutes = options.minutes or 1e6
    count = options.files or (10**9 if options.minutes else 2_000)
    tried: Counter[str] = Counter()
    bad = 0
    seconds, memory = 0.0, 0
    with Fuzz(options.seed) as fuzz:
        chosen = [fuzz.trial(kind, options.only) for kind in kinds] if options.only is not None else None
        for trial in chosen or trials(fuzz, kinds, count, minutes):
            tried[trial.kind] += 1
            seconds, memory = max(seconds, trial.ran.seconds), max(memory, trial.ran.memory)
            bad += bool(trial.problems)
            if trial.problems or options.v:
                said = "; ".join(trial.problems) or "as it should"
                _say(f"--kind {trial.kind} --only {trial.number} ({trial.done}): {said}: {' '.join(trial.arguments)}")
            if options.v:
                _say(trial.ran.printed)
    kinds_said = ", ".join(f"{name} {n}" for name, n in tried.items())
    _say(f"seed {options.seed}: {tried.total()} files ({kinds_said}): {bad} with a problem")
    _say(f"the slowest took {seconds:.1f} s of the processor, the largest {memory >> 20} MB")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
