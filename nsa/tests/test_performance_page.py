"""Numbers of docs/performance.md and README.md are those of the rows that they name."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
# Sections whose tables have a column for each length and direction, and the files they name.
SECTIONS = {
    "Parts, and how far from the floor": [
        "2026-11-28-h200/prefill-01a364a", "2026-11-25-h200/prefill-151e6a4",
    ],
    "Heads of 64, and of 192 and 128": ["2026-11-27-h200/prefill_heads-b89294a"],
    "Other numbers of heads": ["2026-11-27-h200/prefill_padded-cce2370"],
    "Short sequences": ["2026-11-28-h100/prefill_short-0c2afd3"],
    "What neighbours share": ["2026-11-27-h200/prefill_sharing-b89294a"],
}  # fmt: skip
PARTS = {"compressed": "cmp", "choice": "select", "selected": "sel", "selection": "sel",
         "window": "win", "all": "full"}  # fmt: skip


def tables(heading: str) -> list[list[list[str]]]:
    """The tables below a heading of the page: their lines, each a list of cells."""
    text = re.split(r"\n##", PAGE.split(f"# {heading}\n")[1])[0]
    found = re.findall(r"(?:^\|.*\n)+", text, re.M)
    cut = lambda line: [cell.strip() for cell in line.strip()[1:-1].split("|")]
    return [[cut(line) for line in table.splitlines()] for table in found]


def rows_of(*names: str) -> list[dict[str, str]]:
    rows = []
    for name in names:
        assert Path(name).name in PAGE
        with (ROOT / "bench" / "results" / f"{name}.csv").open(encoding="utf-8") as file:
            rows += csv.DictReader(file)
    return rows


def written(exact: str, told: str, times: float = 1.0) -> str:
    """`exact` times `times` with as many digits as the first number of `told`."""
    digits = len(re.match(r"[\d.]+", told)[0].partition(".")[2])
    return f"{float(exact) * times:.{digits}f}"


@pytest.mark.parametrize("section", SECTIONS)
def test_cells_are_of_the_rows_that_the_page_names(section):
    """Each number outside of brackets is one of its length and direction, part and heads, and
    unstable where it has a star."""
    rows = rows_of(*SECTIONS[section])
    cells = [
        (line[0], *column.groups(), cell)
        for head, _, *lines in tables(section)
        for line in lines
        for name, cell in zip(head, line, strict=True)
        if (column := re.match(r"(\d+)(k?) (fwd|bwd)$", name))
    ]
    checked = 0
    for head, n, k, direction, cell in cells:
        S = str(int(n) * (1024 if k else 1))
        mine = [r for r in rows if (r["S"], r["direction"]) == (S, direction)]
        dense = head.startswith("dense")
        if heads := re.match(r"(\d+), (\d+)$", head):
            mine = [r for r in mine if (r["HQ"], r["G"]) == heads.groups()]
        elif part := PARTS.get(re.split("[ ,]", head)[0]):
            mine = [r for r in mine if r["op"] == part]
        for number, star in re.findall(r"(\d+\.?\d*)(\*?)", re.sub(r"\([^)]*\)", "", cell)):
            known = {
                (written(r[key], number), "*" * (r["status"] == "UNSTABLE" and key == "ms"))
                for r in mine
                for key in (("dense_ms",) if dense else ("ms", "dense_ms"))
                if r[key]
            }
            numbers = {n for n, _ in known}
            assert number in numbers, (head, S, direction, cell, sorted(numbers))
            assert dense or (number, star) in known, (head, S, direction, cell)
            checked += 1
    assert checked >= 10


@pytest.mark.parametrize("direction, names", [
    ("fwd", ["2026-11-24-h200/peers-b54578d", "2026-11-24-h200/peers-1550de9",
             "2026-11-23-h200/peers-ebe9cfc"]),
    ("fwd+bwd", ["2026-11-23-h200/peers-50869e4", "2026-11-23-h200/peers-c24bd92"]),
])  # fmt: skip
def test_numbers_beside_others_are_of_rows(direction, names):
    """Times and ratios of NSA and of sfnsa, which took turns."""
    rows = [r for r in rows_of(*names) if (r["against"], r["direction"]) == ("sfnsa", direction)]
    table = tables("Beside others, in one run")[direction == "fwd+bwd"]
    lines = [line for line in table[2:] if line[1] != "-"]
    assert len(lines) >= 5
    for shape, ours, theirs, *_ in lines:
        HQ, G, k = re.match(r"HQ(\d+) G(\d+) (\d+)k", shape).groups()
        assert (ours, theirs) in [
            (written(r["ms"], ours),
             f"{written(r['base_ms'], theirs)} ({float(r['speedup']):.2f}x)")
            for r in rows if (r["HQ"], r["G"], r["S"]) == (HQ, G, str(int(k) * 1024))
        ], shape  # fmt: skip


def test_numbers_of_decode_steps_are_of_rows():
    """Microseconds of steps by graph and of dense attention beside them; of the layer's steps."""
    rows = rows_of("2026-11-25-h200/decode_serving-66a1788")
    rows = {f"{r['B']}, {int(r['S']) // 1024}k": r for r in rows}
    steps, layers = tables("Decode")[0][2:], tables("The layer's step")[0][2:]
    assert len(steps) == len(layers) == 6
    for name, one, _, dense, *_ in steps:
        row = rows[name]
        assert one == written(row["ms_graph"], one, 1e3), name
        base, ratio = re.match(r"(\S+) \((.+)x\)$", dense).groups()
        assert base == written(row["graph_base_ms"], base, 1e3), name
        assert ratio == written(row["graph_speedup"], ratio), name
    for name, *told, above in layers:
        *_, wall = ms = [rows[name][f"ms_module_{how}"] for how in ("graph", "eager", "eager_wall")]
        assert told == [written(exact, one, 1e3) for exact, one in zip(ms, told, strict=True)], name
        assert above == f"{(float(wall) - float(ms[0])) * 1e3:.0f}", name


