"""The distinct blocks of a tile of neighbouring queries, in the order of their keys.

block_attn_fwd_hopper.py reads each of them once, for all queries of the tile that chose it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.launch import launch
from nsa.kernels.prefill.union_lists import chosen_by, lists_warps
from nsa.kernels.tiles import cdiv, pow2

MOST_ENTRIES = 1024  # (query, rank) pairs of a tile that a program sorts
REGISTERS = 8  # of a thread, for their comparison: the sort needs some as well


@dataclass(frozen=True)
class TileBlocks:
    """Tile i is the queries i * queries .. of the flattened tokens.

    entries int64 [tiles, G, room]: row of the block's first key << 32 | mask of the queries that
    chose it, ascending; rows count over all sequences. counts int32 [tiles, G]: how many there are.
    """

    entries: Tensor
    counts: Tensor
    queries: int


@triton.jit
def _tile_blocks_kernel(
    BLOCK_INDICES, SEQ_BEGIN, ENTRIES, COUNTS, T, S, S_KV, G, n_sel, q_start, block_size,
    VARLEN: tl.constexpr, QUERIES: tl.constexpr, N_PAD: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    group = tl.program_id(1)
    entry = tl.arange(0, QUERIES * N_PAD)
    query = entry // N_PAD
    rank = entry % N_PAD
    other = tl.arange(0, QUERIES)
    token = tl.minimum(tile * QUERIES + query, T - 1)
    other_token = tl.minimum(tile * QUERIES + other, T - 1)
    if VARLEN:
        begin = tl.load(SEQ_BEGIN + token)
        other_begin = tl.load(SEQ_BEGIN + other_token)
        own = (token - begin + q_start) // block_size
        other_own = (other_token - other_begin + q_start) // block_size
    else:
        begin = token // S * S_KV
        other_begin = other_token // S * S_KV
        own = (token % S + q_start) // block_size
        other_own = (other_token % S + q_start) // block_size
    live = tile * QUERIES + query < T
    block = tl.load(
        BLOCK_INDICES + (token.to(tl.int64) * G + group) * n_sel + rank,
        mask=live & (rank < n_sel),
        other=-1,
    )
    seen = (block >= 0) & (block <= own)
    row = tl.where(seen, begin + block * block_size, -1)
    rows_of = BLOCK_INDICES + (other_token.to(tl.int64) * G + group) * n_sel
    other_live = tile * QUERIES + other < T
    mask = chosen_by(
        row, rows_of, n_sel, other_begin, tl.where(other_live, other_own, -1), block_size, QUERIES
    )
    first = seen & ((mask & ((1 << query) - 1)) == 0)  # the first query of those that chose it
    packed = (row.to(tl.int64) << 32) | (mask.to(tl.int64) & 0xFFFFFFFF)
    packed = tl.where(first, packed, 0x7FFFFFFFFFFFFFFF)
    at = tile.to(tl.int64) * G + group
    tl.store(ENTRIES + at * (QUERIES * N_PAD) + entry, tl.sort(packed, 0))
    tl.store(COUNTS + at, tl.sum(first.to(tl.int32), 0))


def room(queries: int, n_sel: int) -> int:
    """Entries that a tile may have."""
    return queries * pow2(n_sel)


def tile_blocks(
    block_indices: Tensor, seq_begin: Tensor | None, seqlen: int, kv_len: int, q_start: int,
    block_size: int, queries: int,
) -> TileBlocks:  # fmt: skip
    """Lists of the tiles of `queries` queries for block_indices int32 [.., G, n_sel]; a tile may
    reach over the border of two sequences.

    Rows are without repetitions, -1 is none. seqlen, kv_len: queries and keys per batch entry;
    packed rows have seq_begin. room(queries, n_sel) is at most MOST_ENTRIES.
    """
    groups, n_sel = block_indices.shape[-2:]
    tokens = block_indices.numel() // (groups * n_sel)
    tiles, size = cdiv(tokens, queries), room(queries, n_sel)
    device = block_indices.device
    entries = torch.empty(tiles, groups, size, dtype=torch.int64, device=device)
    counts = torch.empty(tiles, groups, dtype=torch.int32, device=device)
    varlen = seq_begin is not None
    launch(
        _tile_blocks_kernel, (tiles, groups),
        block_indices, seq_begin if varlen else block_indices, entries, counts, tokens, seqlen,
        kv_len, groups, n_sel, q_start, block_size, VARLEN=varlen, QUERIES=queries,
        N_PAD=pow2(n_sel), num_warps=lists_warps(queries, pow2(n_sel), REGISTERS),
    )  # fmt: skip
    return TileBlocks(entries, counts, queries)
