"""What a report is made of: answers, and sections of blocks, which the templates write as text.

A block is a str (a paragraph), a list of str (bullets) or one of the classes below. Every text is
inline Markdown as markdown.cell and markdown.code make it, so that no text of a log is markup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

BAR_CHARACTERS = 20  # of the longest bar in Markdown
LONGEST_BAR = 60.0  # per cent of the line in HTML


@dataclass(frozen=True)
class Shape:
    """How much is shown; report.LADDER has the shapes that an issue tries one after the other."""

    issue: bool = False  # the first screen and what is most asked for, folded
    log_lines: int = 15
    rows: int = 1500  # of any one table
    text: int = 400  # characters of a cell


@dataclass(frozen=True)
class View:
    """One run as the sections read it: the object of its bundle, and its rows held to the rules."""

    data: Mapping[str, Any]
    rows: Mapping[str, list[dict[str, Any]]]  # test | parity | bench
    floor: float | None  # the measured noise floor as a ratio
    folder: Path
    shape: Shape = Shape()
    plots: Sequence[tuple[str, str]] = ()  # (title, path in the folder)
    extra: Sequence[str] = ()  # notes of the rendering itself

    def pictures(self, *names: str) -> list[Picture]:
        return [Picture(title, path) for title, path in self.plots if Path(path).stem in names]


@dataclass(frozen=True)
class Head:
    kind: ClassVar = "head"
    text: str


@dataclass(frozen=True)
class Table:
    """heads: a string with | between them, or a sequence; all empty for a table without heads."""

    kind: ClassVar = "table"
    heads: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __post_init__(self) -> None:
        if isinstance(self.heads, str):
            object.__setattr__(self, "heads", self.heads.split("|"))


@dataclass(frozen=True)
class Code:
    """A block that markdown.fence made."""

    kind: ClassVar = "code"
    text: str


@dataclass(frozen=True)
class Fold:
    """What is read only by those who open it."""

    kind: ClassVar = "fold"
    title: str
    blocks: Sequence[Any]


@dataclass(frozen=True)
class Picture:
    kind: ClassVar = "picture"
    title: str
    path: str


@dataclass(frozen=True)
class Bar:
    """Two times side by side in microseconds, with the words for each and for their ratio."""

    name: str
    ours_us: float
    base_us: float
    ours: str
    base: str
    ratio: str
    more: str = ""

    def width(self, us: float) -> str:
        """Per cent of the line, on which the longer of the two leaves room for its words."""
        return f"{LONGEST_BAR * us / max(self.ours_us, self.base_us):.1f}"


@dataclass(frozen=True)
class Bars:
    """A picture of pairs of times that needs no image."""

    kind: ClassVar = "bars"
    heads: Sequence[str]  # of Bar.name, ours, base, ratio, more
    rows: Sequence[Bar]

    def table(self) -> Table:
        """The same as a table, its bars as text: how many times as fast as the baseline."""
        most = max(bar.base_us / bar.ours_us for bar in self.rows)
        length = lambda bar: round(BAR_CHARACTERS * bar.base_us / bar.ours_us / most)
        ratio = lambda bar: f"{bar.ratio} {'▇' * max(1, length(bar))}"
        cells = [[bar.name, bar.ours, bar.base, ratio(bar), bar.more] for bar in self.rows]
        used = 5 if any(bar.more for bar in self.rows) else 4
        return Table(self.heads[:used], [row[:used] for row in cells])


@dataclass(frozen=True)
class Answer:
    """One question of the first screen. colour: good | doubt | bad | quiet."""

    question: str
    answer: str
    colour: str
    blocks: Sequence[Any] = ()


@dataclass(frozen=True)
class Section:
    """What stands under one heading; blocks that are empty or None are left out."""

    title: str
    blocks: Sequence[Any]
    fold: bool = False
    issue: bool = True  # also in issue.md

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", [block for block in self.blocks if block])

    @property
    def id(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


def paragraphs(text: str, **words: str) -> list[str]:
    """The paragraphs of a wrapped text, with {words} filled in."""
    return [" ".join(part.split()).format(**words) for part in text.strip().split("\n\n")]
