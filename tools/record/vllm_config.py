"""Records how vLLM starts: its own, unedited code runs on a processor, with the machine simulated.

    python tools/record/vllm_config.py --tree .cache/vllm-0.33.0 --asked asked.jsonl --out decisions.jsonl

The directory after `--tree` holds `vllm/`: the Python of a wheel, or a working tree. A line of asked.jsonl is a model,
`{"model": NAME, "config": {...}}`, or a row, `{"in": {"arch": "sm90", "model": NAME, ...}}`. A row may have the
arguments of `ARGUMENTS`.

For each row vLLM makes the configuration of its engine (`EngineArgs.create_engine_config`). Then it builds the model on
torch's meta device, where each layer calls the selector. Then it chooses the block size.

`out` has the dtype, the KV dtype, the block size and the layers by backend, or the `error` with the place where it was
raised. A row with `states` also has the states of the layers without softmax attention: their shapes and dtypes, the
bytes of a page, and how many pages a request takes. `simulated` are modules that are simulated beside those of every
row, and `cuda_major` is the major version of CUDA that PyTorch is built for.
"""

from __future__ import annotations

import argparse
import copy
import enum
import gc
import gzip
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import vllm_drafts
import vllm_layers
import vllm_machine

# the arguments of vLLM that a row may have in addition to its machine and its model
ARGUMENTS: tuple[str, ...] = (
    "dtype", "kv_cache_dtype", "block_size", "attention_backend", "attention_config", "runner",
    "speculative_config", "tensor_parallel_size", "max_model_len", "hf_overrides",
    "enable_prefix_caching", "mamba_cache_dtype", "mamba_ssm_cache_dtype",
)  # fmt: skip
STUBBED = (
    *vllm_machine.STUBBED,
    "the checkpoint: there is only a config.json, no tokenizer and no processor",
    "memory: the model is built on torch's meta device",
    "the process in which vLLM inspects a model's class: this one",
    "the other ranks, and what passes between them",
)
# texts of errors that come from the simulation, and not from vLLM
_SIMULATION = re.compile(
    r"meta tensor|not compiled with CUDA|No module named|MagicMock|device='meta'|CUDA driver|No CUDA|"
    r"no attribute '(get_device_properties|current_stream)'|Can't load|OSError|ImportError|offline|cannot import name",
    re.IGNORECASE,
)
# an error raised in one of these files is about attention; any other is about the checkpoint or its weights
_ATTENTION = (
    "v1/attention/", "v1/kv_cache_interface.py", "platforms/", "config/", "engine/", "model_executor/layers/attention/",
    "model_executor/models/config.py", "utils/torch_utils.py",
)  # fmt: skip
_CHECKPOINT = re.compile(r"quantization method|has no attribute|failed to be inspected", re.IGNORECASE)
# errors that say that the release does not serve models of this class
_ARCHITECTURE = re.compile(
    r"Model architectures? .+? (was|is not|are not) supported|Transformers attention interface|"
    r"Cannot resolve attention scaling expression|"
    r"Argument \w+ not found in the forward method of <class 'transformers"
)
# where the Transformers backend looks up the experts of a class, and asserts that it finds what it needs
_EXPERTS = "model_executor/models/transformers/moe.py#recursive_replace"
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


