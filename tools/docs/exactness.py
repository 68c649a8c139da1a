"""The table of docs/exactness.md: the number of recorded decisions that each registry answers exactly."""

from __future__ import annotations

import gzip
from pathlib import Path

import yaml

from docs.markdown import table


def exactness_block(root: Path) -> dict[str, str]:
    """The block of the page, from tests/data/recorded.yaml and the recorded decisions themselves."""
    data = root / "tests" / "data"
    rows = []
    for name, about in yaml.safe_load((data / "recorded.yaml").read_text(encoding="utf-8")).items():
        count = 0
        for file in about["files"]:
            with gzip.open(data / file, "rt", encoding="utf-8") as lines:
                # other lines describe the recording and its models
                count += sum('"out":' in line for line in lines)
        link = f"[{Path(about['test']).name}](../{about['test']})"
        registry, _, part = name.partition(", ")
        rows.append(
            [
                ", ".join(filter(None, (f"`{registry}`", part))),
                f"{count:,}",
                str(about["recorded"]),
                about["compared"],
                link,
                about["left_out"],
            ]
        )
    columns = [
        ("registry", 16),
        ("decisions", 9),
        ("recorded", 10),
        ("held of each", 40),
        ("by", 40),
        ("not covered", 40),
    ]
    return {"exactness": table(columns, rows), "fresh-starts": _fresh(data / "fresh_starts.yaml")}


def _fresh(path: Path) -> str:
    """The table of the samples of whole starts, in the order in which they were drawn."""
    rows = [
        [
            ", ".join((f"vLLM {sample['release']}", *filter(None, [sample.get("machines")]))),
            str(sample["seed"]),
            str(sample["drawn"]),
            *(f"{sample[count]:,}" for count in ("rows", "equal", "different", "not known", "left out")),
        ]
        for sample in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]
    columns = [("engine", 12), ("seed", 8), ("drawn", 10), ("starts", 6), ("equal", 6), ("different", 9)]
    return table([*columns, ("not known", 9), ("left out", 8)], rows)
