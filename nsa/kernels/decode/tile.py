"""What the scan and the chosen blocks share: where keys lie, and attention over a tile of them."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.kernels.finite_rows import kept_apart


@triton.jit
def begin_next(EARLY: tl.constexpr):
    """With EARLY (SM 9.0 on) the programs of the next launch, if it is one that does not wait for
    the end of this one, may take the places that are free."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_last(EARLY: tl.constexpr):
    """With EARLY: the launch before this one has ended, and what it stored is there. Every program
    waits, so that the end of a launch is also the end of all before it."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def cache_row(token, TABLE, batch, table_len, capacity, PAGE: tl.constexpr, RING: tl.constexpr):
    """Row of a token in a cache: contiguous [B, capacity], ring of `capacity`, or paged."""
    if PAGE > 0:
        page = tl.load(TABLE + batch * table_len + token // PAGE).to(tl.int64)
        return page * PAGE + token % PAGE
    if RING:
        return batch.to(tl.int64) * capacity + token % capacity
    return batch.to(tl.int64) * capacity + token


@triton.jit
def place(
    token, TABLE, batch, table_len, rows, pages, live, PAGE: tl.constexpr, RING: tl.constexpr
):
    """Row of a token in a cache as cache_row() has it, and may it be touched: `live`, and there is
    such a row, and such a page. rows: of a sequence without pages; pages: all there are."""
    live = live & (token >= 0)
    if PAGE > 0:
        live = live & (token < table_len * PAGE)
        at = TABLE + batch * table_len + token // PAGE
        page = tl.load(at, mask=live, other=-1).to(tl.int64)
        return page * PAGE + token % PAGE, live & (page >= 0) & (page < pages)
    if RING:
        return batch * rows + token % rows, live
    return batch * rows + token, live & (token < rows)


@triton.jit
def rank_row(index, rows, SIZE: tl.constexpr, WORLD: tl.constexpr, RANK: tl.constexpr):
    """Row of a token in a cache over WORLD ranks, of which rank RANK has every WORLD-th block of
    SIZE tokens: the last of its `rows` takes those of others."""
    if WORLD == 1:
        return index
    block = index // SIZE
    row = block // WORLD * SIZE + index % SIZE
    return tl.where(block % WORLD == RANK, tl.minimum(row, rows - 1), rows - 1)


@triton.jit
def key_scale(scale_log2, DESCALE, bg, K):
    """Of the scores of keys K, which e4m3 keys stand for DESCALE [B * G] times of."""
    if K.dtype.element_ty == tl.float8e4nv:
        return scale_log2 * tl.load(DESCALE + bg)
    return scale_log2


@triton.jit
def by_descale(x, DESCALE, bg, V):
    """Outputs of values V, which e4m3 values stand for DESCALE [B * G] times of."""
    if V.dtype.element_ty == tl.float8e4nv:
        return x * tl.load(DESCALE + bg)
    return x


@triton.jit
def store_rows(OUT, at, x, mask, DESCALE, which, live):
    """Store x [rows, columns]; as e4m3 the nearest x / DESCALE[which], with `which` [rows] of live
    ones, at most 448 large, and NaN as NaN."""
    if OUT.dtype.element_ty == tl.float8e4nv:
        by = tl.load(DESCALE + which, mask=live, other=1.0)
        x = tl.math.div_rn(x.to(tl.float32), tl.broadcast_to(by[:, None], x.shape))
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(OUT + at, x.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def attend(
    acc, m, total, q, q2, k, k2, v, seen, scale_log2, BLOCK_D2: tl.constexpr,
    APART: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile: output, maxima (base 2) and sums with it, its probabilities and the maxima that
    they are relative to. APART: rows do not all see the same keys."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if BLOCK_D2 > 0:
        s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
    s = tl.where(seen, s * scale_log2, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(s - m_safe[:, None])
    alpha = tl.math.exp2(m - m_safe)
    total = total * alpha + tl.sum(p, 1)
    weights = p
    if APART:
        weights, v = kept_apart(p, v, seen)
    acc = tl.dot(weights.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_new, total, p, m_safe
