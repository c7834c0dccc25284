"""How the scripts that run under torchrun start and end their ranks, and time what all do."""

import datetime
import os
import secrets
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from bench import stats
from bench.clock import host_us
from bench.device import Gpu
from bench.main import Line, write_rows
from bench.proof import Marks, NotProven
from bench.provenance import provenance
from bench.records import BenchRow, why_no_time


def join_ranks(device_type: str, timeout_s: float) -> torch.device:
    """Join the group of all ranks; returns this rank's device ("cuda": the GPU of LOCAL_RANK).

    A collective that a rank does not join fails after `timeout_s` seconds.
    """
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast fails on some virtual machines
    device, backend = torch.device(device_type), "gloo"
    if device_type == "cuda":
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=min(timeout_s, 1e9))  # what it can hold
    dist.init_process_group(backend, timeout=timeout)
    return device


def leave_ranks(code: int) -> NoReturn:
    """End this process with `code`; call it last, outside of any other handler.

    What a mesh or a sharded tensor holds of a group lives on after destroy_process_group, with
    gloo's threads. One that drops a tensor while the interpreter is torn down aborts the process
    (pytorch/pytorch#179291), so a process that had ranks does without the teardown.
    """
    if "WORLD_SIZE" not in os.environ:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def of_first(value: Any, group: Any) -> Any:
    """Rank 0's `value`, on every rank."""
    held = [value]
    dist.broadcast_object_list(held, src=dist.get_global_rank(group, 0), group=group)
    return held[0]


def of_all(value: Any, group: Any) -> list[Any]:
    """Every rank's `value`, on every rank."""
    held = [None] * group.size()
    dist.all_gather_object(held, value, group=group)
    return held


def seed_of_all(group: Any) -> int:
    """A seed that nobody knew before, the same on every rank."""
    return of_first(secrets.randbits(32), group)


@dataclass
class Timed:
    """Microseconds of calls on this rank, by the clock that samples are of and by another counter
    of the host. judged: what was found of the results of some of them, drawn at random; left: marks
    of all results, in order; why: what proves that they did not do their work."""

    samples: list[float] = field(default_factory=list)
    elapsed_us: float = 0.0
    judged: list[Any] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    why: list[str] = field(default_factory=list)

    def time(self, calls: Sequence[Callable[[], Any]], group: Any, cuda: bool) -> list[Any]:
        """Take one sample, of calls in a row, once all ranks of the group are there (None: this
        rank alone). Returns what the calls returned."""
        if cuda:
            torch.cuda.synchronize()
        if group is not None:
            dist.barrier(group=group)
        other, begin = host_us(), time.perf_counter()
        results = [call() for call in calls]
        if cuda:
            torch.cuda.synchronize()
        self.samples.append((time.perf_counter() - begin) / len(calls) * 1e6)
        self.elapsed_us += (host_us() - other) / len(calls)
        return results

    def check(self, marks: Marks, whose: str) -> None:
        """Take over the marks, and tell a result that is not new."""
        try:
            marks.check(whose)
        except NotProven as error:
            self.why.append(str(error))
        self.left = list(marks.seen)


def rank_row(
    every: Sequence[Timed], head: dict[str, Any], columns: dict[str, Any], parity: dict[str, Any],
    noise: Callable[[Sequence[float]], list[str]], **more: Any,
) -> BenchRow:  # fmt: skip
    """The row of calls that all ranks timed and whose judged results were right: parity. The
    slowest rank counts. A call that did not do its work or a clock that lies leaves no number.

    noise(samples) says what makes them unstable, besides their number; `more` are other fields.
    """
    samples = [max(times) for times in zip(*(timed.samples for timed in every), strict=True)]
    timed_us = max(sum(timed.samples) for timed in every)
    clocks = dict(timed_us=timed_us, elapsed_us=max(timed.elapsed_us for timed in every))
    numbers = {**stats.summary(samples), **clocks, "timer": "host"}
    wrong = list(dict.fromkeys(text for timed in every for text in timed.why))
    if wrong := wrong or why_no_time(numbers):
        return BenchRow(status="INVALID", why=wrong, columns=columns, **head)
    why = [*stats.too_few(len(samples)), *noise(samples)]
    status, judged = "UNSTABLE" if why else "VALID", len(every[0].judged)
    row = dict(status=status, why=why, parity=parity, judged=judged, columns=columns)
    return BenchRow(**row, **numbers, **more, **head)


def on_ranks(
    args: Namespace,
    columns: Sequence[str],
    lines: Callable[[Namespace, torch.device, dict[str, Any]], Iterable[Line]],
) -> int:
    """Join the ranks and make lines(args, device, about) on each; the first one emits, says and
    writes them. The exit code."""
    device = join_ranks("cuda" if torch.cuda.is_available() else "cpu", args.timeout)
    about = provenance(Gpu(device) if device.type == "cuda" else None)
    first = dist.get_rank() == 0

    def sent() -> Iterator[Line]:
        for row, flat, text in lines(args, device, about):
            if first:
                row.emit()
            yield row, flat, text

    code = write_rows(args, columns, sent(), quiet=not first)
    dist.barrier()
    dist.destroy_process_group()
    return code
