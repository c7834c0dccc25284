"""Parts of the `run` verb by themselves, without a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.records import read_csv, write_csv
from nsa.tests.oneshot_faults import rows_of
from nsa.tests.oneshot_samples import bench_row, raw_times
from scripts.oneshot.box import cards
from scripts.oneshot.record.journal import Ballast, utc_now
from scripts.oneshot.record.judge import Status, judge
from scripts.oneshot.record.model import RunRecord, Stage, StageResult
from scripts.oneshot.record.redact import Redactor
from scripts.oneshot.record.rows import parse_row
from scripts.oneshot.report.tables import flat
from scripts.oneshot.run import runner, stages
from scripts.oneshot.run.place import Place
from scripts.oneshot.run.runner import Run


@pytest.fixture
def half_run(tmp_path):
    """A Run without its beginning: the folder, the console, nothing that was stopped."""
    run = object.__new__(Run)
    run.folder, run.stop, run.redactor = tmp_path, SimpleNamespace(by=None), Redactor({})
    run.said, run.place = [], Place(tmp_path)
    run.progress = SimpleNamespace(line=lambda text="": run.said.append(text))
    run.watch = SimpleNamespace(why_not=lambda stage: None)
    run.args, run.stages = SimpleNamespace(budget=None), stages.plan("full")
    run.record = RunRecord()
    return run


@pytest.mark.parametrize("full", [False, True])
def test_a_render_that_was_cut_short_says_which_report_is_there(half_run, monkeypatch, full):
    (half_run.folder / "report.md").write_text("short\n")

    def begin(*_args, stderr, **_):
        stderr.write("Killed\n")
        if full:
            (half_run.folder / "report.md").write_text("full\n")
        return SimpleNamespace(returncode=1, pid=0, poll=lambda: 1)

    monkeypatch.setattr(runner.subprocess, "Popen", begin)
    half_run._render(1.0)
    text = "\n".join(half_run.said)
    assert ("report.md is full" in text) is full and ("the short one" in text) is not full
    assert "Killed" in text and "scripts.oneshot render" in text


def test_sources_that_cannot_be_looked_at_again_cost_nothing(half_run, monkeypatch):
    half_run.git, half_run._commit, half_run.event = {"commit": "a"}, None, pytest.fail

    def vanished(*_):
        raise OSError("the tree is gone")

    for facts in (vanished, lambda *_: {"commit": None, "problem": "no git"}):
        monkeypatch.setattr(runner.checkout, "git_facts", facts)
        half_run._look_at_sources_again(1.0)


def times(profile):
    """The seconds that each stage took in the runs of a profile that are kept."""
    took = {}
    for row in read_csv(stages.ROOT / "bench" / "results" / "stage_seconds.csv"):
        if row["profile"] == profile:
            took.setdefault(row["stage"], []).append(float(row["seconds"]))
    return took


@pytest.mark.parametrize("profile", ["standard", "quick"])
def test_estimates_are_what_the_kept_runs_took(profile):
    """A budget skips stages by them, and --dry-run adds them up."""
    took = times(profile)
    if profile == "quick":  # stages that are the standard profile's have a later report
        later, same = times("standard"), {s.id: s.argv for s in stages.plan("standard")}
        shared = [s.id for s in stages.plan("quick") if same.get(s.id) == s.argv]
        took.update({id: later[id] for id in shared})
    known = [s for s in stages.plan(profile) if s.id in took]
    unknown = {s.id for s in stages.plan(profile)} - {s.id for s in known}
    # Of no kept run: their commands are other ones since.
    assert unknown <= {"prefill_parity", "decode_parity", "more_parity", "prefill_bench",
                       "decode_serving", "train_showcase"}  # fmt: skip
    whole = 0.0
    for stage in known:
        mean = sum(took[stage.id]) / len(took[stage.id])
        assert abs(stage.estimate_s - mean) <= max(3.0, 0.3 * mean), (stage.id, mean)
        whole += mean
    assert sum(s.estimate_s for s in known) == pytest.approx(whole, rel=0.1)


# ---- what a stage has to show --------------------------------------------------------------------


COUNT = """
import json, sys, pytest
class Count:
    def pytest_collection_finish(self, session):
        print(json.dumps([name, len(session.items)]))
