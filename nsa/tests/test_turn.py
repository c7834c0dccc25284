"""The projections taken apart by rotary turn: the kernel against the oracle, and who takes it."""

from dataclasses import replace

import pytest
import torch

from bench.parity import assert_parity
from nsa import attention, dispatch, launches, oracle
from nsa.config import NSAConfig
from nsa.kernels.prefill import split_turned_triton
from nsa.module import NSAAttention
from nsa.rotary import split_turned
from nsa.tests.cases import strided
from nsa.tests.helpers import TRITON, left_for_the_collector, randn

KERNEL = "_turn_kernel"
SMALL = NSAConfig(dim=24, heads=6, groups=2, d_k=24, d_v=8, l=8, d=4, l_sel=16, n_sel=3, w=12)
CONFIGS = [
    (SMALL, (2, 37)),
    (replace(SMALL, heads=20, groups=10, d_k=16, d_v=40), (50,)),  # more heads than one program's
    (replace(SMALL, heads=1, groups=1, d_k=192, d_v=128, rope_base=500.0), (1, 23)),
    (replace(SMALL, heads=3, groups=3, d_k=8, d_v=16), (3, 1)),
]
PARTS = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")


def split(qkv, at, c=SMALL):
    sizes = dict(heads=c.heads, groups=c.groups, d_k=c.d_k, d_v=c.d_v, rope_base=c.rope_base)
    return split_turned_triton(qkv, at, **sizes)


def by_pytorch(qkv, at, c=SMALL):
    q, kv = split_turned(qkv, at, c)
    return [q, *(getattr(kv, name) for name in PARTS[1:])]


def expected(qkv, start, c):
    """By the oracle, in the columns' order: q, then k of the three branches, then v."""
    rows = qkv if qkv.ndim == 3 else qkv[None]
    q, k, v = rows.split(c.qkv_widths, -1)
    q = oracle.rotary(q.unflatten(-1, (c.heads, c.d_k)), c.rope_base, start)
    k = oracle.rotary(k.unflatten(-1, (3 * c.groups, c.d_k)), c.rope_base, start)
    v = v.unflatten(-1, (3 * c.groups, c.d_v))
    pairs = zip(k.chunk(3, -2), v.chunk(3, -2), strict=True)
    return [x.view(*qkv.shape[:-1], *x.shape[-2:]) for x in (q, *(x for two in pairs for x in two))]


@pytest.mark.core
@pytest.mark.parametrize("dtype, start", [(torch.float16, 0), (torch.float32, 1_000_003)])
@pytest.mark.parametrize("config, shape", CONFIGS, ids=["small", "many", "wide", "single"])
def test_every_part_and_gradient_is_the_oracles(config, shape, dtype, start, kernel_device):
    like = dict(dtype=dtype, device=kernel_device)
    qkv = randn(*shape, sum(config.qkv_widths), seed=1, **like).requires_grad_()
    at = torch.arange(start, start + shape[-1], device=kernel_device)
    with launches.recording() as counts:
        got = split(qkv, at, config)
        do = [randn(*x.shape, seed=10 + i, **like) for i, x in enumerate(got)]
        (grad,) = torch.autograd.grad(got, qkv, do)
    assert counts[KERNEL] == 2 and all(x.is_contiguous() for x in got)

    wide = qkv.detach().double().cpu().requires_grad_()
    want = expected(wide, start, config)
    (want_grad,) = torch.autograd.grad(want, wide, [x.double().cpu() for x in do])
    same = by_pytorch(qkv.detach(), at, config)
    right = (*want, want_grad), (*same, None)
    for name, g, w, s in zip((*PARTS, "dqkv"), (*got, grad), *right, strict=True):
        assert_parity(
            f"turn/{config.d_k}-{start}/{name}", "turn", g.detach().cpu(), w.detach(),
            s if s is None else s.cpu(), path_requested="triton", path_taken="triton",
            launches=counts, expect_kernels=[KERNEL], seed=0,
            limit_mae=1e-6 if dtype == torch.float32 else 1e-3,
        )  # fmt: skip
    for name in ("v_cmp", "v_sel", "v_win"):  # values are moved, nothing else
        i = PARTS.index(name)
        assert torch.equal(got[i].double().cpu(), want[i])


def test_packed_positions_and_views(kernel_device):
    """Positions in any order, projections that are a view: what PyTorch gives."""
    at = strided(torch.tensor([5, 0, 1, 2, 900_000, 3], device=kernel_device))
    view = randn(6, 2 * sum(SMALL.qkv_widths), seed=2, device=kernel_device)[:, 1::2]
    torch.testing.assert_close(list(split(view, at)), by_pytorch(view, at), rtol=0, atol=2e-6)


