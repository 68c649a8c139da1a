"""Lines of shell scripts: what is a word, an operator, a redirection, a comment, and what a command exports."""

from __future__ import annotations

import time

import pytest

from attnreg.engines.shell import ShellOperator, split
from attnreg.errors import Location

HERE = Location("s.sh", 1, 1)
GONE = "--attention-backend: backend XFORMERS is not in vllm-0.33.0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a;b", ["a", ";", "b"]),
        ("a&&b||c", ["a", "&&", "b", "||", "c"]),
        ("x) a;; esac", ["x", ")", "a", ";;", "esac"]),
        ("a>log 2>&1 b", ["a", "b"]),
        ("a2>log &>> x b", ["a2", "b"]),
        ("a<in >&- b <<'EOF'", ["a", "b"]),
        ("a |& tee x&", ["a", "|&", "tee", "x", "&"]),
        ("'a;b' \"c&d\" e\\;f", ["a;b", "c&d", "e;f"]),
        ("a#b # c", ["a#b"]),
        ("a;# c", ["a", ";"]),
        ("--x '' \"\"", ["--x", "", ""]),
        ('"a \\"b\\" \\$c \\d"', ['a "b" $c \\d']),
        ("$(a | b > c) x", ["$(a | b > c)", "x"]),
        ('y="$(a "b )" \')\')" x', ["y=$(a \"b )\" ')')", "x"]),
        ("`a; b` ${x:-a b} <(a; b)", ["`a; b`", "${x:-a b}", "<(a; b)"]),
        ("a=(b; c) d", ["a=(b; c)", "d"]),
        # what does not close
        ("x=$(a \\\n b", ["x=$", "(", "a", "b"]),
        ("a `b ${c", ["a", "`b", "${c"]),
    ],
)
def test_words_end_where_those_of_a_shell_do(text: str, expected: list[str]) -> None:
    line = split(text, HERE)
    assert [word for word, _ in line.words] == expected
    assert line.problems == []


def test_an_operator_in_quotes_is_a_word() -> None:
    assert [isinstance(word, ShellOperator) for word, _ in split("find ';' \\; ;", HERE).words] == [False] * 3 + [True]


def test_brackets_and_backticks_hold_commands() -> None:
    line = split("a=(b) $(c $(d)) \"`e`\" '$(f)' $((1 + 2)) ${g}", HERE)
    assert [text for text, _ in line.within] == ["b", "c $(d)", "e", "(1 + 2)"]


def test_brackets_that_do_not_close_take_no_time() -> None:
    before = time.process_time()
    split("$(" * 100_000 + "`" + "${" * 100_000, HERE)
    split("$(" * 1000 + "vllm serve" + ")" * 1000, HERE)
    assert time.process_time() - before < 10


BACKEND = "vllm serve m --attention-backend XFORMERS"


@pytest.mark.parametrize(
    "line",
    [
        f"case x in y) {BACKEND};; esac",
        f"{BACKEND}&",
        f"{BACKEND}|tee log",
        f"{BACKEND}>log 2>&1",
        f"{BACKEND}&>log",
        f"true&&{BACKEND}",
        f"({BACKEND})",
        f"vllm serve a& {BACKEND}",
        f"out=$({BACKEND} 2>&1 | tee log)",
        "out=$(vllm serve m \\\n  --attention-backend XFORMERS)",
        "vllm serve m --x $(a \\\n  b) --attention-backend XFORMERS",
        "vllm serve m --served-model-name a#b --attention-backend XFORMERS",
        "vllm serve m --enforce-eager -tp 2 --attention-backend XFORMERS",
    ],
)
def test_what_touches_a_word_is_none_of_it(check, line):
    status, found = check(f"{line}\n", "serve.sh")
    assert (status, [message for _, message in found]) == (1, [GONE])


def test_both_commands_of_a_line_are_read(check):
    _, found = check("vllm serve a --dtype d1& vllm serve b --dtype d2&\n", "serve.sh")
    assert [message[-2:] for _, message in found] == ["d1", "d2"]


@pytest.mark.parametrize(
    ("script", "exported"),
    [
        ("cd /x;VLLM_ROCM_MONO_DECODE=1 vllm serve m;echo done", True),
        ("export VLLM_ROCM_MONO_DECODE=1;vllm serve m", True),
        ("if x; then export VLLM_ROCM_MONO_DECODE=1; fi\nvllm serve m", True),
        ("{ export VLLM_ROCM_MONO_DECODE=1; }\nvllm serve m", True),
        ("declare -x VLLM_ROCM_MONO_DECODE=1\nvllm serve m", True),
        ("typeset -gx VLLM_ROCM_MONO_DECODE=1\nvllm serve m", True),
        ("declare VLLM_ROCM_MONO_DECODE=1\nvllm serve m", False),
        ("x=$(export VLLM_ROCM_MONO_DECODE=1)\nvllm serve m", False),
        ("export VLLM_ROCM_MONO_DECODE=1;unset VLLM_ROCM_MONO_DECODE;vllm serve m", False),
    ],
)
def test_what_a_script_exports_reaches_its_commands(check, script, exported):
    assert check(f"{script}\n", "serve.sh")[0] == exported


@pytest.mark.parametrize("image", ["vllm/vllm-openai:latest", "docker.io:80/vllm/vllm-openai@sha256:1"])
def test_an_image_takes_the_options_of_its_engine(check, image):
    docker = "docker run --gpus all -e VLLM_ROCM_MONO_DECODE=1 --env=VLLM_ATTENTION_BACKEND=X"
    status, found = check(f"{docker} {image} --model m --attention-backend XFORMERS\n", "serve.sh")
    assert (status, len(found), found[-1][1]) == (1, 3, GONE)


@pytest.mark.parametrize(
    "line",
    [
        "docker pull vllm/vllm-openai",
        "docker run --entrypoint nvidia-smi vllm/vllm-openai:latest",
        "docker run my/vllm-openai --dtype d",
    ],
)
def test_an_image_that_is_not_started_as_an_engine_runs_none(check, line):
    status, said = check(f"{line}\n", "serve.sh")
    assert (status, "no line runs an engine" in said) == (2, True)


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm", "vllm.Dockerfile", "Containerfile", "vllm.service"])
def test_a_file_whose_variables_have_a_form_of_their_own_is_refused(check, name):
    status, said = check("FROM x\nENV VLLM_ATTENTION_BACKEND=X\nCMD vllm serve m\n", name)
    assert status == 2
    assert f"{name}:1:1: {name} is no launch recipe" in said
    assert "help: write its variables and its command as `env` and `command` of a YAML recipe" in said
