"""The launchers' own code and choices, for a GPU that is not here: do the kernels compile and fit?

On a CPU nothing else runs the launchers of the kernels for Hopper.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsa import dispatch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(
        dispatch.interpreting(), reason="TRITON_INTERPRET=1 replaces the compiler"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
]


def run(code, tmp_path):
    return subprocess.run(
        [sys.executable, "-c", "import gc, sys\ngc.disable()\n"  # as in test_aot_compile.py
         f"from scripts import compile_as_launched as c\n{code}"],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
        env={**os.environ, "TRITON_CACHE_DIR": os.fspath(tmp_path)},
    )  # fmt: skip


def test_a_tile_that_does_not_fit_is_a_failure(tmp_path):
    done = run(
        "c.SHARED_LIMIT[120] = 9000\n"
        "c.grid = lambda arch, quick: [(c.decode, (1, 1, 16, 64, 64, c.BF16, 8192))]\n"
        'sys.exit(c.main(["--arch", "120"]))', tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAILED: decode(1, 1, 16" in done.stdout and "shared memory" in done.stdout
    assert "1 failed" in done.stdout


SAME = """
import functools, sys, torch
c.pretend(90, {})
torch.autograd.set_multithreading_enabled(False)
from bench import bench_prefill as bench
from bench.roofline import Shape
from nsa.kernels import launch
from nsa.plans import plan_call

for name in ("Prefill", "Pack", "Projections"):  # which are on the GPU by default
    setattr(bench, name, functools.partial(getattr(bench, name), device="cpu"))
bench.dense_calls = lambda x: []
bench.check_key_gradients = lambda *args: None
shape = Shape(512, 1, 32, 2, 128, 128, 32, 16, 64, 16, 128)
cells = [(op, way) for op in bench.OPS for way in ("fwd", "bwd") if (op, way) != ("select", "bwd")]
known = set()
for cell in cells:
    planned = plan_call(functools.partial(bench.call_once, shape, *cell)).launches
    known |= {(id(one.memory), one.key) for one in planned}
seen = []

def met(memory, key, kernel, *_):
    seen.append(kernel.__name__)
    if (id(memory), key) not in known:
        print("not compiled before:", kernel.__name__, key)

launch._launch = met
for cell in cells:
    case = bench.case_of(shape, *cell, {})
    case.refill(1)
    for contender in (case.candidate, *case.baselines):
        contender.call()
print(len(set(seen)), "kernels")
"""


def test_what_a_prefill_bench_launches_was_compiled_before(tmp_path):
    """Compiled side by side, and never again: by the very keys that launches are known by."""
    done = run(SAME, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    *missing, last = done.stdout.splitlines()
    assert not missing and int(last.split()[0]) > 20
