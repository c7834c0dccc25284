"""Parts of the `run` verb by themselves, without a process of their own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from scripts.oneshot import runner
from scripts.oneshot.redact import Redactor
from scripts.oneshot.runner import Run


@pytest.fixture
def half_run(tmp_path):
    """A Run without its beginning: the folder, the console, nothing that was stopped."""
    run = object.__new__(Run)
    run.folder, run.stop, run.redactor = tmp_path, SimpleNamespace(by=None), Redactor({})
    run.said = []
    run.progress = SimpleNamespace(line=lambda text="": run.said.append(text))
    return run


@pytest.mark.parametrize("full", [False, True])
def test_a_render_that_was_cut_short_says_which_report_is_there(half_run, monkeypatch, full):
    (half_run.folder / "report.md").write_text("short\n")

    class Child:
        returncode, pid = 1, 0

        def __init__(self, *_args, stderr, **_):
            stderr.write("Killed\n")
            if full:
                (half_run.folder / "report.md").write_text("full\n")

        def poll(self):
            return 1

    monkeypatch.setattr(runner.subprocess, "Popen", Child)
    half_run._render(1.0)
    text = "\n".join(half_run.said)
    assert ("report.md is full" in text) is full and ("the short one" in text) is not full
    assert "Killed" in text and "scripts.oneshot render" in text
