"""Nested tensors of PyTorch: jagged ones are packs, which layers take; functions refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def run_packed(
    forward: Callable[[Tensor, Tensor, int], Tensor], x: Tensor, cu_seqlens: Tensor | None
) -> Tensor:
    """forward(values, cu_seqlens, max_seqlen) of jagged x [B, j, ..], as jagged [B, j, ..].

    Waits for the device to learn the longest length. Raises ValueError for another layout, for
    sequences with holes between them and for cu_seqlens beside it.
    """
    jagged: Any = x  # has more attributes than a Tensor
    whole = x.layout is torch.jagged and jagged.lengths() is None and jagged._ragged_idx == 1
    if not whole:
        raise ValueError(
            "a nested tensor must be [B, j, ..] of layout torch.jagged without holes, got "
            f"{x.layout}: make it by torch.nested.nested_tensor(list, layout=torch.jagged)"
        )
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens must be None with a nested tensor, which has its own offsets")
    offsets = jagged.offsets()
    longest = int(offsets.diff().max())
    out = forward(x.values(), offsets.to(torch.int32), longest)
    return torch.nested.nested_tensor_from_jagged(out, offsets)


def refuse_nested(name: str, x: Any) -> None:
    """Raise TypeError where x is a nested tensor."""
    if isinstance(x, Tensor) and x.is_nested:
        raise TypeError(
            f"{name} must not be a nested tensor: give {name}.values() of layout torch.jagged and "
            "cu_seqlens=offsets().to(torch.int32)"
        )
