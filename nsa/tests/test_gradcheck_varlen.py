"""Gradients of selection attention against finite differences, rows of different lengths."""

from __future__ import annotations

import pytest
import torch

from nsa import launches
from nsa.flags import Flags
from nsa.kernels.triton_sel_kernel import selection_attention_triton, selection_ranges_triton
from nsa.tests.helpers import randn
from nsa.tests.sel_cases import oracle_ranges

pytestmark = pytest.mark.core

SPANS = [[[0, 0], [0, 0]], [[2, 9], [5, 12]], [[0, 1], [19, 20]], [[0, 20], [3, 4]]]


def inputs(dtype, device, D=8, Dv=16):
    kw = {"dtype": dtype, "device": device}
    q, k = randn(1, 4, 1, 2, D, seed=31, **kw), randn(1, 1, 20, D, seed=32, **kw)
    ranges = torch.tensor(SPANS, dtype=torch.int32, device=device)[None, :, None]
    return (q, k, randn(1, 1, 20, Dv, seed=33, **kw)), ranges


@pytest.mark.parametrize("pack", [True, False])
def test_gradcheck_of_the_fallback_routes(pack):
    """fp64 has no kernel: packed SDPA, or the reference where packing is off."""
    tensors, ranges = inputs(torch.float64, "cpu")
    leaves = [x.requires_grad_() for x in tensors]
    flags = Flags(use_sel_pack=pack)
    assert torch.autograd.gradcheck(
        lambda *x: selection_attention_triton(*x, ranges, flags=flags), leaves
    )


@pytest.mark.kernel
def test_gradcheck_of_the_kernels_along_directions(kernel_device):
    """The kernels compute in fp32, so the finite difference is taken of the fp64 oracle."""
    tensors, ranges = inputs(torch.float32, kernel_device)
    leaves = [x.clone().requires_grad_() for x in tensors]
    grad_out = randn(1, 4, 1, 2, 16, seed=34, device=kernel_device)
    with launches.recording() as launched:
        out = selection_ranges_triton(*leaves, ranges)
        grads = torch.autograd.grad(out, leaves, grad_out)
    assert launched["_sel_attn_bwd_dq_kernel"] == launched["_sel_attn_bwd_dkdv_kernel"] == 1
    wide = [x.double() for x in tensors]
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
