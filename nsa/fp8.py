"""FP8 (e4m3) keys and values: what a cache of them holds, and what it stands for.

A stored number x stands for x * descale, with one descale for each sequence and KV head, as
flash-attn 3 has it. Attention over such a cache is attention over x * descale, with sums in fp32;
compressed tokens are made of x * descale and stored in the same way. Of a number e4m3 keeps 4
significant bits (a relative error of up to 1/16) between 2^-6 and 448, and fewer below.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from nsa.checks import MOST_FP32

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3
LEAST_DESCALE = 2.0**-149  # of fp32
KVCacheDtype = Literal["auto", "fp8_e4m3"]  # as vLLM names them


def is_fp8(kv_cache_dtype: KVCacheDtype) -> bool:
    """True for "fp8_e4m3". Raises ValueError for what is no KVCacheDtype."""
    if kv_cache_dtype not in get_args(KVCacheDtype):
        names = " or ".join(map(repr, get_args(KVCacheDtype)))
        raise ValueError(f"kv_cache_dtype must be {names}, got {kv_cache_dtype!r}")
    return kv_cache_dtype == "fp8_e4m3"


def descale_of(
    name: str, descale: float | Tensor | None, batch: int, groups: int, device: torch.device
) -> Tensor:
    """A descale of keys or values as fp32 [B, G], None as 1.

    descale: a number above 0, or fp32 [G] or [B, G] on `device`. Raises ValueError or TypeError
    that names the argument; of a tensor on a GPU, for which nobody waits, values are not checked.
    """
    if descale is None:
        descale = 1.0
    if isinstance(descale, (int, float)) and not isinstance(descale, bool):
        if not LEAST_DESCALE <= descale <= MOST_FP32:
            raise ValueError(f"{name} must be above 0 and finite in fp32, got {descale}")
        return torch.full((batch, groups), descale, dtype=torch.float32, device=device)
    if not isinstance(descale, Tensor) or descale.dtype != torch.float32:
        kind = getattr(descale, "dtype", type(descale).__name__)
        raise TypeError(f"{name} must be a number or an fp32 tensor, got {kind}")
    if descale.shape not in ((groups,), (batch, groups)):
        raise ValueError(
            f"{name} must be [G] or [B, G] with B={batch} and G={groups}, got {list(descale.shape)}"
        )
    if descale.device != device:
        raise ValueError(f"{name} must be on {device}, got {descale.device}")
    if not descale.is_cuda and not bool(((descale > 0) & (descale < math.inf)).all()):
        raise ValueError(f"{name} must be above 0 and finite, got {descale.tolist()}")
    return descale.expand(batch, groups).contiguous()


def quantize(x: Tensor, descale: Tensor) -> Tensor:
    """x [B, N, G, D] of any float dtype as e4m3 of the nearest x / descale [B, G]: numbers beyond
    448, infinities too, become 448 with their sign, and NaN stays NaN."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    # Without the clamp some releases of PyTorch make NaN of larger numbers.
    return (wide / descale[:, None, :, None]).clamp(-LARGEST, LARGEST).to(E4M3)


def dequantize(x: Tensor, descale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * descale in dtype, of x e4m3 [B, N, G, D] and descale fp32 [B, G]."""
    wide = x.to(torch.promote_types(dtype, torch.float32))
    return (wide * descale[:, None, :, None]).to(dtype)


def stored(x: Tensor, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [B, N, G, D] as a cache of queries in `dtype` holds it: e4m3 where it has a descale."""
    return x.to(dtype) if descale is None else quantize(x, descale)


def stands_for(x: Tensor, descale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The numbers, in dtype, for which stored(x) stands."""
    return x if descale is None else dequantize(x, descale, dtype)


def as_bytes(x: Tensor) -> Tensor:
    """x, or its bytes if it is e4m3, of which some operations that move numbers know nothing."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x
