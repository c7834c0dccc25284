"""Block scores (Eq. 9 and 10) out of compressed attention's own probabilities, on Hopper.

span/fwd_hopper.py has every probability in registers once. There a tile of them is pooled to sums
over blocks, which go in fp16, relative to the maximum of their row so far, to memory of the
program's own. That holds one work item at a time: it is no matrix of scores, and fits the L2. When
all tiles of an item are done and its rows' log-sum-exps known, the warp that wrote the sums reads
them back, scales them and sums over the heads of each query. No product Q K^T is done again, which
takes score_hopper.py half as many FLOPs as attention itself.

Every instruction in the loop over tiles counts, wherever it stands: with 320 of them more than
without scores, 64k tokens of 64 heads in 4 groups took 5.3 ms more, with 107 3.1 (H200), where the
separate kernel takes 5. So probabilities are pooled by small products from the registers
that P V reads, eight blocks by sixteen keys, in front of the tile's other products, for which they
would have to wait. And an item's scores are found while the next one is computed: before the sums
of a tile go to their place, those that lie there are taken, which were asked for in time.

For blocks of four strides and compressed blocks of two (l = 2d, l_sel = 4d): three keys of a block
lie in it, and half of the fourth reaches into the next. By tokens of overlap these weigh 2 and 1,
here 1 and 1/2: the scores' common factor does not count.

Sums of a warp, which has 16 rows (up to four queries of one group): the rows' log-sum-exps, then a
place for each tile of keys, with the sums of 32 blocks and the maxima that they are relative to.
Tiles come from the last to the first. The first block of a tile lacks what the tile before gives to
it: it waits in shared memory, and has the first place of that tile. In its own tile the block
behind the tile has it.

The PTX here takes what it needs of a lane from its number: a thread has rows r = lane / 4 and r + 8
of a warpgroup's product, and pairs of them share a word.
"""

from __future__ import annotations

import struct

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from nsa.kernels.prefill.warps import kept, lane_number
from nsa.kernels.tiles import cdiv, sm_count

KEYS = 128  # of a tile, 32 blocks
# Compressed keys from which attention finds the scores, and up to which: beyond, the sums of all
# programs leave the L2 (not measured). H200, all of the forward, 64 heads in 4 groups, ms: 8k
# tokens 1.58 -> 1.54, 16k 3.45 -> 3.28, 32k 8.39 -> 7.93, 64k 23.0 -> 21.1. Scores as exact as
# attention's 16-bit probabilities choose other blocks for 2 to 6 % of the queries, whose scores add
# up to 0.99992 of the best; where that gains little the separate kernel serves.
LEAST_KEYS, MOST_KEYS = 1000, 4096
# Sums over blocks are kept in fp16, 2^LEAD times as large as probabilities relative to the maximum
# so far: at most 2^15, since maxima may lag by 8. Down to 2^-19 of the maximum fp16 keeps 11 bits.
# In fp16 the probabilities themselves are as large; in bf16 they stay below 1 (span/fwd_hopper.py)
# and the weights of their sums make up for it.
LEAD = gl.constexpr(5.0)
BF16_WEIGHT = 13  # base 2: LEAD and the lag of 8
# Scores are 2^13 times as large as sums of probabilities: what four heads add up to in fp16 is at
# most 2^15.
SCALE = gl.constexpr(13.0)
HEADER = gl.constexpr(64)
HALF = gl.constexpr(512)  # bytes: of 32 blocks words 0 to 3, as many have words 4 to 7
PLACE = gl.constexpr(2 * HALF.value + 64)  # the maxima behind them
# In shared memory, bytes from the first barrier: 32 for each warp's sums that wait for the tile
# before, and as many for its factors.
ASIDE, FACTORS = gl.constexpr(256), gl.constexpr(256)

_LANE = """
    .reg .b32 lane, quad, fourth;
    .reg .pred first_of_quad;
    mov.u32 lane, %laneid;
    shr.u32 quad, lane, 2;
    and.b32 fourth, lane, 3;
    setp.eq.u32 first_of_quad, fourth, 0;
"""


def _float(x: float) -> str:
    return "0f" + struct.pack(">f", x).hex().upper()


