"""Bench and parity rows as blocks of the report, and the thresholds that they carry.

Every number shown stands beside its proof: a bench row that is neither VALID nor UNSTABLE shows its
status and the reason only, a parity row on a wrong path shows no errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from scripts.oneshot.record.markdown import cell, code, is_interval, num, pct, us
from scripts.oneshot.record.rows import NUMBERED, grouped, is_number
from scripts.oneshot.report.blocks import Bar, Head, Shape, Table, View

ASSUMED_FLOOR = 0.01  # the smallest floor the A/A control can give; used where it did not run
NO_DIFFERENCE = "no difference measurable"
BENCHES = {  # `bench` of the row: heading, in the order of the report
    "prefill": "Prefill", "decode": "Decode", "decode_graph": "Decode step as a CUDA graph",
    "decode_module": "Decode, the layer's whole step", "decode_branch": "Decode, one branch alone",
    "sel": "Selection", "fa2": "FlashAttention-2", "nccl": "NCCL between GPUs",
    "context_parallel": "Context parallelism",
}  # fmt: skip
APART = ("sel", "fa2")  # benches of single calls; they have sections of their own
TOY_WIDTH = 1024  # a model narrower than this is none that anybody serves
# (words, the columns that may hold it) of the problem that a table's rows measured.
SIZES = (
    ("model width", ("dim",)), ("query heads", ("heads", "HQ")), ("KV groups", ("groups", "G")),
    ("query and key head size", ("dk", "D")), ("value head size", ("dv", "Dv")), ("l", ("l",)),
    ("d", ("d",)), ("l_sel", ("l_sel",)), ("n_sel", ("n_sel",)), ("window", ("w",)),
)  # fmt: skip
VARIED = (("sequences", "B"), ("dtype", "dtype"))
NAMED_BY_CASE = ("sel", "nccl")  # the case says every size
COLUMNS = ("case", "status", "time", "baseline", "speedup", "path", "ceiling", "notes")
ISSUE_COLUMNS = ("case", "status", "time", "baseline", "speedup", "why")


def noise_floor(health: Mapping[str, Any] | None) -> float | None:
    """The measured A/A floor as a ratio, or None."""
    floor = (health or {}).get("aa_noise_floor")
    return floor if is_number(floor) and 0 <= floor < 1 else None


def ceiling_words(scope: str, health: Mapping[str, Any] | None) -> str:
    """Whose ceilings the benches took their shares of; the rule is bench.device.ceilings'."""
    if scope == "cpu":
        return "which nobody knows of a CPU here"
    measured = is_number((health or {}).get("copy_gbs"))
    nominal = "by the card's nominal numbers, for its health was not measured"
    return "as measured under Box health" if measured else nominal


def bench_view(row: Mapping[str, Any], floor: float | None, text: int = 400) -> dict[str, str]:
    """One bench row as cells. Without VALID or UNSTABLE there is nothing but status and why."""
    why = cell("; ".join(row["why"]), text) if row["why"] else ""
    view = dict.fromkeys(COLUMNS, "")
    view.update(case=code(row["case"], text), status=row["status"], why=why, notes=why)
    if not timed(row):
        return view
    proof, notes = row["parity"], list(_notes(row))
    base = [cell(row["baseline"], 60)] if row.get("baseline") else []
    base += [us(row["base_median_us"])] if is_number(row.get("base_median_us")) else []
    if is_number(row.get("base_peak_frac")):
        base.append(f"({pct(row['base_peak_frac'])} of its ceiling)")
    path = code(row.get("path_taken"), 80)
    if is_number(proof.get("max_abs")):
        limit = proof.get("limit_max_abs")
        path += f", max-abs {num(proof['max_abs'])}"
        path += f" (limit {num(limit)})" if is_number(limit) else ""
    peak = [pct(row["peak_frac"])] if is_number(row.get("peak_frac")) else []
    peak += [cell(row["bound"], 20)] if peak and row.get("bound") else []
    time, ratio = us(row["median_us"], row.get("ci95_us")), speedup_text(row, floor)[1]
    told = cell("; ".join(notes), text) if notes else ""
    view.update(time=time, speedup=ratio, baseline=" ".join(base), path=path)
    return {**view, "ceiling": " ".join(peak), "notes": told}


