"""`attnreg upgrade`: what an upgrade of an engine changes for models, with the reasons of both releases."""

from __future__ import annotations

import json

import pytest
import support
from support.registries.silent import silent_release

GEMMA = str(support.ROOT / "examples" / "configs" / "gemma-3-27b-it")
LLAMA = str(support.ROOT / "examples" / "configs" / "Llama-3.1-8B")
FLOAT32 = str(support.ROOT / "examples" / "configs" / "gemma-2-9b")
RELEASES = ("--from", "vllm-0.20", "--to", "vllm-0.33")


def test_what_changes_is_said_layer_by_layer_with_the_reasons_of_both_sides(run):
    done = run("upgrade", *RELEASES, "--arch", "sm100", "--model", GEMMA)
    assert done.status == 1
    assert "gemma-3-27b-it · 52 layers (0–4, 6–10, … 60–61)" in done.out
    assert "FLASHINFER/trtllm-gen → FLASH_ATTN/FA3-4" in done.out
    assert "before: FLASHINFER/trtllm-gen, 1st choice of 5 (order cuda/blackwell-mha" in done.out
    assert "after: FLASH_ATTN/FA3-4, 3rd choice of 6 (order cuda/blackwell-mha" in done.out
    assert "mm_prefix is not supported" in done.out


def test_an_upgrade_of_sglang_has_the_steps_of_both_sides(run, tmp_path):
    config = {"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "llama", "num_attention_heads": 32}
    config |= {"hidden_size": 4096, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    releases = ("--from", "sglang-0.5.14", "--to", "sglang-0.5.23", "--model", str(tmp_path))
    done = run("upgrade", *releases, "--arch", "sm100")
    assert (done.status, "trtllm_mha → fa4" in done.out) == (1, True)
    done = run("upgrade", *releases, "--arch", "sm90")
    assert (done.status, "nothing changes" in done.out) == (0, True)


def test_what_stays_is_not_printed(run):
    done = run("upgrade", *RELEASES, "--arch", "sm80", "--model", LLAMA)
    assert (done.status, "nothing changes" in done.out, "→ FLASH" in done.out) == (0, True, False)


def test_a_variant_that_the_data_call_otherwise_is_renamed_and_does_not_move(run):
    done = run("upgrade", *RELEASES, "--arch", "sm90", "--model", LLAMA)
    assert done.status == 0
    assert "renamed: FLASH_ATTN/FA3 is FLASH_ATTN/FA3-4 now, the same kernel (backends.yaml:" in done.out


@pytest.mark.parametrize("arch", ["sm90", "sm100", "gfx942"])
def test_upgrade_and_diff_count_the_same_models(run, arch):
    upgraded = json.loads(run("upgrade", *RELEASES, "--arch", arch, "--json").out)
    models = [str(path) for path in sorted((support.ROOT / "examples" / "configs").glob("*/config.json"))]
    named = [word for model in models for word in ("--model", model)]
    compared = json.loads(run("diff", "vllm-0.20.0", "vllm-0.33.0", "--arch", arch, *named, "--json").out)
    for part in ("moves", "renamed"):
        assert {move["model"] for move in upgraded[part]} == {move["model"] for move in compared[part]}
        assert upgraded[part]


@pytest.mark.parametrize("command", ["upgrade --from {} --to {}", "diff {} {} --boxes"])
def test_a_platform_that_a_table_says_nothing_of_is_named_once(run, tmp_path, command):
    words = command.format(*(silent_release(tmp_path, name) for name in ("vllm-0.30.0", "vllm-0.31.0"))).split()
    done = run(*words, "--arch", "sm90", "--arch", "xe2", "--arch", "xe_hpc", "--model", LLAMA)
    assert done.out.count("vllm-0.30.0 says nothing of xpu: left out") == 1
    assert "xe2" not in done.out.partition("all configurations")[0]
    alone = run(*words, "--arch", "xe2", "--model", LLAMA)
    assert (alone.status, "vllm-0.30.0 says nothing of xpu; vllm-0.31.0 says nothing of xpu" in alone.err) == (2, True)


def test_what_neither_release_holds_is_not_said_to_stay(run, tmp_path):
    config = {"model_type": "hy_v4", "architectures": ["HYV4ForCausalLM"], "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("upgrade", "--from", "vllm-0.31", "--to", "vllm-0.33", "--arch", "sm90", "--model", str(tmp_path))
    done = run(*asked)
    assert (done.status, "nothing is known to change" in done.out, "is not known to move" in done.out) == (
        3,
        True,
        True,
    )
    assert "in vllm-0.31.0 and vllm-0.33.0: vLLM's code for this model has attention of its own" in " ".join(
        done.out.split()
    )
    assert json.loads(run(*asked, "--json").out)["unknown"] == [tmp_path.name]


def test_json_has_both_sides(run):
    done = run("upgrade", *RELEASES, "--arch", "sm100", "--model", GEMMA, "--json")
    data = json.loads(done.out)
    assert (data["before"].partition("@")[0], data["after"].partition("@")[0]) == ("vllm-0.20.0", "vllm-0.33.0")
    assert {move["before"]["backend"] for move in data["moves"]} == {"FLASHINFER"}
    assert all(move["how"]["before"].startswith("FLASHINFER/trtllm-gen, 1st choice") for move in data["moves"])
    assert all(move["why"] for move in data["moves"])


def test_without_a_model_the_known_ones_are_compared(run):
    done = run("upgrade", *RELEASES, "--arch", "sm100", "--arch", "gfx942", "--json")
    data = json.loads(done.out)
    assert (done.status, len(data["models"]) > 20, data["compared"] > 80) == (1, True, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "vllm-0.20", "--to", "sglang-0.5"), "vllm-0.20.0 and sglang-0.5.23 are releases of two engines"),
        (("--from", "nothing", "--to", "vllm-0.33"), "`nothing` is neither a bundled registry nor a directory"),
        (("--from", "vllm-0.19"), "attnreg: vllm-0.19: there is no table of vLLM 0.19\n"),
        (("--from", "SGLang 0.5.13", "--to", "sglang"), "the nearest is `sglang-0.5.14`"),
        (("--from", "sglang", "--to", "sglang-0.5.13.post1"), "there is no table of SGLang 0.5.13.post1\n"),
        (("--to", "vllm-0.33"), "upgrade needs --from"),
        ((*RELEASES, "--arch", "sm91"), "unknown architecture 'sm91'"),
        ((*RELEASES, "--model", "nowhere/config.json"), "nowhere/config.json: no such file"),
    ],
)
def test_bad_input_is_refused(run, arguments, message):
    done = run("upgrade", *arguments)
    assert (done.status, done.out) == (2, "")
    assert message in done.err


