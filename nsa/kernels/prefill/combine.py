"""Gated sum of the three branches (Eq. 5) and its backward, one pass over memory each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa import launches
from nsa.kernels.tiles import pad_dim


@triton.jit
def _combine_fwd_kernel(
    O_CMP, O_SEL, O_WIN, GATES, OUT, n_rows, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_DV)
    live = rows < n_rows
    mask = live[:, None] & (cols < DV)[None, :]
    at = rows[:, None] * DV + cols[None, :]
    gate = GATES + rows * 3
    acc = tl.load(O_CMP + at, mask=mask, other=0.0).to(tl.float32) * (
        tl.load(gate, mask=live, other=0.0).to(tl.float32)[:, None]
    )
    acc += tl.load(O_SEL + at, mask=mask, other=0.0).to(tl.float32) * (
        tl.load(gate + 1, mask=live, other=0.0).to(tl.float32)[:, None]
    )
    acc += tl.load(O_WIN + at, mask=mask, other=0.0).to(tl.float32) * (
        tl.load(gate + 2, mask=live, other=0.0).to(tl.float32)[:, None]
    )
    tl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _combine_bwd_kernel(
    DO, O_CMP, O_SEL, O_WIN, GATES, DGATES, DELTAS, n_rows, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dgate_b = rowsum(dO * O_b); delta_b = rowsum((gate_b dO) * O_b) = gate_b * dgate_b."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_DV)
    live = rows < n_rows
    mask = live[:, None] & (cols < DV)[None, :]
    at = rows[:, None] * DV + cols[None, :]
    do = tl.load(DO + at, mask=mask, other=0.0).to(tl.float32)
    for branch in tl.static_range(3):
        if branch == 0:
            base = O_CMP
        elif branch == 1:
            base = O_SEL
        else:
            base = O_WIN
        dgate = tl.sum(do * tl.load(base + at, mask=mask, other=0.0).to(tl.float32), 1)
        gate = tl.load(GATES + rows * 3 + branch, mask=live, other=0.0).to(tl.float32)
        tl.store(DGATES + rows * 3 + branch, dgate.to(DGATES.dtype.element_ty), mask=live)
        tl.store(DELTAS + branch * n_rows.to(tl.int64) + rows, gate * dgate, mask=live)


def combine_fwd(
    o_cmp: torch.Tensor, o_sel: torch.Tensor, o_win: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """sum_b gates[.., b] * o_b for contiguous [.., HQ, Dv] outputs and gates [.., HQ, 3]."""
    out = torch.empty_like(o_cmp)
    n_rows = gates.numel() // 3
    if out.numel():
        dv = out.shape[-1]
        _combine_fwd_kernel[(triton.cdiv(n_rows, 32),)](
            o_cmp, o_sel, o_win, gates, out, n_rows, DV=dv, BLOCK_DV=pad_dim(dv), BLOCK_M=32
        )
        launches.bump("_combine_fwd_kernel")
    return out


def combine_bwd(
    grad_out: torch.Tensor, o_cmp: torch.Tensor, o_sel: torch.Tensor, o_win: torch.Tensor,
    gates: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dgates like gates, and each branch's softmax delta, fp32 [3, .., HQ]."""
    dgates = torch.empty_like(gates)
    deltas = torch.empty((3, *gates.shape[:-1]), dtype=torch.float32, device=gates.device)
    n_rows = gates.numel() // 3
    if n_rows:
        dv = grad_out.shape[-1]
        _combine_bwd_kernel[(triton.cdiv(n_rows, 32),)](
            grad_out, o_cmp, o_sel, o_win, gates, dgates, deltas, n_rows, DV=dv,
            BLOCK_DV=pad_dim(dv), BLOCK_M=32,
        )  # fmt: skip
        launches.bump("_combine_bwd_kernel")
    return dgates, deltas
