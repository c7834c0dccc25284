"""A call that was made before is made again from a record of its launches.

A launcher chooses kernels, tiles and workspaces from shapes, types and flags alone, which takes the
host far longer than the launches themselves. So the second call of a kind is recorded: what it
allocates, what it sets to zero, which kernels it launches on what. From the third on the record is
played: one workspace, the outputs, and the launches, which are one CUDA graph where all memory lies
as it lay before. A call that does anything else with a tensor is not recorded, and takes its
launcher every time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from nsa import launches
from nsa.arrival import selection_is_awaited
from nsa.flags import get_flags
from nsa.kernels import launch
from nsa.kernels.graph import Graph, Lanes, zero
from nsa.kernels.record import Memory, Output, Place, Recorder, Refused, Step, Zeroing

ALIGNED = 256  # bytes, of what lies in a workspace; PyTorch's own memory is aligned as finely
# Workspaces are allocated at once up to here; larger ones would leave the allocator with holes, and
# a call that needs them keeps the GPU busy for longer than any launcher takes.
LARGEST = 1 << 30
# Code made by TorchInductor allocates with this, on the current device, in half of the time.
_empty_strided = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
MOST = 1024
MOST_GRAPHS = 1024  # of all records together
_SEEN, _REFUSED = "seen once", "not to be recorded"
_generation = 0
_graphs: list[dict] = []  # each record's, once for each that it has


def forget() -> None:
    """Forget all records, so that launchers choose anew: for whoever changes what they go by."""
    global _generation
    _generation += 1


class Record:
    """What a call allocates, sets to zero and launches, to be done again on other tensors."""

    def __init__(self, seen: Recorder, outputs: list[Output], several: bool) -> None:
        """several: the call returns a tuple. Raises Refused where the workspace is too large."""
        self.outputs, self.several = outputs, several
        self.device, self.names = seen.device, [s.name for s in seen.steps if isinstance(s, Step)]
        kept = {x.memory for x in outputs}
        self.kept = [n for n in sorted(kept) if n >= 0]
        inner = {
            n: m for n, m in enumerate(seen.memories) if m is not None and m.last >= 0
            and n not in kept
        }  # fmt: skip
        _hold_between_forks(seen.steps, [*inner.values()])
        zeroed = [m for m in inner.values() if m.zeroed]  # before the first step
        end = 0  # of what they take at the beginning of the workspace
        for memory in zeroed:
            memory.first, memory.offset = 0, -(-end // ALIGNED) * ALIGNED
            end = memory.offset + memory.size
        self.size = _placed([m for m in inner.values() if not m.zeroed], zeroed)
        if self.size > LARGEST:
            raise Refused("a workspace that is too large")
        self.inner = [(n, m.offset) for n, m in inner.items()]
        first = [Place(n, 0) for n, m in inner.items() if m.zeroed][:1]  # where the others follow
        begin = [Zeroing(place, end) for place in first]
        for n in self.kept:
            if seen.memories[n].zeroed:
                begin.append(Zeroing(Place(n, 0), seen.memories[n].size))
        self.steps = [*begin, *seen.steps]
        # Triton allocates this at every launch, which no graph does.
        scratch = ("global_scratch_size", "profile_scratch_size")
        about = [getattr(s.made, "metadata", None) for s in seen.steps if isinstance(s, Step)]
        self.alone = any(getattr(of, name, 0) for of in about for name in scratch)
        self.sizes = {n: seen.memories[n].size for n in self.kept}
        self.memories = len(seen.memories)
        alone = {n: [x for x in outputs if x.memory == n] for n in self.kept}
        self.whole = {
            n for n, of in alone.items() if len(of) == 1
            and not any(isinstance(x, Zeroing) and x.place.memory == n for x in self.steps)
            and math.prod(of[0].shape) * of[0].dtype.itemsize == self.sizes[n]
        }  # fmt: skip
        # By where everything begins: the launches there, None where they cannot be a graph, or
        # that it was seen once.
        self.graphs: dict[tuple[int, ...], Graph | str | None] = {}

    def play(self, addresses: list[int]) -> Any:
        """Make the call on inputs at these addresses."""
        bases = addresses + [0] * (self.memories - len(addresses))
        made: dict[int, Tensor] = {}
        results = []
        for number in self.kept:
            if number not in self.whole:
                made[number] = x = _empty((self.sizes[number],), (1,), torch.uint8, self.device)
                bases[number] = x.data_ptr()
        for memory, dtype, shape, stride, offset in self.outputs:
            if memory in made:
                x = made[memory].view(dtype).as_strided(shape, stride, offset)
            else:
                x = _empty(shape, stride, dtype, self.device)
                if memory >= 0:
                    bases[memory] = x.data_ptr()
            results.append(x)
        room = None
        if self.size:
            room = _empty((self.size,), (1,), torch.uint8, self.device)
            begin = room.data_ptr()
            for number, offset in self.inner:
                bases[number] = begin + offset
        self._launch(bases, room, made)
        return tuple(results) if self.several else results[0]

    def _launch(self, bases: list[int], room: Tensor | None, made: dict[int, Tensor]) -> None:
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        done = False
        if not launch.hooked():  # a hook is told of every launch
            capturing = torch.cuda.is_current_stream_capturing()
            done = (self._into_graph if capturing else self._by_graph)(bases, stream)
        if not done:
            for step in self.steps:
                if isinstance(step, Step):
                    launch.run(step.made, step.grid, stream, step.prepared(bases))
                    continue
                number, offset = step.place
                whole = made.get(number)
                if whole is None:
                    whole, offset = room, bases[number] - room.data_ptr() + offset
                whole[offset : offset + step.size].zero_()
        launches.bump(*self.names)

    def _by_graph(self, bases: list[int], stream: int) -> bool:
        """Launch on memory that came before, as a loop's soon does; False where it did not."""
        if self.alone:
            return False
        key = tuple(bases)
        found = self.graphs.get(key, "")  # asked once: another thread may clear it any time
        if found == "":
            if len(_graphs) >= MOST_GRAPHS:
                for kept in _graphs:
                    kept.clear()
                _graphs.clear()
            self.graphs[key] = _SEEN
            _graphs.append(self.graphs)
            return False
        try:
            if found == _SEEN:
                captured = lambda on: self._on(bases, on, Lanes(on))
                found = self.graphs[key] = Graph(captured)
            if isinstance(found, Graph):
                found.launch(stream)
        except MemoryError:  # which the driver takes for it; nothing was launched
            found = self.graphs[key] = None
        except (OSError, RuntimeError):
            if isinstance(found, Graph):
                raise
            found = self.graphs[key] = None
        return found is not None

    def _into_graph(self, bases: list[int], stream: int) -> bool:
        """Launch into the graph that the caller captures; False where the driver cannot."""
        try:
            lanes = Lanes(stream)
        except (OSError, RuntimeError):
            return False
        self._on(bases, stream, lanes)
        return True

    def _on(self, bases: list[int], stream: int, lanes: Lanes) -> None:
        """Launch on a stream that captures; lanes: that stream's."""
        for step in self.steps:
            lanes.to(step.lane)
            if isinstance(step, Step):
                launch.run(step.made, step.grid, stream, step.prepared(bases))
            else:
                number, offset = step.place
                zero(bases[number] + offset, step.size, stream)
        lanes.to(None)


