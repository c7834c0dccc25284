"""Backward of selection attention on Hopper, in one pass by blocks of keys.

The mathematics are those of the pass of bwd_triton.py that adds dQ, and so are the lists of the
rows that attend a block and the rounding, but for sums of dQ in fp16. Here a program has four warps
with 64 keys and 64 rows of Q and dO at a time, and one more warp that moves rows, query by query,
through the copy engine:

    four warps   S, dP  P  dV  dS  dK, dQ  dQ into the place of Q and dO
    one warp     dQ of a tile from there on to its addition, then Q and dO of the next but one

Two programs share a multiprocessor: one's products run beside the other's arithmetic. What bounds
them is the L2: on an H200 it adds fp32 at 3.7 TB/s, whoever asks for it, from registers or from
shared memory, and at 1.3 to 1.7 where the sums are not in it. A pair of a query and a block adds 8
KB at 16 heads, or 4 in fp16 (sums.py), which inputs of bf16 take. Pieces of the lists are short,
therefore, and run in the order of their queries: the rows of the queries that are under way stay in
the L2. (A pass of 64k tokens takes 12.4 ms, 18.7 with sums in fp32, with those of 512 pairs at a
time, by blocks, 29.)

S, dP, dK and dV have the keys as their rows, so that P is a left operand straight from registers;
dS goes through shared memory. dQ in fp32 is computed with its width as rows: written from there,
its swizzled place has no bank conflicts. ptxas gives up overlapping products ("wgmma serialized")
where 232 registers do not suffice: dP starts from -delta, which saves the registers of delta, and
dV is waited for before dQ.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from nsa.kernels.launch import launch
from nsa.kernels.prefill.blocks import lists_by_keys
from nsa.kernels.prefill.gate_sign import in_log2, signed_by
from nsa.kernels.prefill.releases import (
    ONLY_WHOLE,
    program_barrier,
    tma_load,
    view,
    warpgroup_mma_wait,
)
from nsa.kernels.prefill.span.bwd_hopper import _tma_add, bounded, finite, masked_rows
from nsa.kernels.prefill.sums import MOST_PARTS, HalfSums
from nsa.kernels.prefill.warps import rounded_here
from nsa.kernels.row_tiles import descriptor, shared_layout, tma_usable
from nsa.kernels.tiles import LOG2E, cdiv

# Keys of a tile, and its (query, head) rows by the width of Q's and V's heads. 128 take 106 of the
# 113 KB that half a multiprocessor has; with 192, which are 128 and 64 more, 64 rows would not
# leave registers for dK. A block of 32 keys is the first half of a tile: products are of 64 rows at
# least, and the L2 bounds the pass.
KEYS, STAGES = 64, 2
ROWS = {(64, 64): 64, (128, 128): 64, (192, 128): 32}
WARPS = 4
NEVER = tl.constexpr(2147483647)  # a unit that no query has
# 8 warps (the moving one counts as four) start with 128 registers a thread; all but the least that
# a thread can have then go to the four: 232.
START_REGISTERS, LEAST_REGISTERS = 128, tl.constexpr(24)
# The copy engine moves rows of 128 bytes, which a swizzle wants by eights.
SWIZZLE, SWIZZLE_ROWS = 128, 8


@gluon.jit
def _tile_of_turn(turn, tiles):
    """The last tile, which may be incomplete, comes first: masked tiles are one run of turns."""
    return gl.where(turn == 0, tiles - 1, turn - 1)


@gluon.jit
def _move_rows(
    QD, DOD, DQD, LSE, DELTA, SCALES, UNITS, buffers, bars, tiles, begin, end,
    HEADS: gl.constexpr, STAGES: gl.constexpr, SIGNED: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """The moving warp: adds dQ of the tile in a place, then fetches a later tile's rows there."""
    keys, places, extras, lse_smem, delta_smem, scale_smem, unit_smem, ds_smem = buffers
    ready, done = bars
    ROWS: gl.constexpr = places.shape[1]
    PADDED: gl.constexpr = QD.block_type.shape[1]
    QUERIES: gl.constexpr = ROWS // PADDED
    WIDE: gl.constexpr = QD.block_type.shape[2]
    PARTS: gl.constexpr = places.shape[2] // WIDE
    MORE: gl.constexpr = EXTRA // WIDE
    SUM_WIDE: gl.constexpr = DQD.block_type.shape[2]
    SUM_PARTS: gl.constexpr = places.shape[2] // SUM_WIDE
    MORE_SUMS: gl.constexpr = EXTRA // SUM_WIDE
    row = gl.arange(0, ROWS, gl.BlockedLayout([2], [32], [1], [0]))
    head = row % PADDED
    for turn in range(tiles + STAGES):
        slot = turn % STAGES
        p0 = begin + _tile_of_turn(turn, tiles) * QUERIES
        pair = p0 + row // PADDED
        live = (pair < end) & (turn < tiles)
        # Rows past the end see no key: their unit is before every key's first one.
        unit = gl.load(UNITS + pair, mask=live, other=0)
        at = unit * HEADS + head
        unit = gl.where(live, unit, -2147483648)
        live = live & (head < HEADS)
        lse = gl.load(LSE + at, mask=live, other=float("inf"))
        delta = gl.load(DELTA + at, mask=live, other=0.0)
        if DQD.dtype == gl.float16:
            scale = gl.load(SCALES + at, mask=live, other=0.0)
        lse = in_log2(lse, SIGNED)
        # The phase before the first counts as complete.
        mbarrier.wait(done.index(slot), ((turn // STAGES) & 1) ^ 1)
        place = places.index(slot)
        if turn >= STAGES:
            sums = view(place, DQD.dtype, [SUM_PARTS * QUERIES, 1, PADDED, SUM_WIDE], DQD.layout)
            if EXTRA > 0:
                more_sums = view(
                    extras.index(slot), DQD.dtype, [MORE_SUMS * QUERIES, 1, PADDED, SUM_WIDE],
                    DQD.layout,
                )  # fmt: skip
            a0 = begin + _tile_of_turn(turn - STAGES, tiles) * QUERIES
            for i in gl.static_range(QUERIES):
                # Past the end: zeros, for the last query.
                to = gl.load(UNITS + gl.minimum(a0 + i, end - 1))
                for part in gl.static_range(SUM_PARTS):
                    _tma_add(DQD, [to, 0, part * SUM_WIDE], sums.index(part * QUERIES + i))
                for part in gl.static_range(MORE_SUMS):
                    column = (SUM_PARTS + part) * SUM_WIDE
                    _tma_add(DQD, [to, 0, column], more_sums.index(part * QUERIES + i))
            tma.store_wait(0)
        if turn < tiles:
            lse_smem.index(slot).store(lse)
            delta_smem.index(slot).store(delta)
            if DQD.dtype == gl.float16:
                scale_smem.index(slot).store(scale)
            unit_smem.index(slot).store(unit)
            program_barrier()
            bar = ready.index(slot)
            mbarrier.expect(bar, (2 * PARTS + MORE) * QUERIES * QD.block_type.nbytes)
            rows = view(place, QD.dtype, [2 * PARTS * QUERIES, 1, PADDED, WIDE], QD.layout)
            if EXTRA > 0:
                more_rows = view(
                    extras.index(slot), QD.dtype, [MORE * QUERIES, 1, PADDED, WIDE], QD.layout
                )
            for i in gl.static_range(QUERIES):
                source = gl.load(UNITS + gl.minimum(p0 + i, end - 1))
                for part in gl.static_range(PARTS):
                    q = rows.index(part * QUERIES + i)
                    do = rows.index((PARTS + part) * QUERIES + i)
                    tma_load(QD, [source, 0, part * WIDE], bar, q)
                    tma_load(DOD, [source, 0, part * WIDE], bar, do)
                for part in gl.static_range(MORE):
                    q = more_rows.index(part * QUERIES + i)
                    tma_load(QD, [source, 0, (PARTS + part) * WIDE], bar, q)


@gluon.jit
def _put_columns(dq, place, scale, like, nought, HALVES: gl.constexpr):
    """dq [columns, rows] to its place by rows: in fp32, or times the rows' scale in fp16, which is
    laid out `like` other tiles of 16 bits."""
    if HALVES:
        scale = scale.load(gl.SliceLayout(0, dq.type.layout))
        halves = view(place, gl.float16, [2, dq.shape[1], dq.shape[0]], like.layout)
        halves.index(nought).permute([1, 0]).store((dq * scale[None, :]).to(gl.float16))
    else:
        place.permute([1, 0]).store(dq)


@gluon.jit
def _block_turn(
    dk, dk2, dv, turn, buffers, bars, first, signed, scale_log2,
    STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr, HALVES: gl.constexpr,
    MASKED: gl.constexpr, SIGNED: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """dV, dK (dk2: of EXTRA columns) and dQ of a tile of rows. Units from `first` on see a key.
    signed: see _span_turn."""
    keys, places, extras, lse_smem, delta_smem, scale_smem, unit_smem, ds_smem = buffers
    k_place, k2_place, v_place = keys
    ready, done = bars
    KEYS: gl.constexpr = k_place.shape[1]
    WIDTH: gl.constexpr = k_place.shape[2]
    ROWS: gl.constexpr = places.shape[1]
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    dtype: gl.constexpr = k_place.dtype
    # Always 0, which the compiler cannot know: else it keeps the address of every slice of K and V
    # in registers throughout the loop.
    nought = turn >> 30
    k = k_place.index(nought)
    v = v_place.index(nought)
    ds_place = ds_smem.index(nought)
    slot = turn % STAGES
    place = places.index(slot)
    rows = view(place, dtype, [2, ROWS, WIDTH], k_place.layout)
    q = rows.index(0)
    do = rows.index(1)
    if EXTRA > 0:
        k2 = k2_place.index(nought)
        extra = extras.index(slot)
        q2 = view(extra, dtype, [2, ROWS, EXTRA], k_place.layout).index(0)
    if ONLY_WHOLE:
        # Else ptxas takes what follows for a divergent path, in which products do not overlap.
        program_barrier()
    mbarrier.wait(ready.index(slot), (turn // STAGES) & 1)

    zero = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)
    delta = delta_smem.index(slot).load(COLUMN)
    dp = zero - delta[None, :]
    s = warpgroup_mma(k, q.permute([1, 0]), zero, use_acc=False, is_async=True)
    if EXTRA > 0:
        s = warpgroup_mma(k2, q2.permute([1, 0]), s, is_async=True)
    dp = warpgroup_mma(v, do.permute([1, 0]), dp, is_async=True)
    lse = lse_smem.index(slot).load(COLUMN)
    s = warpgroup_mma_wait(1, deps=[s])
    p = gl.exp2(s * scale_log2 - lse[None, :])
    if MASKED:
        unit = unit_smem.index(slot).load(COLUMN)
        p = gl.where(unit[None, :] >= first[:, None], p, 0.0)
    if SIGNED:
        if signed != 0:  # lse is read again, or it would take registers
            p = signed_by(p, lse_smem.index(slot).load(COLUMN)[None, :])
    if SIGNED:
        p16 = rounded_here(p, dtype)
    else:
        p16 = p.to(dtype)
    p16 = gl.convert_layout(p16, LEFT, assert_trivial=True)
    dv = warpgroup_mma(p16, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = p * dp
    if MASKED:  # a row whose delta is NaN leaves alone the keys that it does not see
        ds = gl.where(unit[None, :] >= first[:, None], ds, 0.0)
    ds_place.store(ds.to(dtype))
    dv = warpgroup_mma_wait(0, deps=[dv])
    fence_async_shared()
    UPRIGHT: gl.constexpr = HALVES and EXTRA == 0
    if UPRIGHT:
        zero_dq = gl.zeros([ROWS, WIDTH], gl.float32, ACC_LAYOUT)
        dq = warpgroup_mma(ds_place.permute([1, 0]), k, zero_dq, use_acc=False, is_async=True)
    else:
        zero_dq = gl.zeros([WIDTH, ROWS], gl.float32, S_LAYOUT)
        dq = warpgroup_mma(k.permute([1, 0]), ds_place, zero_dq, use_acc=False, is_async=True)
    dk = warpgroup_mma(ds_place, q, dk, is_async=True)
    if EXTRA > 0:
        dk2 = warpgroup_mma(ds_place, q2, dk2, is_async=True)
        dq, dk, dk2 = warpgroup_mma_wait(0, deps=[dq, dk, dk2])
    else:
        dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
    # All warps have read Q and dO: dQ takes their place.
    program_barrier()
    if UPRIGHT:
        scale = scale_smem.index(slot).load(gl.SliceLayout(1, ACC_LAYOUT))
        halves = view(place, gl.float16, [2, ROWS, WIDTH], k_place.layout)
        halves.index(nought).store((dq * scale[:, None]).to(gl.float16))
    else:
        _put_columns(dq, place, scale_smem.index(slot), k_place, nought, HALVES)
    if EXTRA > 0:
        # By itself: with the others in flight it would want their registers too.
        zero_dq = gl.zeros([EXTRA, ROWS], gl.float32, S_LAYOUT)
        dq = warpgroup_mma(k2.permute([1, 0]), ds_place, zero_dq, use_acc=False)
        _put_columns(dq, extra, scale_smem.index(slot), k_place, nought, HALVES)
    fence_async_shared()
    program_barrier()
    mbarrier.arrive(done.index(slot), count=1)
    return dk, dk2, dv


@gluon.jit
def _add_keys(OUT, x, row, live, layout: gl.constexpr, STRIDE: gl.constexpr):
    at = row[:, None] * STRIDE + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    gl.atomic_add(OUT + at, x, mask=live[:, None], sem="relaxed")


@gluon.jit
def _block_walk(
    K, V, ANY_NEGATIVE, OUT_K, OUT_V, buffers, bars, masked_tiles, tiles, first_key, n0, n_keys,
    group, G, first_unit, scale_log2, STAGES: gl.constexpr, HALVES: gl.constexpr,
    SIGNED: gl.constexpr, EXTRA: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """The four warps: a piece of the rows that attend one block of keys."""
    keys, places, extras, lse_smem, delta_smem, scale_smem, unit_smem, ds_smem = buffers
    k_place, k2_place, v_place = keys
    KEYS: gl.constexpr = k_place.shape[1]
    WIDTH: gl.constexpr = k_place.shape[2]
    ROWS: gl.constexpr = places.shape[1]
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    COPY_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    key = n0 + gl.arange(0, KEYS, gl.SliceLayout(1, COPY_LAYOUT))
    key_row = (first_key + key) * G + group
    # By pointers and once: keys past the sequence must be zeros, not the next one's.
    K_WIDTH: gl.constexpr = WIDTH + EXTRA
    live = key < n_keys
    k_place.index(0).store(bounded(masked_rows(K, key_row, live, COPY_LAYOUT, WIDTH, K_WIDTH)))
    v_place.index(0).store(finite(masked_rows(V, key_row, live, COPY_LAYOUT, WIDTH, WIDTH)))
    if EXTRA > 0:
        k2 = masked_rows(K + WIDTH, key_row, live, COPY_LAYOUT, EXTRA, K_WIDTH)
        k2_place.index(0).store(bounded(k2))
    fence_async_shared()
    program_barrier()
    first = first_unit + gl.arange(0, KEYS, gl.SliceLayout(1, S_LAYOUT)) * G
    if HALF:
        first = gl.where(gl.arange(0, KEYS, gl.SliceLayout(1, S_LAYOUT)) < KEYS // 2, first, NEVER)
    dk = gl.zeros([KEYS, WIDTH], gl.float32, ACC_LAYOUT)
    dv = gl.zeros([KEYS, WIDTH], gl.float32, ACC_LAYOUT)
    dk2 = tiles * 0
    if EXTRA > 0:
        EXTRA_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, EXTRA, 16])
        dk2 = gl.zeros([KEYS, EXTRA], gl.float32, EXTRA_LAYOUT)
    signed = tiles * 0
    if SIGNED:
        signed = gl.load(ANY_NEGATIVE)
    for turn in range(0, masked_tiles):
        dk, dk2, dv = _block_turn(
            dk, dk2, dv, turn, buffers, bars, first, signed, scale_log2, STAGES, S_LAYOUT,
            ACC_LAYOUT, HALVES, True, SIGNED, EXTRA,
        )  # fmt: skip
    for turn in range(masked_tiles, tiles):
        dk, dk2, dv = _block_turn(
            dk, dk2, dv, turn, buffers, bars, first, signed, scale_log2, STAGES, S_LAYOUT,
            ACC_LAYOUT, HALVES, False, SIGNED, EXTRA,
        )  # fmt: skip
    key = n0 + gl.arange(0, KEYS, gl.SliceLayout(1, ACC_LAYOUT))
    key_row = (first_key + key) * G + group
    _add_keys(OUT_K, dk, key_row, key < n_keys, ACC_LAYOUT, K_WIDTH)
    _add_keys(OUT_V, dv, key_row, key < n_keys, ACC_LAYOUT, WIDTH)
    if EXTRA > 0:
        key = n0 + gl.arange(0, KEYS, gl.SliceLayout(1, EXTRA_LAYOUT))
        key_row = (first_key + key) * G + group
        _add_keys(OUT_K + WIDTH, dk2, key_row, key < n_keys, EXTRA_LAYOUT, K_WIDTH)


@gluon.jit
def _block_attn_bwd_hopper_kernel(
    K, V, LSE, DELTA, SCALES, ANY_NEGATIVE, QD, DOD, DQD, OUT_K, OUT_V, UNITS, PIECES, CHUNK_TILE,
    CHUNK_BEGIN, CHUNK_END, CU_SEQLENS, S, S_KV, G, q_start, per_seq, scale_log2,
    VARLEN: gl.constexpr, HEADS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    WIDTH: gl.constexpr, EXTRA: gl.constexpr, STAGES: gl.constexpr, SHARE: gl.constexpr,
    PER_CHUNK: gl.constexpr, SIGNED: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Adds a piece's part of dQ, dK and dV to fp32 tensors, dQ and dK without the softmax scale. Or
    dQ, times SCALES of its rows, to one of fp16. ANY_NEGATIVE: where SIGNED, combine_bwd's flag.
    WIDTH: columns of V, which Q and K have too, and EXTRA more. HALF: blocks are of KEYS / 2.

    PIECES: how many pieces of chunks there are, and these in the order in which programs take them.
    """
    QUERIES: gl.constexpr = ROWS // QD.block_type.shape[1]
    dtype: gl.constexpr = QD.dtype
    turn = gl.program_id(0)
    if turn >= gl.load(PIECES):
        return
    piece = gl.load(PIECES + 1 + turn)
    chunk = piece // PER_CHUNK
    begin = gl.load(CHUNK_BEGIN + chunk).to(gl.int32) + piece % PER_CHUNK * SHARE
    end = gl.minimum(begin + SHARE, gl.load(CHUNK_END + chunk).to(gl.int32))
    tile = gl.load(CHUNK_TILE + chunk)
    group, sequence, n0, n_keys, first_query, first_key = lists_by_keys.keys_of_tile(
        tile, CU_SEQLENS, S_KV, G, per_seq, KEYS // 2 if HALF else KEYS, VARLEN
    )
    if HALF:
        n_keys = gl.minimum(n_keys, n0 + KEYS // 2)
    if not VARLEN:
        first_query = sequence * S
    # A unit is token * G + group. This one is the first that sees the block's first key.
    first_unit = (first_query + n0 - q_start) * G + group
    tiles = (end - begin + QUERIES - 1) // QUERIES
    # Pairs are in the order of their tokens, so those that do not see all keys come first.
    pair = begin + gl.arange(0, SHARE, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    unit = gl.load(UNITS + pair, mask=pair < end, other=NEVER)
    partial = (pair < end) & (unit < first_unit + (KEYS - 1) * G)
    # And one more, see _tile_of_turn.
    masked_tiles = (gl.sum(partial.to(gl.int32), 0) + QUERIES - 1) // QUERIES + 1
    masked_tiles = tiles if HALF else gl.minimum(masked_tiles, tiles)

    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLACE: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # One K, one V and one dS, but indexed: see _block_turn.
    k_place = gl.allocate_shared_memory(dtype, [1, KEYS, WIDTH], LAYOUT)
    v_place = gl.allocate_shared_memory(dtype, [1, KEYS, WIDTH], LAYOUT)
    ds_smem = gl.allocate_shared_memory(
        dtype, [1, KEYS, ROWS], gl.NVMMASharedLayout(2 * ROWS, 16, 2)
    )
    # Q and dO of a tile, 16 bits each, and then its dQ, at most 32.
    places = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, WIDTH], PLACE)
    k2_place = k_place
    extras = places
    if EXTRA > 0:
        k2_place = gl.allocate_shared_memory(dtype, [1, KEYS, EXTRA], LAYOUT)
        extras = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS, EXTRA], PLACE)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN)
    scale_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], PLAIN)
    unit_smem = gl.allocate_shared_memory(gl.int32, [STAGES, ROWS], PLAIN)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(done.index(i), count=1)
    keys = (k_place, k2_place, v_place)
    buffers = (keys, places, extras, lse_smem, delta_smem, scale_smem, unit_smem, ds_smem)
    bars = (ready, done)
    gl.warp_specialize([
        (_block_walk, (
            K, V, ANY_NEGATIVE, OUT_K, OUT_V, buffers, bars, masked_tiles, tiles, first_key, n0,
            n_keys, group, G, first_unit, scale_log2, STAGES, DQD.dtype == gl.float16, SIGNED,
            EXTRA, HALF,
        )),
        (_move_rows, (
            QD, DOD, DQD, LSE, DELTA, SCALES, UNITS, buffers, bars, tiles, begin, end, HEADS,
            STAGES, SIGNED, EXTRA,
        )),
    ], [1], [LEAST_REGISTERS])  # fmt: skip


def _head_tiles(x: torch.Tensor, groups: int) -> Any:
    """Descriptor of one unit's heads in x [.., HQ, width], by rows of 128 bytes.

    The copy engine fills groups of fewer heads than SWIZZLE_ROWS up with zeros.
    """
    layout = shared_layout(SWIZZLE, x.element_size() * 8, 3)
    heads = x.shape[-2] // groups
    block = (1, max(heads, SWIZZLE_ROWS), SWIZZLE // x.element_size())
    return descriptor(x.view(-1, heads, x.shape[-1]), block, layout)


TAKES = (
    "16-bit heads, 64 or 128 wide for Dk = Dv or 192 and 128, 4, 8 or 16 a group, and blocks of "
    "32, 64, 128 .. keys"
)


def usable(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor, block_size: int
) -> bool:
    """Return whether this module takes the call: see TAKES, and contiguous tensors."""
    return (
        (block_size % KEYS == 0 or block_size == KEYS // 2)
        and (q.shape[-1], v.shape[-1]) in ROWS
        and q.shape[-2] in (4 * k.shape[-2], 8 * k.shape[-2], 16 * k.shape[-2])
        and q.numel() // q.shape[-1] < 2**31 - 2**16
        and tma_usable(90, q, whole=grad_out)
        and tma_usable(90, k, whole=v)
    )


def adds_halves(q: torch.Tensor, n_sel: int, block_size: int) -> bool:
    """True where dQ of n_sel blocks is summed in fp16: not if dQ itself has as many bits."""
    return q.dtype == torch.bfloat16 and n_sel * cdiv(block_size, KEYS) <= MOST_PARTS


def add_block_gradients(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor,
    delta: torch.Tensor, lists: lists_by_keys.TileRows, cu_seqlens: torch.Tensor | None,
    softmax_scale: float, q_start: int, acc: torch.Tensor | HalfSums, out_k: torch.Tensor,
    out_v: torch.Tensor, any_negative: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Add dQ / softmax_scale to acc, dK / softmax_scale to out_k and dV to out_v, fp32 tensors like
    q, k and v (acc: or HalfSums), for inputs that are usable(). lists, any_negative: see
    block_attention_bwd."""
    varlen = cu_seqlens is not None
    groups = v.shape[-2]
    heads = q.shape[-2] // groups
    s_q, s_kv = (1, cu_seqlens.numel() - 1) if varlen else (q.shape[1], k.shape[1])
    chunks = (lists.chunk_tile, lists.chunk_begin, lists.chunk_end)
    halves, signed = isinstance(acc, HalfSums), any_negative is not None
    sums, scales = acc[:2] if halves else (acc, delta)
    # Pairs of a program: many programs add dK and dV often, few spread over more queries than the
    # L2 holds. H200, 16 heads, 64k random blocks: 64 pairs 18.7 ms, 128 19.3; fp16 12.9 and 12.4.
    share = min((2048 if halves else 1024) // heads, lists_by_keys.CHUNK)
    tokens = lse.numel() // q.shape[-2]
    pieces, per_chunk = lists_by_keys.pieces_in_order(lists, share, tokens, groups)
    launch(
        _block_attn_bwd_hopper_kernel, (pieces.numel() - 1,),
        k, v, lse, delta, scales, any_negative if signed else lse, _head_tiles(q, groups),
        _head_tiles(grad_out, groups), _head_tiles(sums, groups), out_k, out_v, lists.rows, pieces,
        *chunks, cu_seqlens if varlen else lists.rows, s_q, s_kv, groups, q_start, lists.per_seq,
        softmax_scale * LOG2E, VARLEN=varlen, HEADS=heads, ROWS=ROWS[q.shape[-1], v.shape[-1]],
        KEYS=KEYS, WIDTH=v.shape[-1], EXTRA=q.shape[-1] - v.shape[-1], STAGES=STAGES, SHARE=share,
        PER_CHUNK=per_chunk, SIGNED=signed, HALF=lists.tile < KEYS, num_warps=WARPS,
        maxnreg=START_REGISTERS,
    )  # fmt: skip
