"""Compile kernels ahead of time for GPUs that are not here, and read what they need.

Each kernel module offers aot_cases(arch) -> list[AotCase]: the configurations its launchers would
choose on that architecture. compile_case() runs Triton's compiler and ptxas for it; no driver, no
GPU. It cannot run under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
import subprocess
import tempfile
import textwrap
import types
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# Every kernel package offers its configurations in a module aot_cases.
MODULES = sorted(
    f"nsa.kernels.{path.parent.name}.aot_cases"
    for path in Path(__file__).parent.glob("*/aot_cases.py")
)
ARCHS = (80, 86, 89, 90, 100, 120)

# Shared memory that one block may use, bytes (CUDA C++ programming guide, compute capabilities).
SHARED_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


@dataclass(frozen=True)
class AotCase:
    """One kernel configuration. types: Triton type per runtime argument ("*bf16", "i32", "fp32").

    gluon: a kernel of @gluon.jit; the types of its descriptors name their layouts. max_registers:
    of a thread at the start, where the launcher sets it. max_spill: bytes of stack the case may
    use. ptxas keeps a few scalars there at times; a tile that does not fit the registers takes
    hundreds. parting: what the PTX says where warps begin to go ways of their own; the compiler
    must put no barrier of all of them behind it.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    max_spill: int = 32
    gluon: bool = False
    max_registers: int | None = None
    parting: str | None = None


class Resources(NamedTuple):
    """What one program needs: shared memory in bytes, registers per thread, stack in bytes; and how
    many barriers of all warps there are behind AotCase.parting."""

    shared: int
    registers: int
    stack: int
    barriers: int = 0

    def problems(self, arch: int, max_spill: int = 32) -> list[str]:
        """Why the kernel would fail or crawl on `arch`; empty if it fits."""
        found = []
        if self.shared > SHARED_LIMIT[arch]:
            found.append(f"{self.shared} B of shared memory > {SHARED_LIMIT[arch]} B")
        if self.stack > max_spill:
            found.append(f"{self.stack} B of registers spilled > {max_spill} B")
        if self.barriers:
            found.append(f"{self.barriers} barriers of all warps where they go their own ways")
        return found


def cases_of(module: str, arch: int) -> list[AotCase]:
    """The configurations of one of MODULES for an architecture."""
    return importlib.import_module(module).aot_cases(arch)


def content(case: AotCase, arch: int) -> str:
    """A hash of all that a case is compiled from, except for Triton's release: see scripts/lock.py.
    """
    given = [sorted(x.items()) for x in (case.types, case.constexprs)]
    options = (case.num_warps, case.num_stages, case.gluon, case.max_registers, case.parting)
    parts = [*_code(case.kernel, set()), repr(given), repr(options), str(arch)]
    return _hash("\n".join(parts))


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
    registers, stack = usage(made.asm["cubin"])
    barriers = 0
    if case.parting:
        behind = made.asm["ptx"].partition(case.parting)[2]
        if not behind:
            raise ValueError(f"{case.name}: no {case.parting!r} in its PTX")
        barriers = behind.count("bar.sync")
    used = Resources(made.metadata.shared, registers, stack, barriers)
    return used, _hash(re.sub(r"//.*", "", made.asm["ptx"]))


def compiled(case: AotCase, arch: int) -> Any:
    """What Triton's compiler makes of a case for compute capability `arch`; its `asm` has the
    texts."""
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
    if case.gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as make
    source = make(
        fn=case.kernel, signature=signature, constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )  # fmt: skip
    options = OPTIONS | {"num_warps": case.num_warps, "num_stages": case.num_stages}
    if case.max_registers:
        options["maxnreg"] = case.max_registers
    return source, options


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
