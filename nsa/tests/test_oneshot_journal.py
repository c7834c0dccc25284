"""Is what is on disk valid at every second, and does the journal alone give the record?"""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import pytest

from bench.records import NUMBERS
from nsa.tests.oneshot_samples import bench_row, parity_row, write_sample
from nsa.tests.oneshot_samples import test_row as row_of_test
from scripts.oneshot.record import journal
from scripts.oneshot.record.journal import Ballast, Journal, read_events, write_json
from scripts.oneshot.record.judge import Status, judge, verdict
from scripts.oneshot.record.model import RunRecord, Stage, StageResult
from scripts.oneshot.record.outputs import repro
from scripts.oneshot.record.rows import RowError, parse_row
from scripts.oneshot.run.stages import plan

FULL = OSError(errno.ENOSPC, "No space left on device")


def test_journal_survives_a_full_disk(tmp_path, monkeypatch):
    log = Journal(tmp_path / "events.jsonl")
    log.append("a", n=1)
    real = journal.os.write

    def full(fd, data):
        monkeypatch.setattr(journal.os, "write", real)
        real(fd, data[:5])  # half a line gets through
        raise FULL

    monkeypatch.setattr(journal.os, "write", full)
    log.append("b", n=2)
    log.append("c", n=3)
    log.close()
    assert [e["ev"] for e in read_events(tmp_path / "events.jsonl")] == ["a", "c"]
    assert log.lost == 1


def test_ballast_makes_room_for_the_verdict_and_json_holds_no_nan(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / ".ballast")  # a pipe is no file
    assert read_events(tmp_path / ".ballast") == []
    ballast = Ballast(tmp_path, ["logs/a.log", "sanity.out"])
    assert ballast.path.stat().st_size == journal.BALLAST_BYTES
    (tmp_path / "logs").mkdir()
    logs = [tmp_path / "logs" / "a.log", tmp_path / "sanity.out"]
    for log in logs:
        log.write_text("x" * 1000)
    real = journal.write_atomic

    def needs_room(path, text):
        if ballast.path.exists() or any(log.exists() for log in logs):
            raise FULL
        real(path, text)

    monkeypatch.setattr(journal, "write_atomic", needs_room)
    assert ballast.guarded(lambda: journal.write_json(tmp_path / "bundle.json", {"a": 1}))
    assert json.loads((tmp_path / "bundle.json").read_text()) == {"a": 1}
    with pytest.raises(ValueError):
        write_json(tmp_path / "x", {"a": float("nan")})


# ---- rows ----------------------------------------------------------------------------------------


def checked(row):
    return parse_row(json.dumps(row))


@pytest.mark.parametrize(("changes", "status", "why"), [
    *(({"path_taken": path}, "PASS", "") for path in ("triton", "triton_ranges_single")),
    ({"path_requested": "sdpa", "path_taken": "sdpa", "launches": {}}, "PASS", ""),
    *(({"path_taken": path}, "INVALID", f"asked for triton, ran {path or ''}") for path in (
        None, 3, "triton/dense",
        *"sdpa triton_ triton_None triton_dense_sdpa triton_sdpa_dense".split(),
    )),
    ({"path_requested": "sdpa", "path_taken": "sdpa_dense"}, "INVALID", "asked for sdpa"),
    *(({"launches": launches}, "INVALID", "no launch") for launches in ({}, None, {"_k": 0})),
    *(({name: None}, "FAIL", f"{name} is missing") for name in ("mae", "max_abs", "limit_max_abs")),
    ({"mae": 9.0, "limit_mae": None}, "FAIL", "limit_mae is missing"),
    ({"max_abs": float("inf")}, "FAIL", "not finite"),
    ({"margin": 1.01}, "FAIL", "margin 1.01 is over 1"),
    ({"mae": 1.5e-3}, "FAIL", "mae 0.0015 is over its limit 0.001"),
    ({"max_abs": 6.3e-3}, "FAIL", "max_abs 0.0063 is over its limit 0.0062"),
    ({"worst_row": float("nan")}, "FAIL", "not finite: worst_row"),
])  # fmt: skip
def test_parity_row_is_held_to_its_evidence(changes, status, why):
    row = checked(parity_row("c", **changes))
    assert row["status"] == status and (not why or any(why in text for text in row["why"]))


