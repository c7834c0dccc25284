"""Block scores (Eq. 9 and 10) on Hopper: one warp loads, four warpgroups compute.

The same function as _block_score_kernel of score_topn_triton.py, in Gluon, Triton's lower level,
for what plain Triton cannot say:
- 256 rows share every key tile that is read from L2, and a program stays for many work items. No
  warp waits for others in the loop but for its turn (warps.py).
- The four warpgroups take turns at the tensor cores. Without turns all have their products done at
  the same time, then all their exponentials (64k tokens: 4.69 -> 4.31 ms).
- The products of the next tile start before the sums over the heads of this one, and the next work
  item's normalisers are read while this one is computed.
- Probabilities are pooled to blocks by small products from registers, eight blocks by sixteen keys,
  since a key reaches into few blocks.

H200, bf16, D=128, 64 heads in 4 groups, ms: 4k tokens 0.053 -> 0.037, 8k 0.140 -> 0.097, 16k 0.415
-> 0.303, 64k 5.5 -> 4.35.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from nsa.kernels.launch import launch
from nsa.kernels.prefill.choice.score_topn_triton import Slab
from nsa.kernels.prefill.packs import Rows, sequence_bounds, sequence_of
from nsa.kernels.prefill.releases import (
    carve,
    head_address,
    make_store,
    program_barrier,
    store_of,
    tma_load,
    warpgroup_mma_wait,
)
from nsa.kernels.prefill.span.common import span_hi
from nsa.kernels.prefill.warps import (
    LEAST_REGISTERS,
    UNIT,
    arrive,
    await_phase,
    check_address,
    first_barrier,
    warp_number,
)
from nsa.kernels.row_tiles import descriptor, shared_layout
from nsa.kernels.tiles import LOG2E, cdiv, sm_count

ROWS = 256  # of a work item, 64 for each warpgroup's products
KEYS, STAGES = 64, 6  # of a tile, and how many tiles are in flight, at most
WARPS = 16
# With the loading warp, which counts as four, all start with 96 registers a thread; all but the
# least that a thread can have then go to the sixteen: 112.
START_REGISTERS = 96
EIGHT = gl.constexpr(8)  # blocks of one small product
PIECE = gl.constexpr(16)  # its keys
Q_STAGES = gl.constexpr(2)  # work items whose queries are in flight, at most
# (Both of heads of 192, which are 128 and 64 more.)
WIDER_STAGES, WIDER_Q_STAGES = 5, 1
# Numbers of barriers: queries are there, their place is free; a tile's keys, their places; turns.
Q_FULL, Q_EMPTY, K_FULL = (gl.constexpr(i * Q_STAGES.value) for i in range(3))
K_EMPTY, TURN = (gl.constexpr(K_FULL.value + i * STAGES) for i in (1, 2))


@gluon.jit
def _work(
    item, ITEMS, CU_Q, CU_K, SQ, SK, G: gl.constexpr, BATCH, slab_begin, q_start,
    l: gl.constexpr, d: gl.constexpr, VARLEN: gl.constexpr, QUERIES: gl.constexpr,
):  # fmt: skip
    """What a work item is: (batch, group, first query, first row and length of the sequence in Q
    and in K, keys that its first and its last query see).

    Late queries see most keys: they come first, so that the last items are short.
    """
    group = item % G
    batch = item // G % BATCH
    tile = ITEMS // G // BATCH - 1 - item // G // BATCH
    if VARLEN:
        batch, tile = sequence_of(slab_begin // QUERIES + tile, CU_Q, SQ, QUERIES)
        q0 = tile * QUERIES
    else:
        q0 = slab_begin + tile * QUERIES
    q_begin, q_len, k_begin, k_len = sequence_bounds(CU_Q, CU_K, batch, SQ, SK, VARLEN)
    last = gl.minimum(q0 + QUERIES, q_len) - 1 + q_start
    hi_first = gl.minimum(span_hi(q0 + q_start, l, d, 0), k_len)
    hi_last = gl.minimum(span_hi(last, l, d, 0), k_len)
    return batch, group, q0, q_begin, q_len, k_begin, k_len, hi_first, hi_last


@gluon.jit
def _produce(
    QDS, KDS, q_mems, k_mems, bars, CU_Q, CU_K, SQ, SK, G: gl.constexpr, BATCH, ITEMS, slab_begin,
    q_start, VARLEN: gl.constexpr, l: gl.constexpr, d: gl.constexpr,
):  # fmt: skip
    """One warp: queries, then the key tiles from the first to the last, item after item."""
    QUERIES: gl.constexpr = QDS[0].block_type.shape[0]
    HEADS: gl.constexpr = QDS[0].block_type.shape[1]
    WIDTH: gl.constexpr = QDS[0].block_type.shape[2]
    D: gl.constexpr = WIDTH + (QDS[1].block_type.shape[2] if len(QDS) > 1 else 0)
    KEYS: gl.constexpr = KDS[0].block_type.shape[1]
    STAGES: gl.constexpr = k_mems[0].shape[0]
    Q_PLACES: gl.constexpr = q_mems[0].shape[0]
    done = 0
    count = 0
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        batch, group, q0, q_begin, q_len, k_begin, _, _, hi_last = _work(
            item, ITEMS, CU_Q, CU_K, SQ, SK, G, BATCH, slab_begin, q_start, l, d, VARLEN, QUERIES
        )
        if q0 < q_len:
            at = done % Q_PLACES
            mbarrier.wait(bars.index(Q_EMPTY + at), (done // Q_PLACES) & 1 ^ 1)
            bar = bars.index(Q_FULL + at)
            if len(QDS) > 1:
                mbarrier.expect(bar, QDS[0].block_type.nbytes + QDS[1].block_type.nbytes)
            else:
                mbarrier.expect(bar, QDS[0].block_type.nbytes)
            row = (q_begin + q0).to(gl.int32)
            for part in gl.static_range(len(QDS)):
                where = [row, group * HEADS, part * WIDTH]
                tma_load(QDS[part], where, bar, q_mems[part].index(at))
            done += 1
            for n0 in range(0, hi_last, KEYS):
                at = count % STAGES
                mbarrier.wait(bars.index(K_EMPTY + at), (count // STAGES) & 1 ^ 1)
                bar = bars.index(K_FULL + at)
                if len(KDS) > 1:
                    mbarrier.expect(bar, KDS[0].block_type.nbytes + KDS[1].block_type.nbytes)
                else:
                    mbarrier.expect(bar, KDS[0].block_type.nbytes)
                for part in gl.static_range(len(KDS)):
                    column = group * D + part * WIDTH
                    if VARLEN:
                        where = [0, k_begin.to(gl.int32) + n0, column]
                    else:
                        where = [batch, n0, column]
                    tma_load(KDS[part], where, bar, k_mems[part].index(at))
                count += 1


@gluon.jit
def _weights(
    key0: gl.constexpr, l: gl.constexpr, d: gl.constexpr, l_sel: gl.constexpr, LAYOUT: gl.constexpr
):
    """Tokens of overlap of the PIECE keys from key0 on with the EIGHT blocks from key 0 on."""
    key = ((key0 + gl.arange(0, PIECE, gl.SliceLayout(1, LAYOUT))) * d)[:, None]
    block = (gl.arange(0, EIGHT, gl.SliceLayout(0, LAYOUT)) * l_sel)[None, :]
    overlap = gl.minimum(key + l, block + l_sel) - gl.maximum(key, block)
    return gl.maximum(overlap, 0).to(gl.float16)


@gluon.jit
def _halves(x):
    """The first and the second half of x's columns; nothing moves between registers."""
    parts = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1))
    return parts.split()


