"""Selection by ranges on Triton, the rung: no policy and no fallback.

Paths:
  ranges  the kernels read K and V in place through the ranges (default);
  dense   every row has one range (n = 1): the dense kernels read it in place;
  varlen  rows are packed by buckets of length: the dense kernel where a bucket's rows agree in
          length, else the varlen kernel.
The backward is the same for all: it reads K and V through the ranges.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa import log
from nsa.checks import needs_grad, scale_of
from nsa.device import log_device, resolve_flags
from nsa.flags import Flags
from nsa.kernels.triton_sel_kernel.inputs import check_qkv, check_tensor, units_of_8
from nsa.packing import length_buckets, packed_positions
from nsa.routes import RouteUnavailable
from nsa.select import clean_ranges, range_lengths
from nsa.transforms import once

TIMING = "sel.triton.bucket_timing"
PATHS = ("ranges", "dense", "varlen")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def selection_ranges_triton(
    Q: Tensor, K: Tensor, V: Tensor, ranges: Tensor, *, softmax_scale: float | None = None,
    path: str | None = None, flags: Flags | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """The Triton rung of selection_attention_triton alone: no policy, no fallback.

    Takes fp16, bf16 and fp32. K and V may have any strides that are multiples of 8 elements;
    others are copied. return_lse: also the natural-log lse, fp32 [B, S, G, h], -inf for a row
    without keys. Differentiable in Q, K and V. Raises RouteUnavailable for head sizes that have no
    kernel.
    """
    check(Q, K, V, ranges, path)
    flags = resolve_flags(flags, Q)
    d, dv = Q.shape[-1], V.shape[-1]
    if d % 8 or dv % 8:
        raise RouteUnavailable("triton", "align8", f"got Dk={d} Dv={dv}")
    if max(d, dv) > 256:
        raise RouteUnavailable("triton", "head_dim", f"got Dk={d} Dv={dv}, at most 256")
    log_device(Q.device, flags)
    path = path or ("dense" if ranges.shape[3] == 1 else "ranges")
    if path == "dense" and ranges.shape[3] != 1:
        raise ValueError(f"path 'dense' needs one range per row, got n = {ranges.shape[3]}")
    log.log("sel.triton.path", flags=flags, path=path, rows=Q.shape[:3].numel(), H=Q.shape[3],
            n=ranges.shape[3], Skv=K.shape[2])  # fmt: skip
    if log.enabled("sel.triton.reads", flags) and not log.capturing(ranges):
        log.log("sel.triton.reads", flags=flags, tokens=_tokens(ranges, K.shape[2]),
                rows=Q.shape[:3].numel())  # fmt: skip
    scale = scale_of(softmax_scale, d)
    if needs_grad(Q, K, V):
        out, lse = _Selection.apply(Q, K, V, ranges, scale, path, flags)
    else:
        out, lse = _forward(Q, K, V, ranges, scale, path, flags, keep_lse=return_lse)
    return (out, lse) if return_lse else out


def planned(
    q: Tensor, K: Tensor, V: Tensor, ranges: Tensor, scale: float, flags: Flags,
    return_lse: bool = False,
) -> Callable[..., Any] | None:  # fmt: skip
    """The launch of selection_ranges_triton() for tensors of these sizes, types, strides and
    device as a function of (q, k, v, ranges) alone; it gives None for those that do not begin at
    16 bytes. q [B, S, G, h, Dk] or [B, S, G * h, Dk]. None where something has to be copied."""
    from nsa.kernels.triton_sel_kernel import in_place

    n = ranges.shape[3]
    if not (q.is_contiguous() and ranges.is_contiguous()):
        return None
    strides = [units_of_8(x) for x in (K, V)]
    if any(x is not y for (x, _), y in zip(strides, (K, V), strict=True)):
        return None
    plan = in_place.plan_in_place(
        q.shape, q.dtype, q.device, K.shape[2], V.shape[3], n, strides[0][1], strides[1][1],
        K.shape[1], scale, n == 1, return_lse, flags,
    )  # fmt: skip
    if return_lse:
        return functools.partial(in_place.in_place, plan=plan)
    return functools.partial(in_place.output, plan)


def _tokens(ranges: Tensor, n_keys: int) -> int:
    """Selected tokens, summed over rows. Waits for the device."""
    return int(range_lengths(clean_ranges(ranges, n_keys)).sum())


def check(Q: Tensor, K: Tensor, V: Tensor, ranges: Tensor, path: str | None) -> None:
    """Raise TypeError or ValueError that names the argument of selection_attention_triton()."""
    if path is not None and path not in PATHS:
        raise ValueError(f"path must be None or one of {', '.join(PATHS)}, got {path!r}")
    check_qkv(
        _DTYPES, Q=(Q, "[B, S, G, h, Dk]"), K=(K, "[B, G, Skv, Dk]"), V=(V, "[B, G, Skv, Dv]")
    )
    check_tensor("ranges", ranges, "[B, S, G, n, 2]", (torch.int32, torch.int64), Q.device)
    B, S, G, _, d = Q.shape
    if not G or not d:
        raise ValueError(f"Q must have at least one group and head size, got {list(Q.shape)}")
    if K.shape[:2] != (B, G) or K.shape[3] != d:
        raise ValueError(f"K must be [{B}, {G}, Skv, {d}], got {list(K.shape)}")
    if V.shape[:3] != K.shape[:3]:
        raise ValueError(f"V must be [{B}, {G}, {K.shape[2]}, Dv], got {list(V.shape)}")
    if ranges.shape[:3] != (B, S, G) or ranges.shape[4] != 2:
        raise ValueError(f"ranges must be [{B}, {S}, {G}, n, 2], got {list(ranges.shape)}")


class _Selection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, Q: Tensor, K: Tensor, V: Tensor, ranges: Tensor, scale: float, path: str,
        flags: Flags,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        Q = Q.contiguous()
        out, lse = _forward(Q, K, V, ranges, scale, path, flags)
        ctx.save_for_backward(Q, K, V, ranges, out, lse)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        from nsa.kernels.triton_sel_kernel.sel_bwd import sel_bwd_ranges
        from nsa.kernels.triton_sel_kernel.spans import clean_spans

        if grad_out is None and grad_lse is None:
            return (None,) * 7
        Q, K, V, ranges, out, lse = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        starts, cum = clean_spans(ranges, K.shape[2])
        dq, dk, dv = sel_bwd_ranges(
            Q, K, V, starts, cum, out, lse, grad_out, ctx.scale, grad_lse=grad_lse,
            needs_kv=ctx.needs_input_grad[1] or ctx.needs_input_grad[2],
        )  # fmt: skip
        return dq, dk, dv, None, None, None, None


def _forward(
    Q: Tensor, K: Tensor, V: Tensor, ranges: Tensor, scale: float, path: str, flags: Flags, *,
    keep_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, lse if it is kept) by one of PATHS."""
    from nsa.kernels.triton_sel_kernel.in_place import sel_fwd_in_place

    if path == "varlen":
        return _forward_varlen(Q.contiguous(), K, V, ranges, scale, flags)
    elements = lambda: _tokens(ranges, K.shape[2]) * (K.shape[3] + V.shape[3])
    with log.timed(TIMING, K, flags, elements, bucket=path):
        return sel_fwd_in_place(
            Q, K, V, ranges, scale, single=path == "dense", keep_lse=keep_lse, flags=flags
        )


