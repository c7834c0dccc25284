"""Ranges as users give them -> clean spans as the kernels read them, and the lists of the backward.

Clean spans of a row: ascending, disjoint, inside [0, Skv), together exactly the union of its
ranges. starts int32 [R, n] and cum int32 [R, n + 1]: span i holds the keys starts[i] .. of key
slots cum[i] .. cum[i + 1]; unused ones are empty and last. Rows are (b, s, g) in that order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.launch import launch, on_its_device
from nsa.kernels.tiles import cdiv, pow2
from nsa.kernels.triton_sel_kernel.rows import clean_row
from nsa.kernels.triton_sel_kernel.tiles import KEY_TILE, MAX_SPANS_PER_PASS
from nsa.select import clean_ranges


@triton.jit
def _sel_spans_kernel(RANGES, STARTS, CUM, n, limit, NR: tl.constexpr):
    """One row's ranges as its clean spans."""
    row = tl.program_id(0).to(tl.int64)
    begin, length, slot, rank = clean_row(RANGES + row * n * 2, n, 0, limit, NR)
    live = tl.arange(0, NR) < n
    tl.store(STARTS + row * n + rank, begin, mask=live)
    tl.store(CUM + row * (n + 1) + rank, slot, mask=live)
    tl.store(CUM + row * (n + 1) + n, tl.sum(length, 0))


@on_its_device
def clean_spans(ranges: Tensor, n_keys: int) -> tuple[Tensor, Tensor]:
    """(starts [R, n], cum [R, n + 1]) of ranges [B, S, G, n, 2], int32 or int64, any overlap.

    No device synchronisation.
    """
    n = ranges.shape[3]
    ranges = ranges.contiguous()
    rows = ranges.shape[0] * ranges.shape[1] * ranges.shape[2]
    if n > MAX_SPANS_PER_PASS or rows == 0 or n == 0:
        flat = clean_ranges(ranges.view(rows, n, 2), n_keys)
        starts = flat[..., 0].contiguous()
        lengths = (flat[..., 1] - flat[..., 0]).long()
        cum = torch.nn.functional.pad(lengths.cumsum(-1), (1, 0)).to(torch.int32)
        return starts, cum
    starts = torch.empty(rows, n, dtype=torch.int32, device=ranges.device)
    cum = torch.empty(rows, n + 1, dtype=torch.int32, device=ranges.device)
    launch(_sel_spans_kernel, (rows,), ranges, starts, cum, n, n_keys, NR=pow2(n), num_warps=1)
    return starts, cum


class KeyLists(NamedTuple):
    """Which rows attend each tile of KEY_TILE keys, and how that work is cut into items: what the
    kernels take, then how many items and slots there are.

    Tile j = (b * G + g) * tiles_per_group + key // KEY_TILE. rows[tile_begin[j]:tile_begin[j + 1]]
    are its rows in ascending order, masks their 64-bit key masks. An item is at most `chunk` of
    them: items item_begin[j] .. item_begin[j + 1] belong to tile j, item_tile is the inverse
    (n_tiles: no work). Tiles of several items have partial sums at slot_begin[j] + item number.
    """

    rows: Tensor
    masks: Tensor
    tile_begin: Tensor
    item_begin: Tensor
    item_tile: Tensor
    slot_begin: Tensor
    n_tiles: int
    tiles_per_group: int
    chunk: int
    n_items: int
    n_slots: int


