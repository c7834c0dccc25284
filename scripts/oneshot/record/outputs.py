"""Texts of a run that need the standard library only: JUnit, repro scripts, the short report."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from nsa.flags import RUNNER_VARIABLES
from scripts.oneshot.record.capture import plain
from scripts.oneshot.record.model import DIED, UNREACHED


def junit_xml(stage: str, rows: Sequence[Mapping[str, Any]]) -> str:
    bad = sum(r["outcome"] in ("failed", "error") for r in rows)
    skipped = sum(r["outcome"] == "skipped" for r in rows)
    counts = {"tests": str(len(rows)), "failures": str(bad), "skipped": str(skipped)}
    suite = ElementTree.Element("testsuite", name=stage, **counts)
    tags = {"failed": "failure", "error": "failure", "skipped": "skipped"}
    for row in rows:
        file, _, name = row["nodeid"].partition("::")
        time = str(row.get("duration_s") or 0)
        case = ElementTree.SubElement(suite, "testcase", classname=file, name=name, time=time)
        if tag := tags.get(row["outcome"]):
            ElementTree.SubElement(case, tag, message=plain(str(row.get("reason") or ""))[:2000])
    ElementTree.indent(suite, "")
    text = ElementTree.tostring(suite, encoding="unicode")
    return f"<?xml version='1.0' encoding='utf-8'?>\n{text}\n"


WRITES = ("--csv", "--json", "--out")  # options of the stages whose value is written


def typed(argv: Sequence[str]) -> str:
    """A stage's command as a person types it: it writes to /tmp and reads from $BUNDLE."""
    parts = []
    for before, part in zip(("", *argv), argv, strict=False):
        part = part.replace("{python}", "python")
        if before in WRITES:
            part = part.replace("{out}", "/tmp")
        pieces = part.split("{out}")
        parts.append('"$BUNDLE"'.join(shlex.quote(p) if p or len(pieces) == 1 else ""
                                      for p in pieces))  # fmt: skip
    return " ".join(parts)


def repro(
    stage: Mapping[str, Any], tests: Sequence[Mapping[str, Any]], env: Mapping[str, Any]
) -> str:
    """The one command that shows the failure of a stage again; tests: the rows of its tests, env:
    the run's, whose shell gave every stage its flags."""
    failed = [r["nodeid"] for r in tests if r["outcome"] in ("failed", "error")]
    argv = [str(part) for part in stage["argv"]]
    if failed and "pytest" in argv:
        argv = [*argv[: argv.index("pytest") + 1], "--tb=short", *failed[:20]]
    shell = env.get("variables")
    flags = shell.items() if isinstance(shell, Mapping) else ()
    flags = {n: v for n, v in flags if n.startswith("NSA_") and n not in RUNNER_VARIABLES}
    given = sorted({**flags, **(stage.get("env") or {})}.items())
    return " ".join([*(f"{k}={shlex.quote(str(v))}" for k, v in given), typed(argv)])


WITH_SCRIPT = ("FAIL", "CRASH", "TIMEOUT")  # stages that have one


def repro_script(
    stage: Mapping[str, Any], tests: Sequence[Mapping[str, Any]], env: Mapping[str, Any]
) -> str:
    """The same as a script, which finds the bundle that it lies in."""
    command = repro(stage, tests, env)
    folder = 'BUNDLE="${BUNDLE:-$(cd "$(dirname "$0")/.." && pwd)}"\n'
    return (
        "#!/usr/bin/env bash\n"
        f"# {stage['status']}: {' '.join((stage['reason'] or '').split())}\n"
        "# Run it in the root of the sources, with the python of the run.\n"
        f"{folder if '$BUNDLE' in command else ''}{command}\n"
    )


# Stages without a result, by the reason in the record: words that hold while the run goes on.
UNDER_WAY = {DIED: "running", UNREACHED: "not yet"}
CUT_SHORT = (
    "If it runs no more, it was cut short: `python -m scripts.oneshot render FOLDER`, with the "
    "folder of this file, makes the full report of what there is, and `--resume` takes up what "
    "passed.",
    "", "Not looked over for private data.", "",
)  # fmt: skip


def _so_far(data: Mapping[str, Any]) -> str:
    """The first line of a run that has not ended: it has no verdict yet, and may never have one."""
    ended = Counter(s["status"] for s in data["stages"] if s["reason"] not in UNDER_WAY)
    counts = ", ".join(f"{count} {status}" for status, count in ended.items()) or "none"
    of = f"profile {data['profile']}, commit {data['git'].get('short')}"
    part = f"; partial run ({data['partial']})" if data["partial"] else ""
    stages = f"{ended.total()} of {len(data['stages'])} stages so far: {counts}"
    return f"This run has not ended - {stages}; {of}{part}"


def short_report(data: Mapping[str, Any]) -> str:
    """A report of the standard library alone: what stands until, or if, the full one is made."""
    going = data["ended"] is None

    def cell(value: Any) -> str:
        return " ".join(str("" if value is None else value).split()).replace("|", "\\|")[:300]

    cpu = ["This report speaks of no GPU: it ran on the CPU only.", ""]
    line = _so_far(data) if going else data["verdict"]["one_line"]
    out = [*(cpu if data["scope"] == "cpu" else ()), f"**{cell(line)}**", ""]
    out += CUT_SHORT if going else ()
    out += ["| stage | result | seconds | why |", "|---|---|---|---|"]
    for s in data["stages"]:
        if going and (state := UNDER_WAY.get(s["reason"])):
            out.append(f"| {s['id']} | {state} | | |")
            continue
        out.append(f"| {s['id']} | {s['status']} | {s['wall_s']:.1f} | {cell(s['reason'])} |")
    blocks = [c for c in data["doctor"] if c["level"] != "OK"]
    if blocks:
        out += ["", "| doctor | level | what | fix |", "|---|---|---|---|"]
    for c in blocks:
        out.append(f"| {c['name']} | {c['level']} | {cell(c['text'])} | {cell(c['fix'])} |")
    last = "Numbers, logs and the journal are beside this file: bundle.json, events.jsonl."
    return "\n".join([*out, "", last, ""])


def scp_line(environ: Mapping[str, str], path: Path) -> str | None:
    """How to fetch `path` from this box; for the console only, never for the bundle."""
    ssh = environ.get("SSH_CONNECTION", "").split()
    for host, port in (
        (environ.get("RUNPOD_PUBLIC_IP"), environ.get("RUNPOD_TCP_PORT_22")),
        (environ.get("PUBLIC_IPADDR"), environ.get("VAST_TCP_PORT_22")),
        (ssh[2], ssh[3]) if len(ssh) == 4 else (None, None),
    ):
        if host and port:
            source = f"{environ.get('USER') or 'root'}@{host}:{path.resolve()}"
            return f"scp -P {port} {shlex.quote(source)} ."
    return None
