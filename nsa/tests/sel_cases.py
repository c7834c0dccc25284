"""Plain computations and parity checks that the selection kernels' tests share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bench.parity import MAE_LIMIT, assert_parity
from nsa import oracle


def plain_dense(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """softmax(q k^T) v in the inputs' own dtype: q [N, H, D], k [N, L, D], v [N, L, Dv]."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return torch.softmax(q @ k.transpose(1, 2) * scale, -1) @ v


def plain_ranges(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
    """Masked attention in the inputs' own dtype: q [B, S, G, h, D], k and v [B, G, Skv, .]."""
    key = torch.arange(k.shape[2], device=k.device)
    seen = ((key >= ranges[..., :1]) & (key < ranges[..., 1:])).any(3)[:, :, :, None]
    s = torch.einsum("bsghd,bgld->bsghl", q, k) / math.sqrt(q.shape[-1])
    s = s.masked_fill(~seen, torch.finfo(q.dtype).min)
    return torch.einsum("bsghl,bgld->bsghd", torch.softmax(s, -1) * seen, v)


def oracle_ranges(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
    """The fp64 oracle in the wrapper's layout."""
    out = oracle.selection_attention(q.flatten(2, 3), k.transpose(1, 2), v.transpose(1, 2), ranges)
    return out.unflatten(2, q.shape[2:4])


def gradients(fn, inputs, grad_out: Tensor) -> list[Tensor]:
    """[out, *gradients] of fn on fresh leaves; zeros where nothing depends on an input."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    grads = (
        torch.autograd.grad(out, leaves, grad_out.to(out.dtype), allow_unused=True)
        if out.requires_grad else [None] * len(leaves)
    )  # fmt: skip
    return [out.detach()] + [
        torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)
    ]


def assert_all_parity(case, got, want, same_dtype, *, kernels, launched, **kw):
    """assert_parity for out, dQ, dK and dV. Gradients grow with the rows that share a key, so
    their mean error may reach twice the same-dtype computation's where that exceeds the limit."""
    for op, a, b, c in zip(("fwd", "dq", "dk", "dv"), got, want, same_dtype, strict=False):
        limit = MAE_LIMIT[a.dtype]
        if op in ("dq", "dk") and b.abs().max() < 1e-12:
            # One key per row: dP - delta cancels, here up to the order of two fp32 sums.
            assert a.abs().max() <= 1e-5, f"{case} {op} must vanish"
            continue
        if op != "fwd":
            limit = max(limit, 2 * (c.double() - b.double()).abs().mean().item())
        assert_parity(
            case, op, a, b, c, path_requested="triton", path_taken="triton", launches=launched,
            expect_kernels=kernels, limit_mae=limit, **kw,
        )  # fmt: skip
