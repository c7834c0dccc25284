"""Which blocks a new token attends: block scores from the scan's pooled tiles, then the top n."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.kernels.block_keys import block_keys, visible
from nsa.kernels.decode.tile import await_last, begin_next


@triton.jit
def _kept(product, live):
    """A product where it is live, 0 elsewhere; `live` holds wherever the product is not 0.

    The choice keeps the compiler from adding the product, unrounded, to a neighbour's rounded one
    in a sum over threads. Threads that hold the same sum would then differ in its last bit, and
    rank a block ahead of itself.
    """
    return tl.where(live, product, 0.0)


@triton.jit
def tile_scores(
    c0, bg, token, length, PART_M, PART_L, POOLED, SPILL, TILE_MAX,
    H, splits_cmp, splits_all, n_tiles, l, d,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, TILE_N: tl.constexpr,
    NB: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Scores [CHUNK, NB] of the blocks of CHUNK tiles from tile c0 on, over the group's heads."""
    head = tl.arange(0, HEADS)
    row = token * H + head
    head_live = head < H
    # Log-sum-exp (base 2) of each head over the splits.
    split = tl.arange(0, SPLITS)
    part_at = (bg.to(tl.int64) * splits_all + split)[:, None] * ROWS + row[None, :]
    part_mask = (split < splits_cmp)[:, None] & head_live[None, :]
    m = tl.load(PART_M + part_at, mask=part_mask, other=float("-inf"))
    s = tl.load(PART_L + part_at, mask=part_mask, other=0.0)
    m_all = tl.max(m, 0)
    m_safe = tl.where(m_all == float("-inf"), 0.0, m_all)
    total = tl.sum(_kept(s * tl.math.exp2(m - m_safe[None, :]), part_mask), 0)
    lse2 = tl.where(head_live & (total > 0), m_safe + tl.math.log2(total), float("inf"))
    tiles = (visible(length - 1, l, d) + TILE_N - 1) // TILE_N
    base = (bg.to(tl.int64) * ROWS + row) * n_tiles
    within = tl.arange(0, NB)
    tile = c0 + tl.arange(0, CHUNK)
    # Tile `tiles` has only what its predecessor spills into it.
    tile_at = base[:, None] + tile[None, :]
    own_mask = head_live[:, None] & (tile < tiles)[None, :]
    weight = tl.math.exp2(tl.load(TILE_MAX + tile_at, mask=own_mask, other=0.0) - lse2[:, None])
    pooled = tl.load(
        POOLED + tile_at[:, :, None] * NB + within[None, None, :],
        mask=own_mask[:, :, None],
        other=0.0,
    )
    summed = tl.sum(_kept(pooled * weight[:, :, None], own_mask[:, :, None]), 0)
    before_mask = head_live[:, None] & ((tile >= 1) & (tile <= tiles))[None, :]
    before = tl.load(TILE_MAX + tile_at - 1, mask=before_mask, other=0.0)
    spill = tl.load(SPILL + tile_at - 1, mask=before_mask, other=0.0)
    spilled = tl.sum(_kept(spill * tl.math.exp2(before - lse2[:, None]), before_mask), 0)
    return summed + tl.where((within == 0)[None, :], spilled[:, None], 0.0)


@triton.jit
def _ahead(key, at, other, other_at):
    """How many of the others come before each key: larger, or as large and earlier. The sum goes
    over the first axis, which lies within a thread; over the other each goes through a warp."""
    before = (other[:, None] > key[None, :]) | (
        (other[:, None] == key[None, :]) & (other_at[:, None] < at[None, :])
    )
    return tl.sum(before.to(tl.int32), 0)


@triton.jit
def _searched(key, N_SEL: tl.constexpr):
    """Which are the N_SEL largest keys (ties: the first), by a search for the n-th largest."""
    # By its bits: low reaches N_SEL keys (if there are so many), high does not.
    cuts: tl.constexpr = 32
    low = 0
    high = tl.max(key, 0) + 1
    while high - low > 1:
        step = (high - low + cuts) // (cuts + 1)
        cut = low + step * (tl.arange(0, cuts) + 1)
        count = tl.sum((key[None, :] >= cut[:, None]).to(tl.int32), 1)
        passed = tl.sum(((count >= N_SEL) & (cut < high)).to(tl.int32), 0)
        high = tl.minimum(high, low + step * (passed + 1))
        low = low + step * passed
    above = key >= high
    equal = (key >= low) & (key < high)
    room = N_SEL - tl.sum(above.to(tl.int32), 0)
    return above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))


@triton.jit
def _places(keep):
    """Places of those that are kept, in the order of the keys."""
    kept = keep.to(tl.int32)
    return tl.cumsum(kept, 0) - kept


