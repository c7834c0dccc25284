"""From evidence to words: the status of one stage and the verdict over the whole run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from bench.records import card_faults
from scripts.oneshot.rows import is_number, test_counts

if TYPE_CHECKING:
    from scripts.oneshot.model import RunRecord, Stage, StageResult

EXIT_OK, EXIT_FAIL, EXIT_USAGE, EXIT_NOT_RUN, EXIT_INFRA = 0, 1, 2, 3, 4
EXIT_INVALID, EXIT_REDACTION, EXIT_LOCKED = 5, 6, 75
EXIT_BY_SIGNAL = {"sigint": 130, "sigterm": 143}  # SIGHUP is ignored: the run goes on


class Status(str, Enum):
    """How a stage ended. Only PASS says that something ran and was right."""

    PASS = "PASS"
    FAIL = "FAIL"
    SKIPPED = "SKIPPED"
    NOT_RUN = "NOT_RUN"
    TIMEOUT = "TIMEOUT"
    CRASH = "CRASH"
    INFRA = "INFRA"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Judgement:
    status: Status
    reason: str | None = None
    kind: str | None = None


def judge(
    stage: Stage,
    rc: int | None,
    rows: list[dict[str, Any]],
    *,
    unreadable: int = 0,
    missing_outputs: tuple[str, ...] = (),
    traceback: str | None = None,
) -> Judgement:
    """Status of a stage whose child ended by itself with exit code `rc`.

    Timeouts, signals and failed starts are judged by the supervisor, before this. `unreadable`
    counts lines of the result channel that were no rows; `traceback` is the last line of an
    uncaught error.
    """
    counts = test_counts(rows)
    bad_tests = [r for r in rows if r["kind"] == "test" and r["outcome"] in ("failed", "error")]
    parity = [r for r in rows if r["kind"] == "parity"]
    bad_parity = [r for r in parity if r["status"] != "PASS"]
    bench = [r for r in rows if r["kind"] == "bench"]
    by = {
        s: [r for r in bench if r["status"] == s]
        for s in ("VALID", "UNSTABLE", "INVALID", "FAILED")
    }
    note = next((r.get("text") for r in reversed(rows) if r["kind"] == "note"), None)
    runs_pytest = "pytest" in stage.argv
    lost = f"; and exit code {rc}: tests may be missing" if runs_pytest and rc not in (0, 1) else ""

    if faults := [why for r in rows if r["kind"] == "health" for why in card_faults(r)]:
        return Judgement(Status.FAIL, "; ".join(faults), "CORRUPTION")
    if bad_parity:
        first = bad_parity[0]
        why = "; ".join(first["why"]) or "over its limit"
        text = (
            f"{len(bad_parity)} of {len(parity)} parity cases wrong, first {first['case']}: {why}"
        )
        return Judgement(Status.FAIL, text + lost, "PARITY")
    if bad_tests:
        text = f"{len(bad_tests)} of {sum(counts.values())} tests failed, first "
        text += bad_tests[0]["nodeid"]
        return Judgement(Status.FAIL, text + lost, "ASSERT")
    if by["FAILED"]:
        first = by["FAILED"][0]
        text = f"{len(by['FAILED'])} of {len(bench)} bench cases failed, first {first['case']}: "
        return Judgement(Status.FAIL, text + "; ".join(first["why"]), "BENCH")

    if runs_pytest and rc == 5:
        return Judgement(Status.NOT_RUN, "no test was collected")
    if rc == 3 and not runs_pytest:
        if note:
            return Judgement(Status.SKIPPED, str(note), _memory(str(note)))
        return Judgement(Status.NOT_RUN, "the stage says that nothing could be run")
    if rc != 0:
        if runs_pytest and rc in (2, 3, 4):
            words = {2: "interrupted or not collected", 3: "internal error", 4: "usage error"}
            return Judgement(Status.CRASH, f"pytest: {words[rc]}; {traceback or 'see the log'}")
        if traceback:
            return Judgement(Status.CRASH, traceback)
        if rc == 1:
            notes = [r for r in rows if r["kind"] == "note" and r.get("level") == "warn"]
            text = str(notes[-1].get("text")) if notes else "exit code 1 and no row that says why"
            return Judgement(Status.FAIL, text, "ASSERT")
        text = "usage error, exit code 2" if rc == 2 else f"exit code {rc}"
        return Judgement(Status.CRASH, text)

    of_tests, reported = runs_pytest or stage.proof == "tests", sum(counts.values())
    if of_tests and counts["passed"] == 0:
        if counts["skipped"]:
            reasons = {
                str(r.get("reason")) for r in rows if r["kind"] == "test" and r.get("reason")
            }
            text = "; ".join(sorted(reasons)[:3])
            return Judgement(Status.NOT_RUN, f"all {counts['skipped']} tests skipped: {text}")
        return Judgement(Status.NOT_RUN, "exit code 0, but no test ran")
    if unfinished := _unfinished(rows, reported):
        return Judgement(Status.CRASH, unfinished)
    found, what = (reported, "tests") if of_tests else (len(bench), "bench cases")
    if found < stage.least:
        text = f"exit code 0, but {found} {what} where this stage has {stage.least}"
        return Judgement(Status.NOT_RUN, text)
    files = [r["nodeid"].rpartition("/")[2] for r in rows if r["kind"] == "test"]
    for name, least in stage.of_files.items():
        if (of := sum(file.startswith(name) for file in files)) < least:
            text = f"exit code 0, but {of} tests of {name}*.py where this stage has {least}"
            return Judgement(Status.NOT_RUN, text)
    if stage.proof == "parity" and not parity:
        return Judgement(Status.NOT_RUN, "exit code 0, but no parity case was recorded")
    if stage.proof == "bench" and not (by["VALID"] or by["UNSTABLE"] or by["INVALID"]):
        skipped = next((r for r in bench if r["status"] == "SKIPPED"), None)
        if skipped:
            why = "; ".join(skipped["why"])
            return Judgement(Status.SKIPPED, why, _memory(why))
        return Judgement(Status.NOT_RUN, "exit code 0, but no bench case ran")
    kinds = ("metric", "health", "recommend", "parity", "bench")
    results = [
        r for r in rows if r["kind"] in kinds and r.get("status") != "SKIPPED"
        and not str(r.get("name")).startswith("seconds/")  # which says what became of the time
    ]  # fmt: skip
    if stage.proof == "row" and not results:
        return Judgement(Status.NOT_RUN, "exit code 0, but no result was sent")
    if missing_outputs:
        return Judgement(
            Status.NOT_RUN, f"exit code 0, but not written: {', '.join(missing_outputs)}"
        )
    if unreadable:
        text = f"{unreadable} lines of the result channel were unreadable; results may be missing"
        return Judgement(Status.INFRA, text, "CHANNEL")
    if by["INVALID"]:
        first = by["INVALID"][0]
        text = f"{len(by['INVALID'])} of {len(bench)} bench cases invalid, first {first['case']}: "
        return Judgement(Status.FAIL, text + "; ".join(first["why"]), "INVALID")
    if stage.proof == "bench" and not by["VALID"]:
        text = f"all {len(by['UNSTABLE'])} bench cases unstable"
        return Judgement(Status.FAIL, text, "UNSTABLE")
    return Judgement(Status.PASS)


def _unfinished(rows: list[dict[str, Any]], reported: int) -> str | None:
    """What tests announced and did not show, where there was a session of pytest."""
    begun = [r["tests"] for r in rows if r["kind"] == "session" and not r["ended"]]
    ended = sum(r["kind"] == "session" and r["ended"] for r in rows)
    if reported < sum(begun):
        return f"exit code 0, but {reported} of {sum(begun)} announced tests reported"
    if ended < len(begun):
        return f"exit code 0, but {ended} of {len(begun)} processes came to the end of their tests"
    return None


def _memory(why: str) -> str | None:
    """The kind of a bench that could time nothing because the GPU's memory was too small."""
    return "OOM_DEVICE" if "out of memory" in why else None


