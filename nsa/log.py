"""Structured log lines `NSA-LOG tag key=value`, off unless a debug flag asks for the tag."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
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
    if not (flags.debug_log or flags.debug_timing or flags.debug_shapes or flags.debug_compare):
        return False
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


def warn_once(text: str) -> None:
    """A RuntimeWarning, once per text in a process."""
    with _lock:
        if ("", text) in _once:
            return
        _once.add(("", text))
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def capturing(like: Any) -> bool:
    """True while operations on tensor `like` go into a CUDA graph, so that no value can be had."""
    import torch  # only where there is a tensor: importing nsa needs the standard library alone

    return like.is_cuda and torch.cuda.is_current_stream_capturing()


@contextmanager
def timed(
    tag: str, like: Any, flags: Flags, elements: Callable[[], int] | None = None, **kv: Any
) -> Iterator[None]:
    """Log the block's time under `tag` when asked for, waiting for the device of tensor `like`.

    elements(): how many of like's size were read, called after the block, for GB/s. While a CUDA
    graph is captured nothing runs, nothing may wait, and nothing is logged.
    """
    if not enabled(tag, flags) or capturing(like):
        yield
        return
    import torch

    wait = (lambda: torch.cuda.synchronize(like.device)) if like.is_cuda else (lambda: None)
    wait()
    begin = time.perf_counter()
    yield
    wait()
    seconds = time.perf_counter() - begin
    if elements is not None:
        kv["gbs"] = elements() * like.element_size() / seconds / 1e9
    log(tag, flags=flags, **{**kv, "ms": seconds * 1e3})


def reset() -> None:
    """Forget repeats (tests)."""
    with _lock:
        _seen.clear()
        _once.clear()
