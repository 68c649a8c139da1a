"""Forged records of evidence: each form is a way to make a file say what no run of `attnreg verify` said."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

from attnreg.packages.records import signed

Data = dict[str, Any]


def record(title: str, kernel: str | None, cases: int = 4, **changes: Any) -> dict[str, Any]:
    """What `attnreg verify` writes of a row whose cases all passed, without its signature."""
    tally = {"cases": cases, "error": 0.001, "share": 0.5}
    claims = {"attn_type": {"decoder": tally}, "dtype": {"float16": tally}, "kv_dtype": {"auto": tally},
              "head_size": {"64": tally}}  # fmt: skip
    row = {"versions": {"attnreg": "0.1.0", "torch": "2.14.0", "triton": "3.7.1"}, "for": "cuda sm90", "size": "pairs",
           "cases": cases, "refused": 3, "unproven": [], "claims": claims}  # fmt: skip
    return {"title": title, "kernel": kernel, "result": {**row, **changes}}


def file_of(device: str, machine: str, *rows: Mapping[str, Any]) -> Data:
    """A whole file of records, signed."""
    backends = {r["title"]: signed(device, machine, r["title"], r["result"], r["kernel"], None) for r in rows}
    return {"device": device, "platform": machine, "backends": backends}


def _first(data: Data) -> Data:
    row: Data = next(iter(data["backends"].values()))
    return row


def _set(*path: str, to: Any) -> Callable[[Data], Data]:
    """The first record with another value at a path."""

    def forge(data: Data) -> Data:
        at = _first(data)
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = to
        return data

    return forge


def _signed_anew(*path: str, to: Any) -> Callable[[Data], Data]:
    """The same, by a forger who signs it: what it says must add up all the same."""

    def forge(data: Data) -> Data:
        title = next(iter(_set(*path, to=to)(data)["backends"]))
        row = data["backends"][title]
        given = row.pop("signed")
        about = data["device"], data["platform"], title
        data["backends"][title] = signed(*about, row, given["kernel"], given["cases"])
        return data

    return forge


def _renamed(data: Data) -> Data:
    data["backends"] = {f"{title}_2": row for title, row in data["backends"].items()}
    return data


def _of_another_row(data: Data) -> Data:
    first, second = list(data["backends"])[:2]
    data["backends"][first] = data["backends"][second]
    return data


def _without(key: str) -> Callable[[Data], Data]:
    def forge(data: Data) -> Data:
        del _first(data)[key]
        return data

    return forge


def _top(**changes: Any) -> Callable[[Data], Data]:
    return lambda data: {**data, **changes}


def _twice(data: Data) -> str:
    """The text of a file that has a record twice: readers take one or the other."""
    title = next(iter(data["backends"]))
    first = json.dumps({title: {**_first(data), "cases": 10**9}})[1:-1]
    return json.dumps(data).replace('"backends": {', f'"backends": {{{first}, ', 1)


# words -> the forged file, as a value or as its text
FORGED: Mapping[str, Callable[[Data], Any]] = {
    "a number of cases": _set("cases", to=10**9),
    "a version": _set("versions", "torch", to="9.9"),
    "unproven claims are gone": _set("unproven", to=[]),
    "unproven claims are added": _set("unproven", to=["dcp"]),
    "the number of refusals": _set("refused", to=1000),
    "the size": _set("size", to="claims"),
    "another architecture": _set("for", to="cuda sm100"),
    "another error": _set("claims", "dtype", "float16", "error", to=0.0),
    "one more claim": _set("claims", "features", to={"sinks": {"cases": 1, "error": 0.0, "share": 0.0}}),
    "claims are a list": _set("claims", to=[1]),
    "claims are null": _set("claims", to=None),
    "a tally is text": _set("claims", "dtype", "float16", to="many"),
    "a share above its bound": _signed_anew("claims", "dtype", "float16", "share", to=1.5),
    "an error that is no number": _signed_anew("claims", "dtype", "float16", "error", to=-1),
    "no claims, signed": _signed_anew("claims", to={}),
    "more cases than claims, signed": _signed_anew("cases", to=10**9),
    "fewer cases than claims, signed": _signed_anew("cases", to=1),
    "cases are a boolean, signed": _signed_anew("cases", to=True),
    "the kernel": _set("signed", "kernel", to="0123456789abcdef"),
    "the cases that ran": _set("signed", "cases", to="0123456789abcdef"),
    "no signature": _without("signed"),
    "an empty signature": _set("signed", to={}),
    "no versions": _without("versions"),
    "one more key": _set("note", to="proven by hand"),
    "another title": _renamed,
    "another row's record": _of_another_row,
    "another device": _top(device="NVIDIA B200"),
    "another platform": _top(platform="rocm"),
    "a platform that there is not": _top(platform="abacus"),
    "a record is null": lambda data: {**data, "backends": {"X": None}},
    "backends are a list": _top(backends=[]),
    "runs are a list": _top(runs=[1]),
    "a run without a signature": _top(runs={"fuzz": {"versions": {"attnreg": "1", "torch": "2"}, "errors": 0}}),
    "null": lambda _: None,
    "an empty file": lambda _: "",
    "brackets without end": lambda _: "[" * 100_000,
    "cut in the middle": lambda data: json.dumps(data)[:-40],
    "a key twice": _twice,
    "bytes that are no text": lambda _: b"\xff\xfe{}",
}


def forged(form: str, data: Data) -> bytes:
    """The bytes of a whole file, forged in one form."""
    found = FORGED[form](copy.deepcopy(data))
    if isinstance(found, bytes):
        return found
    return (found if isinstance(found, str) else json.dumps(found, indent=2)).encode()
