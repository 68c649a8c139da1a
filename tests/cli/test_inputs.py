"""What options mean: the registry, the platforms, and the questions that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from support import ROOT

from attnreg import AttentionRequest, Platform, Registry, RequestError, select
from attnreg.cli import main
from attnreg.cli.inputs import PlatformInputs, RegistryInputs, RequestInputs, facet_value, read_inputs
from attnreg.cli.refusals import BadInput
from attnreg.machine import detect as detection

GPT_OSS = str(ROOT / "examples/configs/gpt-oss-120b")


def test_a_registry_is_loaded_with_its_overlays_and_choices(tmp_path: Path, default: Registry) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("choices: [{deny: [FLASH_ATTN]}]\n")
    registry = RegistryInputs(registry="default", overlay=(str(overlay),)).load([{"prefer": "TRITON_ATTN"}])
    assert [(c.strength, c.backends) for c in registry.choices] == [
        ("deny", ("FLASH_ATTN",)),
        ("prefer", ("TRITON_ATTN",)),
    ]
    assert RegistryInputs().load(default="vllm-0.33.0").name == "vllm-0.33.0"
    assert RegistryInputs(registry="default").load(default="vllm-0.33.0").title == default.title


def test_only_the_registry_without_an_overlay_is_the_bundled_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNREG_REGISTRY", raising=False)
    assert RegistryInputs().bundled_default
    assert not RegistryInputs(registry="default").bundled_default
    assert not RegistryInputs(overlay=("mine.yaml",)).bundled_default
    monkeypatch.setenv("ATTNREG_REGISTRY", "vllm-0.33.0")
    assert not RegistryInputs().bundled_default


PLATFORMS: list[tuple[dict[str, Any], list[tuple[str, str]]]] = [
    ({"arch": ("sm90", "gfx942")}, [("cuda", "sm90"), ("rocm", "gfx942")]),
    ({"platform": "xpu"}, [("xpu", "xe_hpc"), ("xpu", "xe2")]),
    ({"platform": "rocm", "arch": ("gfx942",)}, [("rocm", "gfx942")]),
    ({"arch": ("sm90", "9.0", "NVIDIA B100", "MI300X")}, [("cuda", "sm90"), ("cuda", "sm100"), ("rocm", "gfx942")]),
    ({"arch": ("gfx1151", "Strix Halo")}, [("rocm", "gfx1151")]),
]


@pytest.mark.parametrize(("options", "found"), PLATFORMS, ids=[str(p[0]) for p in PLATFORMS])
def test_platforms_are_those_that_are_named(
    default: Registry, options: dict[str, Any], found: list[tuple[str, str]]
) -> None:
    platforms = PlatformInputs(**options, flags=("aiter",)).platforms(default)
    assert [(p.platform, p.arch) for p in platforms] == found
    assert all(p.flags == {"aiter"} and p.packages is None for p in platforms)


def test_an_architecture_of_another_platform_is_refused_alike(default: Registry) -> None:
    message = "arch is sm90, which belongs to platform cuda, not rocm"
    for inputs in (
        PlatformInputs(platform="rocm", arch=("gfx942", "h100")),
        PlatformInputs(platform="rocm", device=("H200",)),
    ):
        with pytest.raises(RequestError) as e:
            inputs.platforms(default)
        assert str(e.value) == message
        with pytest.raises(RequestError) as e:
            inputs.of_both(default, default)
        assert str(e.value) == message
    with pytest.raises(RequestError) as e:
        select(AttentionRequest(head_size=128), Platform(platform="rocm", arch="sm90"), default)
    assert str(e.value) == message


@pytest.mark.parametrize("version", ["3.4", "3.4.0rc1", "v1", "1!2.0.post1.dev2+git.1"])
def test_a_version_is_one_of_pep_440(default: Registry, version: str) -> None:
    assert PlatformInputs(packages=(f"triton=={version}",)).installed(default.vocabulary) == (("triton", version),)


@pytest.mark.parametrize("version", ["", "abc", "1.x", "=1", "9" * 5000])
def test_what_is_no_version_is_refused(default: Registry, version: str) -> None:
    with pytest.raises(BadInput, match=r"--package triton: .* is no version") as e:
        PlatformInputs(packages=(f"triton=={version}",)).installed(default.vocabulary)
    assert len(e.value.message) < 300
    assert e.value.help == "write triton==1.2.3, or triton alone for any version"


def test_packages_that_are_named_are_all_that_there_are(default: Registry) -> None:
    (platform,) = PlatformInputs(arch=("sm90",), packages=("flash-attn==2.8.1", "triton")).platforms(default)
    assert platform.packages == (("flash-attn", "2.8.1"), ("triton", ""))


def test_without_a_name_it_is_this_machine(default: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Platform(platform="rocm", arch="gfx942", flags=frozenset({"aiter"}), packages={"triton": "3.7"})  # type: ignore[arg-type]
    monkeypatch.setattr(detection, "detect", lambda vocabulary: here)
    assert not PlatformInputs(flags=("aiter_mha",)).named
    (found,) = PlatformInputs(flags=("aiter_mha",)).platforms(default)
    assert (found.arch, found.flags, found.packages) == ("gfx942", {"aiter", "aiter_mha"}, here.packages)
    (found,) = PlatformInputs(packages=("aiter",)).platforms(default)
    assert found.packages == (("aiter", ""),)


def test_facets_make_a_request() -> None:
    asked = RequestInputs(facets={"num_heads": 8, "kv_dtype": "none"}, features=("sinks",), extra=("run_kv_dtype=fp8",))
    request = AttentionRequest(
        head_size=128, num_heads=8, kv_dtype=None, features={"sinks"}, extra={"run_kv_dtype": "fp8"}
    )
    assert asked.request() == request
    assert RequestInputs(facets={"head_size": 64}).request().head_size == 64


@pytest.mark.parametrize(
    ("item", "value"),
    [("a=b", "b"), ("a=1", 1), ("a=-1", -1), ("a=true", True), ("a=false", False), ("a=null", None), ("a=", "")],
)
def test_values_of_facets(item: str, value: Any) -> None:
    name, found = facet_value("--set", item)
    assert (name, found, type(found)) == ("a", value, type(value))


@pytest.mark.parametrize("option", ["--set", "--facet"])
def test_what_is_no_value_names_its_option(option: str) -> None:
    with pytest.raises(click.UsageError, match=f"{option} head_size: expected FACET=VALUE"):
        facet_value(option, "head_size")


def test_inputs_of_a_request_and_of_a_model(default: Registry) -> None:
    source, where = RegistryInputs(registry="default"), PlatformInputs(arch=("gfx942",))
    inputs = read_inputs(source, where, RequestInputs())
    assert [q.label for q in inputs.questions] == ["head size 128 · bfloat16 · KV cache auto"]
    assert inputs.notes == ["no --head-size and no --model: head_size 128 was assumed"]
    place = f"ROCm gfx942 (MI300X, …) · every package assumed · attnreg's own kernels (data {default.fingerprint})"
    assert (inputs.title, inputs.memory) == (f"head size 128 · bfloat16 · KV cache auto · {place}", None)
    assert read_inputs(source, where, RequestInputs(facets={"head_size": 128})).notes == []
    model = read_inputs(source, where, RequestInputs(model=GPT_OSS, tp=2, lengths=(64, 8, 64)))
    assert model.title == f"gpt-oss-120b · 36 layers · TP 2 · bfloat16 · {place}"
    assert [q.request.num_heads for q in model.questions if q.request] == [32, 32]
    assert model.memory is not None
    assert model.memory.lengths == (8, 64)


@pytest.mark.parametrize("argument", ["=1", " =1", "="])
def test_a_facet_without_a_name_is_refused(argument: str) -> None:
    with pytest.raises(BadInput, match=f"--set {argument}: expected FACET=VALUE"):
        facet_value("--set", argument)


@pytest.mark.parametrize(
    "command",
    [
        ("explain", "--registry", "vllm-0.20.0", "--head-size", "128"),
        ("plan", "--registry", "vllm-0.20.0", "--model", "Llama-3.1-8B"),
        ("lock", "--registry", "vllm-0.20.0", "--head-size", "128"),
        ("diff", "vllm-0.20.0", "vllm-0.21.0", "--head-size", "128"),
        ("upgrade", "--from", "0.20", "--to", "0.21", "--head-size", "128"),
    ],
)
def test_a_facet_that_no_answer_reads_is_refused(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    # later releases read it, and these have the word alone
    assert main([*command, "--arch", "sm90", "--set", "gathered_heads=8"]) == 2
    assert "--set gathered_heads: nothing in vllm-0.20.0" in capsys.readouterr().err


def test_a_facet_that_one_of_two_registries_reads_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--arch", "sm90", "--head-size", "128", "--set", "gathered_heads=8")
    assert main(["upgrade", "--from", "0.20", "--to", "0.33", *words]) != 2, capsys.readouterr().err


def test_a_facet_of_the_run_counts_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    layer = ("--num-heads", "32", "--num-kv-heads", "8", "--head-size", "128", "--block-size", "256")
    options = ("--registry", "vllm-0.33.0", "--arch", "sm100", "--backend", "FLASHINFER")
    for given, blocks in ((), "each as one block"), (("--set", "run_queries_per_kv_head=1"), "in blocks of 64"):
        assert main(["explain", *options, *layer, *given]) == 0
        assert f"which the kernel reads {blocks} (" in " ".join(capsys.readouterr().out.split())
