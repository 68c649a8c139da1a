"""Reads and checks records of evidence: the files that `attnreg verify --record` writes.

Each row is signed with the digests of its kernel, of the cases that ran, and of its content with the device. Rows with
a problem do not count. A row of an earlier kernel proves nothing about the present one.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.compile.inputs.bundled import registry_root
from attnreg.compile.source.json_places import RepeatedKeyError, places, repeated, unrepeated
from attnreg.compile.source.quoting import FileKind, may_quote
from attnreg.errors import Location, Problem, RegistryError, counted, shown
from attnreg.files import FileError, parse_json, read_text
from attnreg.language.facets import PROVEN
from attnreg.packages.kernel_code import kernel_digest
from attnreg.packages.signing import digest_of, is_digest

if TYPE_CHECKING:
    from attnreg.registry import Registry

# the size limit of a file of records
MAX_BYTES = 16 << 20
MACHINES = ("cpu", "cuda", "rocm", "xpu")
SIZES = ("claims", "pairs")
# facets that have a value in every case
_ALWAYS = ("attn_type", "dtype", "kv_dtype", "head_size")
_ROW = ("versions", "for", "size", "cases", "refused", "unproven", "claims", "signed")
_FILE = ("device", "platform", "backends", "runs")
_RECORDS = FileKind("file of records", frozenset({"backends", "runs"}))
_AGAIN = "remove it, and record it again with `attnreg verify --record`"
_ALONE = "such a file is written by `attnreg verify --record` alone"


class RecordsError(RegistryError):
    """Raised instead of using records that have a problem."""

    subject = "the evidence"


class Record(NamedTuple):
    """The proof of one backend, or variant, on one device. ``kernel`` is the digest of its kernel, if known."""

    title: str
    device: str
    machine: str
    result: Mapping[str, Any]
    where: Location

    @property
    def kernel(self) -> str | None:
        kernel: str | None = self.result["signed"]["kernel"]
        return kernel

    @property
    def platform(self) -> str:
        """The platform for which it was selected."""
        return str(self.result["for"]).partition(" ")[0]

    @property
    def arch(self) -> str:
        return str(self.result["for"]).partition(" ")[2]

    @property
    def versions(self) -> str:
        """The packages of the run and their versions, without attnreg's own: ``torch 2.11.0, triton 3.9.0``."""
        versions: Mapping[str, str | None] = self.result["versions"]
        # a program has no version
        return ", ".join(f"{name} {version or ''}".strip() for name, version in versions.items() if name != "attnreg")

    @property
    def stands_in(self) -> bool:
        """Whether the run used a device of another platform, so that the architecture itself is unproven."""
        return self.platform not in (self.machine, "cpu")

    def is_current(self, registry: Registry) -> bool:
        """Whether the kernel that ran is the present one of the registry and of this attnreg."""
        return self.kernel is not None and self.kernel == kernel_digest(registry, self.title)


class Records(NamedTuple):
    """The records of one file. ``rows`` leaves out records with a problem."""

    device: str
    machine: str
    rows: tuple[Record, ...]
    runs: Mapping[str, Mapping[str, Any]]
    problems: tuple[Problem, ...]


def signed(
    device: str, machine: str, title: str, result: Mapping[str, Any], kernel: str | None, cases: str | None
) -> dict[str, Any]:
    """The row of a file, with its signature. cases: the digest of the cases that ran."""
    content = digest_of([device, machine, title, result, kernel, cases])
    return {**result, "signed": {"kernel": kernel, "cases": cases, "content": content}}


