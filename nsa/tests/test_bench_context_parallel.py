"""The context-parallel bench on CPU processes: it proves what it times, and refuses bad lengths."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import bench_context_parallel
from nsa import launches

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--S_list", "64", "--l", "8", "--d", "4", "--l_sel", "16", "--n_sel", "3", "--w", "20"]


def test_two_ranks_are_checked_and_timed(tmp_path):
    target = tmp_path / "rows.csv"
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "--", "bench/bench_context_parallel.py", *SMALL, "--iters", "3", "--csv", str(target),
         "--directions", "fwd,bwd,decode"],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    rows = list(csv.DictReader(target.open()))
    assert [row["direction"] for row in rows] == ["fwd", "bwd", "decode"]
    for row in rows:
        assert row["world"] == "2" and row["parity"] == "PASS" and row["path"] == "reference"
        wall, alone = float(row["ms"]), float(row["base_ms"])
        assert float(row["efficiency"]) == pytest.approx(alone / (2 * wall), rel=1e-4)
        assert float(row["mae"]) < 1e-5
    steps = rows[-1]  # a query sends 4 lses, probabilities of 8 tokens, 2 * 4 rows of 17 numbers
    assert int(steps["sent_bytes"]) == 4 * (4 + 2 * 8 + 2 * 4 * 17)
    assert float(steps["tokens_per_s"]) == pytest.approx(1e3 / float(steps["ms"]), rel=1e-4)


@pytest.fixture
def alone():
    """The whole sequence on this rank, on the reference."""
    args = bench_context_parallel.parse(SMALL)
    return bench_context_parallel.Sequence1(args, 64, None, torch.device("cpu"))


def test_timed_steps_do_their_work(monkeypatch):
    """One that returns what an earlier step had, or what is off by a little, is told."""
    args = bench_context_parallel.parse([*SMALL, "--iters", "3"])
    x, clocked = bench_context_parallel.made(args, 64, "decode", None, torch.device("cpu"))
    found = clocked(None, 1)
    assert not found.why and found.judged[0].status == "PASS" and len(found.samples) == 3
    assert len(found.left) == 3 * bench_context_parallel.STEPS
    real, first = x.step, x.step()
    monkeypatch.setattr(x, "step", lambda: first)
    assert "what an earlier one had returned" in "; ".join(clocked(None, 1).why)
    monkeypatch.setattr(x, "step", lambda: (real()[0] * 1.01, real()[1]))
    assert clocked(None, 1).judged[0].status == "FAIL"


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_timed_calls_do_their_work(direction, alone, monkeypatch):
    """One that returns what an earlier call had computed, or what is off by a little, is told."""
    real, kept = alone.forward, []
    time = lambda: bench_context_parallel.timed(alone, direction, 4, None, 1)
    found = time()
    assert not found.why and found.judged[0].status == "PASS" and len(found.samples) == 4

    def every_second():
        if len(kept) % 2 == 0:
            kept.append(real())
        else:
            kept.append(kept[-1])
        return kept[-1]

    if direction == "fwd":
        monkeypatch.setattr(alone, "forward", every_second)
        assert "what an earlier one had returned" in "; ".join(time().why)
    monkeypatch.setattr(alone, "forward", lambda: real() * 1.01)
    assert time().judged[0].status == "FAIL"


def test_timed_calls_launch_the_same_kernels(alone, monkeypatch):
    real, n = alone.forward, iter(range(99))

    def sometimes():
        if next(n) % 3:
            launches.bump("_planted_kernel")
        return real()

    monkeypatch.setattr(alone, "forward", sometimes)
    found = bench_context_parallel.timed(alone, "fwd", 4, None, 1)
    assert found.why == ["timed calls launched different kernels"]
