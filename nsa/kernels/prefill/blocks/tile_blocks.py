"""The distinct blocks of a tile of neighbouring queries, in the order of their keys.

fwd_hopper.py reads each of them once, for all queries of the tile that chose it. Where
few queries chose most of them it is faster to go by keys (fwd_by_keys_hopper.py): those blocks
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
from nsa.kernels.tiles import cdiv, pow2

MOST_ENTRIES = 1024  # (query, rank) pairs of a tile that a program sorts
PER_WARP = 128  # of them
NO_ROW = tl.constexpr(0x7FFFFFFF)
# From so many keys of a sequence, and queries of all, tiles may go by keys, by heads of a group.
# H200, random blocks of one sequence, full forward: 16 heads, 8k tokens 0.03 ms slower, 12k 0.13
# faster; 4 heads, 4k tokens 0.61 ms instead of 0.69, but the host has seven launches more to do.
# Chunks of 64k keys, selection alone: 16 heads, 1k queries 0.22 ms and 0.24 by keys, 4k 0.82 and
# 0.59; 8 heads, 1k 0.46 and 0.34; 4 heads, 1k 0.46 and 0.31.
SPLIT_KEYS = {4: 6144, 8: 4096, 16: 10240}
SPLIT_QUERIES = {4: 1024, 8: 1024, 16: 4096}
# Queries of a tile that a block needs for not going by keys, by heads of a group.
LEAST = {4: 14, 8: 8, 16: 5}
EIGHT = tl.constexpr(8)  # queries that share reads in fwd_hopper.py
ROWS = 64  # query heads that fwd_by_keys_ends.py does at a time


class Costs(NamedTuple):
    """Times of the steps of both ways, in units of 10 ps of an H200 at 16 heads a group. Shared
    reads (fwd_hopper.py): `read` for a block of a tile and `pair` for each query that chose it. By
    keys: `rest_pair` for each pair of the rest (fwd_by_keys_hopper.py), `dense` for a block that is
    listed all the same, and `together` to put both together (fwd_by_keys_ends.py)."""

    read: int
    pair: int
    rest_pair: int
    dense: int
    together: int


# By the widths of Q's and V's heads. `together` is less than what it takes: the more tiles go by
# keys, the faster each of them is, since blocks and sums are in the L2 more often.
COSTS = {
    (64, 64): Costs(107, 48, 68, 580, 0),
    (128, 128): Costs(215, 95, 145, 950, 2400),
    (192, 128): Costs(264, 117, 170, 1190, 2900),
}


@dataclass(frozen=True)
class TileBlocks:
    """Tile i is the queries i * queries .. of the flattened tokens.

    entries int64 [tiles, G, room]: row of the block's first key << 32 | mask of the queries that
    chose it, ascending; rows count over all sequences. counts int32 [tiles, G]: how many there are.
    rest: those that go by keys, which come after the others; None where none can. part: queries
    that fwd_by_keys_ends.py does at a time then.
    """

    entries: Tensor
    counts: Tensor
    queries: int
    rest: Rest | None = None
    part: int = 0


class Rest(NamedTuple):
    """blocks int32 [.., G, n_sel * parts]: parts that few of a tile's queries chose, -1 in place of
    others. listed int32 [tiles, G]: how many of the entries are others; -1 where a tile does not go
    by keys. whole int32 [1 + eights * G], of tiles of EIGHT queries: how many do not, and
    eight * G + group of each, in any order; fwd_by_keys_ends.py adds those that it cannot do.
    undone int32 [tiles, G]: which parts of a tile are left to those that read this list.
    """

    blocks: Tensor
    listed: Tensor
    whole: Tensor
    undone: Tensor


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def runs(x, index, SIZE: tl.constexpr):
    """Which of sorted x [SIZE] begin a run of one value, and where each one's run ends."""
    first = (index == 0) | (x != tl.gather(x, tl.maximum(index - 1, 0), 0))
    at_end = (index == SIZE - 1) | (x != tl.gather(x, tl.minimum(index + 1, SIZE - 1), 0))
    return first, tl.associative_scan(tl.where(at_end, index, SIZE), 0, _smaller, reverse=True)


@triton.jit
def _last(row, QUERIES: tl.constexpr, N_PAD: tl.constexpr):
    """The largest row of each query, for all of its entries."""
    last = tl.max(tl.reshape(row, [QUERIES, N_PAD]), 1)
    last = tl.broadcast_to(last[:, None], [QUERIES, N_PAD])
    return tl.reshape(last, [QUERIES * N_PAD])


