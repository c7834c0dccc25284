"""selection_attention_triton() on CPU tensors: right, and on packed SDPA."""

from __future__ import annotations

import pytest
import torch

from bench.parity import assert_parity
from nsa import dispatch
from nsa.flags import Flags
from nsa.kernels.triton_sel_kernel import selection_attention_triton
from nsa.tests.helpers import HOSTILE_RANGE_KINDS, RANGE_KINDS, make_ranges, randn
from nsa.tests.sel_cases import oracle_ranges, plain_ranges

ON = Flags(use_triton_sel=True, sel_triton_min_L=1)


def inputs(dtype=torch.float32, B=1, S=4, G=2, h=2, Skv=70, D=16, Dv=24):
    return (
        randn(B, S, G, h, D, seed=41, dtype=dtype), randn(B, G, Skv, D, seed=42, dtype=dtype),
        randn(B, G, Skv, Dv, seed=43, dtype=dtype),
    )  # fmt: skip


@pytest.mark.parametrize("kind", RANGE_KINDS + HOSTILE_RANGE_KINDS)
def test_packed_sdpa_serves_cpu_tensors(kind):
    q, k, v = inputs()
    ranges = make_ranges(kind, 1, 4, 2, 70, 40, seed=4)
    with dispatch.trace() as taken:
        out = selection_attention_triton(q, k, v, ranges, flags=ON)
    assert [(d.route.value, d.fallback_reason) for d in taken] == [("sdpa", "no_cuda")]
    assert_parity(
        f"cpu-{kind}", "fwd", out, oracle_ranges(q, k, v, ranges), plain_ranges(q, k, v, ranges),
        path_requested="sdpa", path_taken=taken[0].route.value,
    )  # fmt: skip


@pytest.mark.parametrize(
    "flags, route, reason",
    [
        (Flags(), "sdpa", "no_cuda"),
        (Flags(use_sel_pack=False), "reference", "no_cuda"),
        (Flags(force_parity=True), "reference", "force_parity"),
    ],
)
def test_routes_of_the_flags(flags, route, reason):
    q, k, v = inputs()
    ranges = make_ranges("many", 1, 4, 2, 70, 40)
    with dispatch.trace() as taken:
        out = selection_attention_triton(q, k, v, ranges, flags=flags)
    assert [(d.route.value, d.fallback_reason) for d in taken] == [(route, reason)]
    torch.testing.assert_close(out.double(), oracle_ranges(q, k, v, ranges), rtol=1e-4, atol=1e-5)


def test_flags_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("NSA_USE_SEL_PACK", "0")
    q, k, v = inputs()
    with dispatch.trace() as taken:
        selection_attention_triton(q, k, v, make_ranges("few", 1, 4, 2, 70, 40))
    assert taken[0].route.value == "reference"


@pytest.mark.parametrize("D", [12, 20])
def test_head_sizes_that_no_kernel_takes_still_work(D):
    q, k, v = inputs(D=D, Dv=D)
    ranges = make_ranges("mixed", 1, 4, 2, 70, 40)
    out = selection_attention_triton(q, k, v, ranges, flags=ON)
    torch.testing.assert_close(out.double(), oracle_ranges(q, k, v, ranges), rtol=1e-4, atol=1e-5)


def test_softmax_scale_and_strided_inputs():
    q, k, v = inputs(torch.float64)
    ranges = make_ranges("mixed", 1, 4, 2, 70, 40)
    scaled = selection_attention_triton(q, k, v, ranges, softmax_scale=0.5)
    torch.testing.assert_close(scaled, oracle_ranges(q * 0.5 * 4, k, v, ranges))
    turned = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    torch.testing.assert_close(
        selection_attention_triton(*turned, ranges), selection_attention_triton(q, k, v, ranges)
    )


@pytest.mark.skipif(dispatch.interpreting(), reason="named routes run in the interpreter")
def test_a_named_triton_route_is_refused_on_cpu():
    q, k, v = inputs(torch.float16)
    with pytest.raises(dispatch.RouteUnavailable) as refused:
        selection_attention_triton(
            q, k, v, make_ranges("few", 1, 4, 2, 70, 40), flags=ON, backend="triton"
        )
    assert refused.value.reason == "no_cuda"
