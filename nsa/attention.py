"""Public functions, flash-attn layout: nsa_attention and its branches, checked and dispatched.

Dense: q [B, S, HQ, Dk], k [B, N, G, Dk], v [B, N, G, Dv]; query head j reads group j // (HQ // G).
Packed: q [T, HQ, Dk] with cu_seqlens int32 [nseq + 1] (0 first, not decreasing, T or less last);
k and v without the batch dimension too. Rows past the last sequence, which belong to none, give 0
and get no gradient. softmax_scale is 1/sqrt(Dk) unless given.

backend: None or "auto" follows flags and policy and falls back; "triton", "fa2", "sdpa" and
"reference" run exactly that or raise nsa.RouteUnavailable with the reason. flags: an nsa.Flags
instead of this process's environment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa import arguments, dispatch, failed, rungs, settled
from nsa.arrival import await_selection
from nsa.blocks import is_symbol, num_compressed, smaller
from nsa.cache import BranchKV, NSACache
from nsa.checks import needs_grad, scale_of
from nsa.compress import mean_pool
from nsa.config import (
    NSAConfig,
    check_blocks,
    check_choice,
    check_compression,
    check_int,
    check_sizes,
)
from nsa.dispatch import Backend, Branch, Route
from nsa.errors import told
from nsa.flags import Flags
from nsa.layouts import first_slots, gates_inside, seen_rows
from nsa.log import log
from nsa.transforms import refuse_vmap, transformable
from nsa.untraced import untraced


@transformable
def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *, l: int = 32, d: int = 16, q_start: int = 0,
    softmax_scale: float | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, backend: Backend | None = None, flags: Flags | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over compressed keys whose block ends at or before the query (Eq. 7 and 8).

    k_cmp [B, Nc, G, Dk], v_cmp [B, Nc, G, Dv] (see nsa/compress.py); packed ones follow the
    sequences. Query s stands at position q_start + s. Returns out [B, S, HQ, Dv] and natural-log
    lse [B, S, HQ], fp32 (fp64 for fp64), which has no gradient on any route; a query that sees no
    key has 0 and -inf.

    >>> from nsa.compress import mean_pool
    >>> q, k, v = torch.randn(1, 96, 4, 16), torch.randn(1, 96, 2, 16), torch.randn(1, 96, 2, 8)
    >>> out, lse = compressed_attention(q, mean_pool(k, 32, 16), mean_pool(v, 32, 16), l=32, d=16)
    >>> list(out.shape), list(lse.shape)
    ([1, 96, 4, 8], [1, 96, 4])
    >>> (lse > float("-inf"))[0, :, 0].nonzero()[0].item()  # the first query behind a whole block
    31
    """
    arguments.check_tensors(q, k_cmp, v_cmp, cu_seqlens, "_cmp")
    check_compression(l, d)
    max_seqlen = arguments.check_packed(cu_seqlens, max_seqlen, q, q_start)
    arguments.check_compressed_count(k_cmp, q, l, d, q_start, cu_seqlens)
    flags = dispatch.resolve_flags(flags, q)
    args = dict(
        q=q, k=k_cmp, v=v_cmp, l=l, d=d, q_start=q_start,
        softmax_scale=scale_of(softmax_scale, q.shape[-1]), cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
    )  # fmt: skip
    longest = q_start + q.shape[1] if max_seqlen is None else max_seqlen
    key_len = smaller(num_compressed(longest, l, d), k_cmp.shape[-3])
    result, _ = dispatch.run(
        Branch.COMPRESSED, rungs.COMPRESSED, args, flags, backend, key_len=key_len
    )
    out, lse = result
    return out, lse.detach()


