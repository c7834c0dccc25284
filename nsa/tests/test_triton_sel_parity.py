"""The selection kernels against the fp64 oracle at small shapes: interpreter or GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from bench.parity import assert_parity
from nsa import launches, oracle
from nsa.flags import Flags
from nsa.kernels.triton_sel_kernel import sel_fwd, selection_ranges_triton
from nsa.kernels.triton_sel_kernel.in_place import sel_fwd_in_place
from nsa.kernels.triton_sel_kernel.inputs import units_of_8
from nsa.kernels.triton_sel_kernel.spans import clean_spans
from nsa.kernels.triton_sel_kernel.tiles import Tiles, fwd_tiles
from nsa.tests.cases import strided
from nsa.tests.helpers import HOSTILE_RANGE_KINDS, RANGE_KINDS, generator, make_ranges, randn
from nsa.tests.sel_cases import IN_PLACE, check, inputs, oracle_ranges, plain_dense, rows_of

pytestmark = [pytest.mark.kernel, pytest.mark.core]
HALF, FULL = torch.float16, torch.float32
KINDS = RANGE_KINDS + HOSTILE_RANGE_KINDS


# dtype, rows of so many keys, H, D, Dv: equal lengths are dense, others packed one after another.
ROWS = [
    (HALF, (33,) * 3, 4, 16, 16),
    (HALF, (70,) * 2, 3, 24, 40),
    (FULL, (17,) * 2, 1, 64, 32),
    (FULL, (5,) * 2, 17, 72, 8),
    (HALF, (1,), 2, 192, 128),
    (HALF, (5, 0, 70, 1, 33), 3, 24, 40),
    (FULL, (5, 0, 70, 1, 33), 3, 24, 40),
]


def rows_parity(kernel, dtype, lengths, H, D, Dv, device, more_kernels=(), **how):
    """out and lse of each row's own keys by a launcher of sel_fwd."""
    kw, at = {"dtype": dtype, "device": device}, [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    q = randn(len(lengths), H, D, seed=1, **kw)
    k, v = randn(at[-1], D, seed=2, **kw), randn(at[-1], Dv, seed=3, **kw)
    if "varlen" in kernel:
        given = k, v, torch.tensor(at, device=device, dtype=torch.int32)
    else:
        given = tuple(x.unflatten(0, (len(lengths), -1)) for x in (k, v))
    with launches.recording() as launched:
        out, lse = getattr(sel_fwd, kernel)(q, *given, return_lse=True, **how)
    want, same = torch.zeros(*out.shape, dtype=torch.float64), torch.zeros_like(out)
    for n, (a, b) in enumerate(pairwise(at)):
        if a == b:
            assert (lse[n] == -torch.inf).all() and (out[n] == 0).all()
            continue
        same[n] = plain_dense(q[n : n + 1], k[None, a:b], v[None, a:b])[0]
        for h in range(H):
            want[n, h], want_lse, _ = oracle.attend(q[n, h], k[a:b], v[a:b], D**-0.5)
            assert (lse[n, h].double() - want_lse).abs() < 1e-4
    assert_parity(
        f"{kernel}-{dtype}-{lengths}", "fwd", out, want, same, path_requested="triton",
        path_taken="triton", launches=launched, expect_kernels=[f"_{kernel}_kernel", *more_kernels],
    )  # fmt: skip


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("shape", ROWS)
def test_packed_rows(shape, group, kernel_device):
    kernel = "dense" if len(set(shape[1])) == 1 else "varlen"
    rows_parity(f"sel_attn_fwd_{kernel}" + "_group" * group, *shape, kernel_device)


@pytest.mark.parametrize("splits", [2, 8])
def test_splits_merge_to_the_same(splits, kernel_device):
    """More splits than tiles leave empty parts behind."""
    rows_parity(
        "sel_attn_fwd_dense", FULL, (70, 70), 3, 24, 40, kernel_device, ["_sel_attn_merge_kernel"],
        splits=splits, tiles=Tiles(16, 32, 64, 4, 1),
    )  # fmt: skip


def far_apart(n, keys, every, wide):
    """[1, 2, 2, n, 2]: `wide` keys at n different places."""
    draw = lambda i: torch.randperm(keys // every, generator=generator(i))[:n]
    start = torch.stack([draw(i) * every for i in range(4)]).view(1, 2, 2, n)
    return torch.stack([start, start + wide], -1)


@pytest.mark.parametrize(
    "n, splits, keep", [(8, 1, True), (8, 4, True), (90, 2, True), (90, 8, False)]
)
def test_ranges_in_parts(n, splits, keep, kernel_device):
    """Of a batch with a row without keys, whose parts are all empty; and more ranges than a pass
    holds, which are split pass by pass."""
    B, S, keys = (2, 4, 70) if n == 8 else (1, 2, 300)
    x = inputs(FULL, kernel_device, B=B, S=S, Skv=keys, seed=13)
    ranges = make_ranges("mixed", 2, 4, 2, 70, 60, seed=3) if n == 8 else far_apart(n, keys, 3, 2)
    if n == 8:
        ranges[1, 2, 0] = 0
    out, lse = sel_fwd_in_place(
        *x, ranges.to(kernel_device), None, splits=splits, keep_lse=keep,
        tiles=Tiles(16, 16, 32, 4, 1),
    )  # fmt: skip
    want = oracle_ranges(*(t.double().cpu() for t in x), ranges)
    torch.testing.assert_close(out.cpu().double(), want, rtol=1e-4, atol=1e-5)
    assert (lse is not None) == keep
    assert n != 8 or (lse[1, 2, 0] == -torch.inf).all()


@pytest.mark.parametrize("override", ["block_l", "block_d", "block_dv"])
def test_tile_overrides_are_honoured_and_right(override, kernel_device):
    flags = Flags(**{f"sel_triton_{override}": 16})
    assert getattr(fwd_tiles(90, 40, 72, 4, 50, 2, 132, flags), override) == 16
    rows_parity("sel_attn_fwd_dense", FULL, (50, 50), 2, 40, 72, kernel_device, flags=flags)


@pytest.mark.parametrize("path", ["ranges", "varlen"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranges(kind, path, kernel_device):
    ranges = make_ranges(kind, 1, 2, 2, 70, 40, device=kernel_device, seed=3)
    x = inputs(HALF, kernel_device, S=2, seed=7)
    if (path, kind) == ("varlen", "empty"):  # no bucket holds a key
        with launches.recording() as launched:
            assert (selection_ranges_triton(*x, ranges, path=path) == 0).all() and not launched
        return
    kernels = IN_PLACE if path == "ranges" else ()
    check(f"ranges-{kind}-{path}", x, ranges, path=path, kernels=kernels)


@pytest.mark.parametrize("group", [False, True])
def test_one_range_per_row_takes_the_dense_kernel(group, kernel_device):
    ranges = rows_of([[[0, 40]], [[-3, 9]], [[60, 99]], [[30, 30]]], kernel_device, B=2, G=2)
    kernel = f"_sel_attn_fwd_dense{'_group' if group else ''}_kernel"
    with launches.recording() as launched:
        check(
            f"one-range-{group}", inputs(HALF, kernel_device, B=2, seed=5), ranges,
            flags=Flags(sel_triton_group=group), kernels=[kernel],
        )  # fmt: skip
    assert not set(IN_PLACE) & set(launched)


LAYOUTS = {
    "bsgd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "padded": lambda x: torch.nn.functional.pad(x, (0, 8))[..., : x.shape[-1]],
    "odd": lambda x: torch.nn.functional.pad(x, (0, 3))[..., : x.shape[-1]],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_kv_strides(name, kernel_device):
    """K and V are read in place through strides; only what 16-byte loads cannot read is copied."""
    q, k, v = inputs(HALF, kernel_device, seed=11)
    k, v = map(LAYOUTS[name], (k, v))
    assert not k.is_contiguous()
    assert (units_of_8(k)[0].data_ptr() == k.data_ptr()) == (name != "odd")
    ranges = make_ranges("mixed", 1, 4, 2, 70, 40, device=kernel_device)
    check(f"strides-{name}", (q, k, v), ranges, kernels=IN_PLACE)


@pytest.mark.parametrize("path", ["ranges", "dense", "varlen"])
def test_tensors_of_any_strides(path, kernel_device):
    x = inputs(HALF, kernel_device, S=6, Skv=24, D=16, Dv=16)
    ranges = strided(make_ranges("few", 1, 6, 2, 24, 3, device=kernel_device))
    check(f"any-strides-{path}", [strided(t) for t in x], ranges, path=path)


@pytest.mark.parametrize("kind", KINDS)
def test_clean_spans_are_the_union(kind, kernel_device):
    ranges = make_ranges(kind, 1, 3, 2, 70, 40, device=kernel_device, seed=1)
    starts, cum = (x.tolist() for x in clean_spans(ranges, 70))
    for row, spans in enumerate(ranges.view(6, -1, 2)):
        lengths = [b - a for a, b in pairwise(cum[row])]
        keys = [a + i for a, n in zip(starts[row], lengths, strict=False) for i in range(n)]
        assert keys == oracle.range_tokens(spans, 70)
