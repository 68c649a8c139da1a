"""The recorder of SGLang's decisions, with a small package in SGLang's place."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "record" / "sglang_decisions.py"
# what the recorder touches: the arguments, their resolution, and the view of what was resolved
SERVER_ARGS = """
import flashinfer, torch
class ServerArgs:
    def __init__(self, model_path, **given):
        self.model_path, self.given, self._resolved_overrides = model_path, given, []
    def resolve_once(self):
        if self.given.get("attention_backend") == "wave":
            raise ValueError("no waves")
        major, minor = torch.cuda.get_device_capability()
        self._resolved_overrides.append(("_default", {"attention_backend": f"fa{major}{minor}", "dtype": "auto"}))
"""
OVERRIDES = """
import json, types, pathlib
def resolution_result(args, field):
    return next((d[field] for _, d in reversed(args._resolved_overrides) if field in d), args.given.get(field))
def model_config_of(args):
    fields = json.loads((pathlib.Path(args.model_path) / "config.json").read_text())
    arch = types.SimpleNamespace(name="MHA")
    return types.SimpleNamespace(attention_arch=arch, num_attention_heads=fields["num_attention_heads"])
"""

# a release before: the arguments write over themselves when they are made
OLDER = """
import dataclasses, importlib, json, pathlib, torch, types
@dataclasses.dataclass
class ServerArgs:
    model_path: str
    attention_backend: str = None
    prefill_attention_backend: str = None
    decode_attention_backend: str = None
    speculative_draft_attention_backend: str = None
    dsa_prefill_backend: str = None
    dsa_decode_backend: str = None
    page_size: int = None
    kv_cache_dtype: str = "auto"
    disable_radix_cache: bool = False
    speculative_algorithm: str = None
    speculative_num_steps: int = None
    speculative_eagle_topk: int = None
    speculative_num_draft_tokens: int = None
    def __post_init__(self):
        self._handle_backend()
        setattr(self, "page_size", 64)
    def _handle_backend(self):
        self.other = 1
        if self.attention_backend == "wave":
            raise ValueError("no waves")
        if self.attention_backend == "fa3":
            importlib.import_module("sglang.srt.broken")
        self.attention_backend = "triton"
    def get_model_config(self):
        return types.SimpleNamespace(attention_arch=types.SimpleNamespace(name="MHA"))
"""


@pytest.fixture
def recorder():
    spec = importlib.util.spec_from_file_location("sglang_decisions", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path):
    """A working tree with a package in SGLang's place."""
    srt = tmp_path / "python" / "sglang" / "srt"
    (srt / "arg_groups").mkdir(parents=True)
    (srt / "server_args.py").write_text(SERVER_ARGS)
    (srt / "arg_groups" / "overrides.py").write_text(OVERRIDES)
    return tmp_path


def row(**change):
    return {"platform": "cuda", "arch": "sm90", "flags": [], "model": "LlamaForCausalLM", "version": "0", **change}


def record(source, rows, tmp_path):
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps(r) + "\n" for r in rows))
    command = [sys.executable, str(TOOL), "--source", str(source), "--rows", str(asked)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_rows_of_several_machines_are_answered(tree, tmp_path):
    rows = [row(), row(arch="sm103"), row(attention_backend="wave"), row(arch="gfx942", platform="rocm", flags=[])]
    done = record(tree, rows[:3], tmp_path)
    assert done.returncode == 0, done.stderr
    decisions = [json.loads(line) for line in done.stdout.splitlines()]
    by_row = {json.dumps(d["in"]): d["out"] for d in decisions}
    assert len(by_row) == 3
    first = by_row[json.dumps(rows[0])]
    assert (first["attention_backend"], first["trace"]) == ("fa90", [["_default", {"attention_backend": "fa90"}]])
    assert first["model"]["num_attention_heads"] == 32
    assert by_row[json.dumps(rows[1])]["attention_backend"] == "fa103"
    error = by_row[json.dumps(rows[2])]["error"]
    assert (error["type"], error["message"], error["in"]) == ("ValueError", "no waves", "resolve_once")
    assert error["at"].startswith("sglang/srt/server_args.py:")


def test_a_wheel_is_unpacked(tree, tmp_path):
    wheel = tmp_path / "sglang-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (tree / "python").rglob("*.py"):
            archive.write(path, path.relative_to(tree / "python"))
    done = record(wheel, [row()], tmp_path)
    assert json.loads(done.stdout)["out"]["attention_backend"] == "fa90", done.stderr


def test_a_module_that_is_missing_ends_the_recording(tree, tmp_path):
    """It is this interpreter's lack, and no refusal of SGLang's."""
    done = record(tree, [row(flags=["no-flashinfer"])], tmp_path)
    assert done.returncode != 0
    assert "No module named 'flashinfer'" in done.stderr
    assert not done.stdout


def test_a_release_that_writes_over_its_arguments_is_watched(tree, tmp_path):
    (tree / "python" / "sglang" / "srt" / "server_args.py").write_text(OLDER)
    done = record(tree, [row(), row(attention_backend="wave")], tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line)["out"] for line in done.stdout.splitlines())
    assert (first["attention_backend"], first["page_size"], first["error"]) == ("triton", 64, None)
    # what was given is no write
    assert first["trace"] == [
        ["_handle_backend", {"attention_backend": "triton"}],
        ["__post_init__", {"page_size": 64}],
    ]
    assert (second["error"]["in"], second["trace"]) == ("_handle_backend", [])


