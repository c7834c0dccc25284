"""One decode step of NSA against dense attention over the same cache, in total and by branch.

    python bench/bench_decode.py                              # the paper's sizes on this GPU
    python bench/bench_decode.py --S_list 512,4096 --csv decode.csv --branch_force_mode none

A step is what `NSAAttention.step` does after it appended the newest token: attention from one
query over a cache of S tokens. Every sample sees these S tokens: nothing is appended between them.
Times are medians of device time on a GPU (cold L2) and of host time on a CPU (warm); `wall_ms` is
what a host sees that calls back to back. ci_low and ci_high bound ms_total, speedup_low and
speedup_high the ratio to the baseline, all at 95 %.

--branch_force_mode: which branches are also timed alone. The others' work is not launched, not
merely ignored. env (default): each of the three, along the routes that the NSA_* environment
chooses; cmp, sel or win: that one; none: no branch. ms_sel attends to blocks chosen before the
clock starts: choosing them needs the compressed branch and is part of ms_total only.

reads_*: keys per KV group. reads_actual counts what filling the cache with S - 1 tokens and the one
step after it really read, reads_actual_decode the step alone; both through the layer itself.

Exit code: 0 timed, 1 a result is wrong, 2 usage, 3 nothing could be run.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.clock import clock_for
from bench.device import Ceilings, Gpu
from bench.provenance import COLUMNS as PROVENANCE
from bench.provenance import provenance
from bench.records import BenchRow, add_csv_argument, note, say, write_csv
from bench.timing import Budget, Case, Contender, measure
from nsa import attention, blocks, dispatch, oracle
from nsa.config import NSAConfig
from nsa.dispatch import Branch, Route
from nsa.flags import Flags
from nsa.module import NSAAttention

BRANCHES = ("cmp", "sel", "win")
MODES = ("none", "env", *BRANCHES)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
STEP_KERNELS = (
    "_decode_scan_kernel", "_decode_topn_kernel", "_decode_selected_kernel", "_decode_merge_kernel",
)  # fmt: skip
BRANCH_KERNELS = {
    "cmp": ("_decode_scan_kernel", "_decode_merge_kernel"),
    "sel": ("_decode_selected_kernel", "_decode_merge_kernel"),
    "win": ("_decode_scan_kernel", "_decode_merge_kernel"),
}
CSV_COLUMNS = (
    "S", "ms_total", "ms_cmp", "ms_sel", "ms_win", "reads_actual", "reads_expected",
    "reads_actual_decode", "reads_expected_decode", "reads_cmp", "reads_sel", "reads_win",
    "ci_low", "ci_high", "cmp_low", "cmp_high", "sel_low", "sel_high", "win_low", "win_high",
    "wall_ms", "baseline", "base_ms", "speedup", "speedup_low", "speedup_high", "n", "cache",
    "status", "why", "branch_status", "path", "branch_path", "fallback", "parity", "mae", "max_abs",
    "bytes", "gbs", "B", "dim", "heads", "groups", "dk", "dv", "l", "d", "l_sel", "n_sel", "w",
    "dtype", *PROVENANCE,
)  # fmt: skip
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip


@dataclass(frozen=True)
class Counted:
    """Keys read per group: all of filling the cache and one step, and of the step alone."""

    total: int
    expected: int
    cmp: int
    sel: int
    win: int
    expected_step: int


class Step:
    """One layer's cache of S tokens and the newest query: what is timed, and what it must give.

    backend "triton" insists on the Triton step (also interpreted on a CPU); None follows `flags`.
    """

    def __init__(
        self, layer: NSAAttention, batch: int, S: int, *, flags: Flags | None = None,
        backend: str | None = None,
    ) -> None:  # fmt: skip
        c = self.config = layer.config
        weight = layer.q.weight
        self.S, self.backend = S, backend
        like = {"device": weight.device, "dtype": weight.dtype}
        self.cache = layer.make_cache(batch, S, max_step=1, count_reads=True)
        x = torch.randn(
            batch, S, c.dim, generator=torch.Generator().manual_seed(S), dtype=torch.float32
        ).to(**like)
        if S > 1:
            layer.prefill(x[:, :-1], self.cache)
        layer.step(x[:, -1:], self.cache)
        self.counted = self._count()
        self.q = torch.empty(batch, 1, c.heads, c.d_k, **like)
        self.gates = torch.empty(batch, 1, c.heads, 3, **like)
        self.open_gates = torch.ones_like(self.gates)
        self.blocks = torch.zeros(
            batch, 1, c.groups, c.n_sel, dtype=torch.int32, device=weight.device
        )
        self.flags = dispatch.resolve_flags(flags, self.q)
        self.refill(0)
        with torch.no_grad():
            self._find_route()

    def _count(self) -> Counted:
        c, S = self.config, self.S
        sizes = dict(l=c.l, d=c.d, l_sel=c.l_sel, n_sel=c.n_sel, w=c.w)
        if len(self.cache) != S:
            raise AssertionError(f"the cache holds {len(self.cache)} tokens, not {S}")
        reads = self.cache.reads()
        last = reads[-1]
        self.cache.reset_reads()
        return Counted(
            sum(r.total for r in reads), sum(blocks.reads(s, **sizes) for s in range(1, S + 1)),
            last.cmp, last.sel, last.win, blocks.reads(S, **sizes),
        )  # fmt: skip

    def _find_route(self) -> None:
        """The route that policy asks for, the one a call takes, and why they differ if they do."""
        request = dispatch.make_request(
            Branch.STEP, self.q, self.cache.k_sel, self.cache.v_sel, self.S, self.flags,
            self.backend,
        )  # fmt: skip
        wanted = dispatch.decide(request, self.flags, self.backend).route
        with dispatch.trace() as taken:
            self._attend(self.backend)
        step = next(t for t in reversed(taken) if t.branch is Branch.STEP)
        self.fused = step.route is Route.TRITON
        self.path = self.requested = "triton" if self.fused else "composed"
        self.fallback = step.fallback_reason
        # Sizes that no kernel serves are a limit; a kernel that fails is a result of its own.
        if wanted is Route.TRITON and not self.fused and self.fallback != "unsupported":
            self.requested = "triton"

    # ---- inputs ------------------------------------------------------------------------------

    def inputs(self) -> list[Tensor]:
        c = self.cache
        return [self.q, self.gates, self.blocks, c.k_cmp, c.v_cmp, c.k_sel, c.v_sel, c.k_win,
                c.v_win]  # fmt: skip

    def refill(self, seed: int) -> None:
        """N(0, 1) for queries, keys and values, U(0, 1) for gates, and blocks to match.

        The blocks come from the reference: a call of the step itself would leave right results in
        freed memory, where a kernel that writes nothing would find them.
        """
        c = self.config
        gen = torch.Generator(self.q.device).manual_seed(seed)
        for x in self.inputs():
            if x.is_floating_point():
                x.normal_(generator=gen)
        self.gates.uniform_(generator=gen)
        self.blocks.copy_(attention.select_blocks(
            self.q, self.cache.compressed()[0], l=c.l, d=c.d, l_sel=c.l_sel, n_sel=c.n_sel,
            n_init=c.n_init, n_local=c.n_local, q_start=self.S - 1, backend="reference",
            flags=self.flags,
        ))  # fmt: skip

    # ---- calls -------------------------------------------------------------------------------

    def _attend(self, backend: str | None) -> tuple[Tensor, Tensor]:
        return attention.nsa_decode(
            self.q, self.cache, None, self.gates, backend=backend, flags=self.flags
        )

    def total(self) -> Callable[[], tuple[Tensor, Tensor]]:
        """The step: a named route where Triton was chosen, so that no sample can fall back."""
        backend = "triton" if self.fused else self.backend
        return torch.no_grad()(lambda: self._attend(backend))

    def alone(self, branch: str) -> Callable[[], Tensor]:
        """One branch's part of the step, with nothing of the other two."""
        c, cache, flags = self.config, self.cache, self.flags
        if self.fused:
            from nsa.kernels.decode import nsa_decode_triton

            chosen = self.blocks if branch == "sel" else None
            return torch.no_grad()(lambda: nsa_decode_triton(
                self.q, cache.k_cmp, cache.v_cmp, cache.k_sel, cache.v_sel, cache.k_win,
                cache.v_win, self.open_gates, cache.lens, l=c.l, d=c.d, l_sel=c.l_sel,
                n_sel=c.n_sel, n_init=c.n_init, n_local=c.n_local, window=c.w, max_len=self.S,
                window_ring=True, branch=branch, block_indices=chosen,
            ))  # fmt: skip
        at = self.S - 1
        calls = {
            "cmp": lambda: attention.compressed_attention(
                self.q, *cache.compressed(), l=c.l, d=c.d, q_start=at, flags=flags
            )[0],
            "sel": lambda: attention.selection_attention(
                self.q, *cache.selectable(), self.blocks, block_size=c.l_sel, q_start=at,
                flags=flags,
            ),
            "win": lambda: attention.sliding_attention(
                self.q, *cache.window(1), window=c.w, flags=flags
            ),
        }  # fmt: skip
        return torch.no_grad()(calls[branch])

    def branch_path(self, branch: str) -> str:
        """The route that `alone(branch)` takes."""
        if self.fused:
            return "triton"
        with dispatch.trace() as taken:
            self.alone(branch)()
        return taken[-1].route.value

    # ---- truth -------------------------------------------------------------------------------

    def check_choice(self, chosen: Tensor) -> None:
        """Raise ValueError unless the chosen blocks are the best by the paper's scores in fp64.

        The forced blocks and the number must be exact; scores as close as the dtype's rounding may
        swap places.
        """
        c, t = self.config, self.S - 1
        slack = 1e-4 if self.q.dtype == torch.float32 else 1e-2
        scores = oracle.group_block_scores(
            self.q.cpu(), self.cache.compressed()[0].cpu(), l=c.l, d=c.d, l_sel=c.l_sel, q_start=t
        )
        own = t // c.l_sel
        forced = set(oracle.forced_blocks(t, c.l_sel, c.n_sel, c.n_init, c.n_local))
        for b in range(len(scores)):
            for g in range(c.groups):
                row = chosen[b, 0, g].tolist()
                picked = [j for j in row if j >= 0]
                tail = row[len(picked) :]
                free = [scores[b, 0, g, j].item() for j in picked if j not in forced]
                left = [scores[b, 0, g, j].item() for j in range(own + 1) if j not in picked]
                right = (
                    picked == sorted(set(picked)) and set(tail) <= {-1} and picked[-1] <= own
                    and len(picked) == min(c.n_sel, own + 1) and forced <= set(picked)
                    and (not free or not left or min(free) >= max(left) * (1 - slack))
                )  # fmt: skip
                if not right:
                    best = oracle.top_blocks(
                        scores[b, 0, g].tolist(), t, c.l_sel, c.n_sel, c.n_init, c.n_local
                    )
                    raise ValueError(f"sequence {b}, group {g} chose blocks {row}, not {best}")

    def truth(self, branch: str, chosen: Tensor) -> Tensor:
        """A branch's output [B, 1, HQ, Dv] in fp64 from the paper's equations."""
        c, t, q = self.config, self.S - 1, self.q.cpu()
        if branch == "cmp":
            kv = [x.cpu() for x in self.cache.compressed()]
            return oracle.compressed_attention(q, *kv, l=c.l, d=c.d, q_start=t)[0]
        if branch == "win":
            k, v = (x.cpu() for x in self.cache.window(1))
            return oracle.sliding_attention(q, k, v, window=c.w, q_start=k.shape[1] - 1)
        ranges = oracle.blocks_to_ranges(chosen.cpu(), c.l_sel, t)
        kv = [x.cpu() for x in self.cache.selectable()]
        return oracle.selection_attention(q, *kv, ranges)

    def total_truth(self, chosen: Tensor) -> Tensor:
        self.check_choice(chosen)
        return oracle.gated_sum(self.gates.cpu(), *(self.truth(b, chosen) for b in BRANCHES))

    def plain(self, branch: str, chosen: Tensor) -> Tensor:
        """The same branch as PyTorch computes it in the inputs' dtype."""
        if branch == "cmp":
            return plain_attention(self.q, *self.cache.compressed())
        if branch == "win":
            return plain_attention(self.q, *self.cache.window(1))
        k, v = self.cache.selectable()
        h = self.config.heads_per_group
        size = self.config.l_sel
        parts = []
        for b in range(k.shape[0]):
            for g in range(k.shape[2]):
                at = [
                    i for j in chosen[b, 0, g].tolist() if j >= 0
                    for i in range(j * size, min((j + 1) * size, self.S))
                ]  # fmt: skip
                heads = self.q[b : b + 1, :, g * h : (g + 1) * h]
                parts.append(plain_attention(heads, k[b : b + 1, at, g : g + 1],
                                             v[b : b + 1, at, g : g + 1]))  # fmt: skip
        return torch.cat(parts, 2).view(k.shape[0], 1, self.config.heads, -1)

    def total_plain(self, chosen: Tensor) -> Tensor:
        parts = [self.plain(b, chosen) for b in BRANCHES]
        return sum(self.gates[..., i : i + 1] * part for i, part in enumerate(parts))

    def dense_truth(self) -> Tensor:
        k, v = (x.cpu() for x in self.cache.selectable())
        return oracle.causal_attention(self.q.cpu(), k, v, q_start=self.S - 1)


