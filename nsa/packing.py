"""Where the selected keys of each row lie, gathered row after row, and rows of like length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.select import range_lengths


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


def slot_keys(ranges: Tensor, slot: Tensor) -> Tensor:
    """The key in each slot int32 [R, L] of rows with clean ranges int32 [R, n, 2], n > 0: int32.
    Every slot is below its row's length."""
    start, end = ranges.unbind(-1)
    behind = (end - start).cumsum(-1, dtype=torch.int32)
    span = torch.searchsorted(behind, slot, right=True)
    return slot + (end - behind).gather(-1, span)


def length_buckets(lengths: Tensor) -> dict[int, Tensor]:
    """Rows by the power of two at or above their length: {bucket: int64 row numbers}; 0 holds the
    empty rows. Padding within a bucket is less than half. Synchronises the device."""
    size = torch.where(
        lengths > 0, 2 ** torch.ceil(torch.log2(lengths.clamp(min=1).double())).long(), 0
    )
    return {int(b): (size == b).nonzero().flatten() for b in size.unique().tolist()}
