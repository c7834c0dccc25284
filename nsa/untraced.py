"""Functions that torch.compile leaves as they are: what they call is not traced either."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def untraced(fn: Callable) -> Callable:
    """torch.compiler.disable(fn), without importing the compiler where nobody compiles."""
    disabled: list[Callable] = []

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return fn(*args, **kwargs)
            disabled.append(torch.compiler.disable(fn))
        return disabled[0](*args, **kwargs)

    return call
