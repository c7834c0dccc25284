"""The sections about the run itself: its box, stages, settings, environment and files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.oneshot.record import bundle as bundles
from scripts.oneshot.record import markdown
from scripts.oneshot.record.journal import parse_json
from scripts.oneshot.record.markdown import cell, code, num, pct, span
from scripts.oneshot.record.model import check_shape
from scripts.oneshot.record.reading import read_text
from scripts.oneshot.record.rows import is_number
from scripts.oneshot.report.blocks import Code, Fold, Section, Table, View
from scripts.oneshot.report.evidence import counts_text

MADE_HERE = ("report.md", "report.html", "issue.md")
STILL_CHANGING = ("bundle.json", "events.jsonl", "redactions.json", bundles.SUMS)
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
    "pcie_gbs_nominal": ("host to device, nominal", "GB/s"), "throttled": ("throttled", ""),
    "power_w": ("power, median", "W"), "power_limit_w": ("power limit", "W"),
    "power_default_w": ("power limit by default", "W"),
    "ecc_uncorrected": ("uncorrected ECC errors", ""),
    "memory_used_by_others_mib": ("memory that others use", "MiB"),
    "memory_test_mib": ("memory that was written and read back", "MiB"),
    "memory_test_patterns": ("patterns it was written with", ""),
    "memory_wrong_words": ("words that came back wrong", ""),
}  # fmt: skip
for _dtype in ("bf16", "fp32"):
    HEALTH |= {
        f"{_dtype}_product_repeats": (f"{_dtype} matmul made again", "times"),
        f"{_dtype}_products_differing": (f"{_dtype} matmuls that differed from the first", ""),
        f"{_dtype}_product_values_wrong": (f"{_dtype} values that differ from exact ones", ""),
    }
HEALTH_SHARE = {"copy_gbs": "copy_frac", "gemm_bf16_tflops": "gemm_frac"}
# Of the software and the commit, which stand under This run, and of how the floor was found.
HEALTH_LEFT = "device torch triton cuda driver commit date precision stage why status kind gpu"
HEALTH_LEFT += " copy_frac gemm_frac aa_worst aa_trials bf16_product_seed fp32_product_seed"


def health(view: View) -> Section:
    measured, rows = view.data["health"] or {}, []
    for key in dict.fromkeys([*HEALTH, *(k for k in measured if k not in HEALTH_LEFT.split())]):
        if key not in measured:
            continue
        words, unit = HEALTH.get(key, (cell(key, 60), ""))
        value, share = measured[key], measured.get(HEALTH_SHARE.get(key, ""))
        if isinstance(value, (bool, str)) or is_number(value):
            text = pct(value, 1) if unit == "%" else f"{num(value)} {unit}".rstrip()
            rows.append((words, text, pct(share)))
    if markdown.is_interval(measured.get("sm_mhz")):
        low, high = measured["sm_mhz"]
        rows.append(("SM clock, lowest and highest", f"{num(low)} and {num(high)} MHz", "-"))
    table = rows and Table("what|measured|of nominal", rows)
    return Section("Box health", [table], fold=True)


def _spent(stage: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    """Where its seconds went, by bench/spent.py; of several processes the sum."""
    spent: Counter[str] = Counter()
    for row in metrics:
        kind, _, name = str(row.get("name")).partition("/")
        if row.get("stage") == stage["id"] and kind == "seconds" and is_number(row.get("value")):
            spent[cell(name, 20)] += row["value"]
    return ", ".join(f"{name} {span(seconds)}" for name, seconds in spent.most_common(9))


def stage_note(stage: Mapping[str, Any], view: View) -> str:
    """What stands beside the result of a stage."""
    parts = [] if stage["status"] == "PASS" else [cell(stage.get("reason"), view.shape.text)]
    counts = stage.get("counts") or {}
    if any(counts.values()):
        parts.append("tests " + counts_text(counts))
    for kind, good in (("parity", "PASS"), ("bench", "VALID")):
        if mine := [r["status"] for r in view.rows[kind] if r["stage"] == stage["id"]]:
            parts.append(f"{kind} {mine.count(good)}/{len(mine)} {good}")
    if is_number(stage.get("first_call_ms")):
        parts.append(f"first call {markdown.us(1000 * stage['first_call_ms'])}")
    if is_number(stage.get("peak_vram_mib")):
        parts.append(f"peak {stage['peak_vram_mib']:.0f} MiB")
    parts += [
        _spent(stage, view.data["metrics"]),
        stage.get("flaky") and "FLAKY: passed at the second attempt",
        stage.get("half_size") and "HALF SIZE: out of GPU memory at first",
        stage.get("resumed_from") and f"from run {cell(stage['resumed_from'], 60)}",
        not stage.get("required", True) and "optional",
    ]
    return "; ".join(part for part in parts if part)


def stages(view: View) -> Section:
    row = lambda s: (code(s["id"], 60), s["status"], span(s.get("wall_s")), stage_note(s, view))
    table = Table("stage|result|time|note", [row(s) for s in view.data["stages"]])
    exit_code = f"Exit code {num(view.data['verdict']['exit_code'])}."
    return Section("Stages", [exit_code, table], fold=True)


def _routing(folder: Path, name: str, shape: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A list of routing.json whose items have this shape; empty where it cannot be read."""
    with suppress(ValueError, KeyError, TypeError):
        listed = parse_json(read_text(folder, "routing.json") or "{}")[name]
        check_shape(name, listed, [shape])
        return listed
    return []


