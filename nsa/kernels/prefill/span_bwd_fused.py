"""Backward of compressed attention in one pass over key tiles: 5 products, not 7.

A program owns one key tile of one group and walks a share of the queries that see it: S, P, dP and
dS once per tile of queries, dK and dV in registers, dQ added to an fp32 buffer in global memory.
The order of those additions changes from run to run, so gradients repeat up to the rounding of
fp32; span_bwd.py keeps two passes that repeat bitwise, and that are as fast for a window.

Queries are split at the same positions for every key tile: programs that run at the same time walk
the same queries, so that Q, dO and dQ meet in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nsa.kernels.launch import launch
from nsa.kernels.prefill.gate_sign import in_log2, signed_by
from nsa.kernels.prefill.marked_keys import keys_for_backward
from nsa.kernels.prefill.packs import Rows, sequence_bounds, share_of_program
from nsa.kernels.prefill.span_kinds import Span
from nsa.kernels.prefill.sums import rounded, rounded_keys, zero_sums
from nsa.kernels.row_tiles import head_tiles, row_tiles, tma_usable
from nsa.kernels.tiles import LOG2E, arch_of, cdiv, pow2, sm_count, split_dim

MOST_SHARES = 128  # of a packed sequence: programs are launched for tiles that could have as many


@triton.jit
def _query_tile(
    X, XD, tile_row, head0, row, live, offs,
    WIDTH: tl.constexpr, BEGIN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """(query, head) rows of X [.., HQ, WIDTH], columns `offs` (from BEGIN on); dead rows are 0."""
    if WHOLE:
        x = XD.load([tile_row, head0, BEGIN]).reshape(BLOCK_M, BLOCK)
    else:
        x = tl.load(X + row[:, None] * WIDTH + offs[None, :], mask=live[:, None], other=0.0)
    return x


@triton.jit
def _add_to_dq(
    DQ, DQD, dq, tile_row, head0, row, live, offs,
    D: tl.constexpr, BEGIN: tl.constexpr, BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr,
    HEADS: tl.constexpr, TMA_ADD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    if TMA_ADD:
        # Dead rows are added to the next sequence's: zeros, whatever the keys were (0 * NaN).
        if not WHOLE:
            dq = tl.where(live[:, None], dq, 0.0)
        DQD.atomic_add([tile_row, head0, BEGIN], dq.reshape(BLOCK_Q, HEADS, BLOCK))
    else:
        at = DQ + row[:, None] * D + offs[None, :]
        tl.atomic_add(at, dq, mask=live[:, None], sem="relaxed")


@triton.jit
def _span_fused_step(
    dk, dk2, dv, k, k2, v, Q, DO, QD, QD2, DOD, LSED, DELTAD, LSE, DELTA, DQ, DQD, DQD2, q_begin,
    m0, q_len, G, group, first, offs_d, offs_d2, offs_dv, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    MASKED: tl.constexpr, WHOLE: tl.constexpr, TMA_ADD: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """One tile of (query, head) rows against the keys, which are the rows of S.

    Queries from `first` on see a key. WHOLE: every query is live.
    """
    BLOCK_M: tl.constexpr = BLOCK_Q * HEADS
    rows = tl.arange(0, BLOCK_M)
    t = m0 + rows // HEADS
    live = t < q_len
    head0 = group * HEADS
    row = (q_begin + t) * (G * HEADS) + head0 + rows % HEADS
    tile_row = (q_begin + m0).to(tl.int32)
    q = _query_tile(Q, QD, tile_row, head0, row, live, offs_d, D, 0, BLOCK_D, BLOCK_M, WHOLE)
    do = _query_tile(DO, DOD, tile_row, head0, row, live, offs_dv, DV, 0, DV, BLOCK_M, WHOLE)
    if WHOLE:
        lse = LSED.load([tile_row, head0]).reshape(BLOCK_M)
        delta = DELTAD.load([tile_row, head0]).reshape(BLOCK_M)
    else:
        lse = tl.load(LSE + row, mask=live, other=float("inf"))
        delta = tl.load(DELTA + row, mask=live, other=0.0)
    lse2 = in_log2(lse, SIGNED)
    s = tl.dot(k, tl.trans(q))
    if BLOCK_D2 > 0:
        q2 = _query_tile(
            Q, QD2, tile_row, head0, row, live, offs_d2, D, BLOCK_D, BLOCK_D2, BLOCK_M, WHOLE
        )
        s = tl.dot(k2, tl.trans(q2), s)
    dp = tl.dot(v, tl.trans(do))
    p = tl.math.exp2(s * scale_log2 - lse2[None, :])
    if SIGNED:
        p = signed_by(p, lse2[None, :])
    if MASKED:
        seen = tl.where(live, t, -2147483648)[None, :] >= first[:, None]  # no dead row sees a key
        p = tl.where(seen, p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv)
    ds = p * (dp - delta[None, :])
    if MASKED:
        ds = tl.where(seen, ds, 0.0)  # again: dp and delta may be NaN
    ds = ds.to(q.dtype)
    dk = tl.dot(ds, q, dk)
    # Transposed, both operands come from shared memory: fewer registers than dS^T as rows.
    dq = tl.trans(tl.dot(tl.trans(k), ds))
    _add_to_dq(
        DQ, DQD, dq, tile_row, head0, row, live, offs_d, D, 0, BLOCK_D, BLOCK_Q, HEADS, TMA_ADD,
        WHOLE,
    )  # fmt: skip
    if BLOCK_D2 > 0:
        dk2 = tl.dot(ds, q2, dk2)
        dq2 = tl.trans(tl.dot(tl.trans(k2), ds))
        _add_to_dq(
            DQ, DQD2, dq2, tile_row, head0, row, live, offs_d2, D, BLOCK_D, BLOCK_D2, BLOCK_Q,
            HEADS, TMA_ADD, WHOLE,
        )  # fmt: skip
    return dk, dk2, dv


@triton.jit
def _put_keys(OUT, x, row, live, offs, WIDTH: tl.constexpr, SPLIT: tl.constexpr):
    """Rows of dK or dV: added to fp32 where several programs share a key, else written."""
    at = OUT + row[:, None] * WIDTH + offs[None, :]
    if SPLIT:
        tl.atomic_add(at, x, mask=live[:, None], sem="relaxed")
    else:
        tl.store(at, x.to(OUT.dtype.element_ty), mask=live[:, None])


@triton.jit
def _span_bwd_fused_kernel(
    Q, K, V, DO, QD, QD2, DOD, LSED, DELTAD, LSE, DELTA, DQ, DQD, DQD2, DK, DV_OUT, CU_Q, CU_K,
    SQ, SK, G, share, q_start, span_a, span_b, scale, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, VARLEN: tl.constexpr,
    BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr, SPLIT: tl.constexpr, TMA_ADD: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """dK, dV of one key tile of one group from one share of the queries that see it, their dQ.

    DQ: fp32 [.., HQ, D], zeroed, still without the softmax scale. DK, DV_OUT: like K, V; fp32 and
    zeroed where SPLIT. share: queries of a program, a multiple of BLOCK_Q; of a pack SK is how many
    shares a sequence may have.
    """
    batch, group, tile, split, share = share_of_program(
        CU_Q, CU_K, SQ, SK, G, share, 0, BLOCK_N, BLOCK_Q, VARLEN
    )
    q_begin, q_len, k_begin, k_len = sequence_bounds(CU_Q, CU_K, batch, SQ, SK, VARLEN)
    n0 = tile * BLOCK_N
    if n0 >= k_len:
        return
    offs_n = n0 + tl.arange(0, BLOCK_N)
    live_n = offs_n < k_len
    n_last = tl.minimum(n0 + BLOCK_N, k_len) - 1
    # The first query that sees a key; keys past the sequence are seen by none.
    first = tl.where(live_n, offs_n * span_b + span_a - 1 - q_start, 2147483647)
    m_begin = tl.maximum(n0 * span_b + span_a - 1 - q_start, 0) // BLOCK_Q * BLOCK_Q
    m_begin = tl.maximum(m_begin, split * share)
    m_end = tl.minimum((split + 1) * share, q_len)
    if SPLIT:
        if m_begin >= m_end:
            return
    m_end = tl.maximum(m_end, m_begin)
    # Descriptors serve tiles of live queries only; a sequence may end inside a tile.
    whole_end = tl.minimum((m_end + BLOCK_Q - 1) // BLOCK_Q, q_len // BLOCK_Q) * BLOCK_Q
    whole_end = tl.maximum(whole_end, m_begin)
    full_begin = whole_end
    # From here on every query sees all BLOCK_N keys.
    if n0 + BLOCK_N <= k_len:
        full_begin = n_last * span_b + span_a - 1 - q_start + BLOCK_Q - 1
        full_begin = tl.maximum(full_begin // BLOCK_Q * BLOCK_Q, m_begin)
        full_begin = tl.minimum(full_begin, whole_end)

    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, DV)
    k_row = (k_begin + offs_n) * G + group
    k = tl.load(K + k_row[:, None] * D + offs_d[None, :], mask=live_n[:, None], other=0.0)
    v = tl.load(V + k_row[:, None] * DV + offs_dv[None, :], mask=live_n[:, None], other=0.0)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, DV], tl.float32)
    if BLOCK_D2 > 0:
        offs_d2 = BLOCK_D + tl.arange(0, BLOCK_D2)
        k2 = tl.load(K + k_row[:, None] * D + offs_d2[None, :], mask=live_n[:, None], other=0.0)
        dk2 = tl.zeros([BLOCK_N, BLOCK_D2], tl.float32)
    else:
        offs_d2 = offs_d
        k2 = k
        dk2 = offs_n

    for m0 in tl.range(m_begin, full_begin, BLOCK_Q):
        dk, dk2, dv = _span_fused_step(
            dk, dk2, dv, k, k2, v, Q, DO, QD, QD2, DOD, LSED, DELTAD, LSE, DELTA, DQ, DQD, DQD2,
            q_begin, m0, q_len, G, group, first, offs_d, offs_d2, offs_dv, scale_log2,
            D, DV, BLOCK_Q, HEADS, BLOCK_D, BLOCK_D2, True, True, TMA_ADD, SIGNED,
        )  # fmt: skip
    for m0 in tl.range(full_begin, whole_end, BLOCK_Q):
        dk, dk2, dv = _span_fused_step(
            dk, dk2, dv, k, k2, v, Q, DO, QD, QD2, DOD, LSED, DELTAD, LSE, DELTA, DQ, DQD, DQD2,
            q_begin, m0, q_len, G, group, first, offs_d, offs_d2, offs_dv, scale_log2,
            D, DV, BLOCK_Q, HEADS, BLOCK_D, BLOCK_D2, False, True, TMA_ADD, SIGNED,
        )  # fmt: skip
    for m0 in tl.range(whole_end, m_end, BLOCK_Q, num_stages=1):
        dk, dk2, dv = _span_fused_step(
            dk, dk2, dv, k, k2, v, Q, DO, QD, QD2, DOD, LSED, DELTAD, LSE, DELTA, DQ, DQD, DQD2,
            q_begin, m0, q_len, G, group, first, offs_d, offs_d2, offs_dv, scale_log2,
            D, DV, BLOCK_Q, HEADS, BLOCK_D, BLOCK_D2, True, False, TMA_ADD, SIGNED,
        )  # fmt: skip
    _put_keys(DK, dk * scale, k_row, live_n, offs_d, D, SPLIT)
    if BLOCK_D2 > 0:
        _put_keys(DK, dk2 * scale, k_row, live_n, offs_d2, D, SPLIT)
    _put_keys(DV_OUT, dv, k_row, live_n, offs_dv, DV, SPLIT)


def fused_tiles(arch: int, d: int, dv: int) -> tuple[int, int, int, int] | None:
    """(rows, BLOCK_N, num_warps, num_stages); None where the tiles do not fit the registers."""
    if arch == 0:
        return 32, 16, 4, 1
    if arch != 90 or max(d, dv) > 128:  # H100, 192/128, 8k tokens: 1.94 ms, two passes 1.41
        return None
    # H200, D=128, 64k tokens: 30.5 ms; 2 stages 34.4, 32 rows 32.2, 64 keys 39 and more.
    return 64, 128, 8, 3


def usable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor) -> bool:
    """True where the fused pass can run: SM 9.0 (or the interpreter), 16 bits, widths that are not
    padded, 4, 8, 16 .. query heads per group as far as a tile holds them."""
    arch = arch_of(q.device)
    tiles = fused_tiles(arch, q.shape[-1], v.shape[-1])
    heads = q.shape[-2] // k.shape[-2]
    return (
        tiles is not None
        and heads % 4 == 0
        and heads & (heads - 1) == 0
        and heads <= tiles[0]
        and tma_usable(arch, q, whole=grad_out)
        and tma_usable(arch, k, whole=v)
    )


def query_share(sq: int, columns: int, block_q: int, sms: int) -> int:
    """Queries of one program, a multiple of block_q, for `columns` (key tile, group) pairs."""
    # About sixteen programs per multiprocessor, half of them in the future and empty.
    share = pow2(max(sq * columns // (16 * sms), 1) + 1) // 2
    return cdiv(min(max(share, 128), 2048), block_q) * block_q


def query_shares(
    at: Rows, block_n: int, groups: int, block_q: int, sms: int
) -> tuple[int, int]:
    """(share, splits): query_share, and how many shares a sequence has at most."""
    share = query_share(at.longest, at.filled_tiles(block_n) * groups, block_q, sms)
    splits = cdiv(at.longest, share)
    return share, min(splits, MOST_SHARES) if at.cu else splits


def gradient_sums(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dq: torch.Tensor | None, splits: int,
    packed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """What one pass adds dQ to, and what it writes dK and dV to, or adds where it is split; keys of
    a pack may be in no sequence."""
    acc = torch.zeros(q.shape, device=q.device, dtype=torch.float32) if dq is None else dq
    if splits > 1:
        return acc, *zero_sums(k, v)
    make = torch.zeros_like if packed else torch.empty_like
    return acc, make(k), make(v)


def compressed_attention_bwd_fused(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor,
    delta: torch.Tensor, span: Span, softmax_scale: float, at: Rows, dq: torch.Tensor | None,
    q_start: int, any_negative: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk, dv as span_attention_bwd returns them, for inputs that are usable()."""
    k = keys_for_backward(k)
    hq, dim = q.shape[-2:]
    groups, dv_dim = v.shape[-2:]
    heads = hq // groups
    arch = arch_of(q.device)
    rows, block_n, warps, stages = fused_tiles(arch, dim, dv_dim)
    block_q = rows // heads
    share, splits = query_shares(at, block_n, groups, block_q, sm_count(q.device))
    acc, dk, dv = gradient_sums(q, k, v, dq, splits, at.cu is not None)
    d1, d2 = split_dim(dim)
    tma_add = arch != 0  # the interpreter has no adding descriptors
    add_tiles = lambda width: head_tiles(acc, block_q, heads, width) if tma_add else acc
    launch(
        _span_bwd_fused_kernel, at.shares(block_n, groups, share, splits),
        q, k, v, grad_out, head_tiles(q, block_q, heads, d1),
        head_tiles(q, block_q, heads, d2 or d1), head_tiles(grad_out, block_q, heads, dv_dim),
        row_tiles(lse[..., None], block_q, heads), row_tiles(delta[..., None], block_q, heads),
        lse, delta, acc, add_tiles(d1), add_tiles(d2 or d1), dk, dv, *(at.cu or (lse, lse)), at.sq,
        splits if at.cu else at.sk, groups, share, q_start, span.a, span.b, softmax_scale,
        softmax_scale * LOG2E,
        D=dim, DV=dv_dim, VARLEN=at.cu is not None, BLOCK_Q=block_q, HEADS=heads,
        BLOCK_N=block_n, BLOCK_D=d1, BLOCK_D2=d2, SPLIT=splits > 1, TMA_ADD=tma_add,
        SIGNED=any_negative is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if dq is None:
        dq = rounded(acc, softmax_scale, q)
    return dq, *rounded_keys(dk, dv, k, v)
