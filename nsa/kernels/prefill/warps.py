"""What single warps do in Gluon kernels, which know no control flow of single warps.

It follows from a scalar that differs between warps, the number of the warp: a branch on it is taken
by whole warps. Nothing may make all warps wait for each other then: triton 3.6 puts a barrier of
the whole program before each mbarrier.wait in a loop, and mbarrier.arrive arrives once for all
warps, so both are PTX here. Barriers go by number from where shared memory begins: a kernel has
them first in the one allocation that it makes, and check_address stops it where that is not so.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

program_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # triton 3.6
UNIT = gl.constexpr(1024)  # bytes: what a swizzled tile must be aligned to
BARRIER = gl.constexpr(8)  # bytes
MARK = gl.constexpr(0x6E7361)


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


@gluon.jit
def first_barrier():
    """Its address; to be asked for once, since a warp waits for the answer."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem;", "=r", [], gl.int32, is_pure=False, pack=1
    )


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
def check_address(unit):
    """Stops the kernel if the memory of `unit` is not where first_barrier says."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = unit._reinterpret(gl.int32, [UNIT // 4], layout)
    spread: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words.store(gl.full([UNIT // 4], MARK, gl.int32, spread))
    program_barrier()
    gl.inline_asm_elementwise(
        """{
        .reg .pred wrong;
        .reg .u32 word;
        ld.shared.u32 word, [global_smem];
        setp.ne.u32 wrong, word, $1;
        @wrong trap;
        mov.u32 $0, 0;
        }""",
        "=r,r", [MARK], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    program_barrier()
