"""First launch of a decode step: split attention over the compressed and the window keys.

A step has T new tokens (1 for plain decoding, more when speculating); token i of sequence b stands
at position lens[b] - T + i. Lengths live on the device, so one captured graph serves every length
up to the cache's capacity: a program whose share of keys is empty writes an empty partial.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.kernels.block_keys import overlaps, visible
from nsa.kernels.decode.tile import attend, begin_next, by_descale, cache_row, key_scale
from nsa.kernels.head_rows import head_rows, put_rows, split_rows


@triton.jit
def scan_split(
    bg, split, length, Q, KC, VC, KW, VW, TABLE, K_DESCALE, V_DESCALE, PART_O, PART_M, PART_L,
    POOLED, SPILL, TILE_MAX,
    table_len, cmp_capacity, win_capacity, G, H, T, splits_cmp, splits_all, n_tiles, l, d, l_sel,
    window, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    NB: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, RING: tl.constexpr, CMP_PAGE: tl.constexpr, POOL_DTYPE: tl.constexpr,
    APART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Partial attention of one split of the compressed or window keys; rows are (token, head), of
    several tokens where APART. CMP_PAGE: compressed keys of a page, 0 where they are not paged.

    Compressed tiles also leave their probabilities pooled to selection blocks, per row, relative
    to the tile's maximum: the selection needs no second look at the keys.
    """
    batch = bg // G
    group = bg % G
    scale_log2 = key_scale(scale_log2, K_DESCALE, bg, KC)
    rows = tl.arange(0, ROWS)
    token = rows // H
    live = rows < T * H
    position = length - T + token
    row_index = (batch.to(tl.int64) * T + token) * (G * H) + group * H + rows % H
    offs_d, offs_d2, q, q2 = split_rows(Q, row_index, live, D, BLOCK_D, BLOCK_D2)
    offs_dv = tl.arange(0, BLOCK_DV)
    compressed = split < splits_cmp
    if compressed:
        # The splits share whole tiles of the keys that the last token sees.
        first = 0
        last = visible(length - 1, l, d)
        lo = position * 0
        hi = visible(position, l, d)
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
    pool = overlaps(l, d, l_sel, BLOCK_N, 2 * NB).to(POOL_DTYPE)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    for n0 in tl.range(begin, end, BLOCK_N):
        key = n0 + tl.arange(0, BLOCK_N)
        seen_any = key < end
        held = key
        if PAGE + CMP_PAGE > 0:  # behind the last key the table may end
            held = tl.minimum(key, end - 1)
        if compressed:
            if CMP_PAGE > 0:  # in the page of the last token that a compressed key is made of
                held = held + l // d - 1
            at = cache_row(held, TABLE, batch, table_len, cmp_capacity, CMP_PAGE, False) * G + group
            k_base = KC
            v_base = VC
        else:
            at = cache_row(held, TABLE, batch, table_len, win_capacity, PAGE, RING) * G + group
            k_base = KW
            v_base = VW
        k = head_rows(k_base, at, seen_any, offs_d, D).to(q.dtype)
        v = head_rows(v_base, at, seen_any, offs_dv, DV).to(q.dtype)
        k2 = k
        if BLOCK_D2 > 0:
            k2 = head_rows(k_base, at, seen_any, offs_d2, D).to(q.dtype)
        seen = seen_any[None, :] & (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
        acc, m_i, l_i, p, m_safe = attend(
            acc, m_i, l_i, q, q2, k, k2, v, seen, scale_log2, BLOCK_D2, APART, PRECISION
        )
        if compressed:
            # Relative to the running maximum, which is stored with it.
            pooled = tl.dot((p * 1024.0).to(pool.dtype), pool, input_precision=PRECISION)
            halves = tl.reshape(pooled, [ROWS, 2, NB])
            upper = tl.arange(0, 2)[None, :, None] == 1
            tile = n0 // BLOCK_N
            store_at = (bg.to(tl.int64) * ROWS + rows) * n_tiles + tile
            tl.store(
                POOLED + store_at[:, None] * NB + tl.arange(0, NB)[None, :],
                tl.sum(tl.where(upper, 0.0, halves), 1),
                mask=live[:, None],
            )
            tl.store(
                SPILL + store_at, tl.sum(tl.sum(tl.where(upper, halves, 0.0), 2), 1), mask=live
            )
            tl.store(TILE_MAX + store_at, m_safe, mask=live)
    out_at = (bg.to(tl.int64) * splits_all + split) * ROWS + rows
    tl.store(PART_M + out_at, m_i, mask=live)
    tl.store(PART_L + out_at, l_i, mask=live)
    put_rows(PART_O, by_descale(acc, V_DESCALE, bg, VC), out_at, live, offs_dv, DV)


@triton.jit
def _decode_scan_kernel(
    Q, KC, VC, KW, VW, LENS, TABLE, K_DESCALE, V_DESCALE, PART_O, PART_M, PART_L, POOLED, SPILL,
    TILE_MAX,
    table_len, cmp_capacity, win_capacity, G, H, T, splits_cmp, splits_all, n_tiles, l, d, l_sel,
    window, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    NB: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, RING: tl.constexpr, CMP_PAGE: tl.constexpr, POOL_DTYPE: tl.constexpr,
    APART: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """scan_split() of every sequence, group and split.

    Long splits, of the compressed keys, come first, so that the last wave is short work; groups of
    a sequence, which are neighbours in memory, run side by side.
    """
    begin_next(EARLY)
    bg = tl.program_id(0)
    scan_split(
        bg, tl.program_id(1), tl.load(LENS + bg // G),
        Q, KC, VC, KW, VW, TABLE, K_DESCALE, V_DESCALE, PART_O, PART_M, PART_L, POOLED, SPILL,
        TILE_MAX, table_len, cmp_capacity, win_capacity, G, H, T, splits_cmp, splits_all, n_tiles,
        l, d, l_sel, window, scale_log2, D, DV, ROWS, BLOCK_N, NB, BLOCK_D, BLOCK_D2, BLOCK_DV,
        PAGE, RING, CMP_PAGE, POOL_DTYPE, APART, PRECISION,
    )  # fmt: skip
