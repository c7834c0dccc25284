"""Clocks that time calls: CUDA events with a flushed L2 and a blocked queue, the device's kernels
by themselves, or the host's counter.

A clock runs a list of calls in order and gives each one's own time, so that callers can interleave
candidates within one thermal state. A call with an attribute `before` has that called ahead of it,
outside of its time (wall() includes it): it restores what the call changes. `after` is called
behind it, outside of its time too. One with `in_a_row` makes several calls by that, as a program
would, and says how many: wall() is of these.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from bench.records import note
from nsa.errors import is_sticky

Call = Callable[[], Any]


def prepare(call: Call) -> None:
    """Run what `call` wants to happen ahead of it."""
    getattr(call, "before", lambda: None)()


def finish(call: Call) -> None:
    """Run what `call` wants to happen behind it."""
    getattr(call, "after", lambda: None)()


def host_us() -> float:
    """Microseconds of a counter of the host that no clock here times by, where it has one."""
    raw = getattr(time, "CLOCK_MONOTONIC_RAW", None)
    return (time.monotonic_ns() if raw is None else time.clock_gettime_ns(raw)) / 1e3


def repeat(call: Call, n: int) -> int:
    """Call n times, or as often as the call's `in_a_row` does; how often."""
    in_a_row = getattr(call, "in_a_row", None)
    if in_a_row is not None:
        return in_a_row()
    for _ in range(n):
        prepare(call)
        call()
    return n


def rounds(once: Callable[[], Any], least: int = 3) -> list[Any]:
    """What `once` gives in `least` rounds, in up to nine while they are short: a host pauses for
    longer."""
    begin, found = time.perf_counter(), []
    while len(found) < least or (len(found) < 9 and time.perf_counter() - begin < 0.06):
        found.append(once())
    return found


class Clock(Protocol):
    """timer names the clock in every row; resolution_us is the step below which it is blind;
    device_time says whether its times leave the host out; enqueue_us: of a call in the last
    wall(), until the host was free again, 0 where the host does the work itself."""

    timer: str
    resolution_us: float
    device_time: bool
    enqueue_us: float

    def run(self, calls: Sequence[Call], *, cold: bool) -> list[float]:
        """Call each in order; microseconds of each. cold: with the L2 cache flushed before."""

    def wall(self, call: Call, n: int = 20) -> float:
        """Microseconds per call, of one round, as a host sees it that calls back to back and waits
        at the end."""

    def host_us(self) -> float:
        """Another counter's microseconds, which the times of run() are held against."""

    def gaps(self) -> bool:
        """True when the last run() timed the host as well: it could not enqueue ahead."""


class CudaClock:
    """CUDA events on the current stream; one synchronisation per batch of calls.

    The flush of the L2 cache lies before the start event. A sleep kernel holds the queue while the
    host enqueues the batch, so that launch gaps do not count as device time; when the sleep ended
    too early, it is lengthened and the batch repeated.
    """

    timer = "cuda_event"
    resolution_us = 0.5
    device_time = True
    enqueue_us = 0.0
    host_us = staticmethod(host_us)

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        properties = torch.cuda.get_device_properties(self.device)
        l2 = getattr(properties, "L2_cache_size", 0) or 64 * 2**20
        self._flush = torch.empty(2 * l2, dtype=torch.int8, device=self.device)
        self._host_us, self._gaps = 60.0, False
        self._cycles_per_us = getattr(properties, "clock_rate", 0) / 1e3 or 2000.0

    def run(self, calls: Sequence[Call], *, cold: bool) -> list[float]:
        for _ in range(3):
            times, ahead, host_us = self._batch(calls, cold)
            self._gaps = not ahead
            if ahead:
                self._host_us = max(20.0, 0.5 * self._host_us + 0.5 * host_us)
                break
            self._host_us = min(2000.0, max(2 * self._host_us, host_us))
        return times

    def _batch(self, calls: Sequence[Call], cold: bool) -> tuple[list[float], bool, float]:
        event = lambda: torch.cuda.Event(enable_timing=True)
        marks = [(event(), event()) for _ in calls]
        held = event()
        sleep_us = min(30_000.0, 1.5 * self._host_us * len(calls) + 100)
        torch.cuda._sleep(int(sleep_us * self._cycles_per_us))
        held.record()
        begin = time.perf_counter()
        for call, (first, last) in zip(calls, marks, strict=True):
            prepare(call)
            if cold:
                self._flush.zero_()
            first.record()
            call()
            last.record()
            finish(call)
        host_us = (time.perf_counter() - begin) * 1e6 / len(calls)
        ahead = not held.query()
        torch.cuda.synchronize(self.device)
        return [first.elapsed_time(last) * 1e3 for first, last in marks], ahead, host_us

    def wall(self, call: Call, n: int = 20) -> float:
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter()
        made = repeat(call, n)
        self.enqueue_us = (time.perf_counter() - begin) * 1e6 / made
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - begin) * 1e6 / made

    def gaps(self) -> bool:
        return self._gaps


