"""Selection attention backward over clean spans of a cache, without atomics.

dQ: one program per row, K and V read in place as in the forward; it also leaves delta =
rowsum(dO * O) - dlse. dK and dV: one program per tile of keys and chunk of the rows that attend it
(see spans.key_lists), rows gathered; tiles with several chunks sum fp32 partials in a fixed order.
So gradients are bitwise repeatable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.launch import launch, on_its_device
from nsa.kernels.tiles import LOG2E, arch_of, cdiv, dot_precision, pow2
from nsa.kernels.triton_sel_kernel.inputs import units_of_8
from nsa.kernels.triton_sel_kernel.rows import (
    load_row_chunks,
    load_spans,
    slot_to_key,
    store_row_chunks,
    zero_chunks,
)
from nsa.kernels.triton_sel_kernel.spans import key_lists
from nsa.kernels.triton_sel_kernel.tiles import (
    KEY_TILE,
    dkdv_tiles,
    dq_tiles,
    head_tile,
    padded_heads,
    spans_per_pass,
)


@triton.jit
def _sel_attn_bwd_dq_kernel(
    Q, K, V, STARTS, CUM, O, DO, LSE, DLSE, DELTA, DQ, S, G, H, n, stride_kb, stride_kg, stride_kl,
    stride_vb, stride_vg, stride_vl, scale, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, NR: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    b = (pid // S // G).to(tl.int64)
    g = pid // S % G
    row = (b * S + pid % S) * G + g
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = head < H
    dtype = Q.dtype.element_ty
    qs = load_row_chunks(Q, row * H * D, D, head, live, D, BLOCK_D, dtype)
    dos = load_row_chunks(DO, row * H * DV, DV, head, live, DV, BLOCK_DV, dtype)
    os = load_row_chunks(O, row * H * DV, DV, head, live, DV, BLOCK_DV, dtype)
    delta = tl.zeros([ROWS], tl.float32)
    for i in tl.static_range(0, DV, BLOCK_DV):
        product = dos[i // BLOCK_DV].to(tl.float32) * os[i // BLOCK_DV].to(tl.float32)
        delta += tl.sum(product, 1)
    if DLSE is not None:
        delta -= tl.load(DLSE + row * H + head, mask=live, other=0.0)
    tl.store(DELTA + row * H + head, delta, mask=live)
    lse = tl.load(LSE + row * H + head, mask=live, other=float("inf"))
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    k_base = K + b * stride_kb * 8 + g.to(tl.int64) * stride_kg * 8
    v_base = V + b * stride_vb * 8 + g.to(tl.int64) * stride_vg * 8
    dq = zero_chunks(ROWS, D, BLOCK_D)
    for first in tl.range(0, n, NR):
        cum, step = load_spans(STARTS, CUM, row, n, first, NR)
        lo = tl.load(CUM + row * (n + 1) + first)
        hi = tl.load(CUM + row * (n + 1) + tl.minimum(first + NR, n))
        for n0 in tl.range(lo, hi, BLOCK_L):
            slot = n0 + tl.arange(0, BLOCK_L)
            seen = slot < hi
            key = slot_to_key(slot, cum, step).to(tl.int64)
            s = tl.zeros([ROWS, BLOCK_L], tl.float32)
            ks = ()
            for i in tl.static_range(0, D, BLOCK_D):
                offs_d = i + tl.arange(0, BLOCK_D)
                k_ptrs = k_base + key[:, None] * (stride_kl * 8) + offs_d[None, :]
                if i + BLOCK_D <= D:
                    k = tl.load(k_ptrs, mask=seen[:, None], other=0.0)
                else:
                    k = tl.load(k_ptrs, mask=seen[:, None] & (offs_d < D)[None, :], other=0.0)
                s = tl.dot(qs[i // BLOCK_D], tl.trans(k), s, input_precision=PRECISION)
                ks = ks + (k,)
            p = tl.math.exp2(s * scale_log2 - lse2[:, None])
            p = tl.where(seen[None, :], p, 0.0)
            dp = tl.zeros([ROWS, BLOCK_L], tl.float32)
            for i in tl.static_range(0, DV, BLOCK_DV):
                offs_v = i + tl.arange(0, BLOCK_DV)
                v_ptrs = v_base + key[:, None] * (stride_vl * 8) + offs_v[None, :]
                if i + BLOCK_DV <= DV:
                    v = tl.load(v_ptrs, mask=seen[:, None], other=0.0)
                else:
                    v = tl.load(v_ptrs, mask=seen[:, None] & (offs_v < DV)[None, :], other=0.0)
                dp = tl.dot(dos[i // BLOCK_DV], tl.trans(v), dp, input_precision=PRECISION)
            ds = (p * (dp - delta[:, None])).to(dtype)
            new_dq = ()
            for i in tl.static_range(0, D, BLOCK_D):
                new_dq = new_dq + (
                    tl.dot(ds, ks[i // BLOCK_D], dq[i // BLOCK_D], input_precision=PRECISION),
                )
            dq = new_dq
    out = ()
    for i in tl.static_range(0, D, BLOCK_D):
        out = out + (dq[i // BLOCK_D] * scale,)
    store_row_chunks(DQ, row * H * D, D, head, live, out, D, BLOCK_D)


@triton.jit
def _sel_attn_bwd_dkdv_kernel(
    Q, K, V, DO, LSE, DELTA, ENTRIES, MASKS, TILE_BEGIN, ITEM_BEGIN, ITEM_TILE, SLOT_BEGIN,
    DK, DV_OUT, PART_DK, PART_DV, n_tiles, tiles_per_group, chunk, n_keys, G, H,
    stride_kb, stride_kg, stride_kl, stride_vb, stride_vg, stride_vl, scale, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of BLOCK_L keys of one tile from one chunk of the rows that attend it."""
    item = tl.program_id(0).to(tl.int64)
    tile = tl.load(ITEM_TILE + item)
    if tile >= n_tiles:
        return
    first_item = tl.load(ITEM_BEGIN + tile)
    parts = tl.load(ITEM_BEGIN + tile + 1) - first_item
    begin = tl.load(TILE_BEGIN + tile) + (item - first_item) * chunk
    end = tl.minimum(begin + chunk, tl.load(TILE_BEGIN + tile + 1))
    group = tile // tiles_per_group
    b = group // G
    g = group % G
    bit = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    key = tile % tiles_per_group * TILE + bit
    key_live = key < n_keys
    dtype = Q.dtype.element_ty
    ks = load_row_chunks(
        K, b * stride_kb * 8 + g * stride_kg * 8, stride_kl * 8, key, key_live, D, BLOCK_D, dtype
    )
    vs = load_row_chunks(
        V, b * stride_vb * 8 + g * stride_vg * 8, stride_vl * 8, key, key_live, DV, BLOCK_DV, dtype
    )
    dk = zero_chunks(BLOCK_L, D, BLOCK_D)
    dv = zero_chunks(BLOCK_L, DV, BLOCK_DV)
    lane = tl.arange(0, ROWS)
    first_head = lane % HEADS
    STEPS: tl.constexpr = (HEADS + ROWS - 1) // ROWS  # several where a row's heads fill more tiles
    for step in tl.range(begin * STEPS, end * STEPS, STEPS * ROWS // HEADS):
        entry = step // STEPS + lane // HEADS
        head = tl.cast(step % STEPS, tl.int32) * ROWS + first_head
        live = (entry < end) & (head < H)
        at = tl.load(ENTRIES + entry, mask=live, other=0).to(tl.int64) * H + head
        mask = tl.load(MASKS + entry, mask=live, other=0)
        lse2 = tl.load(LSE + at, mask=live, other=0.0) * 1.4426950408889634
        delta = tl.load(DELTA + at, mask=live, other=0.0)
        qs = load_row_chunks(Q, 0, D, at, live, D, BLOCK_D, dtype)
        dos = load_row_chunks(DO, 0, DV, at, live, DV, BLOCK_DV, dtype)
        s = tl.zeros([BLOCK_L, ROWS], tl.float32)
        for i in tl.static_range(0, D, BLOCK_D):
            s = tl.dot(ks[i // BLOCK_D], tl.trans(qs[i // BLOCK_D]), s, input_precision=PRECISION)
        dp = tl.zeros([BLOCK_L, ROWS], tl.float32)
        for i in tl.static_range(0, DV, BLOCK_DV):
            do_t = tl.trans(dos[i // BLOCK_DV])
            dp = tl.dot(vs[i // BLOCK_DV], do_t, dp, input_precision=PRECISION)
        # Two 32-bit halves: 64-bit shifts of a whole tile would take twice the registers.
        low, high = mask.to(tl.int32), (mask >> 32).to(tl.int32)
        half = tl.where((bit < 32)[:, None], low[None, :], high[None, :])
        chosen = ((half >> (bit % 32)[:, None]) & 1) != 0
        p = tl.where(chosen, tl.math.exp2(s * scale_log2 - lse2[None, :]), 0.0)
        # A key that this row does not attend may hold anything, NaN included.
        ds = tl.where(chosen, p * (dp - delta[None, :]), 0.0).to(dtype)
        p = p.to(dtype)
        new_dv = ()
        for i in tl.static_range(0, DV, BLOCK_DV):
            new_dv = new_dv + (
                tl.dot(p, dos[i // BLOCK_DV], dv[i // BLOCK_DV], input_precision=PRECISION),
            )
        dv = new_dv
        new_dk = ()
        for i in tl.static_range(0, D, BLOCK_D):
            new_dk = new_dk + (
                tl.dot(ds, qs[i // BLOCK_D], dk[i // BLOCK_D], input_precision=PRECISION),
            )
        dk = new_dk
    out = ()
    for i in tl.static_range(0, D, BLOCK_D):
        out = out + (dk[i // BLOCK_D] * scale,)
    if parts == 1:
        store_row_chunks(DK, group * n_keys * D, D, key, key_live, out, D, BLOCK_D)
        store_row_chunks(DV_OUT, group * n_keys * DV, DV, key, key_live, dv, DV, BLOCK_DV)
    else:
        slot = tl.load(SLOT_BEGIN + tile) + item - first_item
        store_row_chunks(PART_DK, slot * TILE * D, D, bit, key_live, out, D, BLOCK_D)
        store_row_chunks(PART_DV, slot * TILE * DV, DV, bit, key_live, dv, DV, BLOCK_DV)


@triton.jit
def _sel_attn_bwd_sum_kernel(
    PART, OUT, ITEM_BEGIN, SLOT_BEGIN, tiles_per_group, n_keys,
    DIM: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum the partials of a tile in order; a tile that no row attends gets zeros."""
    tile = tl.program_id(0).to(tl.int64)
    parts = tl.load(ITEM_BEGIN + tile + 1) - tl.load(ITEM_BEGIN + tile)
    if parts == 1:
        return
    slot = tl.load(SLOT_BEGIN + tile)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tile % tiles_per_group * TILE
    live = (offs < TILE * DIM) & (first + offs // DIM < n_keys)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.range(0, parts):
        total += tl.load(PART + (slot + part) * (TILE * DIM) + offs, mask=live, other=0.0)
    out = OUT + (tile // tiles_per_group * n_keys + first) * DIM + offs
    tl.store(out, total.to(OUT.dtype.element_ty), mask=live)


@on_its_device
def sel_bwd_ranges(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, cum: Tensor, out: Tensor, lse: Tensor,
    grad_out: Tensor, softmax_scale: float, *, grad_lse: Tensor | None = None,
    needs_kv: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dQ, dK, dV) of sel_fwd_ranges: q, out, grad_out [B, S, G, H, .] and lse as it returned it,
    grad_lse like lse.

    dK and dV are contiguous [B, G, Skv, .] in k's dtype, None unless needs_kv.
    """
    B, S, G, H, D = q.shape
    n_keys, dv_dim = k.shape[2], v.shape[-1]
    n, rows = starts.shape[-1], starts.shape[0]
    dq = torch.empty_like(q)
    if rows == 0 or H == 0 or n == 0 or n_keys == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    arch, size = arch_of(q.device), q.element_size()
    k, k_strides = units_of_8(k)
    v, v_strides = units_of_8(v)
    grad_out = grad_out.to(q.dtype).contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    delta = torch.empty_like(lse)
    common = dict(D=D, DV=dv_dim, PRECISION=dot_precision(q.dtype))
    heads = head_tile(H, D, dv_dim, size, group=True)
    launch(
        _sel_attn_bwd_dq_kernel, (rows, cdiv(H, heads)),
        q, k, v, starts, cum, out, grad_out, lse, grad_lse, delta, dq, S, G, H, n, *k_strides,
        *v_strides, softmax_scale, softmax_scale * LOG2E, NR=spans_per_pass(n), ROWS=heads,
        **common, **dq_tiles(arch, D, dv_dim, size).constants,
    )  # fmt: skip
    if not needs_kv:
        return dq, None, None

    tiles = dkdv_tiles(arch, D, dv_dim, size)
    # Long lists are cut so that one popular tile (block 0 of a prompt) does not hold up the rest.
    chunk = max(64, pow2(cdiv(8 * S, cdiv(n_keys, KEY_TILE))))
    lists = key_lists(starts, cum, (B, S, G), n_keys, min(chunk, 1024))
    dk = torch.empty(B, G, n_keys, D, dtype=k.dtype, device=k.device)
    dv = torch.empty(B, G, n_keys, dv_dim, dtype=v.dtype, device=v.device)
    part_dk = torch.empty(lists.n_slots, KEY_TILE, D, dtype=torch.float32, device=k.device)
    part_dv = torch.empty(lists.n_slots, KEY_TILE, dv_dim, dtype=torch.float32, device=k.device)
    launch(
        _sel_attn_bwd_dkdv_kernel, (lists.n_items, KEY_TILE // tiles.block_l),
        q, k, v, grad_out, lse, delta, *lists[:6], dk, dv, part_dk, part_dv, *lists[6:9], n_keys, G,
        H, *k_strides, *v_strides, softmax_scale, softmax_scale * LOG2E, TILE=KEY_TILE,
        HEADS=padded_heads(H), ROWS=tiles.rows, **common, **tiles.constants,
    )  # fmt: skip
    for part, x, dim in ((part_dk, dk, D), (part_dv, dv, dv_dim)):
        launch(
            _sel_attn_bwd_sum_kernel, (lists.n_tiles, cdiv(KEY_TILE * dim, 1024)),
            part, x, lists.item_begin, lists.slot_begin, lists.tiles_per_group, n_keys,
            DIM=dim, TILE=KEY_TILE, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return dq, dk, dv
