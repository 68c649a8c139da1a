"""Registry: all data of one registry, checked and immutable, for every other module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from attnreg.errors import LeftOut, Location
from attnreg.language.computed import value_at
from attnreg.language.conditions import Condition
from attnreg.language.consequence import Consequence
from attnreg.language.frozen import FrozenDict, frozen

if TYPE_CHECKING:
    from attnreg.language.backend_options import BackendOption, Fallback
    from attnreg.language.engine.architectures import Architectures
    from attnreg.language.engine.pages import PageRules
    from attnreg.language.engine.runs import GraphRules, LayoutRules, MemoryRules, StageRules
    from attnreg.language.matchers import Matcher
    from attnreg.language.measured import Measured
    from attnreg.language.vocabulary import Vocabulary

Option = str | int | float | bool
Status = Literal["stable", "experimental", "deprecated"]
Strength = Literal["require", "prefer", "deny"]


@dataclass(frozen=True, slots=True)
class Claim:
    """The values of one facet that a backend accepts. None (not given) passes."""

    facet: str
    key: str
    matcher: Matcher
    where: Location


@dataclass(frozen=True, slots=True)
class Rule:
    """A combination of values that a backend rejects although it accepts each alone; ``reject`` is the sentence."""

    when: Condition
    reject: str
    facets: tuple[str, ...]
    where: Location
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One complete alternative of a backend: the row's data with the variant's changes applied.

    A row without variants has one, whose ``name`` is None. ``claims`` are the claims that refuse some value; ``open``
    has the line of each other claim. ``unchecked`` has the line of each feature and facet that is accepted unchecked.
    ``served`` are the features that it does not refuse. ``module`` is its own or the row's. With ``run_on_request`` the
    module runs only if a user or an order names the variant. ``was`` has the names of the same kernel in other
    releases' tables; None stands for a row without variants.
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
    consequences: tuple[Consequence, ...] = ()
    module: str | None = None
    module_at: Location | None = None
    run_on_request: str | None = None
    was: frozenset[str | None] = frozenset()
    served: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("features", "emulated", "unchecked", "open"):
            object.__setattr__(self, name, frozen(getattr(self, name)))
        object.__setattr__(self, "served", frozenset((*self.features, *self.emulated, *self.unchecked)))


@dataclass(frozen=True, slots=True)
class Backend:
    """One row of backends.yaml: the facts about a backend, and its variants in the order of trying.

    ``module`` is the kernel module of variants without their own. ``contract`` is the version of the contract that a
    module outside attnreg follows. ``options`` are the module's own settings, by name.
    """

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
    only_on_request: str | None = None
    contract: int | None = None
    options: Mapping[str, Option] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", frozen(self.options))

    @property
    def modules(self) -> tuple[str, ...]:
        """The kernel modules of its variants; empty for a row that is knowledge only."""
        return tuple(dict.fromkeys(variant.module for variant in self.variants if variant.module is not None))

    @property
    def variant_names(self) -> tuple[str, ...]:
        """The names of its variants; empty for a row without variants."""
        return tuple(variant.name for variant in self.variants if variant.name)


@dataclass(frozen=True, slots=True)
class Entry:
    """One place in an order: a backend, and the condition under which the order considers it.

    ``backend`` is a row's name, or that of one variant (``FLASH_ATTN/FA3``). ``joined``: an overlay put it into every
    order that has its neighbour, because its `place` names no orders.
    """

    backend: str
    condition: Condition
    where: Location
    joined: bool = False

    @property
    def row(self) -> str:
        """The row's name."""
        return self.backend.partition("/")[0]


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
    measured: Measured | None = None

    @property
    def title(self) -> str:
        return f"{self.platform}/{self.name}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A user's decision to require, prefer or deny backends for the requests that ``when`` describes."""

    strength: Strength
    backends: tuple[str, ...]
    when: Condition
    where: Location
    because: str | None = None


@dataclass(frozen=True, slots=True)
class Waiver:
    """An exemption from claims: where ``when`` holds, no row's claims on ``facets`` are tested."""

    when: Condition
    facets: frozenset[str]
    because: str
    where: Location


@dataclass(frozen=True, slots=True)
class Invariant:
    """A statement about the chosen backend that must hold for every configuration where ``when`` holds.

    The backend is in ``chosen`` (None: no backend), is not in ``never``, or, with ``finds``, exists. With ``native``
    the statement is restricted to configurations that some candidate serves natively.
    """

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
    """A finding of `attnreg check` that is accepted, and why. ``example`` has the facets that show it."""

    code: str
    subject: tuple[str, ...]
    because: str
    where: Location
    example: Mapping[str, Any] | None = None

    @property
    def key(self) -> tuple[str, tuple[str, ...]]:
        """The code and the subject of the findings that it accepts."""
        return self.code, self.subject


