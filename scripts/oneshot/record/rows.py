"""The rows a stage may send, and what a row must show before it is believed.

A child writes one JSON object per line to the pipe NSA_RESULT_FD. `parse_row` holds each row to its
own evidence: here a row can lose its PASS or its numbers, never win them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench import records
from bench.records import NUMBERED, is_number

OUTCOMES = ("passed", "failed", "skipped", "error")
PARITY_STATUSES = ("PASS", "FAIL", "INVALID")
# The kinds of rows, and the fields without which one is none: of a type, or one of these words.
FIELDS: dict[str, dict[str, Any]] = {
    "test": {"nodeid": str, "outcome": OUTCOMES},
    "session": {"tests": int, "ended": bool},
    "parity": {"case": str, "status": PARITY_STATUSES},
    "bench": {"case": str, "status": records.BENCH_STATUSES},
    "metric": {"name": str},
    **{k: {} for k in ("note", "health", "artifact", "progress", "recommend")},
}


class RowError(ValueError):
    """A line on the result channel that is no row."""


_NONFINITE = object()
MAX_ROW_DEPTH = 40


def parse_row(line: bytes | str) -> dict[str, Any]:
    """One line of the result channel as a row; RowError when it is anything else."""
    try:
        row = json.loads(line, parse_constant=lambda _name: _NONFINITE)
    except (ValueError, RecursionError) as error:
        raise RowError(f"not JSON: {error}") from None
    if lacks := why_no_row(row):
        raise RowError(lacks)
    lost: list[str] = []
    row = _finite(row, "", lost)
    check = {"parity": _check_parity, "bench": _check_bench}.get(row["kind"])
    return check(row, lost) if check else row


def why_no_row(row: Any) -> str | None:
    """What `row` lacks of the fields of its kind; None for what every row has that was parsed."""
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        return "not an object with a kind"
    if row["kind"] not in FIELDS:
        return "not an object with a known kind"
    for name, wanted in FIELDS[row["kind"]].items():
        value, words = row.get(name), isinstance(wanted, tuple)
        if value not in wanted if words else type(value) is not wanted:
            said = "|".join(wanted) if words else f"of type {wanted.__name__}"
            return f"a {row['kind']} row needs {name} {said}"
    return None


def _finite(value: Any, path: str, lost: list[str], depth: int = 0) -> Any:
    """`value` with every NaN and infinity as None; their paths are appended to `lost`."""
    if depth > MAX_ROW_DEPTH:
        raise RowError(f"nested deeper than {MAX_ROW_DEPTH}")
    if value is _NONFINITE or (isinstance(value, float) and not math.isfinite(value)):
        lost.append(path)
        return None
    if isinstance(value, dict):
        at = f"{path}." if path else ""
        return {str(k): _finite(v, f"{at}{k}", lost, depth + 1) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v, f"{path}[{i}]", lost, depth + 1) for i, v in enumerate(value)]
    return value


def whys(row: Mapping[str, Any]) -> list[str]:
    """The reasons of a row, whatever a stranger wrote there."""
    why = row.get("why")
    return [str(w) for w in why] if isinstance(why, list) else [str(why)] if why else []


def _check_parity(row: dict[str, Any], lost: list[str]) -> dict[str, Any]:
    """A parity row held to its own evidence: it may lose its PASS here, never win one."""
    why, status = whys(row), row["status"]
    if status == "PASS":
        wrong = records.beyond(row)
        for name in ("mae", "max_abs"):
            if not is_number(row.get(name)):
                wrong.append(f"{name} is missing or not finite")
            elif not is_number(row.get(f"limit_{name}")):
                wrong.append(f"limit_{name} is missing: nothing says that {name} is small enough")
        if lost and not wrong:
            wrong = [f"not finite: {', '.join(lost)}"]
        if wrong:
            status, why = "FAIL", [*why, *wrong]
    requested, launches = row.get("path_requested"), row.get("launches")
    counts = launches.values() if isinstance(launches, dict) else ()
    if not records.path_agrees(requested, row.get("path_taken")):
        status, why = "INVALID", [*why, records.other_path(row)]
    elif str(requested).startswith("triton") and sum(n for n in counts if type(n) is int) <= 0:
        status, why = "INVALID", [*why, "no launch of the named kernel was counted"]
    return {**row, "status": status, "why": why}


def _check_bench(row: dict[str, Any], lost: list[str]) -> dict[str, Any]:
    """A bench row without parity or on the wrong path keeps its case and loses its numbers."""
    why, status = whys(row), row["status"]
    if status in NUMBERED and (wrong := records.unproven(row)):
        status, why = "INVALID", [*why, *wrong]
    if status not in NUMBERED:
        row = {**row, **{name: None for name in records.NUMBERS if name in row}}
    if lost:
        why = [*why, f"not finite: {', '.join(lost)}"]
    if status != "VALID" and not why:
        why = [str(row.get("reason") or "no reason was given")]
    return {**row, "status": status, "why": why}


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Return the items by their key, in the order in which the keys first appear."""
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def test_counts(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    counts = Counter(row["outcome"] for row in rows if row["kind"] == "test")
    return {outcome: counts[outcome] for outcome in OUTCOMES}


test_counts.__test__ = False  # not a test, whatever its name says to pytest
