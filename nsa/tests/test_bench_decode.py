"""Does the decode bench time what it says, prove it, count true reads, and refuse what is wrong?"""

import csv
import itertools
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from bench import bench_decode, summarize_decode_csv
from bench.bench_decode import branch_case, total_case
from bench.decode_step import BRANCHES, Step
from bench.records import csv_text, read_csv
from bench.timing import Budget, Contender, NotRight, measure, prove
from nsa import attention, blocks, dispatch
from nsa.config import NSAConfig
from nsa.flags import Flags
from nsa.module import NSAAttention
from nsa.tests import helpers
from nsa.tests.helpers import SteadyClock

SIZES = dict(l=8, d=4, l_sel=8, n_sel=4, w=12)
SMALL = (
    "--dim 32 --heads 4 --groups 2 --dk 16 --dv 8 --l 8 --d 4 --l_sel 8 --n_sel 4 --w 12 "
    "--iters 6 --warmup 1 --device cpu"
).split()
NONE = "--branch_force_mode", "none"
PARTS = "/cmp", "/sel", "/win"
QUICK = dict(device_s=0.02, wall_s=0.2, warm_s=0.0, warm_cap_s=0.05)
BUDGET = Budget(min_n=6, **QUICK)


def make(S=41, batch=1, dtype=torch.float32, dv=8, device="cpu", **kw):
    torch.manual_seed(0)
    layer = NSAAttention(NSAConfig(32, 4, 2, 16, dv, **SIZES)).to(device, dtype)
    return Step(layer, batch, S, **kw)


@pytest.fixture(scope="module")
def step():
    return make(batch=2)


@pytest.fixture(autouse=True)
def one_thread():
    """The command takes one thread on a CPU; other tests keep what they had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def sent(monkeypatch, *arguments, replaced=()):
    """(exit code, rows sent) of the command, which takes few samples; replaced: (owner, name,
    value) while it runs."""
    with monkeypatch.context() as patch:
        patch.setattr(bench_decode, "Budget", partial(Budget, min_n=6, **QUICK))
        for one in replaced:
            patch.setattr(*one)
        return helpers.sent(patch, bench_decode.main, [*SMALL, *arguments])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command; (exit code, rows sent, the CSV's rows)."""

    def call(*arguments):
        path = tmp_path / "decode.csv"
        return *sent(monkeypatch, *arguments, "--csv", str(path)), read_csv(path)

    return call


# ---- the command ---------------------------------------------------------------------------------


def test_fp8_is_proven_against_what_its_numbers_stand_for(run):
    like = ("--S_list", "57", "--dtype", "fp32", *NONE)
    code, sent, (row,) = run(*like, "--kv-cache-dtype", "fp8_e4m3")
    assert [r["case"] for r in sent] == ["decode/S=57", "decode/S=57/module"]
    assert not any(row[f"ms_{branch}"] for branch in BRANCHES)
    assert code == 0 and row["parity"] == "PASS" and row["kv_cache_dtype"] == "fp8_e4m3"
    assert 0.02 < float(row["kv_error"]) < 0.08 and "module=" in row["more_status"]
    _, _, (plain,) = run(*like, "--more", "0")
    assert plain["kv_error"] in (None, "") and 3 * float(row["bytes"]) < float(plain["bytes"])


def proven(row):
    """Is its time proven? If not, the clock alone is to blame: other work on this machine."""
    if row["status"] in ("VALID", "UNSTABLE"):
        assert row["parity"]["status"] == "PASS"
        return True
    assert row["status"] == "INVALID" and row["why"], row
    assert all("the clock" in why for why in row["why"]), row["why"]
    return False


