"""All of NSA's prefill in one operator: three branches, the choice of blocks and the gated sum.

Forward: compressed attention (its log-sum-exp serves the choice of blocks), block choice, selected
and sliding attention, one pass for the gated sum; on Hopper the sum is taken by the kernels that
make its parts, compressed and sliding attention are one kernel where no backward follows, and
compressed attention may find the blocks' scores (hopper.forward_with_scores).
Backward: one pass gives the gates' gradients and each branch's softmax delta, and folds the gates
into the log-sum-exps, so that gate * dO is never written (combine.py, gate_sign.py); the branches
add to one fp32 dQ, selection to one in fp16 where that is faster (sums.py); their sum is rounded
once.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from nsa.arrival import await_selection
from nsa.blocks import num_compressed
from nsa.checks import assert_longest, needs_grad, scale_of
from nsa.kernels.launch import lane, packed_ends
from nsa.kernels.operator import operator
from nsa.kernels.prefill import hopper
from nsa.kernels.prefill.blocks.ops import sequence_begins
from nsa.kernels.prefill.limits import check_block_size
from nsa.kernels.prefill.packs import inside_pack
from nsa.kernels.prefill.span.kinds import COMPRESSED, SLIDING, Span
from nsa.layouts import seen_rows

CMP, SEL, WIN = range(3)  # columns of the gates


def _sizes(sizes: list[int]) -> dict[str, int]:
    return dict(zip(("l", "d", "l_sel", "n_sel", "n_init", "n_local"), sizes[:6], strict=True))


def _whole(
    s: dict[str, int], q: Tensor, cu_seqlens: Tensor | None, max_seqlen: int, q_start: int
) -> Span | None:
    """Return a window that leaves nothing out where every query has so few blocks that it chooses
    all of them: selection is dense attention there. None elsewhere."""
    longest = q.shape[1] if cu_seqlens is None else min(max_seqlen, q.shape[0])
    room = s["n_sel"] * s["l_sel"]
    return Span(SLIDING, room) if q_start + longest <= room else None


def _of_pack(
    s: dict[str, int], gates: Tensor, cu_seqlens: Tensor | None, max_seqlen: int
) -> tuple[Tensor, Tensor | None]:
    """The gates that count, and where compressed keys of a pack's sequences begin."""
    if cu_seqlens is None:
        return gates, None
    return inside_pack(gates, cu_seqlens, s["l"], s["d"], min(max_seqlen, gates.shape[0]))


def _window_start(q: Tensor, k_win: Tensor, cu_seqlens: Tensor | None) -> int:
    """Row of k_win where query 0 stands: it may hold the window's keys only."""
    return 0 if cu_seqlens is not None else k_win.shape[1] - q.shape[1]


