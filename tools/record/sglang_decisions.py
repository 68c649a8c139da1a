"""Records SGLang's decisions: its own, unedited resolution runs on a processor, with the machine simulated.

    python tools/record/sglang_decisions.py --source sglang-0.5.23-....whl --rows asked.jsonl > decisions.jsonl

A row of `asked.jsonl` has the arguments of a server, as `in` of tests/data/sglang. Its answer is a line with `in` and
`out`.
The interpreter needs torch, the transformers that SGLang pins, and SGLang's small dependencies. Nothing is downloaded.

Simulated are the GPU (its capability, memory and count), CUDA 13.0 or ROCm 7.2, the packages of `STUBS`, and the
checkpoint. The checkpoint is a config.json only, and code that looks for a tensor finds none.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
import types
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

HERE = Path(__file__).parent
# importable, and empty: resolution only looks for them, or imports them together with what it needs
STUBS = (
    "sgl_kernel", "deep_gemm", "flash_attn", "torchvision", "torchaudio", "outlines", "llguidance",
    "torchcodec", "decord", "decord2", "soundfile", "timm", "tilelang", "sgl_deep_ep", "torch_memory_saver", "numba",
    "datasets", "anthropic", "openai_harmony", "cuda", "pynvml", "av", "compressed_tensors", "torchao", "loguru",
    "sentencepiece",
)  # fmt: skip
CUDA_STUBS = ("flashinfer",)
ROCM_STUBS = ("aiter",)
MEMORY_GIB = {"sm75": 16, "sm80": 80, "sm89": 48, "sm90": 80, "sm100": 180, "sm103": 270, "sm110": 128, "sm120": 96,
              "sm121": 128, "gfx90a": 64, "gfx942": 192, "gfx950": 288, "gfx1100": 24, "gfx1201": 16}  # fmt: skip
# a trace records every write to one of these arguments
FIELDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend",
          "speculative_draft_attention_backend", "dsa_prefill_backend", "dsa_decode_backend", "page_size",
          "kv_cache_dtype", "disable_radix_cache", "speculative_algorithm", "speculative_num_steps",
          "speculative_eagle_topk", "speculative_num_draft_tokens")  # fmt: skip
_NOT_ARGUMENTS = ("version", "platform", "arch", "flags", "model", "sampling")
_MTP = ("Deepseek", "Glm", "Longcat", "Qwen3Next", "Qwen3_5", "MiMo", "Kimi")
_DRAFTS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH")
# models that take a draft of one class only; others get a Llama
_DRAFT_OF = {"IQuestQ1ForCausalLM": "IQuestQ1MTP"}


class _Anything(type):
    """The type of a stub class. Each attribute of a stub class is another one, and its instance can be called."""

    def __getattr__(cls, name: str) -> Any:
        return _anything(name)


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    members: dict[str, Any] = {
        "__init__": lambda self, *a, **k: None,
        "__call__": lambda self, *a, **k: a[0] if a else None,
        "__iter__": lambda self: iter(()),
    }
    return _Anything(name, (), members)


class _Stub(types.ModuleType):
    __path__ = []  # noqa: RUF012  (a package)
    __version__ = "99.0"

    def __getattr__(self, name: str) -> Any:
        return _anything(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stubs, and every module inside them."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def capability(arch: str) -> tuple[int, int]:
    """The capability that torch has for a GPU: sm103 is (10, 3), gfx942 is (9, 4), gfx1100 is (11, 0)."""
    digits = arch.removeprefix("sm").removeprefix("gfx")
    if arch.startswith("sm"):
        return int(digits[:-1]), int(digits[-1])
    return int(digits[:-2]), int(digits[-2], 16)


def simulate(platform: str, arch: str, flags: Sequence[str]) -> None:
    """Make this process simulate a machine. SGLang caches what it finds, so one process is one machine."""
    import torch

    stubs = set(STUBS)
    if platform == "cuda" and "no-flashinfer" not in flags:
        stubs |= set(CUDA_STUBS)
    if platform == "rocm":
        stubs |= set(ROCM_STUBS)
    sys.meta_path.insert(0, _Finder(stubs))
    installed = importlib.metadata.version
    versions: Any = importlib.metadata
    versions.version = lambda name: "99.0" if name in stubs else installed(name)
    distributions = importlib.metadata.packages_distributions()
    versions.packages_distributions = lambda: {**distributions, **{name: [name] for name in stubs}}
    if platform == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        _pretend_amx("amx" in flags)
        return
    if platform == "rocm":
        _rocminfo(arch)
    memory = MEMORY_GIB[arch] << 30
    properties = types.SimpleNamespace(
        name=arch, total_memory=memory, major=capability(arch)[0], minor=capability(arch)[1], gcnArchName=arch,
        multi_processor_count=132, warp_size=32,
    )  # fmt: skip
    for name, value in {
        "is_available": lambda: True, "device_count": lambda: 8, "is_initialized": lambda: True,
        "current_device": lambda: 0, "get_device_capability": lambda *a: capability(arch),
        "get_device_name": lambda *a: arch, "get_device_properties": lambda *a: properties,
        "mem_get_info": lambda *a: (memory, memory),
    }.items():  # fmt: skip
        setattr(torch.cuda, name, value)
    torch.version.cuda = "13.0" if platform == "cuda" else None
    torch.version.hip = "7.2" if platform == "rocm" else None


def _rocminfo(arch: str) -> None:
    """Put a `rocminfo` on the path that prints the line which SGLang looks for: the GPU's memory, in KB."""
    folder = Path(tempfile.mkdtemp())
    program = folder / "rocminfo"
    program.write_text(f"#!/bin/sh\nprintf 'Name: {arch}\\n  Pool 1\\n    Size: {MEMORY_GIB[arch] << 20}(KB)\\n'\n")
    program.chmod(0o755)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def _pretend_amx(available: bool) -> None:
    common: Any = importlib.import_module("sglang.srt.utils.common")
    _needed(common, "is_amx_tile_supported")
    common.is_amx_tile_supported = available
    # a variable in 0.5.14, a function since 0.5.23
    if hasattr(common, "is_intel_amx_backend_available"):
        common.is_intel_amx_backend_available = available
        return
    _needed(common, "_is_intel_amx_backend_available")
    common._is_intel_amx_backend_available = lambda: available


