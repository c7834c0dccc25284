"""Comparing two bundles, where the same code is never faster or slower and a planted change is
found; the score of a run, its trend over runs, and the rows as traces of flashinfer-bench."""

from __future__ import annotations

import json
import random
import shutil
import statistics

import pytest

from nsa.tests.oneshot_samples import (
    bench_row,
    edit,
    parity_row,
    real_rows,
    sending,
    test_row,
    write_derived,
    write_sample,
)
from scripts.oneshot.__main__ import main
from scripts.oneshot.compare import compare, export, trend, verify
from scripts.oneshot.compare.comparison import compare as compared
from scripts.oneshot.compare.comparison import environment_changes, judge_case
from scripts.oneshot.record import bundle
from scripts.oneshot.record.reading import rebuild
from scripts.oneshot.record.score import CASES as SCORED
from scripts.oneshot.record.score import score

FLOOR = 0.01


@pytest.fixture(autouse=True)
def other_sources(monkeypatch):
    """The sources that verify are not those of the run: its reports are not made anew. Private
    data, which takes longest, has tests of its own."""
    monkeypatch.setattr(verify, "git_facts", lambda _: {})
    monkeypatch.setattr(verify, "check_secrets", lambda *_: ())


def timed(rng, case, true_us, spread=0.012):
    """A row as a bench of 60 samples gives it: right-skewed noise, now and then a hiccup. The 95 %
    interval of the median is that of order statistics, the 22nd to the 39th value."""
    hiccup = lambda: 0.2 * rng.random() if rng.random() < 0.02 else 0.0
    at = sorted(true_us * (1 + abs(rng.gauss(0, spread)) + hiccup()) for _ in range(60))
    times = {"min_us": at[0], "p20_us": at[12], "p80_us": at[48], "p95_us": at[57]}
    ci = [at[21], at[38]]
    return bench_row(case, statistics.median(at), None, timer="simulated", ci95_us=ci, **times)


@pytest.mark.parametrize(("planted", "drift", "verdicts", "low", "high"), [
    (0.0, 0.0, "SAME", 0.99, 1), (0.003, 0.0, "SAME", 0.99, 1),
    (0.0, FLOOR, "FASTER SLOWER", 0, 0.01),  # the same code on a box that drifts
    (0.03, 0.0, "SLOWER", 0.99, 1), (-0.03, 0.0, "FASTER", 0.99, 1),
    (0.03, FLOOR / 2, "SLOWER", 0.9, 1), (0.03, FLOOR / 2, "FASTER SAME", 0, 0),
])  # fmt: skip
def test_a_planted_change_is_found_and_drift_is_none(planted, drift, verdicts, low, high):
    """drift: how much slower all of box B is at most, and in one of them."""
    rng, found = random.Random(1), []
    for box in range(5):
        moved = (1 + (rng.uniform(-drift, drift) if box else drift)) * (1 + planted)
        for i in range(100):
            true_us = 8.0 * 1.06**i
            a, b = timed(rng, f"c{i}", true_us), timed(rng, f"c{i}", true_us * moved)
            found.append(judge_case(a, b, FLOOR)[0])
    assert low <= sum(v in verdicts.split() for v in found) / len(found) <= high


def row(median, half=0.003, **changes):
    ci = [median * (1 - half), median * (1 + half)]
    return bench_row("c", median, None, **{"ci95_us": ci, **changes})


CLOCKED = row(100, sm_mhz_median=1980)


@pytest.mark.parametrize("a, b, verdict, why", [
    (row(100), row(100.5), "SAME", "inside the floor"), (row(100), row(110), "SLOWER", "apart"),
    (row(100), row(90), "FASTER", "apart"),
    (CLOCKED, row(110, sm_mhz_median=1980), "SLOWER", "apart"),
    (CLOCKED, row(110, launch_bound=True, sm_mhz_median=1), "SLOWER", "apart"),
    *((a, b, "AMBIGUOUS", why) for a, b, why in (
        (row(100), row(110, half=0.2), "overlap"), (row(100), row(101.6), "too near"),
        (row(100), row(100, half=0.05), "interval of B is wider"),
        (row(100), row(110, min_us=97.0), "fastest sample"),
        (row(100), row(110, p80_us=100.0), "80th percentile"),
        (CLOCKED, row(110, sm_mhz_median=1800), "1980 -> 1800 MHz"),
        (row(4.0), row(4.4), "below the timer's 0.5 us"),
        (row(100), row(110, status="UNSTABLE", why=["IQR 9 %"]), "UNSTABLE in B"),
        (row(100, ci95_us=None), row(110), "no confidence interval in A"),
    )),
])  # fmt: skip
def test_the_verdict_of_one_case_has_its_reason(a, b, verdict, why):
    got = judge_case(a, b, FLOOR)
    assert got[0] == verdict and why in got[1], got


