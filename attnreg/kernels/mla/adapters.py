"""Helpers of the adapters over other packages' MLA kernels: the cache as they read it, and the layers they refuse."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from attnreg.runtime.interface import AttentionSpec, Call, SpecError, UnclaimedError


def latents(spec: AttentionSpec, call: Call) -> Tensor:
    """The pages of a cache, [num_blocks, block_size, 1, size]; NHD and HND are the same bytes."""
    assert call.kv_cache is not None
    key = call.kv_cache.key
    return key if spec.kv_layout == "NHD" else key.transpose(1, 2)


def validate(spec: AttentionSpec, backend: str, widths: Sequence[tuple[int, int]], blocks: Sequence[int]) -> None:
    """Raises `SpecError` for a layer other than MLA, `UnclaimedError` for a layer without a compiled kernel."""
    if not spec.latent:
        raise SpecError(f"the layer is not MLA in its latent form; {backend} computes nothing else")
    sizes = spec.head_size, spec.head_size_v
    if sizes not in widths or spec.block_size not in blocks:
        given = f"head sizes {sizes[0]} and {sizes[1]}, block_size {spec.block_size}"
        compiled = ", ".join(f"{a} and {b}" for a, b in widths)
        raise UnclaimedError(
            f"{given}: the kernel is compiled for {compiled}, and blocks of {', '.join(map(str, blocks))}", backend
        )
    if spec.cache_dtype != spec.dtype:
        raise UnclaimedError(f"kv_dtype {spec.kv_dtype}: queries and latents must have one dtype", backend)