@transformable
def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor | None = None, *, l: int = 32, d: int = 16,
    l_sel: int = 64, n_sel: int = 16, n_init: int = 1, n_local: int = 2, q_start: int = 0,
    softmax_scale: float | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, backend: Backend | None = None, flags: Flags | None = None,
) -> Tensor:  # fmt: skip
    """The n_sel blocks of l_sel tokens that each query and group attends (Eq. 9 to 12).

    Returns int32 [B, S, G, n_sel], ascending, -1 at the end. Block j covers [j*l_sel, (j+1)*l_sel)
    cut after the query. The query's block, the n_local - 1 before it and the n_init first are
    always chosen, so that n_sel is at least n_init + n_local; ties go to the lower index. lse: what
    compressed_attention returned for the same q and k_cmp, which saves a pass. No gradient.

    >>> from nsa.compress import mean_pool
    >>> q, k_cmp = torch.randn(1, 256, 4, 16), mean_pool(torch.randn(1, 256, 2, 16), 32, 16)
    >>> blocks = select_blocks(q, k_cmp, l=32, d=16, l_sel=64, n_sel=3, n_init=1, n_local=2)
    >>> blocks[0, 255, 0].tolist(), blocks[0, 70, 0].tolist()  # the first block and the last two
    ([0, 2, 3], [0, 1, -1])
    """
    arguments.check_tensors(q, k_cmp, k_cmp, cu_seqlens, "_cmp")
    check_blocks(l, d, l_sel)
    check_choice(n_sel, n_init, n_local)
    max_seqlen = arguments.check_packed(cu_seqlens, max_seqlen, q, q_start)
    arguments.check_compressed_count(k_cmp, q, l, d, q_start, cu_seqlens)
    if lse is not None:
        arguments.check_beside("lse", lse, q, q.shape[:-1])
    flags = dispatch.resolve_flags(flags, q)
    args = dict(
        q=q.detach(), k=k_cmp.detach(), v=k_cmp.detach(), lse=None if lse is None else lse.detach(),
        l=l, d=d, l_sel=l_sel, n_sel=n_sel, n_init=n_init, n_local=n_local, q_start=q_start,
        softmax_scale=scale_of(softmax_scale, q.shape[-1]), cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
    )  # fmt: skip
    key_len = k_cmp.shape[-3]
    return dispatch.run(Branch.BLOCKS, rungs.BLOCKS, args, flags, backend, key_len=key_len)[0]


@overload
def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor | None = None, *,
    block_counts: Tensor | int | None = None, ranges: Tensor | None = None, block_size: int = 64,
    q_start: int = 0, softmax_scale: float | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, backend: Backend | None = None, flags: Flags | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor | None = None, *,
    block_counts: Tensor | int | None = None, ranges: Tensor | None = None, block_size: int = 64,
    q_start: int = 0, softmax_scale: float | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, backend: Backend | None = None, flags: Flags | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor | None = None, *,
    block_counts: Tensor | int | None = None, ranges: Tensor | None = None, block_size: int = 64,
    q_start: int = 0, softmax_scale: float | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, backend: Backend | None = None, flags: Flags | None = None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@transformable
