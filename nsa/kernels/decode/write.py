"""New keys and values into the caches of nsa_with_kvcache, of all branches, in one launch.

In PyTorch that is some thirty small operations for each layer and step, more time than attention
takes at 64k.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.decode.tile import place, store_rows
from nsa.kernels.launch import launch, on_its_device
from nsa.kernels.tiles import cdiv, pow2

BLOCK_H = 4  # heads of a program


@triton.jit
def _put(
    NEW, stride, OUT, DESCALE, token, batch, position, first, G, TABLE, table_len, rows, pages,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, PAGE: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of a token's, from `first` on, to the row of its position."""
    row, there = place(position, TABLE, batch, table_len, rows, pages, first < G, PAGE, RING)
    group = first + tl.arange(0, BLOCK_H)
    columns = tl.arange(0, BLOCK)
    live = there & (group < G)
    mask = live[:, None] & (columns < WIDTH)[None, :]
    source = token.to(tl.int64) * stride + group * WIDTH
    x = tl.load(NEW + source[:, None] + columns[None, :], mask=mask)
    to = ((row * G + group) * WIDTH)[:, None] + columns[None, :]
    store_rows(OUT, to, x, mask, DESCALE, batch * G + group, live)


@triton.jit
def _decode_write_kernel(
    K_SEL_NEW, V_SEL_NEW, K_WIN_NEW, V_WIN_NEW, K_RAW_NEW, V_RAW_NEW,
    K_SEL, V_SEL, K_WIN, V_WIN, K_RAW, V_RAW, LENS, TABLE, K_DESCALE, V_DESCALE,
    k_sel_stride, v_sel_stride, k_win_stride, v_win_stride, k_raw_stride, v_raw_stride,
    T, G, table_len, pages, sel_rows, win_rows, raw_rows, GIVEN: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_H: tl.constexpr,
    PAGE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """*_NEW: [B * T, G, WIDTH], a token every `stride` elements. LENS [B] counts them. Programs:
    of a token, for each pair of arguments BLOCK_H heads each; GIVEN has a bit for each pair. PAGE:
    of all caches that are no RING, which those of window and raw keys are or not."""
    token = tl.program_id(0)
    parts = (G + BLOCK_H - 1) // BLOCK_H
    which = tl.program_id(1) // parts
    first = tl.program_id(1) % parts * BLOCK_H
    batch = (token // T).to(tl.int64)
    position = tl.load(LENS + batch) - T + token % T
    OTHER: tl.constexpr = 0 if RING else PAGE
    if which == 0:
        _put(K_SEL_NEW, k_sel_stride, K_SEL, K_DESCALE, token, batch, position, first, G, TABLE,
             table_len, sel_rows, pages, D, BLOCK_D, BLOCK_H, PAGE, False)  # fmt: skip
    elif which == 1:
        _put(V_SEL_NEW, v_sel_stride, V_SEL, V_DESCALE, token, batch, position, first, G, TABLE,
             table_len, sel_rows, pages, DV, BLOCK_DV, BLOCK_H, PAGE, False)  # fmt: skip
    elif which == 2:
        if GIVEN & 4 != 0:
            _put(K_WIN_NEW, k_win_stride, K_WIN, K_DESCALE, token, batch, position, first, G, TABLE,
                 table_len, win_rows, pages, D, BLOCK_D, BLOCK_H, OTHER, RING)  # fmt: skip
    elif which == 3:
        if GIVEN & 8 != 0:
            _put(V_WIN_NEW, v_win_stride, V_WIN, V_DESCALE, token, batch, position, first, G, TABLE,
                 table_len, win_rows, pages, DV, BLOCK_DV, BLOCK_H, OTHER, RING)  # fmt: skip
    elif which == 4:
        if GIVEN & 16 != 0:
            _put(K_RAW_NEW, k_raw_stride, K_RAW, K_DESCALE, token, batch, position, first, G, TABLE,
                 table_len, raw_rows, pages, D, BLOCK_D, BLOCK_H, OTHER, RING)  # fmt: skip
    else:
        if GIVEN & 32 != 0:
            _put(V_RAW_NEW, v_raw_stride, V_RAW, V_DESCALE, token, batch, position, first, G, TABLE,
                 table_len, raw_rows, pages, DV, BLOCK_DV, BLOCK_H, OTHER, RING)  # fmt: skip


def _by_token(x: Tensor) -> tuple[Tensor, int]:
    """x [B, T, G, D], or a copy, of which each token's heads are contiguous, and the elements from
    one token to the next."""
    B, T, G, D = x.shape
    stride = x.stride(1) if T > 1 else x.stride(0)
    whole = (D == 1 or x.stride(3) == 1) and (G == 1 or x.stride(2) == D)
    if not whole or (B > 1 and T > 1 and x.stride(0) != T * stride):
        return x.contiguous(), G * D
    return x, stride


@on_its_device
def write_new(
    lens: Tensor, new: Sequence[Tensor | None], caches: Sequence[Tensor | None],
    descales: tuple[Tensor, Tensor], table: Tensor | None, ring: bool,
) -> None:  # fmt: skip
    """Write T new tokens of every sequence, counted in lens [B], where a row of the cache and a
    page are there for them.

    new: k_sel, v_sel, k_win, v_win, k_raw, v_raw [B, T, G, D], None where there is nothing to
    write; caches: theirs, contiguous, in pages where table [B, pages] is given, but for those of
    win and raw with `ring`. descales: fp32 [B, G] of e4m3 keys and values, else any tensors.
    """
    k_sel, v_sel = new[:2]
    assert k_sel is not None and v_sel is not None
    given = sum(1 << i for i, x in enumerate(new) if x is not None)
    B, T, G, D = k_sel.shape
    DV = v_sel.shape[3]
    pairs = [_by_token(k_sel if x is None else x) for x in new]
    rows = [caches[0] if x is None else x for x in caches]
    page = 0 if table is None else rows[0].shape[1]
    launch(
        _decode_write_kernel, (B * T, 6 * cdiv(G, BLOCK_H)), *(x for x, _ in pairs), *rows, lens,
        lens if table is None else table, *descales, *(n for _, n in pairs), T, G,
        0 if table is None else table.shape[1], len(rows[0]), *(x.shape[1] for x in rows[::2]),
        GIVEN=given, D=D, DV=DV, BLOCK_D=pow2(D), BLOCK_DV=pow2(DV), BLOCK_H=BLOCK_H, PAGE=page,
        RING=ring, num_warps=1,
    )  # fmt: skip
