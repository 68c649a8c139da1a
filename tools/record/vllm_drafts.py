"""Builds the draft of a run with vLLM's own code, on a simulated machine."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock


def build_draft(config: Any, target: Any) -> int:
    """Build the draft model, if there is one, by the class that vLLM's model runner has for it.

    target: the model that was built. Returns the version of the model runner; 0 without a draft model.
    """
    speculative = config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return 0
    runner = 2 if second_runner(config) else 1
    built: list[Any] = []
    with _building(built):
        try:
            if runner == 2:
                _load_draft_of_runner_2(config, target)
            else:
                _proposer(config)._get_model()
        # what follows, such as sharing weights with the target, may fail on torch's meta device
        except Exception:
            if not built:
                raise
    return runner


def second_runner(config: Any) -> bool:
    """Whether vLLM takes its second model runner for a run; before 0.22 no config asks for it."""
    return getattr(config, "use_v2_model_runner", False)


def _load_draft_of_runner_2(config: Any, target: Any) -> None:
    import torch
    from vllm.v1.worker.gpu.spec_decode import init_speculator

    # before 0.31 it has no third argument, the state of requests
    given = (config, torch.device("meta"), None)[: len(inspect.signature(init_speculator).parameters)]
    speculator = init_speculator(*given)
    speculator.load_draft_model(target, set(config.compilation_config.static_forward_context))


def _proposer(config: Any) -> Any:
    """The proposer of the first model runner, with the attributes that building its model reads."""
    speculative = config.speculative_config
    name = {"draft_model": "draft_model.DraftModelProposer", "dflash": "dflash.DFlashProposer"}.get(
        speculative.method, "eagle.EagleProposer"
    )
    for method, module in (
        ("use_gemma4_mtp", "gemma4.Gemma4Proposer"),
        ("use_step3p5_mtp", "step3p5.Step3p5MTPProposer"),
    ):
        if getattr(speculative, method, bool)():
            name = module
    module, _, class_ = name.partition(".")
    proposer = object.__new__(getattr(importlib.import_module(f"vllm.v1.spec_decode.{module}"), class_))
    proposer.speculative_config, proposer.vllm_config = speculative, config
    proposer.draft_model_config = speculative.draft_model_config
    if speculative.method == "dflash":
        dflash: Any = importlib.import_module("vllm.model_executor.models.qwen3_dflash")
        hf_config = speculative.draft_model_config.hf_config
        # before 0.26 the class itself reads the one field; in 0.22 nothing does
        field = (getattr(hf_config, "dflash_config", None) or {}).get("causal", False)
        rule = getattr(dflash, "dflash_has_any_non_causal", None)
        proposer.dflash_causal = field if rule is None else not rule(hf_config)
    return proposer


@contextlib.contextmanager
def _building(built: list[Any]) -> Iterator[None]:
    """Let vLLM's function that loads a model build it alone, wherever vLLM has imported the function."""
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.model_loader.utils import initialize_model

    def build(*, vllm_config: Any, model_config: Any = None, prefix: str = "", **others: Any) -> Any:
        from vllm.config import set_current_vllm_config

        model_config = model_config or vllm_config.model_config
        with set_current_vllm_config(vllm_config):
            built.append(initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix))
        return built[-1]

    # both have functions that import it when they run
    for name in ("dspark.utils", "eagle.utils", "dflash.utils"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"vllm.v1.worker.gpu.spec_decode.{name}")
    with contextlib.ExitStack() as stack:
        for module in list(sys.modules.values()):
            if vars(module).get("get_model") is get_model:
                stack.enter_context(mock.patch.object(module, "get_model", build))
        yield
