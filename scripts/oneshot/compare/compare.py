"""The `compare` verb: what changed from bundle A to bundle B, and is it faster or slower.

RULES says how a case is judged. Parity and status are compared on unlike boxes too. Proof that A
has and B does not is a regression, unless B was not asked for it (another profile, --only, --skip,
fewer cards).

Exit code 0: nothing worse; 1: a regression of the kinds in --fail-on; 2: usage; 5: no times could
be compared, B lacks times that it was asked for, or one of them does not pass `verify`. Nothing of
a bundle is executed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.oneshot.compare import comparison
from scripts.oneshot.compare.comparison import Cell, Comparison, aligned, compare
from scripts.oneshot.compare.verify import verified
from scripts.oneshot.record.capture import plain
from scripts.oneshot.record.markdown import cell, code, us
from scripts.oneshot.record.reading import BundleError

FAIL_ON = ("slower", "parity", "ambiguous")
MAX_LISTED, MAX_DOUBTS = 60, 5

RULES = """How a case is judged (floor = the larger noise floor of A and B, at least 1 %):
  FASTER/SLOWER  the 95 % intervals are further apart than the floor, min and p80 moved the same
                 way, cycles (time x SM clock) agree where clocks are known, and the gap is over
                 0.5 us where CUDA events were the clock
  SAME           the medians differ by no more than the floor, and half of each interval is below it
  AMBIGUOUS      neither; the reason is given
  NEW, GONE      numbers in one bundle only; GONE says what B has instead
  NOT_COMPARABLE another GPU, power limit, major driver version, timer or cache mode (--force)"""


def _rows(cells: list[Cell], case: Callable[[str], str], why: Callable[[str], str]) -> list[Any]:
    """The cells as rows of a table; `case` and `why` make their texts fit for it."""
    rows = []
    for c in cells:
        change = "-" if c.change is None else f"{100 * c.change:+.1f} %"
        if c.change is not None and c.change_ci:
            change += f" [{100 * c.change_ci[0]:+.1f}, {100 * c.change_ci[1]:+.1f}]"
        times = us(c.a_us, c.a_ci), us(c.b_us, c.b_ci)
        rows.append((case(c.case), *times, change, c.verdict, why(c.why)))
    return rows


def summary(result: Comparison) -> str:
    counts = result.counts()
    parts = [f"{counts[v]} {v.lower().replace('_', ' ')}" for v in comparison.VERDICTS]
    return ", ".join([*parts, f"{len(result.regressions)} parity or status regressions"])


def _first(lines: list[str]) -> list[str]:
    """The first MAX_LISTED lines, and how many more there are."""
    more = len(lines) - MAX_LISTED
    return [*lines[:MAX_LISTED], f"and {more} more"] if more > 0 else lines


def as_text(result: Comparison, code_: int, explain: bool) -> str:
    changes = result.environment
    out = [f"A  {result.a}", f"B  {result.b}"]
    out.append("environment  " + ("same" if not changes else f"{len(changes)} differences"))
    out += [f"  {line}" for line in _first(changes)]
    out += [f"note         {line}" for line in result.notes]
    if result.incomparable:
        out.append(f"times are NOT_COMPARABLE: {'; '.join(result.incomparable)} (--force)")
    out += [f"status       {line}" for line in result.status]
    out += [f"regression   {line}" for line in result.regressions]
    out += [f"repaired     {line}" for line in result.repaired[:MAX_LISTED]]
    if explain:
        out += ["", RULES, f"  floor here     {100 * result.floor:.1f} %", ""]
    if result.cells:
        heads = ("case", "A [95 % CI]", "B [95 % CI]", "change", "verdict", "why")
        out += aligned([heads, *_rows(result.cells, plain, plain)])
    out.append(f"summary  {summary(result)}  exit {code_}")
    return "\n".join(out)


def as_markdown(result: Comparison, code_: int, explain: bool) -> str:
    said = [f"A: {result.a}", f"B: {result.b}", *result.notes]
    if result.incomparable:
        said.append(f"times are NOT_COMPARABLE: {'; '.join(result.incomparable)}")
    out = [f"**{summary(result)}** (exit {code_})", "", *(f"- {cell(line)}" for line in said)]
    for title, lines in (
        ("Environment", result.environment), ("Status", result.status),
        ("Regressions", result.regressions), ("Repaired", result.repaired),
    ):  # fmt: skip
        if lines:
            out += ["", f"### {title}", "", *(f"- {cell(line)}" for line in _first(lines))]
    if result.cells:
        heads = ["| case | A | B | change | verdict | why |", "|---|---|---|---|---|---|"]
        rows = [f"| {' | '.join(row)} |" for row in _rows(result.cells, code, cell)]
        out += ["", "### Times", "", *heads, *rows]
    if explain:
        out += ["", "```text", RULES, "```"]
    return "\n".join(out)


def _fail_on(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or any(name not in FAIL_ON for name in names):
        raise argparse.ArgumentTypeError(f"one or more of {', '.join(FAIL_ON)}, got {text!r}")
    return names


def _doubts(name: str, found: list[str]) -> list[str]:
    """Return lines that tell the first few of the problems that `verify` found in a bundle."""
    shown = [f"{name} does not verify: {problem}" for problem in found[:MAX_DOUBTS]]
    more = len(found) - len(shown)
    return shown + ([f"{name} does not verify: and {more} more problems"] if more else [])


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="oneshot compare", description=(__doc__ or "").split("\n")[0])
    p.add_argument("a", type=Path, help="folder or .tgz of the earlier run")
    p.add_argument("b", type=Path, help="folder or .tgz of the later run")
    p.add_argument(
        "--fail-on", type=_fail_on, action="extend", metavar="KIND,..",
        help=f"what makes the exit code 1: {', '.join(FAIL_ON)}; default slower,parity",
    )  # fmt: skip
    form = p.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--md", action="store_true", help="print Markdown")
    p.add_argument("--explain", action="store_true", help="print the rules as well")
    p.add_argument("--force", action="store_true", help="compare times of unlike boxes")
    args = p.parse_args(argv)
    try:
        (a, against_a), (b, against_b) = verified(args.a), verified(args.b)
        result = compare(a, b, args.force)
        doubts = [*_doubts("A", against_a), *_doubts("B", against_b)]
    except (BundleError, KeyError, TypeError, AttributeError) as error:
        text = str(error) if isinstance(error, BundleError) else f"broken bundle: {error!r}"
        print(plain(text)[:500], file=sys.stderr)
        return comparison.EXIT_USAGE
    result.notes[:0] = doubts
    status = result.exit_code(args.fail_on or ["slower", "parity"])
    if doubts and status == comparison.EXIT_SAME:
        status = comparison.EXIT_NOT_COMPARABLE
    if args.json:
        data = {**asdict(result), "counts": dict(result.counts()), "exit_code": status}
        print(json.dumps(data, allow_nan=False, ensure_ascii=False, indent=1))
    else:
        print((as_markdown if args.md else as_text)(result, status, args.explain))
    return status
