"""Fixtures of the tests that lay overlays over the small registry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.registries.files import write

import attnreg
from attnreg import Registry


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """Loads the small registry with overlays, each a text that becomes a file, or a mapping; the last is mine.yaml."""
    write(tmp_path / "base")
    monkeypatch.chdir(tmp_path)

    def load(*overlays: Any, **files: str) -> Registry:
        names = [f"other{i}.yaml" for i in range(len(overlays) - 1)] + ["mine.yaml"]
        for name, text in zip(names, overlays, strict=False):
            if isinstance(text, str):
                Path(name).write_text(text)
        laid = [name if isinstance(o, str) else o for name, o in zip(names, overlays, strict=False)]
        return attnreg.load_registry(write(tmp_path / "base", **files), laid)

    return load


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base registry, and a directory of overlays beside it."""
    write(tmp_path / "base")
    (tmp_path / "over").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path
