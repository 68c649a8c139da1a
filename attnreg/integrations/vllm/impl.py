# mypy: disable-error-code="misc"
"""AttnregImpl: one attention layer of vLLM, computed by attnreg's runtime."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_dcp_group
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.v1.attention.backend import AttentionImpl

import attnreg
from attnreg.integrations.vllm.kernels import select_kernel
from attnreg.integrations.vllm.metadata import AttnregMetadata
from attnreg.integrations.vllm.registries import NAME
from attnreg.request import features_of
from attnreg.runtime.interface import KVCache, SpecError
from attnreg.runtime.layer import Attention
from attnreg.runtime.parallel.attention import ContextParallel, refuse_unshardable

_PACKED = ("encoder", "encoder_only")


class AttnregImpl(AttentionImpl):
    """A layer: the numbers that vLLM gives it, and the runtime's layer once the KV cache is known."""

    # decode context parallelism (DCP): ranks share the context of a request, and each has this step's keys
    can_return_lse_for_decode = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        """Raises ValueError, with every reason, for a layer that attnreg's kernels do not serve."""
        if others:
            raise ValueError(f"attnreg knows no argument {', '.join(sorted(others))} of an attention layer")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, float(scale)
        self.sliding_window, self.kv_cache_dtype = sliding_window, kv_cache_dtype
        # 0 is vLLM's value for no softcap
        self.softcap = logits_soft_cap or None
        self.attn_type = str(getattr(attn_type, "value", attn_type))
        self.packed = self.attn_type in _PACKED
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.dtype = torch.get_default_dtype()
        self.features = self._features()
        self._layer: Attention | None = None
        # the facts that the runtime's layer was made for
        self._made_for: tuple[Any, ...] = ()
        # the layer over a cache that ranks share
        self._parallel: ContextParallel | None = None
        # refuses early: before weights are loaded, and before there is a cache
        early = self._new_layer(head_size, None)
        if self.dcp_world_size > 1 and not self.packed:
            self._refuse_ranks(early)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: AttnregMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes key and value to the cache, unless the layer shares another's, and attends.

        Shapes: query and output [tokens, num_heads, head_size], key and value [tokens, num_kv_heads, head_size],
        kv_cache [num_blocks, num_kv_heads, block_size, 2 * head_size] with any strides.
        """
        if output_block_scale is not None:
            raise ValueError("attnreg's kernels write no output that is quantised by blocks")
        if attn_metadata is None:
            # without metadata, vLLM measures the memory of everything else
            return output.fill_(0)
        if self.packed:
            batch = attn_metadata.batch(paged=False)
            attend = self._runtime_layer(layer, output.shape[-1], None, output_scale)
            attend(query, key, value, None, batch, output)
            return output
        cache = self._views(kv_cache)
        runtime = self._runtime_layer(layer, cache.value.shape[3], cache.key.shape[1], output_scale)
        if runtime.spec.quantised:
            dtype = runtime.spec.cache_dtype
            cache = KVCache(cache.key.view(dtype), cache.value.view(dtype))
        if attn_metadata.interleave:
            parallel = self._over_ranks(runtime, attn_metadata.interleave)
            # the runtime refuses a call without keys
            parallel(query, key, value, cache, attn_metadata.shard(parallel), output)  # type: ignore[arg-type]
            return output
        batch = attn_metadata.batch(paged=True)
        if self.kv_sharing_target_layer_name is not None or key is None or value is None:
            runtime.attend(query, cache, batch, output)
        else:
            runtime(query, key, value, cache, batch, output)
        return output

    def _views(self, kv_cache: Tensor) -> KVCache:
        """Keys and values of vLLM's cache, each as [num_blocks, block_size, num_kv_heads, size]."""
        by_token = kv_cache.transpose(1, 2)
        size = self.head_size
        return KVCache(by_token[..., :size], by_token[..., size:])

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Whether the kernels can write the output in fp8 with one scale for all numbers; vLLM's compiler asks."""
        if quant_key != kFp8StaticTensorSym:
            return False
        try:
            select_kernel(self._request(self.head_size, None, {"fp8_output"}))
        except ValueError:
            return False
        return True

    def _runtime_layer(
        self, layer: Any, head_size_v: int, block_size: int | None, out_scale: Tensor | None
    ) -> Attention:
        """The runtime's layer for a cache; made again if the cache's blocks or the scales have been replaced."""
        k_scale, v_scale = (layer._k_scale, layer._v_scale) if self.kv_cache_dtype.startswith("fp8") else (None, None)
        # addresses identify the scales, because the runtime's layer keeps their memory
        made_for = head_size_v, block_size, *map(_address, (k_scale, v_scale, out_scale))
        if self._layer is None or made_for != self._made_for:
            clamps = getattr(layer, "mm_prefix_clamp_sliding_window", False)
            if clamps and self.sliding_window is not None and "mm_prefix" in self.features:
                self.features |= {"mm_prefix_in_window"}
            self._layer = self._new_layer(head_size_v, block_size, k_scale, v_scale, out_scale)
            self._made_for = made_for
        return self._layer

    def _over_ranks(self, runtime: Attention, interleave: int) -> ContextParallel:
        """The runtime's layer over the cache that the ranks of vLLM's group share. All ranks must make it together."""
        if self._parallel is None or self._parallel.layer is not runtime:
            group = get_dcp_group().device_group
            self._parallel = ContextParallel(runtime, group, interleave=interleave, by_head=True)
        return self._parallel

    def _refuse_ranks(self, layer: Attention) -> None:
        """Raises ValueError for a layer whose cache ranks cannot share."""
        if self.kv_sharing_target_layer_name is not None:
            other = self.kv_sharing_target_layer_name
            raise ValueError(
                f"attnreg ({NAME}): the layer reads the keys of {other}, and each rank has a part of them only"
            )
        try:
            refuse_unshardable(layer.spec)
        except SpecError as e:
            raise ValueError(f"attnreg ({NAME}): {e}") from e

    def _new_layer(
        self, head_size_v: int, block_size: int | None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
        out_scale: Tensor | None = None,
    ) -> Attention:  # fmt: skip
        per_head = k_scale is not None and k_scale.numel() > 1
        features = features_of(per_head_quant_scales=per_head, fp8_output=out_scale)
        return Attention.from_selection(
            select_kernel(self._request(head_size_v, block_size, features)),
            softmax_scale=self.scale,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
            k_scale=k_scale,
            v_scale=v_scale,
            out_scale=out_scale,
        )

    def _request(
        self, head_size_v: int, block_size: int | None, features: AbstractSet[str] = frozenset()
    ) -> attnreg.AttentionRequest:
        return attnreg.AttentionRequest(
            head_size=self.head_size,
            head_size_v=head_size_v,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            dtype=str(self.dtype).removeprefix("torch."),
            kv_dtype=None if self.packed else self.kv_cache_dtype,
            block_size=block_size,
            attn_type=self.attn_type,
            features=self.features | features,
        )

    def _features(self) -> frozenset[str]:
        """The features that this layer, its model and the run ask for."""
        from vllm import envs
        from vllm.config import get_current_vllm_config_or_none

        features = set(
            features_of(
                sliding_window=self.sliding_window,
                softcap=self.softcap,
                sinks=self.sinks,
                alibi=self.alibi_slopes,
            )
        )
        if self.attn_type == "decoder":
            # in vLLM each batch, or each request, is causal or not; the layer does not tell
            features |= {"causal_by_request", "non_causal"}
            config = get_current_vllm_config_or_none()
            model = None if config is None else config.model_config
            features |= {"mm_prefix"} if model is not None and model.is_mm_prefix_lm else set()
        features |= {"batch_invariant"} if envs.VLLM_BATCH_INVARIANT else set()
        return frozenset(features)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
