"""The step's append in one launch: rotary turn and cache writes as PyTorch does them one by one."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from bench.parity import assert_parity
from nsa import attention, dispatch, launches, rungs
from nsa.cache import BranchKV, NSACache
from nsa.checks import apply_linear
from nsa.compress import MLPCompression, make_compression
from nsa.config import NSAConfig
from nsa.flags import Flags
from nsa.kernels.decode import emit
from nsa.module import GateMLP, NSAAttention
from nsa.parallel_cache import ParallelNSACache
from nsa.rotary import turn
from nsa.routes import RouteUnavailable
from nsa.tests.helpers import TRITON, assert_raises, left_for_the_collector, randn

KERNEL, F16 = "_decode_append_kernel", torch.float16
SMALL = NSAConfig(dim=24, heads=6, groups=2, d_k=24, d_v=8, l=8, d=4, l_sel=8, n_sel=3, w=12)
PAPER = NSAConfig(dim=16, heads=3, groups=1, d_k=192, d_v=128)
# More groups than a program of the append takes, rows wider than one that copies them.
WIDE = replace(SMALL, heads=6, groups=6, d_k=176)
BUFFERS = ("k_raw", "v_raw", "k_sel", "v_sel", "k_win", "v_win", "k_cmp", "v_cmp")


def layer_of(config, device, dtype=F16, phi="mlp"):
    torch.manual_seed(0)
    layer = NSAAttention(replace(config, phi=phi), backend="triton", flags=TRITON)
    return layer.to(device, dtype)


def tokens(layer, batch=2, T=1, seed=1):
    weight = layer.qkv.weight
    return randn(batch, T, layer.config.dim, seed=seed, dtype=weight.dtype, device=weight.device)


def parity(case, got, want, same, counts, kernels):
    assert_parity(
        case, case.partition("/")[0], got, want.detach(), same, path_requested="triton",
        path_taken="triton", launches=counts, expect_kernels=kernels, seed=0, limit_mae=1e-3,
    )  # fmt: skip


def caches_at(layer, lengths, max_len, **more):
    """Two equal caches whose sequences hold lengths[b] tokens: random rows, NaN in unused ones."""
    like = dict(device=layer.qkv.weight.device, dtype=layer.qkv.weight.dtype)
    pair = [NSACache(layer.config, len(lengths), max_len, **like, **more) for _ in range(2)]
    for cache in pair:
        for i, name in enumerate(BUFFERS):
            x = getattr(cache, name)
            x.copy_(randn(*x.shape, seed=i, **like))
            for b, n in enumerate(lengths):
                x[b, n:] = float("nan")
        cache.lengths = list(lengths)
        cache.lens.copy_(torch.tensor(lengths))
    return pair


def appended(layer, cache, x, kernels=True):
    """The cache with x appended, by kernels or by PyTorch; q, gates, and keys and values if so."""
    with torch.no_grad():
        if kernels:
            return cache.append_projected(layer.qkv(x), layer.phi_k, layer.phi_v)
        q, kv = layer._project_at(x, cache.angles(cache.positions(x.shape[1])))
        cache.append(kv, layer.phi_k, layer.phi_v)
        return q, kv


@pytest.mark.core
@pytest.mark.parametrize("config, T, end, always, phi, dtype", [
    (SMALL, 1, 40, True, "mlp", F16), (SMALL, 1, 4000, False, "mean", F16),
    (SMALL, 3, 40, True, "mean", F16), (SMALL, 8, 40, False, "mlp", torch.float32),
    (SMALL, 8, 40, True, "hooked", F16), (PAPER, 1, 160, False, "mlp", F16),
    (PAPER, 8, 160, False, "mlp", F16), (WIDE, 1, 40, True, "mean", F16),
])  # fmt: skip
def test_one_launch_and_what_is_due_are_pytorchs(config, T, end, always, phi, dtype, kernel_device):
    """Before the first block, at its edge, one short of it, in mid-sequence, at the last row."""
    l = config.l
    lengths = (0, l - T, l - T - 1 if T == 1 else 1, 2 * l + config.d + 1 - T, end - T)
    layer = layer_of(config, kernel_device, dtype, phi.replace("hooked", "mlp"))
    if phi == "hooked":
        doubled(layer.phi_v.inner)
    one, other = caches_at(layer, lengths, end)
    layer64 = deepcopy(layer).double()
    exact = caches_at(layer64, lengths, end)[0]
    for name in BUFFERS:  # rounded as the others' are
        getattr(exact, name).copy_(getattr(other, name))
    before = {name: getattr(one, name).clone() for name in BUFFERS[6:]}
    one.emit_always = other.emit_always = always
    x = tokens(layer, len(lengths), T, seed=4)
    with launches.recording() as counts:
        q, _ = appended(layer, one, x)
    same, kv = appended(layer, other, x, kernels=False)
    with torch.no_grad():
        wide = BranchKV(*(y.double() for y in vars(kv).values()))
        exact.append(wide, layer64.phi_k, layer64.phi_v)
        wide = layer.qkv(x).double().split(config.qkv_widths, -1)[0]
    at = torch.tensor(lengths, device=x.device)[:, None] + torch.arange(T, device=x.device)
    want = turn(wide.unflatten(-1, (config.heads, config.d_k)), one.angles(at))
    names = ("phi_inner", "phi_outer") if phi == "mlp" else ("raw", "emit")
    kernels = [f"_decode_{name}_kernel" for name in names]
    assert counts == dict.fromkeys([KERNEL, *kernels], 1)
    assert one.lengths == other.lengths and torch.equal(one.lens, other.lens)
    parity(f"append/{config.d_k}-T{T}", q, want, same, counts, [KERNEL])
    for name in BUFFERS[:6]:
        tol = 0 if name[0] == "v" else 2e-3
        a, b = getattr(one, name), getattr(other, name)
        torch.testing.assert_close(a, b, rtol=tol, atol=tol, equal_nan=True, msg=name)
    for name, was in before.items():
        got, same, want = (getattr(cache, name) for cache in (one, other, exact))
        made = ~torch.isclose(want, was.double(), rtol=0, atol=0, equal_nan=True).any(-1).any(-1)
        assert 0 < made.sum() < made.numel()
        torch.testing.assert_close(got[~made], was[~made], rtol=0, atol=0, equal_nan=True)
        case = f"compress/{phi}-{name[0]}{got.shape[-1]}-l{l}-T{T}"
        parity(case, got[made], want[made], same[made], counts, kernels)


class OneOfRanks(ParallelNSACache):
    """The cache of one of `world` ranks, which appends without any exchange."""

    def __init__(self, config, batch, max_len, world, rank, **how):
        self.world, self.rank = world, rank
        NSACache.__init__(self, config, batch, max_len, **how)


@pytest.mark.core
@pytest.mark.parametrize("phi, stored", [("mlp", "auto"), ("mean", "auto"), ("mlp", "fp8_e4m3")])
def test_each_rank_keeps_what_pytorch_has_it_keep(phi, stored, kernel_device):
    layer = layer_of(SMALL, kernel_device, F16, phi)
    lengths, kept = [0, 7, 33], dict(device=kernel_device, dtype=F16, kv_cache_dtype=stored)
    for rank in (0, 2):
        pair = [OneOfRanks(SMALL, 3, 60, 3, rank, **kept) for _ in range(2)]
        for cache in pair:
            cache.lengths, cache.emit_always = list(lengths), True
            cache.lens.copy_(torch.tensor(lengths))
        for seed in range(2):
            for cache, by_kernel in zip(pair, (True, False), strict=True):
                appended(layer, cache, tokens(layer, 3, 8, seed), by_kernel)
        for name in BUFFERS:
            one, other = (getattr(c, name).float() for c in pair)
            if name[2:] in ("sel", "cmp"):  # the last row takes what others keep
                one, other = one[:, :-1], other[:, :-1]
                assert other.any()
            torch.testing.assert_close(one, other, rtol=0.13 if "8" in stored else 2e-3, atol=2e-3)


@pytest.mark.core
@pytest.mark.parametrize("config, T, phi, dtype", [
    (SMALL, 1, "mlp", F16), (SMALL, 3, "mean", F16), (WIDE, 2, "mlp", torch.float32),
])  # fmt: skip
def test_e4m3_rows_are_those_of_pytorch(config, T, phi, dtype, kernel_device):
    """Numbers beyond 448 descales and NaN among them; where PyTorch's rounding of what is stored
    differs in the last bit of dtype, the next number of e4m3 may be taken."""
    l, layer = config.l, layer_of(config, kernel_device, dtype, phi)
    draw = lambda i: randn(5, config.groups, seed=i, device=kernel_device).abs() + 0.05
    scales = dict(k_descale=draw(0), v_descale=draw(1))
    lengths = (0, l - T, 1, 2 * l + config.d + 1 - T, 5 * l - T)
    one, other = caches_at(layer, lengths, 5 * l, kv_cache_dtype="fp8_e4m3", **scales)
    x = tokens(layer, len(lengths), T, seed=4)
    x[1] *= 1000
    x[2, T - 1, 0] = float("nan")
    with launches.recording() as counts:
        appended(layer, one, x)
    assert counts[KERNEL] == 1 and len(counts) == 3
    appended(layer, other, x, kernels=False)
    assert other.k_sel[1].double().abs().nan_to_num().max() == 448
    for name in BUFFERS:
        got, want = (getattr(cache, name).double() for cache in (one, other))
        torch.testing.assert_close(got, want, rtol=0.15, atol=2**-8, equal_nan=True, msg=name)
        same = torch.isclose(got, want, rtol=0, atol=0, equal_nan=True).double().mean()
        assert same == 1 if name in ("v_raw", "v_sel", "v_win") else same > 0.99, name


def test_a_layers_steps_over_e4m3_are_those_of_pytorch(kernel_device):
    layer = layer_of(SMALL, kernel_device)
    plain = NSAAttention(layer.config, backend="reference").to(kernel_device, F16)
    plain.load_state_dict(layer.state_dict())
    x, how = tokens(layer, 2, 32, seed=6), dict(k_descale=2**-7, v_descale=2**-6)
    both = [layer.make_cache(2, 40, kv_cache_dtype="fp8_e4m3", **how) for _ in range(2)]
    for cache in both:
        plain.prefill(x[:, :29], cache)
    for t in range(29, 32):  # the last completes a block
        with launches.recording() as counts:
            got = layer.step(x[:, t : t + 1], both[0])
        assert counts[KERNEL] == 1 and any("decode_" in n and n != KERNEL for n in counts)
        want = plain.step(x[:, t : t + 1], both[1])
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)


@pytest.mark.core
@pytest.mark.parametrize(
    "T, hidden, weights", [(1, None, F16), (3, 1100, F16), (1, 40, torch.float32)]
)
def test_gates_of_the_same_launch(T, hidden, weights, kernel_device):
    """Also of a hidden layer that no program holds at once, and of weights as autocast has them."""
    layer = layer_of(SMALL, kernel_device)
    layer.gate = GateMLP(SMALL.dim, SMALL.heads, hidden).to(kernel_device, weights)
    x = tokens(layer, 2, T, seed=5)
    with torch.no_grad(), torch.autocast(kernel_device, F16, weights != x.dtype):
        gate = layer.gate.inner(x), *layer.gate.for_kernel()
        assert gate[0].dtype == x.dtype and gate[1].dtype == weights
        cache = caches_at(layer, (9, 30), 40)[0]
        with launches.recording() as counts:
            _, gates = cache.append_projected(layer.qkv(x), layer.phi_k, layer.phi_v, gate)
        one, other = caches_at(layer, (9, 30), 40)
        got = layer.step(x, one)
        layer.gate.outer.register_forward_hook(hook)
        assert layer.gate.for_kernel() is None
        torch.testing.assert_close(got, layer.step(x, other), rtol=4e-3, atol=1e-3)
    wide, weight, bias = (y.double() for y in gate)
    want = torch.sigmoid(F.silu(wide) @ weight.T + bias).view_as(gates)
    with torch.no_grad():
        same = F.linear(F.silu(gate[0]), *(y.to(x.dtype) for y in gate[1:])).sigmoid()
    assert gates.dtype == x.dtype and gates.shape[2:] == (SMALL.heads, 3)
    parity(f"gates/{wide.shape[-1]}-T{T}", gates, want, same.view_as(gates), counts, [KERNEL])


def test_the_layers_step_takes_it_and_frees_its_memory(kernel_device, monkeypatch):
    layer = layer_of(SMALL, kernel_device)
    monkeypatch.setattr(GateMLP, "forward", lambda *_: pytest.fail("gates apart from the launch"))
    x, cache = tokens(layer), caches_at(layer, (9, 30), 40)[0]
    with launches.recording() as counts:
        layer.step(x, cache)
    assert counts[KERNEL] == 1 and cache.lengths == [10, 31]
    assert left_for_the_collector(lambda: layer.step(x, cache)) == []


def test_what_fails_behind_the_launch_appends_nothing(kernel_device):
    """A kernel that is to emit, or the model's own phi: the device's lengths go back as well."""
    layer = layer_of(SMALL, kernel_device)
    x, (cache, other) = tokens(layer), caches_at(layer, (7, 7), 40)
    layer.phi_k.register_forward_pre_hook(mock.Mock(side_effect=RuntimeError("no phi")))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no phi"):
            layer.step(x, cache)
        assert cache.lengths == cache.lens.tolist() == [7, 7] and not cache.counters.any()
    layer.phi_k = make_compression("mean", SMALL.d_k, SMALL.l, SMALL.d)
    torch.testing.assert_close(layer.step(x, cache), layer.step(x, other), rtol=0, atol=0)
    assert cache.lens.tolist() == [8, 8]


def doubled(linear):
    linear.register_forward_hook(lambda _, args, out: 2 * out)
    return linear


hook = lambda *_: None


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


weight_norm = torch.nn.utils.parametrizations.weight_norm
GATE = (lambda: GateMLP(24, 6)), [(18, 6), (18,)]
PHI = (lambda: make_compression("mlp", 8, 8, 4)), [(8, 8), (8, 64), (8,), (8, 8), (8,)]


@pytest.mark.parametrize("made, change", [
    *((GATE, change) for change in (
        lambda gate: gate.register_forward_pre_hook(hook),
        lambda gate: setattr(gate, "outer", Doubled(*reversed(gate.outer.weight.shape))),
        lambda gate: gate.outer.register_forward_hook(hook),
        lambda gate: weight_norm(gate.outer), lambda gate: gate.outer.double(),
        lambda gate: gate.outer.register_parameter("bias", None),
        lambda gate: setattr(gate.outer, "forward", gate.outer.forward))),
    *((PHI, change) for change in (
        lambda phi: phi.outer.register_forward_hook(hook),
        lambda phi: phi.register_forward_pre_hook(hook),
        lambda phi: weight_norm(phi.inner), lambda phi: phi.double())),
])  # fmt: skip
def test_a_changed_gate_or_phi_runs_as_it_is(made, change):
    make, shapes = made
    module = make()
    assert [tuple(y.shape) for y in module.for_kernel()] == shapes
    handle = torch.nn.modules.module.register_module_forward_hook(hook)  # sees all modules
    assert module.for_kernel() is None
    handle.remove()
    change(module)
    assert module.for_kernel() is None


@pytest.mark.parametrize("bias", [False, True])
def test_a_projection_that_is_more_than_its_weights_runs_as_it_is(bias):
    x, plain = randn(2, 3, 8, seed=1), torch.nn.Linear(8, 4, bias=bias)
    assert torch.equal(apply_linear(plain, x), plain(x))
    for changed in (Doubled(8, 4, bias=bias), doubled(torch.nn.Linear(8, 4, bias=bias))):
        changed.load_state_dict(plain.state_dict())
        torch.testing.assert_close(apply_linear(changed, x), 2 * plain(x))


def test_another_module_makes_the_gates(kernel_device):
    """And before anything is appended, so that what it raises leaves the cache as it was."""
    layer = layer_of(SMALL, kernel_device)
    x, (cache, other) = tokens(layer), caches_at(layer, (9, 30), 40)
    with torch.no_grad():
        layer.gate.outer.weight.zero_()
        layer.gate.outer.bias.zero_()
    want = layer.step(x, other)
    layer.gate = torch.nn.Identity()
    layer.gate.forward = mock.Mock(side_effect=RuntimeError("no gates"))
    with pytest.raises(RuntimeError, match="no gates"):
        layer.step(x, cache)
    assert cache.lengths == cache.lens.tolist() == [9, 30]
    layer.gate.forward = lambda x: x.new_full((2, 1, SMALL.heads, 3), 0.5)
    torch.testing.assert_close(layer.step(x, cache), want, rtol=0, atol=0)


@pytest.mark.parametrize("phi", [
    MLPCompression(SMALL.d_k, SMALL.l, SMALL.d), MLPCompression(SMALL.d_v, SMALL.l, SMALL.d // 2),
], ids=["of-keys", "stride"])  # fmt: skip
def test_a_phi_of_other_sizes_is_refused_as_by_pytorch(phi, kernel_device):
    """Here of values; its kernel would read what is not there."""
    layer = layer_of(SMALL, kernel_device)
    cache, phi = caches_at(layer, (7,), 40)[0], phi.to(kernel_device, F16)
    assert emit.learnt(layer.phi_v, cache, SMALL.d_v) and not emit.learnt(phi, cache, SMALL.d_v)
    if phi.d == SMALL.d:
        layer.phi_v = phi
        with pytest.raises(ValueError, match="x must have D="):
            layer.step(tokens(layer, 1), cache)
        assert cache.lengths == cache.lens.tolist() == [7]


# ---- when it is not taken, on any machine --------------------------------------------------------


def on_cpu(backend=None, flags=None, max_len=8):
    """A layer that PyTorch serves, and two caches of it."""
    layer = layer_of(SMALL, "cpu", torch.float32)
    layer.backend, layer.flags = backend, flags or Flags()
    return layer, layer.make_cache(1, max_len), layer.make_cache(1, max_len)


@pytest.mark.parametrize(
    "backend, flags", [("reference", TRITON), (None, TRITON), (None, Flags()), ("sdpa", TRITON)]
)
def test_without_the_policys_leave_pytorch_appends(backend, flags):
    layer, cache, _ = on_cpu()
    never = lambda: pytest.fail("projected for a kernel that is not allowed")
    args = never, cache, layer.phi_k, layer.phi_v, never
    found = attention.append_projected(*args, backend=backend, flags=flags)
    assert found == (None, None) and cache.length == 0


REFUSED = RuntimeError("no such instruction")
APPEND = "nsa.kernels.decode.append.append_turned"


@pytest.mark.parametrize("kernel, backend, error, hidden", [
    ("append", None, REFUSED, True), ("step", None, REFUSED, True),
    ("step", None, NotImplementedError("T"), True), ("append", "triton", REFUSED, False),
    *((kernel, None, torch.OutOfMemoryError("full"), False) for kernel in ("append", "step")),
    *(("append", None, error("the caller's"), False) for error in (ValueError, TypeError)),
    ("append", None, RuntimeError("CUDA error: an illegal memory access"), False),
])  # fmt: skip
def test_a_kernel_that_fails(kernel, backend, error, hidden, monkeypatch, capsys):
    """It served before. Told and not tried again, unless it is an error that no fallback may hide
    or the backend was asked for by name."""
    pytest.importorskip("triton")
    flags = TRITON if backend else Flags(debug_log=kernel == "append")
    layer, cache, plain = on_cpu(backend, flags)
    x, fails = randn(1, 1, 24, seed=2), mock.Mock(side_effect=error)
    if kernel == "append":
        monkeypatch.setattr(APPEND, fails)
        cache.fused_append[(backend, layer.flags)] = True
    else:
        monkeypatch.setattr(rungs, "step_triton", fails)
        cache.fused_step.add((backend, layer.flags))
    if not hidden:
        with pytest.raises(type(error), match=str(error)):
            layer.step(x, cache)
        assert cache.length == 0
        return
    for _ in range(2):
        assert torch.equal(layer.step(x, cache), layer.step(x, plain))
    assert fails.call_count == 1 and cache.length == 2 and not cache.fused_step
    if kernel == "append":
        told = "append.triton.fallback reason=launch_error error=RuntimeError:_no_such_instruction"
        assert capsys.readouterr().err.count(told) == 1


@pytest.mark.filterwarnings("ignore:nsa. the decode step's append on triton failed")
def test_a_kernel_that_fails_is_not_tried_again_for_the_next_cache(monkeypatch):
    pytest.importorskip("triton")
    fails = mock.Mock(side_effect=REFUSED)
    monkeypatch.setattr(APPEND, fails)
    taken = dispatch.Decision(dispatch.Branch.STEP, dispatch.Route.TRITON)
    monkeypatch.setattr(dispatch, "decide", lambda *_: taken)
    layer, _, _ = on_cpu()

    def tries(backend=None, **how):
        before, cache = fails.call_count, layer.make_cache(1, 8, **how)
        qkv = lambda: torch.zeros(1, 1, sum(SMALL.qkv_widths), dtype=cache.dtype)
        args = qkv, cache, layer.phi_k, layer.phi_v
        found = attention.append_projected(*args, backend=backend, flags=layer.flags)
        assert found == (None, None) and cache.length == 0
        return fails.call_count - before

    assert [tries(), tries(), tries("auto"), tries(dtype=torch.float64)] == [1, 0, 0, 1]


@pytest.mark.parametrize("needs", ["q", "gates"])
def test_a_gradient_is_that_of_prefill_or_refused(needs, kernel_device):
    """Also of a cache whose steps were fused before; the step's own kernels have none."""
    config = replace(SMALL, l_sel=16)
    layer = layer_of(config, kernel_device)
    cache, like = caches_at(layer, [7], 9)[0], dict(dtype=F16, device=kernel_device)
    draw = lambda n: randn(1, 1, 6, n, seed=n, **like)
    x = dict(q=draw(24), gates=draw(3).sigmoid())
    decode = lambda **how: attention.nsa_decode(x["q"], cache, None, x["gates"], **how)[0]
    cache.fused_step.add((None, TRITON))
    with launches.recording() as fused:
        want = decode(flags=TRITON)
    assert any(name.startswith("_decode") for name in fused)
    x[needs].requires_grad_()
    (plain,) = torch.autograd.grad(decode(backend="reference").float().sum(), x[needs])
    assert plain.any()
    for backend in (None, "triton"):
        out = decode(backend=backend, flags=TRITON)
        (grad,) = torch.autograd.grad(out.float().sum(), x[needs])
        torch.testing.assert_close(out, want, rtol=0, atol=2e-3)
        torch.testing.assert_close(grad, plain, rtol=2e-3, atol=2e-3)
    given = dict(x, cache=cache, softmax_scale=1.0, sizes=config.sizes())
    qkv = torch.zeros(1, 1, sum(config.qkv_widths), **like, requires_grad=True)
    append = lambda: cache.append_projected(qkv, layer.phi_k, layer.phi_v)
    words = "needs_grad.*a decode step has no gradient of q"
    assert_raises(
        (RouteUnavailable, words, lambda: rungs.step_triton(given, TRITON)),
        (ValueError, "qkv must need no gradient", append),
    )
    assert cache.lengths == [7]


