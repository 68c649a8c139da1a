"""docs/architecture.md says what is there: every module, every name in one, and the floors of the import contract."""

from __future__ import annotations

import ast
import functools
import re
import tomllib

import pytest
from support import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
# a path below attnreg/ or below the checkout, and perhaps a name in that module
_NAMED = re.compile(r"`([\w/]+\.(?:py|yaml)|[\w/]+/)(?::([\w.]+))?`")
NAMED = sorted(set(_NAMED.findall(PAGE)))
_FLOOR = re.compile(r"^ (?:\S.{21}| {22}) ([a-z]+) {2,}\S", re.MULTILINE)


@functools.cache
def names(path: str) -> set[str]:
    """The functions, classes and methods of a module; a method is said with its class."""
    tree = ast.parse((ROOT / "attnreg" / path).read_text(encoding="utf-8"))
    defined = (ast.FunctionDef, ast.ClassDef)
    top = [node for node in tree.body if isinstance(node, defined)]
    methods = [(cls, inner) for cls in top if isinstance(cls, ast.ClassDef) for inner in cls.body]
    return {node.name for node in top} | {f"{c.name}.{m.name}" for c, m in methods if isinstance(m, defined)}


def test_the_page_names_every_package() -> None:
    packages = {path.parent.name for path in (ROOT / "attnreg").glob("*/__init__.py")}
    assert packages <= {path.partition("/")[0] for path, _ in NAMED}


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[":".join(filter(None, named)) for named in NAMED])
def test_what_the_page_names_is_there(path: str, name: str) -> None:
    if name:
        assert name in names(path)
    else:
        assert (ROOT / "attnreg" / path).exists() or (ROOT / path).exists()


def test_the_floors_are_those_of_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (floors,) = [contract["layers"] for contract in contracts if contract["id"] == "floors"]
    assert _FLOOR.findall(PAGE) == floors
