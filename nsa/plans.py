"""Which kernels a call launches, found without launching them, and their compilation beforehand.

python -m nsa.plans --seqlens 1024,8192 --training --decode 8192    # warm the cache on disk
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nsa import dispatch
from nsa.config import NSAConfig, check_int
from nsa.flags import Flags
from nsa.module import NSAAttention
from nsa.options import Parser

if TYPE_CHECKING:
    from nsa.kernels.launch import Launch

PAPER = NSAConfig(dim=2560, heads=64, groups=4, d_k=128, d_v=128)


@dataclass(frozen=True)
class CallPlan:
    """What one call would do: the routes of its branches, and its launches in order."""

    decisions: tuple[dispatch.Decision, ...]
    launches: tuple[Launch, ...]
    passed_over: dict[str, str]  # faster kernels that the call does not take, and why

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels in the order of their launches."""
        return tuple(one.kernel.__name__ for one in self.launches)


def plan_call(call: Callable[[], Any]) -> CallPlan:
    """Return what call() would launch; its results are not computed.

    PyTorch's own operations of the call do run, and must not depend on the values of results.
    """
    from nsa.kernels.launch import planning

    # The backward stays on this thread, which is the one that plans.
    with dispatch.trace() as decisions, planning() as planned:
        with torch.autograd.set_multithreading_enabled(False):
            call()
    return CallPlan(tuple(decisions), tuple(planned.launches), planned.passed_over)


def layer_call(
    layer: NSAAttention, seqlen: int, *, batch: int = 1, training: bool = False
) -> Callable[[], Any]:
    """Return a call of a layer's forward, with `training` of its forward and backward."""
    weight = layer.qkv.weight
    x = torch.empty(
        batch, seqlen, layer.config.dim, dtype=weight.dtype, device=weight.device,
        requires_grad=training,
    )  # fmt: skip
    if not training:
        return torch.no_grad()(lambda: layer(x))

    def both() -> None:
        y = layer(x)
        torch.autograd.grad(y, [x, *layer.parameters()], torch.empty_like(y))

    return both


def step_call(layer: NSAAttention, length: int, *, batch: int = 1) -> Callable[[], Tensor]:
    """Return a call of one decode step behind `length` tokens."""
    weight = layer.qkv.weight
    x = torch.empty(batch, 1, layer.config.dim, dtype=weight.dtype, device=weight.device)
    cache = layer.make_cache(batch, length + 1)
    cache.lens += length
    cache.lengths[:] = [length] * batch
    return lambda: layer.step(x, cache)


def warmup(
    config: NSAConfig, *, seqlens: Sequence[int] = (), decode: Sequence[int] = (), batch: int = 1,
    training: bool = False, dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda", flags: Flags | None = None,
) -> list[str]:  # fmt: skip
    """Compile what a layer of these sizes launches, all kernels side by side.

    seqlens: tokens of a forward, and with `training` of its backward too. decode: lengths of a
    cache behind which a step is taken. The results stay in this process and in Triton's cache on
    disk. Returns the names of the kernels. Raises ValueError where the device is no CUDA device.
    """
    from nsa.kernels.launch import compile_side_by_side

    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}")
    if not torch.cuda.is_available():
        raise ValueError(f"device must be a CUDA device, got {device} where there is none")
    for name, lengths in (("seqlens", seqlens), ("decode", decode)):
        for length in lengths:
            check_int(name, length, 1)
    found: list[Launch] = []
    with torch.cuda.device(device):
        layer = NSAAttention(config, flags=flags).to(device, dtype)
        for length in seqlens:
            for train in {False, training}:
                call = layer_call(layer, length, batch=batch, training=train)
                found += plan_call(call).launches
        for length in decode:
            found += plan_call(step_call(layer, length, batch=batch)).launches
        compile_side_by_side(found)
    return sorted({one.kernel.__name__ for one in found})


def lengths(text: str) -> list[int]:
    """Numbers of tokens, for argparse."""
    try:
        values = [int(x) for x in text.split(",") if x]
    except ValueError:
        values = [0]
    if min(values, default=1) < 1:
        raise argparse.ArgumentTypeError(
            f"must be integers of at least 1, such as 64,128, got {text!r}"
        )
    return values


def main(argv: list[str] | None = None) -> int:
    """Compile what the given calls launch and say how long it took.

    Exit code 2 for wrong arguments, 3 without CUDA.
    """
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", type=lengths, default=[8192], help="tokens of forwards")
    parser.add_argument("--decode", type=lengths, default=[], help="lengths before a decode step")
    parser.add_argument("--training", action="store_true", help="the backward too")
    for name in ("dim", "heads", "groups", "d_k", "d_v", "l", "d", "l_sel", "n_sel", "window"):
        names = ("--window", "--w") if name == "window" else (f"--{name}",)
        parser.add_argument(*names, type=int, default=getattr(PAPER, name))
    args = parser.parse_args(argv)
    try:
        config = NSAConfig(
            **{f.name: getattr(args, f.name) for f in fields(NSAConfig) if hasattr(args, f.name)}
        )
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to compile", file=sys.stderr)
        return 3
    torch.zeros(1, device="cuda")
    begin = time.perf_counter()
    kernels = warmup(config, seqlens=args.seqlens, decode=args.decode, training=args.training)
    print(f"{len(kernels)} kernels ready after {time.perf_counter() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
