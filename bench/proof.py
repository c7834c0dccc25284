"""Proof that timed calls did their work: new inputs for each, launches counted, outputs judged.

A kernel can be right when it is checked and do nothing when it is timed. So every timed call gets
numbers that no call before it saw, and leaves a mark of its result; all marks must be finite and
different. The kernels launched must be those of one call times the calls. The outputs of samples
that are drawn at random, and that nothing announces, are held against the fp64 oracle.
"""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench import spent
from bench.cases import Case, Contender
from bench.clock import Clock, prepare
from bench.parity import Parity, measure_parity, never_launched
from nsa import launches

MARKED = 1 << 16  # elements of a result that its mark is of
WITHIN = 6  # batches, of which the judged ones are drawn
QUEUE = 900  # of the 1024 launches that a stream takes before the host waits for it
AROUND = 16  # launches and events around a timed call: its new inputs, the flush, its mark
REWARM_US = 5000.0  # of calls that are not counted, after the device waited for a judgement


class NotRight(Exception):
    """The candidate's result, path or inputs are wrong; `parity` says how."""

    def __init__(self, parity: Parity, when: str) -> None:
        super().__init__(f"{when}: " + "; ".join(parity.why))
        self.parity = parity


class NotProven(Exception):
    """A time that nothing may be claimed by: the call did not do its work, or the clock lied."""


def poison(like: Any, copies: int = 3) -> None:
    """Leave NaN in freed memory of this tensor's size, or of each one's of several, so that an
    output nobody wrote shows."""
    for x in like if isinstance(like, (tuple, list)) else [like]:
        if isinstance(x, Tensor) and x.is_floating_point():
            spoiled = [torch.full_like(x, float("nan")) for _ in range(copies)]
            del spoiled


