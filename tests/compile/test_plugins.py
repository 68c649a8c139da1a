"""Installed packages that add to a registry through an entry point; a broken one takes nothing else down."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from support.registries.files import brief, refusal
from support.registries.plugins import ACME, PLACE, PLUGIN, Install, install

import attnreg
from attnreg import AttentionRequest, Platform, Registry, loader
from attnreg.compile.inputs import reading
from attnreg.errors import RegistryWarning
from attnreg.loader import load_kernel

__all__ = ["install"]

HOPPER = Platform(platform="cuda", arch="sm90")


def load_warned(*arguments: Any, **options: Any) -> tuple[Registry, list[str]]:
    """A registry, and the texts of the warnings of its loading."""
    with pytest.warns(RegistryWarning) as caught:
        registry = attnreg.load_registry(*arguments, **options)
    return registry, [str(warning.message) for warning in caught]


def test_an_installed_package_adds_its_backends(install: Install) -> None:
    install()
    registry = attnreg.load_registry("default")
    assert registry.name == "default+acme"
    assert registry.files[-1] == PLACE
    # a request of the order in which it places its row
    asked = AttentionRequest(head_size=128, dtype="float16")
    selected = attnreg.select(asked, HOPPER, registry).backend
    assert selected is not None
    assert selected.name == "ACME_ATTN"
    # looking for the file imported nothing
    assert "acme_attn" not in sys.modules
    assert load_kernel(registry, selected.title).name == "acme_attn.kernels"


def test_plugins_come_by_name_and_before_the_overlays_of_the_user(install: Install) -> None:
    install("zeta", "zeta_attn", {"zeta_attn/attnreg.yaml": "choices: [{prefer: ACME_ATTN}]\n"})
    install()
    registry = attnreg.load_registry("default", {"choices": [{"prefer": "TRITON_ATTN"}]})
    assert registry.name == "default+acme+zeta+overlay"
    assert [choice.backends for choice in registry.choices] == [("ACME_ATTN",), ("TRITON_ATTN",)]


def test_a_plugin_may_keep_its_file_in_a_subpackage(install: Install) -> None:
    files = {"acme_attn/__init__.py": "raise RuntimeError\n", "acme_attn/data/attnreg.yaml": PLUGIN}
    install("acme", "acme_attn.data [extra]", files)
    assert attnreg.load_registry("default").name == "default+acme"


# what a plugin extends -----------------------------------------------------------------------------------------------


def test_plugins_add_to_what_extends_the_default_registry_and_to_nothing_else(install: Install, tree: Path) -> None:
    install()
    (tree / "mine.yaml").write_text("choices: [{deny: FLASH_ATTN}]\n")
    assert attnreg.load_registry("mine.yaml").name == "default+acme+mine"
    assert attnreg.load_registry("base").name == "base"
    engine = next(name for name in attnreg.bundled_registries() if name != "default")
    assert attnreg.load_registry(engine).name == engine


ENGINE_ROW = """\
extends: [vllm-0.33.0, vllm-0.20.0]
sources: {acme: {url: u, version: "1"}}
backends:
  ACME_ATTN:
    summary: A third party's kernel, as vLLM knows it.
    platforms: [cuda]
    attention: mha
    capabilities: {dtypes: any, kv_dtypes: any, block_sizes: any, head_sizes: any, attn_types: any, CLAIMS}
    only_on_request: no order of vLLM names it
    source: "acme:p#q"
