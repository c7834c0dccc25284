"""The `run` verb: plan, capture, run every stage, judge, render, redact, pack."""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import IO, Any

from scripts.oneshot.box import cards, checkout, doctor
from scripts.oneshot.box import env as box
from scripts.oneshot.box.watch import Watch
from scripts.oneshot.compare.verify import AHEAD, SAMPLES, check_rows, parse_date, raw_key
from scripts.oneshot.record import bundle as bundles
from scripts.oneshot.record import judge
from scripts.oneshot.record.capture import plain
from scripts.oneshot.record.gate import gate
from scripts.oneshot.record.journal import Ballast, Journal, read_events, write_atomic, write_json
from scripts.oneshot.record.judge import Judgement, Status
from scripts.oneshot.record.model import RunRecord, Stage, StageResult
from scripts.oneshot.record.outputs import (
    WITH_SCRIPT,
    junit_xml,
    repro_script,
    scp_line,
    short_report,
)
from scripts.oneshot.record.reading import read_text
from scripts.oneshot.record.redact import RULES_VERSION, Redactor
from scripts.oneshot.report.tables import check_csvs
from scripts.oneshot.run import supervise
from scripts.oneshot.run.arguments import parser, slips_of_make
from scripts.oneshot.run.lock import Lock, Locked, folder_lock, gpu_lock
from scripts.oneshot.run.place import Place
from scripts.oneshot.run.progress import Progress
from scripts.oneshot.run.stages import ENV_STAGE, LEFT_OUT, choose, plan
from scripts.oneshot.run.supervise import Context, Stop, run_stage
from scripts.oneshot.streams import last_answer, say

ROOT = Path(__file__).resolve().parents[3]
RENDER_RESERVE_S = 10.0
DETACH_WAIT_S = 5.0
RESUME_MAX_AGE = timedelta(hours=24)


