"""A handful of small model families to read configs with, each a file given as text."""

from __future__ import annotations

import re
import textwrap
from typing import Any

from attnreg.models.families import Families
from attnreg.models.reader import requests_from_model

LABEL = "models"
SOURCES = 'sources:\n  here: {url: "https://example.org", version: "1"}\n'
GENERAL = """\
summary: What holds unless a family says otherwise.
layers: layers
heads: [heads, 8]
kv_heads: [kv, heads, 8]
head_size: [size, {quotient: [width, heads]}, 64]
window: window
chunk: chunk
words:
  full: {kind: full}
  sliding: {kind: sliding}
  chunked: {kind: chunked}
  linear: {kind: linear}
  none: {kind: none}
pattern: full
"""
UNKNOWN = """\
summary: How a model of another family is read.
kv_heads: [kv, {note: KV heads were assumed., value: heads}]
"""


def of_files(**files: str) -> Families:
    """Families of files that are given whole, by their names; beside them the files that every directory has."""
    return Families.of({"_general": GENERAL, "_unknown": UNKNOWN, "_sources": SOURCES, **files}, LABEL)


def families(text: str) -> Families:
    """Families of which only what they say of layers is given, one after the other, each under its name.

    The first line of ``m`` is the second of its file, models/m.yaml.
    """
    parts = re.split(r"^(\S+):\n", textwrap.dedent(text), flags=re.MULTILINE)[1:]
    said = {name: textwrap.dedent(body) for name, body in zip(parts[::2], parts[1::2], strict=True)}
    source = "source: here:file.py#Name\n"
    heads = {name: f"model_type: {name}\n" if name[0] != "_" else "summary: A template.\n" for name in said}
    return of_files(**{n: heads[n] + body + (source if n[0] != "_" else "") for n, body in said.items()})


def read(text: str, **config: Any) -> Any:
    """The layers of a config of the first of some families."""
    return requests_from_model({"model_type": text.partition(":")[0].strip(), **config}, families=families(text))


def letters(text: str, **config: Any) -> str:
    """The kinds of such a config's layers, a letter each."""
    kinds = {"full": "f", "sliding": "s", "chunked": "c", "linear": "l", "encoder": "e", "cross": "x"}
    return "".join(kinds[layer.kind] for layer in read(text, **config).layers)
