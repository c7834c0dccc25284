"""Both ends of sums by keys against fp64, with what lies between them done in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nsa import launches
from nsa.kernels.prefill.blocks import fwd_by_keys_ends, fwd_by_keys_sums, tile_blocks
from nsa.kernels.prefill.blocks.fwd_by_keys_sums import begin_sums
from nsa.tests.cases import BF16, WIDE, Case, Problem, tolerance
from nsa.tests.helpers import randn

pytestmark = pytest.mark.kernel
SMALL = dict(D=16, Dv=16, l_sel=64, n_sel=3)
LARGE = dict(**WIDE, l_sel=64, n_sel=16, dtype=BF16, big=True)
CASES = [
    Case((45,), h=16, q_start=320, **SMALL),
    Case((19,), G=1, h=4, q_start=251, batch=2, **SMALL | dict(D=32)),
    Case((3, 140, 30), h=8, **SMALL),
    # Scores in fp64 are 0.3 GB at most: in a report a dozen of these run at a time.
    pytest.param(Case((300,), h=16, q_start=3000, **LARGE), marks=pytest.mark.core),
    Case((1, 700, 63, 300), h=16, **LARGE | dict(n_sel=5)),
    Case((500,), h=4, q_start=3000, **LARGE),
    Case((1, 700, 63, 700), h=8, **LARGE | dict(n_sel=5, D=192)),
]


class Split(Problem):
    """A problem and its lists, with as much in the rest as there can be. The rest's sums are found
    in fp64 and added as the kernel by keys adds them."""

    def __init__(self, case: Case, kind: str, device: str, monkeypatch, spread=None) -> None:
        """spread: changes V first."""
        super().__init__(case, kind, device, monkeypatch)
        lead, keys = self.q.shape[:-2], self.k.shape[:-2]
        self.v[..., 1:, :] *= 0.25  # a scale of its own for each group
        if spread:
            spread(self.v)
        self.tokens = case.batch * sum(case.lengths)
        flat = torch.arange(self.tokens, device=device)
        if case.packed:
            self.first, self.position = self.begin.long(), flat - self.begin
        else:
            self.first = flat // lead[1] * keys[1]
            self.position = flat % lead[1] + case.q_start
        rows = self.blocks.view(self.tokens, case.G, case.n_sel)
        self.queries = tile_blocks.queries_of(case.h)
        # Every third tile, of one group at least, has nothing for a rest.
        none = (flat // self.queries % 3 == 1)[:, None]
        none = none & (torch.arange(case.G, device=device) != 1)
        rows[none] = -1
        rows[..., 0][none] = (self.position // case.l_sel)[:, None].expand_as(none)[none].int()
        self.tiles = tile_blocks.tile_blocks(
            self.blocks, self.begin, *self.by.lengths(self.q, self.k), case.q_start, case.l_sel,
            queries=self.queries, heads=case.h,
            costs=tile_blocks.COSTS[128, 128]._replace(together=-(10**6)),
        )  # fmt: skip
        self.sums = self.zeros(torch.full_like(self.do, math.nan))
        for x in self.sums[:2]:
            x.fill_(math.nan)

    def zeros(self, memory: Tensor):
        return begin_sums(self.q, self.v, self.case.n_sel, self.case.l_sel, memory)

    def begun(self) -> Split:
        with launches.recording() as counts:
            fwd_by_keys_ends.begin_tiles(self.q, self.k, self.v, self.by, self.tiles, self.sums)
        assert counts["_block_attn_begin_kernel"] == 1
        return self

    def added(self) -> Split:
        """What the rest gives, on top of what is there."""
        p, o = self.relative(self.tiles.rest.blocks)
        self.sums.total.copy_(self.sums.total + p.sum(-1).view(self.sums.total.shape))
        self.sums.sums.copy_(self.sums.sums + o.reshape(self.do.shape))
        return self

    def relative(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Weights of rows relative to top, and scaled sums."""
        s = self.scores(blocks)
        top = self.sums.top.double().view(self.tokens, self.case.G, self.case.h, 1)
        p = (s - top * math.log(2)).exp().masked_fill(s == -math.inf, 0.0)
        o = torch.einsum("tghk,gkd->tghd", p, self.rows(self.v))
        return p, o * self.sums.scales[:, None].double()

    def rows(self, x: Tensor) -> Tensor:
        """All rows of K or V [G, rows, D] in fp64."""
        return x.double().reshape(-1, *x.shape[-2:]).transpose(0, 1)

    def scores(self, blocks: Tensor) -> Tensor:
        """[tokens, G, h, rows of K], natural, -inf where the blocks do not let a query look."""
        case, rows = self.case, self.k.numel() // (self.case.G * self.case.D)
        q = self.q.double().view(self.tokens, case.G, case.h, case.D)
        s = torch.einsum("tghd,gkd->tghk", q, self.rows(self.k)) / math.sqrt(case.D)
        key = torch.arange(rows, device=q.device) - self.first[:, None]  # [tokens, rows]
        causal = (key >= 0) & (key <= self.position[:, None])
        at = (key.clamp(min=0) // case.l_sel)[:, None, :, None]
        chosen = (blocks.view(self.tokens, case.G, 1, -1) == at).any(-1) & causal[:, None]
        return s.masked_fill(~chosen[:, :, None], -math.inf)

    def want(self) -> tuple[Tensor, Tensor]:
        s = self.scores(self.blocks)
        lse = s.logsumexp(-1)
        p = (s - lse[..., None]).exp().nan_to_num(0.0)
        out = torch.einsum("tghk,gkd->tghd", p, self.rows(self.v))
        return out.reshape(self.do.shape), lse.reshape(self.q.shape[:-1])

    def end(self, others=None, keep=True) -> tuple[Tensor, Tensor, Tensor]:
        """out, lse and the gated sum; NaN where the kernel wrote nothing."""
        out = torch.full_like(self.do, math.nan) if keep else None
        lse = torch.full(self.q.shape[:-1], math.nan, device=self.q.device)
        total = self.sums.sums.view(self.q.dtype) if others else out
        with launches.recording() as counts:
            fwd_by_keys_ends.end_tiles(self.tiles, self.sums, out, lse, others, total)
        assert counts["_block_attn_end_kernel"] == 1
        return out, lse, total

    def close(self, got: Tensor, want: Tensor, rows: Tensor) -> None:
        torch.testing.assert_close(got[rows].double(), want[rows], **tolerance(self.case.dtype))

    def split_rows(self) -> Tensor:
        """[.., HQ]: rows of tiles that go by keys: all where heads are few."""
        has = (self.tiles.rest.listed >= 0).repeat_interleave(self.queries, 0)[: self.tokens]
        assert has.any() and has.all() == (self.case.h < 16)
        return has.repeat_interleave(self.case.h, 1).view(self.q.shape[:-1])


@pytest.mark.parametrize("kind", ["random", "ragged"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiles_end_with_what_all_of_their_blocks_give(case, kind, device, monkeypatch):
    x = Split(case, kind, device, monkeypatch).begun()
    rows = x.split_rows()
    seen = (x.scores(x.blocks) > -math.inf).any(-1).view(rows.shape)
    for found in x.sums[:3]:  # relative to the first of them, which no score is far above
        assert found[~rows].isnan().all() and found[rows & seen].isfinite().all()
    listed = x.scores(x.blocks).masked_fill(x.scores(x.tiles.rest.blocks) > -math.inf, -math.inf)
    top = listed.amax(-1).view(rows.shape)[rows & seen] / math.log(2)
    torch.testing.assert_close(x.sums.top[rows & seen].double(), top, rtol=1e-3, atol=1e-3)
    out, lse, _ = x.added().end()
    want, want_lse = x.want()
    x.close(out, want, rows)
    torch.testing.assert_close(lse[rows].double(), want_lse[rows], rtol=1e-4, atol=2e-3)
    assert out[~rows].isnan().all() and lse[~rows].isnan().all()
    assert int(x.tiles.rest.whole[0]) == (x.tiles.rest.listed < 0).sum()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("case", CASES[1:4:2] + CASES[5:6], ids=str)
def test_gates_and_other_branches(case, both, keep, device, monkeypatch):
    """The gated sum takes the place of the sums by keys, and out is what it is without it."""
    x = Split(case, "random", device, monkeypatch).begun().added()
    rows = x.split_rows()
    o_cmp, o_win = (randn(*x.do.shape, seed=s, dtype=case.dtype, device=device) for s in (7, 8))
    gates = torch.rand(*x.q.shape[:-1], 3, device=device).to(case.dtype)
    out, _, total = x.end((o_cmp, o_win if both else None, gates), keep)
    (want, _), g, others = x.want(), gates.double(), o_cmp.double()
    if keep:
        x.close(out, want, rows)
    if both:
        others = others * g[..., :1] + o_win.double() * g[..., 2:]
    assert total.data_ptr() == x.sums.sums.data_ptr()
    x.close(total, others + want * g[..., 1:2], rows)


@pytest.mark.parametrize("bad", ["nan", "inf", "large"])
@pytest.mark.parametrize("case", CASES[:2] + CASES[3:4] + CASES[5:6], ids=str)
def test_what_is_not_finite_is_left_to_the_other_kernel(case, bad, device, monkeypatch):
    """A part of a tile that lists a bad value, or chose a key whose score is far above those of its
    neighbourhood, is in the list once, with its sums as they were."""
    x = Split(case, "random", device, monkeypatch)
    rows, want = x.split_rows(), x.want()[0]
    known = x.tiles.rest.whole[: 1 + int(x.tiles.rest.whole[0])].tolist()
    if bad == "large":
        rest = x.tiles.rest.blocks.view(x.tokens, case.G, case.n_sel)[:, 0].amax(-1)
        token = int((rest >= 0).nonzero()[0])
        row = int(x.first[token] + rest[token] * case.l_sel) + 2
        x.k.view(-1, case.G, case.D)[row, 0] *= 100
        want = x.want()[0]
    else:
        x.v[0, case.q_start + 15, 0, 5] = float(bad)  # which the own blocks of many hold
    x.begun().added()
    before = x.sums.sums.clone()
    gates = torch.ones(*x.q.shape[:-1], 3, dtype=case.dtype, device=device)
    _, lse, total = x.end((torch.zeros_like(x.do), None, gates), False)
    left = rows & lse.isnan()
    assert left[..., : case.h].any() and not left[..., case.h :].any()  # of the first group alone
    assert (rows & ~left).any() or case.G == 1
    x.close(total, want, rows & ~left)
    assert torch.equal(x.sums.sums[left].view(torch.int16), before[left].view(torch.int16))
    whole = x.tiles.rest.whole.tolist()
    added = whole[len(known) : 1 + whole[0]]
    assert whole[1 : len(known)] == known[1:] and len(added) == len(set(added))
    parts = left.view(x.tokens, case.G, case.h).all(-1).nonzero().tolist()
    per, undone = x.tiles.part, x.tiles.rest.undone.tolist()
    got = {(tile, g, part) for tile, of in enumerate(undone) for g, bits in enumerate(of)
           for part in range(x.queries // per) if bits > 0 and bits >> part & 1}  # fmt: skip
    assert got == {(token // x.queries, g, token % x.queries // per) for token, g in parts}
    eights = x.queries // 8
    assert set(added) == {(tile * eights + i) * case.G + g for tile, g, _ in got
                          for i in range(eights)}  # fmt: skip


@pytest.mark.parametrize("case", CASES[:1] + CASES[3:4], ids=str)
def test_every_column_has_a_scale(case, device, monkeypatch):
    monkeypatch.setattr(fwd_by_keys_sums, "SEARCHES", 2)  # several turns each
    monkeypatch.setattr(fwd_by_keys_sums, "SLICE", 16)

    def spread(v: Tensor) -> None:
        """Columns of sizes of their own, and in some a few outliers, which change nothing."""
        columns = v.view(-1, case.G * case.Dv)
        columns *= 2.0 ** (torch.arange(columns.shape[1], device=device) % 7 + 2).to(v.dtype)
        columns[7, 8], columns[8, 9] = 6e4, 2.0**-14
        columns[5, 3], columns[6, 4] = math.nan, -math.inf
        columns[:, 6] = 0.0

    x = Split(case, "ragged", device, monkeypatch, spread)
    scales = x.sums.scales
    memory = torch.empty_like(x.do)
    assert x.zeros(memory).sums.data_ptr() == memory.data_ptr()
    v = x.v.double().reshape(-1, case.G, case.Dv).cpu()
    scales = scales.double().cpu()
    some = v.isfinite() & (v != 0)
    exponents = torch.where(some, torch.frexp(v.nan_to_num(1, 1, 1))[1] - 1.0, 0.0)
    bits = math.ceil(math.log2(case.l_sel * case.n_sel)) + fwd_by_keys_sums.ABOVE
    mean = (exponents.sum(0) / some.sum(0).clamp(min=1)).floor()
    assert ((~some).all(0)).sum() == 1
    assert torch.equal(scales, 2.0 ** (14 - mean - 4 - bits))
    within = v.abs().nan_to_num(0, 0, 0) * scales * 2.0**bits < 2**15
    assert (~within).sum() <= 2  # the outlier above, if any


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[4]], ids=str)
def test_rows_far_below_others_are_left_to_the_other_kernel(case, apart, device, monkeypatch):
    """One sequence has values 2**22 times those of the others: what fp16 keeps of these is of no
    use. Without that nothing is left."""
    begin = sum(case.lengths[: case.lengths.index(max(case.lengths))]) if case.packed else 1
    end = begin + (max(case.lengths) if case.packed else 1)

    def spread(v: Tensor) -> None:
        v *= 2.0**-8
        v[begin:end] *= 2.0**22

    x = Split(case, "random", device, monkeypatch, spread if apart else None)
    rows = x.split_rows()
    out, lse, _ = x.begun().added().end()
    left, want = rows & lse.isnan(), x.want()[0]
    assert left.any() == apart
    kept, size = rows & ~left, want.abs().amax(-1)
    error = (out.double() - want).abs().amax(-1)
    assert (error < 2e-2 * size)[kept & (size > 0)].all()
