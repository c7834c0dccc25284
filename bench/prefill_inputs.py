"""One length of prefill as its bench times it: inputs, calls, what sampled queries must give."""

import bisect
import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.roofline import Shape
from nsa import reference, select
from nsa.blocks import cu_seqlens_compressed, num_compressed, visible_compressed

Take = Callable[[str, int, int], Tensor]  # rows a .. b of an input, by its name
# How far neighbouring queries choose the same blocks: by chance, as in real models, or by chance
# among the blocks of their document.
SHARING = ("random", "shared", "documents")
ANCHOR = 64  # tokens in which the direction of a drifting query turns by a right angle
NOISE = 0.2  # a query's own, of its drift: four that choose 16 of 64 name 22 distinct ones at 32k
DOCUMENT = 4096  # tokens
LEAD = 3.0  # by which keys of the own document score higher; among them scores are N(0, 1)


def sampled(shape: Shape, samples: int) -> list[int]:
    """Queries whose results are checked: the first, the last, block edges, and some between."""
    some = torch.randint(shape.S, (samples,), generator=torch.Generator().manual_seed(shape.S))
    edges = [0, shape.l - 1, shape.l_sel - 1, shape.l_sel, shape.S // 2, shape.S - 1]
    return sorted({*some.tolist(), *(t for t in edges if 0 <= t < shape.S)})


def renew_rows(x: Tensor, rows: Tensor, gen: torch.Generator) -> None:
    """Write N(0, 1) into these tokens of x [B, S, ...]."""
    new = torch.randn(
        (x.shape[0], len(rows), *x.shape[2:]), generator=gen, dtype=x.dtype, device=x.device
    )
    x.detach().index_copy_(1, rows, new)


def drift(q: Tensor, gen: torch.Generator) -> None:
    """Turn independent queries [B, S, HQ, D] of N(0, 1), in place, into ones whose neighbours are
    alike: each is on the way from one random query to the next, ANCHOR tokens further, with NOISE
    of its own. Every single query still is N(0, 1)."""
    like = {"device": q.device, "dtype": q.dtype}
    ends = torch.randn(q.shape[0], q.shape[1] // ANCHOR + 2, *q.shape[2:], generator=gen, **like)
    size = math.sqrt(1 + NOISE**2)
    for t in torch.arange(q.shape[1], device=q.device).split(16 * ANCHOR):  # saves memory
        angle = (t % ANCHOR * (math.pi / 2 / ANCHOR))[:, None, None]
        way = ends[:, t // ANCHOR] * angle.cos() + ends[:, t // ANCHOR + 1] * angle.sin()
        q[:, t] = ((way + NOISE * q[:, t]) / size).to(q.dtype)


def keep_to_documents(q: Tensor, k_cmp: Tensor, d: int, gen: torch.Generator) -> None:
    """Add to queries [B, S, HQ, D] and compressed keys [B, n, G, D], in place, a direction of their
    document and group, in which keys of other documents have nothing: those of the own one score
    higher by LEAD, all alike, so that each query chooses among them at random."""
    G, D = k_cmp.shape[2:]
    marks = torch.randn(-(-q.shape[1] // DOCUMENT), G, D, generator=gen, device=q.device)
    marks = F.normalize(marks, dim=-1)
    own = marks[torch.arange(k_cmp.shape[1], device=q.device) * d // DOCUMENT]
    strength = math.sqrt(LEAD * math.sqrt(D))
    k_cmp += (strength - (k_cmp * own).sum(-1, keepdim=True)) * own
    for rows, mark in zip(q.split(DOCUMENT, 1), marks, strict=True):
        rows.unflatten(2, (G, -1)).add_(strength * mark[:, None])


def distinct_blocks(blocks: Tensor, neighbours: int = 4) -> float:
    """How many distinct blocks so many neighbouring queries name together, on average over the
    whole sequence. blocks [B, S, G, n], -1: none."""
    whole = blocks[:, : blocks.shape[1] // neighbours * neighbours]
    named = whole.unflatten(1, (-1, neighbours)).transpose(2, 3).flatten(3).sort(-1).values
    fresh = F.pad(named[..., 1:] != named[..., :-1], (1, 0), value=True) & (named >= 0)
    return fresh.sum(-1).double().mean().item()


class Prefill:
    """Inputs of one length, the calls on them, and fp64 results on a sample of the queries.

    sharing: how far neighbouring queries choose the same blocks, see SHARING. It enters by what q
    and k_cmp hold: NSA chooses its blocks itself at any sharing.
    """

    def __init__(
        self, shape: Shape, device: str = "cuda", dtype: torch.dtype = torch.bfloat16,
        samples: int = 12, sharing: str = "random",
    ) -> None:  # fmt: skip
        self.sharing = sharing
        s = self.shape = shape
        like = {"dtype": dtype, "device": device}
        kv = lambda n, width: torch.empty(s.B, n, s.G, width, **like)
        n_cmp = max(num_compressed(s.S, s.l, s.d), 1)
        self.q = torch.empty(s.B, s.S, s.HQ, s.D, **like)
        self.do = torch.empty(s.B, s.S, s.HQ, s.Dv, **like)
        self.k_cmp, self.v_cmp = kv(n_cmp, s.D), kv(n_cmp, s.Dv)
        self.k_sel, self.v_sel = kv(s.S, s.D), kv(s.S, s.Dv)
        self.k_win, self.v_win = kv(s.S, s.D), kv(s.S, s.Dv)
        self.gates = torch.empty(s.B, s.S, s.HQ, 3, **like)
        self.at = sampled(shape, samples)
        self.blocks: Tensor | None = None

    @cached_property
    def rows(self) -> Tensor:
        """`at` on the device of the inputs."""
        return torch.tensor(self.at, device=self.q.device)

    @property
    def compared(self) -> str:
        """How much of the result is held against the oracle, in words."""
        return f"{len(self.at)} of {self.shape.S} queries"

    def refill(self, seed: int) -> None:
        gen = torch.Generator(self.q.device).manual_seed(seed)
        for x in self.inputs():
            x.detach().normal_(generator=gen)
        self.gates.detach().uniform_(generator=gen)
        if self.sharing == "shared":
            drift(self.q.detach(), gen)
        elif self.sharing == "documents":
            keep_to_documents(self.q.detach(), self.k_cmp.detach(), self.shape.d, gen)
        self.blocks = None

    def renew(self, seed: int, names: tuple[str, ...] = ("q",)) -> None:
        """Other numbers in the sampled rows of these inputs; the few queries among them then share
        nothing with their neighbours."""
        gen = torch.Generator(self.q.device).manual_seed(seed)
        for name in names:
            renew_rows(getattr(self, name), self.rows, gen)

    def inputs(self) -> list[Tensor]:
        return [self.q, self.k_cmp, self.v_cmp, self.k_sel, self.v_sel, self.k_win, self.v_win,
                self.gates, self.do]  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        s = self.shape
        return dict(l=s.l, d=s.d, l_sel=s.l_sel, n_sel=s.n_sel, n_init=1, n_local=2)

    def forward(self, op: str) -> Any:
        from nsa.kernels import prefill

        s = self.shape
        if op == "full":
            out, aux = prefill.nsa_prefill_triton(*self.inputs()[:8], **self.sizes, window=s.w)
            self.blocks = aux["block_indices"]
            return out
        cmp = partial(prefill.compressed_attention_triton, self.q, self.k_cmp, self.v_cmp)
        if op == "cmp":
            return cmp(l=s.l, d=s.d)[0]
        if op == "win":
            return prefill.sliding_attention_triton(self.q, self.k_win, self.v_win, window=s.w)[0]
        if op == "sel":
            return prefill.selection_blocks_triton(
                self.q, self.k_sel, self.v_sel, self.blocks, block_size=s.l_sel, is_ascending=True
            )
        if self.lse is None:
            self.lse = cmp(l=s.l, d=s.d)[1]
        return prefill.select_blocks_triton(self.q, self.k_cmp, self.lse, **self.sizes)

    lse: Tensor | None = None

    def prepare(self, op: str) -> None:
        """What an op gets from the one before it, outside of the clock."""
        from nsa.kernels import prefill

        s = self.shape
        self.lse = None
        if op in ("sel", "select"):
            _, self.lse = prefill.compressed_attention_triton(
                self.q.detach(), self.k_cmp.detach(), self.v_cmp.detach(), l=s.l, d=s.d
            )
        if op == "sel":
            self.blocks = prefill.select_blocks_triton(self.q, self.k_cmp, self.lse, **self.sizes)

    def leaves(self, op: str) -> list[Tensor]:
        names = {"cmp": ("q", "k_cmp", "v_cmp"), "win": ("q", "k_win", "v_win"),
                 "sel": ("q", "k_sel", "v_sel")}.get(op)  # fmt: skip
        return [getattr(self, n) for n in names] if names else self.inputs()[:8]

    def where(self, t: int) -> tuple[int, int, int]:
        """First row, and first compressed row, of query t's sequence, and its position there."""
        return 0, 0, t

    def row(self, part: str, t: int, q: Tensor, rows: Take) -> Tensor:
        """The right output of the query q at t; rows: the inputs, in the dtype that is wanted."""
        first, first_cmp, at = self.where(t)

        def take(name: str, a: int, b: int) -> Tensor:
            begin = first_cmp if name.endswith("cmp") else first
            return rows(name, begin + a, begin + b)

        chosen = None if self.blocks is None else self.blocks[:, t : t + 1]
        return row_output(part, self.shape, at, q, take, chosen)

    @torch.no_grad()
    def exact(self, op: str, dtype: torch.dtype = torch.float64) -> Tensor:
        """Results of the sampled queries [B, n, HQ, Dv] by plain attention in `dtype`."""
        rows = lambda name, a, b: getattr(self, name)[:, a:b].detach().to(dtype)
        return torch.cat([self.row(op, t, rows("q", t, t + 1), rows) for t in self.at], 1)

    def block_quality(self, chosen: Tensor) -> Tensor:
        """Per sampled query and group [B, n, G]: the chosen blocks' scores over the best possible.

        Scores in fp64 by Eq. 9 and 10. 1 is right; blocks that must be there and are not, a
        repetition or a block from the future give 0. Ties may choose either block.
        """
        s, rows = self.shape, []
        for t in self.at:
            q = self.q[:, t : t + 1].double()
            best = select.select_blocks(q, self.k_cmp.double(), **self.sizes, q_start=t)[:, 0]
            scores = select.group_block_scores(
                q, self.k_cmp.double(), l=s.l, d=s.d, l_sel=s.l_sel,
                n_blocks=-(-s.S // s.l_sel), q_start=t,
            )[:, 0]  # fmt: skip
            got, own = chosen[:, t], t // s.l_sel
            legal = (got >= 0).sum(-1) == (best >= 0).sum(-1)
            legal &= (got <= own).all(-1)
            ordered = got.sort(-1).values
            legal &= ~((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(-1)
            for block in {0, own, max(own - 1, 0)}:
                legal &= (got == block).any(-1)
            last = scores.shape[-1] - 1  # a kernel that is wrong may name any block
            sums = [(scores.gather(-1, b.clamp(0, last).long()) * (b >= 0)).sum(-1)
                    for b in (got, best)]  # fmt: skip
            ratio = torch.where(sums[1] > 0, sums[0] / sums[1].clamp_min(1e-300), 1.0)
            rows.append((ratio * legal)[:, None])
        return torch.cat(rows, 1).float()


class Pack(Prefill):
    """One sequence of half the tokens, packed with as many tokens in sequences of SHORT each."""

    SHORT = 16

    def __init__(self, shape: Shape, *how: Any, **more: Any) -> None:
        super().__init__(shape, *how, **more)
        s, self.long = shape, shape.S // 2
        begins = [0, *range(self.long, s.S, self.SHORT)]
        self.cu = torch.tensor([*begins, s.S], dtype=torch.int32, device=self.q.device)
        self.cu_cmp = cu_seqlens_compressed(self.cu, s.l, s.d)
        self.begins, self.begins_cmp = begins, self.cu_cmp.tolist()
        rows = self.begins_cmp[-1]
        self.k_cmp, self.v_cmp = (x[:, :rows].contiguous() for x in (self.k_cmp, self.v_cmp))

    def where(self, t: int) -> tuple[int, int, int]:
        i = bisect.bisect_right(self.begins, t) - 1
        return self.begins[i], self.begins_cmp[i], t - self.begins[i]

    def _packed(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """out and blocks of sequences first .. last."""
        from nsa.kernels import prefill

        cu = self.cu[first : last + 1] - self.cu[first]
        rows = slice(self.begins[first], self.begins[last] if last < len(self.begins) else None)
        of_cmp = slice(self.begins_cmp[first], self.begins_cmp[last])
        names = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
        xs = [getattr(self, n)[0, of_cmp if n.endswith("cmp") else rows] for n in names]
        out, aux = prefill.nsa_prefill_triton(
            *xs, **self.sizes, window=self.shape.w, cu_seqlens=cu,
            max_seqlen=self.SHORT if first else self.long,
        )  # fmt: skip
        return out[None], aux["block_indices"][None]

    def forward(self, op: str) -> Tensor:
        out, self.blocks = self._packed(0, len(self.begins))
        return out

    def parts(self) -> Tensor:
        """The same in two calls: of the long sequence, and of the short ones."""
        parts = zip(self._packed(0, 1), self._packed(1, len(self.begins)), strict=True)
        out, self.blocks = (torch.cat(x, 1) for x in parts)
        return out


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, 1, HQ, D] over all of k [B, N, G, D], v: softmax attention in the tensors' dtype."""
    if k.shape[1] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    rows = q.unflatten(2, (k.shape[1], -1)).squeeze(1)  # [B, G, h, D]
    scores = rows @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ v).flatten(1, 2)[:, None]


def row_output(
    part: str, sizes: Any, t: int, q: Tensor, take: Take, blocks: Tensor | None
) -> Tensor:
    """The right output of a query q [B, 1, HQ, D] at position t of its sequence, by plain
    attention. part: cmp, sel, win, full (their gated sum), or dense.

    take(name, a, b): rows a .. b of the sequence's k_cmp, ..., v_win, gates. blocks: those chosen
    for the query [B, 1, G, n]. sizes: with l, d, l_sel, w.
    """
    over = lambda name, a, b: attend(q, take(f"k_{name}", a, b), take(f"v_{name}", a, b))
    if part == "dense":
        return over("sel", 0, t + 1)
    if part == "cmp":
        return over("cmp", 0, visible_compressed(t, sizes.l, sizes.d))
    if part == "win":
        return over("win", max(0, t + 1 - sizes.w), t + 1)
    if part == "sel":
        at = torch.tensor([t], device=q.device)
        clean = select.clean_ranges(select.blocks_to_ranges(blocks, sizes.l_sel, at), t + 1)
        k, v = take("k_sel", 0, t + 1), take("v_sel", 0, t + 1)
        return reference.selection_attention(q, k, v, clean)
    gates = take("gates", t, t + 1)
    return sum(
        gates[..., i : i + 1] * row_output(branch, sizes, t, q, take, blocks)
        for i, branch in enumerate(("cmp", "sel", "win"))
    )


def sampled_gradients(x: Prefill, part: str, dtype: torch.dtype) -> list[Tensor]:
    """Gradients of the sampled queries' outputs alone, by plain attention in `dtype`.

    The first is dq of these queries [B, n, HQ, D]; then those of the part's keys, values and
    gates, whole, as if every other query had do = 0.
    """
    names = {"cmp": ("k_cmp", "v_cmp"), "win": ("k_win", "v_win"), "sel": ("k_sel", "v_sel"),
             "dense": ("k_sel", "v_sel")}.get(part) or (
        "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")  # fmt: skip
    leaf = lambda t: t.detach().to(dtype).requires_grad_()
    q = leaf(x.q[:, x.at])
    leaves = {n: leaf(getattr(x, n)) for n in names}
    rows = lambda name, a, b: leaves[name][:, a:b]
    total = sum(
        (x.row(part, t, q[:, i : i + 1], rows) * x.do[:, t : t + 1].to(dtype)).sum()
        for i, t in enumerate(x.at)
    )
    return list(torch.autograd.grad(total, [q, *leaves.values()]))


class Projections:
    """A layer's projections, which the rotary turn takes apart, and its results in fp64."""

    BASE = 10000.0

    def __init__(self, shape: Shape, device: str = "cuda", dtype: Any = torch.bfloat16) -> None:
        s = self.shape = shape
        like = {"dtype": dtype, "device": device}
        self.widths = s.HQ * s.D, 3 * s.G * s.D, 3 * s.G * s.Dv
        self.qkv = torch.empty(s.B, s.S, sum(self.widths), **like)
        kv = [torch.empty(s.B, s.S, s.G, width, **like) for width in 3 * (s.D, s.Dv)]
        self.do = [torch.empty(s.B, s.S, s.HQ, s.D, **like), *kv]
        self.positions = torch.arange(s.S, device=device)
        self.at = sampled(shape, 12)
        self.sampled_rows = torch.tensor(self.at, device=device)

    def refill(self, seed: int) -> None:
        gen = torch.Generator(self.qkv.device).manual_seed(seed)
        for x in self.inputs():
            x.detach().normal_(generator=gen)

    def renew(self, seed: int, backward: bool) -> None:
        """Other numbers in the sampled tokens of what the forward, or the backward, is given."""
        gen = torch.Generator(self.qkv.device).manual_seed(seed)
        for x in self.do if backward else [self.qkv]:
            renew_rows(x, self.sampled_rows, gen)

    def inputs(self) -> list[Tensor]:
        return [self.qkv, *self.do]

    def forward(self) -> tuple[Tensor, ...]:
        from nsa.kernels.prefill import split_turned_triton

        s = self.shape
        sizes = dict(heads=s.HQ, groups=s.G, d_k=s.D, d_v=s.Dv, rope_base=self.BASE)
        return split_turned_triton(self.qkv, self.positions, **sizes)

    def rows(self, parts: tuple[Tensor, ...]) -> Tensor:
        """The sampled tokens of the seven parts, side by side: q, k and v of cmp, sel, win."""
        return torch.cat([x[:, self.sampled_rows].flatten(-2) for x in parts], -1)

    def exact(self, dtype: torch.dtype = torch.float64, backward: bool = False) -> Tensor:
        """rows() of the forward, or the sampled rows of qkv's gradient, by complex numbers."""
        s = self.shape
        q, k, v = self.qkv.detach()[:, self.at].double().split(self.widths, -1)
        turned, moved = [q, *k.chunk(3, -1)], v.chunk(3, -1)
        if backward:
            q, *kv = (x.detach()[:, self.at].double().flatten(-2) for x in self.do)
            turned, moved = [q, *kv[::2]], kv[1::2]
        i = torch.arange(s.D // 2, dtype=torch.float64, device=q.device)
        angle = self.positions[self.at].double()[:, None] * self.BASE ** (-2 * i / s.D)
        turn = torch.polar(torch.ones_like(angle), -angle if backward else angle)[:, None]
        for n, x in enumerate(turned):
            a, b = x.unflatten(-1, (-1, s.D)).chunk(2, -1)
            z = torch.complex(a.contiguous(), b.contiguous()) * turn
            turned[n] = torch.cat([z.real, z.imag], -1).flatten(-2)
        q, *k = turned
        pairs = [x for pair in zip(k, moved, strict=True) for x in pair]
        return torch.cat([q, *k, *moved] if backward else [q, *pairs], -1).to(dtype)
