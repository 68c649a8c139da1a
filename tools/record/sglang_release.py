"""Records a release of SGLang: what it decides otherwise than the nearest recorded release, for the same servers.

    make record-engine ENGINE=sglang VERSION=0.5.24
    make record-engine ENGINE=sglang VERSION=0.5.24 SEED=5241

A step is skipped if its file in `--work` is complete, so that a stopped recording goes on:

1. `rows.jsonl`: what is asked, drawn by `--seed` from the recorded decisions of the nearest release.
2. `decisions-*.jsonl`: the decisions of the release's own code, one file for each simulated machine.
3. `registry/`: release.yaml without differences, and architectures.yaml. SGLang's steps are written by hand.

A release with a bundled table is asked fresh rows instead, which nobody asked before. Each has the machine of one
recorded row, the model of another, and the arguments of two more. `decisions.jsonl.gz` has the decisions, which are
compared with the table.

Exit status: 0 if no decision differs, else 3.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from support import DATA  # type: ignore[import-not-found]
from support.sglang_parity import difference, unknown  # type: ignore[import-not-found]

from attnreg.compile.inputs.bundled import bundled_registries, nearest_release
from attnreg.engines.sglang import decision
from attnreg.errors import RequestError

sys.path.insert(0, str(Path(__file__).parent))

from release_watch.recording import Summary, moves_of

RECORDER = Path(__file__).with_name("sglang_decisions.py")
# what a decision is compared by: not the code's own names of its steps, and not what only some recordings have
_ASIDE = ("trace", "model", "refused_later")
# what of a row is no argument of the server
_PLACE = ("version", "platform", "arch", "flags", "model", "sampling")
# the machine of a row
_MACHINE = ("platform", "arch", "flags", "tp_size")


def asked(near: str, version: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Recorded decisions of the nearest release, drawn by seed; ``in`` has the new version."""
    rows = _recorded(f"*-{near}.jsonl.gz")
    drawn = random.Random(seed).sample(rows, min(count, len(rows)))
    return [{"in": row["in"] | {"version": version}, "out": row["out"]} for row in drawn]


