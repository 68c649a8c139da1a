"""Requests, choices and traces in words, for every command and message that prints one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from attnreg.language.facets import ordinary

if TYPE_CHECKING:
    from attnreg.errors import Location
    from attnreg.request import AttentionRequest
    from attnreg.selection.trace import Candidate, Reason, Selection

# feature -> its phrase without and with a number, in the order in which a request's features are printed; a feature
# that is not listed is printed as it is
_PHRASES = {
    "sliding_window": ("sliding window", "sliding window {}"),
    "chunk": ("chunks", "chunks of {}"),
    "sinks": ("sinks", "sinks"),
    "softcap": ("softcap", "softcap {:g}"),
    "alibi": ("ALiBi", "ALiBi"),
    "score_bias": ("score bias", "score bias"),
    "sparse_blocks": ("sparse blocks", "sparse blocks of {}"),
    "mm_prefix": ("multimodal prefix", "multimodal prefix"),
    "non_causal": ("bidirectional", "bidirectional"),
}
_PLACES = {word: place for place, word in enumerate(_PHRASES)}
# fields that are printed only where they differ from these
_USUAL = {name: ordinary(name) for name in ("attention", "attn_type", "role", "phase")}


def head_words(num_heads: int | None, num_kv_heads: int | None, head_size: int, head_size_v: int | None = None) -> str:
    """``64/8 heads of 64``: query and KV heads, and elements per head; one number where two are equal or one is None.

    ``head size 64`` where ``num_heads`` is None.
    """
    size = f"{head_size}" if head_size_v in (None, head_size) else f"{head_size}/{head_size_v}"
    if num_heads is None:
        return f"head size {size}"
    heads = f"{num_heads}" if num_kv_heads in (None, num_heads) else f"{num_heads}/{num_kv_heads}"
    return f"{heads} head{'s' * (heads != '1')} of {size}"


def feature_words(asks: Mapping[str, object]) -> list[str]:
    """The features of a layer in words: ``["sliding window 128", "sinks"]``.

    asks: feature -> its number; True where it has none or none is known, None or False where the layer lacks it.
    """
    out = []
    for feature, number in asks.items():
        plain, numbered = _PHRASES.get(feature, (feature, f"{feature} {{}}"))
        if number is True:
            out.append(plain)
        elif number is not None and number is not False:
            out.append(numbered.format(number))
    return out


def request_words(
    request: AttentionRequest, numbers: Mapping[str, float | None] | None = None, *, without: Collection[str] = ()
) -> list[str]:
    """A request in words: its heads, its dtypes, what is unusual about it, and its features.

    numbers: feature -> its number, where it is known (the width of a window). without: fields to leave out.
    """
    words = [head_words(request.num_heads, request.num_kv_heads, request.head_size, request.head_size_v)]
    words.append(request.dtype)
    # encoders keep no KV cache, so only an explicit dtype of it is printed
    if request.attn_type not in ("encoder", "encoder_only") or request.kv_dtype not in (None, "auto"):
        words.append(f"KV cache {request.kv_dtype or 'not given'}")
    unusual = ((name, getattr(request, name), usual) for name, usual in _USUAL.items() if name not in without)
    words += [value for _, value, usual in unusual if value != usual]
    ordered = sorted(request.features, key=lambda feature: (_PLACES.get(feature, len(_PLACES)), feature))
    known = numbers or {}
    return words + feature_words({f: True if known.get(f) is None else known[f] for f in ordered})


def layer_words(request: AttentionRequest) -> str:
    """``target layers (64/8 heads of 64, bfloat16, KV cache auto, sinks)``."""
    return f"{request.role} layers ({', '.join(request_words(request, without=('role',)))})"


def how_chosen(selection: Selection) -> str:
    """How a backend was chosen: ``4th choice of 5 (order rocm/mha, priorities.yaml:31)``.

    Also ``requested``, ``required by mine.yaml:3``, ``preferred by mine.yaml:3 (order …)``; the order alone where
    nothing was chosen.
    """
    chosen, choice, order = selection.chosen, selection.choice, selection.order
    if selection.requested:
        return f"required by {choice.where.short}" if choice else "requested"
    place = f"(order {order.title}, {order.where.short})" if order else "(no order for this platform)"
    if chosen is None:
        return place
    if choice is not None and chosen.rank == 1:
        return f"preferred by {choice.where.short} {place}"
    return f"{_ordinal(chosen.rank)} choice of {len(selection.candidates)} {place}"


def answer_sentence(selection: Selection) -> str:
    """A selection in one line: the backend, the layers, how it was chosen, and the registry."""
    title = selection.chosen.title if selection.chosen else "no backend"
    return f"{title} for {layer_words(selection.request)}: {how_chosen(selection)}; {selection.registry.title}"


def verdict_words(candidate: Candidate, reasons: Iterable[Reason] | None = None) -> list[tuple[str, Location]]:
    """Each reason against a candidate that was not chosen, or that it ranks lower, with the line of data.

    reasons: reasons in place of the candidate's own, for platforms that share a verdict but differ in values.
    """
    printed = candidate.reasons if reasons is None else reasons
    return [(r.text, r.where) for r in printed] or [("valid too, ranked lower", candidate.where)]


def trace_lines(selection: Selection, names: Collection[str | None] | None = None) -> list[str]:
    """The trace in plain text: a line for each reason against a candidate, and how the chosen one was chosen.

    names: the backends to print; all of them, if None.
    """
    shown = [c for c in selection.candidates if names is None or c.name in names]
    width = max((len(c.title) for c in shown), default=0)
    lines = []
    for candidate in shown:
        if candidate is selection.chosen:
            texts = [how_chosen(selection)]
        else:
            texts = [f"{text}  [{where.short}]" for text, where in verdict_words(candidate)]
        heads = (candidate.title, *[""] * (len(texts) - 1))
        lines += [f"{head:<{width}}  {text}" for head, text in zip(heads, texts, strict=True)]
    return lines


def _ordinal(rank: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(rank if rank < 20 else rank % 10, "th")
    return f"{rank}{suffix}"
