"""The decode bench's CUDA graphs, and the layer's whole decode step, eager and under a graph.

A graph is captured once. Before it is timed, replays must be right on other numbers in the same
memory, and at another length that only the device's counter tells them.
"""

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bench.decode_step import Step, dense_contenders
from bench.records import BenchRow
from bench.timing import Case, Contender, NotRight, measure, prove
from nsa import attention, dispatch, launches
from nsa.decode_graph import GraphUnavailable, StepGraph, why_no_graph
from nsa.module import NSAAttention

GRAPH_PATH = "graph/triton"


def capture(call: Callable[[], Any]) -> tuple[Callable[[], Any], dict[str, int]]:
    """Replay of `call` as a CUDA graph, and the Triton kernels in it.

    Raises GraphUnavailable when CUDA refuses.
    """
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        with launches.recording() as seen, torch.cuda.graph(graph):
            out = call()
    except RuntimeError as error:
        if dispatch.must_raise(error):
            raise
        first = (str(error).splitlines() or ["no reason given"])[0]
        raise GraphUnavailable(f"capture failed: {first}") from error

    def replay() -> Any:
        graph.replay()
        return out

    return replay, dict(seen)


def why_no_step_graph(step: Step) -> str | None:
    """Why this step is not timed as a graph, None when it may be."""
    why = why_no_graph(step.q, [step.cache])
    if why is None and not step.fused:
        why = "the PyTorch step reads the length on the host"
    return why