def test_a_step_that_is_observed_is_decided_again(monkeypatch):
    monkeypatch.setattr(rungs, "step_triton", lambda *_: pytest.fail("nobody heard of it"))
    layer, cache, _ = on_cpu()
    cache.fused_step.add((None, layer.flags))
    with dispatch.trace() as taken:
        layer.step(randn(1, 1, 24, seed=2), cache)
    assert [t.branch for t in taken if t.branch is dispatch.Branch.STEP]
    with torch.autograd.forward_ad.dual_level():  # no kernel knows tangents
        layer.step(randn(1, 1, 24, seed=2), cache)


def test_bad_input_appends_nothing():
    layer, cache, _ = on_cpu("triton", TRITON, max_len=2)
    x = torch.zeros(1, 1, 24)
    append = lambda qkv, *gate: cache.append_projected(qkv, layer.phi_k, layer.phi_v, *gate)
    with torch.no_grad():
        gate = layer.gate.inner(torch.zeros(1, 2, 24)), *layer.gate.for_kernel()
        there = [y[:, :1].to("meta") if y.ndim == 3 else y for y in gate]
        qkv = layer.qkv(x)
        assert_raises(
            (TypeError, "qkv must have the cache's torch.float32", lambda: append(qkv.half())),
            (ValueError, r"qkv must be \[1, 1, 336\].* got \[3",
             lambda: append(qkv.expand(3, -1, -1))),
            (ValueError, "from 1 to max_step=8, got", lambda: append(qkv.expand(-1, 9, -1))),
            (ValueError, r"max_len=2 tokens, got 0 \+ 3", lambda: append(qkv.expand(-1, 3, -1))),
            (ValueError, r"gate must be hidden \[1, 1, width\].*\[1, 2, 6",
             lambda: append(qkv, gate)),
            (ValueError, "gate must be on qkv's cpu", lambda: append(qkv, there)),
            (ValueError, "x must have the cache's batch 1",
             lambda: layer.step(x.repeat(3, 1, 1), cache)),
            (ValueError, "x must be on the cache's cpu", lambda: layer.step(x.to("meta"), cache)),
        )  # fmt: skip
    assert cache.length == 0 and cache.lens.tolist() == [0]
