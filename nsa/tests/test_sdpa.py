"""The branches on torch's SDPA against the oracle, their gradients against plain PyTorch."""

import functools

import pytest
import torch
from torch.utils._pytree import tree_leaves

import nsa
from nsa import launches, oracle, reference, select
from nsa.blocks import num_compressed
from nsa.kernels import sdpa
from nsa.tests.helpers import (
    HOSTILE_RANGE_KINDS,
    RANGE_KINDS,
    Watch,
    grads,
    make_block_indices,
    make_qkv,
    make_ranges,
    randn,
)

F64 = torch.float64
# Queries, the first one's position, and sizes; those of FlashAttention-2 take them too.
SLIDING = [(23, 0, 5), (23, 0, 64), (6, 19, 7), (1, 30, 8), (1, 0, 1), (9, 3, 1)]
COMPRESSED = [
    (40, 0, 8, 4), (37, 0, 8, 8), (13, 17, 8, 4), (1, 30, 8, 4), (7, 0, 8, 4), (5, 5, 8, 4),
    (9, 0, 4, 1),
]  # fmt: skip


@pytest.fixture(params=["whole", "chunked"])
def chunks(request, monkeypatch):
    """Once as it is, once with chunks so small that every branch needs several."""
    if request.param == "chunked":
        monkeypatch.setattr(sdpa, "_CHUNK", 4)
        monkeypatch.setattr(sdpa, "_CHUNK_ELEMENTS", 64)
        monkeypatch.setattr(sdpa, "_CHUNK_ROWS", 5)
    return request.param


def matches(run, plain, truth, inputs):
    """run() is the oracle's truth, and its gradients are those of plain(); lse goes in through exp,
    so that rows without keys have a finite gradient."""

    def mixed(run, *x):
        out = run(*x)
        return out if isinstance(out, torch.Tensor) else out[0] * (1 + out[1].exp()[..., None])

    out = run(*inputs)
    torch.testing.assert_close(out, truth(*inputs))
    grad_out = randn(*mixed(run, *inputs).shape, seed=99, dtype=F64)
    both = (grads(functools.partial(mixed, f), inputs, grad_out) for f in (run, plain))
    for name, a, b in zip("qkv", *both, strict=True):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"d{name}: {m}")
    return out


def libs(branch):
    """The branch by SDPA, by plain PyTorch and by the oracle."""
    plain, truth = (getattr(lib, f"{branch}_attention") for lib in (reference, oracle))
    return getattr(sdpa, f"{branch}_sdpa"), plain, truth


@pytest.mark.parametrize("kind", RANGE_KINDS + HOSTILE_RANGE_KINDS)
def test_selection(kind, chunks):
    inputs = make_qkv(2, 6, 6, 2, 8, 5, Skv=20, dtype=F64, seed=1)
    ranges = select.clean_ranges(make_ranges(kind, 2, 6, 2, 20, 9, seed=2), 20)
    of = lambda f: lambda *x: f(*x, ranges, softmax_scale=0.3)
    matches(*map(of, libs("selection")), inputs)


def test_calls_are_counted_by_branch_and_have_no_more_rows_than_a_grid_takes(monkeypatch):
    q, k, v = make_qkv(1, 18, 4, 2, 8, dtype=F64)
    ends = torch.arange(18, dtype=torch.int32)[None, :, None, None].expand(1, 18, 2, 1)
    ranges = torch.stack([ends * 0, ends], -1)
    select = lambda ranges: sdpa.selection_sdpa(q[:, : ranges.shape[1]], k, v, ranges)
    for run, name, times, rows in (
        (lambda: sdpa.sliding_sdpa(q, k, v, window=4), "sdpa_sliding", 1, 5),
        (lambda: sdpa.compressed_sdpa(q, k[:, :8], v[:, :8], l=4, d=2), "sdpa_compressed", 1, 5),
        (lambda: select(ranges[:, 9:10].expand(-1, 12, -1, -1, -1)), "sdpa_selection", 5, 5),
        # Rows of 1 .. 17 keys: one call for each of 1, 2, 3-4, 5-8, 9-16, 17; empty ones in none.
        (lambda: select(ranges), "sdpa_selection", 6, 1000),
    ):
        monkeypatch.setattr(sdpa, "_CHUNK_ROWS", rows)
        with launches.recording() as launched:
            out = run()
        assert launched == {name: times}
    torch.testing.assert_close(out, oracle.selection_attention(q, k, v, ranges))  # padded ones too


