"""`attnreg why` on whole logs: runs, ranks, streams, sizes, files of other kinds, and what it never prints."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnreg.cli import main
from attnreg.engines.logs.report import MOST_LINES

DATA = Path(__file__).resolve().parents[1] / "data/logs"
ENGINE = (
    "(EngineCore pid=7) INFO [core.py:114] Initializing a V1 LLM engine (v{}) with config: model='{}', "
    "speculative_config=None, dtype=torch.bfloat16, tensor_parallel_size={}, kv_cache_dtype={}, device_config=cuda"
)
GPU = "WARNING [fused_moe.py:8] Config file not found at /x/E=128,N=768,device_name=NVIDIA_H100_80GB_HBM3.json"
ORDER = "(Worker_TP{0} pid=7{0}) INFO Using {1} attention backend out of potential backends: {2}."


@pytest.fixture
def why(tmp_path, capsys):
    """A function that runs the command on a log; it returns standard output, with single blanks."""

    def run(*lines: str, status: int = 0, options: tuple[str, ...] = ()) -> str:
        log = tmp_path / "server.log"
        log.write_text("\n".join(lines) + "\n", encoding="utf-8")
        assert main(["why", str(log), *options]) == status
        return " ".join(capsys.readouterr().out.split())

    return run


def test_the_release_that_a_log_names_explains_it(capsys):
    assert main(["why", str(DATA / "release.log")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "vLLM 0.26.0 (line 1)" in out
    assert "by vllm-0.26.0, which line 1 names" in out
    assert "FLASH_ATTN/FA2 sinks is not supported" in out
    # a backend of a later release
    assert "TRITON_FLASH_ATTN" not in out
    assert main(["why", str(DATA / "release.log"), "--registry", "vllm-0.33"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "by vllm-0.33.0, which --engine names; line 1 names vLLM 0.26.0" in out


def test_the_line_that_ended_a_run_is_explained(capsys):
    assert main(["why", str(DATA / "refused.log")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "handle_attention_backend_compatibility refuses it" in out
    assert "trtllm_mha for prompts requires SM 10.x (release.yaml:" in out
    # a phase whose backend the user names is none that the default decides
    assert "decode" in out
    assert "· prefill" not in out


def test_lines_of_public_threads_are_explained_but_for_an_unknown_backend(capsys):
    assert main(["why", "--json", str(DATA / "lines.log")]) == 2
    told = json.loads(capsys.readouterr().out)["logs"][0]["lines"]
    assert len(told) == 8
    assert [entry["line"] for entry in told if not entry["understood"]] == [6]
    assert "has no backend FLASH_ATTN_V100" in told[5]["reason"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "CUDAGraphMode.FULL is not supported with spec-decode for attention backend XBackend (support: A.B)",
            "one token a request alone",
        ),
        ("ValueError: No KV cache layout satisfies every supported set: [['LBNHC'], ['LHBNC']].", "LBNHC, LHBNC"),
        ("ValueError: No common block size for 4.", "the page has 4 tokens"),
        ("ValueError: No available memory for the cache blocks. Try increasing", "FLASHINFER takes a workspace of"),
        ("AssertionError: Aiter MLA requires that num_heads be multiples or divisors of 16, but", "divisor of 16"),
    ],
)
def test_lines_about_the_plan_of_a_run_are_explained(why, line, said):
    order = ORDER.format(0, "FLASHINFER", "['FLASHINFER', 'FLASH_ATTN', 'TRITON_ATTN']")
    assert said in why(ENGINE.format("0.33.0", "x/y", 1, "auto"), order, line)


def test_equal_lines_of_ranks_are_one(why):
    lines = [ORDER.format(rank, "FLASH_ATTN", "['FLASH_ATTN', 'TRITON_ATTN']") for rank in range(8)]
    out = why(ENGINE.format("0.24.0", "openai/gpt-oss-20b", 8, "auto"), GPU, *lines)
    assert out.count("is the first of 2 backends") == 1
    assert "line 3, 8 ranks: Using FLASH_ATTN" in out
    assert "TP 8" in out
    assert "sm90 (H100)" in out
    assert "8/1 heads of 64" in out


def test_a_release_without_a_table_is_said_not_to_have_one(why):
    order = ORDER.format(0, "FLASH_ATTN", "['FLASH_ATTN', 'TRITON_ATTN']")
    out = why(ENGINE.format("0.29.5", "x/y", 1, "auto"), order)
    nearest = "by vllm-0.29.0, the nearest, which may differ: line 1 names vLLM 0.29.5, and attnreg has no table of it"
    assert nearest in out
    # what the line itself says holds for any release
    assert out.index("is the first of 2 backends") < out.index(nearest)
    # a backend that the nearest release lacks is no error of the log
    out = why(ENGINE.format("0.6.3", "x/y", 1, "auto"), "INFO Using XFormers backend.")
    assert "by vllm-0.20.0, the nearest" in out
    assert "the layers run on xFormers, which vLLM has no longer" in out


def test_several_engines_and_runs_of_one_log_are_told_apart(why):
    order = ORDER.format(0, "FLASH_ATTN", "['FLASH_ATTN', 'TRITON_ATTN']")
    out = why(
        "a-1  | " + ENGINE.format("0.24.0", "openai/gpt-oss-20b", 1, "auto"),
        "b-1  | [2026-09-07 10:11:12] server_args=ServerArgs(model_path='Qwen/Qwen3-8B', tp_size=2)",
        "c-1  | " + ENGINE.format("0.28.0", "Qwen/Qwen3-8B", 4, "auto"),
        "a-1  | " + order,
        "b-1  | Attention backend not specified. Use fa3 backend by default.",
        "c-1  | " + ORDER.format(0, "FLASH_ATTN", "['FLASH_ATTN', 'FLASHINFER', 'TRITON_ATTN', 'FLEX_ATTENTION']"),
        "a-1  | " + ENGINE.format("0.26.0", "openai/gpt-oss-20b", 1, "auto"),
        "a-1  | " + order,
        options=("--arch", "sm90"),
    )
    for line, release in ((1, "vllm-0.24.0"), (3, "vllm-0.28.0"), (7, "vllm-0.26.0")):
        assert f"by {release}, which line {line} names" in out
    assert "by sglang-0.5.23, which is assumed" in out


def test_an_answer_that_the_log_contradicts_is_none(why):
    order = ORDER.format(0, "FLEX_ATTENTION", "['FLEX_ATTENTION']")
    out = why(ENGINE.format("0.33.0", "openai/gpt-oss-20b", 1, "auto"), order)
    assert "this table gives the layers of" in out
    assert "and not FLEX_ATTENTION" in out
    order = ORDER.format(0, "FLASH_ATTN", "['FLASH_ATTN', 'FLEX_ATTENTION']")
    out = why(ENGINE.format("0.33.0", "openai/gpt-oss-20b", 1, "auto"), order)
    assert "the log lists FLEX_ATTENTION as valid, and this table does not" in out


def test_an_error_about_attention_that_is_not_understood_is_no_success(why):
    order = ORDER.format(0, "FLASH_ATTN", "['FLASH_ATTN', 'TRITON_ATTN']")
    out = why(order, "RuntimeError: the flux of attention is out of tune: sk-SECRET", status=2)
    assert "line 2: RuntimeError (about attention) not explained: it is not one that attnreg knows" in out
    assert "SECRET" not in out
    # any other error is none of this command's
    why(order, "RuntimeError: the moon is down")


SECRET = "ghpS3CRETx0123456789"


@pytest.mark.parametrize(
    "line",
    [
        f"non-default args: {{'model': 'a/b', 'api_key': '{SECRET}', 'hf_token': '{SECRET}'}}",
        f"server_args=ServerArgs(model_path='https://me:{SECRET}@host/x', api_key='{SECRET}')",
        f"ValueError: attention: TOKEN={SECRET}",
        f"Selected backend FLASH_ATTN is not valid for this configuration. Reason: [{SECRET}]",
        f"No KV cache layout satisfies every supported set: {SECRET}",
        f"No valid attention backend found for cuda with AttentionSelectorConfig(head_size=64, dtype={SECRET})",
        f"Using FLASH_ATTN backend. TOKEN={SECRET}",
        f"{SECRET} Using FLASH_ATTN backend.",
    ],
)
def test_no_secret_of_a_line_is_printed(line, capsys, tmp_path):
    log = tmp_path / "server.log"
    log.write_text(f"{line}\nUsing FLASH_ATTN backend.\n", encoding="utf-8")
    for options in ([], ["--json"], ["--arch", "sm90"]):
        main(["why", str(log), *options])
        out, err = capsys.readouterr()
        assert out
        assert SECRET not in "".join((out + err).split())


# sizes and streams ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"Using FLASH_ATTN backend.\n"), "is compressed by gzip; unpack it"),
        ("Using FLASH_ATTN backend.\n".encode("utf-16"), "is text in UTF-16; convert it"),
        (b"\x7fELF\x02\x01\x01\0\0\0" * 100, "is a binary file; give the text"),
        (b"\0" * 20000, "is a binary file; give the text"),
    ],
    ids=["gzip", "UTF-16", "ELF", "zeros"],
)
def test_a_file_that_is_no_text_is_refused(content, message, tmp_path, capsys):
    log = tmp_path / "server.log"
    log.write_bytes(content)
    assert main(["why", str(log)]) == 2
    assert message in capsys.readouterr().err


def test_a_log_with_a_hole_at_its_beginning_is_read(tmp_path, capsys):
    log = tmp_path / "server.log"
    log.write_bytes(b"\0" * 5000 + b"cut line\nUsing FLASH_ATTN backend.\n")
    assert main(["why", str(log)]) == 0
    assert "line 2: Using FLASH_ATTN backend." in capsys.readouterr().out


@pytest.mark.parametrize("word", ["a", "-", "Use ", "with backend ", "\x1b[1m", "{", '{"message": "', "ValueError: "])
def test_one_long_line_takes_no_time(word, tmp_path, capsys):
    log = tmp_path / "server.log"
    log.write_text(word * (2_000_000 // len(word)) + "\nUsing FLASH_ATTN backend.\n")
    begun = time.process_time()
    assert main(["why", str(log)]) == 0
    assert time.process_time() - begun < 5
    assert "line 2: Using FLASH_ATTN backend." in capsys.readouterr().out


def test_many_lines_take_no_time(tmp_path, capsys):
    """100 MB must take less than 20 s: this is a tenth of it, on a machine of any load."""
    log = tmp_path / "server.log"
    step = (
        "(APIServer pid=1) INFO 07-25 13:50:{0:02} [loggers.py:127] Engine 000: Avg prompt throughput: {0}.0 tokens/s, "
        "Avg generation throughput: {0}.5 tokens/s, Running: {0} reqs, GPU KV cache usage: {0}.1%\n"
        '(APIServer pid=1) INFO:     127.0.0.1:{0} - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
    )
    chosen = ORDER.format(0, "FLASH_ATTN", "['FLASH_ATTN', 'TRITON_ATTN']") + "\n"
    block = "".join(step.format(n) for n in range(300)) + chosen
    log.write_text(block * (10_000_000 // len(block)))
    begun = time.process_time()
    assert main(["why", str(log)]) == 0
    assert time.process_time() - begun < 6
    assert capsys.readouterr().out.count("is the first of 2 backends") == 1


def test_more_lines_than_are_explained_are_refused(tmp_path, capsys):
    log = tmp_path / "server.log"
    log.write_text("".join(f"ValueError: No common block size for {n}.\n" for n in range(MOST_LINES + 5)))
    assert main(["why", str(log)]) == 2
    assert "different lines about attention: 5 were passed over" in capsys.readouterr().err


def test_a_stream_is_explained_as_it_comes():
    command = [sys.executable, "-m", "attnreg", "why", "--follow"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("loading\nINFO Using FLASH_ATTN backend.\n")
        process.stdin.flush()
        # standard input is open still
        assert process.stdout.readline() == "line 2: Using FLASH_ATTN backend.\n"
        process.stdin.write("INFO Using FLASH_ATTN backend.\n" * 3)
        process.stdin.close()
        rest = process.stdout.read()
        assert process.wait(60) == 0
    assert "line 2 was logged 4 times" in rest


def test_a_stream_as_json_is_an_object_for_each_line(tmp_path, capsys):
    read, write = os.pipe()
    os.write(write, b"INFO Using FLASH_ATTN backend.\nINFO Using TRITON_ATTN backend.\n")
    os.close(write)
    try:
        assert main(["why", f"/dev/fd/{read}", "--json"]) == 0
    finally:
        os.close(read)
    assert [entry["text"] for entry in json.loads(capsys.readouterr().out)["logs"][0]["lines"]] == [
        "Using FLASH_ATTN backend.",
        "Using TRITON_ATTN backend.",
    ]


def test_a_registry_is_loaded_once_for_all_lines(monkeypatch, why):
    from attnreg import loader

    loaded: list[str] = []
    real = loader.load_registry

    def load(name, **more):
        loaded.append(name)
        return real(name, **more)

    monkeypatch.setattr(loader, "load_registry", load)
    why(*(f"Using {name} backend." for name in ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")))
    assert loaded == ["vllm-0.33.0"]


def test_the_words_of_an_engine_that_does_not_log_here_count_for_nothing(why):
    error = "ModuleNotFoundError: No module named 'flashinfer'"
    order = ORDER.format(0, "FLASH_ATTN", "['FLASH_ATTN', 'TRITON_ATTN']")
    assert "sglang" not in why(ENGINE.format("0.33.0", "x/y", 1, "auto"), order, error, status=2)
    assert "FlashInfer is not there" in why("server_args=ServerArgs(model_path='x/y')", error)
