"""What context parallelism sends between ranks: gathers, with gradients, in the sequence's order,
and agreement, so that what is wrong on one rank is an error on every rank.

An exchange that fails is ExchangeFailed on every rank that is left.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nsa.errors import ExchangeFailed

Group = dist.ProcessGroup | DeviceMesh | None


def resolve_group(group: Group) -> dist.ProcessGroup:
    """The process group of `group`: itself, that of a 1-D DeviceMesh, or the default one.

    Raises RuntimeError without torch.distributed, ValueError for a mesh of several dimensions.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "group: torch.distributed is not initialised; run under torchrun and call "
            "torch.distributed.init_process_group first"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a 1-D DeviceMesh such as mesh['context'], got {group.ndim}-D"
            )
        return group.get_group()
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or DeviceMesh, got {type(group).__name__}")
    return group


def halves(x: Tensor) -> Tensor:
    """[B, 2c, G, D] -> [1, B, 2, c, G, D]: this rank's row, its two chunks apart."""
    return x.unflatten(1, (2, -1))[None]


def in_order(every: Tensor, at: int) -> Tensor:
    """[W, .., 2 (at dimension at + 1), ..] by rank -> [.., 2W (at dimension at), ..] by chunk."""
    early, late = every.unbind(at + 1)
    return torch.cat([early, late.flip(0)]).movedim(0, at)


def by_rank(chunks: Tensor, at: int) -> Tensor:
    """The inverse of in_order."""
    early, late = chunks.movedim(at, 0).chunk(2)
    return torch.stack([early, late.flip(0)], at + 1)


Pending = tuple[Tensor, "dist.Work | None", str]
Landing = tuple[Pending, Tensor]

# The same calls: torch 2.13 renamed them.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def failed(what: str, error: Exception) -> ExchangeFailed:
    return ExchangeFailed(
        f"rank {dist.get_rank()}: the exchange of {what} failed: a rank died, did not make the "
        f"call, or the group's timeout passed ({type(error).__name__}: {error})"
    )


def _start(
    collective: Callable, rows: int, x: Tensor, group: dist.ProcessGroup, what: str
) -> Pending:
    """Start a collective of x into as many rows; one of nothing is none."""
    out = x.new_empty(rows, *x.shape[1:])
    if not x.numel():
        return out, None, what
    try:
        work = collective(out, x.contiguous(), group=group, async_op=True)
    except RuntimeError as error:
        raise failed(what, error) from error
    return out, work, what


def all_gather(x: Tensor, group: dist.ProcessGroup, what: str) -> Pending:
    """Start gathering x of every rank into [W * x.shape[0], ..]."""
    return _start(_ALL_GATHER, group.size() * x.shape[0], x, group, what)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, what: str) -> Pending:
    """Start adding x [W * n, ..] over the ranks; each keeps its own n rows, in fp32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return _start(_REDUCE_SCATTER, x.shape[0] // group.size(), x, group, what)


def finish(pending: Pending) -> Tensor:
    out, work, what = pending
    if work is not None:
        try:
            work.wait()
        except RuntimeError as error:
            raise failed(what, error) from error
    return out


class GatherInOrder(torch.autograd.Function):
    """Whole sequences of what ranks hold two chunks of: [B, 2c, G, D] -> [B, S, G, D] each, in one
    node, whose backward meets on all ranks in the same order.

    apply(group, names, landings, *tensors). The results hold nothing before land() of `landings`.
    """

    @staticmethod
    def forward(ctx, group, names, landings, *tensors):
        ctx.group, ctx.names, ctx.dtypes = group, names, [x.dtype for x in tensors]
        wholes = []
        for name, x in zip(names, tensors, strict=True):
            whole = x.new_empty(x.shape[0], x.shape[1] * group.size(), *x.shape[2:])
            landings.append((all_gather(halves(x), group, name), whole))
            wholes.append(whole)
        return tuple(wholes)

    @staticmethod
    def backward(ctx, *grads):
        pending = [
            reduce_scatter(
                by_rank(grad.unflatten(1, (2 * ctx.group.size(), -1)), 1), ctx.group,
                f"the gradient of {name}",
            ) if need else None
            for name, grad, need in zip(ctx.names, grads, ctx.needs_input_grad[3:], strict=True)
        ]  # fmt: skip
        sums = [
            None if p is None else finish(p).to(dtype)[0].flatten(1, 2)
            for p, dtype in zip(pending, ctx.dtypes, strict=True)
        ]
        return (None, None, None, *sums)


@torch.no_grad()
def land(landings: list[Landing]) -> None:
    """Wait for what is on its way, and put its chunks in order."""
    for pending, whole in landings:
        whole.copy_(in_order(finish(pending), 1).flatten(1, 2))
    landings.clear()  # not before: who asks again after an error has to meet it again


def agree(
    describe: Callable[[], list[int]], length: int, group: dist.ProcessGroup, what: str
) -> list[list[int]]:
    """What describe() gives on every rank, `length` ints each.

    Nobody returns before everybody spoke, so an error of describe() on one rank, whatever it is,
    ends with an error on every rank.
    """
    error = None
    try:
        mine = torch.tensor([[1, *describe()]], dtype=torch.int64)
    except Exception as caught:
        mine, error = torch.zeros(1, 1 + length, dtype=torch.int64), caught
    cpu = "cpu:" in str(dist.get_backend_config(group))
    where = "cpu" if cpu else torch.device("cuda", torch.cuda.current_device())
    every = finish(all_gather(mine.to(where), group, f"what each rank has for {what}"))
    if error is not None:
        raise error
    rows = every.tolist()
    bad = [rank for rank, row in enumerate(rows) if not row[0]]
    if bad:
        raise ValueError(f"rank {bad[0]} of {len(rows)} refused its {what}: see its error")
    return [row[1:] for row in rows]


def agree_on(
    describe: Callable[[], dict[str, Any]],
    names: Sequence[str],
    group: dist.ProcessGroup,
    what: str,
) -> None:
    """Raise ValueError on every rank unless all ranks' describe() give equal values by `names`.

    An error of describe() on one rank ends with an error on every rank, as in agree().
    """
    mine: dict[str, Any] = {}

    def numbers() -> list[int]:
        mine.update(describe())
        return [zlib.crc32(repr(mine[name]).encode()) for name in names]

    every = agree(numbers, len(names), group, what)
    for rank, row in enumerate(every):
        for name, theirs, first in zip(names, row, every[0], strict=True):
            if theirs != first:
                raise ValueError(
                    f"ranks must agree on {name}: rank {rank} differs from rank 0, here "
                    f"{mine[name]}"
                )
