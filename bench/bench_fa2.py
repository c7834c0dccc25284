"""FlashAttention-2 for the sliding and compressed branches against what would serve instead.

    python bench/bench_fa2.py                                   # both branches, 64 .. 4096 tokens
    python bench/bench_fa2.py --S_list 2048 --dtype fp16 --form varlen --csv fa2.csv

The candidate is the flash-attn package where it imports, else the FA-2 inside torch (column `path`
says which). Each case has a row per baseline (column of that name): torch's SDPA, which is what is
left with NSA_USE_TRITON_SEL=0, and the branch's Triton kernel, which serves with 1. key_len: what
NSA_FA2_MIN_LEN_* is compared with. Parity against fp64 comes before and after each number.

Exit code: 0 timed, 1 a result is wrong, 2 usage, 3 nothing could be run (the reason is printed).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
from torch import Tensor

from bench.clock import CudaClock
from bench.device import Gpu, ceilings
from bench.provenance import COLUMNS as PROVENANCE
from bench.provenance import provenance
from bench.records import (
    BenchRow,
    add_csv_argument,
    add_shrink_argument,
    check_flags,
    integers,
    note,
    out_dir,
    positive,
    say,
    seconds,
    shrunk,
    write_csv,
    write_so_far,
)
from bench.roofline import Shape, bytes_needed, check_sizes, flops
from bench.timing import Budget, Case, Contender, measure
from nsa import reference
from nsa.blocks import num_compressed
from nsa.errors import must_raise
from nsa.kernels import fa2, sdpa

# Down to where FA-2 may lose: a minimum length needs three numbers of keys in each branch, and the
# window caps those of `win`. No more, because each is measured against two baselines.
LENGTHS = [64, 256, 1024, 4096]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
COLUMNS = (
    "branch", "S", "key_len", "B", "HQ", "G", "D", "w", "l", "d", "form", "dtype",
    "fa2_ms", "ref_ms", "speedup", "ci_low", "ci_high", "parity", "mae", "max_abs", "tflops",
    "peak_frac", "bound", "base_peak_frac", "base_ran", "wall_ms",
    "base_wall_ms", "wall_speedup", "launch_bound", "n", "path",
    "baseline", "status", "why", *PROVENANCE,
)  # fmt: skip


class Branch:
    """Inputs of one branch at one length, its calls and its exact result."""

    def __init__(self, branch: str, shape: Shape, dtype: torch.dtype) -> None:
        s, self.branch, self.shape = shape, branch, shape
        n = s.S if branch == "win" else num_compressed(s.S, s.l, s.d)
        like = {"dtype": dtype, "device": "cuda"}
        self.key_len = min(s.w, n) if branch == "win" else n
        self.q = torch.empty(s.B, s.S, s.HQ, s.D, **like)
        self.k, self.v = (torch.empty(s.B, n, s.G, s.D, **like) for _ in range(2))

    def inputs(self) -> list[Tensor]:
        return [self.q, self.k, self.v]

    def refill(self, seed: int) -> None:
        gen = torch.Generator("cuda").manual_seed(seed)
        for x in self.inputs():
            x.normal_(generator=gen)

    def renew(self, seed: int) -> None:
        """Other queries on the same keys."""
        self.q.normal_(generator=torch.Generator(self.q.device).manual_seed(seed))

    def run(self, lib: Any, **more: Any) -> Tensor:
        s = self.shape
        suffix = lib.__name__.rsplit(".", 1)[-1].replace("reference", "attention")
        if self.branch == "win":
            return getattr(lib, f"sliding_{suffix}")(*self.inputs(), window=s.w, **more)
        return getattr(lib, f"compressed_{suffix}")(*self.inputs(), l=s.l, d=s.d, **more)[0]

    def triton(self) -> Tensor:
        """The branch by its Triton kernel."""
        from nsa.kernels import prefill

        s = self.shape
        if self.branch == "win":
            return prefill.sliding_attention_triton(*self.inputs(), window=s.w)[0]
        return prefill.compressed_attention_triton(*self.inputs(), l=s.l, d=s.d)[0]

    @torch.no_grad()
    def exact(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The PyTorch reference in `dtype`."""
        s, wide = self.shape, [x.to(dtype) for x in self.inputs()]
        if self.branch == "win":
            return reference.sliding_attention(*wide, window=s.w)
        return reference.compressed_attention(*wide, l=s.l, d=s.d)[0]


