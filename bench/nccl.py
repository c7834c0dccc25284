"""How fast do the GPUs of this host speak to each other: all_reduce and all_gather by NCCL.

    torchrun --nproc-per-node 4 bench/nccl.py
    torchrun --nproc-per-node 4 bench/nccl.py --mib 1,64,1024 --csv nccl.csv

Bus bandwidth is what each link carries, so that it can be held against the link's nominal rate: for
all_reduce 2 (n - 1) / n of the buffer per time, for all_gather (n - 1) / n of the gathered one. The
slowest rank counts. Every result is checked on every rank before it is timed: each rank sends its
own numbers, whose sum and places are known. On CPU processes it runs over gloo.

Exit code: 0 timed, 1 a result is wrong, 2 usage error, 3 fewer than two ranks.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
import torch.distributed as dist
from torch import Tensor

from bench.device import Gpu
from bench.provenance import COLUMNS as PROVENANCE
from bench.provenance import provenance
from bench.ranks import join_ranks, leave_ranks
from bench.records import (
    BenchRow,
    add_csv_argument,
    add_shrink_argument,
    integers,
    note,
    say,
    shrunk,
    write_csv,
)
from bench.stats import half_width, median_ci, quantile, too_few

COLUMNS = (
    "op", "mib", "world", "us", "us_low", "us_high", "algbw_gbs", "busbw_gbs", "n", "parity",
    "path", "status", "why", *PROVENANCE,
)  # fmt: skip
OPS = ("all_reduce", "all_gather")
SAMPLE_US = 20e3
ENOUGH = 0.05  # links share a host with others and always spread; a bad one is slower than this
# torch 2.13 renamed it.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Exchange:
    """One operation on one size: `size` bytes are what all_reduce adds up, or all_gather gives."""

    def __init__(self, op: str, size: int, device: torch.device) -> None:
        self.op, self.rank, self.world = op, dist.get_rank(), dist.get_world_size()
        n = max(size // 2 // self.world, 1) * self.world  # bf16
        like = dict(dtype=torch.bfloat16, device=device)
        self.whole = torch.zeros(n, **like)
        self.part = torch.full((n // self.world,), float(self.rank + 1), **like)
        self.bytes = 2 * n

    def run(self) -> None:
        if self.op == "all_reduce":
            dist.all_reduce(self.whole)
        else:
            _ALL_GATHER(self.whole, self.part)

    def wrong(self) -> int:
        """How many numbers of the result are not what they must be; small integers are exact."""
        if self.op == "all_reduce":
            self.whole.fill_(float(self.rank + 1))
            want: Tensor | float = self.world * (self.world + 1) / 2
        else:
            ranks = torch.arange(self.world, device=self.whole.device) + 1
            want = ranks.to(self.whole.dtype).repeat_interleave(len(self.part))
        self.run()
        count = (self.whole != want).sum().to(torch.int64)
        dist.all_reduce(count)
        self.whole.zero_()
        return int(count)

    @property
    def bus_share(self) -> float:
        share = (self.world - 1) / self.world
        return 2 * share if self.op == "all_reduce" else share


def sample(call: Callable[[], None], device: torch.device, inner: int) -> float:
    """Microseconds per call of `inner` calls in a row, on the slowest rank."""
    cuda = device.type == "cuda"
    dist.barrier()
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(inner):
        call()
    if cuda:
        torch.cuda.synchronize()
    took = torch.tensor((time.perf_counter() - begin) / inner * 1e6, dtype=torch.float64,
                        device=device)  # fmt: skip
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def case(op: str, mib: int, device: torch.device, iters: int, about: dict[str, Any]) -> BenchRow:
    """Check and time one operation; the same row on every rank."""
    exchange = Exchange(op, mib * 2**20, device)
    path = dist.get_backend_config(dist.group.WORLD)
    path = "nccl" if device.type == "cuda" and "nccl" in path else "gloo"
    head = dict(bench="nccl", case=f"nccl/{op}/{mib}MiB/W={exchange.world}", candidate=op,
                path_requested="nccl" if device.type == "cuda" else "gloo")  # fmt: skip
    columns = {"op": op, "mib": mib, "world": exchange.world, **about}
    wrong = exchange.wrong()
    if wrong:
        why = [f"{wrong} numbers of the result are wrong, counted over all ranks"]
        return BenchRow(status="FAILED", why=why, columns=columns, **head)
    sample(exchange.run, device, 3)
    # So many calls per sample that the host's clock and the first launch do not count.
    inner = max(1, min(500, int(SAMPLE_US / max(sample(exchange.run, device, 3), 1.0))))
    sample(exchange.run, device, inner)
    samples = [sample(exchange.run, device, inner) for _ in range(iters)]
    median, known = statistics.median(samples), half_width(samples)
    why = too_few(len(samples))
    if ENOUGH < known < math.inf:
        why.append(f"the median is known to {known:.1%} only")
    columns["algbw_gbs"] = exchange.bytes / median / 1e3
    columns["busbw_gbs"] = columns["algbw_gbs"] * exchange.bus_share
    return BenchRow(
        status="UNSTABLE" if why else "VALID", why=why, path_taken=path, cache="warm",
        parity={"mae": 0.0, "max_abs": 0.0, "status": "PASS"}, timer="host", n=len(samples),
        median_us=median, min_us=min(samples), p20_us=quantile(samples, 0.2),
        p80_us=quantile(samples, 0.8), p95_us=quantile(samples, 0.95), ci95_us=median_ci(samples),
        columns=columns, **head,
    )  # fmt: skip


def csv_row(row: BenchRow) -> dict[str, Any]:
    low, high = row.ci95_us or (None, None)
    return {
        **row.record(), "us": row.median_us, "us_low": low, "us_high": high,
        "parity": (row.parity or {}).get("status"), "path": row.path_taken,
        "why": "; ".join(row.why),
    }  # fmt: skip


def line(row: BenchRow) -> str:
    if row.median_us is None:
        return f"{row.case}: {row.status}: {'; '.join(row.why)}"
    return (f"{row.case}: {row.median_us:.0f} us, bus {row.columns['busbw_gbs']:.1f} GB/s "
            f"({row.path_taken}, {row.status})")  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [1, 16, 256, 1024] if torch.cuda.is_available() else [1]
    parser.add_argument("--mib", type=integers, default=sizes, help="buffer sizes in MiB, a,b,c")
    parser.add_argument("--iters", type=int, default=25, help="samples per case")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until a collective "
                        "that a rank does not join fails")  # fmt: skip
    add_csv_argument(parser)
    add_shrink_argument(parser)
    args = parser.parse_args(argv)
    if args.iters < 3 or min(args.mib) < 1:
        parser.error(f"--iters wants 3 or more and --mib 1 or more, got {args.iters}, {args.mib}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world < 2:
        note("fewer than two ranks: there is nobody to speak to (use torchrun)")
        return 3
    device = join_ranks("cuda" if torch.cuda.is_available() else "cpu", args.timeout)
    sizes = (
        shrunk("--mib", args.mib, args.shrink)
        if rank == 0
        else [max(m // args.shrink, 1) for m in args.mib]
    )
    sizes = list(dict.fromkeys(sizes))
    about = provenance(Gpu(device) if device.type == "cuda" else None)
    rows = []
    for op in OPS:
        for mib in sizes:
            row = case(op, mib, device, args.iters, about)
            if rank == 0:
                rows.append(row.emit())
                say(args, line(row))
    dist.barrier()
    if rank == 0:
        write_csv(args.csv, [csv_row(r) for r in rows], COLUMNS)
    dist.destroy_process_group()
    return 1 if any(r.status == "FAILED" for r in rows) else 0


if __name__ == "__main__":
    leave_ranks(main())
