"""Do launchers that hand plain addresses to kernels take tensors of any strides, or refuse them?
Those of prefill: test_prefill_kernels.py, the shapes with `apart`."""

from __future__ import annotations

import pytest
import torch

from nsa.kernels.decode import nsa_decode_triton
from nsa.kernels.prefill import split_turned_triton
from nsa.kernels.triton_sel_kernel import selection_ranges_triton
from nsa.tests.helpers import make_ranges, randn
from nsa.tests.test_prefill_kernels import strided

pytestmark = pytest.mark.kernel
CHOICE = dict(l=8, d=4, l_sel=16, n_sel=4, n_init=1, n_local=2)
S = 24


def test_turn(kernel_device):
    qkv = randn(1, S, 4 * 16 + 2 * 3 * 32, seed=1, dtype=torch.float16, device=kernel_device)
    at = torch.arange(S, device=kernel_device)
    sizes = dict(heads=4, groups=2, d_k=16, d_v=16, rope_base=1e4)
    for want, got in zip(
        split_turned_triton(qkv, at, **sizes),
        split_turned_triton(strided(qkv), strided(at), **sizes),
        strict=True,
    ):
        assert torch.equal(got, want)  # fmt: skip


@pytest.mark.parametrize("path", ["ranges", "dense", "varlen"])
def test_ranges(path, kernel_device):
    make = lambda seed, *shape: randn(*shape, seed=seed, dtype=torch.float16, device=kernel_device)
    x = [make(0, 1, 6, 2, 2, 16), make(1, 1, 2, S, 16), make(2, 1, 2, S, 16),
         make_ranges("few", 1, 6, 2, S, 3, device=kernel_device)]  # fmt: skip
    if path == "dense":
        x[3] = x[3][..., :1, :]
    want = selection_ranges_triton(*x, path=path)
    got = selection_ranges_triton(*map(strided, x), path=path)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-3)


@pytest.mark.parametrize("counters", [False, True])
def test_decode_step(counters, kernel_device):
    """Small tensors may have any strides, and lengths any int dtype; a cache is not copied."""
    make = lambda seed, *shape: randn(*shape, seed=seed, dtype=torch.float16, device=kernel_device)
    pages = [make(seed, 8, 16, 2, 16) for seed in range(4)]
    x = dict(q=make(4, 2, 1, 4, 16), k_cmp=make(5, 2, 16, 2, 16), v_cmp=make(6, 2, 16, 2, 16),
             **dict(zip(("k_sel", "v_sel", "k_win", "v_win"), pages, strict=True)),
             gates=make(7, 2, 1, 4, 3).sigmoid(),
             lens=torch.tensor([40, 30], dtype=torch.int32, device=kernel_device))  # fmt: skip
    table = torch.tensor([[0, 3, 5, 7], [1, 2, 6, 4]], dtype=torch.int32, device=kernel_device)

    def run(table=table, **changed):
        meet = torch.zeros(2, 2, 32, dtype=torch.int32, device=kernel_device)
        return nsa_decode_triton(
            **{**x, **changed}, window=16, max_len=64, block_table=table,
            counters=meet if counters else None, **CHOICE,
        )  # fmt: skip

    want = run()
    small = {name: strided(x[name]) for name in ("q", "gates", "lens")}
    assert torch.equal(run(**small, table=strided(table)), want)
    assert torch.equal(run(lens=x["lens"].long(), table=table.long()), want)
    for name in ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win"):
        with pytest.raises(ValueError, match=f"{name} must be contiguous, got strides"):
            run(**{name: strided(x[name])})
