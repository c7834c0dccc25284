"""Both ends of selection attention by keys: what the queries of a tile share, with which the sums
begin, and what becomes of the sums.

A program has 64 rows of a tile, some queries with all heads of a group. At the beginning each block
that the tile lists (tile_blocks.py) is one product, with no weight for the rows that did not choose
it. The largest score among these blocks, which a query's own neighbourhood belongs to, then stands
for the largest of all, so that fwd_by_keys_hopper.py need not look for it before it adds the
others (fwd_by_keys_sums.py says how far they may rise above it). At the end rows are divided by
their weights, and the other branches' outputs join.

A part is left to fwd_hopper.py where a row is not finite by then: a score was too large
for fp16, or 0 * NaN came from a key that only a neighbour attends. Or where the largest of a row is
so small that fp16's least steps, in the column whose scale is the smallest, are as much as what
bf16 rounds: its values are far below what is typical of V.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.launch import launch
from nsa.kernels.prefill.blocks.fwd_by_keys_sums import KeySums
from nsa.kernels.prefill.blocks.selection import Selection
from nsa.kernels.prefill.blocks.tile_blocks import EIGHT, TileBlocks
from nsa.kernels.prefill.combine import Others, gated_sum
from nsa.kernels.prefill.sums import LEAST_SUM
from nsa.kernels.row_tiles import row_tiles
from nsa.kernels.tiles import LOG2E, dot_precision

KEYS = 64  # of a block
# Three programs of 64 rows share a multiprocessor, and hide each other's loads. H200, 32k random
# blocks: 0.86 ms, with loads in flight 0.97 to 1.03, with products of 32 keys 0.97 and more.
WARPS, STAGES, REGISTERS = 4, 1, 168
END_WARPS = 2  # 32k: 0.60 ms, four 0.68


@triton.jit
def _block_attn_begin_kernel(
    Q, KD, KD2, VD, ENTRIES, LISTED, TOP, TOTAL, SUMS, SCALES, T, S, S_KV, G, q_start,
    scale_log2,
    VARLEN: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr,
    ROOM: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, EXTRA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """KeySums of QUERIES of a TILE and group over the listed blocks alone. EXTRA: columns of Q and
    K behind the D that V has."""
    # Group is the slow axis: one group's K and V stay in L2 while its tiles pass.
    part = tl.program_id(0) % (TILE // QUERIES)
    tile = tl.program_id(0) // (TILE // QUERIES)
    group = tl.program_id(1)
    at = tile.to(tl.int64) * G + group
    count = tl.load(LISTED + at)
    if count < 0:
        return
    rows = tl.arange(0, QUERIES * HEADS)
    query = rows // HEADS
    first_token = tile * TILE + part * QUERIES
    token = first_token + query
    live = token < T
    if VARLEN:  # the row of its own key, which is the last one seen
        own = token + q_start
    else:
        own = token // S * S_KV + token % S + q_start
    first_row = (first_token.to(tl.int64) * G + group) * HEADS
    row = query * G * HEADS + rows % HEADS  # from the first one on
    columns = tl.arange(0, D)
    first_q, q_place = Q + first_row * (D + EXTRA), row[:, None] * (D + EXTRA)
    q = tl.load(first_q + (q_place + columns[None, :]), mask=live[:, None], other=0.0)
    if EXTRA > 0:
        more = D + tl.arange(0, EXTRA)
        q2 = tl.load(first_q + (q_place + more[None, :]), mask=live[:, None], other=0.0)
    m = tl.full([QUERIES * HEADS], float("-inf"), tl.float32)
    l = tl.zeros([QUERIES * HEADS], tl.float32)
    acc = tl.zeros([QUERIES * HEADS, D], tl.float32)
    some = 0
    key = tl.arange(0, KEYS)
    for i in range(count):
        entry = tl.load(ENTRIES + at * ROOM + i)
        first = (entry >> 32).to(tl.int32)
        chosen = ((entry.to(tl.int32) >> (part * QUERIES + query)) & 1) > 0
        last = tl.where(chosen, own - first, -1)
        some |= entry.to(tl.int32)
        column = group * (D + EXTRA)
        s = tl.dot(q, tl.trans(KD.load([first, column])), input_precision=PRECISION)
        if EXTRA > 0:
            s = tl.dot(q2, tl.trans(KD2.load([first, column + D])), s, input_precision=PRECISION)
        s = tl.where(key[None, :] <= last[:, None], s * scale_log2, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s - m_safe[:, None])
        alpha = tl.math.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)
        v = VD.load([first, group * D])
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        m = m_new
    # Scores of -inf alone: not finite, as opposed to a row that attends nothing.
    some = (some >> (part * QUERIES + query)) & 1
    l = tl.where((m == float("-inf")) & (some > 0), float("nan"), l)
    tl.store(TOP + first_row + row, m, mask=live)
    tl.store(TOTAL + first_row + row, l, mask=live)
    sums = (acc * tl.load(SCALES + group * D + columns)[None, :]).to(tl.float16)
    place = row[:, None] * D + columns[None, :]
    tl.store(SUMS + first_row * D + place, sums, mask=live[:, None])


@triton.jit
def _block_attn_end_kernel(
    O, LSE, O_CMP, O_WIN, GATES, SUM, LISTED, WHOLE, UNDONE, TOP, TOTAL, SUMS, SCALES, T, G,
    TILE: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    OTHERS: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """QUERIES of a TILE and group; the outputs are those of _block_attn_fwd_hopper_kernel. SUMS may
    be where SUM or O is: each number is read before its place is written."""
    part = tl.program_id(0) % (TILE // QUERIES)
    tile = tl.program_id(0) // (TILE // QUERIES)
    group = tl.program_id(1)
    at = tile.to(tl.int64) * G + group
    if tl.load(LISTED + at) < 0:
        return
    rows = tl.arange(0, QUERIES * HEADS)
    query = rows // HEADS
    first_token = tile * TILE + part * QUERIES
    live = first_token + query < T
    first_row = (first_token.to(tl.int64) * G + group) * HEADS
    row = query * G * HEADS + rows % HEADS  # from the first one on
    columns = tl.arange(0, D)
    place = row[:, None] * D + columns[None, :]
    sums = tl.load(SUMS + first_row * D + place, mask=live[:, None], other=0.0).to(tl.float32)
    l = tl.load(TOTAL + first_row + row, mask=live, other=0.0)
    inverse = 1.0 / tl.load(SCALES + group * D + columns)
    acc = sums * inverse[None, :]
    largest = tl.max(tl.where(acc * 0.0 == 0.0, tl.abs(acc), float("inf")), 1)
    lost = (largest < tl.max(inverse, 0) * LEAST_SUM) & (l > 0)
    if tl.max((lost | (largest * l * 0.0 != 0.0)).to(tl.int32), 0) > 0:
        if tl.atomic_or(UNDONE + at, 1 << part, sem="relaxed") == 0:
            EIGHTS: tl.constexpr = TILE // EIGHT
            to = tl.atomic_add(WHOLE, EIGHTS, sem="relaxed")
            for i in tl.static_range(EIGHTS):
                tl.store(WHOLE + 1 + to + i, (tile * EIGHTS + i) * G + group)
        return
    # A row that attends nothing has l = 0: output 0 and lse = -inf.
    nothing = l == 0
    l = tl.where(nothing, 1.0, l)
    top = tl.load(TOP + first_row + row, mask=live, other=0.0)
    lse = tl.where(nothing, float("-inf"), (top + tl.math.log2(l)) * 0.6931471805599453)
    tl.store(LSE + first_row + row, lse, mask=live)
    out = (acc * (1.0 / l)[:, None]).to(O.dtype.element_ty)
    if KEEP:
        tl.store(O + first_row * D + place, out, mask=live[:, None])
    if OTHERS > 0:
        o_cmp, o_win = O_CMP + first_row * D + place, O_WIN + first_row * D + place
        gate = GATES + first_row * 3 + row * 3
        total = gated_sum(o_cmp, out, o_win, gate, live, live[:, None], OTHERS == 1)
        tl.store(SUM + first_row * D + place, total.to(SUM.dtype.element_ty), mask=live[:, None])


def begin_tiles(
    q: Tensor, k: Tensor, v: Tensor, by: Selection, lists: TileBlocks, sums: KeySums
) -> None:
    """Fill sums, but for their scales, of the tiles that go by keys. Contiguous inputs."""
    hq, dim = q.shape[-2:]
    width, extra = v.shape[-1], dim - v.shape[-1]
    groups, parts = k.shape[-2], lists.queries // lists.part
    launch(
        _block_attn_begin_kernel, (len(lists.counts) * parts, groups),
        q, row_tiles(k, KEYS, width), row_tiles(k, KEYS, extra or width), row_tiles(v, KEYS, width),
        lists.entries, lists.rest.listed, *sums, q.numel() // (hq * dim), *by.lengths(q, k), groups,
        by.q_start, by.softmax_scale * LOG2E, VARLEN=by.packed, TILE=lists.queries,
        QUERIES=lists.part, HEADS=hq // groups, ROOM=lists.entries.shape[-1],
        KEYS=KEYS, D=width, EXTRA=extra, PRECISION=dot_precision(q.dtype), num_warps=WARPS,
        num_stages=STAGES, maxnreg=REGISTERS,
    )  # fmt: skip


def end_tiles(
    lists: TileBlocks, sums: KeySums, out: Tensor | None, lse: Tensor, others: Others | None,
    total: Tensor,
) -> None:  # fmt: skip
    """Fill lse, and out and total as attend_blocks does, of the tiles that go by keys; those that
    are not finite go to lists.rest.whole. sums.sums may be where total is."""
    hq, width = total.shape[-2:]
    groups, parts = lists.counts.shape[1], lists.queries // lists.part
    o_cmp, o_win, gates = others or (total, None, total)
    launch(
        _block_attn_end_kernel, (len(lists.counts) * parts, groups),
        total if out is None else out, lse, o_cmp, o_cmp if o_win is None else o_win, gates, total,
        lists.rest.listed, lists.rest.whole, lists.rest.undone, *sums,
        total.numel() // (hq * width), groups, TILE=lists.queries, QUERIES=lists.part,
        HEADS=hq // groups, D=width, OTHERS=(1 if o_win is None else 2) if others else 0,
        KEEP=out is not None, num_warps=END_WARPS,
    )  # fmt: skip
