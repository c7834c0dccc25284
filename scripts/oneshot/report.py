"""The `render` verb: report.md, report.html and issue.md of a run, rebuilt from its journal.

bundle.json is left alone. The plots come last, so that a render that is cut short has its report.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.oneshot import bundle as bundles
from scripts.oneshot import cards, evidence, sections
from scripts.oneshot.evidence import Shape, noise_floor
from scripts.oneshot.journal import write_atomic
from scripts.oneshot.markdown import FILTERS, cell, code, num, pct, span
from scripts.oneshot.reading import BundleError, held_to_rules, rebuild

TEMPLATES = Path(__file__).resolve().parent.parent.parent / "templates"
ISSUE_LIMIT = 60_000  # GitHub refuses 65,536 and more

_SMALL = Shape(False, False, False, False, plots=False)
LADDER = (
    Shape(plots=False), Shape(environment=False, plots=False), Shape(False, False, plots=False),
    Shape(False, False, False, plots=False), _SMALL, replace(_SMALL, log_lines=5, rows=100),
    replace(_SMALL, evidence=False, log_lines=0, rows=40, text=200),
    replace(_SMALL, evidence=False, log_lines=0, rows=12, text=120),
)  # fmt: skip


# What a Shape may leave out, in words, in the order of LADDER.
_LEFT_OUT = {
    "plots": "plots", "environment": "environment and flags", "timeline": "timeline",
    "passing": "the single parity rows that passed",
    "same": "benches without a measurable difference",
    "evidence": "valid benches, evidence of the thresholds, box health, training, files",
    "log_lines": "excerpts of the logs",
}  # fmt: skip


def _machine(data: Mapping[str, Any]) -> str:
    """A small JSON object for programs that read a pasted issue, safe in an HTML comment."""
    verdict, python = data["verdict"], data["env"].get("python")
    small = {
        "schema": data["schema"], "run_id": data["run_id"], "profile": data["profile"],
        "scope": data["scope"], "commit": data["git"].get("commit"),
        "dirty": data["git"].get("dirty"), "gpu": data["device"].get("name"),
        "sm": data["device"].get("sm"), "driver": data["device"].get("driver"),
        "torch": python.get("torch") if isinstance(python, dict) else None,
        "triton": python.get("triton") if isinstance(python, dict) else None,
        "sel_triton_min_L": (data["recommend"] or {}).get("sel_triton_min_L"),
        "noise_floor": noise_floor(data["health"]),
        **{k: v for k, v in verdict.items() if k != "one_line"},
        "stages": {s["id"]: s["status"] for s in data["stages"]},
    }  # fmt: skip
    text = json.dumps(small, separators=(",", ":"), default=str)
    for character in "<>@#`":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.replace("--", "-\\u002d")


def context(
    data: Mapping[str, Any], folder: Path, shape: Shape, *, plots: Sequence[tuple[str, str]] = (),
    extra: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Everything the template shows, already safe as Markdown."""
    rows, extra = {}, list(extra)
    for kind, key in (("test", "tests"), ("parity", "parity"), ("bench", "bench")):
        rows[kind], broken = held_to_rules(data[key], kind)
        if broken:
            extra.append(f"{broken} {kind} rows are broken and left out")
    extra += cards.warnings(data)
    floor = noise_floor(data["health"])
    stages = data["stages"]
    unproven = [s for s in stages if s["status"] in ("SKIPPED", "NOT_RUN")]
    return {
        "cpu": data["scope"] == "cpu", "shape": shape, "data": data, "verdict": data["verdict"],
        "shortened": ", ".join(w for name, w in _LEFT_OUT.items() if not getattr(shape, name)),
        "one_line": cell(data["verdict"]["one_line"], 1000), "facts": sections.facts_section(data),
        "stages": [
            (code(s["id"], 60), s["status"], span(s.get("wall_s")),
             sections.stage_note(s, rows, shape.text)) for s in stages
        ],
        "not_run": [(code(s["id"], 60), s["status"], cell(s["reason"], shape.text),
                     "required" if s.get("required", True) else "optional") for s in unproven],
        "skipped_tests": sections.skipped_section(rows["test"], shape),
        "warnings": sections.warnings_section(data, rows, floor, extra, shape),
        "failures": sections.failures_section(stages, rows, folder, shape),
        "parity": evidence.parity(rows["parity"], shape),
        "benches": evidence.benches(rows["bench"], floor, shape),
        "floor": pct(floor, 1) if floor is not None else None,
        "ceiling": evidence.ceiling_words(data["scope"], data["health"]),
        "recommend": evidence.recommendation(data, rows["bench"]),
        "precision": [cell(p) for p in dict.fromkeys(
            str(r["precision"]) for r in rows["bench"] if r.get("precision"))],
        "fa2": evidence.fa2_lengths(data, rows["bench"]),
        "health": sections.health_section(data["health"]),
        "cards": cards.section(data, rows["parity"]),
        "training": sections.training_section(data, rows, folder),
        "flags": sections.flags_section(data, folder), "calls": sections.calls_section(folder),
        "environment": sections.environment_section(data["env"]),
        "doctor": [(cell(c.get("name"), 60), cell(c.get("level"), 20), cell(c.get("text")))
                   for c in data["doctor"]],
        "timeline": sections.timeline_section(stages),
        "files": sections.files_section(folder), "plots": list(plots),
        "redaction": {"gate": cell(data["redaction"].get("gate"), 20),
                      "replacements": num(data["redaction"].get("replacements") or 0)},
        "machine": _machine(data),
    }  # fmt: skip


