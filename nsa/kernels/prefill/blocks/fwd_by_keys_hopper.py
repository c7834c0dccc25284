"""Forward of selection attention on Hopper, by blocks of keys, for what no neighbours share.

A query that reads a block which none beside it chose takes 32 KB from the L2 for it. By blocks, as
the backward goes (bwd_hopper.py), a pair of a query and a block takes twice the 4 KB of
a query of 16 heads: its Q, and the sums of exp2(s - top) V that go to the L2's adders in fp16
(fwd_by_keys_sums.py). fwd_by_keys_ends.py begins the sums, and top, and ends them.

Three programs share a multiprocessor; of keys of 192 there are two, of heads of 64 four. Each has
four warps, with a block's K and V and two places for 64 rows of Q, and for each place a warp that
fetches rows, query by query, and adds what the four have put in their place. The lists' pieces are
short and run in the order of their queries, so that sums under way stay in the L2 (H200, 64k random
blocks: pieces of 128 pairs 5.0 ms, two of them a program 6.3; a fixed share of programs for all
that there are, which drift apart, 7.2).
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from nsa.kernels.launch import launch
from nsa.kernels.prefill.blocks import lists_by_keys, tile_blocks
from nsa.kernels.prefill.blocks.bwd_hopper import _head_tiles
from nsa.kernels.prefill.blocks.fwd_by_keys_sums import KeySums
from nsa.kernels.prefill.blocks.selection import Selection
from nsa.kernels.prefill.releases import program_barrier, tma_load, view, warpgroup_mma_wait
from nsa.kernels.prefill.span.bwd_hopper import _tma_add, masked_rows
from nsa.kernels.prefill.sums import MOST_PARTS
from nsa.kernels.tiles import LOG2E

ROWS, KEYS = 64, 64
WARPS = 4
PAIRS = {4: 512, 8: 256, 16: 128}  # of a program, by heads of a group
# By the widths of Q's and V's heads. A program has eight warps: the moving ones count as four.
START_REGISTERS = {(64, 64): 64, (128, 128): 80, (192, 128): 80}
LEAST_REGISTERS = tl.constexpr(24)
PLACES = tl.constexpr(2)


@gluon.jit
def _add_rows(SUMSD, UNITS, place, begin, end):
    """The sums in a place to those of their queries, which are the pairs from begin on."""
    PADDED: gl.constexpr = SUMSD.block_type.shape[1]
    WIDE: gl.constexpr = SUMSD.block_type.shape[2]
    QUERIES: gl.constexpr = place.shape[0] // PADDED
    PARTS: gl.constexpr = place.shape[1] // WIDE
    sums = view(place, SUMSD.dtype, [PARTS * QUERIES, 1, PADDED, WIDE], SUMSD.layout)
    units = ()
    for i in gl.static_range(QUERIES):
        units = units + (gl.load(UNITS + gl.minimum(begin + i, gl.maximum(end - 1, 0))),)
    for i in gl.static_range(QUERIES):
        if begin + i < end:
            for part in gl.static_range(PARTS):
                _tma_add(SUMSD, [units[i], 0, part * WIDE], sums.index(part * QUERIES + i))
    tma.store_wait(0)


@gluon.jit
def _move(
    QD, SUMSD, TOP, UNITS, buffers, bars, begin, end,
    HEADS: gl.constexpr, EXTRA: gl.constexpr, MINE: gl.constexpr,
):  # fmt: skip
    """The warp of one place: adds the sums that are there, then fetches other rows."""
    keys, places, extras, top_smem, unit_smem = buffers
    ready, done = bars
    ROWS: gl.constexpr = places.shape[1]
    PADDED: gl.constexpr = QD.block_type.shape[1]
    QUERIES: gl.constexpr = ROWS // PADDED
    WIDE: gl.constexpr = QD.block_type.shape[2]
    PARTS: gl.constexpr = places.shape[2] // WIDE
    MORE: gl.constexpr = EXTRA // WIDE
    row = gl.arange(0, ROWS, gl.BlockedLayout([2], [32], [1], [0]))
    place = places.index(MINE)
    bar = ready.index(MINE)
    rows = view(place, QD.dtype, [PARTS * QUERIES, 1, PADDED, WIDE], QD.layout)
    if EXTRA > 0:
        more_rows = view(extras.index(MINE), QD.dtype, [MORE * QUERIES, 1, PADDED, WIDE], QD.layout)
    parity = 1  # the phase before the first counts as complete
    last = end
    for first in range(begin + MINE * QUERIES, end, PLACES * QUERIES):
        pair = first + row // PADDED
        unit = gl.load(UNITS + pair, mask=pair < end, other=-1)
        top = gl.load(TOP + unit * HEADS + row % PADDED, mask=pair < end, other=0.0)
        mbarrier.wait(done.index(MINE), parity)
        parity ^= 1
        _add_rows(SUMSD, UNITS, place, last, end)
        last = first
        top_smem.index(MINE).store(top)
        unit_smem.index(MINE).store(unit)
        program_barrier()
        mbarrier.expect(bar, (PARTS + MORE) * QUERIES * QD.block_type.nbytes)
        for i in gl.static_range(QUERIES):
            source = gl.load(UNITS + gl.minimum(first + i, end - 1))
            for part in gl.static_range(PARTS):
                q = rows.index(part * QUERIES + i)
                tma_load(QD, [source, 0, part * WIDE], bar, q)
            for part in gl.static_range(MORE):
                q = more_rows.index(part * QUERIES + i)
                tma_load(QD, [source, 0, (PARTS + part) * WIDE], bar, q)
    mbarrier.wait(done.index(MINE), parity)
    _add_rows(SUMSD, UNITS, place, last, end)


@gluon.jit
def _attend(
    turn, TOTAL, buffers, bars, scale_log2,
    HEADS: gl.constexpr, PADDED: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """A tile of rows: what they add to their sums."""
    keys, places, extras, top_smem, unit_smem = buffers
    k_place, k2_place, v_place = keys
    ready, done = bars
    ROWS: gl.constexpr = places.shape[1]
    KEYS: gl.constexpr = k_place.shape[1]
    WIDTH: gl.constexpr = k_place.shape[2]
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    # Always 0, which the compiler cannot know: else it keeps the address of every slice of K and V
    # in registers throughout the loop.
    nought = turn >> 30
    slot = turn % PLACES
    q = places.index(slot)
    mbarrier.wait(ready.index(slot), (turn // PLACES) & 1)
    zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    k = k_place.index(nought).permute([1, 0])
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    if EXTRA > 0:
        k2 = k2_place.index(nought).permute([1, 0])
        s = warpgroup_mma(extras.index(slot), k2, s, is_async=True)
    unit = unit_smem.index(slot).load(ROW)
    top = top_smem.index(slot).load(ROW)
    head = gl.arange(0, ROWS, ROW) % PADDED
    at = unit * HEADS + head
    live = (unit >= 0) & (head < HEADS)
    s = warpgroup_mma_wait(0, deps=[s])
    p = gl.exp2(s * scale_log2 - top[:, None])
    zero_o = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
    weights = gl.convert_layout(p.to(k_place.dtype), LEFT, assert_trivial=True)
    v = v_place.index(nought)
    o = warpgroup_mma(weights, v, zero_o, use_acc=False, is_async=True)
    gl.atomic_add(TOTAL + at, gl.sum(p, 1), mask=live, sem="relaxed")
    o = warpgroup_mma_wait(0, deps=[o])
    # The sums take the place of Q, of which a warp has read the rows that it writes.
    view(q, gl.float16, [ROWS, WIDTH], q.layout).store(o.to(gl.float16))
    fence_async_shared()
    program_barrier()
    mbarrier.arrive(done.index(slot), count=1)


@gluon.jit
def _walk(
    K, V, TOTAL, SCALES, buffers, bars, n0, begin, end, first_key, group, G,
    scale_log2, HEADS: gl.constexpr, PADDED: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """The four warps: a piece of the rows that attend one block of keys."""
    keys, places, extras, top_smem, unit_smem = buffers
    k_place, k2_place, v_place = keys
    QUERIES: gl.constexpr = places.shape[1] // PADDED
    KEYS: gl.constexpr = k_place.shape[1]
    WIDTH: gl.constexpr = k_place.shape[2]
    COPY_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    key = n0 + gl.arange(0, KEYS, gl.SliceLayout(1, COPY_LAYOUT))
    key_row = (first_key + key) * G + group
    here = key >= 0  # rows see all keys of a block: it lies within the sequence
    K_WIDTH: gl.constexpr = WIDTH + EXTRA
    k_place.index(0).store(masked_rows(K, key_row, here, COPY_LAYOUT, WIDTH, K_WIDTH))
    if EXTRA > 0:
        k2 = masked_rows(K + WIDTH, key_row, here, COPY_LAYOUT, EXTRA, K_WIDTH)
        k2_place.index(0).store(k2)
    v = masked_rows(V, key_row, here, COPY_LAYOUT, WIDTH, WIDTH)
    column = group * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, COPY_LAYOUT))
    scale = gl.load(SCALES + column)
    v_place.index(0).store((v.to(gl.float32) * scale[None, :]).to(v.dtype))
    fence_async_shared()
    program_barrier()
    for turn in range((end - begin + QUERIES - 1) // QUERIES):
        _attend(turn, TOTAL, buffers, bars, scale_log2, HEADS, PADDED, EXTRA)


@gluon.jit
def _block_attn_keys_hopper_kernel(
    K, V, QD, SUMSD, TOP, TOTAL, SCALES, UNITS, PIECES, CHUNK_TILE, CHUNK_BEGIN, CHUNK_END,
    CU_SEQLENS, S_KV, G, per_seq, scale_log2,
    VARLEN: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    WIDTH: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """Adds what is relative to TOP to TOTAL and, by SUMSD, to the sums (KeySums).

    PIECES: how many chunks there are, and these in the order in which programs take them. EXTRA:
    columns of Q and K behind the WIDTH that V has.
    """
    PADDED: gl.constexpr = QD.block_type.shape[1]
    dtype: gl.constexpr = QD.dtype
    turn = gl.program_id(0)
    if turn >= gl.load(PIECES):
        return
    chunk = gl.load(PIECES + 1 + turn)
    begin = gl.load(CHUNK_BEGIN + chunk).to(gl.int32)
    end = gl.load(CHUNK_END + chunk).to(gl.int32)
    tile = gl.load(CHUNK_TILE + chunk)
    group, _, n0, _, _, first_key = lists_by_keys.keys_of_tile(
        tile, CU_SEQLENS, S_KV, G, per_seq, KEYS, VARLEN
    )
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_place = gl.allocate_shared_memory(dtype, [1, KEYS, WIDTH], LAYOUT)
    v_place = gl.allocate_shared_memory(dtype, [1, KEYS, WIDTH], LAYOUT)
    places = gl.allocate_shared_memory(dtype, [PLACES, ROWS, WIDTH], LAYOUT)
    k2_place, extras = k_place, places
    if EXTRA > 0:
        k2_place = gl.allocate_shared_memory(dtype, [1, KEYS, EXTRA], LAYOUT)
        extras = gl.allocate_shared_memory(dtype, [PLACES, ROWS, EXTRA], LAYOUT)
    top_smem = gl.allocate_shared_memory(gl.float32, [PLACES, ROWS], PLAIN)
    unit_smem = gl.allocate_shared_memory(gl.int32, [PLACES, ROWS], PLAIN)
    ready = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PLACES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(done.index(i), count=1)
    buffers = ((k_place, k2_place, v_place), places, extras, top_smem, unit_smem)
    bars = (ready, done)
    gl.warp_specialize([
        (_walk, (
            K, V, TOTAL, SCALES, buffers, bars, n0, begin, end, first_key, group, G,
            scale_log2, HEADS, PADDED, EXTRA,
        )),
        (_move, (QD, SUMSD, TOP, UNITS, buffers, bars, begin, end, HEADS, EXTRA, 0)),
        (_move, (QD, SUMSD, TOP, UNITS, buffers, bars, begin, end, HEADS, EXTRA, 1)),
    ], [1, 1], [LEAST_REGISTERS, LEAST_REGISTERS])  # fmt: skip


def usable(q: Tensor, v: Tensor, n_sel: int) -> bool:
    """True where sums in fp16 serve a call that fwd_hopper.py takes: bf16, whose
    rounding costs more than theirs, and 4, 8 or 16 heads a group."""
    return (
        q.dtype == torch.bfloat16
        and q.shape[-2] in [heads * v.shape[-2] for heads in tile_blocks.LEAST]
        and n_sel <= MOST_PARTS
        and q.numel() // q.shape[-1] < 2**31 - 2**16
    )


def add_sums(q: Tensor, k: Tensor, v: Tensor, by: Selection, sums: KeySums) -> None:
    """Add to sums, which fwd_by_keys_ends.py began, what by's blocks give, which are those of
    tile_blocks.Rest: a query sees all keys of them. For contiguous inputs that are usable()."""
    varlen, cu_seqlens, groups = by.packed, by.cu_seqlens, v.shape[-2]
    dim, width = q.shape[-1], v.shape[-1]
    tokens, heads = q.numel() // (q.shape[-2] * dim), q.shape[-2] // groups
    s_kv = cu_seqlens.numel() - 1 if varlen else k.shape[1]
    pairs = PAIRS[heads]
    lists = lists_by_keys.rows_of_tiles(by.blocks, 1, KEYS, s_kv, cu_seqlens, pairs)
    pieces, _ = lists_by_keys.pieces_in_order(lists, pairs, tokens, groups)  # a chunk each
    chunks = (lists.chunk_tile, lists.chunk_begin, lists.chunk_end)
    q_tiles, sum_tiles = _head_tiles(q, groups), _head_tiles(sums.sums, groups)
    launch(
        _block_attn_keys_hopper_kernel, (pieces.numel() - 1,),
        k, v, q_tiles, sum_tiles, sums.top, sums.total, sums.scales, lists.rows, pieces,
        *chunks, cu_seqlens if varlen else lists.rows, s_kv, groups, lists.per_seq,
        by.softmax_scale * LOG2E, VARLEN=varlen, HEADS=heads, ROWS=ROWS, KEYS=KEYS, WIDTH=width,
        EXTRA=dim - width, num_warps=WARPS, maxnreg=START_REGISTERS[dim, width],
    )  # fmt: skip
