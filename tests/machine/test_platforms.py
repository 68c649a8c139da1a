"""Platform: what it refuses, and what detection reads on machines of every kind, none of which is at hand."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import pickle
import platform as host
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import attnreg
from attnreg import Platform, RequestError
from attnreg.machine import detect as detection
from attnreg.machine.detect import detect, detect_all, gpus
from attnreg.packages.installed import PackageWarning
from attnreg.selection.selector import evaluate

WORD = "expected a word of the registry's vocabulary"
NAMES = "expected a mapping of names to versions, or a set of names"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"platform": "", "arch": ""}, "a platform has an architecture, and none is given; Platform('H100') names one"),
    ({"platform": 5}, f"platform is 5; {WORD}"),
    ({"arch": None}, f"arch is None; {WORD}"),
    ({"flags": "aiter"}, "flags is 'aiter'; expected a set of words, for example {'sinks'}"),
    ({"flags": {None}}, f"flags is None; {WORD}"),
    ({"packages": "torch"}, f"packages is 'torch'; {NAMES}"),
    ({"packages": 5}, f"packages is 5; {NAMES}"),
    ({"packages": {"torch": None}}, f"packages is {{'torch': None}}; {NAMES}"),
    ({"packages": {"torch": 2.13}}, f"packages is {{'torch': 2.13}}; {NAMES}"),
    ({"packages": [("torch", "2", "3")]}, f"packages is [('torch', '2', '3')]; {NAMES}"),
    ({"packages": [1]}, f"packages is [1]; {NAMES}"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[case[1][:40] for case in REFUSED])
def test_what_cannot_be_meant_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Platform(**{"platform": "cuda", "arch": "sm90", **changes})
    assert str(caught.value) == message


PACKAGES: list[tuple[Any, Any]] = [
    (None, None),
    ({}, ()),
    ({"b": "2", "a": "1"}, (("a", "1"), ("b", "2"))),
    (["b", "a"], (("a", ""), ("b", ""))),
    ([("a", "1"), ("a", "2")], (("a", "2"),)),
]


@pytest.mark.parametrize(("given", "kept"), PACKAGES, ids=str)
def test_packages_are_kept_as_sorted_pairs(given: Any, kept: Any) -> None:
    one = Platform(platform="cuda", arch="sm90", packages=given)
    assert one.packages == kept
    assert one == pickle.loads(pickle.dumps(one)) == dataclasses.replace(one)
    assert hash(one) == hash(pickle.loads(pickle.dumps(one)))


def test_the_dictionary_form() -> None:
    one = Platform(platform="rocm", arch="gfx942", flags={"b", "a"}, packages=["x"])
    assert one.to_dict() == {"platform": "rocm", "arch": "gfx942", "flags": ["a", "b"], "packages": {"x": ""}}
    assert Platform(platform="cpu", arch="aarch64").to_dict()["packages"] is None


# detection -----------------------------------------------------------------------------------------------------------


class FakeNvml:
    """NVIDIA's management library with some devices; None stands for a device that fails, ``init`` for its start."""

    def __init__(self, *capabilities: tuple[int, int] | None, init: int = 0, names: tuple[str, ...] = ()) -> None:
        self.capabilities, self.init, self.open, self.names = capabilities, init, 0, names

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += not self.init
        return self.init

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.capabilities)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:  # noqa: N802
        device._obj.value = index + 1
        return 15 if self.capabilities[index] is None else 0

    def nvmlDeviceGetCudaComputeCapability(self, device: Any, major: Any, minor: Any) -> int:  # noqa: N802
        capability = self.capabilities[device.value - 1]
        assert capability is not None
        major._obj.value, minor._obj.value = capability
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, length: int) -> int:  # noqa: N802
        text.value = b"580.65.06"
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:  # noqa: N802
        memory._obj.total = device.value << 30
        # the library that has no names has no sizes either
        return 0 if self.names else 999

    def nvmlDeviceGetName(self, device: Any, name: Any, length: int) -> int:  # noqa: N802
        if len(self.names) < device.value:
            return 999
        name.value = self.names[device.value - 1].encode()
        return 0


