"""Tiles of [rows, groups * width] tensors through the tensor memory accelerator (SM 9.0 and on).

A descriptor load moves a whole tile without computing an address per element; kernels use it for
tiles that lie inside the tensor and need no mask. Elsewhere, and on older parts, the same tiles are
read through pointers: kernels take both and choose at compile time.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from nsa.kernels.tiles import split_dim


@functools.cache
def shared_layout(swizzle: int, bits: int, rank: int) -> Any:
    """Gluon's layout of a tile that the copy engine fills. Making one takes the host some 10 us,
    and its name, for which Triton asks at every launch, some 4."""
    from triton.experimental.gluon import language as gl

    name = repr(gl.NVMMASharedLayout(swizzle, bits, rank))

    class Named(gl.NVMMASharedLayout):
        def __repr__(self) -> str:
            return name

    return Named(swizzle, bits, rank)


_forms: dict[tuple, dict[str, Any]] = {}  # of descriptors that Triton found right
MOST_FORMS = 4096


def descriptor(x: Tensor, block: tuple[int, ...], layout: Any = None) -> Any:
    """Descriptor of tiles of x, in Gluon with a layout from shared_layout().

    What Triton checks of a descriptor, some 5 us of the host, it checks once for all tensors of
    x's dtype, shape and strides.
    """
    if layout is None:
        from triton.tools.tensor_descriptor import TensorDescriptor
    else:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    form = (x.dtype, x.shape, x.stride(), block, id(layout))
    fields = _forms.get(form)
    if fields is None or x.data_ptr() % 16:  # which Triton refuses
        made = TensorDescriptor.from_tensor(x, list(block), *(() if layout is None else (layout,)))
        made.kind = (x.dtype, block, id(layout))  # for launch(): as much as Triton compiles for
        if len(_forms) >= MOST_FORMS:
            _forms.clear()
        _forms[form] = {**vars(made), "base": None}  # holds no tensor
        return made
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(fields)
    made.base = x
    return made


def tma_usable(arch: int, split: Tensor, *, whole: Tensor | None = None) -> bool:
    """True when tiles of these [.., rows, groups, width] tensors can go through descriptors.

    `split` is read in the two parts of split_dim, `whole` in one. Needs SM 9.0 (arch 0, the
    interpreter, emulates it), 16-bit elements, widths that are not padded (a padded tile would
    reach into the next group), aligned and not empty tensors.
    """
    if arch and arch < 90:
        return False
    for x in (split, whole):
        if x is None:
            continue
        first, rest = split_dim(x.shape[-1])
        if x is whole and rest or first + rest != x.shape[-1]:
            return False
        if x.element_size() != 2 or not x.numel() or x.data_ptr() % 16 or not x.is_contiguous():
            return False
    return True


def row_tiles(x: Tensor, rows: int, columns: int) -> Any:
    """Descriptor of [rows, columns] tiles of x [.., groups, width] seen as [-1, groups * width]."""
    return descriptor(x.view(-1, x.shape[-2] * x.shape[-1]), (rows, columns))


def head_tiles(x: Tensor, tokens: int, heads: int, columns: int) -> Any:
    """Descriptor of [tokens, heads, columns] tiles of x [.., heads in all, width]."""
    return descriptor(x.view(-1, *x.shape[-2:]), (tokens, heads, columns))


def k_tiles(k: Tensor, rows: int, use: bool) -> tuple[Any, Any]:
    """K in the two parts of its width as kernels take it; the tensor itself where not `use`."""
    if not use:
        return k, k
    first, rest = split_dim(k.shape[-1])
    one = row_tiles(k, rows, first)
    return one, row_tiles(k, rows, rest) if rest else one


def kv_tiles(k: Tensor, v: Tensor, rows: int, use: bool) -> tuple[Any, Any, Any]:
    """K in two parts and V as kernels take them; the tensors themselves where not `use`."""
    return *k_tiles(k, rows, use), row_tiles(v, rows, v.shape[-1]) if use else v
