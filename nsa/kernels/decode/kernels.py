"""Kernels of a decode step: split attention over compressed and window keys, top-n, selected
blocks, merge.

A step has T new tokens (1 for plain decoding, more when speculating); token i of sequence b stands
at position lens[b] - T + i. Lengths live on the device, so one captured graph serves every length
up to the cache's capacity: a program whose share of keys is empty writes an empty partial.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cache_row(token, TABLE, batch, table_len, capacity, PAGE: tl.constexpr, RING: tl.constexpr):
    """Row of a token in a cache: contiguous [B, capacity], ring of `capacity`, or paged."""
    if PAGE > 0:
        page = tl.load(TABLE + batch * table_len + token // PAGE).to(tl.int64)
        return page * PAGE + token % PAGE
    if RING:
        return batch.to(tl.int64) * capacity + token % capacity
    return batch.to(tl.int64) * capacity + token


@triton.jit
def _visible(position, l, d):
    """Compressed keys that a query at `position` sees (Eq. 7)."""
    return tl.where(position + 1 >= l, (position + 1 - l) // d + 1, 0)


@triton.jit
def _decode_scan_kernel(
    Q, KC, VC, KW, VW, LENS, TABLE, PART_O, PART_M, PART_L, POOLED, SPILL, TILE_MAX,
    table_len, cmp_capacity, win_capacity, G, H, T, splits_cmp, splits_all, n_tiles, l, d, l_sel,
    window, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    NB: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, RING: tl.constexpr, POOL_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial attention of one split of the compressed or window keys; rows are (token, head).

    Compressed tiles also leave their probabilities pooled to selection blocks, per row, relative
    to the tile's maximum: the selection needs no second look at the keys.
    """
    split = tl.program_id(0)
    batch = tl.program_id(1) // G
    group = tl.program_id(1) % G
    length = tl.load(LENS + batch)
    rows = tl.arange(0, ROWS)
    token = rows // H
    live = rows < T * H
    position = length - T + token
    row_index = (batch.to(tl.int64) * T + token) * (G * H) + group * H + rows % H
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
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
    compressed = split < splits_cmp
    if compressed:
        # The splits share whole tiles of the keys that the last token sees.
        first = 0
        last = _visible(length - 1, l, d)
        lo = position * 0
        hi = _visible(position, l, d)
        n_splits = splits_cmp
        part = split
    else:
        first = tl.maximum(length - T + 1 - window, 0)
        last = length
        lo = tl.maximum(position + 1 - window, 0)
        hi = position + 1
        n_splits = splits_all - splits_cmp
        part = split - splits_cmp
    tiles = (tl.maximum(last - first, 0) + BLOCK_N - 1) // BLOCK_N
    share = (tiles + n_splits - 1) // n_splits
    begin = first + part * share * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, last)
    key_begin = tl.arange(0, BLOCK_N) * d
    block_begin = tl.arange(0, 2 * NB) * l_sel
    overlap = tl.minimum((key_begin + l)[:, None], (block_begin + l_sel)[None, :]) - tl.maximum(
        key_begin[:, None], block_begin[None, :]
    )
    pool = tl.maximum(overlap, 0).to(POOL_DTYPE)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    for n0 in tl.range(begin, end, BLOCK_N):
        key = n0 + tl.arange(0, BLOCK_N)
        seen_any = key < end
        if compressed:
            at = (batch.to(tl.int64) * cmp_capacity + key) * G + group
            k_base = KC
            v_base = VC
        else:
            at = cache_row(key, TABLE, batch, table_len, win_capacity, PAGE, RING) * G + group
            k_base = KW
            v_base = VW
        # Unused cache rows may hold anything, NaN included: they are never loaded.
        k = tl.load(
            k_base + at[:, None] * D + offs_d[None, :],
            mask=seen_any[:, None] & (offs_d < D)[None, :],
            other=0.0,
        )
        v = tl.load(
            v_base + at[:, None] * DV + offs_dv[None, :],
            mask=seen_any[:, None] & (offs_dv < DV)[None, :],
            other=0.0,
        )
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if BLOCK_D2 > 0:
            k2 = tl.load(
                k_base + at[:, None] * D + offs_d2[None, :],
                mask=seen_any[:, None] & (offs_d2 < D)[None, :],
                other=0.0,
            )
            s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
        seen = seen_any[None, :] & (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
        s = tl.where(seen, s * scale_log2, float("-inf"))
        tile_max = tl.max(s, 1)
        m_new = tl.maximum(m_i, tile_max)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s - m_safe[:, None])
        alpha = tl.math.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        if compressed:
            # Relative to the running maximum, which is stored with it.
            pooled = tl.dot((p * 1024.0).to(pool.dtype), pool, input_precision=PRECISION)
            halves = tl.reshape(pooled, [ROWS, 2, NB])
            upper = tl.arange(0, 2)[None, :, None] == 1
            tile = n0 // BLOCK_N
            store_at = (tl.program_id(1).to(tl.int64) * ROWS + rows) * n_tiles + tile
            tl.store(
                POOLED + store_at[:, None] * NB + tl.arange(0, NB)[None, :],
                tl.sum(tl.where(upper, 0.0, halves), 1),
                mask=live[:, None],
            )
            tl.store(
                SPILL + store_at, tl.sum(tl.sum(tl.where(upper, halves, 0.0), 2), 1), mask=live
            )
            tl.store(TILE_MAX + store_at, m_safe, mask=live)
        m_i = m_new
    out_at = (tl.program_id(1).to(tl.int64) * splits_all + split) * ROWS + rows
    tl.store(PART_M + out_at, m_i, mask=live)
    tl.store(PART_L + out_at, l_i, mask=live)
    tl.store(
        PART_O + out_at[:, None] * DV + offs_dv[None, :],
        acc,
        mask=live[:, None] & (offs_dv < DV)[None, :],
    )


