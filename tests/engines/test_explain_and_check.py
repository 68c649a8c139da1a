"""`attnreg explain` and `attnreg check` about one launch: for every option of a recipe they do not contradict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import ROOT

from attnreg.cli.commands import main
from attnreg.engines.settings import known_engines

CONFIGS = ROOT / "examples/configs"
REFUSALS = {"refused-backend", "refused-run"}
# option of the engine -> its values, and what says the same to `attnreg explain`
VLLM = {
    "--attention-backend": {n: ["--backend", n] for n in ("FLASHINFER", "FLASHMLA", "TRITON_ATTN", "TRITON_MLA")},
    "--attention-config.backend": {"FLEX_ATTENTION": ["--backend", "FLEX_ATTENTION"]},
    "--attention-config.mla_prefill_backend": {n: ["--prefill-backend", n] for n in ("FLASH_ATTN", "TRTLLM_RAGGED")},
    "--mm-encoder-attn-backend": {n: ["--vision-backend", n] for n in ("TORCH_SDPA", "FLASHMLA")},
    "--attention-config.flash_attn_version": {n: ["--set", f"flash_attn_version={n}"] for n in ("2", "4")},
    "--attention-config.use_trtllm_attention": {"false": ["--set", "use_trtllm_attention=false"]},
    "--attention-config.use_non_causal": {"true": ["--feature", "non_causal"]},
    "--decode-context-parallel-size": {"2": ["--feature", "dcp", "--set", "dcp_ranks=2"]},
    "--prefill-context-parallel-size": {"2": ["--feature", "pcp"]},
    "--kv-transfer-config.kv_connector": {
        n: ["--feature", "kv_connector", "--set", f"connector={n}"] for n in ("NixlConnector", "HF3FSKVConnector")
    },
    "--pipeline-parallel-size": {"2": ["--set", "pp_stages=2"]},
    "--speculative-config.enable_adaptive_verification": {"true": ["--feature", "adaptive_verification"]},
    "--speculative-config.num_speculative_tokens": {"2": ["--set", "speculative_tokens=2"]},
    "--runner": {"pooling": ["--set", "pooling=true"]},
    "--kv-cache-dtype": {n: ["--kv-dtype", n] for n in ("fp8", "fp8_e5m2", "nvfp4", "float16")},
    "--dtype": {"float16": ["--dtype", "float16"]},
    "--block-size": {"64": ["--block-size", "64"]},
    "--tensor-parallel-size": {"4": ["--tp", "4"]},
}
SGLANG = {
    "--attention-backend": {n: ["--backend", n] for n in ("triton", "flashinfer", "trtllm_mla", "fa4", "torch_native")},
    "--prefill-attention-backend": {n: ["--set", f"prefill_attention_backend={n}"] for n in ("trtllm_mha", "fa3")},
    "--decode-attention-backend": {n: ["--set", f"decode_attention_backend={n}"] for n in ("trtllm_mla", "triton")},
    "--speculative-draft-attention-backend": {"fa3": ["--set", "speculative_draft_attention_backend=fa3"]},
    "--kv-cache-dtype": {n: ["--kv-dtype", n] for n in ("fp8_e5m2", "nvfp4")},
    "--page-size": {"64": ["--block-size", "64"]},
    "--dtype": {"float16": ["--dtype", "float16"]},
    "--speculative-algorithm": {n: ["--set", f"speculative_algorithm={n}"] for n in ("EAGLE3", "NGRAM")},
    "--speculative-num-steps": {"3": ["--set", "speculative_num_steps=3"]},
    "--speculative-eagle-topk": {"4": ["--set", "speculative_eagle_topk=4"]},
    "--speculative-num-draft-tokens": {"8": ["--set", "speculative_num_draft_tokens=8"]},
    "--enable-deterministic-inference": {"": ["--set", "enable_deterministic_inference=true"]},
    "--disable-radix-cache": {"": ["--set", "disable_radix_cache=true"]},
    "--tp-size": {"4": ["--tp", "4"]},
}
ENGINES = {"vllm": ("vllm-0.33.0", VLLM), "sglang": ("sglang-0.5.23", SGLANG)}
LAUNCHES = [
    ("vllm", "Llama-3.1-8B", "sm100"),
    ("vllm", "Qwen2.5-VL-7B-Instruct", "sm90"),
    ("vllm", "DeepSeek-V3", "sm90"),
    ("sglang", "Llama-3.1-8B", "sm90"),
    ("sglang", "DeepSeek-V3", "sm100"),
]
ALIKE = {"--tensor-parallel-size": "--tp-size", "--tp": "--tp-size"}


def test_every_option_that_a_recipe_may_have_is_asked_about() -> None:
    for engine, (_, options) in ENGINES.items():
        read = {
            o
            for o, about in known_engines()[engine]["options"].items()
            if about not in ("unread", "model", "draft", "draft_backend")
        }
        assert {ALIKE.get(o, o) if engine == "sglang" else o for o in read} == {*options}, engine


@pytest.mark.parametrize(("engine", "model", "arch"), LAUNCHES)
def test_explain_and_check_agree_on_whether_a_launch_starts(
    engine: str, model: str, arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release, options = ENGINES[engine]
    file, contradictions = tmp_path / "recipe.yaml", list[object]()
    for option, values in options.items():
        for value, words in values.items():
            recipe = {
                "engine": engine,
                "model": str(CONFIGS / model),
                "arch": arch,
                "args": [option, *filter(None, [value])],
            }
            file.write_text(json.dumps(recipe))
            main(["check", str(file), "--registry", release, "--json"])
            told = json.loads(capsys.readouterr().out)
            if any("not checked" in note for note in told["notes"]):
                continue
            refused = {finding["code"] for finding in told["findings"]} & REFUSALS
            code = main(
                ["explain", "--registry", release, "--model", recipe["model"], "--arch", arch, *words, "--json"]
            )
            capsys.readouterr()
            if (code == 0) == bool(refused):
                contradictions.append((option, value, code, sorted(refused)))
    assert not contradictions
