"""A tiny random model of any architecture of transformers: its default configuration with every size made small."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

Config = dict[str, Any]
VOCABULARY = 128
# parameters of a model whose sizes cannot all be made small
LARGEST = 30_000_000
# what a text may hold: above it are the special tokens of composites, below it padding and the like
TEXT_TOKENS = (5, 96)
_HEADS, _HEAD_SIZE = 4, 16
_HIDDEN = _HEADS * _HEAD_SIZE

# the small value of each field of these names; where the original is smaller still, it stays
_LAYERS = """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth num_encoder_layers
    num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_hidden_groups temporal_num_layers
    spatial_num_layers num_local_layers prenet_layers n_local_layers"""
_KV_HEADS = """num_key_value_heads n_kv_head n_kv_heads kv_n_heads num_kv_heads multi_query_group_num
    num_key_value_groups encoder_num_key_value_heads decoder_num_key_value_heads swa_num_key_value_heads n_head_kv
    num_query_groups"""
_QUERY_HEADS = """num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
    decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads num_encoder_attention_heads
    num_decoder_attention_heads num_mlp_heads swa_num_attention_heads index_n_heads linear_num_key_heads
    linear_num_value_heads"""
_HEAD_SIZES = """head_dim attention_head_size kv_channels d_kv head_size attention_key_dim global_head_dim swa_head_dim
    linear_key_head_dim linear_value_head_dim qk_nope_head_dim v_head_dim key_value_proj_dim index_head_dim dim_head
    lightning_head_dim cross_attn_head_dim attention_head_dim"""
_WIDTHS = """hidden_size d_model n_embd embed_dim dim width model_dim hidden_dim embedding_size projection_dim
    encoder_hidden_size decoder_hidden_size out_hidden_size output_dim cross_hidden_size encoder_dim decoder_dim
    word_embed_proj_dim text_hidden_size vision_hidden_size audio_hidden_size d_embed proj_size token_dim embedding_dim
    vision_embed_dim codebook_dim mm_hidden_size image_embed_dim projection_size emb_dim"""
_INNER = """intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size ffw_hidden_size
    mlp_dim encoder_intermediate_size decoder_intermediate_size intermediate_dim feed_forward_size
    moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size mlp_hidden_size
    expert_ffn_hidden_size shared_intermediate_size intermediate_size_mlp moe_ffn_hidden_size ffn_intermediate_size
    projector_hidden_size projector_hidden_dim"""
_WORDS = """vocab_size n_vocab text_vocab_size vocabulary_size image_vocab_size audio_vocab_size encoder_vocab_size
    decoder_vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input entity_vocab_size n_words"""
_POSITIONS = """max_position_embeddings n_positions max_source_positions max_target_positions max_seq_len
    max_encoder_position_embeddings max_decoder_position_embeddings max_sequence_length seq_length max_seq_length
    n_ctx"""
_SIZES = {
    _LAYERS: 2,
    _KV_HEADS: 2,
    _QUERY_HEADS: _HEADS,
    _HEAD_SIZES: _HEAD_SIZE,
    "qk_rope_head_dim rotary_dim rotary_ndims index_rope_head_dim": 8,
    _WIDTHS: _HIDDEN,
    _INNER: 48,
    _WORDS: VOCABULARY,
    _POSITIONS: 128,
    "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts n_experts": 4,
    "num_experts_per_tok num_experts_per_token moe_topk moe_top_k num_selected_experts top_k_experts moe_k": 2,
    "n_group topk_group n_shared_experts num_shared_experts num_expert_group first_k_dense_replace": 1,
    "num_nextn_predict_layers num_dense_layers moe_layer_start_index num_limited_groups": 1,
    "mamba_n_groups n_groups": 1,
    "q_lora_rank kv_lora_rank o_lora_rank attn_rank relative_attention_num_buckets": 32,
    "image_size img_size force_image_size input_size": 32,
    "sliding_window sliding_window_size local_attention window_size local_window_size attention_window": 5,
    "attention_chunk_size chunk_size hidden_size_per_layer_input laurel_rank": 8,
    "index_topk": 6,
    "mamba_d_state ssm_state_size state_size mamba_d_ssm conv_dim_out lru_width num_mel_bins n_mels": 16,
    "num_queries num_latents num_query_tokens query_length n_queries": 4,
}
_SMALL = {name: size for names, size in _SIZES.items() for name in names.split()}
_FEW = {name: _SMALL[name] for name in f"{_LAYERS} {_WORDS}".split()}
_BACKBONE: Config = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_features": ["stage1", "stage2", "stage3", "stage4"], "out_indices": [1, 2, 3, 4],
}  # fmt: skip
# wide: scores of several units, so that attention looks at some tokens and not at their mean
_RANGES = re.compile(r"(initializer_range|init_std|init_range|initializer_factor)\Z")
_TOKEN = re.compile(r"_(token_id|token_index|id)\Z|\A(boi|eoi|image_token|audio_token).*(id|index)\Z")


# what a class cannot be built or run with as it stands, or what the rules make wrong
_OVERRIDES: dict[str, Config] = {
    "autoformer": {"prediction_length": 4}, "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
    "chameleon": {"vocabulary_map": {"<image>": 100}},
    "cohere_compass_text": {"rope_parameters": {k: {"rope_type": "default", "rope_theta": 10000.0}
                                                for k in ("full_attention", "sliding_attention")}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 32, "attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dinov3_vit": {"rope_theta": 100.0},
    "dots3_note_text": {"swa_head_dim": 24, "swa_num_key_value_heads": 4},
    **{name: {"window_size": 28} for name in ("exaone4_5_vision", "qwen2_5_omni_vision_encoder", "qwen2_5_vl_vision")},
    "esm": {"vocab_size": 128, "mask_token_id": 4, "pad_token_id": 1, "position_embedding_type": "rotary"},
    "esmc": {"num_key_value_heads": 4, "vocab_size": 128},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128},
    "glm5_next_text": {"num_key_value_heads": 4, "index_kpool": 2},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 32, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_hidden_layers": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0, "altup_num_inputs": 2},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"],
                "num_layers": 2, "window_size": 5},
    "led": {"attention_window": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longformer": {"attention_window": [4, 4]},
    "longcat_flash": {"qk_head_dim": 24},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mistral4": {"head_dim": 16, "qk_head_dim": 24},
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
                       "indexer_compress_ratio": 4},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32]},
    "step3p5": {"sliding_window": 5},
    "wav2vec2-bert": {"vocab_size": 32}, "wav2vec2-conformer": {"vocab_size": 32},
    "xlnet": {"d_head": 16},
}  # fmt: skip
# sections of rotary dimensions that their code takes where the config has none
_SECTIONS = {
    "glm4v_moe_text": (1, 1, 2),
    **dict.fromkeys(("glm4v_text", "glm46v_text", "glm_image_text", "glm_ocr_text", "hunyuan_vl_text",
                     "paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text"), (2, 3, 3)),
}  # fmt: skip
# small by themselves, and of sizes that depend on each other in ways of their own
_AS_THEY_ARE = {
    "donut-swin", "gradium_phonon_tts", "lilt", "mask2former", "maskformer-swin", "mimi", "mobilebert", "mobilevitv2",
    "nemotron3_diarization_audio", "pocket_tts", "pocket_tts_audio_tokenizer", "sam2_hiera_det_model",
    "sam2_vision_model", "swin", "swinv2",
}  # fmt: skip
# where a null stands for what is taken from the sizes that are no longer there
_NULLS = {"head_dim": _HEAD_SIZE, "num_key_value_heads": _HEADS}
_DERIVED = ("out_features", "out_indices", "stage_names")
_KINDS = ("layer_types", "layers_block_type")
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def copies(data: Config) -> Iterator[Config]:
    """Small copies of the content of a config.json, the smallest first; the others keep what the class needs of it.

    The first has every size made small; what is derived from sizes is left to the class. The second has few layers and
    words, and widths as they are. The last is the original.
    """
    original: Config = PreTrainedConfig._decode_special_floats(copy.deepcopy(data))
    _without_timm(original)
    if data["model_type"] not in _AS_THEY_ARE:
        for sizes in (_SMALL, _FEW):
            out = copy.deepcopy(original)
            _shrink(out, sizes, iter(range(TEXT_TOKENS[1], VOCABULARY)))
            yield out
    yield original


def _without_timm(data: Config) -> None:
    """A backbone that a library would bring is one of transformers' own."""
    for name, value in data.items():
        if isinstance(value, dict):
            data[name] = copy.deepcopy(_BACKBONE) if value.get("model_type") == "timm_backbone" else value
            _without_timm(data[name])


