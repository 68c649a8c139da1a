"""A stand-in for FlashInfer's kernels, with the parameters of the record; it computes in float64."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnreg.kernels.flashinfer import record
from support.stand_ins import fake_varlen
from support.stand_ins.fake_aiter import signature_of

FA2, FA3, MLA, XQA, CONTEXT = (
    f"attnreg.kernels.flashinfer.{name}" for name in ("fa2", "fa3", "mla", "xqa", "trtllm_context")
)
MODULES = (
    "attnreg.kernels.flashinfer.trtllm_ragged",
    "attnreg.kernels.flashinfer.prefill",
    FA2,
    FA3,
    MLA,
    XQA,
    CONTEXT,
)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: list[int],
    keys: list[int],
    scale: float,
    causal: bool,
    left: int = -1,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and LSE [rows, heads], to the base 2, of packed requests by their prefix sums.

    left: the keys that a query sees before its own, -1 for all; queries are aligned to the last keys.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    out, lse = query.new_empty(*query.shape[:2], value.shape[2]), torch.empty(query.shape[:2])
    for i in range(len(queries) - 1):
        rows, places = slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])
        # the kernels refuse requests without a query or a key
        assert rows.stop > rows.start
        assert places.stop > places.start
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), key[places].double()) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        after = places.stop - places.start - (rows.stop - rows.start)
        seen = torch.ones(scores.shape[1:], dtype=torch.bool)
        if causal:
            scores.masked_fill_(seen.triu(1 + after), -torch.inf)
        if left >= 0:
            scores.masked_fill_(seen.tril(after - left - 1), -torch.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[places].double()).to(out.dtype)
        lse[rows] = (scores.logsumexp(-1) / torch.log(torch.tensor(2.0))).float().t()
    return out, lse


def _of_cache(call: dict[str, Any], starts: list[int], causal: bool) -> tuple[Tensor, Tensor]:
    """Output and LSE of queries over pages, and what NVIDIA's kernels assert of both."""
    query, caches, lengths = call["query"], call["kv_cache"], call["seq_lens"]
    assert query.is_contiguous()
    assert call["out"].is_contiguous()
    assert call["out"].shape == query.shape
    assert query.dtype == call["out"].dtype == caches[0].dtype == caches[1].dtype
    assert caches[0].stride() == caches[1].stride()
    assert lengths.dtype == call["block_tables"].dtype == torch.int32
    assert len(lengths) == len(call["block_tables"]) == len(starts) - 1
    assert int(lengths.min()) > 0
    assert call["bmm2_scale"] == 1.0
    assert call["enable_pdl"] is False
    if call["kv_layout"] == "HND":
        caches = tuple(cache.transpose(1, 2) for cache in caches)
    sinks = call["sinks"]
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (query.shape[1],))
    keys = fake_varlen.paged(*caches, call["block_tables"], lengths)
    window = call["window_left"], 0 if causal else -1
    return fake_varlen.attend(query, keys, starts, scale=call["bmm1_scale"], causal=causal, window=window, sinks=sinks)


def of_nvidia(calls: list[dict[str, Any]]) -> tuple[Any, Any]:
    """The functions of XQA and of trtllm-gen's paged kernels; their calls' arguments are added to ``calls``."""

    def xqa(*args: Any, **given: Any) -> Any:
        """One query of each request."""
        call = signature_of(record.XQA).bind(*args, **given).arguments
        calls.append(call)
        assert call["max_seq_len"] >= 0
        # a window ends with the query, which is the last
        out, _ = _of_cache(call, list(range(len(call["query"]) + 1)), True)
        call["out"].copy_(out)
        return call["out"]

    def context(*args: Any, **given: Any) -> Any:
        call = signature_of(record.TRTLLM_CONTEXT).bind(*args, **given).arguments
        calls.append(call)
        starts, lengths = call["cum_seq_lens_q"].tolist(), call["seq_lens"].tolist()
        assert call["batch_size"] == len(lengths) > 0
        assert [b - a for a, b in pairwise(call["cum_seq_lens_kv"].tolist())] == lengths
        assert call["max_q_len"] == max(b - a for a, b in pairwise(starts))
        assert call["max_kv_len"] == max(lengths)
        assert call["causal"] or call["window_left"] < 0
        assert call["backend"] == "trtllm-gen"
        out, lse = _of_cache(call, starts, call["causal"])
        call["out"].copy_(out)
        lse = (lse.mT / torch.log(torch.tensor(2.0, dtype=torch.float64))).float()
        return (call["out"], lse) if call["return_lse"] else call["out"]

    xqa.__signature__ = signature_of(record.XQA)  # type: ignore[attr-defined]
    context.__signature__ = signature_of(record.TRTLLM_CONTEXT)  # type: ignore[attr-defined]
    return xqa, context