class BusyClock(CudaClock):
    """What the device works for each call: the sum of its kernels' and copies' own times, by
    PyTorch's profiler, on the current stream.

    For calls that wait for the device in their middle: events around these would count the time in
    which the device has nothing to do as well.
    """

    timer = "kernels"

    def run(self, calls: Sequence[Call], *, cold: bool) -> list[float]:
        profiler = torch.profiler
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
            for call in calls:
                prepare(call)
                if cold:
                    self._flush.zero_()
                torch.cuda._sleep(1)  # a kernel of its own name marks both ends
                call()
                torch.cuda._sleep(1)
                finish(call)
            torch.cuda.synchronize(self.device)
        spans = [
            (e.time_range.start, e.time_range.elapsed_us(), e.name)
            for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA
        ]  # fmt: skip
        return busy_between(spans, len(calls))


def busy_between(spans: Sequence[tuple[float, float, str]], calls: int) -> list[float]:
    """Sums of the durations of spans (start, us, name) of the device between each two marks of
    BusyClock, in order. Raises RuntimeError where there are not two marks for each of that many
    calls: the profiler then saw a part only."""
    sums: list[float] = []
    marks, inside = 0, False
    for _, took, name in sorted(spans):
        if "spin_kernel" in name:
            marks, inside = marks + 1, not inside
            if inside:
                sums.append(0.0)
        elif inside:
            sums[-1] += took
    if marks != 2 * calls:
        raise RuntimeError(f"the profiler saw {marks} of {2 * calls} marks")
    return sums


def busy_clock() -> CudaClock:
    """BusyClock, or CudaClock where PyTorch's profiler does not see kernels, which a note says."""
    clock = BusyClock()
    try:
        clock.run([lambda: None] * 2, cold=False)
    except RuntimeError as error:
        if is_sticky(error):
            raise
        note(f"device times are events' and hold waits: no kernel times here ({error})", "warn")
        return CudaClock()
    return clock


class HostClock:
    """time.perf_counter around each call, for code on the CPU. Its caches are always warm."""

    timer = "perf_counter"
    resolution_us = 0.5
    device_time = False
    enqueue_us = 0.0
    host_us = staticmethod(host_us)

    def run(self, calls: Sequence[Call], *, cold: bool) -> list[float]:
        if cold:
            raise ValueError("cold: the host clock cannot flush caches, ask for warm times")
        times = []
        for call in calls:
            prepare(call)
            begin = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - begin) / 1e3)
            finish(call)
        return times

    def wall(self, call: Call, n: int = 5) -> float:
        begin = time.perf_counter()
        made = repeat(call, n)
        return (time.perf_counter() - begin) * 1e6 / made

    def gaps(self) -> bool:
        return False


def clock_for(device: torch.device | str) -> CudaClock | HostClock:
    """The clock of this device's timings."""
    return CudaClock(device) if torch.device(device).type == "cuda" else HostClock()
