"""One timed case: proof, warm-up, interleaved pairs, proof in their midst, and the row that may be
claimed.

    measure(Case(...), clock) -> BenchRow

A case knows how to refill its inputs in place, its candidate, its baseline and its oracle. Both are
checked before the clock starts; what is timed then is proven by bench/proof.py.
"""

import json
import math
import random
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from bench import recorded, spent, stats
from bench.cases import Case, Contender, Unbuilt
from bench.clock import Clock, rounds
from bench.device import THROTTLED, Ceilings, Gpu, Watch
from bench.formulation import (
    Ran,
    Reached,
    watch,
    why_another,
    why_not_attention,
    why_slow,
    why_slower_than_recorded,
)
from bench.parity import Parity
from bench.proof import NotProven, NotRight, SpotChecks, Turns, calls_at_once, held, prove
from bench.records import SAMPLES_KEPT, BenchRow, out_dir, why_no_time
from nsa import launches

RATIO_FLOOR_US = 2.0  # shorter calls get no ratio: the clock's own step is a quarter of that
TOO_FAST = 1.05  # share of a nominal peak over which a time cannot be true
WALL_US = 10_000  # of back-to-back calls in a round
WHILE_US = 100_000  # of calls for one median, where nothing is claimed by it
STEADY_US = 50.0  # the same time of every call, from here on, is no clock's that has steps


@dataclass(frozen=True)
class Budget:
    """When to stop sampling: a narrow interval, or the time is up."""

    device_s: float = 1.0
    wall_s: float = 8.0
    min_n: int = 30
    rel_half_width: float = 0.005
    warm_calls: int = 3
    warm_s: float = 0.1
    warm_cap_s: float = 2.0


def warm_up(clock: Clock, calls: Sequence[Callable[[], Any]], cold: bool, budget: Budget) -> None:
    """Call in turn until of each two windows of 10 (of long calls 3) agree within 1 %, or within
    what the clock can tell apart; at least budget.warm_s."""
    begin, last, often, made = time.perf_counter(), [math.inf] * len(calls), 3, 0
    while True:
        times = clock.run([*calls] * often, cold=cold)
        centre = [statistics.median(times[i :: len(calls)]) for i in range(len(calls))]
        spent = time.perf_counter() - begin
        made += often
        often = _often(sum(centre))
        settled = made >= budget.warm_calls and all(
            abs(now - before) < max(0.01 * before, clock.resolution_us)
            for now, before in zip(centre, last, strict=True)
        )
        if (settled and spent >= budget.warm_s) or spent >= budget.warm_cap_s:
            return
        last = centre


def _often(us: float) -> int:
    """How many calls of so long give a median: 10, and 3 where these take a while."""
    return max(3, min(10, int(WHILE_US / max(us, 1.0))))


def strongest(clock: Clock, contenders: Sequence[Turns], cold: bool) -> Turns:
    """The fastest of several baselines, by ten calls of each, of long ones three."""
    if len(contenders) == 1:
        return contenders[0]
    often = [2 + _often(clock.run([turns.call], cold=cold)[0]) for turns in contenders]
    centre = [
        statistics.median(clock.run([turns.call] * n, cold=cold)[2:])
        for turns, n in zip(contenders, often, strict=True)
    ]
    return contenders[centre.index(min(centre))]


