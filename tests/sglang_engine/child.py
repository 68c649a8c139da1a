"""Runs one engine of SGLang on a processor: python child.py JOB OUT. JOB has its arguments and what it is asked."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> dict[str, Any]:
    import sglang

    engine = sglang.Engine(
        model_path=job["model"], skip_tokenizer_init=True, random_seed=7, log_level="info", **job["arguments"]
    )
    try:
        return {"version": sglang.__version__, "rounds": [ask(engine, one) for one in job["rounds"]]}
    finally:
        engine.shutdown()


def ask(engine: Any, round_: dict[str, Any]) -> list[Any]:
    """The tokens of each request of a round, how many of its tokens the prefix cache had, and why it ended.

    With ``top`` also the log probabilities of so many of the likeliest tokens at each position, as [value, token].
    """
    parameters = {"temperature": 0, "ignore_eos": True, "max_new_tokens": round_["new"]}
    if round_.get("abort"):
        answers = engine.loop.run_until_complete(_with_aborts(engine, round_, parameters))
    else:
        top = round_.get("top", 0)
        answers = engine.generate(
            input_ids=round_["prompts"], sampling_params=parameters, return_logprob=bool(top), top_logprobs_num=top
        )
    return [
        [
            one["output_ids"],
            one["meta_info"]["cached_tokens"],
            one["meta_info"]["finish_reason"]["type"],
            [[pair[:2] for pair in pairs] for pairs in one["meta_info"].get("output_top_logprobs") or ()],
        ]
        for one in answers
    ]


async def _with_aborts(engine: Any, round_: dict[str, Any], parameters: dict[str, Any]) -> list[Any]:
    """All requests at once; those of ``abort`` are taken back when they have some tokens."""

    async def one(number: int, prompt: list[int]) -> Any:
        # SGLang takes back every request whose name begins with the given one
        rid = f"request-{number:04}"
        last: Any = None
        async for part in await engine.async_generate(
            input_ids=prompt, sampling_params=parameters, stream=True, rid=rid
        ):
            last = part
            if number in round_["abort"] and len(part["output_ids"]) >= 3:
                engine.tokenizer_manager.abort_request(rid=rid)
        return last

    return [*await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(round_["prompts"])))]


if __name__ == "__main__":
    # without SGLang's own child processes, which begin at this module
    found = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(found))
