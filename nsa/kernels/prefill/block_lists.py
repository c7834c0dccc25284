"""Which rows attend a tile of keys: the inverse of the block indices, for the dK/dV pass.

A pair is (entry of block_indices, key tile). Pairs are sorted by tile with a stable sort, so a
tile's rows keep their order and gradients are bitwise repeatable. Long lists are cut into chunks:
block 0 and the local blocks are attended by thousands of rows, a random block by dozens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa import launches
from nsa.kernels.tiles import cdiv

CHUNK = 512
LIST_SIZE = 1024  # pairs, tiles or chunks that a program of the lists takes at once


@triton.jit
def keys_of_tile(
    tile, CU_SEQLENS, S_KV, G, per_seq, BLOCK_N: tl.constexpr, VARLEN: tl.constexpr
):  # fmt: skip
    """What a key tile is: its group, the positions of its keys, how many keys their sequence has,
    that sequence's first packed row (0 for dense inputs) and its first row of K."""
    # Numbered (sequence, group, tile): one group's rows follow each other through L2.
    group = tile // per_seq % G
    sequence = tile // per_seq // G
    offs_n = tile % per_seq * BLOCK_N + tl.arange(0, BLOCK_N)
    if VARLEN:
        first_row = tl.load(CU_SEQLENS + sequence)
        n_keys = tl.load(CU_SEQLENS + sequence + 1) - first_row
        first_key = first_row.to(tl.int64)
    else:
        first_row = 0
        n_keys = S_KV
        first_key = sequence.to(tl.int64) * S_KV
    return group, offs_n, n_keys, first_row, first_key


@dataclass(frozen=True)
class Chunks:
    """Chunk c covers the pairs chunk_begin[c] .. chunk_end[c] of tile chunk_tile[c]; both are 0
    past the last chunk.
    tile_chunks [n_tiles + 1]: the chunks of a tile. Tiles count over (sequence, group, tile).
    """

    chunk_tile: Tensor
    chunk_begin: Tensor
    chunk_end: Tensor
    tile_chunks: Tensor
    n_chunks: int
    n_tiles: int


