"""Inputs for tests that every test file shares. The parity judgement is bench/parity.py."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.clock import HostClock, repeat
from nsa.blocks import num_compressed
from nsa.flags import Flags

if TYPE_CHECKING:  # scripts/fuzz needs no pytest
    import pytest

# The kernels wherever they can run, on any card, for any length, with gradients.
TRITON = Flags(
    use_triton_sel=True, sel_triton_allow_grad=True, sel_triton_min_L=1, triton_sel_force=True
)


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A seeded generator; inputs are drawn on CPU, so every device sees the same numbers."""
    return torch.Generator(device).manual_seed(seed)


def randn(
    *shape: int, seed: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu",
    requires_grad: bool = False,
) -> Tensor:  # fmt: skip
    """N(0, 1) drawn in fp64 on CPU, then cast and moved."""
    x = torch.randn(*shape, generator=generator(seed), dtype=torch.float64)
    return x.to(device=device, dtype=dtype).requires_grad_(requires_grad)


def make_qkv(
    B: int = 1, S: int = 32, HQ: int = 4, G: int = 2, Dk: int = 16, Dv: int | None = None, *,
    Skv: int | None = None, dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu", seed: int = 0, requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q [B, S, HQ, Dk], k [B, Skv, G, Dk], v [B, Skv, G, Dv], each N(0, 1)."""
    Dv, Skv = Dv or Dk, S if Skv is None else Skv
    kw = {"dtype": dtype, "device": device, "requires_grad": requires_grad}
    shapes = (B, S, HQ, Dk), (B, Skv, G, Dk), (B, Skv, G, Dv)
    return tuple(randn(*x, seed=seed * 1000 + i, **kw) for i, x in enumerate(shapes, 1))


def make_layer(
    S: int, HQ: int = 4, G: int = 2, Dk: int = 16, Dv: int | None = None, *, l: int = 8, d: int = 4,
    B: int | None = 1, n_cmp: int | None = None, dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu", seed: int = 0,
) -> list[Tensor]:  # fmt: skip
    """Return the tensors that nsa_attention takes: q, keys and values of the three branches, each
    N(0, 1), and gates; of B sequences, or packed (None) with n_cmp compressed keys."""
    n_cmp = num_compressed(S, l, d) if n_cmp is None else n_cmp
    lead, kw = () if B is None else (B,), dict(dtype=dtype, device=device)
    draw = lambda i, n, *tail: randn(*lead, n, *tail, seed=10 * seed + i, **kw)
    kv = [draw(2 + i, n_cmp if i < 2 else S, G, (Dv or Dk) if i % 2 else Dk) for i in range(6)]
    return [draw(1, S, HQ, Dk), *kv, draw(9, S, HQ, 3).sigmoid()]


INT_MAX = torch.iinfo(torch.int32).max
RANGE_KINDS = ("few", "many", "mixed")
HOSTILE_RANGE_KINDS = (
    "empty", "one_key", "last_key", "whole", "duplicate", "overlap", "touching", "unsorted",
    "inverted", "out_of_bounds", "some_empty", "all_but_one_empty", "int32_extremes",
    "int64_extremes",
)  # fmt: skip


def _cut(total: int, parts: int, gen: torch.Generator) -> list[int]:
    """`parts` positive lengths with sum `total`."""
    if parts == 1:
        return [total]
    cuts = (torch.randperm(total - 1, generator=gen)[: parts - 1] + 1).sort().values.tolist()
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def _spread(lengths: list[int], Skv: int, gen: torch.Generator) -> list[tuple[int, int]]:
    """Disjoint spans of these lengths at random places; at least one key apart if room allows."""
    free = Skv - sum(lengths)
    gaps = torch.rand(len(lengths) + 1, generator=gen)
    gaps = (gaps / gaps.sum() * free).long().tolist()
    spans, at = [], 0
    for gap, length in zip(gaps, lengths, strict=False):
        at += gap
        spans.append((at, at + length))
        at += length
    return spans


def make_ranges(
    kind: str, B: int, S: int, G: int, Skv: int, L: int, *, seed: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:  # fmt: skip
    """int32 ranges [B, S, G, n, 2] over Skv keys whose rows select L keys (hostile kinds differ,
    int64_extremes in dtype too): few: [(0, L)]; many: 8 equal spans; mixed: 2, 4 or 8 random spans.
    Hostile kinds are what a wrapper must clean.
    """
    if not 0 < L <= Skv:
        raise ValueError(f"L must be in 1..Skv={Skv}, got {L}")
    gen, half, far = generator(seed), max(1, L // 2), 1 << 32
    fixed = {
        "few": [(0, L)], "empty": [(0, 0)], "last_key": [(Skv - 1, Skv)], "whole": [(0, Skv)],
        "duplicate": [(0, half)] * 3, "overlap": [(0, half), (half // 2, L), (half // 3, half)],
        "touching": [(0, half), (half, L), (L, min(L + 1, Skv))],
        "unsorted": [(half, L), (0, half // 2)], "inverted": [(L, half), (0, half), (5, 5)],
        "out_of_bounds": [(-7, half), (Skv - 1, Skv + 100), (Skv + 3, Skv + 9), (-9, -3)],
        "int32_extremes": [
            (-INT_MAX - 1, half), (Skv - 1, INT_MAX), (L, -INT_MAX - 1), (INT_MAX, 0)
        ],
        # Whose low halves are ordinary ranges.
        "int64_extremes": [(far, far + L), (0, L - far), (-far, half), (Skv - 1, far)],
    }  # fmt: skip
    rows: list[list[tuple[int, int]]] = []
    for row in range(B * S * G):
        if kind in fixed:
            spans = fixed[kind]
        elif kind == "many":
            n = min(8, L)
            spans = _spread([L // n + (i < L % n) for i in range(n)], Skv, gen)
        elif kind == "mixed":
            n = min([2, 4, 8][int(torch.randint(3, (1,), generator=gen))], L)
            spans = _spread(_cut(L, n, gen), Skv, gen)
        elif kind == "one_key":
            at = int(torch.randint(Skv, (1,), generator=gen))
            spans = [(at, at + 1)]
        elif kind == "some_empty":
            spans = [(0, 0)] if row % 3 == 0 else [(0, half), (0, 0)]
        elif kind == "all_but_one_empty":
            spans = [(0, L)] if row == B * S * G - 1 else [(0, 0)]
        else:
            raise ValueError(f"kind must be one of {RANGE_KINDS + HOSTILE_RANGE_KINDS}: {kind!r}")
        rows.append(spans)
    n = max(map(len, rows))
    padded = [r + [(0, 0)] * (n - len(r)) for r in rows]
    dtype = torch.int64 if kind == "int64_extremes" else torch.int32
    return torch.tensor(padded, dtype=dtype).view(B, S, G, n, 2).to(device)


BLOCK_KINDS = ("random", "clustered", "one_block", "own_only", "first_only", "all", "ragged")


def make_block_indices(
    kind: str, B: int, S: int, G: int, n_sel: int, l_sel: int, *, seed: int = 0, q_start: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:  # fmt: skip
    """Causal block_indices int32 [B, S, G, n_sel], ascending, -1 padded; row s is query q_start+s.

    random: own block and random earlier ones. clustered: the n_sel latest. one_block: block 0 and
    the own block (every query loads one block: worst for key-major kernels). all: as many as fit
    from the start, own last. ragged: random with a random number of blocks, none included.
    """
    gen, count = generator(seed), 0
    result = torch.full((B, S, G, n_sel), -1, dtype=torch.int32)
    for b, s, g in itertools.product(range(B), range(S), range(G)):
        own = (q_start + s) // l_sel
        earlier = torch.randperm(own, generator=gen) if own else torch.zeros(0)
        if kind == "ragged":
            count = int(torch.randint(n_sel + 1, (1,), generator=gen))
        row = {
            "random": [own, *earlier[: n_sel - 1].tolist()],
            "clustered": [*range(max(0, own - n_sel + 1), own + 1)],
            "one_block": [0, own][:n_sel] if own else [0],
            "own_only": [own],
            "first_only": [0],
            "all": [*range(min(own, n_sel - 1)), own],
            "ragged": [own, *earlier.tolist()][:count],
        }[kind]
        row = sorted(set(map(int, row)))
        result[b, s, g, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return result.to(device)


def grads(fn: Callable[..., Tensor], inputs: Sequence[Tensor], grad_out: Tensor) -> list[Tensor]:
    """Gradients of fn(*inputs) with the given output gradient, on fresh leaves."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    return list(torch.autograd.grad(out, leaves, grad_out.to(out.dtype)))


class SteadyClock(HostClock):
    """The host's clock, but that calls back to back take it a microsecond each, whatever else the
    machine does meanwhile: rows are not refused for what two clocks saw at different moments."""

    def wall(self, call: Callable[[], Any], n: int = 5) -> float:
        repeat(call, n)
        return 1.0


class Watch(TorchDispatchMode):
    """Every operation of PyTorch's in the block goes to see(operation, result)."""

    def __init__(self, see: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.see(func, out)
        return out


@contextlib.contextmanager
def deterministic(on: bool = True) -> Iterator[None]:
    """torch.use_deterministic_algorithms(True) inside: kernels must not add in changing order."""
    if not on:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*deterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def assert_finite(**tensors: Tensor) -> None:
    """Fail and name the tensor that holds NaN or infinity."""
    for name, x in tensors.items():
        bad = ~x.isfinite()
        assert not bad.any(), f"{name} is not finite at {bad.nonzero()[0].tolist()}"


def assert_raises(*cases: tuple[type[BaseException], str, Callable[[], object]]) -> None:
    """Each call of (error, words, call) raises such an error with such words."""
    import pytest

    for error, words, call in cases:
        with pytest.raises(error, match=words):
            call()


def sent(patch: pytest.MonkeyPatch, call: Callable[..., Any], *args: Any) -> tuple[Any, list[dict]]:
    """Call call(*args). Returns its result and the rows that it sends to a report."""
    read, write = os.pipe()
    with patch.context() as inside:  # pytest's own record of the test must not come here
        inside.setenv("NSA_RESULT_FD", str(write))
        result = call(*args)
    os.close(write)
    with os.fdopen(read) as pipe:
        return result, [json.loads(line) for line in pipe]


def left_for_the_collector(call: Callable[[], object]) -> list[Tensor]:
    """Tensors that `call` leaves in reference cycles: Python frees them only when its garbage
    collector comes by."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call()
        gc.collect()
        return [x for x in gc.garbage if isinstance(x, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
