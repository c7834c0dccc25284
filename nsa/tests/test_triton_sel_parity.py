"""The selection kernels against the fp64 oracle at small shapes: interpreter or GPU."""

from __future__ import annotations

import pytest
import torch

from bench.parity import assert_parity
from nsa import launches, oracle
from nsa.flags import Flags
from nsa.kernels.triton_sel_kernel import sel_fwd, selection_ranges_triton
from nsa.kernels.triton_sel_kernel.in_place import sel_fwd_in_place
from nsa.kernels.triton_sel_kernel.inputs import units_of_8
from nsa.kernels.triton_sel_kernel.sel_fwd import sel_attn_fwd_dense
from nsa.kernels.triton_sel_kernel.spans import clean_spans
from nsa.kernels.triton_sel_kernel.tiles import Tiles, fwd_tiles
from nsa.tests.helpers import HOSTILE_RANGE_KINDS, RANGE_KINDS, make_ranges, randn
from nsa.tests.sel_cases import oracle_ranges, plain_dense, plain_ranges

pytestmark = [pytest.mark.kernel, pytest.mark.core]
HALF, FULL = torch.float16, torch.float32

# dtype, N, H, L, D, Dv
DENSE = (
    (HALF, 3, 4, 33, 16, 16),
    (HALF, 2, 3, 70, 24, 40),
    (FULL, 2, 1, 17, 64, 32),
    (FULL, 2, 17, 5, 72, 8),
    (HALF, 1, 2, 1, 192, 128),
)


def dense_inputs(dtype, N, H, L, D, Dv, device, seed=0):
    kw = {"dtype": dtype, "device": device}
    q, k = randn(N, H, D, seed=seed, **kw), randn(N, L, D, seed=seed + 1, **kw)
    return q, k, randn(N, L, Dv, seed=seed + 2, **kw)


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("shape", DENSE)
def test_dense(shape, group, kernel_device):
    q, k, v = dense_inputs(*shape, kernel_device)
    name = "sel_attn_fwd_dense" + ("_group" if group else "")
    with launches.recording() as launched:
        out, lse = getattr(sel_fwd, name)(q, k, v, return_lse=True)
    same = plain_dense(q, k, v)
    for n in range(q.shape[0]):
        for h in range(q.shape[1]):
            want, want_lse, _ = oracle.attend(q[n, h], k[n], v[n], q.shape[-1] ** -0.5)
            assert (lse[n, h].double() - want_lse).abs() < 1e-4
    want = plain_dense(q.double(), k.double(), v.double())
    assert_parity(
        f"{name}-{shape}", "fwd", out, want, same, path_requested="triton", path_taken="triton",
        launches=launched, expect_kernels=[f"_{name}_kernel"],
    )  # fmt: skip


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("dtype", [HALF, FULL])
def test_varlen(dtype, group, kernel_device):
    lengths = [5, 0, 70, 1, 33]
    cu = torch.tensor([0, *lengths]).cumsum(0).to(kernel_device, torch.int32)
    kw = {"dtype": dtype, "device": kernel_device}
    q = randn(len(lengths), 3, 24, seed=1, **kw)
    k, v = randn(sum(lengths), 24, seed=2, **kw), randn(sum(lengths), 40, seed=3, **kw)
    name = "sel_attn_fwd_varlen" + ("_group" if group else "")
    with launches.recording() as launched:
        out, lse = getattr(sel_fwd, name)(q, k, v, cu, return_lse=True)
    at = cu.tolist()
    want = torch.zeros(*out.shape, dtype=torch.float64)
    same = torch.zeros_like(out)
    for n, (a, b) in enumerate(zip(at, at[1:], strict=False)):
        if a == b:
            assert (lse[n] == -torch.inf).all() and (out[n] == 0).all()
            continue
        same[n] = plain_dense(q[n : n + 1], k[None, a:b], v[None, a:b])[0]
        for h in range(3):
            want[n, h], want_lse, _ = oracle.attend(q[n, h], k[a:b], v[a:b], 24**-0.5)
            assert (lse[n, h].double() - want_lse).abs() < 1e-4
    assert_parity(
        f"{name}-{dtype}", "fwd", out, want, same, path_requested="triton", path_taken="triton",
        launches=launched, expect_kernels=[f"_{name}_kernel"],
    )  # fmt: skip


