"""Numbers of docs/performance.md and README.md are those of the rows that they name."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
RESULTS = ROOT / "bench" / "results"
# Sections whose tables have a column for each length and direction, and the files they name.
SECTIONS = {
    "Parts, and how far from the floor": [
        "2026-11-27-h200/prefill-5a97c46", "2026-11-25-h200/prefill-151e6a4",
    ],
    "Heads of 64, and of 192 and 128": ["2026-11-27-h200/prefill_heads-b89294a"],
    "Other numbers of heads": ["2026-11-27-h200/prefill_padded-cce2370"],
    "Short sequences": ["2026-11-28-h100/prefill_short-0c2afd3"],
    "What neighbours share": ["2026-11-27-h200/prefill_sharing-b89294a"],
}  # fmt: skip
COLUMN = re.compile(r"(\d+)(k?) (fwd|bwd)$")
PARTS = {"compressed": "cmp", "choice": "select", "selected": "sel", "selection": "sel",
         "window": "win", "all": "full"}  # fmt: skip


def cells(section: str) -> Iterator[tuple[str, int, str, str]]:
    """(head of the row, length, direction, cell) of a section's tables in milliseconds."""
    text = PAGE.split(f"### {section}\n")[1].split("\n### ")[0]
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        lines = [line.strip()[1:-1].split("|") for line in table.splitlines()]
        head, _, *rows = [[cell.strip() for cell in line] for line in lines]
        for row in rows:
            for name, cell in zip(head, row, strict=True):
                if found := COLUMN.match(name):
                    n, k, direction = found.groups()
                    yield row[0], int(n) * (1024 if k else 1), direction, cell


def rows_of(names: list[str]) -> list[dict[str, str]]:
    rows = []
    for name in names:
        assert Path(name).name in PAGE
        with (RESULTS / f"{name}.csv").open(encoding="utf-8") as file:
            rows += csv.DictReader(file)
    return rows


@pytest.mark.parametrize("section", SECTIONS)
def test_cells_are_of_the_rows_that_the_page_names(section):
    """Each number outside of brackets is one of its length and direction, part and heads, and
    unstable where it has a star."""
    rows = rows_of(SECTIONS[section])
    checked = 0
    for head, S, direction, cell in cells(section):
        mine = [r for r in rows if (int(r["S"]), r["direction"]) == (S, direction)]
        dense = head.startswith("dense")
        if heads := re.match(r"(\d+), (\d+)$", head):
            mine = [r for r in mine if (r["HQ"], r["G"]) == heads.groups()]
        elif part := PARTS.get(re.split("[ ,]", head)[0]):
            mine = [r for r in mine if r["op"] == part]
        for number, star in re.findall(r"(\d+\.?\d*)(\*?)", re.sub(r"\([^)]*\)", "", cell)):
            digits = len(number.partition(".")[2])
            known = {
                (f"{float(r[key]):.{digits}f}", "*" * (r["status"] == "UNSTABLE" and key == "ms"))
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
    rows = [r for r in rows_of(names) if (r["against"], r["direction"]) == ("sfnsa", direction)]
    text = PAGE.split("### Beside others")[1].split("\n### ")[0]
    table = re.findall(r"(?:^\|.*\n)+", text, re.M)[direction == "fwd+bwd"]
    checked = 0
    for line in table.splitlines()[2:]:
        shape, ours, theirs = [cell.strip() for cell in line[1:-1].split("|")][:3]
        if ours == "-":
            continue
        HQ, G, k = re.match(r"HQ(\d+) G(\d+) (\d+)k", shape).groups()
        mine = [r for r in rows if (r["HQ"], r["G"], r["S"]) == (HQ, G, str(int(k) * 1024))]
        digits = [len(x.partition(".")[2]) for x in (ours, theirs.split()[0])]
        assert (ours, theirs) in {
            (f"{float(r['ms']):.{digits[0]}f}",
             f"{float(r['base_ms']):.{digits[1]}f} ({float(r['speedup']):.2f}x)") for r in mine
        }, (line, [(r["ms"], r["base_ms"], r["speedup"]) for r in mine])  # fmt: skip
        checked += 1
    assert checked >= 5


def test_numbers_of_the_readme_are_of_rows():
    """The paper's sizes: NSA, dense attention and their ratio; decode steps as graphs."""
    rows = rows_of(["2026-11-27-h200/prefill_sharing-b89294a"])
    decode = rows_of(["2026-11-25-h200/decode_serving-151e6a4"])
    known = {
        (r["direction"], int(r["S"]) // 1024): (r["ms"], r["dense_ms"], r["speedup"])
        for r in rows
        if r["op"] == "full" and r["dense_ms"]
    } | {
        (r["B"], int(r["S"]) // 1024): (r["ms_graph"], r["graph_base_ms"], r["graph_speedup"])
        for r in decode
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "b89294a (decode 151e6a4)" in " ".join(readme.split())
    table = re.findall(
        r"^\| (forward|backward|decode step, (\d+)).*?(\d+)k.*?\|(.*)\|$", readme, re.M
    )
    assert len(table) == 6
    for what, batch, k, told in table:
        key = (batch or {"forward": "fwd", "backward": "bwd"}[what], int(k))
        for number, exact in zip(told.split("|"), known[key], strict=True):
            number = number.strip()
            assert number == f"{float(exact):.{len(number.partition('.')[2])}f}", (what, k)
