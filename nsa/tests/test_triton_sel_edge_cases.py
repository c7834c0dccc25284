"""Selection kernels at the edges: nothing selected, one key, poison outside, bad arguments."""

from __future__ import annotations

import pytest
import torch

from nsa import dispatch, launches
from nsa.kernels.triton_sel_kernel import selection_attention_triton, selection_ranges_triton
from nsa.kernels.triton_sel_kernel.sel_fwd import sel_attn_fwd_varlen
from nsa.tests import sel_cases
from nsa.tests.helpers import assert_finite, make_ranges
from nsa.tests.sel_cases import check, oracle_ranges, rows_of

HALF, FULL = torch.float16, torch.float32


def inputs(device, dtype=HALF, S=3, Skv=40, Dv=16, **how):
    return sel_cases.inputs(dtype, device, S=S, G=1, Skv=Skv, Dv=Dv, **how)


@pytest.mark.parametrize("n, path, sizes", [
    (3, "ranges", {}), (3, "varlen", {}), (1, "dense", {}), (0, None, {}), (2, None, dict(Skv=0)),
    (2, None, dict(B=0)), (2, None, dict(S=0)),
])  # fmt: skip
def test_nothing_to_attend_gives_zero_and_zero_gradients(n, path, sizes, kernel_device):
    leaves = inputs(kernel_device, grad=True, **sizes)
    lead = leaves[0].shape[:2]
    ranges = torch.zeros(*lead, 1, n, 2, dtype=torch.int32, device=kernel_device)
    if "Skv" in sizes:
        ranges += 1
    with launches.recording() as launched:
        out = selection_ranges_triton(*leaves, ranges, path=path)
        grads = torch.autograd.grad(out.sum(), leaves)
    assert out.shape == (*lead, 1, 2, 16) and (out == 0).all()
    for g, x in zip(grads, leaves, strict=True):
        assert g.shape == x.shape and (g == 0).all()
    assert path is None or launched["_sel_attn_bwd_dq_kernel"] == 1


@pytest.mark.parametrize("path", ["ranges", "dense"])
def test_keys_outside_the_ranges_are_never_read(path, kernel_device):
    """NaN in every other key must touch neither the output nor any gradient."""
    q, k, v = inputs(kernel_device)
    spans = [[3, 20]] if path == "dense" else [[3, 10], [12, 13], [15, 33]]
    ranges = rows_of([spans] * 3, kernel_device)
    other = torch.ones(40, dtype=torch.bool)
    for a, b in spans:
        other[a:b] = False
    k[:, :, other], v[:, :, other] = torch.nan, torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = selection_ranges_triton(*leaves, ranges, path=path)
    dq, dk, dv = torch.autograd.grad(out.float().square().sum(), leaves)
    assert_finite(out=out, dq=dq)
    assert_finite(dk=dk[:, :, ~other], dv=dv[:, :, ~other])
    assert (dk[:, :, other].nan_to_num(1) == 0).all() and (dv[:, :, other].nan_to_num(1) == 0).all()


