"""Measure import, cold commands, loading and selection; each beside its budget.

Whole processes and first loads are medians over fresh processes, in turns, so that a slow minute hits all alike. Their
registries are kept in a directory of this run's own, as they are from a user's second command on.


python benchmarks/selection.py            print a table
python benchmarks/selection.py --record   write benchmarks/results/selection.json too
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import attnreg
from attnreg.analysis.check.findings import check
from attnreg.analysis.diff import diff
from attnreg.selection.selector import evaluate_anew

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "selection.json"
GPT_OSS = {"head_size": 64, "num_heads": 64, "num_kv_heads": 8, "features": frozenset({"sinks", "sliding_window"})}


# code -> the milliseconds that a registry's load takes in a process that loaded none before
LOAD = """
import sys, time
from attnreg import load_registry
start = time.perf_counter()
load_registry(sys.argv[1])
print((time.perf_counter() - start) * 1e3)
"""
ARCHS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121", "gfx90a", "gfx942", "gfx950", "gfx1100")


def process_ms(commands: dict[str, list[str]], runs: int = 15, *, printed: bool = False) -> dict[str, float]:
    """Median wall time of each process, or of what it prints, in milliseconds; they run in turns.

    Modules are compiled, as installers leave them. A command may end with the status 1, which says that it found much.
    """
    times: dict[str, list[float]] = {name: [] for name in commands}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for run in range(runs + 1):
        for name, command in commands.items():
            start = time.perf_counter()
            done = subprocess.run(command, capture_output=True, cwd=ROOT, env=env)
            took = (time.perf_counter() - start) * 1e3
            if done.returncode not in (0, 1) or b"Traceback" in done.stderr:
                raise RuntimeError(f"{' '.join(command)}: {done.stderr.decode()}")
            # the first compiles what is kept
            if run:
                times[name].append(float(done.stdout) if printed else took)
    return {name: statistics.median(found) for name, found in times.items()}


def call_us(function: Callable[[], Any], seconds: float = 0.3) -> float:
    """Median time of one call over short batches, in microseconds."""
    function()
    batch = max(1, int(2e-3 / max(_once(function), 1e-7)))
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(batch):
            function()
        times.append((time.perf_counter() - start) / batch * 1e6)
    return statistics.median(times)


def _once(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure() -> list[dict[str, Any]]:
    """Every figure with its unit and budget (None: no budget is set)."""
    started = _process_rows()
    registry = attnreg.load_registry("default")
    request = attnreg.AttentionRequest(**GPT_OSS)  # type: ignore[arg-type]
    rocm = attnreg.Platform(platform="rocm", arch="gfx942")
    cuda = attnreg.Platform(platform="cuda", arch="sm90")
    ten = _ten_candidates()
    attnreg.select(request, rocm, registry)
    return [
        *started,
        _row(
            "load_registry('default'), again", call_us(lambda: attnreg.load_registry("default"), 1.0) / 1e3, "ms", None
        ),
        _row(
            "select, uncached, 5 candidates, ROCm",
            call_us(lambda: evaluate_anew(request, rocm, registry, None)),
            "µs",
            None,
        ),
        _row(
            "select, uncached, 5 candidates, CUDA",
            call_us(lambda: evaluate_anew(request, cuda, registry, None)),
            "µs",
            None,
        ),
        _row(
            "select, uncached, 10 candidates",
            call_us(lambda: evaluate_anew(request, rocm, ten, None)),
            "µs",
            150,
        ),
        _row("select, cached", call_us(lambda: attnreg.select(request, rocm, registry)), "µs", 1),
        *_engine_rows(request),
        _row(
            "check of vllm-0.33.0 and its start",
            _once(lambda: check(attnreg.load_registry("vllm-0.33.0"))) * 1e3,
            "ms",
            10_000,
        ),
        _row("check, every invariant and all dead data", _once(lambda: check(registry)) * 1e3, "ms", 10_000),
    ]


def _process_rows() -> list[dict[str, Any]]:
    """The figures of fresh processes."""
    python, explain = [sys.executable, "-c"], [sys.executable, "-m", "attnreg", "explain"]
    model = ["--model", "examples/configs/gpt-oss-120b"]
    hopper = ["--platform", "cuda", "--arch", "sm90"]
    engines = ("vllm-0.33.0", "vllm-0.24.0", "sglang-0.5.23")
    whole = process_ms(
        {
            "bare": [*python, "pass"],
            "import": [*python, "import attnreg"],
            "default": [*explain, "--platform", "rocm", "--arch", "gfx942", *model],
            **{name: [*explain, *hopper, *model, "--registry", name] for name in engines},
            "anew": ["env", "XDG_CACHE_HOME=/dev/null", *explain, *hopper, *model],
        }
    )
    loads = {name: [*python, LOAD, name] for name in attnreg.bundled_registries()}
    first = process_ms(loads, printed=True)
    anew = {name: ["env", "XDG_CACHE_HOME=/dev/null", *command] for name, command in loads.items()}
    compiled = process_ms({name: anew[name] for name in ("default", "vllm-0.33.0")}, 7, printed=True)
    upgrade = [sys.executable, "-m", "attnreg", "upgrade", "--from", "vllm-0.31", "--to", "vllm-0.33"]
    report = process_ms({"upgrade": [*upgrade, *(word for arch in ARCHS for word in ("--arch", arch))]}, 3)["upgrade"]
    return [
        _row("import attnreg, beyond bare Python", whole["import"] - whole["bare"], "ms", 100),
        _row("attnreg explain --model gpt-oss, whole process", whole["default"], "ms", 400),
        *(_row(f"  with --registry {name}", whole[name], "ms", 450) for name in engines),
        _row("  where no registry is kept", whole["anew"], "ms", None),
        *(_row(f"load_registry('{name}'), first of a process", ms, "ms", 60) for name, ms in first.items()),
        *(_row(f"load_registry('{name}'), compiled", ms, "ms", None) for name, ms in compiled.items()),
        _row("attnreg upgrade, 24 models on 12 architectures", report, "ms", 10_000),
    ]


def _engine_rows(request: attnreg.AttentionRequest) -> list[dict[str, Any]]:
    """The figures for vLLM's own tables. In vLLM itself: 69 to 119 µs uncached, 9.9 µs cached."""
    load = call_us(lambda: attnreg.load_registry("vllm-0.33.0"), 2.0) / 1e3
    old, new = attnreg.load_registry("vllm-0.20.0"), attnreg.load_registry("vllm-0.33.0")
    plain = attnreg.AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8)
    cuda = attnreg.Platform(platform="cuda", arch="sm90")
    attnreg.select(plain, cuda, new)
    return [
        _row("load_registry('vllm-0.33.0'), again", load, "ms", 60),
        _row(
            "vllm-0.33.0: select, uncached, 6 candidates",
            call_us(lambda: evaluate_anew(plain, cuda, new, None)),
            "µs",
            70,
        ),
        _row(
            "  the same with sinks and a window",
            call_us(lambda: evaluate_anew(request, cuda, new, None)),
            "µs",
            70,
        ),
        _row("vllm-0.33.0: select, cached", call_us(lambda: attnreg.select(plain, cuda, new)), "µs", 1),
        _row("diff of vllm-0.20.0 and vllm-0.33.0, whole", _once(lambda: diff(old, new)) * 1e3, "ms", 10_000),
    ]


