"""YAML -> Registry: finds the files, reads them, lays overlays over them, and compiles the whole once."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from attnreg import schema
from attnreg.compiler import compile_registry
from attnreg.environment import REGISTRY_VARIABLE, environment_problems
from attnreg.errors import Location, Problem, RegistryError, did_you_mean
from attnreg.parts import Part, Parts
from attnreg.registry import Registry
from attnreg.source import Document

ENTRY_POINTS = "attnreg.registries"
PLUGIN_FILE = "attnreg.yaml"
Overlay = str | os.PathLike[str] | Mapping[str, Any]

_FILES: tuple[tuple[str, type[Any]], ...] = (
    ("vocabulary", schema.VocabularyFile),
    ("backends", schema.BackendsFile),
    ("priorities", schema.PrioritiesFile),
    ("invariants", schema.InvariantsFile),
)


class RegistryWarning(UserWarning):
    """Something about the environment that its user surely did not mean."""


def load_registry(
    source: str | os.PathLike[str] | None = None, overlays: Sequence[Overlay] = (), *, trust: Iterable[str] = ()
) -> Registry:
    """The registry from a source, changed by overlays in their order.

    source: None for ``$ATTNREG_REGISTRY`` or else the default; the name of a bundled registry (`bundled_registries`); a
    directory that holds backends.yaml and priorities.yaml; or an overlay file, which names what it ``extends``.
    overlays: files, or mappings of the same form. trust: top-level packages outside attnreg from which a row's
    ``module`` may come.

    Packages that declare an ``attnreg.registries`` entry point add their overlay to the default registry.

    Raises `RegistryError` with every problem of every file, each with its place and the cure.
    """
    if source is None:
        source = os.environ.get(REGISTRY_VARIABLE) or "default"
    reading = _Reading(trusted=set(trust))
    reading.add_source(source)
    for overlay in overlays:
        reading.add_overlay(*_overlay_document(overlay))
    return reading.compile()


def bundled_registries() -> dict[str, Path]:
    """Name -> directory of every registry that comes with attnreg."""
    root = registry_root()
    engines = root / "engines"
    found = {"default": root}
    if engines.is_dir():
        found |= {p.name: p for p in sorted(engines.iterdir()) if (p / "backends.yaml").is_file()}
    return found


def registry_root() -> Path:
    """The directory of the data: inside the package in a wheel, beside it in a checkout and an editable install."""
    package = Path(__file__).resolve().parent
    for place in (package / "registry", package.parent / "registry"):
        if (place / "vocabulary.yaml").is_file():
            return place
    raise RegistryError([_file_problem(str(package), "attnreg was installed without its registry: install it again")])


_default: Registry | None = None
_lock = threading.Lock()


def default_registry() -> Registry:
    """The registry that `select` uses when it is given none: loaded once, with the environment's oddities reported."""
    global _default
    if _default is None:
        with _lock:
            if _default is None:
                registry = load_registry()
                for message in environment_problems(os.environ, registry.vocabulary):
                    warnings.warn(message, RegistryWarning, stacklevel=3)
                _default = registry
    return _default


