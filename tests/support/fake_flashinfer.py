"""A stand-in for FlashInfer's kernels for prompts of MLA, with the parameters of the record; it computes in float64."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnreg.kernels.flashinfer import record
from support.fake_aiter import signature_of

MODULES = ("attnreg.kernels.flashinfer.trtllm_ragged", "attnreg.kernels.flashinfer.prefill")


def attend(
    query: Tensor, key: Tensor, value: Tensor, queries: list[int], keys: list[int], scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output and LSE [rows, heads], to the base 2, of packed requests by their prefix sums."""
    out, lse = query.new_empty(*query.shape[:2], value.shape[2]), torch.empty(query.shape[:2])
    for i in range(len(queries) - 1):
        rows, places = slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])
        # the kernels refuse requests without a query or a key
        assert rows.stop > rows.start
        assert places.stop > places.start
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), key[places].double()) * scale
        if causal:
            after = places.stop - places.start - (rows.stop - rows.start)
            scores.masked_fill_(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + after), -torch.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[places].double()).to(out.dtype)
        lse[rows] = (scores.logsumexp(-1) / torch.log(torch.tensor(2.0))).float().t()
    return out, lse


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
                out, lse = attend(call["q"], call["k"], call["v"], queries, keys, p["sm_scale"], p["causal"])
                call["out"].copy_(out)
                return (call["out"], lse) if call["return_lse"] else call["out"]

        trtllm.__signature__ = signature_of(record.TRTLLM_RAGGED)  # type: ignore[attr-defined]
        Wrapper.__signature__ = signature_of(record.WRAPPER)  # type: ignore[attr-defined]
        Wrapper.plan.__signature__ = signature_of(record.PLAN)  # type: ignore[attr-defined]
        Wrapper.run.__signature__ = signature_of(record.RUN)  # type: ignore[attr-defined]
        self.prefill = ModuleType("flashinfer.prefill")
        self.prefill.trtllm_ragged_attention_deepseek = trtllm  # type: ignore[attr-defined]
        self.prefill.BatchPrefillWithRaggedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
        self.package = ModuleType("flashinfer")
        self.package.prefill = self.prefill  # type: ignore[attr-defined]
        self.package.__path__ = []

    def install(self, monkeypatch: Any) -> None:
        """Put the package in place of what is installed, and forget the adapters that were imported."""
        monkeypatch.setitem(sys.modules, "flashinfer", self.package)
        monkeypatch.setitem(sys.modules, "flashinfer.prefill", self.prefill)
        for module in MODULES:
            monkeypatch.delitem(sys.modules, module, raising=False)
