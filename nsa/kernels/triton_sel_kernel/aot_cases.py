"""The selection kernels' configurations for ahead-of-time compilation."""

from __future__ import annotations

from typing import Any

from nsa.kernels.aot import AotCase
from nsa.kernels.triton_sel_kernel import sel_bwd, sel_fwd, spans, tiles

# dtype, element bytes, D, Dv, heads: the matrix's corners and the largest head sizes; more heads
# than 16 (the last two) matter to the backward, whose tiles must not grow with them
_SHAPES = (
    ("bf16", 2, 64, 64, 4),
    ("bf16", 2, 128, 128, 8),
    ("fp16", 2, 192, 128, 16),
    ("bf16", 2, 256, 256, 16),
    ("fp32", 4, 128, 128, 8),
    ("fp32", 4, 256, 256, 16),
    ("bf16", 2, 256, 256, 64),
    ("fp32", 4, 256, 256, 64),
)

# Architectures that stand for their tile column; the others compile the shapes marked worst, but
# 86 and 89, which have the tiles, the memory and the tensor cores' instructions of 120, one shape.
_FULL = (90, 120)
_WORST = {("bf16", 128), ("bf16", 256), ("fp32", 256)}

_INTS = {n: "i32" for n in ("S", "G", "H", "L", "n", "n_tiles", "tiles_per_group", "n_keys")}
_INTS |= {f"stride_{x}{axis}": "i32" for x in "kv" for axis in "bgl"}
_FIXED = {
    **_INTS, "chunk": "i32", "scale": "fp32", "scale_log2": "fp32", "limit": "i32",
    "n_entries": "i32", "STARTS": "*i32", "CUM": "*i32", "CU": "*i32",
    "ENTRIES": "*i32", "KEYS": "*i32", "MASKS": "*i64",
    "TILE_BEGIN": "*i64", "ITEM_BEGIN": "*i64", "ITEM_TILE": "*i64", "SLOT_BEGIN": "*i64",
    "LSE": "*fp32", "DLSE": "*fp32", "DELTA": "*fp32", "PART_O": "*fp32", "PART_LSE": "*fp32",
    "PART": "*fp32", "PART_DK": "*fp32", "PART_DV": "*fp32",
}  # fmt: skip


def _case(
    kernel: Any, label: str, dtype: str, constexprs: dict, ranges: str = "*i32", **options: Any
) -> AotCase:  # fmt: skip
    given = _FIXED | {"RANGES": ranges, "SPANS": ranges}
    types = {n: given.get(n, f"*{dtype}") for n in kernel.arg_names if n not in constexprs}
    return AotCase(f"{kernel.__name__}-{label}", kernel, types, constexprs, **options)


def aot_cases(arch: int) -> list[AotCase]:
    """What the launchers would compile on `arch`, at representative shapes."""
    cases = []
    for dtype, size, d, dv, h in _SHAPES:
        if arch not in _FULL and (dtype, d) not in _WORST:
            continue
        if arch in (86, 89) and (dtype, d) != ("bf16", 128):
            continue
        if h > 16 and arch not in _FULL:
            continue
        label = f"{dtype}-D{d}-Dv{dv}-H{h}"
        precision = "ieee" if size == 4 else "tf32"
        fwd = tiles.fwd_tiles(arch, d, dv, size, 1024, programs=1024, n_sm=132)
        by_range = tiles.fwd_tiles(
            arch, d, dv, size, 1024, programs=1024, n_sm=132, ranges=True
        )
        common = dict(D=d, DV=dv, PRECISION=precision)
        block = lambda t: dict(BLOCK_L=t.block_l, BLOCK_D=t.block_d, BLOCK_DV=t.block_dv)
        launch = lambda t: dict(num_warps=t.num_warps, num_stages=t.num_stages)
        rows = dict(ROWS=tiles.head_tile(h, d, dv, size, group=True))
        forward = {**common, **block(fwd), **rows, "KEEP_LSE": True}
        if h <= 16:
            cases.append(
                _case(
                    sel_fwd._sel_attn_fwd_ranges_kernel, label, dtype,
                    {**forward, **block(by_range), "NR": 16, "MANY": False, "SPLITS": 1},
                    **launch(by_range),
                )  # fmt: skip
            )
        if (dtype, d) == ("bf16", 128):  # one range per row, read from 64 bits
            cases.append(
                _case(
                    sel_fwd._sel_attn_fwd_dense_kernel, label, dtype,
                    {**forward, "HAS_SPANS": True, "SPLITS": 1}, "*i64", **launch(fwd),
                    max_spill=48,  # on sm_100, where the loop reads four words of them again
                )  # fmt: skip
            )
        if d == dv != 64 and h <= 16:  # few rows take the largest tiles
            few = tiles.fwd_tiles(arch, d, dv, size, 1024, programs=64, n_sm=132)
            cases.append(
                _case(
                    sel_fwd._sel_attn_fwd_dense_group_kernel, label, dtype,
                    {**forward, **block(few), "HAS_SPANS": False, "SPLITS": 8}, **launch(few),
                )  # fmt: skip
            )
        if d == 64:
            cases += [
                _case(kernel, label, dtype, {**forward, "SPLITS": 1}, **launch(fwd))
                for kernel in (
                    sel_fwd._sel_attn_fwd_varlen_group_kernel,
                    sel_fwd._sel_attn_fwd_varlen_kernel,
                )
            ]
        dq = tiles.dq_tiles(arch, d, dv, size)
        backward = {**common, **block(dq), **rows, "NR": 16}
        kinds = [(label, {"DLSE": None})]
        if (dtype, d) == ("bf16", 128):
            kinds.append((f"{label}-dlse", {}))
        cases += [
            _case(sel_bwd._sel_attn_bwd_dq_kernel, name, dtype, backward | more, **launch(dq))
            for name, more in kinds
        ]
        kv = tiles.dkdv_tiles(arch, d, dv, size)
        cases.append(
            _case(
                sel_bwd._sel_attn_bwd_dkdv_kernel, label, dtype,
                {**common, **block(kv), "TILE": tiles.KEY_TILE, "HEADS": tiles.padded_heads(h),
                 "ROWS": kv.rows}, **launch(kv),
            )  # fmt: skip
        )
    cases += [
        _case(spans._sel_spans_kernel, "n64", "i32", {"NR": 64}, num_warps=1),
        _case(spans._sel_spans_kernel, "n64-i64", "i32", {"NR": 64}, "*i64", num_warps=1),
        _case(
            spans._sel_key_masks_kernel, "all", "i32", {"TILE": tiles.KEY_TILE, "BLOCK": 128}
        ),
        _case(
            sel_fwd._sel_attn_merge_kernel, "D256", "bf16",
            {"DV": 256, "BLOCK_DV": 256, "SPLITS": 64, "KEEP_LSE": True},
        ),  # fmt: skip
        _case(
            sel_bwd._sel_attn_bwd_sum_kernel, "D128", "bf16",
            {"DIM": 128, "TILE": tiles.KEY_TILE, "BLOCK": 1024},
        ),  # fmt: skip
    ]
    return cases