def render_text(*args: Any, **kwargs: Any) -> str:
    """The report as Markdown; arguments as for `context`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined,
        autoescape=False, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters.update(FILTERS)
    text = environment.get_template("report.md.j2").render(context(*args, **kwargs))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def render_page(
    data: Mapping[str, Any], folder: Path, *, plots: Sequence[tuple[str, str]] = (),
    extra: Sequence[str] = (),
) -> str:  # fmt: skip
    """The same report as one HTML page that needs no other file and no network."""
    import jinja2

    from scripts.oneshot import page

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined,
        autoescape=True, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(page.FILTERS)
    drawings = []
    for number, (title, path) in enumerate(plots):
        source = sections.read_text(folder, path) or ""
        with suppress(ValueError):  # a plot is an illustration
            drawing = page.svg(source, f"p{number}-", title)
            drawings.append((title, drawing, path.endswith("loss.svg")))
    shown = context(data, folder, Shape(), extra=extra)
    verdict = page.colour(data["verdict"]["status"])
    return environment.get_template("report.html.j2").render(
        shown, drawings=drawings, verdict_class=verdict,
        title=str(data["git"].get("short") or "report")
        + (" on a CPU" if data["scope"] == "cpu" else ""),
    )  # fmt: skip


def issue_text(data: Mapping[str, Any], folder: Path, extra: Sequence[str] = ()) -> str:
    """The report cut to ISSUE_LIMIT characters; verdict, first failures and warnings stay."""
    for shape in LADDER:
        text = render_text(data, folder, shape, extra=extra)
        if len(text) <= ISSUE_LIMIT:
            return text
    # Cut between two sections: a fence or a table that is open would take what follows along.
    note = "\n\nCut here, because an issue may not be longer; report.md has the rest.\n"
    head = text[: ISSUE_LIMIT - len(note)]
    cut = max(head.rfind("\n## "), head.rfind("\n### "))
    return (head[:cut] if cut > 0 else head) + note


def render(folder: Path) -> list[str]:
    """Write reports, issue.md and the plots of the bundle in `folder`; returns the notes."""
    data, source = rebuild(folder)
    notes = []
    if source != "events.jsonl":
        notes.append(f"There is no usable journal; this was rebuilt from {source}")
    late = "The plots were not drawn: there was no time left"
    write_atomic(folder / "report.md", render_text(data, folder, Shape(), extra=[*notes, late]))
    write_atomic(folder / "report.html", render_page(data, folder, extra=[*notes, late]))
    write_atomic(folder / "issue.md", issue_text(data, folder, notes))
    drawn: list[tuple[str, str]] = []
    try:
        from scripts.oneshot import plots

        drawn = plots.draw(data, folder)
    except ImportError as error:
        notes.append(f"The plots were not drawn: {error}")
    except Exception as error:  # a plot is an illustration: the report stands without it
        notes.append(f"The plots were not drawn: {type(error).__name__}: {error}")
    text = render_text(data, folder, Shape(), plots=drawn, extra=notes)
    write_atomic(folder / "report.md", text)
    write_atomic(folder / "report.html", render_page(data, folder, plots=drawn, extra=notes))
    bundles.renew_sums(folder, [*sections.MADE_HERE, *(path for _, path in drawn)])
    return notes


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="oneshot render", description=__doc__.split("\n")[0])
    p.add_argument("bundle", type=Path, help="the folder of a run")
    args = p.parse_args(argv)
    if not args.bundle.is_dir():
        print(f"bundle must be the folder of a run, got {args.bundle}", file=sys.stderr)
        return 2
    try:
        notes = render(args.bundle)
    except BundleError as error:
        print(error, file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"the report needs jinja2: {error}", file=sys.stderr)
        return 1
    for note in notes:
        print(note, file=sys.stderr)
    for name in ("report.md", "report.html"):
        print(args.bundle / name)
    return 0
