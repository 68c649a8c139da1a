"""The shape of kernels' blocks, and of the `page` in steps.yaml: the rules for the block size of a KV cache."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from attnreg.compile.schema.values import MAX_COUNT, Condition, Count, DataModel, Sentence


def _tokens(value: Any, valid: ValidatorFunctionWrapHandler) -> Any:
    try:
        return valid(value)
    except ValidationError:
        # one error; the union would report one for each of its members
        raise ValueError(f"expected tokens, 1 to {MAX_COUNT}, or {{multiple_of: 16}}") from None


class MultipleData(DataModel):
    multiple_of: Count


_LISTED = BeforeValidator(lambda value: value if isinstance(value, list) else [value])
Blocks = Annotated[list[Annotated[Count | MultipleData, WrapValidator(_tokens)]], _LISTED, Field(min_length=1)]


# kinds of layers with a KV cache, except full layers
LayerKind = Literal["chunked", "cross", "sliding"]


class DefaultSizeData(DataModel):
    """The block size that the engine takes by default, if the layers can read it."""

    when: Condition | None = Field(default=None, description="What must hold of the first layer.")
    tokens: Count
    source: str | None = None


class UnknownSizeData(DataModel):
    """Runs with an unknown block size: `when` holds for a layer, and with `mixers` a layer has no softmax attention."""

    when: Condition | None = Field(default=None, description="What must hold of some layer.")
    mixers: Literal[True] | None = Field(default=None, description="The model also has layers without softmax.")
    because: Sentence
    source: str | None = None


class OtherCacheData(DataModel):
    """A second cache beside the keys and values of some layers, with kernels of its own."""

    when: Condition = Field(description="The layers that have it.")
    name: str = Field(description="Its backend, as the engine has it.")
    kernel_blocks: Blocks
    source: str | None = None


class RaisedData(DataModel):
    """A lower bound of the block size: `units` times the smallest block that the first layer's kernel reads."""

    when: Condition = Field(description="What must hold of some layer.")
    units: Count
    because: Sentence
    source: str | None = None


class PageData(DataModel):
    """The rules by which the engine chooses the block size of the KV cache, once each layer has its backend."""

    agree: Literal["first", "common"] = Field(description="The layers whose blocks count: the first one, or all.")
    default: list[DefaultSizeData] = Field(min_length=1, description="The first that holds counts.")
    unknown: list[UnknownSizeData] = []
    beside: list[OtherCacheData] = []
    raised: list[RaisedData] = []
    apart: list[LayerKind] = Field(default=[], description="Kinds of layers whose backend counts as a separate one.")
    source: str | None = None
