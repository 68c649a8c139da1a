"""The file of samples: what was timed, where, and every time; its last line signs it.

Each line is a JSON object. The first says on which machine and from which registry, the others what was measured: a
cell, a turn of samples of a backend, or why a backend has none. The last is the signature. A file without one is of
a run that has not ended.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.compile.source.quoting import FileKind, may_quote, with_cuts
from attnreg.contract import OWN_MODULES
from attnreg.errors import Location, Problem, RegistryError, counted, shown
from attnreg.files import FileError, read_text
from attnreg.packages.kernel_code import row_text
from attnreg.packages.signing import digest
from attnreg.request import MAX_INTEGER, AttentionRequest
from attnreg.selection.wording import request_words

if TYPE_CHECKING:
    from attnreg.registry import Registry


def _is_positive(n: Any) -> bool:
    """Whether a number is above 0, and a float can hold it."""
    return type(n) in (int, float) and 0 < n <= sys.float_info.max


def _is_size(n: Any, least: int) -> bool:
    """Whether a number is an integer of that least, and a request could have it."""
    return type(n) is int and least <= n <= MAX_INTEGER


FORMAT = 1
_SAMPLES = FileKind("file of samples", frozenset({"machine", "rows"}))
MAX_BYTES = 64 << 20
MACHINE = ("platform", "arch", "device", "packages")
# no machine moves more gigabytes, or does more 16-bit teraflops, in a second
_GIGABYTES, _TERAFLOPS = 50_000.0, 10_000.0
# no call takes less: on a GPU a kernel that does nothing takes about two from launch to end; on a processor Python
# alone takes several until a backend has its arguments
_LAUNCH_US = 1.0
# bytes of an element; of other types half a byte at least
_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}
# more requests, queries or keys than any batch has: kernels count them in 32 bits
MOST = 2**31
# features with a number that is the layer's own -> whether a value can be it
NUMBERED: Mapping[str, Callable[[Any], bool]] = {
    "asymmetric_window": lambda n: isinstance(n, list) and len(n) == 2 and all(_is_size(s, -1) for s in n),
    "chunk": lambda n: _is_size(n, 1),
    "sliding_window": lambda n: _is_size(n, 1),
    "softcap": _is_positive,
}
# those of them that bound the keys that a query sees
_BOUNDS = frozenset({"asymmetric_window", "chunk", "sliding_window"})
# a clock shows other times each time
_LEAST_TURNS, _LEAST_CALLS = 3, 3
# a time of fewer steps of a GPU's clock may be the same each time
_STEPS = 100
# a kernel that takes longer is said to hang
_LONGEST_US = 600e6


class SamplesError(RegistryError):
    """Raised for a file of samples that `attnreg tune` cannot have written."""

    subject = "the file of samples"


class Cell(NamedTuple):
    """One workload of one layer: ``requests`` requests of ``queries`` queries each, after ``context`` earlier keys.

    ``numbers`` has the number of each feature of `NUMBERED` that the layer has, by name: a request has none, and no
    condition may ask for one. Files that were written before it was recorded have none.
    """

    request: AttentionRequest
    requests: int
    queries: int
    context: int
    numbers: tuple[tuple[str, Any], ...] = ()

    @property
    def phase(self) -> str:
        """``decode`` for one query each, else ``prefill``."""
        return "decode" if self.queries == 1 else "prefill"

    @property
    def words(self) -> str:
        """``decode 32 x 4096``."""
        after = f" after {self.context}" if self.context and self.queries > 1 else ""
        return f"{self.phase} {self.requests} x {self.queries if self.queries > 1 else self.context + 1}{after}"

    @property
    def layer(self) -> str:
        """The layer in words: ``64/8 heads of 64 · bfloat16 · KV cache auto · block_size 16 · sliding window 128``."""
        numbers = dict(self.numbers)
        if "sliding_window" in numbers and self.request.attn_type in ("encoder", "encoder_only"):
            numbers["sliding_window"] = f"±{numbers['sliding_window'] - 1}"
        return " · ".join(request_words(self.request, numbers))

    @property
    def bounded(self) -> bool:
        """Whether it says how many keys the layer sees: kernels are as fast as their windows are short."""
        return self.request.features & _BOUNDS <= dict(self.numbers).keys()

    def to_dict(self) -> dict[str, Any]:
        out = {**self._asdict(), "request": self.request.to_dict()}
        numbers = dict(out.pop("numbers"))
        return {**out, "numbers": numbers} if numbers else out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cell:
        """The cell that `to_dict` wrote. Raises ValueError for one that there cannot be."""
        rest = {**_typed(data, dict, "a cell")}
        request = AttentionRequest.from_dict(_typed(rest.pop("request", None), dict, "the request of a cell"))
        numbers = _typed(rest.pop("numbers", {}), dict, "the numbers of a cell")
        sizes: dict[str, Any] = {name: rest.get(name) for name in ("requests", "queries", "context")}
        least = {"requests": 1, "queries": 1, "context": 0}
        if not all(type(n) is int and least[name] <= n < MOST for name, n in sizes.items()) or len(rest) != 3:
            raise ValueError(f"a cell has requests, queries and context, each less than {MOST:,}, got {shown(rest)}")
        for name, number in numbers.items():
            if name not in request.features or name not in NUMBERED or not NUMBERED[name](number):
                raise ValueError(
                    f"the numbers of a cell are those of its request's features, got {name}: {shown(number)}"
                )
        pairs = [(name, tuple(n) if isinstance(n, list) else n) for name, n in sorted(numbers.items())]
        return cls(request, **sizes, numbers=tuple(pairs))

    def least_us(self, gigabytes: float = _GIGABYTES, teraflops: float = _TERAFLOPS) -> float:
        """Microseconds below which no machine can be that moves so many gigabytes a second, and does as many teraflops.

        teraflops: of 16-bit numbers. Where it is not known how many keys a query sees, the queries and the outputs
        alone are counted, and no call takes less than `_LAUNCH_US`.
        """
        r = self.request
        # prompts of MLA have keys and values apart
        latent, wide = r.attention != "mha" and r.phase != "prefill", r.head_size + (r.head_size_v or r.head_size)
        keys, pairs = self._seen()
        # keys and values; of a latent the value is a part. What is stored in fewer bits may be computed in fewer
        kv_dtype = r.kv_dtype or "auto"
        element = _BYTES.get(r.dtype if kv_dtype == "auto" else kv_dtype, 0.5)
        moved = keys * (r.num_kv_heads or 1) * (r.head_size if latent else wide) * element
        # queries are as wide as keys, and outputs as values
        moved += self.queries * (r.num_heads or 1) * wide * _BYTES.get(r.dtype, 0.5)
        done = 2 * (r.num_heads or 1) * wide * pairs / (1 if element > 1 else 4)
        return max(_LAUNCH_US, self.requests * moved / gigabytes / 1e3, self.requests * done / teraflops / 1e6)

    def _seen(self) -> tuple[int, int]:
        """The least of a request's keys that are read, and of its pairs of a query and a key that the query sees.

        A query sees itself and what is before it, but for what its window, its chunk or its choice of tokens leaves
        out. What it sees of later keys is not counted. Both are 0 where it is not known.
        """
        r, numbers, first, keys = self.request, dict(self.numbers), self.context, self.context + self.queries
        chosen = r.index_topk if r.attention == "mla_sparse" else keys
        if not self.bounded or "sparse_blocks" in r.features or chosen is None:
            return 0, 0
        left = numbers.get("asymmetric_window", (-1,))[0]
        width = min(keys, chosen, numbers.get("sliding_window", keys), keys if left < 0 else left + 1)
        chunk = numbers.get("chunk", keys)
        read = min(width, self.queries + first % chunk)
        return read, min(_triangle(keys, width) - _triangle(first, width), _steps(keys, chunk) - _steps(first, chunk))


def _triangle(queries: int, width: int) -> int:
    """The pairs of the first queries of a sequence, each of which sees itself and the keys before it, or ``width``."""
    rising = min(queries, width)
    return rising * (rising + 1) // 2 + (queries - rising) * width


def _steps(queries: int, chunk: int) -> int:
    """The same where each sees what its chunk has before it."""
    return queries // chunk * _triangle(chunk, chunk) + _triangle(queries % chunk, chunk)


@dataclass
class Samples:
    """What a file holds. ``turns`` maps the index of a cell and a backend to its turns: microseconds, each as timed.

    ``problems`` says why a backend has no place in a cell.
    """

    machine: dict[str, Any]
    registry: str
    rows: dict[str, str]
    date: str
    cells: list[Cell] = field(default_factory=list)
    turns: dict[tuple[int, str], list[list[float]]] = field(default_factory=dict)
    problems: dict[tuple[int, str], str] = field(default_factory=dict)
    signed: bool = False

    def head(self) -> dict[str, Any]:
        """The first line."""
        return {
            "format": FORMAT,
            "machine": self.machine,
            "registry": self.registry,
            "rows": self.rows,
            "date": self.date,
        }

    def take(self, line: Mapping[str, Any]) -> None:
        """Add what a line says. Raises ValueError for one that there cannot be."""
        kind = next(iter(line), "")
        if kind == "cell":
            cell = Cell.from_dict(line[kind])
            if cell in self.cells:
                raise ValueError("this cell is there already")
            self.cells.append(cell)
            return
        index, backend = line.get("of"), line.get("backend")
        if type(index) is not int or not 0 <= index < len(self.cells) or not isinstance(backend, str):
            raise ValueError("a line says `of` which cell and `backend` it is")
        if kind == "us":
            times = _typed(line[kind], list, "a turn")
            if not times or not all(map(_is_positive, times)):
                raise ValueError("a turn has times in microseconds, all above 0")
            self.turns.setdefault((index, backend), []).append([float(t) for t in times])
        elif kind == "problem":
            self.problems[index, backend] = str(line[kind])
        else:
            raise ValueError(f"a line has a cell, a turn (`us`) or a problem, got {shown(kind) if kind else 'nothing'}")

    @property
    def implausible(self) -> str:
        """Why these cannot be the times of a machine; "" if they can."""
        step = 0.0 if self.machine["platform"] == "cpu" else self._step
        for (index, backend), turns in self.turns.items():
            times = [t for turn in turns for t in turn]
            what = f"{backend}, {self.cells[index].words}"
            if backend not in self.rows:
                return f"{what}: the first line names no such backend"
            if len(turns) < _LEAST_TURNS:
                return f"{what}: {counted(len(turns), 'turn')}; {_LEAST_TURNS} are the least from which noise is known"
            if min(map(len, turns)) < _LEAST_CALLS:
                return f"{what}: a turn of {min(map(len, turns))}; {_LEAST_CALLS} calls are the least of a turn"
            if len(set(times)) == 1 and times[0] > _STEPS * step:
                return f"{what}: {len(times)} times are all {times[0]} µs; a clock shows no such thing"
            # a clock with wide steps shows a short kernel the same two times again and again, in any order
            telling = [tuple(turn) for turn in turns if len(set(turn)) > 2]
            if telling and 2 * (differ := len(set(telling))) <= len(telling):
                return f"{what}: {differ} of {len(telling)} turns differ; a clock does not repeat itself"
            if min(times) < self.cells[index].least_us():
                return (
                    f"{what}: {min(times)} µs; no machine moves its bytes, does its operations or makes a call so fast"
                )
            if max(times) > _LONGEST_US:
                return f"{what}: {max(times):.0f} µs; `attnreg tune` waits for no kernel that long"
        return self._copied

    @property
    def _step(self) -> float:
        """The step of the clock, in microseconds: 0.03 of an H200, 1 of some GPUs."""
        times = sorted({t for turns in self.turns.values() for turn in turns for t in turn})
        return min((b - a for a, b in pairwise(times)), default=0.0)

    @property
    def _copied(self) -> str:
        """Which times are another's in the same cell, each times one number; "" if none are."""
        cells: dict[int, dict[str, list[float]]] = {}
        for (index, backend), turns in self.turns.items():
            cells.setdefault(index, {})[backend] = [t for turn in turns for t in turn]
        for index, backends in cells.items():
            for (a, one), (b, other) in combinations(backends.items(), 2):
                ratios = [x / y for x, y in zip(one, other, strict=False)]
                if len(set(one)) > 2 and max(ratios) <= min(ratios) * (1 + 1e-6):
                    return f"{b}, {self.cells[index].words}: every time is that of {a} times {1 / ratios[0]:.4g}"
        return ""


