"""The exchange of partial states between ranks: one collective of packed outputs and LSEs, then one merge."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from attnreg.environment import DEBUG_VARIABLE
from attnreg.runtime.spec import SpecError
from attnreg.runtime.states.merge import kernel_of
from attnreg.runtime.validation import refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

# newer versions of PyTorch call it all_gather_single
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
# outputs and LSEs of a message begin at multiples of this many bytes, so that kernels can load whole vectors
_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Message:
    """The states of one rank: output [tokens, heads, size] and lse [heads, tokens] are views of ``bytes``."""

    bytes: Tensor
    output: Tensor
    lse: Tensor

    @classmethod
    def of(
        cls, tokens: int, heads: int, size: int, dtype: torch.dtype, device: torch.device, count: int | None = None
    ) -> Message:
        """Uninitialised memory. count: for this many messages, one after the other, as a new first dimension."""
        lead = () if count is None else (count,)
        outputs, lses = tokens * heads * size * dtype.itemsize, 4 * tokens * heads
        begin = -(-outputs // _ALIGNED) * _ALIGNED
        whole = begin + -(-lses // _ALIGNED) * _ALIGNED
        memory = torch.empty(*lead, whole, dtype=torch.uint8, device=device)
        output = memory[..., :outputs].view(dtype).view(*lead, tokens, heads, size)
        return cls(memory, output, memory[..., begin : begin + lses].view(torch.float32).view(*lead, heads, tokens))


class Exchange:
    """The ranks of a process group that share a KV cache.

    by_head: each rank has the queries of its own heads, equally many on each, and gets their output. Otherwise each
    rank has all queries, and gets all of the output. Raises `SpecError` without a process group.
    """

    def __init__(self, group: Any = None, *, by_head: bool = False) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise SpecError("there is no process group; call torch.distributed.init_process_group first")
        self.group, self.by_head = group, by_head
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise SpecError("this process is no rank of the group; only its ranks share a cache")

    def gather(self, query: Tensor, whole: Tensor, kv_heads: int) -> None:
        """Copies the queries [tokens, heads, size] of every rank into ``whole``, grouped by KV head.

        Each KV head has the first rank's heads, then the second rank's, and so on.
        """
        tokens, heads, size = query.shape
        sent = query.contiguous().view(torch.uint8)
        received = sent.new_empty(self.world_size * tokens, *sent.shape[1:])
        _all_gather(received, sent, group=self.group)
        apart = received.view(query.dtype).view(self.world_size, tokens, kv_heads, heads // kv_heads, size)
        whole.view(tokens, kv_heads, self.world_size, heads // kv_heads, size).copy_(apart.permute(1, 2, 0, 3, 4))

    def agree(self, facts: Mapping[str, Any], problem: Exception | None) -> None:
        """Raises this rank's problem, or `SpecError` for another rank's, or if ranks differ in a fact.

        A collective call that waits for all ranks. A rank that raised alone would leave the others waiting.
        """
        differences = self._differences(facts, problem, "ranks that share a cache")
        if problem is not None:
            raise problem
        if differences:
            raise SpecError("\n".join(differences))

    def validate(self, device: torch.device, call: Mapping[str, Any], problem: Exception | None) -> None:
        """Raises this rank's problem of a call, or `BatchError` for another rank's, or if the ranks' calls differ.

        Asking the other ranks is a collective call that waits for the device. GPUs ask only with ATTNREG_DEBUG=1.
        """
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        asks = device.type == "cpu" or (os.environ.get(DEBUG_VARIABLE) == "1" and not capturing)
        differences = self._differences(call, problem, "the calls of all ranks") if asks else []
        if problem is not None:
            raise problem
        refuse(differences)

    def _differences(self, facts: Mapping[str, Any], problem: Exception | None, what: str) -> list[str]:
        """The problems of all ranks; if there are none, the facts in which ranks differ. Waits for all ranks."""
        every = self._gather((None if problem is None else str(problem), dict(facts)))
        said = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(every) if text is not None]
        for name in () if said else facts:
            values = [other.get(name) for _, other in every]
            if any(value != values[0] for value in values):
                words = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                said.append(f"{name} is {words}; {what} must be alike")
        return said

    def _gather(self, fact: Any) -> list[Any]:
        every: list[Any] = [None] * self.world_size
        dist.all_gather_object(every, fact, group=self.group)
        return every

    def start(self, message: Message, kv_heads: int) -> Pending:
        """Sends this rank's states to the others. The caller can work until `Pending.merge` waits for theirs."""
        tokens, heads, size = message.output.shape
        ranks, count = (self.world_size, heads // self.world_size) if self.by_head else (1, heads)
        kind = tokens, count, size, message.output.dtype, message.output.device
        received = Message.of(*kind, self.world_size)
        if self.by_head:
            sent, each = Message.of(*kind, ranks), count // kv_heads
            apart = message.output.view(tokens, kv_heads, ranks, each, size).permute(2, 0, 1, 3, 4)
            sent.output.view(apart.shape).copy_(apart)
            lse = message.lse.view(kv_heads, ranks, each, tokens).transpose(0, 1)
            sent.lse.view(lse.shape).copy_(lse)
            work = dist.all_to_all_single(received.bytes, sent.bytes, group=self.group, async_op=True)
        else:
            sent = message
            work = _all_gather(received.bytes.view(-1), sent.bytes, group=self.group, async_op=True)
        return Pending(work, received, sent)


@dataclass(frozen=True, slots=True)
class Pending:
    """States on their way. ``sent`` is kept alive until they have arrived."""

    work: Any
    received: Message
    sent: Message

    def merge(
        self, output: Tensor, output_lse: Tensor | None, own: Tensor, own_lse: Tensor, output_scale: Tensor | None
    ) -> None:
        """Merges the states of all ranks, in rank order, and then this rank's ``own`` state, [tokens, heads, size]."""
        self.work.wait()
        tensors = output, output_lse, self.received.output, self.received.lse, own, own_lse, output_scale
        kernel_of(output.device.type)(*tensors).run(*tensors, output.shape[0])
