"""The rotary embedding, and the projections of a layer taken apart with it, in PyTorch.

nsa/kernels/prefill/turn.py does the same in one pass over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.cache import BranchKV
from nsa.config import NSAConfig


def rotary(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Turn the pair (x[i], x[i + D/2]) of every head by positions * base^(-2i/D).

    x [.., S, H, D], positions [S]. Angles in fp64: fp32 ones are off by 0.01 at position 100k.
    """
    half = x.shape[-1] // 2
    exponent = torch.arange(half, device=x.device, dtype=torch.float64) / half
    return turn(x, positions.double()[:, None] * base**-exponent)


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """Turn the pairs of every head of x [.., S, H, D] by angle [.., S, D/2]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (y.to(wide).unsqueeze(-2) for y in (angle.cos(), angle.sin()))
    return turn_by(x, cos, sin)


def turn_by(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn the first pairs of every head of x [.., S, H, D] by cos, sin [.., S, 1, pairs], in their
    dtype. Pairs are columns i and i + pairs or, interleaved, 2i and 2i + 1."""
    pairs = cos.shape[-1]
    first, rest = x[..., : 2 * pairs].to(cos.dtype), x[..., 2 * pairs :]
    a, b = (first[..., ::2], first[..., 1::2]) if interleaved else first.chunk(2, dim=-1)
    both = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    turned = turned.to(x.dtype)
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


def branches(k: Tensor, v: Tensor) -> BranchKV:
    """k [.., 3 * G, Dk] and v [.., 3 * G, Dv] by branch (cmp, sel, win)."""
    (k_cmp, k_sel, k_win), (v_cmp, v_sel, v_win) = k.chunk(3, dim=-2), v.chunk(3, dim=-2)
    return BranchKV(k_cmp, v_cmp, k_sel, v_sel, k_win, v_win)


def split_turned(qkv: Tensor, positions: Tensor, config: NSAConfig) -> tuple[Tensor, BranchKV]:
    """Queries [.., S, HQ, Dk] and the three branches' keys and values of qkv [.., S, widths].

    Columns of qkv: config.qkv_widths. Queries and keys are turned by positions [S].
    """
    c = config
    q, k, v = qkv.split(c.qkv_widths, dim=-1)
    q = rotary(q.unflatten(-1, (c.heads, c.d_k)), positions, c.rope_base)
    k = rotary(k.unflatten(-1, (3 * c.groups, c.d_k)), positions, c.rope_base)
    return q, branches(k, v.unflatten(-1, (3 * c.groups, c.d_v)))
