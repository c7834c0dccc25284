"""Sums of selection attention's forward that several programs add to, in fp16.

A row adds at most MOST_PARTS parts, one for a block, and begins with what it shares with its
neighbours (fwd_by_keys_ends.py), whose largest score is the one that weights are relative to. Each
column of a group's V has a power of two: with values of that column's typical size sums do not
overflow as long as no score is more than ABOVE over that maximum:

    |sum_j p_j V_jc| * scale_c <= n_sel * block_size * 2**ABOVE * |V_jc| * scale_c < 2**15

What is typical is a mean of exponents, which a few values of any size, seen or not, hardly change.
So a row may hold values far above, and with n_sel = 16 a single key may be 16 over the maximum, a
factor of 65536 in its weight. A sum that overflows all the same stays infinite, and one whose row
has become so small that fp16 has no bits for it is found too (fwd_by_keys_ends.py): such queries go
another way. Rounding: sums of 13 random blocks are off by 6e-4 of their norm, while rounding to
bf16 alone costs 17e-4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.launch import launch
from nsa.kernels.prefill.sums import power_of_two, size_of, typical_exponent
from nsa.kernels.tiles import cdiv

COLUMNS, SLICE = 128, 64  # of V, and rows, that are searched at a time
SEARCHES = 1024  # programs: few, since each adds to the same numbers
ABOVE = 6  # in base 2


class KeySums(NamedTuple):
    """Of each query head: top [.., HQ] fp32, in base 2, the largest score of what its tile lists;
    total [.., HQ] fp32, the sum of exp2(score - top); sums [.., HQ, D] fp16, that of
    exp2(score - top) V times scales [G, D], fp32 powers of two. All but scales hold nothing where a
    tile does not go by keys (tile_blocks.py).
    """

    top: Tensor
    total: Tensor
    sums: Tensor
    scales: Tensor


@triton.jit
def _column_sizes_kernel(V, SIZES, n_rows, columns, COLUMNS: tl.constexpr, SLICE: tl.constexpr):
    """Adds to SIZES [2, columns], of each column of V: the exponents of what is finite and not 0,
    and how many those are."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sizes = tl.zeros([COLUMNS], tl.float32)
    found = tl.zeros([COLUMNS], tl.float32)
    for begin in range(tl.program_id(0) * SLICE, n_rows, tl.num_programs(0) * SLICE):
        row = begin + tl.arange(0, SLICE)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        x = tl.load(V + at, mask=(row < n_rows)[:, None] & (column < columns)[None, :], other=0.0)
        size, counts = size_of(x)
        sizes += tl.sum(size, 0)
        found += tl.sum(counts, 0)
    tl.atomic_add(SIZES + column, sizes, mask=column < columns, sem="relaxed")
    tl.atomic_add(SIZES + columns + column, found, mask=column < columns, sem="relaxed")


@triton.jit
def _column_scales_kernel(SIZES, columns, bits, COLUMNS: tl.constexpr):
    """Scales in the place of the exponents: 2**bits of what is typical times a scale stay below
    2**15."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sizes = tl.load(SIZES + column, mask=column < columns, other=0.0)
    found = tl.load(SIZES + columns + column, mask=column < columns, other=0.0)
    scale = power_of_two(14 - typical_exponent(sizes, found) - bits)
    tl.store(SIZES + column, scale, mask=column < columns)


def begin_sums(q: Tensor, v: Tensor, n_sel: int, block_size: int, memory: Tensor) -> KeySums:
    """Scales, and room for the others, for contiguous q [.., HQ, D] and v [.., G, D]. memory: of 16
    bits, like q, for the sums."""
    groups, width = v.shape[-2:]
    top, total = torch.empty(2, *q.shape[:-1], dtype=torch.float32, device=q.device)
    sizes = torch.zeros(2, groups, width, dtype=torch.float32, device=q.device)
    columns, rows = groups * width, v.numel() // (groups * width)
    across = cdiv(columns, COLUMNS)
    launch(
        _column_sizes_kernel, (min(cdiv(rows, SLICE), max(SEARCHES // across, 1)), across),
        v, sizes, rows, columns, COLUMNS=COLUMNS, SLICE=SLICE,
    )  # fmt: skip
    bits = (n_sel * block_size - 1).bit_length() + ABOVE
    launch(_column_scales_kernel, (across,), sizes, columns, bits, COLUMNS=COLUMNS)
    return KeySums(top, total, memory.view(torch.float16), sizes[0])
