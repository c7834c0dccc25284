"""Launches that are made as one: a CUDA graph of kernels and memsets, by the driver itself.

To launch one takes the host about as long as to launch a kernel. torch.cuda.graph synchronises and
brings a memory pool, which launches on memory that others allocated do not need.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

# CU_STREAM_NON_BLOCKING, and CU_STREAM_CAPTURE_MODE_RELAXED: other threads may do what they like.
_NON_BLOCKING, _RELAXED = 1, 2
_SET = 1  # CU_STREAM_SET_CAPTURE_DEPENDENCIES
_loaded: ctypes.CDLL | None = None


def _call(name: str, *args: object) -> None:
    """Call a function of CUDA's driver. Raises OSError without one, and for what it returns
    MemoryError or RuntimeError with the driver's name of it."""
    global _loaded
    if _loaded is None:
        _loaded = ctypes.CDLL("libcuda.so.1")
    function = getattr(_loaded, name, None)
    if function is None:
        raise RuntimeError(f"this driver has no {name}")
    if error := function(*args):
        said = ctypes.c_char_p()
        _loaded.cuGetErrorName(ctypes.c_int(error), ctypes.byref(said))
        text = (said.value or b"CUDA_ERROR_UNKNOWN").decode()
        kind = MemoryError if text == "CUDA_ERROR_OUT_OF_MEMORY" else RuntimeError
        raise kind(f"{name} gave {text}")


def zero(address: int, size: int, stream: int) -> None:
    """Set `size` bytes to zero, on a stream."""
    at, of, on = ctypes.c_uint64(address), ctypes.c_size_t(size), ctypes.c_void_p(stream)
    _call("cuMemsetD8Async", at, ctypes.c_ubyte(0), of, on)


class Lanes:
    """Tells a stream that captures what the launches of a record depend on: those of a lane on what
    was before the fork, and what follows on all of its lanes."""

    def __init__(self, stream: int) -> None:
        self._stream, self._lane = ctypes.c_void_p(stream), None
        self._begin = self._last()  # where the driver does not say, nothing was launched yet
        self._ends: list[int] = []

    def to(self, lane: tuple[int, int] | None) -> None:
        """The next launches are of this lane, or of none."""
        if lane == self._lane:
            return
        here = self._last()
        if self._lane is not None and (lane is None or lane[0] != self._lane[0]):
            here = [*self._ends, *here]  # of all lanes
            self._depend_on(here)
            self._ends = []
        if lane is not None and self._lane is not None and lane[0] == self._lane[0]:
            self._ends += here
            self._depend_on(self._begin)
        elif lane is not None:
            self._begin = here
        self._lane = lane

    def _last(self) -> list[int]:
        """The nodes that a next one would depend on."""
        status, number, count = ctypes.c_int(), ctypes.c_ulonglong(), ctypes.c_size_t()
        graph, nodes = ctypes.c_void_p(), ctypes.POINTER(ctypes.c_void_p)()
        found = map(ctypes.byref, (status, number, graph, nodes, count))
        _call("cuStreamGetCaptureInfo_v2", self._stream, *found)
        return [nodes[i] or 0 for i in range(count.value)]

    def _depend_on(self, nodes: list[int]) -> None:
        of, how = (ctypes.c_void_p * len(nodes))(*nodes), ctypes.c_uint(_SET)
        count = ctypes.c_size_t(len(nodes))
        _call("cuStreamUpdateCaptureDependencies", self._stream, of, count, how)


class Graph:
    """A CUDA graph of what launch_on(stream) launches: launch() does so again, on the same memory.

    Raises OSError, RuntimeError or MemoryError where it cannot be captured; nothing runs then.
    """

    def __init__(self, launch_on: Callable[[int], None]) -> None:
        self.exec, graph, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(_NON_BLOCKING))
        try:
            _call("cuStreamBeginCapture_v2", stream, ctypes.c_int(_RELAXED))
            try:
                launch_on(stream.value or 0)
            finally:
                _call("cuStreamEndCapture", stream, ctypes.byref(graph))
            none = ctypes.c_ulonglong(0)
            _call("cuGraphInstantiateWithFlags", ctypes.byref(self.exec), graph, none)
        finally:
            if graph:
                _call("cuGraphDestroy", graph)
            _call("cuStreamDestroy_v2", stream)

    def launch(self, stream: int) -> None:
        _call("cuGraphLaunch", self.exec, ctypes.c_void_p(stream))

    def __del__(self) -> None:
        if self.exec and _loaded is not None:  # one that still runs goes when it is done
            _loaded.cuGraphExecDestroy(self.exec)
