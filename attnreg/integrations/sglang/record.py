"""A record of SGLang's interfaces that the plug-in and the backend are written for, and the differences of a release.

The plug-in does not serve a release with a difference: a batch, a layer or a pool may have another meaning.
"""

from __future__ import annotations

from attnreg.integrations.interfaces import differences

# the release that the record was read from
VERSION = "0.5.23"
_BACKEND = "sglang.srt.layers.attention.base_attn_backend"
_LAYER = "sglang.srt.layers.radix_attention"
_BATCH = "sglang.srt.model_executor.forward_batch_info"
_POOL = "sglang.srt.mem_cache.memory_pool"
_WINDOWS = "sglang.srt.mem_cache.swa_memory_pool"
_REGISTRY = "sglang.srt.layers.attention.attention_registry"
# where: a function's parameters, a class's public names, or the fields of one that holds data
RECORD: dict[tuple[str, str], str] = {
    (_BACKEND, "AttentionBackend"): (
        "prefill_attention_backend_str decode_attention_backend_str supports_ragged_verify_graph "
        "folds_encoder_swa_replay data_type kv_cache_dtype attn_backend_list forward_metadata kv_index_translator "
        "get_fused_kv_write_buffers init_forward_metadata glue_target_verify_metadata glue_draft_metadata "
        "init_forward_metadata_out_graph init_forward_metadata_in_graph supports_draft_extend_metadata_staging "
        "draft_extend_metadata_captured_in_graph needs_cpu_seq_lens extend_dummy_seqs_capped_by_req_pool "
        "use_captured_forward_metadata_for_breakable_cuda_graph prefill_cuda_graph_max_batch_size "
        "prefer_eager_mixed_prefill_under_dp_attention skips_prefill_metadata_on_idle_dp_rank "
        "supports_prefill_cuda_graph_max_context_size prefill_cuda_graph_default_max_seq_len dllm_attention "
        "shared_read_ends resolve_prefill_shared_read_ends supports_full_cuda_graph_chunked_prefix "
        "prepare_full_cuda_graph_chunked_prefix init_cuda_graph_state validate_elastic_cuda_graph_recapture "
        "init_forward_metadata_for_breakable_cuda_graph_capture "
        "prepare_forward_metadata_for_breakable_cuda_graph_replay get_cuda_graph_seq_len_fill_value "
        "late_layer_num_tokens on_after_cuda_graph_warmup verify_mask update_verify_buffers_to_fill_after_draft "
        "forward forward_decode forward_extend forward_mixed support_triton get_indexer_metadata"
    ),
    (_BACKEND, "AttentionBackend.forward"): "self q k v layer forward_batch save_kv_cache kwargs",
    (_BACKEND, "AttentionBackend.init_forward_metadata_out_graph"): "self forward_batch in_capture",
    (_BACKEND, "AttentionBackend.init_cuda_graph_state"): "self max_bs max_num_tokens",
    (_BACKEND, "AttentionBackend.update_verify_buffers_to_fill_after_draft"): ("self spec_info cuda_graph_bs"),
    (_BACKEND, "SharedReadEnds"): "PRE_REPLAY IN_REPLAY POST_REPLAY UNKNOWN",
    (_LAYER, "AttentionType"): "DECODER DECODER_BIDIRECTIONAL ENCODER_ONLY",
    (_LAYER, "RadixAttention.__init__"): (
        "self num_heads head_dim scaling num_kv_heads layer_id logit_cap v_head_dim sliding_window_size "
        "is_cross_attention pos_encoding_mode logit_capping_method quant_config attn_type use_irope prefix "
        "use_prefill_attention_wrapper"
    ),
    (_LAYER, "RadixAttention.forward"): ("self q k v forward_batch save_kv_cache key_value_num_tokens kwargs"),
    (_BATCH, "ForwardMode"): (
        "EXTEND DECODE MIXED IDLE TARGET_VERIFY DRAFT_EXTEND_V2 PREBUILT SPLIT_PREFILL DLLM_EXTEND"
    ),
    (_BATCH, "ForwardBatch"): (
        "forward_mode batch_size input_ids req_pool_indices seq_lens out_cache_loc seq_lens_sum "
        "origin_out_cache_loc orig_seq_lens kv_loc_plan kv_loc_cols out_cache_loc_virtual out_cache_loc_dsv4 "
        "out_cache_loc_is_physical mamba_track_indices mamba_track_mask mamba_track_seqlens "
        "mamba_prefill_track_mask_cpu mamba_track_seqlens_cpu mamba_cow_src_indices mamba_cow_dst_indices "
        "mamba_clear_indices input_embeds dllm_input_preparation_state replace_embeds replace_positions "
        "token_type_ids encoder_lens encoder_out_cache_loc return_logprob is_prefill_only spec_algorithm "
        "dimensions return_pooled_hidden_states is_extend_in_batch dp_spec_prefill_coordination_applied "
        "can_run_decode_cuda_graph can_run_dp_draft_cuda_graph can_run_dp_prefill_cuda_graph "
        "dp_prefill_cuda_graph_max_prefix_len global_forward_mode residual_stream tbo_split_seq_index "
        "seq_lens_cpu req_pool_indices_cpu top_logprobs_nums token_ids_logprobs mm_inputs mm_token_modalities "
        "multi_gate_indices encoder_cached encoder_lens_cpu multi_item_delimiter_indices token_indices_to_pool "
        "decision_layouts sampling_info spec_info contains_last_prefill_chunk lora_ids rids "
        "watermark_prompt_tail_ids watermark_context_hash_history capture_hidden_mode defer_logits_to_eager "
        "full_prefill_cuda_graph_capture return_hidden_states_before_norm reuse_dsa_topk_indices "
        "minimax_m3_precached_sparse_layers positions dllm_prompt_mask extend_num_tokens extend_seq_lens "
        "extend_prefix_lens extend_start_loc extend_prefix_lens_cpu extend_seq_lens_cpu "
        "extend_logprob_start_lens_cpu extend_input_logprob_token_ids_gpu original_global_num_tokens_cpu "
        "global_num_tokens_cpu global_num_tokens_gpu global_num_tokens_for_logprob_cpu "
        "global_num_tokens_for_logprob_gpu global_num_token_non_padded global_num_token_non_padded_cpu "
        "num_token_non_padded attn_tp_sequence_sharded aux_hidden_states_buffer max_seq_len_override "
        "max_seq_len_host next_token_logits_buffer temperature top_p hidden_states residual model_specific_states "
        "split_index mm_input_embeds cross_attention_custom_mask llada_image_conditioning_text_lens_cpu "
        "dp_padding_mode dp_local_start_pos dp_local_num_tokens global_dp_buffer_len global_num_tokens_padded_cpu "
        "global_late_layer_num_tokens_cpu mrope_positions tbo_parent_token_range tbo_padded_len tbo_children "
        "attn_cp_metadata attn_dcp_metadata dcp_kv_mask ngram_embedding_info encoder_swa_replay "
        "encoder_swa_row_floor encoder_swa_compress_rows engram_history engram_staged_rows rids_int "
        "bootstrap_room_ids_int req_all_ids_flat req_all_ids_lens forward_metadata_ready "
        "forward_metadata_planned_bs forward_metadata_planned_num_tokens forward_metadata_replan_equivalent"
    ),
    (_POOL, "KVWriteLoc"): "loc swa_loc full_loc physical",
    (_POOL, "KVWriteLoc.for_batch"): "forward_batch swa_loc full_loc",
    (_POOL, "MHATokenToKVPool.set_kv_buffer"): (
        "self layer loc_info cache_k cache_v k_scale v_scale layer_id_override dcp_kv_mask"
    ),
    (_POOL, "MLATokenToKVPool.set_kv_buffer"): "self layer loc_info cache_k cache_v layer_id_override",
    (_WINDOWS, "SWAKVPool.set_kv_buffer"): "self layer loc_info cache_k cache_v k_scale v_scale",
    (_POOL, "HybridLinearKVPool.set_kv_buffer"): ("self layer loc_info cache_k cache_v k_scale v_scale dcp_kv_mask"),
    ("sglang.srt.mem_cache.kv_loc_plan", "IdSpaceKind"): "FULL SLIDING_WINDOW",
    ("sglang.srt.speculative.eagle_utils", "TreeMaskMode"): "FULL_MASK QLEN_ONLY QLEN_ONLY_BITPACKING",
    ("sglang.srt.mem_cache.kv_index_translator", "KVIndexTranslator.write_ids"): "self forward_batch kind",
}
# names that a module, or a class in one, must have among others
NEEDED: dict[tuple[str, str], str] = {
    ("sglang.srt.arg_groups.choices", ""): "add_attention_backend_choices",
    (_REGISTRY, ""): "ATTENTION_BACKENDS",
    (_POOL, "HybridLinearKVPool"): "get_kv_buffer",
    (_POOL, "MHATokenToKVPool"): "get_kv_buffer is_quantized_kv_cache",
    (_POOL, "MLATokenToKVPool"): "get_kv_buffer",
    (_WINDOWS, "SWAKVPool"): "get_kv_buffer request_window swa_req_ring_size swa_uses_full_indices",
    ("sglang.srt.runtime_context", ""): "get_disagg get_exec get_parallel get_spec",
    (
        "sglang.srt.speculative.eagle_info",
        "EagleVerifyInput",
    ): "custom_mask draft_token_num ragged_verify_layout tree_topk",
    ("sglang.srt.speculative.spec_info", "SpecInput"): "custom_mask is_draft_input ragged_verify_layout",
}


def moved_interfaces() -> list[str]:
    """The differences of the installed SGLang from the record, each as a sentence."""
    return list(differences(RECORD, NEEDED))
