"""Selection by ranges: problems, the oracle and the comparison with it that its tests share.

Layouts are the wrapper's: q [B, S, G, h, Dk], k [B, G, Skv, Dk], v [B, G, Skv, Dv].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.parity import MAE_LIMIT, assert_parity
from nsa import dispatch, launches, oracle
from nsa.kernels.triton_sel_kernel import selection_ranges_triton
from nsa.tests.helpers import randn

BACKWARD = ("_sel_attn_bwd_dq_kernel", "_sel_attn_bwd_dkdv_kernel", "_sel_attn_bwd_sum_kernel")
IN_PLACE = ("_sel_attn_fwd_ranges_kernel",)


def inputs(
    dtype=torch.float16, device="cpu", B=1, S=4, G=2, h=2, Skv=70, D=16, Dv=24, seed=0, grad=False
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, each N(0, 1)."""
    kw = {"dtype": dtype, "device": device, "requires_grad": grad}
    return (
        randn(B, S, G, h, D, seed=seed + 1, **kw), randn(B, G, Skv, D, seed=seed + 2, **kw),
        randn(B, G, Skv, Dv, seed=seed + 3, **kw),
    )  # fmt: skip


def rows_of(spans: Sequence, device="cpu", B=1, G=1) -> Tensor:
    """int32 ranges [B, S, G, n, 2]: `spans` [S, n, 2] for every sequence and group."""
    ranges = torch.tensor(spans, dtype=torch.int32, device=device)
    return ranges[None, :, None].expand(B, -1, G, -1, -1)


def plain_dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T) v in the inputs' own dtype: q [N, H, D], k [N, L, D], v [N, L, Dv]."""
    return torch.softmax(q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), -1) @ v


def plain_ranges(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
    """Masked attention in the inputs' own dtype."""
    key = torch.arange(k.shape[2], device=k.device)
    seen = ((key >= ranges[..., :1]) & (key < ranges[..., 1:])).any(3)[:, :, :, None]
    s = torch.einsum("bsghd,bgld->bsghl", q, k) / math.sqrt(q.shape[-1])
    s = s.masked_fill(~seen, torch.finfo(q.dtype).min)
    return torch.einsum("bsghl,bgld->bsghd", torch.softmax(s, -1) * seen, v)


def oracle_ranges(q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor:
    """The fp64 oracle in the wrapper's layout."""
    out = oracle.selection_attention(q.flatten(2, 3), k.transpose(1, 2), v.transpose(1, 2), ranges)
    return out.unflatten(2, q.shape[2:4])


def gradients(run: Callable, tensors: Sequence[Tensor], grad_out: Tensor | None) -> list[Tensor]:
    """[out, *gradients] of run on fresh leaves; zeros where nothing depends on an input. Without
    grad_out the output alone."""
    if grad_out is None:
        return [run(*tensors)]
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = run(*leaves)
    if not out.requires_grad:
        return [out, *map(torch.zeros_like, tensors)]
    grad_out = grad_out.to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out, materialize_grads=True)]


def check(
    case: str, tensors: Sequence[Tensor], ranges: Tensor, *, grad_out: Tensor | None = None,
    run: Callable | None = None, exact: Callable = oracle_ranges, kernels: Sequence[str] = (),
    route: str = "triton", **how,
) -> list[Tensor]:  # fmt: skip
    """[out, *gradients if grad_out is given] of `run` (the kernels, called with `how`), each held
    to `exact` in fp64 beside masked attention in the same dtype."""
    run = run or (lambda *x: selection_ranges_triton(*x, ranges, **how))
    with launches.recording() as launched, dispatch.trace() as taken:
        got = gradients(run, tensors, grad_out)
    wide = [x.double() for x in tensors]
    want = gradients(lambda *x: exact(*x, ranges), wide, grad_out)
    same = gradients(lambda *x: plain_ranges(*x, ranges), tensors, grad_out)
    for op, a, b, c in zip(("fwd", "dq", "dk", "dv"), got, want, same, strict=False):
        limit = MAE_LIMIT[a.dtype]
        if op in ("dq", "dk") and b.abs().max() < 1e-12:
            # One key per row: dP - delta cancels, here up to the order of two fp32 sums.
            assert a.abs().max() <= 1e-5, f"{case} {op} must vanish"
            continue
        if op != "fwd":  # gradients grow with the rows that share a key
            limit = max(limit, 2 * (c.double() - b.double()).abs().mean().item())
        assert_parity(
            case, op, a, b, c, path_requested=route, launches=launched, limit_mae=limit,
            path_taken=taken[-1].route.value if taken else route,
            fallback_reason=taken[-1].fallback_reason if taken else None,
            expect_kernels=(*kernels, *(BACKWARD if grad_out is not None else ())),
        )  # fmt: skip
    return got
