"""What the selection kernels take, and tensors made fit for their 16-byte loads."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.config import check_int

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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


def check_tensor(
    name: str, x: Tensor, dims: str, dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
) -> None:  # fmt: skip
    """Raise TypeError or ValueError unless x is a tensor with the dimensions `dims`, such as
    "[N, L, D]", of one of the dtypes, on Q's device where that is given."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor {dims}, got {type(x).__name__}")
    if x.ndim != dims.count(",") + 1:
        raise ValueError(f"{name} must be {dims}, got shape {list(x.shape)}")
    if x.dtype not in dtypes:
        allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} must be {allowed}, got {x.dtype}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on Q's device {device}, got {x.device}")


def check_qkv(dtypes: tuple[torch.dtype, ...], **given: tuple[Tensor, str]) -> None:
    """check_tensor of Q, K and V, given by name with their dimensions, and of one dtype."""
    q = given["Q"][0]
    for name, (x, dims) in given.items():
        check_tensor(name, x, dims, dtypes, None if x is q else q.device)
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have Q's dtype {q.dtype}, got {x.dtype}")


def check_kernel_inputs(
    q: Tensor, k: Tensor, v: Tensor, k_dims: str, v_dims: str, splits: int | None
) -> None:
    """Raise TypeError, ValueError or NotImplementedError for what no packed kernel takes."""
    from triton import knobs

    check_qkv(_DTYPES, Q=(q, "[N, H, D]"), K=(k, k_dims), V=(v, v_dims))
    if q.device.type != "cuda" and not knobs.runtime.interpret:
        raise ValueError(f"Q must be on a CUDA device, got {q.device}")
    for name, x in (("Q", q), ("K", k), ("V", v)):
        dim = x.shape[-1]
        if dim % 8 or not 0 < dim <= 256:
            raise NotImplementedError(
                f"{name}'s head size must be a multiple of 8 up to 256, got {dim}"
            )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"K's head size must be Q's {q.shape[-1]}, got {k.shape[-1]}")
    check_int("splits", splits, 1, optional=True)
    if splits is not None and splits & (splits - 1):
        raise ValueError(f"splits must be None or a power of two, got {splits}")
