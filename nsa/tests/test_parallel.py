"""Context parallelism over gloo processes, prefill and decode: the outputs, gradients and blocks of
one process.

Each world is started once and works through all its cases; the tests read what it found.
"""

import dataclasses
import datetime
import itertools
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nsa import attention, dispatch, exchange, fp8, launches, oracle, parallel, parallel_cache
from nsa.arrival import await_selection, selection_waits
from nsa.attention import nsa_attention, nsa_decode, sliding_attention
from nsa.cache import BranchKV, NSACache
from nsa.compress import MLPCompression, mean_pool
from nsa.config import NSAConfig
from nsa.decode_graph import StepGraph
from nsa.errors import ExchangeFailed
from nsa.flags import Flags
from nsa.module import NSAAttention, NSABlock
from nsa.parallel_cache import ParallelNSACache, merge
from nsa.tests.conftest import _poisoned, quicken_interpreter
from nsa.tests.helpers import TRITON, Watch, assert_raises
from nsa.tests.oracle_numbers import NAMES

ROOT = Path(__file__).resolve().parents[2]
SIZES = dict(l=8, d=4, l_sel=8, n_sel=3, window=9)
LAYER = dict(dim=16, heads=4, groups=2, d_k=8, l=8, d=4, l_sel=8, n_sel=3, w=9)
CONFIG = NSAConfig(**{**LAYER, "n_sel": 5}, d_v=16, phi="mean")
F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
TOLERANCE = {F64: 1e-10, F32: 2e-5, BF16: 4e-2, F16: 2e-2}


def _close(got: Any, want: Any, like: torch.dtype = F64, **how: Any) -> None:
    tol = TOLERANCE[like]
    torch.testing.assert_close(got, want, rtol=tol, atol=tol, **how)


def _tokens(B, S, dtype=F64, c=CONFIG) -> dict[str, torch.Tensor]:
    """q, gates, raw keys and values, and the output's gradient of S tokens."""
    gen = torch.Generator().manual_seed(S)
    shapes = {"q": (c.heads, c.d_k), "gates": (c.heads, 3), "do": (c.heads, c.d_v)}
    for branch in ("cmp", "sel", "win"):
        shapes |= {f"k_{branch}": (c.groups, c.d_k), f"v_{branch}": (c.groups, c.d_v)}
    draw = lambda shape: torch.randn(B, S, *shape, generator=gen, dtype=F64).to(dtype)
    return {n: draw(shape) for n, shape in shapes.items()}


def _shards(world: int) -> dict[str, torch.Tensor]:
    """This rank's chunks of 16 tokens for each rank."""
    return {n: parallel.shard(t) for n, t in _tokens(1, 16 * world, F32).items()}


def _over_ranks(x: dict[str, torch.Tensor], **how: Any) -> Any:
    how = {"phi_k": _pool, "phi_v": _pool, "backend": "reference", **SIZES, **how}
    return parallel.nsa_attention_parallel(*(x[n] for n in NAMES), **how)


# name: batch, tokens per chunk, dtype, what differs from SIZES; exact ones by the reference
CASES: dict[str, tuple[int, int, torch.dtype, dict[str, Any]]] = {
    "fp64": (2, 8, F64, {}), "fp32": (1, 16, F32, {}), "bf16": (1, 16, BF16, {}),
    "chunks-cut-blocks": (1, 12, F64, {"l_sel": 16, "n_sel": 4}), "mlp": (1, 8, F64, {}),
    "window-over-chunks": (1, 8, F64, {"window": 19}), "window-of-one": (1, 8, F64, {"window": 1}),
    "window-over-all": (1, 8, F64, {"window": 500}), "chunk-shorter-than-l": (1, 4, F64, {}),
    "blocks-apart": (1, 8, F64, {"l": 4}), "scale": (1, 8, F64, {"softmax_scale": 1.3}),
    "forced": (1, 16, F64, {"n_init": 0, "n_local": 1}),
}  # fmt: skip


def _run_case(name: str) -> None:
    B, c, dtype, change = CASES[name]
    sizes = {**SIZES, **change}
    l, d = sizes["l"], sizes["d"]
    phis = [lambda x: mean_pool(x, l, d)] * 2
    if name == "mlp":
        torch.manual_seed(0)
        phis = [MLPCompression(width, l, d).to(dtype) for width in (8, 16)]
    backend = "reference" if dtype == F64 else None
    _check_chunks(
        _tokens(B, 2 * dist.get_world_size() * c, dtype), *phis, dtype, backend=backend, **sizes
    )


def _check_chunks(full: dict, phi_k: Any, phi_v: Any, like: torch.dtype, **how: Any) -> Any:
    """Outputs, blocks and gradients are those of the whole sequence. Returns the routes and the
    launches of the chunks."""
    shard, how["return_aux"] = parallel.shard, True
    weights = [p for phi in (phi_k, phi_v) for p in getattr(phi, "parameters", list)()]
    leaves = [full[n].clone().requires_grad_() for n in NAMES]
    q, k_cmp, v_cmp, *rest = leaves
    want, want_aux = nsa_attention(q, phi_k(k_cmp), phi_v(v_cmp), *rest, **how)
    want_grads = torch.autograd.grad(want, [*leaves, *weights], full["do"])
    mine = {n: shard(full[n]).clone().requires_grad_() for n in NAMES}
    with launches.recording() as counts:
        got, aux = _over_ranks(mine, phi_k=phi_k, phi_v=phi_v, **how)
        grads = torch.autograd.grad(got, [*mine.values(), *weights], shard(full["do"]))
    assert torch.equal(aux["block_indices"], shard(want_aux["block_indices"]))
    _close([got, aux["lse"]], [shard(want), shard(want_aux["lse"])], like)
    for n, g, w in zip(NAMES, grads, want_grads, strict=False):
        _close(g, shard(w), like, msg=lambda m, n=n: f"d{n}: {m}")
    for g, w in zip(grads[len(NAMES) :], want_grads[len(NAMES) :], strict=True):
        dist.all_reduce(g)
        _close(g, w, like)
    _close(parallel.unshard(got), want.detach(), like)
    return aux["routes"], counts


