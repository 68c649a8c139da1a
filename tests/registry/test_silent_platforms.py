"""Platforms of which a release's table says nothing: what is chosen there is not known, and is never none."""

from __future__ import annotations

import json

import pytest
from support import ROOT
from support.registries.silent import silent_release

import attnreg
from attnreg.cli import main

LLAMA = ROOT / "examples/configs/Llama-3.1-8B"
SILENCE = "vllm-0.32.0 says nothing of {}"
PLATFORMS = [("cpu", "x86_64"), ("xpu", "xe2")]


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a release like vLLM 0.32.0, whose table says nothing of these platforms."""
    return silent_release(tmp_path_factory.mktemp("silent"))


@pytest.mark.parametrize(("platform", "arch"), PLATFORMS)
def test_a_selection_is_not_known(platform, arch, silent):
    registry = attnreg.load_registry(silent)
    request = attnreg.AttentionRequest(head_size=128)
    with pytest.raises(attnreg.NoBackendError) as e:
        attnreg.select(request, attnreg.Platform(platform=platform, arch=arch), registry)
    assert str(e.value) == f"The answer is not known on {platform} {arch}: {SILENCE.format(platform)}"
    # a row that the release inherits is no answer of its own
    assert (e.value.selection.unknown, e.value.alternatives) == (True, ())
    assert e.value.selection.against("CPU_ATTN") == (SILENCE.format(platform),)
    known = attnreg.select(request, attnreg.Platform(platform="cuda", arch="sm90"), registry)
    assert (known.unknown, known.silence, "silence" in known.to_dict()) == (False, "", False)


@pytest.mark.parametrize(("platform", "arch"), PLATFORMS)
def test_explain_says_so(platform, arch, silent, capsys):
    command = ["explain", "--registry", silent, "--arch", arch, "--model", str(LLAMA)]
    assert main(command) == 3
    text = " ".join(capsys.readouterr().out.split())
    assert f"? not known {SILENCE.format(platform)}" in text
    assert "no backend" not in text
    assert "by name" not in text
    # the cache is that of the model
    assert "131,072 1.0 GiB" in text
    assert main([*command, "--json"]) == 3
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert [s["silence"] for s in answer["selections"]] == [SILENCE.format(platform)]
    assert [s["alternatives"] for s in answer["selections"]] == [[]]


@pytest.mark.slow(reason="compares each pair of releases")
def test_nothing_moves_to_or_from_none(silent, capsys):
    command = ["diff", silent, "vllm-0.33", "--arch", "x86_64", "--model", str(LLAMA)]
    assert main(command) == 2
    assert capsys.readouterr().err.startswith(
        f"attnreg: {SILENCE.format('cpu')}\n  help: name an architecture of another"
    )
    # beside another platform it is left out, and named once
    assert main([*command, "--arch", "sm90"]) == 0
    told = capsys.readouterr().out
    assert "nothing changes: Llama-3.1-8B does not move (1 architecture compared)" in told
    assert told.count(SILENCE.format("cpu")) == 1
    # nor is it among all configurations
    assert main([*command[:3], "--arch", "x86_64", "--arch", "sm90", "--head-size", "128", "--boxes", "--json"]) in (
        0,
        1,
    )
    changes = json.loads(capsys.readouterr().out)["all_configurations"]["changes"]
    assert not [change for change in changes if "x86_64" in change["archs"]]


def test_a_lock_says_so_and_holds(silent, tmp_path, capsys):
    lock = tmp_path / "attnreg.lock"
    command = ["lock", "--registry", silent, "--arch", "x86_64", "--model", str(LLAMA), "-o", str(lock)]
    assert main(command) == 3
    (entry,) = json.loads(lock.read_text())["selections"]
    assert entry["outcome"]["problem"] == SILENCE.format("cpu")
    assert main(["check", "--lock", str(lock), "--allow-outside"]) == 3
    assert f"not known of Llama-3.1-8B in vllm-0.32.0: {SILENCE.format('cpu')}" in capsys.readouterr().out


def test_a_recipe_is_not_judged(tmp_path, monkeypatch, capsys):
    # a recipe names a bundled release, and none of them is silent
    said = property(lambda self: SILENCE.format("cpu") if self.registry.name == "vllm-0.32.0" else "")
    monkeypatch.setattr(attnreg.Selection, "silence", said)
    recipe = tmp_path / "recipe.yaml"
    text = f'engine: vllm\nversion: "0.32"\nmodel: {LLAMA}\narch: x86_64\n'
    for option in ("", "args: [--attention-backend, CPU_ATTN]\n"):
        recipe.write_text(text + option)
        assert main(["check", str(recipe), "--json"]) == 3
        note = f"{recipe}: what the run gets is not checked: {SILENCE.format('cpu')}"
        printed = json.loads(capsys.readouterr().out)
        assert (printed["findings"], printed["notes"]) == ([], [note])
        assert not any(launch["checked_whole"] for launch in printed["launches"])
        # another release says something of it
        main(["check", str(recipe), "--registry", "vllm-0.33", "--json"])
        assert json.loads(capsys.readouterr().out)["notes"] == []
