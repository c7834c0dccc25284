"""Union tiles: the lists against plain Python, and the kernels against those of single queries,
which test_prefill_kernels.py holds against the oracle (as it does the mixture of both)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nsa import launches
from nsa.kernels.prefill import block_attn_bwd, block_attn_fwd, union_attn, union_lists
from nsa.kernels.prefill.block_attn import sequence_begins
from nsa.kernels.prefill.block_attn_bwd import block_attention_bwd
from nsa.kernels.prefill.block_attn_fwd import block_attention_fwd
from nsa.kernels.prefill.selection import Selection
from nsa.kernels.prefill.union_lists import lists_for
from nsa.kernels.tiles import arch_of
from nsa.tests.helpers import deterministic, make_block_indices, randn

pytestmark = pytest.mark.kernel
F16, BF16 = torch.float16, torch.bfloat16
ALWAYS, NEVER = 1 << 20, -1


@dataclass(frozen=True)
class Case:
    """Sequences (several: packed), heads, sizes; queries stand at q_start and on."""

    lengths: tuple[int, ...]
    G: int = 2
    h: int = 2
    D: int = 16
    Dv: int = 16
    block: int = 16
    n: int = 3
    q_start: int = 0
    batch: int = 1
    dtype: torch.dtype = F16
    big: bool = False

    def __str__(self) -> str:
        size = "x".join(map(str, self.lengths)) + f"+{self.q_start}"
        return f"{self.batch}-{size}-G{self.G}h{self.h}-D{self.D}v{self.Dv}-b{self.block}n{self.n}"

    @property
    def packed(self) -> bool:
        return len(self.lengths) > 1

    def indices(self, kind: str, device: str) -> Tensor:
        parts = [
            make_block_indices(
                kind, self.batch, n, self.G, self.n, self.block, seed=i, q_start=self.q_start
            )
            for i, n in enumerate(self.lengths)
        ]
        x = torch.cat(parts, 1)
        return (x[0] if self.packed else x).to(device).contiguous()

    def begins(self, device: str) -> tuple[Tensor | None, Tensor | None]:
        """(cu_seqlens, first row of each token's sequence) of packed inputs."""
        if not self.packed:
            return None, None
        cu = torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32)
        return cu, sequence_begins(cu, sum(self.lengths))


PACKED = Case((5, 27, 1, 9))
CASES = [
    PACKED,
    Case((21,), h=3, D=24, q_start=29, batch=2, n=5),  # tiles over two own blocks and two entries
    Case((27,), G=1, h=1, Dv=32, block=32, q_start=70),
    Case((1000,), G=4, h=16, D=128, Dv=128, block=64, n=16, dtype=BF16, big=True),
    Case((1, 700, 63, 64, 65, 333), h=4, D=128, Dv=128, block=64, n=6, big=True),
    Case((500,), G=1, h=8, D=192, Dv=128, block=64, n=8, q_start=700, dtype=BF16, big=True),
    Case((300,), G=1, h=5, D=256, Dv=256, block=64, n=4, batch=2, dtype=BF16, big=True),
    Case((300,), G=1, h=1, D=64, Dv=64, block=128, n=4, q_start=512, big=True),
]

CHOICE = Case((96,), G=1, h=2, n=4, q_start=1600)
CHOICE_GPU = Case((2048,), G=2, h=16, D=128, Dv=128, block=64, n=16, q_start=6144, dtype=BF16,
                  big=True)  # fmt: skip


