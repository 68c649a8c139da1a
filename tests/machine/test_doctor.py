"""What the doctor says that a machine lacks, and what it says of a machine that the registry does not know."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from rich.console import Console
from support.registries import tiny
from support.registries.plugins import CPU, UNFIT, Install, install
from support.registries.tiny import row

import attnreg
from attnreg import AttentionRequest, Platform
from attnreg.machine import doctor
from attnreg.machine.detect import Gpu
from attnreg.machine.doctor import MachineReport, examine, print_report

__all__ = ["install"]

HERE = Platform(platform="gpu", arch="g1", flags=frozenset({"fast"}), packages={"lib": "1.0"})  # type: ignore[arg-type]


def report_on(monkeypatch: pytest.MonkeyPatch, rows: dict[str, Any], platform: Platform) -> MachineReport:
    monkeypatch.setattr(doctor, "detect_all", lambda vocabulary: [platform])
    monkeypatch.setattr(doctor.os, "environ", {})
    return examine(tiny.load(rows, {"gpu": [{"name": "all", "order": [name for name in rows if name != "ELSEWHERE"]}]}))


MISSING: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("nothing", {"requires": {"flags": ["fast"], "packages": ["lib>=1"]}}, ()),
    ("a version", {"requires": {"packages": ["lib>=2"]}}, ("package lib>=2",)),
    ("an architecture", {"requires": {"arch": "g2"}}, ("arch g2",)),
    ("a flag that is on", {"requires": {"without": ["fast"]}}, ("without fast",)),
    (
        "one of several",
        {"requires": {"any": [{"arch": "g2"}, {"packages": ["lib>=2"]}]}},
        ("(arch g2 or package lib>=2)",),
    ),
    ("not this one", {"requires": {"not": {"arch": "g1"}}}, ("not (arch g1)",)),
    # what a request may still be says nothing of the machine
    ("a request", {"requires": {"any": [{"arch": "g2"}, {"head_size": 64}]}}, ()),
    (
        "the nearest of its variants",
        {
            "variants": [
                {"name": "A", "when": {"arch": "g2"}, "requires": {"packages": ["lib>=2"]}},
                {"name": "B", "requires": {"packages": ["lib>=3"]}},
            ]
        },
        ("package lib>=3",),
    ),
]


@pytest.mark.parametrize(("changes", "missing"), [m[1:] for m in MISSING], ids=[m[0] for m in MISSING])
def test_what_a_machine_lacks(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], missing: tuple[str, ...]
) -> None:
    report = report_on(monkeypatch, {"A": row(**changes), "ELSEWHERE": row(platforms=["npu"])}, HERE)
    ((_, (usability,)),) = report.devices
    assert (usability.backend, usability.missing) == ("A", missing)


def test_a_machine_that_the_registry_does_not_know_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Platform(platform="gpu", arch="g9", flags=frozenset({"fats"}))
    report = report_on(monkeypatch, {"A": row()}, unknown)
    assert [(platform, usable) for platform, usable in report.devices] == [(unknown, ())]
    assert any("names 'fats', which" in problem for problem in report.problems)
    assert any(problem.startswith("g9 is no architecture of") for problem in report.problems)


def machine_with(monkeypatch: pytest.MonkeyPatch) -> Platform:
    """A processor without packages, so that no row of attnreg's own is probed."""
    here = Platform(platform="cpu", arch="x86_64", packages={})  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "detect_all", lambda vocabulary: [here])
    monkeypatch.setattr(doctor.os, "environ", {})
    return here