def _notes(row: Mapping[str, Any]) -> Iterator[str]:
    if is_number(row.get("efficiency")):
        yield f"efficiency {pct(row['efficiency'])}"
    if is_number(row.get("busbw_gbs")):
        yield f"bus {num(row['busbw_gbs'])} GB/s"
    if row.get("compared"):
        yield f"parity of {row['compared']}"
    if is_number(row.get("distinct_of_4")):
        yield f"four neighbouring queries name {num(row['distinct_of_4'])} distinct blocks"
    if row.get("launch_bound"):
        base, ratio = row.get("base_wall_us"), row.get("wall_speedup")
        both = is_number(base) and is_number(ratio)
        of = f" (baseline's {rough_us(base)}: {rough_ratio(ratio)})" if both else ""
        yield f"launch bound, wall {rough_us(row.get('wall_us'))}{of}"
    if row.get("stop") in ("budget", "cap"):
        yield f"stopped by the {row['stop']}"
    if isinstance(row.get("reasons"), list) and row["reasons"]:
        yield f"clocks: {', '.join(map(str, row['reasons']))}"
    if row["why"]:
        yield ("UNSTABLE: " if row["status"] == "UNSTABLE" else "") + "; ".join(row["why"])


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
    if not is_interval(ci):
        return True, f"{NO_DIFFERENCE}: no interval"
    if abs(ratio - 1) <= (ASSUMED_FLOOR if floor is None else floor) or ci[0] <= 1 <= ci[1]:
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
    groups = grouped(every, lambda r: str(r.get("bench")))
    out: list[Any] = []
    for name in dict.fromkeys([*BENCHES, *sorted(groups)]):
        shown = rows = groups.get(name, [])
        if shape.issue:  # what no baseline stands beside is in report.md
            shown = [r for r in rows if r["status"] != "VALID" or is_number(r.get("speedup"))]
        if not shown:
            continue
        doubt = {"VALID": 2, "UNSTABLE": 1}  # what is wrong first, then what is doubtful
        shown = sorted(shown, key=lambda r: doubt.get(r["status"], 0))[: shape.rows]
        counts = counts_text(Counter(r["status"] for r in rows))
        if len(shown) < len(rows):
            counts += f"; {len(rows) - len(shown)} rows left out here, in bundle.json"
        views = [bench_view(r, view.floor, shape.text) for r in shown]
        columns = ISSUE_COLUMNS if shape.issue else COLUMNS
        used = [column for column in columns if any(v[column] for v in views)]
        sizes = problems(rows) if name not in NAMED_BY_CASE else None
        out += [Head(BENCHES.get(name, cell(name, 60))), counts, sizes]
        out.append(Table(used, [[v[column] for column in used] for v in views]) if views else None)
    return [block for block in out if block]


def headline(view: View) -> list[Mapping[str, Any]]:
    """The rows that a reader decides by: all of NSA at real sizes beside dense attention, prefill
    first, a decode step as a graph where that was timed."""
    beside = lambda r: is_number(r.get("base_median_us")) and r["base_median_us"] > 0
    real = lambda r: timed(r) and is_number(r.get("S")) and not is_toy(r)
    rows = [r for r in view.rows["bench"] if real(r) and beside(r)]
    prefill = [r for r in rows if r.get("bench") == "prefill" and r.get("op") in ("full", None)]
    prefill.sort(key=lambda r: (r.get("direction") != "fwd", r["S"]))
    size = lambda r: (sequences(r), r["S"])
    steps: dict[tuple, Mapping[str, Any]] = {}
    for name in ("decode_graph", "decode"):
        for r in (r for r in rows if r.get("bench") == name):
            steps.setdefault((size(r), problem(r)), r)
    return [*prefill, *sorted(steps.values(), key=size)]


def sequences(row: Mapping[str, Any]) -> float:
    return row["B"] if is_number(row.get("B")) else 1


def tokens(count: float) -> str:
    """A length, in units of 1024 where it is a multiple of them."""
    return f"{count // 1024:g}k" if count >= 1024 and count % 1024 == 0 else f"{count:g}"


