"""`attnreg why`: lines that engines log about their attention backends."""

from __future__ import annotations

import io
import os

import pytest

from attnreg import RequestError, load_registry
from attnreg.cli import main
from attnreg.engines.logs import explained, read_line

CHOSEN = "INFO Using TRITON_ATTN attention backend out of potential backends: ['TRITON_ATTN', 'FLEX_ATTENTION']."
LINES = [
    (CHOSEN, "vllm", "TRITON_ATTN"),
    ("Using ROCM_ATTN backend out of potential backends: ['ROCM_ATTN', 'TRITON_ATTN'].", "vllm", "ROCM_ATTN"),
    ("Overriding with TRITON_ATTN out of potential backends: ['TRITON_ATTN'].", "vllm", "TRITON_ATTN"),
    ("Using AttentionBackendEnum.FLASHINFER backend.", "vllm", "FLASHINFER"),
    ("Using ROCM_ATTN backend (selected via --attention-backend).", "vllm", "ROCM_ATTN"),
    (
        "Selected backend AttentionBackendEnum.FLASHINFER is not valid for this configuration. Reason: ['x']",
        "vllm",
        "FLASHINFER",
    ),
    (
        "--block-size 16 precluded higher-priority backend(s) FLASHMLA. Using TRITON_MLA instead, which",
        "vllm",
        "TRITON_MLA",
    ),
    ("INFO Using fp8_ds_mla KV cache format for FLASHMLA_SPARSE backend.", "vllm", "FLASHMLA_SPARSE"),
    ("Attention backend not specified. Use trtllm_mha backend by default.", "sglang", "trtllm_mha"),
    ("Attention backend not specified. Falling back to 'fa3' for deterministic inference. You", "sglang", "fa3"),
    ("Using fa3 as attention backend for Olmo2ForCausalLM.", "sglang", "fa3"),
    ("Use triton as default attention backend for Gemma4", "sglang", "triton"),
    ("Use trtllm_mla as attention backend on sm100 for DeepseekV3ForCausalLM", "sglang", "trtllm_mla"),
    ("Use dsa attention backend for DeepSeek with DSA.", "sglang", "dsa"),
    ("Auto-select fa4 attention backend for Step3p7 on Blackwell.", "sglang", "fa4"),
    ("Use flashinfer as default prefill attention backend for Moss-VL", "sglang", "flashinfer"),
    ("FlashAttention3 only supports fp8_e4m3 if using FP8; Setting attention backend to triton.", "sglang", "triton"),
    ("FlashMLA only supports a page_size of 64, change page_size to 64.", "sglang", None),
]


@pytest.mark.parametrize(("line", "engine", "backend"), LINES)
def test_lines_of_engines_are_read_and_explained(line, engine, backend):
    said = read_line(line)
    assert said is not None
    assert (said.engine, said.backend) == (engine, backend)
    assert all(explained(said, load_registry("vllm-0.33" if engine == "vllm" else "sglang-0.5")))


def test_the_orders_that_give_the_potential_backends_are_named():
    text = " ".join(explained(read_line(CHOSEN), load_registry("vllm-0.33"), "sm90"))
    assert "TRITON_ATTN is the first of 2 backends that accept the layer" in text
    assert "order cuda/mha (priorities.yaml:" in text
    assert "FLASH_ATTN, FLASHINFER stood before it and refused the layer" in text
    odd = CHOSEN.replace("'TRITON_ATTN', 'FLEX_ATTENTION'", "'FLEX_ATTENTION', 'FLASHINFER'")
    assert "the line is of another release" in " ".join(explained(read_line(odd), load_registry("vllm-0.33")))


def test_a_backend_that_is_named_may_be_named_by_the_code_of_a_model():
    [text] = explained(read_line("Using AttentionBackendEnum.TRITON_ATTN backend."), load_registry("vllm-0.33"))
    assert "by the user (--attention-backend), or by the code of a model: " in text
    assert "Gemma4Config (steps.yaml:" in text
    [text] = explained(read_line("Using AttentionBackendEnum.FLASHINFER backend."), load_registry("vllm-0.33"))
    assert text.endswith("by the user (--attention-backend)")


@pytest.mark.parametrize(
    ("backend", "stored", "said"),
    [
        ("FLASHMLA_SPARSE", "fp8_ds_mla", "the KV cache as fp8_ds_mla, where kv_dtype fp8 (backends.yaml:"),
        ("FLASHINFER_MLA_SPARSE_SM120", "fp8_ds_mla", "fp8_ds_mla, whatever it is asked for (backends.yaml:"),
        ("FLASHMLA_SPARSE", "fp8_e4m3", "does not say that FLASHMLA_SPARSE stores a cache as fp8_e4m3"),
        ("FLASHMLA", "fp8_ds_mla", "the line is of another release"),
    ],
)
def test_the_format_of_a_cache_is_explained_by_what_the_backend_stores(backend, stored, said):
    [text] = explained(read_line(f"Using {stored} KV cache format for {backend} backend."), load_registry("vllm-0.33"))
    assert said in text