def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor | None = None, *,
    block_counts: Tensor | int | None = None, ranges: Tensor | None = None, block_size: int = 64,
    q_start: int = 0, softmax_scale: float | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, backend: Backend | None = None, flags: Flags | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over exactly the selected tokens of each query and group. [B, S, HQ, Dv].

    Name the tokens by block_indices int [B, S, G, n] (block j is [j*block_size, (j+1)*block_size)
    cut after query t = q_start + s, -1 none; k reaches the last query) or by ranges int
    [B, S, G, n, 2] of [start, end), which are cut to the keys, but not after the query: the caller
    answers for causality there. Blocks come in any order, from any indexer; of block_counts, an int
    or int [B, S, G], only the first slots of a row count. Overlaps and repetitions count once; an
    empty row gives 0 and zero gradients.

    return_lse: also the natural-log lse of the scaled scores, fp32 [B, S, HQ] (fp64 for fp64), -inf
    for an empty row. Gradients go through it on every route, so that merge_state can join the
    result with that of other keys.

    A block behind the last key (packed: of max_seqlen keys) is a ValueError; on a GPU and under
    torch.compile it is a device-side assertion, as PyTorch's own for indices.

    >>> q, k, v = torch.randn(1, 64, 4, 16), torch.randn(1, 64, 2, 16), torch.randn(1, 64, 2, 8)
    >>> blocks = torch.tensor([3, -1, 0, 3]).expand(1, 64, 2, 4)  # block 3 from query 48 on
    >>> out, lse = selection_attention(q, k, v, blocks, block_size=16, return_lse=True)
    >>> list(out.shape), list(lse.shape)
    ([1, 64, 4, 8], [1, 64, 4])
    """
    if block_counts is not None:
        block_indices = _counted(block_indices, block_counts)
    if isinstance(block_indices, Tensor) and block_indices.shape[-1:] == (0,):
        block_indices = F.pad(block_indices, (0, 1), value=-1)  # no slot is one without a block
    settled_by = None
    if cu_seqlens is None and max_seqlen is None and (ranges is None or block_indices is None):
        given = ranges if block_indices is None else block_indices
        rest = (ranges is None, block_size, q_start, softmax_scale, backend, return_lse)
        settled_by = settled.key_of((q, k, v, given), flags, *rest)
        out = settled.again(settled_by, q, k, v, given)
        if out is not None:
            return out
    return _selected(
        q, k, v, block_indices, ranges, block_size, q_start, softmax_scale=softmax_scale,
        cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, backend=backend, flags=flags,
        return_lse=return_lse, settled_by=settled_by,
    )  # fmt: skip


def _counted(block_indices: Tensor | None, block_counts: Tensor | int) -> Tensor:
    """block_indices with -1 behind the first block_counts slots of each row."""
    if not isinstance(block_indices, Tensor):
        raise ValueError("block_counts needs block_indices")
    arguments.check_counts(block_counts, block_indices)
    return first_slots(block_indices, block_counts)


def _selected(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor | None, ranges: Tensor | None,
    block_size: int, q_start: int, *, softmax_scale: float | None, cu_seqlens: Tensor | None,
    max_seqlen: int | None, backend: Backend | None, flags: Flags | None, alone: bool = True,
    return_lse: bool = False, settled_by: tuple | None = None,
) -> Any:  # fmt: skip
    """selection_attention; not `alone` it is a branch of a whole attention, which has no threshold.
    What Triton serves is kept under settled_by."""
    arguments.check_tensors(q, k, v, cu_seqlens)
    check_int("block_size", block_size, 1)
    max_seqlen = arguments.check_packed(cu_seqlens, max_seqlen, q, q_start)
    arguments.check_chosen(q, k, block_indices, ranges, cu_seqlens)
    if cu_seqlens is not None or ranges is None:
        arguments.check_reach("k", k, q, q_start, cu_seqlens)
    flags = dispatch.resolve_flags(flags, q)
    # Upper bounds: true lengths would need values of the device, which is a wait.
    key_len = k.shape[-3] if max_seqlen is None else max_seqlen
    if block_indices is not None:
        if alone:
            arguments.check_block_indices(block_indices, block_size, key_len)
        key_len = smaller(block_indices.shape[-1] * block_size, key_len)
    args = dict(
        q=q, k=k, v=v, block_indices=block_indices, ranges=ranges, block_size=block_size,
        q_start=q_start, softmax_scale=scale_of(softmax_scale, q.shape[-1]), cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen, return_lse=return_lse,
    )  # fmt: skip
    least = key_len if alone else None
    out, decision = dispatch.run(
        Branch.SELECTED, rungs.SELECTED, args, flags, backend, key_len=least
    )
    if settled_by is not None and decision.route is Route.TRITON:
        call: Any = rungs.selected_again(args, flags)

        def checked(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Any:
            if not blocks.is_cuda:  # where the kernel does not tell
                arguments.check_block_indices(blocks, block_size, k.shape[1])
            return call(q, k, v, blocks)

        settled.keep(settled_by, call if block_indices is None else checked)
    return out


@transformable
def sliding_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int = 512, q_start: int | None = None,
    softmax_scale: float | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, backend: Backend | None = None, flags: Flags | None = None,
) -> Tensor:  # fmt: skip
    """Attention over keys max(0, t + 1 - window) .. t. [B, S, HQ, Dv].

    Query s stands at key position t = q_start + s, by default such that the last query stands at
    the last key.
    """
    arguments.check_tensors(q, k, v, cu_seqlens)
    check_int("window", window, 1)
    if q_start is None:
        q_start = 0 if cu_seqlens is not None else max(k.shape[1] - q.shape[1], 0)
    max_seqlen = arguments.check_packed(cu_seqlens, max_seqlen, q, q_start)
    arguments.check_reach("k", k, q, q_start, cu_seqlens)
    flags = dispatch.resolve_flags(flags, q)
    args = dict(
        q=q, k=k, v=v, window=window, q_start=q_start,
        softmax_scale=scale_of(softmax_scale, q.shape[-1]), cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen,
    )  # fmt: skip
    key_len = smaller(window, k.shape[1] if max_seqlen is None else max_seqlen)
    return dispatch.run(Branch.SLIDING, rungs.SLIDING, args, flags, backend, key_len=key_len)[0]


def merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Join attention of the same queries over two disjoint sets of keys: (out, lse) over both.

    out [.., HQ, Dv] and natural-log lse [.., HQ] of each, as selection_attention returns them with
    return_lse and flash-attn with return_attn_probs (where its lse is transposed to [.., HQ]).
    Where an lse is infinite, which marks a row without keys (flash-attn 2 marks it by +inf), the
    other side alone counts, and its gradients are 0; without keys on either side out is 0 and lse
    -inf. Computed in fp32 (fp64 for fp64); out has out_a's dtype. In plain PyTorch, differentiable
    in all four. Raises TypeError or ValueError that names the argument.

    >>> q, k, v = torch.randn(1, 32, 4, 16), torch.randn(1, 32, 2, 16), torch.randn(1, 32, 2, 8)
    >>> block = lambda j: torch.full((1, 32, 2, 1), j)
    >>> attend = lambda blocks: selection_attention(q, k, v, blocks, block_size=16, return_lse=True)
    >>> out, lse = merge_state(*attend(block(0)), *attend(block(1)))
    >>> torch.testing.assert_close(out, attend(torch.cat([block(0), block(1)], -1))[0])
    """
    arguments.check_tensor("out_a", out_a)
    if not out_a.ndim:
        raise ValueError("out_a must be [.., HQ, Dv], got shape []")
    arguments.check_beside("out_a", out_a, out_a, out_a.shape, "out_a's")
    arguments.check_beside("lse_a", lse_a, out_a, out_a.shape[:-1], "out_a's")
    arguments.check_beside("out_b", out_b, out_a, out_a.shape, "out_a's")
    arguments.check_beside("lse_b", lse_b, out_a, out_a.shape[:-1], "out_a's")
    wide = torch.promote_types(out_a.dtype, torch.float32)
    lses = torch.stack([lse_a.to(wide), lse_b.to(wide)])
    empty = lses.isinf()
    neither = empty.all(0)
    lses = lses.masked_fill(empty, -torch.inf).masked_fill(neither, 0)
    outs = torch.stack([out_a.to(wide), out_b.to(wide)]).masked_fill(empty[..., None], 0)
    out = (lses.softmax(0)[..., None] * outs).sum(0).to(out_a.dtype)
    return out, lses.logsumexp(0).masked_fill(neither, -torch.inf)


