"""The choice of blocks as an operator."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.checks import assert_longest, scale_of
from nsa.kernels.launch import packed_ends
from nsa.kernels.operator import operator


@operator("nsa::block_select")
def _block_select(
    q: Tensor, k_cmp: Tensor, lse: Tensor, l: int, d: int, l_sel: int, n_sel: int, n_init: int,
    n_local: int, softmax_scale: float, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int,
    q_start: int, use_gluon: bool | None = None,
) -> Tensor:  # fmt: skip
    from nsa.kernels.prefill.choice.score_topn_triton import block_select

    return block_select(
        q, k_cmp, lse, l=l, d=d, l_sel=l_sel, n_sel=n_sel, n_init=n_init, n_local=n_local,
        softmax_scale=softmax_scale, cu_q=cu_q, cu_k=cu_k, max_q=max_q, q_start=q_start,
        use_gluon=use_gluon,
    )  # fmt: skip


@_block_select.register_fake
def _(q, k_cmp, lse, l, d, l_sel, n_sel, n_init, n_local, softmax_scale, cu_q, cu_k, max_q,
      q_start, use_gluon=None):  # fmt: skip
    return q.new_empty(*q.shape[:-2], k_cmp.shape[-2], n_sel, dtype=torch.int32)


def select_blocks_triton(
    q: Tensor, k_cmp: Tensor, lse: Tensor, *, l: int, d: int, l_sel: int, n_sel: int,
    n_init: int = 1, n_local: int = 2, softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None, cu_seqlens_cmp: Tensor | None = None,
    max_seqlen: int | None = None, q_start: int = 0, use_gluon: bool | None = None,
) -> Tensor:  # fmt: skip
    """Top-n selection blocks per query and group (Eq. 9 to 11), int32 [.., G, n_sel], -1 padded.

    lse is what compressed_attention_triton returned for the same q and k_cmp. Ascending indices;
    the own block, the n_local - 1 before it and the first n_init are always chosen. Packed: no
    sequence may be longer than max_seqlen, by which the memory for scores goes. use_gluon:
    Flags.use_gluon, by default this process's.
    """
    if cu_seqlens is not None:
        assert_longest(cu_seqlens, min(max_seqlen or 0, q.shape[0]))
    return _block_select(
        q.detach().contiguous(), k_cmp.detach().contiguous(), lse.detach().float().contiguous(), l,
        d, l_sel, n_sel, n_init, n_local, scale_of(softmax_scale, q.shape[-1]),
        *packed_ends(cu_seqlens, cu_seqlens_cmp), max_seqlen or 0, q_start, use_gluon,
    )  # fmt: skip
