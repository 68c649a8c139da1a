"""attnreg inside Hugging Face diffusers: ``model.set_attention_backend("attnreg")``.

    import attnreg.integrations.diffusers as attnreg_diffusers

    attnreg_diffusers.register()
    pipeline.transformer.set_attention_backend("attnreg")

The registry selects a backend for each kind of call. A mask that hides nothing is ignored, whatever its shape and
dtype. A mask that hides the same keys from every query and head, as one for padding does, removes these keys. Any other
mask, a bias, dropout and context parallelism raise `attnreg.UnclaimedError`, because attnreg would have to drop them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from attnreg.integrations.registration import validate_choices, validate_name
from attnreg.integrations.tensors import (
    any_autocast,
    autocast,
    autocasts,
    platform_of,
    refuse_wrapped,
    unknown_dtype,
    without_gradient,
)
from attnreg.loader import default_registry, select
from attnreg.request import AttentionRequest
from attnreg.runtime.interface import BatchMetadata, UnclaimedError
from attnreg.runtime.layer import Attention
from attnreg.selection.trace import Selection, answer_sentence

if TYPE_CHECKING:
    from attnreg.platforms import Platform
    from attnreg.registry import Registry

__all__ = ["register", "selections"]

NAME = "attnreg"
# the number that models of diffusers add to the scores of hidden keys; exp(-10000) is 0 in every dtype
HIDDEN = -10000.0
_KEPT_BATCHES = 64
_log = logging.getLogger("attnreg.integrations.diffusers")
_engines: dict[str, _Engine] = {}


def register(
    name: str = NAME,
    registry: Registry | None = None,
    *,
    platform: Platform | None = None,
    backend: str | None = None,
) -> None:
    """Adds ``name`` to diffusers' attention backends; a second call replaces the first.

    registry: the default one, if None. platform: the platform of the requests; by default that of the tensors' device.
    backend: the name of the backend to use, instead of a selection. Raises ValueError for a name that is taken or that
    cannot be looked up, and `RequestError` for other invalid arguments.
    """
    validate_name(name)
    if not name.isidentifier() or name != name.lower():
        raise ValueError(f"the name {name!r} is not a lower-case identifier, which diffusers looks names up by")
    if name in {member.value for member in AttentionBackendName} and name not in _engines:
        raise ValueError(f"the name {name!r} is diffusers' own; use another")
    if registry is None:
        registry = default_registry()
    validate_choices(registry, platform, backend)
    engine = _Engine(name, registry, platform, backend)
    member = _member(name)
    _AttentionBackendRegistry.register(member)(engine.attend)
    # diffusers drops arguments whose names a function lacks; with `_Every` this function gets all, and refuses them
    known = _AttentionBackendRegistry._supported_arg_names
    known[member] = _Every(known[member])
    _engines[name] = engine


def selections(name: str = NAME) -> tuple[Selection, ...]:
    """The selections behind the calls so far, one for each kind of call."""
    if name not in _engines:
        raise ValueError(f"{name!r} is not registered; call register(name={name!r})")
    return tuple(layer.selection for layer in _engines[name].layers.values())


class _Every(set[str]):
    """A set that holds every name."""

    def __contains__(self, name: object) -> bool:
        return True


def _member(name: str) -> AttentionBackendName:
    """The member of diffusers' enumeration with this value, added if missing: diffusers looks names up there."""
    try:
        return AttentionBackendName(name)
    except ValueError:
        member = str.__new__(AttentionBackendName, name)
        member._name_, member._value_ = name.upper(), name
        AttentionBackendName._member_names_.append(member._name_)
        AttentionBackendName._member_map_[member._name_] = member
        AttentionBackendName._value2member_map_[name] = member
        return member


def _version(mask: Tensor) -> int | None:
    """PyTorch's count of a mask's changes in place; None if the count is not reliable: then each call reads the mask.

    PyTorch does not count changes of a tensor made in inference mode. Nor does it count those that other code makes in
    host memory, which may be NumPy's; to read host memory needs no wait.
    """
    return None if mask.is_inference() or mask.is_cpu else mask._version