def test_what_breaks_while_it_is_imported_is_no_refusal(tree, tmp_path):
    srt = tree / "python" / "sglang" / "srt"
    (srt / "server_args.py").write_text(OLDER)
    (srt / "broken.py").write_text("raise TypeError('a package of this interpreter')\n")
    done = record(tree, [row(attention_backend="fa3")], tmp_path)
    assert (done.returncode != 0, done.stdout) == (True, "")
    assert "a package of this interpreter" in done.stderr


def test_a_symbol_that_is_gone_is_named(tree, tmp_path):
    (tree / "python" / "sglang" / "srt" / "server_args.py").write_text(OLDER.replace("get_model_config", "config"))
    done = record(tree, [row()], tmp_path)
    assert done.returncode != 0
    assert "this SGLang has no get_model_config in ServerArgs, which the recording needs: its code moved" in done.stderr


def test_an_import_of_a_package_that_the_machine_is_without_is_a_decision(recorder, monkeypatch):
    """Any other missing package is one that the recording needs."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    missing = ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer.decode")
    assert recorder._is_left_out(missing)
    assert not recorder._is_left_out(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert not recorder._is_left_out(ValueError("flashinfer"))
    sys.meta_path.append(recorder._Finder(recorder.CUDA_STUBS))
    assert not recorder._is_left_out(missing)


def test_what_is_no_sglang_is_refused(tmp_path):
    done = record(tmp_path, [row()], tmp_path)
    assert done.returncode != 0
    assert "no SGLang: neither a wheel nor a directory with sglang/srt/server_args.py" in done.stderr


@pytest.mark.parametrize(
    ("arch", "said"),
    [("sm75", (7, 5)), ("sm103", (10, 3)), ("gfx90a", (9, 0)), ("gfx942", (9, 4)), ("gfx1100", (11, 0)),
     ("gfx1201", (12, 0))],
)  # fmt: skip
def test_capabilities_are_those_of_torch(recorder, arch, said):
    assert recorder.capability(arch) == said


def test_a_draft_is_given_where_the_algorithm_needs_one(recorder, tmp_path):
    def draft(**change):
        return recorder.arguments(row(**change), tmp_path).get("speculative_draft_model_path")

    assert draft(speculative_algorithm="EAGLE")
    assert draft(speculative_algorithm="NGRAM") is None
    assert draft(speculative_algorithm="EAGLE", model="DeepseekV3ForCausalLM") is None
    assert draft(speculative_algorithm="STANDALONE", model="DeepseekV3ForCausalLM")
    assert recorder.arguments(row(platform="cpu", arch="x86_64"), tmp_path)["device"] == "cpu"


def test_every_model_has_a_config(recorder, tmp_path):
    from support.sglang_parity import classes

    from attnreg.engines.sglang import models

    assert set(recorder.configs(tmp_path)) == {*models(), *classes()}
    for name in models():
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["architectures"] == [name.partition("#")[0]]
        assert config["model_type"]
