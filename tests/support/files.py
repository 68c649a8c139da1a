"""Registries as files: a small one in the words of `tiny`, of which a test replaces what it is about."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import attnreg
from support import tiny


def row(*lines: str) -> str:
    """backends.yaml with two rows; the lines belong to the first, `A`, and begin at line 8.

    The file's `unchecked` states what a row leaves out.
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
    """A directory with the registry, some files replaced; a file whose text is empty is left out."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in (FILES | files).items():
        if text:
            (directory / f"{name}.yaml").write_text(text)
    return directory


def refusal(source: Any, overlays: Sequence[Any] = (), **options: Any) -> str:
    """What `load_registry` prints, without the title and the path of a directory that is the source."""
    with pytest.raises(attnreg.RegistryError) as e:
        attnreg.load_registry(source, overlays, **options)
    return str(e.value).partition("\n")[2].replace(f"{source}/", "")


def brief(message: str) -> str:
    """A refusal without the lines of source and the carets under them."""
    return "\n".join(line for line in message.splitlines() if not re.match(r" *\d* \| ", line))
