"""The process of an engine core, up to the place where it would take a GPU: python core_process.py ARCH < CONFIG

The configuration arrives pickled, as vLLM sends it to the process that it starts; the core loads its plug-ins by their
entry points, and makes its executor. This one asks for the backends of two layers, prints them, and goes no further.
"""

from __future__ import annotations

import pickle
import sys
from contextlib import ExitStack
from typing import Any
from unittest import mock

import engine

# this environment has none
PACKAGES = {"torch": "2.11", "triton": "3.6.0"}
WITH_TRITON = {
    "kernels.why_unusable": "", "claims.installed_packages": PACKAGES, "decider.installed_packages": PACKAGES,
}  # fmt: skip


class Made(Exception):  # noqa: N818
    """Raised where the executor is made."""


def main(arch: str) -> None:
    engine.boot(arch)
    # before the plug-ins are loaded
    config = pickle.load(sys.stdin.buffer)
    from vllm.logger import configure_logging
    from vllm.v1.engine.core import EngineCore

    configure_logging(config.logging_config)

    def executor(config: Any) -> None:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.selector import get_attn_backend

        named = config.attention_config.backend
        for features in ({}, {"has_sink": True}):
            with set_current_vllm_config(config):
                found = get_attn_backend(128, torch.bfloat16, "auto", **features)
            sys.stdout.write(f"{sorted(features)}, named {named and named.name}: {found.get_name()}\n")
        raise Made

    try:
        with ExitStack() as stack:
            for name, answer in WITH_TRITON.items():
                stack.enter_context(mock.patch(f"attnreg.integrations.vllm.{name}", return_value=answer))
            EngineCore(config, executor, log_stats=False)  # type: ignore[arg-type]
    except Made:
        sys.stdout.write("the executor is made\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
