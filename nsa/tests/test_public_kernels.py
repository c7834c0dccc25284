"""Do the public functions reach the Triton kernels with the right arguments (backend="triton")?

Small shapes; the kernels' own tests go deeper. In Triton's interpreter or on a GPU.
"""

from __future__ import annotations

import pytest
import torch

import nsa
from bench.parity import assert_parity
from nsa import dispatch, launches, oracle
from nsa.compress import mean_pool
from nsa.config import NSAConfig
from nsa.flags import Flags
from nsa.module import NSAAttention
from nsa.tests.helpers import make_qkv, randn

pytestmark = pytest.mark.kernel
SIZES = dict(l=8, d=4, l_sel=16, n_sel=3)
GRAD = Flags(sel_triton_allow_grad=True, triton_sel_force=True)
H = torch.float16


def inputs(device, S=37, seed=0):
    q, k, v = make_qkv(1, S, 4, 2, 16, 16, dtype=H, device=device, seed=seed)
    return q, k, v, mean_pool(k, 8, 4), mean_pool(v, 8, 4)


def check(case, run, want, same_dtype):
    with launches.recording() as launched, dispatch.trace() as taken:
        out = run("triton")
    routes = {d.route.value for d in taken}
    assert_parity(
        case, "fwd", out, want.to(out.device), same_dtype, path_requested="triton",
        path_taken="+".join(sorted(routes)), launches=launched, rows=out.ndim == 4,
    )  # fmt: skip
    return launched


def test_compressed_and_sliding(kernel_device):
    q, k, v, k_cmp, v_cmp = inputs(kernel_device)
    wide = [t.double() for t in (q, k_cmp, v_cmp)]
    out, lse = oracle.compressed_attention(*wide, l=8, d=4)
    for i, (name, want) in enumerate((("out", out), ("lse", lse))):
        run = lambda backend, i=i: nsa.compressed_attention(
            q, k_cmp, v_cmp, l=8, d=4, backend=backend, flags=GRAD
        )[i]
        check(f"public-compressed-{name}", run, want, run("reference"))
    run = lambda backend: nsa.sliding_attention(q, k, v, window=9, backend=backend, flags=GRAD)
    want = oracle.sliding_attention(*[t.double() for t in (q, k, v)], window=9)
    check("public-sliding", run, want, run("reference"))


def test_choice_of_blocks(kernel_device):
    q, _, _, k_cmp, _ = inputs(kernel_device, seed=2)
    got = nsa.select_blocks(q, k_cmp, **SIZES, backend="triton", flags=GRAD)
    want = oracle.select_blocks(q.double().cpu(), k_cmp.double().cpu(), **SIZES)
    differ = (got.cpu() != want).any(-1)
    assert differ.float().mean() <= 0.02, differ.nonzero().tolist()  # near ties may swap in fp16


@pytest.mark.parametrize("steps", [[1, 1, 1], [3]], ids=str)
def test_decode_step(steps, kernel_device):
    from nsa.kernels.decode import step_kernels

    config = NSAConfig(dim=32, heads=4, groups=2, d_k=16, d_v=16, w=12, phi="mean", **SIZES)
    torch.manual_seed(0)
    layer = NSAAttention(config, backend="reference", flags=Flags(triton_sel_force=True))
    layer = layer.to(kernel_device, H)
    x = randn(2, 36, 32, seed=5, dtype=H, device=kernel_device)
    with torch.no_grad():
        want = layer.double()(x.double())[:, 33:]
        same = layer.to(H)(x)[:, 33:]
    cache = layer.make_cache(2, 64, count_reads=True)
    layer.prefill(x[:, :33], cache)
    layer.backend, at, parts = "triton", 33, []
    with launches.recording() as launched:
        for n in steps:
            parts.append(layer.step(x[:, at : at + n], cache))
            at += n
    expected = step_kernels(
        x.new_empty(2, steps[0], 4, 16), 2, 16, max_len=64, in_graph=False, **config.sizes()
    )
    assert_parity(
        "public-decode", "fwd", torch.cat(parts, 1), want, same, path_requested="triton",
        path_taken="triton", launches=launched, expect_kernels=expected,
    )  # fmt: skip
    assert sum(r.cmp for r in cache.reads()[1:]) == 7 + 7 + 8  # blocks end at 31, 31 and 35


@pytest.mark.parametrize("needs", ["q", "gates"])
def test_a_decode_step_gives_the_gradients_that_it_is_asked_for(needs, kernel_device):
    """The fused step has none: the kernels of prefill serve."""
    from nsa.attention import nsa_decode

    config = NSAConfig(dim=32, heads=4, groups=2, d_k=16, d_v=16, w=12, phi="mean", **SIZES)
    torch.manual_seed(0)
    layer = NSAAttention(config).to(kernel_device, H)
    cache = layer.make_cache(1, 48)
    layer.prefill(randn(1, 40, 32, seed=5, dtype=H, device=kernel_device), cache)
    x = dict(q=randn(1, 2, 4, 16, seed=6, dtype=H, device=kernel_device),
             gates=randn(1, 2, 4, 3, seed=7, dtype=H, device=kernel_device))  # fmt: skip
    x[needs].requires_grad_()
    grads = []
    for backend in ("triton", "reference"):
        out, _ = nsa_decode(x["q"], cache, None, x["gates"], backend=backend, flags=GRAD)
        grads += torch.autograd.grad(out, x[needs], torch.ones_like(out))
    assert grads[1].abs().max() > 0.1
    torch.testing.assert_close(*grads, atol=4e-3, rtol=4e-3)
