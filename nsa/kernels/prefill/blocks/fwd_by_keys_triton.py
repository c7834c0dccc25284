"""Selection attention by block indices, forward, by key tiles: for few query heads a group.

One query's blocks are 32 KB of K and V each, read for a product of `heads` rows: with few heads the
reading is all the time. Here a program keeps one key tile and gathers the queries that chose it, 64
rows at a time. What a query gets from one block is a partial output: 16 bits, with its maximum and
its log-sum-exp beside it. A second kernel merges a query's partial outputs. Queries go by slabs, so
that these take less than an output of a branch, or LEAST_PARTS.

Queries of one block see different keys of it, and 0 * NaN is NaN: tiles of queries with an output
that is not finite are left to the kernel that serves one query at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.head_rows import head_rows, put_rows
from nsa.kernels.launch import launch
from nsa.kernels.prefill.blocks.lists_by_keys import Chunks, chunks_of, keys_of_tile
from nsa.kernels.prefill.blocks.selection import Selection
from nsa.kernels.prefill.blocks.union_lists import UnionLists, in_union
from nsa.kernels.prefill.packs import packed_tiles, token_sequences
from nsa.kernels.tiles import LOG2E, arch_of, cdiv, dot_precision, dot_size, pow2

# Bytes of partial outputs at a time. H200, 8 groups of 4 heads, 32k tokens: 1024 MiB 4.9 ms, 512
# 5.1, 256 5.4, 160 5.9.
LEAST_PARTS, MOST_PARTS = 176 << 20, 1 << 30
CHUNK = 128  # pairs of a program; of slabs of 256 MiB, 256 pairs take 5 % longer
# (query, block) pairs. H200, 8 groups, heads of 128, random blocks, in ms beside single queries and
# unions without this: 4 heads, 8k tokens (2^20 pairs) 1.6 and 1.7, 16k 2.9 and 4.3, 32k 5.2 and
# 11.2; 8 heads, 16k 4.9 and 5.5; 16 heads of 4 groups, 32k 9.6 and 6.7.
MIN_PAIRS = 1 << 21
MOST_HEADS = 8
ALIKE = 4  # times what a query chooses: in sequences up to there nearly all tiles go as unions
MIN_PAIRS_PER_TILE = 8
LIST_ENTRIES = 1024  # of block_indices per program that files them
REDO = 16  # queries of a tile that goes again, where there are no unions

KERNELS = ("_tile_rows_kernel", "_block_attn_outer_kernel", "_block_attn_merge_kernel")


@triton.jit
def _tile_rows_kernel(
    BLOCK_INDICES, FIRST_TILE, STATE, COUNTS, ORDER, T, S, G, n_sel, per_seq, n_tiles, slab,
    VARLEN: tl.constexpr, UNION: tl.constexpr, N_PAD: tl.constexpr, TOKENS: tl.constexpr,
    FILL: tl.constexpr,
):  # fmt: skip
    """Entries of block_indices by slab of tokens and key tile. Without FILL, COUNTS
    [slabs, n_tiles] counts them; with FILL it is [slabs, n_tiles + 1] and where the next one of a
    tile goes in the slab's part of ORDER [slabs, slab * G * n_sel], as an entry of the slab.
    FIRST_TILE: of each packed token's sequence."""
    at = tl.arange(0, TOKENS * N_PAD)
    token = tl.program_id(0) * TOKENS + at // N_PAD
    rank = at % N_PAD
    group = tl.program_id(1)
    live = (token < T) & (rank < n_sel)
    row = token.to(tl.int64) * G + group
    block = tl.load(BLOCK_INDICES + row * n_sel + rank, mask=live, other=-1)
    live = live & (block >= 0) & (block < per_seq)
    if UNION > 0:
        live = live & ~in_union(STATE, tl.minimum(token, T - 1), group, G, UNION)
    part = (token // slab).to(tl.int64)
    if VARLEN:
        counts = COUNTS + group * per_seq + tl.load(FIRST_TILE + token, mask=live, other=0) + block
    else:
        counts = COUNTS + (token // S * G + group) * per_seq + block
    if FILL:
        to = tl.atomic_add(counts + part * (n_tiles + 1), 1, mask=live, sem="relaxed")
        entry = (token % slab * G + group) * n_sel + rank
        tl.store(ORDER + part * slab * G * n_sel + to, entry, mask=live)
    else:
        tl.atomic_add(counts + part * n_tiles, 1, mask=live, sem="relaxed")


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
    group, _, n0, n_keys, first_row, first_key = keys_of_tile(
        tile, CU_SEQLENS, S_KV, G, per_seq, BLOCK_N, VARLEN
    )
    offs_n = n0 + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    live_n = offs_n < n_keys
    key_row = (first_key + offs_n) * G + group
    k = head_rows(K, key_row, live_n, offs_d, D)
    v = head_rows(V, key_row, live_n, offs_dv, DV)
    rows = tl.arange(0, PAIRS * HEADS)
    head = rows % HEADS
    for p0 in tl.range(begin, end, PAIRS):
        pair = p0 + rows // HEADS
        live = (pair < end) & (head < H)
        entry = tl.load(ORDER + pair, mask=pair < end, other=0)
        token = first + entry // n_sel // G
        row_index = token.to(tl.int64) * (G * H) + group * H + head
        q = head_rows(Q, row_index, live, offs_d, D)
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
        put_rows(PARTS, o / top[:, None], to, live, offs_dv, DV)
        lse = tl.where(l == 0, float("-inf"), m + tl.math.log2(l))
        tl.store(PARTS_LSE + to, lse, mask=live)
        tl.store(PARTS_TOP + to, top, mask=live)


@triton.jit
def _block_attn_merge_kernel(
    PARTS, PARTS_LSE, PARTS_TOP, BLOCK_INDICES, STATE, AGAIN, O, LSE, first, G, H, n_sel,
    per_seq,
    DV: tl.constexpr, HEADS: tl.constexpr, N_PAD: tl.constexpr, BLOCK_DV: tl.constexpr,
    UNION: tl.constexpr, REDO: tl.constexpr,
):  # fmt: skip
    """out and lse of one query and group from its partial outputs. AGAIN: like STATE, -1 for tiles
    of REDO queries with an output that is not finite, or has no weight."""
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
    block = tl.load(blocks + rank, mask=rank < n_sel, other=-1)
    chosen = (block >= 0) & (block < per_seq)  # others were not filed: nobody wrote their part
    entry = (tl.program_id(0) * G + group).to(tl.int64) * n_sel
    at = (entry + rank)[:, None] * H + head[None, :]
    lse = tl.load(PARTS_LSE + at, mask=chosen[:, None] & head_live[None, :], other=float("-inf"))
    m = tl.max(lse, 0)
    m = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.math.exp2(lse - m[None, :]), 0)
    offs = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([HEADS, BLOCK_DV], tl.float32)
    for i in tl.static_range(N_PAD):
        block = tl.load(blocks + i, mask=i < n_sel, other=-1)
        live = head_live & (block >= 0) & (block < per_seq)
        to = (entry + i) * H + head
        weight = tl.math.exp2(tl.load(PARTS_LSE + to, mask=live, other=float("-inf")) - m)
        weight *= tl.load(PARTS_TOP + to, mask=live, other=0.0)
        part = head_rows(PARTS, to, live, offs, DV)
        acc += weight[:, None] * part.to(tl.float32)
    acc = acc / tl.where(l == 0, 1.0, l)[:, None]
    # No weight in spite of keys: scores of -inf, which that kernel tells of.
    none = (l == 0) & head_live & (tl.max(chosen.to(tl.int32), 0) > 0)
    if tl.max(((acc * 0.0 != 0.0) | none[:, None]).to(tl.int32)) > 0:
        tl.store(AGAIN + (token // REDO * G + group) * 2, -1)
    out = row * H + head
    put_rows(O, acc, out, head_live, offs, DV)
    lse = tl.where(l == 0, float("-inf"), (m + tl.math.log2(l)) * 0.6931471805599453)
    tl.store(LSE + out, lse, mask=head_live)


def outer_tiles(
    arch: int, heads: int, d: int, dv: int, itemsize: int
) -> tuple[int, dict[str, int | None]]:
    """(rows, launch options) of the outer kernel; rows is 0 where there is none."""
    if itemsize != 2 or heads > MOST_HEADS or max(d, dv) > 128:
        return 0, {}
    # H200: four programs on a multiprocessor, by their registers, hide the gathers better than
    # pipelining them does (3.6 and 4.4 ms at 32k tokens of 8 groups).
    registers = 128 if arch == 90 else None
    return 64 if arch else 32, dict(num_warps=4, num_stages=1, maxnreg=registers)


def outer_applies(
    arch: int, tokens: int, keys: int, longest: int, groups: int, heads: int, n_sel: int,
    block_size: int, d: int, dv: int, itemsize: int,
) -> bool:  # fmt: skip
    """Whether queries outside unions go by key tiles. tokens: queries of all sequences; keys: room
    for keys of all; longest: keys of one sequence; heads: query heads a group."""
    pairs, tiles = tokens * groups * n_sel, keys * groups // block_size
    return (
        block_size in (16, 32, 64)
        and longest > ALIKE * n_sel * block_size
        and pairs >= max(MIN_PAIRS, MIN_PAIRS_PER_TILE * tiles)
        and outer_tiles(arch, heads, d, dv, itemsize)[0] > 0
    )


def slab_tokens(row_bytes: int, out_bytes: int) -> int:
    """How many queries go at a time; row_bytes: partial outputs of one, out_bytes: all outputs.

    A quarter of the room is for the lists.
    """
    return max(min(max(out_bytes * 3 // 4, LEAST_PARTS), MOST_PARTS) // row_bytes, 1)


def _rows_by_tile(
    block_indices: Tensor, first_tile: Tensor | None, unions: UnionLists | None, seqlen: int,
    per_seq: int, batch: int, slab: int,
) -> tuple[Tensor, Chunks]:  # fmt: skip
    """Of every slab of tokens: entries by key tile, and the tiles' chunks. No host
    synchronisation, and two launches however many slabs there are."""
    groups, n_sel = block_indices.shape[-2:]
    tokens = block_indices.numel() // (groups * n_sel)
    slabs, n_tiles = cdiv(tokens, slab), batch * groups * per_seq
    kw = dict(device=block_indices.device, dtype=torch.int32)
    order = torch.empty(slabs, slab * groups * n_sel, **kw)
    n_pad = pow2(n_sel)
    per_program = max(LIST_ENTRIES // n_pad, 1)

    def file_rows(counts: Tensor, fill: bool) -> None:
        launch(
            _tile_rows_kernel, (cdiv(tokens, per_program), groups),
            block_indices, block_indices if first_tile is None else first_tile,
            unions.state if unions else block_indices, counts, order, tokens, seqlen, groups, n_sel,
            per_seq, n_tiles, slab, VARLEN=first_tile is not None,
            UNION=unions.queries if unions else 0, N_PAD=n_pad, TOKENS=per_program, FILL=fill,
        )  # fmt: skip

    counts = torch.zeros(slabs, n_tiles, **kw)
    file_rows(counts, False)
    chunks = chunks_of(counts, slab * groups * n_sel, CHUNK)
    file_rows(chunks.bounds.to(torch.int32), True)
    return order, chunks


def block_attention_outer(
    q: Tensor, k: Tensor, v: Tensor, by: Selection, unions: UnionLists | None, out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, int]:  # fmt: skip
    """Fill out and lse of the queries in no union.

    Returns int32 [tiles, G, 2], whose first number is -1 for tiles that have to go again, and the
    queries of a tile.
    """
    block_indices, block_size, cu_seqlens = by.blocks, by.block_size, by.cu_seqlens
    hq, dim = q.shape[-2:]
    groups, dv = v.shape[-2:]
    heads, n_sel = hq // groups, by.n_sel
    tokens = lse.numel() // hq
    if cu_seqlens is not None:
        s_q, s_kv, batch = 1, cu_seqlens.numel() - 1, 1
        per_seq = packed_tiles(tokens, block_size, cu_seqlens)
        sequences, begins = token_sequences(cu_seqlens, tokens)
        first_tile = sequences + begins // block_size
    else:
        (batch, s_q), s_kv, first_tile = q.shape[:2], k.shape[1], None
        per_seq = cdiv(s_kv, block_size)
    rows, tiles = outer_tiles(arch_of(q.device), heads, dim, dv, q.element_size())
    heads_padded = pow2(heads)
    union = unions.queries if unions else 0
    redo = union or REDO
    again = torch.zeros(cdiv(tokens, redo), groups, 2, dtype=torch.int32, device=q.device)
    out_bytes = out.numel() * out.element_size()
    slab = min(slab_tokens(groups * n_sel * heads * dv * 2, out_bytes), tokens)
    parts = torch.empty(slab * groups * n_sel * heads, dv, dtype=torch.float16, device=q.device)
    parts_lse = torch.empty(parts.shape[0], dtype=torch.float32, device=q.device)
    parts_top = torch.empty_like(parts_lse)
    order, chunks = _rows_by_tile(block_indices, first_tile, unions, s_q, per_seq, batch, slab)
    for i, first in enumerate(range(0, tokens, slab)):
        launch(
            _block_attn_outer_kernel, (chunks.n_chunks,),
            q, k, v, order[i], chunks.chunk_tile[i], chunks.chunk_begin[i], chunks.chunk_end[i],
            order if cu_seqlens is None else cu_seqlens, parts, parts_lse, parts_top, first, s_q,
            s_kv, groups, heads, by.q_start, n_sel, per_seq, by.softmax_scale * LOG2E,
            D=dim, DV=dv, VARLEN=by.packed, PAIRS=max(rows // heads_padded, 1), HEADS=heads_padded,
            BLOCK_N=block_size, BLOCK_D=dot_size(dim), BLOCK_DV=dot_size(dv),
            PRECISION=dot_precision(q.dtype), **tiles,
        )  # fmt: skip
        launch(
            _block_attn_merge_kernel, (min(slab, tokens - first), groups),
            parts, parts_lse, parts_top, block_indices, unions.state if unions else block_indices,
            again, out, lse, first, groups, heads, n_sel, per_seq, DV=dv, HEADS=heads_padded,
            N_PAD=pow2(n_sel), BLOCK_DV=dot_size(dv), UNION=union, REDO=redo,
            num_warps=1,
        )  # fmt: skip
    return again, redo
