"""Forward of selection attention on Hopper: eight neighbouring queries share the blocks they read.

What bounds the kernel of single queries (fwd_triton.py) is the L2, from which every query reads
its own blocks. Here a program has a tile of eight queries, a warp for each, and one more warp that
brings every block of the tile once (tile_blocks.py), in the order of the keys, through a ring in
shared memory: of random blocks that is a quarter of the reads at 4k tokens and 70 % at 64k. A warp
works on the blocks that its query chose, and only on those, so no product is wasted, rows need no
mask and the outcome does not depend on the neighbours. Four warps that all take a block, and see
all of it, do so in one product of their warpgroup, which reads it once. The ring lets fast warps
run ahead of slow ones by as many blocks as it holds. The outputs of the other branches are at hand
by then: their gated sum (combine.py) is taken at the end, beside the reads from the L2.

In long sequences tiles whose queries agree on little go by keys (tile_blocks.py), and what is left
for this kernel is the others, and those with rows that are not finite, which it does from the
start. With 4 or 8 heads a group all tiles do, which may be of more queries than eight.

Everything keeps to a warp (warps.py): products of 16 rows, reductions over keys, operands from
shared memory.

Every warp passes all blocks of the ring, also those that it leaves out: one that skipped them could
be overtaken by two rounds and would take the parity of a later round for its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from nsa.kernels.launch import launch
from nsa.kernels.prefill.blocks import fwd_by_keys_hopper, tile_blocks
from nsa.kernels.prefill.blocks.fwd_by_keys_ends import begin_tiles, end_tiles
from nsa.kernels.prefill.blocks.fwd_by_keys_sums import begin_sums
from nsa.kernels.prefill.blocks.selection import Selection
from nsa.kernels.prefill.combine import Others
from nsa.kernels.prefill.releases import (
    SINCE_3_8,
    carve,
    head_address,
    make_store,
    program_barrier,
    store_of,
    tma_load,
    warpgroup_mma_wait,
)
from nsa.kernels.prefill.warps import (
    LEAST_REGISTERS,
    START_REGISTERS,
    UNIT,
    arrive,
    await_phase,
    check_address,
    first_barrier,
    warp_number,
)
from nsa.kernels.row_tiles import descriptor, shared_layout, tma_usable
from nsa.kernels.tiles import LOG2E, cdiv, sm_count

# P V of a block that is not seen to its end goes by 16 keys at a time. In one, ptxas 13.4 keeps 320
# bytes on the stack, some of them in the loops over whole blocks; so it keeps 40, and none there.
IN_STEPS = gl.constexpr(SINCE_3_8)
KEYS = 64  # of a block in the ring, or of a part of one; 32 where blocks are of 32
HEADS = 16  # rows of a warp's product
WARPS = tile_blocks.EIGHT.value  # one a query: with 16, a third of the registers is missing
# Blocks of KEYS that fit, by the width of a head of K and V. 192 are 128 and 64 more.
STAGES = {(64, 64): 14, (128, 128): 7, (192, 128): 5}


@gluon.jit
def _by_thread(x):
    """[rows, keys] as [rows, keys / 8, 8], whose middle axis lies within a thread."""
    return x.reshape([x.shape[0], x.shape[1] // 8, 8])


@gluon.jit
def _weights(s, m, scale_log2):
    """(probabilities, the largest score so far, what scales those before), in base 2."""
    # First within a thread, in several chains instead of one.
    top = gl.max(gl.max(_by_thread(s), 1), 1)
    top = gl.convert_layout(top, gl.SliceLayout(1, s.type.layout), assert_trivial=True)
    m_new = gl.maximum(m, top * scale_log2)
    return gl.exp2(s * scale_log2 - m_new[:, None]), m_new, gl.exp2(m - m_new)


@gluon.jit
def _summed(l, alpha, p):
    """Sums of the rows so far, l [rows, 8]: they stay with the threads until the end."""
    scale = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout), assert_trivial=True)
    return l * scale[:, None] + gl.sum(_by_thread(p), 1)


@gluon.jit
def _halves(x):
    """x [rows, keys] as two of half the keys."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute([0, 2, 1]))


