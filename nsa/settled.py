"""Calls that need no second look: which checks hold and which route serves depends on sizes, types
and flags, so what Triton served once it serves again, without being asked."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from nsa.checks import is_eager, needs_grad
from nsa.dispatch import resolve_flags, watched
from nsa.errors import must_raise
from nsa.flags import Flags

MOST = 4096
_calls: dict[tuple, Callable[..., Any]] = {}


def key_of(
    tensors: tuple[Any, ...], flags: Flags | None, *rest: Hashable, differentiable: bool = False
) -> tuple | None:
    """Return what tells calls on these tensors apart, None where more than that matters: where a
    trace, a log line or a transformation sees what is called, or a gradient is needed of what is
    not differentiable."""
    if not is_eager(*tensors) or any([x.is_nested for x in tensors]):
        return None
    gradient = needs_grad(*tensors)
    if gradient and not differentiable:
        return None
    flags = resolve_flags(flags, tensors[0])
    if watched(flags):
        return None
    layouts = [(x.shape, x.stride(), x.dtype, x.device) for x in tensors]
    # 1 is True, but no softmax_scale is.
    return (*layouts, flags, gradient, *rest, *map(type, rest))


def again(key: tuple | None, *tensors: Any) -> Any:
    """Return the result of a call that was kept under `key`; None without one, and where it fails:
    the long way then meets the error again and tells of it."""
    if key is None:
        return None
    try:
        call = _calls.get(key)
    except TypeError:  # not hashable, which a check will name
        return None
    if call is None:
        return None
    try:
        return call(*tensors)
    except Exception as error:
        if must_raise(error):
            raise
        _calls.pop(key, None)
        return None


def keep(key: tuple | None, call: Callable[..., Any] | None) -> None:
    """Keep `call`, which gives None for tensors that it cannot take, for again()."""
    if key is not None and call is not None:
        if len(_calls) >= MOST:
            _calls.clear()
        _calls[key] = call
