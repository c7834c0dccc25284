"""Functions that torch.compile does not trace: it leaves them as they are, or asks them once."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Fn = TypeVar("Fn", bound=Callable[..., Any])

# What the compiler looks at frames with, None while nothing is compiled; asking is private to
# PyTorch, and without an answer every call is taken for one under the compiler.
_callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: False)


def untraced(fn: Fn) -> Fn:
    """torch.compiler.disable(fn), without importing the compiler where nobody compiles, and without
    its 5 us a call where nothing is compiled at the time."""
    disabled: list[Callable] = []

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        # First what a tracer takes for a constant: it cannot look into the other.
        if not torch.compiler.is_compiling() and _callback() is None:
            return fn(*args, **kwargs)
        if not disabled:
            if "torch._dynamo" not in sys.modules:
                return fn(*args, **kwargs)
            disabled.append(torch.compiler.disable(fn))
        return disabled[0](*args, **kwargs)

    return call  # type: ignore[return-value]


def constant(fn: Fn) -> Fn:
    """fn for torch.compile to call while it traces, taking the answer for a constant."""

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        return fn(*args)

    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
