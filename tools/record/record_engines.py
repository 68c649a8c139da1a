"""Looks on the package index for releases of vLLM, SGLang and transformers that are newer than the bundled data's.

    make record-engines         # record each, and write build/record/report.md
    make record-engines LOOK=1  # only print which releases are newer, and which are missing between

Each release is recorded by `make record-engine`, which proposes its data. A recorder that fails is named, and the
others go on. The next run goes on with what is not finished. Exit status: 0 if the report is complete, 1 if a recorder
failed, 2 if the index cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from release_watch import recording, report
from release_watch.index import PIP, NoIndexError, releases
from release_watch.standing import ENGINES, bundled_releases, standing

WORK = Path("build/record")


def main(
    given: Sequence[str] | None = None, *, pip: Sequence[str] = PIP, recorder: Sequence[str] = recording.MAKE
) -> int:
    """Look, record and report. pip, recorder: the commands to use. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--look", action="store_true", help="print the releases; download and record nothing")
    parser.add_argument(
        "--missing", action="store_true", help="record the missing releases between the bundled ones too"
    )
    parser.add_argument("--engine", action="append", choices=ENGINES, help="only this package; may be repeated")
    parser.add_argument("--work", type=Path, default=WORK, help=f"the folder of the recordings, by default {WORK}")
    options = parser.parse_args(given)
    engines = options.engine or ENGINES
    try:
        standings = [standing(engine, bundled_releases(engine), releases(engine, pip)) for engine in engines]
    except NoIndexError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.look:
        print(report.page(standings, []), end="")
        return 0
    options.work.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for s in standings:
        for version in (*(s.between if options.missing else ()), *s.newer):
            print(f"recording {s.engine} {version}: {options.work / f'{s.engine}-{version}'}/recorder.log", flush=True)
            outcomes.append(recording.record(s.engine, str(version), options.work, recorder))
    page = options.work / "report.md"
    page.write_text(report.page(standings, outcomes, "newer and missing" if options.missing else ""), encoding="utf-8")
    print(page)
    return 0 if all(outcome.complete for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
