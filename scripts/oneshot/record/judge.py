"""From evidence to words: the status of one stage and the verdict over the whole run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from bench.records import NUMBERED, card_faults
from scripts.oneshot.record.rows import is_number

if TYPE_CHECKING:
    from scripts.oneshot.record.model import RunRecord, Stage, StageResult

Rows = list[dict[str, Any]]
Groups = dict[str, list["StageResult"]]
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
    stage: Stage, rc: int | None, rows: list[dict[str, Any]], *, unreadable: int = 0,
    missing_outputs: tuple[str, ...] = (), traceback: str | None = None,
) -> Judgement:  # fmt: skip
    """Status of a stage whose child ended by itself with exit code `rc`.

    Timeouts, signals and failed starts are judged by the supervisor, before this. `unreadable`
    counts lines of the result channel that were no rows; `traceback` is the last line of an
    uncaught error.
    """
    found = _wrong(stage, rc, rows) or _ended(stage, rc, rows, traceback)
    found = found or _not_whole(stage, rows)
    found = found or _unproven(stage, rows, missing_outputs, unreadable)
    return found or Judgement(Status.PASS)


def _of(rows: list[dict[str, Any]], kind: str, *states: str) -> list[dict[str, Any]]:
    """The rows of a kind; with `states` those in one of them."""
    state = "outcome" if kind == "test" else "status"
    return [r for r in rows if r["kind"] == kind and (not states or r[state] in states)]


def _first(bad: list[dict[str, Any]], of: list[dict[str, Any]], words: str) -> str:
    """How many of `of` are `bad`, which is the first and why."""
    row = bad[0]
    text = f"{len(bad)} of {len(of)} {words}, first {row.get('case', row.get('nodeid'))}"
    return text if row["kind"] == "test" else f"{text}: {'; '.join(row['why']) or 'over its limit'}"


def _wrong(stage: Stage, rc: int | None, rows: list[dict[str, Any]]) -> Judgement | None:
    """A result that is wrong, whatever else happened."""
    if faults := [why for r in _of(rows, "health") for why in card_faults(r)]:
        return Judgement(Status.FAIL, "; ".join(faults), "CORRUPTION")
    broke = "pytest" in stage.argv and rc not in (0, 1)
    lost = f"; and exit code {rc}: tests may be missing" if broke else ""
    for kind, states, words, name, more in (
        ("parity", ("FAIL",), "parity cases wrong", "PARITY", lost),
        ("parity", ("INVALID",), "parity cases not proven", "PARITY", lost),
        ("test", ("failed", "error"), "tests failed", "ASSERT", lost),
        ("bench", ("FAILED",), "bench cases failed", "BENCH", ""),
    ):
        if bad := _of(rows, kind, *states):
            return Judgement(Status.FAIL, _first(bad, _of(rows, kind), words) + more, name)
    return None


def _ended(stage: Stage, rc: int | None, rows: Rows, traceback: str | None) -> Judgement | None:
    """What the exit code says, where it is not 0."""
    runs_pytest, notes = "pytest" in stage.argv, _of(rows, "note")
    words = {2: "interrupted or not collected", 3: "internal error", 4: "usage error"}
    if rc == 0:
        return None
    if runs_pytest and rc == 5:
        return Judgement(Status.NOT_RUN, "no test was collected")
    if rc == 3 and not runs_pytest:
        if notes and (note := notes[-1].get("text")):
            return Judgement(Status.SKIPPED, str(note), _memory(str(note)))
        return Judgement(Status.NOT_RUN, "the stage says that nothing could be run")
    if runs_pytest and rc in words:
        return Judgement(Status.CRASH, f"pytest: {words[rc]}; {traceback or 'see the log'}")
    if rc == 1 and not traceback:
        warned = [str(r.get("text")) for r in notes if r.get("level") == "warn"]
        text = warned[-1] if warned else "exit code 1 and no row that says why"
        return Judgement(Status.FAIL, text, "ASSERT")
    text = "usage error, exit code 2" if rc == 2 else f"exit code {rc}"
    return Judgement(Status.CRASH, traceback or text)


def _not_whole(stage: Stage, rows: list[dict[str, Any]]) -> Judgement | None:
    """Tests or cases that are missing although the exit code is 0."""
    tests, skipped = _of(rows, "test"), _of(rows, "test", "skipped")
    of_tests = "pytest" in stage.argv or stage.proof == "tests"
    if of_tests and not _of(rows, "test", "passed"):
        reasons = sorted({str(r["reason"]) for r in skipped if r.get("reason")})
        text = f"all {len(skipped)} tests skipped: {'; '.join(reasons[:3])}"
        return Judgement(Status.NOT_RUN, text if skipped else "exit code 0, but no test ran")
    begun = [r["tests"] for r in rows if r["kind"] == "session" and not r["ended"]]
    ended = sum(r["kind"] == "session" and r["ended"] for r in rows)
    if len(tests) < sum(begun):
        text = f"exit code 0, but {len(tests)} of {sum(begun)} announced tests reported"
        return Judgement(Status.CRASH, text)
    if ended < len(begun):
        text = f"{ended} of {len(begun)} processes came to the end of their tests"
        return Judgement(Status.CRASH, f"exit code 0, but {text}")
    found, what = (tests, "tests") if of_tests else (_of(rows, "bench"), "bench cases")
    files = [r["nodeid"].rpartition("/")[2] for r in tests]
    wanted = [(len(found), what, stage.least)] + [
        (sum(file.startswith(name) for file in files), f"tests of {name}*.py", least)
        for name, least in stage.of_files.items()
    ]
    for count, what, least in wanted:
        if count < least:
            text = f"exit code 0, but {count} {what} where this stage has {least}"
            return Judgement(Status.NOT_RUN, text)
    return None


def _unproven(
    stage: Stage, rows: Rows, missing_outputs: tuple[str, ...], unreadable: int
) -> Judgement | None:
    """The evidence of Stage.proof that is missing, and what was sent and cannot be believed."""
    ran = _of(rows, "bench", *NUMBERED, "INVALID")
    if stage.proof == "bench" and not ran and (skipped := _of(rows, "bench", "SKIPPED")):
        why = "; ".join(skipped[0]["why"])
        return Judgement(Status.SKIPPED, why, _memory(why))
    said = [r for r in rows if r["kind"] in ("metric", "health", "recommend", "parity", "bench")]
    seconds = lambda r: str(r.get("name")).startswith("seconds/")  # what became of the time
    results = [r for r in said if r.get("status") != "SKIPPED" and not seconds(r)]
    for missing, words in (
        (stage.proof == "parity" and not _of(rows, "parity"), "no parity case was recorded"),
        (stage.proof == "bench" and not ran, "no bench case ran"),
        (stage.proof == "row" and not results, "no result was sent"),
        (missing_outputs, f"not written: {', '.join(missing_outputs)}"),
    ):
        if missing:
            return Judgement(Status.NOT_RUN, f"exit code 0, but {words}")
    bench = _of(rows, "bench")
    if unreadable:
        text = f"{unreadable} lines of the result channel were unreadable; results may be missing"
        return Judgement(Status.INFRA, text, "CHANNEL")
    if invalid := _of(rows, "bench", "INVALID"):
        return Judgement(Status.FAIL, _first(invalid, bench, "bench cases invalid"), "INVALID")
    if stage.proof == "bench" and not _of(rows, "bench", "VALID"):
        text = f"all {len(_of(rows, 'bench', 'UNSTABLE'))} bench cases unstable"
        return Judgement(Status.FAIL, text, "UNSTABLE")
    return None


def _memory(why: str) -> str | None:
    """The kind of a bench that could time nothing because the GPU's memory was too small."""
    return "OOM_DEVICE" if "out of memory" in why else None


