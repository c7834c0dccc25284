"""Which route may serve a branch, and why not another: pure decisions, no tensors.

decide() takes shapes, dtypes and device capabilities and gives a Decision; nsa/dispatch.py makes
the request from tensors and runs the rungs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from nsa.flags import Flags


class Branch(str, enum.Enum):
    SELECTED = "selected"
    COMPRESSED = "compressed"
    SLIDING = "sliding"
    BLOCKS = "blocks"  # the choice of blocks, which has no gradient
    PREFILL = "prefill"  # all branches in one operator; its reference is the branches one by one
    TURN = "turn"  # the rotary turn of a layer's projections, a tensor per branch
    STEP = "step"  # one fused decode step; its reference is nsa_attention on views of the cache


class Route(str, enum.Enum):
    TRITON = "triton"
    FA2 = "fa2"
    SDPA = "sdpa"
    REFERENCE = "reference"


# FA-2 comes before Triton because it is only there when NSA_USE_FA2 asks for it.
LADDER: dict[Branch, tuple[Route, ...]] = {
    Branch.SELECTED: (Route.TRITON, Route.SDPA, Route.REFERENCE),
    Branch.COMPRESSED: (Route.FA2, Route.TRITON, Route.SDPA, Route.REFERENCE),
    Branch.SLIDING: (Route.FA2, Route.TRITON, Route.SDPA, Route.REFERENCE),
    Branch.BLOCKS: (Route.TRITON, Route.REFERENCE),
    Branch.PREFILL: (Route.TRITON, Route.REFERENCE),
    Branch.TURN: (Route.TRITON, Route.REFERENCE),
    Branch.STEP: (Route.TRITON, Route.REFERENCE),
}

REASONS: dict[str, str] = {
    "not_enabled": "the flag that enables this route is off",
    "force_parity": "NSA_FORCE_PARITY=1 allows the reference only",
    "no_cuda": "the tensors are not on a CUDA device",
    "no_triton": "Triton is not installed",
    "no_fa2": "no FA-2 implementation works here",
    "sm89_policy": "SM 8.9: Triton selection is off unless NSA_TRITON_SEL_FORCE=1",
    "capability": "the GPU is older than this route supports",
    "dtype": "the dtype is not fp16 or bf16",
    "align8": "Dk or Dv is not a multiple of 8",
    "head_dim": "Dk or Dv is over 256",
    "below_min_L": "the selected length is below NSA_SEL_TRITON_MIN_L",
    "below_min_len": "the key length is below NSA_FA2_MIN_LEN_*",
    "needs_grad": "a gradient is needed; NSA_SEL_TRITON_ALLOW_GRAD is off or there is no backward "
    "(forward-mode derivatives have none)",
    "unsupported": "this combination of arguments has no kernel on this route",
    "launch_error": "the kernel failed to compile or launch",
    "wrong_branch": "the route does not serve this branch",
}

MAX_HEAD_DIM = 256  # of Dk and Dv, on the Triton and FA-2 routes

# Preferences rather than abilities: naming a route overrides them.
_PREFERENCES = frozenset({"not_enabled", "below_min_L", "below_min_len"})


class RouteUnavailable(RuntimeError):
    """A route cannot serve a call; reason is one of REASONS, detail says more."""

    def __init__(self, route: Route | str, reason: str, detail: str = "") -> None:
        assert reason in REASONS, reason
        self.route, self.reason, self.detail = Route(route), reason, detail
        text = f"route {self.route.value!r} is unavailable: {reason} ({REASONS[reason]})"
        super().__init__(f"{text}: {detail}" if detail else text)


@dataclass(frozen=True)
class Request:
    """What a decision depends on; no tensors.

    key_len: keys a row may see (selected tokens, visible compressed keys, or the window), an upper
    bound that needs no device synchronisation. no_fa2: why FA-2 is unusable, None if it works.
    interpret: Triton interprets kernels on CPU (only a named route uses it). forward_ad: forward-
    mode derivatives are being taken. traced: a compiler looks at the call and no value can be read;
    symbols: it stands for several sizes, so that nothing can go chunk by chunk.
    """

    branch: Branch
    device: str
    dtype: str
    d_k: int
    d_v: int
    key_len: int
    needs_grad: bool = False
    forward_ad: bool = False
    traced: bool = False
    symbols: bool = False
    capability: tuple[int, int] | None = None
    has_triton: bool = True
    interpret: bool = False
    no_fa2: str | None = "not probed"


@dataclass(frozen=True)
class Decision:
    """The route to take and the reasons of those passed over, in ladder order."""

    branch: Branch
    route: Route
    rejected: tuple[tuple[Route, str], ...] = ()
    requested: Route | None = None

    @property
    def fallback_reason(self) -> str | None:
        """Why the first route of the ladder was not taken, None if it was."""
        return self.rejected[0][1] if self.rejected else None


def why_not(route: Route, request: Request, flags: Flags, *, named: bool = False) -> str | None:
    """The first reason against `route`, None if it may run. `named` waives mere preferences."""
    for reason in _reasons(route, request, flags, named):
        if not (named and reason in _PREFERENCES):
            return reason
    return None


def _reasons(route: Route, r: Request, flags: Flags, named: bool) -> Iterator[str]:
    if route not in LADDER[r.branch]:
        yield "wrong_branch"
    if route is Route.REFERENCE:
        return
    if flags.force_parity:
        yield "force_parity"
    if route is Route.SDPA:
        if r.branch is Branch.SELECTED and not flags.use_sel_pack:
            yield "not_enabled"
        by_values = r.branch is Branch.SELECTED and (r.traced or r.device == "meta")  # packing is
        if by_values or r.symbols:
            yield "unsupported"
        return
    enabled = flags.use_triton_sel if route is Route.TRITON else flags.use_fa2
    if not enabled:
        yield "not_enabled"
    if r.device != "cuda" and not (named and route is Route.TRITON and r.interpret):
        yield "no_cuda"
    if route is Route.TRITON and not r.has_triton:
        yield "no_triton"
    if route is Route.FA2 and r.no_fa2 is not None:
        yield "no_fa2"
    if r.capability is not None:
        if r.capability < (8, 0):
            yield "capability"
        if route is Route.TRITON and r.capability == (8, 9) and not flags.triton_sel_force:
            yield "sm89_policy"
    if r.dtype not in ("float16", "bfloat16"):
        yield "dtype"
    if r.d_k % 8 or r.d_v % 8:
        yield "align8"
    if max(r.d_k, r.d_v) > MAX_HEAD_DIM:
        yield "head_dim"
    if r.forward_ad:
        yield "needs_grad"
    if route is Route.FA2:
        least = (
            flags.fa2_min_len_win if r.branch is Branch.SLIDING else flags.fa2_min_len_cmp
        )
        if r.key_len < least:
            yield "below_min_len"
        return
    # The fused operators take no part in this: packed SDPA is not what they stand against.
    if r.branch is Branch.SELECTED and r.key_len < flags.sel_triton_min_L:
        yield "below_min_L"
    if r.needs_grad and (r.branch is Branch.STEP or not flags.sel_triton_allow_grad):
        yield "needs_grad"


def decide(request: Request, flags: Flags, backend: str | Route | None = None) -> Decision:
    """Choose a route. backend None or "auto" walks the ladder; a name is taken or refused.

    Raises ValueError for an unknown name, RouteUnavailable when the named route cannot run.
    """
    route = parse_backend(backend)
    if route is not None:
        reason = why_not(route, request, flags, named=True)
        if reason is not None:
            raise RouteUnavailable(route, reason, _detail(route, reason, request))
        return Decision(request.branch, route, requested=route)
    rejected = []
    for candidate in LADDER[request.branch]:
        reason = why_not(candidate, request, flags)
        if reason is None:
            return Decision(request.branch, candidate, tuple(rejected))
        rejected.append((candidate, reason))
    raise AssertionError("the reference route is never refused")


def _detail(route: Route, reason: str, r: Request) -> str:
    if reason == "no_fa2":
        return str(r.no_fa2)
    return {
        "no_cuda": f"device {r.device}",
        "dtype": f"got {r.dtype}",
        "align8": f"got Dk={r.d_k} Dv={r.d_v}",
        "head_dim": f"got Dk={r.d_k} Dv={r.d_v}",
        "capability": f"got SM {r.capability}",
        "wrong_branch": f"{route.value} for the {r.branch.value} branch",
    }.get(reason, "")


def parse_backend(backend: str | Route | None) -> Route | None:
    """Route for a backend argument, None for automatic. Raises ValueError for other words."""
    if backend is None or backend == "auto":
        return None
    try:
        return Route(backend)
    except ValueError:
        names = ", ".join(repr(r.value) for r in Route)
        raise ValueError(f"backend must be None, 'auto', {names}, got {backend!r}") from None