def test_a_line_without_a_backend_that_accepts_is_none_of_vllms():
    assert read_line("Using TRITON_ATTN backend out of potential backends: []") is None


@pytest.mark.parametrize("release", ["sglang-0.5.14", "sglang-0.5.23"])
@pytest.mark.parametrize(
    ("line", "step", "other"),
    [
        ("Attention backend not specified. Use fa3 backend by default.", "default_backend", "GptOss"),
        ("Using fa3 as attention backend for Olmo2ForCausalLM.", "Olmo2ForCausalLM", "GptOss"),
        ("Use trtllm_mla as attention backend on sm100 for DeepseekV3ForCausalLM", "deepseek_family true", "cutedsl"),
        (
            "Attention backend not specified. Falling back to 'fa3' for deterministic inference.",
            "deterministic",
            "Olmo",
        ),
        ("TensorRT-LLM MHA only supports page_size of 16, changing page_size from 1 to 64.", "trtllm_mha", "flashmla"),
        ("Use fa3 attention backend for Nothing", "the line is of another release", "GptOss"),
    ],
)
def test_only_the_steps_that_log_a_line_of_sglang_are_named(release, line, step, other):
    text = " ".join(explained(read_line(line), load_registry(release)))
    assert step in text
    assert other not in text


LEADS = "Using FLASHINFER attention backend out of potential backends: ['FLASHINFER', 'FLASH_ATTN']."
DEFAULT = "Attention backend not specified. Use fa3 backend by default."


@pytest.mark.parametrize(
    ("line", "release", "arch", "said", "unsaid"),
    [
        (LEADS, "vllm-0.33", "sm100", "order cuda/blackwell-mha", "another release"),
        (LEADS, "vllm-0.33", "sm90", "in this sequence on sm90: the line is of another release or GPU", "order cuda/"),
        (LEADS, "vllm-0.33", "gfx942", "in this sequence on gfx942: the line is of another", "order cuda/"),
        (DEFAULT, "sglang-0.5", "sm90", "default_backend (vocabulary.yaml:", "another release"),
        (
            DEFAULT,
            "sglang-0.5",
            "gfx942",
            "does so on gfx942: the line is of another release or GPU",
            "default_backend",
        ),
        # whatever else is asked for, another case is reached first
        (DEFAULT.replace("fa3", "flashinfer"), "sglang-0.5", "gfx942", "WhisperForConditional", "flashinfer-python"),
        (DEFAULT.replace("fa3", "triton"), "sglang-0.5", "gfx942", "where mla true", "nothing before holds"),
        (DEFAULT, "sglang-0.5", "sm90", "--arch sm90 --set", "--arch ARCH"),
    ],
)
def test_what_an_architecture_rules_out_is_not_named(line, release, arch, said, unsaid):
    text = " ".join(explained(read_line(line), load_registry(release), arch))
    assert said in text
    assert unsaid not in text


def test_the_configuration_in_a_refusal_is_asked_anew():
    line = (
        "No valid attention backend found for cuda with AttentionSelectorConfig(head_size=100, dtype=torch.float32, "
        "kv_cache_dtype=turboquant_k8v4, block_size=None, use_mla=False, has_sink=True, attn_type=decoder)"
    )
    sentences = list(explained(read_line(line), load_registry("vllm-0.33"), "sm90"))
    assert sentences[0].startswith("vllm-0.33.0@")
    assert any(s.startswith("FLASH_ATTN") and "kv_dtype is turboquant_k8v4" in s for s in sentences)
    assert not any(s.endswith("accepts") for s in sentences)


def test_a_member_of_an_enumeration_in_a_refusal_is_its_word():
    line = (
        "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(head_size=192, "
        "dtype=torch.bfloat16, kv_cache_dtype=auto, block_size=None, use_mla=True, has_sink=False, use_sparse=True, "
        "use_mm_prefix=False, use_per_head_quant_scales=False, attn_type=AttentionType.{})."
    )
    kinds = {"DECODER": "decoder", "ENCODER_ONLY": "encoder_only"}
    for member, word in kinds.items():
        logged, plain = (
            list(explained(read_line(text), load_registry("vllm-0.33"), "sm120"))
            for text in (line.format(member), line.format(member).replace(f"AttentionType.{member}", word))
        )
        assert logged == plain
        assert logged[0].startswith("vllm-0.33.0@")