def gated_sum(gates: Tensor, cmp: Tensor, sel: Tensor, win: Tensor) -> Tensor:
    """Eq. 5 in plain PyTorch, summed in fp32: gates [.., HQ, 3] in the order cmp, sel, win."""
    wide = torch.promote_types(cmp.dtype, torch.float32)
    total = gates[..., 0:1].to(wide) * cmp
    total = total + gates[..., 1:2].to(wide) * sel
    return (total + gates[..., 2:3].to(wide) * win).to(cmp.dtype)


@overload
def nsa_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor,
    v_win: Tensor, gates: Tensor, *, l: int = 32, d: int = 16, l_sel: int = 64, n_sel: int = 16,
    n_init: int = 1, n_local: int = 2, window: int = 512, q_start: int = 0,
    softmax_scale: float | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, backend: Backend | None = None, flags: Flags | None = None,
    return_aux: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def nsa_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor,
    v_win: Tensor, gates: Tensor, *, l: int = 32, d: int = 16, l_sel: int = 64, n_sel: int = 16,
    n_init: int = 1, n_local: int = 2, window: int = 512, q_start: int = 0,
    softmax_scale: float | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, backend: Backend | None = None, flags: Flags | None = None,
    return_aux: Literal[True],
) -> tuple[Tensor, dict[str, Any]]: ...  # fmt: skip


@overload
def nsa_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor,
    v_win: Tensor, gates: Tensor, *, l: int = 32, d: int = 16, l_sel: int = 64, n_sel: int = 16,
    n_init: int = 1, n_local: int = 2, window: int = 512, q_start: int = 0,
    softmax_scale: float | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, backend: Backend | None = None, flags: Flags | None = None,
    return_aux: bool,
) -> Tensor | tuple[Tensor, dict[str, Any]]: ...  # fmt: skip