@triton.jit
def store_candidates(
    chunk, bg, token, length, PART_M, PART_L, POOLED, SPILL, TILE_MAX, KEYS, BLOCKS,
    H, T, splits_cmp, splits_all, n_tiles, l, d, l_sel, chunks,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, TILE_N: tl.constexpr,
    NB: tl.constexpr, CHUNK: tl.constexpr, N_SEL: tl.constexpr, N_PAD: tl.constexpr,
    N_INIT: tl.constexpr, N_LOCAL: tl.constexpr,
):  # fmt: skip
    """Of a long context, the best N_SEL blocks of CHUNK tiles: KEYS and BLOCKS
    [B * G, T, chunks, N_PAD], ascending by block, key -1 where there is none.
    """
    own = (length - T + token) // l_sel
    score = tile_scores(
        chunk * CHUNK, bg, token, length, PART_M, PART_L, POOLED, SPILL, TILE_MAX, H, splits_cmp,
        splits_all, n_tiles, l, d, ROWS, HEADS, SPLITS, TILE_N, NB, CHUNK,
    )  # fmt: skip
    block = chunk * CHUNK * NB + tl.arange(0, CHUNK * NB)
    key = block_keys(tl.reshape(score, [CHUNK * NB]), block, own, N_INIT, N_LOCAL)
    at = tl.arange(0, CHUNK * NB)
    keep = (_ahead(key, at, key, at) < N_SEL) & (key >= 0)
    place = _places(keep)
    to = ((bg.to(tl.int64) * T + token) * chunks + chunk) * N_PAD
    tl.store(KEYS + to + place, key, mask=keep)
    tl.store(BLOCKS + to + place, block, mask=keep)
    kept = tl.sum(keep.to(tl.int32), 0)
    pad = tl.arange(0, N_PAD)
    tl.store(KEYS + to + pad, tl.full([N_PAD], -1, tl.int32), mask=pad >= kept)


@triton.jit
def _decode_candidates_kernel(
    LENS, PART_M, PART_L, POOLED, SPILL, TILE_MAX, KEYS, BLOCKS,
    G, H, T, splits_cmp, splits_all, n_tiles, l, d, l_sel, chunks,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, TILE_N: tl.constexpr,
    NB: tl.constexpr, CHUNK: tl.constexpr, N_SEL: tl.constexpr, N_PAD: tl.constexpr,
    N_INIT: tl.constexpr, N_LOCAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """store_candidates() of every chunk, sequence, group and token."""
    begin_next(EARLY)
    bg = tl.program_id(1)
    length = tl.load(LENS + bg // G)
    await_last(EARLY)
    store_candidates(
        tl.program_id(0), bg, tl.program_id(2), length,
        PART_M, PART_L, POOLED, SPILL, TILE_MAX, KEYS, BLOCKS, H, T, splits_cmp,
        splits_all, n_tiles, l, d, l_sel, chunks, ROWS, HEADS, SPLITS, TILE_N, NB, CHUNK, N_SEL,
        N_PAD, N_INIT, N_LOCAL,
    )  # fmt: skip


@triton.jit
def choose_blocks(
    bg, token, length, PART_M, PART_L, POOLED, SPILL, TILE_MAX, KEYS, BLOCKS,
    H, T, splits_cmp, splits_all, n_tiles, l, d, l_sel, chunks,
    ROWS: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr, TILE_N: tl.constexpr,
    NB: tl.constexpr, CHUNK: tl.constexpr, SINGLE: tl.constexpr, N: tl.constexpr,
    RANKED: tl.constexpr, N_SEL: tl.constexpr, N_PAD: tl.constexpr, N_INIT: tl.constexpr,
    N_LOCAL: tl.constexpr,
):  # fmt: skip
    """The N_SEL blocks of one token and group (Eq. 9-12): of N, which are kept, their places in
    ascending order and the blocks themselves.

    SINGLE: one chunk holds all N blocks and is summed here; else the best are among N candidates.
    RANKED compares all with all, else the n-th largest key is searched. A key of -1 is no block.
    """
    own = (length - T + token) // l_sel
    at = tl.arange(0, N)
    if SINGLE:
        block = at
        score = tl.reshape(
            tile_scores(
                0, bg, token, length, PART_M, PART_L, POOLED, SPILL, TILE_MAX, H, splits_cmp,
                splits_all, n_tiles, l, d, ROWS, HEADS, SPLITS, TILE_N, NB, CHUNK,
            ),
            [N],
        )  # fmt: skip
        key = block_keys(score, block, own, N_INIT, N_LOCAL)
        if RANKED:
            keep = _ahead(key, at, key, at) < N_SEL
        else:
            keep = _searched(key, N_SEL)
    else:
        candidates = (bg.to(tl.int64) * T + token) * chunks * N_PAD
        live = at < chunks * N_PAD
        key = tl.load(KEYS + candidates + at, mask=live, other=-1)
        block = tl.load(BLOCKS + candidates + at, mask=live, other=0)
        if RANKED:
            # Against a part of them at a time, as many as the registers hold.
            part: tl.constexpr = min(N, 64)
            rank = at * 0
            for begin in tl.static_range(0, N, part):
                other_at = begin + tl.arange(0, part)
                other = tl.load(
                    KEYS + candidates + other_at, mask=other_at < chunks * N_PAD, other=-1
                )
                rank += _ahead(key, at, other, other_at)
            keep = rank < N_SEL
        else:
            keep = _searched(key, N_SEL)
    keep = keep & (key >= 0)
    return keep, _places(keep), block
