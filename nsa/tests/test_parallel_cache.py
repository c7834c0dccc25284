"""Context-parallel decode over gloo processes: the steps and blocks of one rank, at every length.

Each world is started once and works through all its cases; the tests read what it found.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nsa import (
    NSAAttention,
    NSACache,
    NSAConfig,
    ParallelNSACache,
    StepGraph,
    exchange,
    launches,
    oracle,
    parallel,
    parallel_cache,
)
from nsa.attention import nsa_decode
from nsa.cache import BranchKV
from nsa.compress import mean_pool
from nsa.parallel_cache import merge
from nsa.tests.test_parallel import (
    WORLDS,
    _HostTensors,
    a_dead_rank_ended_the_others,
    join,
    no_error,
    says_on_every_rank,
    start,
    work,
)

F32, F64 = torch.float32, torch.float64
CONFIG = NSAConfig(
    dim=16, heads=4, groups=2, d_k=8, d_v=16, l=8, d=4, l_sel=8, n_sel=5, window=9, phi="mean"
)


def _tokens(config: NSAConfig, B: int, S: int, dtype: torch.dtype = F64) -> dict[str, torch.Tensor]:
    """q, gates and raw keys and values of S tokens."""
    gen = torch.Generator().manual_seed(S)
    c = config
    shapes = dict(q=(c.heads, c.d_k), gates=(c.heads, 3))
    for branch in ("cmp", "sel", "win"):
        shapes |= {f"k_{branch}": (c.groups, c.d_k), f"v_{branch}": (c.groups, c.d_v)}
    return {
        n: torch.randn(B, S, *shape, generator=gen, dtype=F64).to(dtype)
        for n, shape in shapes.items()
    }


def _append(cache: NSACache, x: dict[str, torch.Tensor], first: int, last: int) -> Any:
    """Append tokens first to last; the window's keys where they are more than a step."""
    c = cache.config
    phi = lambda t: mean_pool(t, c.l, c.d)
    new = BranchKV(**{n: t[:, first:last] for n, t in x.items() if n not in ("q", "gates")})
    near = None
    if last - first > cache.max_step:
        near = cache.window_with(new.k_win, new.v_win)
    cache.append(new, phi, phi)
    return near


def _step(cache: NSACache, x: dict[str, torch.Tensor], first: int, last: int, **how: Any) -> Any:
    near = _append(cache, x, first, last)
    rows = slice(first, last)
    return nsa_decode(x["q"][:, rows], cache, near, x["gates"][:, rows], **how)


def _by_oracle(config: NSAConfig, x: dict[str, torch.Tensor], t: int, scale: Any) -> torch.Tensor:
    """Token t in fp64, from the raw keys."""
    seen = {n: v[:, : t + 1] for n, v in x.items()}
    pool = lambda v: oracle.compress_mean(v, config.l, config.d)
    branches = [seen[f"{kv}_{b}"] for b in ("sel", "win") for kv in "kv"]
    return oracle.nsa_attention(
        seen["q"][:, t:],
        pool(seen["k_cmp"]),
        pool(seen["v_cmp"]),
        *branches,
        seen["gates"][:, t:],
        q_start=t,
        softmax_scale=scale,
        **config.sizes(),
    )


def _same_everywhere(x: torch.Tensor) -> None:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x.contiguous())
    assert all(torch.equal(x, other) for other in every)


# name: batch, prompt, tokens of the steps after it, dtype, what differs from CONFIG
CASES: dict[str, tuple[int, int, list[int], torch.dtype, dict[str, int]]] = {
    "from-nothing": (1, 0, [1] * 40, F64, {}),  # all ranks but one are empty at first
    "after-a-prompt": (2, 61, [1] * 20, F64, {}),
    "several-tokens": (1, 30, [3, 1, 8, 2, 5], F64, {}),
    "chunks": (1, 0, [20, 33, 1, 1, 40, 1], F64, {}),
    "blocks-of-many": (1, 70, [1] * 12, F64, {"l_sel": 16, "d": 2}),
    "l-over-blocks": (1, 50, [1] * 10, F64, {"l": 24}),  # a compressed token is of four blocks
    "l-is-d": (1, 50, [1] * 10, F64, {"l": 4}),
    "wide-window": (1, 50, [1] * 10, F64, {"window": 200}),
    "one-head-a-group": (1, 50, [1] * 10, F64, {"groups": 4}),
    "forced": (1, 90, [1] * 10, F64, {"n_init": 0, "n_local": 1, "n_sel": 1}),
    "fp32": (1, 90, [1] * 10, F32, {}),
    "bf16": (1, 90, [1] * 10, torch.bfloat16, {}),
}


