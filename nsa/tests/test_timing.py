"""The measuring core on a simulated clock: planted cheats get no number, planted changes a word."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from bench import clock as clocks
from bench import proof, stats, timing
from bench.clock import HostClock, busy_between, finish, prepare, rounds
from bench.device import Ceilings, Watch
from bench.proof import Turns
from bench.timing import Budget, Case, Contender, Unbuilt, measure, strongest
from nsa import launches
from scripts.oneshot.report.evidence import NO_DIFFERENCE, speedup_text

BUDGET = Budget(device_s=0.02, wall_s=600.0, warm_s=0.0)  # on a loaded box too
KERNEL = "_planted_kernel"
LAST = [""]  # which contender was called last: the clock cannot see it otherwise


class SimulatedClock:
    """Runs every call, and says that it took what `lengths` says: nominal us with jitter; or what
    lie(us, number of the call, number of the batch) makes of it."""

    timer = "simulated"
    resolution_us = 0.5
    device_time = True

    def __init__(
        self, lengths: dict[str, float], seed: int = 0, drift: dict[str, float] | None = None,
        overhead: float = 1.05, gaps: Callable[[int], bool] = lambda batch: False,
        lie: Callable[[float, int, int], float] = lambda us, n, batch: us,
    ) -> None:  # fmt: skip
        self.lengths, self.drift, self.overhead = lengths, drift or {}, overhead
        self.left_gaps, self.lie = gaps, lie
        self.random, self.calls = random.Random(seed), itertools.count()
        self.enqueue_us, self.now = 0.0, 0.0
        self.batches: list[int] = []  # how many calls each had
        self.box = 1.0  # the box's common pace, which wanders

    def run(self, calls: list[Callable[[], Any]], *, cold: bool) -> list[float]:
        times = []
        self.batches.append(len(calls))
        for call in calls:
            prepare(call)
            call()
            finish(call)
            self.box += 0.05 * (1 - self.box) + self.random.gauss(0, 0.004 / 3)
            tail = 1 + (0.2 if self.random.random() < 0.02 else 0.0)
            own = 1 + abs(self.random.gauss(0, 0.004))
            self.lengths[LAST[0]] *= self.drift.get(LAST[0], 1.0)
            us = self.lengths[LAST[0]] * self.box * own * tail
            times.append(self.lie(us, next(self.calls), len(self.batches)))
            self.now += us
        return times

    def host_us(self) -> float:
        return self.now

    def wall(self, call: Callable[[], Any], n: int = 20) -> float:
        for _ in range(n):
            call()
        return self.lengths[LAST[0]] * self.overhead

    def gaps(self) -> bool:
        return self.left_gaps(len(self.batches))


def clock_of(ours: float = 50.0, base: float = 100.0, **how: Any) -> SimulatedClock:
    return SimulatedClock({"ours": ours, "base": base}, **how)


def double(x: torch.Tensor, n: int) -> torch.Tensor:
    return 2 * x


def planted(
    ours: Callable[[torch.Tensor, int], Any] = double, theirs: Callable = double,
    launch: Callable[[int], object] = lambda n: launches.bump(KERNEL),
    base: dict[str, Any] | None = None, **changes: Any,
) -> Case:  # fmt: skip
    """out = 2 x, as ours(x, how many calls before) and the baseline theirs() compute it."""
    x = torch.zeros(64, 32)

    def calls(name: str, compute: Callable, before: Callable) -> Callable[[], Any]:
        number = itertools.count()

        def call() -> Any:
            LAST[0], n = name, next(number)
            before(n)
            return compute(x, n)

        return call

    def refill(seed: int) -> None:
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))

    plain = {"name": "plain", "path": "torch", **(base or {})}
    case = {
        "bench": "planted", "name": "planted/double", "refill": refill, "inputs": lambda: [x],
        "candidate": Contender("ours", calls("ours", ours, launch), "triton_dense", (KERNEL,)),
        "requested": "triton", "oracle": lambda: 2 * x.double(), "same_dtype": lambda: 2 * x,
        "baselines": [Contender(call=calls("base", theirs, lambda n: None), **plain)], **changes,
    }  # fmt: skip
    return Case(**case)


def timed(case: Case | None = None, clock: Any = None, **kw: Any):
    kw = {"nominal": Ceilings(4800.0, 989.0, "nominal"), "budget": BUDGET, "cold": True, **kw}
    return measure(case or planted(), clock or clock_of(), **kw)


def said(row) -> str:
    return "; ".join(row.why)


def test_a_right_kernel_gets_its_numbers():
    """On a card that copies at half its nominal rate: shares are of the measured ceiling, 100 % of
    what it can; truth is of the nominal one, so that it is not impossible."""
    measured = Ceilings(2400.0, 500.0, "measured")
    row = timed(planted(bytes_needed=126_000_000, flops=2_048), ceiling=measured)
    assert row.status == "VALID", row.why
    assert row.bound == "memory" and row.gbs == pytest.approx(126e6 / row.median_us / 1e3)
    assert row.peak_frac == pytest.approx(row.gbs / 2400)
    assert 49 < row.median_us < 52 and 1.97 < row.speedup < 2.03
    assert row.speedup_ci95[0] <= row.speedup <= row.speedup_ci95[1]
    assert row.ci95_us[0] <= row.median_us <= row.ci95_us[1]
    low, high = row.base_ci95_us
    assert 98 < low <= row.base_median_us <= high < 104
    assert (row.baseline, row.order, row.path_taken) == ("plain", "ABBA", "triton_dense")
    assert row.parity["status"] == "PASS" and row.parity["launches"] == {KERNEL: 1}
    assert row.n >= 30 and row.stop in ("noise", "budget")


def test_what_the_first_call_tells_is_in_the_row():
    calls = []
    ours = lambda x, n: calls.append(n) or 2 * x
    case = planted(ours, columns={"S": 1}, facts=lambda: {"chosen": len(calls)})
    assert timed(case).columns == {"S": 1, "chosen": 1}
    wrong = planted(lambda x, n: 2 * x + 0.01).candidate
    assert timed(replace(case, candidate=wrong)).columns == {"S": 1}


# ---- cheats --------------------------------------------------------------------------------------


def dead(x, row):
    out = 2 * x
    out[row] = 0
    return out


def writes(x):
    out = 2 * x
    x[0, 0] += 1e-6
    return out


def remembers(computes):
    """Returns its memory of an earlier call in the calls n that computes(n) does not name."""
    kept = []

    def kernel(x, n):
        if not kept or computes(n):
            kept[:] = [2 * x]
        return kept[0].clone()

    return kernel


def by_address():
    """Computes while it is checked, later once per address of its input."""
    kept = {}
    return lambda x, n: 2 * x if n < 3 else kept.setdefault(x.data_ptr(), 2 * x).clone()


def into_one_buffer():
    """Writes into the same buffer at every call, at every third not at all."""
    kept = torch.empty(64, 32)
    return lambda x, n: kept if n % 3 == 1 else torch.mul(x, 2, out=kept)


CHEATS = {  # a case, its status if that is certain, and what is said
    "wrong": (planted(lambda x, n: 2 * x + 0.01), "FAILED", "mae"),
    "a dead row": (planted(lambda x, n: dead(x, 17)), "FAILED", "row"),
    "returns early": (planted(lambda x, n: torch.empty_like(x)), "FAILED", "NaN"),
    "tires": (planted(lambda x, n: dead(x, -1) if n > 10 else 2 * x), "",
              "a timed call drawn at random"),
    "writes": (planted(lambda x, n: writes(x)), "", "inputs were written to"),
    "writes later": (planted(lambda x, n: writes(x) if n > 2 else 2 * x), "", "written to"),
    "crashes": (planted(mock.Mock(side_effect=RuntimeError("illegal address\nmore"))), "FAILED",
                "RuntimeError: illegal address"),
    "no baseline": (planted(theirs=lambda x, n: torch.zeros(64, 32)), "FAILED",
                    "no baseline is right"),
    "bytes": (planted(bytes_needed=10**9, flops=1), "INVALID", "GB/s where the peak is 4800"),
    "flops": (planted(bytes_needed=1, flops=10**11), "INVALID", "TFLOP/s where the peak is 989"),
    "remembers odd": (planted(remembers(lambda n: n % 2 == 0)), "", ""),
    "remembers even": (planted(remembers(lambda n: n % 2)), "", ""),
    "remembers the seventh": (planted(remembers(lambda n: n % 7 != 6)), "", ""),
    "remembers the first": (planted(remembers(lambda n: False)), "", ""),
    "remembers addresses": (planted(by_address()), "", ""),
    "one buffer": (planted(into_one_buffer()), "", ""),
    "the baseline remembers": (planted(theirs=remembers(lambda n: n % 2)), "", "plain"),
    "never launched": (planted(launch=lambda n: None), "INVALID", KERNEL),
    "launched mostly": (planted(launch=lambda n: n % 50 != 49 and launches.bump(KERNEL)),
                        "INVALID", KERNEL),
    "launched at first": (planted(launch=lambda n: n < 5 and launches.bump(KERNEL)), "INVALID",
                          KERNEL),
}  # fmt: skip


@pytest.mark.parametrize("case, status, says", CHEATS.values(), ids=CHEATS)
def test_a_planted_cheat_gets_no_number(case, status, says):
    row = timed(case)
    assert row.status == status or not status and row.status in ("FAILED", "INVALID")
    assert says in said(row) and "more" not in said(row)
    assert row.median_us is None and row.speedup is None
    assert row.baseline == case.baselines[0].name


def test_a_memory_by_version_saves_no_time():
    """What is kept until the inputs are written to is never read: each call has new inputs."""
    kept = {}

    def ours(x, n):
        key = x.data_ptr(), x._version
        LAST[0] = "kept" if key in kept else "ours"
        return kept.setdefault(key, 2 * x).clone()

    row = timed(planted(ours), SimulatedClock({"ours": 50.0, "base": 100.0, "kept": 1.0}))
    assert row.median_us is None or row.median_us > 49


def test_a_wrong_result_of_few_calls_is_told_by_chance():
    """Of each two calls one is off by a little: no mark shows it, the oracle does."""
    wrong = lambda x, n: 2 * x + 0.01 * (n > 3 and n % 2)
    assert not any(timed(planted(wrong)).median_us for _ in range(20))


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
    told = [timed(planted(launch=launch), clock_of(5.0, 9.0)).status for _ in range(20)]
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
    row = timed(case)
    assert row.status == "VALID" and row.judged == 2, row.why
    assert judged[0] is True and sorted(judged[1:]) == [False, True]  # the first is prove()'s


LIES = {
    "negative": lambda us, n, _: -us, "zero": lambda us, n, _: 0.0, "constant": lambda *_: 5.0,
    "some": lambda us, n, _: us if n % 9 else -us, "slow clock": lambda us, n, _: us / 100,
    "fast clock": lambda us, n, _: us * 3,
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_clock_that_lies_is_told(lie):
    row = timed(clock=clock_of(lie=lie))
    assert row.status == "INVALID" and row.median_us is None, row.why


@pytest.mark.parametrize("tick", [lambda now: 0, lambda now: -now, lambda now: now // 1000])
def test_a_host_clock_that_lies_is_told(tick, monkeypatch):
    """On a CPU: stopped, backwards, a thousandth of the time."""
    real = time.perf_counter_ns
    monkeypatch.setattr(time, "perf_counter_ns", lambda: tick(real()))
    row = measure(planted(), HostClock(), cold=False, budget=BUDGET)
    assert row.status == "INVALID" and row.median_us is None, row.why


# ---- how it samples ------------------------------------------------------------------------------


@pytest.mark.parametrize("launched, most", [(1, 52), (40, 16), (400, 4)])
def test_a_batch_fits_the_devices_queue(launched, most):
    """With its queue full the host would wait, and times of short kernels would hold gaps."""
    launch = lambda n: [launches.bump(KERNEL) for _ in range(launched)]
    row = timed(planted(launch=launch), clock := clock_of(20.0, 40.0))
    assert row.status == "VALID", row.why
    sampled = clock.batches[-row.batches :]
    assert max(sampled) <= most + 1 + 4 * (most < 8), sampled


def test_strongest_baseline_is_chosen():
    clock, case = SimulatedClock({"a": 30.0, "b": 20.0, "c": 25.0}), planted(distinct=False)
    base = lambda name: Contender(name, lambda: LAST.__setitem__(0, name), "torch")
    turns = [Turns(case, base(name), random.Random(0)) for name in "abc"]
    assert strongest(clock, turns, cold=True).contender.name == "b"


def test_no_ratio_below_the_clocks_floor():
    row = timed(clock=clock_of(1.5, 30.0))
    assert row.speedup is None and row.median_us == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize("overhead, gaps, bound", [
    (1.05, lambda n: n % 5 == 0, False), (1.3, lambda n: False, True), (1.05, lambda n: True, True),
])  # fmt: skip
def test_one_bad_batch_makes_no_row_launch_bound(overhead, gaps, bound):
    """Gaps are counted by batch; launch bound is what takes 1.2 times as long, or mostly gaps."""
    clock = clock_of(overhead=overhead, gaps=gaps)
    row = timed(clock=clock, budget=replace(BUDGET, min_n=200, device_s=1.0))
    assert row.launch_bound is bound and row.batches > 10
    assert (row.gap_batches > 0) == gaps(5) and row.gap_batches <= row.batches
    assert row.wall_us == pytest.approx(50 * overhead)
    assert row.base_wall_us == pytest.approx(100 * overhead)
    assert row.wall_speedup == pytest.approx(2.0)


def test_long_calls_are_sampled_ten_times_or_are_unstable():
    """Neither a short budget nor a wall cap makes a median of three samples VALID."""
    slow = replace(BUDGET, device_s=0.0, wall_s=5.0)
    row = timed(clock=clock_of(5e4, 1e5), budget=slow)
    assert row.n >= stats.MIN_N and row.ci95_us and row.stop == "budget"
    row = timed(clock=clock_of(5e4, 1e5), budget=replace(slow, device_s=1e9, wall_s=-1.0))
    assert row.n < stats.MIN_CI_N and row.status == "UNSTABLE" and row.stop == "cap"
    assert f"too few samples: {row.n}, at least 10" in said(row)
    assert row.ci95_us is None and row.speedup is None and row.median_us > 0


def test_every_contender_warms_up_by_itself():
    """One's ever faster calls are not lost in the median over all."""
    warms = lambda us, n, batch: 50.0 if n % 3 < 2 else 1000.0 / min(batch, 6)
    call = lambda: LAST.__setitem__(0, "ours")
    timing.warm_up(clock := clock_of(lie=warms), [call] * 3, True, replace(BUDGET, warm_cap_s=60.0))
    assert len(clock.batches) == 7