def line_of(report: MachineReport, backend: str) -> str:
    console = Console(width=200, file=io.StringIO(), highlight=False)
    print_report(report, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    (line,) = [line.strip() for line in text.splitlines() if f" {backend} " in line]
    return line


@pytest.mark.parametrize(("text", "reason"), UNFIT.values(), ids=UNFIT)
def test_a_module_that_cannot_be_run_is_not_usable(
    text: str | None, reason: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: body for name, body in CPU.items() if name != "acme_attn/kernels.py"}
    install(files=files | ({} if text is None else {"acme_attn/kernels.py": text}))
    registry, here = attnreg.load_registry("default"), machine_with(monkeypatch)
    report = examine(registry)
    assert line_of(report, "ACME_ATTN") == f"✗ {'ACME_ATTN':<24}cannot be run: {reason}"
    ((_, usable),) = report.devices
    (found,) = (u.to_dict() for u in usable if u.backend == "ACME_ATTN")
    assert (found["usable"], found["missing"], found["problem"]) == (False, [], reason)
    # what ends a process for good cannot be tried in this one
    if text is None or "os" not in text:
        with pytest.raises(attnreg.NoBackendError):
            attnreg.select(AttentionRequest(head_size=64), here, registry, "ACME_ATTN", to_run=True)


def test_a_module_that_can_be_run_is_usable(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(files=CPU)
    registry, here = attnreg.load_registry("default"), machine_with(monkeypatch)
    assert line_of(examine(registry), "ACME_ATTN") == f"✓ {'ACME_ATTN':<24}usable"
    assert "acme_attn" not in sys.modules
    selection = attnreg.select(AttentionRequest(head_size=64), here, registry, to_run=True)
    assert selection.backend is not None
    assert selection.backend.name == "ACME_ATTN"


def test_the_report_is_printed_and_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"A": row(), "B": row(requires={"arch": "g2"})}
    report = report_on(monkeypatch, rows, HERE)
    console = Console(width=100, file=io.StringIO(), highlight=False)
    print_report(report, console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines[2:] == [
        "gpu g1   f",
        "  packages  lib 1.0",
        "  flags     fast",
        f"  – {'A':<24}has what it needs · no kernel module in attnreg",
        f"  ✗ {'B':<24}needs arch g2 · no kernel module in attnreg",
    ]
    (device,) = report.to_dict()["devices"]
    assert [(b["name"], b["usable"], b["missing"]) for b in device["backends"]] == [
        ("A", True, []),
        ("B", False, ["arch g2"]),
    ]


def test_the_report_has_the_memory_and_the_driver_of_gpus(
    monkeypatch: pytest.MonkeyPatch, default: attnreg.Registry
) -> None:
    h200 = Platform(platform="cuda", arch="sm90", packages=(), device="H200")
    found = [Gpu("cuda", "sm90", "NVIDIA H200", 141 << 30, "580.65")] * 2 + [Gpu("rocm", "gfx942", "\x1b[31m")]
    monkeypatch.setattr(doctor, "detect_all", lambda vocabulary: (h200, Platform(platform="rocm", arch="gfx942")))
    monkeypatch.setattr(doctor, "gpus", lambda environ: tuple(found))
    report = examine(default)
    console = Console(width=200, file=io.StringIO(), highlight=False)
    print_report(report, console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert "  GPUs      2 x NVIDIA H200, 141 GiB, driver 580.65" in lines
    assert "  GPUs      1 x \\x1b[31m, memory not known, driver not known" in lines
    first, second = report.to_dict()["devices"]
    assert first["gpus"] == [{"name": "NVIDIA H200", "memory": 141 << 30, "driver": "580.65"}] * 2
    assert second["gpus"] == [{"name": "\x1b[31m", "memory": None, "driver": ""}]


def test_variants_with_modules_of_their_own_have_lines_of_their_own(
    monkeypatch: pytest.MonkeyPatch, default: attnreg.Registry
) -> None:
    package = {"torch": "2.11", "triton": "3.6", "vllm": "0.33.0"}
    h200 = Platform(platform="cuda", arch="sm90", packages=tuple(package.items()))
    monkeypatch.setattr(doctor, "detect_all", lambda vocabulary: (h200,))
    ((_, usable),) = examine(default).devices
    found = {u.backend: u for u in usable}
    assert found["TORCH_SDPA/flash"].usable
    assert found["TORCH_SDPA/gathered"].usable
    assert "FLASH_ATTN" not in found
    # the package is said to be there, and is not
    assert "package vllm is not installed" in (found["FLASH_ATTN/FA3"].problem or "")
    assert found["FLASH_ATTN/FA4-wide"].missing == ("package flash-attn-4",)
    assert "FLASH_ATTN/FA4" not in found
