"""The generated blocks of docs/field_problems.md: users' problems, and the command that shows each answer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from docs.markdown import plain, table

DATA = "docs/field_problems.yaml"
WIDTHS = (("", 2), ("what goes wrong", 78), ("answered", 8))


def field_problems(root: Path) -> dict[str, Any]:
    """The contents of docs/field_problems.yaml: ``trackers`` and ``problems``."""
    data: dict[str, Any] = yaml.safe_load((root / DATA).read_text(encoding="utf-8"))
    return data


def field_problem_blocks(root: Path) -> dict[str, str]:
    """Name of each generated block -> its Markdown."""
    data = field_problems(root)
    problems = list(enumerate(data["problems"], 1))
    counts = Counter(problem["verdict"] for _, problem in problems)
    rows = [(str(n), f"[{plain(p['title'])}](#{n})", p["verdict"]) for n, p in problems]
    summary = f"{len(problems)} problems: " + ", ".join(f"{counts[word]} {word}" for word in ("yes", "partly", "no"))
    sections = [_section(number, problem, data["trackers"]) for number, problem in problems]
    return {"summary": f"{summary}.\n\n{table(WIDTHS, rows)}", "problems": "\n\n".join(sections)}


def _section(number: int, problem: dict[str, Any], trackers: dict[str, str]) -> str:
    issues = ", ".join(_issue(reference, trackers) for reference in problem["issues"])
    parts = [
        f'<a id="{number}"></a>\n\n### {number}. {plain(problem["title"])}',
        f"{plain(problem['wrong'])} ({issues})",
        f"**{problem['verdict']}**: {plain(problem['answer'])}",
    ]
    parts += [f"What is missing: {plain(problem['missing'])}."] if "missing" in problem else []
    for step in problem.get("shown", ()):
        parts += [_fence(language_of(name), text, name) for name, text in step.get("files", {}).items() if text]
        parts.append(_shown(step))
    return "\n\n".join(parts)


def _issue(reference: str, trackers: dict[str, str]) -> str:
    tracker, _, number = reference.partition("#")
    repository = trackers[tracker]
    return f"[{repository}#{number}](https://github.com/{repository}/issues/{number})"


def language_of(file: str) -> str:
    """The language of a fenced block with a file's text."""
    return {"py": "python", "yaml": "yaml", "json": "json", "log": "text"}[file.rpartition(".")[2]]


def _shown(step: dict[str, Any]) -> str:
    """A command or program, and those lines of its output that the page lists."""
    # a listed text may be only the start of its line
    printed = "\n".join(line.rstrip() for line in step["prints"])
    if "python" in step:
        code = f"```python\n{step['python'].rstrip()}\n```"
        return f"{code}\n\n```text\n{printed}\n```" if printed else code
    status = f"\n(exit status {step['status']})" if "status" in step else ""
    variables = "".join(f"{name}={value} " for name, value in step.get("environment", {}).items())
    return _fence("console", f"$ {variables}{step['run']}\n{printed}{status}".replace("\n\n", "\n"))


def _fence(language: str, text: str, name: str = "") -> str:
    title = f"`{name}`:\n\n" if name else ""
    return f"{title}```{language}\n{text.rstrip()}\n```"
