"""The prefill operators under torch.compile, fake tensors and activation checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nsa.config import NSAConfig
from nsa.kernels import prefill
from nsa.module import NSAAttention
from nsa.tests.cases import NAMES
from nsa.tests.helpers import TRITON, make_block_indices, make_layer
from nsa.tests.test_export import check_compiled

pytestmark = [pytest.mark.kernel, pytest.mark.core]
SIZES = dict(l=8, d=4, l_sel=16, n_sel=3, n_init=1, n_local=2, window=9)
S, G, H, D = 33, 2, 2, 16


def inputs(device: str) -> list[torch.Tensor]:
    tensors = make_layer(S, G * H, G, D, dtype=torch.float16, device=device)
    return [t.requires_grad_() for t in tensors]


def layer(*tensors: torch.Tensor) -> torch.Tensor:
    return prefill.nsa_prefill_triton(*tensors, **SIZES)[0]


def gradients(fn, tensors):
    out = fn(*tensors)
    return out, torch.autograd.grad(out, tensors, torch.ones_like(out))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_operators_pass_opcheck(kernel_device):
    """Schemas, fake kernels and autograd registrations agree with what the operators do."""
    x, ops, scale = inputs(kernel_device), torch.ops.nsa, D**-0.5
    q, k_cmp, v_cmp, k, v, *_ = x
    blocks = make_block_indices("random", 1, S, G, 3, 16, device=kernel_device)
    span = 0, 8, 4, scale, None, None, 0
    q_, k_, v_ = (t.detach() for t in x[:3])
    lse = ops.span_attention(q_, k_, v_, *span)[1]
    for op, args in (
        (ops.span_attention, (q, k_cmp, v_cmp, *span)),
        (ops.block_attention, (q, k, v, blocks, 16, scale, None, 0, 0)),
        (ops.block_select, (q_, k_, lse, 8, 4, 16, 3, 1, 2, scale, None, None, 0, 0)),
        (ops.prefill, (*x, [8, 4, 16, 3, 1, 2, 9, H], scale, None, 0, 0)),
    ):
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(op.default, args, test_utils=checks)


@pytest.mark.parametrize("traced", [
    lambda *x: torch.compile(layer, backend="aot_eager", fullgraph=True)(*x),
    lambda *x: checkpoint(layer, *x, use_reentrant=False),
], ids=["compiled", "checkpointed"])  # fmt: skip
def test_a_traced_layer_is_the_same(traced, kernel_device):
    """aot_eager traces forward and backward through the fake kernels, in one graph."""
    want, want_grads = gradients(layer, inputs(kernel_device))
    got, got_grads = gradients(traced, inputs(kernel_device))
    assert torch.equal(got, want)
    for name, a, b in zip(NAMES, got_grads, want_grads, strict=True):
        assert torch.equal(a, b), name


def test_kernels_compiled_for_any_length(kernel_device):
    torch.manual_seed(0)
    config = NSAConfig(dim=32, heads=2, groups=1, d_k=16, d_v=16, l=8, d=4, l_sel=16, n_sel=3, w=9)
    layer = NSAAttention(config, backend="triton", flags=TRITON).to(kernel_device, torch.float16)
    close = dict(atol=4e-3, rtol=4e-3)
    check_compiled(layer, (10, 18, 13), torch.float16, kernel_device, close)
