"""Validates data with pydantic models. Faulty data becomes problems with locations; the valid rest is kept.

FilePart: a valid piece of data, and its place.
"""

from __future__ import annotations

import copy
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, RootModel, ValidationError
from pydantic.fields import FieldInfo

from attnreg.compile.schema.runs import LAYOUT
from attnreg.compile.schema.values import NAME, PIN, RELEASE, SENTENCE
from attnreg.compile.source.quoting import cut
from attnreg.compile.source.yaml_source import Document, Path_, shown
from attnreg.errors import MAX_SHOWN, Location, Problem, did_you_mean

M = typing.TypeVar("M", bound=BaseModel)
T_co = typing.TypeVar("T_co", covariant=True)
U = typing.TypeVar("U")


@dataclass(frozen=True, slots=True)
class FilePart(typing.Generic[T_co]):
    """A validated piece of data: the model, its document, and its path in the document.

    ``borrowed`` marks the vocabulary of another registry; its sources do not count.
    """

    model: T_co
    document: Document
    path: Path_ = ()
    borrowed: bool = False

    def piece(self, model: U, *path: str | int) -> FilePart[U]:
        """The part at ``path`` below this one; without a path, this part with a model of a narrower type."""
        return FilePart(model, self.document, (*self.path, *path), self.borrowed)

    def at(self, *path: str | int) -> Location:
        """The location of the value at ``path`` below this part."""
        return self.document.at(*self.path, *path)

    def key_at(self, *path: str | int) -> Location:
        """The location of the key at the end of ``path`` below this part."""
        return self.document.key_at(*self.path, *path)


def validate(model: type[M], data: Any, document: Document, path: Path_ = ()) -> M | None:
    """``data`` as a model, None if too little is valid. Faulty parts become problems of ``document``."""
    data = {} if data is None else data
    try:
        return model.model_validate(data)
    except ValidationError as e:
        errors = e.errors(include_url=False)
    missing: dict[Path_, list[Any]] = {}
    for error in errors:
        if error["type"] == "missing":
            missing.setdefault(_in_data(data, error["loc"][:-1]), []).append(error)
    others = (e for e in errors if e["type"] != "missing")
    problems = [_problem(model, e, data, document, path, hint=i < MAX_SHOWN) for i, e in enumerate(others)]
    problems += [_missing(model, found, document, (*path, *loc)) for loc, found in missing.items()]
    document.problems += dict.fromkeys(problems)
    try:
        return model.model_validate(_remaining(data, errors))
    except ValidationError:
        return None


def _remaining(data: Any, errors: list[Any]) -> Any:
    """``data`` without unknown keys, and without the rows or lists of rows that have another fault.

    A missing text (`summary`, `because`, …) gets a stand-in, so that the other words of its row are still checked.
    """
    if not isinstance(data, dict):
        return data
    rest = copy.deepcopy(data)
    for error in errors:
        loc = _in_data(data, error["loc"])
        if error["type"] == "missing" and loc[-1] in _TEXTS:
            # stand-ins for names must differ
            _put(rest, loc, f"_{'.'.join(map(str, loc))}" if loc[-1] == "name" else UNSTATED)
            continue
        if error["type"] != "extra_forbidden":
            loc = loc[: 2 if isinstance(rest.get(loc[0]), dict) else 1]
        _remove(rest, loc)
    return rest


def _remove(data: Any, path: Path_) -> None:
    *inside, key = path
    try:
        for step in inside:
            data = data[step]
        del data[key]
    except (KeyError, IndexError):
        pass  # an enclosing value is already removed


def _put(data: Any, path: Path_, value: str) -> None:
    *inside, key = path
    try:
        for step in inside:
            data = data[step]
        data[key] = value
    except (KeyError, IndexError):
        pass  # an enclosing value is removed already


# the stand-in for a missing text, which is a problem already; no file may have this character
UNSTATED = "\0"
_TEXTS = frozenset({"because", "legend", "name", "reject", "says", "source", "summary", "url", "version"})
# keys that help names
_MAX_KEYS = 12
_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "int_parsing": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "a mapping",
    "string_type": "text",
    "too_short": "at least one item",
}
_PATTERNS = {
    SENTENCE: "a text with something in it",
    NAME: "a name of letters (A-Z, a-z), digits and the signs `_.#+-`",
    RELEASE: "a release, as 0.33.0",
    LAYOUT: "a layout, as LBNHC or NHD",
    PIN: "a package and its version, as torch==2.14.0 or triton~=3.8.0",
}
# the last step of pydantic's path if the fault is in a key, not in its value
_KEY = "[key]"


