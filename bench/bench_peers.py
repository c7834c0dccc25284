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
import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
from torch import Tensor

from bench import peer_sfnsa
from bench.bench_prefill import (
    BACKWARD_KERNELS,
    KERNELS,
    check_key_gradients,
    dense,
    dense_calls,
    dense_forward,
    forward_case,
    judged,
)
from bench.clock import CudaClock
from bench.device import Gpu, ceilings
from bench.peer_sfnsa import Sfnsa
from bench.prefill_inputs import Prefill, sampled_gradients
from bench.provenance import COLUMNS as PROVENANCE
from bench.provenance import described, provenance
from bench.records import (
    add_csv_argument,
    check_flags,
    integers,
    note,
    out_dir,
    positive,
    say,
    seconds,
    write_csv,
    write_so_far,
)
from bench.roofline import Shape, bytes_needed, check_sizes, flops
from bench.timing import Budget, Case, Contender, Unbuilt, measure
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
Both = tuple[Tensor, ...]  # an output and the gradients


def with_backward(
    forward: Callable[[], Tensor], leaves: Callable[[], list[Tensor]], do: Tensor
) -> Both:
    out = forward()
    return (out, *torch.autograd.grad(out, leaves(), do))


def training_case(x: Prefill, columns: dict[str, Any], baselines: Sequence[Contender]) -> Case:
    """NSA's forward and backward in one call; in each check dq of the sampled queries is compared.

    Raises AssertionError when a gradient of keys, values or gates is wrong.
    """
    shape = x.shape
    leaves = lambda: x.leaves("full")
    for t in leaves():
        t.requires_grad_(True)
    check_key_gradients(x, "full", {"out": x.forward("full"), "leaves": leaves()})
    work = [count(shape, "full") + count(shape, "full", backward=True)
            for count in (bytes_needed, flops)]  # fmt: skip
    truth = lambda dtype: sampled_gradients(x, "full", dtype)[0]
    return Case(
        "peers", "", Contender(
            "nsa", lambda: with_backward(lambda: x.forward("full"), leaves, x.do), "triton",
            (*KERNELS["full"], *BACKWARD_KERNELS["full"]),
        ),
        refill=x.refill, inputs=x.inputs, oracle=lambda: truth(torch.float64),
        same_dtype=lambda: truth(x.q.dtype), baselines=baselines,
        view=lambda got: got[1][:, x.rows], renew=partial(x.renew, names=("q", "do")),
        bytes_needed=work[0], flops=work[1], columns=columns,
    )  # fmt: skip


def dense_contenders(x: Prefill, direction: str) -> list[Contender]:
    """Causal dense attention by each SDPA backend that takes this shape."""
    if direction == "fwd":
        return dense_forward(x)
    leaves = lambda: [x.q, x.k_sel, x.v_sel]
    truth = lambda dtype: sampled_gradients(x, "dense", dtype)[0]
    return [dense(name, partial(with_backward, run, leaves, x.do), x, truth, False, True)
            for name, run in dense_calls(x)]  # fmt: skip


