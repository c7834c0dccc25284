"""Heads of zeros that make the query heads of a group as many as the kernels for Hopper take.

Those take 4, 8 or 16 heads a group; models have 3, 5, 6, 7 and 12 too. A head of zeros costs what
any head costs, and memory with it, but the others gain more: H200, bf16, D = 128, 32k tokens, 40
heads in 8 groups, forward 15.4 -> 8.8 ms, backward 38.5 -> 16.4, 5.0 -> 8.5 GiB, beside Triton's
kernels, which take any number. Its output and gradients are cut off again; only the choice of
blocks, which sums over the heads of a group, must be told.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.launch import launch
from nsa.kernels.prefill import hopper
from nsa.kernels.prefill.blocks.tile_blocks import SPLIT_KEYS, SPLIT_QUERIES
from nsa.kernels.tiles import cdiv, pow2

LEAST_TRAINED = 1024  # tokens of all sequences from which it pays in training
SIZE = 1024


def heads_to_be(
    device: torch.device, dtype: torch.dtype, heads: int, d: int, dv: int, use_gluon: bool | None
) -> int:
    """How many query heads a group is to have where a call is long enough: heads, or more."""
    to = pow2(heads)
    serve = (
        2 < heads < to <= 16
        and dtype in (torch.float16, torch.bfloat16)
        and (d, dv) in hopper.WIDTHS
        and hopper.enabled(device, use_gluon)
    )
    return to if serve else heads


heads_to_be._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see flags.get_flags


@dataclass(frozen=True)
class Padding:
    """From `heads` query heads of each of `groups` groups to `to` of them and back."""

    groups: int
    heads: int
    to: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, trained: bool, use_gluon: bool | None) -> Padding:
        """For q [.., HQ, Dk], k [.., G, Dk] and v [.., G, Dv]. trained: a backward follows."""
        groups, dv = v.shape[-2:]
        heads = q.shape[-2] // groups
        to = heads_to_be(q.device, q.dtype, heads, q.shape[-1], dv, use_gluon)
        if to > heads:
            tokens = q.shape[:-2].numel()
            if trained:
                pays = tokens >= LEAST_TRAINED
            else:  # where selection then goes by keys (blocks/fwd_hopper.py)
                pays = (
                    k.shape[-3] >= SPLIT_KEYS[to]
                    and tokens >= SPLIT_QUERIES[to]
                    and q.dtype == torch.bfloat16
                    and not torch.are_deterministic_algorithms_enabled()
                )
            to = to if pays else heads
        return cls(groups, heads, to)

    def add(self, x: Tensor) -> Tensor:
        """x [.., groups * heads, width] with zeros behind the heads of each group."""
        if self.to == self.heads:
            return x
        x = x.unflatten(-2, (self.groups, self.heads))
        return F.pad(x, (0, 0, 0, self.to - self.heads)).flatten(-3, -2)

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """x without them; dim, from the end, has groups * to heads."""
        if self.to == self.heads:
            return x
        x = x.unflatten(dim, (self.groups, self.to))
        return x.narrow(dim, 0, self.heads).flatten(dim - 1, dim)


@triton.jit
def _hide_heads_kernel(LSE, size, PADDED: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    tl.store(LSE + at, float("inf"), mask=(at < size) & (at % PADDED >= HEADS))


def hide_heads(lse: Tensor, groups: int, heads: int) -> None:
    """Leave the heads behind the first `heads` of each group out of the choice of blocks, which
    goes by lse [.., groups * padded]: their probabilities become 0."""
    launch(
        _hide_heads_kernel, (cdiv(lse.numel(), SIZE),), lse, lse.numel(),
        PADDED=lse.shape[-1] // groups, HEADS=heads, SIZE=SIZE,
    )  # fmt: skip