# What else every rank does, by name.
JOBS: dict[str, Callable[[int, int], None]] = {}


def job(run: Callable[[int, int], None]) -> Callable[[int, int], None]:
    JOBS[run.__name__.strip("_").replace("_", "-")] = run
    return run


@job
def _layer(rank: int, world: int) -> None:
    """A whole layer by DeviceMesh: positions of the rotary embedding and phi are right too. Its
    prefill from shards fills a cache; its steps are forward()'s rows."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("context",))
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, phi="mlp")
    layer, S = NSAAttention(config, backend="reference").double(), 24 * world
    x = torch.randn(1, S + 18, config.dim, dtype=F64)
    want, mine = layer(x), parallel.shard(x[:, :S], mesh)
    want_grads = torch.autograd.grad(want[:, :S].square().sum(), list(layer.parameters()))
    got = parallel.nsa_layer_parallel(layer, mine, mesh["context"])
    _close(got, parallel.shard(want[:, :S], mesh))
    grads = torch.autograd.grad(got.square().sum(), list(layer.parameters()))
    for g, w in zip(grads, want_grads, strict=True):
        dist.all_reduce(g)
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)
    cache, alone = ParallelNSACache(config, 1, S + 18, dtype=F64), layer.make_cache(1, S)
    prefill = lambda cache: parallel.nsa_layer_parallel(layer, mine, cache=cache)
    fresh = ParallelNSACache(config, 1, S, dtype=F64)
    _close(parallel.unshard(prefill(cache)), want[:, :S].detach())
    assert cache.lengths == [S]
    for at, end in ((S, S + 10), *((t, t + 1) for t in range(S + 10, S + 18))):
        _close(layer.step(x[:, at:end], cache), want[:, at:end].detach())
    assert_raises(
        (ValueError, "cache must be empty, it holds", lambda: prefill(cache)),
        (ValueError, "cache must be a ParallelNSACache of this group", lambda: prefill(alone)),
        (ValueError, "agree on cache", lambda: prefill(None if rank else fresh)),
    )


@job
def _settings(rank: int, world: int) -> None:
    """Flags and the layer's settings reach the calls on chunks."""
    x, parity = _shards(world), Flags(force_parity=True)
    for flags, routes in ((parity, {"reference"}), (None, {"reference", "sdpa"})):
        _, aux = _over_ranks(x, flags=flags, backend=None, return_aux=True)
        assert set(aux["routes"].values()) == routes, aux["routes"]
    for how in (dict(flags=parity), dict(backend="reference")):
        layer = NSAAttention(NSAConfig(d_v=8, **LAYER), **how)
        with dispatch.trace() as taken:
            parallel.nsa_layer_parallel(layer, torch.zeros(1, 16, 16))
        assert {d.route.value for d in taken} == {"reference"}, taken


@job
def _wrong_shards(rank: int, world: int) -> None:
    x = torch.zeros(2, 4 * world)
    words = "dim must be a dimension of x, of shape"
    assert_raises(
        (TypeError, "x must be a tensor, got list", lambda: parallel.shard([1])),
        (TypeError, "x must be a tensor, got list", lambda: parallel.unshard([1])),
        (ValueError, f"{words} .*, got 9", lambda: parallel.shard(x, dim=9)),
        (ValueError, f"{words} .*, got -3", lambda: parallel.unshard(x, dim=-3)),
        (ValueError, f"{words} .*, got None", lambda: parallel.shard(x, dim=None)),
    )
    assert torch.equal(parallel.unshard(parallel.shard(x, dim=-1), dim=-1), x)


@job
def _overlap(rank: int, world: int) -> None:
    """Selection's keys arrive after the window was attended and before the blocks are; an exchange
    that fails then is the call's error, whatever routes are left, and no result."""
    x, order = _shards(world), []
    land, finish = exchange.land, exchange.finish

    def noted(name: str, call: Any) -> Any:
        return lambda *args, **kw: (order.append(name), call(*args, **kw))[1]

    def landed(landings: Any) -> None:
        if any(what == "k_sel" for (_, _, what), _ in landings):
            order.append("land")
        land(landings)

    with (
        mock.patch.object(attention, "sliding_attention", noted("win", sliding_attention)),
        mock.patch.object(attention, "_selected", noted("sel", attention._selected)),
        mock.patch.object(exchange, "land", landed),
    ):
        _over_ranks(x)
        assert order == ["win", "land", "sel", "win", "sel"], order
        order.clear()
        # A kernel copies the start of several sequences before it asks for anything.
        _over_ranks({n: t.repeat(2, 1, 1, 1) for n, t in x.items()})
        assert order == ["land", "win", "sel", "win", "sel"], order

    def lost(pending: Any) -> Any:
        if pending[2] == "v_sel":
            raise exchange.failed("v_sel", RuntimeError("gone"))
        return finish(pending)

    words = "the exchange of v_sel failed"
    with mock.patch.object(exchange, "finish", lost):
        assert_raises(
            (ExchangeFailed, words, lambda: _over_ranks(x, backend=None)),
            (ExchangeFailed, words, lambda: _over_ranks(x)),
        )


def _bad(**change: Any) -> Callable[[dict, dict], None]:
    """Give other tensors, by a function of the old one, and other arguments."""

    def apply(x: dict[str, torch.Tensor], how: dict[str, Any]) -> None:
        how |= {name: value for name, value in change.items() if name not in x}
        x |= {name: change[name](t) for name, t in x.items() if name in change}

    return apply


