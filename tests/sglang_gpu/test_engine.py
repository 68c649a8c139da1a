"""attnreg's kernels in the whole engine of SGLang on a GPU, beside SGLang's own: the same tokens, up to ties.

Each case runs an engine with a backend of SGLang's, and with attnreg's in the place of ``triton``: with CUDA graphs
and without. SGLang is whatever `import sglang` finds; `make test-sglang-gpu` runs this.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang_process import Answer, checkpoints_in, run_engine

NEW, TOP = 48, 8
# log probabilities may differ by this much; two tokens nearer than twice that may change places
TOLERANCE = {"float16": 2e-2, "bfloat16": 7e-2}
SERVES = "attnreg: its kernels serve the layers of this run"


def _missing() -> str:
    if not torch.cuda.is_available():
        return "needs a GPU that PyTorch can use"
    return "" if importlib.util.find_spec("sglang") else "needs SGLang in this environment"


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing() or "all is there")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model's checkpoint."""
    return checkpoints_in(tmp_path_factory.getbasetemp(), "bfloat16")


@pytest.fixture(scope="session")
def rounds() -> list[dict[str, Any]]:
    """Prompts with prefixes in common, and 64 requests at once."""
    chance = random.Random(5)
    prefix = [chance.randrange(3, 1000) for _ in range(700)]
    prompts = [prefix[: 300 + 25 * i] + [chance.randrange(3, 1000) for _ in range(1 + 9 * i)] for i in range(16)]
    many = [[chance.randrange(3, 1000) for _ in range(5 + i)] for i in range(64)]
    return [{"prompts": one, "new": NEW, "top": TOP} for one in (prompts[:4], prompts, many)]


def same_up_to_ties(ours: Answer, theirs: Answer, tolerance: float) -> None:
    """Each request has the same tokens until two were so near each other that rounding decides."""
    for a, b in zip(ours.rounds, theirs.rounds, strict=True):
        for mine, other in zip(a, b, strict=True):
            assert len(mine[0]) == len(other[0])
            for position, (x, y) in enumerate(zip(mine[0], other[0], strict=True)):
                likely = {token: value for value, token in mine[3][position]}
                known = {token: value for value, token in other[3][position]}
                assert abs(likely[x] - known.get(x, -99.0)) <= tolerance, (position, x, y)
                if x != y:
                    assert abs(likely[x] - likely.get(y, -99.0)) <= 2 * tolerance, (position, x, y)
                    break


# prompts are longer than a chunk
ARGUMENTS: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "mem_fraction_static": 0.5, "max_total_tokens": 65536,
    "chunked_prefill_size": 512, "disable_overlap_schedule": False, "disable_cuda_graph": False,
}  # fmt: skip
Run = Callable[..., Answer]


@pytest.fixture
def engine(tmp_path: Path, checkpoint: Callable[[str], Path], rounds: list[dict[str, Any]]) -> Run:
    """Runs an engine over a model with a value of $ATTNREG_SGLANG, and returns what it answers in each round."""

    def run(model: str, switch: str, **arguments: Any) -> Answer:
        answer = run_engine(tmp_path, checkpoint(model), rounds, switch, **{**ARGUMENTS, **arguments})
        assert len(answer.rounds) == len(rounds), answer.log[-3000:]
        assert (SERVES in answer.log) == (switch != "0"), answer.log[-3000:]
        return answer

    return run


@pytest.mark.parametrize(
    ("model", "own", "page"),
    [
        ("llama", "triton", 1),
        ("llama", "triton", 64),
        ("qwen3", "triton", 16),
        ("mistral", "triton", 16),
        ("gemma2", "triton", 16),
        ("gemma3", "triton", 64),
        ("gpt-oss", "triton", 64),
        ("gpt-oss", "fa3", 64),
        ("deepseek-v2-wide", "triton", 64),
    ],
)
def test_engines_give_the_same_tokens(engine: Run, model: str, own: str, page: int) -> None:
    if own == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 serves SM 9.0")
    # another kernel for experts needs a package that few have
    more = {"moe_runner_backend": "triton"} if model == "gpt-oss" else {}
    theirs = engine(model, "0", attention_backend=own, page_size=page, **more)
    for graphs in (True, False):
        ours = engine(
            model, "require", attention_backend="triton", page_size=page, disable_cuda_graph=not graphs, **more
        )
        same_up_to_ties(ours, theirs, TOLERANCE["bfloat16"])


def test_an_fp8_cache(engine: Run) -> None:
    arguments = {"page_size": 16, "kv_cache_dtype": "fp8_e5m2", "attention_backend": "triton"}
    theirs = engine("llama", "0", **arguments)
    same_up_to_ties(engine("llama", "require", **arguments), theirs, 2 * TOLERANCE["bfloat16"])
