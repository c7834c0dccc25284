"""Launches that are made as one: a CUDA graph of kernels and memsets, by the driver itself.

To launch one takes the host about as long as to launch a kernel. torch.cuda.graph synchronises and
brings a memory pool, which launches on memory that others allocated do not need.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

# CU_STREAM_NON_BLOCKING, and CU_STREAM_CAPTURE_MODE_RELAXED: other threads may do what they like.
_NON_BLOCKING, _RELAXED = 1, 2
_loaded: ctypes.CDLL | None = None


def _call(name: str, *args: object) -> None:
    """Call a function of CUDA's driver. Raises OSError without one, RuntimeError for an error."""
    global _loaded
    if _loaded is None:
        _loaded = ctypes.CDLL("libcuda.so.1")
    if error := getattr(_loaded, name)(*args):
        raise RuntimeError(f"{name} gave CUDA error {error}")


def zero(address: int, size: int, stream: int) -> None:
    """Set `size` bytes to zero, on a stream."""
    at, of, on = ctypes.c_uint64(address), ctypes.c_size_t(size), ctypes.c_void_p(stream)
    _call("cuMemsetD8Async", at, ctypes.c_ubyte(0), of, on)


class Graph:
    """What launch_on(stream) launches, to be launched again, on the same memory.

    Raises OSError or RuntimeError where it cannot be captured; nothing runs then.
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
