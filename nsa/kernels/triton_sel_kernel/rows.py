"""Device code that the forward and backward kernels share: rows in chunks of their head size, the
map from a row's slots to its keys, the online softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_row_chunks(
    X, base, stride, head, live, DIM: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr
):
    """X[base + head * stride + :DIM] as a tuple of [heads, BLOCK] chunks, 0 where not live."""
    chunks = ()
    for i in tl.static_range(0, DIM, BLOCK):
        offs = i + tl.arange(0, BLOCK)
        ptrs = X + base + head[:, None] * stride + offs[None, :]
        if i + BLOCK <= DIM:
            x = tl.load(ptrs, mask=live[:, None], other=0.0)
        else:
            x = tl.load(ptrs, mask=live[:, None] & (offs < DIM)[None, :], other=0.0)
        chunks = chunks + (x.to(DTYPE),)
    return chunks


@triton.jit
def zero_chunks(ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    chunks = ()
    for _ in tl.static_range(0, DIM, BLOCK):
        chunks = chunks + (tl.zeros([ROWS, BLOCK], tl.float32),)
    return chunks


@triton.jit
def store_row_chunks(X, base, stride, head, live, chunks, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of load_row_chunks, cast to X's dtype."""
    for i in tl.static_range(0, DIM, BLOCK):
        offs = i + tl.arange(0, BLOCK)
        ptrs = X + base + head[:, None] * stride + offs[None, :]
        x = chunks[i // BLOCK].to(X.dtype.element_ty)
        if i + BLOCK <= DIM:
            tl.store(ptrs, x, mask=live[:, None])
        else:
            tl.store(ptrs, x, mask=live[:, None] & (offs < DIM)[None, :])


@triton.jit
def load_range(at, live, limit):
    """The range [start, end) at `at`, int32 or int64, with both ends cut to [0, limit], as int32:
    clamped first, no end is truncated and no difference of the two wraps around."""
    start = tl.load(at, mask=live, other=0)
    end = tl.load(at + 1, mask=live, other=0)
    start = tl.minimum(tl.maximum(start, 0), limit).to(tl.int32)
    return start, tl.minimum(tl.maximum(end, 0), limit).to(tl.int32)


@triton.jit
def clean_row(RANGES, n, first, limit, NR: tl.constexpr):
    """Disjoint spans of ranges first .. first + NR - 1 of a row, in the order of the ranges: key
    where each begins, keys, slot where it begins, rank by key. Together they are the ranges' union:
    what several hold is left to the first by key; what is empty has no keys."""
    i = tl.arange(0, NR)
    start, end = load_range(RANGES + (first + i) * 2, first + i < n, limit)
    start = tl.where(end <= start, 2147483647, start)
    end = tl.where(start == 2147483647, 0, end)
    # All pairs: does range i (rows) come before range j (columns)?
    before = (start[:, None] < start[None, :]) | (
        (start[:, None] == start[None, :]) & (i[:, None] < i[None, :])
    )
    begin = tl.maximum(start, tl.max(tl.where(before, end[:, None], 0), 0))
    length = tl.maximum(end - begin, 0)
    slot = tl.sum(tl.where(before, length[:, None], 0), 0)
    return tl.where(length > 0, begin, 0), length, slot, tl.sum(before.to(tl.int32), 0)


@triton.jit
def load_spans(STARTS, CUM, row, n, first, NR: tl.constexpr):
    """Spans first .. first + NR - 1 of a row as (slot where each begins, key - slot in it)."""
    i = first + tl.arange(0, NR)
    slot = tl.load(CUM + row * (n + 1) + i, mask=i < n, other=2147483647)
    return slot, tl.load(STARTS + row * n + i, mask=i < n, other=0) - slot


@triton.jit
def slot_to_key(slot, begin, step):
    """The key in each slot: spans are disjoint, so that key - slot grows from one to the next, in
    whichever order they come; it is below 1 in those without keys."""
    # Spans on the first axis: the maximum stays within a thread.
    return slot + tl.max(tl.where(begin[:, None] <= slot[None, :], step[:, None], 0), 0)


@triton.jit
def attend(
    acc, m_i, l_i, qs, k_base, v_base, stride_kl, stride_vl, spans, step, begin, end, scale_log2,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, MAPPED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Online softmax (base 2) of qs over key slots [begin, end)."""
    for n0 in tl.range(begin, end, BLOCK_L):
        slot = n0 + tl.arange(0, BLOCK_L)
        live = slot < end
        if MAPPED:
            key = slot_to_key(slot, spans, step).to(tl.int64)
        else:
            key = slot.to(tl.int64)
        s = tl.zeros([ROWS, BLOCK_L], tl.float32)
        for i in tl.static_range(0, D, BLOCK_D):
            offs_d = i + tl.arange(0, BLOCK_D)
            k_ptrs = k_base + key[:, None] * stride_kl + offs_d[None, :]
            if i + BLOCK_D <= D:
                k = tl.load(k_ptrs, mask=live[:, None], other=0.0)
            else:
                k = tl.load(k_ptrs, mask=live[:, None] & (offs_d < D)[None, :], other=0.0)
            s = tl.dot(qs[i // BLOCK_D], tl.trans(k), s, input_precision=PRECISION)
        s = tl.where(live[None, :], s * scale_log2, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.math.exp2(s - m_new[:, None])
        alpha = tl.math.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        new_acc = ()
        for i in tl.static_range(0, DV, BLOCK_DV):
            offs_v = i + tl.arange(0, BLOCK_DV)
            v_ptrs = v_base + key[:, None] * stride_vl + offs_v[None, :]
            if i + BLOCK_DV <= DV:
                v = tl.load(v_ptrs, mask=live[:, None], other=0.0)
            else:
                v = tl.load(v_ptrs, mask=live[:, None] & (offs_v < DV)[None, :], other=0.0)
            scaled = acc[i // BLOCK_DV] * alpha[:, None]
            new_acc = new_acc + (tl.dot(p.to(v.dtype), v, scaled, input_precision=PRECISION),)
        acc = new_acc
    return acc, m_i, l_i


@triton.jit
def key_share(length, part, SPLITS: tl.constexpr, BLOCK_L: tl.constexpr):
    """Slots [begin, end) of this program: whole tiles, as even as they come."""
    tiles = (length + BLOCK_L - 1) // BLOCK_L
    share = (tiles + SPLITS - 1) // SPLITS * BLOCK_L
    begin = part * share
    return begin, tl.minimum(begin + share, length)


@triton.jit
def finish_row(
    O, LSE, row, part, head, live, H, acc, m_i, l_i,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, KEEP_LSE: tl.constexpr,
):  # fmt: skip
    """Store the normalised output and, if it is kept, its lse; with splits both, as partial `part`
    of the row.

    A row (or part) without keys has l = 0: output 0, lse -inf.
    """
    empty = l_i == 0.0
    l_i = tl.where(empty, 1.0, l_i)
    inv = 1.0 / l_i
    out = ()
    for i in tl.static_range(0, DV, BLOCK_DV):
        out = out + (acc[i // BLOCK_DV] * inv[:, None],)
    lse = tl.where(empty, float("-inf"), (m_i + tl.math.log2(l_i)) * 0.6931471805599453)
    at = row
    if SPLITS > 1:
        at = row * SPLITS + part
    store_row_chunks(O, at * H * DV, DV, head, live, out, DV, BLOCK_DV)
    if KEEP_LSE or SPLITS > 1:
        tl.store(LSE + at * H + head, lse, mask=live)
