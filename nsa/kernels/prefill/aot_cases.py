"""The prefill kernels' configurations for ahead-of-time compilation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nsa.kernels.aot import AotCase
from nsa.kernels.prefill import (
    ascending,
    block_attn_bwd,
    block_attn_fwd,
    block_attn_outer,
    block_lists,
    block_select,
    combine,
    delta,
    limits,
    marked_keys,
    span_bwd,
    span_bwd_fused,
    span_fwd,
    sums,
    tile_blocks,
    turn_split,
    union_attn,
    union_lists,
)
from nsa.kernels.prefill.span_kinds import COMPRESSED, SLIDING, Span
from nsa.kernels.tiles import dot_size, split_dim

# dtype, element bytes, D, Dv, query heads per group
_SHAPES = (
    ("bf16", 2, 128, 128, 16),
    ("bf16", 2, 192, 128, 16),
    ("bf16", 2, 256, 256, 16),
    ("fp16", 2, 64, 64, 4),
    ("fp32", 4, 128, 128, 4),
)
# Architectures with the tiles of another one compile fewer of them: sm_89 and, but for fp32, sm_80
# have those of sm_86 and at least its shared memory, sm_86 those of sm_120, sm_100 those of sm_90.
_FEWER = {
    80: {("bf16", 128), ("fp32", 128)}, 86: {("bf16", 128)}, 89: {("bf16", 128)},
    100: {("bf16", 128)},
}  # fmt: skip

_POINTERS = {
    "LSE": "*fp32", "DLSE": "*fp32", "LSE_CMP": "*fp32", "LSE_SEL": "*fp32", "LSE_WIN": "*fp32",
    "LSES": "*fp32", "DQ": "*fp32", "DELTA": "*fp32", "DELTAS": "*fp32", "SCORES": "*fp32",
    "PART": "*fp32", "OUT_K": "*fp32", "OUT_V": "*fp32", "CU_Q": "*i32", "CU_K": "*i32",
    "CU_SEQLENS": "*i32", "SEQ_BEGIN": "*i32", "BLOCK_INDICES": "*i32", "ORDER": "*i32",
    "CHUNK_TILE": "*i32", "CHUNK_BEGIN": "*i64", "CHUNK_END": "*i64", "TILE_CHUNKS": "*i64",
    "BOUNDS": "*i64", "ROWS": "*i32", "UNITS": "*i32", "BITS": "*i32", "PIECES": "*i32",
    "RANKS": "*i64", "X": "*fp32", "ENTRIES": "*i64", "STATE": "*i32", "WORK": "*i32",
    "COUNTS": "*i32", "ORDERED": "*i32", "SEQUENCE": "*i32", "FIRST_TILE": "*i32",
    "POSITIONS": "*i64",
    "AGAIN": "*i32", "PARTS": "*fp16", "PARTS_LSE": "*fp32", "PARTS_TOP": "*fp32",
    "REACH": "*fp32", "SIZES": "*fp32", "MORE": "*fp32", "SCALES": "*fp32", "SUMS": "*fp16",
    "SUM_K": "*fp32", "SUM_V": "*fp32",
    "TOP": "*fp32", "TOTAL": "*fp32", "REST": "*i32", "LISTED": "*i32", "WHOLE": "*i32",
    "TODO": "*i32", "LOST": "*i32", "ANY_NEGATIVE": "*i32",
}  # fmt: skip
_INTS = {
    "SQ", "SK", "S", "S_KV", "G", "H", "q_start", "k_rows", "span_a", "span_b", "n_sel",
    "block_size", "per_seq", "n_rows", "slab_begin", "slab_len", "n_ld", "l", "d", "l_sel",
    "T", "share", "first", "n_tiles", "slab", "n_chunks", "halvings",
    "tokens", "words", "pairs", "pieces", "per_group", "numbers",
    "k_numbers", "v_numbers", "columns", "bits",
}  # fmt: skip


def _type(name: str, dtype: str) -> str:
    if name in ("scale", "scale_log2"):
        return "fp32"
    return "i32" if name in _INTS else _POINTERS.get(name, f"*{dtype}")


def _descriptors(kernel: Any, dtype: str, c: dict) -> dict[str, str]:
    """Types of the tile descriptors that a kernel with TMA takes."""
    rest = c["BLOCK_D2"] or c["BLOCK_D"]
    if kernel is span_bwd._span_bwd_dkdv_kernel:  # it streams queries past its keys
        rows = f"{c['BLOCK_Q']}, {c['HEADS']}, "
        names = ("QD", "QD2", "DOD")
    else:
        rows, names = f"{c['BLOCK_N']}, ", ("KD", "KD2", "VD")
    widths = (c["BLOCK_D"], rest, c.get("BLOCK_DV"))
    return {
        n: f"tensordesc<{dtype}[{rows}{width}]>"
        for n, width in zip(names, widths, strict=True)
        if n in kernel.arg_names
    }


def _case(kernel: Any, label: str, dtype: str, constexprs: dict, tiles: tuple) -> AotCase:
    if "SIGNED" in kernel.arg_names:  # as in prefill's backward, which does more
        constexprs = {**constexprs, "SIGNED": True}
    types = {n: _type(n, dtype) for n in kernel.arg_names if n not in constexprs}
    if constexprs.get("TMA"):
        types |= _descriptors(kernel, dtype, constexprs)
    if kernel in (block_select._block_topn_kernel, block_lists._pair_tiles_kernel):
        types["OUT"] = "*i32"
    # Edge tiles are loaded without a pipeline and may push registers to the stack for a moment; the
    # loops over whole tiles are what counts. dK/dV at D = 128 keeps some 300 bytes there: of the
    # tiles that were timed on an H200 these were the fastest all the same.
    limit = 136 if constexprs.get("D", 0) <= 128 else 208
    if kernel is span_bwd._span_bwd_dkdv_kernel:  # masks of dS and signs of gates
        limit = 336 if constexprs["D"] == 128 else max(limit, 168)
    # Adding dQ: addresses of gathered rows, which each lane holds; with signs of gates 88 more.
    if constexprs.get("ADD"):
        limit = 224
    return AotCase(
        f"{kernel.__name__}-{label}", kernel, types, constexprs, num_warps=tiles[0],
        num_stages=tiles[1], max_spill=limit,
    )  # fmt: skip


def _fused_case(
    label: str, dtype: str, d: int, dv: int, h: int, varlen: bool, tiles: tuple
) -> AotCase:
    """The fused backward of compressed keys: its gradients are fp32 where programs add to them."""
    kernel = span_bwd_fused._span_bwd_fused_kernel
    rows, block_n, warps, stages = tiles
    d1, d2 = split_dim(d)
    c = dict(D=d, DV=dv, VARLEN=varlen, BLOCK_Q=rows // h, HEADS=h, BLOCK_N=block_n, BLOCK_D=d1,
             BLOCK_D2=d2, SPLIT=not varlen, TMA_ADD=True, SIGNED=True)  # fmt: skip
    tile = lambda element, *width: f"tensordesc<{element}{[rows // h, h, *width]}>"
    types = {n: _type(n, dtype) for n in kernel.arg_names if n not in c}
    types |= {"QD": tile(dtype, d1), "QD2": tile(dtype, d2 or d1), "DOD": tile(dtype, dv),
              "DQD": tile("fp32", d1), "DQD2": tile("fp32", d2 or d1), "LSED": tile("fp32"),
              "DELTAD": tile("fp32")}  # fmt: skip
    if not varlen:
        types |= {"DK": "*fp32", "DV_OUT": "*fp32"}
    # What is kept on the stack: addresses of K and V for the tensor cores, read again in each step,
    # and the accumulators for a moment between the loops.
    return AotCase(f"{kernel.__name__}-{label}", kernel, types, c, warps, stages, max_spill=448)


def _gluon_cases() -> list[AotCase]:
    """The kernels for Hopper: both spans, block scores, selection, the backwards with small and
    large groups."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    from nsa.kernels.prefill import (
        block_attn_bwd_hopper,
        block_attn_ends,
        block_attn_fwd_hopper,
        block_attn_keys_hopper,
        block_score_hopper,
        key_sums,
        span_bwd_hopper,
        span_fwd_hopper,
    )

    def tile(element: str, *shape: int) -> str:
        layout = NVMMASharedLayout(128, 32 if element == "fp32" else 16, rank=len(shape))
        return f"tensordesc<{element}{list(shape)},{layout!r}>"

    def case(
        kernel: Any, label: str, types: dict, c: dict, warps: int, spill: int, registers: int = 168
    ) -> AotCase:  # fmt: skip
        types = {n: types.get(n) or _type(n, "bf16") for n in kernel.arg_names if n not in c}
        return AotCase(f"{kernel.__name__}-{label}", kernel, types, c, warps, max_spill=spill,
                       gluon=True, max_registers=registers)  # fmt: skip

    # Limits of the stack hold for ptxas 12.8 (triton 3.6, 3.7) and 13.4 (3.9), which takes more.
    cases = []
    of_scores = dict(SUMS="*u8", slab_rows="i32", room="i32")
    kernel = span_fwd_hopper._span_fwd_hopper_kernel
    launch = span_fwd_hopper.WARPS, 112, span_fwd_hopper.START_REGISTERS
    for span, heads, dim in (
        (Span(COMPRESSED, 32, 16), 16, 128), (Span(SLIDING, 512), 16, 128),
        (Span(SLIDING, 100), 4, 64),
    ):  # fmt: skip
        queries = span_fwd_hopper.ROWS // heads
        tiles = span_fwd_hopper.hopper_tiles(span, queries)
        c = dict(TILES=(tiles.compiled,), VARLEN=heads == 4, SCORED=span.mode == COMPRESSED,
                 STAGES=tiles.stages, G=4)  # fmt: skip
        rows, keys = tile("bf16", queries, heads, dim), tile("bf16", 1, tiles.keys, dim)
        few = tile("bf16", 1, tiles.narrow, dim) if tiles.narrow else keys
        types = dict(QD=rows, OD=rows, KD=keys, VD=keys, KN=few, VN=few, BATCH="i32", ITEMS="i32",
                     a="i32", **of_scores)  # fmt: skip
        one = case(kernel, f"{span.mode}-H{heads}-D{dim}", types, c, *launch)
        cases.append(replace(one, parting="barrier.sync"))
    kernel = span_fwd_hopper._span_pair_fwd_hopper_kernel
    compressed = span_fwd_hopper.hopper_tiles(Span(COMPRESSED, 32, 16), 8)
    window = span_fwd_hopper.hopper_tiles(Span(SLIDING, 512), 8)
    rows, keys = tile("bf16", 8, 16, 128), tile("bf16", 1, compressed.keys, 128)
    wide, few = tile("bf16", 1, window.keys, 128), tile("bf16", 1, window.narrow, 128)
    types = dict(QD=rows, OD=rows, KD=keys, VD=keys, KW=wide, VW=wide, KN=few, VN=few, BATCH="i32",
                 ITEMS="i32", SW="i32", win_start="i32", window="i32", **of_scores)  # fmt: skip
    for varlen, scored in ((False, False), (False, True), (True, False)):
        c = dict(TILES=(compressed.compiled, window.compiled), VARLEN=varlen, SCORED=scored,
                 STAGES=compressed.stages, G=4)  # fmt: skip
        # Scalars, where one span ends and the other begins.
        one = case(kernel, f"H16-D128-{varlen}-{scored}", types, c, *launch)
        cases.append(replace(one, parting="barrier.sync", max_spill=136))
    module = block_score_hopper
    kernel = module._block_score_hopper_kernel
    for heads, dim, ratio in ((16, 128, 4), (16, 128, 2), (8, 64, 4), (1, 128, 8)):
        queries, keys = module.tile(heads)
        c = dict(VARLEN=heads == 8, STAGES=module.STAGES, G=4, l=32, d=16,
                 l_sel=16 * ratio)  # fmt: skip
        types = dict(QD=tile("bf16", queries, heads, dim), KD=tile("bf16", 1, keys, dim),
                     LSE="*fp32", SCORES="*fp32", BATCH="i32", ITEMS="i32", slab_begin="i32",
                     slab_len="i32", n_ld="i32")  # fmt: skip
        label = f"H{heads}-D{dim}-R{ratio}"
        # What spills are scalars of the next work item.
        one = case(kernel, label, types, c, module.WARPS, 96, module.START_REGISTERS)
        cases.append(replace(one, parting="barrier.sync"))
    kernel = span_bwd_hopper._span_bwd_hopper_kernel
    width = span_bwd_hopper.WIDTH
    for mode, heads, signed in (
        (COMPRESSED, 4, True), (COMPRESSED, 16, True), (COMPRESSED, 16, False), (SLIDING, 4, True),
        (SLIDING, 16, True), (SLIDING, 16, False),
    ):  # fmt: skip
        block_q = span_bwd_hopper.ROWS // heads
        split = mode == COMPRESSED
        c = dict(MODE=mode, VARLEN=heads == 4, BLOCK_Q=block_q, HEADS=heads, WIDTH=width,
                 KEYS=span_bwd_hopper.KEYS, STAGES=span_bwd_hopper.STAGES, SPLIT=split,
                 SIGNED=signed)  # fmt: skip
        rows = tile("bf16", block_q, heads, width)
        stats = f"tensordesc<fp32[{span_bwd_hopper.ROWS}],{NVMMASharedLayout(0, 32, rank=1)!r}>"
        types = dict(QD=rows, DOD=rows, DQD=tile("fp32", block_q, heads, width), STATS=stats,
                     STATS_ROWS="*fp32", total_q="i32")  # fmt: skip
        if split:
            types |= {"DK": "*fp32", "DV_OUT": "*fp32"}
        # dK, dV and two tiles of scores leave no register for what the ends of a walk need.
        label = f"{mode}-H{heads}-{'signed' if signed else 'alone'}"
        cases.append(case(kernel, label, types, c, span_bwd_hopper.WARPS, 192))
    rows = dict(HEADS=16, BLOCK=1024, SIGNED=True)
    types = dict(LSE="*fp32", DELTA="*fp32", OUT="*fp32", rows="i32", HQ="i32")
    kernel = span_bwd_hopper._row_stats_kernel
    cases.append(AotCase(kernel.__name__, kernel, types, rows))
    module = block_attn_bwd_hopper
    for heads, halves, signed in (
        (4, True, True), (16, True, True), (16, False, True), (16, True, False)
    ):  # fmt: skip
        rows, share = max(heads, module.SWIZZLE_ROWS), module.piece_pairs(heads, halves)
        per_chunk = block_lists.CHUNK // share
        c = dict(VARLEN=heads == 4, HEADS=heads, ROWS=module.ROWS, KEYS=module.KEYS,
                 WIDTH=module.WIDTH, STAGES=module.STAGES, SHARE=share, PER_CHUNK=per_chunk,
                 SIGNED=signed)  # fmt: skip
        dq = tile("fp16", 1, rows, 64) if halves else tile("fp32", 1, rows, 32)
        types = dict(QD=tile("bf16", 1, rows, 64), DOD=tile("bf16", 1, rows, 64), DQD=dq)
        kernel = module._block_attn_bwd_hopper_kernel
        label = f"H{heads}-{'halves' if halves else 'fp32'}-{'signed' if signed else 'alone'}"
        cases.append(case(kernel, label, types, c, module.WARPS, 40, module.START_REGISTERS))
    rows = dict(D=128, ROWS=sums.SIZE // 128, HEADS=16, BOTH=True)
    cases += [
        _case(sums._round_halves_kernel, "D128", "bf16", rows, (4, 2)),
        _case(sums._sizes_kernel, "all", "bf16", dict(SIZE=sums.SIZE), (4, 2)),
        _case(sums._half_scales_kernel, "all", "bf16", dict(SIZE=sums.SIZE), (4, 2)),
    ]
    module = block_attn_fwd_hopper
    kernel = module._block_attn_fwd_hopper_kernel
    for dim, stages in module.STAGES.items():
        c = dict(VARLEN=dim == 64, HEADS=module.HEADS, ROOM=tile_blocks.room(module.WARPS, 16),
                 STAGES=stages, OTHERS=2 if dim == 128 else 0, KEEP=True, SOME=dim == 128,
                 EIGHTS=1 + (dim == 128), PART=16)
        types = dict(KD=tile("bf16", module.KEYS, dim), VD=tile("bf16", module.KEYS, dim))
        one = case(kernel, f"D{dim}", types, c, module.WARPS, 40, module.START_REGISTERS)
        cases.append(replace(one, parting="barrier.sync"))
    costs = dict(READ=tile_blocks.READ, PAIR=tile_blocks.PAIR, DENSE=tile_blocks.DENSE,
                 REST_PAIR=tile_blocks.REST_PAIR, TOGETHER=tile_blocks.TOGETHER)  # fmt: skip
    # Heads of a group, 0 for lists without a rest, and blocks of a query: few, usual, most.
    for heads, n_pad in [(0, 1), (16, 16), (0, 128), (4, 64)]:
        queries = tile_blocks.queries_of(heads or 16)
        c = dict(VARLEN=heads > 0, QUERIES=queries, N_PAD=n_pad, PARTS=1, KEYS=module.KEYS,
                 LEAST=tile_blocks.LEAST[heads] if heads else 1, BOTH=heads > 8,
                 **costs)  # fmt: skip
        launch = (tile_blocks.warps_of(queries, n_pad), 2)
        name = f"H{heads}-{n_pad}"
        cases.append(_case(tile_blocks._tile_blocks_kernel, name, "bf16", c, launch))
    module = block_attn_keys_hopper
    columns = dict(COLUMNS=key_sums.COLUMNS)
    search = dict(**columns, SLICE=key_sums.SLICE)
    cases += [
        _case(key_sums._column_scales_kernel, "all", "bf16", columns, (4, 2)),
        _case(key_sums._column_sizes_kernel, "all", "bf16", search, (4, 2)),
    ]
    ends = block_attn_ends
    queries = tile_blocks.queries_of(4)
    part = dict(TILE=queries, QUERIES=queries, HEADS=4, D=module.WIDTH)
    c = dict(VARLEN=False, ROOM=tile_blocks.room(queries, 16),
             KEYS=ends.KEYS, PRECISION="tf32", **part)  # fmt: skip
    one = _case(ends._block_attn_begin_kernel, "D128", "bf16", c, (ends.WARPS, ends.STAGES))
    one = replace(one, max_registers=ends.REGISTERS)
    blocks = f"tensordesc<bf16[{ends.KEYS}, {module.WIDTH}]>"
    cases.append(replace(one, types={**one.types, "KD": blocks, "VD": blocks}, max_spill=0))
    c = dict(OTHERS=1, KEEP=False, **part)
    cases.append(_case(ends._block_attn_end_kernel, "D128", "bf16", c, (ends.WARPS, 2)))
    for heads in module.PAIRS:
        c = dict(VARLEN=heads == 8, HEADS=heads, ROWS=module.ROWS, KEYS=module.KEYS,
                 WIDTH=module.WIDTH)  # fmt: skip
        rows = (1, max(heads, 8), 64)
        types = dict(QD=tile("bf16", *rows), SUMSD=tile("fp16", *rows))
        cases.append(
            case(
                module._block_attn_keys_hopper_kernel, f"H{heads}", types, c, module.WARPS, 0,
                module.START_REGISTERS,
            )  # fmt: skip
        )
    return cases


def _wide_cases(arch: int) -> list[AotCase]:
    """dK and dV with as many heads as limits.most_heads lets in, where memory is scarcest."""
    if arch != 120:
        return []
    h = limits.most_heads(arch, 128, 128, 2)
    wide = dict(D=128, DV=128, VARLEN=False, HEADS=h, BLOCK_D=128, BLOCK_D2=0, BLOCK_DV=128,
                PRECISION="tf32")  # fmt: skip
    rows, block_n, *launch = span_bwd.dkdv_tiles(arch, 128, 128, 2)
    tile = dict(MODE=COMPRESSED, BLOCK_Q=max(rows // h, 1), BLOCK_N=block_n, TMA=True)
    span = _case(
        span_bwd._span_bwd_dkdv_kernel, f"bf16-D128-H{h}", "bf16", {**wide, **tile}, launch
    )
    return [span, _many_heads_case(arch, 128, h)]


def _many_heads_case(arch: int, d: int, h: int) -> AotCase:
    """dK and dV of selection, in two passes."""
    rows, *launch = block_attn_bwd.dkdv_tiles(arch, d, 128, 2, h)
    d1, d2 = split_dim(d)
    tile = dict(BLOCK_N=block_attn_bwd.key_tile(64, d, 2, h, arch), PAIRS=max(rows // h, 1),
                ADD=False, CHUNK=block_lists.CHUNK, D=d, DV=128, VARLEN=False, HEADS=h, BLOCK_D=d1,
                BLOCK_D2=d2, BLOCK_DV=128, PRECISION="tf32")  # fmt: skip
    kernel = block_attn_bwd._block_attn_bwd_dkdv_kernel
    return _case(kernel, f"bf16-D{d}-H{h}", "bf16", tile, launch)


def aot_cases(arch: int) -> list[AotCase]:
    """What the launchers would compile on `arch`, at representative shapes."""
    cases = []
    for dtype, size, d, dv, h in _SHAPES:
        if (dtype, d) not in _FEWER.get(arch, {(dtype, d)}):
            continue
        label = f"{dtype}-D{d}-Dv{dv}-H{h}"
        d1, d2 = split_dim(d)
        dims = dict(D=d, BLOCK_D=d1, BLOCK_D2=d2, PRECISION="ieee" if size == 4 else "tf32")
        wide = {**dims, "DV": dv, "BLOCK_DV": dot_size(dv)}
        bwd = wide
        tma = arch >= 90 and size == 2
        # Windows have the tiles of compressed attention, and so less to tell in fp32.
        for mode in (COMPRESSED, SLIDING) if d == 128 and size == 2 else (COMPRESSED,):
            name = f"{label}-{'window' if mode == SLIDING else 'cmp'}"
            span = dict(MODE=mode, VARLEN=mode == SLIDING, HEADS=h)
            for kernel, tiles, extra in (
                (span_fwd._span_fwd_kernel, span_fwd.fwd_tiles, wide),
                (span_bwd._span_bwd_dq_kernel, span_bwd.dq_tiles, {**bwd, "ACCUMULATE": True}),
                (span_bwd._span_bwd_dkdv_kernel, span_bwd.dkdv_tiles, bwd),
            ):
                rows, block_n, *launch = tiles(arch, d, dv, size)
                tile = dict(BLOCK_Q=max(rows // h, 1), BLOCK_N=block_n, TMA=tma)
                cases.append(_case(kernel, name, dtype, {**span, **extra, **tile}, launch))
            fused = span_bwd_fused.fused_tiles(arch, d, dv) if size == 2 else None
            if fused:
                varlen = mode == SLIDING
                more = f"{label}-{'whole' if varlen else 'split'}"
                cases.append(_fused_case(more, dtype, d, dv, h, varlen, fused))
        # The type of the pooling's operands is a keyword of the kernel, not one of its tensors.
        pool = {"POOL_DTYPE": _triton_type("fp32" if size == 4 else "fp16")}
        for keys in (512, 4096) if d == 128 and size == 2 else (4096,):
            rows, block_n, *launch = block_select.score_tiles(arch, d, size, keys)
            block_n = max(block_n, 32)
            tile = dict(
                VARLEN=False, BLOCK_Q=max(rows // h, 1), HEADS=h, BLOCK_N=block_n, NB=block_n // 4,
                TMA=tma,
            )  # fmt: skip
            c, kernel = {**dims, **tile, **pool}, block_select._block_score_kernel
            cases.append(_case(kernel, f"{label}-{keys}", dtype, c, launch))
        queries, heads = union_lists.tile_shape(arch, h, size)
        block_n, *launch = block_attn_fwd.fwd_tiles(arch, d, dv, size)
        one = dict(VARLEN=False, HEADS=max(h, 16), BLOCK_N=block_n, N_PAD=16, TMA=tma,
                   OWN_N=min(block_n, 32), UNION=queries,
                   PIECE=min(block_attn_fwd.PIECE, max(queries, 1)))  # fmt: skip
        cases.append(
            _case(block_attn_fwd._block_attn_fwd_kernel, label, dtype, {**wide, **one}, launch)
        )
        block_n, *launch = block_attn_bwd.dq_tiles(arch, d, dv, size)
        more = dict(
            VARLEN=True, HEADS=max(h, 16), BLOCK_N=block_n, ACCUMULATE=True, N_PAD=16, TMA=tma,
            OWN_N=min(block_n, 32), UNION=0,
        )  # fmt: skip
        union_dq = union_attn.dq_tiles(arch, d, dv) if queries else None
        if union_dq:
            more["UNION"] = queries
        cases.append(
            _case(block_attn_bwd._block_attn_bwd_dq_kernel, label, dtype, {**bwd, **more}, launch)
        )
        if arch == 90 and d == 128:
            del more["UNION"]
            kernel = block_attn_bwd._block_attn_dq_anew_kernel
            cases.append(_case(kernel, label, dtype, {**bwd, **more}, launch))
        keys, few = block_attn_bwd.key_tile(64, max(d, dv), size, h, arch), min(h, 8)
        passes = [("parts", h, keys, block_attn_bwd.dkdv_tiles(arch, d, dv, size, h))]
        for block_n in (keys, 16) if d == 128 and arch < 89 else (keys,):
            launch = block_attn_bwd.fused_tiles(arch, few, d, dv, size, block_n)
            passes.append((f"fused-{few}-heads-{block_n}", few, block_n, launch))
        for how, heads, block_n, launch in passes:
            if launch:
                rows, *launch = launch
                add = how != "parts"
                tile = dict(VARLEN=not add, PAIRS=max(rows // heads, 1), HEADS=heads, ADD=add,
                            BLOCK_N=block_n, CHUNK=block_lists.CHUNK)  # fmt: skip
                kernel = block_attn_bwd._block_attn_bwd_dkdv_kernel
                cases.append(_case(kernel, f"{label}-{how}", dtype, {**wide, **tile}, launch))
        if queries:
            union = dict(QUERIES=queries, HEADS=heads, ROOM=16 * queries, TMA=tma)
            for kernel, tiles, extra in (
                (union_attn._union_attn_fwd_kernel, union_attn.fwd_tiles(arch, d, dv),
                 dict(VARLEN=False)),
                (union_attn._union_attn_bwd_dq_kernel, union_dq,
                 dict(VARLEN=True, ACCUMULATE=True)),
            ):  # fmt: skip
                if tiles:
                    block_n, own_n, *launch = tiles
                    more = dict(**union, **extra, BLOCK_N=block_n, OWN_N=own_n)
                    cases.append(_case(kernel, label, dtype, {**wide, **more}, launch))
    cases += _wide_cases(arch)
    if arch == 80:  # where these left registers on the stack
        cases += [_many_heads_case(arch, 192, h) for h in (32, 64)]
    file = dict(VARLEN=True, UNION=16, N_PAD=16, TOKENS=64, FILL=True)
    cases.append(_case(block_attn_outer._tile_rows_kernel, "fill", "bf16", file, (4, 2)))
    for heads in (4, 8) if arch in (90, 120) else (4,):
        rows, launch = block_attn_outer.outer_tiles(arch, heads, 128, 128, 2)
        tile = dict(D=128, DV=128, VARLEN=False, PAIRS=rows // heads, HEADS=heads, BLOCK_N=64,
                    BLOCK_D=128, BLOCK_DV=128, PRECISION="tf32")  # fmt: skip
        outer = _case(block_attn_outer._block_attn_outer_kernel, f"D128-H{heads}", "bf16", tile,
                      (launch["num_warps"], launch["num_stages"]))  # fmt: skip
        merge = dict(DV=128, HEADS=heads, N_PAD=16, BLOCK_DV=128, UNION=16, REDO=16)
        cases.append(replace(outer, max_registers=launch["maxnreg"]))
        kernel = block_attn_outer._block_attn_merge_kernel
        cases.append(_case(kernel, f"D128-H{heads}", "bf16", merge, (1, 2)))
    size = dict(SIZE=block_lists.LIST_SIZE)
    chunk = dict(CHUNK=block_lists.CHUNK, **size)
    pair = dict(VARLEN=True, TILE=64, PER_BLOCK=2, **size)
    members = dict(VARLEN=True, TILE=64, WORDS=block_lists.WORDS, SHARE=block_lists.SHARE)
    count = dict(WORDS=block_lists.WORDS)
    cases += [
        _case(block_lists._pair_tiles_kernel, "map", "bf16", dict(pair, MARK=True), (4, 2)),
        _case(block_lists._pair_tiles_kernel, "sort", "bf16", dict(pair, MARK=False), (4, 2)),
        _case(block_lists._tile_counts_kernel, "all", "bf16", count, (1, 2)),
        _case(block_lists._tile_members_kernel, "packed", "bf16", members, (1, 2)),
        _case(block_lists._piece_ranks_kernel, "all", "bf16",
              dict(PER_CHUNK=8, SHARE=64, **size), (4, 2)),
        _case(block_lists._piece_order_kernel, "all", "bf16",
              dict(BUCKETS=block_lists.BUCKETS, **size), (4, 2)),
        _case(block_lists._chunk_ends_kernel, "all", "bf16", chunk, (4, 2)),
        _case(block_lists._chunk_fill_kernel, "all", "bf16", chunk, (4, 2)),
    ]  # fmt: skip
    rows = dict(DV=128, BLOCK_DV=128, BLOCK_M=32)
    for summed in (False, True):
        case = dict(rows, SUMMED=summed)
        cases.append(_case(combine._combine_fwd_kernel, f"D128-{summed}", "bf16", case, (4, 2)))
    cases.append(_case(combine._combine_bwd_kernel, "D128", "bf16", rows, (4, 2)))
    for label, case in (("D128", dict(rows, LSE=None, DLSE=None)), ("D128-dlse", rows)):
        cases.append(_case(delta._attn_bwd_delta_kernel, label, "bf16", case, (4, 2)))
    order = dict(ROWS=16, N=16, CHUNK=16)
    cases.append(_case(ascending._ascending_kernel, "n16", "bf16", order, (4, 2)))
    for rounding in (sums._round_kernel, sums._round_keys_kernel):
        cases.append(_case(rounding, "all", "bf16", dict(SIZE=sums.SIZE), (4, 2)))
    mark = dict(D=128, DV=128, BLOCK_D=128, BLOCK_DV=128, ROWS=marked_keys.ROWS)
    cases.append(_case(marked_keys._mark_keys_kernel, "D128", "bf16", mark, (4, 2)))
    finite = _case(marked_keys._finite_kernel, "all", "bf16", dict(SIZE=marked_keys.SIZE), (4, 2))
    cases.append(replace(finite, types={**finite.types, "X": "*bf16", "most": "fp32"}))
    cases.append(
        _case(
            block_attn_bwd._block_attn_bwd_sum_kernel, "D128", "bf16",
            dict(DIM=128, BLOCK_DIM=128, BLOCK_N=64, CHUNK=block_lists.CHUNK, ROWS=16,
                 VARLEN=True), (4, 2),
        )  # fmt: skip
    )
    for dim, heads in ((128, 16), (192, 3)) if arch in (90, 120) else ((128, 16),):
        tile = dict(HQ=heads, G=2, D=dim, DV=128, OCTAVES=turn_split.octaves(1e4, dim),
                    BACKWARD=dim == 192, **turn_split.turn_tiles(dim, 128))  # fmt: skip
        cases.append(_case(turn_split._turn_kernel, f"D{dim}", "bf16", tile, (4, 3)))
    for heads in (1, 4, 16) if arch in (90, 120) else (16,):
        queries, _ = union_lists.tile_shape(arch, heads, 2)
        launch = (union_lists.lists_warps(queries, 16), 2)
        tile = dict(VARLEN=heads == 16, QUERIES=queries, N_PAD=16)
        cases.append(
            _case(union_lists._union_lists_kernel, f"{queries}-queries", "bf16", tile, launch)
        )
    for blocks in (128, 4096):
        cases.append(
            _case(
                block_select._block_topn_kernel, f"{blocks}", "bf16",
                dict(VARLEN=False, BLOCK_Q=8, BLOCK_N=64, NB=16, BLOCKS=blocks, N_SEL=16,
                     N_PAD=16, N_INIT=1, N_LOCAL=2, G=4, l=32, d=16, l_sel=64),
                (block_select.topn_warps(blocks), 1),
            )  # fmt: skip
        )
    return cases + _gluon_cases() if arch == 90 else cases


def _triton_type(name: str) -> Any:
    import triton.language as tl

    return {"fp16": tl.float16, "fp32": tl.float32}[name]
