"""Is Triton selection off on SM 8.9 unless forced, and only there?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from nsa.dispatch import Branch, Request, Route, RouteUnavailable, decide
from nsa.flags import Flags

ADA = Request(
    Branch.SELECTED, "cuda", "float16", 64, 64, 8192, capability=(8, 9), no_fa2=None
)


@pytest.mark.parametrize("branch", list(Branch))
def test_ada_takes_the_fallback_with_the_policy_as_reason(branch):
    decision = decide(replace(ADA, branch=branch), Flags())
    assert decision.route is not Route.TRITON
    assert (Route.TRITON, "sm89_policy") in decision.rejected


def test_force_overrides_the_policy_but_no_explicit_no():
    assert decide(ADA, Flags(triton_sel_force=True)).route is Route.TRITON
    off = Flags(triton_sel_force=True, use_triton_sel=False)
    assert decide(ADA, off).fallback_reason == "not_enabled"


def test_named_triton_needs_force_too():
    with pytest.raises(RouteUnavailable, match="sm89_policy"):
        decide(ADA, Flags(), "triton")
    assert decide(ADA, Flags(triton_sel_force=True), "triton").route is Route.TRITON


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 7), (9, 0), (10, 0), (12, 0)])
def test_other_architectures_are_not_touched(capability):
    request = replace(ADA, capability=capability)
    assert decide(request, Flags()).route is Route.TRITON
