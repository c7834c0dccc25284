"""The CUDA C++ selection kernel of the plan: this package builds none, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

import nsa


def test_sel_cuda_gpu():
    built = sorted(Path(nsa.__file__).parent.rglob("*.so"))
    if not built:
        pytest.skip("no CUDA extension is built: the selection kernels are Triton only")
    raise AssertionError(f"an extension is built but nothing here tests it: {built}")