def bar(row: Mapping[str, Any], floor: float | None, more: str = "") -> Bar:
    ours, base, S = row["median_us"], row["base_median_us"], tokens(row["S"])
    if row.get("bench") == "prefill":
        way = {"fwd": ", forward", "bwd": ", backward"}.get(str(row.get("direction")), "")
        heads = f", heads of {num(row['D'])}" if row.get("D", 128) != 128 else ""
        name = f"prefill, {S} tokens{heads}{way}"
    else:
        batch = f", {sequences(row):g} sequences" if sequences(row) > 1 else ""
        name = f"decode, {S} tokens of context{batch}"
    star = "\\*" if row["status"] == "UNSTABLE" else ""
    return Bar(name, ours, base, us(ours) + star, us(base), speedup_text(row, floor)[1], more)


def problem(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The sizes that a row was measured at, in words; those it does not tell are left."""
    found = [(words, row.get(name)) for words, names in SIZES for name in names]
    return tuple(f"{words} {num(value)}" for words, value in found if value is not None)


def problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line per problem that `rows` measured: its sizes, and what varies between its rows."""
    groups, out = grouped(rows, problem), []
    for sizes, mine in groups.items():
        parts = list(sizes)
        for words, name in VARIED:
            values = dict.fromkeys(num(r[name]) for r in mine if r.get(name) is not None)
            parts += [f"{words} {', '.join(values)}"] if values else []
        if parts:
            count = f"{len(mine)} of {len(rows)} rows: " if len(groups) > 1 else ""
            out.append(count + "; ".join(parts))
    return out


def counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items()) if n) or "none"


def parity_view(row: Mapping[str, Any], text: int = 400) -> dict[str, str]:
    """One parity row as cells; a row on the wrong path has no numbers to show."""
    launches = row.get("launches") if isinstance(row.get("launches"), dict) else {}
    shown = {k: "-" for k in ("mae", "max_abs", "worst_row", "margin")}
    if row["status"] != "INVALID":
        for key in ("mae", "max_abs"):
            limit = row.get(f"limit_{key}")
            shown[key] = num(row.get(key)) + (f" (limit {num(limit)})" if is_number(limit) else "")
        shown.update({k: num(row.get(k)) for k in ("worst_row", "margin")})
    path = f"{code(row.get('path_requested'), 60)} → {code(row.get('path_taken'), 80)}"
    path += f" ({cell(row['fallback_reason'], 80)})" if row.get("fallback_reason") else ""
    return {
        **shown, "case": code(row["case"], text), "status": row["status"],
        "why": cell("; ".join(row["why"]), text), "dtype": cell(row.get("dtype"), 20),
        "seed": num(row.get("seed")), "path": path,
        "launches": cell(", ".join(f"{k} x{v}" for k, v in launches.items()), 200),
    }  # fmt: skip


PARITY = "case dtype status path launches mae max_abs worst_row margin seed why".split()
PARITY_WORDS = {"path": "asked → ran", "mae": "MAE", "max_abs": "max-abs", "worst_row": "worst row"}


def worst_of(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The passed row nearest to its limit."""
    margin = lambda r: r["margin"] if is_number(r.get("margin")) else -1.0
    return max((r for r in rows if r["status"] == "PASS"), key=margin, default=None)


def parity_ops(rows: Sequence[Mapping[str, Any]], shape: Shape) -> Iterator[list[Any]]:
    """Per operator: how many cases passed, and the one nearest to its limit."""
    groups = grouped(rows, lambda row: str(row.get("op") or "other"))
    for op, mine in list(groups.items())[: shape.rows]:
        worst = worst_of(mine)
        view = parity_view(worst, shape.text) if worst else dict.fromkeys(PARITY, "-")
        passed = sum(r["status"] == "PASS" for r in mine)
        paths = cell(", ".join(sorted({str(r.get("path_taken")) for r in mine})), 200)
        shown = [view[name] for name in ("case", "mae", "max_abs", "worst_row", "margin")]
        yield [code(op, 60), f"{passed}/{len(mine)}", *shown, paths]


def parity_table(rows: Sequence[Mapping[str, Any]], shape: Shape, left_out: Sequence[str]) -> Table:
    """Parity rows, one by one, without the columns `left_out`."""
    names = [name for name in PARITY if name not in left_out]
    heads = [PARITY_WORDS.get(name, name) for name in names]
    views = [parity_view(r, shape.text) for r in rows[: shape.rows]]
    return Table(heads, [[v[name] for name in names] for v in views])
