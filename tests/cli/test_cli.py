"""The command as a person meets it: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import ROOT

from attnreg import Registry
from attnreg.cli.commands import main

GPT_OSS = str(ROOT / "examples/configs/gpt-oss-120b")


@dataclass
class Run:
    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    # whoever runs the tests may have a narrow terminal
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments: str) -> Run:
        status = main(arguments)
        printed = capsys.readouterr()
        return Run(status, printed.out, printed.err)

    return call


# explain -------------------------------------------------------------------------------------------------------------


def test_explain_puts_the_answer_first_and_cites_every_verdict(run: Callable[..., Run]) -> None:
    result = run("explain", "--platform", "rocm", "--arch", "gfx942", "--model", GPT_OSS)
    lines = result.out.splitlines()
    assert result.status == 0
    assert re.match(
        r"gpt-oss-120b · 36 layers · bfloat16 · ROCm gfx942 \(MI300X\) · registry default@[0-9a-f]{7}", lines[0]
    )
    assert lines[2] == "18 layers (0, 2, … 34)   64/8 heads of 64 · sliding window 128 · sinks"
    assert re.match(r"▸ TRITON_ATTN   4th choice of 5 \(order rocm/mha, priorities\.yaml:\d+\)", lines[3])
    assert re.search(
        r"1 ROCM_ATTN +emulates sinks \(slow\); TRITON_ATTN serves them natively +backends\.yaml:\d+", result.out
    )
    assert "↳ would win with --flag aiter --flag aiter_mha" in result.out


def test_the_suggested_change_makes_the_candidate_win(run: Callable[..., Run]) -> None:
    flags = ("--flag", "aiter", "--flag", "aiter_mha")
    result = run("explain", "--platform", "rocm", "--arch", "gfx942", "--model", GPT_OSS, *flags)
    assert "▸ ROCM_AITER_FA" in result.out


def test_without_an_architecture_every_one_answers_and_those_that_agree_share_a_verdict(
    run: Callable[..., Run],
) -> None:
    result = run("explain", "--platform", "rocm", "--head-size", "128")
    groups = [line for line in result.out.splitlines() if line.startswith("gfx")]
    assert groups == [
        "gfx90a (MI210), gfx1100 (RX 7900)",
        "gfx942 (MI300X), gfx950 (MI350X), gfx1250 (MI450)",
        "gfx1200 (RX 9060), gfx1201 (RX 9070)",
    ]


def test_json_is_the_whole_trace(run: Callable[..., Run]) -> None:
    result = run("explain", "--arch", "sm90", "--model", GPT_OSS, "--json")
    data = json.loads(result.out)
    selection = data["answers"][0]["selections"][0]
    assert selection["backend"] == {"name": "FLASH_ATTN", "variant": "FA3"}
    assert {"rank", "name", "variant", "accepted", "reasons", "would_win"} <= set(selection["candidates"][0])


STATUS = [
    ("something was selected", ["--arch", "sm90", "--head-size", "128"], 0),
    ("nothing is valid", ["--arch", "sm75", "--head-size", "128", "--kv-dtype", "nvfp4"], 1),
    ("a request that is refused", ["--arch", "sm90", "--head-size", "128", "--backend", "ROCM_ATTN"], 1),
    ("an unknown word", ["--arch", "sm90", "--kv-dtype", "fp8_e4m4"], 2),
    ("an unknown option", ["--ach", "sm90"], 2),
]


@pytest.mark.parametrize(("arguments", "status"), [case[1:] for case in STATUS], ids=[case[0] for case in STATUS])
def test_exit_status(run: Callable[..., Run], arguments: list[str], status: int) -> None:
    assert run("explain", *arguments).status == status


BAD_INPUT = [
    (["--arch", "sm91"], "unknown architecture 'sm91'; did you mean `sm90`?"),
    (["--platform", "rcom"], "unknown platform 'rcom'; did you mean `rocm`?"),
    (["--platform", "rocm", "--arch", "sm90"], "arch is sm90, which belongs to platform cuda, not rocm"),
    (["--arch", "sm90", "--kv-dtype", "fp8_e4m4"], "kv_dtype names 'fp8_e4m4'"),
    (["--arch", "sm90", "--feature", "sink"], "features names 'sink'"),
    (["--arch", "gfx942", "--flag", "aitr"], "flags names 'aitr'"),
    (["--arch", "sm90", "--head-size", "0"], "head_size is 0; expected at least 1"),
    (["--arch", "sm90", "--head-size", "wide"], "'wide' is not a valid integer"),
    (["--arch", "sm90", "--num-heads", "6", "--num-kv-heads", "4"], "the second must divide the first"),
    (["--arch", "sm90", "--backend", "FLASH_ATN"], "unknown backend 'FLASH_ATN'; did you mean `FLASH_ATTN`?"),
    (["--arch", "sm90", "--package", "flash-atn"], "unknown package 'flash-atn'; did you mean `flash-attn`?"),
    (["--arch", "sm90", "--set", "run_kv_dtype"], "--set run_kv_dtype: expected FACET=VALUE"),
    (["--arch", "sm90", "--set", "run_kv_dtyp=fp8"], "run_kv_dtyp is no facet of default@"),
    (
        ["--arch", "sm90", "--registry", "vlm-0.33.0"],
        "`vlm-0.33.0` is neither a bundled registry nor a directory nor a file",
    ),
    (["--arch", "sm90", "--model", "nowhere.json"], "nowhere.json"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=[" ".join(case[0][-2:]) for case in BAD_INPUT])
def test_bad_input_is_said_on_stderr_without_a_traceback(
    run: Callable[..., Run], arguments: list[str], message: str
) -> None:
    result = run("explain", *arguments)
    assert result.status == 2
    assert message in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_prefer_and_deny_are_choices_like_an_overlays(run: Callable[..., Run]) -> None:
    preferred = run("explain", "--arch", "sm90", "--head-size", "128", "--prefer", "TRITON_ATTN")
    assert "▸ TRITON_ATTN   preferred" in preferred.out
    denied = run("explain", "--arch", "sm90", "--head-size", "128", "--deny", "FLASH_ATTN")
    assert "▸ FLASHINFER" in denied.out
    assert "denied" in denied.out


def test_an_overlay_file_re_ranks(run: Callable[..., Run], tmp_path: Path) -> None:
    overlay = tmp_path / "mine.yaml"
    overlay.write_text("extends: default\norders:\n  cuda:\n    - {name: mine, order: [TRITON_ATTN, FLASH_ATTN]}\n")
    by_option = run("explain", "--arch", "sm90", "--head-size", "128", "--overlay", str(overlay))
    as_registry = run("explain", "--arch", "sm90", "--head-size", "128", "--registry", str(overlay))
    for result in (by_option, as_registry):
        assert re.search(r"▸ TRITON_ATTN   1st choice of 2 \(order cuda/mine, mine\.yaml:4\)", result.out)


def test_mla_is_explained_for_decoding_and_for_prompts(run: Callable[..., Run]) -> None:
    result = run("explain", "--arch", "sm90", "--model", str(ROOT / "examples/configs/DeepSeek-V3"))
    assert "▸ FLASH_ATTN_MLA/FA3" in result.out
    assert "· prefill" in result.out
    assert "▸ FLASH_ATTN_PREFILL/FA3" in result.out


def test_retired_and_mistyped_variables_are_reported(run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLASHINFER")
    monkeypatch.setenv("ATTNREG_REGISTY", "x")
    result = run("explain", "--arch", "sm90", "--head-size", "128")
    assert result.status == 0
    assert "VLLM_ATTENTION_BACKEND is set; vLLM has retired it and attnreg does not read it." in result.err
    assert "did you mean `ATTNREG_REGISTRY`?" in result.err


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = run("explain", "--platform", "rocm", "--model", GPT_OSS)
    assert max(len(line) for line in result.out.splitlines()) <= columns


def test_a_pipe_gets_plain_text() -> None:
    command = [sys.executable, "-m", "attnreg", "explain", "--arch", "sm90", "--head-size", "128"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "\x1b" not in done.stdout


# the other commands --------------------------------------------------------------------------------------------------


def test_list_names_the_orders_that_apply(run: Callable[..., Run]) -> None:
    result = run("list", "--platform", "rocm")
    assert "1 ROCM_ATTN → 2 ROCM_AITER_FA → 3 ROCM_AITER_UNIFIED_ATTN → 4 TRITON_ATTN → 5 TURBOQUANT" in result.out
    assert "FLASHINFER " not in result.out
    names = [row["name"] for row in json.loads(run("list", "--json").out)]
    assert names == sorted(names)
    assert len(names) == 27


def test_show_prints_every_variant_with_its_lines(run: Callable[..., Run]) -> None:
    result = run("show", "FLASH_ATTN")
    for variant in ("FA4", "FA3", "FA2"):
        assert f"▸ {variant}" in result.out
    assert re.search(r"backends\.yaml:\d+", result.out)
    assert "did you mean `FLASHMLA`?" in run("show", "FLASMLA").err
    assert json.loads(run("show", "ROCM_ATTN", "--json").out)["variants"][0]["emulated"]["sinks"]


def test_check_finds_nothing_in_the_default_registry(run: Callable[..., Run], default: Registry) -> None:
    result = run("check")
    assert result.status == 0, result.out
    assert f" 0 findings ({len(default.known)} known)\n" in result.out


def test_check_fails_on_a_violated_invariant_and_shows_a_configuration(run: Callable[..., Run], tmp_path: Path) -> None:
    overlay = tmp_path / "o.yaml"
    overlay.write_text("backends:\n  TRITON_ATTN:\n    capabilities: {add: {kv_dtypes: [turboquant_k8v4]}}\n")
    result = run("check", "--overlay", str(overlay))
    assert result.status == 1
    assert "violated: a turboquant_* cache goes to TURBOQUANT or to nobody" in result.out
    assert "kv_dtype=turboquant_k8v4" in result.out
    assert "chosen: TRITON_ATTN" in result.out


def test_check_reports_every_problem_of_a_broken_registry(run: Callable[..., Run], tmp_path: Path) -> None:
    (tmp_path / "backends.yaml").write_text("backends: {A: {summry: x}}\n")
    (tmp_path / "priorities.yaml").write_text("cuda: [{name: a, order: []}]\n")
    result = run("check", "--registry", str(tmp_path))
    assert result.status == 2
    assert f"{tmp_path}/backends.yaml:1:16: backends.A: unknown key `summry`" in result.err
    assert "did you mean `summary`?" in result.err
    assert f"{tmp_path}/priorities.yaml:1:" in result.err


def test_diff_of_a_registry_with_itself_is_empty(run: Callable[..., Run]) -> None:
    result = run("diff", "default", "default")
    assert result.status == 0
    assert "0 of " in result.out


def test_diff_shows_boxes_and_counts(run: Callable[..., Run], tmp_path: Path) -> None:
    overlay = tmp_path / "o.yaml"
    overlay.write_text("choices: [{deny: [FLASHINFER], when: {arch: sm120}}]\n")
    result = run("diff", "default", str(overlay), "--arch", "sm120")
    assert result.status == 1
    assert "FLASHINFER → TRITON_ATTN" in result.out
    assert re.search(r"[\d,]+ of [\d,]+ distinguishable configurations change", result.out)
    data = json.loads(run("diff", "default", str(overlay), "--json", "--limit", "2").out)
    assert data["changed"] == sum(change["count"] for change in data["changes"])
    narrowed = run("diff", "default", str(overlay), "--arch", "sm90")
    assert narrowed.status == 0
    unknown = run("diff", "default", str(overlay), "--facet", "colour=red")
    assert unknown.status == 2
    assert "the facet colour makes no difference in either registry" in unknown.err


def test_diff_of_two_revisions(run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = tmp_path / "registry"
    registry.mkdir()
    for name in ("vocabulary", "backends", "priorities"):
        (registry / f"{name}.yaml").write_text((ROOT / f"registry/{name}.yaml").read_text())

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "one")
    file = registry / "priorities.yaml"
    file.write_text(
        file.read_text().replace(
            "order: [FLASH_ATTN, FLASHINFER, TRITON_ATTN", "order: [FLASHINFER, FLASH_ATTN, TRITON_ATTN"
        )
    )
    monkeypatch.chdir(tmp_path)
    result = run("diff", "main:registry", "registry", "--limit", "1")
    assert result.status == 1
    assert "FLASH_ATTN → FLASHINFER" in result.out
    assert "git ls-tree" in run("diff", "nowhere:registry", "registry").err


def test_doctor_names_this_machine_and_what_is_missing(run: Callable[..., Run]) -> None:
    result = run("doctor")
    assert result.status == 0
    assert re.search(r"^(cpu|cuda|rocm|xpu) \w+", result.out, re.MULTILINE)
    data = json.loads(run("doctor", "--json").out)
    assert data["devices"][-1]["platform"] == "cpu"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(run: Callable[..., Run], shell: str) -> None:
    if shell == "bash" and not _bash_is_new_enough():
        pytest.skip("click needs bash 4.4 to print its completion script")
    assert "_ATTNREG_COMPLETE" in run("completion", shell).out


def _bash_is_new_enough() -> bool:
    try:
        text = subprocess.run(["bash", "--version"], capture_output=True, text=True, check=True).stdout
    except OSError:
        return False
    found = re.search(r"version (\d+)\.(\d+)", text)
    return found is not None and (int(found[1]), int(found[2])) >= (4, 4)


COMPLETIONS = [("attnreg explain --backend ROCM_AITER_F", "ROCM_AITER_FA"), ("attnreg explain --arch gfx94", "gfx942")]


@pytest.mark.parametrize(("line", "word"), COMPLETIONS)
def test_words_are_completed_from_the_registry(line: str, word: str) -> None:
    words = line.split()
    environment = {
        **os.environ,
        "_ATTNREG_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    command = [sys.executable, "-c", "from attnreg.cli import main; main()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert f"plain,{word}" in done.stdout.splitlines()
