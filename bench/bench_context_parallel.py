"""Context-parallel NSA: time and scaling efficiency of one sequence over several GPUs.

    torchrun --nproc-per-node 4 -- bench/bench_context_parallel.py            # 64k and 256k tokens
    torchrun --nproc-per-node 4 -- bench/bench_context_parallel.py --S_list 1048576
    torchrun --nproc-per-node 2 -- bench/bench_context_parallel.py --directions decode \
        --S_list 131072,1048576 --alone 1048576
    python bench/bench_context_parallel.py                                    # a world of one

Sizes default to 64 query heads on 4 KV groups, head size 128, l=32 d=16 by mean
pooling, 16 blocks of 64, window 512, bf16, one sequence. A sample is the slowest rank's; bwd is the
backward pass alone. efficiency = t(1 GPU) / (W * t(W GPUs)), where one GPU runs nsa.nsa_attention
on the whole sequence with the compression in front; it is empty where that does not fit or is
longer than --alone tokens. Before the timing every rank checks sampled rows of its output, and for
bwd the gradients of these rows' outputs, against fp64; every timed call has other queries, and the
output of one that is drawn at random is checked too.

decode is attention of the newest token over a cache of S tokens that lies over the ranks
(nsa.ParallelNSACache), on GPUs a CUDA graph with its exchanges in it; one GPU decodes from an
nsa.NSACache. A sample is of several steps in a row, each on other queries. cache_mib is what a rank
keeps, sent_bytes what it sends in a step. Without CUDA the ranks are CPU processes on
gloo, which proves the code, not its speed: give small sizes then.

Exit code: 0 timed, 1 a result is wrong, 2 usage.
"""

import itertools
import os
import secrets
import socket
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
import torch.distributed as dist
from torch import Tensor

from bench.decode_graph import capture
from bench.main import Line, bench_parser, parsed
from bench.parity import Parity, measure_parity
from bench.prefill_inputs import row_output
from bench.proof import Marks
from bench.provenance import COLUMNS as PROVENANCE
from bench.ranks import (
    Timed,
    leave_ranks,
    of_all,
    of_first,
    on_ranks,
    rank_row,
    seed_of_all,
)
from bench.records import BenchRow, note, positive, shrunk
from bench.stats import instability, summary
from nsa import (
    Flags,
    NSACache,
    NSAConfig,
    ParallelNSACache,
    dispatch,
    exchange,
    launches,
    nsa_attention,
    parallel,
)
from nsa.attention import nsa_decode
from nsa.cache import BranchKV
from nsa.compress import mean_pool

COLUMNS = (
    "S", "world", "direction", "B", "HQ", "G", "D", "ms", "ms_low", "ms_high", "base_ms",
    "speedup", "efficiency", "tokens_per_s", "n", "status", "why", "parity", "mae", "max_abs",
    "path", "peak_mem_mib", "cache_mib", "sent_bytes", *PROVENANCE,
)  # fmt: skip
KV = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
SAMPLES = 4  # rows that each rank checks
STEPS = 16  # of decode in a sample: one of them is short beside what a clock of the host adds


def sizes(args: Namespace) -> dict[str, int]:
    return dict(l=args.l, d=args.d, l_sel=args.l_sel, n_sel=args.n_sel, window=args.w)


