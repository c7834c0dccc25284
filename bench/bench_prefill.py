"""Prefill and training: all of NSA, and each of its parts, against dense attention of one length.

    python bench/bench_prefill.py                         # 8k and 32k tokens, forward and backward
    python bench/bench_prefill.py --S_list 65536 --ops full,sel --csv prefill.csv
    python bench/bench_prefill.py --l_sel 128 --ops sel --sharing random,shared,documents
    python bench/bench_prefill.py --compile_only          # leaves the kernels in Triton's cache

Sizes default to 64 query heads on 4 KV groups, head size 128 (the paper's keys have 192), l=32
d=16, 16 blocks of 64, window 512, bf16, one sequence. The candidate is the Triton operator behind
nsa.nsa_attention; the baseline is causal dense attention by the fastest backend of torch's SDPA
(GQA). Results are checked on sampled queries (column `compared`) against fp64 before and after the
timing; NSA and dense attention each against their own. bwd is the backward pass alone. turn, the
rotary turn of a layer's projections into a tensor per branch, comes before `full` and is no part of
it. sel gets its blocks ascending, as the choice of blocks leaves them; nsa.selection_attention
sorts them first.
--sharing says how far neighbouring queries choose the same blocks: random (an empty cell), by
chance; shared, as measured in real models, where four neighbours that choose 16 blocks of 64 each
name 22 to 24 distinct ones; documents, by chance among the blocks of their document of 4096 tokens.
It enters by queries and compressed keys alone: NSA chooses its blocks itself. distinct_of_4 is what
four neighbours really named in the first checked call (seed 0); `draw` is the seed of the inputs of
the timed calls. It matters to full and sel. Dense attention is timed beside random blocks alone,
since it reads none. Without --sharing the longest S alone has rows of shared ones.
pack is all of NSA on a pack of one sequence of half the tokens and many of 16; its baseline is not
dense attention but the two kinds, one call after the other. Without --ops there is no pack, and the
longest S alone has the parts. All kernels are compiled side by side before the first case.

Exit code: 0 timed, 1 a result is wrong, 2 usage, 3 nothing could be run.
"""

import itertools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import prefill_inputs, spent
from bench.cases import truths
from bench.main import bench_parser, card_tools, parsed, time_cases
from bench.parity import measure_parity
from bench.prefill_inputs import SHARING, Pack, Prefill, Projections, sampled_gradients
from bench.provenance import COLUMNS as PROVENANCE
from bench.records import emit, note, shrunk
from bench.roofline import Shape, bytes_needed, flops
from bench.sdpa_baselines import BACKENDS, promised, usable
from bench.timing import Budget, Case, Contender, Unbuilt
from nsa import launches
from nsa.plans import plan_call

SIZES = {"B": 1, "HQ": 64, "G": 4, "D": 128, "Dv": 128, "l": 32, "d": 16, "l_sel": 64, "n_sel": 16,
         "w": 512}  # fmt: skip
PARTS = ("cmp", "sel", "win", "select", "turn")
OPS = ("full", *PARTS, "pack")
READ_BLOCKS = ("full", "sel")  # the ops whose time depends on what neighbours share
COLUMNS = (
    "op", "direction", "S", "B", "HQ", "G", "D", "Dv", "l", "d", "l_sel", "n_sel", "w", "dtype",
    "sharing", "distinct_of_4", "ms", "ms_low", "ms_high", "dense_ms",
    "speedup", "ci_low", "ci_high", "tflops", "gbs", "peak_frac", "bound", "bytes", "flops",
    "baseline", "path", "parity", "compared", "mae", "max_abs", "wall_ms", "base_wall_ms",
    "first_call_ms", "n", "draw", "base_peak_frac", "base_ran", "status", "why", "sm_mhz",
    "power_w", "peak_mem_mib", *PROVENANCE,
)  # fmt: skip
# Kernels of which a call must launch one each: names, or patterns where the launchers choose.
KERNELS = {
    "cmp": ("_span_fwd_*",), "win": ("_span_fwd_*",), "sel": ("_block_attn_fwd_*",),
    "select": ("_block_score_*", "_block_topn_kernel"), "turn": ("_turn_kernel",),
    "full": ("_span_*fwd_*", "_block_topn_kernel", "_block_attn_fwd_*"),
    "full, all blocks": ("_span_*fwd_*", "_every_block_kernel"),
}  # fmt: skip
BACKWARD_KERNELS = {
    "cmp": ("_span_bwd_*",), "win": ("_span_bwd_*",), "sel": ("_block_attn_bwd_*",),
    "full": ("_combine_bwd_kernel", "_span_bwd_*", "_block_attn_bwd_*"),
    "full, all blocks": ("_combine_bwd_kernel", "_span_bwd_*"),
}  # fmt: skip


