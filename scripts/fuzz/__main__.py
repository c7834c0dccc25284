"""Search for calls of the public functions whose result is wrong, with hypothesis.

    python -m scripts.fuzz --seconds 600 --seed 0 --device cuda
    TRITON_INTERPRET=1 python -m scripts.fuzz --examples 20 --routes triton
    python -m scripts.fuzz --case '{"operation": "sliding", ...}'        # what a fault printed

Shapes, packs, layouts in memory, outliers, values that are not finite and dtypes are drawn, forward
and backward, and held against fp64 (judge.py). A fault is made smaller before it is printed.
Exit code: 0 nothing was found, 1 something was, 2 usage, 3 hypothesis or the device is missing.
"""

import argparse
import dataclasses
import importlib.util
import math
import shlex
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.records import amount, doc_parser, emit, file_target, note, positive
from nsa.dispatch import RouteUnavailable, interpreting
from nsa.errors import must_raise
from scripts.fuzz.cases import KEYS, LAYOUTS, ODD, OPERATIONS, VALUES, Case, Geometry
from scripts.fuzz.check import check

ROUND = 25  # examples of one operation before the next one's turn
SHRINK_S = 60  # the longest that a fault is made smaller
MOST_FAULTS = 5
SCORES = 1 << 26  # of a sequence, which fp64 holds several times: 0.5 GB each

# G, h, Dk, Dv, l, d, l_sel, n_sel, w
SMALL = (
    Geometry(1, 2, 16, 16, 8, 4, 16, 4, 11),
    Geometry(2, 1, 8, 16, 4, 4, 16, 3, 5, n_local=1),
    Geometry(2, 4, 24, 8, 8, 2, 32, 4, 16, n_init=0, n_local=3),
)
FREE = (Geometry(3, 2, 6, 5, 6, 3, 12, 3, 1), Geometry(1, 3, 32, 8, 4, 1, 4, 5, 40, n_init=2))
# A GPU's kernels are compiled for each of these: a run takes COMPILED of them, from its seed on.
LARGE = (
    (Geometry(1, 16, 128, 128, 32, 16, 64, 16, 512), "bf16"),
    (Geometry(2, 4, 64, 64, 32, 16, 64, 8, 128), "fp16"),
    (Geometry(2, 16, 192, 128, 32, 16, 64, 16, 512), "bf16"),
    (Geometry(1, 8, 128, 128, 32, 16, 64, 16, 512), "fp16"),
    (Geometry(2, 1, 64, 32, 16, 8, 32, 6, 100, n_init=2, n_local=3), "bf16"),
    (Geometry(1, 12, 96, 96, 32, 16, 128, 8, 256), "fp16"),
)
COMPILED = 3


@dataclasses.dataclass(frozen=True)
class Space:
    """The range of cases that are drawn on a device: pairs of geometry and dtype by route; the
    largest numbers of queries in a sequence, of keys before them and of sequences in a pack."""

    routes: dict[str, tuple[tuple[Geometry, str], ...]]
    queries: int
    keys: int
    sequences: int

    @classmethod
    def of(cls, device: str, routes: list[str] | None, seed: int = 0) -> "Space":
        """Return the space of a device, or of some of its routes. Raises ValueError for others."""
        every = tuple((g, dtype) for g in (*SMALL, *FREE) for dtype in ("fp32", "bf16", "fp16"))
        if device == "cuda":
            large = tuple(LARGE[(seed + i) % len(LARGE)] for i in range(COMPILED))
            known = {"triton": large, "fa2": large, "sdpa": every + large,
                     "reference": every + large}  # fmt: skip
            space = cls(known, 2500, 9000, 60)
        else:
            known = {"reference": every, "sdpa": every}
            space = cls(known, 70, 90, 40)
            if interpreting():  # where a program takes milliseconds, and products in bf16 are wrong
                known["triton"] = tuple((g, "fp16") for g in SMALL)
                space = cls(known, 24, 60, 5)
        unknown = set(routes or ()) - set(known)
        if unknown:
            raise ValueError(f"--routes must be of {', '.join(known)} here, got {unknown.pop()}")
        if routes:
            return dataclasses.replace(space, routes={r: known[r] for r in routes})
        if device == "cuda":
            from nsa.kernels import fa2

            if fa2.probe().why_not:
                del known["fa2"]
        return space


def routes_of(operation: str, space: Space) -> list[str]:
    """Return the routes of an operation, Triton three times: so often it shall be drawn."""
    of_fa2 = operation in ("compressed", "sliding")
    return [r for r in space.routes if r != "fa2" or of_fa2 for _ in range(1 + 2 * (r == "triton"))]


