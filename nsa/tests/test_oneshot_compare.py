"""Comparing two bundles: the same code is never faster or slower, a planted change is found."""

from __future__ import annotations

import json
import random
import statistics

import pytest

from nsa.tests.oneshot_samples import (
    bench_row,
    edit,
    parity_row,
    sending,
    test_row,
    write_derived,
    write_sample,
)
from scripts.oneshot.compare import compare, verify
from scripts.oneshot.compare.comparison import compare as compared
from scripts.oneshot.compare.comparison import environment_changes, judge_case
from scripts.oneshot.record import bundle
from scripts.oneshot.record.reading import rebuild

FLOOR = 0.01


@pytest.fixture(autouse=True)
def other_sources(monkeypatch):
    """The sources that verify are not those of the run: its reports are not made anew."""
    monkeypatch.setattr(verify, "git_facts", lambda _: {})


def interval(samples):
    """95 % interval of the median by order statistics, n = 60: the 22nd to the 39th value."""
    ordered = sorted(samples)
    return [ordered[21], ordered[38]]


def timed(rng, case, true_us, spread=0.012):
    """A row as a bench of 60 samples gives it: right-skewed noise, now and then a hiccup."""
    hiccup = lambda: 0.2 * rng.random() if rng.random() < 0.02 else 0.0
    samples = [true_us * (1 + abs(rng.gauss(0, spread)) + hiccup()) for _ in range(60)]
    ordered = sorted(samples)
    return bench_row(
        case, statistics.median(samples), None, ci95_us=interval(samples), min_us=ordered[0],
        p20_us=ordered[12], p80_us=ordered[48], p95_us=ordered[57],
    )  # fmt: skip


@pytest.mark.parametrize(("planted", "drift", "verdicts", "low", "high"), [
    (0.0, 0.0, "SAME", 0.99, 1), (0.003, 0.0, "SAME", 0.99, 1),
    (0.0, FLOOR, "FASTER SLOWER", 0, 0.01),  # the same code on a box that drifts
    (0.03, 0.0, "SLOWER", 0.99, 1), (-0.03, 0.0, "FASTER", 0.99, 1),
    (0.03, FLOOR / 2, "SLOWER", 0.9, 1), (0.03, FLOOR / 2, "FASTER SAME", 0, 0),
])  # fmt: skip
def test_a_planted_change_is_found_and_drift_is_none(planted, drift, verdicts, low, high):
    """drift: how much slower all of box B is at most, and in one of them."""
    rng, found = random.Random(1), []
    for box in range(10):
        moved = (1 + (rng.uniform(-drift, drift) if box else drift)) * (1 + planted)
        for i in range(100):
            true_us = 8.0 * 1.06**i
            a, b = timed(rng, f"c{i}", true_us), timed(rng, f"c{i}", true_us * moved)
            a["timer"] = b["timer"] = "simulated"
            found.append(judge_case(a, b, FLOOR)[0])
    assert low <= sum(v in verdicts.split() for v in found) / len(found) <= high


def row(median, half=0.003, **changes):
    ci = [median * (1 - half), median * (1 + half)]
    return bench_row("c", median, None, **{"ci95_us": ci, **changes})


@pytest.mark.parametrize(
    "a, b, verdict, why",
    [
        (row(100), row(100.5), "SAME", "inside the floor"),
        (row(100), row(110), "SLOWER", "apart"),
        (row(100), row(90), "FASTER", "apart"),
        (row(100), row(110, half=0.2), "AMBIGUOUS", "overlap"),
        (row(100), row(101.6), "AMBIGUOUS", "too near"),
        (row(100), row(100, half=0.05), "AMBIGUOUS", "interval of B is wider"),
        (row(100), row(110, min_us=97.0), "AMBIGUOUS", "fastest sample"),
        (row(100), row(110, p80_us=100.0), "AMBIGUOUS", "80th percentile"),
        (row(100, sm_mhz_median=1980), row(110, sm_mhz_median=1800), "AMBIGUOUS",
         "1980 -> 1800 MHz"),
        (row(100, sm_mhz_median=1980), row(110, sm_mhz_median=1980), "SLOWER", "apart"),
        (row(4.0), row(4.4), "AMBIGUOUS", "below the timer's 0.5 us"),
        (row(100), row(110, status="UNSTABLE", why=["IQR 9 %"]), "AMBIGUOUS", "UNSTABLE in B"),
        (row(100, ci95_us=None), row(110), "AMBIGUOUS", "no confidence interval in A"),
        (row(100, sm_mhz_median=1980), row(110, launch_bound=True, sm_mhz_median=1), "SLOWER",
         "apart"),
    ],
)  # fmt: skip
def test_the_verdict_of_one_case_has_its_reason(a, b, verdict, why):
    got = judge_case(a, b, FLOOR)
    assert got[0] == verdict and why in got[1], got


