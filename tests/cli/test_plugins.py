"""Plugins in the command: a broken one is named by every command, fails `check`, and takes nothing else down."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.registries.plugins import ACME, PLACE, PLUGIN, Install, install

from attnreg import Registry
from attnreg.cli.inputs import RegistryInputs

__all__ = ["install"]

BROKEN = ACME | {"acme_attn/attnreg.yaml": PLUGIN.replace("contract: 1", "contract: 2")}
FAULT = f"{PLACE}:6:15: backends.ACME_ATTN.contract: the module is made for contract 2, and this attnreg has contract 1"
LEFT_OUT = f"left out: plugin acme is broken ({FAULT})"
ASK = ("explain", "--arch", "sm80", "--head-size", "128")


@pytest.fixture(autouse=True)
def default_loaded_once() -> None:
    """The default registry is loaded anew here: it has plugins."""


def test_every_command_answers_as_without_a_broken_plugin(install: Install, run: Callable[..., Any]) -> None:
    before = [run(*command) for command in (ASK, ("list",), ("models", "gemma"), ("show", "FLASH_ATTN"))]
    install(files=BROKEN)
    after = [run(*command) for command in (ASK, ("list",), ("models", "gemma"), ("show", "FLASH_ATTN"))]
    assert [r.out for r in after] == [r.out for r in before]
    assert [r.status for r in after] == [0, 0, 0, 0]
    # the models are no part of the registry
    assert [r.err for r in after] == [f"attnreg: {LEFT_OUT}\n" * n for n in (1, 1, 0, 1)]


def test_its_backends_are_said_to_be_left_out(install: Install, run: Callable[..., Any]) -> None:
    install(files=BROKEN)
    for command in ((*ASK, "--backend", "ACME_ATTN"), ("show", "ACME_ATTN"), (*ASK, "--prefer", "ACME_ATTN")):
        found = run(*command)
        assert found.status == 2
        assert f"; {LEFT_OUT}" in found.err


def test_the_doctor_says_it_once_with_the_place(
    install: Install, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(files=BROKEN)
    found = run("doctor", "--json")
    assert (found.status, found.err) == (0, "")
    assert json.loads(found.out)["problems"] == [LEFT_OUT]
    monkeypatch.setenv("ATTNREG_PLUGINS", "off")
    problems = json.loads(run("doctor", "--json").out)["problems"]
    assert problems == ["left out: plugin acme is not let in by $ATTNREG_PLUGINS"]


@pytest.mark.parametrize("name", ["default", "vllm-0.33.0"])
def test_a_check_fails(name: str, install: Install, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from attnreg.analysis.check import findings

    # the faults of the registry itself are found elsewhere
    for part in ("_invariants", "_orders", "unreachable_steps", "refused_choices", "_cases", "_rows", "unused_words"):
        monkeypatch.setattr(findings, part, lambda _: ())
    text = BROKEN["acme_attn/attnreg.yaml"]
    install(files=BROKEN | {"acme_attn/attnreg.yaml": f"extends: {name}\n{text}" if name == "default" else "a: [\n"})
    found = run("check", "--registry", name)
    assert found.status == 1
    assert "attnreg.yaml:" in found.out
    fault = "backends.ACME_ATTN.contract" if name == "default" else "not valid YAML"
    assert f"plugin acme is left out: {fault}" in " ".join(found.out.split())


def test_a_plugin_that_is_sound_is_used_and_the_variable_leaves_it_out(
    install: Install, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, default: Registry
) -> None:
    install()
    assert "▸ ACME_ATTN" in run(*ASK).out
    monkeypatch.setenv("ATTNREG_PLUGINS", "off")
    assert RegistryInputs().load().title == default.title
    monkeypatch.setenv("ATTNREG_PLUGINS", "acme,acmee")
    found = run(*ASK)
    assert "▸ ACME_ATTN" in found.out
    assert found.err == (
        "attnreg: $ATTNREG_PLUGINS names 'acmee', and no installed package has a plugin of this name; "
        "did you mean `acme`?\n"
    )
