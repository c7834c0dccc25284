"""Selection attention by block indices, backward: by key tiles, dQ by atomics or in its own pass.

dK and dV walk the inverted lists (lists_by_keys.py): a program owns a chunk of the rows that attend
one key tile, keeps K, V, dK and dV of the tile on chip and gathers rows of Q and dO. It can add
dQ = dS K of each row to an fp32 buffer, and dK and dV too: one pass, gradients that repeat up to
the rounding of fp32; in Gluon it is bwd_hopper.py. Where torch asks for deterministic
algorithms, chunks write fp32 partials that are summed in a fixed order, and dQ runs in the order of
the forward, by union tiles where they pay (union_lists.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from nsa.kernels.head_rows import head_rows, split_rows
from nsa.kernels.launch import launch
from nsa.kernels.prefill import hopper
from nsa.kernels.prefill.blocks.fwd_triton import past_blocks, token_position
from nsa.kernels.prefill.blocks.lists_by_keys import TileRows, keys_of_tile, rows_of_tiles
from nsa.kernels.prefill.blocks.selection import Selection
from nsa.kernels.prefill.blocks.union_lists import in_union, lists_for
from nsa.kernels.prefill.blocks.unions_triton import dq_tiles as union_dq_tiles
from nsa.kernels.prefill.blocks.unions_triton import union_attention_dq
from nsa.kernels.prefill.delta import attention_delta
from nsa.kernels.prefill.gate_sign import in_log2, signed_by
from nsa.kernels.prefill.limits import check_block_size
from nsa.kernels.prefill.marked_keys import keys_for_backward, values_for_backward
from nsa.kernels.prefill.span.common import load_kv, put_dq
from nsa.kernels.prefill.sums import HalfSums, rounded, rounded_keys, zero_halves, zero_sums
from nsa.kernels.row_tiles import kv_tiles, tma_usable
from nsa.kernels.tiles import (
    LOG2E,
    arch_of,
    cdiv,
    datacenter,
    dot_size,
    head_constants,
    pow2,
    sm_count,
)

Given = tuple[Any, ...]  # grad_out, q, k, v, by, lse, delta
ANEW_PER_SM = 4  # programs that look for dQ to be found anew; hardly ever is there any


def _many_wide_heads(arch: int, widest: int, heads: int) -> bool:
    """Groups of more than 16 wide heads, for which parts before and beside SM 9.0 and 10.0 put 4 KB
    of registers on the stack, or 300 bytes, unless a program has 32 keys and 8 warps."""
    return heads > 16 and widest > 128 and not datacenter(arch)


def key_tile(block_size: int, widest: int, itemsize: int, heads: int, arch: int) -> int:
    """Keys per program of the dK/dV kernel: as many as hold K, V, dK and dV on chip."""
    few = widest > (192 if itemsize == 2 else 128) or _many_wide_heads(arch, widest, heads)
    return min(block_size, 32 if few else 64)


@triton.jit
def _block_attn_dq_step(
    dq, dq2, q, q2, do, lse2, delta, k, k2, v, seen, scale_log2,
    BLOCK_D2: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if BLOCK_D2 > 0:
        s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
    p = tl.math.exp2(s * scale_log2 - lse2[:, None])
    if SIGNED:
        p = signed_by(p, lse2[:, None])
    if MASKED:
        p = tl.where(seen[None, :], p, 0.0)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    ds = (p * (dp - delta[:, None])).to(k.dtype)
    dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    if BLOCK_D2 > 0:
        dq2 = tl.dot(ds, k2, dq2, input_precision=PRECISION)
    return dq, dq2


@triton.jit
def _dq_of_query(
    token, group, Q, K, V, KD, KD2, VD, BLOCK_INDICES, SEQ_BEGIN, DO, LSE, DELTA, MORE, DQ, S,
    S_KV, G, H, q_start, n_sel, block_size, scale, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, VARLEN: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    OWN_N: tl.constexpr, N_PAD: tl.constexpr, ACCUMULATE: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """scale times dQ of one token's query heads of a group, and times MORE where ACCUMULATE."""
    batch, t, first_row = token_position(token, SEQ_BEGIN, S, VARLEN)
    t += q_start
    token = token.to(tl.int64)
    head = tl.arange(0, HEADS)
    head_live = head < H
    row_index = token * (G * H) + group * H + head
    offs_d, offs_d2, q, q2 = split_rows(Q, row_index, head_live, D, BLOCK_D, BLOCK_D2)
    offs_dv = tl.arange(0, BLOCK_DV)
    do = head_rows(DO, row_index, head_live, offs_dv, DV)
    lse = tl.load(LSE + row_index, mask=head_live, other=float("inf"))
    lse2 = in_log2(lse, SIGNED)
    delta = tl.load(DELTA + row_index, mask=head_live, other=0.0)
    first_key = batch.to(tl.int64) * S_KV + first_row
    dq = tl.zeros([HEADS, BLOCK_D], tl.float32)
    dq2 = delta
    if BLOCK_D2 > 0:
        dq2 = tl.zeros([HEADS, BLOCK_D2], tl.float32)
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
        dq, dq2 = _block_attn_dq_step(
            dq, dq2, q, q2, do, lse2, delta, k, k2, v, live, scale_log2, BLOCK_D2,
            False, PRECISION, SIGNED,
        )  # fmt: skip
    begin = own * block_size
    for n0 in tl.range(begin, begin + has_own * (t + 1 - begin), OWN_N, num_stages=1):
        live = n0 + tl.arange(0, OWN_N) <= t
        k, k2, v = load_kv(
            K, V, KD, KD2, VD, first_key, n0, live, group, G, offs_d, offs_d2, offs_dv, D, DV,
            OWN_N, BLOCK_D, BLOCK_D2, BLOCK_DV, TMA, True,
        )  # fmt: skip
        dq, dq2 = _block_attn_dq_step(
            dq, dq2, q, q2, do, lse2, delta, k, k2, v, live, scale_log2, BLOCK_D2,
            True, PRECISION, SIGNED,
        )  # fmt: skip
    put_dq(MORE, DQ, dq, row_index, head_live, offs_d, scale, D, ACCUMULATE)
    if BLOCK_D2 > 0:
        put_dq(MORE, DQ, dq2, row_index, head_live, offs_d2, scale, D, ACCUMULATE)


