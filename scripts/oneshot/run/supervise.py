"""Running one stage: a child in its own session, its output, its rows, its time limit, its end."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from scripts.oneshot.box.processes import TAG, Family, die_with_parent, usable_cores
from scripts.oneshot.record.capture import StageLog, cause_of
from scripts.oneshot.record.journal import utc_now
from scripts.oneshot.record.judge import Judgement, Status, judge
from scripts.oneshot.record.model import Stage, StageResult
from scripts.oneshot.record.redact import SECRET_NAME, Redactor, may_be_shown
from scripts.oneshot.record.rows import RowError, is_number, parse_row, test_counts

ROW_CAP_BYTES = 1024 * 1024
ROWS_CAP = 20_000
AHEAD = "scripts.oneshot.run.ahead"
MOST_AHEAD = 12  # each holds some 300 MiB
# Seconds between the steps of ending a child: SIGABRT (Python writes every thread's stack),
# SIGTERM to the group, SIGKILL to everything.
LADDER_S = (3.0, 5.0)
HURRIED_LADDER_S = (0.0, 1.0)

_PASSED_ON = frozenset(
    "PATH HOME USER LOGNAME LANG LANGUAGE TZ TMPDIR PYTHONPATH LD_PRELOAD XDG_CACHE_HOME CC CXX"
    " CPATH C_INCLUDE_PATH LIBRARY_PATH NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES"
    " MKL_NUM_THREADS OPENBLAS_NUM_THREADS MPLCONFIGDIR SYSTEMROOT".split()
)


_ALWAYS = dict(
    PYTHONFAULTHANDLER="1", PYTHONUNBUFFERED="1", PYTHONHASHSEED="0", NO_COLOR="1", TERM="dumb"
)
# What else would end the supervisor, whoever sends it: it ends the run as SIGTERM does.
_LIKE_SIGTERM = ("SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGXCPU")


class Stop:
    """Set by SIGINT or SIGTERM; wakes the supervisor's wait. A second SIGINT ends at once.

    then: called once it is set, to end what else is waited for.
    """

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self._then = then
        self.by: str | None = None
        self.other: str | None = None  # the signal that was taken for SIGTERM
        self.at = 0.0
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._read

    def install(self) -> None:
        for name in ("SIGINT", "SIGTERM", *_LIKE_SIGTERM):
            signal.signal(getattr(signal, name), self._handle)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _handle(self, number: int, _frame: Any) -> None:
        if self.by == "sigint" and number == signal.SIGINT and time.monotonic() - self.at > 0.2:
            os._exit(130)
        if self.by is None:
            name = signal.Signals(number).name
            self.other = name if name in _LIKE_SIGTERM else None
            self.by = "sigterm" if self.other else name.lower()
            self.at = time.monotonic()
            with suppress(OSError):
                os.write(self._write, b"x")
            self._then()


@dataclass
class Context:
    python: str
    root: Path
    out: Path
    run_id: str
    redactor: Redactor
    on_row: Callable[[str, dict[str, Any]], None]
    stop: Stop = field(default_factory=Stop)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    on_tick: Callable[[str, float, float, list[dict[str, Any]]], None] = lambda *_: None
    echo: Callable[[str], None] | None = None
    ladder_s: tuple[float, float] = LADDER_S
    waiting: dict[str, Started] = field(default_factory=dict)  # by stage, see start_ahead()


@dataclass(frozen=True)
class Started:
    """The process of a stage, where its rows come from, and the pipe that it waits at, if ahead."""

    process: subprocess.Popen
    argv: list[str]
    rows: int
    go: int | None = None

    def drop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        os.close(self.rows)
        os.close(self.go)


def child_environment(environ: Mapping[str, str], stage: Stage, tag: str) -> dict[str, str]:
    """Return the environment of a stage: no secret of the user's shell gets in."""
    passed_on = lambda name: name in _PASSED_ON or name.startswith("LC_")
    known = {n: value for n, value in environ.items() if passed_on(n) or may_be_shown(n)}
    env = {n: v for n, v in known.items() if not SECRET_NAME.search(n) and n != "NSA_COMMIT"}
    if stage.side_by_side:  # before PyTorch is imported, see shards.py
        env.setdefault("OMP_NUM_THREADS", "1")
    return {**env, **_ALWAYS, **stage.env, TAG: tag}


