"""Which tokens of a Transformers batch belong together: padding, packs, and masks that say so.

All are one tensor, numbers [B, N]: of which sequence a column is, 0 for padding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import causal_mask_function


@dataclass
class Pack:
    """Sequences in a batch of N columns, as one pack.

    runs: (row, first column, end) of each, None where cu_seqlens came from outside. real: bool
    [B, N], which columns are tokens, None for all of them.
    """

    runs: list[tuple[int, int, int]] | None
    real: Tensor | None
    cu_seqlens: Tensor
    max_seqlen: int

    @functools.cached_property
    def tokens(self) -> Tensor | None:
        """Places of the tokens in the flattened batch, int64 [T], None for all of them."""
        return None if self.real is None else self.real.flatten().nonzero().flatten()

    def rows(self, batch: int) -> list[tuple[int, int]] | None:
        """(first, end) of each row, its end twice for an empty one; None where one has more
        sequences."""
        if self.runs is None or len({row for row, _, _ in self.runs}) < len(self.runs):
            return None
        found = {row: (first, end) for row, first, end in self.runs}
        n = 0 if self.real is None else self.real.shape[1]
        return [found.get(row, (n, n)) for row in range(batch)]


def _pack(numbers: Tensor, breaks: Tensor | None) -> Pack:
    """The pack of a batch whose columns say of which sequence they are: [B, N], 0 for padding.

    breaks: bool [B or 1, N - 1], behind which columns another sequence begins all the same.
    """
    B, N = numbers.shape
    real = numbers != 0
    new = torch.ones_like(real)
    new[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    if breaks is not None:
        new[:, 1:] |= breaks
    last = torch.ones_like(real)
    last[:, :-1] = new[:, 1:]
    begins, ends = ((real & edge).flatten().nonzero().flatten() for edge in (new, last))
    which = numbers.flatten()[begins].long()
    runs, seen, last = [], set(), None
    for begin, end, number in torch.stack([begins, ends + 1, which], 1).tolist():
        row = begin // N
        if (row, number) in seen and last != (row, number, begin):
            raise NotImplementedError(
                f"nsa takes padding before or after a sequence, got it inside sequence {row}"
            )
        seen.add((row, number))
        last = row, number, end
        runs.append((row, begin - row * N, end - row * N))
    cu_seqlens = F.pad((ends + 1 - begins).cumsum(0), (1, 0)).to(torch.int32)
    lengths = [end - first for _, first, end in runs]
    whole = sum(lengths) == B * N
    return Pack(runs, None if whole else real, cu_seqlens, max(lengths, default=0))


def _pack_by(numbers: Tensor | None, positions: Tensor | None, batch: int) -> Pack | None:
    """The pack of numbers [B, N] and positions [B or 1, N], either of which may be None.

    A sequence begins wherever positions do not go on, as Transformers has it without a cache. None
    where each row is one sequence without padding.
    """
    breaks = None if positions is None else positions[:, 1:] != positions[:, :-1] + 1
    if numbers is None:
        if breaks is None or not bool(breaks.any()):
            return None
        numbers = positions.new_ones(batch, positions.shape[1])
    return _pack(numbers, breaks)


def _once(numbers: Tensor | None, positions: Tensor | None, batch: int) -> Pack | None:
    """_pack_by(), once for all layers of a forward pass: they get the same tensors, and making it
    waits for the device."""
    given = [x for x in (numbers, positions) if x is not None]
    if not given or torch.compiler.is_compiling() or any(x.is_inference() for x in given):
        return _pack_by(numbers, positions, batch)
    key = [batch, *((id(x), x._version) for x in given)]
    made = getattr(given[0], "nsa_pack", None)
    if made is None or made[0] != key:
        # It keeps the positions, so that no other tensor gets their id.
        made = given[0].nsa_pack = key, given[1:], _pack_by(numbers, positions, batch)
    return made[2]


def nsa_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0,
    mask_function: Any = causal_mask_function, attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """Of which sequence each column is: [B, kv_length], 0 for padding; None for one in each row.

    NSA is causal itself. Raises NotImplementedError for any other mask, and caches that are not
    dynamic.
    """
    if kv_offset or int(q_offset) + q_length != kv_length:
        raise NotImplementedError(
            f"nsa takes a dynamic cache only: got {kv_length} keys for {q_length} queries at "
            f"{int(q_offset)}"
        )
    if mask_function is not causal_mask_function:
        numbers = None
        if not kwargs.get("use_vmap") and attention_mask is None and not int(q_offset):
            numbers = _packed_by(mask_function, batch_size, q_length, kwargs.get("device"))
        if numbers is None:
            raise NotImplementedError(
                "nsa takes causal attention of whole sequences only: no sliding or chunked layers, "
                "no bidirectional attention"
            )
        return numbers
    if attention_mask is None:
        return None
    # Dense attention does the same: what a narrow mask lacks is padding, and what a wide one has
    # more than there are keys is of tokens to come.
    numbers = F.pad(attention_mask, (0, kv_length - attention_mask.shape[-1]))
    return None if bool(numbers.all()) else numbers


def _packed_by(mask_function: Any, B: int, N: int, device: Any) -> Tensor | None:
    """Numbers [B, N] of the sequences that a mask function keeps apart, each causal and whole; None
    for any other mask."""
    row = torch.arange(B, device=device)[:, None]
    t = torch.arange(N, device=device).expand(B, N)
    sees = lambda q, k: mask_function(row, 0, q, k).expand(q.shape)
    new = torch.ones(B, N, dtype=torch.bool, device=device)
    new[:, 1:] = ~sees(t[:, 1:], t[:, :-1])
    first = torch.where(new, t, 0).cummax(1).values
    wrong = ~sees(t, t) | ~sees(t, first) | (first > 0) & sees(t, (first - 1).clamp(min=0))
    if bool(wrong.any()) or bool(sees(t[:, :-1], t[:, 1:]).any()):
        return None
    return new.cumsum(1)


def pack_for(q: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> Pack | None:
    """The sequences of q [B, S, HQ, D] by whichever argument tells them apart, None for one each.

    Positions in more than two dimensions (images, video) tell of no packs.
    """
    B, S = q.shape[:2]
    cu_seqlens, positions = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    if positions is not None and (positions.ndim != 2 or S == 1):
        positions = None
    if attention_mask is not None and positions is not None and attention_mask.shape[1] != S:
        positions = None  # behind a cache a row is one sequence
    if attention_mask is None and cu_seqlens is not None:
        longest = kwargs.get("max_length_q")
        longest = int(cu_seqlens.diff().max() if longest is None else longest)
        return Pack(None, None, cu_seqlens.to(q.device, torch.int32), longest)
    return _once(attention_mask, positions, B)