def _shrink(data: Config, sizes: Mapping[str, int], ids: Iterator[int]) -> None:
    every = sizes is _SMALL
    per_layer = data.pop("per_layer_config", None)
    for name in _DERIVED if every else ():
        if data.get("model_type") != "resnet":
            data.pop(name, None)
    if every and any(name in data for name in ("num_attention_heads", "n_head", "num_heads")):
        data |= {k: v for k, v in _NULLS.items() if k in data and data[k] is None}
    for name, value in list(data.items()):
        data[name] = _smaller(name, value, sizes, ids)
    for name in _KINDS:
        if isinstance(kinds := data.get(name), list) and kinds:
            _layer_types(data, name, kinds, per_layer)
    if not every:
        return
    if "qk_rope_head_dim" in data and "head_dim" in data:
        data["head_dim"] = data["qk_rope_head_dim"]
    if "kv_lora_rank" in data and "num_key_value_heads" in data:
        data["num_key_value_heads"] = data["num_attention_heads"]
    model_type = str(data.get("model_type"))
    data |= copy.deepcopy(_OVERRIDES.get(model_type, {}))
    if model_type in _SECTIONS:
        data["rope_parameters"]["mrope_section"] = list(_SECTIONS[model_type])


def _smaller(name: str, value: Any, sizes: Mapping[str, int], ids: Iterator[int]) -> Any:
    if isinstance(value, dict) and name not in ("rope_parameters", "rope_scaling"):
        _shrink(value, sizes, ids)
    elif isinstance(value, dict):
        _rope(value) if sizes is _SMALL else None
    elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        for item in value:
            _shrink(item, sizes, ids)
    elif isinstance(value, list) and name in _INNER.split():
        return [_number(name, v, sizes, ids) for v in value]
    elif isinstance(value, int) and not isinstance(value, bool):
        return _number(name, value, sizes, ids)
    elif isinstance(value, float) and _RANGES.match(name):
        return 0.2 if name != "initializer_factor" else 1.0
    elif isinstance(value, float) and "drop" in name:
        return 0.0
    return value