@pytest.mark.parametrize("splits", [2, 8])
def test_splits_merge_to_the_same(splits, kernel_device):
    """More splits than tiles leave empty parts behind."""
    q, k, v = dense_inputs(FULL, 2, 3, 70, 24, 40, kernel_device)
    tiles = Tiles(16, 32, 64, 4, 1)
    with launches.recording() as launched:
        out, lse = sel_attn_fwd_dense(q, k, v, splits=splits, tiles=tiles, return_lse=True)
    assert_parity(
        f"splits-{splits}", "fwd", out, plain_dense(q.double(), k.double(), v.double()),
        plain_dense(q, k, v), path_requested="triton", path_taken="triton", launches=launched,
        expect_kernels=["_sel_attn_fwd_dense_kernel", "_sel_attn_merge_kernel"],
    )  # fmt: skip
    _, whole = sel_attn_fwd_dense(q, k, v, splits=1, return_lse=True)
    torch.testing.assert_close(lse, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 4])
def test_ranges_of_a_batch_in_parts(splits, kernel_device):
    """One row has no key: all of its parts are empty."""
    q, k, v = cache_inputs(FULL, kernel_device, B=2, seed=13)
    ranges = make_ranges("mixed", 2, 4, 2, 70, 60, device=kernel_device, seed=3)
    ranges[1, 2, 0] = 0
    out, lse = sel_fwd_in_place(q, k, v, ranges, None, splits=splits, tiles=Tiles(16, 16, 32, 4, 1))
    want = oracle_ranges(*(x.double().cpu() for x in (q, k, v)), ranges.cpu())
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-4, atol=1e-5)
    assert (lse[1, 2, 0] == -torch.inf).all()


@pytest.mark.parametrize("override", ["block_l", "block_d", "block_dv"])
def test_tile_overrides_are_honoured_and_right(override, kernel_device):
    flags = Flags(**{f"sel_triton_{override}": 16})
    chosen = fwd_tiles(90, 40, 72, 4, 50, 2, 132, flags)
    assert getattr(chosen, override) == 16
    q, k, v = dense_inputs(FULL, 2, 2, 50, 40, 72, kernel_device)
    out = sel_attn_fwd_dense(q, k, v, flags=flags)
    torch.testing.assert_close(out, plain_dense(q, k, v), rtol=1e-4, atol=1e-5)


def cache_inputs(dtype, device, B=1, S=4, G=2, h=2, Skv=70, D=16, Dv=24, seed=0):
    kw = {"dtype": dtype, "device": device}
    q = randn(B, S, G, h, D, seed=seed, **kw)
    return q, randn(B, G, Skv, D, seed=seed + 1, **kw), randn(B, G, Skv, Dv, seed=seed + 2, **kw)


@pytest.mark.parametrize("path", ["ranges", "varlen"])
@pytest.mark.parametrize("kind", RANGE_KINDS + HOSTILE_RANGE_KINDS)
def test_ranges(kind, path, kernel_device):
    q, k, v = cache_inputs(HALF, kernel_device, S=2, seed=7)
    ranges = make_ranges(kind, 1, 2, 2, 70, 40, device=kernel_device, seed=3)
    with launches.recording() as launched:
        out = selection_ranges_triton(q, k, v, ranges, path=path)
    kernels = [] if path == "varlen" else ["_sel_attn_fwd_ranges_kernel"]
    if path == "varlen" and kind == "empty":  # no bucket holds a key
        assert (out == 0).all() and not launched
        return
    assert_parity(
        f"ranges-{kind}-{path}", "fwd", out, oracle_ranges(q, k, v, ranges),
        plain_ranges(q, k, v, ranges), path_requested="triton", path_taken="triton",
        launches=launched, expect_kernels=kernels,
    )  # fmt: skip


