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

reads_*: keys per KV group. reads_actual counts what filling the cache with S - 1 tokens and the one
step after it really read, reads_actual_decode the step alone; both through the layer itself:
tokens of the blocks it used, and rows of the compressed and window views that it was handed.
reads_seen, a second opinion: keys whose values the step's result depends on, by gradients; any
other key may be NaN without a trace (caches of up to 128k tokens). The
fused step reads the cache in place; its compressed and window keys are counted from the lengths on
the device, which bound its loops.

Exit code: 0 timed, 1 a result is wrong, 2 usage, 3 nothing could be run.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
from torch import Tensor

from bench.clock import clock_for
from bench.decode_graph import more_rows
from bench.decode_step import BRANCHES, Step, dense_contenders
from bench.device import Gpu, ceilings, host_ceilings
from bench.provenance import COLUMNS as PROVENANCE
from bench.provenance import provenance
from bench.records import (
    BenchRow,
    add_csv_argument,
    add_shrink_argument,
    check_flags,
    note,
    out_dir,
    positive,
    say,
    shrunk,
    write_csv,
    write_so_far,
)
from bench.timing import Budget, Case, Contender, measure
from nsa.config import NSAConfig
from nsa.flags import get_flags
from nsa.module import NSAAttention

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
    "l", "d", "l_sel", "n_sel", "w", "T", "alike", "blocks_together", "dtype", *PROVENANCE,
)  # fmt: skip


# ---- cases ---------------------------------------------------------------------------------------


def case_name(batch: int, S: int) -> str:
    return f"decode/S={S}" if batch == 1 else f"decode/B={batch}/S={S}"


def step_name(step: Step) -> str:
    several = f"/T={step.T}" if step.T > 1 else ""
    return case_name(len(step.q), step.S) + several


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
        "decode", step_name(step),
        Contender("nsa", step.total(), step.path, step.kernels()),
        refill=step.refill, inputs=step.inputs, oracle=lambda: step.total_truth(chosen[0].cpu()),
        same_dtype=lambda: step.total_plain(chosen[0].cpu()), baselines=dense_contenders(step),
        view=view, renew=step.renew, distinct=step.S > 1,
        requested=step.requested,
        bytes_needed=(step.keys_once()[0] + len(q) * step.T * c.heads) * width * q.element_size(),
        flops=2 * pairs * len(q) * c.heads * width, columns=columns,
    )  # fmt: skip


def branch_case(step: Step, branch: str, columns: dict[str, Any]) -> Case:
    """One branch alone; it has no baseline of its own."""
    path = step.branch_path(branch)
    kernels = step.kernels(branch=branch)
    return Case(
        "decode_branch", f"{step_name(step)}/{branch}",
        Contender(f"nsa {branch}", step.alone(branch), path, kernels),
        refill=step.refill, inputs=step.inputs,
        oracle=lambda: step.truth(branch, step.blocks),
        same_dtype=lambda: step.plain(branch, step.blocks), renew=step.renew,
        distinct=getattr(step.counted, branch) > 1, columns=columns,
        foreign=(*(k for k in step.kernels() if k not in kernels),
                 *(name for b, name in COMPOSED.items() if b != branch)),
    )  # fmt: skip


def _ms(us: float | None) -> float | None:
    return None if us is None else us / 1e3


def more_columns(more: dict[str, BenchRow], missing: dict[str, str]) -> dict[str, Any]:
    """The columns of the graph and of the layer's step; empty where there is no such row."""
    line: dict[str, Any] = {"more_status": " ".join(f"{n}={r.status}" for n, r in more.items())}
    for name, time, bounds in (("graph", "ms_graph", "graph"),
                               ("module", "ms_module_eager", "module"),
                               ("module_graph", "ms_module_graph", "module_graph")):  # fmt: skip
        row = more.get(name)
        if row is not None:
            line[time] = _ms(row.median_us)
            line[f"{bounds}_low"], line[f"{bounds}_high"] = map(_ms, row.ci95_us or (None, None))
    if "graph" in more:
        graph = more["graph"]
        low, high = graph.speedup_ci95 or (None, None)
        line |= {"graph_baseline": graph.baseline, "graph_base_ms": _ms(graph.base_median_us),
                 "graph_speedup": graph.speedup, "graph_speedup_low": low,
                 "graph_speedup_high": high}  # fmt: skip
    if "module" in more:
        line["ms_module_eager_wall"] = _ms(more["module"].wall_us)
    reasons = [f"{n}: {w}" for n, r in more.items() for w in r.why]
    by_reason: dict[str, list[str]] = {}
    for name, why in missing.items():
        by_reason.setdefault(why, []).append(name)
    reasons += [f"no {' and '.join(names)}: {why}" for why, names in by_reason.items()]
    line["why"] = "; ".join(reasons)
    return line


