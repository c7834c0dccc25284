"""The declared matrix of selection shapes on a GPU, each cell against fp32 or fp64 PyTorch.

Rows of a cell select their keys from one shared cache: few is one span per row (dense kernels, in
place and packed), many is 8 equal spans (ranges kernel), mixed is 2, 4 or 8 random ones (ranges
kernel, and packed through the varlen kernels). All cells of a test are judged on the GPU by the
rules of bench.parity.assert_parity; the one nearest to a limit is then judged by it and recorded.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bench.parity import MAE_LIMIT, assert_parity
from nsa import dispatch, launches
from nsa.flags import Flags
from nsa.kernels import triton_sel_kernel as sel
from nsa.kernels.triton_sel_kernel import sel_fwd
from nsa.tests.helpers import HOSTILE_RANGE_KINDS, RANGE_KINDS, make_ranges
from nsa.tests.sel_cases import check, inputs, plain_dense

pytestmark = pytest.mark.kernel
CORE = pytest.mark.core  # what a standard report has; the whole matrix is the profile full's

LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
ROWS = (64, 256, 1024)
DISTRIBUTIONS = ("few", "many", "mixed")


def spans_of(dist: str, N: int, L: int, Skv: int, gen: torch.Generator) -> Tensor:
    """int32 [1, N, 1, n, 2] of disjoint spans that sum to L per row, on the GPU."""
    kw = dict(device="cuda", generator=gen)
    if dist == "few":
        start = torch.randint(0, Skv - L + 1, (N, 1), **kw)
        length = torch.full((N, 1), L, device="cuda")
    else:
        length = torch.full((N, 8), L // 8, device="cuda")
        if dist == "mixed":  # cut L at 1, 3 or 7 places; unused cuts make empty spans
            used = 2 ** torch.randint(1, 4, (N, 1), **kw)
            cuts = torch.randint(1, L, (N, 7), **kw)
            cuts = torch.where(torch.arange(7, device="cuda") < used - 1, cuts, L).sort(-1).values
            edges = torch.nn.functional.pad(cuts, (1, 0))
            edges = torch.cat([edges, torch.full((N, 1), L, device="cuda")], 1)
            length = edges.diff(dim=-1)
        gap = torch.rand(N, 8, **kw)
        gap = (gap / gap.sum(-1, keepdim=True) * (Skv - L)).long()
        start = gap.cumsum(-1) + length.cumsum(-1) - length
    return torch.stack([start, start + length], -1).int()[None, :, None]


def gathered(x: Tensor, ranges: Tensor, L: int) -> Tensor:
    """[N, L, D] keys of each row from x [Skv, D]."""
    spans = ranges[0, :, 0].long()
    lengths = spans[..., 1] - spans[..., 0]
    ends = lengths.cumsum(-1)
    slot = torch.arange(L, device=x.device).expand(len(spans), L).contiguous()
    which = torch.searchsorted(ends, slot, right=True)
    key = spans[..., 0].gather(1, which) + slot - (ends - lengths).gather(1, which)
    return x[key]


def nearness(out: Tensor, want: Tensor, same: Tensor) -> float:
    """The largest of error / limit over mean, maximum and worst row; NaN counts as infinity."""
    error, ref = (out.to(want.dtype) - want).abs(), (same.to(want.dtype) - want).abs()
    floor = torch.finfo(out.dtype).eps * want.abs().amax()
    near = torch.stack([
        error.mean() / MAE_LIMIT[out.dtype], error.amax() / (2 * ref.amax() + floor),
        error.mean(-1).amax() / (2 * ref.mean(-1).amax() + floor),
    ]).amax().item()  # fmt: skip
    return near if math.isfinite(near) else math.inf


@pytest.mark.parametrize("dtype, D, Dv, H", [
    pytest.param(dtype, D, Dv, H, marks=[CORE] * (H == reported))
    for dtype, D, Dv, reported in (
        (torch.bfloat16, 64, 64, 2), (torch.bfloat16, 64, 128, 4), (torch.bfloat16, 128, 64, 2),
        (torch.bfloat16, 128, 128, 8), (torch.float16, 128, 128, 4),
    )
    for H in (2, 4, 8)
])  # fmt: skip
def test_triton_sel_parity_matrix_gpu(dtype, D, Dv, H, cuda):
    """Every cell reads the cache in place; with bf16 and D = Dv the packed kernels take turns."""
    gen = torch.Generator("cuda").manual_seed(D + Dv + H)
    rand = lambda *shape: torch.randn(*shape, device="cuda", generator=gen).to(dtype)
    Skv = 2048
    K, V = rand(Skv, D), rand(Skv, Dv)
    packed_too = dtype is torch.bfloat16 and D == Dv
    packed = {
        "few": (sel_fwd.sel_attn_fwd_dense, sel_fwd.sel_attn_fwd_dense_group),
        "mixed": (sel_fwd.sel_attn_fwd_varlen, sel_fwd.sel_attn_fwd_varlen_group),
    }
    nearest, done = [], 0
    with launches.recording() as launched:
        for dist in DISTRIBUTIONS:
            for i, L in enumerate(LENGTHS):
                ranges_all = spans_of(dist, ROWS[-1], L, Skv, gen)
                q_all = rand(ROWS[-1], H, D)
                k_all, v_all = gathered(K, ranges_all, L), gathered(V, ranges_all, L)
                want = plain_dense(q_all.float(), k_all.float(), v_all.float())
                same = plain_dense(q_all, k_all, v_all)
                for N in ROWS:
                    q, k, v = q_all[:N], k_all[:N], v_all[:N]
                    outs = {"cache": sel.selection_ranges_triton(
                        q[None, :, None], K[None, None], V[None, None], ranges_all[:, :N]
                    )[0, :, 0]}  # fmt: skip
                    if packed_too and dist in packed:
                        run = packed[dist][i % 2]
                        cu = torch.arange(N + 1, device="cuda", dtype=torch.int32) * L
                        flat = (k.flatten(0, 1), v.flatten(0, 1), cu)
                        outs[run.__name__] = run(q, *((k, v) if dist == "few" else flat))
                    for name, out in outs.items():
                        near = nearness(out, want[:N], same[:N])
                        nearest.append((near, f"{dist}-{name}-N{N}-L{L}", out, (q, k, v)))
                        done += 1
                nearest = sorted(nearest, key=lambda cell: -cell[0])[:1]
    assert done == 63 + 42 * packed_too
    case = f"matrix-{str(dtype)[6:]}-D{D}-Dv{Dv}-H{H}"
    kernels = ["dense", "ranges", *["dense_group", "varlen", "varlen_group"] * packed_too]
    for _, cell, out, (q, k, v) in nearest:
        assert_parity(
            f"{case}-{cell}", "fwd", out, plain_dense(q.double(), k.double(), v.double()),
            plain_dense(q, k, v), path_requested="triton", path_taken="triton", launches=launched,
            expect_kernels=[f"_sel_attn_fwd_{name}_kernel" for name in kernels],
        )  # fmt: skip


# dtype (of fp32 no TF32 inside), rows, lengths with splits, heads.
WHOLE = torch.float32, 64, ((16, None), (100, None), (1024, None))
ODD = torch.bfloat16, 9, ((1, None), (77, None), (777, 4))
SIZES = [(*WHOLE, *x) for x in ((64, 64, 4), (128, 128, 8), (192, 128, 16), (256, 256, 2))]
SIZES += [(*ODD, *x) for x in ((8, 8, 1), (72, 40, 3), (192, 128, 16), (256, 136, 33))]


@CORE
@pytest.mark.parametrize("dtype, N, lengths, D, Dv, H", SIZES)
def test_triton_sel_parity_fp32_and_odd_sizes_gpu(dtype, N, lengths, D, Dv, H, cuda):
    gen = torch.Generator("cuda").manual_seed(D)
    rand = lambda *shape: torch.randn(*shape, device="cuda", generator=gen).to(dtype)
    for L, splits in lengths:
        q, k, v = rand(N, H, D), rand(N, L, D), rand(N, L, Dv)
        with launches.recording() as launched:
            out = sel_fwd.sel_attn_fwd_dense_group(q, k, v, splits=splits)
        assert_parity(
            f"{str(dtype)[6:]}-D{D}-Dv{Dv}-H{H}-L{L}", "fwd", out,
            plain_dense(q.double(), k.double(), v.double()), plain_dense(q, k, v),
            path_requested="triton", path_taken="triton", launches=launched,
            expect_kernels=["_sel_attn_fwd_dense_group_kernel"]
            + ["_sel_attn_merge_kernel"] * (splits is not None),
        )  # fmt: skip


@CORE
def test_triton_wrapper_parity_multirange_small_gpu(cuda):
    """The wrapper in automatic mode: policy, cleaning of hostile ranges, every path."""
    x = inputs(torch.bfloat16, "cuda", B=2, S=6, h=4, Skv=96, D=64, Dv=128)
    flags = Flags(use_triton_sel=True, triton_sel_force=True, sel_triton_min_L=1)
    for kind in (*RANGE_KINDS, *HOSTILE_RANGE_KINDS):
        ranges = make_ranges(kind, 2, 6, 2, 96, 60, seed=5).cuda()
        for path in (None, "ranges", "varlen"):
            if (kind, path) == ("empty", "varlen"):
                continue  # nothing to launch
            how = dict(ranges=ranges, path=path, flags=flags)
            run = lambda *x, how=how: sel.selection_attention_triton(*x, **how)
            check(f"wrapper-{kind}-{path}", x, ranges, run=run)


@CORE
def test_below_min_L_falls_back_gpu(cuda):
    """Policy on a real device: the keys that a row may select decide, by shapes."""
    x = inputs(torch.bfloat16, "cuda", S=6, h=4, Skv=96, D=64)
    ranges = make_ranges("mixed", 1, 6, 2, 96, 60, device="cuda")
    for least, route in ((96, "triton"), (97, "sdpa")):
        flags = Flags(use_triton_sel=True, triton_sel_force=True, sel_triton_min_L=least)
        with dispatch.trace() as taken:
            sel.selection_attention_triton(*x, ranges, flags=flags)
        assert taken[-1].route.value == route
