"""A third party's package with a plugin, and its installation for one test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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
# the same for a processor, where attnreg's own invariants say nothing of it
CPU_PLUGIN = PLUGIN.replace("cuda/mha", "cpu/mha").replace("[cuda]", "[cpu]").replace("FLASH_ATTN", "CPU_ATTN")
CPU = ACME | {"acme_attn/attnreg.yaml": CPU_PLUGIN}
# how a kernel module can fail to be one, and the reason that is said
UNFIT = {
    "a module that is not there": (None, "ModuleNotFoundError: No module named 'acme_attn.kernels'"),
    "a module without a function": (
        "kv_cache_shape = plan = forward = print\n",
        "acme_attn.kernels has no write_kv",
    ),
    "a module that raises": ("raise RuntimeError('no\\n\\x1b[31m nvcc')\n", "RuntimeError: no \\x1b[31m nvcc"),
    "a module that exits": ("import sys; sys.exit(3)\n", "SystemExit: 3"),
    "a module that ends the process": (
        "import os; os._exit(3)\n",
        "its import ended the process with exit status 3",
    ),
    "a module that crashes": (
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\n",
        "its import crashed the process: SIGSEGV",
    ),
}
PLACE = "<entry point acme = acme_attn>/attnreg.yaml"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution with an entry point and some files, by default ACME; returns its dist-info directory.

    files: paths below site-packages and their texts.
    """
    site, roots = tmp_path / "site", set[str]()
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
        roots.add(value.partition(".")[0])
        return info

    yield install
    for module in [m for m in sys.modules if m.partition(".")[0] in roots]:
        del sys.modules[module]