class Sequence1:
    """One sequence, spread over `group`, or whole on this rank for group None."""

    captured: dict[str, int] | None = None  # launches of a CUDA graph that is replayed

    def __init__(self, args: Namespace, S: int, group: Any, device: torch.device) -> None:
        self.args, self.S, self.group = args, S, group
        where = dict(device=device, dtype=args.torch_dtype)
        # Keys and values by one seed on every rank, so that any rank can check against all of them.
        gen = torch.Generator(device).manual_seed(S)
        self.whole = {
            n: torch.empty(args.B, S, args.G, args.D, **where).normal_(generator=gen) for n in KV
        }
        if group is None:
            self.at, cut = torch.arange(S), lambda x: x
        else:
            self.at, cut = parallel.positions(S, group), lambda x: parallel.shard(x, group)
        n, rank = len(self.at), 0 if group is None else group.rank()
        gen = self.draws = torch.Generator(device).manual_seed(S + 1 + rank)
        draw = lambda *shape: torch.empty(args.B, n, *shape, **where).normal_(generator=gen)
        self.q, self.do = draw(args.HQ, args.D), draw(args.HQ, args.D)
        self.gates = draw(args.HQ, 3).sigmoid_()
        self.local = {n: cut(x) for n, x in self.whole.items()}
        self.tensors = [x.requires_grad_() for x in (self.q, *self.local.values(), self.gates)]
        self.routes: dict[str, str] = {}
        self.blocks: Tensor | None = None
        some = torch.randint(n, (SAMPLES - 2,), generator=torch.Generator().manual_seed(S + rank))
        self.rows = sorted({0, n - 1, *some.tolist()})

    def forward(self) -> Tensor:
        pool = lambda x: mean_pool(x, self.args.l, self.args.d)
        how = dict(backend=self.args.backend, flags=self.args.flags, return_aux=True)
        how |= sizes(self.args)
        if self.group is None:
            q, k, v, *rest = self.tensors
            out, aux = nsa_attention(q, pool(k), pool(v), *rest, **how)
        else:
            out, aux = parallel.nsa_attention_parallel(
                *self.tensors, phi_k=pool, phi_v=pool, group=self.group, check=False, **how
            )
        self.routes, self.blocks = aux["routes"], aux["block_indices"]
        return out

    def exact(self, dtype: torch.dtype, grads: bool) -> list[Tensor]:
        """Sampled rows by plain attention in `dtype`; with grads those of their outputs as well."""
        s, leaf = self.args, lambda x: x.detach().to(dtype).requires_grad_(grads)
        q, gates = leaf(self.q[:, self.rows]), leaf(self.gates[:, self.rows])
        kv = {n: leaf(x) for n, x in self.whole.items()}
        keys = {n: mean_pool(x, s.l, s.d) if n.endswith("cmp") else x for n, x in kv.items()}
        take = lambda i, name, a, b: gates[:, i : i + 1] if name == "gates" else keys[name][:, a:b]
        outs = [
            row_output("full", s, int(self.at[row]), q[:, i : i + 1], partial(take, i),
                       self.blocks[:, row : row + 1])
            for i, row in enumerate(self.rows)
        ]  # fmt: skip
        out = torch.cat(outs, 1)
        if not grads:
            return [out]
        found = torch.autograd.grad(out, [q, gates, *kv.values()], self.do[:, self.rows].to(dtype))
        if self.group is not None:  # the keys' gradients come from every rank's rows
            dkv = [x.contiguous() for x in found[2:]]
            for x in dkv:
                dist.all_reduce(x, group=self.group)
            found = (*found[:2], *(parallel.shard(x, self.group) for x in dkv))
        return [out.detach(), *found]

    def ours(self, grads: bool) -> list[Tensor]:
        if not grads:
            with torch.no_grad():
                return [self.forward()[:, self.rows]]
        out = self.forward()
        do = torch.zeros_like(self.do)
        do[:, self.rows] = self.do[:, self.rows]
        dq, *dkv, dgates = torch.autograd.grad(out, self.tensors, do)
        return [out[:, self.rows].detach(), dq[:, self.rows], dgates[:, self.rows], *dkv]

    def calls(self, grads: bool) -> list[Callable[[], Any]]:
        """A sample: a call on other queries than before and, backward, other gradients."""
        for x in (self.q, self.do):
            x.detach().normal_(generator=self.draws)
        if not grads:
            return [torch.no_grad()(lambda: [self.forward()])]
        out = self.forward()
        return [lambda: [out, *torch.autograd.grad(out, self.tensors, self.do)]]

    def parts(self, result: Sequence[Tensor]) -> list[Tensor]:
        """The sampled rows of a call's output and, backward, of the gradients of q and gates."""
        kept = [result[0].detach(), result[1], result[-1]] if len(result) > 1 else result
        return [part[:, self.rows] for part in kept]

    def judge_one(self, results: list, number: int, counts: Mapping[str, int], g: bool) -> Parity:
        return self.judge(self.parts(results[0]), counts, g)

    def check(self, grads: bool) -> Parity:
        """The worst of the outputs and gradients."""
        with launches.recording() as counts:
            got = self.ours(grads)
        return self.judge(got, self.captured or counts, grads)

    def judge(self, got: Sequence[Tensor], counts: Mapping[str, int], grads: bool) -> Parity:
        """The worst of these sampled rows: of the output, and of gradients as far as given."""
        want, same = self.exact(torch.float64, grads), self.exact(self.args.torch_dtype, grads)
        names = ("out", "dq", "dgates", *(f"d{n}" for n in KV))
        return worst([
            measure_parity(
                f"context_parallel/{name}/S={self.S}", name, g, w, s,
                path_requested=self.args.backend, path_taken=self.path(), launches=counts,
                limit_mae=2e-3 * max(1.0, w.abs().max().item()),
            )
            for name, g, w, s in zip(names, got, want, same, strict=False)
        ])  # fmt: skip

    def path(self) -> str | None:
        """The route of all branches, None where they differ."""
        taken = set(self.routes.values())
        return taken.pop() if len(taken) == 1 else None