def _run_case(name: str) -> None:
    B, prompt, steps, dtype, change = CASES[name]
    config = dataclasses.replace(CONFIG, **change)
    x = _tokens(config, B, prompt + sum(steps), dtype)
    scale = 0.7 if name == "after-a-prompt" else None
    how = dict(backend="reference", softmax_scale=scale)
    ours = ParallelNSACache(config, B, prompt + sum(steps), dtype=dtype)
    alone = NSACache(config, B, prompt + sum(steps), dtype=dtype)
    if prompt:
        for cache in (ours, alone):
            _append(cache, x, 0, prompt)
    tol = {F64: 1e-10, F32: 2e-5, torch.bfloat16: 4e-2}[dtype]
    at = prompt
    for T in steps:
        got, chosen = _step(ours, x, at, at + T, **how)
        want, wanted = _step(alone, x, at, at + T, **how)
        at += T
        assert torch.equal(chosen, wanted), f"blocks of {at - T} to {at}"
        torch.testing.assert_close(got, want, rtol=tol, atol=tol)
        _same_everywhere(got)
    if dtype == F64:
        exact = _by_oracle(config, x, at - 1, scale)
        torch.testing.assert_close(got[:, -1:], exact, rtol=1e-10, atol=1e-10)


def _run_default_route() -> None:
    x = _tokens(CONFIG, 1, 60, F32)
    ours, alone = ParallelNSACache(CONFIG, 1, 60), NSACache(CONFIG, 1, 60)
    for first, last in ((0, 50), (50, 51), (51, 51), (51, 60)):
        got, _ = _step(ours, x, first, last)
        want, _ = _step(alone, x, first, last)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def _run_ties() -> None:
    """Equal scores everywhere: the lower block wins, whoever has it."""
    x = _tokens(CONFIG, 1, 90)
    x["k_cmp"] = torch.ones_like(x["k_cmp"])
    ours = ParallelNSACache(CONFIG, 1, 90, dtype=F64)
    _append(ours, x, 0, 89)
    _, chosen = _step(ours, x, 89, 90)
    assert chosen[0, 0].tolist() == [[0, 1, 2, 10, 11]] * 2


def _run_unseen() -> None:
    """What lies behind the lengths, of longer sequences before, has no effect, NaN included."""
    x, bad = _tokens(CONFIG, 1, 70), _tokens(CONFIG, 1, 100)
    bad = {n: torch.full_like(t, torch.nan) for n, t in bad.items()}
    outs = []
    for used in (False, True):
        cache = ParallelNSACache(CONFIG, 1, 100, dtype=F64)
        if used:
            _append(cache, bad, 0, 100)
            cache.reset()
        _append(cache, x, 0, 69)
        outs.append(_step(cache, x, 69, 70)[0])
    assert torch.equal(*outs) and outs[0].isfinite().all()


def _run_mixed() -> None:
    """Sequences of different lengths as one batch, taken apart, turned round and rewound."""
    lengths = (5, 77, 40)
    x = [_tokens(CONFIG, 1, n + 12) for n in lengths]
    caches = [ParallelNSACache(CONFIG, 1, 100, dtype=F64) for _ in x]
    for cache, one, n in zip(caches, x, lengths, strict=True):
        _append(cache, one, 0, n)
    both = NSACache.stack(caches, max_len=120).select(torch.tensor([2, 0, 1]))
    order = [2, 0, 1]
    for i in range(12):
        now = {
            n: torch.cat([x[b][n][:, lengths[b] + i : lengths[b] + i + 1] for b in order])
            for n in x[0]
        }
        got, _ = _step(both, now, 0, 1)
        for row, b in enumerate(order):
            want, _ = _step(caches[b], x[b], lengths[b] + i, lengths[b] + i + 1)
            torch.testing.assert_close(got[row : row + 1], want, rtol=1e-10, atol=1e-10)
        if i == 6:  # a token that is refused
            both.rewind(1)
            got, _ = _step(both, now, 0, 1)
            torch.testing.assert_close(got[-1:], want, rtol=1e-10, atol=1e-10)
    assert both.lengths == [lengths[b] + 12 for b in order] == both.lens.tolist()


