"""Every architecture that transformers can build here, tiny and random, through attnreg and by eager, compared.

`--check` compares all of them with the record. `--part 3/7` takes the third of seven parts, and `--resume` continues a
run that was cut. `--family bert -v` prints one in full. `--record` writes the record.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from transformers_sweep.progress import Progress, say
from transformers_sweep.record import RECORD, ROOT, Journal, Row, by_family, changes, read_record, write_record
from transformers_sweep.workers import sweep


def families(part: int = 1, parts: int = 1) -> list[str]:
    """The model types of transformers that have a class, or the first of seven parts of them, say."""
    return sorted(CONFIG_MAPPING_NAMES)[part - 1 :: parts]


def versions() -> dict[str, str]:
    """The versions that a record is of."""
    return {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}


def _part(said: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", said)
    if not found or int(found[1]) > int(found[2]):
        raise argparse.ArgumentTypeError(f"{said!r} is no part; the third of seven is 3/7")
    return int(found[1]), int(found[2])


def _options(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the record says otherwise")
    parser.add_argument("--family", action="append", help="this model type alone; may be repeated")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="I/N", help="the I-th of N parts")
    parser.add_argument("--resume", action="store_true", help="leave out what the last run of the same part came to")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="where models run: cpu, as the record, or cuda")
    parser.add_argument("-v", action="store_true", help="print every row")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Entry point: the exit status."""
    options = _options(given)
    asked = options.family or families(*options.part)
    recorded = by_family(read_record()[1])
    name = "family" if options.family else "{}-of-{}".format(*options.part)
    journal = Journal(f"{options.device}-{name}", versions())
    found = journal.read() if options.resume else journal.begin()
    unlike = {family: stale for family, rows in found.items() if (stale := changes(rows, recorded.get(family, [])))}
    left = [family for family in asked if family not in found]
    with Progress(len(asked), len(found)) as progress:
        for family, rows in sweep(left, options.workers, options.device, lambda busy: progress.tell(busy, len(unlike))):
            found[family] = rows
            journal.add(family, rows)
            stale = changes(rows, recorded.get(family, []))
            if stale:
                unlike[family] = stale
            for row in rows if options.v else stale:
                say(json.dumps(row, ensure_ascii=False))
            progress.done += 1
    if options.record:
        kept = [row for family, old in recorded.items() if family not in found for row in old]
        write_record(versions(), kept + [row for rows in found.values() for row in rows])
    say(_summary(found, unlike))
    return int(bool(unlike and options.check))


def _summary(found: dict[str, list[Row]], unlike: dict[str, list[Row]]) -> str:
    rows = [row for family in found.values() for row in family]
    outcomes = Counter(outcome for row in rows for outcome, *_ in row["outcomes"].values())
    by = Counter(row["by"] or "nothing" for row in rows)
    lines = [
        f"{len(found)} architectures, {len(rows)} classes",
        f"outcomes: {', '.join(f'{n} {outcome}' for outcome, n in outcomes.most_common())}",
        f"classes computed by: {', '.join(f'{n} {who}' for who, n in by.most_common())}",
    ]
    died = [row for row in rows if "died" in row["outcomes"].get("build", [])]
    lines += [f"died: {row['family']} {row['class']}: {row['outcomes']['build'][1]}" for row in died]
    lines.append(f"{len(unlike)} architectures are not as recorded{': ' if unlike else ''}{', '.join(sorted(unlike))}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
