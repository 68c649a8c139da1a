"""Stands for an H200 on a machine without one: tensors without memory, and launches that end before the driver's call.

The paths of Python are those of a GPU, the calls into the driver are left out: it is for comparing checkouts, not for
figures of a GPU.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
import triton  # type: ignore[import-untyped]

from attnreg import Platform
from attnreg.kernels.hopper import attention, decode_plans
from attnreg.kernels.hopper.latents import plans as latent_plans
from attnreg.kernels.hopper.prompts import plans as prompt_plans
from attnreg.kernels.triton import cache, plans
from attnreg.kernels.triton.launch import KernelVariant
from attnreg.kernels.triton.target import target_for
from attnreg.runtime import ops
from attnreg.runtime.states import memory

# tensors of this device have no memory to read, so planning takes the paths of a GPU's tensors
DEVICE = "meta"
PLATFORM = Platform(platform="cuda", arch="sm90")


class CudaLauncher:
    """What `attnreg.kernels.triton.inside.launcher.starter` reads of Triton's class of this name."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False
    arg_annotations: tuple[Any, ...] = ()
    kernel_signature = b""

    @staticmethod
    def launch(*arguments: Any) -> None:
        """The call that hands a launch to the driver."""


def install() -> None:
    """Puts the stand-ins in their places, for the rest of the process."""
    target = target_for("cuda", 90, 132)
    for module, name in (
        (plans, "target_of"), (cache, "target_of"), (decode_plans, "target_of"), (prompt_plans, "target_of"),
        (attention, "require"), (latent_plans, "require"),
    ):  # fmt: skip
        setattr(module, name, lambda device: target)
    # all begin at address 0; a cache that is made for each call is in another place each time
    memory.share_memory = lambda x, y, *, may_be_alias: False
    strides, places = latent_plans.cache_strides, itertools.cycle(range(0, 1 << 26, 1 << 10))
    latent_plans.cache_strides = lambda cache, *, tokens_first: strides(cache, tokens_first=tokens_first)._replace(
        address=next(places)
    )
    compiled = SimpleNamespace(run=CudaLauncher(), function=1, packed_metadata=())

    def compile_nothing(variant: KernelVariant, key: Any, facts: Any, grid: Any, values: Any) -> None:
        variant._compiled[key, facts] = compiled, tuple(variant.code.constants(key).values())

    KernelVariant.compile = compile_nothing  # type: ignore[assignment, method-assign]
    stream = SimpleNamespace(get_current_stream=lambda device: 0)
    triton.runtime.driver.set_active(stream)
    for name in ("kv_cache_update", "attention_with_output", "kv_cache_update_and_attention"):
        # for tensors without memory the ops have nothing to do otherwise
        if function := getattr(ops, f"_{name}", None):
            ops._library.impl(f"unified_{name}", function, "Meta", allow_override=True)
    _quick()
    _transformers()
    # attnreg tells tensors without memory apart, and PyTorch knows no autocast of theirs
    torch.Tensor.is_meta = False
    torch.is_autocast_enabled = lambda *device: False


def _quick() -> None:
    """Puts quick functions in the place of those that are written in Python for tensors without memory.

    They take several times as long as of a GPU's tensors.
    """
    split, new_empty, cat = torch.Tensor.unsafe_split_with_sizes, torch.Tensor.new_empty, torch.cat

    def quick_split(whole: torch.Tensor, sizes: list[int]) -> Any:
        return (
            [torch.empty(n, dtype=whole.dtype, device=DEVICE) for n in sizes] if whole.is_meta else split(whole, sizes)
        )

    def quick_empty(like: torch.Tensor, *size: Any, **types: Any) -> torch.Tensor:
        if like.device.type != DEVICE:
            return new_empty(like, *size, **types)
        return torch.empty(*size, device=DEVICE, **{"dtype": like.dtype, **types})

    def quick_product(x: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.empty(*x.shape[:2], y.shape[2], dtype=x.dtype, device=DEVICE) if out is None else out

    def quick_cat(tensors: Any, dim: int = 0, *, out: torch.Tensor | None = None) -> torch.Tensor:
        return cat(tensors, dim) if out is None else out

    torch.Tensor.unsafe_split_with_sizes, torch.Tensor.new_empty = quick_split, quick_empty  # type: ignore[assignment]
    torch.bmm, torch.cat = quick_product, quick_cat  # type: ignore[assignment]


def _transformers() -> None:
    """Registers attnreg, and leaves out what tensors without memory cannot tell: whether a mask hides nothing.

    PyTorch's attention is left out as launches are: its choice of a kernel and its driver's calls.
    """
    from transformers import masking_utils

    import attnreg.integrations.transformers as transformers_attention
    from attnreg.integrations import tensors
    from attnreg.integrations.transformers.host_copies import Fetched
    from attnreg.integrations.transformers.latent import modules
    from attnreg.runtime import arguments

    def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> torch.Tensor:
        size, heads, queries, _ = query.shape
        return torch.empty(size, queries, heads, value.shape[3], dtype=query.dtype, device=DEVICE).transpose(1, 2)

    # true, and a position in a static cache
    yes: Any = torch.tensor(4096)
    places: Any = arguments, masking_utils, torch.Tensor, Fetched, torch.nn.functional, modules, tensors
    names = "validate_device", "fast_all", "all", "get", "scaled_dot_product_attention", "_is_product", "has_memory"
    answers: Any = (
        lambda platform: None, lambda told: yes, lambda told: yes, lambda fetched: yes, attended, lambda *given: True,
        lambda tensor: True,
    )  # fmt: skip
    for place, name, answer in zip(places, names, answers, strict=True):
        setattr(place, name, answer)
    transformers_attention.register(platform=PLATFORM)
