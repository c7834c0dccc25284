"""Structured log lines `NSA-LOG tag key=value`, off unless a debug flag asks for the tag."""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable
from typing import Any

from nsa.flags import Flags, get_flags

# Each debug flag suffices alone for the tags that end in one of its words.
_TAGS_OF_FLAG = {
    "debug_timing": ("timing", "pack", "path"),
    "debug_shapes": ("shapes",),
    "debug_compare": ("compare",),
}

_seen: dict[str, int] = {}
_once: set[tuple[str, Hashable]] = set()
_lock = threading.Lock()


def enabled(tag: str, flags: Flags | None = None) -> bool:
    """True when `tag` would be printed: ask before computing something only a log line needs."""
    flags = flags or get_flags()
    last = tag.rsplit(".", 1)[-1]
    for name, words in _TAGS_OF_FLAG.items():
        if last.endswith(words):
            return getattr(flags, name)
    return flags.debug_log


def _text(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace(" ", "") if isinstance(value, (list, tuple)) else "_".join(text.split())


def log(tag: str, *, flags: Flags | None = None, **kv: Any) -> None:
    """Print one line to stderr if the tag is enabled and below NSA_LOG_LIMIT repeats."""
    flags = flags or get_flags()
    if not enabled(tag, flags):
        return
    with _lock:
        count = _seen[tag] = _seen.get(tag, 0) + 1
    if flags.log_limit is not None and count > flags.log_limit:
        return
    pairs = "".join(f" {k}={_text(v)}" for k, v in kv.items())
    print(f"NSA-LOG {tag}{pairs}", file=sys.stderr, flush=True)


def once(tag: str, key: Hashable = None, *, flags: Flags | None = None, **kv: Any) -> None:
    """Like log, but once per (tag, key) in a process."""
    if not enabled(tag, flags):
        return
    with _lock:
        if (tag, key) in _once:
            return
        _once.add((tag, key))
    log(tag, flags=flags, **kv)


def reset() -> None:
    """Forget repeats (tests)."""
    with _lock:
        _seen.clear()
        _once.clear()