def token_sequences(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """int64 [tokens]: the sequence of each packed row; n_seq past the last one."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)


@triton.jit
def _chunk_ends_kernel(BOUNDS, TILE_CHUNKS, n_tiles, CHUNK: tl.constexpr, SIZE: tl.constexpr):
    """TILE_CHUNKS [.., n_tiles + 1]: running sums of the chunks of each tile, for one slab."""
    slab = tl.program_id(0).to(tl.int64) * (n_tiles + 1)
    tl.store(TILE_CHUNKS + slab, 0)
    before = tl.zeros((), dtype=tl.int64)
    for first in range(0, n_tiles, SIZE):
        tile = first + tl.arange(0, SIZE)
        live = tile < n_tiles
        begin = tl.load(BOUNDS + slab + tile, mask=live, other=0).to(tl.int64)
        end = tl.load(BOUNDS + slab + tile + 1, mask=live, other=0).to(tl.int64)
        chunks = (end - begin + CHUNK - 1) // CHUNK
        tl.store(TILE_CHUNKS + slab + tile + 1, before + tl.cumsum(chunks, 0), mask=live)
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
    end = tl.load(bounds + tile + 1, mask=live, other=0).to(tl.int64)
    there = chunk < n_chunks
    to = slab * n_chunks + chunk
    tl.store(CHUNK_TILE + to, tile, mask=there)
    tl.store(CHUNK_BEGIN + to, tl.where(live, begin, 0), mask=there)
    tl.store(CHUNK_END + to, tl.where(live, tl.minimum(begin + CHUNK, end), 0), mask=there)


def chunks_of(bounds: Tensor, most: int, size: int) -> Chunks:
    """Chunks of `size` pairs: tile i has bounds[.., i] .. bounds[.., i + 1], `most` at most in all.

    Leading dimensions are slabs, each with its own lists. No host synchronisation: n_chunks is a
    bound that shapes give, so most late chunks may be empty.
    """
    n_tiles, lead = bounds.shape[-1] - 1, bounds.shape[:-1]
    slabs = math.prod(lead)
    n_chunks = most // size + min(n_tiles, most)
    n_chunks += -n_chunks % 4  # every slab's begin at 16 bytes
    make = lambda n, dtype: torch.empty(*lead, n, dtype=dtype, device=bounds.device)
    tile_chunks, chunk_tile = make(n_tiles + 1, torch.int64), make(n_chunks, torch.int32)
    begin, end = make(n_chunks, torch.int64), make(n_chunks, torch.int64)
    _chunk_ends_kernel[(slabs,)](bounds, tile_chunks, n_tiles, CHUNK=size, SIZE=LIST_SIZE)
    launches.bump("_chunk_ends_kernel")
    _chunk_fill_kernel[(cdiv(n_chunks, LIST_SIZE), slabs)](
        bounds, tile_chunks, chunk_tile, begin, end, n_tiles, n_chunks,
        max(n_tiles - 1, 0).bit_length(), CHUNK=size, SIZE=LIST_SIZE,
    )  # fmt: skip
    launches.bump("_chunk_fill_kernel")
    return Chunks(chunk_tile, begin, end, tile_chunks, n_chunks, n_tiles)


@dataclass(frozen=True)
class TileRows(Chunks):
    """order: the flat entry of block_indices of each pair, by tile."""

    order: Tensor


@triton.jit
def _pair_tiles_kernel(
    BLOCK_INDICES, SEQUENCE, TILES, entries, S, G, n_sel, per_seq, n_tiles,
    VARLEN: tl.constexpr, PER_BLOCK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """TILES [entries, PER_BLOCK]: the key tiles of each entry's block, n_tiles where there is none.
    Tiles past the end of a short sequence hold no key that a row of it sees."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    entry = at // PER_BLOCK
    live = entry < entries
    row = entry // n_sel
    token = row // G
    if VARLEN:
        sequence = tl.load(SEQUENCE + token, mask=live, other=0)
    else:
        sequence = token // S
    block = tl.load(BLOCK_INDICES + entry, mask=live, other=-1)
    known = (block >= 0) & (block < tl.cdiv(per_seq, PER_BLOCK))
    tile = tl.where(known, block, 0) * PER_BLOCK + (at % PER_BLOCK).to(tl.int32)
    tile = tl.where(known & (tile < per_seq), (sequence * G + row % G) * per_seq + tile, n_tiles)
    tl.store(TILES + at, tile, mask=live)


def rows_of_tiles(
    block_indices: Tensor, tiles_per_block: int, n_seq: int, per_seq: int,
    cu_seqlens: Tensor | None = None,
) -> TileRows:  # fmt: skip
    """Invert block_indices int32 [.., G, n_sel] (-1 is none); no host synchronisation.

    per_seq tiles per sequence and group; dense rows are n_seq equal sequences, packed rows follow
    cu_seqlens.
    """
    groups, n_sel = block_indices.shape[-2:]
    blocks = block_indices.reshape(-1, groups, n_sel).contiguous()
    tokens, device = blocks.shape[0], blocks.device
    n_tiles, entries = n_seq * groups * per_seq, blocks.numel()
    sequence = blocks if cu_seqlens is None else token_sequences(cu_seqlens, tokens)
    tile = torch.empty(entries * tiles_per_block, dtype=torch.int32, device=device)
    _pair_tiles_kernel[(cdiv(tile.numel(), LIST_SIZE),)](
        blocks, sequence, tile, entries, max(tokens // n_seq, 1), groups, n_sel, per_seq, n_tiles,
        VARLEN=cu_seqlens is not None, PER_BLOCK=tiles_per_block, SIZE=LIST_SIZE,
    )  # fmt: skip
    launches.bump("_pair_tiles_kernel")
    tile, order = torch.sort(tile, stable=True)
    if tiles_per_block > 1:
        order = order // tiles_per_block

    bounds = torch.searchsorted(tile, torch.arange(n_tiles + 1, device=device, dtype=tile.dtype))
    chunks = chunks_of(bounds, tile.numel(), CHUNK)
    return TileRows(**vars(chunks), order=order.to(torch.int32))