def kernels_of(op: str, direction: str, shape: Shape, longest: int) -> tuple[str, ...]:
    """Return the kernels that a call must launch. longest: tokens of its longest sequence; where
    queries choose all blocks of it, selection is dense attention."""
    if op == "full" and longest <= shape.n_sel * shape.l_sel:
        op = "full, all blocks"
    ways = {"fwd": KERNELS, "bwd": BACKWARD_KERNELS}
    return tuple(kernel for way in direction.split("+") for kernel in ways[way][op])


def dense_calls(x: Prefill) -> list[tuple[str, Callable[[], Tensor]]]:
    """Causal dense attention of the same length by each SDPA backend that takes it."""

    def run(backend: SDPBackend) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (x.q, x.k_sel, x.v_sel))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    # The others make S x S scores, or copies of K and V for every head.
    found = usable(
        {f"dense sdpa_{name} gqa": partial(run, BACKENDS[name]) for name in ("flash", "cudnn")}
    )
    if why := found.why_none():
        note(f"prefill bench: no dense attention to compare with at S={x.shape.S}: {why}", "warn")
    return [(found.label(name), call) for name, call in found.calls.items()]


def case_name(op: str, direction: str, shape: Shape, sharing: str = "random") -> str:
    """The name of a case: with the sizes that are not the paper's, and a sharing but random."""
    sizes = [f"{n}={getattr(shape, n)}" for n in SIZES if getattr(shape, n) != SIZES[n]]
    more = sizes + [sharing] * (sharing != "random")
    return "/".join(["prefill", op, direction, f"S={shape.S}", *more])


def work(shape: Shape, op: str, direction: str) -> dict[str, int]:
    """bytes_needed and flops of a call that goes forward, backward ("bwd") or both ("fwd+bwd")."""
    ways = [way == "bwd" for way in direction.split("+")]
    counts = {"bytes_needed": bytes_needed, "flops": flops}
    return {name: sum(count(shape, op, way) for way in ways) for name, count in counts.items()}


class Passes:
    """Named forwards on one set of inputs (direction "fwd"), their backwards alone ("bwd"), or both
    in one call ("fwd+bwd"); what a backward returns are the gradients.

    fill(seed) writes new inputs. forwards: name -> (forward, its leaves); of "bwd" the forward runs
    in refill(), outside of the clock. do: gradients of the outputs.
    """

    def __init__(
        self, direction: str, fill: Callable[[int], None],
        forwards: Mapping[str, tuple[Callable[[], Any], Sequence[Tensor]]], do: Any,
    ) -> None:  # fmt: skip
        self.direction, self.fill, self.forwards, self.do = direction, fill, forwards, do
        self.out: dict[str, Any] = {}
        for _, leaves in forwards.values() if direction != "fwd" else ():
            for t in leaves:
                t.requires_grad_(True)

    def refill(self, seed: int) -> None:
        self.out.clear()
        self.fill(seed)
        if self.direction == "bwd":
            self.out.update({name: forward() for name, (forward, _) in self.forwards.items()})

    def call(self, name: str) -> Callable[[], Any]:
        forward, leaves = self.forwards[name]
        if self.direction == "fwd":
            return torch.no_grad()(forward)
        if self.direction == "bwd":
            return lambda: torch.autograd.grad(self.out[name], leaves, self.do, retain_graph=True)
        return lambda: torch.autograd.grad(forward(), leaves, self.do)


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
    kernels = kernels_of(op, "bwd", x.shape, x.shape.S) if kernels is None else kernels
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
        emit("parity", asdict(parity))
        if parity.status != "PASS":
            raise AssertionError(f"gradient {i} of {op}{of}: {'; '.join(parity.why)}")


