"""ROCM_ATTN's layouts, formats and sinks, as its row declares them; in Triton's interpreter, or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnreg
from attnreg import AttentionRequest, BatchMetadata, Platform, Registry, UnclaimedError
from attnreg.kernels import reference
from attnreg.runtime.interface import BatchError, KVCache, Layout, SpecError
from attnreg.runtime.layer import Attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PACKAGES = {"torch": "2.13", "triton": "3.7"}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def make(default: Registry, arch: str = "gfx942", backend: str = "ROCM_ATTN", **given: Any) -> Attention:
    fields = {
        name: given.pop(name) for name in ("kv_dtype", "features", "extra", "head_size", "dtype") if name in given
    }
    request = AttentionRequest(
        **{"head_size": 32, "num_heads": 4, "num_kv_heads": 2, "dtype": "float32", "block_size": 16, **fields}
    )
    platform = Platform(platform="rocm", arch=arch, packages=PACKAGES)
    return Attention.from_selection(attnreg.select(request, platform, default, backend), **given)


def test_the_shapes_of_the_layouts(default: Registry) -> None:
    shapes = {layout: make(default, kv_layout=layout).kv_cache_shape(3) for layout in ("NHD", "HND", "SPLIT")}
    assert shapes["NHD"].key == shapes["NHD"].value == (3, 16, 2, 32)
    assert shapes["HND"].key == (3, 2, 16, 32)
    # 16 bytes are 4 elements of float32
    assert (shapes["SPLIT"].key, shapes["SPLIT"].value) == ((3, 2, 8, 16, 4), (3, 2, 32, 16))
    fp8 = make(default, kv_layout="SPLIT", kv_dtype="fp8").kv_cache_shape(3)
    assert fp8.key == (3, 2, 2, 16, 16)


@pytest.mark.parametrize(
    ("arch", "word", "dtype"),
    [
        ("gfx942", "fp8", torch.float8_e4m3fnuz),
        ("gfx942", "fp8_e5m2", torch.float8_e5m2fnuz),
        ("gfx950", "fp8", torch.float8_e4m3fn),
        ("gfx1200", "fp8_e5m2", torch.float8_e5m2),
    ],
)
def test_how_8_bit_floats_are_encoded_is_a_fact_of_the_architecture(
    default: Registry, arch: str, word: str, dtype: torch.dtype
) -> None:
    for backend in ("ROCM_ATTN", "TRITON_ATTN", "TORCH_SDPA"):
        assert make(default, arch, backend, kv_dtype=word).kv_cache_shape(1).dtype == dtype


@pytest.mark.parametrize(("written", "read"), [("SPLIT", "NHD"), ("NHD", "SPLIT"), ("SPLIT", "HND")])
def test_a_cache_of_one_layout_is_not_read_in_another(default: Registry, written: Layout, read: Layout) -> None:
    cache = make(default, kv_layout=written).new_kv_cache(2, DEVICE)
    reader = make(default, kv_layout=read)
    table = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([0], device=DEVICE)
    batch = BatchMetadata.build([1], [1], block_table=table, slot_mapping=slots, device=DEVICE)
    query, key = torch.randn(1, 4, 32, device=DEVICE), torch.randn(1, 2, 32, device=DEVICE)
    with pytest.raises(BatchError, match=r"kv_cache.key is \[2, 2?"):
        reader.attend(query, cache, batch, torch.empty_like(query))
    with pytest.raises(BatchError, match=r"kv_cache.value is \[2, 2?"):
        reader.write_kv(key, key, cache, batch)


def test_a_layout_that_a_row_does_not_declare_is_refused(default: Registry) -> None:
    with pytest.raises(UnclaimedError) as caught:
        make(default, backend="TRITON_ATTN", kv_layout="SPLIT")
    assert str(caught.value) == ("TRITON_ATTN: cache_layout is SPLIT; supported: NHD, HND; these read it: ROCM_ATTN")
    assert caught.value.alternatives == ("ROCM_ATTN",)
    # stated in the request, it decides which backends there are, and is the layer's
    layer = make(default, extra={"cache_layout": "SPLIT"})
    assert layer.spec.kv_layout == "SPLIT"
    request = AttentionRequest(head_size=128, extra={"cache_layout": "SPLIT"})
    selection = attnreg.select(request, Platform(platform="rocm", arch="gfx950", packages=PACKAGES), default)
    assert selection.backend is not None
    assert selection.backend.name == "ROCM_ATTN"


def test_keys_that_16_bytes_do_not_divide_are_refused(default: Registry) -> None:
    overlay = {"backends": {"ROCM_ATTN": {"capabilities": {"head_sizes": {"min": 8}}}}}
    registry = attnreg.load_registry("default", [overlay])
    with pytest.raises(
        SpecError, match="head_size is 40, and the layout SPLIT holds keys by 16; take a multiple of it"
    ):
        make(registry, head_size=40, kv_dtype="fp8", kv_layout="SPLIT")


@pytest.mark.parametrize("layout", ["NHD", "SPLIT"])
def test_sinks_are_emulated(default: Registry, layout: Layout) -> None:
    torch.manual_seed(0)
    layer = make(
        default, features=["sinks"], sinks=torch.tensor([9.0, -1.0, 0.5, 3.0], device=DEVICE), kv_layout=layout
    )
    assert layer.selection.warnings == ("ROCM_ATTN emulates sinks (slow): sinks are a second pass over the output",)
    cache: KVCache = layer.new_kv_cache(5, DEVICE)
    for tensor in cache:
        tensor.fill_(torch.nan)
    table = torch.tensor([[3, 1, 4], [2, 0, 0]], dtype=torch.int32, device=DEVICE)
    slots = torch.cat([torch.arange(48, 64), torch.arange(16, 32), torch.tensor([64, 32, 33])]).to(DEVICE)
    key, value = torch.randn(2, 35, 2, 32, device=DEVICE)
    whole = BatchMetadata.build([33, 2], [33, 2], block_table=table, slot_mapping=slots, device=DEVICE)
    layer.write_kv(key, value, cache, whole)
    batch = BatchMetadata.build([5, 1], [33, 2], block_table=table, device=DEVICE)
    # the last row is padding
    query = torch.randn(7, 4, 32, device=DEVICE)
    output = torch.full_like(query, torch.nan)
    layer.attend(query, cache, batch, output)
    exact = reference.attention(layer.spec, batch, query, cache, params=layer.params).output
    torch.testing.assert_close(output[:6].cpu().double(), exact, atol=2e-6, rtol=2e-6)
    assert output[6].isnan().all()


def test_sinks_round_the_output_once(default: Registry) -> None:
    torch.manual_seed(0)
    layer = make(default, features=["sinks"], sinks=torch.tensor([0.3, 1.0, -0.5, 0.1], device=DEVICE), dtype="float16")
    # queries of zero weigh all keys alike, and exactly
    query = torch.zeros(3, 4, 32, dtype=torch.float16, device=DEVICE)
    key, value = torch.randn(2, 3, 2, 32, device=DEVICE).half()
    output = torch.empty_like(query)
    cache = layer.new_kv_cache(1, DEVICE)
    table, slots = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), torch.arange(3, device=DEVICE)
    batch = BatchMetadata.build([3], [3], block_table=table, slot_mapping=slots, device=DEVICE)
    layer.forward(query, key, value, cache, batch, output)
    exact = reference.attention(layer.spec, batch, query, cache, params=layer.params).output
    # half a unit in the last place, and what float32 leaves
    unit = torch.finfo(torch.float16).eps / 2
    assert float(((output.double() - exact).abs() / exact.abs().clamp(min=1e-4)).max()) < unit * 1.01
