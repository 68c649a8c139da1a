"""OverlayDocument: an overlay from a file or a mapping, and the check of the files that it names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnreg.compile.inputs.bundled import bundled_source
from attnreg.compile.source.quoting import cut
from attnreg.compile.source.yaml_source import Document
from attnreg.errors import Location, Problem, RegistryError
from attnreg.files import outside

Overlay = str | os.PathLike[str] | Mapping[str, Any]


@dataclass(frozen=True)
class OverlayDocument:
    """One overlay: its document, its name, and its file; None for a mapping."""

    document: Document
    name: str
    file: Path | None = None

    @property
    def extends(self) -> str | None:
        """The registry under the overlay's key `extends`, None without the key."""
        data = self.document.data
        extends = data.get("extends") if isinstance(data, dict) else None
        return extends if isinstance(extends, str) else None

    def path_of(self, source: str) -> Path:
        """The path of a source that the overlay names: a bundled registry, or a path from the overlay's directory."""
        return bundled_source(source) or (Path(self.file.parent, source) if self.file else Path(source))

    def leads_out(self, source: str) -> str:
        """Why the overlay may not name a source; "" for a bundled one, and for one below the overlay's directory.

        A mapping may name any source, because the caller wrote it.
        """
        why = "" if self.file is None or bundled_source(source) else outside(source, self.file.parent)
        return f"`{cut(source)}` {why}" if why else ""


def as_text(overlay: Mapping[str, Any]) -> str:
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
