"""Faults of a real GPU: each shows as what it is, and the stages after it work.

The other files of the campaign inject the same faults without a GPU; this one needs one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from nsa.tests import oneshot_faults
from nsa.tests.oneshot_faults import ROOT, Outcome

pytestmark = pytest.mark.usefixtures("cuda")


def start(out, stages):
    how = dict(env={"REAL_BOX": "1"}, render=True)
    return oneshot_faults.start(out, stages, "--profile", "quick", **how)


def ended(process, out, code, limit_s=240):
    """A run that ends with this code: its sanity stage is right, and its bundle verifies."""
    console, _ = process.communicate(timeout=limit_s)
    done = Outcome(process.returncode, console, out)
    assert done.code == code and done.stage("sanity")["status"] == "PASS", console
    verify = [sys.executable, "-m", "scripts.oneshot", "verify", str(done.folder)]
    said = subprocess.run(verify, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr
    return done


def test_a_kernel_that_writes_astray_takes_no_later_stage_along(tmp_path):
    done = ended(start(tmp_path, "cuda_illegal!,@sanity"), tmp_path, 4)
    astray = done.stage("cuda_illegal")
    # The driver's own word (Xid 31) comes before that of the log.
    assert astray["status"] == "CRASH" and astray["kind"] in ("CUDA_FAULT", "XID"), done.console
    assert "illegal memory access" in astray["reason"]
    assert "illegal memory access" in (done.folder / "report.md").read_text()


def test_all_memory_taken_is_told_tried_once_more_and_given_back(tmp_path):
    done = ended(start(tmp_path, "cuda_all_memory!,@sanity"), tmp_path, 4)
    full = done.stage("cuda_all_memory")
    found = full["status"], full["kind"], full["attempt"]
    assert found == ("CRASH", "OOM_DEVICE", 2), done.console


def test_a_stage_that_fits_at_half_size_is_marked(tmp_path):
    done = ended(start(tmp_path, "cuda_all_memory!+,@sanity"), tmp_path, 0)
    full = done.stage("cuda_all_memory")
    assert (full["status"], full["half_size"]) == ("PASS", True), done.console
    assert "half its sizes" in (done.folder / "report.md").read_text(), done.console


def test_memory_that_a_hung_stage_holds_is_free_for_the_next(tmp_path):
    done = ended(start(tmp_path, "cuda_hoard_and_hang!:12,@sanity"), tmp_path, 4)
    assert done.stage("cuda_hoard_and_hang")["status"] == "TIMEOUT", done.console


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_in_the_middle_of_a_bench_leaves_a_valid_report(tmp_path, name, code):
    process = start(tmp_path, "@sanity,@prefill_bench")
    journal = tmp_path / "abc1234" / "events.jsonl"
    timed = lambda: journal.exists() and '"median_us"' in journal.read_text()
    assert oneshot_faults.until(lambda: timed() or process.poll() is not None, 120) and timed()
    os.kill(process.pid, getattr(signal, name))
    done = ended(process, tmp_path, code, limit_s=10)
    assert done.stage("prefill_bench")["kind"] == "PREEMPTED", done.console
    free = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True,
        text=True,
    ).stdout.split()  # fmt: skip
    assert str(process.pid) not in free
