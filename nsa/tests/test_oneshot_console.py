"""The live line and the last lines, as a person at the terminal sees them."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

import pytest

from nsa.tests.oneshot_faults import ROOT, command, environment, fake_gpu
from scripts.oneshot.record.model import Stage
from scripts.oneshot.run.progress import Progress


def on_terminal(argv, env, columns, limit_s=40.0):
    """(exit code, everything that was written) of a program on a terminal of its own."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, env=env, cwd=ROOT)
    os.close(slave)
    seen, deadline = b"", time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            try:
                piece = os.read(master, 1 << 16)
            except OSError:
                break
            if not piece:
                break
            seen += piece
    os.close(master)
    return process.wait(timeout=10), seen.decode("utf-8", "replace")


def test_run_on_a_terminal(tmp_path):
    pytest.importorskip("jinja2", reason="the report needs jinja2")
    env = {**fake_gpu(tmp_path), "TERM": "xterm", "USER": "ann",
           "SSH_CONNECTION": "198.51.100.1 5000 203.0.113.2 2222"}  # fmt: skip
    env = {k: v for k, v in environment(env, render=True).items() if k != "COLUMNS"}
    out = tmp_path / "out"
    argv = command(out, "steady!", "--profile", "standard", "--price", "7200")
    code, text = on_terminal(argv, env, 200)
    live = re.findall(r"\r\x1b\[K(\[[^\r\n]*)(?=\r\x1b)", text)
    assert text.count("\n") < 25, "a live line is rewritten, never repeated"
    assert re.fullmatch(
        r"\[2/2\] steady  0:0\d/0:30  1 passed  case 1 of 4 61C 312W 1980MHz  \$\d\.\d\d", live[-1]
    ), live
    lines = [re.sub(r"\x1b\[K|\r", "", line) for line in text.splitlines() if line.strip()]
    assert code == 0 and lines[-1] == "exit code 0"
    last = "\n".join(lines[-9:])
    assert re.search(r"^PASS - 1/1 tests; parity 1/1; Test GPU", last, re.M)
    folder = out / "abc1234"
    packed = folder.with_name("abc1234.tgz")
    assert f"report:  {folder / 'report.md'}" in last and f"{folder / 'report.html'}  (the" in last
    assert f"bundle:  {packed}" in last
    assert f"sha256:  {hashlib.sha256(packed.read_bytes()).hexdigest()}" in last
    assert f"fetch:   scp -P 2222 ann@203.0.113.2:{packed} ." in last
    assert "you are paying until you destroy the box" in last
    everything = b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())
    assert b"203.0.113.2" not in everything and b"\x1b" not in everything


def test_how_long_the_run_will_take_yet(monkeypatch):
    """By the estimates of the stages; one that takes longer than its own adds nothing."""
    monkeypatch.setenv("COLUMNS", "99")
    stages = [Stage(name, name, ("x",), "tests", 99.0, estimate_s=60.0) for name in "abc"]
    stream = io.StringIO()
    stream.isatty = lambda: True
    progress = Progress(stages, stream)
    progress.next(), progress.next(), progress.begin(stages[1])
    progress.tick(20.0, 99.0, [])
    assert "[2/3] b  0:20/1:39, about 1:40 left" in stream.getvalue()
    progress.tick(80.0, 99.0, [])
    assert stream.getvalue().endswith("about 1:00 left")
    monkeypatch.setenv("COLUMNS", "30")
    progress.tick(81.0, 99.0, [])
    assert len(stream.getvalue().rpartition("\x1b[K")[2]) < 30, "a line that wraps is repeated"
