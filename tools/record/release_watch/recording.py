"""Runs the recorder of one release, and reads what it found.

A recorder is `make record-engine`. It ends by writing `summary.json`, the fields of `Summary`, into its folder. Without
that file the recording is not finished: the same command goes on with it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAKE = ("make", "--no-print-directory", "record-engine")
_FILE = "summary.json"


@dataclass(frozen=True)
class Move:
    """Layers that another backend serves, or an argument that has another value, on some architectures."""

    model: str
    archs: tuple[str, ...]
    before: str
    after: str
    why: str = ""


@dataclass(frozen=True)
class Summary:
    """What the recording of a release came to.

    ``recorded``: what was recorded, in words, such as ``1000 decisions``. ``against``: the release that ``moved`` is
    compared with. ``compared``: how many cases were. ``moved`` is None if it is not known what moves.
    ``proposed``: a folder or file with proposed data; "" without one. ``left``: what a person must look at.
    ``failed``: the steps that failed: the recording is not complete.
    """

    recorded: str
    against: str
    compared: int = 0
    moved: tuple[Move, ...] | None = None
    proposed: str = ""
    left: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    def write(self, work: Path) -> None:
        """Write the file; a reader never sees a part of it."""
        part = work / f"{_FILE}.part"
        part.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        part.replace(work / _FILE)

    @classmethod
    def read(cls, work: Path) -> Summary | None:
        """The summary in a folder; None if there is none, or one of another form."""
        try:
            data: dict[str, Any] = json.loads((work / _FILE).read_text(encoding="utf-8"))
            if data["moved"] is not None:
                data["moved"] = tuple(Move(**{**move, "archs": tuple(move["archs"])}) for move in data["moved"])
            return cls(**{**data, "left": tuple(data["left"]), "failed": tuple(data["failed"])})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None


@dataclass(frozen=True)
class Outcome:
    """One release: its summary, or the problem for which there is none."""

    engine: str
    version: str
    summary: Summary | None = None
    problem: str = ""

    @property
    def complete(self) -> bool:
        """Whether each step of the recording ended well."""
        return self.summary is not None and not self.summary.failed


def record(engine: str, version: str, work: Path, command: Sequence[str] = MAKE) -> Outcome:
    """Record a release in ``work/<engine>-<version>``. A complete recording there is read and not repeated.

    command: the recorder; the engine, the version and the folder follow as ``ENGINE=``, ``VERSION=`` and ``RECORD=``.
    """
    folder = work / f"{engine}-{version}"
    known = Outcome(engine, version, Summary.read(folder))
    if known.complete:
        return known
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FILE).unlink(missing_ok=True)
    words = [*command, f"ENGINE={engine}", f"VERSION={version}", f"RECORD={work}"]
    with (folder / "recorder.log").open("w", encoding="utf-8") as log:
        try:
            status = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        except OSError as error:
            return Outcome(engine, version, None, f"{words[0]}: {error.strerror or error}")
    # a recorder that leaves something to a person ends with a status of its own, and has written its summary
    summary = Summary.read(folder)
    return Outcome(engine, version, summary, "" if summary else _last(folder / "recorder.log", status))


def _last(log: Path, status: int) -> str:
    """The last line that the recorder printed, and not make."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    said = [line for line in lines if line and not line.startswith("make")]
    return (said[-1][:300] if said else "it printed nothing") + f" (exit status {status})"


def moves_of(cases: Sequence[tuple[str, str, str, str, str]]) -> tuple[Move, ...]:
    """The moves of (model, architecture, before, after, why), one for all architectures that agree in the rest."""
    found: dict[tuple[str, str, str, str], dict[str, None]] = {}
    for model, arch, before, after, why in cases:
        found.setdefault((model, before, after, why), {})[arch] = None
    return tuple(Move(model, tuple(archs), before, after, why) for (model, before, after, why), archs in found.items())


def moves_of_diff(data: Mapping[str, Any]) -> tuple[Move, ...]:
    """The moves in the JSON of `attnreg diff`."""
    cases = []
    for move in data["moves"]:
        sides = [_backend(move[side]) for side in ("before", "after")]
        why = "; ".join(dict.fromkeys(reason["text"] for reason in move["why"]))
        cases.append((f"{move['model']}, {move['layers']}", move["platform"]["arch"], sides[0], sides[1], why))
    return moves_of(cases)


def _backend(side: Mapping[str, Any]) -> str:
    return "/".join(filter(None, (side["backend"], side["variant"]))) or "none"
