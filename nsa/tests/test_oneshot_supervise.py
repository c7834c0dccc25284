"""Does the supervisor keep limits, logs and rows? The campaign has the ways in which stages end.
What the driver reports, Xid errors and memory that is too small, decides over a stage.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import bench_decode, bench_fa2, bench_prefill, bench_sel_triton
from bench.records import shrunk
from nsa.tests import oneshot_faults as faults
from scripts.oneshot.box import watch as watch_module
from scripts.oneshot.box.cards import Card
from scripts.oneshot.box.watch import Watch
from scripts.oneshot.box.xid import Xid, XidListener
from scripts.oneshot.record.capture import StageLog, cause_of, plain
from scripts.oneshot.record.journal import dumps
from scripts.oneshot.record.judge import Status, judge
from scripts.oneshot.record.model import Stage, StageResult
from scripts.oneshot.record.redact import Redactor
from scripts.oneshot.record.rows import parse_row
from scripts.oneshot.run import supervise
from scripts.oneshot.run.supervise import Context, Stop, child_environment, run_stage

ROOT = Path(__file__).resolve().parent.parent.parent


def plain_redactor(**how):
    return Redactor({}, hostnames=(), user="", **how)


@pytest.fixture
def context(tmp_path):
    rows = []
    made = Context(  # by its own run_id: processes that carry it are ended with a stage
        python=sys.executable, root=ROOT, out=tmp_path, run_id=tmp_path.name, ladder_s=(0.5, 0.5),
        redactor=plain_redactor(root=ROOT),
        on_row=lambda stage, row: rows.append((stage, row)),
    )  # fmt: skip
    made.seen = rows
    return made


def test_a_budget_shortens_a_limit_lengthens_none_and_its_cut_is_named(context):
    limits = [run_stage(context, faults.stage("pass"), budget_left_s=left).timeout_s
              for left in (900.0, 20.0)]  # fmt: skip
    assert limits == [30.0, 20.0]
    result = run_stage(context, faults.stage("hang"), budget_left_s=0.5)
    assert (result.status, result.kind) == (Status.TIMEOUT, "BUDGET")


def test_garbage_becomes_plain_text(context):
    result = run_stage(context, faults.stage("garbage"))
    text = (context.out / result.log).read_text(encoding="utf-8")
    assert "\x1b" not in text and "\0" not in text and "red \ufffdnul" in text
    assert "characters left out" in text and len(text) < 20_000
    assert "progress 1\nprogress 2\n" in text
    assert plain("\x1b]8;;http://x\x07link\x1b]8;;\x07 \x1b[1;31mred\x1b[m\x08") == "link red\ufffd"


def log_of(tmp_path, *pieces, **how):
    log = StageLog(tmp_path / "l", plain_redactor(), **how)
    for piece in pieces:
        log.feed(piece.encode())
    log.close()
    return (tmp_path / "l").read_text()


def test_flood_keeps_head_and_tail_and_the_cut_splits_no_secret(tmp_path):
    lines = (f"line {i} {'y' * 60}\n" for i in range(6_000))
    text = log_of(tmp_path, *lines, cap_bytes=50_000)
    assert len(text) < 55_000
    assert "line 0 " in text and "line 5999 " in text and "lines left out" in text
    secret = "ghp_" + "a" * 36
    text = log_of(tmp_path, f"{'x ' * 2038}{secret}{' y' * 4000}{secret}{' z' * 2000}\n")
    assert "aaaaaaaa" not in text and "left out" in text


def python(code, proof="tests", **changes):
    made = Stage("x", "x", ("{python}", "-c", code), proof=proof, timeout_s=20)
    return replace(made, **changes)


def test_cannot_start(context):
    assert run_stage(context, python("", argv=("/no/such/program",))).status is Status.INFRA


@pytest.mark.parametrize("name", ["SIGTERM", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM",
                                  "SIGVTALRM", "SIGPROF", "SIGXCPU"])  # fmt: skip
def test_a_signal_that_would_end_the_process_ends_the_run(name):
    number = getattr(signal, name)
    handled = {n: signal.getsignal(n) for n in signal.valid_signals() if n not in (9, 19)}
    try:
        stop = Stop()
        stop.install()
        signal.raise_signal(number)
        assert stop.by == "sigterm" and stop.other == (None if name == "SIGTERM" else name)
    finally:
        for n, handler in handled.items():
            if handler is not None:
                signal.signal(n, handler)


@pytest.mark.parametrize(("code", "old"), [
    ("print(1)", None), ("print(1)", "of an earlier run"), ("open(r'{out}/made.csv', 'w')", None),
])  # fmt: skip
def test_a_missing_an_older_and_an_empty_file_are_no_output(context, code, old):
    if old:
        (context.out / "made.csv").write_text(old)
    result = run_stage(context, python(code, "output", outputs=("made.csv",)))
    assert result.status is Status.NOT_RUN and "not written: made.csv" in result.reason


def test_one_test_over_its_own_limit_is_a_timeout(context):
    """pytest-timeout ends the process with 1, as a failed test does."""
    stage = python("print('+++++ Timeout +++++'); raise SystemExit(1)")
    assert run_stage(context, stage).status is Status.TIMEOUT


def test_no_row_is_lost_silently(context, monkeypatch):
    """Neither a last one without its newline nor those beyond the cap nor one that is too long."""
    row = dumps({"kind": "test", "nodeid": "t", "outcome": "failed"}).encode()

    def taken(*pieces):
        channel = supervise._Channel(context, faults.stage("pass"))
        for piece in pieces:
            channel.feed(piece)
        channel.close()
        return len(channel.rows), channel.unreadable

    assert taken(row + b"\n" + row) == (2, 0) and taken(row + b"\nhello\n") == (1, 1)
    monkeypatch.setattr(supervise, "ROWS_CAP", 1)
    monkeypatch.setattr(supervise, "ROW_CAP_BYTES", 200)
    assert taken(row + b"\n" + row + b"\n" + b"x" * 300, b"y" * 300 + b"\n") == (1, 2)


@pytest.mark.parametrize("name, status", [("odd_metrics", "PASS"), ("nameless_case", "FAIL")])
def test_odd_rows_are_no_fault_of_the_runner(name, status, context):
    result = run_stage(context, faults.stage(name)).to_json()
    assert result["status"] == status and StageResult.from_json(result).first_call_ms is None


def test_child_environment_is_an_allowlist():
    kept = {"PATH": "/bin", "NSA_USE_FA2": "1", "LC_ALL": "C"}
    left = "HF_TOKEN AWS_SECRET_ACCESS_KEY NSA_API_KEY NSA_COMMIT MY_VAR".split()
    left += ["PYTHONOPTIMIZE", "PYTHONSAFEPATH"]  # with the one no assertion of a test counts
    env = child_environment(
        kept | dict.fromkeys(left, "x"), faults.stage("pass", env={"A": "1"}), "t"
    )
    assert env.items() >= (kept | {"A": "1"}).items() and not env.keys() & left


@pytest.mark.parametrize(("kind", "text"), [
    ("OOM_DEVICE", "torch.OutOfMemoryError: CUDA out of memory. Tried"), (None, "all is well"),
    ("IMPORT_ERROR", "ImportError: x.so: undefined symbol: _ZN3c10"),
    ("COMPILE_ERROR", "triton.compiler.errors.CompilationError: at 1:1"),
    ("NO_SPACE", "OSError: [Errno 28] No space left on device"),
    ("DRIVER_TOO_OLD", "RuntimeError: The NVIDIA driver on your system is too old"),
    ("CUDA_FAULT", "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered"),
])  # fmt: skip
def test_cause(kind, text):
    assert cause_of([text]) == kind


# ---- started ahead -------------------------------------------------------------------------------


def script(folder, text):
    path = folder / "stage.py"
    root = f"sys.path.insert(0, {os.fspath(ROOT)!r})\n"
    path.write_text(f"import os, sys\n{root}from bench.records import emit\n{text}")
    return Stage("s", "a stage", ("{python}", str(path), "{out}/given"), proof="tests",
                 timeout_s=60, env={"NSA_DEBUG_TIMING": "1"}, ahead=True)  # fmt: skip


PASSES = """
loaded = "torch" in sys.modules and "nsa.kernels.prefill" in sys.modules
print("said", __name__, __file__, sys.argv[1:], os.environ["NSA_DEBUG_TIMING"], loaded)
emit("test", {"nodeid": "t::ok", "outcome": "passed"})
raise SystemExit(0)
"""


@pytest.mark.parametrize("ahead", [True, False])
def test_a_stage_that_was_started_ahead_is_like_any_other(context, ahead):
    stage = script(context.out, PASSES)
    if ahead:
        supervise.start_ahead(context, [stage])
        assert list(context.waiting) == ["s"] and not context.seen
    result = run_stage(context, stage)
    assert result.status is Status.PASS and result.argv == stage.argv and not context.waiting
    log = (context.out / result.log).read_text()
    path = context.out / "stage.py"
    assert f"said __main__ {path} ['{context.out}/given'] 1 {ahead}" in log


def test_its_error_and_exit_code_are_its_own(context):
    stage = script(context.out, "raise RuntimeError('no such luck')")
    supervise.start_ahead(context, [stage])
    result = run_stage(context, stage)
    assert (result.status, result.rc) == (Status.CRASH, 1)
    assert "RuntimeError: no such luck" in result.reason


def test_one_that_died_or_is_another_by_now_starts_anew(context):
    stage = script(context.out, PASSES)
    supervise.start_ahead(context, [stage])
    died = context.waiting["s"].process
    died.kill()
    died.wait()
    assert run_stage(context, stage).status is Status.PASS
    supervise.start_ahead(context, [stage])
    before = context.waiting["s"].process
    result = run_stage(context, replace(stage, argv=(*stage.argv, "more")))
    assert result.status is Status.PASS and before.poll() is not None
    assert "'more']" in (context.out / result.log).read_text()


def test_what_is_not_wanted_ends(context):
    stage = script(context.out, PASSES)
    supervise.start_ahead(context, [stage, replace(stage, id="other", ahead=False)])
    process = context.waiting["s"].process
    supervise.end_waiting(context)
    assert process.poll() is not None and not context.waiting


# ---- what the driver reports --------------------------------------------------------------------


@pytest.fixture
def nvml(monkeypatch):
    """A pynvml whose events come from the list `events`: numbers, "ecc" or "lost"."""
    fake = types.ModuleType("pynvml")
    exec(faults.FAKE_PYNVML, fake.__dict__)
    fake.events, ecc = [], fake.nvmlEventTypeDoubleBitEccError

    def wait(_events, _timeout_ms):
        if not fake.events:
            time.sleep(0.01)
            raise fake.NVMLError_Timeout
        event = fake.events.pop(0)
        if event == "lost":
            raise fake.NVMLError_GpuIsLost
        kind = ecc if event == "ecc" else fake.nvmlEventTypeXidCriticalError
        return fake.Data(eventType=kind, eventData=0 if event == "ecc" else event)

    fake.nvmlEventSetWait_v2 = wait
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def heard(listener, n):
    found = []
    faults.until(lambda: found.extend(listener.take()) or len(found) >= n, 3.0)
    return found


def test_events_come_in_order_and_end_with_a_lost_gpu_or_when_told(nvml):
    nvml.events += [13, 48, "ecc", 31, "lost", 94]
    listener = XidListener("GPU-1")
    listener.start()
    assert [x.number for x in heard(listener, 5)] == [13, 48, 48, 31, 79]
    listener.join(2.0)
    assert not listener.is_alive() and listener.problem is None and listener.take() == []
    nvml.events.clear()
    listener = XidListener(None)
    listener.start()
    assert listener.is_alive() and listener.take() == []
    listener.stop()
    assert not listener.is_alive()


@pytest.mark.parametrize(("missing", "says"), [
    *((name, "Not Supported") for name in
      ("nvmlEventSetCreate", "nvmlInit", "nvmlDeviceRegisterEvents")),
    ("types", "no Xid events"), ("pynvml", "pynvml"),
])  # fmt: skip
def test_a_box_without_events_is_no_fault(nvml, missing, says, monkeypatch):
    def fails(*_):
        raise nvml.NVMLError("Not Supported")

    if missing == "pynvml":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif missing == "types":
        nvml.nvmlDeviceGetSupportedEventTypes = lambda handle: 0
    else:
        setattr(nvml, missing, fails)
    listener = XidListener("GPU-1")
    listener.run()
    assert says in listener.problem and listener.take() == []


def test_a_report_says_once_that_nothing_can_be_heard(nvml):
    """No Xid in a report means that there was none only where someone listened."""
    nvml.nvmlDeviceGetSupportedEventTypes = lambda handle: 0
    said = []
    smi = [{"uuid": "GPU-1", "index": 0}]
    watch = Watch([], smi, lambda *_, **__: None, lambda *note: said.append(note), print)
    listener = XidListener("GPU-1")
    listener.run()
    watch._listeners = [(None, listener), (1, listener)]
    watch.hear("a")
    watch.hear("b")
    why = "Xid errors are not heard (this GPU reports no Xid events)"
    assert said == [(why, "info"), (f"GPU 1: {why}", "info")]


def hearing(*heard):
    """A Watch whose listener of card `index` hands out each (index, number) of `heard` once."""
    watch = Watch([], "no card", lambda *_, **__: None, lambda *_: None, lambda *_: None)
    for index, number in heard:
        left = [Xid(number)]
        take = lambda left=left: [left.pop()] if left else []
        watch._listeners.append((index, SimpleNamespace(take=take, problem=None)))
    return watch


@pytest.mark.parametrize(("heard", "gpus", "was", "status", "kind"), [
    ([(None, 94), (None, 79)], (), Status.PASS, Status.INFRA, "GPU_LOST"),
    ([(None, 999)], (), Status.PASS, Status.INFRA, "XID"),  # what nobody knows is no good sign
    ([(None, 48)], (), Status.FAIL, Status.FAIL, "XID"),
    ([(None, 48)], (), Status.TIMEOUT, Status.TIMEOUT, "XID"),
    ([(1, 48)], (0,), Status.PASS, Status.PASS, None),
    ([(1, 48)], (0, 1), Status.PASS, Status.INFRA, "XID"),
    ([(0, 79), (1, 48)], (0,), Status.PASS, Status.INFRA, "GPU_LOST"),
])  # fmt: skip
def test_what_passed_beside_a_faulty_card_is_not_proven(heard, gpus, was, status, kind):
    reason = None if was is Status.PASS else "as it went"
    found = hearing(*heard).beside_faults(StageResult("a", was, reason, gpus=gpus))
    assert (found.status, found.kind) == (status, kind)
    if kind:
        number = 79 if kind == "GPU_LOST" else heard[0][1]
        assert f"Xid {number} (" in found.reason
        assert found.reason.endswith("as it went") == bool(reason)


def test_a_fault_between_two_stages_is_of_neither():
    watch = hearing((None, 48))
    watch.before_stage()
    assert watch.beside_faults(StageResult("a", Status.PASS)).status is Status.PASS


@pytest.mark.parametrize(("answer", "free", "words", "kind"), [
    ("ended with 15: GPU is lost", True, "does not answer", "GPU_LOST"),
    ("nvidia-smi did not answer within 10 s", True, "does not answer", "NO_GPU"),
    (None, False, "still held", "GPU_BUSY"),
])  # fmt: skip
def test_a_card_that_may_not_be_used_has_the_kind_of_its_cause(
    monkeypatch, answer, free, words, kind
):
    def query(index=None):
        if answer:
            raise watch_module.box.ProbeFailed(answer)

    monkeypatch.setattr(watch_module.box, "smi_query", query)
    ended = StageResult("a", Status.CRASH, "killed by SIGKILL")
    after = Stage("b", "b", ("{python}",), "tests", 1.0)
    for cards in ((), (0,)):
        several = [Card(0, "GPU-1"), Card(1, "GPU-2")] if cards else []
        watch = Watch(several, [], *[lambda *_, **__: None] * 3)
        watch.telemetry = SimpleNamespace(wait_for_memory=lambda _: free)
        watch.after_failure(replace(ended, gpus=cards))
        status, why, got = watch.why_not(replace(after, gpus=cards))
        assert (status, got) == (Status.NOT_RUN, kind) and words in why


# ---- half size -----------------------------------------------------------------------------------


def test_sizes_are_halved_and_said(capsys):
    assert shrunk("--S_list", [8192, 32768], 2, 64) == [4096, 16384]
    assert "--S_list is 4096,16384 here instead of 8192,32768" in capsys.readouterr().err
    assert shrunk("--S_list", [64, 100], 2, 64) == [64]  # never below one block, none twice
    assert shrunk("--N", [1], 2) == [1] and shrunk("--N", [7, 8], 1) == [7, 8]
    for bench, argv, name, got in (
        (bench_sel_triton, "--N 256 --L_list 64,128", "N", [128]),
        (bench_prefill, "--S_list 8192", "S_list", [4096]),
        (bench_fa2, "--S_list 512,2048", "S_list", [256, 1024]),
        (bench_decode, "--dim 64", "shrink", 2),
    ):
        assert getattr(bench.parse([*argv.split(), "--shrink", "2"]), name) == got
        with pytest.raises(SystemExit):
            bench.parse([*argv.split(), "--shrink", "0"])


def test_a_bench_without_a_case_that_fits_is_out_of_memory():
    stage = Stage("b", "b", ("{python}", "bench/bench_prefill.py"), "bench", 1.0)
    why = ["out of memory: CUDA out of memory. Tried to allocate 80 GiB"]
    row = parse_row(dumps({"kind": "bench", "case": "c", "status": "SKIPPED", "why": why}))
    said = judge(stage, 0, [row])
    assert (said.status, said.kind) == (Status.SKIPPED, "OOM_DEVICE")
    note = {"kind": "note", "text": f"decode bench: {why[0]}"}
    assert judge(stage, 3, [note]).kind == "OOM_DEVICE"
    assert judge(stage, 3, [{"kind": "note", "text": "no CUDA device"}]).kind is None
