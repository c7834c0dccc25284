"""Sums to which programs add their parts of a gradient: fp32 zeros for several at once, and the sum
scaled and rounded in one pass over memory, where PyTorch's operations reach 3.0 TB/s on an H200.

dQ of selection may be summed in fp16 (HalfSums), since a query adds as many parts as it chose
blocks, few: half the bytes through the L2's adders, which bind that pass. Each row has a scale. The
softmax's weights of a row sum up to 1, so that with reach = |gate| * sum |dO|

    |dQ| / softmax_scale <= sum_j p_j |dP_j - delta| |K_j| <= 2 * reach * |V| * |K|

and scales are powers of two that keep this at most 2**15 for elements of V and K of TYPICAL size: a
mean of exponents, which a few values of any size, seen or not, hardly change. dQ of random inputs
is 2**13 below that bound, and 2**15 above the least that fp16 holds with all its bits. A row that
overflows nevertheless, or that has lost its bits, is found when the sums are rounded, and its dQ is
computed anew, by itself. Rounding: on random inputs of 16 blocks the sums are off by 6e-4 of their
norm, while rounding to bf16 alone costs 17e-4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nsa.kernels.launch import launch
from nsa.kernels.tiles import cdiv, pow2

SIZE = 4096  # numbers that a program rounds, or looks at in a turn
LEAST = 1024  # that it adds: compressed keys are few
PROGRAMS = 1056  # that look at K and V: few, since each adds to the same numbers
MOST_PARTS = 64  # of a sum in fp16, whose error grows with the square root of their number
TYPICAL = tl.constexpr(4)  # bits over a mean of exponents that nearly all elements stay below
# A row has lost its bits where the largest of its sums is below this: additions round to multiples
# of 2**-24, which is by then as much as what bf16 rounds.
LEAST_SUM = tl.constexpr(2.0**-13)
MOST_POWER = tl.constexpr(126)
MOST_SCALE = tl.constexpr(2.0**126)


class HalfSums(NamedTuple):
    """sums [.., HQ, D], fp16: dQ / softmax_scale times scales [.., HQ], fp32 powers of two.

    anew: called with (lost, out, more, scale), fills out with (dQ / softmax_scale + more) * scale
    of units; lost int32 [1 + tokens * groups]: how many, and token * groups + group of each.
    """

    sums: torch.Tensor
    scales: torch.Tensor
    groups: int
    anew: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, float], None]


@triton.jit
def _round(X, OUT, numbers, scale, part, SIZE: tl.constexpr):
    at = part.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < numbers
    x = tl.load(X + at, mask=live, other=0.0) * scale
    tl.store(OUT + at, x.to(OUT.dtype.element_ty), mask=live)


@triton.jit
def _round_kernel(X, OUT, numbers, scale, SIZE: tl.constexpr):
    _round(X, OUT, numbers, scale, tl.program_id(0), SIZE)


@triton.jit
def _round_keys_kernel(SUM_K, SUM_V, DK, DV, k_numbers, v_numbers, scale, SIZE: tl.constexpr):
    """dK, scaled, by the first programs, and dV by those behind."""
    of_k = tl.cdiv(k_numbers, SIZE)
    if tl.program_id(0) < of_k:
        _round(SUM_K, DK, k_numbers, scale, tl.program_id(0), SIZE)
    else:
        _round(SUM_V, DV, v_numbers, 1.0, tl.program_id(0) - of_k, SIZE)


@triton.jit
def _add_parts(X, OUT, numbers, parts, program, SIZE: tl.constexpr):
    at = program.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < numbers
    x = tl.zeros([SIZE], tl.float32)
    for part in range(parts):
        x += tl.load(X + part * tl.cast(numbers, tl.int64) + at, mask=live, other=0.0)
    tl.store(OUT + at, x.to(OUT.dtype.element_ty), mask=live)


@triton.jit
def _add_parts_kernel(PARTS_K, PARTS_V, DK, DV, k_numbers, v_numbers, parts, SIZE: tl.constexpr):
    """dK by the first programs, and dV by those behind."""
    of_k = tl.cdiv(k_numbers, SIZE)
    if tl.program_id(0) < of_k:
        _add_parts(PARTS_K, DK, k_numbers, parts, tl.program_id(0), SIZE)
    else:
        _add_parts(PARTS_V, DV, v_numbers, parts, tl.program_id(0) - of_k, SIZE)


@triton.jit
def _round_halves_kernel(
    X, SUMS, SCALES, OUT, LOST, n_rows, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    BOTH: tl.constexpr,
):  # fmt: skip
    """Rows of HalfSums, and of fp32 X as well where BOTH. OUT may be where SUMS are: each number is
    read before its place is written. Units of HEADS rows that fp16 did not serve go to LOST."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < n_rows
    columns = tl.arange(0, BLOCK_D)
    at = row[:, None] * D + columns[None, :]
    mask = live[:, None]
    if BLOCK_D > D:
        mask = mask & (columns < D)[None, :]
    scales = tl.load(SCALES + row, mask=live, other=1.0)
    sums = tl.load(SUMS + at, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(sums), 1)
    broken = tl.max((sums * 0.0 != 0.0).to(tl.int32), 1) > 0
    # A scale at its limit is that of a row without a gradient of its output.
    lost = live & (broken | ((largest < LEAST_SUM) & (scales < MOST_SCALE)))
    lost = tl.max(tl.reshape(lost.to(tl.int32), [ROWS // HEADS, HEADS]), 1)
    n_lost = tl.sum(lost, 0)
    if n_lost > 0:
        unit = tl.program_id(0) * (ROWS // HEADS) + tl.arange(0, ROWS // HEADS)
        to = tl.atomic_add(LOST, n_lost, sem="relaxed") + tl.cumsum(lost, 0)
        tl.store(LOST + to, unit, mask=lost > 0)
    x = sums * (1.0 / scales)[:, None]
    if BOTH:
        x += tl.load(X + at, mask=mask, other=0.0)
    tl.store(OUT + at, (x * scale).to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def size_of(x):
    """(exponent, 1) of each element in fp32, (0, 0) of those that are 0 or not finite."""
    x = tl.abs(x.to(tl.float32))
    counts = (x > 0.0) & (x < float("inf"))
    return tl.where(counts, exponent(x).to(tl.float32), 0.0), counts.to(tl.float32)


@triton.jit
def typical_exponent(sizes, found):
    """e with nearly all below 2**(e + 1): of so many elements whose exponents sum up to `sizes`."""
    return tl.math.floor(sizes / tl.maximum(found, 1.0)).to(tl.int32) + TYPICAL


@triton.jit
def _sizes(X, SIZES, numbers, SIZE: tl.constexpr):
    """Adds to SIZES [2] what size_of gives of this program's share of X."""
    at = tl.arange(0, SIZE)
    step = tl.num_programs(0).to(tl.int64) * SIZE
    sizes = tl.zeros([SIZE], tl.float32)
    found = tl.zeros([SIZE], tl.float32)
    for begin in range(tl.program_id(0).to(tl.int64) * SIZE, numbers, step):
        size, counts = size_of(tl.load(X + begin + at, mask=at < numbers - begin, other=0.0))
        sizes += size
        found += counts
    tl.atomic_add(SIZES, tl.sum(sizes, 0), sem="relaxed")
    tl.atomic_add(SIZES + 1, tl.sum(found, 0), sem="relaxed")


@triton.jit
def _sizes_kernel(K, V, SIZES, k_numbers, v_numbers, SIZE: tl.constexpr):
    """Adds to SIZES [4] those of K and of V."""
    _sizes(K, SIZES, k_numbers, SIZE)
    _sizes(V, SIZES + 2, v_numbers, SIZE)


@triton.jit
def exponent(x):
    """e with x < 2**(e + 1), for x >= 0."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def power_of_two(power):
    """2**power in fp32, within what is a normal number and has a normal inverse."""
    power = tl.minimum(tl.maximum(power, -126), MOST_POWER)
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _half_scales_kernel(REACH, SIZES, SCALES, n_rows, SIZE: tl.constexpr):
    """By exponents, which neither overflow nor underflow: 2**11 over those of the three factors,
    each below 2**(e + 1), and one for the 2."""
    row = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = row < n_rows
    spread = typical_exponent(tl.load(SIZES), tl.load(SIZES + 1))
    spread += typical_exponent(tl.load(SIZES + 2), tl.load(SIZES + 3))
    spread += exponent(tl.load(REACH + row, mask=live, other=0.0))
    tl.store(SCALES + row, power_of_two(11 - spread), mask=live)


def zero_sums(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """fp32 zeros of the shape of each, in one piece of memory."""
    sizes = [x.numel() for x in tensors]
    zeros = torch.zeros(sum(sizes), dtype=torch.float32, device=tensors[0].device)
    return [part.view(x.shape) for part, x in zip(zeros.split(sizes), tensors, strict=True)]


def zero_halves(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reach: torch.Tensor, anew: Callable
) -> HalfSums:
    """No dQ yet, for contiguous q, k, v. reach [.., HQ], fp32: |gate| * sum |dO| of each row; anew:
    of HalfSums."""
    sizes = torch.zeros(4, dtype=torch.float32, device=q.device)
    programs = min(cdiv(max(k.numel(), v.numel()), SIZE), PROGRAMS)
    launch(_sizes_kernel, (programs,), k, v, sizes, k.numel(), v.numel(), SIZE=SIZE)
    scales = torch.empty_like(reach)
    rows = reach.numel()
    launch(_half_scales_kernel, (cdiv(rows, SIZE),), reach, sizes, scales, rows, SIZE=SIZE)
    sums = torch.zeros(q.shape, dtype=torch.float16, device=q.device)
    return HalfSums(sums, scales, k.shape[-2], anew)


def rounded_keys(
    dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous dK * scale and dV, of the dtypes of k and v; themselves where that is theirs and
    there is no scale."""
    if scale == 1.0 and dk.dtype == k.dtype:
        return dk, dv
    to = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    to_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    programs = cdiv(dk.numel(), SIZE) + cdiv(dv.numel(), SIZE)
    if programs:
        numbers = dk.numel(), dv.numel(), scale
        launch(_round_keys_kernel, (programs,), dk, dv, to, to_v, *numbers, SIZE=SIZE)
    return to, to_v


def added_keys(
    dk: torch.Tensor, dv: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous fp32 parts of dK and dV [parts, ..] added up, in the dtypes of k and v.

    By a kernel of its own: with a loop over parts _round_keys_kernel takes 163 registers on SM 9.0
    instead of 96, of one part too.
    """
    to, to_v = torch.empty_like(k), torch.empty_like(v)
    numbers = k.numel(), v.numel()
    launch(
        _add_parts_kernel, (cdiv(numbers[0], LEAST) + cdiv(numbers[1], LEAST),),
        dk, dv, to, to_v, *numbers, dk.shape[0], SIZE=LEAST,
    )  # fmt: skip
    return to, to_v


def rounded(
    x: torch.Tensor | HalfSums, scale: float, like: torch.Tensor, more: torch.Tensor | None = None
) -> torch.Tensor:
    """x * scale for a contiguous fp32 x, of the dtype of `like`. HalfSums, to which `more` in fp32
    may be added, give the result their memory."""
    if isinstance(x, HalfSums):
        out = x.sums.view(like.dtype)
        hq, d = out.shape[-2:]
        rows, heads = out.numel() // d, hq // x.groups
        lost = torch.empty(1 + rows // heads, dtype=torch.int32, device=out.device)
        lost[:1].zero_()
        padded = pow2(d)
        at_once = SIZE // padded
        launch(
            _round_halves_kernel, (cdiv(rows, at_once),), out if more is None else more, x.sums,
            x.scales, out, lost, rows, scale, D=d, BLOCK_D=padded, ROWS=at_once, HEADS=heads,
            BOTH=more is not None,
        )  # fmt: skip
        x.anew(lost, out, more, scale)
        return out
    out = torch.empty(x.shape, dtype=like.dtype, device=x.device)
    if out.numel():
        launch(_round_kernel, (cdiv(out.numel(), SIZE),), x, out, out.numel(), scale, SIZE=SIZE)
    return out