@pytest.mark.parametrize(("status", "changes"), [
    ("VALID", {}), ("VALID", {"path_requested": None}),
    *((status, {"status": status}) for status in ("FAILED", "SKIPPED")),
    *(("INVALID", changes) for changes in (
        {"parity": None}, {"parity": {"status": "FAIL"}}, {"path_taken": "sdpa"},
        {"median_us": float("nan")}, {"median_us": -5.0}, {"median_us": 0.0}, {"path_taken": None},
        {"path_requested": None, "path_taken": None}, {"parity": {"status": "PASS", "margin": 7.0}},
        {"parity": {"status": "PASS", "mae": 9.0, "limit_mae": 1e-3}},
    )),
])  # fmt: skip
def test_bench_number_stands_only_beside_proof(changes, status):
    more = dict(base_ci95_us=[9.0, 11.0], base_wall_us=14.0, busbw_gbs=300.0, efficiency=0.9)
    row = checked({**bench_row("c", 10.0, 1.3), **more, **changes})
    assert row["status"] == status
    if status != "VALID":
        assert row["why"] and not [n for n in (*NUMBERS, *more) if row.get(n) is not None]


@pytest.mark.parametrize("line", [
    b"", b"{", b"[]", b"1", b'{"kind": "else"}', b'{"kind": "test"}', b"\xff\xfe",
    b'{"kind": "test", "nodeid": "a", "outcome": "fine"}', b'{"kind": "parity", "case": "x"}',
    b'{"kind": "bench", "status": "VALID"}', b"[" * 5000,
    b'{"kind": "session", "tests": true, "ended": true}', b'{"kind": "session", "tests": 3}',
    b'{"kind": "metric", "value": 1.0}', b'{"kind": "metric", "name": ["loss"], "value": 1.0}',
])  # fmt: skip
def test_what_is_no_row_is_refused(line):
    with pytest.raises(RowError):
        parse_row(line)


# ---- judging -------------------------------------------------------------------------------------


def stage(proof="tests", least=0):
    pytest = proof in ("tests", "parity")
    argv = ("{python}", "-m", "pytest") if pytest else ("{python}", "b.py")
    return Stage("s", "s", argv, proof=proof, timeout_s=1, least=least)


def bench(name="a", **changes):
    return bench_row(name, 1.0, 1.0, **changes)


SHAKY, SKIPPED = dict(status="UNSTABLE", why=["x"]), dict(status="SKIPPED", why=["no FA-2"])
GOOD, FAILED = row_of_test("a"), row_of_test("b", "failed", "x")


@pytest.mark.parametrize(("proof", "rc", "rows", "status"), [
    ("tests", 0, [], "NOT_RUN"), ("tests", 5, [], "NOT_RUN"), ("tests", 0, [GOOD], "PASS"),
    ("tests", 0, [row_of_test("a", "skipped", "why")], "NOT_RUN"),
    ("tests", 1, [GOOD], "FAIL ASSERT"), *(("tests", rc, [GOOD], "CRASH") for rc in (2, 3)),
    ("tests", 0, [GOOD, row_of_test("b", "error", "x")], "FAIL ASSERT"),
    ("parity", 0, [GOOD], "NOT_RUN"), ("parity", 0, [GOOD, parity_row("c")], "PASS"),
    ("parity", 0, [GOOD, parity_row("c", launches={})], "FAIL PARITY"),
    ("bench", 0, [], "NOT_RUN"), ("bench", 0, [bench()], "PASS"),
    ("bench", 0, [bench(**SKIPPED)], "SKIPPED"), ("bench", 0, [bench(**SHAKY)], "FAIL UNSTABLE"),
    ("bench", 0, [bench(**SHAKY), bench("b")], "PASS"),  # one valid cell is a result
    ("bench", 0, [bench(), bench("b", parity=None)], "FAIL INVALID"),
    ("bench", 0, [bench(), bench("b", status="FAILED")], "FAIL BENCH"),
    # The proof of the CPU profile's decode bench: noise fails nothing, a skipped row is none.
    ("row", 0, [bench()], "PASS"), ("row", 0, [bench(**SHAKY)], "PASS"),
    ("row", 0, [bench(parity=None)], "FAIL INVALID"), ("row", 0, [bench(**SKIPPED)], "NOT_RUN"),
    ("row", 0, [bench(status="FAILED")], "FAIL BENCH"),
])  # fmt: skip
def test_a_stage_is_judged_by_its_rows(proof, rc, rows, status):
    said = judge(stage(proof), rc, [checked(r) for r in rows])
    assert f"{said.status.value} {said.kind or ''}".strip() == status


BEGIN, END = ({"kind": "session", "tests": 1, "ended": ended} for ended in (False, True))


