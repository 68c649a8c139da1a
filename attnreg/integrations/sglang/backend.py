# mypy: disable-error-code="misc"
"""SglangBackend: attnreg's kernels as an attention backend of SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_disagg, get_exec, get_parallel, get_spec
from torch import Tensor

from attnreg.integrations.sglang import pools
from attnreg.integrations.sglang.layers import RunFacts, RuntimeLayers, platform_of, problems_of
from attnreg.integrations.sglang.metadata import EngineStep, Slots, Steps
from attnreg.integrations.sglang.registries import NAME, SglangError


class SglangBackend(AttentionBackend):
    """attnreg's kernels over SGLang's KV pool. It serves the layers that the registry's row ``attnreg`` claims.

    SGLang's pool stores keys and values; attnreg reads them by pages.
    """

    # without these, bounds come from the longest request that the pool allows
    needs_cpu_seq_lens = False
    extend_dummy_seqs_capped_by_req_pool = True

    def __init__(self, runner: Any) -> None:
        """Raises `SglangError`, with every reason, for a model, a pool or a run that attnreg does not serve."""
        super().__init__()
        if problems := refusals(runner):
            raise SglangError(f"attnreg ({NAME}) does not serve this run: {'; '.join(problems)}")
        run = run_facts(runner)
        self.device = runner.device
        self.page_size = runner.page_size
        # SGLang's models store keys themselves where an op does that too, into the pool of this name
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.kv_index_translator = runner.kv_index_translator
        # SGLang's drafts ask for it
        self.max_context_len = runner.model_config.context_len
        self.data_type = runner.kv_cache_dtype
        in_window = pools.window_slots_of(self.token_to_kv_pool)
        self._has_windows = in_window is not None
        slots = Slots(self.req_to_token_pool.req_to_token, self.page_size, in_window)
        self.steps = Steps(slots)
        self.layers = RuntimeLayers(run)
        self.forward_metadata: EngineStep | None = None

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Steps of prompts copy all that SGLang's scheduler may change, before a layer runs."""
        return SharedReadEnds.PRE_REPLAY if fm.name == "EXTEND" else super().shared_read_ends(fm)

    def support_triton(self) -> bool:
        return bool(self.device != "cpu")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        step = self.steps.eager(forward_batch)
        step.window_slots = self._window_slots(forward_batch)
        self.forward_metadata = step

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.steps.reserve(max_bs, max_num_tokens)

    def init_cpu_graph_state(self, *args: Any, **kwargs: Any) -> None:
        raise SglangError(f"attnreg ({NAME}) serves no graphs on processors; give --disable-cuda-graph")

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        step = self.steps.captured(forward_batch)
        step.window_slots = self.steps.window_slots(self._window_slots(forward_batch), in_capture)
        self.forward_metadata = step

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        self.steps.fill(forward_batch)

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Takes the mask of trees that a draft has written since the step was made."""
        step = self.forward_metadata
        if step is not None and step.kind.tree:
            self.steps.write_tree(step, spec_info.custom_mask)

    def forward_extend(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._attend(*args, **kwargs)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._attend(*args, **kwargs)

    def _attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Stores keys and values, unless an op has done so or the layer shares another's, and attends.

        q [tokens, heads * size], k [tokens, kv_heads, size], v likewise. In the latent form of MLA k is the latent with
        its rotary part, and v the latent. Raises `SglangError` before anything is written.
        """
        # an argument that SGLang leaves out is given as None or False
        if unknown := sorted(name for name, value in others.items() if value is not None and value is not False):
            raise SglangError(f"attnreg ({NAME}) knows no argument {', '.join(unknown)} of an attention layer")
        if forward_batch.mha_return_lse:
            raise SglangError(f"attnreg ({NAME}) returns no LSE to SGLang")
        attention = self.layers.of(layer, sinks)
        if q.dtype != attention.spec.query_dtype:
            raise SglangError(f"attnreg ({NAME}) takes queries of {attention.spec.query_dtype}; these are {q.dtype}")
        step = self.forward_metadata
        assert step is not None, "init_forward_metadata comes first"
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = query.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        if attention.spec.block_size is None:
            batch = step.packed()
            if save_kv_cache or k is None or v is None:
                raise SglangError(f"attnreg ({NAME}) keeps no keys of every head in a pool of latents")
            attention.attend(query, None, batch, output, key=k, value=v)
        else:
            inside = self._has_windows and pools.in_window_pool(self.token_to_kv_pool, layer.layer_id)
            batch = step.window if inside and step.window is not None else step.full
            if attention.kind not in batch.plans:
                # refuses a batch before keys are stored
                attention.plan(batch)
            if save_kv_cache and k is not None and v is not None:
                self._store(k, v, layer, KVWriteLoc.for_batch(forward_batch, swa_loc=step.window_slots))
            attention.attend(query, pools.cache_of(self.token_to_kv_pool, layer, self.page_size), batch, output)
        if batch.num_tokens < output.shape[0]:
            output[batch.num_tokens :].zero_()
        return output.view(output.shape[0], -1)

    def _store(self, key: Tensor, value: Tensor, layer: Any, place: KVWriteLoc) -> None:
        run, scales = self.layers.run, (layer.k_scale, layer.v_scale)
        # the pool's own defaults differ by class, and that of latents takes no scales
        given = scales if run.quantised and run.latents is None and scales != (None, None) else ()
        self.token_to_kv_pool.set_kv_buffer(layer, place, key, value, *given)

    def _window_slots(self, forward_batch: Any) -> Tensor | None:
        """Where this step's keys of layers with windows go, if these have a pool of their own."""
        if not self._has_windows or forward_batch.out_cache_loc is None:
            return None
        slots: Tensor = self.kv_index_translator.write_ids(forward_batch, IdSpaceKind.SLIDING_WINDOW)
        return slots


