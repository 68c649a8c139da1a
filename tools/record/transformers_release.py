"""Compares a release of transformers with the one that the model families were read in.

    make record-engine ENGINE=transformers VERSION=5.24.0

1. The model types that came and went, and the families whose cited source text changed: by reading, without importing.
2. `observed.txt`: every `--every`-th recorded config, built by the release on a processor and observed anew.
3. `_sources.yaml`: the file of sources with the new version.

Exit status: 0 if nothing is left to a person, else 3.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from neighbours import symbol_text
from release_watch.recording import Move, Summary, moves_of
from support import DATA, ROOT  # type: ignore[import-not-found]

from attnreg.models.families import Families
from attnreg.models.reader import bundled_families

OBSERVER = Path(__file__).parent / "transformers_truth" / "observe.py"
# of a config's class: what its outputs have, and how its weights are spread over devices
_ASIDE = ("keys_to_ignore_at_inference", "base_model_tp_plan", "base_model_ep_plan", "base_model_pp_plan")
_DIFFERS = re.compile(r"^(?P<family>\S+) \((?P<variant>.*)\): \d+ differences$")
_ALIKE = re.compile(r"^(?P<alike>\d+) of (?P<all>\d+) as recorded$", re.MULTILINE)


def model_types(tree: Path) -> set[str]:
    """The model types of a release, by the text of its table of configs. Raises ValueError if it has none."""
    folder = tree / "transformers" / "models" / "auto"
    for file in (folder / "auto_mappings.py", folder / "configuration_auto.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file.is_file() else ():
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(target, ast.Name) and target.id == "CONFIG_MAPPING_NAMES":
                found = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
                return {name for name in found if not name.endswith("Config")}
    raise ValueError(f"{folder}: no CONFIG_MAPPING_NAMES: the table of configs moved")


def changed_sources(families: Families, before: Path, after: Path) -> Iterator[tuple[str, str, str]]:
    """A family, its cited symbol, and ``changed`` or ``gone``, where the text of the symbol is another."""
    for name in families:
        source = families.source(name)
        path, _, symbol = source.removeprefix("transformers:").partition("#")
        if source.startswith("transformers:"):
            was, now = (_facts(symbol_text(tree / "transformers", path, symbol)) for tree in (before, after))
            if was is not None and was != now:
                yield name, f"{path}#{symbol}", "gone" if now is None else "changed"


def _facts(text: str | None) -> str | None:
    """The source of a symbol without its docstrings and the attributes that no layer depends on."""
    if text is None:
        return None
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            node.body = [part for part in node.body if not _is_aside(part)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_aside(part: ast.stmt) -> bool:
    if isinstance(part, ast.Expr):
        return isinstance(part.value, ast.Constant)
    target = part.targets[0] if isinstance(part, ast.Assign) else getattr(part, "target", None)
    return isinstance(target, ast.Name) and target.id in _ASIDE


def observed(tree: Path, work: Path, every: int) -> tuple[tuple[Move, ...] | None, int, list[str]]:
    """The families that a release builds otherwise than recorded, the number observed, and what failed."""
    file, part = work / "observed.txt", work / "part"
    if not file.exists():
        words = [sys.executable, OBSERVER, "--check", DATA / "models" / "observed.jsonl.gz", "--every", every]
        path = os.pathsep.join(map(str, (tree, os.environ.get("PYTHONPATH", ""))))
        with part.open("w") as out, (work / "log").open("w") as log:
            done = subprocess.run(
                [*map(str, words)], stdout=out, stderr=log, check=False, env={**os.environ, "PYTHONPATH": path}
            )
        if _ALIKE.search(part.read_text()) is None:
            last = (work / "log").read_text(errors="replace").strip().splitlines()[-1:]
            return None, 0, [f"observing: {' '.join(last)[:200] or f'exit status {done.returncode}'}"]
        part.rename(file)
    text = file.read_text()
    cases, lines = [], text.splitlines()
    for line, following in itertools.pairwise(lines):
        if found := _DIFFERS.match(line):
            before, arrow, after = following.strip().partition(" -> ")
            sides = (before, after) if arrow else ("as recorded", before)
            cases.append((f"{found['family']} ({found['variant']})", "any", *sides, ""))
    counts = _ALIKE.search(text)
    return moves_of(cases), int(counts["all"]) if counts else 0, []


def main() -> int:
    """Compare, observe and print what is left. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", required=True, help="the release, such as 5.24.0")
    parser.add_argument("--tree", type=Path, required=True, help="its wheel, unpacked")
    parser.add_argument(
        "--before", type=Path, required=True, help="the release that the families were read in, unpacked"
    )
    parser.add_argument("--work", type=Path, required=True, help="the folder of the recording")
    parser.add_argument("--every", type=int, default=7, metavar="N", help="observe each Nth recorded config")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    families = bundled_families()
    before, after = model_types(given.before), model_types(given.tree)
    moved, count, failed = observed(given.tree, given.work, given.every)
    left = [f"new model type {name}: it has no family" for name in sorted(after - before) if name not in families]
    left += [f"model type {name} is gone" for name in sorted(before - after)]
    changed = list(changed_sources(families, given.before, given.tree))
    left += [f"{name}: its source is {how}: {symbol}" for name, symbol, how in changed]
    read = datetime.datetime.now(datetime.UTC).date()
    sources = (ROOT / "registry" / "models" / "_sources.yaml").read_text(encoding="utf-8")
    proposed = given.work / "_sources.yaml"
    proposed.write_text(re.sub(r'version: "[^"]*", read: [\d-]+', f'version: "{given.version}", read: {read}', sources))
    recorded = f"{count} recorded configs observed anew, {len(after)} model types and {len(families)} families compared"
    Summary(
        recorded=recorded,
        against=given.before.name,
        compared=count,
        moved=moved,
        proposed=str(proposed),
        left=tuple(left),
        failed=tuple(failed),
    ).write(given.work)
    print("\n".join([recorded, *failed, *left]))
    return 3 if left or moved or failed else 0


if __name__ == "__main__":
    sys.exit(main())
