"""Where a stage's seconds went: each counts once, and none is taken for a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import spent
from scripts.oneshot.record.judge import Status, judge
from scripts.oneshot.record.model import Stage

ROOT = Path(__file__).resolve().parents[2]


def test_each_second_counts_once(monkeypatch):
    monkeypatch.setattr(spent, "_seconds", spent.Counter())
    now = 0.0
    monkeypatch.setattr(spent.time, "perf_counter", lambda: now)
    with spent.on("timing"):
        now += 0.05
        with spent.on("proof"):
            now += 0.2
            with spent.on("timing"):
                now += 0.05
    assert spent._seconds["proof"] == pytest.approx(0.2)
    assert spent._seconds["timing"] == pytest.approx(0.1)


def test_a_process_tells_its_seconds_when_it_ends_and_they_prove_nothing():
    read, write = os.pipe()
    code = "import time; time.sleep(0.3); from bench import spent; spent.begin(); spent.begin()"
    env = {**os.environ, "NSA_RESULT_FD": str(write)}
    subprocess.run([sys.executable, "-c", code], env=env, pass_fds=[write], cwd=ROOT, check=True)
    os.close(write)
    with open(read) as pipe:
        rows = [json.loads(line) for line in pipe]
    assert [row["name"] for row in rows] == ["seconds/start"] and 0.3 < rows[0]["value"] < 60
    stage = Stage("s", "s", ("x",), proof="row", timeout_s=1)
    assert judge(stage, 0, rows).reason == "exit code 0, but no result was sent"
    assert judge(stage, 0, [*rows, {**rows[0], "name": "speed"}]).status is Status.PASS
