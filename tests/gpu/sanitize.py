"""compute-sanitizer over a part of the GPU's tests: memory accesses, races in shared memory, uninitialised reads.

python tests/gpu/sanitize.py                               # every tool; 1 where a kernel has an error
python tests/gpu/sanitize.py --record registry/evidence    # the same, kept with the evidence of this device

Each tool must first find the fault that tests/gpu/planted.py has for it. PyTorch's caching allocator is off, so that
every tensor is an allocation of its own; a graph cannot be captured so, and the tests that capture one are left out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
sys.path[:0] = [str(ROOT), str(HERE.parents[1])]

TOOLS = ("memcheck", "racecheck", "initcheck")
# attnreg's kernels; PyTorch's have errors of their own making, such as copies of memory that nothing was written to
KERNELS = (
    "_attention_kernel", "_merge_splits_kernel", "_merge_shares_kernel", "_write_kv_kernel", "_latent_attention_kernel",
    "_write_scaled_kernel", "_places_kernel", "_store_kernel", "_rotate_kernel", "prefill_kernel", "_place_kernel",
    "_widen_kernel", "decode_kernel", "packed_decode_kernel", "latent_attention_kernel",
)  # fmt: skip
# their warps meet at mbarriers, which racecheck does not know, so that it takes what one leaves for another for a race;
# and the warpgroups of prefill_kernel all clear the rows past the last key, with the same values
AT_MBARRIERS = ("prefill_kernel", "latent_attention_kernel")
# a process each, of a file's tests. Every path of the kernels: decode, splits, shared keys, prompts, packed keys, each
# layout, 8-bit and packed caches, latents, masks, wide heads
SELECTION = (
    ("test_triton_attn", "test_head_sizes[64-True-auto]", "test_head_sizes[80-False-fp8_e4m3]",
     "test_head_sizes[256-True-fp8_e5m2]"),
    ("test_triton_attn", "test_everything_at_once[100-dtype1]", "test_head_sizes[512-True-auto]"),
    ("test_triton_attn", "test_blocks[NHD-16]", "test_blocks[HND-48]", "test_blocks[SPLIT-256]",
     "test_everything_at_once[None-dtype0]"),
    ("test_triton_attn", "test_the_layout_of_amds_paged_attention[128-True-auto]",
     "test_the_layout_of_amds_paged_attention[96-False-fp8_e4m3]"),
    ("test_triton_attn", "test_packed[True-heads0-128]", "test_packed[False-heads2-64]",
     "test_packed[True-heads3-80]"),
    ("test_triton_attn", "test_batch_invariance_is_bitwise[fp8]", "test_two_runs_are_bitwise_the_same[features0]"),
    ("test_triton_attn", "test_values_of_another_size[sizes0-heads1-auto]",
     "test_values_of_another_size[sizes1-heads0-fp8_e4m3]"),
    ("test_hopper_attn", "test_head_sizes[128-dtype1-paged-True]", "test_head_sizes[80-dtype0-packed-False]",
     "test_windows[paged-40-True]"),
    ("test_hopper_attn", "test_values_narrower_than_keys[sizes0-packed-True]", "test_blocks[HND-48]",
     "test_head_sizes[256-dtype1-paged-True]"),
    ("test_hopper_attn", "test_caches_of_8_bits[sizes3-dtype1-fp8]", "test_caches_of_8_bits[sizes0-dtype0-fp8_e5m2]",
     "test_rows_without_keys_and_more_queries_than_keys"),
    ("test_hopper_decode", "test_head_sizes[3 splits-128-dtype1-fp8]", "test_head_sizes[in a graph-64-dtype0-fp8_e5m2]",
     "test_windows[chosen-40]", "test_several_queries[in a graph-True]"),
    ("test_hopper_turboquant", "test_presets[in a graph-128-dtype1-turboquant_4bit_nc]",
     "test_presets[3 splits-64-dtype0-turboquant_k3v4_nc]", "test_presets[whole-128-dtype1-turboquant_3bit_ub]",
     "test_several_queries[chosen-turboquant_k8v4-False]", "test_padded_heads[chosen-turboquant_4bit_ls-96]"),
    ("test_hopper_mla", "test_any_batch[called-heads 128-True]",
     "test_any_batch[in a graph-heads 128, kv_dtype fp8-True]",
     "test_any_batch[called-heads 24, kv_dtype fp8_ds_mla, block_size 16, kv_layout HND-False]"),
    ("test_hopper_mla", "test_any_batch[called-heads 33, topk 300, block_size 24, dtype torch.float16-True]",
     "test_any_batch[called-heads 64, topk 129, kv_dtype fp8_ds_mla-True]",
     "test_any_batch[in a graph-heads 20, block_size 48, dtype torch.float16-False]"),
    ("test_mla", "test_splits_give_what_one_program_gives[fp8]", "test_programs_share_keys_out[one is long-auto]"),
    ("test_turboquant", "test_every_preset_is_exact[mixed-64-bfloat16-turboquant_4bit_nc]",
     "test_slots_past_the_cache_are_skipped_and_rows_without_numbers_are_marked[turboquant_3bit_ub]"),
)  # fmt: skip
FOUND = 99


def find_sanitizer() -> str | None:
    """The sanitizer of the CUDA toolkit, or of the wheel that has it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [f"{home}/bin/compute-sanitizer"] if home else []
    places += sorted(glob("/usr/local/cuda*/bin/compute-sanitizer"), reverse=True)
    wheels = [d for d in importlib.metadata.distributions() if (d.name or "").startswith("nvidia-cuda-sanitizer")]
    places += [str(d.locate_file(f)) for d in wheels for f in d.files or () if f.name == "compute-sanitizer"]
    return shutil.which("compute-sanitizer") or next((p for p in places if os.access(p, os.X_OK)), None)


