"""Writing so that the disk is valid at every second: a journal, and replacing files as a whole."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.records import write_atomic

BALLAST_BYTES = 256 * 1024
# Dropped in this order when the disk is full: bulky, and nothing else is computed from them.
DROPPED_FIRST = ("bench/samples.jsonl", "telemetry.csv")


def utc_now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no finite number")
    return value


MAX_EVENT_DEPTH = 80


def parse_json(data: bytes | str) -> Any:
    """JSON that may come from anywhere: no NaN, no infinity, no more than MAX_EVENT_DEPTH deep.

    Raises ValueError.
    """
    try:
        value = json.loads(data, parse_float=_float, parse_constant=_float)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_EVENT_DEPTH}") from None
    brackets = ("[", "{") if isinstance(data, str) else (b"[", b"{")
    if sum(map(data.count, brackets)) > MAX_EVENT_DEPTH:
        level = [value]
        for _ in range(MAX_EVENT_DEPTH):
            level = [v for item in level if isinstance(item, (dict, list))
                     for v in (item.values() if isinstance(item, dict) else item)]  # fmt: skip
        if level:
            raise ValueError(f"nested deeper than {MAX_EVENT_DEPTH}")
    return value


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, json.dumps(value, allow_nan=False, ensure_ascii=False, indent=1) + "\n")


class Ballast:
    """A file that is given up when the disk is full, so that the verdict still fits.

    logs: what stages print, to be given up last, as names in `folder`.
    """

    def __init__(self, folder: Path, logs: Iterable[str] = ()) -> None:
        self.folder, self.logs = folder, tuple(logs)
        self.path = folder / ".ballast"
        with suppress(OSError):
            self.path.unlink(missing_ok=True)  # a pipe of that name would never take it
            self.path.write_bytes(b"\0" * BALLAST_BYTES)

    def release(self) -> bool:
        """Free what can be freed next; False when nothing is left to give up."""
        for names in ((".ballast",), *((name,) for name in DROPPED_FIRST), self.logs):
            freed = False
            for file in (self.folder / name for name in names):
                with suppress(OSError):
                    if file.is_file() and file.stat().st_size:
                        file.unlink()
                        freed = True
            if freed:
                return True
        return False

    def guarded(self, write: Callable[[], None]) -> bool:
        """Run `write`; on a full disk free something and try again. False when it did not fit."""
        while True:
            try:
                write()
                return True
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.release():
                    return False

    def drop(self) -> None:
        with suppress(OSError):
            self.path.unlink()


class Journal:
    """events.jsonl: one event per line, appended and flushed; fsynced at the edges of a stage."""

    def __init__(
        self, path: Path, clean: Callable[[Any], Any] = lambda value: value,
        make_room: Callable[[], bool] = lambda: False, seq: int = 0,
    ) -> None:  # fmt: skip
        self.path, self._clean, self._make_room = path, clean, make_room
        self.started = time.monotonic()
        self.lost = 0  # events that did not fit on the disk
        self.seq = seq  # of the last event; a journal that is opened again counts on
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, ev: str, *, sync: bool = True, **fields: Any) -> dict[str, Any]:
        """Write one event and return it as it was written. A full disk loses it, never raises."""
        self.seq += 1
        elapsed = round(time.monotonic() - self.started, 3)
        event = self._clean({"seq": self.seq, "t": utc_now(), "m": elapsed, "ev": ev, **fields})
        line = dumps(event)
        data = (line + "\n").encode("utf-8", "replace")
        while not self._written(data, sync):
            if not self._make_room():
                self.lost += 1
                break
        return json.loads(line)

    def _written(self, data: bytes, sync: bool) -> bool:
        """Append `data` as a whole, or leave the journal as it was."""
        end = os.fstat(self._fd).st_size
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            if sync:
                os.fsync(self._fd)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, end)  # no half line in the middle of the journal
            return False
        return True

    def keep_at(self, path: Path) -> None:
        """Put all that was written to `path`, where the file there is not ours or is none."""
        with suppress(OSError):
            if os.path.samestat(os.fstat(self._fd), os.lstat(path)):
                return
        data = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        write_atomic(path, data.decode("utf-8", "replace"))
        os.close(self._fd)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)

    def close(self) -> None:
        with suppress(OSError):
            os.fsync(self._fd)
            os.close(self._fd)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The whole events of a journal. A half last line, as a power cut leaves it, is dropped."""
    events, data = [], b""
    with suppress(OSError):
        data = path.read_bytes() if path.is_file() else b""  # a pipe would never end
    for line in data.split(b"\n"):
        with suppress(ValueError):
            event = parse_json(line)
            if isinstance(event, dict) and isinstance(event.get("ev"), str):
                events.append(event)
    return events
