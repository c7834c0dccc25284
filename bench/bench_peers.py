"""All of NSA beside the fastest other public NSA and dense attention, on the same tensors; and its
selection alone beside vLLM's and cuDNN's.

    git clone https://github.com/mdy666/Scalable-Flash-Native-Sparse-Attention peers/sfnsa
    python bench/bench_peers.py --sfnsa peers/sfnsa --S_list 4096,8192,16384 --csv peers.csv
    VLLM_MINIMAX_SPARSE_PREFILL_TILE_Q=4 python bench/bench_peers.py --selection vllm,cudnn \
        --no_dense --l_sel 128 --sharing random,shared --directions fwd

A row for every length, direction and contender: NSA and that contender take turns (ABBA), `speedup`
is its time over NSA's. Both must be right, on sampled queries (`compared`) against fp64: NSA before
and after the timing, a contender before it, each with its own gates and blocks, and with a backward
the gradients of keys, values and gates as well. `choice` is the worst of these queries: the scores
of the blocks that the contender chose over those of the best. peak_mib and base_peak_mib are what
one call of either allocates on top of its inputs. Sizes default to the paper's, in bf16. sharing
and distinct_of_4 are those of bench_prefill.py. Selection alone (op sel, forward) is by the blocks
that NSA chose; cuDNN's reads a query's own block whole and is held against fp64 that does as well.
Nothing of a peer is in this repository; it and what its import needs (sfnsa: pkg_resources) must be
installed. peer_commit is its commit, or the version that is installed.

Exit code: 0 timed, 1 a result is wrong, 2 usage, 3 nothing could be run.
"""

import itertools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch

from bench import peer_selection, peer_sfnsa
from bench.bench_prefill import Passes, attention_case, case_name, check_key_gradients
from bench.cases import truths
from bench.main import bench_parser, card_tools, parsed, time_cases
from bench.peer_selection import SelectionPeer
from bench.peer_sfnsa import Sfnsa
from bench.prefill_inputs import SHARING, Prefill
from bench.provenance import COLUMNS as PROVENANCE
from bench.provenance import described
from bench.records import BenchRow, note
from bench.roofline import Shape
from bench.timing import Budget, Case, Contender, Unbuilt

DIRECTIONS = ("fwd", "fwd+bwd")
SIZES = ("HQ", "G", "D", "Dv", "l", "d", "l_sel", "n_sel", "w")
COLUMNS = (
    "against", "op", "direction", "S", *SIZES, "dtype", "sharing", "distinct_of_4", "ms", "ms_low",
    "ms_high", "baseline", "base_ms", "speedup", "ci_low", "ci_high", "path", "parity",
    "compared", "mae", "max_abs", "choice", "base_peak_frac", "base_ran", "wall_ms",
    "base_wall_ms", "peak_mib", "base_peak_mib", "n", "status", "why", "sm_mhz", "power_w",
    "peer_commit", *PROVENANCE,
)  # fmt: skip


Peer = Sfnsa | SelectionPeer


class Rival(NamedTuple):
    """Who NSA's op is timed against: what makes a peer on the inputs, None for dense attention, and
    the peer's commit or version."""

    against: str
    op: str = "full"
    make: Callable[[Prefill], Peer] | None = None
    commit: str | None = None


def peer_contender(peer: Peer, direction: str) -> Contender:
    """Raises AssertionError when a gradient of the peer's is wrong."""
    x, forward = peer.x, direction == "fwd"
    passes = Passes(direction, x.refill, {peer.name: (peer.forward, peer.leaves())}, x.do)
    if not forward:
        state = {"out": peer.forward(), "leaves": peer.leaves()}
        check_key_gradients(x, "full", state, peer.name, (), peer.gradients)
    truth = peer.exact if forward else lambda dtype: peer.gradients(dtype)[0]
    return Contender(peer.name, passes.call(peer.name), peer.name, **truths(truth, x.q.dtype))