@transformable
def nsa_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor,
    v_win: Tensor, gates: Tensor, *, l: int = 32, d: int = 16, l_sel: int = 64, n_sel: int = 16,
    n_init: int = 1, n_local: int = 2, window: int = 512, q_start: int = 0,
    softmax_scale: float | None = None, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, backend: Backend | None = None, flags: Flags | None = None,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """Native Sparse Attention: compressed, selected and sliding attention, gated (Eq. 5).

    q [B, S, HQ, Dk]; k_cmp, v_cmp already compressed [B, Nc, G, D], Nc < N; k_sel, v_sel
    [B, N, G, D] and k_win, v_win, each branch with its own projection; gates [B, S, HQ, 3] (cmp,
    sel, win), any real numbers; the paper's are after a sigmoid. A chunk of a sequence, or
    decoding: q_start is the position of the first query; the last query stands at k_win's last key,
    so k_win may leave out what lies before the first query's window.

    Returns out [B, S, HQ, Dv]; with return_aux also {"block_indices", "lse", "routes": {branch:
    route really taken}}. Raises ValueError or TypeError that names the argument.
    """
    tensors = (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
    settled_by, ends = None, () if cu_seqlens is None else (cu_seqlens,)
    # Checks of a pack go by its lengths, but for those on a GPU with max_seqlen.
    if not return_aux and (getattr(cu_seqlens, "is_cuda", False) if max_seqlen else not ends):
        settled_by = settled.key_of(
            (*tensors, *ends), flags, l, d, l_sel, n_sel, n_init, n_local, window, q_start,
            softmax_scale, max_seqlen, backend, differentiable=True,
        )  # fmt: skip
        if (out := settled.again(settled_by, *tensors, *ends)) is not None:
            return out
    for kv, k, v in (("_cmp", k_cmp, v_cmp), ("_sel", k_sel, v_sel), ("_win", k_win, v_win)):
        arguments.check_tensors(q, k, v, cu_seqlens, kv)
    arguments.check_beside("gates", gates, q, (*q.shape[:-1], 3))
    for name, x in (("k_sel", k_sel), ("k_win", k_win)):
        if x.shape[-2] != k_cmp.shape[-2]:
            raise ValueError(f"{name} must have k_cmp's G={k_cmp.shape[-2]}, got {list(x.shape)}")
    for name, x in (("v_sel", v_sel), ("v_win", v_win)):
        if x.shape[-1] != v_cmp.shape[-1]:
            raise ValueError(f"{name} must have v_cmp's Dv={v_cmp.shape[-1]}, got {list(x.shape)}")
    sizes = check_sizes(
        l=l, d=d, l_sel=l_sel, n_sel=n_sel, n_init=n_init, n_local=n_local, window=window
    )
    max_seqlen = arguments.check_packed(cu_seqlens, max_seqlen, q, q_start)
    arguments.check_compressed_count(k_cmp, q, l, d, q_start, cu_seqlens, k_sel.shape[-3])
    arguments.check_reach("k_sel", k_sel, q, q_start, cu_seqlens)
    arguments.check_window(k_win, q, window, q_start, cu_seqlens)
    flags = dispatch.resolve_flags(flags, q)
    args = dict(
        tensors=(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates), sizes=sizes,
        cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, q_start=q_start,
        softmax_scale=scale_of(softmax_scale, q.shape[-1]),
    )  # fmt: skip
    by_branches = functools.partial(_by_branches, args, flags, backend)
    if not q.numel():
        out, aux = by_branches()
    else:
        out, aux, whole = dispatch.run_prefill(
            args, rungs.prefill_triton, by_branches, flags, backend
        )
        if whole and settled_by is not None:
            settled.keep(settled_by, rungs.prefill_again(args, flags))
    return (out, aux) if return_aux else out


def _by_branches(
    args: dict[str, Any], flags: Flags, backend: Backend | None
) -> tuple[Tensor, dict[str, Any]]:
    """nsa_attention's output and aux, each branch by a route of its own."""
    q, k, v, k_sel, v_sel, k_win, v_win, gates = args["tensors"]
    q_start, cu_seqlens = args["q_start"], args["cu_seqlens"]
    if cu_seqlens is not None:
        gates = gates_inside(gates, cu_seqlens)
    choose = dict(args["sizes"])
    window, l, d = choose.pop("window"), choose["l"], choose["d"]
    common: dict[str, Any] = dict(
        softmax_scale=args["softmax_scale"], cu_seqlens=cu_seqlens, max_seqlen=args["max_seqlen"],
        flags=flags,
    )  # fmt: skip
    if cu_seqlens is None:  # what is behind them in a longer buffer is nobody's
        n = num_compressed(q_start + q.shape[1], l, d)
        if is_symbol(k.shape[1]):  # no length to cut at: zeros, which nobody sees
            own = (torch.arange(k.shape[1], device=k.device) < n)[:, None, None]
            k, v = (torch.where(own, x, 0) for x in (k, v))
        else:
            k, v = (seen_rows(x, n, cu_seqlens) for x in (k, v))
    with dispatch.trace() as taken:
        cmp, lse = compressed_attention(
            q, k, v, l=l, d=d, q_start=q_start, backend=backend, **common
        )
        choice: Any = dispatch.kernel_or_reference(backend)
        block_indices = select_blocks(
            q, k, lse, q_start=q_start, backend=choice, **choose, **common
        )
        win = sliding_attention(q, k_win, v_win, window=window, backend=backend, **common)
        await_selection()
        sel = _selected(
            q, k_sel, v_sel, block_indices, None, choose["l_sel"], q_start, backend=backend,
            alone=False, **common,
        )  # fmt: skip
    routes = {decision.branch.value: decision.route.value for decision in taken}
    aux = {"block_indices": block_indices, "lse": lse, "routes": routes}
    return gated_sum(gates, cmp, sel, win), aux


def nsa_attention_shared_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    phi_k: Callable[..., Tensor] | None = None,
    phi_v: Callable[..., Tensor] | None = None,
    *,
    l: int = 32,
    d: int = 16,
    l_sel: int = 64,
    n_sel: int = 16,
    n_init: int = 1,
    n_local: int = 2,
    window: int = 512,
    softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    backend: Backend | None = None,
    flags: Flags | None = None,
) -> Tensor:
    """nsa_attention() with one k and one v for all three branches, as dense models have them.

    q [B, S, HQ, Dk]; k [B, N, G, Dk], v [B, N, G, Dv] with N >= S, the queries being the last S of
    the N tokens; packed ones are as many. gates [B, S, HQ, 3] (cmp, sel, win). phi_k, phi_v: what
    compresses k and v, called with them (packed: and cu_seqlens=), such as
    nsa.compress.MLPCompression(Dk, l, d); by default mean pooling. The paper gives each branch
    projections of its own (section 3.3.3). Returns [B, S, HQ, Dv]; the rest and what it raises is
    as for nsa_attention.

    >>> q, k, v = torch.randn(1, 96, 4, 16), torch.randn(1, 96, 2, 16), torch.randn(1, 96, 2, 8)
    >>> out = nsa_attention_shared_kv(q, k, v, torch.rand(1, 96, 4, 3), window=32)
    >>> last = nsa_attention_shared_kv(q[:, 95:], k, v, torch.rand(1, 1, 4, 3), window=32)
    >>> list(out.shape), list(last.shape)
    ([1, 96, 4, 8], [1, 1, 4, 8])
    """
    arguments.check_tensors(q, k, v, cu_seqlens)
    check_compression(l, d)
    q_start = 0 if cu_seqlens is not None else k.shape[1] - q.shape[1]
    if q_start < 0:
        raise ValueError(f"k must hold a key for each of q's {q.shape[1]} tokens, got {k.shape[1]}")
    pool = functools.partial(mean_pool, l=l, d=d)
    packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    return nsa_attention(
        q, (phi_k or pool)(k, **packed), (phi_v or pool)(v, **packed), k, v, k, v, gates, l=l, d=d,
        l_sel=l_sel, n_sel=n_sel, n_init=n_init, n_local=n_local, window=window, q_start=q_start,
        softmax_scale=softmax_scale, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, backend=backend,
        flags=flags,
    )  # fmt: skip


