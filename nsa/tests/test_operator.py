"""Is an operator the launcher itself in eager calls, and one opaque node where something traces?"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from nsa.kernels.operator import operator
from nsa.tests.helpers import Watch


@operator("nsa_test::double")
def double(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    return x * n, x.sum()


@operator("nsa_test::double_bwd")
def double_bwd(grad: Tensor, n: int) -> Tensor:
    return grad * n


double.register_fake(lambda x, n: (torch.empty_like(x), x.new_empty(())))
double_bwd.register_fake(lambda grad, n: torch.empty_like(grad))


def keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.n = inputs[1]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


double.register_autograd(lambda ctx, dy, _: (double_bwd(dy, ctx.n), None), setup_context=keep)


def test_gradients_are_the_same_eager_traced_and_compiled():
    x = torch.randn(5, requires_grad=True)
    for call in (double, torch.compile(double, backend="aot_eager", fullgraph=True)):
        y, total = call(x, 3)
        assert y.requires_grad and not total.requires_grad
        (grad,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close((y, grad), (x * 3, torch.full((5,), 3.0)))
    seen = set()
    with Watch(lambda func, _: seen.add(func.name())):
        (grad,) = torch.autograd.grad(double(x, 3)[0].sum(), x)
    assert {"nsa_test::double", "nsa_test::double_bwd"} <= seen
    assert torch.equal(grad, torch.full((5,), 3.0))


def test_what_has_no_second_derivative_says_so():
    x = torch.randn(5, requires_grad=True)
    (grad,) = torch.autograd.grad(double(x, 3)[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        grad.sum().backward()


def test_an_eager_call_does_not_import_the_compiler():
    """It takes seconds. Gradients go by backward(): autograd.grad with gradients imports sympy."""
    code = (
        "import sys, torch\n"
        "from nsa.tests.test_operator import double\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "double(x, 2)[0].sum().backward()\n"
        "bad = {'torch._dynamo', 'torch._inductor', 'sympy'} & set(sys.modules)\n"
        "assert x.grad.tolist() == [2.0] * 3 and not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
