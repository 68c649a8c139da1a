"""Stand-ins for the parts of SGLang 0.5.23 that attnreg's backend touches, with the names that SGLang gives them.

`tests/integrations/sglang/test_record.py` holds every name against the record of SGLang's interfaces.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

BATCH = "sglang.srt.model_executor.forward_batch_info"
ForwardMode = enum.Enum(
    "ForwardMode",
    "EXTEND DECODE MIXED IDLE TARGET_VERIFY DRAFT_EXTEND_V2 PREBUILT SPLIT_PREFILL DLLM_EXTEND",
)
AttentionType = enum.Enum(
    "AttentionType",
    {
        "DECODER": "decoder",
        "DECODER_BIDIRECTIONAL": "decoder_bidirectional",
        "ENCODER_ONLY": "encoder_only",
    },
)
SharedReadEnds = enum.Enum("SharedReadEnds", "PRE_REPLAY IN_REPLAY POST_REPLAY UNKNOWN")
IdSpaceKind = enum.Enum("IdSpaceKind", "FULL SLIDING_WINDOW")


class Mode:
    """A mode with SGLang's questions to it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "DECODE"

    def is_target_verify(self) -> bool:
        return self.name == "TARGET_VERIFY"

    def is_extend(self) -> bool:
        return self.name in ("EXTEND", "MIXED", "TARGET_VERIFY", "SPLIT_PREFILL", "DLLM_EXTEND")

    def is_dllm_extend(self) -> bool:
        return self.name == "DLLM_EXTEND"


class AttentionBackend:
    """The base of backends."""

    kv_index_translator = None
    needs_cpu_seq_lens = True
    extend_dummy_seqs_capped_by_req_pool = False
    forward_metadata: Any = None

    def shared_read_ends(self, fm: Any) -> Any:
        return SharedReadEnds.IN_REPLAY if fm.name in ("DECODE", "TARGET_VERIFY") else SharedReadEnds.UNKNOWN

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **kwargs: Any
    ):  # type: ignore[no-untyped-def]
        call = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return call(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    forward_extend = forward_decode


class RadixAttention(nn.Module):
    """A layer: its numbers, and no scales."""

    def __init__(
        self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id: int, logit_cap: float = 0.0,
        v_head_dim: int = -1, sliding_window_size: int = -1, is_cross_attention: bool = False,
        pos_encoding_mode: str = "NONE", logit_capping_method: str = "tanh",
        attn_type: Any = AttentionType.DECODER, use_irope: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num, self.tp_v_head_num = num_heads, num_kv_heads, num_kv_heads
        self.qk_head_dim, self.v_head_dim = head_dim, head_dim if v_head_dim == -1 else v_head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size = sliding_window_size or -1
        self.is_cross_attention, self.pos_encoding_mode = is_cross_attention, pos_encoding_mode
        self.logit_capping_method, self.attn_type, self.use_irope = logit_capping_method, attn_type, use_irope
        self.k_scale: Any = None
        self.v_scale: Any = None
        self.xai_temperature_len = -1


@dataclass
class KVWriteLoc:
    """Where keys are written."""

    loc: Tensor
    swa_loc: Tensor | None = None
    full_loc: Tensor | None = None
    physical: bool = False

    @classmethod
    def for_batch(cls, forward_batch: Any, *, swa_loc: Tensor | None = None, full_loc: Tensor | None = None) -> Any:
        return cls(forward_batch.out_cache_loc, swa_loc, full_loc, forward_batch.out_cache_loc_is_physical)


class MHATokenToKVPool:
    """Keys and values of layers by slot: the halves of one allocation, as SGLang has them."""

    is_quantized_kv_cache = False

    def __init__(self, slots: int, layers: int, heads: int, size: int, size_v: int, dtype: torch.dtype) -> None:
        self.use_hnd, self.kv_cache_layout, self.dtype = False, "nhd", dtype
        self.written: list[int] = []
        # what nobody has written may be anything finite
        noise = torch.Generator().manual_seed(1)
        self.k_buffer = [torch.randn(slots, heads, size, generator=noise).to(dtype) for _ in range(layers)]
        self.v_buffer = [torch.randn(slots, heads, size_v, generator=noise).to(dtype) for _ in range(layers)]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.k_buffer[layer_id], self.v_buffer[layer_id]

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor, k_scale: Any = None, v_scale: Any = None,
        layer_id_override: int | None = None,
    ) -> None:  # fmt: skip
        index = layer.layer_id if layer_id_override is None else layer_id_override
        self.written.append(index)
        for kept, rows, scale in ((self.k_buffer, cache_k, k_scale), (self.v_buffer, cache_v, v_scale)):
            rows = rows if scale is None or rows.dtype == self.dtype else rows / scale
            kept[index][loc_info.loc] = rows.to(self.dtype)


class MLATokenToKVPool:
    """Latents of layers by slot, each with its rotary part."""

    use_dsa = False

    def __init__(self, slots: int, layers: int, rank: int, rope: int, dtype: torch.dtype) -> None:
        self.kv_lora_rank, self.qk_rope_head_dim, self.kv_cache_dim, self.dtype = rank, rope, rank + rope, dtype
        self.written: list[int] = []
        noise = torch.Generator().manual_seed(1)
        self.kv_buffer = [torch.randn(slots, 1, rank + rope, generator=noise).to(dtype) for _ in range(layers)]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        rows = self.kv_buffer[layer_id]
        return rows, rows[..., : self.kv_lora_rank]

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor | None) -> None:
        self.written.append(layer.layer_id)
        self.kv_buffer[layer.layer_id][loc_info.loc] = cache_k.to(self.dtype)