@pytest.mark.parametrize("card", ["H200", "H100"])
def test_numbers_of_steps_over_fp8_are_of_rows(card):
    """Microseconds of both dtypes of the cache, and their ratio."""
    rows = rows_of(f"2026-11-26-{card.lower()}/decode_fp8-4e55a09")
    rows = [r for r in rows if (r["B"], r["S"]) == ("64", "32768")]
    exact = {r["kv_cache_dtype"]: float(r["ms_total"]) * 1e3 for r in rows}
    bf16, fp8 = exact["auto"], exact["fp8_e4m3"]
    (line,) = [line for line in tables("FP8 caches")[0] if line[0] == card]
    assert line[1:4] == [f"{bf16:.1f}", f"{fp8:.1f}", f"{bf16 / fp8:.2f}x"]


@pytest.mark.parametrize("number, name", [
    (0, "2026-11-26-h200/generate-d2f03a3"), (1, "2026-11-27-h200/generate_vllm-173c216"),
])  # fmt: skip
def test_numbers_of_generated_text_are_of_rows(number, name):
    """First token, step and tokens per second."""
    found = {
        (f"{float(r['prefill_s']) * 1e3:.0f}", f"{float(r['ms_per_step']):.2f}",
         f"{float(r['tokens_per_s']):.0f}"): r for r in rows_of(name)
    }  # fmt: skip
    table = tables("Generating text")[number][2:]
    assert len(table) >= 4
    for what, cache, *told in table:
        row = found[tuple(told[:3])]
        assert (row["cache"] == "auto") == (cache == "bf16"), what
        if number:
            assert (row["B"], row["status"]) == (what, told[3])
        else:
            who, _, attention = row["who"].partition(", ")
            assert who in what.lower() and attention in what
            assert (row["how"] == "graph") == ("graph" in what)


def test_numbers_of_the_readme_are_of_rows():
    """The paper's sizes: NSA, dense attention and their ratio; decode steps as graphs."""
    known = {}
    for r in rows_of("2026-11-28-h200/prefill-01a364a"):
        if r["op"] == "full" and r["dense_ms"]:
            what = {"fwd": "forward", "bwd": "backward"}[r["direction"]]
            known[what, r["S"]] = r["ms"], r["dense_ms"], r["speedup"]
    for r in rows_of("2026-11-25-h200/decode_serving-66a1788"):
        known[r["B"], r["S"]] = r["ms_graph"], r["graph_base_ms"], r["graph_speedup"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "01a364a (decode 66a1788)" in " ".join(readme.split())
    line = r"^\| (?:decode step, )?(forward|backward|\d+).*?(\d+)k.*?\|(.*)\|$"
    table = re.findall(line, readme, re.M)
    assert len(table) == 6
    for what, k, told in table:
        told = [cell.strip() for cell in told.split("|")]
        exact = known[what, str(int(k) * 1024)]
        assert told == [written(x, cell) for x, cell in zip(exact, told, strict=True)], (what, k)
