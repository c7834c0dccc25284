"""The distinct blocks of a tile of neighbouring queries, in the order of their keys.

block_attn_fwd_hopper.py reads each of them once, for all queries of the tile that chose it. Where
few queries chose most of them it is faster to go by keys (block_attn_keys_hopper.py): those blocks
are the rest of the tile, which is decided tile by tile and on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.launch import launch
from nsa.kernels.prefill.union_lists import chosen_by, lists_warps
from nsa.kernels.tiles import cdiv, pow2

MOST_ENTRIES = 1024  # (query, rank) pairs of a tile that a program sorts
REGISTERS = 8  # of a thread, for their comparison: the sort needs some as well
# What the forward takes, in 10 ps of an H200 at 16 heads of 128: to read a block that a tile lists
# and for each query that chose it (block_attn_fwd_hopper.py); or for each pair of the rest
# (block_attn_keys_hopper.py), for a block that is listed all the same, and to put both together
# (block_attn_ends.py).
READ, PAIR, REST_PAIR, DENSE, TOGETHER = 215, 95, 145, 950, 4800
LEAST = 5  # queries that a listed block needs where there is a rest
PART = tl.constexpr(4)  # queries of a tile that block_attn_ends.py does at a time


@dataclass(frozen=True)
class TileBlocks:
    """Tile i is the queries i * queries .. of the flattened tokens.

    entries int64 [tiles, G, room]: row of the block's first key << 32 | mask of the queries that
    chose it, ascending; rows count over all sequences. counts int32 [tiles, G]: how many there are.
    rest: those that go by keys, which come after the others; None where none can.
    """

    entries: Tensor
    counts: Tensor
    queries: int
    rest: Rest | None = None


class Rest(NamedTuple):
    """blocks int32, like block_indices: those that few of a tile's queries chose, -1 in place of
    others. listed int32 [tiles, G]: how many of the entries are others, all where a tile has no
    rest. whole int32 [1 + tiles * G]: the number of tiles that have none, and tile * G + group of
    each, in any order; block_attn_ends.py adds those that it cannot do. todo int32 [tiles, G]:
    which parts of PART queries of a tile are still to be done by those that read this list.
    """

    blocks: Tensor
    listed: Tensor
    whole: Tensor
    todo: Tensor


@triton.jit
def _tile_blocks_kernel(
    BLOCK_INDICES, SEQ_BEGIN, ENTRIES, COUNTS, REST, LISTED, WHOLE, TODO, T, S, S_KV, G, n_sel,
    q_start, block_size,
    VARLEN: tl.constexpr, QUERIES: tl.constexpr, N_PAD: tl.constexpr, LEAST: tl.constexpr,
    READ: tl.constexpr, PAIR: tl.constexpr, REST_PAIR: tl.constexpr, DENSE: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """LEAST: queries that a listed block needs; 1 lists all, without a rest."""
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
    live = (tile * QUERIES + query < T) & (rank < n_sel)
    place = (token.to(tl.int64) * G + group) * n_sel + rank
    block = tl.load(BLOCK_INDICES + place, mask=live, other=-1)
    seen = (block >= 0) & (block <= own)
    row = tl.where(seen, begin + block * block_size, -1)
    rows_of = BLOCK_INDICES + (other_token.to(tl.int64) * G + group) * n_sel
    other_own = tl.where(tile * QUERIES + other < T, other_own, -1)
    mask = chosen_by(row, rows_of, n_sel, other_begin, other_own, block_size, QUERIES)
    first = seen & ((mask & ((1 << query) - 1)) == 0)  # the first query of those that chose it
    packed = (row.to(tl.int64) << 32) | (mask.to(tl.int64) & 0xFFFFFFFF)
    packed = tl.where(first, packed, 0x7FFFFFFFFFFFFFFF)
    at = tile.to(tl.int64) * G + group
    if LEAST > 1:
        choosing = tl.zeros_like(mask)
        for i in tl.static_range(QUERIES):
            choosing += (mask >> i) & 1
        # The own block of any of them is listed: in the rest a query sees all keys of a block.
        ends_here = row[:, None] == (other_begin + other_own * block_size)[None, :]
        rest = seen & (choosing < LEAST) & (tl.max(ends_here.to(tl.int32), 1) == 0)
        n_rest = tl.sum(rest.to(tl.int32), 0)
        together = READ * tl.sum(first.to(tl.int32), 0) + PAIR * tl.sum(seen.to(tl.int32), 0)
        dense = DENSE * tl.sum((first & (rest == 0)).to(tl.int32), 0)
        pays = TOGETHER + REST_PAIR * n_rest + dense < together
        # Sums begin with what is listed of a query.
        split = tl.sum(tl.reshape(rest.to(tl.int32), [QUERIES, N_PAD]), 1)
        chose = tl.sum(tl.reshape(seen.to(tl.int32), [QUERIES, N_PAD]), 1)
        pays = pays & (tl.max(((split > 0) & (split == chose)).to(tl.int32), 0) == 0)
        rest = rest & pays
        n_rest = tl.where(pays, n_rest, 0)
        tl.store(REST + place, tl.where(rest, block, -1), mask=live)
        tl.store(TODO + at, tl.where(n_rest == 0, -1, 0))
        if n_rest == 0:
            tl.store(WHOLE + 1 + tl.atomic_add(WHOLE, 1, sem="relaxed"), at.to(tl.int32))
        listed = first & (rest == 0)
        tl.store(LISTED + at, tl.sum(listed.to(tl.int32), 0))
        # By their sign they come before the rest.
        packed = tl.where(listed, packed | (-1 << 63), packed)
    packed = tl.sort(packed, 0) & 0x7FFFFFFFFFFFFFFF
    tl.store(ENTRIES + at * (QUERIES * N_PAD) + entry, packed)
    tl.store(COUNTS + at, tl.sum(first.to(tl.int32), 0))


def room(queries: int, n_sel: int) -> int:
    """Entries that a tile may have."""
    return queries * pow2(n_sel)


def tile_blocks(
    block_indices: Tensor, seq_begin: Tensor | None, seqlen: int, kv_len: int, q_start: int,
    block_size: int, queries: int, split: bool = False,
) -> TileBlocks:  # fmt: skip
    """Lists of the tiles of `queries` queries for block_indices int32 [.., G, n_sel]; a tile may
    reach over the border of two sequences.

    Rows are without repetitions, -1 is none. seqlen, kv_len: queries and keys per batch entry;
    packed rows have seq_begin. room(queries, n_sel) is at most MOST_ENTRIES. With split, what
    fewer than LEAST queries chose is the rest of tiles where that pays, but for blocks that one of
    the tile's queries stands in; and but for tiles where it would be all that a query chose.
    """
    groups, n_sel = block_indices.shape[-2:]
    tokens = block_indices.numel() // (groups * n_sel)
    tiles, size = cdiv(tokens, queries), room(queries, n_sel)
    device = block_indices.device
    entries = torch.empty(tiles, groups, size, dtype=torch.int64, device=device)
    counts = torch.empty(tiles, groups, dtype=torch.int32, device=device)
    varlen, rest = seq_begin is not None, None
    if split:
        whole = torch.empty(1 + tiles * groups, dtype=torch.int32, device=device)
        whole[:1].zero_()
        listed, todo = torch.empty_like(counts), torch.empty_like(counts)
        rest = Rest(torch.empty_like(block_indices), listed, whole, todo)
    launch(
        _tile_blocks_kernel, (tiles, groups),
        block_indices, seq_begin if varlen else block_indices, entries, counts,
        *(rest or (counts,) * 4), tokens, seqlen, kv_len, groups, n_sel, q_start, block_size,
        VARLEN=varlen, QUERIES=queries, N_PAD=pow2(n_sel), LEAST=LEAST if split else 1, READ=READ,
        PAIR=PAIR, REST_PAIR=REST_PAIR, DENSE=DENSE, TOGETHER=TOGETHER,
        num_warps=lists_warps(queries, pow2(n_sel), REGISTERS),
    )  # fmt: skip
    return TileBlocks(entries, counts, queries, rest)
