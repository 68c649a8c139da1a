"""attnreg's kernels in the whole engine of SGLang on a GPU, beside SGLang's own: the same tokens, up to ties.

Each case runs the engine twice: with a backend of SGLang's, and with attnreg's in the place of ``triton``. SGLang is
whatever `import sglang` finds; `make test-sglang-gpu` runs this.
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
    return checkpoints_in(tmp_path_factory.getbasetemp())


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
    assert len(ours.rounds) == len(theirs.rounds) > 0, ours.log[-3000:]
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


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
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
        ("deepseek-v2", "triton", 64),
    ],
)
def test_engines_give_the_same_tokens(
    tmp_path: Path, checkpoint: Callable[[str], Path], rounds: list[dict[str, Any]], model: str, own: str, page: int,
    graphs: bool,
) -> None:  # fmt: skip
    if own == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 serves SM 9.0")
    arguments = {
        "device": "cuda", "dtype": "bfloat16", "page_size": page, "disable_cuda_graph": not graphs,
        "mem_fraction_static": 0.2, "max_total_tokens": 65536, "disable_overlap_schedule": False,
    }  # fmt: skip
    answers = []
    for switch, backend in (("0", own), ("require", "triton")):
        folder = tmp_path / switch
        folder.mkdir()
        answers.append(run_engine(folder, checkpoint(model), rounds, switch, attention_backend=backend, **arguments))
    theirs, ours = answers
    assert SERVES in ours.log, ours.log[-3000:]
    assert SERVES not in theirs.log
    same_up_to_ties(ours, theirs, TOLERANCE["bfloat16"])


def test_an_fp8_cache(tmp_path: Path, checkpoint: Callable[[str], Path], rounds: list[dict[str, Any]]) -> None:
    arguments = {
        "device": "cuda", "dtype": "bfloat16", "page_size": 16, "kv_cache_dtype": "fp8_e5m2",
        "disable_cuda_graph": False, "mem_fraction_static": 0.2, "max_total_tokens": 65536,
        "attention_backend": "triton",
    }  # fmt: skip
    answers = []
    for switch in ("0", "require"):
        folder = tmp_path / switch
        folder.mkdir()
        answers.append(run_engine(folder, checkpoint("llama"), rounds, switch, **arguments))
    same_up_to_ties(answers[1], answers[0], 2 * TOLERANCE["bfloat16"])
