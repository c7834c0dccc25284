"""Is what is on disk valid at every second, and does the journal alone give the record?"""

from __future__ import annotations

import errno
import json

import pytest

from bench.records import NUMBERS
from nsa.tests.oneshot_samples import bench_row, parity_row, write_sample
from nsa.tests.oneshot_samples import test_row as row_of_test
from scripts.oneshot.record import journal
from scripts.oneshot.record.journal import Ballast, Journal, read_events, write_json
from scripts.oneshot.record.judge import Status, judge, verdict
from scripts.oneshot.record.model import RunRecord, Stage, StageResult
from scripts.oneshot.record.rows import RowError, parse_row
from scripts.oneshot.run.stages import plan


def test_journal_survives_a_full_disk(tmp_path, monkeypatch):
    log = Journal(tmp_path / "events.jsonl")
    log.append("a", n=1)
    real, calls = journal.os.write, []

    def full(fd, data):
        if not calls:
            calls.append(1)
            real(fd, data[:5])  # half a line gets through
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(journal.os, "write", full)
    log.append("b", n=2)
    log.append("c", n=3)
    log.close()
    assert [e["ev"] for e in read_events(tmp_path / "events.jsonl")] == ["a", "c"]
    assert log.lost == 1


def test_ballast_makes_room_for_the_verdict(tmp_path, monkeypatch):
    ballast = Ballast(tmp_path, ["logs/a.log", "sanity.out"])
    (tmp_path / "logs").mkdir()
    logs = [tmp_path / "logs" / "a.log", tmp_path / "sanity.out"]
    for log in logs:
        log.write_text("x" * 1000)
    real = journal.write_atomic

    def needs_room(path, text):
        if ballast.path.exists() or any(log.exists() for log in logs):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, text)

    monkeypatch.setattr(journal, "write_atomic", needs_room)
    assert ballast.guarded(lambda: journal.write_json(tmp_path / "bundle.json", {"a": 1}))
    assert json.loads((tmp_path / "bundle.json").read_text()) == {"a": 1}


def test_json_never_holds_nan(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "x", {"a": float("nan")})


# ---- rows ----------------------------------------------------------------------------------------


def checked(row):
    return parse_row(json.dumps(row))


@pytest.mark.parametrize(("changes", "status", "why"), [
    ({}, "PASS", None),
    ({"path_taken": "sdpa"}, "INVALID", "asked for triton, ran sdpa"),
    ({"path_taken": None}, "INVALID", "asked for triton"),
    ({"path_taken": 3}, "INVALID", "asked for triton, ran 3"),
    ({"path_taken": "triton_None"}, "INVALID", "asked for triton, ran triton_None"),
    ({"path_taken": "triton/dense"}, "INVALID", "asked for triton, ran triton/dense"),
    ({"path_taken": "triton_ranges_single"}, "PASS", None),
    ({"launches": {}}, "INVALID", "no launch"), ({"launches": None}, "INVALID", "no launch"),
    ({"max_abs": float("inf")}, "FAIL", "not finite"),
    ({"mae": None}, "FAIL", "mae is missing"), ({"max_abs": None}, "FAIL", "max_abs is missing"),
    ({"mae": 9.0, "limit_mae": None}, "FAIL", "limit_mae is missing"),
    ({"limit_max_abs": None}, "FAIL", "limit_max_abs is missing"),
    ({"mae": 1.5e-3}, "FAIL", "mae 0.0015 is over its limit 0.001"),
    ({"max_abs": 6.3e-3}, "FAIL", "max_abs 0.0063 is over its limit 0.0062"),
    ({"margin": 1.01}, "FAIL", "margin 1.01 is over 1"),
    ({"worst_row": float("nan")}, "FAIL", "not finite: worst_row"),
    ({"launches": {"_k": 0}}, "INVALID", "no launch"),
    ({"path_requested": "sdpa", "path_taken": "sdpa", "launches": {}}, "PASS", None),
])  # fmt: skip
def test_parity_row_is_held_to_its_evidence(changes, status, why):
    row = checked(parity_row("c", **changes))
    assert row["status"] == status
    assert why is None or any(why in w for w in row["why"])


