"""The facts of one layer of a model, and the request that follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attnreg.models.fields import Check, ConfigFields, flag, integer, positive
from attnreg.models.states import DIMENSIONS, StateDims
from attnreg.request import AttentionRequest, features_of
from attnreg.selection.question import UNREAD as UNREAD

# kinds of layers without softmax attention, and their usual names
MIXERS = {"linear": "linear attention", "mamba": "Mamba", "conv": "convolution"}

# values of `causal` for layers in which multimodal tokens of a prompt see each other -> the features of their requests
PREFIXES = {"prefix": ("mm_prefix",), "prefix_in_window": ("mm_prefix", "mm_prefix_in_window")}


def _causal(fields: ConfigFields, name: str, value: Any) -> Any:
    return value if isinstance(value, str) and value in PREFIXES else flag(fields, name, value)


def _word(fields: ConfigFields, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise fields.error(name, "expected a word")
    return value


_COUNT, _ANY_SIZE = integer(1), integer(0)
# fact of an attention call, or `layers` -> the check of its value
CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("layers", "heads", "kv_heads", "head_size", "head_size_v"), _COUNT),
    **dict.fromkeys(("window", "chunk", "sparse_blocks", "compress"), _COUNT),
    **dict.fromkeys(("sinks", "alibi", "bias", "yarn_scale", "mla.used", "indexer.used", "indexer.own"), flag),
    **dict.fromkeys(("softcap", "scaling"), positive),
    **dict.fromkeys(("attention", "form"), _word),
    "causal": _causal,
    **dict.fromkeys(("mla.kv_lora_rank", "mla.q_lora_rank", "mla.v_head_dim"), _COUNT),
    **dict.fromkeys(("mla.qk_nope_head_dim", "mla.qk_rope_head_dim"), _ANY_SIZE),
    **dict.fromkeys(("indexer.index_n_heads", "indexer.index_head_dim", "indexer.index_topk"), _COUNT),
    **dict.fromkeys((f"state.{name}" for name in DIMENSIONS), _COUNT),
    **dict.fromkeys(("state.kind", "state.dtype"), _word),
    "state.used": flag,
}


@dataclass(frozen=True)
class AbsorbedMla:
    """The latent form of MLA, as the decode kernel and the KV cache have it; sizes in elements per token."""

    num_kv_heads: int
    head_size: int
    head_size_v: int


@dataclass(frozen=True)
class MlaIndexer:
    """The indexer of sparse MLA; ``own`` is False if the layer uses the tokens that an earlier layer chose."""

    own: bool
    index_n_heads: int
    index_head_dim: int
    index_topk: int


@dataclass(frozen=True)
class MlaDims:
    """The dimensions of multi-head latent attention, in elements; ``form`` names a form other than DeepSeek-V3's."""

    kv_lora_rank: int | None
    q_lora_rank: int | None
    qk_nope_head_dim: int | None
    qk_rope_head_dim: int
    v_head_dim: int | None
    absorbed: AbsorbedMla
    indexer: MlaIndexer | None = None
    form: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """The facts of one attention call of a layer. Sizes are in elements per head; for MLA those of the expanded call.

    ``kind`` is full, sliding, chunked, cross, encoder (bidirectional) or vision. A layer without softmax attention is
    linear, mamba or conv; it has no sizes and no ``request``. Nor has an ``unread`` layer, whose attention is not
    known. ``sliding_window`` is the number of keys that a causal query sees, its own included. If ``causal`` is False,
    it is the distance that a query sees on either side.
    ``causal`` is "prefix" if a prompt's multimodal tokens see each other in both directions, "prefix_in_window" if they
    do so only inside the window. ``chunk`` is the length of the chunks in tokens: a query sees the keys of its own
    chunk. ``bias`` is an additive score bias. ``kv_shared_from`` is the layer whose keys and values this one reads.
    ``compress``: beside the window there is one key for each ``compress`` tokens. ``state`` is the state of a layer
    without softmax attention, None if it is not known. ``part`` is the field of the model's config that holds the
    layer's config; "" for the text model or the whole.
    """

    layer_idx: int
    kind: str
    attention: str | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    head_size_v: int | None = None
    sliding_window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    softcap: float | None = None
    alibi: bool = False
    causal: bool | Literal["prefix", "prefix_in_window"] = True
    bias: bool = False
    mla: MlaDims | None = None
    scaling: float | None = None
    kv_shared_from: int | None = None
    sparse_blocks: int | None = None
    compress: int | None = None
    state: StateDims | None = None
    part: str = ""
    request: AttentionRequest | None = None

    def changed(self, **changes: Any) -> LayerFacts:
        """A copy with some facts replaced. `dataclasses.replace` takes ten times as long, and models have many layers.

        Raises TypeError for an unknown name.
        """
        if unknown := changes.keys() - self.__dict__.keys():
            raise TypeError(f"LayerFacts has no {', '.join(sorted(unknown))}")
        out = object.__new__(LayerFacts)
        out.__dict__.update(self.__dict__, **changes)
        return out

    @property
    def numbers(self) -> tuple[tuple[str, float], ...]:
        """The numbers of its features, as arguments of `attnreg.runtime.layer.Attention`.

        A window is the number of keys from the query's own to the last visible one on a side, both included.
        """
        window = self.sliding_window
        if window is not None and not self.causal:
            window += 1
        named = {"chunk": self.chunk, "sliding_window": window, "softcap": self.softcap}
        return tuple((name, number) for name, number in named.items() if number is not None)


