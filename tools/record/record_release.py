"""Records a release of vLLM and proposes its registry, as the difference to the bundled release that is nearest.

    make record-engine ENGINE=vllm VERSION=0.29.0

A step is skipped if its file in `--work` is complete, so that a stopped recording goes on:

1. `rows.jsonl`: what is asked, drawn by `--seed` from the recorded rows of the bundled releases, field by field.
2. `selector-*.jsonl`: the decisions of the release's own selector, one file for each simulated NVIDIA or AMD machine.
3. `platforms-*.jsonl`: what its own classes choose on Intel GPUs (xpu) and on processors (cpu), drawn by the same seed.
4. `starts.jsonl`: how the release starts the whole models that were recorded of the nearest release.
5. `registry/`: release.yaml with the differences that the decisions ask for, and architectures.yaml.

A part that the recorder cannot run is named with the module that moved. The proposed registry answers "not known" on a
platform without a decision.

Then the recording is held against the proposed registry, and what is left for a person is printed: rows that differ,
and facts whose source text changed. `summary.json` has the same, and the layers of models that move against the release
before. Exit status: 0 if nothing is left, else 3.

If the release is bundled, the decisions are held against its own table instead, and nothing is proposed.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import gzip
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from support import DATA  # type: ignore[import-not-found]
from support.platform_parity import difference  # type: ignore[import-not-found]
from support.selector_parity import differences  # type: ignore[import-not-found]

from attnreg import Registry, load_registry
from attnreg.compile.inputs.bundled import bundled_registries
from attnreg.engines.settings import version_parts

sys.path.insert(0, str(Path(__file__).parent))

import neighbours
import vllm_platforms
import vllm_selector
from release_watch.recording import Move, Summary, moves_of_diff

HERE = Path(__file__).parent
# fields that are drawn together, because they describe one model
_TOGETHER = ("model", "use_mla", "use_sparse", "head_size", "num_heads")
PLATFORMS = ("cuda", "rocm", "xpu", "cpu")
_MACHINE = ("id", "platform", "arch", "aiter", "amx", "device_capability")


def missing(tree: Path, symbols: Sequence[str]) -> list[str]:
    """The `module:name` of the engine that its tree does not have; nothing is imported."""
    gone = []
    for symbol in symbols:
        module, _, names = symbol.partition(":")
        folder = tree.joinpath(*module.split("."))
        files = [file for file in (folder.with_suffix(".py"), folder / "__init__.py") if file.is_file()]
        name = names.partition(".")[0]
        if not files or name not in _top_names(files[0]):
            gone.append(symbol)
    return gone


def _top_names(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        found |= {alias.asname or alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)}
        found |= {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef) else set()
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def drawn(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Configurations of layers: recorded ones, with up to four fields from others on the same platform."""
    rows = [row["in"] for file in sorted(DATA.glob("vllm/selector-*.jsonl.gz")) for row in _lines(file)]
    dice, by_platform = random.Random(seed), dict[str, list[dict[str, Any]]]()
    for row in rows:
        by_platform.setdefault(row["platform"], []).append(row)
    for number in range(count):
        row = dict(dice.choice(rows))
        fields = [name for name in row if name not in _MACHINE]
        for name in dice.sample(fields, dice.randint(0, 4)):
            other = dice.choice(by_platform[row["platform"]])
            row |= {n: other[n] for n in (_TOGETHER if name in _TOGETHER else (name,)) if n in other}
        yield row | {"id": number}


def _lines(file: Path) -> list[Any]:
    if not file.exists():
        return []
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as text:
        return [json.loads(line) for line in text if line.strip()]


