"""Backward of the selection kernels against the fp64 oracle: rows of every length, every path."""

from __future__ import annotations

import pytest
import torch

from nsa import launches
from nsa.kernels.triton_sel_kernel import sel_bwd, selection_ranges_triton, spans
from nsa.tests.helpers import HOSTILE_RANGE_KINDS, RANGE_KINDS, make_ranges, randn
from nsa.tests.sel_cases import assert_all_parity, gradients, oracle_ranges, plain_ranges

pytestmark = [pytest.mark.kernel, pytest.mark.core]
BACKWARD = ("_sel_attn_bwd_dq_kernel", "_sel_attn_bwd_dkdv_kernel", "_sel_attn_bwd_sum_kernel")


def run(case, dtype, ranges, device, *, path=None, B=1, S=4, G=2, h=2, Skv=70, D=16, Dv=24):
    kw = {"dtype": dtype, "device": device}
    q = randn(B, S, G, h, D, seed=21, **kw)
    k, v = randn(B, G, Skv, D, seed=22, **kw), randn(B, G, Skv, Dv, seed=23, **kw)
    grad_out = randn(B, S, G, h, Dv, seed=24, **kw)
    with launches.recording() as launched:
        got = gradients(
            lambda *x: selection_ranges_triton(*x, ranges, path=path), (q, k, v), grad_out
        )
    want = gradients(
        lambda *x: oracle_ranges(*x, ranges), [x.double() for x in (q, k, v)], grad_out
    )
    same = gradients(lambda *x: plain_ranges(*x, ranges), (q, k, v), grad_out)
    assert_all_parity(case, got, want, same, kernels=BACKWARD, launched=launched, seed=21)
    return got


@pytest.mark.parametrize("kind", RANGE_KINDS + HOSTILE_RANGE_KINDS)
def test_backward_parity_ranges(kind, kernel_device):
    ranges = make_ranges(kind, 1, 2, 2, 70, 40, device=kernel_device, seed=3)
    run(f"bwd-{kind}", torch.float16, ranges, kernel_device, S=2)


@pytest.mark.parametrize("path", ["ranges", "varlen", "dense"])
def test_a_softmax_scale_is_taken_as_given(path, kernel_device):
    """Twice the default is the same as queries twice as large; buckets of equal and other rows."""
    kw = {"dtype": torch.float32, "device": kernel_device}
    q = randn(1, 4, 1, 2, 16, seed=1, **kw)
    k, v = randn(1, 1, 70, 16, seed=2, **kw), randn(1, 1, 70, 24, seed=3, **kw)
    ends = torch.tensor([9, 12, 40, 40], dtype=torch.int32, device=kernel_device)
    ranges = torch.stack([ends * 0, ends], -1)[None, :, None, None]
    grad_out = randn(1, 4, 1, 2, 24, seed=4, **kw)
    attend = lambda *x, **how: selection_ranges_triton(*x, ranges, path=path, **how)
    scaled = gradients(lambda *x: attend(*x, softmax_scale=0.5), (q, k, v), grad_out)
    doubled = gradients(lambda q, k, v: attend(2 * q, k, v), (q, k, v), grad_out)
    torch.testing.assert_close(list(scaled), list(doubled), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", ["ranges", "varlen"])
def test_backward_parity_mixed_lengths(path, kernel_device):
    """Rows of 0, 1, 17 and 70 keys in one call, keys that no row attends included."""
    spans = [[[0, 0], [9, 9]], [[69, 70], [0, 0]], [[3, 10], [30, 40]], [[0, 70], [5, 6]]]
    ranges = torch.tensor(spans, dtype=torch.int32, device=kernel_device)
    ranges = ranges[None, :, None].expand(1, 4, 2, 2, 2)
    run(f"bwd-lengths-{path}", torch.float32, ranges, kernel_device, path=path)


def test_backward_parity_dense(kernel_device):
    spans = torch.tensor([[0, 40], [-3, 9], [60, 99], [30, 30]], dtype=torch.int32)
    ranges = spans[None, :, None, None].expand(2, 4, 2, 1, 2).to(kernel_device)
    run("bwd-dense", torch.float16, ranges, kernel_device, path="dense", B=2)


@pytest.mark.parametrize("h, D, Dv", [(1, 8, 8), (3, 72, 40), (33, 24, 16), (4, 192, 128)])
def test_backward_parity_shapes(h, D, Dv, kernel_device):
    ranges = make_ranges("overlap", 1, 3, 1, 70, 66, device=kernel_device)
    run(f"bwd-h{h}-D{D}-Dv{Dv}", torch.float32, ranges, kernel_device, S=3, G=1, h=h, D=D, Dv=Dv)


@pytest.mark.parametrize("kind, size, parts", [("few", 4, 5), ("whole", 10, 2)])
def test_backward_parity_long_lists_are_split(kind, size, parts, kernel_device, monkeypatch):
    """More rows on one key tile than an item holds: partial sums, joined in a fixed order."""
    real = sel_bwd.key_lists
    seen = []

    def small_chunks(*args):
        lists = real(*args[:-1], size)
        seen.append((lists.item_begin[1:] - lists.item_begin[:-1]).max().item())
        return lists

    monkeypatch.setattr(sel_bwd, "key_lists", small_chunks)
    ranges = make_ranges(kind, 1, 19, 1, 70, 65, device=kernel_device)
    first = run("bwd-split", torch.float32, ranges, kernel_device, S=19, G=1)
    assert seen[0] == parts, f"19 rows in items of {size}"
    again = run("bwd-split", torch.float32, ranges, kernel_device, S=19, G=1)
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a, b), "gradients must be bitwise repeatable"


def test_backward_parity_worst_case_and_exact_lists_agree(kernel_device, monkeypatch):
    """Lists sized for the worst case (no device wait) and for the true number of pairs."""
    ranges = make_ranges("mixed", 1, 4, 2, 200, 90, device=kernel_device, seed=2)
    first = run("bwd-bound", torch.float16, ranges, kernel_device, Skv=200)
    monkeypatch.setattr(spans, "_WORST_CASE_PAIRS", 0)
    exact = run("bwd-exact", torch.float16, ranges, kernel_device, Skv=200)
    for a, b in zip(first, exact, strict=True):
        assert torch.equal(a, b)
