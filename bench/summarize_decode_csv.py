"""Markdown tables of bench_decode.py's CSV: times, branch shares, reads and the gain over dense.

    python bench/summarize_decode_csv.py decode.csv

A branch's share is its time alone over the whole step's; the three need not add up to 100 %, since
the step also chooses blocks and merges, and runs the branches side by side. A second table, where
the CSV has its columns, shows the step as a CUDA graph and the layer's whole step.
Exit code: 0 printed, 2 no such CSV or not of bench_decode.py, 3 no rows. Standard library only.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

from bench.records import note, read_csv

BRANCHES = ("cmp", "sel", "win")
NEEDED = (
    "S", "ms_total", "ms_cmp", "ms_sel", "ms_win", "ci_low", "ci_high", "reads_actual_decode",
    "reads_expected_decode", "speedup", "speedup_low", "speedup_high", "baseline", "base_ms",
    "wall_ms", "status", "why", "path", "cache", "device",
)  # fmt: skip
# Of later versions: (heading, centre, low, high).
MORE = (
    ("graph ms [95 %]", "ms_graph", "graph_low", "graph_high"),
    ("dense graph ms", "graph_base_ms", "", ""),
    ("over dense", "graph_speedup", "graph_speedup_low", "graph_speedup_high"),
    ("layer eager, wall ms", "ms_module_eager_wall", "", ""),
    ("layer eager, device ms", "ms_module_eager", "module_low", "module_high"),
    ("layer graph ms", "ms_module_graph", "module_graph_low", "module_graph_high"),
)


def number(row: Mapping[str, str], name: str, where: str) -> float | None:
    """A finite number, None for an empty cell. Raises ValueError that names file, line, column."""
    text = row[name].strip()
    try:
        value = float(text) if text else None
    except ValueError:
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{where}: {name} must be a finite number, got {text!r}")
    return value


def _several(row: Mapping[str, str]) -> str:
    """How many new tokens a step has, where it has more than one; older files do not say."""
    return f" T={row['T']}" if row.get("T", "1") != "1" else ""


def _line(row: Mapping[str, str], where: str) -> list[str]:
    numbers = {
        name: number(row, name, where)
        for name in NEEDED
        if name not in ("baseline", "status", "why", "path", "cache", "device")
    }
    total = numbers["ms_total"]
    if numbers["S"] is None:
        raise ValueError(f"{where}: S is empty")

    def interval(centre: str, low: str, high: str, digits: int, unit: str = "") -> str:
        if numbers[centre] is None:
            return "-"
        text = f"{numbers[centre]:.{digits}f}{unit}"
        if numbers[low] is None or numbers[high] is None:
            return text
        return f"{text} [{numbers[low]:.{digits}f}, {numbers[high]:.{digits}f}]"

    def branch(name: str) -> str:
        ms = numbers[f"ms_{name}"]
        if ms is None:
            return "-"
        return f"{ms:.4f}" + (f" ({ms / total:.0%})" if total else "")

    read, due = numbers["reads_actual_decode"], numbers["reads_expected_decode"]
    reads = "-" if read is None else f"{read:.0f}"
    if due is not None and read is not None:
        reads += " = expected" if read == due else f" != {due:.0f} expected"
    wall = "-" if numbers["wall_ms"] is None else f"{numbers['wall_ms']:.4f}"
    return [
        f"{numbers['S']:.0f}" + _several(row),
        interval("ms_total", "ci_low", "ci_high", 4), *map(branch, BRANCHES), wall, reads,
        interval("speedup", "speedup_low", "speedup_high", 2, "x"), row["path"] or "-",
        row["status"],
    ]  # fmt: skip


def _more(rows: Sequence[Mapping[str, str]], path: str | Path) -> list[str]:
    """The table of graphs and of the layer's step; nothing for a CSV that has none of either."""
    names = [name for _, *three in MORE for name in three if name]
    if not all(name in rows[0] for name in (*names, "B", "launch_bound")):
        return []
    lines = []
    for at, row in enumerate(rows, 2):
        cells = [row["B"] or "-", row["S"] + _several(row)]
        values = {name: number(row, name, f"{path}:{at}") for name in names}
        if all(value is None for value in values.values()):
            continue
        for _, centre, low, high in MORE:
            digits = 2 if "speedup" in centre else 4
            text = "-" if values[centre] is None else f"{values[centre]:.{digits}f}"
            if values[centre] is not None and low and None not in (values[low], values[high]):
                text += f" [{values[low]:.{digits}f}, {values[high]:.{digits}f}]"
            cells.append(text)
        cells.append({"True": "yes", "False": "no"}.get(row["launch_bound"], "-"))
        lines.append("| " + " | ".join(cells) + " |")
    if not lines:
        return []
    head = ["B", "S", *(heading for heading, *_ in MORE), "eager step launch-bound"]
    rule = ["---"] * len(head)
    return ["As a CUDA graph, and the layer's whole decode step", "",
            *("| " + " | ".join(cells) + " |" for cells in (head, rule)), *lines, ""]  # fmt: skip


def summarize(path: str | Path) -> str | None:
    """The tables, None for a CSV without rows. Raises ValueError for anything that is not one."""
    rows = read_csv(path, NEEDED)
    if not rows:
        return None
    table = [_line(row, f"{path}:{at}") for at, row in enumerate(rows, 2)]
    head = ["S", "ms total [95 %]", "cmp", "sel", "win", "wall ms", "keys read", "over dense",
            "path", "status"]  # fmt: skip
    lines = [f"Decode step on {rows[0]['device']}, {rows[0]['cache'] or 'unknown'} cache", ""]
    for cells in (head, ["---"] * len(head), *table):
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines.append("")
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", metavar="CSV", help="what bench_decode.py --csv wrote")
    args = parser.parse_args(argv)
    try:
        table = summarize(args.csv)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        print(f"summarize_decode_csv: {error}", file=sys.stderr)
        return 2
    if table is None:
        note(f"decode summary: {args.csv} has no rows")
        return 3
    print(table, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