class Recording:
    """The recording of one release in a folder, as far as it is there."""

    def __init__(self, version: str, tree: Path, work: Path) -> None:
        self.version, self.tree, self.work = version, tree, work
        self.notes: list[str] = []
        self.seed = 0
        work.mkdir(parents=True, exist_ok=True)

    def rows(self, seed: int, count: int) -> list[dict[str, Any]]:
        """What is asked; drawn once."""
        file = self.work / "rows.jsonl"
        if not file.exists():
            self._write(file, [{"seed": seed}, *drawn(seed, count)])
        first, *rows = _lines(file)
        self.seed = first["seed"]
        print(f"{self.work} has {len(rows)} rows, drawn by seed {self.seed}", flush=True)
        return rows

    def decisions(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The decisions of the release's selector; those of a machine that fails are left out, which is a note."""
        if gone := missing(self.tree, vllm_selector.SYMBOLS):
            self.notes.append(f"the selector is not recorded: this release has no {', no '.join(gone)}")
            return []
        found = []
        for machine in sorted({vllm_selector.machine(row) for row in rows}):
            file = self.work / f"selector-{'-'.join(filter(None, machine))}.jsonl"
            if not file.exists():
                asked = self.work / "asked.jsonl"
                self._write(asked, [row for row in rows if vllm_selector.machine(row) == machine])
                words = [HERE / "vllm_selector.py", "--source", self.tree, "--rows", asked, "--here"]
                self._run(words, file, f"the selector on {' '.join(filter(None, machine))}")
            found += _lines(file)
        return found

    def platforms(self, count: int) -> list[dict[str, Any]]:
        """What the release's classes choose on Intel GPUs and processors; a platform that fails is a note."""
        found = []
        for name, symbols in vllm_platforms.SYMBOLS.items():
            if gone := missing(self.tree, symbols):
                self.notes.append(f"{name} is not recorded: this release has no {', no '.join(gone)}")
                continue
            file = self.work / f"platforms-{name}.jsonl"
            if not file.exists():
                words = [HERE / "vllm_platforms.py", "--tree", self.tree, "--platform", name, "--seed", self.seed]
                self._run([*words, "--rows", count // 2], file, f"the classes for {name}")
            found += _lines(file)
        return found

    def starts(self, near: str) -> list[dict[str, Any]]:
        """How the release starts the models of the nearest release's recording."""
        asked, file = DATA / f"vllm/start-{near.partition('-')[2]}.jsonl.gz", self.work / "starts.jsonl"
        if asked.exists() and not file.exists():
            words = [HERE / "vllm_config.py", "--tree", self.tree, "--asked", asked, "--out", "-"]
            self._run([*words[:-2]], file, "the starts of whole models")
        return [line for line in _lines(file) if "out" in line]

    def architectures(self, near: str, out: Path) -> None:
        """Write architectures.yaml as the difference to the nearest release's."""
        if not (out / "architectures.yaml").exists():
            words = [HERE / "vllm_architectures.py", "--tree", self.tree, "--out", out]
            words += ["--built", self.work / "starts.jsonl"] if (self.work / "starts.jsonl").exists() else []
            self._run([*words, "--extends", bundled_registries()[near]], None, "the architectures")

    def _run(self, words: Sequence[Any], out: Path | None, what: str) -> None:
        """Run a recorder; its output is complete only if it ends well. A failure is a note."""
        print(f"recording {what}", flush=True)
        part = self.work / "part"
        with part.open("w") as text, (self.work / "log").open("a") as log:
            done = subprocess.run([sys.executable, *map(str, words)], stdout=text, stderr=log, check=False)
        if done.returncode:
            last = (self.work / "log").read_text(errors="replace").strip().splitlines()[-1:]
            self.notes.append(f"{what}: the recorder failed: {' '.join(last)[:200]}")
        elif out is not None:
            part.rename(out)

    @staticmethod
    def _write(file: Path, lines: Sequence[Any]) -> None:
        part = file.with_suffix(".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in lines))
        part.rename(file)


def beside(version: str) -> list[str]:
    """The bundled releases before and after a version, the nearest of each."""
    there = {version_parts(name.partition("-")[2]): name for name in bundled_registries() if name.startswith("vllm-")}
    wanted = version_parts(version)
    before, after = [parts for parts in there if parts < wanted], [parts for parts in there if parts > wanted]
    return [there[parts] for parts in ([max(before)] if before else []) + ([min(after)] if after else [])]


def otherwise(row: dict[str, Any], registry: Registry) -> Iterator[str]:
    """How a registry decides a row otherwise than the engine."""
    # only the rows of Intel GPUs and processors say what they are about
    if "kind" not in row["in"]:
        yield from differences(row, registry.selector)
    elif text := difference(row, registry):
        yield f"{platform_of(row)}, {row['in']['kind']}: {text}"


def platform_of(row: dict[str, Any]) -> str:
    """The platform of a row: cuda, rocm, xpu or cpu."""
    given = row["in"]
    named = next((name for name, machines in vllm_platforms.MACHINES.items() if given["arch"] in machines), "")
    return str(given.get("platform", named))


def told(rows: Sequence[dict[str, Any]], registry: Registry) -> Counter[str]:
    """What a registry decides otherwise than the engine, each with the number of rows."""
    return Counter(re.sub(r"\(\[.*?\]\)", "", text) for row in rows for text in otherwise(row, registry))


def wrong_rows(rows: Sequence[dict[str, Any]], registry: Registry) -> int:
    """The number of rows that a registry decides otherwise than the engine."""
    return sum(any(True for _ in otherwise(row, registry)) for row in rows)


def compared(rows: Sequence[dict[str, Any]], registry: Registry | None) -> str:
    """How many rows of each platform a registry decides like the engine, in words."""
    if registry is None:
        return f"{len(rows)} decisions, and no valid registry to compare"
    words = []
    for name in PLATFORMS:
        mine = [row for row in rows if platform_of(row) == name]
        words.append(f"{name} {len(mine) - wrong_rows(mine, registry)} of {len(mine)}" if mine else f"{name} none")
    return f"{len(rows)} decisions; alike: {', '.join(words)}"


def held(decisions: Sequence[dict[str, Any]], name: str, keep: Path | None = None, failed: Sequence[str] = ()) -> int:
    """Hold the table of a bundled release against decisions. Returns the exit status, 3 too if something failed.

    keep: a file that gets every fourth decision, as test data.
    """
    registry = load_registry(name)
    print(f"{name}: {compared(decisions, registry)}")
    lines = [f"{count} rows: {text}" for text, count in told(decisions, registry).most_common(40)]
    print("".join(f"  {line}\n" for line in (*lines, *failed)), end="")
    if keep:
        kept = "".join(json.dumps(row) + "\n" for row in decisions[::4] if "kind" not in row["in"])
        keep.write_bytes(gzip.compress(kept.encode(), mtime=0))
    return 3 if lines or failed else 0


def main() -> int:
    """Record, propose, compare and print what is left. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", required=True, help="the release, such as 0.29.0")
    parser.add_argument("--tree", type=Path, required=True, help="the Python of its wheel, unpacked")
    parser.add_argument("--before", type=Path, help="the Python of the nearest release, to compare the facts' sources")
    parser.add_argument("--work", type=Path, required=True, help="the folder of the recording")
    parser.add_argument("--rows", type=int, default=1000, help="how many configurations are drawn")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30), help="by which they are drawn")
    parser.add_argument("--keep", type=Path, help="of a bundled release, write every fourth decision there")
    given = parser.parse_args()
    if not (given.tree / "vllm" / "platforms").is_dir():
        parser.error(f"{given.tree}: no vLLM: it has no vllm/platforms")
    recording = Recording(given.version, given.tree, given.work)
    decisions = recording.decisions(recording.rows(given.seed, given.rows)) + recording.platforms(given.rows)
    name, both = f"vllm-{given.version}", beside(given.version)
    if name in bundled_registries():
        return held(decisions, name, given.keep, recording.notes)
    counts = {near: wrong_rows(decisions, load_registry(near)) for near in both}
    near = min(both, key=counts.__getitem__)
    print(f"{len(decisions)} decisions; {', '.join(f'{n} decides {c} otherwise' for n, c in counts.items())}")
    sources = {"vllm": {"version": given.version, "read": datetime.datetime.now(datetime.UTC).date()}}
    # a row that the nearest release decides alike is asked again at the end
    apart = [row for row in decisions if any(True for _ in otherwise(row, load_registry(near)))]
    others = [other for other in both if other != near]
    chosen, _ = neighbours.proposed(near, others, lambda r: wrong_rows(apart, r), name, sources)
    data = neighbours.release_of(near, chosen, sources) | {"steps": None}
    if silent := [name for name in PLATFORMS if name not in map(platform_of, decisions)]:
        data["priorities"] = data.get("priorities", {}) | dict.fromkeys(silent)
        recording.notes.append(f"the proposed registry says nothing of {', '.join(silent)}: nothing is recorded there")
    folder = given.work / "registry" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "release.yaml").write_text(yaml.safe_dump(data, sort_keys=False, width=120))
    starts = recording.starts(near)
    recording.architectures(near, folder)
    registry = neighbours.registry_of(data, name)
    left = told(decisions, registry) if registry is not None else Counter({"the proposed registry is not valid": 1})
    print(f"proposed: {folder / 'release.yaml'}, {len(chosen)} differences to {near}")
    print(f"{len(starts)} starts recorded; the registry has none yet: it says so")
    lines = [f"{count} rows: {text}" for text, count in left.most_common(40)]
    if given.before:
        moved = neighbours.moved_symbols(near, given.before, given.tree)
        lines += [f"its source is {how}: {symbol}" for how, symbols in moved.items() for symbol in symbols]
    # without decisions the proposed registry is the nearest release's, and says nothing of this one
    moves, cases = _moves(both[0], folder) if decisions and registry is not None else (None, 0)
    text = f"{compared(decisions, registry)}; {len(starts)} starts of whole models"
    print(text)
    Summary(
        recorded=text,
        against=both[0],
        compared=cases,
        moved=moves,
        proposed=str(folder) if decisions else "",
        left=tuple(lines),
        failed=tuple(recording.notes),
    ).write(given.work)
    lines += recording.notes
    print("\n".join(["left by hand:", *(f"  {line}" for line in lines)]) if lines else "nothing is left by hand")
    return 3 if lines else 0


def _moves(before: str, proposed: Path) -> tuple[tuple[Move, ...] | None, int]:
    """The layers of the bundled models that move from a release to a proposed one, and the number compared.

    None if `attnreg diff` cannot compare them.
    """
    words = [sys.executable, "-m", "attnreg", "diff", before, proposed, "--json"]
    done = subprocess.run([*map(str, words)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1, 3):
        return None, 0
    data = json.loads(done.stdout)
    return moves_of_diff(data), data["compared"]


if __name__ == "__main__":
    sys.exit(main())
