"""One decode step of NSA against dense attention over the same cache, in total and by branch.

    python bench/bench_decode.py                              # the paper's sizes on this GPU
    python bench/bench_decode.py --S_list 512,4096 --csv decode.csv --branch_force_mode none
    python bench/bench_decode.py --preset serving  # six batches and contexts
    python bench/bench_decode.py --B 64 --S_list 8192 --T 1,4 --alike 0.9 --branch_force_mode none

A step is what `NSAAttention.step` does after it appended the newest token: attention from one
query over a cache of S tokens. Every sample sees these S tokens: nothing is appended between them.
--T: steps of the T newest tokens, as in speculative decoding, each of which sees those up to
itself; more than one has no baseline and no layer's whole step. Their queries are independent, so
that they choose the most blocks together (blocks_together, of a group), or correlated (--alike).
Times are medians of device time on a GPU (cold L2) and of host time on one CPU thread (warm);
`wall_ms` is what a host sees that calls back to back. ci_low and ci_high bound ms_total,
speedup_low and speedup_high the ratio to the baseline, all at 95 %. launch_bound: the host takes
over 1.2 times as long as the device, or left gaps in most batches; empty on a CPU. base_wall_ms is
the baseline's wall_ms.

ms_graph: the same step as a replayed CUDA graph, beside dense attention as one (graph_base_ms). The
graph is captured once, and its replays must be right on other numbers and at another length.
ms_module_eager, ms_module_graph: the layer's whole decode step (projections, rotary, cache append,
attention, gates, output), eager and as a graph. Each sample appends its token to the same S - 1:
the cache forgets it again outside of the timed window. ms_module_eager_wall: what a host sees of
d steps in a row up to S tokens, of which one emits a compressed token, per step. Where no graph can
be captured these are empty and `why` says why.

--branch_force_mode: which branches are also timed alone. The others' work is not launched, not
merely ignored. env (default): each of the three, along the routes that the NSA_* environment
chooses; cmp, sel or win: that one; none: no branch. ms_sel attends to blocks chosen before the
clock starts: choosing them needs the compressed branch and is part of ms_total only.

--kv-cache-dtype fp8_e4m3: the step over an FP8 cache, against fp64 over what its numbers stand for.
kv_error: how far (relative 2-norm) the step is from the one over a cache of --dtype with the same
N(0, 1); about 0.04 where both choose the same blocks. Dense attention has keys and values of
--dtype.

reads_*: keys per KV group. reads_actual counts what filling the cache with S - 1 tokens and the one
step after it really read, reads_actual_decode the step alone; both through the layer itself:
tokens of the blocks it used, and rows of the compressed and window views that it was handed.
reads_seen, a second opinion: keys whose values the step's result depends on, by gradients; any
other key may be NaN without a trace (caches of up to 128k tokens). The
fused step reads the cache in place; its compressed and window keys are counted from the lengths on
the device, which bound its loops.

Exit code: 0 timed, 1 a result is wrong, 2 usage, 3 nothing could be run.
"""

import gc
import itertools
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
from torch import Tensor

from bench.clock import clock_for, prepare
from bench.decode_columns import ALIASES, part_columns
from bench.decode_graph import ModuleStep, more_rows
from bench.decode_step import BRANCHES, Step, dense_contenders
from bench.device import Gpu, host_ceilings
from bench.main import bench_parser, card_tools, parsed, time_cases
from bench.provenance import COLUMNS as PROVENANCE
from bench.records import BenchRow, note, positive, shrunk
from bench.timing import Budget, Case, Contender, Unbuilt, measure
from nsa.config import NSAConfig
from nsa.flags import get_flags
from nsa.module import NSAAttention

