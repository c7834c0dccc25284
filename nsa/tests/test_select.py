"""Are the right blocks chosen, in the stated order, and turned into clean causal ranges?"""

import itertools

import pytest
import torch

pytest.importorskip("hypothesis", reason="random cases need hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

import nsa
from nsa import blocks, oracle, select
from nsa.tests.helpers import HOSTILE_RANGE_KINDS, RANGE_KINDS, make_ranges, randn


def blocks_of(scores, t, **kw):
    rows = torch.tensor(scores)[None, None, None, :]
    out = select.top_blocks(rows, q_start=t, **kw)
    return [j for j in out[0, 0, 0].tolist() if j >= 0]


CASES = [
    dict(l=8, d=4, l_sel=8, n_sel=3),
    dict(l=8, d=4, l_sel=8, n_sel=16),  # more than there are
    dict(l=8, d=4, l_sel=16, n_sel=1, n_init=0, n_local=1),
    dict(l=4, d=2, l_sel=4, n_sel=3),
    dict(l=16, d=4, l_sel=8, n_sel=4, n_init=2, n_local=1),
    dict(l=8, d=8, l_sel=8, n_sel=5, n_init=0, n_local=3),
    dict(l=8, d=4, l_sel=4, n_sel=4, n_init=2, n_local=2),
    dict(l=8, d=4, l_sel=8, n_sel=3, n_init=0, n_local=1, softmax_scale=0.05),
    *(dict(l=l, d=d, l_sel=l_sel, n_sel=4)
      for l, d, l_sel in ((32, 16, 64), (4, 2, 12), (6, 3, 3), (1, 1, 1))),
]  # fmt: skip


@pytest.mark.parametrize("sizes", CASES, ids=str)
@pytest.mark.parametrize("q_start", [0, 13])
def test_blocks_match_the_oracle(sizes, q_start):
    S, l, d = 45, sizes["l"], sizes["d"]
    n_cmp = (q_start + S - l) // d + 1
    q, k = randn(2, S, 4, 8, seed=1), randn(2, n_cmp, 2, 8, seed=2)
    got = nsa.select_blocks(q, k, q_start=q_start, **sizes)
    want = oracle.select_blocks(q, k, q_start=q_start, **sizes)
    assert got.dtype == torch.int32
    assert torch.equal(got, want), (got != want).nonzero()[0]
    if "softmax_scale" in sizes:  # the sum over a group's heads makes it matter
        plain = {n: s for n, s in sizes.items() if n != "softmax_scale"}
        assert not torch.equal(nsa.select_blocks(q, k, q_start=q_start, **plain), got)


def test_chunks_do_not_change_the_choice(monkeypatch):
    q, k = randn(1, 50, 4, 8, seed=3), randn(1, 11, 2, 8, seed=4)
    sizes = {**CASES[0], "n_sel": 5}  # two more than are forced
    whole = nsa.select_blocks(q, k, **sizes)
    monkeypatch.setattr(select, "_CHUNK_SCORES", 4 * 11 * 7)
    assert torch.equal(nsa.select_blocks(q, k, **sizes), whole)


@settings(max_examples=60, deadline=None)
@given(
    scores=st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=12),
    t=st.integers(0, 47), n_sel=st.integers(1, 8), n_init=st.integers(0, 3),
    n_local=st.integers(1, 3),
)  # fmt: skip
def test_top_blocks_against_the_oracle(scores, t, n_sel, n_init, n_local):
    t, n_sel = min(t, len(scores) * 4 - 1), max(n_sel, n_init + n_local)
    kw = dict(l_sel=4, n_sel=n_sel, n_init=n_init, n_local=n_local)
    assert blocks_of(scores, t, **kw) == oracle.top_blocks(scores, t, **kw)


def test_fp64_is_chosen_in_fp64():
    """A difference that fp32 does not see decides."""
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([0.0, 1.0, 1.0 + 1e-10, 0.0], dtype=torch.float64).view(1, 4, 1, 1)
    how = dict(l=4, d=4, l_sel=4, n_sel=2, n_init=0, n_local=1, q_start=15)
    assert nsa.select_blocks(q, k, **how).flatten().tolist() == [2, 3]
    assert nsa.select_blocks(q.float(), k.float(), **how).flatten().tolist() == [1, 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_chosen_in_fp32(dtype):
    q, k = randn(1, 300, 4, 8, seed=1, dtype=dtype), randn(1, 74, 2, 8, seed=2, dtype=dtype)
    sizes = {**CASES[0], "n_sel": 6}
    got = nsa.select_blocks(q, k, **sizes)
    assert torch.equal(got, nsa.select_blocks(q.float(), k.float(), **sizes))


def check_clean(clean, want):
    """Ranges are of the tokens that are wanted: ascending, apart, empty ones last."""
    assert clean.dtype == torch.int32
    for row, tokens in zip(clean.flatten(0, -3).tolist(), want, strict=True):
        spans = [s for s in row if s != [0, 0]]
        assert row == spans + [[0, 0]] * (len(row) - len(spans))
        assert set().union(*(range(*s) for s in spans)) == tokens
        assert all(s < e for s, e in spans)
        assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize("kind", RANGE_KINDS + HOSTILE_RANGE_KINDS)
def test_ranges_are_cleaned(kind):
    ranges = make_ranges(kind, 2, 5, 2, 40, 24, seed=3)
    want = [set(oracle.range_tokens(row, 40)) for row in ranges.flatten(0, 2)]
    check_clean(select.clean_ranges(ranges, 40), want)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-5, 25), st.integers(-5, 25)), max_size=7), st.integers(0, 20)
)
def test_any_ranges_are_cleaned(pairs, limit):
    ranges = torch.tensor(pairs, dtype=torch.int64).reshape(1, len(pairs), 2)
    want = {x for s, e in pairs for x in range(max(s, 0), min(e, limit))}
    clean = select.clean_ranges(ranges, limit)
    if pairs:
        check_clean(clean, [want])
    else:
        assert clean.shape == (1, 0, 2)


def test_exact_ties_go_to_the_lower_index_at_every_length():
    """A zero query scores all keys alike: of the blocks that no border cuts the first are chosen,
    and a longer sequence changes nothing."""
    S, how = 531, dict(l=32, d=16, l_sel=64, n_sel=6)
    k = randn(1, blocks.num_compressed(S, 32, 16), 1, 16, seed=1)
    whole = select.select_blocks(torch.zeros(1, S, 1, 16), k, **how)
    assert whole[0, 385, 0].tolist() == [0, 1, 2, 3, 5, 6]
    for n in range(33, S, 37):
        keys = k[:, : blocks.num_compressed(n, 32, 16)]
        part = select.select_blocks(torch.zeros(1, n, 1, 16), keys, **how)
        assert torch.equal(part, whole[:, :n]), n
    for t in range(0, S, 53):
        one = select.select_blocks(torch.zeros(1, 1, 1, 16), k, q_start=t, **how)
        assert torch.equal(one[:, 0], whole[:, t]), t
