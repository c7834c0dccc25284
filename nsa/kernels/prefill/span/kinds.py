"""The two kinds of key spans, free of Triton (see common.py for what they mean)."""

from __future__ import annotations

from dataclasses import dataclass

COMPRESSED = 0
SLIDING = 1


@dataclass(frozen=True)
class Span:
    """Which keys a query sees. mode COMPRESSED uses (a=l, b=d); SLIDING uses a=window, b unused."""

    mode: int
    a: int
    b: int = 1
