"""The rotary turn of a layer's projections as an operator with autograd."""

from __future__ import annotations

from torch import Tensor

from nsa.kernels.operator import operator


@operator("nsa::turn")
def _split_turned(
    qkv: Tensor, positions: Tensor, heads: int, groups: int, d_k: int, d_v: int, rope_base: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from nsa.kernels.prefill.turn_split import turn_split

    parts = _split_turned_like(qkv, positions, heads, groups, d_k, d_v, rope_base)
    turn_split(qkv, positions, parts, rope_base, backward=False)
    return parts


@_split_turned.register_fake
def _split_turned_like(qkv, positions, heads, groups, d_k, d_v, rope_base):
    make = lambda *tail: qkv.new_empty(*qkv.shape[:-1], *tail)
    kv = lambda: (make(groups, d_k), make(groups, d_v))
    return (make(heads, d_k), *kv(), *kv(), *kv())


@operator("nsa::turn_bwd")
def _split_turned_bwd(
    dq: Tensor, dk_cmp: Tensor, dv_cmp: Tensor, dk_sel: Tensor, dv_sel: Tensor, dk_win: Tensor,
    dv_win: Tensor, positions: Tensor, rope_base: float,
) -> Tensor:  # fmt: skip
    from nsa.kernels.prefill.turn_split import turn_split

    parts = dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win
    dqkv = _gradient_like(*parts, positions, rope_base)
    parts = tuple(x.contiguous() for x in parts)
    turn_split(dqkv, positions, parts, rope_base, backward=True)
    return dqkv


@_split_turned_bwd.register_fake
def _gradient_like(*parts_and_more):
    *parts, _, _ = parts_and_more
    width = sum(x.shape[-2] * x.shape[-1] for x in parts)
    return parts[0].new_empty(*parts[0].shape[:-2], width)


def _setup_context(ctx, inputs, output):
    _, positions, *_, rope_base = inputs
    ctx.save_for_backward(positions)
    ctx.rope_base = rope_base


def _backward(ctx, *grads):
    (positions,) = ctx.saved_tensors
    return _split_turned_bwd(*grads, positions, ctx.rope_base), *(None,) * 6


_split_turned.register_autograd(_backward, setup_context=_setup_context)


def split_turned_triton(
    qkv: Tensor, positions: Tensor, *, heads: int, groups: int, d_k: int, d_v: int, rope_base: float
) -> tuple[Tensor, ...]:
    """q [.., S, heads, d_k], then k [.., S, groups, d_k] and v [.., S, groups, d_v] of cmp, sel and
    win, all contiguous, of qkv [.., S, heads * d_k + 3 * groups * (d_k + d_v)].

    Pairs (x[i], x[i + d_k / 2]) of queries and keys turn by positions * rope_base^(-2i / d_k);
    positions: integers [S]. Differentiable in qkv.
    """
    return _split_turned(
        qkv.contiguous(), positions.contiguous(), heads, groups, d_k, d_v, float(rope_base)
    )
