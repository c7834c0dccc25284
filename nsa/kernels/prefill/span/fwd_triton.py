"""Forward of compressed and sliding attention: one flash kernel over a span of keys per query."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from nsa.kernels.head_rows import put_rows, split_rows
from nsa.kernels.launch import launch
from nsa.kernels.prefill import hopper
from nsa.kernels.prefill.limits import check_heads
from nsa.kernels.prefill.marked_keys import marked
from nsa.kernels.prefill.packs import Rows, sequence_bounds, tile_of_program
from nsa.kernels.prefill.span.common import load_kv, span_hi, span_lo, span_part, span_tiles
from nsa.kernels.prefill.span.kinds import Span
from nsa.kernels.row_tiles import kv_tiles, tma_usable
from nsa.kernels.tiles import (
    LOG2E,
    arch_of,
    datacenter,
    head_constants,
    pow2,
)

if TYPE_CHECKING:
    from nsa.kernels.prefill.choice.score_topn_triton import Slab


@triton.jit
def _span_fwd_step(
    acc, m_i, l_i, q, q2, k, k2, v, offs_n, lo, hi, scale_log2,
    BLOCK_D2: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys: scores, online softmax, output. Only edge tiles pay for the span mask."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if BLOCK_D2 > 0:
        s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
    if MASKED:
        seen = (offs_n[None, :] >= lo[:, None]) & (offs_n[None, :] < hi[:, None])
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1) * scale_log2)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        m_new = tl.maximum(m_i, tl.max(s, 1) * scale_log2)
        m_safe = m_new
    p = tl.math.exp2(s * scale_log2 - m_safe[:, None])
    alpha = tl.math.exp2(m_i - m_safe)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_new, l_i


# As a constant, one key (SK = 1) folds the mask into the product's operand, on which ptxas 12.8
# dies for heads of up to 32.
@triton.jit(do_not_specialize=["SK"])
def _span_fwd_kernel(
    Q, K, V, KD, KD2, VD, O, LSE, CU_Q, CU_K, SQ, SK, G, H, q_start, span_a, span_b, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, MODE: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    BLOCK_M: tl.constexpr = BLOCK_Q * HEADS
    # Late queries see most keys: start them first, so that the last wave is short work.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, group, tile = tile_of_program(tile, CU_Q, SQ, G, BLOCK_Q, VARLEN)
    q_begin, q_len, k_begin, k_len = sequence_bounds(CU_Q, CU_K, batch, SQ, SK, VARLEN)
    q0 = tile * BLOCK_Q
    if q0 >= q_len:
        return
    rows = tl.arange(0, BLOCK_M)
    t = q0 + rows // HEADS
    head = rows % HEADS
    row_live = (t < q_len) & (head < H)
    row_index = (q_begin + t) * (G * H) + group * H + head
    offs_d, offs_d2, q, q2 = split_rows(Q, row_index, row_live, D, BLOCK_D, BLOCK_D2)
    offs_dv = tl.arange(0, BLOCK_DV)

    lo = span_lo(t + q_start, span_a, MODE)
    hi = tl.minimum(span_hi(t + q_start, span_a, span_b, MODE), k_len)
    begin, full_begin, full_end, end = span_tiles(
        q0, q_len, k_len, q_start, span_a, span_b, MODE, BLOCK_Q, BLOCK_N
    )

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(3):
        if part != 1 or MODE == 1:
            first, last = span_part(part, begin, full_begin, full_end, end)
            for n0 in tl.range(first, last, BLOCK_N, num_stages=None if part == 0 else 1):
                offs_n = n0 + tl.arange(0, BLOCK_N)
                k, k2, v = load_kv(
                    K, V, KD, KD2, VD, k_begin, n0, offs_n < k_len, group, G, offs_d, offs_d2,
                    offs_dv, D, DV, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, TMA, part > 0,
                )  # fmt: skip
                acc, m_i, l_i = _span_fwd_step(
                    acc, m_i, l_i, q, q2, k, k2, v, offs_n, lo, hi, scale_log2, BLOCK_D2, part > 0,
                    PRECISION,
                )  # fmt: skip

    # A row that sees no key has l = 0: output 0 and lse = -inf. One that sees NaN has NaN, as one
    # has that sees keys, but with scores of -inf alone.
    none = tl.where(hi > lo, float("nan"), 1.0)
    acc = acc / tl.where(l_i > 0, l_i, none)[:, None]
    lse = tl.where(l_i != 0, (m_i + tl.math.log2(l_i)) * 0.6931471805599453, float("-inf"))
    put_rows(O, acc, row_index, row_live, offs_dv, DV)
    tl.store(LSE + row_index, lse, mask=row_live)


def fwd_tiles(arch: int, d: int, dv: int, itemsize: int) -> tuple[int, int, int, int]:
    """(rows, BLOCK_N, num_warps, num_stages) by architecture and head size.

    Measured on an H200 up to D = 128; the others are the largest that fit without spilling.
    """
    if arch == 0:  # interpreter: small tiles exercise every loop at small shapes
        return 32, 16, 4, 1
    widest = max(d, dv)
    hopper = datacenter(arch)
    if itemsize == 4:
        return (16, 32, 8, 1) if widest <= 128 else (16, 16, 4, 1)
    if widest > 192:
        return (64, 32, 4, 1) if hopper else (32, 32, 4, 2)
    if widest > 128:
        # H100, 192/128, 8k tokens: compressed 0.73 -> 0.51 ms by a third stage.
        return (128, 64, 8, 3) if hopper else (64, 32, 4, 2)
    # H200, bf16, D=128, 64k tokens: compressed 9.4 ms, sliding 3.3; with 128 rows 10.2 and 4.0.
    return (64, 64, 4, 3) if hopper else (64, 64, 4, 2)


def span_attention_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, span: Span, softmax_scale: float,
    cu_q: torch.Tensor | None = None, cu_k: torch.Tensor | None = None, q_start: int = 0,
    use_gluon: bool | None = None, slabs: Iterable[Slab] | None = None, scoring_heads: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out [.., HQ, Dv] in q.dtype and natural-log lse [.., HQ] fp32, for contiguous inputs.

    Dense: q [B, S, HQ, D], k [B, N, G, D]. Packed: q [T, HQ, D], k [N_total, G, D] with cu_q and
    cu_k int32 [n_seq + 1]; rows of q past the last sequence see no key. q_start: key position of
    query 0. use_gluon: see hopper.py. slabs: where hopper.forward_with_scores serves, for the
    scores by so many heads of a group.
    """
    check_heads(q, k, v)
    in_gluon = hopper.forward(q, k, v, use_gluon)
    if in_gluon:
        return in_gluon.span_attention_fwd_hopper(
            q, k, v, span, softmax_scale, cu_q, cu_k, q_start, slabs, scoring_heads
        )
    hq, dim = q.shape[-2:]
    groups, dv = v.shape[-2:]
    heads = hq // groups
    out = torch.empty(*q.shape[:-1], dv, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    arch = arch_of(q.device)
    rows, block_n, warps, stages = fwd_tiles(arch, dim, dv, q.element_size())
    heads_padded = pow2(heads)
    block_q = max(rows // heads_padded, 1)
    at = Rows.of(q, k, cu_q, cu_k)
    # Not in the kernel: what Triton 3.6 made of that for sm_90 wrote outside of shared memory at
    # some head sizes.
    k, v = marked(k, v)
    tma = tma_usable(arch, k, whole=v)
    launch(
        _span_fwd_kernel, (at.query_tiles(block_q), at.batch * groups),
        q, k, v, *kv_tiles(k, v, block_n, tma), out, lse, *(at.cu or (lse, lse)), at.sq, at.sk,
        groups, heads, q_start, span.a, span.b, softmax_scale * LOG2E,
        MODE=span.mode, VARLEN=at.cu is not None, BLOCK_Q=block_q, HEADS=heads_padded,
        BLOCK_N=block_n, TMA=tma, num_warps=warps, num_stages=stages,
        **head_constants(dim, dv, q.dtype),
    )  # fmt: skip
    return out, lse
