"""Do the profiles' benches cover what they claim, with evidence enough for a threshold, in time?"""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from bench import bench_fa2, bench_prefill, bench_sel_triton, main, timing
from bench.device import Ceilings
from bench.provenance import provenance
from bench.records import BenchRow, read_csv
from bench.threshold_optimizer import MIN_LENGTHS, fa2_cells, missing_evidence
from scripts.oneshot.run.stages import plan

MINUTES = {"quick": 2, "standard": 5, "full": 60}
WIDTHS = set(itertools.product((64, 128), (64, 128)))


def stages(profile):
    return {stage.id: stage for stage in plan(profile)}


def cells(*stages):
    parsed = [bench_sel_triton.parse(list(stage.argv[2:])) for stage in stages]
    return [cell for args in parsed for cell in bench_sel_triton.cells(args)]


@pytest.mark.parametrize("profile", MINUTES)
def test_estimates_fit_the_profile_and_limits_leave_room(profile):
    planned = stages(profile).values()
    assert sum(s.estimate_s for s in planned) <= MINUTES[profile] * 60
    assert all(s.timeout_s >= 2 * s.estimate_s for s in planned)


@pytest.mark.parametrize("profile", ["standard", "full"])
def test_the_threshold_gets_enough_lengths_of_every_distribution(profile):
    planned = stages(profile)
    assert planned["threshold"].needs == planned["sel_route"].outputs == ("sel_route.csv",)
    order = list(planned)
    assert order.index("sel_route") < order.index("threshold")
    found = cells(planned["sel_route"])
    assert {c.mode for c in found} == {"route"}
    lengths = {dist: {c.L for c in found if c.dist == dist} for dist in ("few", "many", "mixed")}
    assert all(len(x) >= MIN_LENGTHS for x in lengths.values())
    assert len(set(map(frozenset, lengths.values()))) == 1
    settings = {L: {c._replace(L=0) for c in found if c.L == L} for L in lengths["few"]}
    assert len(set(map(frozenset, settings.values()))) == 1  # else the threshold finds gaps


def test_full_is_the_whole_matrix():
    planned = stages("full")
    L = [16 * 2**i for i in range(7)]
    want = set(itertools.product(L, (64, 256, 1024), (2, 4, 8), WIDTHS, (1, 2)))
    for id, dist in (("sel_dense", "few"), ("sel_varlen", "many"), ("sel_mixed", "mixed")):
        found = cells(planned[id])
        for mode in ("dense" if dist == "few" else "varlen", "ranges"):
            got = {(c.L, c.N, c.H, (c.D, c.Dv), c.streams) for c in found if c.mode == mode}
            assert got == want
        assert len(found) == 2 * len(want) and {c.dist for c in found} == {dist}
    decode = {(c.H, c.n_sel, c.L, (c.D, c.Dv)) for c in cells(planned["sel_decode"])}
    assert decode == set(itertools.product((2, 4), (8, 16), (128, 256, 512), WIDTHS))
    names = [c.name for c in cells(*(s for s in planned.values() if s.id.startswith("sel_")
                                     and "bench/bench_sel_triton.py" in s.argv))]  # fmt: skip
    assert len(set(names)) == len(names) > 3000  # `compare` finds a case by its name
    prefill = bench_prefill.parse(list(planned["prefill_bench"].argv[2:]))
    assert 65536 in prefill.S_list


@pytest.mark.parametrize("profile", MINUTES)
def test_a_report_times_prefill_at_both_ends_of_what_neighbours_share(profile):
    """A stage with fewer rows than its bench has cells is not whole. `quick` has no time for it."""
    planned = [s for s in stages(profile).values() if "bench/bench_prefill.py" in s.argv]
    every = []
    for stage in planned:
        found = list(bench_prefill.cells(bench_prefill.parse(list(stage.argv[2:]))))
        assert stage.least == len(found)
        every += [(stage.id, *cell) for cell in found]
    names = {bench_prefill.case_name(op, way, s, sharing) for _, s, op, way, sharing in every}
    assert len(names) == len(every)  # `compare` finds a case by its name
    shared = [cell for cell in every if cell[4] == "shared"]
    ends = {(op, way) for id, _, op, way, _ in shared if id == "prefill_bench"}
    both = set(itertools.product(("full", "sel"), ("fwd", "bwd")))
    assert ends == (set() if profile == "quick" else both)
    if profile == "full":
        sizes = {(s.D, s.Dv, s.l_sel, op, sharing) for _, s, op, _, sharing in every}
        for sharing in ("random", "shared"):
            assert {(128, 128, 128, "sel", sharing), (192, 128, 64, "full", sharing)} <= sizes
        assert (128, 128, 64, "pack", "random") in sizes


@pytest.mark.parametrize("argv, want", [
    ("--S_list 64,128 --ops full", ["64 random", "128 random", "128 shared"]),
    ("--S_list 64,128 --ops sel --sharing documents,random",
     ["64 documents", "64 random", "128 documents", "128 random"]),
    ("--S_list 64 --ops win,select,turn,pack --sharing shared", ["64 random"] * 4),
])  # fmt: skip
def test_sharing_matters_to_what_reads_blocks(argv, want):
    args = bench_prefill.parse([*argv.split(), "--directions", "fwd"])
    assert [f"{shape.S} {sharing}" for shape, *_, sharing in bench_prefill.cells(args)] == want


@pytest.mark.parametrize("profile", MINUTES)
def test_what_a_reader_decides_by_comes_first(profile):
    """And the decode bench runs its kernels on SM 8.9 too."""
    order = "env routing sanity health prefill_parity prefill_bench decode_parity".split()
    order += ["decode_serving"] * (profile != "quick")
    planned = stages(profile)
    assert list(planned)[: len(order)] == order
    for name in {"decode_bench", "decode_serving"} & set(planned):
        env = planned[name].env
        assert env["NSA_TRITON_SEL_FORCE"] == "1" and env["NSA_USE_TRITON_SEL"] == "1"


