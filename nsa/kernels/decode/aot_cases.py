"""The decode kernels' configurations for ahead-of-time compilation."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from nsa.kernels.aot import AotCase
from nsa.kernels.decode.choose import _decode_topn_kernel
from nsa.kernels.decode.scan import _decode_scan_kernel
from nsa.kernels.decode.selected import _decode_selected_kernel
from nsa.kernels.decode.step import choice_sizes, heads_at_once, scan_warps
from nsa.kernels.tiles import pad_dim, split_dim

# dtype, element bytes, D, Dv, (token, head) rows, page
_SHAPES = (
    ("bf16", 2, 128, 128, 16, 0),
    ("bf16", 2, 192, 128, 64, 64),
    ("fp16", 2, 256, 256, 16, 0),
    ("fp32", 4, 64, 64, 16, 0),
)
_FULL = (90, 120)

_POINTERS = {
    **{n: "*fp32" for n in ("PART_O", "PART_M", "PART_L", "POOLED", "SPILL", "TILE_MAX", "SCRATCH",
                            "SCAN_O", "SCAN_M", "SCAN_L", "MIX")},
    **{n: "*i32" for n in ("LENS", "TABLE", "INDICES", "ARRIVED")},
}  # fmt: skip


def _case(kernel: Any, label: str, dtype: str, constexprs: dict, warps: int, stages: int):
    types = {}
    for name in kernel.arg_names:
        if name == "scale_log2":
            types[name] = "fp32"
        elif name not in constexprs:
            short = name.islower() or name in ("G", "H", "T")
            types[name] = _POINTERS.get(name, "i32" if short else f"*{dtype}")
    return AotCase(f"{kernel.__name__}-{label}", kernel, types, constexprs, warps, stages)


def aot_cases(arch: int) -> list[AotCase]:
    """What nsa_decode_triton would compile on `arch`, at representative shapes."""
    cases = []
    for dtype, size, d, dv, rows, page in _SHAPES if arch in _FULL else _SHAPES[:1]:
        label = f"{dtype}-D{d}-Dv{dv}-R{rows}-P{page}"
        d1, d2 = split_dim(d)
        block_n = 32 if size == 4 else 64
        nb = block_n // 4
        dims = dict(D=d, DV=dv, BLOCK_D=d1, BLOCK_D2=d2, BLOCK_DV=pad_dim(dv),
                    PRECISION="ieee" if size == 4 else "tf32")  # fmt: skip
        scan = dict(ROWS=rows, BLOCK_N=block_n, NB=nb, PAGE=page, RING=not page,
                    POOL_DTYPE=tl.float32 if size == 4 else tl.float16)  # fmt: skip
        warps = scan_warps(rows)
        cases.append(_case(_decode_scan_kernel, label, dtype, {**dims, **scan}, warps, 2))
        # One sequence of 8k and of 128k tokens, many sequences.
        for n_tiles, splits in ((511 // block_n + 1, 8), (8191 // block_n + 1, 64), (32, 2)):
            choice = dict(ROWS=rows, HEADS=16, TILE_N=block_n, NB=nb, N_SEL=16, N_PAD=16, N_INIT=1,
                          N_LOCAL=2, **choice_sizes(n_tiles, nb, n_tiles * nb, 16))  # fmt: skip
            selected = dict(
                BLOCK_N=block_n, PAGE=page, CHOOSE=True, SPLITS_CMP=splits, SPLITS_WIN=8,
                SPLITS_SEL=16, SCAN_HEADS=heads_at_once(max(splits, 8), pad_dim(dv), 16),
                SEL_HEADS=heads_at_once(16, pad_dim(dv), 16),
            )  # fmt: skip
            name = f"{label}-{n_tiles}tiles"
            constexprs = {**choice, **dims, **selected}
            cases.append(_case(_decode_selected_kernel, name, dtype, constexprs, 4, 2))
    choice = dict(ROWS=16, HEADS=16, SPLITS=64, TILE_N=64, NB=16, N_SEL=16, N_PAD=16, N_INIT=1,
                  N_LOCAL=2, **choice_sizes(1024, 16, 16384, 16))  # fmt: skip
    cases.append(_case(_decode_topn_kernel, "16384", "bf16", choice, 8, 1))
    return cases
