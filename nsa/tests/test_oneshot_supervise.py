"""Does the supervisor keep limits, logs and rows? The campaign has the ways in which stages end."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nsa.tests import oneshot_faults as faults
from scripts.oneshot.record.capture import StageLog, cause_of, plain
from scripts.oneshot.record.journal import dumps
from scripts.oneshot.record.judge import Status
from scripts.oneshot.record.model import Stage
from scripts.oneshot.record.redact import Redactor
from scripts.oneshot.run import supervise
from scripts.oneshot.run.supervise import Context, Stop, child_environment, run_stage

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def context(tmp_path):
    rows = []
    made = Context(  # by its own run_id: processes that carry it are ended with a stage
        python=sys.executable, root=ROOT, out=tmp_path, run_id=tmp_path.name, ladder_s=(0.5, 0.5),
        redactor=Redactor({}, hostnames=(), user="", root=ROOT),
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


def test_flood_keeps_head_and_tail(tmp_path):
    log = StageLog(tmp_path / "l", Redactor({}, hostnames=(), user=""), cap_bytes=50_000)
    for i in range(6_000):
        log.feed(f"line {i} {'y' * 60}\n".encode())
    log.close()
    text = (tmp_path / "l").read_text()
    assert len(text) < 55_000
    assert "line 0 " in text and "line 5999 " in text and "lines left out" in text


def test_cannot_start(context):
    stage = Stage("x", "x", ("/no/such/program",), proof="tests", timeout_s=5)
    assert run_stage(context, stage).status is Status.INFRA


@pytest.mark.parametrize("name", ["SIGTERM", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM",
                                  "SIGVTALRM", "SIGPROF", "SIGXCPU"])  # fmt: skip
def test_a_signal_that_would_end_the_process_ends_the_run(name):
    number = getattr(signal, name)
    before = {n: signal.getsignal(n) for n in signal.valid_signals() if n not in (9, 19)}
    try:
        stop = Stop()
        stop.install()
        signal.raise_signal(number)
        assert stop.by == "sigterm" and stop.other == (None if name == "SIGTERM" else name)
    finally:
        for n, handler in before.items():
            if handler is not None:
                signal.signal(n, handler)


@pytest.mark.parametrize(("code", "old"), [
    ("print(1)", None), ("print(1)", "of an earlier run"), ("open(r'{out}/made.csv', 'w')", None),
])  # fmt: skip
def test_a_missing_an_older_and_an_empty_file_are_no_output(context, code, old):
    stage = Stage("x", "x", ("{python}", "-c", code), proof="output", timeout_s=20,
                  outputs=("made.csv",))  # fmt: skip
    if old:
        (context.out / "made.csv").write_text(old)
    result = run_stage(context, stage)
    assert result.status is Status.NOT_RUN and "not written: made.csv" in result.reason


def test_one_test_over_its_own_limit_is_a_timeout(context):
    """pytest-timeout ends the process with 1, as a failed test does."""
    code = "print('+++++ Timeout +++++'); raise SystemExit(1)"
    stage = Stage("x", "x", ("{python}", "-c", code), proof="tests", timeout_s=20)
    assert run_stage(context, stage).status is Status.TIMEOUT


def test_no_row_is_lost_silently(context, monkeypatch):
    """Neither a last one without its newline nor those beyond the cap nor one that is too long."""
    row = dumps({"kind": "test", "nodeid": "t", "outcome": "failed"}).encode()
    channel = supervise._Channel(context, faults.stage("pass"))
    channel.feed(row + b"\n" + row)
    channel.close()
    assert (len(channel.rows), channel.unreadable) == (2, 0)
    channel.feed(b"hello\n")
    assert channel.unreadable == 1
    monkeypatch.setattr(supervise, "ROWS_CAP", 1)
    monkeypatch.setattr(supervise, "ROW_CAP_BYTES", 200)
    channel = supervise._Channel(context, faults.stage("pass"))
    channel.feed(row + b"\n" + row + b"\n" + b"x" * 300)
    channel.feed(b"y" * 300 + b"\n")
    channel.close()
    assert (len(channel.rows), channel.unreadable) == (1, 2)


def test_child_environment_is_an_allowlist():
    given = {"PATH": "/bin", "HF_TOKEN": "x", "NSA_USE_FA2": "1", "AWS_SECRET_ACCESS_KEY": "x",
             "NSA_API_KEY": "x", "NSA_COMMIT": "abc", "MY_VAR": "1", "LC_ALL": "C"}  # fmt: skip
    env = child_environment(given, faults.stage("pass", env={"A": "1"}), "t")
    assert {"PATH", "NSA_USE_FA2", "LC_ALL", "A"} <= set(env)
    kept_out = {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NSA_API_KEY", "NSA_COMMIT", "MY_VAR"}
    assert not kept_out & set(env)


def test_log_never_splits_a_secret_over_the_cut(tmp_path):
    secret = "ghp_" + "a" * 36
    log = StageLog(tmp_path / "l", Redactor({}, hostnames=(), user=""))
    log.feed(b"x " * 2038 + secret.encode() + b" y" * 4000 + secret.encode() + b" z" * 2000 + b"\n")
    log.close()
    text = (tmp_path / "l").read_text()
    assert "aaaaaaaa" not in text and "left out" in text


@pytest.mark.parametrize(("text", "kind"), [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried", "OOM_DEVICE"),
    ("ImportError: x.so: undefined symbol: _ZN3c10", "IMPORT_ERROR"),
    ("triton.compiler.errors.CompilationError: at 1:1", "COMPILE_ERROR"),
    ("OSError: [Errno 28] No space left on device", "NO_SPACE"),
    ("RuntimeError: The NVIDIA driver on your system is too old", "DRIVER_TOO_OLD"),
    ("RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered", "CUDA_FAULT"),
    ("all is well", None),
])  # fmt: skip
def test_cause(text, kind):
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
    other = replace(stage, argv=(*stage.argv, "more"))
    result = run_stage(context, other)
    assert result.status is Status.PASS and before.poll() is not None
    assert "'more']" in (context.out / result.log).read_text()


def test_what_is_not_wanted_ends(context):
    stage = script(context.out, PASSES)
    supervise.start_ahead(context, [stage, replace(stage, id="other", ahead=False)])
    process = context.waiting["s"].process
    supervise.end_waiting(context)
    assert process.poll() is not None and not context.waiting
