"""What the same kind of card was measured to do before: the proven rows of bench/results/.

A row counts where its device has the name of this one, its parity passed and it is VALID. Of two
files the later day speaks. Standard library only.
"""

import contextlib
import csv
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.records import as_cell

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = ("S", "HQ", "G", "D", "Dv", "l", "d", "l_sel", "n_sel", "w", "dtype")


@dataclass(frozen=True)
class Kind:
    """Committed rows of one bench: their files, the columns that say which case a row is of, and
    those with its baseline's name and milliseconds."""

    files: str
    case: tuple[str, ...]
    baseline: str = "baseline"
    ms: str = "base_ms"


_DECODE = ("B", "S", "dim", "heads", "groups", "dk", "dv", "l", "d", "l_sel", "n_sel", "w", "dtype")
_SEL = ("mode", "N", "H", "D", "Dv", "L", "dist", "streams", "n_sel", "dtype")
KINDS = {
    "prefill": Kind("prefill-*.csv", ("op", "direction", "B", "sharing", *SIZES), ms="dense_ms"),
    "peers": Kind("peers-*.csv", ("against", "peer_commit", "direction", "sharing", *SIZES)),
    "decode": Kind("decode_serving-*.csv", _DECODE),
    "decode_graph": Kind("decode_serving-*.csv", _DECODE, "graph_baseline", "graph_base_ms"),
    "sel": Kind("sel_*.csv", _SEL, ms="ref_ms"),
}
# Of this library: another commit may do them in another way under the same name. So may what
# bench_fa2.py compares with.
OWN = ("packing", "nsa its parts")


@dataclass(frozen=True)
class Record:
    """What a baseline took, in microseconds, and the file that says so."""

    us: float
    file: str


def rows(files: str, device: str) -> Iterator[tuple[Path, dict[str, str]]]:
    """(file, row) of the proven rows of this kind of card, those of the newest folder first."""
    for path in sorted(RESULTS.glob(f"*/{files}"), reverse=True):
        try:
            with path.open(newline="", encoding="utf-8") as file:
                found = list(csv.DictReader(file))
        except (OSError, ValueError, csv.Error):  # somebody's own file among ours
            continue
        for row in found:
            proven = row.get("status") == "VALID" and row.get("parity") == "PASS"
            if proven and row.get("device") == device:
                yield path, row


def key_of(bench: str, row: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Which case of `bench` a row is of, also one that is not committed; None for a bench of which
    nothing is committed."""
    kind = KINDS.get(bench)
    return kind and (bench, *(as_cell(row.get(name)) for name in kind.case))


def number(text: str | None) -> float | None:
    """The number in a cell, None where there is none."""
    with contextlib.suppress(ValueError):
        return float(text or "")


@functools.cache
def _baselines(folder: Path, bench: str, device: str) -> dict[tuple[str, ...], Record]:
    found: dict[tuple[str, ...], Record] = {}
    kind = KINDS[bench]
    for path, row in rows(kind.files, device):
        ms, name = number(row.get(kind.ms)), row.get(kind.baseline)
        if ms is not None and name:
            found.setdefault((*key_of(bench, row), name), Record(1e3 * ms, path.name))
    return found


def baseline(bench: str, columns: Mapping[str, Any], name: str, timer: str) -> Record | None:
    """What the baseline `name` took in the same case on the same kind of card, by events; None
    where nobody recorded it."""
    if bench not in KINDS or name in OWN or timer != "cuda_event":
        return None
    known = _baselines(RESULTS, bench, str(columns.get("device")))
    return known.get((*key_of(bench, columns), name))
