"""What the same kind of card was measured to do before: the rows of bench/results/.

A row counts where its device has the name of this one, its parity passed and it is VALID. Of two
files the later day speaks. Times of two boxes are shown side by side and never divided; the only
ratios are those that one run measured in pairs.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent.parent / "bench" / "results"
_PREFILL = ("direction", "S", "HQ", "G", "D", "Dv", "l", "d", "l_sel", "n_sel", "w", "dtype")
_DECODE = ("S", "B", "dim", "heads", "groups", "dk", "dv", "l", "d", "l_sel", "n_sel", "w", "dtype")
_KINDS = {"prefill": _PREFILL, "decode": _DECODE, "decode_graph": _DECODE}


@dataclass(frozen=True)
class Pair:
    """NSA beside another implementation, timed in turns in one run."""

    direction: str
    tokens: int
    other: str
    speedup: float
    commit: str


def _rows(pattern: str, device: str) -> Iterator[dict[str, str]]:
    """Rows of the newest folder first."""
    for path in sorted(RESULTS.glob(f"*/{pattern}"), reverse=True):
        try:
            with path.open(newline="", encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        except (OSError, ValueError, csv.Error):  # somebody's own file among ours
            continue
        for row in rows:
            proven = row.get("status") == "VALID" and row.get("parity") == "PASS"
            if proven and row.get("device") == device:
                yield row


def _key(kind: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    return (kind, *(str(row.get(name)) for name in _KINDS[kind]))


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def times(device: str) -> dict[tuple[str, ...], tuple[float, str]]:
    """(microseconds, commit) by the key of `key_of`, of all of NSA on this kind of card."""
    out: dict[tuple[str, ...], tuple[float, str]] = {}
    for pattern, kind, column in (
        ("prefill-*.csv", "prefill", "ms"),
        ("decode_serving-*.csv", "decode", "ms_total"),
        ("decode_serving-*.csv", "decode_graph", "ms_graph"),
    ):
        for row in _rows(pattern, device):
            ms = _number(row.get(column))
            if ms is not None and row.get("op", "full") == "full":
                out.setdefault(_key(kind, row), (1e3 * ms, str(row.get("commit"))))
    return out


def key_of(row: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The key of a bench row of this run, None for a bench of which nothing is committed."""
    kind = str(row.get("bench"))
    return _key(kind, row) if kind in _KINDS else None


def pairs(device: str, like: Mapping[str, Any]) -> list[Pair]:
    """NSA beside other implementations on this kind of card, at the sizes of the prefill row
    `like`, by direction and tokens."""
    sizes = [name for name in _PREFILL if name not in ("direction", "S")]
    out: dict[tuple[str, ...], Pair] = {}
    for row in _rows("peers-*.csv", device):
        speedup, tokens = _number(row.get("speedup")), row.get("S", "")
        other = str(row.get("against"))
        same = all(str(like.get(name)) == row.get(name) for name in sizes)
        if same and speedup is not None and tokens.isdecimal() and other != "dense":
            direction = str(row.get("direction"))
            pair = Pair(direction, int(tokens), other, speedup, str(row.get("commit")))
            out.setdefault((direction, tokens, other), pair)
    return sorted(out.values(), key=lambda p: (p.other, p.direction, p.tokens))
