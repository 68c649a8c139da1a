"""The file of samples: the machine, the cells, and every time; its last line signs it.

Each line is a JSON object. The first has the machine and the registry. The others have a cell, a turn of a backend's
times, or the reason why a backend has none. The last line is the signature. A file without a signature comes from a run
that has not ended.
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
    """Whether a number is an integer of at least ``least`` that a request can have."""
    return type(n) is int and least <= n <= MAX_INTEGER


FORMAT = 1
_SAMPLES = FileKind("file of samples", frozenset({"machine", "rows"}))
MAX_BYTES = 64 << 20
MACHINE = ("platform", "arch", "device", "packages")
# no machine moves more gigabytes, or does more 16-bit teraflops, in a second
_GIGABYTES, _TERAFLOPS = 50_000.0, 10_000.0
# no call takes less: on a GPU an empty kernel takes about 2 µs, and on a processor Python takes several µs for a call
_LAUNCH_US = 1.0
# bytes of an element; other types have at least half a byte
_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}
# more requests, queries or keys than any batch has: kernels count them in 32 bits
MOST = 2**31
# feature with a number of the layer -> the check of the number
NUMBERED: Mapping[str, Callable[[Any], bool]] = {
    "asymmetric_window": lambda n: isinstance(n, list) and len(n) == 2 and all(_is_size(s, -1) for s in n),
    "chunk": lambda n: _is_size(n, 1),
    "sliding_window": lambda n: _is_size(n, 1),
    "softcap": _is_positive,
}
# the features among them that bound the keys that a query sees
_BOUNDS = frozenset({"asymmetric_window", "chunk", "sliding_window"})
# the least turns of a backend and calls of a turn: a real clock shows different times
_LEAST_TURNS, _LEAST_CALLS = 3, 3
# decimals of a time in a file: a nanosecond, which is less than the rounding of the float32 that CUDA measures
DECIMALS = 3
# times below this number of clock steps may all be equal
_STEPS = 100
# a kernel that takes longer counts as hanging
_LONGEST_US = 600e6


class SamplesError(RegistryError):
    """Raised for a file of samples that `attnreg tune` cannot have written."""

    subject = "the file of samples"


class Cell(NamedTuple):
    """One workload of one layer: ``requests`` requests of ``queries`` queries each, after ``context`` earlier keys.

    ``numbers`` has the number of each of the layer's features in `NUMBERED`, by name. A request has no numbers, and
    conditions cannot use them. Older files have none.
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
        """Whether it has the number of keys that the layer sees: a kernel is faster with a shorter window."""
        return self.request.features & _BOUNDS <= dict(self.numbers).keys()

    def to_dict(self) -> dict[str, Any]:
        out = {**self._asdict(), "request": self.request.to_dict()}
        numbers = dict(out.pop("numbers"))
        return {**out, "numbers": numbers} if numbers else out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cell:
        """The cell that `to_dict` wrote. Raises ValueError for an impossible cell."""
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
        """A lower bound of the time in microseconds, for a machine with this bandwidth (per second) and speed.

        teraflops: for 16-bit numbers. If the number of keys that a query sees is unknown, only queries and outputs
        count. The bound is at least `_LAUNCH_US`.
        """
        r = self.request
        # prompts of MLA have keys and values apart
        latent, wide = r.attention != "mha" and r.phase != "prefill", r.head_size + (r.head_size_v or r.head_size)
        keys, pairs = self._seen()
        # keys and values; the value of a latent is a part of its key. Data of fewer bits may be computed in fewer bits
        kv_dtype = r.kv_dtype or "auto"
        element = _BYTES.get(r.dtype if kv_dtype == "auto" else kv_dtype, 0.5)
        moved = keys * (r.num_kv_heads or 1) * (r.head_size if latent else wide) * element
        # queries are as wide as keys, and outputs as values
        moved += self.queries * (r.num_heads or 1) * wide * _BYTES.get(r.dtype, 0.5)
        done = 2 * (r.num_heads or 1) * wide * pairs / (1 if element > 1 else 4)
        return max(_LAUNCH_US, self.requests * moved / gigabytes / 1e3, self.requests * done / teraflops / 1e6)

    def _seen(self) -> tuple[int, int]:
        """The least number of a request's keys that are read, and of pairs of a query and a key that it sees.

        A query sees itself and the keys before it, except those outside its window, its chunk or its choice of tokens.
        Later keys are not counted. Both numbers are 0 if they are unknown.
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
    """The number of pairs for the first queries of a sequence; each sees at most ``width`` keys up to its own."""
    rising = min(queries, width)
    return rising * (rising + 1) // 2 + (queries - rising) * width


def _steps(queries: int, chunk: int) -> int:
    """The number of pairs for the first queries of a sequence; each sees the keys of its chunk up to its own."""
    return queries // chunk * _triangle(chunk, chunk) + _triangle(queries % chunk, chunk)


@dataclass
class Samples:
    """The content of a file. ``turns`` maps (index of a cell, backend) to its turns: lists of times in microseconds.

    ``problems`` maps the same key to the reason why the backend has no rank in the cell.
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
        """Add a line of the file. Raises ValueError for an impossible line."""
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
        """Why no machine can have shown these times; "" if one can."""
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
            # a clock with wide steps shows the same two times for a short kernel; such turns do not count
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
        """A message if all times of a backend are another's times in the cell, multiplied by one factor, else ""."""
        cells: dict[int, dict[str, list[float]]] = {}
        for (index, backend), turns in self.turns.items():
            cells.setdefault(index, {})[backend] = [t for turn in turns for t in turn]
        for index, backends in cells.items():
            for (a, one), (b, other) in combinations(backends.items(), 2):
                ratios = [x / y for x, y in zip(one, other, strict=False)]
                # the times of a file are rounded
                rounding = 1e-6 + 10**-DECIMALS / min(*one, *other)
                if len(set(one)) > 2 and max(ratios) <= min(ratios) * (1 + rounding):
                    return f"{b}, {self.cells[index].words}: every time is that of {a} times {1 / ratios[0]:.4g}"
        return ""


def fingerprint(machine: Mapping[str, Any]) -> str:
    """The fingerprint of a device and its packages."""
    return digest(json.dumps({name: machine[name] for name in MACHINE}, sort_keys=True).encode())


def signature(machine: Mapping[str, Any], lines: bytes) -> dict[str, Any]:
    """The last line of a file."""
    return {"signed": {"machine": fingerprint(machine), "lines": digest(lines)}}


def kernel_hash(registry: Registry, name: str) -> str:
    """A hash of a row's kernel, for a backend or a variant: its module, and the module's options.

    The claims are no part of it: a changed claim does not change the speed of the kernel. The module's code is no part
    of it either; samples have the version of its package instead.
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

    unfinished: the run has not ended: the file needs no signature, and its last line may be incomplete.
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
        # a number out of the range of a float raises ArithmeticError
        except (ValueError, TypeError, KeyError, RecursionError, ArithmeticError) as e:
            # the run was interrupted while it wrote this line
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
    """Why no run can have written the samples; "" if one can."""
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
    # fromisoformat also reads 20261127 and 2026-W48-5, which an order's date cannot be
    if date.fromisoformat(day).isoformat() != day:
        raise ValueError(f"the date is written as {date.fromisoformat(day)}, got {shown(day)}")
    return Samples(machine, _typed(data.get("registry"), str, "registry"), rows, data["date"])


def _typed(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is {shown(value)}")
    return value