def errors_of(output: str) -> Counter[str]:
    """Kernel -> errors that a tool reported, from its output; `other` are those of kernels that are not attnreg's."""
    found: Counter[str] = Counter()
    for kernel in re.findall(
        r"^=+ +(?:at|and \w+ access at|.* between \w+ access at) (.+?)\+0x[0-9a-f]+", output, re.MULTILINE
    ):
        found[kernel if kernel in KERNELS else "other"] += 1
    return found


def seen_by(tool: str) -> list[str]:
    """The kernels that a tool can judge."""
    return [kernel for kernel in KERNELS if tool != "racecheck" or kernel not in AT_MBARRIERS]


class Sanitizer:
    """One run of the tools on this machine."""

    def __init__(self, path: str, patience: float, jobs: int) -> None:
        self.path, self.patience, self.jobs = path, patience, jobs
        self.environment = os.environ | {
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        }

    @property
    def version(self) -> str:
        """The sanitizer's version."""
        said = subprocess.run([self.path, "--version"], capture_output=True, text=True, check=False).stdout
        found = re.search(r"Version (\S+)", said)
        return found[1] if found else "unknown"

    def run(self, tool: str, command: list[str]) -> tuple[int, str]:
        """The exit status of a program under a tool, and what it and the tool printed; -1 after too long."""
        options = ["--tool", tool, "--error-exitcode", str(FOUND), "--show-backtrace", "no", "--print-limit", "2000"]
        # initcheck must see what other kernels write
        filters = []
        if tool == "racecheck":
            filters = [x for kernel in seen_by(tool) for x in ("--kernel-name", f"kne={kernel}")]
        process = subprocess.Popen(
            [self.path, *options, *filters, *command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment, cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=self.patience)
        except subprocess.TimeoutExpired:
            # the tool and the program under it
            os.killpg(process.pid, signal.SIGKILL)
            return -1, process.communicate()[0]
        return process.returncode, said

    def finds_what_is_planted(self, tool: str) -> bool:
        """Whether a tool finds the fault that is there for it."""
        options = ["--tool", tool, "--error-exitcode", str(FOUND), "--show-backtrace", "no"]
        planted = [sys.executable, str(HERE.with_name("planted.py")), tool]
        done = subprocess.run([self.path, *options, *planted], capture_output=True, env=self.environment, check=False)
        return done.returncode == FOUND

    def result(self, tool: str, selection: tuple[tuple[str, ...], ...]) -> dict[str, Any]:
        """What a tool says of the tests; ``problems`` are those that keep it from being clean."""
        pytest = [sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "-q", "--tb=short"]
        pytest += ["-p", "no:cacheprovider", "-p", "support.layers.sanitized"]
        begun = time.monotonic()
        with ThreadPoolExecutor(self.jobs) as pool:
            runs = [
                pool.submit(self.run, tool, [*pytest, *(f"tests/gpu/{file}.py::{test}" for test in tests)])
                for file, *tests in selection
            ]
            outcomes = [one.result() for one in runs]
        errors, kernels, tests, problems = Counter[str](), Counter[str](), 0, []
        for status, said in outcomes:
            errors += errors_of(said)
            passed = sum(map(int, re.findall(r"(\d+) passed", said)))
            tests += passed
            for line in re.findall(r"^compiled (.*)$", said, re.MULTILINE):
                kernels += Counter({kernel: n for kernel, n in json.loads(line).items() if kernel in seen_by(tool)})
            if not passed and status != -1:
                problems.append(f"{tool} ran no test that passed: {said[-300:]}")
            if status == -1:
                problems.append(f"{tool} took longer than {self.patience:.0f} s")
            elif "failed" in said or "error" in said.lower().rpartition("passed")[0] or status not in (0, FOUND):
                problems += [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))][:5]
                problems += [] if status in (0, FOUND) else [f"{tool} ended with status {status}: {said[-300:]}"]
            elif status == FOUND and not errors_of(said):
                problems.append(f"{tool} reports something that is no kernel's: {said[-300:]}")
        others = errors.pop("other", 0)
        problems += [f"{tool}: {count} errors in {kernel}" for kernel, count in errors.items()]
        return {
            "tests": tests, "kernels": dict(sorted(kernels.items())), "errors": sum(errors.values()),
            "errors_of_others": others, "seconds": round(time.monotonic() - begun), "problems": problems,
            "log": "\n".join(said for _, said in outcomes),
        }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=lambda text: text.split(","), default=list(TOOLS))
    parser.add_argument("--jobs", type=int, default=len(SELECTION), help="processes under the sanitizer at once")
    parser.add_argument("--patience", type=float, default=400.0, help="seconds that a process of a tool may take")
    parser.add_argument("--record", type=Path, metavar="FILE|DIR", help="where the evidence of this device is kept")
    parser.add_argument("--commit", help="the commit that runs, where git cannot say it")
    parser.add_argument("--logs", type=Path, help="a directory for what the tools print")
    options = parser.parse_args(arguments)
    path = find_sanitizer()
    if path is None:
        print("compute-sanitizer is not on this machine: it comes with the CUDA toolkit, or by")
        print("  pip install nvidia-cuda-sanitizer-api")
        return 2
    sanitizer = Sanitizer(path, options.patience, options.jobs)
    blind = [tool for tool in options.tools if not sanitizer.finds_what_is_planted(tool)]
    if blind:
        print(f"{', '.join(blind)}: does not find the fault of tests/gpu/planted.py here, so it would find no other")
        return 2
    clean = True
    for tool in options.tools:
        result = sanitizer.result(tool, SELECTION)
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / f"{tool}.log").write_text(result["log"])
        del result["log"]
        problems = result.pop("problems")
        print(f"{tool}: {json.dumps(result)}", *problems, sep="\n  ", flush=True)
        clean = clean and not problems
        if options.record is not None and not problems:
            import torch
            from support.suite.commits import commit

            from attnreg.conformance.evidence import save_run

            versions = {"compute-sanitizer": sanitizer.version}
            save_run(
                tool, {**result, "commit": options.commit or commit()}, options.record, torch.device("cuda"), versions
            )
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