def fingerprint(tensors: Sequence[Tensor]) -> list[int]:
    """A check sum per tensor, exact in its bits."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [int(t.detach().view(whole[t.element_size()]).sum(dtype=torch.int64)) for t in tensors]


class Marks:
    """A number of each result that calls left: all finite, none like an earlier one's.

    Leaving one waits for nothing; check() does.
    """

    def __init__(self) -> None:
        self.seen: dict[float, None] = {}  # in order
        self._left: list[Tensor] = []
        self._weights: Tensor | None = None

    @torch.no_grad()
    def leave(self, result: Tensor) -> None:
        part = result.detach().flatten()
        part = part[:: part.numel() // MARKED | 1].double()  # a stride that is no size's multiple
        if self._weights is None:
            gen = torch.Generator(part.device).manual_seed(0)
            self._weights = torch.empty_like(part).normal_(generator=gen)
        self._left.append(part @ self._weights)

    def check(self, whose: str) -> None:
        """Raises NotProven where a call of `whose` left nothing, or what an earlier one left."""
        marks = torch.stack(self._left).tolist() if self._left else []
        self._left = []
        for mark in marks:
            if not math.isfinite(mark):
                raise NotProven(f"{whose}: a timed call left no finite result")
            if mark in self.seen:
                what = "returned what an earlier one had returned on other inputs"
                raise NotProven(f"{whose}: a timed call {what}")
            self.seen[mark] = None


def judge(case: Case, contender: Contender, out: Any, seen: Mapping[str, int]) -> Parity:
    """The parity of a result `out` for the present inputs; seen: the launches of its call."""
    ran = not never_launched(contender.kernels, seen)
    asked = case.requested if contender is case.candidate and case.requested else contender.path
    own = contender if contender.oracle else case
    parity = measure_parity(
        case.name, case.bench, case.view(out), own.oracle(), own.same_dtype and own.same_dtype(),
        path_requested=asked, path_taken=contender.path if ran else None, launches=seen,
        expect_kernels=contender.kernels, seed=case.seed,
    )  # fmt: skip
    foreign = [k for k in case.foreign if contender is case.candidate and seen.get(k)]
    if foreign:
        why = [*parity.why, f"launched what is no part of it: {', '.join(foreign)}"]
        parity = replace(parity, status="INVALID", why=why)
    return parity


def prove(case: Case, contender: Contender, seed: int, when: str) -> tuple[Parity, float]:
    """One checked call on fresh inputs. Returns the parity and the call's wall time in ms.

    Raises NotRight for a wrong result, a kernel that never ran or inputs that were written to.
    """
    case.refill(seed)
    inputs = case.inputs()
    before = fingerprint(inputs)
    with torch.no_grad():
        poison(inputs[0])
    prepare(contender.call)
    begin = time.perf_counter()
    with launches.recording() as seen:
        out = contender.call()
        if inputs[0].is_cuda:
            torch.cuda.synchronize(inputs[0].device)
    first_ms = (time.perf_counter() - begin) * 1e3
    parity = judge(case, contender, out, seen)
    _unchanged(case, before, parity, when)
    return parity, first_ms


def _unchanged(case: Case, before: list[int], parity: Parity, when: str) -> None:
    """Raises NotRight unless `parity` passed and the inputs are what they were."""
    if fingerprint(case.inputs()) != before:
        parity = replace(parity, status="FAIL", why=[*parity.why, "the inputs were written to"])
    if parity.status != "PASS":
        raise NotRight(parity, when)


class Turns:
    """A contender's calls as they are timed.

    `call` is what a clock gets. Outside of its time it renews the inputs before the contender runs,
    so that nothing kept under a tensor's version, address or numbers is of use, and marks the
    result after it.
    """

    def __init__(self, case: Case, contender: Contender, draw: random.Random) -> None:
        self.case, self.contender, self.draw = case, contender, draw
        self.out: Any = None
        self.made = 0
        self.per_call, self.counted, self.by_itself = (Counter[str]() for _ in range(3))
        self.call = self._call(self._seed, self._mark)
        self.marks = Marks()

    def _call(self, seed: Callable[[], int], after: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            self.out = self.contender.call()

        call.before = lambda: self._renew(seed())  # type: ignore[attr-defined]
        call.after = after  # type: ignore[attr-defined]
        return call

    def _seed(self) -> int:
        return self.draw.getrandbits(62)  # none comes twice

    def with_seed(self, seed: int) -> Callable[[], None]:
        """A call as the others are, on numbers that are known ahead. It leaves no mark: a clock may
        make its batch twice."""
        return self._call(lambda: seed, self._count)

    def _count(self) -> None:
        self.made += 1

    def _renew(self, seed: int) -> None:
        (self.case.renew or self.case.refill)(seed)
        for x in self.case.inputs():
            if not x.requires_grad:  # a backward refuses what was saved in another version
                torch.autograd.graph.increment_version(x)
        prepare(self.contender.call)

    @torch.no_grad()
    def _mark(self) -> None:
        self._count()
        if self.case.distinct:
            self.marks.leave(self.case.view(self.out))
        if self.contender is not self.case.candidate:
            self.out = None  # as a program drops it

    def settle(self) -> None:
        """Two calls, which say what a call launches: by the recording, with its inputs, and by
        what launchers count, with its inputs and by itself."""
        before = launches.counts()
        with launches.recording() as seen:
            prepare(self.call)
            self.call()
            self._mark()
        self.per_call = Counter(seen)
        self.counted = added_since(before)
        before = launches.counts()
        prepare(self.contender.call)
        self.contender.call()
        self.by_itself = added_since(before)

    def check_by_itself(self, before: Mapping[str, int], calls: int) -> None:
        """Raises NotProven unless that many calls, on the inputs as they are, made their launches
        since launchers had counted `before`."""
        wanted = Counter({kernel: calls * n for kernel, n in self.by_itself.items()})
        check_launches(added_since(before), wanted, f"{calls} calls back to back")


def added_since(before: Mapping[str, int]) -> Counter[str]:
    """What launchers counted since they had counted `before`."""
    return Counter(launches.counts()) - Counter(before)


def check_launches(seen: Mapping[str, int], wanted: Mapping[str, int], calls: str) -> None:
    """Raises NotProven unless `calls`, in words, launched what they take."""
    for kernel in sorted({*wanted, *seen}):
        got, due = seen.get(kernel, 0), wanted.get(kernel, 0)
        if got != due:
            raise NotProven(f"{kernel} was launched {got} times in {calls} that take {due}")


def held(clock: Clock, calls: list[Any], cold: bool) -> tuple[list[float], float]:
    """clock.run(calls), and the microseconds of another counter of the host from end to end."""
    start = clock.host_us()
    times = clock.run(calls, cold=cold)
    elapsed = clock.host_us() - start
    if min(times) <= 0:
        raise NotProven(f"the clock says {min(times):g} us of a call")
    return times, elapsed


def calls_at_once(clock: Clock, turns: Sequence[Turns]) -> int:
    """Calls of a batch that the host can enqueue while the device is held: with its queue full it
    would wait, and the times would hold gaps."""
    if not clock.device_time:
        return 64
    longest = max(sum(x.by_itself.values()) for x in turns)
    return max(4, min(64, QUEUE // (longest + AROUND)))


class SpotChecks:
    """Runs the timed batches of a case and judges some of them.

    Two samples of the candidate, of which one is an even and one an odd call, and one of the
    baseline; their batches are drawn from the first WITHIN. Nothing tells a kernel which they are.
    In every second of these batches Triton itself reports the launches; that takes another way
    through the host than a user's call, so that everywhere else the launchers' counts have to do.
    """

    def __init__(self, case: Case, ours: Turns, base: Turns | None, draw: random.Random) -> None:
        self.case, self.ours, self.base, self.draw = case, ours, base, draw
        self.turns = [ours] if base is None else [ours, base]
        self.at_once = 64  # calls of a batch
        whom = [ours, ours] + [base] * (base is not None)
        batches = sorted(draw.sample(range(1, WITHIN + 1), len(whom)))
        self._due = list(zip(batches, draw.sample(whom, len(whom)), strict=True))
        self._parity: int | None = None
        self._recorded = draw.random() < 0.5
        self._waited = False
        self.parity: Parity | None = None  # of the candidate's last judged sample
        self.judged = 0

    def pending(self, batch: int) -> Turns | None:
        """Whose sample is to be judged in this batch, or, once sampling would end, in some."""
        return self._due[0][1] if self._due and self._due[0][0] <= batch else None

    def run(
        self, clock: Clock, group: list[Any], repeats: int, cold: bool, call_us: float,
        whose: Turns | None,
    ) -> tuple[list[float], int, float]:  # fmt: skip
        """Times of `repeats` groups, of how many calls ahead of them that are not counted, and what
        another counter of the host says of all together."""
        lead: list[Any] = []
        if self._waited:
            ahead = max(1, min(self.at_once // 2, int(REWARM_US / max(call_us, 1.0))))
            lead = (group * 16)[-ahead:]
            repeats = max(1, min(repeats, (self.at_once - ahead) // len(group)))
        self._waited = False
        calls = lead + group * repeats
        if whose is None:
            times, elapsed = self._counted(clock, calls, cold, recorded=False)
            return times, len(lead), elapsed
        if whose is self.ours:
            number = self.ours.made + sum(call is self.ours.call for call in calls)
            if self._parity is not None and number % 2 == self._parity:
                lead, number = [self.ours.call, *lead], number + 1
                calls = [self.ours.call, *calls]
            self._parity = number % 2
        seed, last = self.draw.getrandbits(62), self.draw.getrandbits(62)
        with spent.on("proof"):
            self.case.refill(seed)
            (self.case.renew or self.case.refill)(last)
            before = fingerprint(self.case.inputs())
            poison(whose.out)  # all of it, not the part that is compared
        whose.out = None
        calls[-1] = whose.with_seed(last)
        times, elapsed = self._counted(clock, calls, cold, self._recorded)
        self._recorded = not self._recorded
        with spent.on("proof"):
            parity = judge(self.case, whose.contender, whose.out, whose.per_call)
        self._due.pop(0)
        self._waited, self.judged = True, self.judged + 1
        what = "baseline " * (whose is self.base) + whose.contender.name
        _unchanged(self.case, before, parity, f"{what}, a timed call drawn at random")
        if whose is self.ours:
            self.parity = parity
        return times, len(lead), elapsed

    def _counted(
        self, clock: Clock, calls: list[Any], cold: bool, recorded: bool
    ) -> tuple[list[float], float]:
        """clock.run(calls), after which launches and marks are what they must be."""
        made, before = [turns.made for turns in self.turns], launches.counts()
        with launches.recording() if recorded else nullcontext({}) as seen:
            times, elapsed = held(clock, calls, cold)
        wanted, counted = Counter[str](), Counter[str]()
        for turns, n in zip(self.turns, made, strict=True):
            for into, per_call in ((wanted, turns.per_call), (counted, turns.counted)):
                into.update({kernel: k * (turns.made - n) for kernel, k in per_call.items()})
        words = f"{len(calls)} timed calls"
        check_launches(added_since(before), counted, words)
        if recorded:
            check_launches(seen, wanted, words)
        for turns in self.turns:
            turns.marks.check(turns.contender.name)
        return times, elapsed
