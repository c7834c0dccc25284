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

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.checks import scale_of
from nsa.config import check_int
from nsa.flags import Flags
from nsa.kernels.launch import launch, on_its_device
from nsa.kernels.tiles import LOG2E, arch_of, cdiv, dot_precision, dot_size, pow2, sm_count
from nsa.kernels.triton_sel_kernel.inputs import (
    aligned,
    check_kernel_inputs,
    check_tensor,
    units_of_8,
)
from nsa.kernels.triton_sel_kernel.rows import (
    attend,
    finish_row,
    key_share,
    load_range,
    load_row_chunks,
    load_spans,
    zero_chunks,
)
from nsa.kernels.triton_sel_kernel.tiles import (
    MAX_SPANS_PER_PASS,
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
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
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
    finish_row(O, LSE, row, part, head, live, H, acc, m_i, l_i, DV, BLOCK_DV, SPLITS)


@triton.jit
def _varlen_row(
    Q, K, V, CU, O, LSE, H, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
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
    finish_row(O, LSE, row, part, head, live, H, acc, m_i, l_i, DV, BLOCK_DV, SPLITS)


# ---- kernels -------------------------------------------------------------------------------------


@triton.jit
def _sel_attn_fwd_dense_kernel(
    Q, K, V, SPANS, O, LSE, S, G, H, L, stride_kb, stride_kg, stride_kl, stride_vb, stride_vg,
    stride_vl, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, HAS_SPANS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (row, split, tile of 16 heads)."""
    _dense_row(
        Q, K, V, SPANS, O, LSE, S, G, H, L, stride_kb, stride_kg, stride_kl, stride_vb,
        stride_vg, stride_vl, scale_log2, D, DV, HAS_SPANS, ROWS, BLOCK_L, BLOCK_D, BLOCK_DV,
        SPLITS, PRECISION,
    )  # fmt: skip


@triton.jit
def _sel_attn_fwd_dense_group_kernel(
    Q, K, V, SPANS, O, LSE, S, G, H, L, stride_kb, stride_kg, stride_kl, stride_vb, stride_vg,
    stride_vl, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, HAS_SPANS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (row, split) serves all heads of the row, if one head tile holds them."""
    _dense_row(
        Q, K, V, SPANS, O, LSE, S, G, H, L, stride_kb, stride_kg, stride_kl, stride_vb,
        stride_vg, stride_vl, scale_log2, D, DV, HAS_SPANS, ROWS, BLOCK_L, BLOCK_D, BLOCK_DV,
        SPLITS, PRECISION,
    )  # fmt: skip


@triton.jit
def _sel_attn_fwd_varlen_kernel(
    Q, K, V, CU, O, LSE, H, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (row, split, tile of 16 heads)."""
    _varlen_row(
        Q, K, V, CU, O, LSE, H, scale_log2, D, DV, ROWS, BLOCK_L, BLOCK_D, BLOCK_DV, SPLITS,
        PRECISION,
    )  # fmt: skip


@triton.jit
def _sel_attn_fwd_varlen_group_kernel(
    Q, K, V, CU, O, LSE, H, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (row, split) serves all heads of the row, if one head tile holds them."""
    _varlen_row(
        Q, K, V, CU, O, LSE, H, scale_log2, D, DV, ROWS, BLOCK_L, BLOCK_D, BLOCK_DV, SPLITS,
        PRECISION,
    )  # fmt: skip


@triton.jit
def _sel_attn_fwd_ranges_kernel(
    Q, K, V, STARTS, CUM, O, LSE, S, G, H, n, stride_kb, stride_kg, stride_kl, stride_vb,
    stride_vg, stride_vl, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, NR: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per (row, split, tile of heads); keys straight from the cache by spans."""
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
    begin, end = key_share(tl.load(CUM + row * (n + 1) + n), part, SPLITS, BLOCK_L)
    for first in tl.range(0, n, NR):
        cum, step = load_spans(STARTS, CUM, row, n, first, NR)
        lo = tl.maximum(begin, tl.load(CUM + row * (n + 1) + first))
        hi = tl.minimum(end, tl.load(CUM + row * (n + 1) + tl.minimum(first + NR, n)))
        acc, m_i, l_i = attend(
            acc, m_i, l_i, qs, k_base, v_base, stride_kl * 8, stride_vl * 8, cum, step, lo, hi,
            scale_log2, D, DV, BLOCK_L, BLOCK_D, BLOCK_DV, True, PRECISION, ROWS,
        )  # fmt: skip
    finish_row(O, LSE, row, part, head, live, H, acc, m_i, l_i, DV, BLOCK_DV, SPLITS)


@triton.jit
def _sel_attn_merge_kernel(
    PART_O, PART_LSE, O, LSE, H,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr,
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
    tl.store(LSE + pid, tl.where(total > 0, safe + tl.log(total), float("-inf")))


# ---- launchers -----------------------------------------------------------------------------------


class Launch:
    """Sizes, outputs and partials that every forward launch needs."""

    def __init__(
        self, q: Tensor, rows: int, heads: int, dv: int, key_len: int, *, group: bool,
        tiles: Tiles | None, flags: Flags | None, splits: int | None, ranges: bool = False,
    ) -> None:  # fmt: skip
        d = q.shape[-1]
        self.rows, self.heads, self.dv = rows, heads, dv
        self.head_tile = head_tile(heads, d, dv, q.element_size(), group=group)
        head_tiles = cdiv(heads, self.head_tile)
        programs, n_sm = rows * head_tiles, sm_count(q.device)
        self.tiles = tiles or fwd_tiles(
            arch_of(q.device), d, dv, q.element_size(), key_len, programs, n_sm, flags,
            ranges=ranges,
        )
        self.splits = splits or split_count(programs, key_len, self.tiles.block_l, n_sm)
        self.grid = (rows, self.splits, head_tiles)
        self.out = torch.empty(rows, heads, dv, dtype=q.dtype, device=q.device)
        self.lse = torch.empty(rows, heads, dtype=torch.float32, device=q.device)
        self.part_o, self.part_lse = self.out, self.lse
        if self.splits > 1:
            shape = (rows, self.splits, heads)
            self.part_o = torch.empty(*shape, dv, dtype=torch.float32, device=q.device)
            self.part_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
        self.meta = dict(
            D=d, DV=dv, ROWS=self.head_tile, BLOCK_L=self.tiles.block_l,
            BLOCK_D=self.tiles.block_d, BLOCK_DV=self.tiles.block_dv, SPLITS=self.splits,
            PRECISION=dot_precision(q.dtype), num_warps=self.tiles.num_warps,
            num_stages=self.tiles.num_stages,
        )  # fmt: skip

    def run(self, kernel, *args, **meta) -> None:
        launch(kernel, self.grid, *args, **self.meta, **meta)
        if self.splits > 1:
            launch(
                _sel_attn_merge_kernel, (self.rows * self.heads,),
                self.part_o, self.part_lse, self.out, self.lse, self.heads, DV=self.dv,
                BLOCK_DV=dot_size(self.dv), SPLITS=self.splits,
                num_warps=4,
            )  # fmt: skip


def _result(sized: Launch, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    return (sized.out, sized.lse) if return_lse else sized.out


@on_its_device
def _dense(
    q: Tensor, k: Tensor, v: Tensor, *, group: bool, softmax_scale: float | None,
    return_lse: bool, tiles: Tiles | None, flags: Flags | None, splits: int | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    check_kernel_inputs(q, k, v, "[N, L, D]", "[N, L, Dv]", splits)
    N = q.shape[0]
    if k.shape[:2] != v.shape[:2] or k.shape[0] != N:
        raise ValueError(
            f"K must be [N={N}, L, D] and V [N, L, Dv], got {list(k.shape)} and {list(v.shape)}"
        )
    return _launch_spans(
        q, k[:, None], v[:, None], None, 1, group=group, softmax_scale=softmax_scale,
        return_lse=return_lse, tiles=tiles, flags=flags, splits=splits,
    )  # fmt: skip


def _launch_spans(
    q: Tensor, k: Tensor, v: Tensor, spans: Tensor | None, S: int, *, group: bool,
    softmax_scale: float | None, return_lse: bool, tiles: Tiles | None = None,
    flags: Flags | None = None, splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Dense kernels on k [B, G, L, D]; rows (b, s, g) of q [B*S*G, H, D], spans [rows, 2]."""
    rows, H, D = q.shape
    L = k.shape[2]
    sized = Launch(
        q, rows, H, v.shape[-1], L, group=group, tiles=tiles, flags=flags, splits=splits
    )
    if rows and H:
        q = aligned(q)
        k, k_strides = units_of_8(k)
        v, v_strides = units_of_8(v)
        kernel = _sel_attn_fwd_dense_group_kernel if group else _sel_attn_fwd_dense_kernel
        sized.run(
            kernel, q, k, v, q if spans is None else spans, sized.part_o, sized.part_lse, S,
            k.shape[1], H, L, *k_strides, *v_strides, scale_of(softmax_scale, D) * LOG2E,
            HAS_SPANS=spans is not None,
        )  # fmt: skip
    return _result(sized, return_lse)


@on_its_device
def _varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, group: bool,
    softmax_scale: float | None, return_lse: bool, max_len: int | None, tiles: Tiles | None,
    flags: Flags | None, splits: int | None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    check_kernel_inputs(q, k, v, "[T, D]", "[T, Dv]", splits)
    N, H, D = q.shape
    if k.shape[0] != v.shape[0]:
        raise ValueError(
            f"K_all must be [T, D] and V_all [T, Dv], got {list(k.shape)} and {list(v.shape)}"
        )
    check_tensor("cu_seqlens", cu_seqlens, "[N + 1]", (torch.int32,), q.device)
    if len(cu_seqlens) != N + 1:
        raise ValueError(f"cu_seqlens must be [N + 1 = {N + 1}], got {list(cu_seqlens.shape)}")
    check_int("max_len", max_len, 0, optional=True)
    # The mean length stands in for the longest: it needs no device wait.
    key_len = max_len if max_len is not None else 2 * cdiv(k.shape[0], max(N, 1))
    sized = Launch(
        q, N, H, v.shape[-1], key_len, group=group, tiles=tiles, flags=flags, splits=splits
    )
    if N and H:
        kernel = _sel_attn_fwd_varlen_group_kernel if group else _sel_attn_fwd_varlen_kernel
        sized.run(
            kernel, aligned(q), aligned(k), aligned(v), cu_seqlens.contiguous(),
            sized.part_o, sized.part_lse, H, scale_of(softmax_scale, D) * LOG2E,
        )  # fmt: skip
    return _result(sized, return_lse)


def sel_attn_fwd_dense(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None,
    return_lse: bool = False, tiles: Tiles | None = None, flags: Flags | None = None,
    splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of row n's H heads over its own L keys, no mask (semantics 6).

    q [N, H, D], k [N, L, D], v [N, L, Dv], one dtype of fp16, bf16, fp32; D and Dv multiples of 8
    up to 256. Returns o [N, H, Dv]; with return_lse also the natural-log lse, fp32 [N, H]. L = 0
    gives o = 0, lse = -inf. softmax_scale defaults to 1/sqrt(D). tiles and splits override the
    tuned choice, flags those of NSA_SEL_TRITON_BLOCK_*.
    Raises TypeError, ValueError or NotImplementedError for other inputs.
    """
    return _dense(
        q, k, v, group=False, softmax_scale=softmax_scale, return_lse=return_lse, tiles=tiles,
        flags=flags, splits=splits,
    )  # fmt: skip


def sel_attn_fwd_dense_group(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None,
    return_lse: bool = False, tiles: Tiles | None = None, flags: Flags | None = None,
    splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """sel_attn_fwd_dense with one program for all heads of a row, so K and V are read once."""
    return _dense(
        q, k, v, group=True, softmax_scale=softmax_scale, return_lse=return_lse, tiles=tiles,
        flags=flags, splits=splits,
    )  # fmt: skip


def sel_attn_fwd_varlen(
    q: Tensor, k_all: Tensor, v_all: Tensor, cu_seqlens: Tensor, *,
    softmax_scale: float | None = None, return_lse: bool = False, max_len: int | None = None,
    tiles: Tiles | None = None, flags: Flags | None = None, splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of row n over keys cu_seqlens[n] .. cu_seqlens[n + 1] of packed K and V.

    q [N, H, D], k_all [T, D], v_all [T, Dv], cu_seqlens int32 [N + 1]. max_len, the longest row if
    known, only steers tiles and splits. Otherwise as sel_attn_fwd_dense.
    """
    return _varlen(
        q, k_all, v_all, cu_seqlens, group=False, softmax_scale=softmax_scale,
        return_lse=return_lse, max_len=max_len, tiles=tiles, flags=flags, splits=splits,
    )  # fmt: skip


def sel_attn_fwd_varlen_group(
    q: Tensor, k_all: Tensor, v_all: Tensor, cu_seqlens: Tensor, *,
    softmax_scale: float | None = None, return_lse: bool = False, max_len: int | None = None,
    tiles: Tiles | None = None, flags: Flags | None = None, splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """sel_attn_fwd_varlen with one program for all heads of a row, so K and V are read once."""
    return _varlen(
        q, k_all, v_all, cu_seqlens, group=True, softmax_scale=softmax_scale,
        return_lse=return_lse, max_len=max_len, tiles=tiles, flags=flags, splits=splits,
    )  # fmt: skip


@on_its_device
def sel_fwd_spans(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, softmax_scale: float | None, *,
    group: bool = True, flags: Flags | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) where every row has one range: the dense kernels read the cache in place.

    q [B, S, G, H, D] contiguous, k [B, G, Skv, D] and v of any strides, ranges [B, S, G, 1, 2]
    int32 or int64, clamped to [0, Skv) by the kernel.
    """
    B, S, G, H, D = q.shape
    out, lse = _launch_spans(
        q.view(-1, H, D), k, v, ranges.contiguous(), S, group=group,
        softmax_scale=softmax_scale, return_lse=True, flags=flags,
    )  # fmt: skip
    return out.view(B, S, G, H, v.shape[-1]), lse.view(B, S, G, H)


@on_its_device
def sel_fwd_ranges(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, cum: Tensor, softmax_scale: float | None, *,
    flags: Flags | None = None, tiles: Tiles | None = None, splits: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) over any clean spans (see spans.clean_spans); K and V of any strides."""
    B, S, G, H, D = q.shape
    n = starts.shape[-1]
    sized = Launch(
        q, B * S * G, H, v.shape[-1], k.shape[2], group=True, tiles=tiles, flags=flags,
        splits=splits, ranges=True,
    )  # fmt: skip
    if sized.rows and H:
        k, k_strides = units_of_8(k)
        v, v_strides = units_of_8(v)
        sized.run(
            _sel_attn_fwd_ranges_kernel, aligned(q), k, v, starts, cum, sized.part_o,
            sized.part_lse, S, G, H, n, *k_strides, *v_strides, scale_of(softmax_scale, D) * LOG2E,
            NR=spans_per_pass(n),
        )  # fmt: skip
    return sized.out.view(B, S, G, H, v.shape[-1]), sized.lse.view(B, S, G, H)


def spans_per_pass(n: int) -> int:
    return min(MAX_SPANS_PER_PASS, pow2(n))