class Fake:
    """The fake package; ``calls``: the arguments of each call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        fake = self

        def trtllm(*args: Any, **given: Any) -> Any:
            call = signature_of(record.TRTLLM_RAGGED).bind(*args, **given).arguments
            fake.calls.append(call)
            queries, keys = call["cum_seq_lens_q"].tolist(), call["cum_seq_lens_kv"].tolist()
            assert all(call[name].is_contiguous() for name in ("query", "key", "value", "out"))
            assert call["seq_lens"].tolist() == [b - a for a, b in pairwise(keys)]
            assert call["batch_size"] == len(call["seq_lens"]) > 0
            assert call["max_q_len"] == max(b - a for a, b in pairwise(queries))
            assert call["max_kv_len"] == int(call["seq_lens"].max())
            tensors = call["query"], call["key"], call["value"]
            out, lse = attend(*tensors, queries, keys, call["bmm1_scale"], call["is_causal"])
            call["out"].copy_(out)
            return (call["out"], lse) if call["return_lse"] else call["out"]

        def mla(*args: Any, **given: Any) -> Any:
            """The kernels of trtllm-gen, causal, with what they assert; what a row without a key gets is undefined."""
            call = signature_of(record.TRTLLM_MLA).bind(*args, **given).arguments
            fake.calls.append(call)
            query, cache, size = call["query"], call["kv_cache"], call["kv_lora_rank"]
            requests, queries, heads, width = query.shape
            assert query.dtype == cache.dtype == call["out"].dtype == torch.bfloat16
            assert width == cache.shape[-1] == size + call["qk_rope_head_dim"]
            assert (size, call["qk_rope_head_dim"], call["qk_nope_head_dim"]) in ((512, 64, 128), (256, 64, 64))
            assert cache.ndim == 3
            assert cache.shape[1] in (32, 64)
            assert not 64 < heads < 128
            assert call["seq_lens"].dtype == call["block_tables"].dtype == torch.int32
            assert len(call["seq_lens"]) == len(call["block_tables"]) == requests
            assert call["max_seq_len"] >= int(call["seq_lens"].max())
            assert call["out"].shape == (requests, queries, heads, size)
            pages = cache[:, :, None]
            keys = fake_varlen.paged(pages, pages[..., :size], call["block_tables"], call["seq_lens"])
            starts = [i * queries for i in range(requests + 1)]
            flat = query.flatten(0, 1)
            out, lse = fake_varlen.attend(flat, keys, starts, scale=call["bmm1_scale"], causal=True)
            call["out"].copy_(out.nan_to_num(7.0).view(call["out"].shape))
            assert call["return_lse_base"] == "basee"
            return (call["out"], lse.mT.float()) if call["return_lse"] else call["out"]

        xqa, context = of_nvidia(self.calls)

        class Wrapper:
            def __init__(self, *args: Any, **given: Any) -> None:
                fake.calls.append(signature_of(record.WRAPPER).bind(*args, **given).arguments)

            def plan(self, *args: Any, **given: Any) -> None:
                self.planned = signature_of(record.PLAN).bind(self, *args, **given).arguments
                # prefix sums on the device would be waited for
                assert self.planned["qo_indptr"].device.type == self.planned["kv_indptr"].device.type == "cpu"

            def run(self, *args: Any, **given: Any) -> Any:
                call = signature_of(record.RUN).bind(self, *args, **given).arguments
                fake.calls.append(call)
                p = self.planned
                queries, keys = p["qo_indptr"].tolist(), p["kv_indptr"].tolist()
                assert len(call["q"]) == queries[-1]
                masks = p["causal"], p.get("window_left", -1), p.get("logits_soft_cap")
                out, lse = attend(call["q"], call["k"], call["v"], queries, keys, p["sm_scale"], *masks)
                call["out"].copy_(out)
                return (call["out"], lse) if call["return_lse"] else call["out"]

        class Paged:
            def __init__(self, *args: Any, **given: Any) -> None:
                self.made = signature_of(record.PAGED_WRAPPER).bind(*args, **given).arguments
                fake.calls.append(self.made)

            def plan(self, *args: Any, **given: Any) -> None:
                p = self.planned = signature_of(record.PAGED_PLAN).bind(self, *args, **given).arguments
                lengths = ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len")
                assert all(p[name].device.type == "cpu" and p[name].dtype == torch.int32 for name in lengths)
                assert p["paged_kv_indices"].dtype == torch.int32
                assert len(p["paged_kv_indices"]) == p["paged_kv_indptr"][-1]
                assert p["q_data_type"] == p["kv_data_type"] == p["o_data_type"]

            def run(self, *args: Any, **given: Any) -> Any:
                call = signature_of(record.PAGED_RUN).bind(self, *args, **given).arguments
                fake.calls.append(call)
                p, queries = self.planned, self.planned["qo_indptr"].tolist()
                query, caches = call["q"], call["paged_kv_cache"]
                assert query.is_contiguous()
                assert len(query) == queries[-1]
                assert query.dtype == p["q_data_type"]
                assert all(cache.dtype == p["kv_data_type"] for cache in caches)
                assert caches[0].stride() == caches[1].stride()
                if self.made["kv_layout"] == "HND":
                    caches = tuple(cache.transpose(1, 2) for cache in caches)
                assert all(cache.shape[1] == p["page_size"] for cache in caches)
                starts, lasts = p["paged_kv_indptr"].tolist(), p["paged_kv_last_page_len"].tolist()
                parts: list[list[Tensor]] = [[], []]
                keys = [0]
                for i, last in enumerate(lasts):
                    pages = p["paged_kv_indices"][starts[i] : starts[i + 1]].long()
                    assert 0 < last <= p["page_size"]
                    keys.append(keys[-1] + (len(pages) - 1) * p["page_size"] + last)
                    for part, cache in zip(parts, caches, strict=True):
                        part.append(cache[pages].flatten(0, 1)[: keys[-1] - keys[-2]])
                masks = p["causal"], p["window_left"], p["logits_soft_cap"]
                packed = (torch.cat(part) for part in parts)
                out, lse = attend(query, *packed, queries, keys, p["sm_scale"], *masks)
                call["out"].copy_(out)
                return (call["out"], lse) if call["return_lse"] else call["out"]

        Paged.__signature__ = signature_of(record.PAGED_WRAPPER)  # type: ignore[attr-defined]
        Paged.plan.__signature__ = signature_of(record.PAGED_PLAN)  # type: ignore[attr-defined]
        Paged.run.__signature__ = signature_of(record.PAGED_RUN)  # type: ignore[attr-defined]
        trtllm.__signature__ = signature_of(record.TRTLLM_RAGGED)  # type: ignore[attr-defined]
        Wrapper.__signature__ = signature_of(record.WRAPPER)  # type: ignore[attr-defined]
        Wrapper.plan.__signature__ = signature_of(record.PLAN)  # type: ignore[attr-defined]
        Wrapper.run.__signature__ = signature_of(record.RUN)  # type: ignore[attr-defined]
        self.prefill, self.decode = ModuleType("flashinfer.prefill"), ModuleType("flashinfer.decode")
        self.prefill.trtllm_batch_context_with_kv_cache = context  # type: ignore[attr-defined]
        self.decode.xqa_batch_decode_with_kv_cache = xqa  # type: ignore[attr-defined]
        self.prefill.trtllm_ragged_attention_deepseek = trtllm  # type: ignore[attr-defined]
        self.prefill.BatchPrefillWithRaggedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
        self.prefill.BatchPrefillWithPagedKVCacheWrapper = Paged  # type: ignore[attr-defined]
        mla.__signature__ = signature_of(record.TRTLLM_MLA)  # type: ignore[attr-defined]
        self.mla = ModuleType("flashinfer.mla")
        self.mla.trtllm_batch_decode_with_kv_cache_mla = mla  # type: ignore[attr-defined]
        self.package = ModuleType("flashinfer")
        self.package.prefill = self.prefill  # type: ignore[attr-defined]
        self.package.mla = self.mla  # type: ignore[attr-defined]
        self.package.decode = self.decode  # type: ignore[attr-defined]
        self.package.__path__ = []

    def install(self, monkeypatch: Any) -> None:
        """Put the package in place of what is installed, and forget the adapters that were imported."""
        monkeypatch.setitem(sys.modules, "flashinfer", self.package)
        monkeypatch.setitem(sys.modules, "flashinfer.prefill", self.prefill)
        monkeypatch.setitem(sys.modules, "flashinfer.mla", self.mla)
        monkeypatch.setitem(sys.modules, "flashinfer.decode", self.decode)
        for module in MODULES:
            monkeypatch.delitem(sys.modules, module, raising=False)