def run_facts(runner: Any) -> RunFacts:
    """What the layers of a model runner have in common."""
    spec, features = get_spec(), set()
    if get_exec().deterministic.enable_deterministic_inference:
        features.add("batch_invariant")
    # drafts of one branch are causal; those of NGRAM say of none that they have one
    if spec.speculative_algorithm == "NGRAM" or (spec.speculative_algorithm and spec.speculative_eagle_topk != 1):
        features.add("tree_mask")
    return RunFacts(
        dtype=runner.dtype,
        cache_dtype=runner.kv_cache_dtype,
        page_size=runner.page_size,
        chunk=runner.attention_chunk_size,
        features=frozenset(features),
        platform=platform_of(str(runner.device).partition(":")[0]),
        latents=pools.latents_of(runner.token_to_kv_pool) if runner.use_mla_backend else None,
    )


def refusals(runner: Any) -> list[str]:
    """Every reason against a model runner; an empty list if attnreg serves it. Nothing is written."""
    pool, translator = runner.token_to_kv_pool, runner.kv_index_translator
    problems = [*_run_problems(runner), *pools.pool_problems(pool, translator, latents=runner.use_mla_backend)]
    if problems:
        return problems
    run, sinks = run_facts(runner), bool(runner.model_config.has_attention_sinks)
    # two layers of MLA have one number
    by_text: dict[str, dict[int, None]] = {}
    for layer in runner.model.modules():
        if isinstance(layer, RadixAttention):
            for text in problems_of(layer, run, sinks=sinks):
                by_text.setdefault(text, {})[layer.layer_id] = None
    return [f"{_layers([*ids])}: {text}" for text, ids in by_text.items()]


def _run_problems(runner: Any) -> Iterator[str]:
    parallel = get_parallel()
    if runner.model_config.is_encoder_decoder:
        yield "the model is an encoder with a decoder"
    if hasattr(runner.model, "prepare_attn_masks"):
        # it writes a mask into the metadata of SGLang's own backend, and into no other's
        yield "the tokens of an image see each other, by a mask that SGLang gives its own backend alone"
    if parallel.attn_dcp_size > 1:
        yield "ranks share the context of a request (decode context parallelism)"
    if parallel.attn_cp_size > 1:
        yield "ranks share the prompt of a request (context parallelism)"
    if get_exec().overlap.enable_two_batch_overlap:
        yield "two batches overlap (--enable-two-batch-overlap)"
    if get_disagg().enable_pdmux:
        yield "prompts and decoding share a GPU's multiprocessors (--enable-pdmux)"


def _layers(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:4])) + (", …" if len(ids) > 4 else "")
    return f"layer {shown}" if len(ids) == 1 else f"layers {shown}"
