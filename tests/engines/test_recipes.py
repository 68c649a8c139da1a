"""`attnreg check recipe`: launch recipes and scripts, with the place of every finding."""

from __future__ import annotations

import json

import pytest
import support

from attnreg.cli import main

LLAMA = support.ROOT / "examples" / "configs" / "Llama-3.1-8B"


def test_variables_backends_and_restated_defaults_are_found(check):
    status, found = check(f"""\
engine: vllm
version: "0.33"
model: {LLAMA}
arch: sm90
env:
  HF_HOME: /models
  VLLM_ATTENTION_BACKEND: FLASHINFER
args: [--attention-backend, FLASH_ATTN, --kv-cache-dtype, auto, --tensor-parallel-size, "2"]
""")
    assert status == 1
    assert found == [
        ("recipe.yaml:7:3", "VLLM_ATTENTION_BACKEND was removed in 0.14 and is ignored by vllm 0.33.0"),
        (
            "recipe.yaml:8:8",
            "--attention-backend FLASH_ATTN only restates the default of vllm-0.33.0 for this model on sm90",
        ),
        ("recipe.yaml:8:41", "--kv-cache-dtype auto only restates the default"),
    ]


def test_a_backend_that_the_release_has_not_or_refuses(check):
    base = f'version: "0.31"\nmodel: {LLAMA}\narch: sm90\n'
    status, found = check(f"{base}command: vllm serve x --attention-backend FLASH_ATTN_MLA_SPARSE_FA4\n")
    message = "--attention-backend: backend FLASH_ATTN_MLA_SPARSE_FA4 is not in vllm-0.31.0"
    assert (status, found) == (1, [("recipe.yaml:4:23", message)])
    status, found = check(f"{base}command: vllm serve x --attention-backend FLASHMLA\n")
    assert status == 1
    assert found[0][1].startswith("--attention-backend FLASHMLA: vllm-0.31.0 refuses it for this model on sm90: ")


def test_what_is_right_has_no_finding(check):
    base = f'engine: vllm\nversion: "0.33"\nmodel: {LLAMA}\narch: sm90\n'
    assert check(f"{base}args: {{attention_backend: TRITON_ATTN, kv-cache-dtype: fp8}}\n") == (0, [])
    # a release that still read the variable
    assert check('engine: vllm\nversion: "0.32"\nenv: {VLLM_ROCM_MONO_DECODE: 1}\n') == (0, [])
    assert check('engine: vllm\nversion: "0.33"\nenv: {VLLM_ROCM_MONO_DECODE: 1}\n')[0] == 1


