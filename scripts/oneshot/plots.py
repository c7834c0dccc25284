"""Plots of the report as SVG: transparent, in colours that a dark and a light page both carry.

matplotlib is optional; without it `draw` raises ImportError and the report says so. Only rows that
may show numbers are drawn: VALID ones filled, UNSTABLE ones hollow.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.records import MIN_SPEEDUP
from scripts.oneshot.evidence import NUMBERED, is_toy, noise_floor, timed, tokens
from scripts.oneshot.journal import write_atomic
from scripts.oneshot.markdown import is_interval
from scripts.oneshot.reading import held_to_rules
from scripts.oneshot.rows import is_number
from scripts.oneshot.sections import losses

INK = "#7d8590"  # reads on white and on GitHub's dark page
COLOURS = ("#2f81f7", "#e3742f", "#2da44e", "#bf5af2", "#c69026", "#db61a2", "#1b9aaa", "#f85149")
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "nsa", "font.size": 10, "text.color": INK,
    "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.grid": True, "grid.color": INK, "grid.alpha": 0.25, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip
MAX_SERIES = 8
PROBLEM = ("dtype", "dim", "groups", "G", "dk", "D", "dv", "Dv", "l", "d", "l_sel", "n_sel", "w")

Rows = Sequence[Mapping[str, Any]]
Point = tuple[float, float, float, float, bool]  # x, y, lower, upper, valid


def _label(text: Any) -> str:
    """Text for a legend: short, and no markup of matplotlib's."""
    return re.sub(r"[^\w /.,=+:()-]", "", str(text))[:60].lstrip("_") or "-"


def _series(ax: Any, name: str, points: list[Point], colour: str, style: str = "-") -> None:
    """A line with its interval as a band; hollow where the row was UNSTABLE."""
    points = sorted(points)
    xs, ys, lows, highs, valid = zip(*points, strict=True)
    ax.plot(xs, ys, style, color=colour, label=_label(name), linewidth=1.6)
    ax.fill_between(xs, lows, highs, color=colour, alpha=0.2, linewidth=0)
    for x, y, _, _, good in points:
        inside = colour if good else "none"
        ax.plot([x], [y], "o", color=colour, markersize=4, markerfacecolor=inside)


def _lengths(ax: Any, values: Sequence[float]) -> None:
    """A base-2 axis whose ticks are the lengths that were measured."""
    ax.set_xscale("log", base=2)
    ticks = sorted(set(values))
    ax.set_xticks(ticks, map(tokens, ticks), rotation=45 if len(ticks) > 10 else 0)
    ax.minorticks_off()


