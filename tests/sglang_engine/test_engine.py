"""attnreg's kernels in the whole engine of SGLang on a processor: the tokens of transformers' own attention.

The scheduler, the radix tree, the pools and the sampler are SGLang's. The checkpoints are in float32, so that tokens
are equal and not only likely.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sglang_checkpoints import greedy
from sglang_process import Engine, environment

NEW = 16
Checkpoint = Callable[[str], Path]
SERVES = "attnreg: its kernels serve the layers of this run, over pages of"


@pytest.fixture(scope="session")
def expected(checkpoint: Checkpoint, prompts: list[list[int]]) -> Callable[[str], list[list[int]]]:
    """The tokens that transformers gives a model's prompts."""
    return cache(lambda model: greedy(checkpoint(model), prompts, NEW))


def two_rounds(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """The first two prompts, then all: the second round finds prefixes of the first."""
    return [{"prompts": prompts[:2], "new": NEW}, {"prompts": prompts, "new": NEW}]


def test_the_record_is_that_of_this_release() -> None:
    code = "from attnreg.integrations.sglang.record import moved_interfaces; print(moved_interfaces())"
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment("0"), capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == "[]"


def test_models_whose_images_see_each_other_are_known_by_this_method() -> None:
    """The backend refuses a model that has it."""
    code = (
        "from sglang.srt.models.gemma3_mm import Gemma3ForConditionalGeneration as g3\n"
        "from sglang.srt.models.gemma4_mm import Gemma4ForConditionalGeneration as g4\n"
        "from sglang.srt.models.gemma3_causal import Gemma3ForCausalLM as text\n"
        "print([hasattr(c, 'prepare_attn_masks') for c in (g3, g4, text)])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment("0"), capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == "[True, True, False]"


@pytest.mark.parametrize(
    ("model", "page"),
    [
        ("llama", 1),
        ("llama", 16),
        ("llama", 64),
        ("qwen3", 16),
        ("gemma2", 16),
        ("gemma3", 1),
        ("gemma3", 16),
        ("deepseek-v2", 16),
        ("deepseek-v2", 64),
        ("deepseek-v3", 1),
    ],
)
def test_models_have_the_tokens_of_transformers(
    engine: Engine, expected: Callable[[str], list[list[int]]], prompts: list[list[int]], model: str, page: int
) -> None:
    answer = engine(model, two_rounds(prompts), page_size=page)
    assert f"{SERVES} {page}" in answer.log
    assert answer.tokens(0) == expected(model)[:2]
    assert answer.tokens(1) == expected(model)
    # of the second round's prompts, four begin as one of the first round's
    assert all(hit >= 150 // page * page - page for hit in answer.cached(1)[:4])
    assert answer.cached(1)[4:] == [0, 0]


def test_gpt_oss_through_the_name_that_sglang_allows(
    engine: Engine, expected: Callable[[str], list[list[int]]], prompts: list[list[int]]
) -> None:
    answer = engine("gpt-oss", two_rounds(prompts), "require", attention_backend="triton", page_size=16)
    assert f"{SERVES} 16" in answer.log
    assert answer.tokens(1) == expected("gpt-oss")


def test_the_numbers_of_a_layer_matter(
    checkpoint: Checkpoint, expected: Callable[[str], list[list[int]]], prompts: list[list[int]]
) -> None:
    """The tokens that engines are held against are others without a softcap, a window or sinks."""
    for model, changes in {
        "gemma2": {"attn_logit_softcapping": None},
        "mistral": {"sliding_window": None},
        "gemma3": {"sliding_window": 2048},
        "gpt-oss": {"sinks": False},
    }.items():
        assert greedy(checkpoint(model), prompts, NEW, **changes) != expected(model), model


def test_torch_native_computes_gemma_2_without_its_softcap(
    engine: Engine, checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    """A fault of SGLang's own, which `attnreg check` finds in its table."""
    answer = engine("gemma2", [{"prompts": prompts, "new": NEW}], "0", attention_backend="torch_native")
    assert answer.tokens(0) == greedy(checkpoint("gemma2"), prompts, NEW, attn_logit_softcapping=None)


def test_sglang_computes_mistral_without_its_window(
    engine: Engine, checkpoint: Checkpoint, prompts: list[list[int]]
) -> None:
    """A fault of SGLang's own: its class of the model passes no window to the layers, so no backend gets one."""
    answer = engine("mistral", two_rounds(prompts), page_size=1)
    assert answer.tokens(1) == greedy(checkpoint("mistral"), prompts, NEW, sliding_window=None)


def test_chunked_prompts(engine: Engine, expected: Callable[[str], list[list[int]]], prompts: list[list[int]]) -> None:
    rounds = [{"prompts": prompts, "new": NEW}]
    answer = engine("gemma3", rounds, page_size=16, chunked_prefill_size=64, enable_mixed_chunk=True)
    assert answer.tokens(0) == expected("gemma3")


def test_a_scheduler_that_runs_ahead(
    engine: Engine, expected: Callable[[str], list[list[int]]], prompts: list[list[int]]
) -> None:
    answer = engine("llama", two_rounds(prompts), page_size=16, disable_overlap_schedule=False)
    assert answer.tokens(1) == expected("llama")


@pytest.mark.parametrize("breadth", [1, 4])
def test_drafts_of_ngram_are_verified(
    engine: Engine,
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    breadth: int,
) -> None:
    """Drafts are what the same prompts gave before, in a chain or in a tree; the last round accepts most of them."""
    # SGLang's other way to move accepted keys is an operation of sgl_kernel
    monkeypatch.setenv("SGLANG_NATIVE_MOVE_KV_CACHE", "1")
    new, some = 48, prompts[1:5]
    drafts = {
        "speculative_num_draft_tokens": 5, "speculative_ngram_max_bfs_breadth": breadth, "decode_log_interval": 8,
    }  # fmt: skip
    rounds = [{"prompts": some, "new": new}] * 3
    answer = engine("llama", rounds, page_size=1, speculative_algorithm="NGRAM", **drafts)
    exact = greedy(checkpoint("llama"), some, new)
    assert [answer.tokens(i) for i in range(3)] == [exact] * 3
    accepted = [float(x) for x in re.findall(r"accept len: ([0-9.]+)", answer.log)]
    # a verification that accepts no draft gives 1
    assert max(accepted) > 1.5


def test_many_requests_some_taken_back_and_some_put_off(
    engine: Engine, checkpoint: Checkpoint, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 requests over a small pool, some of them aborted; SGLang's own switch retracts some again and again."""
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    monkeypatch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "5")
    many = [[3 + i % 50, 60 + i, *prompts[2][: 5 + i % 40]] for i in range(200)]
    abort = [*range(0, 200, 9)]
    answer = engine("llama", [{"prompts": many, "new": 12, "abort": abort}], page_size=1, max_total_tokens=2048)
    for i, (tokens, _, reason, _) in enumerate(answer.rounds[0]):
        assert reason == ("abort" if i in abort else "length")
        assert len(tokens) == 12 or (i in abort and 3 <= len(tokens) < 12)
    # what retraction or an abort would spoil shows in any of them; these take seconds in transformers
    some = range(0, 200, 4)
    exact = greedy(checkpoint("llama"), [many[i] for i in some], 12)
    for i, expected in zip(some, exact, strict=True):
        found = answer.rounds[0][i][0]
        assert found == expected[: len(found)], i
    assert "#retracted_reqs" in answer.log


def test_what_is_not_served_goes_to_sglangs_own_or_is_an_error(engine: Engine, prompts: list[list[int]]) -> None:
    """Heads of 576 are outside of the registry's claims."""
    answer = engine("wide", [{"prompts": prompts[:1], "new": 2}])
    assert not answer.rounds
    assert "does not serve this run: layers 0, 1: head_size is 576; supported: 32 to 512" in answer.log
