"""Selected keys and values gathered row after row, packed with cu_seqlens as flash-attn does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.select import range_lengths


@dataclass(frozen=True)
class Packed:
    """Rows (b, s, g) in that order, each with the keys of its ranges, ascending.

    k [T, Dk], v [T, Dv], cu_seqlens int32 [B*S*G + 1], lengths int64 [B*S*G].
    """

    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    lengths: Tensor


def packed_positions(ranges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which key each packed slot holds, for clean ranges [R, n, 2].

    Returns key int64 [T] (ascending within a row), row int64 [T], lengths int64 [R]. Synchronises
    the device once, to learn T.
    """
    R, n, _ = ranges.shape
    starts, ends = ranges[..., 0].reshape(-1).long(), ranges[..., 1].reshape(-1).long()
    span = (ends - starts).clamp(min=0)
    owner = torch.arange(R * n, device=ranges.device).repeat_interleave(span)
    before = F.pad(span.cumsum(0), (1, 0))[:-1]
    slot = torch.arange(len(owner), device=ranges.device)
    key = starts[owner] + slot - before[owner]
    return key, owner // max(n, 1), range_lengths(ranges)


def pack_ranges(k: Tensor, v: Tensor, ranges: Tensor) -> Packed:
    """Gather the keys and values of every row's ranges; differentiable in k and v.

    k [B, Skv, G, Dk], v [B, Skv, G, Dv], ranges [B, S, G, n, 2]: disjoint, within [0, Skv), as
    select.clean_ranges leaves them.
    """
    B, S, G, n, _ = ranges.shape
    key, row, lengths = packed_positions(ranges.reshape(B * S * G, n, 2))
    b, g = row // (S * G), row % G
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return Packed(k[b, key, g], v[b, key, g], cu_seqlens, lengths)


def length_buckets(lengths: Tensor) -> dict[int, Tensor]:
    """Rows by the power of two at or above their length: {bucket: int64 row numbers}; 0 holds the
    empty rows. Padding within a bucket is less than half. Synchronises the device."""
    size = torch.where(
        lengths > 0, 2 ** torch.ceil(torch.log2(lengths.clamp(min=1).double())).long(), 0
    )
    return {int(b): (size == b).nonzero().flatten() for b in size.unique().tolist()}
