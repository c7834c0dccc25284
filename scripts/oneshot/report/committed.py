"""What the report shows of bench/recorded.py: times and pairs of the same kind of card.

Times of two boxes are shown side by side and never divided; the only
ratios are those that one run measured in pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench import recorded
from bench.recorded import KINDS, number, rows


def times(device: str) -> dict[tuple[str, ...], tuple[float, str]]:
    """(microseconds, commit) by the key of `key_of`, of all of NSA on this kind of card."""
    out: dict[tuple[str, ...], tuple[float, str]] = {}
    for bench, column in (("prefill", "ms"), ("decode", "ms_total"), ("decode_graph", "ms_graph")):
        for _, row in rows(KINDS[bench].files, device):
            ms = number(row.get(column))
            if ms is not None and row.get("op", "full") == "full":
                out.setdefault(recorded.key_of(bench, row), (1e3 * ms, str(row.get("commit"))))
    return out


def pairs(device: str, like: Mapping[str, Any]) -> dict[tuple[str, str, int], float]:
    """How many times as long other implementations took as NSA, timed in turns in one run, by
    (implementation, direction, tokens); on this kind of card, at the sizes of the prefill row
    `like`."""
    sizes = [name for name in recorded.SIZES if name != "S"]
    out: dict[tuple[str, str, int], float] = {}
    for _, row in rows(KINDS["peers"].files, device):
        speedup, tokens = number(row.get("speedup")), row.get("S", "")
        other = str(row.get("against"))
        same = all(str(like.get(name)) == row.get(name) for name in sizes)
        same &= (row.get("op") or "full") == "full" and not row.get("sharing")
        if same and speedup is not None and tokens.isdecimal() and other != "dense":
            out.setdefault((other, str(row.get("direction")), int(tokens)), speedup)
    return dict(sorted(out.items()))
