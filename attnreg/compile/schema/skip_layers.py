"""The shape of rules for skipped layers, which keep another KV cache than the rest of a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictInt, model_validator

from attnreg.compile.schema.values import MAX_COUNT, Count, DataModel

_Index = Annotated[StrictInt, Field(ge=0, le=MAX_COUNT)]


class SkipLayersData(DataModel):
    """Layers that a run with this KV dtype skips: a rule has exactly one of `ends`, `window` and `layers`."""

    ends: Count | None = Field(
        default=None,
        description="The number of first and of last layers, at most half of the model's; none of a hybrid's.",
    )
    window: Count | None = Field(default=None, description="Layers with a sliding window of at most this many tokens.")
    layers: list[_Index] | None = Field(default=None, description="The layers of these indices.", min_length=1)
    models: list[str] | None = Field(
        default=None,
        description="The values of `model_type` that this is about; every model, if left out.",
        min_length=1,
    )
    ask: dict[str, str | int | bool | None] = Field(description="Facet -> the value that these layers ask for instead.")
    because: str | None = Field(default=None, description="The reason, in a note that `attnreg explain` prints.")

    @model_validator(mode="after")
    def _has_one_kind(self) -> SkipLayersData:
        if sum(x is not None for x in (self.ends, self.window, self.layers)) != 1:
            raise ValueError("expected one of `ends`, `window` and `layers`, which say which layers it is about")
        return self