class SWAKVPool:
    """A pool for full layers and one for layers with windows, whose slots a mapping gives."""

    request_window = None
    swa_req_ring_size = None
    swa_uses_full_indices = False

    def __init__(self, full: Any, windows: Any, layers: dict[int, tuple[int, bool]], mapping: Tensor) -> None:
        self.full_kv_pool, self.swa_kv_pool, self.layers_mapping = full, windows, layers
        self.full_to_swa_index_mapping = mapping
        self.swa_layer_nums = sum(inside for _, inside in layers.values())

    def _of(self, layer_id: int) -> tuple[Any, int]:
        index, inside = self.layers_mapping[layer_id]
        return (self.swa_kv_pool if inside else self.full_kv_pool), index

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        pool, index = self._of(layer_id)
        buffers: tuple[Tensor, Tensor] = pool.get_kv_buffer(index)
        return buffers

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor, *scales: Any) -> None:
        pool, index = self._of(layer.layer_id)
        place = loc_info
        if pool is self.swa_kv_pool:
            place = KVWriteLoc(loc_info.swa_loc[: loc_info.loc.shape[0]])
        pool.set_kv_buffer(layer, place, cache_k, cache_v, *scales, layer_id_override=index)


class HybridLinearKVPool:
    """A pool whose full layers are some of the model's."""

    def __init__(self, full: Any, layers: list[int]) -> None:
        self.full_kv_pool, self._layers = full, layers

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        buffers: tuple[Tensor, Tensor] = self.full_kv_pool.get_kv_buffer(self._layers.index(layer_id))
        return buffers

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor, *scales: Any) -> None:
        index = self._layers.index(layer.layer_id)
        self.full_kv_pool.set_kv_buffer(layer, loc_info, cache_k, cache_v, *scales, layer_id_override=index)


@dataclass
class EagleVerifyInput:
    """Drafts to verify."""

    custom_mask: Tensor | None
    draft_token_num: int
    tree_topk: int = 1
    ragged_verify_layout: Any = None

    def is_draft_input(self) -> bool:
        return False


@dataclass
class ForwardBatch:
    """A step."""

    forward_mode: Mode
    batch_size: int
    req_pool_indices: Tensor
    seq_lens: Tensor
    out_cache_loc: Tensor
    seq_lens_sum: int | None = None
    seq_lens_cpu: Tensor | None = None
    out_cache_loc_is_physical: bool = True
    encoder_lens: Tensor | None = None
    spec_info: Any = None
    extend_seq_lens: Tensor | None = None
    extend_prefix_lens_cpu: list[int] | None = None
    extend_seq_lens_cpu: list[int] | None = None
    multi_item_delimiter_indices: list[Any] | None = None
    # of SGLang's mix-in for DeepSeek's models
    mha_return_lse: bool = False


@dataclass
class Context:
    """SGLang's configuration of a process."""

    deterministic: bool = False
    overlap: bool = False
    pdmux: bool = False
    dcp: int = 1
    cp: int = 1
    algorithm: str | None = None
    topk: int | None = None
    backends: dict[str, Any] = field(default_factory=dict)
    choices: list[str] = field(default_factory=list)


def install(patch: pytest.MonkeyPatch) -> Context:
    """Puts the stand-ins into `sys.modules`, and returns what they answer about the process."""
    context = Context()
    context.backends["triton"] = lambda runner: "SGLang's own"
    contents: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": "0.5.23"},
        "sglang.srt.layers.attention.base_attn_backend": {
            "AttentionBackend": AttentionBackend,
            "SharedReadEnds": SharedReadEnds,
        },
        "sglang.srt.layers.attention.attention_registry": {"ATTENTION_BACKENDS": context.backends},
        "sglang.srt.layers.radix_attention": {"RadixAttention": RadixAttention, "AttentionType": AttentionType},
        "sglang.srt.arg_groups.choices": {"add_attention_backend_choices": context.choices.extend},
        "sglang.srt.mem_cache.kv_loc_plan": {"IdSpaceKind": IdSpaceKind},
        "sglang.srt.mem_cache.memory_pool": {
            "KVWriteLoc": KVWriteLoc,
            "MHATokenToKVPool": MHATokenToKVPool,
            "MLATokenToKVPool": MLATokenToKVPool,
            "HybridLinearKVPool": HybridLinearKVPool,
        },
        "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": SWAKVPool},
        BATCH: {"ForwardBatch": ForwardBatch, "ForwardMode": ForwardMode},
        "sglang.srt.speculative.eagle_info": {"EagleVerifyInput": EagleVerifyInput},
        "sglang.srt.runtime_context": {
            "get_disagg": lambda: SimpleNamespace(enable_pdmux=context.pdmux),
            "get_exec": lambda: SimpleNamespace(
                deterministic=SimpleNamespace(enable_deterministic_inference=context.deterministic),
                overlap=SimpleNamespace(enable_two_batch_overlap=context.overlap),
            ),
            "get_parallel": lambda: SimpleNamespace(attn_dcp_size=context.dcp, attn_cp_size=context.cp),
            "get_spec": lambda: SimpleNamespace(
                speculative_algorithm=context.algorithm, speculative_eagle_topk=context.topk
            ),
        },
    }
    for name in [*sys.modules]:
        # the backend is imported anew, over the stand-ins
        if name in ("sglang", "attnreg.integrations.sglang.backend") or name.startswith("sglang."):
            patch.delitem(sys.modules, name)
    for name, names in contents.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            module = sys.modules.get(package)
            if not isinstance(module, ModuleType):
                module = ModuleType(package)
                module.__path__ = []
                patch.setitem(sys.modules, package, module)
        vars(sys.modules[name]).update(names)
    return context
