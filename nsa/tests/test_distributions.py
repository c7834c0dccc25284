"""Inputs that are not random normal numbers: every kernel of a branch against fp64, row by row,
beside PyTorch's attention in the same dtype.

A row's error is relative to its own largest number, so that a row of small ones counts as much as
one that sees an outlier.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import nsa
from bench.parity import assert_parity
from nsa import blocks, launches
from nsa.dispatch import interpreting
from nsa.tests.cases import BF16, F16, PAPER, WIDE, Shape, ends_of
from nsa.tests.helpers import TRITON, make_layer, randn

pytestmark = pytest.mark.kernel
REAL = torch.cuda.is_available() and not interpreting()  # kernels run as they are
NAMES = {"compressed": ("q", "k_cmp", "v_cmp")}


def shape(S: int, q_start: int, **sizes) -> Shape:
    """Of two sequences whose queries stand behind q_start keys."""
    return Shape((S,), q_start=q_start, batch=2, **dict(G=1, n_sel=4) | sizes)


LARGE = dict(**WIDE, dtype=BF16, **PAPER) | dict(n_sel=16)
MANY_TILES = shape(512, 20000, h=16, **LARGE)  # of compressed keys, whose maxima grow
SHAPES = [
    shape(37, 20), shape(45, 0, G=2, h=1),
    shape(512, 1000, G=2, h=16, **LARGE),
    MANY_TILES,
    # By keys, with sums in fp16: 16 heads, 8 and 4 (SPLIT_KEYS in blocks/tile_blocks.py).
    shape(2100, 8200, h=16, **LARGE), shape(1024, 5200, h=8, **LARGE),
    shape(1024, 5200, h=4, **LARGE),
]  # fmt: skip


def scaled(x: Tensor, size: float) -> None:
    """In place, within what the dtype holds."""
    x.copy_((x.double() * size).clamp(*(s * torch.finfo(x.dtype).max / 2 for s in (-1, 1))))


def spread(kind: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Outliers of the size that language models have."""
    large, wide = (300, 20) if k.dtype == F16 else (3000, 100)
    for x in (k, v):
        if kind in ("tokens", "both"):
            for token in (0, 3, k.shape[1] // 2, k.shape[1] * 2 // 3):
                scaled(x[:, token], large)
        if kind in ("channels", "both"):
            for channel in (5, 11):
                scaled(x[..., channel], wide)
    if kind == "peaked":
        scaled(q, 8)
    if kind == "apart":  # one sequence of the batch has nothing to do with the other
        scaled(v[1], 2.0**9 if v.dtype == F16 else 1e6)
        scaled(v[0], 2.0**-6 if v.dtype == F16 else 1e-4)
    if kind == "large":
        scaled(v, torch.finfo(v.dtype).max / 64)
    if kind == "small":
        scaled(v, 2.0**-6 if v.dtype == F16 else 1e-30)


KINDS = ["tokens", "channels", "both", "peaked", "apart", "large", "small"]
CORE = ("both", "peaked", "apart", "large")  # what every report runs
WITH_GRADIENTS = KINDS[:5]  # the others' do not fit the dtype
BRANCHES = {
    "compressed": lambda s, chosen, *x, **how: nsa.compressed_attention(*x, l=s.l, d=s.d, **how)[0],
    "sliding": lambda s, chosen, *x, **how: nsa.sliding_attention(*x, window=s.w, **how),
    "selected": lambda s, chosen, *x, **how: nsa.selection_attention(
        *x, chosen, block_size=s.l_sel, **how
    ),
}


def inputs(shape: Shape, kind: str, device: str) -> dict[str, Tensor]:
    kw, S = dict(dtype=shape.dtype, device=device), shape.lengths[0]
    keys = shape.q_start + S
    n_cmp = blocks.num_compressed(keys, shape.l, shape.d)
    x = {"q": randn(shape.batch, S, shape.G * shape.h, shape.D, seed=1, **kw)}
    for i, (more, n) in enumerate([("", keys), ("_cmp", n_cmp)]):
        k, v = (randn(shape.batch, n, shape.G, shape.D, seed=s + i, **kw) for s in (2, 4))
        spread("" if more and kind == "peaked" else kind, x["q"], k, v)
        x |= {"k" + more: k, "v" + more: v}
    return {**x, "blocks": shape.indices("random", device)}


def run(branch: str, shape: Shape, x: dict, grad_out: Tensor | None, dtype, backend: str) -> dict:
    """out, and gradients where grad_out is given, of a branch in that dtype by that backend."""
    names = NAMES.get(branch, ("q", "k", "v"))
    leaves = [x[n].detach().to(dtype).requires_grad_(grad_out is not None) for n in names]
    how = dict(q_start=shape.q_start, backend=backend, flags=TRITON)
    out = BRANCHES[branch](shape, x["blocks"], *leaves, **how)
    found = {"out": out.detach()}
    if grad_out is not None:
        grads = torch.autograd.grad(out, leaves, grad_out.to(dtype))
        found |= {f"d{n}": g for n, g in zip(names, grads, strict=True)}
    return found


def in_parts(branch: str, shape: Shape, x: dict, grad_out: Tensor | None) -> dict:
    """In fp64, one sequence of the batch at a time: a large shape's scores are 0.7 GB each."""
    parts = []
    for b in range(shape.batch):
        one = {n: t[b : b + 1] for n, t in x.items()}
        do = None if grad_out is None else grad_out[b : b + 1]
        parts.append(run(branch, shape, one, do, torch.float64, "reference"))
    return {n: torch.cat([p[n] for p in parts]) for n in parts[0]}


def by_row(x: Tensor, truth: Tensor) -> Tensor:
    """x with the largest number of each row of truth between 1 and 2; exact."""
    largest = truth.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(torch.where(largest > 0, largest, 1.0))[1] - 1
    return torch.ldexp(x.double(), -exponent)


def applies(shape: Shape, branch: str, kind: str) -> bool:
    if shape is SHAPES[1]:  # two groups are no matter of what is in them
        return kind == "both"
    if shape is MANY_TILES:
        return branch == "compressed" and kind not in WITH_GRADIENTS
    return branch == "selected" or shape.lengths[0] <= 512


def marks(shape: Shape, kind: str) -> list[pytest.MarkDecorator]:
    """Interpreted, outliers of tokens and of channels come together alone; a GPU runs all. Reports
    run sums by keys of fewer than 16 heads a group with one kind."""
    late = not REAL and kind in ("tokens", "channels")
    core = kind == "both" if shape.lengths[0] > 512 and shape.h < 16 else kind in CORE
    return [pytest.mark.core] * core + [pytest.mark.nightly] * late


CASES = [
    pytest.param(s, b, k, id=f"{s}-{b}-{k}", marks=marks(s, k))
    for s in SHAPES if s.big == REAL for b in BRANCHES for k in KINDS if applies(s, b, k)
]  # fmt: skip


@pytest.mark.parametrize(("shape", "branch", "kind"), CASES)
def test_rows_are_as_exact_as_pytorchs(shape, branch, kind, kernel_device):
    x = inputs(shape, kind, kernel_device)
    grad_out = None
    if kind in WITH_GRADIENTS:
        grad_out = randn(*x["q"].shape, seed=9, dtype=shape.dtype, device=kernel_device)
    with launches.recording() as counts:
        got = run(branch, shape, x, grad_out, shape.dtype, "triton")
    truth = in_parts(branch, shape, x, grad_out)
    torchs = run(branch, shape, x, grad_out, shape.dtype, "sdpa")
    for name, want in truth.items():
        ours, theirs, exact = (by_row(t, want) for t in (got[name], torchs[name], want))
        eps = torch.finfo(shape.dtype).eps
        if name == "out":
            # Twice the error of the other, in mean and in the worst row; and what rounding gives.
            limit = 2 * (theirs - exact).abs().mean().item() + eps / 8
            assert_parity(
                f"{branch}/{shape}/{kind}", f"{branch}-{kind}", ours.to(shape.dtype), exact,
                theirs.to(shape.dtype), path_requested="triton", path_taken="triton",
                launches=counts, limit_mae=limit, seed=1,
            )  # fmt: skip
            continue
        # On average, over rows that are no difference of numbers a thousand times as large.
        size = want.norm(dim=-1)
        some = size > 1e-3 * size.flatten(1).median(1).values[:, None, None]
        errors = [(t - exact).norm(dim=-1) / exact.norm(dim=-1) for t in (ours, theirs)]
        mine, its = (e[some].clamp(max=1.0).mean().item() for e in errors)
        assert mine <= 2 * its + eps, (name, mine, its)


@pytest.mark.core
@pytest.mark.parametrize("packed", [False, True])
def test_two_branches_may_pass_what_all_three_do_not(packed, kernel_device):
    """Of branches of 4e4, 4e4 and -4e4 the sum is 4e4; that of two does not fit fp16."""
    from nsa.kernels.prefill.fused import nsa_prefill_triton

    S, how = 72, dict(l=32, d=16, l_sel=64, n_sel=2, n_init=1, n_local=1, window=16)
    x = make_layer(S, 8, 2, 64, l=32, d=16, dtype=F16, device=kernel_device)
    for i, value in ((2, 4e4), (4, -4e4), (6, 4e4), (7, 1.0)):
        x[i].fill_(value)
    if packed:
        x, how = [t[0] for t in x], how | dict(cu_seqlens=ends_of([S], kernel_device), max_seqlen=S)
    out = nsa_prefill_triton(*x, **how)[0].view(S, 8, 64)
    assert (out[31:] == torch.tensor(4e4).half()).all() and not out[:31].any()
