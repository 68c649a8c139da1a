"""Verifies that the layer refuses each unclaimed feature and value, with a typed error, before any launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from attnreg.conformance.proof import attend
from attnreg.conformance.trial import Trial, prepare
from attnreg.language.facets import PROVEN
from attnreg.request import AttentionRequest
from attnreg.runtime.interface import SpecError, UnclaimedError
from attnreg.runtime.layer import Attention
from attnreg.selection.refusal import NoBackendError

if TYPE_CHECKING:
    from attnreg.conformance.claims import Claims
    from attnreg.registry import Claim, Variant


class _LaunchedError(Exception):
    """Raised by a call of a kernel module."""


class _NeverCalled:
    """The stand-in for a kernel module that nobody may call."""

    def __getattr__(self, call: str) -> Any:
        raise _LaunchedError(call)


def refusals(claims: Claims, device: torch.device | str = "cpu") -> Iterator[tuple[str, str | None]]:
    """Each attempt with its problem or None: a plain layer with one unclaimed feature or value."""
    for request, facet in _unclaimed_requests(claims):
        yield f"{facet}={_value_of(request, facet)}", _select_problem(claims, request, facet)
    for name, call in _unclaimed_inputs(claims, torch.device(device)):
        try:
            call()
        except (UnclaimedError, SpecError):
            yield name, None
        except _LaunchedError:
            yield name, f"{name} reached the kernels of {claims.backend}, which was not selected for it"
        else:
            yield name, f"{name} was dropped: {claims.backend} was not selected for it, and nothing was raised"


def _unclaimed_requests(claims: Claims) -> Iterator[tuple[AttentionRequest, str]]:
    """Plain requests with one value or feature that no variant of the row claims, and the facet or feature."""
    vocabulary, plain = claims.registry.vocabulary, claims.plain.request
    variants = claims.row.variants
    # single-valued facets of words: every word of the vocabulary is tried
    for facet in (f for f in (*PROVEN, "cache_layout") if f in vocabulary.facets):
        for word in vocabulary.facets[facet].words if vocabulary.facets[facet].kind == "word" else ():
            if not any(_claims(v, facet, word) for v in variants):
                yield _with(plain, facet, word), facet
    for facet in ("block_size", "head_size", "head_size_v", "num_heads", "num_kv_heads"):
        edges = {e for v in variants for c in v.claims if c.facet == facet for e in _around(c)}
        # a claim of `same` has no number
        beside = {plain.head_size - 1, plain.head_size + 1} if facet == "head_size_v" else set[int]()
        for size in sorted(edges | beside):
            if not any(_claims(v, facet, size) for v in variants):
                yield _with(plain, facet, size), facet
    for feature in sorted(vocabulary.features):
        if not any(feature in v.served for v in variants):
            yield replace(plain, features=frozenset({feature})), feature


def _with(request: AttentionRequest, facet: str, value: Any) -> AttentionRequest:
    changes: dict[str, Any] = {facet: value}
    if facet not in (f.name for f in fields(request)):
        changes = {"extra": {**dict(request.extra), facet: value}}
    # KV heads must divide query heads, so the request has only the number to try
    changes |= {other: None for other in ("num_heads", "num_kv_heads") if facet.startswith("num_") and other != facet}
    return replace(request, **changes)


def _claims(variant: Variant, facet: str, value: Any) -> bool:
    """Whether a variant's claim on a facet accepts a value; `any` accepts every value."""
    return all(c.matcher.matches(value) for c in variant.claims if c.facet == facet)


def _around(claim: Claim) -> set[int]:
    numbers = {*claim.matcher.constants, *claim.matcher.moduli, *claim.matcher.mentions}
    return {n + d for n in numbers if isinstance(n, int) for d in (-1, 1) if n + d > 0}


def _value_of(request: AttentionRequest, facet: str) -> Any:
    return True if facet in request.features else request.facts()[facet]


def _select_problem(claims: Claims, request: AttentionRequest, facet: str) -> str | None:
    selection = claims.select(request)
    try:
        Attention.from_selection(selection)
    except NoBackendError:
        about = {f for c in selection.candidates for r in c.reasons for f in r.facets}
        return None if facet in about else f"{facet} is not claimed, and no reason of the refusal names it"
    return f"{facet}={_value_of(request, facet)} is not claimed, and {claims.backend} was made to run it"


def _unclaimed_inputs(claims: Claims, device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Calls that must be refused, by name: each passes a plain layer one input that its request does not announce."""
    selection, request = claims.select(claims.plain.request), claims.plain.request
    per_head = torch.ones(request.num_heads or 1, device=device)
    inputs: dict[str, Any] = {
        "sliding_window": 4, "chunk": 4, "softcap": 2.0, "sinks": per_head, "alibi_slopes": per_head,
        "q_scale": torch.ones(1, device=device), "out_scale": torch.ones(1, device=device),
    }  # fmt: skip
    for name, value in inputs.items():
        yield name, partial(Attention.from_selection, selection, **{name: value})
    facet = claims.registry.vocabulary.facets.get("cache_layout")
    for layout in sorted(facet.words if facet else ()):
        # a form without a cache ignores the layout
        if not any(_claims(v, "cache_layout", layout) for v in claims.row.variants):
            yield f"cache_layout={layout}", partial(Attention.from_selection, selection, kv_layout=layout)
    causal = request.attn_type == "decoder"
    ranges = torch.zeros(1, 1, 2, dtype=torch.int32, device=device)

    def plain_trial() -> tuple[Attention, Trial]:
        trial = prepare(replace(claims.plain, lengths="single"), selection, device, causal=causal)
        assert isinstance(trial.layer, Attention)
        return trial.layer, trial

    def call(**changes: Any) -> None:
        layer, trial = plain_trial()
        layer.module = _NeverCalled()
        attend(trial, replace(trial.batch, **changes), trial.query)

    def with_lse() -> None:
        layer, trial = plain_trial()
        layer.plan(trial.batch)
        layer.module = _NeverCalled()
        lse = torch.empty(request.num_heads or 1, trial.query.shape[0], device=device)
        key, value = (trial.key, trial.value) if trial.cache is None else (None, None)
        out = torch.empty_like(trial.query)
        layer.attend(trial.query, trial.cache, trial.batch, out, key=key, value=value, lse=lse, indices=trial.indices)

    if causal:
        yield "non_causal", lambda: call(causal=False)
        yield "causal_by_request", lambda: call(causal=torch.tensor([False], device=device))
    else:
        yield "asymmetric_window", partial(Attention.from_selection, selection, sliding_window=(1, 3))
    yield "mm_prefix", lambda: call(mm_prefix=ranges)
    yield "tree_mask", lambda: call(tree_mask=torch.ones(4, 4, dtype=torch.bool, device=device))
    yield "lse", with_lse
