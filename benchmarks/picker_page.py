"""Measure the picker in a headless Chromium, on the site that `make site` built; each figure beside its budget.

The first answer, and the time until Python is ready, are timed from the start of the page in a new browser. Then come
questions that Python answers, each timed from a new address to the answer that is drawn and laid out. A time is the
median of those of three browsers. Beside it stands the processor's time of the whole browser, which other work on the
machine disturbs less; Linux tells it.

python benchmarks/picker_page.py [--site FOLDER]   print the figures, and the slowest of 108 questions
python benchmarks/picker_page.py --record          write benchmarks/results/picker_page.json too
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from selection import machine

import attnreg

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "picker_page.json"
REGISTRY = "vllm-0.33.0"
MODELS = ("gpt-oss-120b", "DeepSeek-V3", "gemma-3-27b-it", "t5-11b", "whisper-large-v3", "Qwen3-8B")
ARCHITECTURES = ("sm75", "sm90", "sm100", "gfx90a", "gfx942", "gfx1201")
STATED = ("&facet.kv_dtype=fp8", "&tp=2", "&facet.block_size=64")
FIRST = f"#registry={REGISTRY}&arch=sm80&model=Llama-3.1-8B"
# these are compiled anew, as a dropped overlay is
CHANGED = f"#registry={REGISTRY}&arch=sm90&model=gpt-oss-120b&deny=TRITON_ATTN"
BROWSERS = 3
# a box that is asked for has laid out what is on the screen
MEASURE = """
const [anchor] = arguments;
const before = document.body.dataset.answered;
return new Promise((done) => {
  const observer = new MutationObserver(() => {
    if (document.body.dataset.answered === before) return;
    observer.disconnect();
    document.getElementById("answer").getBoundingClientRect();
    const time = performance.now() - start;
    setTimeout(() => done(time), 50);
  });
  observer.observe(document.body, { attributeFilter: ["data-answered"] });
  const start = performance.now();
  location.hash = anchor;
});
"""
# a page's clock begins with its navigation
MEASURE_FIRST = """
new MutationObserver((_, observer) => {
  const { answered, python } = document.body?.dataset ?? {};
  if (answered && !window.first) {
    document.getElementById("answer").getBoundingClientRect();
    const loaded = [...document.querySelectorAll("script[src], link[rel=stylesheet]")].map((e) => e.src || e.href);
    window.first = { milliseconds: performance.now(), loaded: [location.href, ...loaded] };
  }
  if (python === "ready") {
    observer.disconnect();
    window.pythonReady = performance.now();
  }
}).observe(document, { subtree: true, attributeFilter: ["data-answered", "data-python"] });
"""


def measure(site: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """Every figure with its unit and budget, the milliseconds of each question, the slowest first, and the browser."""
    sys.path.append(str(ROOT / "tests"))
    driver = import_module("support.pages.browser")
    if why := driver.missing():
        sys.exit(why)
    anchors = [
        f"#registry={REGISTRY}&arch={arch}&model={model}{stated}"
        for model, arch, stated in product(MODELS, ARCHITECTURES, STATED)
    ]
    firsts, ready, changed, attempts, loading, spent = [], [], [], [], [], []
    for _ in range(BROWSERS):
        with driver.Browser() as browser:
            browser.page.add_init_script(MEASURE_FIRST)
            begun = _processor_ms()
            browser.open(site.resolve() / "pick.html", FIRST)
            firsts.append(browser.wait("return window.first"))
            ready.append(browser.wait("return window.pythonReady", seconds=120))
            loading.append(_processor_ms() - begun)
            asked = []
            for anchor in anchors:
                begun = _processor_ms()
                asked.append((browser.run(MEASURE, anchor), _processor_ms() - begun))
            attempts.append([time for time, _ in asked])
            spent.append([processor for _, processor in asked])
            changed.append(browser.run(MEASURE, CHANGED))
            version = browser.version
    rows = [
        {
            "question": anchor,
            "milliseconds": round(statistics.median(t), 1),
            "processor": round(statistics.median(p), 1),
        }
        for anchor, t, p in zip(anchors, zip(*attempts, strict=True), zip(*spent, strict=True), strict=True)
    ]
    rows.sort(key=lambda row: -row["processor"])
    loaded = [_file(url) for url in firsts[0]["loaded"]]
    python = sum(file.stat().st_size for file in (site / "data/python").iterdir())
    figures = [
        _figure("first answer", statistics.median(first["milliseconds"] for first in firsts), "ms", 1000),
        _figure("what is loaded for it", sum(file.stat().st_size for file in loaded) / 1e6, "MB", 1.5),
        _figure("Python is ready", statistics.median(ready), "ms", 6000),
        _figure("Python is ready, processor's time", statistics.median(loading), "ms", None),
        _figure("what is loaded for Python", python / 1e6, "MB", None),
    ]
    for what, name in (("next answers", "milliseconds"), ("next answers, processor's time", "processor")):
        times: list[float] = sorted(row[name] for row in rows)
        ranks = {"median": statistics.median(times), "90th percentile": times[len(times) * 9 // 10], "most": times[-1]}
        figures += [_figure(f"{what}, {rank}", value, "ms", 300) for rank, value in ranks.items()]
    changed_ms = statistics.median(changed)
    return [*figures, _figure("the first answer with a choice or an overlay", changed_ms, "ms", None)], rows, version


def _processor_ms() -> float:
    """Milliseconds that the threads of all processes below this one have run."""
    processes = {int(entry.name): entry for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    below, grew = {os.getpid()}, True
    while grew:
        found = {pid for pid, entry in processes.items() if _parent(entry) in below}
        grew = not found <= below
        below |= found
    runs = [file for pid in below - {os.getpid()} for file in (processes[pid] / "task").glob("*/schedstat")]
    return sum(int(text.split()[0]) for file in runs if (text := _text(file))) / 1e6


def _parent(process: Path) -> int | None:
    # the name of the process, in brackets before it, may hold anything
    fields = _text(process / "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else None


def _text(file: Path) -> str:
    """The text of a file of a process; nothing of one that has ended."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _file(url: str) -> Path:
    return Path(url2pathname(urlparse(url).path))


def _figure(what: str, value: float, unit: str, budget: float | None) -> dict[str, Any]:
    return {"what": what, "value": round(value, 1 if unit == "ms" else 2), "unit": unit, "budget": budget}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=ROOT / "build/site", help="the folder of the built site")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    figures, rows, version = measure(args.site)
    print(f"{len(rows)} questions; the load before was {load:.1f}")
    for row in figures:
        budget = row["budget"]
        met = (
            "" if budget is None else f"budget {budget} {row['unit']}   {'met' if row['value'] <= budget else 'MISSED'}"
        )
        print(f"{row['what']:<50} {row['value']:>7} {row['unit']}   {met}")
    for row in rows[:5]:
        print(f"{row['milliseconds']:6.1f} {row['processor']:6.1f}  {row['question']}")
    if args.record:
        versions = {"chromium": version, "pyodide": runtime_version()}
        facts = {
            **machine(),
            **versions,
            "registry": attnreg.load_registry(REGISTRY).title,
            "load before": round(load, 2),
        }
        content = {"machine": facts, "figures": figures, "slowest": rows[:5]}
        RESULTS.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def runtime_version() -> str:
    """The version of Pyodide that sites have."""
    sys.path.append(str(ROOT / "tools"))
    version: str = import_module("picker.runtime").PYODIDE[1]
    return version


if __name__ == "__main__":
    main()
