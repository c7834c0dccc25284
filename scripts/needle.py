"""Needle test: does NSA's own block choice find one key among thousands of competing ones?

    python scripts/needle.py                                  # 8,192 tokens, CPU
    python scripts/needle.py --tokens 65536 --device cuda --dtype bf16
    python scripts/needle.py --lengths 4096,16384,65536 --picture needle.svg   # by length and depth

Each of the last `--queries` positions looks, in each KV group, for its own key, hidden in a block
that is neither the first nor a local one, so only its score can select it. Other keys of the same
length point half-way towards the query, one per block, and the other queries' needles compete too.
Selection reads the scores of mean-pooled blocks, where a needle is one of 32 keys.

Three facts decide (exit code 0 all hold, 1 one fails, 2 usage error, or no such device or route):
  control     dense attention puts at least 90 % of its weight on each needle: the task is solvable
  found       the needle's block is selected, and the branch's output equals dense attention's
  not chance  with the needle's key taken away, its block is chosen no more often than others are

--lengths plants needles anew with --seeds seeds per length and counts how many blocks were found by
the needle's depth, in tenths of the text; every one must be.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch
from torch import Tensor

from bench.records import emit, file_target, integers, positive, told
from nsa import launches
from nsa.attention import select_blocks, selection_attention
from nsa.compress import mean_pool
from nsa.dispatch import RouteUnavailable, trace
from nsa.options import Parser, seed64

L, D, L_SEL, N_INIT, N_LOCAL = 32, 16, 64, 1, 2  # the paper's block sizes
DIM, HEADS_PER_GROUP, GROUPS = 64, 4, 2
DEPTHS = 10
NEEDLE_NORM, QUERY_NORM = 56.0, 8.0  # an ordinary key has norm 8


@dataclass(frozen=True)
class Case:
    """q [1, S, HQ, D], k and v [1, S, G, D], needle positions [queries, G], k without needles."""

    q: Tensor
    k: Tensor
    v: Tensor
    needles: Tensor
    k_without: Tensor

    def hits(self, indices: Tensor) -> Tensor:
        """Return which needles [queries, G] lie in blocks that their queries chose: indices
        [1, S, G, n_sel]."""
        return (indices[0, -len(self.needles) :] == (self.needles // L_SEL)[..., None]).any(-1)


def make_case(
    tokens: int, queries: int, device: str = "cpu", dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:  # fmt: skip
    """Hide queries * GROUPS needles; the last `queries` rows of q look for them."""
    g = torch.Generator().manual_seed(seed)
    blocks = tokens // L_SEL
    local = (queries + L_SEL - 1) // L_SEL + N_LOCAL
    free = blocks - N_INIT - local  # blocks that no query is forced to read
    if free < queries:
        raise ValueError(f"tokens must leave a free block per query, got {tokens} for {queries}")

    normal = lambda *shape: torch.randn(*shape, generator=g)
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)
    q = normal(1, tokens, GROUPS * HEADS_PER_GROUP, DIM)
    k, v = normal(1, tokens, GROUPS, DIM), normal(1, tokens, GROUPS, DIM)
    target = unit(normal(queries, GROUPS, DIM))
    needles = torch.empty(queries, GROUPS, dtype=torch.long)
    for group in range(GROUPS):
        order = N_INIT + torch.randperm(free, generator=g)
        spots = order * L_SEL + torch.randint(0, L_SEL, (free,), generator=g)
        # One competitor in every free block without a needle, each half-way towards one query.
        rivals = spots[queries:]
        wanted = target[torch.arange(len(rivals)) % queries, group]
        side = normal(len(rivals), DIM)
        side = unit(side - (side * wanted).sum(-1, keepdim=True) * wanted)
        k[0, rivals, group] = NEEDLE_NORM * (0.5 * wanted + math.sqrt(0.75) * side)
        needles[:, group] = spots[:queries]
    k_without = k.clone()
    for group in range(GROUPS):
        k[0, needles[:, group], group] = NEEDLE_NORM * target[:, group]
    heads = target.repeat_interleave(HEADS_PER_GROUP, dim=1)  # [queries, HQ, D]
    q[0, -queries:] = QUERY_NORM * unit(heads + 0.02 * normal(*heads.shape))
    move = lambda x: x.to(device=device, dtype=dtype)
    return Case(move(q), move(k), move(v), needles.to(device), move(k_without))


@dataclass(frozen=True)
class Result:
    """What the search saw; weights and shares in [0, 1]."""

    control_min_weight: float
    found_share: float
    found_share_without: float
    chance: float
    max_abs_error: float
    limit: float

    def checks(self) -> list[tuple[str, bool, str]]:
        found = self.found_share == 1.0 and self.max_abs_error <= self.limit
        seen = f"{self.found_share:.1%} of the blocks, output off by {self.max_abs_error:.2g}"
        without = f"{self.found_share_without:.1%} without the key, chance {self.chance:.1%}"
        return [
            ("control", self.control_min_weight >= 0.9, f"weight {self.control_min_weight:.4f}"),
            ("found", found, f"{seen} (limit {self.limit:.2g})"),
            ("not_chance", self.found_share_without <= 0.5, without),
        ]


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 causal attention of the last rows: out [R, HQ, D] and weights [R, HQ, S]."""
    rows, tokens = q.shape[1], k.shape[1]
    heads_k = k[0].float().repeat_interleave(HEADS_PER_GROUP, dim=1)  # [S, HQ, D]
    heads_v = v[0].float().repeat_interleave(HEADS_PER_GROUP, dim=1)
    scores = torch.einsum("rhd,shd->rhs", q[0].float(), heads_k) / math.sqrt(DIM)
    t = torch.arange(tokens - rows, tokens, device=q.device)
    future = torch.arange(tokens, device=q.device)[None] > t[:, None]
    weights = scores.masked_fill(future[:, None], -math.inf).softmax(-1)
    return torch.einsum("rhs,shd->rhd", weights, heads_v), weights


