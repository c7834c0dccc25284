"""The fused backward of compressed and sliding attention: right, really run, and never where
torch asks for deterministic algorithms."""

from __future__ import annotations

import pytest
import torch

from nsa import launches
from nsa.tests import test_prefill_kernels as kernels_of
from nsa.tests.helpers import randn
from nsa.tests.test_prefill_kernels import BF16, F32, PAPER, Shape

pytestmark = pytest.mark.kernel
FUSED = "_span_bwd_fused_kernel"
TWO_PASSES = {"_span_bwd_dq_kernel", "_span_bwd_dkdv_kernel"}

SHAPES = [
    Shape((53,), h=4),
    Shape((45, 45), G=1, h=8, D=48, Dv=16),
    Shape((5, 41, 1, 22), h=4, packed=True),
    Shape((1000,), G=4, h=16, D=128, Dv=128, dtype=BF16, n_sel=8, **PAPER),
    Shape((2048,), G=1, h=16, D=192, Dv=128, dtype=BF16, n_sel=16, **PAPER),
    Shape((777, 777), G=2, h=8, D=64, Dv=64, n_sel=4, **PAPER),
    Shape((1, 700, 63, 64, 65, 333), G=2, h=4, D=128, Dv=128, n_sel=4, packed=True, **PAPER),
]
ALL = pytest.mark.parametrize("shape", SHAPES, ids=str)
SMALL = pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
SMALL_AND_BIG = pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]], ids=str)


@pytest.fixture
def device(kernel_device, shape):
    if kernel_device == "cpu" and shape.big:
        pytest.skip("a GPU's size: the interpreter would take hours")
    if kernel_device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fused backward needs SM 9.0")
    return kernel_device


@pytest.fixture
def fused(monkeypatch):
    """The fused pass on. Its module is imported here: Triton is not everywhere."""
    from nsa.kernels.prefill import span_bwd, span_bwd_fused

    monkeypatch.setattr(span_bwd, "FUSED", True)
    return span_bwd_fused


@pytest.fixture
def short_shares(fused, monkeypatch):
    """Several programs per key tile even where the sequence is short; counts what was chosen."""
    shares = []

    def share(span, sq, columns, block_q, block_n, sms):
        shares.append(2 * block_q)
        return shares[-1]

    monkeypatch.setattr(fused, "query_share", share)
    return shares


def expect_fused(monkeypatch):
    """From here on check() of the other module's tests wants the fused kernel and nothing else."""
    real = kernels_of.check

    def check(case, inputs, names, ours, theirs, kernels):
        wanted = [k for k in kernels if k not in TWO_PASSES]
        if len(wanted) < len(kernels):
            wanted.append(FUSED)
        with launches.recording() as counts:
            real(f"{case}-fused", inputs, names, ours, theirs, wanted)
        assert not TWO_PASSES & set(counts), dict(counts)

    monkeypatch.setattr(kernels_of, "check", check)


@ALL
def test_compressed(shape, device, fused, monkeypatch):
    expect_fused(monkeypatch)
    kernels_of.test_compressed(shape, device)


@ALL
def test_sliding(shape, device, fused, monkeypatch):
    expect_fused(monkeypatch)
    kernels_of.test_sliding(shape, device)


@SMALL
def test_many_programs_share_a_key(shape, device, short_shares, monkeypatch):
    expect_fused(monkeypatch)
    kernels_of.test_compressed(shape, device)
    kernels_of.test_sliding(shape, device)
    assert len(short_shares) == 2


@SMALL_AND_BIG
def test_whole(shape, device, fused, monkeypatch):
    """Two branches add to the dQ that the third one wrote."""
    expect_fused(monkeypatch)
    kernels_of.test_whole(shape, device)


def backward(shape, device, mode, q_start=0, seed=0, scale=1.0):
    """dq, dk, dv of random inputs whose queries stand at q_start, and the launches."""
    from nsa.kernels.prefill.span_bwd import span_attention_bwd
    from nsa.kernels.prefill.span_fwd import span_attention_fwd
    from nsa.kernels.prefill.span_kinds import COMPRESSED, Span

    span = Span(mode, shape.l, shape.d) if mode == COMPRESSED else Span(mode, shape.w)
    end = q_start + shape.lengths[0]
    keys = (end - shape.l) // shape.d + 1 if mode == COMPRESSED else end
    draw = lambda i, *dims: randn(1, *dims, seed=10 * seed + i, dtype=shape.dtype, device=device)
    q = draw(0, shape.lengths[0], shape.G * shape.h, shape.D)
    do = draw(1, shape.lengths[0], shape.G * shape.h, shape.Dv)
    k, v = draw(2, keys, shape.G, shape.D), draw(3, keys, shape.G, shape.Dv)
    q[..., 0], k[..., 0] = scale, -scale  # every score is lower by scale ** 2
    out, lse = span_attention_fwd(q, k, v, span, 1.0, q_start=q_start)
    with launches.recording() as counts:
        grads = span_attention_bwd(do, q, k, v, out, lse, span, 1.0, q_start=q_start)
    return grads, counts


# Some queries come after the last compressed key's first one, whole tiles of them.
@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("shape", [Shape((54,), G=1, h=16), SHAPES[3]], ids=str)
def test_chunks_and_deep_scores(shape, mode, device, fused, monkeypatch):
    """Queries that start in mid-sequence; probabilities of keys past the end would overflow."""
    from nsa.kernels.prefill import span_bwd

    got, counts = backward(shape, device, mode, q_start=37, scale=15.0)
    assert set(counts) == {"_attn_bwd_delta_kernel", FUSED}
    monkeypatch.setattr(span_bwd, "FUSED", False)
    want, counts = backward(shape, device, mode, q_start=37, scale=15.0)
    assert set(counts) == {"_attn_bwd_delta_kernel", *TWO_PASSES}
    for name, a, b in zip("qkv", got, want, strict=True):
        size = b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * size, msg=lambda m, n=name: n + m)


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("mode", [0, 1])
@SMALL_AND_BIG
def test_deterministic_gradients_repeat_bitwise(shape, mode, device, fused):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, counts = backward(shape, device, mode)
        again, _ = backward(shape, device, mode)
    finally:
        torch.use_deterministic_algorithms(before)
    assert set(counts) == {"_attn_bwd_delta_kernel", *TWO_PASSES}
    for name, a, b in zip("qkv", first, again, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "shape",
    [Shape((21,), h=2), Shape((21,), h=12), Shape((21,), h=4, dtype=F32), Shape((21,), h=4, D=24)],
    ids=str,
)
def test_shapes_without_a_fused_kernel_take_two_passes(shape, device, fused):
    _, counts = backward(shape, device, 0)
    assert set(counts) == {"_attn_bwd_delta_kernel", *TWO_PASSES}


@pytest.mark.parametrize("sms", [1, 132])
@pytest.mark.parametrize("sq, columns", [(1, 1), (8192, 16), (65536, 128), (65536, 2048)])
def test_shares_are_whole_query_tiles(sq, columns, sms, fused):
    from nsa.kernels.prefill.span_kinds import COMPRESSED, SLIDING, Span

    for span in (Span(COMPRESSED, 32, 16), Span(SLIDING, 512)):
        share = fused.query_share(span, sq, columns, 16, 128, sms)
        assert share > 0 and share % 16 == 0
    # One program per key tile of a window where those alone keep the GPU busy.
    assert (share >= min(640, sq)) == (columns >= 1.5 * sms or sq == 1)
