"""Selection attention forward over ranges of a cache: planned once from sizes, then one launch.

With as many rows as there are here a launch takes the device 7 to 25 us, so that what the host does
for it decides: nothing is asked of the tensors but their addresses.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nsa.checks import scale_of
from nsa.flags import Flags
from nsa.kernels.launch import MOST_MADE, launch_planned, on_its_device
from nsa.kernels.tiles import LOG2E
from nsa.kernels.triton_sel_kernel.inputs import aligned, units_of_8
from nsa.kernels.triton_sel_kernel.sel_fwd import (
    Sized,
    _sel_attn_fwd_ranges_kernel,
    dense_kernel,
    sized_for,
)
from nsa.kernels.triton_sel_kernel.tiles import MAX_SPANS_PER_PASS, Tiles, spans_per_pass
from nsa.select import clean_ranges


@dataclass(frozen=True)
class InPlace:
    """A launch over ranges of a cache, made once from sizes; see in_place()."""

    sized: Sized
    shape: tuple[int, ...]  # of lse
    kernel: Any
    numbers: tuple
    constants: dict[str, Any]
    n_keys: int
    cleans: bool  # more ranges than the kernel cleans at a time
    compiled: dict[tuple, dict] = field(default_factory=dict)  # by dtype and alignment of ranges


@functools.lru_cache(maxsize=MOST_MADE)
def plan_in_place(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, n_keys: int, dv: int, n: int,
    k_strides: tuple[int, ...], v_strides: tuple[int, ...], groups: int, scale: float,
    single: bool, keep_lse: bool, flags: Flags | None, tiles: Tiles | None = None,
    splits: int | None = None,
) -> InPlace:  # fmt: skip
    """For q of `shape` ([B, S, G, H, D] or [B, S, G * H, D]), n ranges a row and strides in units
    of 8 (see inputs.units_of_8); single: n is 1, and the dense kernels serve."""
    B, S, d = shape[0], shape[1], shape[-1]
    heads = math.prod(shape[2:-1]) // groups
    group = not single or bool(flags and flags.sel_triton_group)
    sized = sized_for(
        dtype, device, B * S * groups, heads, d, dv, n_keys, keep_lse, group, tiles, flags,
        splits, not single,
    )  # fmt: skip
    sizes = (S, groups, heads, n_keys) if single else (S, groups, heads, n_keys, n)
    many = n > MAX_SPANS_PER_PASS
    more = {"HAS_SPANS": True} if single else {"NR": spans_per_pass(n), "MANY": many}
    kernel = dense_kernel(group) if single else _sel_attn_fwd_ranges_kernel
    return InPlace(
        sized, shape[:-1], kernel, (*sizes, *k_strides, *v_strides, scale * LOG2E),
        {**sized.constants, **more}, n_keys, many,
    )  # fmt: skip


@on_its_device
def in_place(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, plan: InPlace
) -> tuple[Tensor, Tensor | None] | None:
    """(out, lse if it is kept) of tensors as `plan` was made for, q and ranges contiguous; None,
    with nothing done, for those that do not begin at 16 bytes."""
    if plan.cleans:
        ranges = clean_ranges(ranges, plan.n_keys)
    at = [x.data_ptr() for x in (q, k, v, ranges)]
    if (at[0] | at[1] | at[2]) & 15:
        return None
    sized = plan.sized
    out, lse, parts = sized.buffers(q, plan.shape)
    if not sized.rows * sized.heads:
        return out, lse
    compiled = plan.compiled.setdefault((ranges.dtype, at[3] % 16 == 0), {})
    ends = (out, out if lse is None else lse)
    to = ends if parts is None else (parts, parts[sized.partial :])
    args: tuple = (q, k, v, ranges, *to)
    if known := id(plan.kernel) in compiled:  # which takes addresses for tensors
        to = [x.data_ptr() for x in to]
        args = (*at, *to)
    launch_planned(plan.kernel, sized.grid, (*args, *plan.numbers), plan.constants, compiled)
    if sized.merge:
        kernel, grid, constants = sized.merge
        ends = [x.data_ptr() for x in ends] if known else ends
        launch_planned(kernel, grid, (*to, *ends, sized.heads), constants, compiled)
    return out, lse


def output(plan: InPlace, q: Tensor, k: Tensor, v: Tensor, ranges: Tensor) -> Tensor | None:
    """The output of in_place() alone."""
    result = in_place(q, k, v, ranges, plan)
    return result and result[0]


def sel_fwd_in_place(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, softmax_scale: float | None, *,
    single: bool = False, keep_lse: bool = True, flags: Flags | None = None,
    tiles: Tiles | None = None, splits: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, lse if it is kept) over any ranges of a cache: the kernel makes them disjoint and cuts
    them to it.

    q [B, S, G, H, D], k [B, G, Skv, D] and v of any strides, ranges [B, S, G, n, 2] int32 or int64.
    single: n is 1, which the dense kernels take.
    """
    k, k_strides = units_of_8(k)
    v, v_strides = units_of_8(v)
    q, ranges = aligned(q), ranges.contiguous()
    plan = plan_in_place(
        q.shape, q.dtype, q.device, k.shape[2], v.shape[-1], ranges.shape[3], k_strides, v_strides,
        k.shape[1], scale_of(softmax_scale, q.shape[-1]), single, keep_lse, flags, tiles, splits,
    )  # fmt: skip
    result = in_place(q, k, v, ranges, plan)
    assert result is not None
    return result