Machine = Callable[..., tuple[tuple[str, str], ...]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, default: attnreg.Registry) -> Machine:
    """A machine with the files and libraries of a test; answers its devices."""

    def detect(
        nvml: FakeNvml | None = None,
        files: dict[str, str] | None = None,
        machine: str = "x86_64",
        visible: str | None = None,
    ) -> tuple[tuple[str, str], ...]:
        def library(name: str) -> FakeNvml:
            # never libcuda: it would spoil CUDA for the children of this process
            assert name == "libnvidia-ml.so.1"
            if nvml is None:
                raise OSError("libnvidia-ml.so.1: cannot open shared object file")
            return nvml

        for name, text in (files or {}).items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.setattr(ctypes, "CDLL", library)
        monkeypatch.setattr(host, "machine", lambda: machine)
        monkeypatch.setattr(detection, "_KFD", tmp_path / "kfd")
        monkeypatch.setattr(detection, "_DRM", tmp_path / "drm")
        monkeypatch.setattr(detection, "_CPUINFO", tmp_path / "cpuinfo")
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        found = detect_all(default.vocabulary, environ=environ)
        assert attnreg.detect(default.vocabulary, environ=environ) == found[0]
        assert nvml is None or nvml.open == 0
        return tuple((p.platform, p.arch) if p.device is None else (p.platform, p.arch, p.device) for p in found)

    return detect


def kfd(*versions: int) -> dict[str, str]:
    return {
        f"kfd/{i}/properties": f"cpu_cores_count 0\ngfx_target_version {v}\nname \n" for i, v in enumerate(versions)
    }


def pci(*devices: tuple[str, str]) -> dict[str, str]:
    names = ("vendor", "device")
    return {f"drm/card{i}/device/{n}": f"{v}\n" for i, d in enumerate(devices) for n, v in zip(names, d, strict=True)}


CPU = ("cpu", "x86_64")
MACHINES: list[tuple[str, dict[str, Any], tuple[tuple[str, str], ...]]] = [
    ("nothing but a processor", {}, (CPU,)),
    ("eight alike are one", {"nvml": FakeNvml(*[(9, 0)] * 8)}, (("cuda", "sm90"), CPU)),
    (
        "two kinds, in the driver's order",
        {"nvml": FakeNvml((12, 0), (8, 0))},
        (("cuda", "sm120"), ("cuda", "sm80"), CPU),
    ),
    ("a driver without devices", {"nvml": FakeNvml()}, (CPU,)),
    ("a driver that does not start", {"nvml": FakeNvml((9, 0), init=9)}, (CPU,)),
    ("a device that fails", {"nvml": FakeNvml(None, (10, 3))}, (("cuda", "sm103"), CPU)),
    ("one that is visible", {"nvml": FakeNvml((9, 0), (8, 0)), "visible": "1"}, (("cuda", "sm80"), CPU)),
    ("another order", {"nvml": FakeNvml((9, 0), (8, 0)), "visible": "1, 0"}, (("cuda", "sm80"), ("cuda", "sm90"), CPU)),
    ("none is visible", {"nvml": FakeNvml((9, 0)), "visible": ""}, (CPU,)),
    ("none is visible, said in another way", {"nvml": FakeNvml((9, 0)), "visible": "-1"}, (CPU,)),
    (
        "what is none hides what follows",
        {"nvml": FakeNvml((9, 0), (8, 0)), "visible": "0,7,1"},
        (("cuda", "sm90"), CPU),
    ),
    ("visible by UUID", {"nvml": FakeNvml((9, 0)), "visible": "GPU-59ac5df4-f85d"}, (("cuda", "sm90"), CPU)),
    # node 0 is the processor
    ("MI300X", {"files": kfd(0, 90402, 90402)}, (("rocm", "gfx942"), CPU)),
    ("MI210: the stepping is hexadecimal", {"files": kfd(0, 90010)}, (("rocm", "gfx90a"), CPU)),
    ("the minor version too", {"files": kfd(0, 91000)}, (("rocm", "gfx9a0"), CPU)),
    ("MI350X", {"files": kfd(0, 90500)}, (("rocm", "gfx950"), CPU)),
    ("MI450", {"files": kfd(0, 120500)}, (("rocm", "gfx1250"), CPU)),
    ("RX 7900 and RX 9070", {"files": kfd(0, 110000, 120001)}, (("rocm", "gfx1100"), ("rocm", "gfx1201"), CPU)),
    ("node 10 follows node 9", {"files": kfd(*[0] * 9, 90402, 110000)}, (("rocm", "gfx942"), ("rocm", "gfx1100"), CPU)),
    ("a node without a version", {"files": {"kfd/0/properties": "simd_count 4\n"}}, (CPU,)),
    ("Data Center GPU Max", {"files": pci(("0x8086", "0x0bd5"))}, (("xpu", "xe_hpc"), CPU)),
    ("Arc B580", {"files": pci(("0x8086", "0xe20b"))}, (("xpu", "xe2"), CPU)),
    ("integrated Intel graphics", {"files": pci(("0x8086", "0xa780"))}, (CPU,)),
    ("another vendor's card", {"files": pci(("0x1002", "0xe20b"))}, (CPU,)),
    ("a card that cannot be read", {"files": pci(("0x8086", "what"))}, (CPU,)),
    ("AVX-512", {"files": {"cpuinfo": "flags\t\t: fpu avx2 avx512f\nbugs : x\n"}}, (("cpu", "x86_64_avx512"),)),
    ("AMX", {"files": {"cpuinfo": "flags\t\t: avx512f amx_tile\n"}}, (("cpu", "x86_64_amx"),)),
    ("a word in a later line", {"files": {"cpuinfo": "flags : avx2\nbugs : avx512f\n"}}, (CPU,)),
    ("Grace", {"machine": "aarch64"}, (("cpu", "aarch64"),)),
    ("Apple silicon", {"machine": "arm64"}, (("cpu", "aarch64"),)),
    ("Windows", {"machine": "AMD64"}, (CPU,)),
    ("an architecture of its own", {"machine": "riscv64"}, (("cpu", "riscv64"),)),
]


