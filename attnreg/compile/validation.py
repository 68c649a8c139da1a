"""Data -> pydantic models. Data that does not fit a model becomes problems with locations; the rest is kept."""

from __future__ import annotations

import copy
import types
import typing
from typing import Annotated, Any

from pydantic import BaseModel, RootModel, ValidationError

from attnreg.compile.yaml_source import Document, Path_, shown
from attnreg.errors import MAX_SHOWN, Problem, did_you_mean

M = typing.TypeVar("M", bound=BaseModel)


def validate(model: type[M], data: Any, document: Document, path: Path_ = ()) -> M | None:
    """``data`` as a model, None where too little is valid. Faulty parts become problems of ``document``."""
    data = {} if data is None else data
    try:
        return model.model_validate(data)
    except ValidationError as e:
        errors = e.errors(include_url=False)
    problems = (_problem(model, e, data, document, path, hint=i < MAX_SHOWN) for i, e in enumerate(errors))
    document.problems += dict.fromkeys(problems)
    try:
        return model.model_validate(_remaining(data, errors))
    except ValidationError:
        return None


def _remaining(data: Any, errors: list[Any]) -> Any:
    """``data`` without its unknown keys, and without the rows or lists of rows that have another fault."""
    if not isinstance(data, dict):
        return data
    rest = copy.deepcopy(data)
    for error in errors:
        loc = _in_data(data, error["loc"])
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


_EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "int_parsing": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "a mapping",
    "string_pattern_mismatch": "a text with something in it",
    "string_type": "text",
    "too_short": "at least one item",
}


def _in_data(data: Any, loc: Path_) -> Path_:
    """The path in the data that pydantic's means, which also counts in a list that a single value was put into."""
    out: list[str | int] = []
    for i, step in enumerate(loc):
        if isinstance(data, dict) and isinstance(step, int) and i + 1 < len(loc):
            continue
        out.append(step)
        there = step in data if isinstance(data, dict) else isinstance(data, list) and step in range(len(data))
        data = data[step] if there else None
    return tuple(out)


def _problem(model: type[BaseModel], error: Any, data: Any, document: Document, path: Path_, *, hint: bool) -> Problem:
    loc = _in_data(data, error["loc"])
    here = (*path, *loc)
    parent = _dotted(here[:-1])
    prefix = f"{parent}: " if parent else ""
    if error["type"] == "extra_forbidden":
        # the search for a word that is like another takes longer than all the rest
        help_ = did_you_mean(loc[-1], _keys_of(_model_at(model, error["loc"][:-1]))) if hint else ""
        return document.problem(here, f"{prefix}unknown key `{loc[-1]}`", help_, key=True)
    if error["type"] == "missing":
        help_ = "every entry of this kind must have it"
        return document.problem(here[:-1], f"{prefix}`{loc[-1]}` is missing", help_, key=True)
    value, expected = error["input"], _EXPECTED.get(error["type"])
    if loc and loc[-1] in ("str", "int", "bool"):
        # a union reports one error for each of its members
        here, expected = here[:-1], "a word, an integer, true or false"
    elif error["type"] in ("greater_than_equal", "less_than_equal"):
        (word, bound), *_ = error["ctx"].items()
        expected = f"an integer of at {'least' if word == 'ge' else 'most'} {bound}"
    elif error["type"] == "literal_error":
        expected = error["ctx"]["expected"].replace("'", "`").replace("True", "`true`")
    message = f"expected {expected}" if expected else error["msg"].removeprefix("Value error, ")
    message = f"{_dotted(here) or 'the file'}: {message}, got {shown(value)}"
    return document.problem(here, message, "quote it" if expected == "text" and isinstance(value, int) else "")


def _dotted(path: Path_) -> str:
    return ".".join(str(p) for p in path if not isinstance(p, int))


def _model_at(model: Any, loc: Path_) -> Any:
    """The model or type that validates the value at ``loc``."""
    for part in loc:
        model = _bare(model)
        if isinstance(model, type) and issubclass(model, RootModel):
            model = model.model_fields["root"].annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            names = {f.alias or name: f for name, f in model.model_fields.items()}
            model = names[str(part)].annotation if str(part) in names else None
        else:
            model = (typing.get_args(model) or (None,))[-1]
    return _bare(model)


def _bare(annotation: Any) -> Any:
    """A type without its annotations; of a union, the first type that is not None."""
    while typing.get_origin(annotation) in (Annotated, typing.Union, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation


def _keys_of(model: Any) -> list[str]:
    if isinstance(model, type) and issubclass(model, BaseModel):
        return [f.alias or name for name, f in model.model_fields.items()]
    return []
