"""The step's append in one launch: rotary turn and cache writes as PyTorch does them one by one."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from bench.parity import assert_parity
from nsa import attention, launches, rungs
from nsa.cache import BranchKV, NSACache
from nsa.checks import apply_linear
from nsa.compress import MLPCompression, make_compression
from nsa.config import NSAConfig
from nsa.flags import Flags
from nsa.kernels.decode import emit
from nsa.module import GateMLP, NSAAttention
from nsa.routes import RouteUnavailable
from nsa.tests.helpers import left_for_the_collector, randn

KERNEL = "_decode_append_kernel"
TRITON = Flags(use_triton_sel=True, sel_triton_min_L=1, triton_sel_force=True)
SMALL = NSAConfig(dim=24, heads=6, groups=2, d_k=24, d_v=8, l=8, d=4, l_sel=8, n_sel=3, w=12)
PAPER = NSAConfig(dim=16, heads=3, groups=1, d_k=192, d_v=128)
# More groups than a program of the append takes, rows wider than one that copies them.
WIDE = replace(SMALL, heads=6, groups=6, d_k=176)
BUFFERS = ("k_raw", "v_raw", "k_sel", "v_sel", "k_win", "v_win", "k_cmp", "v_cmp")


def layer_of(config, device, dtype, phi="mlp"):
    torch.manual_seed(0)
    layer = NSAAttention(replace(config, phi=phi), backend="triton", flags=TRITON)
    return layer.to(device, dtype)


def caches_at(layer, lengths, max_len, **more):
    """Two equal caches whose sequences hold lengths[b] tokens: random rows, NaN in unused ones."""
    weight, pair = layer.qkv.weight, []
    for _ in range(2):
        cache = NSACache(
            layer.config, len(lengths), max_len, device=weight.device, dtype=weight.dtype, **more
        )
        for i, name in enumerate(BUFFERS):
            x = getattr(cache, name)
            x.copy_(randn(*x.shape, seed=i, dtype=weight.dtype, device=x.device))
            for b, n in enumerate(lengths):
                x[b, n:] = float("nan")
        cache.lengths = list(lengths)
        cache.lens.copy_(torch.tensor(lengths))
        pair.append(cache)
    return pair


def in_fp64(cache):
    like = dict(device=cache.lens.device, dtype=torch.float64)
    wide = NSACache(cache.config, cache.batch, cache.max_len, **like)
    for name in (*BUFFERS, "lens"):
        getattr(wide, name).copy_(getattr(cache, name))
    wide.lengths = list(cache.lengths)
    return wide


@pytest.mark.core
@pytest.mark.parametrize("config, T, lengths", [
    (SMALL, 1, (0, 7, 30)), (SMALL, 3, (2, 11, 19)), (PAPER, 1, (1, 4_000)), (PAPER, 8, (640,)),
], ids=["small-1", "small-3", "paper-1", "paper-8"])  # fmt: skip
def test_one_launch_does_what_pytorch_does(config, T, lengths, kernel_device):
    dtype = torch.float16
    layer = layer_of(config, kernel_device, dtype)
    one, other = caches_at(layer, lengths, max(lengths) + 2 * T + 2)
    x = randn(len(lengths), T, config.dim, seed=3, dtype=dtype, device=kernel_device)
    with torch.no_grad(), launches.recording() as counts:
        q, _ = one.append_projected(layer.qkv(x), layer.phi_k, layer.phi_v)
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


@pytest.mark.core
@pytest.mark.parametrize("config, T, always, phi, dtype", [
    (SMALL, 1, True, "mlp", torch.float16), (SMALL, 1, False, "mean", torch.float16),
    (SMALL, 8, True, "mean", torch.float16), (SMALL, 8, False, "mlp", torch.float32),
    (PAPER, 2, False, "mlp", torch.float16), (SMALL, 8, True, "hooked", torch.float16),
    (WIDE, 1, True, "mean", torch.float16),
])  # fmt: skip
def test_due_tokens_are_those_of_pytorch(config, T, always, phi, dtype, kernel_device):
    """Before the first block, at its edge, one short of it, in mid-sequence, at the last row."""
    l = config.l
    lengths = (0, l - T, l - T - 1 if T == 1 else 1, 2 * l + config.d + 1 - T, 5 * l - T)
    layer = layer_of(config, kernel_device, dtype, phi.replace("hooked", "mlp"))
    if phi == "hooked":
        layer.phi_v.inner.register_forward_hook(lambda module, args, out: 2 * out)
    one, other = caches_at(layer, lengths, 5 * l)
    exact, layer64 = in_fp64(other), deepcopy(layer).double()
    before = {name: getattr(one, name).clone() for name in ("k_cmp", "v_cmp")}
    one.emit_always = other.emit_always = always
    x = randn(len(lengths), T, config.dim, seed=4, dtype=dtype, device=kernel_device)
    with torch.no_grad(), launches.recording() as counts:
        one.append_projected(layer.qkv(x), layer.phi_k, layer.phi_v)
    with torch.no_grad():
        kv = layer._project_at(x, other.angles(other.positions(T)))[1]
        other.append(kv, layer.phi_k, layer.phi_v)
        wide = BranchKV(*(y.double() for y in vars(kv).values()))
        exact.append(wide, layer64.phi_k, layer64.phi_v)
    kernels = (
        ["_decode_phi_inner_kernel", "_decode_phi_outer_kernel"] if phi == "mlp"
        else ["_decode_raw_kernel", "_decode_emit_kernel"]
    )  # fmt: skip
    assert counts == dict.fromkeys([KERNEL, *kernels], 1)
    for name, was in before.items():
        got, same, want = (getattr(cache, name) for cache in (one, other, exact))
        made = ~torch.isclose(want, was.double(), rtol=0, atol=0, equal_nan=True).any(-1).any(-1)
        assert 0 < made.sum() < made.numel()
        torch.testing.assert_close(got[~made], was[~made], rtol=0, atol=0, equal_nan=True)
        assert_parity(
            f"compress/{phi}-{name[0]}{got.shape[-1]}-l{l}-T{T}", "compress", got[made], want[made],
            same[made], path_requested="triton", path_taken="triton", launches=counts,
            expect_kernels=kernels, seed=4, limit_mae=1e-3,
        )  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("config, T, phi, dtype", [
    (SMALL, 1, "mlp", torch.float16), (SMALL, 3, "mean", torch.float16),
    (WIDE, 2, "mlp", torch.float32),
])  # fmt: skip
def test_e4m3_rows_are_those_of_pytorch(config, T, phi, dtype, kernel_device):
    """Numbers beyond 448 descales and NaN among them; where PyTorch's rounding of what is stored
    differs in the last bit of dtype, the next number of e4m3 may be taken."""
    l, groups, layer = config.l, config.groups, layer_of(config, kernel_device, dtype, phi)
    scales = {
        f"{x}_descale": randn(5, groups, seed=i).abs().float().to(kernel_device) + 0.05
        for i, x in enumerate("kv")
    }
    lengths = (0, l - T, 1, 2 * l + config.d + 1 - T, 5 * l - T)
    one, other = caches_at(layer, lengths, 5 * l, kv_cache_dtype="fp8_e4m3", **scales)
    x = randn(len(lengths), T, config.dim, seed=4, dtype=dtype, device=kernel_device)
    x[1] *= 1000
    x[2, T - 1, 0] = float("nan")
    with torch.no_grad(), launches.recording() as counts:
        one.append_projected(layer.qkv(x), layer.phi_k, layer.phi_v)
    assert counts[KERNEL] == 1 and len(counts) == 3
    with torch.no_grad():
        kv = layer._project_at(x, other.angles(other.positions(T)))[1]
        other.append(kv, layer.phi_k, layer.phi_v)
    assert other.k_sel[1].double().abs().nan_to_num().max() == 448
    for name in BUFFERS:
        got, want = (getattr(cache, name).double() for cache in (one, other))
        torch.testing.assert_close(got, want, rtol=0.15, atol=2**-8, equal_nan=True, msg=name)
        same = torch.isclose(got, want, rtol=0, atol=0, equal_nan=True).double().mean()
        assert same == 1 if name in ("v_raw", "v_sel", "v_win") else same > 0.99, name


def test_a_layers_steps_over_e4m3_are_those_of_pytorch(kernel_device):
    layer = layer_of(SMALL, kernel_device, torch.float16)
    plain = NSAAttention(layer.config, backend="reference").to(kernel_device, torch.float16)
    plain.load_state_dict(layer.state_dict())
    x = randn(2, 32, SMALL.dim, seed=6, dtype=torch.float16, device=kernel_device)
    both = [
        layer.make_cache(2, 40, kv_cache_dtype="fp8_e4m3", k_descale=2**-7, v_descale=2**-6)
        for _ in range(2)
    ]
    for cache in both:
        plain.prefill(x[:, :29], cache)
    for t in range(29, 32):  # the last completes a block
        with launches.recording() as counts:
            got = layer.step(x[:, t : t + 1], both[0])
        assert counts[KERNEL] == 1 and any("decode_" in n and n != KERNEL for n in counts)
        want = plain.step(x[:, t : t + 1], both[1])
        torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)


@pytest.mark.core
@pytest.mark.parametrize("T, hidden, weights", [
    (1, None, torch.float16), (3, 1100, torch.float16), (1, 40, torch.float32),
])  # fmt: skip
def test_gates_of_the_same_launch(T, hidden, weights, kernel_device):
    """Also of a hidden layer that no program holds at once, and of weights as autocast has them."""
    layer = layer_of(SMALL, kernel_device, torch.float16)
    layer.gate = GateMLP(SMALL.dim, SMALL.heads, hidden).to(kernel_device, weights)
    x = randn(2, T, SMALL.dim, seed=5, dtype=torch.float16, device=kernel_device)
    with torch.no_grad(), torch.autocast(kernel_device, torch.float16, weights != x.dtype):
        gate = layer.gate.inner(x), *layer.gate.for_kernel()
        assert gate[0].dtype == x.dtype and gate[1].dtype == weights
        cache = caches_at(layer, (9, 30), 40)[0]
        with launches.recording() as counts:
            _, gates = cache.append_projected(layer.qkv(x), layer.phi_k, layer.phi_v, gate)
        one, other = caches_at(layer, (9, 30), 40)
        got = layer.step(x, one)
        layer.gate.outer.register_forward_hook(lambda *_: None)
        assert layer.gate.for_kernel() is None
        torch.testing.assert_close(got, layer.step(x, other), rtol=4e-3, atol=1e-3)
    wide, weight, bias = (y.double() for y in gate)
    want = torch.sigmoid(F.silu(wide) @ weight.T + bias).unflatten(-1, (SMALL.heads, 3))
    with torch.no_grad():
        same = F.linear(F.silu(gate[0]), *(y.to(x.dtype) for y in gate[1:])).sigmoid()
    assert gates.dtype == x.dtype
    assert_parity(
        f"gates/{wide.shape[-1]}-T{T}", "gates", gates, want.detach(), same.view_as(gates),
        path_requested="triton", path_taken="triton", launches=counts, expect_kernels=[KERNEL],
        seed=5, limit_mae=1e-3,
    )  # fmt: skip


def test_the_layers_step_takes_it(kernel_device, monkeypatch):
    layer = layer_of(SMALL, kernel_device, torch.float16)
    monkeypatch.setattr(GateMLP, "forward", lambda *_: pytest.fail("gates apart from the launch"))
    x = randn(2, 1, 24, seed=1, dtype=torch.float16, device=kernel_device)
    cache = caches_at(layer, (9, 30), 40)[0]
    with launches.recording() as counts:
        layer.step(x, cache)
    assert counts[KERNEL] == 1 and cache.lengths == [10, 31]


def test_a_step_frees_its_memory(kernel_device):
    layer = layer_of(SMALL, kernel_device, torch.float16)
    x = randn(2, 1, 24, seed=1, dtype=torch.float16, device=kernel_device)
    cache = caches_at(layer, (9, 30), 40)[0]
    layer.step(x, cache)
    assert left_for_the_collector(lambda: layer.step(x, cache)) == []


class NoPhi(torch.nn.Module):
    def forward(self, x):
        raise RuntimeError("no phi")


def test_what_fails_behind_the_launch_appends_nothing(kernel_device):
    """A kernel that is to emit, or the model's own phi: the device's lengths go back as well."""
    layer = layer_of(SMALL, kernel_device, torch.float16)
    cache, other = caches_at(layer, (7, 7), 40)
    layer.phi_k = NoPhi()
    x = randn(2, 1, 24, seed=1, dtype=torch.float16, device=kernel_device)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no phi"):
            layer.step(x, cache)
        assert cache.lengths == cache.lens.tolist() == [7, 7] and not cache.counters.any()
    layer.phi_k = make_compression("mean", SMALL.d_k, SMALL.l, SMALL.d)
    torch.testing.assert_close(layer.step(x, cache), layer.step(x, other), rtol=0, atol=0)
    assert cache.lens.tolist() == [8, 8]


class OtherLinear(torch.nn.Linear):
    pass


def replaced(gate):
    gate.outer = OtherLinear(*reversed(gate.outer.weight.shape))


hook = lambda *_: None
weight_norm = torch.nn.utils.parametrizations.weight_norm
GATE = (lambda: GateMLP(24, 6)), [(18, 6), (18,)]
PHI = (lambda: make_compression("mlp", 8, 8, 4)), [(8, 8), (8, 64), (8,), (8, 8), (8,)]


@pytest.mark.parametrize("made, change", [
    *((GATE, change) for change in (
        lambda gate: gate.register_forward_pre_hook(hook), replaced,
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


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def doubled(linear):
    linear.register_forward_hook(lambda _, args, out: 2 * out)
    return linear


@pytest.mark.parametrize("bias", [False, True])
def test_a_projection_that_is_more_than_its_weights_runs_as_it_is(bias):
    x, plain = randn(2, 3, 8, seed=1), torch.nn.Linear(8, 4, bias=bias)
    assert torch.equal(apply_linear(plain, x), plain(x))
    for changed in (Doubled(8, 4, bias=bias), doubled(torch.nn.Linear(8, 4, bias=bias))):
        changed.load_state_dict(plain.state_dict())
        torch.testing.assert_close(apply_linear(changed, x), 2 * plain(x))


def test_another_module_makes_the_gates(kernel_device):
    """And before anything is appended, so that what it raises leaves the cache as it was."""

    class Halves(torch.nn.Module):
        def forward(self, x):
            if x.isnan().any():
                raise RuntimeError("no gates")
            return torch.full((*x.shape[:-1], SMALL.heads, 3), 0.5, dtype=x.dtype, device=x.device)

    layer = layer_of(SMALL, kernel_device, torch.float16)
    cache, other = caches_at(layer, (9, 30), 40)
    x = randn(2, 1, 24, seed=1, dtype=torch.float16, device=kernel_device)
    with torch.no_grad():
        layer.gate.outer.weight.zero_()
        layer.gate.outer.bias.zero_()
    want = layer.step(x, other)
    layer.gate = Halves()
    with pytest.raises(RuntimeError, match="no gates"):
        layer.step(x * float("nan"), cache)
    assert cache.lengths == cache.lens.tolist() == [9, 30]
    torch.testing.assert_close(layer.step(x, cache), want, rtol=0, atol=0)


@pytest.mark.parametrize("phi", [
    MLPCompression(SMALL.d_k, SMALL.l, SMALL.d), MLPCompression(SMALL.d_v, SMALL.l, SMALL.d // 2),
], ids=["of-keys", "stride"])  # fmt: skip
def test_a_phi_of_other_sizes_is_refused_as_by_pytorch(phi, kernel_device):
    """Here of values; its kernel would read what is not there."""
    layer = layer_of(SMALL, kernel_device, torch.float16)
    cache, other = caches_at(layer, (7,), 40)
    phi = phi.to(kernel_device, torch.float16)
    where = emit.Blocks(
        cache.k_raw, cache.v_raw, cache.k_cmp, cache.v_cmp, cache.lens, SMALL.l, SMALL.d, 9,
        (cache.lens, cache.lens), cache.dtype,
    )  # fmt: skip
    assert emit.learnt(layer.phi_v, where, SMALL.d_v) and not emit.learnt(phi, where, SMALL.d_v)
    if phi.d == SMALL.d:
        layer.phi_v = phi
        with pytest.raises(RuntimeError):
            layer.step(randn(1, 1, 24, seed=1, dtype=torch.float16, device=kernel_device), cache)
        assert cache.lengths == cache.lens.tolist() == [7]


# ---- when it is not taken, on any machine --------------------------------------------------------


@pytest.mark.parametrize("backend, flags", [
    ("reference", TRITON), (None, TRITON), (None, Flags()), ("sdpa", TRITON),
])  # fmt: skip
def test_without_the_policys_leave_pytorch_appends(backend, flags):
    layer = layer_of(SMALL, "cpu", torch.float32)
    cache = layer.make_cache(1, 8)
    never = lambda: pytest.fail("projected for a kernel that is not allowed")
    q, gates = attention.append_projected(
        never, cache, layer.phi_k, layer.phi_v, never, backend=backend, flags=flags
    )
    assert q is None and gates is None and cache.length == 0


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


@pytest.mark.filterwarnings("ignore:nsa. the decode step's append on triton failed")
def test_a_kernel_that_fails_is_not_tried_again_for_the_next_cache(allowed, monkeypatch):
    from nsa import dispatch

    taken = dispatch.Decision(dispatch.Branch.STEP, dispatch.Route.TRITON)
    monkeypatch.setattr(dispatch, "decide", lambda *_: taken)
    calls, _ = allowed
    layer = layer_of(SMALL, "cpu", torch.float32)
    layer.backend, layer.flags = None, Flags()

    def tries(backend=None, **how):
        before, cache = len(calls), layer.make_cache(1, 8, **how)
        found = attention.append_projected(
            lambda: torch.zeros(1, 1, sum(SMALL.qkv_widths), dtype=cache.dtype), cache,
            layer.phi_k, layer.phi_v, backend=backend, flags=layer.flags,
        )  # fmt: skip
        assert found == (None, None) and cache.length == 0
        return len(calls) - before

    assert [tries(), tries(), tries("auto"), tries(dtype=torch.float64)] == [1, 0, 0, 1]


@pytest.mark.parametrize("error", [
    RuntimeError("CUDA error: an illegal memory access"), torch.OutOfMemoryError("full"),
    ValueError("the caller's"), TypeError("the caller's"),
])  # fmt: skip
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


@pytest.mark.parametrize("needs", ["q", "gates"])
def test_a_gradient_is_that_of_prefill_or_refused(needs, kernel_device):
    """Also of a cache whose steps were fused before; the step's own kernels have none."""
    config = replace(SMALL, l_sel=16)
    layer = layer_of(config, kernel_device, torch.float16)
    cache, _ = caches_at(layer, [7], 9)
    make = lambda seed, width: randn(
        1, 1, 6, width, seed=seed, dtype=torch.float16, device=kernel_device
    )
    x = dict(q=make(1, 24), gates=make(2, 3).sigmoid())
    decode = lambda **how: attention.nsa_decode(x["q"], cache, None, x["gates"], **how)[0]
    cache.fused_step.add((None, TRITON))
    with launches.recording() as fused:
        want = decode(flags=TRITON)
    assert any(name.startswith("_decode") for name in fused)
    x[needs].requires_grad_()
    (plain,) = torch.autograd.grad(decode(backend="reference").float().sum(), x[needs])
    assert plain.any()
    for backend in (None, "triton"):
        out = decode(backend=backend, flags=replace(TRITON, sel_triton_allow_grad=True))
        (grad,) = torch.autograd.grad(out.float().sum(), x[needs])
        torch.testing.assert_close(out, want, rtol=0, atol=2e-3)
        torch.testing.assert_close(grad, plain, rtol=2e-3, atol=2e-3)
    with pytest.raises(RouteUnavailable, match="needs_grad.*a decode step has no gradient of q"):
        rungs.step_triton(dict(x, cache=cache, softmax_scale=1.0, sizes=config.sizes()), TRITON)
    qkv = torch.zeros(
        1, 1, sum(config.qkv_widths), dtype=torch.float16, device=kernel_device, requires_grad=True
    )
    with pytest.raises(ValueError, match="qkv must need no gradient"):
        cache.append_projected(qkv, layer.phi_k, layer.phi_v)
    assert cache.lengths == [7]


