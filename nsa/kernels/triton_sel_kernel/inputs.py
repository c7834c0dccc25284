"""What the selection kernels take, and tensors made fit for their 16-byte loads."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of the device; the interpreter counts as one, so little is split there."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def units_of_8(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """K or V [B, G, Skv, D] with (batch, group, token) strides in units of 8 elements.

    Copies only what no 16-byte load could read: a last dimension that is not contiguous, strides
    that are not multiples of 8, a misaligned first element.
    """
    ok = x.stride(-1) == 1 and all(x.stride(i) % 8 == 0 for i in range(3))
    if not ok or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return x, (x.stride(0) // 8, x.stride(1) // 8, x.stride(2) // 8)


def aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def check_kernel_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError, ValueError or NotImplementedError for what no selection kernel takes."""
    for name, x in (("Q", q), ("K", k), ("V", v)):
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16 or float32, got {x.dtype}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} must have Q's dtype and device ({q.dtype}, {q.device}), "
                f"got {x.dtype}, {x.device}"
            )
        dim = x.shape[-1]
        if dim % 8 or not 0 < dim <= 256:
            raise NotImplementedError(
                f"{name}'s head size must be a multiple of 8 up to 256, got {dim}"
            )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"K's head size must be Q's {q.shape[-1]}, got {k.shape[-1]}")
