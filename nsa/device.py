"""The name and compute capability of a device, asked for once, and the flags that hold on it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from nsa.flags import Flags, get_flags
from nsa.log import once, warn_once
from nsa.untraced import constant

device_name = constant(functools.cache(lambda index: torch.cuda.get_device_name(index)))
capability = constant(functools.cache(lambda index: torch.cuda.get_device_capability(index)))


def resolve_flags(flags: Flags | None, tensor: Tensor) -> Flags:
    """`flags`, or those of this process for the device that holds `tensor`."""
    if flags is not None:
        if not isinstance(flags, Flags):
            raise TypeError(f"flags must be an nsa.Flags, got {type(flags).__name__}")
        return flags
    return get_flags(device_name(tensor.device.index) if tensor.is_cuda else None)


def log_device(device: torch.device, flags: Flags) -> None:
    """Log the device that Triton selection runs on, once (`sel.triton.device`); warn where it is a
    Hopper GPU whose faster kernels are out."""
    if device.type == "cuda":
        major, minor = capability(device.index)
        once("sel.triton.device", device.index, flags=flags,
             name=device_name(device.index), sm=f"{major}.{minor}")  # fmt: skip
        if (major, minor) == (9, 0):
            _tell_generic(device, flags.use_gluon)


@functools.cache
def _tell_generic(device: torch.device, use_gluon: bool) -> None:
    from nsa.kernels.prefill import hopper

    reason = hopper.why_not(device, use_gluon)
    if reason is not None:
        warn_once(f"nsa: the kernels for Hopper do not serve: {reason}")


_tell_generic = constant(_tell_generic)