@triton.jit
def _decode_topn_kernel(
    LENS, PART_M, PART_L, POOLED, SPILL, TILE_MAX, SCRATCH, INDICES,
    G, H, T, splits_cmp, splits_all, n_tiles, l, d, l_sel,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr,
    NB: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, N_SEL: tl.constexpr,
    N_PAD: tl.constexpr, N_INIT: tl.constexpr, N_LOCAL: tl.constexpr,
):  # fmt: skip
    """INDICES [B, T, G, N_SEL]: blocks of one token and group, ascending, -1 padded."""
    bg = tl.program_id(0)
    token = tl.program_id(1)
    batch = bg // G
    group = bg % G
    length = tl.load(LENS + batch)
    position = length - T + token
    own = position // l_sel
    head = tl.arange(0, HEADS)
    row = token * H + head
    head_live = head < H
    out = INDICES + ((batch.to(tl.int64) * T + token) * G + group) * N_SEL
    block = tl.arange(0, BLOCKS)
    score = tl.zeros([BLOCKS], tl.float32)
    if own + 1 > N_SEL:
        # Log-sum-exp (base 2) of each head over the splits.
        split = tl.arange(0, SPLITS)
        part_at = (bg.to(tl.int64) * splits_all + split)[:, None] * ROWS + row[None, :]
        part_mask = (split < splits_cmp)[:, None] & head_live[None, :]
        m = tl.load(PART_M + part_at, mask=part_mask, other=float("-inf"))
        s = tl.load(PART_L + part_at, mask=part_mask, other=0.0)
        m_all = tl.max(m, 0)
        m_safe = tl.where(m_all == float("-inf"), 0.0, m_all)
        total = tl.sum(s * tl.math.exp2(m - m_safe[None, :]), 0)
        lse2 = tl.where(head_live & (total > 0), m_safe + tl.math.log2(total), float("inf"))
        tiles = (_visible(length - 1, l, d) + BLOCK_N - 1) // BLOCK_N
        scratch = SCRATCH + (bg.to(tl.int64) * T + token) * (n_tiles + 1) * NB
        base = (bg.to(tl.int64) * ROWS + row) * n_tiles
        within = tl.arange(0, NB)
        for c0 in tl.range(0, tiles + 1, CHUNK):
            tile = c0 + tl.arange(0, CHUNK)
            # Tile `tiles` exists only for what its predecessor spills into it.
            tile_at = base[:, None] + tile[None, :]
            own_mask = head_live[:, None] & (tile < tiles)[None, :]
            weight = tl.math.exp2(
                tl.load(TILE_MAX + tile_at, mask=own_mask, other=0.0) - lse2[:, None]
            )
            pooled = tl.load(
                POOLED + tile_at[:, :, None] * NB + within[None, None, :],
                mask=own_mask[:, :, None],
                other=0.0,
            )
            summed = tl.sum(pooled * weight[:, :, None], 0)
            before_mask = head_live[:, None] & ((tile >= 1) & (tile <= tiles))[None, :]
            before = tl.load(TILE_MAX + tile_at - 1, mask=before_mask, other=0.0)
            spill = tl.load(SPILL + tile_at - 1, mask=before_mask, other=0.0)
            spilled = tl.sum(spill * tl.math.exp2(before - lse2[:, None]), 0)
            summed += tl.where((within == 0)[None, :], spilled[:, None], 0.0)
            tl.store(
                scratch + tile[:, None] * NB + within[None, :],
                summed,
                mask=(tile <= tiles)[:, None],
            )
        tl.debug_barrier()
        written = (tiles + 1) * NB
        score = tl.load(scratch + block, mask=block < written, other=0.0)
    age = own - block
    score = tl.where(block < N_INIT, 1.0e30, score)
    score = tl.where(age < N_LOCAL, 2.0e30 - age.to(tl.float32) * 1.0e28, score)
    key = tl.where(age >= 0, score.to(tl.int32, bitcast=True), -1)
    low = 0
    high = tl.where(own + 1 > N_SEL, tl.max(key, 0) + 1, 0)
    while high - low > 1:
        middle = low + (high - low) // 2
        count = tl.sum((key >= middle).to(tl.int32), 0)
        low = tl.where(count >= N_SEL, middle, low)
        high = tl.where(count > N_SEL, high, middle)
    above = key >= high
    equal = (key >= low) & (key < high)
    room = N_SEL - tl.sum(above.to(tl.int32), 0)
    equal_rank = tl.cumsum(equal.to(tl.int32), 0)
    keep = (above | (equal & (equal_rank <= room))).to(tl.int32)
    slot = tl.cumsum(keep, 0) - keep
    tl.store(out + slot, block, mask=keep > 0)
    pad = tl.arange(0, N_PAD)
    tl.store(out + pad, tl.full([N_PAD], -1, tl.int32), mask=(pad > own) & (pad < N_SEL))