class Switched(NamedTuple):
    """The words that a step adds to a set, and those that it removes."""

    on: frozenset[str]
    off: frozenset[str]


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of a step where ``when`` holds: it sets facets, refuses the run with a sentence, or does nothing.

    With ``unknown`` the sentence says why the engine's answer is not in the table. ``id`` tells refusals apart. With
    ``ends`` no later step is about the request.

    ``sets`` maps a facet to its value, to a `From` or a `Computed`; it maps features to a `Switched`.
    """

    when: Condition
    where: Location
    sets: Mapping[str, Any] = field(default_factory=FrozenDict)
    refuses: str = ""
    unknown: bool = False
    because: str | None = None
    id: str = ""
    ends: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sets", frozen(self.sets))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine's start: if ``when`` holds, its first effect whose condition holds takes place.

    ``name`` is the engine's function; ``title`` distinguishes the steps of one function.
    """

    name: str
    when: Condition
    effects: tuple[Effect, ...]
    where: Location
    source: str | None = None
    title: str = ""

    def subject(self, effect: Effect) -> tuple[str, ...]:
        """The subject of one of its effects: the step's name, and the effect's ``id`` if it has one."""
        return (self.title or self.name, *([effect.id] if effect.id else []))


@dataclass(frozen=True, slots=True)
class Derived:
    """A facet computed from others: the value of the first case whose condition holds, else None."""

    name: str
    cases: tuple[tuple[Condition, Any, Location], ...]
    where: Location

    def value(self, point: Mapping[str, Any]) -> Any:
        for condition, value, _ in self.cases:
            if condition.holds(point):
                return value_at(value, point)
        return None

    def case(self, point: Mapping[str, Any]) -> Location:
        """The line of the case that gives the value at a point; the facet's own line where no case holds."""
        return next((where for condition, _, where in self.cases if condition.holds(point)), self.where)


@dataclass(frozen=True, slots=True)
class SourceRef:
    """A pinned source of facts: its URL, its version, and the day on which it was read."""

    name: str
    url: str
    version: str
    read: str | None


@dataclass(frozen=True)
class Registry:
    """All data of one registry; `attnreg.load_registry` returns it. Immutable, so threads may share it.

    ``fingerprint`` is a hash of the data: registries with the same fingerprint make the same selections. With
    ``imports`` false the modules are another engine's and are never imported. ``base`` is the name of the source below
    the overlays. ``left_out`` are the plugins that do not take part. ``steps`` are the engine's steps before the choice
    of a backend. ``page``, ``layout`` and ``graphs`` are its rules after the choice: for the size of a block of the KV
    cache, for the layout of the cache, and for CUDA graphs. ``memory`` and ``stages`` are those for the memory of a GPU
    and for pipeline stages. ``architectures`` are the classes of models that it serves. ``options`` name backends;
    ``drafts`` says what a draft gets of its target: facet -> the target's facet.
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
    base: str = ""
    left_out: tuple[LeftOut, ...] = ()
    steps: tuple[Step, ...] = ()
    page: PageRules | None = None
    memory: MemoryRules | None = None
    stages: StageRules | None = None
    layout: LayoutRules | None = None
    graphs: GraphRules | None = None
    architectures: Architectures | None = None
    options: tuple[BackendOption, ...] = ()
    drafts: Mapping[str, str] = field(default_factory=FrozenDict)

    def __post_init__(self) -> None:
        for name in ("backends", "orders", "derived", "sources"):
            object.__setattr__(self, name, frozen(getattr(self, name)))

    # the fields only: the cache of selections, an attribute, is neither copied nor pickled
    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __repr__(self) -> str:
        return f"<Registry {self.title}>"

    def row(self, name: str) -> Backend | None:
        """The row of a backend, else None; the row of ``FLASH_ATTN/FA3`` has this variant alone."""
        return self.backends.get(name) or self._variants.get(name)

    @cached_property
    def _variants(self) -> Mapping[str, Backend]:
        """``FLASH_ATTN/FA3`` -> the row with this variant alone."""
        named = [(row, v) for row in self.backends.values() for v in row.variants if v.name]
        return {f"{row.name}/{v.name}": replace(row, variants=(v,)) for row, v in named}

    @cached_property
    def selector(self) -> Registry:
        """The registry without the steps of the engine's start: its selector alone."""
        name, options = f"{self.name}/selector", tuple(option for option in self.options if option.facet is None)
        gone = replace(self, name=name, steps=(), page=None, layout=None, graphs=None, options=options)
        return gone if self.steps else self

    def silence(self, platform: str, arch: str) -> str:
        """``vllm-0.31.0 says nothing of cpu`` if no order is about the platform, or no data about the architecture."""
        unread = arch in self.vocabulary.unread
        silent = unread or not self.orders.get(platform)
        return f"{self.name} says nothing of {arch if unread else platform}" if silent else ""

    @property
    def title(self) -> str:
        """``default@3f2a91c``, the form in which reports cite a registry."""
        return f"{self.name}@{self.fingerprint}"

    @property
    def plugin_problems(self) -> tuple[str, ...]:
        """A sentence for each plugin that is broken, or that a user names although it is not installed."""
        return tuple(p.text for p in self.left_out if p.why != "not let in")

    @property
    def missed(self) -> str:
        """The end of the help for an unknown backend: it names the left-out plugins, because one may have it."""
        return "".join(f"; {p.text}" for p in self.left_out if p.why != "not installed")

    @property
    def kept(self) -> tuple[Invariant, ...]:
        """The invariants whose violation is not among the accepted findings."""
        accepted = {known.key for known in self.known}
        return tuple(i for i in self.invariants if ("violated-invariant", (i.name,)) not in accepted)
