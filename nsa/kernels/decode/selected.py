"""Last launches of a decode step: the chosen blocks, then every merge and the gates; both at once
where nothing splits the blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.kernels.decode.choose import choose_blocks
from nsa.kernels.decode.tile import attend, await_last, begin_next, by_descale, cache_row, key_scale
from nsa.kernels.head_rows import head_rows, split_rows


@triton.jit
def _scanned(
    O, M, L, base, begin, end, ROWS, head, live, cols, DV: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Output [HEADS, BLOCK_DV] of the scan's splits begin..end; zero where all are empty. One after
    another, since all at once would not fit the registers beside the output of the blocks."""
    m = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, BLOCK_DV], tl.float32)
    for split in range(begin, end):
        at = base + split * ROWS + head
        m_part = tl.load(M + at, mask=live, other=float("-inf"))
        s_part = tl.load(L + at, mask=live, other=0.0)
        o_part = head_rows(O, at, live, cols, DV)
        m_new = tl.maximum(m, m_part)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        before, now = tl.math.exp2(m - m_safe), tl.math.exp2(m_part - m_safe)
        total = total * before + s_part * now
        acc = acc * before[:, None] + o_part * now[:, None]
        m = m_new
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def attend_selected(
    split, bg, token, length,
    Q, KS, VS, TABLE, K_DESCALE, V_DESCALE, INDICES, GATES, OUT, PART_O, PART_M, PART_L, SCAN_O,
    SCAN_M, SCAN_L, POOLED, SPILL, TILE_MAX, KEYS, BLOCKS,
    table_len, capacity, G, H, T, splits, share, splits_cmp, splits_all, n_tiles, l, d, l_sel,
    chunks, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr, CHOOSE: tl.constexpr, SPLITS: tl.constexpr,
    TILE_N: tl.constexpr, NB: tl.constexpr, CHUNK: tl.constexpr, SINGLE: tl.constexpr,
    N: tl.constexpr, RANKED: tl.constexpr, N_SEL: tl.constexpr, N_PAD: tl.constexpr,
    N_INIT: tl.constexpr, N_LOCAL: tl.constexpr, MERGE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Partial attention of one token over `share` of its blocks; rows are heads. With CHOOSE every
    split chooses the blocks for itself, which is cheaper than a launch. With MERGE there is one
    split, which leaves no partial output but writes OUT: all three branches by their gates (Eq. 5).
    """
    batch = bg // G
    group = bg % G
    scale_log2 = key_scale(scale_log2, K_DESCALE, bg, KS)
    position = length - T + token
    token_row = (batch.to(tl.int64) * T + token) * (G * H) + group * H
    indices = INDICES + ((batch.to(tl.int64) * T + token) * G + group) * N_SEL
    cols = tl.arange(0, BLOCK_DV)
    first = split * share
    last = tl.minimum(first + share, N_SEL)
    out_row = ((bg.to(tl.int64) * T + token) * splits + split) * HEADS
    head = tl.arange(0, HEADS)
    live = head < H
    row_index = token_row + head
    offs_d, offs_d2, q, q2 = split_rows(Q, row_index, live, D, BLOCK_D, BLOCK_D2)
    await_last(EARLY)
    if CHOOSE:
        keep, place, chosen = choose_blocks(
            bg, token, length, SCAN_M, SCAN_L, POOLED, SPILL, TILE_MAX, KEYS, BLOCKS, H, T,
            splits_cmp, splits_all, n_tiles, l, d, l_sel, chunks, ROWS, HEADS, SPLITS, TILE_N, NB,
            CHUNK, SINGLE, N, RANKED, N_SEL, N_PAD, N_INIT, N_LOCAL,
        )  # fmt: skip
        tl.store(indices + place, chosen, mask=keep)
        pad = tl.arange(0, N_PAD)
        own = position // l_sel
        tl.store(indices + pad, tl.full([N_PAD], -1, tl.int32), mask=(pad > own) & (pad < N_SEL))
        tl.debug_barrier()
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
        k = head_rows(KS, at, seen, offs_d, D).to(q.dtype)
        v = head_rows(VS, at, seen, cols, DV).to(q.dtype)
        k2 = k
        if BLOCK_D2 > 0:
            k2 = head_rows(KS, at, seen, offs_d2, D).to(q.dtype)
        acc, m_i, l_i, _, _ = attend(
            acc, m_i, l_i, q, q2, k, k2, v, seen[None, :], scale_log2, BLOCK_D2, False, PRECISION
        )
    acc = by_descale(acc, V_DESCALE, bg, VS)
    shown = live[:, None] & (cols < DV)[None, :]
    if MERGE:
        base = bg.to(tl.int64) * splits_all * ROWS + token * H
        cmp = _scanned(
            SCAN_O, SCAN_M, SCAN_L, base, 0, splits_cmp, ROWS, head, live, cols, DV, HEADS, BLOCK_DV
        )
        win = _scanned(
            SCAN_O, SCAN_M, SCAN_L, base, splits_cmp, splits_all, ROWS, head, live, cols, DV, HEADS,
            BLOCK_DV,
        )  # fmt: skip
        gate = GATES + row_index * 3
        g_cmp = tl.load(gate, mask=live, other=0.0).to(tl.float32)
        g_sel = tl.load(gate + 1, mask=live, other=0.0).to(tl.float32)
        g_win = tl.load(gate + 2, mask=live, other=0.0).to(tl.float32)
        out = cmp * g_cmp[:, None]
        out += acc / tl.where(l_i > 0, l_i, 1.0)[:, None] * g_sel[:, None]
        out += win * g_win[:, None]
        at = row_index[:, None] * DV + cols[None, :]
        tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=shown)
    else:
        out_at = out_row + head
        tl.store(PART_M + out_at, m_i, mask=live)
        tl.store(PART_L + out_at, l_i, mask=live)
        tl.store(PART_O + out_at[:, None] * DV + cols[None, :], acc, mask=shown)


@triton.jit
def _decode_selected_kernel(
    Q, KS, VS, LENS, TABLE, K_DESCALE, V_DESCALE, INDICES, GATES, OUT, PART_O, PART_M, PART_L,
    SCAN_O, SCAN_M, SCAN_L, POOLED, SPILL, TILE_MAX, KEYS, BLOCKS,
    table_len, capacity, G, H, T, splits, share, splits_cmp, splits_all, n_tiles, l, d, l_sel,
    chunks, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr, CHOOSE: tl.constexpr, SPLITS: tl.constexpr,
    TILE_N: tl.constexpr, NB: tl.constexpr, CHUNK: tl.constexpr, SINGLE: tl.constexpr,
    N: tl.constexpr, RANKED: tl.constexpr, N_SEL: tl.constexpr, N_PAD: tl.constexpr,
    N_INIT: tl.constexpr, N_LOCAL: tl.constexpr, MERGE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """attend_selected() of every split, sequence, group and token."""
    begin_next(EARLY)
    bg = tl.program_id(1)
    attend_selected(
        tl.program_id(0), bg, tl.program_id(2), tl.load(LENS + bg // G),
        Q, KS, VS, TABLE, K_DESCALE, V_DESCALE, INDICES, GATES, OUT, PART_O, PART_M, PART_L, SCAN_O,
        SCAN_M, SCAN_L, POOLED, SPILL, TILE_MAX, KEYS, BLOCKS, table_len, capacity, G, H, T, splits,
        share, splits_cmp, splits_all, n_tiles, l, d, l_sel, chunks, scale_log2, D, DV, ROWS, HEADS,
        BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, PAGE, PRECISION, CHOOSE, SPLITS, TILE_N, NB, CHUNK,
        SINGLE, N, RANKED, N_SEL, N_PAD, N_INIT, N_LOCAL, MERGE, EARLY,
    )  # fmt: skip


@triton.jit
def _partials(
    PART_O, PART_M, PART_L, base, stride, begin, end, cols, DV, mask, SPLITS: tl.constexpr
):
    """Maxima, sums and outputs of the partials begin..end of one row."""
    split = begin + tl.arange(0, SPLITS)
    live = split < end
    at = base + split * stride
    m = tl.load(PART_M + at, mask=live, other=float("-inf"))
    s = tl.load(PART_L + at, mask=live, other=0.0)
    o = tl.load(
        PART_O + at[:, None] * DV + cols[None, :], mask=live[:, None] & mask[None, :], other=0.0
    )
    return m, s, o


@triton.jit
def _merged(m, s, o):
    """Their softmax-weighted sum; zero where all are empty."""
    m_all = tl.max(m, 0)
    weight = tl.math.exp2(m - tl.where(m_all == float("-inf"), 0.0, m_all))
    total = tl.sum(weight * s, 0)
    return tl.sum(o * weight[:, None], 0) / tl.where(total > 0, total, 1.0)


@triton.jit
def merge_row(
    bg, row_of_group, SCAN_O, SCAN_M, SCAN_L, SEL_O, SEL_M, SEL_L, GATES, OUT,
    G, H, T, splits_cmp, splits_all, splits_sel,
    DV: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLITS_CMP: tl.constexpr, SPLITS_WIN: tl.constexpr, SPLITS_SEL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Merge the splits of each branch and add the branches with their gates (Eq. 5)."""
    token = row_of_group // H
    head = row_of_group % H
    batch = bg // G
    group = bg % G
    cols = tl.arange(0, BLOCK_DV)
    mask = cols < DV
    scan = bg.to(tl.int64) * splits_all * ROWS + token * H + head
    chosen = (bg.to(tl.int64) * T + token) * splits_sel * HEADS + head
    row = (batch.to(tl.int64) * T + token) * (G * H) + group * H + head
    gate = GATES + row * 3
    g_cmp = tl.load(gate).to(tl.float32)
    g_sel = tl.load(gate + 1).to(tl.float32)
    g_win = tl.load(gate + 2).to(tl.float32)
    await_last(EARLY)
    # All loads before any sum, which waits for its own.
    m_cmp, s_cmp, o_cmp = _partials(
        SCAN_O, SCAN_M, SCAN_L, scan, ROWS, 0, splits_cmp, cols, DV, mask, SPLITS_CMP
    )
    m_win, s_win, o_win = _partials(
        SCAN_O, SCAN_M, SCAN_L, scan, ROWS, splits_cmp, splits_all, cols, DV, mask, SPLITS_WIN
    )
    m_sel, s_sel, o_sel = _partials(
        SEL_O, SEL_M, SEL_L, chosen, HEADS, 0, splits_sel, cols, DV, mask, SPLITS_SEL
    )
    out = _merged(m_cmp, s_cmp, o_cmp) * g_cmp
    out += _merged(m_sel, s_sel, o_sel) * g_sel
    out += _merged(m_win, s_win, o_win) * g_win
    tl.store(OUT + row * DV + cols, out.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _decode_merge_kernel(
    SCAN_O, SCAN_M, SCAN_L, SEL_O, SEL_M, SEL_L, GATES, OUT,
    G, H, T, splits_cmp, splits_all, splits_sel,
    DV: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLITS_CMP: tl.constexpr, SPLITS_WIN: tl.constexpr, SPLITS_SEL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """merge_row() of every sequence, group, token and head."""
    merge_row(
        tl.program_id(0), tl.program_id(1),
        SCAN_O, SCAN_M, SCAN_L, SEL_O, SEL_M, SEL_L, GATES, OUT, G, H, T, splits_cmp, splits_all,
        splits_sel, DV, ROWS, HEADS, BLOCK_DV, SPLITS_CMP, SPLITS_WIN, SPLITS_SEL, EARLY,
    )  # fmt: skip
