"""What the person at the terminal sees: one live line on a TTY, plain lines elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

from scripts.oneshot.record.model import Stage, StageResult
from scripts.oneshot.record.rows import test_counts

QUIET_EVERY_S = 30.0


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes}:{seconds:02d}"


class Progress:
    """Writes lines to `stream`. One that went away (SIGHUP, closed pipe) never ends the run."""

    def __init__(
        self, stages: Sequence[Stage], stream: TextIO | None = None,
        price_per_hour: float | None = None,
    ) -> None:  # fmt: skip
        self.stream = stream or sys.stdout
        self.tty = self.stream.isatty() and os.environ.get("TERM", "") != "dumb"
        self.stages, self.price = len(stages), price_per_hour
        self._estimates = [stage.estimate_s for stage in stages]
        self.telemetry: Mapping[str, Any] = {}
        self.started = time.monotonic()
        self._index, self._title, self._next = 0, "", 0.0
        self._live, self.done_text = False, ""

    def line(self, text: str = "") -> None:
        self._write(("\r\x1b[K" if self._live else "") + text + "\n", live=False)

    def _write(self, text: str, live: bool) -> None:
        with suppress(OSError, ValueError):
            self.stream.write(text)
            self.stream.flush()
            self._live = live

    def next(self) -> None:
        self._index += 1

    def begin(self, stage: Stage) -> None:
        self._title, self.done_text = stage.id, ""
        self._next = time.monotonic() + QUIET_EVERY_S
        if not self.tty:
            self.line(f"[{self._index}/{self.stages}] {stage.id}: {stage.title}")

    def tick(self, elapsed_s: float, limit_s: float, rows: list[dict[str, Any]]) -> None:
        now = time.monotonic()
        if not self.tty and now < self._next:
            return
        self._next = now + QUIET_EVERY_S
        text = f"[{self._index}/{self.stages}] {self._title}  {clock(elapsed_s)}/{clock(limit_s)}"
        now_s, *later_s = self._estimates[self._index - 1 :]
        left_s = max(0.0, now_s - elapsed_s) + sum(later_s)
        text += f", about {clock(left_s)} left" if left_s >= 1 else ""
        text += "".join(f"  {n} {name}" for name, n in test_counts(rows).items() if n)
        text += f"  {self.done_text}" if self.done_text else ""
        for key, unit in (("temp_c", "C"), ("power_w", "W"), ("sm_mhz", "MHz")):
            if key in self.telemetry:
                text += f" {self.telemetry[key]:.0f}{unit}"
        text += self.cost()
        if self.tty:
            self._write("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1], live=True)
        else:
            self.line(text)

    def cost(self) -> str:
        if not self.price:
            return ""
        return f"  ${(time.monotonic() - self.started) / 3600 * self.price:.2f}"

    def end(self, result: StageResult) -> None:
        number = f"[{self._index}/{self.stages}]"
        counts = "".join(f" {n} {name}" for name, n in result.counts.items() if n)
        text = f"{number} {result.id:16} {result.status.value:8} {result.wall_s:6.1f} s{counts}"
        self.line(text + (f"  {result.reason[:160]}" if result.reason else ""))
