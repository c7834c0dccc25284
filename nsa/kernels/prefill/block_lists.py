"""Which rows attend a tile of keys: the inverse of the block indices, for the dK/dV pass.

A pair is (entry of block_indices, key tile). Pairs are sorted by tile with a stable sort, so a
tile's rows keep their order and gradients are bitwise repeatable. Long lists are cut into chunks:
block 0 and the local blocks are attended by thousands of rows, a random block by dozens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 512


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


def chunks_of(bounds: Tensor, most: int) -> Chunks:
    """Chunks of lists: tile i has bounds[.., i] .. bounds[.., i + 1], `most` pairs at most in all.

    Leading dimensions are slabs, each with its own lists. No host synchronisation: n_chunks is a
    bound that shapes give, so most late chunks may be empty.
    """
    n_tiles, lead = bounds.shape[-1] - 1, bounds.shape[:-1]
    like = dict(device=bounds.device, dtype=torch.int64)
    chunks = (bounds[..., 1:] - bounds[..., :-1] + CHUNK - 1) // CHUNK
    tile_chunks = torch.zeros(*lead, n_tiles + 1, **like)
    torch.cumsum(chunks, -1, out=tile_chunks[..., 1:])
    n_chunks = most // CHUNK + min(n_tiles, most)
    n_chunks += -n_chunks % 4  # every slab's begin at 16 bytes
    chunk = torch.arange(n_chunks, **like).expand(*lead, n_chunks).contiguous()
    owner = torch.searchsorted(tile_chunks[..., 1:].contiguous(), chunk, right=True)
    owner.clamp_(max=n_tiles - 1)
    live = chunk < tile_chunks[..., -1:]
    begin = bounds.gather(-1, owner) + (chunk - tile_chunks.gather(-1, owner)) * CHUNK
    end = torch.minimum(begin + CHUNK, bounds.gather(-1, owner + 1))
    zero = torch.zeros_like(begin)
    return Chunks(
        owner.to(torch.int32), torch.where(live, begin, zero), torch.where(live, end, zero),
        tile_chunks, n_chunks, n_tiles,
    )  # fmt: skip


@dataclass(frozen=True)
class TileRows(Chunks):
    """order: the flat entry of block_indices of each pair, by tile."""

    order: Tensor


def rows_of_tiles(
    block_indices: Tensor, tiles_per_block: int, n_seq: int, per_seq: int,
    cu_seqlens: Tensor | None = None,
) -> TileRows:  # fmt: skip
    """Invert block_indices int32 [.., G, n_sel] (-1 is none); no host synchronisation.

    per_seq tiles per sequence and group; dense rows are n_seq equal sequences, packed rows follow
    cu_seqlens.
    """
    groups, n_sel = block_indices.shape[-2:]
    blocks = block_indices.reshape(-1, groups, n_sel)
    tokens, device = blocks.shape[0], blocks.device
    if cu_seqlens is None:
        sequence = torch.arange(tokens, device=device) // max(tokens // n_seq, 1)
    else:
        sequence = token_sequences(cu_seqlens, tokens)
    n_tiles = n_seq * groups * per_seq
    base = (sequence[:, None] * groups + torch.arange(groups, device=device)) * per_seq
    tile = blocks.long() * tiles_per_block
    if tiles_per_block > 1:
        tile = tile[..., None] + torch.arange(tiles_per_block, device=device)
        blocks = blocks[..., None]
        base = base[..., None]
    # Tiles past the end of a short sequence hold no key that a row of it sees.
    tile = torch.where((blocks >= 0) & (tile < per_seq), base[..., None] + tile, n_tiles)
    tile, order = torch.sort(tile.reshape(-1).to(torch.int32), stable=True)
    if tiles_per_block > 1:
        order = order // tiles_per_block

    bounds = torch.searchsorted(tile, torch.arange(n_tiles + 1, device=device, dtype=tile.dtype))
    chunks = chunks_of(bounds, tile.numel())
    return TileRows(**vars(chunks), order=order.to(torch.int32))
