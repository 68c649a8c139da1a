"""An engine of SGLang in a process of its own, and what it answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# what SGLang imports, and a processor does not need
ABSENT = "torchvision,torchaudio,torchcodec,sentencepiece,sgl_kernel"
MINUTES = 8


class Answer(NamedTuple):
    """What an engine gave: the rounds' answers, and its log."""

    rounds: list[list[list[Any]]]
    log: str

    def tokens(self, number: int) -> list[list[int]]:
        """The tokens of each request of a round."""
        return [one[0] for one in self.rounds[number]]

    def cached(self, number: int) -> list[int]:
        """How many tokens of each request of a round the prefix cache had."""
        return [one[1] for one in self.rounds[number]]


Engine = Callable[..., Answer]


def checkpoints_in(folder: Path, dtype: str = "float32") -> Callable[[str], Path]:
    """The folder of each model's checkpoint, by the model's name. It is written where it is first asked for."""

    def of(name: str) -> Path:
        # transformers takes seconds, which machines without a GPU need not wait
        from sglang_checkpoints import save

        found = folder / name
        if not found.exists():
            found.mkdir()
            save(name, found, dtype)
        return found

    return of


def environment(switch: str, *, gpu: bool = False) -> dict[str, str]:
    """The variables of a process of SGLang's, with a value of $ATTNREG_SGLANG. gpu: nothing of SGLang's is absent."""
    path = [ROOT] if gpu else [HERE / "absent", ROOT]
    processor = {} if gpu else {"SGLANG_USE_CPU_ENGINE": "1", "ABSENT_PACKAGES": ABSENT}
    paths = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    others = {"ATTNREG_SGLANG": switch, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **processor, **others}


def run_engine(folder: Path, checkpoint: Path, rounds: list[dict[str, Any]], switch: str, **arguments: Any) -> Answer:
    """Runs an engine over a checkpoint; a process that fails has answered no round. folder: for its files."""
    defaults = {
        "attention_backend": "attnreg",
        "device": "cpu",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.5,
        "dtype": "float32",
        "max_total_tokens": 8192,
        "disable_overlap_schedule": True,
    }
    job, out, log = folder / "job.json", folder / "out.json", folder / "log.txt"
    out.unlink(missing_ok=True)
    chosen = {**defaults, **arguments}
    job.write_text(json.dumps({"model": str(checkpoint), "arguments": chosen, "rounds": rounds}))
    command = [sys.executable, str(HERE / "child.py"), str(job), str(out)]
    with log.open("w") as file:
        subprocess.run(
            command,
            env=environment(switch, gpu=chosen["device"] != "cpu"),
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=60 * MINUTES,
            check=False,
        )
    said = log.read_text(errors="replace")
    return Answer(json.loads(out.read_text())["rounds"] if out.exists() else [], said)
