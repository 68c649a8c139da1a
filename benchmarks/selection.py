"""Measure import, a cold explain, loading and selection; each beside its budget.

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
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import attnreg
from attnreg.analysis.check import check
from attnreg.analysis.diff import diff
from attnreg.selection.selector import evaluate_anew

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "selection.json"
GPT_OSS = {"head_size": 64, "num_heads": 64, "num_kv_heads": 8, "features": frozenset({"sinks", "sliding_window"})}


def process_ms(code: list[str], runs: int = 15) -> float:
    """Median wall time of a whole process, in milliseconds; its modules are compiled, as installers leave them."""
    times = []
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(runs + 1):
        start = time.perf_counter()
        subprocess.run(code, check=True, capture_output=True, cwd=ROOT, env=env)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


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
    bare = process_ms([sys.executable, "-c", "pass"])
    imported = process_ms([sys.executable, "-c", "import attnreg"])
    command = [sys.executable, "-m", "attnreg", "explain", "--platform", "rocm", "--arch", "gfx942"]
    cold = process_ms([*command, "--model", "examples/configs/gpt-oss-120b"])
    registry = attnreg.load_registry("default")
    request = attnreg.AttentionRequest(**GPT_OSS)  # type: ignore[arg-type]
    rocm = attnreg.Platform(platform="rocm", arch="gfx942")
    cuda = attnreg.Platform(platform="cuda", arch="sm90")
    ten = _ten_candidates()
    attnreg.select(request, rocm, registry)
    return [
        _row("import attnreg, beyond bare Python", imported - bare, "ms", 100),
        _row("attnreg explain --model gpt-oss, whole process", cold, "ms", 400),
        _row("load_registry('default')", call_us(lambda: attnreg.load_registry("default"), 1.0) / 1e3, "ms", None),
        _row(
            "select, uncached, 5 candidates, ROCm",
            call_us(lambda: evaluate_anew(request, rocm, registry, None, False)),
            "µs",
            None,
        ),
        _row(
            "select, uncached, 5 candidates, CUDA",
            call_us(lambda: evaluate_anew(request, cuda, registry, None, False)),
            "µs",
            None,
        ),
        _row(
            "select, uncached, 10 candidates",
            call_us(lambda: evaluate_anew(request, rocm, ten, None, False)),
            "µs",
            150,
        ),
        _row("select, cached", call_us(lambda: attnreg.select(request, rocm, registry)), "µs", 1),
        *_engine_rows(request),
        _row("check, every invariant and all dead data", _once(lambda: check(registry)) * 1e3, "ms", 10_000),
    ]


def _engine_rows(request: attnreg.AttentionRequest) -> list[dict[str, Any]]:
    """The figures for vLLM's own tables. In vLLM itself: 69 to 119 µs uncached, 9.9 µs cached."""
    load = call_us(lambda: attnreg.load_registry("vllm-0.33.0"), 2.0) / 1e3
    old, new = attnreg.load_registry("vllm-0.20.0"), attnreg.load_registry("vllm-0.33.0")
    plain = attnreg.AttentionRequest(head_size=128, num_heads=32, num_kv_heads=8)
    cuda = attnreg.Platform(platform="cuda", arch="sm90")
    attnreg.select(plain, cuda, new)
    return [
        _row("load_registry('vllm-0.33.0')", load, "ms", 60),
        _row(
            "vllm-0.33.0: select, uncached, 6 candidates",
            call_us(lambda: evaluate_anew(plain, cuda, new, None, False)),
            "µs",
            70,
        ),
        _row(
            "  the same with sinks and a window",
            call_us(lambda: evaluate_anew(request, cuda, new, None, False)),
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
    rows = measure()
    for row in rows:
        budget = f"   budget {row['budget']} {row['unit']}" if row["budget"] is not None else ""
        met = "" if row["budget"] is None else "   met" if row["value"] <= row["budget"] else "   MISSED"
        print(f"{row['what']:<52} {row['value']:>9} {row['unit']}{budget}{met}")
    if record:
        RESULTS.write_text(json.dumps({"machine": machine(), "figures": rows}, indent=2, ensure_ascii=False) + "\n")


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
