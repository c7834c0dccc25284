"""Backward of the selection kernels on a GPU at sizes that fill it, against fp64 PyTorch."""

from __future__ import annotations

import pytest
import torch

from nsa.kernels.triton_sel_kernel import selection_ranges_triton
from nsa.tests.sel_cases import check, gradients, plain_ranges
from nsa.tests.test_triton_sel_parity_gpu import spans_of

pytestmark = pytest.mark.kernel
CORE = pytest.mark.core  # what a standard report has

BF, HALF, FULL = torch.bfloat16, torch.float16, torch.float32


def inputs(dtype, S, G, h, D, Dv, Skv, seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, device="cuda", generator=gen).to(dtype)
    q, k, v = rand(1, S, G, h, D), rand(1, G, Skv, D), rand(1, G, Skv, Dv)
    return (q, k, v), rand(1, S, G, h, Dv), gen


def backward_parity(case, tensors, grad_out, ranges, path=None):
    """Masked attention in fp64 on the GPU is the truth: the oracle would take hours."""
    check(case, tensors, ranges, grad_out=grad_out, exact=plain_ranges, path=path)


@pytest.mark.parametrize("dtype, h, D, Dv", [
    *(pytest.param(*sizes, marks=CORE) for sizes in (
        (BF, 2, 128, 128), (BF, 4, 64, 64), (BF, 8, 64, 128), (BF, 16, 192, 128),
        (HALF, 8, 128, 128))),
    (BF, 4, 128, 128), (BF, 8, 128, 128), (BF, 16, 128, 128), (BF, 2, 128, 64), (HALF, 4, 64, 64),
])  # fmt: skip
def test_triton_sel_backward_gpu(dtype, h, D, Dv, cuda):
    for dist in ("few", "many", "mixed"):
        for S, L in ((64, 16), (200, 256)):
            tensors, grad_out, gen = inputs(dtype, S, 2, h, D, Dv, 500, h + D)
            ranges = torch.cat([spans_of(dist, S, L, 500, gen) for _ in range(2)], 2)
            case = f"bwd-{str(dtype)[6:]}-{dist}-h{h}-D{D}-Dv{Dv}-S{S}-L{L}"
            backward_parity(case, tensors, grad_out, ranges)


FP32 = FULL, 100, "mixed", 128


@CORE
@pytest.mark.parametrize("dtype, S, dist, L, D, Dv, h", [
    (*FP32, 64, 64, 4), (*FP32, 128, 128, 8), (*FP32, 256, 256, 2),
    (BF, 60, "many", 64, 256, 256, 33),  # several head tiles, the largest tiles of all
])  # fmt: skip
def test_triton_sel_backward_fp32_and_wide_heads_gpu(dtype, S, dist, L, D, Dv, h, cuda):
    tensors, grad_out, gen = inputs(dtype, S, 1, h, D, Dv, 300, D)
    ranges = spans_of(dist, S, L, 300, gen)
    backward_parity(f"bwd-{str(dtype)[6:]}-h{h}-D{D}", tensors, grad_out, ranges)


@CORE
@pytest.mark.parametrize("path", ["ranges", "varlen"])
def test_triton_sel_backward_hostile_ranges_gpu(path, cuda):
    """Overlapping, inverted, out-of-bounds and empty ranges drawn at random."""
    tensors, grad_out, gen = inputs(BF, 300, 2, 4, 128, 128, 300, 9)
    how = dict(device="cuda", generator=gen, dtype=torch.int32)
    ranges = torch.randint(-40, 340, (1, 300, 2, 5, 2), **how)
    backward_parity(f"bwd-hostile-{path}", tensors, grad_out, ranges, path)


@CORE
def test_triton_sel_backward_is_bitwise_repeatable_gpu(cuda):
    """Key tile 0 is attended by every row, so its list is split and its parts are summed."""
    tensors, grad_out, gen = inputs(BF, 3000, 1, 4, 64, 64, 3000, 3)
    ranges = spans_of("many", 3000, 256, 3000, gen)
    ranges[..., 0, :] = torch.tensor([0, 64], device="cuda")
    run = lambda: gradients(lambda *x: selection_ranges_triton(*x, ranges), tensors, grad_out)
    first = run()
    for _ in range(3):
        for name, a, b in zip(("out", "dQ", "dK", "dV"), first, run(), strict=True):
            assert torch.equal(a, b), name