@triton.jit
def _entry(
    index, tile, group, SEQ_BEGIN, T, S, S_KV, G, n_sel, q_start,
    VARLEN: tl.constexpr, QUERIES: tl.constexpr, N_PAD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Of a tile's entries, by query and rank: the query's position, the first row of its keys,
    whether there is one, and where it is among the parts of all blocks."""
    token = tile * QUERIES + index // N_PAD
    rank = index % N_PAD
    live = (token < T) & (rank < n_sel * PARTS)
    token = tl.minimum(token, T - 1)
    if VARLEN:
        begin = tl.load(SEQ_BEGIN + token)
        own = token - begin + q_start
    else:
        begin = token // S * S_KV
        own = token % S + q_start
    return own, begin, live, (token.to(tl.int64) * G + group) * (n_sel * PARTS) + rank


@triton.jit
def _key(BLOCK_INDICES, place, live, PARTS: tl.constexpr, KEYS: tl.constexpr):
    """(block of an entry, -1 for none; the position of its part's first key)."""
    block = tl.load(BLOCK_INDICES + place // PARTS, mask=live, other=-1)
    return block, block * (PARTS * KEYS) + (place % PARTS).to(tl.int32) * KEYS


@triton.jit
def _tile_blocks_kernel(
    BLOCK_INDICES, SEQ_BEGIN, ENTRIES, COUNTS, REST, LISTED, WHOLE, UNDONE, T, S, S_KV, G, n_sel,
    q_start,
    VARLEN: tl.constexpr, QUERIES: tl.constexpr, N_PAD: tl.constexpr, PARTS: tl.constexpr,
    KEYS: tl.constexpr, LEAST: tl.constexpr,
    BOTH: tl.constexpr, READ: tl.constexpr, PAIR: tl.constexpr, REST_PAIR: tl.constexpr,
    DENSE: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """LEAST: queries that a listed block needs; 1 lists all, without a rest. BOTH: a tile of EIGHT
    queries goes by keys where that pays, else all do."""
    tile = tl.program_id(0)
    group = tl.program_id(1)
    SIZE: tl.constexpr = QUERIES * N_PAD
    index = tl.arange(0, SIZE)
    own, begin, live, place = _entry(
        index, tile, group, SEQ_BEGIN, T, S, S_KV, G, n_sel, q_start, VARLEN, QUERIES, N_PAD, PARTS
    )
    block, key = _key(BLOCK_INDICES, place, live, PARTS, KEYS)
    seen = (block >= 0) & (key <= own)
    row = tl.where(seen, begin + key, NO_ROW)
    # The last two blocks of each query: its sums begin there, and one may show it a single key.
    last = _last(tl.where(seen, row, -1), QUERIES, N_PAD)
    is_last = row == last
    is_last = is_last | (row == _last(tl.where(seen & (is_last == 0), row, -1), QUERIES, N_PAD))
    key = (row.to(tl.int64) << 20) | (index << 1) | is_last.to(tl.int32)
    key = tl.sort(key, 0)
    # From here on entries are in the order of their rows, those of a block in a run.
    row = (key >> 20).to(tl.int32)
    seen = row < NO_ROW
    entry = (key >> 1).to(tl.int32) & (SIZE - 1)
    query = entry // N_PAD
    first, run_end = runs(row, index, SIZE)
    first = first & seen
    run = tl.associative_scan(tl.where(first, index, 0), 0, _larger)
    # A query is in a run once: sums of bits are masks; above them, how many have it last.
    bits = tl.where(seen, (1 << query) + ((key & 1).to(tl.int32) << QUERIES), 0)
    before = tl.cumsum(bits, 0) - bits
    bits = tl.gather(before + bits, run_end, 0) - tl.gather(before, run, 0)
    mask = bits & ((1 << QUERIES) - 1)
    count = tl.sum(first.to(tl.int32), 0)
    packed = (row.to(tl.int64) << 32) | mask.to(tl.int64)
    at = tile.to(tl.int64) * G + group
    entries = ENTRIES + at * SIZE
    listed = first
    if LEAST > 1:
        choosing = tl.zeros_like(mask)
        for i in tl.static_range(QUERIES):
            choosing += (mask >> i) & 1
        # Not a query's last blocks, one of which may be its own: in the rest it sees all keys.
        rest = seen & (choosing < LEAST) & ((bits >> QUERIES) == 0)
        undone = 0
        if BOTH:
            n_rest = tl.sum(rest.to(tl.int32), 0)
            together = READ * count + PAIR * tl.sum(seen.to(tl.int32), 0)
            dense = DENSE * tl.sum((first & (rest == 0)).to(tl.int32), 0)
            pays = (n_rest > 0) & (TOGETHER + REST_PAIR * n_rest + dense < together)
            rest = rest & pays
            undone = tl.where(pays, 0, -1)
            if undone < 0:
                tl.store(WHOLE + 1 + tl.atomic_add(WHOLE, 1, sem="relaxed"), at.to(tl.int32))
        _, _, live, place = _entry(
            entry, tile, group, SEQ_BEGIN, T, S, S_KV, G, n_sel, q_start, VARLEN, QUERIES, N_PAD,
            PARTS,
        )  # fmt: skip
        _, key = _key(BLOCK_INDICES, place, live, PARTS, KEYS)
        tl.store(REST + place, tl.where(rest, key // KEYS, -1), mask=live)
        tl.store(UNDONE + at, undone)
        listed = first & (rest == 0)
        n_listed = tl.sum(listed.to(tl.int32), 0)
        tl.store(LISTED + at, tl.where(undone < 0, -1, n_listed))
        other = (first & rest).to(tl.int32)
        tl.store(entries + n_listed + tl.cumsum(other, 0) - other, packed, mask=other > 0)
    there = listed.to(tl.int32)
    tl.store(entries + tl.cumsum(there, 0) - there, packed, mask=listed)
    tl.store(COUNTS + at, count)


def queries_of(heads: int) -> int:
    """Of a tile that may go by keys."""
    return max(ROWS // heads, EIGHT.value)


def room(queries: int, n_parts: int) -> int:
    """Entries that a tile may have. n_parts: of a query."""
    return queries * pow2(n_parts)


def tile_blocks(
    block_indices: Tensor, seq_begin: Tensor | None, seqlen: int, kv_len: int, q_start: int,
    keys: int, queries: int, heads: int = 0, parts: int = 1, costs: Costs = COSTS[128, 128],
) -> TileBlocks:  # fmt: skip
    """Lists of the tiles of `queries` queries for block_indices int32 [.., G, n_sel]; a tile may
    reach over the border of two sequences. Blocks are of `parts` parts of `keys` keys, and what is
    listed are those parts.

    Rows are without repetitions, -1 is none. seqlen, kv_len: queries and keys per batch entry;
    packed rows have seq_begin. room(queries, n_sel * parts) is at most MOST_ENTRIES. heads: of a
    group, in which case tiles may go by keys: what fewer than LEAST queries chose is their rest,
    but for the last two blocks of each query. With more than eight heads a tile does so where that
    pays, by costs.
    """
    groups, n_sel = block_indices.shape[-2:]
    tokens = block_indices.numel() // (groups * n_sel)
    tiles, size = cdiv(tokens, queries), room(queries, n_sel * parts)
    device = block_indices.device
    entries = torch.empty(tiles, groups, size, dtype=torch.int64, device=device)
    counts = torch.empty(tiles, groups, dtype=torch.int32, device=device)
    varlen, rest = seq_begin is not None, None
    if heads:
        eights = tiles * (queries // EIGHT.value)
        whole = torch.empty(1 + eights * groups, dtype=torch.int32, device=device)
        whole[:1].zero_()
        listed, undone = torch.empty_like(counts), torch.empty_like(counts)
        blocks = block_indices.new_empty(*block_indices.shape[:-1], n_sel * parts)
        rest = Rest(blocks, listed, whole, undone)
    launch(
        _tile_blocks_kernel, (tiles, groups),
        block_indices, seq_begin if varlen else block_indices, entries, counts,
        *(rest or (counts,) * 4), tokens, seqlen, kv_len, groups, n_sel, q_start,
        VARLEN=varlen, QUERIES=queries, N_PAD=pow2(n_sel * parts), PARTS=parts, KEYS=keys,
        LEAST=LEAST[heads] if heads else 1, BOTH=heads > 8, READ=costs.read, PAIR=costs.pair,
        REST_PAIR=costs.rest_pair, DENSE=costs.dense, TOGETHER=costs.together,
        num_warps=cdiv(size, PER_WARP),
    )  # fmt: skip
    return TileBlocks(entries, counts, queries, rest, ROWS // heads if heads else 0)
