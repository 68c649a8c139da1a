"""Fixtures of the tests that several ranks run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from support.layers.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """A function that returns so many ranks, which start once."""
    groups: dict[int, Ranks] = {}

    def of(world_size: int) -> Ranks:
        if world_size not in groups:
            groups[world_size] = Ranks(world_size)
        return groups[world_size]

    yield of
    for group in groups.values():
        group.close()