for name, argv in json.loads(sys.argv[1]):
    pytest.main([*argv, "--collect-only", "-qq"], plugins=[Count()])
"""


def test_the_least_number_of_tests_is_that_of_today():
    """The CPU profile's stages have all of their tests. For a GPU `least` is about half of them,
    since which sizes there are differs by card."""
    names = "triton_fwd", "prefill_parity", "backward_parity", "probes", "triton_wrapper"
    planned = {s.id: s for s in stages.plan("cpu") if s.id in names}
    asked = json.dumps([(name, planned[name].argv[3:]) for name in names])
    done = subprocess.run(
        [sys.executable, "-c", COUNT, asked], cwd=stages.ROOT, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))
    assert set(found) == set(names), done.stdout + done.stderr
    for name, count in found.items():
        least = planned[name].least
        assert 0.9 * count <= least <= count, f"{name}: least={least}, {count} tests"


def test_a_stage_of_many_files_needs_tests_of_each():
    """Each file of MORE_LEAST exists, and a run without one of them is not whole."""
    stage = next(s for s in stages.plan("standard") if s.id == "more_parity")
    files = {name: next((stages.ROOT / "nsa" / "tests").glob(f"{name}*.py")).name
             for name in stage.of_files}  # fmt: skip
    passed = {"kind": "test", "outcome": "passed"}
    row = lambda file, i: {**passed, "nodeid": f"nsa/tests/{file}::t[{i}]"}
    parity = {"kind": "parity", "status": "PASS", "case": "c", "why": []}
    whole = [row(files[n], i) for n, least in stage.of_files.items() for i in range(least)]
    whole += [row("test_sums.py", i) for i in range(stage.least - len(whole))]
    assert judge(stage, 0, [*whole, parity]).status is Status.PASS
    for name, file in files.items():
        rows = [row("test_sums.py", i) if file in r["nodeid"] else r for i, r in enumerate(whole)]
        said = judge(stage, 0, [*rows, parity])
        assert said.status is Status.NOT_RUN and f"0 tests of {name}*.py where" in said.reason


DIES = """
import os, pytest
@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    if report.when == "teardown":
        os._exit(0)
