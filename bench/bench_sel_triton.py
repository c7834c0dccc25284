"""Triton selection attention against packed SDPA, row by row: N rows of H heads over L keys each.

    python bench/bench_sel_triton.py                                  # a sensible default
    python bench/bench_sel_triton.py --route 1                        # routes as callers get them
    python bench/bench_sel_triton.py --N 1024 --H 8 --D 128 --Dv 128 --L_list 64,256,1024 \\
        --dist mixed --streams 2 --csv sel.csv
    python bench/bench_sel_triton.py --N 64,1024 --H 2,4,8 --D 64,128 # every combination
    python bench/bench_sel_triton.py --decode 1 --n_sel 8,16          # one query per sequence
    python bench/bench_sel_triton.py --sweep 3                        # best 3 tiles per L

Modes (column `mode`):
  dense    sel_attn_fwd_dense on packed K, V [N, L, D]            (--dist few)
  varlen   sel_attn_fwd_varlen on the same keys as packed rows     (--dist many, mixed)
  ranges   the wrapper's default: K, V read in place through ranges, one cache for all rows
  decode   ranges with S = 1: a cache per sequence, n_sel blocks of L / n_sel keys, the last of
           which ends in its middle, at t; by default 2 and 4 heads, 8 and 16 blocks
  route    nsa.selection_attention on Triton, cleaning of ranges included, against its fallback,
           packing plus SDPA (backend "sdpa"), on one cache: what sel_triton_min_L chooses between.
           Times are of the device's kernels (timer `kernels`), since packing waits for the device
           in its middle; wall_speedup and its lower bound wall_low are what the host sees

The baseline of every other mode is the fastest that torch's SDPA offers on keys that are packed
already: each backend as GQA and with the heads as query rows of one head. What packing costs is a
column of its own (pack_ms); these rows compare kernels and decide nothing. Distributions of a row's
L keys: few [(0, L)]; many, 8 equal spans; mixed, 2, 4 or 8 random spans. Inputs are N(0, 1) with
fixed seeds; parity is checked before and after timing.

Exit code: 0 timed, 1 a result is wrong, 2 usage, 3 nothing could be run.
"""

import itertools
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
from torch import Tensor

from bench.cases import truths
from bench.clock import CudaClock, busy_clock
from bench.main import bench_parser, card_tools, parsed, time_cases
from bench.provenance import COLUMNS as PROVENANCE
from bench.provenance import provenance
from bench.records import BenchRow, emit, integers, positive, say, shrunk, write_csv
from bench.sdpa_baselines import packed_baselines, promised
from bench.timing import Budget, Case, Contender, Unbuilt
from nsa import selection_attention
from nsa.errors import is_sticky
from nsa.flags import get_flags

DISTRIBUTIONS = ("few", "many", "mixed")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MAX_STREAMS = 32
DEVICE = "cuda"
CACHE_LEN = 8192  # keys of the cache that `ranges` rows point into
COLUMNS = (
    "mode", "N", "H", "D", "Dv", "L", "dist", "nspans", "streams", "tri_ms", "ref_ms", "speedup",
    "ci_low", "ci_high", "mae", "max_abs", "parity", "bytes", "gbs", "peak_frac", "bound",
    "base_peak_frac", "base_ran", "pack_ms", "wall_ms", "base_wall_ms",
    "wall_speedup", "wall_low", "launch_bound",
    "first_call_ms", "n", "path", "baseline", "cache", "status", "why",
    "dtype", "sm_mhz", "power_w", "n_sel", "run", *PROVENANCE,
)  # fmt: skip
SWEEP_COLUMNS = (
    "mode", "dist", "N", "H", "D", "Dv", "L", "dtype", "block_l", "block_d", "block_dv",
    "num_warps", "num_stages", "rank", "ms", "status", "why", *PROVENANCE,
)  # fmt: skip
SWEEP = dict(
    block_l=(64, 128, 256), block_d=(32, 64, 128), num_warps=(2, 4, 8), num_stages=(1, 2, 3)
)


def spans_of(dist: str, L: int, n_keys: int, gen: torch.Generator) -> list[tuple[int, int]]:
    """Disjoint [start, end) of one row in a cache of n_keys; their lengths sum to L."""
    if dist == "few":
        return [(0, L)]
    if dist == "many":
        n = min(8, L)
        lengths = [L // n + (i < L % n) for i in range(n)]
    else:
        n = min([2, 4, 8][int(torch.randint(3, (1,), generator=gen))], L)
        cuts = (torch.randperm(L - 1, generator=gen)[: n - 1] + 1).sort().values.tolist()
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, L], strict=True)]
    free = torch.randint(n_keys - L + 1, (n,), generator=gen).sort().values.tolist()
    starts = [gap + sum(lengths[:i]) for i, gap in enumerate(free)]
    return [(at, at + length) for at, length in zip(starts, lengths, strict=True)]


