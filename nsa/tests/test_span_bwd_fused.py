"""The fused backward of compressed attention: right, really run, and never where torch asks for
deterministic algorithms."""

from __future__ import annotations

import pytest
import torch

from nsa import launches
from nsa.flags import clear_flags_cache
from nsa.tests import test_prefill_kernels as kernels_of
from nsa.tests.helpers import deterministic, randn
from nsa.tests.test_prefill_kernels import F32, Shape

pytestmark = pytest.mark.kernel
FUSED = "_span_bwd_fused_kernel"
TWO_PASSES = {"_span_bwd_dq_kernel", "_span_bwd_dkdv_kernel"}

SHAPES = [
    Shape((53,), h=4),
    Shape((45, 45), G=1, h=8, D=48, Dv=16),
    Shape((5, 41, 1, 22), h=4, packed=True),
    *(kernels_of.SHAPES[i] for i in (6, 8, 9)),
]
ALL = pytest.mark.parametrize(
    "shape",
    [pytest.param(s, marks=[pytest.mark.core] if i == 3 else []) for i, s in enumerate(SHAPES)],
    ids=str,
)
SMALL = pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
SMALL_AND_BIG = pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]], ids=str)


@pytest.fixture
def device(device, monkeypatch):
    monkeypatch.setenv("NSA_USE_GLUON", "0")  # see test_hopper.py
    clear_flags_cache()
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the fused backward needs SM 9.0")
    return device


@pytest.fixture
def short_shares(monkeypatch):
    """Several programs per key tile even where the sequence is short; counts what was chosen."""
    from nsa.kernels.prefill import span_bwd_fused

    shares = []

    def share(sq, columns, block_q, sms):
        shares.append(2 * block_q)
        return shares[-1]

    monkeypatch.setattr(span_bwd_fused, "query_share", share)
    return shares


@ALL
def test_compressed(shape, device):
    with launches.recording() as counts:
        kernels_of.test_compressed(shape, device)
    assert counts[FUSED] == 1 and not TWO_PASSES & set(counts), dict(counts)


# A key first seen by the second query of a tile; 17 compressed keys, one in a tile of its own.
@pytest.mark.parametrize(
    "shape", [Shape((45,), G=1, h=4, l=4, d=2), Shape((68, 5), G=1, h=4, l=4, d=4, packed=True)],
    ids=str,
)  # fmt: skip
def test_keys_beside_the_edges_of_tiles(shape, device):
    test_compressed(shape, device)


@SMALL
def test_many_programs_share_a_key(shape, device, short_shares):
    kernels_of.test_compressed(shape, device)
    assert short_shares


@SMALL_AND_BIG
def test_whole(shape, device):
    """It adds to the dQ that the window's pass wrote and selection added to."""
    with launches.recording() as counts:
        kernels_of.test_whole(shape, device)
    assert counts[FUSED] == 1
    assert all(counts[k] == 1 for k in TWO_PASSES)  # the window
    assert ("_block_attn_bwd_dq_kernel" in counts) == (shape.h > 8)


def backward(shape, device, q_start=0, scale=1.0, dq=None):
    """dq, dk, dv of random inputs whose queries stand at q_start, and the launches."""
    from nsa.kernels.prefill.span_bwd import span_attention_bwd
    from nsa.kernels.prefill.span_fwd import span_attention_fwd
    from nsa.kernels.prefill.span_kinds import COMPRESSED, Span

    span = Span(COMPRESSED, shape.l, shape.d)
    keys = (q_start + shape.lengths[0] - shape.l) // shape.d + 1
    draw = lambda i, *dims: randn(1, *dims, seed=i, dtype=shape.dtype, device=device)
    q = draw(0, shape.lengths[0], shape.G * shape.h, shape.D)
    do = draw(1, shape.lengths[0], shape.G * shape.h, shape.Dv)
    k, v = draw(2, keys, shape.G, shape.D), draw(3, keys, shape.G, shape.Dv)
    q[..., 0], k[..., 0] = scale, -scale  # every score is lower by scale ** 2 / 2
    out, lse = span_attention_fwd(q, k, v, span, 0.5, q_start=q_start)
    if dq is not None:
        dq = torch.full(q.shape, dq, dtype=torch.float32, device=device)
    with launches.recording() as counts:
        grads = span_attention_bwd(do, q, k, v, out, lse, span, 0.5, dq=dq, q_start=q_start)
    return grads, counts


def close(got, want):
    for name, a, b in zip("qkv", got, want, strict=False):
        size = b.abs().max().item()
        torch.testing.assert_close(
            a.float(), b.float(), rtol=1e-2, atol=1e-2 * size, msg=lambda m, n=name: n + m
        )


# Some queries come after the last compressed key's first one, whole tiles of them.
@pytest.mark.parametrize("shape", [Shape((54,), G=1, h=16), SHAPES[3]], ids=str)
def test_chunks_and_deep_scores(shape, device):
    """Queries that start in mid-sequence; probabilities of keys past the end would overflow."""
    got, counts = backward(shape, device, q_start=37, scale=20.0)
    split = {"_round_keys_kernel"}  # whose sums are in fp32
    always = {"_finite_kernel", "_attn_bwd_delta_kernel", FUSED, "_round_kernel"}
    assert set(counts) - split == always
    with deterministic():
        want, counts = backward(shape, device, q_start=37, scale=20.0)
    assert set(counts) == {"_finite_kernel", "_attn_bwd_delta_kernel", *TWO_PASSES}
    close(got, want)


@SMALL_AND_BIG
def test_dq_is_added_without_the_softmax_scale(shape, device):
    """Both ways add dQ / 0.5 to what an fp32 buffer holds."""
    (want, *_), _ = backward(shape, device)
    (one, *_), counts = backward(shape, device, dq=3.0)
    assert counts[FUSED] == 1
    with deterministic():
        (two, *_), counts = backward(shape, device, dq=3.0)
    assert counts["_span_bwd_dq_kernel"] == 1
    for got in (one, two):
        assert got.dtype == torch.float32
        close([(got - 3.0) * 0.5], [want])


@pytest.mark.parametrize(
    "shape",
    [Shape((21,), h=2), Shape((21,), h=12), Shape((21,), h=4, dtype=F32), Shape((21,), h=4, D=24)],
    ids=str,
)
def test_shapes_without_a_fused_kernel_take_two_passes(shape, device):
    _, counts = backward(shape, device)
    assert set(counts) == {"_finite_kernel", "_attn_bwd_delta_kernel", *TWO_PASSES}


@pytest.mark.parametrize("sms", [1, 132])
@pytest.mark.parametrize("sq, columns", [(1, 1), (8192, 16), (65536, 128), (65536, 2048)])
def test_shares_are_whole_query_tiles(sq, columns, sms):
    from nsa.kernels.prefill.span_bwd_fused import query_share

    share = query_share(sq, columns, 12, sms)
    assert 128 <= share <= 2048 + 12 and share % 12 == 0
