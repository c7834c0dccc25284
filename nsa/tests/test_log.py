"""Do log lines have the stated form, come only when asked for, and stop at the limit?"""

from types import SimpleNamespace

import pytest
import torch

from nsa import launches
from nsa.flags import Flags
from nsa.log import enabled, log, once, timed

ON = Flags(debug_log=True)


def test_line_form_and_nothing_by_default(capsys):
    log("sel.triton.fallback", reason="dtype")
    assert capsys.readouterr() == ("", "")
    log("sel.triton.fallback", flags=ON, reason="below_min_L", L=96, ms=0.12345678, s=[1, 2],
        error="two\nlines here")  # fmt: skip
    line = "reason=below_min_L L=96 ms=0.123457 s=[1,2] error=two_lines_here\n"
    assert capsys.readouterr().err == f"NSA-LOG sel.triton.fallback {line}"


TAGS = {
    "debug_log": ["sel.triton.fallback", "fa2.fallback", "sel.triton.reads"],
    "debug_timing": ["sel.triton.bucket_timing", "sel.path"],
    "debug_shapes": ["sel.triton.shapes"],
    "debug_compare": ["sel.triton.compare"],
}


@pytest.mark.parametrize("field", TAGS)
def test_each_debug_flag_suffices_for_its_own_tags(field):
    others = Flags(**dict.fromkeys(TAGS.keys() - {field}, True))
    for tag in TAGS[field]:
        assert enabled(tag, Flags(**{field: True})) and not enabled(tag, others)


def test_no_time_is_taken_while_a_graph_is_captured(monkeypatch, capsys):
    flags, like = Flags(debug_timing=True), SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waited"))
    with timed("a.timing", like, flags):
        pass
    assert capsys.readouterr().err == ""
    with timed("a.timing", torch.zeros(1), flags, bucket="x"):
        pass
    assert capsys.readouterr().err.startswith("NSA-LOG a.timing bucket=x ms=")


def test_limit_and_once(capsys):
    limited = Flags(debug_log=True, log_limit=2)
    for i in range(5):
        log("a.b", flags=limited, i=i)
        log("c.d", flags=limited, i=i)
    assert capsys.readouterr().err.count("\n") == 4
    for key in (1, 1, 2):
        once("e.f", key, flags=ON)
    once("e.f", 3)  # disabled: does not use up the key
    once("e.f", 3, flags=ON)
    assert capsys.readouterr().err.count("NSA-LOG e.f") == 3


def test_launch_recordings_nest_and_count_only_their_block():
    launches.reset()
    launches.bump("a")
    with launches.recording() as outer:
        launches.bump("a")
        with launches.recording() as inner:
            launches.bump("b", library=True)
        launches.bump("b")
    launches.bump("a")
    if outer.source == "launcher":
        assert (outer, inner) == ({"a": 1, "b": 2}, {"b": 1})
    else:  # on a GPU Triton itself counts, and these names were never launched
        assert (outer, inner) == ({"b": 1}, {"b": 1})
    assert launches.counts() == {"a": 3, "b": 2}
    with launches.recording() as outer:
        with launches.recording() as inner:
            launches.bump("a", library=True)
        assert inner == outer == {"a": 1}  # and it is the inner one that ends here
        launches.bump("a", library=True)
    assert (outer, inner) == ({"a": 2}, {"a": 1})


def test_tritons_hook_reads_the_name_of_either_kind_of_metadata(monkeypatch):
    seen = launches.Recording()
    seen.source = "hook"
    monkeypatch.setattr(launches, "_active", [seen, launches.Recording()])
    lazy = SimpleNamespace(data={"name": "new"}, get=lambda: pytest.fail("evaluated"))
    launches._hook(lazy)
    launches._hook(SimpleNamespace(get=lambda: {"name": "old"}))
    assert launches._active == [{"new": 1, "old": 1}, {}]
