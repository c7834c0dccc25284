"""Text and numbers as GitHub Markdown. Whatever a log holds, the page around it stays whole."""

from __future__ import annotations

import re
from typing import Any

from scripts.oneshot.record.capture import plain
from scripts.oneshot.record.rows import is_number

CELL_LIMIT = 400
LINE_LIMIT = 300
# An underscore inside a word is no emphasis.
_SPECIAL = re.compile(r"([\\`*\[\]~|$!#]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z]))")
# GitHub links @name, #123, GH-123 even where they are entities; a zero-width space stops it.
_LINKED = re.compile(r"(@|#|\bGH-)(?=\w)")
_URL = re.compile(r"(?i)\b(https?|ftp)://|\b(www)\.")
_SPARKS = "▁▂▃▄▅▆▇█"


def _one_line(value: Any, limit: int) -> str:
    text = " ".join(plain(str("" if value is None else value)[: 20 * limit + 1000]).split())
    return text if len(text) <= limit else f"{text[: limit * 2 // 3]} … {text[-limit // 4 :]}"


def cell(value: Any, limit: int = CELL_LIMIT) -> str:
    """`value` as inert text on one line, for a table cell or a list item."""
    text = _SPECIAL.sub(r"\\\1", _one_line(value, limit))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _LINKED.sub("\\1\u200b", text)
    text = _URL.sub(lambda m: f"{m[1]}:\u200b//" if m[1] else f"{m[2]}\u200b.", text)
    return text or "-"


def code(value: Any, limit: int = CELL_LIMIT) -> str:
    """`value` as an inline code span that also holds inside a table."""
    text = _one_line(value, limit)
    if not text:
        return "-"
    ticks = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    pad = " " if len(ticks) > 1 else ""
    return f"{ticks}{pad}{text}{pad}{ticks}".replace("|", "\\|")


def fence(value: Any, language: str = "", *, whole: bool = False) -> str:
    """`value` as a code block whose fence is longer than any run of backticks inside.

    whole: also a long line keeps every character, as a command must.
    """
    lines = list(map(plain, str("" if value is None else value).replace("\r\n", "\n").split("\n")))
    for i, line in enumerate(lines):
        if not whole and (left := len(line) - LINE_LIMIT) > 0:
            gap = f" [... {left} characters ...] "
            lines[i] = line[: LINE_LIMIT * 2 // 3] + gap + line[-LINE_LIMIT // 3 :]
    text = "\n".join(lines).strip("\n")
    ticks = "`" * max(3, max((len(run) for run in re.findall("`+", text)), default=0) + 1)
    return f"{ticks}{language or 'text'}\n{text}\n{ticks}"


def clip_mid(value: Any, lines: int = 15, source: str | None = None) -> str:
    """Head and tail of a text of more than `lines` lines; the gap says how much is left out."""
    rows = str("" if value is None else value).rstrip("\n").split("\n")
    if len(rows) <= lines:
        return "\n".join(rows)
    head = max(1, lines // 3)
    gap = len(rows) - (lines - 1)
    where = f", {source}" if source else ""
    mark = f"[... {gap} lines left out{where}]"
    return "\n".join([*rows[:head], mark, *rows[len(rows) - (lines - 1 - head) :]])


def us(value: Any, ci: Any = None) -> str:
    """Microseconds, in ms from 1000 on; with an interval `41.2 [41.0, 41.5] us`."""
    if not is_number(value):
        return "-"
    scale, unit = (1000, "ms") if abs(value) >= 1000 else (1, "us")
    ends = f" [{ci[0] / scale:.4g}, {ci[1] / scale:.4g}]" if is_interval(ci) else ""
    return f"{value / scale:.4g}{ends} {unit}"


us_ci = us  # where there is an interval


def pct(value: Any, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %" if is_number(value) else "-"


def num(value: Any) -> str:
    """A number in four digits; true and false as words; anything else as a cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if is_number(value) else cell(value)


def span(seconds: Any) -> str:
    if not is_number(seconds):
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} m {rest:02d} s"


def size(value: Any) -> str:
    if not is_number(value):
        return "-"
    power = sum(value >= 1024**n for n in (1, 2, 3))
    return f"{value / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def is_interval(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_number, value))


def sparkline(values: list[float], width: int = 60) -> str:
    """`values` as bars, the mean of each of at most `width` slices."""
    if not values:
        return ""
    n = min(width, len(values))
    slices = [values[i * len(values) // n : (i + 1) * len(values) // n] for i in range(n)]
    means = [sum(s) / len(s) for s in slices]
    low, high = min(means), max(means)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((m - low) * scale)] for m in means)