@pytest.mark.parametrize("slow, word, seeds", [
    (1.03, "0.97x", 5), (1.003, NO_DIFFERENCE, 5), (1 / 1.03, "1.03x", 5), (1.0, NO_DIFFERENCE, 25),
])  # fmt: skip
def test_planted_slowdowns_get_the_right_word(slow, word, seeds):
    """3 % is found, 0.3 % is no difference; neither word may depend on the seed."""
    for seed in range(seeds):
        row = timed(clock=clock_of(50.0 * slow, 50.0, seed=seed))
        _, told = speedup_text(row.record(), 0.01)
        assert told.startswith(word), (seed, row.speedup_ci95)


def test_sampling_goes_on_until_the_ratio_is_known_too():
    """Times that move against each other: each is narrow long before their ratio is."""
    draw = random.Random(3)

    def run(calls, *, cold):
        times = []
        for _ in range(0, len(calls), 4):
            e = draw.gauss(0, 0.012)
            times += [50 * (1 + e), 100 * (1 - e), 100 * (1 - e), 50 * (1 + e)]
        return times

    count = itertools.count(0, 1e9)
    clock = SimpleNamespace(run=run, gaps=lambda: False, host_us=lambda: next(count))
    budget = replace(BUDGET, device_s=1e9, wall_s=60.0)
    found = timing.sample(clock, lambda: None, lambda: None, True, budget)
    low, high = stats.bootstrap_ci(found.ratios, 500)
    assert found.stop == "noise"
    assert (high - low) / 2 < budget.rel_half_width * stats.quantile(found.ratios, 0.5)


