"""The signatures that an installed package's source states, read without importing the package.

FlashInfer and FlashAttention 4 cannot be imported without a GPU and its libraries, so what a record says of them is
compared with their source. Decorators are taken to keep a function's signature, as theirs do.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attnreg.kernels.upstream import Function

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def version_of(distribution: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def stand_in(function: Function, owner: Function | None = None) -> Callable[..., Any]:
    """A callable with the signature of a recorded function, or of a method of a recorded class, as installed.

    Raises LookupError where the source has no such definition.
    """
    outer = owner or function
    definition = _definition(_source(outer), outer.name)
    if definition is None:
        raise LookupError(f"{outer.modules[0]} defines no {outer.name}")
    if owner is not None:
        definition = _member(definition, function.name)
    if isinstance(definition, ast.ClassDef):
        definition = _member(definition, "__init__")
        signature = _signature(definition, bound=True)
    else:
        signature = _signature(definition, bound=False)

    def called() -> None:
        raise AssertionError("only its signature is looked at")

    called.__signature__ = signature  # type: ignore[attr-defined]
    return called


def _source(function: Function) -> Path:
    """The file of a record's first module."""
    top, *rest = function.modules[0].split(".")
    # the spec of a package is found without importing it; that of a module in it is not
    spec = importlib.util.find_spec(top)
    for place in (spec and spec.submodule_search_locations) or ():
        if found := _file(Path(place).joinpath(*rest)):
            return found
    raise LookupError(f"{function.modules[0]} is not installed")


def _file(stem: Path) -> Path | None:
    return next((f for f in (stem.with_suffix(".py"), stem / "__init__.py") if f.is_file()), None)


def _definition(file: Path, name: str) -> Definition | None:
    """The definition of a name in a file, or in the file of the same package that it is imported from."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    if found := [node for node in body if isinstance(node, Definition) and node.name == name]:
        # those before the last are overloads, for type checkers
        return found[-1]
    for node in body:
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        source = _file(file.parents[node.level - 1].joinpath(*(node.module or "").split(".")))
        names = [name if alias.name == "*" else alias.name for alias in node.names if _binds(alias, name)]
        for imported in names if source else ():
            if definition := _definition(source, imported):
                return definition
    return None


def _binds(alias: ast.alias, name: str) -> bool:
    return alias.name == "*" or (alias.asname or alias.name) == name


def _member(definition: Definition, name: str) -> Definition:
    found = [node for node in definition.body if isinstance(node, Definition) and node.name == name]
    if not found:
        raise LookupError(f"{definition.name} defines no {name}")
    return found[-1]


def _signature(definition: Definition, bound: bool) -> inspect.Signature:
    assert not isinstance(definition, ast.ClassDef)
    return inspect.Signature([*_parameters(definition.args)][bound:])


def _parameters(a: ast.arguments) -> Iterator[inspect.Parameter]:
    positional = [*a.posonlyargs, *a.args]
    without = len(positional) - len(a.defaults)
    for i, one in enumerate(positional):
        kind = inspect.Parameter.POSITIONAL_ONLY if i < len(a.posonlyargs) else inspect.Parameter.POSITIONAL_OR_KEYWORD
        yield inspect.Parameter(one.arg, kind, default=_value(a.defaults[i - without] if i >= without else None))
    if a.vararg:
        yield inspect.Parameter(a.vararg.arg, inspect.Parameter.VAR_POSITIONAL)
    for one, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
        yield inspect.Parameter(one.arg, inspect.Parameter.KEYWORD_ONLY, default=_value(default))
    if a.kwarg:
        yield inspect.Parameter(a.kwarg.arg, inspect.Parameter.VAR_KEYWORD)


def _value(node: ast.expr | None) -> Any:
    """The value of a literal; of any other expression its text, which is the value of no record."""
    if node is None:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(node)
    except ValueError:
        return f"`{ast.unparse(node)}`"
