"""Which rows attend a tile of keys: the inverse of the block indices, for the dK/dV pass.

A pair is (entry of block_indices, key tile). A tile's rows are in ascending order, so gradients are
bitwise repeatable. Long lists are cut into chunks: block 0 and the local blocks are attended by
thousands of rows, a random block by dozens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.launch import launch
from nsa.kernels.prefill.packs import packed_bounds, packed_tiles, sequence_of, token_sequences
from nsa.kernels.tiles import cdiv, pow2

CHUNK = 512
LIST_SIZE = 1024  # pairs, tiles or chunks that a program of the lists takes at once
MAP_BYTES = 1 << 26  # of the map of rows and tiles, at most
BUCKETS = 1024  # of pieces, by group and query
WORDS, SHARE = 128, 512  # of the map: that a program takes at once, and in all


@triton.jit
def keys_of_tile(tile, CU_SEQLENS, S_KV, G, per_seq, BLOCK_N: tl.constexpr, VARLEN: tl.constexpr):
    """What a key tile is: its group, its sequence, the position of its first key, how many keys the
    sequence has, that sequence's first packed row (0 for dense inputs) and its first row of K.

    Numbered (sequence, group, tile), or (group, tile) of a pack (TileRows.per_seq): one group's
    rows follow each other through L2. S_KV: keys of a sequence, of a pack how many sequences.
    """
    group = tile // per_seq % G
    if VARLEN:
        sequence, n0 = sequence_of(tile % per_seq, CU_SEQLENS, S_KV, BLOCK_N)
        n0 = n0 * BLOCK_N
        first_row, n_keys = packed_bounds(CU_SEQLENS, sequence, S_KV, 0)
        first_key = first_row.to(tl.int64)
    else:
        sequence = tile // per_seq // G
        n0 = tile % per_seq * BLOCK_N
        first_row = 0
        n_keys = S_KV
        first_key = sequence.to(tl.int64) * S_KV
    return group, sequence, n0, n_keys, first_row, first_key


@dataclass(frozen=True)
class Chunks:
    """Chunk c covers the pairs chunk_begin[c] .. chunk_end[c] of tile chunk_tile[c]; both are 0
    past the last chunk. size: pairs of a chunk, at most.
    tile_chunks, bounds [n_tiles + 1]: the chunks and the pairs of a tile.
    """

    chunk_tile: Tensor
    chunk_begin: Tensor
    chunk_end: Tensor
    tile_chunks: Tensor
    bounds: Tensor
    n_chunks: int
    n_tiles: int
    size: int


@triton.jit
def _chunk_ends_kernel(
    COUNTS, BOUNDS, TILE_CHUNKS, n_tiles, CHUNK: tl.constexpr, SIZE: tl.constexpr
):
    """BOUNDS and TILE_CHUNKS [.., n_tiles + 1]: running sums of COUNTS, the pairs of each tile, and
    of their chunks, for one slab."""
    slab = tl.program_id(0).to(tl.int64)
    bounds = BOUNDS + slab * (n_tiles + 1)
    tile_chunks = TILE_CHUNKS + slab * (n_tiles + 1)
    tl.store(bounds, 0)
    tl.store(tile_chunks, 0)
    pairs_before = tl.zeros((), dtype=tl.int64)
    before = tl.zeros((), dtype=tl.int64)
    for first in range(0, n_tiles, SIZE):
        tile = first + tl.arange(0, SIZE)
        live = tile < n_tiles
        pairs = tl.load(COUNTS + slab * n_tiles + tile, mask=live, other=0).to(tl.int64)
        chunks = (pairs + CHUNK - 1) // CHUNK
        tl.store(bounds + tile + 1, pairs_before + tl.cumsum(pairs, 0), mask=live)
        tl.store(tile_chunks + tile + 1, before + tl.cumsum(chunks, 0), mask=live)
        pairs_before += tl.sum(pairs, 0)
        before += tl.sum(chunks, 0)


@triton.jit
def _chunk_fill_kernel(
    BOUNDS, TILE_CHUNKS, CHUNK_TILE, CHUNK_BEGIN, CHUNK_END, n_tiles, n_chunks, halvings,
    CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """What each chunk of one slab covers: its tile is the last whose chunks begin at or before."""
    chunk = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    slab = tl.program_id(1).to(tl.int64)
    tile_chunks = TILE_CHUNKS + slab * (n_tiles + 1)
    bounds = BOUNDS + slab * (n_tiles + 1)
    live = chunk < tl.load(tile_chunks + n_tiles)
    tile = tl.zeros((SIZE,), dtype=tl.int32)
    after = tl.full((SIZE,), 0, dtype=tl.int32) + n_tiles
    for _ in range(halvings):
        middle = (tile + after) // 2
        begun = tl.load(tile_chunks + middle, mask=live, other=0) <= chunk
        tile = tl.where(begun, middle, tile)
        after = tl.where(begun, after, middle)
    nth = chunk - tl.load(tile_chunks + tile, mask=live, other=0)
    begin = tl.load(bounds + tile, mask=live, other=0) + nth * CHUNK
    end = tl.load(bounds + tile + 1, mask=live, other=0)
    there = chunk < n_chunks
    to = slab * n_chunks + chunk
    tl.store(CHUNK_TILE + to, tile, mask=there)
    tl.store(CHUNK_BEGIN + to, tl.where(live, begin, 0), mask=there)
    tl.store(CHUNK_END + to, tl.where(live, tl.minimum(begin + CHUNK, end), 0), mask=there)


def chunks_of(counts: Tensor, most: int, size: int) -> Chunks:
    """Chunks of `size` pairs: tile i has counts int32 [.., i] of them, `most` at most in all.

    Leading dimensions are slabs, each with its own lists. No host synchronisation: n_chunks is a
    bound that shapes give, so most late chunks may be empty.
    """
    n_tiles, lead = counts.shape[-1], counts.shape[:-1]
    slabs = math.prod(lead)
    n_chunks = most // size + min(n_tiles, most)
    n_chunks += -n_chunks % 4  # every slab's begin at 16 bytes
    make = lambda n, dtype: torch.empty(*lead, n, dtype=dtype, device=counts.device)
    bounds, tile_chunks = make(n_tiles + 1, torch.int64), make(n_tiles + 1, torch.int64)
    chunk_tile = make(n_chunks, torch.int32)
    begin, end = make(n_chunks, torch.int64), make(n_chunks, torch.int64)
    launch(
        _chunk_ends_kernel, (slabs,),
        counts, bounds, tile_chunks, n_tiles, CHUNK=size, SIZE=LIST_SIZE,
    )  # fmt: skip
    launch(
        _chunk_fill_kernel, (cdiv(n_chunks, LIST_SIZE), slabs),
        bounds, tile_chunks, chunk_tile, begin, end, n_tiles, n_chunks,
        max(n_tiles - 1, 0).bit_length(), CHUNK=size, SIZE=LIST_SIZE,
    )  # fmt: skip
    return Chunks(chunk_tile, begin, end, tile_chunks, bounds, n_chunks, n_tiles, size)


@dataclass(frozen=True)
class TileRows(Chunks):
    """rows: token * G + group of each pair, by tile and ascending. per_seq: tiles of a sequence and
    group; of a pack those of all sequences, see packs.py. For keys_of_tile. tile: its keys."""

    rows: Tensor
    per_seq: int
    tile: int


@triton.jit
def _pair_tiles_kernel(
    BLOCK_INDICES, SEQUENCE, CU_SEQLENS, OUT, pairs, S, G, n_sel, per_seq, n_tiles, words,
    VARLEN: tl.constexpr, TILE: tl.constexpr, PER_BLOCK: tl.constexpr, MARK: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The tiles of TILE keys of each entry's block. S: rows of a sequence, of a pack how many
    sequences. MARK: OUT [n_tiles, words] gets the bit of the row's place in its sequence, a word
    for 32 rows; else OUT [pairs] is the tile, n_tiles where there is none."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    entry = at // PER_BLOCK
    live = at < pairs
    row = entry // n_sel
    token = row // G
    if VARLEN:
        sequence = tl.load(SEQUENCE + token, mask=live, other=0)
        first_row = tl.load(CU_SEQLENS + sequence, mask=live, other=0)
        place = token - first_row
    else:
        sequence = token // S
        place = token % S
    block = tl.load(BLOCK_INDICES + entry, mask=live, other=-1)
    known = (block >= 0) & (block < tl.cdiv(per_seq, PER_BLOCK))
    tile = tl.where(known, block, 0) * PER_BLOCK + (at % PER_BLOCK).to(tl.int32)
    if VARLEN:
        # Tiles behind a row may be another sequence's.
        known = known & (tile * TILE <= place) & (sequence < S)
        tile += first_row // TILE + sequence
        sequence = 0
    known = known & (tile < per_seq)
    tile = tl.where(known, (sequence * G + row % G) * per_seq + tile, n_tiles)
    known = known & (tile < n_tiles)
    if MARK:
        word = OUT + tile.to(tl.int64) * words + place // 32
        bit = tl.full((SIZE,), 1, tl.int32) << (place % 32).to(tl.int32)
        tl.atomic_or(word, bit, mask=known & (place < words * 32), sem="relaxed")
    else:
        tl.store(OUT + at, tile, mask=live)


@triton.jit
def _ones(word):
    """How many bits of each 32-bit word are set."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).to(tl.int32)


