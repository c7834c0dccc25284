"""One decode step as a bench times it: a cache of S tokens, its calls, what they must give."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.prefill_inputs import attend
from bench.records import note
from bench.sdpa_baselines import BACKENDS, promised, usable
from bench.timing import Contender
from nsa import attention, blocks, dispatch, fp8, oracle, reference, select
from nsa.dispatch import Branch, Route
from nsa.flags import Flags
from nsa.fp8 import KVCacheDtype
from nsa.module import NSAAttention

BRANCHES = ("cmp", "sel", "win")
BUFFERS = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")  # of a cache, read by a step
ORACLE_TOKENS = 1 << 17  # caches of more are judged by the vectorised reference in fp64
DESCALES = dict(k_descale=2.0**-6, v_descale=2.0**-5)  # of FP8 caches; N(0, 1) reaches 384
FILL_TOKENS = 1 << 16  # of all sequences at once, while the cache is filled


@dataclass(frozen=True)
class Counted:
    """Keys read per group: all of filling the cache and one step, and of the step alone."""

    total: int
    expected: int
    cmp: int
    sel: int
    win: int
    expected_step: int


class Step:
    """One layer's cache of S tokens and the T newest queries: what is timed, what it must give.

    backend "triton" insists on the Triton step (also interpreted on a CPU); None follows `flags`.
    alike: correlation of a sequence's queries, from 0 (each chooses other blocks) to 1 (the same).
    kv_cache_dtype: as NSACache's; the truth is that of what the stored numbers stand for.
    """

    def __init__(
        self, layer: NSAAttention, batch: int, S: int, *, flags: Flags | None = None,
        backend: str | None = None, T: int = 1, alike: float = 0.0,
        kv_cache_dtype: KVCacheDtype = "auto",
    ) -> None:  # fmt: skip
        c = self.config = layer.config
        weight = layer.qkv.weight.detach()
        self.S, self.T, self.alike, self.backend = S, T, alike, backend
        like = {"device": weight.device, "dtype": weight.dtype}
        self.fp8 = fp8.is_fp8(kv_cache_dtype)
        self.layer = layer
        self.cache = layer.make_cache(
            batch, S, max_step=T, count_reads=True, kv_cache_dtype=kv_cache_dtype,
            **(DESCALES if self.fp8 else {}),
        )  # fmt: skip
        gen = torch.Generator(weight.device).manual_seed(S)
        size = max(1, FILL_TOKENS // batch)
        ends = [*range(size, S - T, size), *([S - T] if S > T else []), S]
        for first, last in zip([0, *ends], ends, strict=False):
            layer.step(torch.randn(batch, last - first, c.dim, generator=gen, **like), self.cache)
        self.counted = self._count()
        self.cache.count_reads = False
        self.exact = oracle if batch * S <= ORACLE_TOKENS else None
        self._filled: tuple[int | None, ...] = ()  # by which seeds the inputs are what they are
        self._dense: tuple[Any, Tensor] | None = None
        self.q = torch.empty(batch, T, c.heads, c.d_k, **like)
        self.gates = torch.empty(batch, T, c.heads, 3, **like)
        self.open_gates = torch.ones_like(self.gates)
        self.blocks = weight.new_zeros(batch, T, c.groups, c.n_sel, dtype=torch.int32)
        # Flash kernels want values as wide as keys: a dense cache would store them padded.
        self.v_padded = None
        if c.d_v < c.d_k:
            self.v_padded = torch.zeros(batch, S, c.groups, c.d_k, **like)
        # Dense baselines read the same keys and values in q's dtype.
        self.dense = self.cache.selectable()
        self.flags = dispatch.resolve_flags(flags, self.q)
        self.refill(0)
        with torch.no_grad():
            self._find_route()
        # In fp16 the weight of a key may be 0; several queries may see the same key.
        plain = self.exact and self.q.dtype != torch.float16 and T == 1 and not self.fp8
        self.seen = self._seen() if plain else None

    def _seen(self) -> int:
        """Keys per group that one step's output depends on, by the gradients of their values.

        The cache counts what it handed out, by the lengths; this asks the result. Raises
        AssertionError where the two differ, or where the step also takes anything else in: all
        other rows are NaN then.
        """
        cache = self.cache
        names = {n: (getattr(cache, f"k_{n}"), getattr(cache, f"v_{n}")) for n in BRANCHES}
        values = [v for _, v in names.values()]
        try:
            for v in values:
                v.requires_grad_(True)
            with torch.enable_grad():
                out, _ = self._attend("reference")
            total = out.square().sum()
            grads = torch.autograd.grad(total, values, allow_unused=True, materialize_grads=True)
        finally:
            for v in values:
                v.requires_grad_(False)
        counts, kept = {}, []
        with torch.no_grad():
            whole = self._attend(self.backend)
            for (name, pair), grad in zip(names.items(), grads, strict=True):
                read = grad.abs().amax(-1) > 0  # [B, tokens, G]
                counts[name] = read.sum(1).unique().tolist() or [0]
                for x in pair:
                    kept.append((x, x.clone()))
                    x[~read] = float("nan")
            alone = self._attend(self.backend)
            for x, before in kept:
                x.copy_(before)
        counted = {n: [getattr(self.counted, n)] for n in BRANCHES}
        if counts != counted:
            raise AssertionError(f"the cache counted reads {counted}, its values reach {counts}")
        close = torch.allclose(whole[0].float(), alone[0].float(), rtol=1e-2, atol=1e-2)
        if not close or not torch.equal(whole[1], alone[1]):  # NaN is close to nothing
            raise AssertionError("the step depends on keys that it is not to read")
        return sum(n for (n,) in counts.values())

    def _count(self) -> Counted:
        c, S = self.config, self.S
        sizes = dict(l=c.l, d=c.d, l_sel=c.l_sel, n_sel=c.n_sel, w=c.w)
        if len(self.cache) != S:
            raise AssertionError(f"the cache holds {len(self.cache)} tokens, not {S}")
        reads, due = self.cache.reads(), [blocks.reads(s, **sizes) for s in range(1, S + 1)]
        self.cache.reset_reads()
        total, last = sum(r.total for r in reads), reads[-1]
        return Counted(total, sum(due), last.cmp, last.sel, last.win, sum(due[-self.T :]))

    def _find_route(self) -> None:
        """The route that policy asks for, the one a call takes, and why they differ if they do."""
        keys = self.cache.k_sel, self.cache.v_sel, self.S
        request = dispatch.make_request(Branch.STEP, self.q, *keys, self.flags, self.backend)
        wanted = dispatch.decide(request, self.flags, self.backend).route
        with dispatch.trace() as taken:
            self._attend(self.backend)
        step = next(t for t in reversed(taken) if t.branch is Branch.STEP)
        self.fused = step.route is Route.TRITON
        self.path = self.requested = "triton" if self.fused else "composed"
        self.fallback = step.fallback_reason
        # Sizes that no kernel serves are a limit; a kernel that fails is a result of its own.
        if wanted is Route.TRITON and not self.fused and self.fallback != "unsupported":
            self.requested = "triton"

    def kernels(self, *, in_graph: bool = False, branch: str | None = None) -> tuple[str, ...]:
        """Names of our kernels of a step, or of one branch of it, none where PyTorch does it."""
        if not self.fused:
            return ()
        from nsa.kernels.decode import step_kernels

        c = self.config
        return step_kernels(
            self.q, c.groups, c.d_v, max_len=self.S, in_graph=in_graph, branch=branch,
            use_cluster=self.flags.use_cluster, fp8=self.fp8, **c.sizes(),
        )  # fmt: skip

    def inputs(self) -> list[Tensor]:
        c = self.cache
        return [self.q, self.gates, self.blocks, *(getattr(c, name) for name in BUFFERS)]

    def refill(self, seed: int) -> None:
        """N(0, 1) for queries, keys and values, U(0, 1) for gates, and blocks to match.

        The blocks come from the reference: a call of the step itself would leave right results in
        freed memory, where a kernel that writes nothing would find them.
        """
        c = self.config
        self._filled = seed, None
        gen = torch.Generator(self.q.device).manual_seed(seed)
        for x in (self.q, self.gates):
            x.normal_(generator=gen)
        for name in BUFFERS:
            self.draw(name, gen)
        self._make_alike()
        self.gates.uniform_(generator=gen)
        if self.fp8:
            for x, now in zip(self.dense, self.cache.selectable(), strict=True):
                x[:, : now.shape[1]] = now  # which at() makes shorter
        if self.v_padded is not None:
            self.v_padded[..., : c.d_v] = self.dense[1]
        choosing = {n: size for n, size in c.sizes().items() if n != "window"}
        self.blocks.copy_(attention.select_blocks(
            self.q, self.cache.compressed()[0], **choosing, q_start=self.S - self.T,
            backend="reference", flags=self.flags,
        ))  # fmt: skip

    def draw(self, name: str, gen: torch.Generator, into: Tensor | None = None) -> None:
        """N(0, 1) into a buffer of the cache; `into` gets the numbers as they come instead.

        Of FP8 a sequence at a time: its numbers are made in q's dtype first.
        """
        x = getattr(self.cache, name)
        if not self.fp8:
            x.normal_(generator=gen)
            return
        descale = getattr(self.cache, f"{name[0]}_descale")
        for b in range(len(x)):
            one = torch.empty(1, *x.shape[1:], dtype=self.q.dtype, device=x.device)
            one.normal_(generator=gen)
            if into is None:
                x[b : b + 1] = fp8.quantize(one, descale[b : b + 1])
            else:
                into[b : b + 1] = one

    def stands_for(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows first to last of a buffer of the cache, in q's dtype."""
        x = getattr(self.cache, name)[:, first:last]
        return fp8.stands_for(x, getattr(self.cache, f"{name[0]}_descale"), self.q.dtype)

    def stored_alike(self, got: Tensor, want: Tensor) -> bool:
        """Is `got`, of the cache, what is kept of `want`?"""
        near = 2.0**-4 if self.fp8 else 1e-2
        return torch.allclose(got, want, rtol=near, atol=1e-2)

    @torch.no_grad()
    def kv_error(self) -> float | None:
        """Relative error (2-norm) of the step against that over a cache of q's dtype with the same
        numbers, which may choose other blocks; None of a step without FP8."""
        if not self.fp8:
            return None
        cache, seed = self.cache, self._filled[0]
        plain = self.layer.make_cache(cache.batch, self.S, max_step=self.T)
        plain.lengths, plain.lens = list(cache.lengths), cache.lens
        gen = torch.Generator(self.q.device).manual_seed(seed)
        for x in (self.q, self.gates):  # which refill() draws before
            torch.empty_like(x).normal_(generator=gen)
        for name in BUFFERS:
            self.draw(name, gen, getattr(plain, name))
        got, want = (self._attend(self.backend, one)[0].double() for one in (cache, plain))
        return float((got - want).norm() / want.norm())

    def renew(self, seed: int) -> None:
        """Other queries and gates over the same cache."""
        self._filled = self._filled[0], seed
        gen = torch.Generator(self.q.device).manual_seed(seed)
        self.q.normal_(generator=gen)
        self._make_alike()
        self.gates.uniform_(generator=gen)

    def _make_alike(self) -> None:
        """Mix the last token's queries, N(0, 1), into the others', which stay so."""
        if self.alike:
            mine = self.q[:, :-1]
            mine.mul_((1 - self.alike**2) ** 0.5).add_(self.q[:, -1:], alpha=self.alike)

    def keys_once(self) -> tuple[int, float]:
        """Keys that a step has to read, those of several queries counted once, of all sequences and
        groups; and the mean number of blocks that the queries of one choose together."""
        c, S = self.config, self.S
        own = (S - 1) // c.l_sel
        chosen = self.blocks.new_zeros(len(self.q), c.groups, own + 2, dtype=torch.int64)
        at = self.blocks.long() % (own + 2)  # -1, none, is the last
        chosen.scatter_(-1, at.transpose(1, 2).flatten(2), 1)
        chosen = chosen[..., : own + 1]
        missing = chosen[..., own].sum() * ((own + 1) * c.l_sel - S)
        always = blocks.num_compressed(S, c.l, c.d) + min(c.w + self.T - 1, S)
        keys = int(chosen.sum() * c.l_sel - missing) + len(self.q) * c.groups * always
        return keys, float(chosen.sum(-1).double().mean())

    @contextlib.contextmanager
    def at(self, length: int) -> Iterator[None]:
        """The same buffers with the cache's length changed, on the device and for the truth."""
        cache, S = self.cache, self.S

        def put(n: int) -> None:
            self.S, cache.lengths = n, [n] * cache.batch
            cache.lens.fill_(n)

        put(length)
        try:
            yield
        finally:
            put(S)

    def _attend(self, backend: str | None, cache: Any = None) -> tuple[Tensor, Tensor]:
        cache = self.cache if cache is None else cache
        how = dict(backend=backend, flags=self.flags)
        return attention.nsa_decode(self.q, cache, None, self.gates, **how)

    def total(self) -> Callable[[], tuple[Tensor, Tensor]]:
        """The step: a named route where Triton was chosen, so that no sample can fall back."""
        backend = "triton" if self.fused else self.backend
        return torch.no_grad()(lambda: self._attend(backend))

    def alone(self, branch: str) -> Callable[[], Tensor]:
        """One branch's part of the step, with nothing of the other two."""
        c, cache, flags = self.config, self.cache, self.flags
        if self.fused:
            from nsa.kernels.decode import nsa_decode_triton

            chosen = self.blocks if branch == "sel" else None
            return torch.no_grad()(lambda: nsa_decode_triton(
                self.q, cache.k_cmp, cache.v_cmp, cache.k_sel, cache.v_sel, cache.k_win,
                cache.v_win, self.open_gates, cache.lens, **c.sizes(), max_len=self.S,
                window_ring=True, branch=branch, block_indices=chosen,
                use_cluster=flags.use_cluster, k_descale=cache.k_descale,
                v_descale=cache.v_descale,
            ))  # fmt: skip
        at = self.S - self.T
        q, calls = self.q, {
            "cmp": lambda: attention.compressed_attention(
                q, *cache.compressed(), l=c.l, d=c.d, q_start=at, flags=flags)[0],
            "sel": lambda: attention.selection_attention(
                q, *cache.selectable(), self.blocks, block_size=c.l_sel, q_start=at, flags=flags),
            "win": lambda: attention.sliding_attention(
                q, *cache.window(self.T), window=c.w, flags=flags),
        }  # fmt: skip
        return torch.no_grad()(calls[branch])

    def branch_path(self, branch: str) -> str:
        """The route that `alone(branch)` takes."""
        if self.fused:
            return "triton"
        with dispatch.trace() as taken:
            self.alone(branch)()
        return taken[-1].route.value

    def check_choice(self, chosen: Tensor) -> None:
        """Raise ValueError unless the chosen blocks are the best by the paper's scores in fp64.

        The forced blocks and the number must be exact; scores as close as the dtype's rounding may
        swap places.
        """
        c, first = self.config, self.S - self.T
        slack = 1e-4 if self.q.dtype == torch.float32 else 1e-2
        sizes = dict(l=c.l, d=c.d, l_sel=c.l_sel, q_start=first)
        k_cmp = self.cache.compressed()[0]
        if self.exact:
            scores = oracle.group_block_scores(self.q, k_cmp, **sizes)
        else:
            sizes["n_blocks"] = (self.S - 1) // c.l_sel + 1
            scores = _by_sequence(partial(select.group_block_scores, **sizes), self.q, k_cmp)
        for i in range(self.T):
            t = first + i
            own = t // c.l_sel
            forced = set(oracle.forced_blocks(t, c.l_sel, c.n_sel, c.n_init, c.n_local))
            for b, g in itertools.product(range(len(scores)), range(c.groups)):
                row = chosen[b, i, g].tolist()
                picked = [j for j in row if j >= 0]
                score = scores[b, i, g].tolist()
                right = (
                    picked == sorted(set(picked)) and set(row[len(picked) :]) <= {-1}
                    and len(picked) == min(c.n_sel, own + 1) and forced <= set(picked)
                    and picked[-1] <= own
                )  # fmt: skip
                free = [score[j] for j in picked if j not in forced] if right else []
                left = [score[j] for j in range(own + 1) if j not in picked]
                if free and left:
                    right = min(free) >= max(left) * (1 - slack)
                if not right:
                    best = oracle.top_blocks(score, t, c.l_sel, c.n_sel, c.n_init, c.n_local)
                    where = f"sequence {b}, group {g}" + (f", token {t}" if self.T > 1 else "")
                    raise ValueError(f"{where} chose blocks {row}, not {best}")

    def truth(self, branch: str, chosen: Tensor) -> Tensor:
        """A branch's output [B, T, HQ, Dv] in fp64 from the paper's equations."""
        c, t, q = self.config, self.S - self.T, self.q
        lib = self.exact or reference
        true = lambda attend, *given: (
            attend(q, *given) if self.exact else _by_sequence(attend, q, *given)
        )
        if branch == "cmp":
            sizes = dict(l=c.l, d=c.d, q_start=t)
            attend = lambda q, k, v: lib.compressed_attention(q, k, v, **sizes)[0]
            return true(attend, *self.cache.compressed())
        if branch == "win":
            k, v = self.cache.window(self.T)
            how = dict(window=c.w, q_start=k.shape[1] - self.T)
            return true(partial(lib.sliding_attention, **how), k, v)
        ranges = oracle.blocks_to_ranges(chosen.cpu(), c.l_sel, t)
        if not self.exact:
            ranges = ranges.to(q.device)
        return true(lib.selection_attention, *self.cache.selectable(), ranges)

    def total_truth(self, chosen: Tensor) -> Tensor:
        self.check_choice(chosen)
        return oracle.gated_sum(self.gates, *(self.truth(b, chosen) for b in BRANCHES))

    def plain(self, branch: str, chosen: Tensor, i: int | None = None) -> Tensor:
        """Compute the branch in PyTorch, in the inputs' dtype, for all new tokens or for token i
        alone: [B, 1, HQ, Dv]."""
        if i is None:
            return torch.cat([self.plain(branch, chosen, i) for i in range(self.T)], 1)
        c, q, n = self.config, self.q[:, i : i + 1], self.S - self.T + 1 + i
        if branch == "cmp":
            seen = blocks.num_compressed(n, c.l, c.d)
            return attend(q, *(x[:, :seen] for x in self.cache.compressed()))
        if branch == "win":
            k, v = self.cache.window(self.T)
            end = k.shape[1] - (self.S - n)
            return attend(q, *(x[:, max(end - c.w, 0) : end] for x in (k, v)))
        k, v = self.cache.selectable()
        h, size, parts = c.heads_per_group, c.l_sel, []
        for b, g in itertools.product(range(k.shape[0]), range(k.shape[2])):
            picked = [j for j in chosen[b, i, g].tolist() if j >= 0]
            at = [t for j in picked for t in range(j * size, min((j + 1) * size, n))]
            keys, values = (x[b : b + 1, at, g : g + 1] for x in (k, v))
            parts.append(attend(q[b : b + 1, :, g * h : (g + 1) * h], keys, values))
        return torch.cat(parts, 2).view(k.shape[0], 1, c.heads, -1)

    def total_plain(self, chosen: Tensor) -> Tensor:
        parts = [self.plain(b, chosen) for b in BRANCHES]
        return sum(self.gates[..., i : i + 1] * part for i, part in enumerate(parts))

    def dense_truth(self) -> Tensor:
        """Full attention in fp64; kept for the next baseline that is judged on the same numbers."""
        known = *self._filled, self.S
        if self._dense is None or self._dense[0] != known:
            tensors, t = (self.q, *self.cache.selectable()), self.S - 1
            whole = partial(reference.sliding_attention, window=self.S, q_start=t)
            out = (oracle.causal_attention(*tensors, q_start=t) if self.exact
                   else _by_sequence(whole, *tensors))  # fmt: skip
            self._dense = known, out
        return self._dense[1]


