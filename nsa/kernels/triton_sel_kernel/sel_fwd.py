"""Selection attention forward. A row is one query with the H heads of its KV group.

Three ways to say which keys a row attends, one body:
  dense   keys [0, L) of K[row], or one span per row of a cache [B, G, Skv, D];
  varlen  keys [cu_seqlens[row], cu_seqlens[row + 1]) of a packed K;
  ranges  any number of spans per row of a cache, read in place: key tiles run across span borders,
          so loads are pipelined from one span to the next and short spans waste nothing.
Heads are the rows of the tensor-core tile: K and V are read once for all of them. Rows that are
too few for the GPU are split over keys and merged by a second kernel, in a fixed order.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.checks import scale_of
from nsa.config import check_int
from nsa.flags import Flags
from nsa.kernels.launch import MOST_MADE, launch, on_its_device
from nsa.kernels.tiles import LOG2E, arch_of, cdiv, dot_precision, dot_size, sm_count
from nsa.kernels.triton_sel_kernel.inputs import (
    aligned,
    check_kernel_inputs,
    check_tensor,
    units_of_8,
)
from nsa.kernels.triton_sel_kernel.rows import (
    attend,
    clean_row,
    finish_row,
    key_share,
    load_range,
    load_row_chunks,
    zero_chunks,
)
from nsa.kernels.triton_sel_kernel.tiles import (
    Tiles,
    fwd_tiles,
    head_tile,
    split_count,
)


@triton.jit
def _dense_row(
    Q, K, V, SPANS, O, LSE, S, G, H, L, stride_kb, stride_kg, stride_kl, stride_vb, stride_vg,
    stride_vl, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, HAS_SPANS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr, KEEP_LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The group is the slowest: one group's K and V stay in L2 while its rows pass.
    pid = tl.program_id(0)
    b = (pid // S // G).to(tl.int64)
    g = pid // S % G
    row = (b * S + pid % S) * G + g
    part = tl.program_id(1)
    head = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    live = head < H
    # Strides come in units of 8 elements: the compiler learns that 16-byte loads are aligned.
    k_base = K + b * stride_kb * 8 + g.to(tl.int64) * stride_kg * 8
    v_base = V + b * stride_vb * 8 + g.to(tl.int64) * stride_vg * 8
    length = L
    if HAS_SPANS:
        start, end = load_range(SPANS + row * 2, True, L)
        length = tl.maximum(end - start, 0)
        k_base += start.to(tl.int64) * (stride_kl * 8)
        v_base += start.to(tl.int64) * (stride_vl * 8)
    qs = load_row_chunks(Q, row * H * D, D, head, live, D, BLOCK_D, Q.dtype.element_ty)
    acc = zero_chunks(ROWS, DV, BLOCK_DV)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    begin, end = key_share(length, part, SPLITS, BLOCK_L)
    acc, m_i, l_i = attend(
        acc, m_i, l_i, qs, k_base, v_base, stride_kl * 8, stride_vl * 8, m_i, m_i, begin, end,
        scale_log2, D, DV, BLOCK_L, BLOCK_D, BLOCK_DV, False, PRECISION, ROWS,
    )  # fmt: skip
    finish_row(O, LSE, row, part, head, live, H, acc, m_i, l_i, DV, BLOCK_DV, SPLITS, KEEP_LSE)


@triton.jit
def _varlen_row(
    Q, K, V, CU, O, LSE, H, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, KEEP_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    head = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    live = head < H
    first = tl.load(CU + row)
    length = tl.load(CU + row + 1) - first
    qs = load_row_chunks(Q, row * H * D, D, head, live, D, BLOCK_D, Q.dtype.element_ty)
    acc = zero_chunks(ROWS, DV, BLOCK_DV)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    begin, end = key_share(length, part, SPLITS, BLOCK_L)
    acc, m_i, l_i = attend(
        acc, m_i, l_i, qs, K + first.to(tl.int64) * D, V + first.to(tl.int64) * DV, D, DV, m_i,
        m_i, begin, end, scale_log2, D, DV, BLOCK_L, BLOCK_D, BLOCK_DV, False, PRECISION, ROWS,
    )  # fmt: skip
    finish_row(O, LSE, row, part, head, live, H, acc, m_i, l_i, DV, BLOCK_DV, SPLITS, KEEP_LSE)


# ---- kernels -------------------------------------------------------------------------------------


@triton.jit
def _sel_attn_fwd_dense_kernel(
    Q, K, V, SPANS, O, LSE, S, G, H, L, stride_kb, stride_kg, stride_kl, stride_vb, stride_vg,
    stride_vl, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, HAS_SPANS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr, KEEP_LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (row, split, tile of 16 heads)."""
    _dense_row(
        Q, K, V, SPANS, O, LSE, S, G, H, L, stride_kb, stride_kg, stride_kl, stride_vb,
        stride_vg, stride_vl, scale_log2, D, DV, HAS_SPANS, ROWS, BLOCK_L, BLOCK_D, BLOCK_DV,
        SPLITS, KEEP_LSE, PRECISION,
    )  # fmt: skip


