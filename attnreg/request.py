"""AttentionRequest: what one attention layer needs, as facets."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, get_args, get_origin, get_type_hints

from attnreg.errors import RequestError, items_of, plain_word, shown, word_set

if TYPE_CHECKING:
    from typing import Self, Unpack

FacetValue = str | int | bool | None
# 0 has a meaning for some integers: a latent head without a rotary or a nope part
MAX_INTEGER = 2**63 - 1
_FROM_ZERO = {"least": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest:
    """The needs of one attention layer. Immutable and hashable; everything is per layer and per role.

    Sizes are in elements per head, counts are per rank, ``block_size`` is in tokens. ``None`` means not given: it
    constrains nothing. Words (``dtype``, ``kv_dtype``, ``features``, ...) belong to the registry's vocabulary.
    `attnreg.select` checks them, so that a registry can add words. A ``torch.dtype`` stands for its word.
    ``kv_dtype="auto"`` means the model's own dtype.
    ``extra`` has further facets that a registry declares (``{"run_kv_dtype": "turboquant_k8v4"}``); a mapping is
    accepted and stored as sorted pairs.

    ``head_size_v`` is None if it would equal ``head_size``. For MLA ``head_size`` is the width of one cached latent
    (kv_lora_rank + qk_rope_head_dim, 576 for DeepSeek-V3). ``head_size_v`` is the part of it that serves as value
    (512), and ``num_kv_heads`` is 1.

    Raises `RequestError` (a ValueError) for a field of the wrong type or sign, and if ``num_kv_heads`` does not divide
    ``num_heads``.
    """

    head_size: int
    num_heads: int | None = None
    num_kv_heads: int | None = None
    dtype: str = "bfloat16"
    kv_dtype: str | None = "auto"
    block_size: int | None = None
    attention: str = "mha"
    attn_type: str = "decoder"
    role: str = "target"
    phase: str = "any"
    features: frozenset[str] = frozenset()
    head_size_v: int | None = None
    kv_lora_rank: int | None = field(default=None, metadata=_FROM_ZERO)
    qk_nope_head_dim: int | None = field(default=None, metadata=_FROM_ZERO)
    qk_rope_head_dim: int | None = field(default=None, metadata=_FROM_ZERO)
    v_head_dim: int | None = field(default=None, metadata=_FROM_ZERO)
    index_topk: int | None = None
    model: str | None = None
    extra: tuple[tuple[str, FacetValue], ...] = ()
    # the names of extra facets with a bool: they keep requests with True and with 1 apart, which are equal in Python
    _booleans: tuple[str, ...] = field(init=False, repr=False, default=())
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.head_size is None:
            raise RequestError("head_size is None; every request needs one (elements per head, for example 128)")
        for name, least in _INTEGERS:
            value = getattr(self, name)
            if value is not None:
                if type(value) is not int:
                    value = _plain_integer(name, value, least)
                    object.__setattr__(self, name, value)
                if not least <= value <= MAX_INTEGER:
                    limit = f"at least {least}" if value < least else f"at most {MAX_INTEGER:,}"
                    raise RequestError(f"{name} is {shown(value)}; expected {limit}")
        for name, optional in _WORDS:
            value = getattr(self, name)
            if (type(value) is not str or not value) and not (optional and value is None):
                object.__setattr__(self, name, plain_word(name, value))
        if self.num_heads and self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise RequestError(
                f"num_heads is {self.num_heads} and num_kv_heads is {self.num_kv_heads}; "
                "the second must divide the first (each KV head serves a whole group of query heads)"
            )
        if self.head_size_v == self.head_size:
            object.__setattr__(self, "head_size_v", None)
        object.__setattr__(self, "features", word_set("features", self.features))
        object.__setattr__(self, "extra", _extra_pairs(self.extra, self.__class__))
        object.__setattr__(self, "_booleans", tuple(name for name, value in self.extra if type(value) is bool))
        object.__setattr__(self, "_hash", hash(tuple(getattr(self, name) for name in _REQUEST_FIELDS)))

    def __hash__(self) -> int:
        return self._hash

    # the stored hash is not pickled: strings hash differently in another process
    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.__class__, {name: getattr(self, name) for name in _REQUEST_FIELDS})

    def facts(self) -> dict[str, Any]:
        """Facet name -> value, the extra facets included. A new dict each time."""
        return dict(zip(_REQUEST_FACETS, _FACTS(self), strict=True), **dict(self.extra))

    def expanded(self) -> Self:
        """This MLA request in the expanded form that prefill computes: keys and values per head, no shared latent."""
        nope, rope = self.qk_nope_head_dim, self.qk_rope_head_dim
        size = self.head_size if nope is None or rope is None else nope + rope
        return replace(self, phase="prefill", head_size=size, head_size_v=self.v_head_dim, num_kv_heads=self.num_heads)

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as JSON-ready values; `from_dict` reads them back."""
        out: dict[str, Any] = {"head_size": self.head_size}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.init and f.name != "head_size" and value != f.default:
                out[f.name] = value
        if self.features:
            out["features"] = sorted(self.features)
        if self.extra:
            out["extra"] = dict(self.extra)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The request that `to_dict` wrote. Raises `RequestError` for an unknown field, or a missing head_size."""
        if not isinstance(data, Mapping):
            raise RequestError(f"the request is {shown(data)}; expected a mapping of its fields")
        unknown = [name for name in data if name not in _REQUEST_FIELDS]
        if unknown:
            raise RequestError(f"unknown request field {shown(unknown[0])}; known: {', '.join(_REQUEST_FIELDS)}")
        return cls(**{"head_size": None, **data})


def with_extra(facets: Mapping[str, FacetValue]) -> dict[str, Any]:
    """Fields of a request for these facets; facets without a field of their own go to ``extra``."""
    own = {name: value for name, value in facets.items() if name in _REQUEST_FIELDS}
    return own | {"extra": tuple((name, value) for name, value in facets.items() if name not in own)}


class FeatureArguments(TypedDict, total=False):
    """The arguments of `features_of` that have the names of features."""

    sliding_window: object
    asymmetric_window: object
    chunk: object
    softcap: object
    sinks: object
    alibi: object
    score_bias: object
    mm_prefix: object
    sparse_blocks: object
    tree_mask: object
    per_head_quant_scales: object
    fp8_query: object
    fp8_output: object


def features_of(
    *, attn_type: str = "decoder", causal: object = True, **given: Unpack[FeatureArguments]
) -> frozenset[str]:
    """The features that a request must name for a layer, or a batch, with these arguments.

    Each argument but the first two has the name of its feature and may be a number, a tensor or a truth value. None and
    False leave the feature out; any other value asks for it (the contents of tensors are not read). A decoder layer
    that is not ``causal`` asks for ``non_causal``; layers of other types are bidirectional anyway. A sequence of truth
    values, or a tensor of them, asks for ``causal_by_request``. Raises TypeError for an argument of another name.
    """
    known = FeatureArguments.__annotations__
    if unknown := sorted(given.keys() - known.keys()):
        raise TypeError(f"features_of() got an unexpected argument {unknown[0]!r}; it takes {', '.join(known)}")
    by_request = hasattr(causal, "__len__")
    asked = {
        **given,
        "causal_by_request": by_request,
        "non_causal": attn_type == "decoder" and not by_request and not causal,
    }
    return frozenset(feature for feature, value in asked.items() if value is not None and value is not False)


class FieldType(NamedTuple):
    """The type of one field of a request or a platform; ``least`` is the least value of an integer."""

    type: type
    optional: bool
    least: int


def field_types(cls: type[Any]) -> dict[str, FieldType]:
    """Facet -> type, from the annotations of a dataclass whose compared fields, except ``extra``, are facets."""
    hints, out = get_type_hints(cls), dict[str, FieldType]()
    for f in fields(cls):
        if f.init and f.compare and f.name != "extra":
            types = get_args(hints[f.name]) if NoneType in get_args(hints[f.name]) else (hints[f.name],)
            value_type = next(t for t in types if t is not NoneType)
            out[f.name] = FieldType(get_origin(value_type) or value_type, NoneType in types, f.metadata.get("least", 1))
    return out


_TYPES = field_types(AttentionRequest)
_INTEGERS = tuple((name, field_type.least) for name, field_type in _TYPES.items() if field_type.type is int)
_WORDS = tuple((name, field_type.optional) for name, field_type in _TYPES.items() if field_type.type is str)
_REQUEST_FIELDS = tuple(f.name for f in fields(AttentionRequest) if f.init)
_REQUEST_FACETS = tuple(name for name in _REQUEST_FIELDS if name != "extra")
_FACTS = operator.attrgetter(*_REQUEST_FACETS)


def _rebuild(cls: type[AttentionRequest], values: dict[str, Any]) -> AttentionRequest:
    return cls(**values)


def _plain_integer(name: str, value: object, least: int) -> int:
    """A member of an enumeration of integers as an integer. Raises `RequestError` for any other value."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {shown(value)}; expected an integer of at least {least}")
    return int.__int__(value)


