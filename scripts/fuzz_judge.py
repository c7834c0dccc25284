"""What is right for a case of the fuzzer, in fp64, and how a result is held against it.

What is right comes from dense masks and plain sums, with nothing of the package in them. A number
may be off by twice as much as PyTorch's attention in the same dtype, and by the rounding that the
sums it is made of come with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.attention import nsa_decode
from nsa.cache import BranchKV, NSACache
from nsa.compress import mean_pool
from nsa.config import NSAConfig
from nsa.tests.helpers import deterministic
from scripts.fuzz_cases import DTYPES, FLAGS, KEYS, Case, Inputs, call, laid_out, num_blocks


class Wrong(AssertionError):
    """A result that is not right."""


# ---- what is right -------------------------------------------------------------------------------


def seen_keys(case: Case, kind: str, S: int, N: int, start: int, one: dict[str, Tensor]) -> Tensor:
    """Which of N keys each of S queries from position `start` on sees, by definition: [S, G, N]."""
    g, device = case.geometry, one["q"].device
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


def attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, do: Tensor, least: float = 0.0
) -> Part:
    """q [S, HQ, Dk], k [N, G, Dk], v [N, G, Dv], seen [S, G, N], do [S, HQ, Dv]. least: what a
    probability, or its gradient, loses when the dtype has no smaller numbers."""
    q, k, v, do = (x.double() for x in (q, k, v, do))
    q, do = (x.unflatten(1, (k.shape[1], -1)) for x in (q, do))
    unseen = ~seen[:, :, None]
    scores = torch.einsum("sghd,ngd->sghn", q, k) * scale
    lse = torch.logsumexp(scores.masked_fill(unseen, -math.inf), -1)
    p = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None]).masked_fill(unseen, 0)
    dp = torch.einsum("sghd,ngd->sghn", do, v)
    right = _products(p, p * (dp - (p * dp).sum(-1, keepdim=True)), q, k, v, do, scale)
    q, k, v, do = (x.abs() for x in (q, k, v, do))
    logits = (torch.einsum("sghd,ngd->sghn", q, k) * scale).masked_fill(unseen, 0)
    logits = F.pad(logits, (0, 1)).amax(-1)
    dp = torch.einsum("sghd,ngd->sghn", do, v)
    ds = p * (dp + (p * dp).sum(-1, keepdim=True))
    p, ds = ((x + least).masked_fill(unseen, 0) for x in (p, ds))
    sizes = _products(p, ds, q, k, v, do, scale)
    return Part(right, sizes, logits.flatten(1, 2), lse.flatten(1, 2))


def attend_in_dtype(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """PyTorch's attention in the tensors' own dtype."""
    h = q.shape[1] // k.shape[1]
    mask = seen.transpose(0, 1).repeat_interleave(h, 0)
    none = ~mask.any(-1, keepdim=True)
    if not k.shape[0]:
        return q.new_zeros(*q.shape[:2], v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
    of = lambda x, h: x.transpose(0, 1).repeat_interleave(h, 0)[None]
    out = F.scaled_dot_product_attention(
        of(q, 1), of(k, h), of(v, h), attn_mask=(mask | none)[None], scale=scale
    )
    return out[0].masked_fill(none, 0).transpose(0, 1)


# ---- the judgement -------------------------------------------------------------------------------


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
    # Beyond what the dtype holds, and where terms of PyTorch's sums are, infinity is right.
    held = (right.abs() < info.max * 0.9) & theirs.isfinite() & counted[..., None]
    bad = ~got.isfinite() & held
    if bad.any():
        at = bad.nonzero()[0].tolist()
        raise Wrong(f"{name}: {got[tuple(at)].item()} at {at}, right is {right[tuple(at)]:.4g}")
    row = lambda x: x.where(held, 0).square().sum(-1).sqrt()
    error, its = row((got.double() - right).abs()), row((theirs.double() - right).abs())
    rounding = (2 * info.eps + logits.to(got.device) * score_eps).clamp(max=1.0)
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


def judge_choice(
    case: Case, name: str, start: int, one: dict[str, Tensor], chosen: Tensor, free: Tensor
) -> None:
    """Raise Wrong unless the blocks [S, G, n] of queries from `start` on are the forced ones and
    the best by their scores in fp64, but for ties and rounding. free [S, G]: rows whose scores are
    not numbers."""
    g, (S, G, _) = case.geometry, chosen.shape
    if not S:
        return
    own = torch.arange(start, start + S, device=chosen.device)[:, None] // g.l_sel
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
    k = one["k_cmp"]
    seen = seen_keys(case, "cmp", S, k.shape[0], start, one)
    scale = 1 / math.sqrt(g.Dk) if case.scale is None else case.scale
    part = attend(one["q"], k, k, seen, scale, one["q"])
    q = one["q"].double().unflatten(1, (G, -1))
    s = torch.einsum("sghd,ngd->sghn", q, k.double()) * scale
    lse = part.lse.unflatten(1, (G, -1)).nan_to_num(neginf=0.0)[..., None]
    p = torch.exp(s - lse).masked_fill(~seen[:, :, None], 0).sum(2)
    first = torch.arange(k.shape[0], device=k.device)[:, None] * g.d
    shared = torch.minimum(first + g.l, (block + 1) * g.l_sel) - torch.maximum(
        first, block * g.l_sel)  # fmt: skip
    scores = p @ (shared.clamp(min=0).double() / g.l)
    among = (block <= own)[:, None] & ~forced
    last = scores.masked_fill(~(picked & among), math.inf).amin(-1)
    best = scores.masked_fill(picked | ~among, -math.inf).amax(-1)
    # Kernels pool probabilities in fp16.
    logits = part.logits.unflatten(1, (G, -1)).amax(-1)
    slack = best.abs() * (2.0**-9 + 2.0**-20 * logits) + 1e-7
    worse = (best - last > slack) & ~free
    if worse.any():
        s, group = worse.nonzero()[0].tolist()
        raise Wrong(
            f"{name}: query {s} of group {group} has a block of score {last[s, group]:.6g} in "
            f"place of one of {best[s, group]:.6g}"
        )


# ---- a case --------------------------------------------------------------------------------------


class Expected:
    """Sums over sequences and branches: what is right for the whole tensors of a call."""

    def __init__(self, case: Case, inputs: Inputs, do: Tensor, blocks: Tensor | None) -> None:
        self.case, g = case, case.geometry
        eps = torch.finfo(do.dtype).eps
        least = 2.0**-24 / eps if do.dtype == torch.float16 else 0.0
        self.scale = 1 / math.sqrt(g.Dk) if case.scale is None else case.scale
        leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.clean.items()}
        zeros = lambda x: torch.zeros_like(x, dtype=torch.float64)
        self.right = {n: zeros(x) for n, x in leaves.items()} | {"out": zeros(do)}
        self.sizes = {n: x.clone() for n, x in self.right.items()}
        self.logits = zeros(do[..., 0])
        self.lse = torch.full_like(self.logits, -math.inf)
        self.hit = torch.zeros_like(self.logits, dtype=torch.bool)  # rows that see the odd value
        self.hit_by_key = torch.zeros_like(self.hit)
        theirs = torch.zeros_like(do)
        more = {"do": do, "theirs": theirs, "logits": self.logits, "lse": self.lse,
                "hit": self.hit, "hit_by_key": self.hit_by_key, **inputs.chosen()}  # fmt: skip
        if blocks is not None:
            more["blocks"] = blocks
        odd = {} if case.odd is None else {case.odd[0]: inputs.odd_rows()}
        for (_, one), (_, own), (_, right), (_, sizes), (_, rows), (_, at) in zip(
            *(inputs.each(x) for x in (inputs.clean, leaves, self.right, self.sizes, more, odd)),
            strict=True,
        ):
            self._sequence({**one, **rows}, own, right, sizes, at, least)
        self.theirs = {"out": theirs.detach()}
        if case.grad:
            given = torch.autograd.grad(theirs, list(leaves.values()), do, allow_unused=True)
            self.theirs |= {
                n: torch.zeros_like(x) if d is None else d
                for (n, x), d in zip(leaves.items(), given, strict=True)
            }

    def _sequence(
        self, one: dict, own: dict, right: dict, sizes: dict, odd: dict, least: float
    ) -> None:
        """One sequence's rows of everything, in place. own: the tensors that PyTorch's attention
        in their dtype takes. odd: which rows of the odd tensor hold the odd value."""
        case, g = self.case, self.case.geometry
        S, start = one["q"].shape[0], 0 if case.packed else case.q_start
        kinds = [KEYS[case.operation]] if case.operation in KEYS else ["cmp", "sel", "win"]
        total = 0
        for column, kind in enumerate(kinds):
            k, v = f"k_{kind}", f"v_{kind}"
            seen = seen_keys(case, kind, S, one[k].shape[0], start, one)
            gate = one["gates"][..., column, None].double() if "gates" in one else 1.0
            part = attend(one["q"], one[k], one[v], seen, self.scale, one["do"] * gate, least)
            for name, key in (("out", "out"), ("q", "q"), (k, "k"), (v, "v")):
                factor = gate if name == "out" else 1.0
                right[name] += part.right[key] * factor
                sizes[name] += part.sizes[key] * abs(factor)
            if "gates" in one:
                right["gates"][..., column] = (part.right["out"] * one["do"]).sum(-1)
                sizes["gates"][..., column] = (part.sizes["out"] * one["do"].abs()).sum(-1)
            one["logits"].copy_(torch.maximum(one["logits"], part.logits))
            one["lse"].copy_(part.lse)
            theirs = attend_in_dtype(own["q"], own[k], own[v], seen, self.scale)
            if "gates" in own:
                theirs = theirs.to(torch.promote_types(theirs.dtype, torch.float32))
                theirs = theirs * own["gates"][..., column, None].to(theirs.dtype)
            total = total + theirs
            for name in (k, v):
                if name in odd:
                    hit = (seen & odd[name]).any(-1).repeat_interleave(g.h, 1)
                    one["hit"] |= hit
                    if name == k:
                        one["hit_by_key"] |= hit
        one["theirs"].copy_(total)
        for name in ("q", "gates"):
            if name in odd:
                one["hit"] |= odd[name][:, None]
                one["hit_by_key"] |= odd[name][:, None]


def gradient_of(case: Case, out: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(case.seed + 1)
    do = torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out.dtype)
    layout = case.layouts.get("grad", "plain")
    if layout == "shared":  # as of out.sum()
        return do[..., :1].expand(out.shape).to(out.device)
    return laid_out(do.to(out.device), layout)


def title(what: str) -> str:
    return what if what == "out" else f"gradient of {what}"


def rounding_of(case: Case) -> tuple[torch.finfo, float]:
    """The dtype's limits, and the rounding of scores' sums, which SDPA does in its own way: on a
    CPU in 16 bits."""
    info = torch.finfo(DTYPES[case.dtype])
    return info, 2 * info.eps if case.route == "sdpa" else 2.0**-21


def check(case: Case, device: str) -> float:
    """Run the case on a device; raise Wrong, or what the call raised; return the worst row's share
    of what it may be off."""
    if case.operation == "decode":
        return check_decode(case, device)
    inputs = Inputs(case, device)
    name = f"{case.operation} on {case.route}"
    leaves = lambda x: {
        n: t.detach().requires_grad_(case.grad and case.only in (None, n)) for n, t in x.items()
    }
    x = leaves(inputs.x)
    result = call(case, inputs, x)
    if case.operation == "choice":
        return check_choice(case, name, inputs, result)
    out, blocks, lse = result, None, None
    if case.operation == "attention":
        out, blocks = result[0], result[1]["block_indices"]
    elif case.operation == "compressed":
        out, lse = result
    if out.dtype != inputs.dtype:
        raise Wrong(f"{name}: dtype {out.dtype} must be {inputs.dtype}")
    do = gradient_of(case, out)
    want = Expected(case, inputs, do, blocks)
    if blocks is not None:
        check_choice(case, name, inputs, blocks, want)
    got = outcome(out, x, do)
    info, score_eps = rounding_of(case)
    worst, any_hit = 0.0, bool(want.hit.any())
    # In bf16 on a CPU PyTorch's backward lets the query before one of NaN have NaN as well.
    spreads = case.route == "sdpa" and device == "cpu" and case.dtype == "bf16"
    for what, mine in got.items():
        of_keys = what not in ("out", "q", "gates")
        if any_hit and (of_keys or what == "q" and spreads):
            continue  # keys have the NaN of the rows that see it
        counted = torch.ones_like(mine[..., 0], dtype=torch.bool) if of_keys else ~want.hit
        logits = F.pad(want.logits.flatten(), (0, 1)).max() if of_keys else want.logits
        share = judge(
            f"{name}, {title(what)}", mine, want.right[what], want.theirs[what], want.sizes[what],
            logits, counted, info, score_eps,
        )  # fmt: skip
        worst = max(worst, share)
    if case.odd and case.odd[0][0] in "kv" and case.odd[2] == "nan":
        hidden = want.hit & ~got["out"].isnan().all(-1)
        if hidden.any():
            raise Wrong(f"{name}: row {hidden.nonzero()[0].tolist()} sees NaN and hides it")
    if lse is not None:
        check_lse(name, lse, want, score_eps)
    if case.odd and case.route != "sdpa":
        check_bits(case, name, inputs, want, do, leaves)
    return worst


def outcome(out: Tensor, x: dict[str, Tensor], do: Tensor) -> dict[str, Tensor]:
    """out, and the gradients of those of x that need one."""
    wanted = {n: t for n, t in x.items() if t.requires_grad}
    grads = torch.autograd.grad(out, list(wanted.values()), do) if wanted else ()
    return {"out": out.detach(), **dict(zip(wanted, grads, strict=True))}


def check_bits(
    case: Case, name: str, inputs: Inputs, want: Expected, do: Tensor, leaves: Callable
) -> None:
    """Raise Wrong if the odd value changes a bit of what does not see it, in deterministic mode."""
    results = []
    with deterministic():
        for tensors in (inputs.x, inputs.clean):
            x = leaves({n: laid_out(t, case.layouts.get(n, "plain")) for n, t in tensors.items()})
            result = call(case, inputs, x)
            out = result[0] if isinstance(result, tuple) else result
            results.append(outcome(out, x, do))
    for what in {"out", "q"} & set(results[0]):
        one, other = (r[what][~want.hit] for r in results)
        differ = ((one != other) & ~(one.isnan() & other.isnan())).any(-1)
        if differ.any():
            row = differ.nonzero()[0].item()
            at = (~want.hit).nonzero()[row].tolist()
            raise Wrong(f"{name}, {what}: an odd {case.odd[0]} changes bits of row {at}")


def check_lse(name: str, lse: Tensor, want: Expected, score_eps: float) -> None:
    off = (lse.double() - want.lse).abs().where(lse.double() != want.lse, 0)
    limit = 1e-4 + want.lse.abs().nan_to_num(posinf=0.0) * 2e-6 + want.logits * score_eps
    wrong = ~(off <= limit) & ~want.hit_by_key
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise Wrong(f"{name}, lse: {lse[at]:.7g} at {list(at)}, right is {want.lse[at]:.7g}")


def check_choice(
    case: Case, name: str, inputs: Inputs, chosen: Tensor, want: Expected | None = None
) -> float:
    """Hold the chosen blocks of every sequence against the scores."""
    start, g = 0 if case.packed else case.q_start, case.geometry
    odd = {} if case.odd is None else {case.odd[0]: inputs.odd_rows()}
    left = torch.ones_like(chosen[..., 0], dtype=torch.bool)
    for (_, one), (_, rows), (_, at) in zip(
        inputs.each(inputs.clean), inputs.each({"blocks": chosen, "left": left}), inputs.each(odd),
        strict=True,
    ):  # fmt: skip
        S = one["q"].shape[0]
        free = torch.zeros(S, g.G, dtype=torch.bool, device=chosen.device)
        if "k_cmp" in at:
            seen = seen_keys(case, "cmp", S, one["k_cmp"].shape[0], start, one)
            free |= (seen & at["k_cmp"]).any(-1)
        if "q" in at:
            free |= at["q"][:, None]
        rows["left"].fill_(False)
        judge_choice(case, f"{name}, blocks", start, one, rows["blocks"], free)
    if (chosen[left] != -1).any():
        raise Wrong(f"{name}, blocks: rows of no sequence have some")
    return 0.0


# ---- decoding ------------------------------------------------------------------------------------


def check_decode(case: Case, device: str) -> float:
    """Prefill caches of their own lengths, stack them, then append, attend and take back by steps.

    Rows of the buffers that nobody wrote hold NaN.
    """
    g, dtype = case.geometry, DTYPES[case.dtype]
    draw = torch.Generator().manual_seed(case.seed)
    config = NSAConfig(dim=8, heads=g.G * g.h, groups=g.G, d_k=g.Dk, d_v=g.Dv, w=g.w, phi="mean",
                       **g.choice())  # fmt: skip
    phi = lambda x: mean_pool(x, g.l, g.d)
    B, max_step = len(case.lengths), max([1, *case.steps])
    room = max(case.lengths) + sum(s for s in case.steps if s > 0) + case.spare

    def tokens(batch: int, n: int) -> dict[str, Tensor]:
        made = {}
        for name in ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win"):
            width = g.Dk if name[0] == "k" else g.Dv
            x = torch.randn(batch, n, g.G, width, generator=draw, dtype=torch.float64)
            x = laid_out(x.to(device, dtype), case.layouts.get(name, "plain"))
            made[name] = x
        return made

    caches, history = [], []
    for n in case.lengths:
        cache = NSACache(config, 1, max(1, room), device=device, dtype=dtype, max_step=max_step)
        for name in ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "k_raw", "v_raw"):
            getattr(cache, name).fill_(math.nan)
        first = tokens(1, n)
        if n:
            cache.append(BranchKV(**first), phi, phi)
        caches.append(cache)
        history.append({name: x[0] for name, x in first.items()})
    cache, worst = NSACache.stack(caches), 0.0
    for i, T in enumerate(case.steps):
        if T < 0:
            written = [max(h, n) for h, n in zip(cache.highest, cache.lengths, strict=True)]
            least = min(n - max(0, h - max_step)
                        for n, h in zip(cache.lengths, written, strict=True))  # fmt: skip
            back = min(-T, least)
            cache.rewind(back)
            history = [{name: x[: len(x) - back] for name, x in one.items()} for one in history]
            continue
        new = tokens(B, T)
        cache.append(BranchKV(**new), phi, phi)
        for b, one in enumerate(history):
            history[b] = {name: torch.cat([x, new[name][b]]) for name, x in one.items()}
        make = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(
            device, dtype)  # fmt: skip
        q = laid_out(make(B, T, g.G * g.h, g.Dk), case.layouts.get("q", "plain"))
        gates = laid_out(make(B, T, g.G * g.h, 3), case.layouts.get("gates", "plain"))
        q, gates = (x.detach().requires_grad_(case.grad) for x in (q, gates))
        out, chosen = nsa_decode(
            q, cache, None, gates, backend=case.route, flags=FLAGS, softmax_scale=case.scale
        )
        worst = max(worst, _judge_step(case, f"step {i}", cache, history, q, gates, out, chosen))
    return worst


def _judge_step(
    case: Case, step: str, cache: NSACache, history: list[dict[str, Tensor]], q: Tensor,
    gates: Tensor, out: Tensor, chosen: Tensor,
) -> float:  # fmt: skip
    """Hold one decode step, and the compressed keys that the cache has by now, against fp64."""
    g, worst, T = case.geometry, 0.0, q.shape[1]
    do = gradient_of(case, out.detach())
    grads = torch.autograd.grad(out, [q, gates], do) if case.grad else ()
    for b, one in enumerate(history):
        name, n = f"decode on {case.route}, {step} of sequence {b}", len(one["k_sel"])
        count = num_blocks(n, g.l, g.d)
        x = {m: t[None] for m, t in one.items()}
        for m in ("k_cmp", "v_cmp"):
            made = getattr(cache, m)[b, :count]
            right = one[m].double().unfold(0, g.l, g.d).mean(-1) if count else made.double()
            if not torch.allclose(made.double(), right, atol=2 * torch.finfo(q.dtype).eps * 4,
                                  rtol=2 * torch.finfo(q.dtype).eps):  # fmt: skip
                raise Wrong(f"{name}: {m} is not what its raw tokens make")
            x[m] = made[None]
        x |= {"q": q[b : b + 1].detach(), "gates": gates[b : b + 1].detach()}
        order = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
        alone = Inputs.of(_one_step(case, T, n), {m: x[m] for m in order})
        want = Expected(alone.case, alone, do[b : b + 1], chosen[b : b + 1])
        check_choice(alone.case, name, alone, chosen[b : b + 1])
        for what, mine in zip(("out", "q", "gates"), (out.detach(), *grads), strict=False):
            worst = max(worst, judge(
                f"{name}, {title(what)}", mine[b : b + 1], want.right[what], want.theirs[what],
                want.sizes[what], want.logits, torch.ones_like(want.hit), *rounding_of(case),
            ))  # fmt: skip
    return worst


def _one_step(case: Case, T: int, n: int) -> Case:
    """The attention of T new tokens of one sequence of n."""
    return Case("attention", case.route, case.dtype, case.geometry, (T,), q_start=n - T,
                grad=case.grad, scale=case.scale, seed=case.seed)  # fmt: skip
