"""What models ask: explain's options for them, `models`, and `show` of a family."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

CONFIGS = ROOT / "examples" / "configs"
GPT_OSS = str(CONFIGS / "gpt-oss-120b")
MI300X = ("--platform", "rocm", "--arch", "gfx942")
HOPPER = ("--arch", "sm90")


def answers(run: Callable[..., Any], *arguments: str) -> Any:
    status, out, err = run("explain", *arguments, "--json")
    assert err == ""
    return json.loads(out) | {"status": status}


def test_heads_are_those_of_one_rank(run: Callable[..., Any]) -> None:
    data = answers(run, *MI300X, "--model", GPT_OSS, "--tp", "8")
    requests = [a["selections"][0]["request"] for a in data["answers"]]
    assert [(r["num_heads"], r["num_kv_heads"]) for r in requests] == [(8, 1), (8, 1)]
    assert " · TP 8 · " in data["title"]
    status, out, err = run("explain", *MI300X, "--model", GPT_OSS, "--tp", "6")
    assert (status, out) == (2, "")
    assert "layer 0 has 64 query heads, which do not divide over 6 ranks; these do: 2, 4, 8, 16, 32, 64" in err


def test_one_layer(run: Callable[..., Any]) -> None:
    data = answers(run, *MI300X, "--model", GPT_OSS, "--layer", "1")
    assert [a["layers"] for a in data["answers"]] == ["1 layer (1)"]
    status, _, err = run("explain", *MI300X, "--model", GPT_OSS, "--layer", "36")
    assert status == 2
    assert err == "attnreg: gpt-oss-120b has no layer 36; it has 0–35\n"


def test_one_layer_that_stores_its_keys_unlike_the_others_says_so(run: Callable[..., Any]) -> None:
    asked = ("--model", str(CONFIGS / "Qwen3-8B"), "--kv-dtype", "turboquant_k8v4", "--layer", "0")
    status, out, _ = run("explain", *HOPPER, *asked, "--brief")
    assert status == 0
    _, title, answered, _, *note = out.splitlines()
    assert "attnreg's own kernels (data " in title
    assert answered == "HOPPER_ATTN for 1 layer (0)   32/8 heads of 128 · KV cache auto · cache_layout NHD"
    assert " ".join(line.strip() for line in note) == (
        "note: Layers 0–1, 34–35 ask for kv_dtype auto and cache_layout NHD: "
        "the first and the last layers lose most by compression."
    )
    (answer,) = answers(run, *HOPPER, *asked)["answers"]
    assert answer["label"] == "32/8 heads of 128 · KV cache auto · cache_layout NHD"


def test_a_draft_has_its_own_layers_under_its_own_role(run: Callable[..., Any]) -> None:
    data = answers(run, *HOPPER, "--model", GPT_OSS, "--draft", str(CONFIGS / "Llama-3.1-8B"))
    roles = [(a["layers"], a["selections"][0]["request"].get("role", "target")) for a in data["answers"]]
    assert roles == [
        ("18 layers (0, 2, … 34)", "target"),
        ("18 layers (1, 3, … 35)", "target"),
        ("draft · 32 layers (0–31)", "draft"),
    ]
    assert data["title"].startswith("gpt-oss-120b · 36 layers · draft Llama-3.1-8B · 32 layers · bfloat16 · CUDA")


def test_a_block_diffusion_draft_looks_both_ways_over_an_fp8_cache(run: Callable[..., Any]) -> None:
    sides = ("--model", str(CONFIGS / "Qwen3-8B"), "--draft", str(CONFIGS / "Qwen3-8B-DFlash-b16"))
    target, draft = answers(run, *MI300X, *sides, "--kv-dtype", "fp8", "--flag", "aiter")["answers"]
    assert "features" not in target["selections"][0]["request"]
    (selection,) = draft["selections"]
    assert selection["request"]["features"] == ["non_causal"]
    assert selection["backend"]["name"] == "ROCM_ATTN"
    reasons = {c["name"]: [r["text"] for r in c["reasons"]] for c in selection["candidates"]}
    assert reasons["ROCM_AITER_UNIFIED_ATTN"] == ["non_causal is not supported"]


DRAFTED = ("--model", str(CONFIGS / "Qwen3-8B"), "--draft", str(CONFIGS / "Qwen3-8B-DFlash-b16"))


def test_a_draft_has_its_own_kv_dtype(run: Callable[..., Any]) -> None:
    data = answers(run, *HOPPER, *DRAFTED, "--kv-dtype", "fp8", "--draft-kv-dtype", "auto")
    stored = [a["selections"][0]["request"].get("kv_dtype", "auto") for a in data["answers"]]
    assert stored == ["fp8", "auto"]
    assert " · draft KV cache auto · bfloat16 · KV cache fp8 · " in data["title"]
    cache = data["kv_cache"]
    assert (cache["kv_dtype"], cache["draft_kv_dtype"]) == ("fp8", "auto")
    # 8 KV heads of 128, keys and values: a byte in 36 layers, two in 5
    assert [g["bytes_per_token"] for g in cache["groups"]] == [36 * 2 * 8 * 128, 5 * 2 * 8 * 128 * 2]
    out = run("explain", *HOPPER, *DRAFTED, "--draft-kv-dtype", "fp8").out
    assert "KV cache of one request, kv_dtype auto, draft fp8" in out


def test_a_draft_has_its_own_backend(run: Callable[..., Any]) -> None:
    def chosen(*options: str) -> list[str]:
        data = answers(run, *HOPPER, *DRAFTED, *options)
        return [a["selections"][0]["backend"]["name"] for a in data["answers"]]

    assert chosen() == ["HOPPER_ATTN", "HOPPER_ATTN"]
    assert chosen("--draft-backend", "TRITON_ATTN") == ["HOPPER_ATTN", "TRITON_ATTN"]
    assert chosen("--backend", "FLASHINFER", "--draft-backend", "TRITON_ATTN") == ["FLASHINFER", "TRITON_ATTN"]
    assert chosen("--backend", "FLASHINFER") == ["FLASHINFER", "FLASHINFER"]
    # vLLM gives a draft by diffusion no backend that is named for its model; the second model runner of 0.24 did
    assert chosen("--backend", "FLASHINFER", "--registry", "vllm-0.33.0") == ["FLASHINFER", "FLASH_ATTN"]
    assert chosen("--backend", "FLASHINFER", "--registry", "vllm-0.24.0") == ["FLASHINFER", "FLASHINFER"]
    title = answers(run, *HOPPER, *DRAFTED, "--draft-backend", "TRITON_ATTN")["title"]
    assert " · draft backend TRITON_ATTN · " in title


@pytest.mark.parametrize("option", ["--draft-kv-dtype", "--draft-backend"])
def test_what_says_something_of_a_draft_needs_one(run: Callable[..., Any], option: str) -> None:
    refused = run("explain", *HOPPER, "--model", GPT_OSS, option, "auto")
    assert refused == (2, "", f"attnreg: {option} says something of a draft\n  help: give --draft too\n")


def test_the_cache_is_counted_per_group_and_in_total(run: Callable[..., Any]) -> None:
    cache = answers(run, *HOPPER, "--model", GPT_OSS, "--kv-dtype", "fp8", "--tp", "2", "--length", "1000")["kv_cache"]
    # 18 layers, keys and values, 4 of the 8 KV heads, 64 elements of a byte
    token = 18 * 2 * 4 * 64
    assert (cache["kv_dtype"], cache["ranks"]) == ("fp8", 2)
    assert [(g["bytes_per_token"], g["keeps_tokens"], g["bytes_at"]) for g in cache["groups"]] == [
        (token, 128, {"1000": token * 128}),
        (token, None, {"1000": token * 1000}),
    ]
    assert (cache["bytes_per_token"], cache["bytes_at"]) == (2 * token, {"1000": token * 1128})


def test_the_cache_is_printed_at_the_models_longest_request(run: Callable[..., Any]) -> None:
    _, out, _ = run("explain", *HOPPER, "--model", GPT_OSS, "--kv-dtype", "fp8")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    start = lines.index("KV cache of one request, kv_dtype fp8")
    assert [line for line in lines[start:] if line and "─" not in line][:4] == [
        "KV cache of one request, kv_dtype fp8",
        "layers bytes/token 8,192 tokens 131,072 tokens",
        "0, 2, … 34 · keeps 128 tokens 18,432 2.2 MiB 2.2 MiB",
        "1, 3, … 35 18,432 144 MiB 2.2 GiB",
    ]


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64, "dtype": "bfloat16"}
MODELOPT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


@pytest.mark.parametrize(
    ("config", "options", "kv_dtype", "size"),
    [
        (LLAMA, (), "auto", 2 * 8 * 2 * 64 * 2),
        # the checkpoint's own dtype of the cache, unless another is named
        (LLAMA | MODELOPT, (), "fp8_e4m3", 2 * 8 * 2 * 64),
        (LLAMA | MODELOPT, ("--kv-dtype", "fp8_per_token_head"), "fp8_per_token_head", 2 * 8 * (2 * 64 + 8)),
        (LLAMA | MODELOPT, ("--tp", "2"), "fp8_e4m3", 2 * 4 * 2 * 64),
        # half of what its config says, for it runs in bfloat16
        (LLAMA | {"dtype": "float32"}, (), "auto", 2 * 8 * 2 * 64 * 2),
        (LLAMA | {"dtype": "float32"}, ("--dtype", "float32"), "auto", 2 * 8 * 2 * 64 * 4),
        # keys and values of every head in place of latents
        ({"model_type": "minicpm3", "num_hidden_layers": 2, "dtype": "bfloat16"}, (), "auto", 2 * 40 * 2 * 96 * 2),
        # a layer that attends to a whole prompt keeps nothing, whichever window it has
        ({"model_type": "modernbert", "dtype": "bfloat16"}, (), None, 0),
    ],
)
def test_the_cache_is_counted_as_the_engine_stores_it(
    config: dict[str, Any], options: tuple[str, ...], kv_dtype: str, size: int, run: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = answers(run, *HOPPER, "--registry", "vllm-0.33.0", "--model", str(tmp_path), *options)
    cache = data["kv_cache"]
    assert {g["kv_dtype"] for g in cache["groups"]} == {kv_dtype}
    assert (cache["bytes_per_token"], "counted as" in str(data["notes"])) == (size, False)


def test_where_platforms_store_the_cache_otherwise_each_is_counted(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm_moe_dsa", "num_hidden_layers": 1}))
    asked = (
        "--registry",
        "vllm-0.33.0",
        "--arch",
        "sm90",
        "--arch",
        "sm100",
        "--arch",
        "sm80",
        "--model",
        str(tmp_path),
    )
    data = answers(run, *asked)
    assert "kv_cache" not in data
    counted = {tuple(c["archs"]): (c["groups"][0]["kv_dtype"], c["bytes_per_token"]) for c in data["kv_caches"]}
    assert counted == {("sm90", "sm80"): ("auto", 576 * 2 + 132), ("sm100",): ("fp8_e4m3", 576 + 132)}
    out = run("explain", *asked).out
    assert "KV cache of one request, kv_dtype auto on sm90 (H100, …), sm80 (A100, …)" in out
    assert "KV cache of one request, kv_dtype fp8_e4m3 on sm100 (B200, …)" in out


def test_mixers_are_named_as_no_attention(run: Callable[..., Any]) -> None:
    status, out, _ = run("explain", *HOPPER, "--model", str(CONFIGS / "Qwen3-Next-80B-A3B-Instruct"))
    assert status == 0
    lines = out.splitlines()
    at = lines.index("36 layers (0–2, 4–6, … 44–46)   linear attention · no softmax attention")
    # nothing is chosen for them
    assert lines[at + 1] == ""
    assert lines[at + 2].startswith("12 layers (3, 7, … 47)")
    assert "a state of fixed size, not counted" in out


def test_what_says_something_of_a_model_needs_one(run: Callable[..., Any]) -> None:
    for option in (("--draft", GPT_OSS), ("--layer", "0"), ("--length", "8")):
        status, _, err = run("explain", *HOPPER, *option)
        assert status == 2
        assert f"{option[0]} says something of a model\n  help: give --model too" in err
    status, _, err = run("explain", *HOPPER, "--tp", "2")
    assert status == 2
    assert "--tp shares out a model's heads\n  help: without --model, give the heads of one rank" in err


def test_families_are_listed(run: Callable[..., Any]) -> None:
    status, out, _ = run("models", "gpt_oss", "mixtral")
    assert status == 0
    assert "2 model families" in out
    assert "18 layers (0, 2, … 34)  64/8 heads of 64 · sliding window 128 · sinks" in out
    data = json.loads(run("models", "--json")[1])["families"]
    names = [item["model_type"] for item in data]
    assert names == sorted(names)
    assert {"llama", "gpt_oss", "deepseek_v3", "bert", "whisper"} <= set(names)
    status, _, err = run("models", "nowhere")
    assert status == 2
    assert "no model family has 'nowhere' in its name" in err


def test_show_prints_a_familys_rule_and_what_it_is_like(run: Callable[..., Any]) -> None:
    status, out, _ = run("show", "mixtral")
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "mixtral   mixtral.yaml:1"
    assert "  like: mistral" in lines
    assert "mistral   which mixtral is like   mistral.yaml:1" in lines
    assert "_sliding_decoder   which mixtral is like   _sliding_decoder.yaml:1" in lines
    assert lines[-1] == "  32 layers (0–31)   32/8 heads of 128"
    data = json.loads(run("show", "mixtral", "--json")[1])
    assert (data["model_type"], data["like"]) == ("mixtral", "mistral")
    status, _, err = run("show", "qwen3_mo")
    assert status == 2
    assert "default has no entry 'qwen3_mo'\n  help: did you mean `qwen3_moe`?" in err


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*/")), ids=lambda path: path.name)
def test_every_example_is_explained_soon(path: Path, run: Callable[..., Any]) -> None:
    # the processor's seconds, which do not pass while other processes run
    begun = time.process_time()
    _, out, err = run("explain", *HOPPER, "--model", str(path))
    assert time.process_time() - begun < 5, "it takes a tenth of a second"
    assert (out.splitlines()[0].split(" · ")[0], err) == (path.name, "")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt-oss-20b", "24 layers"),
        # towers apart, and the two stacks of an encoder-decoder together
        ("gemma-3-27b-it", "62 layers, 27 of towers"),
        ("whisper-large-v3", "64 layers"),
    ],
)
def test_layers_are_counted_once(name: str, count: str, run: Callable[..., Any]) -> None:
    title = run("explain", *HOPPER, "--model", str(CONFIGS / name))[1].splitlines()[0]
    assert title.startswith(f"{name} · {count} · ")


def test_a_draft_by_mtp_is_named_in_small_letters(run: Callable[..., Any]) -> None:
    refused = run("explain", *HOPPER, "--model", GPT_OSS, "--draft", "MTP")
    assert refused.status == 2
    assert "\n  help: did you mean `mtp`? Or: give a config.json" in refused.err


def test_the_index_of_a_drafts_layer_is_none_of_the_models(run: Callable[..., Any]) -> None:
    model = str(CONFIGS / "DeepSeek-V3")
    refused = run("explain", *HOPPER, "--model", model, "--draft", "mtp", "--layer", "61")
    why = "(--layer is one of the model's: those of its draft are asked about beside any)"
    assert refused == (2, "", f"attnreg: DeepSeek-V3 has no layer 61; it has 0–60 {why}\n")
    refused = run("explain", *HOPPER, "--model", model, "--layer", "61")
    assert refused.err == "attnreg: DeepSeek-V3 has no layer 61; it has 0–60\n"


@pytest.mark.parametrize(
    ("options", "heading", "rows"),
    [
        ([], "kv_dtype auto and turboquant_k8v4", ["0–1, 34–35 · auto", "2–33 · turboquant_k8v4"]),
        (["--layer", "0"], "kv_dtype auto", ["0  "]),
        (["--layer", "9"], "kv_dtype turboquant_k8v4", ["9  "]),
    ],
)
def test_the_table_of_the_cache_says_how_its_layers_are_stored(
    run: Callable[..., Any], options: list[str], heading: str, rows: list[str]
) -> None:
    model = ["--model", str(CONFIGS / "Qwen3-8B"), "--kv-dtype", "turboquant_k8v4"]
    lines = run("explain", *HOPPER, *model, *options).out.splitlines()
    at = lines.index(f"KV cache of one request, {heading}")
    assert all(line.startswith(row) for line, row in zip(lines[at + 3 :], rows, strict=False))


def test_prompts_of_mla_alone_have_keys_for_each_head(run: Callable[..., Any]) -> None:
    model = ("--platform", "cuda", *HOPPER, "--model", str(CONFIGS / "DeepSeek-V3"))
    (asked,) = answers(run, *model, "--phase", "prefill")["answers"]
    (_, both) = answers(run, *model)["answers"]
    request = asked["selections"][0]["request"]
    assert request == both["selections"][0]["request"]
    assert (request["phase"], request["head_size"], request["head_size_v"]) == ("prefill", 192, 128)
    assert asked["selections"][0]["backend"] is not None
    # and what the cache takes is asked of the latents
    memory = [answers(run, *model, *more)["kv_cache"] for more in ((), ("--phase", "prefill"))]
    assert memory[0] == memory[1]
    # what else is asked is said of the keys, not of the latents
    for more, sizes in (
        (("--feature", "lse"), "128 heads of 192/128"),
        (("--num-kv-heads", "8"), "128/8 heads of 192/128"),
    ):
        (asked,) = answers(run, *model, "--phase", "prefill", *more)["answers"]
        assert asked["label"].startswith(sizes)
        request = asked["selections"][0]["request"]
        assert sizes == f"128{'' if request['num_kv_heads'] == 128 else '/8'} heads of {request['head_size']}/128"
    (latents, prompts) = answers(run, *model, "--feature", "lse")["answers"]
    assert latents["label"].startswith("128/1 heads of 576/512")
    assert prompts["label"].startswith("128 heads of 192/128")
    (latents,) = answers(run, *model, "--phase", "decode")["answers"]
    assert latents["selections"][0]["request"]["head_size"] == 576
