"""Backward of compressed and sliding attention: delta, dQ by rows, then dK and dV by key tiles.

No atomics in these two passes: a key tile's queries may be split over programs, each writing its
own fp32 partial that a fixed-order sum joins, so gradients are bitwise repeatable. Where torch does
not ask for deterministic algorithms, the one pass of bwd_hopper.py, whose gradients are not,
takes their place.

A gate g per (token, head) that multiplied the output afterwards needs hardly any code here: with
lse - ln |g| for lse, and the sign of g in its lowest bit (gate_sign.py), the probabilities come out
as g * P, so that dV = (g P)^T dO, and with rowsum(dO * O) for delta dS = g P * (dP - delta). See
combine.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from nsa.kernels.head_rows import head_rows, put_rows, split_rows
from nsa.kernels.launch import launch
from nsa.kernels.prefill import hopper
from nsa.kernels.prefill.delta import attention_delta
from nsa.kernels.prefill.gate_sign import in_log2, signed_by
from nsa.kernels.prefill.marked_keys import keys_for_backward
from nsa.kernels.prefill.packs import Rows, sequence_bounds, tile_of_program
from nsa.kernels.prefill.span.common import load_kv, put_dq, span_hi, span_lo, span_part, span_tiles
from nsa.kernels.prefill.span.kinds import COMPRESSED, Span
from nsa.kernels.prefill.sums import added_keys
from nsa.kernels.row_tiles import head_tiles, kv_tiles, tma_usable
from nsa.kernels.tiles import (
    LOG2E,
    arch_of,
    cdiv,
    datacenter,
    head_constants,
    pow2,
    sm_count,
    split_dim,
)


@triton.jit
def _span_dq_step(
    dq, dq2, q, q2, do, lse2, delta, k, k2, v, offs_n, lo, hi, scale_log2,
    BLOCK_D2: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if BLOCK_D2 > 0:
        s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
    p = tl.math.exp2(s * scale_log2 - lse2[:, None])
    if SIGNED:
        p = signed_by(p, lse2[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    if MASKED:  # at the end, since dp is NaN where a value is
        ds = tl.where((offs_n[None, :] >= lo[:, None]) & (offs_n[None, :] < hi[:, None]), ds, 0.0)
    ds = ds.to(k.dtype)
    dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    if BLOCK_D2 > 0:
        dq2 = tl.dot(ds, k2, dq2, input_precision=PRECISION)
    return dq, dq2


@triton.jit
def _span_bwd_dq_kernel(
    Q, K, V, KD, KD2, VD, DO, LSE, DELTA, DQ, CU_Q, CU_K, SQ, SK, G, H, q_start, span_a,
    span_b, scale, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, MODE: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    ACCUMULATE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = BLOCK_Q * HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, group, tile = tile_of_program(tile, CU_Q, SQ, G, BLOCK_Q, VARLEN)
    q_begin, q_len, k_begin, k_len = sequence_bounds(CU_Q, CU_K, batch, SQ, SK, VARLEN)
    q0 = tile * BLOCK_Q
    if q0 >= q_len:
        return
    rows = tl.arange(0, BLOCK_M)
    t = q0 + rows // HEADS
    head = rows % HEADS
    row_live = (t < q_len) & (head < H)
    row_index = (q_begin + t) * (G * H) + group * H + head
    offs_d, offs_d2, q, q2 = split_rows(Q, row_index, row_live, D, BLOCK_D, BLOCK_D2)
    offs_dv = tl.arange(0, BLOCK_DV)
    do = head_rows(DO, row_index, row_live, offs_dv, DV)
    lse = tl.load(LSE + row_index, mask=row_live, other=float("inf"))
    lse2 = in_log2(lse, SIGNED)
    delta = tl.load(DELTA + row_index, mask=row_live, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dq2 = delta
    if BLOCK_D2 > 0:
        dq2 = tl.zeros([BLOCK_M, BLOCK_D2], tl.float32)

    lo = span_lo(t + q_start, span_a, MODE)
    hi = tl.minimum(span_hi(t + q_start, span_a, span_b, MODE), k_len)
    begin, full_begin, full_end, end = span_tiles(
        q0, q_len, k_len, q_start, span_a, span_b, MODE, BLOCK_Q, BLOCK_N
    )
    for part in tl.static_range(3):
        if part != 1 or MODE == 1:
            first, last = span_part(part, begin, full_begin, full_end, end)
            for n0 in tl.range(first, last, BLOCK_N):
                offs_n = n0 + tl.arange(0, BLOCK_N)
                k, k2, v = load_kv(
                    K, V, KD, KD2, VD, k_begin, n0, offs_n < k_len, group, G, offs_d, offs_d2,
                    offs_dv, D, DV, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, TMA, part > 0,
                )  # fmt: skip
                dq, dq2 = _span_dq_step(
                    dq, dq2, q, q2, do, lse2, delta, k, k2, v, offs_n, lo, hi, scale_log2, BLOCK_D2,
                    part > 0, PRECISION, SIGNED,
                )  # fmt: skip
    put_dq(DQ, DQ, dq, row_index, row_live, offs_d, scale, D, ACCUMULATE)
    if BLOCK_D2 > 0:
        put_dq(DQ, DQ, dq2, row_index, row_live, offs_d2, scale, D, ACCUMULATE)


@triton.jit
def _span_dkdv_step(
    dk, dk2, dv, k, k2, v, QD, QD2, DOD, tile_row, head0, q_base, do_base, lse_base, delta_base,
    m0, offs_n, q_len, k_len, H, stride_q, stride_do, stride_row, q_start, span_a,
    span_b, offs_d, offs_d2, offs_dv, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, MODE: tl.constexpr, BLOCK_Q: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    MASKED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """One tile of (query, head) rows against a tile of keys, all transposed: keys are rows."""
    rows = tl.arange(0, BLOCK_Q * HEADS)
    t = m0 + rows // HEADS
    head = rows % HEADS
    live = (t < q_len) & (head < H)
    t64 = t.to(tl.int64)
    # Descriptors serve whole tiles whose rows are all live: every head, every query.
    if TMA and not MASKED:
        q = QD.load([tile_row, head0, 0]).reshape(BLOCK_Q * HEADS, BLOCK_D)
        do = DOD.load([tile_row, head0, 0]).reshape(BLOCK_Q * HEADS, DV)
    else:
        q = tl.load(
            q_base + t64[:, None] * stride_q + head[:, None] * D + offs_d[None, :],
            mask=live[:, None] & (offs_d < D)[None, :],
            other=0.0,
        )
        do = tl.load(
            do_base + t64[:, None] * stride_do + head[:, None] * DV + offs_dv[None, :],
            mask=live[:, None] & (offs_dv < DV)[None, :],
            other=0.0,
        )
    lse = tl.load(lse_base + t64 * stride_row + head, mask=live, other=float("inf"))
    delta = tl.load(delta_base + t64 * stride_row + head, mask=live, other=0.0)
    lse2 = in_log2(lse, SIGNED)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    if BLOCK_D2 > 0:
        if TMA and not MASKED:
            q2 = QD2.load([tile_row, head0, BLOCK_D]).reshape(BLOCK_Q * HEADS, BLOCK_D2)
        else:
            q2 = tl.load(
                q_base + t64[:, None] * stride_q + head[:, None] * D + offs_d2[None, :],
                mask=live[:, None] & (offs_d2 < D)[None, :],
                other=0.0,
            )
        s = tl.dot(k2, tl.trans(q2), s, input_precision=PRECISION)
    p = tl.math.exp2(s * scale_log2 - lse2[None, :])
    if SIGNED:
        p = signed_by(p, lse2[None, :])
    if MASKED:
        lo = span_lo(t + q_start, span_a, MODE)
        hi = tl.minimum(span_hi(t + q_start, span_a, span_b, MODE), k_len)
        hi = tl.where(live, hi, 0)  # or a row that does not exist sees keys
        seen = (offs_n[:, None] >= lo[None, :]) & (offs_n[:, None] < hi[None, :])
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    if MASKED:
        ds = tl.where(seen, ds, 0.0)  # again: dp and delta may be NaN
    ds = ds.to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    if BLOCK_D2 > 0:
        dk2 = tl.dot(ds, q2, dk2, input_precision=PRECISION)
    return dk, dk2, dv


@triton.jit
def _span_bwd_dkdv_kernel(
    Q, K, V, QD, QD2, DOD, DO, LSE, DELTA, DK, DV_OUT, CU_Q, CU_K, SQ, SK, G, H, k_rows,
    q_start, span_a, span_b, scale, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, MODE: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """dK, dV of one key tile of one group over one split of the queries that see it.

    DK, DV_OUT are [n_splits, k_rows, G, D]: fp32 partials, or the gradients themselves when
    there is one split.
    """
    batch, group, tile = tile_of_program(tl.program_id(0), CU_K, SQ, G, BLOCK_N, VARLEN)
    split = tl.program_id(2)
    n_splits = tl.num_programs(2)
    q_begin, q_len, k_begin, k_len = sequence_bounds(CU_Q, CU_K, batch, SQ, SK, VARLEN)
    n0 = tile * BLOCK_N
    if n0 >= k_len:
        return
    offs_n = n0 + tl.arange(0, BLOCK_N)
    offs_dv = tl.arange(0, BLOCK_DV)
    k_row = (k_begin + offs_n) * G + group
    live_n = offs_n < k_len
    offs_d, offs_d2, k, k2 = split_rows(K, k_row, live_n, D, BLOCK_D, BLOCK_D2)
    v = head_rows(V, k_row, live_n, offs_dv, DV)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    dk2 = offs_n
    if BLOCK_D2 > 0:
        dk2 = tl.zeros([BLOCK_N, BLOCK_D2], tl.float32)

    # Queries that see any key of the tile, and those that see all of it.
    n_last = tl.minimum(n0 + BLOCK_N, k_len) - 1
    if MODE == 0:
        any_begin = n0 * span_b + span_a - 1
        all_begin = n_last * span_b + span_a - 1
        any_end = q_len
        all_end = q_len
    else:
        any_begin = n0
        all_begin = n_last
        any_end = tl.minimum(tl.maximum(n_last + span_a - q_start, 0), q_len)
        all_end = tl.minimum(tl.maximum(n0 + span_a - q_start, 0), q_len)
    any_begin = tl.maximum(any_begin - q_start, 0)
    all_begin = tl.maximum(all_begin - q_start, 0)
    begin = any_begin // BLOCK_Q * BLOCK_Q
    # This split's share, in whole query tiles.
    tiles = (tl.maximum(any_end - begin, 0) + BLOCK_Q - 1) // BLOCK_Q
    share = (tiles + n_splits - 1) // n_splits
    m_begin = begin + split * share * BLOCK_Q
    m_end = tl.minimum(m_begin + share * BLOCK_Q, any_end)
    full_begin = (all_begin + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q
    full_end = all_end // BLOCK_Q * BLOCK_Q
    full_begin = tl.minimum(tl.maximum(full_begin, m_begin), m_end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), m_end)
    if VARLEN:  # whose gradients are zeros already
        if m_begin >= m_end:
            return

    stride_row = G * H
    stride_q = stride_row * D
    stride_do = stride_row * DV
    first_row = q_begin * stride_row + group * H
    q_base = Q + first_row * D
    do_base = DO + first_row * DV
    lse_base = LSE + first_row
    delta_base = DELTA + first_row
    ends = (m_begin, full_begin, full_end, m_end)
    for part in tl.static_range(3):
        for m0 in tl.range(ends[part], ends[part + 1], BLOCK_Q):
            tile_row = (q_begin + m0).to(tl.int32)
            dk, dk2, dv = _span_dkdv_step(
                dk, dk2, dv, k, k2, v, QD, QD2, DOD, tile_row, group * H, q_base, do_base, lse_base,
                delta_base, m0, offs_n, q_len, k_len, H, stride_q, stride_do, stride_row,
                q_start, span_a, span_b, offs_d, offs_d2, offs_dv, scale_log2, D, DV, MODE, BLOCK_Q,
                HEADS, BLOCK_D, BLOCK_D2, part != 1, TMA, PRECISION, SIGNED,
            )  # fmt: skip

    out_row = (split.to(tl.int64) * k_rows + k_begin + offs_n) * G + group
    put_rows(DK, dk * scale, out_row, live_n, offs_d, D)
    if BLOCK_D2 > 0:
        put_rows(DK, dk2 * scale, out_row, live_n, offs_d2, D)
    put_rows(DV_OUT, dv, out_row, live_n, offs_dv, DV)


def dq_tiles(arch: int, d: int, dv: int, itemsize: int) -> tuple[int, int, int, int]:
    """(rows, BLOCK_N, num_warps, num_stages) of the dQ kernel."""
    if arch == 0:
        return 32, 16, 4, 1
    widest = max(d, dv)
    if itemsize == 4:
        return (32, 32, 4, 1) if arch == 80 and widest <= 128 else (16, 16, 8, 1)
    if widest > 192:
        return 32, 32, 4, 1
    if datacenter(arch):
        # H200, bf16, D=128, 64k tokens, descriptors: compressed 10.3 ms, 128 rows 11.2.
        # H100, 192/128, 8k tokens, window: 0.2 ms less than (128, 64, 8, 2).
        return (64, 64, 4, 2) if widest <= 128 else (64, 32, 4, 3)
    return (64, 64, 8, 1) if widest <= 128 else (32, 32, 4, 1)


def dkdv_tiles(arch: int, d: int, dv: int, itemsize: int) -> tuple[int, int, int, int]:
    """(rows, BLOCK_N, num_warps, num_stages) of the dK/dV kernel: keys stay, rows stream."""
    if arch == 0:
        return 32, 16, 4, 1
    widest = max(d, dv)
    if itemsize == 4:
        return 16, 16, 8, 1
    if widest > 192:
        return 32, 32, 4, 1
    if datacenter(arch):
        if arch == 90 and widest > 128 >= dv:
            # H100, 192/128, 8k tokens: both passes of a window 3.8 -> 2.1 ms, of compressed
            # attention 2.3 -> 1.4, beside 32 rows and 64 keys, though 0.5 KB go to the stack.
            return 64, 128, 8, 2
        if widest > 128:
            return 32, 64, 8, 2
        # H200, bf16, D=128, 64k tokens, descriptors: compressed 21.6 ms, sliding 6.5.
        return 64, 128, 8, 3
    return (64, 64, 8, 1) if widest <= 128 else (32, 32, 4, 1)


def one_pass(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor,
    use_gluon: bool | None = None,
) -> Callable | None:  # fmt: skip
    """What gives dQ, dK and dV at once, adding to a zeroed dQ; None: the two passes here do."""
    if torch.are_deterministic_algorithms_enabled():
        return None
    in_gluon = hopper.backward(q, k, v, grad_out, use_gluon)
    return in_gluon and in_gluon.span_attention_bwd_hopper


def _query_splits(span: Span, at: Rows, groups: int, block_n: int, device: torch.device) -> int:
    """Programs that share the queries of a tile of keys. Compressed keys are few and seen by
    thousands of queries: these are split until the grid fills the chip about eight times (causal
    work per tile is uneven)."""
    if span.mode != COMPRESSED or not arch_of(device):
        return 1
    wanted, filled = 8 * sm_count(device), at.filled_tiles(block_n) * groups
    return max(1, min(cdiv(wanted, filled), cdiv(at.longest, 256), 64))


def span_attention_bwd(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, span: Span, softmax_scale: float, cu_q: torch.Tensor | None = None,
    cu_k: torch.Tensor | None = None, delta: torch.Tensor | None = None,
    dq: torch.Tensor | None = None, first: bool = False, q_start: int = 0,
    use_gluon: bool | None = None, any_negative: torch.Tensor | None = None,
    chosen: Callable | bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk, dv with the shapes and dtypes of q, k, v. All inputs contiguous.

    delta [.., HQ] fp32 is rowsum(grad_out * out), computed when not given. With dq given (fp32,
    like q), this branch's dQ / softmax_scale is added to it in place, or written over what it holds
    where `first`, and dq itself is returned. use_gluon: see hopper.py. any_negative: combine_bwd's,
    where lse and delta are. chosen: what one_pass gave, if the caller has asked.
    """
    hq, dim = q.shape[-2:]
    groups, dv_dim = v.shape[-2:]
    heads = hq // groups
    if q.numel() == 0 or k.numel() == 0:
        if dq is None or first:
            dq = (torch.empty_like(q) if dq is None else dq).zero_()
        return dq, torch.zeros_like(k), torch.zeros_like(v)
    if delta is None:
        delta, _ = attention_delta(out, grad_out)
    at = Rows.of(q, k, cu_q, cu_k)
    pass_of_both = one_pass(q, k, v, grad_out, use_gluon) if chosen is False else chosen
    if pass_of_both:
        if first and dq is not None:
            dq.zero_()
        return pass_of_both(
            grad_out, q, k, v, lse, delta, span, softmax_scale, at, dq, q_start, any_negative
        )
    k = keys_for_backward(k)
    accumulate = dq is not None and not first
    dq, dq_scale = (torch.empty_like(q), softmax_scale) if dq is None else (dq, 1.0)
    arch = arch_of(q.device)
    heads_padded = pow2(heads)
    d1, d2 = split_dim(dim)
    scale_log2 = softmax_scale * LOG2E
    cu_args = at.cu or (lse, lse)
    common = dict(
        MODE=span.mode, VARLEN=at.cu is not None, HEADS=heads_padded,
        SIGNED=any_negative is not None, **head_constants(dim, dv_dim, q.dtype),
    )  # fmt: skip

    rows, block_n, warps, stages = dq_tiles(arch, dim, dv_dim, q.element_size())
    block_q = max(rows // heads_padded, 1)
    tma = tma_usable(arch, k, whole=v)
    launch(
        _span_bwd_dq_kernel, (at.query_tiles(block_q), at.batch * groups),
        q, k, v, *kv_tiles(k, v, block_n, tma), grad_out, lse, delta, dq, *cu_args, at.sq, at.sk,
        groups, heads, q_start, span.a, span.b, dq_scale, scale_log2,
        BLOCK_Q=block_q, BLOCK_N=block_n, ACCUMULATE=accumulate, TMA=tma, num_warps=warps,
        num_stages=stages, **common,
    )  # fmt: skip

    rows, block_n, warps, stages = dkdv_tiles(arch, dim, dv_dim, q.element_size())
    block_q = max(rows // heads_padded, 1)
    splits = _query_splits(span, at, groups, block_n, q.device)
    partial_dtype = q.dtype if splits == 1 else torch.float32
    make = torch.zeros if at.cu else torch.empty  # of keys of no sequence no program thinks
    dk, dv = (make((splits, *x.shape), dtype=partial_dtype, device=x.device) for x in (k, v))
    tma = heads == heads_padded and tma_usable(arch, q, whole=grad_out)
    if tma:
        descriptors = (
            head_tiles(q, block_q, heads, d1), head_tiles(q, block_q, heads, d2 or d1),
            head_tiles(grad_out, block_q, heads, dv_dim),
        )  # fmt: skip
    else:
        descriptors = (q, q, grad_out)
    launch(
        _span_bwd_dkdv_kernel, (at.key_tiles(block_n), at.batch * groups, splits),
        q, k, v, *descriptors, grad_out, lse, delta, dk, dv, *cu_args, at.sq, at.sk, groups,
        heads, at.keys, q_start, span.a, span.b, softmax_scale, scale_log2,
        BLOCK_Q=block_q, BLOCK_N=block_n, TMA=tma, num_warps=warps, num_stages=stages, **common,
    )  # fmt: skip
    if splits == 1:
        return dq, dk[0], dv[0]
    return dq, *added_keys(dk, dv, k, v)