@operator("nsa::prefill")
def _prefill(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor,
    v_win: Tensor, gates: Tensor, sizes: list[int], softmax_scale: float,
    cu_seqlens: Tensor | None, max_seqlen: int, q_start: int, use_gluon: bool | None = None,
    for_backward: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out, block_indices, the three branches' outputs and their log-sum-exps (sizes: as _sizes,
    then the window, then how many heads of a group choose blocks). Without for_backward the
    branches' outputs are empty, and all log-sum-exps but the first."""
    from nsa.kernels.prefill.blocks.fwd_triton import gated_block_attention_fwd
    from nsa.kernels.prefill.choice.score_topn_triton import Ranking, block_select, every_block
    from nsa.kernels.prefill.combine import combine_fwd
    from nsa.kernels.prefill.head_padding import hide_heads
    from nsa.kernels.prefill.span.fwd_triton import span_attention_fwd

    s, heads = _sizes(sizes), sizes[7]
    gates, cu_seqlens_cmp = _of_pack(s, gates, cu_seqlens, max_seqlen)
    compressed, sliding = Span(COMPRESSED, s["l"], s["d"]), Span(SLIDING, sizes[6])
    win_start = _window_start(q, k_win, cu_seqlens)
    seq_begin = sequence_begins(cu_seqlens, q.shape[0])
    whole = _whole(s, q, cu_seqlens, max_seqlen, q_start)
    # Only a backward needs the outputs of both apart.
    pair = None if for_backward else hopper.forward_pair(q, k_cmp, v_cmp, k_win, v_win, use_gluon)
    scoring = not whole and hopper.forward_with_scores(
        q, k_cmp, v_cmp, s["l"], s["d"], s["l_sel"], cu_seqlens is not None, use_gluon
    )
    ranking = slabs = None
    if whole or scoring:
        ranking = Ranking.of(
            q, k_cmp, **s, cu_q=cu_seqlens, cu_k=cu_seqlens_cmp, max_q=max_seqlen, q_start=q_start
        )
    if scoring:
        slabs = ranking.slabs(*scoring.scores_tile(q.shape[-2] // k_cmp.shape[-2]))
    o_win = lse_win = None
    with lane():
        if pair:
            o_cmp, lse_cmp = pair.span_pair_fwd_hopper(
                q, k_cmp, v_cmp, k_win, v_win, gates, compressed, sliding, softmax_scale,
                cu_seqlens, cu_seqlens_cmp, q_start, win_start, slabs, heads,
            )  # fmt: skip
        else:
            o_cmp, lse_cmp = span_attention_fwd(
                q, k_cmp, v_cmp, compressed, softmax_scale, cu_seqlens, cu_seqlens_cmp, q_start,
                use_gluon, slabs, heads,
            )  # fmt: skip
        if scoring:
            block_indices = ranking.out
        elif whole:
            block_indices = every_block(ranking, seq_begin)
        else:
            if heads * k_cmp.shape[-2] < q.shape[-2]:
                hide_heads(lse_cmp, k_cmp.shape[-2], heads)
            block_indices = block_select(
                q, k_cmp, lse_cmp, **s, softmax_scale=softmax_scale, cu_q=cu_seqlens,
                cu_k=cu_seqlens_cmp, max_q=max_seqlen, q_start=q_start, use_gluon=use_gluon,
            )  # fmt: skip
    if not pair:
        with lane():
            o_win, lse_win = span_attention_fwd(
                q, k_win, v_win, sliding, softmax_scale, cu_seqlens, cu_seqlens, win_start,
                use_gluon,
            )  # fmt: skip
    await_selection()
    others = (o_cmp, o_win, gates)
    if whole:
        o_sel, lse_sel = span_attention_fwd(
            q, k_sel, v_sel, whole, softmax_scale, cu_seqlens, cu_seqlens, q_start, use_gluon
        )
        out = combine_fwd(o_sel, others, into=None if for_backward else o_sel)
    else:
        o_sel, lse_sel, out = gated_block_attention_fwd(
            q, k_sel, v_sel, block_indices, others, block_size=s["l_sel"],
            softmax_scale=softmax_scale, seq_begin=seq_begin, cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen, q_start=q_start, use_gluon=use_gluon, keep=for_backward,
        )  # fmt: skip
    if not for_backward:
        o_cmp, o_sel, o_win = (q.new_empty(0) for _ in range(3))
        lse_sel, lse_win = lse_cmp.new_empty(0), lse_cmp.new_empty(0)
    return out, block_indices, o_cmp, o_sel, o_win, lse_cmp, lse_sel, lse_win


@_prefill.register_fake
def _(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, sizes, softmax_scale, cu_seqlens,
      max_seqlen, q_start, use_gluon=None, for_backward=True):  # fmt: skip
    out = lambda: q.new_empty(*q.shape[:-1], v_cmp.shape[-1])
    lse = lambda: q.new_empty(q.shape[:-1], dtype=torch.float32)
    blocks = q.new_empty(*q.shape[:-2], k_cmp.shape[-2], sizes[3], dtype=torch.int32)
    if not for_backward:
        none = lambda: q.new_empty(0)
        return out(), blocks, none(), none(), none(), lse(), none().float(), none().float()
    return out(), blocks, out(), out(), out(), lse(), lse(), lse()


@operator("nsa::prefill_bwd")
def _prefill_bwd(
    grad_out: Tensor, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor,
    k_win: Tensor, v_win: Tensor, gates: Tensor, block_indices: Tensor, o_cmp: Tensor,
    o_sel: Tensor, o_win: Tensor, lse_cmp: Tensor, lse_sel: Tensor, lse_win: Tensor,
    sizes: list[int], softmax_scale: float, cu_seqlens: Tensor | None, max_seqlen: int,
    q_start: int, use_gluon: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from nsa.kernels.prefill.blocks.bwd_triton import block_attention_bwd
    from nsa.kernels.prefill.combine import combine_bwd
    from nsa.kernels.prefill.span.bwd_triton import one_pass, span_attention_bwd
    from nsa.kernels.prefill.sums import rounded

    s, sliding = _sizes(sizes), Span(SLIDING, sizes[6])
    gates, cu_seqlens_cmp = _of_pack(s, gates, cu_seqlens, max_seqlen)
    whole = _whole(s, q, cu_seqlens, max_seqlen, q_start)
    grad_out = grad_out.contiguous()
    of_window = one_pass(q, k_win, v_win, grad_out, use_gluon)
    make = torch.zeros if of_window else torch.empty
    acc = make(q.shape, dtype=torch.float32, device=q.device)  # dQ / softmax_scale
    any_negative = torch.zeros(1, dtype=torch.int32, device=q.device)  # of the gates
    dgates, deltas, lses, reach = combine_bwd(
        grad_out, (o_cmp, o_sel, o_win), (lse_cmp, lse_sel, lse_win), gates, any_negative,
        cu_seqlens,
    )  # fmt: skip
    of_compressed = one_pass(q, k_cmp, v_cmp, grad_out, use_gluon)
    if whole:
        of_selection = one_pass(q, k_sel, v_sel, grad_out, use_gluon)
    else:
        of_selection = hopper.block_backward(q, k_sel, v_sel, grad_out, s["l_sel"], use_gluon)
    # Kernels that add to dQ by atomics do so in any order, others one after another.
    by_atomics = of_window and of_compressed and of_selection
    beside = lane if by_atomics else contextlib.nullcontext
    with beside():
        _, dk_win, dv_win = span_attention_bwd(
            grad_out, q, k_win, v_win, o_win, lses[WIN], sliding, softmax_scale, cu_seqlens,
            cu_seqlens, delta=deltas[WIN], dq=acc, first=not of_window,
            q_start=_window_start(q, k_win, cu_seqlens), any_negative=any_negative,
            chosen=of_window,
        )  # fmt: skip
    with beside():
        if whole:
            of_sel, dk_sel, dv_sel = span_attention_bwd(
                grad_out, q, k_sel, v_sel, o_sel, lses[SEL], whole, softmax_scale, cu_seqlens,
                cu_seqlens, delta=deltas[SEL], dq=acc, q_start=q_start, any_negative=any_negative,
                chosen=of_selection,
            )  # fmt: skip
        else:
            of_sel, dk_sel, dv_sel = block_attention_bwd(
                grad_out, q, k_sel, v_sel, None, lses[SEL], block_indices, block_size=s["l_sel"],
                softmax_scale=softmax_scale, seq_begin=sequence_begins(cu_seqlens, q.shape[0]),
                cu_seqlens=cu_seqlens, delta=deltas[SEL], dq=acc, reach=reach, q_start=q_start,
                use_gluon=use_gluon, any_negative=any_negative,
            )  # fmt: skip
    with beside():
        _, dk_cmp, dv_cmp = span_attention_bwd(
            grad_out, q, k_cmp, v_cmp, o_cmp, lses[CMP], Span(COMPRESSED, s["l"], s["d"]),
            softmax_scale, cu_seqlens, cu_seqlens_cmp, delta=deltas[CMP], dq=acc, q_start=q_start,
            any_negative=any_negative, chosen=of_compressed,
        )  # fmt: skip
    dq = rounded(of_sel, softmax_scale, q, None if of_sel is acc else acc)
    return dq, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win, dgates


@_prefill_bwd.register_fake
def _(grad_out, q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, *rest):
    return tuple(torch.empty_like(x) for x in (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates))


def _setup_context(ctx, inputs, output):
    tensors, sizes, softmax_scale, cu_seqlens, *rest = inputs[:8], *inputs[8:]
    ctx.save_for_backward(*tensors, *output[1:], cu_seqlens)
    ctx.scalars = (sizes, softmax_scale)
    ctx.rest = rest[:3]  # max_seqlen, q_start, use_gluon
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # else each of these gets a gradient of zeros, 3 GiB at 64k


def _backward(ctx, grad_out, *unused):
    if grad_out is None:
        return (None,) * 15
    *saved, cu_seqlens = ctx.saved_tensors
    grads = _prefill_bwd(grad_out, *saved, *ctx.scalars, cu_seqlens, *ctx.rest)
    return (*grads, *(None,) * 7)


_prefill.register_autograd(_backward, setup_context=_setup_context)


def nsa_prefill_triton(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor,
    v_win: Tensor, gates: Tensor, *, l: int, d: int, l_sel: int, n_sel: int, n_init: int,
    n_local: int, window: int, softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, q_start: int = 0,
    use_gluon: bool | None = None,
) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """NSA of whole sequences or of a chunk (Eq. 5): out [.., HQ, Dv], {"block_indices", "lse"}.

    use_gluon: Flags.use_gluon, by default this process's.
    Shapes as for nsa.nsa_attention: query s stands at q_start + s, the last one at k_win's last
    key; packed inputs start at 0 and need max_seqlen too. Differentiable in every tensor but
    cu_seqlens. l_sel: 16, 32 or a multiple of 64. Raises NotImplementedError for others and
    for more heads per KV group than limits.most_heads.
    """
    from nsa.kernels.prefill.head_padding import Padding

    check_block_size("l_sel", l_sel)
    if cu_seqlens is not None and not cu_seqlens.is_cuda:  # where no kernel tells
        assert_longest(cu_seqlens, min(max_seqlen or 0, q.shape[0]))
    scale = scale_of(softmax_scale, q.shape[-1])
    trained = needs_grad(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    more = Padding.of(q, k_sel, v_sel, trained, use_gluon)
    q, gates = more.add(q), more.add(gates)
    end = q_start + q.shape[1]
    of_cmp = lambda x: seen_rows(x, num_compressed(end, l, d), cu_seqlens)
    of_sel = lambda x: seen_rows(x, end, cu_seqlens)
    tensors = (q, of_cmp(k_cmp), of_cmp(v_cmp), of_sel(k_sel), of_sel(v_sel), k_win, v_win, gates)
    out, block_indices, *_, lse, _, _ = _prefill(
        *(t.contiguous() for t in tensors),
        [l, d, l_sel, n_sel, n_init, n_local, window, more.heads], scale,
        *packed_ends(cu_seqlens), max_seqlen or 0, q_start, use_gluon, trained,
    )  # fmt: skip
    return more.cut(out, -2), {"block_indices": block_indices, "lse": more.cut(lse, -1)}
