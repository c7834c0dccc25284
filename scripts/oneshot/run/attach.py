"""Follow a running or detached run: its journal, one line per event that matters.

    python -m scripts.oneshot attach [out_dir or bundle folder]

Ends with the run's exit code, or with 4 when the run died; `--once` with 0 while it is running.
"""

from __future__ import annotations

import argparse
import fcntl
import time
from contextlib import suppress
from pathlib import Path

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
        for event in events[seen:]:
            text = event["text"] if event["ev"] == "note" else None
            if event["ev"] == "stage_start":
                text = f"{event['stage']} ..."
            elif event["ev"] == "stage_end":
                result = event["result"]
                why = f"  {result['reason']}" if result.get("reason") else ""
                text = f"{result['id']} {result['status']}{why}"
            if text is not None:
                print(f"{event['m']:8.1f} s  {text}", flush=True)
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
    print(verdict["one_line"])
    print(f"report: {folder / 'report.md'}")
    return verdict["exit_code"]
