"""Records the decisions of vLLM's attention selector: its own, unedited code runs on a processor, as on a GPU.

    python tools/record/vllm_selector.py --source vllm-0.32.0-....whl --rows asked.jsonl > decisions.jsonl

A row of `asked.jsonl` is the `in` of a decision in tests/data/vllm. Its answer is a line with `in` and `out`. A row
with a KV dtype, a backend or a feature that the release does not know has no answer. Neither has a row on which the
release's code fails. Standard error has the number of these rows.
The interpreter needs torch and the packages of tests/integrations/vllm/requirements.txt. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import vllm_machine

# the symbols that the recorder uses; the error for a release that lacks one has its name
SYMBOLS = (
    "vllm.config:VllmConfig", "vllm.config:AttentionConfig", "vllm.config:set_current_vllm_config",
    "vllm.config.cache:CacheDType",
    "vllm.platforms.interface:DeviceCapability", "vllm.platforms.interface:Platform.get_attn_backend_cls",
    "vllm.v1.attention.backend:AttentionBackend.validate_configuration",
    "vllm.v1.attention.backends.registry:AttentionBackendEnum", "vllm.v1.attention.selector:AttentionSelectorConfig",
)  # fmt: skip
STUBBED = (*vllm_machine.STUBBED, "the model's config: there is only what the attention backends read")
_FEATURES = ("has_", "use_")
# features that `situation` sets in the configuration; they need no field in the selector's request
_OF_THE_RUN = ("use_dcp", "use_trtllm_attention")


class GoneError(Exception):
    """A symbol of the engine that the recorder needs is missing in this release."""


def symbol(path: str) -> Any:
    """The object of a `module:name` of the engine. Raises `GoneError` if the release has no such object."""
    module, _, names = path.partition(":")
    try:
        found = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise GoneError(f"this release has no {module}:{names} ({error})") from None
    return found


class Selector:
    """The selector of one release on one simulated GPU."""

    def __init__(self, tree: Path, arch: str, with_aiter: str | None) -> None:
        self.platform = vllm_machine.boot(tree, arch, with_aiter or "")
        for path in SYMBOLS:
            symbol(path)
        self.backends = symbol("vllm.v1.attention.backends.registry:AttentionBackendEnum")
        self.asked = symbol("vllm.v1.attention.selector:AttentionSelectorConfig")
        self.kv_dtypes = importlib.import_module("typing").get_args(symbol("vllm.config.cache:CacheDType"))
        self.amd = arch.startswith("gfx")

    def unknown(self, row: Mapping[str, Any]) -> str:
        """The first KV dtype, backend or feature of a row that this release does not know, else ""."""
        for field in ("kv_cache_dtype", "run_kv_cache_dtype"):
            if row.get(field) is not None and row[field] not in self.kv_dtypes:
                return f"{field} {row[field]}"
        if row.get("requested_backend") and row["requested_backend"] not in self.backends.__members__:
            return f"backend {row['requested_backend']}"
        known = (*self.asked._fields, *_OF_THE_RUN)
        extra = [n for n, v in row.items() if n.startswith(_FEATURES) and v and n not in known]
        return f"feature {extra[0]}" if extra else ""

    def decide(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The chosen backend or the error, and each candidate of the order with the reasons against it."""
        requested = self.backends[row["requested_backend"]] if row.get("requested_backend") else None
        out: dict[str, Any] = {"chosen": None, "error": None}
        with self.situation(row) as asked:
            if requested is not None:
                out["requested_reasons"] = self._reasons(requested, asked)
            try:
                path = self.platform.get_attn_backend_cls(
                    requested, attn_selector_config=asked, num_heads=row["num_heads"]
                )
                out["chosen"] = self._name(path)
            except ValueError as error:
                out["error"] = {"type": "ValueError", "message": str(error).partition(" with ")[0][:300]}
            out["candidates"] = self._candidates(asked, row["num_heads"])
        return out

    def _candidates(self, asked: Any, num_heads: int | None) -> list[dict[str, Any]]:
        capability = self.platform.get_device_capability()
        valid, invalid = self.platform.get_valid_backends(capability, asked, num_heads)
        by_place: dict[int, tuple[Any, list[str]]] = {
            getattr(v, "priority", v[-1]): (getattr(v, "backend", v[0]), []) for v in valid
        }
        left = [(b, r[1] if isinstance(r, tuple) else r) for b, r in invalid.items()]
        ordered = [by_place[i] if i in by_place else left.pop(0) for i in range(len(valid) + len(invalid))]
        return [{"backend": backend.name, "reasons": reasons} for backend, reasons in ordered]

    def _reasons(self, backend: Any, asked: Any) -> list[str]:
        capability = self.platform.get_device_capability()
        try:
            reasons: list[str] = backend.get_class().validate_configuration(
                device_capability=capability, **asked._asdict()
            )
        except (ImportError, OSError, ValueError) as error:
            return [f"IMPORT {type(error).__name__}: {error}"]
        return reasons

    def _name(self, path: str) -> str:
        return next(str(member.name) for member in self.backends if member.value == path)

    @contextmanager
    def situation(self, row: Mapping[str, Any]) -> Iterator[Any]:
        """Make a row's run vLLM's current configuration. Yields the selector's request for the row."""
        torch, config_module = importlib.import_module("torch"), importlib.import_module("vllm.config")
        layer = {name: row[name] for name in self.asked._fields if name in row}
        asked = self.asked(**layer | {"dtype": getattr(torch, row["dtype"])})
        config = config_module.VllmConfig()
        config.cache_config.cache_dtype = row.get("run_kv_cache_dtype") or row["kv_cache_dtype"] or "auto"
        config.parallel_config.decode_context_parallel_size = 2 if row.get("use_dcp") else 1
        config.parallel_config.prefill_context_parallel_size = 2 if row.get("use_pcp") else 1
        named = ("flash_attn_version", "use_trtllm_attention")
        config.attention_config = config_module.AttentionConfig(**{n: row[n] for n in named if row.get(n) is not None})
        config.model_config = _model_config(row) if row.get("model") else None
        invariant = "1" if row.get("use_batch_invariant") else "0"
        patched = mock.patch.dict(os.environ, VLLM_BATCH_INVARIANT=invariant)
        if not self.amd:
            vllm_machine.exchange(self.platform, row["arch"])
        with config_module.set_current_vllm_config(config), patched:
            yield asked