@pytest.mark.parametrize("group", [False, True])
def test_one_range_per_row_takes_the_dense_kernel(group, kernel_device):
    q, k, v = cache_inputs(HALF, kernel_device, B=2, seed=5)
    ranges = torch.tensor([[0, 40], [-3, 9], [60, 99], [30, 30]], dtype=torch.int32)
    ranges = ranges[None, :, None, None].expand(2, 4, 2, 1, 2).to(kernel_device)
    with launches.recording() as launched:
        out = selection_ranges_triton(q, k, v, ranges, flags=Flags(sel_triton_group=group))
    assert_parity(
        f"one-range-{group}", "fwd", out, oracle_ranges(q, k, v, ranges),
        plain_ranges(q, k, v, ranges), path_requested="triton", path_taken="triton",
        launches=launched,
        expect_kernels=[f"_sel_attn_fwd_dense{'_group' if group else ''}_kernel"],
    )  # fmt: skip
    assert "_sel_attn_fwd_ranges_kernel" not in launched


def test_more_spans_than_one_pass_holds(kernel_device):
    """70 single keys apart from each other, shuffled, two of them twice: two passes over spans,
    torch's cleaning."""
    q, k, v = cache_inputs(HALF, kernel_device, S=2, G=1, Skv=150, seed=9)
    gen = torch.Generator().manual_seed(0)
    starts = torch.stack([2 * torch.randperm(75, generator=gen)[:70] for _ in range(2)])
    starts = torch.cat([starts, starts[:, :2]], -1)
    ranges = torch.stack([starts, starts + 1], -1)[None, :, None].to(kernel_device)
    with launches.recording() as launched:
        out = selection_ranges_triton(q, k, v, ranges)
    assert_parity(
        "70-spans", "fwd", out, oracle_ranges(q, k, v, ranges), plain_ranges(q, k, v, ranges),
        path_requested="triton", path_taken="triton", launches=launched,
        expect_kernels=["_sel_attn_fwd_ranges_kernel"],
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["bsgd", "padded", "odd"])
def test_kv_strides(layout, kernel_device):
    """K and V are read in place through strides; only what 16-byte loads cannot read is copied."""
    q, k, v = cache_inputs(HALF, kernel_device, seed=11)
    ranges = make_ranges("mixed", 1, 4, 2, 70, 40, device=kernel_device)
    want = oracle_ranges(q, k, v, ranges)

    def view(x):
        if layout == "bsgd":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        wide = torch.nn.functional.pad(x, (0, 8 if layout == "padded" else 3))
        return wide[..., : x.shape[-1]]

    k2, v2 = view(k), view(v)
    assert not k2.is_contiguous()
    assert (units_of_8(k2)[0].data_ptr() == k2.data_ptr()) == (layout != "odd")
    with launches.recording() as launched:
        out = selection_ranges_triton(q, k2, v2, ranges)
    assert_parity(
        f"strides-{layout}", "fwd", out, want, plain_ranges(q, k, v, ranges),
        path_requested="triton", path_taken="triton", launches=launched,
        expect_kernels=["_sel_attn_fwd_ranges_kernel"],
    )  # fmt: skip


@pytest.mark.parametrize("kind", RANGE_KINDS + HOSTILE_RANGE_KINDS)
def test_clean_spans_are_the_union(kind, kernel_device):
    ranges = make_ranges(kind, 1, 3, 2, 70, 40, device=kernel_device, seed=1)
    starts, cum = (x.tolist() for x in clean_spans(ranges, 70))
    for row, spans in enumerate(ranges.view(6, -1, 2)):
        keys = [
            key
            for i, start in enumerate(starts[row])
            for key in range(start, start + cum[row][i + 1] - cum[row][i])
        ]
        assert keys == oracle.range_tokens(spans, 70)
