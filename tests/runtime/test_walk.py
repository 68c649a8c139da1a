"""Every tensor of every public call, in every odd form: right numbers, or a typed error before anything is written."""

from __future__ import annotations

import re

import pytest
import torch
from support.layers import walk

from attnreg import BatchMetadata, Registry

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="where there is a GPU, Triton compiles, and the CPU's memory is refused"
    ),
]
KINDS = ["paged", "quantised", "packed"]
WALKS = [
    *((backend, "paged", name) for backend in ("CPU_ATTN", "TORCH_SDPA", "TRITON_ATTN", "FLEX_ATTENTION")
      for name in (*walk.CALL, *walk.BATCH, "sinks", "alibi_slopes")
      if (backend, name) not in [("FLEX_ATTENTION", x) for x in ("mm_prefix", "causal", "tree_mask")]),
    *((backend, "quantised", name) for backend in ("CPU_ATTN", "TRITON_ATTN")
      for name in ("key", "value", "key_cache", "value_cache", "k_scale", "v_scale")),
    *(("TRITON_ATTN", "quantised", name) for name in ("query", "q_scale")),
    *((backend, "packed", name) for backend in ("CPU_ATTN", "TORCH_SDPA", "TRITON_ATTN")
      for name in ("query", "key", "value", "output", "key_start_loc", "query_start_loc", "seq_lens", "seq_lens_cpu")),
    # the kernels of TRITON_ATTN, and sinks of its own
    ("ROCM_ATTN", "paged", "sinks"), ("ROCM_ATTN", "paged", "output"),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", walk.PLATFORMS)
def test_the_call_itself_is_right(default: Registry, backend: str, kind: str) -> None:
    quantised = kind == "quantised"
    given = walk.tensors(walk.FEATURES[backend], quantised=quantised, paged=kind != "packed")
    made = walk.forward(backend, default, given, quantised=quantised)
    assert made.refusal is None
    assert walk.close(made)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", walk.PLATFORMS)
def test_what_planning_reads_is_on_the_host_whatever_the_default_device_is(
    default: Registry, backend: str, kind: str
) -> None:
    quantised = kind == "quantised"
    given = walk.tensors(walk.FEATURES[backend], quantised=quantised, paged=kind != "packed")
    # tensors of this device hold no numbers: reading one raises
    made = walk.forward(backend, default, given, quantised=quantised, default_device="meta")
    with torch.device("meta"):
        lengths = BatchMetadata.build([2, 1], [2, 5], device="cpu")
    assert made.refusal is None
    assert walk.close(made)
    assert lengths.seq_lens_cpu.tolist() == [2, 5]


# the functions that an engine may call apart
ENTRIES = [
    *(("forward", *one) for one in WALKS),
    *(("attend", backend, "paged", name) for backend in ("CPU_ATTN", "TRITON_ATTN")
      for name in ("query", "output", "lse", "key_cache", "value_cache", "block_table", "mm_prefix")),
    *(("ops", backend, "paged", name) for backend in ("CPU_ATTN", "TRITON_ATTN")
      for name in ("query", "key", "value", "key_cache", "value_cache", "slot_mapping", "block_table", "causal")),
    *(("ops", "CPU_ATTN", "packed", name) for name in ("query", "key", "value")),
    *(("write_kv", backend, kind, name) for backend in ("CPU_ATTN", "TRITON_ATTN") for kind in ("paged", "quantised")
      for name in ("key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale")
      if kind == "quantised" or not name.endswith("scale")),
]  # fmt: skip
# an argument, what it is, and what is served
REFUSAL = re.compile(
    r"[\w.]+( of request \d+|\[\d+\])? (is|has|have|names|writes) .*[;,:(] ?.+|the (batch|request) (has|asks) .*[:;] .+"
)


@pytest.mark.parametrize(("entry", "backend", "kind", "name"), ENTRIES)
def test_odd_tensors_are_read_right_or_refused(
    default: Registry, entry: str, backend: str, kind: str, name: str
) -> None:
    quantised = kind == "quantised"
    given = walk.tensors(walk.FEATURES[backend], quantised=quantised, paged=kind != "packed")
    if name not in given:
        pytest.skip(f"{backend} takes no {name} here")
    served = 0
    for oddity, odd in walk.oddities(given[name]):
        call = walk.tensors(walk.FEATURES[backend], quantised=quantised, paged=kind != "packed") | {name: odd}
        made = walk.forward(backend, default, call, quantised=quantised, entry=entry)
        if made.refusal is not None:
            assert not made.written, f"{name} {oddity}: {made.refusal}, after something was written"
            said = str(made.refusal)
            word = "kv_cache" if name.endswith("cache") else name.removesuffix("_slopes")
            assert name in walk.LENGTHS or word in said, (oddity, said)
            assert all(REFUSAL.fullmatch(line) for line in said.splitlines()), (oddity, said)
            continue
        assert walk.close(made), f"{name} {oddity} is read wrongly"
        served += 1
    # memory that begins anywhere is served
    assert served >= 2
