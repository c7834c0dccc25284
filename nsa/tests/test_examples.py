"""Do the files in examples/ run, and do they show what they say?"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples").glob("*.py"))


def run(name: str, *args: str) -> str:
    path = ROOT / "examples" / f"{name}.py"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, path, *args], capture_output=True, text=True, env=env, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(text: str, line: str) -> list[float]:
    """The two numbers of a line `LINE: loss A -> B`."""
    found = next(x for x in text.splitlines() if x.startswith(line))
    return [float(x) for x in found.split("loss ")[1].split(" -> ")]


def test_every_example_is_run_here():
    assert [x.stem for x in FILES] == ["functions", "huggingface", "serve", "train"]


def test_functions():
    assert "merged; gradient of q" in run("functions")


def test_serving_from_shared_pages():
    assert run("serve") == "3 requests of [108, 75, 91] tokens in 12 pages; without sharing 18\n"


@pytest.mark.nightly  # test_train.py resumes what it trained
def test_training_resumes_from_what_it_saved(tmp_path):
    args = "--save", str(tmp_path / "model.pt"), "--steps"
    text = run("train", *args, "30")
    assert text.startswith("step 0: loss 5.5")  # ln 256: it knows nothing yet
    again = run("train", *args, "1")
    assert float(again.splitlines()[0].split()[-1]) < 4


@pytest.mark.nightly  # test_transformers.py trains such models, in a tenth of the time
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
def test_a_dense_model_goes_on_with_nsa():
    text = run("huggingface")
    begin, end = losses(text, "nsa, from the same weights")
    assert end < begin / 2
    assert losses(text, "dense, from the same weights")[1] < 0.1
