"""Does the smallest stage of a report judge as all others do, and say what is wrong?"""

from functools import partial

import pytest
import torch

from nsa.tests import helpers
from scripts import gpu_sanity


@pytest.fixture
def sent(monkeypatch):
    return partial(helpers.sent, monkeypatch)


def test_one_bad_row_and_a_nan_are_wrong_as_in_every_other_stage(sent, capsys):
    """The mean and the largest error pass; docs/design.md holds every record to more than these."""
    ref = helpers.randn(64, 64, seed=0, dtype=torch.float64)
    same = ref.float()
    same[0, 0] += 4e-5  # PyTorch's own largest error, which allows twice as much anywhere
    row = ref.float()
    row[7] += 6e-5
    report = lambda out: sent(gpu_sanity.report, "x", out, ref, same, "torch", 5)
    good, (record,) = report(row)
    assert not good and record["status"] == "FAIL" and record["seed"] == 5
    assert record["worst_row_index"] == [7] and "row [7] has mean error" in record["why"][0]
    assert "BAD  x" in capsys.readouterr().out
    row = ref.float()
    row[1, 2] = float("nan")
    good, (record,) = report(row)
    assert not good and "NaN at 1 other places, first [1, 2]" in record["why"][0]
    assert report(ref.float())[0]


def test_a_kernel_that_was_never_launched_proves_nothing(sent):
    x = torch.ones(4, 4)
    report = partial(gpu_sanity.report, kernels=("_axpy_kernel",))
    call = lambda counts: sent(report, "x", x, x.double(), x, "triton", 1, counts)
    assert call({})[1][0]["status"] == call({"_other": 1})[1][0]["status"] == "INVALID"
    assert call({"_axpy_kernel": 1})[0]


def test_a_box_without_cuda_is_told_once(sent, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, rows = sent(gpu_sanity.main, [])
    assert code == 3 and capsys.readouterr().err == "torch sees no CUDA device\n"
    assert rows == [{"kind": "note", "level": "warn", "text": "torch sees no CUDA device"}]


def test_interpreting_is_what_the_library_takes_for_it(monkeypatch, capsys):
    """TRITON_INTERPRET=true counts as well as 1."""
    monkeypatch.setenv("TRITON_INTERPRET", "true")
    for name in ("matmul", "triton_axpy", "selection"):
        monkeypatch.setattr(gpu_sanity, name, lambda *args: True)
    assert gpu_sanity.main(["--interpret"]) == 0
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(SystemExit):
        gpu_sanity.main(["--interpret"])
    assert "--interpret needs TRITON_INTERPRET=1" in capsys.readouterr().err


def test_the_three_proofs_hold_here_and_name_their_seeds(sent, kernel_device):
    half = [torch.float16]
    checks = {gpu_sanity.matmul: half, gpu_sanity.triton_axpy: [], gpu_sanity.selection: half}
    for seed, (check, more) in enumerate(checks.items()):
        good, rows = sent(check, kernel_device, *more)
        assert good and [r["seed"] for r in rows if r["kind"] == "parity"] == [seed], rows
