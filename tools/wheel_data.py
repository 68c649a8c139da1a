"""Puts the registry into the wheel, with the files of model families as one file: 640 small ones weigh four times that.

hatchling calls it where it builds a wheel. `attnreg.compile.inputs.bundled.joined_families` reads the file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelData(BuildHookInterface[BuilderConfig]):
    """Adds the files of `registry/`. An editable install has them in the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files of a wheel and their places in it. Raises ValueError for a family that cannot be joined."""
        if version == "editable":
            return
        registry, places = Path(self.root, "registry"), build_data["force_include"]
        for entry in sorted(registry.iterdir()):
            if entry.name != "models":
                places[str(entry)] = f"attnreg/registry/{entry.name}"
        self._scratch = tempfile.TemporaryDirectory()
        families = Path(self._scratch.name, "families.yaml")
        families.write_text(joined(sorted(registry.glob("models/*.yaml"))), encoding="utf-8")
        places[str(families)] = f"attnreg/registry/models/{families.name}"


def joined(files: list[Path]) -> str:
    """The texts of files as one stream of YAML documents, each below a line with its file's name.

    Raises ValueError for a text that has such a line itself, or whose last line has no end.
    """
    documents = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        if "\n---" in f"\n{text}" or not text.endswith("\n"):
            raise ValueError(f"{file}: a family's file is one YAML document that ends with a line")
        documents.append(f"--- # {file.name}\n{text}")
    return "".join(documents)