@torch.no_grad()
def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, 1, HQ, Dk] over all of k [B, N, G, Dk], v: matmul, softmax, matmul in q's dtype."""
    h = q.shape[2] // k.shape[2]
    if k.shape[1] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    k, v = (x.transpose(1, 2).repeat_interleave(h, 1) for x in (k, v))
    scores = (q.transpose(1, 2) @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v).transpose(1, 2)


def dense_contenders(step: Step) -> list[Contender]:
    """Dense attention over the cache's S tokens by every backend of SDPA, in two layouts.

    rows: the heads of a group as query rows of one attention; gqa: one query, shared keys.
    """
    q = step.q
    B, _, HQ, _ = q.shape
    k, v = (x.transpose(1, 2) for x in step.cache.selectable())
    G = k.shape[1]

    def rows() -> Tensor:
        out = F.scaled_dot_product_attention(q.view(B, G, HQ // G, -1), k, v)
        return out.reshape(B, 1, HQ, -1)

    def gqa() -> Tensor:
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=True)
        return out.transpose(1, 2)

    def contender(name: str, backend: SDPBackend, form: Callable[[], Tensor]) -> Contender:
        def call() -> Tensor:
            with torch.no_grad(), sdpa_kernel(backend):
                return form()

        return Contender(
            f"dense sdpa {name}", call, "sdpa", oracle=step.dense_truth,
            same_dtype=lambda: plain_attention(q, *step.cache.selectable()),
        )  # fmt: skip

    names = _BACKENDS if q.is_cuda else {n: _BACKENDS[n] for n in ("flash", "math")}
    forms = (("rows", rows), ("gqa", gqa))
    return [contender(f"{n} {f}", names[n], form) for n in names for f, form in forms]


# ---- cases ---------------------------------------------------------------------------------------


def total_case(step: Step, columns: dict[str, Any]) -> Case:
    """The whole step against the strongest dense attention over the same cache."""
    chosen: list[Tensor] = [step.blocks]

    def view(out: Any) -> Tensor:
        if isinstance(out, tuple):
            chosen[0] = out[1].cpu()
            return out[0]
        return out

    c, q, read = step.config, step.q, step.counted
    itemsize, rows = q.element_size(), q.shape[0] * c.groups * (c.d_k + c.d_v)
    keys = read.cmp + read.sel + read.win
    return Case(
        "decode", f"decode/S={step.S}",
        Contender("nsa", step.total(), step.path, STEP_KERNELS if step.fused else ()),
        refill=step.refill, inputs=step.inputs, oracle=lambda: step.total_truth(chosen[0]),
        same_dtype=lambda: step.total_plain(chosen[0]), baselines=dense_contenders(step), view=view,
        requested=step.requested,
        bytes_needed=(keys * rows + q.shape[0] * c.heads * (c.d_k + c.d_v)) * itemsize,
        flops=2 * keys * rows * c.heads_per_group, columns=columns,
    )  # fmt: skip


def branch_case(step: Step, branch: str, columns: dict[str, Any]) -> Case:
    """One branch alone; it has no baseline of its own."""
    path = step.branch_path(branch)
    return Case(
        "decode_branch", f"decode/S={step.S}/{branch}",
        Contender(f"nsa {branch}", step.alone(branch), path,
                  BRANCH_KERNELS[branch] if step.fused else ()),
        refill=step.refill, inputs=step.inputs,
        oracle=lambda: step.truth(branch, step.blocks),
        same_dtype=lambda: step.plain(branch, step.blocks), columns=columns,
    )  # fmt: skip


def _ms(us: float | None) -> float | None:
    return None if us is None else us / 1e3


def csv_row(
    step: Step, row: BenchRow, parts: dict[str, BenchRow], columns: dict[str, Any]
) -> dict[str, Any]:
    """One line of the CSV: the step's row, its branches', and the reads."""
    read, parity = step.counted, row.parity or {}
    low, high = row.ci95_us or (None, None)
    slow, fast = row.speedup_ci95 or (None, None)
    line = {
        **columns, "S": step.S, "ms_total": _ms(row.median_us), "ci_low": _ms(low),
        "ci_high": _ms(high), "wall_ms": _ms(row.wall_us), "baseline": row.baseline,
        "base_ms": _ms(row.base_median_us), "speedup": row.speedup, "speedup_low": slow,
        "speedup_high": fast, "n": row.n, "cache": row.cache, "status": row.status,
        "why": "; ".join([*row.why, *(f"{b}: {w}" for b, p in parts.items() for w in p.why)]),
        "branch_status": " ".join(f"{b}={p.status}" for b, p in parts.items()),
        "path": row.path_taken,
        "branch_path": " ".join(f"{b}={p.path_taken}" for b, p in parts.items() if p.path_taken),
        "fallback": step.fallback, "parity": parity.get("status"), "mae": parity.get("mae"),
        "max_abs": parity.get("max_abs"), "bytes": row.bytes, "gbs": row.gbs,
        "reads_actual": read.total, "reads_expected": read.expected,
        "reads_actual_decode": read.cmp + read.sel + read.win,
        "reads_expected_decode": read.expected_step, "reads_cmp": read.cmp,
        "reads_sel": read.sel, "reads_win": read.win,
    }  # fmt: skip
    for branch, part in parts.items():
        line[f"ms_{branch}"] = _ms(part.median_us)
        line[f"{branch}_low"], line[f"{branch}_high"] = map(_ms, part.ci95_us or (None, None))
    return line


# ---- the command ---------------------------------------------------------------------------------


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text!r}")
    return value


