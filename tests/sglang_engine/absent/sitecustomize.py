"""Stand-ins for packages that SGLang imports and that a processor does not need: for a GPU, for images and for sound.

Python imports this module in every process whose path has this folder, so in each of SGLang's. The packages are those
of $ABSENT_PACKAGES. Each name in one of them is a class that gives itself for every attribute, call and index.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types
from typing import Any

ABSENT = frozenset(os.environ.get("ABSENT_PACKAGES", "").split(",")) - {""}


class Nothing(type):
    """The class of classes that stand for whatever a package has."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # a decorator without arguments gives back what it decorates
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else cls

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __instancecheck__(cls, instance: Any) -> bool:
        return False


class AbsentModule(types.ModuleType):
    """A module in which every name is there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = sys.modules.get(f"{self.__name__}.{name}") or Nothing(name, (), {})
        setattr(self, name, found)
        return found


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the absent packages."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = AbsentModule(spec.name)
        module.__path__, module.__version__, module.__file__ = [], "99.0.0", "<absent>"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: Any) -> None:
        if module.__name__ in ("sgl_kernel", "sgl_kernel.speculative"):
            # who imports it has torch already
            from processor_ops import OPS

            vars(module).update(OPS)


if ABSENT:
    sys.meta_path.insert(0, Finder())
    _version = importlib.metadata.version

    def version(name: str) -> str:
        """The version of an installed package; absent ones are of the newest."""
        try:
            return _version(name)
        except importlib.metadata.PackageNotFoundError:
            if name.replace("-", "_") in ABSENT:
                return "99.0.0"
            raise

    importlib.metadata.version = version
