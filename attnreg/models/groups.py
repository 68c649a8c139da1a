"""A model's layers in groups of equal layers, each group in words, and the share of the layers that a rank computes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

from attnreg.models.facts import MIXERS, PREFIXES, UNREAD, LayerFacts, MlaDims
from attnreg.models.fields import ConfigError
from attnreg.request import AttentionRequest
from attnreg.selection.wording import cache_words, facet_words, feature_words, head_words, request_words


@dataclass(frozen=True)
class LayerGroup:
    """Equal layers: their indices, their common request, and the facts of the first.

    changed_prefill: the request of MLA prompts with its label, if the user's options change it. ``named`` are words for
    layers whose number is not known, and which have one index here.
    """

    label: str
    layers: tuple[int, ...]
    request: AttentionRequest | None
    facts: LayerFacts
    changed_prefill: tuple[AttentionRequest, str] | None = None
    named: str = ""

    @property
    def prefill(self) -> tuple[AttentionRequest, str] | None:
        """The expanded request of MLA prompts, and its label; None for other layers."""
        request = self.request
        if request is None or not request.attention.startswith("mla") or request.qk_nope_head_dim is None:
            return None
        return self.changed_prefill or (request.expanded(), f"{self.label} · prefill")


@dataclass(frozen=True)
class ModelLayers:
    """A model's layers in order, and in groups in the order of their first layers.

    ``assumptions`` are sentences about facts that the config leaves open. ``max_length`` is the longest request, in
    tokens, that the config names, else None. ``of_run`` asks whether the engine serves the run, if no layer has a
    request; else None. ``defaults`` has the value that the model's class gives each field that the config lacks.
    """

    name: str
    model_type: str
    dtype: str
    layers: tuple[LayerFacts, ...]
    groups: tuple[LayerGroup, ...]
    assumptions: tuple[str, ...]
    max_length: int | None = None
    of_run: AttentionRequest | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


# all facts of a layer without its own index and the index of the layer whose keys and values it reads
_facts_without_indices = attrgetter(
    *(f.name for f in fields(LayerFacts) if f.name not in ("layer_idx", "kv_shared_from"))
)


def group(layers: Sequence[LayerFacts]) -> tuple[LayerGroup, ...]:
    """The layers in groups of equal layers, in the order of their first layers.

    Two layers can be equal although they read the KV of different layers.
    """
    alike: dict[Hashable, list[LayerFacts]] = {}
    for layer in layers:
        alike.setdefault((_facts_without_indices(layer), layer.kv_shared_from is None), []).append(layer)
    requests = [same[0].request for same in alike.values()]
    kept = [r.kv_dtype for r in requests if r is not None and r.attn_type in ("decoder", "encoder_decoder")]
    several = len({*kept}) > 1
    return tuple(
        LayerGroup(
            _group_label(same[0], several), tuple(dict.fromkeys(x.layer_idx for x in same)), same[0].request, same[0]
        )
        for same in alike.values()
    )


def group_layers(found: LayerGroup) -> str:
    """``18 layers (0, 2, … 34)``; ``MTP layers`` if their number is not known."""
    if found.named:
        return found.named
    count = len(found.layers)
    return f"{count} layer{'s' if count != 1 else ''} ({describe_indices(found.layers)})"


def _group_label(facts: LayerFacts, several: bool) -> str:
    """The label of a layer with the registry's extra facets, and with its KV dtype if the model has ``several``."""
    request = facts.request
    words = [label(facts)]
    if request is not None:
        words += [cache_words(request.kv_dtype)] if several and request.kv_dtype else []
        words += facet_words(dict(request.extra))
    return " · ".join(words)


def label(facts: LayerFacts) -> str:
    """The facts of a layer in one line."""
    if facts.kind in MIXERS:
        return f"{MIXERS[facts.kind]} · no softmax attention"
    if facts.kind == UNREAD:
        return "not known"
    return " · ".join([*_sizes(facts), *words_after_sizes(facts)])


def changed_label(facts: LayerFacts, request: AttentionRequest) -> str:
    """The label of a layer whose request differs from its facts: the words of the request, then the facts it lacks."""
    words = request_words(request, scores(facts), without=("dtype", "model"))
    return " · ".join(dict.fromkeys([*words, *words_after_sizes(facts)]))


def words_after_sizes(facts: LayerFacts) -> list[str]:
    """The words of a label after the sizes: features, keys and place; they do not depend on the request."""
    return [*feature_words(scores(facts)), *_keys(facts), *_place(facts)]


def _sizes(facts: LayerFacts) -> Iterable[str]:
    if facts.mla:
        return _latent(facts, facts.mla)
    assert facts.head_size is not None
    return [head_words(facts.num_heads, facts.num_kv_heads, facts.head_size, facts.head_size_v)]


def _latent(facts: LayerFacts, mla: MlaDims) -> Iterator[str]:
    yield f"{facts.num_heads} heads"
    parts = f" ({mla.kv_lora_rank} + {mla.qk_rope_head_dim})" if mla.kv_lora_rank and mla.qk_rope_head_dim else ""
    yield f"MLA latent {mla.absorbed.head_size}{parts}"
    if mla.indexer:
        yield f"sparse, top {mla.indexer.index_topk}" + ("" if mla.indexer.own else " of an earlier layer")
    if mla.form:
        yield mla.form