_all = lambda f: _bad(**dict.fromkeys(NAMES, f))
_pool = lambda t: mean_pool(t, SIZES["l"], SIZES["d"])
_short = lambda t: t[:, :-1]
_EVERYWHERE = ("length", "stride", "group")
_TURNED = NSAConfig(d_v=8, rope_base=500.0, **LAYER)


def _layer_bad(change: Callable[[NSAAttention, torch.Tensor], torch.Tensor | None]) -> Any:
    """Change the layer, or give other tokens."""

    def apply(layer: NSAAttention, x: torch.Tensor) -> tuple[NSAAttention, torch.Tensor]:
        other = change(layer, x)
        return layer, x if other is None else other

    return apply


# What is wrong on the last rank, or on all; what every rank but the last says, and the last.
BAD: dict[str, tuple[Any, str, str]] = {
    "length": (_bad(q=_short, gates=_short), *("must have q's B and S / W",) * 2),
    "stride": (_all(lambda t: t[:, :12]), "at least l - d = 4 tokens", "got 12 tokens per rank"),
    "group": (_bad(group="all"), *("group must be a ProcessGroup or DeviceMesh, got str",) * 2),
    "one-length": (_all(lambda t: t[:, :8]), *("ranks must agree on q: rank",) * 2),
    "one-refused": (_bad(k_sel=_short), "refused its arguments", "k_sel must have q's B and S / W"),
    "dtype": (_all(lambda t: t.double()), "ranks must agree on q: rank", "torch.float64"),
    "grad": (_bad(k_win=torch.Tensor.requires_grad_), "agree on k_win", "requires_grad=True"),
    "sizes": (_bad(window=8), "ranks must agree on the sizes", "differs from rank 0"),
    "no-backend": (_bad(backend="trton"), "refused its arguments", "got 'trton'"),
    "backend": (_bad(backend="sdpa"), "softmax_scale, backend and grad mode", "backend sdpa"),
    "device": (_all(lambda t: t.to("meta")), "ranks must agree on q: rank", "on meta"),
    "no-flags": (_bad(flags=3), "refused its arguments", "flags must be an nsa.Flags, got int"),
    "flags": (_bad(flags=Flags(force_parity=True)), "agree on flags: rank", "force_parity=True"),
    "scale": (_bad(softmax_scale=0.5), "sizes, softmax_scale", "softmax_scale 0.5, backend ref"),
    "grad-mode": (_bad(), "backend and grad mode: rank", "differs from rank 0"),
    "phi-raises": (_bad(phi_k=lambda t: {}["phi"]), "refused its compression", "'phi'"),
    "phi-none": (_bad(phi_v=lambda t: None), "refused its compression",
                 "phi_v must give a tensor, got NoneType"),
    "phi-device": (_bad(phi_k=lambda t: _pool(t).to("meta")), "refused its compression",
                   "in torch.float32 on meta"),
    "phi-rows": (_bad(phi_k=lambda t: _pool(t)[:, 1:]), "refused its compression",
                 "phi_k must give [2, 2, 2, 8] in torch.float32 on cpu for 2"),
    "phi-grad": (_bad(phi_k=lambda t: _pool(t).requires_grad_()),
                 *("whether phi_k and phi_v have gradients",) * 2),
    "unshard": (_all(lambda t: t[:, :8]), "agree on x's shape", "[1, 8, 4, 8], rank 0 [1, 16, 4"),
    "unshard-odd": (_all(_short), "refused its x", "two chunks along dim 1, got shape [1, 15, 4"),
    "unshard-scalar": (_all(torch.Tensor.sum), "refused its x",
                       "dim must be a dimension of x, of shape [], got 1"),
    "unshard-dtype": (_all(torch.Tensor.int), "on x's shape, dtype", "here torch.int32"),
    "unshard-device": (_all(lambda t: t.to("meta")), "on x's shape, dtype", "float32 on meta"),
    "layer-length": (_layer_bad(lambda _, x: _short(x)), "refused its arguments",
                     "be a multiple of"),
    "layer-dim": (_layer_bad(lambda _, x: x[..., :15]), "refused its arguments",
                  "x must be [B, S, dim] with dim=16, got [1, 16, 15]"),
    "layer-projection": (_layer_bad(lambda layer, _: setattr(layer.qkv, "forward", {}.__getitem__)),
                         "refused its arguments", "tensor("),
    "layer-config": (_layer_bad(lambda layer, _: setattr(layer, "config", _TURNED)),
                     "ranks must agree on config: rank", "rope_base=500.0"),
    "layer-kind": (lambda _, x: (torch.nn.Linear(4, 4), x), "refused its arguments",
                   "layer must be an nsa.NSAAttention, got Linear"),
}  # fmt: skip


def _run_bad(kind: str, rank: int, world: int) -> str:
    """One rank, or all, pass something wrong. The text of this rank's error."""
    change = BAD[kind][0] if rank == world - 1 or kind in _EVERYWHERE else lambda *same: same
    x, how, wrong = _shards(world), {}, rank == world - 1
    try:
        if kind.startswith("layer"):
            layer, tokens = NSAAttention(NSAConfig(d_v=8, **LAYER)), torch.zeros(1, 16, 16)
            parallel.nsa_layer_parallel(*change(layer, tokens))
            return "no error"
        change(x, how)
        if kind.startswith("unshard"):
            parallel.unshard(x["q"])
        with torch.set_grad_enabled(kind != "grad-mode" or not wrong):
            _over_ranks(x, **how)
    except (ValueError, TypeError, LookupError) as error:
        return str(error)
    return "no error"


def _append(cache: NSACache, x: dict[str, torch.Tensor], first: int, last: int) -> Any:
    """Append tokens first to last; the window's keys where they are more than a step."""
    phi = lambda t: mean_pool(t, cache.config.l, cache.config.d)
    new = BranchKV(**{n: x[n][:, first:last] for n in NAMES[1:-1]})
    many = last - first > cache.max_step
    near = cache.window_with(new.k_win, new.v_win) if many else None
    cache.append(new, phi, phi)
    return near


