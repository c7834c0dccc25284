"""Compile all that the launchers launch for a GPU that is not here, over a grid of shapes.

    python scripts/compile_as_launched.py --arch 120            # some 10 minutes
    python scripts/compile_as_launched.py --arch 90 --quick     # one shape of prefill

Prefill forward and backward and decode steps are called on CPU tensors, with a driver of Triton's
that compiles for the architecture, checks shared memory as a real one does, and launches nothing.
Every test run compiles configurations() of fewer calls; this takes all that head sizes, groups,
dtypes, block sizes, packing and determinism lead to, and the launchers' own code with them. For
sm_90 the kernels in Gluon are among them, whatever the release of Triton.

Exit code: 0 all compile and fit, 1 some do not, 2 usage.
"""

import functools
import importlib
import itertools
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # an eighth of the time

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime import driver

from bench.records import doc_parser
from nsa import Flags, NSAAttention, NSAConfig, kernels, kvcache
from nsa.blocks import num_sel_blocks
from nsa.compress import make_compression
from nsa.fp8 import E4M3, KVCacheDtype
from nsa.kernels import prefill as whole
from nsa.kernels.decode import nsa_decode_triton, parallel, step
from nsa.kernels.launch import Launch, planning
from nsa.kernels.prefill import head_padding, hopper, limits
from nsa.kernels.prefill.blocks import tile_blocks
from nsa.kernels.prefill.choice import score_in_attention_hopper
from nsa.kernels.triton_sel_kernel import sel_fwd, selection_ranges_triton
from scripts.aot import ARCHS, SHARED_LIMIT, AotCase, case_of, usage

MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 170}
SPILLED = 336  # bytes of stack from which a kernel is listed; the slowest kept tile has as many
# Keys from which the kernels for long sequences serve: more than queries choose, also of 16 blocks
# of 128, so that selection goes by blocks.
LONG = 2304
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def compile_only(arch: int) -> SimpleNamespace:
    """Return a driver for Triton that answers for a GPU of capability `arch`."""
    found = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_active_torch_device=lambda: torch.device("cpu"),
        get_device_properties=lambda device: {"max_shared_mem": SHARED_LIMIT[arch]},
        launcher_cls=lambda source, metadata: lambda *args: None,
        # Module, function, registers, spills, most threads.
        load_binary=lambda *args: (1, 1, 0, 0, 1024),
    )  # fmt: skip
    found.utils = found
    return found


