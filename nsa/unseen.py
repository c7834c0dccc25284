"""Keys and values that are not finite, kept from the queries that do not see them.

0 * NaN is NaN: a probability of 0 does not take such a value out of a product, nor a gradient of 0
out of one with it. So products go without them, and whoever sees one gets NaN for it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def finite(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [.., N, G, D] with 0 for what is not finite, and [.., N, G]: which rows have such."""
    odd = ~x.isfinite()
    return x.masked_fill(odd, 0), odd.any(-1)


def bounded(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """k, with magnitudes such that no score of q * scale overflows fp32: PyTorch's kernels add the
    mask, and infinity - infinity is NaN. Scores that large decide a softmax by their sign alone."""
    if q.dtype == torch.float16 or not q.numel():  # whose scores cannot be so large
        return k
    most = torch.finfo(torch.float32).max / 8 / q.shape[-1] / max(abs(scale), 1.0)
    bound = most / q.detach().abs().amax().to(torch.float64).clamp(min=1.0)
    bound = bound.clamp(max=torch.finfo(k.dtype).max / 2).to(k.dtype)
    return k.clamp(-bound, bound)


def factor(mask: Tensor, odd: Tensor) -> Tensor:
    """NaN for the rows of mask [B|1, s, G|1, N] that see one of the odd keys [B, N, G], 1 for the
    others: fp32 [B, s, G]. A product with it, and not a choice, so that their gradients tell, too.
    """
    count = torch.einsum("bsgn,bng->bsg", mask.to(torch.float32), odd.to(torch.float32))
    return nan_if(count > 0)


def factor_between(odd: Tensor, first: Tensor, end: Tensor, heads: int) -> Tensor:
    """factor() of queries that each see the keys from `first` to before `end` (integers [s]) of odd
    [.., N, G], for every one of `heads` heads: fp32 [.., s, heads]."""
    count = F.pad(odd.cumsum(-2, dtype=torch.int32), (0, 0, 1, 0))
    sees = count.index_select(-2, end) > count.index_select(-2, first)
    return nan_if(sees.repeat_interleave(heads // odd.shape[-1], -1))


def nan_if(rows: Tensor) -> Tensor:
    """NaN where the mask is true, 1 elsewhere, in fp32."""
    return torch.ones_like(rows, dtype=torch.float32).masked_fill(rows, math.nan)
