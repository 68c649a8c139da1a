"""The rules for layers that keep another KV cache than a run's."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictInt, model_validator

from attnreg.compile.schema.values import MAX_COUNT, Count, DataModel

_Index = Annotated[StrictInt, Field(ge=0, le=MAX_COUNT)]


class SpareData(DataModel):
    """Layers that a run with this KV dtype leaves alone: by `ends`, by `window` or by `layers`, one of the three."""

    ends: Count | None = Field(
        default=None,
        description="The first and the last so many layers, at most half of the model's; none of a hybrid's.",
    )
    window: Count | None = Field(default=None, description="Layers with a sliding window of at most so many tokens.")
    layers: list[_Index] | None = Field(default=None, description="The layers of these indices.", min_length=1)
    models: list[str] | None = Field(
        default=None,
        description="The values of `model_type` that this is about; every model, if left out.",
        min_length=1,
    )
    ask: dict[str, str | int | bool | None] = Field(description="What they ask for instead: facet -> value.")
    because: str | None = Field(default=None, description="Why, for a note that `attnreg explain` prints.")

    @model_validator(mode="after")
    def _has_one_kind(self) -> SpareData:
        if sum(x is not None for x in (self.ends, self.window, self.layers)) != 1:
            raise ValueError("expected one of `ends`, `window` and `layers`, which say which layers it is about")
        return self
