"""Sums of selection attention's forward that several programs add to, in fp16.

A row adds at most MOST_PARTS parts, one for a block, and begins with what it shares with its
neighbours (block_attn_ends.py), whose largest score is the one that weights are relative to. Each
column of a group's V has a power of two, with which sums do not overflow as long as no score is
more than ABOVE over that:

    |sum_j p_j V_jc| * scale_c <= n_sel * block_size * 2**ABOVE * max_j |V_jc| * scale_c < 2**15

With n_sel = 16 a single key can be 16 over it, a factor of 65536 in its weight. What does overflow
stays infinite, and the query goes another way. Downwards, the largest of a column is 11 bits above
fp16's least normal number and 21 above its least one, where a row has all its weight on one key;
rows that share it add up to more. Rounding: sums of 13 random blocks are off by 6e-4 of their norm,
while rounding to bf16 alone costs 17e-4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.launch import launch
from nsa.kernels.prefill.sums import exponent, power_of_two
from nsa.kernels.tiles import cdiv

COLUMNS, SLICE = 128, 64  # of V, and rows, that are searched at a time
SEARCHES = 1024  # programs: few, since each raises the same numbers
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
def _largest_columns_kernel(
    V, LARGEST, n_rows, columns, COLUMNS: tl.constexpr, SLICE: tl.constexpr
):  # fmt: skip
    """Raises LARGEST [columns] to the largest finite magnitudes of the columns of V. What is not
    finite does not count: rows that see it are not finite either, others shall not suffer."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    found = tl.zeros([SLICE, COLUMNS], tl.float32)
    for begin in range(tl.program_id(0) * SLICE, n_rows, tl.num_programs(0) * SLICE):
        row = begin + tl.arange(0, SLICE)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        x = tl.load(V + at, mask=(row < n_rows)[:, None] & (column < columns)[None, :], other=0.0)
        x = tl.abs(x.to(tl.float32))
        found = tl.maximum(found, tl.where(x < float("inf"), x, 0.0))
    tl.atomic_max(LARGEST + column, tl.max(found, 0), mask=column < columns, sem="relaxed")


@triton.jit
def _column_scales_kernel(LARGEST, columns, bits, COLUMNS: tl.constexpr):
    """Scales in the place of the largest: 2**bits of these times a scale stay below 2**15."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    largest = tl.load(LARGEST + column, mask=column < columns, other=0.0)
    scale = power_of_two(14 - exponent(largest) - bits)
    tl.store(LARGEST + column, scale, mask=column < columns)


def begin_sums(q: Tensor, v: Tensor, n_sel: int, block_size: int, memory: Tensor) -> KeySums:
    """Scales, and room for the others, for contiguous q [.., HQ, D] and v [.., G, D]. memory: of 16
    bits, like q, for the sums."""
    groups, width = v.shape[-2:]
    top, total = torch.empty(2, *q.shape[:-1], dtype=torch.float32, device=q.device)
    scales = torch.zeros(groups, width, dtype=torch.float32, device=q.device)
    columns, rows = groups * width, v.numel() // (groups * width)
    across = cdiv(columns, COLUMNS)
    launch(
        _largest_columns_kernel, (min(cdiv(rows, SLICE), max(SEARCHES // across, 1)), across),
        v, scales, rows, columns, COLUMNS=COLUMNS, SLICE=SLICE,
    )  # fmt: skip
    bits = (n_sel * block_size - 1).bit_length() + ABOVE
    launch(_column_scales_kernel, (across,), scales, columns, bits, COLUMNS=COLUMNS)
    return KeySums(top, total, memory.view(torch.float16), scales)
