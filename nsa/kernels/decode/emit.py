"""The compressed tokens that a decode step completes: by the learnt phi in two launches that do
nothing where no block is full, by any other phi between two launches that gather and store.

In PyTorch the learnt phi is ten launches, which a captured step makes at every length.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa import fp8
from nsa.blocks import num_compressed
from nsa.cache_rows import CacheRows, Phi
from nsa.compress import MLPCompression, made_by
from nsa.kernels.block_keys import visible
from nsa.kernels.decode.tile import place, rank_row, store_rows
from nsa.kernels.launch import by_layout, launch, launch_planned, on_its_device
from nsa.kernels.tiles import cdiv, dot_precision, dot_size, pow2
from nsa.untraced import untraced

BLOCK = 1024  # elements of a program that copies
COLUMNS = 32  # of a program's product
PARTS = 8  # of a block: 64 programs for one sequence of the paper's sizes
OUTER_ROWS = 16  # of the second launch, whose programs load all parts of a sum at once
MOST_TOKENS = 16  # of a part: its loop is unrolled
DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
MOST_HIDDEN = 256  # a program of the second launch holds a row's hidden layer whole


def _where(c: CacheRows) -> tuple[list[Tensor], Tensor, tuple[int, ...], dict[str, Any]]:
    """Return what the kernels take of an NSACache, or of the caches of nsa_with_kvcache: raw keys
    and values, TABLE, (table_len, raw_rows, cmp_rows, pages, most) and constants. most: compressed
    tokens that a sequence has room for. Where there are no raw caches nobody reads raw tokens, and
    those of selection stand for them."""
    raw = [c.k_sel, c.v_sel] if c.k_raw is None else [c.k_raw, c.v_raw]
    l, d, table = c.sizes["l"], c.sizes["d"], c.block_table
    page = 0 if table is None else c.k_cmp.shape[1] * d
    numbers = raw[0].shape[1], c.k_cmp.shape[1], len(c.k_cmp), num_compressed(c.max_len, l, d)
    kinds = dict(PAGE=0 if c.ring else page, CMP_PAGE=page // d, RING=c.ring)
    own = c.sizes["l_sel"] // d if c.world > 1 else 1
    kinds |= dict(SIZE=own, WORLD=c.world, RANK=c.rank)
    if table is None:
        return raw, c.lens, (0, *numbers), kinds
    return raw, table, (table.shape[1], *numbers), kinds


@triton.jit
def _move_row(X, source, OUT, to, width, there, BLOCK: tl.constexpr):
    """A row of `width` elements, in the part that is this program's; zeros for one that is not
    there, if the other is."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + source * width + at, mask=there & (at < width), other=0.0)
    tl.store(OUT + to * width + at, x.to(OUT.dtype.element_ty), mask=at < width)


@triton.jit
def _due_block(length, one, due, T, l, d, most):
    """Which block is the one % due-th that T new tokens of `length` may fill, and do they?"""
    block = visible(length - T - 1, l, d) + one % due
    return block, (block * d + l <= length) & (block < most)


