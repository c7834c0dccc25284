"""What is right for a case of the fuzzer, in fp64, and how a result is held against it.

What is right comes from dense masks and plain sums, with nothing of the package in them; which of
PyTorch's backends may take a mask comes from it. A number may be off by twice as much as PyTorch's
attention in the same dtype, and by the rounding that the sums it is made of come with.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.kernels.sdpa import masking
from scripts.fuzz.cases import Case

# fp32 probabilities below 2**-126 are 0: divided by bf16's rounding, which multiplies all sizes.
FLUSHED = 2.0**-119


class Wrong(AssertionError):
    """A result that is not right."""


def seen_keys(case: Case, kind: str, one: dict[str, Tensor]) -> Tensor:
    """Return which keys of a kind each query of one sequence sees by definition: [S, G, N]."""
    g, device, start = case.geometry, one["q"].device, case.first
    S, N = one["q"].shape[0], one[f"k_{kind}"].shape[0]
    t = torch.arange(start, start + S, device=device)[:, None, None]
    key = torch.arange(N, device=device)
    if kind == "cmp":
        seen = key * g.d + g.l - 1 <= t
    elif kind == "win":
        if case.operation == "attention":  # whose last key is the last query's
            key = key + start + S - N
        seen = (key <= t) & (key > t - g.w)
    elif "ranges" in one:
        span = one["ranges"][..., None, :]  # [S, G, n, 1, 2]
        seen = ((key >= span[..., 0]) & (key < span[..., 1])).any(-2)
    else:
        block = key // g.l_sel
        seen = (one["blocks"][..., None] == block).any(-2) & (key <= t)
    return seen.expand(S, g.G, N)


@dataclass
class Part:
    """Attention of one branch over one sequence in fp64.

    right, sizes: out and the gradients of q, k and v, and the sums of the magnitudes of what they
    are sums of: rounding is in proportion to these. logits [S, HQ]: the same of a row's scores, the
    largest. lse [S, HQ].
    """

    right: dict[str, Tensor]
    sizes: dict[str, Tensor]
    logits: Tensor
    lse: Tensor


def _products(
    p: Tensor, ds: Tensor, q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float
) -> dict[str, Tensor]:
    return {
        "out": torch.einsum("sghn,ngd->sghd", p, v).flatten(1, 2),
        "q": torch.einsum("sghn,ngd->sghd", ds, k).flatten(1, 2) * scale,
        "k": torch.einsum("sghn,sghd->ngd", ds, q) * scale,
        "v": torch.einsum("sghn,sghd->ngd", p, do),
    }


def probabilities(
    q: Tensor, k: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return p [S, G, h, N], lse, and the largest sum of magnitudes of a row's scores [S, G, h],
    of q [S, G, h, Dk] and k [N, G, Dk] in fp64."""
    unseen = ~seen[:, :, None]
    scores = torch.einsum("sghd,ngd->sghn", q, k) * scale
    lse = torch.logsumexp(scores.masked_fill(unseen, -math.inf), -1)
    p = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None]).masked_fill(unseen, 0)
    sizes = (torch.einsum("sghd,ngd->sghn", q.abs(), k.abs()) * scale).masked_fill(unseen, 0)
    return p, lse, F.pad(sizes, (0, 1)).amax(-1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, do: Tensor, least: float = 0.0
) -> Part:
    """Compute attention of q [S, HQ, Dk], k [N, G, Dk], v [N, G, Dv], seen [S, G, N] and the
    gradients of do [S, HQ, Dv]. least: what a probability, or its gradient, loses when the dtype
    has no smaller numbers."""
    q, k, v, do = (x.double() for x in (q, k, v, do))
    q, do = (x.unflatten(1, (k.shape[1], -1)) for x in (q, do))
    p, lse, logits = probabilities(q, k, seen, scale)
    dp = torch.einsum("sghd,ngd->sghn", do, v)
    right = _products(p, p * (dp - (p * dp).sum(-1, keepdim=True)), q, k, v, do, scale)
    q, k, v, do = (x.abs() for x in (q, k, v, do))
    dp = torch.einsum("sghd,ngd->sghn", do, v)
    ds = (p + FLUSHED) * (dp + (p * dp).sum(-1, keepdim=True))
    p, ds = ((x + least).masked_fill(~seen[:, :, None], 0) for x in (p, ds))
    sizes = _products(p, ds, q, k, v, do, scale)
    return Part(right, sizes, logits.flatten(1, 2), lse.flatten(1, 2))


