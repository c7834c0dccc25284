"""Which implementation runs a branch, and why not another: the one fallback ladder.

decide() is pure: shapes, dtypes and device capabilities in, a Decision out. run() walks the ladder
for an automatic choice and is strict for a named route. Kernels are imported inside their rung, so
a CPU run never loads Triton.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nsa.flags import Flags, get_flags
from nsa.log import enabled, log, once


class Branch(str, enum.Enum):
    SELECTED = "selected"
    COMPRESSED = "compressed"
    SLIDING = "sliding"
    BLOCKS = "blocks"  # the choice of blocks, which has no gradient
    PREFILL = "prefill"  # all branches in one operator; its reference is the branches one by one
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
    "needs_grad": "a gradient is needed; NSA_SEL_TRITON_ALLOW_GRAD is off or there is no backward",
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
    interpret: Triton interprets kernels on CPU (only a named route uses it).
    """

    branch: Branch
    device: str
    dtype: str
    d_k: int
    d_v: int
    key_len: int
    needs_grad: bool = False
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
    if route is Route.FA2:
        least = (
            flags.fa2_min_len_win if r.branch is Branch.SLIDING else flags.fa2_min_len_cmp
        )
        if r.key_len < least:
            yield "below_min_len"
        return
    if r.branch in (Branch.SELECTED, Branch.PREFILL) and r.key_len < flags.sel_triton_min_L:
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


# ---- from tensors to a request -------------------------------------------------------------------


@functools.cache
def _device_name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """True when Triton was asked to interpret kernels on CPU (TRITON_INTERPRET=1)."""
    import os

    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def resolve_flags(flags: Flags | None, tensor: Tensor) -> Flags:
    """`flags`, or those of this process for the device that holds `tensor`."""
    if flags is not None:
        if not isinstance(flags, Flags):
            raise TypeError(f"flags must be an nsa.Flags, got {type(flags).__name__}")
        return flags
    return get_flags(_device_name(tensor.device.index) if tensor.is_cuda else None)


def needs_grad(*tensors: Tensor | None) -> bool:
    """True when autograd would record an operation on any of the tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def make_request(
    branch: Branch, q: Tensor, k: Tensor, v: Tensor, key_len: int, flags: Flags,
    backend: str | Route | None = None,
) -> Request:  # fmt: skip
    """Describe a call. FA-2 is probed only where it could be taken."""
    request = Request(
        branch=branch, device=q.device.type, dtype=str(q.dtype).removeprefix("torch."),
        d_k=q.shape[-1], d_v=v.shape[-1], key_len=key_len, needs_grad=needs_grad(q, k, v),
        capability=_capability(q.device.index) if q.is_cuda else None, has_triton=_has_triton(),
        interpret=interpreting(), no_fa2=None,
    )  # fmt: skip
    if why_not(Route.FA2, request, flags, named=parse_backend(backend) is Route.FA2) is None:
        from nsa.kernels import fa2

        request = replace(request, no_fa2=fa2.probe().why_not)
    return request


# ---- running -------------------------------------------------------------------------------------

_trace: list[list[Decision]] = []


@contextlib.contextmanager
def trace() -> Iterator[list[Decision]]:
    """Collect the decisions really taken inside the block, fallbacks after errors included."""
    taken: list[Decision] = []
    _trace.append(taken)
    try:
        yield taken
    finally:
        _trace[:] = [t for t in _trace if t is not taken]


# After one of these every later CUDA call of the process fails too: falling back would only hide
# where it happened.
_STICKY = (
    "illegal memory access",
    "device-side assert",
    "misaligned address",
    "unspecified launch failure",
    "illegal instruction",
    "invalid address space",
    "hardware stack error",
    "uncorrectable",
    "context is destroyed",
)


def must_raise(error: BaseException) -> bool:
    """True for errors that no fallback may hide: out of memory and sticky CUDA errors."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return "out of memory" in text or any(word in text for word in _STICKY)


def guarded(
    request: Request, rungs: Mapping[Route, Callable[[], Any]], flags: Flags,
    backend: str | Route | None = None,
) -> tuple[Any, Decision]:  # fmt: skip
    """Run the first rung that may and can: (its result, the decision as it was really taken).

    A named backend runs alone and its error is the caller's. Otherwise an error of a rung other
    than the reference is logged (`<branch>.<route>.fallback reason=`) and the next rung runs;
    out of memory and sticky CUDA errors are raised.
    """
    decision = decide(request, flags, backend)
    rejected = list(decision.rejected)
    for route, reason in rejected:
        _log_fallback(request, route, reason, flags)
    ladder = LADDER[request.branch]
    for route in ladder[ladder.index(decision.route) :]:
        if route is not decision.route:
            reason = why_not(route, request, flags)
            if reason is not None:
                rejected.append((route, reason))
                continue
        try:
            result = rungs[route]()
        except Exception as error:
            if decision.requested is not None or route is Route.REFERENCE or must_raise(error):
                raise
            reason = "launch_error"
            if isinstance(error, RouteUnavailable):
                reason = error.reason
            elif isinstance(error, NotImplementedError):
                reason = "unsupported"
            rejected.append((route, reason))
            _log_fallback(request, route, reason, flags, error)
            continue
        taken = replace(decision, route=route, rejected=tuple(rejected))
        log(f"{request.branch.value}.path", flags=flags, route=route.value,
            requested=taken.requested and taken.requested.value)  # fmt: skip
        for sink in _trace:
            sink.append(taken)
        return result, taken
    raise AssertionError("the reference route always ends the ladder")


