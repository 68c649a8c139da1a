"""What docs/stability.md promises: public names, commands, JSON fields, overlays and locks of an earlier attnreg.

`ATTNREG_REWRITE=1` writes the three lists anew. A line that vanishes from one breaks the promise, and needs an entry
under "Breaking" in CHANGELOG.md.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from support import ROOT

import attnreg
from attnreg import AttentionRequest, Platform, load_registry, select
from attnreg.cli import main
from attnreg.cli.commands import cli

HERE = Path(__file__).parent


def held(name: str, lines: list[str]) -> None:
    """Assert that the lines are those of a list."""
    file = HERE / name
    if os.environ.get("ATTNREG_REWRITE"):
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    known = file.read_text(encoding="utf-8").splitlines()
    assert [line for line in known if line not in lines] == [], "these were promised, and are gone"
    assert [line for line in lines if line not in known] == [], "these are new: write the list anew"


# names ----------------------------------------------------------------------------------------------------------------


def _public() -> Iterator[str]:
    for name in sorted(attnreg.__all__):
        value = getattr(attnreg, name)
        if inspect.isclass(value):
            yield f"class {name}"
            if dataclasses.is_dataclass(value):
                yield from (f"{name}.{f.name}" for f in dataclasses.fields(value) if not f.name.startswith("_"))
            for member, kind in vars(value).items():
                if not member.startswith("_") and (callable(kind) or isinstance(kind, classmethod | property)):
                    yield f"{name}.{member}{_parameters(getattr(value, member)) if callable(kind) else ''}"
        else:
            yield f"{name}{_parameters(value) if callable(value) else ''}"


def _parameters(function: Any) -> str:
    names = []
    for parameter in inspect.signature(function).parameters.values():
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        names.append(star + parameter.name + ("=" if parameter.default is not parameter.empty else ""))
    return f"({', '.join(names)})"


def test_public_names_and_their_parameters() -> None:
    held("public_api.txt", sorted(dict.fromkeys(_public())))


def _commands(command: click.Command, name: str = "attnreg") -> Iterator[str]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for sub in command.list_commands(context):
            each = command.get_command(context, sub)
            assert each is not None
            yield from _commands(each, f"{name} {sub}")
        return
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield from (f"{name} {option}" for option in parameter.opts)
        else:
            yield f"{name} {parameter.human_readable_name}"


def test_commands_and_their_options() -> None:
    held("commands.txt", sorted(_commands(cli)))


# JSON -----------------------------------------------------------------------------------------------------------------

MODEL = ("--arch", "sm90", "--model", "gpt-oss-120b")
LAYER = ("--arch", "sm90", "--head-size", "128")
JSON: dict[str, tuple[str, ...]] = {
    "explain": ("explain", *MODEL),
    "explain, no backend": ("explain", "--arch", "sm75", "--head-size", "576", "--feature", "sinks"),
    "plan": ("plan", "--registry", "vllm-0.33.0", *MODEL, "--gpu-memory", "80GiB", "--weights", "60GiB"),
    "list": ("list", "--arch", "sm90"),
    "show": ("show", "TRITON_ATTN"),
    "list of architectures": ("list", "--archs"),
    "list of releases": ("list", "--engines"),
    "why": ("why", str(ROOT / "examples/logs/gpt-oss.log")),
    "why, followed": (
        "why",
        "Using TRITON_ATTN attention backend out of potential backends: [TRITON_ATTN]",
        "--follow",
    ),
    "show a family": ("show", "llama"),
    "check": ("check", "--overlay", str(ROOT / "tests/promises/overlay.yaml")),
    "check of a lock": ("check", "--lock", str(ROOT / "tests/promises/attnreg.lock")),
    "codes": ("check", "--explain", "unreachable-entry"),
    "diff": ("diff", "vllm-0.32.0", "vllm-0.33.0", *MODEL),
    "diff of three": ("diff", "vllm-0.31.0", "vllm-0.32.0", "vllm-0.33.0", *MODEL),
    "upgrade": ("upgrade", "--from", "vllm-0.20.0", "--to", "vllm-0.33.0", *MODEL),
    "lock": ("lock", *LAYER),
}


def _shape(data: Any, path: str = "") -> Iterator[str]:
    """The fields of a JSON value with the kinds of their values; keys that are names of data are ``*``."""
    if isinstance(data, dict):
        free = bool(data) and all(re.search(r"[^a-z_]", key) for key in data)
        for key, value in data.items():
            yield from _shape(value, f"{path}.{'*' if free else key}".lstrip("."))
    elif isinstance(data, list):
        for value in data:
            yield from _shape(value, f"{path}[]")
    else:
        yield f"{path}: {type(data).__name__}"


def test_fields_of_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTNREG_REGISTRY", raising=False)
    lines: list[str] = []
    for name, words in JSON.items():
        status = main([*words] if words[0] == "lock" else [*words, "--json"])
        data = json.loads(capsys.readouterr().out)
        assert status in (0, 1, 3), name
        assert next(iter(data)) == ("format" if words[0] == "lock" else "version"), name
        lines += sorted({f"{name}: {line}" for line in _shape(data)})
    held("json_shapes.txt", lines)


# files of an earlier attnreg ------------------------------------------------------------------------------------------


def test_an_overlay_of_an_earlier_version_is_valid() -> None:
    registry = load_registry("vllm-0.33.0", HERE / "overlay.yaml")
    request = AttentionRequest(head_size=128)
    chosen = select(request, Platform(platform="cuda", arch="sm90"), registry=registry).backend
    assert chosen.name == "FLEX_ATTENTION"


def test_a_lock_of_an_earlier_version_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--lock", str(HERE / "attnreg.lock")]) in (0, 1)
    assert "locked selection" in capsys.readouterr().out


# engines and platforms ------------------------------------------------------------------------------------------------


def test_entry_points_stay() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    assert points["vllm.general_plugins"] == {"attnreg": "attnreg.integrations.vllm.plugin:register"}
    assert points["sglang.srt.plugins"] == {"attnreg": "attnreg.integrations.sglang.plugin:register"}
    for value in (value for group in points.values() for value in group.values()):
        module, _, name = value.partition(":")
        file = ROOT / f"{module.replace('.', '/')}.py"
        assert any(getattr(node, "name", "") == name for node in ast.parse(file.read_text(encoding="utf-8")).body)


def test_the_newest_tables_have_recordings_that_hold_them() -> None:
    """Of the newest two minor releases of vLLM and the newest of SGLang; other tests hold the tables to them."""
    vllm, sglang = (
        sorted(
            tuple(map(int, name.partition("-")[2].split("."))) for name in attnreg.bundled_registries() if of in name
        )
        for of in ("vllm-", "sglang-")
    )
    newest = sorted({release[:2] for release in vllm})[-2:]
    kept = [".".join(map(str, release)) for release in vllm if release[:2] in newest]
    assert len(kept) >= 2
    wanted = [f"vllm/{kind}-{release}.jsonl.gz" for release in kept for kind in ("selector", "start")]
    wanted.append(f"sglang/decisions-{'.'.join(map(str, sglang[-1]))}.jsonl.gz")
    assert [name for name in wanted if not (ROOT / "tests/data" / name).is_file()] == []


def test_the_page_names_the_pythons_that_the_package_takes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = [c.rpartition(" ")[2] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    page = " ".join((ROOT / "docs/stability.md").read_text(encoding="utf-8").split())
    assert f"Python {pythons[0]} to {pythons[-1]}, torch 2.11 to " in page
    assert project["requires-python"] == f">={pythons[0]}"
    assert project["optional-dependencies"]["kernels"][0] == "torch>=2.11"


def test_each_file_that_the_page_cites_as_a_test_exists() -> None:
    links = re.findall(r"\]\((\.\./tests/[^)#]+)\)", (ROOT / "docs/stability.md").read_text(encoding="utf-8"))
    assert len(links) >= 3
    assert [link for link in links if not (ROOT / "docs" / link).is_file()] == []
