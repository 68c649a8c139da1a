"""The blocks of docs/python_api.md: every public name, with its signature, its fields and its docstring."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import attnreg

# block -> its names in `attnreg`
_NAMES = {
    "ask": ["AttentionRequest", "Platform", "detect", "detect_all", "select", "Selection", "Candidate", "Reason"],
    "refusals": ["NoBackendError", "RequestError"],
    "registries": ["load_registry", "bundled_registries", "Registry", "RegistryError"],
    "plans": ["plan", "Plan"],
    "models": ["requests_from_model", "ModelLayers", "ConfigError"],
    "run": [
        "Attention",
        "MLAAttention",
        "AttentionSpec",
        "BatchMetadata",
        "KVCache",
        "SpecError",
        "BatchError",
        "UnclaimedError",
        "warm_up_batches",
    ],
    "parallel": ["ContextParallel"],
    "verify": ["verify"],
}
# block -> the module whose public names it lists
_MODULES = {
    "ops": "attnreg.ops",
    "transformers": "attnreg.integrations.transformers",
    "vllm": "attnreg.integrations.vllm",
}
# a docstring's list of fields: the names, a colon, and the texts in one column
_COLUMNS = re.compile(r"^[a-z_, ]+: {2,}\S", re.MULTILINE)
_FORWARD = re.compile(r"ForwardRef\('(.*?)'\)")
_SHAPE = re.compile(r"(?<!`)(\[[a-z_][\w ,+()*]*\])(?!`)")
_WIDTH = 100


def api_blocks() -> dict[str, str]:
    """The generated blocks of the page. Raises ValueError if a public name of attnreg is in no block."""
    listed = {name for names in _NAMES.values() for name in names} | {"__version__", "ops"}
    if missing := set(attnreg.__all__) ^ listed:
        raise ValueError(f"docs/python_api.md and attnreg.__all__ differ in {', '.join(sorted(missing))}")
    blocks = {
        block: "\n\n".join(_entry(f"attnreg.{name}", getattr(attnreg, name)) for name in names)
        for block, names in _NAMES.items()
    }
    return blocks | {block: _module(name) for block, name in _MODULES.items()}


def _module(name: str) -> str:
    """A module's docstring, then its public names."""
    module = importlib.import_module(name)
    entries = [_entry(f"{name}.{public}", getattr(module, public)) for public in module.__all__]
    return "\n\n".join([markdown(module), *entries])


def _entry(title: str, value: Any) -> str:
    """The heading, the signature or the fields, the docstring and the members of one name."""
    parts = [f"### `{title}`"]
    if inspect.isclass(value):
        parts += [_code(_class_lines(value)), markdown(value), *_members(value)]
    elif hasattr(value, "default"):
        # an op of torch: its schema has the tensors that it writes
        parts.append(_code([str(value.default._schema)], "text"))
    elif callable(value) and not isinstance(value, ModuleType):
        parts += [_code([signature(title.rpartition(".")[2], value)]), markdown(value)]
    else:
        parts.append(f"`{value!r}`")
    return "\n\n".join(filter(None, parts))


def _class_lines(cls: type[Any]) -> list[str]:
    bases = [base.__name__ for base in cls.__bases__ if base not in (object, tuple)]
    head = f"class {cls.__name__}" + (f"({', '.join(bases)})" if bases else "")
    if issubclass(cls, Exception) or not (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")):
        return [head]
    fields = [p for p in inspect.signature(cls).parameters.values() if not p.name.startswith("_")]
    return [f"{head}:", *(f"    {_parameter(p)}" for p in fields)]


def _members(cls: type[Any]) -> Iterator[str]:
    """An item for each public method and property that the class itself defines."""
    for name, member in vars(cls).items():
        kind = getattr(member, "func", None) or getattr(member, "fget", None) or getattr(member, "__func__", member)
        if name.startswith("_") or not inspect.isfunction(kind):
            continue
        called = member if inspect.isfunction(member) else getattr(cls, name)
        bound = not isinstance(member, classmethod | staticmethod)
        head = signature(name, called, bound=bound, width=1000) if callable(called) else f"{name}: {_type(kind)}"
        parts = [f"`{head}`"] if len(head) <= _WIDTH else [f"`{name}`", _code([signature(name, called, bound=bound)])]
        yield "- " + "\n\n".join(filter(None, [*parts, markdown(kind)])).replace("\n", "\n  ").replace("\n  \n", "\n\n")


def _type(function: Any) -> str:
    return str(inspect.signature(function).return_annotation).strip("'")


def signature(name: str, function: Any, *, bound: bool = False, width: int = _WIDTH) -> str:
    """A signature as in the source. One wider than ``width`` has a line for each parameter.

    bound: whether to leave out ``self``.
    """
    described = inspect.signature(function)
    parameters = list(described.parameters.values())[1 if bound else 0 :]
    parts: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(_parameter(parameter))
    end = "" if described.return_annotation is inspect.Signature.empty else f" -> {_type(function)}"
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= width:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){end}"])


def _parameter(parameter: inspect.Parameter) -> str:
    written = _FORWARD.sub(r"\1", str(parameter.annotation).strip("'"))
    annotation = "" if parameter.annotation is parameter.empty else f": {written}"
    if parameter.default is parameter.empty:
        return f"{parameter.name}{annotation}"
    default = parameter.default
    shown = f'"{default}"' if isinstance(default, str) else repr(default)
    return f"{parameter.name}{annotation} = {'...' if shown.startswith('<') else shown}"


def markdown(value: Any) -> str:
    """A docstring as Markdown: literals in single backticks, and lists of fields unchanged in a block of code."""
    paragraphs = (inspect.getdoc(value) or "").split("\n\n")
    # a class without a docstring has that of its base
    if inspect.isclass(value) and value.__doc__ is None:
        return ""
    return "\n\n".join(_code([p], "text") if _COLUMNS.search(p) else _prose(p) for p in paragraphs)


def _prose(paragraph: str) -> str:
    # Markdown reads brackets as a link, so a shape needs backticks
    return _SHAPE.sub(r"`\1`", paragraph.replace("``", "`"))


def _code(lines: list[str], language: str = "python") -> str:
    return "\n".join([f"```{language}", *lines, "```"])
