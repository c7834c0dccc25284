"""Which kernels really ran: launch counts by kernel function name.

Every launcher calls bump() right after its launch. A recording on a GPU does not trust that for
Triton kernels: Triton's own launch hook counts what was launched. The hook does not fire in the
interpreter, where the launchers' counts are all there is.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

_counts: dict[str, int] = {}
_active: list[Recording] = []
_lock = threading.Lock()  # the autograd engine launches from its own thread


class Recording(dict):
    """Kernel name -> launches. source: "hook" (Triton reports each launch) or "launcher"."""

    source: str = "launcher"

    def _add(self, name: str) -> None:
        self[name] = self.get(name, 0) + 1


def bump(*names: str, library: bool = False) -> None:
    """Count one launch of each of these kernels, as launchers do right after it.

    library=True marks calls into another library (FA-2, SDPA), which Triton's hook cannot see.
    """
    with _lock:
        for name in names:
            _counts[name] = _counts.get(name, 0) + 1
        for recording in _active:
            if library or recording.source == "launcher":
                for name in names:
                    recording._add(name)


def counts() -> dict[str, int]:
    """The launchers' counts since the process started or reset() was called."""
    with _lock:
        return dict(_counts)


def reset() -> None:
    """Set the launchers' counts to zero."""
    with _lock:
        _counts.clear()


def _hook(metadata: Any, *_: Any) -> None:
    # 3.6 and 3.7 pass a LazyDict whose .data holds the eager entries; get() would also evaluate
    # user callbacks.
    data = getattr(metadata, "data", None)
    name = (data if isinstance(data, dict) else metadata.get())["name"]
    with _lock:
        for recording in _active:
            if recording.source == "hook":
                recording._add(name)


def _hooks() -> Any:
    """Triton's chain of launch hooks when kernels are compiled for a CUDA device, else None."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    try:
        from triton import knobs
    except ImportError:
        return None
    hooks = knobs.runtime.launch_enter_hook  # where a profiler put its own there, launchers count
    return hooks if hasattr(hooks, "calls") and not knobs.runtime.interpret else None


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Yield a dict that fills with kernel name -> launches made inside the block."""
    result, hooks = Recording(), _hooks()
    result.source = "launcher" if hooks is None else "hook"
    outermost = hooks is not None and _hook not in hooks.calls
    if outermost:
        hooks.add(_hook)
    with _lock:
        _active.append(result)
    try:
        yield result
    finally:
        with _lock:
            _active[:] = [r for r in _active if r is not result]
        if outermost:
            hooks.remove(_hook)
