"""Selection attention by block indices as an operator with autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.checks import needs_grad, scale_of
from nsa.kernels.launch import packed_ends
from nsa.kernels.operator import operator
from nsa.kernels.prefill.blocks.ascending import ascending
from nsa.kernels.prefill.limits import check_block_size, check_heads
from nsa.layouts import outside, seen_rows, token_positions


def sequence_begins(cu_seqlens: Tensor | None, tokens: int) -> Tensor | None:
    """int32 [T]: the first row of each packed token's sequence, or of the rows that belong to none;
    None for dense inputs."""
    if cu_seqlens is None:
        return None
    from nsa.kernels.prefill.packs import token_sequences

    return token_sequences(cu_seqlens, tokens)[1]


@operator("nsa::block_attention")
def _block_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int, softmax_scale: float,
    cu_seqlens: Tensor | None, max_seqlen: int, q_start: int, use_gluon: bool | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse, which has a gradient where it is asked for by return_lse."""
    from nsa.kernels.prefill.blocks.fwd_triton import block_attention_fwd

    return block_attention_fwd(
        q, k, v, block_indices, block_size=block_size, softmax_scale=softmax_scale,
        seq_begin=sequence_begins(cu_seqlens, q.shape[0]), cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen, q_start=q_start, use_gluon=use_gluon,
    )  # fmt: skip


@_block_attention.register_fake
def _(q, k, v, block_indices, block_size, softmax_scale, cu_seqlens, max_seqlen, q_start,
      use_gluon=None, return_lse=False):  # fmt: skip
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


@operator("nsa::block_attention_bwd")
def _block_attention_bwd(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    block_indices: Tensor, block_size: int, softmax_scale: float, cu_seqlens: Tensor | None,
    q_start: int, use_gluon: bool | None = None, grad_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from nsa.kernels.prefill.blocks.bwd_triton import block_attention_bwd

    return block_attention_bwd(
        grad_out.contiguous(), q, k, v, out, lse, block_indices, block_size=block_size,
        softmax_scale=softmax_scale, seq_begin=sequence_begins(cu_seqlens, q.shape[0]),
        cu_seqlens=cu_seqlens, q_start=q_start, use_gluon=use_gluon,
        grad_lse=None if grad_lse is None else grad_lse.contiguous(),
    )  # fmt: skip


@_block_attention_bwd.register_fake
def _(grad_out, q, k, v, out, lse, block_indices, block_size, softmax_scale, cu_seqlens, q_start,
      use_gluon=None, grad_lse=None):  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx, inputs, output):
    q, k, v, block_indices, block_size, softmax_scale, cu_seqlens, _, *rest, return_lse = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse, block_indices, cu_seqlens)
    ctx.scalars = (block_size, softmax_scale)
    ctx.rest = rest  # q_start, use_gluon
    if not return_lse:
        ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    if grad_out is None and grad_lse is None:
        return (None,) * 11
    q, k, v, out, lse, block_indices, cu_seqlens = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    dq, dk, dv = _block_attention_bwd(
        grad_out, q, k, v, out, lse, block_indices, *ctx.scalars, cu_seqlens, *ctx.rest, grad_lse
    )
    return dq, dk, dv, *(None,) * 8


_block_attention.register_autograd(_backward, setup_context=_setup_context)


def _in_own_sequence(block_indices: Tensor, block_size: int, cu_seqlens: Tensor) -> Tensor:
    """Packed block indices with -1 for blocks after the query, where the next sequence may be, and
    for all of rows that belong to no sequence."""
    own = token_positions(block_indices, cu_seqlens) // block_size
    own = own.masked_fill(outside(cu_seqlens, len(own)), -1)
    return block_indices.masked_fill(block_indices > own[:, None, None], -1)


def selection_blocks_triton(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *, block_size: int,
    softmax_scale: float | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, q_start: int = 0, is_ascending: bool = False,
    use_gluon: bool | None = None, return_lse: bool = False, n_blocks: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over the selected blocks of each query and group, cut after the query (Eq. 12).

    q [B, S, HQ, Dk], k [B, N, G, Dk], v [B, N, G, Dv], block_indices [B, S, G, n], int32 or int64:
    any order, repetitions count once, -1 is none; query s stands at key q_start + s < N.
    Packed without B, with int32 cu_seqlens; max_seqlen says whether there are long sequences.
    block_size: 16, 32 or a multiple of 64. use_gluon: Flags.use_gluon, by default this process's.
    Returns [.., HQ, Dv] in q's dtype (fp16, bf16 or fp32), differentiable in q, k, v; a row without
    keys gives 0, as one of no sequence does. return_lse: also the natural-log lse, fp32 [.., HQ],
    differentiable too, -inf for such a row. is_ascending: the rows are int32 and known to be
    ascending, without repetitions, packed ones without blocks after the query, and -1 last, as
    select_blocks_triton leaves them; else n_blocks stops the GPU at an index that is not below it.
    Raises NotImplementedError for another block_size and for
    more heads per KV group than limits.most_heads.
    """
    from nsa.kernels.prefill.head_padding import Padding

    check_block_size("block_size", block_size)
    check_heads(q, k, v)
    more = Padding.of(q, k, v, needs_grad(q, k, v), use_gluon)
    k, v = (seen_rows(x, q_start + q.shape[1], cu_seqlens) for x in (k, v))
    scale = scale_of(softmax_scale, q.shape[-1])
    if not is_ascending:
        if cu_seqlens is not None:
            block_indices = _in_own_sequence(block_indices, block_size, cu_seqlens)
        block_indices = ascending(block_indices, n_blocks)
    out, lse = _block_attention(
        more.add(q).contiguous(), k.contiguous(), v.contiguous(), block_indices.contiguous(),
        block_size, scale, *packed_ends(cu_seqlens), max_seqlen or 0, q_start, use_gluon,
        return_lse,
    )  # fmt: skip
    out = more.cut(out, -2)
    return (out, more.cut(lse, -1)) if return_lse else out