@triton.jit
def _cmp_place(
    block, TABLE, batch, table_len, cmp_rows, pages, full, l, d, CMP_PAGE: tl.constexpr,
    SIZE: tl.constexpr, WORLD: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Row of a compressed token, and may it be touched? In pages it lies with its last raw one.
    SIZE: compressed tokens of a block, see rank_row()."""
    block = rank_row(block, cmp_rows, SIZE, WORLD, RANK)
    if CMP_PAGE > 0:
        block += l // d - 1
    return place(block, TABLE, batch, table_len, cmp_rows, pages, full, CMP_PAGE, False)


@triton.jit
def _decode_raw_kernel(
    K_RAW, V_RAW, LENS, TABLE, K_OUT, V_OUT, k_width, v_width, table_len, raw_rows, cmp_rows, pages,
    most, due, T, l, d, PAGE: tl.constexpr, CMP_PAGE: tl.constexpr, RING: tl.constexpr,
    SIZE: tl.constexpr, WORLD: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The l raw rows of each block that is due, in order: K_OUT, V_OUT [B * due, l, width]."""
    one = tl.program_id(0) // l
    i = tl.program_id(0) % l
    batch = (one // due).to(tl.int64)
    block, full = _due_block(tl.load(LENS + batch), one, due, T, l, d, most)
    source, there = place(block * d + i, TABLE, batch, table_len, raw_rows, pages, full, PAGE, RING)
    to = tl.program_id(0).to(tl.int64)
    _move_row(K_RAW, source, K_OUT, to, k_width, there, BLOCK)
    _move_row(V_RAW, source, V_OUT, to, v_width, there, BLOCK)


@triton.jit
def _decode_emit_kernel(
    K_NEW, V_NEW, LENS, TABLE, K_CMP, V_CMP, K_DESCALE, V_DESCALE, G, table_len, raw_rows, cmp_rows,
    pages, most, due, T, l, d, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, CMP_PAGE: tl.constexpr, RING: tl.constexpr, SIZE: tl.constexpr,
    WORLD: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Compressed tokens [B * due, G, D] into the cache where their block is full by now. A program:
    a head of one."""
    one = tl.program_id(0)
    group = tl.program_id(1)
    batch = (one // due).to(tl.int64)
    block, full = _due_block(tl.load(LENS + batch), one, due, T, l, d, most)
    row, there = _cmp_place(
        block, TABLE, batch, table_len, cmp_rows, pages, full, l, d, CMP_PAGE, SIZE, WORLD, RANK
    )
    at = tl.arange(0, BLOCK)[None, :]
    source = one.to(tl.int64) * G + group
    to = row * G + group
    which = (batch * G + group) + tl.zeros([1], tl.int64)
    some = there & (which >= 0)
    k = tl.load(K_NEW + source * D + at, mask=there & (at < D))
    store_rows(K_CMP, to * D + at, k, there & (at < D), K_DESCALE, which, some)
    v = tl.load(V_NEW + source * DV + at, mask=there & (at < DV))
    store_rows(V_CMP, to * DV + at, v, there & (at < DV), V_DESCALE, which, some)


@triton.jit
def _due(LENS, ROWS: tl.constexpr, rows, G, due, T, l, d, most):
    """Of a program's rows (block of a sequence, group): sequence, block, group, and is it full?"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    one = row // G
    batch = (one // due).to(tl.int64)
    length = tl.load(LENS + batch, mask=live, other=0)
    block, full = _due_block(length, one, due, T, l, d, most)
    return row, batch, block, row % G, live & full


@triton.jit
def _inner(
    RAW, POSITION, WEIGHT, PART, TABLE, row, batch, block, group, full, part, column, rows, G,
    table_len, raw_rows, pages, l, d, DESCALE, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HIDDEN: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr, RING: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """PART[part] = (x + p) WEIGHT^T over a part's tokens, for the hidden columns `column`."""
    at = tl.arange(0, BLOCK_D)
    some = column < HIDDEN
    acc = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for j in tl.static_range(TOKENS):
        i = part * TOKENS + j
        there = (at < D) & (i < l)
        source, lies = place(
            block * d + i, TABLE, batch, table_len, raw_rows, pages, full & (i < l), PAGE, RING
        )
        x = tl.load(
            RAW + ((source * G + group) * D)[:, None] + at[None, :],
            mask=lies[:, None] & there[None, :], other=0.0,
        )  # fmt: skip
        if RAW.dtype.element_ty == tl.float8e4nv:
            by = tl.load(DESCALE + batch * G + group, mask=full, other=0.0)
            x = (x.to(tl.float32) * by[:, None]).to(DTYPE)
        p = tl.load(POSITION + i * D + at, mask=there, other=0.0).to(x.dtype)
        x = tl.where(full[:, None], x + p[None, :], 0.0).to(x.dtype)
        w = tl.load(
            WEIGHT + column[:, None] * (l * D) + (i * D + at)[None, :],
            mask=some[:, None] & there[None, :], other=0.0,
        )  # fmt: skip
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision=PRECISION)
    to = (part.to(tl.int64) * rows + row)[:, None] * HIDDEN + column[None, :]
    tl.store(PART + to, acc, mask=full[:, None] & some[None, :])


@triton.jit
def _decode_phi_inner_kernel(
    K_RAW, V_RAW, LENS, TABLE, K_POSITION, V_POSITION, K_WEIGHT, V_WEIGHT, K_PART, V_PART,
    K_DESCALE, V_DESCALE, rows, G, table_len, raw_rows, cmp_rows, pages, most, due, T, l, d,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    K_HIDDEN: tl.constexpr, V_HIDDEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr, CMP_PAGE: tl.constexpr,
    RING: tl.constexpr, SIZE: tl.constexpr, WORLD: tl.constexpr, RANK: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Programs: ROWS blocks of sequences and groups, COLUMNS of the hidden layer for TOKENS of the
    block, keys or values."""
    row, batch, block, group, full = _due(LENS, ROWS, rows, G, due, T, l, d, most)
    if tl.max(full.to(tl.int32), 0) == 0:
        return
    part = tl.program_id(1) % PARTS
    column = tl.program_id(1) // PARTS * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(2) == 0:
        _inner(K_RAW, K_POSITION, K_WEIGHT, K_PART, TABLE, row, batch, block, group, full, part,
               column, rows, G, table_len, raw_rows, pages, l, d, K_DESCALE, D, BLOCK_D, K_HIDDEN,
               TOKENS, PAGE, RING, PRECISION, DTYPE)  # fmt: skip
    else:
        _inner(V_RAW, V_POSITION, V_WEIGHT, V_PART, TABLE, row, batch, block, group, full, part,
               column, rows, G, table_len, raw_rows, pages, l, d, V_DESCALE, DV, BLOCK_DV, V_HIDDEN,
               TOKENS, PAGE, RING, PRECISION, DTYPE)  # fmt: skip


@triton.jit
def _outer(
    PART, INNER_BIAS, WEIGHT, BIAS, CMP, TABLE, row, batch, block, group, full, column, rows, G,
    table_len, cmp_rows, pages, l, d, DESCALE, D: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr, PARTS: tl.constexpr, CMP_PAGE: tl.constexpr,
    SIZE: tl.constexpr, WORLD: tl.constexpr, RANK: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """silu(sum of PART + INNER_BIAS) WEIGHT^T + BIAS into the rows of full blocks."""
    at = tl.arange(0, BLOCK_HIDDEN)
    there = at < HIDDEN
    some = column < D
    w = tl.load(
        WEIGHT + column[:, None] * HIDDEN + at[None, :], mask=some[:, None] & there[None, :],
        other=0.0,
    ).to(DTYPE)  # fmt: skip
    bias = tl.load(BIAS + column, mask=some, other=0.0).to(tl.float32)
    x = tl.zeros([row.shape[0], BLOCK_HIDDEN], tl.float32)
    x += tl.load(INNER_BIAS + at, mask=there, other=0.0).to(tl.float32)[None, :]
    for part in tl.static_range(PARTS):
        source = (part * rows + row).to(tl.int64)[:, None] * HIDDEN + at[None, :]
        x += tl.load(PART + source, mask=full[:, None] & there[None, :], other=0.0)
    x = (x * tl.sigmoid(x)).to(DTYPE)
    out = tl.dot(x, tl.trans(w), input_precision=PRECISION) + bias[None, :]
    to, there = _cmp_place(
        block, TABLE, batch, table_len, cmp_rows, pages, full, l, d, CMP_PAGE, SIZE, WORLD, RANK
    )
    to = ((to * G + group) * D)[:, None] + column[None, :]
    mask = there[:, None] & some[None, :]
    store_rows(CMP, to, out.to(DTYPE), mask, DESCALE, batch * G + group, full)


@triton.jit
def _decode_phi_outer_kernel(
    K_PART, V_PART, LENS, TABLE, K_INNER_BIAS, V_INNER_BIAS, K_WEIGHT, V_WEIGHT, K_BIAS, V_BIAS,
    K_CMP, V_CMP, K_DESCALE, V_DESCALE, rows, G, table_len, raw_rows, cmp_rows, pages, most, due, T,
    l, d, D: tl.constexpr, DV: tl.constexpr, K_HIDDEN: tl.constexpr, V_HIDDEN: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr, PAGE: tl.constexpr, CMP_PAGE: tl.constexpr, RING: tl.constexpr,
    SIZE: tl.constexpr, WORLD: tl.constexpr, RANK: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Programs: ROWS blocks of sequences and groups, COLUMNS of their keys or values."""
    row, batch, block, group, full = _due(LENS, ROWS, rows, G, due, T, l, d, most)
    if tl.max(full.to(tl.int32), 0) == 0:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(2) == 0:
        _outer(K_PART, K_INNER_BIAS, K_WEIGHT, K_BIAS, K_CMP, TABLE, row, batch, block, group, full,
               column, rows, G, table_len, cmp_rows, pages, l, d, K_DESCALE, D, K_HIDDEN, BLOCK_K,
               PARTS, CMP_PAGE, SIZE, WORLD, RANK, PRECISION, DTYPE)  # fmt: skip
    else:
        _outer(V_PART, V_INNER_BIAS, V_WEIGHT, V_BIAS, V_CMP, TABLE, row, batch, block, group, full,
               column, rows, G, table_len, cmp_rows, pages, l, d, V_DESCALE, DV, V_HIDDEN, BLOCK_V,
               PARTS, CMP_PAGE, SIZE, WORLD, RANK, PRECISION, DTYPE)  # fmt: skip


@on_its_device
def due_rows(lens: Tensor, c: CacheRows, due: int, T: int) -> tuple[Tensor, Tensor]:
    """The raw keys and values, as they are stored, of the `due` blocks that T new tokens may fill:
    [B * due, l, G, Dk] and [.., Dv]; zeros of a block that is not full yet. lens is c's."""
    raw, table, numbers, kinds = _where(c)
    l, d = c.sizes["l"], c.sizes["d"]
    k, v = (x.new_empty(len(lens) * due, l, *x.shape[2:]) for x in raw)
    widths = k[0, 0].numel(), v[0, 0].numel()
    launch(
        _decode_raw_kernel, (len(lens) * due * l, cdiv(max(widths), BLOCK)), *raw, lens, table, k,
        v, *widths, *numbers, due, T, l, d, **kinds, BLOCK=BLOCK,
    )  # fmt: skip
    return k, v


@on_its_device
def emit_due(lens: Tensor, c: CacheRows, k: Tensor, v: Tensor, due: int, T: int) -> None:
    """Store the compressed tokens k, v [B * due, G, D] whose blocks T new tokens fill. lens is
    c's."""
    _, table, numbers, kinds = _where(c)
    G, D = k.shape[-2:]
    launch(
        _decode_emit_kernel, (len(lens) * due, G), k.contiguous(), v.contiguous(), lens, table,
        c.k_cmp, c.v_cmp, *c.descales, G, *numbers, due, T, c.sizes["l"], c.sizes["d"], D=D,
        DV=v.shape[-1], BLOCK=pow2(max(D, v.shape[-1])), **kinds, num_warps=1,
    )  # fmt: skip


def learnt(phi: Any, c: CacheRows, D: int) -> tuple[Tensor, ...] | None:
    """Weights of an MLP that makes a compressed token of D columns of c's raw ones, and of which
    emit_mlp() has kernels; None of any other phi."""
    weights = phi.for_kernel() if isinstance(phi, MLPCompression) else None
    l = c.sizes["l"]
    if weights is None or (phi.l, phi.d) != (l, c.sizes["d"]):
        return None
    hidden = len(weights[1])
    shapes = (l, D), (hidden, l * D), (hidden,), (D, hidden), (D,)
    if hidden > MOST_HIDDEN or l > PARTS * MOST_TOKENS:
        return None
    if any(
        x.shape != shape or x.device != c.lens.device
        for x, shape in zip(weights, shapes, strict=True)
    ):
        return None
    return weights


@functools.cache
def _phi_plan(
    sizes: tuple[int, ...], device: torch.device, dtype: torch.dtype, rows: int, k_hidden: int,
    v_hidden: int, **kinds: Any,
) -> tuple[tuple, tuple, dict, dict, dict]:  # fmt: skip
    """Grids and constants of the two launches, and by layout of the arguments what
    launch_planned() keeps. sizes: Dk, Dv, l. kinds: of _where()."""
    D, DV, l = sizes
    # Rows of the first launch's products: more read the weights less often, while they fit.
    many = min(dot_size(rows), 64 if max(D, DV, k_hidden, v_hidden) <= 128 else 16)
    same = dict(
        D=D, DV=DV, K_HIDDEN=k_hidden, V_HIDDEN=v_hidden, COLUMNS=COLUMNS, PARTS=PARTS,
        PRECISION=dot_precision(dtype), DTYPE=DTYPES[dtype], **kinds,
    )  # fmt: skip
    inner = dict(ROWS=many, BLOCK_D=dot_size(D), BLOCK_DV=dot_size(DV), TOKENS=cdiv(l, PARTS),
                 num_warps=4, **same)  # fmt: skip
    outer = dict(ROWS=OUTER_ROWS, BLOCK_K=dot_size(k_hidden), BLOCK_V=dot_size(v_hidden),
                 num_warps=8, **same)  # fmt: skip
    return (
        (cdiv(rows, many), cdiv(max(k_hidden, v_hidden), COLUMNS) * PARTS, 2),
        (cdiv(rows, OUTER_ROWS), cdiv(max(D, DV), COLUMNS), 2), inner, outer, {},
    )  # fmt: skip


@untraced  # launch_planned() goes by addresses
@on_its_device
def emit_mlp(
    lens: Tensor, c: CacheRows, due: int, T: int, k: tuple[Tensor, ...], v: tuple[Tensor, ...]
) -> None:
    """Store the compressed tokens, of the next `due` blocks of each sequence, whose blocks T new
    tokens fill.

    k, v: of phi's MLP position [l, D], weight [hidden, l * D] and bias [hidden] of the first layer,
    weight [D, hidden] and bias [D] of the second, from learnt(). lens is c's.
    """
    G, D = c.k_cmp.shape[2:]
    rows, hidden = len(lens) * due * G, (len(k[1]), len(v[1]))
    raw, table, numbers, kinds = _where(c)
    l = c.sizes["l"]
    first, second, inner, outer, layouts = _phi_plan(
        (D, c.v_cmp.shape[-1], l), lens.device, c.dtype, rows, *hidden, **kinds
    )
    k, v = ([x.contiguous() for x in one] for one in (k, v))
    made = [torch.empty(PARTS, rows, n, dtype=torch.float32, device=lens.device) for n in hidden]
    tensors = (lens, table, *raw, c.k_cmp, c.v_cmp, *c.descales, *made, *k, *v)
    counts = (rows, G, *numbers, due, T, l, c.sizes["d"])
    compiled, addresses = by_layout(layouts, counts, tensors)
    lens, table, k_raw, v_raw, k_cmp, v_cmp, k_descale, v_descale, k_made, v_made, *weights = (
        addresses if len(compiled) == 2 else tensors
    )
    k, v = weights[:5], weights[5:]
    launch_planned(
        _decode_phi_inner_kernel, first,
        (k_raw, v_raw, lens, table, k[0], v[0], k[1], v[1], k_made, v_made, k_descale, v_descale,
         *counts), inner, compiled,
    )  # fmt: skip
    launch_planned(
        _decode_phi_outer_kernel, second,
        (k_made, v_made, lens, table, k[2], v[2], k[3], v[3], k[4], v[4], k_cmp, v_cmp, k_descale,
         v_descale, *counts), outer, compiled,
    )  # fmt: skip


def emit(c: CacheRows, due: int, T: int, phi_k: Phi, phi_v: Phi) -> None:
    """Make and store the compressed tokens, at most `due` of each sequence, whose blocks T new
    tokens fill. phi_k, phi_v: [n, l, G, D] -> [n, 1, G, D], else ValueError."""
    k, v = learnt(phi_k, c, c.k_cmp.shape[-1]), learnt(phi_v, c, c.v_cmp.shape[-1])
    if k is not None and v is not None:
        return emit_mlp(c.lens, c, due, T, k, v)
    made = []
    with torch.no_grad():
        for name, phi, raw, descale in zip(
            ("phi_k", "phi_v"), (phi_k, phi_v), due_rows(c.lens, c, due, T), c.descales, strict=True
        ):
            if raw.dtype == fp8.E4M3:
                of_batch = raw.unflatten(0, (-1, due)).flatten(1, 2)
                raw = fp8.dequantize(of_batch, descale, c.dtype).view(raw.shape)
            made.append(made_by(name, phi, raw)[:, 0])
    emit_due(c.lens, c, made[0], made[1], due, T)