@pytest.mark.parametrize("error", [RuntimeError("no such instruction"), NotImplementedError("T"),
                                   torch.OutOfMemoryError("full")])  # fmt: skip
def test_a_step_that_served_before_and_fails_finds_another_route(error, monkeypatch):
    from nsa import rungs

    calls = []

    def fails(*args):
        calls.append(args)
        raise error

    monkeypatch.setattr(rungs, "step_triton", fails)
    layer = layer_of(SMALL, "cpu", torch.float32)
    layer.backend, layer.flags = None, Flags()
    cache, plain = layer.make_cache(1, 8), layer.make_cache(1, 8)
    cache.fused_step.add((None, layer.flags))
    x = randn(1, 1, 24, seed=2)
    if isinstance(error, torch.OutOfMemoryError):
        with pytest.raises(torch.OutOfMemoryError):
            layer.step(x, cache)
        return
    for _ in range(2):
        assert torch.equal(layer.step(x, cache), layer.step(x, plain))
    assert len(calls) == 1 and not cache.fused_step


def test_a_step_that_is_observed_is_decided_again(monkeypatch):
    from nsa import dispatch, rungs

    monkeypatch.setattr(rungs, "step_triton", lambda *_: pytest.fail("nobody heard of it"))
    layer = layer_of(SMALL, "cpu", torch.float32)
    layer.backend, layer.flags = None, Flags()
    cache = layer.make_cache(1, 8)
    cache.fused_step.add((None, layer.flags))
    with dispatch.trace() as taken:
        layer.step(randn(1, 1, 24, seed=2), cache)
    assert [t.branch for t in taken if t.branch is dispatch.Branch.STEP]
    with torch.autograd.forward_ad.dual_level():  # no kernel knows tangents
        layer.step(randn(1, 1, 24, seed=2), cache)


