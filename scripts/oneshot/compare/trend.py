"""The `trend` verb: score and times of the score's cases, run by run, the oldest first; * where a
row was UNSTABLE.

A bundle is a folder or a .tgz; any other folder stands for all bundles below it. Each is verified
first, and one that does not verify is named and left out. Runs whose times `compare` would not
hold against each other, such as those of two cards, stand in tables of their own.

Exit code 0: told; 2: usage, or there is no bundle; 5: a bundle was left out. Nothing of a bundle
is executed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.records import doc_parser
from scripts.oneshot.compare.comparison import EXIT_NOT_COMPARABLE, EXIT_USAGE, aligned, box_of
from scripts.oneshot.compare.verify import verified
from scripts.oneshot.record.capture import plain
from scripts.oneshot.record.markdown import pct, us
from scripts.oneshot.record.reading import BundleError, NoBundle, held_to_rules
from scripts.oneshot.record.rows import grouped
from scripts.oneshot.record.score import CASES, row_of, score

HEADS = ("date", "commit", "verdict", "score", *CASES, "no score for want of")


def bundles_at(path: Path) -> list[Path]:
    """The bundles that `path` stands for. Raises NoBundle for a folder without any."""
    marks = ("bundle.json", "events.jsonl")
    if not path.is_dir() or any((path / name).is_file() for name in marks):
        return [path]
    found = {file.parent for name in marks for file in path.rglob(name)} | {*path.rglob("*.tgz")}
    if not found:
        raise NoBundle(f"{path} holds no bundle: no bundle.json, events.jsonl or .tgz")
    return sorted(found)


def line(data: Mapping[str, Any]) -> list[str]:
    """The cells of a run, by HEADS."""
    git, rows = data["git"], held_to_rules(data["bench"], "bench")[0]
    found, times = score(rows, data["health"]), []
    for case in CASES:  # a time needs no ceiling, as a score does
        row = row_of(case, rows) or {"status": "-"}
        mark = {"VALID": "", "UNSTABLE": " *"}.get(row["status"])
        times.append(row["status"] if mark is None else us(row["median_us"]) + mark)
    percent, star = found["percent"], " *" if found["unstable"] else ""
    scored = "-" if percent is None else pct(percent / 100, 1) + star
    lacks = "; ".join(f"{case}: {why}" for case, why in found["missing"].items())
    commit = f"{git.get('short')}{' DIRTY' if git.get('dirty') else ''}"
    return [str(data["started"])[:16], commit, data["verdict"]["status"], scored, *times, lacks]


def main(argv: list[str]) -> int:
    p = doc_parser(__doc__, prog="oneshot trend")
    p.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE_OR_DIR")
    args = p.parse_args(argv)
    runs: dict[str, dict[str, Any]] = {}
    left_out = []
    try:
        for path in [one for given in args.bundles for one in bundles_at(given)]:
            try:
                data, problems = verified(path)
            except NoBundle:
                raise
            except BundleError as error:
                data, problems = {}, [str(error)]
            if problems:
                left_out.append(f"left out: {path} does not verify: {problems[0]}")
            else:  # a run may lie there as a folder and as an archive
                runs.setdefault(data["run_id"], data)
    except NoBundle as error:
        print(plain(str(error))[:500], file=sys.stderr)
        return EXIT_USAGE
    box = lambda data: ", ".join(f"{name} {fact}" for name, fact in box_of(data).items() if fact)
    by_date = sorted(runs.values(), key=lambda data: str(data["started"]))
    for name, of_box in grouped(by_date, box).items():
        print(plain(name), *aligned([HEADS, *map(line, of_box)]), "", sep="\n")
    for text in left_out:
        print(plain(text)[:500], file=sys.stderr)
    return EXIT_NOT_COMPARABLE if left_out else 0
