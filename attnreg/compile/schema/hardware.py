"""The shape of the architectures in vocabulary.yaml."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from attnreg.compile.schema.values import DataModel


class ArchitectureData(DataModel):
    family: str = Field(description="What several architectures are called together, as CDNA 3.")
    products: list[str] = []
    aliases: list[str] = Field(default=[], description="Other names of it and of its products.")
    fp8: Literal["ocp", "fnuz"] = "ocp"
    capability: str | None = Field(default=None, description="The vendor's own version number, quoted.")
    series: str | None = Field(default=None, description="What it is ordered among; the platform, if left out.")


class UnreadData(DataModel):
    family: str = Field(description="What several architectures are called together, as RDNA 3.5.")
    products: list[str] = []
    aliases: list[str] = Field(default=[], description="Other names of it and of its products.")
    capability: str | None = Field(default=None, description="The vendor's own version number, quoted.")
    source: str = Field(description="The public page that says which products have it.")