@gluon.jit
def _columns(k, k2, part: gl.constexpr):
    """16 columns of a block's keys, as the right operand of scores; k2: those behind k's."""
    WIDTH: gl.constexpr = k.shape[1]
    if part * 16 < WIDTH:
        return k.slice(part * 16, 16, dim=1).permute([1, 0])
    else:
        return k2.slice(part * 16 - WIDTH, 16, dim=1).permute([1, 0])


@gluon.jit
def _attend(acc, m, l, q, k, k2, v, last, scale_log2, MASKED: gl.constexpr):
    """Online softmax over one block, of which keys up to `last` are seen."""
    KEYS: gl.constexpr = k.shape[0]
    LAYOUT: gl.constexpr = acc.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LAYOUT, 2)
    s = gl.zeros([acc.shape[0], KEYS], gl.float32, LAYOUT)
    # In steps, or the operand takes too many registers.
    for part in gl.static_range(len(q)):
        s = mma_v2(q[part], _columns(k, k2, part).load(RIGHT), s)
    if MASKED:
        key = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
        s = gl.where((key <= last)[None, :], s, float("-inf"))
    p, m, alpha = _weights(s, m, scale_log2)
    if MASKED and IN_STEPS:
        l = _summed(l, alpha, p)
        acc = acc * alpha[:, None]
        parts = _halves(p.to(v.dtype))
        if KEYS == 64:
            parts = _halves(parts[0]) + _halves(parts[1])
        for part in gl.static_range(len(parts)):
            left = gl.convert_layout(parts[part], LEFT, assert_trivial=True)
            live = part * 16 + gl.arange(0, 16, gl.SliceLayout(1, RIGHT)) <= last
            right = gl.where(live[:, None], v.slice(part * 16, 16).load(RIGHT), 0.0)
            acc = mma_v2(left, right, acc)
    else:
        right = v.load(RIGHT)
        if MASKED:  # what lies behind may be NaN
            key = gl.arange(0, KEYS, gl.SliceLayout(1, RIGHT))
            right = gl.where((key <= last)[:, None], right, 0.0)
        left = gl.convert_layout(p.to(v.dtype), LEFT, assert_trivial=True)
        acc = mma_v2(left, right, acc * alpha[:, None])
        l = _summed(l, alpha, p)
    return acc, m, l


