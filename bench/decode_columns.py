"""Columns that a line of bench_decode.py's CSV takes from the rows that it is made of."""

from collections.abc import Mapping, Sequence
from typing import Any

# Columns of BenchRow.csv() of the step's own row; ci_low and ci_high of the line bound its time.
ALIASES = {"ms_total": "ms", "ci_low": "ms_low", "ci_high": "ms_high", "speedup_low": "ci_low",
           "speedup_high": "ci_high"}  # fmt: skip
# Columns of the rows of the step's branches, graph and layer, each row known by one of its own.
PARTS = {
    **{("branch", b): {f"ms_{b}": "ms", f"{b}_low": "ms_low", f"{b}_high": "ms_high"}
       for b in ("cmp", "sel", "win")},
    ("bench", "decode_graph"): {
        "ms_graph": "ms", "graph_low": "ms_low", "graph_high": "ms_high",
        "graph_baseline": "baseline", "graph_base_ms": "base_ms", "graph_speedup": "speedup",
        "graph_speedup_low": "ci_low", "graph_speedup_high": "ci_high"},
    ("step", "module"): {"ms_module_eager": "ms", "module_low": "ms_low", "module_high": "ms_high",
                         "ms_module_eager_wall": "wall_ms"},
    ("step", "module_graph"): {"ms_module_graph": "ms", "module_graph_low": "ms_low",
                               "module_graph_high": "ms_high"},
}  # fmt: skip


def part_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The columns of PARTS from rows as BenchRow.csv() gives them, None where there is no row."""
    line: dict[str, Any] = {}
    for (key, value), names in PARTS.items():
        part = next((row for row in rows if row.get(key) == value), {})
        line |= {name: part.get(of) for name, of in names.items()}
    return line