def _step(cache: NSACache, x: dict[str, torch.Tensor], first: int, last: int, **how: Any) -> Any:
    near = _append(cache, x, first, last)
    q, gates = (x[n][:, first:last] for n in ("q", "gates"))
    return nsa_decode(q, cache, near, gates, **how)


def _same_everywhere(x: torch.Tensor) -> None:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x.contiguous())
    assert all(torch.equal(x, other) for other in every)


# name: batch, prompt, tokens of the steps after it, dtype, what differs from CONFIG
STEPS: dict[str, tuple[int, int, list[int], torch.dtype, dict[str, int]]] = {
    "from-nothing": (1, 0, [1] * 20, F64, {}),  # all ranks but one are empty at first
    "after-a-prompt": (2, 61, [1] * 9, F64, {}),
    "several-tokens": (1, 30, [3, 1, 8, 2, 5], F64, {}),
    "chunks": (1, 0, [20, 33, 1, 1, 13, 1], F64, {}), "l-is-d": (1, 50, [1] * 5, F64, {"l": 4}),
    "l-over-blocks": (1, 50, [1] * 5, F64, {"l": 24}),  # a compressed token is of four blocks
    "blocks-of-many": (1, 70, [1] * 5, F64, {"l_sel": 16, "d": 2}),
    "wide-window": (1, 50, [1] * 5, F64, {"window": 200}),
    "one-head-a-group": (1, 50, [1] * 5, F64, {"groups": 4}),
    "forced": (1, 90, [1] * 5, F64, {"n_init": 0, "n_local": 1, "n_sel": 1}),
    "fp32": (1, 90, [1] * 5, F32, {}), "bf16": (1, 90, [1] * 5, BF16, {}),
    "fp8": (2, 90, [1, 3, 1, 8, 1], F32, {}), "fp8-from-nothing": (1, 0, [1] * 40, F32, {}),
}  # fmt: skip
FP8 = {"kv_cache_dtype": "fp8_e4m3", "k_descale": 2.0**-6, "v_descale": 0.3}


def _run_steps(name: str) -> None:
    """As one rank's, which is the oracle's at the last token, from the raw keys."""
    B, prompt, steps, dtype, change = STEPS[name]
    config = dataclasses.replace(CONFIG, **change)
    S = prompt + sum(steps)
    x, scale = _tokens(B, S, dtype, config), 0.7 if name == "after-a-prompt" else None
    how = dict(backend="reference", softmax_scale=scale)
    kept = {"dtype": dtype, **(FP8 if name.startswith("fp8") else {})}
    ours, alone = (kind(config, B, S, **kept) for kind in (ParallelNSACache, NSACache))
    for cache in (ours, alone) if prompt else ():
        _append(cache, x, 0, prompt)
    ends = [*itertools.accumulate(steps, initial=prompt)]
    for at, end in itertools.pairwise(ends):
        (got, chosen), (want, wanted) = (_step(cache, x, at, end, **how) for cache in (ours, alone))
        assert torch.equal(chosen, wanted), f"blocks of {at} to {end}"
        _close(got, want, dtype)
        _same_everywhere(got)
    if dtype == F64:
        cmp = [oracle.compress_mean(x[n], config.l, config.d) for n in ("k_cmp", "v_cmp")]
        branches = [x[f"{kv}_{b}"] for b in ("sel", "win") for kv in "kv"]
        how = dict(q_start=S - 1, softmax_scale=scale, **config.sizes())
        last = x["q"][:, -1:], *cmp, *branches, x["gates"][:, -1:]
        _close(got[:, -1:], oracle.nsa_attention(*last, **how))


@job
def _default_route_and_growth(rank: int, world: int) -> None:
    x, chunks = _tokens(1, 60, F32), [(0, 50), (50, 51), (51, 51), (51, 60)]
    for most, parts in ((60, chunks), (4, [(i, i + 1) for i in range(40)])):
        ours = ParallelNSACache(CONFIG, 1, most, growable=most == 4)
        alone = NSACache(CONFIG, 1, 60)
        for part in parts:
            _close(_step(ours, x, *part)[0], _step(alone, x, *part)[0], F32)


@job
def _ties(rank: int, world: int) -> None:
    """Equal scores everywhere: the lower block wins, whoever has it."""
    x = _tokens(1, 90)
    x["k_cmp"] = torch.ones_like(x["k_cmp"])
    ours = ParallelNSACache(CONFIG, 1, 90, dtype=F64)
    _append(ours, x, 0, 89)
    _, chosen = _step(ours, x, 89, 90)
    assert chosen[0, 0].tolist() == [[0, 1, 2, 10, 11]] * 2


@job
def _unseen(rank: int, world: int) -> None:
    """What lies behind the lengths, of longer sequences before, has no effect, NaN included."""
    x, bad = _tokens(1, 70), {n: torch.full_like(t, torch.nan) for n, t in _tokens(1, 100).items()}
    fresh, used = (ParallelNSACache(CONFIG, 1, 100, dtype=F64) for _ in range(2))
    _append(used, bad, 0, 100)
    used.reset()
    outs = []
    for cache in (fresh, used):
        _append(cache, x, 0, 69)
        outs.append(_step(cache, x, 69, 70)[0])
    assert torch.equal(*outs) and outs[0].isfinite().all()


