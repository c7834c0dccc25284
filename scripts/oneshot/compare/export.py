"""The `export` verb: the bench rows of a bundle as traces of flashinfer-bench, one JSON a line.

    python -m scripts.oneshot export BUNDLE --trace OUT.jsonl

A trace names a definition (what is computed: bench, operation, direction, dtype), a workload (its
sizes), a solution (candidate and commit) and an evaluation. A VALID row is PASSED, a FAILED one
INCORRECT_NUMERICAL where its error is known and RUNTIME_ERROR else; other rows prove nothing and
are left out, as are NCCL's. The reference is the row's baseline, which the log names: for a whole
NSA step that is dense attention, another computation. Relative errors are not measured (NaN).

Exit code 0: written; 2: usage, or no bundle that can be read; 5: it does not verify, or has no
such row.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.records import doc_parser, write_target
from scripts.oneshot.compare.comparison import EXIT_NOT_COMPARABLE, EXIT_USAGE
from scripts.oneshot.compare.verify import verified
from scripts.oneshot.record.capture import plain
from scripts.oneshot.record.journal import dumps
from scripts.oneshot.record.reading import BundleError, held_to_rules
from scripts.oneshot.record.rows import is_number
from scripts.oneshot.streams import say

NAMES = ("bench", "op", "direction", "sharing", "step", "branch", "mode", "dist", "dtype")
AXES = (
    "B S world key_len dim heads HQ groups G dk D dv Dv l d l_sel n_sel w N H L nspans streams"
).split()
LIBS = ("torch", "triton", "cuda", "driver")


def trace(row: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """One VALID or FAILED bench row of the bundle `data` as a trace."""
    git, device, env = data["git"], data["device"], data["env"]
    versions = {**env.get("python", {}), "driver": device.get("driver")}
    hardware = device.get("name") or env.get("system", {}).get("cpu") or "unknown"
    definition = "_".join(["nsa", *(str(row[n]) for n in NAMES if row.get(n) is not None)])
    axes = {n: row[n] for n in AXES if type(row.get(n)) is int and row[n] >= 0}
    stage = next((s for s in data["stages"] if s["id"] == row["stage"]), {})
    parity = row["parity"] if isinstance(row.get("parity"), dict) else {}
    valid, known = row["status"] == "VALID", is_number(parity.get("max_abs"))
    libs = {name: str(versions[name]) for name in LIBS if versions.get(name)}
    told = f"{row['case']}: path {row.get('path_taken')}, reference {row.get('baseline')}"
    evaluation: dict[str, Any] = {
        "status": "PASSED" if valid else "INCORRECT_NUMERICAL" if known else "RUNTIME_ERROR",
        "environment": {"hardware": str(hardware).replace(" ", "_"), "libs": libs},
        "timestamp": str(stage.get("started") or data["started"] or "unknown"),
        "log": "; ".join([told, *row["why"]]),
    }
    if valid or known:
        error = parity["max_abs"] if known else "NaN"
        evaluation["correctness"] = {"max_relative_error": "NaN", "max_absolute_error": error}
    if valid:
        ours, base = row["median_us"], row.get("base_median_us")
        times = {"latency_ms": ours / 1e3}
        if is_number(base):
            times |= {"reference_latency_ms": base / 1e3, "speedup_factor": base / ours}
        evaluation["performance"] = times
    commit = f"{git.get('short')}{'_dirty' if git.get('dirty') else ''}"
    solution = f"{row.get('candidate')}_{commit}".replace(" ", "_")
    workload = {
        "uuid": str(uuid.uuid5(uuid.NAMESPACE_OID, dumps([definition, axes]))),
        "axes": axes, "inputs": {name: {"type": "random"} for name in "qkv"},
    }  # fmt: skip
    return dict(definition=definition, workload=workload, solution=solution, evaluation=evaluation)


def main(argv: list[str]) -> int:
    p = doc_parser(__doc__, prog="oneshot export")
    p.add_argument("bundle", type=Path, help="folder or .tgz of a run")
    p.add_argument("--trace", type=Path, required=True, metavar="OUT.jsonl", help="file to write")
    args = p.parse_args(argv)
    try:
        data, problems = verified(args.bundle)
    except BundleError as error:
        say(plain(str(error))[:500])
        return EXIT_USAGE
    rows = held_to_rules(data["bench"], "bench")[0]
    kept = [r for r in rows if r["status"] in ("VALID", "FAILED") and r.get("bench") != "nccl"]
    if problems or not kept:
        lacks = "has no VALID or FAILED row of a kernel"
        why = f"does not verify: {problems[0]}" if problems else lacks
        say(plain(f"{args.bundle} {why}")[:500])
        return EXIT_NOT_COMPARABLE
    try:
        write_target(args.trace, "".join(dumps(trace(row, data)) + "\n" for row in kept))
    except OSError as error:
        say(f"--trace wants a file that can be written, got {args.trace}: {error.strerror}")
        return EXIT_USAGE
    say(f"{len(kept)} traces in {args.trace}; rows left out: {len(rows) - len(kept)}")
    return 0