def _model_config(row: Mapping[str, Any]) -> SimpleNamespace:
    """A stand-in for vLLM's ModelConfig, with the attributes that its attention backends use."""
    model = row["model"]
    return SimpleNamespace(
        get_num_attention_heads=lambda ranks: model["num_heads"],
        get_num_kv_heads=lambda ranks: model["num_kv_heads"],
        get_head_size=lambda: row["head_size"],
        hf_text_config=SimpleNamespace(**model["hf"]),
        hf_config=SimpleNamespace(**model["hf"]),
        attn_type=model.get("attn_type", "decoder"),
        is_diffusion=False,
        is_hybrid=False,
        is_mm_prefix_lm=row.get("use_mm_prefix"),
        rswa_window=128 if row.get("use_rswa") else None,
    )


def unpacked(source: Path, folder: Path) -> Path:
    """The directory to put on the path for a wheel or a working tree of vLLM."""
    if source.suffix == ".whl" and zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if not name.endswith(".so")])
        source = folder
    if (source / "vllm" / "platforms").is_dir():
        return source
    raise SystemExit(f"{source}: no vLLM: neither a wheel nor a directory with vllm/platforms")


def machine(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """The key of the rows that share a process: all NVIDIA GPUs do, and each AMD GPU with its packages."""
    return row["platform"], "" if row["platform"] == "cuda" else row["arch"], row.get("aiter") or ""


def record_here(tree: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Record the rows of one machine, which this process simulates from now on."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    try:
        selector = Selector(tree, rows[0]["arch"], rows[0].get("aiter"))
    except GoneError as error:
        raise SystemExit(f"{tree}: {error}") from None
    left_out, decided = Counter[str](), 0
    for row in rows:
        if unknown := selector.unknown(row):
            left_out[f"this release has no {unknown}"] += 1
            continue
        # vLLM's code may fail on a configuration that no model has
        try:
            decision = selector.decide(row)
        except Exception as error:
            left_out[f"its code fails: {type(error).__name__}: {error}"] += 1
            continue
        print(json.dumps({"in": row, "out": decision}), file=out)
        decided += 1
    place = " ".join(filter(None, machine(rows[0])))
    print(f"{place}: simulated: {'; '.join(STUBBED)}", file=sys.stderr)
    for what, count in left_out.items():
        print(f"{place}: left out {count} rows: {what}", file=sys.stderr)
    if left_out and not decided:
        raise SystemExit(f"{place}: no row is decided: {left_out.most_common(1)[0][0]}")


def main() -> None:
    """Record a file of rows, one process for each machine."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", type=Path, required=True, help="a wheel of vLLM, or a working tree")
    parser.add_argument("--rows", type=Path, required=True, help="what was asked: one JSON object a line")
    parser.add_argument("--here", action="store_true", help="all rows are of one machine: record them in this process")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.rows.read_text().splitlines() if line]
    if options.here:
        record_here(options.source, rows)
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