@pytest.fixture
def alone(tmp_path):
    """The table of 0.28's selector alone."""
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "release.yaml").write_text("extends: vllm-0.28.0\nsteps: null\n")
    return str(tmp_path / "alone")


def test_a_table_without_a_start_is_compared_by_its_selector(run, alone):
    for command in (("upgrade", "--from", alone, "--to", "vllm-0.28"), ("diff", alone, "vllm-0.28.0")):
        # the start of 0.28 casts this float32 config to bfloat16, and its selector alone does not
        done = run(*command, "--arch", "sm90", "--model", FLOAT32)
        said = " ".join(done.out.split())
        assert "note: alone holds the selector alone. The start of this release was not recorded" in said
        assert "note: the selectors of both are compared" in said
        assert done.status == 0, "nothing moves"
    done = run("upgrade", "--from", "vllm-0.30", "--to", "vllm-0.32", "--arch", "gfx942", "--json")
    assert not any("selector" in note for note in json.loads(done.out)["notes"])


def test_an_answer_of_the_selector_alone_says_so(run, alone):
    for command in ("explain", "explain --brief", "explain --json"):
        done = run(*command.split(), "--registry", alone, "--arch", "sm90", "--model", FLOAT32)
        assert "alone holds the selector alone" in " ".join(done.out.split())
    assert "selector alone" not in run("explain", "--registry", "vllm-0.28", "--arch", "sm90", "--model", FLOAT32).out
    locked = run("lock", "--registry", alone, "--arch", "sm90", "--model", FLOAT32)
    assert "alone holds the selector alone" in locked.err
    assert json.loads(locked.out)


@pytest.mark.parametrize("release", ["0.32", "0.31", "0.30", "0.28", "0.26", "0.24"])
def test_each_release_casts_a_float32_config_before_it_chooses(run, release):
    said = run("explain", "--registry", f"vllm-{release}", "--arch", "sm90", "--model", FLOAT32).out
    assert "dtype float32 → bfloat16 (_resolve_auto_dtype)" in said
    assert "▸ FLASH_ATTN/" in said


@pytest.mark.parametrize("given", ["default", "default:"])
def test_attnregs_own_table_is_no_release(run, given):
    for releases in (("--from", given, "--to", "vllm-0.33"), ("--from", "vllm-0.31", "--to", given)):
        done = run("upgrade", *releases)
        assert (done.status, f"{given} is no release of an engine" in done.err) == (2, True)
        assert "sglang-0.5.23, vllm-0.20.0" in done.err
