"""The sections of the report under its first screen, in the order of what a reader decides by."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.oneshot import bundle as bundles
from scripts.oneshot import cards, evidence
from scripts.oneshot.blocks import Code, Fold, Head, Picture, Section, Table, View
from scripts.oneshot.evidence import counts_text
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
NAMED = 3  # of one kind by name on the first screen
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
}
RUN_IT = "run the command below"
HEALTH = {  # key: (words, unit)
    "copy_gbs": ("device copy", "GB/s"),
    "gemm_bf16_tflops": ("bf16 matmul", "TFLOP/s"),
    "h2d_gbs": ("host to device", "GB/s"),
    "launch_us": ("torch's `x.add_(1)` on one element, host time a call", "us"),
    "aa_noise_floor": ("noise floor (same code against itself)", "%"),
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
}
HEALTH_SHARE = {"copy_gbs": "copy_frac", "gemm_bf16_tflops": "gemm_frac"}
# Of the software and the commit, which stand under This run, and of how the floor was found.
HEALTH_LEFT = "device torch triton cuda driver commit date precision stage why status kind gpu"
HEALTH_LEFT += " copy_frac gemm_frac aa_worst aa_trials"
COMMAND_LIMIT = 20_000  # characters; a longer one is in its file under repro/


# ------------------------------------------------------------------------------- failures


_TROUBLE = re.compile(r"\bFAILED\b|Error\b|\bfatal\b|\bassert|Traceback|Segmentation|signal ")


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
    at = max(
        (i for i, r in enumerate(rows) if r.startswith("E  ")),
        default=max((i for i, r in enumerate(rows) if _TROUBLE.search(r)), default=len(rows) - 1),
    )
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


def failing(view: View) -> list[Mapping[str, Any]]:
    """The stages that went wrong, not those that the budget cut while all was right."""
    bad = {r["stage"] for r in view.rows["test"] if r["outcome"] in ("failed", "error")}
    bad |= {r["stage"] for r in view.rows["parity"] if r["status"] != "PASS"}
    return [
        s
        for s in view.data["stages"]
        if s["id"] in bad or (s["status"] in BAD_STAGES and s.get("kind") != "BUDGET")
    ]


def command_block(stage: Mapping[str, Any], folder: Path) -> list[Code]:
    """The whole command that shows a failure again; where its file is, if nobody could type it."""
    command = repro(stage, folder)
    if command and len(command) > COMMAND_LIMIT:
        path = shlex.quote(f"artifacts/runner/{folder.name}/repro/{stage['id']}.sh")
        command = f"bash {path}"
    return [Code(fence(command, "bash", whole=True))] if command else []


def _bad_cases(view: View, stage: str) -> Iterator[str]:
    """The results of a stage that are wrong, each with its reason."""
    name = lambda text: code(text, view.shape.text)
    why = lambda text: cell(text, view.shape.text)
    for r in view.rows["parity"]:
        if r["stage"] == stage and r["status"] != "PASS":
            seed = f"(seed {num(r.get('seed'))})"
            yield f"parity {r['status']} {name(r['case'])} {seed}: {why('; '.join(r['why']))}"
    for r in view.rows["test"]:
        if r["stage"] == stage and r["outcome"] in ("failed", "error"):
            yield f"test {r['outcome']} {name(r['nodeid'])}: {why(r.get('reason'))}"
    for r in view.rows["bench"]:
        if r["stage"] == stage and r["status"] in ("FAILED", "INVALID"):
            yield f"bench {r['status']} {name(r['case'])}: {why('; '.join(r['why']))}"


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
            blocks += command_block(stage, view.folder)
        log = read_text(view.folder, stage.get("log")) if shape.log_lines else None
        if log and log.strip():
            shown = fence(excerpt(log, shape.log_lines, str(stage["log"])))
            blocks += [f"From {cell(stage['log'], 120)}:", Code(shown)]
    return Section("Failures", [b for b in blocks if b])


# ----------------------------------------------------------------------------- proof and speed


def gpus(view: View) -> Section:
    table = cards.section(view.data, view.rows["parity"])
    heads = "GPU|card|copy GB/s (of nominal)|bf16 TFLOP/s (of nominal)|parity|verdict"
    text = (
        "Health and parity of every card, measured alone. The benches ran on the first; NCCL "
        "and context parallelism on all that are good."
    )
    rows = [list(row.values()) for row in table]
    return Section("GPUs", [text, Table(heads, rows)] if rows else [])


def _pictures(view: View, *names: str) -> list[Picture]:
    return [Picture(t, path) for t, path in view.plots if Path(path).stem in names]


LEGEND = """
A time is a median with its 95 % confidence interval; a speedup is the median, with its interval, of
ratios of baseline time to ours that were measured side by side, so more than 1 is faster; it need
not be the quotient of the two medians shown.

