"""The registers that spill in default configurations, kernel by kernel, with each version of Triton: all that may.

tests/data/compiled/spills.yaml lists them; what it does not list spills nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import yaml

from support import DATA

FILE = DATA / "compiled" / "spills.yaml"
# target, case, kernel
Place = tuple[str, str, str]


@cache
def allowed() -> dict[Place, dict[str, int]]:
    """The bytes that each kernel of the list may spill, by the version of Triton."""
    rows = yaml.safe_load(FILE.read_text(encoding="utf-8"))["spills"]
    places = {(row["target"], row["case"], row["kernel"]): row["bytes"] for row in rows}
    assert len(places) == len(rows), "a kernel is listed twice"
    return places


def bytes_of(target: str, case: str, kernel: str, version: str) -> int:
    """The bytes that a kernel may spill with a version of Triton."""
    return allowed().get((target, case, kernel), {}).get(version, 0)


def problems(
    found: Iterable[tuple[Place, int]], version: str, *, listed: Mapping[Place, Mapping[str, int]] | None = None
) -> list[str]:
    """What differs from the list: the bytes that some kernels of some targets spill with a version of Triton.

    The lines are those of the list, as it has to be. Of several launches of a kernel in a case the worst counts.
    """
    rows = allowed() if listed is None else listed
    worst: dict[Place, int] = {}
    for place, spilled in found:
        worst[place] = max(worst.get(place, 0), spilled)
    targets, kernels = ({place[i] for place in worst} for i in (0, 2))
    expected = {
        place: of[version]
        for place, of in rows.items()
        if version in of and place[0] in targets and place[2] in kernels
    }
    return [
        f'- {{target: {place[0]}, case: "{place[1]}", kernel: {place[2]}, bytes: {{{version}: {worst.get(place, 0)}}}}}'
        for place in sorted({*worst, *expected})
        if worst.get(place, 0) != expected.get(place, 0)
    ]