@triton.jit
def _block_attn_bwd_dq_kernel(
    Q, K, V, KD, KD2, VD, BLOCK_INDICES, SEQ_BEGIN, STATE, DO, LSE, DELTA, DQ, S, S_KV, G, H,
    q_start, n_sel, block_size, scale, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, VARLEN: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    OWN_N: tl.constexpr, N_PAD: tl.constexpr, UNION: tl.constexpr, ACCUMULATE: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    group = tl.program_id(1)
    if UNION > 0:
        if in_union(STATE, token, group, G, UNION):
            return
    _dq_of_query(
        token, group, Q, K, V, KD, KD2, VD, BLOCK_INDICES, SEQ_BEGIN, DO, LSE, DELTA, DQ, DQ, S,
        S_KV, G, H, q_start, n_sel, block_size, scale, scale_log2, D, DV, VARLEN, HEADS, BLOCK_N,
        BLOCK_D, BLOCK_D2, BLOCK_DV, OWN_N, N_PAD, ACCUMULATE, TMA, PRECISION, SIGNED,
    )  # fmt: skip


@triton.jit
def _block_attn_dq_anew_kernel(
    Q, K, V, KD, KD2, VD, BLOCK_INDICES, SEQ_BEGIN, LOST, DO, LSE, DELTA, MORE, DQ, S, S_KV, G, H,
    q_start, n_sel, block_size, scale, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, VARLEN: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    OWN_N: tl.constexpr, N_PAD: tl.constexpr, ACCUMULATE: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """The units of LOST, see sums.HalfSums: hardly ever is there one."""
    for i in tl.range(tl.program_id(0), tl.load(LOST), tl.num_programs(0)):
        unit = tl.load(LOST + 1 + i)
        _dq_of_query(
            unit // G, unit % G, Q, K, V, KD, KD2, VD, BLOCK_INDICES, SEQ_BEGIN, DO, LSE, DELTA,
            MORE, DQ, S, S_KV, G, H, q_start, n_sel, block_size, scale, scale_log2, D, DV, VARLEN,
            HEADS, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, OWN_N, N_PAD, ACCUMULATE, TMA, PRECISION,
            SIGNED,
        )  # fmt: skip


@triton.jit
def _add_rows(OUT, x, row, live, offs, WIDTH: tl.constexpr):
    at = OUT + row[:, None] * WIDTH + offs[None, :]
    tl.atomic_add(at, x, mask=live[:, None] & (offs < WIDTH)[None, :], sem="relaxed")


@triton.jit
def _row_of_chunk(begin, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Its first row in _partial_rows(), for a chunk that begins with that pair."""
    return -(begin // CHUNK) * BLOCK_N


@triton.jit
def _block_attn_bwd_dkdv_kernel(
    Q, K, V, DO, LSE, DELTA, ROWS, CHUNK_TILE, CHUNK_BEGIN, CHUNK_END, CU_SEQLENS, DQ, OUT_K,
    OUT_V, S, S_KV, G, H, q_start, per_seq, scale, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, VARLEN: tl.constexpr, PAIRS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    BLOCK_DV: tl.constexpr, ADD: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
    SIGNED: tl.constexpr,
):  # fmt: skip
    """dK, dV of one key tile from one chunk of its rows.

    ADD: OUT_K and OUT_V are fp32 [.., G, D], zeroed; the chunk's part is added to them, and that of
    dQ to DQ, fp32 [.., HQ, D]. dQ and dK are then without the softmax scale. Else they are what
    _partial_rows() made.
    """
    chunk = tl.program_id(0)
    begin = tl.load(CHUNK_BEGIN + chunk)
    end = tl.load(CHUNK_END + chunk)
    if begin >= end:
        return
    tile = tl.load(CHUNK_TILE + chunk)
    group, _, n0, n_keys, first_row, first_key = keys_of_tile(
        tile, CU_SEQLENS, S_KV, G, per_seq, BLOCK_N, VARLEN
    )
    offs_n = n0 + tl.arange(0, BLOCK_N)
    offs_dv = tl.arange(0, BLOCK_DV)
    live_n = offs_n < n_keys
    key_row = (first_key + offs_n) * G + group
    offs_d, offs_d2, k, k2 = split_rows(K, key_row, live_n, D, BLOCK_D, BLOCK_D2)
    v = head_rows(V, key_row, live_n, offs_dv, DV)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    if BLOCK_D2 > 0:
        dk2 = tl.zeros([BLOCK_N, BLOCK_D2], tl.float32)
    rows = tl.arange(0, PAIRS * HEADS)
    head = rows % HEADS
    for p0 in tl.range(begin, end, PAIRS):
        pair = p0 + rows // HEADS
        live = (pair < end) & (head < H)
        token = tl.load(ROWS + pair, mask=pair < end, other=0) // G
        row_index = token.to(tl.int64) * (G * H) + group * H + head
        q = head_rows(Q, row_index, live, offs_d, D)
        do = head_rows(DO, row_index, live, offs_dv, DV)
        lse = tl.load(LSE + row_index, mask=live, other=float("inf"))
        delta = tl.load(DELTA + row_index, mask=live, other=0.0)
        lse2 = in_log2(lse, SIGNED)
        if VARLEN:
            t = token - first_row
        else:
            t = token % S + q_start
        s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if BLOCK_D2 > 0:
            q2 = head_rows(Q, row_index, live, offs_d2, D)
            s = tl.dot(k2, tl.trans(q2), s, input_precision=PRECISION)
        p = tl.math.exp2(s * scale_log2 - lse2[None, :])
        if SIGNED:
            p = signed_by(p, lse2[None, :])
        seen = offs_n[:, None] <= t[None, :]
        p = tl.where(seen, p, 0.0)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        # A row whose delta is NaN must not spoil keys of the tile that it does not see.
        ds = tl.where(seen, p * (dp - delta[None, :]), 0.0).to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if BLOCK_D2 > 0:
            dk2 = tl.dot(ds, q2, dk2, input_precision=PRECISION)
        if ADD:
            # Transposed, both operands come from shared memory: fewer registers than dS^T as rows.
            dq = tl.trans(tl.dot(tl.trans(k), ds, input_precision=PRECISION))
            _add_rows(DQ, dq, row_index, live, offs_d, D)
            if BLOCK_D2 > 0:
                dq2 = tl.trans(tl.dot(tl.trans(k2), ds, input_precision=PRECISION))
                _add_rows(DQ, dq2, row_index, live, offs_d2, D)
    if ADD:
        _add_rows(OUT_K, dk, key_row, live_n, offs_d, D)
        if BLOCK_D2 > 0:
            _add_rows(OUT_K, dk2, key_row, live_n, offs_d2, D)
        _add_rows(OUT_V, dv, key_row, live_n, offs_dv, DV)
    else:
        is_first = (chunk == 0) | (tl.load(CHUNK_TILE + tl.maximum(chunk, 1) - 1) != tile)
        # Found anew, or the rows of the keys would take registers throughout the loop.
        local = tl.arange(0, BLOCK_N)
        row = tl.where(is_first, (first_key + n0) * G + group, _row_of_chunk(begin, CHUNK, BLOCK_N))
        part = row + local * tl.where(is_first, G, 1)
        live = (local < n_keys - n0)[:, None]
        k_at = OUT_K + part[:, None] * D
        tl.store(k_at + offs_d[None, :], dk * scale, mask=live & (offs_d < D)[None, :])
        if BLOCK_D2 > 0:
            tl.store(k_at + offs_d2[None, :], dk2 * scale, mask=live & (offs_d2 < D)[None, :])
        v_at = OUT_V + part[:, None] * DV
        tl.store(v_at + offs_dv[None, :], dv, mask=live & (offs_dv < DV)[None, :])


@triton.jit
def _block_attn_bwd_sum_kernel(
    PART, OUT, TILE_CHUNKS, CHUNK_BEGIN, CU_SEQLENS, S_KV, G, per_seq,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Sum a tile's chunks in order and write them where the tile's keys are."""
    tile = tl.program_id(0)
    at = tl.program_id(1) * ROWS
    group, _, n0, n_keys, _, first_key = keys_of_tile(
        tile, CU_SEQLENS, S_KV, G, per_seq, BLOCK_N, VARLEN
    )
    key = n0 + at + tl.arange(0, ROWS)
    key_row = (first_key + key) * G + group
    cols = tl.arange(0, BLOCK_DIM)
    mask = (key < n_keys)[:, None] & (cols < DIM)[None, :]
    first = tl.load(TILE_CHUNKS + tile)
    last = tl.load(TILE_CHUNKS + tile + 1)
    own = key_row[:, None] * DIM + cols[None, :]
    acc = tl.load(PART + own, mask=mask & (first < last), other=0.0)
    for chunk in tl.range(first + 1, last):
        row = _row_of_chunk(tl.load(CHUNK_BEGIN + chunk), CHUNK, BLOCK_N) + at
        row += tl.arange(0, ROWS)
        acc += tl.load(PART + row[:, None] * DIM + cols[None, :], mask=mask, other=0.0)
    tl.store(OUT + own, acc.to(OUT.dtype.element_ty), mask=mask)


def dq_tiles(arch: int, d: int, dv: int, itemsize: int) -> tuple[int, int, int]:
    """(BLOCK_N, num_warps, num_stages) of the dQ kernel."""
    if arch == 0:
        return 16, 4, 1
    if itemsize == 4:
        return 16, 8, 1
    # H200, bf16, D=128, 64k tokens: 15.3 ms; more warps wait for each other on 16 rows.
    return (32, 1, 2) if max(d, dv) <= 128 else (64, 4, 2)


def fused_tiles(
    arch: int, heads: int, d: int, dv: int, itemsize: int, keys: int = 64
) -> tuple[int, int, int] | None:
    """dkdv_tiles of the pass that adds dQ too; None where two passes are better, or where it does
    not fit the registers. heads: query heads a group; keys: of a tile.

    H200, bf16, D=128: with 4 heads 32k tokens take 10.3 ms whatever the blocks, two passes 18.1 on
    random and 7.8 on clustered ones. With 16 heads, 64k tokens: 27.5 and 28.5 against 29.7 and
    24.7, 8k: 4.2 and 4.4 against 3.9 and 3.0. (32, 4, 1) is miscompiled for D=128 by triton 3.6.
    """
    if arch == 0:
        return 32, 4, 1
    widest = max(d, dv)
    if itemsize == 4 or heads > 8:
        return None
    if not datacenter(arch):
        # Of tiles of 16 keys ptxas puts all but 32 registers on the stack at 32 rows (sm_80).
        rows = 32 if arch < 90 and keys == 64 else 16
        return (rows, 8, 1) if widest <= 128 else None
    if widest <= 128:
        return 64, 4, 1
    return (32, 8, 1) if widest <= 192 else (32, 4, 1)


def dkdv_tiles(arch: int, d: int, dv: int, itemsize: int, heads: int) -> tuple[int, int, int]:
    """(rows gathered a step, num_warps, num_stages) of the dK/dV kernel; keys are key_tile()."""
    if arch == 0:
        return 32, 4, 1
    widest = max(d, dv)
    if itemsize == 4:
        return 16, 8, 1
    if widest <= 128:
        return 64, 4, 1  # H200, 64k tokens: 14.9 ms
    if widest <= 192:
        if datacenter(arch):
            return 32, 4, 1
        return 16, 8 if _many_wide_heads(arch, widest, heads) else 4, 1
    return 32, 4, 1


def block_attention_bwd(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor | None, lse: torch.Tensor, block_indices: torch.Tensor, *,
    delta: torch.Tensor | None = None, dq: torch.Tensor | None = None,
    reach: torch.Tensor | None = None, use_gluon: bool | None = None,
    any_negative: torch.Tensor | None = None, grad_lse: torch.Tensor | None = None, **how: Any,
) -> tuple[torch.Tensor | HalfSums, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk, dv like q, k, v; arguments as for gated_block_attention_fwd.

    delta [.., HQ] fp32 is rowsum(grad_out * out), computed when not given (out is not read then).
    With dq given (fp32, like q), dQ / softmax_scale of this branch is added to it in place and dq
    itself is returned; or, with reach as well (|gate| * rowsum |grad_out|, fp32 [.., HQ]) and where
    that is faster, HalfSums to be added to it. use_gluon: see hopper.py. any_negative:
    combine_bwd's, where lse and delta are. grad_lse: like lse, where delta is not given. Raises
    NotImplementedError for a block_size that has no key tile.
    """
    by = Selection(block_indices, **how)
    block_size, softmax_scale, cu_seqlens = by.block_size, by.softmax_scale, by.cu_seqlens
    signed = any_negative is not None
    hq, dim = q.shape[-2:]
    groups, dv_dim = v.shape[-2:]
    heads = hq // groups
    if lse.numel() == 0:
        return torch.zeros_like(q) if dq is None else dq, torch.zeros_like(k), torch.zeros_like(v)
    check_block_size("block_size", block_size)
    arch = arch_of(q.device)
    size = q.element_size()
    tile = key_tile(block_size, max(dim, dv_dim), size, heads, arch) if arch else 16
    if delta is None:
        delta, own_reach = attention_delta(out, grad_out, lse, grad_lse)
        if grad_lse is not None:
            reach = None  # which bounds the part of grad_out alone
        elif dq is None:
            reach = own_reach
    in_gluon = fused = None
    if not torch.are_deterministic_algorithms_enabled():
        in_gluon = hopper.block_backward(q, k, v, grad_out, block_size, use_gluon)
        fused = fused_tiles(arch, heads, dim, dv_dim, size, tile)
    one_pass = in_gluon or fused
    if not in_gluon:  # which does so itself
        k, v = keys_for_backward(k), values_for_backward(v)
    given = (grad_out, q, k, v, by, lse, delta)
    if not one_pass:
        dq = _dq_by_rows(given, dq, signed)
    s_q, s_kv = by.lengths(q, k) if cu_seqlens is None else (1, cu_seqlens.numel() - 1)
    lists = rows_of_tiles(block_indices, block_size // tile, tile, s_kv, cu_seqlens)
    like = dict(dtype=torch.float32, device=q.device)
    if one_pass:
        out_k, out_v = zero_sums(k, v)
        if in_gluon and reach is not None and in_gluon.adds_halves(q, by.n_sel, block_size):
            anew = partial(_dq_anew, given=given, signed=signed)
            acc = zero_halves(q, k, v, reach, anew)
        else:
            acc = torch.zeros(q.shape, **like) if dq is None else dq
    else:
        out_k, out_v = _partial_rows(k, lists, tile), _partial_rows(v, lists, tile)
        acc = delta  # not used
    cu_arg = lists.rows if cu_seqlens is None else cu_seqlens
    if in_gluon:
        in_gluon.add_block_gradients(
            grad_out, q, k, v, lse, delta, lists, cu_seqlens, softmax_scale, by.q_start, acc, out_k,
            out_v, any_negative,
        )  # fmt: skip
    else:
        rows, warps, stages = fused or dkdv_tiles(arch, dim, dv_dim, size, heads)
        heads_padded = pow2(heads)
        launch(
            _block_attn_bwd_dkdv_kernel, (lists.n_chunks,),
            q, k, v, grad_out, lse, delta, lists.rows, lists.chunk_tile, lists.chunk_begin,
            lists.chunk_end, cu_arg, acc, out_k, out_v, s_q, s_kv, groups, heads, by.q_start,
            lists.per_seq, softmax_scale, softmax_scale * LOG2E,
            VARLEN=by.packed, PAIRS=max(rows // heads_padded, 1), HEADS=heads_padded, BLOCK_N=tile,
            ADD=fused is not None, CHUNK=lists.size, SIGNED=signed, num_warps=warps,
            num_stages=stages, **head_constants(dim, dv_dim, q.dtype),
        )  # fmt: skip
    if one_pass:
        if dq is None:
            acc = rounded(acc, softmax_scale, q)
        return acc, *rounded_keys(out_k, out_v, k, v, softmax_scale)
    return dq, *_summed_parts((out_k, out_v), (k, v), lists, cu_arg, s_kv, tile, by.packed)


def _partial_rows(x: torch.Tensor, lists: TileRows, tile: int) -> torch.Tensor:
    """fp32 rows of the gradient of x, keys or values: of each tile the part of its first chunk. In
    front of them those of other chunks, of which there are fewer than whole chunks of pairs."""
    more = lists.rows.numel() // lists.size * tile
    rows = torch.empty(
        more + x.shape[:-1].numel(), x.shape[-1], dtype=torch.float32, device=x.device
    )
    return rows[more:]


def _summed_parts(
    parts: tuple[torch.Tensor, torch.Tensor], like: tuple[torch.Tensor, torch.Tensor],
    lists: TileRows, cu_arg: torch.Tensor, s_kv: int, tile: int, packed: bool,
) -> Iterator[torch.Tensor]:  # fmt: skip
    """dK and dV, like k and v, of _partial_rows."""
    make = torch.zeros_like if packed else torch.empty_like  # keys may be in no sequence
    rows = min(tile, 16)
    for part, x in zip(parts, like, strict=True):
        (groups, width), grad = x.shape[-2:], make(x)
        launch(
            _block_attn_bwd_sum_kernel, (lists.n_tiles, cdiv(tile, rows)),
            part, grad, lists.tile_chunks, lists.chunk_begin, cu_arg, s_kv, groups, lists.per_seq,
            DIM=width, BLOCK_DIM=dot_size(width), BLOCK_N=tile, CHUNK=lists.size, ROWS=rows,
            VARLEN=packed,
        )  # fmt: skip
        yield grad


def _dq_by_rows(given: Given, dq: torch.Tensor | None, signed: bool) -> torch.Tensor:
    """dQ, or dq with dQ / softmax_scale added to it: one program per token and group."""
    grad_out, q, k, v, by, lse, delta = given
    groups = v.shape[-2]
    accumulate = dq is not None
    dq, scale = (dq, 1.0) if accumulate else (torch.empty_like(q), by.softmax_scale)
    union_tiles = union_dq_tiles(arch_of(q.device), q.shape[-1], v.shape[-1])
    unions = union_tiles and lists_for("dq", q, by)
    if unions:
        union_attention_dq(
            grad_out, q, k, v, by, unions, lse, delta, dq, accumulate=accumulate,
            tiles=union_tiles, dq_scale=scale, signed=signed,
        )  # fmt: skip
    _launch_dq(
        _block_attn_bwd_dq_kernel, (lse.numel() // q.shape[-2], groups),
        unions.state if unions else by.blocks, (dq,), given, scale=scale, accumulate=accumulate,
        UNION=unions.queries if unions else 0, SIGNED=signed,
    )  # fmt: skip
    return dq


def _dq_anew(
    lost: torch.Tensor, out: torch.Tensor, more: torch.Tensor | None, scale: float, given: Given,
    signed: bool,
) -> None:  # fmt: skip
    """See sums.HalfSums."""
    programs = min(lost.numel() - 1, sm_count(out.device) * ANEW_PER_SM)
    _launch_dq(
        _block_attn_dq_anew_kernel, (programs,), lost, (out if more is None else more, out), given,
        scale=scale, accumulate=more is not None, SIGNED=signed,
    )  # fmt: skip


def _launch_dq(
    kernel: Any, grid: tuple[int, ...], which: torch.Tensor, outputs: tuple[torch.Tensor, ...],
    given: Given, *, scale: float, accumulate: bool, **more: int,
) -> None:  # fmt: skip
    """One of the two kernels of dQ by rows; which, outputs: STATE and DQ, or LOST and MORE, DQ."""
    grad_out, q, k, v, by, lse, delta = given
    hq, dim = q.shape[-2:]
    groups, dv_dim = v.shape[-2:]
    arch = arch_of(q.device)
    block_n, warps, stages = dq_tiles(arch, dim, dv_dim, q.element_size())
    block_n = min(block_n, dot_size(by.block_size))
    tma = tma_usable(arch, k, whole=v)
    launch(
        kernel, grid,
        q, k, v, *kv_tiles(k, v, block_n, tma), by.blocks, by.begins, which, grad_out, lse, delta,
        *outputs, *by.lengths(q, k), groups, hq // groups, by.q_start, by.n_sel, by.block_size,
        scale, by.softmax_scale * LOG2E,
        VARLEN=by.packed, HEADS=dot_size(hq // groups), BLOCK_N=block_n, OWN_N=min(block_n, 32),
        N_PAD=pow2(by.n_sel), ACCUMULATE=accumulate, TMA=tma, num_warps=warps, num_stages=stages,
        **head_constants(dim, dv_dim, q.dtype), **more,
    )  # fmt: skip
