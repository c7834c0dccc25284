"""Faults of a real GPU: each shows as what it is, and the stages after it work.

The other files of the campaign inject the same faults without a GPU; this one needs one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from nsa.tests import oneshot_faults
from nsa.tests.oneshot_faults import ROOT, Outcome

pytestmark = pytest.mark.usefixtures("cuda")


def finish(process, out, limit_s=240):
    """(exit code, console, stages by name, folder) of a started run."""
    console, _ = process.communicate(timeout=limit_s)
    done = Outcome(process.returncode, console, out)
    return done.code, console, {s["id"]: s for s in done.bundle["stages"]}, done.folder


def start(out, stages):
    how = dict(env={"REAL_BOX": "1"}, render=True)
    return oneshot_faults.start(out, stages, "--profile", "quick", **how)


def verified(folder):
    done = subprocess.run(
        [sys.executable, "-m", "scripts.oneshot", "verify", str(folder)], cwd=ROOT,
        capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode == 0, done.stdout + done.stderr


def test_a_kernel_that_writes_astray_takes_no_later_stage_along(tmp_path):
    code, console, stages, folder = finish(start(tmp_path, "cuda_illegal!,@sanity"), tmp_path)
    astray = stages["cuda_illegal"]
    # The driver's own word (Xid 31) comes before that of the log.
    assert astray["status"] == "CRASH" and astray["kind"] in ("CUDA_FAULT", "XID"), console
    assert "illegal memory access" in astray["reason"]
    assert stages["sanity"]["status"] == "PASS", console
    assert code == 4 and verified(folder)[0], verified(folder)[1]
    assert "illegal memory access" in (folder / "report.md").read_text()


def test_all_memory_taken_is_told_tried_once_more_and_given_back(tmp_path):
    code, console, stages, folder = finish(start(tmp_path, "cuda_all_memory!,@sanity"), tmp_path)
    full = stages["cuda_all_memory"]
    assert (full["status"], full["kind"], full["attempt"]) == ("CRASH", "OOM_DEVICE", 2), console
    assert stages["sanity"]["status"] == "PASS", console
    assert code == 4 and verified(folder)[0], verified(folder)[1]


def test_a_stage_that_fits_at_half_size_is_marked(tmp_path):
    code, console, stages, folder = finish(start(tmp_path, "cuda_all_memory!+,@sanity"), tmp_path)
    full = stages["cuda_all_memory"]
    assert (full["status"], full["half_size"]) == ("PASS", True), console
    assert code == 0 and "half its sizes" in (folder / "report.md").read_text(), console


def test_memory_that_a_hung_stage_holds_is_free_for_the_next(tmp_path):
    names = "cuda_hoard_and_hang!:12,@sanity"
    code, console, stages, folder = finish(start(tmp_path, names), tmp_path)
    assert stages["cuda_hoard_and_hang"]["status"] == "TIMEOUT", console
    assert stages["sanity"]["status"] == "PASS" and code == 4, console
    assert verified(folder)[0], verified(folder)[1]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_in_the_middle_of_a_bench_leaves_a_valid_report(tmp_path, name, code):
    process = start(tmp_path, "@sanity,@prefill_bench")
    journal = tmp_path / "abc1234" / "events.jsonl"
    timed = lambda: journal.exists() and '"median_us"' in journal.read_text()
    assert oneshot_faults.until(timed, 120)
    sent = time.monotonic()
    os.kill(process.pid, getattr(signal, name))
    got, console, stages, folder = finish(process, tmp_path, 30)
    assert got == code and time.monotonic() - sent < 10, console
    assert stages["sanity"]["status"] == "PASS", console
    assert stages["prefill_bench"]["kind"] == "PREEMPTED", console
    assert verified(folder)[0], verified(folder)[1]
    free = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"], capture_output=True,
        text=True,
    ).stdout.split()  # fmt: skip
    assert str(process.pid) not in free
