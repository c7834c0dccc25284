"""Gradients of selection_attention_triton(): by which route, and none that nobody asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa import dispatch, launches
from nsa.flags import Flags
from nsa.kernels.triton_sel_kernel import selection_attention_triton, selection_ranges_triton
from nsa.tests.helpers import make_ranges
from nsa.tests.sel_cases import inputs


def test_allow_grad_decides_in_automatic_mode(kernel_device, monkeypatch):
    """With a gradient needed, NSA_SEL_TRITON_ALLOW_GRAD chooses between Triton and SDPA."""
    q, k, v = inputs(torch.float16, kernel_device)
    ranges = make_ranges("many", 1, 4, 2, 70, 40, device=kernel_device)
    real, on_cuda = dispatch.make_request, dict(device="cuda", capability=(9, 0))
    monkeypatch.setattr(
        dispatch, "make_request", lambda *a, **kw: replace(real(*a, **kw), **on_cuda)
    )
    for allow, route in ((False, "sdpa"), (True, "triton")):
        flags = Flags(use_triton_sel=True, sel_triton_min_L=1, sel_triton_allow_grad=allow)
        leaf = q.clone().requires_grad_()
        with dispatch.trace() as taken, launches.recording() as launched:
            selection_attention_triton(leaf, k, v, ranges, flags=flags).float().sum().backward()
        assert taken[0].route.value == route
        assert taken[0].fallback_reason == (None if allow else "needs_grad")
        assert bool(launched.get("_sel_attn_bwd_dq_kernel")) == allow
        assert leaf.grad.abs().sum() > 0
        with dispatch.trace() as taken, torch.no_grad():
            selection_attention_triton(leaf, k, v, ranges, flags=flags)
        assert taken[0].route.value == "triton", "no gradient is recorded here"


@pytest.mark.parametrize("frozen", ["q", "kv"])
def test_only_what_needs_a_gradient_is_computed(frozen, kernel_device):
    q, k, v = inputs(torch.float32, kernel_device)
    for x in (k, v) if frozen == "q" else (q,):
        x.requires_grad_()
    ranges = make_ranges("many", 1, 4, 2, 70, 40, device=kernel_device)
    with launches.recording() as launched:
        selection_ranges_triton(q, k, v, ranges).sum().backward()
    assert (q.grad is None) == (frozen == "q") and (k.grad is None) == (frozen == "kv")
    assert bool(launched.get("_sel_attn_bwd_dkdv_kernel")) == (frozen == "q")
