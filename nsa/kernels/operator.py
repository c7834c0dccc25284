"""A launcher as a PyTorch operator: an autograd.Function if eager, a custom operator in traces.

torch.compile, export, functorch and dispatch modes need one opaque node with known output shapes.
An eager call does not, and a custom operator costs it some 50 us of the host every time and, once
per process, several seconds: its first call imports PyTorch's compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa.checks import is_eager, needs_grad
from nsa.kernels.launch import on_its_device
from nsa.kernels.replay import replayed
from nsa.transforms import once


class Operator:
    """torch.ops.<name>, with the launcher itself where nothing traces the call.

    Takes positional arguments only. A launcher without register_autograd has no gradient: its
    tensors must not require one outside of a backward.
    """

    def __init__(self, name: str, launcher: Callable) -> None:
        self.name, self.launcher = name, replayed(on_its_device(launcher))
        self.traced = torch.library.custom_op(name, self.launcher, mutates_args=())
        self.function: type[torch.autograd.Function] | None = None

    def register_fake(self, fake: Callable) -> Callable:
        """Register what makes outputs of the right shapes without computing them."""
        self.traced.register_fake(fake)
        return fake

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """Register the gradient, as torch.library.CustomOpDef.register_autograd takes it."""
        self.traced.register_autograd(backward, setup_context=setup_context)

        def with_backward(*args: Any) -> None:
            ctx = _PlannedContext()
            output = launch(*args)
            setup_context(ctx, args, output)
            outputs = output if isinstance(output, tuple) else (output,)
            constant = {id(x) for x in ctx.constant}
            backward(ctx, *(None if id(x) in constant else torch.empty_like(x) for x in outputs))

        launch = self.launcher
        launcher = replayed(on_its_device(launch, with_backward))

        # A forward that sets up its context itself: with setup_context apart, PyTorch looks at the
        # signature in every call (50 us).
        def forward(ctx: Any, *args: Any) -> Any:
            output = launcher(*args)
            setup_context(ctx, args, output)
            return output

        members = {
            "forward": staticmethod(forward),
            "backward": staticmethod(once(backward)),
        }
        self.function = type(self.name, (torch.autograd.Function,), members)

    def __call__(self, *args: Any) -> Any:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if not is_eager(*tensors):
            return self.traced(*args)
        if self.function is not None and needs_grad(*tensors):
            return self.function.apply(*args)
        return self.launcher(*args)


class _PlannedContext:
    """An autograd context for a backward that is planned right behind its forward."""

    saved_tensors: tuple[Tensor | None, ...] = ()
    constant: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.constant = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


def operator(name: str) -> Callable[[Callable], Operator]:
    """Return a decorator that makes an Operator of a launcher with annotated arguments."""
    return lambda launcher: Operator(name, launcher)
