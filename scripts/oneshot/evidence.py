"""Bench and parity rows as blocks of the report, and the thresholds that they carry.

Every number shown stands beside its proof: a bench row that is neither VALID nor UNSTABLE shows its
status and the reason only, a parity row on a wrong path shows no errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.records import MIN_SPEEDUP, carries
from scripts.oneshot.blocks import Bar, Head, Shape, Table, View
from scripts.oneshot.markdown import cell, code, is_interval, num, pct, us, us_ci
from scripts.oneshot.rows import is_number

ASSUMED_FLOOR = 0.01  # the smallest floor the A/A control can give; used where it did not run
NUMBERED = ("VALID", "UNSTABLE")
NO_DIFFERENCE = "no difference measurable"
BENCHES = {  # `bench` of the row: heading, in the order of the report
    "prefill": "Prefill",
    "decode": "Decode",
    "decode_graph": "Decode step as a CUDA graph",
    "decode_module": "Decode, the layer's whole step",
    "decode_branch": "Decode, one branch alone",
    "sel": "Selection",
    "fa2": "FlashAttention-2",
    "nccl": "NCCL between GPUs",
    "context_parallel": "Context parallelism",
}
APART = ("sel", "fa2")  # benches of single calls; they have sections of their own
TOY_WIDTH = 1024  # a model narrower than this is none that anybody serves
# (words, the columns that may hold it) of the problem that a table's rows measured.
SIZES = (
    ("model width", ("dim",)), ("query heads", ("heads", "HQ")), ("KV groups", ("groups", "G")),
    ("query and key head size", ("dk", "D")), ("value head size", ("dv", "Dv")), ("l", ("l",)),
    ("d", ("d",)), ("l_sel", ("l_sel",)), ("n_sel", ("n_sel",)), ("window", ("w",)),
)  # fmt: skip
VARIED = (("sequences", ("B",)), ("dtype", ("dtype",)))
NAMED_BY_CASE = ("sel", "nccl")  # the case says every size
BRANCHES = "case|status|context|total ms|compressed|selected|sliding|keys read per group"
COLUMNS = ("case", "status", "time", "baseline", "speedup", "path", "ceiling", "notes")
ISSUE_COLUMNS = ("case", "status", "time", "baseline", "speedup", "why")


# ---------------------------------------------------------------------------------- bench rows


def noise_floor(health: Mapping[str, Any] | None) -> float | None:
    """The measured A/A floor as a ratio, or None."""
    floor = (health or {}).get("aa_noise_floor")
    return floor if is_number(floor) and 0 <= floor < 1 else None


def ceiling_words(scope: str, health: Mapping[str, Any] | None) -> str:
    """Whose ceilings the benches took their shares of; the rule is bench.device.ceilings'."""
    if scope == "cpu":
        return "which nobody knows of a CPU here"
    if is_number((health or {}).get("copy_gbs")):
        return "as measured under Box health"
    return "by the card's nominal numbers, for its health was not measured"


def bench_view(row: Mapping[str, Any], floor: float | None, text: int = 400) -> dict[str, Any]:
    """One bench row as cells. Without VALID or UNSTABLE there is nothing but status and why."""
    why = cell("; ".join(row["why"]), text) if row["why"] else ""
    view = {
        "case": code(row["case"], text),
        "status": row["status"],
        "why": why,
        "time": "",
        "baseline": "",
        "speedup": "",
        "path": "",
        "ceiling": "",
        "notes": why,
    }
    if row["status"] not in NUMBERED or not is_number(row.get("median_us")):
        return view
    limit = row["parity"].get("limit_max_abs")
    notes = [f"parity of {row['compared']}"] if row.get("compared") else []
    if is_number(row.get("busbw_gbs")):
        notes.insert(0, f"bus {num(row['busbw_gbs'])} GB/s")
    if is_number(row.get("efficiency")):
        notes.insert(0, f"efficiency {pct(row['efficiency'])}")
    if row.get("launch_bound"):
        words = f"launch bound, wall {rough_us(row.get('wall_us'))}"
        if is_number(row.get("base_wall_us")) and is_number(row.get("wall_speedup")):
            words += (f" (baseline's {rough_us(row['base_wall_us'])}: "
                      f"{rough_ratio(row['wall_speedup'])})")  # fmt: skip
        notes.append(words)
    if row.get("stop") in ("budget", "cap"):
        notes.append(f"stopped by the {row['stop']}")
    reasons = row.get("reasons") if isinstance(row.get("reasons"), list) else []
    notes += [f"clocks: {', '.join(map(str, reasons))}"] if reasons else []
    notes += [f"UNSTABLE: {'; '.join(row['why'])}"] if row["status"] == "UNSTABLE" else row["why"]
    peak = pct(row["peak_frac"]) if is_number(row.get("peak_frac")) else ""
    return {
        **view, "speedup": speedup_text(row, floor)[1],
        "time": us_ci(row["median_us"], row.get("ci95_us")),
        "baseline": " ".join(([cell(row["baseline"], 60)] if row.get("baseline") else [])
                         + ([us(row["base_median_us"])] if is_number(row.get("base_median_us"))
                            else [])),
        "path": code(row.get("path_taken"), 80)
        + (f", max-abs {num(row['parity']['max_abs'])}"
           + (f" (limit {num(limit)})" if is_number(limit) else "")
           if is_number(row["parity"].get("max_abs")) else ""),
        "ceiling": f"{peak} {cell(row['bound'], 20)}" if peak and row.get("bound") else peak,
        "notes": cell("; ".join(notes), text) if notes else "",
    }  # fmt: skip


