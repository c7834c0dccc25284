"""The order of blocks, on the device: one for prefill and for decoding."""

from __future__ import annotations

import triton
import triton.language as tl

FORCED = tl.constexpr(0x7FC00000)  # above infinity, and 2^22 below where integers end


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