def _named(stage: StageResult) -> str:
    """The stage and, in a run on several cards, the one card it ran on."""
    return f"{stage.id} (GPU {stage.gpus[0]})" if len(stage.gpus) == 1 else stage.id


def _cause(absent: list[StageResult]) -> str:
    """Why stages that had to run did not, in a few words; the first one drags others along."""
    if any(s.kind == "BUDGET" for s in absent):
        return "its budget was spent"
    words = " ".join(str(absent[0].reason).split())
    return words if len(words) <= 120 else words[:117] + "..."


def is_cut(stage: StageResult) -> bool:
    """Was this stage left out because time or GPU memory was too short, and for nothing else?"""
    no_memory = stage.status is Status.SKIPPED and stage.kind == "OOM_DEVICE"
    return stage.kind == "BUDGET" or no_memory


def verdict(record: RunRecord, stages: list[StageResult]) -> dict[str, Any]:
    """Status, exit code and the one line of the whole run."""
    parity, bench = record.rows_of("parity"), record.rows_of("bench")
    outcomes = Counter(t["outcome"] for t in record.rows_of("test"))
    passed, skipped = outcomes["passed"], outcomes["skipped"]
    failed = outcomes["failed"] + outcomes["error"]
    parity_pass = sum(p["status"] == "PASS" for p in parity)
    bench_valid = sum(b["status"] == "VALID" for b in bench)
    bench_skipped = sum(b["status"] == "SKIPPED" for b in bench)
    # A CPU's times claim nothing, so they cannot be invalid either.
    no_valid = record.scope == "gpu" and len(bench) > bench_skipped and not bench_valid

    soft = ("INVALID", "UNSTABLE")
    wrong = [s for s in stages if s.status is Status.FAIL and s.kind not in soft]
    shaky = [s for s in stages if s.status is Status.FAIL and s.kind in soft]
    broken = [
        s
        for s in stages
        if s.status in (Status.TIMEOUT, Status.CRASH, Status.INFRA)
        and s.kind not in ("BUDGET", "PREEMPTED")
    ]
    stopped = [s for s in stages if s.kind == "PREEMPTED"]
    absent = [
        s
        for s in stages
        if (s.required and s.status in (Status.SKIPPED, Status.NOT_RUN)) or s.kind == "BUDGET"
    ]
    passes = any(s.status is Status.PASS for s in stages)
    proven = passed or parity_pass or bench_valid
    doubtful = bool(shaky) or no_valid
    bad_gate = record.redaction.get("gate") == "failed"
    complete_but_for_cuts = passes and proven and not doubtful and all(map(is_cut, absent))
    status, code = next(
        (status, code)
        for holds, status, code in (
            (bad_gate, "FAIL", EXIT_REDACTION),
            (record.ended_by in EXIT_BY_SIGNAL, "STOPPED", EXIT_BY_SIGNAL.get(record.ended_by)),
            (wrong or failed or parity_pass < len(parity), "FAIL", EXIT_FAIL),
            (broken or record.ended_by == "crash", "BROKEN", EXIT_INFRA),
            (absent and complete_but_for_cuts, "INCOMPLETE", EXIT_NOT_RUN),
            (absent or not passes or not (proven or doubtful), "NOT_RUN", EXIT_NOT_RUN),
            (doubtful, "INVALID", EXIT_INVALID),
            (True, "PASS", EXIT_OK),
        )
        if holds
    )

    cut, on_cpu = status == "INCOMPLETE", record.scope == "cpu"
    no_time = any(s.kind == "BUDGET" for s in absent)
    short = "its budget was spent" if no_time else "the GPU's memory was too small"
    bench_words = f"VALID {bench_valid}/{len(bench)}"
    bench_words += f" ({bench_skipped} skipped)" if bench_skipped else ""
    groups = {
        "wrong": wrong,
        "broken": broken,
        "stopped": stopped,
        "cut" if cut else "not run": absent,
        "invalid or unstable": shaky,
    }
    parts = [
        on_cpu and "CPU profile, says nothing about any GPU",
        cut and f"all that ran passed, {short}",
        status == "NOT_RUN" and absent and _cause(absent),
        f"{passed}/{passed + failed} tests" + (f" ({skipped} skipped)" if skipped else ""),
        f"parity {parity_pass}/{len(parity)}",
        bench and f"benches {'claim nothing, ' if on_cpu else ''}{bench_words}",
        status == "NOT_RUN"
        and not absent
        and "nothing was proven: no passed test, parity case or valid bench",
        *(f"{title}: {', '.join(map(_named, group))}" for title, group in groups.items() if group),
        bad_gate and "redaction FAILED, do not post this",
        record.partial and f"partial run ({record.partial})",
        *_facts(record),
    ]
    return {
        "status": status,
        "exit_code": code,
        "one_line": f"{status} - " + "; ".join(part for part in parts if part),
        "executed_tests": passed + failed,
        "passed": passed,
        "failed": failed,
        "skipped": skipped,
        "parity_pass": parity_pass,
        "parity_total": len(parity),
        "bench_valid": bench_valid,
        "bench_total": len(bench),
        "not_run": sum(s.status is Status.NOT_RUN for s in stages),
    }


def _facts(record: RunRecord) -> Iterator[str]:
    """GPU, versions, commit and duration, as far as they are known."""
    device, git, versions = record.device, record.git, record.env.get("python")
    if record.scope == "gpu" and device.get("name"):
        cap, full = device.get("power_limit_w"), device.get("power_default_w")
        capped = is_number(cap) and is_number(full) and cap < full
        yield f"{device['name']}" + (f" (capped {cap:g}/{full:g} W)" if capped else "")
    versions = versions if isinstance(versions, dict) else {}  # or "<probe failed: ...>"
    known = [n for n in ("torch", "triton") if not str(versions.get(n) or "<").startswith("<")]
    yield " ".join(f"{n} {versions[n]}" for n in known)
    if git.get("short"):
        other = f" as given, but git has {str(git['head'])[:7]}" if git.get("head") else ""
        yield f"commit {git['short']}" + (" DIRTY" if git.get("dirty") else "") + other
    if is_number(record.monotonic_s):
        minutes, seconds = divmod(round(record.monotonic_s), 60)
        yield f"{minutes} m {seconds:02d} s" if minutes else f"{seconds} s"