@torch.no_grad()
def _by_sequence(attend: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """attend in fp64, one sequence at a time: all of them at once would not fit."""
    wide = lambda x: x.double() if x.is_floating_point() else x
    return torch.cat(
        [attend(*(wide(x[b : b + 1]) for x in tensors)) for b in range(len(tensors[0]))]
    )


def dense_contenders(step: Step) -> list[Contender]:
    """Dense attention over the cache's S tokens by each backend of SDPA that takes it.

    None for several new tokens, whose causal mask needs other calls than these. In two layouts,
    rows: the heads of a group as query rows of one attention; gqa: one query per head, keys shared.
    "padded": with values stored as wide as keys, where they are narrower; "expanded": the backend
    copies the keys to every head.
    """
    if step.T > 1:
        return []
    q = step.q
    B, _, HQ, _ = q.shape
    k, v = (x.transpose(1, 2) for x in step.dense)
    G, d_v = k.shape[1], v.shape[-1]

    @torch.no_grad()
    def call(backend: SDPBackend, layout: str, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            if layout.startswith("rows"):
                out = F.scaled_dot_product_attention(q.view(B, G, HQ // G, -1), k, v)
                return out[..., :d_v].reshape(B, 1, HQ, -1)
            out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, enable_gqa=True)
            return out[..., :d_v].transpose(1, 2)

    keys, width = B * k.shape[2] * G, k.shape[-1] + d_v
    names = ("flash", "cudnn") if q.is_cuda else ("flash", "math")
    if q.is_cuda and step.exact:  # the others copy K and V to every head, or to fp32
        names = tuple(BACKENDS)
    layouts = {"rows": v, "gqa": v}
    if step.v_padded is not None:
        layouts |= dict.fromkeys(("rows padded", "gqa padded"), step.v_padded.transpose(1, 2))
    found = usable({f"dense sdpa {name} {layout}": partial(call, BACKENDS[name], layout, values)
                    for name in names for layout, values in layouts.items()})  # fmt: skip
    if why := found.why_none():
        note(f"decode bench: no dense attention to compare with at S={step.S}: {why}", "warn")
    return [
        Contender(
            found.label(name), call, "sdpa", oracle=step.dense_truth,
            same_dtype=lambda: attend(q, *step.cache.selectable()),
            bytes_needed=(keys + B * HQ) * width * q.element_size(),
            flops=2 * keys * (HQ // G) * width, attends=promised(name),
        )
        for name, call in found.calls.items()
    ]  # fmt: skip
