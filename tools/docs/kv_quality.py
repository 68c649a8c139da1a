"""The generated parts of docs/kv_quality.md: the figures of benchmarks/kv_quality.py, as tables and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docs_site import pictures

from docs.markdown import table

PICTURE = "docs/images/kv_quality.svg"
# the model whose figures the picture shows
_DRAWN = "SmolLM2-135M"


def _record(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "benchmarks/results/kv_quality.json").read_text(encoding="utf-8"))
    return found


def quality_blocks(root: Path) -> dict[str, str]:
    """Name of each generated block -> its Markdown.

    `quality`: the versions and the date of the measurement, and a table for each source of keys and values.
    `whole`: the table of whole models.
    """
    record = _record(root)
    machine = record["machine"]
    head = f"torch {machine['torch']}, {machine['date']}; {machine['tokens']} tokens."
    parts = [head]
    columns = (("format", 20), ("bytes", 8), ("keys", 10), ("values", 10), ("output", 10), ("KL", 10))
    names = ("key_error", "value_error", "output_error", "kl")
    for source in dict.fromkeys(f["source"] for f in record["figures"]):
        same = [f for f in record["figures"] if f["source"] == source]
        rows = [[f"`{f['format']}`", str(f["bytes"]), *(f"{f[name]:.2g}" for name in names)] for f in same]
        parts.append(f"### {source}, heads of {same[0]['head_size']}\n\n{table(columns, rows)}")
    whole = (
        ("format", 20), ("plain layers", 14), ("32k tokens, MiB", 16), ("perplexity", 12), ("KL", 10),
        ("same token", 12), ("greedy", 8),
    )  # fmt: skip
    rows = [
        [
            f"`{f['format']}`",
            str(f["plain_layers"]),
            f"{f['context_bytes'] / 2**20:.0f}" if "context_bytes" in f else "",
            f"{f['perplexity']:.2f}",
            f"{f['kl']:.2g}",
            f"{f['same_token']:.1%}",
            str(f["greedy"]),
        ]
        for f in record["models"]
    ]
    return {"quality": "\n\n".join(parts), "whole": table(whole, rows)}


def picture(root: Path) -> str:
    """A scatter plot for the keys and values of `_DRAWN`: a token's bytes against the divergence of attention."""
    points = [
        (f["format"], float(f["bytes"]), f["kl"], f["format"].startswith("turboquant"))
        for f in _record(root)["figures"]
        if f["source"] == _DRAWN
    ]
    title = f"What a smaller KV cache costs: {_DRAWN}, heads of 64"
    axes = "bytes of a token and KV head", "KL of the attention distribution"
    return pictures.standalone(pictures.scatter("kv-quality", title, axes, points))
