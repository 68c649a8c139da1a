"""A record of vLLM's interfaces that the plugin and the backend are written for, and the differences of a release.

The plugin does not serve a release with a difference: its questions to a backend, or its description of a batch, may
have another meaning.
"""

from __future__ import annotations

from attnreg.integrations.interfaces import differences

# the release that the record was read from
VERSION = "0.33.0"
# where: a function's parameters, a class's public names, or the fields of one that holds data
_BACKEND, _REGISTRY = "vllm.v1.attention.backend", "vllm.v1.attention.backends.registry"
_SELECTOR = "vllm.v1.attention.selector"
CACHED = (_SELECTOR, "_cached_get_attn_backend")
RECORD: dict[tuple[str, str], str] = {
    (_BACKEND, "AttentionBackend"): (
        "customize_spec forward_includes_kv_cache_update full_cls_name get_builder_cls get_impl_cls get_name "
        "get_preferred_block_size get_supported_head_sizes get_supported_kernel_block_sizes is_mla is_sparse is_ssm "
        "supported_dtypes supported_kv_cache_dtypes supported_kv_cache_layouts supports_alibi_sqrt supports_attn_type "
        "supports_batch_invariance supports_block_size supports_combination supports_compute_capability supports_dcp "
        "supports_device_cpu_query_lens_mismatch supports_dtype supports_head_size supports_kv_cache_dtype "
        "supports_kv_cache_update_bypass supports_kv_connector supports_mm_prefix supports_non_causal "
        "supports_non_causal_dcp supports_pcp supports_per_head_quant_scales supports_rswa supports_sink "
        "supports_sliding_window validate_configuration"
    ),
    (_BACKEND, "AttentionBackend.validate_configuration"): (
        "head_size dtype kv_cache_dtype block_size use_mla has_sink use_sparse use_mm_prefix use_per_head_quant_scales "
        "device_capability attn_type has_sliding_window use_non_causal use_batch_invariant use_kv_connector use_pcp "
        "use_adaptive_verification use_dcp use_rswa"
    ),
    (_BACKEND, "AttentionMetadataBuilder"): (
        "build build_for_cudagraph_capture build_for_drafting get_cudagraph_support get_varlen_cudagraph_max_query_len "
        "reorder_batch_threshold requires_block_table_width supports_draft_decode_metadata_update "
        "supports_update_block_table update_block_table update_draft_decode_metadata"
    ),
    (_BACKEND, "AttentionMetadataBuilder.__init__"): "self kv_cache_spec layer_names vllm_config device",
    (_BACKEND, "AttentionMetadataBuilder.build"): "self common_prefix_len common_attn_metadata fast_build",
    (_BACKEND, "AttentionMetadataBuilder.get_cudagraph_support"): "vllm_config kv_cache_spec",
    (_BACKEND, "AttentionImplBase"): (
        "can_return_lse_for_decode get_impl_variants is_sparse lse_base_on_e need_to_return_lse_for_decode "
        "prepare_for_batch process_weights_after_loading supports_dcp supports_dense_mha_prefill "
        "supports_mtp_with_cp_non_trivial_interleave_size supports_pcp supports_quant_query_input"
    ),
    (_BACKEND, "AttentionImpl"): (
        "do_qk_norm_mrope_kvcache_update do_qk_norm_rope_kvcache_update do_rope_and_kv_cache_update forward "
        "fused_output_quant_supported fused_qk_norm_mrope_kvcache_supported fused_qk_norm_rope_kvcache_supported "
        "fused_rope_kvcache_supported kv_quant_mode set_interleaved_v_cache"
    ),
    (_BACKEND, "AttentionImpl.__init__"): (
        "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap "
        "attn_type kv_sharing_target_layer_name"
    ),
    (_BACKEND, "AttentionImpl.forward"): (
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
    ),
    (_BACKEND, "CommonAttentionMetadata"): (
        "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len max_seq_len "
        "block_table_tensor slot_mapping causal logits_indices_padded num_logits_indices max_logits_per_req "
        "encoder_seq_lens encoder_seq_lens_cpu dcp_local_seq_lens dcp_local_seq_lens_cpu_upper_bound positions "
        "is_prefilling seq_lens_cpu_upper_bound req_idx mm_req_doc_ranges rswa_prefix_lens replayssm_decode_base_cpu"
    ),
    ("vllm.utils.torch_utils", "async_tensor_h2d"): "data device dtype out",
    (
        "vllm.model_executor.layers.quantization.utils.quant_utils",
        "kFp8StaticTensorSym",
    ): "dtype scale scale2 symmetric",
    (_REGISTRY, "register_backend"): "backend class_path is_mamba",
    (_SELECTOR, "AttentionSelectorConfig"): (
        "head_size dtype kv_cache_dtype block_size use_mla has_sink use_sparse use_mm_prefix use_per_head_quant_scales "
        "attn_type has_sliding_window use_non_causal use_batch_invariant use_kv_connector use_pcp "
        "use_adaptive_verification use_dcp use_rswa"
    ),
    CACHED: "backend attn_selector_config num_heads _run_kv_cache_dtype",
    ("vllm.platforms.interface", "Platform.get_attn_backend_cls"): "selected_backend attn_selector_config num_heads",
    # layers, blocks, heads, tokens, elements: the axes of a cache in each order
    ("vllm.v1.kv_cache_layout", "KVCacheLayout"): "LBHNC LBNHC LHBNC BLHNC BLNHC BHLNC",
}
# names that a module, or a class in one, must have among others
NEEDED: dict[tuple[str, str], str] = {
    (_BACKEND, ""): "AttentionCGSupport AttentionMetadata MultipleOf",
    (_REGISTRY, ""): "AttentionBackendEnum",
    ("vllm.config", ""): "get_current_vllm_config_or_none",
    ("vllm.config", "AttentionConfig"): "flash_attn_version use_trtllm_attention",
    ("vllm.config", "CacheConfig"): "cache_dtype",
    ("vllm.config", "ModelConfig"): (
        "attn_type get_head_size get_num_attention_heads get_num_kv_heads hf_text_config is_diffusion is_mm_prefix_lm "
        "max_model_len"
    ),
    ("vllm.config", "ParallelConfig"): "cp_kv_cache_interleave_size decode_context_parallel_size",
    ("vllm.config", "SchedulerConfig"): "max_num_seqs",
    ("vllm.config", "SpeculativeConfig"): "num_speculative_tokens",
    ("vllm.config", "VllmConfig"): (
        "attention_config cache_config model_config parallel_config scheduler_config speculative_config"
    ),
    ("vllm.envs", ""): (
        "VLLM_BATCH_INVARIANT VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA environment_variables"
    ),
    ("vllm.distributed.parallel_state", ""): "get_dcp_group get_dcp_world_size_and_rank",
    ("vllm.logger", ""): "init_logger",
    ("vllm.utils.import_utils", ""): "resolve_obj_by_qualname",
    ("vllm.v1.kv_cache_interface", "AttentionSpec"): "dcp_sharded",
    # `metadata` recognises its builder by this name
    ("vllm.v1.attention.backends.utils", ""): "create_fast_prefill_custom_backend",
}


def moved_interfaces() -> list[str]:
    """The differences of the installed vLLM from the record, each as a sentence."""
    # the plugin's own function may stand in place of vLLM's, for another platform of the process
    return list(
        differences(RECORD, NEEDED, cached=[CACHED], replaced=lambda found: hasattr(found, "decided_by_attnreg"))
    )