def is_cut(stage: StageResult) -> bool:
    """Was this stage left out because time or GPU memory was too short, and for nothing else?"""
    no_memory = stage.status is Status.SKIPPED and stage.kind == "OOM_DEVICE"
    return stage.kind == "BUDGET" or no_memory


def went_wrong(stage: StageResult) -> bool:
    """Did this stage run and not come out right, for another reason than that it was cut off?"""
    wrong = (Status.FAIL, Status.CRASH, Status.TIMEOUT, Status.INFRA)
    return stage.status in wrong and stage.kind not in ("BUDGET", "PREEMPTED")


def verdict(record: RunRecord, stages: list[StageResult]) -> dict[str, Any]:
    """Status, exit code and the one line of the whole run."""
    outcomes = Counter(t["outcome"] for t in record.rows_of("test"))
    parity = [p["status"] for p in record.rows_of("parity")]
    bench = Counter(b["status"] for b in record.rows_of("bench"))
    passed, failed = outcomes["passed"], outcomes["failed"] + outcomes["error"]
    counts = {
        "executed_tests": passed + failed, "passed": passed, "failed": failed,
        "skipped": outcomes["skipped"],
        "parity_pass": parity.count("PASS"), "parity_total": len(parity),
        "bench_valid": bench["VALID"], "bench_total": bench.total(),
        "not_run": sum(s.status is Status.NOT_RUN for s in stages),
    }  # fmt: skip
    not_right = [s for s in stages if s.status is Status.FAIL]
    soft = ("INVALID", "UNSTABLE")
    ended = [s for s in stages if s.status in (Status.TIMEOUT, Status.CRASH, Status.INFRA)]
    left = lambda s: s.required and s.status in (Status.SKIPPED, Status.NOT_RUN)
    groups = {  # the stages that were not right, by what is said of them
        "wrong": [s for s in not_right if s.kind not in soft],
        "broken": [s for s in ended if s.kind not in ("BUDGET", "PREEMPTED")],
        "stopped": [s for s in stages if s.kind == "PREEMPTED"],
        "not run": [s for s in stages if left(s) or s.kind == "BUDGET"],
        "invalid or unstable": [s for s in not_right if s.kind in soft],
    }
    # A CPU's times claim nothing, so they cannot be invalid either.
    no_valid = record.scope == "gpu" and bench.total() > bench["SKIPPED"] and not bench["VALID"]
    passes = any(s.status is Status.PASS for s in stages)
    status, code = _status(record, counts, groups, passes, no_valid)
    parts = _parts(record, counts, groups, status, bench["SKIPPED"])
    line = f"{status} - " + "; ".join(part for part in parts if part)
    return {"status": status, "exit_code": code, "one_line": line, **counts}


