"""Follow a running or detached run: its journal, one line per event that matters.

    python -m scripts.oneshot attach [out_dir or bundle folder]

Ends with the run's exit code, or with 4 when the run died; `--once` with 0 while it is running.
"""

from __future__ import annotations

import argparse
import fcntl
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.oneshot.record.capture import plain
from scripts.oneshot.record.journal import read_events
from scripts.oneshot.record.model import RunRecord

ROOT = Path(__file__).resolve().parents[3]


def newest(out: Path) -> Path | None:
    """Return the bundle folder with the youngest journal under `out`, or `out` itself."""
    if (out / "events.jsonl").is_file():
        return out
    found = [p for p in out.glob("*/events.jsonl") if p.is_file()]
    return max(found, key=lambda p: p.stat().st_mtime).parent if found else None


def alive(folder: Path) -> bool:
    """Return True while a run holds the lock of this folder."""
    with suppress(OSError), open(folder.parent / f".{folder.name}.lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def line(event: Mapping[str, Any]) -> str | None:
    """Return the line of an event that matters; None of any other, and of one that no run wrote."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        result = event.get("result", {})
        why = f"  {result['reason']}" if result.get("reason") else ""
        texts = {"note": "{text}", "stage_start": "{stage} ...", "stage_end": "{id} {status}{why}"}
        text = texts[event["ev"]].format_map({**event, **result, "why": why})
        return plain(f"{event['m']:8.1f} s  {text}")
    return None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="oneshot attach", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "artifacts" / "runner")
    parser.add_argument("--once", action="store_true", help="print what is there and end")
    args = parser.parse_args(argv)
    folder = newest(args.out)
    if folder is None:
        print(f"no run under {args.out}")
        return 3
    seen = 0
    while True:
        running = alive(folder)  # before reading, so that nothing is missed after it ended
        events = read_events(folder / "events.jsonl")
        for text in filter(None, map(line, events[seen:])):
            print(text, flush=True)
        seen = len(events)
        if args.once or not running:
            break
        time.sleep(0.5)
    record = RunRecord.replay(events)
    if running:
        stages = [s["id"] for s in record.plan]
        now = (record.running or {}).get("stage")
        at = stages.index(now) + 1 if now in stages else len(record.results)
        print(f"running: stage {at} of {len(stages)}" + (f", {now}" if now else ""))
        return 0
    verdict = record.to_bundle()["verdict"]
    print(plain(verdict["one_line"]))
    print(f"report: {folder / 'report.md'}")
    return verdict["exit_code"]
