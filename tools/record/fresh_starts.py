"""Draws fresh starts of whole runs, records what vLLM makes of each, and compares attnreg's plan with it.

    make record-vllm VLLM=0.33.0 ROWS=1000 SEED=1

With `--pairs` no start is drawn. The rows are the pairs of a well-known model with no draft, its own and two others, on
each machine, with the KV dtypes auto and fp8.

A start is a model or a variation of one, a machine, and options, among them drafts, ranks and named backends. The
models are those of the recorded rows. vLLM's own code then starts each row (vllm_runs.py). A step is skipped if its
file in `--work` is complete, so that a stopped recording goes on:

1. `asked.jsonl`: the models and the rows, drawn by `--seed`.
2. `recorded-*.jsonl`: what vLLM did, one file for each simulated machine.

Then the plan of each row is held against the recording. Standard output says how many are equal, different, not known,
and left out because vLLM stopped for a reason that is not about attention. `differences.jsonl` has the different ones.
Exit status: 0 if none is different, else 1.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import DATA  # type: ignore[import-not-found]
from support.models.whole_starts import compare  # type: ignore[import-not-found]

from attnreg import load_registry
from attnreg.compile.inputs.bundled import bundled_configs

sys.path.insert(0, str(Path(__file__).parent))

import vllm_config

HERE = Path(__file__).parent
Row = dict[str, Any]
Machine = tuple[str, str]
# machines: an architecture, and for AMD's GPUs whether aiter is on; the second is Intel's GPUs, and processors
MACHINES: tuple[Machine, ...] = (
    ("sm75", ""), ("sm80", ""), ("sm90", ""), ("sm100", ""), ("sm120", ""),
    ("gfx942", "off"), ("gfx950", "on"), ("gfx1201", "off"),
)  # fmt: skip
BESIDE: tuple[Machine, ...] = (
    ("xe2", ""), ("xe2", ""), ("xe_hpc", ""), ("x86_64", ""), ("x86_64_avx512", ""), ("x86_64_amx", ""), ("aarch64", "")
)  # fmt: skip
# backends that the layers of most models can have are named more often than the rest, by the architecture's beginning
_COMMON = {
    "sm": ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TRITON_MLA", "FLASHMLA", "FLASHINFER_MLA"),
    "gf": ("TRITON_ATTN", "ROCM_ATTN", "ROCM_AITER_UNIFIED_ATTN", "ROCM_AITER_FA", "TRITON_MLA", "ROCM_AITER_MLA"),
    "xe": (
        "FLASH_ATTN",
        "TRITON_ATTN",
        "FLEX_ATTENTION",
        "TRITON_MLA",
        "FLASH_ATTN_MLA",
        "XPU_MLA_SPARSE",
        "TURBOQUANT",
    ),
    "x8": ("CPU_ATTN", "CPU_MLA", "AMX_MLA", "TRITON_ATTN"),
    "aa": ("CPU_ATTN", "CPU_MLA", "TRITON_ATTN"),
}
# names that stand for no code of vLLM's
_NO_BACKEND = ("NO_ATTENTION", "CUSTOM", "TORCH_SDPA")
_HEAD_SIZES = (64, 72, 80, 96, 128, 160, 192, 256)
_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
# layers that are built of a model; the kinds of layers repeat after them
_BUILT = 8


class Pool:
    """The recorded models of all releases, and the drafts that rows gave them."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, Row]] = {}
        self.drafted: list[tuple[Row, Row | None, Row]] = []
        for file in sorted(p for p in DATA.glob("vllm/*.jsonl.gz") if p.name.startswith(("start-", "runs-"))):
            with gzip.open(file, "rt") as lines:
                models, rows = vllm_config.read(lines)
            for config in models.values():
                kinds = [config.get("model_type", ""), *(config.get("architectures") or ())]
                self.models.setdefault(" ".join(kinds), {})[json.dumps(config, sort_keys=True)] = config
            for row in rows:
                if drafting := row.get("speculative_config"):
                    draft = models[row["draft"]] if row.get("draft") else None
                    self.drafted.append((models[row["model"]], draft, drafting))
        self.small = [c for kind in ("llama LlamaForCausalLM", "qwen3 Qwen3ForCausalLM") for c in self.of(kind)]

    def of(self, kind: str) -> list[Row]:
        """The configs of a kind: a family with a class."""
        return list(self.models[kind].values())