@dataclass
class Run:
    """One run in one folder. `execute()` returns the true exit code."""

    args: argparse.Namespace
    argv: list[str]
    folder: Path
    profile: str
    stages: list[Stage]
    partial: str | None
    git: dict[str, Any]
    redactor: Redactor
    stop: Stop
    smi: list[dict[str, Any]] | str
    several: list[cards.Card]
    setup: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.scope = "cpu" if self.profile == "cpu" else "gpu"
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        self.run_id = f"{stamp}-{secrets.token_hex(2)}"
        self.started = time.monotonic()
        self.record = RunRecord()
        self.previous: list[tuple[RunRecord, Path]] = []  # to take stages from, the newest first
        self.out_of_budget = self.internal_error = False
        self.saved = False  # bundle.json says what the record says
        self._commit = self.args.commit
        self.progress = Progress(self.stages, price_per_hour=self.args.price)
        self.watch = Watch(self.several, self.smi, self.event, self.note, self.progress.line)

    def event(self, ev: str, *, sync: bool = True, **fields: Any) -> None:
        self.record.apply(self.journal.append(ev, sync=sync, **fields))

    def note(self, text: str, level: str = "warn") -> None:
        self.event("note", level=level, text=text)
        self.progress.line(f"{level.upper():5} {text}")

    def _open_journal(self, seq: int = 0) -> Journal:
        room = self.ballast.release
        return Journal(self.folder / "events.jsonl", self.redactor.value, room, seq)

    def save(self, files: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Write bundle.json as of now and return it."""
        self._stay()
        data = {**self.record.to_bundle(), "files": files or []}
        self.saved = self.ballast.guarded(lambda: write_json(self.folder / "bundle.json", data))
        if not self.saved:
            self.progress.line("ERROR bundle.json could not be written: no space left")
        return data

    def show(self) -> None:
        """bundle.json and the short report as of now: what is there after a kill."""
        self.write("report.md", short_report(self.save()))

    def write(self, name: str, text: str) -> None:
        self._stay()
        self.ballast.guarded(lambda: write_atomic(self.folder / name, text))

    def execute(self) -> int:
        self._take_previous()
        made = {name for stage in self.stages for name in stage.outputs}
        self.ballast = Ballast(self.folder, {s.log_path for s in self.stages} - made)
        self.journal = self._open_journal()
        facts = {n: getattr(self, n) for n in "run_id profile scope argv git partial".split()}
        facts |= {"price_per_hour": self.args.price, "plan": [s.planned() for s in self.stages]}
        facts["started"] = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.event("run_start", **facts)
        self.show()
        self.progress.line(f"run {self.run_id}, profile {self.profile}, into {self.folder}")
        if left_out := LEFT_OUT.get(self.profile):
            names = ", ".join(left_out)
            self.note(f"profile {self.profile} leaves out {names}; standard has them", "info")
        echo = (lambda text: self.progress.line(f"  | {text}")) if self.args.verbose else None
        self.context = Context(
            sys.executable, ROOT, self.folder, self.run_id, self.redactor, stop=self.stop,
            on_row=self._on_row, on_tick=self._on_tick, echo=echo,
        )  # fmt: skip
        try:
            self._stages()
        except Exception as error:  # a fault of the runner itself must not cost what was proven
            self.internal_error = True
            self.note(f"the runner itself failed: {_where(error)}")
        finally:
            supervise.end_waiting(self.context)
        return self._finish()

    def _stages(self) -> None:
        supervise.start_ahead(self.context, self.stages)
        blocked = self._environment()
        for stage in self.stages:
            if stage.id == ENV_STAGE.id:
                continue
            self.progress.next()
            if (reason := self._why_not(stage, blocked)) is not None:
                self._end(supervise.not_run(stage, *reason))
                continue
            stage = stage.completed(self.record.results)
            if (reused := self._reusable(stage)) is not None:
                self._end(reused)
            elif (reason := self._no_time(stage)) is not None:
                self._end(supervise.not_run(stage, *reason))
            else:
                self._attempt(stage)

    def _take_previous(self) -> None:
        """Keep what an earlier run of this commit left, and read what is kept for --resume.

        Its archive goes, or it would pass for this run's; all that was in it is kept.
        """
        bundles.archive(self.folder).unlink(missing_ok=True)
        record = lambda folder: RunRecord.replay(read_events(folder / "events.jsonl"))
        if self.folder.exists():
            bundles.set_aside(self.folder, record(self.folder).run_id)
        if self.args.resume:
            kept = reversed(bundles.previous_runs(self.folder))
            self.previous = [(record(folder), folder) for folder in kept]
        self.place = Place(self.folder)

    def _stay(self) -> None:
        """Go on beside the folder of the run where it was deleted, moved or replaced."""
        if (what := self.place.lost()) is None:
            return
        before = self.folder
        self.place = self.place.beside(f"{before.name}-{self.run_id}")
        self.folder = self.context.out = self.place.folder
        self.ballast = Ballast(self.folder, self.ballast.logs)
        self._keep_journal()
        self.note(f"{before} {what} in the middle of the run: results go on in {self.folder}; "
                  "files of earlier stages may be missing")  # fmt: skip

    def _keep_journal(self) -> None:
        self.ballast.guarded(lambda: self.journal.keep_at(self.folder / "events.jsonl"))

    def _environment(self) -> str | None:
        """Capture the box and ask the doctor. Returns the text of the first BLOCK, or None."""
        stage = ENV_STAGE
        self.progress.next()
        self.progress.begin(stage)
        self._start(stage, 1, None)
        t0, answer = time.monotonic(), []
        shown = self.redactor.variables(os.environ)
        asked = (ROOT, self.folder, sys.executable, shown, self.smi, self.setup)
        probe = lambda: answer.append(box.collect(*asked))
        worker = threading.Thread(target=probe, daemon=True)
        worker.start()
        while worker.is_alive() and not self.stop.by:
            worker.join(0.05)
        wall_s, start_s = round(time.monotonic() - t0, 3), round(t0 - self.started, 3)
        common: dict[str, Any] = dict(timeout_s=stage.timeout_s, start_s=start_s, wall_s=wall_s)
        if not answer:
            box.abort()
            why = f"stopped by {self.stop.by.upper()}" if self.stop.by else "the capture failed"
            kind = "PREEMPTED" if self.stop.by else None
            self._end(supervise.result_of(stage, Judgement(Status.INFRA, why, kind), **common))
            return why
        env, device, torch = answer[0]
        on_gpu, cards_ = self.scope == "gpu", () if isinstance(self.smi, str) else self.smi
        facts = (self.folder, device, torch, self.git, os.environ, self.setup)
        checks = doctor.examine(doctor.Box(on_gpu, *facts))
        prints = box.fingerprint(device, torch, os.environ, cards_, env["system"]["cpu"])
        told = [asdict(check) for check in checks]
        self.event("facts", env=env, device=device, env_fingerprint=prints, doctor=told)
        self.ballast.guarded(lambda: write_json(self.folder / "env.json", self.record.env))
        self.write("env.txt", box.as_text(self.record.env))
        for line in doctor.lines([c for c in checks if c.level != "OK"]):
            self.progress.line(self.redactor.text(line))
        self._end(supervise.result_of(stage, Judgement(Status.PASS), rc=0, **common))
        if on_gpu:
            self.watch.start(self.folder / "telemetry.csv", self.started)
        if on_gpu and device.get("sm") == "8.9":
            self.note("SM 8.9: by policy Triton selection is off here; the parity stages and the "
                      "direct kernel benches run it all the same (NSA_TRITON_SEL_FORCE=1)",
                      level="info")  # fmt: skip
        blocks = [c for c in checks if c.level == "BLOCK"]
        return self.redactor.text(blocks[0].text) if blocks else None

    def _why_not(self, stage: Stage, blocked: str | None) -> tuple[Status, str, str | None] | None:
        """Return why `stage` is not started as (status, reason, kind), or None to go on."""
        if self.stop.by:
            return Status.NOT_RUN, f"the run was stopped by {self.stop.by.upper()}", None
        if blocked:
            return Status.NOT_RUN, f"doctor: {blocked}", "NO_GPU" if stage.gpu else None
        if (gone := self.watch.why_not(stage)) is not None:
            return gone
        first, why = None, None  # the stage that it needs, and why it cannot have that
        if stage.after in {s.id for s in self.stages}:
            first = self.record.results.get(stage.after)
            if first is None or first.status is not Status.PASS:
                ended = f"{first.status}: {first.reason}" if first else "it did not run"
                why = f"needs {stage.after}, {ended}"
        lacking = [name for name in stage.needs if not (self.folder / name).is_file()]
        if lacking and why is None:
            makers = [s.id for s in self.stages if lacking[0] in s.outputs]
            first = self.record.results.get(makers[0]) if makers else None
            why = f"needs {', '.join(lacking)}, which was not written"
        if why is not None:  # cut where that one was cut
            skipped = first is not None and first.status is Status.SKIPPED
            kind = first.kind if first is not None and judge.is_cut(first) else None
            return Status.SKIPPED if skipped else Status.NOT_RUN, why, kind
        return None

    def _no_time(self, stage: Stage) -> tuple[Status, str, str | None] | None:
        """The same for a budget that is spent: asked last, since taking over costs nothing."""
        left = self._budget_left()
        if left is not None and left < max(5.0, stage.estimate_s / 4):
            self.out_of_budget = True
            return Status.NOT_RUN, f"budget: {max(0, left):.0f} s left", "BUDGET"
        return None

    def _budget_left(self) -> float | None:
        if self.args.budget is None:
            return None
        return self.args.budget - RENDER_RESERVE_S - (time.monotonic() - self.started)

    def _attempt(self, stage: Stage) -> None:
        """Run a stage; a second time, and smaller, only after the GPU was out of memory."""
        self.progress.begin(stage)
        result = self._once(stage, 1)
        if result.kind == "OOM_DEVICE" and not (self.stop.by or None in self.watch.gone):
            size = " at half size" if stage.shrinks else ""
            if stage.side_by_side:
                size = " with a quarter of the processes at a time"
            self.note(f"{stage.id}: the GPU was out of memory; one more try{size}")
            result = self._once(stage.smaller(), 2)
            flaky = result.status is Status.PASS and not stage.shrinks
            result = replace(result, half_size=stage.shrinks, flaky=flaky)
        self.out_of_budget |= result.kind == "BUDGET"
        self._end(result)

    def _once(self, stage: Stage, attempt: int) -> StageResult:
        self.watch.before_stage()
        self._start(stage, attempt, stage.log_path)
        how = dict(budget_left_s=self._budget_left(), run_started=self.started)
        result = run_stage(self.context, stage, attempt=attempt, **how)
        result = self.watch.beside_faults(result)
        bad = result.status in (Status.CRASH, Status.TIMEOUT, Status.FAIL, Status.INFRA)
        if bad and stage.gpu and not self.stop.by:
            self.watch.after_failure(result)
        return result

    def _start(self, stage: Stage, attempt: int, log: str | None) -> None:
        self.event("stage_start", stage=stage.id, attempt=attempt, log=log)
        self.show()

    def _end(self, result: StageResult) -> None:
        if result.gpus and result.reason and not result.reason.startswith("GPU"):
            result = replace(result, reason=f"{cards.names(result.gpus)}: {result.reason}")
        self.event("stage_end", stage=result.id, result=result.to_json())
        self.progress.end(self.record.results[result.id])
        tests = [r for r in self.record.rows.get(result.id, []) if r["kind"] == "test"]
        if tests:  # of the journal, so that they survive a dead pytest
            lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in tests)
            self.write(f"tests/{result.id}.jsonl", lines)
            self.write(f"tests/{result.id}.junit.xml", junit_xml(result.id, tests))
        if result.status in WITH_SCRIPT:
            script = repro_script(result.to_json(), tests, self.record.env)
            self.write(f"repro/{result.id}.sh", script)
        self.show()

    def _on_row(self, stage: str, row: dict[str, Any]) -> None:
        if row["kind"] == "progress":
            self.progress.done_text = plain(str(row.get("text", "")))[:60]
            return
        self.event("row", stage=stage, row=row, sync=False)

    def _on_tick(self, stage: str, elapsed: float, limit: float, rows: list[dict]) -> None:
        if self.watch.telemetry:
            self.progress.telemetry = self.watch.telemetry.last
        self.watch.hear(stage)
        self.progress.tick(elapsed, limit, rows)

    def _reusable(self, stage: Stage) -> StageResult | None:
        """Return the newest PASS of the earlier runs on this box that can be taken over."""
        for old, folder in self.previous:
            done = old.results.get(stage.id)
            if done is None or not self._same_box(old, done):
                continue
            if judge.went_wrong(done):
                return None  # an older PASS would hide that
            if done.status is Status.PASS and (taken := self._take_over(stage, done, old, folder)):
                return taken
        return None

    def _same_box(self, old: RunRecord, done: StageResult) -> bool:
        """Whether this result is of these sources and this box, and fresh."""
        then = parse_date(done.started or old.started)
        same = old.env_fingerprint == self.record.env_fingerprint
        same &= checkout.same_sources(old.git, self.git) and not old.git.get("changed_during_run")
        if not same or then is None:
            return False
        return -AHEAD < datetime.now(timezone.utc) - then < RESUME_MAX_AGE

    def _take_over(
        self, stage: Stage, done: StageResult, old: RunRecord, folder: Path
    ) -> StageResult | None:
        """Take over the PASS `done`, if the same was asked and what it left holds."""
        rows = old.rows.get(stage.id, [])
        benches = [{**r, "stage": stage.id} for r in rows if r["kind"] == "bench"]
        same = done.argv == stage.argv and dict(done.env) == dict(stage.env)
        if not same or any(r["status"] == "UNSTABLE" for r in benches):
            return None
        tables = {"bench": benches, "stages": [done.to_json()]}
        wrong = [*check_rows(rows, folder), *check_csvs(tables, folder)]
        if wrong:
            self.note(f"stage {stage.id} is not taken over: {wrong[0]}", "info")
            return None
        for name in (stage.log_path, *stage.outputs):
            source = folder / name
            if not source.is_file():
                return None
            self.write(name, source.read_text(encoding="utf-8", errors="replace"))
        self.progress.begin(stage)
        self._start(stage, done.attempt, done.log)
        for row in rows:
            self.event("row", stage=stage.id, row=row, sync=False)
        self._take_over_samples(folder, rows)
        return replace(done, resumed_from=done.resumed_from or old.run_id)

    def _take_over_samples(self, source: Path, rows: list[dict[str, Any]]) -> None:
        """Take over the raw times behind the bench rows of a stage."""
        mine = {raw_key(r) for r in rows if r["kind"] == "bench"}
        before = lines = (read_text(self.folder, SAMPLES) or "").splitlines()
        for line in (read_text(source, SAMPLES) or "").splitlines():
            with suppress(ValueError, AttributeError, TypeError):
                if raw_key(json.loads(line)) in mine and line not in lines:
                    lines = [*lines, line]
        if lines != before:
            self.write(SAMPLES, "\n".join(lines) + "\n")

    def _finish(self) -> int:
        hurried = self.stop.by is not None
        self.watch.stop()
        ended_by = "budget" if self.out_of_budget else "normal"
        ended_by = "crash" if self.internal_error else self.stop.by or ended_by
        self._look_at_sources_again(2.0 if hurried else 20.0)
        self._stay()
        self._keep_journal()
        if self.stop.other:
            self.note(f"{self.stop.other} came, and ended the run as SIGTERM does")
        if self.journal.lost:
            self.note(f"{self.journal.lost} events did not fit on the disk")
        self.event("run_end", ended_by=ended_by, complete=ended_by in ("normal", "budget"))
        self.journal.close()
        self.show()
        self.ballast.drop()
        outcome = self._redact(None)
        self.show()  # with what the gate said
        self._render(2.0 if hurried else 90.0)
        rendered = outcome["gate"]
        outcome = self._redact(outcome)
        if outcome["gate"] != rendered:  # the reports speak of another outcome
            for name in ("report.html", "issue.md"):
                (self.folder / name).unlink(missing_ok=True)
            self.show()
        data = self.save(bundles.inventory(self.folder))
        code = data["verdict"]["exit_code"] if self.saved else judge.EXIT_INFRA
        packed = None
        if outcome["gate"] == "clean":
            try:
                bundles.write_sums(self.folder)
                packed = bundles.pack(self.folder)
            except (OSError, ValueError) as error:
                self.progress.line(f"WARN  no archive: {self.redactor.text(str(error))}")
        else:
            bundles.archive(self.folder).unlink(missing_ok=True)
        self._last_words(data, packed, code)
        return code

    def _look_at_sources_again(self, timeout_s: float) -> None:
        """Say so if the sources were edited while the stages ran: they are not the commit's."""
        ask = (ROOT, self._commit, self.folder.parent, timeout_s)
        now = box.guarded(lambda: checkout.git_facts(*ask))
        told = isinstance(now, dict) and now.get("problem") == self.git.get("problem")
        if not told or checkout.same_sources(self.git, now):
            return
        changed = {k: now[k] for k in ("diff_sha256", "diffstat", "untracked", "source_sha256")}
        self.event("facts", git={**self.git, **changed, "dirty": True, "changed_during_run": True})
        unknown = "nothing tells which stage ran with which of them"
        self.note(f"the sources were changed while the run was going on: {unknown}")

    def _redact(self, before: dict[str, Any] | None) -> dict[str, Any]:
        """Pass the last gate; its outcome goes into the journal and redactions.json."""
        try:
            outcome = gate(self.folder, self.redactor)
        except OSError as error:
            outcome = {"gate": "failed", "findings": [], "removed": [], "error": str(error)}
        for key in ("findings", "removed") if before is not None else ():
            outcome[key] = before[key] + outcome[key]
        counts = self.redactor.counts
        summary = {"rules_version": RULES_VERSION, "gate": outcome["gate"]}
        summary |= {"replacements": counts.total(), "by_rule": dict(sorted(counts.items()))}
        summary |= {"removed_files": outcome["removed"], "kept": sorted(self.redactor.keep)}
        self.journal = self._open_journal(self.journal.seq)
        self.journal.started = self.started
        self.event("redaction", summary=summary)
        self.journal.close()
        path = self.folder / "redactions.json"
        self.ballast.guarded(lambda: write_json(path, {**summary, **outcome}))
        return outcome

    def _render(self, limit_s: float) -> None:
        """Make report.md, issue.md and the rest in a child, whose death takes nothing along."""
        short = read_text(self.folder, "report.md")
        try:
            with tempfile.TemporaryFile("w+", errors="replace") as said:
                child = _start_verb(["render", str(self.folder)], said)
                deadline = time.monotonic() + limit_s
                while child.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.02)
                    if self.stop.by:
                        deadline = min(deadline, self.stop.at + 2.0)
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
                    problem = "there was no time left"
                elif child.returncode == 0:
                    return
                else:
                    said.seek(0)
                    problem = (said.read().strip().splitlines() or ["no word why"])[-1][:300]
        except OSError as error:
            problem = str(error)
        what, have = "the full report was not rendered", "report.md is the short one"
        if read_text(self.folder, "report.md") != short:
            what = "the reports are not whole"
            have = "report.md is full, but issue.md, report.html or the plots may be missing"
        self.progress.line(f"WARN  {what}: {self.redactor.text(problem)}")
        again = f"python -m scripts.oneshot render {shlex.quote(str(self.folder))}"
        self.progress.line(f"      {have}; try again: {again}")

    def _last_words(self, data: dict[str, Any], packed: tuple | None, code: int) -> None:
        """packed: the archive's path, sha256 and size."""
        tell = self.progress.line
        tell(f"\n{data['verdict']['one_line']}")
        for head, name, more in (("report:", "md", ""), ("", "html", "  (the same for a browser)")):
            if (report := self.folder / f"report.{name}").is_file():
                tell(f"{head:8} {report}{more}")
        if packed:
            path, digest, size = packed
            tell(f"bundle:  {path}  ({size / 2**20:.1f} MiB)\nsha256:  {digest}")
            if size > bundles.WARN_BYTES:
                tell("WARN  the archive is over 10 MiB; some trackers refuse it")
            tell("look at it before you post it: redaction is best effort")
            if fetch := scp_line(os.environ, path):
                tell(f"fetch:   {fetch}")
        elif data["redaction"].get("gate") != "clean":
            tell("not packed: something private could not be removed; see redactions.json")
        if self.scope == "gpu" and (self.args.price or os.environ.get("SSH_CONNECTION")):
            tell(f"you are paying until you destroy the box{self.progress.cost()}")
        if not self.saved:
            full = "the disk is full; events.jsonl goes further"
            tell(f"bundle.json is not of this run's end: {full}")
        tell(f"exit code {code}")


