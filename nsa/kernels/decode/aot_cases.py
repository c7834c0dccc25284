"""The decode kernels' configurations for ahead-of-time compilation."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from nsa.kernels.aot import AotCase
from nsa.kernels.decode.choose import _decode_score_kernel
from nsa.kernels.decode.scan import _decode_scan_kernel
from nsa.kernels.decode.selected import _decode_merge_kernel, _decode_selected_kernel
from nsa.kernels.decode.step import choice_sizes, scan_warps, selected_warps
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
    **{n: "*fp32" for n in ("PART_O", "PART_M", "PART_L", "POOLED", "SPILL", "TILE_MAX", "SCORES",
                            "SCAN_O", "SCAN_M", "SCAN_L", "SEL_O", "SEL_M", "SEL_L")},
    **{n: "*i32" for n in ("LENS", "TABLE", "INDICES")},
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
        # One sequence of 8k and of 128k tokens, many sequences, a million tokens.
        for n_tiles, splits in ((511 // block_n + 1, 8), (8191 // block_n + 1, 64), (32, 2),
                                (65535 // block_n + 1, 64)):  # fmt: skip
            choice = choice_sizes(n_tiles, nb, n_tiles * nb)
            tiling = dict(ROWS=rows, HEADS=16, TILE_N=block_n, NB=nb, CHUNK=choice["CHUNK"],
                          SPLITS=splits)  # fmt: skip
            selected = dict(BLOCK_N=block_n, PAGE=page, CHOOSE=True, N_SEL=16, N_PAD=16, N_INIT=1,
                            N_LOCAL=2)  # fmt: skip
            name, constexprs = f"{label}-{n_tiles}tiles", {**tiling, **choice, **dims, **selected}
            warps = selected_warps(choice["BLOCKS"])
            cases.append(_case(_decode_selected_kernel, name, dtype, constexprs, warps, 2))
        cases.append(_case(_decode_score_kernel, label, dtype, tiling, 4, 1))
        merge = dict(DV=dv, ROWS=rows, HEADS=16, BLOCK_DV=pad_dim(dv), SPLITS_CMP=64,
                     SPLITS_WIN=8, SPLITS_SEL=16)  # fmt: skip
        cases.append(_case(_decode_merge_kernel, label, dtype, merge, 4, 2))
    return cases