SIZES = {
    "dim": (2560, "model width"), "heads": (64, "query heads"), "groups": (4, "KV groups"),
    "dk": (192, "query and key width"), "dv": (128, "value width"),
    "l": (32, "compression block"), "d": (16, "compression stride"),
    "l_sel": (64, "selection block"), "n_sel": (16, "blocks selected"), "w": (512, "window"),
}  # fmt: skip
MODES = ("none", "env", *BRANCHES)
# (sequences, context) of each cell, and the sizes that they share unless an option says otherwise.
SERVING = dict(heads=64, groups=4, dk=128, dv=128, branch_force_mode="none")
PRESETS = {
    "serving": (
        ((1, 8192), (1, 65536), (1, 131072), (16, 65536), (64, 8192), (64, 32768)), SERVING,
    ),
    "serving_short": (((1, 8192), (1, 65536)), SERVING),
}  # fmt: skip
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
# What PyTorch's routes count as their launches, by branch.
COMPOSED = {"cmp": "sdpa_compressed", "sel": "sdpa_selection", "win": "sdpa_sliding"}
COLUMNS = (
    "S", "ms_total", "ms_cmp", "ms_sel", "ms_win", "reads_actual", "reads_expected",
    "reads_actual_decode", "reads_expected_decode", "reads_cmp", "reads_sel", "reads_win",
    "reads_seen",
    "ci_low", "ci_high", "cmp_low", "cmp_high", "sel_low", "sel_high", "win_low", "win_high",
    "wall_ms", "baseline", "base_ms", "speedup", "speedup_low", "speedup_high", "n", "cache",
    "status", "why", "branch_status", "path", "branch_path", "fallback", "parity", "mae", "max_abs",
    "base_wall_ms", "base_peak_frac", "base_ran",
    "launch_bound", "ms_graph", "graph_low", "graph_high", "graph_baseline",
    "graph_base_ms",
    "graph_speedup", "graph_speedup_low", "graph_speedup_high", "ms_module_eager_wall",
    "ms_module_eager", "module_low", "module_high", "ms_module_graph", "module_graph_low",
    "module_graph_high", "more_status", "bytes", "gbs", "B", "dim", "heads", "groups", "dk", "dv",
    "l", "d", "l_sel", "n_sel", "w", "T", "alike", "blocks_together", "dtype", "kv_cache_dtype",
    "kv_error", *PROVENANCE,
)  # fmt: skip


def case_name(batch: int, S: int, T: int) -> str:
    name = f"decode/S={S}" if batch == 1 else f"decode/B={batch}/S={S}"
    return f"{name}/T={T}" if T > 1 else name


def total_case(step: Step, columns: dict[str, Any]) -> Case:
    """The whole step against the strongest dense attention over the same cache."""
    chosen: list[Tensor] = [step.blocks]

    def view(out: Any) -> Tensor:
        if isinstance(out, tuple):
            chosen[0] = out[1]
            return out[0]
        return out

    c, q, read = step.config, step.q, step.counted
    width, pairs = c.d_k + c.d_v, read.cmp + read.sel + read.win
    return Case(
        "decode", case_name(len(q), step.S, step.T),
        Contender("nsa", step.total(), step.path, step.kernels()),
        refill=step.refill, inputs=step.inputs, oracle=lambda: step.total_truth(chosen[0].cpu()),
        same_dtype=lambda: step.total_plain(chosen[0].cpu()), baselines=dense_contenders(step),
        view=view, renew=step.renew, distinct=step.S > 1,
        requested=step.requested,
        bytes_needed=(step.keys_once()[0] * step.cache.k_sel.element_size()
                      + len(q) * step.T * c.heads * q.element_size()) * width,
        flops=2 * pairs * len(q) * c.heads * width, columns=columns,
    )  # fmt: skip


def branch_case(step: Step, branch: str, columns: dict[str, Any]) -> Case:
    """One branch alone; it has no baseline of its own."""
    path = step.branch_path(branch)
    kernels = step.kernels(branch=branch)
    return Case(
        "decode_branch", f"{case_name(len(step.q), step.S, step.T)}/{branch}",
        Contender(f"nsa {branch}", step.alone(branch), path, kernels),
        refill=step.refill, inputs=step.inputs,
        oracle=lambda: step.truth(branch, step.blocks),
        same_dtype=lambda: step.plain(branch, step.blocks), renew=step.renew,
        distinct=getattr(step.counted, branch) > 1, columns=columns,
        foreign=(*(k for k in step.kernels() if k not in kernels),
                 *(name for b, name in COMPOSED.items() if b != branch)),
    )  # fmt: skip


