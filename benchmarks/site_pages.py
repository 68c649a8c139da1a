"""Measure pages of the built site as Lighthouse does: in a headless Chromium, on a desktop and on a phone.

A phone has a processor four times as slow as this one. Its network, and the desktop's, are those of Lighthouse; the
server does not compress. Each page loads in a new window with an empty cache. Of three loads the figures are those
with the least blocked time, then with the earliest largest paint: whoever else uses the machine only adds to both.

python benchmarks/site_pages.py [--site FOLDER]   print the figures
python benchmarks/site_pages.py --record          write benchmarks/results/site_pages.json too
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from selection import machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "site_pages.json"
LOADS = 3


def measure(site: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The figures of every page and profile, and the versions of what measured them. Ends without a browser or axe."""
    sys.path.append(str(ROOT / "tests"))
    driver, scores = import_module("support.pages.browser"), import_module("support.pages.scores")
    if why := driver.missing():
        sys.exit(why)
    if (archive := scores.axe_file()) is None:
        sys.exit("axe-core is not in .cache (make test-site fetches it)")
    axe = scores.axe_script(archive)
    rows = []
    with driver.Browser() as browser, scores.served(site) as address:
        for profile in scores.PROFILES:
            for look in scores.LOOKS:
                loads = [scores.figures(browser, address, look, profile) for _ in range(LOADS)]
                best = min(loads, key=lambda found: (found["blocked ms"], found["largest paint ms"]))
                found = 0
                for dark in (False, True):
                    browser.dark(dark)
                    found += len(scores.violations(browser, axe))
                row = {"page": look.name, "profile": profile.name, "score": scores.score(best, profile), **best}
                rows.append({**row, "axe": found, "path": look.path})
                print(json.dumps(rows[-1]), flush=True)
        version = browser.version
    return rows, {"chromium": version, "axe-core": archive.stem.rpartition("-")[2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--site", type=Path, default=ROOT / "build/site", help="the folder of the built site")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    rows, versions = measure(options.site)
    if options.record:
        content = {"machine": {**machine(), **versions, "load before": round(load, 2)}, "figures": rows}
        RESULTS.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
