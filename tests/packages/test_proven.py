"""Which versions of packages a backend was not proven with: by evidence of its own architecture, and of no stand-in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.registries.forged import file_of, record

from attnreg import Platform, Registry
from attnreg.cli import main
from attnreg.packages import proven, records
from attnreg.packages.kernel_code import kernel_digest

VERSIONS = {"torch": "2.14.0+cu130", "triton": "3.8.0"}
EARLIER = "0123456789abcdef"


@pytest.fixture
def evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default: Registry) -> Iterator[Path]:
    """Evidence of two NVIDIA GPUs, on one of which a kernel for AMD's was tried too, and of kernels that are gone."""

    def of(title: str, where: str, versions: dict[str, str], kernel: str | None = "") -> dict[str, Any]:
        kernel = kernel_digest(default, title) if kernel == "" else kernel
        return record(title, kernel, versions={"attnreg": "0.1.0", **versions}, **{"for": where})

    older, newer = {"torch": "2.11.0", "triton": "3.6.0"}, {"torch": "2.14.0", "triton": "9.0.0"}
    files = [
        file_of(
            "H200", "cuda", of("HOPPER_ATTN", "cuda sm90", VERSIONS), of("TRITON_ATTN", "cuda sm90", VERSIONS),
            of("ROCM_ATTN", "rocm gfx942", VERSIONS), of("TURBOQUANT/Hopper", "cuda sm90", VERSIONS),
            of("TURBOQUANT/Triton", "cuda sm90", older), of("TRITON_MLA_SPARSE", "cuda sm90", older, EARLIER),
        ),
        file_of("B200", "cuda", of("TRITON_ATTN", "cuda sm100", older), of("HOPPER_ATTN", "cuda sm90", newer, EARLIER)),
        file_of("H100", "cuda", of("HOPPER_ATTN", "cuda sm90", older), of("TRITON_ATTN", "cuda sm90", newer, None)),
    ]  # fmt: skip
    # a forger's: it would prove everything
    forged = file_of("H100", "cuda", of("HOPPER_ATTN", "cuda sm90", older))
    forged["backends"]["HOPPER_ATTN"]["versions"] = {"attnreg": "0.1.0", **newer}
    (tmp_path / "evidence").mkdir()
    for number, data in enumerate([*files, forged]):
        (tmp_path / "evidence" / f"{number}.json").write_text(json.dumps(data))
    monkeypatch.setattr(records, "registry_root", lambda: tmp_path)
    records.bundled_records.cache_clear()
    yield tmp_path / "evidence"
    records.bundled_records.cache_clear()


# row and variant, architecture, installed, what is said
CASES: list[tuple[str, str, dict[str, str] | None, list[str]]] = [
    ("HOPPER_ATTN", "sm90", VERSIONS, []),
    ("HOPPER_ATTN", "sm90", {"torch": "2.14.0", "triton": "3.7.1"}, []),
    ("HOPPER_ATTN", "sm90", {"triton": "3.9.0"}, ["triton 3.9.0; newest proven 3.8.0 (H200)"]),
    ("HOPPER_ATTN", "sm90", {"triton": "3.10.0"}, ["triton 3.10.0; newest proven 3.8.0 (H200)"]),
    ("HOPPER_ATTN", "sm90", {"triton": "4.0.0"}, ["triton 4.0.0; newest proven 3.8.0 (H200)"]),
    # a build from a commit is before or after the release of that number
    ("HOPPER_ATTN", "sm90", {"triton": "3.8.0+git1234"}, ["triton 3.8.0+git1234; newest proven 3.8.0 (H200)"]),
    ("HOPPER_ATTN", "sm90", {"triton": "3.9.0+git1234"}, ["triton 3.9.0+git1234; newest proven 3.8.0 (H200)"]),
    (
        "HOPPER_ATTN",
        "sm90",
        {"torch": "2.15.0", "triton": "3.9.0"},
        ["torch 2.15.0; newest proven 2.14.0 (H200)", "triton 3.9.0; newest proven 3.8.0 (H200)"],
    ),
    # its own architecture was run with an older one; another was not run at all
    ("TRITON_ATTN", "sm100", {"triton": "3.8.0"}, ["triton 3.8.0; newest proven 3.6.0 (B200)"]),
    ("TRITON_ATTN", "sm80", {"triton": "3.8.0"}, []),
    ("TRITON_ATTN", "sm80", {"triton": "3.9.0"}, ["triton 3.9.0; newest proven 3.8.0 (H200)"]),
    ("TURBOQUANT/Hopper", "sm90", {"triton": "3.8.0"}, []),
    ("TURBOQUANT/Triton", "sm90", {"triton": "3.8.0"}, ["triton 3.8.0; newest proven 3.6.0 (H200)"]),
    # a GPU of another vendor stood in; not run; versions that are not known
    ("ROCM_ATTN", "gfx942", {"triton": "3.9.0"}, []),
    ("TRITON_MLA", "sm90", {"triton": "3.9.0"}, []),
    # only an earlier kernel was run
    ("TRITON_MLA_SPARSE", "sm90", {"triton": "3.9.0"}, []),
    ("HOPPER_ATTN", "sm90", None, []),
    ("HOPPER_ATTN", "sm90", {"torch": "", "triton": ""}, []),
    ("HOPPER_ATTN", "sm90", {"triton": "of today"}, []),
    ("HOPPER_ATTN", "sm90", {"vllm": "9.9"}, []),
]