class Decode(Sequence1):
    """The newest token of one sequence, whose cache lies over `group`, or on this rank for None. A
    sample is of STEPS steps in a row, each on other queries; bringing these and keeping outputs is
    in the time."""

    def __init__(self, args: Namespace, S: int, group: Any, device: torch.device) -> None:
        self.args, self.S, self.group = args, S, group
        where = dict(device=device, dtype=args.torch_dtype)
        # All by one seed on every rank: the same token, and any rank can check it.
        gen = self.draws = torch.Generator(device).manual_seed(S)
        draw = lambda n, *shape: torch.empty(args.B, n, *shape, **where).normal_(generator=gen)
        self.whole = {n: draw(S, args.G, args.D) for n in KV}
        self.q, self.gates = draw(1, args.HQ, args.D), draw(1, args.HQ, 3).sigmoid_()
        self.at, self.rows = torch.tensor([S - 1]), [0]
        config = NSAConfig(args.D, args.HQ, args.G, args.D, args.D, **sizes(args), phi="mean")
        if group is None:
            self.cache: Any = NSACache(config, args.B, S, **where)
        else:
            self.cache = ParallelNSACache(config, args.B, S, group=group, check=False, **where)
        pool = lambda x: mean_pool(x, args.l, args.d)
        self.cache.append(BranchKV(**self.whole), pool, pool)
        self.step = lambda: nsa_decode(
            self.q, self.cache, None, self.gates, backend=args.backend, flags=args.flags
        )
        real, self.sent_bytes = exchange._ALL_GATHER, 0

        def noted(out: Tensor, x: Tensor, **how: Any) -> Any:
            self.sent_bytes += x.nbytes
            return real(out, x, **how)

        with dispatch.trace() as taken, mock.patch.object(exchange, "_ALL_GATHER", noted):
            self.step()
        self.routes = {one.branch.value: one.route.value for one in taken}
        if device.type == "cuda":
            self.step, self.captured = capture(self.step)

    def forward(self) -> Tensor:
        out, self.blocks = self.step()
        return out

    def calls(self, grads: bool) -> list[Callable[[], Any]]:
        def one(q: Tensor) -> list[Tensor]:
            self.q.copy_(q)
            return [x.clone() for x in self.step()]  # a graph's next replay overwrites them

        draw = lambda: torch.empty_like(self.q).normal_(generator=self.draws)
        self.queries = [draw() for _ in range(STEPS)]
        return [partial(one, q) for q in self.queries]

    def parts(self, result: Sequence[Tensor]) -> list[Tensor]:
        return [result[0]]

    def judge_one(self, results: list, number: int, counts: Mapping[str, int], g: bool) -> Parity:
        at = number % STEPS
        self.q.copy_(self.queries[at])
        out, self.blocks = results[at]
        return self.judge([out], self.captured or counts, g)

    def numbers(self) -> dict[str, Any]:
        """Columns of the CSV."""
        kept = [x for x in vars(self.cache).values() if isinstance(x, Tensor)]
        return {"cache_mib": sum(x.nbytes for x in kept) / 2**20, "sent_bytes": self.sent_bytes}