def _load_ptx(loaded: str, at: str) -> str:
    """Eight words of a block for each lane, and the maximum of a row for lanes up to 15."""
    load, words = "ld.relaxed.gpu.global.L1::no_allocate", [f"{loaded}{i}" for i in range(9)]
    return f"""{{
    .reg .b32 number;
    .reg .b64 from;
    mov.u32 number, %laneid;
    mad.wide.u32 from, number, 16, {at};
    {load}.v4.b32 {{{", ".join(words[:4])}}}, [from];
    {load}.v4.b32 {{{", ".join(words[4:8])}}}, [from + {HALF.value}];
    mad.wide.u32 from, number, 4, {at};
    {load}.b32 {words[8]}, [from + {2 * HALF.value}];
    }}"""


def _score_ptx(heads: int, loaded: str, factors: str, out: str, stride: str, there: str) -> str:
    """What _load_ptx gave to scores, where there are any, to `out` on, a row of so many bytes for
    each query of the warp. factors: room in shared memory."""
    lines = ["{", f"""
    .reg .b32 number, word, offset, w<8>, low, high;
    .reg .f32 f, g, m, lse, s<4>;
    .reg .b16 h<4>;
    .reg .b64 to;
    .reg .pred any, some, is_first;
    mov.u32 number, %laneid;
    mov.b32 m, {loaded}8;
    mov.b32 lse, {loaded}9;
    sub.f32 f, m, lse;
    ex2.approx.ftz.f32 f, f;
    shfl.sync.bfly.b32 g, f, 8, 0x1f, 0xffffffff;
    cvt.rn.f16x2.f32 word, g, f;
    setp.lt.u32 some, number, 8;
    mad.lo.u32 offset, number, 4, {factors};
    @some st.shared.b32 [offset], word;
    bar.warp.sync 0xffffffff;
    ld.shared.v4.b32 {{w0, w1, w2, w3}}, [{factors}];
    ld.shared.v4.b32 {{w4, w5, w6, w7}}, [{factors} + 16];
    mul.rn.f16x2 low, {loaded}0, w0;
    mul.rn.f16x2 high, {loaded}4, w4;
    """]  # fmt: skip
    for i in range(1, 4):
        lines.append(f"fma.rn.f16x2 low, {loaded}{i}, w{i}, low;")
        lines.append(f"fma.rn.f16x2 high, {loaded}{i + 4}, w{i + 4}, high;")
    lines.append(f"""
    // The first place is that of the block behind the tile.
    setp.eq.u32 is_first, number, 0;
    selp.b32 offset, 32, number, is_first;
    mad.wide.u32 to, offset, 4, {out};
    setp.ne.u32 any, {there}, 0;
    """)
    lines.append("""
    mov.b32 {h0, h1}, low;
    mov.b32 {h2, h3}, high;
    cvt.f32.f16 s0, h0; cvt.f32.f16 s1, h1; cvt.f32.f16 s2, h2; cvt.f32.f16 s3, h3;
    """)
    if heads > 4:
        lines.append("add.f32 s0, s0, s2; add.f32 s1, s1, s3;")
    if heads == 16:
        lines.append("add.f32 s0, s0, s1;")
    # Lower and upper rows of up to four queries.
    stored = {16: ["s0"], 8: ["s0", "s1"], 4: ["s0", "s2", "s1", "s3"]}[heads]
    for i, sum_ in enumerate(stored):
        lines.append(f"@any st.global.f32 [to], {sum_};")
        if i + 1 < len(stored):
            lines.append(f"mad.wide.u32 to, {stride}, 1, to;")
    return "\n".join([*lines, "}"])


def _weights_ptx(bf16: bool) -> str:
    """Right operands of products that take 16 keys to eight blocks: a word of two keys each. Of 32
    keys words of the first 8, and so on; what the last gives to the next eight blocks. The blocks
    are those of columns 0, 2, 4, 6, 1, ..: so a place has them in their order."""
    one, half = ((127 + BF16_WEIGHT) << 7, (126 + BF16_WEIGHT) << 7) if bf16 else (0x3C00, 0x3800)
    lines = ["{", _LANE, f"""
    .reg .b32 number, pair, next, spread;
    .reg .pred odd, same;
    and.b32 number, lane, 1;
    setp.ne.u32 odd, number, 0;
    // Of a lane's two keys in their block, and in the next one.
    selp.b32 pair, {half << 16 | one:#x}, {one << 16 | one:#x}, odd;
    selp.b32 next, {half << 16:#x}, 0, odd;
    and.b32 number, quad, 1;
    shr.u32 spread, quad, 1;
    mad.lo.u32 spread, number, 4, spread;
    shr.u32 number, fourth, 1;
    sub.s32 number, spread, number;
    """]  # fmt: skip
    for i in range(4):
        lines.append(f"""
        setp.eq.s32 same, number, {2 * i};
        selp.b32 ${i}, pair, 0, same;
        setp.eq.s32 same, number, {2 * i + 1};
        selp.b32 ${i}, next, ${i}, same;
        """)
    lines.append("setp.eq.s32 same, number, -1; selp.b32 $4, next, 0, same;")
    return "\n".join([*lines, "}"])


