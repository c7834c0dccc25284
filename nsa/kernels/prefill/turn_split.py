"""The projections of a layer taken apart: queries and keys by rotary turn, a tensor per branch.

In PyTorch that is some forty passes over fp32 copies and a copy of each key and value; here every
element is read and written once, in the backward too, which turns back.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.launch import launch
from nsa.kernels.tiles import cdiv, pow2

PAIRS = 2048  # pairs of elements that a program turns at once
BLOCK_H = 8  # heads that a program takes one after the other, with the same angles


@triton.jit
def _move(WIDE, wide, OWN, own, mask, BACKWARD: tl.constexpr):
    """A tile from the projections to a tensor of its own, or its gradient back."""
    if BACKWARD:
        tl.store(WIDE + wide, tl.load(OWN + own, mask=mask), mask=mask)
    else:
        tl.store(OWN + own, tl.load(WIDE + wide, mask=mask), mask=mask)


@triton.jit
def _turn(WIDE, wide, OWN, own, cos, sin, mask, half, BACKWARD: tl.constexpr):
    """The same for the first halves of heads and, `half` further, the second ones, turned."""
    if BACKWARD:
        a = tl.load(OWN + own, mask=mask).to(tl.float32)
        b = tl.load(OWN + own + half, mask=mask).to(tl.float32)
        tl.store(WIDE + wide, (a * cos + b * sin).to(WIDE.dtype.element_ty), mask=mask)
        tl.store(WIDE + wide + half, (b * cos - a * sin).to(WIDE.dtype.element_ty), mask=mask)
    else:
        a = tl.load(WIDE + wide, mask=mask).to(tl.float32)
        b = tl.load(WIDE + wide + half, mask=mask).to(tl.float32)
        tl.store(OWN + own, (a * cos - b * sin).to(OWN.dtype.element_ty), mask=mask)
        tl.store(OWN + own + half, (b * cos + a * sin).to(OWN.dtype.element_ty), mask=mask)


@triton.jit
def _turn_kernel(
    QKV, POSITIONS, Q, K_CMP, V_CMP, K_SEL, V_SEL, K_WIN, V_WIN, tokens, S,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, OCTAVES: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_H: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """QKV [tokens, HQ * D + 3 * G * (D + DV)]; pair i turns by position * 2^(-i * OCTAVES).

    Programs of BLOCK_T tokens: BLOCK_H heads of Q each, then of K by branch, then of V by branch.
    Turns are counted in fp64: an fp32 angle is off by 0.01 at position 100k.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(1)
    live = token < tokens
    q_parts = (HQ + BLOCK_H - 1) // BLOCK_H
    kv_parts = (G + BLOCK_H - 1) // BLOCK_H
    row = token * (HQ * D + 3 * G * (D + DV))
    rest = (part - q_parts) % (3 * kv_parts)
    branch = rest // kv_parts
    begin = rest % kv_parts * BLOCK_H
    if branch == 0:
        K = K_CMP
        V = V_CMP
    elif branch == 1:
        K = K_SEL
        V = V_SEL
    else:
        K = K_WIN
        V = V_WIN
    if part < q_parts + 3 * kv_parts:
        columns = tl.arange(0, BLOCK_HALF)
        mask = live[:, None] & (columns < D // 2)[None, :]
        position = tl.load(POSITIONS + token % S, mask=live, other=0).to(tl.float64)
        # 2.65... is log2 of 2 pi.
        frequency = tl.exp2(-OCTAVES * columns.to(tl.float64) - 2.651496129472319)
        turns = position[:, None] * frequency[None, :]
        angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
        cos = tl.cos(angle)
        sin = tl.sin(angle)
        if part < q_parts:
            first = part * BLOCK_H
            for head in range(first, tl.minimum(first + BLOCK_H, HQ)):
                wide = (row + head * D)[:, None] + columns[None, :]
                own = ((token * HQ + head) * D)[:, None] + columns[None, :]
                _turn(QKV, wide, Q, own, cos, sin, mask, D // 2, BACKWARD)
        else:
            for group in range(begin, tl.minimum(begin + BLOCK_H, G)):
                wide = (row + (HQ + branch * G + group) * D)[:, None] + columns[None, :]
                own = ((token * G + group) * D)[:, None] + columns[None, :]
                _turn(QKV, wide, K, own, cos, sin, mask, D // 2, BACKWARD)
    else:
        at = tl.arange(0, BLOCK_DV)
        there = live[:, None] & (at < DV)[None, :]
        for group in range(begin, tl.minimum(begin + BLOCK_H, G)):
            source = (row + (HQ + 3 * G) * D + (branch * G + group) * DV)[:, None] + at[None, :]
            place = ((token * G + group) * DV)[:, None] + at[None, :]
            _move(QKV, source, V, place, there, BACKWARD)


def turn_split(
    qkv: Tensor, positions: Tensor, parts: tuple[Tensor, ...], rope_base: float, backward: bool
) -> None:
    """Fill `parts` (q, then k and v of cmp, sel and win) from qkv; backward: qkv from `parts`, both
    being gradients. All contiguous."""
    q, k, v = parts[:3]
    tokens = qkv.numel() // qkv.shape[-1] if qkv.shape[-1] else 0
    if not tokens:
        return
    (heads, d_k), (groups, d_v) = q.shape[-2:], v.shape[-2:]
    half = pow2(d_k // 2)
    tokens_at_once = max(PAIRS // half, 1)
    programs = cdiv(heads, BLOCK_H) + 6 * cdiv(groups, BLOCK_H)
    launch(
        _turn_kernel, (cdiv(tokens, tokens_at_once), programs),
        qkv, positions, *parts, tokens, positions.numel(), HQ=heads, G=groups, D=d_k, DV=d_v,
        OCTAVES=2 * math.log2(rope_base) / d_k,  # between the frequencies of neighbouring pairs
        BACKWARD=backward, BLOCK_T=tokens_at_once, BLOCK_HALF=half, BLOCK_DV=pow2(d_v),
        BLOCK_H=BLOCK_H,
    )  # fmt: skip
