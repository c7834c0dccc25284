"""The work of a context-parallel decode step on one rank between attention and exchanges.

Each function does what the one of the same name in nsa/parallel_cache.py does in PyTorch, which
takes many small launches: where keys are, probabilities, the choice of blocks, the merge, what FP8
rows stand for. All read lengths on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.config import NSAConfig
from nsa.kernels.block_keys import block_keys, visible
from nsa.kernels.head_rows import head_rows, put_rows
from nsa.kernels.launch import launch, on_its_device
from nsa.kernels.tiles import (
    LOG2E,
    arch_of,
    cdiv,
    check_e4m3,
    dot_precision,
    dot_size,
    pow2,
    split_dim,
)

MOST_BLOCKS = 1 << 15  # whose keys one program holds in its registers
CHOOSE_CHUNK = 4096  # blocks that it scores at a time


@triton.jit
def _parallel_spans_kernel(
    LENS,
    CMP_SPANS,
    WIN_SPANS,
    T,
    G,
    first,
    l,
    d,
    per_block,
    world,
    rank,
    window,
    ring,
    GROUPS: tl.constexpr,
):
    """CMP_SPANS [B * T, G, 1, 2] and WIN_SPANS [B * T, G, 2, 2] of token pid % T of sequence
    pid // T; the first one stands at the sequence's length + first."""
    pid = tl.program_id(0)
    position = tl.load(LENS + pid // T) + first + pid % T
    seen = visible(position, l, d)
    turn = per_block * world
    rest = seen - seen // turn * turn - rank * per_block
    held = seen // turn * per_block + tl.minimum(tl.maximum(rest, 0), per_block)
    n = tl.minimum(position + 1, window)
    start = (position + 1 - n) % ring
    group = tl.arange(0, GROUPS)
    live = group < G
    cmp = CMP_SPANS + (pid * G + group) * 2
    tl.store(cmp, group * 0, mask=live)
    tl.store(cmp + 1, group * 0 + held, mask=live)
    win = WIN_SPANS + (pid * G + group) * 4
    tl.store(win, group * 0 + start, mask=live)
    tl.store(win + 1, group * 0 + tl.minimum(start + n, ring), mask=live)
    tl.store(win + 2, group * 0, mask=live)
    tl.store(win + 3, group * 0 + tl.maximum(start + n - ring, 0), mask=live)


@triton.jit
def _parallel_probabilities_kernel(
    Q,
    K,
    LSE,
    CMP_SPANS,
    P,
    T,
    G,
    H,
    queries,
    k_rows,
    rows,
    scale_log2,
    D: tl.constexpr,
    WORLD: tl.constexpr,
    W: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """P [B * T, G, rows] of one query and group; LSE [W, B * T, G * H] are the ranks'."""
    query = tl.program_id(1) // G
    group = tl.program_id(1) % G
    head = tl.arange(0, HEADS)
    live = head < H
    row = query.to(tl.int64) * (G * H) + group * H + head
    every = tl.arange(0, WORLD)
    lse = tl.load(
        LSE + every[:, None].to(tl.int64) * queries * (G * H) + row[None, :],
        mask=(every < W)[:, None] & live[None, :],
        other=float("-inf"),
    )
    top = tl.max(lse, 0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lse - safe[None, :]), 0)
    known = live & (total > 0)
    total = tl.where(known, total, 1.0)
    lse2 = tl.where(known, safe * 1.4426950408889634 + tl.math.log2(total), float("inf"))
    held = tl.load(CMP_SPANS + tl.program_id(1) * 2 + 1)
    key = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    seen = key < held
    at = ((query // T).to(tl.int64) * k_rows + key) * G + group
    offs_d = tl.arange(0, BLOCK_D)
    q = head_rows(Q, row, live, offs_d, D)
    s = tl.dot(q, tl.trans(head_rows(K, at, seen, offs_d, D)), input_precision=PRECISION)
    if BLOCK_D2 > 0:
        offs_d2 = BLOCK_D + tl.arange(0, BLOCK_D2)
        q2 = head_rows(Q, row, live, offs_d2, D)
        s = tl.dot(q2, tl.trans(head_rows(K, at, seen, offs_d2, D)), s, input_precision=PRECISION)
    p = tl.math.exp2(s * scale_log2 - lse2[:, None])
    p = tl.sum(tl.where(seen[None, :] & live[:, None], p, 0.0), 0)
    tl.store(P + tl.program_id(1).to(tl.int64) * rows + key, p, mask=key < rows)


@triton.jit
def _parallel_choose_kernel(
    EVERY,
    LENS,
    KEYS,
    CHOSEN,
    SPANS,
    T,
    G,
    first,
    queries,
    rows,
    world,
    rank,
    l: tl.constexpr,
    d: tl.constexpr,
    l_sel: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    N_SEL: tl.constexpr,
    N_PAD: tl.constexpr,
    N_INIT: tl.constexpr,
    N_LOCAL: tl.constexpr,
):
    """The n best blocks of one query and group, ascending, and where this rank has them. The keys
    go through KEYS [queries, BLOCKS], since all of them fit the registers in the search alone."""
    pid = tl.program_id(0)
    query = pid // G
    position = tl.load(LENS + query // T) + first + query % T
    own = position // l_sel
    per_block: tl.constexpr = l_sel // d
    keys = KEYS + pid.to(tl.int64) * BLOCKS
    for begin in range(0, BLOCKS, CHUNK):
        block = begin + tl.arange(0, CHUNK)
        score = tl.zeros([CHUNK], tl.float32)
        for i in tl.static_range(1 - l // d, per_block):
            token = block * per_block + i
            of = token // per_block
            row = of // world * per_block + token % per_block
            at = (of % world * queries + pid).to(tl.int64) * rows + row
            p = tl.load(EVERY + at, mask=(token >= 0) & (row < rows), other=0.0)
            score += p * ((min(i * d + l, l_sel) - max(i * d, 0)) / l)  # tokens of it in the block
        tl.store(keys + block, block_keys(score, block, own, N_INIT, N_LOCAL))
    tl.debug_barrier()
    key = tl.load(keys + tl.arange(0, BLOCKS))
    # count(key >= low) >= n and count(key >= high) < n, as long as there are n.
    low = 0
    high = tl.where(own + 1 > N_SEL, tl.max(key, 0) + 1, 0)
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = tl.sum((key >= middle).to(tl.int32), 0) >= N_SEL
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    room = N_SEL - tl.sum((key >= high).to(tl.int32), 0)
    to = pid.to(tl.int64) * N_SEL
    stored = 0
    for begin in range(0, BLOCKS, CHUNK):
        block = begin + tl.arange(0, CHUNK)
        some = tl.load(keys + block)
        equal = ((some >= low) & (some < high)).to(tl.int32)
        keep = (some >= high) | (equal == 1) & (tl.cumsum(equal, 0) <= room)
        slot = to + stored + tl.cumsum(keep.to(tl.int32), 0) - 1
        start = block // world * l_sel
        end = start + tl.minimum(position + 1 - block * l_sel, l_sel)
        mine = block % world == rank
        tl.store(CHOSEN + slot, block, mask=keep)
        tl.store(SPANS + slot * 2, tl.where(mine, start, 0), mask=keep)
        tl.store(SPANS + slot * 2 + 1, tl.where(mine, end, 0), mask=keep)
        stored += tl.sum(keep.to(tl.int32), 0)
        room = tl.maximum(room - tl.sum(equal, 0), 0)
    pad = tl.arange(0, N_PAD)
    none = (pad >= stored) & (pad < N_SEL)
    tl.store(CHOSEN + to + pad, tl.full([N_PAD], -1, tl.int32), mask=none)
    tl.store(SPANS + (to + pad) * 2, pad * 0, mask=none)
    tl.store(SPANS + (to + pad) * 2 + 1, pad * 0, mask=none)


@triton.jit
def _put_numbers(
    X, OUT, DESCALE, source, to, live, some, which, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows `to` of OUT as the e4m3 rows `source` of X times DESCALE[which], 0 where not live."""
    offs = tl.arange(0, BLOCK)
    x = head_rows(X, source, live, offs, WIDTH).to(tl.float32) * tl.load(DESCALE + which)
    put_rows(OUT, x, to, some, offs, WIDTH)


@triton.jit
def _parallel_numbers_kernel(
    K, V, K_OUT, V_OUT, SPANS, K_DESCALE, V_DESCALE, T, G, cache_rows, out_rows, size,
    n: tl.constexpr, APART: tl.constexpr, SPANNED: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """K_OUT [.., out_rows, G, D] and V_OUT: `size` rows of a program, of one group. Of a query and
    one of its n spans, or (not APART) of a sequence."""
    part, one, group = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    batch, first, end = one, part * size, out_rows
    if APART:
        batch = one // T
        span = SPANS + ((one * G + group) * n + part) * 2
        first = tl.load(span)
        end = tl.load(span + 1)
    elif SPANNED:
        end = tl.load(SPANS + ((one * T + T - 1) * G + group) * n * 2 + 1)
        if first >= end:
            return
    i = tl.arange(0, ROWS)
    live = (i < size) & (first + i < end)
    some = (i < size) & (part * size + i < out_rows)
    source = (batch * cache_rows + first + i) * G + group
    to = (one * out_rows + part * size + i) * G + group
    which = batch * G + group
    _put_numbers(K, K_OUT, K_DESCALE, source, to, live, some, which, D, BLOCK_D)
    _put_numbers(V, V_OUT, V_DESCALE, source, to, live, some, which, DV, BLOCK_DV)


@triton.jit
def _parallel_merge_kernel(
    PARTS,
    WIN,
    GATES,
    OUT,
    rows,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WORLD: tl.constexpr,
    W: tl.constexpr,
):
    """One row of OUT [rows, DV] of PARTS [W, 2, rows, DV + 1], each an output and its lse."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_DV)
    live = offs < DV
    every = tl.arange(0, WORLD)
    out = tl.load(WIN + row * DV + offs, mask=live, other=0.0).to(tl.float32)
    out *= tl.load(GATES + row * 3 + 2).to(tl.float32)
    for branch in tl.static_range(2):
        at = ((every * 2 + branch).to(tl.int64) * rows + row) * (DV + 1)
        lse = tl.load(PARTS + at + DV, mask=every < W, other=float("-inf"))
        part = tl.load(
            PARTS + at[:, None] + offs[None, :],
            mask=(every < W)[:, None] & live[None, :],
            other=0.0,
        )
        top = tl.max(lse, 0)
        weight = tl.exp(lse - tl.where(top == float("-inf"), 0.0, top))
        total = tl.sum(weight, 0)
        merged = tl.sum(part * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
        out += merged * tl.load(GATES + row * 3 + branch).to(tl.float32)
    tl.store(OUT + row * DV + offs, out.to(OUT.dtype.element_ty), mask=live)


# ---- launchers -----------------------------------------------------------------------------------


@on_its_device
def spans(
    lens: Tensor, first: int, T: int, config: NSAConfig, rank: int, world: int, ring: int
) -> tuple[Tensor, Tensor]:
    c, (B,) = config, lens.shape
    cmp = torch.empty(B, T, c.groups, 1, 2, dtype=torch.int32, device=lens.device)
    win = torch.empty(B, T, c.groups, 2, 2, dtype=torch.int32, device=lens.device)
    numbers = (T, c.groups, first, c.l, c.d, c.l_sel // c.d, world, rank, c.window, ring)
    constants = dict(GROUPS=pow2(c.groups), num_warps=1)
    launch(_parallel_spans_kernel, (B * T,), lens, cmp, win, *numbers, **constants)
    return cmp, win


@on_its_device
def probabilities(
    q: Tensor, k_cmp: Tensor, lses: Tensor, cmp: Tensor, rows: int, scale: float
) -> Tensor:
    (B, T, hq, dim), groups, world = q.shape, k_cmp.shape[2], len(lses)
    p = torch.empty(B, T, groups, rows, dtype=torch.float32, device=q.device)
    block_n = 32 if q.element_size() == 4 or dim > 128 else 64
    grid = cdiv(rows, block_n), B * T * groups
    tensors = (q.contiguous(), k_cmp, lses, cmp, p)
    numbers = (T, groups, hq // groups, B * T, k_cmp.shape[1], rows, scale * LOG2E)
    d1, d2 = split_dim(dim)
    sizes = dict(D=dim, BLOCK_N=block_n, BLOCK_D=d1, BLOCK_D2=d2, PRECISION=dot_precision(q.dtype))
    sizes |= dict(WORLD=pow2(world), W=world, HEADS=dot_size(hq // groups))
    kernel = _parallel_probabilities_kernel
    launch(kernel, grid, *tensors, *numbers, **sizes, num_warps=4, num_stages=1)
    return p


@on_its_device
def choose(
    every: Tensor, lens: Tensor, first: int, config: NSAConfig, rank: int
) -> tuple[Tensor, Tensor]:
    c, (W, B, T, groups, rows) = config, every.shape
    blocks, queries = rows // (c.l_sel // c.d) * W, B * T * groups
    if blocks > MOST_BLOCKS:
        raise NotImplementedError(f"more than {MOST_BLOCKS} blocks to choose from, got {blocks}")
    empty = lambda *shape: torch.empty(B, T, groups, *shape, dtype=torch.int32, device=every.device)
    padded = pow2(blocks)
    keys, chosen, own = empty(padded), empty(c.n_sel), empty(c.n_sel, 2)
    numbers = (T, groups, first, queries, rows, W, rank)
    sizes = dict(l=c.l, d=c.d, l_sel=c.l_sel, BLOCKS=padded, CHUNK=min(padded, CHOOSE_CHUNK))
    sizes |= dict(N_SEL=c.n_sel, N_PAD=pow2(c.n_sel), N_INIT=c.n_init, N_LOCAL=c.n_local)
    # Up to 32 keys for each thread: such a program is alone on its multiprocessor.
    sizes |= dict(num_warps=min(max(padded // 1024, 4), 16), num_stages=1)
    tensors = (every, lens, keys, chosen, own)
    launch(_parallel_choose_kernel, (queries,), *tensors, *numbers, **sizes)
    return chosen, own


@on_its_device
def numbers(
    k: Tensor, v: Tensor, k_descale: Tensor, v_descale: Tensor, dtype: torch.dtype, size: int,
    spans: Tensor | None, apart: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_e4m3(arch_of(k.device))
    B, cache_rows, G, _ = k.shape
    T, n = (1, 1) if spans is None else (spans.shape[1], spans.shape[3])
    sequences, rows = (B * T, n * size) if apart else (B, size)
    size = size if apart else 64
    k_out, v_out = (x.new_empty(sequences, rows, *x.shape[2:], dtype=dtype) for x in (k, v))
    D, DV = k.shape[-1], v.shape[-1]
    launch(
        _parallel_numbers_kernel, (cdiv(rows, size), sequences, G), k, v, k_out, v_out,
        k if spans is None else spans, k_descale, v_descale, T, G, cache_rows, rows, size, n=n,
        APART=apart, SPANNED=spans is not None, ROWS=pow2(size), D=D, DV=DV, BLOCK_D=pow2(D),
        BLOCK_DV=pow2(DV), num_warps=4,
    )  # fmt: skip
    return k_out, v_out


@on_its_device
def merge(parts: Tensor, win: Tensor, gates: Tensor) -> Tensor:
    win, dv, world = win.contiguous(), win.shape[-1], len(parts)
    out, rows = torch.empty_like(win), win.numel() // dv
    sizes = dict(DV=dv, BLOCK_DV=pow2(dv), WORLD=pow2(world), W=world, num_warps=1)
    tensors = (parts, win, gates.contiguous(), out)
    launch(_parallel_merge_kernel, (rows,), *tensors, rows, **sizes)
    return out