class Recorder:
    """vLLM on one machine."""

    def __init__(self, tree: Path, arch: str, switch: str, simulated: Iterable[str] = ()) -> None:
        os.environ |= {
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "GLOO_SOCKET_IFNAME": "lo", "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CACHE_ROOT": tempfile.mkdtemp(),
        }  # fmt: skip
        vllm_machine.install(simulated)
        vllm_machine.boot(tree, arch, switch)
        vllm_machine.without_kernels()
        import torch
        import vllm.model_executor.models.registry as registry
        from vllm.v1.attention import selector

        if not os.environ.get("RECORD_LOG"):
            logging.disable(logging.CRITICAL)
        major, minor = vllm_machine.CAPABILITIES.get(arch, (9, 4))
        cuda: Any = torch.cuda
        cuda.get_device_properties = lambda *a: types.SimpleNamespace(
            name="simulated", total_memory=80 << 30, multi_processor_count=132, gcnArchName=f"{arch}:sramecc+:xnack-",
            major=major, minor=minor, warp_size=32, shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
        )  # fmt: skip
        cuda.get_device_capability = lambda *a: (major, minor)
        cuda.current_device = lambda: 0
        platform = vllm_machine.current()
        platform.device_count = lambda: 64
        base = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
        platform.get_device_communicator_cls = lambda: base
        # vLLM makes streams and events here, and never uses them
        for name in ("Stream", "Event"):
            setattr(cuda, name, type(name, (), {"__init__": lambda self, *a, **k: None}))
        torch.accelerator.current_device_index = lambda: 0
        torch.accelerator.empty_cache = lambda: None
        registry._run_in_subprocess = lambda run: run()
        self.selector = selector
        self.ranks = 0
        # what the imports made lives as long as the process, and each row collects what it leaves
        gc.freeze()

    def row(self, given: dict[str, Any], model: Path, draft: Path | None) -> dict[str, Any]:
        """Start vLLM with one row's arguments. Returns the row's `out`."""
        out: dict[str, Any] = {}
        stage = "config"
        environment = {"VLLM_BATCH_INVARIANT": "1" if given.get("batch_invariant") else "0"}
        try:
            with mock.patch.dict(os.environ, environment), self.cuda(given.get("cuda_major")):
                config = self.config(given, model, draft, out)
                stage = "device"
                # a GPU's worker checks this first
                if vllm_machine.current().is_cuda_alike():
                    vllm_machine.current().check_if_supports_dtype(config.model_config.dtype)
                stage = "layers"
                self.layers(config, out)
                stage = "block_size"
                self.block_size(config, out)
                if given.get("states"):
                    stage = "states"
                    self.states(config, out)
        # vLLM may raise any exception
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            text = _text(error)
            frames = traceback.extract_tb(error.__traceback__)
            here = [f for f in frames if "/vllm/" in f.filename]
            by = f"{here[-1].filename.rpartition('/vllm/')[2]}#{here[-1].name}" if here else ""
            out["error"] = {"stage": stage, "about": _about(error, text, by), "text": text[:300], "by": by}
        finally:
            gc.collect()
        return out

    def cuda(self, major: int | None) -> Any:
        """PyTorch as it is built for a major version of CUDA; None: as it is here, for none."""
        if major is None:
            return nullcontext()
        return mock.patch.object(vllm_machine.current(), "get_cuda_runtime_major", create=True, return_value=major)

    def config(self, given: dict[str, Any], model: Path, draft: Path | None, out: dict[str, Any]) -> Any:
        """The configuration of the engine."""
        from vllm.engine.arg_utils import EngineArgs

        # vLLM may write into what it is given
        more = {name: copy.deepcopy(given[name]) for name in ARGUMENTS if given.get(name) is not None}
        if "attention_config" in more:
            from vllm.config import AttentionConfig

            more["attention_config"] = AttentionConfig(**more["attention_config"])
        if draft is not None:
            more["speculative_config"] = more["speculative_config"] | {"model": str(draft)}
        args = EngineArgs(model=str(model), skip_tokenizer_init=True, load_format="dummy", **more)
        config = args.create_engine_config()
        attention = config.attention_config
        out |= {
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "kv_cache_dtype": config.cache_config.cache_dtype,
            "backend": attention.backend and attention.backend.name,
            "flash_attn_version": attention.flash_attn_version,
            "use_non_causal": getattr(attention, "use_non_causal", None),
            "runner": config.model_config.runner_type,
        }
        return config

    def layers(self, config: Any, out: dict[str, Any]) -> None:
        """Build the model, and record the backend of each layer."""
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        # what vLLM remembers of a process is of one run there
        self.selector._cached_get_attn_backend.cache_clear()
        self.selector._cached_get_mamba_attn_backend.cache_clear()
        with set_current_vllm_config(config):
            self.ranks = vllm_machine.join(config.parallel_config.world_size, self.ranks)
            with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"), vllm_layers.on_meta():
                model = initialize_model(vllm_config=config)
                targets = set(config.compilation_config.static_forward_context)
                if runner := vllm_drafts.build_draft(config, model):
                    out["draft_runner"] = runner
        from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention

        static = dict(config.compilation_config.static_forward_context)
        # the layers of towers have no cache, so vLLM's list of layers lacks them
        towers = {
            name: m for name, m in model.named_modules() if isinstance(m, MMEncoderAttention) and name not in static
        }
        groups: dict[str, Any] = {}
        for name, layer in (static | towers).items():
            if not isinstance(backend := getattr(layer, "attn_backend", None), type | enum.Enum):
                continue
            about = vllm_layers.layer_of(layer, backend)
            if name in static and name not in targets:
                about["draft"] = True
            kind = _INDEX.sub("*", f".{name}.")[1:-1]
            key = f"{kind} {json.dumps(about, sort_keys=True)}"
            group = groups.setdefault(key, {"name": kind, "layers": []} | about)
            group["layers"].extend(int(i) for i in _INDEX.findall(f".{name}.")[:1])
            if name in static and "token_bytes" not in group and hasattr(layer, "get_kv_cache_spec"):
                spec = layer.get_kv_cache_spec(config)
                # a backend whose kernels pack the cache changes the spec
                if spec is not None and isinstance(backend, type) and hasattr(backend, "customize_spec"):
                    spec = backend.customize_spec(spec)
                group["token_bytes"] = spec and spec.page_size_bytes / spec.block_size
        out["layers"] = list(groups.values())

    def block_size(self, config: Any, out: dict[str, Any]) -> None:
        """Choose the block size, as the executor does once the model is built."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(config):
            vllm_machine.current().update_block_size_for_backend(config)
        out["block_size"] = config.cache_config.block_size

    def states(self, config: Any, out: dict[str, Any]) -> None:
        """Record the states of the layers without softmax attention, once the block size is chosen."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.mamba.abstract import MambaBase

        cache = config.cache_config
        kinds: dict[str, dict[str, Any]] = {}
        for layer in config.compilation_config.static_forward_context.values():
            if not isinstance(layer, MambaBase):
                continue
            with set_current_vllm_config(config):
                spec: Any = layer.get_kv_cache_spec(config)
            about = {
                "kind": type(layer).__name__,
                "shapes": [list(shape) for shape in spec.shapes],
                "dtypes": [str(dtype).removeprefix("torch.") for dtype in spec.dtypes],
                "page_bytes": spec.page_size_bytes,
                "pages": spec.max_memory_usage_bytes(config) // spec.page_size_bytes,
            }
            kinds.setdefault(json.dumps(about), about | {"layers": 0})["layers"] += 1
        out["states"] = {
            "prefix_caching": bool(cache.enable_prefix_caching),
            "mode": cache.mamba_cache_mode,
            "kinds": list(kinds.values()),
        }