_LOG_PREFIX = {
    Branch.SELECTED: "sel",
    Branch.COMPRESSED: "cmp",
    Branch.SLIDING: "win",
    Branch.BLOCKS: "blocks",
    Branch.PREFILL: "prefill",
    Branch.STEP: "decode",
}


def _log_fallback(
    r: Request, route: Route, reason: str, flags: Flags, error: Exception | None = None
) -> None:
    prefix = "fa2" if route is Route.FA2 else f"{_LOG_PREFIX[r.branch]}.{route.value}"
    extra: dict[str, Any] = {"branch": r.branch.value} if route is Route.FA2 else {}
    if reason in ("below_min_L", "below_min_len"):
        extra["L"] = r.key_len
    if reason == "below_min_L":
        extra["min_L"] = flags.sel_triton_min_L
    if reason == "dtype":
        extra["dtype"] = r.dtype
    if error is not None:
        extra["error"] = f"{type(error).__name__}: {error}"[:300]
    log(f"{prefix}.fallback", flags=flags, reason=reason, **extra)


def log_device(device: torch.device, flags: Flags) -> None:
    """Log the device that Triton selection runs on, once (`sel.triton.device`)."""
    if device.type == "cuda":
        major, minor = _capability(device.index)
        once("sel.triton.device", device.index, flags=flags,
             name=_device_name(device.index), sm=f"{major}.{minor}")  # fmt: skip


def run(
    branch: Branch, args: dict[str, Any], flags: Flags, backend: str | Route | None = None,
    *, key_len: int,
) -> tuple[Any, Decision]:  # fmt: skip
    """Run one branch on checked arguments (see nsa/attention.py, which checks them)."""
    from nsa import rungs

    q, k, v = args["q"], args["k"], args["v"]
    request = make_request(branch, q, k, v, key_len, flags, backend)
    calls = {
        route: functools.partial(call, args, flags) for route, call in rungs.RUNGS[branch].items()
    }
    # Autocast would turn the fp32 scores of the PyTorch rungs into bf16; inputs decide the dtype.
    with torch.autocast(q.device.type, enabled=False):
        result, decision = guarded(request, calls, flags, backend)
        tag = f"{_LOG_PREFIX[branch]}.{decision.route.value}"
        if decision.route is Route.TRITON:
            log_device(q.device, flags)
        if enabled(f"{tag}.shapes", flags):
            shapes = {n: f"{list(t.shape)}/{list(t.stride())}" for n, t in zip("qkv", (q, k, v),
                      strict=True)}  # fmt: skip
            log(f"{tag}.shapes", flags=flags, **{n: s.replace(" ", "") for n, s in shapes.items()})
        if enabled(f"{tag}.compare", flags) and branch in _COMPARED:
            _log_error(tag, branch, args, result, flags)
    return result, decision


_WHOLE = (Branch.COMPRESSED, Branch.BLOCKS, Branch.SELECTED, Branch.SLIDING)


def by_branch(flags: Flags) -> bool:
    """True when a setting works branch by branch, so that PREFILL is not taken unless named."""
    return flags.use_fa2 or flags.debug_compare or flags.debug_shapes or flags.debug_timing


def run_prefill(
    args: dict[str, Any], by_branches: Callable[[], tuple[Tensor, dict[str, Any]]], flags: Flags,
    backend: str | Route | None,
) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """All branches in one Triton operator where every one of them would go that way.

    Otherwise, and when the operator fails for want of a kernel, by_branches(): each branch then
    takes its own ladder and says why. FA-2 and the debug flags work by branch.
    """
    from nsa import rungs

    q, k, v = args["tensors"][0], args["tensors"][3], args["tensors"][4]
    sizes = args["sizes"]
    key_len = min(sizes["n_sel"] * sizes["l_sel"], k.shape[-3])
    request = make_request(Branch.PREFILL, q, k, v, key_len, flags, backend)
    request = replace(request, needs_grad=needs_grad(*args["tensors"]))
    route = parse_backend(backend)
    named = route is Route.TRITON
    if (
        route not in (None, Route.TRITON) or (by_branch(flags) and not named)
        or why_not(Route.TRITON, request, flags, named=named) is not None
    ):  # fmt: skip
        return by_branches()
    rungs_here: dict[Route, Callable[[], Any]] = {
        Route.TRITON: lambda: rungs.prefill_triton(args), Route.REFERENCE: by_branches
    }  # fmt: skip
    with torch.autocast(q.device.type, enabled=False):
        (out, aux), decision = guarded(request, rungs_here, flags, backend)
    if decision.route is Route.TRITON:
        log_device(q.device, flags)
        aux = {**aux, "routes": {branch.value: Route.TRITON.value for branch in _WHOLE}}
    return out, aux


_COMPARED = (Branch.SELECTED, Branch.COMPRESSED, Branch.SLIDING)


@torch.no_grad()
def _log_error(tag: str, branch: Branch, args: dict[str, Any], result: Any, flags: Flags) -> None:
    """Log the error of `result` against the reference in fp64 (NSA_DEBUG_COMPARE, slow)."""
    from nsa import rungs

    wide = {**args, **{n: args[n].double() for n in ("q", "k", "v")}}
    want = rungs.RUNGS[branch][Route.REFERENCE](wide, flags)
    if isinstance(result, tuple):
        result, want = result[0], want[0]
    error = (result.double() - want).abs()
    worst = error.max().item() if error.numel() else 0.0
    log(f"{tag}.compare", flags=flags, mae=error.mean().item(), max_abs=worst)