def made(
    args: Namespace, S: int, direction: str, group: Any, device: torch.device
) -> tuple[Sequence1, Callable[[Any, int], Timed]]:
    """The inputs of a direction, and a function that times its calls on them: (group, number of the
    judged sample) -> Timed."""
    x = (Decode if direction == "decode" else Sequence1)(args, S, group, device)
    return x, partial(timed, x, direction, args.iters)


def worst(parities: Sequence[Parity]) -> Parity:
    """The one that failed, or is nearest to its limit."""
    return max(parities, key=lambda p: (p.status != "PASS", p.margin or 0.0))


def timed(x: Sequence1, direction: str, n: int, group: Any, judged: int) -> Timed:
    """Take n samples, of calls on other queries than the ones before, on all ranks of `group`
    together. Of number `judged`, which is the same one on every rank, a result is judged."""
    found, marks, cuda, grads = Timed(), Marks(), x.q.is_cuda, direction == "bwd"
    counted = []
    for i in range(-2, n):  # two of them warm up
        calls, before = x.calls(grads), Counter(launches.counts())
        results = (found if i >= 0 else Timed()).time(calls, group, cuda)
        if i == -2 and cuda:
            torch.cuda.reset_peak_memory_stats()
        if i < 0:
            continue
        counted.append(Counter(launches.counts()) - before)
        for result in results:
            marks.leave(x.parts(result)[-1])
        if i == judged:
            found.judged.append(x.judge_one(results, judged, counted[-1], grads))
    found.check(marks, "nsa")
    if any(seen != counted[0] for seen in counted):
        found.why.append("timed calls launched different kernels")
    return found


def case(
    args: Namespace, S: int, direction: str, group: Any, device: torch.device,
    base: list[float] | None, about: dict[str, Any],
) -> BenchRow:  # fmt: skip
    """Check and time one length; the same row on every rank. base: samples of one rank alone."""
    world = group.size()
    columns: dict[str, Any] = {"S": S, "world": world, "direction": direction, **about}
    columns |= {name: getattr(args, name) for name in ("B", "HQ", "G", "D")}
    head = dict(
        bench="context_parallel", case=f"context_parallel/{direction}/S={S}/W={world}",
        candidate=f"nsa on {world} ranks", baseline="nsa on 1 rank", path_requested=args.backend,
    )  # fmt: skip
    (x, clocked), seed = made(args, S, direction, group, device), seed_of_all(group)
    parity, when = worst(of_all(x.check(direction == "bwd"), group)), "first check"
    if parity.status == "PASS":
        every = of_all(clocked(group, seed % args.iters), group)
        parity = worst([one for found in every for one in found.judged])
        when = "a timed call drawn at random"
    if parity.status != "PASS":
        status = "FAILED" if parity.status == "FAIL" else "INVALID"
        return BenchRow(status=status, why=[f"{when}: {'; '.join(parity.why)}"], columns=columns,
                        **head)  # fmt: skip
    more: dict[str, Any] = {}
    if base:
        theirs = summary(base)
        more = {"base_median_us": theirs["median_us"], "base_ci95_us": theirs["ci95_us"]}
    row = rank_row(
        every, head, columns, {n: getattr(parity, n) for n in ("mae", "max_abs", "status")},
        lambda samples: instability(samples, 10.0), path_taken=x.path(), cache="warm", draw=seed,
        **more,
    )  # fmt: skip
    if row.median_us is None:
        return row
    new = 1 if direction == "decode" else S
    columns["tokens_per_s"] = args.B * new / row.median_us * 1e6
    if isinstance(x, Decode):
        columns |= x.numbers()
    columns["efficiency"] = row.base_median_us / (world * row.median_us) if base else None
    if device.type == "cuda":
        columns["peak_mem_mib"] = torch.cuda.max_memory_allocated() // 2**20
    more = {}
    if row.ci95_us and row.base_ci95_us:
        (low, high), (base_low, base_high) = row.ci95_us, row.base_ci95_us
        more = {"speedup": row.base_median_us / row.median_us,
                "speedup_ci95": [base_low / high, base_high / low]}  # fmt: skip
    return replace(row, columns=columns, **more)