def _forward_varlen(
    Q: Tensor, K: Tensor, V: Tensor, ranges: Tensor, scale: float, flags: Flags
) -> tuple[Tensor, Tensor]:
    """Gather the selected keys of each bucket of rows and run a packed kernel on it."""
    from nsa.kernels.triton_sel_kernel.sel_fwd import sel_attn_fwd_dense, sel_attn_fwd_varlen

    B, S, G, H, D = Q.shape
    clean = clean_ranges(ranges, K.shape[2]).view(B * S * G, ranges.shape[3], 2)
    lengths = range_lengths(clean)
    q = Q.view(-1, H, D)
    out = q.new_zeros(q.shape[0], H, V.shape[-1])
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=Q.device)
    how: dict[str, Any] = dict(
        softmax_scale=scale, return_lse=True, flags=flags, group=flags.sel_triton_group
    )
    for size, rows in length_buckets(lengths).items():
        if size == 0:
            continue
        with log.timed("sel.triton.pack", K, flags, bucket=size, rows=len(rows)):
            key, owner, length = packed_positions(clean[rows])
            row = rows[owner]
            b, g = row // (S * G), row % G
            k, v = K[b, g, key], V[b, g, key]
        cu = torch.nn.functional.pad(length.cumsum(0), (1, 0)).to(torch.int32)
        same = int(length.min()) == int(length.max())
        bucket, read = f"{'dense' if same else 'varlen'}_{size}", k.numel() + v.numel()
        with log.timed(TIMING, K, flags, lambda n=read: n, bucket=bucket):
            if same:
                k, v = (x.view(len(rows), -1, x.shape[-1]) for x in (k, v))
                o, e = sel_attn_fwd_dense(q[rows], k, v, **how)
            else:
                o, e = sel_attn_fwd_varlen(q[rows], k, v, cu, max_len=size, **how)
        out[rows], lse[rows] = o, e
    return out.view(B, S, G, H, V.shape[-1]), lse.view(B, S, G, H)