def expand(argv: tuple[str, ...], python: str, out: Path) -> list[str]:
    return [part.replace("{python}", python).replace("{out}", str(out)) for part in argv]


def _start(context: Context, stage: Stage, tag: str, *, ahead: bool = False) -> Started:
    """Start the stage's process; with `ahead` it imports and waits. Raises OSError."""
    rows, rows_write = os.pipe()
    wait, go = os.pipe() if ahead else (None, None)
    env = child_environment(context.environ, stage, tag)
    env |= {"NSA_RESULT_FD": str(rows_write), "NSA_OUT_DIR": str(context.out)}
    argv = expand(stage.argv, context.python, context.out)
    given = [argv[0], "-m", AHEAD, str(wait), *argv[1:]] if ahead else argv
    passed = [fd for fd in (rows_write, wait) if fd is not None]
    try:
        process = subprocess.Popen(
            given, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, pass_fds=passed, env=env, cwd=context.root,
            preexec_fn=die_with_parent,
        )  # fmt: skip
    except OSError:
        for fd in (rows, go) if ahead else (rows,):
            os.close(fd)
        raise
    finally:
        for fd in passed:
            os.close(fd)
    return Started(process, argv, rows, go)


def start_ahead(context: Context, stages: Iterable[Stage]) -> None:
    """Let the processes of these stages import what they need, as many as there are cores."""
    for stage in [one for one in stages if one.ahead][: min(MOST_AHEAD, usable_cores() - 1)]:
        with suppress(OSError):
            tag = f"{context.run_id}:{stage.id}:1"
            context.waiting[stage.id] = _start(context, stage, tag, ahead=True)


def end_waiting(context: Context) -> None:
    while context.waiting:
        context.waiting.popitem()[1].drop()


def _waited(context: Context, stage: Stage) -> Started | None:
    """Let the process of this stage that was started ahead go on, and return it."""
    if found := context.waiting.pop(stage.id, None):
        if found.argv == expand(stage.argv, context.python, context.out):
            with suppress(OSError):  # it ended before its time
                os.write(found.go, b"x")
                os.close(found.go)
                return found
        found.drop()
    return None