def flags_of(folder: Path) -> dict[str, tuple[Any, Any]]:
    """(value, source) of every flag that routing.json names; {} where it cannot be read."""
    flags = _routing(folder, "flags", {"name": str, "value": object, "source": object})
    return {flag["name"]: (flag["value"], flag["source"]) for flag in flags}


def _flags(view: View) -> list[tuple[str, str, str]]:
    """Effective flags with their source: of routing.json, else the variables that were set and a
    line that says so; then what single stages were given."""
    known, given = flags_of(view.folder), view.data["env"].get("variables", {})
    found = [(code(name), code(value), cell(source)) for name, (value, source) in known.items()]
    found += [(code(n), code(value), "environment") for n, value in given.items() if n not in known]
    if not known:
        why = "`routing.json`, which lists them, is not there"
        found.append(("every other flag", "not recorded", why))
    for stage in view.data["stages"]:
        for name, value in sorted((stage.get("env") or {}).items()):
            found.append((code(name), code(value), f"stage {code(stage['id'], 60)}"))
    return found


def _calls(folder: Path) -> list[tuple[str, str, str]]:
    """(call, its kernels, faster kernels with the reason against each) of routing.json."""
    out = []
    for call in _routing(folder, "calls", {"call": object, "kernels": list, "passed_over": dict}):
        over = list(call["passed_over"].items())[:20]
        kernels = ", ".join(code(k, 80) for k in call["kernels"][:60]) or "none of ours"
        passed = "; ".join(f"{code(k, 80)}: {cell(why, 200)}" for k, why in over)
        out.append((cell(call["call"], 60), kernels, passed))
    return out


CGROUP = ("cgroup_cpu", "cgroup_memory")


def _fact(name: str, value: Any) -> str:
    first = str(value).split(" ")[0]  # version 1 of a cgroup has -1, or the largest page
    huge = first.isdecimal() and len(first) < 25 and int(first) >= 2**60
    if name in CGROUP and (first in ("max", "-1") or huge):
        return "no limit"
    return cell(json.dumps(value)) if isinstance(value, (dict, list)) else num(value)


def probed(env: Mapping[str, Any]) -> list[Fold]:
    out = []
    for name, values in env.items():
        text = values.get("text")
        facts = {k: v for k, v in values.items() if k != "text" and v is not None}
        blocks: list[Any] = []
        if facts:
            blocks.append(Table("|", [(cell(k, 80), _fact(k, v)) for k, v in facts.items()]))
        if isinstance(text, str) and text.strip():
            blocks.append(Code(markdown.fence(markdown.clip_mid(text, 80))))
        out += [Fold(cell(name, 60), blocks)] if blocks else []
    return out


