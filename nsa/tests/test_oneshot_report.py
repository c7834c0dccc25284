"""The report: what it says for known runs, that numbers need proof, that no log can break it, and
that report.html has its words, nothing from elsewhere, and no text of a log as markup. Its first
screen: five questions, and nothing in an answer that was not proven.

NSA_UPDATE_GOLDENS=1 rewrites nsa/tests/goldens from what is rendered now; read the diff then.
"""

from __future__ import annotations

import csv
import html.parser
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="the report needs jinja2")

from bench import recorded
from nsa.tests.oneshot_samples import (
    SAMPLES,
    bench_row,
    edit,
    parity_row,
    real_rows,
    sending,
    test_row,
    write_sample,
)
from scripts.oneshot.record import markdown, outputs
from scripts.oneshot.record.reading import held_to_rules, rebuild
from scripts.oneshot.report import committed, evidence, failures, first, page, thresholds
from scripts.oneshot.report import render as report
from scripts.oneshot.report.blocks import Bars, Shape, View
from scripts.oneshot.run import stages

GOLDENS = Path(__file__).parent / "goldens"


def rendered(folder):
    return report.render_text(rebuild(folder)[0], folder, Shape())


def with_events(folder, name, change):
    """The sample `name` with its list of journal events changed by `change(events)`."""
    write_sample(folder, name)
    return edit(folder, change)


def with_rows(folder, rows, stage="sel_bench"):
    """The sample all_pass where `stage` sent `rows` instead of its own."""
    return with_events(folder, "all_pass", sending(stage, rows, alone=True))


@pytest.fixture
def sample(tmp_path):
    write_sample(tmp_path, "all_pass")
    return tmp_path


@pytest.fixture
def committed_rows(tmp_path, monkeypatch):
    """A folder of results in place of bench/results, and what writes a CSV into it."""
    monkeypatch.setattr(recorded, "RESULTS", tmp_path / "results")

    def write(day, name, *rows):
        path = tmp_path / "results" / day / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(k for r in rows for k in r)))
            writer.writeheader()
            writer.writerows(rows)

    return write


SIZES = dict(HQ=64, G=4, D=128, Dv=128, l=32, d=16, l_sel=64, n_sel=16, w=512, dtype="bf16")
PROVEN = dict(SIZES, B=1, device="NVIDIA H200", status="VALID", parity="PASS", direction="fwd")


@pytest.mark.parametrize("name", SAMPLES)
def test_the_report_of_a_known_run_is_the_one_kept_and_its_page_says_the_same(
    name, tmp_path, committed_rows
):
    row = dict(PROVEN, op="full", S=8192, ms=1.6, commit="aaaaaaa")
    committed_rows("2026-11-20", "prefill-aaaaaaa.csv", row)
    write_sample(tmp_path, name)
    data, words = rebuild(tmp_path)[0], rendered(tmp_path)
    text = words if name == "gpu_fail" else report.issue_text(data, tmp_path)
    golden = GOLDENS / f"{name}.md"
    if os.environ.get("NSA_UPDATE_GOLDENS"):
        GOLDENS.mkdir(exist_ok=True)
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")
    html = report.render_page(data, tmp_path)
    assert name != "cpu" or "<title>PASS - 8ac3f21 on a CPU</title>" in html
    seen = inert(html)
    rows = [" ".join(" | ".join(row).split()) for row in seen.rows]
    for line in re.findall(r"^\| ([^|\s].*) \|$", words, re.M):
        values = [Page(str(page.inline(v))).text for v in re.split(r" (?<!\\)\| ", line)]
        if "▇" in line:  # bars, which are no table in HTML
            assert all(v.strip(" ▇") in seen.text for v in values), line
        else:
            assert " ".join(" | ".join(values).split()) in rows, line
    assert data["verdict"]["one_line"] in seen.text