def _needed(owner: Any, name: str) -> Any:
    """A symbol of SGLang that the recording needs. Raises SystemExit if this release does not have it."""
    if not hasattr(owner, name):
        where = getattr(owner, "__qualname__", owner.__name__)
        raise SystemExit(f"this SGLang has no {name} in {where}, which the recording needs: its code moved")
    return getattr(owner, name)


def configs(folder: Path) -> dict[str, dict[str, Any]]:
    """Write a config.json for each model of sglang_models.yaml. Returns model -> its fields."""
    models: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "sglang_models.yaml").read_text(encoding="utf-8"))
    for name, fields in models.items():
        where = folder / name
        where.mkdir(parents=True)
        (where / "config.json").write_text(json.dumps({"architectures": [name.partition("#")[0]], **fields}))
    return models


def arguments(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments of `ServerArgs` for a row."""
    given = {k: v for k, v in row.items() if k not in _NOT_ARGUMENTS and v is not None}
    algorithm = given.get("speculative_algorithm")
    bundled = row["model"].startswith(_MTP) and algorithm in ("EAGLE", "NEXTN")
    if algorithm in _DRAFTS and not bundled:
        given["speculative_draft_model_path"] = str(folder / _DRAFT_OF.get(row["model"], "LlamaForCausalLM"))
    if row["platform"] == "cpu":
        given["device"] = "cpu"
    return {"model_path": str(folder / row["model"]), **given}


def decide(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments that SGLang resolves for a row, and the trace of the writes to them; or its error."""
    make: Any = _needed(importlib.import_module("sglang.srt.server_args"), "ServerArgs")
    given = arguments(row, folder)
    with tempfile.TemporaryDirectory() as scratch, mock.patch.dict(os.environ, {"TMPDIR": scratch}):
        if hasattr(make, "resolve_once"):
            return _resolved_once(make(**given))
        return _resolved_when_made(make, given)


def _resolved_once(args: Any) -> dict[str, Any]:
    """The decision of a release that keeps the arguments unchanged, and has its own trace of the steps' results."""
    try:
        args.resolve_once()
    except Exception as error:
        return {"error": _problem(error), "trace": _trace(args)}
    overrides: Any = importlib.import_module("sglang.srt.arg_groups.overrides")
    result, config_of = _needed(overrides, "resolution_result"), _needed(overrides, "model_config_of")
    fields = {field: result(args, field) for field in FIELDS}
    return {"error": None, **fields, "trace": _trace(args), "model": _facts(config_of(args))}


def _resolved_when_made(make: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The decision of a release whose `ServerArgs` overwrites its own arguments when it is made: up to 0.5.18.

    Since 0.5.15 most steps declare what they resolve instead, and the arguments get all of it at the end. A declared
    value hides what is written in between, so it is the later one of a trace.
    """
    _needed(make, "__post_init__")
    config_of = _needed(make, "get_model_config")
    with _writes(make) as written:
        try:
            args = make(**given)
        except Exception as error:
            return {"error": _problem(error), "trace": written}
    fields = {field: getattr(args, field) for field in FIELDS}
    trace = [entry for entry in written if entry[0] != "materialize_declarations"] + _trace(args)
    return {"error": None, **fields, "trace": trace, "model": _facts(config_of(args))}


@contextmanager
def _writes(make: Any) -> Iterator[list[Any]]:
    """Record each write to one of `FIELDS`, in the form of a trace: the writing function, and field -> value."""
    written: list[Any] = []

    def write(args: Any, name: str, value: Any) -> None:
        object.__setattr__(args, name, value)
        writer = sys._getframe(1).f_code.co_name
        # __init__ only stores the given arguments
        if name in FIELDS and writer != "__init__":
            written.append([writer, {name: value}])

    with mock.patch.object(make, "__setattr__", write):
        yield written


def _problem(error: Exception) -> dict[str, Any]:
    """An exception of SGLang, with the place where it was raised. Raises it again if the recording lacks a package."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if "/sglang/" in frame.filename), frames[-1])
    if not _is_left_out(error) and (isinstance(error, ImportError) or last.name == "<module>"):
        raise error
    at = f"sglang/{last.filename.rpartition('/sglang/')[2]}:{last.lineno}"
    return {"type": type(error).__name__, "message": str(error)[:600], "at": at, "in": last.name}


def _is_left_out(error: Exception) -> bool:
    """Whether SGLang imports a package that the simulated machine is without, and so does not start there."""
    missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0]
    finders = (finder for finder in sys.meta_path if isinstance(finder, _Finder))
    return missing in CUDA_STUBS and not any(missing in finder.names for finder in finders)


def _trace(args: Any) -> list[Any]:
    written = getattr(args, "_resolved_overrides", None) or ()
    kept = [(step, {f: v for f, v in fields.items() if f in FIELDS}) for step, fields in written]
    return [[step, fields] for step, fields in kept if fields]


def _facts(config: Any) -> dict[str, Any]:
    return {
        "attention_arch": config.attention_arch.name,
        **{
            name: getattr(config, name, None)
            for name in ("has_attention_sinks", "has_asymmetric_kv", "is_hybrid_swa", "is_encoder_decoder", "head_dim",
                         "v_head_dim", "num_attention_heads", "num_key_value_heads", "is_generation")
        },
    }  # fmt: skip


def unpacked(source: Path, folder: Path) -> Path:
    """The directory to put on the path for a wheel or a working tree of SGLang."""
    if source.suffix == ".whl":
        with zipfile.ZipFile(source) as wheel:
            wheel.extractall(folder)
        return folder
    for root in (source, source / "python"):
        if (root / "sglang" / "srt" / "server_args.py").is_file():
            return root
    raise SystemExit(f"{source}: no SGLang: neither a wheel nor a directory with sglang/srt/server_args.py")


def record(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The decisions for rows of one machine, which this process simulates from now on."""
    first = rows[0]
    simulate(first["platform"], first["arch"], first["flags"])
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as scratch:
        configs(Path(scratch))
        for row in rows:
            yield {"in": row, "out": decide(row, Path(scratch))}


def machine(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["platform"], row["arch"], ",".join(row["flags"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, required=True, help="a wheel of SGLang, or a working tree")
    parser.add_argument("--rows", type=Path, required=True, help="what was asked for: one JSON object a line")
    parser.add_argument("--here", action="store_true", help="all rows are of one machine: record them in this process")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines() if line]
    if options.here:
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        sys.path.insert(0, str(options.source))
        for decision in record(rows):
            print(json.dumps(decision), file=out, flush=True)
        return
    with tempfile.TemporaryDirectory() as scratch:
        root = unpacked(options.source, Path(scratch) / "source")
        for number, (_, group) in enumerate(groupby(sorted(rows, key=machine), machine)):
            part = Path(scratch) / f"{number}.jsonl"
            part.write_text("".join(json.dumps(row) + "\n" for row in group))
            command = [sys.executable, __file__, "--source", str(root), "--rows", str(part), "--here"]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
