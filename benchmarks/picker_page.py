"""Measure the picker in a headless Chromium: from a new address to the answer, drawn and laid out, with its remedies.

python benchmarks/picker_page.py [--site FOLDER]     print the times of 108 questions to the site that `make site` built
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("gpt-oss-120b", "DeepSeek-V3", "gemma-3-27b-it", "t5-11b", "whisper-large-v3", "Qwen3-8B")
ARCHITECTURES = ("sm75", "sm90", "sm100", "gfx90a", "gfx942", "gfx1201")
KV_DTYPES = ("", "fp8", "bfloat16")
FIRST = "#registry=vllm-0.33.0&arch=sm80&model=Llama-3.1-8B"
# a box that is asked for has the whole page laid out
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


def measure(site: Path) -> list[dict[str, Any]]:
    """For each question the milliseconds to the first drawing, which has every verdict, and to the whole answer."""
    sys.path.append(str(ROOT / "tests"))
    driver = import_module("support.browser")
    if why := driver.missing():
        sys.exit(why)
    rows = []
    with driver.Browser() as browser:
        browser.open(site.resolve() / "pick.html", FIRST)
        browser.wait("return document.body.dataset.answered")
        for model, arch, kv_dtype in product(MODELS, ARCHITECTURES, KV_DTYPES):
            anchor = f"#registry=vllm-0.33.0&arch={arch}&model={model}"
            anchor += f"&facet.kv_dtype={kv_dtype}" if kv_dtype else ""
            rows.append({"question": anchor, **browser.run(MEASURE, anchor)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=ROOT / "build/site", help="the folder of the built site")
    rows = measure(parser.parse_args().site)
    print(f"{len(rows)} questions, load {os.getloadavg()[0]:.1f}; milliseconds, budget 30")
    for name in ("verdicts", "whole"):
        times = sorted(row[name] for row in rows)
        median, p90 = statistics.median(times), times[len(times) * 9 // 10]
        print(f"{name:<10} median {median:6.1f}   90th percentile {p90:6.1f}   most {times[-1]:6.1f}")
    for row in sorted(rows, key=lambda row: -row["whole"])[:5]:
        print(f"{row['whole']:6.1f}  {row['question']}")


if __name__ == "__main__":
    main()
