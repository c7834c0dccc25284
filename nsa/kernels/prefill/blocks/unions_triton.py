"""Selection attention of union tiles (union_lists.py): forward and dQ.

Rows are (query, head) pairs of a tile, heads fastest. A block of the union is read once; rows whose
query did not choose it get no weight. Other tiles are left to the kernels of single queries, and so
is a tile whose rows hold NaN: 0 * NaN may come from a key that only a neighbour attends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa.kernels.head_rows import head_rows, put_rows, split_rows
from nsa.kernels.launch import launch
from nsa.kernels.prefill.blocks.selection import Selection
from nsa.kernels.prefill.blocks.union_lists import UNIONS_PER_SM, UnionLists, programs, ticket
from nsa.kernels.prefill.gate_sign import in_log2, signed_by
from nsa.kernels.prefill.span.common import load_kv, put_dq
from nsa.kernels.row_tiles import kv_tiles, tma_usable
from nsa.kernels.tiles import LOG2E, arch_of, datacenter, dot_size, head_constants


@triton.jit
def _tile_rows(
    tile, SEQ_BEGIN, T, S, S_KV, q_start,
    VARLEN: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """(query in tile, head, token, whether it exists, position, first K/V row) of a tile's rows."""
    rows = tl.arange(0, QUERIES * HEADS)
    query = rows // HEADS
    token = tile * QUERIES + query
    live = token < T
    token = tl.minimum(token, T - 1)
    if VARLEN:
        begin = tl.load(SEQ_BEGIN + tile * QUERIES)
        t = token - begin
        first_key = begin.to(tl.int64)
    else:
        t = token % S
        first_key = (tile * QUERIES // S).to(tl.int64) * S_KV
    return query, rows % HEADS, token.to(tl.int64), live, t + q_start, first_key


@triton.jit
def _union_fwd_step(
    acc, m_i, l_i, q, q2, k, k2, v, chosen, seen, scale_log2,
    BLOCK_D2: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """chosen [rows]: rows that attend the keys at all; seen [rows, keys] where MASKED."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if BLOCK_D2 > 0:
        s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
    if MASKED:
        s = tl.where(seen, s, float("-inf"))
    # A row that did not choose the block keeps its maximum and adds nothing.
    m_new = tl.where(chosen, tl.maximum(m_i, tl.max(s, 1) * scale_log2), m_i)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(s * scale_log2 - tl.where(chosen, m_safe, float("inf"))[:, None])
    alpha = tl.math.exp2(m_i - m_safe)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_new, l_i


@triton.jit
def _union_attn_fwd_kernel(
    Q, K, V, KD, KD2, VD, SEQ_BEGIN, ENTRIES, STATE, WORK, COUNTS, O, LSE, T, S, S_KV, G, H,
    q_start, block_size, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, VARLEN: tl.constexpr, QUERIES: tl.constexpr,
    HEADS: tl.constexpr, ROOM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr, OWN_N: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # Group is the slow axis of the list: one group's K and V stay in L2 while its tiles pass.
    item = ticket(COUNTS)
    total = tl.load(COUNTS)
    while item < total:
        filed = tl.load(WORK + item)
        tile = filed // G
        group = filed % G
        at = filed.to(tl.int64)
        count = tl.load(STATE + at * 2)
        own_mask = tl.load(STATE + at * 2 + 1)
        query, head, token, live, t, first_key = _tile_rows(
            tile, SEQ_BEGIN, T, S, S_KV, q_start, VARLEN, QUERIES, HEADS
        )
        live = live & (head < H)
        row = token * (G * H) + group * H + head
        offs_d, offs_d2, q, q2 = split_rows(Q, row, live, D, BLOCK_D, BLOCK_D2)
        offs_dv = tl.arange(0, BLOCK_DV)
        acc = tl.zeros([QUERIES * HEADS, BLOCK_DV], tl.float32)
        m_i = tl.full([QUERIES * HEADS], float("-inf"), tl.float32)
        l_i = tl.zeros([QUERIES * HEADS], tl.float32)
        some = own_mask
        entries = ENTRIES + at * ROOM
        per_block = block_size // BLOCK_N
        offs_n = tl.arange(0, BLOCK_N)
        for i in tl.range(0, count * per_block):
            entry = tl.load(entries + i // per_block)
            n0 = (entry >> 32).to(tl.int32) * block_size + i % per_block * BLOCK_N
            some |= entry.to(tl.int32)
            chosen = ((entry.to(tl.int32) >> query) & 1) > 0
            k, k2, v = load_kv(
                K, V, KD, KD2, VD, first_key, n0, offs_n >= 0, group, G, offs_d, offs_d2, offs_dv,
                D, DV, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, TMA, False,
            )  # fmt: skip
            acc, m_i, l_i = _union_fwd_step(
                acc, m_i, l_i, q, q2, k, k2, v, chosen, chosen[:, None], scale_log2, BLOCK_D2,
                False, PRECISION,
            )  # fmt: skip
        # Own blocks end at each query itself; the tile's queries may stand in several of them.
        begin = tl.min(t, 0) // block_size * block_size
        end = tl.where(own_mask != 0, tl.max(t, 0) + 1, begin)
        own = t // block_size * block_size
        chosen = ((own_mask >> query) & 1) > 0
        for n0 in tl.range(begin, end, OWN_N):
            key = n0 + tl.arange(0, OWN_N)
            seen = (key[None, :] >= own[:, None]) & (key[None, :] <= t[:, None])
            k, k2, v = load_kv(
                K, V, KD, KD2, VD, first_key, n0, key < end, group, G, offs_d, offs_d2, offs_dv, D,
                DV, OWN_N, BLOCK_D, BLOCK_D2, BLOCK_DV, TMA, True,
            )  # fmt: skip
            acc, m_i, l_i = _union_fwd_step(
                acc, m_i, l_i, q, q2, k, k2, v, chosen, seen, scale_log2, BLOCK_D2, True, PRECISION
            )
        # NaN: see above; or no weight, by scores of -inf. The tile's queries now go one by one.
        none = (l_i == 0) & live & (((some >> query) & 1) > 0)
        if tl.max(((acc != acc) | none[:, None]).to(tl.int32)) > 0:
            tl.store(STATE + at * 2, -1)
        acc = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
        lse = tl.where(l_i > 0, (m_i + tl.math.log2(l_i)) * 0.6931471805599453, float("-inf"))
        put_rows(O, acc, row, live, offs_dv, DV)
        tl.store(LSE + row, lse, mask=live)
        item = ticket(COUNTS)


@triton.jit
def _union_dq_step(
    dq, dq2, q, q2, do, lse2, delta, k, k2, v, chosen, seen, scale_log2,
    BLOCK_D2: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if BLOCK_D2 > 0:
        s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
    p = tl.math.exp2(s * scale_log2 - tl.where(chosen, lse2, float("inf"))[:, None])
    if SIGNED:
        p = signed_by(p, lse2[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    ds = (p * (dp - delta[:, None])).to(k.dtype)
    dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    if BLOCK_D2 > 0:
        dq2 = tl.dot(ds, k2, dq2, input_precision=PRECISION)
    return dq, dq2


@triton.jit
def _union_attn_bwd_dq_kernel(
    Q, K, V, KD, KD2, VD, SEQ_BEGIN, ENTRIES, STATE, DO, LSE, DELTA, DQ, T, S, S_KV, G, H,
    q_start, block_size, scale, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, VARLEN: tl.constexpr, QUERIES: tl.constexpr,
    HEADS: tl.constexpr, ROOM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr, OWN_N: tl.constexpr,
    ACCUMULATE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    group = tl.program_id(1)
    at = tile.to(tl.int64) * G + group
    count = tl.load(STATE + at * 2)
    if count < 0:
        return
    own_mask = tl.load(STATE + at * 2 + 1)
    query, head, token, live, t, first_key = _tile_rows(
        tile, SEQ_BEGIN, T, S, S_KV, q_start, VARLEN, QUERIES, HEADS
    )
    live = live & (head < H)
    row = token * (G * H) + group * H + head
    offs_d, offs_d2, q, q2 = split_rows(Q, row, live, D, BLOCK_D, BLOCK_D2)
    offs_dv = tl.arange(0, BLOCK_DV)
    do = head_rows(DO, row, live, offs_dv, DV)
    lse = tl.load(LSE + row, mask=live, other=float("inf"))
    lse2 = in_log2(lse, SIGNED)
    delta = tl.load(DELTA + row, mask=live, other=0.0)
    dq = tl.zeros([QUERIES * HEADS, BLOCK_D], tl.float32)
    dq2 = delta
    if BLOCK_D2 > 0:
        dq2 = tl.zeros([QUERIES * HEADS, BLOCK_D2], tl.float32)
    entries = ENTRIES + at * ROOM
    per_block = block_size // BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    for i in tl.range(0, count * per_block):
        entry = tl.load(entries + i // per_block)
        n0 = (entry >> 32).to(tl.int32) * block_size + i % per_block * BLOCK_N
        chosen = ((entry.to(tl.int32) >> query) & 1) > 0
        k, k2, v = load_kv(
            K, V, KD, KD2, VD, first_key, n0, offs_n >= 0, group, G, offs_d, offs_d2, offs_dv, D,
            DV, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, TMA, False,
        )  # fmt: skip
        dq, dq2 = _union_dq_step(
            dq, dq2, q, q2, do, lse2, delta, k, k2, v, chosen, chosen[:, None], scale_log2,
            BLOCK_D2, False, PRECISION, SIGNED,
        )  # fmt: skip
    begin = tl.min(t, 0) // block_size * block_size
    end = tl.where(own_mask != 0, tl.max(t, 0) + 1, begin)
    own = t // block_size * block_size
    chosen = ((own_mask >> query) & 1) > 0
    for n0 in tl.range(begin, end, OWN_N):
        key = n0 + tl.arange(0, OWN_N)
        seen = (key[None, :] >= own[:, None]) & (key[None, :] <= t[:, None])
        k, k2, v = load_kv(
            K, V, KD, KD2, VD, first_key, n0, key < end, group, G, offs_d, offs_d2, offs_dv, D, DV,
            OWN_N, BLOCK_D, BLOCK_D2, BLOCK_DV, TMA, True,
        )  # fmt: skip
        dq, dq2 = _union_dq_step(
            dq, dq2, q, q2, do, lse2, delta, k, k2, v, chosen, seen, scale_log2, BLOCK_D2, True,
            PRECISION, SIGNED,
        )  # fmt: skip
    lost = tl.max((dq != dq).to(tl.int32))
    if BLOCK_D2 > 0:
        lost = tl.maximum(lost, tl.max((dq2 != dq2).to(tl.int32)))
    if lost > 0:  # NaN, see above: dq stays as it is for the kernel of single queries
        tl.store(STATE + at * 2, -1)
    live = live & (lost == 0)
    put_dq(DQ, DQ, dq, row, live, offs_d, scale, D, ACCUMULATE)
    if BLOCK_D2 > 0:
        put_dq(DQ, DQ, dq2, row, live, offs_d2, scale, D, ACCUMULATE)


def fwd_tiles(arch: int, d: int, dv: int) -> tuple[int, int, int, int]:
    """(BLOCK_N, OWN_N, num_warps, num_stages) of the forward."""
    if arch == 0:
        return 16, 16, 4, 1
    warps = 4 if max(d, dv) <= 192 else 8
    if datacenter(arch):
        return 64, 64, warps, 2
    return (64 if max(d, dv) <= 128 else 32), 32, warps, 2


def dq_tiles(arch: int, d: int, dv: int) -> tuple[int, int, int, int] | None:
    """(BLOCK_N, OWN_N, num_warps, num_stages) of dQ; None where its rows do not fit."""
    if arch == 0:
        return 16, 16, 4, 1
    widest = max(d, dv)
    if datacenter(arch):
        return (64, 64, 4 if widest <= 128 else 8, 2) if widest <= 192 else (32, 32, 8, 2)
    return (32, 32, 4, 2) if widest <= 128 else None


def _arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, by: Selection, lists: UnionLists,
    tiles: tuple,
) -> tuple[tuple, tuple, dict]:  # fmt: skip
    """First tensors, sizes and constants that the two kernels share."""
    hq, dim = q.shape[-2:]
    groups, dv = v.shape[-2:]
    block_n, own_n, warps, stages = tiles
    block_n = min(block_n, dot_size(by.block_size))
    tma = tma_usable(arch_of(q.device), k, whole=v)
    tensors = (
        q, k, v, *kv_tiles(k, v, block_n, tma), by.seq_begin if by.packed else lists.state,
        lists.entries, lists.state,
    )  # fmt: skip
    sizes = (q.numel() // (hq * dim), *by.lengths(q, k), groups, hq // groups, by.q_start)
    constants = dict(
        VARLEN=by.packed, QUERIES=lists.queries, HEADS=lists.heads, ROOM=lists.entries.shape[-1],
        BLOCK_N=block_n, OWN_N=min(own_n, block_n), TMA=tma, num_warps=warps, num_stages=stages,
        **head_constants(dim, dv, q.dtype),
    )  # fmt: skip
    return tensors, (*sizes, by.block_size), constants


def union_attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, by: Selection, lists: UnionLists,
    out: torch.Tensor, lse: torch.Tensor, tiles: tuple[int, int, int, int],
) -> None:  # fmt: skip
    """Write out and lse of the queries in union tiles; other rows stay as they are.

    Tiles whose rows hold NaN are left to the single queries, which are to follow. by: with
    softmax_scale > 0. tiles: see fwd_tiles.
    """
    tensors, sizes, constants = _arguments(q, k, v, by, lists, tiles)
    launch(
        _union_attn_fwd_kernel, (min(programs(q.device, UNIONS_PER_SM), lists.work.numel()),),
        *tensors, lists.work, lists.counts, out, lse, *sizes, by.softmax_scale * LOG2E, **constants,
    )  # fmt: skip


def union_attention_dq(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, by: Selection,
    lists: UnionLists, lse: torch.Tensor, delta: torch.Tensor, dq: torch.Tensor, *,
    accumulate: bool, tiles: tuple[int, int, int, int], dq_scale: float, signed: bool = False,
) -> None:  # fmt: skip
    """Write (or add) dq of the queries in union tiles, times dq_scale instead of softmax_scale;
    tiles: see dq_tiles; signed: see gate_sign.py."""
    tensors, sizes, constants = _arguments(q, k, v, by, lists, tiles)
    launch(
        _union_attn_bwd_dq_kernel, lists.state.shape[:2],
        *tensors, grad_out, lse, delta, dq, *sizes, dq_scale, by.softmax_scale * LOG2E,
        ACCUMULATE=accumulate, SIGNED=signed, **constants,
    )  # fmt: skip
