"""report.html: the cells of report.md as one page that needs nothing else.

The cells come as our own Markdown (markdown.py). Here they are taken apart and every piece of text
is escaped; the only tags are the ones written below, so no text of a log can become markup.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from markupsafe import Markup, escape

_INLINE = re.compile(
    r"(?P<ticks>`+)(?!`)(?P<code>.+?)(?<!`)(?P=ticks)(?!`)"
    r"|\\(?P<escaped>[\\`*\[\]~|$!#_])|(?P<strong>\*\*)|&(?P<entity>amp|lt|gt);|\u200b"
)
_ENTITIES = {"amp": "&", "lt": "<", "gt": ">"}
_FENCE = re.compile(r"(?P<ticks>`{3,})\w*\n(?P<text>.*)\n(?P=ticks)", re.DOTALL)
_COLOURS = {
    "PASS": "good", "VALID": "good", "SKIPPED": "quiet", "NOT_RUN": "quiet", "UNSTABLE": "doubt",
    "STOPPED": "doubt", "INVALID": "doubt", "INCOMPLETE": "doubt",
    "WARN": "doubt", "OK": "good",
    **dict.fromkeys("FAIL TIMEOUT CRASH INFRA FAILED BROKEN BLOCK".split(), "bad"),
}  # fmt: skip


def inline(value: Any) -> Markup:
    """A cell of markdown.py as HTML: code and bold stay, a lone status is coloured."""
    if str(value) in _COLOURS:
        return status(value)
    text, out, at, tags = str(value), [], 0, itertools.cycle(("<strong>", "</strong>"))
    for match in _INLINE.finditer(text):
        out.append(escape(text[at : match.start()]))
        at = match.end()
        if match["code"] is not None:
            inside = match["code"].replace("\\|", "|")
            if len(match["ticks"]) > 1:
                inside = inside.removeprefix(" ").removesuffix(" ")
            out.append(Markup("<code>%s</code>") % inside)
        elif match["strong"]:
            out.append(Markup(next(tags)))
        elif plain := match["escaped"] or _ENTITIES.get(match["entity"]):
            out.append(escape(plain))
    out.append(escape(text[at:]))
    if (tag := next(tags)) == "</strong>":
        out.append(Markup(tag))
    return Markup("").join(out)


def block(value: Any) -> Markup:
    """A fenced block of markdown.py as <pre>."""
    match = _FENCE.fullmatch(str(value))
    return Markup("<pre>%s</pre>") % (match["text"] if match else str(value))


def colour(word: Any) -> str:
    """good | quiet | doubt | bad: the class of a status."""
    return _COLOURS.get(str(word), "bad")


def status(value: Any) -> Markup:
    return Markup('<b class="%s">%s</b>') % (colour(value), str(value))


FILTERS = {"md": inline, "block": block, "status": status, "colour": colour}
