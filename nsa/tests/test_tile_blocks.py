"""The distinct blocks of a tile of queries, against plain Python."""

from __future__ import annotations

import pytest

from nsa.kernels.prefill.tile_blocks import tile_blocks
from nsa.tests.test_union_attn import CASES, Case, members

pytestmark = pytest.mark.kernel
QUERIES = 8


def plain_lists(
    case: Case, rows: list, queries: int, parts: int
) -> dict[tuple[int, int], dict[int, set[int]]]:
    """{row of the first key of a part: queries that chose the block} per (tile, group)."""
    home = [
        (b, begin, s)
        for b in range(case.batch)
        for begin, n in zip(starts(case), case.lengths, strict=True)
        for s in range(n)
    ]
    result: dict = {}
    for token, (b, begin, s) in enumerate(home):
        keys = begin if case.packed else b * (case.q_start + case.lengths[0])
        for g in range(case.G):
            tile = result.setdefault((token // queries, g), {})
            for block in rows[token][g]:
                for key in parts_of(case, block, parts):
                    if 0 <= key <= s + case.q_start:
                        tile.setdefault(keys + key, set()).add(token % queries)
    return result


def parts_of(case: Case, block: int, parts: int) -> range:
    """The first keys of a block's parts."""
    return range(block * case.block, (block + 1) * case.block, case.block // parts)


def starts(case: Case) -> list[int]:
    return [sum(case.lengths[:i]) for i in range(len(case.lengths))]


@pytest.mark.parametrize(
    "case, kind, parts",
    [(CASES[0], "ragged", 1), (CASES[0], "random", 2), (CASES[1], "random", 1),
     (CASES[1], "ragged", 2), (CASES[2], "clustered", 1), (CASES[2], "ragged", 2),
     (Case((40,), G=1, n=2, q_start=1 << 21), "clustered", 2),
     (Case((21,), n=1, q_start=90), "random", 1)],
    ids=str,
)  # fmt: skip
def test_each_block_is_listed_once_in_order(case, kind, parts, kernel_device):
    blocks = case.indices(kind, kernel_device)
    # A block behind the query counts for nothing, wherever in the row it stands.
    blocks[..., 0, -1] = 1 << 20
    own_length = 1 if case.packed else case.lengths[0]
    keys = 0 if case.packed else case.q_start + case.lengths[0]
    lists = tile_blocks(
        blocks, case.begins(kernel_device)[1], own_length, keys, case.q_start,
        case.block // parts, queries=QUERIES, parts=parts,
    )  # fmt: skip
    tokens = case.batch * sum(case.lengths)
    want = plain_lists(case, blocks.reshape(tokens, case.G, -1).tolist(), QUERIES, parts)
    assert lists.counts.shape == (-(-tokens // QUERIES), case.G) and lists.queries == QUERIES
    assert len(want) == lists.counts.numel() and any(want.values())
    for (tile, g), expected in want.items():
        count = int(lists.counts[tile, g])
        entries = lists.entries[tile, g].tolist()
        assert [e >> 32 for e in entries[:count]] == sorted(expected)
        assert {e >> 32: members(e & 0xFFFFFFFF) for e in entries[:count]} == expected


BOUNDS = (-(10**6), 900, 10**6, None)
LONG = Case((77,), G=2, n=6, q_start=150)


@pytest.mark.parametrize(
    "case, parts, kind, together",
    [(CASES[1], 1, "ragged", bound) for bound in BOUNDS]
    + [(CASES[1], 2, "random", bound) for bound in (900, None)]
    + [(LONG, 1, "random", bound) for bound in BOUNDS]
    + [(Case((5, 90, 1), n=4), 4, "ragged", bound) for bound in (900, None)],
    ids=str,
)  # fmt: skip
def test_the_rest_is_what_few_chose(case, parts, kind, together, kernel_device, monkeypatch):
    """Of tiles where it pays, or of all with few heads a group; not a query's last two."""
    from nsa.kernels.prefill import tile_blocks as module

    heads = 4 if together is None else 16
    queries = module.queries_of(heads)
    assert queries == (16 if heads == 4 else QUERIES)
    monkeypatch.setattr(module, "TOGETHER", together or 0)
    monkeypatch.setitem(module.LEAST, heads, 3)
    monkeypatch.setattr(module, "DENSE", 300)
    blocks = case.indices(kind, kernel_device)
    own_length = 1 if case.packed else case.lengths[0]
    keys = 0 if case.packed else case.q_start + case.lengths[0]
    lists = module.tile_blocks(
        blocks, case.begins(kernel_device)[1], own_length, keys, case.q_start,
        case.block // parts, queries=queries, heads=heads, parts=parts,
    )  # fmt: skip
    assert lists.part == 64 // heads and lists.queries == queries
    home = [
        (begin if case.packed else b * keys, s)
        for b in range(case.batch)
        for begin, n in zip(starts(case), case.lengths, strict=True)
        for s in range(n)
    ]
    rows = blocks.reshape(len(home), case.G, -1).tolist()
    got = lists.rest.blocks.reshape(len(home), case.G, -1).tolist()
    whole, split = [], 0
    for (tile, g), chosen in plain_lists(case, rows, queries, parts).items():
        tokens = range(tile * queries, min((tile + 1) * queries, len(home)))
        last = {
            row
            for query in range(queries)
            for row in sorted(row for row, by in chosen.items() if query in by)[-2:]
        }
        rest = {row for row, by in chosen.items() if len(by) < 3 and row not in last}
        n_rest = sum(len(chosen[row]) for row in rest)
        cost = module.READ * len(chosen) + module.PAIR * sum(map(len, chosen.values()))
        dense = 300 * (len(chosen) - len(rest))
        by_keys = together is None
        if together is not None:
            by_keys = n_rest > 0 and together + module.REST_PAIR * n_rest + dense < cost
        if not by_keys:
            rest = set()
            whole.append(tile * case.G + g)
        split += by_keys
        assert lists.rest.todo[tile, g] == (0 if by_keys else -1)
        for t in tokens:
            first = home[t][0]
            assert got[t][g] == [
                key * parts // case.block if first + key in rest else -1
                for block in rows[t][g]
                for key in parts_of(case, block, parts)
            ]
        assert lists.rest.listed[tile, g] == (len(chosen) - len(rest) if by_keys else -1)
        entries = lists.entries[tile, g, : lists.counts[tile, g]].tolist()
        its_rows = [e >> 32 for e in entries]
        assert its_rows == sorted(set(chosen) - rest) + sorted(rest)
        assert {e >> 32: members(e & 0xFFFFFFFF) for e in entries} == chosen
    assert lists.rest.whole[0] == len(whole)
    assert sorted(lists.rest.whole[1 : 1 + len(whole)].tolist()) == sorted(whole)
    if together != 900 or case.n == 6:
        assert (split > 0) == (together != 10**6)
