"""Which kernels failed to compile or launch: none is tried again for a call of the same kind.

A compiler that fails takes seconds and keeps nothing, so that trying at every call would be worse
than the slower route. A named route is always tried: its error is the caller's.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa.flags import Flags
from nsa.routes import Request, Route

MOST = 4096  # kinds of calls that are remembered; more are tried again
_failed: dict[Hashable, str] = {}


def _scale(x: Any) -> Hashable:
    """What tells kinds of calls apart in an argument: dtypes, and sizes by powers of two, as tiles
    and grids go. Then a sequence that grows meets a broken kernel a few times, not at every
    length."""
    if isinstance(x, Tensor):
        return x.dtype, tuple(n.bit_length() for n in x.shape)
    if isinstance(x, int):
        return x.bit_length()
    if isinstance(x, dict):
        return tuple((name, _scale(one)) for name, one in x.items())
    if isinstance(x, (tuple, list)):
        return tuple(_scale(one) for one in x)
    return x if isinstance(x, str) else None


def _kind(route: Route, request: Request, flags: Flags, args: Any) -> Hashable:
    request = replace(request, key_len=_scale(request.key_len))  # type: ignore[arg-type]
    return route, request, flags, _scale(args)


def known(route: Route, request: Request, flags: Flags, args: Any) -> str | None:
    """What `route` failed with when it was tried for a call of this kind, None if it was not or did
    not, and in a compiled graph, whose sizes may be symbols and where no kernel runs yet. args: of
    the call, any nesting of tuples, lists and dicts."""
    if not _failed or torch.compiler.is_compiling():
        return None
    return _failed.get(_kind(route, request, flags, args))


def remember(route: Route, request: Request, flags: Flags, args: Any, error: str) -> None:
    """known() gives `error` from now on."""
    if len(_failed) < MOST:
        _failed[_kind(route, request, flags, args)] = error


def reset() -> None:
    """Forget failures (tests)."""
    _failed.clear()