@gluon.jit
def _attend_together(acc, m, l, q, k, k2, v, scale_log2):
    """_attend of the four warps of a group that all take this block and see all of it."""
    KEYS: gl.constexpr = k.shape[0]
    WIDTH: gl.constexpr = k.shape[1]
    ROWS: gl.constexpr = acc.shape[0]
    LAYOUT: gl.constexpr = acc.type.layout
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, S_LAYOUT, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    s = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    for part in gl.static_range(len(q)):
        left = gl.convert_layout(q[part], LEFT, assert_trivial=True)
        right = _columns(k, k2, part)
        s = warpgroup_mma(left, right, s, use_acc=part > 0, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    s = gl.convert_layout(s, LAYOUT, assert_trivial=True)
    p, m, alpha = _weights(s, m, scale_log2)
    left = gl.convert_layout(p.to(v.dtype), RIGHT, assert_trivial=True)
    acc = gl.convert_layout(acc * alpha[:, None], ACC_LAYOUT, assert_trivial=True)
    acc = warpgroup_mma(left, v, acc, is_async=True)
    l = _summed(l, alpha, p)
    acc = warpgroup_mma_wait(0, deps=[acc])
    return gl.convert_layout(acc, LAYOUT, assert_trivial=True), m, l


@gluon.jit
def _other(X, place, gate, live, GATED: gl.constexpr):
    """Another branch's output, by its gate unless it is gated already."""
    x = gl.load(X + place, mask=live[:, None], other=0.0).to(gl.float32)
    if GATED:
        x = x * gl.load(gate, mask=live, other=0.0).to(gl.float32)[:, None]
    return x


@gluon.jit
def _rows(
    tile, group, T, G, H, HEADS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """(row of the outputs, whether there is one, where its numbers are) of each row of a tile."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token = tile * (ROWS // HEADS) + rows // HEADS
    row = (token.to(gl.int64) * G + group) * H + rows % HEADS
    place = row[:, None] * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    return row, (token < T) & (rows % HEADS < H), place


@gluon.jit
def _query_of(ROWS: gl.constexpr, HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """The query in its tile of each row."""
    return gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT)) // HEADS


@gluon.jit
def _items(WHOLE, tiles, G, SOME: gl.constexpr):
    """How many tiles there are for all programs."""
    if SOME:
        return gl.load(WHOLE)
    else:
        return tiles * G


@gluon.jit
def _item(item, WHOLE, tiles, G, SOME: gl.constexpr):
    """(tile of eight, group). Group is the slow axis: its K and V stay in L2 while tiles pass."""
    if SOME:
        at = gl.load(WHOLE + 1 + item)
        return at // G, at % G
    else:
        return item % tiles, item // tiles


@gluon.jit
def _consume(
    Q, O, LSE, O_CMP, O_WIN, GATES, SUM, ENTRIES, COUNTS, WHOLE, UNDONE, k_ring, k2_ring, v_ring, T,
    S, S_KV, G, H, q_start, scale_log2,
    VARLEN: gl.constexpr, HEADS: gl.constexpr, ROOM: gl.constexpr, OTHERS: gl.constexpr,
    KEEP: gl.constexpr, SOME: gl.constexpr, EIGHTS: gl.constexpr, PART: gl.constexpr,
    EXTRA: gl.constexpr, HEAD_AT: gl.constexpr,
):  # fmt: skip
    """A warp for each query of a tile, tile after tile."""
    STAGES: gl.constexpr = k_ring.shape[0]
    KEYS: gl.constexpr = k_ring.shape[1]
    WIDTH: gl.constexpr = k_ring.shape[2]
    Q_WIDTH: gl.constexpr = WIDTH + EXTRA
    QUERIES: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = QUERIES * HEADS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [QUERIES, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    warp = warp_number()
    first = first_barrier(HEAD_AT)
    tiles = (T + QUERIES - 1) // QUERIES
    slot = 0
    parity = 0
    for item in range(gl.program_id(0), _items(WHOLE, tiles, G, SOME), gl.num_programs(0)):
        tile, group = _item(item, WHOLE, tiles, G, SOME)
        at = tile // EIGHTS * G + group
        # The first of these queries in the tile that the lists are of.
        before = tile % EIGHTS * QUERIES
        count = gl.load(COUNTS + at)
        entries = ENTRIES + at.to(gl.int64) * ROOM
        entry = gl.load(entries)
        token = gl.minimum(tile * QUERIES + warp, T - 1)
        if VARLEN:  # the row of its own key, which is the last one seen
            own = token + q_start
        else:
            own = token // S * S_KV + token % S + q_start
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, LEFT))
        its_token = gl.minimum(tile * QUERIES + rows // HEADS, T - 1).to(gl.int64)
        q_row = (its_token * G + group) * H + gl.minimum(rows % HEADS, H - 1)
        columns = gl.arange(0, 16, gl.SliceLayout(0, LEFT))
        q = ()
        for part in gl.static_range(Q_WIDTH // 16):
            q = q + (gl.load(Q + q_row[:, None] * Q_WIDTH + (part * 16 + columns)[None, :]),)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT)
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
        l = gl.sum(_by_thread(gl.zeros([ROWS, KEYS], gl.float32, LAYOUT)), 1)
        for i in range(count):
            chosen = entry.to(gl.int32) >> before
            mine = (chosen >> warp) & 1
            last = own - (entry >> 32).to(gl.int32)
            # The group's first query sees the fewest keys: asked of it, all four decide alike.
            together = ((chosen >> (warp & 4)) & 15 == 15) & (last - (warp & 3) >= KEYS - 1)
            entry = gl.load(entries + gl.minimum(i + 1, ROOM - 1))
            await_phase(first, slot, parity)
            if together:
                acc, m, l = _attend_together(
                    acc, m, l, q, k_ring.index(slot), k2_ring.index(slot), v_ring.index(slot),
                    scale_log2,
                )  # fmt: skip
            elif mine != 0:
                k = k_ring.index(slot)
                k2 = k2_ring.index(slot)
                v = v_ring.index(slot)
                if last < KEYS - 1:
                    acc, m, l = _attend(acc, m, l, q, k, k2, v, last, scale_log2, True)
                else:
                    acc, m, l = _attend(acc, m, l, q, k, k2, v, last, scale_log2, False)
            arrive(first, STAGES + slot)
            slot += 1
            if slot == STAGES:
                slot = 0
                parity ^= 1
        row, live, place = _rows(tile, group, T, G, H, HEADS, ROWS, WIDTH, LAYOUT)
        if SOME:
            undone = gl.load(UNDONE + at)
            part = (before + _query_of(ROWS, HEADS, LAYOUT)) // PART
            live = live & (((undone >> part) & 1) > 0)
        l = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
        # A row that attends nothing has l = 0: output 0 and lse = -inf.
        lse = gl.where(l > 0, (m + gl.log2(l)) * 0.6931471805599453, float("-inf"))
        gl.store(LSE + row, lse, mask=live)
        out = (acc * (1.0 / gl.where(l > 0, l, 1.0))[:, None]).to(O.dtype.element_ty)
        if KEEP:
            gl.store(O + place, out, mask=live[:, None])
        if OTHERS > 0:  # as _combine_fwd_kernel
            total = _other(O_CMP, place, GATES + row * 3, live, OTHERS == 2)
            gate = gl.load(GATES + row * 3 + 1, mask=live, other=0.0).to(gl.float32)
            total += out.to(gl.float32) * gate[:, None]
            if OTHERS == 2:
                total += _other(O_WIN, place, GATES + row * 3 + 2, live, True)
            gl.store(SUM + place, total.to(SUM.dtype.element_ty), mask=live[:, None])


@gluon.jit
def _produce(
    KD, KD2, VD, ENTRIES, COUNTS, WHOLE, k_ring, k2_ring, v_ring, bars, T, G,
    QUERIES: gl.constexpr, ROOM: gl.constexpr, SOME: gl.constexpr, EIGHTS: gl.constexpr,
    EXTRA: gl.constexpr,
):  # fmt: skip
    """The warp that brings the blocks."""
    STAGES: gl.constexpr = k_ring.shape[0]
    WIDTH: gl.constexpr = k_ring.shape[2]
    tiles = (T + QUERIES - 1) // QUERIES
    slot = 0
    parity = 1  # the phase before the first counts as complete
    for item in range(gl.program_id(0), _items(WHOLE, tiles, G, SOME), gl.num_programs(0)):
        tile, group = _item(item, WHOLE, tiles, G, SOME)
        at = tile // EIGHTS * G + group
        count = gl.load(COUNTS + at)
        entries = ENTRIES + at.to(gl.int64) * ROOM
        entry = gl.load(entries)
        for i in range(count):
            row = (entry >> 32).to(gl.int32)
            entry = gl.load(entries + gl.minimum(i + 1, ROOM - 1))
            bar = bars.index(slot)
            mbarrier.wait(bars.index(STAGES + slot), parity)
            if EXTRA > 0:
                mbarrier.expect(bar, 2 * KD.block_type.nbytes + KD2.block_type.nbytes)
            else:
                mbarrier.expect(bar, 2 * KD.block_type.nbytes)
            tma_load(KD, [row, group * (WIDTH + EXTRA)], bar, k_ring.index(slot))
            if EXTRA > 0:
                column = group * (WIDTH + EXTRA) + WIDTH
                tma_load(KD2, [row, column], bar, k2_ring.index(slot))
            tma_load(VD, [row, group * WIDTH], bar, v_ring.index(slot))
            slot += 1
            if slot == STAGES:
                slot = 0
                parity ^= 1


@gluon.jit
def _block_attn_fwd_hopper_kernel(
    Q, KD, KD2, VD, O, LSE, O_CMP, O_WIN, GATES, SUM, ENTRIES, COUNTS, WHOLE, UNDONE, T, S, S_KV, G,
    H, q_start, scale_log2,
    VARLEN: gl.constexpr, HEADS: gl.constexpr, ROOM: gl.constexpr, STAGES: gl.constexpr,
    OTHERS: gl.constexpr, KEEP: gl.constexpr, SOME: gl.constexpr, EIGHTS: gl.constexpr,
    PART: gl.constexpr, EXTRA: gl.constexpr,
):  # fmt: skip
    """LSE, with KEEP O, and with OTHERS the gated SUM of O and two OTHERS, O_CMP and O_WIN, or one:
    O_CMP, which is the gated sum of both. SOME: of the tiles in WHOLE what is in UNDONE
    (tile_blocks.Rest), by lists of EIGHTS times as many queries, in parts of PART. EXTRA: columns
    of Q and K behind as many as V has, which KD2 brings."""
    dtype: gl.constexpr = KD.dtype
    WARPS: gl.constexpr = gl.num_warps()
    TILE: gl.constexpr = KD.block_type.nbytes // UNIT
    K2_AT: gl.constexpr = 1 + 2 * STAGES * TILE
    UNITS: gl.constexpr = K2_AT + (STAGES * KD2.block_type.nbytes // UNIT if EXTRA > 0 else 0)
    STORE: gl.constexpr = store_of(UNITS, UNIT)
    HEAD_AT: gl.constexpr = head_address(STORE)
    store = make_store(STORE)
    check_address(store, HEAD_AT)
    # Barriers `full` of all stages, then `empty`.
    bars = carve(store, 0, gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    k_ring = carve(store, 1, dtype, [STAGES] + KD.block_type.shape, KD.layout)
    v_ring = carve(store, 1 + STAGES * TILE, dtype, [STAGES] + VD.block_type.shape, VD.layout)
    k2_ring = k_ring
    if EXTRA > 0:
        k2_ring = carve(store, K2_AT, dtype, [STAGES] + KD2.block_type.shape, KD2.layout)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
        mbarrier.init(bars.index(STAGES + i), count=WARPS)
    program_barrier()
    gl.warp_specialize([
        (_consume, (
            Q, O, LSE, O_CMP, O_WIN, GATES, SUM, ENTRIES, COUNTS, WHOLE, UNDONE, k_ring, k2_ring,
            v_ring, T, S, S_KV, G, H, q_start, scale_log2, VARLEN, HEADS, ROOM, OTHERS, KEEP, SOME,
            EIGHTS, PART, EXTRA, HEAD_AT,
        )),
        (_produce, (
            KD, KD2, VD, ENTRIES, COUNTS, WHOLE, k_ring, k2_ring, v_ring, bars, T, G, WARPS, ROOM,
            SOME, EIGHTS, EXTRA,
        )),
    ], [1], [LEAST_REGISTERS])  # fmt: skip


def _blocks(x: Tensor, keys: int, columns: int) -> Any:
    """Descriptor of `columns` of one group's blocks of keys in x [.., G, width]."""
    layout = shared_layout(128, x.element_size() * 8, 2)
    return descriptor(x.view(-1, x.shape[-2] * x.shape[-1]), (keys, columns), layout)


TAKES = (
    "16-bit heads, 64 or 128 wide for Dk = Dv or 192 and 128, "
    "9 to 16 a group (4 or 8 in long sequences), and blocks of 32 (with 9 to 16), 64, 128 .. keys"
)


def usable(
    q: Tensor, k: Tensor, v: Tensor, n_sel: int, block_size: int, softmax_scale: float, longest: int
) -> bool:
    """Return whether this module takes the call: see TAKES, and contiguous tensors. longest:
    keys of the longest sequence."""
    heads = q.shape[-2] // k.shape[-2]
    shares = HEADS // 2 < heads <= HEADS
    n_parts = n_sel * cdiv(block_size, KEYS)
    return (
        (block_size % KEYS == 0 or block_size == KEYS // 2)
        and (shares or block_size >= KEYS and splits(q, v, n_parts, longest))
        and (q.shape[-1], v.shape[-1]) in STAGES
        and n_sel > 0
        and tile_blocks.room(WARPS if shares else tile_blocks.queries_of(heads), n_parts)
        <= tile_blocks.MOST_ENTRIES
        and softmax_scale > 0  # the maximum is that of unscaled scores
        and k.numel() // (k.shape[-2] * k.shape[-1]) < 2**31
        and tma_usable(90, q)
        and tma_usable(90, k, whole=v)
    )


def splits(q: Tensor, v: Tensor, n_parts: int, longest: int) -> bool:
    """Whether tiles may go by keys for inputs that are usable(). n_parts: of KEYS keys that a query
    chose. longest: keys of the longest sequence. Sums by keys do not repeat bitwise."""
    heads = q.shape[-2] // v.shape[-2]
    return (
        fwd_by_keys_hopper.usable(q, v, n_parts)
        and longest >= tile_blocks.SPLIT_KEYS[heads]
        and q.numel() // (q.shape[-2] * q.shape[-1]) >= tile_blocks.SPLIT_QUERIES[heads]
        and not torch.are_deterministic_algorithms_enabled()
    )


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, by: Selection, out: Tensor | None, lse: Tensor, longest: int,
    others: Others | None, total: Tensor | None,
) -> None:  # fmt: skip
    """Fill lse, and out and total where they are given, for inputs that are usable(); see
    gated_block_attention_fwd. longest: keys of the longest sequence."""
    hq, dim = q.shape[-2:]
    groups, width = v.shape[-2:]
    extra = dim - width
    tokens = q.numel() // (hq * dim)
    s_q, s_kv = by.lengths(q, k)
    keep = out is not None
    out, total = (out if keep else total), (total if others else out)
    keys, parts = min(by.block_size, KEYS), cdiv(by.block_size, KEYS)
    n_parts = by.n_sel * parts
    split = keys == KEYS and splits(q, v, n_parts, longest)
    heads = hq // groups
    lists = tile_blocks.tile_blocks(
        by.blocks, by.seq_begin, s_q, s_kv, by.q_start, keys, heads=heads if split else 0,
        queries=tile_blocks.queries_of(heads) if split else WARPS, parts=parts,
        costs=tile_blocks.COSTS[dim, width],
    )  # fmt: skip
    some = (lists.counts,) * 2
    if split:
        sums = begin_sums(q, v, n_parts, KEYS, total)
        begin_tiles(q, k, v, by, lists, sums)
        fwd_by_keys_hopper.add_sums(q, k, v, by._replace(blocks=lists.rest.blocks), sums)
        end_tiles(lists, sums, out if keep else None, lse, others, total)
        some = (lists.rest.whole, lists.rest.undone)
    programs = min(lists.counts.numel(), sm_count(q.device))
    o_cmp, o_win, gates = others or (out, None, out)
    n_others = (1 if o_win is None else 2) if others else 0
    launch(
        _block_attn_fwd_hopper_kernel, (programs,),
        q, _blocks(k, keys, width), _blocks(k, keys, extra or width), _blocks(v, keys, width), out,
        lse, o_cmp,
        o_cmp if o_win is None else o_win, gates, total, lists.entries, lists.counts, *some,
        tokens, s_q, s_kv, groups, heads, by.q_start, by.softmax_scale * LOG2E,
        VARLEN=by.packed, HEADS=HEADS, ROOM=lists.entries.shape[-1],
        STAGES=STAGES[dim, width] * KEYS // keys,
        OTHERS=n_others, KEEP=keep, SOME=split, EIGHTS=lists.queries // WARPS,
        PART=max(lists.part, 1), EXTRA=extra, num_warps=WARPS, maxnreg=START_REGISTERS,
    )  # fmt: skip