def _ten_candidates() -> attnreg.Registry:
    """The default registry with five more candidates, copies under new names, in the ROCm order."""
    row = {"summary": "A copy.", "platforms": ["rocm"], "attention": "mha", "source": "vllm:a/copy.py#Copy"}
    claims = {"dtypes": ["float16"], "kv_dtypes": ["auto"], "head_sizes": {"multiple_of": 8}, "block_sizes": "any"}
    claims |= {"head_sizes_v": "same", "num_heads": "any", "num_kv_heads": "any", "cache_layouts": "any"}
    capabilities = {**claims, "attn_types": ["decoder"], "features": ["sinks"]}
    names = [f"COPY_{i}" for i in range(5)]
    backends = {name: {**row, "capabilities": capabilities} for name in names}
    place = [{"backend": name, "before": "TURBOQUANT", "orders": ["rocm/mha"]} for name in names]
    return attnreg.load_registry("default", [{"backends": backends, "place": place}])


def _row(name: str, value: float, unit: str, budget: float | None) -> dict[str, Any]:
    return {"what": name, "value": round(value, 3 if value < 10 else 1), "unit": unit, "budget": budget}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/selection.json")
    record = parser.parse_args().record
    with tempfile.TemporaryDirectory() as kept:
        os.environ["XDG_CACHE_HOME"] = kept
        rows = measure()
    for row in rows:
        budget = f"   budget {row['budget']} {row['unit']}" if row["budget"] is not None else ""
        met = "" if row["budget"] is None else "   met" if row["value"] <= row["budget"] else "   MISSED"
        print(f"{row['what']:<52} {row['value']:>9} {row['unit']}{budget}{met}")
    if record:
        RESULTS.write_text(
            json.dumps({"machine": machine(), "figures": rows}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def machine() -> dict[str, Any]:
    """The facts that figures of a processor hold for."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "attnreg": attnreg.__version__,
        "registry": attnreg.load_registry("default").title,
        "date": date.today().isoformat(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
