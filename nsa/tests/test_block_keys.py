"""Are all forced blocks chosen, however many, and whatever the scores of the others?"""

from __future__ import annotations

import pytest
import torch

from nsa.blocks import num_compressed
from nsa.kernels.decode import nsa_decode_triton
from nsa.kernels.prefill import compressed_attention_triton, select_blocks_triton
from nsa.kernels.prefill.choice.score_topn_triton import Ranking
from nsa.tests.helpers import randn

pytestmark = pytest.mark.kernel
# n_init, n_local, n_sel: of more than 100 blocks in turn fp32 loses count of a rank.
FORCED = [(1, 2, 3), (1, 150, 152), (1, 210, 220), (30, 200, 231), (0, 300, 300)]


def inputs(n_cmp, device):
    """A query and compressed keys."""
    make = lambda seed, n: randn(1, n, 1, 16, seed=seed, dtype=torch.float16, device=device)
    return make(0, 1), make(1, n_cmp)


def check(found, n_init, n_local, n_sel, own):
    row = found.flatten().tolist()
    assert set(row) >= {*range(n_init), *range(own - n_local + 1, own + 1)}
    assert sorted(set(row)) == row and len(row) == n_sel and row[-1] == own


@pytest.mark.parametrize(
    "forced, tokens", [*((x, 1201) for x in FORCED), (FORCED[3], 1700)], ids=str
)
def test_prefill(forced, tokens, kernel_device):
    q, k = inputs(num_compressed(tokens, 4, 4), kernel_device)
    how = dict(l=4, d=4, q_start=tokens - 1)
    _, lse = compressed_attention_triton(q, k, k, **how)
    sizes = dict(zip(("n_init", "n_local", "n_sel"), forced, strict=True), l_sel=4)
    found = select_blocks_triton(q, k, lse, **how, **sizes)
    check(found, *forced, (tokens - 1) // 4)


@pytest.mark.parametrize("forced", FORCED, ids=str)
def test_decoding(forced, kernel_device):
    q, k = inputs(300, kernel_device)
    rows = torch.zeros(1, 1204, 1, 16, dtype=torch.float16, device=kernel_device)
    lens = torch.tensor([1201], dtype=torch.int32, device=kernel_device)
    sizes = dict(zip(("n_init", "n_local", "n_sel"), forced, strict=True), l=4, d=4, l_sel=4)
    _, found = nsa_decode_triton(
        q, k, k, *[rows] * 4, torch.ones_like(q[..., :3]), lens, window=16, max_len=1204,
        return_indices=True, **sizes,
    )  # fmt: skip
    check(found, *forced, 300)


@pytest.mark.parametrize("score", [float("inf"), 3e38, 0.0, float("nan")])
def test_no_score_comes_before_a_forced_block(score, kernel_device):
    """Scores that the ranking is given, of prefill."""
    q, k = inputs(24, kernel_device)
    ranking = Ranking.of(q, k, l=4, d=4, l_sel=4, n_sel=4, n_init=1, n_local=2, q_start=95)
    for slab in ranking.slabs(1, 16):
        slab.scores.fill_(0.5)
        slab.scores[7:10] = score
    assert ranking.out.flatten().tolist() == [0, 7 if score > 1 else 1, 22, 23]


def test_fewer_blocks_than_the_forced_ones_are_refused(kernel_device):
    q, k = inputs(10, kernel_device)
    sizes = dict(l=4, d=4, l_sel=4, n_sel=3, n_init=2, n_local=2)
    refused = pytest.raises(ValueError, match="got n_sel=3 n_init=2 n_local=2")
    with refused:
        select_blocks_triton(q, k, torch.zeros(1, 1, 1, device=kernel_device), q_start=39, **sizes)
    lens = torch.tensor([10], dtype=torch.int32, device=kernel_device)
    with refused:
        nsa_decode_triton(q, *[k] * 6, q[..., :3], lens, window=4, max_len=10, **sizes)
