"""The shape of registry/logs.yaml as pydantic models, for the JSON Schema of editors and for its test."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from attnreg.compile.schema.values import DataModel

_TEXT = "The engine's format string, or the part of it that tells the line from all others; fields are in braces."
_SOURCE = "Where the line can be read: SOURCE:PATH#SYMBOL, or the program that prints it."


_Says = Literal[
    "order",
    "named",
    "old",
    "stored",
    "precluded",
    "refused",
    "none",
    "unknown-name",
    "version",
    "runs-version",
    "tower",
    "prompts",
    "graphs",
    "blocks",
    "memory",
    "step",
    "note",
    "default",
    "written",
    "pages",
    "phases",
]


class LoggedFactData(DataModel):
    """A line with facts of a run, or with the GPU."""

    text: str = Field(description=_TEXT, min_length=4)
    source: str = Field(description=_SOURCE, min_length=4)


class LoggedLineData(LoggedFactData):
    """A line about attention, and the data that explain it."""

    says: _Says = Field(description="What the line says, which decides how it is explained.")
    platform: str | None = Field(default=None, description="The platform on which alone the line is logged.")
    named: str | None = Field(default=None, description="The backend, if the line itself does not name it.")
    row: str | None = Field(default=None, description="The backend that the line is about.")
    rows: list[str] = Field(default=[], description="Names under which a registry may have the backend; {} is its own.")
    like: dict[str, str] = Field(default={}, description="The line's name of a backend -> a registry's.")
    means: str | None = Field(default=None, description="A sentence that explains the line, with its fields.")
    steps: list[str] = Field(default=[], description="The steps of a registry that log it.")
    options: list[str] = Field(default=[], description="Options of the engine that change what the line says.")
    about: str | None = Field(default=None, description="A word in the condition of the step that logs it.")
    words: str | None = Field(default=None, description="The reason for a choice, in words.")
    refused: bool = Field(default=False, description="Whether the backend refuses.")


class LoggedRefusalData(LoggedFactData):
    """The engine's own words for a refusal that a registry holds."""

    refuses: list[str] = Field(description="The beginnings of the sentences that registries have for it.")
    row: str | None = Field(default=None, description="The backend that alone refuses with these words.")
    about: str | None = Field(default=None, description="The facet whose claims explain the refusal.")
    means: str | None = Field(default=None, description="A sentence that explains the refusal.")
    options: list[str] = Field(default=[], description="Options of the engine that change the refusal.")
    of: str | None = Field(default=None, description="The bundled release with these words, for a log without one.")


class LoggedEngineData(DataModel):
    """What is known of an engine's logs."""

    title: str
    settings: dict[str, str] = Field(description="Key of its logged configuration -> fact of a run.")
    facts: list[LoggedFactData]
    lines: list[LoggedLineData]
    reasons: dict[str, str] = Field(description="A reason against a backend -> the facet or the feature.")
    refusals: list[LoggedRefusalData]
    unlogged: list[str] = Field(description="Refusals for which the engine has no words of its own.")


class LogsFile(DataModel):
    """registry/logs.yaml."""

    messages: list[str] = Field(description="Keys of JSON logs that hold the message; the first one counts.")
    words: list[str] = Field(description="A line without one of them is not read.")
    errors: list[str] = Field(description="Words of errors about attention.")
    gpus: list[LoggedFactData]
    vllm: LoggedEngineData
    sglang: LoggedEngineData