def made(folder, rows=(), *, name="all_pass", drop=(), change=None, stage="sel_bench"):
    """The sample with `rows` in `stage`, without the cases in `drop`."""
    write_sample(folder, name)
    edit(folder, sending(stage, rows, drop=drop))
    if change:
        edit(folder, change)
    write_derived(folder)
    return folder


def run(a, b, *options, capsys=None):
    code = compare.main([str(a), str(b), *options, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def compared_as(tmp_path, capsys):
    """compared_as(options of `made` for A, for B, arguments): (exit code, what compare found)."""

    def call(a=None, b=None, *options):
        made_ = [made(tmp_path / name, **(how or {})) for name, how in (("a", a), ("b", b))]
        return run(*made_, *options, capsys=capsys)

    return call


def cell(result, case):
    return next(c for c in result["cells"] if c["case"].startswith(case))


def on_device(**changes):
    return lambda events: events[0]["device"].update(changes)


def ending(*stages, **changes):
    """A change by which these stages end otherwise."""

    def change(events):
        for event in events:
            if event["ev"] == "stage_end" and event["stage"] in stages:
                event["result"].update(changes)

    return change


def test_equal_bundles_are_the_same(compared_as):
    code, result = compared_as()
    assert code == 0 and result["counts"] == {"SAME": 22} and result["environment"] == []


def test_a_bundle_that_does_not_verify_is_no_proof(compared_as):
    """Edited in the journal too, and everything made anew of it."""

    def change(events):
        row = next(e["row"] for e in events if e["ev"] == "row" and e["row"].get("speedup"))
        row["speedup"] *= 3

    code, result = compared_as(None, dict(change=change))
    assert code == 5 and "B does not verify: bench" in result["notes"][0]
    assert "speedup" in result["notes"][0] and result["counts"] == {"SAME": 22}


def test_faster_slower_new_gone(tmp_path, capsys):
    times_a = {"slower": 50.0, "faster": 50.0, "gone": 50.0, "lost": 50.0}
    times_b = {"slower": 55.0, "faster": 45.0, "new": 5.0}
    rows_a, rows_b = ([bench_row(f"t/{name}", us, 1.5) for name, us in times.items()]
                      for times in (times_a, times_b))  # fmt: skip
    rows_b.append(bench_row("t/lost", 50.0, 1.5, parity={"status": "FAIL"}))
    a, b = made(tmp_path / "a", rows_a), made(tmp_path / "b", rows_b)
    code, result = run(a, b, capsys=capsys)
    assert code == 1
    found = {name: cell(result, f"t/{name}") for name in ("slower", "faster", "new", "gone")}
    assert {name: c["verdict"].lower() for name, c in found.items()} == {n: n for n in found}
    assert found["slower"]["change"] == pytest.approx(0.1)
    lost = cell(result, "t/lost")
    assert (lost["verdict"], lost["b_us"]) == ("GONE", None)
    assert "INVALID: no passed parity" in lost["why"]
    assert any("t/lost VALID -> INVALID" in r for r in result["regressions"])
    assert result["floor"] == 0.012
    code, result = run(b, a, "--fail-on", "ambiguous", capsys=capsys)
    assert code == 5 and cell(result, "t/slower")["verdict"] == "FASTER"
    assert cell(result, "t/new")["verdict"] == "GONE"  # and nothing says why: not the same


def test_a_stage_that_died_says_so_for_each_of_its_cases(tmp_path, capsys):
    a, b = made(tmp_path / "a"), tmp_path / "b"
    write_sample(b, "crash")
    code, result = run(a, b, capsys=capsys)
    assert code == 1
    gone = cell(result, "decode/S=512")
    assert gone["verdict"] == "GONE" and "decode_bench NOT_RUN: the run ended" in gone["why"]
    assert any("triton_bwd  PASS -> CRASH" in s for s in result["status"])
    assert any("did not run to its end" in n for n in result["notes"])


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("name", "NVIDIA H100", "GPU NVIDIA H200 -> NVIDIA H100"),
        ("power_limit_w", 500.0, "power limit 700.0 -> 500.0"),
        ("driver", "570.10", "driver major 580 -> 570"),
        ("mig", True, "MIG False -> True"),
    ],
)
def test_times_of_unlike_boxes_are_not_compared(field, value, words, tmp_path, capsys):
    a, b = made(tmp_path / "a"), made(tmp_path / "b", change=on_device(**{field: value}))
    code, result = run(a, b, capsys=capsys)
    assert code == 5 and result["counts"] == {"NOT_COMPARABLE": 22}
    assert result["incomparable"] == [words] and any(field in c for c in result["environment"])
    code, result = run(a, b, "--force", capsys=capsys)
    assert code == 0 and result["counts"] == {"SAME": 22} and words in result["notes"][0]


