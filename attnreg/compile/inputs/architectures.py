"""Reads architectures.yaml: the classes of models that a release of an engine serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from attnreg.compile.inputs.bundled import bundled_registries, help_for_registry
from attnreg.compile.schema.architectures import ArchitecturesFile, ServedData
from attnreg.compile.source.yaml_source import Document, Path_
from attnreg.compile.validation import validate
from attnreg.errors import did_you_mean
from attnreg.files import kind_of
from attnreg.language.engine.architectures import Architectures
from attnreg.language.frozen import FrozenDict

FILE = "architectures.yaml"
# a path and its label in messages -> its document; None if it cannot be read
Read = Callable[[Path, str], Document | None]
_GONE = "gone"


def read_architectures(
    path: Path, label: str, sources: Mapping[str, object], read: Read, above: tuple[Path, ...] = ()
) -> tuple[Architectures | None, list[Document]]:
    """The table in the architectures.yaml of a directory, and the documents that it was read from, the last on top.

    sources: the names of sources that the file may cite. above: the directories of the files that extend this one.
    Problems are those of the documents.
    """
    if not kind_of(path / FILE) or (document := read(path / FILE, f"{label}/{FILE}")) is None:
        return None, []
    data = validate(ArchitecturesFile, document.data, document)
    if data is None:
        return None, [document]
    if data.source.partition(":")[0] not in sources:
        document.problems.append(document.problem(("source",), "unknown source", did_you_mean(data.source, sources)))
    below, documents = None, list[Document]()
    if data.extends is not None:
        bundled = bundled_registries()
        if data.extends not in bundled or bundled[data.extends] in (path, *above):
            circle = "files extend each other in a circle"
            message = circle if data.extends in bundled else f"no bundled registry `{data.extends}` to extend"
            document.problems.append(document.problem(("extends",), message, help_for_registry(data.extends)))
            return None, [document]
        lower = bundled[data.extends]
        below, documents = read_architectures(lower, f"registry/engines/{data.extends}", sources, read, (*above, path))
    names = dict(below.names) if below else {}
    seen: dict[str, str] = {}
    for word, about, name, line in _named(data.served, document):
        if name in seen:
            message = f"{name} is {seen[name]} already"
            document.problems.append(document.problem(("served", word), message, "keep it under one word", key=True))
        seen[name] = word
        if word != _GONE:
            names[name] = word, about, document.file, line
        elif names.pop(name, None) is None:
            message = f"there is no {name} to take away"
            document.problems.append(document.problem(("served", word), message, did_you_mean(name, names), key=True))
    suffixes = tuple(data.suffixes) or (below.suffixes if below else ())
    return Architectures(FrozenDict(names), suffixes), [*documents, document]


def _named(served: ServedData, document: Document) -> Iterator[tuple[str, str, str, int]]:
    """Each name with its word, the key below the word ("" without one), and its line."""
    for word in ServedData.model_fields:
        block = getattr(served, word)
        for about, text in block.items() if isinstance(block, dict) else [("", block)]:
            path: Path_ = ("served", word, *([about] if about else []))
            # a block of text begins on the line after its key
            for i, name in enumerate(text.splitlines(), 1):
                yield word, about, name.strip(), document.at(*path).line + i