def block_spans(L: int, n_sel: int, n_keys: int, gen: torch.Generator) -> list[tuple[int, int]]:
    """What a decode step attends: n_sel blocks of L / n_sel keys, the last clamped at its token t.

    The first block, the last two and random ones between; t is in the middle of the last one, so
    that L minus half a block of keys are left.
    """
    size = L // n_sel
    last = n_keys // size - 1
    some = torch.randperm(last - 2, generator=gen)[: n_sel - 3] + 1
    end = (last + 1) * size - size // 2
    blocks = sorted({0, last - 1, last, *some.tolist()})
    return [(b * size, min((b + 1) * size, end)) for b in blocks]


class Rows:
    """Inputs of one case: queries [N, H, D], keys and values, the rows' ranges, packed copies.

    modes "ranges" and "route" keep K and V in one cache, "decode" in a cache per row; the packed
    copies are gathered anew at every refill.
    """

    def __init__(
        self, mode: str, dist: str, N: int, H: int, D: int, Dv: int, L: int, dtype: torch.dtype,
        n_sel: int = 16,
    ) -> None:  # fmt: skip
        self.mode = mode
        nominal = L
        if mode == "decode":  # the last block is cut
            L -= L // n_sel // 2
        self.L = L
        like = {"dtype": dtype, "device": DEVICE}
        self.q = torch.empty(N, H, D, **like)
        self.k, self.v = torch.empty(N, L, D, **like), torch.empty(N, L, Dv, **like)
        self.cu = torch.arange(N + 1, device=DEVICE, dtype=torch.int32) * L
        self.cache: list[Tensor] = []
        self.nspans = 1
        if mode not in ("ranges", "route", "decode"):
            return
        caches = N if mode == "decode" else 1
        n_keys = max(4096, 2 * nominal) if mode == "decode" else max(CACHE_LEN, 2 * L)
        self.cache = [torch.empty(caches, 1, n_keys, x, **like) for x in (D, Dv)]
        gen = torch.Generator().manual_seed(N * 1009 + L)
        spans = partial(block_spans, nominal, n_sel) if mode == "decode" else partial(
            spans_of, dist, L)  # fmt: skip
        rows = [spans(n_keys, gen) for _ in range(N)]
        self.nspans = max(map(len, rows))
        padded = [[*r, *[(0, 0)] * (self.nspans - len(r))] for r in rows]
        ranges = torch.tensor(padded, dtype=torch.int32, device=DEVICE)
        shape = (N, 1, 1) if mode == "decode" else (1, N, 1)
        self.ranges = ranges.view(*shape, self.nspans, 2)
        at = torch.tensor([[i for a, b in r for i in range(a, b)] for r in rows], device=DEVICE)
        owner = torch.arange(N, device=DEVICE)[:, None] if mode == "decode" else 0
        self.selected = (owner * n_keys + at).flatten()  # rows of all caches

    def refill(self, seed: int) -> None:
        gen = torch.Generator(DEVICE).manual_seed(seed)
        for x in (self.q, *(self.cache or (self.k, self.v))):
            x.normal_(generator=gen)
        if self.cache:
            self.pack()

    def renew(self, seed: int) -> None:
        """Other queries on the same keys."""
        self.q.normal_(generator=torch.Generator(DEVICE).manual_seed(seed))

    def pack(self) -> None:
        """Gather the selected keys of every row: what a packed baseline needs first."""
        for packed, cache in zip((self.k, self.v), self.cache, strict=True):
            width = cache.shape[-1]
            flat, out = cache.view(-1, width), packed.view(-1, width)
            torch.index_select(flat, 0, self.selected, out=out)

    def inputs(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.cache]

    @torch.no_grad()
    def exact(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """softmax(q k^T / sqrt(D)) v row by row, in `dtype`."""
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        return torch.softmax(q @ k.transpose(1, 2) * self.q.shape[-1] ** -0.5, -1) @ v

    @property
    def bytes_needed(self) -> int:
        """Queries, output and every key and value once, however many rows share it."""
        size, N, H = self.q.element_size(), *self.q.shape[:2]
        width = self.k.shape[-1] + self.v.shape[-1]
        keys = N * self.L
        if self.mode in ("ranges", "route"):
            keys = int(torch.unique(self.selected).numel())
        return size * width * (keys + N * H)


Run = Callable[[slice], Tensor]


def candidate(rows: Rows, flags: Any, tiles: Any = None) -> tuple[Run, str, str]:
    """(call on a slice of the rows, path, the kernel that must have run)."""
    from nsa.kernels import triton_sel_kernel
    from nsa.kernels.triton_sel_kernel import sel_fwd

    tail = "_group" if flags.sel_triton_group else ""
    if rows.mode in ("dense", "varlen"):
        name = f"sel_attn_fwd_{rows.mode}{tail}"
        fn = partial(getattr(sel_fwd, name), flags=flags, tiles=tiles)

        def call(part: slice) -> Tensor:
            if rows.mode == "dense":
                return fn(rows.q[part], rows.k[part], rows.v[part])
            packed = rows.k.flatten(0, 1), rows.v.flatten(0, 1)
            return fn(rows.q[part], *packed, rows.cu[part.start : part.stop + 1], max_len=rows.L)

        return call, f"triton_{rows.mode}{tail}", f"_{name}_kernel"
    path, kernel = "triton_ranges", "_sel_attn_fwd_ranges_kernel"
    if rows.nspans == 1:
        path, kernel = "triton_ranges_single", f"_sel_attn_fwd_dense{tail}_kernel"
    if rows.mode == "route":
        run = by_route(rows, flags, "triton")
        return lambda part: run(), path, kernel

    def call(part: slice) -> Tensor:
        if rows.mode == "decode":
            q, kv = rows.q[part, None, None], [x[part] for x in rows.cache]
            ranges = rows.ranges[part]
        else:
            q, kv, ranges = rows.q[part][None, :, None], rows.cache, rows.ranges[:, part]
        with torch.no_grad():
            out = triton_sel_kernel.selection_ranges_triton(q, *kv, ranges, flags=flags)
        return out.reshape(-1, *out.shape[-2:])

    return call, path, kernel


def by_route(rows: Rows, flags: Any, backend: str) -> Callable[[], Tensor]:
    """A call of selection_attention on all rows, each a query of one sequence, as a user makes
    it."""
    q, (k, v) = rows.q[None], (x.transpose(1, 2) for x in rows.cache)
    flags = replace(flags, triton_sel_force=True)  # SM 8.9: this may be what overturns the policy
    return lambda: selection_attention(q, k, v, ranges=rows.ranges, backend=backend, flags=flags)


def baselines(rows: Rows, flags: Any) -> list[Contender]:
    """What the candidate is held against. Raises RuntimeError where nothing takes the rows."""
    if rows.mode == "route":
        return [Contender("packing", by_route(rows, flags, "sdpa"), "sdpa", ("sdpa_selection",))]
    found = packed_baselines(rows.q, rows.k, rows.v)
    if why := found.why_none():
        raise RuntimeError(f"no backend of SDPA takes these rows: {why}")
    N, H, D = rows.q.shape
    width = D + rows.v.shape[-1]
    work = dict(bytes_needed=rows.q.element_size() * width * N * (rows.L + H),
                flops=2 * N * H * rows.L * width)  # fmt: skip
    return [
        Contender(found.label(name), call, "sdpa", (name,), attends=promised(name), **work)
        for name, call in found.calls.items()
    ]


def on_streams(call: Callable[[slice], Tensor], N: int, streams: int) -> Callable[[], Tensor]:
    """The rows in equal parts on that many CUDA streams, joined on the current one."""
    if streams == 1:
        whole = slice(0, N)
        return lambda: call(whole)
    side = [torch.cuda.Stream() for _ in range(streams)]
    cuts = [N * i // streams for i in range(streams + 1)]

    def run() -> Tensor:
        here = torch.cuda.current_stream()
        parts = []
        for stream, a, b in zip(side, cuts, cuts[1:], strict=False):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                parts.append(call(slice(a, b)))
        for stream, part in zip(side, parts, strict=True):
            here.wait_stream(stream)
            part.record_stream(here)
        return torch.cat(parts)

    return run


class Cell(NamedTuple):
    """One cell of the matrix. n_sel: with --decode; run: with --repeat, from 1."""

    mode: str
    dist: str
    N: int
    H: int
    D: int
    Dv: int
    L: int
    streams: int
    n_sel: int | None = None
    run: int | None = None

    @property
    def name(self) -> str:
        sizes = ("N", "H", "D", "Dv", "L", "streams", "n_sel", "run")
        given = [f"{name}={x}" for name in sizes if (x := getattr(self, name))]
        return "/".join(["sel", self.mode, self.dist, *given])

    def rows(self, dtype: torch.dtype) -> Rows:
        sizes = (self.N, self.H, self.D, self.Dv, self.L)
        return Rows(self.mode, self.dist, *sizes, dtype, self.n_sel or 16)


def case_of(cell: Cell, rows: Rows, flags: Any, columns: dict[str, Any]) -> Case:
    rows.refill(0)
    call, path, kernel = candidate(rows, flags)
    N, H, D, Dv = cell.N, cell.H, cell.D, cell.Dv
    run = on_streams(call, N, cell.streams)
    return Case(
        "sel", cell.name, Contender("triton", run, path, (kernel,)),
        refill=rows.refill, inputs=rows.inputs, **truths(rows.exact, rows.q.dtype),
        baselines=baselines(rows, flags), view=lambda out: out.view(N, H, Dv),
        renew=rows.renew, distinct=rows.L > 1, requested="triton",
        bytes_needed=rows.bytes_needed, flops=2 * N * H * rows.L * (D + Dv),
        columns={**columns, "nspans": rows.nspans},
    )  # fmt: skip


def cells(args: Namespace) -> Iterator[Cell]:
    """Every combination of the sizes, in the order of the lengths; repeats are far apart."""
    widths = [(D, Dv) for D in args.D for Dv in args.Dv or [D]]
    dists = ["blocks"] if args.decode else args.dist
    runs = range(1, args.repeat + 1) if args.repeat > 1 else [None]
    for run, L, dist, N, H, width, streams, n_sel in itertools.product(
        runs, args.L_list, dists, args.N, args.H, widths, args.streams,
        args.n_sel if args.decode else [None],
    ):  # fmt: skip
        modes = ["dense" if dist == "few" else "varlen", "ranges"]
        for mode in ["decode"] if args.decode else ["route"] if args.route else modes:
            yield Cell(mode, dist, N, H, *width, L, streams, n_sel, run)


def sweep(args: Namespace, clock: CudaClock, flags: Any) -> list[dict[str, Any]]:
    """Time every tile choice of the direct kernels and print the best --sweep ones per L; a row per
    choice, `rank` from 1 among the right ones of its cell."""
    from nsa.kernels.triton_sel_kernel.tiles import Tiles

    say(args, f"tiles: {' x '.join(f'{k} {v}' for k, v in SWEEP.items())}; block_dv = block_d")
    written: list[dict[str, Any]] = []
    for cell in cells(args):
        if cell.mode not in ("dense", "varlen"):
            continue
        rows, L = cell.rows(DTYPES[args.dtype]), cell.L
        rows.refill(0)
        want, same = rows.exact(), rows.exact(rows.q.dtype)
        limit = 2 * (same.double() - want).abs().max().item() + 1e-3
        tried = []
        for values in itertools.product(*SWEEP.values()):
            choice = dict(zip(SWEEP, values, strict=True))
            if choice["block_d"] > max(cell.D, 64) or choice["block_l"] > max(64, L):
                continue
            choice["block_dv"] = min(choice["block_d"], cell.Dv)
            call, _, _ = candidate(rows, flags, Tiles(**choice))
            run = on_streams(call, cell.N, 1)
            found = {"status": "FAILED", "why": "wrong"}
            try:
                if (run().double() - want).abs().max().item() <= limit:
                    us = statistics.median(clock.run([run] * 12, cold=True)[2:])
                    found = {"status": "VALID", "ms": us / 1e3}
            except Exception as error:
                if is_sticky(error):
                    raise
                found["why"] = f"{type(error).__name__}: {str(error)[:200]}"
            tried.append({**cell._asdict(), "dtype": args.dtype, **choice, **found})
        right = sorted((row for row in tried if "ms" in row), key=lambda row: row["ms"])
        lost = [row for row in tried if "ms" not in row]
        written += [*({**row, "rank": rank} for rank, row in enumerate(right, 1)), *lost]
        say(args, f"{cell.name}: {len(right)} right, {len(lost)} do not fit or are wrong")
        for row in right[: args.sweep]:
            tiles = " ".join(f"{name}={row[name]}" for name in SWEEP)
            say(args, f"    {1e3 * row['ms']:9.2f} us  {tiles}")
    return written


def parse(argv: list[str] | None = None) -> Namespace:
    lists = {"dist": (DISTRIBUTIONS, list(DISTRIBUTIONS), ": one or more")}
    parser = bench_parser(__doc__, lists=lists, device_s=0.25)
    for name, default, what in (
        ("N", [256], "rows (query, group), default 256"), ("H", None, "heads per row, default 8"),
        ("D", [64], "query and key head size, default 64"), ("Dv", None, "value size, default D"),
        ("L_list", None, "selected keys per row"), ("streams", [1], "CUDA streams: 1, 2 or 1,2"),
        ("n_sel", [8, 16], "blocks per row with --decode 1"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=integers, default=default, help=f"{what}; a,b,c")
    parser.add_argument("--iters", type=positive, default=30, help="least samples of each side")
    parser.add_argument("--warmup", type=int, default=10, help="least warm-up calls")
    only = parser.add_mutually_exclusive_group()
    for mode in ("decode", "route"):
        only.add_argument(f"--{mode}", type=int, choices=(0, 1), default=0, help="that mode alone")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--repeat", type=positive, default=1, help="time the matrix that often")
    parser.add_argument("--sweep", type=int, default=0, metavar="TOP", help="time tile choices")
    args = parsed(parser, argv)
    if args.route and args.streams != [1]:
        parser.error(f"--streams must be 1 with --route 1, got {args.streams}")
    args.L_list = args.L_list or ([128, 256, 512] if args.decode else [64, 128, 256, 512, 1024])
    args.H = args.H or ([2, 4] if args.decode else [8])
    for name in ("warmup", "sweep"):
        if (got := getattr(args, name)) < 0:
            parser.error(f"--{name} must be 0 or more, got {got}")
    for name in ("D", "Dv"):
        bad = [x for x in getattr(args, name) or () if x % 8 or x > 256]
        if bad:
            parser.error(f"--{name} must be multiples of 8 up to 256, got {bad[0]}")
    if max(args.streams) > (most := min(MAX_STREAMS, *args.N)):
        least = f"({MAX_STREAMS}, and a row of --N for each)"
        parser.error(f"--streams must be at most {most} {least}, got {max(args.streams)}")
    if args.decode:
        if min(args.n_sel) < 3:  # the first block and the last two are always among them
            parser.error(f"--n_sel must be at least 3, got {min(args.n_sel)}")
        bad = [L for L in args.L_list if any(L % n for n in args.n_sel)]
        if bad:
            wanted = ",".join(map(str, args.n_sel))
            parser.error(f"--L_list must be multiples of --n_sel {wanted}, got {bad}")
    args.N = shrunk("--N", args.N, args.shrink)  # not L: the threshold is about L
    return args


def cases(args: Namespace, flags: Any, clock: CudaClock, about: dict) -> Iterator[Unbuilt]:
    """Each cell, and how far that is."""
    matrix = list(cells(args))
    for number, cell in enumerate(matrix, 1):
        columns = {**cell._asdict(), "dtype": args.dtype, **about}
        made: list[Rows] = []

        def build(cell: Cell = cell, columns: dict = columns, made: list = made) -> Case:
            made.append(cell.rows(DTYPES[args.dtype]))
            return case_of(cell, made[0], flags, columns)

        def pack(row: BenchRow, made: list = made) -> dict[str, float]:
            if row.median_us is None or not made[0].cache or args.route:
                return {}
            times = clock.run([made[0].pack] * 12, cold=True)[2:]
            return {"pack_ms": statistics.median(times) / 1e3}

        yield Unbuilt("sel", cell.name, build, columns, pack)
        text = f"{number} of {len(matrix)} cells"
        emit("progress", {"done": number, "total": len(matrix), "text": text})


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    # Packing takes the host 4 ms a call, and its kernels are warm after some twenty.
    budget = Budget(
        device_s=args.seconds, min_n=args.iters, warm_calls=args.warmup,
        warm_cap_s=0.5 if args.route else Budget.warm_cap_s,
    )  # fmt: skip
    tools = card_tools(budget, busy_clock if args.route else None)
    if not tools:
        return 3
    clock, flags = tools["clock"], get_flags(tools["gpu"].name)
    if args.sweep:
        about, tried = provenance(tools["gpu"]), sweep(args, clock, flags)
        write_csv(args.csv, [{**row, **about} for row in tried], SWEEP_COLUMNS)
        return 0
    aliases = {"tri_ms": "ms", "ref_ms": "base_ms"}
    return time_cases(args, tools, COLUMNS, partial(cases, args, flags, clock), aliases)


if __name__ == "__main__":
    raise SystemExit(main())
