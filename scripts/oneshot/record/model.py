"""What a run is: stages, their results, and the record that becomes bundle.json.

`events.jsonl` is the source of truth. `RunRecord.apply(event)` is its only reader, and the running
supervisor goes through the same function, so `bundle.json` after a crash is what replaying the
journal gives up to the last edge of a stage. The shape of `bundle.json` (schema
`nsa.gpu-report/1`), `RunRecord.to_bundle()`:

    schema, run_id, profile, scope ("gpu" | "cpu"), argv, started, ended, monotonic_s, complete
    ended_by     normal | sigint | sigterm | budget | crash
    partial      why this is not the whole profile (--only, --skip), or null
    git          commit, short, head (git's, where another commit was given), branch, dirty,
                 diff_sha256, diffstat, untracked, remote, source, source_sha256 (where git
                 cannot tell whether the sources are clean), changed_during_run
    device       name, sm, mem_mib, driver, power_limit_w, power_default_w, pcie, ecc, mig, ...
    env          {section: {key: value}}; a probe that failed is the text "<probe failed: ...>"
    env_fingerprint, price_per_hour, doctor [{name, level OK|WARN|BLOCK, text, fix}]
    verdict      status PASS|INCOMPLETE|FAIL|NOT_RUN|BROKEN|INVALID|STOPPED, exit_code, one_line,
                 executed_tests, passed, failed, skipped, parity_pass, parity_total,
                 bench_valid, bench_total, not_run
    stages       one object per planned stage in plan order, see StageResult
    tests, parity, bench, metrics, notes, artifacts
                 the rows as the stages sent them (bench/records.py), each with "stage"
    health, recommend          the latest row of that kind, or null
    score        percent (or null), cases, missing; see score.py
    resumed      {run_id: [stage ids]} taken over from an earlier run
    redaction    {rules_version, replacements, gate "clean"|"pending"|"failed"}
    files        [{path, bytes, sha256}]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from scripts.oneshot.record import judge
from scripts.oneshot.record.judge import Status
from scripts.oneshot.record.rows import grouped, is_number, test_counts, why_no_row
from scripts.oneshot.record.score import score

SCHEMA = "nsa.gpu-report/1"
DIED = "the runner ended during this stage, when is unknown; --resume takes up what passed"
UNREACHED = "the run ended before this stage"
PLANNED = ("id", "title", "required", "group", "timeout_s", "argv", "env")  # and gpus, if any
SHARDS = "scripts.oneshot.run.shards"  # module that runs a stage's tests in several processes


@dataclass(frozen=True)
class Stage:
    """One child process of the run.

    In `argv`, "{python}" stands for the chosen interpreter and "{out}" for the bundle folder.
    `proof` names the evidence without which the stage cannot PASS: "tests" (a passed test),
    "parity" (a passed parity row), "bench" (a valid bench row), "row" (any metric, health,
    recommend, parity or bench row that is not SKIPPED) or "output" (every file of `outputs`).
    """

    id: str
    title: str
    argv: tuple[str, ...]
    proof: str
    timeout_s: float
    estimate_s: float = 30.0
    required: bool = True
    gpu: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    log: str = ""
    after: str | None = None  # id of a stage that must PASS first
    needs: tuple[str, ...] = ()  # files of earlier stages, without which it is not started
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # see completed()
    group: str = "other"  # parity | bench | train | box; the report groups its tables by it
    least: int = 0  # tests or, of a bench, cases, without which it is not whole
    of_files: Mapping[str, int] = field(default_factory=dict)  # the same of test files called so
    ahead: bool = False  # its Python may start, and import PyTorch, before its turn: ahead.py
    shrinks: bool = False  # takes `--shrink K`, which divides its sizes by K
    gpus: tuple[int, ...] = ()  # its cards by number, in a run on several (cards.py)

    @property
    def side_by_side(self) -> bool:
        """Whether its tests run in several processes at a time."""
        return SHARDS in self.argv

    def smaller(self) -> Stage:
        """What to try once GPU memory ran out: half its sizes, or a quarter of its processes."""
        if self.shrinks:
            return replace(self, argv=(*self.argv, "--shrink", "2"))
        if self.side_by_side:
            at = self.argv.index(SHARDS) + 1
            return replace(self, argv=(*self.argv[:at], "--fewer", "4", *self.argv[at:]))
        return self

    def planned(self) -> dict[str, Any]:
        names = (*PLANNED, "gpus") if self.gpus else PLANNED
        return {name: getattr(self, name) for name in names}

    @property
    def log_path(self) -> str:
        return self.log or f"logs/{self.id}.log"

    def completed(self, results: Mapping[str, StageResult]) -> Stage:
        """This stage with the arguments that `also` gives it for each stage that passed before."""
        passed = [s for s in self.also if s in results and results[s].status is Status.PASS]
        more = [argument for stage in passed for argument in self.also[stage]]
        return replace(self, argv=(*self.argv, *more)) if more else self


def bench(
    id: str, title: str, script: str, options: str, timeout_s: float, *, csv: str = "",
    **fields: Any,
) -> Stage:  # fmt: skip
    """A bench of bench/ with these options; its table is named after the stage, or `csv`."""
    csv = csv or f"{id}.csv"
    argv = ("{python}", f"bench/{script}.py", *options.split(), "--csv", "{out}/" + csv)
    fields = {"log": f"{id}.txt", "shrinks": True, **fields}
    return Stage(id, title, argv, "bench", timeout_s, outputs=(csv,), group="bench", **fields)


@dataclass(frozen=True)
class StageResult:
    """How one stage ended. Anything but PASS needs a reason."""

    id: str
    status: Status
    reason: str | None = None
    kind: str | None = None
    title: str = ""
    rc: int | None = None
    signal: str | None = None
    wall_s: float = 0.0
    timeout_s: float = 0.0
    required: bool = True
    attempt: int = 1
    started: str | None = None
    start_s: float | None = None  # seconds since the run began
    log: str | None = None
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    first_call_ms: float | None = None
    peak_vram_mib: float | None = None
    flaky: bool = False
    half_size: bool = False  # the first attempt ran out of GPU memory
    resumed_from: str | None = None
    group: str = "other"
    gpus: tuple[int, ...] = ()  # only in a run on several cards

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", Status(self.status))
        if self.status is not Status.PASS and not self.reason:
            raise ValueError(f"stage {self.id} is {self.status} and gives no reason")

    def to_json(self) -> dict[str, Any]:
        out = {**asdict(self), "status": self.status.value, "argv": list(self.argv)}
        gpus = list(out.pop("gpus"))
        return {**out, "gpus": gpus} if gpus else out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StageResult:
        """A result as `to_json` gave it; unknown keys are ignored, wrong types a TypeError."""
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        for name, value in known.items():
            check_shape(name, value, _RESULT.get(name, _TEXT))
        known["argv"] = tuple(known.get("argv") or ())
        known["gpus"] = tuple(known.get("gpus") or ())
        return cls(**known)


_NUMBER = (int, float)
_MAYBE = (int, float, type(None))
_TEXT = (str, type(None))
# The shapes of values, as check_shape() takes them.
_RESULT: dict[str, Any] = {
    "id": str, "title": str, "status": str, "group": str, "rc": _MAYBE, "wall_s": _NUMBER,
    "timeout_s": _NUMBER, "attempt": int, "start_s": _MAYBE, "first_call_ms": _MAYBE,
    "peak_vram_mib": _MAYBE, "required": bool, "flaky": bool, "half_size": bool,
    "argv": [str], "env": {"*": str}, "counts": {"*": int}, "gpus": [int],
}  # fmt: skip
FACTS: dict[str, Any] = {
    "run_id": str, "profile": str, "scope": str, "argv": list, "git": dict, "device": dict,
    "env": {"*": dict}, "env_fingerprint": _TEXT, "doctor": [{"level": str}],
    "plan": [{"id": str}], "price_per_hour": _MAYBE, "partial": _TEXT, "started": _TEXT,
}  # fmt: skip


def check_shape(name: str, value: Any, shape: Any) -> None:
    """TypeError unless `value` has this shape, and KeyError where it lacks a key.

    A shape is a type or a tuple of types; [shape] of a list's items; {key: shape} of an object's
    values, those of all keys with "*" for a key.
    """
    types = {list: (list, tuple), dict: dict}.get(type(shape), shape)
    if not isinstance(value, types):
        raise TypeError(f"{name} is a {type(value).__name__}")
    if isinstance(shape, list):
        for item in value:
            check_shape(f"one of {name}", item, shape[0])
    for key, inner in shape.items() if isinstance(shape, dict) else ():
        for item in value.values() if key == "*" else [value[key]]:
            check_shape(f"{key} of {name}", item, inner)


# Attributes of a RunRecord that are in its bundle as they are, in this order.
_AS_THEY_ARE = (
    "run_id profile scope argv started ended monotonic_s complete ended_by partial price_per_hour "
    "git device env env_fingerprint doctor"
).split()


@dataclass
class RunRecord:
    """Everything known about one run so far. Built only by `apply`, in journal order."""

    run_id: str = ""
    profile: str = ""
    scope: str = "gpu"
    argv: list[str] = field(default_factory=list)
    started: str | None = None
    ended: str | None = None
    monotonic_s: float | None = None
    complete: bool = False
    ended_by: str = "crash"
    partial: str | None = None  # why the plan is not the whole profile (--only, --skip)
    git: dict[str, Any] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    env_fingerprint: str | None = None
    doctor: list[dict[str, Any]] = field(default_factory=list)
    plan: list[dict[str, Any]] = field(default_factory=list)
    results: dict[str, StageResult] = field(default_factory=dict)
    running: dict[str, Any] | None = None
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by stage id
    run_notes: list[dict[str, Any]] = field(default_factory=list)
    health: dict[str, Any] | None = None
    recommend: dict[str, Any] | None = None
    price_per_hour: float | None = None
    redaction: dict[str, Any] = field(default_factory=lambda: {"gate": "pending"})

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take one journal event in. Unknown events and keys are ignored."""
        kind = event.get("ev")
        if is_number(event.get("m")) and self.ended is None:  # redaction comes after the run
            self.monotonic_s = event["m"]
        if kind in ("run_start", "facts"):
            known = {name: event[name] for name in FACTS if name in event}
            for name, value in known.items():
                check_shape(name, value, FACTS[name])
            for planned in known.get("plan", ()):
                StageResult.from_json({"status": "PASS", **planned})
            vars(self).update(known)
        elif kind == "stage_start":
            check_shape("stage", event["stage"], str)
            self.running = dict(event)
            self.rows[event["stage"]] = []  # a second attempt speaks for the stage alone
        elif kind == "row":
            row = event["row"]
            check_shape("stage", event["stage"], str)
            if lacks := why_no_row(row):
                raise ValueError(lacks)
            said = {name: value for name, value in row.items() if name != "kind"}
            if row["kind"] == "health":  # the first card's; another's is in health["gpus"][number]
                others = (self.health or {}).get("gpus")
                others = others if isinstance(others, dict) else {}
                if "gpu" in row:
                    self.health = {**(self.health or {}), "gpus": {**others, str(row["gpu"]): said}}
                else:
                    self.health = {**said, "gpus": others} if others else said
            elif row["kind"] == "recommend":
                self.recommend = said
            self.rows.setdefault(event["stage"], []).append(row)
        elif kind == "stage_end":
            result = StageResult.from_json(event["result"])
            self.results[result.id] = result
            self.running = None
        elif kind in ("note", "xid"):
            level, stage = event.get("level", "info"), None
            if kind == "xid":
                level, stage = "warn" if event.get("critical") else "info", event.get("stage")
            self.run_notes.append({"level": level, "text": event.get("text", ""), "stage": stage})
        elif kind == "redaction":
            check_shape("summary", event["summary"], dict)
            self.redaction = dict(event["summary"])
        elif kind == "run_end":
            check_shape("ended_by", event["ended_by"], str)
            self.ended = str(event.get("t"))
            self.ended_by = event["ended_by"]
            self.complete = bool(event.get("complete"))

    @classmethod
    def replay(cls, events: Iterable[Mapping[str, Any]]) -> RunRecord:
        """The record of a journal. An event that this program cannot have written is ignored."""
        record = cls()
        for event in events:
            with suppress(KeyError, TypeError, ValueError, AttributeError):
                record.apply(event)
        return record

    def stage_results(self) -> list[StageResult]:
        """One result per planned stage: a stage the run died in is a CRASH, a later one NOT_RUN."""
        out = dict(self.results)
        for planned in (p for p in self.plan if p["id"] not in out):
            common = {k: planned[k] for k in (*PLANNED, "gpus") if k in planned}
            common |= {"status": "NOT_RUN", "reason": UNREACHED}
            if (running := self.running) and running["stage"] == planned["id"]:
                began, last = running.get("m"), self.monotonic_s
                known = is_number(began) and is_number(last) and last >= began
                common |= {
                    "status": "CRASH", "kind": "RUNNER", "reason": DIED, "start_s": began,
                    "wall_s": round(last - began, 3) if known else 0.0,
                    "started": running.get("t"), "log": running.get("log"),
                    "counts": test_counts(self.rows.get(running["stage"], [])),
                }  # fmt: skip
            out[planned["id"]] = StageResult.from_json(common)
        return [out[planned["id"]] for planned in self.plan]

    def rows_of(self, kind: str) -> list[dict[str, Any]]:
        """Every row of this kind in plan order, each with its stage in place of the kind."""
        found = [
            {**row, "stage": stage}
            for stage, rows in self.rows.items() for row in rows if row["kind"] == kind
        ]  # fmt: skip
        for row in found:
            del row["kind"]
        return found

    def to_bundle(self) -> dict[str, Any]:
        """The object of bundle.json; see the module's docstring."""
        stages = self.stage_results()
        resumed = grouped((s for s in stages if s.resumed_from), lambda s: s.resumed_from)
        rows = {k: self.rows_of(k) for k in "test parity bench metric note artifact".split()}
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            "verdict": judge.verdict(self, stages),
            "health": self.health, "recommend": self.recommend,
            "score": score(rows["bench"], self.health),
            "stages": [s.to_json() for s in stages],
            "tests": rows["test"], "parity": rows["parity"], "bench": rows["bench"],
            "metrics": rows["metric"], "notes": [*self.run_notes, *rows["note"]],
            "artifacts": rows["artifact"],
            "resumed": {run: [stage.id for stage in mine] for run, mine in resumed.items()},
            "redaction": self.redaction, "files": [],
        }  # fmt: skip
