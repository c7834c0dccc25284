"""Compile kernels ahead of time for GPUs that are not here, and read what they need.

case_of() makes a configuration of what a launcher would launch (launch.planning() collects it;
scripts/compile_as_launched.py has the calls). compile_case() runs Triton's compiler and ptxas for
it; no driver, no GPU. It cannot run under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import subprocess
import tempfile
import textwrap
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from nsa.kernels.launch import Launch

ARCHS = (80, 86, 89, 90, 100, 120)

# Shared memory that one block may use, bytes (CUDA C++ programming guide, compute capabilities).
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


# Bytes of stack that a kernel with heads of D elements and so many heads a group may use, where 32
# are not enough. ptxas keeps a few scalars there at times; a tile that does not fit the registers
# takes hundreds: the large ones are tiles to be made smaller, by measurement.
SPILLS: dict[str, dict[tuple[int | None, int | None], int]] = {
    "_block_attn_bwd_dkdv_kernel": {(64, 4): 48, (128, 1): 552, (128, 4): 264, (128, 8): 152,
                                    (128, 16): 40, (128, 64): 40, (192, 16): 40},
    "_block_attn_bwd_dq_kernel": {(128, 16): 104, (128, 64): 3096, (192, 64): 224},
    "_block_attn_dq_anew_kernel": {(128, 16): 40},
    "_block_attn_end_kernel": {(128, 4): 536, (128, 8): 488, (128, 16): 416},
    "_block_attn_fwd_kernel": {(128, 64): 4136, (192, 32): 104, (192, 64): 168},
    "_decode_phi_outer_kernel": {(192, None): 56},
    "_decode_scan_kernel": {(256, None): 616},
    "_sel_attn_fwd_ranges_kernel": {(256, None): 184},
    "_span_bwd_dkdv_kernel": {
        (64, 4): 152, (128, 1): 144, (128, 16): 320, (256, 16): 104,
        (192, 16): 640,  # the fastest tile of an H100 by far
    },
    "_span_bwd_dq_kernel": {(64, 4): 136, (128, 1): 64, (128, 4): 40, (192, 16): 96,
                            (192, 64): 496},
    "_span_bwd_hopper_kernel": dict.fromkeys([(None, h) for h in (4, 8, 16, 64)], 160),
    "_span_fwd_kernel": {(256, 16): 56},
    "_span_pair_fwd_hopper_kernel": {(None, None): 112},
}  # fmt: skip
# These are what 3.7 keeps; others keep more, since they allocate registers otherwise.
SPILLS_OF_RELEASE = {
    "3.6.": {
        "_block_attn_bwd_dkdv_kernel": 264, "_block_attn_end_kernel": 552,
        "_sel_attn_fwd_ranges_kernel": 288,
    },
    "3.8.": {
        "_block_attn_bwd_dkdv_kernel": 568, "_block_attn_bwd_hopper_kernel": 56,
        "_block_attn_outer_kernel": 112, "_decode_phi_outer_kernel": 1008,
        "_sel_attn_fwd_ranges_kernel": 264, "_span_bwd_dkdv_kernel": 344,
        "_union_attn_bwd_dq_kernel": 224, "_union_attn_fwd_kernel": 40,
    },
    "3.9.": {
        "_block_attn_bwd_dkdv_kernel": 488, "_block_attn_dq_anew_kernel": 64,
        "_block_attn_fwd_hopper_kernel": 112, "_block_attn_fwd_kernel": 88,
        "_block_attn_outer_kernel": 64, "_block_score_hopper_kernel": 88,
        "_decode_phi_outer_kernel": 1280, "_decode_scan_kernel": 272,
        "_span_bwd_dkdv_kernel": 248, "_span_bwd_hopper_kernel": 168,
        "_span_fwd_hopper_kernel": 112, "_span_pair_fwd_hopper_kernel": 128,
        "_union_attn_fwd_kernel": 64,
    },
}  # fmt: skip
# Kernels whose warps go ways of their own: no barrier of all of them may stand behind the parting.
PARTING = (
    "_span_fwd_hopper_kernel", "_span_pair_fwd_hopper_kernel", "_block_score_hopper_kernel",
    "_block_attn_fwd_hopper_kernel",
)  # fmt: skip
# Kernels that rank blocks by sums of their own, which all threads must hold alike.
RANKING = ("_decode_candidates_kernel", "_decode_selected_kernel")


@dataclass(frozen=True)
class AotCase:
    """One kernel configuration. types: Triton type per runtime argument ("*bf16", "i32", "fp32"),
    of a descriptor with its tile and, in Gluon, its layout. options: what the launcher gives Triton
    besides, such as num_warps."""

    kernel: Any
    types: dict[str, str]
    constexprs: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kernel's, some of its sizes and, of all that tells configurations apart, a hash."""
        sizes = [f"{n}{self.constexprs[n]}" for n in ("D", "DV", "HEADS") if n in self.constexprs]
        return "-".join([self.kernel.__name__, *sizes, _hash(self.form())[:6]])

    def form(self) -> str:
        given = (self.types, self.constexprs, self.options)
        return repr([sorted(x.items()) for x in given])

    @property
    def max_spill(self) -> int:
        """Bytes of stack that it may use."""
        import triton

        sizes = self.constexprs.get("D"), self.constexprs.get("HEADS")
        most = SPILLS.get(self.kernel.__name__, {}).get(sizes, 32)
        more = SPILLS_OF_RELEASE.get(triton.__version__[:4], {})
        return max(most, more.get(self.kernel.__name__, 0))

    @property
    def parting(self) -> str | None:
        """The PTX instruction at which warps begin to go ways of their own; None if they do not."""
        return "barrier.sync" if self.kernel.__name__ in PARTING else None