def test_a_run_gives_proven_rows_and_a_table(run, tmp_path, capsys):
    code, sent, rows = run("--S_list", "20,41")
    assert code == 0
    cases = [r["case"] for r in sent]
    assert cases == [f"decode/S={S}{b}" for S in (20, 41) for b in ("", *PARTS, "/module")]
    timed = {row["case"] for row in sent if proven(row)}
    for row in sent:
        assert row["kind"] == "bench" and row["cache"] == "warm"
        if row["case"] not in timed:
            continue
        assert row["path_requested"] == row["path_taken"]
        assert row["reads_actual"] == row["reads_expected"]
        assert (row["speedup"] is not None) == (row["bench"] == "decode")
    for row, S in zip(rows, (20, 41), strict=True):
        assert int(row["S"]) == S and row["parity"] == "PASS" and row["device"] == "cpu"
        for part in PARTS:
            name, known = f"ms_{part[1:]}", f"decode/S={S}{part}" in timed
            assert float(row[name]) > 0 if known else not row[name]
        if f"decode/S={S}" in timed:
            total, low, high = (float(row[n]) for n in ("ms_total", "ci_low", "ci_high"))
            assert 0 < low <= total <= high
            assert float(row["speedup_low"]) <= float(row["speedup_high"])
        assert row["baseline"].startswith("dense sdpa") and row["path"] == "composed"
        assert int(row["reads_actual_decode"]) == blocks.reads(S, **SIZES)
        assert int(row["reads_actual"]) == sum(blocks.reads(s, **SIZES) for s in range(1, S + 1))
    assert {row["fallback"] for row in rows} == {"no_cuda"}
    capsys.readouterr()
    assert summarize_decode_csv.main([str(tmp_path / "decode.csv")]) == 0
    out = capsys.readouterr().out
    assert "| 41 |" in out and f"{blocks.reads(41, **SIZES)} = expected" in out
    assert "Decode step on cpu, warm cache" in out
    assert "x [" in out or "decode/S=41" not in timed


def test_several_new_tokens_are_judged_each_by_its_context(run, tmp_path):
    code, sent, rows = run("--S_list", "41,4", "--T", "4")
    assert code == 0
    names = [f"decode/S={S}/T=4{b}" for S in (41, 4) for b in ("", *PARTS)]
    assert [r["case"] for r in sent] == names
    assert all(r["speedup"] is None for r in sent if proven(r))
    for row in rows:
        S, T = int(row["S"]), int(row["T"])
        want = sum(blocks.reads(s, **SIZES) for s in range(S - T + 1, S + 1))
        assert row["reads_actual_decode"] == row["reads_expected_decode"] == str(want)
        assert not row["baseline"] and float(row["blocks_together"]) >= 1
    assert "| 41 T=4 |" in summarize_decode_csv.summarize(tmp_path / "decode.csv")


def test_queries_that_are_alike_choose_alike():
    steps = [make(S=200, T=4, alike=alike) for alike in (0.0, 0.99, 1.0)]
    together = [step.keys_once()[1] for step in steps]
    assert together[0] > together[1] >= together[2] == SIZES["n_sel"]
    c, chosen = steps[2].config, steps[2].blocks.clone()
    once = blocks.num_compressed(200, c.l, c.d) + 4 * c.l_sel + c.w + 3
    assert steps[2].keys_once()[0] == c.groups * once
    chosen[0, 2, 1] = torch.tensor([0, 4, 3, 24], dtype=torch.int32)
    with pytest.raises(ValueError, match="sequence 0, group 1, token 198 chose blocks"):
        steps[2].check_choice(chosen)


def test_bare_csv_goes_to_stdout_alone(capsys, monkeypatch):
    """Only the branch asked for is timed."""
    like = ("--S_list", "9", "--branch_force_mode", "sel", "--more", "0")
    code, rows = sent(monkeypatch, *like, "--csv")
    assert code == 0 and [r["case"] for r in rows] == ["decode/S=9", "decode/S=9/sel"]
    out, err = capsys.readouterr()
    assert out.startswith("S,ms_total,ms_cmp,ms_sel,ms_win,reads_actual,reads_expected,")
    (row,) = csv.DictReader(out.splitlines())
    assert {b for b in BRANCHES if row[f"ms_{b}"]} == {"sel"} and err.startswith("decode/S=9 ")


@pytest.mark.parametrize("computes", [
    lambda n: n % 2, lambda n: n % 2 == 0, lambda n: n % 7, lambda n: False,
], ids=["odd calls", "even calls", "not every seventh", "never again"])  # fmt: skip
def test_a_step_that_remembers_is_told(computes, monkeypatch):
    """From its ninth call on, where it should compute."""
    real, calls, kept = attention.nsa_decode, itertools.count(1), []

    def remembers(*args, **how):
        n = next(calls)
        if n <= 8 or computes(n):
            kept[:] = [real(*args, **how)]
        return kept[0]

    replaced = [(attention, "nsa_decode", remembers)]
    _, rows = sent(monkeypatch, "--S_list", "41", *NONE, replaced=replaced)
    rows = {row["bench"]: row for row in rows if "case" in row}
    assert {"decode", "decode_module"} <= set(rows)
    for row in rows.values():
        assert row["status"] in ("INVALID", "FAILED") and row["median_us"] is None, row