def test_bad_input_appends_nothing():
    layer = layer_of(SMALL, "cpu", torch.float32)
    cache = layer.make_cache(1, 2)
    x = torch.zeros(1, 1, 24)
    append = lambda qkv, *gate: cache.append_projected(qkv, layer.phi_k, layer.phi_v, *gate)
    gate = layer.gate.inner(torch.zeros(1, 2, 24)), *layer.gate.for_kernel()
    there = [y[:, :1].to("meta") if y.ndim == 3 else y for y in gate]
    qkv = layer.qkv(x).detach()
    for error, words, call in (
        (TypeError, "qkv must have the cache's torch.float32", lambda: append(qkv.half())),
        (ValueError, r"qkv must be \[1, 1, 336\].* got \[3", lambda: append(qkv.expand(3, -1, -1))),
        (ValueError, "from 1 to max_step=8, got", lambda: append(qkv.expand(-1, 9, -1))),
        (ValueError, r"max_len=2 tokens, got 0 \+ 3", lambda: append(qkv.expand(-1, 3, -1))),
        (ValueError, r"gate must be hidden \[1, 1, width\].*\[1, 2, 6", lambda: append(qkv, gate)),
        (ValueError, "gate must be on qkv's cpu", lambda: append(qkv, there)),
        (
            ValueError,
            "x must have the cache's batch 1",
            lambda: layer.step(x.repeat(3, 1, 1), cache),
        ),
        (ValueError, "x must be on the cache's cpu", lambda: layer.step(x.to("meta"), cache)),
    ):
        with torch.no_grad(), pytest.raises(error, match=words):
            call()
    assert cache.length == 0 and cache.lens.tolist() == [0]