def test_a_minor_driver_version_is_no_other_box(compared_as):
    def change(events):
        on_device(driver="580.11")(events)
        events[0]["env"]["variables"]["NSA_SEL_TRITON_BLOCK_L"] = "128"

    code, result = compared_as(None, dict(change=change))
    assert code == 0 and result["environment"] == [
        "device driver 580.95 -> 580.11", "NSA_SEL_TRITON_BLOCK_L - -> 128"
    ]  # fmt: skip


@pytest.mark.parametrize("field, value", [("timer", "host_clock"), ("cache", "warm")])
def test_another_timer_or_cache_mode_is_another_question(field, value, compared_as):
    rows = bench_row("t/x", 50.0, 1.5), bench_row("t/x", 90.0, 1.5, **{field: value})
    code, result = compared_as(*(dict(rows=[row]) for row in rows))
    assert code == 0 and cell(result, "t/x")["verdict"] == "NOT_COMPARABLE"
    assert value in cell(result, "t/x")["why"]


def test_parity_is_compared_on_unlike_boxes_too(tmp_path, capsys):
    good = [parity_row("p/one"), test_row("t.py::one")]
    bad = [parity_row("p/one", status="FAIL", why=["max_abs 0.3"]), parity_row("p/two", mae=0.5),
           test_row("t.py::one", "failed", "no")]  # fmt: skip
    a = made(tmp_path / "a", good, stage="triton_fwd")
    b = made(tmp_path / "b", bad, stage="triton_fwd", change=on_device(name="NVIDIA H100"))
    code, result = run(a, b, capsys=capsys)
    assert code == 1
    assert "parity p/one PASS -> FAIL (max_abs 0.3)" in result["regressions"]
    assert any(r.startswith("parity p/two absent -> FAIL") for r in result["regressions"])
    assert "test t.py::one passed -> failed (no)" in result["regressions"]
    assert run(a, b, "--fail-on", "slower", capsys=capsys)[0] == 5
    code, result = run(b, a, capsys=capsys)
    assert code == 5 and "parity p/one FAIL -> PASS" in result["repaired"]


@pytest.mark.parametrize(
    ("floors", "taken"),
    [((0.012, 0.05), 0.05), ((0.05, 0.012), 0.05), ((None, 0.05), 0.05), ((0.002, None), 0.01)],
)
def test_the_noisier_box_sets_the_floor(floors, taken, compared_as):
    """4 % between a quiet and a noisy box is no speedup, whichever of them was first."""

    def of_floor(us, floor):
        def change(events):
            for event in events:
                if event["ev"] == "row" and event["row"]["kind"] == "health":
                    event["row"]["aa_noise_floor"] = floor

        return dict(rows=[bench_row("t/x", us, None)], change=change)

    _, result = compared_as(of_floor(50.0, floors[0]), of_floor(48.0, floors[1]))
    assert result["floor"] == taken
    assert (cell(result, "t/x")["verdict"] == "FASTER") == (taken < 0.03)


