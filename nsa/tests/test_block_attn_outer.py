"""Selection by key tiles, made to serve small problems, in several slabs: against the oracle, and
alone and beside unions against the kernel of single queries."""

from __future__ import annotations

import pytest
import torch

from nsa import launches
from nsa.kernels.prefill import block_attn_outer, union_lists
from nsa.kernels.prefill.block_attn_fwd import block_attention_fwd
from nsa.tests import test_prefill_kernels as kernels_of
from nsa.tests.test_prefill_kernels import BF16, PAPER, Shape
from nsa.tests.test_union_attn import ALWAYS, NEVER, Case, Problem

pytestmark = pytest.mark.kernel
SHAPES = [
    Shape((37,)),
    Shape((5, 41, 1, 22), packed=True),
    Shape((37,), G=1, h=3, D=24, Dv=16),
    Shape((50, 50), G=1, h=1, l_sel=32, n_sel=5, Dv=32),
    Shape((1000,), G=8, h=4, D=128, Dv=128, dtype=BF16, n_sel=8, **PAPER),
    Shape((1, 700, 63, 64, 65, 333), G=2, h=4, D=128, Dv=128, n_sel=4, packed=True, **PAPER),
    Shape((777, 777), G=2, h=2, D=64, Dv=64, n_sel=16, **PAPER),
    Shape((500,), G=4, h=8, D=128, Dv=128, dtype=BF16, n_sel=6, **PAPER),
]
CASES = [
    Case((21,), h=3, D=24, q_start=29, batch=2, n=5),
    Case((5, 27, 1, 9)),
    Case((1000,), G=4, h=4, D=128, Dv=128, block=64, n=16, dtype=BF16, q_start=70, big=True),
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Any number of pairs will do, and queries go in slabs of a few dozen."""
    monkeypatch.setattr(block_attn_outer, "MIN_PAIRS", 1)
    monkeypatch.setattr(block_attn_outer, "MIN_PAIRS_PER_TILE", 0)
    monkeypatch.setattr(
        block_attn_outer, "slab_tokens", lambda row_bytes, _: 29 if row_bytes < 2000 else 300
    )


@pytest.mark.parametrize(
    "shape, kind",
    [(SHAPES[0], kind) for kind in ("random", "one_block", "all", "own_only")]
    + [(shape, "ragged") for shape in SHAPES[1:4]]
    + [pytest.param(shape, "ragged", marks=pytest.mark.core) for shape in SHAPES[4:]],
    ids=str,
)  # fmt: skip
def test_against_the_oracle(shape, kind, device, monkeypatch):
    monkeypatch.setattr(union_lists, "SHARE", {("fwd_outer", 90): NEVER})
    monkeypatch.setattr(union_lists, "OTHER_SHARE", NEVER)
    with launches.recording() as counts:
        kernels_of.selected_case(shape, device, kind, seed=5)
    assert counts["_block_attn_outer_kernel"] == counts["_block_attn_merge_kernel"] > 1, counts


def forward(x: Problem, share: int | None):
    with x.limit(share), launches.recording() as counts:
        out, lse = block_attention_fwd(x.q, x.k, x.v, x.blocks, **x.how, **x.packed)
    return out, lse, counts


@pytest.mark.parametrize(
    "case, kind, share",
    [
        (CASES[0], "clustered", ALWAYS),
        (CASES[0], "random", NEVER),
        (CASES[1], "ragged", None),
        (CASES[2], "ragged", None),
        (CASES[2], "clustered", ALWAYS),
        (CASES[2], "random", NEVER),
    ],
    ids=str,
)
def test_beside_unions_and_without_is_the_same(case, kind, share, device, monkeypatch):
    x = Problem(case, kind, device, monkeypatch)
    got, lse, counts = forward(x, share)
    assert counts["_block_attn_outer_kernel"] > 0 and counts["_union_attn_fwd_kernel"] == 1
    monkeypatch.setattr(block_attn_outer, "MIN_PAIRS", 1 << 60)
    want, want_lse, counts = forward(x, NEVER)
    assert "_block_attn_outer_kernel" not in counts
    tol = dict(rtol=4e-3, atol=4e-3) if got.dtype == torch.float16 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got, want, **tol)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_keys_that_a_query_did_not_choose_stay_out(case, device, monkeypatch):
    """0 * NaN, of keys past a query in its own block and of blocks that others chose."""
    x = Problem(case, "random", device, monkeypatch)
    clean, clean_lse, _ = forward(x, NEVER)
    rows = x.poison(2 * case.block + 1, -3)[0]
    got, lse, _ = forward(x, NEVER)
    tol = dict(rtol=4e-3, atol=4e-3) if got.dtype == torch.float16 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got[0][~rows], clean[0][~rows], **tol)
    torch.testing.assert_close(lse[0][~rows], clean_lse[0][~rows], rtol=1e-4, atol=1e-4)
    assert got[0][rows].isnan().any(-1).all()


@pytest.mark.parametrize("case", [Case((7,), G=1, q_start=29), CASES[2]], ids=str)
def test_blocks_past_the_sequence_hold_no_key(case, device, monkeypatch):
    """No key tile writes a partial output for them: whatever is there, none may be merged."""
    x = Problem(case, "ragged", device, monkeypatch)
    make = torch.empty

    def finite(*args, **kwargs):
        """Not NaN as in every other test, which would send the tile again, query by query."""
        tensor = make(*args, **kwargs)
        return tensor.fill_(3) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", finite)
    want, want_lse, _ = forward(x, NEVER)
    x.blocks = x.blocks.masked_fill(x.blocks < 0, 1 << 20)
    got, lse, counts = forward(x, NEVER)
    assert counts["_block_attn_merge_kernel"] > 0
    assert torch.equal(got, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("case", [CASES[2]], ids=str)
def test_values_past_the_range_of_16_bits_survive(case, device, monkeypatch):
    """Partial outputs are fp16 over their largest: bf16 values of 1e30 must come out."""
    x = Problem(case, "ragged", device, monkeypatch)
    small = forward(x, NEVER)[0]
    x.v = (x.v.float() * 2.0**100).bfloat16()
    large = forward(x, NEVER)[0]
    torch.testing.assert_close(large.float() * 2.0**-100, small.float(), rtol=1e-2, atol=1e-6)
