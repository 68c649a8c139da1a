"""About a minute of the fuzzer of strangers' files (`make fuzz`: ten), and that it would find what it looks for."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hostile.commands import call
from hostile.fuzz import Fuzz
from hostile.kinds import KINDS, SECRET, Kind
from hostile.running import run
from hostile.spoil import OUTSIDE, spoil
from support.suite.examples import FULL


@pytest.fixture(scope="module")
def fuzz() -> Iterator[Fuzz]:
    """A seed of its own for each day would find more; this one is the same for everybody."""
    with Fuzz(20261129) as made:
        yield made


@pytest.mark.slow("each file is read by a process forked for it")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_no_command_does_what_a_strangers_file_says(kind: Kind, fuzz: Fuzz) -> None:
    # each decides a whole registry, which takes seconds
    several = 2 if kind.whole else 16
    found = [fuzz.trial(kind, number) for number in range(120 if FULL else several)]
    assert [(trial.number, trial.done, trial.problems) for trial in found if trial.problems] == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_valid_files_are_read(kind: Kind, tmp_path: Path) -> None:
    """Otherwise nothing but the first refusal would be tried."""
    (tmp_path / "valid").mkdir()
    place = tmp_path / "place"
    place.mkdir()
    kind.lay(place).write_bytes(kind.valid(tmp_path / "valid"))
    for command in kind.commands:
        arguments = [one.format(file=place / kind.file, place=place) for one in command]
        ran = run(call, arguments, place, {"XDG_CACHE_HOME": str(tmp_path / "cache"), "MYTOKEN": SECRET})
        assert ran.status in (0, 1), ran.printed
        assert ran.problems([SECRET]) == []


def _leaks(_: Sequence[str]) -> int:
    print(os.environ["MYTOKEN"])  # noqa: T201 (what a command may not do)
    return 0


def _fails(_: Sequence[str]) -> int:
    raise KeyError("x")


def _starts(_: Sequence[str]) -> int:
    return os.system("true")


def _writes(_: Sequence[str]) -> int:
    Path("../outside").touch()
    return 0


def _imports(_: Sequence[str]) -> int:
    Path("stranger.py").touch()
    sys.path.insert(0, os.getcwd())
    __import__("stranger")
    return 0


def _grows(_: Sequence[str]) -> int:
    return len(bytearray(b"x") * (600 << 20)) * 0


def _waits(_: Sequence[str]) -> int:
    while True:
        pass


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (_leaks, "it printed a secret"),
        (_fails, "it printed a traceback"),
        (_starts, "it called os.system"),
        (_writes, "to write"),
        (_imports, "it imported stranger from the directory"),
        (_grows, " MB"),
        (_waits, "ended by SIG"),
    ],
)
def test_what_a_command_may_not_do_is_found(
    command: Callable[[Sequence[str]], int], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hostile.running.SECONDS", 1)
    place = tmp_path / "place"
    place.mkdir()
    ran = run(command, [], place, {"MYTOKEN": SECRET})
    assert any(problem in one for one in ran.problems([SECRET])), ran


def test_a_file_is_spoiled_alike_for_a_seed(tmp_path: Path) -> None:
    (tmp_path / OUTSIDE).touch()
    kind = KINDS[0]
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        spoil(kind, kind.valid(tmp_path), tmp_path / name, random.Random(5))
        files.append((tmp_path / name / kind.file).read_bytes().replace(str(tmp_path / name).encode(), b""))
    assert files[0] == files[1]
