"""Checks of arguments that the public functions and the kernels' wrappers share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_int(name: str, value: Any, least: int, *, optional: bool = False) -> None:
    """Raise TypeError or ValueError unless value is an int from `least` on, or None if optional."""
    if optional and value is None:
        return
    none = "None or " if optional else ""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be {none}an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be {none}at least {least}, got {value}")


def needs_grad(*tensors: Tensor | None) -> bool:
    """True when autograd would record an operation on any of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def scale_of(softmax_scale: float | None, d: int) -> float:
    """softmax_scale or its default; raises TypeError or ValueError for what is no finite number."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(d)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale must be None or a number, got {softmax_scale!r}")
    if not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale must be finite, got {softmax_scale}")
    return float(softmax_scale)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Is it of this very class, without hooks, and are its own parameters ordinary ones? Then a
    kernel may do what it would: no adapter, offloading or quantised weight has its say."""
    if (
        type(module) is not kind or "forward" in vars(module)
        or module._forward_hooks or module._forward_pre_hooks
        or modules._global_forward_hooks or modules._global_forward_pre_hooks
    ):  # fmt: skip
        return False
    for p in module._parameters.values():
        if type(p) is not nn.Parameter or p.dtype not in _KERNEL_DTYPES:
            return False
    return True