@pytest.mark.parametrize(("rows", "least", "says"), [
    ([BEGIN, GOOD, END], 1, None), ([BEGIN, GOOD], 1, "0 of 1 processes came to the end"),
    ([{**BEGIN, "tests": 2}, GOOD, {**END, "tests": 2}], 1, "1 of 2 announced tests reported"),
    ([BEGIN, BEGIN, GOOD, row_of_test("b"), END], 1, "1 of 2 processes came to the end"),
    ([BEGIN, GOOD, END], 2, "1 tests where this stage has 2"),
    ([GOOD, row_of_test("b", "skipped", "why")], 2, None),
    ([bench()], 1, None), ([bench()], 2, "1 bench cases where this stage has 2"),
])  # fmt: skip
def test_a_stage_that_ends_before_its_tests_is_not_whole(rows, least, says):
    """Exit code 0 is not the end of a stage."""
    proof = "bench" if rows[0]["kind"] == "bench" else "tests"
    said = judge(stage(proof, least), 0, [checked(r) for r in rows])
    assert (said.status is Status.PASS) == (says is None)
    assert says is None or says in said.reason


@pytest.mark.parametrize("proof", ["tests", "parity", "bench", "row", "output"])
def test_what_a_stage_had_to_write_and_did_not_is_no_pass(proof):
    """Whatever rows it sent: the file that lies there may be of an earlier stage."""
    rows = [checked(r) for r in (GOOD, parity_row("c"), bench_row("b", 1.0, 1.0))]
    whole = replace(stage(proof), argv=("{python}", "b.py"))
    assert judge(whole, 0, rows).status is Status.PASS
    said = judge(whole, 0, rows, missing_outputs=("sel.csv",))
    assert said.status is Status.NOT_RUN and "not written: sel.csv" in said.reason


def test_one_line_that_cannot_be_read_is_one_too_many():
    """It may have been the row that failed."""
    said = judge(stage(), 0, [checked(row_of_test("a"))], unreadable=1)
    assert (said.status, said.kind) == (Status.INFRA, "CHANNEL")
    assert said.reason.startswith("1 lines of the result channel were unreadable")


def test_only_the_cpu_profile_does_not_fail_by_noise():
    (decode,) = [s for s in plan("cpu") if s.id == "decode_bench"]
    assert decode.proof == "row"
    assert all(s.proof == "bench" for s in plan("standard") if s.group == "bench" and s.outputs
               and s.id != "decode_summary")  # fmt: skip


def test_a_failed_script_is_quoted():
    """What the optimizer says of a row without proof is the reason, not `exit code 1`."""
    words = ("info", "on the way"), ("warn", "sel.csv:4: parity must be PASS"), ("info", "so on")
    rows = [{"kind": "note", "level": level, "text": text} for level, text in words]
    said = judge(stage("row"), 1, rows)
    assert said.status is Status.FAIL and said.reason.startswith("sel.csv:4: parity")
    assert "no row that says why" in judge(stage("row"), 1, rows[:1]).reason


def test_the_time_of_a_run_ends_with_it(tmp_path):
    """The report is rendered between two redactions: both must give the same run time."""
    write_sample(tmp_path, "all_pass")
    events = read_events(tmp_path / "events.jsonl")
    at = next(i for i, e in enumerate(events) if e["ev"] == "run_end")
    whole = RunRecord.replay(events[: at + 1]).to_bundle()
    later = {"ev": "redaction", "m": events[at]["m"] + 4.0, "summary": {"gate": "clean"}}
    after = RunRecord.replay([*events[: at + 1], later]).to_bundle()
    assert after["monotonic_s"] == whole["monotonic_s"] == events[at]["m"]
    assert after["verdict"]["one_line"] == whole["verdict"]["one_line"]


def test_a_second_attempt_speaks_for_its_stage_alone():
    """Neither a failure nor a proof of the attempt before it counts."""
    plan = [{"id": "a"}]
    row = lambda row: {"ev": "row", "stage": "a", "row": row}
    events = [{"ev": "run_start", "plan": plan}, {"ev": "stage_start", "stage": "a"},
              row(row_of_test("t::one", "failed", "x")), row(parity_row("p/one")),
              {"ev": "stage_start", "stage": "a"}, row(row_of_test("t::two"))]  # fmt: skip
    data = RunRecord.replay(events).to_bundle()
    assert [t["nodeid"] for t in data["tests"]] == ["t::two"] and data["parity"] == []


def test_a_stage_that_died_with_the_run_has_its_time_and_its_command(tmp_path):
    write_sample(tmp_path, "crash")
    events = read_events(tmp_path / "events.jsonl")
    began = next(e["m"] for e in events if e.get("stage") == "triton_bwd")
    plan = next(e["plan"] for e in events if "plan" in e)
    next(s for s in plan if s["id"] == "triton_bwd")["env"] = {"TRITON_INTERPRET": "1"}
    died = next(s for s in RunRecord.replay(events).stage_results() if s.id == "triton_bwd")
    assert died.wall_s == round(events[-1]["m"] - began, 3) > 0
    assert "when is unknown" in died.reason
    assert repro(died.to_json(), [], {}).startswith("TRITON_INTERPRET=1 python ")


