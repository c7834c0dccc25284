"""The decode-step kernels against fp64: static, ring and paged caches, several new tokens.

Everything that a step may not read is NaN in the caches. Sizes marked `big` run on a GPU only and
take the vectorised fp64 reference, the others the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from bench.parity import assert_parity
from nsa import launches, oracle, reference, select
from nsa.blocks import num_compressed
from nsa.kernels.decode import nsa_decode_triton, step, step_kernels
from nsa.kernels.decode.step import scan_splits
from nsa.tests import cases
from nsa.tests.cases import BF16, F16, F32, Shape, strided
from nsa.tests.helpers import generator, randn

pytestmark = pytest.mark.kernel
KERNELS = ["_decode_scan_kernel", "_decode_selected_kernel", "_decode_merge_kernel"]


@dataclass(frozen=True)
class Step(Shape):
    """Lengths of the sequences with their T new tokens, heads, NSA sizes, the caches' kind."""

    T: int = 1
    w: int = 20
    capacity: int = 100
    page: int = 0
    ring: bool = False
    cmp_paged: bool = False
    fp8: bool = False

    def __str__(self) -> str:
        kind = "paged" * bool(self.page) + "cmp" * self.cmp_paged + "ring" * self.ring or "static"
        kind += "-fp8" * self.fp8 + "-" + "x".join(map(str, self.lengths[:4]))
        return f"{kind}-T{self.T}-G{self.G}h{self.h}-D{self.D}v{self.Dv}-{self.dtype}"


PAPER = dict(cases.PAPER, capacity=4096)
WIDE = dict(h=16, dtype=BF16, n_sel=16, **cases.WIDE, **PAPER)
PAGED = dict(page=64, ring=True)
STEPS = [
    Step((45, 3), dtype=F32),
    Step((77, 9, 30), T=2, G=1, h=4, Dv=32),
    Step((77, 19), G=1, h=1, D=24, n_sel=4, page=16),
    Step((77, 19), T=3, G=1, n_sel=4, page=16, ring=True),
    Step((64, 63, 65, 1), G=1, ring=True),
    Step((3000, 17, 1025, 31, 32, 33), G=4, **WIDE),
    Step((2000, 700), T=4, page=64, **WIDE | dict(h=8, D=192)),
    Step((2000, 700, 64), T=2, h=4, D=64, Dv=64, n_sel=8, ring=True, **PAPER),
    Step((4096, 700), T=8, G=1, **WIDE),
    Step((3000,), G=4, ring=True, **WIDE),
    Step((9000, 2000), G=4, **PAGED, **WIDE | dict(capacity=10000)),
    Step((500, 700), T=2, **WIDE | dict(Dv=64, dtype=F16, capacity=1500)),
    Step((1,) * 17 + (4000,), G=2, **WIDE),
    Step((4096, 3, 700, 1025) * 16, G=4, **WIDE),
    Step((3000, 65) * 16, T=2, G=4, **PAGED, **WIDE | dict(dtype=F16)),
    Step((77, 19, 9), T=2, G=1, n_sel=4, page=16, cmp_paged=True),
    Step((96, 5), n_sel=4, page=8, cmp_paged=True, ring=True, dtype=F32, capacity=96),
    Step((3000, 65, 1088), T=2, G=4, page=64, cmp_paged=True, **WIDE),
    # e4m3 keys and values.
    Step((77, 9, 30), T=2, G=2, h=3, Dv=32, fp8=True),
    Step((77, 19), G=2, D=24, n_sel=4, page=16, ring=True, fp8=True),
    Step((96, 5), n_sel=4, page=8, cmp_paged=True, dtype=F32, capacity=96, fp8=True),
    Step((2000, 700), T=4, page=64, fp8=True, **WIDE | dict(h=8, D=192)),
    Step((3000, 17, 1025, 31), G=4, ring=True, fp8=True, **WIDE),
]


