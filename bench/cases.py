"""What a bench times: a case, the candidate and the baselines that it calls."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def truths(exact: Callable[[torch.dtype], Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """oracle and same_dtype, of a Case or a Contender, by a result that is exact in a dtype."""
    return {"oracle": lambda: exact(torch.float64), "same_dtype": lambda: exact(dtype)}


@dataclass(frozen=True)
class Contender:
    """A named call. `kernels` are the launches that prove that it ran on path `path`.

    oracle and same_dtype: its own, where it computes something else than the case does (dense
    attention as the baseline of a sparse one); bytes_needed and flops: of that. attends: the
    backend of torch's SDPA that its name promises (flash, efficient, cudnn, math). watched: what
    runs its operators where the call itself replays a CUDA graph of them.
    """

    name: str
    call: Callable[[], Any]
    path: str
    kernels: tuple[str, ...] = ()
    oracle: Callable[[], Tensor] | None = None
    same_dtype: Callable[[], Tensor] | None = None
    bytes_needed: int | None = None
    flops: int | None = None
    attends: str | None = None
    watched: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Case:
    """What is timed against what, and what it must compute.

    refill(seed) writes new inputs into the same memory; inputs() lists them (they must survive the
    calls). renew(seed), refill unless given, is the cheap half of that, before every timed call: it
    writes new numbers into a part of the inputs that everything compared depends on, and always the
    same ones for a seed. oracle() is the output in fp64 for the present inputs; same_dtype() the
    plain PyTorch computation in the output's dtype. view() picks the part of a call's result that
    these two give, without waiting for the device. distinct: whether other inputs surely give other
    results (a query with one key does not). foreign: kernels that are no part of the candidate's
    work and must not run in its calls. bytes_needed: what must cross the memory bus once, cold;
    flops: the useful ones. facts() are columns that are known once the candidate was called.
    """

    bench: str
    name: str
    candidate: Contender
    refill: Callable[[int], None]
    inputs: Callable[[], Sequence[Tensor]]
    oracle: Callable[[], Tensor]
    same_dtype: Callable[[], Tensor] | None = None
    baselines: Sequence[Contender] = ()
    view: Callable[[Any], Tensor] = lambda out: out
    renew: Callable[[int], None] | None = None
    distinct: bool = True
    foreign: tuple[str, ...] = ()
    requested: str | None = None
    bytes_needed: int | None = None
    flops: int | None = None
    seed: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)
    facts: Callable[[], Mapping[str, Any]] | None = None


@dataclass(frozen=True)
class Unbuilt:
    """A case whose inputs measure() makes: too little memory for them is a row as well.

    more(row): what the CSV gets besides, once it was timed. budget: a timing.Budget of its own.
    """

    bench: str
    name: str
    build: Callable[[], Case]
    columns: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[Any], dict[str, Any]] | None = None
    budget: Any = None
