"""Pictures of training runs and of needle searches as SVG, in the style of the report's plots."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.oneshot.record.journal import write_atomic
from scripts.oneshot.report.plots import COLOURS, STYLE

Rows = Sequence[Mapping[str, Any]]


def _save(figure: Any, path: Path) -> None:
    image = io.BytesIO()
    figure.savefig(image, format="svg", transparent=True, metadata={"Date": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, image.getvalue().decode("utf-8"))


def _names(rows: Rows, key: str) -> list[Any]:
    return list(dict.fromkeys(r[key] for r in rows))


def training(curve: Rows, rates: Rows, path: Path) -> None:
    """Draw losses by step (left) and tokens/s by length (right), with a colour per attention and a
    line style per length. Raises ImportError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    styles = ("-", "--", ":", "-.")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        lengths = _names(curve, "seq")
        for i, attention in enumerate(_names(curve, "attention")):
            colour = COLOURS[i % len(COLOURS)]
            for j, seq in enumerate(lengths):
                mine = [r for r in curve if r["attention"] == attention and r["seq"] == seq]
                label = attention if len(lengths) == 1 else f"{attention}, {seq} tokens"
                points = zip(*((r["step"], r["loss"]) for r in mine), strict=True)
                left.plot(*points, styles[j % 4], color=colour, linewidth=1.3, label=label)
                held = [(r["step"], r["val_loss"]) for r in mine if r["val_loss"] is not None]
                if held:
                    left.plot(*zip(*held, strict=True), "o", color=colour, markersize=4)
            own = [r for r in rates if r["attention"] == attention and r["tokens_per_s"]]
            if timed := [(r["seq"], r["tokens_per_s"]) for r in own]:
                right.plot(*zip(*sorted(timed), strict=True), "o-", color=colour, label=attention)
        left.set(xlabel="step", ylabel="nats per byte", title="Loss (points: held out)")
        right.set(xlabel="tokens per sequence", ylabel="tokens/s", title="Training rate")
        right.set_xscale("log", base=2)
        right.set_xticks(lengths, [str(n) for n in lengths])
        right.minorticks_off()
        right.set_ylim(bottom=0)
        for axes in (left, right):
            if axes.get_legend_handles_labels()[0]:
                axes.legend()
        _save(figure, path)


def needle(rows: Rows, path: Path, title: str) -> None:
    """Draw the share of needles found by length (across) and depth (down): rows {tokens, depth,
    found, n}, depth in [0, 1). Raises ImportError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    lengths, depths = sorted(_names(rows, "tokens")), sorted(_names(rows, "depth"))
    shares = {(r["tokens"], r["depth"]): r["found"] / r["n"] for r in rows if r["n"]}
    grid = [[shares.get((t, d), float("nan")) for t in lengths] for d in depths]
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        drawn = axes.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for y, depth in enumerate(depths):
            for x, tokens in enumerate(lengths):
                if (tokens, depth) in shares:
                    axes.text(x, y, f"{shares[tokens, depth]:.0%}", ha="center", va="center",
                              color="#1f2328", fontsize=8)  # fmt: skip
        axes.set_xticks(range(len(lengths)), [f"{t:,}" for t in lengths])
        axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
        axes.set(xlabel="tokens", ylabel="depth of the needle, from", title=title)
        figure.colorbar(drawn, label="found")
        _save(figure, path)
