"""Streams, files and folders that are not what a run expects, each by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.oneshot import streams
from scripts.oneshot.box import env
from scripts.oneshot.record import journal
from scripts.oneshot.record.gate import gate
from scripts.oneshot.record.journal import Ballast, read_events
from scripts.oneshot.record.redact import Redactor

ROOT = Path(__file__).resolve().parents[2]


def test_words_that_nobody_can_hear_are_no_error(monkeypatch):
    for stream in (open("/dev/full", "w"), None, open(os.devnull)):
        monkeypatch.setattr(sys, "stderr", stream)
        streams.say("a word")


def test_the_set_up_speaks_to_a_full_stream():
    code = "import scripts.setup_env as s\nraise SystemExit(s.main(['--run', '-x']))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=full)
    assert done.returncode == 2


def test_the_last_line_that_is_an_answer():
    assert streams.last_answer('{"a": 1}\n{"b": 2}\nbye\n[1]\n3\n') == {"b": 2}
    assert streams.last_answer("bye") is None


# ---- files and folders ---------------------------------------------------------------------------


def test_a_pipe_is_no_file(tmp_path):
    for name in ("events.jsonl", ".ballast", "new.csv"):
        os.mkfifo(tmp_path / name)
    assert read_events(tmp_path / "events.jsonl") == []
    ballast = Ballast(tmp_path)
    assert ballast.path.stat().st_size == journal.BALLAST_BYTES
    ballast.drop()
    outcome = gate(tmp_path, Redactor({}, hostnames=(), user="", home="/home/alice"))
    assert outcome["removed"] == ["events.jsonl", "new.csv"] and outcome["gate"] == "clean"


# ---- home and cards ------------------------------------------------------------------------------


def test_kernels_are_kept_where_a_user_without_a_home_can_write(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", {"HOME": "/"})
    env.settle_triton_cache(tmp_path)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / ".triton")
    for home in ("~", str(tmp_path / "file" / "x")):  # no passwd entry, or none to write to
        (tmp_path / "file").write_text("x")
        monkeypatch.setattr(os, "environ", {})
        monkeypatch.setattr(os.path, "expanduser", lambda _, home=home: home)
        env.settle_triton_cache(tmp_path)
        assert env.triton_cache() == tmp_path / ".triton"
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os.path, "expanduser", lambda _: str(tmp_path))
    env.settle_triton_cache(tmp_path)
    assert os.environ == {} and (tmp_path / ".triton" / "cache").is_dir()


CARDS = [{"uuid": f"GPU-{n}", "name": f"card {n}", "driver": "580.1", "mem_mib": 80000,
          "power_limit_w": 700, "sm": "9.0"} for n in (11111111, 22222222)]  # fmt: skip
LISTED = """GPU 0: card (UUID: GPU-11111111)
  MIG 1g.10gb Device 0: (UUID: MIG-aaaa)
GPU 1: card (UUID: GPU-22222222)
  MIG 1g.10gb Device 0: (UUID: MIG-bbbb)
"""


@pytest.mark.parametrize(("visible", "uuid", "memory", "mig", "sm"), [
    ("", "GPU-11111111", 80000, False, "9.0"), ("1", "GPU-22222222", 80000, False, "9.0"),
    ("GPU-2222", "GPU-22222222", 80000, False, "9.0"), ("MIG-bbbb", "MIG-bbbb", None, True, "9.0"),
    ("MIG-GPU-22222222/1/0", "MIG-GPU-22222222/1/0", None, True, "9.0"),
    ("MIG-cccc", "MIG-cccc", None, True, None), ("GPU-3333", "GPU-3333", None, False, None),
])  # fmt: skip
def test_a_slice_is_not_its_card(monkeypatch, visible, uuid, memory, mig, sm):
    monkeypatch.setattr(env, "command", lambda *_, **__: LISTED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert env.visible_gpu(CARDS, os.environ)["uuid"] == uuid
    device = env.device_facts(CARDS, {})
    assert (device["mem_mib"], device["mig"], device["sm"]) == (memory, mig, sm)
    assert device["driver"] == "580.1" and (device["power_limit_w"] is None) == (memory is None)
    json.dumps(device)
