"""Key spans: compressed and sliding attention both let query t see one contiguous run of keys.

Compressed (Eq. 7 with causal masking): keys [0, visible(t)), visible(t) = (t + 1 - l) // d + 1 once
t + 1 >= l. Sliding: keys [t + 1 - w, t + 1). Both bounds never fall as t grows, so a tile of
queries has a masked head, an unmasked middle and a masked tail, and so does a tile of keys.

Positions: query row s stands at q_start + s among the keys; every span is a function of that
position, so a chunk of a longer sequence needs its first position only.

Rows of a tile are (query, head) pairs of one KV group, heads fastest: K and V are loaded once for
all heads, and a row block of Q is contiguous in the [B, S, HQ, D] layout.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa.kernels.block_keys import visible


@triton.jit
def span_lo(t, a, MODE: tl.constexpr):
    """First visible key of query t."""
    if MODE == 0:
        return t * 0
    else:
        return tl.maximum(t + 1 - a, 0)


@triton.jit
def span_hi(t, a, b, MODE: tl.constexpr):
    """One past the last visible key of query t."""
    if MODE == 0:
        return visible(t, a, b)
    else:
        return t + 1


@triton.jit
def span_tiles(
    q0, q_len, k_len, q_start, a, b,
    MODE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Where the key tiles of a tile of queries begin, where those that all of these see whole begin
    and end, and where the last one ends."""
    t_first = q0 + q_start
    t_last = tl.minimum(q0 + BLOCK_Q, q_len) - 1 + q_start
    hi_first = tl.minimum(span_hi(t_first, a, b, MODE), k_len)
    hi_last = tl.minimum(span_hi(t_last, a, b, MODE), k_len)
    begin = span_lo(t_first, a, MODE) // BLOCK_N * BLOCK_N
    full_begin = (span_lo(t_last, a, MODE) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    full_end = tl.maximum(hi_first // BLOCK_N * BLOCK_N, full_begin)
    return begin, full_begin, full_end, hi_last


@triton.jit
def span_part(part: tl.constexpr, begin, full_begin, full_end, end):
    """First and end of the tiles of span_tiles that go together: those seen whole, then those to be
    masked at the beginning, then at the end."""
    if part == 0:
        return full_begin, full_end
    elif part == 1:
        return begin, tl.minimum(full_begin, end)
    else:
        return full_end, end


@triton.jit
def put_dq(MORE, DQ, dq, row, live, offs, scale, D: tl.constexpr, ACCUMULATE: tl.constexpr):
    """scale times dq to DQ [.., D], and times MORE as well where ACCUMULATE."""
    mask = live[:, None] & (offs < D)[None, :]
    at = row[:, None] * D + offs[None, :]
    if ACCUMULATE:
        dq += tl.load(MORE + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(DQ + at, (dq * scale).to(DQ.dtype.element_ty), mask=mask)


@triton.jit
def load_rows(
    X, XD, first_key, n0, live, group, G, offs,
    WIDTH: tl.constexpr, BEGIN: tl.constexpr, PADDED: tl.constexpr, BLOCK_N: tl.constexpr,
    TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys n0 .. n0 + BLOCK_N of one group of X [.., G, WIDTH], columns `offs` (from BEGIN on).

    Rows that are not live read as 0; columns past WIDTH too where PADDED. Tiles that need no mask
    go through the descriptor XD where TMA.
    """
    if TMA and not MASKED:
        x = XD.load([(first_key + n0).to(tl.int32), group * WIDTH + BEGIN])
    else:
        row = ((first_key + n0 + tl.arange(0, BLOCK_N)).to(tl.int64) * G + group)[:, None]
        at = X + row * WIDTH + offs[None, :]
        if MASKED:
            x = tl.load(at, mask=live[:, None] & (offs < WIDTH)[None, :], other=0.0)
        elif PADDED:
            x = tl.load(at, mask=(offs < WIDTH)[None, :], other=0.0)
        else:
            x = tl.load(at)
    return x


@triton.jit
def load_kv(
    K, V, KD, KD2, VD, first_key, n0, live, group, G, offs_d, offs_d2, offs_dv,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A tile of K (two parts of its width) and V, see load_rows."""
    k = load_rows(
        K, KD, first_key, n0, live, group, G, offs_d, D, 0, BLOCK_D > D, BLOCK_N, TMA, MASKED
    )
    if BLOCK_D2 > 0:
        k2 = load_rows(
            K, KD2, first_key, n0, live, group, G, offs_d2, D, BLOCK_D, BLOCK_D + BLOCK_D2 > D,
            BLOCK_N, TMA, MASKED,
        )  # fmt: skip
    else:
        k2 = k
    v = load_rows(
        V, VD, first_key, n0, live, group, G, offs_dv, DV, 0, BLOCK_DV > DV, BLOCK_N, TMA, MASKED
    )
    return k, k2, v
