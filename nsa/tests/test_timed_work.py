"""Timed work is proven work: lies planted in a kernel, its launches or the clock get no number."""

from __future__ import annotations

import contextlib
import itertools
import time

import pytest
import torch

from bench import proof
from bench.clock import HostClock
from bench.timing import Contender, measure
from nsa import attention, launches
from nsa.tests.test_bench_decode import one_thread as one_thread
from nsa.tests.test_bench_decode import sent
from nsa.tests.test_timing import BUDGET, KERNEL, LAST, SimulatedClock, planted, said, timed


def row_of(case, clock=None, **lengths):
    return timed(case, clock or SimulatedClock({"ours": 50.0, "base": 100.0, **lengths}))


def every(period, first=0):
    """A kernel that returns its memory of the last call at every call of that period."""
    kept = []

    def kernel(x, n):
        if not kept or n % period != first:
            kept[:] = [2 * x]
        return kept[0].clone()

    return kernel


def once(x, n, kept=[]):  # noqa: B006 - the planted fault is the memory
    kept[:] = kept if n else [2 * x]
    return kept[0].clone()


def by_address(x, n, kept={}):  # noqa: B006
    """Computes while it is checked, later once per address of its input."""
    if n < 3:
        return 2 * x
    return kept.setdefault((x.data_ptr(), n < 3), 2 * x).clone()


def into_one_buffer(x, n, kept=[]):  # noqa: B006
    """Writes into the same buffer at every call, at every third not at all."""
    if n == 0:
        kept[:] = [torch.empty_like(x)]
    if n % 3 != 1:
        torch.mul(x, 2, out=kept[0])
    return kept[0]


def writes_later(x, n):
    """To its inputs, once it is no longer checked."""
    out = 2 * x
    if n > 2:
        x[0, 0] += 1e-6
    return out


@pytest.mark.parametrize("kernel", [
    writes_later, every(2, 0), every(2, 1), every(7, 6), once, by_address, into_one_buffer,
], ids=["writes", "second", "other second", "seventh", "once", "address", "buffer"])  # fmt: skip
def test_a_kernel_that_returns_its_memory_or_writes_to_inputs_is_told(kernel):
    row = row_of(planted(kernel))
    assert row.status in ("FAILED", "INVALID") and row.median_us is None, row


def test_a_baseline_that_returns_its_memory_is_told():
    kept, calls, x = [], [0], []

    def baseline():
        LAST[0] = "base"
        calls[0] += 1
        if not kept or calls[0] % 2:
            kept[:] = [x[0] + x[0]]
        return kept[0].clone()

    case = planted(baselines=[Contender("plain", baseline, "torch")])
    x += case.inputs()
    row = row_of(case)
    assert row.status in ("FAILED", "INVALID") and "plain" in said(row) and row.speedup is None


def test_a_memory_by_version_saves_no_time():
    """What is kept until the inputs are written to is never read: each call has new inputs."""
    kept, x = {}, []

    def candidate():
        launches.bump(KERNEL)
        key = x[0].data_ptr(), x[0]._version
        LAST[0] = "kept" if key in kept else "ours"
        return kept.setdefault(key, 2 * x[0]).clone()

    case = planted(candidate=Contender("ours", candidate, "triton_dense", (KERNEL,)))
    x += case.inputs()
    row = row_of(case, kept=1.0)
    assert row.median_us is None or row.median_us > 49


def test_a_wrong_result_of_few_calls_is_told_by_chance():
    """Of each two calls one is off by a little: no mark shows it, the oracle does."""
    wrong = lambda x, n: 2 * x + 0.01 * (n > 3 and n % 2)
    assert not any(row_of(planted(wrong)).median_us for _ in range(20))


def counting(candidate):
    """A planted case that is right and does candidate(number of the call), and its calls so far."""
    calls, x = [0], []

    def call():
        LAST[0] = "ours"
        calls[0] += 1
        candidate(calls[0])
        return 2 * x[0]

    case = planted(candidate=Contender("ours", call, "triton_dense", (KERNEL,)))
    x += case.inputs()
    return case, calls


@pytest.mark.parametrize("skips", [lambda n: True, lambda n: n % 50 == 49, lambda n: n > 5])
def test_a_launch_that_was_skipped_is_told(skips):
    """The result is right all the same: something else computed it."""
    case, _ = counting(lambda n: None if skips(n) else launches.bump(KERNEL))
    row = row_of(case)
    assert row.status == "INVALID" and KERNEL in said(row) and row.median_us is None


