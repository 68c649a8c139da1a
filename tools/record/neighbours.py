"""A release beside a bundled one: which facts moved in its source, and which differences its decisions ask for.

A difference is a patch of release.yaml: a path into the bundled registry's data, and the value there; None removes it.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from attnreg import Registry, RegistryError, load_registry
from attnreg.compile.inputs.bundled import bundled_registries
from attnreg.compile.inputs.reading import Reading

Patch = tuple[tuple[str, ...], Any]
# the parts of a registry that decide which backend a layer gets
PARTS = ("vocabulary", "backends", "priorities")
_NAMED = ("name", "step", "code")
_SYMBOL = re.compile(r"\b(?:vllm|sglang):((?:vllm|python/sglang)/[\w./-]+)(?:#([\w.]+))?")
# fields of a row that do not decide which backend a layer gets
_ASIDE = ("summary", "source", "notes", "module")


@cache
def merged(name: str) -> dict[str, Any]:
    """The data of each part of a bundled registry, its differences to other releases merged."""
    documents = Reading(set())._documents(bundled_registries()[name], name)
    data = {part: document.data for part, document in documents.items() if document is not None}
    # numbers that remember how they were written become plain ones
    found: dict[str, Any] = json.loads(json.dumps(data, default=str))
    return found


def patches(near: Any, far: Any, path: tuple[str, ...] = ()) -> Iterator[Patch]:
    """The differences that make the data of one release that of another, each by itself."""
    if isinstance(near, Mapping) and isinstance(far, Mapping):
        for key in [*near, *(key for key in far if key not in near)]:
            if near.get(key) != far.get(key) and key not in _ASIDE:
                yield from patches(near.get(key), far.get(key), (*path, str(key)))
    elif _are_named(near) and _are_named(far):
        before, after = ({_name(item): item for item in items} for items in (near, far))
        for name in [*before, *(name for name in after if name not in before)]:
            if before.get(name) != after.get(name):
                yield from patches(before.get(name), after.get(name), (*path, f"[{name}]"))
    else:
        yield path, far


def release_of(extends: str, chosen: Sequence[Patch], sources: Mapping[str, Any]) -> dict[str, Any]:
    """The data of release.yaml with some differences. sources: the version that was read."""
    data: dict[str, Any] = {"extends": extends}
    for path, value in [*chosen, (("backends", "sources"), dict(sources))]:
        _put(data, path, value)
    return data


def _put(data: Any, path: tuple[str, ...], value: Any) -> None:
    key, *rest = path
    if key.startswith("["):
        item = next((item for item in data if _name(item) == key[1:-1]), None)
        if item is None:
            data.append(item := {"name": key[1:-1]})
        if rest:
            _put(item, tuple(rest), value)
        else:
            item |= {"gone": True} if value is None else value
    elif not rest:
        data[key] = value
    else:
        _put(data.setdefault(key, [] if rest[0].startswith("[") else {}), tuple(rest), value)


def registry_of(data: Mapping[str, Any], name: str) -> Registry | None:
    """The registry of a release.yaml; None for one that is not valid."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / name
        folder.mkdir()
        (folder / "release.yaml").write_text(yaml.safe_dump(dict(data), sort_keys=False))
        try:
            return load_registry(folder)
        except RegistryError:
            return None


def proposed(
    near: str, others: Sequence[str], wrong: Callable[[Registry], int], name: str, sources: Mapping[str, Any]
) -> tuple[list[Patch], int]:
    """The differences to a bundled release that lower the number of wrong rows, tried one after the other.

    The differences that are tried are those of other bundled releases. wrong: the number of rows that a registry
    decides otherwise than the engine. Returns the differences, and the number of rows that are wrong with them.
    """
    chosen, base = list[Patch](), registry_of(release_of(near, [], sources), name)
    left = wrong(base) if base is not None else 0
    tried: list[Patch] = []
    for other in others:
        for part in PARTS:
            found = patches(merged(near).get(part), merged(other).get(part), (part,))
            tried += [patch for patch in found if patch not in tried and len(patch[0]) > 1]
    for patch in tried:
        registry = registry_of(release_of(near, [*chosen, patch], sources), name) if left else None
        if registry is not None and (now := wrong(registry)) < left:
            chosen, left = [*chosen, patch], now
    return chosen, left


def moved_symbols(name: str, before: Path, after: Path) -> dict[str, list[str]]:
    """The symbols of a bundled registry's facts that are gone in another tree, or whose source text changed."""
    found: dict[str, list[str]] = {"changed": [], "gone": []}
    for path, symbol in sorted(set(_SYMBOL.findall(json.dumps(merged(name))))):
        was, now = (symbol_text(tree, path, symbol) for tree in (before, after))
        if was is not None and was != now:
            found["gone" if now is None else "changed"].append(f"{path}#{symbol}" if symbol else path)
    return found


@cache
def symbol_text(tree: Path, path: str, symbol: str) -> str | None:
    """The source of a class, a function or a constant in normal form, without comments; None if it is not there."""
    file = tree / path.removeprefix("python/")
    if not file.is_file():
        return None
    node: Any = ast.parse(file.read_text(encoding="utf-8"))
    for name in filter(None, symbol.split(".")):
        node = next((inner for inner in ast.walk(node) if inner is not node and name in _names(inner)), None)
        if node is None:
            return None
    return ast.unparse(node)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _name(item: Any) -> str:
    return next((str(item[key]) for key in _NAMED if key in item), "")


def _are_named(items: Any) -> bool:
    return isinstance(items, list) and all(isinstance(item, Mapping) and _name(item) for item in items) and bool(items)
