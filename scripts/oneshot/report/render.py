"""The `render` verb: report.md, report.html and issue.md of a run, rebuilt from its journal.

bundle.json is left alone. The plots come last, so that a render that is cut short has its report.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.oneshot.record import bundle as bundles
from scripts.oneshot.record.journal import write_atomic
from scripts.oneshot.record.markdown import cell
from scripts.oneshot.record.outputs import WITH_SCRIPT, repro_script
from scripts.oneshot.record.reading import BundleError, held_to_rules, read_text, rebuild
from scripts.oneshot.report import about, first, sections
from scripts.oneshot.report.blocks import Shape, View
from scripts.oneshot.report.evidence import noise_floor

TEMPLATES = Path(__file__).resolve().parents[3] / "templates"
ISSUE_AIM = 12_000  # about two screens, the rest folded
ISSUE_LIMIT = 60_000  # GitHub refuses 65,536 and more

# What an issue tries, one after the other, until it is short enough.
LADDER = (
    Shape(issue=True),
    Shape(issue=True, log_lines=5, rows=40, text=200),
    Shape(issue=True, log_lines=0, rows=12, text=120),
)


def _machine(data: Mapping[str, Any]) -> str:
    """A small JSON object for programs that read a pasted issue, safe in an HTML comment."""
    verdict, python = data["verdict"], data["env"].get("python", {})
    small = {
        "schema": data["schema"], "run_id": data["run_id"], "profile": data["profile"],
        "scope": data["scope"], "commit": data["git"].get("commit"),
        "dirty": data["git"].get("dirty"), "gpu": data["device"].get("name"),
        "sm": data["device"].get("sm"), "driver": data["device"].get("driver"),
        "torch": python.get("torch"), "triton": python.get("triton"),
        "sel_triton_min_L": (data["recommend"] or {}).get("sel_triton_min_L"),
        "noise_floor": noise_floor(data["health"]),
        **{k: v for k, v in verdict.items() if k != "one_line"},
        "stages": {s["id"]: s["status"] for s in data["stages"]},
    }  # fmt: skip
    text = json.dumps(small, separators=(",", ":"), default=str)
    for character in "<>@#`":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.replace("--", "-\\u002d")


Plots = Sequence[tuple[str, str]]
Words = Sequence[str]


def document(
    data: Mapping[str, Any], folder: Path, shape: Shape, plots: Plots = (), extra: Words = ()
) -> dict[str, Any]:
    """Everything the templates show, already safe as Markdown."""
    rows, extra, verdict = {}, list(extra), data["verdict"]
    for kind, key in (("test", "tests"), ("parity", "parity"), ("bench", "bench")):
        rows[kind], broken = held_to_rules(data[key], kind)
        if broken:
            extra.append(f"{broken} {kind} rows are broken and left out")
    view = View(data, rows, noise_floor(data["health"]), folder, shape, plots, extra)
    return {
        "cpu": data["scope"] == "cpu", "status": verdict["status"],
        "one_line": cell(verdict["one_line"], 1000), "answers": first.answers(view),
        "remarks": first.remark_blocks(view), "sections": sections.sections(view),
        "last": about.last_words(view), "machine": _machine(data),
    }  # fmt: skip


@functools.cache
def _template(name: str, escape: bool) -> Any:
    import jinja2

    how = dict.fromkeys(("trim_blocks", "lstrip_blocks", "keep_trailing_newline"), True)
    loader, strict = jinja2.FileSystemLoader(TEMPLATES), jinja2.StrictUndefined
    environment = jinja2.Environment(loader=loader, undefined=strict, autoescape=escape, **how)
    if escape:
        from scripts.oneshot.report import page

        environment.filters.update(page.FILTERS)
    return environment.get_template(name)


def render_text(*args: Any, **kwargs: Any) -> str:
    """The report as Markdown; arguments as for `document`."""
    text = _template("report.md.j2", escape=False).render(document(*args, **kwargs))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def render_page(data: Mapping[str, Any], folder: Path, plots: Plots = (), extra: Words = ()) -> str:
    """The same report as one HTML page that needs no other file and no network."""
    from markupsafe import Markup

    drawings = {}
    for number, (_, path) in enumerate(plots):
        # Our own drawing (plots.py), whose texts are escaped, without what stands before <svg>; its
        # names are its own on a page with several.
        _, tag, rest = (read_text(folder, path) or "").partition("<svg")
        drawings[path] = Markup(re.sub(r'( id="|href="#|url\(#)', rf"\g<1>p{number}-", tag + rest))
    shown = document(data, folder, Shape(), plots=plots, extra=extra)
    name = str(data["git"].get("short") or "report")
    title = f"{name} on a CPU" if data["scope"] == "cpu" else name
    return _template("report.html.j2", escape=True).render(shown, drawings=drawings, title=title)


def issue_text(data: Mapping[str, Any], folder: Path, extra: Sequence[str] = ()) -> str:
    """The report as an issue: its first screen, and the rest folded.

    A run without failures aims at ISSUE_AIM bytes; no issue has over ISSUE_LIMIT characters.
    Verdict, the five answers and the first failures stay.
    """
    aim = ISSUE_AIM if data["verdict"]["status"] in ("PASS", "INCOMPLETE") else ISSUE_LIMIT
    for shape in LADDER:
        text = render_text(data, folder, shape, extra=extra)
        if len(text.encode()) <= aim:
            return text
    if len(text) <= ISSUE_LIMIT:
        return text
    # Cut between two sections: a fence or a table that is open would take what follows along.
    note = "\n\nCut here, because an issue may not be longer; report.md has the rest.\n"
    head = text[: ISSUE_LIMIT - len(note)]
    cut = max(head.rfind("\n## "), head.rfind("\n### "))
    return (head[:cut] if cut > 0 else head) + note


def _missing_scripts(data: dict[str, Any], folder: Path) -> list[str]:
    """Write the repro scripts of stages that the runner did not outlive; their names."""
    made = []
    for stage in data["stages"]:
        name = f"repro/{stage['id']}.sh"
        known = stage["argv"] and re.fullmatch(r"\w+", stage["id"])  # a journal may be anyone's
        if stage["status"] in WITH_SCRIPT and known and not (folder / name).exists():
            tests = [row for row in data["tests"] if row["stage"] == stage["id"]]
            (folder / "repro").mkdir(exist_ok=True)
            write_atomic(folder / name, repro_script(stage, tests, data["env"]))
            made.append(name)
    return made


def render(folder: Path) -> list[str]:
    """Write reports, issue.md and the plots of the bundle in `folder`; returns the notes."""
    data, source = rebuild(folder)
    notes = []
    if source != "events.jsonl":
        notes.append(f"There is no usable journal; this was rebuilt from {source}")
    late = "The plots were not drawn: there was no time left"
    scripts = _missing_scripts(data, folder)  # first, since the report lists all files
    write_atomic(folder / "report.md", render_text(data, folder, Shape(), extra=[*notes, late]))
    write_atomic(folder / "report.html", render_page(data, folder, extra=[*notes, late]))
    write_atomic(folder / "issue.md", issue_text(data, folder, notes))
    drawn: list[tuple[str, str]] = []
    try:
        from scripts.oneshot.report import plots

        drawn = plots.draw(data, folder)
    except ImportError as error:
        notes.append(f"The plots were not drawn: {error}")
    except Exception as error:  # a plot is an illustration: the report stands without it
        notes.append(f"The plots were not drawn: {type(error).__name__}: {error}")
    text = render_text(data, folder, Shape(), plots=drawn, extra=notes)
    write_atomic(folder / "report.md", text)
    write_atomic(folder / "report.html", render_page(data, folder, plots=drawn, extra=notes))
    bundles.renew_sums(folder, [*about.MADE_HERE, *scripts, *(path for _, path in drawn)])
    return notes


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="oneshot render", description=(__doc__ or "").split("\n")[0])
    p.add_argument("bundle", type=Path, help="the folder of a run")
    args = p.parse_args(argv)
    try:
        if not args.bundle.is_dir():
            raise BundleError(f"bundle must be the folder of a run, got {args.bundle}")
        notes = render(args.bundle)
    except BundleError as error:
        print(error, file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"the report needs jinja2: {error}", file=sys.stderr)
        return 1
    for note in notes:
        print(note, file=sys.stderr)
    print(args.bundle / "report.md", args.bundle / "report.html", sep="\n")
    return 0
