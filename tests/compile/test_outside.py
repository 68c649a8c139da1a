"""What data may name: bundled registries, and regular files below the directory of the file that names them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.registries.files import brief, refusal, write

import attnreg
from attnreg.analysis.revisions import load_both, load_revision
from attnreg.cli import main
from attnreg.files import outside

SECRET = "ghp_0123456789"
CURE = "move the file; or give --allow-outside (in Python: allow_outside=True) where you trust who wrote it"
OVERLAY = "choices: [{prefer: B}]\n"


@pytest.fixture(autouse=True)
def home(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of overlays, with a registry and a secret beside it."""
    monkeypatch.delenv("ATTNREG_REGISTRY", raising=False)
    (tree / "secret").write_text(f"token: {SECRET}\n")
    (tree / "base.yaml").write_text("extends: base\n" + OVERLAY)
    write(tree / "over/below/base")
    (tree / "over/device").symlink_to("/dev/zero")
    (tree / "over/out").symlink_to("../secret")
    (tree / "over/out_registry").symlink_to("../base")
    (tree / "over/environment").symlink_to("/proc/self/environ")
    os.mkfifo(tree / "over/pipe")
    return tree


OUTSIDE = {
    "../base": "leads out of over/",
    "below/../../base.yaml": "leads out of over/",
    "/proc/self/environ": "is an absolute path",
    "/etc/passwd": "is an absolute path",
    "/no/such/file": "is an absolute path",
    "../no/such/file": "leads out of over/",
    "device": "leads out of over/",
    "out": "leads out of over/",
    "out_registry": "leads out of over/",
    "environment": "leads out of over/",
    "pipe": "is a named pipe",
}


@pytest.mark.parametrize(("named", "why"), OUTSIDE.items())
def test_an_overlay_names_nothing_outside_its_directory(named: str, why: str) -> None:
    Path("over/mine.yaml").write_text(f"extends: {named}\n{OVERLAY}")
    for refused in (refusal("over/mine.yaml"), refusal("base", "over/mine.yaml"), refusal(None, "over/mine.yaml")):
        message, help_ = brief(refused).splitlines()[:2]
        assert message == (
            f"over/mine.yaml:1:10: extends: `{named}` {why}: an overlay names bundled registries, and files below its "
            "own directory"
        )
        assert help_ == f"  help: {CURE}"
        assert SECRET not in refused


@pytest.mark.parametrize("named", ["below/base", "./below/base", "below/../below/base", "../over/below/base"])
def test_what_lies_below_it_may_be_named(named: str) -> None:
    Path("over/mine.yaml").write_text(f"extends: {named}\n{OVERLAY}")
    assert attnreg.load_registry("over/mine.yaml").name == "base+mine"


@pytest.mark.parametrize("named", ["../base", "out_registry", "../base.yaml"])
def test_the_caller_may_allow_it(named: str) -> None:
    Path("over/mine.yaml").write_text(f"extends: {named}\n{OVERLAY}")
    assert list(attnreg.load_registry("over/mine.yaml", allow_outside=True).backends) == ["A", "B"]
    assert list(load_revision("over/mine.yaml", allow_outside=True).backends) == ["A", "B"]
    assert load_both("over/mine.yaml", "base", allow_outside=True)[1].name == "base"


def test_each_overlay_of_a_chain_names_what_is_below_itself() -> None:
    Path("mine.yaml").write_text(f"extends: over/team.yaml\n{OVERLAY}")
    Path("over/team.yaml").write_text(f"extends: ../base\n{OVERLAY}")
    assert refusal("mine.yaml").startswith("over/team.yaml:1:10: extends: `../base` leads out of over/")


def test_a_mapping_is_the_callers_own() -> None:
    data = {"extends": str(Path("base").absolute()), "choices": [{"prefer": "B"}]}
    assert attnreg.load_registry(overlays=data).name == "base+overlay"