@pytest.mark.parametrize(("changes", "status"), [
    ({}, "VALID"),
    ({"parity": None}, "INVALID"),
    ({"parity": {"status": "FAIL"}}, "INVALID"),
    ({"path_taken": "sdpa"}, "INVALID"),
    ({"median_us": float("nan")}, "INVALID"),
    ({"median_us": -5.0}, "INVALID"),
    ({"median_us": 0.0}, "INVALID"),
    ({"path_requested": None}, "VALID"),
    ({"path_taken": None}, "INVALID"),
    ({"path_requested": None, "path_taken": None}, "INVALID"),
    ({"parity": {"status": "PASS", "margin": 7.0}}, "INVALID"),
    ({"parity": {"status": "PASS", "mae": 9.0, "limit_mae": 1e-3}}, "INVALID"),
    ({"status": "FAILED"}, "FAILED"), ({"status": "SKIPPED"}, "SKIPPED"),
])  # fmt: skip
def test_bench_number_stands_only_beside_proof(changes, status):
    more = dict(base_ci95_us=[9.0, 11.0], base_wall_us=14.0, busbw_gbs=300.0, efficiency=0.9)
    row = checked({**bench_row("c", 10.0, 1.3), **more, **changes})
    assert row["status"] == status
    if status != "VALID":
        assert row["why"] and all(row[name] is None for name in NUMBERS if name in row)
        assert all(row[name] is None for name in more)


@pytest.mark.parametrize("line", [
    b"", b"{", b"[]", b"1", b'{"kind": "else"}', b'{"kind": "test"}', b"\xff\xfe",
    b'{"kind": "test", "nodeid": "a", "outcome": "fine"}', b'{"kind": "parity", "case": "x"}',
    b'{"kind": "bench", "status": "VALID"}', b"[" * 5000,
    b'{"kind": "session", "tests": true, "ended": true}', b'{"kind": "session", "tests": 3}',
])  # fmt: skip
def test_what_is_no_row_is_refused(line):
    with pytest.raises(RowError):
        parse_row(line)


# ---- judging -------------------------------------------------------------------------------------


def stage(proof="tests", pytest=True, least=0):
    argv = ("{python}", "-m", "pytest") if pytest else ("{python}", "b.py")
    return Stage("s", "s", argv, proof=proof, timeout_s=1, least=least)


def bench(name="a", **changes):
    return bench_row(name, 1.0, 1.0, **changes)


SHAKY, SKIPPED = dict(status="UNSTABLE", why=["x"]), dict(status="SKIPPED", why=["no FA-2"])


@pytest.mark.parametrize(("proof", "rc", "rows", "status", "kind"), [
    ("tests", 0, [], "NOT_RUN", None), ("tests", 5, [], "NOT_RUN", None),
    ("tests", 0, [row_of_test("a", "skipped", "why")], "NOT_RUN", None),
    ("tests", 0, [row_of_test("a")], "PASS", None),
    ("tests", 1, [row_of_test("a")], "FAIL", "ASSERT"),
    ("tests", 2, [row_of_test("a")], "CRASH", None),
    ("tests", 3, [row_of_test("a")], "CRASH", None),
    ("tests", 0, [row_of_test("a"), row_of_test("b", "error", "x")], "FAIL", "ASSERT"),
    ("parity", 0, [row_of_test("a")], "NOT_RUN", None),
    ("parity", 0, [row_of_test("a"), parity_row("c")], "PASS", None),
    ("parity", 0, [row_of_test("a"), parity_row("c", launches={})], "FAIL", "PARITY"),
    ("bench", 0, [], "NOT_RUN", None), ("bench", 0, [bench()], "PASS", None),
    ("bench", 0, [bench(**SKIPPED)], "SKIPPED", None),
    ("bench", 0, [bench(**SHAKY)], "FAIL", "UNSTABLE"),
    ("bench", 0, [bench(**SHAKY), bench("b")], "PASS", None),  # one valid cell is a result
    ("bench", 0, [bench(), bench("b", parity=None)], "FAIL", "INVALID"),
    ("bench", 0, [bench(), bench("b", status="FAILED")], "FAIL", "BENCH"),
    # The proof of the CPU profile's decode bench: noise fails nothing, a skipped row is none.
    ("row", 0, [bench()], "PASS", None), ("row", 0, [bench(**SHAKY)], "PASS", None),
    ("row", 0, [bench(parity=None)], "FAIL", "INVALID"),
    ("row", 0, [bench(status="FAILED")], "FAIL", "BENCH"),
    ("row", 0, [bench(**SKIPPED)], "NOT_RUN", None),
])  # fmt: skip
def test_a_stage_is_judged_by_its_rows(proof, rc, rows, status, kind):
    said = judge(stage(proof, proof in ("tests", "parity")), rc, [checked(r) for r in rows])
    assert (said.status.value, said.kind) == (status, kind)


def session(tests, ended):
    return {"kind": "session", "tests": tests, "ended": ended}