@triton.jit
def _decode_selected_kernel(
    Q, KS, VS, LENS, TABLE, INDICES, PART_O, PART_M, PART_L,
    table_len, capacity, G, H, T, splits, share, l_sel, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr, N_SEL: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial attention of one token over `share` of its selected blocks; rows are heads."""
    split = tl.program_id(0)
    bg = tl.program_id(1)
    token = tl.program_id(2)
    batch = bg // G
    group = bg % G
    position = tl.load(LENS + batch) - T + token
    head = tl.arange(0, HEADS)
    live = head < H
    row_index = (batch.to(tl.int64) * T + token) * (G * H) + group * H + head
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
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
    indices = INDICES + ((batch.to(tl.int64) * T + token) * G + group) * N_SEL
    tiles_per_block = (l_sel + BLOCK_N - 1) // BLOCK_N
    acc = tl.zeros([HEADS, BLOCK_DV], tl.float32)
    m_i = tl.full([HEADS], float("-inf"), tl.float32)
    l_i = tl.zeros([HEADS], tl.float32)
    first = split * share
    last = tl.minimum(first + share, N_SEL)
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
            VS + at[:, None] * DV + offs_dv[None, :],
            mask=seen[:, None] & (offs_dv < DV)[None, :],
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
    out_at = ((bg.to(tl.int64) * T + token) * splits + split) * HEADS + head
    tl.store(PART_M + out_at, m_i, mask=live)
    tl.store(PART_L + out_at, l_i, mask=live)
    tl.store(
        PART_O + out_at[:, None] * DV + offs_dv[None, :],
        acc,
        mask=live[:, None] & (offs_dv < DV)[None, :],
    )


@triton.jit
def _merge(
    PART_O, PART_M, PART_L, base, stride, begin, end, cols, DV, mask, SPLITS: tl.constexpr
):
    """Softmax-weighted sum of the partials begin..end of one row; zero where all are empty."""
    split = begin + tl.arange(0, SPLITS)
    live = split < end
    at = base + split * stride
    m = tl.load(PART_M + at, mask=live, other=float("-inf"))
    m_all = tl.max(m, 0)
    weight = tl.math.exp2(m - tl.where(m_all == float("-inf"), 0.0, m_all))
    total = tl.sum(weight * tl.load(PART_L + at, mask=live, other=0.0), 0)
    part = tl.load(
        PART_O + at[:, None] * DV + cols[None, :], mask=live[:, None] & mask[None, :], other=0.0
    )
    return tl.sum(part * weight[:, None], 0) / tl.where(total > 0, total, 1.0)


@triton.jit
def _decode_merge_kernel(
    SCAN_O, SCAN_M, SCAN_L, SEL_O, SEL_M, SEL_L, GATES, OUT,
    G, H, T, splits_cmp, splits_all, splits_sel,
    DV: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLITS_CMP: tl.constexpr, SPLITS_WIN: tl.constexpr, SPLITS_SEL: tl.constexpr,
):  # fmt: skip
    """Merge the splits of each branch and add the branches with their gates (Eq. 5)."""
    bg = tl.program_id(0)
    token = tl.program_id(1) // H
    head = tl.program_id(1) % H
    batch = bg // G
    group = bg % G
    cols = tl.arange(0, BLOCK_DV)
    mask = cols < DV
    scan = bg.to(tl.int64) * splits_all * ROWS + token * H + head
    o_cmp = _merge(
        SCAN_O, SCAN_M, SCAN_L, scan, ROWS, 0, splits_cmp, cols, DV, mask, SPLITS_CMP
    )
    o_win = _merge(
        SCAN_O, SCAN_M, SCAN_L, scan, ROWS, splits_cmp, splits_all, cols, DV, mask, SPLITS_WIN
    )
    chosen = (bg.to(tl.int64) * T + token) * splits_sel * HEADS + head
    o_sel = _merge(SEL_O, SEL_M, SEL_L, chosen, HEADS, 0, splits_sel, cols, DV, mask, SPLITS_SEL)
    row = (batch.to(tl.int64) * T + token) * (G * H) + group * H + head
    gate = GATES + row * 3
    out = o_cmp * tl.load(gate).to(tl.float32)
    out += o_sel * tl.load(gate + 1).to(tl.float32)
    out += o_win * tl.load(gate + 2).to(tl.float32)
    tl.store(OUT + row * DV + cols, out.to(OUT.dtype.element_ty), mask=mask)