def _run_growth() -> None:
    x = _tokens(CONFIG, 1, 60)
    cache = ParallelNSACache(CONFIG, 1, 4, dtype=F64, growable=True)
    alone = NSACache(CONFIG, 1, 60, dtype=F64)
    for i in range(60):
        got, want = _step(cache, x, i, i + 1), _step(alone, x, i, i + 1)
        torch.testing.assert_close(got[0], want[0], rtol=1e-10, atol=1e-10)


def _run_layer(world: int) -> None:
    """A layer's prefill from shards fills the cache; its steps are forward()'s rows."""
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, phi="mlp")
    layer = NSAAttention(config, backend="reference").double()
    S = 2 * world * config.d * 3
    x = torch.randn(1, S + 30, config.dim, dtype=F64)
    want = layer(x)
    cache = ParallelNSACache(config, 1, S + 30, dtype=F64)
    mine = parallel.nsa_layer_parallel(layer, parallel.shard(x[:, :S]), cache=cache)
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    close(parallel.unshard(mine), want[:, :S])
    assert cache.lengths == [S]
    close(layer.step(x[:, S : S + 10], cache), want[:, S : S + 10])
    for t in range(S + 10, S + 30):
        close(layer.step(x[:, t : t + 1], cache), want[:, t : t + 1])
    with pytest.raises(ValueError, match="cache must be empty, it holds"):
        parallel.nsa_layer_parallel(layer, parallel.shard(x[:, :S]), cache=cache)
    with pytest.raises(ValueError, match="cache must be a ParallelNSACache of this group"):
        alone = layer.make_cache(1, S)
        parallel.nsa_layer_parallel(layer, parallel.shard(x[:, :S]), cache=alone)


def _run_model() -> None:
    """Whole models decode with it, and prefill their prompts in chunks."""
    from nsa import NSALanguageModel

    torch.manual_seed(0)
    model = NSALanguageModel(CONFIG, 11, 2).double().eval()
    tokens = torch.randint(11, (1, 50))
    want = model(tokens)
    caches = [ParallelNSACache(CONFIG, 1, 50, dtype=F64) for _ in range(2)]
    got = [model.step(tokens[:, :30], caches), model.step(tokens[:, 30:44], caches)]
    got += [model.step(tokens[:, t : t + 1], caches) for t in range(44, 50)]
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-9, atol=1e-9)


