"""A fake driver of an H200: Triton compiles for it, and the launches are recorded instead of run.

It is imported by a process that compiles alone (compiler.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from attnreg.kernels.mla import cache as latent_cache
from attnreg.kernels.mla import plans as latent_plans
from attnreg.kernels.triton import cache, plans
from attnreg.kernels.triton.target import target_for

STREAM = 7


class Driver:
    """The methods that Triton calls of a driver. ``launched``: (kernel, arguments of its launcher) of each launch."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: ("module", f"function {name}", 32, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            unload_module=lambda module: None,
        )

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: self.launched.append((metadata.name, *map(_plain, arguments)))

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def faked() -> Iterator[tuple[Driver, list[str]]]:
    """The fake driver in use, and a text for each kernel that is compiled meanwhile."""
    target = target_for("cuda", 90, 132)
    for module in (plans, cache, latent_plans, latent_cache):
        module.target_of = lambda device: target
    texts: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda **what: texts.append(what["compile"]["specialization_data"])
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    try:
        yield driver, texts
    finally:
        knobs.runtime.jit_post_compile_hook = None
        # Triton looks for a driver anew when it needs one
        triton.runtime.driver.set_active(None)


def decode(key_size: int = 1) -> Any:
    """A spec, a plan for a decode over split keys, and the tensors of its call: query, key, cache."""
    from attnreg.kernels import triton_attn
    from attnreg.runtime.interface import AttentionSpec, BatchMetadata, KVCache

    spec = AttentionSpec(
        num_heads=4, num_kv_heads=key_size, head_size=64, head_size_v=64, dtype=torch.float16, softmax_scale=0.125,
        block_size=16,
    )  # fmt: skip
    batch = BatchMetadata.build(
        [1], [4096], block_table=torch.zeros(1, 256, dtype=torch.int32), slot_mapping=torch.zeros(1).long()
    )
    memory = KVCache(*torch.zeros(2, 256, 16, key_size, 64, dtype=torch.float16))
    query, key = torch.zeros(1, 4, 64, dtype=torch.float16), torch.zeros(1, key_size, 64, dtype=torch.float16)
    return spec, triton_attn.plan(spec, batch), query, key, memory


def launches() -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]], int]:
    """The launches of a decode over split keys, the first and the second time, and the number of compiled kernels.

    Three kernels: the cache write, the attention, and the merge.
    """
    from attnreg.kernels import triton_attn
    from attnreg.runtime.interface import Call

    with faked() as (driver, texts):
        spec, plan, query, key, memory = decode()
        call = Call(query=query, kv_cache=memory, output=torch.zeros_like(query))
        for _ in range(2):
            triton_attn.write_kv(spec, plan, key, key, memory)
            triton_attn.forward(spec, plan, call)
    half = len(driver.launched) // 2
    return driver.launched[:half], driver.launched[half:], len(texts)


def compiled_for_addresses(odds: list[tuple[str, ...]]) -> list[int]:
    """The number of kernels that are compiled for each of some decodes in order.

    odds: the names of each one's tensors at odd addresses, of query, key, cache and output.
    """
    from attnreg.kernels import triton_attn
    from attnreg.runtime.interface import Call, KVCache

    counts = []
    with faked() as (_, texts):
        spec, plan, *tensors = decode(2)

        def placed(tensor: Any, odd: bool) -> Any:
            memory = torch.zeros(tensor.numel() + 8, dtype=tensor.dtype)
            return memory[odd:][: tensor.numel()].view(tensor.shape)

        for odd in odds:
            before = len(texts)
            query, key = placed(tensors[0], "query" in odd), placed(tensors[1], "key" in odd)
            memory = KVCache(*(placed(x, "cache" in odd) for x in tensors[2]))
            triton_attn.write_kv(spec, plan, key, key, memory)
            triton_attn.forward(spec, plan, Call(query, memory, placed(tensors[0], "output" in odd)))
            counts.append(len(texts) - before)
    return counts


def compiled_for_lengths(lengths: list[int]) -> list[int]:
    """The number of kernels that are compiled for each of some decodes over packed keys, views of a cache's heads."""
    from attnreg.kernels import triton_attn
    from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call

    counts = []
    with faked() as (_, texts):
        spec = AttentionSpec(
            num_heads=4, num_kv_heads=2, head_size=64, head_size_v=64, dtype=torch.float16, softmax_scale=0.125
        )
        query = torch.zeros(1, 4, 64, dtype=torch.float16)
        for length in lengths:
            before = len(texts)
            key = torch.zeros(2, length, 64, dtype=torch.float16).transpose(0, 1)
            plan = triton_attn.plan(spec, BatchMetadata.build([1], [length]))
            triton_attn.forward(spec, plan, Call(query, None, torch.zeros_like(query), key, key))
            counts.append(len(texts) - before)
    return counts


def compiled_for_types(kv_dtypes: list[str]) -> list[list[str]]:
    """The kernels that are compiled for each of some decodes over latents in order, in float16 and of one shape.

    kv_dtypes: of their caches.
    """
    from attnreg.kernels import triton_mla
    from attnreg.runtime.interface import AttentionSpec, BatchMetadata, Call
    from attnreg.runtime.mla.interface import as_kv_cache, latent_cache_shape

    found = []
    with faked() as (driver, texts):
        for kv_dtype in kv_dtypes:
            before, launched = len(texts), len(driver.launched)
            spec = AttentionSpec(
                num_heads=4, num_kv_heads=1, head_size=80, head_size_v=64, dtype=torch.float16, kv_dtype=kv_dtype,
                softmax_scale=0.1, block_size=16, latent=True,
            )  # fmt: skip
            batch = BatchMetadata.build(
                [1], [17], block_table=torch.zeros(1, 2, dtype=torch.int32), slot_mapping=torch.zeros(1).long()
            )
            shape, dtype = latent_cache_shape(spec, 2)
            memory, plan = as_kv_cache(spec, torch.zeros(shape, dtype=dtype)), triton_mla.plan(spec, batch)
            latent, rope, query, output = (torch.zeros(1, n, d).half() for n, d in ((1, 64), (1, 16), (4, 80), (4, 64)))
            triton_mla.write_kv(spec, plan, latent, rope, memory)
            triton_mla.forward(spec, plan, Call(query, memory, output))
            names = [name for name, *_ in driver.launched[launched:]]
            # the merge of parts reads no cache, so that it is compiled once
            others = [name for name in names if not name.startswith("_merge")]
            assert len(texts) - before in (0, len(others), len(names))
            found.append(others if len(texts) > before else [])
    return found


def _plain(value: Any) -> Any:
    """An argument as a value that can be pickled."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return value if isinstance(value, bool | int | float | str | None) else repr(value)