def drawn(
    seed: int, count: int, release: str, machines: tuple[Machine, ...] = MACHINES
) -> tuple[dict[str, Row], list[Row]]:
    """The configs by name, and the rows that ask about them."""
    dice, pool = random.Random(seed), Pool()
    words = json.loads((DATA / "vllm/kv_dtypes.json").read_text())[release]
    names = json.loads((DATA / "vllm/names.json").read_text())
    backends = names[release] if release in names else names[max(names)]
    backends = [name for name in backends if name not in _NO_BACKEND]
    layout = load_registry(f"vllm-{release}").layout
    layouts = layout is not None and bool(layout.variable)
    models, rows = dict[str, Row](), list[Row]()
    # all families have a turn before one has its next
    kinds = list[str]()
    for number in range(count):
        kinds = kinds or dice.sample(sorted(pool.models), len(pool.models))
        arch, switch = dice.choice(machines)
        row: Row = {"arch": arch, "model": f"m{number}"} | ({"aiter": switch} if switch else {})
        if dice.random() < 0.35:
            target, draft, drafting = dice.choice(pool.drafted)
            row["speculative_config"] = _drafting(drafting, dice, words)
            # a draft that is no model of its own has the target's sizes
            own = drafting["method"] == "draft_model"
            target = varied(target, dice) if draft is None or own else target
            if draft is not None:
                if own and dice.random() < 0.5:
                    draft = varied(dice.choice(pool.small), dice)
                if drafting["method"].endswith("mtp"):
                    row["draft"] = row["model"]
                else:
                    draft, target = _alike(draft, target) if own else (draft, target)
                    row["draft"] = f"d{number}"
                    models[row["draft"]] = draft
        else:
            target = varied(dice.choice(pool.of(kinds.pop())), dice)
        models[row["model"]] = target
        row["built"] = _first_of_each(target)
        rows.append(row | dict(_options(arch, dice, words, backends, layouts)))
    return models, rows


# hybrid models beside the examples, and the drafts that belong to a model
_HYBRIDS = ("nemotron-h-8b", "falcon-h1-7b", "granite-4.0-h-tiny", "kimi-linear-48b", "lfm2-1.2b")
_OWN_DRAFTS = {"Llama-3.1-8B": ("eagle3", "eagle3-llama"), "Qwen3-8B": ("dflash", "Qwen3-8B-DFlash-b16")}


def pairs() -> tuple[dict[str, Row], list[Row]]:
    """The configs by name, and the rows of all pairs of a well-known model and a draft."""
    with gzip.open(DATA / "vllm/runs-0.33.0.jsonl.gz", "rt") as lines:
        known, _ = vllm_config.read(lines)
    models = {name: json.loads(Path(path).read_text()) for name, path in bundled_configs().items()}
    models |= {name: known[name] for name in _HYBRIDS}
    models |= {name: known[name] for name in ("eagle3-llama", "Qwen3-Next-80B-A3B-Instruct-mtp")}
    targets = [name for name in models if name not in ("eagle3-llama", "Qwen3-8B-DFlash-b16")]
    # what vLLM asks of a config and the examples leave out; any vocabulary serves, if it has the padding
    models["ModernBERT-base"] |= {"vocab_size": 50368}
    models["whisper-large-v3"] |= {"vocab_size": 51866}
    models["Qwen3-8B-DFlash-b16"] |= {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 2, 3]}}
    rows = []
    for name in targets:
        drafts: list[Row] = [{}]
        if text_of(models[name]).get("num_nextn_predict_layers"):
            drafts.append({"draft": name, "speculative_config": {"method": "mtp", "num_speculative_tokens": 1}})
        if name in _OWN_DRAFTS:
            method, draft = _OWN_DRAFTS[name]
            drafts.append({"draft": draft, "speculative_config": {"method": method, "num_speculative_tokens": 3}})
        for other in ("Llama-3.1-8B", "Qwen3-8B"):
            models[f"{other}-for-{name}"], models[name] = _alike(models[other], models[name])
            speculative = {"method": "draft_model", "num_speculative_tokens": 3}
            drafts.append({"draft": f"{other}-for-{name}", "speculative_config": speculative})
        rows += [
            {"arch": arch, "model": name, "built": _first_of_each(models[name])}
            | ({"aiter": switch} if switch else {})
            | draft
            | ({"kv_cache_dtype": kv_dtype} if kv_dtype else {})
            for arch, switch in MACHINES
            for draft in drafts
            for kv_dtype in ("", "fp8")
        ]
    return models, rows


