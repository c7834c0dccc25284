"""From compressed scores to blocks to ranges: Eq. 9 (pool), Eq. 10 (heads), Eq. 11 and 12 (top-n).

The choice of blocks is not differentiable; everything here runs without gradients.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.blocks import chunks, is_symbol, num_sel_blocks, visible_compressed
from nsa.checks import scale_of

_CHUNK_SCORES = 1 << 23


def group_block_scores(
    q: Tensor, k_cmp: Tensor, *, l: int, d: int, l_sel: int, n_blocks: int,
    softmax_scale: float | None = None, q_start: int = 0,
) -> Tensor:  # fmt: skip
    """Block scores summed over the heads of a group, [B, S, G, n_blocks] (Eq. 9 and 10).

    The softmax over compressed keys is masked to those visible at t = q_start + s: an unmasked one
    would let the future choose the blocks.
    """
    B, S, HQ, Dk = q.shape
    G, N = k_cmp.shape[2], k_cmp.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    if not is_symbol(N) and N == 0:
        return torch.zeros(B, S, G, n_blocks, dtype=wide, device=q.device)
    scale = scale_of(softmax_scale, Dk)
    scores = torch.einsum(
        "bsghd,bngd->bsghn", q.unflatten(2, (G, HQ // G)).to(wide), k_cmp.to(wide)
    )
    t = torch.arange(q_start, q_start + S, device=q.device)
    seen = torch.arange(N, device=q.device) < visible_compressed(t, l, d)[:, None]
    seen = seen[None, :, None, None, :]
    scores = (scores * scale).masked_fill(~seen, torch.finfo(wide).min)
    p = (torch.softmax(scores, dim=-1) * seen).sum(3)  # over the group's heads
    return _pooled(p, l, d, l_sel, n_blocks)


def _pooled(p: Tensor, l: int, d: int, l_sel: int, n_blocks: int) -> Tensor:
    """[.., n_blocks]: p [.., N] of compressed keys, each by the share of its l tokens that lie in a
    block. Every block adds in the same order, so that equal ones come out equal, whatever the
    length: a matrix product rounds each column in its own way, and ties would not be ties."""
    ratio, before = l_sel // d, l // d - 1  # compressed keys that begin in a block, and before it
    p = F.pad(p, (before, n_blocks * ratio - p.shape[-1])).unfold(-1, before + ratio, ratio)
    total = torch.zeros_like(p[..., 0])
    for i in range(-before, ratio):
        tokens = min(i * d + l, l_sel) - max(i * d, 0)
        total = total + p[..., before + i] * (tokens / l)
    return total


def top_blocks(
    scores: Tensor,
    *,
    l_sel: int,
    n_sel: int,
    n_init: int = 1,
    n_local: int = 2,
    q_start: int | Tensor = 0,
) -> Tensor:
    """The n_sel best blocks per row: scores [B, S, G, n_blocks] -> int32 [B, S, G, n_sel].

    Candidates start at or before t = q_start + s; a tensor q_start is [B, 1]. Forced blocks come
    first: the one that holds t, the n_local - 1 before it, the n_init first. Ties go to the lower
    index. Ascending, padded with -1 at the end.
    """
    B, S, G, n_blocks = scores.shape
    t = torch.arange(S, device=scores.device) + q_start
    own = (t // l_sel)[..., None, None]  # [.., S, 1, 1]
    block = torch.arange(n_blocks, device=scores.device)
    # Rank first by tier, then by score: two stable sorts, so equal scores keep index order.
    tier = torch.where((block < n_init) | (own - block < n_local), 2, 1)
    tier = tier.masked_fill(block > own, 0)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    tiers = tier.expand(B, S, G, n_blocks).gather(-1, order)
    by_tier = tiers.sort(dim=-1, descending=True, stable=True).indices
    none = torch.iinfo(torch.int32).max  # a number, which n_blocks may not be in a trace
    best = F.pad(order.gather(-1, by_tier), (0, n_sel), value=none)[..., :n_sel]
    best = torch.where(best > own, none, best)  # never a future block
    best = best.sort(dim=-1).values
    return torch.where(best == none, -1, best).to(torch.int32)


@torch.no_grad()
def select_blocks(
    q: Tensor, k_cmp: Tensor, *, l: int, d: int, l_sel: int, n_sel: int, n_init: int = 1,
    n_local: int = 2, softmax_scale: float | None = None, q_start: int = 0,
) -> Tensor:  # fmt: skip
    """block_indices int32 [B, S, G, n_sel] of queries q_start .. q_start + S - 1, in chunks.

    q [B, S, HQ, Dk], k_cmp [B, Nc, G, Dk].
    """
    B, S, HQ, _ = q.shape
    n_blocks = num_sel_blocks(q_start + S, l_sel)
    if is_symbol(S):
        n_blocks = n_blocks + 4  # over all compressed keys, whatever S is; nobody's candidates
    choice = dict(l_sel=l_sel, n_sel=n_sel, n_init=n_init, n_local=n_local)
    rows = [q.new_zeros(B, 0, k_cmp.shape[2], n_sel, dtype=torch.int32)]
    for first, last in chunks(S, B * HQ * k_cmp.shape[1], _CHUNK_SCORES):
        scores = group_block_scores(
            q[:, first:last], k_cmp, l=l, d=d, l_sel=l_sel, n_blocks=n_blocks,
            softmax_scale=softmax_scale, q_start=q_start + first,
        )  # fmt: skip
        rows.append(top_blocks(scores, **choice, q_start=q_start + first))
    return torch.cat(rows, 1)


def clean_ranges(ranges: Tensor, limit: Tensor | int) -> Tensor:
    """Cut ranges [.., n, 2] to [0, limit), drop empty and inverted ones, merge what touches.

    limit: an int, or integers that broadcast to ranges.shape[:-2]. Result int32, same shape,
    ascending and disjoint, (0, 0) at the end. No device synchronisation.
    """
    n = ranges.shape[-2]
    if n == 0:
        return ranges.to(torch.int32)
    limit = torch.as_tensor(limit, device=ranges.device, dtype=ranges.dtype)[..., None]
    start, end = (torch.minimum(x, limit).clamp(min=0).to(torch.int32) for x in ranges.unbind(-1))
    empty = end <= start
    far = torch.iinfo(torch.int32).max
    start = start.masked_fill(empty, far)
    start, order = start.sort(dim=-1, stable=True)
    end = end.masked_fill(empty, 0).gather(-1, order)
    empty = start == far
    reach = end.cummax(dim=-1).values  # the furthest end so far
    before = torch.nn.functional.pad(reach[..., :-1], (1, 0), value=-1)
    fresh = (start > before) & ~empty
    slot = fresh.cumsum(-1) - 1
    slot = torch.where(empty, n, slot)  # empty ones go to a column that is cut off
    shape = (*start.shape[:-1], n + 1)
    first = start.new_zeros(shape).scatter_reduce(-1, slot, start, "amin", include_self=False)
    last = end.new_zeros(shape).scatter_reduce(-1, slot, end, "amax", include_self=False)
    return torch.stack([first[..., :n], last[..., :n]], dim=-1)


def blocks_to_ranges(block_indices: Tensor, l_sel: int, positions: Tensor) -> Tensor:
    """Ranges int32 [.., G, n, 2] of block_indices [.., G, n] (-1: none), cut after each query.

    positions: t of every query, broadcastable to block_indices.shape[:-2] ([S], or [B, S]).
    Neighbouring blocks are merged, duplicates count once.
    """
    limit = (positions + 1).to(torch.int32)[..., None].expand(block_indices.shape[:-1])
    none = limit[..., None] // l_sel + 1  # behind the query, where no product overflows
    start = torch.where(block_indices >= 0, torch.minimum(block_indices, none), none) * l_sel
    return clean_ranges(torch.stack([start, start + l_sel], dim=-1), limit)


def range_lengths(ranges: Tensor) -> Tensor:
    """Selected tokens per row: disjoint ranges [.., n, 2] -> int64 [..]."""
    return (ranges[..., 1].long() - ranges[..., 0].long()).sum(-1)
