"""Asks about a layer with the backend that a user's options name for it, by the registry's data on what they reach."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from attnreg.errors import RequestError
from attnreg.selection.point import point_of
from attnreg.selection.selector import evaluate

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest
    from attnreg.selection.trace import Selection

# what an option reaches where a registry says nothing: layers of their own
_OWN = {"vision_backend": "vision", "draft_backend": "draft"}


class Asked(NamedTuple):
    """A request with what options write into it, the backend that they name for it, and the options that reach it."""

    request: AttentionRequest
    backend: str | None
    by: frozenset[str]


def asked_of(request: AttentionRequest, platform: Platform, registry: Registry, given: Mapping[str, str]) -> Asked:
    """The backend that options name for a request on a platform.

    given: option -> name: ``backend``, ``draft_backend``, ``vision_backend``, ``prefill_backend``. Of several options
    that reach the request, the first of the registry's data counts.

    Raises `RequestError` for words that the registry does not have, and for a request that names another backend.
    """
    if not given or platform.arch in registry.vocabulary.unread:
        return Asked(request, None, frozenset(given))
    if not registry.options:
        own = next((name for name in _own_options(request) if name in given), None)
        return Asked(request, given[own], frozenset({own})) if own else Asked(request, None, frozenset())
    point, reached = point_of(request, platform, registry), set[str]()
    for option in registry.options:
        name = given.get(option.name)
        if name is None or not option.reaches.holds(point):
            continue
        reached.add(option.name)
        if option.facet is None:
            return Asked(request, option.names.get(name, name), frozenset(reached))
        if point[option.facet] not in (None, name):
            message = f"{option.name} is {name}, and the request's {option.facet} is {point[option.facet]}"
            raise RequestError(message, "name one backend in one of the two")
        # the selector writes this one
        if option.name == "backend":
            return Asked(request, name, frozenset(reached))
        request = replace(request, extra=(*request.extra, (option.facet, name)))
    return Asked(request, None, frozenset(reached))


class Asker:
    """Asks the selector about the layers of a run, with the backends that a user's options name.

    given: option -> name, as for `asked_of`; options without a name count as not given. requests: those of the run's
    layers: a draft's gets what the registry's ``drafts`` say from the answers for the target's. ``reached`` are the
    options that have reached a request so far.
    """

    def __init__(
        self, registry: Registry, given: Mapping[str, str | None], requests: Iterable[AttentionRequest | None]
    ) -> None:
        self.registry, self.reached = registry, set[str]()
        self.given = {option: name for option, name in given.items() if name is not None}
        self._targets = tuple(r for r in requests if r is not None and r.role == "target")

    def __call__(self, request: AttentionRequest, platform: Platform) -> Selection:
        """The selection for a request. Raises `RequestError` for words that the registry does not have."""
        asked = asked_of(request, platform, self.registry, self.given)
        self.reached.update(asked.by)
        asks = asked.request
        if self.registry.drafts and asks.role == "draft":
            asks = of_target(asks, (self(target, platform) for target in self._targets), self.registry)
        return evaluate(asks, platform, self.registry, asked.backend)


def of_target(request: AttentionRequest, targets: Iterable[Selection], registry: Registry) -> AttentionRequest:
    """A draft's request with what it gets of its target, by the registry's ``drafts``.

    `kv_dtype` is the KV dtype that the target's backend stores in place of the one that is asked for, if it does so.

    targets: the selections for the target's layers. One for the same phase counts, or for any. The request stays as it
    is if there is none, or if the engine refuses the target or gives it an answer that the registry does not know.
    """
    served = [s for s in targets if s.backend is not None and s.request.phase in (request.phase, "any")]
    target = next((s for s in served if s.request.phase == request.phase), next(iter(served), None))
    if target is None:
        return request
    point, extra = target.point(), dict(request.extra)
    stored = next((follows.value for follows in target.consequences if follows.kind == "stores"), None)
    gets = {
        facet: stored if source == "kv_dtype" else point[source]
        for facet, source in registry.drafts.items()
        if extra.get(facet) is None
    }
    return replace(request, extra=tuple({**extra, **{f: v for f, v in gets.items() if v is not None}}.items()))


def unreached(given: Mapping[str, str], reached: Collection[str], registry: Registry) -> list[str]:
    """A note for each option that reaches no layer."""
    flags = {option: f"--{option.replace('_', '-')} {name}" for option, name in given.items() if option not in reached}
    return [f"{flag} reaches none of these layers in {registry.name}" for flag in flags.values()]


def _own_options(request: AttentionRequest) -> list[str]:
    """The options that reach a request where the registry has no data on options, the first that is given counts."""
    options = [option for option, role in _OWN.items() if request.role == role]
    if request.phase == "prefill" and request.attention != "mha":
        options.append("prefill_backend")
    return [*options, "backend"]