def cell(
    layer: NSAAttention, batch: int, S: int, T: int, args: Namespace,
    columns: dict[str, Any], tools: dict[str, Any], backend: str | None, fallbacks: set,
) -> Unbuilt:  # fmt: skip
    """One batch size, context length and number of new tokens: the step's case, and what is timed
    beside it. fallbacks gets why the step fell back."""
    columns = {**columns, "B": batch, "S": S, "T": T}
    built: list[tuple[Step, Case]] = []

    def build() -> Case:
        step = Step(layer, batch, S, backend=backend, T=T, alike=args.alike,
                    kv_cache_dtype=args.kv_cache_dtype)  # fmt: skip
        read = step.counted
        columns.update({
            "reads_actual": read.cmp + read.sel + read.win, "reads_expected": read.expected_step,
            "reads_cmp": read.cmp, "reads_sel": read.sel, "reads_win": read.win,
            "reads_seen": step.seen, "fallback": step.fallback, "kv_error": step.kv_error(),
        })  # fmt: skip
        fallbacks.add(step.fallback)
        built.append((step, total_case(step, columns)))
        return built[0][1]

    def more(row: BenchRow) -> dict[str, Any]:
        """Columns of the branches alone, of graphs and the layer, and all reads."""
        if not built:  # it did not fit
            return {}
        (step, total), mode = built.pop(), args.branch_force_mode
        wanted = BRANCHES if mode == "env" else () if mode == "none" else (mode,)
        parts = {
            b: measure(branch_case(step, b, {**columns, "branch": b}), **tools) for b in wanted
        }
        rows, missing = {}, {}
        if args.more:
            try:
                rows, missing = more_rows(layer, step, total, columns, tools)
            except torch.cuda.OutOfMemoryError as error:
                missing = {"graph or layer": f"out of memory: {str(error).splitlines()[0]}"}
        states = lambda some: " ".join(f"{n}={one.status}" for n, one in some.items())
        taken = [f"{b}={part.path_taken}" for b, part in parts.items() if part.path_taken]
        both, read = {**parts, **rows}, step.counted
        why = [*row.why, *(f"{n}: {w}" for n, one in both.items() for w in one.why)]
        for reason in dict.fromkeys(missing.values()):
            names = [name for name, why_not in missing.items() if why_not == reason]
            why.append(f"no {' and '.join(names)}: {reason}")
        return {
            "reads_actual": read.total, "reads_expected": read.expected,
            "reads_actual_decode": read.cmp + read.sel + read.win,
            "reads_expected_decode": read.expected_step,
            "blocks_together": step.keys_once()[1],
            **part_columns([one.csv() for one in both.values()]),
            "branch_status": states(parts), "more_status": states(rows),
            "branch_path": " ".join(taken), "why": "; ".join(why),
        }  # fmt: skip

    return Unbuilt("decode", case_name(batch, S, T), build, columns, more)