@dataclass
class Samples:
    """One time per ABBA or BAAB group, in us and in order: the mean of the candidate's two calls,
    of the baseline's two, and their ratio. A call after the other's finds its code out of the
    instruction caches and takes 3 us longer: single calls would have two modes and no settled
    median.

    timed_us: all that the clock said; elapsed_us: of another counter of the host, meanwhile.
    """

    ours: list[float] = field(default_factory=list)
    base: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    single: tuple[set[float], set[float]] = field(default_factory=lambda: (set(), set()))
    batches: int = 0
    gap_batches: int = 0  # in which the host left gaps that their times hold
    timed_us: float = 0.0
    elapsed_us: float = 0.0
    stop: str = ""

    def add(self, times: Sequence[float], base_at: Sequence[bool]) -> None:
        """Groups of calls, of which those at base_at are the baseline's."""
        size = len(base_at)
        for at in range(0, len(times), size):
            group = list(zip(times[at : at + size], base_at, strict=True))
            mine = [us for us, base in group if not base]
            theirs = [us for us, base in group if base]
            for kept, us in zip(self.single, (mine, theirs), strict=True):
                kept.update(us)
            self.ours.append(sum(mine) / len(mine))
            if theirs:
                self.base.append(sum(theirs) / len(theirs))
                self.ratios.append(sum(theirs) / sum(mine))

    def narrow(self, budget: Budget) -> bool:
        """Whether medians and ratio are known as well as wanted."""
        wide = [x for x in (self.ours, self.base) if x]
        widest = max(map(stats.half_width, wide), default=math.inf)
        if len(self.ours) < budget.min_n or widest >= budget.rel_half_width:
            return False
        if not self.ratios:
            return True
        low, high = stats.bootstrap_ci(self.ratios, 500)
        return (high - low) / 2 < budget.rel_half_width * statistics.median(self.ratios)

    def check(self) -> None:
        """Raises NotProven where the clock cannot have said the truth."""
        if why := why_no_time(vars(self)):
            raise NotProven("; ".join(why))
        calls = 2 * len(self.ours)
        one = [x for x in self.single if x]
        alike = all(len(x) == 1 for x in one) and (len(one) == 1 or one[0] == one[1])
        if calls >= 20 and alike and (len(one) == 2 or max(one[0]) > STEADY_US):
            raise NotProven(f"the clock says {max(one[0]):g} us of each of {calls} calls")


def sample(
    clock: Clock, ours: Callable[[], Any], base: Callable[[], Any] | None, cold: bool,
    budget: Budget, spots: SpotChecks | None = None,
) -> Samples:  # fmt: skip
    """Groups of candidate and baseline, ABBA or BAAB, until the intervals are narrow; spots judges
    some of them. Raises what it raises, and NotProven for times that cannot be."""
    samples, per_batch, mean, call_us, calls = Samples(), 2, 0.0, 0.0, 0
    begin, device_us = time.perf_counter(), 0.0
    while True:
        due = spots and (spots.pending(samples.batches + 1) or (samples.stop and spots.pending(99)))
        last_is_base = bool(due) and base is not None and due is spots.base
        base_at = [] if base is None else [last_is_base, not last_is_base]
        base_at = [*base_at, *reversed(base_at)] or [False, False]
        group = [base if theirs else ours for theirs in base_at]
        lead = 0
        if spots:
            times, lead, elapsed = spots.run(clock, group, per_batch, cold, call_us, due or None)
        else:
            times, elapsed = held(clock, group * per_batch, cold)
        samples.elapsed_us += elapsed
        samples.timed_us += sum(times)
        calls += len(times)
        call_us = samples.elapsed_us / calls
        samples.batches += 1
        samples.gap_batches += clock.gaps()
        device_us += sum(times[lead:])
        samples.add(times[lead:], base_at)
        mean = device_us / len(samples.ours)
        spent, enough = time.perf_counter() - begin, len(samples.ours) >= stats.MIN_N
        samples.stop = samples.stop or (
            "noise" if samples.narrow(budget)
            else "budget" if device_us > budget.device_s * 1e6 and enough
            else "cap" if spent > budget.wall_s and (enough or spent > 4 * budget.wall_s)
            else ""
        )  # fmt: skip
        if samples.stop and not (spots and spots.pending(99)):
            samples.check()
            return samples
        most = (spots.at_once if spots else 64) // len(group)
        per_batch = 1 if samples.stop else max(1, min(most, int(20_000 / max(mean, 1))))


def _ideal_us(work: Case | Contender, ceiling: Ceilings) -> dict[str, float]:
    """Microseconds of the work at each ceiling that is known."""
    amounts = {"memory": (work.bytes_needed, ceiling.gbs, 1e3),
               "compute": (work.flops, ceiling.tflops, 1e6)}  # fmt: skip
    return {n: amount / peak / scale for n, (amount, peak, scale) in amounts.items()
            if amount and peak}  # fmt: skip


def _impossible(case: Case, median_us: float, cold: bool, nominal: Ceilings) -> str | None:
    """Why this time cannot be true, by what the hardware can move and compute."""
    peaks = {"memory": (nominal.gbs, "GB/s"), "compute": (nominal.tflops, "TFLOP/s")}
    for bound, us in _ideal_us(case, nominal).items():
        if us > TOO_FAST * median_us and (cold or bound == "compute"):
            peak, unit = peaks[bound]
            rate = us / median_us * peak
            return f"faster than the hardware: {rate:.0f} {unit} where the peak is {peak:.0f}"
    return None