def environment(view: View) -> Section:
    told = lambda c: (cell(c.get("name"), 60), cell(c.get("level"), 20), cell(c.get("text")))
    doctor, calls = list(map(told, view.data["doctor"])), _calls(view.folder)
    heads = "call|kernels, in order|faster ones passed over"
    said = doctor and Fold("What the doctor said", [Table("doctor|level|what", doctor)])
    kernels = calls and Fold("Kernels of a call", [Table(heads, calls)])
    flags = Fold("Effective flags", [Table("flag|value|source", _flags(view))])
    return Section("Environment", [said, *probed(view.data["env"]), kernels, flags], issue=False)


def this_run(view: View) -> Section:
    data = view.data
    git, device = data["git"], data["device"]
    python, system = (data["env"].get(name, {}) for name in ("python", "system"))
    name, memory = device.get("name"), f"{num(device.get('mem_mib'))} MiB"
    gpu = [name, f"sm {device.get('sm')}", memory, f"driver {device.get('driver')}"]
    gpu += [device.get("pcie"), f"ECC {device.get('ecc')}"]
    card = ", ".join(str(g) for g in gpu if g) if name else f"none: {device.get('reason')}"
    versions = [f"{k} {python[k]}" for k in ("torch", "cuda", "triton") if python.get(k)]
    if flash := (python.get("flash_attn") or data["env"].get("packages", {}).get("flash-attn")):
        versions.append(f"flash-attn {flash}")
    probe = {str(m.get("name")): m.get("value") for m in data["metrics"]}
    sources = {"torch": "torch's own", "flash_attn": "the flash-attn package"}
    source = sources.get(str(probe.get("fa2_source")))
    branch = f" on {git['branch']}" if git.get("branch") else ""
    state = {True: "DIRTY", False: "clean"}.get(git.get("dirty"), "unknown whether clean")
    end = f"ended {data['ended']}" if data["ended"] else "its end was not recorded"
    price, took = data.get("price_per_hour"), data.get("monotonic_s")
    paid = is_number(price) and is_number(took)
    rows = {
        "GPU": "none was used" if data["scope"] == "cpu" else card,
        "host": ", ".join(f"{k} {v}" for k, v in system.items() if k in ("os", "cpu", "cores")),
        "commit": f"{git.get('short')}{branch}, {state}",
        "versions": ", ".join([f"python {python.get('version')}", *versions]),
        "FA-2": f"{source} {probe.get('fa2_version') or ''}".strip() if source else None,
        "profile": f"{data['profile']} {' '.join(map(str, data['argv']))}".strip(),
        "run": f"{data['run_id']}, started {data['started']}, {end}",
        "cost": f"about ${price * took / 3600:.2f} at ${price:g} an hour" if paid else None,
    }
    table = Table("|", [(name, cell(v)) for name, v in rows.items() if v is not None])
    return Section("This run", [table], fold=True)


def files(view: View) -> Section:
    rows = []
    for path in bundles.members(view.folder):
        name = path.relative_to(view.folder).as_posix()
        size = "-" if name in STILL_CHANGING else markdown.size(path.stat().st_size)
        if name not in MADE_HERE and not name.startswith("plots/"):
            rows.append((code(name), size))
    table = rows and Table("file|size", rows)
    return Section("Files of the bundle", [table], fold=True, issue=False)


def last_words(view: View) -> list[str]:
    redaction = view.data["redaction"]
    gate, count = cell(redaction.get("gate"), 20), num(redaction.get("replacements") or 0)
    more = "Every row, the environment and the plots are in `report.md` and `report.html` of the "
    return [
        *([f"{more}bundle."] if view.shape.issue else ()),
        f"Redaction: best effort redaction; look at it before you post. Gate {gate}, {count} "
        "replacements, listed in redactions.json without their values.",
        "Check the bundle: `sha256sum -c SHA256SUMS` in the folder, or `python -m scripts.oneshot "
        "verify FOLDER`. The runner printed the sha256 of the archive when it packed it.",
    ]