def rough_us(value: Any) -> str:
    """A host's time: it differs by up to twice between runs."""
    return f"about {us(float(f'{value:.2g}'))}" if is_number(value) else "-"


def rough_ratio(value: float) -> str:
    """The ratio of two such times; within 10 % there is none."""
    return "about the same" if abs(value - 1) < 0.0999 else f"about {value:.1f}x"


def speedup_text(row: Mapping[str, Any], floor: float | None) -> tuple[bool, str]:
    """(nothing measurable, words) for the ratio of a row against its baseline."""
    ratio, ci = row.get("speedup"), row.get("speedup_ci95")
    if not is_number(ratio):
        return False, ""
    limit = ASSUMED_FLOOR if floor is None else floor
    if not is_interval(ci):
        return True, f"{NO_DIFFERENCE}: no interval"
    if abs(ratio - 1) <= limit or ci[0] <= 1 <= ci[1]:
        return True, NO_DIFFERENCE
    return False, f"{ratio:.2f}x [{ci[0]:.2f}, {ci[1]:.2f}]"


def timed(row: Mapping[str, Any]) -> bool:
    """May the row show its time?"""
    return row["status"] in NUMBERED and is_number(row.get("median_us"))


def is_toy(row: Mapping[str, Any]) -> bool:
    """Was the row measured on a model too small to be served?"""
    return is_number(row.get("dim")) and row["dim"] < TOY_WIDTH


def bench_blocks(view: View, keep: Callable[[Mapping[str, Any]], bool]) -> list[Any]:
    """Heading, sizes and table of each bench that has rows for which `keep` holds."""
    shape, every = view.shape, [r for r in view.rows["bench"] if keep(r)]
    out: list[Any] = []
    for name in dict.fromkeys([*BENCHES, *sorted(str(r.get("bench")) for r in every)]):
        rows = [r for r in every if str(r.get("bench")) == name]
        if not rows:
            continue
        shown = rows
        if shape.issue:  # what no baseline stands beside is in report.md
            shown = [r for r in rows if r["status"] != "VALID" or is_number(r.get("speedup"))]
        doubt = {"VALID": 2, "UNSTABLE": 1}  # what is wrong first, then what is doubtful
        shown = sorted(shown, key=lambda r: doubt.get(r["status"], 0))[: shape.rows]
        counts = counts_text(Counter(r["status"] for r in rows))
        if len(shown) < len(rows):
            counts += f"; {len(rows) - len(shown)} rows left out here, in bundle.json"
        out += [Head(BENCHES.get(name, cell(name, 60))), counts]
        if name not in NAMED_BY_CASE:
            out.append(problems(rows))
        out.append(
            bench_table(
                [bench_view(r, view.floor, shape.text) for r in shown],
                ISSUE_COLUMNS if shape.issue else COLUMNS,
            )
        )
        branches = _branches(view.rows["bench"], rows)[: shape.rows] if name == "decode" else []
        if branches and not shape.issue:
            out.append(Table(BRANCHES, branches))
    return [block for block in out if block]


