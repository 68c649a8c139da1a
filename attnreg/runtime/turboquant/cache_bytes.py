"""The bytes of a packed KV cache, and what each part of them holds.

The cache of keys, and that of values, is ``[num_blocks, num_kv_heads, bytes]`` uint8: a block has the rows of one KV
head, in planes that load as vectors.

First come the codes, in groups of 8 codes of a row. A group takes ``bits`` bytes, read as one little-endian number:
code i is its bits from ``i * bits`` on. The bytes of a group are split into words. A word has as many bytes as the
largest power of two that divides ``bits``: 4 for 4 bits, 2 for 2, 1 for 3. A plane holds the words at one place of all
groups: ``[words of a group, block_size, groups]``.

Behind the codes are the scales and then the zeros, float16 ``[groups of elements, block_size]``. Codes of 8 bits are
float8_e4m3fn ``[block_size, size]``.

A row whose scale is NaN holds no numbers (`attnreg.runtime.turboquant.codec`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnreg.language.packed import CODES, Packed, Side

# block_size is a multiple of this many rows, so that each plane begins at a multiple of 16 bytes
ROWS = 16


class PackedBlock(NamedTuple):
    """The blocks of a KV head's keys or values of ``size`` elements, ``block_size`` rows each."""

    side: Side
    size: int
    block_size: int

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return self.side.row_bytes(self.size)

    @property
    def bytes(self) -> int:
        """The bytes of a block."""
        return self.block_size * self.row_bytes

    @property
    def word(self) -> int:
        """The bytes of a word of codes."""
        return self.side.bits & -self.side.bits

    def planes(self) -> list[int]:
        """The bytes of a row in each plane, in the order of the planes."""
        columns, bits = self.side.columns(self.size), self.side.bits
        if self.side.code == "fp8":
            return [columns]
        codes = [columns // CODES * self.word] * (bits // self.word)
        return codes + [2] * ((2 if self.side.code == "uniform" else 1) * self.side.groups(self.size))

    def rows(self, blocks: Tensor) -> Tensor:
        """The bytes of each row, [..., block_size, row_bytes] uint8, of blocks [..., bytes]."""
        sizes = [self.block_size * n for n in self.planes()]
        planes = [x.unflatten(-1, (self.block_size, -1)) for x in torch.split(blocks, sizes, -1)]  # type: ignore[no-untyped-call]
        return torch.cat(planes, -1)

    def blocks(self, rows: Tensor) -> Tensor:
        """The blocks that hold these rows: the inverse of `rows`."""
        return torch.cat([x.flatten(-2) for x in torch.split(rows, self.planes(), -1)], -1)

    def packed(self, codes: Tensor, numbers: Tensor) -> Tensor:
        """The bytes of rows with codes [..., columns], and scales and zeros [..., numbers] float16."""
        if self.side.code == "fp8":
            return codes.to(torch.uint8)
        bits, word = self.side.bits, self.word
        places = torch.arange(CODES, device=codes.device) * bits
        groups = (codes.long().unflatten(-1, (-1, CODES)) << places).sum(-1)  # type: ignore[no-untyped-call]
        bytes_ = groups[..., None] >> torch.arange(0, 8 * bits, 8, device=codes.device) & 0xFF
        # [..., groups, words, bytes of a word] -> [..., words, groups, bytes]
        words = bytes_.unflatten(-1, (-1, word)).transpose(-3, -2).flatten(-3).to(torch.uint8)
        return torch.cat([words, numbers.to(torch.float16).contiguous().view(torch.uint8)], -1)

    def unpacked(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The codes [..., columns] int64 in the bytes of rows, and the scales and zeros [..., numbers] float64."""
        bits, word, codes = self.side.bits, self.word, self.side.columns(self.size) * self.side.bits // 8
        if self.side.code == "fp8":
            return rows.long(), rows.new_empty((*rows.shape[:-1], 0), dtype=torch.float64)
        words = rows[..., :codes].long().unflatten(-1, (bits // word, -1, word))  # type: ignore[no-untyped-call]
        bytes_ = words.transpose(-3, -2).flatten(-2)
        groups = (bytes_ << torch.arange(0, 8 * bits, 8, device=rows.device)).sum(-1)
        places = torch.arange(CODES, device=rows.device) * bits
        numbers = rows[..., codes:].clone(memory_format=torch.contiguous_format).view(torch.float16)
        return (groups[..., None] >> places & 2**bits - 1).flatten(-2), numbers.double()


def packed_blocks(packed: Packed, head_size: int, head_size_v: int, block_size: int) -> tuple[PackedBlock, PackedBlock]:
    """The blocks of keys and those of values."""
    return PackedBlock(packed.keys, head_size, block_size), PackedBlock(packed.values, head_size_v, block_size)
