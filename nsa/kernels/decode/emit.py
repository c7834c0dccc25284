"""The compressed tokens that a decode step completes: by the learnt phi in two launches that do
nothing where no block is full, by any other phi between two launches that gather and store.

In PyTorch the learnt phi is ten launches, which a captured step makes at every length.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.block_keys import visible
from nsa.kernels.decode.append import descales
from nsa.kernels.decode.tile import store_rows
from nsa.kernels.launch import by_layout, launch, launch_planned, on_its_device
from nsa.kernels.tiles import cdiv, dot_precision, dot_size
from nsa.untraced import untraced

if TYPE_CHECKING:
    from nsa.cache import NSACache
    from nsa.config import NSAConfig

BLOCK = 1024  # elements of a program that copies
COLUMNS = 32  # of a program's product
PARTS = 8  # of a block: 64 programs for one sequence of the paper's sizes
OUTER_ROWS = 16  # of the second launch, whose programs load all parts of a sum at once
MOST_TOKENS = 16  # of a part: its loop is unrolled
DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
MOST_HIDDEN = 256  # a program of the second launch holds a row's hidden layer whole


@triton.jit
def _move_row(X, source, OUT, place, width, live, BLOCK: tl.constexpr):
    """A row of `width` elements, in the part that is this program's."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = live & (at < width)
    x = tl.load(X + source * width + at, mask=mask)
    tl.store(OUT + place * width + at, x.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _due_block(length, one, due, T, l, d, cmp_rows):
    """Which block is the one % due-th that T new tokens of `length` may fill, and do they?"""
    block = visible(length - T - 1, l, d) + one % due
    return block, (block * d + l <= length) & (block < cmp_rows)


@triton.jit
def _decode_raw_kernel(
    K_RAW, V_RAW, LENS, K_OUT, V_OUT, k_width, v_width, raw_rows, due, T, l, d,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The l raw rows of each block that may be due, in order: K_OUT, V_OUT [B * due, l, width]."""
    one = tl.program_id(0) // l
    i = tl.program_id(0) % l
    batch = (one // due).to(tl.int64)
    block, _ = _due_block(tl.load(LENS + batch), one, due, T, l, d, 0)
    source = batch * raw_rows + (block * d + i) % raw_rows
    place = tl.program_id(0).to(tl.int64)
    _move_row(K_RAW, source, K_OUT, place, k_width, True, BLOCK)
    _move_row(V_RAW, source, V_OUT, place, v_width, True, BLOCK)


@triton.jit
def _decode_emit_kernel(
    K_NEW, V_NEW, LENS, K_CMP, V_CMP, k_width, v_width, cmp_rows, due, T, l, d, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compressed tokens [B * due, width] into the cache where their block is full by now."""
    one = tl.program_id(0)
    batch = (one // due).to(tl.int64)
    block, full = _due_block(tl.load(LENS + batch), one, due, T, l, d, cmp_rows)
    place = batch * cmp_rows + block
    _move_row(K_NEW, one.to(tl.int64), K_CMP, place, k_width, full, BLOCK)
    _move_row(V_NEW, one.to(tl.int64), V_CMP, place, v_width, full, BLOCK)


@triton.jit
def _due(LENS, ROWS: tl.constexpr, rows, G, due, T, l, d, cmp_rows):
    """Of a program's rows (block of a sequence, group): sequence, block, group, and is it full?"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    one = row // G
    batch = (one // due).to(tl.int64)
    length = tl.load(LENS + batch, mask=live, other=0)
    block, full = _due_block(length, one, due, T, l, d, cmp_rows)
    return row, batch, block, row % G, live & full


@triton.jit
def _inner(
    RAW, POSITION, WEIGHT, PART, row, batch, block, group, full, part, column, rows, G, raw_rows, l,
    d, DESCALE, D: tl.constexpr, BLOCK_D: tl.constexpr, HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """PART[part] = (x + p) WEIGHT^T over a part's tokens, for the hidden columns `column`."""
    at = tl.arange(0, BLOCK_D)
    some = column < HIDDEN
    acc = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for j in tl.static_range(TOKENS):
        i = part * TOKENS + j
        there = (at < D) & (i < l)
        source = ((batch * raw_rows + (block * d + i) % raw_rows) * G + group) * D
        x = tl.load(
            RAW + source[:, None] + at[None, :], mask=full[:, None] & there[None, :], other=0.0
        )
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
    K_RAW, V_RAW, LENS, K_POSITION, V_POSITION, K_WEIGHT, V_WEIGHT, K_PART, V_PART, K_DESCALE,
    V_DESCALE, rows, G, raw_rows, cmp_rows, due, T, l, d, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, K_HIDDEN: tl.constexpr, V_HIDDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Programs: ROWS blocks of sequences and groups, COLUMNS of the hidden layer for TOKENS of the
    block, keys or values."""
    row, batch, block, group, full = _due(LENS, ROWS, rows, G, due, T, l, d, cmp_rows)
    if tl.max(full.to(tl.int32), 0) == 0:
        return
    part = tl.program_id(1) % PARTS
    column = tl.program_id(1) // PARTS * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(2) == 0:
        _inner(K_RAW, K_POSITION, K_WEIGHT, K_PART, row, batch, block, group, full, part, column,
               rows, G, raw_rows, l, d, K_DESCALE, D, BLOCK_D, K_HIDDEN, TOKENS, PRECISION,
               DTYPE)  # fmt: skip
    else:
        _inner(V_RAW, V_POSITION, V_WEIGHT, V_PART, row, batch, block, group, full, part, column,
               rows, G, raw_rows, l, d, V_DESCALE, DV, BLOCK_DV, V_HIDDEN, TOKENS, PRECISION,
               DTYPE)  # fmt: skip


@triton.jit
def _outer(
    PART, INNER_BIAS, WEIGHT, BIAS, CMP, row, batch, block, group, full, column, rows, G, cmp_rows,
    DESCALE, D: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_HIDDEN: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr,
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
    to = (((batch * cmp_rows + block) * G + group) * D)[:, None] + column[None, :]
    mask = full[:, None] & some[None, :]
    store_rows(CMP, to, out.to(DTYPE), mask, DESCALE, batch * G + group, full)


@triton.jit
def _decode_phi_outer_kernel(
    K_PART, V_PART, LENS, K_INNER_BIAS, V_INNER_BIAS, K_WEIGHT, V_WEIGHT, K_BIAS, V_BIAS, K_CMP,
    V_CMP, K_DESCALE, V_DESCALE, rows, G, cmp_rows, due, T, l, d, D: tl.constexpr,
    DV: tl.constexpr, K_HIDDEN: tl.constexpr, V_HIDDEN: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Programs: ROWS blocks of sequences and groups, COLUMNS of their keys or values."""
    row, batch, block, group, full = _due(LENS, ROWS, rows, G, due, T, l, d, cmp_rows)
    if tl.max(full.to(tl.int32), 0) == 0:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    if tl.program_id(2) == 0:
        _outer(K_PART, K_INNER_BIAS, K_WEIGHT, K_BIAS, K_CMP, row, batch, block, group, full,
               column, rows, G, cmp_rows, K_DESCALE, D, K_HIDDEN, BLOCK_K, PARTS, PRECISION,
               DTYPE)  # fmt: skip
    else:
        _outer(V_PART, V_INNER_BIAS, V_WEIGHT, V_BIAS, V_CMP, row, batch, block, group, full,
               column, rows, G, cmp_rows, V_DESCALE, DV, V_HIDDEN, BLOCK_V, PARTS, PRECISION,
               DTYPE)  # fmt: skip


@on_its_device
def due_rows(
    k_raw: Tensor, v_raw: Tensor, lens: Tensor, due: int, T: int, l: int, d: int
) -> tuple[Tensor, Tensor]:
    """The raw keys and values of the `due` blocks that T new tokens, counted in lens, may fill:
    [B * due, l, G, Dk] and [.., Dv]. Of a block that is not full yet some rows are not there:
    whatever the ring holds."""
    batch, rows, groups = k_raw.shape[:3]
    k, v = (x.new_empty(batch * due, l, *x.shape[2:]) for x in (k_raw, v_raw))
    widths = groups * k.shape[-1], groups * v.shape[-1]
    launch(
        _decode_raw_kernel,
        (batch * due * l, cdiv(max(widths), BLOCK)),
        k_raw,
        v_raw,
        lens,
        k,
        v,
        *widths,
        rows,
        due,
        T,
        l,
        d,
        BLOCK=BLOCK,
    )
    return k, v


@on_its_device
def emit_due(k: Tensor, v: Tensor, cache: NSACache, due: int, T: int) -> None:
    """Store the compressed tokens [B * due, 1, G, *] of due_rows whose blocks T new tokens fill."""
    c = cache.config
    widths = c.groups * c.d_k, c.groups * c.d_v
    launch(
        _decode_emit_kernel, (cache.batch * due, cdiv(max(widths), BLOCK)),
        k.contiguous(), v.contiguous(), cache.lens, cache.k_cmp, cache.v_cmp, *widths,
        cache.k_cmp.shape[1], due, T, c.l, c.d, BLOCK=BLOCK,
    )  # fmt: skip


def phi_rows(rows: int, widest: int) -> int:
    """Rows of the first launch's products: more read the weights less often, while they fit."""
    return min(dot_size(rows), 64 if widest <= 128 else 16)


def serves(c: NSAConfig, hidden: int) -> bool:
    """Is phi with so wide a hidden layer emit_mlp()'s?"""
    return hidden <= MOST_HIDDEN and c.l <= PARTS * MOST_TOKENS


@functools.cache
def _phi_plan(
    c: NSAConfig, device: torch.device, dtype: torch.dtype, rows: int, k_hidden: int, v_hidden: int
) -> tuple[tuple, tuple, dict, dict, dict]:
    """Grids and constants of the two launches, and by layout of the arguments what
    launch_planned() keeps."""
    many = phi_rows(rows, max(c.d_k, c.d_v, k_hidden, v_hidden))
    same = dict(
        D=c.d_k, DV=c.d_v, K_HIDDEN=k_hidden, V_HIDDEN=v_hidden, COLUMNS=COLUMNS, PARTS=PARTS,
        PRECISION=dot_precision(dtype), DTYPE=DTYPES[dtype],
    )  # fmt: skip
    inner = dict(ROWS=many, BLOCK_D=dot_size(c.d_k), BLOCK_DV=dot_size(c.d_v),
                 TOKENS=cdiv(c.l, PARTS), num_warps=4, **same)  # fmt: skip
    outer = dict(ROWS=OUTER_ROWS, BLOCK_K=dot_size(k_hidden), BLOCK_V=dot_size(v_hidden),
                 num_warps=8, **same)  # fmt: skip
    return (
        (cdiv(rows, many), cdiv(max(k_hidden, v_hidden), COLUMNS) * PARTS, 2),
        (cdiv(rows, OUTER_ROWS), cdiv(max(c.d_k, c.d_v), COLUMNS), 2), inner, outer, {},
    )  # fmt: skip


@untraced  # launch_planned() goes by addresses
@on_its_device
def emit_mlp(
    lens: Tensor, cache: NSACache, due: int, T: int, k: tuple[Tensor, ...], v: tuple[Tensor, ...]
) -> None:
    """Store the compressed tokens, of the next `due` blocks of each sequence, whose blocks T new
    tokens fill.

    k, v: of phi's MLP position [l, D], weight [hidden, l * D] and bias [hidden] of the first layer,
    weight [D, hidden] and bias [D] of the second, of which serves() says yes. lens: the lengths
    with the T new tokens, whose raw keys and values the cache holds.
    """
    c = cache.config
    rows, hidden = cache.batch * due * c.groups, (len(k[1]), len(v[1]))
    first, second, inner, outer, layouts = _phi_plan(c, lens.device, cache.dtype, rows, *hidden)
    k, v = ([x.contiguous() for x in one] for one in (k, v))
    made = [torch.empty(PARTS, rows, n, dtype=torch.float32, device=lens.device) for n in hidden]
    raw_rows, cmp_rows = cache.k_raw.shape[1], cache.k_cmp.shape[1]
    buffers = cache.k_raw, cache.v_raw, cache.k_cmp, cache.v_cmp
    tensors = (lens, *buffers, *descales(cache), *made, *k, *v)
    compiled, addresses = by_layout(layouts, (due, T, raw_rows, cmp_rows), tensors)
    lens, k_raw, v_raw, k_cmp, v_cmp, k_descale, v_descale, k_made, v_made, *weights = (
        addresses if len(compiled) == 2 else tensors
    )
    k, v = weights[:5], weights[5:]
    launch_planned(
        _decode_phi_inner_kernel, first,
        (k_raw, v_raw, lens, k[0], v[0], k[1], v[1], k_made, v_made, k_descale, v_descale, rows,
         c.groups, raw_rows, cmp_rows, due, T, c.l, c.d), inner, compiled,
    )  # fmt: skip
    launch_planned(
        _decode_phi_outer_kernel, second,
        (k_made, v_made, lens, k[2], v[2], k[3], v[3], k[4], v[4], k_cmp, v_cmp, k_descale,
         v_descale, rows, c.groups, cmp_rows, due, T, c.l, c.d), outer, compiled,
    )  # fmt: skip
