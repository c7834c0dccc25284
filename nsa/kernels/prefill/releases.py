"""Names of Gluon that differ between the releases of Triton that the Hopper kernels compile with.

Kernels take them from here. Shared memory is the largest difference: 3.6 and 3.7 take a view from
an address on, whatever its size; 3.9 takes one of as many bytes as it is given, or fewer.
"""

from __future__ import annotations

import math
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as _wait

SINCE_3_9 = hasattr(gl.shared_memory_descriptor, "reinterpret")

program_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # 3.6
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@builtin
def view(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Return the bytes of `memory` as a tensor in shared memory of another dtype or shape."""
    make = memory.reinterpret if SINCE_3_9 else memory._reinterpret
    return make(dtype, shape, layout, _semantic=_semantic)


@builtin
def carve(store: Any, at: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Return the tensor that begins at unit `at` of `store` [units, bytes of one] int8."""
    if not SINCE_3_9:
        unit = store.index(at, _semantic=_semantic)
        return unit._reinterpret(dtype, shape, layout, _semantic=_semantic)
    lengths = [_unwrap_if_constexpr(n) for n in _unwrap_if_constexpr(shape)]
    size = math.prod(lengths) * _unwrap_if_constexpr(dtype).primitive_bitwidth // 8
    units = -(-size // store.shape[1])
    part = store.slice(at, units, _semantic=_semantic)
    return part.reinterpret(dtype, shape, layout, _semantic=_semantic)


@builtin
def warpgroup_mma_wait(outstanding: Any, deps: Any, _semantic: Any = None) -> Any:
    """Wait until this warpgroup has at most `outstanding` products in flight; return deps.

    Warpgroups do not wait for each other. 3.9 makes all of a program wait there unless told not
    to, which hangs a kernel whose warps go their own ways.
    """
    done = _wait(outstanding, deps=deps, _semantic=_semantic)
    if SINCE_3_9:
        for x in done if isinstance(done, tuple) else (done,):
            x.handle.set_attr("warpGroupLocal", _semantic.builder.get_unit_attr())
    return done