@gluon.jit
def _beside(a, b):
    """The inverse of _halves."""
    x = gl.join(a, b).permute((0, 2, 1))
    return x.reshape([x.shape[0], x.shape[1] * x.shape[2]])


@gluon.jit
def _eight_blocks(p, sums, own, piece: gl.constexpr):
    """sums and what the keys of p give to their eight blocks; the last piece of p. own: weights of
    pieces, of which p is number `piece`."""
    if p.shape[1] == PIECE:
        layout: gl.constexpr = gl.DotOperandLayout(0, sums.type.layout, 2)
        p = gl.convert_layout(p.to(gl.float16), layout, assert_trivial=True)
        return mma_v2(p, own[piece], sums), p
    else:
        a, b = _halves(p)
        sums, _ = _eight_blocks(a, sums, own, piece)
        return _eight_blocks(b, sums, own, piece + a.shape[1] // PIECE)


@gluon.jit
def _pooled(p, carry, own, spill, CHUNK: gl.constexpr):
    """Block sums [rows, blocks] of the probabilities p, and what their keys give to the eight
    blocks that follow; carry: what the keys before gave to the first eight."""
    if p.shape[1] == CHUNK:
        sums, last = _eight_blocks(p, carry, own, 0)
        return sums, mma_v2(last, spill, gl.zeros_like(carry))
    else:
        a, b = _halves(p)
        left, carry = _pooled(a, carry, own, spill, CHUNK)
        right, carry = _pooled(b, carry, own, spill, CHUNK)
        return _beside(left, right), carry


@gluon.jit
def _store(sums, to, n_ld, HEADS: gl.constexpr):
    """The sums over the heads of each query to its row."""
    sums = gl.sum(sums.reshape([sums.shape[0] // HEADS, HEADS, sums.shape[1]]), 1)
    LAYOUT: gl.constexpr = sums.type.layout
    query = gl.arange(0, sums.shape[0], gl.SliceLayout(1, LAYOUT))
    block = gl.arange(0, sums.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(to + query[:, None] * n_ld + block[None, :], sums)


@gluon.jit
def _scores(qs, k_mems, first, count, warpgroup, LAYOUT: gl.constexpr):
    """Start Q K^T of key tile `count` when it is this warpgroup's turn, and pass the turn on."""
    ROWS: gl.constexpr = qs[0].shape[0]
    KEYS: gl.constexpr = k_mems[0].shape[2]
    STAGES: gl.constexpr = k_mems[0].shape[0]
    GROUPS: gl.constexpr = gl.num_warps() // 4
    at = count % STAGES
    await_phase(first, K_FULL + at, (count // STAGES) & 1)
    # The first warpgroup begins: it waits for the phase before the first.
    await_phase(first, TURN + warpgroup, (count & 1) ^ (warpgroup == 0).to(gl.int32))
    s = gl.zeros([ROWS, KEYS], gl.float32, LAYOUT)
    for part in gl.static_range(len(qs)):
        k = k_mems[part].index(at).reshape([KEYS, k_mems[part].shape[3]]).permute((1, 0))
        s = warpgroup_mma(qs[part], k, s, use_acc=part > 0, is_async=True)
    arrive(first, TURN + (warpgroup + 1) % GROUPS)
    return s


@gluon.jit
def _probabilities(
    s, bias, scale_log2, n0, q0, q_start, l: gl.constexpr, d: gl.constexpr, k_len, hi_first,
    HEADS: gl.constexpr,
):  # fmt: skip
    """2^10 times those of scores s of the keys from n0 on; 0 where a row does not see a key."""
    LAYOUT: gl.constexpr = s.type.layout
    p = gl.exp2(s * scale_log2 + bias[:, None])
    if n0 + s.shape[1] > hi_first:
        t = q0 + gl.arange(0, s.shape[0], gl.SliceLayout(1, LAYOUT)) // HEADS + q_start
        hi = gl.minimum(span_hi(t, l, d, 0), k_len) - n0
        key = gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT))
        p = gl.where(key[None, :] < hi[:, None], p, 0.0)
    return p


@gluon.jit
def _normalisers(
    item, LSE, ITEMS, CU_Q, CU_K, SQ, SK, G: gl.constexpr, BATCH, slab_begin, slab_len, q_start,
    l: gl.constexpr, d: gl.constexpr, VARLEN: gl.constexpr, QUERIES: gl.constexpr,
    HEADS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The LSE of a work item's rows, -inf where there is none, and what else its sums take."""
    batch, group, q0, q_begin, q_len, _, k_len, hi_first, hi_last = _work(
        item, ITEMS, CU_Q, CU_K, SQ, SK, G, BATCH, slab_begin, q_start, l, d, VARLEN, QUERIES
    )
    rows = gl.arange(0, QUERIES * HEADS, LAYOUT)
    t = q0 + rows // HEADS
    row = (q_begin + t) * (G * HEADS) + group * HEADS + rows % HEADS
    lse = gl.load(LSE + row, mask=(t < q_len) & (item < ITEMS), other=float("-inf"))
    if VARLEN:  # the row of its scores
        sequence = group * slab_len + (ITEMS // G - 1 - item // G) * QUERIES
    else:
        sequence = batch * G + group
    return lse, sequence, q0, q_len, k_len, hi_first, hi_last


@gluon.jit
def _consume(
    SCORES, LSE, q_mems, k_mems, CU_Q, CU_K, SQ, SK, G: gl.constexpr, BATCH, ITEMS, slab_begin,
    slab_len, n_ld, q_start, scale_log2,
    VARLEN: gl.constexpr, l: gl.constexpr, d: gl.constexpr, l_sel: gl.constexpr,
    HEAD_AT: gl.constexpr,
):  # fmt: skip
    """Four warpgroups: probabilities of 64 rows each, their sums over blocks and heads."""
    QUERIES: gl.constexpr = q_mems[0].shape[1]
    HEADS: gl.constexpr = q_mems[0].shape[2]
    ROWS: gl.constexpr = QUERIES * HEADS
    Q_PLACES: gl.constexpr = q_mems[0].shape[0]
    STAGES: gl.constexpr = k_mems[0].shape[0]
    KEYS: gl.constexpr = k_mems[0].shape[2]
    BLOCKS: gl.constexpr = KEYS * d // l_sel  # of a tile
    CHUNK: gl.constexpr = EIGHT * l_sel // d  # keys of eight blocks
    WARPS: gl.constexpr = gl.num_warps()
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    SUM_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, EIGHT])
    W_LAYOUT: gl.constexpr = gl.DotOperandLayout(1, SUM_LAYOUT, 2)
    own = (_weights(0, l, d, l_sel, W_LAYOUT),)
    for i in gl.static_range(1, CHUNK // PIECE):
        own = own + (_weights(i * PIECE, l, d, l_sel, W_LAYOUT),)
    spill = _weights(-PIECE, l, d, l_sel, W_LAYOUT)  # of the last piece to the next blocks
    first = first_barrier(HEAD_AT)
    warpgroup = warp_number() // 4
    done = 0
    count = 0
    lse, sequence, q0, q_len, k_len, hi_first, hi_last = _normalisers(
        gl.program_id(0), LSE, ITEMS, CU_Q, CU_K, SQ, SK, G, BATCH, slab_begin, slab_len, q_start,
        l, d, VARLEN, QUERIES, HEADS, ROW_LAYOUT,
    )  # fmt: skip
    for item in range(gl.program_id(0), ITEMS, gl.num_programs(0)):
        following = _normalisers(
            item + gl.num_programs(0), LSE, ITEMS, CU_Q, CU_K, SQ, SK, G, BATCH, slab_begin,
            slab_len, q_start, l, d, VARLEN, QUERIES, HEADS, ROW_LAYOUT,
        )  # fmt: skip
        if q0 < q_len:
            at = done % Q_PLACES
            await_phase(first, Q_FULL + at, (done // Q_PLACES) & 1)
            qs = (q_mems[0].index(at).reshape([ROWS, q_mems[0].shape[3]]),)
            if len(q_mems) > 1:
                qs = qs + (q_mems[1].index(at).reshape([ROWS, q_mems[1].shape[3]]),)
            if VARLEN:
                to = SCORES + sequence.to(gl.int64) * n_ld
            else:
                to = SCORES + (sequence.to(gl.int64) * slab_len + (q0 - slab_begin)) * n_ld
            tiles = (hi_last + KEYS - 1) // KEYS
            carry = gl.zeros([ROWS, EIGHT], gl.float32, SUM_LAYOUT)
            if tiles > 0:
                s = _scores(qs, k_mems, first, count, warpgroup, S_LAYOUT)
                # 2^10: fp16 then keeps 11 bits of every probability down to 6e-8, which ranks
                # blocks reliably. Rows that see no compressed key contribute nothing.
                bias = 10.0 - lse * 1.4426950408889634
                bias = gl.where(lse == float("-inf"), float("-inf"), bias)
                for j in range(tiles - 1):
                    s = warpgroup_mma_wait(0, deps=(s,))
                    arrive(first, K_EMPTY + count % STAGES)
                    p = _probabilities(
                        s, bias, scale_log2, j * KEYS, q0, q_start, l, d, k_len, hi_first, HEADS
                    )
                    sums, carry = _pooled(p, carry, own, spill, CHUNK)
                    count += 1
                    s = _scores(qs, k_mems, first, count, warpgroup, S_LAYOUT)
                    _store(sums, to + j * BLOCKS, n_ld, HEADS)
                s = warpgroup_mma_wait(0, deps=(s,))
                arrive(first, K_EMPTY + count % STAGES)
                arrive(first, Q_EMPTY + at)
                count += 1
                j = tiles - 1
                p = _probabilities(
                    s, bias, scale_log2, j * KEYS, q0, q_start, l, d, k_len, hi_first, HEADS
                )
                sums, carry = _pooled(p, carry, own, spill, CHUNK)
                _store(sums, to + j * BLOCKS, n_ld, HEADS)
            else:
                arrive(first, Q_EMPTY + at)
            done += 1
            # The ranking reads one tile more.
            to += tiles * BLOCKS
            _store(carry, to, n_ld, HEADS)
            for i in gl.static_range(1, BLOCKS // EIGHT):
                _store(gl.zeros_like(carry), to + i * EIGHT, n_ld, HEADS)
        lse, sequence, q0, q_len, k_len, hi_first, hi_last = following


@gluon.jit
def _block_score_hopper_kernel(
    QD, KD, QD2, KD2, LSE, SCORES, CU_Q, CU_K, SQ, SK, BATCH, ITEMS, q_start, slab_begin, slab_len,
    n_ld, scale_log2,
    VARLEN: gl.constexpr, STAGES: gl.constexpr, Q_PLACES: gl.constexpr, WIDER: gl.constexpr,
    G: gl.constexpr, l: gl.constexpr, d: gl.constexpr, l_sel: gl.constexpr,
):  # fmt: skip
    """SCORES fp32, as _block_score_kernel writes them with key tiles and queries of this kernel's
    size. WIDER: the columns of Q and K behind 128 come by the descriptors with a 2."""
    Q_UNITS: gl.constexpr = QD.block_type.nbytes // UNIT
    K_UNITS: gl.constexpr = KD.block_type.nbytes // UNIT
    K_AT: gl.constexpr = 1 + Q_PLACES * Q_UNITS
    Q2_AT: gl.constexpr = K_AT + STAGES * K_UNITS
    K2_AT: gl.constexpr = Q2_AT + (Q_PLACES * QD2.block_type.nbytes // UNIT if WIDER else 0)
    UNITS: gl.constexpr = K2_AT + (STAGES * KD2.block_type.nbytes // UNIT if WIDER else 0)
    WARPS: gl.constexpr = gl.num_warps()
    BARRIERS: gl.constexpr = TURN + WARPS // 4
    STORE: gl.constexpr = store_of(UNITS, UNIT)
    HEAD_AT: gl.constexpr = head_address(STORE)
    store = make_store(STORE)
    check_address(store, HEAD_AT)
    bars = carve(store, 0, gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    q_mem = carve(store, 1, QD.dtype, [Q_PLACES] + QD.block_type.shape, QD.layout)
    k_mem = carve(store, K_AT, KD.dtype, [STAGES] + KD.block_type.shape, KD.layout)
    QDS = (QD,)
    KDS = (KD,)
    q_mems = (q_mem,)
    k_mems = (k_mem,)
    if WIDER:
        q2_mem = carve(store, Q2_AT, QD.dtype, [Q_PLACES] + QD2.block_type.shape, QD.layout)
        k2_mem = carve(store, K2_AT, KD.dtype, [STAGES] + KD2.block_type.shape, KD.layout)
        QDS = (QD, QD2)
        KDS = (KD, KD2)
        q_mems = (q_mem, q2_mem)
        k_mems = (k_mem, k2_mem)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(bars.index(Q_FULL + i), count=1)
        mbarrier.init(bars.index(Q_EMPTY + i), count=WARPS)
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(K_FULL + i), count=1)
        mbarrier.init(bars.index(K_EMPTY + i), count=WARPS)
    for i in gl.static_range(WARPS // 4):
        mbarrier.init(bars.index(TURN + i), count=4)
    program_barrier()
    gl.warp_specialize([
        (_consume, (
            SCORES, LSE, q_mems, k_mems, CU_Q, CU_K, SQ, SK, G, BATCH, ITEMS, slab_begin, slab_len,
            n_ld, q_start, scale_log2, VARLEN, l, d, l_sel, HEAD_AT,
        )),
        (_produce, (
            QDS, KDS, q_mems, k_mems, bars, CU_Q, CU_K, SQ, SK, G, BATCH, ITEMS, slab_begin,
            q_start, VARLEN, l, d,
        )),
    ], [1], [LEAST_REGISTERS])  # fmt: skip


TAKES = (
    "16-bit heads, 64, 128 or 192 wide, a power of two of up to 16 a group, "
    "and l_sel of 2, 4 or 8 strides"
)


def usable(q: torch.Tensor, k_cmp: torch.Tensor, l: int, d: int, l_sel: int) -> bool:
    """Return whether this module takes the call: see TAKES, and contiguous tensors."""
    heads, dim = q.shape[-2] // k_cmp.shape[-2], q.shape[-1]
    if q.element_size() != 2 or heads > 16 or heads & (heads - 1) or dim not in (64, 128, 192):
        return False
    # Weights are small whole numbers in fp16; only the last PIECE keys reach into other blocks.
    if l_sel // d not in (2, 4, 8) or l > PIECE.value * d or min(l, l_sel) > 2048:
        return False
    # Numbers of rows are 32-bit coordinates of a descriptor.
    if max(q.numel() // (q.shape[-2] * dim), k_cmp.numel() // (k_cmp.shape[-2] * dim)) >= 1 << 31:
        return False
    return all(x.numel() and x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (q, k_cmp))


def tile(heads: int) -> tuple[int, int]:
    """(queries, keys) of a tile of scores."""
    return ROWS // heads, KEYS


def block_scores(
    q: torch.Tensor, k_cmp: torch.Tensor, lse: torch.Tensor, *, l: int,
    d: int, l_sel: int, softmax_scale: float, at: Rows, q_start: int, slab: Slab,
) -> None:  # fmt: skip
    """Scores of a slab for calls that are usable()."""
    varlen, groups = at.cu is not None, k_cmp.shape[-2]
    heads, dim = q.shape[-2] // groups, q.shape[-1]
    per_item, layout = ROWS // heads, shared_layout(128, 16, 3)
    items = cdiv(slab.queries, per_item) * at.batch * groups
    rows = (1, -1) if varlen else k_cmp.shape[:2]
    wider = dim > 128
    widths = (128, dim - 128) if wider else (dim, dim)
    tiles = [
        made for width in widths for made in (
            descriptor(q.view(-1, *q.shape[-2:]), (per_item, heads, width), layout),
            descriptor(k_cmp.view(*rows, groups * dim), (1, KEYS, width), layout),
        )
    ]  # fmt: skip
    launch(
        _block_score_hopper_kernel, (min(items, sm_count(q.device)),),
        *tiles, lse, slab.scores, *(at.cu or (lse, lse)), at.sq, at.sk, at.batch, items, q_start,
        slab.begin, slab.rows, slab.n_ld, softmax_scale * LOG2E,
        VARLEN=varlen, STAGES=WIDER_STAGES if wider else STAGES,
        Q_PLACES=WIDER_Q_STAGES if wider else Q_STAGES.value, WIDER=wider, G=groups, l=l, d=d,
        l_sel=l_sel, num_warps=WARPS, maxnreg=START_REGISTERS,
    )  # fmt: skip
