"""The device that is measured decides the platform, and one that cannot be used is refused before anything is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import attnreg
from attnreg import Platform, RequestError
from attnreg.cli import main
from attnreg.tuning.device import device_of

CPU = Platform(platform="cpu", arch="x86_64", packages={"torch": "2.11"})
H100, H200 = (Platform(platform="cuda", arch="sm90", device=name) for name in ("H100", "H200"))
A100 = Platform(platform="cuda", arch="sm80", device="A100")


def machine(monkeypatch: pytest.MonkeyPatch, platforms: Sequence[Platform], names: Sequence[str]) -> None:
    """A machine of these platforms, whose GPUs have drivers that print these names."""

    def name_of(device: torch.device) -> str:
        if not names:
            raise AssertionError("Torch not compiled with CUDA enabled\nand much more")
        return names[device.index or 0]

    def capability(device: torch.device) -> tuple[int, int]:
        return (8, 0) if "A100" in name_of(device) else (9, 0)

    for place in ("attnreg.machine.detect", "attnreg.conformance.devices"):
        monkeypatch.setattr(f"{place}.detect_all", lambda *_, **__: tuple(platforms))
    monkeypatch.setattr("torch.cuda.get_device_name", name_of)
    monkeypatch.setattr("torch.cuda.get_device_capability", capability)
    monkeypatch.setattr("torch.version.hip", None)


@pytest.mark.parametrize(
    ("name", "torch_name", "platform"),
    [
        ("", "cuda", A100),
        ("cuda", "cuda", A100),
        ("cuda:1", "cuda:1", H100),
        # of one architecture, told apart by its name
        ("cuda:2", "cuda:2", H200),
        ("cpu", "cpu", CPU),
    ],
)
def test_the_device_decides_the_platform(
    default: attnreg.Registry, monkeypatch: pytest.MonkeyPatch, name: str, torch_name: str, platform: Platform
) -> None:
    names = ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    machine(monkeypatch, (A100, H100, H200, CPU), names)
    found = device_of(name, default)
    assert (found.torch, found.platform) == (torch_name, platform)
    assert (found.name in names) == (platform is not CPU)


BAD: list[tuple[str, str]] = [
    ("foo", "PyTorch cannot use the device 'foo' here: Expected one of cpu, cuda, "),
    ("cuda", "PyTorch cannot use the device 'cuda' here: Torch not compiled with CUDA enabled"),
    ("cuda:x", "PyTorch cannot use the device 'cuda:x' here: "),
    ("meta", "attnreg finds no platform meta here, which the device 'meta' is of"),
]


@pytest.mark.parametrize(("name", "message"), BAD)
def test_a_device_that_cannot_be_used_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    machine(monkeypatch, (CPU,), ())

    def asked(*_: Any) -> None:
        raise AssertionError("the models were read")

    monkeypatch.setattr("attnreg.cli.inputs.RequestInputs.questions", asked)
    for options in (["--dry-run"], []):
        assert main(["tune", "--device", name, "-o", str(tmp_path / "t.yaml"), *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"attnreg: {message}")
        assert "\n  help: name another with --device" in error
    assert not any(tmp_path.iterdir())


def test_a_gpu_that_pytorch_cannot_use_is_said(default: attnreg.Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, (H200, CPU), ())
    with pytest.raises(RequestError, match="cannot use the device 'cuda' here: Torch not compiled with CUDA enabled;"):
        device_of("", default)


def test_a_processor_beside_a_gpu_is_timed_as_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(monkeypatch, (H200, CPU), ["NVIDIA H200"])
    monkeypatch.setattr("attnreg.tuning.command.probe", lambda modules: dict.fromkeys(modules))
    layer = ["--head-size", "64", "--dtype", "float32", "--device", "cpu", "--dry-run"]
    assert main(["tune", *layer, "-o", str(tmp_path / "t.yaml")]) == 0
    out = capsys.readouterr().out
    assert "cells on cpu x86_64" in out
    # the workloads of processors, and their backends
    assert "decode 4 x 256: CPU_ATTN" in out
