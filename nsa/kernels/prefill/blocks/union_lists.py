"""Union tiles: neighbouring queries of a group that attend the union of their blocks together.

A tile is as many consecutive queries as fill 64 rows with their heads. Where their choices agree,
reading each block of the union once, with a mask of the queries that chose it, beats reading every
query's blocks (fwd_triton.py). Whether it does is decided per tile on the device: unions are
filed into a list of work, from which a bounded number of programs takes (`ticket`); the queries of
the other tiles go one by one. No host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.launch import launch
from nsa.kernels.prefill.blocks.selection import Selection
from nsa.kernels.prefill.blocks.tile_blocks import PER_WARP, runs
from nsa.kernels.tiles import arch_of, cdiv, pow2, sm_count

# Blocks of a union per (query, block) pair of its tile, in 1/1024, up to which the union is faster.
# H200, bf16, D = 128: a union's block takes 5.1 ns of the GPU forward and 7.4 in dQ, a pair 3.2 and
# 3.6, with 16 and with 4 heads alike (a single query pads them to 16). Not measured elsewhere: half
# the pairs halve the traffic, which no part can lose by. Key tiles do not pad the heads of a pair:
# beside them the limit is for each query head of a group.
SHARE = {("fwd", 90): 640, ("fwd_outer", 90): 60, ("dq", 90): 492}
OTHER_SHARE = 512
# Fewer take the host longer than they save the GPU. H200, chunks of 512 tokens (256 tiles of 4
# heads of 8 groups): the kernels of a forward 60 us instead of 102, eager calls as long as before.
MIN_TILES = 256
# Programs a multiprocessor, at least as many as it holds at a time: a late one finds no work left.
UNIONS_PER_SM = 4
ROWS = 64  # a warpgroup's product
MOST_QUERIES = tl.constexpr(32)  # the bits of a list entry's mask
MOST_ENTRIES = 2048  # (query, rank) pairs of a tile that a program sorts
NOTHING = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True)
class UnionLists:
    """Tile i is the queries i * queries .. of the flattened tokens, heads padded to `heads`.

    state int32 [tiles, G, 2]: the number of blocks in the tile's union, -1 where its queries go one
    by one, and the mask of queries that chose their own block. entries int64 [tiles, G, room]:
    block << 32 | mask of the queries that chose it, for blocks before the queries' own; None once
    the unions are served.
    work int32 [tiles * G]: tile * G + group of the unions, in any order, for one forward, which
    uses up counts int32 [2]: how many there are and were taken.
    """

    state: Tensor
    entries: Tensor | None
    work: Tensor
    counts: Tensor
    queries: int
    heads: int


@triton.jit
def ticket(COUNTS):
    """The next union nobody took; those past the list's end find nothing to do."""
    return tl.atomic_add(COUNTS + 1, 1, sem="relaxed")


