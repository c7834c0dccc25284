"""Rows that claim too much cannot be built; CSV and the result channel keep what they are given; a
stage's seconds count once each, and none is taken for a result."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import provenance, spent
from bench.records import (
    BenchRow,
    emit,
    read_csv,
    write_atomic,
    write_csv,
    write_so_far,
    write_target,
)
from nsa.tests.helpers import sent
from nsa.tests.oneshot_faults import git, rows_of
from scripts.oneshot.record.judge import Status, judge
from scripts.oneshot.record.model import Stage
from scripts.oneshot.record.rows import parse_row

GOOD = {
    "bench": "sel", "case": "c", "status": "VALID", "parity": {"status": "PASS"},
    "median_us": 5.0, "path_taken": "triton",
}  # fmt: skip


HELD = {"why": ("x",), "median_us": None}
TOO_MUCH = [
    ({"status": "FINE"}, "status"),
    ({"parity": None}, "passed parity"),
    ({"parity": {"status": "FAIL"}}, "passed parity"),
    ({"median_us": None}, "no finite median"),
    ({"median_us": math.nan}, "no finite median"),
    ({"median_us": 0.0}, "no finite median"),
    ({"path_taken": None}, "path"),
    ({"speedup": 2.0}, "interval"),
    ({"speedup": 2.0, "ci95_us": (4.9, 5.1)}, "a speedup needs its confidence interval"),
    ({"status": "UNSTABLE"}, "why"),
    ({"status": "INVALID", "why": ("x",)}, "no numbers"),
    ({"status": "FAILED", **HELD, "wall_us": 5.0}, "got wall_us"),
    ({"status": "SKIPPED", **HELD, "columns": {"busbw_gbs": 3.0}}, "got busbw_gbs"),
    ({"columns": {"speedup": 3.0}}, "speedup"),
]
HOST = {"wall_min_us": 500.0, "enqueue_us": 20.0}
IMPOSSIBLE = [
    ({"p20_us": -1.0}, "p20_us is -1"),
    ({"min_us": 0.0}, "min_us is 0"),
    ({"base_median_us": -2.0}, "base_median_us is -2"),
    ({"timed_us": 5e3, "elapsed_us": 3e3}, "the clock counts 5000 us in calls that took"),
    (HOST, "a call takes the host 500.0 us at least"),
    ({f"base_{n}": us for n, us in HOST.items()} | {"base_median_us": 9.0}, "the baseline"),
    ({"timer": "perf_counter", "wall_min_us": 30.0, "enqueue_us": 0.0}, "a call takes the host"),
]
POSSIBLE = [
    {**HOST, "enqueue_us": 480.0},  # the host is what takes the time
    {**HOST, "enqueue_us": None},  # of other calls than the median
    {"timed_us": 3e3, "elapsed_us": 5e3},
    {"timer": "perf_counter", "wall_us": 90.0, "wall_min_us": 20.0, "enqueue_us": 0.0},
]


@pytest.mark.parametrize("changes, says", TOO_MUCH + IMPOSSIBLE)
def test_a_row_that_claims_too_much_is_refused(changes, says):
    """Times that cannot be also where a row is read: by the runner, verify, compare and resume."""
    with pytest.raises(ValueError, match=says):
        BenchRow(**{**GOOD, **changes})
    if (changes, says) in IMPOSSIBLE:
        held = parse_row(json.dumps({"kind": "bench", **GOOD, **changes}))
        assert held["status"] == "INVALID" and held["median_us"] is None
        assert any(says in text for text in held["why"])


@pytest.mark.parametrize("changes", POSSIBLE)
def test_times_that_can_be_explained_stay(changes):
    BenchRow(**{**GOOD, **changes})
    assert parse_row(json.dumps({"kind": "bench", **GOOD, **changes}))["status"] == "VALID"


def test_emit_writes_one_json_line_without_nan(monkeypatch):
    def both():
        BenchRow(**{**GOOD, "columns": {"L": 64, "odd": math.inf}}).emit()
        emit("note", {"text": "a\nb"})

    _, (row, note) = sent(monkeypatch, both)
    assert (row["kind"], row["L"], row["odd"], row["median_us"]) == ("bench", 64, None, 5.0)
    assert note["text"] == "a\nb"
    monkeypatch.delenv("NSA_RESULT_FD", raising=False)
    emit("note", {"text": object()})  # nobody listens


def test_csv_comes_back_and_one_that_was_cut_does_not(tmp_path, capsys):
    rows = [{"a": 1, "b": math.nan, "c": "x,y"}, {"a": 2.5, "b": None, "c": '"q"'}]
    write_csv(str(tmp_path / "deep" / "f.csv"), rows, ["a", "b", "c"])
    assert read_csv(tmp_path / "deep" / "f.csv") == [
        {"a": "1", "b": "", "c": "x,y"}, {"a": "2.5", "b": "", "c": '"q"'}
    ]  # fmt: skip
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["f.csv"]
    path = tmp_path / "rows.csv"
    for text, says in (("a,b\n1,2\n3\n", "rows.csv:3"), ("", "header")):
        path.write_text(text)
        with pytest.raises(ValueError, match=says):
            read_csv(path)
    for target in (str(path), "-", None):  # so far: stdout gets them at the end
        write_so_far(target, [{"a": 1}], ("a",))
    assert read_csv(path) == [{"a": "1"}] and capsys.readouterr().out == ""


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_atomic(path, "old")
    monkeypatch.setattr(os, "replace", lambda a, b: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_atomic(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["f"]


def test_a_file_that_somebody_named_keeps_what_it_is(tmp_path):
    """A link, its file's permissions, a pipe; of a new file the umask says who may read it."""
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    file.write_text("old")
    file.chmod(0o600)
    link.symlink_to(file.name)
    write_target(link, "new")
    assert link.is_symlink() and file.read_text() == "new" and file.stat().st_mode & 0o777 == 0o600
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_target(pipe, "through")
    assert os.read(reader, 99) == b"through" and pipe.is_fifo()
    os.close(reader)
    before = os.umask(0o077)
    try:
        write_target(tmp_path / "long".ljust(250, "g"), "")
    finally:
        os.umask(before)
    assert [p.stat().st_mode & 0o777 for p in tmp_path.glob("long*")] == [0o600]
    with pytest.raises(OSError, match="/proc/none"):
        write_target(Path("/proc/none"), "")


