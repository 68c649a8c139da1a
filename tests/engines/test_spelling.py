"""Which option a person meant by an unknown one."""

from __future__ import annotations

import json

import pytest
from support import ROOT

from attnreg.engines.settings import known_engines
from attnreg.engines.spelling import abbreviated, meant

# every option of vLLM 0.20 to 0.33, SGLang 0.5.14 to 0.5.23 and Dynamo 1.6, from their sources
OPTIONS = json.loads((ROOT / "tests" / "data" / "deploy" / "options.json").read_text())


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
        # several letters, and words about attention that no option has
        ("vllm", "--attn-backend", "--attention-backend"),
        ("vllm", "--attn-config.backend", "--attention-config.backend"),
        ("vllm", "--kv-cahce-dtpye", "--kv-cache-dtype"),
        ("vllm", "--kvcache-type", "--kv-cache-dtype"),
        ("vllm", "--attention-config.kernel", "--attention-config.backend"),
        ("sglang", "--atention-bakcend", "--attention-backend"),
        ("sglang", "--attn-impl", "--attn-cp-size"),
        # other options of the engines
        ("vllm", "--no-disable-sliding-window", ""),
        ("vllm", "--kv-transfer-config.kv_connector_extra_config.kv_conector", ""),
        ("vllm", "--kv-cache-dt", ""),
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
    options = [*about["options"], *about["others"], *OPTIONS[engine]]
    assert [option for option in options if meant(engine, option) or abbreviated(engine, option)] == []
    # none is listed that the engine does not have
    assert {*about["others"]} - {*OPTIONS[engine]} <= {"--mode", "--cp", "--cp-size", "--dp", "--pp", "--sp-size"}