def turn_projected(
    qkv: Tensor, positions: Tensor, config: NSAConfig, *, backend: Backend | None = None,
    flags: Flags | None = None,
) -> tuple[Tensor, BranchKV]:  # fmt: skip
    """Queries [.., S, HQ, Dk] and the branches' keys and values of a layer's projections.

    qkv [.., S, sum(config.qkv_widths)]; queries and keys are turned by positions (integers [S],
    config.rope_base), in one Triton kernel where policy allows. Raises RouteUnavailable as
    nsa_attention; backend "sdpa" and "fa2" do it in PyTorch, as "reference".
    """
    flags = dispatch.resolve_flags(flags, qkv)
    choice = dispatch.kernel_or_reference(backend)
    request = dispatch.make_request(Branch.TURN, qkv, qkv, qkv, qkv.shape[-2], flags, choice)
    request = replace(request, d_k=config.d_k, d_v=config.d_v)
    args = dict(qkv=qkv, positions=positions, config=config)
    calls = dispatch.calls(rungs.TURN, args, flags)
    return dispatch.guarded(request, calls, flags, choice, args)[0]


def append_projected(
    qkv: Callable[[], Tensor], cache: NSACache, phi_k: Callable[[Tensor], Tensor],
    phi_v: Callable[[Tensor], Tensor],
    gate: Callable[[], tuple[Tensor, Tensor, Tensor] | None] = lambda: None, *,
    turn: bool = True, backend: Backend | None = None, flags: Flags | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """NSACache.append_projected where the policy of the decode step allows Triton: turned queries
    and gates.

    qkv and gate give its arguments, turn is one. The queries are None, with nothing appended, where
    PyTorch has to do it; a kernel that fails is logged, as any fallback, and not tried again for
    such a cache.
    """
    flags = dispatch.resolve_flags(flags, cache.k_sel)
    key = (backend, flags)
    if key not in cache.fused_append:
        cache.fused_append[key] = _may_append(cache, backend, flags)
    if not cache.fused_append[key]:
        return None, None
    try:
        return cache.append_projected(qkv(), phi_k, phi_v, gate(), turn)
    except (TypeError, ValueError):
        raise
    except Exception as error:
        if dispatch.parse_backend(backend) is not None or dispatch.must_raise(error):
            raise
        cache.fused_append[key] = False
        failed.remember(*_append_kind(cache, backend, flags), told(error))
        dispatch.warn_launch_error("the decode step's append on triton", told(error))
        log("append.triton.fallback", flags=flags, reason="launch_error", error=told(error))
        return None, None


def _append_kind(
    cache: NSACache, backend: Backend | None, flags: Flags
) -> tuple[Route, dispatch.Request, Flags, tuple[str, Tensor]]:
    """append_projected's calls as failed.py takes them."""
    k, v = cache.k_sel, cache.v_sel
    request = dispatch.make_request(Branch.STEP, k, k, v, cache.max_len, flags, backend)
    request = replace(request, dtype=str(cache.dtype).removeprefix("torch."))
    return Route.TRITON, request, flags, ("append", k)


def _may_append(cache: NSACache, backend: Backend | None, flags: Flags) -> bool:
    kind = _append_kind(cache, backend, flags)
    if cache.k_descale is not None and (kind[1].capability or (9, 0)) < (8, 9):
        return False  # without instructions for e4m3
    try:
        decision = dispatch.decide(kind[1], flags, backend)
    except dispatch.RouteUnavailable:
        return False
    return decision.route is Route.TRITON and bool(decision.requested or not failed.known(*kind))


def decode_composed(args: dict[str, Any], flags: Flags) -> tuple[Tensor, Tensor]:
    """nsa_attention on views of the cache: each branch by its own route."""
    cache, q = args["cache"], args["q"]
    if cache.mixed:
        one = lambda b: dict(args, q=q[b : b + 1], gates=args["gates"][b : b + 1],
                             cache=cache.row(b))  # fmt: skip
        parts = [decode_composed(one(b), flags) for b in range(cache.batch)]
        return torch.cat([out for out, _ in parts]), torch.cat([chosen for _, chosen in parts])
    window = args["window"] or cache.window(q.shape[1])
    compressed = cache.compressed()
    out, aux = nsa_attention(  # type: ignore[call-overload]
        q, *compressed, *cache.selectable(), *window, args["gates"],
        q_start=cache.length - q.shape[1], softmax_scale=args["softmax_scale"],
        backend=args["backend"], flags=flags, return_aux=True, **args["sizes"],
    )  # fmt: skip
    if cache.count_reads:
        cache.record_reads(aux["block_indices"], compressed[0].shape[1], window[0].shape[1])
    return out, aux["block_indices"]


# The rungs of one decode step.
STEP = {Route.TRITON: rungs.step_triton, Route.REFERENCE: decode_composed}


def step_args(
    q: Tensor, cache: Any, window: tuple[Tensor, Tensor] | None, gates: Tensor,
    softmax_scale: float, backend: Backend | None,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of the rungs in STEP; cache: an NSACache, or the KVCaches of nsa/kvcache.py."""
    return dict(
        q=q, k=cache.k_sel, v=cache.v_sel, cache=cache, window=window, gates=gates,
        sizes=cache.sizes, softmax_scale=softmax_scale, backend=backend,
    )  # fmt: skip


def run_step(
    args: dict[str, Any], flags: Flags, prefill: bool, key_len: int
) -> tuple[tuple[Tensor, Tensor], Route | None]:
    """Attend from a cache by one of STEP's rungs, and say by which; by nsa_attention, whose
    branches take routes of their own, for `prefill` and where another route is named."""
    backend = args["backend"]
    if prefill or dispatch.parse_backend(backend) not in (None, Route.TRITON):
        return decode_composed(args, flags), None
    result, decision = dispatch.run(Branch.STEP, STEP, args, flags, backend, key_len=key_len)
    return result, decision.route


@untraced  # as NSAAttention.step
def nsa_decode(
    q: Tensor, cache: NSACache, window: tuple[Tensor, Tensor] | None, gates: Tensor, *,
    softmax_scale: float | None = None, backend: Backend | None = None, flags: Flags | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend from the cache's T newest tokens: out [B, T, HQ, Dv], block_indices [B, T, G, n_sel].

    q [B, T, HQ, Dk], gates [B, T, HQ, 3]; the tokens are in the cache already. window: what
    cache.window_with gave before they were appended, needed for T > cache.max_step.
    One fused Triton step where policy allows, T <= cache.max_step and no gradient is needed, else
    nsa_attention on views of the cache. Raises ValueError or TypeError that names the argument.
    """
    refuse_vmap("nsa_decode")

    def check() -> dict[str, Any]:
        c = cache.config
        T = q.shape[1] if isinstance(q, Tensor) and q.ndim == 4 else 0
        arguments.check_beside("q", q, cache.k_sel, (cache.batch, T, c.heads, c.d_k), "the cache's")
        if q.dtype != cache.dtype:
            raise TypeError(f"q must have the cache's {cache.dtype}, got {q.dtype}")
        arguments.check_beside("gates", gates, q, (*q.shape[:-1], 3))
        if T > min(cache.lengths):
            raise ValueError(f"q must be of tokens in the cache: T={T}, lengths {cache.lengths}")
        scale = scale_of(softmax_scale, c.d_k)
        return {"T": T, "softmax_scale": scale, "backend": backend, "flags": flags}

    cache.agree(check)
    return decode_appended(
        q, cache, window, gates, softmax_scale=softmax_scale, backend=backend, flags=flags
    )


def decode_appended(
    q: Tensor, cache: NSACache, window: tuple[Tensor, Tensor] | None, gates: Tensor, *,
    softmax_scale: float | None = None, backend: Backend | None = None, flags: Flags | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """nsa_decode() of what is known to fit: what append_projected() gave."""
    T = q.shape[1]
    flags = dispatch.resolve_flags(flags, q)
    if cache.parallel:
        return cache.attend(q, window, gates, softmax_scale, backend, flags)
    scale = scale_of(softmax_scale, q.shape[-1])
    args = step_args(q, cache, window, gates, scale, backend)
    key = (backend, flags)
    # Many tokens at once are work for the prefill kernels, which have a gradient too.
    prefill = (
        T > cache.max_step
        or torch.is_grad_enabled()
        and needs_grad(
            q, gates, cache.k_cmp, cache.v_cmp, cache.k_sel, cache.v_sel, cache.k_win, cache.v_win
        )
    )
    if not prefill and key in cache.fused_step and not dispatch.observed(flags, q):
        # Deciding again what cannot have changed would take the host as long as two launches.
        try:
            return rungs.step_triton(args, flags)
        except Exception as error:
            if dispatch.must_raise(error):
                raise
            cache.fused_step.discard(key)  # run() meets the error again and tells of it
    result, route = run_step(args, flags, prefill, cache.length)
    if route is Route.TRITON:
        cache.fused_step.add(key)
    return result
