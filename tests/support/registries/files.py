"""A small registry as files, in the words of `tiny`. Each test replaces the file that it is about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import attnreg
from support.registries import tiny


def row(*lines: str) -> str:
    """backends.yaml with two rows. The lines go into the first, `A`, and begin at line 8.

    The file's `unchecked` states the claims that a row leaves out.
    """
    return f"""\
unchecked: [{", ".join(tiny.UNCHECKED)}]
backends:
  A:
    summary: The first.
    platforms: [gpu]
    attention: mha
    source: "s:path#symbol"
{"".join(f"    {line}" + chr(10) for line in lines)}\
  B:
    summary: The second.
    platforms: [gpu, npu]
    attention: mha
    source: "s:path#symbol"
    capabilities: {{dtypes: [float16, bfloat16], features: [sinks]}}
sources: {{s: {{url: u, version: "1"}}}}
"""


FILES = {
    "vocabulary": yaml.safe_dump(tiny.VOCABULARY, sort_keys=False, width=1000),
    "backends": row("capabilities: {dtypes: [float16]}"),
    "priorities": "gpu:\n  - {name: all, order: [A, B]}\nnpu:\n  - {name: all, order: [B]}\n",
}


def write(directory: Path, **files: str) -> Path:
    """Write the registry into a directory, with some files replaced. A file with an empty text is left out."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (FILES | files).items():
        if text:
            (directory / f"{name}.yaml").write_text(text)
    return directory


def refusal(source: Any, overlays: Sequence[Any] = (), **options: Any) -> str:
    """The message of `load_registry`'s error, without its title and without the path of the directory."""
    with pytest.raises(attnreg.RegistryError) as e:
        attnreg.load_registry(source, overlays, **options)
    return str(e.value).partition("\n")[2].replace(f"{source}/", "")


def brief(message: str) -> str:
    """An error message without its lines of source and carets."""
    return "\n".join(line for line in message.splitlines() if not re.match(r" *\d* \| ", line))
