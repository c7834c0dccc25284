"""Prefill and training: all of NSA, and each of its parts, against dense attention of one length.

    python bench/bench_prefill.py                         # 8k and 32k tokens, forward and backward
    python bench/bench_prefill.py --S_list 65536 --ops full,sel --csv prefill.csv
    python bench/bench_prefill.py --compile_only          # leaves the kernels in Triton's cache

Sizes default to the paper's: 64 query heads on 4 KV groups, head size 128, l=32 d=16, 16 blocks of
64, window 512, bf16, one sequence. The candidate is the Triton operator behind nsa.nsa_attention;
the baseline is causal dense attention by the fastest backend that torch's SDPA has (GQA). Results
are checked on sampled queries (column `compared`) against fp64 before and after the timing; NSA and
dense attention each against their own. bwd is the backward pass alone. turn, the rotary turn of a
layer's projections into a tensor per branch, comes before `full` and is no part of it. sel gets its
blocks ascending, as the choice of blocks leaves them; nsa.selection_attention sorts them first.
pack is all of NSA on a pack of one sequence of half the tokens and many of 16; its baseline is not
dense attention but the two kinds, one call after the other. Without --ops there is no pack, and the
longest S alone has the parts. All kernels are compiled side by side before the first case.

Exit code: 0 timed, 1 a result is wrong, 2 usage, 3 nothing could be run.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import spent
from bench.clock import CudaClock
from bench.device import Gpu, ceilings
from bench.parity import measure_parity
from bench.prefill_inputs import Pack, Prefill, Projections, sampled_gradients
from bench.provenance import COLUMNS as PROVENANCE
from bench.provenance import provenance
from bench.records import (
    add_csv_argument,
    add_shrink_argument,
    check_flags,
    emit,
    integers,
    note,
    out_dir,
    positive,
    say,
    seconds,
    shrunk,
    write_csv,
    write_so_far,
)
from bench.roofline import Shape, bytes_needed, check_sizes, flops
from bench.sdpa_baselines import BACKENDS, promised, usable
from bench.timing import Budget, Case, Contender, Unbuilt, measure
from nsa import launches
from nsa.plans import plan_call

PARTS = ("cmp", "sel", "win", "select", "turn")
OPS = ("full", *PARTS, "pack")
COLUMNS = (
    "op", "direction", "S", "B", "HQ", "G", "D", "Dv", "l", "d", "l_sel", "n_sel", "w", "dtype",
    "ms", "ms_low", "ms_high", "dense_ms",
    "speedup", "ci_low", "ci_high", "tflops", "gbs", "peak_frac", "bound", "bytes", "flops",
    "baseline", "path", "parity", "compared", "mae", "max_abs", "wall_ms", "base_wall_ms",
    "first_call_ms", "n", "base_peak_frac", "base_ran", "status", "why", "sm_mhz", "power_w",
    "peak_mem_mib", *PROVENANCE,
)  # fmt: skip


# What a call must launch; the launchers choose which of these kernels, and rows tell.
KERNELS = {
    "cmp": ("_span_*",), "win": ("_span_*",), "sel": ("_block_attn_*",),
    "select": ("_block_score_*", "_block_topn_kernel"), "turn": ("_turn_kernel",),
    "full": ("_span_*", "_block_topn_kernel", "_block_attn_*"),
}  # fmt: skip
BACKWARD_KERNELS = {
    "cmp": ("_span_bwd_*",), "win": ("_span_bwd_*",), "sel": ("_block_attn_bwd_*",),
    "full": ("_combine_bwd_kernel", "_span_bwd_*", "_block_attn_bwd_*"),
}  # fmt: skip


def dense_calls(x: Prefill) -> list[tuple[str, Callable[[], Tensor]]]:
    """Causal dense attention of the same length by each SDPA backend that takes it."""

    def run(backend: SDPBackend) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k_sel, x.v_sel))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    # The others make S x S scores, or copies of K and V for every head.
    found = usable({
        f"dense sdpa_{name} gqa": partial(run, BACKENDS[name]) for name in ("flash", "cudnn")
    })  # fmt: skip
    if why := found.why_none():
        note(f"prefill bench: no dense attention to compare with at S={x.shape.S}: {why}", "warn")
    return [(found.label(name), call) for name, call in found.calls.items()]


def judged(
    name: str, call: Callable[[], Any], path: str, x: Prefill,
    truth: Callable[[torch.dtype], Tensor], **more: Any,
) -> Contender:  # fmt: skip
    """A contender that computes something else than NSA does: truth(dtype) is its own result."""
    return Contender(name, call, path, oracle=lambda: truth(torch.float64),
                     same_dtype=lambda: truth(x.q.dtype), **more)  # fmt: skip


def dense(
    name: str, call: Callable[[], Any], x: Prefill, truth: Callable[[torch.dtype], Tensor],
    *passes: bool,
) -> Contender:  # fmt: skip
    """Dense attention as a contender; passes: of forward (False) and backward (True) those that a
    call makes."""
    work = [sum(count(x.shape, "dense", backward) for backward in passes)
            for count in (bytes_needed, flops)]  # fmt: skip
    return judged(name, call, "sdpa", x, truth, bytes_needed=work[0], flops=work[1],
                  attends=promised(name) if len(passes) == 1 else None)  # fmt: skip


def dense_forward(x: Prefill) -> list[Contender]:
    truth = partial(x.exact, "dense")
    return [dense(name, torch.no_grad()(run), x, truth, False) for name, run in dense_calls(x)]


def forward_case(
    x: Prefill, op: str, columns: dict[str, Any], baselines: Sequence[Contender] | None = None
) -> Case:
    """baselines: what `full` is timed against, dense attention unless given."""
    shape = x.shape
    pick = lambda out: out[:, x.rows]
    call = torch.no_grad()(lambda: x.forward(op))

    def refill(seed: int) -> None:
        x.refill(seed)
        x.prepare(op)

    def renew(seed: int) -> None:
        x.renew(seed)
        if op == "select":  # which gets the compressed branch's log-sum-exp of these queries
            x.prepare(op)

    oracle_fn, same, view = lambda: x.exact(op), lambda: x.exact(op, x.q.dtype), pick
    if op == "select":
        view, same = x.block_quality, None
        oracle_fn = lambda: torch.ones(shape.B, len(x.at), shape.G, dtype=torch.float64)
    if baselines is None:
        baselines = dense_forward(x) if op == "full" else ()
    return Case(
        "prefill", f"prefill/{op}/fwd/S={shape.S}",
        Contender("nsa" if op == "full" else f"nsa {op}", call, "triton", KERNELS[op]),
        refill=refill, inputs=x.inputs, oracle=oracle_fn, same_dtype=same, baselines=baselines,
        view=view, renew=renew, distinct=op != "select",
        bytes_needed=bytes_needed(shape, op), flops=flops(shape, op),
        columns={**columns, "op": op, "direction": "fwd", "compared": x.compared},
    )  # fmt: skip


def check_key_gradients(
    x: Prefill, op: str, state: dict[str, Any], path: str = "triton",
    kernels: Sequence[str] | None = None,
    truth: Callable[[torch.dtype], list[Tensor]] | None = None,
) -> None:  # fmt: skip
    """Raises AssertionError when dQ, dK, dV or the gates' gradients are wrong.

    With do = 0 but for the sampled queries, these few make up all of them in fp64 too. kernels and
    truth(dtype): what another implementation on `path` launches, and its gradients; NSA's own else.
    """
    truth = truth or partial(sampled_gradients, x, op)
    kernels = BACKWARD_KERNELS[op] if kernels is None else kernels
    do = torch.zeros_like(x.do)
    do[:, x.at] = x.do[:, x.at]
    with launches.recording() as seen:
        got = torch.autograd.grad(state["out"], state["leaves"], do, retain_graph=True)
    of = "" if path == "triton" else f" of {path}"
    for i, (g, w, s) in enumerate(zip(got, truth(torch.float64), truth(x.q.dtype), strict=True)):
        if i == 0:
            g = g[:, x.at]
        size = max(1.0, w.abs().max().item())
        parity = measure_parity(
            f"prefill/{op}/bwd/S={x.shape.S}/gradient {i}{of}", "prefill_bwd", g, w, s,
            path_requested=path, path_taken=path, launches=seen, expect_kernels=kernels, seed=0,
            limit_mae=2e-3 * size,
        )  # fmt: skip
        emit("parity", dataclasses.asdict(parity))
        if parity.status != "PASS":
            raise AssertionError(f"gradient {i} of {op}{of}: {'; '.join(parity.why)}")


def backward_case(x: Prefill, op: str, columns: dict[str, Any]) -> Case:
    """The backward alone; in each check dq of the sampled queries is held against fp64."""
    shape = x.shape
    state: dict[str, Any] = {}
    rivals = dense_calls(x) if op == "full" else []

    def refill(seed: int) -> None:
        state.clear()
        x.refill(seed)
        x.prepare(op)
        leaves = x.leaves(op)
        for t in leaves:
            t.requires_grad_(True)
        state.update(out=x.forward(op), leaves=leaves, dense={n: run() for n, run in rivals})

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(state["out"], state["leaves"], x.do, retain_graph=True)

    def dense_call(name: str) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(
            state["dense"][name], (x.q, x.k_sel, x.v_sel), x.do, retain_graph=True
        )

    dq = lambda part, dtype: sampled_gradients(x, part, dtype)[0]
    refill(0)
    check_key_gradients(x, op, state)
    return Case(
        "prefill", f"prefill/{op}/bwd/S={shape.S}",
        Contender("nsa" if op == "full" else f"nsa {op}", call, "triton", BACKWARD_KERNELS[op]),
        refill=refill, inputs=x.inputs, oracle=lambda: dq(op, torch.float64),
        same_dtype=lambda: dq(op, x.q.dtype),
        baselines=[
            dense(name, dense_call(name), x, partial(dq, "dense"), True) for name, _ in rivals
        ],
        view=lambda grads: grads[0][:, x.rows], renew=partial(x.renew, names=("do",)),
        bytes_needed=bytes_needed(shape, op, backward=True), flops=flops(shape, op, backward=True),
        columns={**columns, "op": op, "direction": "bwd", "compared": x.compared},
    )  # fmt: skip


def turn_case(x: Projections, direction: str, columns: dict[str, Any]) -> Case:
    """The rotary turn of a layer's projections, which is no part of full: either way, all columns
    of the sampled tokens."""
    shape, backward = x.shape, direction == "bwd"
    state: dict[str, Any] = {}

    def refill(seed: int) -> None:
        state.clear()
        x.refill(seed)
        if backward:
            state["out"] = x.forward()

    def call() -> Any:
        if not backward:
            with torch.no_grad():
                return x.forward()
        return torch.autograd.grad(state["out"], x.qkv, x.do, retain_graph=True)

    x.qkv.requires_grad_(backward)
    return Case(
        "prefill", f"prefill/turn/{direction}/S={shape.S}",
        Contender("nsa turn", call, "triton", KERNELS["turn"]),
        refill=refill, inputs=x.inputs, oracle=lambda: x.exact(backward=backward),
        same_dtype=lambda: x.exact(x.qkv.dtype, backward),
        view=lambda out: out[0][:, x.sampled_rows] if backward else x.rows(out),
        renew=partial(x.renew, backward=backward),
        bytes_needed=bytes_needed(shape, "turn"), flops=flops(shape, "turn"),
        columns={**columns, "op": "turn", "direction": direction,
                 "compared": f"{len(x.at)} of {shape.S} tokens"},
    )  # fmt: skip


def pack_case(x: Pack, direction: str, columns: dict[str, Any]) -> Case:
    """A pack of one long and many short sequences against these two kinds, one after the other."""
    shape, backward = x.shape, direction == "bwd"
    leaves, state = x.leaves("full"), {}
    makers = {"nsa pack": lambda: x.forward("full"), "nsa its parts": x.parts}

    def refill(seed: int) -> None:
        state.clear()
        x.refill(seed)
        for t in leaves:
            t.requires_grad_(backward)
        if backward:
            state.update({name: make() for name, make in makers.items()})

    def call(name: str) -> Any:
        if not backward:
            with torch.no_grad():
                return makers[name]()
        return torch.autograd.grad(state[name], leaves, x.do, retain_graph=True)

    def exact(dtype: torch.dtype = torch.float64) -> Tensor:
        return sampled_gradients(x, "full", dtype)[0] if backward else x.exact("full", dtype)

    kernels = (BACKWARD_KERNELS if backward else KERNELS)["full"]
    whole, parts = (Contender(name, partial(call, name), "triton", kernels) for name in makers)
    short = dataclasses.replace(shape, S=x.SHORT, B=len(x.begins) - 1)
    kinds = dataclasses.replace(shape, S=x.long), short
    return Case(
        "prefill", f"prefill/pack/{direction}/S={shape.S}", whole, refill=refill, inputs=x.inputs,
        oracle=exact, same_dtype=lambda: exact(x.q.dtype), baselines=[parts],
        view=lambda result: (result[0] if backward else result)[:, x.rows],
        renew=partial(x.renew, names=("do",) if backward else ("q",)),
        bytes_needed=sum(bytes_needed(kind, "full", backward) for kind in kinds),
        flops=sum(flops(kind, "full", backward) for kind in kinds),
        columns={**columns, "op": "pack", "direction": direction, "compared": x.compared},
    )  # fmt: skip


def case_of(shape: Shape, op: str, direction: str, columns: dict[str, Any]) -> Case:
    if op == "turn":
        return turn_case(Projections(shape), direction, columns)
    if op == "pack":
        return pack_case(Pack(dataclasses.replace(shape, B=1)), direction, {**columns, "B": 1})
    make = forward_case if direction == "fwd" else backward_case
    return make(Prefill(shape), op, columns)


def call_once(shape: Shape, op: str, direction: str) -> None:
    """The kernels' calls of a case, on whatever the memory holds."""
    x: Any = {"turn": Projections, "pack": Pack}.get(op, Prefill)(shape)
    calls, leaves = [x.forward], [x.qkv] if op == "turn" else x.leaves(op)
    if op != "turn":
        calls = [partial(x.forward, op)]
    if op == "pack":
        calls.append(x.parts)
    elif op != "turn":
        x.prepare(op)
    for t in leaves:
        t.requires_grad_(direction == "bwd")
    with torch.set_grad_enabled(direction == "bwd"):
        for call in calls:
            out = call()
            if direction == "bwd":
                torch.autograd.grad(out, leaves, x.do)