def other_length(S: int, T: int = 1) -> int:
    """A shorter context for the second check of a graph: no multiple of any block."""
    return max(T, S - S // 3 - 1)


def attention_graph(step: Step, case: Case, tools: dict[str, Any]) -> BenchRow:
    """`case` (the whole attention step) as a replayed graph against dense attention as one.

    Raises GraphUnavailable when the step cannot be captured.
    """
    why = why_no_step_graph(step)
    if why:
        raise GraphUnavailable(why)
    replay, seen = capture(case.candidate.call)
    missing = [k for k in step.kernels(in_graph=True) if not seen.get(k)]
    if missing:
        raise GraphUnavailable(f"the graph does not hold {', '.join(missing)}")
    out, rivals = replay(), []
    for one in dense_contenders(step):
        with suppress(GraphUnavailable):
            replayed, _ = capture(one.call)
            rivals.append(replace(one, name=f"{one.name} graph", call=replayed, watched=one.call))

    def spoilt(fill: Callable[[int], None]) -> Callable[[int], None]:
        def call(seed: int) -> None:
            fill(seed)
            out[0].fill_(float("nan"))  # so that what a replay left alone shows
            out[1].fill_(-(2**30))

        return call

    graphed = replace(
        case, bench="decode_graph", name=f"{case.name}/graph", refill=spoilt(step.refill),
        renew=spoilt(step.renew),
        candidate=Contender("nsa graph", replay, GRAPH_PATH), requested=GRAPH_PATH,
        baselines=rivals,
    )  # fmt: skip
    short = other_length(step.S, step.T)
    try:
        with step.at(short):
            prove(graphed, graphed.candidate, graphed.seed + 3,
                  f"a replay at {short} tokens of the graph captured at {step.S}")  # fmt: skip
    except (NotRight, ValueError) as error:
        what = graphed.bench, graphed.name, "FAILED", (str(error),)
        return BenchRow(*what, columns=case.columns).emit()
    return measure(graphed, **tools)


class ModuleStep:
    """The layer's decode step over `step`'s cache: projections to output, the cache appended to.

    Ahead of every call, outside of its time, the cache forgets the token of the call before.
    """

    def __init__(self, layer: NSAAttention, step: Step) -> None:
        self.layer, self.step, self.cache = layer, step, step.cache
        self.x = layer.qkv.weight.new_zeros(self.cache.batch, 1, layer.config.dim)
        self._chosen = step.blocks

    def rewind(self) -> None:
        if self.cache.length == self.step.S:
            self.cache.rewind(1)

    def refill(self, seed: int) -> None:
        self.step.refill(seed)
        gen = torch.Generator(self.x.device).manual_seed(seed)
        self.x.normal_(generator=gen)
        for name in ("k_raw", "v_raw"):
            self.step.draw(name, gen)

    def renew(self, seed: int) -> None:
        """Another newest token."""
        self.x.normal_(generator=torch.Generator(self.x.device).manual_seed(seed))

    def kernels(self, *, in_graph: bool = False) -> tuple[str, ...]:
        """What must run: the attention step's kernels, and the one that appends for them."""
        appended = ("_decode_append_kernel",) * self.step.fused
        return *self.step.kernels(in_graph=in_graph), *appended

    def eager(self) -> Callable[[], Tensor]:
        call = lambda: self.layer.step(self.x, self.cache)
        call.before = self.rewind  # type: ignore[attr-defined]
        call.in_a_row = self.in_a_row  # type: ignore[attr-defined]
        return call

    def in_a_row(self) -> int:
        """Steps of the tokens up to S, as many as one of which emits a compressed token."""
        S = self.step.S
        steps = min(self.layer.config.d, S)
        with self.step.at(S - steps):
            for _ in range(steps):
                self.layer.step(self.x, self.cache)
        return steps

    def graph(self, kernels: Sequence[str]) -> Callable[[], Tensor]:
        """The step as a replay. Raises GraphUnavailable, also when it lacks one of `kernels`."""
        why = why_no_step_graph(self.step)
        if why:
            raise GraphUnavailable(why)
        self.rewind()
        captured = StepGraph(lambda x: self.layer.step(x, self.cache), self.x, [self.cache])
        missing = [k for k in kernels if not captured.launches.get(k)]
        if missing:
            raise GraphUnavailable(f"the graph does not hold {', '.join(missing)}")
        self.x = captured.input
        captured.replay()  # every call finds the cache as long as the one before left it
        replay = lambda: captured.replay()
        replay.before = self.rewind  # type: ignore[attr-defined]
        return replay

    @torch.no_grad()
    def _attended(self) -> Step:
        """`step` with the queries and gates of x, after checking what the call appended."""
        layer, cache, step, at = self.layer, self.cache, self.step, self.step.S - 1
        position = torch.full((cache.batch, 1), at, device=self.x.device)
        q, new = layer._project_at(self.x, cache.angles(position))
        for name in ("k_sel", "v_sel", "k_win", "v_win"):
            row = at % getattr(cache, name).shape[1]
            got, want = step.stands_for(name, row, row + 1), getattr(new, name)
            if not step.stored_alike(got, want):
                raise ValueError(f"the step did not append its token to {name}")
        c = layer.config
        if step.S >= c.l and (step.S - c.l) % c.d == 0:  # refill() left other tokens there
            rows = torch.arange(step.S - c.l, step.S, device=self.x.device)
            for name, phi in (("k", layer.phi_k), ("v", layer.phi_v)):
                raw = step.stands_for(f"{name}_raw")
                got = step.stands_for(f"{name}_cmp", cache.emitted - 1, cache.emitted)
                if not step.stored_alike(got, phi(raw[:, rows % raw.shape[1]])):
                    raise ValueError(f"the step did not emit its token to {name}_cmp")
        step.q.copy_(q)
        step.gates.copy_(layer.gate(self.x))
        self._chosen = attention.nsa_decode(
            step.q, cache, None, step.gates, backend="triton" if step.fused else step.backend,
            flags=step.flags,
        )[1]  # fmt: skip
        return step

    def truth(self) -> Tensor:
        """Output projection of the attention's fp64 truth: [B, 1, dim]."""
        out = self._attended().total_truth(self._chosen.cpu())
        weight = self.layer.out.weight.detach().double()
        return out.flatten(-2).to(weight.device) @ weight.T

    @torch.no_grad()
    def plain(self) -> Tensor:
        return self.layer.out(self.step.total_plain(self._chosen.cpu()).flatten(-2))

    def case(self, call: Callable[[], Tensor], kind: str, total: Case, columns: dict) -> Case:
        """`call` as kind "module" or "module_graph", judged as the attention step `total` is."""
        graph = kind == "module_graph"
        ours = Contender(
            f"nsa {kind.replace('_', ' ')}", call, GRAPH_PATH if graph else self.step.path,
            () if graph else self.kernels(),
        )  # fmt: skip
        return Case(
            "decode_module", f"{total.name}/{kind}", ours, refill=self.refill,
            inputs=lambda: [self.x, *self.layer.parameters()], oracle=self.truth,
            same_dtype=self.plain, renew=self.renew,
            requested=GRAPH_PATH if graph else self.step.requested,
            columns={**columns, "step": kind},
        )  # fmt: skip


def more_rows(
    layer: NSAAttention, step: Step, total: Case, columns: dict[str, Any], tools: dict[str, Any]
) -> tuple[dict[str, BenchRow], dict[str, str]]:
    """Rows "graph", "module" and "module_graph" of one context, and why one is not there."""
    rows, missing, module = {}, {}, ModuleStep(layer, step)
    timed = lambda call, kind: measure(module.case(call, kind, total, columns), **tools)
    if step.T > 1:
        missing["module"] = "several new tokens: only the attention is timed"
    elif layer.backend != step.backend:
        missing["module"] = "the step's route is named for this call, the layer's is not"
    try:
        rows["graph"] = attention_graph(step, total, tools)
    except GraphUnavailable as error:
        missing["graph"] = str(error)
    if "module" not in missing:
        rows["module"] = timed(module.eager(), "module")
        try:
            call = module.graph(module.kernels(in_graph=True))
            rows["module_graph"] = timed(call, "module_graph")
        except GraphUnavailable as error:
            missing["module_graph"] = str(error)
    gc.collect()
    return rows, missing
