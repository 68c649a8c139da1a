"""The kinds of values in the YAML files: words, sentences, sizes, conditions, claims, sources, and values of facets."""

from __future__ import annotations

import re
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from attnreg.language import packed


def _one_or_many(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("expected a word, or a list of words")
    return [value] if isinstance(value, str) else value


def _size(value: Any) -> str:
    match = SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or size_in_bytes(value) > MAX_BYTES:
        raise ValueError("expected a size of 1 B to 1024 TiB, with its unit (B, KiB, MiB or GiB), as 394 MiB")
    return match[0]


def size_in_bytes(text: str) -> int:
    """The bytes of a valid size such as ``394 MiB``."""
    number, unit = text.split()
    return int(number) << 10 * ("B", "KiB", "MiB", "GiB").index(unit)


# limits: no GPU has that much memory, and no kernel reads that many tokens at once
MAX_BYTES, MAX_COUNT = 1 << 50, (1 << 31) - 1
SIZE = re.compile(r"[1-9][0-9]{0,17} (B|KiB|MiB|GiB)")
DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
# the kinds of states of layers without softmax attention
StateKind = Literal["mamba1", "mamba2", "gdn", "kda", "linear_attention", "short_conv"]
# a text that is not blank
SENTENCE = r"[^\s]"
# without the signs that separate names, as in FLASH_ATTN/FA3, torch>=2 and vllm:path, and without wildcards
NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.#+-]*( [A-Za-z0-9_.#+-]+)*$"


def _day(value: Any) -> Any:
    if isinstance(value, str):
        try:
            # only YYYY-MM-DD: fromisoformat accepts further forms
            valid = DAY.fullmatch(value) and date.fromisoformat(value)
        except ValueError:
            valid = None
        if not valid:
            raise ValueError("expected a day, as 2026-11-22")
    return value


def _one_of(forms: str) -> WrapValidator:
    """A validator of one value: a word, an integer, a truth value, null, or one of ``forms``."""

    def checked(value: Any, valid: ValidatorFunctionWrapHandler) -> Any:
        try:
            return valid(value)
        except ValidationError:
            raise ValueError(f"expected a word, an integer, true, false, null{forms}") from None

    return WrapValidator(checked)


FAILURE_ID = "What tells it apart from the other failures of the row or the step, in findings and under `known`."
WORDS_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
Condition = Annotated[dict[str, Any], WithJsonSchema({"$ref": "#/$defs/condition"})]
Matcher = Annotated[Any, WithJsonSchema({"$ref": "#/$defs/matcher"})]
Words = Annotated[list[str], BeforeValidator(_one_or_many), WithJsonSchema(WORDS_SCHEMA)]
Capabilities = Annotated[dict[str, Any], WithJsonSchema({"$ref": "#/$defs/capabilities"})]
CapabilityPatch = Annotated[dict[str, Any], WithJsonSchema({"$ref": "#/$defs/capability_patch"})]
PackedFormat = Annotated[dict[str, Any], WithJsonSchema(packed.SCHEMA)]
_OPTION = {"type": ["string", "number", "boolean"]}
Sentence = Annotated[str, Field(pattern=SENTENCE)]
Name = Annotated[str, Field(pattern=NAME)]
RELEASE = r"^[0-9]+([.][0-9]+)*$"
PIN = r"^[A-Za-z0-9][A-Za-z0-9._-]*(==|~=)[0-9]+([.][0-9]+)+([.]post[0-9]+)?$"
Release = Annotated[str, Field(pattern=RELEASE)]
Pin = Annotated[str, Field(pattern=PIN)]
Day = Annotated[str, BeforeValidator(_day), WithJsonSchema({"type": "string", "pattern": f"^{DAY.pattern}$"})]
Count = Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)]
Size = Annotated[str, BeforeValidator(_size), WithJsonSchema({"type": "string", "pattern": f"^{SIZE.pattern}$"})]
Options = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": _OPTION})]


class DataModel(BaseModel):
    """A mapping of the data. It is immutable, and refuses keys that it does not declare."""

    # defer_build: the validator of the file includes those of nested models, which most often need none of their own.
    # protected_namespaces: up to 2.9 pydantic reserves names such as model_type, and warns
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, protected_namespaces=())


class FromData(DataModel):
    """A copy of another facet's value."""

    from_: str = Field(alias="from")


class QuotientData(DataModel):
    """The quotient of two facets that hold integers, without its fraction."""

    quotient: tuple[str, str]


class RemainderData(DataModel):
    """What is left when one facet that holds integers is divided by another."""

    remainder: tuple[str, str]


class EqualData(DataModel):
    """Whether two facets of words have the same value. A value that is not given equals one that is not given."""

    equal: tuple[str, str]


FacetValue = Annotated[str | int | bool | FromData | None, _one_of(", or {from: FACET}")]
CaseValue = Annotated[
    str | int | bool | FromData | QuotientData | RemainderData | EqualData | None,
    _one_of(", {from: FACET}, {quotient: [A, B]}, {remainder: [A, B]} or {equal: [A, B]}"),
]


class CaseData(DataModel):
    when: Condition | None = None
    value: CaseValue = Field(description="The value where `when` holds.")
    because: Sentence | None = None


class SourceData(DataModel):
    url: Sentence = Field(description="Where it is.")
    version: Sentence = Field(description="The version or the commit that was read.")
    read: Day | None = Field(default=None, description="The day on which it was read, as 2026-11-21.")


class MeasuredData(DataModel):
    """The measurement behind an order, as `attnreg tune` writes it. The samples say where and when it was."""

    file: str = Field(min_length=1, description="The file of samples, beside this one.")
    ratio: float = Field(gt=0, allow_inf_nan=False, description="How many times as fast `of` is as `over`.")
    noise: float = Field(ge=0, allow_inf_nan=False, description="Half of the 99.9 % interval, as a share of the ratio.")
    of: str = Field(description="The fastest backend that was measured.")
    over: str = Field(description="The one that comes next.")
