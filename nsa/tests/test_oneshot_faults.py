"""Whole runs beside what earlier and other ones left: folders, archives, cards and locks."""

from __future__ import annotations

import json
import re

import pytest

from nsa.tests import oneshot_faults
from scripts.oneshot.compare import verify


def run(out, stages, *options, env=None, **how):
    """(exit code, console, bundle folder) of a run with these fault stages."""
    done = oneshot_faults.go(out, stages, *options, env=env, **how)
    return done.code, done.console, done.folder


def bundle_of(folder):
    return json.loads((folder / "bundle.json").read_text())


def test_private_values_that_are_words_of_the_report_garble_nothing(tmp_path):
    pytest.importorskip("jinja2", reason="the report needs jinja2")
    from nsa.tests.test_oneshot_page import inert

    env = {"USER": "max", "SESSION_MODE": "stage_end", "AUTH_MODE": "required",
           "X_AUTH": "duration"}  # fmt: skip
    code, console, folder = run(tmp_path, "pass,bench", env=env, render=True)
    assert code == 0, console
    assert list(verify.check(folder)) == []
    page = (folder / "report.html").read_text()
    inert(page)
    assert "max-width" in page and "max-abs" in page
    rows = [json.loads(line) for line in (folder / "tests" / "pass.jsonl").read_text().splitlines()]
    assert all("duration_s" in row for row in rows)


def test_earlier_runs_stay_as_they_were_sealed(tmp_path):
    """What is a secret only since then changes no byte of them; their archive goes."""
    run(tmp_path, "pass")
    code, _, folder = run(tmp_path, "pass", env={"MY_TOKEN": "Test GPU"})
    (earlier,) = (folder / "prev").iterdir()
    assert code == 0 and list(verify.check(folder)) == list(verify.check(earlier)) == []
    assert "Test GPU" in (earlier / "env.txt").read_text()
    assert "Test GPU" not in (folder / "env.txt").read_text()
    archive = folder.with_name(folder.name + ".tgz")
    assert archive.exists()
    code, _, _ = run(tmp_path, "pass", fault={"kill": "stage_start:pass"})
    assert code == -9 and not archive.exists()
    assert len(list(folder.glob("prev/*/report.md"))) == 2


@pytest.fixture
def fake_gpu(tmp_path):
    """Environment of a box whose nvidia-smi answers until the file `dead` is there."""
    return oneshot_faults.fake_gpu(tmp_path)


def test_nothing_is_taken_over_from_another_card(tmp_path, fake_gpu):
    """A box of the same kind, rented again: its card has another UUID."""
    options = ("--profile", "standard", "--resume")
    for uuid, taken in (("GPU-12345678", []), ("GPU-12345678", ["pass"]), ("GPU-87654321", [])):
        smi = tmp_path / "bin" / "nvidia-smi"
        smi.write_text(re.sub(r"GPU-\d{8}", uuid, smi.read_text()))
        _, console, folder = run(tmp_path / "out", "pass!", *options, env=fake_gpu)
        assert sum(bundle_of(folder)["resumed"].values(), []) == taken, console


def test_one_run_per_gpu_whatever_the_folder(tmp_path, fake_gpu):
    from scripts.oneshot.run.lock import Lock, gpu_lock

    name = gpu_lock("GPU-12345678-9abc-def0-1234-56789abcdef0").path.name
    held = Lock(tmp_path / name, "the GPU")
    held.acquire()
    code, console, _ = run(tmp_path / "out", "pass!", "--profile", "standard", env=fake_gpu)
    assert code == 75 and "the GPU is held by process" in console
    # Another card of the box is free: the one that this run sees is asked, locked and described.
    smi = tmp_path / "bin" / "nvidia-smi"
    second = oneshot_faults.FAKE_SMI.replace("GPU-12345678", "GPU-87654321")
    second = second.replace("300.00", "250")
    smi.write_text(smi.read_text() + f"echo '{second}'\n")
    other = Lock(tmp_path / gpu_lock(second.split(",")[0]).path.name, "the GPU")
    seen, out = {**fake_gpu, "CUDA_VISIBLE_DEVICES": "1"}, tmp_path / "out-1"
    code, console, folder = run(out, "pass!", "--profile", "standard", env=seen)
    assert code == 0, console
    assert bundle_of(folder)["device"]["power_limit_w"] == 250
    other.acquire()
    code, console, _ = run(out, "pass!", "--profile", "standard", env=seen)
    assert code == 75 and "the GPU is held by process" in console
    other.release()
    held.release()