def attention_case(
    x: Prefill, op: str, direction: str, columns: dict[str, Any],
    baselines: Sequence[Contender] | None = None,
) -> Case:  # fmt: skip
    """One op, forward, the backward alone, or both in one call; where there is a backward, dq of
    the sampled queries is held against fp64 in each check, the other gradients once here.

    baselines: what `full` is timed against, dense attention unless given.
    """
    shape, forward = x.shape, direction == "fwd"
    name = "nsa" if op == "full" else f"nsa {op}"
    rivals = dense_calls(x) if op == "full" and baselines is None else []
    renewed = {"fwd": ("q",), "bwd": ("do",), "fwd+bwd": ("q", "do")}[direction]

    def fill(seed: int) -> None:
        x.refill(seed)
        x.prepare(op)

    def renew(seed: int) -> None:
        x.renew(seed, renewed)
        if op == "select":  # which gets the compressed branch's log-sum-exp of these queries
            x.prepare(op)

    def truth(part: str, dtype: torch.dtype) -> Tensor:
        return x.exact(part, dtype) if forward else sampled_gradients(x, part, dtype)[0]

    forwards = {name: (lambda: x.forward(op), x.leaves(op))}
    forwards |= {rival: (run, (x.q, x.k_sel, x.v_sel)) for rival, run in rivals}
    passes = Passes(direction, fill, forwards, x.do)
    kernels = kernels_of(op, direction, shape, shape.S)
    if not forward:
        passes.refill(0)
        out = passes.out[name] if direction == "bwd" else x.forward(op)
        check_key_gradients(x, op, {"out": out, "leaves": x.leaves(op)})
    right = truths(partial(truth, op), x.q.dtype)
    view = lambda result: (result if forward else result[0])[:, x.rows]
    if op == "select":
        view, best = x.block_quality, torch.ones(shape.B, len(x.at), shape.G, dtype=torch.float64)
        right = {"oracle": lambda: best}
    if baselines is None:
        baselines = [
            Contender(
                rival, passes.call(rival), "sdpa", **truths(partial(truth, "dense"), x.q.dtype),
                attends=promised(rival) if direction != "fwd+bwd" else None,
                **work(shape, "dense", direction),
            )
            for rival, _ in rivals
        ]  # fmt: skip
    facts = lambda: {"distinct_of_4": prefill_inputs.distinct_blocks(x.blocks)}
    return Case(
        "prefill", case_name(op, direction, shape, x.sharing),
        Contender(name, passes.call(name), "triton", kernels),
        refill=passes.refill, inputs=x.inputs, **right, baselines=baselines,
        view=view, renew=renew, distinct=op != "select", **work(shape, op, direction),
        columns={**columns, "compared": x.compared},
        facts=facts if op in READ_BLOCKS else None,
    )  # fmt: skip


def turn_case(x: Projections, direction: str, columns: dict[str, Any]) -> Case:
    """The rotary turn of a layer's projections, which is no part of full: either way, all columns
    of the sampled tokens."""
    shape, backward = x.shape, direction == "bwd"
    passes = Passes(direction, x.refill, {"nsa turn": (x.forward, [x.qkv])}, x.do)
    return Case(
        "prefill", case_name("turn", direction, shape),
        Contender("nsa turn", passes.call("nsa turn"), "triton", KERNELS["turn"]),
        refill=passes.refill, inputs=x.inputs,
        **truths(partial(x.exact, backward=backward), x.qkv.dtype),
        view=lambda out: out[0][:, x.sampled_rows] if backward else x.rows(out),
        renew=partial(x.renew, backward=backward), **work(shape, "turn", direction),
        columns={**columns, "compared": f"{len(x.at)} of {shape.S} tokens"},
    )  # fmt: skip


def pack_case(x: Pack, direction: str, columns: dict[str, Any]) -> Case:
    """A pack of one long and many short sequences against these two kinds, one after the other."""
    shape, backward = x.shape, direction == "bwd"
    forwards = {"nsa pack": lambda: x.forward("full"), "nsa its parts": x.parts}
    forwards = {name: (make, x.leaves("full")) for name, make in forwards.items()}
    passes = Passes(direction, x.refill, forwards, x.do)
    exact = lambda dtype: (
        sampled_gradients(x, "full", dtype)[0] if backward else x.exact("full", dtype)
    )
    kernels = kernels_of("full", direction, shape, x.long)
    whole, parts = (Contender(n, passes.call(n), "triton", kernels) for n in forwards)
    shapes = replace(shape, S=x.long), replace(shape, S=x.SHORT, B=len(x.begins) - 1)
    kinds = [work(kind, "full", direction) for kind in shapes]
    return Case(
        "prefill", case_name("pack", direction, shape), whole, refill=passes.refill,
        inputs=x.inputs, **truths(exact, x.q.dtype), baselines=[parts],
        view=lambda result: (result[0] if backward else result)[:, x.rows],
        renew=partial(x.renew, names=("do",) if backward else ("q",)),
        **{name: sum(kind[name] for kind in kinds) for name in kinds[0]},
        columns={**columns, "compared": x.compared},
    )  # fmt: skip


