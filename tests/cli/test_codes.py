"""The codes of findings: each that the code gives is explained, and each that is explained is given."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
from support import ROOT

from attnreg.analysis.check.codes import codes
from attnreg.selection.trace import Kind

_GIVEN = re.compile(r"""(?:Finding|_finding|_report|Slip)\(\s*(?:model, [\w.()\[\], ]+?, )?"([a-z-]+)\"""")
GROUPS = list(dict.fromkeys(code.group for code in codes().values()))


def given() -> set[str]:
    """The codes in the source of what is found. `starts` gives some by a variable."""
    engines = [ROOT / "attnreg/engines" / name for name in ("drafts.py", "launches.py", "spelling.py")]
    files = [*(ROOT / "attnreg/analysis/check").glob("*.py"), *engines]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return {*_GIVEN.findall(text), *re.findall(r'"(refused-start|failing-choice|wrong-choice|refused-row)"', text)}


def test_each_code_is_given_and_explained() -> None:
    reasons = set(get_args(Kind))
    assert given() == codes().keys() - reasons
    assert reasons == {code.name for code in codes().values() if code.group == GROUPS[-1]}


def test_each_code_says_what_it_means_in_sentences() -> None:
    for code in codes().values():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code.name)
        for sentence in (code.says, code.matters, code.mend):
            assert re.fullmatch(r"[A-Z`].*\.", sentence, re.DOTALL), code.name
        # a reason has no code in its text
        assert code.group == GROUPS[-1] or f"{code.name} [" in code.example


def test_a_code_is_explained(run: Callable[..., Any]) -> None:
    result = run("check", "--explain", "unreachable-entry")
    assert result.status == 0
    first, second, *rest = result.out.splitlines()
    assert first == "unreachable-entry [a backend, an order]"
    assert second == "  An order names a backend that it never chooses."
    assert [line.partition(":")[0] for line in rest if not line.startswith("    ")] == [
        "  why it matters",
        "  to mend it",
        "  for example",
    ]


def test_all_codes_are_listed_without_one(run: Callable[..., Any]) -> None:
    result = run("check", "--explain")
    assert result.status == 0
    assert [line.split()[0] for line in result.out.splitlines() if line.startswith("  ")] == list(codes())
    listed = json.loads(run("check", "--explain", "--json").out)["codes"]
    assert [code["name"] for code in listed] == list(codes())
    [one] = json.loads(run("check", "--explain", "claim", "--json").out)["codes"]
    assert one == listed[list(codes()).index("claim")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--explain", "unreachable-entri"), "did you mean `unreachable-entry`?"),
        (("--explain", "--explain"), "--explain given twice: no value, no value"),
        (("--explain="), "--explain is empty"),
    ],
)
def test_a_code_that_there_is_not_is_refused(run: Callable[..., Any], arguments: Any, says: str) -> None:
    result = run("check", *((arguments,) if isinstance(arguments, str) else arguments))
    assert result.status == 2
    assert says in result.err
