"""`attnreg plan`: one screen for a run, its exit status, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

CONFIGS = ROOT / "examples" / "configs"
GPT_OSS, DEEPSEEK = str(CONFIGS / "gpt-oss-120b"), str(CONFIGS / "DeepSeek-V3")
VLLM = ("--engine", "vllm-0.33")


def test_a_run_is_one_screen(run: Callable[..., Any]) -> None:
    status, out, err = run(
        *("plan", *VLLM, "--arch", "sm90", "--model", GPT_OSS, "--tp", "2"),
        *("--gpu-memory", "80GiB", "--weights", "35GiB", "--length", "32768"),
    )
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) < 30
    assert "starts" in lines
    assert "36 layers (0–35)  FLASH_ATTN/FA3-4" in out
    assert "16 tokens, the default, which FLASH_ATTN reads (steps.yaml:" in out
    assert "36.0 KiB a token, 18.0 KiB after 128 tokens on each of 2 ranks" in out
    assert "at most 68 requests of 32,768 tokens" in out
    assert "80.0 GiB × 0.92 − 35.0 GiB of weights" in out


def test_engine_names_the_registry_of_a_release(run: Callable[..., Any]) -> None:
    asked = ("--arch", "sm90", "--model", GPT_OSS, "--json")
    one, other = run("plan", *VLLM, *asked), run("plan", "--registry", "vllm-0.33.0", *asked)
    assert {**json.loads(one.out), "command": ""} == {**json.loads(other.out), "command": ""}
    assert run("plan", *VLLM, "--registry", "vllm-0.33.0", *asked).status == 2


def test_a_run_that_does_not_start(run: Callable[..., Any]) -> None:
    gemma = str(CONFIGS / "gemma-2-9b")
    status, out, _ = run("plan", *VLLM, "--arch", "sm75", "--model", gemma, "--kv-dtype", "fp8")
    assert status == 1
    assert "does not start" in out.splitlines()
    assert "✗ TRITON_ATTN/paged is chosen for 42 layers (0–41), and the engine then stops" in out
    assert "↳ starts with --kv-dtype auto" in out
    data = json.loads(run("plan", *VLLM, "--arch", "sm75", "--model", gemma, "--kv-dtype", "fp8", "--json").out)
    assert data["starts"] is False
    assert data["changes"][0]["options"] == {"--kv-dtype": "auto"}


def test_what_is_partly_not_known(run: Callable[..., Any]) -> None:
    status, out, _ = run("plan", "--engine", "sglang-0.5.23", "--arch", "sm100", "--model", DEEPSEEK, "--draft", "mtp")
    assert status == 3
    assert "partly not known" in out.splitlines()
    assert "at least 68.6 KiB a token" in out


def test_the_stages_of_a_run(run: Callable[..., Any]) -> None:
    asked = (*VLLM, "--arch", "sm100", "--model", DEEPSEEK, "--draft", "mtp", "--tp", "8", "--pp", "3")
    status, out, _ = run("plan", *asked)
    assert status == 0
    assert "stage 1 has layers 0–19" in out
    assert "stage 3 has layers 41–60 and the draft's" in out


@pytest.mark.parametrize(
    ("arguments", "said", "cure"),
    [
        (["--weights", "5GiB"], "--weights is about a GPU whose memory is not given", "give --gpu-memory too"),
        (["--gpu-memory", "80GiB"], "what fits depends on the weights", "give --weights"),
        (["--gpu-memory", "80GiB", "--weights", "90GiB"], "the weights take 90.0 GiB, and a GPU has 80.0 GiB", "--tp"),
        (["--gpu-memory", "80XB"], "--gpu-memory is 80XB", "80GiB"),
        (["--gpu-memory", "0"], "--gpu-memory is 0", "80GiB"),
        (["--memory-share", "0.5"], "--memory-share is about a GPU", "give --gpu-memory too"),
        (["--pp", "99"], "99 pipeline stages share out 36 layers", "give --pp at most 36"),
        (["--tp", "7"], "64 query heads, which do not divide over 7 ranks", "these do: 2, 4"),
        (["--tp", "8", "--dcp", "3"], "3 ranks of decode context parallelism do not divide 8", "a divisor of --tp"),
        (["--layer", "2"], "--layer asks about one layer", "attnreg explain"),
        (["--arch", "sm80"], "a run is on devices of one kind, and these are 2: sm90, sm80", "--arch once"),
        (["--draft-backend", "TRITON_ATTN"], "--draft-backend says something of a draft", "give --draft too"),
        (
            ["--draft", str(CONFIGS / "Qwen3-8B-DFlash-b16")],
            "the draft reads hidden states of 4,096 elements",
            "--draft",
        ),
        (["--draft", str(CONFIGS / "t5-11b")], "t5-11b has an encoder, so it drafts for no other model", "--draft"),
        (["--draft", str(CONFIGS / "ModernBERT-base")], "ModernBERT-base has an encoder", "give --draft a decoder"),
    ],
)
def test_bad_input_is_one_sentence_with_the_cure(
    run: Callable[..., Any], arguments: list[str], said: str, cure: str
) -> None:
    status, out, err = run("plan", *VLLM, "--arch", "sm90", "--model", GPT_OSS, *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert cure in err
    assert len(err.splitlines()) <= 2


def test_gemma_4s_assistant_drafts_for_a_model_of_its_width_alone(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    text = {"model_type": "gemma4_text", "hidden_size": 1024, "num_hidden_layers": 4, "num_kv_shared_layers": 4}
    file.write_text(json.dumps({"model_type": "gemma4_assistant", "backbone_hidden_size": 5376, "text_config": text}))
    status, out, err = run("plan", *VLLM, "--arch", "sm90", "--model", GPT_OSS, "--draft", str(file))
    assert (status, out) == (2, "")
    assert "the draft reads hidden states of 5,376 elements, the model has 2,880" in err


def test_a_draft_may_count_the_layers_that_it_reads(run: Callable[..., Any], tmp_path: Path) -> None:
    file, target = tmp_path / "config.json", CONFIGS / "Qwen3-8B"
    draft = json.loads((CONFIGS / "Qwen3-8B-DFlash-b16" / "config.json").read_text())
    for layers in ({"num_target_layers": 3, "target_layer_ids": [1, 9, 33]}, {}):
        file.write_text(json.dumps(draft | layers))
        assert run("plan", *VLLM, "--arch", "sm90", "--model", str(target), "--draft", str(file)).status == 0
    file.write_text(json.dumps(draft | {"num_target_layers": 35, "target_layer_ids": [1, 9, 33]}))
    status, out, _ = run("plan", *VLLM, "--arch", "sm90", "--model", str(target), "--draft", str(file))
    assert status == 0
    assert "the draft is for a model of 35 layers, the model has 36: vLLM does not compare them" in out


def test_a_plan_is_of_one_architecture_of_a_platform(run: Callable[..., Any]) -> None:
    status, out, err = run("plan", *VLLM, "--platform", "xpu", "--model", GPT_OSS)
    assert (status, out) == (2, "")
    assert "a run is on devices of one kind, and these are 2: xe_hpc, xe2" in err


def test_a_plan_needs_a_model(run: Callable[..., Any]) -> None:
    status, out, err = run("plan", *VLLM, "--arch", "sm90")
    assert (status, out) == (2, "")
    assert "give --model" in err


def test_a_draft_of_another_vocabulary_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "Llama-3.1-8B" / "config.json").read_text())
    paths = []
    for name, size in (("target", 128_256), ("draft", 151_936)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
        paths.append(str(tmp_path / name))
    status, out, err = run("plan", *VLLM, "--arch", "sm90", "--model", paths[0], "--draft", paths[1])
    assert (status, out) == (2, "")
    assert "the draft has a vocabulary of 151,936 tokens, the model one of 128,256" in err
    assert "attnreg does not read vLLM's use_heterogeneous_vocab" in err
    assert run("plan", *VLLM, "--arch", "sm90", "--model", paths[0], "--draft", paths[0]).status == 2


CONFLICT = (
    *("--registry", "vllm-0.30.0", "--arch", "gfx942", "--model", str(CONFIGS / "Llama-3.1-8B")),
    *("--draft", str(CONFIGS / "Qwen3-8B"), "--backend", "FLEX_ATTENTION", "--draft-backend", "ROCM_ATTN"),
)


def test_explain_says_that_the_run_does_not_start(run: Callable[..., Any]) -> None:
    said = "no layout of the KV cache is read by every backend"
    for more in ((), ("--brief",)):
        status, out, _ = run("explain", *CONFLICT, *more)
        assert status == 1
        assert f"✗ a run of these layers does not start: {said}; `attnreg plan`" in " ".join(out.split())
    data = json.loads(run("explain", *CONFLICT, "--json").out)
    assert data["does_not_start"] == [{"text": said}]
    assert json.loads(run("plan", *CONFLICT, "--json").out)["conflicts"][0]["sentence"] == said


def test_explain_says_on_which_architectures_the_run_does_not_start(run: Callable[..., Any]) -> None:
    # where no backend is named for the draft, its order decides
    status, out, _ = run("explain", *CONFLICT[:-2], "--arch", "sm90")
    assert status == 1
    assert "does not start on gfx942: no layout" in " ".join(out.split())
    # one layer is no run, and attnreg's own registry has no rules for layouts
    assert run("explain", *CONFLICT, "--layer", "0").status == 0
    assert run("explain", *CONFLICT[2:]).status == 0


@pytest.mark.parametrize("command", ["explain", "plan", "lock"])
@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("Qwen3-8B-DFlash-b16", "the draft reads hidden states of 4,096 elements, the model has 2,880"),
        ("t5-11b", "t5-11b has an encoder, so it drafts for no other model"),
    ],
)
def test_every_command_refuses_a_draft_of_another_model(
    run: Callable[..., Any], command: str, draft: str, said: str
) -> None:
    status, out, err = run(command, *VLLM, "--arch", "sm90", "--model", GPT_OSS, "--draft", str(CONFIGS / draft))
    assert (status, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("command", ["explain", "plan"])
def test_a_kv_dtype_that_the_engine_has_not_is_refused_for_layers_without_a_cache(
    run: Callable[..., Any], command: str
) -> None:
    asked = ("--engine", "sglang-0.5.23", "--arch", "sm75", "--model", str(CONFIGS / "bert-base-uncased"))
    status, out, err = run(command, *asked, "--kv-dtype", "fp8")
    assert (status, out) == (2, "")
    assert "kv_dtype names 'fp8'" in err


def test_explain_names_what_a_run_leaves_open(run: Callable[..., Any]) -> None:
    asked = (*VLLM, "--arch", "xe2", "--model", str(CONFIGS / "Llama-3.1-8B"))
    status, out, _ = run("explain", *asked, "--brief")
    # each layer's answer is known
    assert status == 0
    assert "? a run of these layers is partly not known: CUDA graphs: on Intel GPUs" in " ".join(out.split())
    [doubt] = json.loads(run("explain", *asked, "--json").out)["run_not_known"]
    [said] = json.loads(run("plan", *asked, "--json").out)["unknown"]
    assert doubt == {"text": said["text"]}
    assert run("plan", *asked).status == 3
    several = " ".join(run("explain", *asked, "--arch", "sm90").out.split())
    assert "is partly not known on xe2: CUDA graphs" in several


@pytest.mark.parametrize(
    ("release", "arch", "more", "said"),
    [
        ("0.25", "sm90", (), "no prompt; the sparse kernel of these layers runs their prompts too"),
        ("0.26", "sm100", (), "at most index_topk tokens; the sparse kernel of these layers runs the others"),
        # on Intel GPUs the metadata of a batch has no prompts
        ("0.33", "pvc", (), "no prompt; the sparse kernel of these layers runs their prompts too"),
        ("0.33", "sm90", (), "at most index_topk tokens; the sparse kernel of these layers runs the others"),
        ("0.33", "sm100", (), "in the sparse kernel of these layers, or in FlashAttention 4 with a mask"),
        # a mask needs a 16-bit cache
        ("0.33", "sm100", ("--kv-dtype", "fp8"), "the sparse kernel of these layers runs the others"),
    ],
)
def test_which_prompts_of_sparse_mla_the_kernel_for_prompts_runs(
    run: Callable[..., Any], release: str, arch: str, more: tuple[str, ...], said: str
) -> None:
    asked = ("--engine", f"vllm-{release}", "--arch", arch, "--model", str(CONFIGS / "DeepSeek-V3.2-Exp"), *more)
    for command in ("plan", "explain"):
        assert said in " ".join(run(command, *asked).out.split())
    [group] = json.loads(run("plan", *asked, "--json").out)["groups"]
    assert group["prompts"]["runs"][0].endswith(said)


@pytest.mark.parametrize(("heads", "said"), [(16, True), (32, False)])
@pytest.mark.parametrize("release", ["0.21", "0.22.0", "0.22.1", "0.23", "0.24", "0.25"])
def test_flashinfer_plans_the_prompts_of_a_draft_with_the_heads_of_its_target(
    run: Callable[..., Any], tmp_path: Path, release: str, heads: int, said: bool
) -> None:
    llama = {"model_type": "llama", "num_key_value_heads": 8, "num_hidden_layers": 2, "vocab_size": 100}
    for name, count in (("target", 32), ("draft", heads)):
        config = llama | {"num_attention_heads": count, "hidden_size": 128 * count, "torch_dtype": "bfloat16"}
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    paths = ("--model", str(tmp_path / "target.json"), "--draft", str(tmp_path / "draft.json"))
    asked = ("--engine", f"vllm-{release}", "--arch", "sm90", *paths)
    done = run("plan", *asked, *("--backend", "FLASHINFER", "--draft-backend", "FLASHINFER"))
    open_ = said and release not in ("0.22.0", "0.22.1", "0.25")
    assert ("what FlashInfer computes for another number of them was not run" in " ".join(done.out.split())) is open_
    assert done.status == (3 if open_ else 0)


def test_on_processors_a_name_is_not_binding_in_any_phase(run: Callable[..., Any]) -> None:
    for phase in ("any", "prefill", "decode"):
        asked = ("--arch", "x86_64", "--head-size", "128", "--phase", phase, "--backend", "FLASHMLA")
        assert "CPU_ATTN/CPU" in run("explain", *VLLM, *asked, "--brief").out


def test_a_conflict_names_its_facts_and_what_starts(run: Callable[..., Any]) -> None:
    status, out, _ = run("plan", *CONFLICT)
    assert status == 1
    lines = [line.strip() for line in out.splitlines()]
    at = lines.index("✗ no layout of the KV cache is read by every backend")
    assert lines[at + 1].startswith("32 layers (0–31): FLEX_ATTENTION reads LBNHC (backends.yaml:")
    assert lines[at + 2].startswith("draft · 36 layers (0–35): ROCM_ATTN reads LHBNC or LBHNC (backends.yaml:")
    assert "↳ starts with --draft-backend TRITON_ATTN" in lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layout", "XYZ"], "XYZ is no layout of the KV cache"),
        (["--graphs", "some"], "some is no mode of CUDA graphs"),
        (["--speculative-tokens", "2"], "--speculative-tokens are those of a draft"),
        (["--registry", "sglang-0.5.23", "--layout", "HND"], "reads no variable that asks for a KV cache layout"),
    ],
)
def test_a_wish_that_the_engine_does_not_read_is_refused(
    run: Callable[..., Any], arguments: list[str], said: str
) -> None:
    named = () if "--registry" in arguments else VLLM
    status, out, err = run("plan", *named, "--arch", "sm90", "--model", str(CONFIGS / "Llama-3.1-8B"), *arguments)
    assert (status, out) == (2, "")
    assert said in err


@pytest.mark.parametrize("width", ["40", "60", "80", "200"])
def test_a_plan_fits_the_terminal(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, width: str) -> None:
    monkeypatch.setenv("COLUMNS", width)
    for arguments in (CONFLICT, (*VLLM, "--arch", "sm100", "--model", DEEPSEEK, "--draft", "mtp", "--pp", "2")):
        out = run("plan", *arguments).out
        long = [line for line in out.splitlines() if len(line) > int(width)]
        # a word is not cut
        assert all(len(line.split()) == 1 or max(map(len, line.split())) > int(width) - 8 for line in long), long


@pytest.mark.parametrize(("arch", "graphs"), [("x86_64", "NONE"), ("xe2", None), ("sm90", "FULL_AND_PIECEWISE")])
def test_the_machine_settles_the_graphs_of_a_model_without_attention(
    run: Callable[..., Any], tmp_path: Path, arch: str, graphs: str | None
) -> None:
    config = {"model_type": "falcon_mamba", "architectures": ["FalconMambaForCausalLM"], "num_hidden_layers": 4}
    config |= {"hidden_size": 768, "state_size": 16, "conv_kernel": 4, "dtype": "bfloat16", "intermediate_size": 1536}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--registry", "vllm-0.33.0", "--arch", arch, "--model", str(tmp_path))
    assert json.loads(run("plan", *words, "--json").out)["graphs"]["value"] == graphs
