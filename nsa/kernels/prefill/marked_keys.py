"""Values that are not finite, told by their keys.

A forward that reads whole tiles multiplies the probability 0 of a key that a row does not see with
its value, and 0 * NaN is NaN. Scores are chosen by a mask before they are used, so what a key holds
reaches the rows that see it and no other. Keys and values are few beside queries: at 16 heads a
group copies of both take 24 us of 3.8 ms at 16k tokens, and nothing in the kernels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.finite_rows import finite_rows
from nsa.kernels.launch import launch
from nsa.kernels.tiles import cdiv, pow2

ROWS = 32  # keys of a program
SIZE = 4096  # numbers of a program


@triton.jit
def _mark_keys_kernel(
    K, V, TO_K, TO_V, n_rows, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """TO_K: K [n_rows, D], but NaN where the row of V [n_rows, DV] is not finite; TO_V: V, but 0
    there."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < n_rows)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    column_v = tl.arange(0, BLOCK_DV)[None, :]
    at, at_v = row[:, None] * D + column, row[:, None] * DV + column_v
    v = tl.load(V + at_v, mask=live & (column_v < DV), other=0.0)
    k = tl.load(K + at, mask=live & (column < D), other=0.0)
    fine = finite_rows(v)[:, None]
    tl.store(TO_K + at, tl.where(fine, k, float("nan")), mask=live & (column < D))
    tl.store(TO_V + at_v, tl.where(fine, v, 0.0), mask=live & (column_v < DV))


def marked(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of contiguous k [.., D] and v [.., Dv]: v with 0 in rows that are not finite, k with
    NaN there, so that who sees such a row gets NaN."""
    (d, dv), rows = (k.shape[-1], v.shape[-1]), k.shape[:-1].numel()
    to_k, to_v = torch.empty_like(k), torch.empty_like(v)
    if rows:
        launch(
            _mark_keys_kernel, (cdiv(rows, ROWS),), k, v, to_k, to_v, rows, D=d, DV=dv,
            BLOCK_D=pow2(d), BLOCK_DV=pow2(dv), ROWS=ROWS,
        )  # fmt: skip
    return to_k, to_v


@triton.jit
def _finite_kernel(X, OUT, numbers, most, SIZE: tl.constexpr):
    """X, but 0 for NaN and `most` with its sign for infinity."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < numbers
    x = tl.load(X + at, mask=live, other=0.0).to(tl.float32)
    size = tl.abs(x)
    bound = tl.where(size == float("inf"), tl.where(x > 0.0, most, -most), 0.0)
    tl.store(OUT + at, tl.where(size < float("inf"), x, bound).to(OUT.dtype.element_ty), mask=live)


def _finite(x: Tensor, most: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        launch(_finite_kernel, (cdiv(x.numel(), SIZE),), x, out, x.numel(), most, SIZE=SIZE)
    return out


def keys_for_backward(k: Tensor) -> Tensor:
    """Keys as a backward takes them: finite, so that dS = 0 of a row that does not see
    one adds 0. A row that sees NaN has NaN from its delta. Infinity becomes the largest number of
    the dtype: a score that was infinite in the forward stays as far away."""
    return _finite(k, torch.finfo(k.dtype).max)


def values_for_backward(v: Tensor) -> Tensor:
    """Values as a backward takes them: 0 for what is not finite, since a row that sees
    such a value has NaN from its delta."""
    return _finite(v, 0.0)