def _extra_pairs(
    extra: Mapping[str, FacetValue] | Iterable[tuple[str, FacetValue]], cls: type[AttentionRequest]
) -> tuple[tuple[str, FacetValue], ...]:
    # a mapping, or pairs
    items = None if isinstance(extra, str) else items_of(extra.items() if isinstance(extra, Mapping) else extra)
    pairs: dict[str, FacetValue] = {}
    for item in [None] if items is None else items:
        pair = items_of(item)
        if pair is None or len(pair) != 2:
            raise RequestError(f"extra is {shown(extra)}; expected a mapping of facets to values")
        name, value = plain_word("extra", pair[0]), pair[1]
        if name in _REQUEST_FIELDS:
            raise RequestError(f"extra names {name!r}, which is a field of {cls.__name__}; pass it by keyword")
        if value is not None and not isinstance(value, str | int):
            raise RequestError(f"extra[{name!r}] is {shown(value)}; expected a word, an integer, a boolean or None")
        if isinstance(value, str):
            value = str.__str__(value)
        elif isinstance(value, int) and type(value) is not bool:
            value = int.__int__(value)
            if abs(value) > MAX_INTEGER:
                raise RequestError(f"extra[{name!r}] is {shown(value)}; expected at most {MAX_INTEGER:,}")
        pairs[name] = value
    return tuple(sorted(pairs.items()))
