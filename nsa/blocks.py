"""Block arithmetic: which tokens a compressed key or a selection block covers, and how many exist.

Counts take an int or an integer tensor and return the same kind. A traced call may have a symbol in
place of a length: counts of it hold for every length, without a branch that ties the trace to some.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

Count = TypeVar("Count", int, Tensor)


def is_symbol(n: int | torch.SymInt) -> bool:
    """Return whether n is no number yet, in a traced call that is to serve several lengths."""
    if not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value  # takes 0.6 s to import

    return not has_static_value(n)


def chunks(rows: int, width: int, most: int) -> list[tuple[int, int]]:
    """Return (first, last) of chunks of rows: `most` values of `width` in each row, and at least a
    row. All rows are one chunk where their number, or the width, is a symbol."""
    if is_symbol(rows) or is_symbol(width):
        return [(0, rows)]
    step = max(1, most // max(1, width))
    return [(first, min(rows, first + step)) for first in range(0, rows, step)]


def smaller(a: int, b: int) -> int:
    """Return the smaller of two lengths, each of which may be a symbol."""
    # Dynamo traces min of symbols by itself, and that of PyTorch 2.11 takes sym_min of no two ints.
    if torch.compiler.is_dynamo_compiling():
        return min(a, b)
    return torch.sym_min(a, b)


def num_compressed(S: Count, l: int, d: int) -> Count:
    """Compressed keys of S tokens: 0 if S < l, else (S - l) // d + 1 (Eq. 7, no padding)."""
    whole = (S - l) // d + 1
    if isinstance(S, Tensor):
        return whole.clamp(min=0)
    return max(0, whole) if isinstance(S, int) else torch.sym_max(0, whole)


def visible_compressed(t: Count, l: int, d: int) -> Count:
    """Compressed keys whose last token is at or before position t."""
    return num_compressed(t + 1, l, d)


def num_sel_blocks(S: Count, l_sel: int) -> Count:
    """Selection blocks that start before S, the last one possibly partial."""
    return -(-S // l_sel)


def cu_seqlens_compressed(cu_seqlens: Tensor, l: int, d: int) -> Tensor:
    """Offsets of each sequence's compressed keys, packed [N_total, G, D]; int32 [nseq + 1]."""
    counts = num_compressed(cu_seqlens[1:] - cu_seqlens[:-1], l, d)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


def reads(S: int, *, l: int, d: int, l_sel: int, n_sel: int, w: int) -> int:
    """Keys that one decode step at context length S (this token included) must read per group.

    num_compressed(S) + tokens of the selected blocks + min(w, S). The block of the newest token is
    always selected and may be partial; every other block is whole.
    """
    blocks = num_sel_blocks(S, l_sel)
    missing = blocks * l_sel - S  # tokens the last block still lacks
    selected = min(n_sel, blocks) * l_sel - missing if S else 0
    return num_compressed(S, l, d) + selected + min(w, S)
