"""Where the seconds of a stage's process go, told as metrics when it ends: seconds/proof, ...

    spent.begin()
    with spent.on("proof"): ...

`start` is what came before begin(): Python and imports. `compile` is the sum of Triton's own times
of what it compiled, in however many threads, so that it may overlap with the others.
"""

import atexit
import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from bench.records import emit

_seconds: Counter[str] = Counter()
_began: float | None = None  # when the stage did, in a process that was started ahead
_inside = 0.0  # seconds of blocks that ended within the present one: each second counts once


def begin() -> None:
    """Note what the start of this process took and watch Triton's compiler; at the end, tell."""
    if "start" in _seconds:
        return
    _seconds["start"] = _age_s()

    def compiled(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            _seconds["compile"] += times.total / 1e6

    with contextlib.suppress(ImportError, AttributeError):
        from triton import knobs

        if knobs.compilation.listener is None:
            knobs.compilation.listener = compiled
    atexit.register(tell)


def began() -> None:
    """The stage begins now, however long its process has waited for it."""
    global _began
    _began = time.perf_counter()


def _age_s() -> float:
    """Seconds since the stage, or its process, began; 0 where the system does not say."""
    if _began is not None:
        return time.perf_counter() - _began
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return 0.0


@contextlib.contextmanager
def on(what: str) -> Iterator[None]:
    """Count the seconds of the block, without those of blocks in it, for `what`."""
    global _inside
    before, _inside, start = _inside, 0.0, time.perf_counter()
    try:
        yield
    finally:
        took = time.perf_counter() - start
        _seconds[what] += took - _inside
        _inside = before + took


def tell() -> None:
    """Send the metrics, once."""
    for what, seconds in _seconds.items():
        emit("metric", {"name": f"seconds/{what}", "value": round(seconds, 2), "unit": "s"})
    _seconds.clear()
