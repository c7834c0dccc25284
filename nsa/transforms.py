"""The public functions under torch.func's transforms (grad, vjp, vmap and what is made of them).

A transform looks into operations, and neither a kernel nor a route that reads lengths shows it any.
So a call is one autograd.Function there: under vmap the sequences of all samples are one batch, and
a gradient runs the call again and differentiates that as usual. Second derivatives are those of
the route, where it has any; forward mode goes into the plain PyTorch routes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils import _pytree as pytree

Fn = TypeVar("Fn", bound=Callable[..., Any])
_Kind = _functorch.TransformType


def transforming() -> bool:
    """Return whether torch.func takes gradients or vectorises here, outside of a compiler."""
    if torch.compiler.is_compiling() or _functorch.peek_interpreter_stack() is None:
        return False
    return bool(_kinds() & {_Kind.Grad, _Kind.Vmap})


def _kinds() -> set[_Kind]:
    return {level.key() for level in _functorch.get_interpreter_stack()}


def refuse_tokens() -> None:
    """Raise NotImplementedError under torch.func, before a cache is written to."""
    if transforming():
        raise NotImplementedError(
            "a cache takes no tokens under torch.func.grad and torch.vmap: call the layer on whole "
            "sequences, which has gradients"
        )


def refuse_vmap(name: str) -> None:
    """Raise NotImplementedError under torch.vmap."""
    if transforming() and _Kind.Vmap in _kinds():
        raise NotImplementedError(
            f"{name} does not run under torch.vmap: give the queries of all samples as one batch"
        )


def transformable(fn: Fn) -> Fn:
    """Make a public function of nsa/attention.py right under torch.func.

    Raises NotImplementedError for vmap of packed sequences, and of forward-mode derivatives.
    """
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not transforming():
            return fn(*args, **kwargs)
        kinds = _kinds()
        if _Kind.Jvp in kinds:
            if _Kind.Vmap in kinds:
                raise NotImplementedError(
                    f"{fn.__name__} has no forward-mode derivatives under torch.vmap "
                    "(torch.func.jacfwd): take torch.func.jacrev"
                )
            return fn(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        rest = {name: x for name, x in given.items() if name not in tensors}
        run = _Run(fn, tuple(tensors), rest)
        out = _Call.apply(run, *tensors.values())
        return pytree.tree_unflatten(run.leaves(out), run.spec)

    return call  # type: ignore[return-value]


def once(backward: Callable) -> Callable:
    """A backward of kernels, whose results have no gradient: to ask for one is an error.

    PyTorch's once_differentiable cuts them off the inputs, too, and torch.func then takes second
    derivatives for zeros.
    """

    @functools.wraps(backward)
    def first(ctx: Any, *grads: Tensor | None) -> Any:
        with torch.no_grad():
            made = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return made
        of = [x for x in (*grads, *ctx.saved_tensors) if x is not None and x.requires_grad]
        there = [x for x in made if x is not None]
        marked = iter(_Once.apply(len(there), *there, *of) if of else there)
        return tuple(None if x is None else next(marked) for x in made)

    return first


class _Once(torch.autograd.Function):
    """The first n of its tensors, which depend on the others and cannot say how."""

    @staticmethod
    def forward(n: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:n])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None: ...

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(
            'the Triton kernels have no second derivatives: take backend="reference"'
        )


class _Run:
    """fn of named tensors and the other arguments, as a function of tensors to tensors."""

    def __init__(self, fn: Callable[..., Any], names: tuple[str, ...], rest: dict) -> None:
        self.fn, self.names, self.rest = fn, names, rest
        # Of the outputs, the first; the log-sum-exp too where it is asked for.
        self.differentiable = 1 + bool(rest.get("return_lse"))

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = self.fn(**dict(zip(self.names, tensors, strict=True)), **self.rest)
        self.plain, self.spec = pytree.tree_flatten(result)
        return tuple(x for x in self.plain if isinstance(x, Tensor))

    def leaves(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        """The leaves of the last result with these for its tensors."""
        left = iter(tensors)
        return [next(left) if isinstance(x, Tensor) else x for x in self.plain]

    def check_vmap(self) -> None:
        if "cu_seqlens" in self.names:
            raise NotImplementedError(
                f"{self.fn.__name__} takes no packed sequences under torch.vmap: put the sequences "
                "of all samples into one pack, or give dense tensors"
            )


class _Gradient:
    """The gradient of a _Run, or of a _Gradient, as a function of its first outputs' gradients and
    its tensors."""

    def __init__(self, run: _Run | _Gradient, wanted: tuple[bool, ...]) -> None:
        self.run, self.wanted = run, wanted
        self.differentiable = sum(wanted)

    def __call__(self, *args: Tensor) -> tuple[Tensor, ...]:
        n = self.run.differentiable
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # Not detached where this is differentiated itself.
            tensors = [
                (x if again and x.requires_grad else x.detach().requires_grad_()) if w else x
                for x, w in zip(args[n:], self.wanted, strict=True)
            ]
            outputs = self.run(*tensors)[:n]
        inputs = [x for x, w in zip(tensors, self.wanted, strict=True) if w]
        return torch.autograd.grad(
            outputs, inputs, args[:n], create_graph=again, materialize_grads=True
        )

    def check_vmap(self) -> None:
        self.run.check_vmap()


class _Call(torch.autograd.Function):
    """A _Run or _Gradient as one operation; every tensor's first dimension is the batch."""

    @staticmethod
    def forward(run: _Run | _Gradient, *tensors: Tensor) -> tuple[Tensor, ...]:
        return run(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.run, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*output[ctx.run.differentiable :])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        gradient = _Gradient(ctx.run, wanted)
        made = iter(_Call.apply(gradient, *grads[: ctx.run.differentiable], *ctx.saved_tensors))
        return None, *(next(made) if w else None for w in wanted)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, run: _Run | _Gradient, *tensors: Tensor) -> tuple:
        run.check_vmap()
        n = info.batch_size
        each = [
            x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        out = _Call.apply(run, *(x.flatten(0, 1) for x in each))
        batch = each[0].shape[1]  # of a sample
        return tuple(x.unflatten(0, (n, batch)) for x in out), (0,) * len(out)