# ---- what is timed -------------------------------------------------------------------------------


def measured(case, clock=None):
    return measure(case, clock or SteadyClock(), cold=False, budget=BUDGET, save=lambda *_: None)


def test_every_sample_sees_the_same_context(step):
    lengths = []

    class Spy(SteadyClock):
        def run(self, calls, *, cold):
            lengths.append((step.cache.length, step.cache.emitted, step.cache.lens.tolist()))
            return super().run(calls, cold=cold)

    row = measured(total_case(step, {}), Spy())
    assert row.median_us and len(lengths) > 2
    assert set(map(str, lengths)) == {str((41, blocks.num_compressed(41, 8, 4), [41, 41]))}


FUNCTIONS = dict(cmp="compressed_attention", sel="_selected", win="sliding_attention")


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_alone_does_no_other_branchs_work(step, branch, monkeypatch):
    """The other branches' functions are never called; who runs the whole step gets no number,
    since its result is right and its time is the step's."""
    case = branch_case(step, branch, {})
    with dispatch.trace() as taken, monkeypatch.context() as patch:
        for other in {*FUNCTIONS} - {branch}:
            patch.setattr(attention, FUNCTIONS[other], lambda *_, **__: pytest.fail("another"))
        prove(case, case.candidate, 3, "check")
    # refill chooses the blocks, by the reference; nothing else runs beside the branch itself.
    (ran,) = [t.branch.value for t in taken if t.branch is not dispatch.Branch.BLOCKS]
    assert ran == dict(cmp="compressed", sel="selected", win="sliding")[branch]
    alone, whole = step.alone(branch), step.total()
    monkeypatch.setattr(step, "alone", lambda _: lambda: whole() and alone())
    row = measured(branch_case(step, branch, {}))
    assert row.status == "INVALID" and "launched what is no part of it: sdpa_" in "".join(row.why)
    assert row.median_us is None


def test_a_wrong_branch_or_choice_gets_no_number(step, monkeypatch):
    """Right attention over the wrong blocks: the output alone would agree with itself."""
    window, decode = attention.sliding_attention, attention.nsa_decode
    with monkeypatch.context() as patch:
        narrow = lambda *a, **kw: window(*a, **{**kw, "window": 11})
        patch.setattr(attention, "sliding_attention", narrow)
        row = measured(branch_case(step, "win", {}))
    assert row.status == "FAILED" and row.median_us is None

    def stuck(q, cache, *args, **kw):
        out, chosen = decode(q, cache, *args, **kw)
        return out, torch.tensor([0, 1, 2, 5], dtype=torch.int32).expand_as(chosen)

    monkeypatch.setattr(attention, "nsa_decode", stuck)
    row = measured(total_case(step, {}))
    assert row.status == "FAILED" and "chose blocks [0, 1, 2, 5]" in "; ".join(row.why)


def test_choices_against_the_rules_or_by_other_scores_are_seen(step):
    """One of the blocks 1, 2 and 3 is free to choose: only the best of them will do."""
    step.check_choice(step.blocks)
    (best,) = {1, 2, 3} & set(step.blocks[0, 0, 0].tolist())
    rows = [[0, 4, 5, -1], [0, 4, 3, 5], [0, 4, 5, 6], [1, 2, 4, 5], [0, 4, 5, 5], [-1, 0, 4, 5]]
    rules = [(1, 1, row, "chose blocks") for row in rows]
    worse = [(0, 0, [0, x, 4, 5], rf".*not \[0, {best}, 4, 5\]") for x in {1, 2, 3} - {best}]
    for b, g, row, words in rules + worse:
        chosen = step.blocks.clone()
        chosen[b, 0, g] = torch.tensor(row, dtype=torch.int32)
        with pytest.raises(ValueError, match=f"sequence {b}, group {g} {words}"):
            step.check_choice(chosen)


def test_baselines_are_dense_and_right(step):
    case = total_case(step, {})
    names = {c.name for c in case.baselines}
    flash = {"dense sdpa flash rows padded", "dense sdpa flash gqa padded"}
    assert flash | {"dense sdpa math rows", "dense sdpa math gqa expanded"} <= names
    assert "dense sdpa flash rows" not in names  # it needs Dk = Dv
    for contender in case.baselines:
        prove(case, contender, 1, "baseline")
    bad = Contender("dense", lambda: step.total()()[0], "sdpa", oracle=step.dense_truth)
    with pytest.raises(NotRight):
        prove(case, bad, 1, "the sparse output is not the dense one")