def _rows(x: Tensor) -> Tensor:
    """[batch * tokens, heads, size] from [batch, tokens, heads, size], each head's numbers contiguous for kernels."""
    x = x.flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


class _Kept(NamedTuple):
    """The keys that a mask leaves: their rows among [batch * keys], None for all, and how many each sequence has."""

    rows: Tensor | None
    counts: list[int]


class _Engine:
    """An attention function of diffusers, with the registry that decides and the layers that run its calls."""

    def __init__(self, name: str, registry: Registry, platform: Platform | None, backend: str | None) -> None:
        self.name, self.registry, self.backend = name, registry, backend
        self.layers: dict[Any, Attention] = {}
        self._platform = platform
        self._batches: dict[Any, BatchMetadata] = {}
        # the latest mask, its version, the shape it was read for, and the keys that it leaves
        self._mask: tuple[ref[Tensor], int, tuple[int, ...], _Kept] | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
        **more: Any,
    ) -> Tensor:
        """diffusers' attention function: [batch, queries, heads, size_v].

        query [batch, queries, heads, size], key and value [batch, keys, KV heads, size(_v)]. attn_mask: as PyTorch's
        `scaled_dot_product_attention` takes it, or [batch, keys]. Under autocast, query, key and value are cast as
        PyTorch's attention casts them. Raises `NoBackendError` and `UnclaimedError`.
        """
        if any_autocast() and autocasts(query.device):
            query, key, value = autocast(query, key, value)
            # without autocast: a backend accumulates in float32, as it claims
            with torch.autocast(query.device.type, enabled=False):
                answer: Tensor = self.attend(
                    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse,
                    _parallel_config, **more,
                )  # fmt: skip
            return answer
        self._refuse(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, return_lse, _parallel_config, more)
        refuse_wrapped(query, key, value, attn_mask, cure="use another attention backend")
        with torch.no_grad():
            kept = None if attn_mask is None else self._kept(attn_mask, query, key)
            rows = None if kept is None else kept.rows
            attn_type = "decoder" if is_causal else "encoder_decoder"
            if not is_causal and rows is None and query.shape[1] == key.shape[1]:
                attn_type = "encoder_only"
            layer = self._layer(query, key, value, attn_type, scale)
            q, k, v = (_rows(x) for x in (query, key, value))
            if rows is not None:
                k, v = k[rows], v[rows]
            counts = [key.shape[1]] * len(key) if kept is None else kept.counts
            batch = self._batch(query, counts, is_causal)
            out = layer.forward(q, k, v, None, batch)
        out = out.view(*query.shape[:3], value.shape[3])
        return without_gradient(out, query, key, value, attn_mask, cure="train with another attention backend")

    def _refuse(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        causal: bool,
        grouped: bool,
        lse: bool,
        parallel: Any,
        more: dict[str, Any],
    ) -> None:
        """Raises `UnclaimedError` for arguments that attnreg would have to drop."""
        given = {name for name, argument in more.items() if argument is not None and argument is not False}
        reasons = {
            f"it does not know {', '.join(sorted(given))}": given,
            f"dropout_p is {dropout}": dropout,
            "it returns no log-sum-exp": lse,
            "it has no context parallelism": parallel is not None,
            "is_causal and attn_mask are both given": causal and mask is not None,
            f"queries are of {len(query)} sequences, and keys of {len(key)}": len(query) != len(key),
            f"a causal call has {query.shape[1]} queries and {key.shape[1]} keys": causal
            and query.shape[1] != key.shape[1],
            f"{query.shape[2]} query heads share {key.shape[2]} KV heads without enable_gqa": not grouped
            and query.shape[2] != key.shape[2],
        }
        found = [reason for reason, holds in reasons.items() if holds]
        if found:
            raise self._unclaimed("; ".join(found))

    def _unclaimed(self, why: str) -> UnclaimedError:
        return UnclaimedError(f"{self.name} cannot run this call: {why}; diffusers' `native` backend may", self.name)

    def _kept(self, mask: Tensor, query: Tensor, key: Tensor) -> _Kept:
        """The keys that a mask leaves; a device's mask is read once for the layers that share it."""
        shape = (*query.shape[:3], key.shape[1])
        version = _version(mask)
        if self._mask is not None and version is not None:
            latest, its_version, its_shape, kept = self._mask
            if latest() is mask and (its_version, its_shape) == (version, shape):
                return kept
        kept = self._read(mask, shape)
        self._mask = None if version is None else (ref(mask), version, shape, kept)
        return kept

    def _read(self, mask: Tensor, shape: tuple[int, ...]) -> _Kept:
        size, queries, heads, keys = shape
        # diffusers' native backend reads a mask of two dimensions like this
        mask = mask[:, None, None] if mask.ndim == 2 and mask.shape == (size, keys) else mask
        try:
            mask.expand(size, heads, queries, keys)
        except RuntimeError:
            found, wanted = list(mask.shape), [size, heads, queries, keys]
            raise self._unclaimed(f"attn_mask is {found}, which does not become {wanted}") from None
        visible = self._visible(mask)
        if bool(visible.all()):
            return _Kept(None, [keys] * size)
        # compared before it is expanded: a mask of keys alone is small
        visible = visible.view(*(1,) * (4 - visible.ndim), *visible.shape)
        first = visible[:, :1, :1]
        if not bool((visible == first).all()):
            raise self._unclaimed("attn_mask hides other keys from some queries or heads than from others")
        seen = first[:, 0, 0].expand(size, keys)
        counts = seen.sum(1).tolist()
        if 0 in counts:
            raise self._unclaimed("attn_mask hides every key of a sequence")
        return _Kept(seen.flatten().nonzero()[:, 0], counts)

    def _visible(self, mask: Tensor) -> Tensor:
        """True where a key takes part, in the mask's own shape."""
        if mask.dtype == torch.bool:
            return mask
        if not mask.is_floating_point():
            raise self._unclaimed(f"attn_mask is {mask.dtype}; a mask is boolean, or is added to the scores")
        visible = mask == 0
        if not bool((visible | (mask <= HIDDEN)).all()):
            raise self._unclaimed("attn_mask is a bias: it adds other numbers than 0 and -inf to the scores")
        return visible

    def _batch(self, query: Tensor, counts: list[int], causal: bool) -> BatchMetadata:
        kind = (query.shape[1], tuple(counts), causal, query.device)
        if kind not in self._batches:
            while len(self._batches) >= _KEPT_BATCHES:
                del self._batches[next(iter(self._batches))]
            lens = [query.shape[1]] * len(query)
            self._batches[kind] = BatchMetadata.build(lens, counts, device=query.device, causal=causal)
        return self._batches[kind]

    def _layer(self, query: Tensor, key: Tensor, value: Tensor, attn_type: str, scale: float | None) -> Attention:
        heads, kv_heads, size, size_v = query.shape[2], key.shape[2], query.shape[3], value.shape[3]
        kind = (heads, kv_heads, size, size_v, query.dtype, query.device, attn_type, scale)
        if kind not in self.layers:
            dtype = str(query.dtype).removeprefix("torch.")
            unknown = unknown_dtype(dtype, self.registry)
            if unknown is not None:
                raise self._unclaimed(unknown)
            request = AttentionRequest(
                attn_type=attn_type,
                head_size=size,
                head_size_v=None if size_v == size else size_v,
                num_heads=heads,
                num_kv_heads=kv_heads,
                dtype=dtype,
            )
            platform = self._platform or platform_of(query.device, self.registry)
            selection = select(request, platform, self.registry, self.backend, to_run=True)
            self.layers[kind] = Attention.from_selection(selection, softmax_scale=scale)
            _log.info("%s", answer_sentence(selection))
            for warning in selection.warnings:
                _log.warning("%s", warning)
        return self.layers[kind]
