"""The one main of all benches: options that they share, and the loop over cases: check, time, row,
CSV. A bench is a parser's own options, a table of columns, and a generator of its cases.

Exit codes: 0 timed, 1 a result is wrong, 2 usage, 3 nothing could be run.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bench import spent
from bench.cases import Unbuilt
from bench.clock import CudaClock
from bench.device import Gpu, ceilings
from bench.provenance import provenance
from bench.records import (
    CSV_STDOUT,
    BenchRow,
    amount,
    check_flags,
    csv_target,
    csv_text,
    doc_parser,
    integers,
    note,
    out_dir,
    positive,
    say,
    write_csv,
    write_so_far,
)
from bench.timing import Budget, measure
from nsa.config import check_choice

Line = tuple[BenchRow, dict[str, Any], str]  # a row, its line of the CSV, the same for people


def names(*allowed: str) -> Callable[[str], list[str]]:
    """The type of an argument that lists some of these names, a,b,c: none twice."""

    def of(text: str) -> list[str]:
        found = text.split(",")
        if not set(found) <= set(allowed) or len(set(found)) < len(found):
            raise argparse.ArgumentTypeError(
                f"must be from {', '.join(allowed)}, each once, got {text}"
            )
        return found

    return of


def bench_parser(
    doc: str,
    *,
    lengths: Sequence[int] = (),
    sizes: Mapping[str, int | tuple[int, str]] | None = None,
    lists: Mapping[str, tuple[Sequence[str], Sequence[str] | None, str]] | None = None,
    device_s: float | None = None,
    timeout_s: float | None = None,
    shrinks: bool = True,
) -> argparse.ArgumentParser:
    """A parser with --csv and what else benches share: --S_list with these default lengths, an
    option per size with its default, or that and what it is, one per list of names (all that may be
    there, the default, and words), --seconds, --timeout, --shrink."""
    parser = doc_parser(doc)
    if lengths:
        parser.add_argument("--S_list", type=integers, default=list(lengths), help="tokens, a,b,c")
    for name, value in (sizes or {}).items():
        value, what = value if isinstance(value, tuple) else (value, "")
        text = f"{what} (default {value})".lstrip()
        parser.add_argument(f"--{name}", type=positive, default=value, help=text)
    for name, (allowed, default, what) in (lists or {}).items():
        text = f"from {','.join(allowed)}{what}"
        parser.add_argument(f"--{name}", type=names(*allowed), default=default, help=text)
    if device_s is not None:
        text = f"device time a row, at most (default {device_s:g})"
        parser.add_argument("--seconds", type=amount, default=device_s, help=text)
    if timeout_s is not None:
        text = f"seconds until a collective that a rank does not join fails (default {timeout_s:g})"
        parser.add_argument("--timeout", type=amount, default=timeout_s, help=text)
    parser.add_argument(
        "--csv", nargs="?", const=CSV_STDOUT, metavar="PATH", type=csv_target,
        help="write the rows as CSV to PATH, or to stdout without PATH",
    )  # fmt: skip
    if shrinks:  # what the runner adds when a bench is tried again after it ran out of memory
        parser.add_argument(
            "--shrink", type=int, default=1, metavar="K", choices=range(1, 65),
            help="divide the sizes by K, 1 to 64, and say so in a note (default 1)",
        )  # fmt: skip
    return parser


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; a usage error for sizes --HQ, --G, --D, ... that no kernel takes together, or
    a malformed flag."""
    args = parser.parse_args(argv)
    if hasattr(args, "HQ"):
        if args.HQ % args.G:
            parser.error(f"--G must divide --HQ, got {args.G} and {args.HQ}")
        for name in ("D", "Dv"):
            if (got := getattr(args, name, 8)) % 8 or got > 256:
                parser.error(f"--{name} must be a multiple of 8 up to 256, got {got}")
        for name in ("l", "l_sel"):
            if (got := getattr(args, name, args.d)) % args.d:
                parser.error(f"--d must divide --{name}, got {args.d} and {got}")
    if isinstance(n_sel := getattr(args, "n_sel", None), int):
        try:
            check_choice(n_sel, 1, 2)  # as nsa_attention has them by default
        except ValueError as error:
            parser.error(f"--{error}")
    check_flags(parser)
    return args


def card_tools(budget: Budget, clock: Callable[[], CudaClock] | None = None) -> dict[str, Any]:
    """The arguments of measure() besides a case, for the current card. Without a card: {}, and a
    note that says so."""
    if not torch.cuda.is_available():
        note("torch sees no CUDA device: nothing was timed", "warn")
        return {}
    gpu = Gpu()
    ceiling = ceilings(gpu, out_dir())
    return {"clock": (clock or CudaClock)(), "gpu": gpu, "ceiling": ceiling, "budget": budget}


def time_cases(
    args: argparse.Namespace,
    tools: Mapping[str, Any],
    columns: Sequence[str],
    cases: Callable[[dict[str, Any]], Iterable[Unbuilt]],
    aliases: Mapping[str, str] | None = None,
    line: Callable[[BenchRow, dict[str, Any]], str] = lambda row, flat: row.line(),
) -> int:
    """Time a bench's cases with `tools` and write their rows; the exit code.

    cases(about) makes them from the columns that say what a row is measured on; aliases: names that
    the bench's CSV has for columns of BenchRow.csv(); line: a row for people.
    """
    if not tools:
        return 3
    spent.begin()

    def lines() -> Iterator[Line]:
        for case in cases(provenance(tools["gpu"])):
            row = measure(case, **{**tools, "budget": case.budget or tools["budget"]})
            flat = row.csv()
            flat |= {name: flat[column] for name, column in (aliases or {}).items()}
            if case.more:
                flat |= case.more(row)
            del case  # with its memory, before the next one is made
            yield row, flat, line(row, flat)

    return write_rows(args, columns, lines())


def write_rows(
    args: argparse.Namespace, columns: Sequence[str], lines: Iterable[Line], quiet: bool = False
) -> int:
    """Say and write each line as it comes; the exit code. quiet: another rank does that."""
    rows, written, failed = [], [], False
    for row, flat, text in lines:
        rows.append(row)
        written.append(flat)
        # A line of several rows has the states of the others in columns of its own.
        failed |= any("FAILED" in str(flat.get(f"{n}status")) for n in ("", "branch_", "more_"))
        if not quiet:
            say(args, text)
            write_so_far(args.csv, written, columns)
    try:
        if not quiet:
            write_csv(args.csv, written, columns)
    except OSError as error:
        note(f"--csv {args.csv} cannot be written: {error.strerror}; its rows are here", "warn")
        sys.stdout.write(csv_text(written, columns))
        failed = True
    if failed:
        return 1
    if rows and all(row.status == "SKIPPED" for row in rows):
        note(f"{rows[0].bench} bench: {'; '.join(rows[0].why)}")
        return 3
    return 0
