"""Which route may serve a branch, and why not another: pure decisions, no tensors.

decide() takes shapes, dtypes and device capabilities and gives a Decision; nsa/dispatch.py makes
the request from tensors and runs the rungs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nsa.flags import Flags


class Branch(str, enum.Enum):
    SELECTED = "selected"
    COMPRESSED = "compressed"
    SLIDING = "sliding"
    BLOCKS = "blocks"  # the choice of blocks, which has no gradient
    PREFILL = "prefill"  # all branches in one operator; its reference is the branches one by one
    TURN = "turn"  # the rotary turn of a layer's projections, a tensor per branch
    APPEND = "append"  # new tokens into the caller's caches, and the compressed ones they complete
    STEP = "step"  # one fused decode step; its reference is nsa_attention on views of the cache


class Route(str, enum.Enum):
    TRITON = "triton"
    FA2 = "fa2"
    SDPA = "sdpa"
    REFERENCE = "reference"


Backend = Literal["auto", "triton", "fa2", "sdpa", "reference"]  # how callers name a route

# FA-2 comes before Triton because it is only there when NSA_USE_FA2 asks for it.
LADDER: dict[Branch, tuple[Route, ...]] = {
    **dict.fromkeys(Branch, (Route.TRITON, Route.REFERENCE)),
    Branch.SELECTED: (Route.TRITON, Route.SDPA, Route.REFERENCE),
    Branch.COMPRESSED: (Route.FA2, Route.TRITON, Route.SDPA, Route.REFERENCE),
    Branch.SLIDING: (Route.FA2, Route.TRITON, Route.SDPA, Route.REFERENCE),
}

REASONS: dict[str, str] = {
    "not_enabled": "a flag turns this route off",
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
    "needs_grad": "a gradient is needed; NSA_SEL_TRITON_ALLOW_GRAD=0 or there is no backward "
    "(of a decode step; in forward mode)",
    "unsupported": "this combination of arguments has no kernel on this route",
    "launch_error": "the kernel failed to compile or launch",
    "wrong_branch": "the route does not serve this branch",
}

MAX_HEAD_DIM = 256  # of Dk and Dv, on the Triton and FA-2 routes

# Preferences rather than abilities: naming a route overrides them.
_PREFERENCES = frozenset({"not_enabled", "below_min_L", "below_min_len"})

# Why a GPU that has kernels runs PyTorch instead, and what to do about it. Reasons that are not
# here say that PyTorch is the faster choice, or that the GPU has no kernels.
_REMEDIES: dict[str, str] = {
    "not_enabled": "{off} turns them off; leave it out to have them",
    "force_parity": "NSA_FORCE_PARITY=1 asks for the slow reference; unset it",
    "no_triton": "Triton is not installed; install the release that torch's metadata names",
    "sm89_policy": "they are off by default on SM 8.9, where early measurements spoke for PyTorch; "
    "NSA_TRITON_SEL_FORCE=1 turns them on",
    "dtype": "they take fp16 and bf16, and the tensors are {dtype}; cast them, or use "
    "torch.autocast around the layer",
    "align8": "they take head sizes that are multiples of 8, and got Dk={d_k} and Dv={d_v}",
    "head_dim": "they take head sizes up to 256, and got Dk={d_k} and Dv={d_v}",
    "needs_grad": "{no_grad}",
    "unsupported": "no kernel takes these arguments: {detail}",
}


class RouteUnavailable(RuntimeError):
    """A route cannot serve a call; reason is one of REASONS, detail says more."""

    def __init__(self, route: Route | str, reason: str, detail: str = "") -> None:
        assert reason in REASONS, reason
        self.route, self.reason, self.detail = Route(route), reason, detail
        text = f"route {self.route.value!r} is unavailable: {reason} ({REASONS[reason]})"
        super().__init__(f"{text}: {detail}" if detail else text)

    def __reduce__(self) -> tuple[Any, ...]:  # else one of a worker process cannot come home
        return type(self), (self.route, self.reason, self.detail)


@dataclass(frozen=True)
class Request:
    """What a decision depends on; no tensors.

    key_len: keys a row may see (selected tokens, visible compressed keys, or the window), an upper
    bound that needs no device synchronisation; None for selection inside a whole attention, to
    which no threshold applies. no_fa2: why FA-2 is unusable, None if it works.
    interpret: Triton interprets kernels on CPU (only a named route uses it). forward_ad: forward-
    mode derivatives are being taken. traced: a compiler or FakeTensorMode looks at the call, and no
    value can be read; symbols: it stands for several sizes, so that nothing can go chunk by chunk.
    """

    branch: Branch
    device: str
    dtype: str
    d_k: int
    d_v: int
    key_len: int | None
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
    enabled = flags.use_triton_sel is not False if route is Route.TRITON else flags.use_fa2
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
        least = flags.fa2_min_len_win if r.branch is Branch.SLIDING else flags.fa2_min_len_cmp
        if r.key_len is not None and r.key_len < least:
            yield "below_min_len"
        return
    if r.branch is Branch.SELECTED and r.key_len is not None:
        if r.key_len < least_selected(flags, r.capability):
            yield "below_min_L"
    if r.needs_grad and (r.branch is Branch.STEP or flags.sel_triton_allow_grad is False):
        yield "needs_grad"


def least_selected(flags: Flags, capability: tuple[int, int] | None) -> int:
    """Selected tokens of a row from which selection_attention alone takes Triton on this GPU."""
    if flags.sel_triton_min_L is not None:
        return flags.sel_triton_min_L
    return 4096 if capability == (8, 9) else 64


def slow_because(request: Request, reason: str, flags: Flags, detail: str = "") -> str | None:
    """Return the sentence that tells a user of a GPU with kernels why PyTorch serves this call.

    None where there is nothing to tell: a GPU without kernels, a reason for which PyTorch is the
    better choice, or a branch whose call goes on to attention that tells it.
    """
    on_gpu = request.device == "cuda" and request.capability and request.capability >= (8, 0)
    composed = request.branch in (Branch.PREFILL, Branch.STEP, Branch.APPEND)
    if not on_gpu or composed or reason not in _REMEDIES:
        return None
    source = flags.source("use_triton_sel")
    off = "NSA_USE_TRITON_SEL=0" if source.startswith("env") else f"use_triton_sel ({source})"
    no_grad = "they have no derivatives in forward mode"
    if flags.sel_triton_allow_grad is False:
        no_grad = "NSA_SEL_TRITON_ALLOW_GRAD=0 keeps their backward off; leave it out to have it"
    why = _REMEDIES[reason].format(
        off=off, dtype=request.dtype, d_k=request.d_k, d_v=request.d_v, no_grad=no_grad,
        detail=detail,
    )  # fmt: skip
    return f"nsa: PyTorch serves instead of the GPU kernels, usually many times slower: {why}"


def decide(request: Request, flags: Flags, backend: Backend | Route | None = None) -> Decision:
    """Choose a route. backend None or "auto" walks the ladder; a name is taken or refused.

    Raises ValueError for an unknown name, RouteUnavailable when the named route cannot run.
    """
    route = parse_backend(backend)
    if route is not None:
        reason = why_not(route, request, flags, named=True)
        if reason is not None:
            raise RouteUnavailable(route, reason, _detail(route, reason, request))
        return Decision(request.branch, route, requested=route)
    rejected: list[tuple[Route, str]] = []
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


def parse_backend(backend: Backend | Route | None) -> Route | None:
    """Route for a backend argument, None for automatic. Raises ValueError for other words."""
    if backend is None or backend == "auto":
        return None
    try:
        return Route(backend)
    except ValueError:
        names = ", ".join(repr(r.value) for r in Route)
        raise ValueError(f"backend must be None, 'auto', {names}, got {backend!r}") from None


def kernel_or_reference(backend: Backend | Route | None) -> Route | None:
    """parse_backend() for what SDPA and FA-2 cannot do: to name them means plain PyTorch then."""
    route = parse_backend(backend)
    return Route.REFERENCE if route in (Route.SDPA, Route.FA2) else route