@pytest.mark.parametrize(("about", "found"), [case[1:] for case in MACHINES], ids=[case[0] for case in MACHINES])
def test_devices(machine: Machine, about: dict[str, Any], found: tuple[tuple[str, str], ...]) -> None:
    assert machine(**about) == found


DRIVERS = [
    ("NVIDIA H200", "H200"),
    ("NVIDIA H100 80GB HBM3", "H100"),
    ("NVIDIA H100 NVL", "H100"),
    ("NVIDIA GH200 480GB", "GH200"),
    ("NVIDIA H20-3e", "H20"),
    ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
    ("AMD Instinct MI300X OAM", "MI300X"),
    # a part of a device is another device
    ("NVIDIA H200 MIG 1g.18gb", None),
    ("NVIDIA H2000", None),
    ("", None),
]


@pytest.mark.parametrize(("name", "device"), DRIVERS)
def test_devices_by_the_names_of_drivers(default: attnreg.Registry, name: str, device: str | None) -> None:
    assert default.vocabulary.device(name) == device


def test_devices_that_share_an_architecture_are_told_apart(machine: Machine) -> None:
    nvml = FakeNvml((9, 0), (9, 0), (9, 0), (9, 0), names=("NVIDIA H200", "NVIDIA H20", "NVIDIA H200"))
    assert machine(nvml) == (("cuda", "sm90", "H200"), ("cuda", "sm90", "H20"), ("cuda", "sm90"), CPU)
    files = {"kfd/0/properties": "gfx_target_version 90402\ndevice_id 29857\n"}
    files |= {"kfd/1/properties": "gfx_target_version 90402\ndevice_id 29861\n"}
    assert machine(files=files) == (("rocm", "gfx942", "MI300X"), ("rocm", "gfx942", "MI325X"), CPU)


FLAGS = [("", set()), ("aiter", {"aiter"}), (" aiter , aiter_mha,", {"aiter", "aiter_mha"})]


@pytest.mark.parametrize(("text", "flags"), FLAGS, ids=["none", "one", "two"])
def test_flags_come_from_the_environment(default: attnreg.Registry, text: str, flags: set[str]) -> None:
    assert detect(default.vocabulary, environ={"ATTNREG_FLAGS": text}).flags == flags


