"""Do packed keys hold exactly the union of each row's ranges, and carry gradients back?"""

from __future__ import annotations

import pytest
import torch

from nsa import oracle, packing, select
from nsa.tests.helpers import HOSTILE_RANGE_KINDS, RANGE_KINDS, make_qkv, make_ranges


@pytest.mark.parametrize("kind", RANGE_KINDS + HOSTILE_RANGE_KINDS)
def test_rows_hold_their_tokens(kind):
    B, S, G, N = 2, 3, 2, 20
    _, k, v = make_qkv(B, S, 4, G, 8, 6, Skv=N, seed=1)
    dirty = make_ranges(kind, B, S, G, N, 11, seed=2)
    packed = packing.pack_ranges(k, v, select.clean_ranges(dirty, N))
    assert packed.cu_seqlens.dtype == torch.int32
    row = 0
    for b in range(B):
        for s in range(S):
            for g in range(G):
                want = oracle.range_tokens(dirty[b, s, g], N)
                first, last = packed.cu_seqlens[row : row + 2].tolist()
                assert torch.equal(packed.k[first:last], k[b, want, g])
                assert torch.equal(packed.v[first:last], v[b, want, g])
                assert packed.lengths[row] == len(want)
                row += 1
    assert packed.cu_seqlens[-1] == len(packed.k) == len(packed.v)


def test_gradients_scatter_back_and_add_up():
    _, k, v = make_qkv(1, 4, 2, 1, 4, 4, Skv=8, seed=3, requires_grad=True)
    ranges = torch.tensor([[[0, 3], [0, 0]], [[1, 2], [5, 8]], [[0, 0], [0, 0]], [[1, 2], [0, 0]]])
    packed = packing.pack_ranges(k, v, ranges.view(1, 4, 1, 2, 2))
    packed.k.sum().backward()
    assert k.grad[0, :, 0, 0].tolist() == [1, 3, 1, 0, 0, 1, 1, 1]
    assert v.grad is None


def test_buckets_are_powers_of_two():
    lengths = torch.tensor([0, 1, 2, 3, 4, 5, 1000, 1024, 1025, 0])
    buckets = {b: rows.tolist() for b, rows in packing.length_buckets(lengths).items()}
    assert buckets == {0: [0, 9], 1: [1], 2: [2], 4: [3, 4], 8: [5], 1024: [6, 7], 2048: [8]}
    assert packing.length_buckets(torch.zeros(0, dtype=torch.int64)) == {}
