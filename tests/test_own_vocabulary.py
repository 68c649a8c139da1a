"""A vocabulary of one's own, for another domain than language models: the example in examples/diffusion."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from support import ROOT

from attnreg import AttentionRequest, Platform, Registry, RequestError, load_registry, select
from attnreg.cli import main

EXAMPLE = ROOT / "examples/diffusion"
SM120 = Platform(platform="cuda", arch="sm120")


@pytest.fixture(scope="module")
def diffusion() -> Registry:
    return load_registry(EXAMPLE / "registry")


def test_the_example_chooses_by_its_own_words() -> None:
    spec = importlib.util.spec_from_file_location("choose", EXAMPLE / "choose.py")
    assert spec is not None
    assert spec.loader is not None
    choose = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(choose)
    chosen = {layer: selection.backend.name for layer, selection in choose.choose(SM120).items()}
    assert list(chosen.values()) == ["SAGE_ATTN_3", "CUDNN_ATTN", "TORCH_SDPA", "CUDNN_ATTN"]
    amd = choose.choose(Platform(platform="rocm", arch="gfx942"))
    assert {selection.backend.name for selection in amd.values()} == {"TORCH_SDPA"}
    ring = choose.choose(SM120)["blocks.*.self_attn, 4 ranks"]
    assert [reason.text for c in ring.candidates for reason in c.reasons] == [
        "parallel is ring; supported: none",
        "parallel is ring; supported: none, ulysses",
    ]
    # the sentence has the words of this domain alone
    assert "KV cache" not in str(ring)


@pytest.mark.parametrize("given", [{"num_heads": 8}, {"kv_dtype": "fp8"}, {"attn_type": "encoder"}, {"model": "llama"}])
def test_a_facet_that_the_vocabulary_leaves_out_is_refused(diffusion: Registry, given: dict[str, object]) -> None:
    request = AttentionRequest(head_size=128, role="self", **given)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=f"^{next(iter(given))} is given, and .* has no such facet"):
        select(request, SM120, registry=diffusion)


def test_a_word_of_language_models_is_unknown(diffusion: Registry) -> None:
    with pytest.raises(RequestError, match="role names 'draft'"):
        select(AttentionRequest(head_size=128, role="draft"), SM120, registry=diffusion)


def test_a_facet_of_every_request_must_stay(tmp_path: Path) -> None:
    directory = tmp_path / "registry"
    shutil.copytree(EXAMPLE / "registry", directory)
    file = directory / "vocabulary.yaml"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if not line.startswith("  head_size:")))
    with pytest.raises(ValueError, match="the facet `head_size` is missing"):
        load_registry(directory)


def test_every_command_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registry = ("--registry", str(EXAMPLE / "registry"))
    layer = ("--arch", "sm120", "--head-size", "256", "--role", "self")
    assert main(["check", *registry]) == 0
    assert "1 of 1 invariants hold, 0 findings" in capsys.readouterr().out
    assert main(["explain", *registry, *layer, "--set", "parallel=ring", "--brief"]) == 0
    assert "TORCH_SDPA" in capsys.readouterr().out
    lock = str(tmp_path / "attnreg.lock")
    assert main(["lock", *registry, *layer, "--output", lock]) == 0
    assert main(["check", "--lock", lock, *registry]) == 0
    assert main(["diff", registry[1], registry[1], "--head-size", "128", "--role", "self"]) == 0
    assert main(["list", *registry]) == 0
    capsys.readouterr()
    for command in (["explain", *registry, "--arch", "sm120"], ["plan", *registry, "--arch", "sm120"]):
        assert main([*command, "--model", "gpt-oss-120b"]) == 2
        assert "has no facet `model`" in capsys.readouterr().err
