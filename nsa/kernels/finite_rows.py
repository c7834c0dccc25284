"""Values that are not finite, on the device: one test for prefill and for decoding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finite_rows(x):
    """Which rows of x hold neither NaN nor infinity."""
    return tl.min((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32), 1) > 0


@triton.jit
def kept_apart(p, v, seen):
    """Weights p [rows, keys] and values v [keys, width] for a product in which 0 * NaN is not NaN:
    values that are not finite are 0, and the rows that have `seen` one get NaN by its weight."""
    finite = finite_rows(v)
    v = tl.where(finite[:, None], v, 0.0)
    return tl.where(seen & (finite == 0)[None, :], float("nan"), p), v
