"""The sections of the report around its numbers: stages, failures, warnings, box, files."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.oneshot import bundle as bundles
from scripts.oneshot.evidence import ASSUMED_FLOOR, NUMBERED, Shape, counts_text
from scripts.oneshot.markdown import (
    cell,
    clip_mid,
    code,
    fence,
    is_interval,
    num,
    pct,
    size,
    span,
    sparkline,
    us,
)
from scripts.oneshot.outputs import typed
from scripts.oneshot.rows import is_number

BAD_STAGES = ("FAIL", "TIMEOUT", "CRASH", "INFRA")
MAX_TIMELINE = 30
NAMED = 3  # cases of one kind by name in a warning
MADE_HERE = ("report.md", "report.html", "issue.md")
STILL_CHANGING = ("bundle.json", "events.jsonl", "redactions.json", bundles.SUMS)

TRY = {
    "GPU_LOST": "the card fell off the bus: take another box; the earlier results stand",
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
    "PARITY": "the kernel is wrong here: keep its route off and report the case with its seed",
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
    "FAIL": "run the command below",
}
HEALTH = {  # key: (words, unit, key of the share of the nominal value)
    "copy_gbs": ("device copy", "GB/s", "copy_frac"),
    "gemm_bf16_tflops": ("bf16 matmul", "TFLOP/s", "gemm_frac"),
    "h2d_gbs": ("host to device", "GB/s", None),
    "launch_us": ("torch's `x.add_(1)` on one element, host time a call", "us", None),
}
HEALTH_MORE = {  # key: (words, unit), after the noise floor
    "aa_worst": ("largest difference among its trials", "%"),
    "aa_trials": ("its trials", ""),
    "copy_nominal_gbs": ("device copy, nominal", "GB/s"),
    "gemm_sustained_tflops": ("bf16 matmul, after half a second", "TFLOP/s"),
    "gemm_nominal_tflops": ("bf16 matmul, nominal", "TFLOP/s"),
    "pcie": ("PCIe, as far as card and slot go", ""),
    "pcie_gbs_nominal": ("host to device, nominal", "GB/s"),
    "throttled": ("throttled", ""),
    "power_w": ("power, median", "W"),
    "power_limit_w": ("power limit", "W"),
    "power_default_w": ("power limit by default", "W"),
    "ecc_uncorrected": ("uncorrected ECC errors", ""),
    "memory_used_by_others_mib": ("memory that others use", "MiB"),
    "gpu": ("GPU number", ""),
}
# Of the software and the commit: they stand under At a glance.
HEALTH_LEFT = ("device", "torch", "triton", "cuda", "driver", "commit", "precision", "stage",
               "why", "status", "kind")  # fmt: skip


# ------------------------------------------------------------------------------------- stages


def stage_note(stage: Mapping[str, Any], rows: Mapping[str, list], text: int) -> str:
    """What stands beside the result of a stage in the first table."""
    parts = [] if stage["status"] == "PASS" else [cell(stage.get("reason"), text)]
    counts = stage.get("counts") or {}
    if any(counts.values()):
        parts.append("tests " + counts_text(counts))
    for kind, good in (("parity", ("PASS",)), ("bench", ("VALID",))):
        mine = [r for r in rows[kind] if r["stage"] == stage["id"]]
        if mine:
            parts.append(f"{kind} {sum(r['status'] in good for r in mine)}/{len(mine)} {good[0]}")
    if is_number(stage.get("first_call_ms")):
        parts.append(f"first call {us(1000 * stage['first_call_ms'])}")
    if is_number(stage.get("peak_vram_mib")):
        parts.append(f"peak {stage['peak_vram_mib']:.0f} MiB")
    if stage.get("flaky"):
        parts.append("FLAKY: passed at the second attempt")
    if stage.get("half_size"):
        parts.append("HALF SIZE: out of GPU memory at first")
    if stage.get("resumed_from"):
        parts.append(f"from run {cell(stage['resumed_from'], 60)}")
    if not stage.get("required", True):
        parts.append("optional")
    return "; ".join(parts)


_TROUBLE = re.compile(r"^E  |\bFAILED\b|Error\b|\bfatal\b|\bassert|Traceback|Segmentation|signal ")


def excerpt(log: str, lines: int, source: str) -> str:
    """The part of a log that speaks of the failure, at most `lines` lines."""
    rows = log.rstrip("\n").split("\n")
    traces = [i for i, r in enumerate(rows) if r.startswith("Traceback (most recent call last)")]
    if traces:
        end = next(
            (i for i in range(traces[-1] + 1, len(rows)) if rows[i] and not rows[i][0].isspace()),
            len(rows) - 1,
        )
        return clip_mid("\n".join(rows[traces[-1] : end + 1]), lines, source)
    at = next((i for i in range(len(rows) - 1, -1, -1) if _TROUBLE.search(rows[i])), len(rows) - 1)
    first = max(0, min(at - lines * 2 // 3, len(rows) - lines))
    return "\n".join(rows[first : first + lines])


def read_text(folder: Path, name: Any) -> str | None:
    """A text file of the bundle; None where it is missing or its name leads out of the folder."""
    if not isinstance(name, str) or not name:
        return None
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return None
        return path.read_bytes().decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


def repro(stage: Mapping[str, Any], folder: Path) -> str | None:
    """The one command that shows a failure again."""
    written = read_text(folder, f"repro/{stage['id']}.sh")
    if written:
        lines = [s for s in written.splitlines() if s.strip() and not s.startswith("#")]
        command = lines[-1] if lines else None
    else:
        given = sorted((stage.get("env") or {}).items())
        variables = [f"{k}={shlex.quote(str(v))}" for k, v in given]
        argv = [str(a) for a in stage["argv"]]
        command = " ".join([*variables, typed(argv)]) if argv else None
    if command and "$BUNDLE" in command:
        where = shlex.quote(f"artifacts/runner/{folder.name}")
        return f"BUNDLE={where}  # the folder of this report\n{command}"
    return command


def failures_section(
    stages: Sequence[Mapping[str, Any]], rows: Mapping[str, list], folder: Path, shape: Shape
) -> list[dict[str, Any]]:
    out = []
    for stage in stages:
        if stage["status"] not in BAD_STAGES:
            continue
        mine = {kind: [r for r in rows[kind] if r["stage"] == stage["id"]] for kind in rows}
        cases = [
            f"parity {r['status']} {code(r['case'], shape.text)} (seed {num(r.get('seed'))}): "
            f"{cell('; '.join(r['why']), shape.text)}"
            for r in mine["parity"] if r["status"] != "PASS"
        ]  # fmt: skip
        cases += [
            f"test {r['outcome']} {code(r['nodeid'], shape.text)}: "
            f"{cell(r.get('reason'), shape.text)}"
            for r in mine["test"] if r["outcome"] in ("failed", "error")
        ]  # fmt: skip
        cases += [
            f"bench {r['status']} {code(r['case'], shape.text)}: "
            f"{cell('; '.join(r['why']), shape.text)}"
            for r in mine["bench"] if r["status"] in ("FAILED", "INVALID")
        ]  # fmt: skip
        log = read_text(folder, stage.get("log")) if shape.log_lines else None
        kind = stage.get("kind")
        command = repro(stage, folder)
        out.append({
            "id": code(stage["id"], 60), "title": cell(stage.get("title"), 120),
            "status": stage["status"], "kind": cell(kind, 40) if kind else "",
            "required": stage.get("required", True), "signal": cell(stage.get("signal"), 40),
            "rc": num(stage.get("rc")), "wall": span(stage.get("wall_s")),
            "reason": cell(stage.get("reason"), 2 * shape.text),
            "cases": cases[: shape.rows], "left_out": len(cases[shape.rows :]),
            "log": cell(stage.get("log"), 120),
            "excerpt": fence(excerpt(log, shape.log_lines, str(stage["log"])))
            if log and log.strip() else None,
            "command": fence(command[:4000], "bash") if command else None,
            "try": cell(TRY.get(kind) or TRY_BY_STATUS[stage["status"]]),
        })  # fmt: skip
    return out


# ----------------------------------------------------------------------------------- warnings


def _digest(git: Mapping[str, Any]) -> str:
    """What tells changed sources apart: of their difference, or without git of all of them."""
    name, words = ("diff_sha256", "the diff")
    if not git.get(name):
        name, words = ("source_sha256", "the sources")
    return f"sha256 of {words} {code(git.get(name), 80)}"


def warnings_section(
    data: Mapping[str, Any], rows: Mapping[str, list], floor: float | None, extra: list[str],
    shape: Shape,
) -> list[str]:  # fmt: skip
    """Only what changes how the rest is read."""
    t = shape.text
    git, device, stages = data["git"], data["device"], data["stages"]
    out = [cell(text, t) for text in extra]
    if data["ended_by"] == "crash":
        out.append("**The run did not end by itself**: everything up to its end is shown, the rest "
                   "is NOT_RUN")  # fmt: skip
    elif data["ended_by"] != "normal":
        words = {"budget": "its budget was spent"}.get(data["ended_by"])
        out.append(f"The run was cut short: {words or cell(data['ended_by'].upper(), 20)}")
    if data.get("partial"):
        out.append(f"Partial run: {cell(data['partial'], t)}; the other stages were not asked for")
    if git.get("dirty"):
        out.append(
            f"DIRTY tree: this is not commit {code(git.get('short'), 40)} alone but "
            f"{cell(git.get('diffstat') or 'changed files', t)}, {num(git.get('untracked') or 0)} "
            f"untracked source files, {_digest(git)}"
        )
    elif not git.get("commit"):
        out.append("The sources are not a git checkout that could be read: the commit is unknown")
    elif git.get("dirty") is None:
        out.append(
            f"The commit {code(git.get('short'), 40)} is {cell(git.get('source') or 'given', 60)}; "
            "nothing tells whether the sources are clean"
        )
    cap, full = device.get("power_limit_w"), device.get("power_default_w")
    if is_number(cap) and is_number(full) and cap < full:
        out.append(f"The card is capped to {cap:g} of {full:g} W: times are those of a capped card")
    if device.get("shared"):
        out.append("SHARED GPU: others used its memory or time; times may be too long")
    if device.get("mig"):
        out.append("MIG: the times are those of a slice of the card")
    if device.get("name") is None and data["scope"] == "gpu":
        out.append(f"No GPU answered: {cell(device.get('reason') or 'not known why', t)}")
    health = data["health"] or {}
    if health.get("throttled"):
        out.append("The card throttled while its health was measured")
    if str(health.get("status")) not in ("OK", "PASS", "None"):
        whys = health.get("why") if isinstance(health.get("why"), list) else [health.get("why")]
        out.append(f"Box health {cell(health['status'], 20)}: {cell('; '.join(map(str, whys)), t)}")
    if any(r["status"] in NUMBERED for r in rows["bench"]) and floor is None:
        out.append("The noise floor was not measured; "
                   f"differences up to {pct(ASSUMED_FLOOR)} count as none")  # fmt: skip
    for check in data["doctor"]:
        if check.get("level") != "OK":
            fix = f" Fix: {cell(check['fix'], t)}" if check.get("fix") else ""
            out.append(f"doctor {check.get('level')} {cell(check.get('name'), 60)}: "
                       f"{cell(check.get('text'), t)}.{fix}")  # fmt: skip
    for status in ("UNSTABLE", "INVALID", "SKIPPED", "FAILED"):
        mine = [r for r in rows["bench"] if r["status"] == status]
        if mine:
            named = [f"{code(r['case'], 120)} ({cell('; '.join(r['why']), t // 3)})"
                     for r in mine[:NAMED]]  # fmt: skip
            more = f"; and {len(mine) - NAMED} more, see Benchmarks" if len(mine) > NAMED else ""
            cases = "case" if len(mine) == 1 else "cases"
            out.append(f"{len(mine)} bench {cases} {status}: {'; '.join(named)}{more}")
    for stage in stages:
        if stage.get("flaky"):
            out.append(f"FLAKY: {code(stage['id'], 60)} passed only at the second attempt")
        if stage.get("half_size"):
            out.append(f"HALF SIZE: {code(stage['id'], 60)} ran out of GPU memory; what it shows "
                       "was measured at half its sizes")  # fmt: skip
    for run, ids in data["resumed"].items():
        are = "stage is" if len(ids) == 1 else "stages are"
        out.append(f"{len(ids)} {are} from run {cell(run, 60)}: {cell(', '.join(ids), t)}")
    gate = data["redaction"].get("gate")
    if gate == "failed":
        out.append("**Redaction FAILED**: something private could not be removed; do not post this")
    elif gate != "clean":
        out.append("**Not looked over for private data**: the run ended before its last redaction "
                   "gate; only its journal and logs were cleaned as they were written")  # fmt: skip
    if kept := data["redaction"].get("kept"):
        out.append(f"Not redacted, as asked: {cell(', '.join(map(str, kept)), 60)}")
    for r in rows["bench"]:
        if r["status"] in NUMBERED and is_number(r.get("reads_actual")):
            if is_number(r.get("reads_expected")) and r["reads_actual"] != r["reads_expected"]:
                out.append(f"{code(r['case'], t)} read {num(r['reads_actual'])} keys where "
                           f"{num(r['reads_expected'])} were expected")  # fmt: skip
    notes = [n for n in data["notes"] if n.get("level") == "warn" or not n.get("stage")]
    texts = dict.fromkeys((str(n.get("stage") or ""), str(n.get("text"))) for n in notes)
    limit = min(40, shape.rows)
    for stage, text in list(texts)[:limit]:
        out.append(f"{code(stage, 60)}: {cell(text, t)}" if stage else cell(text, t))
    if len(texts) > limit:
        out.append(f"and {len(texts) - limit} more notes in bundle.json")
    out = list(dict.fromkeys(out))
    most = 40 + shape.rows
    if len(out) > most:
        out = [*out[:most], f"and {len(out) - most} more warnings in report.md"]
    return out


# ----------------------------------------------------------------------------------- the rest


def skipped_section(tests: Sequence[Mapping[str, Any]], shape: Shape) -> list[tuple[int, str]]:
    """How many tests were skipped for each reason, and which, the most frequent reason first."""
    found: dict[str, list[str]] = {}
    for row in tests:
        if row["outcome"] == "skipped":
            found.setdefault(str(row.get("reason")), []).append(row["nodeid"])
    out = []
    for reason, names in sorted(found.items(), key=lambda one: -len(one[1]))[: shape.rows]:
        named = ", ".join(code(name, 120) for name in names[:NAMED])
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        out.append((len(names), f"{cell(reason, shape.text)}: {named}{more}"))
    return out


def health_section(health: Mapping[str, Any] | None) -> list[tuple[str, str, str]]:
    if not health:
        return []
    shares = {share for _, _, share in HEALTH.values()}
    out = [
        (words, f"{num(health[key])} {unit}", pct(health.get(share)) if share else "-")
        for key, (words, unit, share) in HEALTH.items()
        if key in health
    ]
    if "aa_noise_floor" in health:
        out.append(("noise floor (same code against itself)",
                    pct(health["aa_noise_floor"], 1), "-"))  # fmt: skip
    skip = {*HEALTH, *shares, "aa_noise_floor", *HEALTH_LEFT}
    known = [k for k in HEALTH_MORE if k in health]
    for key in [*known, *(k for k in health if k not in skip and k not in HEALTH_MORE)]:
        words, unit = HEALTH_MORE.get(key, (cell(key, 60), ""))
        value = health[key]
        if isinstance(value, (bool, str)) or is_number(value):
            text = pct(value, 1) if unit == "%" else f"{num(value)} {unit}".rstrip()
            out.append((words, text, "-"))
    if is_interval(health.get("sm_mhz")):
        low, high = health["sm_mhz"]
        out.append(("SM clock, lowest and highest", f"{num(low)} and {num(high)} MHz", "-"))
    return out


def losses(folder: Path) -> list[tuple[int, float, float | None]]:
    """(step, loss, held-out loss or None) of train.jsonl; lines that are no such row are left."""
    out = []
    for line in (read_text(folder, "train.jsonl") or "").splitlines():
        try:
            row = json.loads(line)
            if is_number(row["loss"]) and is_number(row["step"]):
                val = row.get("val_loss")
                out.append((int(row["step"]), row["loss"], val if is_number(val) else None))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return out


def training_section(
    data: Mapping[str, Any], rows: Mapping[str, list], folder: Path
) -> dict[str, Any] | None:
    stage = next((s for s in data["stages"] if s["id"] == "train_showcase"), None)
    if stage is None:
        return None
    metrics = {
        str(m.get("name")): (m.get("value"), m.get("unit"))
        for m in data["metrics"] if m.get("stage") == stage["id"]
    }  # fmt: skip
    curve = losses(folder)
    values = [
        f"{cell(name, 80)}: {num(v)} {'' if u in (None, '', '1') else cell(u, 20)}".rstrip()
        for name, (v, u) in metrics.items()
    ]
    finite = [r for r in rows["test"] if r["stage"] == stage["id"]]
    return {
        "status": stage["status"], "reason": cell(stage.get("reason")),
        "first": num(metrics.get("loss_first", (None,))[0]),
        "last": num(metrics.get("loss_last", (None,))[0]),
        "rate": num(metrics.get("steps_per_s", (None,))[0]),
        "spark": sparkline([loss for _, loss, _ in curve]), "steps": len(curve),
        "checks": [f"{code(r['nodeid'].split('::')[-1], 80)} {r['outcome']}"
                   + (f": {cell(r['reason'])}" if r.get("reason") else "") for r in finite],
        "metrics": values[:200],
    }  # fmt: skip


def flags_section(data: Mapping[str, Any], folder: Path) -> list[tuple[str, str, str]]:
    """Effective flags with their source: of routing.json, else the variables that were set and a
    line that says so; then what single stages were given."""
    text = read_text(folder, "routing.json")
    try:
        flags = json.loads(text)["flags"] if text else []
        found = [(code(f["name"]), code(f["value"]), cell(f["source"])) for f in flags]
    except (ValueError, KeyError, TypeError):
        found = []
    named = {name for name, _, _ in found}
    variables = data["env"].get("variables")
    for name, value in variables.items() if isinstance(variables, dict) else ():
        if code(name) not in named:
            found.append((code(name), code(value), "environment"))
    if not named:
        found.append(("every other flag", "not recorded",
                      f"{code('routing.json')}, which lists them, is not there"))  # fmt: skip
    for stage in data["stages"]:
        for name, value in sorted((stage.get("env") or {}).items()):
            found.append((code(name), code(value), f"stage {code(stage['id'], 60)}"))
    return found


def calls_section(folder: Path) -> list[tuple[str, str, str]]:
    """Return (call, its kernels, faster kernels with the reason against each) of routing.json."""
    text = read_text(folder, "routing.json")
    try:
        return [
            (
                cell(call["call"], 60),
                ", ".join(code(k, 80) for k in call["kernels"][:60]) or "none of ours",
                "; ".join(f"{code(k, 80)}: {cell(why, 200)}"
                          for k, why in list(call["passed_over"].items())[:20]),
            )
            for call in (json.loads(text)["calls"] if text else [])
        ]  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


CGROUP = ("cgroup_cpu", "cgroup_memory")


def _unlimited(value: Any) -> bool:
    """Do these words of a cgroup stand for no limit? Version 1 has -1, or the largest page."""
    first = str(value).split(" ")[0]
    return first in ("max", "-1") or (first.isdecimal() and len(first) < 25 and int(first) >= 2**60)


def environment_section(env: Mapping[str, Any]) -> list[dict[str, Any]]:
    out = []
    for section, values in env.items():
        if not isinstance(values, dict):
            out.append({"name": cell(section, 60), "rows": [("", cell(values))], "text": None})
            continue
        text = values.get("text")
        rows = [
            (cell(k, 80), "no limit" if k in CGROUP and _unlimited(v)
             else num(v) if not isinstance(v, (dict, list)) else cell(json.dumps(v)))
            for k, v in values.items() if k != "text" and v is not None
        ]  # fmt: skip
        block = fence(clip_mid(text, 80)) if isinstance(text, str) and text.strip() else None
        if rows or block:
            out.append({"name": cell(section, 60), "rows": rows, "text": block})
    return out


def timeline_section(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ran = [s for s in stages if is_number(s.get("start_s"))]
    tags = {"PASS": "done", **{s: "crit" for s in BAD_STAGES}}
    bars = []
    whole = max((s["start_s"] + (s["wall_s"] if is_number(s.get("wall_s")) else 0) for s in ran),
                default=0) or 1  # fmt: skip
    for stage in ran:
        name = re.sub(r"\W", "_", str(stage["id"]))[:40]
        wall = stage["wall_s"] if is_number(stage.get("wall_s")) else 0
        length = max(1, round(1000 * wall))
        tag = tags.get(stage["status"], "active")
        group = re.sub(r"\W", "_", str(stage.get("group")))[:20]
        mark = ""
        if stage.get("resumed_from"):  # its start counts from the beginning of that run
            group, mark = "earlier run", " (earlier run)"
        line = f"{name} :{tag}, {round(1000 * stage['start_s'])}, {length}ms"
        start = f"{stage['start_s']:.1f} s"
        bars.append({"group": group, "start": start, "wall": span(wall), "line": line,
                     "id": code(stage["id"], 60) + mark, "status": stage["status"],
                     "left": f"{100 * stage['start_s'] / whole:.2f}",
                     "width": f"{100 * wall / whole:.2f}"})  # fmt: skip
    return {"bars": bars, "gantt": 0 < len(bars) <= MAX_TIMELINE}


def files_section(folder: Path) -> list[tuple[str, str]]:
    out = []
    for path in bundles.members(folder):
        name = path.relative_to(folder).as_posix()
        if name in MADE_HERE or name.startswith("plots/"):
            continue
        fixed = name not in STILL_CHANGING
        out.append((code(name), size(path.stat().st_size) if fixed else "-"))
    return out


def facts_section(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    git, device, python = data["git"], data["device"], data["env"].get("python")
    python = python if isinstance(python, dict) else {}
    system = data["env"].get("system")
    gpu = [device.get("name")]
    if device.get("name"):
        gpu += [f"sm {device.get('sm')}", f"{num(device.get('mem_mib'))} MiB",
                f"driver {device.get('driver')}", device.get("pcie"),
                f"ECC {device.get('ecc')}"]  # fmt: skip
    versions = [f"{k} {python[k]}" for k in ("torch", "cuda", "triton") if python.get(k)]
    if flash := (python.get("flash_attn") or data["env"].get("packages", {}).get("flash-attn")):
        versions.append(f"flash-attn {flash}")
    probe = {str(m.get("name")): m.get("value") for m in data["metrics"]}
    fa2 = {"torch": "torch's own", "flash_attn": "the flash-attn package"}.get(
        str(probe.get("fa2_source"))
    )
    state = {True: "DIRTY", False: "clean"}.get(git.get("dirty"), "unknown whether clean")
    rows = [
        ("GPU", ", ".join(str(g) for g in gpu if g) or f"none: {device.get('reason')}"),
        ("host", ", ".join(f"{k} {v}" for k, v in system.items() if k in ("os", "cpu", "cores"))
         if isinstance(system, dict) else ""),
        ("commit", ", ".join(
            [f"{git.get('short')}" + (f" on {git['branch']}" if git.get("branch") else ""), state]
        )),
        ("versions", ", ".join([f"python {python.get('version')}", *versions])),
        *([("FA-2", f"{fa2} {probe.get('fa2_version') or ''}".strip())] if fa2 else []),
        ("profile", f"{data['profile']} {' '.join(map(str, data['argv']))}".strip()),
        ("run", f"{data['run_id']}, started {data['started']}, "
         + (f"ended {data['ended']}" if data["ended"] else "its end was not recorded")),
    ]  # fmt: skip
    if data["scope"] == "cpu":
        rows[0] = ("GPU", "none was used")
    price, took = data.get("price_per_hour"), data.get("monotonic_s")
    if is_number(price) and is_number(took):
        rows.append(("cost", f"about ${price * took / 3600:.2f} at ${price:g} an hour"))
    return [(name, cell(value)) for name, value in rows]
