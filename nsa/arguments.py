"""Checks of the public functions' arguments: each raises an error that names the argument, what it
must be and what came."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa.blocks import is_symbol, num_compressed, num_sel_blocks
from nsa.checks import refuse_export
from nsa.config import check_int
from nsa.nested import refuse_nested

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(name: str, x: Any) -> None:
    """Raise TypeError unless x is a tensor, and not a nested one."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.is_nested:
        refuse_nested(name, x)


def check_dtype(name: str, x: Any, kind: str, *dtypes: torch.dtype) -> None:
    """Raise TypeError unless x is a tensor of one of these dtypes, which the error calls `kind`."""
    if not isinstance(x, Tensor) or x.dtype not in dtypes:
        raise TypeError(f"{name} must be {kind}, got {getattr(x, 'dtype', type(x).__name__)}")


def check_device(name: str, x: Tensor, device: torch.device, owner: str = "q's") -> None:
    """Raise ValueError unless x is on `device`, which the error says is the owner's."""
    if x.device != device:
        raise ValueError(f"{name} must be on {owner} device {device}, got {x.device}")


def check_float(name: str, x: Tensor, other: Tensor, owner: str = "q's") -> None:
    """Raise TypeError or ValueError unless x has a float dtype and is on other's device."""
    if x.dtype not in FLOATS:
        raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {x.dtype}")
    check_device(name, x, other.device, owner)


def check_beside(
    name: str, x: Any, other: Tensor, shape: tuple[int, ...], owner: str = "q's",
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Raise unless x is a float tensor of this shape on other's device, of `dtype` if given."""
    check_tensor(name, x)
    if x.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(x.shape)}")
    check_float(name, x, other, owner)
    if dtype is not None and x.dtype != dtype:
        raise TypeError(f"{name} must have {owner} dtype {dtype}, got {x.dtype}")


# By the dimensions that are wanted and those that are there.
_OTHER_FORM = {
    (4, 3): ": one sequence is x[None], packed sequences need cu_seqlens",
    (3, 4): ": with cu_seqlens sequences are packed, without a batch",
}
_HEADS_FIRST = ": these look like [B, H, S, D]; give x.transpose(1, 2) of q, k and v"


def check_tensors(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, kv: str = "") -> None:
    """Raise TypeError or ValueError that names the tensor unless shapes and dtypes agree."""
    k_name, v_name = f"k{kv}", f"v{kv}"
    ndim, lead = (4, "[B, S, H, D]") if cu_seqlens is None else (3, "[T, H, D]")
    for name, x in (("q", q), (k_name, k), (v_name, v)):
        check_tensor(name, x)
        if x.ndim != ndim:
            hint = _OTHER_FORM.get((ndim, x.ndim), "")
            raise ValueError(f"{name} must be {lead}, got shape {list(x.shape)}{hint}")
        check_float(name, x, q)
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {x.dtype}")
    if ndim == 4 and k.shape[0] != q.shape[0]:
        raise ValueError(f"{k_name} must have q's batch {q.shape[0]}, got {list(k.shape)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{k_name} must have q's Dk={q.shape[-1]}, got {list(k.shape)}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"{v_name} must be {k_name} but for Dv: {list(k.shape[:-1])} + [Dv], got "
            f"{list(v.shape)}"
        )
    HQ, G = q.shape[-2], k.shape[-2]
    if G == 0 or HQ % G:
        raise ValueError(f"q must have a multiple of {k_name}'s G={G} heads, got HQ={HQ}")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError("head dimensions must be at least 1")


def check_packed(
    cu_seqlens: Tensor | None, max_seqlen: int | None, x: Tensor, q_start: int = 0
) -> int | None:
    """Return max_seqlen of packed tokens x [T, ..]; without it a GPU has to be waited for.

    Raises TypeError or ValueError that names the argument. With max_seqlen, values of cu_seqlens
    are checked on CPU only; on a GPU kernels that need max_seqlen stop the device if it is too
    small, others do without it.
    """
    check_int("q_start", q_start, 0)
    if q_start and cu_seqlens is not None:
        raise ValueError(f"q_start must be 0 with cu_seqlens, got {q_start}")
    if max_seqlen is not None:
        check_int("max_seqlen", max_seqlen, 0)
    if cu_seqlens is None:
        if max_seqlen is not None:
            raise ValueError("max_seqlen needs cu_seqlens")
        return None
    check_dtype("cu_seqlens", cu_seqlens, "an int32 tensor", torch.int32)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be [nseq + 1], got shape {list(cu_seqlens.shape)}")
    check_device("cu_seqlens", cu_seqlens, x.device, "the tokens'")
    if cu_seqlens.is_cuda and max_seqlen is not None:
        return max_seqlen
    refuse_export("cu_seqlens")
    tokens, ends = x.shape[0], cu_seqlens.tolist()
    lengths = [b - a for a, b in zip(ends, ends[1:], strict=False)]
    if ends[0] != 0 or ends[-1] > tokens or min(lengths) < 0:
        raise ValueError(f"cu_seqlens must rise from 0 to T={tokens} or less, got {ends}")
    if max_seqlen is not None and max_seqlen < max(lengths):
        raise ValueError(f"max_seqlen must be at least {max(lengths)}, got {max_seqlen}")
    return max(lengths)


