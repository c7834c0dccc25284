"""selection_attention_triton() on CPU tensors: right, on packed SDPA, its fallbacks logged with
their reason; what its kernels log; gradients by which route, and none that nobody asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import nsa
from nsa import dispatch, launches
from nsa.flags import Flags, flag_fields, variables
from nsa.kernels.triton_sel_kernel import selection_attention_triton, selection_ranges_triton
from nsa.tests.helpers import HOSTILE_RANGE_KINDS, RANGE_KINDS, make_ranges, randn
from nsa.tests.sel_cases import check, inputs, oracle_ranges, rows_of

ON = Flags(use_triton_sel=True, sel_triton_min_L=1)
FULL = torch.float32
RANGES = make_ranges("mixed", 1, 4, 2, 70, 40)


def attend(x, ranges=RANGES, **how):
    """The output, held to the oracle, and (route, reason) of each decision."""
    with dispatch.trace() as taken:
        out = selection_attention_triton(*x, ranges, **how)
    torch.testing.assert_close(out.double(), oracle_ranges(*x, ranges), rtol=1e-4, atol=1e-5)
    return out, [(d.route.value, d.fallback_reason) for d in taken]


@pytest.fixture(autouse=True)
def no_flags_of_the_shell(monkeypatch):
    """A report may run where some are set, and these tests are about those that they set."""
    for name in {name for f in flag_fields() for name in variables(f)}:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("kind", RANGE_KINDS + HOSTILE_RANGE_KINDS)
def test_packed_sdpa_serves_cpu_tensors(kind):
    ranges = make_ranges(kind, 1, 4, 2, 70, 40, seed=4)
    with dispatch.trace() as taken:
        run = lambda *x: selection_attention_triton(*x, ranges, flags=ON)
        check(f"cpu-{kind}", inputs(FULL), ranges, run=run, route="sdpa")
    assert [(d.route.value, d.fallback_reason) for d in taken] == [("sdpa", "no_cuda")]


@pytest.mark.parametrize("name, value, route, reason", [
    ("use_sel_pack", True, "sdpa", "no_cuda"), ("use_sel_pack", False, "reference", "no_cuda"),
    ("force_parity", True, "reference", "force_parity"),
])  # fmt: skip
def test_routes_of_the_flags_given_or_of_the_environment(name, value, route, reason, monkeypatch):
    assert attend(inputs(FULL), flags=Flags(**{name: value}))[1] == [(route, reason)]
    monkeypatch.setenv(f"NSA_{name.upper()}", str(int(value)))
    assert attend(inputs(FULL))[1] == [(route, reason)]


@pytest.mark.parametrize("D", [12, 20])
def test_head_sizes_that_no_kernel_takes_still_work(D):
    attend(inputs(FULL, D=D, Dv=D), flags=ON)


def test_softmax_scale_and_strided_inputs():
    q, k, v = inputs(torch.float64)
    scaled = selection_attention_triton(q, k, v, RANGES, softmax_scale=0.5)
    torch.testing.assert_close(scaled, oracle_ranges(q * 0.5 * 4, k, v, RANGES))
    attend([x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)])


@pytest.mark.skipif(dispatch.interpreting(), reason="named routes run in the interpreter")
def test_a_named_triton_route_is_refused_on_cpu():
    with pytest.raises(dispatch.RouteUnavailable) as refused:
        attend(inputs(), flags=ON, backend="triton")
    assert refused.value.reason == "no_cuda"


# ---- what is logged ------------------------------------------------------------------------------


def as_on_cuda(monkeypatch, sm=(9, 0)):
    """Describe CPU tensors to the policy as on a CUDA device."""
    real, described = dispatch.make_request, dict(device="cuda", capability=sm)
    change = lambda *a, **kw: replace(real(*a, **kw), **described)
    monkeypatch.setattr(dispatch, "make_request", change)


def call(monkeypatch, flags, *, dtype=torch.float16, D=16, grad=False, cuda=True, sm=(9, 0)):
    if cuda:
        as_on_cuda(monkeypatch, sm)
    q, k, v = inputs(dtype, D=D, Dv=16)
    q.requires_grad_(grad)
    with dispatch.trace() as taken:
        out = selection_attention_triton(q, k, v, RANGES, flags=flags)
    want = oracle_ranges(q, k, v, RANGES)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    return taken[-1]


def logged(capfd, *tags):
    """The lines of each tag."""
    lines = capfd.readouterr().err.splitlines()
    return [[x for x in lines if x.startswith(f"NSA-LOG {tag} ")] for tag in tags]


@pytest.mark.parametrize("reason, how", [
    ("dtype", dict(dtype=torch.float32)), ("align8", dict(D=12)), ("needs_grad", dict(grad=True)),
    ("sm89_policy", dict(sm=(8, 9))), ("no_cuda", dict(cuda=False)),
    ("capability", dict(sm=(7, 5))),
])  # fmt: skip
def test_reason_is_logged_and_sdpa_answers(reason, how, monkeypatch, capfd):
    flags = replace(ON, debug_log=True, sel_triton_allow_grad=False)
    taken = call(monkeypatch, flags, **how)
    assert (taken.route.value, taken.fallback_reason) == ("sdpa", reason)
    ((line,),) = logged(capfd, "sel.triton.fallback")
    assert f"reason={reason}" in line


def test_packing_is_timed(monkeypatch, capfd):
    call(monkeypatch, Flags(debug_timing=True), cuda=False)
    (packs,) = logged(capfd, "sel.sdpa.pack")
    assert packs and all(" rows=" in x and " ms=" in x for x in packs)


def test_what_a_call_by_blocks_logs(kernel_device, capfd):
    """Two queries at 39 and 40 that choose blocks 0 and 2 of 16: 24 and 25 tokens."""
    kw = {"dtype": torch.float16, "device": kernel_device}
    q, k = randn(1, 2, 2, 16, seed=1, **kw), randn(1, 41, 1, 16, seed=2, **kw)
    blocks = torch.tensor([0, 2], dtype=torch.int32, device=kernel_device).expand(1, 2, 1, 2)
    debug = dict.fromkeys(["debug_log", "debug_timing", "debug_shapes", "debug_compare"], True)
    how = dict(backend="triton", flags=Flags(triton_sel_force=True, **debug))
    nsa.selection_attention(q, k, k, blocks, block_size=16, q_start=39, **how)
    tags = "reads", "path", "bucket_timing", "shapes", "compare"
    found = logged(capfd, *(f"sel.triton.{tag}" for tag in tags))
    (reads,), (path,), (timing,), (_,), (_,) = found
    assert "tokens=49 rows=2" in reads and "path=blocks" in path
    assert "bucket=blocks" in timing and " ms=" in timing and " gbs=" in timing


def test_block_sizes_without_a_kernel_are_unavailable(kernel_device):
    kw = {"dtype": torch.float16, "device": kernel_device}
    q, k = randn(1, 9, 2, 16, seed=1, **kw), randn(1, 9, 1, 16, seed=2, **kw)
    blocks = torch.zeros(1, 9, 1, 1, dtype=torch.int32, device=kernel_device)
    forced = dict(backend="triton", flags=Flags(triton_sel_force=True))
    with pytest.raises(nsa.RouteUnavailable, match="unsupported.*block_size must be"):
        nsa.selection_attention(q, k, k, blocks, block_size=48, **forced)
    with pytest.raises(nsa.RouteUnavailable, match="unsupported"):
        nsa.select_blocks(q, k[:, :1], l=8, d=4, l_sel=12, n_sel=3, **forced)


@pytest.mark.parametrize("path, buckets", [("ranges", 1), ("varlen", 2)])
def test_what_a_triton_call_logs(path, buckets, kernel_device, capfd):
    """Reads are the tokens really selected; timing has one line per bucket of lengths."""
    spans = [[[0, 40], [30, 50]], [[0, 3], [9, 9]], [[0, 0], [0, 0]]]  # 50, 3 and 0 tokens
    x, ranges = inputs(device=kernel_device, S=3, G=1), rows_of(spans, kernel_device)
    flags = Flags(debug_log=True, debug_timing=True)
    selection_ranges_triton(*x, ranges, path=path, flags=flags)
    tags = "reads", "path", "bucket_timing", "pack", "device"
    reads, which, timing, pack, device = logged(capfd, *(f"sel.triton.{tag}" for tag in tags))
    assert len(reads) == len(which) == 1
    assert "tokens=53 rows=3" in reads[0] and f"path={path}" in which[0]
    assert len(pack) == (2 if path == "varlen" else 0) and all(" ms=" in x for x in pack)
    assert len(timing) == buckets and all(" ms=" in x and " gbs=" in x for x in timing)
    assert len(device) == (kernel_device == "cuda")


# ---- gradients -----------------------------------------------------------------------------------


def test_allow_grad_decides_in_automatic_mode(kernel_device, monkeypatch):
    """With a gradient needed, NSA_SEL_TRITON_ALLOW_GRAD chooses between Triton and SDPA."""
    q, k, v = inputs(torch.float16, kernel_device)
    ranges = make_ranges("many", 1, 4, 2, 70, 40, device=kernel_device)
    as_on_cuda(monkeypatch)
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