# ---- clocks --------------------------------------------------------------------------------------


def test_host_clock_times_calls_and_refuses_cold():
    clock = HostClock()
    times = clock.run([lambda: sum(range(2000))] * 5, cold=False)
    assert len(times) == 5 and min(times) > 1
    with pytest.raises(ValueError, match="cold"):
        clock.run([], cold=True)
    row = timed(clock=clock, cold=False, nominal=None)
    assert row.launch_bound is None
    if row.status == "INVALID":  # other work on this machine may lie between what two clocks see
        assert "the clock" in row.why[0], row.why
    else:
        assert row.wall_us > 0, row


def test_wall_time_is_of_the_calls_that_were_made(monkeypatch):
    now, made = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call():
        made.append("call")
        now[0] += 3e-6

    call.before = lambda: made.append("before")
    assert HostClock().wall(call, n=4) == pytest.approx(3.0)
    assert made == ["before", "call"] * 4
    call.in_a_row = lambda: [call() for _ in range(7)] and 7
    made.clear()
    assert HostClock().wall(call, n=4) == pytest.approx(3.0)
    assert made == ["call"] * 7


@pytest.mark.parametrize("round_s, pauses, most", [(0.004, 2, 9), (0.025, 1, 3), (1.0, 1, 3)])
def test_a_pause_of_the_host_is_no_wall_time(round_s, pauses, most, monkeypatch):
    now, took = [0.0], [0.01 + round_s] * pauses + [round_s] * 9
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    left = iter(took)

    def once():
        seconds = next(left)
        now[0] += seconds
        return seconds * 1e6

    assert statistics.median(rounds(once)) == pytest.approx(round_s * 1e6)
    assert len(took) - len(list(left)) <= most