@pytest.mark.parametrize("grad", [False, True])
def test_positions_of_selected_keys_are_never_there_for_all_rows_at_once(grad, monkeypatch):
    """1,024 rows of 128 keys: int64 positions would take 1 MiB, rows and ranges take a quarter."""
    monkeypatch.setattr(sdpa, "_CHUNK_ELEMENTS", 1 << 15)
    q, k, v = (x.requires_grad_(grad) for x in make_qkv(1, 512, 4, 2, 16, dtype=torch.float16))
    k, v = (x[:, :1].expand(-1, 1024, -1, -1) for x in (k, v))
    blocks = make_block_indices("random", 1, 512, 2, 8, 16, q_start=512)
    made = []
    with Watch(
        lambda _, out: made.extend(x.nbytes for x in tree_leaves(out) if hasattr(x, "nbytes"))
    ):
        ranges = select.blocks_to_ranges(blocks, 16, torch.arange(512, 1024))
        out = sdpa.selection_sdpa(q, k, v, ranges)
        if grad:
            out.sum().backward()
    assert max(made) <= 512 * 2 * 256


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_nothing_to_attend_is_connected(shape):
    q, k, v = make_qkv(*shape, 4, 2, 8, Skv=9, requires_grad=True)
    ranges = torch.zeros(*shape, 2, 3, 2, dtype=torch.int32)
    for out in (
        sdpa.selection_sdpa(q, k, v, ranges),
        sdpa.sliding_sdpa(q, k, v, window=4),
        sdpa.compressed_sdpa(q, k, v, l=4, d=2)[0],
    ):
        assert out.shape == (*shape, 4, 8)
        for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
            assert grad.shape == x.shape and not grad.any()


@pytest.mark.parametrize("S, q_start, w", SLIDING)
def test_sliding(S, q_start, w, chunks):
    inputs = make_qkv(2, S, 4, 2, 8, 5, Skv=q_start + S + 1, dtype=F64, seed=S)
    of = lambda f: lambda *x: f(*x, window=w, q_start=q_start)
    matches(*map(of, libs("sliding")), inputs)


@pytest.mark.parametrize("S, q_start, l, d", COMPRESSED)
def test_compressed(S, q_start, l, d, chunks):
    N = num_compressed(q_start + S, l, d) + q_start % 2  # sometimes a key too many
    inputs = make_qkv(2, S, 4, 2, 8, 5, Skv=N, dtype=F64, seed=S)
    of = lambda f, **how: lambda *x: f(*x, l=l, d=d, q_start=q_start, **how)
    out, _ = matches(*map(of, libs("compressed")), inputs)
    alone, none = of(sdpa.compressed_sdpa, need_lse=False)(*inputs)
    assert torch.equal(alone, out) and none is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_lse_is_fp32_for_every_other_dtype(dtype):
    q, k, v = make_qkv(1, 12, 4, 2, 8, Skv=5, dtype=dtype)
    out, lse = sdpa.compressed_sdpa(q, k, v, l=4, d=2)
    assert out.dtype == dtype and lse.dtype == torch.float32
    want = oracle.compressed_attention(q, k, v, l=4, d=2)[1]
    torch.testing.assert_close(lse.double(), want, rtol=1e-5, atol=1e-5)


def test_memory_of_a_long_sequence_is_a_band(monkeypatch):
    """No call sees more than chunk x (window + chunk) scores; the whole would be 4096^2."""
    seen = []
    original = sdpa._sdpa

    def spy(name, q, k, v, mask, scale):
        seen.append(mask.shape)
        return original(name, q, k, v, mask, scale)

    monkeypatch.setattr(sdpa, "_sdpa", spy)
    q, k, v = make_qkv(1, 4096, 1, 1, 8)
    sdpa.sliding_sdpa(q, k, v, window=64)
    assert len(seen) == 16 and max(a * b for a, b in seen) <= 256 * (256 + 64)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_tensor_may_begin_anywhere_in_memory(dtype):
    """PyTorch's kernels read 16 bytes at once, from wherever queries, keys and values begin."""
    if not torch.cuda.is_available():
        pytest.skip("a CPU reads from any address")
    x = torch.randn(3, 64 * 2 * 8 + 1, device="cuda", dtype=dtype)
    q, k, v = (t[1:].view(1, 64, 2, 8) for t in x)
    out = nsa.sliding_attention(q, k, v, window=5, backend="sdpa")
    want = nsa.sliding_attention(q, k, v, window=5, backend="reference")
    torch.testing.assert_close(out, want, rtol=5e-3, atol=5e-3)
