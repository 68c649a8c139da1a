"""Loads the functions and operators of other packages that adapters call, and compares their signatures with the calls.

An adapter loads its functions when it is imported. A function that no longer fits raises `UpstreamError`; the selector
gives its text as the reason.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


class UpstreamError(ImportError):
    """Raised if a package differs from what a kernel module was written for; the message names the change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamValue:
    """An object of a package: its name, its module and the modules that had it earlier, and its source."""

    name: str
    modules: tuple[str, ...]
    source: str

    @property
    def package(self) -> str:
        return self.modules[0].partition(".")[0]

    @property
    def written_for(self) -> str:
        """The end of every reason: the commit or the release that the adapter was written for."""
        commit = self.source.partition("/blob/")[2].partition("/")[0][:12]
        return f"(the adapter was written for {commit or self.source.rpartition('/')[2]})"

    def load(self) -> Any:
        """The installed object. Raises `UpstreamError` if it is missing or cannot be imported."""
        value = getattr(self._module(), self.name, None)
        if value is None:
            raise UpstreamError(f"{self.package} has no {self.modules[0]}.{self.name} any more {self.written_for}")
        return value

    def _module(self) -> ModuleType:
        for i, name in enumerate(self.modules):
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as e:
                # distinguishes a module that has moved from a failing import inside it
                gone = e.name is not None and f"{name}.".startswith(f"{e.name}.") and e.name != self.package
                if gone and i + 1 < len(self.modules):
                    continue
                if gone:
                    raise UpstreamError(f"{self.package} has no module {e.name} any more {self.written_for}") from e
                raise UpstreamError(f"{name} cannot be imported: {e}") from e
            # a package that builds and loads libraries may raise anything; its text is the reason
            except Exception as e:
                raise UpstreamError(f"{name} cannot be imported: {type(e).__name__}: {e}") from e
        raise AssertionError(self.modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(UpstreamValue):
    """A function as an adapter calls it: the parameters passed, all by keyword, and the defaults relied on.

    defaults: every parameter that is not passed. A parameter that a newer version has removed is ignored.
    """

    passes: tuple[str, ...]
    defaults: Mapping[str, Any]

    def load(self) -> Callable[..., Any]:
        """The installed function. Raises `UpstreamError` if it is missing, changed, or cannot be imported."""
        function: Callable[..., Any] = UpstreamValue.load(self)
        changes = list(self.changes(function))
        if changes:
            raise UpstreamError(f"{self.package}'s {self.name} {', and '.join(changes)} {self.written_for}")
        return function

    def changes(self, function: Any) -> Iterator[str]:
        """The differences between an installed function and the adapter's call, each as the end of a sentence."""
        if not callable(function):
            yield "is no function any more"
            return
        try:
            parameters = self._parameters(function)
        except (TypeError, ValueError):
            yield "has no signature to compare with the adapter's call"
            return
        for name in self.passes:
            # with `**kwargs`, the signature does not show which parameters a function takes
            if name not in parameters or parameters[name].kind in (_VAR_KEYWORD, _VAR_POSITIONAL):
                yield f"has no parameter `{name}` any more"
            elif parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY:
                yield f"takes `{name}` by position only"
        for name, parameter in parameters.items():
            if name in self.passes or parameter.kind in (_VAR_KEYWORD, _VAR_POSITIONAL):
                continue
            if parameter.default is inspect.Parameter.empty:
                yield f"now requires `{name}`"
            elif name in self.defaults and not _same(parameter.default, self.defaults[name]):
                yield f"has {parameter.default!r} as default of `{name}`, formerly {self.defaults[name]!r}"

    def _parameters(self, function: Any) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(function).parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamOperator(Function):
    """An operator of PyTorch as an adapter calls it; its schema is compared as a signature is.

    modules: the namespaces that may have it; the first one that has it counts. libraries: namespace -> the package and
    the file pattern of the library that registers it, for namespaces outside PyTorch. The library is loaded from its
    file, without importing any module of the package.
    """

    libraries: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def package(self) -> str:
        return ", ".join(dict.fromkeys(package for package, _ in self.libraries.values())) or "torch"

    def load(self) -> Callable[..., Any]:
        """The operator. Raises `UpstreamError` if no namespace has it, or if its schema has changed."""
        reasons: list[str] = []
        for namespace in self.modules:
            try:
                if namespace in self.libraries:
                    _load_library(*self.libraries[namespace])
                operator: Callable[..., Any] = getattr(getattr(torch.ops, namespace), self.name).default
            # loading a library may raise anything; PyTorch raises AttributeError for a name that it lacks
            except Exception as e:
                reasons.append(f"torch.ops.{namespace}.{self.name}: {e}")
                continue
            changes = list(self.changes(operator))
            if not changes:
                return operator
            reasons.append(f"torch.ops.{namespace}.{self.name} {', and '.join(changes)}")
        raise UpstreamError(f"{'; '.join(reasons)} {self.written_for}")

    def _parameters(self, function: Any) -> Mapping[str, inspect.Parameter]:
        kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        return {
            a.name: inspect.Parameter(a.name, kind, default=a.default_value if a.has_default_value() else empty)
            for a in function._schema.arguments
        }


def _load_library(package: str, pattern: str) -> None:
    """Loads the one file of a package that fits a pattern, without importing the package, which may be large."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UpstreamError(f"package {package} is not installed")
    files = [path for place in spec.submodule_search_locations for path in Path(place).glob(pattern)]
    if len(files) != 1:
        raise UpstreamError(f"package {package} has {len(files) or 'no'} file {pattern}")
    torch.ops.load_library(files[0])  # type: ignore[no-untyped-call]


_VAR_KEYWORD, _VAR_POSITIONAL = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL


def _same(found: Any, recorded: Any) -> bool:
    # False == 0 in Python, but the two are different defaults
    return found is recorded or (isinstance(found, bool) == isinstance(recorded, bool) and bool(found == recorded))
