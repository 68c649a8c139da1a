"""Shell scripts: which commands run an engine, with which words and variables."""

from __future__ import annotations

import pytest

GONE = "--attention-backend: backend XFORMERS is not in vllm-0.33.0"
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
        "docker run --entrypoint=/bin/bash vllm/vllm-openai:latest",
        "docker run --entrypoint vllm --name serve vllm/vllm-openai:latest --version",
        "docker run my/vllm-openai --dtype d",
    ],
)
def test_an_image_that_is_not_started_as_an_engine_runs_none(check, line):
    status, said = check(f"{line}\n", "serve.sh")
    assert (status, "nothing in the file runs an engine" in said) == (2, True)
