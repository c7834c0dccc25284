"""Names of Gluon that differ between the releases of Triton that the Hopper kernels compile with.

Kernels take them from here. Shared memory is the largest difference: 3.6 and 3.7 take a view from
an address on, whatever its size; 3.9 takes one of as many bytes as it is given, or fewer; 3.8 takes
one of a whole allocation, whose rows are read by their numbers.
"""

from __future__ import annotations

import math
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as _wait

SINCE_3_9 = hasattr(gl.shared_memory_descriptor, "reinterpret")
ONLY_WHOLE = gl.constexpr(triton.__version__.startswith("3.8."))  # views of shared memory
SINCE_3_8 = SINCE_3_9 or bool(ONLY_WHOLE)

program_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # 3.6
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.constexpr_function
def store_of(units: int, unit: int, head: int = 1, tile: int = 0) -> tuple[int, int, int, int]:
    """Describe a store, the shared memory that carve() gives tensors of: `units` units of `unit`
    bytes each. Barriers are in its head, the first `head` units, whose address kernels know.

    With ONLY_WHOLE the head is an allocation of its own. What is behind it is one allocation too,
    rounded up to multiples of `tile` units, which every tensor there divides; or, where tile is 0,
    one for each tensor. The compiler puts larger allocations first, the head last.
    """
    if ONLY_WHOLE and tile:
        units = head + -(-(units - head) // tile) * tile
    return units, unit, head, tile


@gluon.constexpr_function
def head_address(store: tuple[int, int, int, int]) -> int:
    """Return where a store's head is, in bytes from the beginning of shared memory."""
    units, unit, head, _ = store
    return (units - head) * unit if ONLY_WHOLE else 0


@gluon.constexpr_function
def from_head(store: tuple[int, int, int, int], at: int) -> int:
    """Return the bytes from a store's head to unit `at` behind it, negative with ONLY_WHOLE."""
    units, unit, _, _ = store
    return (at - units) * unit if ONLY_WHOLE else at * unit


@builtin
def make_store(store: Any, _semantic: Any = None) -> Any:
    """Allocate a store."""
    units, unit, head, tile = (_unwrap_if_constexpr(x) for x in _unwrap_if_constexpr(store))
    layout = gl.SwizzledSharedLayout(1, 1, 1, [0])
    make = lambda n: gl.allocate_shared_memory(gl.int8, [n, unit], layout, _semantic=_semantic)
    if not ONLY_WHOLE:
        return make(units)
    return gl.tuple([make(n) for n in ((head, units - head) if tile else (head,))])


@builtin
def carve(store: Any, at: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Return the tensor that begins at unit `at` of a store."""
    if ONLY_WHOLE:
        return _carve_rows(store, _unwrap_if_constexpr(at), dtype, shape, layout, _semantic)
    if not SINCE_3_9:
        unit = store.index(at, _semantic=_semantic)
        return unit._reinterpret(dtype, shape, layout, _semantic=_semantic)
    units = -(-_bits(_lengths(shape), dtype) // (8 * store.shape[1]))
    part = store.slice(at, units, _semantic=_semantic)
    return part.reinterpret(dtype, shape, layout, _semantic=_semantic)


@builtin
def view(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Return the first bytes of `memory` as a tensor in shared memory of another dtype or shape."""
    if not ONLY_WHOLE:
        make = memory.reinterpret if SINCE_3_9 else memory._reinterpret
        return make(dtype, shape, layout, _semantic=_semantic)
    lengths = _lengths(shape)
    times = _bits(memory.shape, memory.dtype) // _bits(lengths, dtype)
    one = len(lengths) == _rank(layout)
    shape = [times, *lengths] if one else [times * lengths[0], *lengths[1:]]
    whole = memory._reinterpret(dtype, shape, layout, _semantic=_semantic)
    return whole.index(0, _semantic=_semantic) if one else whole


def _lengths(shape: Any) -> list[int]:
    return [_unwrap_if_constexpr(n) for n in _unwrap_if_constexpr(shape)]


def _bits(lengths: list[int], dtype: Any) -> int:
    return math.prod(lengths) * _unwrap_if_constexpr(dtype).primitive_bitwidth


def _rank(layout: Any) -> int:
    layout = _unwrap_if_constexpr(layout)
    return len(layout.order) if hasattr(layout, "order") else layout.rank


def _carve_rows(store: Any, at: int, dtype: Any, shape: Any, layout: Any, semantic: Any) -> Any:
    """carve() for ONLY_WHOLE: rows of a view of the head, or of all that is behind it."""
    head, *behind = store.values
    if at < head.shape[0]:
        memory = head
    elif behind:
        (memory,), at = behind, at - head.shape[0]
    else:
        return gl.allocate_shared_memory(dtype, shape, layout, _semantic=semantic)
    lengths, rank = _lengths(shape), _rank(layout)
    row = lengths[len(lengths) - rank :]
    first, off = divmod(at * memory.shape[1] * 8, _bits(row, dtype))
    rows, left = divmod(_bits(memory.shape, memory.dtype), _bits(row, dtype))
    if off or left:
        raise ValueError(f"rows {row} do not divide shared memory of {memory.shape} up to {at}")
    whole = memory._reinterpret(dtype, [rows, *row], layout, _semantic=semantic)
    if len(lengths) == rank:
        return whole.index(first, _semantic=semantic)
    return Ring(whole, first, lengths, _semantic=semantic)


if ONLY_WHOLE:

    @gluon.aggregate
    class Ring:
        """Rows `first` .. of a view of a whole allocation, as many as shape[0]."""

        whole: gl.shared_memory_descriptor
        first: gl.constexpr
        shape: gl.constexpr
        dtype: gl.constexpr
        layout: gl.constexpr

        @gluon.constexpr_function
        def __init__(self, whole, first, shape):
            self.whole = whole
            self.first, self.shape = gl.constexpr(first), gl.constexpr(shape)
            self.dtype, self.layout = gl.constexpr(whole.dtype), gl.constexpr(whole.layout)

        @gluon.jit
        def index(self, i):
            return self.whole.index(self.first + i)


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
