"""How fast do the GPUs of this host speak to each other: all_reduce and all_gather by NCCL.

    torchrun --nproc-per-node 4 bench/nccl.py
    torchrun --nproc-per-node 4 bench/nccl.py --mib 1,64,1024 --csv nccl.csv

Bus bandwidth is what each link carries, so that it can be held against the link's nominal rate: for
all_reduce 2 (n - 1) / n of the buffer per time, for all_gather (n - 1) / n of the gathered one. The
slowest rank counts. Every timed call has a buffer of its own with new numbers, drawn on each rank
from a seed that all ranks know, and leaves a mark of its result; of every sample the result of one
call, drawn at random, is held on every rank against the sum, or the row, of all ranks' numbers. On
CPU processes it runs over gloo.

Exit code: 0 timed, 1 a result is wrong, 2 usage error, 3 fewer than two ranks.
"""

import itertools
import math
import os
import random
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bench.main import Line, bench_parser, parsed
from bench.proof import Marks
from bench.provenance import COLUMNS as PROVENANCE
from bench.ranks import Timed, leave_ranks, of_all, on_ranks, rank_row, seed_of_all
from bench.records import BenchRow, integers, note, positive, shrunk
from bench.stats import half_width

COLUMNS = (
    "op", "mib", "world", "us", "us_low", "us_high", "algbw_gbs", "busbw_gbs", "n", "parity",
    "path", "status", "why", *PROVENANCE,
)  # fmt: skip
OPS = ("all_reduce", "all_gather")
SAMPLE_US = 20e3
HOST_BYTES = 2**30  # of all ranks' buffers on CPUs
ENOUGH = 0.05  # links share a host with others and always spread; a bad one is slower than this
# torch 2.13 renamed it.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Exchange:
    """Calls of one operation, each on a buffer of its own: `size` bytes are what all_reduce adds
    up, or all_gather gives."""

    def __init__(self, op: str, size: int, calls: int, device: torch.device) -> None:
        self.op, self.rank, self.world = op, dist.get_rank(), dist.get_world_size()
        step = 64 * self.world  # of bf16: NCCL is slower where parts start at odd addresses
        n = size // 2 // step * step
        like = dict(dtype=torch.bfloat16, device=device)
        self.whole = torch.empty(calls, n, **like)
        self.parts = self.whole
        if op == "all_gather":
            self.parts = torch.empty(calls, n // self.world, **like)

    def run(self, i: int) -> None:
        if self.op == "all_reduce":
            dist.all_reduce(self.whole[i])
        else:
            _ALL_GATHER(self.whole[i], self.parts[i])

    def draw(self, out: Tensor, seed: int, i: int, rank: int) -> Tensor:
        """The numbers of a rank for call i, written into out: whole ones, whose sums bf16 holds
        exactly in whatever order they are added."""
        gen = torch.Generator(out.device).manual_seed(seed + i * self.world + rank)
        return out.random_(0, max(2, 256 // self.world), generator=gen)

    def refill(self, seed: int) -> None:
        """New numbers for every call; where a result is to come there is NaN."""
        self.whole.fill_(float("nan"))
        for i, part in enumerate(self.parts):
            self.draw(part, seed, i, self.rank)

    def wrong(self, seed: int, i: int) -> int:
        """How many numbers of the result of call i are not what they must be."""
        part = torch.empty_like(self.parts[i])
        sent = (self.draw(part, seed, i, rank) for rank in range(self.world))
        if self.op == "all_reduce":
            want = torch.zeros_like(part)
            for numbers in sent:
                want += numbers
        else:
            want = torch.cat([numbers.clone() for numbers in sent])
        return int((self.whole[i] != want).sum())


def sample(exchange: Exchange, found: Timed, marks: Marks, seed: int, judged: int) -> None:
    """Time each of the exchange's calls once, in a row; the result of number `judged` is judged."""
    exchange.refill(seed)
    calls = [partial(exchange.run, i) for i in range(len(exchange.whole))]
    found.time(calls, dist.group.WORLD, exchange.whole.is_cuda)
    for result in exchange.whole:
        marks.leave(result)
    found.check(marks, exchange.op)
    found.judged.append(exchange.wrong(seed, judged))


def timed(op: str, size: int, device: torch.device, iters: int, seed: int) -> list[Timed]:
    """Time one operation and return every rank's times. A sample is so many calls that the host's
    clock and the first launch do not count; the seed is the same on every rank."""
    group, draws = dist.group.WORLD, random.Random(seed)

    def samples(calls: int, n: int) -> list[Timed]:
        exchange, found, marks = Exchange(op, size, calls, device), Timed(), Marks()
        sample(exchange, Timed(), Marks(), draws.getrandbits(48), 0)  # warms up
        for _ in range(n):
            sample(exchange, found, marks, draws.getrandbits(48), draws.randrange(calls))
        every = of_all(found, group)
        left = [np.array(one.left) for one in every]
        if not all(len(x) == len(left[0]) and np.allclose(x, left[0], rtol=1e-9) for x in left):
            every[0].why.append("a timed call left other results on some ranks than on others")
        return every

    first = samples(3, 1)
    call_us = max(found.samples[0] for found in first)
    if any(found.why or any(found.judged) for found in first):
        return first
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else HOST_BYTES
    most = min(of_all(free // (4 * size), group))
    return samples(max(1, min(500, most, int(SAMPLE_US / max(call_us, 1.0)))), iters)


def noise(samples: Sequence[float]) -> list[str]:
    known = half_width(samples)
    return [f"the median is known to {known:.1%} only"] if ENOUGH < known < math.inf else []


def case(op: str, mib: int, device: torch.device, iters: int, about: dict[str, Any]) -> BenchRow:
    """Check and time one operation; the same row on every rank."""
    world, seed = dist.get_world_size(), seed_of_all(dist.group.WORLD)
    path = dist.get_backend_config(dist.group.WORLD)
    path = "nccl" if device.type == "cuda" and "nccl" in path else "gloo"
    head = dict(bench="nccl", case=f"nccl/{op}/{mib}MiB/W={world}", candidate=op,
                path_requested="nccl" if device.type == "cuda" else "gloo")  # fmt: skip
    columns = {"op": op, "mib": mib, "world": world, **about}
    every = timed(op, mib * 2**20, device, iters, seed)
    if wrong := sum(sum(found.judged) for found in every):
        why = [f"{wrong} numbers of the result are wrong, counted over all ranks"]
        return BenchRow(status="FAILED", why=why, columns=columns, **head)
    right = {"mae": 0.0, "max_abs": 0.0, "status": "PASS"}
    row = rank_row(every, head, columns, right, noise, path_taken=path, cache="cold", draw=seed)
    if row.median_us is None:
        return row
    rate = mib * 2**20 / row.median_us / 1e3
    share = (world - 1) / world * (2 if op == "all_reduce" else 1)
    return replace(row, columns={**columns, "algbw_gbs": rate, "busbw_gbs": rate * share})


def lines(args: Namespace, device: torch.device, about: dict[str, Any]) -> Iterator[Line]:
    """Every operation and size, the same on every rank."""
    for op, mib in itertools.product(OPS, args.mib):
        row = case(op, mib, device, args.iters, about)
        low, high = row.ci95_us or (None, None)
        flat = {**row.csv(), "us": row.median_us, "us_low": low, "us_high": high}
        rate = row.columns.get("busbw_gbs")
        yield row, flat, row.line() + (f"  bus {rate:.1f} GB/s" if rate else "")


def parse(argv: list[str] | None = None) -> Namespace:
    parser = bench_parser(__doc__, timeout_s=60.0)
    sizes = [1, 16, 256, 1024] if torch.cuda.is_available() else [1]
    parser.add_argument("--mib", type=integers, default=sizes, help="buffer sizes in MiB, a,b,c")
    parser.add_argument("--iters", type=positive, default=25, help="samples per case")
    args = parsed(parser, argv)
    if args.iters < 3:
        parser.error(f"--iters must be 3 or more, got {args.iters}")
    args.mib = shrunk("--mib", args.mib, args.shrink)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        note("fewer than two ranks: there is nobody to speak to (use torchrun)")
        return 3
    return on_ranks(args, COLUMNS, lines)


if __name__ == "__main__":
    leave_ranks(main())