def baselines(x: Branch) -> list[Contender]:
    """What serves the branch without FA-2: SDPA, and where Triton has a kernel for it, that."""
    # FA-2 has its lse for nothing; SDPA would compute all scores again for it.
    plain = {"need_lse": False} if x.branch == "cmp" else {}
    found = [Contender("sdpa", torch.no_grad()(lambda: x.run(sdpa, **plain)), "sdpa")]
    try:
        x.triton()
    except Exception as error:  # what cannot serve here is no baseline, whatever it raises
        if must_raise(error):
            raise
        note(f"fa2/{x.branch}/S={x.shape.S}: no Triton baseline: {type(error).__name__}: {error}")
        return found
    return [*found, Contender("triton", torch.no_grad()(x.triton), "triton", ("_span_fwd_*",))]


def case_name(branch: str, S: int, dtype: str, form: str) -> str:
    return f"fa2/{branch}/S={S}/{dtype}/{form}"


def case_of(x: Branch, form: str, columns: dict[str, Any], baseline: Contender) -> Case:
    source = f"fa2_{fa2.probe().source}"
    name = case_name(x.branch, x.shape.S, columns["dtype"], form)
    return Case(
        "fa2", f"{name}/{baseline.name}",
        Contender("fa2", torch.no_grad()(lambda: x.run(fa2, form=form)), source,
                  (f"{source}_{form}",)),
        refill=x.refill, renew=x.renew, distinct=x.key_len > 1, inputs=x.inputs,
        oracle=x.exact, same_dtype=lambda: x.exact(x.q.dtype),
        baselines=[baseline], requested="fa2", bytes_needed=bytes_needed(x.shape, x.branch),
        flops=flops(x.shape, x.branch), columns={**columns, "key_len": x.key_len or None},
    )  # fmt: skip


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--S_list", type=integers, default=LENGTHS, help="tokens")
    parser.add_argument("--branches", default="win,cmp", help="win, cmp or both")
    parser.add_argument("--dtype", default="bf16,fp16", help="bf16, fp16 or both")
    parser.add_argument("--form", choices=("dense", "varlen"), default="dense")
    for name, value in (("B", 1), ("HQ", 32), ("G", 4), ("D", 128), ("w", 512), ("l", 32),
                        ("d", 16)):  # fmt: skip
        parser.add_argument(f"--{name}", type=positive, default=value)
    parser.add_argument("--seconds", type=seconds, default=0.3, help="device time a case, at most")
    add_csv_argument(parser)
    add_shrink_argument(parser)
    args = parser.parse_args(argv)
    args.branches, args.dtype = args.branches.split(","), args.dtype.split(",")
    if not set(args.branches) <= {"win", "cmp"}:
        parser.error(f"--branches must be from win, cmp, got {','.join(args.branches)}")
    if not set(args.dtype) <= set(DTYPES):
        parser.error(f"--dtype must be from {', '.join(DTYPES)}, got {','.join(args.dtype)}")
    check_sizes(parser, args)
    check_flags(parser)
    args.S_list = shrunk("--S_list", args.S_list, args.shrink)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    found = fa2.probe()
    if found.why_not is not None:
        note(f"no FA-2 here, nothing was timed: {found.why_not}")
        return 3
    gpu, clock = Gpu(), CudaClock()
    about, ceiling = provenance(gpu), ceilings(gpu, out_dir())
    budget = Budget(device_s=args.seconds, min_n=20)
    written, failed = [], False
    for dtype, branch, S in itertools.product(args.dtype, args.branches, args.S_list):
        sizes = {n: getattr(args, n) for n in ("B", "HQ", "G", "D", "w", "l", "d")}
        shape = Shape(S, Dv=args.D, **sizes)
        columns = {"branch": branch, "S": S, **sizes, "form": args.form, "dtype": dtype, **about}
        try:
            x = Branch(branch, shape, DTYPES[dtype])
            cases = [case_of(x, args.form, columns, one) for one in baselines(x)]
        except torch.cuda.OutOfMemoryError as error:
            why = f"out of memory: {str(error).splitlines()[0]}"
            cases = []
            row = BenchRow("fa2", case_name(branch, S, dtype, args.form), "SKIPPED", why=(why,),
                           columns=columns).emit()  # fmt: skip
            written.append(row.csv())
            say(args, row.line())
            write_so_far(args.csv, written, COLUMNS)
        for case in cases:
            row = measure(case, clock, gpu=gpu, ceiling=ceiling, budget=budget)
            flat = row.csv()
            written.append({**flat, "fa2_ms": flat["ms"], "ref_ms": flat["base_ms"]})
            failed |= row.status == "FAILED"
            say(args, row.line())
            write_so_far(args.csv, written, COLUMNS)
    write_csv(args.csv, written, COLUMNS)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