@triton.jit
def _sel_attn_fwd_dense_group_kernel(
    Q, K, V, SPANS, O, LSE, S, G, H, L, stride_kb, stride_kg, stride_kl, stride_vb, stride_vg,
    stride_vl, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, HAS_SPANS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr, KEEP_LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (row, split) serves all heads of the row, if one head tile holds them."""
    _dense_row(
        Q, K, V, SPANS, O, LSE, S, G, H, L, stride_kb, stride_kg, stride_kl, stride_vb,
        stride_vg, stride_vl, scale_log2, D, DV, HAS_SPANS, ROWS, BLOCK_L, BLOCK_D, BLOCK_DV,
        SPLITS, KEEP_LSE, PRECISION,
    )  # fmt: skip


@triton.jit
def _sel_attn_fwd_varlen_kernel(
    Q, K, V, CU, O, LSE, H, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, KEEP_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (row, split, tile of 16 heads)."""
    _varlen_row(
        Q, K, V, CU, O, LSE, H, scale_log2, D, DV, ROWS, BLOCK_L, BLOCK_D, BLOCK_DV, SPLITS,
        KEEP_LSE, PRECISION,
    )  # fmt: skip


@triton.jit
def _sel_attn_fwd_varlen_group_kernel(
    Q, K, V, CU, O, LSE, H, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, KEEP_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (row, split) serves all heads of the row, if one head tile holds them."""
    _varlen_row(
        Q, K, V, CU, O, LSE, H, scale_log2, D, DV, ROWS, BLOCK_L, BLOCK_D, BLOCK_DV, SPLITS,
        KEEP_LSE, PRECISION,
    )  # fmt: skip


@triton.jit
def _sel_attn_fwd_ranges_kernel(
    Q, K, V, RANGES, O, LSE, S, G, H, L, n, stride_kb, stride_kg, stride_kl, stride_vb, stride_vg,
    stride_vl, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, NR: tl.constexpr, MANY: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr, KEEP_LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (row, split, tile of heads); keys straight from the cache, by up to NR ranges
    that it cleans itself. With MANY more they come clean, and each NR are split by themselves."""
    pid = tl.program_id(0)
    b = (pid // S // G).to(tl.int64)
    g = pid // S % G
    row = (b * S + pid % S) * G + g
    part = tl.program_id(1)
    head = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    live = head < H
    k_base = K + b * stride_kb * 8 + g.to(tl.int64) * stride_kg * 8
    v_base = V + b * stride_vb * 8 + g.to(tl.int64) * stride_vg * 8
    qs = load_row_chunks(Q, row * H * D, D, head, live, D, BLOCK_D, Q.dtype.element_ty)
    acc = zero_chunks(ROWS, DV, BLOCK_DV)
    m_i = tl.full([ROWS], float("-inf"), tl.float32)
    l_i = tl.zeros([ROWS], tl.float32)
    # A loop that may go around takes 60 registers more (sm_90, D = 128), also where it does not.
    for first in tl.range(0, n if MANY else 1, NR):
        key, length, slot, _ = clean_row(RANGES + row * n * 2, n, first, L, NR)
        lo, hi = key_share(tl.sum(length, 0), part, SPLITS, BLOCK_L)
        acc, m_i, l_i = attend(
            acc, m_i, l_i, qs, k_base, v_base, stride_kl * 8, stride_vl * 8, slot, key - slot, lo,
            hi, scale_log2, D, DV, BLOCK_L, BLOCK_D, BLOCK_DV, True, PRECISION, ROWS,
        )  # fmt: skip
    finish_row(O, LSE, row, part, head, live, H, acc, m_i, l_i, DV, BLOCK_DV, SPLITS, KEEP_LSE)


@triton.jit
def _sel_attn_merge_kernel(
    PART_O, PART_LSE, O, LSE, H,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, KEEP_LSE: tl.constexpr,
):  # fmt: skip
    """Join the partials of one (row, head): softmax over their lse."""
    pid = tl.program_id(0).to(tl.int64)
    part = (pid // H) * SPLITS + tl.arange(0, SPLITS)
    at = part * H + pid % H
    lse = tl.load(PART_LSE + at)
    top = tl.max(lse, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    w = tl.exp(lse - safe)
    total = tl.sum(w, 0)
    w = w / tl.where(total > 0, total, 1.0)
    offs = tl.arange(0, BLOCK_DV)
    o = tl.load(PART_O + at[:, None] * DV + offs[None, :], mask=(offs < DV)[None, :], other=0.0)
    o = tl.sum(o * w[:, None], 0)
    tl.store(O + pid * DV + offs, o.to(O.dtype.element_ty), mask=offs < DV)
    if KEEP_LSE:
        tl.store(LSE + pid, tl.where(total > 0, safe + tl.log(total), float("-inf")))


# ---- launchers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sized:
    """What a forward launch of so many rows takes, from sizes alone."""

    rows: int
    heads: int
    dv: int
    splits: int
    grid: tuple[int, int, int]
    constants: dict[str, Any]
    merge: tuple[Any, tuple[int, int, int], dict[str, Any]] | None  # of the splits, if several

    @property
    def partial(self) -> int:
        """Elements of the splits' outputs."""
        return self.rows * self.splits * self.heads * self.dv

    def buffers(
        self, q: Tensor, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(out [*shape, Dv], lse fp32 [*shape] if it is kept, with splits the fp32 buffer of their
        outputs and, behind these, their lse)."""
        out = torch.empty(*shape, self.dv, dtype=q.dtype, device=q.device)
        lse = parts = None
        if self.constants["KEEP_LSE"]:
            lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        if self.merge:
            size = self.partial + self.partial // self.dv
            parts = torch.empty(size, dtype=torch.float32, device=q.device)
        return out, lse, parts


@functools.lru_cache(maxsize=MOST_MADE)
def sized_for(
    dtype: torch.dtype, device: torch.device, rows: int, heads: int, d: int, dv: int,
    key_len: int, keep_lse: bool, group: bool, tiles: Tiles | None, flags: Flags | None,
    splits: int | None, ranges: bool = False,
) -> Sized:  # fmt: skip
    head_rows = head_tile(heads, d, dv, dtype.itemsize, group=group)
    head_tiles = cdiv(heads, head_rows)
    programs, n_sm = rows * head_tiles, sm_count(device)
    tiles = tiles or fwd_tiles(
        arch_of(device), d, dv, dtype.itemsize, key_len, programs, n_sm, flags, ranges=ranges
    )
    splits = splits or split_count(programs, key_len, tiles.block_l, n_sm)
    constants = dict(
        D=d, DV=dv, ROWS=head_rows, SPLITS=splits, KEEP_LSE=keep_lse,
        PRECISION=dot_precision(dtype), **tiles.constants,
    )  # fmt: skip
    merge = None
    if splits > 1:
        more = dict(DV=dv, BLOCK_DV=dot_size(dv), SPLITS=splits, KEEP_LSE=keep_lse, num_warps=4)
        merge = _sel_attn_merge_kernel, (rows * heads, 1, 1), more
    return Sized(rows, heads, dv, splits, (rows, splits, head_tiles), constants, merge)


def dense_kernel(group: bool) -> Any:
    return _sel_attn_fwd_dense_group_kernel if group else _sel_attn_fwd_dense_kernel


def _packed(
    kernel: Any, sized: Sized, tensors: tuple[Tensor, ...], numbers: tuple, **more: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Launch a kernel of packed rows: tensors are q [rows, H, D], k, v and what says where a row's
    keys are. Gives out, with KEEP_LSE also lse."""
    out, lse, parts = sized.buffers(tensors[0], (sized.rows, sized.heads))
    if sized.rows and sized.heads:
        ends = (out, out if lse is None else lse)
        to = ends if parts is None else (parts, parts[sized.partial :])
        launch(kernel, sized.grid, *tensors, *to, *numbers, **sized.constants, **more)
        if sized.merge:
            kernel, grid, constants = sized.merge
            launch(kernel, grid, *to, *ends, sized.heads, **constants)
    return out if lse is None else (out, lse)


@on_its_device
def sel_attn_fwd_dense(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None,
    return_lse: bool = False, tiles: Tiles | None = None, flags: Flags | None = None,
    splits: int | None = None, group: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of row n's H heads over its own L keys, no mask (semantics 6).

    q [N, H, D], k [N, L, D], v [N, L, Dv], one dtype of fp16, bf16, fp32; D and Dv multiples of 8
    up to 256. Returns o [N, H, Dv]; with return_lse also the natural-log lse, fp32 [N, H]. L = 0
    gives o = 0, lse = -inf. softmax_scale defaults to 1/sqrt(D). tiles and splits override the
    tuned choice, flags those of NSA_SEL_TRITON_BLOCK_*. group: one program for all heads of a row,
    so that K and V are read once. Raises TypeError, ValueError or NotImplementedError for other
    inputs.
    """
    check_kernel_inputs(q, k, v, "[N, L, D]", "[N, L, Dv]", splits)
    N = q.shape[0]
    if k.shape[:2] != v.shape[:2] or k.shape[0] != N:
        raise ValueError(
            f"K must be [N={N}, L, D] and V [N, L, Dv], got {list(k.shape)} and {list(v.shape)}"
        )
    H, D, L, dv = *q.shape[1:], *v.shape[1:]
    sized = sized_for(q.dtype, q.device, N, H, D, dv, L, return_lse, group, tiles, flags, splits)
    q = aligned(q)
    k, k_strides = units_of_8(k[:, None])
    v, v_strides = units_of_8(v[:, None])
    numbers = (1, 1, H, L, *k_strides, *v_strides, scale_of(softmax_scale, D) * LOG2E)
    return _packed(dense_kernel(group), sized, (q, k, v, q), numbers, HAS_SPANS=False)


@on_its_device
def sel_attn_fwd_varlen(
    q: Tensor, k_all: Tensor, v_all: Tensor, cu_seqlens: Tensor, *,
    softmax_scale: float | None = None, return_lse: bool = False, max_len: int | None = None,
    tiles: Tiles | None = None, flags: Flags | None = None, splits: int | None = None,
    group: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of row n over keys cu_seqlens[n] .. cu_seqlens[n + 1] of packed K and V.

    q [N, H, D], k_all [T, D], v_all [T, Dv], cu_seqlens int32 [N + 1]. max_len, the longest row if
    known, only steers tiles and splits. Otherwise as sel_attn_fwd_dense.
    """
    check_kernel_inputs(q, k_all, v_all, "[T, D]", "[T, Dv]", splits)
    N, H, D = q.shape
    T, dv = v_all.shape
    if k_all.shape[0] != T:
        raise ValueError(
            f"K_all must be [T, D] and V_all [T, Dv], got {list(k_all.shape)} and [{T}, {dv}]"
        )
    check_tensor("cu_seqlens", cu_seqlens, "[N + 1]", (torch.int32,), q.device)
    if len(cu_seqlens) != N + 1:
        raise ValueError(f"cu_seqlens must be [N + 1 = {N + 1}], got {list(cu_seqlens.shape)}")
    check_int("max_len", max_len, 0, optional=True)
    # The mean length stands in for the longest: it needs no device wait.
    key_len = max_len if max_len is not None else 2 * cdiv(T, max(N, 1))
    sized = sized_for(
        q.dtype, q.device, N, H, D, dv, key_len, return_lse, group, tiles, flags, splits
    )
    kernel = _sel_attn_fwd_varlen_group_kernel if group else _sel_attn_fwd_varlen_kernel
    tensors = (aligned(q), aligned(k_all), aligned(v_all), cu_seqlens.contiguous())
    return _packed(kernel, sized, tensors, (H, scale_of(softmax_scale, D) * LOG2E))


def sel_attn_fwd_dense_group(
    q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """sel_attn_fwd_dense by the kernel for all heads of a row."""
    return sel_attn_fwd_dense(q, k, v, group=True, **options)


def sel_attn_fwd_varlen_group(
    q: Tensor, k_all: Tensor, v_all: Tensor, cu_seqlens: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """sel_attn_fwd_varlen by the kernel for all heads of a row."""
    return sel_attn_fwd_varlen(q, k_all, v_all, cu_seqlens, group=True, **options)
