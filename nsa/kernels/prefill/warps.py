"""What single warps do in Gluon kernels, which know no control flow of single warps.

It follows from a scalar that differs between warps, the number of the warp: a branch on it is taken
by whole warps. Nothing may make all warps wait for each other then: triton 3.6 puts a barrier of
the whole program before each mbarrier.wait in a loop, and mbarrier.arrive arrives once for all
warps, so both are PTX here. Barriers go by number from the head of a kernel's store on, see
releases.py, and check_address stops a kernel whose head is not where it was expected.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from nsa.kernels.prefill.releases import carve, program_barrier

UNIT = gl.constexpr(1024)  # bytes: what a swizzled tile must be aligned to
BARRIER = gl.constexpr(8)  # bytes
MARK = gl.constexpr(0x6E7361)
# Of a program with eight warps and up to four more, which count as four: all start with 168
# registers a thread, and all but the least that a thread can have then go to the eight: 240.
START_REGISTERS, LEAST_REGISTERS = 168, gl.constexpr(24)


@gluon.jit
def warp_number():
    """A scalar that differs between warps."""
    thread = gl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], gl.int32, is_pure=True, pack=1
    )
    return thread >> 5


@gluon.jit
def lane_number():
    """The same of threads: not for branches, which a whole warp takes."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %laneid;", "=r", [], gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _with_address(text, head_at):
    """PTX with the address of barrier 0 in the place of HEAD."""
    return text.replace("HEAD", f"global_smem+{head_at}" if head_at else "global_smem")