def made(folder, rows=(), *, name="all_pass", drop=(), change=None, stage="sel_bench"):
    """The sample with `rows` in `stage`, without the cases in `drop`."""
    write_sample(folder, name)
    if rows or drop:
        edit(folder, sending(stage, rows, drop=drop))
    if change:
        edit(folder, change)
    write_derived(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The sample as it is."""
    return made(tmp_path_factory.mktemp("plain"))


@pytest.fixture
def compared_as(plain, tmp_path, capsys):
    """compared_as(options of `made` for A, for B, arguments): (exit code, what compare found)."""

    def call(a, b, *options):
        folders = [str(made(tmp_path / name, **how) if how else plain)
                   for name, how in (("a", a), ("b", b))]  # fmt: skip
        code = compare.main([*folders, *options, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def cell(result, case):
    return next(c for c in result["cells"] if c["case"].startswith(case))


# Changes of a journal.


def on_device(variables=(), **changes):
    def change(events):
        events[0]["device"].update(changes)
        events[0]["env"]["variables"].update(variables)

    return change


def ending(*stages, **changes):
    """These stages end otherwise."""

    def change(events):
        for event in events:
            if event["ev"] == "stage_end" and event["stage"] in stages:
                event["result"].update(changes)

    return change


def without_stages(*stages, partial=None):
    """Nothing of these stages is there, as --skip leaves it; `partial` says so."""

    def change(events):
        events[0]["plan"] = [s for s in events[0]["plan"] if s["id"] not in stages]
        events[:] = [e for e in events if e.get("stage") not in stages]
        events[0]["partial"] = partial

    return change


def edited_in_the_journal_too(events):
    row = next(e["row"] for e in events if e["ev"] == "row" and e["row"].get("speedup"))
    row["speedup"] *= 3


def on_two_cards(events):
    for gpu, name in enumerate(("triton_fwd", "triton_bwd")):
        next(s for s in events[0]["plan"] if s["id"] == name)["gpus"] = [gpu]
        ending(name, gpus=[gpu])(events)


def sent(*rows, change=None):
    """Options of `made`: the stage triton_fwd sent these rows as well."""
    return dict(rows=rows, stage="triton_fwd", change=change)


def one(us=50.0, **changes):
    """Options of `made`: the case t/x took this time."""
    return dict(rows=[bench_row("t/x", us, 1.5, **changes)])


def of_dtypes(*good):
    """Parity rows of one case: (dtype, is it right?) each."""
    wrong = {"status": "FAIL", "why": ["mae"]}
    return sent(*(parity_row("p/one", dtype=dtype, **({} if ok else wrong)) for dtype, ok in good))


GOOD = sent(parity_row("p/one"), test_row("t.py::one"))
BAD = sent(
    parity_row("p/one", status="FAIL", why=["max_abs 0.3"]), parity_row("p/two", mae=0.5),
    test_row("t.py::one", "failed", "no"), change=on_device(name="NVIDIA H100"),
)  # fmt: skip
PROVEN = sent(*(parity_row(f"p/{i}") for i in range(5)), *map(test_row, ("t.py::one", "t.py::two")))
LESS = sent(test_row("t.py::one", "skipped", "no luck"), parity_row("p/4"))
TEST, SKIPPED = test_row("t.py::one"), test_row("t.py::one", "skipped", "needs SM 9.0")
OTHER_CARD = on_device(name="NVIDIA A100")
UNLIKE = (
    ("name", "NVIDIA H100", "GPU NVIDIA H200 -> NVIDIA H100"),
    ("power_limit_w", 500.0, "power limit 700.0 -> 500.0"),
    ("driver", "570.10", "driver major 580 -> 570"), ("mig", True, "MIG False -> True"),
)  # fmt: skip
SAME, NOTHING = {"SAME": 22}, dict(regressions=[], repaired=[])
NOT_ASKED = "sel_bench", "triton_fwd"
LOST = {"VALID": {}, "UNSTABLE": dict(status="UNSTABLE", why=["drift"])}
# a, b: options of `made`; says: words of one of the texts under a key; cells: verdict and words.
CASES = {
    "equal bundles": dict(counts=SAME, environment=[]),
    "a bundle that does not verify is no proof": dict(
        b=dict(change=edited_in_the_journal_too), code=5, counts=SAME,
        says=dict(notes=["B does not verify: bench", "speedup"])),
    "a stage that died says so for each of its cases": dict(
        b=dict(name="crash"), code=1,
        cells={"decode/S=512": ("GONE", "decode_bench NOT_RUN: the run ended")},
        says=dict(status=["triton_bwd  PASS -> CRASH"], notes=["did not run to its end"])),
    **{f"times of another {field} are not compared": dict(
        b=dict(change=on_device(**{field: value})), code=5, counts={"NOT_COMPARABLE": 22},
        incomparable=[words], says=dict(environment=[field])) for field, value, words in UNLIKE},
    **{f"times of another {field} are compared by force": dict(
        b=dict(change=on_device(**{field: value})), options=["--force"], counts=SAME,
        says=dict(notes=[words])) for field, value, words in UNLIKE},
    "a minor driver version is no other box": dict(
        b=dict(change=on_device({"NSA_SEL_TRITON_BLOCK_L": "128"}, driver="580.11")), environment=[
            "device driver 580.95 -> 580.11", "NSA_SEL_TRITON_BLOCK_L - -> 128"]),
    **{f"another {field} is another question": dict(
        a=one(), b=one(90.0, **{field: value}), cells={"t/x": ("NOT_COMPARABLE", value)})
       for field, value in (("timer", "host_clock"), ("cache", "warm"))},
    "parity of unlike boxes": dict(
        a=GOOD, b=BAD, code=1, says=dict(regressions=[
            "parity p/one PASS -> FAIL (max_abs 0.3)", "parity p/two absent -> FAIL",
            "test t.py::one passed -> failed (no)"])),
    "only what is slower was asked for": dict(
        a=GOOD, b=BAD, code=5, options=["--fail-on", "slower"]),
    "parity that is right again": dict(
        a=BAD, b=GOOD, code=5, says=dict(repaired=["parity p/one FAIL -> PASS"])),
    **{f"{before} to {after}: a time lost its proof, however shaky it was": dict(
        a=one(**LOST[before]), b=one(status=after, why=["mae"]), code=1,
        says=dict(regressions=[f"bench t/x {before} -> {after} (mae)"]))
       for before in LOST for after in ("INVALID", "FAILED")},
    # Else what was repaired in one dtype hides what broke in the other.
    "proof by dtype, in whatever order it came": dict(
        a=of_dtypes(("bf16", 1), ("fp16", 0)), b=of_dtypes(("fp16", 1), ("bf16", 0)), code=1,
        regressions=["parity p/one PASS -> FAIL (mae)"], repaired=["parity p/one FAIL -> PASS"]),
    **{f"an optional stage with {status}": dict(
        b=dict(change=ending("fa2_probe", status=status, reason="why", required=False)), code=1,
        regressions=[f"stage fa2_probe PASS -> {status}"])
       for status in ("FAIL", "CRASH", "TIMEOUT", "INFRA")},
    "a required stage proves nothing any more": dict(
        b=dict(change=ending("triton_bwd", status="NOT_RUN", reason="why", required=True)), code=1,
        regressions=["stage triton_bwd PASS -> NOT_RUN"]),
    "an optional stage may prove nothing": dict(
        b=dict(change=ending("fa2_probe", status="NOT_RUN", reason="why", required=False)),
        **NOTHING),
    "proof that vanished": dict(a=PROVEN, b=LESS, code=1, regressions=[
        "parity PASS -> absent 4 times in triton_fwd, first p/0",
        "test t.py::one passed -> skipped", "test t.py::two passed -> absent"]),
    "proof that is new": dict(a=LESS, b=PROVEN, **NOTHING),
    "another card may skip other tests": dict(
        a=sent(TEST), b=sent(SKIPPED, change=OTHER_CARD), code=5, **NOTHING),
    "another card runs the same tests": dict(
        a=sent(TEST), b=dict(change=OTHER_CARD), code=1,
        regressions=["test t.py::one passed -> absent"]),
    "a stage that is gone": dict(
        b=dict(change=without_stages(*NOT_ASKED)), code=1,
        says=dict(regressions=["stage triton_fwd PASS -> absent"])),
    "a stage that was not asked for is not missed": dict(
        b=dict(change=without_stages(*NOT_ASKED, partial="--skip sel_bench,triton_fwd")),
        **NOTHING),
    "cards that B does not have are not missed": dict(
        a=dict(change=on_two_cards), b=dict(change=without_stages("triton_bwd")), **NOTHING),
    "an ambiguous case": dict(a=one(), b=one(51.0)),
    "an ambiguous case is to fail": dict(
        a=one(), b=one(51.0), code=1, options=["--fail-on", "slower,ambiguous"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_in_two_bundles(name, compared_as):
    want = {"a": {}, "b": {}, "options": [], "code": 0, "says": {}, "cells": {}, **CASES[name]}
    code, result = compared_as(want.pop("a"), want.pop("b"), *want.pop("options"))
    assert code == want.pop("code"), result
    for key, words in want.pop("says").items():
        assert all(any(word in text for text in result[key]) for word in words), result[key]
    for case, (verdict, words) in want.pop("cells").items():
        found = cell(result, case)
        assert found["verdict"] == verdict and words in found["why"]
    assert {key: result[key] for key in want} == want
    gone = [c for c in result["cells"] if c["verdict"] == "GONE"]
    assert "not asked" not in name or gone and all(c["not_asked"] for c in gone)


def test_faster_slower_new_gone(compared_as):
    a = dict(rows=[bench_row(f"t/{n}", 50.0, 1.5) for n in ("slower", "faster", "gone", "lost")])
    times = {"slower": 55.0, "faster": 45.0, "new": 5.0}
    rows = [bench_row(f"t/{name}", us, 1.5) for name, us in times.items()]
    b = dict(rows=[*rows, bench_row("t/lost", 50.0, 1.5, parity={"status": "FAIL"})])
    code, result = compared_as(a, b)
    assert code == 1 and result["floor"] == 0.012
    found = {name: cell(result, f"t/{name}") for name in ("slower", "faster", "new", "gone")}
    assert {name: c["verdict"].lower() for name, c in found.items()} == {n: n for n in found}
    assert found["slower"]["change"] == pytest.approx(0.1)
    lost = cell(result, "t/lost")
    assert (lost["verdict"], lost["b_us"]) == ("GONE", None)
    assert "INVALID: no passed parity" in lost["why"]
    assert any("t/lost VALID -> INVALID" in r for r in result["regressions"])
    code, result = compared_as(b, a, "--fail-on", "ambiguous")
    assert code == 5 and cell(result, "t/slower")["verdict"] == "FASTER"
    assert cell(result, "t/new")["verdict"] == "GONE"  # and nothing says why: not the same


@pytest.mark.parametrize("a, b, taken", [
    (0.012, 0.05, 0.05), (0.05, 0.012, 0.05), (None, 0.05, 0.05), (0.002, None, 0.01),
])  # fmt: skip
def test_the_noisier_box_sets_the_floor(a, b, taken, compared_as):
    """4 % between a quiet and a noisy box is no speedup, whichever of them was first."""

    def of_floor(us, floor):
        def change(events):
            health = next(e for e in events if e["ev"] == "row" and e["row"]["kind"] == "health")
            health["row"]["aa_noise_floor"] = floor

        return dict(rows=[bench_row("t/x", us, None)], change=change)

    _, result = compared_as(of_floor(50.0, a), of_floor(48.0, b))
    assert result["floor"] == taken
    assert (cell(result, "t/x")["verdict"] == "FASTER") == (taken < 0.03)


def test_archives_folders_and_what_is_neither(tmp_path, capsys):
    a = made(tmp_path / "a")
    archive, _, _ = bundle.pack(made(tmp_path / "b"))
    assert compare.main([str(a), str(archive)]) == 0
    (tmp_path / "no.tgz").write_text("no archive")
    for other in (tmp_path / "absent", tmp_path / "no.tgz", tmp_path):
        assert compare.main([str(a), str(other)]) == 2
        assert capsys.readouterr().err.strip()
    with pytest.raises(SystemExit) as stop:
        compare.main([str(a), str(a), "--fail-on", "luck"])
    assert stop.value.code == 2 and "'luck'" in capsys.readouterr().err


def test_text_and_markdown_say_the_same_and_hold_hostile_names(tmp_path, capsys):
    evil = "t/`x` | </table> \x1b[31m @all\n# h"
    folders = [str(made(tmp_path / str(us), [bench_row(evil, us, 1.5)])) for us in (50.0, 60.0)]
    assert compare.main([*folders, "--explain"]) == 1
    text = capsys.readouterr().out
    assert text.splitlines()[2] == "environment  same" and "\x1b" not in text
    assert "SLOWER" in text and "How a case is judged" in text and text.rstrip().endswith("exit 1")
    assert compare.main([*folders, "--md"]) == 1
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


# ---- the score -----------------------------------------------------------------------------------

HEALTH = {"copy_gbs": 4000.0, "gemm_bf16_tflops": 500.0}


def rows_of(*shares, **changes):
    """A row of each case that took its roofline time over its share, half of it if none is given:
    by FLOPs, and for the last by bytes."""
    work = [{"flops": 5e10, "bytes": 1e6}] * 5 + [{"flops": 1e9, "bytes": 4e8}]
    cases = zip(SCORED.items(), shares or [0.5] * 6, work, strict=True)
    return [bench_row(name, 100.0 / share, None, **{**case, **amounts, **changes})
            for (name, case), share, amounts in cases]  # fmt: skip


def test_the_score_is_the_geometric_mean_of_the_shares_of_the_roofline():
    found = score(rows_of(), HEALTH)
    assert found["percent"] == 50.0 and not found["missing"]
    assert found["cases"]["decode 64k"] == {"us": 200.0, "roofline_us": pytest.approx(100.0)}
    assert score(rows_of(1, 1, 1, 0.8, 1, 0.1), HEALTH)["percent"] == pytest.approx(65.642)
    half = {**HEALTH, "gemm_bf16_tflops": 250.0}  # what the card itself can do counts
    assert score(rows_of(0.25, 0.25, 0.25, 0.25, 0.25, 0.5), half)["percent"] == 50.0
    # Blocks that neighbours share have no part in it.
    fast = [{**row, "sharing": "shared"} for row in rows_of(*[1.0] * 6)[:4]]
    assert score([*fast, *rows_of()], HEALTH)["percent"] == 50.0
    assert score(fast, HEALTH)["missing"] == dict.fromkeys(SCORED, "not timed")


def test_an_unstable_row_counts_and_is_named():
    rows = rows_of()
    shaky = rows[3] | {"status": "UNSTABLE", "why": ["drift"]}
    found = score([*rows[:3], shaky, *rows[4:]], HEALTH)
    assert found["percent"] == 50.0 and found["unstable"] == {"prefill 32k backward": "drift"}
    better = score([shaky | {"median_us": 1.0}, *rows], HEALTH)
    assert better["percent"] == 50.0 and not better["unstable"]  # of two rows the VALID one


@pytest.mark.parametrize("case", SCORED)
def test_there_is_no_score_without_a_row_of_each_case_and_the_cards_own_rates(case):
    lacks, absent = "its row lacks time, bytes or FLOPs", "not timed"
    for changes, why in (
        ({"status": "INVALID", "why": 7}, "INVALID: 7"), ({"S": 4096}, absent),
        ({"n_sel": 8}, absent), ({"B": 2}, absent), ({"bytes": None}, lacks),
        ({"median_us": 1e300}, lacks),
    ):  # fmt: skip
        found = score([r | changes if r["case"] == case else r for r in rows_of()], HEALTH)
        assert found["percent"] is None and found["missing"] == {case: why}
    for health in (None, {}, {"copy_gbs": 4000.0}, {**HEALTH, "copy_gbs": 0}):
        found = score(rows_of(), health)
        assert found["percent"] is None and len(found["missing"]) == len(SCORED)


def clean(folder, name, rows=(), **git):
    """A bundle of the sample, packed as a run leaves it."""

    def change(events):
        events[0].update(run_id=f"{name}-run", started=f"2026-11-{name}T10:00:00Z")
        events[0]["git"].update(short=f"c0ffee{name}", **git)

    one = made(folder / name, rows, change=change)
    bundle.write_sums(one)
    return one


def test_verify_computes_the_score_anew(tmp_path):
    folder = clean(tmp_path, "19")
    data = json.loads((folder / "bundle.json").read_text())
    assert data["score"]["percent"] == 32.4096 and not list(verify.check_journal(data, folder))
    (told,) = verify.check_journal({**data, "score": {**data["score"], "percent": 99.0}}, folder)
    assert told == "score in bundle.json is not what events.jsonl gives"


# ---- trend ---------------------------------------------------------------------------------------


def told_by(verb, *args, capsys, code=0):
    assert main([verb, *map(str, args)]) == code
    return capsys.readouterr()


def test_the_trend_is_a_line_for_each_run_by_date_whatever_holds_it(tmp_path, capsys):
    for name in ("21", "19", "20"):
        clean(tmp_path, name, dirty=name == "20")
    bundle.pack(tmp_path / "21")  # beside its folder: one run, one line
    out = told_by("trend", tmp_path, capsys=capsys).out.splitlines()
    assert out[0] == "scope gpu, GPU NVIDIA H200, driver major 580, power limit 700.0"
    assert out[1].split()[:4] == ["date", "commit", "verdict", "score"]
    cells = [" ".join(line.split()) for line in out[2:5]]
    days = ("19", ""), ("20", " DIRTY"), ("21", "")
    begins = [f"2026-11-{day}T10:00 c0ffee{day}{dirty}" for day, dirty in days]
    assert [c.split(" PASS ")[0] for c in cells] == begins
    times = "32.4 % 1.54 ms 8.05 ms 2.96 ms 16.5 ms 14.3 us 18.4 us"
    assert all(c.endswith(times) for c in cells) and out[5:] == [""]


def test_runs_of_two_cards_stand_apart_and_a_missing_case_is_named(tmp_path, capsys):
    def other_card(events):
        events[0]["device"]["name"] = "NVIDIA H100"
        events[0]["run_id"] = "other"

    a = clean(tmp_path, "19")
    b = made(tmp_path / "b", drop=("decode/S=8192/graph",), change=other_card)
    out = told_by("trend", b, a, capsys=capsys).out
    first, second = out.strip().split("\n\n")
    assert "H200" in first and "H100" in second and "H200" not in second
    assert [len(part.splitlines()) for part in (first, second)] == [3, 3]
    assert second.endswith("decode 8k: not timed") and " 32.4 %" not in second


def test_a_bundle_that_does_not_verify_is_left_out_and_named(tmp_path, capsys):
    good, bad = clean(tmp_path, "19"), clean(tmp_path, "20")
    (bad / "env.txt").write_text("other\n")
    (tmp_path / "no.tgz").write_text("no archive")
    said = told_by("trend", tmp_path, capsys=capsys, code=5)
    assert "c0ffee19" in said.out and "c0ffee20" not in said.out
    assert f"left out: {bad} does not verify: env.txt was changed after the run" in said.err
    assert "no.tgz cannot be unpacked" in said.err
    shutil.rmtree(good)
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "absent", tmp_path / "empty"):
        assert str(path) in told_by("trend", path, capsys=capsys, code=2).err
    with pytest.raises(SystemExit):
        trend.main([])


# ---- export --------------------------------------------------------------------------------------


def assert_is_trace(one):
    """The rules of flashinfer-bench's Trace, Workload, Evaluation and Performance."""
    assert type(one["definition"]) is type(one["solution"]) is str
    work, found = one["workload"], one["evaluation"]
    assert set(work) == {"uuid", "axes", "inputs"} and len(work["uuid"]) == 36
    assert all(type(n) is int and n >= 0 for n in work["axes"].values()) and work["axes"]
    assert all(spec == {"type": "random"} for spec in work["inputs"].values())
    assert found["environment"]["hardware"] and found["timestamp"]
    assert all(isinstance(v, str) for v in found["environment"]["libs"].values())
    of_status = {"PASSED": [1, 1], "INCORRECT_NUMERICAL": [1, 0], "RUNTIME_ERROR": [0, 0]}
    assert [n in found for n in ("correctness", "performance")] == of_status[found["status"]]
    assert all(float(v) >= 0 or v == "NaN" for v in found.get("correctness", {}).values())
    assert all(v >= 0 for v in found.get("performance", {}).values())


def test_valid_and_failed_rows_are_exported_as_traces(tmp_path, capsys):
    lost = [bench_row(f"x/{name}", 5.0, 1.1, status="FAILED", why=["boom"], N=4, parity=parity)
            for name, parity in (("wrong", {"max_abs": 0.5}), ("raised", None))]  # fmt: skip
    folder, out = made(tmp_path / "a", lost), tmp_path / "out.jsonl"
    data = rebuild(folder)[0]
    traces = {r["case"]: export.trace(r, data) for r in data["bench"]}
    for one in traces.values():
        assert_is_trace(one)
    assert traces["x/wrong"]["evaluation"]["status"] == "INCORRECT_NUMERICAL"
    assert traces["x/raised"]["evaluation"]["status"] == "RUNTIME_ERROR"
    assert "boom" in traces["x/raised"]["evaluation"]["log"]
    assert told_by("export", folder, "--trace", out, capsys=capsys, code=5).err and not out.exists()


def test_the_exported_file_holds_what_the_rows_do(tmp_path, capsys):
    shaky = bench_row("x/shaky", 5.0, 1.1, status="UNSTABLE", why=["drift"])
    no_kernel = bench_row("nccl/all_reduce", 5.0, None, bench="nccl")
    shared = {**real_rows()[1], "case": "shared", "sharing": "shared"}
    folder, out = clean(tmp_path, "19", [shaky, no_kernel, shared]), tmp_path / "deep/out.jsonl"
    said = told_by("export", folder, "--trace", out, capsys=capsys).err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    for one in lines:
        assert_is_trace(one)
    count = len(rebuild(folder)[0]["bench"]) - 2
    assert len(lines) == count and said == f"{count} traces in {out}; rows left out: 2\n"
    (one,) = [t for t in lines if t["evaluation"]["log"].startswith("shared:")]
    assert one["definition"] == "nsa_prefill_full_fwd_shared_bf16"
    row = real_rows()[1]
    (one,) = [t for t in lines if row["case"] in t["evaluation"]["log"]]
    assert one["definition"] == "nsa_prefill_full_fwd_bf16" and one["solution"] == "triton_c0ffee19"
    assert one["workload"]["axes"] == {n: row[n] for n in one["workload"]["axes"]}
    assert {"S": 32768, "HQ": 64}.items() <= one["workload"]["axes"].items()
    found = one["evaluation"]
    base, ratio = pytest.approx(8.05 * 3.51), pytest.approx(3.51)
    times = {"latency_ms": 8.05, "reference_latency_ms": base, "speedup_factor": ratio}
    libs = {"torch": "2.11.0+cu130", "triton": "3.6.0", "cuda": "13.0", "driver": "580.95"}
    assert found["performance"] == times
    assert found["correctness"] == {"max_relative_error": "NaN", "max_absolute_error": 3e-3}
    assert found["environment"] == {"hardware": "NVIDIA_H200", "libs": libs}
    problems = {(t["definition"], json.dumps(t["workload"]["axes"])) for t in lines}
    assert len({t["workload"]["uuid"] for t in lines}) == len(problems)


def test_export_says_what_it_cannot_do(tmp_path, capsys):
    said = told_by("export", tmp_path / "absent", "--trace", "x", capsys=capsys, code=2)
    assert "neither a folder" in said.err
    folder = clean(tmp_path, "19")
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out.jsonl"
    assert "wants a file" in told_by("export", folder, "--trace", out, capsys=capsys, code=2).err
    with pytest.raises(SystemExit):
        export.main([str(folder)])