def test_a_nan_stays_in_its_head(kernel_device):
    qkv = randn(1, 9, sum(SMALL.qkv_widths), seed=3, device=kernel_device)
    at = torch.arange(9, device=kernel_device)
    clean = split(qkv, at)
    qkv[0, 4, 30] = float("nan")  # head 1 of q
    for i, (a, b) in enumerate(zip(clean, split(qkv, at), strict=True)):
        other = b.isnan()
        assert other.sum() == (2 if i == 0 else 0) and torch.equal(a[~other], b[~other])
        assert i or other[0, 4, 1].sum() == 2


def test_no_tokens_launch_nothing(kernel_device):
    qkv = torch.zeros(2, 0, sum(SMALL.qkv_widths), device=kernel_device, requires_grad=True)
    with launches.recording() as counts:
        parts = split(qkv, torch.arange(0, device=kernel_device))
        (grad,) = torch.autograd.grad(parts, qkv, [torch.zeros_like(x) for x in parts])
    assert not counts.get(KERNEL) and grad.shape == qkv.shape
    assert parts[0].shape == (2, 0, 6, 24)


@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_takes_it_and_trains_as_without(packed, kernel_device):
    torch.manual_seed(0)
    layer = NSAAttention(SMALL, backend="triton", flags=TRITON).to(kernel_device, torch.float16)
    x = randn(1, 25, 24, seed=4, dtype=torch.float16, device=kernel_device)
    cu = torch.tensor([0, 9, 25], dtype=torch.int32, device=kernel_device) if packed else None
    x = x[0] if packed else x
    results = []
    for backend in ("triton", "reference"):
        layer.backend = backend
        layer.zero_grad()
        with launches.recording() as counts, dispatch.trace() as taken:
            out = layer(x, cu)
            out.float().square().sum().backward()
        assert counts.get(KERNEL, 0) == (2 if backend == "triton" else 0)
        turned = [t.route.value for t in taken if t.branch is dispatch.Branch.TURN]
        assert turned == [backend]
        results.append([out.detach(), layer.qkv.weight.grad.clone()])
    for got, want in zip(*results, strict=True):
        assert (got - want).abs().max() <= 0.02 * want.abs().max()


def test_without_a_gpu_pytorch_does_it():
    """And by every other route's name; Triton's says why it cannot."""
    with dispatch.trace() as taken, launches.recording() as counts:
        NSAAttention(SMALL)(torch.zeros(1, 9, 24))
    assert [t.route.value for t in taken if t.branch is dispatch.Branch.TURN] == ["reference"]
    assert not counts.get(KERNEL)
    qkv, at = randn(1, 5, sum(SMALL.qkv_widths), seed=1), torch.arange(5)
    want, want_kv = split_turned(qkv, at, SMALL)
    for backend in ("sdpa", "fa2", "reference"):
        got, kv = attention.turn_projected(qkv, at, SMALL, backend=backend)
        assert torch.equal(got, want) and torch.equal(kv.k_win, want_kv.k_win)
    with pytest.raises(dispatch.RouteUnavailable, match="no_cuda|dtype"):
        attention.turn_projected(qkv.double(), at, SMALL, backend="triton", flags=TRITON)


def test_compiled_projections_take_the_kernel(kernel_device):
    """PyTorch's form would compute its angles again for every head: 0.9 ms of 4k tokens."""
    layer = NSAAttention(SMALL, backend="triton", flags=TRITON).to(kernel_device, torch.float16)
    x = randn(1, 9, SMALL.dim, seed=5, dtype=torch.float16, device=kernel_device)
    at = torch.arange(9, device=kernel_device)
    want, want_kv = layer._project(x, at)
    compiled = torch.compile(layer._project, backend="aot_eager", fullgraph=True)
    with launches.recording() as counts:
        got, kv = compiled(x, at)
    assert counts.get(KERNEL) == 1
    assert torch.equal(got, want) and torch.equal(kv.k_win, want_kv.k_win)


def test_a_training_step_frees_its_memory(kernel_device):
    layer = NSAAttention(SMALL, backend="triton", flags=TRITON).to(kernel_device, torch.float16)
    x = randn(1, 17, SMALL.dim, seed=1, dtype=torch.float16, device=kernel_device)

    def step():
        layer(x).sum().backward()
        layer.zero_grad()

    step()
    assert left_for_the_collector(step) == []
