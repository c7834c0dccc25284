"""Selection attention by block indices, forward: K and V are read in place, no gather.

A row is one token of one KV group with all its query heads (paper 3.4): the heads share the blocks,
so a block's K and V are loaded once for all of them. The blocks end at the token itself.
Neighbouring rows whose choices agree go together, as union tiles (union_lists.py and
unions_triton.py); with few heads the others go by key tiles (fwd_by_keys_triton.py). On Hopper
eight neighbouring queries of 9 to 16 heads share what they read instead, and long sequences go by
keys (fwd_hopper.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from nsa.kernels.head_rows import put_rows, split_rows
from nsa.kernels.launch import launch
from nsa.kernels.prefill import hopper
from nsa.kernels.prefill.blocks.fwd_by_keys_triton import block_attention_outer, outer_applies
from nsa.kernels.prefill.blocks.selection import Selection
from nsa.kernels.prefill.blocks.union_lists import in_union, lists_for
from nsa.kernels.prefill.blocks.unions_triton import fwd_tiles as union_fwd_tiles
from nsa.kernels.prefill.blocks.unions_triton import union_attention_fwd
from nsa.kernels.prefill.combine import Others, combine_fwd
from nsa.kernels.prefill.limits import check_heads
from nsa.kernels.prefill.span.common import load_kv
from nsa.kernels.row_tiles import kv_tiles, tma_usable
from nsa.kernels.tiles import LOG2E, arch_of, cdiv, dot_size, head_constants, pow2

PIECE = 2  # H200: one costs unions 1 % more, four cost single queries 1 %


@triton.jit
def token_position(token, SEQ_BEGIN, S, VARLEN: tl.constexpr):
    """(batch entry, position in its sequence, first K/V row of a packed sequence)."""
    if VARLEN:
        begin = tl.load(SEQ_BEGIN + token)
        return token * 0, token - begin, begin
    return token // S, token % S, token * 0


@triton.jit
def past_blocks(blocks, n_sel, own, N_PAD: tl.constexpr):
    """(how many blocks lie before `own`, 1 if `own` is chosen) of ascending indices, -1 last."""
    lane = tl.arange(0, N_PAD)
    block = tl.load(blocks + lane, mask=lane < n_sel, other=-1)
    past = tl.sum(((block >= 0) & (block < own)).to(tl.int32), 0)
    return past, tl.sum((block == own).to(tl.int32), 0)


@triton.jit
def _block_attn_fwd_step(
    acc, m_i, l_i, q, q2, k, k2, v, seen, scale_log2,
    BLOCK_D2: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if BLOCK_D2 > 0:
        s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
    s *= scale_log2
    if MASKED:
        s = tl.where(seen[None, :], s, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1))
    p = tl.math.exp2(s - m_new[:, None])
    alpha = tl.math.exp2(m_i - m_new)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_new, l_i


@triton.jit
def attend_query(
    token, group, Q, K, V, KD, KD2, VD, BLOCK_INDICES, SEQ_BEGIN, O, LSE, S, S_KV, G, H, q_start,
    n_sel, block_size, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, VARLEN: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    OWN_N: tl.constexpr, N_PAD: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out and lse of one token's query heads of a group."""
    batch, t, first_row = token_position(token, SEQ_BEGIN, S, VARLEN)
    t += q_start
    token = token.to(tl.int64)
    head = tl.arange(0, HEADS)
    head_live = head < H
    row_index = token * (G * H) + group * H + head
    offs_d, offs_d2, q, q2 = split_rows(Q, row_index, head_live, D, BLOCK_D, BLOCK_D2)
    offs_dv = tl.arange(0, BLOCK_DV)
    first_key = batch.to(tl.int64) * S_KV + first_row
    acc = tl.zeros([HEADS, BLOCK_DV], tl.float32)
    m_i = tl.full([HEADS], float("-inf"), tl.float32)
    l_i = tl.zeros([HEADS], tl.float32)
    offs_n = tl.arange(0, BLOCK_N)
    blocks = BLOCK_INDICES + (token * G + group) * n_sel
    own = t // block_size
    n_past, has_own = past_blocks(blocks, n_sel, own, N_PAD)
    per_block = block_size // BLOCK_N
    for i in tl.range(0, n_past * per_block):
        n0 = tl.load(blocks + i // per_block) * block_size + i % per_block * BLOCK_N
        live = offs_n >= 0
        k, k2, v = load_kv(
            K, V, KD, KD2, VD, first_key, n0, live, group, G, offs_d, offs_d2, offs_dv, D, DV,
            BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, TMA, False,
        )  # fmt: skip
        acc, m_i, l_i = _block_attn_fwd_step(
            acc, m_i, l_i, q, q2, k, k2, v, live, scale_log2, BLOCK_D2, False, PRECISION
        )
    # The own block ends at the token itself; its first key is always seen.
    begin = own * block_size
    for n0 in tl.range(begin, begin + has_own * (t + 1 - begin), OWN_N, num_stages=1):
        live = n0 + tl.arange(0, OWN_N) <= t
        k, k2, v = load_kv(
            K, V, KD, KD2, VD, first_key, n0, live, group, G, offs_d, offs_d2, offs_dv, D, DV,
            OWN_N, BLOCK_D, BLOCK_D2, BLOCK_DV, TMA, True,
        )  # fmt: skip
        acc, m_i, l_i = _block_attn_fwd_step(
            acc, m_i, l_i, q, q2, k, k2, v, live, scale_log2, BLOCK_D2, True, PRECISION
        )
    # A row that attends nothing has l = 0: output 0 and lse = -inf.
    acc = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]
    lse = tl.where(l_i != 0, (m_i + tl.math.log2(l_i)) * 0.6931471805599453, float("-inf"))
    put_rows(O, acc, row_index, head_live, offs_dv, DV)
    tl.store(LSE + row_index, lse, mask=head_live)