def _run_exchanges(rank: int, world: int) -> None:
    """Three exchanges a step, of as many bytes as the module's docstring says, and each rank keeps
    its part of the tokens alone."""
    B, S, c = 2, 16 * world, CONFIG
    x = _tokens(c, B, S, F32)
    cache = ParallelNSACache(c, B, S, check=False)
    _append(cache, x, 0, S - 1)
    sent = []

    real = exchange._ALL_GATHER

    def noted(out: torch.Tensor, x: torch.Tensor, **how: Any) -> Any:
        sent.append(x.numel() * x.element_size())
        return real(out, x, **how)

    with mock.patch.object(exchange, "_ALL_GATHER", noted):
        _step(cache, x, S - 1, S)
    a_query = (4 * c.heads, 4 * c.groups * S // (c.d * world), 8 * c.heads * (c.d_v + 1))
    assert sent == [B * n for n in a_query], sent
    assert cache.k_sel.shape[1] == S // world + 1
    assert cache.k_cmp.shape[1] == S // c.d // world + 1
    own = torch.arange(S)[torch.arange(S) // c.l_sel % world == rank]
    assert torch.equal(cache.k_sel[:, :-1], x["k_sel"][:, own])


def _run_no_waiting() -> None:
    """Unchecked, nothing of a step but attention itself makes the host wait for the device."""

    def attention(q: Any, k: Any, v: Any, ranges: Any, return_lse: bool = False, **how: Any) -> Any:
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        return (out, q.new_zeros(q.shape[:-1])) if return_lse else out

    x = _tokens(CONFIG, 1, 50, F32)
    cache = ParallelNSACache(CONFIG, 1, 50, check=False)
    _append(cache, x, 0, 48)
    refuse = mock.Mock(side_effect=AssertionError("a value was read on the host"))
    with (
        mock.patch.object(parallel_cache, "selection_attention", attention),
        mock.patch.object(torch.Tensor, "tolist", refuse),
        mock.patch.object(torch.Tensor, "item", refuse),
        _HostTensors() as seen,
    ):
        _step(cache, x, 48, 50)
    assert seen.count == 0, seen.count


# What every rank but the last says, and the last.
BAD = {
    "batch": ("ranks must agree on batch: rank", "here 2"),
    "max_len": ("ranks must agree on max_len: rank", "here 65"),
    "config": ("ranks must agree on config: rank", "window=10"),
    "dtype": ("ranks must agree on dtype: rank", "here torch.float16"),
    "no-batch": ("refused its cache", "batch must be at least 1, got 0"),
    "tokens": ("ranks must agree on step: rank", "'T': 2"),
    "lengths": ("ranks must agree on lengths: rank", "here [4]"),
    "scale": ("ranks must agree on step: rank", "'softmax_scale': 0.5"),
    "q": ("refused its step", "q must be [1, 0, 4, 8], got [1, 4, 8]"),
    "q-dtype": ("refused its step", "q must have the cache's torch.float32, got torch.float64"),
    "window": ("window must be given for more than max_step=8 tokens",) * 2,
    "group": ("group must be a ProcessGroup or DeviceMesh, got str",) * 2,
    "layer": ("refused its step", "x must be [B, S, dim] with dim=16, got [1, 1, 15]"),
}


def _run_bad(kind: str, rank: int, world: int) -> str:
    """One rank, or all, pass something wrong. The text of this rank's error."""
    odd = rank == world - 1
    make: dict[str, Any] = dict(config=CONFIG, batch=1, max_len=64)
    how: dict[str, Any] = {}
    if kind == "group":
        make["group"] = "all"
    elif odd:
        make |= {
            "batch": {"batch": 2},
            "max_len": {"max_len": 65},
            "config": {"config": dataclasses.replace(CONFIG, window=10)},
            "dtype": {"dtype": torch.float16},
            "no-batch": {"batch": 0},
        }.get(kind, {})
    x = _tokens(CONFIG, 1, 30, F32)
    T = 2 if odd and kind == "tokens" else 1
    try:
        cache = ParallelNSACache(**make)
        if kind == "layer":
            NSAAttention(CONFIG).step(torch.zeros(1, 1, 15 if odd else 16), cache)
        _append(cache, x, 0, 9 if kind == "window" else 3)
        if odd and kind == "lengths":
            _append(cache, x, 3, 4)
        q, gates = x["q"][:, 2 : 2 + T], x["gates"][:, 2 : 2 + T]
        if kind == "window":
            q, gates = x["q"][:, :9], x["gates"][:, :9]
        elif odd and kind == "q":
            q = q[:, 0]
        elif odd and kind == "q-dtype":
            q = q.double()
        elif odd and kind == "scale":
            how["softmax_scale"] = 0.5
        nsa_decode(q, cache, None, gates, **how)
    except (ValueError, TypeError) as error:
        return str(error)
    return "no error"


def _dies(rank: int, world: int) -> str:
    """The last rank is gone; what the others' step ends with."""
    x = _tokens(CONFIG, 1, 30, F32)
    cache = ParallelNSACache(CONFIG, 1, 30, check=False)
    _append(cache, x, 0, 29)
    if rank == world - 1:
        os._exit(0)
    try:
        _step(cache, x, 29, 30)
    except RuntimeError as error:
        return str(error)
    return "no error"


def _run_triton(device: str) -> None:
    """The kernels' steps against the exact ones of one rank; on GPUs by a StepGraph as well."""
    gpu = device == "cuda"
    sizes = dict(l=32, d=16, l_sel=64, n_sel=8, window=512) if gpu else dict(d_v=8, l_sel=16)
    dims = dict(dim=256, heads=64, groups=4, d_k=128, d_v=128) if gpu else {}
    c = dataclasses.replace(CONFIG, **dims, **sizes, phi="mlp")
    S, steps, dtype = (3000, 40, torch.bfloat16) if gpu else (70, 2, torch.float16)
    torch.manual_seed(0)
    layer = NSAAttention(c, backend="triton").to(device, dtype)
    x = torch.randn(2, S + steps, c.dim).to(device, dtype)
    exact = NSAAttention(c, backend="reference").to(device, F32)
    exact.load_state_dict(layer.state_dict())
    cache = ParallelNSACache(c, 2, S + steps, device=device, dtype=dtype)
    alone, errors = exact.make_cache(2, S + steps), []
    with launches.recording() as counts:
        if gpu:
            layer.prefill(x[:, :S], cache)
        else:  # by PyTorch: interpreted, test_parallel.py's kernels take most of the time
            layer.backend = "reference"
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
    worst = torch.stack(errors)  # of outputs up to 0.1; some tokens may choose another block
    assert worst.max() < 2e-2 and (worst < 2e-3).float().mean() > 0.75, worst
    for kernel in ("spans", "probabilities", "choose", "merge"):
        assert counts[f"_parallel_{kernel}_kernel"], counts


def _worker(rank: int, world: int, folder: str, mode: str) -> None:
    join(rank, world, folder, mode)
    if mode != "gloo":
        device = "cuda" if mode == "nccl" else "cpu"
        work({"triton": lambda: _run_triton(device)}, rank, folder)
    jobs: dict[str, Any] = {name: lambda n=name: _run_case(n) for name in CASES}
    jobs |= {
        "default-route": _run_default_route,
        "ties": _run_ties,
        "unseen": _run_unseen,
        "mixed": _run_mixed,
        "growth": _run_growth,
        "layer": lambda: _run_layer(world),
        "model": _run_model,
        "exchanges": lambda: _run_exchanges(rank, world),
        "no-waiting": _run_no_waiting,
    }
    jobs |= {f"bad-{kind}": lambda k=kind: _run_bad(k, rank, world) for kind in BAD}
    jobs["dies"] = lambda: _dies(rank, world)
    work(jobs, rank, folder)


EQUAL = (
    *CASES,
    "default-route",
    "ties",
    "unseen",
    "mixed",
    "growth",
    "layer",
    "model",
    "exchanges",
    "no-waiting",
)


@pytest.fixture(scope="module", params=WORLDS, ids="{}-ranks".format)
def found(request, tmp_path_factory) -> list[dict[str, Any]]:
    return start(request.param, tmp_path_factory.mktemp("ranks"), "gloo", __name__)


@pytest.mark.parametrize("name", EQUAL)
def test_equals_one_rank(found, name):
    no_error(found, name)


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_ends_with_an_error_on_every_rank(found, kind):
    says_on_every_rank(found, f"bad-{kind}", BAD[kind])


def test_a_dead_rank_ends_the_others(found):
    a_dead_rank_ended_the_others(found)


# ---- kernels -------------------------------------------------------------------------------------

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


@pytest.mark.kernel
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
    parts = draw(world, 2, B, T, c.heads, c.d_v + 1)
    parts[:-1, 0, ..., 0, -1] = parts[:, 1, ..., 1, -1] = -torch.inf
    win, gates = draw(B, T, c.heads, c.d_v).half(), draw(B, T, c.heads, 3)
    args = (parts, win, gates)
    torch.testing.assert_close(
        kernels.merge(*args), parallel_cache.merge(*args), rtol=2e-3, atol=2e-3
    )


@pytest.mark.kernel
@pytest.mark.parametrize("world", [2, 4])
def test_kernels_on_ranks(kernel_device, world, tmp_path):
    """In Triton's interpreter with gloo, or on as many GPUs with NCCL, in a CUDA graph too."""
    if kernel_device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, here {torch.cuda.device_count()}")
    if kernel_device == "cpu" and world > 2:
        pytest.skip("two interpreted ranks tell as much as four")
    mode = "nccl" if kernel_device == "cuda" else "interpreted"
    no_error(start(world, tmp_path, mode, __name__), "triton")


def test_parts_without_keys_have_no_weight():
    """One row of one head: of two ranks' outputs of width 2, the second rank sees no key."""
    part = lambda *row: torch.tensor(row).view(1, 1, 1, 3)
    seen, none = part(1.0, 2.0, 0.5), part(7.0, 7.0, -torch.inf)
    parts = torch.stack([torch.stack([seen, none]), torch.stack([none, none])])
    win, gates = torch.zeros(1, 1, 1, 2), torch.tensor([2.0, 3.0, 1.0]).view(1, 1, 1, 3)
    assert torch.equal(merge(parts, win, gates).flatten(), torch.tensor([2.0, 4.0]))


if __name__ == "__main__":
    _worker(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
