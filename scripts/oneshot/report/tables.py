"""Files that are derived from rows, held against them: the benches' CSVs, health.json, the reports.

Everything is made anew from the rows, by the code that made it in the run, and compared. What other
sources than these made is not compared: another version writes other tables.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.decode_columns import ALIASES, part_columns
from bench.records import BenchRow, as_cell, read_csv
from scripts.oneshot.record.redact import Redactor
from scripts.oneshot.record.rows import NUMBERED, is_number
from scripts.oneshot.report.evidence import Shape

# Names that a bench's table gives to columns of BenchRow.csv().
OTHER_NAMES = {"tri_ms": "ms", "fa2_ms": "ms", "ref_ms": "base_ms", "dense_ms": "base_ms"}
DECODE_WORDS = {"why", "reads_actual", "reads_expected", "launch_bound"}  # of several rows
_FIELDS = {f.name for f in dataclasses.fields(BenchRow)} - {"columns"}


def flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A bench row of a bundle as a CSV has it. Raises ValueError for one that claims too much."""
    extra = {k: v for k, v in row.items() if k not in _FIELDS and k not in ("kind", "stage")}
    return BenchRow(**{k: v for k, v in row.items() if k in _FIELDS}, columns=extra).csv()


def lines_of(rows: list[Mapping[str, Any]], header: list[str]) -> Iterator[dict[str, str]]:
    """The cells that each row gives, as far as rows give them."""
    of_decode = "ms_total" in header
    same = lambda a, b: (a.get("B"), a.get("S")) == (b.get("B"), b.get("S"))
    for row in rows:
        if of_decode and row["bench"] != "decode":
            continue
        given = flat(row)
        given |= {name: given[of] for name, of in (ALIASES if of_decode else OTHER_NAMES).items()}
        if of_decode:
            given = {name: value for name, value in given.items() if name not in DECODE_WORDS}
            given |= part_columns([flat(r) for r in rows if same(r, row)])
        yield {name: as_cell(given[name]) for name in header if name in given}


def check_csvs(data: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Each line of a bench's CSV is what a row gives; where the stage passed, each row has one."""
    for stage in data["stages"]:
        argv = [str(part) for part in stage.get("argv") or ()]
        names = [b for a, b in zip(argv, argv[1:], strict=False) if a == "--csv"]
        name = names[0].rpartition("/")[2] if names else ""
        rows = [row for row in data["bench"] if row.get("stage") == stage["id"]]
        if not name.endswith(".csv") or not rows or not (folder / name).is_file():
            continue
        lost = [row for row in rows if row["status"] not in NUMBERED]
        try:
            with open(folder / name, newline="", encoding="utf-8") as file:
                header = next(csv.reader(file), [])
            table = read_csv(folder / name)
            wanted = list(lines_of(rows, header))
        except (OSError, ValueError, TypeError, csv.Error) as error:
            if not lost:
                yield f"{name} cannot be held against its rows: {error}"
            continue
        left = list(wanted)
        for number, line in enumerate(table, 2):
            differ = lambda w, line=line: [k for k, v in w.items() if line[k] != v]
            if (match := next((w for w in left if not differ(w)), None)) is not None:
                left.remove(match)
            elif wanted:
                nearest = min(wanted, key=lambda w: len(differ(w)))
                told = (
                    f"{k} is {line[k]!r}, and {nearest[k]!r} by its row" for k in differ(nearest)
                )
                yield f"{name}:{number}: {next(told, 'a line twice')}"
        if left and stage["status"] == "PASS":
            yield f"{name} lacks the lines of {len(left)} rows"


def check_health(data: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """health.json is the first card's health row."""
    row = data.get("health")
    try:
        held = json.loads((folder / "health.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for name, value in held.items() if isinstance(row, dict) else ():
        if is_number(value) and row.get(name) != value:
            yield f"health.json: {name} is {value:g}, and {row.get(name)} by its row"


# Lines that depend on when and where a report was made, not on the run.
_OF_ITS_MAKING = re.compile(
    r"^!\[|plots were not drawn|no usable journal|^<details><summary>\d+ files|SHA256SUMS|^$"
)


_FIGURE = re.compile(r"<figure>.*?</figure>\n?", re.S)


def check_texts(data: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The reports are what the journal gives, line by line but for plots; it needs jinja2."""
    from scripts.oneshot.record.outputs import short_report
    from scripts.oneshot.report.render import issue_text, render_page, render_text

    redactor = Redactor({}, hostnames=(), user="", literals=False)

    def kept(text: str) -> list[str]:
        lines = [t for t in text.splitlines() if not _OF_ITS_MAKING.search(t)]
        if text.lstrip().startswith("<"):  # HTML, where a plot leaves its line with the next one
            lines = _FIGURE.sub("", "\n".join(lines)).replace("\n", "").split("<")
        return [redactor.text(t) for t in lines]

    made = {
        "report.md": lambda: render_text(data, folder, Shape()),
        "issue.md": lambda: issue_text(data, folder),
        "report.html": lambda: render_page(data, folder),
    }
    for name, make in made.items():
        with suppress(OSError, ImportError):
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            held, right = kept(text), kept(make())
            if held not in (right, kept(short_report(data))):
                pairs = ((a, b) for a, b in zip(held, right, strict=False) if a != b)
                count = f"{len(held)} lines in place of {len(right)}"
                told = next((f"{a[:120]!r} stands for {b[:120]!r}" for a, b in pairs), count)
                yield f"{name} is not what events.jsonl gives: {told}"
