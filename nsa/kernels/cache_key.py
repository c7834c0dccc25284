"""Keys of compiled kernels in Triton's cache on disk that are the same in every process.

The key of a kernel holds the constants of what it calls. Triton before 3.8 reads them before it has
looked for them, so that only functions which some other kernel called earlier have any. Kernels
that share functions and compile side by side then get other keys by chance, and a process compiles
for half a minute what is on the disk. (Mended in Triton by its pull request 10494.)
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import triton
from triton.runtime.jit import DependenciesFinder

LOOKS_LATE = triton.__version__.startswith(("3.6.", "3.7."))  # older ones were not looked at
_lock = threading.RLock()
_walked: set[int] = set()  # functions whose calls are looked at now: one may call itself


class _Calls(DependenciesFinder):
    """Triton's own walk over a function, which settles whatever that calls."""

    def _update_hash(self, func: Any) -> None:
        _settle(func)


def settle(kernel: Any) -> None:
    """Have Triton compute the keys of all that a kernel calls before the kernel's own."""
    if LOOKS_LATE:
        with _lock:
            _settle(kernel)


def _settle(function: Any) -> None:
    if getattr(function, "hash", "") is not None or id(function) in _walked:
        return
    _walked.add(id(function))
    try:
        nonlocals = inspect.getclosurevars(function.fn).nonlocals
        calls = _Calls(function._fn_name, function.__globals__, nonlocals, function.src)
        calls.visit(function.parse())
    finally:
        _walked.remove(id(function))
    function.cache_key  # noqa: B018 - a property that computes it, and keeps it
