"""Installed packages that add to a registry through an entry point."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.files import brief, refusal

import attnreg
from attnreg import AttentionRequest, Platform

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


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a distribution with an entry point and some files: their paths and their texts."""
    site = tmp_path / "site"

    def install(name: str, value: str, files: dict[str, str]) -> None:
        info = f"{name}-1.0.dist-info"
        meta = {
            "METADATA": f"Name: {name}\nVersion: 1.0\n",
            "entry_points.txt": f"[attnreg.registries]\n{name} = {value}\n",
        }
        for file, text in {**{f"{info}/{file}": text for file, text in meta.items()}, **files}.items():
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).write_text(text)
        monkeypatch.syspath_prepend(str(site))
        for module in [m for m in sys.modules if m.partition(".")[0] == value.partition(".")[0]]:
            monkeypatch.delitem(sys.modules, module)

    return install


ACME = {
    "acme_attn/__init__.py": "",
    "acme_attn/kernels.py": "name = __name__\nkv_cache_shape = plan = write_kv = forward = print\n",
    "acme_attn/attnreg.yaml": PLUGIN,
}
HOPPER = Platform(platform="cuda", arch="sm90")


def test_an_installed_package_adds_its_backends(install: Callable[..., None]) -> None:
    install("acme", "acme_attn", ACME)
    registry = attnreg.load_registry("default")
    assert registry.name == "default+acme"
    assert registry.files[-1] == "<entry point acme = acme_attn>/attnreg.yaml"
    selected = attnreg.select(AttentionRequest(head_size=128), HOPPER, registry).backend
    assert selected is not None
    assert selected.name == "ACME_ATTN"
    # looking for the file imported nothing
    assert "acme_attn" not in sys.modules
    assert selected.load().name == "acme_attn.kernels"


def test_plugins_come_by_name_and_before_the_overlays_of_the_user(install: Callable[..., None]) -> None:
    install("zeta", "zeta_attn", {"zeta_attn/attnreg.yaml": "choices: [{prefer: ACME_ATTN}]\n"})
    install("acme", "acme_attn", ACME)
    registry = attnreg.load_registry("default", {"choices": [{"prefer": "TRITON_ATTN"}]})
    assert registry.name == "default+acme+zeta+overlay"
    assert [choice.backends for choice in registry.choices] == [("ACME_ATTN",), ("TRITON_ATTN",)]


def test_a_plugin_may_keep_its_file_in_a_subpackage(install: Callable[..., None]) -> None:
    files = {"acme_attn/__init__.py": "raise RuntimeError\n", "acme_attn/data/attnreg.yaml": PLUGIN}
    install("acme", "acme_attn.data", files)
    assert attnreg.load_registry("default").name == "default+acme"


def test_plugins_add_to_what_extends_the_default_registry_and_to_nothing_else(
    install: Callable[..., None], tree: Path
) -> None:
    install("acme", "acme_attn", ACME)
    (tree / "mine.yaml").write_text("choices: [{deny: FLASH_ATTN}]\n")
    assert attnreg.load_registry("mine.yaml").name == "default+acme+mine"
    assert attnreg.load_registry("base").name == "base"
    engine = next(name for name in attnreg.bundled_registries() if name != "default")
    assert attnreg.load_registry(engine).name == engine


def test_a_plugin_is_trusted_with_its_own_modules_only(install: Callable[..., None]) -> None:
    text = PLUGIN.replace("acme_attn.kernels", "other.kernels")
    install("acme", "acme_attn", ACME | {"acme_attn/attnreg.yaml": text})
    assert brief(refusal("default")).splitlines()[0] == (
        "<entry point acme = acme_attn>/attnreg.yaml:5:13: backends.ACME_ATTN.module: "
        "the package other is not trusted to be imported"
    )


BROKEN_PLUGINS = {
    "an unknown backend": (
        ("acme_attn", {"acme_attn/attnreg.yaml": "choices: [{deny: FLASH_ATTENTION}]\n"}),
        "<entry point acme = acme_attn>/attnreg.yaml:1:18: choices.deny: unknown backend `FLASH_ATTENTION`",
    ),
    "a file that is no YAML": (
        ("acme_attn", {"acme_attn/attnreg.yaml": "choices: [\n"}),
        (
            "<entry point acme = acme_attn>/attnreg.yaml:1:11: not valid YAML: "
            "while parsing a flow node did not find expected node content"
        ),
    ),
    "a package without the file": (
        ("acme_attn", {"acme_attn/__init__.py": ""}),
        "<entry point acme = acme_attn>/attnreg.yaml:1:1: there is no package acme_attn with a file attnreg.yaml",
    ),
    "a package that is not there": (
        ("acme_attn.data:FILE", {}),
        (
            "<entry point acme = acme_attn.data:FILE>/attnreg.yaml:1:1: "
            "there is no package acme_attn.data with a file attnreg.yaml"
        ),
    ),
    "an entry point of nothing": (
        (".", {}),
        "<entry point acme = .>/attnreg.yaml:1:1: there is no package . with a file attnreg.yaml",
    ),
}


@pytest.mark.parametrize(("plugin", "message"), BROKEN_PLUGINS.values(), ids=BROKEN_PLUGINS)
def test_a_broken_plugin_is_named(
    plugin: tuple[str, dict[str, str]], message: str, install: Callable[..., None]
) -> None:
    install("acme", *plugin)
    assert brief(refusal("default")).splitlines()[0] == message
