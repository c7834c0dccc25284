"""The three branches in plain differentiable PyTorch, any float dtype: the ladder's last rung.

Scores, softmax and sums are in fp32 (fp64 for fp64 inputs). Queries go in chunks, recomputed in
backward, so memory does not grow with S * N.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa.blocks import chunks, is_symbol, visible_compressed
from nsa.checks import scale_of
from nsa.unseen import factor, finite, nan_if

_CHUNK_SCORES = 1 << 23  # scores of one chunk: 32 MiB in fp32


def _attend(
    q: Tensor, k: Tensor, v: Tensor, odd_k: Tensor, odd_v: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """q [B, s, G, h, Dk], finite k [B, N, G, Dk] and v [B, N, G, Dv], odd [B, N, G] where either
    was not, mask [B|1, s, G|1, N] of seen keys."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    scores = torch.einsum("bsghd,bngd->bsghn", q, k) * scale
    # Scores of such queries may be -inf for all keys, as those of unseen ones are.
    odd_q = nan_if(~q.isfinite().all(-1))
    of_keys = factor(mask, odd_k)[..., None] * odd_q  # the lse is the keys' alone
    of_both = factor(mask, odd_k | odd_v)[..., None, None] * odd_q[..., None]
    unseen = ~mask[:, :, :, None, :]
    # A finite fill keeps empty rows free of NaN; the second one makes them exactly 0.
    scores = scores.masked_fill(unseen, torch.finfo(wide).min)
    p = (torch.softmax(scores, dim=-1) * of_both.to(wide)).masked_fill(unseen, 0)
    out = torch.einsum("bsghn,bngd->bsghd", p, v)
    lse = torch.logsumexp(scores, dim=-1) * of_keys.to(wide)
    return out, lse.masked_fill(unseen.all(-1), -math.inf)


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, mask_of: Callable[[int, int], Tensor],
    softmax_scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over query chunks; mask_of(first, last) gives the mask of those queries."""
    B, S, HQ, Dk = q.shape
    N, G = k.shape[1], k.shape[2]
    scale, wide = scale_of(softmax_scale, Dk), torch.promote_types(q.dtype, torch.float32)
    if not is_symbol(S) and (N == 0 or S == 0):
        # Empty sums keep the result connected, with zero gradients, whatever is in the tensors.
        zero = q[:0].sum() + k[:0].sum() + v[:0].sum()
        out = q.new_zeros(B, S, HQ, v.shape[-1]) + zero.to(q.dtype)
        lse = torch.full((B, S, HQ), -math.inf, device=q.device, dtype=wide)
        return out, lse + zero.to(lse.dtype)
    grouped = q.view(B, S, G, HQ // G, Dk) if q.is_contiguous() else q.unflatten(2, (G, HQ // G))
    (k, odd_k), (v, odd_v) = finite(k), finite(v)
    outs, lses = [], []
    bounds = chunks(S, B * HQ * N, _CHUNK_SCORES)
    for first, last in bounds:
        mask = mask_of(first, last)
        args = (grouped[:, first:last], k, v, odd_k, odd_v, mask, scale)
        if len(bounds) > 1 and torch.is_grad_enabled():
            out, lse = checkpoint(_attend, *args, use_reentrant=False)
        else:
            out, lse = _attend(*args)
        outs.append(out)
        lses.append(lse)
    out = torch.cat(outs, 1).flatten(2, 3).to(q.dtype)
    return out, torch.cat(lses, 1).flatten(2, 3).to(wide)


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *, l: int, d: int, softmax_scale: float | None = None,
    q_start: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax over the compressed keys whose last token is at or before t = q_start + s (Eq. 8).

    q [B, S, HQ, Dk], k_cmp [B, Nc, G, Dk], v_cmp [B, Nc, G, Dv] -> out [B, S, HQ, Dv] and
    natural-log lse [B, S, HQ]; a query that sees no key gets 0 and -inf.
    """
    key = torch.arange(k_cmp.shape[1], device=q.device)

    def mask_of(first: int, last: int) -> Tensor:
        t = torch.arange(q_start + first, q_start + last, device=q.device)
        return (key[None, :] < visible_compressed(t, l, d)[:, None])[None, :, None, :]

    return _chunked(q, k_cmp, v_cmp, mask_of, softmax_scale)


def sliding_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, softmax_scale: float | None = None,
    q_start: int = 0,
) -> Tensor:  # fmt: skip
    """Softmax over keys max(0, t + 1 - window) .. t of query t = q_start + s. [B, S, HQ, Dv]."""
    key = torch.arange(k.shape[1], device=q.device)

    def mask_of(first: int, last: int) -> Tensor:
        t = torch.arange(q_start + first, q_start + last, device=q.device)[:, None]
        return ((key[None, :] <= t) & (key[None, :] > t - window))[None, :, None, :]

    return _chunked(q, k, v, mask_of, softmax_scale)[0]


def selection_attention(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, *, softmax_scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax over the union of ranges [B, S, G, n, 2] ([start, end), any overlap): [B, S, HQ, Dv].

    return_lse: also the natural-log lse [B, S, HQ]. An empty row gives 0 and -inf with zero
    gradients.
    """
    key = torch.arange(k.shape[1], device=q.device)

    def mask_of(first: int, last: int) -> Tensor:
        part = ranges[:, first:last]
        mask = torch.zeros(*part.shape[:3], k.shape[1], dtype=torch.bool, device=q.device)
        for span in part.unbind(3):
            mask = mask | (key >= span[..., :1]) & (key < span[..., 1:])
        return mask

    out, lse = _chunked(q, k, v, mask_of, softmax_scale)
    return (out, lse) if return_lse else out