def _lengths(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--B", type=_positive, default=1, help="sequences (default 1)")
    for name, default, what in (
        ("dim", 2560, "model width"), ("heads", 64, "query heads"), ("groups", 4, "KV groups"),
        ("dk", 192, "query and key width"), ("dv", 128, "value width"),
        ("l", 32, "compression block"), ("d", 16, "compression stride"),
        ("l_sel", 64, "selection block"), ("n_sel", 16, "blocks selected"), ("w", 512, "window"),
    ):  # fmt: skip
        add(f"--{name}", type=_positive, default=default, help=f"{what} (default {default})")
    add("--S_list", type=_lengths, help="context lengths, a,b,c (default by device)")
    add("--iters", type=_positive, default=30, help="least number of samples (default 30)")
    add("--warmup", type=int, default=3, help="calls before the adaptive warm-up (default 3)")
    add("--branch_force_mode", choices=MODES, default="env", help="branches timed alone, see above")
    add("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    add("--dtype", choices=DTYPES, help="default: bf16 on a GPU, fp32 on a CPU")
    add("--quick", action="store_true", help="shorter sampling and two lengths")
    add_csv_argument(parser)
    return parser


def _line(row: dict[str, Any]) -> str:
    def number(name: str, form: str) -> str:
        value = row.get(name)
        return "-" if value is None else format(value, form)

    if row.get("ms_total") is None:
        return f"S={row['S']:<7} {row['status']} {row['why']}"
    times = " ".join(f"{b} {number(f'ms_{b}', '.4f')}" for b in ("total", *BRANCHES))
    return (
        f"S={row['S']:<7} ms: {times} | reads {row['reads_actual_decode']}/"
        f"{row['reads_expected_decode']} | {number('speedup', '.2f')}x "
        f"[{number('speedup_low', '.2f')}, {number('speedup_high', '.2f')}] over "
        f"{row['baseline']} | {row['path']} {row['status']} {row['why']}"
    )


def bench_length(
    layer: NSAAttention, S: int, args: argparse.Namespace, columns: dict[str, Any],
    tools: dict[str, Any], backend: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Time one context length; the CSV line."""
    step = Step(layer, args.B, S, backend=backend)
    read = step.counted
    own = {**columns, "S": S, "reads_actual": read.cmp + read.sel + read.win,
           "reads_expected": read.expected_step, "fallback": step.fallback}  # fmt: skip

    def timed(case: Case) -> BenchRow:
        case.refill(case.seed)
        for _ in range(args.warmup):
            case.candidate.call()
        return measure(case, **tools)

    row = timed(total_case(step, own))
    mode = args.branch_force_mode
    wanted = BRANCHES if mode == "env" else () if mode == "none" else (mode,)
    parts = {b: timed(branch_case(step, b, {**own, "branch": b})) for b in wanted}
    return csv_row(step, row, parts, columns)


def main(argv: Sequence[str] | None = None, *, backend: str | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.warmup < 0:
        parser.error(f"argument --warmup: must be 0 or more, got {args.warmup}")
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
    lengths = args.S_list or ([4096, 16384, 65536] if gpu else [256, 512])
    if args.quick and args.S_list is None:
        lengths = lengths[:2]
    short = args.quick or gpu is None
    budget = Budget(min_n=args.iters)
    if short:
        budget = dataclasses.replace(budget, device_s=0.3, wall_s=1.5, warm_s=0.05, warm_cap_s=0.3)
    tools = {
        "clock": clock_for(device), "gpu": gpu, "cold": gpu is not None, "budget": budget,
        "nominal": gpu.nominal() if gpu else Ceilings(None, None, "unknown"),
    }
    columns = {
        **{n: getattr(args, n) for n in ("B", "dim", "heads", "groups", "dk", "dv", "l", "d",
                                         "l_sel", "n_sel", "w")},
        "dtype": dtype, **provenance(gpu),
    }  # fmt: skip
    torch.manual_seed(0)
    layer = NSAAttention(config).to(device=device, dtype=DTYPES[dtype]).eval()
    lines: list[dict[str, Any]] = []
    for S in lengths:
        try:
            line = bench_length(layer, S, args, columns, tools, backend)
        except torch.cuda.OutOfMemoryError as error:
            why = f"out of memory: {str(error).splitlines()[0]}"
            BenchRow("decode", f"decode/S={S}", "SKIPPED", why=(why,), columns={"S": S}).emit()
            line = {**columns, "S": S, "status": "SKIPPED", "why": why}
            torch.cuda.empty_cache()
        lines.append(line)
        say(args, _line(line))
        write_csv(args.csv if args.csv != "-" else None, lines, CSV_COLUMNS)
    if args.csv == "-":
        write_csv("-", lines, CSV_COLUMNS)
    statuses = [s for line in lines for s in (line["status"], line.get("branch_status") or "")]
    if any("FAILED" in status for status in statuses):
        return 1
    if all(line["status"] == "SKIPPED" for line in lines):
        note(f"decode bench: {lines[0]['why']}")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
