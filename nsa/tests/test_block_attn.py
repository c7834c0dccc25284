"""Selection by blocks served otherwise than query by query, which test_prefill_kernels.py holds
against the oracle: by unions of the blocks of a tile of queries, by key tiles, and a backward in
one pass. Their lists: test_block_lists.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nsa import launches
from nsa.kernels.prefill.blocks import fwd_by_keys_triton, union_lists, unions_triton
from nsa.kernels.tiles import arch_of
from nsa.tests import cases
from nsa.tests.cases import BF16, F16, F32, PAPER, WIDE, Case, Problem, Shape, tolerance
from nsa.tests.helpers import deterministic
from nsa.tests.test_prefill_kernels import selected_case

pytestmark = pytest.mark.kernel
CORE = pytest.mark.core
LOOSE = {F16: dict(rtol=4e-3, atol=1e-2), BF16: dict(rtol=3e-2, atol=6e-2)}
ALWAYS, NEVER = 1 << 20, -1  # limits on unions
BIG = dict(**WIDE, l_sel=64, n_sel=16, dtype=BF16, big=True)
PACK = (1, 700, 63, 64, 65, 333)
PACKED = Case((5, 27, 1, 9))


# ---- unions --------------------------------------------------------------------------------------

UNIONS = [
    PACKED,
    Case((21,), h=3, D=24, q_start=29, batch=2, n_sel=5),  # tiles over two own blocks, two entries
    Case((27,), G=1, h=1, Dv=32, l_sel=32, q_start=70),
    Case((1000,), G=4, h=16, **BIG),
    Case(PACK, h=4, **BIG | dict(n_sel=6, dtype=F16)),
    Case((500,), G=1, h=8, q_start=700, **BIG | dict(D=192, n_sel=8)),
    Case((300,), G=1, h=5, batch=2, **BIG | dict(D=256, Dv=256, n_sel=4)),
    Case((300,), G=1, h=1, q_start=512, **BIG | dict(D=64, Dv=64, l_sel=128, n_sel=4, dtype=F16)),
]
CHOICE = Case((96,), G=1, h=2, n_sel=4, q_start=1600)
CHOICE_GPU = Case((2048,), G=2, h=16, q_start=6144, **BIG)


def leave_out(lists, mine: Tensor) -> None:
    """Keep the unions of `mine` [tiles, G] and leave the other tiles to the single queries."""
    lists.state[..., 0].masked_fill_(~mine, -1)
    tiles = torch.arange(mine.numel(), dtype=torch.int32, device=mine.device)[mine.flatten()]
    lists.work[: len(tiles)] = tiles
    lists.counts[0] = len(tiles)


def rows_of(x: Tensor, case: Case, queries: int) -> Tensor:
    """[tiles, G, rows of the tile] of a tensor [.., HQ, D]: True where nothing is NaN."""
    known = (~x.isnan()).all(-1).reshape(-1, case.G, case.h)
    known = torch.cat([known, known[-1:].expand(-len(known) % queries, -1, -1)])
    return known.view(-1, queries, case.G, case.h).permute(0, 2, 1, 3).flatten(2)


@pytest.mark.parametrize("case, kind", [
    *(pytest.param(UNIONS[3], kind, marks=CORE) for kind in ("random", "clustered", "ragged")),
    *((c, "ragged") for c in UNIONS[:3] + UNIONS[4:]),
], ids=str)  # fmt: skip
def test_unions_agree_with_single_queries(case, kind, device, monkeypatch):
    """Every third tile is left out: NaN stays in its rows and nowhere else."""
    x = Problem(case, kind, device, monkeypatch)
    want = x.run(None, unions=False)
    lists = x.lists(ALWAYS)
    mine = lists.state[..., 0] >= 0
    assert mine.float().mean() > 0.4
    mine[1::3] = False
    assert mine.any() and not mine.all()
    leave_out(lists, mine)
    out, dq = torch.full_like(want["out"], math.nan), torch.full_like(x.q, math.nan)
    lse = torch.full_like(want["lse"], math.nan)
    sizes, given = (arch_of(x.q.device), case.D, case.Dv), (x.q, x.k, x.v, x.by, lists)
    unions_triton.union_attention_fwd(*given, out, lse, unions_triton.fwd_tiles(*sizes))
    delta = (want["out"].float() * x.do.float()).sum(-1)
    unions_triton.union_attention_dq(
        x.do, *given, want["lse"], delta, dq, accumulate=False,
        tiles=unions_triton.dq_tiles(*sizes), dq_scale=x.how["softmax_scale"],
    )  # fmt: skip
    tol = 4e-3 if case.dtype == F16 else 3e-2
    for got, full in ((out, want["out"]), (dq, want["dq"]), (lse[..., None], want["lse"])):
        written = rows_of(got, case, lists.queries)
        assert torch.equal(written.all(-1), mine) and torch.equal(written.any(-1), mine)
        rows = ~got.isnan()
        a, b = got[rows].float(), full.view_as(got)[rows].float()
        size = max(1.0, b.nan_to_num(neginf=0.0).abs().max().item())
        torch.testing.assert_close(a, b, rtol=tol, atol=tol * size)


@pytest.mark.parametrize("case, kind, share", [
    (PACKED, "ragged", None),  # tiles over a border are singles
    (UNIONS[3], "ragged", None), (UNIONS[3], "clustered", ALWAYS), (UNIONS[3], "random", NEVER),
], ids=str)  # fmt: skip
def test_unions_serve_the_whole_operator(case, kind, share, device, monkeypatch):
    """Each query is served by one of the two kernels, and results repeat bitwise."""
    x = Problem(case, kind, device, monkeypatch)
    state = x.lists(share).state[..., 0]
    assert (state >= 0).any() == (share != NEVER)
    assert (state < 0).any() or (not case.packed and share == ALWAYS)
    single = x.run(None, unions=False)
    with launches.recording() as counts:
        union = x.run(share)
    expect = {"_union_lists_kernel", "_union_attn_fwd_kernel", "_union_attn_bwd_dq_kernel"}
    assert expect <= set(counts)
    torch.testing.assert_close(union, single, **LOOSE[case.dtype])
    if share is None:
        torch.testing.assert_close(x.run(share), union, rtol=0, atol=0)


@pytest.mark.parametrize("case", [CHOICE, CHOICE_GPU], ids=str)
def test_each_tile_takes_the_path_that_pays(case, device, monkeypatch):
    """Choices that agree go as unions; choices that differ in every query do not."""
    lists = lambda kind: Problem(case, kind, device, monkeypatch).lists(None)
    share = lambda kind: (lists(kind).state[..., 0] >= 0).float().mean()
    assert share("clustered") == 1 and share("random") < 0.2


@pytest.mark.parametrize("case", [PACKED], ids=str)
def test_where_unions_cannot_apply(case, device, monkeypatch):
    """fp32 and scales that are not positive go by single queries."""
    x = Problem(case, "clustered", device, monkeypatch)
    assert x.lists(ALWAYS) is not None
    x.how["softmax_scale"] = -0.5
    assert x.lists(ALWAYS) is None
    x.how["softmax_scale"] = 0.5
    x.q = x.q.float()
    assert x.lists(ALWAYS) is None


# ---- key tiles -----------------------------------------------------------------------------------

TILED_SHAPES = [
    Shape((37,)),
    Shape((5, 41, 1, 22)),
    Shape((37,), G=1, h=3, D=24, Dv=16),
    Shape((50,), batch=2, G=1, h=1, l_sel=32, n_sel=5, Dv=32),
    Shape((1000,), G=8, h=4, **WIDE, dtype=BF16, n_sel=8, **PAPER),
    Shape(PACK, G=2, h=4, **WIDE, n_sel=4, **PAPER),
    Shape((777,), batch=2, G=2, h=2, D=64, Dv=64, n_sel=16, **PAPER),
    Shape((500,), G=4, h=8, **WIDE, dtype=BF16, n_sel=6, **PAPER),
]
TILED = UNIONS[1], PACKED, Case((1000,), G=4, h=4, q_start=70, **BIG)


@pytest.fixture
def key_tiles(monkeypatch):
    """Any number of pairs and any length will do, and queries go in slabs of a few dozen."""
    slabs = lambda row_bytes, _: 29 if row_bytes < 2000 else 300
    any_will_do = dict(ALIKE=-1, MIN_PAIRS=1, MIN_PAIRS_PER_TILE=0, slab_tokens=slabs)
    for name, value in any_will_do.items():
        monkeypatch.setattr(fwd_by_keys_triton, name, value)


@pytest.mark.parametrize("shape, kind", [
    *((TILED_SHAPES[0], kind) for kind in ("random", "one_block", "all", "own_only")),
    *(pytest.param(s, "ragged", marks=[CORE] * s.big) for s in TILED_SHAPES[1:]),
], ids=str)  # fmt: skip
def test_key_tiles_against_the_oracle(shape, kind, device, key_tiles, monkeypatch):
    monkeypatch.setattr(union_lists, "SHARE", {("fwd_outer", 90): NEVER})
    monkeypatch.setattr(union_lists, "OTHER_SHARE", NEVER)
    with launches.recording() as counts:
        selected_case(shape, device, kind, seed=5)
    assert counts["_block_attn_outer_kernel"] == counts["_block_attn_merge_kernel"] > 1, counts


def by_tiles(x: Problem, share: int | None = NEVER):
    """out, lse, and what was launched."""
    with x.limit(share):
        (out, lse), counts = x.forward()
    return out, lse, counts


@pytest.mark.parametrize("case, kind, share", [
    (TILED[0], "clustered", ALWAYS), (TILED[0], "random", NEVER), (TILED[1], "ragged", None),
    (TILED[2], "ragged", None), (TILED[2], "clustered", ALWAYS), (TILED[2], "random", NEVER),
], ids=str)  # fmt: skip
def test_beside_unions_and_without_is_the_same(case, kind, share, device, key_tiles, monkeypatch):
    x = Problem(case, kind, device, monkeypatch)
    *got, counts = by_tiles(x, share)
    assert counts["_block_attn_outer_kernel"] > 0 and counts["_union_attn_fwd_kernel"] == 1
    monkeypatch.setattr(fwd_by_keys_triton, "MIN_PAIRS", 1 << 60)
    *want, counts = by_tiles(x)
    assert "_block_attn_outer_kernel" not in counts
    torch.testing.assert_close(got[0], want[0], **tolerance(case.dtype))
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [Case((7,), G=1, q_start=29), TILED[2]], ids=str)
def test_blocks_past_the_sequence_hold_no_key(case, device, key_tiles, monkeypatch):
    """No key tile writes a partial output for them: whatever is there, none may be merged."""
    x = Problem(case, "ragged", device, monkeypatch)
    # Not NaN as in every other test, which would send the tile again, query by query.
    make = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: make(*a, **kw).nan_to_num_(3))
    want, want_lse, _ = by_tiles(x)
    x.blocks = x.blocks.masked_fill(x.blocks < 0, 1 << 20)
    got, lse, counts = by_tiles(x)
    assert counts["_block_attn_merge_kernel"] > 0
    assert torch.equal(got, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("case", [TILED[2]], ids=str)
def test_values_past_the_range_of_16_bits_survive(case, device, key_tiles, monkeypatch):
    """Partial outputs are fp16 over their largest: bf16 values of 1e30 must come out."""
    x = Problem(case, "ragged", device, monkeypatch)
    small = by_tiles(x)[0]
    x.v = (x.v.float() * 2.0**100).bfloat16()
    large = by_tiles(x)[0]
    torch.testing.assert_close(large.float() * 2.0**-100, small.float(), rtol=1e-2, atol=1e-6)


TOGETHER = pytest.mark.parametrize("case, by", [
    (Case((26,), G=1, h=4, n_sel=5, q_start=104), "unions"), (CHOICE_GPU, "unions"),
    (TILED[0], "key_tiles"), (TILED[2], "key_tiles"),
], ids=str)  # fmt: skip


@TOGETHER
def test_what_a_neighbour_sees_changes_no_bit(case, by, device, request, monkeypatch):
    """Where PyTorch asks for deterministic algorithms, output and dQ keep their bits. No kernel may
    run that does whole tiles anew: its arithmetic is another one, but not in the interpreter."""
    x = Problem(case, "random", device, monkeypatch)
    if by == "key_tiles":
        request.getfixturevalue("key_tiles")

    def run():
        with x.limit(ALWAYS), deterministic():
            x.saved = None
            grads, _ = x.backward(use_gluon=False)
        return *x.saved, grads[0]

    clean = run()
    rows = x.poison(3 * case.l_sel + 1 if by == "unions" else 2 * case.l_sel + 1, -1)[0]
    with launches.recording() as counts:
        for was, now in zip(clean, run(), strict=True):
            assert torch.equal(now[0][~rows], was[0][~rows])
    assert not {"_union_attn_fwd_kernel", "_block_attn_outer_kernel"} & set(counts)


@TOGETHER
def test_keys_that_a_query_did_not_choose_stay_out(case, by, device, request, monkeypatch):
    """0 * NaN, of keys past a query in its own block and of blocks that others chose: tiles over
    such keys go again, one by one."""
    x = Problem(case, "random", device, monkeypatch)
    if by == "unions":
        run, at, tol = lambda: x.run(ALWAYS), (3 * case.l_sel + 1, -1), LOOSE[case.dtype]
    else:
        request.getfixturevalue("key_tiles")
        run = lambda: dict(zip(("out", "lse"), by_tiles(x), strict=False))
        at, tol = (2 * case.l_sel + 1, -3), tolerance(case.dtype)
    clean = run()
    rows = x.poison(*at)[0]
    with launches.recording() as counts:
        got = run()
    assert by == "key_tiles" or "_union_attn_bwd_dq_kernel" in counts
    for name in {"out", "lse", "dq"} & set(got):
        close = tol if name != "lse" or by == "unions" else dict(rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got[name][0][~rows], clean[name][0][~rows], **close)
    assert got["out"][0][rows].isnan().any(-1).all()


@pytest.mark.parametrize("case, share", [(TILED[0], ALWAYS), (TILED[0], NEVER), (TILED[1], NEVER)])
def test_scores_of_minus_infinity_tell(case, share, device, key_tiles, monkeypatch):
    """No weight is left of them, as of a row that attends nothing, which has output 0."""
    x = Problem(case, "clustered", device, monkeypatch)
    sunk = x.sink(7)
    out, _, counts = by_tiles(x, share)
    assert counts["_block_attn_outer_kernel"] > 0
    assert out[sunk].isnan().all() and out[~sunk].isfinite().all()


# ---- the backward in one pass --------------------------------------------------------------------

LISTS = {
    "_pair_tiles_kernel", "_tile_counts_kernel", "_tile_members_kernel", "_chunk_ends_kernel",
    "_chunk_fill_kernel",
}  # fmt: skip
SHARED = {*LISTS, "_finite_kernel", "_attn_bwd_delta_kernel", "_block_attn_bwd_dkdv_kernel"}
FUSED = {*SHARED, "_round_kernel", "_round_keys_kernel"}
TWO_PASSES = {*SHARED, "_block_attn_bwd_dq_kernel", "_block_attn_bwd_sum_kernel"}
ONE_PASS = [
    (Case((37,), h=4, n_sel=3, batch=2), "random"),
    (Case((5, 33, 1, 16), h=3, D=24), "ragged"),
    (Case((40,), h=1, D=48), "one_block"),
    (Case((27,), G=1, h=8, Dv=32, l_sel=32, q_start=70), "clustered"),
    (Case((34,), dtype=F32), "ragged"),
    (Case((4000,), G=4, h=8, **BIG), "random"),
    (Case((4000,), G=4, h=8, **BIG), "one_block"),
    (Case((2000,), G=8, h=4, q_start=777, **BIG), "ragged"),
    (Case(PACK, h=4, **BIG), "ragged"),
    (Case((600,), G=2, h=1, **BIG), "clustered"),
    (Case((600,), G=1, h=2, **BIG), "random"),
    (Case((500,), G=1, h=8, batch=2, **BIG | dict(D=192)), "ragged"),
    (Case((300,), G=1, h=5, **BIG | dict(D=256, Dv=256, l_sel=128)), "ragged"),
]


def gradients(x: Problem, dq: Tensor | None = None):
    """By the Triton kernels; those for Hopper: test_hopper.py."""
    if x.q.is_cuda and torch.cuda.get_device_capability()[0] < 9 and x.case.D > 128:
        pytest.skip("wide heads are fused on SM 9.0 and 10.0 only")
    return x.backward(dq, use_gluon=False)


@pytest.mark.parametrize("case, kind", [
    pytest.param(*c, marks=[CORE] * (i == 5)) for i, c in enumerate(ONE_PASS)
], ids=str)  # fmt: skip
def test_one_pass_agrees_with_two(case, kind, device, monkeypatch):
    x = Problem(case, kind, device, monkeypatch)
    got, counts = gradients(x)
    assert set(counts) - {"_token_sequences_kernel"} == FUSED  # of packs
    with deterministic():
        want, counts = gradients(x)
        assert TWO_PASSES <= set(counts)
        cases.close_gradients(got, want, cases.GRADIENTS[case.dtype])
        if device == "cpu":
            return  # the interpreter runs one program after another: it always repeats
        again, _ = gradients(x)
    for name, a, b in zip("qkv", want, again, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("case, kind", [ONE_PASS[1], ONE_PASS[5]], ids=str)
def test_dq_is_added_without_the_softmax_scale(case, kind, device, monkeypatch):
    """Both ways add dQ / softmax_scale to what an fp32 buffer holds."""
    x = Problem(case, kind, device, monkeypatch)
    (want, *_), _ = gradients(x)
    for kernels in (FUSED, TWO_PASSES):
        dq = torch.full(want.shape, 3.0, dtype=F32, device=device)
        with deterministic(kernels is TWO_PASSES):
            (got, *_), counts = gradients(x, dq)
        assert kernels - {"_round_kernel"} <= set(counts) and got is dq
        added = (dq - 3.0) * x.how["softmax_scale"]
        cases.close_gradients([added], [want], cases.GRADIENTS[case.dtype])