def cases(operation: str, space: Space) -> Any:
    """Return a hypothesis strategy of cases of one operation."""
    from hypothesis import strategies as st

    names = routes_of(operation, space)

    @st.composite
    def drawn(draw: Callable[[Any], Any]) -> Case:
        route = draw(st.sampled_from(names))
        geometry, dtype = draw(st.sampled_from(space.routes[route]))
        heads = geometry.G * geometry.h
        most = min(space.queries, math.isqrt(SCORES // heads))
        length, short = st.integers(0, most), st.integers(0, min(40, most))
        case: dict[str, Any] = {}
        if operation == "decode":
            lengths = tuple(draw(st.lists(length, min_size=1, max_size=3)))
            step = st.integers(1, 5) | st.integers(-3, -1)
            case["steps"] = tuple(draw(st.lists(step, min_size=1, max_size=6)))
        elif draw(st.booleans()):
            case["packed"] = True
            some = st.lists(short, min_size=1, max_size=space.sequences)
            lengths = tuple(draw(st.lists(length, min_size=1, max_size=3) | some))
        else:
            lengths = (draw(st.integers(1, most)),) * draw(st.integers(1, 3))
            keys = SCORES // (heads * max(1, lengths[0])) - lengths[0]
            case["q_start"] = draw(st.integers(0, min(space.keys, keys)))
        case["grad"] = draw(st.booleans())
        case["spare"] = draw(st.sampled_from([0, 1, 5, space.keys]))
        case["scale"] = draw(st.sampled_from([None, 0.02, 1.0]))
        tensors = ["q", "grad", "gates", *(f"{x}_{kind}" for x in "kv" for kind in KEYS[operation])]
        case["layouts"] = draw(
            st.dictionaries(st.sampled_from(tensors), st.sampled_from(LAYOUTS[1:]), max_size=3)
        )
        if operation != "decode":
            case["values"] = draw(st.sampled_from(VALUES))
            odd = [n for n in tensors if n != "grad" and (n != "gates" or operation == "attention")]
            if operation == "choice":
                odd.remove("v_cmp")
            # In most of the cases, which have fewer gradients to look at.
            if value := draw(st.sampled_from(["", "", "", *ODD])):
                case["odd"] = draw(st.sampled_from(odd)), draw(st.integers(0, 999)), value
            if draw(st.integers(0, 3)) == 3:
                case["only"] = draw(st.sampled_from(["q", *odd]))
            if case["values"] in ("large", "small"):  # whose gradients do not fit the dtype
                case["grad"] = False
        return Case(operation, route, dtype, geometry, lengths, seed=draw(st.integers(0, 99)),
                    **case)  # fmt: skip

    return drawn()


class Enough(BaseException):
    """Ends a round: a fault was made smaller for long enough, or broke the device."""


class Fault(NamedTuple):
    """The smallest case that went wrong in a round, and how."""

    case: Case
    error: BaseException
    device: str

    def told(self) -> str:
        kind = type(self.error).__name__
        where = "" if kind == "Wrong" else "".join(traceback.format_exception(self.error)[-4:-1])
        command = f"python -m scripts.fuzz --device {self.device} --case "
        command += shlex.quote(self.case.to_json())
        if interpreting():
            command = f"TRITON_INTERPRET=1 {command}"
        return f"{where}{kind}: {self.error}\n  again by: {command}"


def _shared() -> bool:
    """Whether others have a quarter of the card's memory: what is lacking says nothing then."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() > total // 4


class Run:
    """Runs rounds of examples until the time is over, and counts what came of them."""

    def __init__(
        self, device: str, space: Space, until: float | None, last: Path | None = None
    ) -> None:
        self.device, self.space, self.until, self.last = device, space, until, last
        self.examples: Counter[tuple[str, str]] = Counter()
        self.refused: Counter[str] = Counter()
        self.worst: dict[tuple[str, str], float] = {}
        self.faults: list[Fault] = []
        self.broken = False  # an error after which the device is of no use
        self._fault: Fault | None = None
        self._since = 0.0

    def late(self) -> bool:
        return self.until is not None and time.monotonic() >= self.until

    def over(self) -> bool:
        return self.broken or self.late() or len(self.faults) >= MOST_FAULTS

    def one(self, case: Case) -> None:
        """Check a case. Raises what is wrong with it, or Enough."""
        if self._fault is None and self.late():
            return
        if self._fault is not None and time.monotonic() > self._since + SHRINK_S:
            raise Enough
        if self.last is not None:
            self.last.write_text(case.to_json() + "\n")
        try:
            share = check(case, self.device)
            if self.device == "cuda":
                torch.cuda.synchronize()
        except RouteUnavailable as error:
            self.refused[f"{case.operation} on {error}"] += 1
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) and _shared():
                torch.cuda.empty_cache()
                self.refused["memory that others on this card have"] += 1
                return
            if self._fault is None:
                self._since = time.monotonic()
            self._fault = Fault(case, error, self.device)
            if must_raise(error):
                self.broken = True
                raise Enough from error
            raise
        else:
            key = case.operation, case.route
            self.examples[key] += 1
            self.worst[key] = max(share, self.worst.get(key, 0.0))

    def round(self, operation: str, seed: int, examples: int) -> None:
        """Draw so many cases of an operation; a fault among them is kept and printed."""
        import hypothesis

        if not routes_of(operation, self.space):
            return
        body = hypothesis.given(cases(operation, self.space))(lambda case: self.one(case))
        body = hypothesis.settings(
            max_examples=examples, deadline=None, database=None, report_multiple_bugs=False,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            suppress_health_check=list(hypothesis.HealthCheck),
            verbosity=hypothesis.Verbosity.quiet,
        )(hypothesis.seed(seed)(body))  # fmt: skip
        self._fault = None
        try:
            body()
        except Enough:
            pass
        except Exception:
            if self._fault is None:  # of the fuzzer's own making
                raise
        if self._fault is not None:
            self.faults.append(self._fault)
            print(f"FAULT {len(self.faults)}: {self._fault.told()}", flush=True)


def fuzz(
    device: str, space: Space, operations: list[str], seed: int, seconds: float | None,
    examples: int, last: Path | None = None,
) -> Run:  # fmt: skip
    """Run rounds of the operations in turn, until `seconds` are over or each had so many examples.
    last: where a case is written before it runs."""
    run = Run(device, space, None if seconds is None else time.monotonic() + seconds, last)
    done = 0
    while not run.over() and (seconds is not None or done < examples):
        some = ROUND if seconds is not None else min(ROUND, examples - done)
        for i, operation in enumerate(operations):
            if not run.over():
                run.round(operation, seed * 1_000_003 + done * len(OPERATIONS) + i, some)
        done += some
    return run


def report(run: Run, operations: list[str], seed: int, took: float) -> int:
    """Print what was tried, send a test row for each operation, and return the exit code."""
    for (operation, route), count in sorted(run.examples.items()):
        worst = f"largest share of what a row may be off: {run.worst[operation, route]:.2f}"
        print(f"  {operation:10} {route:9} {count:6} examples; {worst}")
    for text, count in run.refused.most_common():
        print(f"  refused {count} times: {text}")
    total = sum(run.examples.values())
    for operation in operations:
        faults = [f for f in run.faults if f.case.operation == operation]
        ran = sum(n for (name, _), n in run.examples.items() if name == operation)
        outcome = "failed" if faults else "passed" if ran else "skipped"
        reason = faults[0].told() if faults else "" if ran else "no example ran"
        emit("test", {
            "nodeid": f"scripts/fuzz::{operation}", "outcome": outcome, "reason": reason,
            "duration_s": round(took * ran / max(1, total), 2),
        })  # fmt: skip
    emit("metric", {"name": "fuzz/examples", "value": total, "unit": "1"})
    emit("metric", {"name": "fuzz/seed", "value": seed, "unit": "1"})
    what = f"seed {seed}, {total} examples, {took:.0f} s, on {run.device}"
    print(f"{len(run.faults)} faults: {what}" if run.faults else f"nothing found: {what}")
    return 1 if run.faults else 0 if total else 3


def _case(text: str) -> Case:
    try:
        return Case.from_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"wants a case as a fault is told by, {error}") from None


def main(argv: list[str] | None = None) -> int:
    parser = doc_parser(__doc__)
    split = lambda text: [x for x in text.split(",") if x] or [text]
    parser.add_argument("--seconds", type=amount, help="for how long; otherwise --examples decides")
    parser.add_argument("--examples", type=positive, default=100, help="of each operation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--operations", type=split, default=list(OPERATIONS))
    parser.add_argument("--routes", type=split, help="all that the device has")
    parser.add_argument("--last", type=file_target, metavar="FILE",
                        help="where the running case stands, for a crash")  # fmt: skip
    parser.add_argument("--case", type=_case, help="run this one and no other")
    args = parser.parse_args(argv)
    if unknown := set(args.operations) - set(OPERATIONS):
        parser.error(f"--operations must be of {', '.join(OPERATIONS)}, got {unknown.pop()}")
    if args.device == "cuda" and not torch.cuda.is_available():
        note("torch sees no CUDA device", "warn")
        return 3
    if args.case is not None:
        try:
            share = check(args.case, args.device)
        except Exception as error:
            print(Fault(args.case, error, args.device).told())
            return 1
        print(f"right; the worst row is off by {share:.2f} of what it may be")
        return 0
    if importlib.util.find_spec("hypothesis") is None:
        note("fuzzing needs hypothesis, which is not installed: pip install hypothesis", "warn")
        return 3
    try:
        space = Space.of(args.device, args.routes, args.seed)
    except ValueError as error:
        parser.error(str(error))
    emit("session", {"tests": len(args.operations), "ended": False})
    print(f"seed {args.seed}, routes {', '.join(space.routes)}, on {args.device}", flush=True)
    begin = time.monotonic()
    run = fuzz(
        args.device, space, args.operations, args.seed, args.seconds, args.examples, args.last
    )
    code = report(run, args.operations, args.seed, time.monotonic() - begin)
    emit("session", {"tests": len(args.operations), "ended": True})
    return code


if __name__ == "__main__":
    sys.exit(main())