def _plain_log(ax: Any, *names: str) -> None:
    """Logarithmic axes whose ticks are plain numbers, 1, 2 and 5 of each power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for name in names:
        getattr(ax, f"set_{name}scale")("log")
        axis = getattr(ax, f"{name}axis")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _several(rows: Rows, name: str) -> bool:
    """Are there two values of `name`, between which a line says something?"""
    return len({r[name] for r in rows}) > 1


def _with_ci(value: float, ci: Any, scale: float = 1.0) -> tuple[float, float, float]:
    low, high = ci if is_interval(ci) else (value, value)
    return value * scale, low * scale, high * scale


def _varying(rows: Rows, names: Sequence[str]) -> list[str]:
    """As few of `names` as tell apart whatever rows all of them tell apart."""
    kinds = lambda some: len({tuple(str(r.get(n)) for n in some) for r in rows})
    kept: list[str] = []
    for name in names:
        if kinds([*kept, name]) > kinds(kept):
            kept.append(name)
    return kept


# ---------------------------------------------------------------------------------- one plot each


def speedup(ax: Any, rows: Rows, data: Mapping[str, Any]) -> bool:
    """Selection: speedup against the key length."""
    rows = [r for r in rows if r.get("bench") == "sel" and is_number(r.get("L"))
            and is_number(r.get("speedup")) and is_interval(r.get("speedup_ci95"))]  # fmt: skip
    if not _several(rows, "L"):
        return False
    names = ["mode", "dist", *_varying(rows, ("candidate", "N", "H", "D", "Dv", "streams"))]
    groups: dict[str, list] = {}
    for r in rows:
        groups.setdefault(" ".join(str(r.get(n)) for n in names), []).append(r)
    title = "Selection: speedup over the baseline"
    if len(groups) > MAX_SERIES:
        title += ", slowest cell of each kind"
        groups = {}
        for r in rows:
            groups.setdefault(f"{r.get('mode')} {r.get('dist')}", []).append(r)
    for i, (name, mine) in enumerate(list(groups.items())[:MAX_SERIES]):
        slowest: dict[float, Mapping[str, Any]] = {}
        for r in mine:
            if r["L"] not in slowest or r["speedup"] < slowest[r["L"]]["speedup"]:
                slowest[r["L"]] = r
        points = [(r["L"], r["speedup"], *r["speedup_ci95"], r["status"] == "VALID")
                  for r in slowest.values()]  # fmt: skip
        _series(ax, name, points, COLOURS[i % len(COLOURS)])
    ax.axhline(MIN_SPEEDUP, color=INK, linestyle="--", linewidth=1)
    ax.annotate(f"{MIN_SPEEDUP}x", (1, MIN_SPEEDUP), xycoords=("axes fraction", "data"), color=INK)
    floor = noise_floor(data["health"]) or 0.0
    ax.axhspan(1 - floor, 1 + floor, color=INK, alpha=0.25, linewidth=0, label="noise floor")
    _lengths(ax, [r["L"] for r in rows])
    _plain_log(ax, "y")
    ax.set(xlabel="key length L", ylabel="baseline time / ours", title=title)
    ax.legend(ncols=2)
    return True


def _against_dense(ax: Any, rows: Rows, name_of: Callable[[Mapping], str], unit: str) -> bool:
    """Time against context length, each series beside its baseline."""
    rows = [r for r in rows if is_number(r.get("S"))]
    if not _several(rows, "S"):
        return False
    scale = 1e-3 if unit == "ms" else 1.0
    groups: dict[str, list] = {}
    for r in rows:
        groups.setdefault(name_of(r), []).append(r)
    seen: set[str] = set()
    for i, (name, mine) in enumerate(list(groups.items())[:MAX_SERIES]):
        colour = COLOURS[i % len(COLOURS)]
        points = []
        for r in mine:
            y, low, high = _with_ci(r["median_us"], r.get("ci95_us"), scale)
            points.append((r["S"], y, low, high, r["status"] == "VALID"))
        _series(ax, name, points, colour)
        base = [(r["S"], *_with_ci(r["base_median_us"], r.get("base_ci95_us"), scale), True)
                for r in mine if is_number(r.get("base_median_us"))]  # fmt: skip
        if base:
            words = f"{mine[0].get('baseline') or 'dense'}, for {name}"
            if words not in seen:
                _series(ax, words, base, colour, "--")
            seen.add(words)
    _lengths(ax, [r["S"] for r in rows])
    _plain_log(ax, "y")
    ax.set(xlabel="context length S", ylabel=f"time, {unit}")
    ax.legend(ncols=2)
    return True


def decode(ax: Any, rows: Rows, data: Mapping[str, Any]) -> bool:
    """Decode: a step and its branches beside dense attention."""
    ax.set_title("Decode step beside dense attention (dashed)")
    rows = [r for r in rows if r.get("bench") in ("decode", "decode_branch") and not is_toy(r)]
    more = _varying(rows, ("B", "heads", *PROBLEM))

    def name(r: Mapping[str, Any]) -> str:
        sizes = [f"{n}={r[n]}" for n in more if r.get(n) is not None]
        return " ".join([str(r.get("branch") or "whole step"), *sizes])

    return _against_dense(ax, rows, name, "us")


def prefill(ax: Any, rows: Rows, data: Mapping[str, Any]) -> bool:
    """Prefill: forward and backward beside dense attention."""
    ax.set_title("Prefill beside dense attention (dashed)")
    rows = [r for r in rows if r.get("bench") == "prefill"]
    whole = [r for r in rows if r.get("op") in ("full", None)] or rows
    more = _varying(whole, ("candidate", "B", "HQ", *PROBLEM))
    return _against_dense(
        ax, whole,
        lambda r: " ".join(str(r.get(n) or "") for n in ("op", "direction", *more)).strip(), "ms",
    )  # fmt: skip


def roofline(ax: Any, rows: Rows, data: Mapping[str, Any]) -> bool:
    """Every case by arithmetic intensity, under what the box reached itself."""
    known = lambda r: all(is_number(r.get(k)) and r[k] > 0 for k in ("flops", "bytes", "tflops"))
    rows = [r for r in rows if known(r) and not is_toy(r)]
    if not rows:
        return False
    names = list(dict.fromkeys(str(r.get("bench")) for r in rows))
    for i, name in enumerate(names):
        for status in NUMBERED:
            mine = [r for r in rows if str(r.get("bench")) == name and r["status"] == status]
            if not mine:
                continue
            colour = COLOURS[i % len(COLOURS)]
            ax.scatter(
                [r["flops"] / r["bytes"] for r in mine], [r["tflops"] for r in mine], s=22,
                edgecolors=colour, facecolors=colour if status == "VALID" else "none",
                label=_label(name if status == "VALID" else f"{name} (unstable)"),
            )  # fmt: skip
    health = data["health"] or {}
    gbs, peak = health.get("copy_gbs"), health.get("gemm_bf16_tflops")
    xs = [r["flops"] / r["bytes"] for r in rows]
    low, high = min(xs) / 2, max(xs) * 2
    if is_number(gbs) and is_number(peak) and gbs > 0 and peak > 0:
        ridge = peak * 1e3 / gbs
        high = max(high, 2 * ridge)
        ax.plot([low, ridge, high], [low * gbs / 1e3, peak, peak], color=INK, linewidth=1.2,
                label=f"this box: copy {gbs:.0f} GB/s, bf16 matmul {peak:.0f} TFLOP/s")  # fmt: skip
    _plain_log(ax, "x", "y")
    ax.set(xlabel="FLOP per byte that must move", ylabel="TFLOP/s reached", title="Roofline")
    ax.legend()
    return True


def loss_curve(ax: Any, curve: list[tuple[int, float, float | None]], data: Any) -> bool:
    """Training loss, held-out loss, and what counting bytes alone reaches."""
    if not curve:
        return False
    ax.plot([s for s, _, _ in curve], [v for _, v, _ in curve], color=COLOURS[0], linewidth=1.4,
            label="training")  # fmt: skip
    held = [(s, v) for s, _, v in curve if v is not None]
    if held:
        ax.plot(*zip(*held, strict=True), "o-", color=COLOURS[1], markersize=4, label="held out")
    metrics = {m.get("name"): m.get("value") for m in data["metrics"]}
    for name, words in (("unigram_cross_entropy", "byte frequencies alone"),
                        ("bigram_cross_entropy", "byte pairs alone")):  # fmt: skip
        if is_number(metrics.get(name)):
            ax.axhline(metrics[name], color=INK, linestyle=":", linewidth=1)
            ax.annotate(words, (0.99, metrics[name]), xycoords=("axes fraction", "data"),
                        ha="right", va="bottom", color=INK, fontsize=8)  # fmt: skip
    ax.set(xlabel="step", ylabel="nats per byte", title="Training showcase: loss")
    ax.legend()
    return True


PLOTS = (
    ("decode.svg", "Decode step time against context length", decode),
    ("prefill.svg", "Prefill time against context length", prefill),
    ("speedup.svg", "Selection speedup against key length", speedup),
    ("roofline.svg", "Roofline of every bench case", roofline),
)


def draw(data: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Draw into `folder`/plots what `data` (the object of a bundle) has rows for.

    Returns (title, path relative to `folder`) of each. Raises ImportError without matplotlib.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = [r for r in held_to_rules(data["bench"], "bench")[0] if timed(r)]
    curve = losses(folder)
    out = []
    for name, title, make, points in (
        *((*plot, rows) for plot in PLOTS),
        ("loss.svg", "Loss over training steps", loss_curve, curve),
    ):
        path = folder / "plots" / name
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(8, 4.5), layout="constrained")
            if not make(figure.add_subplot(), points, data):
                with suppress(OSError):
                    path.unlink()  # of an earlier rendering
                continue
            image = io.BytesIO()
            figure.savefig(image, format="svg", transparent=True, metadata={"Date": None})
        write_atomic(path, image.getvalue().decode("utf-8"))
        out.append((title, f"plots/{name}"))
    return out
