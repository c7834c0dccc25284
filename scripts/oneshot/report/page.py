"""report.html: the cells of report.md as one page that needs nothing else.

The cells come as our own Markdown (markdown.py). Here they are taken apart and every piece of text
is escaped; the only tags are the ones written below, so no text of a log can become markup. Plots
are put in as SVG, of which only drawing elements are let through.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
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
    """One cell of markdown.py as HTML: code spans and bold stay, the rest is text. A cell that is
    nothing but a status gets its colour."""
    if str(value) in _COLOURS:
        return status(value)
    text, out, at, strong = str(value), [], 0, False
    for match in _INLINE.finditer(text):
        out.append(escape(text[at : match.start()]))
        at = match.end()
        if match["code"] is not None:
            inside = match["code"].replace("\\|", "|")
            if len(match["ticks"]) > 1:
                inside = inside.removeprefix(" ").removesuffix(" ")
            out.append(Markup("<code>%s</code>") % inside)
        elif match["escaped"]:
            out.append(escape(match["escaped"]))
        elif match["entity"]:
            out.append(escape(_ENTITIES[match["entity"]]))
        elif match["strong"]:
            strong = not strong
            out.append(Markup("<strong>") if strong else Markup("</strong>"))
    out.append(escape(text[at:]))
    if strong:
        out.append(Markup("</strong>"))
    return Markup("").join(out)


def block(value: Any) -> Markup:
    """A fenced block of markdown.py as <pre>."""
    match = _FENCE.fullmatch(str(value))
    return Markup("<pre>%s</pre>") % (match["text"] if match else str(value))


def colour(word: Any) -> str:
    """good | quiet | doubt | bad: the class of a status."""
    return _COLOURS.get(str(word), "bad")


def status(value: Any) -> Markup:
    """A status as a coloured word."""
    return Markup('<b class="%s">%s</b>') % (colour(value), str(value))


# ------------------------------------------------------------------------------------------- plots

_DRAWING = frozenset(
    "svg g defs clipPath path rect line circle ellipse polyline polygon text tspan use".split()
)
_PLAIN = frozenset(
    "d x y x1 y1 x2 y2 cx cy r rx ry points width height viewBox transform style fill stroke"
    " stroke-width text-anchor".split()
)
_LOCAL = re.compile(r"url\(#([\w.-]+)\)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def svg(source: str, prefix: str, title: str) -> Markup:
    """The drawing in `source` for use inside a page; ids get `prefix`, so that plots do not clash.

    Everything but drawing elements and their measures is left out: no scripts, handlers, styles of
    the page, links or references to elsewhere. Raises ValueError for text that is no SVG.
    """
    try:
        root = ElementTree.fromstring(re.sub(r"<!DOCTYPE[^>\[]*>", "", source))
    except ElementTree.ParseError as error:
        raise ValueError(f"no SVG: {error}") from None
    if _name(root.tag) != "svg":
        raise ValueError(f"no SVG but <{_name(root.tag)}>")
    box = root.get("viewBox", "")
    if not all(_NUMBER.fullmatch(n) for n in box.split()) or len(box.split()) != 4:
        raise ValueError(f"an SVG without a usable viewBox: {box[:40]!r}")
    inside = Markup("").join(_element(child, prefix) for child in root)
    head = Markup('<svg viewBox="%s" role="img" aria-label="%s">') % (box, title)
    return head + inside + Markup("</svg>")


def _name(tag: Any) -> str:
    return str(tag).rpartition("}")[2]


def _element(element: ElementTree.Element, prefix: str) -> Markup:
    name = _name(element.tag)
    if name not in _DRAWING:
        return Markup("")
    attributes = []
    for key, value in element.items():
        key = _name(key)
        if key == "id":
            value = prefix + re.sub(r"[^\w.-]", "", value)
        elif key == "href" and re.fullmatch(r"#[\w.-]+", value):
            value = f"#{prefix}{value[1:]}"
        elif key == "clip-path" and _LOCAL.fullmatch(value):
            value = _LOCAL.sub(rf"url(#{prefix}\1)", value)
        elif key not in _PLAIN or re.search(r"url|expression|@|\\|&|<", value, re.IGNORECASE):
            continue
        attributes.append(Markup(' %s="%s"') % (key, value))
    parts = [escape(element.text or "")] if name in ("text", "tspan") else []
    for child in element:
        parts.append(_element(child, prefix))
        if name in ("text", "tspan"):
            parts.append(escape(child.tail or ""))
    inside = Markup("").join(parts)
    return Markup("<%s%s>%s</%s>") % (name, Markup("").join(attributes), inside, name)


FILTERS = {"md": inline, "block": block, "status": status, "colour": colour}
