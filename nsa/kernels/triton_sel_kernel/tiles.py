"""Every tile choice of the selection kernels, as data: pure functions of architecture and shape.

Shared memory decides what fits (163 KB on sm_80, 99 KB on sm_86, 89 and 120, 227 KB on sm_90 and
100), so there are two columns. Measured on an H200; the other architectures' rows are those that
fit and do not spill.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nsa.flags import Flags
from nsa.kernels.tiles import cdiv, dot_size, pow2, small_shared

# (bytes per element, widest head size) -> (keys per tile, warps, stages). On large parts by how
# many programs there are: at most one per multiprocessor, fewer than four, four or more. The last
# are small enough to keep many in flight at once; the first must keep memory busy alone.
_FWD = {
    (2, 64): ((128, 4, 3), (64, 2, 3), (64, 1, 2)),
    (2, 128): ((128, 4, 3), (64, 2, 3), (32, 1, 2)),
    (2, 256): ((64, 4, 3), (32, 4, 3), (32, 4, 2)),
    (4, 64): ((32, 4, 2), (32, 4, 2), (32, 4, 2)),
    (4, 128): ((32, 4, 2), (32, 4, 2), (32, 4, 2)),
    (4, 256): ((16, 4, 2), (16, 4, 2), (16, 4, 2)),
}
# The ranges kernel with many programs: smaller still, it computes a key for every slot.
_FWD_MANY_RANGES = {(2, 64): (32, 1, 3), (2, 128): (16, 1, 3)}
_FWD_99KB = {
    (2, 64): (64, 2, 3),
    (2, 128): (32, 2, 3),
    (2, 256): (32, 4, 2),
    (4, 64): (32, 4, 2),
    (4, 128): (16, 4, 2),
    (4, 256): (16, 4, 1),
}
# The backward: large parts, 99 KB parts.
_DQ = {
    (2, 64): ((64, 2, 2), (32, 4, 2)),
    (2, 128): ((32, 2, 2), (32, 4, 2)),
    (2, 256): ((32, 4, 2), (16, 4, 2)),
    (4, 64): ((16, 4, 1), (16, 4, 1)),
    (4, 128): ((16, 8, 1), (16, 8, 1)),
    (4, 256): ((16, 8, 1), (16, 8, 1)),
}
# ... -> (keys per program, (query, head) rows per step, warps, stages)
_DKDV = {
    (2, 64): ((64, 64, 4, 2), (64, 32, 4, 2)),
    (2, 128): ((64, 32, 4, 2), (64, 32, 8, 1)),
    (2, 256): ((32, 64, 8, 2), (32, 32, 8, 1)),
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

    @property
    def constants(self) -> dict[str, int]:
        """Return the constants that a kernel of these tiles is compiled with."""
        return dict(
            BLOCK_L=self.block_l, BLOCK_D=self.block_d, BLOCK_DV=self.block_dv,
            num_warps=self.num_warps, num_stages=self.num_stages,
        )  # fmt: skip


def _chunk(dim: int, itemsize: int) -> int:
    """Chunk of a head size: one padded power of two, or 64s where that pads less (192 = 3 * 64).

    fp32 products run outside the tensor cores, which hold operands in registers: always 64s.
    """
    padded = dot_size(dim)
    fewer = itemsize == 4 or cdiv(dim, 64) * 64 < padded
    return 64 if dim > 64 and fewer else padded


def _key(itemsize: int, d: int, dv: int) -> tuple[int, int]:
    return (2 if itemsize == 2 else 4, max(64, pow2(max(d, dv))))


def _large(arch: int) -> bool:
    """163 KB of shared memory per block or more. The interpreter takes small tiles."""
    return arch != 0 and not small_shared(arch)


def _row(table: dict, arch: int, itemsize: int, d: int, dv: int) -> tuple[int, ...]:
    return table[_key(itemsize, d, dv)][0 if _large(arch) else 1]


def fwd_tiles(
    arch: int, d: int, dv: int, itemsize: int, key_len: int, programs: int, n_sm: int,
    flags: Flags | None = None, *, ranges: bool = False,
) -> Tiles:  # fmt: skip
    """Tiles of the forward for rows of at most key_len keys; NSA_SEL_TRITON_BLOCK_* win."""
    key = _key(itemsize, d, dv)
    if _large(arch):
        tier = 0 if programs <= n_sm and key_len > 64 else 1 if programs < 4 * n_sm else 2
        block_l, warps, stages = _FWD[key][tier]
        if ranges and tier == 2:
            block_l, warps, stages = _FWD_MANY_RANGES.get(key, _FWD[key][tier])
    else:
        block_l, warps, stages = _FWD_99KB[key]
    tiles = Tiles(block_l, _chunk(d, itemsize), _chunk(dv, itemsize), warps, stages)
    if flags is not None:
        tiles = replace(
            tiles,
            block_l=flags.sel_triton_block_l or tiles.block_l,
            block_d=min(flags.sel_triton_block_d or tiles.block_d, dot_size(d)),
            block_dv=min(flags.sel_triton_block_dv or tiles.block_dv, dot_size(dv)),
        )
    return tiles


def dq_tiles(arch: int, d: int, dv: int, itemsize: int) -> Tiles:
    """Tiles of the dQ kernel."""
    block_l, warps, stages = _row(_DQ, arch, itemsize, d, dv)
    return Tiles(block_l, _chunk(d, itemsize), _chunk(dv, itemsize), warps, stages)


def dkdv_tiles(arch: int, d: int, dv: int, itemsize: int) -> Tiles:
    """Tiles of the dK, dV kernel."""
    block_l, rows, warps, stages = _row(_DKDV, arch, itemsize, d, dv)
    return Tiles(block_l, _chunk(d, itemsize), _chunk(dv, itemsize), warps, stages, rows)


def head_tile(heads: int, d: int, dv: int, itemsize: int, *, group: bool) -> int:
    """Heads that one program serves: a tensor-core tile of 16, or with `group` up to 64, of fp32
    up to what registers hold."""
    most = 64 if itemsize == 2 else 32 if max(d, dv) <= 128 else 16
    return min(most, dot_size(heads)) if group else 16


def padded_heads(heads: int) -> int:
    """Heads per query among the (query, head) rows of the dK, dV kernel."""
    return pow2(heads)


def split_count(programs: int, key_len: int, block_l: int, n_sm: int) -> int:
    """Programs that share the keys of a row, so that few rows still fill the GPU.

    The merge costs a launch: it pays from four parts on.
    """
    want = pow2(n_sm // max(programs, 1) + 1) // 2  # the power of two at or below
    if want < 4:
        return 1
    return max(1, min(want, 64, pow2(key_len // (4 * block_l))))


def spans_per_pass(n: int) -> int:
    return min(MAX_SPANS_PER_PASS, pow2(n))
