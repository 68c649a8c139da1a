"""Selections from a registry with overlays, and an overlay that adds a row and new words."""

from __future__ import annotations

from typing import Any

import attnreg
from attnreg import AttentionRequest, NoBackendError, Platform, Registry, Selection


def ask(registry: Registry, arch: str = "g2", backend: str | None = None, **request: Any) -> Selection:
    platform = Platform(platform=registry.vocabulary.architectures[arch].platform, arch=arch)
    fields = {"head_size": 64, "dtype": "float16", **request}
    return attnreg.select(AttentionRequest(**fields), platform, registry, backend)


def chosen(registry: Registry, arch: str = "g2", backend: str | None = None, **request: Any) -> str | None:
    """The backend that is selected, or None."""
    try:
        selected = ask(registry, arch, backend, **request).backend
    except NoBackendError:
        return None
    assert selected is not None
    return selected.name


NEW = """\
vocabulary:
  features: {cascade: A prefix is attended to once.}
  flags: {turbo: l}
  packages: {pkg: l}
  words: {kv_dtypes: {int8: {bits: 8, legend: l}}}
  architectures: {gpu: {g3: {family: f}, g1: {family: renamed}}}
  facets: {mode: {of: request, kind: boolean, legend: l, claim: modes, rows_below: any}}
  derived: {late: {legend: l, cases: [{when: {arch: {min: g3}}, value: true}, {value: false}]}}
  retired_environment: {OLD_NAME: {engine: x, use: y}}
backends:
  C:
    summary: A third.
    platforms: [gpu]
    attention: mha
    requires: {late: true}
    capabilities:
      {dtypes: any, kv_dtypes: [int8], head_sizes: any, head_sizes_v: any, block_sizes: any, num_heads: any,
       num_kv_heads: any, modes: true, features: [cascade]}
    source: "s:p#q"
place:
  - {backend: C, before: A}
"""