def test_a_kernel_that_fell_back_is_invalid(monkeypatch):
    """Policy wants the Triton step, its launch fails: the composed step ran, and is not it."""
    broken = mock.Mock(side_effect=RuntimeError("no such PTX version"))
    monkeypatch.setitem(attention.STEP, dispatch.Route.TRITON, broken)
    plain = dispatch.make_request

    def on_a_gpu(branch, *args, **kw):
        request = plain(branch, *args, **kw)
        return replace(request, device="cuda") if branch is dispatch.Branch.STEP else request

    monkeypatch.setattr(dispatch, "make_request", on_a_gpu)
    step = make(dtype=torch.float16, flags=Flags(use_triton_sel=True, sel_triton_min_L=1))
    assert (step.requested, step.path, step.fallback) == ("triton", "composed", "launch_error")
    row = measured(total_case(step, {}))
    assert row.status == "INVALID" and "asked for triton" in "; ".join(row.why)


# ---- the Triton step -----------------------------------------------------------------------------


@pytest.mark.kernel
def test_the_triton_step_and_its_branches_are_proven_by_their_launches(kernel_device):
    """And a branch never reads the others' keys."""
    how = dict(flags=helpers.TRITON, backend="triton")
    step = make(dtype=torch.float16, dv=16, device=kernel_device, **how)
    assert (step.path, step.requested) == ("triton", "triton")
    case = total_case(step, {})
    parity, _ = prove(case, case.candidate, 1, "step")
    assert set(parity.launches) == set(step.kernels()) and parity.path_taken == "triton"
    assert step.kernels(branch="cmp") == step.kernels(branch="win")
    assert step.kernels(branch="sel")[0] == "_decode_selected_kernel"
    names = {f"_decode_{name}_kernel" for name in ("scan", "selected", "merge")}
    assert {*step.kernels(branch="cmp"), *step.kernels(branch="sel")} == names
    for branch in BRANCHES:
        case = branch_case(step, branch, {})
        parity, _ = prove(case, case.candidate, 2, branch)
        ours = {k: n for k, n in parity.launches.items() if k.startswith("_decode")}
        assert ours == dict.fromkeys(step.kernels(branch=branch), 1)
        step.refill(0)
        want = step.alone(branch)()
        for other in set(BRANCHES) - {branch}:
            for kv in "kv":
                getattr(step.cache, f"{kv}_{other}").fill_(float("nan"))
        assert torch.equal(step.alone(branch)(), want) and want.isfinite().all()


@pytest.mark.kernel
def test_a_forced_branch_must_be_one(kernel_device):
    from nsa.kernels.decode import nsa_decode_triton

    x = torch.zeros(1, 1, 2, 16, device=kernel_device, dtype=torch.float16)
    args = (*[x] * 8, torch.ones(1, dtype=torch.int32, device=kernel_device))
    sizes = dict(l=8, d=4, l_sel=8, n_sel=4, n_init=1, n_local=2, window=12, max_len=1)
    call = lambda branch: lambda: nsa_decode_triton(*args, branch=branch, **sizes)
    helpers.assert_raises(
        (ValueError, "branch must be None, 'cmp', 'sel' or 'win', got 'all'", call("all")),
        (ValueError, "block_indices go with branch 'sel'", call("sel")),
    )


# ---- the summary ---------------------------------------------------------------------------------


NEEDED = summarize_decode_csv.NEEDED


def line(**changes):
    return dict.fromkeys(NEEDED, "") | {
        "S": "512", "ms_total": "0.5", "ms_cmp": "0.1", "ms_sel": "0.25", "ci_low": "0.49",
        "ci_high": "0.52", "reads_actual_decode": "90", "reads_expected_decode": "90",
        "speedup": "3.21", "speedup_low": "3.1", "speedup_high": "3.3", "baseline": "dense",
        "status": "VALID", "path": "triton", "cache": "cold", "device": "NVIDIA H200", **changes,
    }  # fmt: skip


def summary(tmp_path, capsys, rows, header=NEEDED):
    (tmp_path / "d.csv").write_text(csv_text(rows, header))
    return summarize_decode_csv.main([str(tmp_path / "d.csv")]), *capsys.readouterr()