class Problem:
    """Tensors of a case; run() gives out, lse and the gradients with a limit on unions."""

    def __init__(self, case: Case, kind: str, device: str, monkeypatch) -> None:
        self.case, self.monkeypatch = case, monkeypatch
        lead = (sum(case.lengths),) if case.packed else (case.batch, sum(case.lengths))
        keys = lead if case.packed else (case.batch, case.q_start + sum(case.lengths))
        draw = lambda seed, *shape: randn(*shape, seed=seed, dtype=case.dtype, device=device)
        HQ = case.G * case.h
        self.q, self.do = draw(1, *lead, HQ, case.D), draw(2, *lead, HQ, case.Dv)
        self.k, self.v = draw(3, *keys, case.G, case.D), draw(4, *keys, case.G, case.Dv)
        self.blocks = case.indices(kind, device)
        self.cu, self.begin = case.begins(device)
        self.packed = dict(cu_seqlens=self.cu)
        self.how = dict(
            block_size=case.block, softmax_scale=1 / math.sqrt(case.D), seq_begin=self.begin,
            q_start=case.q_start,
        )  # fmt: skip

    @property
    def by(self) -> Selection:
        return Selection(self.blocks, **self.how)

    @contextlib.contextmanager
    def limit(self, share: int | None) -> Iterator[None]:
        """Few tiles are enough for unions, and the limit is `share` where it is given."""
        with self.monkeypatch.context() as patch:
            patch.setattr(union_lists, "MIN_TILES", 0)
            if share is not None:
                patch.setattr(union_lists, "SHARE", {})
                patch.setattr(union_lists, "OTHER_SHARE", share)
            yield

    def poison(self, key: int, last: int) -> Tensor:
        """Make a number of K infinite and one of V NaN, in a row and in the last-th query's own.
        Returns which rows of the output [1, S, HQ] see one."""
        case = self.case
        position = torch.arange(sum(case.lengths), device=self.q.device) + case.q_start
        seen = torch.zeros(len(position), case.G, dtype=torch.bool, device=self.q.device)
        for row in (key, int(position[last])):
            self.k[0, row, :, 0], self.v[0, row, :, 1] = math.inf, math.nan
            seen |= (self.blocks[0] == row // case.block).any(-1) & (row <= position)[:, None]
        assert seen.any() and not seen.all()
        return seen.repeat_interleave(case.h, 1)[None]

    def lists(self, share: int | None):
        with self.limit(share):
            return lists_for("fwd", self.q, self.by)

    def run(self, share: int | None, *, unions: bool = True) -> dict[str, Tensor]:
        """Where torch asks for deterministic algorithms, which is where dQ goes by unions."""
        with self.limit(share), deterministic(), self.monkeypatch.context() as patch:
            if not unions:
                for module in (block_attn_fwd, block_attn_bwd):
                    patch.setattr(module, "lists_for", lambda *a, **k: None)
            how = {**self.how, **self.packed, "use_gluon": False}
            out, lse = block_attention_fwd(self.q, self.k, self.v, self.blocks, **how)
            dq, dk, dv = block_attention_bwd(
                self.do, self.q, self.k, self.v, out, lse, self.blocks, **how
            )
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def leave_out(lists, mine: Tensor) -> None:
    """Keep the unions of `mine` [tiles, G] and leave the other tiles to the single queries."""
    lists.state[..., 0].masked_fill_(~mine, -1)
    tiles = torch.arange(mine.numel(), dtype=torch.int32, device=mine.device)[mine.flatten()]
    lists.work[: len(tiles)] = tiles
    lists.counts[0] = len(tiles)


def members(mask: int) -> set[int]:
    return {i for i in range(32) if mask >> i & 1}


def rows_of(x: Tensor, case: Case, queries: int) -> Tensor:
    """[tiles, G, rows of the tile] of a tensor [.., HQ, D]: True where nothing is NaN."""
    known = (~x.isnan()).all(-1).reshape(-1, case.G, case.h)
    known = torch.cat([known, known[-1:].expand(-len(known) % queries, -1, -1)])
    return known.view(-1, queries, case.G, case.h).permute(0, 2, 1, 3).flatten(2)


@pytest.mark.parametrize(
    "case, kind",
    [
        pytest.param(c, kind, marks=[pytest.mark.core] if i == 3 else [])
        for i, c in enumerate(CASES)
        for kind in ("random", "clustered", "ragged")
        if kind == "ragged" or i == 3
    ],
    ids=str,
)
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
    arch = arch_of(x.q.device)
    union_attn.union_attention_fwd(
        x.q, x.k, x.v, x.by, lists, out, lse, union_attn.fwd_tiles(arch, case.D, case.Dv)
    )
    delta = (want["out"].float() * x.do.float()).sum(-1)
    union_attn.union_attention_dq(
        x.do, x.q, x.k, x.v, x.by, lists, want["lse"], delta, dq, accumulate=False,
        tiles=union_attn.dq_tiles(arch, case.D, case.Dv), dq_scale=x.how["softmax_scale"],
    )  # fmt: skip
    tol = 4e-3 if case.dtype == F16 else 3e-2
    for got, full in ((out, want["out"]), (dq, want["dq"]), (lse[..., None], want["lse"])):
        written = rows_of(got, case, lists.queries)
        assert torch.equal(written.all(-1), mine) and torch.equal(written.any(-1), mine)
        full = full.view_as(got)
        rows = ~got.isnan()
        scale = max(1.0, full[rows].nan_to_num(neginf=0.0).abs().max().item())
        torch.testing.assert_close(
            got[rows].float(), full[rows].float(), rtol=tol, atol=tol * scale
        )


@pytest.mark.parametrize(
    "case, kind, share",
    [
        (PACKED, "ragged", None),  # tiles over a border are singles
        (CASES[3], "ragged", None),
        (CASES[3], "clustered", ALWAYS),
        (CASES[3], "random", NEVER),
    ],
    ids=str,
)
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
    tol = dict(rtol=4e-3, atol=1e-2) if case.dtype == F16 else dict(rtol=3e-2, atol=6e-2)
    for name, want in single.items():
        torch.testing.assert_close(union[name], want, **tol)
    if share is None:
        again = x.run(share)
        for name, want in union.items():
            assert torch.equal(again[name], want), name


@pytest.mark.parametrize("case", [Case((26,), G=1, h=4, n=5, q_start=104), CHOICE_GPU], ids=str)
def test_keys_that_a_query_did_not_choose_stay_out(case, device, monkeypatch):
    """0 * NaN: tiles over such keys go again, one by one."""
    x = Problem(case, "random", device, monkeypatch)
    clean = x.run(ALWAYS)
    rows = x.poison(3 * case.block + 1, -1)
    with launches.recording() as counts:
        got = x.run(ALWAYS)
    assert "_union_attn_bwd_dq_kernel" in counts
    tol = dict(rtol=4e-3, atol=1e-2) if case.dtype == F16 else dict(rtol=3e-2, atol=6e-2)
    for name in ("out", "lse", "dq"):
        torch.testing.assert_close(got[name][~rows], clean[name][~rows], **tol)
    assert got["out"][rows].isnan().any(-1).all()


@pytest.mark.parametrize("case", [CHOICE, CHOICE_GPU], ids=str)
def test_each_tile_takes_the_path_that_pays(case, device, monkeypatch):
    """Choices that agree go as unions; choices that differ in every query do not."""
    share = lambda kind: (
        (Problem(case, kind, device, monkeypatch).lists(None).state[..., 0] >= 0).float().mean()
    )
    assert share("clustered") == 1
    assert share("random") < 0.2


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