def oom_kills() -> int | None:
    """Return how often Linux killed something in this cgroup for memory; None if unknown."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with suppress(OSError):
            if found := re.search(r"(?m)^oom_kill (\d+)$", Path(path).read_text()):
                return int(found[1])
    return None


class _Channel:
    """The result pipe: whole lines become rows; everything else is counted."""

    def __init__(self, context: Context, stage: Stage) -> None:
        self.rows: list[dict[str, Any]] = []
        self.unreadable = 0
        self._context, self._stage = context, stage
        self._buffer, self._skipping = b"", False

    def feed(self, data: bytes) -> None:
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            if self._skipping:
                self._skipping = False  # the end of a line that was too long
            elif line.strip():
                self._line(line)
        if len(self._buffer) > ROW_CAP_BYTES:
            self.unreadable += not self._skipping
            self._buffer, self._skipping = b"", True

    def close(self) -> None:
        if self._buffer.strip() and not self._skipping:
            self._line(self._buffer)
        self._buffer = b""

    def _line(self, line: bytes) -> None:
        try:
            row = self._context.redactor.value(parse_row(line))
            if row["kind"] != "progress":
                if len(self.rows) >= ROWS_CAP:
                    raise RowError("one too many")
                self.rows.append(row)
        except RowError:
            self.unreadable += 1
            return
        self._context.on_row(self._stage.id, row)


class _Child:
    """One started stage and the loop that listens to it."""

    def __init__(self, context: Context, stage: Stage, attempt: int, timeout_s: float) -> None:
        self.context, self.stage, self.timeout_s = context, stage, timeout_s
        self.log = StageLog(context.out / stage.log_path, context.redactor, echo=context.echo)
        self.channel = _Channel(context, stage)
        self.abandoned = self.hurried = False
        tag = f"{context.run_id}:{stage.id}:{attempt}"
        try:
            started = _waited(context, stage) or _start(context, stage, tag)
        except OSError:
            self.log.close()
            raise
        self.process = started.process
        self.family = Family(self.process.pid, tag)
        self.started = time.monotonic()
        self._rows_fd = started.rows
        self._out_fd = self.process.stdout.fileno()
        self._selector = selectors.DefaultSelector()
        for fd in (self._rows_fd, self._out_fd):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ)
        self._selector.register(context.stop.fileno(), selectors.EVENT_READ)
        self._next_look = self._next_tick = 0.0

    def pump(self, wait_s: float) -> bool:
        """Read what is there, waiting at most `wait_s`. Returns False once both pipes close."""
        for key, _ in self._selector.select(max(0.0, wait_s)):
            if key.fd == self.context.stop.fileno():
                self._selector.unregister(key.fd)  # level-triggered: once is enough
                continue
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self._selector.unregister(key.fd)
            else:
                (self.channel if key.fd == self._rows_fd else self.log).feed(data)
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + 1.0
            self.family.look()
        if now >= self._next_tick:
            self._next_tick = now + 0.5
            elapsed = now - self.started
            self.context.on_tick(self.stage.id, elapsed, self.timeout_s, self.channel.rows)
        return not {self._rows_fd, self._out_fd}.isdisjoint(self._selector.get_map())

    def pump_until(self, deadline: float, *, stop_counts: bool = False) -> bool:
        """Listen until the child has ended (True) or `deadline` (False)."""
        while self.process.poll() is None:
            now = time.monotonic()
            if now >= deadline or (stop_counts and self.context.stop.by):
                return False
            if not self.pump(min(0.1, deadline - now)):
                time.sleep(0.01)
        return True

    def end(self, *, hurried: bool) -> None:
        """Climb the ladder until the child is gone or has to be abandoned."""
        self.hurried = hurried
        first, second = HURRIED_LADDER_S if hurried else self.context.ladder_s
        if first > 0:
            with suppress(OSError):
                self.process.send_signal(signal.SIGABRT)
            self.pump_until(time.monotonic() + first)
        if self.process.poll() is None:
            self.family.signal_group(signal.SIGTERM)
            self.pump_until(time.monotonic() + second)
        if self.process.poll() is None:
            self.family.look()
            self.family.signal_group(signal.SIGKILL)
            self.abandoned = not self.pump_until(time.monotonic() + (1.0 if hurried else 5.0))

    def _drain(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while self.pump(0.02) and time.monotonic() < deadline:
            pass

    def finish(self) -> int:
        """Drain the pipes, kill what is left of the family, close. Returns how many were left."""
        self._drain(0.2 if self.hurried else 0.5)
        left = self.family.kill_survivors()
        if left:
            self._drain(0.3)
            self.log.note(f"{left} processes outlived the stage and were killed")
        self.channel.close()
        self.log.close()
        self._selector.close()
        os.close(self._rows_fd)
        self.process.stdout.close()
        return left


def result_of(stage: Stage, judgement: Judgement, **fields: Any) -> StageResult:
    """Return how `stage` ended, with what else is known of it."""
    return StageResult(
        id=stage.id, title=stage.title, required=stage.required, group=stage.group,
        status=judgement.status, reason=judgement.reason, kind=judgement.kind,
        argv=stage.argv, env=dict(stage.env), gpus=stage.gpus, **fields,
    )  # fmt: skip


def not_run(stage: Stage, status: Status, reason: str, kind: str | None = None) -> StageResult:
    return result_of(stage, Judgement(status, reason, kind), timeout_s=stage.timeout_s)


def run_stage(
    context: Context, stage: Stage, *, attempt: int = 1, budget_left_s: float | None = None,
    run_started: float | None = None,
) -> StageResult:  # fmt: skip
    """Run `stage` to its end, whatever that is, and say how it ended."""
    by_budget = budget_left_s is not None and budget_left_s < stage.timeout_s
    timeout_s = max(1.0, budget_left_s) if by_budget else stage.timeout_s
    started, t0, oom_before = utc_now(), time.monotonic(), oom_kills()
    before = {name: _stamp(context.out / name) for name in stage.outputs}
    common: dict[str, Any] = {
        "attempt": attempt, "started": started, "timeout_s": round(timeout_s, 1),
        "log": stage.log_path,
        "start_s": None if run_started is None else round(t0 - run_started, 3),
    }  # fmt: skip
    try:
        child = _Child(context, stage, attempt, timeout_s)
    except OSError as error:
        reason = context.redactor.text(f"could not be started: {error}")
        return result_of(stage, Judgement(Status.INFRA, reason, cause_of([str(error)])), **common)

    ended = child.pump_until(child.started + timeout_s, stop_counts=True)
    stopped = None if ended else context.stop.by
    timed_out = not ended and not stopped
    if timed_out:
        child.log.note(f"over its limit of {timeout_s:.0f} s: ending it")
    if not ended:
        child.end(hurried=bool(stopped))
    left = child.finish()
    if lost := child.log.lost():
        context.on_row(stage.id, {"kind": "note", "level": "warn", "text": f"{stage.id}: {lost}"})
    rc = child.process.poll()
    rows, lines = child.channel.rows, list(child.log.recent)
    cause = cause_of(lines)

    if stopped:
        judgement = Judgement(Status.INFRA, f"stopped by {stopped.upper()}", "PREEMPTED")
    elif timed_out:
        kind = "BUDGET" if by_budget else cause if cause == "GPU_LOST" else None
        words = "cut by the budget of the run" if by_budget else "over its limit"
        judgement = Judgement(Status.TIMEOUT, f"{words} after {timeout_s:.0f} s", kind)
    elif rc is not None and rc < 0:
        grew = oom_before is not None and (oom_kills() or 0) > oom_before
        kind = "OOM_HOST" if rc == -signal.SIGKILL and grew else cause
        judgement = Judgement(Status.CRASH, f"killed by {_signal_name(rc)}", kind)
    elif rc and any(line.startswith("+++") and "Timeout" in line for line in lines):
        judgement = Judgement(Status.TIMEOUT, "one test ran over its own limit")
    else:
        missing = tuple(o for o in stage.outputs if _stamp(context.out / o) in (None, before[o]))
        said = dict(unreadable=child.channel.unreadable, traceback=child.log.uncaught_error())
        judgement = judge(stage, rc, rows, missing_outputs=missing, **said)
        if judgement.status in (Status.CRASH, Status.FAIL) and judgement.kind in (None, "ASSERT"):
            judgement = replace(judgement, kind=cause or judgement.kind)
    reason = judgement.reason
    if child.abandoned:
        reason = f"{reason}; it could not be killed and was left behind"
    if left and judgement.status is not Status.PASS:
        reason = f"{reason}; {left} of its processes outlived it and were killed"
    metrics = {r["name"]: r.get("value") for r in rows if r["kind"] == "metric"}
    metrics = {name: value for name, value in metrics.items() if is_number(value)}
    common |= {name: metrics.get(name) for name in ("first_call_ms", "peak_vram_mib")}
    return result_of(
        stage, replace(judgement, reason=reason), rc=rc, signal=_signal_name(rc),
        wall_s=round(time.monotonic() - t0, 3), counts=test_counts(rows), **common,
    )  # fmt: skip


def _signal_name(rc: int | None) -> str | None:
    if rc is None or rc >= 0:
        return None
    return signal.Signals(-rc).name if -rc in set(signal.Signals) else f"signal {-rc}"


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written; None if it is missing or empty.

    Two stamps are compared, never one with the clock, which may be put right during a stage.
    """
    with suppress(OSError):
        stat = path.stat()
        return (stat.st_ino, stat.st_mtime_ns, stat.st_size) if stat.st_size else None
    return None
