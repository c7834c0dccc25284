"""The gates of a decode step in one launch: those of PyTorch's three, and only where they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.parity import assert_parity
from nsa import launches
from nsa.config import NSAConfig
from nsa.flags import Flags
from nsa.module import GateMLP, NSAAttention
from nsa.tests.helpers import randn

KERNEL = "_decode_gate_kernel"
TRITON = Flags(use_triton_sel=True, sel_triton_min_L=1, triton_sel_force=True)
CONFIG = NSAConfig(
    dim=32, heads=6, groups=2, d_k=16, d_v=16, l=8, d=4, l_sel=16, n_sel=3, w=12
)
FP16, FP32, BF16 = torch.float16, torch.float32, torch.bfloat16


def truth(gate: GateMLP, hidden: torch.Tensor) -> torch.Tensor:
    h = hidden.double()
    h = h / (1 + (-h).exp())
    h = h @ gate.outer.weight.double().T + gate.outer.bias.double()
    return (1 / (1 + (-h).exp())).unflatten(-1, (gate.heads, 3))


@pytest.mark.kernel
@pytest.mark.core
@pytest.mark.parametrize("dtype", [FP16, FP32, BF16], ids=str)
@pytest.mark.parametrize("rows, heads, hidden", [
    ((1, 1), 64, 640), ((3, 1), 5, 40), ((2, 8), 6, 129), ((70, 1), 1, 1),
], ids=str)  # fmt: skip
def test_gates_agree_with_fp64(rows, heads, hidden, dtype, kernel_device):
    if kernel_device == "cpu" and dtype == BF16:
        pytest.skip("the interpreter's bf16 product is wrong")
    torch.manual_seed(1)
    gate = GateMLP(16, heads, hidden).to(kernel_device, dtype)
    x = 3 * randn(*rows, hidden, seed=2, dtype=dtype, device=kernel_device)
    with torch.no_grad(), launches.recording() as counts:
        got = gate.fused(x)
        again = gate.fused(x.mT.contiguous().mT)  # not contiguous
        want, same = truth(gate, x), gate.behind(x)
    assert got.shape == (*rows, heads, 3) and got.dtype == dtype and torch.equal(got, again)
    assert counts[KERNEL] == 2
    assert_parity(
        f"gate/{rows}-{heads}x{hidden}-{dtype}", "gate", got, want, same, path_requested="triton",
        path_taken="triton", launches=counts, expect_kernels=[KERNEL], seed=2,
    )  # fmt: skip


def stepped(change=lambda layer: None, dtype=FP16, device="cpu", **how):
    """Output of two steps, after the change, and their launches; then the same in PyTorch."""
    torch.manual_seed(0)
    layer = NSAAttention(CONFIG, **how).to(device, dtype)
    change(layer)
    x = randn(2, 20, 32, seed=1, dtype=dtype, device=device)
    found = []
    for backend in (layer.backend, "reference"):
        layer.backend = backend
        cache = layer.make_cache(2, 20)
        layer.prefill(x[:, :18], cache)
        with launches.recording() as counts:
            out = torch.cat([layer.step(x[:, i : i + 1], cache) for i in (18, 19)], 1)
        found.append((out, counts))
    assert not found[1][1]
    torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-2, atol=2e-3)
    return found[0][1]


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


class Open(nn.Module):
    """A user's own gate."""

    def forward(self, x):
        return x.new_ones(*x.shape[:-1], 6, 3)


def _another_class(layer):
    outer = layer.gate.outer
    layer.gate.outer = Halved(outer.in_features, outer.out_features).to(outer.weight)


def _another_gate(layer):
    layer.gate = Open()


def _no_bias(layer):
    layer.gate.outer.bias = None


def _hook_behind(layer):
    layer.gate.outer.register_forward_hook(lambda module, args, out: out + 1)


def _hook_before(layer):
    layer.gate.outer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _hook_on_the_gate(layer):
    layer.gate.register_forward_hook(lambda module, args, out: out * 0.5)


def _hook_inside(layer):
    layer.gate.inner.register_forward_hook(lambda module, args, out: out * 2)


@pytest.mark.kernel
@pytest.mark.parametrize("change, fused", [
    (lambda layer: None, True), (_hook_inside, True), (_another_class, False),
    (_another_gate, False), (_no_bias, False), (_hook_behind, False), (_hook_before, False),
    (_hook_on_the_gate, False),
], ids=["plain", "hook-inside", "class", "gate", "bias", "hook", "pre-hook", "hook-on-gate"])
def test_a_step_takes_it_where_nobody_else_has_a_say(change, fused, kernel_device):
    counts = stepped(change, device=kernel_device, backend="triton", flags=TRITON)
    assert counts.get(KERNEL, 0) == 2 * fused and counts["_decode_append_kernel"] == 2


@pytest.mark.kernel
def test_autocast_casts_by_itself(kernel_device):
    torch.manual_seed(0)
    gate = GateMLP(32, 6).to(kernel_device)
    hidden = randn(2, 1, gate.outer.in_features, seed=1, dtype=FP16, device=kernel_device)
    assert gate.fused(hidden) is None and gate.fused(hidden.float()) is not None


@pytest.fixture
def failing(monkeypatch):
    """The policy allows the kernel; a stand-in fails in its place."""
    pytest.importorskip("triton")
    from nsa.kernels.decode import gate

    calls, error = [], [RuntimeError("no such instruction")]

    def fails(*args):
        calls.append(args)
        raise error[0]

    monkeypatch.setattr(gate, "gate", fails)
    return calls, error


def step_with(layer, backend=None):
    layer.backend, layer.flags = backend, Flags(debug_log=True)
    cache = layer.make_cache(1, 8)
    cache.fused["gate", backend, layer.flags] = True
    return cache


def test_a_kernel_that_fails_is_told_and_not_tried_again(failing, capsys):
    layer = NSAAttention(CONFIG)
    cache, x = step_with(layer), randn(1, 1, 32, seed=2)
    plain = layer.make_cache(1, 8)
    for _ in range(2):
        assert torch.equal(layer.step(x, cache), layer.step(x, plain))
    assert len(failing[0]) == 1 and cache.length == 2
    err = capsys.readouterr().err
    assert err.count("gate.triton.fallback reason=launch_error") == 1
    assert "no_such_instruction" in err


@pytest.mark.parametrize("backend, error", [
    (None, RuntimeError("CUDA error: an illegal memory access")),
    (None, torch.OutOfMemoryError("full")), ("triton", RuntimeError("no such instruction")),
])  # fmt: skip
def test_what_no_fallback_may_hide_is_raised_before_anything_is_appended(backend, error, failing):
    failing[1][0] = error
    layer = NSAAttention(CONFIG)
    cache = step_with(layer, backend)
    with pytest.raises(type(error)):
        layer.step(randn(1, 1, 32, seed=2), cache)
    assert cache.length == 0