def check_reach(name: str, k: Tensor, q: Tensor, q_start: int, cu_seqlens: Tensor | None) -> None:
    """Raise ValueError unless k holds the key of every query, and packed keys no others."""
    have = k.shape[-3]
    if cu_seqlens is not None and have != q.shape[0]:
        raise ValueError(f"{name} must have q's T={q.shape[0]} packed tokens, got {have}")
    if cu_seqlens is None and have < q_start + q.shape[1]:
        raise ValueError(
            f"{name} must hold keys up to the last query at {q_start + q.shape[1] - 1}, got {have} "
            f"keys{_HEADS_FIRST if q.shape[1] < q.shape[2] == k.shape[2] else ''}"
        )


def check_window(
    k_win: Tensor, q: Tensor, window: int, q_start: int, cu_seqlens: Tensor | None
) -> None:
    """Raise ValueError unless k_win ends at the last query and has the first one's window."""
    if cu_seqlens is not None:
        return check_reach("k_win", k_win, q, 0, cu_seqlens)
    S, have = q.shape[1], k_win.shape[1]
    least, most = min(q_start, window - 1) + S, q_start + S
    if S and not least <= have <= most:
        raise ValueError(
            f"k_win must have {least} to {most} keys, of which the last is the last query's, got "
            f"{have}"
        )


def check_compressed_count(
    k_cmp: Tensor, q: Tensor, l: int, d: int, q_start: int, cu_seqlens: Tensor | None,
    raw: int | None = None,
) -> None:  # fmt: skip
    """Raise ValueError unless k_cmp holds every compressed key that the last query may see. It may
    be a longer buffer, but not as long as the keys before compression, of which there are `raw`."""
    have = k_cmp.shape[-3]
    if cu_seqlens is None:
        need, where = num_compressed(q_start + q.shape[1], l, d), "q_start + S tokens"
        if is_symbol(have):  # below 0 in short sequences: a tracer proves nothing of maxima
            need = (q_start + q.shape[1] - l) // d + 1
        raw = q_start + q.shape[1] if raw is None else raw
        # Traced for every length there are a few more, see block_windows().
        many = not is_symbol(have) and have > need
        if many and have >= raw and have > num_compressed(raw, l, d):
            raise ValueError(
                f"k_cmp must have {need} compressed keys for {where}, got {have}, where there are "
                f"{raw} raw keys: nsa.compress makes one of several; cut a buffer, k_cmp[:, :n]"
            )
    elif cu_seqlens.is_cuda:
        most = q.shape[0] // d  # without waiting for the sequences' lengths
        if not torch.compiler.is_compiling() and have > most:
            raise ValueError(
                f"k_cmp must have at most T // d = {most} compressed keys for T={q.shape[0]} "
                f"packed tokens, got {have}"
            )
        return
    else:
        need = int(num_compressed(cu_seqlens[1:] - cu_seqlens[:-1], l, d).sum())
        where = "the packed sequences"
    if have < need or (cu_seqlens is not None and have != need):
        raise ValueError(f"k_cmp must have {need} compressed keys for {where}, got {have}")


def check_chosen(
    q: Tensor, k: Tensor, block_indices: Any, ranges: Any, cu_seqlens: Tensor | None
) -> None:
    """Raise unless one of block_indices [.., G, n] and ranges [.., G, n, 2] fits q and k."""
    if (block_indices is None) == (ranges is None):
        raise ValueError("give either block_indices or ranges")
    name, given = ("ranges", ranges) if block_indices is None else ("block_indices", block_indices)
    tail = [2] if block_indices is None else []
    check_dtype(name, given, "an int32 or int64 tensor", torch.int32, torch.int64)
    rows, shape = [*q.shape[:-2], k.shape[-2]], list(given.shape)
    n = len(rows)
    if shape[:n] != rows or len(shape) == n or shape[n + 1 :] != tail:
        hint = ""
        if cu_seqlens is None and sorted(shape[1:3]) == sorted((q.shape[2], k.shape[1])):
            hint = _HEADS_FIRST
        elif shape[:n] == [*rows[:-2], rows[-1], rows[-2]]:
            hint = f": give {name}.transpose({n - 2}, {n - 1})"
        raise ValueError(f"{name} must be {[*rows, 'n', *tail]}, got {shape}{hint}")
    check_device(name, given, q.device)


def check_counts(block_counts: Tensor | int, block_indices: Tensor) -> None:
    """Raise TypeError or ValueError unless block_counts is an int, or one for each row."""
    if not isinstance(block_counts, Tensor):
        return check_int("block_counts", block_counts, 0)
    check_dtype("block_counts", block_counts, "int32 or int64", torch.int32, torch.int64)
    if block_counts.shape != block_indices.shape[:-1]:
        raise ValueError(
            f"block_counts must be {list(block_indices.shape[:-1])}, as block_indices without its "
            f"last dimension, got {list(block_counts.shape)}"
        )
    check_device("block_counts", block_counts, block_indices.device, "block_indices'")


def check_block_indices(block_indices: Tensor, block_size: int, keys: int) -> None:
    """Check that no block lies behind the last of so many keys, as those of another block size do.

    Raises ValueError on a CPU. A GPU, which nobody shall wait for, and a compiled graph check by an
    assertion of their own; under vmap, where values cannot be had, nothing is checked.
    """
    if not block_indices.numel() or block_indices.device.type == "meta":
        return
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(block_indices):
        return
    blocks = num_sel_blocks(keys, block_size)
    must = f"block_indices must be below {blocks}, the blocks of {block_size} in {keys} keys"
    largest = block_indices.max()
    if block_indices.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(largest < blocks, must)
    elif largest >= blocks:
        raise ValueError(f"{must}, got {int(largest)}")
