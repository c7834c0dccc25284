"""Selection attention on Triton: selection_attention_triton(), a fallback ladder of its own.

Triton is imported when a Triton path really runs, so importing this package needs PyTorch only.
"""

from __future__ import annotations

from torch import Tensor

from nsa import dispatch, rungs, settled
from nsa.checks import scale_of
from nsa.flags import Flags
from nsa.kernels.triton_sel_kernel.by_ranges import check, planned, selection_ranges_triton
from nsa.routes import Backend, Branch, Route

__all__ = ["selection_attention_triton", "selection_ranges_triton"]


def selection_attention_triton(
    Q: Tensor, K: Tensor, V: Tensor, ranges: Tensor, *, softmax_scale: float | None = None,
    path: str | None = None, flags: Flags | None = None, backend: Backend | Route | None = None,
) -> Tensor:  # fmt: skip
    """Softmax attention over the union of each row's ranges (paper 3.3.2), with fallback.

    Q [B, S, G, h, Dk], K [B, G, Skv, Dk], V [B, G, Skv, Dv], ranges int32 or int64
    [B, S, G, n, 2] as [start, end): clamped to [0, Skv), inverted ones dropped, overlaps counted
    once. Returns [B, S, G, h, Dv] in Q's dtype; a row without keys gives 0 and zero gradients.
    softmax_scale defaults to 1/sqrt(Dk). path: None (chosen), "ranges", "dense" or "varlen".

    backend None follows flags and policy down to packed SDPA and the PyTorch reference, logging
    `sel.triton.fallback reason=` (see nsa.dispatch.REASONS); "triton" runs that or raises
    RouteUnavailable. NSA_SEL_TRITON_MIN_L is compared with Skv, the most that a row may have.
    Raises TypeError or ValueError for inputs of the wrong kind or shape.
    """
    tensors = (Q, K, V, ranges)
    settled_by = settled.key_of(tensors, flags, "wrapper", softmax_scale, path, backend)
    if (out := settled.again(settled_by, *tensors)) is not None:
        return out
    check(Q, K, V, ranges, path)
    softmax_scale = scale_of(softmax_scale, Q.shape[-1])
    flags = dispatch.resolve_flags(flags, Q)
    args = dict(
        q=Q.flatten(2, 3), k=K.transpose(1, 2), v=V.transpose(1, 2), block_indices=None,
        ranges=ranges, path=path, q_start=0, softmax_scale=softmax_scale, cu_seqlens=None,
        max_seqlen=None, return_lse=False,
    )  # fmt: skip
    out, decision = dispatch.run(
        Branch.SELECTED, rungs.SELECTED, args, flags, backend, key_len=K.shape[2]
    )
    if settled_by is not None and path is None and decision.route is Route.TRITON:
        settled.keep(settled_by, planned(Q, K, V, ranges, softmax_scale, flags))
    return out.unflatten(2, Q.shape[2:4])
