"""Last launch of a decode step: the chosen blocks, every merge, and the gates."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.kernels.decode.choose import choose_blocks
from nsa.kernels.decode.scan import cache_row


@triton.jit
def _merge(
    PART_O, PART_M, PART_L, row, stride, begin, end, fits, cols, DV, SPLITS: tl.constexpr
):
    """Softmax-weighted sum of the partials begin..end of each row; zero where all are empty.

    Other programs wrote them: .cg reads the L2, where an arrival makes them visible.
    """
    split = begin + tl.arange(0, SPLITS)
    live = (split < end)[:, None] & fits[None, :]
    at = row[None, :] + split[:, None] * stride
    m = tl.load(PART_M + at, mask=live, other=float("-inf"), cache_modifier=".cg")
    m_all = tl.max(m, 0)
    weight = tl.math.exp2(m - tl.where(m_all == float("-inf"), 0.0, m_all)[None, :])
    total = tl.sum(weight * tl.load(PART_L + at, mask=live, other=0.0, cache_modifier=".cg"), 0)
    part = tl.load(
        PART_O + at[:, :, None] * DV + cols[None, None, :],
        mask=live[:, :, None] & (cols < DV)[None, None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    return tl.sum(part * weight[:, :, None], 0) / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _attend_blocks(
    Q, KS, VS, TABLE, PART_O, PART_M, PART_L, indices, table_len, capacity, G, H, batch, group,
    position, token_row, out_row, first, last, l_sel, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial attention of one token's heads over the blocks indices[first:last]."""
    cols = tl.arange(0, BLOCK_DV)
    head = tl.arange(0, HEADS)
    live = head < H
    row_index = token_row + head
    offs_d = tl.arange(0, BLOCK_D)
    q = tl.load(
        Q + row_index[:, None] * D + offs_d[None, :],
        mask=live[:, None] & (offs_d < D)[None, :],
        other=0.0,
    )
    if BLOCK_D2 > 0:
        offs_d2 = BLOCK_D + tl.arange(0, BLOCK_D2)
        q2 = tl.load(
            Q + row_index[:, None] * D + offs_d2[None, :],
            mask=live[:, None] & (offs_d2 < D)[None, :],
            other=0.0,
        )
    tiles_per_block = (l_sel + BLOCK_N - 1) // BLOCK_N
    acc = tl.zeros([HEADS, BLOCK_DV], tl.float32)
    m_i = tl.full([HEADS], float("-inf"), tl.float32)
    l_i = tl.zeros([HEADS], tl.float32)
    for i in tl.range(first * tiles_per_block, last * tiles_per_block):
        block = tl.load(indices + i // tiles_per_block)
        within = (i % tiles_per_block) * BLOCK_N + tl.arange(0, BLOCK_N)
        key = block * l_sel + within
        seen = (block >= 0) & (within < l_sel) & (key <= position)
        key = tl.where(seen, key, 0)
        at = cache_row(key, TABLE, batch, table_len, capacity, PAGE, False) * G + group
        k = tl.load(
            KS + at[:, None] * D + offs_d[None, :],
            mask=seen[:, None] & (offs_d < D)[None, :],
            other=0.0,
        )
        v = tl.load(
            VS + at[:, None] * DV + cols[None, :],
            mask=seen[:, None] & (cols < DV)[None, :],
            other=0.0,
        )
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if BLOCK_D2 > 0:
            k2 = tl.load(
                KS + at[:, None] * D + offs_d2[None, :],
                mask=seen[:, None] & (offs_d2 < D)[None, :],
                other=0.0,
            )
            s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
        s = tl.where(seen[None, :], s * scale_log2, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s - m_safe[:, None])
        alpha = tl.math.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    out_at = out_row + head
    tl.store(PART_M + out_at, m_i, mask=live)
    tl.store(PART_L + out_at, l_i, mask=live)
    tl.store(
        PART_O + out_at[:, None] * DV + cols[None, :],
        acc,
        mask=live[:, None] & (cols < DV)[None, :],
    )


@triton.jit
def _decode_selected_kernel(
    Q, KS, VS, LENS, TABLE, INDICES, PART_O, PART_M, PART_L, SCAN_O, SCAN_M, SCAN_L, POOLED, SPILL,
    TILE_MAX, SCRATCH, GATES, MIX, ARRIVED, OUT,
    table_len, capacity, G, H, T, splits, share, arrivals, splits_cmp, splits_all, n_tiles,
    l, d, l_sel, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr, CHOOSE: tl.constexpr, TILE_N: tl.constexpr,
    NB: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, SINGLE: tl.constexpr,
    RANKED: tl.constexpr, N_SEL: tl.constexpr, N_PAD: tl.constexpr, N_INIT: tl.constexpr,
    N_LOCAL: tl.constexpr,
    SPLITS_CMP: tl.constexpr, SPLITS_WIN: tl.constexpr, SPLITS_SEL: tl.constexpr,
    SCAN_HEADS: tl.constexpr, SEL_HEADS: tl.constexpr,
):  # fmt: skip
    """Programs of one token and group. The first `splits` choose the blocks (CHOOSE; each does so
    for itself, which is cheaper than a launch) and attend `share` of them; the others merge the
    scan, SCAN_HEADS heads each. Who arrives last, of `arrivals`, merges the splits and adds the
    branches with their gates (Eq. 5).
    """
    split = tl.program_id(0)
    bg = tl.program_id(1)
    token = tl.program_id(2)
    batch = bg // G
    group = bg % G
    place = bg.to(tl.int64) * T + token
    token_row = (batch.to(tl.int64) * T + token) * (G * H) + group * H
    cols = tl.arange(0, BLOCK_DV)
    if split < splits:
        indices = INDICES + ((batch.to(tl.int64) * T + token) * G + group) * N_SEL
        if CHOOSE:
            choose_blocks(
                bg, token, LENS, SCAN_M, SCAN_L, POOLED, SPILL, TILE_MAX, SCRATCH, INDICES, G, H,
                T, splits_cmp, splits_all, n_tiles, l, d, l_sel, ROWS, HEADS, SPLITS_CMP, TILE_N,
                NB, CHUNK, BLOCKS, SINGLE, RANKED, N_SEL, N_PAD, N_INIT, N_LOCAL,
            )  # fmt: skip
            tl.debug_barrier()
        _attend_blocks(
            Q, KS, VS, TABLE, PART_O, PART_M, PART_L, indices, table_len, capacity, G, H, batch,
            group, tl.load(LENS + batch) - T + token, token_row,
            (place * splits + split) * HEADS, split * share,
            tl.minimum((split + 1) * share, N_SEL), l_sel, scale_log2, D, DV, HEADS, BLOCK_N,
            BLOCK_D, BLOCK_D2, BLOCK_DV, PAGE, PRECISION,
        )  # fmt: skip
    else:
        at = (split - splits) * SCAN_HEADS + tl.arange(0, SCAN_HEADS)
        fits = at < H
        row = bg.to(tl.int64) * splits_all * ROWS + token * H + at
        o_cmp = _merge(
            SCAN_O, SCAN_M, SCAN_L, row, ROWS, 0, splits_cmp, fits, cols, DV, SPLITS_CMP
        )
        o_win = _merge(
            SCAN_O, SCAN_M, SCAN_L, row, ROWS, splits_cmp, splits_all, fits, cols, DV, SPLITS_WIN
        )
        gate = GATES + (token_row + at) * 3
        g_cmp = tl.load(gate, mask=fits, other=0.0).to(tl.float32)
        g_win = tl.load(gate + 2, mask=fits, other=0.0).to(tl.float32)
        tl.store(
            MIX + (token_row + at)[:, None] * DV + cols[None, :],
            o_cmp * g_cmp[:, None] + o_win * g_win[:, None],
            mask=fits[:, None] & (cols < DV)[None, :],
        )
    # All partials of this program are written before its arrival counts.
    tl.debug_barrier()
    if tl.atomic_add(ARRIVED + place, 1, sem="acq_rel", scope="gpu") == arrivals - 1:
        for h0 in tl.range(0, H, SEL_HEADS):
            at = h0 + tl.arange(0, SEL_HEADS)
            fits = at < H
            o_sel = _merge(
                PART_O, PART_M, PART_L, place * splits * HEADS + at, HEADS, 0, splits, fits, cols,
                DV, SPLITS_SEL,
            )
            wide = fits[:, None] & (cols < DV)[None, :]
            to = (token_row + at)[:, None] * DV + cols[None, :]
            gate = tl.load(GATES + (token_row + at) * 3 + 1, mask=fits, other=0.0)
            out = tl.load(MIX + to, mask=wide, other=0.0, cache_modifier=".cg")
            out += o_sel * gate.to(tl.float32)[:, None]
            tl.store(OUT + to, out.to(OUT.dtype.element_ty), mask=wide)