def case_of(shape: Shape, op: str, direction: str, columns: dict, sharing: str = "random") -> Case:
    if op == "turn":
        return turn_case(Projections(shape), direction, columns)
    if op == "pack":
        return pack_case(Pack(replace(shape, B=1)), direction, {**columns, "B": 1})
    beside = None if sharing == "random" else []  # dense attention takes as long at any sharing
    return attention_case(Prefill(shape, sharing=sharing), op, direction, columns, beside)


Cell = tuple[Shape, str, str, str]  # sizes, op, direction, sharing


def call_once(shape: Shape, op: str, direction: str) -> None:
    """The kernels' calls of a case, on whatever the memory holds."""
    x: Any
    if op == "turn":
        x = Projections(shape)
        calls, leaves = [x.forward], [x.qkv]
    elif op == "pack":
        x = Pack(replace(shape, B=1))
        calls, leaves = [partial(x.forward, op), x.parts], x.leaves(op)
    else:
        x = Prefill(shape)
        x.prepare(op)
        calls, leaves = [partial(x.forward, op)], x.leaves(op)
    for t in leaves:
        t.requires_grad_(direction == "bwd")
    with torch.set_grad_enabled(direction == "bwd"):
        for call in calls:
            out = call()
            if direction == "bwd":
                torch.autograd.grad(out, leaves, x.do)


def compile_cells(cells: Iterable[Cell]) -> None:
    """Compile what the cases of these cells launch, side by side. What one of them meets, such as
    too little memory, is its measurement's to tell."""
    found: list[Any] = []
    for cell in dict.fromkeys(cell[:3] for cell in cells):  # kernels are alike at any sharing
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


def parse(argv: list[str] | None = None) -> Namespace:
    ways = "fwd", "bwd"
    lists = {
        "ops": (OPS, None, "; default full, parts at the longest S"),
        "directions": (ways, list(ways), ""),
        "sharing": (SHARING, None, "; default random, and shared at the longest S"),
    }
    lengths = [8192, 32768]
    parser = bench_parser(__doc__, lengths=lengths, sizes=SIZES, lists=lists, device_s=1.0)
    parser.add_argument("--compile_only", action="store_true", help="compile, and time nothing")
    args = parsed(parser, argv)
    args.S_list = shrunk("--S_list", args.S_list, args.shrink, 64)
    return args


def cells(args: Namespace) -> Iterator[Cell]:
    """Each op, length, direction and sharing; without --ops the longest S alone has the parts, and
    without --sharing it alone has shared."""
    sizes = {name: getattr(args, name) for name in SIZES}
    ops, alone = (args.ops, ()) if args.ops else (("full", *PARTS), PARTS)
    for op, S, direction in itertools.product(ops, args.S_list, args.directions):
        longest = S == max(args.S_list)
        if (op, direction) == ("select", "bwd") or (op in alone and not longest):
            continue
        of_these = args.sharing or SHARING[: 1 + longest]
        for sharing in of_these if op in READ_BLOCKS else SHARING[:1]:
            yield Shape(S, **sizes), op, direction, sharing


def cases(args: Namespace, about: dict[str, Any]) -> Iterator[Unbuilt]:
    parts = budget_of(args)
    # The report quotes these rows as its speeds. Long calls at full power settle late, and jump by
    # 2 % from one to the next: 30 of them fix a median to 1 %.
    whole = replace(parts, device_s=6 * args.seconds, warm_s=0.3)
    for shape, op, direction, sharing in cells(args):
        sizes = {name: getattr(shape, name) for name in ("S", *SIZES)}
        columns = {**sizes, "dtype": "bf16", **about, "op": op, "direction": direction}
        columns["sharing"] = None if sharing == "random" else sharing
        torch.cuda.reset_peak_memory_stats()
        peak = lambda row: {"peak_mem_mib": round(torch.cuda.max_memory_allocated() / 2**20)}
        yield Unbuilt(
            "prefill", case_name(op, direction, shape, sharing),
            partial(case_of, shape, op, direction, columns, sharing), columns, peak,
            whole if op == "full" and sharing == "random" else parts,
        )  # fmt: skip
        torch.cuda.empty_cache()


def budget_of(args: Namespace) -> Budget:
    return Budget(device_s=args.seconds, min_n=20, warm_s=0.05, warm_cap_s=1.0)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if torch.cuda.is_available():
        spent.begin()
        if args.compile_only:  # beside others
            torch.cuda.set_per_process_memory_fraction(0.25)
        with spent.on("compiling"):
            compile_cells(cells(args))
        if args.compile_only:
            return 0
    tools = card_tools(budget_of(args))
    return time_cases(args, tools, COLUMNS, partial(cases, args), {"dense_ms": "base_ms"})


if __name__ == "__main__":
    raise SystemExit(main())