@pytest.mark.parametrize(("rows", "least", "says"), [
    ([session(1, False), row_of_test("a"), session(1, True)], 1, None),
    ([session(2, False), row_of_test("a"), session(2, True)], 1, "1 of 2 announced tests reported"),
    ([session(1, False), row_of_test("a")], 1, "0 of 1 processes came to the end"),
    ([session(1, False), session(1, False), row_of_test("a"), row_of_test("b"), session(1, True)],
     1, "1 of 2 processes came to the end"),
    ([session(1, False), row_of_test("a"), session(1, True)], 2, "1 tests where this stage has 2"),
    ([row_of_test("a"), row_of_test("b", "skipped", "why")], 2, None),
    ([bench()], 1, None), ([bench()], 2, "1 bench cases where this stage has 2"),
])  # fmt: skip
def test_a_stage_that_ends_before_its_tests_is_not_whole(rows, least, says):
    """Exit code 0 is not the end of a stage."""
    proof = "bench" if rows[0]["kind"] == "bench" else "tests"
    said = judge(stage(proof, proof == "tests", least), 0, [checked(r) for r in rows])
    assert (said.status is Status.PASS) == (says is None)
    assert says is None or says in said.reason


@pytest.mark.parametrize("proof", ["tests", "parity", "bench", "row", "output"])
def test_what_a_stage_had_to_write_and_did_not_is_no_pass(proof):
    """Whatever rows it sent: the file that lies there may be of an earlier stage."""
    rows = [checked(r) for r in (row_of_test("a"), parity_row("c"), bench_row("b", 1.0, 1.0))]
    assert judge(stage(proof, False), 0, rows).status is Status.PASS
    said = judge(stage(proof, False), 0, rows, missing_outputs=("sel.csv",))
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
    one = [{"kind": "note", "level": "info", "text": "on the way"},
           {"kind": "note", "level": "warn", "text": "sel.csv:4: parity must be PASS, got 'FAIL'"},
           {"kind": "note", "level": "info", "text": "and so on"}]  # fmt: skip
    said = judge(stage("row", False), 1, one)
    assert said.status is Status.FAIL and said.reason.startswith("sel.csv:4: parity")
    assert "no row that says why" in judge(stage("row", False), 1, one[:1]).reason


def test_arguments_that_wait_for_an_earlier_stage():
    planned = plan("full")
    (threshold,) = [s for s in planned if s.id == "threshold"]
    ids = [s.id for s in planned]
    assert ids.index("fa2_bench") < ids.index("threshold") and "fa2_bench" in threshold.also
    assert "--fa2" not in threshold.completed({}).argv
    failed = StageResult(id="fa2_bench", status=Status.FAIL, reason="x")
    assert threshold.completed({"fa2_bench": failed}) is threshold
    passed = StageResult(id="fa2_bench", status=Status.PASS)
    assert threshold.completed({"fa2_bench": passed}).argv[-2:] == ("--fa2", "{out}/fa2.csv")


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


def test_a_stage_that_died_with_the_run_has_the_time_that_is_known(tmp_path):
    write_sample(tmp_path, "crash")
    events = read_events(tmp_path / "events.jsonl")
    began = next(e["m"] for e in events if e.get("stage") == "triton_bwd")
    died = next(s for s in RunRecord.replay(events).stage_results() if s.id == "triton_bwd")
    assert died.wall_s == round(events[-1]["m"] - began, 3) > 0
    assert "when is unknown" in died.reason


def test_failed_tests_beside_a_crash_are_both_said():
    rows = [checked(r) for r in (row_of_test("a"), row_of_test("b", "failed", "x"))]
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


P, SHAKY_CELLS, GOOD = parity_row("p"), cells(10, status="UNSTABLE", why=["IQR"]), [end("PASS")]
CUT, TOO_BIG = end("NOT_RUN", "BUDGET"), end("SKIPPED", "OOM_DEVICE")
INCOMPLETE = "INCOMPLETE - all that ran passed, its budget was spent; 0/0 tests; parity 1/1; cut: a"


@pytest.mark.parametrize(("rows", "results", "status", "code", "words"), [
    ([P, *SHAKY_CELLS], [], "INVALID", 5, "benches VALID 0/10"),
    (SHAKY_CELLS, [end("FAIL", "UNSTABLE")], "INVALID", 5, ""),  # nothing but unstable results
    ([P, *cells(22), *cells(2, status="SKIPPED", why=["no memory"])], [], "PASS", 0,
     "benches VALID 22/24 (2 skipped)"),
    ([], GOOD, "NOT_RUN", 3, "nothing was proven"), ([P], [], "PASS", 0, "parity 1/1"),
    # One wrong row fails the run, whatever its stage says.
    ([P, row_of_test("s")], GOOD, "PASS", 0, ""),
    ([P, parity_row("q", status="FAIL")], GOOD, "FAIL", 1, ""),
    ([P, parity_row("q", status="INVALID")], GOOD, "FAIL", 1, ""),
    ([P, row_of_test("t", "failed")], GOOD, "FAIL", 1, ""),
    ([P, row_of_test("t", "error")], GOOD, "FAIL", 1, ""),
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