def test_render_goes_by_the_journal_and_without_one_by_bundle_json(tmp_path, capsys, monkeypatch):
    """Which it leaves alone; the report says which served."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # plots have tests of their own
    write_sample(tmp_path, "gpu_fail")
    path, text = tmp_path / "bundle.json", lambda name: (tmp_path / name).read_text()
    data = json.loads(path.read_text())
    data["verdict"]["one_line"] = "PASS - everything"
    path.write_text(before := json.dumps(data))
    assert report.main([str(tmp_path)]) == 0
    assert text("report.md").startswith("**FAIL - 9/10 tests") and path.read_text() == before
    assert len(text("issue.md")) <= report.ISSUE_LIMIT and "report.md" in capsys.readouterr().out
    (tmp_path / "events.jsonl").unlink()
    assert report.main([str(tmp_path)]) == 0 and text("report.md").startswith("**PASS - everything")
    assert "rebuilt from bundle.json" in text("report.md")
    path.unlink()
    assert report.main([str(tmp_path)]) == report.main([str(tmp_path / "absent")]) == 2
    assert "no bundle.json" in capsys.readouterr().err


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["INVALID", "SKIPPED", "FAILED"])
def test_a_row_without_proof_shows_its_reason_and_no_number(status, tmp_path):
    row = bench_row("sel/odd", 7654.321, 3.219, status=status, why=["out of luck"], L=64,
                    bench="decode", S=64, ms_total=7654.321, wall_us=98765.4, 
                    gbs=4321.5)  # fmt: skip
    text = rendered(with_rows(tmp_path, [row]))
    assert re.search(rf"^\| `sel/odd` \| {status} \|[ |]* out of luck \|$", text, re.M)
    assert not re.search(r"7654|7\.654|3\.21|98765|98\.77|4321", text)


def test_a_parity_row_on_the_wrong_path_shows_no_errors(tmp_path):
    row = parity_row("sel/wrongpath", path_taken="sdpa", mae=1.2345e-5, max_abs=2.3456e-4,
                     fallback_reason="dtype")  # fmt: skip
    text = rendered(with_rows(tmp_path, [row], stage="triton_fwd"))
    assert "1.234e-05" not in text and "0.0002346" not in text
    assert "| `sel/wrongpath` | INVALID | `triton` → `sdpa` (dtype) |" in text


@pytest.mark.parametrize("speedup, ci, shown", [
    *((speedup, ci, "no difference measurable") for speedup, ci in (
        (1.011, [1.005, 1.017]), (0.99, [0.985, 0.995]),  # inside the floor of 1.2 %
        (1.05, [0.98, 1.12]),  # the interval holds 1
    )),
    (1.05, None, "no difference measurable: no interval"),
    (1.05, [1.03, 1.07], "1.05x [1.03, 1.07]"), (0.8, [0.79, 0.81], "0.80x [0.79, 0.81]"),
])  # fmt: skip
def test_a_speedup_inside_the_noise_is_no_speedup(speedup, ci, shown, tmp_path):
    row = bench_row("sel/x", 50.0, speedup, speedup_ci95=ci)
    line = next(s for s in rendered(with_rows(tmp_path, [row])).splitlines() if "`sel/x`" in s)
    assert line.split(" | ")[4] == shown


def test_a_wall_time_is_no_more_precise_than_it_is():
    shown = {0.04: "0.0x", 0.51: "0.5x", 0.8: "0.8x", 1.16: "1.2x", 3.77: "3.8x"}
    shown |= dict.fromkeys((0.904, 1.0, 1.099), "the same")
    assert {r: evidence.rough_ratio(r).removeprefix("about ") for r in shown} == shown
    assert evidence.rough_us(92.97) == "about 93 us" and evidence.rough_us(1234.5) == "about 1.2 ms"


def test_the_ceiling_says_where_it_is_from(tmp_path):
    health = {"kind": "health", "status": "OK", "copy_gbs": 4000.0}
    for rows, words in (([health], "as measured under Box health."),
                        ([], "by the card's nominal numbers")):  # fmt: skip
        folder = with_rows(tmp_path / words[:2], rows, stage="health")
        assert f"compute, {words}" in rendered(folder)
    assert evidence.ceiling_words("cpu", None) == "which nobody knows of a CPU here"


def proposed(rows, **recommend):
    known = {"sel_triton_min_L": 64, "confidence": "as measured", "min_speedup": 1.2}
    data = {"scope": "gpu", "recommend": {**known, **recommend}, "stages": []}
    return thresholds.recommendation(data, rows), thresholds.fa2_lengths(data, rows)


def sel_row(L, speedup, **changes):
    wall = dict(mode="route", wall_speedup_ci95=[9.0, 9.9])
    return bench_row(f"sel/L={L}/{speedup}", 50.0, speedup, L=L, **{**wall, **changes})


DRIFTS, SKIPPED = dict(status="UNSTABLE", why=["drift"]), dict(status="SKIPPED", why=["no memory"])


@pytest.mark.parametrize(("cells", "holds"), [
    ([(1.3, {}), (1.4, {})], True), ([(1.21, {})], False),  # its lower bound is 1.19
    *(([(1.3, {}), cell], holds) for holds, *cell in (
        (False, 2.4, DRIFTS), (True, 2.5, DRIFTS),  # whose lower bound must be 2.4
        (False, 3.0, dict(wall_speedup_ci95=[1.1, 1.3])),  # the host is slower
        (False, 3.0, SKIPPED), (False, 3.0, dict(speedup_ci95=None)),
        (True, 0.5, dict(mode="decode")),  # other modes decide nothing
    )),
    ([(0.5, dict(mode="dense"))], None),
])  # fmt: skip
def test_a_length_holds_only_with_every_cell_and_both_its_lower_bounds(cells, holds):
    """At the proposed length itself too, and a longer one that holds makes up for nothing."""
    rows = [sel_row(64, speedup, **changes) for speedup, changes in cells]
    found, _ = proposed([*rows, sel_row(128, 1.5)])
    by_length = {e["L"]: e["holds"] for e in found["evidence"]}
    assert by_length == ({128: True} if holds is None else {64: holds, 128: True})
    assert ("not every cell of L = 64 has lower" in found["doubt"]) == (holds is False)
    shown = next((e for e in found["evidence"] if e["L"] == 64), None)
    assert shown is None or shown["low"] == f"{0.98 * cells[0][0]:.2f}x"  # never of a doubtful one


def test_the_walls_beside_fa2_lengths_are_of_their_own_cells_and_the_least():
    rows = [bench_row(f"fa2/{name}/{keys}", 10.0, 1.5, bench="fa2", branch="win", baseline=name,
                      key_len=keys, launch_bound=True, wall_us=60.0, base_wall_us=60.0 * ratio,
                      wall_speedup=ratio)
            for name, keys, ratio in (("sdpa", 64, 0.2), ("sdpa", 256, 0.5), ("triton", 256, 0.3),
                                      ("triton", 512, 3.0))]  # fmt: skip
    lengths = dict(fa2_min_len_win=256, fa2_win_why="a")
    lengths |= dict(fa2_min_len_win_triton=512, fa2_win_triton_why="b")
    settings = proposed(rows, **lengths)[1]["settings"]
    for setting, least in zip(settings, ("0.5x", "3.0x"), strict=True):
        (text,) = setting["lengths"]
        assert "; 1 of its 1 cells are launch bound" in text and f"about {least} at the" in text


def test_the_worst_parity_case_of_an_operator_is_the_one_nearest_to_its_limit():
    margins = {"p/a": 0.1, "p/b": 0.9, "p/c": None}
    rows = [{**parity_row(name, margin=margin), "why": []} for name, margin in margins.items()]
    (op,) = evidence.parity_ops(rows, Shape())
    assert op[1:3] == ["3/3", "`p/b`"]


# ---- hostile text --------------------------------------------------------------------------------

ATTACKS = (
    "</pre></code></td></table></style></svg><script>alert(1)</script>\"'><img src=x onerror=a()>",
    "javascript:alert(1) <a href=//evil.example/x onclick=a()> <iframe src=https://evil.example>",
    "`</code><script>` ``<b>`` \\`<i> **<u>** &lt;script&gt; &#60;b&#62; <!-- --> ]]> {{ 7*7 }}",
    "<svg><use href=http://evil.example/#a /></svg> <style>@import url(//evil.example)</style>",
)
VOID = {"meta", "link", "br", "hr", "img", "input"}
OURS = set(
    "html head meta title style body p strong header h1 h2 h3 nav a div section table thead"
    " tbody tr th td b code pre ul li details summary figure figcaption span i svg g defs clippath"
    " path rect use text tspan".split()
)
LOADING = {"src", "srcset", "action", "formaction", "data", "poster", "background", "ping"}


class Page(html.parser.HTMLParser):
    """What a browser would act on: tags, attributes, the text around them."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.open, self.rows = set(), [], [], []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, k, v or "") for k, v in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            assert "url(" not in data and "@import" not in data
            return
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def inert(text):
    """Parse `text` and see that it runs nothing and asks nobody for anything."""
    seen = Page(text)
    assert not seen.open, "an element is never closed"
    assert seen.tags <= OURS, seen.tags - OURS
    for tag, name, value in seen.attributes:
        assert not name.startswith("on") and name not in LOADING, (tag, name)
        if name in ("href", "xlink:href"):
            assert value.startswith("#"), (tag, value)
        if name in ("style", "clip-path"):
            assert "url(" not in re.sub(r"url\(#[\w.-]+\)", "", value), value
    return seen


EVIL = (
    "``` ````` </details> <script>alert(1)</script> | a | b |\n# heading\n@everyone #123 GH-7 "
    "\x1b[31mred\x1b[0m \x00 <!-- --> <img src=x> [x](http://evil.example) ![i](y) $x$ --> \r\n"
    "| - | - |\n</summary>\n~~~\n<details>\n"
)


def hostile_events(events):
    start = events[0]
    start["profile"] = start["run_id"] = EVIL
    start["git"].update(branch=EVIL, diffstat=EVIL, dirty=True)
    start["device"].update(name=EVIL, pcie=EVIL)
    start["env"]["system"] = {EVIL: EVIL, "os": EVIL}
    start["env"]["nvidia_smi"] = {"text": EVIL * 50}
    start["env"]["variables"] = {"NSA_EVIL": EVIL}
    start["doctor"] = [{"name": EVIL, "level": "WARN", "text": EVIL, "fix": EVIL}]
    for result in (event["result"] for event in events if event["ev"] == "stage_end"):
        result.update(title=EVIL, env={"NSA_X": EVIL})
        if result["status"] != "PASS":
            result.update(reason=EVIL, argv=["{python}", EVIL])
    path = dict(path_requested=EVIL, path_taken=EVIL)
    rows = [
        parity_row(EVIL, op=EVIL, status="FAIL", why=[EVIL], path_taken=EVIL, dtype=EVIL),
        parity_row("fine" + EVIL, op="x|y", launches={}, **path),
        bench_row(EVIL, 5.0, 1.5, bench=EVIL, baseline=EVIL, why=[EVIL], reasons=[EVIL],
                  L=64, **path),
        bench_row("f" + EVIL, 5.0, 1.5, status="FAILED", why=[EVIL]),
        *(bench_row(f"odd/{b}", 9.0, None, bench=b, branch=[2], S=64, heads=[1, {}],
                    dtype={"a": "|"}, B=[EVIL]) for b in ("decode", "decode_branch")),
        test_row(EVIL, "failed", EVIL), test_row(EVIL, "skipped", EVIL),
        {"kind": "note", "level": "warn", "text": EVIL},
        {"kind": "metric", "name": EVIL, "value": 1.0, "unit": EVIL},
        {"kind": "health", EVIL: EVIL, "status": EVIL, "why": [EVIL], "copy_gbs": EVIL},
    ]  # fmt: skip
    events[-1:-1] = [{"ev": "row", "stage": "triton_bwd", "row": r, "m": 1.0} for r in rows]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The folder of a run whose records, logs and tables are nothing but EVIL, with its reports."""
    folder = with_events(tmp_path_factory.mktemp("hostile"), "gpu_fail", hostile_events)
    log = EVIL.encode() * 20 + b"x" * 2**20 + b"\xff\xfe\x00\xc3(\n" + b"Error: " + EVIL.encode()
    log += "\n".join(ATTACKS).encode() + b"\nError: </pre>\n"
    for name in ("triton_bwd", "sel_bench", "decode_bench"):
        (folder / "logs" / f"{name}.log").write_bytes(log)
    (folder / "train.jsonl").write_bytes(b'{"step": 1, "loss": NaN}\n[]\nnull\n\xff\n')
    calls = [{"call": EVIL, "kernels": [EVIL] * 99, "passed_over": {EVIL: EVIL}}]
    (folder / "routing.json").write_text(json.dumps({"flags": [{"name": EVIL}], "calls": calls}))
    assert report.main([str(folder)]) == 0
    return folder


def test_the_page_of_hostile_records_runs_nothing(hostile):
    seen = inert((hostile / "report.html").read_text(encoding="utf-8"))
    assert "<script>alert(1)</script>" in seen.text  # shown, not run
    assert "</pre></code></td>" in seen.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", seen.text)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("form", [markdown.cell, markdown.code, markdown.fence, str])
def test_every_form_of_text_is_inert_and_complete(form, attack):
    show = page.block if form is markdown.fence else page.inline
    seen = inert(f"<p>{show(form(attack))}</p>")
    assert seen.tags <= {"p", "code", "pre", "strong"}
    if form is not str:
        assert seen.text.strip("\n").replace("\u200b", "") == attack


def test_template_names_no_other_place():
    text = (Path(report.TEMPLATES) / "report.html.j2").read_text()
    assert not re.search(r"https?:|//\w|<script|<link|<img|\bon\w+=|\| *safe", text)
    assert not Shape().issue  # the page shows the report at its full size


def outside_fences(text):
    """Lines that are not inside a code block."""
    out, fence = [], None
    for line in text.split("\n"):
        ticks = re.match(r"`{3,}", line)
        if fence:
            if re.fullmatch(rf"`{{{len(fence)},}}", line):
                fence = None
        elif ticks:
            fence = ticks[0]
        else:
            out.append(line)
    assert fence is None, "a code block is never closed"
    return out


def cells(line):
    return len(re.findall(r"(?<!\\)\|", line))


@pytest.mark.parametrize("file", ["report.md", "issue.md"])
def test_hostile_text_cannot_break_the_page(file, hostile):
    text = (hostile / file).read_text(encoding="utf-8")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
    assert max(map(len, text.split("\n"))) < 12_000
    lines = outside_fences(text)
    shown = "\n".join(lines)
    assert shown.count("<details>") == shown.count("</details>")
    headings = [s for s in lines if re.match("##? ", s)]
    questions = ("this box good", "the kernels right", "fast are they", "should be set", "failed")
    for heading, question in zip(headings, [*questions, "Failures"], strict=False):
        assert heading.startswith("## ") and question in heading
    assert len(headings) >= 6 and (file == "report.md") == ("## Parity" in headings)
    shown = shown[: shown.index("<!-- nsa-report")]  # a comment is not rendered; see below
    spans = re.sub(r"(?<![\\`])(`+)(?!`).*?(?<!`)\1(?!`)", "", shown)
    assert not re.search("@everyone|#123|GH-7|<script|<img|http://evil", spans)
    for line, following in itertools.pairwise(lines):
        if line.startswith("|") and following.startswith("|"):
            assert cells(line) == cells(following), following
    machine = re.search(r"<!-- nsa-report (.*) -->\n", text)
    assert json.loads(machine[1])["status"] == "FAIL" and "--" not in machine[1]


def test_a_markdown_parser_sees_only_our_own_html_and_headings(hostile):
    parser = pytest.importorskip("markdown_it", reason="markdown-it-py is not installed")
    parse = parser.MarkdownIt("commonmark").enable("table").parse
    tokens = parse((hostile / "report.md").read_text(encoding="utf-8"))
    html = [t.content for t in tokens if t.type == "html_block"]
    html += [c.content for t in tokens for c in t.children or () if c.type == "html_inline"]
    for block in html:
        assert re.fullmatch(
            r"</?details>(<summary>[\w ,-]+</summary>)?\n*|<!-- nsa-report [^<>]* -->\n*", block
        ), block
    assert "link_open" not in {c.type for t in tokens for c in t.children or ()}
    images = [c.attrs["src"] for t in tokens for c in t.children or () if c.type == "image"]
    assert all(re.fullmatch(r"plots/\w+\.svg", src) for src in images)
    assert {t.tag for t in tokens if t.type == "heading_open"} == {"h2", "h3"}


def test_what_filters_make_of_odd_values():
    """Ordinary ones are in the reports that are kept."""
    assert markdown.fence("a ``` b").startswith("````text\n")
    assert markdown.code("a`b|c") == "`` a`b\\|c ``"
    assert markdown.us(None) == markdown.us(float("nan")) == markdown.us("7") == "-"
    assert markdown.pct(True) == "-" and markdown.sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    clipped = markdown.clip_mid("\n".join(map(str, range(100))), 15, "logs/x.log")
    assert clipped.count("\n") == 14 and "[... 86 lines left out, logs/x.log]" in clipped
    assert clipped.startswith("0\n") and clipped.endswith("\n99")


@pytest.mark.parametrize("html, key", [(False, "answers"), (True, "sections")])
def test_an_undefined_value_in_a_template_is_an_error(html, key, sample, monkeypatch):
    import jinja2

    whole = report.document
    cut = lambda *a, **k: {n: v for n, v in whole(*a, **k).items() if n != key}
    monkeypatch.setattr(report, "document", cut)
    with pytest.raises(jinja2.UndefinedError, match=key):
        report.render_page(rebuild(sample)[0], sample) if html else rendered(sample)


def test_the_right_part_of_a_log_is_shown():
    trace = "Traceback (most recent call last):\n  File 'a'\nValueError: the cause\n"
    shown = failures.excerpt("x\n" * 500 + trace + "y\n" * 500, 15, "logs/a")
    assert shown.splitlines()[-1] == "ValueError: the cause" and len(shown.splitlines()) == 3
    failed = "ok\n" * 300 + "E  assert 1 == 2\n" + "tail\n" * 100
    assert "E  assert 1 == 2" in failures.excerpt(failed, 15, "logs/a")
    assert len(failures.excerpt(failed, 15, "logs/a").splitlines()) == 15


# ---- the issue -----------------------------------------------------------------------------------


def test_an_issue_of_a_passing_run_gives_up_rows_for_its_aim(tmp_path):
    like = dict(bench="decode", dim=2560, status="UNSTABLE", why=["drift " * 20])
    rows = [bench_row(f"decode/S={i}", 50.0, 1.5, S=i, **like) for i in range(200)]
    folder = with_rows(tmp_path, rows, stage="decode_bench")
    data = rebuild(folder)[0]
    assert len(report.render_text(data, folder, report.LADDER[0])) > 2 * report.ISSUE_AIM
    text = report.issue_text(data, folder)
    assert text.startswith("**PASS") and len(text.encode()) < report.ISSUE_AIM


def test_a_command_takes_its_inputs_from_the_bundle(tmp_path):
    """And writes elsewhere: what is in the bundle stands under its check sums."""
    planned = {s.id: s for s in stages.plan("standard")}
    argv = (*planned["threshold"].argv, *planned["threshold"].also["fa2_bench"])
    done = {"id": "threshold", "status": "FAIL", "reason": "wrong", "argv": argv}
    script = outputs.repro_script(done, [], {})
    want = 'python bench/threshold_optimizer.py "$BUNDLE"/sel_route.csv --fa2 "$BUNDLE"/fa2.csv'
    assert script.endswith(f'/.." && pwd)}}"\n{want}\n')
    (shown,) = failures.command_block(View({"env": {}}, {"test": []}, None, tmp_path), done)
    assert shown.text.splitlines()[2] == want
    assert shown.text.startswith(f"```bash\nBUNDLE=artifacts/runner/{tmp_path.name}  # ")
    (tmp_path / "sel.csv").write_text("L\n")
    (tmp_path / "repro").mkdir()
    script = tmp_path / "repro" / "x.sh"
    script.write_text(outputs.repro_script({**done, "argv": ("cat", "{out}/sel.csv")}, [], {}))
    ran = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert ran.stdout == "L\n", ran.stderr
    assert outputs.typed(planned["sel_route"].argv).endswith("--csv /tmp/sel_route.csv")
    tests = {**done, "argv": ("{python}", "-m", "pytest", "x.py"), "env": {"A": "b c"}}
    shell = {"variables": {"NSA_USE_GLUON": "0", "NSA_COMMIT": "abc", "HOME": "/root"}}
    assert outputs.repro(tests, [], shell).startswith("A='b c' NSA_USE_GLUON=0 python -m pytest")
    rows = [test_row("x.py::good"), test_row("x.py::bad[1 2]", "error")]
    want = "A='b c' python -m pytest --tb=short 'x.py::bad[1 2]'"  # what failed, and no more
    assert outputs.repro(tests, rows, {}) == want


def test_a_huge_issue_keeps_verdict_failures_and_warnings(tmp_path):
    wrong = dict(status="FAIL", why=["wrong " * 60])
    rows = [parity_row(f"sel_bwd/{i}/" + "long" * 80, **wrong) for i in range(200)]
    rows += [
        {"kind": "note", "level": "warn", "text": f"note {i} " + "w" * 500} for i in range(120)
    ]
    rows += [bench_row(f"sel/varlen/L=64/case{i}", 50.0, 1.0, L=64) for i in range(400)]
    folder = with_events(tmp_path, "gpu_fail", sending("triton_bwd", rows))
    (folder / "logs" / "triton_bwd.log").write_text("E  assert\n" * 10_000)
    text = report.issue_text(rebuild(folder)[0], folder)
    assert len(text) <= report.ISSUE_LIMIT and text.startswith("**FAIL - ")
    for words in ("## Failures", "### `triton_bwd` FAIL", "sel_bwd/0", "DIRTY tree", "SHARED GPU",
                  "capped to 300 of 450 W", "note 0", "best effort redaction; look at it before",
                  ):  # fmt: skip
        assert words in text, words
    assert re.search(r"and \d+ more, in bundle\.json", text)


def test_an_issue_that_nothing_makes_short_is_cut_between_sections(tmp_path, monkeypatch):
    """It takes no other report along either: it is written after them."""
    write_sample(tmp_path, "gpu_fail")
    data = rebuild(tmp_path)[0]
    monkeypatch.setattr(report, "ISSUE_LIMIT", 2500)
    text = report.issue_text(data, tmp_path)
    assert len(text) <= 2500 and text.startswith("**FAIL - ")
    assert text.endswith("Cut here, because an issue may not be longer; report.md has the rest.\n")
    monkeypatch.setattr(report, "issue_text", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        report.render(tmp_path)
    assert (tmp_path / "report.md").exists() and (tmp_path / "report.html").exists()


def test_warnings_have_an_end_and_flags_without_routing_are_not_called_complete(sample):
    data = rebuild(sample)[0]
    data["doctor"] += [{"name": f"check{i}", "level": "WARN", "text": "odd"} for i in range(90)]
    text = report.render_text(data, sample, report.LADDER[-1])
    assert "check51" in text and "check52" not in text
    assert "and 38 more, in bundle.json" in text
    assert "| every other flag | not recorded |" in rendered(sample)


# ---- plots ---------------------------------------------------------------------------------------


def test_plots_are_drawn_from_rows_with_proof_and_shown_by_the_report(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    sel = lambda L, **more: bench_row(f"sel/L={L}", 9.0, 1.4, L=L, **{"mode": "dense", **more})
    rows = [sel(64), sel(128, status="UNSTABLE", why=["IQR"]), sel(99, mode="$x$ <y>"),
            sel(777, status="INVALID", why=["no"]),
            bench_row("prefill/S=1024/fwd", 900.0, 0.5, bench="prefill", op="full",
                      direction="fwd", S=1024, baseline="dense")]  # fmt: skip
    folder = with_rows(tmp_path, rows)
    curve = [{"step": i, "loss": 5.0 - i / 50, "val_loss": 4.0 if i % 50 == 49 else None}
             for i in range(100)]  # fmt: skip
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in curve))
    assert report.main([str(folder)]) == 0
    text = (folder / "report.md").read_text()
    first = {p.name: p.read_bytes() for p in (folder / "plots").iterdir()}
    assert set(first) == {"roofline.svg", "loss.svg"}
    for name, image in first.items():
        assert f"](plots/{name})" in text
        assert ElementTree.fromstring(image).tag.endswith("svg")
    drawn = first["roofline.svg"].decode()
    ticks = re.findall(r">([^<>]*)</text>", drawn)
    assert "100" in ticks and not re.search(r"mathdefault|tspan|10\^", drawn)  # plain numbers
    assert "█" in text and "(100 steps with a finite loss)" in text
    assert report.main([str(folder)]) == 0
    assert first == {p.name: p.read_bytes() for p in (folder / "plots").iterdir()}
    # In the page they are drawings whose ids are their own, axis labels along.
    text = (folder / "report.html").read_text(encoding="utf-8")
    seen = inert(text)
    assert text.count("<svg") == len(first) == 2
    ids = [value for _, name, value in seen.attributes if name == "id"]
    assert len(ids) == len(set(ids)) and "FLOP per byte that must move" in seen.text
    used = {v[1:] for _, name, v in seen.attributes if name == "href" and v.startswith("#")}
    used |= set(re.findall(r"url\(#([\w.-]+)\)", text))
    assert used <= set(ids), "a drawing refers to nothing"


# ---- the first screen ----------------------------------------------------------------------------


def view_of(folder, **changes):
    """The view of the run in `folder`, whose data has `changes`."""
    data = {**rebuild(folder)[0], **changes}
    kinds = {"test": "tests", "parity": "parity", "bench": "bench"}
    rows = {kind: held_to_rules(data[key], kind)[0] for kind, key in kinds.items()}
    return View(data, rows, evidence.noise_floor(data["health"]), folder)


def told(card):
    """The answer and everything under it as one text."""
    blocks = [b if isinstance(b, (str, list)) else vars(b) for b in card.blocks]
    return "\n".join([card.answer, *map(str, blocks)])


def test_a_box_is_good_by_its_shares_and_by_nothing_that_was_not_asked(sample):
    card = first.box(view_of(sample))
    assert (card.answer, card.colour) == ("Yes.", "good")
    for words in ("device copy 4010 GB/s: **83 %** of this card's nominal 4814",
                  "did not throttle", "nobody else was on it"):  # fmt: skip
        assert words in told(card)
    known = view_of(sample).data["health"]
    kept = {"memory_test_mib": 8192, "memory_test_patterns": 130, "bf16_product_repeats": 900}
    said = "8192 MiB of its memory kept 130 patterns, and 900 matmuls were right and alike"
    assert said in told(first.box(view_of(sample, health=known | kept)))
    unasked = {"throttled": None, "memory_used_by_others_mib": None}
    card = first.box(view_of(sample, health=known | unasked))
    assert "nothing tells whether it throttled" in told(card) and "nobody" not in told(card)
    for unmeasured in (None, {"status": "OK"}, {"copy_gbs": 4010.0}):
        assert first.box(view_of(sample, health=unmeasured)).answer == "Not measured."


card_ = lambda **facts: {"device": {"name": "X", **facts}}
health = lambda **row: {"health": row}
FULL = dict(doctor=[{"name": "disk", "level": "BLOCK", "text": "full"}])


@pytest.mark.parametrize(("changes", "colour", "words"), [
    (card_(power_limit_w=300, power_default_w=450), "doubt", "capped to 300 of 450 W"),
    (card_(shared=True), "doubt", "SHARED GPU"), (card_(mig=True), "doubt", "MIG"),
    (health(throttled=True), "doubt", "throttled while"), (FULL, "bad", "full"),
    (health(status="WARN", why=["slow copies"]), "doubt", "WARN: slow copies"),
    (health(status="FAIL", why=["3 w"], memory_wrong_words=3), "bad", "FAIL: 3 w"),
    (card_(name=None, reason="gone"), "bad", "No GPU answered: gone"),
])  # fmt: skip
def test_what_holds_a_box_back_comes_before_its_numbers(sample, changes, colour, words):
    card = first.box(view_of(sample, **changes))
    assert (card.answer, card.colour) == ("No.", colour)
    assert words in card.blocks[0][0]


def test_kernels_are_counted_from_the_rows_and_not_from_a_verdict_beside_them(tmp_path):
    """A stranger's bundle.json may claim what its rows do not hold."""
    rows = [parity_row("p/right"), parity_row("p/wrong", max_abs=9.0), test_row("a::b")]
    view = view_of(with_rows(tmp_path, rows, stage="triton_fwd"))
    view.data["verdict"].update(status="PASS", parity_pass=2, parity_total=2)
    card = first.kernels(view)
    total = len(view.rows["parity"])
    assert card.answer == f"**No**: 1 of {total} results are wrong." and card.colour == "bad"
    assert f"**{total - 1} of {total}** results" in told(card)
    assert first.failed(view).colour == "bad"  # and the stage is named, whatever it says itself
    view.rows["parity"][-1]["status"] = "INVALID"
    words = first.kernels(view).answer
    assert words.startswith("**No**: ") and words.endswith(f"1 of {total} results are not proven.")
    assert "`triton_fwd`" in told(first.failed(view))


REAL = real_rows()[0]
TOY = bench_row("decode/S=512", 13.0, 0.7, bench="decode", S=512, dim=256)
PART = bench_row("prefill/S=8192", 9.0, 3.0, bench="prefill", S=8192, op="sliding")
UNPROVEN = [
    {**REAL, "status": status, "why": ["no"]} for status in ("INVALID", "FAILED", "SKIPPED")
]


def speed_of(folder, *rows, **changes):
    return first.speed(view_of(with_rows(folder, rows, stage="prefill_bench"), **changes))


@pytest.mark.parametrize("row", [TOY, PART, *UNPROVEN])
def test_what_is_no_proven_time_of_real_sizes_shows_no_number_first(tmp_path, row):
    card = speed_of(tmp_path, row)
    assert card.answer.startswith("No real sizes were timed") and not card.blocks
    assert ("0.70x" in rendered(tmp_path)) == (row is TOY)  # what was timed is below


def test_speed_that_is_unstable_has_its_mark_and_one_within_the_noise_no_ratio(tmp_path):
    unstable = {**REAL, "status": "UNSTABLE", "why": ["drift"]}
    noise = {**real_rows()[2], "speedup": 1.005, "speedup_ci95": [1.002, 1.008]}
    card = speed_of(tmp_path, unstable, noise)
    (bars,) = [b for b in card.blocks if isinstance(b, Bars)]
    assert [bar.ours for bar in bars.rows] == ["1.54 ms\\*", "2.96 ms"]
    assert bars.rows[1].ratio == evidence.NO_DIFFERENCE
    wide = evidence.bar({**unstable, "D": 192}, None).name
    assert wide == "prefill, 8k tokens, heads of 192, forward" != bars.rows[0].name
    same = f"{evidence.NO_DIFFERENCE} in 1 of 2 cases."
    assert card.answer == f"prefill 1.13x as fast as dense attention; {same}"
    assert card.colour == "doubt" and "UNSTABLE" in told(card)


@pytest.mark.parametrize("changes, answer", [
    (dict(speedup=1.005, speedup_ci95=[1.002, 1.008]), "no difference measurable in 1 of 1 cases."),
    (dict(speedup=None, speedup_ci95=None), "no ratio was measured."),
])  # fmt: skip
def test_nothing_is_called_as_fast_as_dense_attention_without_a_ratio(tmp_path, changes, answer):
    assert speed_of(tmp_path, {**REAL, **changes}).answer == answer


def test_a_partial_run_answers_for_what_ran_alone(sample):
    view = view_of(sample, partial="--only sanity")
    assert first.kernels(view).answer == "As far as they ran."


@pytest.mark.parametrize("argv, options", [
    ([], ""), (["--gpus", "0,1", "--budget", "2m"], " GPUS=0,1"), (["~/a b"], " OUT=~/'a b'"),
    (["<repo>/out", "--gpus", "all"], " OUT=out GPUS=all"),
])  # fmt: skip
def test_what_takes_up_a_run_finds_its_folder_and_its_cards(argv, options, tmp_path):
    view = view_of(with_events(tmp_path, "incomplete", lambda events: events[0].update(argv=argv)))
    assert f"make gpu-report PROFILE=standard{options} RESUME=1" in told(first.failed(view))


def test_the_same_card_is_the_one_of_that_name_its_newest_valid_row_and_its_sizes(committed_rows):
    key = recorded.key_of(REAL["bench"], REAL)
    like = dict(PROVEN, op="full", S=8192, commit="c")
    others = [dict(status="UNSTABLE"), dict(parity="FAIL"), dict(device="NVIDIA H100"), dict(D=64)]
    others += [dict(op="win"), dict(ms=""), dict(direction="bwd"), dict(sharing="shared")]
    committed_rows("2026-11-20", "prefill-a.csv", dict(like, ms=9.0, commit="old"))
    committed_rows("2026-11-22", "prefill-b.csv", *(dict(like, **{"ms": 1.0, **o}) for o in others),
                   dict(like, ms=7.0, commit="new"))  # fmt: skip
    committed_rows("2026-11-23", "prefill-c.csv", dict(nothing="of use"))
    assert committed.times("NVIDIA H200")[key] == (7000.0, "new")
    assert key not in committed.times("NVIDIA")


def test_others_are_those_timed_in_pairs_on_the_same_card(sample, committed_rows):
    like = dict(PROVEN, against="sfnsa", commit="c", S=8192)
    others = [dict(against="dense"), dict(S=32768, device="NVIDIA H100"), dict(S=32768, HQ=32)]
    others += [dict(sharing="shared"), dict(op="sel", against="vllm"), dict(S=65536)]
    committed_rows("2026-11-20", "peers-a.csv", dict(like, speedup=1.83),
                   *(dict(like, speedup=6.66, **other) for other in others))  # fmt: skip
    text = told(first.speed(view_of(sample)))
    assert "sfnsa, forward, 1.83 at 8k tokens." in text
    assert "6.66" not in text and "vllm" not in text  # of other blocks, and of selection alone
    assert committed.pairs("NVIDIA H200", {**REAL, **SIZES, "HQ": 128}) == {}


def to_set(folder, cells, flags, device, **proposal):
    """The card of a run with these cells, (length, ratio) each, and this proposal."""
    like = dict(mode="route", dist="few", wall_speedup_ci95=[9.0, 9.5])
    rows = [bench_row(f"sel/route/L={L}/{ratio}", 9.0, ratio, L=L, **like) for L, ratio in cells]
    with_rows(folder, [*rows, {"kind": "recommend", "confidence": "as measured", **proposal}])
    flags = [{"name": n, "value": value, "source": s} for n, (value, s) in flags.items()]
    (folder / "routing.json").write_text(json.dumps({"flags": flags}))
    return first.to_set(view_of(folder, **device))


AUTO, MINE = ("auto", "default"), (16, "base.yaml")


@pytest.mark.parametrize(("set_to", "best", "cells", "line"), [
    (AUTO, 64, {64: 2.0, 256: 2.0}, None), (AUTO, 16, {16: 2.0, 64: 2.0}, 16),
    (MINE, 16, {16: 2.0, 64: 2.0}, None), (MINE, 64, {16: 0.5, 64: 2.0}, 64),
    (MINE, 64, {64: 2.0}, None),  # nothing shorter speaks against a smaller value
    (AUTO, 16, {16: 2.0, 256: 0.5}, None),  # its rows do not carry it
    (AUTO, None, {64: 0.5}, None),
])  # fmt: skip
def test_the_line_to_paste_is_there_where_the_rows_ask_for_another_value(
    tmp_path, set_to, best, cells, line
):
    flags = {"NSA_SEL_TRITON_MIN_L": set_to}
    card = to_set(tmp_path, cells.items(), flags, {}, sel_triton_min_L=best)
    text = told(card).replace("\\n", "\n")
    assert f"export NSA_SEL_TRITON_MIN_L={line}\n" in text if line else "export" not in text
    assert card.answer.startswith("This line." if line else "Nothing: ")


@pytest.mark.parametrize(("sm", "switch", "cmp", "there"), [
    ("9.0", "auto", 3, False), ("8.9", "auto", 3, True), ("9.0", False, 3, True),
    ("8.9", "auto", None, False),
])  # fmt: skip
def test_fa2_is_to_be_set_only_where_triton_is_off(tmp_path, sm, switch, cmp, there):
    flags = {"NSA_SEL_TRITON_MIN_L": (64, "default"), "NSA_USE_TRITON_SEL": (switch, "default")}
    lengths = dict(sel_triton_min_L=64, fa2_min_len_win=64, fa2_min_len_cmp=cmp)
    text = told(to_set(tmp_path, [(64, 2.0)], flags, card_(sm=sm), **lengths))
    line = "export NSA_USE_FA2=1 NSA_FA2_MIN_LEN_WIN=64 NSA_FA2_MIN_LEN_CMP=3"
    assert (line in text) == there


def test_a_command_has_no_hole(tmp_path):
    """A command that lacks its middle cannot be run: in all three reports it is whole."""
    argv = ["{python}", "-m", "tests", *(f"nsa/tests/test_{i}.py" for i in range(450))]

    def change(events):
        ends = {e["stage"]: e["result"] for e in events if e["ev"] == "stage_end"}
        ends["triton_bwd"]["argv"] = argv

    with_events(tmp_path, "gpu_fail", change)
    data, command = rebuild(tmp_path)[0], shlex.join(["python", *argv[1:]])
    assert len(command) > 9000
    for text in (report.issue_text(data, tmp_path), rendered(tmp_path),
                 report.render_page(data, tmp_path)):  # fmt: skip
        assert command in text[: text.index("Failures")]


@pytest.mark.parametrize(("status", "words"), [
    ("STOPPED", "The run was stopped."), ("BROKEN", "The run did not end by itself."),
    ("INVALID", "No timed case is VALID."), ("NOT_RUN", "Nothing was proven."),
    ("FAIL", "Something private could not be redacted."),
])  # fmt: skip
def test_a_verdict_that_no_stage_explains_is_not_called_nothing(sample, status, words):
    view = view_of(sample)
    view.data["verdict"]["status"] = status
    card = first.failed(view)
    assert (card.answer, card.colour) == (words, "bad")


def test_the_page_has_the_cards_before_anything_else(sample):
    text = report.render_page(rebuild(sample)[0], sample)
    asked = re.findall(r'<div class="card \w+(?: big)?">\n<h2>(.*?)</h2>', text)
    assert asked == [card.question for card in first.answers(view_of(sample))]
    assert len(asked) == 5 and text.index("<h2>What failed?</h2>") < text.index("<nav>")
