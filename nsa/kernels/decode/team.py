"""A decode step in one launch, for few sequences: a team of programs for each sequence and group.

What the launches of a larger step do one after another a team does in phases, between which its
programs meet. On the device that takes as long; what it saves is the host, to whom three launches
are 60 us and more. The programs wait for each other, so all must run at a time: the launch is
cooperative.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.kernels.decode.choose import store_candidates
from nsa.kernels.decode.scan import scan_split
from nsa.kernels.decode.selected import attend_selected, merge_row


@triton.jit
def _sign(counter):
    """Of a counter of _meet(), as it is in the L2; for every thread by itself."""
    value = tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip
    return value < 0


@triton.jit
def _meet(counter, sign, part, parts):
    """All of a team's programs have stored what they had to, before any goes on to load.

    The arrivals add up to 2^31, so the sign turns with the last and the rest is zero again. sign:
    the counter's before; the one after comes back.
    """
    tl.debug_barrier()
    arrival = tl.where(part == 0, 2147483647 - (parts - 2), 1)
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first red.release.gpu.global.add.s32 [$1], $2;
        mov.u32 $0, thread;
        }""",
        "=r,l,r", [counter, arrival], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    while _sign(counter) == sign:
        pass
    return not sign


@triton.jit
def _decode_team_kernel(
    Q, KC, VC, KS, VS, KW, VW, GATES, LENS, TABLE, K_DESCALE, V_DESCALE, INDICES, OUT, COUNTERS,
    SCAN_O, SCAN_M, SCAN_L, POOLED, SPILL, TILE_MAX, SEL_O, SEL_M, SEL_L, KEYS, BLOCKS,
    table_len, cmp_capacity, sel_capacity, win_capacity, G, H, T, splits_cmp, splits_all,
    splits_sel, share, chunks, n_tiles, l, d, l_sel, window, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    TILE_N: tl.constexpr, BLOCK_N: tl.constexpr, NB: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr, PAGE: tl.constexpr, RING: tl.constexpr,
    POOL_DTYPE: tl.constexpr, APART: tl.constexpr, PRECISION: tl.constexpr,
    SPLITS_CMP: tl.constexpr, SPLITS_WIN: tl.constexpr, SPLITS_SEL: tl.constexpr,
    CHUNK: tl.constexpr, SINGLE: tl.constexpr, N: tl.constexpr, RANKED: tl.constexpr,
    N_SEL: tl.constexpr, N_PAD: tl.constexpr, N_INIT: tl.constexpr, N_LOCAL: tl.constexpr,
    PHASE: tl.constexpr,
):  # fmt: skip
    """A whole step. PHASE -1 does all four phases, 0 to 3 one of them (for where programs run one
    after another). COUNTERS int32 [B, G, 32], zeros at first, one line of memory each.
    """
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    bg = tl.program_id(1)
    counter = COUNTERS + bg * 32
    length = tl.load(LENS + bg // G)
    sign = _sign(counter) if PHASE == -1 else False
    if PHASE == -1 or PHASE == 0:
        if part < splits_all:
            scan_split(
                bg, part, length, Q, KC, VC, KW, VW, TABLE, K_DESCALE, V_DESCALE, SCAN_O, SCAN_M,
                SCAN_L, POOLED, SPILL, TILE_MAX, table_len, cmp_capacity, win_capacity, G, H, T,
                splits_cmp, splits_all, n_tiles, l, d, l_sel, window, scale_log2, D, DV, ROWS,
                TILE_N, NB, BLOCK_D, BLOCK_D2, BLOCK_DV, 0 if RING else PAGE, RING, 0, POOL_DTYPE,
                APART, PRECISION,
            )  # fmt: skip
    if PHASE == -1:
        sign = _meet(counter, sign, part, parts)
    if not SINGLE:
        if PHASE == -1 or PHASE == 1:
            for i in range(part, chunks * T, parts):
                store_candidates(
                    i % chunks, bg, i // chunks, length, SCAN_M, SCAN_L, POOLED, SPILL, TILE_MAX,
                    KEYS, BLOCKS, H, T, splits_cmp, splits_all, n_tiles, l, d, l_sel, chunks,
                    ROWS, HEADS, SPLITS_CMP, TILE_N, NB, CHUNK, N_SEL, N_PAD, N_INIT, N_LOCAL,
                )  # fmt: skip
        if PHASE == -1:
            sign = _meet(counter, sign, part, parts)
    if PHASE == -1 or PHASE == 2:
        for i in range(part, splits_sel * T, parts):
            attend_selected(
                i % splits_sel, bg, i // splits_sel, length,
                Q, KS, VS, TABLE, K_DESCALE, V_DESCALE, INDICES, GATES, OUT, SEL_O, SEL_M, SEL_L,
                SCAN_O, SCAN_M, SCAN_L, POOLED, SPILL, TILE_MAX, KEYS, BLOCKS, table_len,
                sel_capacity, G, H, T, splits_sel, share, splits_cmp, splits_all, n_tiles, l, d,
                l_sel, chunks, scale_log2, D, DV, ROWS, HEADS, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV,
                PAGE, PRECISION, True, SPLITS_CMP, TILE_N, NB, CHUNK, SINGLE, N, RANKED, N_SEL,
                N_PAD, N_INIT, N_LOCAL, False, False,
            )  # fmt: skip
    if PHASE == -1:
        sign = _meet(counter, sign, part, parts)
    if PHASE == -1 or PHASE == 3:
        for i in range(part, T * H, parts):
            merge_row(
                bg, i, SCAN_O, SCAN_M, SCAN_L, SEL_O, SEL_M, SEL_L, GATES, OUT, G, H, T,
                splits_cmp, splits_all, splits_sel, DV, ROWS, HEADS, BLOCK_DV, SPLITS_CMP,
                SPLITS_WIN, SPLITS_SEL, False,
            )  # fmt: skip