"""


def test_an_early_exit_with_code_0_is_no_pass(tmp_path):
    (tmp_path / "dies.py").write_text(DIES)
    argv = "-m pytest -q nsa/tests/test_blocks.py -p no:cacheprovider -p dies".split()
    done, rows = rows_of(argv, PYTHONPATH=os.fspath(tmp_path))
    rows = [parse_row(json.dumps(row)) for row in rows]
    assert done.returncode == 0 and sum(r["kind"] == "test" for r in rows) == 1
    said = judge(Stage("s", "s", ("{python}", *argv), proof="tests", timeout_s=1), 0, rows)
    assert said.status is Status.CRASH and "announced tests reported" in said.reason


# ---- resume --------------------------------------------------------------------------------------


def planned(name):
    return next(s for s in stages.plan("full") if s.id == name)


@pytest.fixture
def resumed(half_run):
    """`resumed(stage, rows, files)`: what a run takes over of a PASS that left these."""
    half_run.git, half_run.events = COMMIT, []
    half_run.record = RunRecord(env_fingerprint="f")
    half_run.ballast = Ballast(half_run.folder)
    half_run.progress.begin = lambda stage: None
    half_run.event = lambda ev, **fields: half_run.events.append((ev, fields))
    prev = half_run.folder / "prev" / "r"

    def ask(stage, rows=(), files=(), raw=True, table=None):
        done = StageResult(stage.id, Status.PASS, argv=stage.argv, env=dict(stage.env),
                           log=stage.log_path, started=utc_now())  # fmt: skip
        old = RunRecord(run_id="r", git=half_run.git, env_fingerprint="f",
                        results={stage.id: done}, rows={stage.id: list(rows)})  # fmt: skip
        for name in (stage.log_path, *files):
            (prev / name).parent.mkdir(parents=True, exist_ok=True)
            (prev / name).write_text("{}")
            if name.endswith(".csv"):
                lines = table or [flat(r) if r["parity"] else r for r in rows]
                write_csv(str(prev / name), lines, ("case", "ms", "speedup"))
        if raw and rows:
            named = ("bench", "case", "candidate", "cache")
            (prev / "bench").mkdir(exist_ok=True)
            (prev / "bench" / "samples.jsonl").write_text("".join(
                json.dumps({**{k: r[k] for k in named}, **(raw_times(r) if raw is True else raw)})
                + "\n"
                for r in rows
            ))  # fmt: skip
        half_run.previous = [(old, prev)]
        return half_run._reusable(stage)

    return ask


def test_health_is_taken_over_with_its_file_only(resumed, half_run):
    stage = planned("health")
    assert resumed(stage) is None
    assert resumed(stage, files=["health.json"]).resumed_from == "r"
    assert (half_run.folder / "health.json").read_text() == "{}"
    card = cards._own(stage, cards.Card(1, "GPU-2"))  # writes no file, see bench/health.py
    assert card.outputs == ()


def test_an_unstable_bench_runs_again(resumed):
    stage = planned("sel_route")
    rows = [bench_row("a", 5.0, 1.5), bench_row("b", 5.0, 1.5, status="UNSTABLE", why=["IQR"])]
    assert resumed(stage, rows, stage.outputs) is None
    assert resumed(stage, rows[:1], stage.outputs) is not None


def test_raw_times_are_taken_over_with_their_stage(resumed, half_run):
    row = bench_row("mine", 5.0, 1.5)
    line = lambda case: json.dumps({**{k: row[k] for k in ("bench", "candidate", "cache")},
                                    "case": case, **raw_times(row)})  # fmt: skip
    source = half_run.folder / "prev" / "r" / "bench" / "samples.jsonl"
    source.parent.mkdir(parents=True)
    source.write_text(f"{line('mine')}\n{line('other')}\nhalf a li")
    target = half_run.folder / "bench" / "samples.jsonl"
    target.parent.mkdir()
    target.write_text(line("of this run") + "\n")
    stage = planned("sel_route")
    for _ in range(2):  # never twice
        assert resumed(stage, [row], stage.outputs, raw=False)
        assert target.read_text() == f"{line('of this run')}\n{line('mine')}\n"


def test_rows_that_do_not_verify_are_not_taken_over(resumed, half_run):
    stage, row = planned("sel_route"), bench_row("a", 5.0, 1.5)
    half_run.note = lambda text, level: said.append(text)
    said = []
    assert resumed(stage, [row], stage.outputs)
    for wrong in ({"speedup": 3.0}, {"median_us": 4.0}, {"parity": None}):
        assert resumed(stage, [{**row, **wrong}], stage.outputs, raw=raw_times(row)) is None
        assert f"stage {stage.id} is not taken over: bench a" in said[-1]
    table = {**flat(row), "ms": 0.001}
    assert resumed(stage, [row], stage.outputs, table=[table]) is None
    assert "sel_route.csv:2: ms is '0.001', and '0.005' by its row" in said[-1]
    (half_run.folder / "prev" / "r" / "bench" / "samples.jsonl").unlink()
    assert resumed(stage, [row], stage.outputs, raw=False) is None
    assert "no bench/samples.jsonl" in said[-1]


LONG_AGO = "2025-11-21T01:34:55.000Z"
COMMIT = {"commit": "a", "short": "a"}


@pytest.mark.parametrize(("of_stage", "of_run", "taken"), [
    ({}, {}, True), ({"resumed_from": "the first"}, {}, True),
    ({"started": None}, {"started": utc_now()}, True),
    *((changes, {}, False) for changes in (
        {"argv": ("{python}", "other.py")}, {"env": {"NSA_USE_FA2": "1"}},
        {"status": Status.FAIL, "reason": "x"}, {"status": Status.TIMEOUT, "reason": "x"},
        {"started": LONG_AGO},  # taken over by yesterday's run already
        {"started": "2999-01-01T00:00:00.000Z"},  # nothing is that fresh
    )),
    ({"started": LONG_AGO}, {"started": utc_now()}, False),
    ({"started": None}, {"started": None}, False),
    *(({}, changes, False) for changes in (
        {"env_fingerprint": "another box"}, {"git": {"commit": "b", "short": "b"}},
        *({"git": {**COMMIT, name: "c0ffee"}} for name in ("diff_sha256", "source_sha256")),
        {"git": {**COMMIT, "changed_during_run": True}},
    )),
])  # fmt: skip
def test_only_the_same_question_on_the_same_box_is_taken_over(
    resumed, half_run, of_stage, of_run, taken
):
    stage = planned("more_parity")
    assert resumed(stage)
    ((old, folder),) = half_run.previous
    old.results[stage.id] = replace(old.results[stage.id], **of_stage)
    half_run.previous = [(replace(old, **of_run), folder)]
    found = half_run._reusable(stage)
    assert (found is not None) == taken
    if taken:  # the run that it is really of
        assert found.resumed_from == of_stage.get("resumed_from", "r")


@pytest.mark.parametrize(("newer", "taken"), [
    ({"status": Status.PASS}, "newer"), (None, "r"),
    ({"status": Status.NOT_RUN, "reason": "x"}, "r"),
    ({"status": Status.INFRA, "reason": "x", "kind": "PREEMPTED"}, "r"),
    ({"status": Status.TIMEOUT, "reason": "x", "kind": "BUDGET"}, "r"),
    ({"status": Status.PASS, "argv": ("{python}", "other.py")}, "r"),
    ({"status": Status.FAIL, "reason": "x"}, None),  # an older PASS would hide it
    ({"status": Status.FAIL, "reason": "x", "argv": ("{python}", "other.py")}, None),
])  # fmt: skip
def test_the_newest_proven_result_is_taken_over(resumed, half_run, newer, taken):
    """Also where the run before was cut off, cut short or asked for something else."""
    stage = planned("more_parity")
    assert resumed(stage)
    ((old, folder),) = half_run.previous
    results = {stage.id: replace(old.results[stage.id], **newer)} if newer else {}
    half_run.previous.insert(0, (replace(old, run_id="newer", results=results), folder))
    half_run.previous.insert(0, (RunRecord(), folder))  # killed before the box was known
    found = half_run._reusable(stage)
    assert (found and found.resumed_from) == taken


@pytest.mark.parametrize("status", [*Status, None])
def test_a_stage_waits_for_a_pass_and_for_nothing_less(half_run, status):
    """No time of a kernel whose parity stage timed out, was skipped or never ran."""
    stage = planned("fa2_bench")
    if status is not None:
        half_run.record.results[stage.after] = StageResult(stage.after, status, "as it went")
    found = half_run._why_not(stage, None)
    if status is Status.PASS:
        assert found is None
    else:
        assert found[0] is (Status.SKIPPED if status is Status.SKIPPED else Status.NOT_RUN)
        assert found[1].startswith("needs fa2_varlen, ")


@pytest.mark.parametrize(
    ("name", "maker"), [("fa2_bench", "fa2_varlen"), ("threshold", "sel_route")]
)
@pytest.mark.parametrize(
    ("status", "kind", "dragged"),
    [(Status.NOT_RUN, "BUDGET", "BUDGET"), (Status.TIMEOUT, "BUDGET", "BUDGET"),
     (Status.SKIPPED, "OOM_DEVICE", "OOM_DEVICE"), (Status.CRASH, "OOM_DEVICE", None),
     (Status.FAIL, "PARITY", None), (Status.SKIPPED, None, None)],
)  # fmt: skip
def test_what_needs_a_stage_that_was_cut_is_cut_as_well(
    half_run, name, maker, status, kind, dragged
):
    half_run.record.results[maker] = StageResult(maker, status, "as it went", kind)
    found = half_run._why_not(planned(name), None)
    assert found[1].startswith("needs ") and found[2] == dragged
