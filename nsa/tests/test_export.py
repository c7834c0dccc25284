"""Traced calls that stand for any length: torch.export, and torch.compile with dynamic shapes."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.export import Dim

from nsa import NSAAttention, NSAConfig, NSALanguageModel, dispatch
from nsa.tests.helpers import randn

SMALL = dict(dim=32, heads=4, groups=2, d_k=16, d_v=16)
MEAN = dict(l=16, d=16, l_sel=16, phi="mean")


@pytest.mark.parametrize("how", [{}, pytest.param(MEAN, marks=pytest.mark.nightly)])
def test_exported_for_any_length(how):
    """Shorter than a compressed block, exactly as long, and far longer than the example; by a plain
    Dim, for whose every length the tracer has to prove its guards."""
    torch.manual_seed(0)
    layer = NSAAttention(NSAConfig(**SMALL, **how))
    shapes = {"x": {0: Dim("B", max=8), 1: Dim("S")}}
    program = torch.export.export(
        layer, (torch.randn(2, 100, 32),), dynamic_shapes=shapes, strict=False
    ).module()
    for B, S in ((2, 3), (2, 20), (2, 31), (1, 32), (3, 33), (2, 290)):
        x = randn(B, S, 32, seed=S)
        torch.testing.assert_close(program(x), layer(x))


def test_fake_tensors_change_no_route():
    """Shapes of a run looked at without running it: no kernel has failed."""
    layer, x = NSAAttention(NSAConfig(**SMALL)), torch.randn(1, 100, 32)

    def routes():
        with torch.no_grad(), dispatch.trace() as taken:
            layer(x)
        return [(one.branch, one.route) for one in taken]

    before = routes()
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        warnings.simplefilter("error")
        assert NSAAttention(NSAConfig(**SMALL))(torch.randn(1, 100, 32)).shape == (1, 100, 32)
    assert routes() == before and (dispatch.Branch.SELECTED, dispatch.Route.SDPA) in before


@pytest.mark.parametrize("strict", [False, True])
def test_packs_are_refused_by_name(strict):
    layer = NSAAttention(NSAConfig(**SMALL))
    pack = dict(cu_seqlens=torch.tensor([0, 40, 100], dtype=torch.int32), max_seqlen=60)
    with pytest.raises(Exception, match="torch.export takes no packed sequences: cu_seqlens"):
        torch.export.export(layer, (torch.randn(100, 32),), pack, strict=strict)


def check_compiled(
    layer: torch.nn.Module, lengths: tuple[int, ...], dtype: torch.dtype, device: str, close: dict
) -> None:
    """Forward and backward at changing lengths by two graphs: of the first length, and of any."""
    torch.compiler.reset()
    (counters := torch._dynamo.utils.counters).clear()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for S in lengths:
        x, grads = randn(1, S, 32, seed=S, dtype=dtype, device=device), []
        for run in (compiled, layer):
            layer.zero_grad()
            out = run(x)
            out.float().square().sum().backward()
            grads.append([out, *(p.grad.clone() for p in layer.parameters())])
        torch.testing.assert_close(*grads, **close)
    assert counters["stats"]["unique_graphs"] <= 2 and not counters["graph_break"]


@pytest.mark.nightly
def test_compiled_for_any_length():
    torch.manual_seed(0)
    config = NSAConfig(**SMALL, l=8, d=4, l_sel=8, n_sel=3, w=16)
    close = dict(atol=1e-5, rtol=1e-4)
    check_compiled(NSAAttention(config), (40, 52, 7, 61), torch.float32, "cpu", close)


def trained(run: torch.nn.Module, x: torch.Tensor, loss) -> dict[str, torch.Tensor]:
    """The output of one training step, and the gradient of each parameter by its name."""
    run.zero_grad()
    out = run(x)
    loss(out).backward()
    grads = {name.split("_orig_mod.")[-1]: p.grad.clone() for name, p in run.named_parameters()}
    return {"out": out.detach().clone(), **grads}


def assert_close(got: dict, want: dict, out: float, grad: float) -> None:
    """Each within so much of its norm; what all compressed keys share moves no softmax, so that
    phi_k's last bias has a gradient of 0, and rounding alone."""
    norm = lambda x: x.float().norm().item()
    for name, b in want.items():
        off, size = norm(got[name] - b), norm(b)
        if name.endswith("phi_k.outer.bias"):
            size = norm(want[name.replace("bias", "weight")])
        assert off <= (out if name == "out" else grad) * size, (name, off, size)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_by_every_mode(mode, cuda):
    """Training at changing lengths, by inductor and by its CUDA graphs."""
    torch.manual_seed(0)
    config = NSAConfig(dim=256, heads=16, groups=1, d_k=64, d_v=64, w=128)
    model = NSALanguageModel(config, 128, 1).to(cuda, torch.bfloat16)
    torch.compiler.reset()
    compiled, loss = torch.compile(model, mode=mode), lambda x: x.float().logsumexp(-1).sum()
    for S in (512, 512, 512, 600):
        tokens = torch.randint(128, (1, S), device=cuda)
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(trained(compiled, tokens, loss), trained(model, tokens, loss), 0.03, 0.1)


def test_trained_by_cuda_graphs(cuda):
    """One graph of the forward and one of the backward: replays are right on other numbers."""
    torch.manual_seed(0)
    config = NSAConfig(dim=256, heads=16, groups=1, d_k=64, d_v=64)
    layer = NSAAttention(config).to(cuda, torch.bfloat16)
    draw = lambda seed: randn(1, 2048, 256, seed=seed, dtype=torch.bfloat16, device=cuda)
    graphed = torch.cuda.make_graphed_callables(copy.deepcopy(layer), (draw(0).requires_grad_(),))
    for seed in (1, 2):
        g, results = draw(-seed), []
        loss = lambda out, g=g: (out * g).sum()
        for run in (graphed, layer):
            x = draw(seed).requires_grad_()
            results.append(trained(run, x, loss) | {"x": x.grad})
        assert_close(*results, 0.01, 0.01)
