"""Compressed and sliding attention as operators with autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.blocks import num_compressed
from nsa.checks import scale_of
from nsa.kernels.launch import packed_ends
from nsa.kernels.operator import operator
from nsa.kernels.prefill.span.kinds import COMPRESSED, SLIDING, Span
from nsa.layouts import seen_rows


@operator("nsa::span_attention")
def _span_attention(
    q: Tensor, k: Tensor, v: Tensor, mode: int, a: int, b: int, softmax_scale: float,
    cu_q: Tensor | None, cu_k: Tensor | None, q_start: int, use_gluon: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from nsa.kernels.prefill.span.fwd_triton import span_attention_fwd

    return span_attention_fwd(
        q, k, v, Span(mode, a, b), softmax_scale, cu_q, cu_k, q_start, use_gluon
    )


@_span_attention.register_fake
def _(q, k, v, mode, a, b, softmax_scale, cu_q, cu_k, q_start, use_gluon=None):
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


@operator("nsa::span_attention_bwd")
def _span_attention_bwd(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mode: int, a: int,
    b: int, softmax_scale: float, cu_q: Tensor | None, cu_k: Tensor | None, q_start: int,
    use_gluon: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from nsa.kernels.prefill.span.bwd_triton import span_attention_bwd

    return span_attention_bwd(
        grad_out.contiguous(), q, k, v, out, lse, Span(mode, a, b), softmax_scale, cu_q, cu_k,
        q_start=q_start, use_gluon=use_gluon,
    )  # fmt: skip


@_span_attention_bwd.register_fake
def _(grad_out, q, k, v, out, lse, mode, a, b, softmax_scale, cu_q, cu_k, q_start, use_gluon=None):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx, inputs, output):
    q, k, v, mode, a, b, softmax_scale, cu_q, cu_k, q_start, use_gluon = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
    ctx.scalars = (mode, a, b, softmax_scale)
    ctx.rest = (q_start, use_gluon)
    ctx.mark_non_differentiable(lse)  # it serves the choice of blocks, which has no gradient
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, _):
    if grad_out is None:
        return (None,) * 11
    q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
    dq, dk, dv = _span_attention_bwd(
        grad_out, q, k, v, out, lse, *ctx.scalars, cu_q, cu_k, *ctx.rest
    )
    return dq, dk, dv, *(None,) * 8


_span_attention.register_autograd(_backward, setup_context=_setup_context)


def compressed_attention_triton(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *, l: int, d: int, softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None, cu_seqlens_cmp: Tensor | None = None, q_start: int = 0,
    use_gluon: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over the compressed keys that query t may see (arXiv 2502.11089, Eq. 7 and 8).

    q [B, S, HQ, Dk], k_cmp [B, N, G, Dk], v_cmp [B, N, G, Dv]; packed: q [T, HQ, Dk], k_cmp
    [N_total, G, Dk] with int32 cu_seqlens (tokens) and cu_seqlens_cmp (compressed keys).
    Returns out (zeros where no key is visible) and natural-log lse fp32 [.., HQ] (-inf there).
    use_gluon: Flags.use_gluon, by default this process's.
    Query s stands at position q_start + s (q_start 0 for packed inputs). fp16, bf16 or fp32.
    Gradients flow through out to q, k_cmp, v_cmp; lse carries none. Raises NotImplementedError for
    more heads per KV group than limits.most_heads.
    """
    seen = num_compressed(q_start + q.shape[1], l, d)
    k_cmp, v_cmp = (seen_rows(x, seen, cu_seqlens) for x in (k_cmp, v_cmp))
    return _span_attention(
        q.contiguous(), k_cmp.contiguous(), v_cmp.contiguous(), COMPRESSED, l, d,
        scale_of(softmax_scale, q.shape[-1]), *packed_ends(cu_seqlens, cu_seqlens_cmp), q_start,
        use_gluon,
    )  # fmt: skip


def sliding_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None, q_start: int = 0, use_gluon: bool | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over keys max(0, t + 1 - window) .. t of query t = q_start + s; layouts and returns
    as for compressed."""
    return _span_attention(
        q.contiguous(), k.contiguous(), v.contiguous(), SLIDING, window, 1,
        scale_of(softmax_scale, q.shape[-1]), *packed_ends(cu_seqlens, cu_seqlens), q_start,
        use_gluon,
    )  # fmt: skip