def test_single_values_and_the_default_still_work():
    parsed = lambda text: list(bench_sel_triton.cells(bench_sel_triton.parse(text.split())))
    one = "--N 1024 --H 8 --D 128 --Dv 128 --L_list 64,256 --dist mixed --streams 2"
    both = list(itertools.product((64, 256), ("varlen", "ranges")))
    assert [(c.L, c.mode) for c in parsed(one)] == both
    assert {(*c[1:6], c.streams) for c in parsed(one)} == {("mixed", 1024, 8, 128, 128, 2)}
    assert {(c.D, c.Dv) for c in parsed("--D 64,128")} == {(64, 64), (128, 128)}
    assert parsed("")[0].name == "sel/dense/few/N=256/H=8/D=64/Dv=64/L=64/streams=1"


def test_fa2_default_lengths_can_carry_a_minimum_in_both_branches():
    args = bench_fa2.parse([])
    row = dict(status="VALID", device="x", speedup="1.3", ci_low="1.3", ci_high="1.4")
    row |= dict(parity="PASS", path="fa2_torch", w=str(args.w), l=str(args.l), d=str(args.d))
    for branch in ("win", "cmp"):
        assert branch in args.branches
        rows = [(f"f:{S}", {**row, "branch": branch, "S": str(S)}) for S in args.S_list]
        found = fa2_cells(rows, branch)
        assert missing_evidence(found, ()) == []
        assert min(c.length for c in found) <= 64 and max(c.length for c in found) >= 255


def test_samples_of_a_long_series_are_thinned(tmp_path, monkeypatch):
    monkeypatch.setenv("NSA_OUT_DIR", str(tmp_path))
    row = BenchRow("sel", "c", "SKIPPED", why=("x",))
    timing.save_samples(row, timing.Samples(ours=[i + 1 / 3 for i in range(1000)], base=[1.0]))
    saved = json.loads((tmp_path / "bench" / "samples.jsonl").read_text())
    assert saved["n"] == 1000 and saved["us_every"] == 5 and saved["base_us"] == [1.0]
    assert len(saved["us"]) == 200 and saved["us"][1] == 5.333


@pytest.mark.parametrize("bench, owner, name, argv, cells", [
    (bench_sel_triton, bench_sel_triton.Cell, "rows", "--L_list 64,128 --dist few", 4),
    (bench_prefill, bench_prefill, "case_of", "--S_list 64 --ops cmp,win --directions fwd", 2),
    (bench_fa2, bench_fa2, "Branch", "--S_list 64,128 --branches win --dtype bf16", 2),
], ids=["sel", "prefill", "fa2"])  # fmt: skip
def test_a_bench_goes_on_where_a_case_does_not_fit(
    bench, owner, name, argv, cells, tmp_path, monkeypatch
):
    """Out of memory while a case is built: a row, on disk before the next begins."""
    path, seen = tmp_path / "rows.csv", []

    def fails(*args, **kwargs):
        if seen:
            assert [r["status"] for r in read_csv(path)] == ["SKIPPED"] * len(seen)
        seen.append(args)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for call in ("reset_peak_memory_stats", "max_memory_allocated", "empty_cache"):
        monkeypatch.setattr(torch.cuda, call, lambda: 0)
    card = SimpleNamespace(name="a card", nominal=lambda: None)
    for where, what, result in (
        (main, "Gpu", card), (main, "CudaClock", SimpleNamespace(timer="none")),
        (main, "provenance", provenance(None)), (main, "ceilings", Ceilings(None, None, "unknown")),
        (bench_fa2.fa2, "probe", SimpleNamespace(why_not=None, source="x")),
    ):  # fmt: skip
        monkeypatch.setattr(where, what, lambda *_, result=result: result)
    monkeypatch.setattr(owner, name, fails)
    assert bench.main([*argv.split(), "--csv", str(path)]) == 3
    rows = read_csv(path)
    assert len(seen) == len(rows) == cells
    assert all(r["status"] == "SKIPPED" and "out of memory" in r["why"] for r in rows)
    assert len({tuple(r.items()) for r in rows}) == cells  # each says which it is


@pytest.mark.parametrize("lines, code", [
    ([("VALID", {}), ("FAILED", {})], 1),
    ([("VALID", {"more_status": "graph=FAILED module=VALID"})], 1),
    ([("VALID", {"branch_status": "cmp=VALID win=FAILED"})], 1),
    ([("VALID", {}), ("INVALID", {}), ("SKIPPED", {})], 0),  # the report judges its rows
    ([("SKIPPED", {}), ("SKIPPED", {})], 3),
])  # fmt: skip
def test_the_exit_code_tells_what_became_of_the_rows(lines, code, tmp_path):
    """With every row in the CSV, whatever became of it."""
    proof = {"VALID": dict(parity={"status": "PASS"}, path_taken="triton", median_us=2.0)}
    row = lambda i, status: BenchRow("b", str(i), status, why=("x",), **proof.get(status, {}))
    rows = [row(i, status) for i, (status, _) in enumerate(lines)]
    args = SimpleNamespace(csv=str(tmp_path / "rows.csv"))
    told = [(row, {**row.csv(), **more}, "") for row, (_, more) in zip(rows, lines, strict=True)]
    assert main.write_rows(args, ("case", "status"), told) == code
    assert [r["status"] for r in read_csv(args.csv)] == [status for status, _ in lines]
    assert main.write_rows(args, (), told, quiet=True) == code  # the same on every rank
    assert len(read_csv(args.csv)) == len(lines)
