"""Markdown tables of bench_decode.py's CSV: times, branch shares, reads and the gain over dense.

    python bench/summarize_decode_csv.py decode.csv

A branch's share is its time alone over the whole step's; the three need not add up to 100 %, since
the step also chooses blocks and merges, and runs the branches side by side. A second table, where
the CSV has its columns, shows the step as a CUDA graph and the layer's whole step.
Exit code: 0 printed, 2 no such CSV or not of bench_decode.py, 3 no rows. Standard library only.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

from bench.records import doc_parser, finite_cell, note, read_csv

NUMBERS = (
    "S", "ms_total", "ms_cmp", "ms_sel", "ms_win", "ci_low", "ci_high", "reads_actual_decode",
    "reads_expected_decode", "speedup", "speedup_low", "speedup_high", "base_ms", "wall_ms",
)  # fmt: skip
NEEDED = (*NUMBERS, "baseline", "status", "why", "path", "cache", "device")
# Columns of the second table: (heading, centre, low, high).
MORE = (
    ("graph ms [95 %]", "ms_graph", "graph_low", "graph_high"),
    ("dense graph ms", "graph_base_ms", "", ""),
    ("over dense", "graph_speedup", "graph_speedup_low", "graph_speedup_high"),
    ("layer eager, wall ms", "ms_module_eager_wall", "", ""),
    ("layer eager, device ms", "ms_module_eager", "module_low", "module_high"),
    ("layer graph ms", "ms_module_graph", "module_graph_low", "module_graph_high"),
)
MORE_NUMBERS = tuple(name for _, *names in MORE for name in names if name)
Numbers = Mapping[str, float | None]


def interval(of: Numbers, centre: str, low: str = "", high: str = "", unit: str = "") -> str:
    """`1.23 [1.20, 1.26]`, as far as its parts are known."""
    digits = 2 if "speedup" in centre else 4
    values = [of.get(name) for name in (centre, low, high)]
    if values[0] is None:
        return "-"
    text, *bounds = ("" if value is None else f"{value:.{digits}f}" for value in values)
    return f"{text}{unit}" + (f" [{', '.join(bounds)}]" if all(bounds) else "")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table and an empty one."""
    cells = (heads, ["---"] * len(heads), *rows)
    return [*("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in cells), ""]


def _context(row: Mapping[str, str]) -> str:
    """Tokens of context, and how many new ones a step has, where it has more than one."""
    return row["S"] + (f" T={row['T']}" if row.get("T", "1") != "1" else "")


def _line(row: Mapping[str, str], where: str) -> list[str]:
    of = {name: finite_cell(row, name, where) for name in NUMBERS}
    if of["S"] is None:
        raise ValueError(f"{where}: S is empty")
    shares = []
    for name in ("ms_cmp", "ms_sel", "ms_win"):
        share = f" ({of[name] / of['ms_total']:.0%})" if of[name] and of["ms_total"] else ""
        shares.append(interval(of, name) + share)
    read, due = of["reads_actual_decode"], of["reads_expected_decode"]
    reads = "-" if read is None else f"{read:.0f}"
    if due is not None and read is not None:
        reads += " = expected" if read == due else f" != {due:.0f} expected"
    return [
        _context(row), interval(of, "ms_total", "ci_low", "ci_high"), *shares,
        interval(of, "wall_ms"), reads,
        interval(of, "speedup", "speedup_low", "speedup_high", "x"), row["path"] or "-",
        row["status"],
    ]  # fmt: skip


def _more(rows: Sequence[Mapping[str, str]], path: str | Path) -> list[str]:
    """The table of graphs and of the layer's step; nothing for a CSV that has none of either."""
    if not {*MORE_NUMBERS, "B", "launch_bound"} <= set(rows[0]):
        return []
    lines = []
    for at, row in enumerate(rows, 2):
        of = {name: finite_cell(row, name, f"{path}:{at}") for name in MORE_NUMBERS}
        if any(value is not None for value in of.values()):
            bound = {"True": "yes", "False": "no"}.get(row["launch_bound"], "-")
            cells = [interval(of, *names) for _, *names in MORE]
            lines.append([row["B"] or "-", _context(row), *cells, bound])
    heads = ["B", "S", *(heading for heading, *_ in MORE), "eager step launch-bound"]
    title = "As a CUDA graph, and the layer's whole decode step"
    return [title, "", *table(heads, lines)] if lines else []


def summarize(path: str | Path) -> str | None:
    """The tables, None for a CSV without rows. Raises ValueError for anything that is not one."""
    rows = read_csv(path, NEEDED)
    if not rows:
        return None
    heads = ["S", "ms total [95 %]", "cmp", "sel", "win", "wall ms", "keys read", "over dense",
             "path", "status"]  # fmt: skip
    cells = [_line(row, f"{path}:{at}") for at, row in enumerate(rows, 2)]
    lines = [f"Decode step on {rows[0]['device']}, {rows[0]['cache'] or 'unknown'} cache", ""]
    lines += table(heads, cells)
    lines += _more(rows, path)
    baselines = sorted({row["baseline"] for row in rows if row["baseline"]})
    if baselines:
        lines.append(f"Dense baseline, the fastest right one of each row: {', '.join(baselines)}.")
    lines += [f"S={row['S']} {row['status']}: {row['why']}." for row in rows if row["why"]]
    differ = [row for row in rows if row["reads_actual_decode"] != row["reads_expected_decode"]]
    if differ:
        lines.append("Reads differ from the formula at S=" + ", ".join(r["S"] for r in differ))
    return "\n".join(lines).rstrip() + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = doc_parser(__doc__)
    parser.add_argument("csv", metavar="CSV", help="what bench_decode.py --csv wrote")
    args = parser.parse_args(argv)
    try:
        text = summarize(args.csv)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        print(f"summarize_decode_csv: {error}", file=sys.stderr)
        return 2
    if text is None:
        note(f"decode summary: {args.csv} has no rows")
        return 3
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