def request_of(facts: LayerFacts, attn_type: str, given: dict[str, Any]) -> AttentionRequest | None:
    """The request of a layer; ``given`` holds the fields that do not come from the model."""
    if facts.head_size is None:
        return None
    fields = {**given, "num_heads": facts.num_heads, "num_kv_heads": facts.num_kv_heads, "head_size": facts.head_size}
    if facts.head_size_v != facts.head_size:
        fields["head_size_v"] = facts.head_size_v
    role = "encoder" if attn_type == "encoder" and fields["role"] == "target" else fields["role"]
    if facts.kind == "cross":
        attn_type = "encoder_decoder"
    elif facts.causal:
        attn_type = "decoder"
    if attn_type in ("encoder", "encoder_only"):
        # it has no KV cache, so the dtype and the block size of the cache do not matter
        fields |= {"kv_dtype": "auto" if fields["kv_dtype"] else None, "block_size": None}
    fields["role"] = "vision" if facts.kind == "vision" else role
    if facts.mla:
        fields |= _latent(facts.mla) | {"attention": facts.attention}
    features = features_of(
        attn_type=attn_type,
        causal=facts.causal is not False,
        sliding_window=facts.sliding_window,
        softcap=facts.softcap,
        sinks=facts.sinks,
        alibi=facts.alibi,
        score_bias=facts.bias,
        sparse_blocks=facts.sparse_blocks,
    )
    # `mm_prefix_in_window` needs a window
    prefixes = PREFIXES.get(str(facts.causal), ())[: 1 if facts.sliding_window is None else 2]
    features |= {*prefixes}
    return AttentionRequest(**fields, attn_type=attn_type, features=features)


def of_layers(layers: Iterable[LayerFacts]) -> dict[str, Any]:
    """Facts of a whole model: its attention type, its query heads, whether its layers have several head sizes, and
    whether one has no window.

    Layers of towers do not count. ``queries_per_kv_head`` is the least of the layers, and None if some have one query
    head for each KV head and others have more.
    """
    facts = [*layers]
    asked = [f.request for f in facts if f.request is not None and not f.part and f.kind != "vision"]
    types = {request.attn_type for request in asked}
    decoders = [request for request in asked if request.attn_type == "decoder"]
    widths = {request.head_size for request in decoders}
    several = len(widths) > 1 if widths else None
    groups = {r.num_heads // r.num_kv_heads for r in decoders if r.num_heads and r.num_kv_heads}
    kinds = ("encoder_decoder", "decoder", "encoder_only", "encoder")
    return {
        "attn_type": next((kind for kind in kinds if kind in types), None),
        "num_heads": max((request.num_heads or 0 for request in asked), default=0) or None,
        "queries_per_kv_head": min(groups, default=None) if 1 not in groups or groups == {1} else None,
        "head_size": widths.pop() if len(widths) == 1 else None,
        "uneven_head_sizes": several,
        "hybrid": any(f.kind in MIXERS for f in facts) or None,
        "full": any("sliding_window" not in request.features for request in asked) if asked else None,
    }


def _latent(mla: MlaDims) -> dict[str, int | None]:
    """The fields of a request for the latent form of MLA."""
    absorbed = {name: getattr(mla.absorbed, name) for name in ("num_kv_heads", "head_size", "head_size_v")}
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    dimensions = {name: getattr(mla, name) for name in names}
    return {**absorbed, **dimensions, "index_topk": mla.indexer.index_topk if mla.indexer else None}
