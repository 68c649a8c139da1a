# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"
# ruff: noqa: N803, N806 (constexprs are written in capitals)
"""Whether a launch of prompts also computes the requests of few queries, whose keys are then not split.

Loading their keys overlaps with computing prompts. In a captured graph the device decides it at each replay, from the
lengths. The kernels of both launches decide for themselves. They add up integers, so they come to the same answer.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Beside(NamedTuple):
    """The constants of the decision; the last three were measured on an H200.

    block_q: queries of a tile of prompts. causal: whether queries see no keys after their own. least: each kind must
    have this part of the work, as its divisor. share, of: the longest request of few queries may take share / of the
    work of a multiprocessor.
    """

    block_q: int
    kv_heads: int
    num_sms: int
    causal: bool
    least: int = 10
    share: int = 2
    of: int = 5


def seen_keys(query_len: int, kv_len: int, beside: Beside) -> int:
    """The keys that the tiles of a prompt walk."""
    seen = kv_len - query_len // 2 if beside.causal else kv_len
    return -(-query_len // beside.block_q) * max(seen, 0)


def is_worth(few: int, many: int, longest: int, beside: Beside) -> bool:
    """Whether prompts and requests of few queries should run side by side.

    few, many: keys that requests of few queries have, and that tiles of prompts walk. longest: of the former.
    """
    total = few + many
    alike = beside.least * min(few, many) >= total > 0
    return alike and longest * beside.of * beside.num_sms <= total * beside.share * beside.kv_heads


@triton.jit
def work_of(query_start_loc_ptr, seq_lens_ptr, i, num_reqs, most, BESIDE: tl.constexpr):
    """Returns few, many and longest of `is_worth` for requests i; those of up to ``most`` queries have few."""
    exists = i < num_reqs
    first = tl.load(query_start_loc_ptr + i, mask=exists, other=0)
    after = tl.load(query_start_loc_ptr + i + 1, mask=exists, other=0)
    kv_len = tl.load(seq_lens_ptr + i, mask=exists, other=0)
    queries = after - first
    few = tl.where((queries > 0) & (queries <= most), kv_len, 0)
    seen = kv_len
    if BESIDE.causal:
        seen = kv_len - queries // 2
    BLOCK_Q: tl.constexpr = BESIDE.block_q
    many = tl.cdiv(queries, BLOCK_Q).to(tl.int64) * tl.maximum(seen, 0)
    return tl.sum(few.to(tl.int64)), tl.sum(tl.where(queries > most, many, 0)), tl.max(few)


@triton.jit
def is_worth_here(few, many, longest, BESIDE: tl.constexpr):
    """Returns what `is_worth` says of sums on the device."""
    total = few + many
    alike = (BESIDE.least * tl.minimum(few, many) >= total) & (total > 0)
    return alike & (longest.to(tl.int64) * (BESIDE.of * BESIDE.num_sms) <= total * (BESIDE.share * BESIDE.kv_heads))
