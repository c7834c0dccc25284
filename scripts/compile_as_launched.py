"""Compile all that the launchers launch for a GPU that is not here, over a grid of shapes.

    python scripts/compile_as_launched.py --arch 120            # some 10 minutes
    python scripts/compile_as_launched.py --arch 90 --quick     # one shape of prefill

Prefill forward and backward and decode steps are called on CPU tensors, with a driver of Triton's
that compiles for the architecture, checks shared memory as a real one does, and launches nothing.
nsa/kernels/aot.py compiles representative configurations in every test run; this takes all that
head sizes, groups, dtypes, block sizes, packing and determinism lead to, and the launchers' own
code with them. For sm_90 the kernels in Gluon are among them, whatever the release of Triton.

Exit code: 0 all compile and fit, 1 some do not, 2 usage.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # an eighth of the time

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from nsa import kernels
from nsa.kernels.aot import ARCHS, SHARED_LIMIT, usage

MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 170}
SPILLED = 336  # bytes of stack from which a kernel is listed; the slowest kept tile has as many
LONG = 320  # keys from which the kernels for long sequences serve
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class CompileOnly:
    """What Triton asks its driver for, for a GPU of capability `arch`."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.utils = self
        self.launcher_cls = lambda source, metadata: lambda *args: None

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMIT[self.arch]}

    def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024  # module, function, registers, spills, most threads


def pretend(arch: int, compiled: dict[str, tuple[str, int, int]]) -> None:
    """Everything in this process takes CPU tensors for ones of such a GPU from now on.

    compiled: by hash (name, registers, bytes of stack) of every kernel that a launch compiles.
    """
    from nsa.kernels.decode import step
    from nsa.kernels.prefill import block_attn_fwd_hopper, block_sums, hopper

    driver.set_active(CompileOnly(arch))
    for found in pkgutil.walk_packages(kernels.__path__, "nsa.kernels."):
        importlib.import_module(found.name)
    for name, module in list(sys.modules.items()):
        if name.startswith("nsa."):
            for attribute, value in (("arch_of", arch), ("sm_count", MULTIPROCESSORS[arch])):
                if hasattr(module, attribute):
                    setattr(module, attribute, lambda device, value=value: value)
    hopper.why_not = lambda device, use_gluon=None: "off" if use_gluon is False else None
    for least in (block_attn_fwd_hopper.SPLIT_KEYS, block_attn_fwd_hopper.SPLIT_QUERIES):
        least.update(dict.fromkeys(least, LONG))
    block_sums.LEAST_KEYS = (LONG - 32) // 16 + 1
    plan = step._plan  # it asks for the type of the device
    step._plan = lambda *sizes: plan(*sizes[:7], torch.device("cuda", 0), *sizes[8:])
    load = CompiledKernel._init_handles

    @functools.wraps(load)
    def counted(self: CompiledKernel) -> None:
        if self.module is None:
            compiled[self.hash] = (self.name, *usage(self.asm["cubin"]))
        load(self)

    CompiledKernel._init_handles = counted


