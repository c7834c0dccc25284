"""Are the gradients of every branch right: finite differences and the oracle's own autograd?"""

from __future__ import annotations

import pytest
import torch

import nsa
from nsa import reference
from nsa.tests.helpers import make_block_indices, make_qkv, make_ranges

pytestmark = pytest.mark.core

ROUTES = ["reference", "sdpa"]
D = torch.float64


def check(fn, inputs):
    assert torch.autograd.gradcheck(fn, inputs, atol=1e-7, rtol=1e-5)


def qkv(S=7, Skv=None, seed=0):
    return make_qkv(1, S, 2, 1, 4, 3, Skv=Skv, dtype=D, seed=seed, requires_grad=True)


@pytest.mark.parametrize("backend", ROUTES)
def test_gradcheck_sliding(backend):
    check(lambda *x: nsa.sliding_attention(*x, window=3, backend=backend), qkv())


@pytest.mark.parametrize("backend", ROUTES)
def test_gradcheck_compressed(backend):
    """Queries 0 and 1 see no key: their gradient is zero, not NaN."""
    check(lambda *x: nsa.compressed_attention(*x, l=3, d=1, backend=backend)[0], qkv(S=6, Skv=4))


@pytest.mark.parametrize("backend", ROUTES)
@pytest.mark.parametrize("kind", ["random", "ragged", "one_block"])
def test_gradcheck_selected_blocks(kind, backend):
    blocks = make_block_indices(kind, 1, 7, 1, 2, 2, seed=1)
    check(lambda *x: nsa.selection_attention(*x, blocks, block_size=2, backend=backend), qkv())


@pytest.mark.parametrize("backend", ROUTES)
@pytest.mark.parametrize("kind", ["mixed", "overlap", "some_empty", "inverted", "out_of_bounds"])
def test_gradcheck_selected_ranges(kind, backend):
    ranges = make_ranges(kind, 1, 5, 1, 9, 6, seed=2)
    check(lambda *x: nsa.selection_attention(*x, ranges=ranges, backend=backend), qkv(S=5, Skv=9))


@pytest.mark.parametrize("backend", ROUTES)
def test_gradcheck_packed(backend):
    cu = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    x = [t.detach()[0].requires_grad_() for t in qkv(S=9, seed=3)]
    check(lambda *x: nsa.sliding_attention(*x, window=3, cu_seqlens=cu, backend=backend), x)


@pytest.mark.parametrize("backend", ROUTES)
def test_empty_rows_give_zero_and_zero_gradients(backend):
    q, k, v = qkv(S=6, Skv=8, seed=10)
    ranges = make_ranges("all_but_one_empty", 1, 6, 1, 8, 5)
    out = nsa.selection_attention(q, k, v, ranges=ranges, backend=backend)
    assert out[:, :5].abs().max() == 0 and out[:, 5].abs().min() > 0
    out.sum().backward()
    assert q.grad[:, :5].abs().max() == 0 and q.grad[:, 5].abs().max() > 0
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    q, k, v = qkv(S=6, Skv=8, seed=10)
    out = nsa.selection_attention(q, k, v, ranges=torch.zeros_like(ranges), backend=backend)
    out.sum().backward()
    assert out.abs().max() == 0
    assert all(x.grad.abs().max() == 0 for x in (q, k, v))


def test_chunked_reference_has_the_same_gradients(monkeypatch):
    """Small chunks go through activation checkpointing; the default runs in one piece."""
    grads = []
    for chunk in (1 << 23, 2 * 7 * 2):
        monkeypatch.setattr(reference, "_CHUNK_SCORES", chunk)
        x = qkv(seed=11)
        out = nsa.sliding_attention(*x, window=4, backend="reference")
        grads.append((out.detach(), *torch.autograd.grad(out.square().sum(), x)))
    for whole, chunked in zip(*grads, strict=True):
        torch.testing.assert_close(chunked, whole, atol=1e-14, rtol=0)
