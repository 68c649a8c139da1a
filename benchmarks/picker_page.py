"""Measure the picker in a headless Chromium, on the site that `make site` built; each figure beside its budget.

The first answer is timed from the start of the page in a new browser, and so is the time until the page is prepared for
the next ones, which it does while nothing is asked. Then they come, each timed from a new address to the answer that is
drawn and laid out: its verdicts, and the whole with the remedies. A time is the median of those of three browsers.

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
KV_DTYPES = ("", "fp8", "bfloat16")
FIRST = f"#registry={REGISTRY}&arch=sm80&model=Llama-3.1-8B"
BROWSERS = 3
# a box that is asked for has laid out what is on the screen
MEASURE = """
const [anchor] = arguments;
const answer = document.getElementById("answer");
const times = {};
return new Promise((done) => {
  const observer = new MutationObserver(() => {
    answer.getBoundingClientRect();
    times.whole = performance.now() - start;
    times.verdicts ??= times.whole;
    if (document.body.dataset.answered === before) return;
    observer.disconnect();
    setTimeout(() => done(times), 50);
  });
  observer.observe(answer, { childList: true, subtree: true });
  observer.observe(document.body, { attributeFilter: ["data-answered"] });
  const before = document.body.dataset.answered;
  const start = performance.now();
  location.hash = anchor;
});
"""
# a page's clock begins with its navigation
MEASURE_FIRST = """
new MutationObserver((_, observer) => {
  if (!document.body?.dataset.answered) return;
  observer.disconnect();
  document.getElementById("answer").getBoundingClientRect();
  const loaded = [...document.querySelectorAll("script[src], link[rel=stylesheet]")].map((e) => e.src || e.href);
  window.first = { milliseconds: performance.now(), loaded: [location.href, ...loaded] };
}).observe(document, { subtree: true, attributeFilter: ["data-answered"] });
"""


def measure(site: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every figure with its unit and budget, and the times of each question in milliseconds, the slowest first."""
    sys.path.append(str(ROOT / "tests"))
    driver = import_module("support.browser")
    if why := driver.missing():
        sys.exit(why)
    anchors = [
        f"#registry={REGISTRY}&arch={arch}&model={model}" + (f"&facet.kv_dtype={kv_dtype}" if kv_dtype else "")
        for model, arch, kv_dtype in product(MODELS, ARCHITECTURES, KV_DTYPES)
    ]
    firsts, prepared, attempts = [], [], []
    for _ in range(BROWSERS):
        with driver.Browser() as browser:
            browser.page.add_init_script(MEASURE_FIRST)
            browser.open(site.resolve() / "pick.html", FIRST)
            firsts.append(browser.wait("return window.first"))
            prepared.append(browser.wait("return document.body.dataset.prepared && performance.now()", seconds=120))
            attempts.append([browser.run(MEASURE, anchor) for anchor in anchors])
    rows = []
    for anchor, *times in zip(anchors, *attempts, strict=True):
        medians = {name: round(statistics.median(t[name] for t in times), 1) for name in ("verdicts", "whole")}
        rows.append({"question": anchor, **medians})
    rows.sort(key=lambda row: -row["whole"])
    loaded = [_file(url) for url in firsts[0]["loaded"]]
    figures = [
        _figure("first answer", statistics.median(first["milliseconds"] for first in firsts), "ms", 1000),
        _figure("prepared for the next ones", statistics.median(prepared), "ms", None),
        _figure("what is loaded for it", sum(file.stat().st_size for file in loaded) / 1e6, "MB", 3),
    ]
    for name, what in (("verdicts", "next answers, their verdicts"), ("whole", "next answers, with every remedy")):
        times = sorted(row[name] for row in rows)
        ranks = {"median": statistics.median(times), "90th percentile": times[len(times) * 9 // 10], "most": times[-1]}
        figures += [_figure(f"{what}, {rank}", value, "ms", 30) for rank, value in ranks.items()]
    return figures, rows


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
    figures, rows = measure(args.site)
    print(f"{len(rows)} questions; the load before was {load:.1f}")
    for row in figures:
        budget = row["budget"]
        met = (
            "" if budget is None else f"budget {budget} {row['unit']}   {'met' if row['value'] <= budget else 'MISSED'}"
        )
        print(f"{row['what']:<50} {row['value']:>7} {row['unit']}   {met}")
    for row in rows[:5]:
        print(f"{row['verdicts']:6.1f} {row['whole']:6.1f}  {row['question']}")
    if args.record:
        facts = {**machine(), "registry": attnreg.load_registry(REGISTRY).title, "load before": round(load, 2)}
        content = {"machine": facts, "figures": figures, "slowest": rows[:5]}
        RESULTS.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
