"""Errors that the NVLink links of a box count, and by how much they grew during a run."""

from __future__ import annotations

import re

from scripts.oneshot.box import env as box

Counts = dict[str, int]
# A line of `nvidia-smi nvlink -e`; generations have other counters. FEC counts what was corrected,
# by the billion on a sound link; packets, bytes and rates are no errors.
_LINE = re.compile(r"\s*(Link \d+): (?!FEC)([^:]*(?:errors|recovery)[^:]*): (\d+)", re.I)


def parse(text: str) -> Counts:
    """{"GPU 0 Link 3 CRC Errors": count} of the text of `nvidia-smi nvlink -e`."""
    out, gpu = {}, ""
    for line in text.splitlines():
        if head := re.match(r"GPU \d+", line):
            gpu = head[0]
        elif found := _LINE.match(line):
            out[f"{gpu} {found[1]} {found[2]}"] = int(found[3])
    return out


def read(timeout_s: float = 10.0) -> Counts:
    """The counters of every card; {} on a box without NVLink. Raises ProbeFailed."""
    return parse(box.command(["nvidia-smi", "nvlink", "-e"], timeout_s))


def growth(before: Counts, after: Counts) -> list[str]:
    """The counters that rose, each with by how much."""
    return [f"{name} +{n - before[name]}" for name, n in after.items() if n > before.get(name, n)]