def test_summary_shows_shares_reads_and_gaps(tmp_path, capsys):
    rows = [line(), line(S="4096", reads_actual_decode="91", status="UNSTABLE", why="drift"),
            line(S="8192", ms_total="", speedup="", status="SKIPPED", why="no memory")]  # fmt: skip
    code, out, _ = summary(tmp_path, capsys, rows)
    assert code == 0
    assert "| 512 | 0.5000 [0.4900, 0.5200] | 0.1000 (20%) | 0.2500 (50%) | - |" in out
    assert "90 = expected" in out and "91 != 90 expected" in out and "3.21x [3.10, 3.30]" in out
    assert "S=4096 UNSTABLE: drift." in out and "S=8192 SKIPPED: no memory." in out
    assert "Reads differ from the formula at S=4096" in out
    assert out.startswith("Decode step on NVIDIA H200, cold cache")


def test_the_second_table_says_whose_time_is_whose_and_what_binds(tmp_path, capsys):
    names = [name for _, *three in summarize_decode_csv.MORE for name in three if name]
    more = {name: str(i) for i, name in enumerate(names, 1)}
    none = dict.fromkeys(names, "")
    told = (more, "1", "True"), (more, "64", "False"), (none, "2", "")
    rows = [line(**known, B=B, launch_bound=bound) for known, B, bound in told]
    code, out, _ = summary(tmp_path, capsys, rows, (*NEEDED, *names, "B", "launch_bound"))
    assert code == 0
    _, _, table = out.partition("As a CUDA graph")
    table = [t.strip("| ").split(" | ") for t in table.splitlines() if t.startswith("|")]
    head, _, *lines = [[c.strip() for c in cells] for cells in table]
    first, second = (dict(zip(head, cells, strict=True)) for cells in lines)
    shown = {
        "B": "1", "eager step launch-bound": "yes", "graph ms [95 %]": "1.0000 [2.0000, 3.0000]",
        "dense graph ms": "4.0000", "over dense": "5.00 [6.00, 7.00]",
        "layer eager, wall ms": "8.0000", "layer eager, device ms": "9.0000 [10.0000, 11.0000]",
        "layer graph ms": "12.0000 [13.0000, 14.0000]",
    }  # fmt: skip
    assert shown.items() <= first.items()
    assert second == first | {"B": "64", "eager step launch-bound": "no"}


@pytest.mark.parametrize("rows, header, code, says", [
    ([], NEEDED, 3, "has no rows"), ([{}], ("S", "ms_total"), 2, "no column ms_cmp"),
    ([dict(ms_total="nan")], NEEDED, 2, "d.csv:2: ms_total must be a finite number"),
    ([dict(S="")], NEEDED, 2, "d.csv:2: S is empty"),
    ([dict(speedup="fast")], NEEDED, 2, "d.csv:2: speedup must be"),
])  # fmt: skip
def test_summary_of_nothing_and_of_something_else(rows, header, code, says, tmp_path, capsys):
    found, out, err = summary(tmp_path, capsys, [line(**changes) for changes in rows], header)
    assert (found, out) == (code, "") and says in err
    (tmp_path / "t.txt").write_text("no table at all\n")
    for name in ("t.txt", "none.csv"):
        assert summarize_decode_csv.main([str(tmp_path / name)]) == 2


# ---- a second count of reads ---------------------------------------------------------------------


@pytest.mark.parametrize("S", [1, 7, 9, 20, 41])
def test_reads_are_counted_by_what_the_result_depends_on(S):
    step = make(S=S, batch=2)
    assert step.seen == step.counted.expected_step == blocks.reads(S, **SIZES)


def test_a_step_that_reads_more_than_it_counts_is_told(monkeypatch):
    """Whether the cache's counter and the formula it is held against have the same fault, or all
    keys' values reach the result, by a little, of the route that is timed alone."""
    count, real = Step._count, attention.nsa_decode
    short = lambda c: replace(c, win=c.win - 1, expected_step=c.expected_step - 1)
    with monkeypatch.context() as patch:
        patch.setattr(Step, "_count", lambda step: short(count(step)))
        with pytest.raises(AssertionError, match="the cache counted reads .* its values reach"):
            make(S=41)

    def beyond(q, cache, *rest, backend=None, **how):
        out, chosen = real(q, cache, *rest, backend=backend, **how)
        if backend != "reference":
            out = out + 1e-3 * cache.v_sel[:, :, :1].mean(1, keepdim=True)
        return out, chosen

    monkeypatch.setattr(attention, "nsa_decode", beyond)
    with pytest.raises(AssertionError, match="keys that it is not to read"):
        make(S=41)
