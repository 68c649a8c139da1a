"""The space of configurations of some registries: the product of the classes of values that their data distinguishes.

`attnreg.analysis.symbolic` decides statements about all configurations over this space, exactly and without samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from attnreg.analysis.diagram import Diagrams, Node
from attnreg.analysis.value_classes import variables
from attnreg.language.conditions import Condition
from attnreg.language.facets import LINKED, ordinary
from attnreg.platforms import Platform
from attnreg.registry import Registry
from attnreg.request import AttentionRequest


class Space:
    """The product of the classes that some registries distinguish, with a store of decision diagrams over it.

    ``possible`` leaves out points without a request, such as query heads that are not a multiple of the KV heads.
    """

    def __init__(self, registries: Iterable[Registry], more: Iterable[Condition] = ()) -> None:
        """more: further conditions whose values the space distinguishes."""
        self.registries = tuple(registries)
        self.variables = tuple(variables(self.registries, more))
        self.diagrams = Diagrams([len(v.classes) for v in self.variables])
        self.level = {(v.facet, v.word): i for i, v in enumerate(self.variables)}
        self.ordinary = tuple(v.ordinary for v in self.variables)
        self._cheapest: dict[Node, tuple[float, int]] = {}
        self._links: tuple[tuple[str, str, Callable[[Any, Any], bool]], ...] = (*LINKED, ("arch", "device", self._has))
        self.possible = self._possible()

    @property
    def size(self) -> int:
        """The number of configurations that the registries distinguish."""
        return self.diagrams.count(self.possible)

    def _has(self, arch: tuple[str, str], device: str) -> bool:
        """Whether a device has this architecture, in a registry that knows the device."""
        known = (r.vocabulary for r in self.registries)
        return any(device in v.words_of("device") and v.arch_of(device) == arch[1] for v in known if v.facet("device"))

    def _possible(self) -> Node:
        d = self.diagrams
        out = d.true
        for first, second, _ in self._links:
            a, b = self.level.get((first, None)), self.level.get((second, None))
            if a is None or b is None:
                continue
            for i, j in product(range(d.sizes[a]), range(d.sizes[b])):
                if self._pair(a, b, i, j) is None:
                    out = d.ite(d.box({a: frozenset({i}), b: frozenset({j})}), d.false, out)
        return out

    def _pair(self, a: int, b: int, i: int, j: int) -> tuple[Any, Any] | None:
        """A pair of values, one from each class of two linked facets, that a request may combine; else None."""
        first, second = self.variables[a], self.variables[b]
        fits = next(fits for x, y, fits in self._links if (x, y) == (first.facet, second.facet))
        pairs = product(first.usual(i), second.usual(j))
        return next(((x, y) for x, y in pairs if x is None or y is None or fits(x, y)), None)

    def point(self, request: AttentionRequest, platform: Platform) -> list[int]:
        """The classes of a configuration, one for each variable."""
        facts = {**request.facts(), **platform.facts()}
        return [v.class_of(v.value_in(facts)) for v in self.variables]

    def example(self, point: Sequence[int]) -> tuple[AttentionRequest, Platform]:
        """A configuration at a possible point, with the ordinary value of each class that has one."""
        values = {key: self.variables[i].usual(point[i])[0] for key, i in self.level.items()}
        for first, second, _ in self._links:
            a, b = (self.level.get((facet, None)) for facet in (first, second))
            if a is not None and b is not None:
                pair = self._pair(a, b, point[a], point[b])
                assert pair is not None, "the point is not possible"
                values[first, None], values[second, None] = pair
        return _configuration(values)

    def cheapest(self, region: Node) -> list[int] | None:
        """The point of a region with the fewest unusual facets; None if the region is empty."""
        ordinary = self.ordinary
        return self.diagrams.cheapest(region, lambda level, c: int(c != ordinary[level]), ordinary, self._cheapest)


def _configuration(values: Mapping[tuple[str, str | None], Any]) -> tuple[AttentionRequest, Platform]:
    fields: dict[str, Any] = {"head_size": ordinary("head_size")}
    extra: dict[str, Any] = {}
    words: dict[str, set[str]] = {"features": set(), "flags": set()}
    packages: dict[str, str] | None = None
    platform, arch, device = ordinary("platform"), ordinary("arch"), None
    for (facet, word), value in values.items():
        if facet == "arch":
            platform, arch = value
        elif facet == "device":
            device = value
        elif facet == "packages":
            packages = packages or {}
            if value is not None:
                packages[str(word)] = value
        elif word is not None:
            if value:
                words[facet].add(word)
        elif facet in AttentionRequest.__dataclass_fields__:
            fields[facet] = value
        elif value is not None:
            extra[facet] = value
    request = AttentionRequest(**fields, features=frozenset(words["features"]), extra=tuple(extra.items()))
    flags = frozenset(words["flags"])
    return request, Platform(
        platform=platform,
        arch=arch,
        flags=flags,
        packages=packages,  # type: ignore[arg-type]
        device=device,
    )
