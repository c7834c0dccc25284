"""Which errors no fallback may hide."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

# After one of these every later CUDA call of the process fails too: falling back would only hide
# where it happened. The driver's words and, of what cuda.bindings raises, its names; both as
# _words() leaves them.
_STICKY = (
    "illegal memory access", "cuda error illegal address",
    "device-side assert", "cuda error assert",
    "misaligned address",
    "unspecified launch failure", "cuda error launch failed",
    "the launch timed out", "cuda error launch timeout",
    "illegal instruction",
    "invalid address space", "global/shared address space",
    "invalid program counter", "cuda error invalid pc",
    "hardware stack error",
    "tensor memory not completely freed", "tensor memory leak",
    "uncorrectable",
    "invalid access of peer gpu memory", "cuda error contained",
    "external entity outside of cuda", "cuda error external device",
    "mps client has been terminated", "mps client terminated",
    "context is destroyed",
    "cuda error: unknown error", "[cuda]: unknown error", "cuda error unknown",
)  # fmt: skip


class ExchangeFailed(RuntimeError):
    """Ranks could not exchange what an attention needs: no other route has it either."""


@contextlib.contextmanager
def callers_own() -> Iterator[None]:
    """Around code that a caller gave: no other route mends its errors, and no kernel has failed."""
    try:
        yield
    except Exception as error:
        error.callers_own = True  # type: ignore[attr-defined]
        raise


def _words(error: BaseException) -> str:
    return str(error).lower().replace("_", " ")


def is_sticky(error: BaseException) -> bool:
    """True for CUDA errors after which the process cannot use its device any more."""
    text = _words(error)
    return any(word in text for word in _STICKY)


def must_raise(error: BaseException) -> bool:
    """True for what no fallback may hide: out of memory, sticky CUDA errors, ExchangeFailed, what
    callers_own() marked, and what ends a checkpoint's recomputation, which is no failure."""
    if type(error).__module__ == "torch.utils.checkpoint" or hasattr(error, "callers_own"):
        return True
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, ExchangeFailed)):
        return True
    return "out of memory" in _words(error) or is_sticky(error)


def told(error: BaseException) -> str:
    """The error's kind and words, cut to what a log line takes."""
    return f"{type(error).__name__}: {error}"[:300]
