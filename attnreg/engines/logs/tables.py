"""A registry as the explanations of log lines look at it: what is possible on one GPU, or on any."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from attnreg.errors import RequestError, nearest
from attnreg.language.computed import taken_from
from attnreg.language.conditions import Condition
from attnreg.registry import Effect, Registry, Step

T = TypeVar("T")


@dataclass(frozen=True)
class TableView:
    """A registry, and the architecture and the platform of a run; None where the log and the user name none."""

    registry: Registry
    arch: str | None = None
    platform: str | None = None

    @cached_property
    def known(self) -> Mapping[str, Any]:
        """The facets whose values follow from the architecture, derived ones included; else the platform alone."""
        if self.arch is None:
            return {} if self.platform is None else {"platform": self.platform}
        platform = self.registry.vocabulary.architectures[self.arch].platform
        known: dict[str, Any] = {"arch": self.arch, "platform": platform}
        for name, facet in self.registry.derived.items():
            (value, holds), *_ = [*reached(((value, when) for when, value, _ in facet.cases), known), (None, None)]
            if holds and not taken_from(value):
                known[name] = value
        return known

    @property
    def elsewhere(self) -> str:
        """The end of a sentence about a line that the registry does not explain."""
        if self.arch is None:
            return ": the line is of another release"
        return f" on {self.arch}: the line is of another release or GPU"

    def possible(self, when: Condition) -> bool:
        """Whether a condition can hold here."""
        return when.decided(self.known) is not False

    def effects(self, step: Step) -> list[Effect]:
        """The effects that a step can have here."""
        if not self.possible(step.when):
            return []
        return [effect for effect, _ in reached(((e, e.when) for e in step.effects), self.known)]

    def require(self, backend: str) -> None:
        """Raises `RequestError` for a backend that the registry does not have."""
        if backend not in self.registry.backends:
            raise self.absent(backend)

    def absent(self, backend: str) -> RequestError:
        """The error for a backend that the registry does not have."""
        near = nearest(backend, self.registry.backends)
        help_ = f"the line is of another release or of a plug-in{f'; did you mean `{near}`?' if near else ''}"
        return RequestError(f"{self.registry.title} has no backend {backend}", help_)


def reached(cases: Iterable[tuple[T, Condition]], known: Mapping[str, Any]) -> Iterator[tuple[T, bool | None]]:
    """The cases that can be the first to hold at known values of some facets, each with whether it certainly holds."""
    for case, when in cases:
        holds = when.decided(known)
        if holds is not False:
            yield case, holds
        if holds:
            return


def where(*conditions: Condition) -> str:
    """Conditions in words: ``where platform cuda and arch sm90``; "always" without any."""
    words = " and ".join(condition.describe() for condition in conditions if condition.facets)
    return f"where {words}" if words else "always"


def plain(text: str) -> str:
    """A text without blanks, marks and capitals, for a comparison of names."""
    return re.sub(r"[\W_]", "", text).casefold()
