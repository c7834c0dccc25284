"""Do shares of a test command cover it once, report unbroken rows, and end together?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nsa.tests import conftest
from nsa.tests.oneshot_faults import until
from scripts.oneshot.box.processes import is_running
from scripts.oneshot.run import shards, stages

ROOT = Path(__file__).resolve().parents[2]


def reader(fd):
    """All rows of a pipe, gathered meanwhile; call the result to get them."""
    parts = []

    def read():
        with os.fdopen(fd, "rb") as pipe:
            parts.extend(iter(lambda: pipe.read1(1 << 16), b""))

    thread = threading.Thread(target=read)
    thread.start()

    def finish():
        thread.join(timeout=60)
        assert not thread.is_alive(), "somebody still holds the pipe"
        rows = [json.loads(line) for line in b"".join(parts).splitlines()]
        time = lambda row: row["kind"] == "session" or row.get("name", "").startswith("seconds/")
        return [row for row in rows if not time(row)]

    return finish


def start(n, *command, first=(), **env):
    """`shards` on a pipe: (process, all rows once it has ended)."""
    read, write = os.pipe()
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.oneshot.run.shards", "-n", str(n), *first, "pytest", "-q",
         "-p", "nsa.tests.conftest", "-p", "no:cacheprovider", *map(str, command)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, pass_fds=[write],
        env={**clean, "NSA_RESULT_FD": str(write), "PYTHONFAULTHANDLER": "1", **env},
    )  # fmt: skip
    os.close(write)
    return process, reader(read)


# ---- which tests ---------------------------------------------------------------------------------


def test_long_tests_and_then_the_first_cases_of_all_come_first():
    names = ["t.py::a[1]", "t.py::a[2]", "t.py::b[1]", "t.py::b[2]"]  # they share their kernels
    item = lambda name: SimpleNamespace(
        nodeid=name, get_closest_marker=lambda mark: mark if name.endswith("b[2]") else None
    )
    parts = conftest._in_turn([item(name) for name in names])
    assert [x.nodeid for (x,) in parts] == ["t.py::b[2]", "t.py::a[1]", "t.py::b[1]", "t.py::a[2]"]


@pytest.mark.parametrize(("one", "codes"), [
    (0, [[0, 0], [0, 5]]), (1, [[5, 1]]), (3, [[3, 0]]), (4, [[4, 5]]), (5, [[5, 5]]),
    (139, [[0, 1, 139], [0, 2, 139], [139, 2]]),
])  # fmt: skip
def test_exit_codes_combine(codes, one):
    assert {shards.combined(several) for several in codes} == {one}


@pytest.mark.parametrize(
    ("argv", "n"), [([], 12), (["--fewer", "4"], 3), (["--fewer", "99"], 1), (["-n", "2"], 2)]
)
def test_how_many_processes(argv, n, monkeypatch):
    monkeypatch.setattr(shards, "default_shards", lambda: 12)
    monkeypatch.setattr(shards, "run", lambda *given: given)
    assert shards.main([*argv, "pytest", "-q"]) == (n, ["pytest", "-q"], [])


def test_stages_of_tests_have_fewer_processes_once_memory_was_short():
    some = [stage for stage in stages.plan("standard") if stage.side_by_side]
    assert {"prefill_parity", "decode_parity", "more_parity"} == {stage.id for stage in some}
    for stage in some:
        fewer = ("{python}", "-m", "scripts.oneshot.run.shards", "--fewer", "4")
        assert not stage.shrinks and stage.smaller().argv == (*fewer, *stage.argv[3:])


@pytest.mark.parametrize("argv", ["-n 2", "echo x", "-n -1 pytest", "--fewer 0 pytest"])
def test_usage(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        shards.main(argv.split())
    assert "pytest ARGUMENTS" in capsys.readouterr().err


# ---- rows ----------------------------------------------------------------------------------------

EMITTER = """
import sys
from bench.records import emit
for i in range(8):
    emit("note", {"level": "info", "text": sys.argv[1] * 100_000, "i": i})  # more than a pipe holds
    emit("note", {"level": "info", "text": "short", "i": i})
"""


def test_rows_longer_than_a_pipe_takes_at_once_stay_whole():
    read, write = os.pipe()
    finish = reader(read)
    env = {**os.environ, "NSA_RESULT_FD": str(write)}
    children = [
        subprocess.Popen([sys.executable, "-c", EMITTER, name], pass_fds=[write], env=env, cwd=ROOT)
        for name in "abcd"
    ]
    os.close(write)
    assert [child.wait(timeout=60) for child in children] == [0] * 4
    rows = finish()
    long = [(row["text"][0], row["i"]) for row in rows if len(row["text"]) == 100_000]
    assert sorted(long) == [(name, i) for name in "abcd" for i in range(8)]
    assert len(rows) == 2 * len(long) and all(len(set(row["text"])) in (1, 5) for row in rows)


CASES = """
import pathlib, time
import pytest
from bench.records import emit

