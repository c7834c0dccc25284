"""One score of a run: the geometric mean of roofline time over measured time, of a fixed set.

The roofline time of a case is what its bytes take at the rate of the device copy, or its useful
FLOPs at that of the bf16 matmul, whichever is longer; both rates are those that the run's own
health stage measured. There is no score unless every case of the set has a row that is VALID or
UNSTABLE; it names the cases of the latter kind.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.oneshot.record.rows import NUMBERED, is_number, whys

_SIZES = dict(B=1, l=32, d=16, l_sel=64, n_sel=16, w=512, dtype="bf16")
_PREFILL = dict(_SIZES, bench="prefill", op="full", sharing=None, HQ=64, G=4, D=128, Dv=128)
_DECODE = dict(_SIZES, bench="decode_graph", heads=64, groups=4, dk=128, dv=128)
CASES: dict[str, dict[str, Any]] = {  # what the row of each case holds
    **{f"prefill {k}k {words}": dict(_PREFILL, direction=way, S=1024 * k)
       for words, way in (("forward", "fwd"), ("backward", "bwd")) for k in (8, 32)},
    **{f"decode {k}k": dict(_DECODE, S=1024 * k) for k in (8, 64)},
}  # fmt: skip
RATES = (("bytes", "copy_gbs", 1e3), ("flops", "gemm_bf16_tflops", 1e6))


def row_of(case: str, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The bench row of a case, the best one if there are several; None without one."""
    mine = [r for r in rows if all(r.get(k) == v for k, v in CASES[case].items())]
    return min(mine, key=lambda r: {"VALID": 0, "UNSTABLE": 1}.get(r["status"], 2), default=None)


def _usable(value: Any) -> bool:
    """A number that can be multiplied and divided by others, also in a stranger's bundle."""
    return is_number(value) and 1e-9 < value < 1e30


def score(rows: Sequence[Mapping[str, Any]], health: Mapping[str, Any] | None) -> dict[str, Any]:
    """{"percent": the score or None, "cases": {case: {"us", "roofline_us"}}, "missing" and
    "unstable": {case: why}} of bench rows and the health row beside them."""
    rates = {rate: (health or {}).get(rate) for _, rate, _ in RATES}
    cases, missing, unstable = {}, {}, {}
    for case in CASES:
        row = row_of(case, rows)
        if row is None:
            missing[case] = "not timed"
        elif row["status"] not in NUMBERED:
            missing[case] = f"{row['status']}: {'; '.join(whys(row))}"
        elif not all(map(_usable, rates.values())):
            missing[case] = "the card's own copy and matmul were not measured"
        elif not all(_usable(row.get(name)) for name in ("median_us", "bytes", "flops")):
            missing[case] = "its row lacks time, bytes or FLOPs"
        else:
            ideal = max(row[amount] / rates[rate] / scale for amount, rate, scale in RATES)
            cases[case] = {"us": row["median_us"], "roofline_us": ideal}
            if row["status"] == "UNSTABLE":
                unstable[case] = "; ".join(whys(row))
    found: dict[str, Any] = dict(percent=None, cases=cases, missing=missing, unstable=unstable)
    if not missing:  # rounded, for logarithms differ in the last bit from one libm to another
        shares = [one["roofline_us"] / one["us"] for one in cases.values()]
        found["percent"] = round(100 * statistics.geometric_mean(shares), 4)
    return found
