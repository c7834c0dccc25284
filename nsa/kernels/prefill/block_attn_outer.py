"""Selection attention by block indices, forward, by key tiles: for few query heads a group.

One query's blocks are 32 KB of K and V each, read for a product of `heads` rows: with few heads the
reading is all the time. Here a program keeps one key tile and gathers the queries that chose it, 64
rows at a time. What a query gets from one block is a partial output: 16 bits, with its maximum and
its log-sum-exp beside it. A second kernel merges a query's partial outputs. Queries go by slabs, so
that these take PART_BYTES at most.

Queries of one block see different keys of it, and 0 * NaN is NaN: tiles of queries with an output
that is not finite are left to the kernel that serves one query at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa import launches
from nsa.kernels.prefill.block_lists import chunks_of
from nsa.kernels.prefill.union_lists import UnionLists, in_union
from nsa.kernels.tiles import arch_of, dot_precision, pad_dim

LOG2E = 1.4426950408889634
PART_BYTES = 512 << 20
MIN_PAIRS = 1 << 18  # fewer leave the key tiles with too few queries
LIST_ENTRIES = 1024  # of block_indices per program that files them
REDO = 16  # queries of a tile that goes again, where there are no unions


@triton.jit
def _tile_rows_kernel(
    BLOCK_INDICES, SEQUENCE, STATE, COUNTS, ORDER, first, last, S, G, n_sel, per_seq,
    VARLEN: tl.constexpr, UNION: tl.constexpr, N_PAD: tl.constexpr, TOKENS: tl.constexpr,
    FILL: tl.constexpr,
):  # fmt: skip
    """Entries of block_indices by key tile, for tokens first .. last - 1. Without FILL: COUNTS
    [tiles] += 1 for each. With FILL: COUNTS holds where a tile's next entry goes in ORDER."""
    at = tl.arange(0, TOKENS * N_PAD)
    token = first + tl.program_id(0) * TOKENS + at // N_PAD
    rank = at % N_PAD
    group = tl.program_id(1)
    live = (token < last) & (rank < n_sel)
    if VARLEN:
        sequence = tl.load(SEQUENCE + token, mask=live, other=0)
    else:
        sequence = token // S
    row = token.to(tl.int64) * G + group
    block = tl.load(BLOCK_INDICES + row * n_sel + rank, mask=live, other=-1)
    live = live & (block >= 0) & (block < per_seq)
    if UNION > 0:
        live = live & (tl.load(STATE + (token // UNION * G + group) * 2, mask=live, other=0) < 0)
    tile = (sequence * G + group) * per_seq + block
    if FILL:
        to = tl.atomic_add(COUNTS + tile, 1, mask=live, sem="relaxed")
        tl.store(ORDER + to, ((token - first) * G + group) * n_sel + rank, mask=live)
    else:
        tl.atomic_add(COUNTS + tile, 1, mask=live, sem="relaxed")


@triton.jit
def _block_attn_outer_kernel(
    Q, K, V, ORDER, CHUNK_TILE, CHUNK_BEGIN, CHUNK_END, CU_SEQLENS, PARTS, PARTS_LSE, PARTS_TOP,
    first, S, S_KV, G, H, q_start, n_sel, per_seq, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, VARLEN: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One key tile and a chunk of the entries that chose it. PARTS [entries, H, DV] holds outputs
    over PARTS_TOP, their largest magnitude; PARTS_LSE is in base 2."""
    chunk = tl.program_id(0)
    begin = tl.load(CHUNK_BEGIN + chunk)
    end = tl.load(CHUNK_END + chunk)
    if begin >= end:
        return
    tile = tl.load(CHUNK_TILE + chunk)
    group = tile // per_seq % G
    sequence = tile // per_seq // G
    offs_n = tile % per_seq * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    if VARLEN:
        first_row = tl.load(CU_SEQLENS + sequence)
        n_keys = tl.load(CU_SEQLENS + sequence + 1) - first_row
        first_key = first_row.to(tl.int64)
    else:
        first_row = 0
        n_keys = S_KV
        first_key = sequence.to(tl.int64) * S_KV
    live_n = (offs_n < n_keys)[:, None]
    key_row = ((first_key + offs_n) * G + group)[:, None]
    k = tl.load(
        K + key_row * D + offs_d[None, :], mask=live_n & (offs_d < D)[None, :], other=0.0
    )
    v = tl.load(
        V + key_row * DV + offs_dv[None, :], mask=live_n & (offs_dv < DV)[None, :], other=0.0
    )
    rows = tl.arange(0, PAIRS * HEADS)
    head = rows % HEADS
    for p0 in tl.range(begin, end, PAIRS):
        pair = p0 + rows // HEADS
        live = (pair < end) & (head < H)
        entry = tl.load(ORDER + pair, mask=pair < end, other=0)
        token = first + entry // n_sel // G
        row_index = token.to(tl.int64) * (G * H) + group * H + head
        q = tl.load(
            Q + row_index[:, None] * D + offs_d[None, :],
            mask=live[:, None] & (offs_d < D)[None, :],
            other=0.0,
        )
        if VARLEN:
            t = token - first_row
        else:
            t = token % S + q_start
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(offs_n[None, :] <= t[:, None], s, float("-inf"))
        m = tl.max(s, 1)
        m = tl.where(m == float("-inf"), 0.0, m)  # nothing seen
        p = tl.math.exp2(s - m[:, None])
        l = tl.sum(p, 1)
        o = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        o = o / tl.where(l == 0, 1.0, l)[:, None]
        top = tl.max(tl.abs(o), 1)
        top = tl.where(top > 0, top, 1.0)
        to = entry.to(tl.int64) * H + head
        tl.store(
            PARTS + to[:, None] * DV + offs_dv[None, :],
            (o / top[:, None]).to(PARTS.dtype.element_ty),
            mask=live[:, None] & (offs_dv < DV)[None, :],
        )
        lse = tl.where(l == 0, float("-inf"), m + tl.math.log2(l))
        tl.store(PARTS_LSE + to, lse, mask=live)
        tl.store(PARTS_TOP + to, top, mask=live)


@triton.jit
def _block_attn_merge_kernel(
    PARTS, PARTS_LSE, PARTS_TOP, BLOCK_INDICES, STATE, AGAIN, O, LSE, first, G, H, n_sel,
    DV: tl.constexpr, HEADS: tl.constexpr, N_PAD: tl.constexpr, BLOCK_DV: tl.constexpr,
    UNION: tl.constexpr, REDO: tl.constexpr,
):  # fmt: skip
    """out and lse of one query and group from its partial outputs. AGAIN: like STATE, -1 for tiles
    of REDO queries with an output that is not finite."""
    token = first + tl.program_id(0)
    group = tl.program_id(1)
    if UNION > 0:
        if in_union(STATE, token, group, G, UNION):
            return
    head = tl.arange(0, HEADS)
    head_live = head < H
    rank = tl.arange(0, N_PAD)
    row = token.to(tl.int64) * G + group
    blocks = BLOCK_INDICES + row * n_sel
    chosen = tl.load(blocks + rank, mask=rank < n_sel, other=-1) >= 0
    entry = (tl.program_id(0) * G + group).to(tl.int64) * n_sel
    at = (entry + rank)[:, None] * H + head[None, :]
    lse = tl.load(PARTS_LSE + at, mask=chosen[:, None] & head_live[None, :], other=float("-inf"))
    m = tl.max(lse, 0)
    m = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.math.exp2(lse - m[None, :]), 0)
    offs = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([HEADS, BLOCK_DV], tl.float32)
    for i in tl.static_range(N_PAD):
        live = head_live & (tl.load(blocks + i, mask=i < n_sel, other=-1) >= 0)
        to = (entry + i) * H + head
        weight = tl.math.exp2(tl.load(PARTS_LSE + to, mask=live, other=float("-inf")) - m)
        weight *= tl.load(PARTS_TOP + to, mask=live, other=0.0)
        part = tl.load(
            PARTS + to[:, None] * DV + offs[None, :],
            mask=live[:, None] & (offs < DV)[None, :],
            other=0.0,
        )
        acc += weight[:, None] * part.to(tl.float32)
    acc = acc / tl.where(l == 0, 1.0, l)[:, None]
    if tl.max((acc * 0.0 != 0.0).to(tl.int32)) > 0:
        tl.store(AGAIN + (token // REDO * G + group) * 2, -1)
    out = row * H + head
    tl.store(
        O + out[:, None] * DV + offs[None, :],
        acc.to(O.dtype.element_ty),
        mask=head_live[:, None] & (offs < DV)[None, :],
    )
    lse = tl.where(l == 0, float("-inf"), (m + tl.math.log2(l)) * 0.6931471805599453)
    tl.store(LSE + out, lse, mask=head_live)


def outer_tiles(arch: int, heads: int, d: int, dv: int, itemsize: int) -> tuple[int, int, int]:
    """(rows, num_warps, num_stages) of the outer kernel; rows is 0 where there is none."""
    if itemsize != 2 or heads > 4 or max(d, dv) > 128:
        return 0, 0, 0
    return (64, 4, 2) if arch else (32, 4, 1)


def outer_applies(
    arch: int, tokens: int, groups: int, heads: int, n_sel: int, block_size: int, d: int, dv: int,
    itemsize: int,
) -> bool:  # fmt: skip
    """Whether queries outside unions go by key tiles. heads: query heads a group."""
    return (
        block_size in (16, 32, 64)
        and tokens * groups * n_sel >= MIN_PAIRS
        and outer_tiles(arch, heads, d, dv, itemsize)[0] > 0
    )


def slab_tokens(tokens: int, row_bytes: int) -> int:
    """How many of `tokens` queries go at a time; row_bytes: partial outputs of one."""
    return max(PART_BYTES // row_bytes, 1)


def block_attention_outer(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, unions: UnionLists | None, out: Tensor,
    lse: Tensor, *, block_size: int, softmax_scale: float, cu_seqlens: Tensor | None,
    max_seqlen: int, q_start: int,
) -> tuple[Tensor, int]:  # fmt: skip
    """Fill out and lse of the queries in no union; arguments as for block_attention_fwd.

    Returns int32 [tiles, G, 2], whose first number is -1 for tiles that have to go again, and the
    queries of a tile.
    """
    varlen = cu_seqlens is not None
    hq, dim = q.shape[-2:]
    groups, dv = v.shape[-2:]
    heads, n_sel = hq // groups, block_indices.shape[-1]
    tokens = lse.numel() // hq
    s_q, s_kv = (1, 0) if varlen else (q.shape[1], k.shape[1])
    n_seq = cu_seqlens.numel() - 1 if varlen else q.shape[0]
    per_seq = triton.cdiv(max_seqlen if varlen else s_kv, block_size)
    sequence = block_indices
    if varlen:
        token = torch.arange(tokens, device=q.device, dtype=torch.int32)
        sequence = torch.searchsorted(cu_seqlens[1:], token, right=True, out_int32=True)
    rows, warps, stages = outer_tiles(arch_of(q.device), heads, dim, dv, q.element_size())
    heads_padded = triton.next_power_of_2(heads)
    pairs = max(rows // heads_padded, 1)
    n_pad = triton.next_power_of_2(n_sel)
    union = unions.queries if unions else 0
    state = unions.state if unions else block_indices
    redo = union or REDO
    again = torch.zeros(triton.cdiv(tokens, redo), groups, 2, dtype=torch.int32, device=q.device)
    slab = min(slab_tokens(tokens, groups * n_sel * heads * dv * 2), tokens)
    part = torch.empty(slab * groups * n_sel * heads, dv, dtype=torch.float16, device=q.device)
    part_lse = torch.empty(part.shape[0], dtype=torch.float32, device=q.device)
    part_top = torch.empty_like(part_lse)
    order = torch.empty(slab * groups * n_sel, dtype=torch.int32, device=q.device)
    per_program = max(LIST_ENTRIES // n_pad, 1)

    def file_rows(counts: Tensor, first: int, last: int, fill: bool) -> None:
        _tile_rows_kernel[(triton.cdiv(last - first, per_program), groups)](
            block_indices, sequence, state, counts, order, first, last, s_q, groups, n_sel,
            per_seq, VARLEN=varlen, UNION=union, N_PAD=n_pad, TOKENS=per_program, FILL=fill,
        )  # fmt: skip
        launches.bump("_tile_rows_kernel")

    for first in range(0, tokens, slab):
        last = min(first + slab, tokens)
        counts = torch.zeros(n_seq * groups * per_seq + 1, dtype=torch.int32, device=q.device)
        file_rows(counts[1:], first, last, False)
        bounds = counts.cumsum(0, dtype=torch.int32)
        file_rows(bounds[:-1].clone(), first, last, True)
        chunks = chunks_of(bounds, (last - first) * groups * n_sel)
        _block_attn_outer_kernel[(chunks.n_chunks,)](
            q, k, v, order, chunks.chunk_tile, chunks.chunk_begin, chunks.chunk_end,
            cu_seqlens if varlen else order, part, part_lse, part_top, first, s_q, s_kv, groups,
            heads, q_start, n_sel, per_seq, softmax_scale * LOG2E,
            D=dim, DV=dv, VARLEN=varlen, PAIRS=pairs, HEADS=heads_padded, BLOCK_N=block_size,
            BLOCK_D=pad_dim(dim), BLOCK_DV=pad_dim(dv),
            PRECISION=dot_precision(q.dtype), num_warps=warps, num_stages=stages,
        )  # fmt: skip
        launches.bump("_block_attn_outer_kernel")
        _block_attn_merge_kernel[(last - first, groups)](
            part, part_lse, part_top, block_indices, state, again, out, lse, first, groups, heads,
            n_sel, DV=dv, HEADS=heads_padded, N_PAD=n_pad, BLOCK_DV=pad_dim(dv), UNION=union,
            REDO=redo, num_warps=1,
        )  # fmt: skip
        launches.bump("_block_attn_merge_kernel")
    return again, redo
