"""fp32 sums to which programs add their parts of a gradient: zeros for several at once, and the sum
scaled and rounded in one pass over memory, where PyTorch's operations reach 3.0 TB/s on an H200."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa.kernels.launch import launch
from nsa.kernels.tiles import cdiv

SIZE = 4096  # numbers that a program rounds


@triton.jit
def _round_kernel(X, OUT, numbers, scale, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < numbers
    x = tl.load(X + at, mask=live, other=0.0) * scale
    tl.store(OUT + at, x.to(OUT.dtype.element_ty), mask=live)


def zero_sums(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """fp32 zeros of the shape of each, in one piece of memory."""
    sizes = [x.numel() for x in tensors]
    zeros = torch.zeros(sum(sizes), dtype=torch.float32, device=tensors[0].device)
    return [part.view(x.shape) for part, x in zip(zeros.split(sizes), tensors, strict=True)]


def rounded(x: torch.Tensor, scale: float, like: torch.Tensor) -> torch.Tensor:
    """x * scale for a contiguous fp32 x, of the dtype of `like`."""
    out = torch.empty(x.shape, dtype=like.dtype, device=x.device)
    if out.numel():
        launch(_round_kernel, (cdiv(out.numel(), SIZE),), x, out, out.numel(), scale, SIZE=SIZE)
    return out