def test_an_answer_that_is_another_than_the_lines_says_so():
    line = (
        "No valid attention backend found for cuda with AttentionSelectorConfig(head_size=128, dtype=torch.bfloat16, "
        "kv_cache_dtype=None, block_size=16, use_mla=False, has_sink=False, use_tomorrow=True, use_other=False)"
    )
    sentences = list(explained(read_line(line), load_registry("vllm-0.33"), "sm90"))
    assert "it was not asked for use_tomorrow=True, which no request has here" in sentences
    assert any(s.startswith("it accepts what the line's engine did not") for s in sentences)
    # the others were not needed, or would fail
    assert [s for s in sentences if s.endswith(": accepts")] == ["FLASH_ATTN/FA3-4: accepts"]


@pytest.mark.parametrize(
    ("config", "lacks"),
    [("head_size=128", "no dtype"), ("", "no head_size and no dtype"), ("dtype=torch.float16, x", "no head_size")],
)
def test_a_line_that_is_cut_off_is_refused(config, lacks):
    line = f"No valid attention backend found for cuda with AttentionSelectorConfig({config})"
    with pytest.raises(RequestError) as e:
        list(explained(read_line(line), load_registry("vllm-0.33"), "sm90"))
    assert str(e.value) == f"the line holds {lacks}; give the whole line, as the engine logs it"


def test_a_backend_of_another_release_is_refused():
    with pytest.raises(RequestError, match=r"has no backend ROCM_OCTAVE"):
        list(explained(read_line("Using ROCM_OCTAVE backend."), load_registry("vllm-0.31")))


def test_the_command_reads_arguments_files_and_standard_input(capsys, monkeypatch, tmp_path):
    import io

    assert main(["why", CHOSEN]) == 0
    assert "priorities.yaml" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(f"loading\n{CHOSEN}\nready\n"))
    assert main(["why", "--registry", "vllm-0.32"]) == 0
    out = capsys.readouterr().out
    assert (out.splitlines()[0], "loading" in out) == (CHOSEN, False)
    log = tmp_path / "server.log"
    log.write_bytes(f"loading \xff\n{CHOSEN}\nready\n".encode("latin-1"))
    assert main(["why", "--registry", "vllm-0.32", str(log)]) == 0
    assert capsys.readouterr().out == out


def test_a_line_that_is_refused_does_not_hide_the_others(capsys):
    default = "Attention backend not specified. Use fa3 backend by default."
    lines = ["Using TRITON_ATTN backend.", "Using FOO backend.", "Using FLASH_ATTN backend.", default]
    assert main(["why", "--registry", "vllm-0.33", *lines]) == 2
    out, err = capsys.readouterr()
    said = {block.splitlines()[0]: block.splitlines()[1:] for block in out.split("\n\n")}
    assert list(said) == lines
    assert [sentences[0].startswith("  not explained: ") for sentences in said.values()] == [False, True, False, True]
    assert "has no backend FOO; the line is of another release" in said["Using FOO backend."][0]
    assert said[default][0].endswith("is no release of sglang, which logged the line; name one with --registry")
    assert err == "attnreg: 2 of 4 lines are not explained\n  help: the reason stands below each\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "standard input is empty"),
        (["", " "], "the lines given are empty"),
        (["hello"], "the line is not one that engines are known to log"),
        (["/nonexist.log"], "/nonexist.log: no such file"),
        (["logs/server"], "logs/server: no such file"),
        (["server.log"], "server.log: no such file"),
        (["ready at /v1/models"], "the line is not one that engines are known to log"),
        (["hello", "there"], "none of the 2 lines is one that engines are known to log"),
        ([CHOSEN, "--registry", "sglang-0.5"], "sglang-0.5.23 is no release of vllm"),
        ([CHOSEN, "--arch", "sm91"], "unknown architecture 'sm91'"),
        ([CHOSEN.replace("TRITON_ATTN", "FOO_ATTN")], "has no backend FOO_ATTN"),
    ],
)
def test_bad_input_is_refused(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["why", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_log_that_is_there_is_never_said_not_to_be(capsys, tmp_path):
    log = tmp_path / "server.log"
    log.write_text("loading\nready\n")
    assert main(["why", str(log)]) == 2
    assert capsys.readouterr().err.startswith("attnreg: none of the 2 lines is one that engines are known to log")
    assert main(["why", str(tmp_path)]) == 2
    assert "cannot be read: Is a directory" in capsys.readouterr().err
    read, write = os.pipe()
    os.write(write, f"{CHOSEN}\n".encode())
    os.close(write)
    try:
        assert main(["why", f"/dev/fd/{read}"]) == 0
    finally:
        os.close(read)
    assert capsys.readouterr().out.startswith(CHOSEN)
