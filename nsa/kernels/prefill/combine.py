"""Gated sum of the three branches (Eq. 5) and its backward, one pass over memory each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa.kernels.launch import launch
from nsa.kernels.prefill.gate_sign import mark_sign
from nsa.kernels.tiles import cdiv, dot_size

# Outputs of compressed and sliding attention and the gates [.., HQ, 3]; where the second output is
# None the first is the gated sum of both.
Others = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


@triton.jit
def gated_sum(o_cmp, o_sel, o_win, gate, live, mask, SUMMED: tl.constexpr):
    """fp32 sum of o_sel, a tile of outputs, and of the two that o_cmp and o_win point to, by gates
    from `gate` on; with SUMMED o_cmp points to the gated sum of both."""
    acc = tl.load(o_cmp, mask=mask, other=0.0).to(tl.float32)
    if not SUMMED:
        acc = acc * tl.load(gate, mask=live, other=0.0).to(tl.float32)[:, None]
    acc += o_sel.to(tl.float32) * tl.load(gate + 1, mask=live, other=0.0).to(tl.float32)[:, None]
    if not SUMMED:
        acc += (
            tl.load(o_win, mask=mask, other=0.0).to(tl.float32)
            * (tl.load(gate + 2, mask=live, other=0.0).to(tl.float32)[:, None])
        )
    return acc


@triton.jit
def _combine_fwd_kernel(
    O_CMP, O_SEL, O_WIN, GATES, OUT, n_rows, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """SUMMED: O_CMP is the gated sum of two branches, and O_WIN is not read."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_DV)
    live = rows < n_rows
    mask = live[:, None] & (cols < DV)[None, :]
    at = rows[:, None] * DV + cols[None, :]
    o_sel = tl.load(O_SEL + at, mask=mask, other=0.0)
    acc = gated_sum(O_CMP + at, o_sel, O_WIN + at, GATES + rows * 3, live, mask, SUMMED)
    tl.store(OUT + at, acc.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _combine_bwd_kernel(
    DO, O_CMP, O_SEL, O_WIN, LSE_CMP, LSE_SEL, LSE_WIN, GATES, DGATES, DELTAS, LSES, REACH,
    ANY_NEGATIVE, n_rows, CU, n_seq, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, HQ: tl.constexpr,
):  # fmt: skip
    """dgate_b = rowsum(dO * O_b), which is also branch b's delta once its gate is folded into lse:
    exp(s - (lse - ln |g|)) = |g| * p; the sign is in its lowest bit (gate_sign.py). REACH:
    |g| * rowsum |dO| of selection, see sums.py. ANY_NEGATIVE becomes 1 where a gate is. Of a pack
    CU and n_seq: dO of rows that belong to no sequence is not read, and counts as 0."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_DV)
    live = rows < n_rows
    mask = live[:, None] & (cols < DV)[None, :]
    at = rows[:, None] * DV + cols[None, :]
    inside = mask
    if CU is not None:
        inside = mask & (rows // HQ < tl.load(CU + n_seq))[:, None]
    do = tl.load(DO + at, mask=inside, other=0.0).to(tl.float32)
    any_negative = tl.zeros([BLOCK_M], tl.int32)
    for branch in tl.static_range(3):
        if branch == 0:
            out, lse_of = O_CMP, LSE_CMP
        elif branch == 1:
            out, lse_of = O_SEL, LSE_SEL
        else:
            out, lse_of = O_WIN, LSE_WIN
        dgate = tl.sum(do * tl.load(out + at, mask=mask, other=0.0).to(tl.float32), 1)
        gate = tl.load(GATES + rows * 3 + branch, mask=live, other=1.0).to(tl.float32)
        lse = tl.load(lse_of + rows, mask=live, other=0.0)
        size = tl.abs(gate)
        # g = 0 gives +inf: no probability at all. Rows without keys keep their -inf. An infinite
        # gate gives NaN: as -inf it would pass for a row without keys.
        known = tl.where(size == float("inf"), float("nan"), size)
        folded = tl.where(lse == float("-inf"), lse, lse - tl.math.log2(known) * 0.6931471805599453)
        folded = mark_sign(folded, gate < 0)
        any_negative |= (gate < 0).to(tl.int32)
        to = branch * tl.cast(n_rows, tl.int64) + rows
        tl.store(DGATES + rows * 3 + branch, dgate.to(DGATES.dtype.element_ty), mask=live)
        tl.store(DELTAS + to, dgate, mask=live)
        tl.store(LSES + to, folded, mask=live)
        if branch == 1:
            tl.store(REACH + rows, size * tl.sum(tl.abs(do), 1), mask=live)
    if tl.max(any_negative) > 0:
        tl.atomic_max(ANY_NEGATIVE, 1, sem="relaxed")


def combine_fwd(
    o_sel: torch.Tensor, others: Others, into: torch.Tensor | None = None
) -> torch.Tensor:
    """sum_b gates[.., b] * o_b for contiguous [.., HQ, Dv] outputs and gates [.., HQ, 3].

    into: where it goes, which may be one of the outputs.
    """
    o_cmp, o_win, gates = others
    out = torch.empty_like(o_cmp) if into is None else into
    n_rows = gates.numel() // 3
    if out.numel():
        dv = out.shape[-1]
        launch(
            _combine_fwd_kernel, (cdiv(n_rows, 32),),
            o_cmp, o_sel, o_cmp if o_win is None else o_win, gates, out, n_rows, DV=dv,
            BLOCK_DV=dot_size(dv), BLOCK_M=32, SUMMED=o_win is None,
        )  # fmt: skip
    return out


def combine_bwd(
    grad_out: torch.Tensor, outs: tuple[torch.Tensor, ...], lses: tuple[torch.Tensor, ...],
    gates: torch.Tensor, any_negative: torch.Tensor, cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dgates like gates; fp32 [3, .., HQ]: each branch's delta, its lse with the gate folded in, by
    its lowest bit the sign; fp32 [.., HQ]: selection's |gate| * rowsum |dO|.

    outs and lses: of cmp, sel and win. any_negative: int32 [1], 0; 1 afterwards if a gate is.
    """
    dgates = torch.empty_like(gates)
    deltas = torch.empty((3, *gates.shape[:-1]), dtype=torch.float32, device=gates.device)
    folded = torch.empty_like(deltas)
    reach = torch.empty_like(deltas[0])
    n_rows = gates.numel() // 3
    if n_rows:
        dv = grad_out.shape[-1]
        n_seq = None if cu_seqlens is None else cu_seqlens.numel() - 1
        launch(
            _combine_bwd_kernel, (cdiv(n_rows, 32),),
            grad_out, *outs, *lses, gates, dgates, deltas, folded, reach,
            any_negative, n_rows, cu_seqlens, n_seq, DV=dv, BLOCK_DV=dot_size(dv), BLOCK_M=32,
            HQ=None if cu_seqlens is None else gates.shape[-2],
        )  # fmt: skip
    return dgates, deltas, folded, reach
