"""StepGraph: one decode step captured as a CUDA graph and replayed at every later length."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from nsa import dispatch, launches
from nsa.cache import NSACache
from nsa.dispatch import Branch, Route


class GraphUnavailable(RuntimeError):
    """Why a step cannot be captured here."""


def why_no_graph(tensor: Tensor, caches: Sequence[NSACache]) -> str | None:
    """Why no step over these caches can be captured, None when one may be."""
    if not tensor.is_cuda:
        return f"a CUDA graph needs a CUDA device, got {tensor.device.type}"
    for cache in caches:
        if cache.growable:
            return "a growing cache moves its buffers: give max_len"
        if cache.count_reads:
            return "count_reads keeps a tensor per step, which a replay does not"
    return None


@contextlib.contextmanager
def _at_every_length(caches: Sequence[NSACache]) -> Iterator[None]:
    """Steps inside do the work of every length, and leave the lengths as they were.

    What they wrote beyond them stays, and rewind() knows of it: cache.highest is not put back.
    """
    before = [(cache.emit_always, list(cache.lengths), cache.lens.clone()) for cache in caches]
    for cache in caches:
        cache.emit_always = True
    try:
        yield
    finally:
        for cache, (always, lengths, lens) in zip(caches, before, strict=True):
            cache.emit_always, cache.lengths = always, lengths
            cache.lens.copy_(lens)


@contextlib.contextmanager
def _uncached_autocast() -> Iterator[None]:
    """Weights that autocast cast once and keeps would be freed with it, under the graph's feet."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class StepGraph:
    """step(x) over `caches`, captured once for the shape of `example` and then replayed.

    step must read positions from the caches alone, as NSAAttention.step, NSABlock.step and
    NSALanguageModel.step do with x of T <= max_step tokens: `lambda x: layer.step(x, cache)`. The
    caches keep what they hold. Calling the graph runs one step and returns the output's own
    buffer, which the next call overwrites. `launches` are the Triton kernels in the graph.

    Raises GraphUnavailable off CUDA, for caches that grow or count, and when a step would not take
    the fused kernels at every length: the PyTorch routes read the length on the host.
    """

    def __init__(
        self, step: Callable[[Tensor], Tensor], example: Tensor, caches: Sequence[NSACache]
    ) -> None:
        why = why_no_graph(example, caches)
        if why:
            raise GraphUnavailable(why)
        self.caches, self.input = list(caches), example.clone()
        self.tokens = example.shape[1]
        self._fits()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(example.device), torch.no_grad(), _uncached_autocast():
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(3):  # compile, and let libraries take their workspaces
                    with _at_every_length(self.caches), dispatch.trace() as taken:
                        step(self.input)
            current.wait_stream(side)
            self._fused(taken)
            torch.cuda.synchronize()
            with (
                _at_every_length(self.caches), launches.recording() as seen,
                dispatch.trace() as taken,
            ):  # fmt: skip
                try:
                    with torch.cuda.graph(self.graph):
                        self.output = step(self.input)
                except RuntimeError as error:
                    if dispatch.must_raise(error):
                        raise
                    first = (str(error).splitlines() or ["no reason given"])[0]
                    raise GraphUnavailable(f"capture failed: {first}") from error
            self._fused(taken)
        self.launches = dict(seen)

    def _fused(self, taken: Sequence[dispatch.Decision]) -> None:
        steps = [t for t in taken if t.branch is Branch.STEP]
        for t in steps:
            if t.route is not Route.TRITON:
                why = dispatch.REASONS[t.fallback_reason or "unsupported"]
                raise GraphUnavailable(f"the fused decode step is not taken: {why}")
        if len(steps) != len(self.caches):
            raise GraphUnavailable(
                f"{len(steps)} fused decode steps ran for {len(self.caches)} caches"
            )

    def _fits(self) -> None:
        for cache in self.caches:
            cache._check_room(self.tokens)

    def __call__(self, x: Tensor) -> Tensor:
        """One step from x, which has the example's shape. Raises ValueError when it is full."""
        if x.shape != self.input.shape:
            raise ValueError(f"x must be {list(self.input.shape)}, got {list(x.shape)}")
        self.input.copy_(x)
        return self.replay()

    def replay(self) -> Tensor:
        """One step from what `input` holds. Raises ValueError when a cache is full."""
        self._fits()
        self.graph.replay()
        for cache in self.caches:
            cache.mark_written(self.tokens)
            cache.lengths = [n + self.tokens for n in cache.lengths]
        return self.output
