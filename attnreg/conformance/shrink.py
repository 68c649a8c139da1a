"""Shrinks a refuted case: the fewest features, then the plainest values and the smallest sizes, that still fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnreg.conformance.claims import Claims
    from attnreg.conformance.trial import Case

# the most cases that are tried for one refuted case
MOST_TRIES = 60
# sets with up to this many features are all tried; larger ones lose one feature at a time
_ALL_SETS = 2
# facets in the order of shrinking
_FACETS = ("storage", "kv_dtype", "attn_type", "head_size_v", "dtype", "lengths", "heads", "head_size", "block_size")
# the plainest batches, the plainest first
_LENGTHS = ("single", "decode")


def shrunk(case: Case, claims: Claims, fails: Callable[[Case], bool]) -> Case:
    """The plainest case that still fails, starting from one that does.

    The backend accepts every case that is tried. A set of one or two features is the smallest that fails; larger sets
    lose features one by one. ``fails`` runs a case; it is called at most `MOST_TRIES` times.
    """
    tried: dict[Case, bool] = {case: True}

    def refuted(settings: Mapping[str, Any]) -> Case | None:
        """The case of some settings, if it is another one and fails."""
        candidate = claims.case(settings)
        if candidate is None or (candidate not in tried and len(tried) > MOST_TRIES):
            return None
        if candidate not in tried:
            tried[candidate] = fails(candidate)
        return candidate if tried[candidate] else None

    case = _with_fewest_features(case, refuted)
    for facet in _FACETS:
        for value in _plainer(facet, _settings(case), claims):
            if (smaller := refuted({**_settings(case), facet: value})) is not None:
                case = smaller
                break
    return case


def explains(smallest: Case, case: Case) -> bool:
    """Whether a case has all features of a shrunk one: both may have the same fault."""
    return smallest.request.features <= case.request.features


def _with_fewest_features(case: Case, refuted: Callable[[Mapping[str, Any]], Case | None]) -> Case:
    features = sorted(case.request.features)
    plain = {name: value for name, value in _settings(case).items() if name not in features}
    for size in range(min(_ALL_SETS + 1, len(features))):
        for some in combinations(features, size):
            if (found := refuted({**plain, **dict.fromkeys(some, True)})) is not None:
                return found
    for feature in features:
        settings = {name: value for name, value in _settings(case).items() if name != feature}
        case = refuted(settings) or case
    return case


def _settings(case: Case) -> dict[str, Any]:
    """The settings of a case, as `Claims.case` takes them."""
    request = case.request
    names = ("attention", "attn_type", "dtype", "kv_dtype", "block_size", "head_size", "head_size_v")
    settings = {name: getattr(request, name) for name in names}
    settings |= {"heads": (request.num_heads, request.num_kv_heads), "lengths": case.lengths, "storage": case.storage}
    return settings | dict.fromkeys(request.features, True)


def _plainer(facet: str, settings: Mapping[str, Any], claims: Claims) -> Iterator[Any]:
    """The plainer values of a facet, the plainest first."""
    current, values = settings[facet], claims.dimensions.get(facet, ())
    if facet in ("heads", "head_size", "block_size"):
        # the smallest first
        yield from sorted(value for value in values if value is not None and current is not None and value < current)
        return
    plain = _LENGTHS if facet == "lengths" else values[:1]
    # if the current batch is one of the plainest, only plainer ones are
    yield from plain[: plain.index(current)] if current in plain else plain