def _options(
    arch: str, dice: random.Random, words: list[str], backends: list[str], layouts: bool
) -> Iterator[tuple[str, Any]]:
    """The options of one row."""
    if dice.random() < 0.5:
        likely = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16")
        yield "kv_cache_dtype", dice.choice(likely if dice.random() < 0.6 else words)
    if dice.random() < 0.2:
        yield "dtype", dice.choice(("float16", "bfloat16", "float32"))
    if dice.random() < 0.25:
        known = [name for name in _COMMON[arch[:2]] if name in backends]
        yield "attention_backend", dice.choice(known if dice.random() < 0.8 else backends)
    if dice.random() < 0.2:
        yield "block_size", dice.choice((8, 16, 32, 48, 64, 128, 256))
    if dice.random() < 0.3:
        yield "tensor_parallel_size", dice.choice((2, 4, 8))
    if dice.random() < 0.2:
        yield "compilation_config", {"cudagraph_mode": dice.choice(_MODES)}
    if layouts and dice.random() < 0.1:
        yield "kv_cache_layout", dice.choice(("NHD", "HND"))
    if dice.random() < 0.05:
        yield "attention_config", {"flash_attn_version": dice.choice((2, 3, 4))}
    if dice.random() < 0.04:
        yield "batch_invariant", True


