"""Questions about a call that public functions and kernel wrappers share, and its softmax scale."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as modules

MOST_STEP_ROWS = 128  # new tokens * heads of a group that the fused decode step takes at once
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def needs_grad(*tensors: Tensor | None) -> bool:
    """True when autograd would record an operation on any of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def autocast_on(device: torch.device) -> bool:
    """Is autocast enabled there? Meta tensors have none, and asking whether a device has one would
    break a graph that torch 2.11 traces."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def is_fake(x: Tensor) -> bool:
    """Has x a shape and no values (torch's FakeTensorMode)? Outside of a compiler."""
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    return fake is not None and isinstance(x, fake.FakeTensor)


def takes_forward_derivatives() -> bool:
    """True inside torch.func.jvp and forward_ad.dual_level()."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def assert_longest(cu_seqlens: Tensor, max_seqlen: int) -> None:
    """Stop the device, for which nobody waits, if a sequence is longer than max_seqlen."""
    torch._assert_async(
        (cu_seqlens[1:] - cu_seqlens[:-1]).amax() <= max_seqlen,
        f"max_seqlen must be at least the longest sequence of cu_seqlens, got {max_seqlen}",
    )


def refuse_export(name: str) -> None:
    """Raise NotImplementedError inside torch.export, before `name` of a pack has to be read: how
    many compressed keys there are depends on its values."""
    if torch.compiler.is_exporting():
        raise NotImplementedError(
            f"torch.export takes no packed sequences: {name} would have to be read while tracing; "
            "export the call of a batch [B, S, ..], whose length may be dynamic"
        )


_PLAIN = (Tensor, nn.Parameter)


def is_eager(*tensors: object) -> bool:
    """Return whether these are ordinary tensors in an eager call: no compiler, dispatch mode or
    function transform looks at what is done with them."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all([type(x) in _PLAIN for x in tensors])


MOST_FP32 = torch.finfo(torch.float32).max  # kernels and sums take it in fp32


def scale_of(softmax_scale: float | None, d: int) -> float:
    """softmax_scale or its default; raises TypeError or ValueError for what is no finite number
    above 0: kernels take the maximum before they scale."""
    if softmax_scale is None:
        return 1.0 / math.sqrt(d)
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, (int, float)):
        raise TypeError(f"softmax_scale must be None or a number, got {softmax_scale!r}")
    if not 0 < softmax_scale <= MOST_FP32:
        raise ValueError(f"softmax_scale must be a finite number above 0, got {softmax_scale}")
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
        if p is not None and (type(p) is not nn.Parameter or p.dtype not in _KERNEL_DTYPES):
            return False
    return True


def apply_linear(linear: nn.Module, x: Tensor) -> Tensor:
    """linear(x), without what calling a module takes of the host (5 to 10 us) where it is plain.

    For calls without gradients: hooks of the backward are not looked at.
    """
    if not is_plain(linear, nn.Linear):
        return linear(x)
    own: dict[str, Any] = linear._parameters
    return F.linear(x, own["weight"], own["bias"])
