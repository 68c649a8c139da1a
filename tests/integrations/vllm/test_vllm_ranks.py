"""attnreg's backend in vLLM 0.33.0 under decode context parallelism: ranks that share a KV cache, each a process."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import engine as vllm_engine
import pytest
import torch
from engine import Engine
from served import Layer, close
from support.layers.ranks import Failure, Ranks

pytestmark = pytest.mark.filterwarnings("default")

WORLD = 2
CASES: dict[str, dict[str, Any]] = {
    "decode": {"lengths": [(1, 40), (1, 5), (1, 0), (1, 64)]},
    "prompts that begin": {"lengths": [(20, 0), (3, 0)]},
    "mixed": {"lengths": [(1, 40), (9, 30), (20, 0), (1, 64)]},
    "mixed, padding": {"lengths": [(1, 40), (9, 30), (20, 0)], "padding": 3},
    "verification": {"lengths": [(4, 40), (4, 5), (4, 1)], "slack": 7},
    "one KV head": {"lengths": [(1, 40), (9, 30)], "num_kv_heads": 1},
    "bounds": {"lengths": [(1, 40), (9, 30)], "bounds": False},
    "HND": {"lengths": [(1, 40), (9, 30)], "layout": "LBHNC"},
    "blocks of the manager": {"lengths": [(1, 140), (9, 130)], "kernel_blocks": 2},
    "softcap": {"lengths": [(1, 40), (9, 30)], "softcap": 2.0},
    "sinks": {"lengths": [(1, 40), (9, 30), (1, 0)], "sinks": True},
    "fp8": {"lengths": [(1, 40), (9, 30)], "kv_dtype": "fp8", "scales": (0.5, 0.25)},
    "not causal": {"lengths": [(1, 40), (9, 30)], "causal": False},
    "causal by request": {"lengths": [(3, 40), (9, 30)], "causal": [False, True]},
    # the hybrid cache manager switched off: vLLM allocates such layers like others
    "window": {"lengths": [(1, 40), (9, 30), (20, 0)], "window": 9, "full": True},
    "bfloat16": {"lengths": [(1, 40), (9, 30)], "dtype": torch.bfloat16},
}


@dataclass
class Shared(Layer):
    """The heads of one rank, and its part of the cache; queries differ by rank, keys and values do not."""

    rank: int = 0
    interleave: int = 1
    # the spec of a layer with a window is that of others
    full: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.query = self.query * (1 + self.rank)
        parallel = SimpleNamespace(cp_kv_cache_interleave_size=self.interleave, decode_context_parallel_size=WORLD)
        self.config = SimpleNamespace(**{**vars(self.config), "parallel_config": parallel})

    def spec(self) -> Any:
        window, self.window = self.window, None if self.full else self.window
        try:
            return super().spec()
        finally:
            self.window = window

    def _slots(self) -> torch.Tensor:
        """Where vLLM's block tables put tokens: block i has the tokens of that many positions of every rank."""
        slots, size = [], self.block_size * self.kernel_blocks
        for i, (new, before) in enumerate(self.lengths):
            at = torch.arange(before, before + new)
            turn, inside = self.interleave * WORLD, at % (size * WORLD)
            local = inside // turn * self.interleave + inside % self.interleave
            local += at // (size * WORLD) * size
            there = self.table[i].long()[local // self.block_size] * self.block_size + local % self.block_size
            slots.append(torch.where(inside // self.interleave % WORLD == self.rank, there, -1))
        return torch.cat([*slots, torch.full((self.padding,), -1)])


@functools.cache
def platform() -> type:
    """A rank's simulated GPU; before it is booted there is no vLLM to import."""
    return vllm_engine.boot("sm90")


def step(rank: int, given: dict[str, Any]) -> None:
    """A layer on one rank, held against its reference."""
    engine = Engine(platform())
    import torch.distributed as dist
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.utils import torch_utils

    import attnreg
    from attnreg.integrations.vllm import kernels

    cpu = next(p for p in attnreg.detect_all() if p.platform == "cpu")
    engine.config.parallel_config.decode_context_parallel_size = WORLD
    group = SimpleNamespace(world_size=WORLD, rank_in_group=rank, device_group=dist.group.WORLD)
    with (
        mock.patch.object(parallel_state, "_DCP", group),
        mock.patch.object(kernels, "here", return_value=cpu),
        mock.patch.object(torch_utils, "PIN_MEMORY", False),
        set_current_vllm_config(engine.config),
    ):
        close(Shared(**given, rank=rank))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    if reason := vllm_engine.missing():
        pytest.skip(reason)
    group = Ranks(WORLD)
    yield group
    group.close()


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("name", CASES)
def test_ranks_share_a_cache(name: str, interleave: int, ranks: Ranks) -> None:
    for found in ranks.run(step, {**CASES[name], "interleave": interleave}):
        assert not isinstance(found, Failure), found


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"slopes": [0.5, 0.25, 0.1, 0.05]}, "the layer has alibi, which compares queries with positions in"),
        ({"shares": True}, "the layer reads the keys of other, and each rank has a part of them only"),
        ({"attn_type": "encoder_decoder"}, "attn_type is encoder_decoder; ranks share the cache of a decoder"),
    ],
)
def test_what_ranks_cannot_share_is_refused_when_the_layer_is_made(
    given: dict[str, Any], problem: str, ranks: Ranks
) -> None:
    for found in ranks.run(step, {"lengths": [(1, 4)], **given}):
        assert isinstance(found, Failure)
        assert found.kind == "ValueError"
        assert problem in str(found)


def test_a_replicated_cache_is_no_cache_of_ranks(on_cpu: Engine) -> None:
    """The spec says it: vLLM replicates the caches of some draft models, under a target that shares its own."""
    from attnreg.integrations.vllm.metadata import AttnregMetadataBuilder

    layer = Shared([(1, 4)])
    layer.table = layer._block_table()
    found = []
    with mock.patch("vllm.distributed.parallel_state._DCP", SimpleNamespace(world_size=2, rank_in_group=0)):
        for shared in (True, False):
            spec = layer.spec()
            object.__setattr__(spec, "dcp_sharded", shared)
            builder = AttnregMetadataBuilder(spec, ["layer"], layer.config, torch.device("cpu"))
            # what is computed of the lengths is computed anew for each step of a draft
            found.append((builder.build(0, layer.common()).interleave, builder.supports_draft_decode_metadata_update))
    assert found == [(1, False), (0, True)]