def attend_in_dtype(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Compute PyTorch's attention in the tensors' own dtype."""
    h = q.shape[1] // k.shape[1]
    mask = seen.transpose(0, 1).repeat_interleave(h, 0)
    none = ~mask.any(-1, keepdim=True)
    if not k.shape[0]:
        return q.new_zeros(*q.shape[:2], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
    of = lambda x, h: x.transpose(0, 1).repeat_interleave(h, 0)[None]
    with masking(mask, q.device.type):
        out = F.scaled_dot_product_attention(
            of(q, 1), of(k, h), of(v, h), attn_mask=(mask | none)[None], scale=scale
        )
    return out[0].masked_fill(none, 0).transpose(0, 1)


def judge(
    name: str, got: Tensor, right: Tensor, theirs: Tensor, sizes: Tensor, logits: Tensor,
    counted: Tensor, info: torch.finfo, score_eps: float,
) -> float:  # fmt: skip
    """Raise Wrong unless each counted row [.., D] of got is as near to right as it may be; return
    the largest share of what it may be off. info: of the dtype that the call computes in.
    score_eps: rounding of the scores' sums."""
    if got.shape != right.shape:
        raise Wrong(f"{name}: shape {list(got.shape)} must be {list(right.shape)}")
    if not counted.any():
        return 0.0
    rounding = (2 * info.eps + logits.to(got.device) * score_eps).clamp(max=1.0)
    # Beyond what the dtype holds, rounding included, and where terms of PyTorch's sums are,
    # infinity is right.
    reach = right.abs() + rounding[..., None] * sizes
    held = (reach < info.max * 0.9) & theirs.isfinite() & counted[..., None]
    bad = ~got.isfinite() & held
    if bad.any():
        at = bad.nonzero()[0].tolist()
        raise Wrong(f"{name}: {got[tuple(at)].item()} at {at}, right is {right[tuple(at)]:.4g}")
    row = lambda x: x.where(held, 0).square().sum(-1).sqrt()
    error, its = row((got.double() - right).abs()), row((theirs.double() - right).abs())
    tiny = info.smallest_normal * math.sqrt(got.shape[-1])
    limit = 2 * its + rounding * row(sizes) + tiny
    share = error / limit
    worst = int(share.argmax())
    if share.max() > 1:
        at = [int(i) for i in torch.unravel_index(torch.tensor(worst), share.shape)]
        raise Wrong(
            f"{name}: row {at} of size {row(right).flatten()[worst]:.4g} is off by "
            f"{error.flatten()[worst]:.4g}, PyTorch's by {its.flatten()[worst]:.4g}; "
            f"{limit.flatten()[worst]:.4g} would be right"
        )
    norm = row(right)[counted]
    some = norm > 1e-3 * norm.median()
    # The means of fewer numbers are up to chance. On a CPU PyTorch's backward keeps in fp32 what
    # every kernel on a GPU, its own as well, rounds for products.
    fair = got.device.type == "cuda" or "gradient" not in name
    if fair and int(some.sum()) * got.shape[-1] >= 4096:
        ours, other, most = ((x[counted][some] / norm[some]).clamp(max=1.0).mean().item()
                             for x in (error, its, rounding * row(sizes)))  # fmt: skip
        limit = 2 * other + info.eps + most / 8  # rounding to and fro
        if ours > limit:
            raise Wrong(
                f"{name}: the mean error of rows is {ours:.4g}, PyTorch's {other:.4g}; {limit:.4g} "
                "would be right"
            )
    return share.max().item()


def judge_choice(case: Case, name: str, one: dict, chosen: Tensor, free: Tensor) -> None:
    """Raise Wrong unless the blocks [S, G, n] of a sequence's queries are the forced ones and the
    best by their scores in fp64, but for ties and rounding. free [S, G]: rows whose scores are not
    numbers."""
    g, (S, G, _) = case.geometry, chosen.shape
    if not S:
        return
    own = torch.arange(case.first, case.first + S, device=chosen.device)[:, None] // g.l_sel
    blocks = int(own.max()) + 1
    count = (chosen >= 0).sum(-1)
    whole = (count == (own + 1).clamp(max=g.n_sel)) & (chosen.amax(-1) <= own)
    whole &= ((chosen[..., 1:] > chosen[..., :-1]) | (chosen[..., 1:] == -1)).all(-1)
    if not whole.all():
        s, group = (~whole).nonzero()[0].tolist()
        raise Wrong(f"{name}: query {s} of group {group} has {chosen[s, group].tolist()}")
    picked = torch.zeros(S, G, blocks + 1, dtype=torch.bool, device=chosen.device)
    picked.scatter_(-1, torch.where(chosen < 0, blocks, chosen).long(), True)
    picked, block = picked[..., :-1], torch.arange(blocks, device=chosen.device)
    forced = (((block < g.n_init) | (own - block < g.n_local)) & (block <= own))[:, None]
    if (forced & ~picked).any():
        at = (forced & ~picked).nonzero()[0].tolist()
        raise Wrong(f"{name}: (query, group, block) {at} must be among the chosen")
    k, seen = one["k_cmp"], seen_keys(case, "cmp", one)
    scale = 1 / math.sqrt(g.Dk) if case.scale is None else case.scale
    p, _, logits = probabilities(one["q"].double().unflatten(1, (G, -1)), k.double(), seen, scale)
    first = torch.arange(k.shape[0], device=k.device)[:, None] * g.d
    shared = torch.minimum(first + g.l, (block + 1) * g.l_sel) - torch.maximum(
        first, block * g.l_sel)  # fmt: skip
    scores = p.sum(2) @ (shared.clamp(min=0).double() / g.l)
    among = (block <= own)[:, None] & ~forced
    last = scores.masked_fill(~(picked & among), math.inf).amin(-1)
    best = scores.masked_fill(picked | ~among, -math.inf).amax(-1)
    # Kernels pool probabilities in fp16.
    slack = best.abs() * (2.0**-9 + 2.0**-20 * logits.amax(-1)) + 1e-7
    worse = (best - last > slack) & ~free
    if worse.any():
        s, group = worse.nonzero()[0].tolist()
        raise Wrong(
            f"{name}: query {s} of group {group} has a block of score {last[s, group]:.6g} in "
            f"place of one of {best[s, group]:.6g}"
        )
