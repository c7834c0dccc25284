"""What went wrong, with what to try, the right part of the log, and one whole command for each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from scripts.oneshot.record.markdown import cell, clip_mid, code, fence, num, span
from scripts.oneshot.record.outputs import repro
from scripts.oneshot.record.reading import read_text
from scripts.oneshot.report.blocks import Code, Head, Section, View

BAD_STAGES = ("FAIL", "TIMEOUT", "CRASH", "INFRA")
BAD_ROWS = ("FAIL", "INVALID", "failed", "error", "FAILED")
NAMED = 3  # of one kind by name on the first screen
COMMAND_LIMIT = 20_000  # characters; a longer one is in its file under repro/
TRY = {
    "GPU_LOST": "the card fell off the bus: take another box; the earlier results stand",
    "CORRUPTION": "take another box: on this card no result can be trusted, passed ones included",
    "XID": "do what the reason says, and run the stage again on a card without errors",
    "OOM_DEVICE": "free the GPU of other processes, or take a card with more memory",
    "CUDA_FAULT": "a kernel touched memory that is not its own: compute-sanitizer before the "
    "command below names it; later stages had a context of their own",
    "OOM_HOST": "the box has too little memory for the build or the test; raise the limit",
    "DRIVER_TOO_OLD": "take a box with a newer driver, or a torch built for an older CUDA",
    "NO_GPU": "check nvidia-smi on this box; restart the container with the GPU passed through",
    "IMPORT_ERROR": "install the requirements again; `doctor` names the version that is wrong",
    "COMPILE_ERROR": "clear the Triton cache (TRITON_CACHE_DIR) and run the command again; "
    "if it stays, report it with this log",
    "NO_SPACE": "free disk space in the output folder, TRITON_CACHE_DIR and /tmp",
    "PARITY": "keep the route off until this is clear, and report the case with its seed",
    "ASSERT": "run the command below; the first failing assertion is in the log",
    "INVALID": "no numbers were taken from these cases; the reason stands beside each",
    "UNSTABLE": "run again on a quiet box; see clocks and throttling under Box health",
    "BENCH": "run the command below; the log holds the error",
    "BUDGET": "give the run more time (BUDGET=)",
    "CHANNEL": "run the stage again; its result lines were damaged",
    "RUNNER": "nothing says that the stage is at fault; run again with RESUME=1",
    "PREEMPTED": "the box was taken away; run again with RESUME=1",
}
TRY_BY_STATUS = {
    "TIMEOUT": "run it alone (ONLY=stage); the log ends with the stack of every thread",
    "CRASH": "run the command below; if it crashes again, report it with this log",
    "INFRA": "run the stage again; if it stays, the box is at fault",
}
RUN_IT = "run the command below"

_TROUBLE = re.compile(r"\bFAILED\b|Error\b|\bfatal\b|\bassert|Traceback|Segmentation|signal ")


def excerpt(log: str, lines: int, source: str) -> str:
    """The part of a log that speaks of the failure, at most `lines` lines."""
    rows = log.rstrip("\n").split("\n")
    last = lambda told: max((i for i, row in enumerate(rows) if told(row)), default=None)
    start = last(lambda row: row.startswith("Traceback (most recent call last)"))
    if start is not None:
        after = (i for i in range(start + 1, len(rows)) if rows[i] and not rows[i][0].isspace())
        return clip_mid("\n".join(rows[start : next(after, len(rows)) + 1]), lines, source)
    at = last(lambda row: row.startswith("E  "))
    at = last(_TROUBLE.search) if at is None else at
    at = len(rows) - 1 if at is None else at
    first = max(0, min(at - lines * 2 // 3, len(rows) - lines))
    return "\n".join(rows[first : first + lines])


def failing(view: View) -> list[Mapping[str, Any]]:
    """The stages that went wrong, not those that the budget cut while all was right."""
    bad = {r["stage"] for r in view.rows["test"] if r["outcome"] in ("failed", "error")}
    bad |= {r["stage"] for r in view.rows["parity"] if r["status"] != "PASS"}
    ended_badly = lambda s: s["status"] in BAD_STAGES and s.get("kind") != "BUDGET"
    return [s for s in view.data["stages"] if s["id"] in bad or ended_badly(s)]


def command_block(view: View, stage: Mapping[str, Any]) -> list[Code]:
    """The whole command that shows a failure again; where its file is, if nobody could type it."""
    folder, command = f"artifacts/runner/{view.folder.name}", None
    if stage["argv"]:
        tests = [r for r in view.rows["test"] if r["stage"] == stage["id"]]
        command = repro(stage, tests, view.data["env"])
        if "$BUNDLE" in command:
            command = f"BUNDLE={shlex.quote(folder)}  # the folder of this report\n{command}"
        if len(command) > COMMAND_LIMIT:
            command = "bash " + shlex.quote(f"{folder}/repro/{stage['id']}.sh")
    return [Code(fence(command, "bash", whole=True))] if command else []


def _bad_cases(view: View, stage: str) -> Iterator[str]:
    """The results of a stage that are wrong, each with its reason."""
    for kind in ("parity", "test", "bench"):
        name, state = ("nodeid", "outcome") if kind == "test" else ("case", "status")
        for r in (r for r in view.rows[kind] if r["stage"] == stage and r[state] in BAD_ROWS):
            seed = f" (seed {num(r.get('seed'))})" if kind == "parity" else ""
            why = cell(r.get("reason") if kind == "test" else "; ".join(r["why"]), view.shape.text)
            yield f"{kind} {r[state]} {code(r[name], view.shape.text)}{seed}: {why}"


def failures(view: View) -> Section:
    shape, blocks = view.shape, []
    for number, stage in enumerate(failing(view)):
        cases = list(_bad_cases(view, stage["id"]))
        if len(cases) > shape.rows:
            cases[shape.rows :] = [f"and {len(cases) - shape.rows} more, in bundle.json"]
        kind = f" ({cell(stage['kind'], 40)})" if stage.get("kind") else ""
        optional = "" if stage.get("required", True) else "; the stage is optional"
        advice = TRY.get(stage.get("kind")) or TRY_BY_STATUS.get(stage["status"], RUN_IT)
        blocks += [
            Head(f"{code(stage['id'], 60)} {stage['status']}{kind}"),
            f"{cell(stage.get('title'), 120)}: {cell(stage.get('reason'), 2 * shape.text)}. Exit "
            f"code {num(stage.get('rc'))}, signal {cell(stage.get('signal'), 40)}, after "
            f"{span(stage.get('wall_s'))}{optional}. What to try: {advice}.",
            cases,
        ]
        if number >= NAMED or not shape.issue:  # in an issue the first ones are on the first screen
            blocks += command_block(view, stage)
        log = read_text(view.folder, stage.get("log")) if shape.log_lines else None
        if log and log.strip():
            shown = fence(excerpt(log, shape.log_lines, str(stage["log"])))
            blocks += [f"From {cell(stage['log'], 120)}:", Code(shown)]
    return Section("Failures", blocks)