def test_without_a_mapping_the_process_is_asked(default: attnreg.Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREG_FLAGS", "aiter_mla")
    assert detect(default.vocabulary).flags == {"aiter_mla"}
    assert detect(default.vocabulary, environ={}).flags == set()


def test_packages_are_found_by_distribution_and_else_by_module(
    default: attnreg.Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"amd-aiter": "0.1", "flash_attn_3": "3.0.0b1", "torch": "2.13.0"}
    asked: list[str] = []

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def find_spec(name: str) -> object | None:
        asked.append(name)
        return SimpleNamespace(origin="flash_mla/__init__.py") if name == "flash_mla" else None

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    for variable in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(variable, "")
    found = detection.installed_packages(default.vocabulary.packages)
    assert found == {"aiter": "0.1", "flash-attn-3": "3.0.0b1", "flash-mla": "", "torch": "2.13.0"}
    # finding flash_attn.cute would import flash_attn
    assert not [name for name in asked if "." in name]


def test_a_folder_of_the_same_name_is_no_package(
    default: attnreg.Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project may have a folder ``kernels``, which Python finds from the project's own directory."""
    known = {name: default.vocabulary.packages[name] for name in ("aiter", "kernels")}
    monkeypatch.syspath_prepend(tmp_path)
    for name in known:
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").touch()
    assert detection.installed_packages(known) == {}
    # a checkout that was never installed
    (tmp_path / "aiter" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert detection.installed_packages(known) == {"aiter": ""}


def test_a_program_is_found_on_the_path_and_in_a_toolkit_and_never_started(
    default: attnreg.Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, program in (("bin", "ninja"), ("cuda/bin", "nvcc")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / program).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / folder / program).chmod(0o755)
    known = {name: default.vocabulary.packages[name] for name in ("ninja", "nvcc")}
    for variable in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(variable, "")
    assert detection.installed_packages(known) == {}
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert detection.installed_packages(known) == {"ninja": ""}
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "cuda"))
    assert detection.installed_packages(known) == {"ninja": "", "nvcc": ""}


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        (["flashinfer-python", "flashinfer-cubin"], ""),
        (["flashinfer-python", "ninja", "nvcc"], ""),
        (["flashinfer-python", "ninja"], "needs package flashinfer-cubin or package ninja and package nvcc"),
        (["flashinfer-python"], "needs package flashinfer-cubin or package ninja and package nvcc"),
        (["flashinfer-cubin"], "package flashinfer-python is not installed"),
    ],
)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("FLASHINFER", {"head_size": 128}),
        ("FLASHINFER_MLA", {"head_size": 576, "attention": "mla"}),
        ("TRTLLM_RAGGED", {"head_size": 128, "attention": "mla", "phase": "prefill"}),
    ],
)
def test_flashinfer_has_its_kernels_compiled_or_can_compile_them(
    default: attnreg.Registry, packages: list[str], reason: str, name: str, fields: dict[str, Any]
) -> None:
    platform = Platform(platform="cuda", arch="sm100", packages=packages)
    request = attnreg.AttentionRequest(**fields)
    [candidate] = [c for c in evaluate(request, platform, default, name).candidates if c.name == name]
    assert "; ".join(r.text for r in candidate.reasons) == reason


def test_a_package_whose_metadata_are_spoilt_is_named_and_left_out(
    default: attnreg.Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, metadata in (("amd-aiter", b"Name: amd-aiter\nVersion: 1\xff\n"), ("triton", b"Version: 9.9\n")):
        info = tmp_path / f"{name.replace('-', '_')}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_bytes(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    said = r"the package amd-aiter is left out: its version cannot be read \(UnicodeDecodeError: 'utf-8' codec can't"
    with pytest.warns(PackageWarning, match=said):
        found = detection.installed_packages(default.vocabulary.packages)
    assert found["triton"] == "9.9"
    assert "aiter" not in found


def test_this_machine_is_something_that_the_default_registry_knows(default: attnreg.Registry) -> None:
    for here in detect_all(default.vocabulary):
        assert here.platform in default.vocabulary.words["platforms"]


def test_gpus_have_their_memory_and_their_driver(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detection, "_AMD_DRIVER", tmp_path / "version")
    (tmp_path / "version").write_text("6.12.12\n")
    banks = {f"kfd/0/mem_banks/{i}/properties": f"heap_type 1\nsize_in_bytes {1 << 30}\n" for i in range(2)}
    machine(FakeNvml((9, 0), (8, 0), names=("NVIDIA H200",)), {**kfd(90402), **banks})
    assert gpus({}) == (
        ("cuda", "sm90", "NVIDIA H200", 1 << 30, "580.65.06"),
        ("cuda", "sm80", "", 2 << 30, "580.65.06"),
        ("rocm", "gfx942", "", 2 << 30, "6.12.12"),
    )
    machine(FakeNvml((9, 0)))
    assert gpus({})[0] == ("cuda", "sm90", "", None, "580.65.06")
