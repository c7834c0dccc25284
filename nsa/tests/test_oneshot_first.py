"""The first screen of the report: five questions, and nothing in an answer that was not proven."""

from __future__ import annotations

import json
import re
import shlex

import pytest

pytest.importorskip("jinja2", reason="the report needs jinja2")

from bench import recorded
from nsa.tests.oneshot_samples import bench_row, parity_row, real_rows, test_row, write_sample
from nsa.tests.test_oneshot_report import PROVEN, SIZES, with_events, with_rows
from nsa.tests.test_oneshot_report import committed_rows as committed_rows
from scripts.oneshot.record.reading import held_to_rules, rebuild
from scripts.oneshot.report import committed, evidence, first
from scripts.oneshot.report import render as report
from scripts.oneshot.report.blocks import Bars, Shape, View


def view_of(folder, **changes):
    """The view of the run in `folder`, whose data has `changes`."""
    data = {**rebuild(folder)[0], **changes}
    kinds = {"test": "tests", "parity": "parity", "bench": "bench"}
    rows = {kind: held_to_rules(data[key], kind)[0] for kind, key in kinds.items()}
    return View(data, rows, evidence.noise_floor(data["health"]), folder)


def told(card):
    """The answer and everything under it as one text."""
    blocks = [b if isinstance(b, (str, list)) else vars(b) for b in card.blocks]
    return "\n".join([card.answer, *map(str, blocks)])


@pytest.fixture
def sample(tmp_path):
    write_sample(tmp_path, "all_pass")
    return tmp_path


# ---- the box -------------------------------------------------------------------------------------


def test_a_box_is_good_by_its_shares_and_by_nothing_that_was_not_asked(sample):
    card = first.box(view_of(sample))
    assert (card.answer, card.colour) == ("Yes.", "good")
    for words in ("device copy 4010 GB/s: **83 %** of this card's nominal 4814",
                  "did not throttle", "nobody else was on it"):  # fmt: skip
        assert words in told(card)
    known = view_of(sample).data["health"]
    kept = {"memory_test_mib": 8192, "memory_test_patterns": 130, "bf16_product_repeats": 900}
    said = "8192 MiB of its memory kept 130 patterns, and 900 matmuls were right and alike"
    assert said in told(first.box(view_of(sample, health=known | kept)))
    unasked = {"throttled": None, "memory_used_by_others_mib": None}
    card = first.box(view_of(sample, health=known | unasked))
    assert "throttle" not in told(card) and "nobody" not in told(card)
    for unmeasured in (None, {"status": "OK"}, {"copy_gbs": 4010.0}):
        assert first.box(view_of(sample, health=unmeasured)).answer == "Not measured."


card_ = lambda **facts: {"device": {"name": "X", **facts}}
health = lambda **row: {"health": row}
FULL = dict(doctor=[{"name": "disk", "level": "BLOCK", "text": "full"}])


@pytest.mark.parametrize(("changes", "colour", "words"), [
    (card_(power_limit_w=300, power_default_w=450), "doubt", "capped to 300 of 450 W"),
    (card_(shared=True), "doubt", "SHARED GPU"), (card_(mig=True), "doubt", "MIG"),
    (health(throttled=True), "doubt", "throttled while"), (FULL, "bad", "full"),
    (health(status="WARN", why=["slow copies"]), "doubt", "WARN: slow copies"),
    (health(status="FAIL", why=["3 w"], memory_wrong_words=3), "bad", "FAIL: 3 w"),
    (card_(name=None, reason="gone"), "bad", "No GPU answered: gone"),
])  # fmt: skip
def test_what_holds_a_box_back_comes_before_its_numbers(sample, changes, colour, words):
    card = first.box(view_of(sample, **changes))
    assert (card.answer, card.colour) == ("No.", colour)
    assert words in card.blocks[0][0]


# ---- the kernels ---------------------------------------------------------------------------------


def test_kernels_are_counted_from_the_rows_and_not_from_a_verdict_beside_them(tmp_path):
    """A stranger's bundle.json may claim what its rows do not hold."""
    rows = [parity_row("p/right"), parity_row("p/wrong", max_abs=9.0), test_row("a::b")]
    view = view_of(with_rows(tmp_path, rows, stage="triton_fwd"))
    view.data["verdict"].update(status="PASS", parity_pass=2, parity_total=2)
    card = first.kernels(view)
    total = len(view.rows["parity"])
    assert card.answer == f"**No**: 1 of {total} results are wrong." and card.colour == "bad"
    assert f"**{total - 1} of {total}** results" in told(card)
    assert first.failed(view).colour == "bad"  # and the stage is named, whatever it says itself
    view.rows["parity"][-1]["status"] = "INVALID"
    words = first.kernels(view).answer
    assert words.startswith("**No**: ") and words.endswith(f"1 of {total} results are not proven.")
    assert "`triton_fwd`" in told(first.failed(view))


