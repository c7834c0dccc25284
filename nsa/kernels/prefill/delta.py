"""delta = rowsum(dO * O) - dlse, which the softmax backward subtracts from dP, and sum |dO|, which
bounds dQ (sums.py) where there is no dlse."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa.kernels.launch import launch
from nsa.kernels.tiles import cdiv, dot_size


@triton.jit
def _attn_bwd_delta_kernel(
    O, DO, LSE, DLSE, DELTA, REACH, n_rows,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_DV)
    mask = (rows < n_rows)[:, None] & (cols < DV)[None, :]
    o = tl.load(O + rows[:, None] * DV + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    do = tl.load(DO + rows[:, None] * DV + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(o * do, 1)
    if DLSE is not None:  # of a row without keys it may be NaN, which 0 * delta would keep
        lse = tl.load(LSE + rows, mask=rows < n_rows, other=float("-inf"))
        delta -= tl.load(DLSE + rows, mask=lse != float("-inf"), other=0.0)
    tl.store(DELTA + rows, delta, mask=rows < n_rows)
    tl.store(REACH + rows, tl.sum(tl.abs(do), 1), mask=rows < n_rows)


def attention_delta(
    out: torch.Tensor,
    grad_out: torch.Tensor,
    lse: torch.Tensor | None = None,
    grad_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rowsum(dO * O) - dlse and rowsum |dO| over the head dimension, fp32, shape of the lse.

    lse and grad_lse, fp32, go together; without them dlse is 0.
    """
    delta = torch.empty(out.shape[:-1], dtype=torch.float32, device=out.device)
    reach = torch.empty_like(delta)
    n_rows = delta.numel()
    if n_rows:
        dv = out.shape[-1]
        launch(
            _attn_bwd_delta_kernel, (cdiv(n_rows, 32),),
            out, grad_out, None if grad_lse is None else lse, grad_lse, delta, reach, n_rows,
            DV=dv, BLOCK_DV=dot_size(dv), BLOCK_M=32,
        )  # fmt: skip
    return delta, reach
