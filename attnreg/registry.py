"""Registry: the validated, immutable form of the data that everything else reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from attnreg.errors import Location
from attnreg.language.conditions import Condition
from attnreg.language.frozen import FrozenDict, frozen

if TYPE_CHECKING:
    from attnreg.language.matchers import Matcher
    from attnreg.language.vocabulary import Vocabulary

Status = Literal["stable", "experimental", "deprecated"]
Strength = Literal["require", "prefer", "deny"]


@dataclass(frozen=True, slots=True)
class Claim:
    """What a backend accepts of one facet; a value that is not given passes."""

    facet: str
    key: str
    matcher: Matcher
    where: Location


@dataclass(frozen=True, slots=True)
class Rule:
    """A combination that fails although each of its parts is fine alone, with the sentence that says so."""

    when: Condition
    reject: str
    facets: tuple[str, ...]
    where: Location
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One complete alternative of a backend: the row's own data with what the variant changes.

    A row without variants has one, whose ``name`` is None. ``unchecked`` is what it lets through without a look:
    features, and facets whose claim is `any` for that reason. ``claims`` are those that refuse something, ``open`` the
    lines of all others, by key: together every claim of the vocabulary. ``served`` holds every feature that it does
    not refuse.
    """

    name: str | None
    when: Condition
    requires: Condition
    claims: tuple[Claim, ...]
    features: Mapping[str, Location]
    features_at: Location
    emulated: Mapping[str, tuple[str, Location]]
    unchecked: Mapping[str, Location]
    rules: tuple[Rule, ...]
    where: Location
    source: str | None = None
    notes: tuple[str, ...] = ()
    open: Mapping[str, Location] = field(default_factory=FrozenDict)
    served: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("features", "emulated", "unchecked", "open"):
            object.__setattr__(self, name, frozen(getattr(self, name)))
        object.__setattr__(self, "served", frozenset((*self.features, *self.emulated, *self.unchecked)))


@dataclass(frozen=True, slots=True)
class Backend:
    """One row: who it is, and its variants in the order in which they are tried."""

    name: str
    summary: str
    module: str | None
    status: Status
    platforms: frozenset[str]
    attention: frozenset[str]
    phases: frozenset[str] | None
    variants: tuple[Variant, ...]
    source: str
    where: Location
    since: str | None = None
    notes: tuple[str, ...] = ()
    module_at: Location | None = None
    only_on_request: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A candidate of an order, and the condition under which the automatic order considers it."""

    backend: str
    condition: Condition
    where: Location


@dataclass(frozen=True, slots=True)
class Order:
    """The backends that are tried for the requests that ``when`` describes, the preferred first."""

    platform: str
    name: str
    when: Condition
    entries: tuple[Entry, ...]
    where: Location
    because: str | None = None
    source: str | None = None

    @property
    def title(self) -> str:
        return f"{self.platform}/{self.name}"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a user decided: require, prefer or deny backends for the requests that ``when`` describes."""

    strength: Strength
    backends: tuple[str, ...]
    when: Condition
    where: Location
    because: str | None = None


@dataclass(frozen=True, slots=True)
class Fallback:
    """When a request by name gives way to the order: where ``when`` holds and all is about facets of ``only``."""

    when: Condition
    only: frozenset[str]
    because: str
    where: Location


@dataclass(frozen=True, slots=True)
class Waiver:
    """Where ``when`` holds no row's claim on one of ``facets`` is looked at."""

    when: Condition
    facets: frozenset[str]
    because: str
    where: Location


@dataclass(frozen=True, slots=True)
class Invariant:
    """A statement that must hold of every selection: of the chosen backend, wherever ``when`` holds."""

    name: str
    says: str
    when: Condition
    where: Location
    chosen: frozenset[str | None] | None = None
    never: frozenset[str] = frozenset()
    finds: bool = False
    native: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """A finding that stays as it is: how its message begins, and why."""

    finding: str
    because: str
    where: Location


@dataclass(frozen=True, slots=True)
class Derived:
    """A named value: the first case that holds speaks, otherwise it is None."""

    name: str
    cases: tuple[tuple[Condition, Any, Location], ...]
    where: Location

    def value(self, point: Mapping[str, Any]) -> Any:
        for condition, value, _ in self.cases:
            if condition.holds(point):
                return value
        return None

    def case(self, point: Mapping[str, Any]) -> Location:
        """The line of the case that speaks at a point (the facet's own, where none does)."""
        return next((where for condition, _, where in self.cases if condition.holds(point)), self.where)


@dataclass(frozen=True, slots=True)
class SourceRef:
    """A pinned origin of facts."""

    name: str
    url: str
    version: str
    read: str | None


@dataclass(frozen=True)
class Registry:
    """All data of one registry. Immutable to its last mapping, so safe to share; `attnreg.load_registry` makes it.

    ``fingerprint`` names the data: two registries with the same one make the same selections. With ``imports`` false
    the modules are knowledge about another engine and are never imported.
    """

    name: str
    fingerprint: str
    vocabulary: Vocabulary
    backends: Mapping[str, Backend]
    orders: Mapping[str, tuple[Order, ...]]
    derived: Mapping[str, Derived]
    choices: tuple[Choice, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    waivers: tuple[Waiver, ...] = ()
    invariants: tuple[Invariant, ...] = ()
    known: tuple[Known, ...] = ()
    sources: Mapping[str, SourceRef] = field(default_factory=FrozenDict)
    files: tuple[str, ...] = ()
    trusted: frozenset[str] = frozenset()
    imports: bool = True

    def __post_init__(self) -> None:
        for name in ("backends", "orders", "derived", "sources"):
            object.__setattr__(self, name, frozen(getattr(self, name)))

    # its data and nothing else: what the selector remembers of it stays behind
    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __repr__(self) -> str:
        return f"<Registry {self.title}>"

    @property
    def title(self) -> str:
        """``default@3f2a91c``, as reports cite it."""
        return f"{self.name}@{self.fingerprint}"

    @property
    def kept(self) -> tuple[Invariant, ...]:
        """The invariants that are not known to be violated."""
        known = [k.finding for k in self.known]
        return tuple(i for i in self.invariants if not any(f"violated: {i.says}".startswith(k) for k in known))