def _about(error: BaseException, text: str, by: str) -> str:
    """What an error is about: "attention", "checkpoint", "architecture" for a class of models that is not served, or
    "simulation" if the simulated machine causes it.
    """
    if _ARCHITECTURE.search(text) or (by == _EXPERTS and isinstance(error, AssertionError)):
        return "architecture"
    if _SIMULATION.search(f"{type(error).__name__}: {text}"):
        return "simulation"
    return "attention" if by.startswith(_ATTENTION) and not _CHECKPOINT.search(text) else "checkpoint"


def _text(error: BaseException) -> str:
    """The message of an error, without the text that pydantic puts around it."""
    text = str(error)
    found = re.search(r"(?:Value|Assertion) error, (.*?)(?: \[type=|$)", text, re.DOTALL)
    return (found.group(1) if found else text).strip()


def read(lines: Iterable[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The models and the rows of a file."""
    models, rows = {}, []
    for line in lines:
        data = json.loads(line)
        if "config" in data:
            models[data["model"]] = data["config"]
        elif "in" in data:
            rows.append(data["in"])
    return models, rows


def _machine(row: dict[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    return row["arch"], row.get("aiter", ""), tuple(row.get("simulated", ()))


def _child(tree: Path, asked: Path) -> None:
    """Record the rows of one machine, and print a line of JSON for each."""
    models, rows = read(asked.read_text().splitlines())
    # standard output is for answers, so all that vLLM and its packages print goes to standard error
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    recorder = Recorder(tree, *_machine(rows[0]))
    folder = Path(tempfile.mkdtemp())
    for name, config in models.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    for row in rows:
        draft = row.get("draft") and folder / row["draft"]
        answers.write(json.dumps({"in": row, "out": recorder.row(row, folder / row["model"], draft)}) + "\n")
        answers.flush()


def record(tree: Path, models: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows with their `in` and `out`, machine by machine. Each machine has a process of its own."""
    for _, group in groupby(sorted(rows, key=_machine), _machine):
        part = list(group)
        used = {name: models[name] for row in part for name in (row["model"], row.get("draft")) if name}
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            for name, config in used.items():
                file.write(json.dumps({"model": name, "config": config}) + "\n")
            for row in part:
                file.write(json.dumps({"in": row}) + "\n")
            file.flush()
            command = [sys.executable, __file__, "--tree", str(tree), "--child", file.name]
            done = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if not os.environ.get("RECORD_LOG") else None,
                text=True,
            )
            assert done.stdout is not None
            for line in done.stdout:
                yield json.loads(line)
            if done.wait():
                sys.exit(
                    f"{_machine(part[0])}: the recorder ended with {done.returncode}; RECORD_LOG=1 shows what it prints"
                )


def _open(path: Path, mode: str) -> Any:
    return gzip.open(path, mode + "t") if path.suffix == ".gz" else path.open(mode)


def check(tree: Path, recorded: Path) -> int:
    """Record the rows of a file anew, and print each that differs. Returns the number of differences."""
    with _open(recorded, "r") as file:
        lines = [json.loads(line) for line in file]
    models = {line["model"]: line["config"] for line in lines if "config" in line}
    before = {json.dumps(line["in"], sort_keys=True): line["out"] for line in lines if "out" in line}
    differ = 0
    for row in record(tree, models, [json.loads(key) for key in before]):
        was = before[json.dumps(row["in"], sort_keys=True)]
        if was != row["out"]:
            differ += 1
            changed = {k: (was.get(k), row["out"].get(k)) for k in was | row["out"] if was.get(k) != row["out"].get(k)}
            print(json.dumps(row["in"]), json.dumps(changed), flush=True)
    print(f"{len(before) - differ} of {len(before)} rows are as they were recorded")
    return differ


def main() -> None:
    """Record the rows of a file, or check a recorded file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True, help="a directory that holds vllm/")
    parser.add_argument("--asked", type=Path, help="models and rows, as JSON lines; may be a recorded file")
    parser.add_argument("--out", type=Path, help="where the decisions go; - or nothing: standard output")
    parser.add_argument("--check", type=Path, help="a recorded file: record its rows anew, and compare")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not (given.tree / "vllm" / "engine" / "arg_utils.py").is_file():
        parser.error(f"{given.tree} holds no vllm/engine/arg_utils.py; unpack a wheel there, or name a working tree")
    if given.child:
        _child(given.tree, given.child)
        return
    if given.check:
        sys.exit(1 if check(given.tree, given.check) else 0)
    if given.asked is None:
        parser.error("name the rows to record by --asked, or those to record anew by --check")
    with _open(given.asked, "r") as file:
        models, rows = read(file)
    with _open(given.out, "w") if given.out else nullcontext(sys.stdout) as file:
        file.write(
            json.dumps(
                {"recorded": {"engine": "vllm", "by": f"tools/record/{Path(__file__).name}", "stubbed": STUBBED}}
            )
            + "\n"
        )
        for name, config in models.items():
            file.write(json.dumps({"model": name, "config": config}) + "\n")
        for row in record(given.tree, models, rows):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