@dataclass
class _Reading:
    """What has been read so far for one registry."""

    trusted: set[str]
    name: str = "default"
    parts: Parts = field(default_factory=Parts)
    documents: list[Document] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add_source(self, source: str | os.PathLike[str], seen: tuple[str, ...] = ()) -> None:
        text = os.fspath(source)
        if text in seen:
            chain = " -> ".join((*seen, text))
            raise RegistryError([_file_problem(text, f"registries extend each other in a circle: {chain}")])
        known = bundled_registries()
        path = Path(text)
        if text in known:
            self.name = text
            label = "registry" if text == "default" else f"registry/engines/{text}"
            self.add_directory(known[text], label)
            if text == "default":
                self._add_plugins()
        elif path.is_dir():
            self.name = path.resolve().name
            self.add_directory(path, text.rstrip("/"))
        elif path.is_file():
            document = self._read(path, text)
            if document is not None:
                self.add_overlay(document, path.stem, base=(*seen, text))
        else:
            help_ = did_you_mean(text, known)
            message = f"`{text}` is neither a bundled registry nor a directory nor a file"
            raise RegistryError([Problem(Location(text, 1, 1), message, help_)])

    def add_directory(self, path: Path, label: str) -> None:
        for kind, model in _FILES:
            file = path / f"{kind}.yaml"
            if file.is_file():
                document = self._read(file, f"{label}/{kind}.yaml")
                if document is not None:
                    self._add_file(kind, model, document)
            elif kind == "vocabulary":
                self._add_vocabulary_of("default")
            elif kind in ("backends", "priorities"):
                self.problems.append(_file_problem(str(file), f"{kind}.yaml is missing from the registry"))

    def _read(self, path: Path, label: str) -> Document | None:
        try:
            return Document.load(path, label)
        except RegistryError as e:
            self.problems += e.problems
            return None

    def _add_file(self, kind: str, model: type[Any], document: Document) -> None:
        self.documents.append(document)
        data = schema.validate(model, document.data, document)
        self.problems += document.problems
        if data is None:
            return
        part = Part(data, document)
        if kind == "vocabulary":
            if data.extends:
                self._add_vocabulary_of(data.extends)
            self.parts.vocabulary.append(part)
        elif kind == "backends":
            self.parts.sources.append(Part(data.sources, document, ("sources",)))
            self.parts.backends.append(part)
        elif kind == "priorities":
            self.parts.orders.append(Part(data.root, document))
        else:
            self.parts.invariants += [Part(item, document, ("invariants", i)) for i, item in enumerate(data.invariants)]

    def _add_vocabulary_of(self, name: str) -> None:
        known = bundled_registries()
        if name not in known:
            self.problems.append(
                _file_problem(name, f"no bundled registry `{name}` to extend; {did_you_mean(name, known)}")
            )
            return
        label = "registry" if name == "default" else f"registry/engines/{name}"
        document = self._read(known[name] / "vocabulary.yaml", f"{label}/vocabulary.yaml")
        if document is not None:
            self._add_file("vocabulary", schema.VocabularyFile, document)

    def add_overlay(self, document: Document, name: str, base: tuple[str, ...] | None = None) -> None:
        """Lay an overlay over what was read; with ``base`` it is a source itself and brings what it extends."""
        data = schema.validate(schema.OverlayFile, document.data, document)
        if data is None:
            self.problems += document.problems
            if base is not None:
                self.add_source("default")
            return
        if base is not None:
            self.add_source(data.extends, base)
        if not document.data:
            return
        self.documents.append(document)
        if set(document.data) - {"extends"}:
            self.name = f"{self.name}+{name}"
        parts = self.parts
        if data.vocabulary.model_fields_set:
            parts.vocabulary.append(Part(data.vocabulary, document, ("vocabulary",)))
        parts.sources.append(Part(data.sources, document, ("sources",)))
        known = {row for part in parts.backends for row in part.model.backends}
        known |= {str(part.path[-1]) for part in parts.patches if isinstance(part.model, schema.BackendData)}
        for row, raw in data.backends.items():
            model: type[Any] = schema.BackendPatch if row in known else schema.BackendData
            change = schema.validate(model, raw, document, ("backends", row))
            if change is not None:
                parts.patches.append(Part(change, document, ("backends", row)))
        parts.overlay_orders.append(Part(data.orders, document, ("orders",)))
        parts.places += [Part(item, document, ("place", i)) for i, item in enumerate(data.place)]
        parts.choices += [Part(item, document, ("choices", i)) for i, item in enumerate(data.choices)]
        parts.invariants += [Part(item, document, ("invariants", i)) for i, item in enumerate(data.invariants)]
        self.problems += document.problems

    def _add_plugins(self) -> None:
        for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda p: p.name):
            root = point.value.partition(".")[0]
            spec = importlib.util.find_spec(root)
            places = list(spec.submodule_search_locations or ()) if spec else []
            files = [Path(p, *point.value.split(".")[1:], PLUGIN_FILE) for p in places]
            file = next((f for f in files if f.is_file()), None)
            label = f"{point.value}/{PLUGIN_FILE}"
            if file is None:
                message = f"the {ENTRY_POINTS} entry point `{point.name}` names a package without {PLUGIN_FILE}"
                self.problems.append(_file_problem(label, message))
                continue
            # whoever installed the package trusted it: its rows may name its own modules
            self.trusted.add(root)
            document = self._read(file, label)
            if document is not None:
                self.add_overlay(document, point.name)

    def compile(self) -> Registry:
        if self.problems:
            raise RegistryError(self.problems)
        data = [d.data for d in self.documents]
        digest = hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()
        files = tuple(d.file for d in self.documents)
        return compile_registry(self.name, digest[:7], self.parts, frozenset(self.trusted), files)


def _overlay_document(overlay: Overlay) -> tuple[Document, str]:
    if isinstance(overlay, Mapping):
        text = yaml.safe_dump(_plain(overlay), sort_keys=False, default_flow_style=None, width=120)
        return Document(text, "<overlay>"), "overlay"
    path = Path(overlay)
    return Document.load(path, os.fspath(overlay)), path.stem


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in (sorted(value) if isinstance(value, set | frozenset) else value)]
    return value


def _file_problem(file: str, message: str) -> Problem:
    return Problem(Location(file, 1, 1), message)
