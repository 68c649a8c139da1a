"""Which option a person meant by an unknown one."""

from __future__ import annotations

import pytest

from attnreg.engines.settings import known_engines
from attnreg.engines.spelling import meant


@pytest.mark.parametrize(
    ("engine", "option", "known"),
    [
        ("vllm", "--attention-bakend", "--attention-backend"),
        ("vllm", "--attention-config.bakend", "--attention-config.backend"),
        ("vllm", "--atention-config", "--attention-config"),
        ("vllm", "--dytpe", "--dtype"),
        ("vllm", "--speculative-config.modle", "--speculative-config.model"),
        ("sglang", "--tp-szie", "--tp-size"),
        ("sglang", "--pt", "--tp"),
        # other options of the engines
        ("vllm", "--port", ""),
        ("vllm", "--data-parallel-size", ""),
        ("vllm", "--attention-config", ""),
        ("sglang", "--dp-size", ""),
        ("sglang", "--dp", ""),
        ("sglang", "--" + "a" * 10_000, ""),
    ],
)
def test_an_option_that_resembles_a_known_one_is_meant(engine: str, option: str, known: str) -> None:
    assert meant(engine, option) == known


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_option_of_the_engine_is_a_typing_error(engine: str) -> None:
    about = known_engines()[engine]
    assert [option for option in (*about["options"], *about.get("others", ())) if meant(engine, option)] == []
