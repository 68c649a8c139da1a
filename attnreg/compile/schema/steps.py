"""The shape of steps.yaml: the steps of an engine between the command line and its choice of a backend, and after."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from attnreg.compile.schema.block_size import PageData
from attnreg.compile.schema.runs import GraphsData, LayoutData
from attnreg.compile.schema.values import FAILURE_ID, Condition, DataModel, Name, Sentence


class EffectData(DataModel):
    """The effect of a step if `when` holds: it sets facets, refuses the run, or says that the answer is unknown."""

    when: Condition | None = None
    sets: dict[str, Any] | None = Field(default=None, description="Facet -> value: the condition that then holds.")
    refuses: Sentence | None = Field(default=None, description="The sentence that a user reads: why nothing starts.")
    id: Name | None = Field(default=None, description=FAILURE_ID)
    unknown: Sentence | None = Field(default=None, description="Why the engine's answer is not in this table.")
    because: Sentence | None = None
    ends: Literal[True] | None = Field(default=None, description="No later step is about such a request.")


class StepData(EffectData):
    """One step. It has its own effect (`sets`, `refuses` or `unknown`), or `cases`: the first that holds counts."""

    step: str = Field(description="Its name, as the engine has it.")
    name: str | None = Field(default=None, description="What it is called where `step` names several.")
    cases: list[EffectData] = []
    source: str | None = None


class AfterData(DataModel):
    """A reason why the engine stops after the choice, whatever the backend."""

    when: Condition = Field(description="Facet -> values: the runs that it is about.")
    fails: Sentence = Field(description="The sentence that a user reads: why the engine stops.")
    id: Name | None = Field(default=None, description=FAILURE_ID)
    source: str | None = None


class OptionData(DataModel):
    """An option that names a backend, and the layers that it reaches; of several the first that a user gives counts."""

    reaches: Condition | None = Field(default=None, description="Facet -> values: the layers; all, if left out.")
    facet: str | None = Field(default=None, description="The facet that gets the name, where steps read it.")
    names: dict[str, str] = Field(default={}, description="The engine's own word -> the row that it means.")
    source: str | None = None


class StepsFile(DataModel):
    """steps.yaml: the steps of an engine before it chooses a backend; a later step sees what an earlier one wrote."""

    options: dict[Literal["backend", "draft_backend", "prefill_backend", "vision_backend"], OptionData] = {}
    steps: list[StepData] = []
    drafts: dict[str, str] = Field(
        default={}, description="Facet of a draft's request -> the target's facet whose value it gets, after the steps."
    )
    after: list[AfterData] = []
    page: PageData | None = None
    layout: LayoutData | None = None
    graphs: GraphsData | None = None
