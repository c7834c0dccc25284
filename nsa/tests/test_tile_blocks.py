"""The distinct blocks of a tile of queries, against plain Python."""

from __future__ import annotations

import pytest

from nsa.tests.test_union_attn import CASES, Case, members

pytestmark = pytest.mark.kernel
QUERIES = 8


def plain_lists(case: Case, rows: list, queries: int) -> dict[tuple[int, int], dict[int, set[int]]]:
    """{row of the first key: queries that chose the block} per (tile, group)."""
    home = [(b, begin, s) for b in range(case.batch)
            for begin, n in zip(starts(case), case.lengths, strict=True) for s in range(n)]
    result: dict = {}
    for token, (b, begin, s) in enumerate(home):
        keys = begin if case.packed else b * (case.q_start + case.lengths[0])
        for g in range(case.G):
            tile = result.setdefault((token // queries, g), {})
            for block in rows[token][g]:
                if 0 <= block <= (s + case.q_start) // case.block:
                    tile.setdefault(keys + block * case.block, set()).add(token % queries)
    return result


def starts(case: Case) -> list[int]:
    return [sum(case.lengths[:i]) for i in range(len(case.lengths))]


@pytest.mark.parametrize("kind", ["random", "ragged", "clustered"])
@pytest.mark.parametrize("case", [*CASES[:3], Case((40,), G=1, n=2, q_start=1 << 21)], ids=str)
def test_each_block_is_listed_once_in_order(case, kind, kernel_device):
    from nsa.kernels.prefill.tile_blocks import tile_blocks

    if kind == "random" and case.q_start > 1000:
        pytest.skip("as many blocks as there are")
    blocks = case.indices(kind, kernel_device)
    # A block behind the query counts for nothing, wherever in the row it stands.
    blocks[..., 0, -1] = 1 << 20
    own_length = 1 if case.packed else case.lengths[0]
    keys = 0 if case.packed else case.q_start + case.lengths[0]
    lists = tile_blocks(
        blocks, case.begins(kernel_device)[1], own_length, keys, case.q_start, case.block,
        queries=QUERIES,
    )
    tokens = case.batch * sum(case.lengths)
    want = plain_lists(case, blocks.reshape(tokens, case.G, -1).tolist(), QUERIES)
    assert lists.counts.shape == (-(-tokens // QUERIES), case.G) and lists.queries == QUERIES
    assert len(want) == lists.counts.numel() and any(want.values())
    for (tile, g), expected in want.items():
        count = int(lists.counts[tile, g])
        entries = lists.entries[tile, g].tolist()
        assert [e >> 32 for e in entries[:count]] == sorted(expected)
        assert {e >> 32: members(e & 0xFFFFFFFF) for e in entries[:count]} == expected
