"""Does the decode step, which hands plain addresses to kernels, take tensors of any strides, or
refuse them? Selection by ranges, prefill and the turn: in the tests of each."""

from __future__ import annotations

import pytest
import torch

from nsa.kernels.decode import nsa_decode_triton
from nsa.tests.cases import strided
from nsa.tests.helpers import randn

pytestmark = pytest.mark.kernel
CHOICE = dict(l=8, d=4, l_sel=16, n_sel=4, n_init=1, n_local=2)


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
