"""The share of a model's layers that one rank of tensor parallelism computes."""

from __future__ import annotations

import functools
from dataclasses import replace

from attnreg.models.facts import LayerFacts
from attnreg.models.fields import ConfigError
from attnreg.models.groups import ModelLayers, group
from attnreg.request import AttentionRequest


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