def _where(error: Exception) -> str:
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"


def _dry_run(profile: str, stages: list[Stage], folder: Path) -> int:
    print(f"profile {profile}, into {folder}")
    for stage in stages:
        variables = " ".join(f"{k}={v}" for k, v in stage.env.items())
        command = shlex.join(stage.argv).replace("'{python}'", "python")
        print(f"{stage.id:16} about {stage.estimate_s:3.0f} s  {variables} {command}")
    print(f"about {sum(s.estimate_s for s in stages) / 60:.1f} minutes in all")
    return 0


def _start_verb(argv: list[str], said: IO[str]) -> subprocess.Popen[bytes]:
    """Start a verb of scripts.oneshot in a session of its own; `said` gets its words."""
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.oneshot", *argv], cwd=ROOT, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
    )  # fmt: skip


def _detach(argv: list[str], out: Path, folder: Path) -> int:
    """Start the run in a session of its own. Returns 0 once it began, else its exit code."""
    run_id = lambda: RunRecord.replay(read_events(folder / "events.jsonl")).run_id
    before = run_id()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        child = _start_verb(["run", *argv], said)
        deadline = time.monotonic() + DETACH_WAIT_S
        words = "waiting as process"  # for a lock, or for a slow driver
        while time.monotonic() < deadline:
            code = child.poll()
            if run_id() not in ("", before):
                words = "running as process"
                break
            if code is not None:
                said.seek(0)
                say(said.read().strip() or f"not started: the run ended with exit code {code}")
                return code
            time.sleep(0.05)
    where = shlex.quote(str(out))
    print(f"{words} {child.pid}; follow it: python -m scripts.oneshot attach {where}")
    return 0