@pytest.mark.parametrize("before", ["VALID", "UNSTABLE"])
@pytest.mark.parametrize("after", ["INVALID", "FAILED"])
def test_a_time_that_lost_its_proof_is_a_regression_however_shaky_it_was(
    before, after, compared_as
):
    why = ["drift"] if before == "UNSTABLE" else []
    rows = [bench_row("t/x", 50.0, 1.5, status=status, why=why)
            for status, why in ((before, why), (after, ["mae"]))]  # fmt: skip
    code, result = compared_as(*(dict(rows=[row]) for row in rows))
    assert code == 1 and f"bench t/x {before} -> {after} (mae)" in result["regressions"]


def test_proof_is_compared_by_dtype_in_whatever_order_it_came(compared_as):
    """Else what was repaired in one dtype hides what broke in the other."""
    rows = [parity_row("p/one", dtype=dtype, **({} if good else {"status": "FAIL", "why": ["mae"]}))
            for dtype, good in (("bf16", 1), ("fp16", 0), ("fp16", 1), ("bf16", 0))]  # fmt: skip
    code, result = compared_as(*(dict(rows=r, stage="triton_fwd") for r in (rows[:2], rows[2:])))
    assert code == 1 and result["regressions"] == ["parity p/one PASS -> FAIL (mae)"]
    assert result["repaired"] == ["parity p/one FAIL -> PASS"]


@pytest.mark.parametrize(
    ("stage", "status", "required"),
    [
        *(("fa2_probe", status, False) for status in ("FAIL", "CRASH", "TIMEOUT", "INFRA")),
        ("triton_bwd", "NOT_RUN", True),  # it proves nothing any more
    ],
)
def test_a_stage_that_ended_otherwise_is_a_regression(stage, status, required, compared_as):
    change = ending(stage, status=status, reason="why", required=required)
    code, result = compared_as(None, dict(change=change))
    assert code == 1 and result["regressions"] == [f"stage {stage} PASS -> {status}"]


def test_an_optional_stage_may_prove_nothing(compared_as):
    change = ending("fa2_probe", status="NOT_RUN", reason="no test was collected", required=False)
    code, result = compared_as(None, dict(change=change))
    assert code == 0 and result["regressions"] == []


PROOF = [*(parity_row(f"p/{i}") for i in range(5)), test_row("t.py::one"), test_row("t.py::two")]


def without_stage(stage):
    """B has nothing of `stage`, as --skip leaves it."""

    def change(events):
        start = next(e for e in events if e["ev"] == "run_start")
        start["plan"] = [s for s in start["plan"] if s["id"] != stage]
        events[:] = [e for e in events if e.get("stage") != stage]

    return change


def test_proof_that_vanished_is_a_regression(tmp_path, capsys):
    a = made(tmp_path / "a", PROOF, stage="triton_fwd")
    b = made(tmp_path / "b", [test_row("t.py::one", "skipped", "no luck"), PROOF[4]],
             stage="triton_fwd")  # fmt: skip
    code, result = run(a, b, capsys=capsys)
    assert code == 1 and result["regressions"] == [
        "parity PASS -> absent 4 times in triton_fwd, first p/0",
        "test t.py::one passed -> skipped", "test t.py::two passed -> absent",
    ]  # fmt: skip
    code, result = run(b, a, capsys=capsys)
    assert code == 0 and not result["regressions"] and not result["repaired"]


@pytest.mark.parametrize(
    ("rows", "regressions"),
    [
        ([test_row("t.py::one", "skipped", "needs SM 9.0")], []),
        ([], ["test t.py::one passed -> absent"]),
    ],
)
def test_another_card_may_skip_other_tests(rows, regressions, compared_as):
    b = dict(rows=rows, stage="triton_fwd", change=on_device(name="NVIDIA A100"))
    _, result = compared_as(dict(rows=[test_row("t.py::one")], stage="triton_fwd"), b)
    assert result["regressions"] == regressions