def fingerprint(machine: Mapping[str, Any]) -> str:
    """The fingerprint of a device and its packages."""
    return digest(json.dumps({name: machine[name] for name in MACHINE}, sort_keys=True).encode())


def signature(machine: Mapping[str, Any], lines: bytes) -> dict[str, Any]:
    """The last line of a file."""
    return {"signed": {"machine": fingerprint(machine), "lines": digest(lines)}}


def kernel_hash(registry: Registry, name: str) -> str:
    """A hash of what a row says of the kernel of a backend, or of a variant: its module, and the module's options.

    What it claims to accept is no part of it: with another claim the kernel is as fast as before. Nor is the
    code of the module: samples have the version of its package instead.
    """
    row = registry.row(name)
    assert row is not None, name
    return digest(row_text(row).encode())


def is_own(registry: Registry, name: str) -> bool:
    """Whether the kernel module of a backend, or of a variant, is attnreg's own."""
    row = registry.row(name)
    return row is not None and any((v.module or "").startswith(OWN_MODULES) for v in row.variants)


def read_samples(path: Path, label: str = "", *, unfinished: bool = False) -> Samples:
    """The samples of a file. Raises `SamplesError` with the line for a file that `attnreg tune` cannot have written.

    unfinished: of a run that has not ended: it needs no signature, and its last line may be torn.
    """
    label = label or str(path)

    def wrong(line: int, message: str, help_: str = "") -> SamplesError:
        return SamplesError([Problem(Location(label, line, 1), with_cuts(message), help_)])

    try:
        text = read_text(path, MAX_BYTES)
    except FileError as e:
        raise SamplesError([e.problem]) from None
    lines, samples, size = text.splitlines(keepends=True), None, 0
    for number, line in enumerate(lines, 1):
        try:
            data = json.loads(line)
            if not isinstance(data, dict) or not data:
                raise ValueError("expected an object")
            if samples is None:
                samples = _begun(data)
            elif "signed" in data:
                if data != signature(samples.machine, text[:size].encode()):
                    raise ValueError("the signature is not that of these lines, this device and these packages")
                samples.signed = True
            elif samples.signed:
                raise ValueError("there is a line behind the signature")
            else:
                samples.take(data)
        # numbers that no machine shows are out of the range of a float
        except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError) as e:
            # the line that was written when the run ended
            if unfinished and samples is not None and number == len(lines) and not line.endswith("\n"):
                break
            raise wrong(number, str(e), "such a file is written by `attnreg tune` alone") from None
        size += len(line)
    if samples is None:
        raise wrong(1, "the file of samples is empty")
    if not unfinished:
        if not samples.signed:
            raise wrong(len(lines), "the file has no signature: its run has not ended", "run the same command again")
        if why := _made_up(samples):
            raise wrong(1, why, "such a file is written by `attnreg tune` alone")
    return samples