@triton.jit
def _ones_before(BITS, words, WORDS: tl.constexpr):
    """Of the first `words` words."""
    total = tl.zeros((WORDS,), tl.int32)
    for first in range(0, words, WORDS):
        at = first + tl.arange(0, WORDS)
        total += _ones(tl.load(BITS + at, mask=at < words, other=0))
    return tl.sum(total, 0)


@triton.jit
def _tile_counts_kernel(BITS, COUNTS, words, WORDS: tl.constexpr):
    tile = tl.program_id(0)
    tl.store(COUNTS + tile, _ones_before(BITS + tile.to(tl.int64) * words, words, WORDS))


@triton.jit
def _tile_members_kernel(
    BITS, BOUNDS, CU_SEQLENS, ROWS, words, S, G, per_seq,
    VARLEN: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """The rows of one tile whose bits are in a share of its words."""
    tile = tl.program_id(0)
    share = tl.program_id(1) * SHARE
    bits = BITS + tile.to(tl.int64) * words
    group, sequence, _, _, _, first_token = keys_of_tile(
        tile, CU_SEQLENS, S, G, per_seq, TILE, VARLEN
    )
    to = tl.load(BOUNDS + tile) + _ones_before(bits, share, WORDS)
    for first in range(share, tl.minimum(share + SHARE, words), WORDS):
        at = first + tl.arange(0, WORDS)
        word = tl.load(bits + at, mask=at < words, other=0)
        ones = _ones(word)
        place = to + tl.cumsum(ones, 0) - ones
        to += tl.sum(ones, 0)
        while tl.max(ones, 0) > 0:
            lowest = word & -word
            token = first_token + at * 32 + _ones(lowest - 1)
            tl.store(ROWS + place, (token * G + group).to(tl.int32), mask=ones > 0)
            word = word ^ lowest
            place += 1
            ones -= 1


def rows_of_tiles(
    block_indices: Tensor, tiles_per_block: int, tile: int, kv_len: int,
    cu_seqlens: Tensor | None = None, chunk: int | None = None,
) -> TileRows:  # fmt: skip
    """Invert block_indices int32 [B, S, G, n_sel], or packed [T, G, n_sel] (-1 is none), by tiles
    of `tile` keys; no host synchronisation. kv_len: keys of each dense sequence. chunk: pairs,
    CHUNK by default.

    A map with a bit for each row and tile is made where it is small, and read tile by tile. It
    grows with the square of the length: long sequences are sorted.
    """
    chunk = chunk or CHUNK
    groups, n_sel = block_indices.shape[-2:]
    blocks = block_indices.reshape(-1, groups, n_sel).contiguous()
    tokens, device = blocks.shape[0], blocks.device
    packed = cu_seqlens is not None
    if packed:
        batch, per_seq, s_arg = 1, packed_tiles(tokens, tile, cu_seqlens), cu_seqlens.numel() - 1
    else:
        batch, per_seq = block_indices.shape[0], cdiv(kv_len, tile)
        s_arg = max(tokens // batch, 1)
    n_tiles, pairs = batch * groups * per_seq, blocks.numel() * tiles_per_block
    cu_arg = cu_seqlens if packed else blocks
    words = cdiv(tokens // batch, 32)
    mark = n_tiles * words * 4 <= MAP_BYTES
    kw = dict(dtype=torch.int32, device=device)
    out = torch.zeros(n_tiles, words, **kw) if mark else torch.empty(pairs, **kw)
    launch(
        _pair_tiles_kernel, (cdiv(pairs, LIST_SIZE),),
        blocks, token_sequences(cu_seqlens, tokens)[0] if packed else blocks, cu_arg, out, pairs,
        s_arg, groups, n_sel, per_seq, n_tiles, words, VARLEN=packed, TILE=tile,
        PER_BLOCK=tiles_per_block, MARK=mark, SIZE=LIST_SIZE,
    )  # fmt: skip
    if not mark:
        of_pair, order = torch.sort(out, stable=True)
        bounds = torch.searchsorted(of_pair, torch.arange(n_tiles + 1, **kw))
        rows = (order // (tiles_per_block * n_sel)).to(torch.int32)
        chunks = chunks_of(bounds.diff(), pairs, chunk)
        return TileRows(**vars(chunks), rows=rows, per_seq=per_seq, tile=tile)
    counts, rows = torch.empty(n_tiles, **kw), torch.empty(pairs, **kw)
    launch(_tile_counts_kernel, (n_tiles,), out, counts, words, WORDS=WORDS, num_warps=1)
    chunks = chunks_of(counts, pairs, chunk)
    launch(
        _tile_members_kernel, (n_tiles, cdiv(words, SHARE)),
        out, chunks.bounds, cu_arg, rows, words, s_arg, groups, per_seq, VARLEN=packed, TILE=tile,
        WORDS=WORDS, SHARE=SHARE, num_warps=1,
    )  # fmt: skip
    return TileRows(**vars(chunks), rows=rows, per_seq=per_seq, tile=tile)


@triton.jit
def _piece_ranks_kernel(
    ROWS, CHUNK_BEGIN, CHUNK_END, COUNTS, RANKS, pieces, tokens, G, per_group,
    PER_CHUNK: tl.constexpr, SHARE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Each piece of SHARE pairs of a chunk goes to a bucket by its group and its middle token.

    COUNTS: pieces of each bucket; RANKS: bucket << 32 | how many came to it before, -1 for empty
    pieces. per_group: buckets of a group.
    """
    piece = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    chunk = piece // PER_CHUNK
    begin = tl.load(CHUNK_BEGIN + chunk, mask=piece < pieces, other=0)
    end = tl.load(CHUNK_END + chunk, mask=piece < pieces, other=0)
    begin += piece % PER_CHUNK * SHARE
    end = tl.minimum(begin + SHARE, end)
    live = begin < end
    unit = tl.load(ROWS + (begin + end) // 2, mask=live, other=0)
    bucket = unit % G * per_group + ((unit // G).to(tl.int64) * per_group // tokens).to(tl.int32)
    rank = tl.atomic_add(COUNTS + bucket, 1, mask=live, sem="relaxed")
    packed = (bucket.to(tl.int64) << 32) | rank.to(tl.int64)
    tl.store(RANKS + piece, tl.where(live, packed, -1), mask=piece < pieces)


@triton.jit
def _piece_order_kernel(COUNTS, RANKS, PIECES, pieces, BUCKETS: tl.constexpr, SIZE: tl.constexpr):
    """PIECES [1 + pieces]: how many pieces there are that are not empty, and these by bucket."""
    counts = tl.load(COUNTS + tl.arange(0, BUCKETS))
    first = tl.cumsum(counts, 0) - counts
    tl.store(PIECES, tl.sum(counts, 0))
    piece = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    packed = tl.load(RANKS + piece, mask=piece < pieces, other=-1)
    bucket = tl.maximum(packed >> 32, 0).to(tl.int32)
    to = tl.gather(first, bucket, 0) + packed.to(tl.int32)
    tl.store(PIECES + 1 + to, piece, mask=packed >= 0)


def pieces_in_order(lists: TileRows, share: int, tokens: int, groups: int) -> tuple[Tensor, int]:
    """Pieces of `share` pairs of the chunks, as a pass takes them that adds to dQ: group by group,
    whose K and V stay in the L2, and about in the order of their queries.

    Returns int32 [1 + pieces], how many pieces there are and the number of each, with nothing after
    them, and the pieces of a chunk. Among pieces of a bucket the order changes from run to run.
    tokens: of all sequences.
    """
    device, per_chunk = lists.rows.device, lists.size // share
    pieces, buckets = lists.n_chunks * per_chunk, max(BUCKETS, pow2(groups))
    counts = torch.zeros(buckets, dtype=torch.int32, device=device)
    ranks = torch.empty(pieces, dtype=torch.int64, device=device)
    order = torch.empty(1 + pieces, dtype=torch.int32, device=device)
    grid = (cdiv(pieces, LIST_SIZE),)
    launch(
        _piece_ranks_kernel, grid,
        lists.rows, lists.chunk_begin, lists.chunk_end, counts, ranks, pieces, tokens, groups,
        buckets // groups, PER_CHUNK=per_chunk, SHARE=share, SIZE=LIST_SIZE,
    )  # fmt: skip
    launch(_piece_order_kernel, grid, counts, ranks, order, pieces, BUCKETS=buckets, SIZE=LIST_SIZE)
    return order, per_chunk
