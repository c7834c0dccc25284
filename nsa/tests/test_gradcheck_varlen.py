"""Gradients of every branch, of rows of all lengths too, against finite differences."""

from __future__ import annotations

import pytest
import torch

import nsa
from nsa import launches
from nsa.flags import Flags
from nsa.kernels.triton_sel_kernel import selection_attention_triton, selection_ranges_triton
from nsa.tests.helpers import make_block_indices, make_qkv, make_ranges, randn
from nsa.tests.sel_cases import inputs, oracle_ranges, rows_of

pytestmark = pytest.mark.core

# ---- branches on PyTorch's routes ----------------------------------------------------------------

# Of compressed attention queries 0 and 1 see no key: their gradient is zero, not NaN.
BRANCHES = {
    "sliding": (7, 7, lambda *x, **how: nsa.sliding_attention(*x, window=3, **how)),
    "compressed": (6, 4, lambda *x, **how: nsa.compressed_attention(*x, l=3, d=1, **how)[0]),
    "packed": (9, 9, lambda *x, **how: nsa.sliding_attention(
        *(t[0] for t in x), window=3, cu_seqlens=torch.tensor([0, 4, 5, 9]).int(), **how)),
}  # fmt: skip


def selected(**given):
    return lambda *x, **how: nsa.selection_attention(*x, **given, **how)


for kind in ("random", "ragged", "one_block"):
    blocks = make_block_indices(kind, 1, 7, 1, 2, 2, seed=1)
    BRANCHES[f"blocks {kind}"] = 7, 7, selected(block_indices=blocks, block_size=2)
for kind in ("mixed", "overlap", "some_empty", "inverted", "out_of_bounds"):
    BRANCHES[f"ranges {kind}"] = 5, 9, selected(ranges=make_ranges(kind, 1, 5, 1, 9, 6, seed=2))


@pytest.mark.parametrize("name", BRANCHES)
def test_gradcheck_of_branches(name, backend):
    S, Skv, run = BRANCHES[name]
    x = make_qkv(1, S, 2, 1, 4, 3, Skv=Skv, dtype=torch.float64, seed=3, requires_grad=True)
    check = torch.autograd.gradcheck
    assert check(lambda *x: run(*x, backend=backend), x, atol=1e-7, rtol=1e-5)


# ---- the wrapper and its kernels -----------------------------------------------------------------

SPANS = [[[0, 0], [0, 0]], [[2, 9], [5, 12]], [[0, 1], [19, 20]], [[0, 20], [3, 4]]]


@pytest.mark.parametrize("pack", [True, False])
def test_gradcheck_of_the_fallback_routes(pack):
    """fp64 has no kernel: packed SDPA, or the reference where packing is off."""
    leaves = inputs(torch.float64, G=1, Skv=20, D=2, Dv=4, grad=True)
    flags = Flags(use_sel_pack=pack)
    attend = lambda *x: selection_attention_triton(*x, rows_of(SPANS), flags=flags)
    assert torch.autograd.gradcheck(attend, leaves)


def test_gradcheck_of_the_kernels_along_directions(kernel_device):
    """The kernels compute in fp32, so the finite difference is taken of the fp64 oracle."""
    leaves = inputs(torch.float32, kernel_device, G=1, Skv=20, D=8, Dv=16, grad=True)
    ranges = rows_of(SPANS, kernel_device)
    grad_out = randn(1, 4, 1, 2, 16, seed=34, device=kernel_device)
    with launches.recording() as launched:
        out = selection_ranges_triton(*leaves, ranges)
        grads = torch.autograd.grad(out, leaves, grad_out)
    assert launched["_sel_attn_bwd_dq_kernel"] == launched["_sel_attn_bwd_dkdv_kernel"] == 1
    wide = [x.detach().double() for x in leaves]
    eps = 1e-5
    for i in range(3):
        for seed in range(3):
            step = torch.zeros_like(wide[i]) + randn(*wide[i].shape, seed=seed).to(wide[i])
            at = lambda sign, i=i, step=step: oracle_ranges(
                *[x + sign * eps * step if j == i else x for j, x in enumerate(wide)], ranges
            )
            slope = ((at(1) - at(-1)) / (2 * eps) * grad_out.double()).sum()
            got = (grads[i].double() * step).sum()
            assert (got - slope).abs() <= 1e-4 * (1 + slope.abs()), f"input {i} direction {seed}"