class Caches:
    """Caches of a step, NaN wherever a kernel has no business, and each sequence's own keys.

    Of an FP8 step cmp, sel and win are what the stored numbers stand for, in fp64.
    """

    ints = staticmethod(lambda x: x)  # how lengths and page numbers are given

    def __init__(self, step: Step, device: str, seed: int = 0) -> None:
        s, B, HQ = step, len(step.lengths), step.G * step.h
        self.step, self.device = step, device
        kw = dict(dtype=s.dtype, device=device)
        self.q = randn(B, s.T, HQ, s.D, seed=seed + 1, **kw)
        self.gates = randn(B, s.T, HQ, 3, seed=seed + 2, **kw).sigmoid()
        self.lens = torch.tensor(s.lengths, dtype=torch.int32, device=device)
        descales = (randn(B, s.G, seed=seed + i, device=device).abs() + 0.3 for i in (9, 10))
        self.descales = dict(zip(("k_descale", "v_descale"), descales, strict=True))
        self.cmp = self.filled(max(num_compressed(s.capacity, s.l, s.d), 1), seed + 3, True)
        self.sel = self.filled(s.capacity, seed + 5)
        self.win = self.filled(s.capacity, seed + 7)

    def filled(self, rows: int, seed: int, compressed: bool = False) -> tuple[Tensor, Tensor]:
        s, kw = self.step, dict(dtype=self.step.dtype, device=self.device)
        out = [randn(len(s.lengths), rows, s.G, D, seed=seed + i, **kw)
               for i, D in enumerate((s.D, s.Dv))]  # fmt: skip
        if s.fp8:
            out = [x.double() * self.descale(i) for i, x in enumerate(self.stored(out))]
        for b, n in enumerate(s.lengths):
            for x in out:
                x[b, num_compressed(n, s.l, s.d) if compressed else n :] = float("nan")
        return out[0], out[1]

    def descale(self, i: int) -> Tensor:
        return self.descales["kv"[i] + "_descale"].double()[:, None, :, None]

    def stored(self, pair: Sequence[Tensor]) -> list[Tensor]:
        """Keys and values [B, N, G, D] as e4m3."""
        return [(x.double() / self.descale(i)).to(torch.float8_e4m3fn) for i, x in enumerate(pair)]

    def run(
        self, softmax_scale: float | None = None, counters: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        s, table = self.step, None
        cmp, sel, win = map(self.stored if s.fp8 else list, (self.cmp, self.sel, self.win))
        if s.page:
            pages = len(s.lengths) * -(-s.capacity // s.page)
            order = torch.randperm(pages, generator=generator(3)).to(self.device)
            table = order.view(len(s.lengths), -1).to(torch.int32)
            sel = [self.paged(x, order, s.page) for x in sel]
            if not s.ring:
                win = [self.paged(x, order, s.page) for x in win]
            if s.cmp_paged:
                cmp = [self.paged(x, order, s.page // s.d, s.l // s.d - 1) for x in cmp]
        if s.ring:
            win = [self.ringed(x) for x in win]
        return nsa_decode_triton(
            self.q, *cmp, *sel, *win, self.gates, self.ints(self.lens), **s.whole,
            max_len=s.capacity, block_table=self.ints(table), window_ring=s.ring,
            return_indices=True, softmax_scale=softmax_scale, counters=counters,
            cmp_paged=s.cmp_paged, **(self.descales if s.fp8 else {}),
        )  # fmt: skip

    def launched(self, **how: Any) -> tuple[Tensor, Tensor, dict[str, int]]:
        """run(), and what it launched."""
        with launches.recording() as counts:
            return *self.run(**how), counts

    def counters(self) -> Tensor:
        s = self.step
        return torch.zeros(len(s.lengths), s.G, 32, dtype=torch.int32, device=self.device)

    def kernels(self, in_graph: bool = False) -> list[str]:
        """What a step with counters launches, outside graphs or in one."""
        s = self.step
        how = dict(s.whole, max_len=s.capacity, in_graph=in_graph, fp8=s.fp8)
        return list(step_kernels(self.q, s.G, s.Dv, **how))

    def paged(self, x: Tensor, order: Tensor, page: int, first: int = 0) -> Tensor:
        """Rows of x from row `first` on in pages of so many rows."""
        pages = len(order) // len(x)
        padded = x.new_full((x.shape[0], pages * page, *x.shape[2:]), float("nan"))
        padded[:, first : first + x.shape[1]] = x
        pool = torch.full_like(padded.view(-1, page, *x.shape[2:]), float("nan"))
        pool[order] = padded.view(-1, page, *x.shape[2:])
        return pool

    def ringed(self, x: Tensor) -> Tensor:
        s = self.step
        rows = s.w + s.T - 1
        ring = x.new_full((x.shape[0], rows, *x.shape[2:]), float("nan"))
        for b, n in enumerate(s.lengths):
            for token in range(max(0, n - rows), n):
                ring[b, token % rows] = x[b, token]
        return ring

    def expected(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """The step by plain attention, on the blocks that were chosen."""
        s, parts = self.step, []
        small = not s.big and dtype == torch.float64
        lib, where = (oracle, "cpu") if small else (reference, self.device)
        for b, n in enumerate(s.lengths):
            take = lambda x, b=b: x[b : b + 1].to(where, dtype)
            rows = lambda pair, m, take=take: [take(x)[:, :m] for x in pair]
            q, start = take(self.q), n - s.T
            k_v, how = rows(self.cmp, num_compressed(n, s.l, s.d)), dict(l=s.l, d=s.d)
            cmp, _ = lib.compressed_attention(q, *k_v, **how, q_start=start)
            blocks = indices[b : b + 1].to(where)
            if small:
                spans = oracle.blocks_to_ranges(blocks, s.l_sel, start)
            else:
                at = torch.arange(start, n, device=where)
                spans = select.clean_ranges(select.blocks_to_ranges(blocks, s.l_sel, at), n)
            sel = lib.selection_attention(q, *rows(self.sel, n), spans)
            win = lib.sliding_attention(q, *rows(self.win, n), window=s.w, q_start=start)
            g = take(self.gates)
            parts.append(g[..., :1] * cmp + g[..., 1:2] * sel + g[..., 2:] * win)
        return torch.cat(parts)

    def chosen(self) -> Tensor:
        """The blocks by the oracle in fp64, of big steps by the reference."""
        s = self.step
        choose, where = (select, self.device) if s.big else (oracle, "cpu")
        wide = lambda x, b, n=None: x[b : b + 1, :n].to(where).double()
        return torch.cat([
            choose.select_blocks(wide(self.q, b), wide(self.cmp[0], b, num_compressed(n, s.l, s.d)),
                                 **s.sizes, q_start=n - s.T)
            for b, n in enumerate(s.lengths)
        ])  # fmt: skip


@pytest.fixture(autouse=True)
def without_clusters(monkeypatch):
    """Those have test_decode_cluster.py."""
    monkeypatch.setenv("NSA_USE_CLUSTER", "0")


@pytest.fixture
def tune(monkeypatch):
    """Set constants of the step: plans made with others are forgotten, before and after."""

    def set_to(**constants):
        for name, value in constants.items():
            monkeypatch.setattr(step, name, value)
        step._plan.cache_clear()

    yield set_to
    step._plan.cache_clear()


CORE = (1, 3, 5, 6, 7, 9, 10)  # what every report runs


def assert_proven(case, caches, out, indices, counts, kernels):
    """The step is plain attention over the blocks that it chose, which are those of the oracle."""
    s = caches.step
    assert_parity(
        f"decode/{case}", "decode", out, caches.expected(indices, torch.float64),
        caches.expected(indices, s.dtype), path_requested="triton", path_taken="triton",
        launches=counts, expect_kernels=kernels, seed=0,
    )  # fmt: skip
    want = caches.chosen()
    got = indices.to(want.device)
    assert torch.equal((got < 0).sum(-1), (want < 0).sum(-1))
    wrong, total = int((got != want).any(-1).sum()), got[..., 0].numel()
    assert wrong <= 0.05 * total, f"{wrong} of {total} rows chose other blocks"


@pytest.mark.parametrize("step", [
    pytest.param(s, marks=[pytest.mark.core] * (i in CORE)) for i, s in enumerate(STEPS)
], ids=str)  # fmt: skip
@pytest.mark.parametrize("team", [False, True], ids=["launches", "team"])
def test_step(step, team, kernel_device, tune):
    if step.T > min(step.lengths):
        pytest.skip("a sequence is shorter than its new tokens")
    if kernel_device == "cpu" and step.big:
        pytest.skip("a GPU's size: the interpreter would take hours")
    caches, counters = Caches(step, kernel_device), None
    kernels = caches.kernels(in_graph=True)
    assert set(kernels) >= set(KERNELS[:2])
    if team:
        tune(LEAST_TEAM=2, **{"TEAM_PER_SM": 64} if kernel_device == "cpu" else {})
        counters = caches.counters()
        kernels = caches.kernels()
        if kernels != ["_decode_team_kernel"] or step.cmp_paged:
            pytest.skip("too large for one launch")
    out, indices, counts = caches.launched(counters=counters)
    assert set(counts) == set(kernels)
    if team:
        again, same = caches.run(counters=counters)  # which finds the counters' signs turned
        assert torch.equal(again, out) and torch.equal(same, indices)
        assert not (counters & 0x7FFFFFFF).any(), "programs were left waiting"
    assert_proven(step, caches, out, indices, counts, kernels)


# Candidates of several chunks or all blocks at once; the top by ranks or by search.
WAYS = [(16, 2**20), (16, 1), (2**20, 2**20), (2**20, 1)]


@pytest.fixture(params=WAYS, ids=str)
def way(request, tune):
    """Set a way to choose, once it is called."""
    blocks, ranks = request.param

    def choose():
        tune(SINGLE_BLOCKS=(blocks, blocks), CHUNK_BLOCKS=(blocks, blocks), RANKED=ranks)
        return blocks == 16

    return choose


def test_every_way_to_choose_is_the_same(way, kernel_device):
    caches = Caches(Step((330, 45), T=2, h=4, n_sel=4, capacity=340), kernel_device)
    out, indices = caches.run()
    by_chunks = way()
    again, same, counts = caches.launched()
    assert ("_decode_candidates_kernel" in counts) == by_chunks
    assert torch.equal(same, indices) and torch.equal(again, out)


@pytest.mark.parametrize("h, l_sel", [(3, 16), pytest.param(16, 32, marks=pytest.mark.core)])
def test_every_row_has_as_many_blocks_as_it_sees(h, l_sel, way, kernel_device):
    """Threads that sum the scores of heads differently by a bit would rank a block ahead of itself;
    on a GPU that took the last block from one row in fifty."""
    many, T = (1, 2) if kernel_device == "cpu" else (40, 4)
    step = Step((263, 45) * many, T=T, G=1, h=h, l_sel=l_sel, n_sel=6, capacity=300)
    caches = Caches(step, kernel_device)
    way()
    chosen = caches.run()[1].cpu()
    for n, of_sequence in zip(step.lengths, chosen, strict=True):
        for position, row in enumerate(of_sequence[:, 0].tolist(), n - T):
            sees = position // l_sel + 1
            live = row[: min(sees, step.n_sel)]
            assert live == sorted(set(live)) and 0 <= live[0] and live[-1] < sees
            assert row[len(live) :] == [-1] * (step.n_sel - len(live))


def test_ties_go_to_the_lower_block_and_a_key_of_two_counts_for_both(way, kernel_device):
    """64 keys are seen alike: no weight is rounded, so blocks whose keys lie in two tiles tie."""
    way()
    caches = Caches(Step((263,), n_sel=8, capacity=300), kernel_device)
    caches.q.zero_()
    assert caches.run()[1][0, 0].tolist() == [[0, 1, 2, 3, 4, 5, 15, 16]] * 2
    caches = Caches(Step((263,), n_sel=5, capacity=300), kernel_device)
    caches.q.fill_(1)
    caches.cmp[0][:, 15] = 3  # the last key of a tile: half of its tokens in block 3, half in 4
    assert caches.run()[1][0, 0].tolist() == [[0, 3, 4, 15, 16]] * 2


@pytest.mark.core
@pytest.mark.parametrize("step", [
    Step((577, 45, 1, 300), h=4, n_sel=4, capacity=600),
    Step((577, 45, 2, 300), T=2, h=3, Dv=32, n_sel=4, page=16, ring=True, capacity=600),
], ids=str)  # fmt: skip
def test_what_is_not_split_is_merged_at_once(step, kernel_device, tune):
    """In the launch of the selected blocks, as by a launch of its own."""
    caches = Caches(step, kernel_device)
    tune(SELECTED_SPLITS=2, SELECTED_PER_SM=64)
    want, blocks, counts = caches.launched()
    assert counts["_decode_merge_kernel"] == 1
    tune(SELECTED_SPLITS=1)
    got, same, counts = caches.launched()
    assert set(counts) == set(caches.kernels(in_graph=True)) == set(KERNELS[:2])
    assert torch.equal(same, blocks)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    tune(SELECTED_PER_SM=0)  # more programs than run at a time
    assert caches.launched()[2]["_decode_merge_kernel"] == 1


@pytest.mark.parametrize("most, width", [(32, 128), (16, 256)])
def test_many_wide_heads_leave_the_merge_a_launch_of_its_own(most, width, tune):
    tune(SELECTED_SPLITS=1, SELECTED_PER_SM=64)
    for heads in (most, most + 1):
        caches = Caches(Step((45, 3), h=heads, D=width, Dv=width), "cpu")
        assert ("_decode_merge_kernel" in caches.kernels(in_graph=True)) == (heads > most)


def test_a_team_chooses_and_merges_as_launches_do(kernel_device, tune):
    """With candidates of several chunks; a part of the team has nothing to scan."""
    caches = Caches(Step((577, 45), T=2, h=4, n_sel=4, capacity=600), kernel_device)
    tune(SINGLE_BLOCKS=(16, 16), CHUNK_BLOCKS=(16, 16), LEAST_TEAM=2, TEAM_PER_SM=64)
    out, indices = caches.run()
    again, same, counts = caches.launched(counters=caches.counters())
    assert [*counts] == caches.kernels() == ["_decode_team_kernel"]
    assert torch.equal(same, indices)
    torch.testing.assert_close(again, out, rtol=1e-3, atol=1e-3)


def test_where_no_team_fits_the_step_takes_several_launches(kernel_device, tune, monkeypatch):
    caches = Caches(Step((45,), G=1), kernel_device)
    want = caches.run()
    tune(LEAST_TEAM=2, TEAM_PER_SM=64)
    real, teams = step.launch_planned, mock.Mock()
    choose = lambda kernel, *args: (teams if "team" in kernel.__name__ else real)(kernel, *args)
    monkeypatch.setattr(step, "launch_planned", choose)
    monkeypatch.setattr(step, "_no_team", set())
    teams.side_effect = RuntimeError("Triton Error [CUDA]: an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal"):
        caches.run(counters=caches.counters())
    teams.side_effect = RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")
    for _ in range(2):
        got = caches.run(counters=caches.counters())
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert teams.call_count == 2  # a refusal is remembered
        assert caches.kernels() == KERNELS  # what a bench will look for


def test_the_first_step_of_a_team_compiles_what_a_graph_launches(cuda, tune, monkeypatch):
    tune(LEAST_TEAM=16)
    caches = Caches(Step((577,), h=4, capacity=600), "cuda")
    counters = caches.counters()
    out, _, counts = caches.launched(counters=counters)
    assert set(counts) == {"_decode_team_kernel"}
    plans, real = [], step._plan
    with mock.patch.object(step, "_plan", lambda *args: plans.append(real(*args)) or plans[-1]):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again, _, captured = caches.launched(counters=counters)
    assert set(captured) == set(KERNELS) == set(plans[0].kernels)
    (compiled,) = plans[0].compiled.values()
    assert len(compiled) == 3
    graph.replay()
    torch.testing.assert_close(again, out, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("n_tiles, tiles_win, room, splits", [
    (8, 8, 66, (8, 8)), (64, 8, 66, (32, 8)), (128, 8, 66, (64, 8)), (32, 8, 16, (11, 5)),
    (8, 8, 4, (2, 2)), (32, 4, 4, (3, 1)), (16, 4, 0, (1, 1)), (1, 1, 1000, (1, 1)),
    (10**6, 8, 66, (64, 8)), (1, 100, 66, (1, 8)),
])  # fmt: skip
def test_splits_are_as_many_as_run_at_a_time(n_tiles, tiles_win, room, splits, kernel_device):
    assert scan_splits(n_tiles, tiles_win, room) == splits


# A sequence with the paper's sizes on a GPU.
GIVEN = step.StepProblem(
    torch.device("cuda", 0), 1, 1, 64, 4, 128, 128, BF16, BF16, 32, 16, 64, 16, 1, 2, 512, 8192,
    ring=True,
)  # fmt: skip


def test_which_steps_are_one_launch(monkeypatch, kernel_device):
    monkeypatch.setattr(step, "sm_count", lambda device: 132)

    def team(arch=90, alone=True, branch=None, **changed):
        monkeypatch.setattr(step, "arch_of", lambda device: arch)
        return step._plan.__wrapped__(GIVEN._replace(**changed), branch, alone).team

    assert team() == 16 == team(batch=4)
    assert team(tokens=2) == 32
    for other in (
        dict(batch=5), dict(max_len=16385), dict(dtype=F32, gate_dtype=F32), dict(dim=256, dv=256),
        dict(arch=120), dict(alone=False), dict(branch="cmp"), dict(tokens=4),
    ):  # fmt: skip
        assert team(**other) == 0, other


def assert_nan_harms_no_other(caches):
    """A query of NaN keeps its forced blocks, and the other sequence its result."""
    out, indices = caches.run()
    caches.q[0] = float("nan")
    other, chosen = caches.run()
    assert torch.equal(chosen[1], indices[1]) and torch.equal(other[1], out[1])
    last = (caches.step.lengths[0] - 1) // caches.step.l_sel
    for found in chosen[0].flatten(0, -2).tolist():
        assert {0, last - 1, last} < set(found) <= set(range(last + 1))
        assert found == sorted(set(found))
    return other


@pytest.mark.parametrize("ranks", [128, 1])
def test_a_nan_query_keeps_its_forced_blocks_and_harms_no_other(ranks, kernel_device, tune):
    tune(RANKED=ranks)
    step = Step((577, 445), h=4, n_sel=4, capacity=600)
    assert_nan_harms_no_other(Caches(step, kernel_device))


def test_a_softmax_scale_of_zero_is_refused_and_a_small_one_taken_as_given(kernel_device):
    caches = Caches(Step((30,), G=1, h=1), kernel_device)
    with pytest.raises(ValueError, match="softmax_scale must be a finite number above 0, got 0.0"):
        caches.run(softmax_scale=0.0)
    out, indices = caches.run(softmax_scale=1e-30)
    caches.q.zero_()
    want, same = caches.run()
    assert torch.equal(indices, same) and torch.equal(out, want)


@pytest.mark.parametrize("team", [False, True])
def test_tensors_of_any_strides(team, kernel_device):
    """Small tensors may have any strides, and lengths any int dtype; a cache is not copied."""
    caches = Caches(Step((40, 30), n_sel=4, w=16, page=16, capacity=64), kernel_device)
    run = lambda: caches.run(counters=caches.counters() if team else None)[0]
    want = run()
    caches.q, caches.gates = strided(caches.q), strided(caches.gates)
    for caches.ints in (strided, torch.Tensor.long):
        assert torch.equal(run(), want)
    caches = Caches(Step((40, 30)), kernel_device)
    for name in ("cmp", "sel", "win"):
        k, v = getattr(caches, name)
        for kind, pair in (("k", (strided(k), v)), ("v", (k, strided(v)))):
            setattr(caches, name, pair)
            with pytest.raises(ValueError, match=f"{kind}_{name} must be contiguous, got strides"):
                run()
        setattr(caches, name, (k, v))


def test_more_rows_than_a_tile_holds_are_refused():
    with pytest.raises(NotImplementedError, match="<= 128, got 144"):
        Caches(Step((64,), T=9, G=1, h=16), "cpu").run()


@pytest.mark.parametrize("arch, dtype, D, rows, keys", [
    (90, BF16, 256, 128, 64), (120, BF16, 128, 128, 64), (120, BF16, 192, 128, 32),
    (121, BF16, 192, 128, 32), (103, BF16, 256, 128, 64),
    (89, BF16, 256, 64, 32), (86, BF16, 256, 16, 64), (86, BF16, 256, 128, None),
    (120, F32, 128, 128, None), (80, F32, 128, 128, 32),
])  # fmt: skip
def test_tiles_fit_beside_the_queries(arch, dtype, D, rows, keys, kernel_device, monkeypatch):
    """Where nothing fits, the route says so before a launch fails."""
    monkeypatch.setattr(step, "arch_of", lambda device: arch)
    monkeypatch.setattr(step, "sm_count", lambda device: 100)
    of = dict(tokens=rows // 16, hq=32, groups=2, dim=D, dv=D, dtype=dtype, gate_dtype=dtype)
    problem = GIVEN._replace(ring=False, **of)
    if keys is None:
        with pytest.raises(NotImplementedError, match=f"<= 64 .* on sm_{arch}, got {rows}"):
            step._plan.__wrapped__(problem, None)
    else:
        assert step._plan.__wrapped__(problem, None).scan["BLOCK_N"] == keys


def test_more_blocks_than_a_step_can_choose_from_are_refused(kernel_device):
    sizes = dict(hq=4, groups=1, dim=16, dv=16, dtype=F16, gate_dtype=F16, n_sel=64, window=64)
    problem = GIVEN._replace(device=torch.device("cpu"), ring=False, max_len=1 << 20, **sizes)
    assert step._plan(problem, None).selected["N"] == 1 << 13
    with pytest.raises(NotImplementedError, match="max_len=8388608 with n_sel=64"):
        step._plan(problem._replace(max_len=1 << 23), None)