def scores(facts: LayerFacts) -> dict[str, object]:
    """Feature -> its number, for features that bound the visible keys of a layer or change its scores."""
    window = facts.sliding_window
    return {
        "sliding_window": f"±{window}" if window is not None and not facts.causal else window,
        "chunk": facts.chunk,
        "sinks": facts.sinks,
        "softcap": facts.softcap,
        "alibi": facts.alibi,
        "score_bias": facts.bias,
        "sparse_blocks": facts.sparse_blocks,
    }


def _keys(facts: LayerFacts) -> Iterator[str]:
    """Words for the keys that a layer reads, if they are not the causal keys of its own tokens."""
    if facts.compress is not None:
        yield f"and a key for each {facts.compress} tokens"
    if facts.kv_shared_from is not None:
        yield "KV of an earlier layer"
    yield from feature_words(dict.fromkeys(PREFIXES.get(str(facts.causal), ()), True))
    if facts.kind == "cross":
        yield "cross-attention"
    else:
        yield from feature_words({"non_causal": not facts.causal})


def _place(facts: LayerFacts) -> Iterator[str]:
    if facts.part:
        yield {"vision_config": "vision tower", "audio_config": "audio tower"}.get(facts.part, facts.part)
    elif facts.kind == "vision":
        yield "vision tower"


def describe_indices(indices: Sequence[int]) -> str:
    """Layer indices in few words: "0–31" for a run, "0, 2, … 34" and "0–4, 6–10, … 54–58" where runs repeat."""
    runs: list[list[int]] = []
    for i in sorted(set(indices)):
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in runs]
    steps = {b[0] - a[0] for a, b in itertools.pairwise(runs)}
    widths = {b - a for a, b in runs[:-1]}
    # the end of the model may cut the last run short
    if len(runs) > 3 and len(steps) == len(widths) == 1 and runs[-1][1] - runs[-1][0] <= min(widths):
        return f"{texts[0]}, {texts[1]}, … {texts[-1]}"
    return ", ".join(texts)


def per_rank(model: ModelLayers, ranks: int) -> ModelLayers:
    """The layers with a rank's share of the heads: query and KV heads divided by the ranks, but at least one KV head.

    Every rank has the latent of MLA. Every rank has a whole tower if its heads do not divide; ``assumptions`` then says
    so. Raises `ConfigError` if the heads of another layer do not divide; the message has the numbers of ranks that do.
    """
    if ranks < 1:
        raise ConfigError(f"tensor parallelism over {ranks} ranks; expected at least 1")
    if ranks == 1:
        return model
    notes = list(model.assumptions)
    layers = []
    for facts in model.layers:
        if facts.state is not None:
            layers.append(facts.changed(state=facts.state.shared_out(ranks)))
        elif facts.num_heads is None or facts.request is None:
            layers.append(facts)
        elif _divides(facts, ranks):
            layers.append(_shared_out(facts, ranks))
        elif facts.kind == "vision" or facts.part:
            heads = (
                f"the {facts.num_heads} heads of {facts.part or 'the vision tower'} do not divide over {ranks} ranks"
            )
            notes.append(f"{heads}; each rank is taken to compute all of them.")
            layers.append(facts)
        else:
            raise ConfigError(f"{model.name}: {_refusal(facts, ranks)}")
    return replace(model, layers=tuple(layers), groups=group(layers), assumptions=tuple(dict.fromkeys(notes)))


def _divides(facts: LayerFacts, ranks: int) -> bool:
    heads, kv_heads = facts.num_heads or 1, facts.num_kv_heads or 1
    return heads % ranks == 0 and (facts.mla is not None or kv_heads % ranks == 0 or ranks % kv_heads == 0)


def _shared_out(facts: LayerFacts, ranks: int) -> LayerFacts:
    assert facts.request is not None
    heads, kv_heads = (facts.num_heads or 1) // ranks, max((facts.num_kv_heads or 1) // ranks, 1)
    own = _with_heads(facts.request, heads, 1 if facts.mla else kv_heads)
    return facts.changed(num_heads=heads, num_kv_heads=kv_heads, request=own)


# the layers of a model have few different requests
@functools.lru_cache(maxsize=256)
def _with_heads(request: AttentionRequest, heads: int, kv_heads: int) -> AttentionRequest:
    return replace(request, num_heads=heads, num_kv_heads=kv_heads)


def _refusal(facts: LayerFacts, ranks: int) -> str:
    heads = facts.num_heads or 1
    fits = [n for n in range(2, heads + 1) if _divides(facts, n)]
    kv = "" if facts.mla or heads % ranks else f" and {facts.num_kv_heads} KV heads"
    cure = f"these do: {', '.join(map(str, fits))}" if fits else "keep each rank whole"
    return f"layer {facts.layer_idx} has {heads} query heads{kv}, which do not divide over {ranks} ranks; {cure}"
