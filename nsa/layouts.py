"""Block indices between this package and others: the same choice of blocks, laid out differently.

Ours is int32 [B, S, G, n] (packed [T, G, n]): per query and KV group the chosen blocks ascending,
-1 at the end, none twice, none after the query; block j starts at token j * block_size of its own
sequence. Names of dimensions: B sequences of S tokens, T = packed tokens, G KV groups, n slots.

    ours    BSGn, packed TGn      -1 at the end
    fla     BSGn                  any order, and how many slots count: an int or [B, S, G]
    topk    GTn                   -1 at the end (native_sparse_attention); without a mark, the first
                                  min(n, own block + 1) slots count (flash_nsa)
    ranges  BSGn2, packed TGn2    [start, end) in tokens, cut after the query, merged, (0, 0) none
    mask    BGSN                  bool over all N blocks, as block-sparse kernels take it

    >>> blocks = clean(torch.tensor([2, 0, 2, 9]).expand(1, 48, 1, 4), block_size=16)
    >>> blocks[0, 47, 0].tolist(), blocks[0, 15, 0].tolist()  # block 2 starts after query 15
    ([0, 2, -1, -1], [0, -1, -1, -1])
    >>> indices, counts = to_fla(blocks)
    >>> torch.equal(from_fla(indices, counts, block_size=16), blocks)
    True
    >>> cu_seqlens = torch.tensor([0, 48])
    >>> packed = permute(blocks, "BSGn", "TGn")
    >>> torch.equal(from_topk(to_topk(packed), 16, cu_seqlens), packed)
    True
    >>> to_ranges(blocks, 16)[0, 40, 0].tolist()
    [[0, 16], [32, 41], [0, 0], [0, 0]]
    >>> torch.equal(from_ranges(to_ranges(blocks, 16), 16, n=4), blocks)
    True
    >>> to_mask(blocks, n_blocks=3)[0, 0, 40].tolist()
    [True, False, True]
    >>> torch.equal(from_mask(to_mask(blocks, n_blocks=3), n=4), blocks)
    True
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.arguments import check_counts, check_dtype, check_tensor
from nsa.config import check_int
from nsa.select import blocks_to_ranges

_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_DIMS = {"BSGn": 4, "BGSn": 4, "TGn": 3, "GTn": 3}


def _check_integers(name: str, x: Tensor) -> None:
    check_dtype(name, x, "a tensor of integers", *_INTEGERS)


def permute(block_indices: Tensor, source: str, target: str, batch: int | None = None) -> Tensor:
    """Reorder the dimensions: source and target are "BSGn", "BGSn", "TGn" or "GTn". A view or copy.

    From a packed layout to a dense one, `batch` sequences of equal length are packed. Entries stay
    as they are. Raises ValueError for another name or shape.
    """
    for name, value in (("source", source), ("target", target)):
        if value not in _DIMS:
            raise ValueError(f"{name} must be one of {', '.join(_DIMS)}, got {value!r}")
    check_tensor("block_indices", block_indices)
    x = block_indices
    if x.ndim != _DIMS[source]:
        raise ValueError(f"block_indices must be {source}, got shape {list(x.shape)}")
    if source == "GTn":
        x = x.transpose(0, 1)
    elif source == "BGSn":
        x = x.transpose(1, 2)
    packed, wants_packed = source in ("TGn", "GTn"), target in ("TGn", "GTn")
    if packed and not wants_packed:
        if not batch or x.shape[0] % batch:
            raise ValueError(f"batch must divide T={x.shape[0]}, got {batch}")
        x = x.unflatten(0, (batch, -1))
    elif wants_packed and not packed:
        x = x.flatten(0, 1)
    if target == "GTn":
        return x.transpose(0, 1)
    return x.transpose(1, 2) if target == "BGSn" else x


def token_positions(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Position of every query in its sequence: int64 [S] for dense x [B, S, ..], [T] for packed
    [T, ..], where rows past the last sequence count from its end on. On x's device."""
    if cu_seqlens is None:
        return torch.arange(x.shape[1], device=x.device)
    token = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    begin = cu_seqlens[torch.searchsorted(cu_seqlens[1:], token, right=True)]
    return (token - begin).to(x.device, torch.long)