def test_a_script_is_read_line_by_line(check):
    script = """\
#!/bin/sh
export VLLM_USE_TRTLLM_ATTENTION=1
echo "--attention-backend NOTHING"
VLLM_FLASH_ATTN_VERSION=3 vllm serve meta-llama/Llama-3.1-8B \\
  --attention-backend ROCM_OCTAV \\
  --kv-cache-dtype=fp9  # a comment
python -m sglang.launch_server --model-path x --attention-backend fa5
"""
    status, found = check(script, "serve.sh")
    assert status == 1
    assert found == [
        ("serve.sh:2:8", "VLLM_USE_TRTLLM_ATTENTION was removed by 0.24 and is ignored by vllm 0.33.0"),
        ("serve.sh:4:1", "VLLM_FLASH_ATTN_VERSION was removed by 0.24 and is ignored by vllm 0.33.0"),
        ("serve.sh:5:3", "--attention-backend: backend ROCM_OCTAV is not in vllm-0.33.0"),
        ("serve.sh:6:3", "--kv-cache-dtype: vllm-0.33.0 has no kv_dtype fp9"),
        ("serve.sh:7:47", "--attention-backend: backend fa5 is not in sglang-0.5.23"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engin: vllm\n", "recipe.yaml:1:1: the file is no launch file: it has no key of one"),
        ("engin: vllm\n", "help: did you mean `engine`?"),
        ("engine: vllm\nmodl: x\n", "recipe.yaml:2:1: unknown key `modl`"),
        ("engine: tgi\n", "recipe.yaml:1:9: engine: unknown engine `tgi`"),
        ("engine: vllm-0.33\n", 'help: write `engine: vllm` and `version: "0.33"`'),
        ("model: x\n", "recipe.yaml:1:1: the recipe names no engine"),
        ("engine: vllm\nversion: '0.19'\n", "recipe.yaml:2:10: no bundled release vllm-0.19"),
        ("engine: vllm\nargs: 3\n", "recipe.yaml:2:7: args: expected a list of words"),
        ("engine: vllm\nenv: [A]\n", "recipe.yaml:2:6: env: expected a mapping"),
        ("engine: vllm\nmodel: [a]\n", "recipe.yaml:2:8: model: expected a text"),
        ("- a\n", "recipe.yaml:1:1: the file is no launch file: it is no mapping"),
        ("command: vllm serve 'x\n", "recipe.yaml:1:10: not a shell command: quotes or brackets do not match"),
        ("engine: [\n", "not valid YAML"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused_with_its_place(check, text, message):
    status, said = check(text)
    assert status == 2
    assert message in said


def test_a_script_without_an_engine_is_refused(check):
    status, said = check("echo hello\n", "serve.sh")
    assert (status, "serve.sh:1:1: nothing in the file runs an engine" in said) == (2, True)


def test_a_release_may_be_given(check):
    status, found = check(
        "command: vllm serve x --attention-backend ROCM_OCTAVE\n", "r.yaml", "--registry", "vllm-0.31"
    )
    assert (status, found[0][1]) == (1, "--attention-backend: backend ROCM_OCTAVE is not in vllm-0.31.0")


GPT_OSS = support.ROOT / "examples" / "configs" / "gpt-oss-120b"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("{attention-backend: triton}", "--attention-backend triton only restates the default of sglang-0.5.14"),
        (
            "{attention_backend: flashinfer}",
            "--attention-backend flashinfer: sglang-0.5.14 refuses it for this model on",
        ),
        ("{decode-attention-backend: trtllm_mla}", "--decode-attention-backend trtllm_mla: sglang-0.5.14 refuses it"),
        ("{attention-backend: fa3}", "its factory requires SM 8.x without MLA, or SM 9.x"),
        ("{attention-backend: hpc_ops}", "--attention-backend: backend hpc_ops is not in sglang-0.5.14"),
        ("{attention-backend: ascend, kv-cache-dtype: bf16}", None),
        ("{kv-cache-dtype: mxfp8}", "--kv-cache-dtype: sglang-0.5.14 has no kv_dtype mxfp8"),
        ("{attention-backned: triton}", "unknown option --attention-backned"),
        ("{mm-attention-backend: fa3}", None),
        ("{page-size: many}", "--page-size: expected a number, got many"),
    ],
)
def test_a_backend_of_sglang_is_asked_of_its_resolution(check, args, message):
    """What is named goes through the steps, which refuse or change it: it is not the last word."""
    recipe = f'engine: sglang\nversion: "0.5.14"\nmodel: {GPT_OSS}\narch: sm120\nargs: {args}\n'
    status, found = check(recipe)
    assert status == (message is not None)
    assert [message in text for _, text in found] == ([True] if message else [])


@pytest.mark.parametrize("backend", ["fa3", "triton", "flashinfer", "torch_native"])
def test_the_backend_of_a_draft_restates_the_targets_alone(check, backend):
    options = f"speculative-algorithm: EAGLE3, speculative-draft-attention-backend: {backend}"
    status, found = check(f"engine: sglang\nversion: 0.5.23\nmodel: {LLAMA}\narch: sm90\nargs: {{{options}}}\n")
    assert (status, len(found)) == ((1, 1) if backend == "fa3" else (0, 0))
    assert all("fa3 only restates the default of sglang-0.5.23" in text for _, text in found)


def test_a_backend_that_a_step_replaces_is_found(check):
    recipe = f"engine: sglang\nmodel: {LLAMA}\narch: sm80\nargs: {{attention-backend: fa3, kv-cache-dtype: fp8_e5m2}}\n"
    message = "--attention-backend fa3: sglang-0.5.23 takes triton in its place for this model on sm80"
    assert check(recipe) == (1, [("recipe.yaml:4:8", message)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: vllm\narch: sm91\n", "recipe.yaml:2:7: unknown architecture sm91"),
        ("engine: vllm\nmodel: nowhere\n", "recipe.yaml:2:8: nowhere: no such file"),
        ("[1, 2", "the file has 1 problem:\nrecipe.yaml:1:1: not valid YAML"),
    ],
)
def test_a_wrong_gpu_or_model_or_file_is_said_with_its_place(check, text, message):
    status, error = check(text)
    assert status == 2
    assert message in error


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        ("engine: vllm\nversion: '0.33'\narch: sm80\nargs: [--kv-cache-dtype, fp8_per_token_head]\n", "from SM 8.9"),
        ("engine: vllm\nversion: '0.33'\narch: sm75\nargs: [--dtype, bfloat16]\n", "needs compute capability 8.0"),
    ],
)
def test_a_run_that_does_not_start_is_found_without_a_backend_by_name(check, recipe, reason):
    status, [(where, message)] = check(f"model: {LLAMA}\n{recipe}")
    assert (status, where) == (1, "recipe.yaml:1:8")
    assert "vllm-0.33.0 does not start this model on sm" in message
    assert reason in message
    started = recipe.replace("sm80", "sm90").replace("sm75", "sm90")
    assert check(f"model: {LLAMA}\n{started}") == (0, [])


