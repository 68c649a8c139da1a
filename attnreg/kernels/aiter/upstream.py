"""What kernel modules call in packages that are not attnreg's: the record, and whether what is installed fits it.

The record is registry/upstream.yaml. A kernel module asks for its functions when it is imported, and what no longer
fits is an `UpstreamError` in words, which the selector states as a reason.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from attnreg.compile.bundled import registry_root
from attnreg.compile.validation import validate
from attnreg.compile.yaml_source import Document, Float, Path_
from attnreg.errors import Location, RegistryError, did_you_mean

FILE = "upstream.yaml"
REQUIRED = inspect.Parameter.empty


class UpstreamError(ImportError):
    """A package that a kernel module calls is not what the record says; the message names what and the line."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OriginData(_Model):
    url: str
    read: str = Field(description="The day on which it was read, as 2026-11-21.")


class ValueData(_Model):
    module: str = Field(description="The module that has it.")
    source: str = Field(description="Where it is written, as <name>:<path>#<symbol>.")
    revision: str = Field(pattern="[0-9a-f]{40}", description="The commit that was read.")
    used_by: list[str] = Field(min_length=1, description="The rows whose kernel modules need it.")


class FunctionData(ValueData):
    formerly: str | None = Field(default=None, description="The module that had it in earlier versions.")
    parameters: list[str | dict[str, Any]] = Field(min_length=1, description="In order; with a default: {name: it}.")
    passes: list[str] = Field(min_length=1, description="The parameters that are passed, by keyword.")


class UpstreamFile(_Model):
    """upstream.yaml: what kernel modules call in packages that are not attnreg's."""

    sources: dict[str, OriginData]
    functions: dict[str, FunctionData]
    values: dict[str, ValueData] = {}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a function: its default (`REQUIRED` where it has none), and whether it is passed."""

    name: str
    default: Any
    passed: bool
    where: Location


@dataclass(frozen=True, slots=True)
class Needed:
    """Something of a package that kernel modules need: a function, or a value (then there are no parameters)."""

    name: str
    modules: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    source: str
    revision: str
    used_by: tuple[str, ...]
    where: Location

    @property
    def package(self) -> str:
        return self.modules[0].partition(".")[0]

    @property
    def signature(self) -> inspect.Signature:
        """The recorded signature."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(p.name, kind, default=p.default) for p in self.parameters])

    def load(self) -> Any:
        """It, as installed here. Raises `UpstreamError` where it is gone, changed, or cannot be imported."""
        module = self._module()
        found = getattr(module, self.name, None)
        if found is None or (self.parameters and not callable(found)):
            raise UpstreamError(f"{self.package} has no {self.modules[0]}.{self.name} any more ({self.where.short})")
        if self.parameters:
            changes = list(self.changes(found))
            if changes:
                raise UpstreamError("; ".join(changes))
        return found

    def changes(self, found: Callable[..., Any]) -> Iterator[str]:
        """What of an installed function does not fit the record, in sentences."""
        title = f"{self.package}'s {self.name}"
        try:
            installed = inspect.signature(found).parameters
        except (TypeError, ValueError):
            yield f"{title} has no signature to compare with the record ({self.where.short})"
            return
        recorded = {p.name: p for p in self.parameters}
        for p in self.parameters:
            there = installed.get(p.name)
            if p.passed:
                if there is None or there.kind in (there.VAR_KEYWORD, there.VAR_POSITIONAL):
                    yield f"{title} has no parameter `{p.name}` any more ({p.where.short})"
                elif there.kind is there.POSITIONAL_ONLY:
                    yield f"{title} takes `{p.name}` by position only ({p.where.short})"
            elif there is not None and there.default is REQUIRED and p.default is not REQUIRED:
                yield f"{title} now requires `{p.name}` ({p.where.short})"
            elif there is not None and not _same(there.default, p.default):
                was = f"{there.default!r} as default of `{p.name}`, formerly {p.default!r}"
                yield f"{title} has {was} ({p.where.short})"
        for name, there in installed.items():
            optional = there.default is not REQUIRED or there.kind in (there.VAR_KEYWORD, there.VAR_POSITIONAL)
            if name not in recorded and not optional:
                yield f"{title} now requires `{name}`, which the record does not know ({self.where.short})"

    def _module(self) -> Any:
        for i, name in enumerate(self.modules):
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as e:
                # it moved, rather than that something inside it is missing
                gone = e.name is not None and f"{name}.".startswith(f"{e.name}.") and e.name != self.package
                if gone and i + 1 < len(self.modules):
                    continue
                if gone:
                    raise UpstreamError(f"{self.package} has no module {e.name} any more ({self.where.short})") from e
                raise UpstreamError(f"{name} cannot be imported: {e}") from e
            # a package that builds and loads libraries can fail in any way; its text is the reason
            except Exception as e:
                raise UpstreamError(f"{name} cannot be imported: {type(e).__name__}: {e}") from e
        raise AssertionError(self.modules)


