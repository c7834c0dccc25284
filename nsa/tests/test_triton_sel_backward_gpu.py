"""Backward of the selection kernels on a GPU at sizes that fill it, against fp64 PyTorch."""

from __future__ import annotations

import pytest
import torch

from nsa import launches
from nsa.kernels.triton_sel_kernel import selection_ranges_triton
from nsa.tests.sel_cases import assert_all_parity, gradients, plain_ranges
from nsa.tests.test_triton_sel_parity_gpu import spans_of

pytestmark = pytest.mark.kernel
CORE = pytest.mark.core  # what a standard report has

BACKWARD = ("_sel_attn_bwd_dq_kernel", "_sel_attn_bwd_dkdv_kernel", "_sel_attn_bwd_sum_kernel")


def inputs(dtype, S, G, h, D, Dv, Skv, seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, device="cuda", generator=gen).to(dtype)
    q, k, v = rand(1, S, G, h, D), rand(1, G, Skv, D), rand(1, G, Skv, Dv)
    return (q, k, v), rand(1, S, G, h, Dv), gen


def check(case, dtype, ranges, tensors, grad_out, path=None):
    with launches.recording() as launched:
        got = gradients(
            lambda *x: selection_ranges_triton(*x, ranges, path=path), tensors, grad_out
        )
    want = gradients(
        lambda *x: plain_ranges(*x, ranges), [x.double() for x in tensors], grad_out.double()
    )
    same = gradients(lambda *x: plain_ranges(*x, ranges), tensors, grad_out)
    assert_all_parity(case, got, want, same, kernels=BACKWARD, launched=launched)
    return got


BF, HALF = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    "dtype, h, D, Dv",
    [
        *(
            pytest.param(*sizes, marks=CORE)
            for sizes in (
                (BF, 2, 128, 128), (BF, 4, 64, 64), (BF, 8, 64, 128), (BF, 16, 192, 128),
                (HALF, 8, 128, 128),
            )
        ),
        (BF, 4, 128, 128), (BF, 8, 128, 128), (BF, 16, 128, 128), (BF, 2, 128, 64),
        (HALF, 4, 64, 64),
    ],
)  # fmt: skip
def test_triton_sel_backward_gpu(dtype, h, D, Dv, cuda):
    for dist in ("few", "many", "mixed"):
        for S, L in ((64, 16), (200, 256)):
            tensors, grad_out, gen = inputs(dtype, S, 2, h, D, Dv, 500, h + D)
            ranges = torch.cat([spans_of(dist, S, L, 500, gen) for _ in range(2)], 2)
            case = f"bwd-{str(dtype)[6:]}-{dist}-h{h}-D{D}-Dv{Dv}-S{S}-L{L}"
            check(case, dtype, ranges, tensors, grad_out)


FP32 = torch.float32, 100, "mixed", 128


@CORE
@pytest.mark.parametrize("dtype, S, dist, L, D, Dv, h", [
    (*FP32, 64, 64, 4), (*FP32, 128, 128, 8), (*FP32, 256, 256, 2),
    (BF, 60, "many", 64, 256, 256, 33),  # several head tiles, the largest tiles of all
])  # fmt: skip
def test_triton_sel_backward_fp32_and_wide_heads_gpu(dtype, S, dist, L, D, Dv, h, cuda):
    tensors, grad_out, gen = inputs(dtype, S, 1, h, D, Dv, 300, D)
    check(
        f"bwd-{str(dtype)[6:]}-h{h}-D{D}", dtype, spans_of(dist, S, L, 300, gen), tensors, grad_out
    )


@CORE
@pytest.mark.parametrize("path", ["ranges", "varlen"])
def test_triton_sel_backward_hostile_ranges_gpu(path, cuda):
    """Overlapping, inverted, out-of-bounds and empty ranges drawn at random."""
    tensors, grad_out, gen = inputs(torch.bfloat16, 300, 2, 4, 128, 128, 300, 9)
    ranges = torch.randint(
        -40, 340, (1, 300, 2, 5, 2), device="cuda", generator=gen, dtype=torch.int32
    )
    check(f"bwd-hostile-{path}", torch.bfloat16, ranges, tensors, grad_out, path)


@CORE
def test_triton_sel_backward_is_bitwise_repeatable_gpu(cuda):
    """Key tile 0 is attended by every row, so its list is split and its parts are summed."""
    tensors, grad_out, gen = inputs(torch.bfloat16, 3000, 1, 4, 64, 64, 3000, 3)
    ranges = spans_of("many", 3000, 256, 3000, gen)
    ranges[..., 0, :] = torch.tensor([0, 64], device="cuda")
    run = lambda: gradients(lambda *x: selection_ranges_triton(*x, ranges), tensors, grad_out)
    first = run()
    for _ in range(3):
        for name, a, b in zip(("out", "dQ", "dK", "dV"), first, run(), strict=True):
            assert torch.equal(a, b), name