def _in_data(data: Any, loc: Path_) -> Path_:
    """The path in the data for pydantic's path, which also has an index if a single value became a list."""
    out: list[str | int] = []
    loc = loc[:-1] if _is_key(loc) else loc
    for i, step in enumerate(loc):
        if isinstance(data, dict) and isinstance(step, int) and i + 1 < len(loc):
            continue
        out.append(step)
        there = step in data if isinstance(data, dict) else isinstance(data, list) and step in range(len(data))
        data = data[step] if there else None
    return tuple(out)


def _is_key(loc: Path_) -> bool:
    """Whether the fault is in the key of a mapping, not in its value."""
    return loc[-1:] == (_KEY,)


def _problem(model: type[BaseModel], error: Any, data: Any, document: Document, path: Path_, *, hint: bool) -> Problem:
    loc = _in_data(data, error["loc"])
    here = (*path, *loc)
    parent = _dotted(here[:-1])
    prefix = f"{parent}: " if parent else ""
    if error["type"] == "extra_forbidden":
        # the search for a similar word takes longer than all the rest
        help_ = did_you_mean(loc[-1], keys_of(_model_at(model, error["loc"][:-1]))) if hint else ""
        return document.problem(here, f"{prefix}unknown key `{cut(str(loc[-1]))}`", help_, key=True)
    value, expected = error["input"], _EXPECTED.get(error["type"])
    if loc and loc[-1] in ("str", "int", "bool"):
        # a union reports one error for each of its members
        here, expected = here[:-1], "a word, an integer, true or false"
    elif error["type"] in ("greater_than_equal", "less_than_equal"):
        (word, bound), *_ = error["ctx"].items()
        expected = f"an integer of at {'least' if word == 'ge' else 'most'} {bound}"
    elif error["type"] == "literal_error":
        expected = error["ctx"]["expected"].replace("'", "`").replace("True", "`true`")
    elif error["type"] == "string_pattern_mismatch":
        expected = _PATTERNS[error["ctx"]["pattern"]]
    message = f"expected {expected}" if expected else error["msg"].removeprefix("Value error, ")
    message = f"{_dotted(here) or 'the file'}: {message}, got {shown(value)}"
    help_ = _help_for_kind(model, error["loc"], expected, value)
    return document.problem(here, message, help_, key=_is_key(error["loc"]))


def _missing(model: type[BaseModel], errors: list[Any], document: Document, path: Path_) -> Problem:
    """One problem for all missing keys of one place; its help describes each key."""
    keys = [str(error["loc"][-1]) for error in errors]
    within = _model_at(model, errors[0]["loc"][:-1])
    fields = _fields_of(within) if isinstance(within, type) and issubclass(within, BaseModel) else {}
    says = ((key, fields[key].description) for key in keys if key in fields)
    help_ = "; ".join(f"`{key}`: {text[:1].lower()}{text[1:].rstrip('.')}" for key, text in says if text)
    names = ", ".join(f"`{key}`" for key in keys)
    prefix = f"{_dotted(path)}: " if _dotted(path) else ""
    return document.problem(path, f"{prefix}{names} {'is' if len(keys) == 1 else 'are'} missing", help_, key=True)


def _help_for_kind(model: type[BaseModel], loc: Path_, expected: str | None, value: Any) -> str:
    """Help for a value of a wrong kind: how to write it."""
    if expected == "text" and isinstance(value, int):
        return "quote it"
    listed = expected == "a list"
    keys = keys_of(_model_at(model, (*loc, 0) if listed else loc)) if listed or expected == "a mapping" else []
    if keys:
        names = ", ".join(keys[:_MAX_KEYS]) + (", …" if len(keys) > _MAX_KEYS else "")
        return f"{'a list of mappings, each with some' if listed else 'some'} of these keys: {names}"
    return f"write [{cut(value)}]" if listed and isinstance(value, str) else ""


def _dotted(path: Path_) -> str:
    return ".".join(cut(p) for p in path if isinstance(p, str))


def _model_at(model: Any, loc: Path_) -> Any:
    """The model or type that validates the value at ``loc``."""
    for part in loc:
        model = _bare(model)
        if isinstance(model, type) and issubclass(model, RootModel):
            model = model.model_fields["root"].annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            fields = _fields_of(model)
            model = fields[str(part)].annotation if str(part) in fields else None
        else:
            model = (typing.get_args(model) or (None,))[-1]
    return _bare(model)


def _bare(annotation: Any) -> Any:
    """A type without its annotations; for a union its first type that is not None."""
    while typing.get_origin(annotation) in (Annotated, typing.Union, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation


def _fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Key in the data -> the field that holds it."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def keys_of(model: Any) -> list[str]:
    """The keys that a model declares; empty for types without declared keys."""
    shaped = isinstance(model, type) and issubclass(model, BaseModel) and not issubclass(model, RootModel)
    return list(_fields_of(model)) if shaped else []
