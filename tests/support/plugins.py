"""A third party's package with a plugin, and its installation for one test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Install = Callable[..., Path]

PLUGIN = """\
sources: {acme: {url: u, version: "1"}}
backends:
  ACME_ATTN:
    summary: A third party's kernel.
    module: acme_attn.kernels
    contract: 1
    platforms: [cuda]
    attention: mha
    capabilities:
      {dtypes: any, kv_dtypes: any, block_sizes: any, head_sizes: any, head_sizes_v: same, num_heads: any,
       num_kv_heads: any, cache_layouts: [NHD], attn_types: any}
    source: "acme:p#q"
place:
  - {backend: ACME_ATTN, before: FLASH_ATTN, orders: [cuda/mha]}
"""
# every function of the contract, without torch
KERNELS = "name = __name__\nkv_cache_shape = plan = write_kv = forward = print\n"
ACME = {"acme_attn/__init__.py": "", "acme_attn/kernels.py": KERNELS, "acme_attn/attnreg.yaml": PLUGIN}
PLACE = "<entry point acme = acme_attn>/attnreg.yaml"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a distribution with an entry point and some files, by default ACME; returns its dist-info directory.

    files: paths below site-packages and their texts.
    """
    site = tmp_path / "site"
    monkeypatch.delenv("ATTNREG_PLUGINS", raising=False)

    def install(name: str = "acme", value: str = "acme_attn", files: dict[str, str] | None = None) -> Path:
        info = site / f"{name}-1.0.dist-info"
        meta = {
            "METADATA": f"Name: {name}\nVersion: 1.0\n",
            "entry_points.txt": f"[attnreg.registries]\n{name} = {value}\n",
        }
        texts = {f"{info.name}/{file}": text for file, text in meta.items()} | (ACME if files is None else files)
        for file, text in texts.items():
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).write_text(text)
        monkeypatch.syspath_prepend(str(site))
        for module in [m for m in sys.modules if m.partition(".")[0] == value.partition(".")[0]]:
            monkeypatch.delitem(sys.modules, module)
        return info

    return install
