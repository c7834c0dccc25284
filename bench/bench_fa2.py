"""FlashAttention-2 for the sliding and compressed branches against what would serve instead.

    python bench/bench_fa2.py                                   # both branches, 64 .. 4096 tokens
    python bench/bench_fa2.py --S_list 2048 --dtype fp16 --form varlen --csv fa2.csv

The candidate is the flash-attn package where it imports, else the FA-2 inside torch (column `path`
says which). Each case has a row per baseline (column of that name): torch's SDPA, which is what is
left with NSA_USE_TRITON_SEL=0, and the branch's Triton kernel, which serves with 1. key_len: what
NSA_FA2_MIN_LEN_* is compared with. Parity against fp64 comes before and after each number.

Exit code: 0 timed, 1 a result is wrong, 2 usage, 3 nothing could be run (the reason is printed).
"""

import itertools
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
from torch import Tensor

from bench.cases import truths
from bench.main import bench_parser, card_tools, parsed, time_cases
from bench.provenance import COLUMNS as PROVENANCE
from bench.records import note, shrunk
from bench.roofline import Shape, bytes_needed, flops
from bench.timing import Budget, Case, Contender, Unbuilt
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

    def run(self, lib: Any, *given: Tensor, **more: Any) -> Tensor:
        """The branch by the function that a module has for it, on its inputs or given ones."""
        names = {fa2: "fa2", sdpa: "sdpa", reference: "attention"}
        s, name, inputs = self.shape, names.get(lib, "attention_triton"), given or self.inputs()
        if self.branch == "win":
            out = getattr(lib, f"sliding_{name}")(*inputs, window=s.w, **more)
        else:
            out = getattr(lib, f"compressed_{name}")(*inputs, l=s.l, d=s.d, **more)
        return out[0] if isinstance(out, tuple) else out  # some give the lse as well

    def triton(self) -> Tensor:
        """The branch by its Triton kernel."""
        from nsa.kernels import prefill

        return self.run(prefill)

    @torch.no_grad()
    def exact(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The PyTorch reference in `dtype`."""
        return self.run(reference, *(x.to(dtype) for x in self.inputs()))


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


def case_of(x: Branch, form: str, columns: dict[str, Any], baseline: Contender) -> Case:
    source = f"fa2_{fa2.probe().source}"
    return Case(
        "fa2", f"fa2/{x.branch}/S={x.shape.S}/{columns['dtype']}/{form}/{baseline.name}",
        Contender("fa2", torch.no_grad()(lambda: x.run(fa2, form=form)), source,
                  (f"{source}_{form}",)),
        refill=x.refill, renew=x.renew, distinct=x.key_len > 1, inputs=x.inputs,
        **truths(x.exact, x.q.dtype), baselines=[baseline], requested="fa2",
        bytes_needed=bytes_needed(x.shape, x.branch), flops=flops(x.shape, x.branch),
        columns={**columns, "key_len": x.key_len or None},
    )  # fmt: skip


def parse(argv: list[str] | None = None) -> Namespace:
    sizes = {"B": 1, "HQ": 32, "G": 4, "D": 128, "w": 512, "l": 32, "d": 16}
    lists = {"branches": (("win", "cmp"), ["win", "cmp"], ""), "dtype": (DTYPES, list(DTYPES), "")}
    parser = bench_parser(__doc__, lengths=LENGTHS, sizes=sizes, lists=lists, device_s=0.3)
    parser.add_argument("--form", choices=("dense", "varlen"), default="dense")
    args = parsed(parser, argv)
    args.sizes = {name: getattr(args, name) for name in sizes}
    args.S_list = shrunk("--S_list", args.S_list, args.shrink)
    return args


def cases(args: Namespace, about: dict[str, Any]) -> Iterator[Unbuilt]:
    """Each dtype, branch and length against each baseline that serves there."""
    for dtype, branch, S in itertools.product(args.dtype, args.branches, args.S_list):
        columns = {
            "branch": branch, "S": S, **args.sizes, "form": args.form, "dtype": dtype, **about,
        }  # fmt: skip
        name = f"fa2/{branch}/S={S}/{dtype}/{args.form}"
        try:
            x = Branch(branch, Shape(S, Dv=args.D, **args.sizes), DTYPES[dtype])
            builds = {
                f"{name}/{one.name}": partial(case_of, x, args.form, columns, one)
                for one in baselines(x)
            }
        except torch.cuda.OutOfMemoryError as error:
            builds = {name: partial(_raise, error)}
        for name, build in builds.items():
            yield Unbuilt("fa2", name, build, columns)


def _raise(error: Exception) -> NoReturn:
    raise error


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    found = fa2.probe()
    if found.why_not is not None:
        note(f"no FA-2 here, nothing was timed: {found.why_not}")
        return 3
    tools = card_tools(Budget(device_s=args.seconds, min_n=20))
    aliases = {"fa2_ms": "ms", "ref_ms": "base_ms"}
    return time_cases(args, tools, COLUMNS, partial(cases, args), aliases)


if __name__ == "__main__":
    raise SystemExit(main())
