"""Reads the files of a registry and of the overlays on it, as documents and parts for the compiler."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from attnreg.compile.compiler import compile_registry
from attnreg.compile.inputs.architectures import read_architectures
from attnreg.compile.inputs.bundled import (
    RELEASE_FILE,
    bundled_registries,
    bundled_source,
    help_for_registry,
    release_name,
    source_text,
)
from attnreg.compile.inputs.measured import with_devices
from attnreg.compile.inputs.overlays import Overlay as Overlay
from attnreg.compile.inputs.overlays import OverlayDocument, as_text
from attnreg.compile.inputs.plugins import PLUGIN_FILE, Plugin
from attnreg.compile.parts import RegistryParts, RowData
from attnreg.compile.schema import releases
from attnreg.compile.schema import tables as schema
from attnreg.compile.schema.architectures import ArchitecturesFile
from attnreg.compile.schema.steps import StepsFile
from attnreg.compile.source.quoting import FileKind
from attnreg.compile.source.yaml_source import Document, as_written, shown
from attnreg.compile.validation import FilePart, keys_of, validate
from attnreg.errors import Location, Problem, RegistryError
from attnreg.files import ALLOW, kind_of
from attnreg.registry import Registry

# the longest chain of overlays that extend each other
MAX_EXTENDS = 16

_FILES: tuple[tuple[str, type[BaseModel]], ...] = (
    ("vocabulary", schema.VocabularyFile),
    ("backends", schema.BackendsFile),
    ("priorities", schema.PrioritiesFile),
    ("steps", StepsFile),
    ("invariants", schema.InvariantsFile),
)
# the outermost keys of a file of orders are platforms, which are words of the data
_ORDERS = FileKind("list of orders", frozenset({"order"}), within=True)
_KINDS = {
    kind: FileKind(f"{kind} of a registry", frozenset(keys_of(model))) if keys_of(model) else _ORDERS
    for kind, model in _FILES
}
_RELEASE = FileKind("release of a registry", frozenset(keys_of(releases.ReleaseFile)))
_SERVED = FileKind("list of architectures", frozenset(keys_of(ArchitecturesFile)))
_OVERLAY = FileKind("overlay", frozenset(keys_of(schema.OverlayFile)))


@dataclass
class Reading:
    """The data of one registry, as far as it is read. ``complete`` is False if a file or a word was left out.

    ``plugins`` are the plugins that take part if they extend the source. ``allow_outside`` lets data name any file.
    Without it data may name bundled registries, and files below the directory of the naming file. ``base`` is the
    source below all overlays, ``extended`` the bundled registry that plugins may extend. ``places`` has the identities
    of the sources and overlays that were read.
    """

    trusted: set[str]
    plugins: Sequence[Plugin] = ()
    allow_outside: bool = False
    name: str = "default"
    base: str = ""
    extended: str | None = None
    complete: bool = True
    places: set[tuple[int, int] | None] = field(default_factory=set)
    parts: RegistryParts = field(default_factory=RegistryParts)
    documents: list[Document] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add_source(self, text: str, hint: str = "", above: tuple[OverlayDocument, ...] = ()) -> None:
        """Read a bundled registry, a directory, or an overlay file with the registry that it extends.

        above: the chain of overlays that extend this source, the last one directly.
        """
        bundled = bundled_registries()
        text = release_name(text)
        path = above[-1].path_of(text) if above else bundled_source(text) or Path(text)
        self.base = self.base or (text if text in bundled else source_text(path))
        if above and self._leads_out(text, above[-1]):
            return
        if not text or not kind_of(path):
            message = f"`{text}` is neither a bundled registry nor a directory nor a file{hint}"
            self._fail(text, message, help_for_registry(text), above)
            return
        place = _place(path)
        if place is not None and place in [_place(overlay.file) for overlay in above if overlay.file]:
            chain = " -> ".join(str(file) for file in (*(overlay.file for overlay in above), path))
            self._fail(text, f"registries extend each other in a circle: {chain}", above=above)
        elif len(above) > MAX_EXTENDS:
            self._fail(text, f"more than {MAX_EXTENDS} overlays extend each other", above=above)
        elif os.path.isdir(path):
            self.places.add(place)
            self.name = text if text in bundled else path.resolve().name
            if text in bundled:
                self.add_directory(path, _label(text))
                self._add_plugins(text)
            else:
                self.add_directory(path, str(path), below=path)
        elif (overlay := self.open(path)) is not None:
            self._apply_overlay(overlay, (*above, overlay))

    def open(self, overlay: Overlay) -> OverlayDocument | None:
        """Read the document of an overlay; None if it cannot be read."""
        file = None if isinstance(overlay, Mapping) else Path(os.fsdecode(overlay))
        kind = None if file is None else _OVERLAY
        document = self._read(file or overlay, "<overlay>" if file is None else str(file), kind)  # type: ignore[arg-type]
        if document is None:
            return None
        opened = OverlayDocument(document, "overlay" if file is None else file.stem, file)
        if file is not None and document.data in (None, {}):
            self._fail_empty(opened)
            return None
        if isinstance(document.data, dict) and isinstance(document.data.get("extends"), list):
            message = "extends: an overlay extends one registry; a list is for the file of a plugin"
            self._fail(document.file, message, "name one registry", (opened,))
        return opened

    def add_directory(self, path: Path, label: str, below: Path | None = None) -> None:
        """Read the files of a directory; without a vocabulary.yaml it gets the default registry's.

        below: links must not lead out of this directory; None for attnreg's own directories.
        """
        documents = self._documents(path, label, below=below)
        for kind, model in _FILES if self.complete or documents else ():
            document = documents.get(kind)
            if document is not None:
                self._add_file(model, document)
            elif kind in documents:
                continue
            elif kind == "vocabulary":
                self._add_vocabulary("default")
            elif kind in ("backends", "priorities"):
                message = "the file is missing: a registry has a backends.yaml and a priorities.yaml"
                self._fail(f"{label}/{kind}.yaml", message)
        self._add_architectures(path, label, below)

    def _add_architectures(self, path: Path, label: str, below: Path | None) -> None:
        """Read the classes of models that the engine serves, if the directory has them."""
        sources = {key: source for part in self.parts.sources for key, source in part.model.items()}
        found, documents = read_architectures(path, label, sources, lambda p, name: self._read(p, name, _SERVED, below))
        self.parts.architectures = found
        self.problems += (problem for document in documents for problem in document.problems)
        self.documents += documents

    def _documents(
        self, path: Path, label: str, above: tuple[Path, ...] = (), below: Path | None = None
    ) -> dict[str, Document | None]:
        """Kind -> the document of each file of a directory, None if it cannot be read; empty for a broken release.

        above: the directories of releases that are differences to this one.
        """
        there = [kind for kind, _ in _FILES if kind_of(path / f"{kind}.yaml")]
        whole = {kind: self._read(path / f"{kind}.yaml", f"{label}/{kind}.yaml", _KINDS[kind], below) for kind in there}
        if not kind_of(path / RELEASE_FILE):
            return whole
        release = self._read(path / RELEASE_FILE, f"{label}/{RELEASE_FILE}", _RELEASE, below)
        data = None if release is None else validate(releases.ReleaseFile, release.data, release)
        if release is None or data is None or release.problems:
            self.problems += release.problems if release else ()
            self.complete = False
            return {}
        bundled = bundled_registries()
        overlay = OverlayDocument(release, path.name)
        if data.extends not in bundled or bundled[data.extends] in (path, *above):
            circle = "releases are differences to each other in a circle"
            message = circle if data.extends in bundled else f"no bundled registry `{data.extends}` to extend"
            self._fail(data.extends, message, help_for_registry(data.extends), (overlay,))
            return {}
        documents = self._documents(bundled[data.extends], _label(data.extends), (*above, path))
        self.documents.append(release)
        for part in releases.PARTS if documents else ():
            if part in release.data and release.data[part] is None:
                documents.pop(part, None)
            elif part in release.data:
                documents[part] = changed = releases.ReleaseDocument(documents.get(part), release, part)
                self.problems += changed.problems
                changed.problems.clear()
        for part in whole.keys() & release.data.keys():
            message = f"{part} is changed here, and {part}.yaml beside it stands for the one below: keep one"
            self.problems.append(release.problem((part,), message, key=True))
        return documents | whole if documents else {}

    def add_overlay(self, overlay: OverlayDocument) -> None:
        """Apply an overlay to the data read so far. If it has `extends`, that registry must be part of the data."""
        extends = overlay.extends
        if extends is not None and self.places:
            path = overlay.path_of(extends)
            if self._leads_out(extends, overlay):
                return
            if not extends or not kind_of(path):
                message = f"`{extends}` is neither a bundled registry nor a directory nor a file"
                self._fail(extends, message, help_for_registry(extends), (overlay,))
            elif _place(path) not in self.places:
                alone = f", or use it alone: --registry {overlay.file}" if overlay.file else ""
                help_ = f"remove `extends`, if the overlay is meant for any registry{alone}"
                message = f"the overlay extends {extends}, and it is laid over {self.name}"
                self._fail(extends, message, help_, (overlay,))
        self._apply_overlay(overlay)

    def compile(self) -> Registry:
        if not self.complete:
            raise RegistryError(self.problems)
        # unsorted keys: the order of architectures and of facets has a meaning
        data = json.dumps([d.data for d in self.documents])
        digest = hashlib.sha256(data.encode()).hexdigest()
        files = tuple(d.file for d in self.documents)
        trusted = frozenset(self.trusted)
        registry = with_devices(compile_registry(self.name, digest[:7], self.parts, trusted, files, self.problems))
        return replace(registry, base=self.base)

    def _leads_out(self, source: str, overlay: OverlayDocument) -> bool:
        """Whether an overlay names a forbidden file. Reports it as a problem."""
        why = "" if self.allow_outside else overlay.leads_out(source)
        if why:
            message = f"extends: {why}: an overlay names bundled registries, and files below its own directory"
            self._fail(overlay.document.file, message, f"move the file; or {ALLOW}", (overlay,))
        return bool(why)

    def _read(
        self, file: Path | Mapping[str, Any], label: str, kind: FileKind | None = None, below: Path | None = None
    ) -> Document | None:
        """The document of a file or of a mapping; None if it cannot be read, which is reported.

        below: a link must not lead out of this directory.
        """
        try:
            if not isinstance(file, Path):
                return Document(as_text(file), label)
            return Document.load(file, label, kind, None if self.allow_outside else below)
        except RegistryError as e:
            self.problems += e.problems
            self.complete = False
            return None

    def _fail_empty(self, overlay: OverlayDocument) -> None:
        """Report an empty file, which would be an overlay without effect on the default registry."""
        help_ = f"an overlay has some of these keys: {', '.join(sorted(schema.OverlayFile.model_fields))}"
        self._fail(overlay.document.file, "the overlay says nothing", help_)

    def _fail(self, file: str, message: str, help_: str = "", above: tuple[OverlayDocument, ...] = ()) -> None:
        """Report a problem that prevents compilation; its place is the `extends` of the last document in ``above``."""
        document = above[-1].document if above else None
        path = ("extends",)
        problem = document.problem(path, message, help_) if document else Problem(Location(file, 1, 1), message, help_)
        self.problems.append(problem)
        self.complete = False

    def _add_file(self, model: type[BaseModel], document: Document, borrowed: bool = False) -> None:
        self.documents.append(document)
        data = validate(model, document.data, document)
        self.problems += document.problems
        if data is None or (model is schema.VocabularyFile and document.problems):
            self.complete = False
            return
        part = FilePart(data, document, borrowed=borrowed)
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
            case StepsFile():
                self.parts.steps.append(part.piece(data))
            case schema.InvariantsFile():
                self._add_invariants(part, data)

    def _add_invariants(self, part: FilePart[object], data: schema.InvariantsFile | schema.OverlayFile) -> None:
        self.parts.invariants += [part.piece(item, "invariants", i) for i, item in enumerate(data.invariants)]
        self.parts.known += [part.piece(item, "known", i) for i, item in enumerate(data.known)]
        self.parts.bound += [self.parts.rows()] * len(data.invariants)

    def _note_broken(self, document: Document, data: schema.BackendsFile | schema.OverlayFile) -> None:
        """Collect the rows and sources that validation left out, so that naming one is not a second problem."""
        for key in ("backends", "sources"):
            written = document.data.get(key)
            self.parts.broken |= (written if isinstance(written, dict) else {}).keys() - getattr(data, key).keys()

    def _add_vocabulary(self, name: str, by: Document | None = None) -> None:
        bundled = bundled_registries()
        if name not in bundled:
            above = (OverlayDocument(by, name),) if by else ()
            self._fail(name, f"no bundled registry `{name}` to extend", help_for_registry(name), above)
            return
        document = self._read(bundled[name] / "vocabulary.yaml", f"{_label(name)}/vocabulary.yaml")
        if document is not None:
            self._add_file(schema.VocabularyFile, document, borrowed=True)

    def _apply_overlay(self, overlay: OverlayDocument, above: tuple[OverlayDocument, ...] = ()) -> None:
        """Apply an overlay. If ``above`` ends with it, it is the source: read the registry that it extends first."""
        document = overlay.document
        data = validate(schema.OverlayFile, document.data, document)
        if above:
            self.add_source("default" if overlay.extends is None else overlay.extends, above=above)
        self.places.add(_place(overlay.file) if overlay.file else None)
        written = document.data if isinstance(document.data, dict) else {}
        if data is None or (document.problems and "vocabulary" in written):
            self.problems += document.problems
            self.complete = False
            return
        if not any(value for key, value in written.items() if key != "extends"):
            self.problems += document.problems
            return
        self.documents.append(document)
        self.name = f"{self.name}+{overlay.name}"
        self._note_broken(document, data)
        self._add_overlay_parts(FilePart(data, document))
        self.problems += document.problems

    def _add_overlay_parts(self, part: FilePart[schema.OverlayFile]) -> None:
        data, document, parts = part.model, part.document, self.parts
        if data.vocabulary.extends:
            path, message = ("vocabulary", "extends"), "an overlay says at its top what it extends, as a whole"
            self.problems.append(document.problem(path, message, key=True))
        if data.vocabulary.model_fields_set:
            parts.vocabulary.append(part.piece(data.vocabulary, "vocabulary"))
        parts.sources.append(part.piece(data.sources, "sources"))
        existing = parts.rows()
        for row, raw in data.backends.items():
            # only a new backend has the keys `platforms` and `attention`
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
        self._add_invariants(part, data)

    def _add_plugins(self, registry: str) -> None:
        """Apply the plugins that extend a bundled registry."""
        self.extended = registry
        for plugin in self.plugins:
            document = self._read(plugin.file, plugin.label, _OVERLAY) if plugin.file else None
            if plugin.file is None:
                self._fail(plugin.label, f"there is no package {plugin.value} with a file {PLUGIN_FILE}")
            if document is None:
                continue
            overlay = OverlayDocument(document, plugin.name, plugin.file)
            if document.data in (None, {}):
                self._fail_empty(overlay)
                continue
            names = document.data.get("extends", "default") if isinstance(document.data, dict) else "default"
            names = names if isinstance(names, list) else [names]
            bundled = bundled_registries()
            for name in (n for n in names if not isinstance(n, str) or n not in bundled):
                message = f"a plugin extends bundled registries, and {shown(name)} is none"
                self._fail(plugin.label, message, help_for_registry(as_written(name)), (overlay,))
            if registry in names:
                # an installed package is trusted: its rows may name its own modules
                self.trusted.add(plugin.package)
                self._apply_overlay(overlay)


def _place(path: Path) -> tuple[int, int] | None:
    """The identity of a file or a directory, equal for every path to it."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _label(name: str) -> str:
    """The name of a bundled registry's directory in messages."""
    return "registry" if name == "default" else f"registry/engines/{name}"
