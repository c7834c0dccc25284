"""Backward of the selection kernels against the fp64 oracle: rows of every length, every path."""

from __future__ import annotations

import pytest
import torch

from nsa.kernels.triton_sel_kernel import sel_bwd, selection_ranges_triton, spans
from nsa.tests.helpers import HOSTILE_RANGE_KINDS, RANGE_KINDS, make_ranges, randn
from nsa.tests.sel_cases import check, gradients, inputs, rows_of

pytestmark = [pytest.mark.kernel, pytest.mark.core]


def run(case, dtype, ranges, device, *, path=None, S=4, Dv=24, **sizes):
    """[out, dq, dk, dv], held against the oracle."""
    x = inputs(dtype, device, S=S, Dv=Dv, seed=20, **sizes)
    grad_out = randn(*x[0].shape[:-1], Dv, seed=24, dtype=dtype, device=device)
    return check(case, x, ranges, grad_out=grad_out, path=path)


@pytest.mark.parametrize("kind", RANGE_KINDS + HOSTILE_RANGE_KINDS)
def test_backward_parity_ranges(kind, kernel_device):
    ranges = make_ranges(kind, 1, 2, 2, 70, 40, device=kernel_device, seed=3)
    run(f"bwd-{kind}", torch.float16, ranges, kernel_device, S=2)


@pytest.mark.parametrize("path", ["ranges", "varlen", "dense"])
def test_a_softmax_scale_is_taken_as_given(path, kernel_device):
    """Twice the default is the same as queries twice as large; buckets of equal and other rows."""
    x = inputs(torch.float32, kernel_device, G=1)
    ranges = rows_of([[[0, end]] for end in (9, 12, 40, 40)], kernel_device)
    grad_out = randn(1, 4, 1, 2, 24, seed=4, device=kernel_device)
    attend = lambda *x, **how: selection_ranges_triton(*x, ranges, path=path, **how)
    scaled = gradients(lambda *x: attend(*x, softmax_scale=0.5), x, grad_out)
    doubled = gradients(lambda q, k, v: attend(2 * q, k, v), x, grad_out)
    torch.testing.assert_close(scaled, doubled, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", ["ranges", "varlen"])
def test_backward_parity_mixed_lengths(path, kernel_device):
    """Rows of 0, 1, 17 and 70 keys in one call, keys that no row attends included."""
    spans = [[[0, 0], [9, 9]], [[69, 70], [0, 0]], [[3, 10], [30, 40]], [[0, 70], [5, 6]]]
    ranges = rows_of(spans, kernel_device, G=2)
    run(f"bwd-lengths-{path}", torch.float32, ranges, kernel_device, path=path)


def test_backward_parity_dense(kernel_device):
    ranges = rows_of([[[0, 40]], [[-3, 9]], [[60, 99]], [[30, 30]]], kernel_device, B=2, G=2)
    run("bwd-dense", torch.float16, ranges, kernel_device, path="dense", B=2)


@pytest.mark.parametrize("h, D, Dv", [(1, 8, 8), (3, 72, 40), (33, 24, 16), (4, 192, 128)])
def test_backward_parity_shapes(h, D, Dv, kernel_device):
    ranges = make_ranges("overlap", 1, 3, 1, 70, 66, device=kernel_device)
    run(f"bwd-h{h}-D{D}-Dv{Dv}", torch.float32, ranges, kernel_device, S=3, G=1, h=h, D=D, Dv=Dv)


@pytest.mark.parametrize("kind, size, parts", [("few", 4, 5), ("whole", 10, 2)])
def test_backward_parity_long_lists_are_split(kind, size, parts, kernel_device, monkeypatch):
    """More rows on one key tile than an item holds: partial sums, joined in a fixed order."""
    real, seen = sel_bwd.key_lists, []

    def small_chunks(*args):
        lists = real(*args[:-1], size)
        seen.append(lists.item_begin.diff().max().item())
        return lists

    monkeypatch.setattr(sel_bwd, "key_lists", small_chunks)
    ranges = make_ranges(kind, 1, 19, 1, 70, 65, device=kernel_device)
    call = lambda: run("bwd-split", torch.float32, ranges, kernel_device, S=19, G=1)
    first, again = call(), call()
    assert seen[0] == parts, f"19 rows in items of {size}"
    torch.testing.assert_close(first, again, rtol=0, atol=0)  # bitwise repeatable


def test_backward_parity_worst_case_and_exact_lists_agree(kernel_device, monkeypatch):
    """Lists sized for the worst case (no device wait) and for the true number of pairs."""
    ranges = make_ranges("mixed", 1, 4, 2, 200, 90, device=kernel_device, seed=2)
    first = run("bwd-bound", torch.float16, ranges, kernel_device, Skv=200)
    monkeypatch.setattr(spans, "_WORST_CASE_PAIRS", 0)
    exact = run("bwd-exact", torch.float16, ranges, kernel_device, Skv=200)
    torch.testing.assert_close(first, exact, rtol=0, atol=0)
