"""The shape of `memory` and `stages` in steps.yaml: how an engine shares out a GPU's memory, and a model's layers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from attnreg.compile.schema.values import DataModel


class MemoryData(DataModel):
    """The share of a GPU's memory that the engine takes by default for weights, work and KV cache together."""

    share: float = Field(gt=0, le=1)
    option: str = Field(description="The engine's option that sets another share.")
    source: str | None = None


class StagesData(DataModel):
    """How the engine shares out a model's layers over pipeline stages; a draft's are all on the last one."""

    spare: Literal["before_last", "last"] = Field(
        description="The stages that get one layer more if the layers do not divide."
    )
    source: str | None = None