def fresh(version: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Rows for a bundled release that were never recorded, drawn by seed, of words that its table knows."""
    draw, recorded = random.Random(seed), _recorded("*.jsonl.gz")
    seen = {_key(row["in"]) for row in recorded}
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        place, model, given, more = (row["in"] for row in draw.sample(recorded, 4))
        row = {"version": version, "model": model["model"]}
        row |= {name: place[name] for name in _MACHINE if name in place}
        row |= {name: value for name, value in given.items() if name not in (*row, *_PLACE, *_MACHINE)}
        more = {name: value for name, value in more.items() if name not in (*_PLACE, *_MACHINE)}
        if more and draw.random() < 0.5:
            name = draw.choice(sorted(more))
            row[name] = more[name]
        if _key(row) in seen:
            continue
        seen.add(_key(row))
        try:
            decision(row)
        except RequestError:
            continue
        rows.append({"in": row})
    return rows


def _recorded(pattern: str) -> list[dict[str, Any]]:
    found = []
    for file in sorted((DATA / "sglang").glob(pattern)):
        with gzip.open(file, "rt") as lines:
            found += [json.loads(line) for line in lines]
    return found


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in row.items() if name != "version"}, sort_keys=True)


def held(decisions: Sequence[dict[str, Any]], work: Path) -> list[tuple[str, str, str, str, str]]:
    """The decisions that a bundled table makes otherwise, in the form that `moves_of` takes. Writes all decisions."""
    cases, counts = [], Counter[str]()
    for row in decisions:
        found = difference(row)
        counts["not known" if found and unknown(row) else "different" if found else "equal"] += 1
        if found and not unknown(row):
            was, now = (", ".join(f"{name} {pair[i]}" for name, pair in found.items()) for i in (0, 1))
            cases.append((row["in"]["model"], row["in"]["arch"], was, now, given_to(row["in"])))
    kept = [{"in": row["in"], "out": {k: v for k, v in row["out"].items() if k != "model"}} for row in decisions]
    text = "".join(json.dumps(row) + "\n" for row in sorted(kept, key=lambda row: _key(row["in"])))
    (work / "decisions.jsonl.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    print(", ".join(f"{counts[word]:,} {word}" for word in ("equal", "different", "not known")))
    return cases


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, str]:
    """What two decisions resolve differently, in words for each side; twice "" if they agree."""
    if before["error"] or after["error"]:
        sides = [
            f"refused: {out['error']['message'][:120]}" if out["error"] else _named(out) for out in (before, after)
        ]
        # the same sentence from another line of code is no difference
        return (sides[0], sides[1]) if sides[0] != sides[1] else ("", "")
    names = [name for name in before if name not in (*_ASIDE, "error") and before[name] != after.get(name)]
    return ", ".join(f"{n} {before[n]}" for n in names), ", ".join(f"{n} {after.get(n)}" for n in names)


def given_to(row: Mapping[str, Any]) -> str:
    """The arguments of a server, in words; "" if it got none."""
    given = [f"{name} {value}" for name, value in row.items() if name not in _PLACE and value is not None]
    return f"with {', '.join(given)}" if given else ""


def _named(out: Mapping[str, Any]) -> str:
    return f"attention_backend {out['attention_backend']}"


def record(rows: Sequence[dict[str, Any]], tree: Path, work: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The decisions of a release for rows, and why the recorder failed, each reason with its machines."""
    found, failed = [], dict[str, list[str]]()
    by_machine: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        given = row["in"]
        by_machine.setdefault("-".join((given["platform"], given["arch"], *given["flags"])), []).append(given)
    for machine, given in sorted(by_machine.items()):
        file, part, ask = (work / name for name in (f"decisions-{machine}.jsonl", "part", "asked.jsonl"))
        if not file.exists():
            print(f"recording {len(given)} decisions on {machine}", flush=True)
            ask.write_text("".join(json.dumps(row) + "\n" for row in given))
            words = [sys.executable, RECORDER, "--source", tree, "--rows", ask, "--here"]
            with part.open("w") as text, (work / "log").open("w") as log:
                done = subprocess.run([*map(str, words)], stdout=text, stderr=log, check=False)
            if done.returncode:
                last = (work / "log").read_text(errors="replace").strip().splitlines()[-1:]
                failed.setdefault(" ".join(last)[:200], []).append(machine)
                continue
            part.rename(file)
        found += [json.loads(line) for line in file.read_text().splitlines()]
    return found, [f"the decisions on {', '.join(machines)}: {why}" for why, machines in failed.items()]


def architectures(near: str, tree: Path, folder: Path) -> bool:
    """Write architectures.yaml as the difference to the nearest release's. False if that failed."""
    words = [sys.executable, RECORDER.with_name("vllm_architectures.py"), "--tree", tree, "--out", folder]
    words += ["--extends", bundled_registries()[f"sglang-{near}"]]
    # the transformers of the bundled releases' files, not the one that the release pins
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([*map(str, words)], env=environment, check=False).returncode == 0


def main() -> int:
    """Record, compare and print what differs. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", required=True, help="the release, such as 0.5.24")
    parser.add_argument("--tree", type=Path, required=True, help="its wheel, unpacked")
    parser.add_argument("--work", type=Path, required=True, help="the folder of the recording")
    parser.add_argument("--rows", type=int, default=1000, help="how many decisions are drawn")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="by which they are drawn")
    given = parser.parse_args()
    if not (given.tree / "sglang" / "srt").is_dir():
        parser.error(f"{given.tree}: no SGLang: it has no sglang/srt")
    bundled = f"sglang-{given.version}" in bundled_registries()
    work = given.work / str(given.seed) if bundled else given.work
    work.mkdir(parents=True, exist_ok=True)
    near, file = nearest_release("sglang", given.version).partition("-")[2], work / "rows.jsonl"
    if not file.exists():
        part = file.with_suffix(".part")
        ask = (given.version, given.seed, given.rows)
        drawn = fresh(*ask) if bundled else asked(near, *ask)
        part.write_text("".join(json.dumps(row) + "\n" for row in drawn))
        part.rename(file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    decisions, failed = record(rows, given.tree, work)
    if bundled:
        cases = held(decisions, work)
        print("\n".join([*map(str, cases), *failed]))
        return 3 if cases or failed else 0
    before = {json.dumps(row["in"], sort_keys=True): row["out"] for row in rows}
    cases = []
    for row in decisions:
        was, now = differences(before[json.dumps(row["in"], sort_keys=True)], row["out"])
        if was or now:
            cases.append((row["in"]["model"], row["in"]["arch"], was, now, given_to(row["in"])))
    name = f"sglang-{given.version}"
    folder = given.work / "registry" / name
    folder.mkdir(parents=True, exist_ok=True)
    read = datetime.datetime.now(datetime.UTC).date()
    data = {"extends": f"sglang-{near}", "backends": {"sources": {"sglang": {"version": given.version, "read": read}}}}
    (folder / "release.yaml").write_text(yaml.safe_dump(data, sort_keys=False, width=120))
    if not architectures(near, given.tree, folder):
        failed.append("the architectures")
    text = f"{len(cases)} of {len(decisions)} decisions differ: write them into release.yaml as steps"
    Summary(
        recorded=f"{len(decisions)} decisions",
        against=f"sglang-{near}",
        compared=len(decisions),
        moved=moves_of(cases) if decisions else None,
        proposed=str(folder) if decisions else "",
        left=(text,) if cases else (),
        failed=tuple(failed),
    ).write(given.work)
    print("\n".join([f"{len(decisions)} decisions, {len(cases)} differ from {near}", *failed]))
    return 3 if cases or failed else 0


if __name__ == "__main__":
    sys.exit(main())
