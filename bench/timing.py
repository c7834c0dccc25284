"""One timed case: proof, warm-up, interleaved pairs, proof again, and the row that may be claimed.

    measure(Case(...), clock) -> BenchRow

A case knows how to refill its inputs in place, its candidate, its baseline and its oracle. The
candidate is checked twice before the clock starts, on different numbers in the same memory (a
kernel that returns what it remembers fails), and once more on the output of the last timed call,
whose inputs are new again.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench import stats
from bench.clock import Clock, prepare, rounds
from bench.device import THROTTLED, Ceilings, Gpu, Watch
from bench.parity import Parity, measure_parity
from bench.records import BenchRow, out_dir
from nsa import launches

RATIO_FLOOR_US = 2.0  # shorter calls get no ratio: the clock's own step is a quarter of that
SAMPLES_KEPT = 200
TOO_FAST = 1.05  # share of a nominal peak over which a time cannot be true


@dataclass(frozen=True)
class Contender:
    """A named call. `kernels` are the launches that prove that it ran on path `path`.

    oracle and same_dtype: its own, where it computes something else than the case does (dense
    attention as the baseline of a sparse one).
    """

    name: str
    call: Callable[[], Any]
    path: str
    kernels: tuple[str, ...] = ()
    oracle: Callable[[], Tensor] | None = None
    same_dtype: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class Case:
    """What is timed against what, and what it must compute.

    refill(seed) writes new inputs into the same memory; inputs() lists them (they must survive the
    calls). oracle() is the output in fp64 for the present inputs; same_dtype() the plain PyTorch
    computation in the output's dtype. view() picks the part of a call's result that these two give.
    bytes_needed: what must cross the memory bus once, cold; flops: the useful ones.
    """

    bench: str
    name: str
    candidate: Contender
    refill: Callable[[int], None]
    inputs: Callable[[], Sequence[Tensor]]
    oracle: Callable[[], Tensor]
    same_dtype: Callable[[], Tensor] | None = None
    baselines: Sequence[Contender] = ()
    view: Callable[[Any], Tensor] = lambda out: out
    requested: str | None = None
    bytes_needed: int | None = None
    flops: int | None = None
    seed: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unbuilt:
    """A case whose inputs measure() makes: too little memory for them is a row as well."""

    bench: str
    name: str
    build: Callable[[], Case]
    columns: Mapping[str, Any] = field(default_factory=dict)


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


class NotRight(Exception):
    """The candidate's result, path or inputs are wrong; `parity` says how."""

    def __init__(self, parity: Parity, when: str) -> None:
        super().__init__(f"{when}: " + "; ".join(parity.why))
        self.parity = parity


def poison(like: Any, copies: int = 3) -> None:
    """Leave NaN in freed memory of this tensor's size, or of each one's of several, so that an
    output nobody wrote shows."""
    if isinstance(like, (tuple, list)):
        for one in like:
            poison(one, copies)
    elif isinstance(like, Tensor) and like.is_floating_point():
        spoiled = [torch.full_like(like, float("nan")) for _ in range(copies)]
        del spoiled