def one_rank(
    args: Namespace, S: int, direction: str, group: Any, device: torch.device
) -> list[float] | None:
    """Samples of rank 0 alone on the whole sequence, on every rank; None where it does not fit
    or is not wanted."""
    if args.alone < S:
        return None
    answer = None
    if group.rank() == 0:
        try:
            drawn = secrets.randbelow(args.iters)
            alone = made(args, S, direction, None, device)[1](None, drawn)
            why = alone.why or [text for one in alone.judged for text in one.why]
            if why:
                note(f"S={S} {direction}: one GPU alone is wrong: {'; '.join(why)}", "warn")
            answer = None if why else alone.samples
        except torch.OutOfMemoryError:
            note(f"S={S} {direction}: one GPU has too little memory, so no efficiency", "warn")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return of_first(answer, group)


def parse(argv: list[str] | None = None) -> Namespace:
    cuda = torch.cuda.is_available()
    sizes = {
        "B": 1, "HQ": 64 if cuda else 4, "G": 4 if cuda else 2, "D": 128 if cuda else 16, "l": 32,
        "d": 16, "l_sel": 64, "n_sel": 16, "w": 512, "iters": 10,
    }  # fmt: skip
    parser = bench_parser(
        __doc__, lengths=[65536, 262144] if cuda else [512], sizes=sizes, timeout_s=300.0,
        lists={"directions": (("fwd", "bwd", "decode"), ["fwd", "bwd"], " (default fwd,bwd)")},
    )  # fmt: skip
    text = "time one GPU alone up to this length"
    parser.add_argument("--alone", type=positive, default=524288, metavar="S", help=text)
    args = parsed(parser, argv)
    unit = 2 * int(os.environ.get("WORLD_SIZE", "1")) * args.d
    for S in args.S_list:
        if S % unit:
            parser.error(f"--S_list must be multiples of 2 * W * d = {unit}, got {S}")
    args.S_list = shrunk("--S_list", args.S_list, args.shrink, unit)
    args.backend = "triton" if cuda else "reference"
    args.torch_dtype = torch.bfloat16 if cuda else torch.float32
    # As every direct kernel bench it is not gated by the SM 8.9 policy.
    args.flags = Flags(
        use_triton_sel=cuda, triton_sel_force=cuda, sel_triton_allow_grad=cuda, sel_triton_min_L=1
    )
    return args


def lines(args: Namespace, device: torch.device, about: dict[str, Any]) -> Iterator[Line]:
    """Every length and direction, the same on every rank."""
    group = dist.group.WORLD
    for S, direction in itertools.product(args.S_list, args.directions):
        base = one_rank(args, S, direction, group, device)
        row = case(args, S, direction, group, device, base, about)
        text, more = row.line(), row.columns
        if more.get("efficiency"):
            text += f"  efficiency {more['efficiency']:.1%}"
        if "cache_mib" in more:
            text += f"  cache {more['cache_mib']:.0f} MiB a rank, {more['sent_bytes']} bytes sent"
        yield row, row.csv(), text


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if "WORLD_SIZE" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    return on_ranks(args, COLUMNS, lines)


if __name__ == "__main__":
    leave_ranks(main())