def _number(name: str, value: int, sizes: Mapping[str, int], ids: Iterator[int]) -> int:
    if _TOKEN.search(name):
        return value if 0 <= value < TEXT_TOKENS[0] or value < 0 else next(ids, value % VOCABULARY)
    return min(value, sizes[name]) if name in sizes and value > 0 else value


def _layer_types(data: Config, key: str, kinds: list[Any], per_layer: Config | None) -> None:
    """As many layers as there are kinds of them, two at least, in the order in which they first stand."""
    first = list(dict.fromkeys(kinds))
    chosen = first if len(first) > 1 else first * 2
    data[key] = chosen
    for name in _COUNTS:
        if name in data:
            data[name] = len(chosen)
    for name, value in data.items():
        if isinstance(value, list) and name != key and len(value) == len(kinds):
            data[name] = value[: len(chosen)]
    given = {int(index): change for index, change in (per_layer or {}).items()}
    changes = {str(i): given[kinds.index(kind)] for i, kind in enumerate(chosen) if kinds.index(kind) in given}
    if changes:
        data["per_layer_config"] = {i: {k: 32 if k == "head_dim" else v for k, v in c.items()}
                                    for i, c in changes.items()}  # fmt: skip


def _rope(parameters: Config) -> None:
    section = parameters.get("mrope_section")
    if isinstance(section, list):
        parameters["mrope_section"] = [2, 3, 3] if len(section) == 3 else [4, 4]
    for value in parameters.values():
        if isinstance(value, dict):
            _rope(value)


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Random weights, biases, sinks and norms, so that none is neutral and scores differ by several units."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            if parameter.ndim > 1:
                fan = parameter[0].numel()
                parameter.normal_(0, min(0.25, 1.6 * fan**-0.5), generator=generator)
            else:
                around = 1.0 if bool((parameter == 1).all()) else 0.0
                parameter.normal_(around, 0.1, generator=generator)


def classes(model_type: str) -> dict[str, type[PreTrainedModel]]:
    """task -> the class that transformers has for it."""
    config = CONFIG_MAPPING[model_type]
    out: dict[str, type[PreTrainedModel]] = {}
    for task, name in (
        ("causal_lm", "MODEL_FOR_CAUSAL_LM_MAPPING"),
        ("seq2seq", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
        ("image_text", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING"),
        ("speech", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
        ("ctc", "MODEL_FOR_CTC_MAPPING"),
        ("masked_lm", "MODEL_FOR_MASKED_LM_MAPPING"),
        ("base", "MODEL_MAPPING"),
    ):
        mapping = getattr(modeling_auto, name)
        try:
            found = mapping.get(config, None)
        except (ImportError, KeyError, AttributeError):
            found = None
        if found is not None:
            out[task] = found[0] if isinstance(found, list | tuple) else found
    return out or _in_its_module(config)


def _in_its_module(config: type[PreTrainedConfig]) -> dict[str, type[PreTrainedModel]]:
    """The first class for a config that no auto class knows, such as a tower of a composite."""
    module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    for cls in vars(module).values():
        is_model = isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.config_class is config
        if is_model and not cls.__name__.endswith("PreTrainedModel"):
            return {"base": cls}
    return {}


def is_buildable(cls: type[PreTrainedModel], data: Config) -> bool:
    """Whether a class can be built of a configuration, and is small enough for that."""
    try:
        config = CONFIG_MAPPING[data["model_type"]].from_dict(copy.deepcopy(data))
        with torch.device("meta"):
            model = cls._from_config(config, attn_implementation="eager", experts_implementation="eager")
    except Exception:
        return False
    return sum(parameter.numel() for parameter in model.parameters()) <= LARGEST


def build(cls: type[PreTrainedModel], data: Config, seed: int = 0) -> PreTrainedModel:
    """The model with random weights, attention by eager."""
    config = CONFIG_MAPPING[data["model_type"]].from_dict(copy.deepcopy(data))
    torch.manual_seed(seed)
    # the same weights on every device
    with torch.device("cpu"):
        model = cls._from_config(config, attn_implementation="eager", experts_implementation="eager")
        randomise(model, seed)
    made: PreTrainedModel = model.to(torch.get_default_device()).eval()
    return made