def csv_row(
    step: Step, row: BenchRow, parts: dict[str, BenchRow], columns: dict[str, Any],
    more: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """One line of the CSV: the step's row, its branches', graph and layer (`more`), the reads."""
    read, parity = step.counted, row.parity or {}
    low, high = row.ci95_us or (None, None)
    slow, fast = row.speedup_ci95 or (None, None)
    line = {
        **columns, **more, "S": step.S, "ms_total": _ms(row.median_us), "ci_low": _ms(low),
        "ci_high": _ms(high), "wall_ms": _ms(row.wall_us),
        "base_wall_ms": _ms(row.base_wall_us), "baseline": row.baseline,
        "base_peak_frac": row.base_peak_frac, "base_ran": row.base_ran,
        "base_ms": _ms(row.base_median_us), "speedup": row.speedup, "speedup_low": slow,
        "speedup_high": fast, "n": row.n, "cache": row.cache, "status": row.status,
        "launch_bound": row.launch_bound,
        "why": "; ".join([*row.why, *(f"{b}: {w}" for b, p in parts.items() for w in p.why),
                          *filter(None, [more["why"]])]),
        "branch_status": " ".join(f"{b}={p.status}" for b, p in parts.items()),
        "path": row.path_taken,
        "branch_path": " ".join(f"{b}={p.path_taken}" for b, p in parts.items() if p.path_taken),
        "fallback": step.fallback, "parity": parity.get("status"), "mae": parity.get("mae"),
        "max_abs": parity.get("max_abs"), "bytes": row.bytes, "gbs": row.gbs,
        "reads_actual": read.total, "reads_expected": read.expected,
        "reads_actual_decode": read.cmp + read.sel + read.win,
        "reads_expected_decode": read.expected_step, "reads_cmp": read.cmp,
        "reads_sel": read.sel, "reads_win": read.win, "reads_seen": step.seen,
        "blocks_together": step.keys_once()[1],
    }  # fmt: skip
    for branch, part in parts.items():
        line[f"ms_{branch}"] = _ms(part.median_us)
        line[f"{branch}_low"], line[f"{branch}_high"] = map(_ms, part.ci95_us or (None, None))
    return line


# ---- the command ---------------------------------------------------------------------------------


def _lengths(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="cells of B and S in one run, instead of --B, --S_list")
    add("--B", type=positive, help="sequences (default 1)")
    for name, default, what in (
        ("dim", 2560, "model width"), ("heads", 64, "query heads"), ("groups", 4, "KV groups"),
        ("dk", 192, "query and key width"), ("dv", 128, "value width"),
        ("l", 32, "compression block"), ("d", 16, "compression stride"),
        ("l_sel", 64, "selection block"), ("n_sel", 16, "blocks selected"), ("w", 512, "window"),
    ):  # fmt: skip
        add(f"--{name}", type=positive, default=default, help=f"{what} (default {default})")
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
    add("--quick", action="store_true", help="shorter sampling and two lengths")
    add_csv_argument(parser)
    add_shrink_argument(parser)
    return parser


def _line(row: dict[str, Any]) -> str:
    def number(name: str, form: str) -> str:
        value = row.get(name)
        return "-" if value is None else format(value, form)

    head = f"B={row['B']:<3} S={row['S']:<7}" if row["B"] > 1 else f"S={row['S']:<7}"
    head += f" T={row['T']}" if row["T"] > 1 else ""
    if row.get("ms_total") is None:
        return f"{head} {row['status']} {row['why']}"
    times = " ".join(f"{b} {number(f'ms_{b}', '.4f')}" for b in ("total", *BRANCHES))
    if row.get("ms_graph") is not None:
        times += (f" graph {number('ms_graph', '.4f')} (dense {number('graph_base_ms', '.4f')},"
                  f" {number('graph_speedup', '.2f')}x)")  # fmt: skip
    if row.get("ms_module_eager") is not None:
        layer = ("eager_wall", "eager", "graph")
        times += " | layer: " + " ".join(f"{n} {number(f'ms_module_{n}', '.4f')}" for n in layer)
    return (
        f"{head} ms: {times} | reads {row['reads_actual_decode']}/"
        f"{row['reads_expected_decode']} | {number('speedup', '.2f')}x "
        f"[{number('speedup_low', '.2f')}, {number('speedup_high', '.2f')}] over "
        f"{row['baseline']} | {row['path']} {row['status']} {row['why']}"
    )


def bench_length(
    layer: NSAAttention, batch: int, S: int, T: int, args: argparse.Namespace,
    columns: dict[str, Any], tools: dict[str, Any], backend: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Time one batch size, context length and number of new tokens; the CSV line."""
    step = Step(layer, batch, S, backend=backend, T=T, alike=args.alike)
    read = step.counted
    own = {**columns, "S": S, "reads_actual": read.cmp + read.sel + read.win,
           "reads_expected": read.expected_step, "reads_cmp": read.cmp, "reads_sel": read.sel,
           "reads_win": read.win, "reads_seen": step.seen, "fallback": step.fallback}  # fmt: skip

    total = total_case(step, own)
    row = measure(total, **tools)
    mode = args.branch_force_mode
    wanted = BRANCHES if mode == "env" else () if mode == "none" else (mode,)
    parts = {b: measure(branch_case(step, b, {**own, "branch": b}), **tools) for b in wanted}
    rows, why = more_rows(layer, step, total, own, tools) if args.more else ({}, {})
    more = more_columns(rows, why)
    return csv_row(step, row, parts, columns, more)


def main(argv: Sequence[str] | None = None, *, backend: str | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.preset:
        if args.B or args.S_list:
            parser.error("argument --preset: not allowed with --B or --S_list")
        parser.set_defaults(**PRESETS[args.preset][1])
        args = parser.parse_args(argv)
    if not 0 <= args.alike <= 1:
        parser.error(f"argument --alike: must be from 0 to 1, got {args.alike}")
    if args.warmup < 0:
        parser.error(f"argument --warmup: must be 0 or more, got {args.warmup}")
    check_flags(parser)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        config = NSAConfig(args.dim, args.heads, args.groups, args.dk, args.dv, l=args.l, d=args.d,
                           l_sel=args.l_sel, n_sel=args.n_sel, w=args.w)  # fmt: skip
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    if device == "cuda" and not torch.cuda.is_available():
        note("decode bench: --device cuda, but torch sees no CUDA device")
        return 3
    gpu = Gpu("cuda") if device == "cuda" else None
    dtype = args.dtype or ("bf16" if gpu else "fp32")
    lengths = args.S_list or [256, 512]
    if gpu and not args.S_list:  # filling the cache without kernels takes quadratic time
        off = get_flags(gpu.name).use_triton_sel is False
        lengths = [1024, 4096, 8192] if off else [4096, 16384, 65536]
    if args.quick and args.S_list is None:
        lengths = lengths[:2]
    cells = [(args.B or 1, S) for S in lengths]
    if args.preset:
        cells = list(PRESETS[args.preset][0])
    shrunk("--S_list", list(dict.fromkeys(S for _, S in cells)), args.shrink)  # says so
    cells = list(dict.fromkeys((B, max(S // args.shrink, 1)) for B, S in cells))
    if max(args.T) > min(S for _, S in cells):
        parser.error(f"argument --T: must be at most each context length, got {max(args.T)}")
    short = args.quick or gpu is None
    budget = Budget(min_n=args.iters, warm_calls=args.warmup)
    if short:
        budget = dataclasses.replace(budget, device_s=0.3, wall_s=1.5, warm_s=0.05, warm_cap_s=0.3)
    tools = {
        "clock": clock_for(device),
        "gpu": gpu,
        "cold": gpu is not None,
        "budget": budget,
        "ceiling": ceilings(gpu, out_dir()) if gpu else None,
    }
    columns = {
        **{n: getattr(args, n) for n in ("dim", "heads", "groups", "dk", "dv", "l", "d",
                                         "l_sel", "n_sel", "w", "alike")},
        "dtype": dtype, **provenance(gpu),
    }  # fmt: skip
    if gpu is None:  # a step is too little work to share: more threads wait for each other
        torch.set_num_threads(1)
        tools["ceiling"] = host_ceilings()
    torch.manual_seed(0)
    layer = NSAAttention(config).to(device=device, dtype=DTYPES[dtype]).eval()
    lines: list[dict[str, Any]] = []
    for (batch, S), T in itertools.product(cells, args.T):
        own = {**columns, "B": batch, "T": T}
        try:
            line = bench_length(layer, batch, S, T, args, own, tools, backend)
        except torch.cuda.OutOfMemoryError as error:
            why = f"out of memory: {str(error).splitlines()[0]}"
            BenchRow("decode", case_name(batch, S), "SKIPPED", why=(why,), columns={"S": S}).emit()
            line = {**own, "S": S, "status": "SKIPPED", "why": why}
        if gpu:  # graphs keep their memory until they are collected
            gc.collect()
            torch.cuda.empty_cache()
        lines.append(line)
        say(args, _line(line))
        write_so_far(args.csv, lines, COLUMNS)
    write_csv(args.csv, lines, COLUMNS)
    statuses = [
        line.get(name) or "" for line in lines
        for name in ("status", "branch_status", "more_status")
    ]  # fmt: skip
    if any("FAILED" in status for status in statuses):
        return 1
    if all(line["status"] == "SKIPPED" for line in lines):
        note(f"decode bench: {lines[0]['why']}")
        return 3
    if gpu and not_asked_for(lines):
        note("decode bench: timed PyTorch's composed step, as NSA_USE_TRITON_SEL=0 asks")
    return 0


def not_asked_for(lines: Sequence[dict[str, Any]]) -> bool:
    """Were the kernels left out for want of the flag that enables them alone?"""
    return any(line.get("fallback") == "not_enabled" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