def test_huge_scores_do_not_overflow(kernel_device):
    q, k, v = inputs(kernel_device, FULL)
    ranges = make_ranges("whole", 1, 3, 1, 40, 40, device=kernel_device)
    got = selection_ranges_triton(q * 200, k * 200, v, ranges)
    want = oracle_ranges(*(x.double() for x in (q * 200, k * 200, v)), ranges)
    torch.testing.assert_close(got.double(), want.to(got.device), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("path", ["ranges", "varlen", "dense"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_extreme_ranges_attend_their_keys_in_reach(dtype, path, kernel_device):
    """[300, INT_MIN) wraps around when its ends are subtracted, 2^32 is 0 in 32 bits."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    spans = [[300, low], [high, low], [low, high], [-5, high], [low, 7], [390, 1 << 30]]
    if dtype == torch.int64:
        spans += [[1 << 32, (1 << 32) + 5], [0, 5 - (1 << 32)], [3 - (1 << 32), 9]]
    want_spans = [[max(a, 0), max(min(b, 400), 0)] for a, b in spans]
    leaves = inputs(kernel_device, S=len(spans), Skv=400, grad=True)
    as_ranges = lambda x: torch.tensor(x, device=kernel_device)[None, :, None, None]
    results = []
    for ranges in (as_ranges(spans).to(dtype), as_ranges(want_spans).clamp(max=400)):
        out = selection_ranges_triton(*leaves, ranges, path=path)
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert_finite(**dict(zip(("out", "dq", "dk", "dv"), results[0], strict=True)))


def test_expanded_gradient_of_the_output(kernel_device):
    """sum() hands the backward a gradient of stride 0."""
    x = inputs(kernel_device, FULL)
    ranges = make_ranges("mixed", 1, 3, 1, 40, 30, device=kernel_device)
    ones = torch.ones((), device=kernel_device).expand(1, 3, 1, 2, 16)
    check("expanded", x, ranges, grad_out=ones)


def half(*shape, dtype=HALF):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("change, error, words", [
    (dict(K=half(1, 1, 40, 24)), ValueError, "K must be"),
    (dict(V=half(1, 1, 39, 16)), ValueError, "V must be"),
    (dict(Q=half(1, 3, 2, 16)), ValueError, r"Q must be \[B, S, G, h, Dk\], got shape"),
    *((dict(Q=half(*q), K=half(*k)), ValueError, "Q must have at least one group")
      for q, k in (((1, 3, 1, 2, 0), (1, 1, 40, 0)), ((1, 3, 0, 2, 16), (1, 0, 40, 16)))),
    *((dict(ranges=half(*shape).int()), ValueError, "ranges must be")
      for shape in ((1, 2, 1, 2, 2), (1, 3, 1, 2, 3))),
    (dict(ranges=half(1, 3, 1, 2, 2)), TypeError, "ranges must be int32 or int64"),
    (dict(K=torch.zeros(1, 1, 40, 16)), TypeError, "K must have Q's dtype"),
    *((dict(Q=half(1, 3, 1, 2, 16, dtype=x)), TypeError, f"Q must be float16 or .* got {x}")
      for x in (torch.int32, torch.float8_e4m3fn)),
    (dict(V=half(1, 1, 40, 16, dtype=torch.complex64)), TypeError, "V must be float16 .*complex64"),
    (dict(softmax_scale=float("nan")), ValueError, "softmax_scale must be a finite .*, got nan"),
    (dict(softmax_scale="1"), TypeError, "softmax_scale must be None or a number, got '1'"),
    (dict(path="fastest"), ValueError, "path must be None or one of"),
])  # fmt: skip
def test_bad_arguments_are_named(change, error, words):
    q, kv, ranges = half(1, 3, 1, 2, 16), half(1, 1, 40, 16), half(1, 3, 1, 2, 2).int()
    with pytest.raises(error, match=words):
        selection_attention_triton(**dict(Q=q, K=kv, V=kv, ranges=ranges) | change)


PACKED_ERRORS = [
    (dict(q=half(3, 16)), ValueError, r"Q must be \[N, H, D\], got shape"),
    (dict(q=[[1.0]]), TypeError, r"Q must be a tensor \[N, H, D\], got list"),
    (dict(k=half(6)), ValueError, r"K must be \[T, D\], got shape"),
    (dict(v=torch.zeros(6, 16)), TypeError, "V must have Q's dtype torch.float16, got"),
    (dict(q=half(2, 3, 24)), ValueError, "K's head size must be Q's 24"),
    (dict(cu=None), TypeError, "cu_seqlens must be a tensor .* got NoneType"),
    (dict(cu=torch.zeros(3)), TypeError, "cu_seqlens must be int32, got"),
    (dict(cu=torch.empty(3, device="meta").int()), ValueError, "cu_seqlens must be on Q.s device"),
    (dict(cu=torch.zeros(4, dtype=torch.int32)), ValueError, r"cu_seqlens must be \[N \+ 1 = 3\]"),
    (dict(softmax_scale="a"), TypeError, "softmax_scale must be None or a number"),
    (dict(splits=3), ValueError, "splits must be None or a power of two, got 3"),
    (dict(splits=-1), ValueError, "splits must be None or at least 1, got -1"),
    (dict(max_len=-5), ValueError, "max_len must be None or at least 0, got -5"),
    (dict(max_len=1.5), TypeError, "max_len must be None or an int, got 1.5"),
]


def packed_call(**change):
    given = dict(q=half(2, 3, 16), k=half(6, 16), v=half(6, 16), cu=torch.tensor([0, 2, 6]).int())
    q, k, v, cu, *_ = (given | change).values()
    how = {name: x for name, x in change.items() if name not in given}
    return sel_attn_fwd_varlen(q, k, v, cu, **how)


@pytest.mark.kernel
@pytest.mark.parametrize("change, error, words", PACKED_ERRORS, ids=[e[2] for e in PACKED_ERRORS])
def test_bad_arguments_of_packed_rows_are_named(change, error, words):
    if not dispatch.interpreting():
        pytest.skip("CPU tensors: another test says what is wrong with those")
    with pytest.raises(error, match=words):
        packed_call(**change)


@pytest.mark.skipif(dispatch.interpreting(), reason="TRITON_INTERPRET=1 takes CPU tensors")
def test_packed_rows_need_a_gpu():
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="Q must be on a CUDA device, got cpu"):
        packed_call()


@pytest.mark.parametrize("D, Dv, reason", [(12, 16, "align8"), (16, 264, "head_dim")])
def test_head_sizes_without_a_kernel_are_refused(D, Dv, reason):
    q, k, v = inputs("cpu", D=D, Dv=Dv)
    ranges = torch.zeros(1, 3, 1, 1, 2, dtype=torch.int32)
    with pytest.raises(dispatch.RouteUnavailable) as refused:
        selection_ranges_triton(q, k, v, ranges)
    assert refused.value.reason == reason


def test_dense_path_needs_one_range():
    q, k, v = inputs("cpu")
    ranges = torch.zeros(1, 3, 1, 2, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="needs one range per row"):
        selection_ranges_triton(q, k, v, ranges, path="dense")