def bench_table(views: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Table | None:
    """The rows as a table, without the columns in which every row is empty."""
    used = [name for name in columns if any(v[name] for v in views)]
    return Table(used, [[v[name] for name in used] for v in views]) if views else None


def headline(view: View) -> list[Mapping[str, Any]]:
    """The rows that a reader decides by: all of NSA at real sizes beside dense attention, prefill
    first, a decode step as a graph where that was timed."""
    rows = [
        r
        for r in view.rows["bench"]
        if timed(r)
        and not is_toy(r)
        and is_number(r.get("S"))
        and is_number(r.get("base_median_us"))
        and r["base_median_us"] > 0
    ]
    prefill = [r for r in rows if r.get("bench") == "prefill" and r.get("op") in ("full", None)]
    prefill.sort(key=lambda r: (r.get("direction") != "fwd", r["S"]))
    steps: dict[tuple, Mapping[str, Any]] = {}
    for name in ("decode_graph", "decode"):
        for r in (r for r in rows if r.get("bench") == name):
            steps.setdefault((num(r.get("B")), r["S"], problem(r)), r)
    batch = lambda r: r["B"] if is_number(r.get("B")) else 1
    return [*prefill, *sorted(steps.values(), key=lambda r: (batch(r), r["S"]))]


def tokens(count: float) -> str:
    """A length, in units of 1024 where it is a multiple of them."""
    return f"{count // 1024:g}k" if count >= 1024 and count % 1024 == 0 else f"{count:g}"


def bar(row: Mapping[str, Any], floor: float | None, more: str = "") -> Bar:
    """One row of `headline` as a pair of bars."""
    S = tokens(row["S"])
    if row.get("bench") == "prefill":
        way = {"fwd": "forward", "bwd": "backward"}.get(str(row.get("direction")), "")
        name = f"prefill, {S} tokens, {way}".rstrip(", ")
    else:
        batch = row.get("B")
        name = f"decode, {S} tokens of context" + (
            f", {batch} sequences" if is_number(batch) and batch > 1 else ""
        )
    star = "\\*" if row["status"] == "UNSTABLE" else ""
    return Bar(
        name,
        row["median_us"],
        row["base_median_us"],
        us(row["median_us"]) + star,
        us(row["base_median_us"]),
        speedup_text(row, floor)[1],
        more,
    )


def problem(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The sizes that a row was measured at, in words; those it does not tell are left."""
    return tuple(
        f"{words} {num(row[name])}" for words, names in SIZES
        for name in names if row.get(name) is not None
    )  # fmt: skip


def problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per problem that `rows` measured: its sizes, and what varies between its rows."""
    groups: dict[tuple, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(problem(row), []).append(row)
    out = []
    for sizes, mine in groups.items():
        parts = list(sizes)
        for words, (name,) in VARIED:
            values = dict.fromkeys(num(r[name]) for r in mine if r.get(name) is not None)
            parts += [f"{words} {', '.join(values)}"] if values else []
        if parts:
            count = f"{len(mine)} of {len(rows)} rows: " if len(groups) > 1 else ""
            out.append(count + "; ".join(parts))
    return out


def _branches(
    every: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """Decode steps with their branches in milliseconds and the keys that they read.

    A branch is a column of the step's row (ms_cmp), or a row of its own (decode_branch).
    """
    key = lambda r, branch: (*(str(r.get(n)) for n in ("S", "B", "dtype")), problem(r), str(branch))
    alone = {
        key(r, r.get("branch")): r["median_us"] / 1e3
        for r in every
        if timed(r) and r.get("bench") == "decode_branch"
    }
    out = []
    for r in filter(timed, steps):
        parts = [r.get(f"ms_{b}", alone.get(key(r, b))) for b in ("cmp", "sel", "win")]
        if not any(map(is_number, parts)):
            continue
        total = r["ms_total"] if is_number(r.get("ms_total")) else r["median_us"] / 1e3
        reads = f"{num(r.get('reads_actual'))} of {num(r.get('reads_expected'))}"
        out.append(
            [code(r["case"]), r["status"], num(r.get("S")), num(total), *map(num, parts), reads]
        )
    return out


def counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items()) if n) or "none"


# --------------------------------------------------------------------------------- parity rows


def parity_view(row: Mapping[str, Any], text: int = 400) -> dict[str, str]:
    """One parity row as cells; a row on the wrong path has no numbers to show."""
    launches = row.get("launches") if isinstance(row.get("launches"), dict) else {}
    shown = {k: "-" for k in ("mae", "max_abs", "worst_row", "margin")}
    if row["status"] != "INVALID":
        for key in ("mae", "max_abs"):
            limit = row.get(f"limit_{key}")
            shown[key] = num(row.get(key)) + (f" (limit {num(limit)})" if is_number(limit) else "")
        shown.update({k: num(row.get(k)) for k in ("worst_row", "margin")})
    requested, taken = row.get("path_requested"), row.get("path_taken")
    return {
        **shown, "case": code(row["case"], text), "status": row["status"],
        "why": cell("; ".join(row["why"]), text), "dtype": cell(row.get("dtype"), 20),
        "seed": num(row.get("seed")),
        "path": f"{code(requested, 60)} → {code(taken, 80)}"
        + (f" ({cell(row['fallback_reason'], 80)})" if row.get("fallback_reason") else ""),
        "launches": cell(", ".join(f"{k} x{v}" for k, v in launches.items()), 200),
    }  # fmt: skip


PARITY_HEADS = "case|dtype|status|asked → ran|launches|MAE|max-abs|worst row|margin|seed|why".split(
    "|"
)
PARITY = "case dtype status path launches mae max_abs worst_row margin seed why".split()


def worst_of(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The passed row nearest to its limit."""
    margin = lambda r: r["margin"] if is_number(r.get("margin")) else -1.0
    return max((r for r in rows if r["status"] == "PASS"), key=margin, default=None)


def parity_ops(rows: Sequence[Mapping[str, Any]], shape: Shape) -> Iterator[list[Any]]:
    """Per operator: how many cases passed, and the one nearest to its limit."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row.get("op") or "other"), []).append(row)
    for op, mine in list(groups.items())[: shape.rows]:
        worst = worst_of(mine)
        view = parity_view(worst, shape.text) if worst else dict.fromkeys(PARITY, "-")
        passed = sum(r["status"] == "PASS" for r in mine)
        paths = cell(", ".join(sorted({str(r.get("path_taken")) for r in mine})), 200)
        yield [
            code(op, 60),
            f"{passed}/{len(mine)}",
            view["case"],
            view["mae"],
            view["max_abs"],
            view["worst_row"],
            view["margin"],
            paths,
        ]


def parity_table(rows: Sequence[Mapping[str, Any]], shape: Shape, left_out: Sequence[str]) -> Table:
    """Parity rows, one by one, without the columns `left_out`."""
    names = [name for name in PARITY if name not in left_out]
    heads = [h for h, name in zip(PARITY_HEADS, PARITY, strict=True) if name in names]
    views = [parity_view(r, shape.text) for r in rows[: shape.rows]]
    return Table(heads, [[v[name] for name in names] for v in views])


# ---------------------------------------------------------------------------------- threshold


def _walls(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a host sees of the launch-bound ones among `rows`; empty without any."""
    bound = [r for r in rows if r["status"] == "VALID" and r.get("launch_bound")
             and is_number(r.get("wall_speedup"))]  # fmt: skip
    if not bound:
        return ""
    worst = min(bound, key=lambda r: r["wall_speedup"])
    least = f"{rough_ratio(worst['wall_speedup'])} at the least ({code(worst['case'])})"
    return f"; {len(bound)} of its {len(rows)} cells are launch bound: as a host sees them, {least}"


def threshold_cells(
    rows: Sequence[Mapping[str, Any]],
) -> dict[int, list[Mapping[str, Any]]]:
    """What a threshold is made of, by ascending selected length: rows of routes, not of kernels."""
    by_length: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        if (
            row.get("bench") == "sel" and row.get("mode") == "route"
            and isinstance(row.get("L"), int)
        ):  # fmt: skip
            by_length.setdefault(row["L"], []).append(row)
    return dict(sorted(by_length.items()))


def lower_bounds(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """The lower bounds of a row's speedup by the device's time and by wall, if it has both."""
    device, wall = row.get("speedup_ci95"), row.get("wall_speedup_ci95")
    if row["status"] not in NUMBERED or not (is_interval(device) and is_interval(wall)):
        return None
    return device[0], wall[0]


def routes_at(rows: Sequence[Mapping[str, Any]], least: float) -> dict[str, Any]:
    """The cells of one length: how many there are and carry a threshold, the smallest lower bounds
    and the case of the smallest of all; "-" without any."""
    bounds = [(lower_bounds(r) or (None, None), r) for r in rows]
    found = [(low, wall, r) for (low, wall), r in bounds if low is not None]
    worst = min(found, key=lambda one: min(one[:2]), default=None)
    carry = [r for lows, r in bounds if carries(r["status"], lows, least)]
    return {
        "cells": len(rows), "carry": len(carry), "holds": len(carry) == len(rows) > 0,
        "low": f"{min(low for low, _, _ in found):.2f}x" if worst else "-",
        "wall": f"{min(wall for _, wall, _ in found):.2f}x" if worst else "-",
        "case": code(worst[2]["case"]) if worst else "-",
    }  # fmt: skip


def valid_and_worst(
    rows: Sequence[Mapping[str, Any]],
) -> tuple[list[Mapping[str, Any]], Mapping[str, Any] | None]:
    """The VALID ones of `rows` and the one of them with the smallest lower bound."""
    good = [r for r in rows if r["status"] == "VALID" and is_interval(r.get("speedup_ci95"))]
    return good, min(good, key=lambda r: r["speedup_ci95"][0], default=None)


def recommendation(data: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The proposed threshold with what speaks for it: the smallest lower bounds per length."""
    proposal = data["recommend"]
    least = (proposal or {}).get("min_speedup")
    least = least if is_number(least) else MIN_SPEEDUP
    evidence = [{"L": length, **routes_at(mine, least)}
                for length, mine in threshold_cells(rows).items()]  # fmt: skip
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
    if isinstance(value, int) and not isinstance(value, bool):
        out["text"] = f"**`sel_triton_min_L: {value}`** ({words})"
        against = [e for e in evidence if e["L"] >= value and not e["holds"]]
        if against or not any(e["L"] >= value for e in evidence):
            lengths = ", ".join(str(e["L"]) for e in against) or "any L"
            out["doubt"] = (
                f"The rows of this run do not carry it alone: not every cell of L = {lengths} "
                f"has lower bounds of {least:g}x, of {2 * least:g}x where it is UNSTABLE."
            )
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
    whole = [r for r in rows if r["status"] == "VALID" and is_number(r.get("speedup"))
             and r.get("path_requested") == "triton"]  # fmt: skip
    found = []
    for words, mine in (
        ("prefill", [r for r in whole if r.get("bench") == "prefill" and r.get("op") == "full"]),
        ("decode step", [r for r in whole if r.get("bench") == "decode"]),
    ):
        ratios = sorted(r["speedup"] for r in mine)
        if ratios:
            found.append(f"{words} {ratios[0]:.2f}x to {ratios[-1]:.2f}x")
    return text + (f"; against dense attention at the sizes timed here: {', '.join(found)}."
                   if found else ".")  # fmt: skip


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
    per branch, baseline and length."""
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("bench") == "fa2" and isinstance(row.get("key_len"), int):
            key = (str(row.get("branch")), str(row.get("baseline")), row["key_len"])
            groups.setdefault(key, []).append(row)
    evidence = []
    for (branch, baseline, keys), mine in sorted(groups.items()):
        good, low = valid_and_worst(mine)
        evidence.append({
            "branch": cell(branch, 20), "length": keys, "cells": len(mine), "valid": len(good),
            "low": f"{low['speedup_ci95'][0]:.2f}x" if low else "-",
            "baseline": cell(baseline, 60) if low else "-",
            "case": code(low["case"]) if low else "-",
        })  # fmt: skip
    proposal, settings = data["recommend"] or {}, []
    # A run before there was an answer for each setting has one, against the faster of the two.
    both = any(k.startswith("fa2_") and "_triton" in k for k in proposal)
    for baseline, value, words, advice in FA2_SETTINGS if both else (("",) * 4,):
        more, texts, named = "_triton" if baseline == "triton" else "", [], False
        for branch in ("win", "cmp"):
            why = proposal.get(f"fa2_{branch}{more}_why")
            least = proposal.get(f"fa2_min_len_{branch}{more}")
            found = isinstance(least, int) and not isinstance(least, bool)
            held = [
                r
                for (b, name, keys), mine in groups.items()
                for r in mine
                if b == branch and baseline in ("", name) and not (found and keys < least)
            ]
            told = f" ({cell(why)})" if why else ""
            named |= found
            if found:
                texts.append(f"`fa2_min_len_{branch}: {least}` keys{told}{_walls(held)}")
            elif why:
                texts.append(f"no `fa2_min_len_{branch}`{told}{_walls(held)}")
        head = "Against the faster of SDPA and the Triton kernel"
        if both:
            advice = advice if named else "leave `NSA_USE_FA2=0`"
            head = f"With `NSA_USE_TRITON_SEL={value}`, {words}: {advice}"
        if texts:
            settings.append({"head": head, "lengths": texts})
    return {"evidence": evidence, "settings": settings}