# ---- the speed -----------------------------------------------------------------------------------

REAL = real_rows()[0]
TOY = bench_row("decode/S=512", 13.0, 0.7, bench="decode", S=512, dim=256)
PART = bench_row("prefill/S=8192", 9.0, 3.0, bench="prefill", S=8192, op="sliding")
UNPROVEN = [
    {**REAL, "status": status, "why": ["no"]} for status in ("INVALID", "FAILED", "SKIPPED")
]


def speed_of(folder, *rows, **changes):
    return first.speed(view_of(with_rows(folder, rows, stage="prefill_bench"), **changes))


@pytest.mark.parametrize("row", [TOY, PART, *UNPROVEN])
def test_what_is_no_proven_time_of_real_sizes_shows_no_number_first(tmp_path, row):
    card = speed_of(tmp_path, row)
    assert card.answer.startswith("No real sizes were timed") and not card.blocks
    text = report.render_text(rebuild(tmp_path)[0], tmp_path, Shape())
    assert ("0.70x" in text) == (row is TOY)  # what was timed is below


def test_speed_that_is_unstable_has_its_mark_and_one_within_the_noise_no_ratio(tmp_path):
    unstable = {**REAL, "status": "UNSTABLE", "why": ["drift"]}
    noise = {**real_rows()[2], "speedup": 1.005, "speedup_ci95": [1.002, 1.008]}
    card = speed_of(tmp_path, unstable, noise)
    (bars,) = [b for b in card.blocks if isinstance(b, Bars)]
    assert [bar.ours for bar in bars.rows] == ["1.54 ms\\*", "2.96 ms"]
    assert bars.rows[1].ratio == evidence.NO_DIFFERENCE
    wide = evidence.bar({**unstable, "D": 192}, None).name
    assert wide == "prefill, 8k tokens, heads of 192, forward" != bars.rows[0].name
    assert card.answer == "prefill 1.13x as fast as dense attention." and card.colour == "doubt"
    assert "UNSTABLE" in told(card)


def test_the_same_card_is_the_one_of_that_name_its_newest_valid_row_and_its_sizes(committed_rows):
    key = recorded.key_of(REAL["bench"], REAL)
    like = dict(PROVEN, op="full", S=8192, commit="c")
    others = [dict(status="UNSTABLE"), dict(parity="FAIL"), dict(device="NVIDIA H100"), dict(D=64)]
    others += [dict(op="win"), dict(ms=""), dict(direction="bwd"), dict(sharing="shared")]
    committed_rows("2026-11-20", "prefill-a.csv", dict(like, ms=9.0, commit="old"))
    committed_rows("2026-11-22", "prefill-b.csv", *(dict(like, **{"ms": 1.0, **o}) for o in others),
                   dict(like, ms=7.0, commit="new"))  # fmt: skip
    committed_rows("2026-11-23", "prefill-c.csv", dict(nothing="of use"))
    assert committed.times("NVIDIA H200")[key] == (7000.0, "new")
    assert key not in committed.times("NVIDIA")


def test_others_are_those_timed_in_pairs_on_the_same_card(sample, committed_rows):
    like = dict(PROVEN, against="sfnsa", commit="c", S=8192)
    others = [dict(against="dense"), dict(S=32768, device="NVIDIA H100"), dict(S=32768, HQ=32)]
    others += [dict(sharing="shared"), dict(op="sel", against="vllm"), dict(S=65536)]
    committed_rows("2026-11-20", "peers-a.csv", dict(like, speedup=1.83),
                   *(dict(like, speedup=6.66, **other) for other in others))  # fmt: skip
    text = told(first.speed(view_of(sample)))
    assert "sfnsa, forward, 1.83 at 8k tokens." in text
    assert "6.66" not in text and "vllm" not in text  # of other blocks, and of selection alone
    assert committed.pairs("NVIDIA H200", {**REAL, **SIZES, "HQ": 128}) == {}


# ---- what to set ---------------------------------------------------------------------------------


