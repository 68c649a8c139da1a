"""The shape of kernels' blocks, and of the `page` in steps.yaml: the rules for the block size of a KV cache."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from attnreg.compile.schema.values import MAX_COUNT, Condition, Count, DataModel, Sentence, StateKind


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
    """Runs with an unknown block size: `when` holds for a layer, and `mixers` for the layers without softmax."""

    name: str | None = Field(default=None, description="By which another release changes or removes it.")
    when: Condition | None = Field(default=None, description="What must hold of some layer.")
    mixers: bool | None = Field(
        default=None,
        description="true: the model has layers without softmax, and `states` does not count them all; false: none.",
    )
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


class OfStatesData(DataModel):
    """The models that a rule is for: those with states of these kinds, if `when` holds for a layer with softmax."""

    kinds: list[StateKind] = Field(default=[], description="Kinds of states; all kinds, if left out.")
    key_size: Count | None = Field(default=None, description="Elements per head of their keys.")
    when: Condition | None = Field(default=None, description="What must hold of some layer with softmax attention.")
    source: str | None = None


class StateMultipleData(OfStatesData):
    """Numbers of tokens that the block size is made a multiple of: `multiple_of` them, or at least `at_least`."""

    multiple_of: Count | Literal["chunk"] | None = Field(
        default=None, description="A number of tokens; `chunk`: what the layer computes at a time."
    )
    at_least: Count | None = Field(default=None, description="The least number of tokens that the size is made of.")


class HeldStatesData(OfStatesData):
    """How many states a request keeps in each layer, beside one for each token that a draft proposes."""

    states: Count


class UnknownStatesData(OfStatesData):
    """States that these rules do not give the size of."""

    name: str | None = Field(default=None, description="By which another release changes or removes it.")
    drafted: Literal[True] | None = Field(default=None, description="Only of runs whose draft proposes tokens.")
    because: Sentence


class StatesData(DataModel):
    """The rules for models that keep states beside their KV cache: a block is at least as large as a state."""

    widened: list[StateKind] = Field(
        default=[], description="Kinds whose convolution keeps the tokens that a draft proposes."
    )
    proposed: str | None = Field(default=None, description="The facet with the number of tokens that a draft proposes.")
    config_dtype: Condition | None = Field(
        default=None, description="The layers whose state has the dtype that the config names; by default all."
    )
    all_backends: bool = Field(
        default=False, description="Whether the smallest block of every backend counts, not the first one's alone."
    )
    multiples: list[StateMultipleData] = []
    held: list[HeldStatesData] = Field(default=[], description="The first that holds counts.")
    alone: Count = Field(default=1, description="The states that a request keeps where no layer has softmax.")
    unknown: list[UnknownStatesData] = []
    source: str | None = None


class PageData(DataModel):
    """The rules by which the engine chooses the block size of the KV cache, once each layer has its backend."""

    agree: Literal["first", "common"] = Field(description="The layers whose blocks count: the first one, or all.")
    default: list[DefaultSizeData] = Field(min_length=1, description="The first that holds counts.")
    unknown: list[UnknownSizeData] = []
    beside: list[OtherCacheData] = []
    raised: list[RaisedData] = []
    states: StatesData | None = Field(default=None, description="How a block follows from states.")
    apart: list[LayerKind] = Field(default=[], description="Kinds of layers whose backend counts as a separate one.")
    source: str | None = None