def test_rows_name_the_commit_of_their_sources(tmp_path, monkeypatch):
    """What the run was told, where there is one. A box may have the sources without git, or they
    may lie in another repository, or a hook of one."""
    told = {"short": "c01d9ee", "dirty": True}
    (tmp_path / "bundle.json").write_text(json.dumps({"git": told}))
    ours, inside = tmp_path / "ours", tmp_path / "ours" / "vendored"
    inside.mkdir(parents=True)
    git(ours, "init", "-q")
    (ours / "a").touch()
    git(ours, "add", "a")
    git(ours, "commit", "-qm", "a")
    head = git(ours, "rev-parse", "--short", "HEAD")

    def commit(root, **environ):
        with monkeypatch.context() as patch:
            patch.delenv("NSA_COMMIT", raising=False)
            patch.setattr(provenance, "ROOT", root)
            for name, value in environ.items():
                patch.setenv(name, value)
            provenance.commit.cache_clear()
            return provenance.provenance(None)["commit"]

    try:
        assert commit(ours, NSA_OUT_DIR=str(tmp_path)) == "c01d9ee-dirty"
        assert commit(ours, NSA_COMMIT="ab" * 20) == head
        assert commit(inside, NSA_COMMIT="ab" * 20) == "abababa" and commit(inside) is None
        assert commit(inside, GIT_DIR=str(ours / ".git")) is None
        monkeypatch.setattr(provenance, "ROOT", tmp_path)
        assert provenance.described(ours) == head and provenance.described(inside) is None
        (ours / "a").write_text("b")
        assert provenance.described(ours) == f"{head}-dirty"
        monkeypatch.setattr(provenance, "ROOT", ours)
        assert provenance.described(inside) is None
    finally:
        provenance.commit.cache_clear()


def test_a_row_names_the_triton_that_was_imported(monkeypatch):
    """One on PYTHONPATH, say, and not the one that is installed."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="9.9.9"))
    assert provenance.provenance(None)["triton"] == "9.9.9"


def test_a_row_says_the_precision_that_its_bench_fixed():
    """Whoever let TF32 in before: fp32 is exact for a bench and its baselines."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high")
        found = provenance.provenance(None)
        assert found["precision"].startswith("fp32 matmul highest, TF32 off (cuDNN off)")
        assert set(found) == set(provenance.COLUMNS)
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", found["date"])
        assert not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def test_a_row_as_csv_and_for_people():
    numbers = dict(ci95_us=(4.9, 5.2), base_median_us=10.0, wall_us=7.0, base_wall_us=11.0,
                   speedup=2.0, speedup_ci95=(1.9, 2.1), baseline="plain", peak_frac=0.5,
                   bound="memory", sm_mhz=[1500, 1980], columns={"L": 64})  # fmt: skip
    row = BenchRow(**{**GOOD, **numbers})
    flat, line = row.csv(), row.line()
    times = [flat[n] for n in ("ms", "ms_low", "ms_high", "base_ms", "wall_ms", "base_wall_ms")]
    assert times == pytest.approx([0.005, 0.0049, 0.0052, 0.01, 0.007, 0.011])
    rest = [flat[n] for n in ("ci_low", "ci_high", "parity", "sm_mhz", "L", "path")]
    assert rest == [1.9, 2.1, "PASS", 1500, 64, "triton"]
    assert "5.00 us" in line and "2.00x [1.90, 2.10] of plain" in line and "50% of memory" in line
    lost = BenchRow("sel", "c", "SKIPPED", ("out of memory",))
    assert lost.csv()["ms"] is None and lost.csv()["why"] == "out of memory"
    assert lost.line().endswith("SKIPPED: out of memory")


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
    code = "import time; time.sleep(0.3); from bench import spent; spent.begin(); spent.begin()"
    _, rows = rows_of(["-c", code])
    assert [row["name"] for row in rows] == ["seconds/start"] and 0.3 < rows[0]["value"] < 60
    stage = Stage("s", "s", ("x",), proof="row", timeout_s=1)
    assert judge(stage, 0, rows).reason == "exit code 0, but no result was sent"
    assert judge(stage, 0, [*rows, {**rows[0], "name": "speed"}]).status is Status.PASS
