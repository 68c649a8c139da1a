"""What the codes of findings mean: codes.yaml, as `attnreg check --explain` and docs/findings.md print it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attnreg.compile.source.yaml_source import Document

_FILE = Path(__file__).with_name("codes.yaml")


@dataclass(frozen=True, slots=True)
class FindingCode:
    """A code: what it says, why that matters, how to mend it, and a line that shows it.

    ``of`` describes the names of its subject, ``group`` is the title of the codes that it stands among.
    """

    name: str
    group: str
    of: tuple[str, ...]
    says: str
    matters: str
    mend: str
    example: str


@functools.cache
def codes() -> Mapping[str, FindingCode]:
    """Name -> code, group by group."""
    groups = Document.load(_FILE, f"{_FILE.parent.name}/{_FILE.name}").data
    return {
        name: FindingCode(name, group["title"], tuple(data.pop("of")), **data)
        for group in groups
        for name, data in ((name, dict(data)) for name, data in group["codes"].items())
    }


def code_lines(code: FindingCode) -> list[str]:
    """A code in words, line by line."""
    subject = f" [{', '.join(code.of)}]" if code.of else ""
    return [
        f"{code.name}{subject}",
        f"  {code.says}",
        f"  why it matters: {code.matters}",
        f"  to mend it: {code.mend}",
        f"  for example: {code.example}",
    ]


def list_lines() -> list[str]:
    """All codes, each with its sentence, below the titles of their groups."""
    lines: list[str] = []
    width = max(map(len, codes()))
    for code in codes().values():
        if f"{code.group}:" not in lines:
            lines += [*([""] if lines else []), f"{code.group}:"]
        lines.append(f"  {code.name:<{width}}  {code.says}")
    return lines