def test_failed_tests_beside_a_crash_are_both_said():
    rows = [checked(GOOD), checked(FAILED)]
    for rc in (2, 3, 4, 5, 139):
        said = judge(stage(), rc, rows)
        assert said.status is Status.FAIL and "1 of 2 tests failed, first b" in said.reason
        assert f"exit code {rc}: tests may be missing" in said.reason
    said = judge(stage("parity"), 139, [*rows, checked(parity_row("c", launches={}))])
    assert "exit code 139" in said.reason
    assert "exit code" not in judge(stage(), 1, rows).reason


# ---- the verdict ---------------------------------------------------------------------------------


def cells(n, **changes):
    return [bench_row(f"b{i}", 5.0, 1.5, **changes) for i in range(n)]


def end(status, kind=None, **more):
    return StageResult("a", Status(status), None if status == "PASS" else "why", kind, **more)


P, SHAKY_CELLS, ENDED = parity_row("p"), cells(10, status="UNSTABLE", why=["IQR"]), [end("PASS")]
CUT, TOO_BIG = end("NOT_RUN", "BUDGET"), end("SKIPPED", "OOM_DEVICE")
INCOMPLETE = "INCOMPLETE - all that ran passed, its budget was spent; 0/0 tests; parity 1/1; cut: a"


@pytest.mark.parametrize(("rows", "results", "status", "code", "words"), [
    ([P, *SHAKY_CELLS], [], "INVALID", 5, "benches VALID 0/10"),
    (SHAKY_CELLS, [end("FAIL", "UNSTABLE")], "INVALID", 5, ""),  # nothing but unstable results
    ([P, *cells(22), *cells(2, status="SKIPPED", why=["no memory"])], [], "PASS", 0,
     "benches VALID 22/24 (2 skipped)"),
    ([], ENDED, "NOT_RUN", 3, "nothing was proven"), ([P], [], "PASS", 0, "parity 1/1"),
    # One wrong row fails the run, whatever its stage says.
    ([P, row_of_test("s")], ENDED, "PASS", 0, ""),
    *(([P, wrong], ENDED, "FAIL", 1, "") for wrong in (
        *(parity_row("q", status=status) for status in ("FAIL", "INVALID")),
        *(row_of_test("t", outcome) for outcome in ("failed", "error")),
    )),
    # A stage that the budget cut is nobody's fault, and no PASS either: an optional one was asked
    # for as well. INCOMPLETE is said only where cuts are all that is wrong.
    ([P], [end("TIMEOUT", "BUDGET")], "INCOMPLETE", 3, INCOMPLETE),
    ([P], [end("TIMEOUT", "BUDGET", required=False)], "INCOMPLETE", 3, INCOMPLETE),
    ([P], [TOO_BIG], "INCOMPLETE", 3, ""), ([P], [CUT, TOO_BIG], "INCOMPLETE", 3, ""),
    ([P], [CUT, end("NOT_RUN", "NO_GPU")], "NOT_RUN", 3, ""),  # the box is at fault as well
    ([P], [CUT, end("SKIPPED")], "NOT_RUN", 3, ""),
    ([], [CUT], "NOT_RUN", 3, ""),  # nothing that ran proved anything
    ([P], [CUT, end("FAIL", "UNSTABLE")], "NOT_RUN", 3, ""),  # not all that ran passed
    ([parity_row("p", status="FAIL")], [CUT], "FAIL", 1, ""),
    ([P], [CUT, end("CRASH")], "BROKEN", 4, ""),
    ([P], [end("CRASH", "OOM_DEVICE")], "BROKEN", 4, ""),
])  # fmt: skip
def test_the_verdict(rows, results, status, code, words):
    cut = any(result.kind in ("BUDGET", "OOM_DEVICE") for result in results)
    ended_by = "budget" if cut else "normal"
    record = RunRecord(scope="gpu", ended_by=ended_by, rows={"a": list(rows)})
    said = verdict(record, [StageResult("env", Status.PASS), *results])
    assert (said["status"], said["exit_code"]) == (status, code)
    assert words in said["one_line"]
    assert ("nothing was proven" in said["one_line"]) == (words == "nothing was proven")


def test_benches_of_a_cpu_claim_nothing():
    record = RunRecord(scope="cpu", ended_by="normal", rows={"a": [P, *SHAKY_CELLS]})
    said = verdict(record, [StageResult("env", Status.PASS)])
    assert said["exit_code"] == 0 and "benches claim nothing, VALID 0/10" in said["one_line"]
