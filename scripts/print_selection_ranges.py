"""A sample of the key ranges that selection makes, one JSON line per query and group.

    python scripts/print_selection_ranges.py                      # to stdout
    python scripts/print_selection_ranges.py --out sel_ranges.jsonl --S 4096

Each line: {"t", "group", "ranges": [[start, end], ...], "tokens", "expected_max"}. Every range is
checked on the way: sorted, disjoint, not empty, not after the query, holding the query itself. Exit
code 1 when one is not.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch

from bench.records import check_flags, emit, file_target, positive, write_target
from nsa import oracle
from nsa.attention import select_blocks
from nsa.compress import mean_pool
from nsa.config import check_blocks, check_choice
from nsa.options import Parser, seed64
from nsa.select import blocks_to_ranges


def wrong(ranges: list[list[int]], t: int, l_sel: int, n_sel: int) -> str | None:
    """Say what is wrong with the ranges of query `t`; None if nothing is."""
    neighbours, tokens = zip(ranges, ranges[1:], strict=False), sum(b - a for a, b in ranges)
    faults = {
        "an empty or inverted range": any(a >= b for a, b in ranges),
        "ranges that touch or overlap or are not sorted": any(a[1] >= b[0] for a, b in neighbours),
        "a range after the query": any(a < 0 or b > t + 1 for a, b in ranges),
        "the query's own token is missing": not any(a <= t < b for a, b in ranges),
        "more tokens than n_sel blocks hold": tokens > l_sel * n_sel,
    }
    return next((fault for fault, holds in faults.items() if holds), None)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, what in (
        ("S", 1024, "tokens"), ("queries", 16, "queries shown, evenly spread"), ("heads", 8, None),
        ("groups", 2, None), ("dk", 64, None), ("l", 32, None), ("d", 16, None),
        ("l-sel", 64, None), ("n-sel", 8, None),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=positive, default=default, help=what)
    parser.add_argument("--seed", type=seed64, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=file_target, metavar="PATH", help="default: stdout")
    args = parser.parse_args(argv)
    if args.heads % args.groups:
        parser.error(f"--groups must divide --heads {args.heads}, got {args.groups}")
    try:
        check_blocks(args.l, args.d, args.l_sel)
        check_choice(args.n_sel, 1, 2)  # as select_blocks() has them
        torch.empty(1, device=args.device).cpu()
    except (ValueError, RuntimeError, AssertionError) as error:
        parser.error(str(error))
    check_flags(parser)

    generator = torch.Generator().manual_seed(args.seed)
    q = torch.randn(1, args.S, args.heads, args.dk, generator=generator).to(args.device)
    k = torch.randn(1, args.S, args.groups, args.dk, generator=generator).to(args.device)
    blocks = select_blocks(
        q, mean_pool(k, args.l, args.d), l=args.l, d=args.d, l_sel=args.l_sel, n_sel=args.n_sel
    )
    positions = torch.arange(args.S, device=args.device)
    ranges = blocks_to_ranges(blocks, args.l_sel, positions).cpu()
    expected = oracle.blocks_to_ranges(blocks.cpu(), args.l_sel)

    lines, problems, shown = [], 0, min(args.queries, args.S)
    for t in [(i + 1) * args.S // shown - 1 for i in range(shown)]:
        for g in range(args.groups):
            rows = [[int(a), int(b)] for a, b in ranges[0, t, g] if b > a]
            own = [[int(a), int(b)] for a, b in expected[0, t, g] if b > a]
            problem = wrong(rows, t, args.l_sel, args.n_sel)
            if problem is None and rows != own:
                problem = f"the oracle makes {own} of the same blocks"
            if problem:
                problems += 1
                print(f"t={t} group={g}: {problem}: {rows}", file=sys.stderr)
            lines.append(json.dumps({
                "t": t, "group": g, "ranges": rows, "tokens": sum(b - a for a, b in rows),
                "expected_max": min(t + 1, args.l_sel * args.n_sel),
            }))  # fmt: skip
    text = "\n".join(lines) + "\n"
    if args.out:
        write_target(args.out, text)
        emit("artifact", {"path": args.out.name})
        print(f"{len(lines)} rows, {problems} wrong, in {args.out.name}")
    else:
        print(text, end="")
    emit("metric", {"name": "selection_ranges_checked", "value": len(lines), "unit": "rows"})
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