@triton.jit
def _block_attn_fwd_kernel(
    Q, K, V, KD, KD2, VD, BLOCK_INDICES, SEQ_BEGIN, STATE, O, LSE, T, S, S_KV, G, H, q_start,
    n_sel, block_size, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, VARLEN: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    OWN_N: tl.constexpr, N_PAD: tl.constexpr, UNION: tl.constexpr, PIECE: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query and group; with UNION (queries of a tile) PIECE queries of the tiles that go one by
    one, by STATE, so that fewer programs find nothing to do."""
    # Group is the slow axis: one group's K and V stay in L2 while its tokens pass.
    group = tl.program_id(1)
    if UNION > 0:
        first = tl.program_id(0) * PIECE
        if in_union(STATE, first, group, G, UNION):
            return
        for i in tl.range(0, tl.minimum(T - first, PIECE), num_stages=1):
            attend_query(
                first + i, group, Q, K, V, KD, KD2, VD, BLOCK_INDICES, SEQ_BEGIN, O, LSE, S, S_KV,
                G, H, q_start, n_sel, block_size, scale_log2, D, DV, VARLEN, HEADS, BLOCK_N,
                BLOCK_D, BLOCK_D2, BLOCK_DV, OWN_N, N_PAD, TMA, PRECISION,
            )  # fmt: skip
    else:
        attend_query(
            tl.program_id(0), group, Q, K, V, KD, KD2, VD, BLOCK_INDICES, SEQ_BEGIN, O, LSE, S,
            S_KV, G, H, q_start, n_sel, block_size, scale_log2, D, DV, VARLEN, HEADS, BLOCK_N,
            BLOCK_D, BLOCK_D2, BLOCK_DV, OWN_N, N_PAD, TMA, PRECISION,
        )  # fmt: skip


def fwd_tiles(arch: int, d: int, dv: int, itemsize: int) -> tuple[int, int, int]:
    """(BLOCK_N, num_warps, num_stages); these fit 99 KB of shared memory too."""
    if arch == 0:
        return 16, 4, 1
    if itemsize == 4:
        return (16, 4, 1) if max(d, dv) <= 128 else (16, 8, 1)
    if arch >= 90 and max(d, dv) <= 128:
        # One warp per token and group, six at a time on a multiprocessor, K and V by descriptors:
        # H200, bf16, D=128, 64k tokens 13.4 ms; two warps with pointers took 16.1.
        return 64, 1, 2
    return (64, 2, 2) if max(d, dv) <= 192 else (64, 4, 2)


def block_attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_indices: torch.Tensor, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of gated_block_attention_fwd, of this branch alone."""
    return gated_block_attention_fwd(q, k, v, block_indices, None, **how)[:2]


def gated_block_attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_indices: torch.Tensor,
    others: Others | None, *, use_gluon: bool | None = None, keep: bool = True, **how: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """out [.., HQ, Dv] in q.dtype and natural-log lse [.., HQ] fp32, for contiguous inputs; with
    others (of the other two branches) the gated sum of the three as well.
    Where only that is wanted (keep is False), out is empty and takes no memory.

    Dense q [B, S, HQ, D], k [B, N, G, D]; packed q [T, HQ, D], k [T, G, D]. block_indices, how: of
    Selection. use_gluon: see hopper.py.
    """
    check_heads(q, k, v)
    by = Selection(block_indices, **how)
    block_size = by.block_size
    hq, dim = q.shape[-2:]
    groups, dv = v.shape[-2:]
    heads = hq // groups
    out = torch.empty(*q.shape[:-1], dv, dtype=q.dtype, device=q.device)
    kept = out if keep else torch.empty(0, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    tokens = lse.numel() // max(hq, 1)
    if tokens == 0:
        return kept, lse, torch.empty_like(out) if others else None
    n_sel, size = by.n_sel, q.element_size()
    longest = min(by.max_seqlen, tokens) if by.packed else k.shape[1]
    on_hopper = hopper.block_forward(
        q, k, v, n_sel, block_size, by.softmax_scale, longest, use_gluon
    )
    if on_hopper:
        total = (torch.empty_like(out) if keep else out) if others else None
        on_hopper.attend_blocks(q, k, v, by, out if keep else None, lse, longest, others, total)
        return kept, lse, total
    arch = arch_of(q.device)
    keys = k.shape[:-2].numel()
    outer = not by.strict and outer_applies(
        arch, tokens, keys, longest, groups, heads, n_sel, block_size, dim, dv, size
    )
    lists = lists_for("fwd_outer" if outer else "fwd", q, by)
    if lists is not None:
        union_attention_fwd(q, k, v, by, lists, out, lse, union_fwd_tiles(arch, dim, dv))
        lists = replace(lists, entries=None)  # whose memory serves what comes now
    union = lists.queries if lists else 0
    state, piece = (lists.state, min(PIECE, union)) if lists else (block_indices, 1)
    if outer:
        state, union = block_attention_outer(q, k, v, by, lists, out, lse)
        piece = union  # hardly ever is there one to do
    block_n, warps, stages = fwd_tiles(arch, dim, dv, size)
    block_n = min(block_n, dot_size(block_size))
    tma = tma_usable(arch, k, whole=v)
    launch(
        _block_attn_fwd_kernel, (cdiv(tokens, piece), groups),
        q, k, v, *kv_tiles(k, v, block_n, tma), block_indices, by.begins, state, out, lse, tokens,
        *by.lengths(q, k), groups, heads, by.q_start, n_sel, block_size, by.softmax_scale * LOG2E,
        VARLEN=by.packed, HEADS=dot_size(heads), BLOCK_N=block_n, OWN_N=min(block_n, 32),
        N_PAD=pow2(n_sel), UNION=union, PIECE=piece, TMA=tma, num_warps=warps, num_stages=stages,
        **head_constants(dim, dv, q.dtype),
    )  # fmt: skip
    if others is None:
        return out, lse, None
    return kept, lse, combine_fwd(out, others, into=None if keep else out)