@dataclass(frozen=True, slots=True)
class Record:
    """The record: functions and values by their names."""

    functions: Mapping[str, Needed]
    values: Mapping[str, Needed]

    def of(self, row: str) -> tuple[Needed, ...]:
        """What the kernel module of a row needs."""
        return tuple(n for n in (*self.functions.values(), *self.values.values()) if row in n.used_by)


@cache
def record() -> Record:
    """The record that comes with attnreg."""
    return load_record(registry_root() / FILE, f"registry/{FILE}")


def function(name: str) -> Callable[..., Any]:
    """An installed function of the record, checked against it. Raises `UpstreamError`."""
    found: Callable[..., Any] = record().functions[name].load()
    return found


def value(name: str) -> Any:
    """An installed value of the record. Raises `UpstreamError`."""
    return record().values[name].load()


def load_record(path: Path, label: str | None = None) -> Record:
    """The record in a file. Raises `RegistryError` with every problem, each with its place."""
    document = Document.load(path, label)
    data = validate(UpstreamFile, document.data, document)
    if data is not None:
        functions = {name: _function(name, f, data, document) for name, f in data.functions.items()}
        values = {name: _needed(name, v, "values", (), data, document) for name, v in data.values.items()}
    if data is None or document.problems:
        raise RegistryError(document.problems)
    return Record(functions, values)


def _function(name: str, function: FunctionData, data: UpstreamFile, document: Document) -> Needed:
    here: Path_ = ("functions", name)
    parameters: list[Parameter] = []
    for i, item in enumerate(function.parameters):
        at = (*here, "parameters", i)
        pairs = [(item, REQUIRED)] if isinstance(item, str) else list(item.items())
        if len(pairs) != 1:
            document.problems.append(document.problem(at, "a parameter is a name, or one name with its default"))
            continue
        word, default = pairs[0]
        if word in [p.name for p in parameters]:
            document.problems.append(document.problem(at, f"the parameter {word} is given twice"))
        elif default is REQUIRED and any(p.default is not REQUIRED for p in parameters):
            document.problems.append(document.problem(at, f"{word} has no default, and one before it has"))
        else:
            parameters.append(Parameter(word, _plain(default), word in function.passes, document.at(*at)))
    known = [p.name for p in parameters]
    for i, word in enumerate(function.passes):
        if word not in known:
            help_ = did_you_mean(word, known)
            document.problems.append(document.problem((*here, "passes", i), f"no parameter `{word}`", help_))
    for p in parameters:
        if p.default is REQUIRED and not p.passed:
            document.problems.append(document.problem((*here, "passes"), f"`{p.name}` must be passed", key=True))
    return _needed(name, function, "functions", tuple(parameters), data, document)


def _needed(
    name: str, item: ValueData, kind: str, parameters: tuple[Parameter, ...], data: UpstreamFile, document: Document
) -> Needed:
    origin = item.source.partition(":")[0]
    if origin not in data.sources or "#" not in item.source:
        help_ = did_you_mean(origin, data.sources) if origin not in data.sources else "end it with #<symbol>"
        problem = document.problem((kind, name, "source"), f"`{item.source}` is not <name>:<path>#<symbol>", help_)
        document.problems.append(problem)
    former = item.formerly if isinstance(item, FunctionData) else None
    modules = (item.module, former) if former else (item.module,)
    used_by, where = tuple(item.used_by), document.key_at(kind, name)
    return Needed(name, modules, parameters, item.source, item.revision, used_by, where)


def _plain(default: Any) -> Any:
    """A default as Python has it: sequences are tuples, numbers with a point floats."""
    if isinstance(default, list):
        return tuple(_plain(item) for item in default)
    return float(default) if isinstance(default, Float) else default


def _same(found: Any, recorded: Any) -> bool:
    found = tuple(found) if isinstance(found, list) else found
    # false is no zero
    return found is recorded or (isinstance(found, bool) == isinstance(recorded, bool) and bool(found == recorded))