_ELEMENTS = {
    "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "int32": "i32",
    "int64": "i64", "uint8": "u8", "float8_e4m3fn": "fp8e4nv",
}  # fmt: skip


def case_of(launch: Launch) -> AotCase:
    """The configuration that a planned launch is of."""
    kernel, names = launch.kernel, list(launch.kernel.arg_names)
    given = dict(zip(names, launch.args, strict=False))
    types = {name: _type(x) for name, x in given.items() if x is not None}
    constexprs = {name: None for name, x in given.items() if x is None}
    constexprs |= {name: x for name, x in launch.constants.items() if name in names}
    options = {name: x for name, x in launch.constants.items() if name not in names}
    return AotCase(kernel, types, constexprs, options)


def _type(x: Any) -> str:
    """Triton's type of a runtime argument. Ints are not looked at: of 32 bits unless too large."""
    element = lambda tensor: _ELEMENTS[str(tensor.dtype).removeprefix("torch.")]
    if isinstance(x, Tensor):
        return f"*{element(x)}"
    if hasattr(x, "block_shape"):
        layout = f",{x.layout!r}" if hasattr(x, "layout") else ""
        return f"tensordesc<{element(x.base)}{list(x.block_shape)}{layout}>"
    if type(x) is int:
        return "i32" if -(1 << 31) <= x < 1 << 31 else "i64"
    return {float: "fp32", bool: "i1"}[type(x)]


class Resources(NamedTuple):
    """Resources of one program: shared memory in bytes, registers per thread, stack in bytes; how
    many barriers of all warps there are behind AotCase.parting, where none may be; and, of a kernel
    of RANKING, how many unrounded_sums()."""

    shared: int
    registers: int
    stack: int
    barriers: int = 0
    unrounded: int = 0

    def problems(self, arch: int, max_spill: int = 32) -> list[str]:
        """Why the kernel would fail or crawl on `arch`; empty if it fits."""
        most = SHARED_LIMIT[arch]
        found = {
            f"{self.shared} B of shared memory > {most} B": self.shared > most,
            f"{self.stack} B of registers spilled > {max_spill} B": self.stack > max_spill,
            f"{self.barriers} barriers of all warps where they go their own ways": self.barriers,
            f"{self.unrounded} sums in which threads differ, by which they rank": self.unrounded,
        }
        return [problem for problem, holds in found.items() if holds]


_code_of = functools.cache(lambda kernel: tuple(_code(kernel, set())))  # many cases share it


def content(case: AotCase, arch: int) -> str:
    """A hash of all that a case is compiled from but Triton's release: see scripts/lock.py."""
    return _hash("\n".join([*_code_of(case.kernel), case.form(), str(case.parting), str(arch)]))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code(fn: Any, seen: set[int]) -> Iterator[str]:
    """The code of a kernel or of a function that kernels call, of all of the project's that it
    calls, and the constants that it reads."""
    if id(fn) in seen:
        return
    seen.add(id(fn))
    compiled = hasattr(fn, "src")
    function = ast.parse(fn.src if compiled else textwrap.dedent(inspect.getsource(fn))).body[0]
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    yield ast.dump(function)
    python = fn.fn if compiled else inspect.unwrap(fn)
    outer = {}
    if isinstance(python, types.FunctionType):
        outer = {**python.__globals__, **inspect.getclosurevars(python).nonlocals}

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Name):
            return outer.get(node.id)
        of = value(node.value) if isinstance(node, ast.Attribute) else None
        return getattr(of, node.attr, None) if isinstance(of, types.ModuleType) else None

    for node in ast.walk(function):
        found = value(node)
        if found is None or isinstance(found, types.ModuleType):
            continue
        if getattr(found, "__module__", "").startswith("nsa.") and callable(found):
            yield from _code(found, seen)
        elif type(found).__name__ == "constexpr" or isinstance(found, (int, float, str, tuple)):
            yield f"{ast.unparse(node)} = {getattr(found, 'value', found)!r}"


