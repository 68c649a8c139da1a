"""Configurations as models were published, from memory, and files made to exercise a rule."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


# Published values from memory ("style"), and files made to exercise a rule.
_GEMMA3_VISION = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
                  "num_attention_heads": 16, "num_hidden_layers": 27, "image_size": 896, "patch_size": 14,
                  "vision_use_head": False}  # fmt: skip
_MLA = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
         "original_max_position_embeddings": 4096}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
_NEMOTRON_H = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"

PUBLISHED: dict[str, dict[str, Config]] = {
    "llama": {
        "Llama-3.2-3B style": {"hidden_size": 3072, "head_dim": 128, "num_hidden_layers": 28,
                               "num_attention_heads": 24, "num_key_value_heads": 8},
        "head_dim that is not hidden/heads": {"hidden_size": 2048, "head_dim": 80, "num_hidden_layers": 4,
                                              "num_attention_heads": 32, "num_key_value_heads": 8},
    },
    "llama4": {
        "Llama-4-Scout style": {
            "text_config": {"model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48,
                            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                            "attention_chunk_size": 8192, "no_rope_layers": [], "interleave_moe_layer_step": 1,
                            "num_local_experts": 16},
            "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408, "num_hidden_layers": 34,
                              "num_attention_heads": 16, "image_size": 336, "patch_size": 14}},
    },
    "llama4_text": {
        "no_rope_layers []": {"num_hidden_layers": 8, "no_rope_layers": []},
        "no_rope_layers null": {"num_hidden_layers": 8, "no_rope_layers": None},
        "no_rope_layers stated": {"num_hidden_layers": 6, "no_rope_layers": [0, 1, 1, 0, 1, 1]},
        "attention_chunk_size 4096": {"num_hidden_layers": 8, "attention_chunk_size": 4096},
    },
    "gemma3": {
        "gemma-3-4b-it style (text_config without head counts)": {
            "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                            "num_hidden_layers": 34, "sliding_window": 1024,
                            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
            "vision_config": _GEMMA3_VISION, "mm_tokens_per_image": 256},
        "gemma-3-27b-it style": {
            "text_config": {"model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504,
                            "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
                            "head_dim": 128, "query_pre_attn_scalar": 168, "sliding_window": 1024},
            "vision_config": _GEMMA3_VISION, "mm_tokens_per_image": 256},
    },
    "gemma3n_text": {
        "gemma-3n-E2B style": {"hidden_size": 2048, "num_hidden_layers": 30, "num_attention_heads": 8,
                               "num_key_value_heads": 2, "head_dim": 256, "num_kv_shared_layers": 10,
                               "sliding_window": 512},
        "num_kv_shared_layers 0": {"num_hidden_layers": 10, "num_kv_shared_layers": 0},
    },
    "gemma3n": {
        "gemma-3n-E4B style (text_config)": {"text_config": {
            "model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 35, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "num_kv_shared_layers": 15, "sliding_window": 512}},
    },
    "gemma4_text": {
        "KV sharing over the last layers": {"num_hidden_layers": 12, "num_kv_shared_layers": 5},
        "attention_k_eq_v with global KV heads": {"num_hidden_layers": 12, "attention_k_eq_v": True,
                                                  "num_global_key_value_heads": 2, "global_head_dim": 512},
        "global KV heads without attention_k_eq_v (ignored)": {"num_hidden_layers": 12,
                                                               "num_global_key_value_heads": 2},
        "global_head_dim 256": {"num_hidden_layers": 6, "global_head_dim": 256},
        "last layer stated as sliding (forced full)": {
            "num_hidden_layers": 4, "layer_types": ["full_attention"] + ["sliding_attention"] * 3},
    },
    "gemma4": {
        "with a vision tower": {
            "text_config": {"model_type": "gemma4_text", "num_hidden_layers": 12,
                            "use_bidirectional_attention": "vision"},
            "vision_config": {"model_type": "gemma4_vision", "num_hidden_layers": 4}},
    },
    "vaultgemma": {"few fields, softcap null": {"num_hidden_layers": 4, "attn_logit_softcapping": None}},
    "t5gemma": {
        "t5gemma-2b-2b style": {
            "encoder": {"model_type": "t5_gemma_module", "num_hidden_layers": 6, "hidden_size": 2304, "head_dim": 256},
            "decoder": {"model_type": "t5_gemma_module", "num_hidden_layers": 6, "hidden_size": 2304,
                        "head_dim": 256, "cross_attention_hidden_size": 2304}},
    },
    "deepseek_v2": {
        "few fields": {"num_hidden_layers": 4, "num_experts_per_tok": 6},
        "yarn with mscale": {"num_hidden_layers": 4, "num_experts_per_tok": 6, "rope_scaling": {
            **_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    },
    "deepseek_v3": {
        "DeepSeek-V3 style (yarn)": {
            "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
            **_MLA, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
            "first_k_dense_replace": 3, "rope_scaling": _YARN},
        "head_dim and num_key_value_heads that lie": {"num_hidden_layers": 4, "head_dim": 192,
                                                      "num_key_value_heads": 8},
    },
    "deepseek_v32": {
        "DeepSeek-V3.2 style": {
            "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
            **_MLA, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "rope_scaling": _YARN},
    },
    "deepseek_v4": {
        "compress_ratios in the file": {"num_hidden_layers": 8, "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 0]},
        "compress_rate_csa and hca": {"num_hidden_layers": 6, "compress_rate_csa": 8, "compress_rate_hca": 64},
    },
    "kimi_linear": {
        "Kimi-Linear-48B style (1-based lists)": {
            "hidden_size": 2304, "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32,
            "head_dim": 72, **_MLA, "q_lora_rank": None, "first_k_dense_replace": 1, "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
                "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
                "short_conv_kernel_size": 4}},
    },
    "kimi_k25": {
        "few fields in text_config (deepseek_v3)": {
            "text_config": {"model_type": "deepseek_v3", "num_hidden_layers": 4, "num_attention_heads": 64,
                            "num_key_value_heads": 64}},
    },
    "longcat_flash": {
        "LongCat-Flash style": {"hidden_size": 6144, "num_layers": 28, "num_attention_heads": 64, **_MLA},
        "num_layers 3": {"num_layers": 3},
    },
    "zamba": {
        "Zamba-7B style": {"hidden_size": 3712, "num_hidden_layers": 76, "num_attention_heads": 16,
                           "num_key_value_heads": 16, "attn_layer_period": 6, "attn_layer_offset": 4},
        "attn_layer_period 3, offset 1": {"num_hidden_layers": 12, "attn_layer_period": 3, "attn_layer_offset": 1},
    },
    "zamba2": {
        "Zamba2-1.2B style": {
            "hidden_size": 2048, "num_hidden_layers": 38, "num_attention_heads": 32, "num_key_value_heads": 32,
            "num_mem_blocks": 1, "use_mem_rope": True, "layers_block_type": [
                "hybrid" if i in (5, 11, 17, 23, 29, 35) else "mamba" for i in range(38)]},
        "two memory blocks": {
            "num_hidden_layers": 12, "num_mem_blocks": 2, "layers_block_type": [
                "hybrid" if i % 3 == 2 else "mamba" for i in range(12)]},
    },
    "nemotron_h": {
        "Nemotron-H-8B style": {
            "hidden_size": 4096, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "hybrid_override_pattern": _NEMOTRON_H},
        "pattern with experts": {"hybrid_override_pattern": "MEM*EMEM*E", "num_hidden_layers": 10},
        "layers_block_type in the file": {"layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba", "mlp"]},
        "pattern shorter than num_hidden_layers": {"hybrid_override_pattern": "M-M*-", "num_hidden_layers": 52},
    },
    "falcon": {
        "falcon-7b style": {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
                            "multi_query": True, "new_decoder_architecture": False, "alibi": False,
                            "parallel_attn": True},
        "falcon-40b style": {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128,
                             "num_kv_heads": 8, "new_decoder_architecture": True, "alibi": False},
        "falcon-rw-1b style (alibi)": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
                                       "multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
        "num_kv_heads without the new architecture (ignored)": {
            "hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 64, "num_kv_heads": 8},
        "n_embed": {"n_embed": 2048, "num_hidden_layers": 4, "num_attention_heads": 32},
        "alibi with the new architecture": {"hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 64,
                                            "num_kv_heads": 8, "new_decoder_architecture": True, "alibi": True},
    },
    "falcon_h1": {"Falcon-H1-0.5B style": {"hidden_size": 1024, "num_hidden_layers": 36, "num_attention_heads": 8,
                                           "num_key_value_heads": 2, "head_dim": 64}},
    "glm4_moe": {
        "GLM-4.5 style": {"hidden_size": 5120, "num_hidden_layers": 92, "num_attention_heads": 96,
                          "num_key_value_heads": 8, "head_dim": 128},
        "GLM-4.5-Air style": {"hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96,
                              "num_key_value_heads": 8, "head_dim": 128},
    },
    "glm_moe_dsa": {
        "index_topk_pattern FSSF": {"num_hidden_layers": 8, "index_topk_pattern": "FSSFFSSF"},
        "index_topk_freq 4": {"num_hidden_layers": 10, "index_topk_freq": 4},
        "index_topk_freq 4, index_skip_topk_offset 3": {"num_hidden_layers": 10, "index_topk_freq": 4,
                                                        "index_skip_topk_offset": 3},
        "indexer_types stated": {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "shared", "full"]},
    },
    "mistral_large4_text": {
        "index_topk_freq 4": {"num_hidden_layers": 8, "index_topk_freq": 4},
        "no_rope_layer_interval 2": {"num_hidden_layers": 8, "no_rope_layer_interval": 2},
        "kv_source_layers stated": {"num_hidden_layers": 8, "kv_source_layers": [0, 1, 0, 3, 1, 1, 6, 3]},
    },
    "glm5_next_text": {
        "index_topk_pattern": {"num_hidden_layers": 8, "index_topk_pattern": "FSSFFSSF"},
        "layer_types in the file": {"num_hidden_layers": 4, "layer_types": [
            "full_attention", "linear_attention", "linear_attention", "full_attention"]},
    },
    "minimax": {
        "MiniMax-Text-01 style": {
            "hidden_size": 6144, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 128, "num_local_experts": 32,
            "layer_types": ["full_attention" if i % 8 == 7 else "linear_attention" for i in range(80)]},
        "sliding window on its softmax layers": {"num_hidden_layers": 8, "sliding_window": 4096},
    },
    "minimax_m3_vl": {
        "sparse_attention_config in text_config": {"text_config": {
            "model_type": "minimax_m3_vl_text", "num_hidden_layers": 4, "sparse_attention_config": {
                "sparse_attention_freq": [0, 0, 1, 1], "sparse_num_index_heads": 4, "sparse_index_dim": 128,
                "sparse_block_size": 64, "sparse_topk_blocks": 8, "sparse_local_block": 2}}},
    },
    "mimo_v2_flash": {
        "MiMo-V2-Flash style": {
            "hidden_size": 4096, "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4,
            "head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8,
            "swa_head_dim": 192, "swa_v_head_dim": 128, "sliding_window_size": 128},
        "sliding_window_size 256": {"num_hidden_layers": 12, "sliding_window_size": 256},
    },
    "dots1": {
        "dots.llm1 style": {"hidden_size": 4096, "num_hidden_layers": 62, "num_attention_heads": 32,
                            "num_key_value_heads": 32, "n_routed_experts": 128, "num_experts_per_tok": 6,
                            "n_shared_experts": 2, "max_window_layers": 62, "sliding_window": None},
        "max_window_layers 3": {"num_hidden_layers": 6, "n_routed_experts": 8, "num_experts_per_tok": 2,
                                "n_shared_experts": 1, "max_window_layers": 3, "sliding_window": 1000},
    },
    "dots3_note_text": {
        "use_dsa false": {"num_hidden_layers": 8, "use_dsa": False},
        "use_sliding_window false": {"num_hidden_layers": 8, "use_sliding_window": False},
        "swa geometry": {"num_hidden_layers": 8, "swa_num_attention_heads": 32, "swa_num_key_value_heads": 32,
                         "swa_kv_lora_rank": 512, "swa_head_dim": 192, "swa_qk_nope_head_dim": 128,
                         "sliding_window_size": 256},
    },
    "diffllama": {"few fields, grouped": {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32,
                                          "num_key_value_heads": 8}},
    "granitemoehybrid": {
        "granite-4.0-tiny style": {
            "hidden_size": 1536, "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4,
            "attention_multiplier": 0.0078125, "position_embedding_type": "nope", "num_local_experts": 64,
            "mamba_n_heads": 48,
            "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)]},
        "all attention": {"num_hidden_layers": 4, "layer_types": ["attention"] * 4, "attention_multiplier": 0.015625},
    },
    "bamba": {"attn_layer_indices [1, 3]": {"num_hidden_layers": 6, "attn_layer_indices": [1, 3]}},
    "jamba": {"attn_layer_period 4, offset 2": {"num_hidden_layers": 8, "attn_layer_period": 4,
                                               "attn_layer_offset": 2}},
    "gpt_neo": {
        "gpt-neo-125m style": {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "window_size": 256,
                               "attention_types": [[["global", "local"], 6]]},
        "local first, window 128": {"num_layers": 4, "num_heads": 16, "window_size": 128,
                                    "attention_types": [[["local", "global"], 2]]},
        "all global": {"num_layers": 4, "attention_types": [[["global"], 4]]},
    },
    "gpt_bigcode": {
        "multi_query false": {"n_layer": 4, "multi_query": False},
        "starcoder style": {"n_embd": 6144, "n_head": 48, "n_layer": 40, "multi_query": True},
    },
    "gpt2": {
        "gpt2-xl style": {"n_embd": 1600, "n_head": 25, "n_layer": 48},
        "scale_attn_by_inverse_layer_idx": {"n_layer": 4, "scale_attn_by_inverse_layer_idx": True},
        "scale_attn_weights false": {"n_layer": 4, "scale_attn_weights": False},
        "add_cross_attention": {"n_layer": 4, "add_cross_attention": True},
    },
    "modernbert": {
        "global_attn_every_n_layers 2, local_attention 64": {"num_hidden_layers": 6, "local_attention": 64,
                                                             "global_attn_every_n_layers": 2},
    },
    "modernbert-decoder": {
        "global_attn_every_n_layers 2, local_attention 64": {"num_hidden_layers": 6, "local_attention": 64,
                                                             "global_attn_every_n_layers": 2},
        "local_attention 0": {"num_hidden_layers": 6, "local_attention": 0},
    },
    "smolvlm": {"SmolVLM-Instruct style": {
        "text_config": {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 24,
                        "num_attention_heads": 32, "num_key_value_heads": 32},
        "vision_config": {"model_type": "smolvlm_vision", "hidden_size": 1152, "num_hidden_layers": 27,
                          "num_attention_heads": 16, "image_size": 384, "patch_size": 14}}},
    "idefics2": {"idefics2-8b style": {
        "text_config": {"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32,
                        "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096},
        "vision_config": {"model_type": "idefics2_vision", "hidden_size": 1152, "num_hidden_layers": 27,
                          "num_attention_heads": 16, "image_size": 980, "patch_size": 14}}},
    "exaone4": {
        "EXAONE-4.0-32B style": {
            "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
            "head_dim": 128, "sliding_window": 4096, "sliding_window_pattern": "LLLG", "layer_types": [
                "full_attention" if i % 4 == 3 else "sliding_attention" for i in range(64)]},
        "EXAONE-4.0-1.2B style (no window)": {
            "hidden_size": 2048, "num_hidden_layers": 30, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 64, "sliding_window": None, "sliding_window_pattern": None,
            "layer_types": ["full_attention"] * 30},
        "sliding_window_pattern 3": {"num_hidden_layers": 8, "sliding_window_pattern": 3},
    },
    "hunyuan_v1_dense": {"Hunyuan-7B style": {"hidden_size": 4096, "head_dim": 128, "num_hidden_layers": 32,
                                              "num_attention_heads": 32, "num_key_value_heads": 8}},
    "hunyuan_v1_moe": {"Hunyuan-A13B style": {
        "hidden_size": 4096, "head_dim": 128, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_experts": 64, "moe_topk": 8}},
    "hunyuan_vl_text": {"head_dim stated": {"hidden_size": 1024, "head_dim": 128, "num_hidden_layers": 4,
                                            "num_attention_heads": 16, "num_key_value_heads": 8}},
    "hunyuan_vl": {"head_dim stated": {"text_config": {
        "model_type": "hunyuan_vl_text", "hidden_size": 1024, "head_dim": 128, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 8}}},
    "minicpm3": {"MiniCPM3-4B style": {
        "hidden_size": 2560, "num_hidden_layers": 62, "num_attention_heads": 40, "num_key_value_heads": 40,
        "q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}},
    "ministral": {"Ministral-8B style": {
        "hidden_size": 4096, "head_dim": 128, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "sliding_window": 32768, "layer_types": [
            "full_attention" if i % 4 == 0 else "sliding_attention" for i in range(36)]},
        "head_dim stated, no layer_types": {"head_dim": 128, "num_hidden_layers": 4},
        "sliding_window null, head_dim stated": {"head_dim": 128, "num_hidden_layers": 4, "sliding_window": None}},
    "qwen2": {
        "Qwen2.5-7B style": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
                             "num_key_value_heads": 4, "sliding_window": 131072, "use_sliding_window": False,
                             "max_window_layers": 28},
    },
    "qwen2_vl": {"Qwen2-VL-7B style (text fields at top level)": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28, "rope_scaling": {
            "type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "patch_size": 14}}},
    "qwen2_5_vl": {
        "window_size 56, one full block": {
            "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2,
            "vision_config": {"depth": 4, "hidden_size": 1280, "num_heads": 16, "window_size": 56,
                              "fullatt_block_indexes": [3]}}},
    "qwen3_5_text": {"Qwen3.5 style (full_attention_interval)": {
        "num_hidden_layers": 12, "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2}},
    "ernie4_5_moe": {"ERNIE-4.5-21B style": {"hidden_size": 2560, "num_hidden_layers": 28,
                                             "num_attention_heads": 20, "num_key_value_heads": 4}},
    "seed_oss": {"Seed-OSS-36B style": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 80,
                                        "num_key_value_heads": 8, "head_dim": 128}},
    "stablelm": {"few fields, no KV heads": {"hidden_size": 2048, "num_hidden_layers": 4,
                                             "num_attention_heads": 32}},
    "phimoe": {"Phi-3.5-MoE style": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                                     "num_key_value_heads": 8, "sliding_window": 131072}},
    "phi4_multimodal": {"Phi-4-multimodal style": {
        "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8,
        "sliding_window": 262144}},
    "mllama": {"Llama-3.2-11B-Vision style": {
        "text_config": {"model_type": "mllama_text_model", "hidden_size": 4096, "num_hidden_layers": 40,
                        "num_attention_heads": 32, "num_key_value_heads": 8,
                        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
        "vision_config": {"model_type": "mllama_vision_model", "hidden_size": 1280, "num_hidden_layers": 32,
                          "num_global_layers": 8, "attention_heads": 16, "image_size": 560}}},
    "mllama_text_model": {"cross_attention_layers [1, 3]": {"num_hidden_layers": 6,
                                                            "cross_attention_layers": [1, 3]}},
    "llava": {
        "llava-1.5-7b style": {
            "text_config": {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
                            "num_attention_heads": 32},
            "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "num_hidden_layers": 24,
                              "num_attention_heads": 16, "image_size": 336, "patch_size": 14}},
        "text_config mistral with a window": {
            "text_config": {"model_type": "mistral", "num_hidden_layers": 4, "sliding_window": 4096}},
        "text_config qwen2": {"text_config": {"model_type": "qwen2", "num_hidden_layers": 4}},
    },
    "internvl": {"InternVL3-8B style": {
        "text_config": {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
                        "num_attention_heads": 28, "num_key_value_heads": 4},
        "vision_config": {"model_type": "internvl_vision", "hidden_size": 1024, "num_hidden_layers": 24,
                          "num_attention_heads": 16}}},
    "whisper": {"other decoder than encoder": {
        "d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "decoder_layers": 2,
        "decoder_attention_heads": 4}},
    "bart": {"other decoder than encoder": {
        "d_model": 512, "encoder_layers": 3, "encoder_attention_heads": 8, "decoder_layers": 2,
        "decoder_attention_heads": 4}},
    "t5": {"num_decoder_layers stated": {"num_layers": 4, "num_decoder_layers": 2, "num_heads": 12, "d_kv": 64,
                                         "d_model": 768}},
    "umt5": {"umt5-small style": {"d_model": 512, "d_kv": 64, "num_heads": 6, "num_layers": 8}},
    "switch_transformers": {"few fields": {"num_layers": 4, "num_decoder_layers": 2, "num_heads": 8, "d_kv": 64}},
    "longt5": {
        "local": {"num_layers": 2, "encoder_attention_type": "local"},
        "transient-global": {"num_layers": 2, "encoder_attention_type": "transient-global"},
    },
    "recurrent_gemma": {
        "recurrentgemma-9b style": {"hidden_size": 4096, "num_hidden_layers": 38, "num_attention_heads": 16,
                                    "num_key_value_heads": 1, "attention_window_size": 2048},
        "block_types stated": {"num_hidden_layers": 6, "block_types": ["attention", "recurrent"]},
    },
    "big_bird": {"attention_type original_full": {"num_hidden_layers": 4, "attention_type": "original_full"},
                 "is_decoder": {"num_hidden_layers": 4, "attention_type": "original_full", "is_decoder": True}},
    "bigbird_pegasus": {"attention_type original_full": {
        "encoder_layers": 2, "decoder_layers": 2, "attention_type": "original_full"}},
    "jetmoe": {"few fields": {"num_hidden_layers": 4, "num_key_value_heads": 8, "num_experts_per_tok": 2,
                              "kv_channels": 64}},
    "step3p5": {
        "Step-3.5-Flash style": {
            "hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 64, "num_key_value_heads": 8,
            "sliding_window": 512, "attention_other_setting": {"num_attention_heads": 96},
            "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 2}},
    "laguna": {
        "heads per layer": {
            "num_hidden_layers": 4, "num_attention_heads": 48, "num_key_value_heads": 8,
            "num_attention_heads_per_layer": [48, 64, 64, 48], "sliding_window": 512, "layer_types": [
                "full_attention", "sliding_attention", "sliding_attention", "full_attention"]}},
    "ultrabert": {"attention_windows": {"num_hidden_layers": 4, "attention_windows": [128, None, 128, None]}},
    "inkling_text": {
        "local_layer_ids stated": {"num_hidden_layers": 6, "local_layer_ids": [0, 2, 4]},
        "swa geometry": {"num_hidden_layers": 6, "swa_num_key_value_heads": 8, "swa_head_dim": 64,
                         "sliding_window_size": 256},
    },
    "sapiens2": {"grouped in the middle": {"num_hidden_layers": 8, "num_first_full_attention_layers": 2,
                                           "num_last_full_attention_layers": 2}},
    "gpt_oss": {"layer_types stated, all full": {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}},
    "granite_swa": {"few fields, scale": {"num_hidden_layers": 8, "attention_multiplier": 0.0078125}},
    "granite": {"granite-3.3-8b style": {"hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
                                         "num_key_value_heads": 8, "attention_multiplier": 0.0078125}},
    "glm4v_text": {"GLM-4.1V style (mrope sections)": {"num_hidden_layers": 4, "rope_parameters": _MROPE}},
    "glm4v": {"GLM-4.1V style": {"text_config": {"model_type": "glm4v_text", "num_hidden_layers": 4,
                                                 "rope_parameters": _MROPE}}},
    "glm4v_moe_text": {"GLM-4.5V style": {"num_hidden_layers": 4, "head_dim": 128, "rope_parameters": _MROPE}},
    "chameleon": {"with a vocabulary_map": {"num_hidden_layers": 4, "vocabulary_map": {"<image>": 8711}}},
    "emu3": {"with a vocabulary_map": {"vocabulary_map": {"<|extra_200|>": 5}, "text_config": {
        "model_type": "emu3_text_model", "num_hidden_layers": 4}}},
    "esm": {"ESM-2 8M style": {"vocab_size": 33, "hidden_size": 320, "num_hidden_layers": 6,
                               "num_attention_heads": 20, "position_embedding_type": "rotary",
                               "mask_token_id": 32, "pad_token_id": 1}},
    "diffusion_gemma_text": {"few fields, experts": {"num_hidden_layers": 6, "num_experts": 8,
                                                     "moe_intermediate_size": 512, "top_k_experts": 2}},
    "deepseek_ocr2_text": {"mlp_layer_types stated": {"num_hidden_layers": 2,
                                                      "mlp_layer_types": ["dense", "sparse"]}},
    "cohere_compass_text": {"rope by layer type": {"num_hidden_layers": 4, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}},
    "dbrx": {"dbrx style": {
        "d_model": 6144, "n_heads": 48, "n_layers": 4, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8,
                                                                       "rope_theta": 500000}}},
    "qwen4_exp_text": {
        "indexer fields stated": {
            "num_hidden_layers": 8, "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 256,
            "indexer_budget": 2048, "indexer_compress_ratio": 4},
        "full_attention_interval 3": {
            "num_hidden_layers": 6, "full_attention_interval": 3, "indexer_n_heads": 8, "indexer_kv_heads": 1,
            "indexer_head_dim": 256, "indexer_budget": 2048, "indexer_compress_ratio": 4},
    },
    "qwen4_exp": {"indexer fields stated": {"text_config": {
        "model_type": "qwen4_exp_text", "num_hidden_layers": 4, "indexer_n_heads": 8, "indexer_kv_heads": 1,
        "indexer_head_dim": 256, "indexer_budget": 2048, "indexer_compress_ratio": 4}}},
    "qwen3_omni_moe": {"Qwen3-Omni-30B-A3B style, without the talker": {
        "enable_audio_output": False, "thinker_config": {"text_config": {
            "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128}}}},
    "granite4_vision": {"deepstack_layer_map stated": {
        "deepstack_layer_map": [[-1, 0], [-2, 4]], "downsample_rate": "4/8"}},
    "aya_vision": {"aya-vision-8b style": {
        "text_config": {
            "model_type": "cohere2", "hidden_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 32,
            "num_key_value_heads": 8, "sliding_window": 4096},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27,
                          "num_attention_heads": 16, "image_size": 364, "patch_size": 14}}},
    "nemotron": {"nemotron-4-15b style": {"hidden_size": 6144, "num_hidden_layers": 32,
                                          "num_attention_heads": 48, "num_key_value_heads": 8}},
    "moonshine_streaming": {"num_key_value_heads stated": {"num_key_value_heads": 8}},
    "zaya": {"hybrid_sliding": {"num_hidden_layers": 4, "sliding_window": 1000, "layer_types": [
        "hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"]}},
    "hrm_text": {"few fields": {"num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 2}},
    "albert": {"two groups": {"num_hidden_layers": 6, "num_hidden_groups": 2, "hidden_size": 768,
                              "num_attention_heads": 12, "intermediate_size": 3072}},
    "deberta": {"relative_attention": {"num_hidden_layers": 4, "relative_attention": True,
                                       "pos_att_type": ["c2p", "p2c"], "max_relative_positions": -1}},
    "deberta-v2": {"deberta-v3-base style": {
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"], "position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm",
        "max_relative_positions": -1}},
    "mamba": {"mamba-2.8b style": {"hidden_size": 2560, "num_hidden_layers": 64}},
    "mamba2": {"few fields": {"hidden_size": 2560, "num_hidden_layers": 4, "num_heads": 80, "head_dim": 64,
                              "expand": 2}},
    "lfm2_moe": {"LFM2-8B-A1B style": {
        "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 8,
        "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention"]}},
    "lfm2_vl": {"with layer_types": {"text_config": {
        "model_type": "lfm2", "num_hidden_layers": 6, "full_attn_idxs": [2, 4]}}},
    "moonshine_streaming_encoder": {"sliding_windows stated": {"num_hidden_layers": 4, "sliding_windows": [
        [16, 4], [16, 0], [32, 0], [16, 4]]}},
    "longformer": {"attention_window per layer": {"num_hidden_layers": 2, "attention_window": [64, 128]}},
    "led": {"attention_window 64": {"encoder_layers": 2, "decoder_layers": 2, "attention_window": 64}},
}  # fmt: skip
