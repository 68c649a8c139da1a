"""attnreg's kernels in the whole engine of SGLang on a GPU, beside SGLang's own: as near transformers in float32.

Each case runs an engine with a backend of SGLang's, and with attnreg's in the place of ``triton``: with CUDA graphs
and without. Over random weights many tokens are almost equally likely, so engines that round differently choose
different ones. So each engine is compared, over the tokens that it chose, with transformers' eager attention in
float32. SGLang is whatever `import sglang` finds; `make test-sglang-gpu` runs this.
"""

from __future__ import annotations

import importlib.util
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import torch
from sglang_checkpoints import log_probabilities
from sglang_process import Answer, checkpoints_in, run_engine
from torch import Tensor

NEW, TOP = 48, 8
LOG = logging.getLogger(__name__)
# the log probabilities of bfloat16 may be off by this much
TOLERANCE = 7e-2
# a level of the errors, and by how much ours may be larger there: samples of few positions vary more
LEVELS = {0.5: 1.1, 0.9: 1.25, 0.99: 1.5}
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


class Nearness(NamedTuple):
    """How far an engine is from transformers' eager attention in float32, over the same tokens.

    errors: of each log probability that the engine gives. regrets: by how much another token is likelier than the one
    that it chose.
    """

    errors: Tensor
    regrets: Tensor

    @classmethod
    def of(cls, answer: Answer, rounds: list[dict[str, Any]], reference: Callable[[list[int], int], Tensor]) -> Self:
        errors, regrets = [], []
        for asked, answered in zip(rounds, answer.rounds, strict=True):
            for prompt, (tokens, _, _, top) in zip(asked["prompts"], answered, strict=True):
                assert len(tokens) == len(top) == NEW
                known = reference(prompt + tokens, NEW)
                given = torch.tensor(top, dtype=torch.float64)  # [NEW, TOP, 2]: a log probability, and its token
                errors.append((known.gather(1, given[..., 1].long()) - given[..., 0]).abs().flatten())
                regrets.append(known.amax(1) - known.gather(1, torch.tensor(tokens)[:, None])[:, 0])
        return cls(torch.cat(errors), torch.cat(regrets))

    def __str__(self) -> str:
        levels = ", ".join(f"{self.errors.quantile(level):.4f}" for level in LEVELS)
        return f"errors {levels}, at most {self.errors.max():.4f}; regret at most {self.regrets.max():.4f}"


def is_as_near(ours: Nearness, theirs: Nearness, tolerance: float, exact: bool) -> None:
    """Ours is as near as theirs at each level, and within the tolerance.

    exact: no position is further. Where experts are chosen, or caches are rounded to 8 bits, rounding of 16 bits may
    decide between two experts or two values, and single positions are far off in every engine.
    """
    for level, factor in LEVELS.items():
        assert ours.errors.quantile(level) <= factor * theirs.errors.quantile(level) + 1e-3, (str(ours), str(theirs))
    assert ours.errors.quantile(0.5) <= tolerance / 2, str(ours)
    assert ours.regrets.mean() <= 1.5 * theirs.regrets.mean() + 1e-3, (str(ours), str(theirs))
    if exact:
        assert max(ours.errors.max(), ours.regrets.max()) <= tolerance, str(ours)


# prompts are longer than a chunk; the graphs of a decode have room for requests that are not there
ARGUMENTS: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "mem_fraction_static": 0.5, "max_total_tokens": 65536,
    "chunked_prefill_size": 512, "disable_overlap_schedule": False, "disable_cuda_graph": False,
    "cuda_graph_bs_decode": [1, 6, 16, 64], "cuda_graph_bs_prefill": [64, 256, 512],
}  # fmt: skip
Run = Callable[..., Nearness]


@pytest.fixture
def engine(tmp_path: Path, checkpoint: Callable[[str], Path], rounds: list[dict[str, Any]]) -> Callable[..., Run]:
    """Of a model, and changes of transformers' configuration: runs an engine with a value of $ATTNREG_SGLANG."""

    def of(model: str, **changes: Any) -> Run:
        reference = log_probabilities(checkpoint(model), "cuda", **changes)

        def run(switch: str, **arguments: Any) -> Nearness:
            answer = run_engine(tmp_path, checkpoint(model), rounds, switch, **{**ARGUMENTS, **arguments})
            assert len(answer.rounds) == len(rounds), answer.log[-3000:]
            assert (SERVES in answer.log) == (switch != "0"), answer.log[-3000:]
            found = Nearness.of(answer, rounds, reference)
            LOG.info("%s %s %s: %s", model, switch, arguments, found)
            return found

        return run

    return of


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
def test_engines_are_as_near(engine: Callable[..., Run], model: str, own: str, page: int) -> None:
    if own == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("fa3 serves SM 9.0")
    # another kernel for experts needs a package that few have
    more = {"moe_runner_backend": "triton"} if model == "gpt-oss" else {}
    # SGLang's class of the model leaves the window out
    run = engine(model, **({"sliding_window": None} if model == "mistral" else {}))
    theirs = run("0", attention_backend=own, page_size=page, **more)
    for graphs in (True, False):
        ours = run("require", attention_backend="triton", page_size=page, disable_cuda_graph=not graphs, **more)
        is_as_near(ours, theirs, TOLERANCE, exact=model != "gpt-oss")


def test_an_fp8_cache(engine: Callable[..., Run]) -> None:
    arguments = {"page_size": 16, "kv_cache_dtype": "fp8_e5m2", "attention_backend": "triton"}
    run = engine("llama")
    # two bits of a fraction: what transformers computes has none of this rounding
    is_as_near(run("require", **arguments), run("0", **arguments), 0.4, exact=False)


@pytest.mark.parametrize(("topk", "drafts"), [(1, 4), (4, 8)])
def test_drafts_are_verified(
    engine: Callable[..., Run], checkpoint: Callable[[str], Path], topk: int, drafts: int
) -> None:
    """A model drafts for itself, in a chain and in a tree: most drafts are right, lesser branches wrong."""
    run = engine("llama")
    arguments = {
        "page_size": 1, "speculative_algorithm": "STANDALONE", "speculative_num_steps": 3,
        "speculative_draft_model_path": str(checkpoint("llama")), "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": drafts, "speculative_draft_attention_backend": "triton",
    }  # fmt: skip
    theirs = run("0", attention_backend="triton", **arguments)
    is_as_near(run("1", attention_backend="attnreg", **arguments), theirs, TOLERANCE, exact=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("model", ["llama", "gemma3", "deepseek-v2-wide"])
def test_two_ranks(engine: Callable[..., Run], model: str) -> None:
    run = engine(model)
    arguments = {"attention_backend": "triton", "page_size": 64, "tp_size": 2, "disable_custom_all_reduce": True}
    is_as_near(run("require", **arguments), run("0", **arguments), TOLERANCE, exact=True)
