"""The shape of `memory` and `stages` in steps.yaml: how an engine shares out a GPU's memory, and a model's layers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from attnreg.compile.schema.values import Condition, DataModel


class IndexKeysData(DataModel):
    """How the engine stores the keys of the indexer of a layer with sparse MLA, beside the latents."""

    when: Condition = {}
    bits: int = Field(gt=0, description="Bits of an element.")
    scale_bytes: int = Field(default=0, ge=0, description="Bytes of a scale.")
    scaled: int = Field(default=1, gt=0, description="Elements that share a scale.")
    source: str | None = None


class WholeWindowsData(DataModel):
    """Runs in which layers with a window keep every token, as other layers do that stand beside them."""

    name: str | None = Field(default=None, description="By which another release changes or removes it.")
    when: Condition = Field(description="What must hold of some layer of the run.")
    source: str | None = None


class WindowsData(DataModel):
    """How many tokens layers with a window keep: those of the window, or every token."""

    name: str | None = Field(default=None, description="By which another release changes or removes it.")
    when: Condition = Field(description="What must hold of the layer.")
    keeps: Literal["all", "window"]
    source: str | None = None


class MemoryData(DataModel):
    """The share of a GPU's memory that the engine takes by default for weights, work and KV cache together."""

    share: float = Field(gt=0, le=1)
    option: str = Field(description="The engine's option that sets another share.")
    index_keys: list[IndexKeysData] = Field(
        default=[],
        description="The keys of indexers; the first entry that holds counts. Without one they are not known.",
    )
    windows: list[WindowsData] = Field(
        default=[],
        description="Layers with a window; the first that holds counts. Without one causal layers keep the window.",
    )
    whole_windows: list[WholeWindowsData] = []
    source: str | None = None


class StagesData(DataModel):
    """How the engine shares out a model's layers over pipeline stages; a draft's are all on the last one."""

    spare: Literal["before_last", "last"] = Field(
        description="The stages that get one layer more if the layers do not divide."
    )
    source: str | None = None