@triton.jit
def in_union(STATE, token, group, G, QUERIES: tl.constexpr):
    """True for a query whose tile went as a union (UnionLists.state)."""
    return tl.load(STATE + ((token // QUERIES).to(tl.int64) * G + group) * 2) >= 0


def programs(device: torch.device, per_sm: int) -> int:
    """How many programs share a list of work."""
    if device.type != "cuda":
        return 2
    return per_sm * sm_count(device)


def tile_shape(arch: int, heads: int, itemsize: int) -> tuple[int, int]:
    """(queries, padded heads) of a union tile; 0 queries where there is none."""
    padded = 1 << (heads - 1).bit_length()
    rows = ROWS if arch else 16
    padded = max(padded, rows // MOST_QUERIES.value)
    return (rows // padded if itemsize == 2 and 2 * padded <= rows else 0), padded


@triton.jit
def _union_lists_kernel(
    BLOCK_INDICES, SEQ_BEGIN, ENTRIES, STATE, WORK, COUNTS, T, S, G, n_sel, q_start, block_size,
    share,
    VARLEN: tl.constexpr, QUERIES: tl.constexpr, N_PAD: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    group = tl.program_id(1)
    SIZE: tl.constexpr = QUERIES * N_PAD
    index = tl.arange(0, SIZE)
    query = index // N_PAD
    rank = index % N_PAD
    live = tile * QUERIES + query < T
    token = tl.minimum(tile * QUERIES + query, T - 1)
    if VARLEN:
        sequence = tl.load(SEQ_BEGIN + token)
        own = (token - sequence + q_start) // block_size
    else:
        sequence = token // S
        own = (token % S + q_start) // block_size
    block = tl.load(
        BLOCK_INDICES + (token.to(tl.int64) * G + group) * n_sel + rank,
        mask=live & (rank < n_sel),
        other=-1,
    )
    past = (block >= 0) & (block < own)
    own_mask = tl.sum(tl.where(live & (block == own), 1 << query, 0), 0)
    pairs = tl.sum(past.to(tl.int32), 0)
    # Sorted, the queries that chose a block stand in a run.
    key = tl.sort(tl.where(past, block * MOST_QUERIES + query, NOTHING), 0)
    past = key < NOTHING
    block = key // MOST_QUERIES
    new, end = runs(block, index, SIZE)
    # A query is in a run once: sums of bits are masks.
    bits = tl.where(past, 1 << (key % MOST_QUERIES), 0)
    sums = tl.cumsum(bits, 0)
    mask = tl.gather(sums, end, 0) - sums + bits
    new = new & past
    at = tl.cumsum(new.to(tl.int32), 0) - 1
    count = tl.sum(new.to(tl.int32), 0)
    row = tile.to(tl.int64) * G + group
    packed = (block.to(tl.int64) << 32) | (mask.to(tl.int64) & 0xFFFFFFFF)
    tl.store(ENTRIES + row * SIZE + at, packed, mask=new)
    # A tile over the border of two sequences has two sets of keys.
    whole = tl.min(sequence, 0) == tl.max(sequence, 0)
    pays = whole & (share >= 0) & (count * 1024 <= pairs * share)
    tl.store(STATE + row * 2, tl.where(pays, count, -1))
    tl.store(STATE + row * 2 + 1, own_mask)
    if pays:
        tl.store(WORK + tl.atomic_add(COUNTS, 1, sem="relaxed"), row.to(tl.int32))


def lists_for(kernel: str, q: Tensor, by: Selection) -> UnionLists | None:
    """The lists that `kernel` (a key of SHARE) goes by on q's device; None: no unions."""
    arch, size = arch_of(q.device), q.element_size()
    groups, n_sel = by.blocks.shape[-2:]
    tokens, n_pad = q.numel() // (q.shape[-2] * q.shape[-1]), pow2(n_sel)
    queries, heads = tile_shape(arch, q.shape[-2] // groups, size)
    if by.softmax_scale <= 0:  # the maximum is of unscaled scores
        return None
    if by.strict or not queries or not n_sel:
        return None
    tiles = cdiv(tokens, queries)
    if arch and tiles * groups < MIN_TILES or queries * n_pad > MOST_ENTRIES:
        return None
    entries = torch.empty(tiles, groups, queries * n_pad, dtype=torch.int64, device=q.device)
    state = torch.empty(tiles, groups, 2, dtype=torch.int32, device=q.device)
    work = torch.empty(tiles * groups, dtype=torch.int32, device=q.device)
    counts = torch.zeros(2, dtype=torch.int32, device=q.device)
    share = SHARE.get((kernel, arch), OTHER_SHARE)
    if (kernel, arch) == ("fwd_outer", 90):
        share *= q.shape[-2] // groups
    launch(
        _union_lists_kernel, (tiles, groups),
        by.blocks, by.begins, entries, state, work, counts, tokens, 1 if by.packed else q.shape[1],
        groups, n_sel, by.q_start, by.block_size, share,
        VARLEN=by.packed, QUERIES=queries, N_PAD=n_pad,
        num_warps=cdiv(queries * n_pad, PER_WARP),
    )  # fmt: skip
    return UnionLists(state, entries, work, counts, queries, heads)
