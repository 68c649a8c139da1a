"""A small registry with steps: a user names kernels by facets, and the steps of an engine's start write them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import attnreg
from attnreg import AttentionRequest, Platform, Registry, Selection
from attnreg.selection.selector import evaluate
from support.registries import tiny
from support.registries.files import row, write

FACETS = {
    "mine": {"of": "request", "kind": "backend", "legend": "l"},
    "pooling": {"of": "request", "kind": "boolean", "legend": "l"},
    "prefill": {"of": "start", "kind": "backend", "legend": "l"},
    "page": {"of": "start", "kind": "integer", "legend": "l"},
    "asked": {"of": "selection", "kind": "word", "words": "asked", "legend": "l"},
    "named": {"of": "selection", "kind": "backend", "legend": "l"},
}
ASKED = {"automatic": "l", "by_name": "l", "by_model": "l"}


def vocabulary(asked: Mapping[str, str] = ASKED, **derived: Any) -> str:
    """vocabulary.yaml of the tiny registry, with facets of a start and derived ones."""
    data: dict[str, Any] = copy.deepcopy(tiny.VOCABULARY)
    data["facets"] |= FACETS
    data["words"] |= {"asked": dict(asked)}
    data["words"]["dtypes"]["float32"] = "l"
    data["derived"] |= {name: {"legend": "l", "cases": cases} for name, cases in derived.items()}
    return yaml.safe_dump(data, sort_keys=False, width=1000)


def load(directory: Path, steps: str, **files: str) -> Registry:
    """The registry with this text as its steps.yaml."""
    files = {"vocabulary": vocabulary(), "backends": row("capabilities: {dtypes: [float16]}"), **files}
    return attnreg.load_registry(write(directory, steps=steps, **files))


def ask(registry: Registry, backend: str | None = None, arch: str = "g2", **facets: Any) -> Selection:
    """The selection for a request with these facets."""
    own = AttentionRequest.__dataclass_fields__
    extra = {name: value for name, value in facets.items() if name not in own}
    fields = {"head_size": 64, "dtype": "float16"} | {n: v for n, v in facets.items() if n in own}
    return evaluate(AttentionRequest(**fields, extra=extra), Platform(platform="gpu", arch=arch), registry, backend)
