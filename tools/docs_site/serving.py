"""The architectures on which each variant of a registry accepts a request: exact, from `attnreg check`'s diagrams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attnreg.analysis.diagram import Node
from attnreg.analysis.space import Space
from attnreg.analysis.symbolic.model import Model
from attnreg.language.vocabulary import Architecture
from attnreg.registry import Backend, Registry, Variant


@dataclass(frozen=True)
class Place:
    """A variant on an architecture, and what the requests that it accepts there ask for.

    ``bounds`` has the classes of each variable of the space that some of these requests have.
    """

    row: Backend
    variant: Variant
    space: Space
    bounds: Mapping[int, frozenset[int]]

    @property
    def title(self) -> str:
        return f"{self.row.name}/{self.variant.name}" if self.variant.name else self.row.name

    @cached_property
    def features(self) -> frozenset[str]:
        """The features of the requests that it accepts."""
        return frozenset(
            str(v.word) for i, v in enumerate(self.space.variables) if v.facet == "features" and 1 in self.bounds[i]
        )

    def takes(self, facet: str, value: Any) -> bool:
        """Whether some request with a feature, or with that value of another facet, is accepted."""
        if facet == "features":
            return value in self.features
        level = self.space.level.get((facet, None))
        # a facet that nothing tells apart is no variable
        return level is None or _class_of(self.space, level, value) in self.bounds[level]

    def how(self, facet: str, word: Any) -> str:
        """``native``; ``slow`` for a feature that it emulates; ``unchecked`` for one that it accepts unchecked."""
        if facet == "features" and word in self.variant.emulated:
            return "slow"
        return "unchecked" if word in self.variant.unchecked or facet in self.variant.unchecked else "native"


@dataclass(frozen=True)
class Serving:
    """A registry's variants on its architectures, for requests that follow the order or name a backend."""

    registry: Registry
    space: Space

    @cached_property
    def _model(self) -> Model:
        return Model(self.space, self.registry)

    @cached_property
    def on(self) -> dict[str, list[Place]]:
        """Architecture -> the variants of its platform that accept some request there, in the order of the data.

        Other platforms' variants are left out: an engine may accept one that a user names, and then fail.
        """
        # architectures that no condition tells apart have the same places
        alike: dict[int, list[Place]] = {}
        out = {}
        for name, arch in self.registry.vocabulary.architectures.items():
            number = _class_of(self.space, self.space.level["arch", None], (arch.platform, name))
            if number not in alike:
                alike[number] = self._places(arch)
            out[name] = alike[number]
        return out

    @cached_property
    def _accepting(self) -> list[tuple[Backend, Variant, Node]]:
        """Each variant, and the diagram of the requests that it accepts: those of the order, or that name its row."""
        d, model = self.space.diagrams, self._model
        return [
            (row, variant, d.unite(each.variant(row, index)[0] for each in model.ways(row.name)))
            for row in self.registry.backends.values()
            for index, variant in enumerate(row.variants)
        ]

    def _places(self, arch: Architecture) -> list[Place]:
        space, d = self.space, self.space.diagrams
        level = space.level["arch", None]
        here = d.among(level, [_class_of(space, level, (arch.platform, arch.name))])
        out = []
        for row, variant, accepts in self._accepting:
            where = d.conjoin([accepts, here])
            if where != d.false and arch.platform in row.platforms:
                out.append(Place(row, variant, space, d.bounds(where)))
        return out


def _class_of(space: Space, level: int, value: Any) -> int:
    return space.variables[level].class_of(value)
