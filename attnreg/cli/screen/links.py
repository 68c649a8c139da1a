"""Links (OSC 8) from cited lines of data to their files: ``priorities.yaml:84`` opens that file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.segment import Segment

# a file and a line, as messages cite them; the file may have a path before it, and a column may follow
_CITED = re.compile(r"(?<![\w/.@+:-])((?:[\w.@+-]+/|/)*[\w.@+-]+\.(?:ya?ml|jsonl?|sh|log|txt)):(\d{1,9})(?::\d{1,9})?")
# the key of a context's `meta`: the files that the command reads, by name
_FILES = "attnreg.cited"


def cite(files: Iterable[str]) -> None:
    """Lets lines of these files become links in the rest of the command. Messages name bundled files by labels."""
    context = click.get_current_context(silent=True)
    if context is not None:
        known: dict[str, None] = context.meta.setdefault(_FILES, {})
        known.update(dict.fromkeys(files))


def linked(segment: Segment) -> Iterator[Segment]:
    """The segment in parts: each cited line of a file that exists is a link to it."""
    from rich.style import Style

    at = 0
    for match in _CITED.finditer(segment.text):
        path = _path_of(match[1])
        if path is None:
            continue
        if match.start() > at:
            yield segment._replace(text=segment.text[at : match.start()])
        link = Style(link=f"{path.as_uri()}#{match[2]}")
        yield segment._replace(text=match[0], style=link if segment.style is None else segment.style + link)
        at = match.end()
    if at < len(segment.text):
        yield segment._replace(text=segment.text[at:])


def _path_of(name: str) -> Path | None:
    """The file that a text cites; None if there is none, or if the command reads several files of that name."""
    context = click.get_current_context(silent=True)
    cited: Iterable[str] = context.meta.get(_FILES, ()) if context is not None else ()
    if "/" in name:
        return _file(name)
    labels = [label for label in cited if label.rpartition("/")[2] == name] or [name]
    found = {path for label in labels if (path := _file(label)) is not None}
    return found.pop() if len(found) == 1 else None


def _file(label: str) -> Path | None:
    """The file that a label names: a bundled one, else one below the current directory or with an absolute path."""
    from attnreg.compile.inputs.bundled import registry_root

    try:
        bundled = registry_root().parent / label if label.startswith("registry/") else Path(label)
        return next((path.resolve() for path in (bundled, Path(label)) if path.is_file()), None)
    except (OSError, ValueError):
        return None
