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
KERNELS = ("_attention_kernel", "_merge_splits_kernel", "_write_kv_kernel")
# every path of the kernels: decode, splits, prompts, packed keys, each layout, 8-bit caches, masks, wide heads
SELECTION = (
    "test_head_sizes[64-True-auto] test_head_sizes[80-False-fp8_e4m3] test_head_sizes[256-True-fp8_e5m2]",
    "test_everything_at_once[100-dtype1] test_head_sizes[512-True-auto]",
    "test_blocks[NHD-16] test_blocks[HND-48] test_blocks[SPLIT-256] test_everything_at_once[None-dtype0]",
    "test_the_layout_of_amds_paged_attention[128-True-auto] test_the_layout_of_amds_paged_attention[96-False-fp8_e4m3]",
    "test_packed[True-heads0-128] test_packed[False-heads2-64] test_packed[True-heads3-80]",
    "test_batch_invariance_is_bitwise[fp8] test_two_runs_are_bitwise_the_same[features0]",
    "test_values_of_another_size[sizes0-heads1-auto] test_values_of_another_size[sizes1-heads0-fp8_e4m3]",
)
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
        filters = [x for kernel in KERNELS for x in ("--kernel-name", f"kns={kernel}")] if tool == "racecheck" else []
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

    def result(self, tool: str, selection: tuple[str, ...]) -> dict[str, Any]:
        """What a tool says of the tests; ``problems`` are those that keep it from being clean."""
        pytest = [sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "-q", "--tb=short"]
        pytest += ["-p", "no:cacheprovider", "-p", "support.sanitized"]
        name = "tests/gpu/test_triton_attn.py::"
        begun = time.monotonic()
        with ThreadPoolExecutor(self.jobs) as pool:
            runs = [
                pool.submit(self.run, tool, [*pytest, *(name + test for test in tests.split())]) for tests in selection
            ]
            outcomes = [one.result() for one in runs]
        errors, kernels, tests, problems = Counter[str](), Counter[str](), 0, []
        for status, said in outcomes:
            errors += errors_of(said)
            passed = sum(map(int, re.findall(r"(\d+) passed", said)))
            tests += passed
            for line in re.findall(r"^compiled (.*)$", said, re.MULTILINE):
                kernels += Counter(json.loads(line))
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
            (options.logs / f"{tool}.log").write_text(result["log"])
        del result["log"]
        problems = result.pop("problems")
        print(f"{tool}: {json.dumps(result)}", *problems, sep="\n  ", flush=True)
        clean = clean and not problems
        if options.record is not None and not problems:
            import torch
            from support.commits import commit

            from attnreg.conformance.evidence import save_run

            versions = {"compute-sanitizer": sanitizer.version}
            save_run(
                tool, {**result, "commit": options.commit or commit()}, options.record, torch.device("cuda"), versions
            )
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
