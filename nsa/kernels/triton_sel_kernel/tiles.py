"""Every tile choice of the selection kernels, as data: pure functions of architecture and shape.

Shared memory decides what fits (163 KB on sm_80, 99 KB on sm_86, 89 and 120, 227 KB on sm_90 and
100), so there are two columns. Measured on an H200; the other architectures' rows are those that
fit and do not spill.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nsa.flags import Flags

_LARGE = (80, 90, 100, 103)  # 163 KB of shared memory per block or more

# (bytes per element, widest head size) -> (keys per tile, warps, stages): large parts, 99 KB parts
_FWD = {
    (2, 64): ((64, 2, 3), (64, 2, 3)),
    (2, 128): ((64, 4, 3), (32, 2, 3)),
    (2, 256): ((32, 4, 3), (32, 4, 2)),
    (4, 64): ((32, 4, 2), (32, 4, 2)),
    (4, 128): ((32, 4, 2), (16, 4, 2)),
    (4, 256): ((16, 4, 2), (16, 4, 1)),
}
_DQ = {
    (2, 64): ((64, 4, 2), (32, 4, 2)),
    (2, 128): ((32, 4, 2), (32, 4, 2)),
    (2, 256): ((32, 4, 2), (16, 4, 2)),
    (4, 64): ((16, 4, 1), (16, 4, 1)),
    (4, 128): ((16, 4, 1), (16, 4, 1)),
    (4, 256): ((16, 4, 1), (16, 4, 1)),
}
# ... -> (keys per program, (query, head) rows per step, warps, stages)
_DKDV = {
    (2, 64): ((64, 64, 4, 2), (64, 64, 4, 2)),
    (2, 128): ((64, 64, 4, 2), (64, 32, 4, 1)),
    (2, 256): ((64, 32, 8, 1), (32, 16, 8, 1)),
    (4, 64): ((32, 16, 4, 1), (32, 16, 4, 1)),
    (4, 128): ((16, 16, 4, 1), (16, 16, 4, 1)),
    (4, 256): ((16, 16, 8, 1), (16, 16, 8, 1)),
}

MAX_SPANS_PER_PASS = 64  # ranges of a row held in registers at a time
KEY_TILE = 64  # keys per list of the backward: one bit of an int64 each


@dataclass(frozen=True)
class Tiles:
    """BLOCK_D and BLOCK_DV are chunks of the head sizes; rows: (query, head) rows per step."""

    block_l: int
    block_d: int
    block_dv: int
    num_warps: int
    num_stages: int
    rows: int = 0


def _pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _chunk(dim: int) -> int:
    """Chunk of a head size: one padded power of two, or 64s where that pads less (192 = 3 * 64)."""
    padded = max(_pow2(dim), 16)
    return 64 if dim > 64 and -(-dim // 64) * 64 < padded else padded


def _row(table: dict, arch: int, itemsize: int, d: int, dv: int) -> tuple[int, ...]:
    widest = max(64, _pow2(max(d, dv)))
    return table[(2 if itemsize == 2 else 4, widest)][0 if arch in _LARGE else 1]


def fwd_tiles(
    arch: int, d: int, dv: int, itemsize: int, key_len: int, flags: Flags | None = None
) -> Tiles:
    """Tiles of the forward for rows of at most key_len keys; NSA_SEL_TRITON_BLOCK_* win."""
    block_l, warps, stages = _row(_FWD, arch, itemsize, d, dv)
    if key_len < block_l:
        block_l = max(16, _pow2(key_len))
    tiles = Tiles(block_l, _chunk(d), _chunk(dv), warps, stages)
    if flags is not None:
        tiles = replace(
            tiles,
            block_l=flags.sel_triton_block_l or tiles.block_l,
            block_d=min(flags.sel_triton_block_d or tiles.block_d, max(16, _pow2(d))),
            block_dv=min(flags.sel_triton_block_dv or tiles.block_dv, max(16, _pow2(dv))),
        )
    return tiles


def dq_tiles(arch: int, d: int, dv: int, itemsize: int) -> Tiles:
    """Tiles of the dQ kernel."""
    block_l, warps, stages = _row(_DQ, arch, itemsize, d, dv)
    return Tiles(block_l, _chunk(d), _chunk(dv), warps, stages)


def dkdv_tiles(arch: int, d: int, dv: int, itemsize: int) -> Tiles:
    """Tiles of the dK, dV kernel."""
    block_l, rows, warps, stages = _row(_DKDV, arch, itemsize, d, dv)
    return Tiles(block_l, _chunk(d), _chunk(dv), warps, stages, rows)


def head_tile(heads: int, *, group: bool) -> int:
    """Heads that one program serves: a tensor-core tile of 16, or with `group` up to 64."""
    return min(64, max(16, _pow2(heads))) if group else 16


def split_count(programs: int, key_len: int, block_l: int, n_sm: int) -> int:
    """Programs that share the keys of a row, so that few rows still fill the GPU."""
    want = _pow2(-(-2 * n_sm // max(programs, 1)))
    return max(1, min(want, 64, _pow2(key_len // (2 * block_l))))
