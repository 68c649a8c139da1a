"""One run of the whole engine in a process of its own: python child.py SPEC.json RESULT.json

The spec names the model's folder, the engine's options, the prompts and the sampling; the result has the tokens, the
log probabilities, the backend of each layer, vLLM's own counts (of preemptions, of drafts that were accepted, ...) and
the Triton kernels that were compiled. What it does is printed as it goes, with the seconds since it began; on SIGUSR1
it prints where its thread stands, for whoever stops it.
"""

from __future__ import annotations

import collections
import faulthandler
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
BEGAN = time.monotonic()


def say(text: str) -> None:
    sys.stdout.write(f"[{time.monotonic() - BEGAN:5.1f} s] {text}\n")
    sys.stdout.flush()


def watch_compiler() -> dict[str, list[float]]:
    """From now on, the seconds that each compilation of a Triton kernel in this process takes, by the kernel's name."""
    from triton import knobs

    spent: dict[str, list[float]] = collections.defaultdict(list)

    def compiled(*, src: Any, metadata: Any, times: Any, cache_hit: bool, **others: Any) -> None:
        name = metadata["name"] if isinstance(metadata, dict) else str(getattr(metadata, "name", src))
        seconds = times.total / 1e6
        spent[f"{name} (cached)" if cache_hit else name].append(round(seconds, 2))
        if not cache_hit and seconds > 1:
            say(f"compiled {name} in {seconds:.1f} s")

    knobs.compilation.listener = compiled
    return spent


def take_queries_as_they_are() -> None:
    """Has vLLM's Triton kernel take queries in the model's dtype over an fp8 cache, as it does on some AMD GPUs."""
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    made = TritonAttentionImpl.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.supports_quant_query_input = False

    TritonAttentionImpl.__init__ = init


def backends(worker: Any) -> dict[str, str]:
    """The class of the backend of each layer, as the model runner of this worker has it."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(worker.vllm_config, AttentionLayerBase)
    found = {name: layer.get_attn_backend() for name, layer in layers.items()}
    # vLLM derives classes of its own from a backend, for cross attention and for encoders
    return {
        name: " ".join(f"{c.__module__}.{c.__qualname__}" for c in backend.__mro__) for name, backend in found.items()
    }


def outputs(worker: Any) -> list[str]:
    """The dtypes that the layers of attnreg's backend write."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(worker.vllm_config, AttentionLayerBase).values()
    made = [getattr(getattr(layer, "impl", None), "_layer", None) for layer in layers]
    return sorted({str(layer.spec.output_dtype) for layer in made if layer is not None})


def prompts(spec: dict[str, Any]) -> list[Any]:
    """Token ids, drawn anew for each request from a seed; the first `shared` of them are the same for all."""
    draw = random.Random(spec.get("seed", 0))
    shared = [draw.randrange(3, 1000) for _ in range(spec.get("shared", 0))]
    found: list[Any] = []
    for length in spec["lengths"]:
        ids = shared + [draw.randrange(3, 1000) for _ in range(length - len(shared))]
        found.append({"prompt_token_ids": ids})
    if spec.get("audio"):
        import numpy as np

        tone = [np.sin(np.arange(16000 * 2) * (0.01 + 0.003 * i)).astype("float32") for i in range(len(found))]
        return [
            {
                "encoder_prompt": {"prompt_token_ids": [], "multi_modal_data": {"audio": (tone[i], 16000)}},
                "decoder_prompt": prompt,
            }
            for i, prompt in enumerate(found)
        ]
    return found


def main(spec_file: str, result_file: str) -> None:
    spec = json.loads(Path(spec_file).read_text())
    # nothing that prints stacks by the clock: Python crashes if a thread that compiles is seen in the middle of a frame
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    say(f"{Path(spec['model']).name}, {spec['engine']}")
    from vllm import LLM, SamplingParams

    compiled = watch_compiler()
    if spec["engine"].get("kv_cache_dtype"):
        take_queries_as_they_are()
    say("vLLM is imported")
    llm = LLM(model=spec["model"], disable_log_stats=False, **spec["engine"])
    say(f"the engine has started; kernels compiled: {totals(compiled)}")
    sampling = SamplingParams(
        temperature=0, max_tokens=spec["max_tokens"], logprobs=5, detokenize=False, ignore_eos=True
    )
    requests: list[dict[str, Any]] = []
    # more than once where what the first round left in the cache is to be used by the second
    for number in range(spec.get("rounds", 1)):
        for output in llm.generate(prompts(spec), sampling, use_tqdm=False):
            one = output.outputs[0]
            scores = [{str(token): value.logprob for token, value in step.items()} for step in one.logprobs or []]
            requests.append(
                {"tokens": list(one.token_ids), "logprobs": scores, "cached": output.num_cached_tokens or 0}
            )
        say(f"round {number} is done; kernels compiled: {totals(compiled)}")
    for request in requests[:8]:
        say(f"tokens {request['tokens'][:12]} ...")
    result = {
        "requests": requests,
        "backends": llm.collective_rpc(backends)[0],
        "outputs": llm.collective_rpc(outputs)[0],
        "counts": {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")},
        "compiled": compiled,
    }
    Path(result_file).write_text(json.dumps(result))
    say("the result is written")


def totals(compiled: dict[str, list[float]]) -> str:
    """How many variants of each kernel, and the seconds that they took."""
    return ", ".join(f"{name} {len(spent)} in {sum(spent):.1f} s" for name, spent in sorted(compiled.items())) or "none"


if __name__ == "__main__":
    main(*sys.argv[1:])