def _drafting(drafting: Row, dice: random.Random, words: list[str]) -> Row:
    drafting = dict(drafting)
    if drafting["method"] not in ("dflash", "dspark"):
        drafting["num_speculative_tokens"] = dice.randint(1, 5)
    if dice.random() < 0.15:
        drafting["attention_backend"] = dice.choice(("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "ROCM_ATTN"))
    if dice.random() < 0.1:
        drafting["kv_cache_dtype"] = dice.choice(("auto", "fp8", "bfloat16"))
    return drafting


def text_of(config: Row) -> Row:
    """The part of a config that describes the layers of the language model."""
    return next((config[part] for part in ("text_config", "llm_config") if isinstance(config.get(part), dict)), config)


def varied(config: Row, dice: random.Random) -> Row:
    """A config with other heads, windows and dtypes, which fit together."""
    config = copy.deepcopy(config)
    if dice.random() < 0.3:
        return config
    text = text_of(config)
    heads, size, hidden = (text.get(name) for name in ("num_attention_heads", "head_dim", "hidden_size"))
    if isinstance(heads, int) and text.get("kv_lora_rank"):
        text["num_attention_heads"] = dice.choice((8, 16, 32, 64, 128))
        if text.get("num_key_value_heads") == heads:
            text["num_key_value_heads"] = text["num_attention_heads"]
    elif isinstance(heads, int) and isinstance(hidden, int) and "mrope" not in json.dumps(text):
        if isinstance(size, int):
            text["head_dim"], text["num_attention_heads"] = dice.choice(_HEAD_SIZES), dice.choice((8, 16, 32, 64))
        else:
            text["num_attention_heads"] = dice.choice([hidden // n for n in _HEAD_SIZES if hidden % n == 0] or [heads])
        shared = text.get("num_key_value_heads")
        if isinstance(shared, int):
            count = text["num_attention_heads"]
            divisors = [n for n in (1, 2, 4, 8, 16, 32) if count % n == 0 and n <= count]
            text["num_key_value_heads"] = count if shared == heads else dice.choice(divisors)
    if isinstance(text.get("sliding_window"), int):
        text["sliding_window"] = dice.choice((64, 128, 512, 1024, 4096))
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and dice.random() < 0.2:
        dice.shuffle(kinds)
    for at in (config, text):
        for name in ("dtype", "torch_dtype"):
            if name in at and dice.random() < 0.3:
                at[name] = dice.choice(("float16", "bfloat16", "float32"))
    return config


def _alike(draft: Row, target: Row) -> tuple[Row, Row]:
    """A draft and its target with one vocabulary, as the engine demands of a model that drafts."""
    if not text_of(target).get("vocab_size"):
        target = copy.deepcopy(target)
        text_of(target)["vocab_size"] = 32000
    return draft | {"vocab_size": text_of(target)["vocab_size"]}, target


def _first_of_each(config: Row) -> int:
    """The number of first layers that have a layer of each kind."""
    text = text_of(config)
    kinds = next((text[k] for k in ("layer_types", "layers_block_type") if isinstance(text.get(k), list)), None)
    kinds = kinds or list(text.get("hybrid_override_pattern") or "")
    if not kinds:
        # a period is at most this long where a config gives no list
        return 24 if any(name in text for name in ("attn_layer_period", "linear_attn_config")) else _BUILT
    return max(_BUILT, *(kinds.index(kind) + 1 for kind in set(kinds)))


def recorded(tree: Path, work: Path, models: dict[str, Row], rows: list[Row]) -> Iterator[Row]:
    """The rows with what vLLM did, from the files of the machines or from a recording of those that lack one."""
    for arch, switch in dict.fromkeys((*MACHINES, *BESIDE)):
        mine = [row for row in rows if (row["arch"], row.get("aiter", "")) == (arch, switch)]
        file = work / f"recorded-{arch}{switch and '-'}{switch}.jsonl"
        if mine and not file.exists():
            used = {name for row in mine for name in (row["model"], row.get("draft")) if name}
            asked, part = work / "machine.jsonl", work / "part.jsonl"
            _write(asked, [{"model": n, "config": models[n]} for n in used] + [{"in": row} for row in mine])
            words = [HERE / "vllm_runs.py", "--tree", tree, "--asked", asked, "--out", part]
            print(f"recording {len(mine)} starts on {arch} {switch}", flush=True)
            subprocess.run([sys.executable, *map(str, words)], check=True)
            part.rename(file)
        if mine:
            with file.open() as lines:
                yield from (line for line in map(json.loads, lines) if "out" in line)


def keep(file: Path, models: dict[str, Row], rows: list[Row]) -> None:
    """Write rows with their models as test data: without what no test reads."""
    names = {name: None for row in rows for name in (row["in"]["model"], row["in"].get("draft")) if name}
    head = {"recorded": {"engine": "vllm", "by": "tools/record/vllm_runs.py", "stubbed": vllm_config.STUBBED}}
    # what single layers state is compared by no plan
    plain = [{"in": row["in"], "out": {k: v for k, v in row["out"].items() if k != "groups"}} for row in rows]
    lines = [head, *({"model": name, "config": models[name]} for name in names), *plain]
    file.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode(), mtime=0))


def _write(file: Path, lines: list[Any]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def main() -> int:
    """Draw, record and compare. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", required=True, help="the release, such as 0.33.0")
    parser.add_argument("--tree", type=Path, required=True, help="the Python of its wheel, unpacked")
    parser.add_argument("--work", type=Path, required=True, help="the folder of the recording")
    parser.add_argument("--rows", type=int, default=1000, help="how many starts are drawn")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="by which they are drawn")
    parser.add_argument(
        "--beside", action="store_true", help="on Intel GPUs and processors, not on NVIDIA and AMD GPUs"
    )
    parser.add_argument("--pairs", action="store_true", help="all pairs of well-known models and drafts")
    parser.add_argument("--keep", type=Path, help="write the different rows and every twentieth there, or all pairs")
    parser.add_argument("--every", type=int, default=20, help="which rows are kept, by default every twentieth")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    asked = given.work / "asked.jsonl"
    if not asked.exists():
        models, rows = (
            pairs()
            if given.pairs
            else drawn(given.seed, given.rows, given.version, BESIDE if given.beside else MACHINES)
        )
        lines = [{"seed": given.seed}, *({"model": n, "config": c} for n, c in models.items())]
        _write(asked.with_suffix(".part"), [*lines, *({"in": row} for row in rows)])
        asked.with_suffix(".part").rename(asked)
    text = asked.read_text().splitlines()
    seed = json.loads(text[0])["seed"]
    models, rows = vllm_config.read(text[1:])
    counts, apart, kept = Counter[str](), list[Row](), list[Row]()
    with tempfile.TemporaryDirectory() as scratch:
        for row in recorded(given.tree, given.work, models, rows):
            verdict = compare(row, models, Path(scratch), given.version)
            counts[verdict.kind] += 1
            sampled = sum(counts.values()) % given.every == 0 and verdict.kind != "left out"
            kept += [row] if given.pairs or sampled or verdict.kind == "different" else []
            if verdict.kind != "equal":
                apart.append({"verdict": verdict.kind, "text": verdict.text} | row)
    _write(given.work / "apart.jsonl", apart)
    if given.keep:
        keep(given.keep, models, kept)
    print(f"vLLM {given.version}, seed {seed}: {len(rows)} starts")
    for kind in ("equal", "different", "not known", "left out"):
        print(f"  {kind}: {counts[kind]}")
    for row in [r for r in apart if r["verdict"] == "different"][:20]:
        print(f"  {json.dumps(row['in'])}: {row['text']}")
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
