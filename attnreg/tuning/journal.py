"""Journal: writes the file of samples line by line, so that an interrupted run loses nothing."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from attnreg.analysis.timings.samples import DECIMALS, Cell, Samples, fingerprint, read_samples, signature
from attnreg.errors import RequestError
from attnreg.files import FileError, kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_OTHER = "name another file with --output, or move this one away"


class Journal:
    """The samples of a run and their file. A run continues a file of the same machine and rows.

    Raises `attnreg.files.FileError` if the file cannot be written, as on a full disk. Raises `RequestError` for a file
    of another machine or of other rows.
    """

    def __init__(self, path: Path, samples: Samples) -> None:
        self.path, self.samples = path, samples
        resumed = bool(kind_of(path))
        if resumed:
            before = read_samples(path, unfinished=True)
            if fingerprint(before.machine) != fingerprint(samples.machine):
                raise RequestError(f"{path} was measured on another machine or with other packages", _OTHER)
            if any(samples.rows.get(name) != row for name, row in before.rows.items()):
                raise RequestError(f"{path} was measured with other rows of the registry", _OTHER)
            before.rows = {**samples.rows}
            before.signed = False
            # other failures may be gone now; a wrong output stays a problem
            before.problems = {key: text for key, text in before.problems.items() if text.startswith("wrong")}
            self.samples = before
        self.resumed = sum(map(len, self.samples.turns.values()))
        self._file: IO[str] | None = None
        self._rewrite()

    def add(self, line: dict[str, Any]) -> None:
        """Add a line to the samples, and write it to the file, its times to the nanosecond."""
        if "us" in line:
            line = {**line, "us": [round(us, DECIMALS) for us in line["us"]]}
        self.samples.take(line)
        self._write(json.dumps(line))

    def index(self, cell: Cell) -> int:
        """The index of a cell. A new cell is written to the file."""
        if cell not in self.samples.cells:
            self.add({"cell": cell.to_dict()})
        return self.samples.cells.index(cell)

    def sign(self) -> None:
        """Write the complete file, with its signature."""
        lines = "".join(f"{line}\n" for line in self._lines())
        self._replace(lines + json.dumps(signature(self.samples.machine, lines.encode())) + "\n")

    def close(self) -> None:
        """Close the file. A failed write has raised its error already, so an error of closing is ignored."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _lines(self) -> Sequence[str]:
        samples = self.samples
        lines: list[dict[str, Any]] = [samples.head(), *({"cell": cell.to_dict()} for cell in samples.cells)]
        for (cell, backend), turns in samples.turns.items():
            lines += [{"us": turn, "of": cell, "backend": backend} for turn in turns]
        lines += [{"problem": text, "of": cell, "backend": name} for (cell, name), text in samples.problems.items()]
        return [json.dumps(line) for line in lines]

    def _rewrite(self) -> None:
        self._replace("".join(f"{line}\n" for line in self._lines()))
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as e:
            raise self._failed(e) from None

    def _replace(self, text: str) -> None:
        self.close()
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            new.write_text(text, encoding="utf-8")
            new.replace(self.path)
        except OSError as e:
            # the disk may be full: remove the incomplete file
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise self._failed(e) from None

    def _write(self, line: str) -> None:
        assert self._file is not None
        try:
            self._file.write(f"{line}\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as e:
            raise self._failed(e) from None

    def _failed(self, error: OSError) -> FileError:
        kept = "; what was written before is kept: run the same command again to go on" if self.path.exists() else ""
        return FileError(str(self.path), f"cannot be written: {error.strerror or error}{kept}")