@pytest.mark.usefixtures("evidence")
@pytest.mark.parametrize(("title", "arch", "packages", "said"), CASES)
def test_what_was_not_proven(
    default: Registry, title: str, arch: str, packages: dict[str, str] | None, said: list[str]
) -> None:
    row, _, name = title.partition("/")
    variant = next(v for v in default.backends[row].variants if v.name == (name or v.name))
    where = default.vocabulary.architectures[arch].platform
    platform = Platform(platform=where, arch=arch, packages=packages)  # type: ignore[arg-type]
    found = proven.unproven(default, row, variant, platform)
    assert [one.text for one in found] == [f"not proven with {text}" for text in said]


@pytest.mark.usefixtures("evidence")
def test_another_engines_kernels_are_not_attnregs_to_prove(default: Registry) -> None:
    [variant] = default.backends["HOPPER_ATTN"].variants
    platform = Platform(platform="cuda", arch="sm90", packages={"triton": "4.0.0"})  # type: ignore[arg-type]
    assert proven.unproven(default, "HOPPER_ATTN", variant, platform)
    assert not proven.unproven(dataclasses.replace(default, imports=False), "HOPPER_ATTN", variant, platform)
    theirs = dataclasses.replace(variant, module="acme.attention")
    assert not proven.unproven(default, "HOPPER_ATTN", theirs, platform)


def test_the_evidence_that_comes_along_can_be_read(default: Registry) -> None:
    titles = {t for r in default.backends.values() for t in (r.name, *(f"{r.name}/{v}" for v in r.variant_names))}
    found = {row.title for row in records.bundled_records()}
    assert "HOPPER_ATTN" in found
    assert found <= titles


@pytest.mark.usefixtures("evidence")
@pytest.mark.parametrize(
    ("version", "winner", "said"),
    [
        ("3.5.1", None, "package triton is version 3.5.1; needs"),
        ("3.8.0", "HOPPER_ATTN", None),
        ("3.9.0", "HOPPER_ATTN", "not proven with triton 3.9.0; newest proven 3.8.0 (H200)"),
        ("3.9.0+git1234", "HOPPER_ATTN", "not proven with triton 3.9.0+git1234; newest proven 3.8.0 (H200)"),
        ("3.10.0", "HOPPER_ATTN", "not proven with triton 3.10.0; newest proven 3.8.0 (H200)"),
        ("4.0.0", "HOPPER_ATTN", "not proven with triton 4.0.0; newest proven 3.8.0 (H200)"),
    ],
)
def test_explain_says_so(
    capsys: pytest.CaptureFixture[str], version: str, winner: str | None, said: str | None
) -> None:
    command = ["explain", "--arch", "sm90", "--head-size", "128", "--package", "torch==2.14.0"]
    command += ["--package", f"triton=={version}"]
    assert main(command) == (0 if winner else 1)
    text = " ".join(capsys.readouterr().out.split())
    assert said is None or said in text
    assert ("not proven" in text) == (winner is not None and said is not None)
    main([*command, "--json"])
    [selection] = json.loads(capsys.readouterr().out)["answers"][0]["selections"]
    assert (selection["backend"] or {}).get("name") == winner
    found = [one["text"] for one in selection["unproven"]]
    assert found == ([said] if winner and said else [])