Noise floor: {floor}. A ratio within it, or whose interval holds 1, prints "no difference
measurable".

A row is UNSTABLE when the card throttled, when the last third of the samples left the first by over
2 %, when their middle half spreads over 3 % of the median and the median is not known to 1 % (or
over 15 %, however well it is known), or with fewer than 10 samples.

Launch bound: the host takes over 1.2 times the device's time, or left gaps in most batches; wall is
its time per call, calling back to back. A wall time was taken once and has no interval; between
runs it differs by up to twice, so it is shown roughly and decides nothing.

Ceiling: share of the nearer one, memory or compute, {ceiling}.

Only VALID and UNSTABLE rows have numbers; each of them passed parity, and on the paths triton and
fa2 the launches that prove the path were counted.
"""
FA2 = """
The sliding and the compressed branch each have a least number of keys for FA-2. It is the smallest
one measured from which on, at it and at every longer one, FA-2 is at least 1.2x as fast as its
baseline (the lower bound of the interval counts). The baseline is what would run without FA-2, and
that depends on Triton's switch.
"""
ORACLE = """
Errors against an fp64 oracle; margin is error over limit, so below 1 is right. A Triton row is PASS
only when launches of its kernels were counted, and what ran is named by them; for the other routes
it is the route that the call reported.
"""
TOYS = """
Small models: they prove that a step runs, and say little of a server. Serving sizes are timed by
the stage `decode_serving`, or by `bench/bench_decode.py --preset serving`.
"""


def _paragraphs(text: str, **words: str) -> list[str]:
    return [" ".join(part.split()).format(**words) for part in text.strip().split("\n\n")]


def _legend(view: View) -> Fold:
    """How the tables of times are read."""
    bench = view.rows["bench"]
    told = lambda *names: dict.fromkeys(
        ", ".join(str(r[n]) for n in names) for r in bench if all(r.get(n) for n in names)
    )
    clocks, precisions = told("cache", "timer"), told("precision")
    measured = view.floor is not None
    lines = _paragraphs(
        LEGEND,
        floor=f"{pct(view.floor, 1)} (same code against itself)" if measured else "not measured",
        ceiling=evidence.ceiling_words(view.data["scope"], view.data["health"]),
    )
    lines += [f"Cache and clock: {cell('; '.join(clocks))}."] if clocks else []
    lines += [f"Precision: {cell(text)}." for text in precisions]
    return Fold("How to read the tables of times", [lines])


def speed(view: View) -> Section:
    apart = lambda r: r.get("bench") in evidence.APART or evidence.is_toy(r)
    blocks = evidence.bench_blocks(view, lambda r: not apart(r))
    pictures = _pictures(view, "prefill", "decode", "roofline")
    legend = [_legend(view)] if view.rows["bench"] and not view.shape.issue else []
    return Section("Speed at real sizes", [*blocks, *pictures, *legend] if blocks else [])


def toys(view: View) -> Section:
    keep = lambda r: evidence.is_toy(r) and r.get("bench") not in evidence.APART
    blocks = evidence.bench_blocks(view, keep)
    text = _paragraphs(TOYS) if blocks else []
    return Section("Speed at toy sizes", [*text, *blocks], fold=True, issue=False)


def threshold(view: View) -> Section:
    found = evidence.recommendation(view.data, view.rows["bench"])
    heads = "L|cells that carry it|smallest lower bound, device|by wall|case of the smallest"
    rows = [
        [e["L"], f"{e['carry']}/{e['cells']}", e["low"], e["wall"], e["case"]]
        for e in found["evidence"]
    ]
    blocks = [found["text"], found["doubt"], found["scope"], Table(heads, rows) if rows else None]
    if not view.shape.issue:
        blocks += _pictures(view, "speedup")
        blocks += evidence.bench_blocks(view, lambda r: r.get("bench") == "sel")
    title = "Selection called alone, and its threshold"
    return Section(title, [b for b in blocks if b], fold=True, issue=bool(rows))


def fa2(view: View) -> Section:
    found = evidence.fa2_lengths(view.data, view.rows["bench"])
    rows = [
        [e["branch"], e["length"], f"{e['valid']}/{e['cells']}", e["low"], e["baseline"], e["case"]]
        for e in found["evidence"]
    ]
    if not rows and not found["settings"]:
        return Section("FA-2 minimum lengths", [])
    blocks: list[Any] = _paragraphs(FA2)
    for one in found["settings"]:
        blocks += [f"{one['head']}.", one["lengths"]]
    heads = "branch|keys|valid cells|smallest lower bound|baseline|its case"
    blocks += [Table(heads, rows)] if rows else []
    blocks += evidence.bench_blocks(view, lambda r: r.get("bench") == "fa2")
    return Section("FA-2 minimum lengths", blocks, fold=True, issue=False)


def parity(view: View) -> Section:
    rows, shape = view.rows["parity"], view.shape
    bad = [r for r in rows if r["status"] != "PASS"]
    blocks: list[Any] = []
    if bad:
        blocks += ["Wrong or without proof:", evidence.parity_table(bad, shape, ("dtype",))]
    if len(bad) > shape.rows:
        blocks.append(f"and {len(bad) - shape.rows} more, in bundle.json")
    if rows and not shape.issue:
        heads = "op|passed|closest to its limit|MAE|max-abs|worst row|margin|paths taken"
        every = evidence.parity_table(rows, shape, ("why",))
        blocks += [
            *_paragraphs(ORACLE),
            Table(heads, list(evidence.parity_ops(rows, shape))),
            Fold(f"All {len(rows)} parity rows", [every]),
        ]
    return Section("Parity", blocks)


# --------------------------------------------------------------------------------- the rest


def health(view: View) -> Section:
    measured, rows = view.data["health"] or {}, []
    known = [key for key in HEALTH if key in measured]
    skip = {*known, *HEALTH_LEFT.split()}
    for key in [*known, *(k for k in measured if k not in skip)]:
        words, unit = HEALTH.get(key, (cell(key, 60), ""))
        value, share = measured[key], measured.get(HEALTH_SHARE.get(key, ""))
        if isinstance(value, (bool, str)) or is_number(value):
            text = pct(value, 1) if unit == "%" else f"{num(value)} {unit}".rstrip()
            rows.append((words, text, pct(share)))
    if is_interval(measured.get("sm_mhz")):
        low, high = measured["sm_mhz"]
        rows.append(("SM clock, lowest and highest", f"{num(low)} and {num(high)} MHz", "-"))
    table = [Table("what|measured|of nominal", rows)] if rows else []
    return Section("Box health", table, fold=True)


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


def training(view: View) -> Section:
    stage = next((s for s in view.data["stages"] if s["id"] == "train_showcase"), None)
    if stage is None:
        return Section("Training showcase", [])
    metrics = {
        str(m.get("name")): (m.get("value"), m.get("unit"))
        for m in view.data["metrics"]
        if m.get("stage") == stage["id"]
    }
    value = lambda name: num(metrics.get(name, (None,))[0])
    why = f": {cell(stage.get('reason'))}" if stage["status"] != "PASS" else ""
    text = f"{stage['status']}{why}."
    if value("loss_first") != "-":
        text += (
            f" Loss {value('loss_first')} → {value('loss_last')}, {value('steps_per_s')} steps/s."
        )
    curve = losses(view.folder)
    spark = sparkline([loss for _, loss, _ in curve])
    checks = [
        f"{code(r['nodeid'].split('::')[-1], 80)} {r['outcome']}"
        + (f": {cell(r['reason'])}" if r.get("reason") else "")
        for r in view.rows["test"]
        if r["stage"] == stage["id"]
    ]
    values = [
        f"{cell(name, 80)}: {num(v)} {'' if u in (None, '', '1') else cell(u, 20)}".rstrip()
        for name, (v, u) in list(metrics.items())[:200]
    ]
    blocks = [
        text,
        f"`{spark}` ({len(curve)} steps with a finite loss)" if spark else "",
        checks,
        *_pictures(view, "loss"),
        Fold(f"All {len(metrics)} metrics", [values]) if values else "",
    ]
    return Section("Training showcase", [b for b in blocks if b], fold=True, issue=False)


def stage_note(stage: Mapping[str, Any], rows: Mapping[str, list], text: int) -> str:
    """What stands beside the result of a stage."""
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
    for name, words in (
        ("flaky", "FLAKY: passed at the second attempt"),
        ("half_size", "HALF SIZE: out of GPU memory at first"),
    ):
        parts += [words] if stage.get(name) else []
    if stage.get("resumed_from"):
        parts.append(f"from run {cell(stage['resumed_from'], 60)}")
    if not stage.get("required", True):
        parts.append("optional")
    return "; ".join(parts)


def stages(view: View) -> Section:
    rows = [
        (
            code(s["id"], 60),
            s["status"],
            span(s.get("wall_s")),
            stage_note(s, view.rows, view.shape.text),
        )
        for s in view.data["stages"]
    ]
    table = Table("stage|result|time|note", rows)
    code_ = f"Exit code {num(view.data['verdict']['exit_code'])}."
    return Section("Stages", [code_, table], fold=True)


def _routing(folder: Path) -> Mapping[str, Any]:
    try:
        routing = json.loads(read_text(folder, "routing.json") or "{}")
    except ValueError:
        return {}
    return routing if isinstance(routing, dict) else {}


def flags_of(folder: Path) -> dict[str, tuple[Any, Any]]:
    """(value, source) of every flag that routing.json names; {} where it cannot be read."""
    try:
        return {f["name"]: (f["value"], f["source"]) for f in _routing(folder).get("flags", [])}
    except (KeyError, TypeError):
        return {}


def _flags(view: View) -> list[tuple[str, str, str]]:
    """Effective flags with their source: of routing.json, else the variables that were set and a
    line that says so; then what single stages were given."""
    known = flags_of(view.folder)
    found = [(code(name), code(value), cell(source)) for name, (value, source) in known.items()]
    variables = view.data["env"].get("variables")
    for name, value in variables.items() if isinstance(variables, dict) else ():
        if name not in known:
            found.append((code(name), code(value), "environment"))
    if not known:
        found.append(
            (
                "every other flag",
                "not recorded",
                f"{code('routing.json')}, which lists them, is not there",
            )
        )
    for stage in view.data["stages"]:
        for name, value in sorted((stage.get("env") or {}).items()):
            found.append((code(name), code(value), f"stage {code(stage['id'], 60)}"))
    return found


def _calls(folder: Path) -> list[tuple[str, str, str]]:
    """(call, its kernels, faster kernels with the reason against each) of routing.json."""
    try:
        return [
            (
                cell(call["call"], 60),
                ", ".join(code(k, 80) for k in call["kernels"][:60]) or "none of ours",
                "; ".join(
                    f"{code(k, 80)}: {cell(why, 200)}"
                    for k, why in list(call["passed_over"].items())[:20]
                ),
            )
            for call in _routing(folder).get("calls", [])
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


CGROUP = ("cgroup_cpu", "cgroup_memory")


def _unlimited(value: Any) -> bool:
    """Do these words of a cgroup stand for no limit? Version 1 has -1, or the largest page."""
    first = str(value).split(" ")[0]
    return first in ("max", "-1") or (first.isdecimal() and len(first) < 25 and int(first) >= 2**60)


def probed(env: Mapping[str, Any]) -> list[Fold]:
    """A fold for each section of the captured environment."""
    out = []
    for name, values in env.items():
        if not isinstance(values, dict):
            out.append(Fold(cell(name, 60), [cell(values)]))
            continue
        rows = [
            (
                cell(k, 80),
                "no limit"
                if k in CGROUP and _unlimited(v)
                else num(v)
                if not isinstance(v, (dict, list))
                else cell(json.dumps(v)),
            )
            for k, v in values.items()
            if k != "text" and v is not None
        ]
        text = values.get("text")
        blocks: list[Any] = [Table("|", rows)] if rows else []
        if isinstance(text, str) and text.strip():
            blocks.append(Code(fence(clip_mid(text, 80))))
        if blocks:
            out.append(Fold(cell(name, 60), blocks))
    return out


def environment(view: View) -> Section:
    doctor = [
        (cell(c.get("name"), 60), cell(c.get("level"), 20), cell(c.get("text")))
        for c in view.data["doctor"]
    ]
    calls = _calls(view.folder)
    heads = "call|kernels, in order|faster ones passed over"
    blocks = [
        *([Fold("What the doctor said", [Table("doctor|level|what", doctor)])] if doctor else []),
        *probed(view.data["env"]),
        *([Fold("Kernels of a call", [Table(heads, calls)])] if calls else []),
        Fold("Effective flags", [Table("flag|value|source", _flags(view))]),
    ]
    return Section("Environment", blocks, issue=False)


def this_run(view: View) -> Section:
    data = view.data
    git, device, python = data["git"], data["device"], data["env"].get("python")
    python = python if isinstance(python, dict) else {}
    system = data["env"].get("system")
    gpu = [device.get("name")]
    if device.get("name"):
        gpu += [
            f"sm {device.get('sm')}",
            f"{num(device.get('mem_mib'))} MiB",
            f"driver {device.get('driver')}",
            device.get("pcie"),
            f"ECC {device.get('ecc')}",
        ]
    versions = [f"{k} {python[k]}" for k in ("torch", "cuda", "triton") if python.get(k)]
    if flash := (python.get("flash_attn") or data["env"].get("packages", {}).get("flash-attn")):
        versions.append(f"flash-attn {flash}")
    probe = {str(m.get("name")): m.get("value") for m in data["metrics"]}
    source = {"torch": "torch's own", "flash_attn": "the flash-attn package"}.get(
        str(probe.get("fa2_source"))
    )
    branch = f" on {git['branch']}" if git.get("branch") else ""
    state = {True: "DIRTY", False: "clean"}.get(git.get("dirty"), "unknown whether clean")
    end = f"ended {data['ended']}" if data["ended"] else "its end was not recorded"
    price, took = data.get("price_per_hour"), data.get("monotonic_s")
    rows = {
        "GPU": "none was used"
        if data["scope"] == "cpu"
        else ", ".join(str(g) for g in gpu if g) or f"none: {device.get('reason')}",
        "host": ", ".join(f"{k} {v}" for k, v in system.items() if k in ("os", "cpu", "cores"))
        if isinstance(system, dict)
        else "",
        "commit": f"{git.get('short')}{branch}, {state}",
        "versions": ", ".join([f"python {python.get('version')}", *versions]),
        "FA-2": f"{source} {probe.get('fa2_version') or ''}".strip() if source else None,
        "profile": f"{data['profile']} {' '.join(map(str, data['argv']))}".strip(),
        "run": f"{data['run_id']}, started {data['started']}, {end}",
        "cost": f"about ${price * took / 3600:.2f} at ${price:g} an hour"
        if is_number(price) and is_number(took)
        else None,
    }
    table = Table("|", [(name, cell(v)) for name, v in rows.items() if v is not None])
    return Section("This run", [table], fold=True)


def files(view: View) -> Section:
    rows = []
    for path in bundles.members(view.folder):
        name = path.relative_to(view.folder).as_posix()
        if name not in MADE_HERE and not name.startswith("plots/"):
            fixed = name not in STILL_CHANGING
            rows.append((code(name), size(path.stat().st_size) if fixed else "-"))
    table = [Table("file|size", rows)] if rows else []
    return Section("Files of the bundle", table, fold=True, issue=False)


def last_words(view: View) -> list[str]:
    redaction = view.data["redaction"]
    words = [
        f"Redaction: best effort redaction; look at it before you post. Gate "
        f"{cell(redaction.get('gate'), 20)}, {num(redaction.get('replacements') or 0)} "
        "replacements, listed in redactions.json without their values.",
        "Check the bundle: `sha256sum -c SHA256SUMS` in the folder, or `python -m scripts.oneshot "
        "verify FOLDER`. The runner printed the sha256 of the archive when it packed it.",
    ]
    if view.shape.issue:
        words.insert(
            0,
            "Every row, the environment and the plots are in `report.md` and "
            "`report.html` of the bundle.",
        )
    return words


# What a reader decides by comes first.
SECTIONS = (
    failures,
    gpus,
    speed,
    threshold,
    fa2,
    toys,
    parity,
    health,
    training,
    stages,
    this_run,
    environment,
    files,
)


def sections(view: View) -> list[Section]:
    """Those sections that have something to say; in an issue all but the failures are folded."""
    found = [s for make in SECTIONS if (s := make(view)).blocks]
    if not view.shape.issue:
        return found
    return [Section(s.title, s.blocks, fold=s.title != "Failures") for s in found if s.issue]