@job
def _mixed(rank: int, world: int) -> None:
    """Sequences of different lengths as one batch, taken apart, turned round and rewound."""
    lengths, order = (5, 77, 40), [2, 0, 1]
    x = [_tokens(1, n + 12) for n in lengths]
    caches = [ParallelNSACache(CONFIG, 1, 100, dtype=F64) for _ in x]
    for cache, one, n in zip(caches, x, lengths, strict=True):
        _append(cache, one, 0, n)
    both = NSACache.stack(caches, max_len=120).select(torch.tensor(order))
    for i in range(8):
        one = lambda n, i=i: torch.cat([x[b][n][:, lengths[b] + i :][:, :1] for b in order])
        now = {n: one(n) for n in x[0]}
        got, _ = _step(both, now, 0, 1)
        for row, b in enumerate(order):
            want, _ = _step(caches[b], x[b], lengths[b] + i, lengths[b] + i + 1)
            _close(got[row : row + 1], want)
        if i == 5:  # a token that is refused
            both.rewind(1)
            _close(_step(both, now, 0, 1)[0][-1:], want)
    assert both.lengths == [lengths[b] + 8 for b in order] == both.lens.tolist()


@job
def _exchanges(rank: int, world: int) -> None:
    """Three exchanges a step, of as many bytes as the module's docstring says, and each rank keeps
    its part of the tokens alone."""
    B, S, c = 2, 16 * world, CONFIG
    x = _tokens(B, S, F32)
    cache = ParallelNSACache(c, B, S, check=False)
    _append(cache, x, 0, S - 1)
    with mock.patch.object(exchange, "_ALL_GATHER", side_effect=exchange._ALL_GATHER) as gather:
        _step(cache, x, S - 1, S)
    sent = [call.args[1].nbytes for call in gather.call_args_list]
    a_query = (4 * c.heads, 4 * c.groups * S // (c.d * world), 8 * c.heads * (c.d_v + 1))
    assert sent == [B * n for n in a_query], sent
    assert cache.k_sel.shape[1] == S // world + 1
    assert cache.k_cmp.shape[1] == S // c.d // world + 1
    own = torch.arange(S)[torch.arange(S) // c.l_sel % world == rank]
    assert torch.equal(cache.k_sel[:, :-1], x["k_sel"][:, own])


@job
def _no_waiting(rank: int, world: int) -> None:
    """Unchecked, nothing of a call or a step but attention itself makes the host wait for the
    device."""
    nothing = lambda q, *rest, **how: (q, {"block_indices": None, "lse": None, "routes": {}})

    def attention(q: Any, k: Any, v: Any, ranges: Any, return_lse: bool = False, **how: Any) -> Any:
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        return (out, q.new_zeros(q.shape[:-1])) if return_lse else out

    x, shards = _tokens(1, 50, F32), _shards(world)
    cache = ParallelNSACache(CONFIG, 1, 50, check=False)
    _append(cache, x, 0, 48)
    refuse = mock.Mock(side_effect=AssertionError("a value was read on the host"))
    # Tensors made of Python numbers, lists as indices among them: on a GPU the host waits for each.
    made: list[str] = []
    copies = lambda: sum(name.startswith("aten::lift_fresh") for name in made)
    with (
        mock.patch.object(parallel, "nsa_attention", nothing),
        mock.patch.object(parallel_cache, "selection_attention", attention),
        mock.patch.object(torch.Tensor, "tolist", refuse),
        mock.patch.object(torch.Tensor, "item", refuse),
        Watch(lambda func, _: made.append(func.name())),
    ):
        _over_ranks(shards, check=False, backend=None)
        _step(cache, x, 48, 50)
        assert copies() == 0, made
        torch.zeros(2)[[0]]
        assert copies() == 1, made


# What every rank but the last says, and the last; what is wrong on the last rank, or on all.
_WIDER = dataclasses.replace(CONFIG, window=10)
_LEARNT = dataclasses.replace(CONFIG, phi="mlp")
_DIFFER = "ranks must agree on step: rank"
_STEPS_EVERYWHERE = ("window", "group")
BAD_STEPS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "batch": ("ranks must agree on batch: rank", "here 2", {"batch": 2}),
    "max_len": ("ranks must agree on max_len: rank", "here 65", {"max_len": 65}),
    "config": ("ranks must agree on config: rank", "window=10",
               {"config": _WIDER}),
    "dtype": ("ranks must agree on dtype: rank", "here torch.float16", {"dtype": F16}),
    "no-batch": ("refused its cache", "batch must be at least 1, got 0", {"batch": 0}),
    "tokens": (_DIFFER, "'T': 2", {"T": 2}),
    "lengths": ("ranks must agree on lengths: rank", "here [4]", {"prompt": 4}),
    "device": ("ranks must agree on device type: rank", "here meta", {"device": "meta"}),
    "descale": ("ranks must agree on descales: rank", "here [[[2.0, 2.0]]", {"k_descale": 2.0}),
    "scale": (_DIFFER, "'softmax_scale': 0.5", {"decode": {"softmax_scale": 0.5}}),
    "backend": (_DIFFER, "'backend': 'triton'", {"decode": {"backend": "triton"}}),
    "flags": (_DIFFER, "'flags': 3", {"decode": {"flags": 3}}),
    "q": ("refused its step", "q must be [1, 0, 4, 8], got [1, 4, 8]", {"q": lambda q: q[:, 0]}),
    "q-dtype": ("refused its step", "have the cache's torch.float32, got torch.float64",
                {"q": torch.Tensor.double}),
    "window": (*("must be given for more than max_step=8 tokens",) * 2, {"prompt": 9, "T": 9}),
    "group": (*("group must be a ProcessGroup or DeviceMesh, got str",) * 2, {"group": "all"}),
    "layer": ("refused its step", "be [B, S, dim] with dim=16, got [1, 1, 15]",
              {"layer": lambda layer, x, cache: layer.step(x[..., :15], cache)}),
    "layer-dtype": (_DIFFER, "'dtype': torch.float64",
                    {"layer": lambda layer, x, cache: layer.double().step(x.double(), cache)}),
    "layer-sizes": ("refused its step", "cache must be of a layer with window=10",
                    {"layer": lambda _, x, cache: NSAAttention(_WIDER).step(x, cache)}),
    "layer-prefill": ("refused its step", "cache must be of a layer with window=10",
                      {"layer": lambda _, x, cache: NSAAttention(_WIDER).prefill(x, cache)}),
    "layer-block": ("refused its step", "cache must be of a layer with window=10",
                    {"layer": lambda _, x, cache: NSABlock(_WIDER).step(x, cache)}),
    "layer-phi": (_DIFFER, "phi='mlp'",
                  {"layer": lambda _, x, cache: NSAAttention(_LEARNT).step(x, cache)}),
    "layer-backend": (_DIFFER, "'backend': 'triton'", {"layer": lambda _, x, cache:
                      NSAAttention(CONFIG, backend="triton").step(x, cache)}),
    "layer-autocast": ("ranks must agree on autocast: rank", "here torch.bfloat16",
                       {"layer": torch.autocast("cpu", BF16)(NSAAttention.step)}),
    "layer-filled": ("refused its step", "be empty for prefill, it holds 3 tokens",
                     {"layer": lambda layer, x, cache: _append(cache, _tokens(1, 3, F32), 0, 3)
                      or layer.prefill(x, cache)}),
}  # fmt: skip


def _run_bad_step(kind: str, rank: int, world: int) -> str:
    """One rank, or all, pass something wrong. The text of this rank's error."""
    wrong = rank == world - 1 or kind in _STEPS_EVERYWHERE
    how = dict(config=CONFIG, batch=1, max_len=64, T=1, prompt=3, q=lambda q: q, decode={})
    how |= FP8 if kind == "descale" else {}
    how |= {"layer": NSAAttention.step, **(BAD_STEPS[kind][2] if wrong else {})}
    T, prompt, of_q, decode, run = (how.pop(n) for n in ("T", "prompt", "q", "decode", "layer"))
    x = _tokens(1, 30, F32)
    try:
        cache = ParallelNSACache(**how)
        if kind.startswith("layer"):
            run(NSAAttention(CONFIG), torch.zeros(1, 1, CONFIG.dim), cache)
            return "no error"
        _append(cache, x, 0, prompt)
        nsa_decode(of_q(x["q"][:, :T]), cache, None, x["gates"][:, :T], **decode)
    except (ValueError, TypeError) as error:
        return str(error)
    return "no error"


def _dies(rank: int, world: int) -> list[str]:
    """The last rank is gone; what the others' call and step end with."""
    cache, tokens = ParallelNSACache(CONFIG, 1, 30, check=False), _tokens(1, 30, F32)
    _append(cache, tokens, 0, 29)
    if rank == world - 1:
        os._exit(0)
    x, said = _shards(world), []
    for call in (lambda: _over_ranks(x), lambda: _step(cache, tokens, 29, 30)):
        with pytest.raises(RuntimeError) as told:
            call()
        said.append(str(told.value))
    return said


PAPER = dict(l=32, d=16, l_sel=64, n_sel=8, window=512)


def _run_triton_steps(device: str, **kept: Any) -> None:
    """The kernels' steps against the exact ones of one rank; on GPUs by a StepGraph as well.
    kept: how both caches hold keys and values."""
    gpu = device == "cuda"
    sizes = PAPER if gpu else dict(d_v=8, l_sel=16)
    dims = dict(dim=256, heads=64, groups=4, d_k=128, d_v=128) if gpu else {}
    c = dataclasses.replace(CONFIG, **dims, **sizes, phi="mlp")
    S, steps, dtype = (3000, 40, BF16) if gpu else (70, 2, F16)
    torch.manual_seed(0)
    layer = NSAAttention(c, backend="triton").to(device, dtype)
    x = torch.randn(2, S + steps, c.dim).to(device, dtype)
    exact = NSAAttention(c, backend="reference").to(device, F32)
    exact.load_state_dict(layer.state_dict())
    cache = ParallelNSACache(c, 2, S + steps, device=device, dtype=dtype, **kept)
    alone, errors = exact.make_cache(2, S + steps, **kept), []
    with launches.recording() as counts:
        # By PyTorch where kernels of a prompt would take most of the time, interpreted.
        layer.backend = "triton" if gpu else "reference"
        layer.prefill(x[:, :S], cache)
        layer.backend = "triton"
        exact.prefill(x[:, :S].float(), alone)
        step: Any = lambda x: layer.step(x, cache)
        for t in range(S, S + steps):
            if gpu and t == S + 4:
                step = StepGraph(step, x[:, t : t + 1], [cache])
            got = step(x[:, t : t + 1])
            want = exact.step(x[:, t : t + 1].float(), alone)
            errors.append((got.float() - want).abs().amax(-1))
            _same_everywhere(got)
    # Outputs are up to 0.1. Some tokens may choose another block, or be stored as the next e4m3.
    worst, near = torch.stack(errors), 1e-2 if kept else 2e-3
    assert worst.max() < 2e-2 and (worst < near).float().mean() > 0.75, worst
    kernels = ["spans", "probabilities", "choose", "merge", *(["numbers"] if kept else [])]
    for kernel in ("decode_append", *(f"parallel_{name}" for name in kernels)):
        assert counts[f"_{kernel}_kernel"], counts


def _run_triton(rank: int, world: int, device: str) -> None:
    """The kernels on chunks against the kernels on the whole, at the paper's sizes on a GPU."""
    gpu = device == "cuda"
    sizes = PAPER if gpu else dict(SIZES, l_sel=16)
    c, G, h, D, dtype = (1040, 4, 16, 128, BF16) if gpu else (20, 1, 2, 16, F16)
    dims = dataclasses.replace(CONFIG, heads=G * h, groups=G, d_k=D, d_v=D)
    full = {n: x.to(device, dtype) for n, x in _tokens(1, 2 * world * c, F32, dims).items()}
    full["gates"].sigmoid_()
    pool = lambda t: mean_pool(t, sizes["l"], sizes["d"])
    routes, counts = _check_chunks(full, pool, pool, F16, backend="triton", flags=TRITON, **sizes)
    # Both chunks launch these, but that a small first one has dense attention for selection.
    for kernel, least in (("_block_attn_fwd_*", 1 + gpu), ("_span_bwd_*", 2)):
        assert sum(n for name, n in counts.items() if fnmatch(name, kernel)) >= least, counts
    assert set(routes.values()) == {"triton"}


def _worker(rank: int, world: int, folder: str, mode: str) -> NoReturn:
    """Do the jobs of one rank: what happened goes to a file per rank, by name."""
    torch.set_num_threads(1)
    torch.Tensor.new_empty = _poisoned(torch.Tensor.new_empty)  # as in the tests of one process
    if mode == "nccl":
        torch.cuda.set_device(rank)
    store, limit = f"file://{folder}/store", datetime.timedelta(seconds=60)
    how = dict(init_method=store, rank=rank, world_size=world, timeout=limit)
    dist.init_process_group("nccl" if mode == "nccl" else "gloo", **how)
    if mode == "interpreted":
        quicken_interpreter(pytest.MonkeyPatch())
    if mode != "gloo":
        device = "cuda" if mode == "nccl" else "cpu"
        jobs: dict[str, Any] = {
            "triton": lambda: _run_triton(rank, world, device),
            "triton-steps": lambda: _run_triton_steps(device),
            "triton-steps-fp8": lambda: _run_triton_steps(device, **FP8),
        }
    else:
        jobs = {n: lambda n=n: _run_case(n) for n in CASES}
        jobs |= {f"steps-{n}": lambda n=n: _run_steps(n) for n in STEPS}
        jobs |= {n: lambda run=run: run(rank, world) for n, run in JOBS.items()}
        jobs |= {f"bad-{n}": lambda n=n: _run_bad(n, rank, world) for n in BAD}
        jobs |= {f"bad-step-{n}": lambda n=n: _run_bad_step(n, rank, world) for n in BAD_STEPS}
        jobs["dies"] = lambda: _dies(rank, world)
    found: dict[str, Any] = {}
    write = lambda: Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    for name, run in jobs.items():
        begin = time.monotonic()
        if name == "dies":  # this rank may be the one that goes
            write()
        try:
            found[name] = (run(), None, time.monotonic() - begin)
        except BaseException:
            found[name] = (None, traceback.format_exc(), 0.0)
    write()
    os._exit(0)  # destroying a group with a dead rank may wait


def start(world: int, folder: Path, mode: str) -> list[dict[str, Any]]:
    """Run a world and read what every rank of it found."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "NCCL_NVLS_ENABLE": "0"}
    errors, ranks = [folder / f"{r}.stderr" for r in range(world)], []
    for r, file in enumerate(errors):
        command = [sys.executable, "-m", __name__, str(r), str(world), str(folder), mode]
        ranks.append(subprocess.Popen(command, env=env, cwd=ROOT, stderr=file.open("w")))
    try:
        for process in ranks:
            process.wait(timeout=240)
    finally:
        for process in ranks:
            process.kill()
    files = [folder / f"{r}.pickle" for r in range(world)]
    assert all(f.exists() for f in files), [file.read_text() for file in errors]
    return [pickle.loads(f.read_bytes()) for f in files]


def results(found: list[dict[str, Any]], name: str) -> list[Any]:
    """What job `name` gave on every rank, where it did well."""
    for rank, jobs in enumerate(found):
        assert jobs[name][1] is None, f"rank {rank}: {jobs[name][1]}"
    return [jobs[name][0] for jobs in found]


# Three ranks suffice: one is the first, one the last and one neither. Two and four ranks add little
# but the time in which they start.
WORLDS = [3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 4))]


@pytest.fixture(scope="module", params=WORLDS, ids="{}-ranks".format)
def found(request, tmp_path_factory) -> list[dict[str, Any]]:
    return start(request.param, tmp_path_factory.mktemp("ranks"), "gloo")


@pytest.mark.parametrize("name", [*CASES, *(f"steps-{name}" for name in STEPS), *JOBS])
def test_equals_one_process(found, name):
    results(found, name)


@pytest.mark.parametrize("kind", [*BAD, *(f"step-{kind}" for kind in BAD_STEPS)])
def test_bad_input_ends_with_an_error_on_every_rank(found, kind):
    words, last = BAD[kind][1:] if kind in BAD else BAD_STEPS[kind.removeprefix("step-")][:2]
    *others, text = results(found, f"bad-{kind}")
    assert last in text and all(words in other for other in others), (text, others)


def test_a_dead_rank_ends_the_others(found):
    """And they are told soon."""
    assert "dies" not in found[-1]
    for rank, said in enumerate(results(found[:-1], "dies")):
        for text in said:
            assert f"rank {rank}: the exchange of" in text and "a rank died" in text
        assert found[rank]["dies"][2] < 60, "longer than the group's own limit"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_kernels_on_chunks(kernel_device, world, tmp_path):
    """In Triton's interpreter with gloo, or on as many GPUs with NCCL, in a CUDA graph too."""
    if kernel_device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, here {torch.cuda.device_count()}")
    if kernel_device == "cpu" and world != 2:
        pytest.skip("two interpreted ranks tell as much as one and four")
    found = start(world, tmp_path, "nccl" if kernel_device == "cuda" else "interpreted")
    results(found, "triton")
    results(found, "triton-steps")
    results(found, "triton-steps-fp8")


# world, batch, tokens, longest sequence, sizes: heads and groups, blocks, window, head sizes
KERNEL_CASES = {
    "one-rank": (1, 1, 1, 40, {}),
    "two-ranks": (2, 2, 3, 90, {}),
    "three-ranks": (3, 1, 2, 150, {"heads": 10, "n_sel": 9}),
    "few-blocks": (4, 2, 1, 20, {}),
    "l-over-blocks": (2, 1, 2, 90, {"l": 24}),
    "l-is-d": (2, 1, 1, 90, {"l": 4, "heads": 2, "groups": 2}),
    "192-128": (2, 1, 1, 200, {"d_k": 192, "d_v": 128, "l": 32, "d": 16, "l_sel": 32}),
}


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_kernels_do_what_pytorch_does(kernel_device, name, monkeypatch):
    from nsa.kernels.decode import parallel as kernels

    monkeypatch.setattr(kernels, "CHOOSE_CHUNK", 4)  # of a million tokens it is one of several too
    world, B, T, longest, change = KERNEL_CASES[name]
    c = dataclasses.replace(CONFIG, **change)
    gen = torch.Generator().manual_seed(longest)
    draw = lambda *shape: torch.randn(*shape, generator=gen).to(kernel_device)
    lens = torch.tensor([longest, longest // 3][:B], dtype=torch.int32, device=kernel_device)
    rows = -(-longest // (c.l_sel * world)) * (c.l_sel // c.d)
    q = draw(B, T, c.heads, c.d_k).half()
    lses, every = draw(world, B, T, c.heads), []
    lses[1:, :, 0, 0] = -torch.inf  # ranks that hold no token
    for rank in range(world):
        args = (lens, -T, T, c, rank, world, c.window + 7)
        got, want = kernels.spans(*args), parallel_cache.spans(*args)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        k_cmp = draw(B, rows + 1, c.groups, c.d_k).half()
        k_cmp[:, -1] = torch.nan
        args = (q, k_cmp, lses, want[0], rows, 0.3)
        every.append(parallel_cache.probabilities(*args))
        got = kernels.probabilities(*args)
        torch.testing.assert_close(got, every[-1], rtol=2e-3, atol=1e-5)
    every = torch.stack(every)
    every[..., 2::3] = every[:, 0, 0, 0] = 0.25  # ties of some blocks, and of all
    for rank in range(world):
        args = (every, lens, -T, c, rank)
        got, want = kernels.choose(*args), parallel_cache.choose(*args)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        k, v = (draw(B, rows * c.d + 1, c.groups, D).to(fp8.E4M3) for D in (c.d_k, c.d_v))
        descales = [draw(B, c.groups).abs() + 0.1 for _ in "kv"]
        for size, spans, apart in ((rows, None, False), (c.l_sel, want[1], True)):
            args = (k, v, *descales, F16, size, spans, apart)
            both = zip(kernels.numbers(*args), parallel_cache.numbers(*args), strict=True)
            assert all(torch.equal(*pair) for pair in both)
    parts = draw(world, 2, B, T, c.heads, c.d_v + 1)
    parts[:-1, 0, ..., 0, -1] = parts[:, 1, ..., 1, -1] = -torch.inf
    win, gates = draw(B, T, c.heads, c.d_v).half(), draw(B, T, c.heads, 3)
    args = (parts, win, gates)
    got, want = kernels.merge(*args), merge(*args)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def test_half_precision_gradients_are_added_in_fp32(monkeypatch):
    def added(out, x, **_):
        out.copy_(x[:1] + x[1:])

    monkeypatch.setattr(exchange, "_REDUCE_SCATTER", added)
    x = torch.tensor([[1.0], [2.0**-12]], dtype=BF16)
    two = SimpleNamespace(size=lambda: 2)
    got = exchange.finish(exchange.reduce_scatter(x, two, "x"))
    assert got.dtype == F32 and got.item() == 1 + 2.0**-12


def test_who_asks_again_for_what_was_lost_meets_the_error_again(monkeypatch):
    class Gone:
        def wait(self):
            raise RuntimeError("gone")

    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    landings = [((torch.zeros(1), Gone(), "k_sel"), torch.zeros(1))]
    for _ in range(2):
        with pytest.raises(ExchangeFailed, match="the exchange of k_sel failed"):
            exchange.land(landings)


def test_keys_arrive_before_the_call_ends_though_nobody_read_them():
    came = []
    with selection_waits(lambda: came.append("end")):
        assert came == []
    with pytest.raises(KeyError), selection_waits(lambda: came.append("error")):
        raise KeyError
    await_selection()  # nothing is waited for outside
    assert came == ["end", "error"]


def test_every_chunk_has_one_owner_and_work_is_even():
    assert parallel.chunk_length(48, 4) == 6
    with pytest.raises(ValueError, match="multiple of 2 \\* world size = 8 tokens, got 44"):
        parallel.chunk_length(44, 4)
    for world in (1, 2, 3, 8):
        owned = [parallel.chunks_of(r, world) for r in range(world)]
        assert sorted(j for pair in owned for j in pair) == list(range(2 * world))
        assert len({sum(pair) for pair in owned}) == 1


def test_without_torch_distributed_the_error_says_what_to_call():
    with pytest.raises(RuntimeError, match="init_process_group"):
        parallel.resolve_group(None)


def test_routes_are_those_of_both_chunks():
    early, late = dict(sliding="triton", selected="sdpa"), dict(sliding="triton", selected="triton")
    assert parallel.merge_routes(early, late) == {"sliding": "triton", "selected": "sdpa+triton"}


def test_compiled_attention_waits_for_its_keys_too():
    """One process: gathering is a copy, made late all the same."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = _tokens(1, 32, F32)
        run = lambda: _over_ranks(x)
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(run, backend="eager")(), run())
    finally:
        dist.destroy_process_group()


def test_a_compiled_layer_is_a_layer():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layer, x = NSAAttention(CONFIG), torch.zeros(1, 16, 16)
        got, want = (parallel.nsa_layer_parallel(f, x) for f in (torch.compile(layer), layer))
        torch.testing.assert_close(got, want)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _worker(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
