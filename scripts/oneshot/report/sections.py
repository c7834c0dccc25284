"""The sections of the report under its first screen, in the order of what a reader decides by."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.oneshot.box import cards
from scripts.oneshot.record.markdown import cell, code, num, pct, span, sparkline
from scripts.oneshot.record.reading import read_text
from scripts.oneshot.record.rows import grouped, is_number
from scripts.oneshot.report import evidence
from scripts.oneshot.report.about import environment, files, health, stages, this_run
from scripts.oneshot.report.blocks import Fold, Section, Table, View, paragraphs
from scripts.oneshot.report.failures import failures
from scripts.oneshot.report.thresholds import fa2, threshold


def gpus(view: View) -> Section:
    table = cards.section(view.data, view.rows["parity"])
    heads = "GPU|card|copy GB/s (of nominal)|bf16 TFLOP/s (of nominal)|parity|verdict"
    ran = "The benches ran on the first; NCCL and context parallelism on all that are good."
    text = f"Health and parity of every card, measured alone. {ran}"
    rows = [list(row.values()) for row in table]
    return Section("GPUs", rows and [text, Table(heads, rows)])


LEGEND = """
A time is a median with its 95 % confidence interval; a speedup is the median, with its interval, of
ratios of baseline time to ours that were measured side by side, so more than 1 is faster; it need
not be the quotient of the two medians shown.

Noise floor: {floor}. A ratio within it, or whose interval holds 1, prints "no difference
measurable".

A row is UNSTABLE when the card throttled, when the last third of the samples left the first by over
2 %, when their middle half spreads over 3 % of the median and the median is not known to 1 % (or
over 15 %, however well it is known), or with fewer than 10 samples.

Launch bound: the host takes over 1.2 times the device's time, or left gaps in most batches; wall is
its time per call, calling back to back. A wall time was taken once and has no interval; between
runs it differs by up to twice, so it is shown roughly and decides nothing.

Ceiling: share of the nearer one, memory or compute, {ceiling}.

