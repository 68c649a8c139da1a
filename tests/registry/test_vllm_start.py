"""What vLLM 0.33.0 changes before its selector is asked, and which runs it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

import attnreg
from attnreg.cli import main
from attnreg.models.questions import ModelOptions, model_questions
from attnreg.selection.selector import evaluate

REGISTRY = attnreg.load_registry("vllm-0.33.0", plugins=())
CONFIGS = ROOT / "examples/configs"


def selections(config: Path, arch: str, registry: attnreg.Registry = REGISTRY, **given: Any) -> list[attnreg.Selection]:
    """The selections for a model's layers."""
    questions = model_questions(str(config), ModelOptions(given=given), registry).questions
    platform = attnreg.Platform(platform=registry.vocabulary.architectures[arch].platform, arch=arch)
    return [evaluate(q.request, platform, registry) for q in questions if q.request is not None]


def altered(directory: Path, name: str, **changes: Any) -> Path:
    """A copy of an example's config with other fields."""
    data = json.loads((CONFIGS / name / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(data))
    return directory


def dtypes(config: Path, arch: str, **given: Any) -> set[Any]:
    """The dtypes and the backends of a model's layers after the start; `refused` where there is none."""
    found = set()
    for selection in selections(config, arch, **given):
        assert selection.start is not None
        name = selection.backend.name if selection.backend else "refused" if selection.start.refusal else None
        found.add((selection.start.facts["dtype"], name))
    return found


@pytest.mark.parametrize(
    ("model", "arch", "given", "expected"),
    [
        ("gemma-2-9b", "sm90", {}, {("bfloat16", "FLASH_ATTN")}),
        ("gemma-2-9b", "sm80", {}, {("bfloat16", "FLASH_ATTN")}),
        # no bfloat16 before Ampere, and no float16 for gemma 2
        ("gemma-2-9b", "sm75", {}, {("float32", "TRITON_ATTN")}),
        ("gemma-2-9b", "sm90", {"dtype": "float32"}, {("float32", "TRITON_ATTN")}),
        ("gemma-2-9b", "sm90", {"dtype": "float16"}, {("float16", "refused")}),
        ("Llama-3.1-8B", "sm75", {}, {("float16", "TRITON_ATTN")}),
        ("Llama-3.1-8B", "sm75", {"dtype": "bfloat16"}, {("bfloat16", "refused")}),
        ("Llama-3.1-8B", "sm90", {"kv_dtype": "float16"}, {("bfloat16", "refused")}),
    ],
)
def test_the_dtype_of_the_run(model: str, arch: str, given: dict[str, str], expected: set[Any]) -> None:
    assert dtypes(CONFIGS / model, arch, **given) == expected


def test_pooling_prefers_float16(tmp_path: Path) -> None:
    config = altered(tmp_path, "Llama-3.1-8B", architectures=["LlamaForSequenceClassification"], torch_dtype="float32")
    assert dtypes(config, "sm90") == {("float16", "FLASH_ATTN")}
    config = altered(tmp_path, "Llama-3.1-8B", architectures=["LlamaLMHeadModel"], torch_dtype="float32")
    assert dtypes(config, "sm90") == {("bfloat16", "FLASH_ATTN")}


@pytest.mark.parametrize(
    ("quantization", "kv_dtype"),
    [
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8_e4m3"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "fp8"}, "fp8_e4m3"),
        ({"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "int3"}, "auto"),
        (
            {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
            "fp8_e4m3",
        ),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "int", "dynamic": False}}, "auto"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "compressed-tensors"}, "auto"),
        ({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "auto"),
    ],
)
def test_the_kv_dtype_of_the_checkpoint(quantization: dict[str, Any], kv_dtype: str, tmp_path: Path) -> None:
    config = altered(tmp_path, "Llama-3.1-8B", quantization_config=quantization)
    (selection,) = selections(config, "sm80")
    assert selection.start is not None
    assert selection.start.facts["kv_dtype"] == kv_dtype
    # what the user names stands
    (named,) = selections(config, "sm90", kv_dtype="fp8_e5m2")
    assert named.start is not None
    assert named.start.facts["kv_dtype"] == "fp8_e5m2"


@pytest.mark.parametrize("release", ["0.33.0", "0.24.0"])
@pytest.mark.parametrize(("version", "refused"), [(1, True), (2, False), (4, False), (99, True)])
def test_versions_of_flash_attention_that_vllm_does_not_read(release: str, version: int, refused: bool) -> None:
    registry = attnreg.load_registry(f"vllm-{release}", plugins=())
    request = attnreg.AttentionRequest(head_size=128, extra={"flash_attn_version": version})
    found = evaluate(request, attnreg.Platform(platform="cuda", arch="sm90"), registry)
    assert found.start is not None
    assert (found.start.refusal is not None) == refused


def test_the_selector_alone_changes_nothing() -> None:
    (first, *_) = selections(CONFIGS / "gemma-2-9b", "sm90", REGISTRY.selector)
    assert first.start is None
    assert first.backend is not None
    assert first.backend.name == "TRITON_ATTN"


@pytest.mark.parametrize(
    ("request_", "arch", "backend", "step"),
    [
        ({"model": "gemma4_text"}, "sm80", "TRITON_ATTN", "Gemma4Config"),
        ({"model": "gemma4_text"}, "gfx942", "TRITON_ATTN", "Gemma4Config"),
        ({"model": "embedding_gemma2_text"}, "sm90", "TRITON_ATTN", "EmbeddingGemma2ModelConfig"),
        ({"model": "unlimited_ocr"}, "sm90", "FLASH_ATTN", "UnlimitedOCRForCausalLMConfig"),
        ({"model": "unlimited_ocr"}, "sm80", "TRITON_ATTN", "UnlimitedOCRForCausalLMConfig"),
    ],
)
def test_the_code_of_a_model_names_a_backend(request_: dict[str, Any], arch: str, backend: str, step: str) -> None:
    platform = attnreg.Platform(platform=REGISTRY.vocabulary.architectures[arch].platform, arch=arch)
    selection = evaluate(attnreg.AttentionRequest(head_size=128, num_heads=8, **request_), platform, REGISTRY)
    assert selection.backend is not None
    assert selection.backend.name == backend
    assert selection.start is not None
    assert selection.start.named is not None
    assert selection.start.named.name == step
    # a name of the user's stands
    named = evaluate(selection.request, platform, REGISTRY, "FLEX_ATTENTION" if arch != "gfx942" else "ROCM_ATTN")
    assert named.start is not None
    assert named.start.named is None
    assert named.requested is not None


def test_latents_that_the_engine_expands_are_counted_as_it_stores_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = {"num_attention_heads": 40, "num_key_value_heads": 40}
    sizes = {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    config = {"model_type": "minicpm3", "num_hidden_layers": 62, "hidden_size": 2560, **heads, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["explain", "--registry", "vllm-0.33.0", "--arch", "sm90", "--model", str(tmp_path), "--brief"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "FLASH_ATTN/FA3-4 for all 62 layers" in said
    assert "counted for attention mla" not in said
    assert main(["explain", "--registry", "vllm-0.33.0", "--arch", "sm90", "--model", str(tmp_path), "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["kv_cache"]
    # keys and values of 96 columns, in bfloat16
    assert memory["bytes_per_token"] == 62 * 40 * 2 * 96 * 2


@pytest.mark.parametrize(("ranks", "heads"), [(1, 16), (2, 32), (4, 64), (8, 128), (3, 48)])
def test_ranks_that_share_a_context_gather_their_heads(ranks: int, heads: int) -> None:
    """FlashAttention 4's sparse kernel runs 8, 16, 32 or 64 heads then; here each rank has 16."""
    options = ModelOptions(ranks=8, features=frozenset({"dcp"}), extra=(("dcp_ranks", ranks),))
    questions = model_questions(str(CONFIGS / "DeepSeek-V3.2-Exp"), options, REGISTRY).questions
    request = next(q.request for q in questions if q.request is not None and q.request.attention == "mla_sparse")
    platform = attnreg.Platform(platform="cuda", arch="sm90")
    selection = evaluate(request, platform, REGISTRY, "FLASH_ATTN_MLA_SPARSE_FA4")
    assert selection.start is not None
    assert selection.start.facts["gathered_heads"] == heads
    refused = any("gathered" in reason.text for reason in selection.candidates[0].reasons)
    assert refused == (heads not in (8, 16, 32, 64))


@pytest.mark.parametrize(
    ("ranks", "config", "draft", "block"),
    [
        (1, {"num_key_value_heads": 32}, None, 64),
        (1, {"num_key_value_heads": 8}, None, 256),
        # a rank has one head of each kind
        (32, {"num_key_value_heads": 8}, None, 64),
        # the target decides for its draft
        (1, {"num_key_value_heads": 32}, {"num_key_value_heads": 8}, 64),
        (1, {"num_key_value_heads": 8}, {"num_key_value_heads": 32}, 256),
    ],
)
def test_the_heads_of_a_rank_decide_which_blocks_flashinfer_reads_on_blackwell(
    ranks: int, config: dict[str, int], draft: dict[str, int] | None, block: int, tmp_path: Path
) -> None:
    for name, heads in (("model", config), ("draft", draft)):
        text = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2}
        (tmp_path / f"{name}.json").write_text(json.dumps(text | (heads or {})))
    options = ModelOptions(
        ranks=ranks, given={"block_size": 256}, draft=str(tmp_path / "draft.json") if draft else None
    )
    questions = model_questions(str(tmp_path / "model.json"), options, REGISTRY).questions
    platform = attnreg.Platform(platform="cuda", arch="sm100")
    found = [evaluate(q.request, platform, REGISTRY, "FLASHINFER") for q in questions if q.request is not None]
    blocks = [c.value for selection in found for c in selection.consequences if c.kind == "kernel_block"]
    assert blocks == [block] * (2 if draft else 1)
    fails = [selection.fails for selection in found]
    assert fails == [False, *([block == 256] if draft else [])]


@pytest.mark.parametrize(
    ("release", "takes"),
    [
        ("0.26.0", True),
        ("0.29.0", True),
        ("0.30.0", False),
        ("0.33.0", False),
    ],
)
def test_the_block_of_a_connector_for_deepseek_v4(release: str, takes: bool) -> None:
    """vLLM's functions, run on the specs of its layers, gave these pages, and an error for a block of 4 tokens."""
    registry = attnreg.load_registry(f"vllm-{release}")
    request = attnreg.AttentionRequest(
        head_size=512, num_heads=64, num_kv_heads=1, attention="mla_sparse", model="deepseek_v4"
    )
    platform = attnreg.Platform(platform="cuda", arch="sm100")
    connected = dataclasses.replace(request, features=frozenset({"kv_connector"}))
    nixl = dataclasses.replace(connected, extra=(("connector", "NixlConnector"), ("tp_ranks", 1)))
    assert (evaluate(nixl, platform, registry).unknown is False) is takes
    # --block-size 512 makes the pages of the layers larger: these figures are of another run
    asked = (request, connected, dataclasses.replace(connected, block_size=512))
    found = [evaluate(one, platform, registry) for one in asked]
    said = [s.start.refusal.effect.refuses for s in found if s.unknown and s.start and s.start.refusal]
    assert ["from vLLM 0.30 on, 256" in str(sentence) for sentence in said] == [False, True, False]
    (blocks,) = [
        c.kernel_blocks
        for c in registry.backends["FLASHMLA_SPARSE_DSV4"].variants[0].consequences
        if c.kernel_blocks is not None
    ]
    assert (blocks.of(4), blocks.of(256)) == (None, 256)


@pytest.mark.parametrize(
    ("release", "heads", "stops"),
    [
        # the builder of 0.24 takes the query heads of the target and the KV heads of the draft
        ("0.24.0", (32, 32), True),
        ("0.24.0", (16, 16), False),
        ("0.24.0", (32, 16), False),
        ("0.25.0", (16, 16), True),
    ],
)
def test_a_draft_with_large_pages_needs_query_heads_enough(
    release: str, heads: tuple[int, int], stops: bool, tmp_path: Path
) -> None:
    for name, (queries, kv_heads) in (("model", (32, 8)), ("draft", heads)):
        text = {"model_type": "llama", "hidden_size": 4096, "head_dim": 128, "num_hidden_layers": 1}
        counts = {"num_attention_heads": queries, "num_key_value_heads": kv_heads}
        (tmp_path / f"{name}.json").write_text(json.dumps(text | counts))
    registry = attnreg.load_registry(f"vllm-{release}", plugins=())
    options = ModelOptions(given={"block_size": 256}, draft=str(tmp_path / "draft.json"))
    questions = model_questions(str(tmp_path / "model.json"), options, registry).questions
    platform = attnreg.Platform(platform="cuda", arch="sm100")
    found = [evaluate(q.request, platform, registry, "FLASHINFER") for q in questions if q.request is not None]
    assert [selection.fails for selection in found] == [False, stops]


@pytest.mark.parametrize(
    ("release", "block_size", "stops"),
    [
        ("0.21.0", 16, True),
        # the builder takes the query heads of its own layers
        ("0.22.0", 16, False),
        ("0.23.0", 16, True),
        ("0.24.0", 16, True),
        ("0.24.0", 256, True),
        ("0.25.0", 256, False),
    ],
)
def test_the_kv_heads_of_a_draft_divide_the_query_heads_of_the_model(
    release: str, block_size: int, stops: bool, tmp_path: Path
) -> None:
    for name, (queries, kv_heads) in (("model", (28, 4)), ("draft", (32, 8)), ("small", (14, 2))):
        text = {"model_type": "llama", "hidden_size": 4096, "head_dim": 128, "num_hidden_layers": 1}
        counts = {"num_attention_heads": queries, "num_key_value_heads": kv_heads}
        (tmp_path / f"{name}.json").write_text(json.dumps(text | counts))
    registry = attnreg.load_registry(f"vllm-{release}", plugins=())
    platform = attnreg.Platform(platform="cuda", arch="sm100")
    for draft, fails in (("draft", stops), ("small", False)):
        options = ModelOptions(given={"block_size": block_size}, draft=str(tmp_path / f"{draft}.json"))
        questions = model_questions(str(tmp_path / "model.json"), options, registry).questions
        found = [evaluate(q.request, platform, registry, "FLASHINFER") for q in questions if q.request is not None]
        assert [selection.fails for selection in found] == [False, fails]


def test_an_option_that_replaces_the_heads_leaves_the_models_unknown() -> None:
    options = ModelOptions(given={"block_size": 256, "num_kv_heads": 32})
    questions = model_questions(str(CONFIGS / "Llama-3.1-8B"), options, REGISTRY).questions
    assert [dict(q.request.extra).get("run_queries_per_kv_head") for q in questions if q.request] == [None]
    plain = model_questions(str(CONFIGS / "Llama-3.1-8B"), ModelOptions(), REGISTRY).questions
    assert [dict(q.request.extra)["run_queries_per_kv_head"] for q in plain if q.request] == [4]