def _fingerprint(tensors: Sequence[Tensor]) -> list[int]:
    """A check sum per tensor, exact in its bits."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [int(t.detach().view(whole[t.element_size()]).sum(dtype=torch.int64)) for t in tensors]


def _judge(case: Case, contender: Contender, out: Any, seen: Mapping[str, int]) -> Parity:
    ran = all(seen.get(kernel) for kernel in contender.kernels)
    asked = case.requested if contender is case.candidate and case.requested else contender.path
    own = contender if contender.oracle else case
    return measure_parity(
        case.name, case.bench, case.view(out), own.oracle(),
        own.same_dtype() if own.same_dtype else None, path_requested=asked,
        path_taken=contender.path if ran else None, launches=seen,
        expect_kernels=contender.kernels, seed=case.seed,
    )  # fmt: skip


def prove(case: Case, contender: Contender, seed: int, when: str) -> tuple[Parity, float]:
    """One checked call on fresh inputs. Returns the parity and the call's wall time in ms.

    Raises NotRight for a wrong result, a kernel that never ran or inputs that were written to.
    """
    case.refill(seed)
    inputs = case.inputs()
    before = _fingerprint(inputs)
    with torch.no_grad():
        poison(inputs[0])
    prepare(contender.call)
    begin = time.perf_counter()
    with launches.recording() as seen:
        out = contender.call()
        if inputs[0].is_cuda:
            torch.cuda.synchronize(inputs[0].device)
    first_ms = (time.perf_counter() - begin) * 1e3
    parity = _judge(case, contender, out, seen)
    if _fingerprint(inputs) != before:
        parity = replace(parity, status="FAIL", why=[*parity.why, "the inputs were written to"])
    if parity.status != "PASS":
        raise NotRight(parity, when)
    return parity, first_ms


def warm_up(clock: Clock, calls: Sequence[Callable[[], Any]], cold: bool, budget: Budget) -> None:
    """Call in turn until of each two windows of 10 agree within 1 %, or within what the clock can
    tell apart; at least budget.warm_s."""
    begin, last, rounds = time.perf_counter(), None, 0
    while True:
        times = clock.run([c for _ in range(10) for c in calls], cold=cold)
        centre = [statistics.median(times[i :: len(calls)]) for i in range(len(calls))]
        spent = time.perf_counter() - begin
        rounds += 1
        settled = last is not None and all(
            abs(now - before) < max(0.01 * before, clock.resolution_us)
            for now, before in zip(centre, last, strict=True)
        )
        settled = settled and rounds * 10 >= budget.warm_calls
        if (settled and spent >= budget.warm_s) or spent >= budget.warm_cap_s:
            return
        last = centre


def strongest(clock: Clock, contenders: Sequence[Contender], cold: bool) -> Contender:
    """The fastest of several baselines, by ten calls of each."""
    if len(contenders) == 1:
        return contenders[0]
    for contender in contenders:
        prepare(contender.call)
        contender.call()
    centre = {
        c.name: statistics.median(clock.run([c.call] * 12, cold=cold)[2:]) for c in contenders
    }
    return min(contenders, key=lambda c: centre[c.name])


@dataclass
class Samples:
    """One time per ABBA group, in us and in order: the mean of the candidate's two calls, of the
    baseline's two, and their ratio. A call after the other's finds its code out of the instruction
    caches and takes 3 us longer: single calls would have two modes and no settled median."""

    ours: list[float] = field(default_factory=list)
    base: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    batches: int = 0
    gap_batches: int = 0  # in which the host left gaps that their times hold
    stop: str = ""


def sample(
    clock: Clock, ours: Callable[[], Any], base: Callable[[], Any] | None, cold: bool,
    budget: Budget, into: Samples | None = None,
) -> Samples:  # fmt: skip
    """Groups of candidate, baseline, baseline, candidate until the intervals are narrow."""
    samples = into or Samples()
    group = [ours, base, base, ours] if base else [ours, ours]
    begin = time.perf_counter()
    device_us, per_batch = 0.0, 2
    while True:
        times = clock.run(group * per_batch, cold=cold)
        samples.batches += 1
        samples.gap_batches += clock.gaps()
        device_us += sum(times)
        for at in range(0, len(times), len(group)):
            one = times[at : at + len(group)]
            samples.ours.append((one[0] + one[-1]) / 2)
            if base:
                samples.base.append((one[1] + one[2]) / 2)
                samples.ratios.append((one[1] + one[2]) / (one[0] + one[3]))
        wide = [samples.ours] + ([samples.base] if base else [])
        narrow = len(samples.ours) >= budget.min_n and all(
            stats.half_width(x) < budget.rel_half_width for x in wide
        )
        if narrow and base:
            low, high = stats.bootstrap_ci(samples.ratios, 500)
            narrow = (high - low) / 2 < budget.rel_half_width * statistics.median(samples.ratios)
        spent, enough = time.perf_counter() - begin, len(samples.ours) >= stats.MIN_N
        samples.stop = (
            "noise" if narrow
            else "budget" if device_us > budget.device_s * 1e6 and enough
            else "cap" if spent > budget.wall_s and (enough or spent > 4 * budget.wall_s)
            else ""
        )  # fmt: skip
        if samples.stop:
            return samples
        mean = device_us / len(samples.ours)
        per_batch = max(1, min(16, int(20_000 / max(mean, 1))))


def _impossible(case: Case, median_us: float, cold: bool, nominal: Ceilings) -> str | None:
    """Why this time cannot be true, by what the hardware can move and compute."""
    checks = (
        (case.bytes_needed if cold else None, nominal.gbs, 1e3, "GB/s"),
        (case.flops, nominal.tflops, 1e6, "TFLOP/s"),
    )
    for amount, peak, scale, unit in checks:
        if amount and peak and amount / median_us / scale > TOO_FAST * peak:
            rate = amount / median_us / scale
            return f"faster than the hardware: {rate:.0f} {unit} where the peak is {peak:.0f}"
    return None


def _throughput(case: Case, median_us: float, ceiling: Ceilings) -> dict[str, Any]:
    gbs = case.bytes_needed / median_us / 1e3 if case.bytes_needed else None
    tflops = case.flops / median_us / 1e6 if case.flops else None
    shares = {
        "memory": gbs / ceiling.gbs if gbs and ceiling.gbs else 0.0,
        "compute": tflops / ceiling.tflops if tflops and ceiling.tflops else 0.0,
    }
    bound = max(shares, key=shares.__getitem__)
    return {
        "gbs": gbs, "tflops": tflops, "bound": bound if shares[bound] else None,
        "peak_frac": shares[bound] or None,
    }  # fmt: skip


def save_samples(row: BenchRow, samples: Samples) -> None:
    """Append raw times to bench/samples.jsonl of the report's folder, when there is one.

    Of a long series every k-th is kept (`every`): a full matrix has thousands of cases.
    """
    folder = out_dir()
    if folder is None:
        return
    path = folder / "bench" / "samples.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {
        "bench": row.bench, "case": row.case, "cache": row.cache, "candidate": row.candidate,
        "baseline": row.baseline, "sm_mhz": row.sm_mhz, "n": len(samples.ours),
    }  # fmt: skip
    for name, times in (("us", samples.ours), ("base_us", samples.base)):
        every = -(-len(times) // SAMPLES_KEPT) or 1
        line |= {name: [round(x, 3) for x in times[::every]], f"{name}_every": every}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}" if str(
        error
    ).strip() else type(error).__name__  # fmt: skip


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
            case = case.build()
        row = replace(
            row, candidate=case.candidate.name, columns=case.columns,
            path_requested=case.requested or case.candidate.path,
            baseline=case.baselines[0].name if len(case.baselines) == 1 else None,
        )  # fmt: skip
        row, samples = _measured(case, clock, row, gpu, ceiling, nominal, cold, budget)
        save(row, samples)
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
    clock: Clock, calls: Sequence[Callable[[], Any]], device_us: Sequence[float]
) -> list[tuple[float, ...]]:
    """Host time per call of each of `calls`, taking turns, round by round; of a long call, whose
    host time is its device time, few are made."""
    often = [
        max(2, min(100, int(20_000 / max(us, clock.wall(call, 2)))))
        for call, us in zip(calls, device_us, strict=True)
    ]
    once = lambda: tuple(clock.wall(c, n) for c, n in zip(calls, often, strict=True))
    return rounds(once, least=3 if len(calls) == 1 else stats.MIN_CI_N)


def _measured(
    case: Case, clock: Clock, row: BenchRow, gpu: Gpu | None, ceiling: Ceilings,
    nominal: Ceilings, cold: bool, budget: Budget,
) -> tuple[BenchRow, Samples]:  # fmt: skip
    ours = case.candidate
    _, first_ms = prove(case, ours, case.seed, "first check")
    parity, _ = prove(case, ours, case.seed + 1, "second check, new numbers in the same memory")
    base = None
    if case.baselines:
        usable, errors = [], []
        for contender in case.baselines:
            try:
                prove(case, contender, case.seed + 1, f"baseline {contender.name}")
                usable.append(contender)
            except Exception as error:  # what cannot serve here is no baseline, whatever it raises
                errors.append(f"{contender.name}: {_reason(error)}")
        if not usable:
            raise RuntimeError("no baseline is right here: " + "; ".join(errors))
        base = strongest(clock, usable, cold)

    kept: dict[str, Any] = {}

    def keeping() -> None:
        kept["out"] = ours.call()

    keeping.before = lambda: prepare(ours.call)  # type: ignore[attr-defined]
    warm_up(clock, [keeping] + ([base.call] if base else []), cold, budget)
    with gpu.watch() if gpu else nullcontext(Watch(None)) as watch:
        samples = sample(clock, keeping, base.call if base else None, cold, budget)
        # The last calls run on new numbers in the same memory: a stale result would show.
        stop = samples.stop
        case.refill(case.seed + 2)
        poison(kept.pop("out"))  # all of it, not the part that is compared
        with launches.recording() as seen:
            sample(clock, keeping, base.call if base else None, cold,
                   replace(budget, wall_s=0.0, min_n=10**9, device_s=0.0), samples)  # fmt: skip
        samples.stop = stop
    last = _judge(case, ours, kept.pop("out"), seen)
    if last.status != "PASS":
        raise NotRight(last, "after the timed calls, on the output of the last one")
    median = statistics.median(samples.ours)
    why = _impossible(case, median, cold, nominal)
    if why:
        return replace(row, status="INVALID", why=(why,), parity=_proof(parity)), samples
    state = watch.summary()
    reasons = stats.too_few(len(samples.ours))
    reasons += stats.instability(samples.ours, clock.resolution_us)
    if base:
        shaky = stats.instability(samples.base, clock.resolution_us)
        reasons += [f"baseline {w}" for w in shaky]
    throttled = sorted(THROTTLED & set(state["reasons"]))
    if throttled:
        reasons.append(f"throttled: {', '.join(throttled)}")
    centre = statistics.median(samples.base) if base else None
    walls = _walls(clock, [ours.call, base.call], [median, centre]) if base else _walls(
        clock, [ours.call], [median]
    )
    wall, *base_wall = (statistics.median(one) for one in zip(*walls, strict=True))
    # Times with gaps hold the host's share: where most do, wall and device cannot differ any more.
    bound = 2 * samples.gap_batches > samples.batches
    if not hasattr(ours.call, "in_a_row"):  # whose wall time is of other calls than the median
        bound |= wall > 1.2 * median
    numbers: dict[str, Any] = {
        "n": len(samples.ours), "median_us": median, "p20_us": stats.quantile(samples.ours, 0.2),
        "p80_us": stats.quantile(samples.ours, 0.8), "p95_us": stats.quantile(samples.ours, 0.95),
        "min_us": min(samples.ours), "ci95_us": stats.median_ci(samples.ours),
        "outliers": stats.outliers(samples.ours), "wall_us": wall, "first_call_ms": first_ms,
        "launch_bound": bound if clock.device_time else None, "stop": samples.stop,
        "batches": samples.batches, "gap_batches": samples.gap_batches,
    }  # fmt: skip
    if base:
        ratios = [theirs / mine for mine, theirs in walls]
        numbers |= {
            "baseline": base.name, "order": "ABBA", "pairs": len(samples.ratios),
            "base_median_us": centre, "base_ci95_us": stats.median_ci(samples.base),
            "base_wall_us": base_wall[0], "wall_speedup": statistics.median(ratios),
            "wall_speedup_ci95": stats.bootstrap_ci(ratios),
        }  # fmt: skip
        if min(median, centre) >= RATIO_FLOOR_US and len(samples.ratios) >= stats.MIN_CI_N:
            numbers["speedup"] = statistics.median(samples.ratios)
            numbers["speedup_ci95"] = stats.bootstrap_ci(samples.ratios)
    row = replace(
        row, status="UNSTABLE" if reasons else "VALID", why=tuple(reasons), parity=_proof(parity),
        path_taken=ours.path, bytes=case.bytes_needed, flops=case.flops, **state, **numbers,
        **_throughput(case, median, ceiling),
    )  # fmt: skip
    return row, samples
