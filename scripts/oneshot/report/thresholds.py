"""The thresholds that bench rows carry: Triton's for selection called alone, and FA-2's lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.records import MIN_SPEEDUP, carries
from scripts.oneshot.record.markdown import cell, code, is_interval
from scripts.oneshot.record.rows import NUMBERED, grouped, is_number
from scripts.oneshot.report.blocks import Section, Table, View, paragraphs
from scripts.oneshot.report.evidence import bench_blocks, rough_ratio


def _walls(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a host sees of the launch-bound ones among `rows`; empty without any."""
    seen = lambda r: r.get("launch_bound") and is_number(r.get("wall_speedup"))
    bound = [r for r in rows if r["status"] == "VALID" and seen(r)]
    if not bound:
        return ""
    worst = min(bound, key=lambda r: r["wall_speedup"])
    least = f"{rough_ratio(worst['wall_speedup'])} at the least ({code(worst['case'])})"
    return f"; {len(bound)} of its {len(rows)} cells are launch bound: as a host sees them, {least}"


def threshold_cells(rows: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """What a threshold is made of, by ascending selected length: rows of routes, not of kernels."""
    routes = [r for r in rows if r.get("bench") == "sel" and r.get("mode") == "route"]
    lengths = sorted({r["L"] for r in routes if isinstance(r.get("L"), int)})
    return {length: [r for r in routes if r.get("L") == length] for length in lengths}


def routes_at(rows: Sequence[Mapping[str, Any]], least: float) -> dict[str, Any]:
    """The cells of one length: how many there are and carry a threshold, the smallest lower bounds
    by the device's time and by wall, and the case of the smallest of all; "-" without any."""
    both = lambda r: is_interval(r.get("speedup_ci95")) and is_interval(r.get("wall_speedup_ci95"))
    timed = [r for r in rows if r["status"] in NUMBERED and both(r)]
    found = [(r["speedup_ci95"][0], r["wall_speedup_ci95"][0], r) for r in timed]
    worst = min(found, key=lambda one: min(one[:2]), default=None)
    carry = [r for low, wall, r in found if carries(r["status"], (low, wall), least)]
    return {
        "cells": len(rows), "carry": len(carry), "holds": len(carry) == len(rows) > 0,
        "low": f"{min(low for low, _, _ in found):.2f}x" if worst else "-",
        "wall": f"{min(wall for _, wall, _ in found):.2f}x" if worst else "-",
        "case": code(worst[2]["case"]) if worst else "-",
    }  # fmt: skip


def recommendation(data: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The proposed threshold with what speaks for it: the smallest lower bounds per length."""
    proposal = data["recommend"]
    least = (proposal or {}).get("min_speedup")
    least = least if is_number(least) else MIN_SPEEDUP
    cells = threshold_cells(rows).items()
    evidence = [{"L": length, **routes_at(mine, least)} for length, mine in cells]
    out = {"evidence": evidence, "text": "", "doubt": "", "scope": ""}
    if data["scope"] == "cpu":
        out["text"] = "None: a CPU says nothing about the threshold of a GPU."
        return {**out, "evidence": []}
    if proposal is None:
        stage = next((s for s in data["stages"] if s["id"] == "threshold"), None)
        why = f" ({stage['status']}: {cell(stage['reason'])})" if stage and stage["reason"] else ""
        out["text"] = f"None: no threshold was proposed in this run{why}. Keep the configured one."
        return out
    value, blocking = proposal.get("sel_triton_min_L"), proposal.get("blocking_case")
    words = cell(proposal.get("confidence") or proposal.get("text") or "")
    if type(value) is int:
        out["text"] = f"**`sel_triton_min_L: {value}`** ({words})"
        against = [e for e in evidence if e["L"] >= value and not e["holds"]]
        if against or not any(e["L"] >= value for e in evidence):
            lengths = ", ".join(str(e["L"]) for e in against) or "any L"
            bounds = f"{least:g}x, of {2 * least:g}x where it is UNSTABLE"
            text = f"not every cell of L = {lengths} has lower bounds of {bounds}"
            out["doubt"] = f"The rows of this run do not carry it alone: {text}."
    else:
        out["text"] = f"**None: no length that was timed qualifies, so keep what is set** ({words})"
    if blocking:
        out["text"] += f"; stopped by {code(blocking)}"
    return {**out, "scope": _scope(rows)}


def _scope(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the threshold decides, and what it does not."""
    text = ("The threshold is about `selection_attention` called alone: where a row may select at "
            "least that many keys, by the shapes of the call, Triton serves, and packing plus SDPA "
            "below. Both are timed as a caller gets them, Triton with the cleaning of ranges, by "
            "the device's kernels and by wall. Rows of `bench_sel_triton.py` in other modes "
            "compare kernels on packed keys and decide nothing. `nsa_attention`, the layers and "
            "decode steps have no threshold")  # fmt: skip
    found = []
    for words, name, op in (("prefill", "prefill", "full"), ("decode step", "decode", None)):
        mine = [r for r in rows if r.get("bench") == name and op in (None, r.get("op"))]
        mine = [r for r in mine if r["status"] == "VALID" and r.get("path_requested") == "triton"]
        if ratios := sorted(r["speedup"] for r in mine if is_number(r.get("speedup"))):
            found.append(f"{words} {ratios[0]:.2f}x to {ratios[-1]:.2f}x")
    beside = "; against dense attention at the sizes timed here: " if found else ""
    return f"{text}{beside}{', '.join(found)}."


# What serves without FA-2 at each value of Triton's switch: (baseline, value, words, what to do
# where a length is named). Without one the advice is to leave FA-2 off.
FA2_SETTINGS = (
    ("sdpa", "0", "SDPA is what is left", "set `NSA_USE_FA2=1` with the lengths that are named"),
    ("triton", "1", "the branch's Triton kernel serves, and FA-2, which comes before it, takes "
     "`nsa_attention` out of its fused operator", "leave `NSA_USE_FA2=0` unless the branches are "
     "called one by one, with the lengths that are named"),
)  # fmt: skip


def fa2_lengths(data: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The proposed minimum lengths of FA-2, in keys, for Triton off and on, and what was measured
    per branch, baseline and length, as rows of a table."""
    of_fa2 = [r for r in rows if r.get("bench") == "fa2" and isinstance(r.get("key_len"), int)]
    key = lambda row: (str(row.get("branch")), str(row.get("baseline")), row["key_len"])
    groups, evidence = grouped(of_fa2, key), []
    for (branch, baseline, keys), mine in sorted(groups.items()):
        good = [r for r in mine if r["status"] == "VALID" and is_interval(r.get("speedup_ci95"))]
        low = min(good, key=lambda r: r["speedup_ci95"][0], default=None)
        shown = ["-", "-", "-"]
        if low:
            least = f"{low['speedup_ci95'][0]:.2f}x"
            shown = [least, cell(baseline, 60), code(low["case"])]
        evidence.append([cell(branch, 20), keys, f"{len(good)}/{len(mine)}", *shown])
    proposal, settings = data["recommend"] or {}, []
    for baseline, value, words, advice in FA2_SETTINGS:
        more, texts, named = "_triton" if baseline == "triton" else "", [], False
        for branch in ("win", "cmp"):
            why = proposal.get(f"fa2_{branch}{more}_why")
            least = proposal.get(f"fa2_min_len_{branch}{more}")
            found = type(least) is int
            held = [r for r in of_fa2 if key(r)[:2] == (branch, baseline)]
            held = [r for r in held if not found or r["key_len"] >= least]
            told = (f" ({cell(why)})" if why else "") + _walls(held)
            named |= found
            if found:
                texts.append(f"`fa2_min_len_{branch}: {least}` keys{told}")
            elif why:
                texts.append(f"no `fa2_min_len_{branch}`{told}")
        head = f"With `NSA_USE_TRITON_SEL={value}`, {words}: "
        head += advice if named else "leave `NSA_USE_FA2=0`"
        settings += [{"head": head, "lengths": texts}] if texts else []
    return {"evidence": evidence, "settings": settings}


FA2 = """
The sliding and the compressed branch each have a least number of keys for FA-2. It is the smallest
one measured from which on, at it and at every longer one, FA-2 is at least 1.2x as fast as its
baseline (the lower bound of the interval counts). The baseline is what would run without FA-2, and
that depends on Triton's switch.
"""


def threshold(view: View) -> Section:
    found = recommendation(view.data, view.rows["bench"])
    heads = "L|cells that carry it|smallest lower bound, device|by wall|case of the smallest"
    shown = lambda e: [e["L"], f"{e['carry']}/{e['cells']}", e["low"], e["wall"], e["case"]]
    rows = list(map(shown, found["evidence"]))
    blocks = [found["text"], found["doubt"], found["scope"], rows and Table(heads, rows)]
    if not view.shape.issue:
        blocks += bench_blocks(view, lambda r: r.get("bench") == "sel")
    title = "Selection called alone, and its threshold"
    return Section(title, blocks, fold=True, issue=bool(rows))


def fa2(view: View) -> Section:
    found = fa2_lengths(view.data, view.rows["bench"])
    rows, blocks = found["evidence"], []
    if rows or found["settings"]:
        heads = "branch|keys|valid cells|smallest lower bound|baseline|its case"
        blocks += paragraphs(FA2)
        for one in found["settings"]:
            blocks += [f"{one['head']}.", one["lengths"]]
        blocks += [rows and Table(heads, rows)]
        blocks += bench_blocks(view, lambda r: r.get("bench") == "fa2")
    return Section("FA-2 minimum lengths", blocks, fold=True, issue=False)
