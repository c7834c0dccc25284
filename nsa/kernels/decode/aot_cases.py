"""The decode kernels' configurations for ahead-of-time compilation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton.language as tl

from nsa.kernels.aot import AotCase
from nsa.kernels.decode.append import BLOCK_H, COUNTER, DEPTH, GATES, _decode_append_kernel
from nsa.kernels.decode.choose import _decode_candidates_kernel
from nsa.kernels.decode.emit import (
    BLOCK,
    COLUMNS,
    OUTER_ROWS,
    PARTS,
    _decode_emit_kernel,
    _decode_phi_inner_kernel,
    _decode_phi_outer_kernel,
    _decode_raw_kernel,
    phi_rows,
)
from nsa.kernels.decode.parallel import (
    CHOOSE_CHUNK,
    _parallel_choose_kernel,
    _parallel_merge_kernel,
    _parallel_probabilities_kernel,
    _parallel_spans_kernel,
    choose_warps,
    probability_keys,
)
from nsa.kernels.decode.scan import _decode_scan_kernel
from nsa.kernels.decode.selected import _decode_merge_kernel, _decode_selected_kernel
from nsa.kernels.decode.step import (
    choice_sizes,
    choice_warps,
    large_tiles,
    merge_warps,
    scan_tile,
    scan_warps,
    selected_warps,
)
from nsa.kernels.decode.team import _decode_team_kernel
from nsa.kernels.tiles import dot_size, small_shared, split_dim

# dtype, element bytes, D, Dv, (token, head) rows, page
_SHAPES = (
    ("bf16", 2, 128, 128, 16, 0),
    ("bf16", 2, 192, 128, 64, 64),
    ("fp16", 2, 256, 256, 16, 0),
    ("fp32", 4, 64, 64, 16, 0),
)
_FULL = (90, 120)
_STORED = ("KC", "VC", "KW", "VW", "KS", "VS", "K_RAW", "V_RAW", "K_SEL", "V_SEL", "K_WIN", "V_WIN",
           "K_CMP", "V_CMP")  # fmt: skip
_DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}

_POINTERS = {
    **{n: "*fp32" for n in ("PART_O", "PART_M", "PART_L", "POOLED", "SPILL", "TILE_MAX",
                            "SCAN_O", "SCAN_M", "SCAN_L", "SEL_O", "SEL_M", "SEL_L")},
    "FREQUENCIES": "*fp64", "K_PART": "*fp32", "V_PART": "*fp32",
    **{n: "*fp32" for n in ("LSE", "P", "EVERY", "PARTS")},
    **{n: "*i32" for n in ("LENS", "TABLE", "INDICES", "KEYS", "BLOCKS", "COUNTERS", "CHOSEN",
                           "SPANS", "CMP_SPANS", "WIN_SPANS", "K_DESCALE", "V_DESCALE")},
}  # fmt: skip


def _case(kernel: Any, label: str, dtype: str, constexprs: dict, warps: int, stages: int):
    types = {}
    for name in kernel.arg_names:
        if name == "scale_log2":
            types[name] = "fp32"
        elif name not in constexprs:
            short = name.islower() or name in ("G", "H", "HQ", "T")
            types[name] = _POINTERS.get(name, "i32" if short else f"*{dtype}")
    return AotCase(f"{kernel.__name__}-{label}", kernel, types, constexprs, warps, stages)


def aot_cases(arch: int) -> list[AotCase]:
    """What nsa_decode_triton would compile on `arch`, at representative shapes."""
    cases, early = [], arch >= 90
    for dtype, size, d, dv, rows, page in _SHAPES if arch in _FULL else _SHAPES[:1]:
        label = f"{dtype}-D{d}-Dv{dv}-R{rows}-P{page}"
        d1, d2 = split_dim(d)
        small = scan_tile(arch, size, d, dv, rows)
        dims = dict(D=d, DV=dv, BLOCK_D=d1, BLOCK_D2=d2, BLOCK_DV=dot_size(dv),
                    PRECISION="ieee" if size == 4 else "tf32")  # fmt: skip
        pool = tl.float32 if size == 4 else tl.float16
        for block_n in (small, 128) if large_tiles(size, d, dv, rows) else (small,):
            scan = dict(ROWS=rows, BLOCK_N=block_n, NB=block_n // 4, PAGE=page, RING=not page,
                        CMP_PAGE=page // 16, POOL_DTYPE=pool, APART=rows > 16,
                        EARLY=early)  # fmt: skip
            constexprs = {**dims, **scan}
            name = f"{label}-N{block_n}"
            cases.append(_case(_decode_scan_kernel, name, dtype, constexprs, scan_warps(rows), 2))
        # One sequence of 4k, of 32k and of a million tokens, and many of 8k: sizes of the choice.
        lengths = ((32768, 64, 1), (4096, 8, 1), (2**20, 64, 1), (8192, 8, 256))
        for length, splits, programs in lengths if d == 128 else lengths[:1]:
            n_tiles = length // 16 // small
            _, choice = choice_sizes(n_tiles, small // 4, length // 64, 16, programs)
            selected = dict(ROWS=rows, HEADS=16, TILE_N=small, NB=small // 4, SPLITS=splits,
                            N_SEL=16, N_INIT=1, N_LOCAL=2, BLOCK_N=small, PAGE=page,
                            CHOOSE=True, EARLY=early, **choice, **dims)  # fmt: skip
            warps = selected_warps(choice["N"], 16, d)
            for merge in (False, True) if length == 32768 else (programs > 1,):
                cases.append(_case(_decode_selected_kernel, f"{label}-S{length}-{merge}", dtype,
                                   {**selected, "MERGE": merge}, warps, 2))  # fmt: skip
            some = {n: selected[n] for n in _decode_candidates_kernel.arg_names if n in selected}
            few_and_many = (1, 4096) if d == 128 else (1,)
            for programs in () if choice["SINGLE"] else few_and_many:
                warps = choice_warps(choice["CHUNK"] * small // 4, programs, 132)
                cases.append(_case(_decode_candidates_kernel, f"{label}-S{length}-W{warps}", dtype,
                                   some, warps, 1))  # fmt: skip
        lengths = () if d != 128 or small_shared(arch) else (4096, 8192)[arch not in _FULL :]
        for length in lengths:
            n_tiles = length // 16 // small
            _, choice = choice_sizes(n_tiles, small // 4, length // 64, 16)
            team = dict(ROWS=rows, HEADS=16, TILE_N=small, BLOCK_N=small, NB=small // 4, PAGE=page,
                        RING=True, POOL_DTYPE=pool, APART=False, SPLITS_CMP=n_tiles, SPLITS_WIN=8,
                        SPLITS_SEL=16, N_SEL=16, N_INIT=1, N_LOCAL=2, PHASE=-1, **choice,
                        **dims)  # fmt: skip
            cases.append(_case(_decode_team_kernel, f"{label}-S{length}", dtype, team, 4, 2))
        if size == 2:
            append = dict(D=d, DV=dv, BLOCK_HALF=dot_size(d // 2), BLOCK_DV=dot_size(dv),
                          BLOCK_H=BLOCK_H, GATES=GATES, DEPTH=DEPTH, COUNTER=COUNTER)  # fmt: skip
            cases.append(_case(_decode_append_kernel, label, dtype, append, 1, 3))
            for kernel in (_decode_raw_kernel, _decode_emit_kernel) if d == 128 else ():
                cases.append(_case(kernel, label, dtype, dict(BLOCK=BLOCK), 4, 3))
            phi = dict(D=d, DV=dv, K_HIDDEN=d, V_HIDDEN=dv, COLUMNS=COLUMNS, PARTS=PARTS,
                       PRECISION=dims["PRECISION"], DTYPE=_DTYPES[dtype])  # fmt: skip
            for many in {16, phi_rows(64, max(d, dv))}:
                inner = dict(
                    ROWS=many, BLOCK_D=dot_size(d), BLOCK_DV=dot_size(dv), TOKENS=4, **phi
                )
                cases.append(_case(
                    _decode_phi_inner_kernel, f"{label}-{many}-rows", dtype, inner, 4, 3
                ))  # fmt: skip
            outer = dict(ROWS=OUTER_ROWS, BLOCK_K=dot_size(d), BLOCK_V=dot_size(dv), **phi)
            cases.append(_case(_decode_phi_outer_kernel, label, dtype, outer, 8, 3))
        for splits in ((64, 8, 16), (8, 8, 16)) if d == 128 else ((64, 8, 16),):
            merge = dict(DV=dv, ROWS=rows, HEADS=16, BLOCK_DV=dot_size(dv), SPLITS_CMP=splits[0],
                         SPLITS_WIN=splits[1], SPLITS_SEL=splits[2], EARLY=early)  # fmt: skip
            cases.append(_case(_decode_merge_kernel, f"{label}-{sum(splits)}", dtype, merge,
                               merge_warps(sum(splits), dot_size(dv)), 2))  # fmt: skip
        if size == 2 and not page:
            some = dict(D=d, WORLD=2, W=2, HEADS=16, BLOCK_N=probability_keys(size, d), BLOCK_D=d1,
                        BLOCK_D2=d2, PRECISION=dims["PRECISION"])  # fmt: skip
            cases.append(_case(_parallel_probabilities_kernel, label, dtype, some, 4, 1))
            some = dict(DV=dv, BLOCK_DV=dot_size(dv), WORLD=8, W=8)
            cases.append(_case(_parallel_merge_kernel, label, dtype, some, 1, 3))
    cases.append(_case(_parallel_spans_kernel, "G4", "bf16", dict(GROUPS=4), 1, 3))
    for blocks in (512, 1 << 14, 1 << 15):
        some = dict(l=32, d=16, l_sel=64, BLOCKS=blocks, CHUNK=min(blocks, CHOOSE_CHUNK), N_SEL=16,
                    N_PAD=16, N_INIT=1, N_LOCAL=2)  # fmt: skip
        cases.append(_case(_parallel_choose_kernel, f"{blocks}-blocks", "bf16", some,
                           choose_warps(blocks), 1))  # fmt: skip
    if arch in _FULL:  # the same of e4m3
        those = [c for c in cases if "-bf16-" in c.name and not c.types.keys().isdisjoint(_STORED)]
        for case in those:
            types = {
                name: "*fp8e4nv" if name in _STORED else
                "*fp32" if name in ("K_DESCALE", "V_DESCALE") else kind
                for name, kind in case.types.items()
            }
            spill = max(case.max_spill, 64)  # keys and values are there in both dtypes
            cases.append(replace(case, name=f"{case.name}-fp8", types=types, max_spill=spill))
    # Eight tokens of 16 heads, or four: beside them a tile of keys has the least room.
    for d, dv, rows in ((192, 128, 128), (256, 256, 64)) if arch in _FULL else ():
        (d1, d2), block_n = split_dim(d), scan_tile(arch, 2, d, dv, rows)
        c = dict(D=d, DV=dv, BLOCK_D=d1, BLOCK_D2=d2, BLOCK_DV=dv, PRECISION="tf32", ROWS=rows,
                 BLOCK_N=block_n, NB=block_n // 4, PAGE=0, RING=True, CMP_PAGE=0,
                 POOL_DTYPE=tl.float16, APART=True, EARLY=early)
        case = _case(_decode_scan_kernel, f"D{d}-R{rows}", "bf16", c, scan_warps(rows), 2)
        cases.append(replace(case, max_spill=48))  # on sm_120, since values are made finite
    if arch == 80:  # where ptxas leaves 128 heads of 256 on 4 warps 32 registers and 9 KB of stack
        c = dict(D=256, DV=256, BLOCK_D=256, BLOCK_D2=0, BLOCK_DV=256, PRECISION="tf32", ROWS=128,
                 HEADS=128, BLOCK_N=64, PAGE=0, CHOOSE=True, SPLITS=8, TILE_N=64, NB=16, N_SEL=16,
                 N_INIT=1, N_LOCAL=2, MERGE=False, EARLY=early,
                 **choice_sizes(8, 16, 128, 16)[1])  # fmt: skip
        warps = selected_warps(c["N"], 128, 256)
        cases.append(_case(_decode_selected_kernel, "D256-H128", "bf16", c, warps, 2))
    return cases
