"""Do packed positions hold exactly the union of each row's ranges?"""

from __future__ import annotations

import pytest
import torch

from nsa import oracle, packing, select
from nsa.tests.helpers import HOSTILE_RANGE_KINDS, RANGE_KINDS, make_ranges


@pytest.mark.parametrize("kind", RANGE_KINDS + HOSTILE_RANGE_KINDS)
def test_rows_hold_their_tokens(kind):
    B, S, G, N = 2, 3, 2, 20
    dirty = make_ranges(kind, B, S, G, N, 11, seed=2)
    ranges = select.clean_ranges(dirty, N).view(B * S * G, -1, 2)
    key, owner, lengths = packing.packed_positions(ranges)
    for row, one in enumerate(dirty.view(B * S * G, -1, 2)):
        want = oracle.range_tokens(one, N)
        assert key[owner == row].tolist() == list(want)
        assert lengths[row] == len(want)
    assert len(key) == len(owner) == lengths.sum() and (owner.diff() >= 0).all()
    for row in lengths.nonzero().flatten().tolist():
        slot = torch.arange(int(lengths[row]), dtype=torch.int32)[None]
        at = packing.slot_keys(ranges[row : row + 1], slot)
        assert at.dtype == torch.int32 and torch.equal(at[0].long(), key[owner == row])


def test_buckets_are_powers_of_two():
    lengths = torch.tensor([0, 1, 2, 3, 4, 5, 1000, 1024, 1025, 0])
    buckets = {b: rows.tolist() for b, rows in packing.length_buckets(lengths).items()}
    assert buckets == {0: [0, 9], 1: [1], 2: [2], 4: [3, 4], 8: [5], 1024: [6, 7], 2048: [8]}
    assert packing.length_buckets(torch.zeros(0, dtype=torch.int64)) == {}
