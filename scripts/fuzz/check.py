"""Runs a case of the fuzzer and holds all that comes of it against what is right."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.attention import nsa_decode
from nsa.cache import BranchKV, NSACache
from nsa.compress import mean_pool
from nsa.config import NSAConfig
from nsa.tests.helpers import deterministic
from scripts.fuzz.cases import DTYPES, FLAGS, KEYS, Case, Inputs, call, laid_out, num_blocks
from scripts.fuzz.judge import Wrong, attend, attend_in_dtype, judge, judge_choice, seen_keys


class Expected:
    """The right results for the whole tensors of a call, summed over sequences and branches."""

    def __init__(self, case: Case, inputs: Inputs, do: Tensor, blocks: Tensor | None) -> None:
        self.case, g = case, case.geometry
        eps = torch.finfo(do.dtype).eps
        # bf16 reaches as far down as the fp32 that probabilities are made in.
        least = (2.0**-24 if do.dtype == torch.float16 else 2.0**-126) / eps
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
        every = inputs.clean, leaves, self.right, self.sizes, more, inputs.odd_rows()
        for one, own, right, sizes, rows, at in inputs.each(*every):
            self._sequence({**one, **rows}, own, right, sizes, at, least)
        self.theirs = {"out": theirs.detach()}
        if case.grad:
            how = dict(allow_unused=True, materialize_grads=True)
            given = torch.autograd.grad(theirs, list(leaves.values()), do, **how)
            self.theirs |= dict(zip(leaves, given, strict=True))

    def _sequence(
        self, one: dict, own: dict, right: dict, sizes: dict, odd: dict, least: float
    ) -> None:
        """Fill in one sequence's rows of everything. own: the tensors that PyTorch's attention in
        their dtype takes. odd: which rows of the odd tensor hold the odd value."""
        case, g = self.case, self.case.geometry
        total = 0
        for column, kind in enumerate(KEYS[case.operation]):
            k, v = f"k_{kind}", f"v_{kind}"
            seen = seen_keys(case, kind, one)
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
    """Return the dtype's limits and the rounding of the scores' sums, which SDPA does in 16 bits
    on a CPU."""
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
        check_choice(case, name, inputs, blocks)
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
    if case.odd and case.odd[0] != "gates" and case.odd[2] != "huge":
        hidden = want.hit & (want.lse > -math.inf) & got["out"].isfinite().all(-1)
        if hidden.any():
            raise Wrong(
                f"{name}: row {hidden.nonzero()[0].tolist()} sees {case.odd[2]} of {case.odd[0]} "
                "and hides it"
            )
    if lse is not None:
        check_lse(name, lse, want, score_eps)
    if case.odd and case.route in ("triton", "reference"):
        check_bits(case, name, inputs, want, do, leaves)
    return worst


def outcome(out: Tensor, x: dict[str, Tensor], do: Tensor) -> dict[str, Tensor]:
    """Return out and the gradients of those of x that need one."""
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
    # Kernels tell of a value that is no number by its key (marked_keys.py).
    wrong &= ~(want.hit & lse.isnan())
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise Wrong(f"{name}, lse: {lse[at]:.7g} at {list(at)}, right is {want.lse[at]:.7g}")


def check_choice(case: Case, name: str, inputs: Inputs, chosen: Tensor) -> float:
    """Hold the chosen blocks of every sequence against the scores."""
    left = torch.ones_like(chosen[..., 0], dtype=torch.bool)
    every = inputs.clean, {"blocks": chosen, "left": left}, inputs.odd_rows()
    for one, rows, at in inputs.each(*every):
        free = torch.zeros_like(rows["blocks"][..., 0], dtype=torch.bool)
        for what in {"k_cmp", "v_cmp"} & set(at):  # a value tells by its key (marked_keys.py)
            if what == "k_cmp" or case.odd[2] != "huge":
                free |= (seen_keys(case, "cmp", one) & at[what]).any(-1)
        if "q" in at:
            free |= at["q"][:, None]
        rows["left"].fill_(False)
        judge_choice(case, f"{name}, blocks", one, rows["blocks"], free)
    if (chosen[left] != -1).any():
        raise Wrong(f"{name}, blocks: rows of no sequence have some")
    return 0.0


BRANCHES = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")


def check_decode(case: Case, device: str) -> float:
    """Prefill caches of their own lengths, stack them, then append, attend and take back by steps.

    Rows of the buffers that nobody wrote hold NaN.
    """
    g, dtype = case.geometry, DTYPES[case.dtype]
    draw = torch.Generator().manual_seed(case.seed)
    config = NSAConfig(dim=8, heads=g.G * g.h, groups=g.G, d_k=g.Dk, d_v=g.Dv, window=g.w,
                       phi="mean", **g.choice())  # fmt: skip
    phi = lambda x: mean_pool(x, g.l, g.d)
    B, max_step = len(case.lengths), max([1, *case.steps])
    room = max(case.lengths) + sum(s for s in case.steps if s > 0) + case.spare

    def drawn(name: str, *shape: int) -> Tensor:
        x = torch.randn(*shape, generator=draw, dtype=torch.float64).to(device, dtype)
        return laid_out(x, case.layouts.get(name, "plain"))

    def tokens(batch: int, n: int) -> dict[str, Tensor]:
        width = {"k": g.Dk, "v": g.Dv}
        return {name: drawn(name, batch, n, g.G, width[name[0]]) for name in BRANCHES}

    caches, history = [], []
    for n in case.lengths:
        cache = NSACache(config, 1, max(1, room), device=device, dtype=dtype, max_step=max_step)
        for name in (*BRANCHES, "k_raw", "v_raw"):
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
        q, gates = drawn("q", B, T, g.G * g.h, g.Dk), drawn("gates", B, T, g.G * g.h, 3)
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
        last = replace(case, operation="attention", lengths=(T,), q_start=n - T, spare=0,
                       layouts={}, steps=())  # fmt: skip
        alone = Inputs.of(last, {m: x[m] for m in ("q", *BRANCHES, "gates")})
        want = Expected(alone.case, alone, do[b : b + 1], chosen[b : b + 1])
        check_choice(alone.case, name, alone, chosen[b : b + 1])
        for what, mine in zip(("out", "q", "gates"), (out.detach(), *grads), strict=False):
            worst = max(worst, judge(
                f"{name}, {title(what)}", mine[b : b + 1], want.right[what], want.theirs[what],
                want.sizes[what], want.logits, torch.ones_like(want.hit), *rounding_of(case),
            ))  # fmt: skip
    return worst
