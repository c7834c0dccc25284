"""Sums of gradients: rounding, and dQ in fp16 whose scales keep it from overflow (the kernel that
adds to it: test_hopper.py)."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from nsa import launches
from nsa.kernels.prefill import hopper, sums
from nsa.kernels.prefill.blocks import bwd_triton as blocks_bwd
from nsa.kernels.prefill.blocks.bwd_triton import block_attention_bwd
from nsa.kernels.prefill.blocks.fwd_triton import block_attention_fwd
from nsa.kernels.prefill.combine import combine_bwd
from nsa.kernels.prefill.delta import attention_delta
from nsa.kernels.prefill.sums import HalfSums, added_keys
from nsa.tests.cases import BF16, F16, F32, Inputs, Shape
from nsa.tests.helpers import randn
from nsa.tests.test_prefill_kernels import operator_of

pytestmark = pytest.mark.kernel


def exponents(x):
    return torch.frexp(x.double())[1] - 1


def halves(k, v, reach):
    """Those of q [1, 67, 4, 128], which are not rounded."""
    return sums.zero_halves(torch.empty_like(k).repeat(1, 1, 2, 1), k, v, reach, print)


def drawn(device, k_size=1.0, v_size=1.0):
    """k, v and reach."""
    draw = lambda i, size: randn(1, 67, 2, 128, seed=i, dtype=BF16, device=device) * size
    return draw(2, k_size), draw(3, v_size), torch.rand(1, 67, 4, device=device)


@pytest.mark.core
@pytest.mark.parametrize("k_size, v_size, size", [
    (1.0, 1.0, 1.0), (1e-3, 40.0, 1e-6), (1e15, 1e-15, 1e20), (1e12, 1e12, 1e-30), (3.0, 1.0, 0.0),
])  # fmt: skip
def test_scales_leave_room_above_and_below_what_is_typical(k_size, v_size, size, kernel_device):
    k, v, reach = drawn(kernel_device, k_size, v_size)
    reach *= size
    found = halves(k, v, reach)
    assert found.sums.dtype == F16 and not found.sums.any()
    typical = [int(exponents(x).double().mean().floor()) + 4 for x in (k, v)]
    assert (exponents(k) <= typical[0]).all() and (exponents(v) <= typical[1]).all()
    want = (2.0 ** (11 - sum(typical) - exponents(reach))).clamp(2.0**-126, 2.0**126)
    some = reach > 0
    assert torch.equal(found.scales[some].double(), want[some])
    assert some.any() == (size > 0) and (found.scales[~some] == 2.0**126).all()


def test_scales_of_huge_and_tiny_rows_stay_normal_numbers(kernel_device):
    reach = torch.full((1, 67, 4), 3e38, device=kernel_device)
    reach[:, ::2] = 1e-40
    k, v, _ = drawn(kernel_device)
    assert (halves(k * 1e20, v * 1e18, reach).scales[:, 1::2] == 2.0**-126).all()
    assert (halves(k * 1e-20, v * 1e-18, reach).scales[:, ::2] == 2.0**126).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_changes_no_scale(bad, kernel_device):
    """Rows that see it have no gradient, and others have theirs."""
    k, v, reach = drawn(kernel_device)
    clean, largest = halves(k, v, reach).scales, k.abs().max()
    k[0, 5, 1, 7] = reach[0, 3, 2] = bad
    scales = halves(k, v, reach).scales
    assert k.abs().nan_to_num(0, 0, 0).max() == largest
    assert (scales != clean).sum() <= 1 and scales.isfinite().all()


@pytest.mark.parametrize("of", ["k", "v"])
def test_every_element_counts_and_none_alone(of, kernel_device, monkeypatch):
    monkeypatch.setattr(sums, "SIZE", 1024)  # 17 pieces for 4 programs
    monkeypatch.setattr(sums, "PROGRAMS", 4)
    reach = torch.rand(1, 67, 4, device=kernel_device)
    tensors = {n: torch.ones(1, 67, 2, 128, dtype=BF16, device=kernel_device) for n in "kv"}
    scales = lambda: halves(*tensors.values(), reach).scales
    clean, rows = scales(), tensors[of].view(67, 256)
    rows[[0, 66], 255] = 1e38  # two outliers
    assert torch.equal(scales(), clean)
    rows[:] = 2.0 ** (torch.arange(67, device=kernel_device) % 13 - 3)[:, None]  # 2.91 on average
    rows[5, ::2] = 0.0
    assert torch.equal(scales() * 4, clean)
    rows[-4:] = 64.0  # 3.01
    assert torch.equal(scales() * 8, clean)


@pytest.mark.core
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("rows, d", [(67, 128), (5, 16)])
def test_rounded_halves_stay_where_they_are(rows, d, both, kernel_device):
    more = randn(1, rows, 4, d, seed=1, dtype=F32, device=kernel_device) if both else None
    half = randn(1, rows, 4, d, seed=2, dtype=F16, device=kernel_device)
    scales = 2.0 ** torch.randint(-9, 9, (1, rows, 4), device=kernel_device).float()
    half[0, 1, 2, 3], half[0, 2, 0, 7], half[0, 3, 1] = float("inf"), float("nan"), 2.0**-14
    half[0, 4, 3], scales[0, 4, 3] = 0.0, 2.0**126  # a row whose output has no gradient
    half[0, 0, 2] = 0.0
    half[0, 0, 2, d - 1] = 2.0**-13
    anew = mock.Mock()
    want = half.float() / scales[..., None] + (more if both else 0)
    like = torch.empty(1, rows, 4, d, dtype=BF16, device=kernel_device)
    got = sums.rounded(sums.HalfSums(half, scales, 2, anew), 0.3, like, more)
    ((lost, out, its_more, scale), _) = anew.call_args
    units = {3, 4, 6}  # token * groups + group
    assert lost[0] == len(units) and set(lost[1 : 1 + len(units)].tolist()) == units
    assert out is got and its_more is more and scale == 0.3
    assert got.dtype == BF16 and got.shape == like.shape
    assert got.data_ptr() == half.data_ptr()
    torch.testing.assert_close(got.float(), want * 0.3, rtol=8e-3, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_parts_of_gradients_of_keys_are_added(dtype, kernel_device):
    """More numbers than a program takes, in more of dK than of dV; each is rounded once."""
    parts = [randn(3, 1, 41, 2, D, seed=D, dtype=F32, device=kernel_device) for D in (40, 16)]
    like = [x[0].to(dtype) for x in parts]
    for got, x in zip(added_keys(*parts, *like), parts, strict=True):
        assert torch.equal(got, (x[0] + x[1] + x[2]).to(dtype))


def test_reach_is_the_size_of_the_gate_times_the_sum_of_magnitudes(kernel_device):
    do, out = (randn(1, 37, 3, 24, seed=s, dtype=F16, device=kernel_device) for s in (1, 2))
    lse, gates = do[..., 0].float(), torch.rand(1, 37, 3, 3, device=kernel_device).to(F16)
    gates[:, 5:9] *= -1
    any_negative = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    want = do.float().abs().sum(-1)
    with launches.recording() as counts:
        delta, reach = attention_delta(out, do)
    assert counts["_attn_bwd_delta_kernel"] == 1
    torch.testing.assert_close(reach, want)
    torch.testing.assert_close(delta, (do.float() * out.float()).sum(-1), atol=1e-4, rtol=1e-4)
    *_, reach = combine_bwd(do, (out, out, out), (lse, lse, lse), gates, any_negative)
    torch.testing.assert_close(reach, want * gates[..., 1].float().abs())


@pytest.mark.parametrize("name, asks", [("prefill", 1), ("selected", 1), ("given", 0)])
def test_sums_in_fp16_become_part_of_dq(name, asks, kernel_device, monkeypatch):
    """A pass that adds 3 to every dQ: the same gradients whichever sums it adds it to."""
    if kernel_device == "cuda":
        pytest.skip("the interpreter's size")
    seen: list[bool] = []

    def add(*args):
        acc = args[10]
        seen.append(isinstance(acc, HalfSums))
        if seen[-1]:
            assert (acc.scales >= 0.5).all()
            acc.sums.add_((3 * acc.scales[..., None]).half())
        else:
            acc.add_(3.0)

    x = Inputs(Shape((59,), G=1), kernel_device)
    leaves, call, _ = operator_of("prefill" if name == "prefill" else "selected", x)
    blocks = torch.zeros(1, 59, 1, 1, dtype=torch.int32)

    def gradients(halves):
        module = SimpleNamespace(add_block_gradients=add, adds_halves=lambda *a: halves)
        monkeypatch.setattr(hopper, "block_backward", lambda *a: module)
        if name != "given":
            out = call(*leaves)[0]
            return torch.autograd.grad(out, leaves, torch.full_like(out, 0.1))
        q, k, v = (t.detach() for t in leaves)
        how = dict(block_size=16, softmax_scale=0.25)
        out, lse = block_attention_fwd(q, k, v, blocks, **how)
        dq = torch.full(q.shape, 5.0)
        got, *rest = block_attention_bwd(out, q, k, v, out, lse, blocks, **how, dq=dq)
        assert got is dq and (dq == 8.0).all()
        return got, *rest

    want, got = gradients(False), gradients(True)
    assert seen == [False, bool(asks)]
    torch.testing.assert_close(list(got), list(want), rtol=2e-3, atol=2e-3)
    if name == "selected":
        torch.testing.assert_close(got[0], torch.full_like(got[0], 3 * leaves[0].shape[-1] ** -0.5))


@pytest.mark.parametrize("shape, name, left", [
    (Shape((39,)), "selected", float("inf")), (Shape((21,), batch=2), "selected", 0.0),
    (Shape((57,), batch=2), "prefill", 2.0**-14), (Shape((5, 51, 1)), "prefill", float("nan")),
], ids=str)  # fmt: skip
def test_what_fp16_did_not_serve_is_found_anew(shape, name, left, kernel_device, monkeypatch):
    """A pass that leaves something useless in every third row: dQ is that of the other kernels."""
    if kernel_device == "cuda":
        pytest.skip("the interpreter's size")
    x = Inputs(shape, kernel_device)
    x.gates.view(-1)[::2] *= -1
    leaves, call, _ = operator_of(name, x)
    how = x.packing(longest=name == "prefill")
    grad_out = x.layout(x.do)
    want = torch.autograd.grad(call(*leaves, **how)[0], leaves, grad_out)[0]
    real, of_selection = blocks_bwd.block_attention_bwd, []

    def add(*args):
        sums, scales, *_ = args[10]
        sums.copy_(of_selection[-1] * scales[..., None])
        sums.view(-1, *sums.shape[-2:])[::3] = left

    def selection(*args, dq=None, reach=None, **how):
        of_selection.append(torch.zeros(args[1].shape, dtype=F32))  # dQ / softmax_scale
        with monkeypatch.context() as plain:
            plain.setattr(hopper, "block_backward", lambda *a: None)
            real(*args, dq=of_selection[-1], **how)
        return real(*args, dq=dq, reach=reach, **how)

    module = SimpleNamespace(add_block_gradients=add, adds_halves=lambda *a: True)
    monkeypatch.setattr(hopper, "block_backward", lambda *a: module)
    monkeypatch.setattr(blocks_bwd, "block_attention_bwd", selection)
    with launches.recording() as counts:
        got = torch.autograd.grad(call(*leaves, **how)[0], leaves, grad_out)[0]
    assert counts["_block_attn_dq_anew_kernel"] == 1
    torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)
