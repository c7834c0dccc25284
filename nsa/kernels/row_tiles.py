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
    """Gluon's layout of a tile that the copy engine fills; making one takes the host some 10 us."""
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle, bits, rank)


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
    from triton.tools.tensor_descriptor import TensorDescriptor

    flat = x.view(-1, x.shape[-2] * x.shape[-1])
    return TensorDescriptor.from_tensor(flat, [rows, columns])


def head_tiles(x: Tensor, tokens: int, heads: int, columns: int) -> Any:
    """Descriptor of [tokens, heads, columns] tiles of x [.., heads in all, width]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(
        x.view(-1, *x.shape[-2:]), [tokens, heads, columns]
    )


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