def compile_cells(cells: Sequence[tuple[Shape, str, str]]) -> None:
    """Compile what the cases of these (shape, op, direction) launch, side by side. What one of them
    meets, such as too little memory, is its measurement's to tell."""
    found: list[Any] = []
    for cell in cells:
        for _ in range(2):
            try:
                found += plan_call(partial(call_once, *cell)).launches
                break
            except torch.cuda.OutOfMemoryError:  # which planned launches hold
                _compile(found)
                torch.cuda.empty_cache()
            except Exception:
                break
    _compile(found)
    torch.cuda.empty_cache()


def _compile(found: list[Any]) -> None:
    """Compile these launches and forget them."""
    from nsa.kernels.launch import compile_side_by_side

    with suppress(Exception):
        compile_side_by_side(found)
    found.clear()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--S_list", type=integers, default=[8192, 32768], help="tokens")
    parser.add_argument("--ops", help=f"from {','.join(OPS)}; default full, parts at the longest S")
    parser.add_argument("--directions", default="fwd,bwd", help="fwd, bwd or both")
    for name, value in (("B", 1), ("HQ", 64), ("G", 4), ("D", 128), ("Dv", 128), ("l", 32),
                        ("d", 16), ("l_sel", 64), ("n_sel", 16), ("w", 512)):  # fmt: skip
        parser.add_argument(f"--{name}", type=positive, default=value)
    parser.add_argument("--seconds", type=seconds, default=1.0, help="device time a case, at most")
    parser.add_argument("--compile_only", action="store_true", help="compile, and time nothing")
    add_csv_argument(parser)
    add_shrink_argument(parser)
    args = parser.parse_args(argv)
    args.longest_alone = PARTS if args.ops is None else ()
    args.ops = ["full", *PARTS] if args.ops is None else args.ops.split(",")
    args.directions = args.directions.split(",")
    if not set(args.ops) <= set(OPS):
        parser.error(f"--ops must be from {', '.join(OPS)}, got {','.join(args.ops)}")
    if not set(args.directions) <= {"fwd", "bwd"}:
        parser.error(f"--directions must be from fwd, bwd, got {','.join(args.directions)}")
    check_sizes(parser, args)
    check_flags(parser)
    args.S_list = shrunk("--S_list", args.S_list, args.shrink, 64)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        note("torch sees no CUDA device: nothing was timed", "warn")
        return 3
    names = ("B", "HQ", "G", "D", "Dv", "l", "d", "l_sel", "n_sel", "w")
    shape_of = lambda S: Shape(S, **{n: getattr(args, n) for n in names})
    cells = [
        (op, S, direction)
        for op, S, direction in itertools.product(args.ops, args.S_list, args.directions)
        if (op, direction) != ("select", "bwd")
        and (op not in args.longest_alone or S == max(args.S_list))
    ]
    spent.begin()
    if args.compile_only:  # beside others
        torch.cuda.set_per_process_memory_fraction(0.25)
    with spent.on("compiling"):
        compile_cells([(shape_of(S), op, direction) for op, S, direction in cells])
    if args.compile_only:
        return 0
    gpu, clock = Gpu(), CudaClock()
    about, ceiling = provenance(gpu), ceilings(gpu, out_dir())
    parts = Budget(device_s=args.seconds, min_n=20, warm_s=0.05, warm_cap_s=1.0)
    # What speeds are told by; long calls at full power settle late.
    whole = dataclasses.replace(parts, device_s=2 * args.seconds, warm_s=0.3)
    written, failed = [], False
    for op, S, direction in cells:
        shape = shape_of(S)
        columns = {"S": S, **{n: getattr(args, n) for n in names}, "dtype": "bf16", **about}
        torch.cuda.reset_peak_memory_stats()
        name = f"prefill/{op}/{direction}/S={S}"
        about_case = {**columns, "op": op, "direction": direction}
        build = partial(case_of, shape, op, direction, columns)
        row = measure(Unbuilt("prefill", name, build, about_case), clock, gpu=gpu, ceiling=ceiling,
                      budget=whole if op == "full" else parts)  # fmt: skip
        peak = torch.cuda.max_memory_allocated() / 2**20
        flat = row.csv()
        written.append({**flat, "dense_ms": flat["base_ms"], "peak_mem_mib": round(peak)})
        failed |= row.status == "FAILED"
        say(args, row.line())
        write_so_far(args.csv, written, COLUMNS)
        torch.cuda.empty_cache()
    write_csv(args.csv, written, COLUMNS)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
