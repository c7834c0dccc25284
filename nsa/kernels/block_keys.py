"""The order of blocks, on the device: one for prefill and for decoding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_keys(score, block, own, N_INIT: tl.constexpr, N_LOCAL: tl.constexpr):
    """Integers that order the blocks as their scores do, -1 for blocks that start after the query.

    The own block comes first, then those before it, then the initial ones: the order a small n
    keeps. A NaN counts as 0: its bits would leave no room for a larger key, and the blocks stored
    would run over their row.
    """
    age = own - block
    score = tl.where(score == score, score, 0.0)
    score = tl.where(block < N_INIT, 1.0e30, score)
    score = tl.where(age < N_LOCAL, 2.0e30 - age.to(tl.float32) * 1.0e28, score)
    # Non-negative floats order like their bit patterns.
    return tl.where(age >= 0, score.to(tl.int32, bitcast=True), -1)
