"""Does phi compress the right tokens, keys and values alike, dense and packed?"""

import pytest
import torch

from nsa import oracle
from nsa.compress import MLPCompression, make_compression, mean_pool
from nsa.tests.cases import ends_of
from nsa.tests.helpers import assert_raises, randn


@pytest.mark.parametrize("S", [0, 1, 7, 8, 9, 11, 12, 30])
@pytest.mark.parametrize(("l", "d"), [(8, 4), (8, 8), (4, 2), (6, 2)])
def test_compression_matches_the_oracle(S, l, d):
    x = randn(2, S, 3, 5, seed=1, dtype=torch.float64)
    torch.manual_seed(0)
    phi = MLPCompression(5, l, d, hidden=7).double()
    weights = phi.position, *phi.inner.parameters(), *phi.outer.parameters()
    want_mlp = oracle.compress_mlp(x, *weights, l, d)
    for got, want in ((mean_pool(x, l, d), oracle.compress_mean(x, l, d)), (phi(x), want_mlp)):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["mean", "mlp"])
def test_packed_equals_each_sequence_alone(kind):
    phi, lengths = make_compression(kind, 6, 8, 4).double(), [5, 8, 0, 23, 13]
    x = randn(sum(lengths), 2, 6, seed=2, dtype=torch.float64)
    want = torch.cat([phi(part[None])[0] for part in x.split(lengths)])
    torch.testing.assert_close(phi(x, ends_of(lengths)), want, atol=1e-14, rtol=0)


@pytest.mark.parametrize("kind", ["mean", "mlp"])
def test_gradients_reach_tokens_and_parameters(kind):
    phi = make_compression(kind, 4, 4, 2).double()
    x = randn(1, 9, 1, 4, seed=4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(phi, (x,))
    phi(x).sum().backward()
    assert x.grad[:, :8].abs().min() > 0
    assert x.grad[:, 8].abs().max() == 0  # the tail belongs to no block yet
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in phi.parameters())


def test_half_precision_mean_accumulates_in_fp32():
    x = torch.full((1, 32, 1, 1), 2049.0, dtype=torch.float16)  # rounds to 2048 in fp16
    x[:, ::2] = 1.0
    assert mean_pool(x, 32, 32).item() == pytest.approx((1.0 + 2048.0) / 2, rel=1e-3)


def test_what_cannot_be_compressed_is_named():
    x, cu = torch.randn(2, 9, 2, 4), torch.tensor([0, 9], dtype=torch.int32)
    pool = lambda x, *rest: lambda: mean_pool(x, 8, *rest)
    phi = lambda *sizes: lambda: MLPCompression(*sizes)
    packed = lambda ends, kind=torch.int32: pool(x[0], 4, torch.tensor(ends, dtype=kind))
    assert_raises(
        (ValueError, r"x must be \[B, S, G, D\], got shape \[9, 2, 4\]", pool(x[0], 4)),
        (ValueError, r"be \[T, G, D\] with cu_seqlens, got shape \[2, 9, 2, 4\]", pool(x, 4, cu)),
        (TypeError, "x must be a tensor, got list", pool([1.0], 4)),
        (TypeError, "x must be of a floating dtype, got torch.int32", pool(x.int(), 4)),
        (ValueError, "d must divide l, got l=8 d=3$", pool(x, 3)),
        (ValueError, "cu_seqlens must rise from 0 to T=9 or less", packed([0, 8, 5, 9])),
        (ValueError, "cu_seqlens must rise from 0 to T=9 or less", packed([0, 10])),
        (ValueError, "cu_seqlens must rise from 0 to T=9 or less", packed([1, 9])),
        (ValueError, r"cu_seqlens must be \[nseq \+ 1\], got", packed([[0, 9]])),
        (TypeError, "cu_seqlens must be an int32 tensor", packed([0, 9], torch.float32)),
        (
            ValueError,
            r"x must have D=8 columns, got shape \[2, 9, 2, 1\]",
            lambda: MLPCompression(8, 8, 4)(x[..., :1]),
        ),
        (ValueError, "dim must be at least 1, got 0", phi(0, 8, 4)),
        (TypeError, "dim must be an int, got 8.0", phi(8.0, 8, 4)),
        (ValueError, "hidden must be None or at least 1, got 0", phi(8, 8, 4, 0)),
        (
            ValueError,
            "phi must be 'mlp' or 'mean'.* 'max'",
            lambda: make_compression("max", 4, 4, 2),
        ),
    )
