"""How launchers launch: on the device of their tensors, and twice the same without a lookup."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor  # torch.library evaluates the annotations of what is wrapped here
from triton import knobs
from triton.runtime import driver

from nsa import launches

LARGE = 1 << 31
MOST_MADE = 4096
Made = tuple[Any, Any, tuple]  # a kernel, what Triton compiled of it, the constexprs of that
_made: dict[tuple, Made] = {}


def on_its_device(launcher: Callable) -> Callable:
    """A launcher whose kernels run where its first argument is, as PyTorch's operators do.

    Triton launches on the current device, whichever device its pointers are of.
    """

    @functools.wraps(launcher)
    def there(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not getattr(x, "is_cuda", False) or x.device.index == torch.cuda.current_device():
            return launcher(*args, **kwargs)
        with torch.cuda.device(x.device):
            return launcher(*args, **kwargs)

    return there


def packed_ends(*cu_seqlens: Tensor | None) -> list[Tensor | None]:
    """cu_seqlens as kernels read them, which take no strides; None stays None."""
    return [None if x is None else x.contiguous() for x in cu_seqlens]


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """kernel[grid](*args, **constants) and its count, the second time without Triton's lookup.

    That lookup, and calling hooks where there are none, take 20 to 40 us of the host for every
    launch. args: all parameters but the constexprs, which follow them in the kernel's signature.
    Triton's settings (debug, instrumentation) count at the first launch alone, its launch hooks
    always.
    """
    if len(_made) >= MOST_MADE:
        _made.clear()
    key = _key(kernel, args, constants)
    found = _made.get(key)  # asked once: another thread may clear it any time
    if found is None:
        _launch_first(_made, key, kernel, grid, args, constants)
    else:  # `args` holds the tensors until they are launched with
        _again(found, grid, tuple([x.data_ptr() if isinstance(x, Tensor) else x for x in args]))
    launches.bump(kernel.__name__)


def launch_planned(
    kernel: Any, grid: tuple[int, int, int], args: tuple, constants: dict[str, Any],
    compiled: dict[int, Made],
) -> None:  # fmt: skip
    """launch() without looking at its arguments: `compiled`, from by_layout(), knows them.

    Of what is compiled already addresses will do for tensors, and are quicker: of a tensor Triton's
    launcher asks the driver whether the GPU can reach it, 1 us each.
    """
    found = compiled.get(id(kernel))
    if found is None:
        _launch_first(compiled, id(kernel), kernel, grid, args, constants)
    else:
        _again(found, grid, args)
    launches.bump(kernel.__name__)


def prepare_planned(
    kernel: Any, grid: tuple, args: tuple, constants: dict[str, Any], compiled: dict[int, Made]
) -> None:
    """launch_planned()'s compilation and loading, without the launch. Not for the interpreter."""
    if id(kernel) not in compiled:
        made = kernel.warmup(*args, grid=grid, **constants)
        made._init_handles()
        compiled[id(kernel)] = _kept(kernel, made, args, constants)


def _kept(kernel: Any, made: Any, args: tuple, constants: dict[str, Any]) -> Made:
    return kernel, made, tuple(constants[name] for name in kernel.arg_names[len(args) :])


def _launch_first(
    memory: dict[Any, Made], key: Any, kernel: Any, grid: tuple, args: tuple,
    constants: dict[str, Any],
) -> None:  # fmt: skip
    """By Triton, and what it compiled into `memory`; a key of None is not kept."""
    made = kernel[grid](*args, **constants)
    # Nothing comes back from the interpreter.
    if key is not None and hasattr(made, "packed_metadata"):
        memory[key] = _kept(kernel, made, args, constants)


def _again(found: Made, grid: tuple, args: tuple) -> None:
    _, made, values = found
    if _hooked():
        made[(*grid, 1, 1)[:3]](*args, *values)
        return
    active = driver.active
    stream = active.get_current_stream(active.get_current_device())
    made.run(
        *(*grid, 1, 1)[:3], stream, made.function, made.packed_metadata, None, None, None, *args,
        *values,
    )  # fmt: skip


def _key(kernel: Any, args: tuple, constants: dict[str, Any]) -> tuple | None:
    """What tells compiled kernels apart, as finely as Triton does; None for what it does not know.

    Of tensors dtype and alignment, and whether a GPU reaches them, which addresses do not tell; of
    ints whether they are 1, or a multiple of 16, or need more than 32 bits.
    """
    if not hasattr(kernel, "device_caches"):  # the interpreter's
        return None
    key = [id(kernel), driver.active.get_current_device()]
    for x in args:
        kind = type(x)
        if kind is int:
            key.append("1" if x == 1 else (x & 15 == 0, -LARGE <= x < LARGE, x < LARGE << 32))
        elif isinstance(x, Tensor):
            key.append((x.dtype, x.data_ptr() & 15 == 0, x.is_cuda))
        elif kind is float or kind is bool or x is None:
            key.append(kind)
        elif hasattr(x, "kind"):  # of descriptor()
            key.append(x.kind)
        else:
            return None
    key.append(tuple(constants.items()))
    return tuple(key)


def _hooked() -> bool:
    """Does a profiler wait for Triton's launches?"""
    runtime = knobs.runtime
    return _waits(runtime.launch_enter_hook) or _waits(runtime.launch_exit_hook)


def _waits(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


def by_layout(
    memory: dict[tuple, dict], numbers: tuple, tensors: tuple[Tensor, ...]
) -> tuple[dict[int, Made], list[int]]:
    """The part of `memory`, which is one device's, that launch_planned() may use for these
    arguments, and the tensors' addresses: of pointers Triton compiles for dtype and alignment, of
    ints for what they are. A tensor that a GPU does not reach is Triton's to refuse."""
    addresses = [x.data_ptr() for x in tensors]
    kinds = tuple(
        [(x.dtype, at % 16 == 0, x.is_cuda) for x, at in zip(tensors, addresses, strict=True)]
    )
    return memory.setdefault((numbers, kinds), {}), addresses