class Match:
    """NSA against one contender at one length.

    case() makes the inputs with make(), so that too little memory for them is a row as well.
    """

    def __init__(
        self, rival: Rival, direction: str, columns: dict[str, Any], make: Callable[[], Prefill]
    ) -> None:
        self.rival, self.direction, self.columns, self.make = rival, direction, columns, make
        self.peer: Peer | None = None
        self.made: Case | None = None

    def case(self) -> Case:
        x, op = self.make(), self.rival.op
        x.refill(0)
        rivals, inputs = None, x.inputs
        if self.rival.make is not None:
            x.prepare(op)
            peer = self.peer = self.rival.make(x)
            peer.refill()
            rivals = [peer_contender(peer, self.direction)]
            inputs = lambda: [*x.inputs(), *peer.inputs()]
        nsa = attention_case(x, op, self.direction, self.columns, rivals)
        if not nsa.baselines:
            raise RuntimeError("no SDPA backend takes this shape")

        def refill(seed: int) -> None:
            nsa.refill(seed)
            if self.peer is not None:
                self.peer.refill()

        name = peers_name(op, self.direction, x.shape, x.sharing)
        self.made = replace(nsa, bench="peers", name=name, refill=refill, inputs=inputs)
        return self.made

    def more(self, row: BenchRow) -> dict[str, Any]:
        """MiB that one call of either allocates on top of what there was, and the peer's choice."""
        if row.median_us is None:
            return {}
        rival = next(c for c in self.made.baselines if c.name == row.baseline)
        found: dict[str, Any] = {"choice": self.peer and self.peer.choice()}
        for name, one in (("peak_mib", self.made.candidate), ("base_peak_mib", rival)):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            one.call()
            torch.cuda.synchronize()
            found[name] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
        return found


def peers_name(*case: Any) -> str:
    return case_name(*case).replace("prefill", "peers", 1)


def parse(argv: list[str] | None = None) -> Namespace:
    default = Shape(1)
    parser = bench_parser(
        __doc__, lengths=[4096, 8192, 16384, 32768, 65536], device_s=1.0, shrinks=False,
        sizes={name: getattr(default, name) for name in SIZES},
        lists={"selection": (peer_selection.PEERS, [], ": selection alone beside that of these"),
               "sharing": (SHARING, SHARING[:1], ""), "directions": (DIRECTIONS, DIRECTIONS, "")},
    )  # fmt: skip
    parser.add_argument("--sfnsa", type=Path, metavar="FOLDER", help="checkout of sfnsa")
    parser.add_argument("--no_dense", action="store_true", help="leave dense attention out")
    args = parsed(parser, argv)
    if args.sfnsa is None and args.no_dense and not args.selection:
        parser.error("--sfnsa must name a checkout when --no_dense leaves nothing else")
    if args.selection and "fwd" not in args.directions:
        parser.error(f"--selection is forward alone, got --directions {','.join(args.directions)}")
    if "vllm" in args.selection and args.D != args.Dv:
        parser.error(f"--selection vllm wants --D and --Dv alike, got {args.D} and {args.Dv}")
    if args.sfnsa is not None and not (args.sfnsa / peer_sfnsa.PACKAGE / "__init__.py").is_file():
        parser.error(f"--sfnsa must be a folder with {peer_sfnsa.PACKAGE}/, got {args.sfnsa}")
    return args


def rivals_of(args: Namespace) -> Iterator[Rival]:
    """The contenders that were asked for. Raises ImportError for one that cannot be imported."""
    for name in [*["sfnsa"] * (args.sfnsa is not None), *args.selection]:
        try:
            if name == "sfnsa":
                make: Any = partial(Sfnsa, peer_sfnsa.load(args.sfnsa))
                yield Rival(name, make=make, commit=described(args.sfnsa))
            else:
                package, version = peer_selection.load(name)
                yield Rival(name, "sel", partial(peer_selection.PEERS[name][0], package), version)
        except Exception as error:  # whatever another project's import raises
            why = f"{name} cannot be imported: {type(error).__name__}: {error}"
            raise ImportError(why) from error
    if not args.no_dense:
        yield Rival("dense")


def cases(args: Namespace, rivals: list[Rival], about: dict[str, Any]) -> Iterator[Unbuilt]:
    """Each length, direction and sharing against each contender that takes the direction."""
    sizes = {name: getattr(args, name) for name in SIZES}
    for S, direction, sharing, rival in itertools.product(
        args.S_list, args.directions, args.sharing, rivals
    ):
        if rival.op == "sel" and direction != "fwd":
            continue
        columns = {
            "S": S, **sizes, "dtype": "bf16", **about, "direction": direction,
            "against": rival.against, "op": rival.op, "peer_commit": rival.commit,
            "sharing": None if sharing == "random" else sharing,
        }  # fmt: skip
        shape = Shape(S, **sizes)
        match = Match(rival, direction, columns, partial(Prefill, shape, sharing=sharing))
        name = peers_name(rival.op, direction, shape, sharing)
        yield Unbuilt("peers", name, match.case, columns, match.more)
        del match
        torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        rivals = list(rivals_of(args)) if torch.cuda.is_available() else []
    except ImportError as error:
        note(str(error), "warn")
        return 3
    tools = card_tools(Budget(device_s=args.seconds, min_n=20, warm_s=0.05, warm_cap_s=1.0))
    return time_cases(args, tools, COLUMNS, partial(cases, args, rivals))


if __name__ == "__main__":
    raise SystemExit(main())
