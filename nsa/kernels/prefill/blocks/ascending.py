"""Block indices as users give them -> ascending and each once, as kernels read them: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.launch import launch
from nsa.kernels.operator import operator
from nsa.kernels.tiles import cdiv, pow2


@triton.jit
def load_blocks(at, live):
    """Indices as int32; what is negative or needs more bits is no block, and comes last."""
    block = tl.load(at, mask=live, other=-1)
    block = tl.minimum(tl.maximum(block, -1), 2147483647).to(tl.int32)
    return tl.where(block < 0, 2147483647, block)


@triton.jit
def _ascending_kernel(
    BLOCK_INDICES, ORDERED, n_rows, n_sel, n_blocks, ROWS: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """ROWS rows: each index goes to its rank among those that are chosen for the first time."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mine = tl.arange(0, N)
    inside = (row < n_rows)[:, None]
    live = inside & (mine < n_sel)[None, :]
    own = BLOCK_INDICES + row[:, None] * n_sel + mine[None, :]
    if n_blocks is not None:
        message: tl.constexpr = "block_indices must be below the blocks of block_size in the keys"
        tl.device_assert(tl.load(own, mask=live, other=-1) < n_blocks, message)
    block = load_blocks(own, live)
    rank = tl.zeros([ROWS, N], tl.int32)
    repeats = tl.zeros([ROWS, N], tl.int32)
    for first in tl.range(0, n_sel, CHUNK):
        other = first + tl.arange(0, CHUNK)
        at = BLOCK_INDICES + row[:, None] * n_sel + other[None, :]
        there = load_blocks(at, inside & (other < n_sel)[None, :])[:, None, :]
        here = block[:, :, None]
        order = mine[:, None] - other[None, :]
        same = here == there
        fresh = tl.max((same & (order < 0)[None, :, :]).to(tl.int32), 1)[:, None, :] == 0
        rank += tl.sum((fresh & (there < here)).to(tl.int32), 2)
        repeats += tl.sum((same & (order > 0)[None, :, :]).to(tl.int32), 2)
    chosen = live & (block < 2147483647) & (repeats == 0)
    tl.store(ORDERED + row[:, None] * n_sel + rank, block, mask=chosen)
    none = live & (mine[None, :] >= tl.sum(chosen.to(tl.int32), 1)[:, None])
    tl.store(ORDERED + row[:, None] * n_sel + mine[None, :], -1, mask=none)


@operator("nsa::ascending")
def ascending(block_indices: Tensor, n_blocks: int | None = None) -> Tensor:
    """Each row of block indices [.., n], int32 or int64, sorted without repetitions and as int32,
    -1 (no block) at its end. n_blocks: stop the GPU at an index that is not below."""
    block_indices = block_indices.contiguous()
    out = torch.empty(block_indices.shape, dtype=torch.int32, device=block_indices.device)
    if out.numel():
        n = out.shape[-1]
        rows, width = out.numel() // n, pow2(n)
        chunk = max(1, min(width, 4096 // width))  # 4096 pairs at a time: 32 a thread
        tile = max(1, min(4096 // (width * chunk), 256, pow2(rows)))
        launch(
            _ascending_kernel, (cdiv(rows, tile),), block_indices, out, rows, n, n_blocks,
            ROWS=tile, N=width, CHUNK=chunk, num_warps=4, debug=n_blocks is not None,
        )  # fmt: skip
    return out


@ascending.register_fake
def _(block_indices, n_blocks=None):
    return torch.empty_like(block_indices, dtype=torch.int32)