DONE = pathlib.Path(__file__).parent / "done"

@pytest.fixture(scope="module")
def made():
    emit("note", {"level": "info", "text": "made"})

def test_slow():
    limit = time.monotonic() + 60
    while not DONE.exists() and time.monotonic() < limit:
        time.sleep(0.02)
    assert DONE.exists()

@pytest.mark.parametrize("i", range(6))
def test_of_one_fixture(i, made):
    pass

@pytest.mark.parametrize("i", range(12))
def test_good(i):
    emit("parity", {"case": f"c{i}", "status": "PASS", "filler": "y" * 20_000})
    if i == 11:
        DONE.touch()

def test_bad():
    assert False, "as it should"
"""


def test_every_test_reports_once_whoever_is_free_takes_it_and_a_failure_counts(tmp_path):
    """All but one are done beside the slow one; what a file's tests share is made once; what runs
    beside them counts for nothing."""
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "other.py").write_text(
        "import os, sys\nprint('beside', os.environ.get('NSA_RESULT_FD'), sys.argv[1])\nsys.exit(3)"
    )
    other = ["--beside", f"{tmp_path / 'other.py'} given"]
    process, finish = start(2, tmp_path, first=other)
    console, _ = process.communicate(timeout=120)
    rows = finish()
    assert process.returncode == 1, console
    tests = {row["nodeid"].split("::")[1]: row["outcome"] for row in rows if row["kind"] == "test"}
    assert len(tests) == 20 == sum(row["kind"] == "test" for row in rows)
    assert tests.pop("test_bad") == "failed" and set(tests.values()) == {"passed"}
    assert {row["case"] for row in rows if row["kind"] == "parity"} == {f"c{i}" for i in range(12)}
    assert sum(row.get("text") == "made" for row in rows) == 1
    for words in ("== share 1 of 2", "== share 2 of 2", "as it should", "== beside: exit code 3",
                  "beside None given"):  # fmt: skip
        assert words in console


def test_what_runs_beside_is_not_waited_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "BESIDE_S", 0.1)
    path, tests = tmp_path / "sleeps.py", tmp_path / "test_cases.py"
    path.write_text("import time; time.sleep(600)")
    tests.write_text("def test_good():\n    pass\n")
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    begin = time.monotonic()
    try:
        command = ["pytest", "-q", "-p", "nsa.tests.conftest", os.fspath(tests)]
        assert shards.run(1, command, [os.fspath(path)]) == 0
    finally:
        signal.signal(signal.SIGTERM, before[0]), signal.signal(signal.SIGINT, before[1])
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
    assert time.monotonic() - begin < 30


# ---- the end -------------------------------------------------------------------------------------

SLEEPERS = """
import os, pathlib, signal, time
import pytest

@pytest.mark.parametrize("i", range(8))
def test_sleeps(i):
    folder = pathlib.Path(__file__).parent
    try:
        (folder / "deaf").touch(exist_ok=False)  # one of the shares
        signal.signal(signal.SIGABRT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except FileExistsError:
        pass
    (folder / f"pid{os.getpid()}").touch()
    time.sleep(120)
"""


def sleeping(folder, n):
    """Shares that sleep, one of them deaf: (process, the rows, the pids of the shares)."""
    path = folder / "test_sleepers.py"
    path.write_text(SLEEPERS)
    process, finish = start(n, path)
    pids = lambda: [int(p.name[3:]) for p in folder.glob("pid*")]
    assert until(lambda: len(pids()) == n, 60)
    return process, finish, pids()


def gone(pids):
    return until(lambda: not any(map(is_running, pids)), 3.0)


def test_sigabrt_prints_stacks_and_ends_all_even_a_share_that_is_deaf(tmp_path):
    process, finish, pids = sleeping(tmp_path, 2)
    begin = time.monotonic()
    process.send_signal(signal.SIGABRT)
    console, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGABRT
    assert time.monotonic() - begin < 3.0, "the supervisor kills the group after three seconds"
    assert console.count("in test_sleeps") == 1, console
    assert gone(pids) and not finish()


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_no_share_outlives_a_killed_command(tmp_path):
    process, finish, pids = sleeping(tmp_path, 1)
    process.kill()
    process.communicate(timeout=20)
    assert gone(pids) and not finish()
