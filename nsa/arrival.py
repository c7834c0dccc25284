"""Keys of the selection branch that are still on their way while the other branches compute.

nsa_attention and its fused operator ask for them just before they attend the selected blocks, which
they do last. Nobody else may read them earlier.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch

_awaited: ContextVar[Callable[[], None] | None] = ContextVar("selection's keys", default=None)


@contextlib.contextmanager
def selection_waits(arrive: Callable[[], None]) -> Iterator[None]:
    """Inside, arrive() is called before k_sel and v_sel are read, once or more; at the end too."""
    token = _awaited.set(arrive)
    try:
        yield
    finally:
        _awaited.reset(token)
        arrive()


def await_selection() -> None:
    """Have k_sel and v_sel arrive."""
    # What torch.compile traces never waits: nsa/parallel.py runs such a call untraced.
    if torch.compiler.is_compiling():
        return
    arrive = _awaited.get()
    if arrive is not None:
        arrive()


def selection_is_awaited() -> bool:
    """Return whether k_sel and v_sel are still to arrive."""
    return _awaited.get() is not None
