"""Which errors no fallback may hide."""

from __future__ import annotations

import torch

# After one of these every later CUDA call of the process fails too: falling back would only hide
# where it happened.
_STICKY = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
    "illegal instruction",
    "invalid address space",
    "hardware stack error",
    "uncorrectable",
    "context is destroyed",
)


class ExchangeFailed(RuntimeError):
    """Ranks could not exchange what an attention needs: no other route has it either."""


def is_sticky(error: BaseException) -> bool:
    """True for CUDA errors after which the process cannot use its device any more."""
    text = str(error).lower()
    return any(word in text for word in _STICKY)


def must_raise(error: BaseException) -> bool:
    """True for what no fallback may hide: out of memory, sticky CUDA errors, ExchangeFailed."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, ExchangeFailed)):
        return True
    return "out of memory" in str(error).lower() or is_sticky(error)
