"""Forward of compressed and sliding attention on Hopper: one warp loads, two warpgroups compute.

The same function as fwd_triton.py, in Gluon, Triton's lower level, for what plain Triton cannot
say:
- 128 rows share every key tile that is read from L2, yet the two warpgroups of 64 rows run freely:
  while one does its softmax the other keeps the tensor cores busy. Both run the same instructions
  (two copies of them do not fit the caches), and nothing makes warps wait for others (warps.py).
- Within a warpgroup P V of one tile and Q K^T of the next are in flight at the same time, and the
  softmax of the next hides the product with V.
- The output is rescaled by warps, and only where a row of theirs has a new maximum.
- The few keys of a window that only neighbours of its first query see make a tile of their own
  width, whose softmax is that of the first whole tile.
- A program stays for many work items: the queries and keys of the next one arrive under the last
  products of the one before, and outputs leave on their own.
- Where no backward needs the two branches' outputs apart, one kernel does both for each work item
  and writes their sum, each by its gate.
- Compressed attention may find the scores of blocks besides, slab by slab of queries
  (choice/score_in_attention_hopper.py).
- Values are finite: of others their keys tell (marked_keys.py).

H200, bf16, D=128, 64k tokens, 64 heads in 4 groups, under the power cap of the board (clocks fall
to it with either kernel): compressed 6.8 ms against 9.7, window 512 2.1 against 3.7.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
)

from nsa.kernels.launch import launch
from nsa.kernels.prefill.choice import score_in_attention_hopper as scoring
from nsa.kernels.prefill.choice.score_topn_triton import Slab
from nsa.kernels.prefill.hopper import WIDTHS
from nsa.kernels.prefill.marked_keys import marked
from nsa.kernels.prefill.packs import packed_bounds, packed_tiles, sequence_of
from nsa.kernels.prefill.releases import (
    carve,
    from_head,
    head_address,
    make_store,
    program_barrier,
    store_of,
    tma_load,
    tma_store,
    view,
    warpgroup_mma_wait,
)
from nsa.kernels.prefill.span.common import span_hi, span_lo
from nsa.kernels.prefill.span.kinds import COMPRESSED, Span
from nsa.kernels.prefill.warps import (
    LEAST_REGISTERS,
    START_REGISTERS,
    UNIT,
    arrive,
    await_phase,
    await_phase_if,
    check_address,
    first_barrier,
    place_of_rows,
    put_aside,
    rescaled,
    rounded_here,
    store_tile,
    taken_back,
    warp_number,
)
from nsa.kernels.row_tiles import descriptor, shared_layout
from nsa.kernels.tiles import LOG2E, cdiv, sm_count

ROWS = 128  # of a work item, 64 for each warpgroup's products
WARPS = 8
Q_STAGES = gl.constexpr(2)  # work items whose queries are in flight
# Numbers of barriers: queries are there, their place is free, an output is in it; then of the key
# tiles, and their values, as many as there are places.
Q_FULL, Q_EMPTY, O_FULL, RING = (gl.constexpr(i * Q_STAGES.value) for i in range(4))
K_FULL, K_EMPTY, V_FULL, V_EMPTY = (gl.constexpr(i) for i in range(4))


@gluon.jit
def _work(
    item, ITEMS, CU_Q, SQ, G: gl.constexpr, BATCH, slab_begin, VARLEN: gl.constexpr,
    QUERIES: gl.constexpr,
):  # fmt: skip
    """What a work item is: its group, sequence, where that lies in Q, and its first query, which is
    slab_begin in the first one of a sequence.

    Late queries see most keys: they come first, so that the last items are short.
    """
    if VARLEN:
        group = item % G
        batch, tile = sequence_of(ITEMS // G - 1 - item // G, CU_Q, BATCH, QUERIES)
        q_begin, q_len = packed_bounds(CU_Q, batch, BATCH, SQ)
        q0 = tile * QUERIES
    else:
        group = item % G
        batch = item // G % BATCH
        q0 = slab_begin + (ITEMS // G // BATCH - 1 - item // G // BATCH) * QUERIES
        q_begin = batch * SQ
        q_len = SQ
    return group, batch, q0, q_begin, q_len


@gluon.jit
def _keys(batch, CU_K, SK, VARLEN: gl.constexpr):
    """Where the keys of a sequence lie: (row of the descriptor's first axis, first key, keys)."""
    if VARLEN:
        k_begin, k_len = packed_bounds(CU_K, batch, SK, 0)
        return 0, k_begin, k_len
    else:
        return batch, 0, SK


@gluon.jit
def _key_tiles(
    q0, q_len, k_len, q_start, a, b: gl.constexpr,
    MODE: gl.constexpr, QUERIES: gl.constexpr, BLOCK_N: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """(first key, tiles, tiles from the first that need a mask, first of the last that do).

    Sliding spans start at the first visible key, wherever that is: tiles need no alignment. Behind
    the tiles come NARROW more keys, where only few are seen.
    """
    first = q0 + q_start
    last = gl.minimum(q0 + QUERIES, q_len) - 1 + q_start
    begin = span_lo(first, a, MODE)
    lo_last = span_lo(last, a, MODE)
    hi_first = gl.minimum(span_hi(first, a, b, MODE), k_len)
    hi_last = gl.minimum(span_hi(last, a, b, MODE), k_len)
    # At least one tile, fully masked where nothing is seen: rows without a key need no own path.
    tiles = gl.maximum((hi_last - begin - NARROW + BLOCK_N - 1) // BLOCK_N, 1)
    full_begin = gl.minimum((lo_last - begin + BLOCK_N - 1) // BLOCK_N, tiles)
    full_end = gl.minimum(gl.maximum(gl.maximum(hi_first - begin, 0) // BLOCK_N, full_begin), tiles)
    return begin, tiles, full_begin, full_end


@gluon.jit
def _barrier(kind: gl.constexpr, count, STAGES: gl.constexpr):
    """Number of the barrier of that kind for key tile `count`."""
    return RING + kind * STAGES + count % STAGES


@gluon.jit
def _await(first, kind: gl.constexpr, count, STAGES: gl.constexpr):
    """Wait for key tile `count`, or for its values."""
    await_phase(first, _barrier(kind, count, STAGES), (count // STAGES) & 1)


@gluon.jit
def _await_if(asked, first, kind: gl.constexpr, count, STAGES: gl.constexpr):
    """_await where `asked` is true."""
    await_phase_if(asked, first, _barrier(kind, count, STAGES), (count // STAGES) & 1)


@gluon.jit
def _free(first, kind: gl.constexpr, count, STAGES: gl.constexpr):
    """This warp has no more use for key tile `count`, or for its values."""
    arrive(first, _barrier(kind, count, STAGES))


@gluon.jit
def _tile(memory, count, KEYS: gl.constexpr):
    """The place [1, KEYS, D] of key tile `count`, which may take less than all of it."""
    place = memory.index(count % memory.shape[0])
    if KEYS < memory.shape[2]:
        place = view(place, memory.dtype, [1, KEYS, memory.shape[3]], memory.layout)
    return place


@gluon.jit
def _bring(XDS, batch, row, column, memories, bars, full: gl.constexpr, empty: gl.constexpr, count):
    """Start the load of key tile `count`, or of its values, part by part, once its place is
    free."""
    STAGES: gl.constexpr = memories[0].shape[0]
    mbarrier.wait(bars.index(_barrier(empty, count, STAGES)), (count // STAGES) & 1 ^ 1)
    bar = bars.index(_barrier(full, count, STAGES))
    if len(XDS) > 1:
        mbarrier.expect(bar, XDS[0].block_type.nbytes + XDS[1].block_type.nbytes)
    else:
        mbarrier.expect(bar, XDS[0].block_type.nbytes)
    for part in gl.static_range(len(XDS)):
        place = _tile(memories[part], count, XDS[part].block_type.shape[1])
        tma_load(XDS[part], [batch, row, column + part * XDS[0].block_type.shape[2]], bar, place)


@gluon.jit
def _bring_span(
    span, q0, q_len, batch, group, k_mems, v_mem, bars, count,
    MODE: gl.constexpr, BLOCK_N: gl.constexpr, NARROW: gl.constexpr, b: gl.constexpr,
    VARLEN: gl.constexpr, QUERIES: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """The narrow keys, and the tiles from the last to the first; returns how many there are now."""
    KDS, VD, KNS, VN, CU_K, SK, q_start, a = span
    WIDTH: gl.constexpr = v_mem.shape[3]
    of_k, of_v = group * (WIDTH + EXTRA), group * WIDTH
    k_batch, k_begin, k_len = _keys(batch, CU_K, SK, VARLEN)
    begin, tiles, _, _ = _key_tiles(q0, q_len, k_len, q_start, a, b, MODE, QUERIES, BLOCK_N, NARROW)
    if NARROW > 0:
        row = k_begin + begin + tiles * BLOCK_N
        _bring(KNS, k_batch, row, of_k, k_mems, bars, K_FULL, K_EMPTY, count)
        _bring((VN,), k_batch, row, of_v, (v_mem,), bars, V_FULL, V_EMPTY, count)
        count += 1
    for j in range(tiles):
        row = k_begin + begin + (tiles - 1 - j) * BLOCK_N
        _bring(KDS, k_batch, row, of_k, k_mems, bars, K_FULL, K_EMPTY, count)
        _bring((VD,), k_batch, row, of_v, (v_mem,), bars, V_FULL, V_EMPTY, count)
        count += 1
    return count


@gluon.jit
def _produce(
    QDS, spans, q_mems, k_mems, v_mem, bars, CU_Q, SQ, G: gl.constexpr, BATCH, ITEMS, slab_begin,
    TILES: gl.constexpr, VARLEN: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """One warp: queries, then the key tiles of each span, item after item."""
    QUERIES: gl.constexpr = QDS[0].block_type.shape[0]
    HEADS: gl.constexpr = QDS[0].block_type.shape[1]
    WIDTH: gl.constexpr = QDS[0].block_type.shape[2]
    done = 0
    count = 0
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        group, batch, q0, q_begin, q_len = _work(
            item, ITEMS, CU_Q, SQ, G, BATCH, slab_begin, VARLEN, QUERIES
        )
        at = done % Q_STAGES
        mbarrier.wait(bars.index(Q_EMPTY + at), (done // Q_STAGES) & 1 ^ 1)
        bar = bars.index(Q_FULL + at)
        if EXTRA > 0:
            mbarrier.expect(bar, QDS[0].block_type.nbytes + QDS[1].block_type.nbytes)
        else:
            mbarrier.expect(bar, QDS[0].block_type.nbytes)
        for part in gl.static_range(len(QDS)):
            where = [q_begin + q0, group * HEADS, part * WIDTH]
            tma_load(QDS[part], where, bar, q_mems[part].index(at))
        done += 1
        for i in gl.static_range(len(TILES)):
            count = _bring_span(
                spans[i], q0, q_len, batch, group, k_mems, v_mem, bars, count,
                TILES[i][0], TILES[i][1], TILES[i][2], TILES[i][3], VARLEN, QUERIES, EXTRA,
            )  # fmt: skip


@gluon.jit
def _masked(s, n0, q0, q_start, a, b: gl.constexpr, k_len, MODE: gl.constexpr, HEADS: gl.constexpr):
    """Scores with -inf where a row does not see a key; n0: the tile's first key, q0: query."""
    LAYOUT: gl.constexpr = s.type.layout
    t = q0 + gl.arange(0, s.shape[0], gl.SliceLayout(1, LAYOUT)) // HEADS + q_start
    # A thread's columns are constants and one number of the thread: [rows, keys / 8, 4 threads, 2].
    parts = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    NO_TWO: gl.constexpr = gl.SliceLayout(3, parts.type.layout)
    NO_THREAD: gl.constexpr = gl.SliceLayout(2, NO_TWO)
    eight = gl.arange(0, s.shape[1] // 8, gl.SliceLayout(0, NO_THREAD))
    thread = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, NO_TWO)))
    NO_EIGHT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, parts.type.layout))
    two = gl.arange(0, 2, gl.SliceLayout(0, NO_EIGHT))
    at = (eight * 8)[None, :, None, None] + two[None, None, None, :]
    before = n0 + (thread * 2)[None, None, :, None]
    hi = gl.minimum(span_hi(t, a, b, MODE), k_len)
    hi = gl.convert_layout(hi, gl.SliceLayout(1, NO_THREAD), assert_trivial=True)
    seen = at < hi[:, None, None, None] - before
    if MODE == 1:
        lo = span_lo(t, a, MODE)
        lo = gl.convert_layout(lo, gl.SliceLayout(1, NO_THREAD), assert_trivial=True)
        seen = seen & (at >= lo[:, None, None, None] - before)
    parts = gl.where(seen, parts, float("-inf"))
    return gl.convert_layout(parts.reshape(s.shape), LAYOUT, assert_trivial=True)


@gluon.jit
def _softmax(
    s, m, l, n0, full, q0, q_start, a, b: gl.constexpr, k_len, scale_log2,
    MODE: gl.constexpr, HEADS: gl.constexpr, LEAD: gl.constexpr,
):  # fmt: skip
    """Online softmax of one tile in base 2, relative to m; alpha rescales what was summed before.
    m is the maximum less LEAD.

    The bounds of the rows, which start at query q0, are found anew for every tile that is not
    full: they are few, and registers are short.
    """
    if not full:
        s = _masked(s, n0, q0, q_start, a, b, k_len, MODE, HEADS)
    m_new = gl.max(s, 1) * scale_log2
    # The maximum so far serves until scores pass it by 8: hardly ever is the output rescaled then.
    # Where nothing was seen so far any finite number will do.
    m_safe = gl.maximum(gl.where(m_new > m + (8.0 + LEAD), m_new - LEAD, m), -1.0e30)
    p = gl.exp2(s * scale_log2 - m_safe[:, None])
    alpha = gl.exp2(m - m_safe)
    return p, m_safe, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _scores(qs, count, k_mems, KEYS: gl.constexpr):
    """Start Q K^T of key tile `count`, part by part of a head."""
    ROWS: gl.constexpr = qs[0].shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    s = gl.zeros([ROWS, KEYS], gl.float32, layout)
    for part in gl.static_range(len(qs)):
        k = _tile(k_mems[part], count, KEYS).reshape([KEYS, k_mems[part].shape[3]])
        s = warpgroup_mma(qs[part], k.permute((1, 0)), s, use_acc=part > 0, is_async=True)
    return s


@gluon.jit
def _rescaled(acc, alpha):
    """The output so far, relative to the maxima now."""
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
    return rescaled(acc, alpha)


@gluon.jit
def _output(acc, p, count, v_mem, first):
    """Start the product of the probabilities of tile `count` with its values."""
    KEYS: gl.constexpr = p.shape[1]
    _await(first, V_FULL, count, v_mem.shape[0])
    v = _tile(v_mem, count, KEYS).reshape([KEYS, v_mem.shape[3]])
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _first_scores(qs, count, k_mems, first, BLOCK_N: gl.constexpr, NARROW: gl.constexpr):
    """Start Q K^T of the NARROW keys and of the last tile, whose number comes with them."""
    STAGES: gl.constexpr = k_mems[0].shape[0]
    if NARROW > 0:
        _await(first, K_FULL, count, STAGES)
        few = _scores(qs, count, k_mems, NARROW)
        count += 1
    _await(first, K_FULL, count, STAGES)
    s = _scores(qs, count, k_mems, BLOCK_N)
    if NARROW == 0:
        few = s
    return few, s, count


@gluon.jit
def _attend(
    few, s, qs, q0, q_len, batch, span, k_mems, v_mem, first, count, scale_log2, sums, aside, to,
    MODE: gl.constexpr, BLOCK_N: gl.constexpr, NARROW: gl.constexpr, b: gl.constexpr,
    VARLEN: gl.constexpr, HEADS: gl.constexpr, QUERIES: gl.constexpr, SCORED: gl.constexpr,
):  # fmt: skip
    """A span's attention, whose _first_scores are given: output (its last product may still run),
    maxima and sums of the rows, the number of the last key tile, and how many there were. SCORED:
    its probabilities are pooled to blocks (choice/score_in_attention_hopper.py); to: of the work
    item before address of the scores, n_ld, tiles; and what scoring.weights gives.

    The NARROW keys and the last tile come first, in one softmax. Loop state: probabilities pf of
    the newest tile (their product with V is yet to start) and the output acc of the tiles before
    (its last product may still run).
    """
    KDS, VD, KNS, VN, CU_K, SK, q_start, a = span
    STAGES: gl.constexpr = v_mem.shape[0]
    ROWS: gl.constexpr = qs[0].shape[0]
    D: gl.constexpr = v_mem.shape[3]
    DTYPE: gl.constexpr = v_mem.dtype
    WARPS: gl.constexpr = gl.num_warps()
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    _, _, k_len = _keys(batch, CU_K, SK, VARLEN)
    begin, tiles, full_begin, full_end = _key_tiles(
        q0, q_len, k_len, q_start, a, b, MODE, QUERIES, BLOCK_N, NARROW
    )
    # bf16 values may be near the largest numbers of fp32: probabilities up to 1 there, not 256.
    LEAD: gl.constexpr = -8.0 if DTYPE == gl.bfloat16 else scoring.LEAD if SCORED else 0.0
    if SCORED:
        out, n_ld, tiles_before, own, corner = to
        lse2 = scoring.begin(sums, aside)
        before = (out, n_ld, tiles_before, lse2)
        scoring.score(tiles, tiles_before, sums, lse2, aside, out, n_ld, HEADS)
    m = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    l = gl.zeros([ROWS], gl.float32, row_layout)
    if NARROW > 0:
        few, s = warpgroup_mma_wait(0, deps=(few, s))
        few_rows: gl.constexpr = gl.SliceLayout(1, few.type.layout)
        _free(first, K_EMPTY, count - 1, STAGES)
        few = _masked(few, begin + tiles * BLOCK_N, q0, q_start, a, b, k_len, MODE, HEADS)
        m = gl.convert_layout(gl.max(few, 1), row_layout, assert_trivial=True) * scale_log2
    else:
        s = warpgroup_mma_wait(0, deps=(s,))
    _free(first, K_EMPTY, count, STAGES)
    pf, m, l, alpha = _softmax(
        s, m, l, begin + (tiles - 1) * BLOCK_N,
        # Without narrow keys the last tile is masked for nearly every item.
        (tiles > full_begin) & (tiles <= full_end) if NARROW > 0 else False,
        q0, q_start, a, b, k_len, scale_log2, MODE, HEADS, LEAD,
    )  # fmt: skip
    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    if NARROW > 0:
        top = gl.convert_layout(m, few_rows, assert_trivial=True)
        few = gl.exp2(few * scale_log2 - top[:, None])
        l += gl.convert_layout(gl.sum(few, 1), row_layout, assert_trivial=True)
        alpha = gl.full([ROWS], 1.0, gl.float32, row_layout)  # all by the same maximum
        _await(first, V_FULL, count - 1, STAGES)
        v = _tile(v_mem, count - 1, NARROW).reshape([NARROW, D])
        few = gl.convert_layout(rounded_here(few, DTYPE), p_layout)
        acc = warpgroup_mma(few, v, acc, use_acc=False, is_async=True)
    _await_if(tiles > 1, first, K_FULL, count + 1, STAGES)
    if NARROW > 0:
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _free(first, V_EMPTY, count - 1, STAGES)
    for j in range(1, tiles):
        count += 1
        tile = tiles - 1 - j
        p = rounded_here(pf, DTYPE)
        if SCORED:
            pooled = scoring.pool(p, own, tile + 1, sums)
            acc = _rescaled(acc, alpha)  # whose branch keeps the next product behind those
        s = _scores(qs, count, k_mems, BLOCK_N)
        if not SCORED:
            acc = _rescaled(acc, alpha)
        acc = _output(acc, gl.convert_layout(p, p_layout), count - 1, v_mem, first)
        if SCORED:
            scoring.put(pooled, m, alpha, corner, tile + 1, sums, aside, before, HEADS)
        s = warpgroup_mma_wait(1, deps=(s,))
        _free(first, K_EMPTY, count, STAGES)
        pf, m, l, alpha = _softmax(
            s, m, l, begin + tile * BLOCK_N, (tile >= full_begin) & (tile < full_end),
            q0, q_start, a, b, k_len, scale_log2, MODE, HEADS, LEAD,
        )  # fmt: skip
        # The branch in this wait keeps the softmax above the wait for the product below, where
        # the assembler would not leave it: it hides the product.
        _await_if(j + 1 < tiles, first, K_FULL, count + 1, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _free(first, V_EMPTY, count - 1, STAGES)
    p = rounded_here(pf, DTYPE)
    if SCORED:
        pooled = scoring.pool(p, own, 0, sums)
    acc = _rescaled(acc, alpha)
    acc = _output(acc, gl.convert_layout(p, p_layout), count, v_mem, first)
    if SCORED:
        scoring.put(pooled, m, alpha, corner, 0, sums, aside, before, HEADS)
    return acc, m, l, count, tiles


@gluon.jit
def _consume(
    O, LSE, GATES, scored, spans, q_mems, k_mems, v_mem, CU_Q, SQ, G: gl.constexpr, BATCH, ITEMS,
    scale_log2, slab_begin,
    TILES: gl.constexpr, VARLEN: gl.constexpr, SCORED: gl.constexpr, Q_AT: gl.constexpr,
    ASIDE_AT: gl.constexpr, HEAD_AT: gl.constexpr,
):  # fmt: skip
    """Two warpgroups: softmax and output of 64 rows each of every work item; of two spans the sum
    of their outputs, each by its gate. Q_AT, ASIDE_AT: where memories begin, in bytes from
    the head of the store, which is at HEAD_AT."""
    SCORES, SUMS, slab_rows, n_ld, room = scored
    QUERIES: gl.constexpr = q_mems[0].shape[1]
    HEADS: gl.constexpr = q_mems[0].shape[2]
    ROWS: gl.constexpr = QUERIES * HEADS
    D: gl.constexpr = v_mem.shape[3]
    STAGES: gl.constexpr = v_mem.shape[0]
    PAIR: gl.constexpr = len(TILES) == 2
    DTYPE: gl.constexpr = v_mem.dtype
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)
    first = first_barrier(HEAD_AT)
    warp = warp_number()
    aside = first + scoring.ASIDE + warp * 32
    sums = scoring.sums_of_warp(SUMS, warp, room)
    # Of the item before: where its scores go, and how many tiles of sums it left.
    before = SCORES.to(gl.int64)
    tiles_before = 0
    if SCORED > 0:
        own, corner = scoring.weights(DTYPE)
    else:
        own, corner = 0, 0
    done = 0
    count = 0
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        group, batch, q0, q_begin, q_len = _work(
            item, ITEMS, CU_Q, SQ, G, BATCH, slab_begin, VARLEN, QUERIES
        )
        at = done % Q_STAGES
        await_phase(first, Q_FULL + at, (done // Q_STAGES) & 1)
        qs = (q_mems[0].index(at).reshape([ROWS, D]),)
        if len(q_mems) > 1:
            qs = qs + (q_mems[1].index(at).reshape([ROWS, q_mems[1].shape[3]]),)
        rows = gl.arange(0, ROWS, row_layout)
        t = q0 + rows // HEADS
        live = t < q_len
        row = (q_begin + t).to(gl.int64) * (G * HEADS) + group * HEADS + rows % HEADS
        few, s, count = _first_scores(qs, count, k_mems, first, TILES[0][1], TILES[0][2])
        for i in gl.static_range(len(TILES)):
            if PAIR:  # gates of compressed, selected and sliding attention
                gate = gl.load(GATES + row * 3 + 2 * i, mask=live, other=0.0)
            acc, m, l, count, tiles = _attend(
                few, s, qs, q0, q_len, batch, spans[i], k_mems, v_mem, first, count, scale_log2,
                sums, aside, (before, n_ld, tiles_before, own, corner), TILES[i][0], TILES[i][1],
                TILES[i][2], TILES[i][3], VARLEN, HEADS, QUERIES, SCORED > 0 and i == 0,
            )  # fmt: skip
            last = count
            if i + 1 < len(TILES):
                few, s, count = _first_scores(
                    qs, count + 1, k_mems, first, TILES[-1][1], TILES[-1][2]
                )
            l = gl.convert_layout(l, row_layout, assert_trivial=True)
            if i == 0:
                # A row that sees no key has l = 0: output 0 and lse = -inf; NaN gives NaN.
                m = gl.convert_layout(m, row_layout, assert_trivial=True)
                lse2 = gl.where(l != 0, m + gl.log2(l), float("-inf"))
                gl.store(LSE + row, lse2 * 0.6931471805599453, mask=live)
                if SCORED > 0:
                    # Rows that see no compressed key contribute nothing, nor do heads of padding.
                    lse2 = gl.where(l > 0, lse2, float("inf"))
                    if SCORED < HEADS:
                        lse2 = gl.where(rows % HEADS < SCORED, lse2, float("inf"))
                    to = (batch * G + group).to(gl.int64) * slab_rows + q0 - slab_begin
                    before = SCORES.to(gl.int64) + (to + warp * (16 // HEADS)) * n_ld * 4
                    tiles_before = tiles
                    scoring.finish(m, lse2, tiles, sums, aside, before, n_ld, HEADS, DTYPE)
            # One that sees keys, but with scores of -inf alone, has NaN.
            _, _, _, _, _, _, q_start, a = spans[i]
            nothing = batch == BATCH  # rows of no sequence
            if TILES[i][0] == 0:  # compressed: before the end of the first block, too
                nothing = nothing | (t + q_start + 1 < a)
            none = gl.where(nothing, 1.0, float("nan"))
            inv = 1.0 / gl.where(l > 0, l, none)
            if PAIR:
                inv = inv * gate.to(gl.float32)
            if i + 1 < len(TILES):
                acc = warpgroup_mma_wait(2 if TILES[-1][2] > 0 else 1, deps=(acc,))
            else:
                acc = warpgroup_mma_wait(0, deps=(acc,))
            _free(first, V_EMPTY, last, STAGES)
            acc = acc * inv[:, None]
            if i + 1 < len(TILES):
                put_aside(acc.to(DTYPE), first + ASIDE_AT)
            elif PAIR:
                acc += taken_back(acc, first + ASIDE_AT, DTYPE).to(gl.float32)
        out = acc.to(DTYPE)
        if q0 + QUERIES <= q_len:
            # The output leaves through the place of the queries, which no warp of the group reads
            # any more: all had to come to their last product together.
            store_tile(out, place_of_rows(first + Q_AT + at * (ROWS * D * 2)))
        else:
            columns = gl.arange(0, D, gl.SliceLayout(0, o_layout))
            gl.store(O + row[:, None] * D + columns[None, :], out, mask=live[:, None])
        arrive(first, O_FULL + at)
        done += 1
        count += 1
    if SCORED:
        lse2 = scoring.begin(sums, aside)
        scoring.score(0, tiles_before, sums, lse2, aside, before, n_ld, HEADS)


@gluon.jit
def _send(
    OD, q_mem, bars, CU_Q, SQ, G: gl.constexpr, BATCH, ITEMS, slab_begin, VARLEN: gl.constexpr
):
    """One warp: outputs to global memory; then their place is free for queries."""
    QUERIES: gl.constexpr = q_mem.shape[1]
    HEADS: gl.constexpr = q_mem.shape[2]
    done = 0
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        group, _, q0, q_begin, q_len = _work(
            item, ITEMS, CU_Q, SQ, G, BATCH, slab_begin, VARLEN, QUERIES
        )
        at = done % Q_STAGES
        mbarrier.wait(bars.index(O_FULL + at), (done // Q_STAGES) & 1)
        # The rows past the end of a sequence may be those of another.
        if q0 + QUERIES <= q_len:
            tma_store(OD, [q_begin + q0, group * HEADS, 0], q_mem.index(at))
            tma.store_wait(0)
        mbarrier.arrive(bars.index(Q_EMPTY + at), count=1)
        done += 1


@gluon.jit
def _run(
    QDS, spans, OD, O, LSE, GATES, scored, CU_Q, SQ, G: gl.constexpr, BATCH, ITEMS, scale_log2,
    slab_begin,
    TILES: gl.constexpr, VARLEN: gl.constexpr, SCORED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """scored: SCORES and the memory of choice/score_in_attention_hopper.py, rows of a slab, n_ld,
    tiles of a warp;
    spans: of each the descriptors of its keys and values, whole tiles and narrow ones, where its
    keys lie, the position of query 0 among them, and a of Span; TILES: see Tiles.compiled. All
    spans' tiles take turns in the places of the first one's, which are the widest. Queries and keys
    go in one part, as wide as values, or in two, the second of which has the columns behind."""
    QD = QDS[0]
    KDS = spans[0][0]
    KD = KDS[0]
    DTYPE: gl.constexpr = QD.dtype
    PARTS: gl.constexpr = len(QDS)
    EXTRA: gl.constexpr = QDS[1].block_type.shape[2] if PARTS > 1 else 0
    Q_UNITS: gl.constexpr = QD.block_type.nbytes // UNIT
    K_UNITS: gl.constexpr = KD.block_type.nbytes // UNIT
    K_AT: gl.constexpr = 1 + Q_STAGES * Q_UNITS
    V_AT: gl.constexpr = K_AT + STAGES * K_UNITS
    ASIDE_AT: gl.constexpr = V_AT + STAGES * K_UNITS
    Q2_AT: gl.constexpr = ASIDE_AT + (len(TILES) - 1) * Q_UNITS
    K2_AT: gl.constexpr = Q2_AT + (Q_STAGES * QDS[1].block_type.nbytes // UNIT if PARTS > 1 else 0)
    UNITS: gl.constexpr = K2_AT + (STAGES * KDS[1].block_type.nbytes // UNIT if PARTS > 1 else 0)
    STORE: gl.constexpr = store_of(UNITS, UNIT, 1, Q_UNITS)
    HEAD_AT: gl.constexpr = head_address(STORE)
    store = make_store(STORE)
    check_address(store, HEAD_AT)
    bars = carve(store, 0, gl.int64, [RING + 4 * STAGES, 1], mbarrier.MBarrierLayout())
    q_mem = carve(store, 1, DTYPE, [Q_STAGES] + QD.block_type.shape, QD.layout)
    k_mem = carve(store, K_AT, DTYPE, [STAGES] + KD.block_type.shape, KD.layout)
    v_mem = carve(store, V_AT, DTYPE, [STAGES] + KD.block_type.shape, KD.layout)
    q_mems = (q_mem,)
    k_mems = (k_mem,)
    if PARTS > 1:
        q2_mem = carve(store, Q2_AT, DTYPE, [Q_STAGES] + QDS[1].block_type.shape, QD.layout)
        k2_mem = carve(store, K2_AT, DTYPE, [STAGES] + KDS[1].block_type.shape, KD.layout)
        q_mems = (q_mem, q2_mem)
        k_mems = (k_mem, k2_mem)
    WARPS: gl.constexpr = gl.num_warps()
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(bars.index(Q_FULL + i), count=1)
        mbarrier.init(bars.index(Q_EMPTY + i), count=1)
        mbarrier.init(bars.index(O_FULL + i), count=WARPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(_barrier(K_FULL, i, STAGES)), count=1)
        mbarrier.init(bars.index(_barrier(K_EMPTY, i, STAGES)), count=WARPS)
        mbarrier.init(bars.index(_barrier(V_FULL, i, STAGES)), count=1)
        mbarrier.init(bars.index(_barrier(V_EMPTY, i, STAGES)), count=WARPS)
    program_barrier()
    gl.warp_specialize([
        (_consume, (
            O, LSE, GATES, scored, spans, q_mems, k_mems, v_mem, CU_Q, SQ, G, BATCH, ITEMS,
            scale_log2, slab_begin, TILES, VARLEN, SCORED,
            from_head(STORE, 1), from_head(STORE, ASIDE_AT), HEAD_AT,
        )),
        (_produce, (
            QDS, spans, q_mems, k_mems, v_mem, bars, CU_Q, SQ, G, BATCH, ITEMS, slab_begin, TILES,
            VARLEN, EXTRA,
        )),
        (_send, (OD, q_mem, bars, CU_Q, SQ, G, BATCH, ITEMS, slab_begin, VARLEN)),
    ], [1, 1], [LEAST_REGISTERS, LEAST_REGISTERS])  # fmt: skip


@gluon.jit
def _span_fwd_hopper_kernel(
    QD, KD, VD, KN, VN, QD2, KD2, KN2, OD, O, LSE, SCORES, SUMS, CU_Q, CU_K, SQ, SK, BATCH, ITEMS,
    q_start, a, scale_log2, slab_begin, slab_rows, n_ld, room,
    TILES: gl.constexpr, VARLEN: gl.constexpr, SCORED: gl.constexpr, STAGES: gl.constexpr,
    G: gl.constexpr, WIDER: gl.constexpr,
):  # fmt: skip
    """One span: its output and LSE; SCORED: of compressed attention block scores too, by so many
    heads of a group. WIDER: Q and K have columns behind as many as V has, which the descriptors
    with a 2 bring."""
    QDS = (QD,)
    KDS = (KD,)
    KNS = (KN,)
    if WIDER:
        QDS = (QD, QD2)
        KDS = (KD, KD2)
        KNS = (KN, KN2)
    spans = ((KDS, VD, KNS, VN, CU_K, SK, q_start, a),)
    scored = (SCORES, SUMS, slab_rows, n_ld, room)
    _run(
        QDS, spans, OD, O, LSE, LSE, scored, CU_Q, SQ, G, BATCH, ITEMS, scale_log2, slab_begin,
        TILES, VARLEN, SCORED, STAGES,
    )  # fmt: skip


@gluon.jit
def _span_pair_fwd_hopper_kernel(
    QD, KD, VD, KW, VW, KN, VN, OD, O, LSE, GATES, SCORES, SUMS, CU_Q, CU_K, SQ, SK, SW, BATCH,
    ITEMS, q_start, win_start, l, window, scale_log2, slab_begin, slab_rows, n_ld, room,
    TILES: gl.constexpr, VARLEN: gl.constexpr, SCORED: gl.constexpr, STAGES: gl.constexpr,
    G: gl.constexpr,
):  # fmt: skip
    """Compressed attention, with its LSE, and sliding attention: the sum of both by their gates;
    SCORED: block scores too, by so many heads of a group."""
    spans = (
        ((KD,), VD, (KD,), VD, CU_K, SK, q_start, l),
        ((KW,), VW, (KN,), VN, CU_Q, SW, win_start, window),
    )
    scored = (SCORES, SUMS, slab_rows, n_ld, room)
    _run(
        (QD,), spans, OD, O, LSE, GATES, scored, CU_Q, SQ, G, BATCH, ITEMS, scale_log2, slab_begin,
        TILES, VARLEN, SCORED, STAGES,
    )  # fmt: skip


TAKES = (
    "16-bit heads, 64 or 128 wide for Dk = Dv or 192 and 128, a power of two of up to 64 a group"
)


def usable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether this module takes the call: see TAKES, and contiguous tensors."""
    heads, dim = q.shape[-2] // k.shape[-2], q.shape[-1]
    if q.element_size() != 2 or heads > ROWS // 2 or heads & (heads - 1):
        return False
    if (dim, v.shape[-1]) not in WIDTHS:
        return False
    # Numbers of rows are 32-bit coordinates of a descriptor.
    if max(q.numel() // (q.shape[-2] * dim), k.numel() // (k.shape[-2] * dim)) >= 1 << 31:
        return False
    return all(x.numel() and x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k, v))


@dataclass(frozen=True)
class Tiles:
    """Of a span: keys of a tile and of the narrow one (0: none), how many tiles are in flight."""

    span: Span
    keys: int
    narrow: int
    stages: int = 2

    @property
    def compiled(self) -> tuple[int, int, int, int]:
        """What a kernel is compiled for: (mode, keys, narrow, b of Span, by which it divides)."""
        return self.span.mode, self.keys, self.narrow, self.span.b


def hopper_tiles(span: Span, queries: int, wider: bool = False) -> Tiles:
    """Tiles for work items of so many queries; wider: of heads that take more memory for Q and K.

    H200, D = 128: more stages change nothing. A window of 512 is whole tiles for one query, and the
    narrow one takes the few keys that its neighbours see besides (64k tokens, 64 heads in 4 groups:
    2.44 -> 2.02 ms).
    """
    narrow = max(16, queries) if queries <= 64 and span.mode != COMPRESSED else 0
    if wider:
        return Tiles(span, 64, narrow, 3)
    if span.mode == COMPRESSED:
        return Tiles(span, 128, 0)
    if span.a % 128 and span.a < 1024:  # wide tiles would waste more
        return Tiles(span, 64, narrow, 4)
    return Tiles(span, 128, narrow)


def _key_descriptors(k: torch.Tensor, v: torch.Tensor, tiles: Tiles, varlen: bool) -> list[Any]:
    """Descriptors of whole tiles of keys and values, then of the narrow ones; then of the columns
    that keys have behind as many as values."""
    rows = (1, -1) if varlen else k.shape[:2]
    layout = shared_layout(128, 16, 3)
    width = v.shape[-1]
    lengths = tiles.keys, tiles.narrow or tiles.keys
    tile = lambda x, n, columns: descriptor(
        x.view(*rows, x.shape[-2] * x.shape[-1]), (1, n, columns), layout
    )
    found = [tile(x, n, width) for n in lengths for x in (k, v)]
    more = k.shape[-1] - width
    return found + [tile(k, n, more) for n in lengths] if more else found


@dataclass(frozen=True)
class _Work:
    """What a launch knows of its queries; of packed ones sq are all of them, as for Rows."""

    batch: int
    sq: int
    items: int
    tile: tuple[int, int, int]  # queries, heads and width of a work item's output
    extra: int  # columns of Q behind that

    @classmethod
    def of(cls, q: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor | None) -> _Work:
        groups, width = v.shape[-2:]
        heads = q.shape[-2] // groups
        queries = ROWS // heads
        tile, extra = (queries, heads, width), q.shape[-1] - width
        if cu_q is None:
            batch, sq = q.shape[:2]
            return cls(batch, sq, cdiv(sq, queries) * batch * groups, tile, extra)
        tiles = packed_tiles(q.shape[0], queries, cu_q)
        return cls(cu_q.numel() - 1, q.shape[0], tiles * groups, tile, extra)

    def descriptor(self, x: torch.Tensor, columns: int | None = None) -> Any:
        tile = (*self.tile[:2], columns or self.tile[2])
        return descriptor(x.view(-1, *x.shape[-2:]), tile, shared_layout(128, 16, 3))

    def slabs(
        self, slabs: Iterable[Slab] | None, lse: torch.Tensor, k: torch.Tensor
    ) -> Iterator[tuple[int, tuple]]:
        """(work items, what the kernels take for a slab) of every launch; without scores one for
        all queries."""
        if slabs is None:
            yield self.items, (lse, lse, 0, 0, 0, 0)
            return
        room = scoring.room(k.shape[1])
        sums = scoring.memory(k.device, k.shape[1], WARPS)
        for slab in slabs:
            items = cdiv(slab.queries, self.tile[0]) * (self.items // cdiv(self.sq, self.tile[0]))
            yield items, (slab.scores, sums, slab.begin, slab.rows, slab.n_ld, room)

    def tiles(self, span: Span) -> Tiles:
        return hopper_tiles(span, self.tile[0], self.extra > 0)


def scores_tile(heads: int) -> tuple[int, int]:
    """(queries, keys) of what is scored together, as the ranking counts them."""
    return ROWS // heads, scoring.KEYS


def span_attention_fwd_hopper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: Span, softmax_scale: float,
    cu_q: torch.Tensor | None = None, cu_k: torch.Tensor | None = None, q_start: int = 0,
    slabs: Iterable[Slab] | None = None, heads: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out and lse as span_attention_fwd gives them, for calls that are usable(); with slabs of
    scores_tile, block scores of all queries too, slab by slab, by the first `heads` of a group."""
    varlen, groups = cu_q is not None, k.shape[-2]
    work = _Work.of(q, v, cu_q)
    tiles = work.tiles(span)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    rows, outs = work.descriptor(q), work.descriptor(out)
    keys = _key_descriptors(*marked(k, v), tiles, varlen)
    wider = work.extra > 0
    more = (work.descriptor(q, work.extra), *keys[4:]) if wider else (rows, keys[0], keys[2])
    scored = 0 if slabs is None else heads or q.shape[-2] // groups
    for items, of_slab in work.slabs(slabs, lse, k):
        launch(
            _span_fwd_hopper_kernel, (min(items, sm_count(q.device)),),
            rows, *keys[:4], *more, outs, out, lse, *of_slab[:2], cu_q if varlen else lse,
            cu_k if varlen else lse, work.sq, work.batch if varlen else k.shape[1], work.batch,
            items, q_start, span.a, softmax_scale * LOG2E, *of_slab[2:],
            TILES=(tiles.compiled,), VARLEN=varlen, SCORED=scored,
            STAGES=tiles.stages, G=groups, WIDER=wider, num_warps=WARPS, maxnreg=START_REGISTERS,
        )  # fmt: skip
    return out, lse


def span_pair_fwd_hopper(
    q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: torch.Tensor, k_win: torch.Tensor,
    v_win: torch.Tensor, gates: torch.Tensor, compressed: Span, sliding: Span,
    softmax_scale: float, cu_q: torch.Tensor | None = None, cu_k: torch.Tensor | None = None,
    q_start: int = 0, win_start: int = 0, slabs: Iterable[Slab] | None = None, heads: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The sum of compressed and sliding attention by their gates [.., HQ, 3], and the former's lse,
    for calls of which both are usable(). win_start: q_start among the window's keys; slabs, heads:
    as for span_attention_fwd_hopper."""
    varlen, groups = cu_q is not None, k_cmp.shape[-2]
    work = _Work.of(q, v_cmp, cu_q)
    tiles, window = work.tiles(compressed), work.tiles(sliding)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    sk, sw = (work.batch,) * 2 if varlen else (k_cmp.shape[1], k_win.shape[1])
    rows, outs = work.descriptor(q), work.descriptor(out)
    keys = _key_descriptors(*marked(k_cmp, v_cmp), tiles, varlen)[:2]
    keys += _key_descriptors(*marked(k_win, v_win), window, varlen)
    scored = 0 if slabs is None else heads or q.shape[-2] // groups
    for items, of_slab in work.slabs(slabs, lse, k_cmp):
        launch(
            _span_pair_fwd_hopper_kernel, (min(items, sm_count(q.device)),),
            rows, *keys, outs, out, lse, gates, *of_slab[:2],
            cu_q if varlen else lse, cu_k if varlen else lse, work.sq, sk, sw, work.batch, items,
            q_start, win_start, compressed.a, sliding.a, softmax_scale * LOG2E, *of_slab[2:],
            TILES=(tiles.compiled, window.compiled), VARLEN=varlen, SCORED=scored,
            STAGES=tiles.stages, G=groups, num_warps=WARPS, maxnreg=START_REGISTERS,
        )  # fmt: skip
    return out, lse