def main(argv: list[str]) -> int:
    """Return the run's exit code; a fault of the runner itself is one line and EXIT_INFRA."""
    try:
        return _main(argv)
    except KeyboardInterrupt:
        say("stopped by SIGINT before the run began")
        return 130
    except Exception as error:
        say(f"not run, the runner itself failed: {_where(error)}")
        return judge.EXIT_INFRA


def _main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    if slips := [*slips_of_make(os.environ.get("MAKEFLAGS", ""))]:
        say("\n".join(slips))
        return judge.EXIT_USAGE
    for name, given in (("PROFILE", args.profile != "auto"), ("BUDGET", args.budget)):
        if name in os.environ and not given:
            option = f"--{name.lower()}, or {name}=... behind make gpu-report"
            say(f"{name} of the environment means nothing here; give {option}")
    out = (args.out_dir or ROOT / "artifacts" / "runner").resolve()
    stop = Stop(then=box.abort)
    if not (args.dry_run or args.detach):
        stop.install()  # what ends the run from here on leaves a report
    hardware = box.guarded(box.nvidia_hardware)
    smi = box.smi_or_why(hardware)
    if args.gpus and hardware and isinstance(smi, str):
        try:
            smi = cards.query_each()
        except box.ProbeFailed as error:
            smi = str(error)
    profile = args.profile
    if profile in ("auto", "gpu"):
        there = profile == "gpu" or hardware or not isinstance(smi, str)
        profile = "standard" if there else "cpu"
    if args.gpus and (profile == "cpu" or (isinstance(smi, str) and not hardware)):
        why = "profile cpu uses none" if args.profile == "cpu" else "no NVIDIA hardware is visible"
        say(f"--gpus names GPUs, got {args.gpus!r}, but {why}")
        return judge.EXIT_USAGE
    several: list[cards.Card] = []
    try:
        if args.gpus and not isinstance(smi, str):
            several = cards.select(args.gpus, smi, os.environ)
        stages = cards.expand(plan(profile), several, profile)
        stages, partial = choose(stages, args.only, args.skip)
    except ValueError as error:
        say(str(error))
        return judge.EXIT_USAGE
    if several and len(smi) > 1:
        os.environ.update(cards.visible(cards.good(several) or several))
    several = several if len(several) > 1 else []
    # nvidia-smi's numbers are meant, here and in every stage.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    args.commit = args.commit or os.environ.get("NSA_COMMIT")  # of sources without git
    git = checkout.git_facts(ROOT, args.commit, out)
    folder = out / git["short"]
    if args.dry_run:
        return _dry_run(profile, stages, folder)
    if args.detach:
        return _detach([a for a in argv if a != "--detach"], out, folder)
    box.settle_triton_cache(out)
    keep = tuple(n for n, on in (("host", args.keep_host), ("ip", args.keep_ip)) if on)
    redactor = Redactor(root=ROOT, keep=keep)
    said, setup = [redactor.text(a) for a in argv], last_answer(os.environ.get("ONESHOT_SETUP", ""))
    locks: list[Lock] = []
    try:
        locks.append(folder_lock(out, git["short"]))
        if profile != "cpu" and not isinstance(smi, str):
            alone = box.visible_gpu(smi, os.environ).get("uuid")
            for uuid in [c.uuid for c in several] or [alone]:
                locks.append(gpu_lock(str(uuid)))
        for lock in locks:
            lock.acquire(args.wait, lambda: stop.by)
    except Locked as error:
        if stop.by:
            say(f"stopped by {stop.by.upper()} while it waited: {error}")
            return judge.EXIT_BY_SIGNAL[stop.by]
        say(f"not started: {error}. Wait for it, or use --wait 10m.")
        return judge.EXIT_LOCKED
    except OSError as error:
        say(f"not started: the output folder cannot be used: {error}")
        return judge.EXIT_INFRA
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    facts = (folder, profile, stages, partial, git, redactor, stop, smi, several, setup or {})
    try:
        return Run(args, said, *facts).execute()
    finally:
        for lock in locks:
            lock.release()