"""


def test_a_plugin_may_extend_registries_of_engines(install: Install) -> None:
    claims = {
        f.claim for n in ("vllm-0.33.0", "vllm-0.20.0") for f in attnreg.load_registry(n).vocabulary.claims.values()
    }
    stated = {"dtypes", "kv_dtypes", "block_sizes", "head_sizes", "attn_types"}
    text = ENGINE_ROW.replace("CLAIMS", ", ".join(f"{claim}: any" for claim in sorted(claims - stated)))  # type: ignore[type-var]
    install(files=ACME | {"acme_attn/vllm/attnreg.yaml": text})
    install("acme_vllm", "acme_attn.vllm", {})
    for name in ("vllm-0.33.0", "vllm-0.20.0"):
        registry = attnreg.load_registry(name)
        assert registry.name == f"{name}+acme_vllm"
        selected = attnreg.select(AttentionRequest(head_size=128), HOPPER, registry, "ACME_ATTN")
        assert selected.chosen is not None
    assert attnreg.load_registry("default").name == "default+acme"


def test_one_file_for_several_registries(install: Install) -> None:
    install(files={"acme_attn/attnreg.yaml": "extends: [default, vllm-0.33.0]\nchoices: [{deny: FLASH_ATTN}]\n"})
    assert attnreg.load_registry("default").name == "default+acme"
    assert attnreg.load_registry("vllm-0.33.0").name == "vllm-0.33.0+acme"
    assert attnreg.load_registry("vllm-0.20.0").name == "vllm-0.20.0"


def test_a_list_is_for_plugins_alone(tree: Path) -> None:
    (tree / "mine.yaml").write_text("extends: [default, vllm-0.33.0]\nchoices: [{deny: FLASH_ATTN}]\n")
    message = (
        "mine.yaml:1:10: extends: an overlay extends one registry; a list is for the file of a plugin\n"
        "  help: name one registry"
    )
    assert brief(refusal("mine.yaml")) == message
    assert brief(refusal("default", ["mine.yaml"])) == message


# broken plugins ------------------------------------------------------------------------------------------------------

BROKEN_PLUGINS: dict[str, tuple[tuple[str, dict[str, str]], str]] = {
    "an unknown backend": (
        ("acme_attn", {"acme_attn/attnreg.yaml": "choices: [{deny: FLASH_ATTENTION}]\n"}),
        f"{PLACE}:1:18: choices.deny: unknown backend `FLASH_ATTENTION`",
    ),
    "a file that is no YAML": (
        ("acme_attn", {"acme_attn/attnreg.yaml": "choices: [\n"}),
        f"{PLACE}:1:11: not valid YAML: while parsing a flow node did not find expected node content",
    ),
    "an unknown claim": (
        ("acme_attn", ACME | {"acme_attn/attnreg.yaml": PLUGIN.replace("dtypes: any, kv", "types: any, kv")}),
        f"{PLACE}:9:5: backends.ACME_ATTN.capabilities: `dtypes` is missing",
    ),
    "an unknown claim beside all": (
        ("acme_attn", ACME | {"acme_attn/attnreg.yaml": PLUGIN.replace("{dtypes: any", "{tiles: any, dtypes: any")}),
        f"{PLACE}:10:8: backends.ACME_ATTN.capabilities.tiles: unknown capability `tiles`",
    ),
    "another contract": (
        ("acme_attn", ACME | {"acme_attn/attnreg.yaml": PLUGIN.replace("contract: 1", "contract: 99")}),
        (
            f"{PLACE}:6:15: backends.ACME_ATTN.contract: the module is made for contract 99, "
            "and this attnreg has contract 1"
        ),
    ),
    "a module of a stranger": (
        ("acme_attn", ACME | {"acme_attn/attnreg.yaml": PLUGIN.replace("acme_attn.kernels", "other.kernels")}),
        f"{PLACE}:5:13: backends.ACME_ATTN.module: the package other is not trusted to be imported",
    ),
    "a registry that is none": (
        ("acme_attn", {"acme_attn/attnreg.yaml": "extends: [default, vllm-0.33]\nchoices: [{deny: FLASH_ATTN}]\n"}),
        f"{PLACE}:1:10: a plugin extends bundled registries, and `vllm-0.33` is none",
    ),
    "a text": (
        ("acme_attn", {"acme_attn/attnreg.yaml": "hello\n"}),
        f"{PLACE}:1:1: the file is no overlay: it has no key of one",
    ),
    "words that the registry has": (
        ("acme_attn", {"acme_attn/attnreg.yaml": "vocabulary: {facets: {tile: {of: request, kind: integer}}}\n"}),
        f"{PLACE}:1:23: vocabulary.facets.tile: `legend` is missing",
    ),
    "a package without the file": (
        ("acme_attn", {"acme_attn/__init__.py": ""}),
        f"{PLACE}:1:1: there is no package acme_attn with a file attnreg.yaml",
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
    "a directory in place of the file": (
        ("acme_attn", {"acme_attn/attnreg.yaml/x": ""}),
        f"{PLACE}:1:1: there is no package acme_attn with a file attnreg.yaml",
    ),
}


@pytest.mark.parametrize(("plugin", "message"), BROKEN_PLUGINS.values(), ids=BROKEN_PLUGINS)
def test_a_broken_plugin_is_named_and_left_out(
    plugin: tuple[str, dict[str, str]], message: str, install: Install, default: Registry
) -> None:
    install("acme", *plugin)
    install("zeta", "zeta_attn", {"zeta_attn/attnreg.yaml": "choices: [{deny: FLASH_ATTN}]\n"})
    registry, (warning,) = load_warned("default", {"choices": [{"deny": "FLASHINFER"}]})
    assert registry.name == "default+zeta+overlay"
    (left_out,) = registry.left_out
    assert (left_out.plugin, left_out.why) == ("acme", "broken")
    assert brief(str(left_out.problems[0])).splitlines()[0].startswith(message)
    assert warning.startswith(f"left out: plugin acme is broken ({message}")
    assert registry.backends.keys() == default.backends.keys()
    # one that takes no part is no part of the fingerprint
    alone, _ = load_warned("default", plugins=["acme"])
    assert alone.title == default.title


def test_who_names_what_a_broken_plugin_has_is_told(install: Install) -> None:
    install(files=ACME | {"acme_attn/attnreg.yaml": PLUGIN.replace("contract: 1", "contract: 2")})
    registry, _ = load_warned("default")
    left_out = (
        f"left out: plugin acme is broken ({PLACE}:6:15: backends.ACME_ATTN.contract: "
        "the module is made for contract 2, and this attnreg has contract 1)"
    )
    with pytest.raises(attnreg.RequestError) as e:
        attnreg.select(AttentionRequest(head_size=128), HOPPER, registry, "ACME_ATTN")
    assert str(e.value).startswith("unknown backend 'ACME_ATTN'; did you mean ")
    assert str(e.value).endswith(f"; {left_out}")
    said = refusal("default", {"choices": [{"require": "ACME_ATTN"}]})
    assert "choices.require: unknown backend `ACME_ATTN`" in said
    assert said.endswith(f"; {left_out}")
    assert left_out in refusal("default", {"backends": {"ACME_ATTN": {"status": "stable"}}})


def test_a_users_own_fault_is_no_plugins(install: Install) -> None:
    install()
    assert brief(refusal("default", {"choices": [{"deny": "ACME_ATN"}]})).splitlines()[0] == (
        "<overlay>:4:15: choices.deny: unknown backend `ACME_ATN`"
    )


def test_a_plugin_that_builds_on_a_broken_one_is_broken_too(install: Install, default: Registry) -> None:
    install(files=ACME | {"acme_attn/attnreg.yaml": "backends: []\n"})
    install("zeta", "zeta_attn", {"zeta_attn/attnreg.yaml": "choices: [{prefer: ACME_ATTN}]\n"})
    registry, warnings = load_warned("default")
    assert registry.title == default.title
    assert [w.partition(" is broken")[0] for w in warnings] == ["left out: plugin acme", "left out: plugin zeta"]
    assert "left out: plugin acme is broken" in str(registry.left_out[1].problems[0])


def test_of_two_plugins_that_contradict_each_other_the_second_is_left_out(install: Install) -> None:
    install()
    install("zeta", "zeta_attn", {"zeta_attn/attnreg.yaml": PLUGIN.replace("acme_attn", "zeta_attn")})
    registry, _ = load_warned("default")
    assert (registry.name, [p.plugin for p in registry.left_out]) == ("default+acme", ["zeta"])


def test_select_warns_once_and_answers_as_without_the_plugin(
    install: Install, default: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(files={"acme_attn/attnreg.yaml": "backends: []\n"})
    monkeypatch.setattr(loader, "_default", None)
    with pytest.warns(RegistryWarning, match="left out: plugin acme is broken"):
        selection = attnreg.select(AttentionRequest(head_size=128), HOPPER)
    # a second warning would be an error
    assert attnreg.select(AttentionRequest(head_size=64), HOPPER).registry.title == default.title
    assert selection.candidates == attnreg.select(AttentionRequest(head_size=128), HOPPER, default).candidates


# metadata that cannot be read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"\xff[attnreg.registries]\nacme = acme_attn\n", b"[attnreg.registries]\nacme\n"])
def test_entry_points_that_cannot_be_read(content: bytes, install: Install) -> None:
    info = install()
    (info / "entry_points.txt").write_bytes(content)
    install("zeta", "zeta_attn", {"zeta_attn/attnreg.yaml": "choices: [{deny: FLASH_ATTN}]\n"})
    registry, (warning,) = load_warned("default")
    assert registry.name == "default+zeta"
    assert warning.startswith(f"left out: plugin acme is broken ({info}/entry_points.txt:1:1: the entry points cannot")
    assert attnreg.load_registry("default", plugins=["zeta"]).name == "default+zeta"


def test_unreadable_entry_points_of_others_are_not_our_matter(install: Install) -> None:
    other = install("other", "other", {})
    (other / "entry_points.txt").write_bytes(b"\xff[console_scripts]\nx\n")
    install()
    assert attnreg.load_registry("default").name == "default+acme"


def test_metadata_that_is_not_utf_8_does_not_matter(install: Install) -> None:
    (install() / "METADATA").write_bytes(b"Name: acme\nVersion: 1.0\nAuthor: Andr\xe9\n")
    assert attnreg.load_registry("default").name == "default+acme"


def test_a_finder_that_fails_is_the_plugins_problem(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    find = importlib.util.find_spec

    def find_spec(name: str) -> Any:
        if name == "acme_attn":
            raise RuntimeError("a finder of its own")
        return find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert load_warned("default")[0].name == "default"


def test_names_are_printed_without_control_characters(install: Install) -> None:
    install("ac\x1b[31mme", "acme\u202eattn", {})
    assert load_warned("default")[1] == [
        (
            "left out: plugin ac\\x1b[31mme is broken (<entry point ac\\x1b[31mme = acme\\u202eattn>/attnreg.yaml:1:1: "
            "there is no package acme\\u202eattn with a file attnreg.yaml)"
        )
    ]


# switches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "name", "warnings"),
    [
        ("", "default+acme+zeta", []),
        ("off", "default", []),
        ("OFF", "default", []),
        ("acme", "default+acme", []),
        (" zeta , acme ", "default+acme+zeta", []),
        (
            "acm",
            "default",
            [
                (
                    "$ATTNREG_PLUGINS names 'acm', and no installed package has a plugin of this name; "
                    "did you mean `acme`? (also: zeta)"
                )
            ],
        ),
        (
            "acme,off",
            "default+acme",
            [
                "$ATTNREG_PLUGINS names 'off', and no installed package has a plugin of this name; known: acme, zeta",
            ],
        ),
    ],
)
def test_a_variable_says_which_plugins_take_part(
    value: str, name: str, warnings: list[str], install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    install("zeta", "zeta_attn", {"zeta_attn/attnreg.yaml": "choices: [{deny: FLASH_ATTN}]\n"})
    monkeypatch.setenv("ATTNREG_PLUGINS", value)
    if warnings:
        registry, said = load_warned("default")
        assert said == warnings
    else:
        registry = attnreg.load_registry("default")
    assert registry.name == name
    # an argument goes before the variable
    assert attnreg.load_registry("default", plugins=["zeta"]).name == "default+zeta"
    assert attnreg.load_registry("default", plugins=()).name == "default"


def test_a_backend_of_a_plugin_that_is_not_let_in(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setenv("ATTNREG_PLUGINS", "off")
    registry = attnreg.load_registry("default")
    with pytest.raises(attnreg.RequestError, match=r"; left out: plugin acme is not let in by \$ATTNREG_PLUGINS$"):
        attnreg.select(AttentionRequest(head_size=128), HOPPER, registry, "ACME_ATTN")


def test_a_broken_plugin_that_is_not_let_in_is_not_read(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(files={"acme_attn/attnreg.yaml": "backends: []\n"})
    monkeypatch.setenv("ATTNREG_PLUGINS", "off")
    assert attnreg.load_registry("default").name == "default"


def test_a_fault_of_attnregs_own_is_the_plugins_problem_too(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    compile_registry = reading.compile_registry

    def stumbling(name: str, *arguments: Any) -> Registry:
        if "acme" in name:
            raise ZeroDivisionError("nobody thought of it")
        return compile_registry(name, *arguments)

    monkeypatch.setattr(reading, "compile_registry", stumbling)
    assert load_warned("default")[1] == [
        f"left out: plugin acme is broken ({PLACE}:1:1: it cannot be read: ZeroDivisionError: nobody thought of it)"
    ]
