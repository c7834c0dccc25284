"""How launchers launch: on the device of their tensors, and twice the same without being looked up.

Importing this needs PyTorch only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor  # torch.library evaluates the annotations of what is wrapped here

from nsa import launches


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


def launch(
    kernel: Any, grid: tuple[int, int, int], args: tuple, constants: dict[str, Any],
    compiled: dict[int, tuple],
) -> None:  # fmt: skip
    """kernel[grid](*args, **constants) and its count, from the second time on as compiled.

    To find what it compiled Triton takes 12 to 25 us of the host for every launch; `compiled`, from
    by_layout(), keeps it. args: all parameters but the constexprs, which follow them in the
    kernel's signature. Triton's settings (debug, instrumentation) count at the first launch alone,
    its launch hooks always. torch.compile cannot trace it: its callers are untraced.
    """
    found = compiled.get(id(kernel))
    if found is not None:
        _, made, values = found
        made[grid](*args, *values)
    else:
        made = kernel[grid](*args, **constants)
        if hasattr(made, "packed_metadata"):  # nothing comes back from the interpreter
            values = tuple(constants[name] for name in kernel.arg_names[len(args) :])
            compiled[id(kernel)] = kernel, made, values
    launches.bump(kernel.__name__)


def by_layout(memory: dict[tuple, dict], numbers: tuple, tensors: tuple[Tensor, ...]) -> dict:
    """The part of `memory`, which is one device's, that launch() may use for these arguments: of
    pointers Triton compiles for dtype and alignment, of ints for what they are."""
    kinds = tuple([(x.dtype, x.data_ptr() % 16 == 0) for x in tensors])
    return memory.setdefault((numbers, kinds), {})
