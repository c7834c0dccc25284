"""Which backends of SDPA benches compare with: those that work are right, the others say why."""

from __future__ import annotations

import math

import pytest
import torch

from bench import sdpa_baselines
from nsa import launches
from nsa.tests.helpers import randn


def _rows(Q, K, V):
    return torch.stack([
        torch.softmax(q @ k.T / math.sqrt(q.shape[-1]), -1) @ v
        for q, k, v in zip(Q, K, V, strict=True)
    ])  # fmt: skip


def test_every_baseline_that_works_is_right():
    Q, K, V = randn(5, 4, 16, seed=1), randn(5, 24, 16, seed=2), randn(5, 24, 16, seed=3)
    found = sdpa_baselines.packed_baselines(Q, K, V)
    assert {f"sdpa_math_{f}" for f in sdpa_baselines.FORMULATIONS} <= set(found.calls)
    assert set(found.calls) | set(found.refused) == {
        f"sdpa_{b}_{f}" for b in sdpa_baselines.BACKENDS for f in sdpa_baselines.FORMULATIONS
    }
    assert all(found.refused.values())
    for name, call in found.calls.items():
        with launches.recording() as launched:
            torch.testing.assert_close(call(), _rows(Q, K, V), msg=name)
        assert launched == {name: 1}


def test_a_backend_that_cannot_run_here_lends_its_name_to_no_other():
    """On a CPU: no time of `math` may stand under the name of a kernel that was never there."""
    Q, K = randn(2, 4, 16, seed=1), randn(2, 24, 16, seed=2)
    found = sdpa_baselines.packed_baselines(Q, K, K)
    gone = {f"sdpa_{b}_{f}" for b in ("efficient", "cudnn") for f in sdpa_baselines.FORMULATIONS}
    assert gone <= set(found.refused) and not gone & set(found.calls)


@pytest.mark.parametrize("text, raises", [
    ("CUDA error: unspecified launch failure", True), ("CUDA error: misaligned address", True),
    ("CUDA out of memory", False), ("No available kernel", False),
])  # fmt: skip
def test_a_baseline_that_spoils_the_device_ends_the_search(text, raises, monkeypatch):
    calls = []

    def fails(*args, **kwargs):
        calls.append(kwargs)
        raise RuntimeError(text)

    monkeypatch.setattr(sdpa_baselines, "packed_sdpa", fails)
    Q, K = randn(1, 2, 8, seed=1), randn(1, 3, 8, seed=2)
    if raises:
        with pytest.raises(RuntimeError, match=text):
            sdpa_baselines.packed_baselines(Q, K, K)
        assert len(calls) == 1
    else:
        assert set(sdpa_baselines.packed_baselines(Q, K, K).refused.values()) == {text}


def test_a_call_that_nobody_takes_is_told_with_the_reasons():
    def refuse():
        raise RuntimeError("No available kernel")

    found = sdpa_baselines.usable({"dense cudnn": refuse, "dense flash": refuse})
    assert found.calls == {}
    assert found.why_none() == (
        "dense cudnn: No available kernel; dense flash: No available kernel"
    )
    Q = randn(1, 2, 8, seed=1)
    assert sdpa_baselines.usable({"plain": lambda: Q, "none": refuse}).why_none() == ""