def outside(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """bool [tokens]: packed rows past the last sequence, which belong to none."""
    return torch.arange(tokens, device=cu_seqlens.device) >= cu_seqlens[-1]


def gates_inside(gates: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Gates [T, HQ, 3] of a pack, with 0 for rows past the last sequence, whatever they held."""
    return gates.masked_fill(outside(cu_seqlens, gates.shape[0])[:, None, None], 0)


def _own_block(x: Tensor, block_size: int, cu_seqlens: Tensor | None) -> Tensor:
    """[S or T, 1, 1]: the block that holds each query of x in our layout."""
    check_int("block_size", block_size, 1)
    _check_integers("block_indices", x)
    if x.ndim != (4 if cu_seqlens is None else 3):
        want = "[B, S, G, n], or packed with cu_seqlens"
        raise ValueError(f"block_indices must be {want}, got shape {list(x.shape)}")
    if cu_seqlens is not None:
        check_dtype("cu_seqlens", cu_seqlens, "an int32 or int64 tensor", torch.int32, torch.int64)
        if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
            raise ValueError(f"cu_seqlens must be [nseq + 1], got shape {list(cu_seqlens.shape)}")
        ends = cu_seqlens.tolist()
        if ends[0] != 0 or ends[-1] != x.shape[0] or ends != sorted(ends):
            raise ValueError(f"cu_seqlens must rise from 0 to T={x.shape[0]}, got {ends}")
    t = token_positions(x, cu_seqlens)
    return (t // block_size)[:, None, None]


def clean(block_indices: Tensor, block_size: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Our form of any block indices [B, S, G, n] or [T, G, n]: int32, ascending, -1 at the end.

    Repetitions, negative entries and blocks that start after the query are dropped.
    """
    own = _own_block(block_indices, block_size, cu_seqlens)
    far = torch.iinfo(torch.int32).max
    x = block_indices.long()
    x = x.masked_fill((x < 0) | (x > own), far).sort(-1).values
    again = torch.zeros_like(x, dtype=torch.bool)
    again[..., 1:] = x[..., 1:] == x[..., :-1]
    x = x.masked_fill(again, far).sort(-1).values
    return x.masked_fill(x == far, -1).to(torch.int32)


def first_slots(block_indices: Tensor, block_counts: Tensor | int) -> Tensor:
    """block_indices [.., n] with -1 behind the first block_counts (int or [..]) slots of a row."""
    slot = torch.arange(block_indices.shape[-1], device=block_indices.device)
    counts = block_counts[..., None] if isinstance(block_counts, Tensor) else block_counts
    return block_indices.masked_fill(slot >= counts, -1)


def from_fla(
    block_indices: Tensor, block_counts: Tensor | int, block_size: int,
    cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """fla.ops.nsa's block_indices [B, T, H, S] and block_counts (int or [B, T, H]) in our form.

    With cu_seqlens they are [1, T, H, S]; ours is then packed [T, G, n].
    """
    _check_integers("block_indices", block_indices)
    check_counts(block_counts, block_indices)
    x = first_slots(block_indices, block_counts)
    if cu_seqlens is not None:
        if x.ndim != 4 or x.shape[0] != 1:
            raise ValueError(f"block_indices must be [1, T, H, S], got shape {list(x.shape)}")
        x = x[0]
    return clean(x, block_size, cu_seqlens)


def to_fla(block_indices: Tensor) -> tuple[Tensor, Tensor]:
    """(block_indices int64 [B, T, H, S], block_counts int64 [B, T, H]); packed input gives B = 1.

    Slots that do not count hold -1.
    """
    _check_integers("block_indices", block_indices)
    x = block_indices if block_indices.ndim == 4 else block_indices[None]
    return x.long(), (x >= 0).sum(-1)


def from_topk(
    topk_idx: Tensor, block_size: int, cu_seqlens: Tensor, *, marked: bool = True
) -> Tensor:
    """topk_idx [G, T, n] of packed sequences in our packed form [T, G, n].

    marked: unused slots hold -1; otherwise the first min(n, own block + 1) slots of a query count
    and the rest may hold anything.
    """
    _check_integers("topk_idx", topk_idx)
    x = permute(topk_idx, "GTn", "TGn")
    if not marked:
        slot = torch.arange(x.shape[-1], device=x.device)
        x = x.masked_fill(slot > _own_block(x, block_size, cu_seqlens), -1)
    return clean(x, block_size, cu_seqlens)


def to_topk(block_indices: Tensor) -> Tensor:
    """Our packed [T, G, n] as topk_idx int32 [G, T, n], contiguous, -1 at the end.

    It also serves readers of the first min(n, own block + 1) slots if every query has chosen that
    many blocks, as select_blocks does.
    """
    return permute(block_indices, "TGn", "GTn").contiguous()


def to_ranges(block_indices: Tensor, block_size: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Token ranges int32 [.., G, n, 2], [start, end), cut after each query and merged."""
    _own_block(block_indices, block_size, cu_seqlens)
    t = token_positions(block_indices, cu_seqlens)
    return blocks_to_ranges(block_indices, block_size, t)


def from_ranges(
    ranges: Tensor, block_size: int, n: int, cu_seqlens: Tensor | None = None
) -> Tensor:
    """At most n blocks per query and group from ranges that are made of whole blocks.

    A range starts where a block does and ends where one does, or after the query. Raises ValueError
    for other ranges and for more than n blocks. Looks at the values, so it waits for a GPU.
    """
    _check_integers("ranges", ranges)
    if ranges.ndim < 2 or ranges.shape[-1] != 2:
        raise ValueError(f"ranges must be [.., n, 2] of [start, end), got {list(ranges.shape)}")
    own = _own_block(ranges[..., 0], block_size, cu_seqlens)
    t = token_positions(ranges, cu_seqlens)[:, None, None]
    start, end = ranges.long().unbind(-1)
    empty = end <= start
    fits = (start % block_size == 0) & ((end % block_size == 0) | (end == t + 1)) & (end <= t + 1)
    if bool((~fits & ~empty).any()):
        at = (~fits & ~empty).nonzero()[0].tolist()
        raise ValueError(
            f"ranges must be whole blocks of {block_size} tokens up to the query, got "
            f"{ranges[tuple(at)].tolist()} at {at}"
        )
    n_blocks = int(own.max()) + 1 if own.numel() else 0
    first = torch.arange(n_blocks, device=ranges.device) * block_size
    inside = (first >= start[..., None]) & (first < end[..., None])
    return _compact(inside.any(-2), n)


def to_mask(block_indices: Tensor, n_blocks: int) -> Tensor:
    """bool [B, G, S, n_blocks]: block j is chosen. block_indices [B, S, G, n].

    Raises ValueError for a block at or beyond n_blocks; looks at the values, so it waits for a GPU.
    """
    _check_integers("block_indices", block_indices)
    if block_indices.ndim != 4:
        raise ValueError(f"block_indices must be [B, S, G, n], got {list(block_indices.shape)}")
    check_int("n_blocks", n_blocks, 0)
    x = block_indices.long()
    if x.numel() and int(x.max()) >= n_blocks:
        raise ValueError(f"n_blocks must be over every block, of which {int(x.max())} is one, "
                         f"got {n_blocks}")  # fmt: skip
    mask = torch.zeros(*x.shape[:-1], n_blocks + 1, dtype=torch.bool, device=x.device)
    mask.scatter_(-1, torch.where(x < 0, n_blocks, x), True)  # none goes to a column cut off
    return mask[..., :n_blocks].transpose(1, 2)


def from_mask(mask: Tensor, n: int) -> Tensor:
    """At most n blocks per query from a bool mask [B, G, S, N]; ValueError if one has more."""
    if mask.ndim != 4 or mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool [B, G, S, N], got {mask.dtype} {list(mask.shape)}")
    return _compact(mask.transpose(1, 2), n)


def _compact(chosen: Tensor, n: int) -> Tensor:
    """bool [.., N] -> int32 [.., n]: the places that are True, ascending, -1 at the end."""
    most = int(chosen.sum(-1).max()) if chosen.numel() else 0
    if most > n:
        raise ValueError(f"n must be at least {most}, the most blocks that a query has, got {n}")
    N = chosen.shape[-1]
    place = torch.where(chosen, torch.arange(N, device=chosen.device), N).sort(-1).values
    place = torch.nn.functional.pad(place, (0, max(0, n - N)), value=N)[..., :n]
    return place.masked_fill(place == N, -1).to(torch.int32)


def seen_rows(x: Tensor, rows: int, cu_seqlens: Tensor | None) -> Tensor:
    """Keys or values [B, N, ..] without those behind the first `rows`, which no query sees: what is
    there, in a buffer for more, has no effect. Packed ones as they are."""
    return x if cu_seqlens is not None or x.shape[1] <= rows else x[:, :rows]