def test_what_was_not_asked_for_is_not_missed(tmp_path, capsys):
    a = made(tmp_path / "a")

    def skip(events):
        without_stage("sel_bench")(events)
        without_stage("triton_fwd")(events)

    def partial(events):
        skip(events)
        events[0]["partial"] = "--skip sel_bench,triton_fwd"

    code, result = run(a, made(tmp_path / "b", change=skip), capsys=capsys)
    assert code == 1 and "stage triton_fwd PASS -> absent" in result["regressions"]
    code, result = run(a, made(tmp_path / "c", change=partial), capsys=capsys)
    assert code == 0 and not result["regressions"]
    gone = [c for c in result["cells"] if c["verdict"] == "GONE"]
    assert gone and all(c["not_asked"] for c in gone)


def test_cards_that_b_does_not_have_are_not_missed(compared_as):
    def two_cards(events):
        for name, gpu in (("triton_fwd", 0), ("triton_bwd", 1)):
            next(s for s in events[0]["plan"] if s["id"] == name)["gpus"] = [gpu]
            ending(name, gpus=[gpu])(events)

    code, result = compared_as(dict(change=two_cards), dict(change=without_stage("triton_bwd")))
    assert code == 0 and not result["regressions"]


def test_fail_on_ambiguous_and_its_usage(tmp_path, capsys):
    a = made(tmp_path / "a", [bench_row("t/x", 50.0, 1.5)])
    b = made(tmp_path / "b", [bench_row("t/x", 51.0, 1.5)])
    assert run(a, b, capsys=capsys)[0] == 0
    assert run(a, b, "--fail-on", "slower,ambiguous", capsys=capsys)[0] == 1
    with pytest.raises(SystemExit) as stop:
        compare.main([str(a), str(b), "--fail-on", "luck"])
    assert stop.value.code == 2 and "'luck'" in capsys.readouterr().err


def test_archives_folders_and_what_is_neither(tmp_path, capsys):
    a, b = made(tmp_path / "a"), made(tmp_path / "b")
    archive, _, _ = bundle.pack(b)
    assert run(a, archive, capsys=capsys)[0] == 0
    (tmp_path / "no.tgz").write_text("no archive")
    for other in (tmp_path / "absent", tmp_path / "no.tgz", tmp_path):
        assert compare.main([str(a), str(other)]) == 2
        assert capsys.readouterr().err.strip()


def test_text_and_markdown_say_the_same_and_hold_hostile_names(tmp_path, capsys):
    evil = "t/`x` | </table> \x1b[31m @all\n# h"
    a = made(tmp_path / "a", [bench_row(evil, 50.0, 1.5)])
    b = made(tmp_path / "b", [bench_row(evil, 60.0, 1.5)])
    assert compare.main([str(a), str(b), "--explain"]) == 1
    text = capsys.readouterr().out
    assert text.splitlines()[2] == "environment  same" and "\x1b" not in text
    assert "SLOWER" in text and "How a case is judged" in text and text.rstrip().endswith("exit 1")
    assert compare.main([str(a), str(b), "--md"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert not [s for s in lines if s.startswith("# ")]
    table = [s for s in lines if s.startswith("|")]
    assert {s.replace("\\|", "").count("|") for s in table} == {7}
    assert "1 slower, 22 same" in lines[0]


def test_two_names_for_one_case_by_candidate(tmp_path):
    rows = [bench_row("t/x", 50.0, 1.5), bench_row("t/x", 20.0, 1.5, candidate="fa2")]
    a, b = (rebuild(made(tmp_path / n, rows))[0] for n in "ab")
    names = [c.case for c in compared(a, b).cells if c.case.startswith("t/x")]
    assert names == ["t/x [triton]", "t/x [fa2]"]


@pytest.mark.parametrize("a, b, words", [
    ({"diff_sha256": "aa"}, {"diff_sha256": None}, "uncommitted changes differ"),
    ({"source_sha256": "aa"}, {"source_sha256": "bb"}, "the sources differ, by their hash"),
    ({"source_sha256": "aa"}, {"source_sha256": None}, None),
    ({"source_sha256": "aa"}, {"source_sha256": "aa"}, None),
])  # fmt: skip
def test_other_sources_of_one_commit_are_told(a, b, words):
    bundle_of = lambda git: {"git": git, "env": {}, "device": {}}
    changes = environment_changes(bundle_of(a), bundle_of(b))
    assert changes == ([words] if words else [])