def _empty(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    if _empty_strided is not None and device.type == "cuda":
        return _empty_strided(shape, stride, dtype)
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _hold_between_forks(steps: list[Step | Zeroing], memories: list[Memory]) -> None:
    """Let what a lane uses live as long as all lanes beside it do, which may run at any time."""
    forks: dict[int, list[int]] = {}
    for n, step in enumerate(steps):
        if step.lane is not None:
            forks.setdefault(step.lane[0], []).append(n)
    for memory in memories:
        for lived in forks.values():
            if lived[0] <= memory.first <= lived[-1]:
                memory.first = lived[0]
            if lived[0] <= memory.last <= lived[-1]:
                memory.last = lived[-1]


def _placed(memories: list[Memory], fixed: list[Memory]) -> int:
    """Give memories their offsets, so that none that live at one time overlap; the bytes of all."""
    done = fixed.copy()
    for memory in sorted(memories, key=lambda m: -m.size):
        beside = [m for m in done if m.first <= memory.last and memory.first <= m.last]
        offset = 0
        for other in sorted(beside, key=lambda m: m.offset):
            if offset + memory.size <= other.offset:
                break
            end = other.offset + other.size
            offset = max(offset, -(-end // ALIGNED) * ALIGNED)
        memory.offset = offset
        done.append(memory)
    return max([m.offset + m.size for m in done], default=0)


def replayed(launcher: Callable) -> Callable:
    """Return a launcher whose calls are recorded and played.

    launcher: of positional arguments (tensors, numbers, lists of numbers, None), the first a
    tensor; it launches by launch(), and chooses by the arguments' shapes, strides, types and
    alignment, by numbers, flags and PyTorch's deterministic mode alone.
    """
    calls: dict[tuple, Any] = {}
    chosen_by: tuple = ()

    @functools.wraps(launcher)
    def call(*args: Any, **named: Any) -> Any:
        nonlocal chosen_by
        first = args[0] if args else None
        if named or not playable(first):
            return launcher(*args, **named)
        flags = get_flags()
        if chosen_by != (flags, _generation) or len(calls) >= MOST:
            calls.clear()
            chosen_by = (flags, _generation)
        key, tensors, addresses = _key(args)
        found = calls.get(key)
        if isinstance(found, Record):
            try:
                return found.play(addresses)
            except torch.OutOfMemoryError:  # nothing was launched; in smaller pieces it may fit
                return launcher(*args)
        if found is None:
            result = launcher(*args)
            calls[key] = _SEEN
            return result
        if found is _REFUSED:
            return launcher(*args)
        with Recorder(tensors) as seen, launch.recorded(seen):
            result = launcher(*args)
        try:
            calls[key] = Record(seen, seen.outputs(result), isinstance(result, tuple))
        except Refused as why:
            if str(why) != launch.NOT_COMPILED:
                calls[key] = _REFUSED
        return result

    return call


def playable(x: Any) -> bool:
    """Return whether calls on this tensor may be recorded, here and now."""
    return on_this_gpu(x) and not launch.busy() and not selection_is_awaited()


def on_this_gpu(x: Any) -> bool:
    """Return whether x is a tensor on the current device, a GPU."""
    return getattr(x, "is_cuda", False) and x.device.index == torch.cuda.current_device()


def _key(args: tuple) -> tuple[tuple, list[Tensor], list[int]]:
    """What a launcher may go by; the tensors among the arguments, and where they begin."""
    key: list[Any] = [torch.are_deterministic_algorithms_enabled()]
    tensors, addresses = [], []
    for x in args:
        if isinstance(x, Tensor):
            at = x.data_ptr()
            key.append((x.shape, x.stride(), x.dtype, x.device, at & 15))
            tensors.append(x)
            addresses.append(at)
        else:
            key.append(tuple(x) if isinstance(x, list) else x)
    if len({*addresses}) != len(addresses):
        key.append(tuple([addresses.index(at) for at in addresses]))
    return tuple(key), tensors, addresses