def _made_up(samples: Samples) -> str:
    """Why no run has written the samples; "" if one can have."""
    try:
        return samples.implausible
    except ArithmeticError as e:
        return f"its numbers are those of no machine: {e}"


def _begun(data: Mapping[str, Any]) -> Samples:
    if data.get("format") != FORMAT:
        got = f", got {shown(data.get('format'))}" if may_quote(_SAMPLES, data) else ""
        raise ValueError(f"a file of samples of format {FORMAT} begins with it{got}")
    machine = _typed(data.get("machine"), dict, "machine")
    words = [machine.get(name) for name in MACHINE[:3]]
    packages = machine.get("packages")
    if not all(isinstance(w, str) and w for w in words) or not isinstance(packages, dict) or not packages:
        raise ValueError(f"machine has {', '.join(MACHINE)}")
    rows = _typed(data.get("rows"), dict, "rows")
    if not all(isinstance(text, str) for text in (*packages.values(), *rows.values())):
        raise ValueError("versions of packages and hashes of rows are texts")
    day = _typed(data.get("date"), str, "date")
    # Python reads 20261127 and 2026-W48-5 too, and an order has no such day
    if date.fromisoformat(day).isoformat() != day:
        raise ValueError(f"the date is written as {date.fromisoformat(day)}, got {shown(day)}")
    return Samples(machine, _typed(data.get("registry"), str, "registry"), rows, data["date"])


def _typed(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is {shown(value)}")
    return value