def test_what_is_not_judged_is_said(tmp_path, capsys):
    script = tmp_path / "serve.sh"
    script.write_text("vllm serve x --attention-backend FLASHMLA\n")
    assert main(["check", str(script)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no release is named: vllm-0.33.0 is assumed" in said
    assert "not checked: no GPU is named: give --arch; the config of x is not here: give --model" in said
    assert said.endswith("1 file, 1 launch: 0 findings")
    assert main(["check", str(script), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["findings"], len(answer["notes"])) == ([], 2)
    [launch] = answer["launches"]
    assert launch == {
        "where": f"{script}:1:1",
        "registry": "vllm-0.33.0",
        "arch": None,
        "model": None,
        "checked_whole": False,
    }


def test_a_registry_in_place_of_a_recipe_is_told_its_option(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("vllm-0.33.0", "vllm-0.33"):
        assert main(["check", name]) == 2
        help_ = "help: vllm-0.33.0 is a bundled registry: `attnreg check --registry vllm-0.33.0` checks it"
        assert help_ in capsys.readouterr().err
    # a file of that name is a recipe
    (tmp_path / "vllm-0.33.0").write_text("vllm serve x\n")
    assert main(["check", "vllm-0.33.0"]) == 0


BASE = f'engine: vllm\nversion: "0.33"\nmodel: {LLAMA}\narch: sm90\n'
REFUSED = "FLASHMLA: vllm-0.33.0 refuses it for this model on sm90"


@pytest.mark.parametrize(
    "args",
    [
        '[--attention-config, \'{"backend": "FLASHMLA"}\']',
        '[-ac, \'{"backend": "FLASHMLA"}\']',
        "[-ac.backend=FLASHMLA, -tp, '2']",
        "{attention_config: {backend: FLASHMLA}}",
        '{attention-config: \'{"backend": "FLASHMLA"}\'}',
    ],
)
def test_a_config_in_json_and_short_options_are_read(check, args):
    status, [(_, message)] = check(f"{BASE}args: {args}\n")
    assert status == 1
    assert message.startswith(f"--attention-config.backend {REFUSED}")


def test_short_options_are_those_of_the_ranks(check):
    # 32 query heads do not divide over 3 ranks
    assert check(f"{BASE}args: [-tp, '3']\n")[0] == check(f"{BASE}args: ['-tp=3']\n")[0] == 2
    for value in ("abc", "0", "''"):
        status, [(_, message)] = check(f"{BASE}args: [--tensor-parallel-size, {value}]\n")
        assert status == 1
        assert message.startswith("--tensor-parallel-size: expected a number of at least 1, got ")


def test_of_an_option_that_is_given_again_the_last_counts(check):
    again = "is given again behind it, which counts"
    status, found = check(f"{BASE}args: [--attention-backend, FLASHMLA, --attention-backend, TRITON_ATTN]\n")
    assert (status, [message for _, message in found]) == (1, [f"--attention-backend {again}"])
    status, found = check(f"engine: sglang\nmodel: {LLAMA}\narch: sm90\nargs: [--tp, '3', --tp-size, '2']\n")
    assert (status, [message for _, message in found]) == (1, [f"--tp {again}"])


def test_an_option_without_a_value_says_so(check):
    status, [(_, message)] = check(f"{BASE}args: {{attention_backend: null}}\n")
    assert (status, message) == (1, "--attention-backend: expected a backend, got nothing")


def test_short_names_of_dtypes_are_read(check):
    assert check(f"{BASE}args: {{dtype: half}}\n") == (0, [])
    status, [(_, message)] = check(f"{BASE}args: {{dtype: halve}}\n")
    assert status == 1
    assert "has no dtype halve" in message


def test_what_only_the_shell_knows_is_no_finding_and_is_not_judged(tmp_path, capsys):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"{BASE}command: vllm serve $MODEL --attention-backend $ATTN -tp $(ls | wc -l) --dtype '`x`'\n")
    assert main(["check", str(recipe), "--json"]) == 0
    what = "only the shell knows --attention-backend, --tensor-parallel-size, --dtype"
    note = f"{recipe}: what the run gets is not checked: {what}"
    answer = json.loads(capsys.readouterr().out)
    assert (answer["findings"], answer["notes"]) == ([], [note])


def test_a_script_is_read_command_by_command(check):
    script = """\
export VLLM_ROCM_MONO_DECODE=1; cd x && vllm serve a --attention-backend NOPE && echo --dtype NOT
unset VLLM_ROCM_MONO_DECODE
(vllm serve b --kv-cache-dtype fp9) &
vllm serve c --speculative-config '{
  "method": "eagle"
}' --tensor-parallel-size $(ls | wc -l) \\
  --attention-backend GONE; vllm serve d --attention-backend LAST
echo 'a text
that ends elsewhere'
"""
    status, found = check(script, "serve.sh")
    assert status == 1
    assert [(where, message.removesuffix(" is not in vllm-0.33.0")) for where, message in found] == [
        ("serve.sh:1:8", "VLLM_ROCM_MONO_DECODE was removed in 0.33 and is ignored by vllm 0.33.0"),
        ("serve.sh:1:54", "--attention-backend: backend NOPE"),
        ("serve.sh:3:15", "--kv-cache-dtype: vllm-0.33.0 has no kv_dtype fp9"),
        ("serve.sh:7:3", "--attention-backend: backend GONE"),
        ("serve.sh:7:42", "--attention-backend: backend LAST"),
    ]


def test_a_command_whose_quotes_do_not_end_is_not_passed_over(check):
    status, said = check("true\nvllm serve b --dtype 'x\n", "serve.sh")
    assert (status, "not a shell command: quotes or brackets do not match" in said) == (2, True)
    # quotes may go on for any number of lines
    status, [(where, message)] = check("true\nvllm serve b --dtype 'x\n" + "x\n" * 300 + "'\n", "serve.sh")
    assert (status, where, "has no dtype x" in message) == (1, "serve.sh:2:14", True)


BACKEND = "vllm serve m --attention-backend XFORMERS"
GONE = "--attention-backend: backend XFORMERS is not in vllm-0.33.0"


@pytest.mark.parametrize(
    "line",
    [
        f"bash -c '{BACKEND}'",
        f"nohup sh -lc 'cd x && {BACKEND}; true' &",
        f'ssh host "{BACKEND}"',
        f"ssh -p 22 host \"bash -c '{BACKEND}'\"",
        f"docker run --gpus all image bash -c '{BACKEND}'",
        f"su - me -c '{BACKEND}'",
        f"eval 'exec {BACKEND}'",
        f"tmux new-session -d -s x '{BACKEND}'",
        f"bash -c '\n  set -e  # the engine'\"'\"'s\n  {BACKEND} \\\n    --port 1\n'",
        f"/opt/bin/{BACKEND}",
        "python -m vllm.entrypoints.openai.api_server --attention-backend XFORMERS",
        f"pids=({BACKEND})",
        f"if ! {BACKEND} > $LOG; then exit 1; fi",
    ],
)
def test_a_command_in_quotes_for_another_shell_is_read(check, line):
    status, found = check(f"{line}\n", "serve.sh")
    assert (status, [message for _, message in found]) == (1, [GONE])


@pytest.mark.parametrize(
    "line",
    [
        'echo "vllm serve is gone"',
        f"echo {BACKEND}",
        f"x=1 && printf '%s' {BACKEND}",
        f"bash -c 'echo {BACKEND}'",
        "pkill -f vllm.entrypoints.openai",
        "myvllm serve m",
        "vllm served m",
        f"# {BACKEND}",
        f"git commit -m '{BACKEND}'",
    ],
)
def test_what_only_speaks_of_an_engine_runs_none(check, line):
    status, said = check(f"{line}\n", "serve.sh")
    assert (status, "nothing in the file runs an engine" in said) == (2, True)


def test_variables_reach_the_shells_that_have_them(check):
    def places(text):
        return [where for where, message in check(text, "serve.sh")[1] if message.startswith("VLLM_ATTENTION_BACKEND")]

    said = 'export VLLM_ATTENTION_BACKEND=X\necho "Starting vllm serve now"\nvllm serve m\n'
    assert places(said) == ["serve.sh:1:8"]
    assert places("export VLLM_ATTENTION_BACKEND=X\nbash -c 'vllm serve m'\n") == ["serve.sh:1:8"]
    assert places("export VLLM_ATTENTION_BACKEND=X\nssh host 'vllm serve m'\n") == []
    assert places("VLLM_ATTENTION_BACKEND=X bash -c 'vllm serve m'\n") == ["serve.sh:1:1"]
    assert places("bash -c 'export VLLM_ATTENTION_BACKEND=X; true'\nvllm serve m\n") == []
    inner = "true\nbash -c 'export VLLM_ATTENTION_BACKEND=X; vllm serve m --dtype auto'\n"
    assert places(inner) == ["serve.sh:2:17"]


def test_a_command_in_quotes_of_a_recipe_is_read(check):
    status, found = check(f'command: bash -c "export VLLM_ROCM_MONO_DECODE=1; {BACKEND}"\n')
    assert (status, found[1]) == (1, ("recipe.yaml:1:64", GONE))
    assert len(found) == 2
    status, said = check("command: bash -c 'vllm serve \"m'\n")
    assert (status, "not a shell command" in said) == (2, True)
    status, said = check('true\nbash -c "vllm serve \'m"\n', "serve.sh")
    assert (status, "not a shell command" in said) == (2, True)


@pytest.mark.parametrize(
    ("behind", "unknown"),
    [
        ("m $EXTRA", "$EXTRA"),
        ("m --attention-backend FLASH_ATTN $EXTRA", "$EXTRA"),
        ("m --trust-remote-code $EXTRA_ARGS", "$EXTRA_ARGS"),
        ('--port $PORT "$@" --dtype float16', "$@"),
        ('"${ARGS[@]}"', "${ARGS[@]}"),
        ("m $(cat args.txt --dtype half)", "the output of a command"),
        ("m `cat args.txt`", "the output of a command"),
        ("m ${EXTRA:---dtype half}", "$EXTRA"),
        ("m --attention-config '{\"backend\": $X}'", "--attention-config"),
        ("$MODEL --port $PORT --host=$HOST > $LOG 2>$ERR", None),
        ("m --served-model-name $TARGET --port $(port $X)", None),
    ],
)
def test_words_that_only_the_shell_knows_may_hold_options(tmp_path, capsys, behind, unknown):
    recipe = tmp_path / "r.yaml"
    command = json.dumps(f"vllm serve {behind}")
    recipe.write_text(f"{BASE}command: {command}\n")
    assert main(["check", str(recipe), "--json"]) == 0
    note = f"{recipe}: what the run gets is not checked: only the shell knows {unknown}"
    answer = json.loads(capsys.readouterr().out)
    assert (answer["findings"], answer["notes"]) == ([], [note] if unknown else [])


def test_short_options_of_a_mapping_are_read(check):
    # 32 query heads do not divide over 3 ranks
    assert check(f'{BASE}args: {{"-tp": 3}}\n')[0] == check(f'{BASE}args: {{"-tp": 2, -O: 3}}\n')[0] + 2 == 2
    for args in ('{"-ac": {backend: FLASHMLA}}', '{"-ac.backend": FLASHMLA}', "{attention_config.backend: FLASHMLA}"):
        status, [(_, message)] = check(f"{BASE}args: {args}\n")
        assert (status, message.startswith(f"--attention-config.backend {REFUSED}")) == (1, True)


def test_a_line_that_ends_in_a_comment_is_not_continued(check):
    assert check("vllm serve m \\\n# --x \\\n--kv-cache-dtype nope\n", "serve.sh") == (0, [])
    assert check("vllm serve m  # it's \\\n--kv-cache-dtype nope\n", "serve.sh") == (0, [])
    # in quotes it is none
    assert check("vllm serve m --x '# ' \\\n--kv-cache-dtype nope\n", "serve.sh")[0] == 1
    assert [where for where, _ in check("# \\\nvllm serve m --dtype auto\n", "serve.sh")[1]] == ["serve.sh:2:14"]


@pytest.mark.parametrize("option", ["--attention-config", "-ac", "--speculative-config"])
def test_a_config_that_is_no_json_is_found(check, option):
    status, [(where, message)] = check(f"true\nvllm serve m {option} '{{\"backend\": '\n", "serve.sh")
    assert (status, where) == (1, "serve.sh:2:14")
    assert message.endswith("-config: its value is no JSON object")
    # a template of a chat is no JSON
    assert check("vllm serve m --chat-template '{{ x }}'\n", "serve.sh") == (0, [])


def test_a_number_of_thousands_of_digits_is_said_with_its_place(check):
    digits = "9" * 5000
    for option in ("--tensor-parallel-size", "--block-size"):
        status, [(where, message)] = check(f"vllm serve m {option} {digits}\n", "serve.sh")
        assert (status, where) == (1, "serve.sh:1:14")
        assert message.startswith(f"{option}: expected a number")
        assert message.endswith(f" of at most 18 digits, got {digits[:40]}…")
