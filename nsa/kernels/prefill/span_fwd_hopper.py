"""Forward of compressed and sliding attention on Hopper: one warp loads, two warpgroups compute.

The same function as span_fwd.py, in Gluon, Triton's lower level, for what plain Triton cannot say:
- 128 rows share every key tile that is read from L2, yet the two warpgroups of 64 rows run freely:
  while one does its softmax the other keeps the tensor cores busy.
- Within a warpgroup P V of one tile and Q K^T of the next are in flight at the same time, and the
  softmax of the next hides the product with V.
- The few keys of a window that only neighbours of its first query see make a tile of their own
  width, whose softmax is that of the first whole tile.
- A program stays for many work items: the queries and keys of the next one arrive under the last
  products of the one before, and outputs leave on their own.

H200, bf16, D=128, 64k tokens, 64 heads in 4 groups, both in one process under the power cap of the
board (clocks fall to it with either): compressed 7.7 ms against 9.7, window 512 2.0 against 3.7.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.kernels.launch import launch
from nsa.kernels.prefill.span_common import span_hi, span_lo
from nsa.kernels.prefill.span_kinds import COMPRESSED, Span
from nsa.kernels.row_tiles import descriptor, shared_layout
from nsa.kernels.tiles import LOG2E, cdiv, sm_count

CONSUMERS = 2
ROWS = 64  # per consumer: the rows of one warpgroup's matrix product
Q_STAGES = gl.constexpr(2)  # work items whose queries are in flight


@gluon.jit
def _work(
    item, ITEMS, CU_Q, CU_K, SQ, SK, G, BATCH, VARLEN: gl.constexpr, QUERIES: gl.constexpr
):  # fmt: skip
    """What a work item is: its group, where its sequence lies in Q and K, and its first query.

    Late queries see most keys: they come first, so that the last items are short.
    """
    if VARLEN:
        group = item % G
        tile = ITEMS // G - 1 - item // G
        # Sequence i owns the tiles from cu_q[i] // QUERIES + i on. That leaves room for all of it,
        # and at most one tile unused, whatever the lengths.
        batch = 0
        end = BATCH
        while end - batch > 1:
            middle = (batch + end) // 2
            if gl.load(CU_Q + middle) // QUERIES + middle <= tile:
                batch = middle
            else:
                end = middle
        q_begin = gl.load(CU_Q + batch)
        q_len = gl.load(CU_Q + batch + 1) - q_begin
        k_begin = gl.load(CU_K + batch)
        k_len = gl.load(CU_K + batch + 1) - k_begin
        k_batch = 0
        q0 = (tile - (q_begin // QUERIES + batch)) * QUERIES
    else:
        group = item % G
        batch = (item // G) % BATCH
        q0 = (ITEMS // (BATCH * G) - 1 - item // (BATCH * G)) * QUERIES
        q_begin = batch * SQ
        q_len = SQ
        k_begin = 0
        k_len = SK
        k_batch = batch
    return group, q0, q_begin, q_len, k_batch, k_begin, k_len


@gluon.jit
def _key_tiles(
    q0, q_len, k_len, q_start, a, b,
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
def _bring(XD, batch, row, column, memory, full, empty, count):
    """Start the load of key tile `count`, or of its values, once its place is free."""
    STAGES: gl.constexpr = memory.shape[0]
    slot = count % STAGES
    mbarrier.wait(empty.index(slot), (count // STAGES) & 1 ^ 1)
    mbarrier.expect(full.index(slot), XD.block_type.nbytes)
    place = _tile(memory, count, XD.block_type.shape[1])
    tma.async_copy_global_to_shared(XD, [batch, row, column], full.index(slot), place)


@gluon.jit
def _tile(memory, count, KEYS: gl.constexpr):
    """The place [1, KEYS, D] of key tile `count`, which may take less than all of it."""
    place = memory.index(count % memory.shape[0])
    if KEYS < memory.shape[2]:
        place = place._reinterpret(memory.dtype, [1, KEYS, memory.shape[3]], memory.layout)
    return place


@gluon.jit
def _produce(
    QD, KD, VD, KN, VN, q_mem, k_mem, v_mem, bars, CU_Q, CU_K, SQ, SK, G, BATCH, ITEMS,
    q_start, a, b,
    MODE: gl.constexpr, VARLEN: gl.constexpr, HEADS: gl.constexpr, BLOCK_N: gl.constexpr,
    NARROW: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One warp: queries, then the narrow keys and the tiles from the last to the first, item after
    item."""
    q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full = bars
    PER_WARPGROUP: gl.constexpr = 64 // HEADS
    QUERIES: gl.constexpr = 2 * PER_WARPGROUP
    done = 0
    count = 0
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        group, q0, q_begin, q_len, k_batch, k_begin, k_len = _work(
            item, ITEMS, CU_Q, CU_K, SQ, SK, G, BATCH, VARLEN, QUERIES
        )
        begin, tiles, _, _ = _key_tiles(
            q0, q_len, k_len, q_start, a, b, MODE, QUERIES, BLOCK_N, NARROW
        )
        q_slot = done % Q_STAGES
        q_phase = (done // Q_STAGES) & 1
        for c in gl.static_range(2):
            at = q_slot * 2 + c
            mbarrier.wait(q_empty.index(at), q_phase ^ 1)
            mbarrier.expect(q_full.index(at), QD.block_type.nbytes)
            tma.async_copy_global_to_shared(
                QD, [q_begin + q0 + c * PER_WARPGROUP, group * HEADS, 0],
                q_full.index(at), q_mem.index(at),
            )  # fmt: skip
        done += 1
        if NARROW > 0:
            row = k_begin + begin + tiles * BLOCK_N
            _bring(KN, k_batch, row, group * D, k_mem, k_full, k_empty, count)
            _bring(VN, k_batch, row, group * D, v_mem, v_full, v_empty, count)
            count += 1
        for j in range(tiles):
            row = k_begin + begin + (tiles - 1 - j) * BLOCK_N
            _bring(KD, k_batch, row, group * D, k_mem, k_full, k_empty, count)
            _bring(VD, k_batch, row, group * D, v_mem, v_full, v_empty, count)
            count += 1


@gluon.jit
def _masked(
    s, n0, first, q_start, a, b, k_len, MODE: gl.constexpr, HEADS: gl.constexpr
):  # fmt: skip
    """Scores with -inf where a row does not see a key; n0: the tile's first key, first: query."""
    t = first + gl.arange(0, 64, gl.SliceLayout(1, s.type.layout)) // HEADS + q_start
    at = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    hi = gl.minimum(span_hi(t, a, b, MODE), k_len) - n0
    seen = at[None, :] < hi[:, None]
    if MODE == 1:
        lo = span_lo(t, a, MODE) - n0
        seen = seen & (at[None, :] >= lo[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def _softmax(
    s, m, l, n0, full, first, q_start, a, b, k_len, scale_log2,
    MODE: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """Online softmax of one tile in base 2; alpha rescales what was summed before.

    The bounds of the rows, which start at query `first`, are found anew for every tile that is
    not full: they are few, and registers are short.
    """
    if not full:
        s = _masked(s, n0, first, q_start, a, b, k_len, MODE, HEADS)
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    # Where nothing was seen so far any finite number will do.
    m_safe = gl.maximum(m_new, -1.0e30)
    p = gl.exp2(s * scale_log2 - m_safe[:, None])
    alpha = gl.exp2(m - m_safe)
    return p, m_safe, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def _rounded(x, DTYPE: gl.constexpr, layout: gl.constexpr):
    """x in 16 bits as the left operand of a product, converted here: the compiler would move an
    ordinary conversion to its use, behind the next scores, which doubles the registers in use."""
    if DTYPE == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, is_pure=False, pack=2
        )
    else:
        x = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.float16, is_pure=False, pack=2
        )
    return gl.convert_layout(x, layout)


@gluon.jit
def _await(full, count, pred=True):
    """Wait for key tile `count`, or for its values, where pred is true."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1, pred=pred)


@gluon.jit
def _free(empty, count):
    """This warpgroup has no more use for key tile `count`, or for its values."""
    mbarrier.arrive(empty.index(count % empty.shape[0]), count=1)


@gluon.jit
def _scores(q, count, k_mem, KEYS: gl.constexpr):
    """Start Q K^T of key tile `count`."""
    D: gl.constexpr = k_mem.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    k = _tile(k_mem, count, KEYS).reshape([KEYS, D]).permute((1, 0))
    zero = gl.zeros([64, KEYS], gl.float32, layout)
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def _output(acc, alpha, p, count, v_mem, v_full):
    """Start the product of the probabilities of tile `count` with its values."""
    KEYS: gl.constexpr = p.shape[1]
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    _await(v_full, count)
    v = _tile(v_mem, count, KEYS).reshape([KEYS, v_mem.shape[3]])
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def _clear_past_end(count, rows, v_mem, v_full, KEYS: gl.constexpr):
    """Zeros for the values of tile `count` from row `rows` on: they are the next sequence's, and a
    NaN among them would pass through a probability of 0. Both consumers do it, before their own
    product reads the tile."""
    D: gl.constexpr = v_mem.shape[3]
    PART: gl.constexpr = 16  # rows at a time: registers are short
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    if rows < KEYS:
        _await(v_full, count)
        v = _tile(v_mem, count, KEYS).reshape([KEYS, D])
        for part in gl.static_range(KEYS // PART):
            if rows < (part + 1) * PART:
                piece = v.slice(part * PART, PART, dim=0)
                at = part * PART + gl.arange(0, PART, gl.SliceLayout(1, layout))
                piece.store(gl.where(at[:, None] < rows, piece.load(layout), 0.0))
        fence_async_shared()


@gluon.jit
def _consume(
    C: gl.constexpr, O, LSE, q_mem, k_mem, v_mem, bars, CU_Q, CU_K, SQ, SK, G, BATCH, ITEMS,
    q_start, a, b, scale_log2,
    MODE: gl.constexpr, VARLEN: gl.constexpr, HEADS: gl.constexpr, BLOCK_N: gl.constexpr,
    NARROW: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One warpgroup: softmax and output of 64 rows of every work item.

    The NARROW keys and the last tile come first, in one softmax. Loop state: probabilities pf of
    the newest tile (their product with V is yet to start) and the output acc of the tiles before
    (its last product may still run).
    """
    q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full = bars
    PER_WARPGROUP: gl.constexpr = 64 // HEADS
    QUERIES: gl.constexpr = 2 * PER_WARPGROUP
    DTYPE: gl.constexpr = k_mem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows = gl.arange(0, 64, row_layout)
    done = 0
    count = 0
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        group, q0, q_begin, q_len, _, _, k_len = _work(
            item, ITEMS, CU_Q, CU_K, SQ, SK, G, BATCH, VARLEN, QUERIES
        )
        begin, tiles, full_begin, full_end = _key_tiles(
            q0, q_len, k_len, q_start, a, b, MODE, QUERIES, BLOCK_N, NARROW
        )
        own = q0 + C * PER_WARPGROUP
        at = (done % Q_STAGES) * 2 + C
        mbarrier.wait(q_full.index(at), (done // Q_STAGES) & 1)
        q = q_mem.index(at).reshape([64, D])
        if NARROW > 0:
            behind = begin + tiles * BLOCK_N
            if VARLEN:
                _clear_past_end(count, k_len - behind, v_mem, v_full, NARROW)
            _await(k_full, count)
            few = _scores(q, count, k_mem, NARROW)
            count += 1
        if VARLEN:
            in_sequence = k_len - (begin + (tiles - 1) * BLOCK_N)
            _clear_past_end(count, in_sequence, v_mem, v_full, BLOCK_N)
        _await(k_full, count)
        s = _scores(q, count, k_mem, BLOCK_N)
        m = gl.full([64], float("-inf"), gl.float32, row_layout)
        l = gl.zeros([64], gl.float32, row_layout)
        if NARROW > 0:
            few, s = warpgroup_mma_wait(0, deps=(few, s))
            few_rows: gl.constexpr = gl.SliceLayout(1, few.type.layout)
            _free(k_empty, count - 1)
            few = _masked(few, behind, own, q_start, a, b, k_len, MODE, HEADS)
            m = gl.convert_layout(gl.max(few, 1), row_layout) * scale_log2
        else:
            s = warpgroup_mma_wait(0, deps=(s,))
        _free(k_empty, count)
        pf, m, l, alpha = _softmax(
            s, m, l, begin + (tiles - 1) * BLOCK_N,
            # Without narrow keys the last tile is masked for nearly every item.
            (tiles > full_begin) & (tiles <= full_end) if NARROW > 0 else False, own,
            q_start, a, b, k_len, scale_log2, MODE, HEADS,
        )  # fmt: skip
        acc = gl.zeros([64, D], gl.float32, o_layout)
        if NARROW > 0:
            few = gl.exp2(few * scale_log2 - gl.convert_layout(m, few_rows)[:, None])
            l += gl.convert_layout(gl.sum(few, 1), row_layout)
            alpha = gl.full([64], 1.0, gl.float32, row_layout)  # all by the same maximum
            _await(v_full, count - 1)
            v = _tile(v_mem, count - 1, NARROW).reshape([NARROW, D])
            acc = warpgroup_mma(
                _rounded(few, DTYPE, p_layout), v, acc, use_acc=False, is_async=True
            )
        _await(k_full, count + 1, tiles > 1)
        if NARROW > 0:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _free(v_empty, count - 1)
        for j in range(1, tiles):
            count += 1
            tile = tiles - 1 - j
            p = _rounded(pf, DTYPE, p_layout)
            s = _scores(q, count, k_mem, BLOCK_N)
            acc = _output(acc, alpha, p, count - 1, v_mem, v_full)
            s = warpgroup_mma_wait(1, deps=(s,))
            _free(k_empty, count)
            pf, m, l, alpha = _softmax(
                s, m, l, begin + tile * BLOCK_N, (tile >= full_begin) & (tile < full_end), own,
                q_start, a, b, k_len, scale_log2, MODE, HEADS,
            )  # fmt: skip
            # The branch in this wait keeps the softmax above the wait for the product below, where
            # the assembler would not leave it: it hides the product.
            _await(k_full, count + 1, j + 1 < tiles)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            _free(v_empty, count + v_empty.shape[0] - 1)  # that of count - 1, as it was measured

        acc = _output(acc, alpha, _rounded(pf, DTYPE, p_layout), count, v_mem, v_full)
        # A row that sees no key has l = 0: output 0 and lse = -inf.
        t = own + rows // HEADS
        live = t < q_len
        lse = gl.where(l > 0, (m + gl.log2(l)) * 0.6931471805599453, float("-inf"))
        row_index = (q_begin + t).to(gl.int64) * (G * HEADS) + group * HEADS + rows % HEADS
        gl.store(LSE + row_index, lse, mask=live)
        inv = gl.convert_layout(1.0 / gl.where(l > 0, l, 1.0), gl.SliceLayout(1, o_layout))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        _free(v_empty, count)
        out = (acc * inv[:, None]).to(DTYPE)
        if own + PER_WARPGROUP <= q_len:
            # The place of the queries is free by now: the output leaves through it.
            q.store(out)
            fence_async_shared()
        else:
            o_rows = gl.convert_layout(row_index, gl.SliceLayout(1, o_layout))
            o_live = gl.convert_layout(live.to(gl.int32), gl.SliceLayout(1, o_layout)) > 0
            columns = gl.arange(0, D, gl.SliceLayout(0, o_layout))
            gl.store(O + o_rows[:, None] * D + columns[None, :], out, mask=o_live[:, None])
        mbarrier.arrive(o_full.index(at), count=1)
        done += 1
        count += 1


@gluon.jit
def _send(
    OD, q_mem, bars, CU_Q, CU_K, SQ, SK, G, BATCH, ITEMS,
    VARLEN: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
    """One warp: outputs to global memory; then their place is free for queries."""
    q_empty = bars[1]
    o_full = bars[6]
    PER_WARPGROUP: gl.constexpr = 64 // HEADS
    QUERIES: gl.constexpr = 2 * PER_WARPGROUP
    done = 0
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        group, q0, q_begin, q_len, _, _, _ = _work(
            item, ITEMS, CU_Q, CU_K, SQ, SK, G, BATCH, VARLEN, QUERIES
        )
        for c in gl.static_range(2):
            at = (done % Q_STAGES) * 2 + c
            own = q0 + c * PER_WARPGROUP
            mbarrier.wait(o_full.index(at), (done // Q_STAGES) & 1)
            # The rows past the end of a sequence may be those of another.
            if own + PER_WARPGROUP <= q_len:
                tma.async_copy_shared_to_global(
                    OD, [q_begin + own, group * HEADS, 0], q_mem.index(at)
                )
                tma.store_wait(0)
            mbarrier.arrive(q_empty.index(at), count=1)
        done += 1


@gluon.jit
def _span_fwd_hopper_kernel(
    QD, KD, VD, KN, VN, OD, O, LSE, CU_Q, CU_K, SQ, SK, G, BATCH, ITEMS, q_start, a, b, scale_log2,
    MODE: gl.constexpr, VARLEN: gl.constexpr, HEADS: gl.constexpr, BLOCK_N: gl.constexpr,
    NARROW: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    DTYPE: gl.constexpr = QD.dtype
    q_mem = gl.allocate_shared_memory(DTYPE, [2 * Q_STAGES] + QD.block_type.shape, QD.layout)
    k_mem = gl.allocate_shared_memory(DTYPE, [STAGES] + KD.block_type.shape, KD.layout)
    v_mem = gl.allocate_shared_memory(DTYPE, [STAGES] + VD.block_type.shape, VD.layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES, 1], bar)
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES, 1], bar)
    o_full = gl.allocate_shared_memory(gl.int64, [2 * Q_STAGES, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for i in gl.static_range(2 * Q_STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(o_full.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty, o_full)
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0, O, LSE, q_mem, k_mem, v_mem, bars, CU_Q, CU_K, SQ, SK, G, BATCH, ITEMS,
                    q_start, a, b, scale_log2, MODE, VARLEN, HEADS, BLOCK_N, NARROW, D,
                ),
            ),
            (
                _consume,
                (
                    1, O, LSE, q_mem, k_mem, v_mem, bars, CU_Q, CU_K, SQ, SK, G, BATCH, ITEMS,
                    q_start, a, b, scale_log2, MODE, VARLEN, HEADS, BLOCK_N, NARROW, D,
                ),
            ),
            (
                _produce,
                (
                    QD, KD, VD, KN, VN, q_mem, k_mem, v_mem, bars, CU_Q, CU_K, SQ, SK, G, BATCH,
                    ITEMS, q_start, a, b, MODE, VARLEN, HEADS, BLOCK_N, NARROW, D,
                ),
            ),
            (
                _send,
                (
                    OD, q_mem, bars, CU_Q, CU_K, SQ, SK, G, BATCH, ITEMS, VARLEN, HEADS,
                ),
            ),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


def usable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """True where this kernel can serve: 16 bits, heads 64 or 128 wide and alike, a power of two of
    them per group, contiguous tensors."""
    heads, dim = q.shape[-2] // k.shape[-2], q.shape[-1]
    if q.element_size() != 2 or heads > ROWS or heads & (heads - 1):
        return False
    if dim not in (64, 128) or v.shape[-1] != dim:
        return False
    # Numbers of rows are 32-bit coordinates of a descriptor.
    if max(q.numel() // (q.shape[-2] * dim), k.numel() // (k.shape[-2] * dim)) >= 1 << 31:
        return False
    return all(x.numel() and x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k, v))


@dataclass(frozen=True)
class Tiles:
    """Keys of a tile and of the narrow one (0: none), and how many tiles are in flight."""

    keys: int
    narrow: int
    stages: int = 2


def hopper_tiles(span: Span, queries: int) -> Tiles:
    """Tiles for work items of so many queries.

    H200, D = 128: more stages change nothing. A window of 512 is whole tiles for one query, and the
    narrow one takes the few keys that its neighbours see besides (64k tokens, 64 heads in 4 groups:
    2.44 -> 2.02 ms).
    """
    if span.mode == COMPRESSED:
        return Tiles(128, 0)
    narrow = max(16, queries) if queries <= 64 else 0
    if span.a % 128 and span.a < 1024:  # wide tiles would waste more
        return Tiles(64, narrow, 4)
    return Tiles(128, narrow)


def span_attention_fwd_hopper(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: Span, softmax_scale: float,
    cu_q: torch.Tensor | None = None, cu_k: torch.Tensor | None = None, q_start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out and lse as span_attention_fwd gives them, for calls that are usable().

    The longest sequence is not needed: work items follow from cu_q.
    """
    varlen = cu_q is not None
    hq, dim = q.shape[-2:]
    groups = k.shape[-2]
    heads = hq // groups
    if varlen:
        batch, sq, sk = cu_q.numel() - 1, 0, 0
    else:
        batch, sq, sk = q.shape[0], q.shape[1], k.shape[1]
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    per_warpgroup = ROWS // heads
    queries = CONSUMERS * per_warpgroup
    tiles = hopper_tiles(span, queries)
    if varlen:
        items = (q.shape[0] // queries + batch) * groups
    else:
        items = cdiv(sq, queries) * batch * groups
    layout = shared_layout(128, 16, 3)
    keys = (1, -1) if varlen else (batch, sk)
    of_queries = lambda x: descriptor(x.view(-1, hq, dim), (per_warpgroup, heads, dim), layout)
    of_keys = lambda x, n: descriptor(x.view(*keys, groups * dim), (1, n, dim), layout)
    tile = of_keys(k, tiles.keys), of_keys(v, tiles.keys)
    few = (of_keys(k, tiles.narrow), of_keys(v, tiles.narrow)) if tiles.narrow else tile
    launch(
        _span_fwd_hopper_kernel, (min(items, sm_count(q.device)),),
        of_queries(q), *tile, *few, of_queries(out),
        out, lse, cu_q if varlen else lse, cu_k if varlen else lse, sq, sk, groups, batch, items,
        q_start, span.a, span.b, softmax_scale * LOG2E,
        MODE=span.mode, VARLEN=varlen, HEADS=heads, BLOCK_N=tiles.keys, NARROW=tiles.narrow, D=dim,
        STAGES=tiles.stages, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return out, lse
