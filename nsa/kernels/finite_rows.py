"""Values that are not finite, on the device: one test for prefill and for decoding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite_rows(x):
    """Which rows of x hold neither NaN nor infinity."""
    return tl.min((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32), 1) > 0