def pretend(arch: int, compiled: dict[str, tuple[str, int, int]]) -> None:
    """Let everything in this process take CPU tensors for ones of such a GPU from now on.

    compiled gets (name, registers, bytes of stack) of every kernel that a launch compiles, by hash.
    """
    driver.set_active(compile_only(arch))
    for found in pkgutil.walk_packages(kernels.__path__, "nsa.kernels."):
        importlib.import_module(found.name)
    for name, module in list(sys.modules.items()):
        if name.startswith("nsa."):
            for attribute, value in (("arch_of", arch), ("sm_count", MULTIPROCESSORS[arch])):
                if hasattr(module, attribute):
                    setattr(module, attribute, lambda device, value=value: value)
    hopper.why_not = lambda device, use=None: None if arch == 90 and use is not False else "off"
    for least in (tile_blocks.SPLIT_KEYS, tile_blocks.SPLIT_QUERIES):
        least.update(dict.fromkeys(least, LONG))
    head_padding.LEAST_TRAINED = LONG
    score_in_attention_hopper.LEAST_KEYS = (LONG - 32) // 16 + 1
    sel_fwd.check_kernel_inputs = lambda *args: None  # which asks for a GPU
    plan = step._plan  # it asks for the type of the device
    step._plan = lambda p, *how: plan(p._replace(device=torch.device("cuda", 0)), *how)
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
    """Call the whole operator with h query heads on each of two groups: forward and backward, and
    the forward alone."""
    make = lambda n, *tail: torch.zeros(1, n, *tail, dtype=dtype)
    n_cmp, kv = max((S - 32) // 16 + 1, 0), lambda n: (make(n, 2, D), make(n, 2, Dv))
    tensors = [make(S, 2 * h, D), *kv(n_cmp), *kv(S), *kv(S), make(S, 2 * h, 3)]
    more: dict[str, Any] = {}
    if packed:
        tensors = [x[0] for x in tensors]
        more = dict(cu_seqlens=torch.tensor([0, S], dtype=torch.int32), max_seqlen=S)
    for x in tensors:
        x.requires_grad_()
    torch.use_deterministic_algorithms(deterministic)
    run = lambda: whole.nsa_prefill_triton(
        *tensors, l=32, d=16, l_sel=l_sel, n_sel=16, n_init=1, n_local=2, window=512,
        use_gluon=use_gluon, **more,
    )[0]  # fmt: skip
    out = run()
    torch.autograd.grad(out, tensors, torch.zeros_like(out))
    with torch.no_grad():
        run()


def turn(h: int, D: int, Dv: int, dtype: torch.dtype) -> None:
    qkv = torch.zeros(4, 2 * h * D + 6 * (D + Dv), dtype=dtype, requires_grad=True)
    sizes = dict(heads=2 * h, groups=2, d_k=D, d_v=Dv, rope_base=1e4)
    parts = whole.split_turned_triton(qkv, torch.arange(4), **sizes)
    torch.autograd.grad(parts, qkv, [torch.zeros_like(x) for x in parts])


def decode(
    B: int, T: int, h: int, D: int, Dv: int, dtype: torch.dtype, max_len: int, page: int = 0,
    n_sel: int = 16, l_sel: int = 64, fp8: bool = False,
) -> None:  # fmt: skip
    """Take one decode step over caches of which only the shapes count."""
    make = lambda *shape: torch.zeros(*shape, dtype=dtype)
    kv = lambda n: tuple(make(B, n, 2, x).to(E4M3 if fp8 else dtype) for x in (D, Dv))
    descales = dict.fromkeys(("k_descale", "v_descale"), torch.ones(B, 2)) if fp8 else {}
    table = torch.zeros(B, 8, dtype=torch.int32) if page else None
    nsa_decode_triton(
        make(B, T, 2 * h, D), *kv(4), *kv(page or 8), *kv(page or 520), make(B, T, 2 * h, 3),
        torch.zeros(B, dtype=torch.int32), l=32, d=16, l_sel=l_sel, n_sel=n_sel, n_init=1,
        n_local=2, window=512, max_len=max_len, block_table=table, window_ring=not page,
        counters=torch.zeros(B, 2, 32, dtype=torch.int32), use_cluster=False, **descales,
    )  # fmt: skip


def blocks(
    S: int, h: int, D: int, Dv: int, dtype: torch.dtype, groups: int, packed: bool, return_lse: bool
) -> None:
    """Call selection by blocks alone, forward and backward, on the kernels for any GPU. Many groups
    bring it to tiles of keys and unions of choices with fewer tokens."""
    lead = (S,) if packed else (1, S)
    make = lambda *tail: torch.zeros(*lead, *tail, dtype=dtype, requires_grad=True)
    q, k, v = make(groups * h, D), make(groups, D), make(groups, Dv)
    ends = dict(cu_seqlens=torch.tensor([0, S], dtype=torch.int32), max_seqlen=S) if packed else {}
    chosen = torch.zeros(*lead, groups, 16, dtype=torch.int32)
    out = whole.selection_blocks_triton(
        q, k, v, chosen, block_size=64, use_gluon=False, return_lse=return_lse,
        n_blocks=None if packed else num_sel_blocks(S, 64), **ends,
    )  # fmt: skip
    outs = out if return_lse else (out,)
    torch.autograd.grad(outs, (q, k, v), [torch.zeros_like(x) for x in outs])


def spans(h: int, D: int, Dv: int, dtype: torch.dtype) -> None:
    """Call compressed and sliding attention alone, forward and backward, and the choice of blocks
    by a few queries after a quarter of a million tokens."""
    make = lambda n, *tail: torch.zeros(1, n, *tail, dtype=dtype, requires_grad=True)
    q, k, v = make(LONG, 2 * h, D), make(LONG, 2, D), make(LONG, 2, Dv)
    out, _ = whole.compressed_attention_triton(q, k[:, :19], v[:, :19], l=32, d=16)
    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    out, _ = whole.sliding_attention_triton(q, k, v, window=100)
    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    k_cmp, lse = torch.zeros(1, 16384, 2, D, dtype=dtype), torch.zeros(1, 8, 2 * h)
    whole.select_blocks_triton(
        q[:, :8].detach(), k_cmp, lse, l=32, d=16, l_sel=64, n_sel=16, q_start=(1 << 18) - 8
    )


def ranges(
    h: int, D: int, Dv: int, dtype: torch.dtype, path: str, n: int, rows: int = 64,
    kind: torch.dtype = torch.int32, group: bool = False,
) -> None:  # fmt: skip
    """Call selection by n ranges of each of so many rows: forward and backward (with one range
    also the lse and its gradient), and the forward alone."""
    make = lambda *tail: torch.zeros(1, *tail, dtype=dtype, requires_grad=True)
    tensors = make(rows, 2, h, D), make(2, 1024, D), make(2, 1024, Dv)
    given = torch.zeros(1, rows, 2, n, 2, dtype=kind)
    given[..., 1] = 64
    if n > 1:  # rows of two lengths
        given[:, ::2, ..., 1] = 40
    run = lambda return_lse: selection_ranges_triton(
        *tensors, given, path=path, flags=Flags(sel_triton_group=group), return_lse=return_lse
    )
    outs = run(True) if n == 1 else (run(False),)
    torch.autograd.grad(outs, tensors, [torch.zeros_like(x) for x in outs])
    with torch.no_grad():
        run(False)


def append(
    h: int, D: int, Dv: int, dtype: torch.dtype, T: int, phi: Any, kind: KVCacheDtype = "auto"
) -> None:
    """Append T tokens, which may fill a block, to a cache."""
    config = NSAConfig(dim=64, heads=2 * h, groups=2, d_k=D, d_v=Dv, phi=phi)
    layer = NSAAttention(config).to(dtype)
    with torch.no_grad():
        cache = layer.make_cache(2, 1024, max_step=T, kv_cache_dtype=kind)
        cache.emit_always = True
        qkv = layer.qkv(torch.zeros(2, T, 64, dtype=dtype))
        cache.append_projected(qkv, layer.phi_k, layer.phi_v)


def into_pages(
    h: int, D: int, Dv: int, dtype: torch.dtype, T: int, phi: Any, page: int, ring: bool,
    fp8: bool = False,
) -> None:  # fmt: skip
    """Append T tokens of each sequence, which may fill blocks, to a caller's caches."""
    config = NSAConfig(dim=64, heads=2 * h, groups=2, d_k=D, d_v=Dv)
    make = lambda n, x: torch.zeros(2, n, 2, x, dtype=dtype)
    kv = lambda n: [make(n, x).to(E4M3 if fp8 else dtype) for x in (D, Dv)]
    held = [*kv(page // 16 if page else 63), *kv(page or 1024), *kv(page or 1024)]
    new = dict(zip(("k_sel", "v_sel", "k_win", "v_win", "k_raw", "v_raw"),
                   [make(T, x) for _ in range(3) for x in (D, Dv)], strict=True))  # fmt: skip
    table = torch.zeros(2, 8, dtype=torch.int32) if page else None
    one = torch.ones(2, 2)
    caches = kvcache.KVCaches(
        *held, torch.ones(2, dtype=torch.int32), table, ring, config.sizes(), dtype, *held[4:],
        *([one, one] if fp8 else []),
    )  # fmt: skip
    phis = [make_compression(phi, x, 32, 16).to(dtype) for x in (D, Dv)]
    kvcache.APPEND[kvcache.Route.TRITON](dict(caches=caches, new=new, made=phis), Flags())


def over_ranks(h: int, D: int, Dv: int, dtype: torch.dtype, W: int, blocks: int) -> None:
    """Call what a decode step over W ranks launches between its exchanges, with so many blocks to
    choose from."""
    config = NSAConfig(dim=64, heads=2 * h, groups=2, d_k=D, d_v=Dv)
    make = lambda *shape: torch.zeros(*shape, dtype=dtype)
    lens, rows = torch.ones(1, dtype=torch.int32), blocks // W * 4
    spans, _ = parallel.spans(lens, -1, 1, config, 0, W, 520)
    lses = torch.zeros(W, 1, 1, 2 * h)
    parallel.probabilities(make(1, 1, 2 * h, D), make(1, 64, 2, D), lses, spans, 64, 1.0)
    parallel.choose(torch.zeros(W, 1, 1, 2, rows), lens, -1, config, 0)
    parts = torch.zeros(W, 2, 1, 1, 2 * h, Dv + 1)
    parallel.merge(parts, make(1, 1, 2 * h, Dv), make(1, 1, 2 * h, 3))


def fp8_of_ranks(D: int, Dv: int, dtype: torch.dtype) -> None:
    """Call what makes numbers of FP8 rows for a step over ranks: of all, some, each query's own."""
    k, v = (torch.zeros(1, 64, 2, x).to(E4M3) for x in (D, Dv))
    one, spans = torch.ones(1, 2), torch.zeros(1, 1, 2, 16, 2, dtype=torch.int32)
    for where, apart in ((None, False), (spans[:, :, :, :1], False), (spans, True)):
        parallel.numbers(k, v, one, one, dtype, 64, where, apart)


Call = tuple[Callable[..., None], tuple]


def grid(arch: int, quick: bool) -> Iterator[Call]:
    """Yield calls for the command line, each a function above and its arguments."""
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
    """Yield the calls whose kernels nsa/tests/locks/calls.txt names: few, of all kinds."""
    sizes, heads = [(64, 64), (128, 128), (192, 128)], (2, 4, 12, 16)
    for size, h, packed in itertools.product(sizes, heads, (False, True)):
        yield prefill, (LONG, h, *size, BF16, packed, 64, None, False)
    for l_sel, use, fixed in [(16, None, False), (32, None, False), (128, None, False),
                              (64, False, False), (64, None, True)]:  # fmt: skip
        yield prefill, (16 * l_sel + 64, 16, 128, 128, BF16, False, l_sel, use, fixed)
    for packed in (False, True):  # where each query chooses all blocks
        yield prefill, (256, 16, 128, 128, BF16, packed, 64, None, False)
    yield prefill, (1088, 4, 128, 128, F32, False, 64, None, False)
    yield into_pages, (16, 128, 128, BF16, 1, "mlp", 64, False)
    for size in sizes:
        yield turn, (16, *size, BF16)
        for T, h, max_len, page in [(1, 16, 8192, 0), (4, 4, 131072, 0), (1, 16, 8192, 64)]:
            yield decode, (2, T, h, *size, BF16, max_len, page)


def compiled_calls(arch: int) -> Iterator[Call]:
    """Yield the calls whose kernels every test run compiles: on sm_90 and sm_120 all kinds, on the
    others, which have the tiles of one of these, fewer."""
    every, most = arch in (90, 120), (128, 128)
    yield prefill, (LONG, 16, *most, BF16, False, 64, None, False)
    yield prefill, (256, 16, *most, BF16, False, 64, None, False)
    yield turn, (16, *most, BF16)
    yield blocks, (4160, 4, *most, BF16, 32, False, False)
    yield blocks, (256, 16, *most, BF16, 64, True, True)
    yield ranges, (8, *most, BF16, "ranges", 16)
    yield ranges, (8, *most, BF16, "dense", 1, 64, torch.int64)
    yield ranges, (4, 64, 64, BF16, "dense", 1, 1)  # few rows, whose keys are split
    yield ranges, (4, 64, 64, BF16, "varlen", 1, 64, torch.int32, True)
    for batch, length in ((1, 8192), (64, 32768)):
        yield decode, (batch, 1, 16, *most, BF16, length)
    for phi in ("mlp", "mean"):
        yield append, (16, *most, BF16, 1, phi)
    yield into_pages, (16, *most, BF16, 1, "mlp", 64, False)
    yield over_ranks, (16, *most, BF16, 2, 1 << 14)
    if arch == 80:  # where these left registers on the stack
        for S, h in ((LONG, 32), (LONG, 64), (256, 64)):
            yield prefill, (S, h, 192, 128, BF16, False, 64, None, False)
        yield decode, (1, 1, 128, 256, 256, BF16, 8192)
    if every or arch == 80:
        yield prefill, (LONG, 4, *most, F32, False, 64, None, False)
        yield ranges, (16, 256, 256, F32, "ranges", 16)
    if not every:
        return
    yield prefill, (LONG, 4, *most, BF16, True, 64, None, False)
    yield prefill, (LONG, 16, 192, 128, BF16, True, 64, None, False)
    yield prefill, (LONG, 16, 256, 256, BF16, False, 64, None, False)
    yield prefill, (LONG, 4, 64, 64, F16, True, 64, None, False)
    if arch == 90:
        yield prefill, (LONG, 16, *most, BF16, False, 64, None, True)
        yield prefill, (LONG, 16, *most, BF16, True, 64, False, False)
        for h in (1, 5, 8):
            yield prefill, (LONG, h, *most, BF16, h > 1, 64, None, False)
    else:  # where memory is scarcest
        most_heads = limits.most_heads(arch, *most, 2)
        yield prefill, (LONG, most_heads, *most, BF16, False, 64, None, False)
    for h in (4, 16):
        yield spans, (h, *most, BF16)
    yield turn, (3, 192, 128, BF16)
    for h in (1, 8):
        yield blocks, (4160, h, *most, BF16, 32, False, False)
    for h, D, Dv, dtype in (
        (4, 64, 64, BF16), (8, 128, 128, F32), (16, 192, 128, F16), (16, 256, 256, BF16),
        (64, 256, 256, BF16), (64, 256, 256, F32),
    ):  # fmt: skip
        yield ranges, (h, D, Dv, dtype, "ranges", 16)
    for group in (False, True):
        yield ranges, (4, 64, 64, BF16, "varlen", 2, 64, torch.int32, group)
    for D, Dv, dtype, T, page in (
        (192, 128, BF16, 4, 64), (256, 256, F16, 1, 0), (64, 64, F32, 1, 0), (192, 128, BF16, 8, 0),
        (256, 256, BF16, 4, 0),
    ):  # fmt: skip
        yield decode, (2, T, 16, D, Dv, dtype, 32768, page)
    for batch, length in ((1, 4096), (1, 1 << 20), (256, 8192)):
        yield decode, (batch, 1, 16, *most, BF16, length)
        yield decode, (batch, 1, 16, *most, BF16, length, 0, 16, 64, True)
    yield decode, (2, 4, 16, 192, 128, BF16, 32768, 64, 16, 64, True)
    yield decode, (2, 1, 12, *most, BF16, 2200, 0, 8, 128)  # blocks of 128, few to choose from
    for phi in ("mlp", "mean"):
        yield append, (16, *most, BF16, 1, phi, "fp8_e4m3")
        yield into_pages, (16, *most, BF16, 1, phi, 0, phi == "mlp", True)
        yield into_pages, (16, 192, 128, F16, 4, phi, 64, phi == "mlp")
    yield over_ranks, (8, 192, 128, F16, 8, 512)
    yield over_ranks, (16, *most, BF16, 2, 1 << 15)
    yield fp8_of_ranks, (*most, BF16)
    for D, Dv, T in ((192, 128, 2), (256, 256, 64)):
        yield append, (16, D, Dv, BF16, T, "mlp")


def planned(calls: Iterator[Call]) -> Iterator[tuple[Call, list[Launch] | NotImplementedError]]:
    """Yield what each call would launch, or why there is no kernel. Call pretend() first."""
    step.prepare_planned = lambda *args: None  # no graph is captured here
    torch.autograd.set_multithreading_enabled(False)
    for call, shape in calls:
        with planning() as found:
            try:
                call(*shape)
            except NotImplementedError as error:
                yield (call, shape), error
                continue
        yield (call, shape), found.launches


def configurations(arch: int) -> list[AotCase]:
    """Return what compiled_calls() launch, each once. Call pretend() first."""
    found: dict[str, AotCase] = {}
    for call, launches in planned(compiled_calls(arch)):
        if isinstance(launches, NotImplementedError):
            raise ValueError(f"{call} has no kernel") from launches
        for case in map(case_of, launches):
            found.setdefault(case.name, case)
    return list(found.values())


def main(argv: list[str] | None = None) -> int:
    parser = doc_parser(__doc__)
    archs = f"compute capability, from {', '.join(map(str, ARCHS))}"
    parser.add_argument("--arch", type=int, required=True, choices=ARCHS, metavar="SM", help=archs)
    parser.add_argument("--quick", action="store_true", help="one shape of prefill")
    args = parser.parse_args(argv)
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