@triton.jit
def _sel_key_masks_kernel(
    ENTRIES, KEYS, STARTS, CUM, MASKS, n_entries, n, n_tiles, tiles_per_group,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bit k of an entry's mask: does its row attend key k of its tile?"""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(KEYS + entry, mask=entry < n_entries, other=n_tiles)
    live = tile < n_tiles
    row = tl.load(ENTRIES + entry, mask=live, other=0).to(tl.int64)
    first = (tile % tiles_per_group).to(tl.int32) * TILE
    mask = tl.zeros([BLOCK], tl.int64)
    one = mask + 1
    begin = tl.load(CUM + row * (n + 1), mask=live, other=0)
    for i in tl.range(0, n):
        until = tl.load(CUM + row * (n + 1) + i + 1, mask=live, other=0)
        lo = tl.load(STARTS + row * n + i, mask=live, other=0) - first
        hi = tl.minimum(lo + until - begin, TILE)
        lo = tl.maximum(lo, 0)
        begin = until
        width = tl.maximum(hi - lo, 0).to(tl.int64)
        bits = tl.where(width >= TILE, -one, (one << width) - 1)
        mask |= tl.where(width > 0, bits << lo.to(tl.int64), 0)
    tl.store(MASKS + entry, mask, mask=entry < n_entries)


# Up to this many (row, tile) pairs the lists are sized for the worst case, which needs no wait.
_WORST_CASE_PAIRS = 1 << 18


def key_lists(
    starts: Tensor, cum: Tensor, shape: tuple[int, int, int], n_keys: int, chunk: int
) -> KeyLists:
    """Invert clean spans of rows (B, S, G) = shape by a stable sort: the order is always the same.

    Waits for the device once, for the number of pairs, unless the worst case is small or a CUDA
    graph is being captured.
    """
    B, S, G = shape
    R, n = starts.shape
    device = starts.device
    per_group = cdiv(n_keys, KEY_TILE)
    n_tiles = B * G * per_group
    starts_l, lengths = starts.long(), (cum[:, 1:] - cum[:, :-1]).long()
    used = lengths > 0
    first = torch.where(used, starts_l // KEY_TILE, 0)
    last = torch.where(used, (starts_l + lengths - 1) // KEY_TILE, -1)
    # Two spans may share a tile: the row is listed there once.
    reach = torch.nn.functional.pad(last.cummax(-1).values[:, :-1], (1, 0), value=-1)
    first = torch.maximum(first, reach + 1)
    count = torch.where(used, (last - first + 1).clamp(min=0), 0).flatten()
    ends = count.cumsum(0)
    capacity = R * per_group
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capacity > _WORST_CASE_PAIRS and not capturing:
        capacity = int(ends[-1])
    pair = torch.arange(capacity, device=device)
    owner = torch.searchsorted(ends, pair, right=True).clamp(max=R * n - 1)
    row = owner // n
    tile = first.flatten()[owner] + pair - (ends - count)[owner]
    group = row // (S * G) * G + row % G
    key = torch.where(pair < ends[-1], group * per_group + tile, n_tiles).to(torch.int32)
    key, order = key.sort(stable=True)
    rows = row[order].to(torch.int32)
    edges = torch.arange(n_tiles + 1, device=device, dtype=torch.int32)
    tile_begin = torch.searchsorted(key, edges)
    parts = (tile_begin[1:] - tile_begin[:-1] + chunk - 1) // chunk
    item_begin = torch.nn.functional.pad(parts.cumsum(0), (1, 0))
    several = torch.where(parts > 1, parts, 0)
    slot_begin = several.cumsum(0) - several
    n_items = n_tiles + capacity // chunk
    item = torch.arange(n_items, device=device)
    item_tile = torch.searchsorted(item_begin[1:].contiguous(), item, right=True)
    masks = torch.empty(capacity, dtype=torch.int64, device=device)
    if capacity:
        launch(
            _sel_key_masks_kernel, (cdiv(capacity, 128),),
            rows, key, starts, cum, masks, capacity, n, n_tiles, per_group,
            TILE=KEY_TILE, BLOCK=128, num_warps=4,
        )  # fmt: skip
    return KeyLists(
        rows, masks, tile_begin, item_begin, item_tile, slot_begin, n_tiles, per_group, chunk,
        n_items, 2 * capacity // chunk,
    )  # fmt: skip
