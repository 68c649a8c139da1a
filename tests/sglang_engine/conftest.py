"""Fixtures: checkpoints, and engines of SGLang 0.5.23 on a processor.

Not part of `make test`: SGLang's requirements are many, and nothing else here needs them. `make test-sglang` makes an
environment with them, and runs these tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_checkpoints import VOCABULARY
from sglang_process import Answer, Engine, checkpoints_in, run_engine


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model's checkpoint."""
    return checkpoints_in(tmp_path_factory.getbasetemp())


@pytest.fixture
def engine(tmp_path: Path, checkpoint: Callable[[str], Path]) -> Engine:
    """Runs an engine over a model, and returns what it answers in each round."""

    def run(model: str, rounds: list[dict[str, Any]], switch: str = "1", **arguments: Any) -> Answer:
        return run_engine(tmp_path, checkpoint(model), rounds, switch, **arguments)

    return run


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Prompts with a prefix in common, some longer than a window, and a short one."""
    chance = random.Random(3)
    prefix = [chance.randrange(3, VOCABULARY) for _ in range(150)]
    rest = [[chance.randrange(3, VOCABULARY) for _ in range(n)] for n in (1, 7, 40, 111)]
    return [*(prefix + one for one in rest), [5, 6, 7], rest[3][:20]]