@torch.no_grad()
def search(
    case: Case, n_sel: int, *, all_rows: bool = False,
    select: Callable[..., Tensor] = select_blocks, backend: str | None = None,
) -> Result:  # fmt: skip
    """Select blocks, attend to them, and compare with dense attention.

    all_rows: run every query of the prefill, as a model does, and not only the searching ones.
    """
    tokens, queries = case.k.shape[1], case.needles.shape[0]
    first = 0 if all_rows else tokens - queries
    q = case.q[:, first:]
    blocks = dict(
        l=L, d=D, l_sel=L_SEL, n_sel=n_sel, n_init=N_INIT, n_local=N_LOCAL, q_start=first,
        backend=backend,
    )  # fmt: skip

    chosen = lambda k: select(q, mean_pool(k, L, D), **blocks)
    indices = chosen(case.k)
    out = selection_attention(
        q, case.k, case.v, indices, block_size=L_SEL, q_start=first, backend=backend
    )
    dense, weights = dense_attention(case.q[:, -queries:], case.k, case.v)
    needle = case.needles.repeat_interleave(HEADS_PER_GROUP, dim=1)[..., None]
    # Dense attention keeps a small weight on unselected keys; beyond it only rounding remains.
    outside = 1 - weights.gather(-1, needle).min().item()
    spread = case.v.float().abs().max().item()
    return Result(
        control_min_weight=1 - outside,
        found_share=case.hits(indices).float().mean().item(),
        found_share_without=case.hits(chosen(case.k_without)).float().mean().item(),
        chance=(n_sel - N_INIT - N_LOCAL) / (tokens // L_SEL - N_INIT - N_LOCAL),
        max_abs_error=(out[0, -queries:].float() - dense).abs().max().item(),
        limit=2 * outside * spread + 4 * torch.finfo(case.q.dtype).eps * spread,
    )


@torch.no_grad()
def by_depth(
    lengths: Sequence[int], seeds: int, queries: int, n_sel: int, device: str = "cpu",
    dtype: torch.dtype = torch.float32, *, select: Callable[..., Tensor] = select_blocks,
    backend: str | None = None,
) -> list[dict[str, float]]:  # fmt: skip
    """Return rows {tokens, depth, found, n}: of n needles at a depth of [depth, depth + 0.1) of the
    text, in how many cases the block was selected."""
    rows = []
    for tokens in lengths:
        found, n = Counter[int](), Counter[int]()
        for seed in range(seeds):
            case = make_case(tokens, queries, device, dtype, seed)
            indices = select(
                case.q[:, -queries:], mean_pool(case.k, L, D), l=L, d=D, l_sel=L_SEL, n_sel=n_sel,
                n_init=N_INIT, n_local=N_LOCAL, q_start=tokens - queries, backend=backend,
            )  # fmt: skip
            depths = case.needles * DEPTHS // tokens
            n.update(depths.flatten().tolist())
            found.update(depths[case.hits(indices)].tolist())
        rows += [
            {"tokens": tokens, "depth": i / DEPTHS, "found": found[i], "n": n[i]}
            for i in range(DEPTHS)
        ]
    return rows


def depth_report(rows: list[dict[str, float]], picture: Path | None) -> int:
    """Draw, send and print the rows. Returns the exit code, 1 if a needle was missed."""
    for tokens in dict.fromkeys(r["tokens"] for r in rows):
        mine = [r for r in rows if r["tokens"] == tokens]
        found, n = (sum(r[k] for r in mine) for k in ("found", "n"))
        emit("metric", {"name": f"needle/{tokens}/found_share", "value": found / n, "unit": "1"})
        row = {"nodeid": f"needle::{tokens}", "outcome": "passed" if found == n else "failed"}
        emit("test", {**row, "duration_s": 0.0, "reason": f"{found} of {n} needles found"})
        print(f"{tokens:9} tokens: {found} of {n} needles found")
    if picture:
        from scripts import pictures

        title = "Needles whose block was selected"
        pictures.needle([r for r in rows if r["n"]], picture, title)
        emit("artifact", {"path": str(picture)})
    return 0 if all(r["found"] == r["n"] for r in rows) else 1


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=positive, help="default: 8192")
    add("--queries", type=positive, default=8, help="needles per KV group")
    add("--n-sel", type=positive, default=16)
    add("--device", default="cpu", choices=["cpu", "cuda"])
    add("--dtype", default="fp32", choices=["fp32", "fp16", "bf16"])
    add("--backend", choices=["auto", "triton", "reference"], default="auto",
        help="auto follows the NSA_* flags; a named route runs or fails")  # fmt: skip
    add("--seed", type=seed64, help="default: 0")
    add("--lengths", type=integers, help="count by depth at these lengths, a,b,c")
    add("--seeds", type=positive, help="texts per length (default: 5)")
    add("--picture", type=file_target, metavar="SVG", help="draw what --lengths counted")
    args = parser.parse_args(argv)
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.dtype]
    for name in ("tokens", "seed") if args.lengths else ("seeds", "picture"):
        if getattr(args, name) is not None:
            how = "with" if args.lengths else "without"
            parser.error(f"argument --{name}: has no effect {how} --lengths")
    lengths = args.lengths or [args.tokens or 8192]
    blocks = min(lengths) // L_SEL
    if args.n_sel >= blocks:
        parser.error(
            f"argument --n-sel: must be below {blocks}, the blocks of {min(lengths)} tokens, got "
            f"{args.n_sel}"
        )
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: no CUDA device here")
    if args.picture:
        try:
            import matplotlib  # noqa: F401  before the search, which takes long
        except ImportError as error:
            parser.error(f"argument --picture: {error}")
    try:
        if args.lengths:
            rows = by_depth(
                lengths, args.seeds or 5, args.queries, args.n_sel, args.device, dtype,
                backend=args.backend,
            )  # fmt: skip
            return depth_report(rows, args.picture)
        case = make_case(lengths[0], args.queries, args.device, dtype, args.seed or 0)
        with trace() as routes, launches.recording() as launched:
            result = search(case, args.n_sel, all_rows=args.device == "cuda", backend=args.backend)
    except (ValueError, RouteUnavailable) as e:
        parser.error(str(e))
    print(f"routes {[d.route.value for d in routes]} launches {dict(launched)}")
    emit("metric", {"name": "needle/found_share", "value": result.found_share, "unit": "1"})
    return 0 if told("needle", result.checks()) else 1


if __name__ == "__main__":
    sys.exit(main())