def test_a_launch_that_its_launcher_counts_and_does_not_make_is_told(monkeypatch):
    """Triton's own report is another source than the launchers' counts: it is asked now and then,
    since a call that is watched takes another way."""
    recorded = []

    @contextlib.contextmanager
    def recording():
        recorded.append(launches.Recording())
        yield recorded[-1]
        recorded.pop()

    def launch(n):
        launches.bump(KERNEL)
        if recorded and n % 50 != 49:
            recorded[-1][KERNEL] = recorded[-1].get(KERNEL, 0) + 1

    monkeypatch.setattr(launches, "recording", recording)
    case, calls = counting(launch)
    told = []
    for _ in range(20):
        calls[0] = 0
        told.append(row_of(case, SimulatedClock({"ours": 5.0, "base": 9.0})).status)
    assert "INVALID" in told


def test_calls_that_nobody_watches_are_judged_too(monkeypatch):
    """One of the judged samples of a case is not recorded: its call is a user's."""
    real, judge, inside, judged, ways = launches.recording, proof.judge, [0], [], []

    @contextlib.contextmanager
    def recording():
        inside[0] += 1
        with real() as seen:
            yield seen
        inside[0] -= 1

    monkeypatch.setattr(launches, "recording", recording)
    case = planted(lambda x, n: ways.append(bool(inside[0])) or 2 * x, baselines=())
    monkeypatch.setattr(proof, "judge", lambda *a: judged.append(ways[-1]) or judge(*a))
    row = row_of(case)
    assert row.status == "VALID" and row.judged == 2, row.why
    assert judged[0] is True and sorted(judged[1:]) == [False, True]  # the first is prove()'s


@pytest.mark.parametrize("computes", [
    lambda n: True, lambda n: n % 2, lambda n: n % 2 == 0, lambda n: n % 7, lambda n: False,
], ids=["always", "odd calls", "even calls", "not every seventh", "never again"])  # fmt: skip
def test_the_decode_bench_of_the_cpu_profile_tells_a_step_that_remembers(
    computes, monkeypatch, one_thread
):
    """From its ninth call on, where it should compute."""
    real, calls, kept = attention.nsa_decode, itertools.count(1), []

    def remembers(*args, **how):
        n = next(calls)
        if n <= 8 or computes(n):
            kept[:] = [real(*args, **how)]
        return kept[0]

    like = ("--S_list", "41", "--branch_force_mode", "none")
    _, rows = sent(monkeypatch, *like, replaced=[(attention, "nsa_decode", remembers)])
    rows = {row["bench"]: row for row in rows if "case" in row}
    honest = all(map(computes, range(1, 50)))
    for name in ("decode", "decode_module"):
        assert (rows[name]["status"] in ("VALID", "UNSTABLE")) == honest, rows[name]["why"]
        assert (rows[name]["median_us"] is not None) == honest
    assert honest or rows["decode"]["status"] in ("INVALID", "FAILED")


class Lying(SimulatedClock):
    """Says `lie(us, number of the call)` in place of what a call took."""

    def __init__(self, lie):
        super().__init__({"ours": 50.0, "base": 100.0})
        self.lie, self.n = lie, itertools.count(1)

    def run(self, calls, *, cold):
        return [self.lie(us, next(self.n)) for us in super().run(calls, cold=cold)]


LIES = {
    "negative": lambda us, n: -us, "zero": lambda us, n: 0.0, "constant": lambda us, n: 5.0,
    "some": lambda us, n: us if n % 9 else -us, "slow clock": lambda us, n: us / 100,
    "fast clock": lambda us, n: us * 3,
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_clock_that_lies_is_told(lie):
    row = row_of(planted(), Lying(lie))
    assert row.status == "INVALID" and row.median_us is None, row.why


@pytest.mark.parametrize("tick", [lambda now: 0, lambda now: -now, lambda now: now // 1000])
def test_a_host_clock_that_lies_is_told(tick, monkeypatch):
    """On a CPU: stopped, backwards, a thousandth of the time."""
    real = time.perf_counter_ns
    monkeypatch.setattr(time, "perf_counter_ns", lambda: tick(real()))
    row = measure(planted(), HostClock(), cold=False, budget=BUDGET)
    assert row.status == "INVALID" and row.median_us is None, row.why


@pytest.mark.parametrize("launched, most", [(1, 52), (40, 16), (400, 4)])
def test_a_batch_fits_the_devices_queue(launched, most):
    """With its queue full the host would wait, and times of short kernels would hold gaps."""
    lengths = []

    class Counting(SimulatedClock):
        def run(self, calls, *, cold):
            lengths.append(len(calls))
            return super().run(calls, cold=cold)

    def kernel(x, n):
        for _ in range(launched - 1):
            launches.bump(KERNEL)
        return 2 * x

    row = row_of(planted(kernel), Counting({"ours": 20.0, "base": 40.0}))
    assert row.status == "VALID", row.why
    sampled = lengths[-row.columns.get("batches", row.batches) :]
    assert max(sampled) <= most + 1 + 4 * (most < 8), sampled