def test_host_times_of_both_are_taken_in_turn_and_bounded():
    """A host that slows down between two rounds slows both: the ratio stays, and its bound."""
    clock, calls = clock_of(), []
    paces = iter([1.0, 1.0, *(1.0 + 0.1 * n for n in range(99))])

    def wall(call, n=20):
        for _ in range(n):
            call()
        calls.append(LAST[0])
        wall.pace = next(paces) if LAST[0] == "ours" else wall.pace
        return clock.lengths[LAST[0]] * wall.pace

    clock.wall = wall
    row = timed(clock=clock)
    assert calls == ["ours", "base"] * (len(calls) // 2) and len(calls) >= 2 * (1 + stats.MIN_CI_N)
    assert row.wall_us > 60 and row.wall_speedup == pytest.approx(2.0)
    assert row.wall_speedup_ci95 == pytest.approx((2.0, 2.0))
    assert row.csv()["wall_low"] == pytest.approx(2.0)


def test_the_devices_own_time_is_what_lies_between_two_marks():
    mark = lambda at: (at, 1.0, "void at::cuda::spin_kernel(long)")
    spans = [mark(0), (5, 2.0, "a"), (90, 3.0, "copy"), mark(95), (96, 50.0, "flush"), mark(200),
             mark(201)]  # fmt: skip
    assert busy_between(spans[::-1], 2) == [5.0, 0.0]
    with pytest.raises(RuntimeError, match="saw 4 of 6 marks"):
        busy_between(spans, 3)


def test_what_is_no_work_of_a_call_lies_outside_of_its_events(monkeypatch):
    """On a card: inputs are renewed and caches flushed before the first event, marks are taken
    after the last one."""
    order: list[str] = []
    note = lambda word: lambda *_: order.append(word)
    number = itertools.count(1)
    event = lambda enable_timing=True: SimpleNamespace(
        record=note(f"event{next(number)}"), query=lambda: False, elapsed_time=lambda _: 0.01
    )
    cuda = SimpleNamespace(
        Event=event, _sleep=note("sleep"), synchronize=lambda *_: None,
        get_device_properties=lambda _: SimpleNamespace(L2_cache_size=8, clock_rate=1e6),
    )  # fmt: skip
    monkeypatch.setattr(clocks.torch, "cuda", cuda)
    clock = clocks.CudaClock("cpu")
    clock._flush = SimpleNamespace(zero_=note("flush"))
    call = lambda: order.append("call")
    call.before, call.after = note("before"), note("after")
    assert clock.run([call], cold=True) == [10.0]
    assert order == ["sleep", "event3", "before", "flush", "event1", "call", "event2", "after"]
    order.clear()
    assert clock.wall(call, 3) >= clock.enqueue_us > 0 and order.count("call") == 3


def test_without_kernels_in_the_profile_events_are_the_clock(monkeypatch, capsys):
    blind = mock.Mock(side_effect=RuntimeError("the profiler saw 0 of 4 marks"))
    monkeypatch.setattr(clocks, "BusyClock", type("Blind", (HostClock,), {"run": blind}))
    monkeypatch.setattr(clocks, "CudaClock", HostClock)
    assert type(clocks.busy_clock()) is HostClock
    assert "events" in capsys.readouterr().err


# ---- what a row must not leave out ---------------------------------------------------------------


@pytest.mark.parametrize("error, status", [
    (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried"), "SKIPPED"),
    (RuntimeError("no inputs"), "FAILED"), (None, "VALID"),
])  # fmt: skip
def test_a_case_is_built_by_measuring_it_or_cannot_be(error, status):
    case = planted(columns={"L": 64, "nspans": 2})
    build = mock.Mock(side_effect=error, return_value=case)
    row = timed(Unbuilt("planted", case.name, build, {"L": 64}))
    assert (row.status, row.case, row.columns["L"]) == (status, case.name, 64)
    if error:
        assert str(error).split(".")[0] in said(row) and row.median_us is None
    else:
        assert row.columns == {"L": 64, "nspans": 2} and row.path_requested == case.requested
        assert row.candidate == case.candidate.name


@pytest.mark.parametrize("drift, of_baseline", [
    ({"ours": 1.001, "base": 1.001}, {True, False}), ({"base": 1.001}, {True}),
], ids=["both", "baseline"])  # fmt: skip
def test_what_drifts_makes_the_row_unstable(drift, of_baseline):
    """A ratio is of its baseline, too, however steady the candidate is."""
    row = timed(clock=clock_of(drift=drift), budget=replace(BUDGET, min_n=100, device_s=0.1))
    assert row.status == "UNSTABLE" and "drift" in said(row)
    assert {why.startswith("baseline ") for why in row.why} == of_baseline, row.why


@pytest.mark.parametrize("reason", ["HwSlowdown", "HwThermal", "SwThermal", "HwPowerBrake"])
def test_a_card_that_was_throttled_for_a_moment_makes_the_row_unstable(reason):
    """Also where its samples agree, and where it was over before the last reading."""
    quiet = {"sm_mhz": 1980, "power_w": 500.0, "temp_c": 50, "reasons": []}

    def on_a_card(*reasons):
        states = [quiet, {**quiet, "sm_mhz": 1200, "reasons": list(reasons)}, quiet]
        watch = lambda: contextlib.nullcontext(Watch(None, states=states))
        nominal = lambda: Ceilings(4800.0, 989.0, "nominal")
        return timed(gpu=SimpleNamespace(watch=watch, nominal=nominal), nominal=None)

    row = on_a_card(reason, "SwPowerCap")
    assert row.status == "UNSTABLE" and said(row) == f"throttled: {reason}"
    assert row.reasons == sorted([reason, "SwPowerCap"]) and row.sm_mhz == [1200, 1980]
    assert row.sm_mhz_median == 1980 and on_a_card("SwPowerCap").status == "VALID"


def test_the_freed_memory_is_poisoned_ahead_of_every_checked_call(monkeypatch):
    """A kernel that writes nothing must find NaN there, not what an earlier call left; the whole
    output is poisoned, not the part compared."""
    seen, real = [], proof.poison

    def poison(like, copies=3):
        seen.append([tuple(t.shape) for t in (like if isinstance(like, tuple) else (like,))])
        real(like, copies)

    monkeypatch.setattr(proof, "poison", poison)
    case = planted(lambda x, n: seen.append("call") or (2 * x, 3 * x[:9]), same_dtype=None,
                   view=lambda out: out[0][:4], baselines=())  # fmt: skip
    x = case.inputs()[0]
    case = replace(case, oracle=lambda: 2 * x[:4].double())
    timing.prove(case, case.candidate, 0, "check")
    assert seen == [[(64, 32)], "call"]
    assert timed(case).status == "VALID" and seen.count([(64, 32), (9, 32)]) == 2


def test_what_is_left_in_freed_memory_is_nan(monkeypatch):
    made, real = [], torch.full_like
    monkeypatch.setattr(torch, "full_like", lambda *how: made.append(real(*how)) or made[-1])
    proof.poison((torch.zeros(3), torch.zeros(2, 2).half(), torch.zeros(2, dtype=torch.int32)))
    assert [x.shape for x in made] == 3 * [(3,)] + 3 * [(2, 2)]
    assert all(x.isnan().all() for x in made)


# ---- statistics ----------------------------------------------------------------------------------


def shuffled(values, seed=0):
    values = list(values)
    random.Random(seed).shuffle(values)
    return values


@pytest.mark.parametrize("n", [6, 31, 999, 1000, 1001, 2000])
def test_the_median_interval_of_any_length_is_exact(n):
    """Over 1000 samples by logarithms: at 2.5 % on either side, by whole numbers."""
    k, tail = 0, 0
    while (tail := tail + math.comb(n, k)) * 40 <= 2**n:
        k += 1
    assert stats.median_ci(range(1, n + 1)) == (k, n + 1 - k)
    assert n != 31 or stats.median_ci(shuffled(range(1, 31))) == (10, 21)  # the textbooks'
    assert stats.median_ci([3.0, 1.0, 2.0, 5.0, 4.0]) is None


def test_a_ratios_interval_covers_95_percent_and_its_floor_counts_both_ways():
    """Ranks of a resampled median lie +-1.96 * sqrt(n) / 2 around the middle."""
    low, high = stats.bootstrap_ci(range(1, 402))
    assert (low, high) == pytest.approx((201 - 19.6, 201 + 19.6), abs=1.2)
    assert stats.noise_floor([1.0, 1.002, 0.999]) == stats.LEAST_FLOOR
    assert stats.noise_floor([0.95] * 20) == stats.noise_floor([1.05] * 20) == pytest.approx(0.05)
    assert stats.noise_floor([1.0] * 90 + [0.9] * 10) == pytest.approx(0.1)


# Ten times of a backward at 32k under a power cap, H200: -4.1 % from the first third to the last,
# as often up as down; then as many that fall by as much, with a jump that thirds do not see.
JUMPS = [16555, 16602, 16414, 15642, 16001, 16014, 15913, 15564, 15898, 16277]
FALLS = [16602, 16555, 16414, 16014, 16277, 16001, 15913, 15898, 15642, 15564]


@pytest.mark.parametrize("samples, says", [
    (JUMPS, None), (FALLS, "drift: last third -"),
    ([100 - 0.1 * i for i in range(90)], "drift: last third -"),  # a card that warms up late
    ([100 + 0.1 * i for i in range(90)], "drift: last third +"),
    (shuffled(100 + 0.5 * i for i in range(30)), "spread"),  # known to 3 % only
    (shuffled(70 + 60 * i / 6000 for i in range(6000)), "spread"),  # well known, of no one time
    (shuffled(95 + 10 * i / 3000 for i in range(3000)), None),  # a short kernel, well known
    ([100.0] * 20 + [150.0] * 3, None),
])  # fmt: skip
def test_what_does_not_settle_is_named(samples, says):
    why = stats.instability(samples, 0.5)
    assert (len(why) == 1 and why[0].startswith(says)) if says else not why, why
    assert stats.instability(samples, 2000.0) == []  # what the clock cannot tell apart
