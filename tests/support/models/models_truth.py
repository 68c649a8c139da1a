"""Observed layers and those that registry/models gives, side by side."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from attnreg.models.facts import LayerFacts
from attnreg.models.reader import ConfigError, requests_from_model
from support import DATA as SUITE_DATA

DATA = SUITE_DATA / "models"
# what a row has that is no fact of ours: the module's name, and the mask in FlashAttention's terms
_APART = {"module", "window_left", "window_right", "segments"}


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The observations of a file, each with family, variant, config and layers."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def known_differences() -> dict[str, dict[str, str]]:
    """Family -> field -> why the observed value is wrong."""
    known: dict[str, dict[str, str]] = {}
    for item in _exceptions()["differences"]:
        for family in item["families"]:
            known.setdefault(family, {}).update(dict.fromkeys(item["fields"], item["because"]))
    return known


def left_out() -> dict[str, str]:
    """Family that was observed and is not described -> why."""
    out: dict[str, str] = _exceptions()["left_out"]
    return out


def _exceptions() -> Any:
    return yaml.safe_load((DATA / "differences.yaml").read_text(encoding="utf-8"))


def differing(config: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, str]:
    """Field -> an example, for what an observation and registry/models do not agree on.

    ``layers`` is their number, ``refused`` a config that attnreg refuses.
    A tower observed by itself is called an encoder, and a vision tower in the model that it stands in: both are right.
    """
    try:
        layers = requests_from_model(config).layers
    except ConfigError as error:
        return {"refused": str(error)}
    if len(layers) != len(rows):
        return {"layers": f"{len(layers)} here, {len(rows)} observed"}
    found: dict[str, str] = {}
    for layer, row in zip(layers, rows, strict=True):
        for field, observed in row.items():
            if field in _APART or (field == "scaling" and observed is None):
                continue
            value = _value(layer, field)
            if not _same(value, observed) and not (field == "kind" and {value, observed} == {"vision", "encoder"}):
                where = f"layer {row['layer_idx']} ({row['module']})"
                found.setdefault(field, f"{where}: {value} here, {observed} observed")
    return found


def _value(layer: LayerFacts, field: str) -> Any:
    value = getattr(layer, field)
    # an observation does not tell where ranges end
    if value == "prefix_in_window":
        return "prefix"
    return asdict(value) if field == "mla" and value is not None else value


def _same(value: Any, observed: Any) -> bool:
    if isinstance(observed, dict) and isinstance(value, dict):
        return all(_same(value.get(key), part) for key, part in observed.items())
    if isinstance(observed, float) and isinstance(value, int | float):
        # some classes compute their scale in float32
        return math.isclose(value, observed, rel_tol=1e-6)
    return bool(value == observed)
