"""Blocks and compressed keys on the device: what prefill and decoding share."""

from __future__ import annotations

import triton
import triton.language as tl

FORCED = tl.constexpr(0x7FC00000)  # above infinity, and 2^22 below where integers end


@triton.jit
def visible(position, l, d):
    """Compressed keys that a query at `position` sees (Eq. 7)."""
    return tl.where(position + 1 >= l, (position + 1 - l) // d + 1, 0)


@triton.jit
def overlaps(l, d, l_sel, KEYS: tl.constexpr, BLOCKS: tl.constexpr):
    """Tokens of overlap between compressed key i and block j of a tile (Eq. 9), the same for every
    tile: [KEYS, BLOCKS]."""
    key_begin = tl.arange(0, KEYS) * d
    block_begin = tl.arange(0, BLOCKS) * l_sel
    overlap = tl.minimum((key_begin + l)[:, None], (block_begin + l_sel)[None, :]) - tl.maximum(
        key_begin[:, None], block_begin[None, :]
    )
    return tl.maximum(overlap, 0)


@triton.jit
def block_keys(score, block, own, N_INIT: tl.constexpr, N_LOCAL: tl.constexpr):
    """Integers that order the blocks as their scores do, -1 for blocks that start after the query.

    The initial and the local blocks come before all others, whatever their scores. A NaN counts as
    0: its bits would leave no room for a larger key, and the blocks stored would run over their
    row.
    """
    age = own - block
    # Non-negative floats order like their bit patterns.
    key = tl.where(score == score, score, 0.0).to(tl.int32, bitcast=True)
    key = tl.where((block < N_INIT) | (age < N_LOCAL), FORCED, key)
    return tl.where(age >= 0, key, -1)
