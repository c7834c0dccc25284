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


def bounded(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q [.., D] and finite k [.., D], with huge rows made shorter so that no score overflows where
    PyTorch's kernels add a mask to it: infinity - infinity is NaN. Scores that large decide a
    softmax by their order alone. The bound is a constant, so that no row changes another's result.
    """
    if q.dtype == torch.float16:  # whose scores cannot be so large
        return q, k
    wide = torch.promote_types(q.dtype, torch.float32)
    bound = math.sqrt(torch.finfo(wide).max / 8 / q.shape[-1] / max(abs(scale), 1.0))
    return _at_most(q, bound), _at_most(k, bound)


def _at_most(x: Tensor, bound: float) -> Tensor:
    """x [.., D], with rows scaled down whose largest magnitude passes the bound."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    return x * (bound / largest).clamp(max=1.0)


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
