"""The generated blocks of attnreg's output inside an engine: a model's report in transformers, and vLLM's log."""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path

from rich.console import Console

from attnreg.explain import Question, render
from attnreg.explain.answers import Answer, Explanation, Verdict, title_of
from attnreg.loader import load_registry
from attnreg.platforms import Platform
from attnreg.registry import Registry
from attnreg.request import AttentionRequest
from attnreg.selection.selector import evaluate
from attnreg.selection.trace import answer_sentence
from attnreg.selection.wording import request_words

WIDTH = 86
# the layers of a small Llama, and a fixed machine: the page must not depend on the machine that writes it
_LLAMA = AttentionRequest(head_size=64, num_heads=4, num_kv_heads=2, dtype="float32")
_MACHINE = Platform(platform="cpu", arch="x86_64_amx", packages=(("torch", "2.13.0"), ("triton", "3.7.1")))
# layers of gpt-oss with a draft, as vLLM asks for them
_SERVED = (
    AttentionRequest(head_size=64, features=frozenset({"sinks"})),
    AttentionRequest(head_size=64, features=frozenset({"sinks", "sliding_window"})),
    AttentionRequest(head_size=64, role="draft"),
)
_OVERLAY = re.compile(r"^```yaml\n(extends: vllm-[^\n]*\n.*?)^```$", re.DOTALL | re.MULTILINE)


def report_block(registry: Registry) -> dict[str, str]:
    """The block of docs/transformers.md: the output of `explanation(model)` after a run."""
    label = " · ".join([*request_words(_LLAMA), "24 calls"])
    answer = Answer(Question(_LLAMA, label, "layers 0–1"), (Verdict((evaluate(_LLAMA, _MACHINE, registry),)),))
    title = title_of([_MACHINE], registry, "LlamaForCausalLM", here=True, installed=True)
    console = Console(width=WIDTH, file=io.StringIO(), color_system=None, highlight=False, _environ={})
    with console.capture() as capture:
        render(Explanation(registry, title, (answer,), ()), console)
    lines = [line.rstrip() for line in capture.get().strip().split("\n")]
    return {"report": "\n".join(["```text", *lines, "```"])}


def log_block(page: str) -> dict[str, str]:
    """The block of docs/vllm.md: the log with the page's overlay. Raises ValueError if the page shows no overlay."""
    example = _OVERLAY.search(page)
    if example is None:
        raise ValueError("docs/vllm.md shows no overlay of vLLM's registry")
    with tempfile.TemporaryDirectory() as folder:
        overlay = Path(folder, "attention.yaml")
        overlay.write_text(example[1], encoding="utf-8")
        registry = load_registry(overlay)
    platform = Platform(platform="cuda", arch="sm90")
    decides = "decides which attention backends are chosen automatically (ATTNREG_VLLM=attention.yaml)"
    answers = [answer_sentence(evaluate(request, platform, registry)) for request in _SERVED]
    lines = [f"attnreg: {line}" for line in (f"{registry.title} {decides}", *answers)]
    return {"log": "\n".join(["```text", *lines, "```"])}
