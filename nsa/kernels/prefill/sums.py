"""Sums to which programs add their parts of a gradient: fp32 zeros for several at once, and the sum
scaled and rounded in one pass over memory, where PyTorch's operations reach 3.0 TB/s on an H200.

dQ of selection may be summed in fp16 (HalfSums), since a query adds as many parts as it chose
blocks, few: half the bytes through the L2's adders, which bind that pass. Each row has a scale that
its dQ cannot overflow with. The softmax's weights of a row sum up to 1, so that with
reach = gate * sum |dO| and what is largest of K and of V in magnitude

    |dQ| / softmax_scale <= sum_j p_j |dP_j - delta| |K_j| <= 2 * reach * largest V * largest K

and scales are powers of two that keep this at most 2**15. From there 29 bits are left down to
fp16's least normal number. Rounding: on random inputs of 16 blocks the sums are off by 6e-4 of
their norm, while rounding to bf16 alone costs 17e-4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nsa.kernels.launch import launch
from nsa.kernels.tiles import cdiv

SIZE = 4096  # numbers that a program rounds, or looks at in a turn
PROGRAMS = 1056  # that look for the largest: few, since each adds to the same two numbers
MOST_PARTS = 64  # of a sum in fp16, whose error grows with the square root of their number


class HalfSums(NamedTuple):
    """sums [.., HQ, D], fp16: dQ / softmax_scale times scales [.., HQ], fp32 powers of two."""

    sums: torch.Tensor
    scales: torch.Tensor


@triton.jit
def _round_kernel(X, OUT, numbers, scale, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < numbers
    x = tl.load(X + at, mask=live, other=0.0) * scale
    tl.store(OUT + at, x.to(OUT.dtype.element_ty), mask=live)


@triton.jit
def _round_halves_kernel(
    X, SUMS, SCALES, OUT, n_rows, scale, D: tl.constexpr, ROWS: tl.constexpr, BOTH: tl.constexpr
):
    """Rows of HalfSums, and of fp32 X as well where BOTH. OUT may be where SUMS are: each number is
    read before its place is written."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < n_rows
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    scales = tl.load(SCALES + row, mask=live, other=1.0)
    x = tl.load(SUMS + at, mask=live[:, None], other=0.0).to(tl.float32) * (1.0 / scales)[:, None]
    if BOTH:
        x += tl.load(X + at, mask=live[:, None], other=0.0)
    tl.store(OUT + at, (x * scale).to(OUT.dtype.element_ty), mask=live[:, None])


@triton.jit
def _largest(X, numbers, SIZE: tl.constexpr):
    """The largest finite magnitude in this program's share of X."""
    at = tl.arange(0, SIZE)
    step = tl.num_programs(0).to(tl.int64) * SIZE
    found = tl.zeros([SIZE], tl.float32)
    for begin in range(tl.program_id(0).to(tl.int64) * SIZE, numbers, step):
        x = tl.load(X + begin + at, mask=at < numbers - begin, other=0.0)
        x = tl.abs(x.to(tl.float32))
        found = tl.maximum(found, tl.where(x < float("inf"), x, 0.0))
    return tl.max(found, 0)


@triton.jit
def _largest_kernel(K, V, LARGEST, k_numbers, v_numbers, SIZE: tl.constexpr):
    """Raises LARGEST [2] to the largest magnitudes of K and V. What is not finite does not count:
    rows that see it are not finite either, others shall not suffer."""
    tl.atomic_max(LARGEST, _largest(K, k_numbers, SIZE), sem="relaxed")
    tl.atomic_max(LARGEST + 1, _largest(V, v_numbers, SIZE), sem="relaxed")


@triton.jit
def exponent(x):
    """e with x < 2**(e + 1), for x >= 0."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127


@triton.jit
def power_of_two(power):
    """2**power in fp32, within what is a normal number and has a normal inverse."""
    power = tl.minimum(tl.maximum(power, -126), 126)
    return ((power + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _half_scales_kernel(REACH, LARGEST, SCALES, n_rows, SIZE: tl.constexpr):
    """By exponents, which neither overflow nor underflow: 2**11 over those of the three factors,
    each below 2**(e + 1), and one for the 2."""
    row = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = row < n_rows
    spread = exponent(tl.load(LARGEST)) + exponent(tl.load(LARGEST + 1))
    spread += exponent(tl.load(REACH + row, mask=live, other=0.0))
    tl.store(SCALES + row, power_of_two(11 - spread), mask=live)


def zero_sums(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """fp32 zeros of the shape of each, in one piece of memory."""
    sizes = [x.numel() for x in tensors]
    zeros = torch.zeros(sum(sizes), dtype=torch.float32, device=tensors[0].device)
    return [part.view(x.shape) for part, x in zip(zeros.split(sizes), tensors, strict=True)]


def zero_halves(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reach: torch.Tensor
) -> HalfSums:
    """No dQ yet, for contiguous q, k, v. reach [.., HQ], fp32: gate * sum |dO| of each row."""
    largest = torch.zeros(2, dtype=torch.float32, device=q.device)
    programs = min(cdiv(max(k.numel(), v.numel()), SIZE), PROGRAMS)
    launch(_largest_kernel, (programs,), k, v, largest, k.numel(), v.numel(), SIZE=SIZE)
    scales = torch.empty_like(reach)
    rows = reach.numel()
    launch(_half_scales_kernel, (cdiv(rows, SIZE),), reach, largest, scales, rows, SIZE=SIZE)
    return HalfSums(torch.zeros(q.shape, dtype=torch.float16, device=q.device), scales)


def rounded(
    x: torch.Tensor | HalfSums, scale: float, like: torch.Tensor, more: torch.Tensor | None = None
) -> torch.Tensor:
    """x * scale for a contiguous fp32 x, of the dtype of `like`. HalfSums, to which `more` in fp32
    may be added, give the result their memory."""
    if isinstance(x, HalfSums):
        out = x.sums.view(like.dtype)
        d = out.shape[-1]
        rows = out.numel() // d
        launch(
            _round_halves_kernel, (cdiv(rows, SIZE // d),), out if more is None else more, *x, out,
            rows, scale, D=d, ROWS=SIZE // d, BOTH=more is not None,
        )  # fmt: skip
        return out
    out = torch.empty(x.shape, dtype=like.dtype, device=x.device)
    if out.numel():
        launch(_round_kernel, (cdiv(out.numel(), SIZE),), x, out, out.numel(), scale, SIZE=SIZE)
    return out