def _status(
    record: RunRecord, counts: dict[str, int], groups: Groups, passes: bool, no_valid: bool
) -> tuple[str, int]:
    """Return status and exit code. passes: a stage did; no_valid: no time is VALID, of some."""
    wrong, broken, _, absent, shaky = groups.values()
    wrong_rows = counts["failed"] or counts["parity_pass"] < counts["parity_total"]
    proven = counts["passed"] or counts["parity_pass"] or counts["bench_valid"]
    doubtful = bool(shaky) or no_valid
    complete_but_for_cuts = passes and proven and not doubtful and all(map(is_cut, absent))
    if record.redaction.get("gate") == "failed":
        return "FAIL", EXIT_REDACTION
    if record.ended_by in EXIT_BY_SIGNAL:
        return "STOPPED", EXIT_BY_SIGNAL[record.ended_by]
    if wrong or wrong_rows:
        return "FAIL", EXIT_FAIL
    if broken or record.ended_by == "crash":
        return "BROKEN", EXIT_INFRA
    if absent and complete_but_for_cuts:
        return "INCOMPLETE", EXIT_NOT_RUN
    if absent or not passes or not (proven or doubtful):
        return "NOT_RUN", EXIT_NOT_RUN
    return ("INVALID", EXIT_INVALID) if doubtful else ("PASS", EXIT_OK)


def _parts(
    record: RunRecord, counts: dict[str, int], groups: Groups, status: str, bench_skipped: int
) -> Iterator[str | None]:
    """Yield what the one line says after the status; what is empty is left out."""
    absent, on_cpu = groups["not run"], record.scope == "cpu"
    no_time = "its budget was spent" if any(s.kind == "BUDGET" for s in absent) else None
    if on_cpu:
        yield "CPU profile, says nothing about any GPU"
    if status == "INCOMPLETE":
        short = no_time or "the GPU's memory was too small"
        yield f"all that ran passed, {short}"
    if status == "NOT_RUN" and absent:  # the first one drags others along
        words = " ".join(str(absent[0].reason).split())
        yield no_time or (words if len(words) <= 120 else words[:117] + "...")
    skipped = f" ({counts['skipped']} skipped)" if counts["skipped"] else ""
    yield f"{counts['passed']}/{counts['executed_tests']} tests{skipped}"
    yield f"parity {counts['parity_pass']}/{counts['parity_total']}"
    if counts["bench_total"]:
        skipped = f" ({bench_skipped} skipped)" if bench_skipped else ""
        valid = f"VALID {counts['bench_valid']}/{counts['bench_total']}{skipped}"
        yield f"benches {'claim nothing, ' if on_cpu else ''}{valid}"
    if status == "NOT_RUN" and not absent:
        yield "nothing was proven: no passed test, parity case or valid bench"
    for title, group in groups.items():
        title = "cut" if group is absent and status == "INCOMPLETE" else title
        card = lambda s: f" (GPU {s.gpus[0]})" if len(s.gpus) == 1 else ""
        if group:
            yield f"{title}: {', '.join(s.id + card(s) for s in group)}"
    if record.redaction.get("gate") == "failed":
        yield "redaction FAILED, do not post this"
    if record.partial:
        yield f"partial run ({record.partial})"
    yield from _facts(record)


def _facts(record: RunRecord) -> Iterator[str]:
    """GPU, versions, commit and duration, as far as they are known."""
    device, git, versions = record.device, record.git, record.env.get("python", {})
    if record.scope == "gpu" and device.get("name"):
        cap, full = device.get("power_limit_w"), device.get("power_default_w")
        capped = is_number(cap) and is_number(full) and cap < full
        yield f"{device['name']}" + (f" (capped {cap:g}/{full:g} W)" if capped else "")
    known = [n for n in ("torch", "triton") if not str(versions.get(n) or "<").startswith("<")]
    yield " ".join(f"{n} {versions[n]}" for n in known)
    if git.get("short"):
        other = f" as given, but git has {str(git['head'])[:7]}" if git.get("head") else ""
        unknown = git.get("commit") and git.get("dirty") is None and not other
        state = " DIRTY" if git.get("dirty") else " (unknown whether clean)" if unknown else ""
        yield f"commit {git['short']}{state}{other}"
    if is_number(record.monotonic_s):
        minutes, seconds = divmod(round(record.monotonic_s), 60)
        yield f"{minutes} m {seconds:02d} s" if minutes else f"{seconds} s"
