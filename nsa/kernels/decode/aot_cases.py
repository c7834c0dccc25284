"""The decode kernels' configurations for ahead-of-time compilation."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from nsa.kernels.aot import AotCase
from nsa.kernels.decode import kernels
from nsa.kernels.decode.step import scan_warps
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
        dims = dict(D=d, DV=dv, BLOCK_D=d1, BLOCK_D2=d2, BLOCK_DV=pad_dim(dv),
                    PRECISION="ieee" if size == 4 else "tf32")  # fmt: skip
        block_n = 32 if size == 4 else 64
        pool = tl.float32 if size == 4 else tl.float16
        scan = dict(ROWS=rows, BLOCK_N=block_n, NB=block_n // 4, PAGE=page, RING=not page,
                    POOL_DTYPE=pool)  # fmt: skip
        warps = scan_warps(rows)
        cases.append(_case(kernels._decode_scan_kernel, label, dtype, {**dims, **scan}, warps, 2))
        chosen = dict(HEADS=16, BLOCK_N=block_n, N_SEL=16, PAGE=page)
        cases.append(
            _case(kernels._decode_selected_kernel, label, dtype, {**dims, **chosen}, 4, 2)
        )
        merge = dict(DV=dv, ROWS=rows, HEADS=16, BLOCK_DV=pad_dim(dv), SPLITS_CMP=64,
                     SPLITS_WIN=8, SPLITS_SEL=8)  # fmt: skip
        cases.append(_case(kernels._decode_merge_kernel, label, dtype, merge, 4, 2))
    for blocks in (128, 2048):
        topn = dict(ROWS=16, HEADS=16, SPLITS=64, BLOCK_N=64, NB=16, CHUNK=64, BLOCKS=blocks,
                    N_SEL=16, N_PAD=16, N_INIT=1, N_LOCAL=2)  # fmt: skip
        cases.append(
            _case(kernels._decode_topn_kernel, f"{blocks}", "bf16", topn,
                  4 if blocks <= 256 else 8, 1)
        )  # fmt: skip
    return cases
