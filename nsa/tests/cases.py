"""Problems that the tests of prefill share: sizes, inputs, and the one comparison of a variant with
the fp64 oracle, outputs and gradients. Selection by ranges: sel_cases.py."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from bench.parity import MAE_LIMIT, assert_parity
from nsa import blocks, launches, oracle, reference, select
from nsa.compress import mean_pool
from nsa.kernels.prefill.blocks import bwd_triton as blocks_bwd
from nsa.kernels.prefill.blocks import fwd_triton as blocks_fwd
from nsa.kernels.prefill.blocks import union_lists
from nsa.kernels.prefill.blocks.bwd_triton import block_attention_bwd
from nsa.kernels.prefill.blocks.fwd_triton import block_attention_fwd
from nsa.kernels.prefill.blocks.ops import sequence_begins
from nsa.kernels.prefill.blocks.selection import Selection
from nsa.kernels.prefill.blocks.union_lists import lists_for
from nsa.tests.helpers import deterministic, make_block_indices, randn

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
NAMES = ["q", "k_cmp", "v_cmp", "k", "v", "k_win", "v_win", "gates"]  # as nsa_attention takes them


@dataclass(frozen=True)
class Shape:
    """Sequence lengths (several: packed), heads and NSA sizes of one case; queries stand at q_start
    and on."""

    lengths: tuple[int, ...]
    G: int = 2
    h: int = 2
    D: int = 16
    Dv: int = 16
    dtype: torch.dtype = F16
    l: int = 8
    d: int = 4
    l_sel: int = 16
    n_sel: int = 3
    w: int = 11
    batch: int = 1
    q_start: int = 0
    big: bool = False  # a GPU's size
    apart: bool = False  # tensors of strides, each number beside a zero
    beyond: int = 0  # so many rows behind a pack are of no sequence, and hold NaN

    def __str__(self) -> str:
        size = "x".join(map(str, self.lengths)) + f"+{self.q_start}"
        size = f"{self.batch}-{size}-G{self.G}h{self.h}-D{self.D}v{self.Dv}-b{self.l_sel}"
        name = str(self.dtype).removeprefix("torch.")
        return f"{size}n{self.n_sel}-{name}" + "-apart" * self.apart

    @property
    def packed(self) -> bool:
        return len(self.lengths) > 1

    @property
    def sizes(self) -> dict[str, int]:
        return dict(l=self.l, d=self.d, l_sel=self.l_sel, n_sel=self.n_sel)

    @property
    def whole(self) -> dict[str, int]:
        """The arguments of nsa_prefill_triton that are no tensors."""
        return dict(self.sizes, n_init=1, n_local=2, window=self.w, **self.at)

    @property
    def at(self) -> dict[str, int]:
        return {"q_start": self.q_start} if self.q_start else {}

    @property
    def keys(self) -> tuple[int, ...]:
        """How many keys each sequence has."""
        return tuple(self.q_start + n for n in self.lengths) * self.batch

    @property
    def compressed(self) -> tuple[int, ...]:
        return tuple(blocks.num_compressed(n, self.l, self.d) for n in self.keys)

    def indices(self, kind: str, device: str) -> Tensor:
        """block_indices of each sequence, joined."""
        how = dict(q_start=self.q_start, device=device)
        x = torch.cat([
            make_block_indices(kind, self.batch, n, self.G, self.n_sel, self.l_sel, seed=i, **how)
            for i, n in enumerate(self.lengths)
        ], 1)  # fmt: skip
        return (x[0] if self.packed else x).contiguous()

    def begins(self, device: str) -> tuple[Tensor | None, Tensor | None]:
        """(cu_seqlens, first row of each token's sequence) of packed inputs."""
        if not self.packed:
            return None, None
        cu = ends_of(self.lengths, device)
        return cu, sequence_begins(cu, sum(self.lengths))


class Case(Shape):
    """A problem of kernels whose tiles on a GPU are longer than the sequences of small ones, so
    that these are the interpreter's alone."""

    interpreted = True


def ends_of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """cu_seqlens."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)


def strided(x: Tensor) -> Tensor:
    """The values of x, each beside a zero."""
    return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]


PAPER = dict(l=32, d=16, l_sel=64, w=512, big=True)
WIDE = dict(D=128, Dv=128)
SHAPES = [
    Shape((53,)),
    Shape((23,), batch=2, dtype=F32),
    Shape((5, 0, 35, 1, 9)),
    Shape((37,), G=1, h=3, D=24, Dv=16),
    Shape((7,), G=1, h=1, D=16, Dv=32, dtype=F32),
    Shape((50,), G=1, h=2, l=8, d=8, l_sel=32, n_sel=5, w=64),
    Shape((1000,), G=4, h=16, **WIDE, dtype=BF16, n_sel=8, **PAPER),
    Shape((2048,), G=1, h=16, D=192, Dv=128, dtype=BF16, n_sel=16, **PAPER),
    Shape((777,), batch=2, G=2, h=8, D=64, Dv=64, n_sel=4, **PAPER),
    Shape((1, 700, 63, 64, 65, 333), G=2, h=4, **WIDE, n_sel=4, **PAPER),
    Shape((600,), G=1, h=5, D=256, Dv=256, dtype=BF16, n_sel=4, **PAPER),
    Shape((600,), G=2, h=2, D=64, Dv=64, dtype=F32, n_sel=4, **PAPER),
    # The kernels for Hopper have tiles of their own for each number of heads.
    Shape((1531,), batch=2, G=2, h=4, **WIDE, n_sel=4, **PAPER),
    Shape((333,), G=1, h=8, **WIDE, dtype=BF16, n_sel=4, **PAPER),
    Shape((100,), G=1, h=64, **WIDE, dtype=BF16, n_sel=4, **PAPER),
    Shape((24,), apart=True),
    Shape((9, 15), apart=True),
]
# Queries behind keys: parts of a prompt.
CHUNKS = [
    Shape((18,), q_start=21),
    Shape((9,), q_start=29, batch=2, G=1, dtype=F32),
    Shape((30,), q_start=1, G=1, h=3, D=24, Dv=16, l=8, d=8, l_sel=32, n_sel=5, w=64),
]


class Inputs:
    """Tensors of a shape with all tokens in one dimension; `layout` gives them as kernels take
    them, `split` each sequence alone."""

    def __init__(self, shape: Shape, device: str, seed: int = 0) -> None:
        self.shape, self.device = shape, device
        self.seqs = shape.lengths * shape.batch
        self.tails: list[Tensor] = []
        self.stride = strided if shape.apart else lambda x: x
        HQ, kw = shape.G * shape.h, dict(dtype=shape.dtype, device=device)
        draw = lambda n, T, *dims: randn(T, *dims, seed=100 * seed + n, **kw)
        query = lambda n, *dims: draw(n, sum(self.seqs), HQ, *dims)
        key = lambda n, D: draw(n, sum(shape.keys), shape.G, D)
        self.q, self.do = query(1, shape.D), self.stride(query(2, shape.Dv))
        self.k, self.v = key(3, shape.D), key(4, shape.Dv)
        self.k_win, self.v_win = key(5, shape.D), key(6, shape.Dv)
        self.gates = query(7, 3).sigmoid()
        pool = lambda x: torch.cat(
            [mean_pool(part[None], shape.l, shape.d)[0] for part in self.split(x, "k")]
        ).to(shape.dtype)
        self.k_cmp, self.v_cmp = pool(key(8, shape.D)), pool(key(9, shape.Dv))

    def split(self, x: Tensor, name: str = "q") -> list[Tensor]:
        """Rows of the tensor of that name, by sequence."""
        shape = self.shape
        lengths = shape.compressed if name.endswith("cmp") else shape.keys
        return list(x.split(self.seqs if name[0] in "qg" else lengths))

    def layout(self, x: Tensor, name: str = "cmp") -> Tensor:
        """Return x in the layout of the kernels, packed or [B, ...]. A tensor with a row for each
        token gets rows of no sequence behind them, which hold NaN and go to `tails`."""
        if self.shape.beyond and not name.endswith("cmp"):
            tail = x.new_full((self.shape.beyond, *x.shape[1:]), math.nan)
            self.tails.append(tail.requires_grad_(x.requires_grad))
            x = torch.cat([x, tail])
        if not self.shape.packed:
            x = x.reshape(self.shape.batch, -1, *x.shape[1:])
        return self.stride(x.contiguous())

    def leaves(self, names: Sequence[str] = NAMES) -> list[Tensor]:
        """Fresh ones that need a gradient, in the kernels' layout."""
        return [self.layout(getattr(self, n), n).detach().clone().requires_grad_() for n in names]

    def packing(self, compressed: bool = False, longest: bool = False) -> dict:
        if not self.shape.packed:
            return {}
        cu = ends_of(self.shape.lengths, self.device)
        more = {"max_seqlen": max(self.shape.lengths) + 3} if longest else {}
        if compressed:
            cu_cmp = blocks.cu_seqlens_compressed(cu, self.shape.l, self.shape.d)
            more["cu_seqlens_cmp"] = self.stride(cu_cmp)
        return {"cu_seqlens": self.stride(cu), **more}

    def exact(self, plain: bool):
        """The oracle; it loops over tokens in Python, so that big shapes, and the computation in
        the same dtype, take the vectorised reference."""
        return reference if plain or self.shape.big else oracle

    def by_blocks(self, plain: bool, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
        lib, size = self.exact(plain), self.shape.l_sel
        if lib is oracle:
            ranges = oracle.blocks_to_ranges(chosen.cpu(), size, self.shape.q_start)
        else:
            positions = torch.arange(q.shape[1], device=chosen.device) + self.shape.q_start
            ranges = select.blocks_to_ranges(chosen, size, positions).to(q.device)
            ranges = select.clean_ranges(ranges, k.shape[1])
        return lib.selection_attention(q, k, v, ranges)


def flat(x: Tensor, like: Tensor) -> Tensor:
    return x.reshape(-1, *like.shape[1:]) if x.ndim > like.ndim else x


def expected(x: Inputs, names: Sequence[str], run: Callable, dtype: torch.dtype) -> list[Tensor]:
    """run(i, *tensors of sequence i as [1, ...]) on leaves in `dtype`: outputs, then gradients."""
    where = x.device if x.shape.big else "cpu"
    leaves = [getattr(x, n).detach().to(where, dtype).requires_grad_() for n in names]
    parts = [x.split(t, n) for t, n in zip(leaves, names, strict=True)]
    outs = [run(i, *(p[i][None] for p in parts)) for i in range(len(x.seqs))]
    out = torch.cat([o[0][0] for o in outs])
    out = out + sum(t[:0].sum() for t in leaves)  # on every leaf, also where no key is visible
    rest = [torch.cat([o[i][0] for o in outs]) for i in range(1, len(outs[0]))]
    grads = torch.autograd.grad(out, leaves, x.do.to(where, dtype))
    return [t.detach() for t in (out, *rest, *grads)]


def check(
    case: str, x: Inputs, names: Sequence[str], ours: Callable, theirs: Callable,
    kernels: Sequence[str], without_backward: Sequence[str] = (),
) -> None:  # fmt: skip
    """Outputs and gradients of `ours` beside those of `theirs` in fp64 and in the same dtype;
    without_backward: also the output where no gradient is asked for, and its kernels."""
    dtype, leaves = x.shape.dtype, [getattr(x, n).detach().clone().requires_grad_() for n in names]
    named, T, n = dict(zip(names, leaves, strict=True)), len(x.do), len(leaves)
    x.tails.clear()
    with launches.recording() as counts:
        result = ours(*(x.layout(t, n) for n, t in named.items()))
        result = result if isinstance(result, tuple) else (result,)
        out = flat(result[0], x.do)
        do = x.layout(x.do, "do").reshape(out.shape)
        grads = torch.autograd.grad(out, [*leaves, *x.tails[:-1]], do)
    assert not any(t.any() for t in (out[T:], *grads[n:])), "rows of no sequence"
    got = [out[:T], *(t.reshape(-1, *t.shape[-1:]) for t in result[1:]), *grads[:n]]
    want = expected(x, names, theirs, torch.float64)
    same = expected(x, names, lambda i, *t: theirs(i, *t, plain=True), dtype)

    def judge(label, g, w, s, counts, kernels):
        # Gradients grow with the number of rows that share a key; the mean is judged beside them.
        limit = MAE_LIMIT[dtype]
        if label not in ("out", "no_grad"):
            size = max(1.0, w.nan_to_num(posinf=0, neginf=0).abs().max().item())
            limit *= size if dtype == F32 else 2 * size
        assert_parity(
            f"{case}/{x.shape}/{label}", case, g, w.reshape(g.shape), s.reshape(g.shape),
            path_requested="triton", path_taken="triton", launches=counts, expect_kernels=kernels,
            limit_mae=limit, seed=0, rows=label != "lse",
        )  # fmt: skip

    labels = ["out", "lse"][: len(result)] + [f"d{n}" for n in names]
    for label, *tensors in zip(labels, got, want, same, strict=True):
        if tensors[1].numel():
            judge(label, *tensors, counts, kernels)
    if without_backward and T:
        with torch.no_grad(), launches.recording() as counts:
            out = flat(ours(*(x.layout(t.detach(), n) for n, t in named.items())), x.do)
        judge("no_grad", out[:T], want[0], same[0], counts, without_backward)


def tolerance(dtype: torch.dtype, atol: float | None = None) -> dict[str, float]:
    tol = 4e-3 if dtype == F16 else 2e-2
    return dict(rtol=tol, atol=tol if atol is None else atol)


GRADIENTS = {F32: 1e-5, F16: 2e-3, BF16: 2e-2}  # of kernels that add in another order


def close_gradients(got: Sequence[Tensor], want: Sequence[Tensor], tol: float) -> None:
    """Hold gradients of q, k and v against others, each to within tol of its largest number."""
    for name, a, b in zip("qkv", got, want, strict=False):
        size = b.abs().max().item()
        torch.testing.assert_close(
            a.float(), b.float(), rtol=tol, atol=tol * size, msg=lambda m, n=name: f"d{n}: {m}"
        )


class Problem:
    """Tensors of selection by blocks in the kernels' layout."""

    def __init__(
        self, case: Shape, kind: str, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.case, self.monkeypatch, self.saved = case, monkeypatch, None
        S = sum(case.lengths)
        lead = (S,) if case.packed else (case.batch, S)
        keys = lead if case.packed else (case.batch, case.q_start + S)
        draw = lambda seed, *shape: randn(*shape, seed=seed, dtype=case.dtype, device=device)
        HQ = case.G * case.h
        self.q, self.do = draw(1, *lead, HQ, case.D), draw(2, *lead, HQ, case.Dv)
        self.k, self.v = draw(3, *keys, case.G, case.D), draw(4, *keys, case.G, case.Dv)
        self.blocks = case.indices(kind, device)
        self.cu, self.begin = case.begins(device)
        self.packed = dict(cu_seqlens=self.cu)
        self.how = dict(
            block_size=case.l_sel, softmax_scale=1 / math.sqrt(case.D), seq_begin=self.begin,
            q_start=case.q_start,
        )  # fmt: skip

    @property
    def by(self) -> Selection:
        return Selection(self.blocks, **self.how)

    def forward(self, **how) -> tuple[tuple[Tensor, Tensor], dict[str, int]]:
        """(out, lse), and what was launched."""
        given = dict(q=self.q, k=self.k, v=self.v, block_indices=self.blocks)
        with launches.recording() as counts:
            found = block_attention_fwd(**given | self.how | self.packed | how)
        return found, counts

    def backward(self, dq: Tensor | None = None, **how) -> tuple[Sequence[Tensor], dict[str, int]]:
        """(dq, dk, dv), and what was launched. The forward runs at the first call alone."""
        how = self.how | self.packed | how
        self.saved = self.saved or self.forward(**how)[0]
        with launches.recording() as counts:
            found = block_attention_bwd(
                self.do, self.q, self.k, self.v, *self.saved, self.blocks, dq=dq, **how
            )
        return found, counts

    def poison(self, key: int, last: int) -> Tensor:
        """Make a number of K infinite and one of V NaN, in a row and in the last-th query's own.
        Returns which rows of the output [1, S, HQ] see one."""
        case = self.case
        position = torch.arange(sum(case.lengths), device=self.q.device) + case.q_start
        seen = torch.zeros(len(position), case.G, dtype=torch.bool, device=self.q.device)
        for row in (key, int(position[last])):
            self.k[0, row, :, 0], self.v[0, row, :, 1] = math.inf, math.nan
            seen |= (self.blocks[0] == row // case.l_sel).any(-1) & (row <= position)[:, None]
        assert seen.any() and not seen.all()
        return seen.repeat_interleave(case.h, 1)[None]

    def sink(self, row: int) -> Tensor:
        """Give a row of Q scores of -inf alone. Returns which rows of the output [.., HQ] it is."""
        self.k[..., 0] = self.k[..., 0].abs() + 1
        self.q.view(-1, *self.q.shape[-2:])[row, :, 0] = -math.inf
        return self.q[..., 0].isinf()

    @contextlib.contextmanager
    def limit(self, share: int | None) -> Iterator[None]:
        """Few tiles are enough for unions, and the limit is `share` where it is given."""
        with self.monkeypatch.context() as patch:
            patch.setattr(union_lists, "MIN_TILES", 0)
            if share is not None:
                patch.setattr(union_lists, "SHARE", {})
                patch.setattr(union_lists, "OTHER_SHARE", share)
            yield

    def lists(self, share: int | None):
        with self.limit(share):
            return lists_for("fwd", self.q, self.by)

    def run(self, share: int | None, *, unions: bool = True) -> dict[str, Tensor]:
        """out, lse and the gradients with a limit on unions. dQ goes by them as with many heads: by
        a pass of its own, which is that of deterministic algorithms."""
        with self.limit(share), deterministic(), self.monkeypatch.context() as patch:
            if unions:
                patch.setattr(Selection, "strict", False)
            else:
                for module in (blocks_fwd, blocks_bwd):
                    patch.setattr(module, "lists_for", lambda *a, **k: None)
            self.saved = None
            grads, _ = self.backward(use_gluon=False)
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (*self.saved, *grads), strict=True))
