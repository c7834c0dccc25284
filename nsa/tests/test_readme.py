"""Do README.md and docs/ say the truth: do examples run, do flags, paths and options exist?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nsa.dispatch import LADDER, REASONS, Branch
from nsa.flags import flag_fields, variables
from scripts.aot import ARCHS
from scripts.oneshot.__main__ import main
from scripts.oneshot.record import judge
from scripts.oneshot.run.arguments import parser
from scripts.oneshot.run.stages import PROFILES, plan

ROOT = Path(__file__).resolve().parents[2]
PARTS = [ROOT / "README.md", *(ROOT / "docs" / f"{x}.md" for x in ("report", "library", "flags"))]
REPORT = PARTS[1].read_text(encoding="utf-8")
README = "\n".join(part.read_text(encoding="utf-8") for part in PARTS)
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
assert len(EXAMPLES) == README.count("```python") == 10


def table(first_column: str) -> list[list[str]]:
    """The cells of the table whose header starts with `first_column`, without header and rule."""
    found = re.search(rf"^\| {re.escape(first_column)} \|.*\n\|.*\n((?:\|.*\n)+)", README, re.M)
    return [[x.strip() for x in line.strip("|").split("|")] for line in found[1].splitlines()]


@pytest.mark.parametrize("code", EXAMPLES, ids=range(1, len(EXAMPLES) + 1))
def test_example_runs(code):
    if "transformers" in code:
        pytest.importorskip("transformers", reason="transformers is not installed")
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_flag_table_is_the_metadata():
    for (names, default, meaning), f in zip(table("flag"), flag_fields(), strict=True):
        assert re.findall(r"`(\w+)`", names) == list(variables(f))
        assert f.metadata["parse"](default) == f.default, names
        assert meaning == f.metadata["doc"], names


def test_exit_codes_are_the_runners():
    codes = {int(word) for row in table("code") for word in re.findall(r"\d+", row[0])}
    named = {v for name, v in vars(judge).items() if name.startswith("EXIT_") and type(v) is int}
    assert codes == named | set(judge.EXIT_BY_SIGNAL.values())


def test_make_variables_and_options_exist():
    makefile = (ROOT / "Makefile").read_text()
    options = {o for action in parser()._actions for o in action.option_strings}
    rows = table("`make gpu-report`")
    for variable, option, _ in rows:
        name = variable.strip("`").split("=")[0]
        assert f"$({name})" in makefile, variable
        assert option == "first argument" or option.strip("`") in options, option
    declared = re.findall(r"^([A-Z]+) \?=", makefile, re.M)
    declared += re.findall(r"command line,\$\(origin (\w+)\)", makefile)
    assert sorted(declared) == sorted(row[0].strip("`").split("=")[0] for row in rows)
    named = re.findall(r"`(--[a-z-]+)", REPORT.split("## In CI")[0])
    assert set(named) <= options
    profiles = re.findall(r"`(\w+)`", next(r for r in rows if "PROFILE" in r[0])[2])
    told = re.search(r"PROFILE=([\w|]+) ", makefile)[1].split("|")
    assert set(profiles) == set(PROFILES) == set(told)


def test_paths_exist_and_stages_are_planned():
    known = {stage.id: stage for stage in plan("full")}
    rows = table("family")
    for row in rows:
        for cell in row[1:5]:
            paths = re.findall(r"`([^`]+)`", cell)
            assert paths and all((ROOT / path).exists() for path in paths), cell
        stages = re.findall(r"`(\w+)`", row[5])
        assert stages and set(stages) <= set(known), stages
        run = {a for name in stages for a in known[name].argv if a.endswith(".py")}
        listed = re.findall(r"`(nsa/tests/[^`]+)`", row[3])
        on_gpu = {path for path in listed if "mark.core" in (ROOT / path).read_text()}
        on_gpu |= {path for path in listed if path.endswith("_gpu.py")}
        assert on_gpu <= run and run & set(listed), (row[0], on_gpu - run)
    kernels = {path.split("/")[2] for r in rows for path in re.findall(r"`(nsa/[^`]+)`", r[1])}
    packages = {p.parent.name for p in (ROOT / "nsa" / "kernels").glob("*/__init__.py")}
    assert packages <= kernels


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_paths_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https://)([^)]+)\)", text):
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        assert page.is_file(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(page), f"{path.name} links to {target}"
    for name in re.findall(r"(?:nsa|bench|scripts|configs|examples)/[\w/-]+\.(?:py|sh|yaml)", text):
        assert (ROOT / name).is_file(), name


def test_design_names_the_ladders_and_reasons():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    part = text.split("## Which route runs")[1].split("## Kernels")[0]
    reasons = part.split("(`dispatch.REASONS`)")[1].split(". ")[0]
    assert set(re.findall(r"`(\w+)`", reasons)) == set(REASONS)
    rows = dict(SELECTED="selected", COMPRESSED="compressed, sliding",
                SLIDING="compressed, sliding", BLOCKS="choice of blocks")  # fmt: skip
    for name, row in rows.items():
        branch = Branch[name]
        assert f"| {row} | {', '.join(r.value for r in LADDER[branch])} |" in part


def test_verbs_answer_help(capsys):
    verbs = set(re.findall(r"python -m scripts\.oneshot (\w+)", README))
    assert verbs >= {"doctor", "run", "compare", "verify", "render"}
    for verb in sorted(verbs):
        with pytest.raises(SystemExit, match="0"):
            main([verb, "--help"])
        assert capsys.readouterr().out.startswith("usage"), verb


def test_architectures_are_the_compiled_ones():
    words = README.split("ahead of time for SM ")[1].split(" and checks")[0]
    assert [int(n.replace(".", "")) for n in re.findall(r"\d+\.\d", words)] == sorted(ARCHS)
