"""Backward of compressed and sliding attention on Hopper, in one pass over key tiles: 5 products,
not 7.

A program owns one key tile of one group and walks a share of the queries that see it: S, P, dP and
dS once per tile of queries, dK and dV in registers, dQ added to an fp32 buffer in global memory.
The order of those additions changes from run to run, so gradients repeat up to the rounding of
fp32; bwd_triton.py keeps two passes that repeat bitwise. Queries of compressed attention are split
at the same positions for every key tile: programs that run at the same time walk the same queries,
so that Q, dO and dQ meet in L2.

The products of a tile of rows queue up, which Triton would wait for one by one, and the arithmetic
runs beside them:

    tensor cores   dP(i)  dK(i-1)  dV(i)  dQ(i)  S(i+1)
    eight warps    P = exp2(S(i))  dS(i)  .....  dQ(i) to shared memory and on to its addition

Eight warps own 128 keys. S, dP, dK and dV have the keys as their rows, so that P is a left operand
straight from registers; dS goes through shared memory, where dQ reads it by queries and the next
tile's turn reads it by keys for dK: there, once a turn, the eight wait for each other, and else for
nobody (warps.py; Triton's own waits took six barriers a turn, 3 to 7 % of the time). One more warp
fetches rows, up to three tiles ahead, and one hands tiles of dQ to their addition.

ptxas gives up the queue ("wgmma serialized") where a product is in flight from one turn of a loop
to the next and its sums are read there, where other instructions define sums meanwhile, or where
240 registers do not suffice. The order above and the single drain at the end of a turn suit it.
Where Q and K are wider than V (192 and 128), the order is another: see _wide_turn.

The last queries of a sequence, where they fill no tile, are the first of a walk: there the eight
bring them themselves, by mask, while no sums take registers.

In a window a tile of keys has a short walk, masked at both ends; to mask all of it costs no more
than loops of both kinds. The walks of neighbours overlap, but shifted: beginning each at its own
first query, programs would not find in L2 what others fetched. So they begin at the multiple of one
number and come to what lies before it last: those that run at the same time walk the same queries,
as for compressed attention (H200, w = 512, 64 heads in 4 groups, 64k tokens: 6.8 ms, else 10.0).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from nsa.kernels.launch import launch
from nsa.kernels.prefill.gate_sign import in_log2, signed_by
from nsa.kernels.prefill.packs import Rows, sequence_bounds, share_of_program
from nsa.kernels.prefill.releases import (
    carve,
    from_head,
    head_address,
    make_store,
    program_barrier,
    store_of,
    tma_load,
    view,
    warpgroup_mma_wait,
)
from nsa.kernels.prefill.span.kinds import COMPRESSED, Span
from nsa.kernels.prefill.sums import rounded, rounded_keys, zero_sums
from nsa.kernels.prefill.warps import (
    LEAST_REGISTERS,
    START_REGISTERS,
    arrive,
    arrive_if,
    await_phase,
    await_phase_if,
    check_address,
    first_barrier,
    kept,
    lane_number,
    place_of_rows,
    rounded_here,
    store_tile,
    warp_number,
)
from nsa.kernels.row_tiles import descriptor, shared_layout, tma_usable
from nsa.kernels.tiles import LOG2E, cdiv, pow2, sm_count

# A tile: (query, head) rows and keys.
ROWS, KEYS = 64, 128
# How many tiles of Q, and of dO, shared memory has room for, by the widths of Q's and V's heads: up
# to 226 of 227 KB are taken.
STAGES = {(64, 64): (3, 3), (128, 128): (3, 3), (192, 128): (2, 1)}
WARPS = 8
MOST_SHARES = 128  # of a packed sequence: programs are launched for tiles that could have as many
LINE = gl.constexpr(128)  # bytes of shared memory
# Numbers of barriers: rows are there, their place is free; so is a tile of dQ, its place is free.
# Where dO has fewer places than Q, two of those for Q are its own.
READY, FREE, DQ_READY, DQ_FREE = (gl.constexpr(i) for i in (0, 3, 6, 7))
DO_READY, DO_FREE = (gl.constexpr(i) for i in (2, 5))


@builtin
def _tma_add(descriptor, coord, source, _semantic=None):
    """Add a tile in shared memory to global memory. Gluon has the operation but no name for it."""
    from triton._C.libtriton import ir

    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coord, source.handle
    )


@triton.jit
def _row_stats_kernel(
    LSE, DELTA, OUT, rows, HQ, HEADS: tl.constexpr, BLOCK: tl.constexpr, SIGNED: tl.constexpr,
    MINUS: tl.constexpr,
):  # fmt: skip
    """OUT [2, G, rows * HEADS]: in_log2(lse), then delta, or MINUS delta."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.cast(rows, tl.int64) * HQ
    live = at < total
    head = at % HQ
    to = (head // HEADS * rows + at // HQ) * HEADS + head % HEADS
    lse = tl.load(LSE + at, mask=live, other=0.0)
    tl.store(OUT + to, in_log2(lse, SIGNED), mask=live)
    delta = tl.load(DELTA + at, mask=live, other=0.0)
    tl.store(OUT + total + to, -delta if MINUS else delta, mask=live)


@gluon.jit
def _nth_tile(n, tiles, start, last, MODE: gl.constexpr):
    """Which tile of the queries comes n-th: the last one first where it is not whole (`last` is 1),
    and a window's walk begins at `start` and jumps back."""
    tile = n - last
    if MODE == 1:
        whole = tiles - last
        tile += start
        tile = gl.where(tile >= whole, tile - whole, tile)
    return gl.where(n < last, tiles - 1, tile)


@gluon.jit
def _visible(
    n, tiles, start, last, first, window,
    MODE: gl.constexpr, BLOCK_Q: gl.constexpr, HEADS: gl.constexpr, COLUMN: gl.constexpr,
):  # fmt: skip
    """Which rows of the n-th tile see a key: those of all queries from `first` on, or of the first
    `window` of them."""
    tile = _nth_tile(n, tiles, start, last, MODE)
    t = tile * BLOCK_Q + gl.arange(0, BLOCK_Q * HEADS, COLUMN) // HEADS
    if MODE == 0:
        see = t[None, :] >= first[:, None]
    else:
        # Unsigned, a query before `first` is far behind it.
        see = (t[None, :] - first[:, None]).to(gl.uint32) < window.to(gl.uint32)
    return see


@gluon.jit
def _fetch_rows(
    QD, QD2, DOD, STATS, buffers, bars, tiles, start, last, t0, head0, lse_row, delta_row,
    MODE: gl.constexpr, BLOCK_Q: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr,
    EXTRA: gl.constexpr,
):  # fmt: skip
    """The fetching warp: every tile as soon as the tile STAGES before it is done with its place."""
    k_smem, v_smem, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, extras = buffers
    ROWS: gl.constexpr = BLOCK_Q * HEADS
    if last > 0:  # brought by _bring_last
        mbarrier.arrive(bars.index(READY), count=1)
        if EXTRA > 0:
            mbarrier.arrive(bars.index(DO_READY), count=1)
    for n in range(last, tiles):
        slot = n % STAGES
        # The phase before the first counts as complete.
        mbarrier.wait(bars.index(FREE + slot), ((n // STAGES) & 1) ^ 1)
        bar = bars.index(READY + slot)
        # [queries, heads, width] for the descriptor, rows for the products: the same bytes.
        q = view(q_smem.index(slot), QD.dtype, QD.block_type.shape, QD.layout)
        tile = _nth_tile(n, tiles, start, last, MODE)
        t = t0 + tile * BLOCK_Q
        row = tile * ROWS
        if EXTRA == 0:
            do = view(do_smem.index(slot), QD.dtype, QD.block_type.shape, QD.layout)
            mbarrier.expect(bar, 2 * QD.block_type.nbytes + 2 * STATS.block_type.nbytes)
            tma_load(QD, [t, head0, 0], bar, q)
            tma_load(STATS, [lse_row + row], bar, lse_smem.index(slot))
            tma_load(DOD, [t, head0, 0], bar, do)
            tma_load(STATS, [delta_row + row], bar, delta_smem.index(slot))
        else:
            q2 = view(extras[1].index(slot), QD.dtype, QD2.block_type.shape, QD2.layout)
            do = view(do_smem.index(0), QD.dtype, QD.block_type.shape, QD.layout)
            both: gl.constexpr = QD.block_type.nbytes + QD2.block_type.nbytes
            mbarrier.expect(bar, both + STATS.block_type.nbytes)
            tma_load(QD, [t, head0, 0], bar, q)
            tma_load(QD2, [t, head0, DOD.block_type.shape[2]], bar, q2)
            tma_load(STATS, [lse_row + row], bar, lse_smem.index(slot))
            mbarrier.wait(bars.index(DO_FREE), (n & 1) ^ 1)
            bar = bars.index(DO_READY)
            mbarrier.expect(bar, DOD.block_type.nbytes + STATS.block_type.nbytes)
            tma_load(DOD, [t, head0, 0], bar, do)
            tma_load(STATS, [delta_row + row], bar, delta_smem.index(0))


@gluon.jit
def _add_tiles(
    DQD, DQD2, dq_smem, extras, bars, tiles, start, last, t0, head0,
    MODE: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """The adding warp: every tile of dQ to its addition."""
    BLOCK_Q: gl.constexpr = DQD.block_type.shape[0]
    tile = view(dq_smem, gl.float32, DQD.block_type.shape, DQD.layout)
    for n in range(tiles):
        mbarrier.wait(bars.index(DQ_READY), n & 1)
        t = t0 + _nth_tile(n, tiles, start, last, MODE) * BLOCK_Q
        _tma_add(DQD, [t, head0, 0], tile)
        if EXTRA > 0:
            tile2 = view(extras[2], gl.float32, DQD2.block_type.shape, DQD2.layout)
            _tma_add(DQD2, [t, head0, DQD.block_type.shape[2]], tile2)
        tma.store_wait(0)
        mbarrier.arrive(bars.index(DQ_FREE), count=1)


@gluon.jit
def _place_in_dq(place, WIDTH: gl.constexpr):
    """Where in a tile of dQ at address `place` a thread begins to store, see _put_dq."""
    lane = lane_number()
    warp = warp_number()
    row = warp % 4 * 16 + (lane >> 2)
    swizzled = ((((lane >> 1) & 1) ^ (lane >> 2)) << 4) + (lane & 1) * 8
    return place + warp // 4 * (WIDTH // 64 * 64 * 128) + row * 128 + swizzled


@gluon.jit
def _put_dq(dq, at):
    """dq [64, width] of eight warps, four down and two across, to shared memory, as the copy engine
    wants it: chunks of 32 columns, every 16 bytes of a row swizzled by its number."""
    LAYOUT: gl.constexpr = dq.type.layout
    column = gl.arange(0, dq.shape[1], gl.SliceLayout(0, LAYOUT)) % (dq.shape[1] // 2)
    to = (at ^ (column // 8 % 4 * 32)) + column // 32 * (64 * 128)
    to = to[None, :] + gl.zeros(dq.shape, gl.int32, LAYOUT)
    gl.inline_asm_elementwise(
        """{
        st.shared.v2.f32 [$5], {$1, $2};
        st.shared.v2.f32 [$5 + 1024], {$3, $4};
        mov.u32 $0, 0;
        }""",
        "=r,f,f,f,f,r,r,r,r", [dq, to], gl.int8, is_pure=False, pack=4,
    )  # fmt: skip
    fence_async_shared()


@gluon.jit
def _meet():
    """The eight warps wait for each other. Triton's own barriers begin at 0."""
    gl.inline_asm_elementwise(
        "barrier.sync.aligned 14, 256; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _span_turn(
    dk, dv, s, before, slot, phase, n, tiles, start, last, buffers, first_bar, ds_at, dq_at,
    first, window, signed, scale_log2,
    MODE: gl.constexpr, BLOCK_Q: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr,
    S_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr, DQ_LAYOUT: gl.constexpr,
    MASKED: gl.constexpr, SIGNED: gl.constexpr,
):  # fmt: skip
    """P, dS, dV and dQ of the n-th tile, whose S is given, dK of the tile before, S of the next.

    before, slot: places of the tile before and of this one. first, window: see _visible. ds_at,
    dq_at: where this thread stores dS and dQ. signed: where SIGNED, whether lse may hold a 1 for a
    negative gate: to ask once for all costs less than to negate nothing.
    """
    k_place, v_place, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, extras = buffers
    ROWS: gl.constexpr = BLOCK_Q * HEADS
    KEYS: gl.constexpr = k_place.shape[1]
    WIDTH: gl.constexpr = k_place.shape[2]
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    dtype: gl.constexpr = q_smem.dtype
    do = do_smem.index(slot)
    # Always 0, which the compiler cannot know: else it keeps the address of every slice of K and V
    # in registers throughout the loop, has too few, and moves them to memory and back.
    nought = n >> 30
    k = k_place.index(nought)
    v = v_place.index(nought)
    ds_place = ds_smem.index(n & 1)

    zero = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)
    dp = warpgroup_mma(v, do.permute([1, 0]), zero, use_acc=False, is_async=True)
    dk = warpgroup_mma(ds_smem.index((n & 1) ^ 1), q_smem.index(before), dk, is_async=True)
    lse = lse_smem.index(slot).load(COLUMN)
    p = gl.exp2(s * scale_log2 - lse[None, :])
    if SIGNED:
        if signed != 0:  # lse is read again, or it would take registers
            p = signed_by(p, lse_smem.index(slot).load(COLUMN)[None, :])
    if MASKED:
        seen = _visible(n, tiles, start, last, first, window, MODE, BLOCK_Q, HEADS, COLUMN)
        p = gl.where(seen, p, 0.0)
    if SIGNED:
        p16 = rounded_here(p, dtype)
    else:
        p16 = p.to(dtype)
    p16 = gl.convert_layout(p16, LEFT, assert_trivial=True)
    dv = warpgroup_mma(p16, do, dv, is_async=True)

    delta = delta_smem.index(slot).load(COLUMN)
    dp, dk = warpgroup_mma_wait(1, deps=[dp, dk])
    arrive_if(n > 0, first_bar, FREE + before)
    # All warps have read this place: dK and dQ of the tile before last, before they last met.
    store_tile((p * (dp - delta[None, :])).to(dtype), ds_at + (n & 1) * (KEYS * ROWS * 2))
    _meet()
    zero_dq = gl.zeros([ROWS, WIDTH], gl.float32, DQ_LAYOUT)
    dq = warpgroup_mma(ds_place.permute([1, 0]), k, zero_dq, use_acc=False, is_async=True)
    ahead = gl.where(slot == STAGES - 1, 0, slot + 1)
    phase = gl.where(slot == STAGES - 1, phase ^ 1, phase)
    await_phase_if(n + 1 < tiles, first_bar, READY + ahead, phase)
    # After the last tile this reads an old tile, and nobody the result.
    q_ahead = q_smem.index(ahead).permute([1, 0])
    s = warpgroup_mma(k, q_ahead, zero, use_acc=False, is_async=True)

    dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
    await_phase(first_bar, DQ_FREE, (n & 1) ^ 1)
    _put_dq(dq, dq_at)
    arrive(first_bar, DQ_READY)
    s = warpgroup_mma_wait(0, deps=[s])
    return dk, dv, s, slot, ahead, phase


@gluon.jit
def _wide_turn(
    dk, dk2, dv, s, n, tiles, start, last, buffers, first_bar, ds_at, dq_at, dq2_at, first, window,
    signed, scale_log2,
    MODE: gl.constexpr, BLOCK_Q: gl.constexpr, HEADS: gl.constexpr, S_LAYOUT: gl.constexpr,
    ACC_LAYOUT: gl.constexpr, DQ_LAYOUT: gl.constexpr, DQ2_LAYOUT: gl.constexpr,
    MASKED: gl.constexpr, SIGNED: gl.constexpr,
):  # fmt: skip
    """_span_turn where Q and K have more columns than V. dK and dV take 160 of a thread's 240
    registers, so that dP begins when S is done with its own, P is kept in 16 bits, and S of the
    next tile begins when most of dQ is in shared memory:

    tensor cores   dK(i-1)          dP(i)  dV(i)  dQ(i)             S(i+1)
    eight warps    P = exp2(S(i))   .....  dS(i)  dQ(i) to shared memory
    """
    k_place, v_place, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, extras = buffers
    k2_place, q2_smem, dq2_smem = extras
    ROWS: gl.constexpr = BLOCK_Q * HEADS
    KEYS: gl.constexpr = k_place.shape[1]
    WIDTH: gl.constexpr = k_place.shape[2]
    EXTRA: gl.constexpr = k2_place.shape[2]
    COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    dtype: gl.constexpr = q_smem.dtype
    nought = n >> 30  # see _span_turn
    slot = n & 1
    before = gl.where(n > 0, slot ^ 1, slot)
    k = k_place.index(nought)
    k2 = k2_place.index(nought)
    v = v_place.index(nought)
    do = do_smem.index(nought)
    ds_place = ds_smem.index(n & 1)

    ds_before = ds_smem.index((n & 1) ^ 1)
    dk = warpgroup_mma(ds_before, q_smem.index(before), dk, is_async=True)
    dk2 = warpgroup_mma(ds_before, q2_smem.index(before), dk2, is_async=True)
    lse = lse_smem.index(slot).load(COLUMN)
    p = gl.exp2(s * scale_log2 - lse[None, :])
    # Without SIGNED never, but a branch keeps the assembler from finding P after the next product.
    if (signed if SIGNED else nought) != 0:
        p = signed_by(p, lse_smem.index(slot).load(COLUMN)[None, :])
    if MASKED:
        seen = _visible(n, tiles, start, last, first, window, MODE, BLOCK_Q, HEADS, COLUMN)
        p = gl.where(seen, p, 0.0)
    p16 = rounded_here(p, dtype)
    await_phase(first_bar, DO_READY, n & 1)
    zero = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)
    minus_delta = delta_smem.index(nought).load(COLUMN)
    dp = gl.broadcast(minus_delta[None, :], zero)[0]
    dp = warpgroup_mma(v, do.permute([1, 0]), dp, is_async=True)
    left = gl.convert_layout(p16, LEFT, assert_trivial=True)
    dv = warpgroup_mma(left, do, dv, is_async=True)
    dp, dk, dk2 = warpgroup_mma_wait(1, deps=[dp, dk, dk2])
    arrive_if(n > 0, first_bar, FREE + before)
    ds = p16.to(gl.float32) * dp
    store_tile(ds.to(dtype), ds_at + (n & 1) * (KEYS * ROWS * 2))
    _meet()
    zero_dq = gl.zeros([ROWS, WIDTH], gl.float32, DQ_LAYOUT)
    dq = warpgroup_mma(ds_place.permute([1, 0]), k, zero_dq, use_acc=False, is_async=True)
    dv = warpgroup_mma_wait(1, deps=[dv])  # which gives the registers of P back
    arrive(first_bar, DO_FREE)
    zero_dq2 = gl.zeros([ROWS, EXTRA], gl.float32, DQ2_LAYOUT)
    dq2 = warpgroup_mma(ds_place.permute([1, 0]), k2, zero_dq2, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq])
    await_phase(first_bar, DQ_FREE, (n & 1) ^ 1)
    _put_dq(dq, dq_at)
    ahead = slot ^ 1
    await_phase_if(n + 1 < tiles, first_bar, READY + ahead, ((n + 1) >> 1) & 1)
    # After the last tile this reads an old tile, and nobody the result.
    s = warpgroup_mma(k, q_smem.index(ahead).permute([1, 0]), zero, use_acc=False, is_async=True)
    s = warpgroup_mma(k2, q2_smem.index(ahead).permute([1, 0]), s, is_async=True)
    dq2 = warpgroup_mma_wait(2, deps=[dq2])
    _put_dq(dq2, dq2_at)
    arrive(first_bar, DQ_READY)
    s = warpgroup_mma_wait(0, deps=[s])
    return dk, dk2, dv, s


@gluon.jit
def masked_rows(X, row, live, layout: gl.constexpr, WIDTH: gl.constexpr, STRIDE: gl.constexpr):
    """WIDTH columns of rows of X [.., STRIDE], zeros where not live."""
    at = row[:, None] * STRIDE + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    return gl.load(X + at, mask=live[:, None], other=0.0)


@gluon.jit
def finite(x):
    """x with 0 for what is not finite: a backward needs no other mark of a row that sees such a
    value, whose delta is NaN, and other rows would get 0 * NaN."""
    return gl.where(x.to(gl.float32) * 0.0 == 0.0, x, 0.0)


@gluon.jit
def bounded(x):
    """Keys as finite() makes values, but infinity becomes the largest number of the dtype: a score
    that was infinite in the forward stays as far away."""
    MOST: gl.constexpr = 65504.0 if x.dtype == gl.float16 else 3.3895313892515355e38
    y = x.to(gl.float32)
    y = gl.where(y == y, gl.minimum(gl.maximum(y, -MOST), MOST), 0.0)
    return y.to(x.dtype)


@gluon.jit
def _bring_last(
    Q, DO, STATS_ROWS, buffers, t0, m0, q_len, head0, HQ, lse_row, delta_row,
    BLOCK_Q: gl.constexpr, HEADS: gl.constexpr, COPY_LAYOUT: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """To the first places the last queries of a sequence where they fill no tile, which a
    descriptor would fill with those of the next one."""
    k_place, v_place, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, extras = buffers
    ROWS: gl.constexpr = BLOCK_Q * HEADS
    WIDTH: gl.constexpr = k_place.shape[2]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, COPY_LAYOUT))
    live = m0 + rows // HEADS < q_len
    row = (t0 + m0 + rows // HEADS).to(gl.int64) * HQ + head0 + rows % HEADS
    lse_smem.index(0).store(gl.load(STATS_ROWS + lse_row + rows, mask=live, other=float("inf")))
    delta_smem.index(0).store(gl.load(STATS_ROWS + delta_row + rows, mask=live, other=0.0))
    q_smem.index(0).store(masked_rows(Q, row, live, COPY_LAYOUT, WIDTH, WIDTH + EXTRA))
    do_smem.index(0).store(masked_rows(DO, row, live, COPY_LAYOUT, WIDTH, WIDTH))
    if EXTRA > 0:
        q2 = masked_rows(Q + WIDTH, row, live, COPY_LAYOUT, EXTRA, WIDTH + EXTRA)
        extras[1].index(0).store(q2)


@gluon.jit
def _put_keys(OUT, x, row, live, layout: gl.constexpr, STRIDE: gl.constexpr, SPLIT: gl.constexpr):
    """Columns of rows of dK or dV [.., STRIDE]: added to fp32 where several programs share a key,
    else written."""
    at = row[:, None] * STRIDE + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    if SPLIT:
        gl.atomic_add(OUT + at, x, mask=live[:, None], sem="relaxed")
    else:
        gl.store(OUT + at, x.to(OUT.dtype.element_ty), mask=live[:, None])


@gluon.jit
def _span_walk(
    Q, K, V, DO, STATS_ROWS, ANY_NEGATIVE, DK, DV_OUT, buffers, masked_tiles, tiles,
    start, last, q_begin, m_begin, q_len, n0, k_begin, k_len, group, G, lse_row,
    delta_row, q_start, span_a, span_b, scale, scale_log2,
    MODE: gl.constexpr, BLOCK_Q: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, SIGNED: gl.constexpr, EXTRA: gl.constexpr, DS_AT: gl.constexpr,
    DQ_AT: gl.constexpr, DQ2_AT: gl.constexpr, HEAD_AT: gl.constexpr,
):  # fmt: skip
    """The eight warps: a share of the queries past one tile of keys. DS_AT, DQ_AT, DQ2_AT: where
    memories begin, in bytes from the head of the store, which is at HEAD_AT."""
    k_place, v_place, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, extras = buffers
    ROWS: gl.constexpr = BLOCK_Q * HEADS
    KEYS: gl.constexpr = k_place.shape[1]
    WIDTH: gl.constexpr = k_place.shape[2]
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    # 64 rows are one warp group high: the groups share the columns.
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, WARPS // 4], [16, WIDTH // (WARPS // 4), 16]
    )
    COPY_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    # These are for the columns that Q and K have behind those of V.
    ACC2_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    DQ2_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, 32, 16])
    K_WIDTH: gl.constexpr = WIDTH + EXTRA
    head0 = group * HEADS
    key = n0 + gl.arange(0, KEYS, gl.SliceLayout(1, COPY_LAYOUT))
    key_row = (k_begin + key) * G + group
    # By pointers and once: keys past the sequence must be zeros, not the next one's.
    live = key < k_len
    k_place.index(0).store(bounded(masked_rows(K, key_row, live, COPY_LAYOUT, WIDTH, K_WIDTH)))
    v_place.index(0).store(finite(masked_rows(V, key_row, live, COPY_LAYOUT, WIDTH, WIDTH)))
    if EXTRA > 0:
        k2 = masked_rows(K + WIDTH, key_row, live, COPY_LAYOUT, EXTRA, K_WIDTH)
        extras[0].index(0).store(bounded(k2))
    if last > 0:
        past = (tiles - 1) * ROWS
        _bring_last(
            Q, DO, STATS_ROWS, buffers, q_begin, m_begin + (tiles - 1) * BLOCK_Q, q_len, head0,
            G * HEADS, lse_row + past, delta_row + past, BLOCK_Q, HEADS, COPY_LAYOUT, EXTRA,
        )  # fmt: skip
    # The first tile has none before it: its own Q times dS = 0.
    ds_smem.index(1).store(gl.zeros([KEYS, ROWS], q_smem.dtype, S_LAYOUT))
    fence_async_shared()
    program_barrier()

    key = n0 + gl.arange(0, KEYS, gl.SliceLayout(1, S_LAYOUT))
    # The first query that sees a key, from m_begin on; keys past the sequence are seen by none.
    if MODE == 0:
        first = key * span_b + span_a - 1 - q_start - m_begin
    else:
        first = key - q_start - m_begin
    first = gl.where(key < k_len, first, 2147483647)
    window = tiles * 0 + span_a  # a tensor even where 1 is known to the compiler
    dk = gl.zeros([KEYS, WIDTH], gl.float32, ACC_LAYOUT)
    dv = gl.zeros([KEYS, WIDTH], gl.float32, ACC_LAYOUT)
    dk2 = tiles * 0
    zero = gl.zeros([KEYS, ROWS], gl.float32, S_LAYOUT)
    first_bar = first_barrier(HEAD_AT)
    ds_at = kept(place_of_rows(first_bar + DS_AT))
    dq_at = kept(_place_in_dq(first_bar + DQ_AT, WIDTH))
    await_phase_if(tiles > 0, first_bar, READY, 0)
    q_ahead = q_smem.index(0).permute([1, 0])
    s = warpgroup_mma(k_place.index(0), q_ahead, zero, use_acc=False, is_async=True)
    # dK and dV take part so that their zeros are not written while the product runs.
    if EXTRA > 0:
        dq2_at = kept(_place_in_dq(first_bar + DQ2_AT, EXTRA))
        dk2 = gl.zeros([KEYS, EXTRA], gl.float32, ACC2_LAYOUT)
        q2_ahead = extras[1].index(0).permute([1, 0])
        s = warpgroup_mma(extras[0].index(0), q2_ahead, s, is_async=True)
        s, dk, dk2, dv = warpgroup_mma_wait(0, deps=[s, dk, dk2, dv])
    else:
        s, dk, dv = warpgroup_mma_wait(0, deps=[s, dk, dv])
    signed = tiles * 0
    if SIGNED:
        signed = gl.load(ANY_NEGATIVE)
    before = tiles * 0
    slot = tiles * 0
    phase = tiles * 0
    PARTS: gl.constexpr = 2 if MODE == 0 else 1  # a window's tiles are all masked
    for part in gl.static_range(PARTS):
        begin = masked_tiles if part == 1 else 0
        end = tiles if part == 1 else masked_tiles
        for n in range(begin, end):
            if EXTRA > 0:
                dk, dk2, dv, s = _wide_turn(
                    dk, dk2, dv, s, n, tiles, start, last, buffers, first_bar, ds_at, dq_at, dq2_at,
                    first, window, signed, scale_log2, MODE, BLOCK_Q, HEADS, S_LAYOUT, ACC_LAYOUT,
                    DQ_LAYOUT, DQ2_LAYOUT, part == 0, SIGNED,
                )  # fmt: skip
            else:
                dk, dv, s, before, slot, phase = _span_turn(
                    dk, dv, s, before, slot, phase, n, tiles, start, last, buffers, first_bar,
                    ds_at, dq_at, first, window, signed, scale_log2, MODE, BLOCK_Q, HEADS, STAGES,
                    S_LAYOUT, ACC_LAYOUT, DQ_LAYOUT, part == 0, SIGNED,
                )  # fmt: skip
    if EXTRA > 0:
        before = (tiles & 1) ^ 1
    if tiles > 0:
        dk = warpgroup_mma(ds_smem.index((tiles & 1) ^ 1), q_smem.index(before), dk)
        if EXTRA > 0:
            dk2 = warpgroup_mma(ds_smem.index((tiles & 1) ^ 1), extras[1].index(before), dk2)
    await_phase(first_bar, DQ_FREE, (tiles & 1) ^ 1)  # the last addition has read its tile
    key = n0 + gl.arange(0, KEYS, gl.SliceLayout(1, ACC_LAYOUT))
    key_row = (k_begin + key) * G + group
    _put_keys(DK, dk * scale, key_row, key < k_len, ACC_LAYOUT, K_WIDTH, SPLIT)
    _put_keys(DV_OUT, dv, key_row, key < k_len, ACC_LAYOUT, WIDTH, SPLIT)
    if EXTRA > 0:
        key = n0 + gl.arange(0, KEYS, gl.SliceLayout(1, ACC2_LAYOUT))
        key_row = (k_begin + key) * G + group
        _put_keys(DK + WIDTH, dk2 * scale, key_row, key < k_len, ACC2_LAYOUT, K_WIDTH, SPLIT)


@gluon.jit
def _span_bwd_hopper_kernel(
    Q, K, V, DO, STATS_ROWS, ANY_NEGATIVE, QD, DOD, STATS, DQD, QD2, DQD2, DK, DV_OUT, CU_Q, CU_K,
    SQ, SK, G, total_q, share, q_start, span_a, span_b, scale, scale_log2,
    MODE: gl.constexpr, VARLEN: gl.constexpr, BLOCK_Q: gl.constexpr, HEADS: gl.constexpr,
    KEYS: gl.constexpr, WIDTH: gl.constexpr, EXTRA: gl.constexpr, STAGES: gl.constexpr,
    DO_STAGES: gl.constexpr, SPLIT: gl.constexpr, SIGNED: gl.constexpr,
):  # fmt: skip
    """dK and dV of a share of the queries that see a key tile: added to fp32 where SPLIT, else
    written; their dQ is added to DQD. STATS_ROWS, STATS: what _row_stats_kernel wrote, two ways.
    ANY_NEGATIVE: where SIGNED, combine_bwd's flag. WIDTH: columns of V, which Q and K have too, and
    EXTRA more, of which the descriptors with a 2 are."""
    ROWS: gl.constexpr = BLOCK_Q * HEADS
    dtype: gl.constexpr = QD.dtype
    batch, group, tile, split, share = share_of_program(
        CU_Q, CU_K, SQ, SK, G, share, MODE, KEYS, BLOCK_Q, VARLEN
    )
    q_begin, q_len, k_begin, k_len = sequence_bounds(CU_Q, CU_K, batch, SQ, SK, VARLEN)
    n0 = tile * KEYS
    n_last = gl.minimum(n0 + KEYS, k_len) - 1
    if MODE == 0:
        m_begin = gl.maximum(n0 * span_b + span_a - 1 - q_start, 0) // BLOCK_Q * BLOCK_Q
        m_begin = gl.maximum(m_begin, split * share)
        m_end = gl.maximum(gl.minimum((split + 1) * share, q_len), m_begin)
    else:
        m_end = gl.minimum(gl.maximum(n_last + span_a - q_start, 0), q_len)
        m_begin = gl.maximum(n0 - q_start, 0) // BLOCK_Q * BLOCK_Q + split * share
        m_end = gl.maximum(gl.minimum(m_begin + share, m_end), m_begin)
    nothing = n0 >= k_len
    if SPLIT:  # else a program without queries writes zeros
        nothing = nothing | (m_begin == m_end)
    if nothing:
        return
    # Descriptors serve tiles of live queries only; a sequence may end inside a tile.
    whole_end = gl.minimum((m_end + BLOCK_Q - 1) // BLOCK_Q, q_len // BLOCK_Q) * BLOCK_Q
    whole_end = gl.maximum(whole_end, m_begin)
    last = (whole_end < m_end).to(gl.int32)
    tiles = (whole_end - m_begin) // BLOCK_Q + last
    masked_tiles = tiles
    start = tiles * 0
    if MODE == 0:
        full_begin = whole_end
        # From here on every query sees all KEYS keys.
        if n0 + KEYS <= k_len:
            full_begin = n_last * span_b + span_a - 1 - q_start + BLOCK_Q - 1
            full_begin = gl.maximum(full_begin // BLOCK_Q * BLOCK_Q, m_begin)
            full_begin = gl.minimum(full_begin, whole_end)
        masked_tiles = (full_begin - m_begin) // BLOCK_Q + last
    else:
        # The first multiple of share: no walk is longer, so that nearly each has one.
        start = (share - m_begin % share) % share // BLOCK_Q
        start = gl.where(start < tiles - last, start, 0)

    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    DQ_SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    # In lines of 128 bytes: barriers, lse and delta, then tiles, in such an order that each row of
    # them divides what is before it, as ONLY_WHOLE needs.
    LSE_AT: gl.constexpr = 2
    DELTA_AT: gl.constexpr = LSE_AT + STAGES * ROWS * 4 // LINE
    K_AT: gl.constexpr = (DELTA_AT + DO_STAGES * ROWS * 4 // LINE + 7) // 8 * 8
    V_AT: gl.constexpr = K_AT + KEYS * WIDTH * 2 // LINE
    DQ_AT: gl.constexpr = V_AT + KEYS * WIDTH * 2 // LINE
    Q_AT: gl.constexpr = DQ_AT + ROWS * WIDTH * 4 // LINE
    DO_AT: gl.constexpr = Q_AT + STAGES * ROWS * WIDTH * 2 // LINE
    K2_AT: gl.constexpr = DO_AT + DO_STAGES * ROWS * WIDTH * 2 // LINE
    Q2_AT: gl.constexpr = K2_AT + KEYS * EXTRA * 2 // LINE
    DS_AT: gl.constexpr = Q2_AT + STAGES * ROWS * EXTRA * 2 // LINE
    DQ2_AT: gl.constexpr = DS_AT + 2 * KEYS * ROWS * 2 // LINE
    LINES: gl.constexpr = DQ2_AT + ROWS * EXTRA * 4 // LINE
    STORE: gl.constexpr = store_of(LINES, LINE, K_AT, V_AT - K_AT)
    HEAD_AT: gl.constexpr = head_address(STORE)
    store = make_store(STORE)
    check_address(store, HEAD_AT)
    bars = carve(store, 0, gl.int64, [DQ_FREE + 1, 1], mbarrier.MBarrierLayout())
    lse_smem = carve(store, LSE_AT, gl.float32, [STAGES, ROWS], STATS.layout)
    delta_smem = carve(store, DELTA_AT, gl.float32, [DO_STAGES, ROWS], STATS.layout)
    # One K and one V, but indexed: see _span_turn.
    k_place = carve(store, K_AT, dtype, [1, KEYS, WIDTH], LAYOUT)
    v_place = carve(store, V_AT, dtype, [1, KEYS, WIDTH], LAYOUT)
    q_smem = carve(store, Q_AT, dtype, [STAGES, ROWS, WIDTH], LAYOUT)
    do_smem = carve(store, DO_AT, dtype, [DO_STAGES, ROWS, WIDTH], LAYOUT)
    ds_smem = carve(store, DS_AT, dtype, [2, KEYS, ROWS], LAYOUT)
    dq_smem = carve(store, DQ_AT, gl.float32, [ROWS, WIDTH], DQ_SHARED)
    extras = ()
    if EXTRA > 0:
        extras = (
            carve(store, K2_AT, dtype, [1, KEYS, EXTRA], LAYOUT),
            carve(store, Q2_AT, dtype, [STAGES, ROWS, EXTRA], LAYOUT),
            carve(store, DQ2_AT, gl.float32, [ROWS, EXTRA], DQ_SHARED),
        )
    WARPS: gl.constexpr = gl.num_warps()
    for i in gl.static_range(3):  # places of Q, or of Q and dO
        mbarrier.init(bars.index(READY + i), count=1)
        mbarrier.init(bars.index(FREE + i), count=WARPS)
    mbarrier.init(bars.index(DQ_READY), count=WARPS)
    mbarrier.init(bars.index(DQ_FREE), count=1)
    program_barrier()
    buffers = (k_place, v_place, q_smem, do_smem, lse_smem, delta_smem, ds_smem, dq_smem, extras)

    # Rows of all sequences fit 31 bits, see usable().
    q_begin = q_begin.to(gl.int32)
    t0 = q_begin + m_begin
    lse_row = (group * total_q + t0) * HEADS
    delta_row = lse_row + total_q * G * HEADS
    gl.warp_specialize([
        (_span_walk, (
            Q, K, V, DO, STATS_ROWS, ANY_NEGATIVE, DK, DV_OUT, buffers, masked_tiles, tiles,
            start, last, q_begin, m_begin, q_len, n0, k_begin, k_len,
            group, G, lse_row, delta_row, q_start, span_a, span_b, scale, scale_log2, MODE, BLOCK_Q,
            HEADS, STAGES, SPLIT, SIGNED, EXTRA,
            from_head(STORE, DS_AT), from_head(STORE, DQ_AT), from_head(STORE, DQ2_AT), HEAD_AT,
        )),
        (_fetch_rows, (
            QD, QD2, DOD, STATS, buffers, bars, tiles, start, last, t0, group * HEADS, lse_row,
            delta_row, MODE, BLOCK_Q, HEADS, STAGES, EXTRA,
        )),
        (_add_tiles, (
            DQD, DQD2, dq_smem, extras, bars, tiles, start, last, t0, group * HEADS, MODE, EXTRA,
        )),
    ], [1, 1], [LEAST_REGISTERS, LEAST_REGISTERS])  # fmt: skip


def _head_tiles(x: torch.Tensor, block_q: int, heads: int, width: int) -> Any:
    """Descriptor of [block_q, heads, width] tiles of x [.., heads in all, columns]."""
    layout = shared_layout(128, x.element_size() * 8, 3)
    return descriptor(x.view(-1, *x.shape[-2:]), (block_q, heads, width), layout)


TAKES = (
    "16-bit heads, 64 or 128 wide for Dk = Dv or 192 and 128, a power of two of them from 4 on a "
    "group"
)


def usable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor) -> bool:
    """Return whether this module takes the call: see TAKES, and contiguous tensors."""
    heads = q.shape[-2] // k.shape[-2]
    return (
        heads % 4 == 0
        and heads & (heads - 1) == 0
        and heads <= ROWS
        and (q.shape[-1], v.shape[-1]) in STAGES
        and q.element_size() == 2
        and 2 * q.numel() // q.shape[-1] < 2**31
        and tma_usable(90, q, whole=grad_out)
        and tma_usable(90, k, whole=v)
    )


def query_share(sq: int, columns: int, block_q: int, sms: int) -> int:
    """Queries of one program, a multiple of block_q, for `columns` (key tile, group) pairs."""
    # About sixteen programs per multiprocessor, half of them in the future and empty.
    share = pow2(max(sq * columns // (16 * sms), 1) + 1) // 2
    return cdiv(min(max(share, 128), 2048), block_q) * block_q


def window_share(sq: int, window: int, block_q: int, programs: int, sms: int) -> tuple[int, int]:
    """(share, splits): as query_share, but counted from the first query that sees a tile's keys."""
    # Tiles that so many queries in a row can touch.
    tiles = (min(window + KEYS - 1, sq) + block_q - 2) // block_q + 1

    def cost(parts: int) -> int:
        # In tiles of 2.6 us on an H200; a program begins and ends for 6, with sums in fp32 for 17.
        rounds = (parts * programs + sms - 1) // sms
        return rounds * ((tiles + parts - 1) // parts + (17 if parts > 1 else 6))

    parts = min(range(1, 9), key=cost)
    share = (tiles + parts - 1) // parts
    return share * block_q, (tiles + share - 1) // share


def span_attention_bwd_hopper(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor,
    delta: torch.Tensor, span: Span, softmax_scale: float, at: Rows, dq: torch.Tensor | None,
    q_start: int, any_negative: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk, dv as span_attention_bwd returns them, for inputs that are usable()."""
    groups, width = v.shape[-2:]
    heads, extra = q.shape[-2] // groups, q.shape[-1] - width
    block_q = ROWS // heads
    sms = sm_count(q.device)
    if span.mode == COMPRESSED:
        span_a = span.a
        share = query_share(at.longest, at.filled_tiles(KEYS) * groups, block_q, sms)
        splits = cdiv(at.longest, share)
        splits = min(splits, MOST_SHARES) if at.cu else splits
    else:
        span_a = min(span.a, q_start + at.longest)  # more changes nothing but could overflow
        programs = at.filled_tiles(KEYS) * groups
        share, splits = window_share(at.longest, span_a, block_q, programs, sms)
    acc = torch.zeros(q.shape, device=q.device, dtype=torch.float32) if dq is None else dq
    # Added to if the pass is split, else written; but keys of a pack may be in no sequence.
    make = torch.zeros_like if at.cu else torch.empty_like
    dk, dv = zero_sums(k, v) if splits > 1 else (make(k), make(v))
    signed, n_rows = any_negative is not None, lse.numel()
    # lse and delta as P and dS need them, in the order in which a group reads them; or minus delta,
    # with which dP begins in _wide_turn.
    stats = torch.empty(2 * n_rows, device=lse.device, dtype=torch.float32)
    launch(
        _row_stats_kernel, (cdiv(n_rows, 1024),), lse, delta, stats, at.tokens, lse.shape[-1],
        HEADS=heads, BLOCK=1024, SIGNED=signed, MINUS=extra > 0,
    )  # fmt: skip
    stats_tiles = descriptor(stats, (ROWS,), shared_layout(0, 32, 1))
    rows, sums = (_head_tiles(x, block_q, heads, width) for x in (q, acc))
    more = (rows, sums)
    if extra:
        more = tuple(_head_tiles(x, block_q, heads, extra) for x in (q, acc))
    stages, do_stages = STAGES[q.shape[-1], width]
    launch(
        _span_bwd_hopper_kernel, at.shares(KEYS, groups, share, splits),
        q, k, v, grad_out, stats, any_negative if signed else stats, rows,
        _head_tiles(grad_out, block_q, heads, width), stats_tiles, sums, *more, dk, dv,
        *(at.cu or (lse, lse)), at.sq, splits if at.cu else at.sk, groups, at.tokens, share,
        q_start, span_a, span.b, softmax_scale, softmax_scale * LOG2E,
        MODE=span.mode, VARLEN=at.cu is not None, BLOCK_Q=block_q, HEADS=heads, KEYS=KEYS,
        WIDTH=width, EXTRA=extra, STAGES=stages, DO_STAGES=do_stages, SPLIT=splits > 1,
        SIGNED=signed, num_warps=WARPS, maxnreg=START_REGISTERS,
    )  # fmt: skip
    if dq is None:
        dq = rounded(acc, softmax_scale, q)
    return dq, *rounded_keys(dk, dv, k, v)
