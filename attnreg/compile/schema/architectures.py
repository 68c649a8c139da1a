"""The shape of architectures.yaml: which classes of models a release of an engine serves, and how."""

from __future__ import annotations

from pydantic import Field

from attnreg.compile.schema.values import DataModel, Sentence

# a block of names, one a line
_NAMES = "Names of classes, one a line."


class ServedData(DataModel):
    """How the release serves classes of models, a block of names for each word.

    A name belongs to one word. In a file that extends another, a name has its word from this file if it is in it.
    """

    native: str = Field(default="", description=f"By a class of the engine's own. {_NAMES}")
    transformers: str = Field(default="", description=f"By its Transformers backend. {_NAMES}")
    unbuilt: str = Field(default="", description=f"Taken by its Transformers backend, and never built here. {_NAMES}")
    fails: dict[Sentence, str] = Field(default={}, description="Why the Transformers backend fails to build -> names.")
    until: dict[Sentence, str] = Field(default={}, description="The last release that served them -> names.")
    plugin: dict[Sentence, str] = Field(default={}, description="The address of the plug-in that serves them -> names.")
    refused: str = Field(default="", description=f"Of transformers, and not served. {_NAMES}")
    gone: str = Field(default="", description=f"In the release that this one extends, and not here. {_NAMES}")


class ArchitecturesFile(DataModel):
    """architectures.yaml: the classes of models that a release serves. A recorder writes it."""

    extends: str | None = Field(default=None, description="The bundled registry whose names hold where this has none.")
    source: str = Field(description="Where the engine decides it.")
    asked: str = Field(description="The version of transformers whose classes were asked about.")
    suffixes: list[str] = Field(default=[], description="Ends of names between which the engine converts classes.")
    served: ServedData = ServedData()
