"""Lists that the kernels of selection by blocks read, against plain Python: the distinct blocks of
a tile of queries, and the queries of a tile of keys."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from nsa import launches
from nsa.kernels.prefill.blocks import lists_by_keys, tile_blocks
from nsa.tests.cases import Case, Problem
from nsa.tests.test_block_attn import UNIONS

pytestmark = pytest.mark.kernel
QUERIES = 8


# ---- blocks of a tile of queries -----------------------------------------------------------------


class Lists:
    """tile_blocks of a case, and the same in plain Python."""

    def __init__(self, case, kind, parts, device, queries=QUERIES, change=None, **how) -> None:
        self.case, self.parts, self.queries = case, parts, queries
        blocks = case.indices(kind, device)
        if change:
            change(blocks)
        S = sum(case.lengths)
        own_length, keys = (1, 0) if case.packed else (S, case.q_start + S)
        self.lists = tile_blocks.tile_blocks(
            blocks, case.begins(device)[1], own_length, keys, case.q_start, case.l_sel // parts,
            queries=queries, parts=parts, **how,
        )  # fmt: skip
        begins = [0, *accumulate(case.lengths)]
        # (first row of K, position) of each token
        self.home = [
            (begin if case.packed else b * keys, s)
            for b in range(case.batch)
            for begin, n in zip(begins, case.lengths, strict=False)
            for s in range(n)
        ]
        self.rows = blocks.reshape(len(self.home), case.G, -1).tolist()

    def keys_of(self, block: int) -> range:
        """The first keys of a block's parts."""
        size = self.case.l_sel
        return range(block * size, (block + 1) * size, size // self.parts)

    def plain(self) -> dict[tuple[int, int], dict[int, set[int]]]:
        """{row of the first key of a part: queries that chose the block} per (tile, group)."""
        result: dict = {}
        for token, (first, s) in enumerate(self.home):
            for g in range(self.case.G):
                tile = result.setdefault((token // self.queries, g), {})
                for block in self.rows[token][g]:
                    for key in self.keys_of(block):
                        if 0 <= key <= s + self.case.q_start:
                            tile.setdefault(first + key, set()).add(token % self.queries)
        return result

    def entries(self, tile: int, g: int) -> list[tuple[int, set[int]]]:
        """(row of the first key, queries) in the order of the lists."""
        found = self.lists.entries[tile, g, : self.lists.counts[tile, g]].tolist()
        return [(e >> 32, {i for i in range(32) if e >> i & 1}) for e in found]


@pytest.mark.parametrize("case, kind, parts", [
    (UNIONS[0], "ragged", 1), (UNIONS[0], "random", 2), (UNIONS[1], "random", 1),
    (UNIONS[1], "ragged", 2), (UNIONS[2], "clustered", 1), (UNIONS[2], "ragged", 2),
    (Case((40,), G=1, n_sel=2, q_start=1 << 21), "clustered", 2),
    (Case((21,), n_sel=1, q_start=90), "random", 1),
], ids=str)  # fmt: skip
def test_each_block_is_listed_once_in_order(case, kind, parts, kernel_device):
    def behind_the_query(blocks):
        """Such a block counts for nothing, wherever in the row it stands."""
        blocks[..., 0, -1] = 1 << 20

    x = Lists(case, kind, parts, kernel_device, change=behind_the_query)
    want = x.plain()
    assert x.lists.counts.shape == (-(-len(x.home) // QUERIES), case.G)
    assert x.lists.queries == QUERIES
    assert len(want) == x.lists.counts.numel() and any(want.values())
    assert {at: x.entries(*at) for at in want} == {at: sorted(want[at].items()) for at in want}


BOUNDS = (-(10**6), 900, 10**6, None)
LONG = Case((77,), G=2, n_sel=6, q_start=150)


@pytest.mark.parametrize("case, parts, kind, together", [
    (*of, bound)
    for *of, bounds in ((UNIONS[1], 1, "ragged", BOUNDS), (UNIONS[1], 2, "random", (900, None)),
                        (LONG, 1, "random", BOUNDS),
                        (Case((5, 90, 1), n_sel=4), 4, "ragged", (900, None)))
    for bound in bounds
], ids=str)  # fmt: skip
def test_the_rest_is_what_few_chose(case, parts, kind, together, kernel_device, monkeypatch):
    """Blocks that few queries of a tile chose go by keys where that pays, with few heads a group
    always; the last two blocks of a query never do."""
    heads = 4 if together is None else 16
    queries = tile_blocks.queries_of(heads)
    assert queries == (16 if heads == 4 else QUERIES)
    monkeypatch.setitem(tile_blocks.LEAST, heads, 3)
    costs = tile_blocks.Costs(215, 95, 145, 300, together or 0)
    x = Lists(case, kind, parts, kernel_device, queries, heads=heads, costs=costs)
    lists, rest_of = x.lists, x.lists.rest
    assert lists.part == 64 // heads and lists.queries == queries
    got = rest_of.blocks.reshape(len(x.home), case.G, -1).tolist()
    whole, split = [], 0
    for (tile, g), chosen in x.plain().items():
        last = {
            row
            for query in range(queries)
            for row in sorted(row for row, by in chosen.items() if query in by)[-2:]
        }
        rest = {row for row, by in chosen.items() if len(by) < 3 and row not in last}
        n_rest = sum(len(chosen[row]) for row in rest)
        shared = costs.read * len(chosen) + costs.pair * sum(map(len, chosen.values()))
        dense = costs.dense * (len(chosen) - len(rest)) + costs.together
        pays = n_rest > 0 and costs.rest_pair * n_rest + dense < shared
        by_keys = pays or together is None
        if not by_keys:
            rest = set()
            whole.append(tile * case.G + g)
        split += by_keys
        assert rest_of.undone[tile, g] == (0 if by_keys else -1)
        for t in range(tile * queries, min((tile + 1) * queries, len(x.home))):
            assert got[t][g] == [
                key * parts // case.l_sel if x.home[t][0] + key in rest else -1
                for block in x.rows[t][g]
                for key in x.keys_of(block)
            ]
        assert rest_of.listed[tile, g] == (len(chosen) - len(rest) if by_keys else -1)
        order = sorted(set(chosen) - rest) + sorted(rest)
        assert x.entries(tile, g) == [(row, chosen[row]) for row in order]
    assert rest_of.whole[0] == len(whole)
    assert sorted(rest_of.whole[1 : 1 + len(whole)].tolist()) == sorted(whole)
    if together != 900 or case.n_sel == 6:
        assert (split > 0) == (together != 10**6)


# ---- queries of a tile of keys -------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 1 << 26], ids=["sorted", "map"])
@pytest.mark.parametrize("per_block", [1, 2])
@pytest.mark.parametrize("case", [Case((1, 37, 20)), Case((29,), batch=2), Case((70,))], ids=str)
def test_lists_hold_every_pair_once_and_in_order(case, per_block, most, kernel_device, monkeypatch):
    """per_block 2: the last block of a sequence has one tile only. No block is as far as the last
    two; their tiles must not wrap around. Packed rows past the last sequence are nobody's."""
    small = dict(CHUNK=4, LIST_SIZE=8, WORDS=1, SHARE=2)  # several programs, several turns
    for name, value in (*small.items(), ("MAP_BYTES", most)):
        monkeypatch.setattr(lists_by_keys, name, value)
    x = Problem(case, "ragged", kernel_device, monkeypatch)
    x.blocks.view(-1, case.n_sel)[3] = torch.tensor([2, 3, 2**31 - 1][: case.n_sel])
    per_seq, tile, blocks, cu = 3, 16, x.blocks, x.cu
    if case.packed:
        blocks = torch.cat([blocks, torch.zeros_like(blocks[:5])])
    with launches.recording() as counts:
        lists = lists_by_keys.rows_of_tiles(blocks, per_block, tile, per_seq * tile, cu)
    assert ("_tile_members_kernel" in counts) == (most > 0)
    begins = cu.tolist()[:-1] if case.packed else [case.lengths[0] * b for b in range(case.batch)]
    assert lists.per_seq == (len(blocks) // tile + len(begins) + 1 if case.packed else per_seq)
    want = {}  # rows by the number of a tile
    for at, block in enumerate(x.blocks.flatten().tolist()):
        row = at // case.n_sel
        token, group = divmod(row, case.G)
        sequence = max(i for i, first in enumerate(begins) if first <= token)
        for nth in range(block * per_block, (block + 1) * per_block):
            if case.packed and 0 <= nth * tile <= token - begins[sequence]:
                number = group * lists.per_seq + begins[sequence] // tile + sequence + nth
                want.setdefault(number, []).append(row)
            elif not case.packed and 0 <= nth < per_seq:
                want.setdefault((sequence * case.G + group) * per_seq + nth, []).append(row)
    got, rows = {}, lists.rows.tolist()
    chunks = lists.chunk_tile, lists.chunk_begin, lists.chunk_end
    for number, begin, end in zip(*(x.tolist() for x in chunks), strict=True):
        if begin < end:
            assert end - begin <= 4 and number >= max(got, default=number)
            got.setdefault(number, []).extend(rows[begin:end])
    assert got == want


@pytest.mark.parametrize("case", [Case((90,), G=2, n_sel=4), Case((1, 37, 20), G=3)], ids=str)
def test_pieces_come_once_by_group_and_about_in_order(case, kernel_device, monkeypatch):
    monkeypatch.setattr(lists_by_keys, "CHUNK", 16)
    monkeypatch.setattr(lists_by_keys, "BUCKETS", 16)
    x = Problem(case, "random", kernel_device, monkeypatch)
    tokens = sum(case.lengths)
    lists = lists_by_keys.rows_of_tiles(x.blocks, 1, case.l_sel, 90, x.cu)
    pieces, per_chunk = lists_by_keys.pieces_in_order(lists, 4, tokens, case.G)
    assert per_chunk == 4 and len(pieces) == 1 + 4 * lists.n_chunks
    spans = {}
    for piece in range(4 * lists.n_chunks):
        begin = int(lists.chunk_begin[piece // 4]) + piece % 4 * 4
        end = min(begin + 4, int(lists.chunk_end[piece // 4]))
        if begin < end:
            spans[piece] = int(lists.rows[(begin + end) // 2])
    listed = pieces[1 : 1 + int(pieces[0])].tolist()
    assert sorted(listed) == sorted(spans) and len(spans) > 8
    per_group = 16 // case.G
    buckets = [(spans[p] % case.G, spans[p] // case.G * per_group // tokens) for p in listed]
    assert buckets == sorted(buckets) and len(set(buckets)) > case.G
