"""The public interface, and which kernels calls launch, are what nsa/tests/locks says."""

from __future__ import annotations

import importlib.util

import pytest

from nsa import dispatch
from scripts import lock

SAYS = "is not what nsa/tests/locks says: `make lock`, and say in the commit what changed"


def test_the_public_interface_is_the_locks():
    assert lock.api() == (lock.LOCKS / "api.txt").read_text().splitlines(), SAYS


@pytest.mark.skipif(
    dispatch.interpreting() or importlib.util.find_spec("triton") is None,
    reason="calls are planned as for a compiler",
)
@pytest.mark.parametrize("arch", lock.CALLS_OF)
def test_calls_launch_what_the_lock_says(arch):
    every = (lock.LOCKS / "calls.txt").read_text().splitlines()
    want = [line for line in every if line.startswith(f"sm_{arch} ")]
    assert len(want) > 30
    assert lock.apart("--calls", arch).splitlines() == want, SAYS
