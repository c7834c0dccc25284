"""The branches on torch's scaled_dot_product_attention.

The heads of a group become query rows of one head, so that K and V are never copied per head and
every backend may run. Queries go in chunks: no S x S mask exists. Every row of a call sees at
least one key; rows that see none are left out and hold 0.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from nsa import launches, log
from nsa.blocks import num_compressed, visible_compressed
from nsa.checks import scale_of
from nsa.flags import Flags
from nsa.packing import length_buckets, slot_keys
from nsa.select import range_lengths
from nsa.unseen import bounded, factor, finite, nan_if

_CHUNK = 256  # least queries of one call
_CHUNK_ELEMENTS = 1 << 27  # gathered key or score elements of one call: 256 MiB in bf16
_CHUNK_ROWS = 1 << 15  # packed rows of one call; they are the grid's last dimension, at most 65535


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy of it: PyTorch's kernels read 16 bytes at a time wherever a tensor begins, and
    the misaligned address ends all CUDA work of the process."""
    misplaced = x.device.type == "cuda" and x.storage_offset() * x.element_size() % 16
    return x.clone() if misplaced else x


def _sdpa(name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if not torch.compiler.is_compiling():  # a compiled call has no one to count it
        launches.bump(name, library=True)
    return out


def _nothing(q: Tensor, k: Tensor, v: Tensor, rows: int) -> Tensor:
    """Output 0 for `rows` queries, connected to the inputs with zero gradients."""
    zero = q[:0].sum() + k[:0].sum() + v[:0].sum()
    return q.new_zeros(q.shape[0], rows, q.shape[2], v.shape[-1]) + zero


def _maybe_checkpoint(several: bool, run: Callable, *args: Tensor):
    """run(*args), recomputed in backward when it is one of several chunks."""
    if several and torch.is_grad_enabled():
        return checkpoint(run, *args, use_reentrant=False)
    return run(*args)


def _rows_of_heads(q: Tensor, G: int) -> Tensor:
    """[B, s, G*h, D] -> [B, G, h*s, D]: the heads of a group as rows of one head."""
    B, s, HQ, D = q.shape
    return q.view(B, s, G, HQ // G, D).permute(0, 2, 3, 1, 4).reshape(B, G, HQ // G * s, D)


def _heads_of_rows(x: Tensor, s: int) -> Tensor:
    """[B, G, h*s, ...] -> [B, s, G*h, ...]: the inverse of _rows_of_heads."""
    x = x.unflatten(2, (-1, s))
    return x.movedim(3, 1).flatten(2, 3)


# ---- selected ------------------------------------------------------------------------------------


def selection_sdpa(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor, softmax_scale: float | None = None,
    flags: Flags | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax over each row's ranges (Eq. 11 and 12), K and V packed row by row.

    q [B, S, HQ, Dk], k [B, Skv, G, Dk], v [B, Skv, G, Dv], clean ranges [B, S, G, n, 2] as
    select.clean_ranges leaves them -> [B, S, HQ, Dv]. Rows of like length (next power of two) share
    one call, split where the gathered keys would pass 2^27 elements; which keys a row holds is
    worked out in its call. Differentiable; a row without keys gives 0. Waits for the device to
    learn the lengths. flags: whether packing is timed. return_lse: also the natural-log lse
    [B, S, HQ] (fp32, or fp64 for fp64), -inf for a row without keys; the scores are computed a
    second time for it, since SDPA does not return its own.
    """
    B, S, HQ, Dk = q.shape
    G = k.shape[2]
    h, scale, flags = HQ // G, scale_of(softmax_scale, q.shape[-1]), flags or Flags()
    spans = ranges.flatten(0, 2)
    lengths = range_lengths(spans)
    rows_q = q.reshape(B * S * G, 1, h, Dk)
    width = max(Dk, v.shape[-1], h)

    def attend(
        qs: Tensor, k: Tensor, v: Tensor, rows: Tensor, longest: int, padded: bool
    ) -> tuple[Tensor, Tensor | None]:
        count = lengths[rows, None]
        slot = torch.arange(longest, device=q.device)[None]
        # A slot past the end repeats the row's own last key: masked, and no stranger's NaN.
        at = slot_keys(spans[rows], torch.minimum(slot, count - 1).to(torch.int32))
        b, g = rows[:, None] // (S * G), rows[:, None] % G
        odd_q = nan_if(~qs.isfinite().all(-1))  # or scores of -inf alone would pass for no keys
        mask = (slot < count)[:, None, None].expand(-1, 1, h, -1) if padded else None
        with log.timed("sel.sdpa.pack", k, flags, rows=len(rows), longest=longest):
            keys, values = k[b, at, g][:, None], v[b, at, g][:, None]
        out = _sdpa("sdpa_selection", qs, keys, values, mask, scale) * odd_q[..., None].to(q.dtype)
        if odd is not None:
            out = out * nan_if(odd[b, at, g].any(1))[:, None, None, None].to(q.dtype)
        if not return_lse:
            return out, None
        keys, odd_keys = finite(keys)
        lse = _score_lse(mask, scale, qs, keys)
        return out, lse * (odd_q * nan_if(odd_keys.any(-1, keepdim=True))).to(lse.dtype)

    odd = None
    if q.device.type == "cpu":  # where PyTorch takes a row of NaN scores for one without keys
        odd = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    wide = torch.promote_types(q.dtype, torch.float32)
    outs, lses, order = [], [], []
    for bucket, members in length_buckets(lengths).items():
        if bucket == 0:
            outs.append(q.new_zeros(len(members), 1, h, v.shape[-1]))
            lses.append(q.new_full((len(members), 1, h), -math.inf, dtype=wide))
            order.append(members)
            continue
        # Rows of one exact length need neither mask nor padding.
        sizes = lengths[members]
        low, high = (int(x) for x in torch.stack([sizes.min(), sizes.max()]).tolist())
        step = min(_CHUNK_ROWS, max(1, _CHUNK_ELEMENTS // (high * width)))
        run = functools.partial(attend, longest=high, padded=low != high)
        for rows in members.split(step):
            several = len(members) > step
            out, lse = _maybe_checkpoint(several, run, rows_q[rows], k, v, rows)
            outs.append(out)
            lses.append(lse)
            order.append(rows)
    if not any(o.requires_grad for o in outs):  # nothing but empty rows, or no gradient wanted
        nothing = _nothing(q, k, v, 0).reshape(0, 1, h, v.shape[-1])
        outs.append(nothing)
        lses.append(nothing[..., 0].to(wide))
        order.append(lengths[:0])
    back = torch.argsort(torch.cat(order))
    out = torch.cat(outs)[back].reshape(B, S, HQ, v.shape[-1])
    return (out, torch.cat(lses)[back].reshape(B, S, HQ)) if return_lse else out


def _score_lse(mask: Tensor | None, scale: float, q: Tensor, k: Tensor) -> Tensor:
    """Log-sum-exp of the scores of q [.., s, D] and k [.., n, D], over the keys that the mask has;
    at least in fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.mT.to(wide) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return torch.logsumexp(scores, -1)


# ---- sliding and compressed ----------------------------------------------------------------------


def sliding_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, softmax_scale: float | None = None,
    q_start: int = 0,
) -> Tensor:  # fmt: skip
    """Softmax over keys max(0, t + 1 - window) .. t of query t = q_start + s.

    q [B, S, HQ, Dk], k [B, N, G, Dk], v [B, N, G, Dv] -> [B, S, HQ, Dv]. A chunk of queries reads
    its band of keys only: time and memory are O(S * (window + chunk)). Differentiable.
    """
    S, scale = q.shape[1], scale_of(softmax_scale, q.shape[-1])
    step = min(max(_CHUNK, window), 4 * _CHUNK)
    outs = [_nothing(q, k, v, 0)]
    for first in range(0, S, step):
        last = min(S, first + step)
        low, high = max(0, q_start + first + 1 - window), q_start + last
        mask = None
        if last - first > 1:
            t = torch.arange(q_start + first, high, device=q.device)[:, None]
            key = torch.arange(low, high, device=q.device)
            mask = (key <= t) & (key > t - window)
        run = functools.partial(_masked, "sdpa_sliding", mask, scale)
        args = (q[:, first:last], k[:, low:high], v[:, low:high])
        outs.append(_maybe_checkpoint(S > step, run, *args))
    return torch.cat(outs, 1)


def compressed_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, l: int, d: int, softmax_scale: float | None = None,
    q_start: int = 0, need_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Softmax over the compressed keys j with j*d + l - 1 <= t = q_start + s (Eq. 8).

    q [B, S, HQ, Dk], k [B, Nc, G, Dk], v [B, Nc, G, Dv] -> out [B, S, HQ, Dv] and natural-log lse
    [B, S, HQ] (fp32, or fp64 for fp64), both differentiable. A query that sees no key has 0 and
    -inf. SDPA does not return its lse, so the scores are computed a second time for it;
    need_lse=False saves that and returns None.
    """
    B, S, HQ, _ = q.shape
    scale = scale_of(softmax_scale, q.shape[-1])
    seen = lambda s: min(num_compressed(q_start + s, l, d), k.shape[1])  # by queries before s
    blind = S if seen(S) == 0 else max(0, min(S, l - 1 - q_start))  # queries that see no key
    outs = [_nothing(q, k, v, blind)]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lses = [torch.full((B, blind, HQ), -math.inf, dtype=wide, device=q.device)]
    step = min(max(16, _CHUNK_ELEMENTS // max(1, B * HQ * seen(S))), 4 * _CHUNK)
    for first in range(blind, S, step):
        last = min(S, first + step)
        n = seen(last)
        mask = None
        if seen(first + 1) < n:
            t = torch.arange(q_start + first, q_start + last, device=q.device)[:, None]
            mask = torch.arange(n, device=q.device) < visible_compressed(t, l, d)
        args = (q[:, first:last], k[:, :n], v[:, :n])
        several = S - blind > step
        run = functools.partial(_masked, "sdpa_compressed", mask, scale)
        outs.append(_maybe_checkpoint(several, run, *args))
        if need_lse:
            run = functools.partial(_lse, mask, scale)
            lses.append(_maybe_checkpoint(several, run, *args[:2]))
    return torch.cat(outs, 1), torch.cat(lses, 1) if need_lse else None


def _masked(
    name: str, mask: Tensor | None, scale: float, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Attention of one chunk under mask [s, n]; q [B, s, HQ, Dk] -> [B, s, HQ, Dv]."""
    s, G, rows = q.shape[1], k.shape[2], None
    if mask is None and q.device.type == "cpu":  # where a row of NaN scores passes for an empty one
        mask = torch.ones(s, k.shape[1], dtype=torch.bool, device=q.device)
    if mask is not None:
        (k, odd_k), (v, odd_v) = finite(k), finite(v)
        q, k = bounded(q, k, scale)
        rows = mask.repeat(q.shape[2] // G, 1)
    with masking(mask, q.device.type):
        out = _sdpa(name, _rows_of_heads(q, G), k.transpose(1, 2), v.transpose(1, 2), rows, scale)
    out = _heads_of_rows(out, s)
    return out if mask is None else out * _of_heads(mask, odd_k | odd_v, q)[..., None]


def masking(mask: Tensor | None, device: str) -> contextlib.AbstractContextManager:
    """Without cuDNN, which adds a large number for a masked key, and not infinity: a key of 1e10
    that a query does not see would take all of its weight."""
    if mask is None or device != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


def _of_heads(mask: Tensor, odd: Tensor, q: Tensor) -> Tensor:
    """unseen.factor of mask [s, n] for the heads of q, [B, s, HQ] in q's dtype."""
    seen = factor(mask[None, :, None], odd).to(q.dtype)
    return seen.repeat_interleave(q.shape[2] // odd.shape[2], 2)


def _lse(mask: Tensor | None, scale: float, q: Tensor, k: Tensor) -> Tensor:
    """Log-sum-exp of the scores of one chunk, [B, s, HQ]."""
    s, G, seen = q.shape[1], k.shape[2], None
    if mask is not None:
        k, odd = finite(k)
        seen = mask.repeat(q.shape[2] // G, 1)
    lse = _heads_of_rows(_score_lse(seen, scale, _rows_of_heads(q, G), k.transpose(1, 2)), s)
    return lse if mask is None else lse * _of_heads(mask, odd, q)