@pytest.mark.parametrize("target", ["../secret", "/proc/self/environ", "/dev/zero", "../base/backends.yaml"])
@pytest.mark.parametrize("file", ["vocabulary", "backends", "priorities", "steps", "invariants", "release"])
def test_no_link_of_a_registry_leads_out_of_it(file: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MYTOKEN", SECRET)
    registry = write(Path("linked"))
    (registry / f"{file}.yaml").unlink(missing_ok=True)
    (registry / f"{file}.yaml").symlink_to(target)
    refused = refusal(Path("./linked"))
    assert f"{file}.yaml:1:1: the file leads out of : copy it, or give --allow-outside" in refused
    assert SECRET not in refused


def test_a_link_of_a_registry_may_be_allowed() -> None:
    registry = write(Path("linked"), backends="")
    (registry / "backends.yaml").symlink_to("../base/backends.yaml")
    assert list(attnreg.load_registry("linked", allow_outside=True).backends) == ["A", "B"]
    # one that stays in the directory needs no leave
    (registry / "backends.yaml").unlink()
    (registry / "rows").write_text(Path("base/backends.yaml").read_text())
    (registry / "backends.yaml").symlink_to("rows")
    assert list(attnreg.load_registry("linked").backends) == ["A", "B"]


@pytest.mark.parametrize("folder", ["models", "evidence"])
def test_nor_does_a_directory_of_a_registry(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    registry = write(Path("linked"))
    Path("private").mkdir()
    Path(f"private/{SECRET}").write_text("")
    Path("private/gpu.json").write_text("{}")
    (registry / folder).symlink_to("../private")
    main(["check", "--registry", "linked"])
    said = "".join(capsys.readouterr())
    assert "leads out of linked/" in " ".join(said.split())
    assert SECRET not in said
    main(["check", "--registry", "linked", "--allow-outside"])
    assert "leads out" not in "".join(capsys.readouterr())


def test_a_name_that_no_file_can_have_is_nowhere() -> None:
    assert outside("a\0b", Path()) == ""
    assert outside("", Path("over")) == ""


# the command ---------------------------------------------------------------------------------------------------------

ASK = ("--arch", "sm90", "--head-size", "128")


@pytest.mark.slow(reason="each command in turn")
@pytest.mark.parametrize(
    "command",
    [
        ("check", "--overlay"),
        ("check", "--registry"),
        ("explain", *ASK, "--overlay"),
        ("list", "--overlay"),
        ("lock", *ASK, "--overlay"),
        ("diff", "vllm-0.20.0"),
        ("upgrade", "--from", "vllm-0.33", *ASK, "--to"),
        ("why", "Using FLASH_ATTN backend.", "--registry"),
    ],
    ids=lambda command: command[0] + command[-1],
)
def test_every_command_refuses_and_allows(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    Path("over/mine.yaml").write_text(f"extends: ../top.yaml\n{OVERLAY.replace('B', 'TRITON_ATTN')}")
    Path("top.yaml").write_text("extends: vllm-0.20.0\nchoices: [{deny: FLASHINFER}]\n")
    assert main([*command, "over/mine.yaml"]) == 2
    assert "over/mine.yaml:1:10: extends: `../top.yaml` leads out of over/" in capsys.readouterr().err
    main([*command, "over/mine.yaml", "--allow-outside"])
    assert "leads out" not in capsys.readouterr().err


@pytest.fixture
def lock(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What a lock of an overlay holds."""
    Path("laid.yaml").write_text("choices: [{deny: FLASHINFER}]\n")
    assert main(["lock", *ASK, "--overlay", "laid.yaml", "-o", "a.lock"]) == 0
    capsys.readouterr()
    found: dict[str, Any] = json.loads(Path("a.lock").read_text())
    return found


LOCKED = {
    "/proc/self/environ": "leads out of {folder}",
    "/etc/passwd": "leads out of {folder}",
    "../secret": "leads out of {folder}",
    "../laid.yaml": "leads out of {folder}",
    "environment": "leads out of {folder}",
    "pipe": "is a named pipe",
}


@pytest.mark.parametrize(("named", "why"), LOCKED.items())
@pytest.mark.parametrize("part", ["registry", "overlays"])
def test_a_lock_names_nothing_outside_its_directory(
    part: str, named: str, why: str, lock: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("MYTOKEN", SECRET)
    monkeypatch.chdir("over")
    Path("b.lock").write_text(json.dumps(lock | {"overlays": []} | {part: named if part == "registry" else [named]}))
    assert main(["check", "--lock", "b.lock"]) == 2
    said = capsys.readouterr().err
    kind = part.removesuffix("s")
    assert f"the lock names the {kind} {named!r}, which {why.format(folder='the current directory')}" in said
    assert f"help: name it with --{kind}, or give --allow-outside where you trust who wrote the lock" in said
    assert SECRET not in said
    # what an option names in its place is the user's
    assert main(["check", "--lock", "b.lock", "--registry", "default"]) in (0, 1)


def test_a_lock_names_what_lies_below_it(lock: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--lock", "a.lock"]) == 0
    # where it was written, a path may be absolute
    Path("a.lock").write_text(json.dumps(lock | {"overlays": [str(Path("laid.yaml").absolute())]}))
    assert main(["check", "--lock", "a.lock"]) == 0
    Path("over/a.lock").write_text(json.dumps(lock))
    assert main(["check", "--lock", "over/a.lock"]) == 2
    assert main(["check", "--lock", "over/a.lock", "--allow-outside"]) == 0
    assert main(["check", "--lock", "over/a.lock", "--overlay", "laid.yaml"]) == 0


@pytest.mark.slow(reason="processes of their own")
def test_evidence_lies_below_the_overlay_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    measured = {"of": "TRITON_ATTN", "over": "FLEX_ATTENTION", "ratio": 2.0, "noise": 1.0}
    order = {"name": "x", "when": {"arch": "sm90"}, "order": ["TRITON_ATTN", "FLEX_ATTENTION"]}
    for file, why in (("../secret", "leads out of over/"), ("/etc/passwd", "is an absolute path")):
        data = {"orders": {"cuda": [order | {"measured": measured | {"file": file}}]}}
        Path("over/mine.yaml").write_text(json.dumps(data))
        main(["check", "--overlay", "over/mine.yaml"])
        said = " ".join("".join(capsys.readouterr()).split())
        assert f"'{file}', the evidence of cuda/x, {why}" in said
        assert SECRET not in said