def to_set(folder, cells, flags, device, **proposal):
    """The card of a run with these cells, (length, ratio) each, and this proposal."""
    like = dict(mode="route", dist="few", wall_speedup_ci95=[9.0, 9.5])
    rows = [bench_row(f"sel/route/L={L}/{ratio}", 9.0, ratio, L=L, **like) for L, ratio in cells]
    with_rows(folder, [*rows, {"kind": "recommend", "confidence": "as measured", **proposal}])
    flags = [{"name": n, "value": value, "source": s} for n, (value, s) in flags.items()]
    (folder / "routing.json").write_text(json.dumps({"flags": flags}))
    return first.to_set(view_of(folder, **device))


AUTO, MINE = ("auto", "default"), (16, "base.yaml")


@pytest.mark.parametrize(("set_to", "best", "cells", "line"), [
    (AUTO, 64, {64: 2.0, 256: 2.0}, None), (AUTO, 16, {16: 2.0, 64: 2.0}, 16),
    (MINE, 16, {16: 2.0, 64: 2.0}, None), (MINE, 64, {16: 0.5, 64: 2.0}, 64),
    (MINE, 64, {64: 2.0}, None),  # nothing shorter speaks against a smaller value
    (AUTO, 16, {16: 2.0, 256: 0.5}, None),  # its rows do not carry it
    (AUTO, None, {64: 0.5}, None),
])  # fmt: skip
def test_the_line_to_paste_is_there_where_the_rows_ask_for_another_value(
    tmp_path, set_to, best, cells, line
):
    flags = {"NSA_SEL_TRITON_MIN_L": set_to}
    card = to_set(tmp_path, cells.items(), flags, {}, sel_triton_min_L=best)
    text = told(card).replace("\\n", "\n")
    assert f"export NSA_SEL_TRITON_MIN_L={line}\n" in text if line else "export" not in text
    assert card.answer.startswith("This line." if line else "Nothing: ")


@pytest.mark.parametrize(("sm", "switch", "cmp", "there"), [
    ("9.0", "auto", 3, False), ("8.9", "auto", 3, True), ("9.0", False, 3, True),
    ("8.9", "auto", None, False),
])  # fmt: skip
def test_fa2_is_to_be_set_only_where_triton_is_off(tmp_path, sm, switch, cmp, there):
    flags = {"NSA_SEL_TRITON_MIN_L": (64, "default"), "NSA_USE_TRITON_SEL": (switch, "default")}
    lengths = dict(sel_triton_min_L=64, fa2_min_len_win=64, fa2_min_len_cmp=cmp)
    text = told(to_set(tmp_path, [(64, 2.0)], flags, card_(sm=sm), **lengths))
    line = "export NSA_USE_FA2=1 NSA_FA2_MIN_LEN_WIN=64 NSA_FA2_MIN_LEN_CMP=3"
    assert (line in text) == there


# ---- what failed ---------------------------------------------------------------------------------


def test_a_command_has_no_hole(tmp_path):
    """A command that lacks its middle cannot be run: in all three reports it is whole."""
    argv = ["{python}", "-m", "tests", *(f"nsa/tests/test_{i}.py" for i in range(450))]

    def change(events):
        is_end = lambda e: e["ev"] == "stage_end" and e["stage"] == "triton_bwd"
        next(e for e in events if is_end(e))["result"]["argv"] = argv

    with_events(tmp_path, "gpu_fail", change)
    data, command = rebuild(tmp_path)[0], shlex.join(["python", *argv[1:]])
    assert len(command) > 9000
    page, whole = report.render_page(data, tmp_path), report.render_text(data, tmp_path, Shape())
    for text in (report.issue_text(data, tmp_path), whole, page):
        assert command in text[: text.index("Failures")]


@pytest.mark.parametrize(("status", "words"), [
    ("STOPPED", "The run was stopped."), ("BROKEN", "The run did not end by itself."),
    ("INVALID", "No timed case is VALID."), ("NOT_RUN", "Nothing was proven."),
    ("FAIL", "Something private could not be redacted."),
])  # fmt: skip
def test_a_verdict_that_no_stage_explains_is_not_called_nothing(sample, status, words):
    view = view_of(sample)
    view.data["verdict"]["status"] = status
    card = first.failed(view)
    assert (card.answer, card.colour) == (words, "bad")


def test_the_page_has_the_cards_before_anything_else(sample):
    text = report.render_page(rebuild(sample)[0], sample)
    asked = re.findall(r'<div class="card \w+(?: big)?">\n<h2>(.*?)</h2>', text)
    assert asked == [card.question for card in first.answers(view_of(sample))]
    assert len(asked) == 5 and text.index("<h2>What failed?</h2>") < text.index("<nav>")