def peer_contender(peer: Sfnsa, direction: str) -> Contender:
    """Raises AssertionError when a gradient of the peer's is wrong."""
    x = peer.x
    if direction == "fwd":
        return judged(peer.name, torch.no_grad()(peer.forward), peer.name, x, peer.exact)
    for t in peer.leaves():
        t.requires_grad_(True)
    state = {"out": peer.forward(), "leaves": peer.leaves()}
    check_key_gradients(x, "full", state, peer.name, (), peer.gradients)
    call = partial(with_backward, peer.forward, peer.leaves, x.do)
    return judged(peer.name, call, peer.name, x, lambda dtype: peer.gradients(dtype)[0])


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
        refill, inputs = x.refill, x.inputs
        if self.package is None:
            rivals = dense_contenders(x, self.direction)
            if not rivals:
                raise RuntimeError("no SDPA backend takes this shape")
        else:
            peer = self.peer = Sfnsa(self.package, x, self.window)
            peer.refill()
            rivals = [peer_contender(peer, self.direction)]
            inputs = lambda: [*x.inputs(), *peer.inputs()]

            def refill(seed: int) -> None:
                x.refill(seed)
                peer.refill()

        columns = {**self.columns, "compared": x.compared}
        if self.direction == "fwd":
            nsa = forward_case(x, "full", columns, rivals)
        else:
            nsa = training_case(x, columns, rivals)
        self.made = dataclasses.replace(
            nsa, bench="peers", name=f"peers/{self.direction}/S={self.shape.S}", refill=refill,
            inputs=inputs, columns=columns,
        )  # fmt: skip
        return self.made

    def peaks(self, baseline: str) -> dict[str, int]:
        """MiB that one call of either allocates on top of what there was."""
        rival = next(c for c in self.made.baselines if c.name == baseline)
        found = {}
        for name, one in (("peak_mib", self.made.candidate), ("base_peak_mib", rival)):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            one.call()
            torch.cuda.synchronize()
            found[name] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
        return found


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sfnsa", type=Path, metavar="FOLDER", help="checkout of sfnsa")
    parser.add_argument("--S_list", type=integers, default=[4096, 8192, 16384, 32768, 65536],
                        help="tokens")  # fmt: skip
    parser.add_argument("--directions", default=",".join(DIRECTIONS),
                        help=f"from {', '.join(DIRECTIONS)}")  # fmt: skip
    parser.add_argument("--no_dense", action="store_true", help="leave dense attention out")
    default = Shape(1)
    for name in SIZES:
        parser.add_argument(f"--{name}", type=positive, default=getattr(default, name))
    parser.add_argument("--seconds", type=seconds, default=1.0, help="device time a row, at most")
    add_csv_argument(parser)
    args = parser.parse_args(argv)
    args.directions = args.directions.split(",")
    if not set(args.directions) <= set(DIRECTIONS):
        parser.error(
            f"--directions must be from {', '.join(DIRECTIONS)}, got {','.join(args.directions)}"
        )
    if args.sfnsa is None and args.no_dense:
        parser.error("--sfnsa must name a checkout when --no_dense leaves nothing else")
    if args.sfnsa is not None and not (args.sfnsa / peer_sfnsa.PACKAGE / "__init__.py").is_file():
        parser.error(f"--sfnsa must be a folder with {peer_sfnsa.PACKAGE}/, got {args.sfnsa}")
    check_sizes(parser, args)
    check_flags(parser)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not torch.cuda.is_available():
        note("torch sees no CUDA device: nothing was timed", "warn")
        return 3
    package = peer_commit = None
    if args.sfnsa is not None:
        try:
            package = peer_sfnsa.load(args.sfnsa)
        except Exception as error:  # whatever another project's import raises
            note(f"sfnsa cannot be imported: {type(error).__name__}: {error}", "warn")
            return 3
        peer_commit = described(args.sfnsa)
    gpu, clock = Gpu(), CudaClock()
    about, ceiling = provenance(gpu), ceilings(gpu, out_dir())
    budget = Budget(device_s=args.seconds, min_n=20, warm_s=0.05, warm_cap_s=1.0)
    rivals = [("sfnsa", package)] * (package is not None) + [("dense", None)] * (not args.no_dense)
    written, failed = [], False
    for S, direction, (against, found) in itertools.product(args.S_list, args.directions, rivals):
        shape = Shape(S, **{n: getattr(args, n) for n in SIZES})
        columns = {
            "S": S, **{n: getattr(args, n) for n in SIZES}, "dtype": "bf16", **about,
            "direction": direction, "against": against,
            "peer_commit": peer_commit if found else None,
        }  # fmt: skip
        match = Match(shape, direction, columns, found)
        unbuilt = Unbuilt("peers", f"peers/{direction}/S={S}", match.case, columns)
        row = measure(unbuilt, clock, gpu=gpu, ceiling=ceiling, budget=budget)
        flat = row.csv()
        if row.median_us is not None:
            flat |= match.peaks(row.baseline)
            flat["choice"] = match.peer.choice() if match.peer else None
        written.append(flat)
        failed |= row.status == "FAILED"
        say(args, row.line())
        write_so_far(args.csv, written, COLUMNS)
        del match
        torch.cuda.empty_cache()
    write_csv(args.csv, written, COLUMNS)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