@gluon.jit
def first_barrier(HEAD_AT: gl.constexpr):
    """Its address, of a store's head at HEAD_AT; to be asked for once, since a warp waits for the
    answer."""
    MOVE: gl.constexpr = _with_address("mov.u32 $0, HEAD;", HEAD_AT)
    return gl.inline_asm_elementwise(MOVE, "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_phase(first, number, parity):
    """This warp waits for a phase of the barrier of that number."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred done;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
        @!done bra.uni again;
        mov.u32 $0, 0;
        }""",
        "=r,r,r", [first + number * BARRIER, parity], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_phase_if(asked, first, number, parity):
    """The same where `asked` is true."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred done;
        .reg .pred not_asked;
        setp.eq.s32 not_asked, $3, 0;
        @not_asked bra.uni over;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
        @!done bra.uni again;
        over:
        mov.u32 $0, 0;
        }""",
        "=r,r,r,r", [first + number * BARRIER, parity, asked.to(gl.int32)], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def arrive(first, number):
    """This warp arrives, once, at the barrier of that number."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one;
        elect.sync _|one, 0xffffffff;
        @one mbarrier.arrive.shared::cta.b64 _, [$1];
        mov.u32 $0, 0;
        }""",
        "=r,r", [first + number * BARRIER], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def arrive_if(asked, first, number):
    """The same where `asked` is true."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred one, asked;
        setp.ne.s32 asked, $2, 0;
        elect.sync _|one, 0xffffffff;
        and.pred one, one, asked;
        @one mbarrier.arrive.shared::cta.b64 _, [$1];
        mov.u32 $0, 0;
        }""",
        "=r,r,r", [first + number * BARRIER, asked.to(gl.int32)], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def kept(x):
    """x, which the compiler does not find anew: what is found from the numbers of a warp or a
    thread within a loop keeps all addresses there out of the registers that warps share."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def rounded_here(x, DTYPE: gl.constexpr):
    """x of fp32 in 16 bits, converted here. The compiler would move an ordinary conversion to its
    use: behind the next product, which doubles the registers in use, or between the products that
    read it, which are then waited for one by one."""
    if DTYPE == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.bfloat16, is_pure=False, pack=2
        )
    else:
        x = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], gl.float16, is_pure=False, pack=2
        )
    return x


@gluon.jit
def check_address(store, HEAD_AT: gl.constexpr):
    """Stops the kernel if the head of `store` is not where first_barrier says."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = carve(store, 0, gl.int32, [UNIT // 4], layout)
    spread: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words.store(gl.full([UNIT // 4], MARK, gl.int32, spread))
    program_barrier()
    CHECK: gl.constexpr = _with_address(
        """{
        .reg .pred wrong;
        .reg .u32 word;
        ld.shared.u32 word, [HEAD];
        setp.ne.u32 wrong, word, $1;
        @wrong trap;
        mov.u32 $0, 0;
        }""",
        HEAD_AT,
    )
    gl.inline_asm_elementwise(CHECK, "=r,r", [MARK], gl.int32, is_pure=False, pack=1)
    program_barrier()


_BY = 32  # registers in one piece of PTX: c0 c1 of a row, c0 c1 of the row 8 below, c8 ..
_RESCALE = gl.constexpr(
    f"""{{
    .reg .pred one, other;
    setp.neu.f32 one, ${2 * _BY}, 0f3F800000;
    setp.neu.f32 other, ${2 * _BY + 2}, 0f3F800000;
    or.pred one, one, other;
    vote.sync.any.pred one, one, 0xffffffff;
    @!one bra.uni over;
    """
    + "".join(f"mul.f32 ${i}, ${i}, ${2 * _BY + i};\n" for i in range(_BY))
    + "over:\n}"
)
# Outputs are x in place, and are written before the last factors are read.
_RESCALE_OPERANDS = gl.constexpr(
    ",".join(["=&f"] * _BY + [str(i) for i in range(_BY)] + ["f"] * _BY)
)
_RESCALE_PACK = gl.constexpr(_BY)


@gluon.jit
def rescaled(x, factor):
    """x [16 rows of each warp, columns], laid out as a warpgroup's product, times factor [rows]: by
    warps, and only where one of its rows has a factor that is not 1."""
    gl.static_assert(x.shape[0] == 16 * gl.num_warps())  # so that a thread has two rows
    gl.static_assert(x.shape[1] * 16 % (32 * _RESCALE_PACK) == 0)
    LAYOUT: gl.constexpr = x.type.layout
    factor = factor[:, None] + gl.zeros(x.shape, gl.float32, LAYOUT)
    return gl.inline_asm_elementwise(
        _RESCALE, _RESCALE_OPERANDS, [x, factor], gl.float32, is_pure=False, pack=_RESCALE_PACK
    )


@gluon.jit
def place_of_rows(place):
    """Where in a tile at address `place` a thread begins to store the 16 rows of its warp."""
    lane = lane_number()
    row = warp_number() * 16 + (lane & 15)
    return place + row * 128 + (((lane >> 4) ^ (lane & 7)) << 4)


@gluon.jit
def store_tile(x, at):
    """x [rows, D] of 16 bits to shared memory, as the copy engine and products want it: chunks of
    64 columns, every 16 bytes of a row swizzled by its number. at: place_of_rows."""
    LAYOUT: gl.constexpr = x.type.layout
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    to = (at ^ (column // 16 % 4 * 32)) + column // 64 * (x.shape[0] * 128)
    to = to[None, :] + gl.zeros(x.shape, gl.int32, LAYOUT)
    gl.inline_asm_elementwise(
        """{
        stmatrix.sync.aligned.m8n8.x4.shared.b16 [$6], {$2, $3, $4, $5};
        mov.u32 $0, 0;
        mov.u32 $1, 0;
        }""",
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r", [x, to], gl.int8, is_pure=False, pack=8,
    )  # fmt: skip
    fence_async_shared()


@gluon.jit
def _own_places(x, place):
    """Addresses for x [rows, D] of 16 bits by thread, eight elements at a time, from `place` on."""
    LAYOUT: gl.constexpr = x.type.layout
    THREADS: gl.constexpr = gl.num_warps() * 32
    column = gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    at = place + (warp_number() * 32 + lane_number()) * 16 + column // 16 * (THREADS * 16)
    return at[None, :] + gl.zeros(x.shape, gl.int32, LAYOUT)


@gluon.jit
def put_aside(x, place):
    """x in 16 bits to shared memory, whence the same threads take it with taken_back."""
    gl.inline_asm_elementwise(
        """{
        st.shared.v4.b32 [$6], {$2, $3, $4, $5};
        mov.u32 $0, 0;
        mov.u32 $1, 0;
        }""",
        "=r,=r,r,r,r,r,r,r,r,r,r,r,r,r", [x, _own_places(x, place)], gl.int8, is_pure=False, pack=8,
    )  # fmt: skip


@gluon.jit
def taken_back(like, place, DTYPE: gl.constexpr):
    """What put_aside stored, which was laid out as `like`."""
    OPERANDS: gl.constexpr = "=r,=r,=r,=r,r,r,r,r,r,r,r,r"
    LOAD: gl.constexpr = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
    at = _own_places(like, place)
    if DTYPE == gl.bfloat16:
        x = gl.inline_asm_elementwise(LOAD, OPERANDS, [at], gl.bfloat16, is_pure=False, pack=8)
    else:
        x = gl.inline_asm_elementwise(LOAD, OPERANDS, [at], gl.float16, is_pure=False, pack=8)
    return x
