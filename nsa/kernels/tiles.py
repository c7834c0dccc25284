"""Tile arithmetic on the host that every kernel package shares."""

from __future__ import annotations

import functools
from typing import Any

import torch

LOG2E = 1.4426950408889634  # kernels take exp2, whose scores carry this factor


# Triton has these two for kernels as well, for which a call on the host costs some 5 us.
def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def pow2(n: int) -> int:
    """The power of two at or above n."""
    return 1 << max(n - 1, 0).bit_length()


def split_dim(dim: int) -> tuple[int, int]:
    """A head size as two powers of two: 192 is 128 + 64, so nothing is padded to 256."""
    first = max(1 << (dim.bit_length() - 1), 16)
    rest = max(dim - first, 0)
    return first, dot_size(rest) if rest else 0


def dot_size(n: int) -> int:
    """n (a head size, heads, keys) padded to what one side of a tensor-core product can be."""
    return max(pow2(n), 16)


def dot_precision(dtype: torch.dtype) -> str:
    """fp32 inputs are asked for because of their precision: no TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"


@functools.cache  # a launcher asks several times, PyTorch takes some 5 us each
def arch_of(device: torch.device) -> int:
    """Compute capability as an integer, 90 for sm_90; 0 means the interpreter (small tiles)."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def check_e4m3(arch: int) -> None:
    """Raise NotImplementedError where a GPU has no instructions for e4m3."""
    if 0 < arch < 89:
        raise NotImplementedError(f"FP8 caches need SM 8.9 or newer, got {arch}")


def datacenter(arch: int) -> bool:
    """sm_90 and the sm_100 family: 227 KB of shared memory per block."""
    return arch in (90, 100, 103)


def head_constants(dim: int, dv: int, dtype: torch.dtype) -> dict[str, Any]:
    """Constants of a kernel that takes a head of keys in two tiles and one of values in one."""
    d1, d2 = split_dim(dim)
    return dict(
        D=dim, DV=dv, BLOCK_D=d1, BLOCK_D2=d2, BLOCK_DV=dot_size(dv), PRECISION=dot_precision(dtype)
    )


def small_shared(arch: int) -> bool:
    """Parts with 99 KB of shared memory per block (sm_86, 89, 120 and what is not known), where
    sm_80 has 163 and datacenter() ones have 227. The interpreter (0) is none of them."""
    return arch != 0 and arch != 80 and not datacenter(arch)


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of the device; the interpreter counts as one, so little is split there."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