def _pool_ptx(bf16: bool) -> str:
    """Sums over blocks of 16 rows by 128 keys, and what their place holds (_load_ptx).

    Two small products make eight blocks of 32 keys, c0 c1 of row r, c0 c1 of row r + 8; a third
    what the last key gives to the next eight.
    """
    x, (place, *own, spill) = 32, (f"${64 + 64 * i}" for i in range(6))
    kind = "bf16" if bf16 else "f16"
    lines = ["{", """
    .reg .b32 loaded<9>;
    .reg .f32 d<20>, none;
    """, _load_ptx("loaded", place), """
    mov.f32 none, 0f00000000;
    """]  # fmt: skip

    def product(to: int, keys: range, weights: str, since: int | None) -> str:
        """keys: which of the words of rows r and r + 8 it takes, 8 or 16 keys."""
        d, c = (
            ", ".join("none" if n is None else f"d{4 * n + i}" for i in range(4))
            for n in (to, since)
        )
        a = ", ".join(f"${x + i}" for i in keys)
        name = f"mma.sync.aligned.m16n8k{4 * len(keys)}.row.col.f32.{kind}.{kind}.f32"
        return f"{name} {{{d}}}, {{{a}}}, {{{weights}}}, {{{c}}};"

    for n in range(4):
        lines.append(product(n + 1, range(8 * n + 6, 8 * n + 8), spill, None))
    for n in range(4):
        lines.append(product(n, range(8 * n, 8 * n + 4), ", ".join(own[:2]), n if n else None))
    for n in range(4):
        lines.append(product(n, range(8 * n + 4, 8 * n + 8), ", ".join(own[2:]), n))
    lines += [f"mov.b32 ${i}, d{i};" for i in range(16)]
    lines += ["mov.b32 $16, d16;", "mov.b32 $17, d18;"]
    lines += [f"mov.b32 ${i + 18}, loaded{i};" for i in range(9)]
    lines += [f"mov.u32 ${i}, 0;" for i in range(27, 32)]
    return "\n".join([*lines, "}"])


def _put_ptx(heads: int) -> str:
    """What _pool_ptx returns: scores of what was in the place, where there are any, and then the
    sums to it."""
    x = 16
    place, corner, aside, out, stride, there, lse2, alpha = (f"${48 + 64 * i}" for i in range(8))
    lines = ["{", _LANE, """
    .reg .b32 offset, factors, l<10>, sum<8>, held, rest, factor;
    .reg .f32 f0, f1;
    .reg .b64 to;
    .reg .pred none;
    """]  # fmt: skip
    # Words of rows r and r + 8.
    word = "mov.b32 f0, ${0}; mov.b32 f1, ${1}; cvt.rn.f16x2.f32 {2}, f1, f0;"
    for i in range(8):
        at = x + i // 2 * 4 + i % 2
        lines.append(word.format(at, at + 2, f"sum{i}"))
    lines.append(word.format(x + 16, x + 17, "rest"))
    lines.append(f"""
    mad.lo.u32 offset, quad, 4, {aside};
    ld.shared.b32 held, [offset];
    cvt.rn.f16x2.f32 factor, {alpha[0]}{int(alpha[1:]) + 2}, {alpha};
    fma.rn.f16x2 held, held, factor, rest;
    @first_of_quad st.shared.b32 [offset], sum0;
    selp.b32 sum0, held, sum0, first_of_quad;
    setp.eq.u32 none, {there}, 0;
    @none bra.uni over;
    add.u32 factors, {aside}, {FACTORS.value};
    """)
    lines += [f"mov.b32 l{i}, ${x + 18 + i};" for i in range(9)] + [f"mov.b32 l9, {lse2};"]
    lines.append(_score_ptx(heads, "l", "factors", out, stride, there))
    lines.append(f"""
    over:
    cvt.u64.u32 to, {corner};
    add.s64 to, to, {place};
    """)
    lines += [f"st.global.b32 [to + {64 * i}], sum{i};" for i in range(8)]
    lines += [f"mov.u32 ${i}, 0;" for i in range(16)]
    return "\n".join([*lines, "}"])