def _lengths(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def parse(argv: Sequence[str] | None = None) -> Namespace:
    parser = bench_parser(__doc__, sizes=SIZES)
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="cells of B and S in one run, instead of --B, --S_list")
    add("--B", type=positive, help="sequences (default 1)")
    add("--T", type=_lengths, default=[1], help="new tokens of a step, a,b,c (default 1)")
    add("--alike", type=float, default=0.0, help="correlation of their queries (default 0)")
    add("--S_list", type=_lengths, help="context lengths, a,b,c (default by device)")
    add("--iters", type=positive, default=30, help="least number of samples (default 30)")
    add("--warmup", type=int, default=3, help="least number of warm-up calls (default 3)")
    add("--branch_force_mode", choices=MODES, default="env", help="branches timed alone, see above")
    add("--more", type=int, choices=(0, 1), default=1,
        help="1: also the step as a graph and the layer's whole step (default 1)")  # fmt: skip
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    add("--kv-cache-dtype", choices=("auto", "fp8_e4m3"), default="auto",
        help="of keys and values (default auto: --dtype)")  # fmt: skip
    add("--quick", action="store_true", help="shorter sampling and two lengths")
    add("--compile_only", action="store_true", help="make each step once, and time nothing")
    args = parsed(parser, argv)
    if args.preset:
        if args.B or args.S_list:
            parser.error("argument --preset: not allowed with --B or --S_list")
        parser.set_defaults(**PRESETS[args.preset][1])
        args = parser.parse_args(argv)
    if not 0 <= args.alike <= 1:
        parser.error(f"argument --alike: must be from 0 to 1, got {args.alike}")
    if args.warmup < 0:
        parser.error(f"argument --warmup: must be 0 or more, got {args.warmup}")
    contexts = [S for _, S in PRESETS[args.preset][0]] if args.preset else args.S_list or [256]
    if max(args.T) > max(min(contexts) // args.shrink, 1):
        parser.error(f"argument --T: must be at most each context length, got {max(args.T)}")
    args.sizes = {name: getattr(args, name) for name in (*SIZES, "alike")}
    try:
        args.config = NSAConfig(args.dim, args.heads, args.groups, args.dk, args.dv, l=args.l,
                                d=args.d, l_sel=args.l_sel, n_sel=args.n_sel, w=args.w)  # fmt: skip
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    args.dtype = args.dtype or ("bf16" if args.device == "cuda" else "fp32")
    return args


def shapes(args: Namespace, gpu: Gpu | None) -> list[tuple[int, int]]:
    """(sequences, context) of each cell."""
    lengths = args.S_list or [256, 512]
    if gpu and not args.S_list:  # filling the cache without kernels takes quadratic time
        off = get_flags(gpu.name).use_triton_sel is False
        lengths = [1024, 4096, 8192] if off else [4096, 16384, 65536]
    if args.quick and args.S_list is None:
        lengths = lengths[:2]
    cells = PRESETS[args.preset][0] if args.preset else [(args.B or 1, S) for S in lengths]
    shrunk("--S_list", list(dict.fromkeys(S for _, S in cells)), args.shrink)  # says so
    return list(dict.fromkeys((B, max(S // args.shrink, 1)) for B, S in cells))


def layer_of(args: Namespace) -> NSAAttention:
    torch.manual_seed(0)
    return NSAAttention(args.config).to(device=args.device, dtype=DTYPES[args.dtype]).eval()


def cases(args: Namespace, tools: dict, backend: str | None, about: dict) -> Iterator[Unbuilt]:
    """Every batch size, context length and number of new tokens, on one layer."""
    gpu = tools["gpu"]
    columns = {**args.sizes, "dtype": args.dtype, "kv_cache_dtype": args.kv_cache_dtype, **about}
    layer, fallbacks = layer_of(args), set()
    for (batch, S), T in itertools.product(shapes(args, gpu), args.T):
        yield cell(layer, batch, S, T, args, columns, tools, backend, fallbacks)
        if gpu:  # graphs keep their memory until they are collected
            gc.collect()
            torch.cuda.empty_cache()
    if gpu and "not_enabled" in fallbacks:
        note("decode bench: timed PyTorch's composed step, as NSA_USE_TRITON_SEL=0 asks")


def _line(row: BenchRow, flat: dict[str, Any]) -> str:
    parts = [row.line()]
    if flat.get("reads_actual_decode"):
        parts.append(f"reads {flat['reads_actual_decode']}/{flat['reads_expected_decode']}")
    parts += [
        f"{name.removeprefix('ms_')} {flat[name]:.4f} ms"
        for name in (*(f"ms_{b}" for b in BRANCHES), "ms_graph", "graph_base_ms",
                     "ms_module_eager_wall", "ms_module_eager", "ms_module_graph")
        if flat.get(name) is not None
    ]  # fmt: skip
    return "  ".join(parts)


def main(argv: Sequence[str] | None = None, *, backend: str | None = None) -> int:
    args = parse(argv)
    if args.compile_only:
        layer, gpu = layer_of(args), Gpu() if args.device == "cuda" else None
        for (batch, S), T in itertools.product(shapes(args, gpu), args.T):
            # The steps that a cell times, once each, so that their kernels are in the caches.
            how = dict(backend=backend, kv_cache_dtype=args.kv_cache_dtype)
            step = Step(layer, batch, S, T=T, **how)
            step.total()()
            if T == 1:
                whole = ModuleStep(layer, step).eager()
                prepare(whole)
                whole()
        return 0
    budget = Budget(min_n=args.iters, warm_calls=args.warmup)
    if args.quick or args.device == "cpu":
        budget = replace(budget, device_s=0.3, wall_s=1.5, warm_s=0.05, warm_cap_s=0.3)
    if args.device == "cuda":
        tools = card_tools(budget)
    else:  # a step is too little work to share: more threads wait for each other
        torch.set_num_threads(1)
        tools = {"clock": clock_for("cpu"), "gpu": None, "ceiling": host_ceilings(),
                 "budget": budget, "cold": False}  # fmt: skip
    made = partial(cases, args, tools, backend)
    return time_cases(args, tools, COLUMNS, made, ALIASES, _line)


if __name__ == "__main__":
    sys.exit(main())
