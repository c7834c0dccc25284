"""The rows a stage may send, and what a row must show before it is believed.

A child writes one JSON object per line to the pipe NSA_RESULT_FD. `parse_row` holds each row to its
own evidence: here a row can lose its PASS or its numbers, never win them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from bench.records import BENCH_STATUSES, NUMBERS, path_agrees, why_no_time

ROW_KINDS = (
    "test",
    "session",
    "parity",
    "bench",
    "note",
    "metric",
    "health",
    "artifact",
    "progress",
    "recommend",
)


OUTCOMES = ("passed", "failed", "skipped", "error")
PARITY_STATUSES = ("PASS", "FAIL", "INVALID")


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
    if not isinstance(row, dict) or row.get("kind") not in ROW_KINDS:
        raise RowError("not an object with a known kind")
    lost: list[str] = []
    row = _finite(row, "", lost)
    if row["kind"] == "test" and (
        not isinstance(row.get("nodeid"), str) or row.get("outcome") not in OUTCOMES
    ):
        raise RowError("a test row needs nodeid and outcome passed|failed|skipped|error")
    if row["kind"] == "session" and not _is_session(row):
        raise RowError("a session row needs tests and ended")
    if row["kind"] == "parity":
        return _check_parity(row, lost)
    if row["kind"] == "bench":
        return _check_bench(row, lost)
    return row


def _is_session(row: Mapping[str, Any]) -> bool:
    return type(row.get("tests")) is int and isinstance(row.get("ended"), bool)


def is_row(row: Any) -> bool:
    """Has `row` the fields of its kind, as every row that `parse_row` returned has?"""
    if not isinstance(row, dict) or row.get("kind") not in ROW_KINDS:
        return False
    if row["kind"] == "test":
        return isinstance(row.get("nodeid"), str) and row.get("outcome") in OUTCOMES
    if row["kind"] == "session":
        return _is_session(row)
    if row["kind"] == "parity":
        return isinstance(row.get("case"), str) and row.get("status") in PARITY_STATUSES
    if row["kind"] == "bench":
        return isinstance(row.get("case"), str) and row.get("status") in BENCH_STATUSES
    return True


def _finite(value: Any, path: str, lost: list[str], depth: int = 0) -> Any:
    """`value` with every NaN and infinity as None; their paths are appended to `lost`."""
    if depth > MAX_ROW_DEPTH:
        raise RowError(f"nested deeper than {MAX_ROW_DEPTH}")
    if value is _NONFINITE or (isinstance(value, float) and not math.isfinite(value)):
        lost.append(path)
        return None
    if isinstance(value, dict):
        return {
            str(k): _finite(v, f"{path}.{k}".lstrip("."), lost, depth + 1) for k, v in value.items()
        }
    if isinstance(value, list):
        return [_finite(v, f"{path}[{i}]", lost, depth + 1) for i, v in enumerate(value)]
    return value


def _launched(row: Mapping[str, Any]) -> bool:
    launches = row.get("launches")
    return (
        isinstance(launches, dict) and sum(v for v in launches.values() if isinstance(v, int)) > 0
    )


def is_number(value: Any) -> bool:
    """A finite number, which a float can hold; true and false are none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


def whys(row: Mapping[str, Any]) -> list[str]:
    """The reasons of a row, whatever a stranger wrote there."""
    why = row.get("why")
    return [str(w) for w in why] if isinstance(why, list) else [str(why)] if why else []


def _beyond(parity: Mapping[str, Any]) -> list[str]:
    """Which errors of a comparison are over the limits that it names itself."""
    out = [
        f"{name} {parity[name]:g} is over its limit {parity[f'limit_{name}']:g}"
        for name in ("mae", "max_abs")
        if is_number(parity.get(name)) and is_number(parity.get(f"limit_{name}"))
        and parity[name] > parity[f"limit_{name}"]
    ]  # fmt: skip
    margin = parity.get("margin")
    return out + ([f"margin {margin:g} is over 1"] if is_number(margin) and margin > 1 else [])


def _check_parity(row: dict[str, Any], lost: list[str]) -> dict[str, Any]:
    """A parity row held to its own evidence: it may lose its PASS here, never win one."""
    why = whys(row)
    status = row.get("status")
    if not isinstance(row.get("case"), str) or status not in PARITY_STATUSES:
        raise RowError("a parity row needs case and status PASS|FAIL|INVALID")
    if status == "PASS":
        wrong = _beyond(row)
        for name in ("mae", "max_abs"):
            if not is_number(row.get(name)):
                wrong.append(f"{name} is missing or not finite")
            elif not is_number(row.get(f"limit_{name}")):
                wrong.append(f"limit_{name} is missing: nothing says that {name} is small enough")
        if wrong:
            status, why = "FAIL", [*why, *wrong]
        if lost and status == "PASS":
            status, why = "FAIL", [*why, f"not finite: {', '.join(lost)}"]
    requested, taken = row.get("path_requested"), row.get("path_taken")
    if not path_agrees(requested, taken):
        status, why = "INVALID", [*why, f"asked for {requested}, ran {taken}"]
    elif str(requested).startswith("triton") and not _launched(row):
        status, why = "INVALID", [*why, "no launch of the named kernel was counted"]
    return {**row, "status": status, "why": why}


def _check_bench(row: dict[str, Any], lost: list[str]) -> dict[str, Any]:
    """A bench row without parity or on the wrong path keeps its case and loses its numbers."""
    why = whys(row)
    status = row.get("status")
    if not isinstance(row.get("case"), str) or status not in BENCH_STATUSES:
        raise RowError("a bench row needs case and status VALID|UNSTABLE|INVALID|SKIPPED|FAILED")
    if status in ("VALID", "UNSTABLE"):
        parity = row.get("parity")
        if not isinstance(parity, dict) or parity.get("status") != "PASS":
            status, why = "INVALID", [*why, "no passed parity check of this case"]
        elif wrong := _beyond(parity):
            status, why = "INVALID", [*why, *wrong]
        elif not row.get("path_taken"):
            status, why = "INVALID", [*why, "no path is named that ran"]
        elif row.get("path_requested") and not path_agrees(
            row["path_requested"], row.get("path_taken")
        ):
            asked = f"asked for {row['path_requested']}, ran {row.get('path_taken')}"
            status, why = "INVALID", [*why, asked]
        elif not is_number(row.get("median_us")) or row["median_us"] <= 0:
            status, why = "INVALID", [*why, "no finite median above 0"]
        elif untrue := why_no_time(row):
            status, why = "INVALID", [*why, *untrue]
    if status not in ("VALID", "UNSTABLE"):
        row = {**row, **{name: None for name in NUMBERS if name in row}}
    if lost:
        why = [*why, f"not finite: {', '.join(lost)}"]
    if status != "VALID" and not why:
        why = [str(row.get("reason") or "no reason was given")]
    return {**row, "status": status, "why": why}


EMPTY_COUNTS = {"passed": 0, "failed": 0, "skipped": 0, "error": 0}


def test_counts(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many test rows ended which way."""
    counts = dict(EMPTY_COUNTS)
    for row in rows:
        if row["kind"] == "test":
            counts[row["outcome"]] += 1
    return counts


test_counts.__test__ = False  # not a test, whatever its name says to pytest