# m of rows r and r + 8; a tile's place.
_MAXIMA = gl.constexpr(f"""{{
    {_LANE}
    .reg .b64 to;
    mad.wide.u32 to, quad, 4, $3;
    @first_of_quad st.global.f32 [to + {2 * HALF.value}], $1;
    @first_of_quad st.global.f32 [to + {2 * HALF.value + 32}], $2;
    mov.u32 $0, 0;
}}""")
_CLEAR = gl.constexpr(f"""{{
    {_LANE}
    .reg .b32 offset;
    mad.lo.u32 offset, quad, 4, $1;
    @first_of_quad st.shared.b32 [offset], 0;
    mov.u32 $0, 0;
}}""")


def _finish_ptx(heads: int, bf16: bool) -> str:
    """The rows' log-sum-exps to the head, block 0 of each query, and zeros behind the last block.
    Operands: m, m, lse2, lse2 of rows r and r + 8; head, what waits, scores, bytes of a row of
    them, tiles, each twice."""
    scale = _float(SCALE.value - (BF16_WEIGHT if bf16 else 0))
    lines = ["{", _LANE, f"""
    .reg .b32 offset, held, zero;
    .reg .b16 h0, h1;
    .reg .f32 lse0, lse1, s0, s1, t;
    .reg .b64 to;
    .reg .pred there;
    sub.f32 lse0, $3, {scale};
    sub.f32 lse1, $4, {scale};
    mad.wide.u32 to, quad, 4, $5;
    @first_of_quad st.global.f32 [to], lse0;
    @first_of_quad st.global.f32 [to + 32], lse1;
    mad.lo.u32 offset, quad, 4, $7;
    bar.warp.sync 0xffffffff;
    ld.shared.b32 held, [offset];
    mov.b32 {{h0, h1}}, held;
    sub.f32 t, $1, lse0;
    ex2.approx.ftz.f32 t, t;
    cvt.f32.f16 s0, h0;
    mul.f32 s0, s0, t;
    sub.f32 t, $2, lse1;
    ex2.approx.ftz.f32 t, t;
    cvt.f32.f16 s1, h1;
    mul.f32 s1, s1, t;
    """]  # fmt: skip
    for step in (4, 8, 16)[: 2 if heads == 4 else 3]:
        for s in ("s0", "s1"):
            lines.append(f"shfl.sync.bfly.b32 t, {s}, {step}, 0x1f, 0xffffffff;")
            lines.append(f"add.f32 {s}, {s}, t;")
    if heads == 16:
        lines.append("add.f32 s0, s0, s1;")
        lines.append("setp.eq.u32 there, lane, 0; @there st.global.f32 [$9], s0;")
    elif heads == 8:
        lines.append("""
        setp.eq.u32 there, lane, 0;
        cvt.u64.u32 to, $11;
        add.s64 to, to, $9;
        @there st.global.f32 [$9], s0;
        @there st.global.f32 [to], s1;
        """)
    else:
        lines.append("""
        and.b32 offset, lane, 15;
        setp.eq.u32 there, offset, 0;
        shr.u32 offset, lane, 4;
        mad.wide.u32 to, $11, offset, $9;
        @there st.global.f32 [to], s0;
        mad.wide.u32 to, $11, 2, to;
        @there st.global.f32 [to], s1;
        """)
    lines.append("""
    mad.lo.u32 offset, $13, 32, lane;
    mov.b32 zero, 0;
    setp.ne.u32 there, lane, 0;
    mad.wide.u32 to, offset, 4, $9;
    """)
    for query in range(16 // heads):
        lines.append("@there st.global.b32 [to], zero;")
        if query + 1 < 16 // heads:
            lines.append("mad.wide.u32 to, $11, 1, to;")
    return "\n".join([*lines, "bar.warp.sync 0xffffffff;", "mov.u32 $0, 0;", "}"])


_LOAD = gl.constexpr(
    "{ .reg .b32 l<9>;\n" + _load_ptx("l", "$9")
    + "".join(f"mov.b32 ${i}, l{i};\n" for i in range(9)) + "}"
)  # fmt: skip
_LOAD_OPERANDS = gl.constexpr("=&r," * 9 + "l")


def _apart(heads: int) -> str:
    """_score_ptx of operands."""
    moves = "".join(f"mov.b32 l{i}, ${i + 1};\n" for i in range(10))
    score = _score_ptx(heads, "l", "$14", "$11", "$12", "$13")
    return "{ .reg .b32 l<10>;\n" + moves + score + "mov.u32 $0, 0; }"


_SCORE = gl.constexpr({heads: _apart(heads) for heads in (4, 8, 16)})
_SCORE_OPERANDS = gl.constexpr("=r," + "r," * 10 + "l,r,r,r")
_POOL = gl.constexpr({bf16: _pool_ptx(bf16) for bf16 in (False, True)})
_POOL_OPERANDS = gl.constexpr(
    ",".join(["=&r"] * 32 + ["r"] * 32 + [kind for kind in "lrrrrr" for _ in range(64)])
)
_WEIGHTS = gl.constexpr({bf16: _weights_ptx(bf16) for bf16 in (False, True)})
_PUT = gl.constexpr({heads: _put_ptx(heads) for heads in (4, 8, 16)})
_PUT_OPERANDS = gl.constexpr(
    ",".join(["=r"] * 16 + ["r"] * 32 + [kind for kind in "lrrlrrrf" for _ in range(64)])
)
_FINISH, _FINISH_BF16 = (
    gl.constexpr({heads: _finish_ptx(heads, bf16) for heads in (4, 8, 16)})
    for bf16 in (False, True)
)
_FINISH_OPERANDS = gl.constexpr("=r,f,f,f,f,l,l,r,r,l,l,r,r,r,r")


@gluon.jit
def sums_of_warp(SUMS, warp, tiles):
    """Address of a warp's sums; tiles: room for how many each has."""
    number = gl.program_id(0) * gl.num_warps() + warp
    return SUMS.to(gl.int64) + number.to(gl.int64) * (HEADER + tiles * PLACE)


@gluon.jit
def _by_thread(x, dtype: gl.constexpr):
    """A number of each thread as a tensor."""
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return x.to(dtype) + gl.zeros([32 * WARPS], dtype, layout)


@gluon.jit
def weights(DTYPE: gl.constexpr):
    """What pool() takes, of each thread; and where in a place it stores."""
    PTX: gl.constexpr = _WEIGHTS[DTYPE == gl.bfloat16]
    lane = lane_number()
    own = gl.inline_asm_elementwise(
        PTX, "=&r,=&r,=&r,=&r,=&r,r", [lane], (gl.int32,) * 5, is_pure=False, pack=1
    )
    corner = lane % 4 * 16 + lane // 4 % 4 * 4 + lane // 16 * HALF
    return own, kept(corner)


@gluon.jit
def begin(sums, aside):
    """Nothing waits for the tile before; returns a log-sum-exp of the item before."""
    gl.inline_asm_elementwise(_CLEAR, "=r,r", [aside], gl.int32, is_pure=False, pack=1)
    return gl.inline_asm_elementwise(
        "ld.global.b32 $0, [$1];", "=r,l", [sums + lane_number() % 16 * 4], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load(sums, tile):
    at = [_by_thread(sums + (HEADER + tile * PLACE), gl.int64)]
    return gl.inline_asm_elementwise(
        _LOAD, _LOAD_OPERANDS, at, (gl.int32,) * 9, is_pure=False, pack=1
    )


@gluon.jit
def _score(x, lse2, tile, end_tile, aside, out, n_ld, HEADS: gl.constexpr):
    PTX: gl.constexpr = _SCORE[HEADS]
    gl.inline_asm_elementwise(
        PTX, _SCORE_OPERANDS,
        [
            x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], _by_thread(lse2, gl.int32),
            _by_thread(out + tile * 128, gl.int64), _by_thread(n_ld * 4, gl.int32),
            _by_thread(tile < end_tile, gl.int32), _by_thread(aside + FACTORS, gl.int32),
        ],
        gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def score(begin_tile, end_tile, sums, lse2, aside, out, n_ld, HEADS: gl.constexpr):
    """Scores of an item that is finished, of the tiles from begin_tile to end_tile: to address
    `out` on, a row of n_ld for each query of this warp. Nothing hides it: put() does it better."""
    for tile in range(begin_tile, end_tile, 4):
        a = _load(sums, tile)
        b = _load(sums, tile + 1)
        c = _load(sums, tile + 2)
        d = _load(sums, tile + 3)
        _score(a, lse2, tile, end_tile, aside, out, n_ld, HEADS)
        _score(b, lse2, tile + 1, end_tile, aside, out, n_ld, HEADS)
        _score(c, lse2, tile + 2, end_tile, aside, out, n_ld, HEADS)
        _score(d, lse2, tile + 3, end_tile, aside, out, n_ld, HEADS)


@gluon.jit
def pool(p, own, tile, sums):
    """Pool the probabilities p [16 rows of each warp, 128 keys] of that tile, in 16 bits and laid
    out as a warpgroup's product. Tiles come from the last to the first. Returns what put() takes.
    own: of weights(). No product of the warpgroup may be in flight: these would wait for it."""
    LAYOUT: gl.constexpr = p.type.layout
    PTX: gl.constexpr = _POOL[p.dtype == gl.bfloat16]
    at = sums + (HEADER + tile * PLACE)
    short = gl.zeros(p.shape, gl.int32, LAYOUT)
    return gl.inline_asm_elementwise(
        PTX, _POOL_OPERANDS,
        [
            p, at + gl.zeros(p.shape, gl.int64, LAYOUT), own[0] + short, own[1] + short,
            own[2] + short, own[3] + short, own[4] + short,
        ],
        gl.int16, is_pure=False, pack=64,
    )  # fmt: skip


@gluon.jit
def put(pooled, m, alpha, corner, tile, sums, aside, before, HEADS: gl.constexpr):
    """What pool() returned to its place, with the maxima m that it is relative to; alpha: by what
    they changed. If the item before had this tile, first its scores. corner: of weights(); aside:
    shared memory of a warp, see ASIDE; before: of that item the address of its scores, n_ld, its
    tiles and what begin() returned."""
    LAYOUT: gl.constexpr = pooled.type.layout
    ROWS: gl.constexpr = m.type.layout
    PTX: gl.constexpr = _PUT[HEADS]
    out, n_ld, tiles, lse2 = before
    long = gl.zeros(pooled.shape, gl.int64, LAYOUT)
    short = gl.zeros(pooled.shape, gl.int32, LAYOUT)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    at = sums + (HEADER + tile * PLACE)
    gl.inline_asm_elementwise(
        PTX, _PUT_OPERANDS,
        [
            pooled, at + long, corner + short, aside + short, out + tile * 128 + long,
            n_ld * 4 + short, (tile < tiles).to(gl.int32) + short, lse2 + short,
            alpha[:, None] + gl.zeros(pooled.shape, gl.float32, LAYOUT),
        ],
        gl.int8, is_pure=False, pack=64,
    )  # fmt: skip
    gl.inline_asm_elementwise(
        _MAXIMA, "=r,f,f,l,l", [m, at + gl.zeros(m.shape, gl.int64, ROWS)], gl.int16,
        is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def finish(m, lse2, tiles, sums, aside, out, n_ld, HEADS: gl.constexpr, DTYPE: gl.constexpr):
    """All is pooled: what the scores of the item take that no tile has. m, lse2 [rows]: the last
    maxima and log-sum-exps to base 2, infinite where nothing is seen."""
    PTX: gl.constexpr = _FINISH_BF16[HEADS] if DTYPE == gl.bfloat16 else _FINISH[HEADS]
    ROWS: gl.constexpr = m.type.layout
    long, short = gl.zeros(m.shape, gl.int64, ROWS), gl.zeros(m.shape, gl.int32, ROWS)
    gl.inline_asm_elementwise(
        PTX, _FINISH_OPERANDS,
        [m, lse2, sums + long, aside + short, out + long, n_ld * 4 + short, tiles + short],
        gl.int16, is_pure=False, pack=2,
    )  # fmt: skip


TAKES = "1000 to 4096 compressed keys, 4, 8 or 16 heads a group, l = 2 d and l_sel = 4 d"


def usable(q: torch.Tensor, k_cmp: torch.Tensor, l: int, d: int, l_sel: int) -> bool:
    """Return whether attention can pool its probabilities to blocks, and is the faster for it."""
    if not LEAST_KEYS <= k_cmp.shape[1] <= MOST_KEYS or q.shape[-1] > 128:
        return False
    return q.shape[-2] // k_cmp.shape[-2] in (4, 8, 16) and l == 2 * d and l_sel == 4 * d


def room(keys: int) -> int:
    """Tiles that a warp may have for so many keys; score() looks at three more."""
    return max(cdiv(keys, KEYS), 1) + 3


def memory(device: torch.device, keys: int, warps: int) -> torch.Tensor:
    """Allocate memory for the sums of all programs that run at once.

    It is 64 bytes longer than they are: _load_ptx reads the maxima of 32 rows, where a place has
    those of 16, so that it reads behind the last place.
    """
    size = sm_count(device) * warps * (HEADER.value + room(keys) * PLACE.value)
    return torch.empty(size + 16 * 4, dtype=torch.uint8, device=device)
