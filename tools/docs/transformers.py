"""The generated blocks of docs/transformers_models.md: the recorded results for transformers' architectures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from docs.markdown import plain, table

DATA = "tests/data/transformers"
Row = dict[str, Any]
# the scenarios, in the order of the page
SCENARIOS = (
    "plain", "right padding", "left padding", "inner padding", "4D mask", "packed position_ids", "greedy", "beams",
    "static cache", "chunks", "pooled outputs", "CTC symbols",
)  # fmt: skip
_BY = {
    "attnreg": "attnreg",
    "own eager code": "their own eager code, with a warning",
    "no attention function": "code that calls no attention function",
    "": "not known: they did not run here",
}


def transformers_blocks(root: Path) -> dict[str, str]:
    """Name of each generated block -> its Markdown."""
    versions, *rows = map(json.loads, (root / DATA / "sweep.jsonl").read_text(encoding="utf-8").splitlines())
    reasons = yaml.safe_load((root / DATA / "reasons.yaml").read_text(encoding="utf-8"))
    return {
        "summary": _summary(versions, rows),
        "agreeing": "\n".join(_agreeing([row for row in rows if row["by"] == "attnreg"])),
        "aside": _families(row for row in rows if row["by"] == "own eager code"),
        "without": _families(row for row in rows if row["by"] == "no attention function"),
        "exceptions": "\n\n".join(_exception(name, reason, rows) for name, reason in reasons.items()),
    }


def _summary(versions: dict[str, str], rows: list[Row]) -> str:
    counts = [
        (words, f"{len({r['family'] for r in rows if r['by'] == by})}", f"{sum(r['by'] == by for r in rows)}")
        for by, words in _BY.items()
    ]
    compared = [outcome for row in rows for outcome, *_ in row["outcomes"].values()]
    results = ", ".join(f"{compared.count(word):,} {meaning}" for word, meaning in (
        ("agrees", "agree with eager"), ("as sdpa", "agree with PyTorch's attention but not with eager"),
        ("differs", "differ"), ("refused", "are refused"), ("broken", "end in another error"),
    ))  # fmt: skip
    named = " and ".join(f"{name} {version}" for name, version in versions.items())
    who = table((("who computes attention", 40), ("architectures", 13), ("classes", 7)), counts)
    return f"With {named}. Of the comparisons that eager itself can run, {results}.\n\n{who}"


def _agreeing(rows: list[Row]) -> Iterable[str]:
    """A line for each set of scenarios in which classes agree, the largest set first."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        agreed = tuple(s for s in SCENARIOS if row["outcomes"].get(s, [""])[0] == "agrees")
        groups.setdefault(agreed, []).append(row)
    for agreed, same in sorted(groups.items(), key=lambda item: (-len(item[0]), item[0])):
        if agreed:
            yield f"- **{', '.join(agreed)}** ({len(same)} classes): {_classes(same)}"


def _classes(rows: Iterable[Row]) -> str:
    return ", ".join(sorted({f"`{row['class']}`" for row in rows}))


def _families(rows: Iterable[Row]) -> str:
    return ", ".join(sorted({f"`{row['family']}`" for row in rows})) + "."


def _exception(name: str, reason: dict[str, Any], rows: list[Row]) -> str:
    """A reason, and the families and scenarios that it explains."""
    families: dict[str, set[str]] = {}
    example = ""
    for row in rows:
        for scenario, (_, *rest) in row["outcomes"].items():
            if rest and rest[1] == name:
                families.setdefault(row["family"], set()).add(scenario)
                example = example or rest[0]
    words = [f"`{family}`{_where(scenarios)}" for family, scenarios in sorted(families.items())]
    return (
        f"### {plain(reason['title'])}\n\n**{reason['outcome']}**: {plain(reason['because'])}\n\n"
        f"For instance: `{example.replace('`', chr(39))}`\n\n{', '.join(words)}."
    )


def _where(scenarios: set[str]) -> str:
    return "" if scenarios & {"plain", "build"} else f" ({', '.join(s for s in SCENARIOS if s in scenarios)})"
