"""All of NSA beside the fastest other public NSA and dense attention, on the same tensors.

    git clone https://github.com/mdy666/Scalable-Flash-Native-Sparse-Attention peers/sfnsa
    python bench/bench_peers.py --sfnsa peers/sfnsa --S_list 4096,8192,16384 --csv peers.csv

A row for every length, direction and contender: NSA and that contender take turns (ABBA), `speedup`
is its time over NSA's. Both must be right, on sampled queries (`compared`) against fp64: NSA before
and after the timing, a contender before it, each with its own gates and blocks, and with a backward
the gradients of keys, values and gates as well. `choice` is the worst of these queries: the scores
of the blocks that the contender chose over those of the best. peak_mib and base_peak_mib are what
one call of either allocates on top of its inputs. Sizes default to the paper's, in bf16. Nothing of
a peer is in this repository; what its import needs (sfnsa: pkg_resources) must be installed.

Exit code: 0 timed, 1 a result is wrong, 2 usage, 3 nothing could be run.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
from torch import Tensor

from bench import peer_sfnsa
from bench.bench_prefill import Passes, attention_case, check_key_gradients, judged
from bench.main import bench_parser, card_tools, names, parsed, time_cases
from bench.peer_sfnsa import Sfnsa
from bench.prefill_inputs import Prefill
from bench.provenance import COLUMNS as PROVENANCE
from bench.provenance import described
from bench.records import BenchRow, note
from bench.roofline import Shape
from bench.timing import Budget, Case, Contender, Unbuilt
from nsa.kernels import fa2

DIRECTIONS = ("fwd", "fwd+bwd")
SIZES = ("HQ", "G", "D", "Dv", "l", "d", "l_sel", "n_sel", "w")
COLUMNS = (
    "against", "direction", "S", *SIZES, "dtype", "ms", "ms_low", "ms_high", "baseline", "base_ms",
    "speedup", "ci_low", "ci_high", "path", "parity", "compared", "mae", "max_abs", "choice",
    "base_peak_frac", "base_ran", "wall_ms", "base_wall_ms", "peak_mib", "base_peak_mib",
    "n", "status", "why", "sm_mhz",
    "power_w", "peer_commit", *PROVENANCE,
)  # fmt: skip


def peer_contender(peer: Sfnsa, direction: str) -> Contender:
    """Raises AssertionError when a gradient of the peer's is wrong."""
    x, forward = peer.x, direction == "fwd"
    passes = Passes(direction, x.refill, {peer.name: (peer.forward, peer.leaves())}, x.do)
    if not forward:
        state = {"out": peer.forward(), "leaves": peer.leaves()}
        check_key_gradients(x, "full", state, peer.name, (), peer.gradients)
    truth = peer.exact if forward else lambda dtype: peer.gradients(dtype)[0]
    return judged(peer.name, passes.call(peer.name), peer.name, x, truth)


class Match:
    """NSA against one contender at one length: dense attention, or the peer in `package`.

    case() makes the inputs, so that too little memory for them is a row as well; make(shape) and
    window are what it makes them with and what the peer has for its window.
    """

    def __init__(
        self, shape: Shape, direction: str, columns: dict[str, Any],
        package: ModuleType | None = None, make: Callable[[Shape], Prefill] = Prefill,
        window: Callable[..., Tensor] = fa2.sliding_fa2,
    ) -> None:  # fmt: skip
        self.shape, self.direction, self.columns = shape, direction, columns
        self.package, self.make, self.window = package, make, window
        self.peer: Sfnsa | None = None
        self.made: Case | None = None

    def case(self) -> Case:
        x = self.make(self.shape)
        x.refill(0)
        rivals, inputs = None, x.inputs
        if self.package is not None:
            peer = self.peer = Sfnsa(self.package, x, self.window)
            peer.refill()
            rivals = [peer_contender(peer, self.direction)]
            inputs = lambda: [*x.inputs(), *peer.inputs()]
        nsa = attention_case(x, "full", self.direction, self.columns, rivals)
        if not nsa.baselines:
            raise RuntimeError("no SDPA backend takes this shape")

        def refill(seed: int) -> None:
            nsa.refill(seed)
            if self.peer is not None:
                self.peer.refill()

        name = f"peers/{self.direction}/S={self.shape.S}"
        self.made = replace(nsa, bench="peers", name=name, refill=refill, inputs=inputs)
        return self.made

    def more(self, row: BenchRow) -> dict[str, Any]:
        """MiB that one call of either allocates on top of what there was, and the peer's choice."""
        if row.median_us is None:
            return {}
        rival = next(c for c in self.made.baselines if c.name == row.baseline)
        found: dict[str, Any] = {"choice": self.peer.choice() if self.peer else None}
        for name, one in (("peak_mib", self.made.candidate), ("base_peak_mib", rival)):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            one.call()
            torch.cuda.synchronize()
            found[name] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
        return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    default = Shape(1)
    parser = bench_parser(
        __doc__, lengths=[4096, 8192, 16384, 32768, 65536], device_s=1.0, shrinks=False,
        sizes={name: getattr(default, name) for name in SIZES},
    )  # fmt: skip
    parser.add_argument("--sfnsa", type=Path, metavar="FOLDER", help="checkout of sfnsa")
    parser.add_argument("--directions", type=names(*DIRECTIONS), default=DIRECTIONS,
                        help=f"from {', '.join(DIRECTIONS)}")  # fmt: skip
    parser.add_argument("--no_dense", action="store_true", help="leave dense attention out")
    args = parsed(parser, argv)
    if args.sfnsa is None and args.no_dense:
        parser.error("--sfnsa must name a checkout when --no_dense leaves nothing else")
    if args.sfnsa is not None and not (args.sfnsa / peer_sfnsa.PACKAGE / "__init__.py").is_file():
        parser.error(f"--sfnsa must be a folder with {peer_sfnsa.PACKAGE}/, got {args.sfnsa}")
    return args


def cases(
    args: argparse.Namespace, package: ModuleType | None, about: dict[str, Any]
) -> Iterator[Unbuilt]:
    """Each length and direction against the peer in `package` and against dense attention."""
    sizes = {name: getattr(args, name) for name in SIZES}
    rivals: list[tuple[str, ModuleType | None, str | None]] = []
    if package is not None:
        rivals.append(("sfnsa", package, described(args.sfnsa)))
    if not args.no_dense:
        rivals.append(("dense", None, None))
    for S, direction, rival in itertools.product(args.S_list, args.directions, rivals):
        against, found, commit = rival
        columns = {
            "S": S, **sizes, "dtype": "bf16", **about, "direction": direction, "against": against,
            "peer_commit": commit,
        }  # fmt: skip
        match = Match(Shape(S, **sizes), direction, columns, found)
        yield Unbuilt("peers", f"peers/{direction}/S={S}", match.case, columns, match.more)
        del match
        torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    package = None
    if args.sfnsa is not None and torch.cuda.is_available():
        try:
            package = peer_sfnsa.load(args.sfnsa)
        except Exception as error:  # whatever another project's import raises
            note(f"sfnsa cannot be imported: {type(error).__name__}: {error}", "warn")
            return 3
    tools = card_tools(Budget(device_s=args.seconds, min_n=20, warm_s=0.05, warm_cap_s=1.0))
    return time_cases(args, tools, COLUMNS, partial(cases, args, package))


if __name__ == "__main__":
    raise SystemExit(main())
