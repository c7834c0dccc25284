"""Signs of gates that are folded into log-sum-exps: the lowest bit is 1 where a gate is negative.

exp(s - (lse - ln |g|)) = |g| p (combine.py), and the kernels of the backward negate it where that
bit says so. It costs an lse no more than rounding does. Without gates the bit is as good as random:
kernels have a constexpr SIGNED.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mark_sign(lse, negative):
    """lse with its lowest bit as `negative` says; infinities, no probability at all, stay."""
    bits = lse.to(tl.int32, bitcast=True) & -2 | negative.to(tl.int32)
    finite = tl.abs(lse) != float("inf")
    return tl.where(finite, bits.to(tl.float32, bitcast=True), lse)


@triton.jit
def in_log2(lse, SIGNED: tl.constexpr):
    """lse in units of log2, inf for rows without keys (p = exp2(-inf) = 0 everywhere); with SIGNED
    its lowest bit is kept."""
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    if SIGNED:  # of an infinity the bit is 0
        bits = lse2.to(tl.int32, bitcast=True) & -2 | lse.to(tl.int32, bitcast=True) & 1
        lse2 = bits.to(tl.float32, bitcast=True)
    return lse2


@triton.jit
def signed_by(p, lse):
    """p, negated where the lowest bit of lse is 1."""
    flip = lse.to(tl.int32, bitcast=True) << 31
    return (p.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)
