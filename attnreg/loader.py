"""Loads a registry: finds its YAML files, applies overlays, compiles the result. Also imports kernel modules."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from attnreg.compile import schema
from attnreg.compile.bundled import registry_root
from attnreg.compile.compiler import compile_registry
from attnreg.compile.parts import Part, Parts, RowData
from attnreg.compile.validation import validate
from attnreg.compile.yaml_source import Document
from attnreg.environment import REGISTRY_VARIABLE, environment_problems
from attnreg.errors import Location, Problem, RegistryError, did_you_mean
from attnreg.registry import Registry

ENTRY_POINTS = "attnreg.registries"
PLUGIN_FILE = "attnreg.yaml"
Overlay = str | os.PathLike[str] | Mapping[str, Any]

_FILES: tuple[tuple[str, type[BaseModel]], ...] = (
    ("vocabulary", schema.VocabularyFile),
    ("backends", schema.BackendsFile),
    ("priorities", schema.PrioritiesFile),
    ("invariants", schema.InvariantsFile),
)


class RegistryWarning(UserWarning):
    """Warns of an environment variable that looks meant for attnreg and has no effect."""


def load_registry(
    source: str | os.PathLike[str] | None = None,
    overlays: Overlay | Sequence[Overlay] = (),
    *,
    trust: Iterable[str] = (),
) -> Registry:
    """The registry that a source names, changed by overlays in the order given.

    source: None for ``$ATTNREG_REGISTRY`` or else the default; the name of a bundled registry (`bundled_registries`); a
    directory that holds backends.yaml and priorities.yaml; or an overlay file, which names what it ``extends``.
    overlays: one or more files, or mappings of the same form; a later one may change what an earlier one states. trust:
    top-level packages outside attnreg from which a row's ``module`` may come.

    Packages that declare an ``attnreg.registries`` entry point add their overlay to the default registry.

    Raises `RegistryError` with every problem of every file, each with its location and a cure.
    """
    reading = _Reading(trusted={trust} if isinstance(trust, str) else set(trust))
    if source is None:
        reading.add_source(os.environ.get(REGISTRY_VARIABLE) or "default", f"; ${REGISTRY_VARIABLE} names it")
    else:
        reading.add_source(os.fsdecode(source))
    for overlay in [overlays] if isinstance(overlays, str | os.PathLike | Mapping) else overlays:
        reading.add_overlay(overlay)
    return reading.compile()


def bundled_registries() -> dict[str, Path]:
    """Name -> directory of every registry that comes with attnreg."""
    root = registry_root()
    engines = root / "engines"
    directories = {"default": root}
    if engines.is_dir():
        directories |= {p.name: p for p in sorted(engines.iterdir()) if (p / "backends.yaml").is_file()}
    return directories


_default: Registry | None = None
_lock = threading.Lock()


def default_registry() -> Registry:
    """The registry that `select` uses by default. The first call loads it and warns of variables without effect."""
    global _default
    if _default is None:
        with _lock:
            if _default is None:
                _default = load_registry()
                # after the assignment, so that a warning that is an error is raised only once
                for message in environment_problems(os.environ, _default.vocabulary):
                    warnings.warn(message, RegistryWarning, stacklevel=3)
    return _default


def load_kernel(registry: Registry, backend: str) -> ModuleType:
    """The kernel module of a backend, imported. Raises ImportError with the reason where there is none to import."""
    row = registry.backends[backend]
    if row.module is None:
        raise ImportError(f"{backend} has no kernel module in {registry.title}: the row is knowledge only")
    if not registry.imports:
        raise ImportError(f"{backend} is served by {row.module} of another engine; {registry.title} imports nothing")
    return importlib.import_module(row.module)


@dataclass
class _Reading:
    """The data of one registry, as far as it is read. ``complete`` is False once a file or a word was left out."""

    trusted: set[str]
    name: str = "default"
    complete: bool = True
    parts: Parts = field(default_factory=Parts)
    documents: list[Document] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add_source(self, text: str, hint: str = "", above: tuple[Path, ...] = (), by: Document | None = None) -> None:
        """Read a bundled registry, a directory, or an overlay file and what it extends.

        above: the chain of overlay files that extend this source, the last one directly. by: the document of that one.
        """
        bundled = bundled_registries()
        path = Path(*(p.parent for p in above[-1:]), text)
        if text in bundled:
            self.name = text
            self.add_directory(bundled[text], _label(text))
            if text == "default":
                self._add_plugins()
        elif text and os.path.isdir(path):
            self.name = path.resolve().name
            self.add_directory(path, str(path))
        elif any(os.path.isfile(path) and path.samefile(other) for other in above):
            chain = " -> ".join(map(str, (*above, path)))
            self._fail(text, f"registries extend each other in a circle: {chain}", by=by)
        elif os.path.isfile(path):
            document = self._read(path, str(path))
            if document is not None:
                self._apply_overlay(document, path.stem, (*above, path))
        else:
            message = f"`{text}` is neither a bundled registry nor a directory nor a file{hint}"
            self._fail(text, message, did_you_mean(text, bundled), by)

    def add_directory(self, path: Path, label: str) -> None:
        """Read the files of a directory; without a vocabulary.yaml, that of the default registry."""
        for kind, model in _FILES:
            file, name = path / f"{kind}.yaml", f"{label}/{kind}.yaml"
            if os.path.isfile(file):
                document = self._read(file, name)
                if document is not None:
                    self._add_file(model, document)
            elif kind == "vocabulary":
                self._add_vocabulary("default")
            elif kind in ("backends", "priorities"):
                self._fail(name, "the file is missing: a registry has a backends.yaml and a priorities.yaml")

    def add_overlay(self, overlay: Overlay) -> None:
        """Read an overlay, a file or a mapping of the same form, and apply it."""
        file = overlay if isinstance(overlay, Mapping) else Path(os.fsdecode(overlay))
        label, name = (str(file), file.stem) if isinstance(file, Path) else ("<overlay>", "overlay")
        document = self._read(file, label)
        if document is not None:
            self._apply_overlay(document, name)

    def compile(self) -> Registry:
        if not self.complete:
            raise RegistryError(self.problems)
        # keys stay unsorted: the order of architectures and of facets has a meaning
        data = json.dumps([d.data for d in self.documents])
        digest = hashlib.sha256(data.encode()).hexdigest()
        files = tuple(d.file for d in self.documents)
        return compile_registry(self.name, digest[:7], self.parts, frozenset(self.trusted), files, self.problems)

    def _read(self, file: Path | Mapping[str, Any], label: str) -> Document | None:
        try:
            return Document.load(file, label) if isinstance(file, Path) else Document(_as_text(file), label)
        except RegistryError as e:
            self.problems += e.problems
            self.complete = False
            return None

    def _fail(self, file: str, message: str, help_: str = "", by: Document | None = None) -> None:
        """Add a problem after which the registry is not compiled. by: the document whose `extends` names the file."""
        problem = by.problem(("extends",), message, help_) if by else Problem(Location(file, 1, 1), message, help_)
        self.problems.append(problem)
        self.complete = False

    def _add_file(self, model: type[BaseModel], document: Document, borrowed: bool = False) -> None:
        self.documents.append(document)
        data = validate(model, document.data, document)
        self.problems += document.problems
        if data is None or (model is schema.VocabularyFile and document.problems):
            self.complete = False
            return
        part = Part(data, document, borrowed=borrowed)
        match data:
            case schema.VocabularyFile():
                if data.extends:
                    self._add_vocabulary(data.extends, document)
                self.parts.vocabulary.append(part.piece(data))
            case schema.BackendsFile():
                self._note_broken(document, data)
                self.parts.sources.append(part.piece(data.sources, "sources"))
                self.parts.backends.append(part.piece(data))
            case schema.PrioritiesFile():
                self.parts.orders.append(part.piece(data.root))
            case schema.InvariantsFile():
                self._add_invariants(part, data.invariants)
                self.parts.known += [part.piece(item, "known", i) for i, item in enumerate(data.known)]

    def _add_invariants(self, part: Part[object], items: list[schema.InvariantData]) -> None:
        self.parts.invariants += [part.piece(item, "invariants", i) for i, item in enumerate(items)]

    def _note_broken(self, document: Document, data: schema.BackendsFile | schema.OverlayFile) -> None:
        """Note the rows and sources that validation left out, so that naming one is not a second problem."""
        for key in ("backends", "sources"):
            written = document.data.get(key)
            self.parts.broken |= (written if isinstance(written, dict) else {}).keys() - getattr(data, key).keys()

    def _add_vocabulary(self, name: str, by: Document | None = None) -> None:
        bundled = bundled_registries()
        if name not in bundled:
            self._fail(name, f"no bundled registry `{name}` to extend", did_you_mean(name, bundled), by)
            return
        document = self._read(bundled[name] / "vocabulary.yaml", f"{_label(name)}/vocabulary.yaml")
        if document is not None:
            self._add_file(schema.VocabularyFile, document, borrowed=True)

    def _apply_overlay(self, document: Document, name: str, above: tuple[Path, ...] = ()) -> None:
        """Apply an overlay. One that is itself a source (``above`` ends with it) first reads what it extends."""
        data = validate(schema.OverlayFile, document.data, document)
        if above:
            self.add_source(data.extends if data else "default", above=above, by=document)
        written = document.data if isinstance(document.data, dict) else {}
        if data is None or (document.problems and "vocabulary" in written):
            self.problems += document.problems
            self.complete = False
            return
        if not any(value for key, value in written.items() if key != "extends"):
            self.problems += document.problems
            return
        self.documents.append(document)
        self.name = f"{self.name}+{name}"
        self._note_broken(document, data)
        self._add_overlay_parts(Part(data, document))
        self.problems += document.problems

    def _add_overlay_parts(self, part: Part[schema.OverlayFile]) -> None:
        data, document, parts = part.model, part.document, self.parts
        if data.vocabulary.extends:
            path, message = ("vocabulary", "extends"), "an overlay says at its top what it extends, as a whole"
            self.problems.append(document.problem(path, message, key=True))
        if data.vocabulary.model_fields_set:
            parts.vocabulary.append(part.piece(data.vocabulary, "vocabulary"))
        parts.sources.append(part.piece(data.sources, "sources"))
        existing = {row for file in parts.backends for row in file.model.backends}
        existing |= {str(patch.path[-1]) for patch in parts.patches if isinstance(patch.model, schema.BackendData)}
        for row, raw in data.backends.items():
            # only a new backend states its platforms and its kind of attention
            new = row not in existing and not raw.keys().isdisjoint(("platforms", "attention"))
            model: type[RowData] = schema.BackendData if new else schema.BackendPatch
            change = validate(model, raw, document, ("backends", row))
            if change is None:
                parts.broken.add(row)
            else:
                parts.patches.append(part.piece(change, "backends", row))
        parts.overlay_orders.append(part.piece(data.orders, "orders"))
        parts.places += [part.piece(item, "place", i) for i, item in enumerate(data.place)]
        parts.choices += [part.piece(item, "choices", i) for i, item in enumerate(data.choices)]
        self._add_invariants(part, data.invariants)

    def _add_plugins(self) -> None:
        for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda p: p.name):
            package = point.value.partition(":")[0].strip().split(".")
            try:
                spec = importlib.util.find_spec(package[0])
            except (ImportError, ValueError):
                spec = None
            places = list(spec.submodule_search_locations or ()) if spec else []
            file = next((f for p in places if os.path.isfile(f := Path(p, *package[1:], PLUGIN_FILE))), None)
            label = f"<entry point {point.name} = {point.value}>/{PLUGIN_FILE}"
            if file is None:
                self._fail(label, f"there is no package {'.'.join(package)} with a file {PLUGIN_FILE}")
                continue
            # installing a package is trusting it: its rows may name its own modules
            self.trusted.add(package[0])
            document = self._read(file, label)
            if document is not None:
                self._apply_overlay(document, point.name)


def _label(name: str) -> str:
    """The directory of a bundled registry, as messages name it."""
    return "registry" if name == "default" else f"registry/engines/{name}"


def _as_text(overlay: Mapping[str, Any]) -> str:
    """A mapping as JSON, which is YAML too, so that a problem in it has a line and a column."""
    try:
        return json.dumps(overlay, default=_plain, indent=2, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as e:
        problem = Problem(Location("<overlay>", 1, 1), f"the overlay is not plain data: {e}")
        raise RegistryError([problem]) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    raise TypeError(f"a {type(value).__name__} is neither text nor a number, list or mapping")
