"""Before a decode step: the rotary turn of queries and keys, the new tokens into the cache, and the
gates, in one launch.

In PyTorch that is some eighty small operations, more time than the attention.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.decode.tile import rank_row, store_rows
from nsa.kernels.launch import by_layout, launch_planned, on_its_device
from nsa.kernels.tiles import cdiv, pow2
from nsa.untraced import untraced

if TYPE_CHECKING:
    from nsa.cache import NSACache
    from nsa.config import NSAConfig

BLOCK_H = 4  # heads of a program
GATES = 1  # of a program, whose weights it loads all at once, so
DEPTH = 1024  # of their rows at a time
COUNTER = 16  # which word of the first group's line of counters; a team meets at the first


@triton.jit
def _turn(
    X, source, OUT, place, live, position, FREQUENCIES, DESCALE, which, D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Heads that begin at `source` of X to rows `place` of OUT, their pairs turned by position *
    frequency; `which` DESCALE is theirs. Turns are counted in fp64: an fp32 angle is off by 0.01
    at position 100k."""
    columns = tl.arange(0, BLOCK_HALF)
    there = columns < D // 2
    mask = live[:, None] & there[None, :]
    at = source[:, None] + columns[None, :]
    a = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(X + at + D // 2, mask=mask, other=0.0).to(tl.float32)
    frequency = tl.load(FREQUENCIES + columns, mask=there, other=0.0)
    turns = position.to(tl.float64) * frequency * 0.15915494309189535
    angle = ((turns - tl.floor(turns + 0.5)) * 6.283185307179586).to(tl.float32)
    cos = tl.cos(angle)[None, :]
    sin = tl.sin(angle)[None, :]
    to = place[:, None] * D + columns[None, :]
    first, second = a * cos - b * sin, b * cos + a * sin
    store_rows(OUT, to, first.to(X.dtype.element_ty), mask, DESCALE, which, live)
    store_rows(OUT, to + D // 2, second.to(X.dtype.element_ty), mask, DESCALE, which, live)


@triton.jit
def _copy(X, source, OUT, place, live, DESCALE, which, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = live[:, None] & (columns < WIDTH)[None, :]
    x = tl.load(X + source[:, None] + columns[None, :], mask=mask)
    to = place[:, None] * WIDTH + columns[None, :]
    store_rows(OUT, to, x, mask, DESCALE, which, live)


@triton.jit
def _gate(
    HIDDEN, WEIGHT, BIAS, OUT, token, first, gates, width, GATES: tl.constexpr, DEPTH: tl.constexpr
):
    """GATES of a token's, from `first` on: sigmoid(silu(HIDDEN [.., width]) WEIGHT^T + BIAS)."""
    gate = first + tl.arange(0, GATES)
    some = gate < gates
    acc = tl.zeros([GATES, DEPTH], tl.float32)
    for begin in range(0, width, DEPTH):
        at = begin + tl.arange(0, DEPTH)
        x = tl.load(HIDDEN + token * width + at, mask=at < width, other=0.0).to(tl.float32)
        there = some[:, None] & (at < width)[None, :]
        w = tl.load(WEIGHT + gate[:, None] * width + at[None, :], mask=there, other=0.0)
        acc += (x * tl.sigmoid(x))[None, :] * w.to(tl.float32)
    bias = tl.load(BIAS + gate, mask=some, other=0.0).to(tl.float32)
    out = tl.sigmoid(tl.sum(acc, 1) + bias)
    tl.store(OUT + token * gates + gate, out.to(OUT.dtype.element_ty), mask=some)


@triton.jit
def _decode_append_kernel(
    QKV, LENS, COUNTERS, FREQUENCIES, Q_OUT, K_RAW, V_RAW, K_SEL, V_SEL, K_WIN, V_WIN,
    HIDDEN, WEIGHT, BIAS, GATES_OUT, K_DESCALE, V_DESCALE,
    T, HQ, G, raw_rows, sel_rows, win_rows, hidden_width,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_H: tl.constexpr, GATES: tl.constexpr, DEPTH: tl.constexpr, COUNTER: tl.constexpr,
    SIZE: tl.constexpr, WORLD: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """QKV [B, T, ..]: of each token HQ * D queries, 3 (raw, sel, win) * G * D keys and 3 * G * DV
    values. HIDDEN [B, T, hidden_width]: the gates' hidden layer before silu.

    Programs of a token: BLOCK_H heads of Q each, then of K by branch, then of V by branch, then
    GATES of its 3 * HQ gates each. Position p of a ring lies in row p % rows; the other cache has
    a row per position, over ranks by rank_row(). LENS [B] grows by T once all programs of a
    sequence have read it, which they count in COUNTERS [B, G, 32].
    """
    token = tl.program_id(0)
    part = tl.program_id(1)
    batch = (token // T).to(tl.int64)
    q_parts = (HQ + BLOCK_H - 1) // BLOCK_H
    kv_parts = (G + BLOCK_H - 1) // BLOCK_H
    if part >= q_parts + 6 * kv_parts:
        first = (part - q_parts - 6 * kv_parts) * GATES
        _gate(
            HIDDEN, WEIGHT, BIAS, GATES_OUT, token.to(tl.int64), first, 3 * HQ, hidden_width, GATES,
            DEPTH,
        )  # fmt: skip
        return
    length = tl.load(LENS + batch)
    position = length + token % T
    begin = token.to(tl.int64) * (HQ * D + 3 * G * (D + DV))
    if part < q_parts:
        head = part * BLOCK_H + tl.arange(0, BLOCK_H)
        row = token.to(tl.int64) * HQ + head
        _turn(
            QKV, begin + head * D, Q_OUT, row, head < HQ, position, FREQUENCIES, K_DESCALE, head, D,
            BLOCK_HALF,
        )  # fmt: skip
    else:
        rest = (part - q_parts) % (3 * kv_parts)
        branch = rest // kv_parts
        group = rest % kv_parts * BLOCK_H + tl.arange(0, BLOCK_H)
        head = branch * G + group
        if branch == 0:
            first = batch * raw_rows + position % raw_rows
            k_out = K_RAW
            v_out = V_RAW
        elif branch == 1:
            first = batch * sel_rows + rank_row(position, sel_rows, SIZE, WORLD, RANK)
            k_out = K_SEL
            v_out = V_SEL
        else:
            first = batch * win_rows + position % win_rows
            k_out = K_WIN
            v_out = V_WIN
        place, which = first * G + group, batch * G + group
        if part < q_parts + 3 * kv_parts:
            source = begin + HQ * D + head * D
            _turn(
                QKV, source, k_out, place, group < G, position, FREQUENCIES, K_DESCALE, which, D,
                BLOCK_HALF,
            )  # fmt: skip
        else:
            source = begin + (HQ + 3 * G) * D + head * DV
            _copy(QKV, source, v_out, place, group < G, V_DESCALE, which, DV, BLOCK_DV)
    counter = COUNTERS + batch * G * 32 + COUNTER
    if tl.atomic_add(counter, 1) == T * (q_parts + 6 * kv_parts) - 1:
        tl.store(counter, 0)
        tl.store(LENS + batch, length + T)


@functools.cache
def _append_plan(
    c: NSAConfig, device: torch.device, hidden: int, world: int, rank: int
) -> tuple[int, dict[str, int], dict]:
    """(programs of a token, constants, by layout of the arguments what launch_planned() keeps).
    hidden: width of the gates' hidden layer, 0 for a launch without gates."""
    parts = cdiv(c.heads, BLOCK_H) + 6 * cdiv(c.groups, BLOCK_H)
    if hidden:
        parts += cdiv(3 * c.heads, GATES)
    return parts, dict(
        D=c.d_k, DV=c.d_v, BLOCK_HALF=pow2(c.d_k // 2), BLOCK_DV=pow2(c.d_v), BLOCK_H=BLOCK_H,
        GATES=GATES, DEPTH=min(pow2(hidden), DEPTH), COUNTER=COUNTER,
        SIZE=c.l_sel if world > 1 else 1, WORLD=world, RANK=rank, num_warps=1,
    ), {}  # fmt: skip


@untraced  # launch_planned() goes by addresses
@on_its_device
def append_turned(
    qkv: Tensor, cache: NSACache, gate: tuple[Tensor, Tensor, Tensor] | None = None,
    turn: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Write T new tokens into the cache's raw, selection and window rows; the turned queries and
    the gates.

    qkv [B, T, HQ * Dk + 3 * G * Dk + 3 * G * Dv] as projected (branches raw, sel, win), of the
    cache's dtype, with T <= max_step. gate: hidden [B, T, width] before silu, weight
    [3 * HQ, width] and bias [3 * HQ] behind it. turn: False for queries and keys that are turned
    already, which a turn by 0 leaves as they are (but for a NaN beside an infinity). cache.lens
    grows by T; what the host knows of the lengths stays. Returns [B, T, HQ, Dk] and
    sigmoid(silu(hidden) weight^T + bias) as [B, T, HQ, 3] in hidden's dtype, or None without gate.
    """
    c = cache.config
    batch, tokens = qkv.shape[:2]
    out = torch.empty(batch, tokens, c.heads, c.d_k, dtype=qkv.dtype, device=qkv.device)
    qkv = qkv.contiguous()
    if gate is None:
        gates, width, more = None, 0, (qkv, qkv, qkv, qkv)
    else:
        hidden, weight, bias = (x.contiguous() for x in gate)
        gates = torch.empty(batch, tokens, c.heads, 3, dtype=hidden.dtype, device=qkv.device)
        width, more = hidden.shape[-1], (hidden, weight, bias, gates)
    parts, sizes, layouts = _append_plan(c, qkv.device, width, cache.world, cache.rank)
    buffers = cache.k_raw, cache.v_raw, cache.k_sel, cache.v_sel, cache.k_win, cache.v_win
    rows = cache.k_raw.shape[1], cache.k_sel.shape[1], cache.k_win.shape[1]
    tensors = (
        qkv, cache.lens, cache.counters, cache.frequencies if turn else cache.no_turn, out,
        *buffers, *more, *cache.descales,
    )  # fmt: skip
    compiled, addresses = by_layout(layouts, (tokens, *rows), tensors)
    launch_planned(
        _decode_append_kernel, (batch * tokens, parts, 1),
        (*(addresses if compiled else tensors), tokens, c.heads, c.groups, *rows, width), sizes,
        compiled,
    )  # fmt: skip
    return out, gates
