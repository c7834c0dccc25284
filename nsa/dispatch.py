"""The one fallback ladder: requests from tensors, and the rungs that run (nsa/routes.py decides).

run() walks the ladder for an automatic choice and is strict for a named route. It is given the
rungs and knows none of them; they import kernels when they are called, so a CPU run never loads
Triton.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa import failed
from nsa.blocks import is_symbol, smaller
from nsa.checks import autocast_on, is_fake, needs_grad, takes_forward_derivatives
from nsa.device import capability, log_device, resolve_flags
from nsa.errors import must_raise, told
from nsa.flags import Flags
from nsa.log import enabled, log, warn_once
from nsa.routes import (
    LADDER,
    REASONS,
    Backend,
    Branch,
    Decision,
    Request,
    Route,
    RouteUnavailable,
    decide,
    kernel_or_reference,
    least_selected,
    parse_backend,
    slow_because,
    why_not,
)
from nsa.untraced import constant

__all__ = [
    "LADDER", "REASONS", "Backend", "Branch", "Decision", "Request", "Route", "RouteUnavailable",
    "decide", "guarded", "interpreting", "kernel_or_reference", "least_selected", "log_device",
    "make_request", "must_raise", "observed", "parse_backend", "resolve_flags", "run",
    "run_prefill", "trace", "warn_launch_error", "why_not",
]  # fmt: skip


_has_triton = constant(functools.cache(lambda: importlib.util.find_spec("triton") is not None))


@constant
def interpreting() -> bool:
    """True when Triton was asked to interpret kernels on CPU (TRITON_INTERPRET=1)."""
    import os

    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def make_request(
    branch: Branch, q: Tensor, k: Tensor, v: Tensor, key_len: int | None, flags: Flags,
    backend: Backend | Route | None = None,
) -> Request:  # fmt: skip
    """Describe a call. FA-2 is probed only where it could be taken."""
    traced = torch.compiler.is_compiling() or is_fake(q)
    request = Request(
        branch=branch, device=q.device.type, dtype=str(q.dtype).removeprefix("torch."),
        d_k=q.shape[-1], d_v=v.shape[-1], key_len=key_len, needs_grad=needs_grad(q, k, v),
        forward_ad=takes_forward_derivatives(), traced=traced,
        symbols=traced and any([is_symbol(n) for n in (*q.shape, *k.shape)]),
        capability=capability(q.device.index) if q.is_cuda else None, has_triton=_has_triton(),
        interpret=interpreting(), no_fa2=None,
    )  # fmt: skip
    if why_not(Route.FA2, request, flags, named=parse_backend(backend) is Route.FA2) is None:
        from nsa.kernels import fa2

        request = replace(request, no_fa2=fa2.probe().why_not)
    return request


class _Sink:
    """The decisions that one trace() collects, and the thread that asked for them. None is every
    thread: asking who runs would break a graph that torch.compile traces."""

    def __init__(self, owner: int | None) -> None:
        self.owner = owner
        self.taken: list[Decision] = []


# Threads add and remove theirs while others do: by single operations on the list alone.
_sinks: list[_Sink] = []


@contextlib.contextmanager
def trace() -> Iterator[list[Decision]]:
    """Collect the decisions really taken inside the block, fallbacks after errors included.

    Those of the thread that opened the block, and those of threads that Python did not start: on a
    GPU, autograd recomputes checkpointed layers in threads of its own, which serve every caller of
    backward(), so that two threads which train at a time find these of each other as well.
    """
    owner = None if torch.compiler.is_compiling() else threading.get_ident()
    sink = _Sink(owner)
    _sinks.append(sink)
    try:
        yield sink.taken
    finally:
        _sinks.remove(sink)


@contextlib.contextmanager
def trace_step() -> Iterator[None]:
    """Where decisions are collected, let those inside the block be one of a decode step too: that
    of the first call which no kernel served, if there is one."""
    if not _sinks:
        yield
        return
    with trace() as taken:
        yield
    slow = [one for one in taken if one.route is not Route.TRITON]
    _record(replace((slow or taken)[0], branch=Branch.STEP))


def _record(decision: Decision) -> None:
    here = None if torch.compiler.is_compiling() else threading.current_thread()
    anyone = here is None or isinstance(here, threading._DummyThread)
    for sink in list(_sinks):
        if anyone or sink.owner is None or sink.owner == threading.get_ident():
            sink.taken.append(decision)


def watched(flags: Flags) -> bool:
    """Does a trace(), a log line or a forward derivative depend on how a call is dispatched?"""
    return bool(
        _sinks or flags.debug_log or flags.debug_timing or flags.debug_shapes
        or flags.debug_compare or takes_forward_derivatives()
    )  # fmt: skip


def observed(flags: Flags, q: Tensor) -> bool:
    """Is a call watched(), or does it need a gradient?"""
    return watched(flags) or (q.requires_grad and torch.is_grad_enabled())


def guarded(
    request: Request, rungs: Mapping[Route, Callable[[], Any]], flags: Flags,
    backend: Backend | Route | None = None, args: Any = None,
) -> tuple[Any, Decision]:  # fmt: skip
    """Run the first rung that may and can: (its result, the decision as it was really taken).

    A named backend runs alone and its error is the caller's; arguments that it has no kernel for
    are RouteUnavailable. Otherwise an error of a rung other than the reference is logged (as
    `sel.triton.fallback reason=`, by branch and route) and the next rung runs. A kernel that fails,
    and a GPU that runs PyTorch although it has kernels, is a RuntimeWarning too, once per cause;
    a kernel that fails is not tried again for calls of this kind (failed.py; args: what tells calls
    of one request apart). Out of memory and sticky CUDA errors are raised.
    """
    decision = decide(request, flags, backend)
    rejected = list(decision.rejected)
    for route, reason in rejected:
        _log_fallback(request, route, reason, flags)
        if route is Route.TRITON:
            _tell_slow(request, reason, flags)
    ladder = LADDER[request.branch]
    for route in ladder[ladder.index(decision.route) :]:
        if route is not decision.route:
            refused = why_not(route, request, flags)
            if refused is not None:
                rejected.append((route, refused))
                continue
        if decision.requested is None and (known := failed.known(route, request, flags, args)):
            rejected.append((route, "launch_error"))
            _log_fallback(request, route, "launch_error", flags, known)
            continue
        try:
            result = rungs[route]()
        except Exception as error:
            if route is Route.REFERENCE or must_raise(error):
                raise
            if decision.requested is not None:
                if isinstance(error, NotImplementedError):
                    raise RouteUnavailable(route, "unsupported", str(error)) from error
                raise
            reason = "launch_error"
            if isinstance(error, RouteUnavailable):
                reason = error.reason
            elif isinstance(error, NotImplementedError):
                reason = "unsupported"
            rejected.append((route, reason))
            text = told(error)
            _log_fallback(request, route, reason, flags, text)
            if reason == "launch_error":
                failed.remember(route, request, flags, args, text)
                warn_launch_error(f"{request.branch.value} on {route.value}", text)
            elif route is Route.TRITON:
                _tell_slow(request, reason, flags, str(error))
            continue
        taken = decision
        if route is not decision.route:
            taken = replace(decision, route=route, rejected=tuple(rejected))
        log(f"{_LOG_PREFIX[request.branch]}.path", flags=flags, route=route.value,
            requested=taken.requested and taken.requested.value)  # fmt: skip
        if _sinks:
            _record(taken)
        return result, taken
    raise AssertionError("the reference route always ends the ladder")


_LOG_PREFIX = {branch: branch.value for branch in Branch} | {
    Branch.SELECTED: "sel", Branch.COMPRESSED: "cmp", Branch.SLIDING: "win", Branch.STEP: "decode"
}  # fmt: skip


def _log_fallback(
    r: Request, route: Route, reason: str, flags: Flags, error: str | None = None
) -> None:
    prefix = "fa2" if route is Route.FA2 else f"{_LOG_PREFIX[r.branch]}.{route.value}"
    extra: dict[str, Any] = {"branch": r.branch.value} if route is Route.FA2 else {}
    if reason in ("below_min_L", "below_min_len"):
        extra["L"] = r.key_len
    if reason == "below_min_L":
        extra["min_L"] = least_selected(flags, r.capability)
    if reason == "dtype":
        extra["dtype"] = r.dtype
    if error is not None:
        extra["error"] = error
    log(f"{prefix}.fallback", flags=flags, reason=reason, **extra)


def _tell_slow(request: Request, reason: str, flags: Flags, detail: str = "") -> None:
    text = slow_because(request, reason, flags, detail)
    if text is not None:
        _warn_once(text)


# What is traced is told while it is traced, and costs the graph nothing.
_warn_once = constant(warn_once)


def warn_launch_error(what: str, error: str) -> None:
    """Say once per error, with no debug flag, that a slower route serves instead of a kernel."""
    warn_once(f"nsa: {what} failed, another route serves instead: {error}")


def _inputs_decide(device: torch.device) -> contextlib.AbstractContextManager:
    """No autocast inside: it would turn the fp32 scores of the PyTorch rungs into bf16."""
    if autocast_on(device):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


Rungs = Mapping[Route, Callable[[dict[str, Any], Flags], Any]]  # of a branch: (args, flags)


def calls(rungs: Rungs, args: dict[str, Any], flags: Flags) -> dict[Route, Callable[[], Any]]:
    """The rungs as guarded() takes them, with their arguments."""
    return {route: functools.partial(rung, args, flags) for route, rung in rungs.items()}


def run(
    branch: Branch, rungs: Rungs, args: dict[str, Any], flags: Flags,
    backend: Backend | Route | None = None, *, key_len: int | None,
) -> tuple[Any, Decision]:  # fmt: skip
    """Run one branch by one of its rungs on checked arguments (see nsa/attention.py)."""
    q, k, v = args["q"], args["k"], args["v"]
    request = make_request(branch, q, k, v, key_len, flags, backend)
    with _inputs_decide(q.device):
        result, decision = guarded(request, calls(rungs, args, flags), flags, backend, args)
        tag = f"{_LOG_PREFIX[branch]}.{decision.route.value}"
        if decision.route is Route.TRITON:
            log_device(q.device, flags)
        if enabled(f"{tag}.shapes", flags):
            shapes = {n: f"{list(t.shape)}/{list(t.stride())}" for n, t in zip("qkv", (q, k, v),
                      strict=True)}  # fmt: skip
            log(f"{tag}.shapes", flags=flags, **{n: s.replace(" ", "") for n, s in shapes.items()})
        if enabled(f"{tag}.compare", flags) and branch in _COMPARED:
            _log_error(tag, rungs[Route.REFERENCE], args, result, flags)
    return result, decision


_WHOLE = (Branch.COMPRESSED, Branch.BLOCKS, Branch.SELECTED, Branch.SLIDING)


def by_branch(flags: Flags) -> bool:
    """True when a setting works branch by branch, so that PREFILL is not taken unless named."""
    return flags.use_fa2 or flags.debug_compare or flags.debug_shapes or flags.debug_timing


def run_prefill(
    args: dict[str, Any], triton: Callable[[dict[str, Any], Flags], tuple[Tensor, dict[str, Any]]],
    by_branches: Callable[[], tuple[Tensor, dict[str, Any]]], flags: Flags,
    backend: Backend | Route | None,
) -> tuple[Tensor, dict[str, Any], bool]:  # fmt: skip
    """All branches in one Triton operator, triton(args, flags), where each would go that way.

    Otherwise, and when the operator fails for want of a kernel, by_branches(): each branch then
    takes its own ladder and says why. FA-2 and the debug flags work by branch. Returns also whether
    it was one operator.
    """
    q, k, v = args["tensors"][0], args["tensors"][3], args["tensors"][4]
    sizes = args["sizes"]
    key_len = smaller(sizes["n_sel"] * sizes["l_sel"], k.shape[-3])
    request = make_request(Branch.PREFILL, q, k, v, key_len, flags, backend)
    request = replace(request, needs_grad=needs_grad(*args["tensors"]))
    route = parse_backend(backend)
    named = route is Route.TRITON
    if (
        route not in (None, Route.TRITON) or (by_branch(flags) and not named)
        or why_not(Route.TRITON, request, flags, named=named) is not None
    ):  # fmt: skip
        return *by_branches(), False
    whole = functools.partial(triton, args, flags)
    rungs: dict[Route, Callable[[], Any]] = {Route.TRITON: whole, Route.REFERENCE: by_branches}
    with _inputs_decide(q.device):
        (out, aux), decision = guarded(request, rungs, flags, backend, args)
    one = decision.route is Route.TRITON
    if one:
        log_device(q.device, flags)
        aux = {**aux, "routes": {branch.value: Route.TRITON.value for branch in _WHOLE}}
    return out, aux, one


_COMPARED = (Branch.SELECTED, Branch.COMPRESSED, Branch.SLIDING)


@torch.no_grad()
def _log_error(
    tag: str, rung: Callable[[dict[str, Any], Flags], Any], args: dict[str, Any], result: Any,
    flags: Flags,
) -> None:  # fmt: skip
    """Log the error of `result` against the reference's rung in fp64 (NSA_DEBUG_COMPARE, slow)."""
    wide = {**args, **{n: args[n].double() for n in ("q", "k", "v")}}
    want = rung(wide, flags)
    if isinstance(result, tuple):
        result, want = result[0], want[0]
    error = (result.double() - want).abs()
    worst = error.max().item() if error.numel() else 0.0
    log(f"{tag}.compare", flags=flags, mae=error.mean().item(), max_abs=worst)
