"""Steps of SGLang as batches of attnreg's runtime, made anew for each step or kept for CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnreg.integrations.sglang.registries import SglangError
from attnreg.runtime.interface import BatchMetadata


class Slots(NamedTuple):
    """Where a runner's tokens are in its KV pool.

    tokens: [requests, positions] int32, the slot of each token (SGLang's ``req_to_token``). in_window: for each slot
    of full layers, the slot of layers with windows; None if all layers share one pool.
    """

    tokens: Tensor
    page_size: int
    in_window: Tensor | None

    @property
    def positions(self) -> int:
        """The most tokens of a request."""
        return self.tokens.shape[1]

    @property
    def most_pages(self) -> int:
        """The most pages of a request."""
        return -(-self.positions // self.page_size)


class Kind(NamedTuple):
    """The lengths of a step that the host knows from its mode.

    queries: of each request, None if requests differ. added: keys of this step that SGLang's ``seq_lens`` leave out.
    tree: whether queries see only their ancestors among this step's queries.
    """

    queries: int | None
    added: int
    tree: bool


@dataclass(slots=True)
class EngineStep:
    """One step: its batch for full layers, and for layers of a pool for windows.

    window_slots: where the latter's keys of this step are written, [tokens] int64. kind: its lengths. context_lens:
    SGLang's ``seq_lens``, which a tree's mask depends on. alone: whether no query sees a key of an earlier step.
    """

    kind: Kind
    full: BatchMetadata
    window: BatchMetadata | None
    context_lens: Tensor
    window_slots: Tensor | None = None
    alone: bool = False
    _packed: BatchMetadata | None = None

    def packed(self) -> BatchMetadata:
        """The batch whose keys are those of this step alone, without a cache. Raises `SglangError` if there are others.

        SGLang gives such keys for prompts without context.
        """
        if not self.alone:
            raise SglangError("attnreg takes keys of every head in SGLang only for prompts without context")
        if self._packed is None:
            full = self.full
            self._packed = BatchMetadata(
                query_start_loc=full.query_start_loc,
                seq_lens=full.query_start_loc.diff(),
                max_query_len=full.max_query_len,
                max_seq_len=full.max_query_len,
                query_start_loc_cpu=full.host_starts,
                seq_lens_cpu=full.host_starts.diff(),
            )
        return self._packed


@dataclass
class Steps:
    """Makes the steps of one runner."""

    slots: Slots
    # for CUDA graphs: the most requests and tokens of a step, and tensors whose addresses stay
    _most: tuple[int, int] | None = None
    _kept: dict[Kind, dict[str, Tensor]] = field(default_factory=dict)
    _window_slots: Tensor | None = None
    _captured: dict[tuple[Kind, int], EngineStep] = field(default_factory=dict)
    _starts: dict[tuple[int, int, str], Tensor] = field(default_factory=dict)

    def eager(self, batch: Any) -> EngineStep:
        """The step of a batch that no graph replays. It reads SGLang's tensors now, and never again."""
        kind, requests, device = kind_of(batch), batch.batch_size, self.slots.tokens.device
        lens = batch.seq_lens[:requests].to(torch.int32)
        lens = lens + kind.added if kind.added else lens.clone()
        bounds, most = self._bounds(batch, kind)
        width = max(1, -(-min(most, self.slots.positions) // self.slots.page_size))
        tables = [_empty(requests, width, device) for _ in range(1 if self.slots.in_window is None else 2)]
        _write_tables(self.slots, batch.req_pool_indices[:requests], tables)
        if kind.queries is not None:
            starts = self._uniform_starts(requests, kind.queries, device)
            host_starts, longest = self._uniform_starts(requests, kind.queries, "cpu"), kind.queries
        else:
            host = torch.tensor([0, *batch.extend_seq_lens_cpu[:requests]], dtype=torch.int32, device="cpu")
            host_starts, longest = host.cumsum(0, dtype=torch.int32), int(host.max())
            starts = torch.zeros(requests + 1, dtype=torch.int32, device=device)
            torch.cumsum(batch.extend_seq_lens[:requests], 0, dtype=torch.int32, out=starts[1:])
        tree = None
        if kind.tree:
            tree = torch.empty(requests * longest, longest, dtype=torch.bool, device=device)
            self._write_tree(tree, batch.spec_info.custom_mask, batch.seq_lens[:requests])
        made = [
            BatchMetadata(
                query_start_loc=starts,
                seq_lens=lens,
                max_query_len=longest,
                max_seq_len=most,
                query_start_loc_cpu=host_starts,
                seq_lens_cpu=bounds,
                block_table=table,
                tree_mask=tree,
            )
            for table in tables
        ]
        prefixes = batch.extend_prefix_lens_cpu
        alone = kind.queries is None and prefixes is not None and not any(prefixes[:requests])
        window = made[1] if len(made) > 1 else None
        return EngineStep(kind, made[0], window, batch.seq_lens[:requests], alone=alone)

    def reserve(self, requests: int, tokens: int) -> None:
        """Sets the most requests and tokens of a step in a graph. Memory is allocated for each kind at its capture."""
        if self._most != (requests, tokens):
            self._most, self._window_slots = (requests, tokens), None
            self._kept.clear()
            self._captured.clear()

    def captured(self, batch: Any) -> EngineStep:
        """The step whose tensors a graph reads: the same object for each number of requests.

        `fill` writes its lengths and tables in the graph; a tree's mask is written here, outside of the graph.
        """
        kind, requests = kind_of(batch), batch.batch_size
        if kind.queries is None:
            message = "attnreg serves no full CUDA graph of prompts: their lengths differ. Take SGLang's default, "
            raise SglangError(message + "breakable graphs, or none (--cuda-graph-backend-prefill)")
        step = self._captured.get((kind, requests))
        if step is None:
            step = self._captured[kind, requests] = self._for_graphs(kind, requests, batch)
        step.context_lens = batch.seq_lens[:requests]
        if kind.tree:
            self.write_tree(step, batch.spec_info.custom_mask)
        return step

    def fill(self, batch: Any) -> None:
        """Writes the lengths and tables of a captured step. All operations have fixed shapes, and none waits."""
        kind, requests = kind_of(batch), batch.batch_size
        step = self._captured[kind, requests]
        step.full.seq_lens.copy_(batch.seq_lens[:requests]).add_(kind.added)
        tables = [made.block_table for made in (step.full, step.window) if made is not None]
        _write_tables(self.slots, batch.req_pool_indices[:requests], [t for t in tables if t is not None])

    def write_tree(self, step: EngineStep, mask: Tensor) -> None:
        """Writes the mask of a step's trees from SGLang's."""
        assert step.full.tree_mask is not None
        self._write_tree(step.full.tree_mask, mask, step.context_lens)

    def window_slots(self, slots: Tensor | None, capturing: bool) -> Tensor | None:
        """The memory from which a graph reads where keys of layers with windows go, with this step's slots in it."""
        if slots is None:
            return None
        assert self._most is not None, "init_cuda_graph_state comes first"
        memory, rows = self._window_slots, slots.shape[0]
        if memory is None:
            memory = self._window_slots = torch.zeros(self._most[1], dtype=torch.int64, device=slots.device)
        # slot 0 takes what padding writes
        memory[rows:].zero_()
        if capturing:
            memory[:rows].zero_()
        else:
            memory[:rows].copy_(slots)
        return memory[:rows]

    def _for_graphs(self, kind: Kind, requests: int, batch: Any) -> EngineStep:
        assert self._most is not None, "init_cuda_graph_state comes first"
        assert kind.queries is not None
        most, device, slots, queries = self._most[0], self.slots.tokens.device, self.slots, kind.queries
        kept = self._kept.get(kind)
        if kept is None:
            kept = self._kept[kind] = {
                "lens": torch.ones(most, dtype=torch.int32, device=device),
                "full": _empty(most, slots.most_pages, device).zero_(),
            }
            if slots.in_window is not None:
                kept["window"] = _empty(most, slots.most_pages, device).zero_()
            if kind.tree:
                kept["tree"] = torch.ones(most * queries, queries, dtype=torch.bool, device=device)
        made = [
            BatchMetadata(
                query_start_loc=self._uniform_starts(requests, queries, device),
                seq_lens=kept["lens"][:requests],
                max_query_len=queries,
                max_seq_len=slots.positions,
                query_start_loc_cpu=self._uniform_starts(requests, queries, "cpu"),
                seq_lens_cpu=torch.full((requests,), slots.positions, dtype=torch.int32, device="cpu"),
                block_table=kept[name][:requests],
                tree_mask=kept["tree"][: requests * queries] if kind.tree else None,
            )
            for name in ("full", "window")
            if name in kept
        ]
        return EngineStep(kind, made[0], made[1] if len(made) > 1 else None, batch.seq_lens[:requests])

    def _bounds(self, batch: Any, kind: Kind) -> tuple[Tensor, int]:
        """Upper bounds of each request's keys, and of the longest request's.

        SGLang's ``seq_lens_cpu`` is current only beside ``seq_lens_sum``.
        """
        requests, known = batch.batch_size, []
        if kind.queries is None and batch.extend_prefix_lens_cpu is not None:
            prefixes, queries = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
            sums = [a + b for a, b in zip(prefixes[:requests], queries[:requests], strict=True)]
            known.append(torch.tensor(sums, dtype=torch.int32, device="cpu"))
        if batch.seq_lens_cpu is not None and batch.seq_lens_sum is not None:
            known.append(batch.seq_lens_cpu[:requests].to(torch.int32) + kind.added)
        if not known:
            most = self.slots.positions
            return torch.full((requests,), most, dtype=torch.int32, device="cpu"), most
        # a scheduler that runs ahead may count a token of one of them earlier than of the other
        bounds = torch.maximum(known[0], known[-1])
        return bounds, int(bounds.max()) if requests else 0

    def _uniform_starts(self, requests: int, queries: int, device: torch.device | str) -> Tensor:
        key = requests, queries, str(device)
        starts = self._starts.get(key)
        if starts is None:
            starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * queries
            self._starts[key] = starts
        return starts

    def _write_tree(self, tree: Tensor, mask: Tensor, context_lens: Tensor) -> None:
        """Writes [requests * queries, queries] from SGLang's flat mask.

        In it, a request has queries * (context + queries) truth values, or on processors queries * queries. The longer
        form may have room for more.
        """
        queries = tree.shape[1]
        requests, device = tree.shape[0] // queries, tree.device
        whole = mask.shape[0] != requests * queries * queries
        before = context_lens.to(torch.int64) if whole else context_lens.new_zeros(requests, dtype=torch.int64)
        width = before + queries  # [requests]
        begins = (width * queries).cumsum(0) - width * queries
        row = torch.arange(queries, dtype=torch.int64, device=device)
        # [requests, queries, queries]: request, row, column
        at = (begins + before)[:, None, None] + row[:, None] * width[:, None, None] + row[None, :]
        # a graph's padding has no tree of its own, and may read any other
        torch.index_select(mask, 0, at.flatten().clamp_(max=mask.shape[0] - 1), out=tree.view(-1))


def kind_of(batch: Any) -> Kind:
    """The lengths of a step by its mode. Raises `SglangError` for a step that attnreg does not compute."""
    mode, drafts = batch.forward_mode, batch.spec_info
    if batch.encoder_lens is not None:
        raise SglangError("attnreg serves no encoder-decoder model of SGLang")
    # what SGLang gives before a replay is a view of a batch without this field
    items = getattr(batch, "multi_item_delimiter_indices", None)
    if items is not None and any(one is not None for one in items):
        raise SglangError("attnreg serves no multi-item scoring of SGLang, which hides items from each other")
    if mode.is_decode():
        if drafts is not None and drafts.is_draft_input():
            raise SglangError(
                "attnreg decodes no drafts in SGLang; give --speculative-draft-attention-backend another backend"
            )
        return Kind(1, 0, False)
    if mode.is_target_verify():
        if drafts.ragged_verify_layout is not None:
            raise SglangError("attnreg serves no verification of ragged drafts in SGLang")
        # drafts of DFLASH have no such number
        tree = drafts.custom_mask is not None and getattr(drafts, "tree_topk", None) != 1
        return Kind(drafts.draft_token_num, drafts.draft_token_num, tree)
    if mode.is_extend() and not mode.is_dllm_extend():
        return Kind(None, 0, False)
    raise SglangError(f"attnreg serves no step of SGLang's mode {mode.name}")


def _empty(requests: int, width: int, device: torch.device) -> Tensor:
    return torch.empty(requests, width, dtype=torch.int32, device=device)


def _write_tables(slots: Slots, requests: Tensor, tables: list[Tensor]) -> None:
    """Writes the pages of each request, for full layers and for layers with windows, over the tables' whole width.

    Entries past a request's last page may be any page.
    """
    full, page = tables[0], slots.page_size
    first = slots.tokens[:, : full.shape[1] * page : page]  # the slot of each page's first token
    torch.index_select(first, 0, requests.to(torch.int64), out=full)
    if slots.in_window is not None:
        # a page that has left the window maps to slot 0, or to none
        tables[1].copy_(slots.in_window[full.to(torch.int64)]).clamp_(min=0)
        if page > 1:
            tables[1].div_(page, rounding_mode="floor")
    if page > 1:
        full.div_(page, rounding_mode="floor")
