"""The paper (arXiv 2502.11089) in fp64 with loops over tokens: slow, obvious, checkable by pencil.

For tests and parity stages only. It imports torch and nothing else, so no bug of the package can
hide in it. Tensors: q [B, S, HQ, Dk], k [B, N, G, Dk], v [B, N, G, Dv]; query head j belongs to
group j // (HQ // G). All functions are differentiable and return fp64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _each_block(x: Tensor, l: int, d: int, phi) -> Tensor:
    """Eq. 7: phi of the tokens [i*d, i*d + l), each [B, G, D], of each whole block i of
    x [B, S, G, D], as [B, Nc, G, D]."""
    x = x.double()
    B, S, G, D = x.shape
    blocks = []
    i = 0
    while i * d + l <= S:
        blocks.append(phi([x[:, token] for token in range(i * d, i * d + l)]))
        i += 1
    return torch.stack(blocks, 1) if blocks else x.new_zeros(B, 0, G, D)


def compress_mean(x: Tensor, l: int, d: int) -> Tensor:
    """Mean of the tokens of each block. x [B, S, G, D] -> [B, Nc, G, D]."""
    return _each_block(x, l, d, lambda tokens: sum(tokens) / l)


def compress_mlp(
    x: Tensor, position: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, l: int, d: int
) -> Tensor:
    """phi = W2 silu(W1 [x_0 + p_0, ..., x_{l-1} + p_{l-1}] + b1) + b2 of each block.

    position [l, D]; w1 [hidden, l*D] reads the block token by token; w2 [D, hidden].
    """

    def phi(tokens: list[Tensor]) -> Tensor:
        placed = [token + position[j].double() for j, token in enumerate(tokens)]
        inner = torch.cat(placed, dim=-1) @ w1.double().T + b1.double()  # of [B, G, l*D]
        inner = inner / (1 + torch.exp(-inner))
        return inner @ w2.double().T + b2.double()

    return _each_block(x, l, d, phi)


def visible_count(t: int, l: int, d: int) -> int:
    """How many compressed blocks end at or before token t."""
    count = 0
    while count * d + l - 1 <= t:
        count += 1
    return count


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """One query head: q [Dk], keys [n, Dk], values [n, Dv] -> out [Dv], lse, probabilities [n].

    No key at all gives out 0 and lse -inf.
    """
    if keys.shape[0] == 0:
        zero = torch.zeros(values.shape[-1], dtype=torch.float64, device=q.device)
        empty = torch.zeros(0, dtype=torch.float64, device=q.device)
        return zero, torch.tensor(-math.inf, dtype=torch.float64, device=q.device), empty
    scores = (keys.double() @ q.double()) * scale
    top = scores.max().detach()
    weights = torch.exp(scores - top)
    total = weights.sum()
    p = weights / total
    return p @ values.double(), top + torch.log(total), p


def _scale(q: Tensor, softmax_scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale


def _attention(
    q: Tensor, k: Tensor, v: Tensor, keys_of, softmax_scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attention where keys_of(b, s, g) lists the key indices that row may see: out, lse."""
    B, S, HQ, _ = q.shape
    h = HQ // k.shape[2]
    scale = _scale(q, softmax_scale)
    out, lse = [], []
    for b in range(B):
        for s in range(S):
            for j in range(HQ):
                g = j // h
                at = torch.tensor(list(keys_of(b, s, g)), dtype=torch.long, device=q.device)
                o, e, _ = attend(q[b, s, j], k[b, at, g], v[b, at, g], scale)
                out.append(o)
                lse.append(e)
    if not out:
        shape = (B, S, HQ)
        empty = torch.zeros(shape, dtype=torch.float64, device=q.device)
        return empty[..., None].expand(*shape, v.shape[-1]).clone(), empty
    return torch.stack(out).reshape(B, S, HQ, -1), torch.stack(lse).reshape(B, S, HQ)


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *, l: int, d: int, softmax_scale: float | None = None,
    q_start: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax over the compressed keys visible to query q_start + s: out [B, S, HQ, Dv], lse."""
    keys_of = lambda b, s, g: range(min(visible_count(q_start + s, l, d), k_cmp.shape[1]))
    return _attention(q, k_cmp, v_cmp, keys_of, softmax_scale)


def sliding_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, softmax_scale: float | None = None,
    q_start: int = 0,
) -> Tensor:  # fmt: skip
    """Softmax over keys max(0, t + 1 - window) .. t of query t = q_start + s."""
    keys_of = lambda b, s, g: range(max(0, q_start + s + 1 - window), q_start + s + 1)
    return _attention(q, k, v, keys_of, softmax_scale)[0]


def range_tokens(ranges: Tensor, n_keys: int) -> list[int]:
    """Ascending keys in the union of [start, end) rows; bad rows are cut to [0, n_keys)."""
    tokens: set[int] = set()
    for start, end in ranges.tolist():
        tokens |= set(range(max(0, start), min(end, n_keys)))
    return sorted(tokens)


def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, *, softmax_scale: float | None = None
) -> Tensor:
    """Softmax over exactly the tokens in the union of ranges [B, S, G, n, 2]."""
    keys_of = lambda b, s, g: range_tokens(ranges[b, s, g], k.shape[1])
    return _attention(q, k, v, keys_of, softmax_scale)[0]


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None, q_start: int = 0
) -> Tensor:
    """Full causal attention: every key at or before the query."""
    return _attention(q, k, v, lambda b, s, g: range(q_start + s + 1), softmax_scale)[0]


def block_scores(p_cmp: list[float], l: int, d: int, l_sel: int, n_blocks: int) -> list[float]:
    """Eq. 9: each compressed block gives its probability to selection blocks, token by token."""
    token = torch.arange(len(p_cmp))[:, None] * d + torch.arange(l)
    given = torch.tensor(p_cmp, dtype=torch.float64)[:, None].expand(-1, l) / l
    scores = torch.zeros(n_blocks + len(p_cmp) * d + l, dtype=torch.float64)  # also later blocks
    return scores.index_add_(0, (token // l_sel).flatten(), given.flatten())[:n_blocks].tolist()


def group_block_scores(
    q: Tensor, k_cmp: Tensor, *, l: int, d: int, l_sel: int, softmax_scale: float | None = None,
    q_start: int = 0,
) -> Tensor:  # fmt: skip
    """Eq. 10: block scores summed over the heads of a group. [B, S, G, n_blocks], no gradient."""
    B, S, HQ, _ = q.shape
    G = k_cmp.shape[2]
    h = HQ // G
    n_blocks = (q_start + S + l_sel - 1) // l_sel
    result = torch.zeros(B, S, G, n_blocks, dtype=torch.float64)
    for b in range(B):
        for s in range(S):
            n = min(visible_count(q_start + s, l, d), k_cmp.shape[1])
            for j in range(HQ):
                keys = k_cmp[b, :n, j // h].detach()
                _, _, p = attend(q[b, s, j].detach(), keys, keys, _scale(q, softmax_scale))
                scores = block_scores(p.tolist(), l, d, l_sel, n_blocks)
                result[b, s, j // h] += torch.tensor(scores, dtype=torch.float64)
    return result


def forced_blocks(t: int, l_sel: int, n_sel: int, n_init: int, n_local: int) -> list[int]:
    """Blocks always chosen, most important first: own, the ones before it, the initial ones."""
    own = t // l_sel
    order = [own - i for i in range(n_local)] + list(range(n_init))
    forced: list[int] = [own]
    for block in order:
        if 0 <= block <= own and block not in forced:
            forced.append(block)
    return forced[:n_sel]


def top_blocks(
    scores: list[float], t: int, l_sel: int, n_sel: int, n_init: int = 1, n_local: int = 2
) -> list[int]:
    """Eq. 11 and 12: ascending blocks of query t, the forced ones, then the best that start at or
    before t."""
    chosen = forced_blocks(t, l_sel, n_sel, n_init, n_local)
    while len(chosen) < n_sel:
        best = None
        for j in range(t // l_sel + 1):
            if j not in chosen and (best is None or scores[j] > scores[best]):
                best = j  # strictly greater: a tie stays with the lower index
        if best is None:
            break
        chosen.append(best)
    return sorted(chosen)


def select_blocks(
    q: Tensor, k_cmp: Tensor, *, l: int, d: int, l_sel: int, n_sel: int, n_init: int = 1,
    n_local: int = 2, softmax_scale: float | None = None, q_start: int = 0,
) -> Tensor:  # fmt: skip
    """Block indices int32 [B, S, G, n_sel], ascending, padded with -1 at the end."""
    scores = group_block_scores(
        q, k_cmp, l=l, d=d, l_sel=l_sel, softmax_scale=softmax_scale, q_start=q_start
    )
    B, S, G, _ = scores.shape
    result = torch.full((B, S, G, n_sel), -1, dtype=torch.int32)
    for b in range(B):
        for s in range(S):
            for g in range(G):
                row = top_blocks(
                    scores[b, s, g].tolist(), q_start + s, l_sel, n_sel, n_init, n_local
                )
                result[b, s, g, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return result


def blocks_to_ranges(block_indices: Tensor, l_sel: int, q_start: int = 0) -> Tensor:
    """Block indices [B, S, G, n] -> ranges [B, S, G, n, 2]: cut at t, merged, (0, 0) padded."""
    B, S, G, n = block_indices.shape
    result = torch.zeros(B, S, G, n, 2, dtype=torch.int32)
    for b in range(B):
        for s in range(S):
            for g in range(G):
                tokens: set[int] = set()
                for block in block_indices[b, s, g].tolist():
                    if block >= 0:
                        tokens |= set(range(block * l_sel, (block + 1) * l_sel))
                tokens = {i for i in tokens if i <= q_start + s}
                spans: list[list[int]] = []
                for token in sorted(tokens):
                    if spans and spans[-1][1] == token:
                        spans[-1][1] = token + 1
                    else:
                        spans.append([token, token + 1])
                for i, span in enumerate(spans):
                    result[b, s, g, i] = torch.tensor(span, dtype=torch.int32)
    return result


def rotary(x: Tensor, base: float, start: int = 0) -> Tensor:
    """Rotate the pair (x[i], x[i + D/2]) of every head of token s by (start + s) * base^(-2i/D)."""
    x = x.double()
    D = x.shape[-1]
    rows = []
    for s in range(x.shape[1]):
        first, second = [], []
        for i in range(D // 2):
            angle = (start + s) * base ** (-2 * i / D)
            a, b = x[:, s, :, i], x[:, s, :, i + D // 2]
            first.append(a * math.cos(angle) - b * math.sin(angle))
            second.append(b * math.cos(angle) + a * math.sin(angle))
        rows.append(torch.stack(first + second, dim=-1))
    return torch.stack(rows, dim=1)


def gated_sum(gates: Tensor, cmp: Tensor, sel: Tensor, win: Tensor) -> Tensor:
    """Eq. 5: branch outputs times their gates. gates [B, S, HQ, 3] in order (cmp, sel, win)."""
    gates = gates.double()
    return gates[..., 0:1] * cmp + gates[..., 1:2] * sel + gates[..., 2:3] * win


def nsa_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, k_sel: Tensor, v_sel: Tensor, k_win: Tensor,
    v_win: Tensor, gates: Tensor, *, l: int, d: int, l_sel: int, n_sel: int, n_init: int = 1,
    n_local: int = 2, window: int, softmax_scale: float | None = None, q_start: int = 0,
) -> Tensor:  # fmt: skip
    """The whole layer on compressed keys and gates: [B, S, HQ, Dv]."""
    scale = {"softmax_scale": softmax_scale}
    cmp, _ = compressed_attention(q, k_cmp, v_cmp, l=l, d=d, q_start=q_start, **scale)
    blocks = select_blocks(
        q, k_cmp, l=l, d=d, l_sel=l_sel, n_sel=n_sel, n_init=n_init, n_local=n_local,
        q_start=q_start, **scale,
    )  # fmt: skip
    sel = selection_attention(q, k_sel, v_sel, blocks_to_ranges(blocks, l_sel, q_start), **scale)
    win = sliding_attention(q, k_win, v_win, window=window, q_start=q_start, **scale)
    return gated_sum(gates, cmp, sel, win)
