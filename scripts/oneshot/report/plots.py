"""Plots of the report as SVG: transparent, in colours that a dark and a light page both carry.

matplotlib is optional; without it `draw` raises ImportError and the report says so. Only rows that
may show numbers are drawn: VALID ones filled, UNSTABLE ones hollow.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

from scripts.oneshot.record.journal import write_atomic
from scripts.oneshot.record.reading import held_to_rules
from scripts.oneshot.record.rows import grouped, is_number
from scripts.oneshot.report.evidence import is_toy, timed
from scripts.oneshot.report.sections import losses

INK = "#7d8590"  # reads on white and on GitHub's dark page
COLOURS = ("#2f81f7", "#e3742f", "#2da44e", "#bf5af2", "#c69026", "#db61a2", "#1b9aaa", "#f85149")
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "nsa", "font.size": 10, "text.color": INK,
    "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.grid": True, "grid.color": INK, "grid.alpha": 0.25, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip

Rows = Sequence[Mapping[str, Any]]


def roofline(ax: Any, rows: Rows, data: Mapping[str, Any]) -> bool:
    """Every case by arithmetic intensity, under what the box reached itself."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    known = lambda r: all(is_number(r.get(k)) and r[k] > 0 for k in ("flops", "bytes", "tflops"))
    rows = [r for r in rows if known(r) and not is_toy(r)]
    if not rows:
        return False
    intensity = lambda rows: [r["flops"] / r["bytes"] for r in rows]
    benches = grouped(rows, lambda r: str(r.get("bench")))
    for colour, (name, of_bench) in zip(cycle(COLOURS), benches.items(), strict=False):
        name = re.sub(r"[^\w /.,=+:()-]", "", name)[:50].lstrip("_") or "-"  # no markup
        for status, more, inside in (("VALID", "", colour), ("UNSTABLE", " (unstable)", "none")):
            if mine := [r for r in of_bench if r["status"] == status]:
                look = dict(s=22, edgecolors=colour, facecolors=inside, label=name + more)
                ax.scatter(intensity(mine), [r["tflops"] for r in mine], **look)
    health = data["health"] or {}
    gbs, peak = health.get("copy_gbs"), health.get("gemm_bf16_tflops")
    low, high = min(intensity(rows)) / 2, max(intensity(rows)) * 2
    if is_number(gbs) and is_number(peak) and gbs > 0 and peak > 0:
        ridge = peak * 1e3 / gbs
        high = max(high, 2 * ridge)
        ax.plot([low, ridge, high], [low * gbs / 1e3, peak, peak], color=INK, linewidth=1.2,
                label=f"this box: copy {gbs:.0f} GB/s, bf16 matmul {peak:.0f} TFLOP/s")  # fmt: skip
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):  # its ticks are plain numbers, not powers of ten
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.set(xlabel="FLOP per byte that must move", ylabel="TFLOP/s reached", title="Roofline")
    ax.legend()
    return True


def loss_curve(ax: Any, curve: list[tuple[int, float, float | None]], data: Any) -> bool:
    """Training loss, held-out loss, and what counting bytes alone reaches."""
    if len(curve) < 2:
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


def draw(data: Mapping[str, Any], folder: Path) -> list[tuple[str, str]]:
    """Draw into `folder`/plots what `data` (the object of a bundle) has rows for.

    Returns (title, path relative to `folder`) of each. Raises ImportError without matplotlib.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = [r for r in held_to_rules(data["bench"], "bench")[0] if timed(r)]
    out = []
    for name, title, make, points in (
        ("roofline.svg", "Roofline of the bench cases at real sizes", roofline, rows),
        ("loss.svg", "Loss over training steps", loss_curve, losses(folder)),
    ):
        path = folder / "plots" / name
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(8, 4.5), layout="constrained")
            if not make(figure.add_subplot(), points, data):
                with suppress(OSError):
                    path.unlink()  # of an earlier rendering
                continue
            image = io.BytesIO()
            unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(image, format="svg", transparent=True, metadata=unsaid)
        write_atomic(path, image.getvalue().decode("utf-8"))
        out.append((title, f"plots/{name}"))
    return out
