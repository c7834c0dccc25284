"""The step's append in one launch: rotary turn and cache writes as PyTorch does them one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.parity import assert_parity
from nsa import attention, launches
from nsa.cache import NSACache
from nsa.config import NSAConfig
from nsa.flags import Flags
from nsa.module import NSAAttention
from nsa.tests.helpers import randn

KERNEL = "_decode_append_kernel"
TRITON = Flags(use_triton_sel=True, sel_triton_min_L=1, triton_sel_force=True)
SMALL = NSAConfig(dim=24, heads=6, groups=2, d_k=24, d_v=8, l=8, d=4, l_sel=8, n_sel=3, w=12)
PAPER = NSAConfig(dim=16, heads=3, groups=1, d_k=192, d_v=128)
BUFFERS = ("k_raw", "v_raw", "k_sel", "v_sel", "k_win", "v_win", "k_cmp", "v_cmp")


def layer_of(config, device, dtype, phi="mlp"):
    torch.manual_seed(0)
    layer = NSAAttention(replace(config, phi=phi), backend="triton", flags=TRITON)
    return layer.to(device, dtype)


def caches_at(layer, lengths, max_len):
    """Two equal caches whose sequences hold lengths[b] tokens: random rows, NaN in unused ones."""
    weight, pair = layer.qkv.weight, []
    for _ in range(2):
        cache = NSACache(
            layer.config, len(lengths), max_len, device=weight.device, dtype=weight.dtype
        )
        for i, name in enumerate(BUFFERS):
            x = getattr(cache, name)
            x.copy_(randn(*x.shape, seed=i, dtype=x.dtype, device=x.device))
            for b, n in enumerate(lengths):
                x[b, n:] = float("nan")
        cache.lengths = list(lengths)
        cache.lens.copy_(torch.tensor(lengths))
        pair.append(cache)
    return pair


@pytest.mark.kernel
@pytest.mark.core
@pytest.mark.parametrize("config, T, lengths", [
    (SMALL, 1, (0, 7, 30)), (SMALL, 3, (2, 11, 19)), (PAPER, 1, (1, 20_000)), (PAPER, 8, (640,)),
], ids=["small-1", "small-3", "paper-1", "paper-8"])  # fmt: skip
def test_one_launch_does_what_pytorch_does(config, T, lengths, kernel_device):
    dtype = torch.float16
    layer = layer_of(config, kernel_device, dtype)
    one, other = caches_at(layer, lengths, max(lengths) + 2 * T + 2)
    x = randn(len(lengths), T, config.dim, seed=3, dtype=dtype, device=kernel_device)
    with torch.no_grad(), launches.recording() as counts:
        q = one.append_projected(layer.qkv(x), layer.phi_k, layer.phi_v)
    with torch.no_grad():
        same, kv = layer._project_at(x, other.angles(other.positions(T)))
        other.append(kv, layer.phi_k, layer.phi_v)
        wide = layer.qkv(x).double().split(config.qkv_widths, -1)[0]
        wide = wide.unflatten(-1, (config.heads, config.d_k))
        from nsa.rotary import turn

        at = torch.tensor(lengths, device=x.device)[:, None] + torch.arange(T, device=x.device)
        want = turn(wide, one.angles(at))
    assert one.lengths == other.lengths and torch.equal(one.lens, other.lens)
    assert_parity(
        f"append/{config.d_k}-T{T}", "append", q, want, same, path_requested="triton",
        path_taken="triton", launches=counts, expect_kernels=[KERNEL], seed=0, limit_mae=1e-3,
    )  # fmt: skip
    for name in BUFFERS:
        a, b = getattr(one, name), getattr(other, name)
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3, equal_nan=True, msg=name)
        if name[0] == "v" and name != "v_cmp":
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.kernel
@pytest.mark.core
@pytest.mark.parametrize("T, always, phi", [
    (1, True, "mlp"), (1, False, "mean"), (8, True, "mean"), (8, False, "mlp"),
])  # fmt: skip
def test_due_tokens_are_those_of_pytorch(T, always, phi, kernel_device):
    """Before the first block, at its edge, one short of it, in mid-sequence, at the last row."""
    lengths = (0, SMALL.l - T, SMALL.l - T - 1 if T == 1 else 1, 21, 40 - T)
    layer = layer_of(SMALL, kernel_device, torch.float16, phi)
    one, other = caches_at(layer, lengths, 40)
    one.emit_always = other.emit_always = always
    x = randn(len(lengths), T, 24, seed=4, dtype=torch.float16, device=kernel_device)
    with torch.no_grad(), launches.recording() as counts:
        one.append_projected(layer.qkv(x), layer.phi_k, layer.phi_v)
        kv = layer._project_at(x, other.angles(other.positions(T)))[1]
        other.append(kv, layer.phi_k, layer.phi_v)
    assert counts["_decode_raw_kernel"] == counts["_decode_emit_kernel"] == 1
    for name in ("k_cmp", "v_cmp"):
        a, b = getattr(one, name), getattr(other, name)
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3, equal_nan=True, msg=name)


@pytest.mark.kernel
def test_the_layers_step_takes_it(kernel_device):
    layer = layer_of(SMALL, kernel_device, torch.float16)
    x = randn(2, 1, 24, seed=1, dtype=torch.float16, device=kernel_device)
    cache = caches_at(layer, (9, 30), 40)[0]
    with launches.recording() as counts:
        layer.step(x, cache)
    assert counts[KERNEL] == 1 and cache.lengths == [10, 31]


# ---- when it is not taken, on any machine --------------------------------------------------------


@pytest.mark.parametrize("backend, flags", [
    ("reference", TRITON), (None, TRITON), (None, Flags()), ("sdpa", TRITON),
])  # fmt: skip
def test_without_the_policys_leave_pytorch_appends(backend, flags):
    layer = layer_of(SMALL, "cpu", torch.float32)
    cache = layer.make_cache(1, 8)
    never = lambda: pytest.fail("projected for a kernel that is not allowed")
    q = attention.append_projected(
        never, cache, layer.phi_k, layer.phi_v, backend=backend, flags=flags
    )
    assert q is None and cache.length == 0


@pytest.fixture
def allowed(monkeypatch):
    """The policy allows the kernel; a stand-in fails in its place."""
    pytest.importorskip("triton")
    from nsa.kernels.decode import append

    calls = []

    def fails(*args):
        calls.append(args)
        raise allowed_error[0]

    allowed_error = [RuntimeError("no such instruction")]
    monkeypatch.setattr(append, "append_turned", fails)
    return calls, allowed_error


def test_a_kernel_that_fails_is_told_and_not_tried_again(allowed, capsys):
    calls, _ = allowed
    layer = layer_of(SMALL, "cpu", torch.float32)
    layer.backend, layer.flags = None, Flags(debug_log=True)
    cache, plain = layer.make_cache(1, 8), layer.make_cache(1, 8)
    cache.fused_append[(None, layer.flags)] = True
    x = randn(1, 1, 24, seed=2)
    for _ in range(2):
        assert torch.equal(layer.step(x, cache), layer.step(x, plain))
    assert len(calls) == 1 and cache.length == 2
    err = capsys.readouterr().err
    assert err.count("append.triton.fallback reason=launch_error") == 1
    assert "no_such_instruction" in err


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"),
                                   torch.OutOfMemoryError("full")])  # fmt: skip
def test_what_no_fallback_may_hide_is_raised(error, allowed):
    allowed[1][0] = error
    layer = layer_of(SMALL, "cpu", torch.float32)
    layer.backend, layer.flags = None, Flags()
    cache = layer.make_cache(1, 8)
    cache.fused_append[(None, layer.flags)] = True
    with pytest.raises(type(error)):
        layer.step(randn(1, 1, 24, seed=2), cache)
    assert cache.length == 0


def test_a_named_backend_raises_its_error(allowed):
    layer = layer_of(SMALL, "cpu", torch.float32)
    cache = layer.make_cache(1, 8)
    cache.fused_append[("triton", TRITON)] = True
    with pytest.raises(RuntimeError, match="no such instruction"):
        layer.step(randn(1, 1, 24, seed=2), cache)


def test_bad_input_appends_nothing():
    layer = layer_of(SMALL, "cpu", torch.float32)
    cache = layer.make_cache(1, 2)
    x = torch.zeros(1, 1, 24)
    append = lambda qkv: cache.append_projected(qkv, layer.phi_k, layer.phi_v)
    with torch.no_grad():
        with pytest.raises(TypeError, match="qkv must have the cache's torch.float32, got torch"):
            append(layer.qkv(x).half())
        with pytest.raises(ValueError, match=r"qkv must be \[1, 1, 336\].* got \[3, 1, 336\]"):
            append(layer.qkv(x).expand(3, -1, -1))
        with pytest.raises(ValueError, match=r"T from 1 to max_step=8, got \[1, 9, 336\]"):
            append(layer.qkv(torch.zeros(1, 9, 24)))
        with pytest.raises(ValueError, match=r"max_len=2 tokens, got 0 \+ 3"):
            append(layer.qkv(torch.zeros(1, 3, 24)))
    with pytest.raises(ValueError, match=r"x must have the cache's batch 1, got \[3, 1, 24\]"):
        layer.step(torch.zeros(3, 1, 24), cache)
    with pytest.raises(ValueError, match="x must be on the cache's cpu, got meta"):
        layer.step(torch.zeros(1, 1, 24, device="meta"), cache)
    assert cache.length == 0 and cache.lens.tolist() == [0]