def compile_case(case: AotCase, arch: int) -> tuple[Resources, str]:
    """Compile for compute capability `arch` (90 for sm_90): the resources used, and a hash of the
    PTX.

    Pointers and strides count as multiples of 16, as the launchers see to it. Raises ValueError
    when a case misses or invents an argument of its kernel, or has no `parting`.
    """
    made = compiled(case, arch)
    ptx, barriers = made.asm["ptx"], 0
    if case.parting:
        _, found, behind = ptx.partition(case.parting)
        if not found:
            raise ValueError(f"{case.name}: no {case.parting!r} in its PTX")
        barriers = behind.count("bar.sync")
    unrounded = len(unrounded_sums(ptx)) if case.kernel.__name__ in RANKING else 0
    used = Resources(made.metadata.shared, *usage(made.asm["cubin"]), barriers, unrounded)
    return used, _hash(re.sub(r"//.*", "", ptx))


def unrounded_sums(ptx: str) -> list[str]:
    """Sums over threads in which each adds its own product unrounded to the rounded one of another
    thread: the two threads then hold different sums, and rank by them differently."""
    found, products, neighbours = [], {}, {}
    for line in ptx.splitlines():
        op, _, registers = line.strip().partition(" ")
        to, *of = re.findall(r"%\w+", registers) or [""]
        if op == "mul.f32":
            products[to] = set(of)
        elif op == "shfl.sync.bfly.b32":
            neighbours[to] = products.get(of[0])
        elif op == "fma.rn.f32" and of[2:] and neighbours.get(of[2]) == set(of[:2]):
            found.append(line.strip())
    return found


def compiled(case: AotCase, arch: int) -> Any:
    """Compile a case for compute capability `arch`. Returns Triton's compiled kernel, whose `asm`
    has the texts of all stages."""
    import triton
    from triton.backends.compiler import GPUTarget

    source, options = _source(case)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def ones_of(cases: list[AotCase]) -> Iterator[tuple[AotCase, list[str]]]:
    """Which int arguments to lower_case() with 1: all of a case at once, and each alone in the
    first case of every kernel."""
    seen = set()
    for case in cases:
        ints = [n for n, t in case.types.items() if t in ("i32", "i64")]
        if ints:
            yield case, ints
        if case.kernel.__name__ not in seen:
            yield from ((case, [one]) for one in ints)
        seen.add(case.kernel.__name__)


def lower_case(case: AotCase, arch: int, ones: Collection[str]) -> None:
    """Only read the kernel, a fraction of what compiling takes, with these int arguments 1.

    Triton takes an int of 1 for a constant, on which methods of its tensors fail. Raises what
    Triton raises.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ir, make_backend

    target = GPUTarget("cuda", arch, 32)
    backend, context = make_backend(target), ir.context()
    source, options = _source(case, ones)
    options = backend.parse_options({**options, **source.parse_options()})
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(),
        context,
    )  # fmt: skip


def _source(case: AotCase, ones: Collection[str] = ()) -> tuple[Any, dict[str, Any]]:
    """The case as Triton's compiler takes it, and its options."""
    from triton.compiler import ASTSource

    from nsa.kernels.launch import OPTIONS

    names = list(case.kernel.arg_names)
    given = set(case.types) | set(case.constexprs)
    if given != set(names):
        raise ValueError(f"{case.name}: arguments differ: {sorted(given ^ set(names))}")
    constants = {**case.constexprs, **dict.fromkeys(ones, 1)}
    signature = {n: "constexpr" if n in constants else case.types[n] for n in names}
    aligned = [i for i, n in enumerate(names) if signature[n].startswith("*")]
    make = ASTSource
    if case.kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as make
    source = make(
        fn=case.kernel, signature=signature, constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )  # fmt: skip
    return source, OPTIONS | case.options


def usage(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of the one kernel in a cubin."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    registers = [int(n) for n in re.findall(r"REG:(\d+)", text)]
    stack = [int(n) for n in re.findall(r"STACK:(\d+)", text)]
    if not registers or not stack:
        raise RuntimeError(f"cuobjdump printed no resource usage: {text[-300:]!r}")
    return max(registers), max(stack)
