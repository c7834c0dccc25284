"""The decode step as one function: allocation, split choice and the two launches."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa import launches
from nsa.kernels.decode.choose import _decode_topn_kernel
from nsa.kernels.decode.scan import _decode_scan_kernel
from nsa.kernels.decode.selected import _decode_selected_kernel
from nsa.kernels.tiles import dot_precision, pad_dim, split_dim

SCAN_PER_SM = 4  # programs that the scan aims at: one tile's chain of loads hides another's
SELECTED_PER_SM = 2
SELECTED_SPLITS = 16
TILE_N = 64  # keys per tile
SCAN_STAGES = 2  # tiles of keys in flight per program
SELECTED_STAGES = 2
MERGE_NUMBERS = 8192  # partials that one program of 4 warps merges at once
RANK_BLOCKS = 128  # up to here comparing all blocks with all is quicker than a search
CHOOSE_ALONE = 2048  # blocks of a context beyond which the choice is a launch of its own


@functools.cache
def _sm_count(index: int | None) -> int:
    if index is None:
        return 8
    return torch.cuda.get_device_properties(index).multi_processor_count


def scan_warps(rows: int) -> int:
    """More (token, head) rows than 32 do not fit the registers of 4 warps beside wide heads."""
    return 8 if rows > 32 else 4


def heads_at_once(splits: int, block_dv: int, heads: int) -> int:
    """How many heads' partials, `splits` of each, are merged at once (a power of two)."""
    room = max(MERGE_NUMBERS // (splits * block_dv), 1)
    return min(1 << (room.bit_length() - 1), triton.next_power_of_2(heads))


def choice_sizes(n_tiles: int, nb: int, n_blocks: int, heads_padded: int) -> dict[str, int | bool]:
    """How choose_blocks reads n_tiles tiles of nb block scores each, and finds the top of them."""
    chunk = triton.next_power_of_2(max(n_tiles, triton.cdiv(n_blocks, nb)))
    most = max(MERGE_NUMBERS // (heads_padded * nb), 2)
    single = chunk <= most
    blocks = chunk * nb if single else max(triton.next_power_of_2(n_blocks), 32)
    return dict(CHUNK=min(chunk, most), BLOCKS=blocks, SINGLE=single, RANKED=blocks <= RANK_BLOCKS)


def why_not_decode(l: int, d: int, l_sel: int) -> str | None:
    """Why these block sizes have no decode kernel, None when they have."""
    ratio = l_sel // d if d else 0
    if d < 1 or l_sel % d or ratio & (ratio - 1) or ratio > 16:
        return f"l_sel / d must be a power of two up to 16, got l_sel={l_sel}, d={d}"
    if l - d > l_sel:
        return f"l - d must not exceed l_sel, got l={l}, d={d}, l_sel={l_sel}"
    return None


def nsa_decode_triton(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor,
    v_win: Tensor, gates: Tensor, lens: Tensor, *, l: int, d: int, l_sel: int, n_sel: int,
    n_init: int, n_local: int, window: int, max_len: int, softmax_scale: float | None = None,
    block_table: Tensor | None = None, window_ring: bool = False, return_indices: bool = False,
    branch: str | None = None, block_indices: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of T new tokens per sequence over its caches; out [B, T, HQ, Dv].

    q [B, T, HQ, Dk] with T * (HQ / G) <= 128; k_cmp [B, N_max, G, Dk], v_cmp [B, N_max, G, Dv];
    k_sel, v_sel [B, capacity, G, *], or pages [P, page, G, *] with block_table int32 [B, n];
    k_win, v_win likewise, or a ring of `capacity` >= window + T - 1 rows when window_ring.
    gates [B, T, HQ, 3]; lens int32 [B] on the device, the length including the T new tokens, whose
    keys are in the caches already. max_len bounds every length the call (or a graph captured from
    it) will see. Nothing synchronises with the host; rows beyond a length are never read.
    branch "cmp", "sel" or "win" launches that branch's programs alone, for measuring: the others
    add nothing. "sel" attends to block_indices int32 [B, T, G, n_sel] that an earlier step chose.
    """
    if branch not in (None, "cmp", "sel", "win"):
        raise ValueError(f"branch must be None, 'cmp', 'sel' or 'win', got {branch!r}")
    if (branch == "sel") != (block_indices is not None):
        raise ValueError("block_indices go with branch 'sel' and with no other")
    batch, tokens, hq, dim = q.shape
    groups, dv = v_sel.shape[-2:]
    heads = hq // groups
    reason = why_not_decode(l, d, l_sel)
    if reason:
        raise NotImplementedError(reason)
    if tokens * heads > 128:
        raise NotImplementedError(f"q: T * heads per group must be <= 128, got {tokens * heads}")
    device = q.device
    scale_log2 = (softmax_scale or 1.0 / math.sqrt(dim)) * 1.4426950408889634
    d1, d2 = split_dim(dim)
    block_dv = pad_dim(dv)
    ratio = l_sel // d
    interpret = device.type != "cuda"
    fp32 = q.dtype == torch.float32
    block_n = max(16 if interpret else (32 if fp32 else TILE_N), (2 if interpret else 8) * ratio)
    nb = block_n // ratio
    rows = max(triton.next_power_of_2(tokens * heads), 16)
    heads_padded = max(triton.next_power_of_2(heads), 16)
    n_cmp = max((max_len - l) // d + 1, 0) if max_len >= l else 0
    n_tiles = max(triton.cdiv(n_cmp, block_n), 1)
    programs = batch * groups
    sms = _sm_count(device.index)
    # Splits that fill the chip at the longest length, but no more than there are tiles.
    target = SCAN_PER_SM * sms
    splits_win = max(1, min(triton.cdiv(window + tokens - 1, block_n), target // (2 * programs), 8))
    splits_cmp = max(1, min(n_tiles, target // programs, 64))
    splits_cmp = splits_cmp if branch in (None, "cmp") else 0
    splits_win = splits_win if branch in (None, "win") else 0
    splits_all = splits_cmp + splits_win
    target = SELECTED_PER_SM * sms
    share = triton.cdiv(n_sel, max(1, min(target // (programs * tokens), SELECTED_SPLITS)))
    splits_sel = triton.cdiv(n_sel, share)
    split_cmp = triton.next_power_of_2(max(splits_cmp, 1))
    split_win = triton.next_power_of_2(max(splits_win, 1))
    split_sel = triton.next_power_of_2(splits_sel)
    scan_heads = heads_at_once(max(split_cmp, split_win), block_dv, heads)
    arrivals = splits_sel + (triton.cdiv(heads, scan_heads) if splits_all else 0)

    empty = functools.partial(torch.empty, dtype=torch.float32, device=device)
    scan_o = empty(programs * splits_all * rows * dv)
    scan_m, scan_l = empty(programs * splits_all * rows), empty(programs * splits_all * rows)
    pooled = empty(programs * rows * n_tiles * nb)
    spill, tile_max = empty(programs * rows * n_tiles), empty(programs * rows * n_tiles)
    scratch = empty(programs * tokens * (n_tiles + 1) * nb)
    indices = block_indices
    if indices is None:
        indices = torch.empty(batch, tokens, groups, n_sel, dtype=torch.int32, device=device)
    parts = programs * tokens * splits_sel * heads_padded
    sel_o, sel_m, sel_l = empty(parts * dv), empty(parts), empty(parts)
    # The scan starts the counters; without one, or without a scan's result, zeros do.
    arrived = (torch.empty if splits_all else torch.zeros)(
        programs * tokens, dtype=torch.int32, device=device
    )
    mix = (torch.empty if splits_all else torch.zeros)(
        batch * tokens * hq * dv, dtype=torch.float32, device=device
    )
    out = torch.empty(batch, tokens, hq, dv, dtype=q.dtype, device=device)

    page = 0 if block_table is None else k_sel.shape[1]
    table = lens if block_table is None else block_table
    table_len = 0 if block_table is None else block_table.shape[1]
    dims = dict(D=dim, DV=dv, BLOCK_D=d1, BLOCK_D2=d2, BLOCK_DV=block_dv,
                PRECISION=dot_precision(q.dtype))  # fmt: skip
    n_blocks = triton.cdiv(max_len, l_sel)
    choice = dict(
        ROWS=rows, HEADS=heads_padded, TILE_N=block_n, NB=nb, N_SEL=n_sel,
        N_PAD=triton.next_power_of_2(n_sel), N_INIT=n_init, N_LOCAL=n_local,
        **choice_sizes(n_tiles, nb, n_blocks, heads_padded),
    )  # fmt: skip
    alone = branch is None and choice["BLOCKS"] > CHOOSE_ALONE
    if splits_all:
        _decode_scan_kernel[(splits_all, programs)](
            q, k_cmp, v_cmp, k_win, v_win, lens, table, scan_o, scan_m, scan_l, pooled, spill,
            tile_max, arrived, table_len, k_cmp.shape[1], k_win.shape[1], groups, heads, tokens,
            splits_cmp, splits_all, n_tiles, l, d, l_sel, window, scale_log2, ROWS=rows,
            BLOCK_N=block_n, NB=nb, PAGE=0 if window_ring else page, RING=window_ring,
            POOL_DTYPE=tl.float32 if fp32 else tl.float16, num_warps=scan_warps(rows),
            num_stages=SCAN_STAGES,
            **dims,
        )  # fmt: skip
        launches.bump("_decode_scan_kernel")
    if alone:
        _decode_topn_kernel[(programs, tokens)](
            lens, scan_m, scan_l, pooled, spill, tile_max, scratch, indices, groups, heads, tokens,
            splits_cmp, splits_all, n_tiles, l, d, l_sel, SPLITS=split_cmp, num_warps=8,
            num_stages=1, **choice,
        )  # fmt: skip
        launches.bump("_decode_topn_kernel")
    _decode_selected_kernel[(arrivals, programs, tokens)](
        q, k_sel, v_sel, lens, table, indices, sel_o, sel_m, sel_l, scan_o, scan_m, scan_l, pooled,
        spill, tile_max, scratch, gates, mix, arrived, out, table_len, k_sel.shape[1], groups,
        heads, tokens, splits_sel, share if branch in (None, "sel") else 0, arrivals, splits_cmp,
        splits_all, n_tiles, l, d, l_sel, scale_log2,
        BLOCK_N=min(block_n, 64, max(triton.next_power_of_2(l_sel), 16)), PAGE=page,
        CHOOSE=branch is None and not alone, SPLITS_CMP=split_cmp, SPLITS_WIN=split_win,
        SPLITS_SEL=split_sel, SCAN_HEADS=scan_heads,
        SEL_HEADS=heads_at_once(split_sel, block_dv, heads), num_warps=4,
        num_stages=SELECTED_STAGES, **choice, **dims,
    )  # fmt: skip
    launches.bump("_decode_selected_kernel")
    return (out, indices) if return_indices else out
