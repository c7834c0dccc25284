"""Block scores and top-n selection (Eq. 9 and 10) in two kernels over slabs of queries.

On Hopper score_hopper.py finds the scores.

The score kernel recomputes the compressed probabilities from the kept log-sum-exp, pools them to
selection blocks with a small matrix product and sums them over the heads of a group. The top-n
kernel bisects the bit pattern of a row's scores for the n-th largest. Scores exist for one slab of
queries at a time (SLAB_BYTES, or one tile of queries of each sequence), so memory does not grow
with S^2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from nsa.config import check_choice
from nsa.kernels.block_keys import block_keys, overlaps
from nsa.kernels.head_rows import split_rows
from nsa.kernels.launch import launch
from nsa.kernels.prefill import hopper
from nsa.kernels.prefill.limits import check_heads
from nsa.kernels.prefill.packs import Rows, sequence_bounds, sequence_of
from nsa.kernels.prefill.span.common import load_rows, span_hi
from nsa.kernels.row_tiles import k_tiles, tma_usable
from nsa.kernels.tiles import LOG2E, arch_of, cdiv, dot_precision, pow2, split_dim

SLAB_BYTES = 128 << 20
ROWS = 64  # queries of a group for which a program names every block


@triton.jit
def _pool_tile(
    q, q2, lse2, pool, carry, K, KD, KD2, k_begin, group, G, score_ptrs, n0, hi, k_len, offs_d,
    offs_d2, scale_log2,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, BLOCK_N: tl.constexpr,
    NB: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, TMA: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of compressed keys to NB block scores; what spills further is carried on."""
    offs_n = n0 + tl.arange(0, BLOCK_N)
    live = offs_n < k_len
    k = load_rows(
        K, KD, k_begin, n0, live, group, G, offs_d, D, 0, BLOCK_D > D, BLOCK_N, TMA, MASKED
    )
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if BLOCK_D2 > 0:
        k2 = load_rows(
            K, KD2, k_begin, n0, live, group, G, offs_d2, D, BLOCK_D, BLOCK_D + BLOCK_D2 > D,
            BLOCK_N, TMA, MASKED,
        )  # fmt: skip
        s = tl.dot(q2, tl.trans(k2), s, input_precision=PRECISION)
    # 2^10: fp16 then keeps 11 bits of every probability down to 6e-8, which ranks blocks reliably.
    p = tl.math.exp2(s * scale_log2 + (10.0 - lse2)[:, None])
    if MASKED:
        p = tl.where(offs_n[None, :] < hi[:, None], p, 0.0)
    pooled = tl.dot(p.to(pool.dtype), pool, input_precision=PRECISION)
    pooled = tl.sum(tl.reshape(pooled, [BLOCK_Q, HEADS, 2 * NB]), 1)
    halves = tl.reshape(pooled, [BLOCK_Q, 2, NB])
    upper = tl.arange(0, 2)[None, :, None] == 1
    tl.store(score_ptrs + n0 // BLOCK_N * NB, carry + tl.sum(tl.where(upper, 0.0, halves), 1))
    return tl.sum(tl.where(upper, halves, 0.0), 1)


@triton.jit
def _block_score_kernel(
    Q, K, KD, KD2, LSE, SCORES, CU_Q, CU_K, SQ, SK, G, H, q_start, slab_begin, slab_len, n_ld, l, d,
    l_sel, scale_log2,
    D: tl.constexpr, VARLEN: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_N: tl.constexpr, NB: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    POOL_DTYPE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """SCORES [B * G, slab_len, n_ld] fp32, up to a constant factor that does not change ranks;
    packed: [G, slab_len, n_ld] of the tiles of BLOCK_Q queries of all sequences."""
    BLOCK_M: tl.constexpr = BLOCK_Q * HEADS
    nth = tl.num_programs(0) - 1 - tl.program_id(0)
    if VARLEN:
        group = tl.program_id(1)
        batch, tile = sequence_of(slab_begin // BLOCK_Q + nth, CU_Q, SQ, BLOCK_Q)
        q0 = tile * BLOCK_Q
    else:
        batch = tl.program_id(1) // G
        group = tl.program_id(1) % G
        q0 = slab_begin + nth * BLOCK_Q
    q_begin, q_len, k_begin, k_len = sequence_bounds(CU_Q, CU_K, batch, SQ, SK, VARLEN)
    if q0 >= q_len:
        return
    rows = tl.arange(0, BLOCK_M)
    t = q0 + rows // HEADS
    head = rows % HEADS
    row_live = (t < q_len) & (head < H)
    row_index = (q_begin + t) * (G * H) + group * H + head
    offs_d, offs_d2, q, q2 = split_rows(Q, row_index, row_live, D, BLOCK_D, BLOCK_D2)
    lse = tl.load(LSE + row_index, mask=row_live, other=float("-inf"))
    # Padding heads and rows that see no compressed key contribute nothing.
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    hi = tl.minimum(span_hi(t + q_start, l, d, 0), k_len)
    t_last = tl.minimum(q0 + BLOCK_Q, q_len) - 1 + q_start
    hi_first = tl.minimum(span_hi(q0 + q_start, l, d, 0), k_len)
    hi_last = tl.minimum(span_hi(t_last, l, d, 0), k_len)
    full_end = hi_first // BLOCK_N * BLOCK_N
    pool = overlaps(l, d, l_sel, BLOCK_N, 2 * NB).to(POOL_DTYPE)

    offs_q = tl.arange(0, BLOCK_Q)
    slab_row = tl.program_id(1).to(tl.int64) * slab_len + nth * BLOCK_Q + offs_q
    score_ptrs = SCORES + slab_row[:, None] * n_ld + tl.arange(0, NB)[None, :]
    carry = tl.zeros([BLOCK_Q, NB], tl.float32)
    for n0 in tl.range(0, full_end, BLOCK_N):
        carry = _pool_tile(
            q, q2, lse2, pool, carry, K, KD, KD2, k_begin, group, G, score_ptrs, n0, hi, k_len,
            offs_d, offs_d2, scale_log2, D, BLOCK_Q, HEADS, BLOCK_N, NB, BLOCK_D, BLOCK_D2, TMA,
            False, PRECISION,
        )  # fmt: skip
    for n0 in tl.range(full_end, hi_last, BLOCK_N):
        carry = _pool_tile(
            q, q2, lse2, pool, carry, K, KD, KD2, k_begin, group, G, score_ptrs, n0, hi, k_len,
            offs_d, offs_d2, scale_log2, D, BLOCK_Q, HEADS, BLOCK_N, NB, BLOCK_D, BLOCK_D2, TMA,
            True, PRECISION,
        )  # fmt: skip
    tl.store(score_ptrs + (hi_last + BLOCK_N - 1) // BLOCK_N * NB, carry)


@triton.jit
def _block_topn_kernel(
    SCORES, OUT, CU_Q, CU_K, SQ, SK, q_start, slab_begin, slab_len, n_ld,
    VARLEN: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, NB: tl.constexpr,
    BLOCKS: tl.constexpr, N_SEL: tl.constexpr, N_PAD: tl.constexpr, N_INIT: tl.constexpr,
    N_LOCAL: tl.constexpr, G: tl.constexpr, l: tl.constexpr, d: tl.constexpr,
    l_sel: tl.constexpr,
):  # fmt: skip
    """The n best blocks of one query and group, ascending; ties go to the lower index."""
    if VARLEN:
        group = tl.program_id(1)
        place = slab_begin + tl.program_id(0)
        batch, tile = sequence_of(place // BLOCK_Q, CU_Q, SQ, BLOCK_Q)
        t = tile * BLOCK_Q + place % BLOCK_Q
    else:
        batch = tl.program_id(1) // G
        group = tl.program_id(1) % G
        t = slab_begin + tl.program_id(0)
    q_begin, q_len, k_begin, k_len = sequence_bounds(CU_Q, CU_K, batch, SQ, SK, VARLEN)
    if t >= q_len:
        return
    # What the score kernel wrote for the tile that holds t: whole key tiles and one carry.
    t_last = tl.minimum(t // BLOCK_Q * BLOCK_Q + BLOCK_Q, q_len) - 1 + q_start
    hi_last = tl.minimum(span_hi(t_last, l, d, 0), k_len)
    n_written = (hi_last + BLOCK_N - 1) // BLOCK_N * NB + NB
    block = tl.arange(0, BLOCKS)
    row = tl.program_id(1).to(tl.int64) * slab_len + tl.program_id(0)
    own = (t + q_start) // l_sel
    if VARLEN:  # a query of no sequence has no block
        own = tl.where(batch < SQ, own, -1)
    # The mask changes at whole tiles, for loads of 16 bytes; block_keys drops what t does not see.
    score = tl.load(SCORES + row * n_ld + block, mask=block < n_written, other=0.0)
    key = block_keys(score, block, own, N_INIT, N_LOCAL)
    # Invariant: count(key >= low) >= n, count(key >= high) < n. Done at one value, or at n exactly.
    # As many keys as there are parts reach the least of the parts' largest, and no forced block is
    # the n-th: between these the search takes 6 steps, not 15 (random inputs, 1024 blocks).
    ranked = key
    if N_INIT + N_LOCAL < N_SEL:
        ranked = tl.where((block >= N_INIT) & (own - block >= N_LOCAL), key, -1)
    low = 0
    PARTS: tl.constexpr = max(32, N_PAD)  # a warp: what all lanes know needs no care in the loop
    if BLOCKS > PARTS:
        largest = tl.max(tl.reshape(key, [BLOCKS // PARTS, PARTS]), 0)
        low = tl.maximum(tl.min(largest, 0), 0)
    high = tl.where(own + 1 > N_SEL, tl.max(ranked, 0) + 1, 0)
    while high - low > 1:
        middle = low + (high - low) // 2
        count = tl.sum((key >= middle).to(tl.int32), 0)
        low = tl.where(count >= N_SEL, middle, low)
        high = tl.where(count > N_SEL, high, middle)
    above = key >= high
    equal = (key >= low) & (key < high)
    room = N_SEL - tl.sum(above.to(tl.int32), 0)
    # How many of either come before a block, in one sum: those above in its lower half.
    COUNT: tl.constexpr = tl.int32 if BLOCKS < 32768 else tl.int64
    HALF: tl.constexpr = COUNT.primitive_bitwidth // 2
    both = above.to(COUNT) + (equal.to(COUNT) << HALF)
    before = tl.cumsum(both, 0) - both
    equal_before = (before >> HALF).to(tl.int32)
    keep = above | (equal & (equal_before < room))
    slot = (before & ((1 << HALF) - 1)).to(tl.int32) + tl.minimum(equal_before, room)
    out = OUT + ((q_begin + t) * G + group) * N_SEL
    tl.store(out + slot, block, mask=keep)
    pad = tl.arange(0, N_PAD)
    tl.store(out + pad, tl.full([N_PAD], -1, tl.int32), mask=(pad > own) & (pad < N_SEL))


@triton.jit
def _every_block_kernel(
    OUT, SEQ_BEGIN, CU_Q, n_rows, S, G, n_seq, q_start, l_sel,
    VARLEN: tl.constexpr, N_SEL: tl.constexpr, N_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """All blocks up to each query's own, of queries that have no more than N_SEL."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < n_rows
    token = row // G
    if VARLEN:
        own = (token - tl.load(SEQ_BEGIN + token, mask=live, other=0)) // l_sel
        own = tl.where(token < tl.load(CU_Q + n_seq), own, -1)
    else:
        own = (token % S + q_start) // l_sel
    rank = tl.arange(0, N_PAD)[None, :]
    to = OUT + row[:, None].to(tl.int64) * N_SEL + rank
    tl.store(to, tl.where(rank <= own[:, None], rank, -1), mask=live[:, None] & (rank < N_SEL))


def score_tiles(arch: int, d: int, itemsize: int, keys: int) -> tuple[int, int, int, int]:
    """(rows, BLOCK_N, num_warps, num_stages) of the score kernel for so many compressed keys."""
    if arch == 0:
        return 32, 16, 4, 1
    if itemsize == 4:
        return 16, 32, 4, 2
    if d > 192:
        return 64, 64, 8, 2
    # H200, HQ64 G4 D128 bf16, 64k tokens: 5.7 ms with 128 rows, 6.2 with 64 rows on 4 warps. With
    # 32 keys instead of 64, top-n included: 4k 72 -> 66 us, 8k 171 -> 162, but 16k 494 -> 505.
    return 128, 32 if keys <= 512 else 64, 8, 2


def topn_warps(blocks: int) -> int:
    return max(1, min(blocks // 1024, 16))


@dataclass(frozen=True)
class Slab:
    """Queries of each sequence from `begin` on that are scored, and ranked, at once: their scores
    [B * G, rows, n_ld] fp32. Of a pack the places of queries in its tiles, [G, rows, n_ld]."""

    begin: int
    queries: int
    scores: torch.Tensor
    rows: int
    n_ld: int


@dataclass(frozen=True)
class Ranking:
    """The choice of blocks by scores that somebody else finds, slab by slab."""

    out: torch.Tensor  # int32 [.., G, n_sel]
    at: Rows
    longest: int  # queries of a sequence, at most
    q_start: int
    l: int
    d: int
    l_sel: int
    n_init: int
    n_local: int

    @classmethod
    def of(
        cls, q: torch.Tensor, k_cmp: torch.Tensor, *, l: int, d: int, l_sel: int, n_sel: int,
        n_init: int, n_local: int, cu_q: torch.Tensor | None = None,
        cu_k: torch.Tensor | None = None, max_q: int = 0, q_start: int = 0,
    ) -> Ranking:  # fmt: skip
        check_choice(n_sel, n_init, n_local)
        at = Rows.of(q, k_cmp, cu_q, cu_k)
        longest = q.shape[1] if cu_q is None else min(max_q, at.tokens)
        out = torch.empty(*q.shape[:-2], k_cmp.shape[-2], n_sel, dtype=torch.int32, device=q.device)
        return cls(out, at, longest, q_start, l, d, l_sel, n_init, n_local)

    def slabs(self, block_q: int, block_n: int) -> Iterator[Slab]:
        """Slabs whose scores are to be found, for which the caller has the time until it asks for
        the next one. block_q, block_n: queries and keys of a tile of scores; of each such tile of
        queries all blocks of whole key tiles and one more tile of blocks must be written."""
        out, q_start, (groups, n_sel), at = self.out, self.q_start, self.out.shape[-2:], self.at
        if out.numel() == 0:
            return
        nb, rows = block_n * self.d // self.l_sel, at.batch * groups
        n_ld = (cdiv(cdiv(q_start + self.longest, self.l_sel), nb) + 1) * nb
        all_rows = at.query_tiles(block_q) * block_q
        slab = min(max(SLAB_BYTES // (4 * n_ld * rows) // block_q, 1) * block_q, all_rows)
        scores = torch.empty(rows * slab * n_ld, dtype=torch.float32, device=out.device)
        for begin in range(0, all_rows if at.cu else at.sq, slab):
            queries = min(slab, (all_rows if at.cu else at.sq) - begin)
            yield Slab(begin, queries, scores, slab, n_ld)
            # Early slabs have fewer blocks to rank: H200, 64k, 1.37 -> 0.97 ms.
            seen = self.longest if at.cu else begin + queries
            blocks = max(pow2(cdiv(q_start + seen, self.l_sel)), 32)
            launch(
                _block_topn_kernel, (queries, rows),
                scores, out, *(at.cu or (scores, scores)), at.sq, at.sk, q_start, begin, slab, n_ld,
                VARLEN=at.cu is not None, BLOCK_Q=block_q, BLOCK_N=block_n, NB=nb, BLOCKS=blocks,
                N_SEL=n_sel, N_PAD=pow2(n_sel), N_INIT=self.n_init, N_LOCAL=self.n_local,
                G=groups, l=self.l, d=self.d, l_sel=self.l_sel, num_warps=topn_warps(blocks),
                num_stages=1,
            )  # fmt: skip


def every_block(ranking: Ranking, seq_begin: torch.Tensor | None) -> torch.Tensor:
    """The choice of those who choose every block they see. seq_begin: int32 [T], of a pack."""
    out, (groups, n_sel) = ranking.out, ranking.out.shape[-2:]
    n_rows = out.numel() // n_sel
    if n_rows:
        cu = ranking.at.cu
        launch(
            _every_block_kernel, (cdiv(n_rows, ROWS),),
            out, out if seq_begin is None else seq_begin, out if cu is None else cu[0], n_rows,
            ranking.longest, groups, ranking.at.sq, ranking.q_start, ranking.l_sel,
            VARLEN=seq_begin is not None, N_SEL=n_sel, N_PAD=pow2(n_sel), ROWS=ROWS,
        )  # fmt: skip
    return out


def block_select(
    q: torch.Tensor, k_cmp: torch.Tensor, lse: torch.Tensor, *, l: int, d: int, l_sel: int,
    n_sel: int, n_init: int, n_local: int, softmax_scale: float,
    cu_q: torch.Tensor | None = None, cu_k: torch.Tensor | None = None, max_q: int = 0,
    q_start: int = 0, use_gluon: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """block_indices int32 [B, S, G, n_sel] (packed: [T, G, n_sel]), ascending, padded with -1.

    lse: natural-log normaliser of compressed attention, fp32 [.., HQ], -inf where nothing is seen.
    max_q: queries of the longest packed sequence, at least; a smaller number stops the device.
    q_start: position of query 0 in its sequence. use_gluon: as hopper.py has it.
    """
    if l_sel % d or (l_sel // d) & (l_sel // d - 1):
        raise NotImplementedError(f"l_sel / d must be a power of two, got l_sel={l_sel}, d={d}")
    if l > 8 * l_sel:
        raise NotImplementedError(f"l must not exceed 8 * l_sel, got l={l}, l_sel={l_sel}")
    check_heads(q, k_cmp, k_cmp)
    hq, dim = q.shape[-2:]
    groups = k_cmp.shape[-2]
    heads = hq // groups
    ranking = Ranking.of(
        q, k_cmp, l=l, d=d, l_sel=l_sel, n_sel=n_sel, n_init=n_init, n_local=n_local, cu_q=cu_q,
        cu_k=cu_k, max_q=max_q, q_start=q_start,
    )  # fmt: skip
    at, arch = ranking.at, arch_of(q.device)
    on_hopper = hopper.block_scores(q, k_cmp, l, d, l_sel, use_gluon)
    if on_hopper:
        for slab in ranking.slabs(*on_hopper.tile(heads)):
            on_hopper.block_scores(
                q, k_cmp, lse, l=l, d=d, l_sel=l_sel, softmax_scale=softmax_scale, at=at,
                q_start=q_start, slab=slab,
            )  # fmt: skip
        return ranking.out
    rows, block_n, warps, stages = score_tiles(
        arch, dim, q.element_size(), (q_start + ranking.longest) // d
    )
    block_q, block_n = max(rows // pow2(heads), 1), max(block_n, 8 * (l_sel // d))
    d1, d2 = split_dim(dim)
    tma = tma_usable(arch, k_cmp)
    k1, k2 = k_tiles(k_cmp, block_n, tma)
    for slab in ranking.slabs(block_q, block_n):
        launch(
            _block_score_kernel, (cdiv(slab.queries, block_q), at.batch * groups),
            q, k_cmp, k1, k2, lse, slab.scores, *(at.cu or (lse, lse)), at.sq, at.sk, groups, heads,
            q_start, slab.begin, slab.rows, slab.n_ld, l, d, l_sel, softmax_scale * LOG2E,
            D=dim, VARLEN=at.cu is not None, BLOCK_Q=block_q, HEADS=pow2(heads), BLOCK_N=block_n,
            NB=block_n * d // l_sel, BLOCK_D=d1, BLOCK_D2=d2,
            POOL_DTYPE=tl.float32 if q.dtype == torch.float32 else tl.float16, TMA=tma,
            PRECISION=dot_precision(q.dtype), num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return ranking.out