Only VALID and UNSTABLE rows have numbers; each of them passed parity, and on the paths triton and
fa2 the launches that prove the path were counted.
"""
ORACLE = """
Errors against an fp64 oracle; margin is error over limit, so below 1 is right. A Triton row is PASS
only when launches of its kernels were counted, and what ran is named by them; for the other routes
it is the route that the call reported.
"""
TOYS = """
Small models: they prove that a step runs, and say little of a server. Serving sizes are timed by
the stage `decode_serving`, or by `bench/bench_decode.py --preset serving`.
"""


def _legend(view: View) -> Fold:
    bench = view.rows["bench"]
    timers = [(r["cache"], r["timer"]) for r in bench if r.get("cache") and r.get("timer")]
    clocks = "; ".join(dict.fromkeys(f"{cache}, {timer}" for cache, timer in timers))
    measured = f"{pct(view.floor, 1)} (same code against itself)"
    ceiling = evidence.ceiling_words(view.data["scope"], view.data["health"])
    floor = "not measured" if view.floor is None else measured
    lines = paragraphs(LEGEND, floor=floor, ceiling=ceiling)
    lines += [f"Cache and clock: {cell(clocks)}."] if clocks else []
    precisions = dict.fromkeys(str(r["precision"]) for r in bench if r.get("precision"))
    lines += [f"Precision: {cell(text)}." for text in precisions]
    return Fold("How to read the tables of times", [lines])


def speed(view: View) -> Section:
    apart = lambda r: r.get("bench") in evidence.APART or evidence.is_toy(r)
    blocks = evidence.bench_blocks(view, lambda r: not apart(r))
    if blocks:
        blocks += [*view.pictures("roofline"), None if view.shape.issue else _legend(view)]
    return Section("Speed at real sizes", blocks)


def toys(view: View) -> Section:
    keep = lambda r: evidence.is_toy(r) and r.get("bench") not in evidence.APART
    blocks = evidence.bench_blocks(view, keep)
    blocks = [*paragraphs(TOYS), *blocks] if blocks else []
    return Section("Speed at toy sizes", blocks, fold=True, issue=False)


def parity(view: View) -> Section:
    rows, shape = view.rows["parity"], view.shape
    bad = [r for r in rows if r["status"] != "PASS"]
    blocks: list[Any] = []
    if bad:
        blocks += ["Wrong or without proof:", evidence.parity_table(bad, shape, ("dtype",))]
    if len(bad) > shape.rows:
        blocks.append(f"and {len(bad) - shape.rows} more, in bundle.json")
    if rows and not shape.issue:
        heads = "op|passed|closest to its limit|MAE|max-abs|worst row|margin|paths taken"
        every = evidence.parity_table(rows, shape, ("why",))
        blocks += [*paragraphs(ORACLE), Table(heads, list(evidence.parity_ops(rows, shape)))]
        blocks.append(Fold(f"All {len(rows)} parity rows", [every]))
    return Section("Parity", blocks if shape.issue else [*blocks, *by_file(view)])


def by_file(view: View) -> list[Fold]:
    """Result and time of the tests of each file; several processes have taken the files apart."""
    in_files = [test for test in view.rows["test"] if ".py::" in test["nodeid"]]
    name = lambda test: test["nodeid"].partition(".py::")[0].rpartition("/")[2]
    rows = []
    for file, tests in sorted(grouped(in_files, name).items()):
        outcomes = Counter(str(test["outcome"]) for test in tests)
        spent = sum(t["duration_s"] for t in tests if is_number(t.get("duration_s")))
        rows.append([code(file, 80), evidence.counts_text(outcomes), span(spent)])
    table = Table("tests|result|time, the processes' together", rows)
    return [Fold(f"Tests of {len(rows)} files", [table])] if rows else []


def losses(folder: Path) -> list[tuple[int, float, float | None]]:
    """(step, loss, held-out loss or None) of train.jsonl; lines that are no such row are left."""
    out = []
    for line in (read_text(folder, "train.jsonl") or "").splitlines():
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            row = json.loads(line)
            if is_number(row["loss"]) and is_number(row["step"]):
                val = row.get("val_loss")
                out.append((int(row["step"]), row["loss"], val if is_number(val) else None))
    return out


def training(view: View) -> Section:
    stage = next((s for s in view.data["stages"] if s["id"] == "train_showcase"), None)
    if stage is None:
        return Section("Training showcase", [])
    mine = [m for m in view.data["metrics"] if m.get("stage") == stage["id"]]
    metrics = {str(m.get("name")): (m.get("value"), m.get("unit")) for m in mine}
    first, last, rate = (
        num(metrics.get(name, (None,))[0]) for name in ("loss_first", "loss_last", "steps_per_s")
    )
    why = f": {cell(stage.get('reason'))}" if stage["status"] != "PASS" else ""
    loss = f" Loss {first} → {last}, {rate} steps/s." if first != "-" else ""
    text = f"{stage['status']}{why}.{loss}"
    curve = losses(view.folder)
    spark = sparkline([loss for _, loss, _ in curve])
    reason = lambda r: f": {cell(r['reason'])}" if r.get("reason") else ""
    tests = [r for r in view.rows["test"] if r["stage"] == stage["id"]]
    checks = [f"{code(r['nodeid'].split('::')[-1], 80)} {r['outcome']}{reason(r)}" for r in tests]
    unit = lambda u: "" if u in (None, "", "1") else cell(u, 20)
    shown = list(metrics.items())[:200]
    values = [f"{cell(name, 80)}: {num(v)} {unit(u)}".rstrip() for name, (v, u) in shown]
    drawn = spark and f"`{spark}` ({len(curve)} steps with a finite loss)"
    blocks: list[Any] = [text, drawn, checks]
    blocks += [*view.pictures("loss"), values and Fold(f"All {len(metrics)} metrics", [values])]
    return Section("Training showcase", blocks, fold=True, issue=False)


# What a reader decides by comes first.
SECTIONS = (failures, gpus, speed, threshold, fa2, toys, parity)
SECTIONS += (health, training, stages, this_run, environment, files)


def sections(view: View) -> list[Section]:
    """Those sections that have something to say; in an issue all but the failures are folded."""
    found = [s for make in SECTIONS if (s := make(view)).blocks]
    if not view.shape.issue:
        return found
    return [Section(s.title, s.blocks, fold=s.title != "Failures") for s in found if s.issue]
