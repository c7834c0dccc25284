"""How launchers launch: as operators of PyTorch, on the device of their tensors, and twice the same
without being looked up.

Importing this needs PyTorch only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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


_LIBRARY = torch.library.Library("nsa", "FRAGMENT")


def operator(name: str) -> Callable[[Callable], torch._ops.OpOverload]:
    """Make a launcher the operator torch.ops.nsa.<name>, which is what it returns.

    Autograd and torch.compile take an operator whole. What torch.library.custom_op does at every
    call (outputs checked for aliases, torch.compile switched off around it) took longer than the
    launches and is left out: outputs have to be new tensors. Needs a register_fake.
    """

    def register(launcher: Callable) -> torch._ops.OpOverload:
        schema = torch.library.infer_schema(launcher, mutates_args=())
        _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        _LIBRARY.impl(name, on_its_device(launcher), "CompositeExplicitAutograd")
        return getattr(torch.ops.nsa, name).default

    return register


def register_fake(op: torch._ops.OpOverload) -> Callable[[Callable], Callable]:
    """Decorator of the function that gives an operator's outputs without their values."""
    return torch.library.register_fake(op, lib=_LIBRARY)


def register_backward(
    op: torch._ops.OpOverload, backward: Callable | None = None,
    setup_context: Callable | None = None,
) -> None:  # fmt: skip
    """Give an operator its derivative; without one, backward through it is an error."""

    def underived(*_: Any) -> None:
        raise RuntimeError(f"{op.name()} has no derivative")

    torch.library.register_autograd(
        op, backward or underived, setup_context=setup_context, lib=_LIBRARY
    )


def launch(
    kernel: Any, grid: tuple[int, int, int], args: tuple, constants: dict[str, Any],
    compiled: dict[int, tuple],
) -> None:  # fmt: skip
    """kernel[grid](*args, **constants) and its count, from the second time on as compiled.

    To find what it compiled Triton takes 12 to 25 us of the host for every launch; `compiled` keeps
    it. The caller has a dict for each device and whatever else Triton specialises on in args: see
    specialised(), and the values of ints. args: all parameters but the constexprs, which follow
    them in the kernel's signature.
    """
    found = None if torch.compiler.is_compiling() else compiled.get(id(kernel))
    if found is not None:
        _, made, values = found
        made[grid](*args, *values)
    else:
        made = kernel[grid](*args, **constants)
        if hasattr(made, "packed_metadata"):  # nothing comes back from the interpreter
            values = tuple(constants[name] for name in kernel.arg_names[len(args) :])
            compiled[id(kernel)] = kernel, made, values
    launches.bump(kernel.__name__)


def specialised(*tensors: Tensor) -> tuple:
    """What Triton compiles for of pointers: see launch()."""
    return tuple([(x.dtype, x.data_ptr() % 16 == 0) for x in tensors])
