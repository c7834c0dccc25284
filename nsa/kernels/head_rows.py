"""Rows of [.., WIDTH] tensors on the device, by their numbers: what prefill and decoding share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def head_rows(X, row, live, offs, WIDTH: tl.constexpr):
    """Columns `offs` of rows of X [.., WIDTH]; 0 where a row is not live, and past WIDTH. Rows that
    are not live are never read: those of a cache may hold anything, NaN included."""
    mask = live[:, None] & (offs < WIDTH)[None, :]
    return tl.load(X + row[:, None] * WIDTH + offs[None, :], mask=mask, other=0.0)


@triton.jit
def split_rows(X, row, live, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK2: tl.constexpr):
    """head_rows in the two parts of split_dim, of which the second may be none: (columns of the
    first, of the second, the first, the second)."""
    offs = tl.arange(0, BLOCK)
    x = head_rows(X, row, live, offs, WIDTH)
    if BLOCK2 > 0:
        offs2 = BLOCK + tl.arange(0, BLOCK2)
        x2 = head_rows(X, row, live, offs2, WIDTH)
    else:
        offs2 = offs
        x2 = x
    return offs, offs2, x, x2


@triton.jit
def put_rows(OUT, x, row, live, offs, WIDTH: tl.constexpr):
    """x to columns `offs` of the live rows of OUT [.., WIDTH]."""
    mask = live[:, None] & (offs < WIDTH)[None, :]
    at = OUT + row[:, None] * WIDTH + offs[None, :]
    tl.store(at, x.to(OUT.dtype.element_ty), mask=mask)