def _throughput(
    work: Case | Contender, median_us: float, ceiling: Ceilings, prefix: str = ""
) -> dict[str, Any]:
    """Columns gbs, tflops, bound (the ceiling that is nearer) and peak_frac, the share of it."""
    ideal = _ideal_us(work, ceiling)
    bound = max(ideal, key=ideal.__getitem__) if ideal else None
    found = {
        "gbs": work.bytes_needed / median_us / 1e3 if work.bytes_needed else None,
        "tflops": work.flops / median_us / 1e6 if work.flops else None,
        "bound": bound, "peak_frac": ideal[bound] / median_us if bound else None,
    }  # fmt: skip
    return {f"{prefix}{name}": value for name, value in found.items()}


def save_samples(row: BenchRow, samples: Samples) -> None:
    """Append raw times to bench/samples.jsonl of the report's folder, when there is one.

    Of a long series every k-th is kept (`every`): a full matrix has thousands of cases.
    """
    folder = out_dir()
    if folder is None:
        return
    path = folder / "bench" / "samples.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ("bench", "case", "cache", "candidate", "baseline", "sm_mhz")
    line = {**{name: getattr(row, name) for name in names}, "n": len(samples.ours)}
    for name, times in (("us", samples.ours), ("base_us", samples.base)):
        every = -(-len(times) // SAMPLES_KEPT) or 1
        line |= {name: [round(x, 3) for x in times[::every]], f"{name}_every": every}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def _reason(error: BaseException) -> str:
    first = [line[:300] for line in str(error).strip().splitlines()[:1]]
    return ": ".join([type(error).__name__, *first])


def measure(
    case: Case | Unbuilt, clock: Clock, *, gpu: Gpu | None = None,
    ceiling: Ceilings | None = None, nominal: Ceilings | None = None, cold: bool = True,
    budget: Budget | None = None, save: Callable[[BenchRow, Samples], None] = save_samples,
) -> BenchRow:  # fmt: skip
    """Time one case by the rules above; every outcome is a row, sent to the runner.

    nominal bounds what can be true, ceiling is what shares are taken of (both default to the
    gpu's nominal numbers). A wrong result gives FAILED, an impossible time or a path that did not
    run INVALID, too little memory or an unsupported shape SKIPPED; none of these carries a number.
    """
    from nsa.dispatch import RouteUnavailable

    budget = budget or Budget()
    nominal = nominal or (gpu.nominal() if gpu else Ceilings(None, None, "unknown"))
    ceiling = ceiling or nominal
    row = BenchRow(
        case.bench, case.name, "FAILED", why=("not measured",), cache="cold" if cold else "warm",
        timer=clock.timer, columns=case.columns,
    )  # fmt: skip
    try:
        if isinstance(case, Unbuilt):
            with spent.on("inputs"):
                case = case.build()
        asked, names = case.requested or case.candidate.path, [one.name for one in case.baselines]
        row = replace(row, candidate=case.candidate.name, columns=case.columns)
        row = replace(row, path_requested=asked, baseline=names[0] if len(names) == 1 else None)
        row, samples = _measured(case, clock, row, gpu, ceiling, nominal, cold, budget)
        save(row, samples)
    except NotProven as error:
        row = replace(row, status="INVALID", why=(str(error),))
    except NotRight as error:
        parity = error.parity
        status = "INVALID" if parity.status == "INVALID" else "FAILED"
        row = replace(row, status=status, why=(str(error),), parity=_proof(parity))
    except torch.cuda.OutOfMemoryError as error:
        row = replace(row, status="SKIPPED", why=(f"out of memory: {_reason(error)}",))
        torch.cuda.empty_cache()
    except RouteUnavailable as error:
        row = replace(row, status="SKIPPED", why=(_reason(error),))
    except Exception as error:
        row = replace(row, status="FAILED", why=(_reason(error),))
    return row.emit()


def _proof(parity: Parity) -> dict[str, Any]:
    names = ("mae", "max_abs", "ref_same_dtype_max_abs", "worst_row", "limit_mae", "limit_max_abs",
             "margin", "status")  # fmt: skip
    return {**{name: getattr(parity, name) for name in names}, "launches": parity.launches}


def _walls(
    clock: Clock, both: Sequence[Turns], device_us: Sequence[float]
) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
    """Host time per call of each contender, taking turns, round by round, and how much of it the
    host was busy; of a long call, whose host time is its device time, few are made.

    Raises NotProven unless what the launchers counted are the launches of these calls.
    """
    calls = [turns.contender.call for turns in both]
    often = [
        1 if us > WALL_US else max(2, min(100, int(WALL_US / max(us, clock.wall(call, 2)))))
        for call, us in zip(calls, device_us, strict=True)
    ]

    def once() -> tuple[tuple[float, float], ...]:
        found = []
        for turns, call, n in zip(both, calls, often, strict=True):
            before = launches.counts()
            found.append((clock.wall(call, n), clock.enqueue_us))
            if not hasattr(call, "in_a_row"):
                turns.check_by_itself(before, n)
        return tuple(found)

    found = rounds(once, least=3 if len(calls) == 1 else stats.MIN_CI_N)
    return tuple([tuple(pair[i] for pair in one) for one in found] for i in (0, 1))


def _usable(case: Case, draw: random.Random) -> list[Turns]:
    """The baselines that give the right result here. Raises RuntimeError where none does."""
    found, errors = [], []
    for contender in case.baselines:
        try:
            prove(case, contender, case.seed + 1, f"baseline {contender.name}")
            found.append(Turns(case, contender, draw))
        except Exception as error:  # what cannot serve here is no baseline, whatever it raises
            errors.append(f"{contender.name}: {_reason(error)}")
    if not found:
        raise RuntimeError("no baseline is right here: " + "; ".join(errors))
    return found


_reached: WeakKeyDictionary[Any, dict[tuple[str, str], list[Reached]]] = WeakKeyDictionary()


def _baseline(
    case: Case, base: Contender, times: Sequence[float], clock: Clock, cold: bool,
    ceiling: Ceilings, shaky: bool,
) -> dict[str, Any]:  # fmt: skip
    """Columns of the baseline as work that was measured: what ran, and its share of the ceiling.
    On a host, which others use as well, and where its times are `shaky`, which is told beside
    them, it is held to its fastest sample.

    Raises NotProven for a baseline that is not what its name says, or far slower than it can be.
    """
    ran = watch(base.watched or base.call) if base.path == "sdpa" else Ran()
    work = base if base.bytes_needed or base.flops else case
    why = why_another(base.attends, base.name, ran)
    median_us = statistics.median(times)
    least_us = min(times) if shaky or not clock.device_time else median_us
    why = why or why_not_attention(base, ran, least_us, clock, cold)
    ideal = _ideal_us(work, ceiling)
    # Of one ceiling alone nobody can tell what work that the other bounds may take.
    if len(ideal) == bool(work.bytes_needed) + bool(work.flops) and ideal and not why:
        now = Reached(max(ideal.values()), least_us)
        before = _reached.setdefault(clock, {}).setdefault((case.bench, base.name), [])
        why = why_slow(base, now, before, clock.device_time)
        before.append(now)
    record = recorded.baseline(case.bench, case.columns, base.name, clock.timer)
    if why := why or why_slower_than_recorded(least_us, record):
        raise NotProven(f"baseline {base.name}: {why}: no ratio to it is told")
    return {"base_ran": ran.words(), **_throughput(work, median_us, ceiling, "base_")}


def _measured(
    case: Case, clock: Clock, row: BenchRow, gpu: Gpu | None, ceiling: Ceilings,
    nominal: Ceilings, cold: bool, budget: Budget,
) -> tuple[BenchRow, Samples]:  # fmt: skip
    ours, seed = case.candidate, secrets.randbits(32)
    draw = random.Random(seed)
    both = [Turns(case, ours, draw)]
    with spent.on("proof"):
        _, first_ms = prove(case, ours, case.seed, "first check")
        if case.facts:
            row = replace(row, columns={**row.columns, **case.facts()})
        usable = _usable(case, draw) if case.baselines else []
    with spent.on("warm-up"):
        if usable:
            both.append(strongest(clock, usable, cold))
        calls = [turns.call for turns in both]
        warm_up(clock, calls, cold, budget)
        for turns in both:
            turns.settle()
    spots = SpotChecks(case, both[0], both[1] if len(both) > 1 else None, draw)
    spots.at_once = calls_at_once(clock, both)
    with gpu.watch() if gpu else nullcontext(Watch(None)) as watch, spent.on("timing"):
        samples = sample(clock, calls[0], calls[1] if len(both) > 1 else None, cold, budget, spots)
    median = statistics.median(samples.ours)
    proof = _proof(spots.parity)
    if why := _impossible(case, median, cold, nominal):
        return replace(row, status="INVALID", why=(why,), parity=proof), samples
    numbers = {
        "judged": spots.judged, "draw": seed, "first_call_ms": first_ms,
        **_numbers(samples), **_throughput(case, median, ceiling),
    }  # fmt: skip
    state, reasons = watch.summary(), stats.too_few(len(samples.ours))
    reasons += stats.instability(samples.ours, clock.resolution_us)
    centres = [median]
    if samples.base:
        base, centre = both[1].contender, statistics.median(samples.base)
        centres.append(centre)
        shaky = stats.instability(samples.base, clock.resolution_us)
        reasons += [f"baseline {w}" for w in shaky]
        numbers |= {"baseline": base.name, "order": "ABBA"}
        with spent.on("proof"):
            numbers |= _baseline(case, base, samples.base, clock, cold, ceiling, bool(shaky))
    throttled = sorted(THROTTLED & set(state["reasons"] or ()))
    if throttled:
        reasons.append(f"throttled: {', '.join(throttled)}")
    with spent.on("walls"):
        numbers |= _wall_numbers(clock, both, centres)
    # Times with gaps hold the host's share: where most do, wall and device cannot differ any more.
    bound = 2 * samples.gap_batches > samples.batches
    if not hasattr(ours.call, "in_a_row"):  # whose wall time is of other calls than the median
        bound |= numbers["wall_us"] > 1.2 * median
    numbers["launch_bound"] = bound if clock.device_time else None
    if why := why_no_time({**numbers, "timer": clock.timer}):
        return replace(row, status="INVALID", why=tuple(why), parity=proof), samples
    row = replace(
        row, status="UNSTABLE" if reasons else "VALID", why=tuple(reasons), parity=proof,
        path_taken=ours.path, bytes=case.bytes_needed, flops=case.flops, **state, **numbers,
    )  # fmt: skip
    return row, samples


def _numbers(samples: Samples) -> dict[str, Any]:
    """Columns of a row that its samples give."""
    names = ("stop", "batches", "gap_batches", "timed_us", "elapsed_us")
    numbers = stats.summary(samples.ours) | {name: getattr(samples, name) for name in names}
    if not samples.base:
        return numbers
    centre = statistics.median(samples.base)
    numbers |= {"pairs": len(samples.ratios), "base_median_us": centre}
    numbers["base_ci95_us"] = stats.median_ci(samples.base)
    short = min(numbers["median_us"], centre) < RATIO_FLOOR_US
    if not short and len(samples.ratios) >= stats.MIN_CI_N:
        numbers["speedup"] = statistics.median(samples.ratios)
        numbers["speedup_ci95"] = stats.bootstrap_ci(samples.ratios)
    return numbers


def _wall_numbers(clock: Clock, both: Sequence[Turns], centres: Sequence[float]) -> dict[str, Any]:
    """Columns of a row that the host's times of calls back to back give."""
    walls, busy = _walls(clock, both, centres)
    numbers: dict[str, Any] = {}
    for i, (turns, of) in enumerate(zip(both, ("", "base_"), strict=False)):
        numbers[f"{of}wall_us"] = statistics.median(one[i] for one in walls)
        numbers[f"{of}wall_min_us"] = min(one[i] for one in walls)
        if not hasattr(turns.contender.call, "in_a_row"):
            numbers[f"{of}enqueue_us"] = statistics.median(one[i] for one in busy)
    if len(both) > 1:
        ratios = [theirs / mine for mine, theirs in walls]
        numbers["wall_speedup"] = statistics.median(ratios)
        numbers["wall_speedup_ci95"] = stats.bootstrap_ci(ratios)
    return numbers