def prefill(
    S: int, h: int, D: int, Dv: int, dtype: torch.dtype, packed: bool, l_sel: int,
    use_gluon: bool | None, deterministic: bool,
) -> None:  # fmt: skip
    """Forward and backward of the whole operator with h query heads on each of two groups, and the
    forward alone."""
    from nsa.kernels.prefill import nsa_prefill_triton

    make = lambda n, *tail: torch.zeros(1, n, *tail, dtype=dtype)
    n_cmp, kv = max((S - 32) // 16 + 1, 0), lambda n: (make(n, 2, D), make(n, 2, Dv))
    tensors = [make(S, 2 * h, D), *kv(n_cmp), *kv(S), *kv(S), make(S, 2 * h, 3)]
    more: dict[str, Any] = {}
    if packed:
        tensors = [x[0] for x in tensors]
        ends = lambda n: torch.tensor([0, n], dtype=torch.int32)
        more = dict(cu_seqlens=ends(S), cu_seqlens_cmp=ends(n_cmp), max_seqlen=S)
    for x in tensors:
        x.requires_grad_()
    torch.use_deterministic_algorithms(deterministic)
    run = lambda: nsa_prefill_triton(
        *tensors, l=32, d=16, l_sel=l_sel, n_sel=16, n_init=1, n_local=2, window=512,
        use_gluon=use_gluon, **more,
    )[0]  # fmt: skip
    out = run()
    torch.autograd.grad(out, tensors, torch.zeros_like(out))
    with torch.no_grad():
        run()


def turn(h: int, D: int, Dv: int, dtype: torch.dtype) -> None:
    from nsa.kernels.prefill import split_turned_triton

    qkv = torch.zeros(4, 2 * h * D + 6 * (D + Dv), dtype=dtype, requires_grad=True)
    parts = split_turned_triton(
        qkv, torch.arange(4), heads=2 * h, groups=2, d_k=D, d_v=Dv, rope_base=1e4
    )
    torch.autograd.grad(parts, qkv, [torch.zeros_like(x) for x in parts])


def decode(
    B: int, T: int, h: int, D: int, Dv: int, dtype: torch.dtype, max_len: int, page: int = 0,
    n_sel: int = 16, l_sel: int = 64,
) -> None:  # fmt: skip
    """One step over caches of which only the shapes count."""
    from nsa.kernels.decode import nsa_decode_triton

    make = lambda *shape: torch.zeros(*shape, dtype=dtype)
    kv = lambda n: (make(B, n, 2, D), make(B, n, 2, Dv))
    table = torch.zeros(B, 8, dtype=torch.int32) if page else None
    nsa_decode_triton(
        make(B, T, 2 * h, D), *kv(4), *kv(page or 8), *kv(page or 520), make(B, T, 2 * h, 3),
        torch.zeros(B, dtype=torch.int32), l=32, d=16, l_sel=l_sel, n_sel=n_sel, n_init=1,
        n_local=2, window=512, max_len=max_len, block_table=table, window_ring=not page,
        counters=torch.zeros(B, 2, 32, dtype=torch.int32), use_cluster=False,
    )  # fmt: skip


Call = tuple[Callable[..., None], tuple]


def grid(arch: int, quick: bool) -> Iterator[Call]:
    """Calls, each a function above and its arguments."""
    sizes = [(128, 128)] if quick else [(64, 64), (128, 128), (192, 128), (256, 256)]
    heads = [16] if quick else [1, 2, 4, 8, 16, 32]
    shapes = [(256, h, *size, BF16) for size in sizes for h in heads]
    if arch == 90:
        for h in (16, 4) if quick else (16, 8, 4):
            yield prefill, (LONG, h, 128, 128, BF16, False, 64, None, False)
    if not quick:
        shapes += [(256, 16, 128, 128, F16), (32, 16, 128, 128, BF16), (32, 2, 32, 32, F16)]
        shapes += [(256, 4, D, Dv, F32) for D, Dv in sizes]
    gluon = [None, False] if arch == 90 and not quick else [None]
    for shape in shapes:
        blocks = [16, 32, 64, 128] if shape[2] == 128 and not quick else [64]
        yield turn, shape[1:]
        for packed, l_sel, use, fixed in itertools.product(
            [False, True], blocks, gluon, [False] if quick else [False, True]
        ):
            yield prefill, (*shape, packed, l_sel, use, fixed)
    if quick:
        yield decode, (1, 1, 16, 128, 128, BF16, 8192)
        return
    rows = [(1, 1), (1, 4), (1, 16), (2, 16), (4, 16), (8, 16), (1, 128)]
    for (D, Dv), (T, h) in itertools.product(sizes, rows):
        for batch, max_len in [(1, 8192), (64, 32768)]:
            yield decode, (batch, T, h, D, Dv, BF16, max_len)
    for max_len, n_sel in itertools.product((20, 1000, 131072, 1 << 20), (3, 16, 64)):
        yield decode, (1, 1, 16, 128, 128, BF16, max_len, 0, n_sel)
    for page in (16, 64, 256):
        yield decode, (2, 1, 16, 128, 128, BF16, 8192, page)
    for l_sel in (16, 32, 128):
        yield decode, (1, 1, 16, 128, 128, BF16, 8192, 0, 16, l_sel)


def some_calls() -> Iterator[Call]:
    """Calls whose kernels a lock keeps in mind: few, of all kinds."""
    sizes, heads = [(64, 64), (128, 128), (192, 128)], (2, 4, 12, 16)
    for size, h, packed in itertools.product(sizes, heads, (False, True)):
        yield prefill, (LONG, h, *size, BF16, packed, 64, None, False)
    for l_sel, use, fixed in [(16, None, False), (128, None, False), (64, False, False),
                              (64, None, True)]:  # fmt: skip
        yield prefill, (256, 16, 128, 128, BF16, False, l_sel, use, fixed)
    yield prefill, (32, 4, 128, 128, F32, False, 64, None, False)
    for size in sizes:
        yield turn, (16, *size, BF16)
        for T, h, max_len, page in [(1, 16, 8192, 0), (4, 4, 131072, 0), (1, 16, 8192, 64)]:
            yield decode, (2, T, h, *size, BF16, max_len, page)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, required=True, choices=ARCHS, metavar="SM",
                        help=f"compute capability, from {', '.join(map(str, ARCHS))}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one shape of prefill")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    compiled: dict[str, tuple[str, int, int]] = {}
    pretend(args.arch, compiled)
    calls, unserved, failed = 0, 0, 0
    for call, shape in grid(args.arch, args.quick):
        known = set(compiled)
        calls += 1
        try:
            call(*shape)
        except NotImplementedError as error:
            unserved += 1
            print(f"no kernel: {call.__name__}{shape}: {error}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED: {call.__name__}{shape}: {type(error).__name__}: {error}", flush=True)
        for key in compiled.keys() - known:
            name, registers, stack = compiled[key]
            if stack > SPILLED:
                print(f"{stack} B of stack, {registers} registers: {name} for "
                      f"{call.__name__}{shape}", flush=True)  # fmt: skip
    print(f"sm_{args.arch}, triton {triton.__version__}: {len(compiled)} kernels of {calls} calls, "
          f"{failed} failed, {unserved} without a kernel")  # fmt: skip
    if args.quick:
        print(" ".join(sorted({name for name, _, _ in compiled.values()})))
    return 1 if failed else 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:  # a stale entry would hide a compiler error
        os.environ["TRITON_CACHE_DIR"] = cache
        sys.exit(main())