def signed_run(device: str, machine: str, name: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """The run of a tool, with its signature."""
    return {**result, "signed": {"content": digest_of([device, machine, name, result])}}


def read_records(path: Path, label: str = "") -> Records:
    """The records of a file, which messages call ``label``. Every fault becomes a problem with its place."""
    label = label or str(path)
    try:
        text = read_text(path, MAX_BYTES, label)
        data = parse_json(text, label, unrepeated)
    except FileError as e:
        return _nothing(replace(e.problem, help=_ALONE))
    except RepeatedKeyError:
        key, line, column = repeated(text)
        named = f"the key {shown(key)}" if may_quote(_RECORDS, text) else "a key"
        return _nothing(Problem(Location(label, line, column), f"{named} is given twice", _ALONE))
    why = _wrong_file(data)
    if why or not isinstance(data, dict):
        return _nothing(Problem(Location(label, 1, 1), f"no record of evidence: {why}", _ALONE))
    device, machine, runs = data["device"], data["platform"], data.get("runs", {})
    rows, whole, problems = list[Record](), dict[str, Mapping[str, Any]](), list[Problem]()
    rows_at, runs_at = places(text, "backends"), places(text, "runs")
    for title, result in data["backends"].items():
        where = Location(label, *rows_at[title])
        if why := _wrong_row(device, machine, title, result):
            problems.append(Problem(where, f"the record of {shown(title)}: {why}", _AGAIN))
        else:
            rows.append(Record(title, device, machine, result, where))
    for name, result in runs.items():
        if why := _wrong_run(device, machine, name, result):
            where = Location(label, *runs_at[name])
            message = f"the record of the run {shown(name)}: {why}"
            problems.append(Problem(where, message, "remove it, and run it again"))
        else:
            whole[name] = result
    return Records(device, machine, tuple(rows), whole, tuple(problems))


def evidence_files(root: Path) -> list[Path]:
    """The files of records beside the data of a registry."""
    return sorted((root / "evidence").glob("*.json"))


def whole_records(root: Path) -> list[Records]:
    """The records beside the data of a registry. Raises `RecordsError` if one has a problem."""
    found = [read_records(path, f"{root.name}/evidence/{path.name}") for path in evidence_files(root)]
    if problems := [problem for records in found for problem in records.problems]:
        raise RecordsError(problems)
    return found


@functools.cache
def bundled_records() -> tuple[Record, ...]:
    """The rows of the evidence in attnreg's package, without rows that have a problem."""
    return tuple(row for path in evidence_files(registry_root()) for row in read_records(path).rows)


def _nothing(problem: Problem) -> Records:
    return Records("", "", (), {}, (problem,))


def _wrong_file(data: Any) -> str:
    """Why a value is not a file of records; "" if it is one."""
    parts = {"backends": data.get("backends"), "runs": data.get("runs", {})} if isinstance(data, dict) else {}
    for name in ("backends", "runs"):
        if not isinstance(parts.get(name), dict):
            return f"it has no object `{name}`"
    if more := [key for key in data if key not in _FILE]:
        return f"it has {shown(more[0])}"
    if not _is_text(data.get("device")):
        return f"its device is {shown(data.get('device'))}"
    return "" if data.get("platform") in MACHINES else f"its platform is {shown(data.get('platform'))}"


def _wrong_row(device: str, machine: str, title: str, row: Any) -> str:
    """Why a value is not a row that `attnreg verify` wrote; "" if it is one."""
    if not isinstance(row, dict) or sorted(row) != sorted(_ROW):
        return _keys(row, _ROW)
    for key, (fits, expected) in _FORMS.items():
        if not fits(row[key]):
            return f"`{key}` is {shown(row[key])}; expected {expected}"
    given = row["signed"]
    if given != signed(device, machine, title, _unsigned(row), given["kernel"], given["cases"])["signed"]:
        return "it was changed after it was written: the signature is not that of its content"
    return next(_not_whole(row), "")


def _wrong_run(device: str, machine: str, name: str, run: Any) -> str:
    if not isinstance(run, dict):
        return f"it is {shown(run)}; expected an object"
    for key, (fits, expected) in _RUN_FORMS.items():
        if not fits(run.get(key)):
            return f"`{key}` is {shown(run.get(key))}; expected {expected}"
    if run["signed"] != signed_run(device, machine, name, _unsigned(run))["signed"]:
        return "it was changed after it was written: the signature is not that of its content"
    return ""


def _not_whole(row: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each facet whose counts do not add up to the number of cases."""
    cases, claims = row["cases"], row["claims"]
    for facet in (*PROVEN, "features"):
        tallies = claims.get(facet, {})
        for value, tally in tallies.items():
            if tally["cases"] > cases:
                yield f"it is not whole: {facet} {value} has {tally['cases']:,} of {counted(cases, 'case')}"
        found = sum(tally["cases"] for tally in tallies.values())
        if (facet in _ALWAYS and found != cases) or (facet != "features" and found > cases):
            yield f"it is not whole: the cases of {facet} are {found:,}, and {counted(cases, 'case')} ran"


def _keys(row: Any, expected: tuple[str, ...]) -> str:
    if not isinstance(row, dict):
        return f"it is {shown(row)}; expected an object"
    if missing := [key for key in expected if key not in row]:
        return f"it is of another form: it has no `{missing[0]}`"
    return f"it is of another form: it has {shown(next(key for key in row if key not in expected))}"


def _unsigned(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "signed"}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= 200


def _is_count(value: Any, least: int = 0) -> bool:
    return type(value) is int and value >= least


def _is_number(value: Any, most: float = math.inf) -> bool:
    return type(value) in (int, float) and 0 <= value <= most and math.isfinite(value)


def _are_versions(value: Any) -> bool:
    named = isinstance(value, dict) and all(v is None or isinstance(v, str) for v in value.values())
    return named and isinstance(value.get("attnreg"), str) and isinstance(value.get("torch"), str)


def _is_tally(value: Any) -> bool:
    """Whether a value is a count of passed cases. ``share`` is the error divided by its bound, so at most 1."""
    return (
        isinstance(value, dict)
        and sorted(value) == ["cases", "error", "share"]
        and _is_count(value["cases"], 1)
        and _is_number(value["error"])
        and _is_number(value["share"], 1)
    )


def _are_claims(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) <= {*PROVEN, "features"}
        and all(isinstance(part, dict) and part and all(map(_is_tally, part.values())) for part in value.values())
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value)) and len({*value}) == len(value)


def _is_signature(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and sorted(value) == ["cases", "content", "kernel"]
        and is_digest(value["content"])
        and all(value[name] is None or is_digest(value[name]) for name in ("kernel", "cases"))
    )


_Form = tuple[Callable[[Any], bool], str]
_FORMS: Mapping[str, _Form] = {
    "signed": (_is_signature, "the digests of kernel, cases and content"),
    "versions": (_are_versions, "an object with the versions of attnreg and torch"),
    "for": (lambda v: isinstance(v, str) and bool(re.fullmatch(r"\w+ [\w.+-]+", v)), "a platform and an architecture"),
    "size": (lambda v: v in SIZES, " or ".join(SIZES)),
    "cases": (lambda v: _is_count(v, 1), "a number of at least 1"),
    "refused": (_is_count, "a number"),
    "unproven": (_is_list, "a list of words"),
    "claims": (_are_claims, "facets with the cases, error and share of each value"),
}
_RUN_FORMS: Mapping[str, _Form] = {
    "signed": (lambda v: isinstance(v, dict) and sorted(v) == ["content"], "the digest of its content"),
    "versions": (_are_versions, "an object with the versions of attnreg and torch"),
    "errors": (_is_count, "a number"),
    "commit": (lambda v: v is None or _is_text(v), "the commit that ran"),
    **{key: (lambda v: v is None or _is_number(v), "a number") for key in ("minutes", "cases", "batches", "tests")},
    "kernels": (
        lambda v: v is None or (isinstance(v, dict) and all(map(_is_count, v.values()))),
        "an object with the variants of each kernel",
    ),
}
