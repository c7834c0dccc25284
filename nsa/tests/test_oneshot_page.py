"""report.html: the words of report.md, nothing from elsewhere, and no text of a log as markup."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="the report needs jinja2")

from nsa.tests.oneshot_samples import SAMPLES, write_sample
from nsa.tests.test_oneshot_report import write_hostile
from scripts.oneshot.record import markdown
from scripts.oneshot.record.reading import rebuild
from scripts.oneshot.report import page
from scripts.oneshot.report import render as report
from scripts.oneshot.report.blocks import Shape

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


@pytest.mark.parametrize("name", SAMPLES)
def test_page_is_self_contained_and_says_what_report_md_says(tmp_path, name):
    write_sample(tmp_path, name)
    data = rebuild(tmp_path)[0]
    words, html = report.render_text(data, tmp_path, Shape()), report.render_page(data, tmp_path)
    assert name != "cpu" or "<title>PASS - 8ac3f21 on a CPU</title>" in html
    seen = inert(html)
    rows = [" ".join(" | ".join(row).split()) for row in seen.rows]
    missing = []
    for line in re.findall(r"^\| ([^|\s].*) \|$", words, re.M):
        values = [Page(str(page.inline(v))).text for v in re.split(r" (?<!\\)\| ", line)]
        if "▇" in line:  # bars, which are no table in HTML
            missing += [v for v in values if v.strip(" ▇") not in seen.text]
        elif " ".join(" | ".join(values).split()) not in rows:
            missing.append(line)
    assert not missing
    assert data["verdict"]["one_line"] in seen.text


def test_hostile_records_stay_text(tmp_path):
    write_hostile(tmp_path)
    for name in ("triton_bwd", "sel_bench", "decode_bench"):
        path = tmp_path / "logs" / f"{name}.log"
        path.write_bytes(path.read_bytes() + "\n".join(ATTACKS).encode() + b"\nError: </pre>\n")
    seen = inert(report.render_page(rebuild(tmp_path)[0], tmp_path))
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
