"""Which calls the prefill kernels have no tile for, free of Triton."""

from __future__ import annotations

import functools

from torch import Tensor

from nsa.kernels.tiles import arch_of, datacenter, dot_size, small_shared, split_dim

# Query heads per KV group, which are the rows of one tile and share memory with the keys. By bytes
# per element and head size as padded: for parts with 227, 163 and 99 KB of shared memory per block.
_HEADS = {
    (2, 64): (128, 128, 128),
    (2, 128): (64, 128, 64),
    (2, 192): (64, 128, 64),
    (2, 256): (64, 64, 16),
    (4, 128): (64, 64, 16),
    (4, 256): (64, 32, 16),
}


@functools.cache
def most_heads(arch: int, d: int, dv: int, itemsize: int) -> int:
    """Query heads per KV group for which forward and backward fit; the interpreter takes any."""
    if arch == 0:
        return 1 << 30
    width = max(sum(split_dim(d)), dot_size(dv))
    size = 2 if itemsize == 2 else 4
    widest = min(w for s, w in _HEADS if s == size and w >= width)
    column = 0 if datacenter(arch) else 2 if small_shared(arch) else 1
    return _HEADS[size, widest][column]


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise NotImplementedError for more heads per group than most_heads; before the forward, so
    that no backward is left without a kernel."""
    heads, d, dv = q.shape[-2] // k.shape[-2], q.shape[-1], v.shape[-1]
    most = most_heads(arch_of(q.device), d, dv, q.element_size())
    if heads > most:
        raise NotImplementedError(
            f"q must have at most {most} heads per KV group for Dk={d} and Dv={dv} on this GPU, "
            f"got {heads}"
        )


def check_block_size(name: str, size: int) -> None:
    """Raise NotImplementedError for blocks of keys that are not whole tiles."""
    if size not in (16, 32) and (size <= 0 or size % 64):
        raise NotImplementedError(f"{name} must be 16, 32 or a multiple of 64, got {size}")
