"""How kernels find the rows of packed sequences: grids and lists by tokens, from cu_seqlens alone.

Sequence i of a pack owns the tiles of rows from CU[i] // TILE + i on. That leaves room for all of
it, and at most one tile unused, whatever the lengths: rows // TILE + n_seq tiles in all, of which a
program finds its sequence by bisection. No list is made, nobody waits for the device, and no length
needs to be known. The rows behind the last sequence, which belong to none, count as one more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.launch import launch
from nsa.kernels.tiles import cdiv, pow2

MOST_BATCH = 65535  # sequences times groups: the second extent of a grid


@triton.jit
def sequence_of(tile, CU, n_seq, TILE: tl.constexpr):
    """(sequence, tile of the sequence) of one of a pack's tiles; n_seq: the rows of no sequence."""
    batch = tile * 0
    end = batch + n_seq + 1
    while end - batch > 1:
        middle = (batch + end) // 2
        begun = tl.load(CU + middle) // TILE + middle <= tile
        batch = tl.where(begun, middle, batch)
        end = tl.where(begun, end, middle)
    return batch, tile - (tl.load(CU + batch) // TILE + batch)


@triton.jit
def tile_of_program(tile, CU, n_seq, G, TILE: tl.constexpr, VARLEN: tl.constexpr):
    """(sequence, group, tile of the sequence) of a program of Rows' grid, which is its tile-th."""
    if VARLEN:
        batch, tile = sequence_of(tile, CU, n_seq, TILE)
        group = tl.program_id(1)
    else:
        batch = tl.program_id(1) // G
        group = tl.program_id(1) % G
    return batch, group, tile


@triton.jit
def share_of_program(
    CU_Q, CU_K, SQ, SK, G, share, MODE: tl.constexpr, KEYS: tl.constexpr, BLOCK_Q: tl.constexpr,
    VARLEN: tl.constexpr,
):  # fmt: skip
    """(sequence, group, tile of KEYS keys, share of the queries, queries of a share) of a program
    of Rows.shares; a tile past the keys where there is nothing to do.

    Late shares come first. A sequence of a pack owns as many programs as it may have tiles and
    shares: in compressed attention (MODE 0), SK shares at most, which grow with its length.
    """
    if VARLEN:
        group = tl.program_id(1)
        program = tl.program_id(0)
        batch = program * 0
        end = batch + SQ + 1
        while end - batch > 1:
            middle = (batch + end) // 2
            own = tl.load(CU_K + middle) // KEYS * SK + tl.load(CU_Q + middle) // share + middle
            batch = tl.where(own <= program, middle, batch)
            end = tl.where(own <= program, end, middle)
        program -= tl.load(CU_K + batch) // KEYS * SK + tl.load(CU_Q + batch) // share + batch
        _, q_len = packed_bounds(CU_Q, batch, SQ, 0)
        _, k_len = packed_bounds(CU_K, batch, SQ, 0)
        tiles = (k_len + KEYS - 1) // KEYS
        shares = tl.minimum((q_len + share - 1) // share, SK)
        tile = program % tl.maximum(tiles, 1)
        split = shares - 1 - program // tl.maximum(tiles, 1)
        tile = tl.where(split < 0, tiles, tile)
        split = tl.maximum(split, 0)
        if MODE == 0:
            of_each = (q_len + tl.maximum(shares, 1) - 1) // tl.maximum(shares, 1)
            share = (of_each + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q
    else:
        batch = tl.program_id(1) // G
        group = tl.program_id(1) % G
        tile = tl.program_id(0)
        split = tl.num_programs(2) - 1 - tl.program_id(2)
    return batch, group, tile, split, share


@triton.jit
def packed_bounds(CU, batch, n_seq, rows):
    """First row and length of a sequence of a pack of `rows` rows."""
    begin = tl.load(CU + batch)
    end = tl.load(CU + batch + 1, mask=batch < n_seq, other=rows)
    return begin, tl.maximum(end - begin, 0)


@triton.jit
def sequence_bounds(CU_Q, CU_K, batch, SQ, SK, VARLEN: tl.constexpr):
    """First row and length of a sequence in Q and in K, see Rows.sq and Rows.sk. Queries that
    belong to no sequence have no keys."""
    if VARLEN:
        q_begin, q_len = packed_bounds(CU_Q, batch, SQ, SK)
        k_begin, k_len = packed_bounds(CU_K, batch, SQ, 0)
        q_begin = q_begin.to(tl.int64)
        k_begin = k_begin.to(tl.int64)
    else:
        q_begin = batch.to(tl.int64) * SQ
        q_len = SQ
        k_begin = batch.to(tl.int64) * SK
        k_len = SK
    return q_begin, q_len, k_begin, k_len


def packed_tiles(rows: int, tile: int, cu: Tensor) -> int:
    """Tiles of a pack of so many rows with cu int32 [n_seq + 1]."""
    return rows // tile + cu.numel()


@dataclass(frozen=True)
class Rows:
    """The sequences of q and k. Packed: cu holds both cu_seqlens, and kernels take (n_seq, rows of
    q) for sq and sk, queries and keys of a sequence; there is one batch of all sequences then."""

    cu: tuple[Tensor, Tensor] | None
    batch: int
    sq: int
    sk: int
    tokens: int
    keys: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None) -> Rows:
        """Of contiguous q [.., HQ, D] and k [.., G, D]. More dense sequences than a grid has room
        for are packed ones."""
        groups = k.shape[-2]
        tokens, keys = q.shape[:-2].numel(), k.shape[:-2].numel()
        if cu_q is None and q.shape[0] * groups > MOST_BATCH:
            first = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
            cu_q, cu_k = first * q.shape[1], first * k.shape[1]
        if cu_q is None:
            return cls(None, q.shape[0], q.shape[1], k.shape[1], tokens, keys)
        return cls((cu_q, cu_k), 1, cu_q.numel() - 1, tokens, tokens, keys)

    @property
    def longest(self) -> int:
        """Queries that a sequence may have."""
        return self.tokens if self.cu else self.sq

    def query_tiles(self, tile: int) -> int:
        return packed_tiles(self.tokens, tile, self.cu[0]) if self.cu else cdiv(self.sq, tile)

    def key_tiles(self, tile: int) -> int:
        return packed_tiles(self.keys, tile, self.cu[1]) if self.cu else cdiv(self.sk, tile)

    def shares(self, tile: int, groups: int, share: int, splits: int) -> tuple[int, int, int]:
        """Grid of share_of_program: tiles of keys, times at most `splits` shares of so many
        queries."""
        if self.cu is None:
            return self.key_tiles(tile), self.batch * groups, splits
        return packed_tiles(self.tokens, share, self.cu[0]) + self.keys // tile * splits, groups, 1

    def filled_tiles(self, tile: int) -> int:
        """Tiles of keys of all sequences, but for those that are hardly filled."""
        return cdiv(self.keys, tile) if self.cu else self.batch * cdiv(self.sk, tile)


@triton.jit
def _inside_pack_kernel(
    GATES, INSIDE, CU, CU_CMP, tokens, n_seq, longest, l, d, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """SIZE rows of gates, 0 behind the last sequence; the first program makes CU_CMP too."""
    row = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    column = tl.arange(0, WIDTH)
    at = row[:, None] * COLUMNS + column[None, :]
    live = (row < tokens)[:, None] & (column < COLUMNS)[None, :]
    inside = live & (row < tl.load(CU + n_seq))[:, None]
    tl.store(INSIDE + at, tl.load(GATES + at, mask=inside, other=0.0), mask=live)
    if tl.program_id(0) == 0:
        end = tl.program_id(0)
        tl.store(CU_CMP, end)
        for first in range(0, n_seq, STEP):
            sequence = first + tl.arange(0, STEP)
            there = sequence < n_seq
            length = tl.load(CU + sequence + 1, mask=there, other=0)
            length -= tl.load(CU + sequence, mask=there, other=0)
            message: tl.constexpr = "max_seqlen must be at least the longest sequence of cu_seqlens"
            tl.device_assert(length <= longest, message)
            keys = tl.where(length < l, 0, (length - l) // d + 1)
            tl.store(CU_CMP + sequence + 1, end + tl.cumsum(keys, 0), mask=there)
            end += tl.sum(keys, 0)


def inside_pack(
    gates: Tensor, cu_seqlens: Tensor, l: int, d: int, max_seqlen: int
) -> tuple[Tensor, Tensor]:
    """Gates [T, HQ, 3] with 0 for rows past the last sequence, and cu_seqlens_compressed(), in one
    launch, which stops a GPU if a sequence is longer than max_seqlen."""
    inside, cu_cmp = torch.empty_like(gates), torch.empty_like(cu_seqlens)
    tokens, columns = gates.shape[0], gates.shape[1] * gates.shape[2]
    width, n_seq = pow2(columns), cu_seqlens.numel() - 1
    size = max(1, 4096 // width)
    launch(
        _inside_pack_kernel, (max(1, cdiv(tokens, size)),), gates, inside, cu_seqlens, cu_cmp,
        tokens, n_seq, max_seqlen, l, d, COLUMNS=columns, WIDTH=width, SIZE=size, STEP=256,
        debug=True,  # for the assertion
    )  # fmt: skip
    return inside, cu_cmp


@triton.jit
def _token_sequences_kernel(CU, SEQUENCES, BEGINS, tokens, n_seq, steps, SIZE: tl.constexpr):
    token = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    live = token < tokens
    sequence = tl.zeros([SIZE], tl.int32)
    end = sequence + n_seq  # where the search ends: rows of no sequence
    for _ in range(steps):
        middle = (sequence + end) // 2
        searching = sequence < end
        past = searching & (tl.load(CU + middle + 1, mask=live & searching, other=0) <= token)
        sequence = tl.where(past, middle + 1, sequence)
        end = tl.where(past, end, tl.where(searching, middle, end))
    tl.store(SEQUENCES + token, sequence, mask=live)
    tl.store(BEGINS + token, tl.load(CU + sequence, mask=live, other=0), mask=live)


def token_sequences(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """int32 [tokens] each: the sequence of each packed row, n_seq past the last one, and its first
    row."""
    sequences = torch.empty(tokens, dtype=torch.int32, device=cu_seqlens.device)
    begins, n_seq = torch.empty_like(sequences), cu_seqlens.numel() - 1
    if tokens:
        launch(
            _token_sequences_kernel, (cdiv(tokens, 256),),
            cu_seqlens, sequences, begins, tokens, n_seq, n_seq.bit_length(), SIZE=256,
        )  # fmt: skip
    return sequences, begins
