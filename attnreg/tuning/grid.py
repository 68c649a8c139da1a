"""The grid: the workloads of the models' layers, and the backends that can serve each of them here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from attnreg.analysis.timings.rules import names_of
from attnreg.analysis.timings.samples import MOST, Cell
from attnreg.errors import RequestError
from attnreg.loader import unloadable
from attnreg.selection.selector import evaluate

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Registry
    from attnreg.request import AttentionRequest
    from attnreg.selection.question import Question

    # the numbers of a layer's features, in a cell's form
    Numbers = tuple[tuple[str, Any], ...]

# the engines' default block sizes in tokens; FlashMLA's kernels read 64
BLOCK = {"mha": 16, "mla": 64, "mla_sparse": 64}
# numbers for a layer without a model: the user names its features, but not their numbers
USUAL: dict[str, Any] = {"asymmetric_window": (1023, 127), "chunk": 1024, "sliding_window": 1024, "softcap": 50.0}
_WITHOUT_CACHE = ("encoder", "encoder_only")


class Workload(NamedTuple):
    """A batch: the number of requests, the queries of each, and the earlier keys of each."""

    requests: int
    queries: int
    context: int


# for a GPU few and many requests of each phase, and a chunk of a long prompt; for a processor the same, but smaller
WORKLOADS = {
    "gpu": (Workload(32, 1, 4095), Workload(4, 2048, 0), Workload(1, 1, 8191), Workload(1, 512, 7680)),
    "cpu": (Workload(4, 1, 255), Workload(1, 128, 0), Workload(1, 1, 1023), Workload(1, 64, 448)),
}


class PlannedCell(NamedTuple):
    """A cell of the grid, the backends to time in it, and the reasons against the platform's other backends."""

    cell: Cell
    backends: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]


def workloads_of(decode: Sequence[tuple[int, int]], prefill: Sequence[tuple[int, int]], kind: str) -> list[Workload]:
    """The workloads that a user names as (requests, length), or the usual ones.

    Raises `RequestError` for a workload of a single token, and for one that is too large for a batch.
    """
    named = [Workload(n, 1, length - 1) for n, length in decode]
    named += [Workload(n, length, 0) for n, length in prefill]
    if any(w.queries == 1 and w.context == 0 for w in named):
        raise RequestError("a workload of one token says nothing", "a length is 2 or more")
    if any(max(w) >= MOST for w in named):
        raise RequestError(f"a workload has less than {MOST:,} requests, and tokens of each")
    return named or list(WORKLOADS[kind])


def grid(
    questions: Iterable[Question],
    workloads: Sequence[Workload],
    registry: Registry,
    platform: Platform,
    unfit: Mapping[str, str],
) -> list[PlannedCell]:
    """The cells, each with the backends that are valid and load here; each kind of layer once, then further ones.

    unfit: backends and variants with an unimportable module -> the reason.
    """
    kinds: dict[object, dict[tuple[AttentionRequest, Numbers], None]] = {}
    for question in questions:
        request = None if question.request is None else _measurable(question.request)
        if request is not None:
            kind = replace(request, num_heads=None, num_kv_heads=None)
            kinds.setdefault(kind, {})[request, _numbers(request, question)] = None
    # further heads and windows of a kind come after the first layer of every kind
    layers = [layer for each in zip_longest(*kinds.values()) for layer in each if layer is not None]
    out = []
    for request, numbers in layers:
        names, refused = _usable(request, registry, platform, unfit)
        cells = [Cell(request, *w, numbers) for w in workloads if _fits(request, w)]
        out += [PlannedCell(cell, names, refused) for cell in cells]
    return out


def _numbers(request: AttentionRequest, question: Question) -> Numbers:
    """The numbers of a request's features: the model's, else the usual ones."""
    stated = dict(question.numbers)
    return tuple((name, stated.get(name, usual)) for name, usual in USUAL.items() if name in request.features)


def _measurable(request: AttentionRequest) -> AttentionRequest | None:
    """The request to time, with a block size if it has a cache; None for a form of attention that is not timed."""
    block = BLOCK.get(request.attention)
    if block is None or request.attn_type == "encoder_decoder":
        return None
    heads = request.num_heads or 8
    # all heads share the latents
    kv_heads = request.num_kv_heads or (heads if request.attention == "mha" or _packed(request) else 1)
    request = replace(request, model=None, num_heads=heads, num_kv_heads=kv_heads)
    return replace(request, block_size=None if _packed(request) else request.block_size or block)


def _packed(request: AttentionRequest) -> bool:
    """Whether the layer reads keys without a cache: an encoder's, or the expanded keys of MLA prompts."""
    return request.attn_type in _WITHOUT_CACHE or (request.attention != "mha" and request.phase == "prefill")


def _fits(request: AttentionRequest, workload: Workload) -> bool:
    if request.attn_type in _WITHOUT_CACHE:
        return workload.context == 0
    if request.phase != "any":
        return (request.phase == "prefill") == (workload.queries > 1)
    # MLA prompts have a separate request, except in sparse MLA
    return request.attention != "mla" or workload.queries == 1


def _usable(
    request: AttentionRequest, registry: Registry, platform: Platform, unfit: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The backends that accept a request and load here, and the first reason against each other backend."""
    names, refused = [], []
    for name in names_of(registry, platform, request):
        if name in unfit:
            refused.append((name, unfit[name]))
            continue
        selection = evaluate(request, platform, registry, name, unloadable=unloadable)
        if reasons := selection.against(name):
            refused.append((name, reasons[0]))
        else:
            names.append(name)
    return tuple(names), tuple(refused)
