"""Context parallelism over gloo processes: the outputs, gradients and blocks of one process.

Each world is started once and works through all its cases; the tests read what it found.
"""

from __future__ import annotations

import datetime
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
from torch.utils._python_dispatch import TorchDispatchMode

from nsa import (
    Flags,
    NSAAttention,
    NSAConfig,
    attention,
    dispatch,
    exchange,
    launches,
    nsa_attention,
    parallel,
)
from nsa.arrival import await_selection, selection_waits
from nsa.attention import sliding_attention
from nsa.compress import MLPCompression, mean_pool
from nsa.errors import ExchangeFailed
from nsa.tests.conftest import _poisoned

ROOT = Path(__file__).resolve().parents[2]
SIZES = dict(l=8, d=4, l_sel=8, n_sel=3, window=9)
NAMES = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def _inputs(B: int, S: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(S)
    G, h, Dk, Dv = 2, 2, 8, 16
    shapes = dict(q=(G * h, Dk), gates=(G * h, 3), do=(G * h, Dv))
    shapes |= {f"{kv}_{b}": (G, Dk if kv == "k" else Dv) for kv in "kv" for b in
               ("cmp", "sel", "win")}  # fmt: skip
    return {
        n: torch.randn(B, S, *shape, generator=gen, dtype=F64).to(dtype)
        for n, shape in shapes.items()
    }


# name: batch, tokens per chunk, dtype, what differs from SIZES, backend, phi
CASES: dict[str, tuple[int, int, torch.dtype, dict[str, Any], str | None, str]] = {
    "fp64": (2, 8, F64, {}, "reference", "mean"),
    "fp32": (1, 16, F32, {}, None, "mean"),
    "chunks-cut-blocks": (1, 12, F64, {"l_sel": 16, "n_sel": 4}, "reference", "mean"),
    "window-over-chunks": (1, 8, F64, {"window": 19}, "reference", "mean"),
    "window-over-all": (1, 8, F64, {"window": 500}, "reference", "mean"),
    "window-of-one": (1, 8, F64, {"window": 1}, "reference", "mean"),
    "chunk-shorter-than-l": (1, 4, F64, {}, "reference", "mean"),
    "blocks-apart": (1, 8, F64, {"l": 4}, "reference", "mean"),
    "mlp": (1, 8, F64, {}, "reference", "mlp"),
    "bf16": (1, 16, BF16, {}, None, "mean"),
    "scale": (1, 8, F64, {"softmax_scale": 1.3}, "reference", "mean"),
    "forced": (1, 16, F64, {"n_init": 0, "n_local": 1}, "reference", "mean"),
}


def _phi(kind: str, width: int, sizes: dict[str, int], dtype: torch.dtype) -> Any:
    if kind == "mean":
        return lambda x: mean_pool(x, sizes["l"], sizes["d"])
    torch.manual_seed(width)
    return MLPCompression(width, sizes["l"], sizes["d"]).to(dtype)


def _run_case(name: str, rank: int, world: int) -> None:
    B, c, dtype, change, backend, kind = CASES[name]
    sizes = {**SIZES, **change}
    full = _inputs(B, 2 * world * c, dtype)
    phi_k, phi_v = _phi(kind, 8, sizes, dtype), _phi(kind, 16, sizes, dtype)
    weights = [p for phi in (phi_k, phi_v) if kind == "mlp" for p in phi.parameters()]

    leaves = [full[n].clone().requires_grad_() for n in NAMES]
    q, k_cmp, v_cmp, *rest = leaves
    want, want_aux = nsa_attention(
        q, phi_k(k_cmp), phi_v(v_cmp), *rest, backend=backend, return_aux=True, **sizes
    )
    want_grads = torch.autograd.grad(want, [*leaves, *weights], full["do"])

    mine = [parallel.shard(full[n]).clone().requires_grad_() for n in NAMES]
    got, aux = parallel.nsa_attention_parallel(
        *mine, phi_k=phi_k, phi_v=phi_v, backend=backend, return_aux=True, **sizes
    )
    grads = list(torch.autograd.grad(got, [*mine, *weights], parallel.shard(full["do"])))
    tol = {F64: 1e-10, F32: 2e-5, BF16: 4e-2}[dtype]
    tol = dict(rtol=tol, atol=tol)
    assert torch.equal(aux["block_indices"], parallel.shard(want_aux["block_indices"]))
    torch.testing.assert_close(got, parallel.shard(want), **tol)
    torch.testing.assert_close(aux["lse"], parallel.shard(want_aux["lse"]), **tol)
    for n, g, w in zip(NAMES, grads, want_grads, strict=False):
        torch.testing.assert_close(g, parallel.shard(w), msg=lambda m, n=n: f"d{n}: {m}", **tol)
    for g, w in zip(grads[len(NAMES) :], want_grads[len(NAMES) :], strict=True):
        dist.all_reduce(g)
        torch.testing.assert_close(g, w, **tol)
    torch.testing.assert_close(parallel.unshard(got), want.detach(), **tol)


def _run_layer(rank: int, world: int) -> None:
    """A whole layer by DeviceMesh: positions of the rotary embedding and phi are right too."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("context",))
    torch.manual_seed(0)
    sizes = {"w" if name == "window" else name: value for name, value in SIZES.items()}
    config = NSAConfig(dim=16, heads=4, groups=2, d_k=8, d_v=8, **sizes)
    layer = NSAAttention(config, backend="reference").double()
    x = torch.randn(1, 16 * world, 16, dtype=F64)
    want = layer(x)
    want_grads = torch.autograd.grad(want.square().sum(), list(layer.parameters()))
    got = parallel.nsa_layer_parallel(layer, parallel.shard(x, mesh), mesh["context"])
    torch.testing.assert_close(got, parallel.shard(want, mesh), rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad(got.square().sum(), list(layer.parameters()))
    for g, w in zip(grads, want_grads, strict=True):
        dist.all_reduce(g)
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


def _run_settings(rank: int, world: int) -> None:
    """Flags and the layer's settings reach the calls on chunks."""
    x = {n: parallel.shard(t) for n, t in _inputs(1, 16 * world, F32).items()}
    pool = lambda t: mean_pool(t, SIZES["l"], SIZES["d"])
    parity = Flags(force_parity=True)
    for flags, routes in ((parity, {"reference"}), (None, {"reference", "sdpa"})):
        _, aux = parallel.nsa_attention_parallel(
            *(x[n] for n in NAMES), phi_k=pool, phi_v=pool, flags=flags, return_aux=True, **SIZES
        )
        assert set(aux["routes"].values()) == routes, aux["routes"]
    config = NSAConfig(dim=16, heads=4, groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=3, w=9)
    for how in (dict(flags=parity), dict(backend="reference")):
        with dispatch.trace() as taken:
            parallel.nsa_layer_parallel(NSAAttention(config, **how), torch.zeros(1, 16, 16))
        assert {d.route.value for d in taken} == {"reference"}, taken


def _run_overlap(rank: int, world: int) -> None:
    """Selection's keys arrive after the window was attended and before the blocks are; an exchange
    that fails then is the call's error, whatever routes are left, and no result."""
    x = {n: parallel.shard(t) for n, t in _inputs(1, 16 * world, F32).items()}
    pool = lambda t: mean_pool(t, SIZES["l"], SIZES["d"])
    run = lambda **how: parallel.nsa_attention_parallel(
        *(x[n] for n in NAMES), phi_k=pool, phi_v=pool, **how, **SIZES
    )
    order = []

    def noted(name: str, call: Any) -> Any:
        return lambda *args, **kw: (order.append(name), call(*args, **kw))[1]

    land, finish = exchange.land, exchange.finish

    def landed(landings: Any) -> None:
        if any(what == "k_sel" for (_, _, what), _ in landings):
            order.append("land")
        land(landings)

    with (
        mock.patch.object(attention, "sliding_attention", noted("win", sliding_attention)),
        mock.patch.object(attention, "_selected", noted("sel", attention._selected)),
        mock.patch.object(exchange, "land", landed),
    ):
        run(backend="reference")
        assert order == ["win", "land", "sel", "win", "sel"], order
        order.clear()
        both = {n: t.repeat(2, 1, 1, 1) for n, t in x.items()}
        parallel.nsa_attention_parallel(
            *(both[n] for n in NAMES), phi_k=pool, phi_v=pool, backend="reference", **SIZES
        )
    # A kernel copies the start of several sequences before it asks for anything.
    assert order == ["land", "win", "sel", "win", "sel"], order

    def lost(pending: Any) -> Any:
        if pending[2] == "v_sel":
            raise exchange.failed("v_sel", RuntimeError("gone"))
        return finish(pending)

    with mock.patch.object(exchange, "finish", lost):
        for how in ({}, {"backend": "reference"}):
            with pytest.raises(ExchangeFailed, match="the exchange of v_sel failed"):
                run(**how)


class _HostTensors(TorchDispatchMode):
    """Counts tensors made of Python numbers, lists as indices among them: on a GPU each is a copy
    for which the host waits."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name().startswith("aten::lift_fresh")
        return func(*args, **(kwargs or {}))


def _run_no_waiting(rank: int, world: int) -> None:
    """Unchecked, nothing before attention makes the host wait for the device."""
    x = {n: parallel.shard(t) for n, t in _inputs(1, 16 * world, F32).items()}
    pool = lambda t: mean_pool(t, SIZES["l"], SIZES["d"])
    nothing = lambda q, *rest, **how: (q, {"block_indices": None, "lse": None, "routes": {}})
    with (
        mock.patch.object(parallel, "nsa_attention", nothing),
        _HostTensors() as seen,
    ):
        parallel.nsa_attention_parallel(
            *(x[n] for n in NAMES), phi_k=pool, phi_v=pool, check=False, **SIZES
        )
        assert seen.count == 0, seen.count
        torch.zeros(2)[[0]]
        assert seen.count == 1, seen.count


def _run_bad(kind: str, rank: int, world: int) -> str:
    """One rank, or all, pass something wrong. The text of this rank's error."""
    sizes, how = dict(SIZES), {"backend": "reference"}
    odd = rank == world - 1
    x = {n: parallel.shard(t) for n, t in _inputs(1, 16 * world, F32).items()}
    pool = phi = lambda t: mean_pool(t, sizes["l"], sizes["d"])
    if kind == "length":
        x["q"], x["gates"] = x["q"][:, :-1], x["gates"][:, :-1]
    elif kind == "stride":
        x = {n: t[:, :12] for n, t in x.items()}
    elif kind == "group":
        how["group"] = "all"
    elif not odd:
        pass
    elif kind in ("one-length", "unshard"):
        x = {n: t[:, :8] for n, t in x.items()}
    elif kind == "unshard-odd":
        x = {n: t[:, :7] for n, t in x.items()}
    elif kind == "unshard-dtype":
        x = {n: t.int() for n, t in x.items()}
    elif kind == "one-refused":
        x["k_sel"] = x["k_sel"][:, :-2]
    elif kind == "dtype":
        x = {n: t.double() for n, t in x.items()}
    elif kind == "grad":
        x["k_win"].requires_grad_()
    elif kind == "sizes":
        sizes["window"] = 8
    elif kind == "no-size":
        sizes["window"] = "all"
    elif kind == "no-backend":
        how["backend"] = "trton"
    elif kind == "backend":
        how["backend"] = "sdpa"
    elif kind == "scale":
        how["softmax_scale"] = 0.5
    elif kind == "phi-raises":
        phi = lambda t: {}["phi"]
    elif kind == "phi-rows":
        phi = lambda t: pool(t)[:, 1:]
    elif kind == "phi-grad":
        phi = lambda t: pool(t).requires_grad_()
    try:
        if kind.startswith("unshard"):
            parallel.unshard(x["q"])
        elif kind.startswith("layer"):
            _layer_call(kind, odd)
        else:
            with torch.set_grad_enabled(kind != "grad-mode" or not odd):
                parallel.nsa_attention_parallel(
                    *(x[n] for n in NAMES), phi_k=phi, phi_v=pool, **how, **sizes
                )
    except (ValueError, TypeError, LookupError) as error:
        return str(error)
    return "no error"


def _layer_call(kind: str, odd: bool) -> None:
    layer = NSAAttention(NSAConfig(dim=16, heads=4, groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8))
    x = torch.zeros(1, 16, 16)
    if odd and kind == "layer-length":
        x = x[:, :15]
    elif odd and kind == "layer-dim":
        x = x[..., :15]
    elif odd and kind == "layer-projection":
        layer.qkv.forward = lambda x: {}["weight"]
    parallel.nsa_layer_parallel(layer, x)


# What every rank but the last says, and the last.
BAD = {
    "length": ("must have q's B and S / W", "must have q's B and S / W"),
    "stride": ("at least l - d = 4 tokens", "got 12 tokens per rank"),
    "group": ("group must be a ProcessGroup or DeviceMesh, got str",) * 2,
    "one-length": ("ranks must agree on q: rank", "ranks must agree on q: rank"),
    "one-refused": ("refused its arguments", "k_sel must have q's B and S / W"),
    "dtype": ("ranks must agree on q: rank", "torch.float64"),
    "grad": ("ranks must agree on k_win", "requires_grad=True"),
    "sizes": ("ranks must agree on the sizes", "differs from rank 0"),
    "no-size": ("refused its arguments", "'str'"),
    "no-backend": ("refused its arguments", "got 'trton'"),
    "backend": ("softmax_scale, backend and grad mode", "backend sdpa"),
    "scale": ("sizes, softmax_scale, backend", "softmax_scale 0.5, backend reference"),
    "grad-mode": ("backend and grad mode: rank", "differs from rank 0"),
    "phi-raises": ("refused its compression", "'phi'"),
    "phi-rows": ("refused its compression", "phi_k must give [2, 2, 2, 8] in torch.float32 for 2"),
    "phi-grad": ("whether phi_k and phi_v have gradients", "whether phi_k and phi_v have"),
    "unshard": ("ranks must agree on x's shape", "has [1, 8, 4, 8], rank 0 [1, 16, 4, 8]"),
    "unshard-odd": ("refused its x", "x must hold two chunks along dim 1, got shape [1, 7, 4, 8]"),
    "unshard-dtype": ("ranks must agree on x's shape, dtype", "here torch.int32"),
    "layer-length": ("refused its arguments", "the sequence must be a multiple of"),
    "layer-dim": ("refused its arguments", "x must be [B, S, dim] with dim=16, got [1, 16, 15]"),
    "layer-projection": ("refused its arguments", "'weight'"),
}


def _dies(rank: int, world: int) -> str:
    """The last rank is gone; what the others' call ends with."""
    if rank == world - 1:
        os._exit(0)
    x = {n: parallel.shard(t) for n, t in _inputs(1, 16 * world, F32).items()}
    pool = lambda t: mean_pool(t, SIZES["l"], SIZES["d"])
    try:
        parallel.nsa_attention_parallel(
            *(x[n] for n in NAMES), phi_k=pool, phi_v=pool, backend="reference", **SIZES
        )
    except RuntimeError as error:
        return str(error)
    return "no error"


def _run_triton(rank: int, world: int, device: str) -> None:
    """The kernels on chunks against the kernels on the whole, at the paper's sizes on a GPU."""
    gpu = device == "cuda"
    sizes = dict(l=32, d=16, l_sel=64, n_sel=8, window=512) if gpu else dict(SIZES, l_sel=16)
    c, G, h, D = (1040, 4, 16, 128) if gpu else (12, 1, 2, 16)
    dtype = BF16 if gpu else torch.float16
    gen = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(1, 2 * world * c, *shape, generator=gen).to(device, dtype)
    full = {n: draw(G, D) for n in NAMES} | {"q": draw(G * h, D), "do": draw(G * h, D)}
    full["gates"] = draw(G * h, 3).sigmoid()
    pool = lambda t: mean_pool(t, sizes["l"], sizes["d"])
    leaves = [full[n].clone().requires_grad_() for n in NAMES]
    q, k_cmp, v_cmp, *rest = leaves
    flags = Flags(use_triton_sel=True, sel_triton_allow_grad=True, sel_triton_min_L=1)
    how = dict(backend="triton", flags=flags, return_aux=True, **sizes)
    want, want_aux = nsa_attention(q, pool(k_cmp), pool(v_cmp), *rest, **how)
    want_grads = torch.autograd.grad(want, leaves, full["do"])
    mine = [parallel.shard(full[n]).clone().requires_grad_() for n in NAMES]
    with launches.recording() as counts:
        got, aux = parallel.nsa_attention_parallel(*mine, phi_k=pool, phi_v=pool, **how)
        grads = torch.autograd.grad(got, mine, parallel.shard(full["do"]))
    for kernel in ("_block_attn_fwd_*", "_span_bwd_*"):  # of both chunks
        assert sum(n for name, n in counts.items() if fnmatch(name, kernel)) >= 2, counts
    assert set(aux["routes"].values()) == {"triton"}
    assert torch.equal(aux["block_indices"], parallel.shard(want_aux["block_indices"]))
    tol = dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got, parallel.shard(want), **tol)
    for n, g, w in zip(NAMES, grads, want_grads, strict=True):
        torch.testing.assert_close(g, parallel.shard(w), msg=lambda m, n=n: f"d{n}: {m}", **tol)


def join(rank: int, world: int, folder: str, mode: str) -> None:
    """Make this process rank `rank` of the default group."""
    torch.set_num_threads(1)
    torch.Tensor.new_empty = _poisoned(torch.Tensor.new_empty)  # as in the tests of one process
    if mode == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if mode == "nccl" else "gloo", init_method=f"file://{folder}/store",
        rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip


def work(jobs: dict[str, Callable[[], Any]], rank: int, folder: str) -> NoReturn:
    """Do the jobs of one rank: what happened goes to a file per rank, by name."""
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        begin = time.monotonic()
        if name == "dies":  # this rank may be the one that goes
            Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
        try:
            found[name] = (job(), None, time.monotonic() - begin)
        except BaseException:
            found[name] = (None, traceback.format_exc(), 0.0)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    os._exit(0)  # destroying a group with a dead rank may wait


def _worker(rank: int, world: int, folder: str, mode: str) -> None:
    join(rank, world, folder, mode)
    jobs: dict[str, Any] = {name: lambda n=name: _run_case(n, rank, world) for name in CASES}
    jobs["layer"] = lambda: _run_layer(rank, world)
    jobs["settings"] = lambda: _run_settings(rank, world)
    jobs["overlap"] = lambda: _run_overlap(rank, world)
    jobs["no-waiting"] = lambda: _run_no_waiting(rank, world)
    jobs |= {f"bad-{kind}": lambda k=kind: _run_bad(k, rank, world) for kind in BAD}
    jobs["dies"] = lambda: _dies(rank, world)
    if mode != "gloo":
        device = "cuda" if mode == "nccl" else "cpu"
        jobs = {"triton": lambda: _run_triton(rank, world, device)}
    work(jobs, rank, folder)


def start(world: int, folder: Path, mode: str, module: str = __name__) -> list[dict[str, Any]]:
    """Run a world, of processes of `module`, and read what every rank of it found."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "NCCL_NVLS_ENABLE": "0"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(r), str(world), str(folder), mode],
            env=env, cwd=ROOT, stderr=(folder / f"{r}.stderr").open("w"),
        )
        for r in range(world)
    ]  # fmt: skip
    try:
        for process in ranks:
            process.wait(timeout=240)
    finally:
        for process in ranks:
            process.kill()
    texts = [(folder / f"{r}.stderr").read_text() for r in range(world)]
    files = [folder / f"{r}.pickle" for r in range(world)]
    assert all(f.exists() for f in files), texts
    return [pickle.loads(f.read_bytes()) for f in files]


def no_error(found: list[dict[str, Any]], name: str) -> None:
    """Job `name` of work() did well on every rank."""
    for rank, results in enumerate(found):
        _, error, _ = results[name]
        assert error is None, f"rank {rank}: {error}"


def says_on_every_rank(found: list[dict[str, Any]], name: str, words: tuple[str, str]) -> None:
    """The text that job `name` gave has the first of the words, on the last rank the second."""
    no_error(found, name)
    for rank, results in enumerate(found):
        text, _, _ = results[name]
        assert words[rank == len(found) - 1] in text, f"rank {rank}: {text}"


def a_dead_rank_ended_the_others(found: list[dict[str, Any]]) -> None:
    """The last rank died in job "dies", and the others were told soon."""
    assert "dies" not in found[-1]
    no_error(found[:-1], "dies")
    for rank, results in enumerate(found[:-1]):
        text, _, seconds = results["dies"]
        assert f"rank {rank}: the exchange of" in text and "a rank died" in text
        assert seconds < 60, "longer than the group's own limit"


# Three ranks suffice: one is the first, one the last and one neither. Two and four ranks add little
# but the time in which they start.
WORLDS = [3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 4))]


@pytest.fixture(scope="module", params=WORLDS, ids="{}-ranks".format)
def found(request, tmp_path_factory) -> list[dict[str, Any]]:
    return start(request.param, tmp_path_factory.mktemp("ranks"), "gloo")


@pytest.mark.parametrize("name", [*CASES, "layer", "settings", "overlap", "no-waiting"])
def test_equals_one_process(found, name):
    no_error(found, name)


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_ends_with_an_error_on_every_rank(found, kind):
    says_on_every_rank(found, f"bad-{kind}", BAD[kind])


def test_a_dead_rank_ends_the_others(found):
    a_dead_rank_ended_the_others(found)


@pytest.mark.kernel
@pytest.mark.parametrize("world", [2, 4])
def test_kernels_on_chunks(kernel_device, world, tmp_path):
    """In Triton's interpreter with gloo, or on as many GPUs with NCCL."""
    if kernel_device == "cuda" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, here {torch.cuda.device_count()}")
    if kernel_device == "cpu" and world > 2:
        pytest.skip("two interpreted ranks tell as much as four")
    results = start(world, tmp_path, "nccl" if kernel_device == "cuda" else "interpreted")
    no_error(results, "triton")


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


def test_a_world_size_must_divide():
    assert parallel.chunk_length(48, 4) == 6
    with pytest.raises(ValueError, match="multiple of 2 \\* world size = 8 tokens, got 44"):
        parallel.chunk_length(44, 4)


def test_every_chunk_has_one_owner_and_work_is_even():
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
        x = _inputs(1, 32, F32)
        pool = lambda t: mean_pool(t, SIZES["l"], SIZES["d"])
        run = lambda: parallel.nsa_attention_parallel(
            *(x[n] for n in NAMES), phi_k=pool, phi_v=pool, backend="reference", **SIZES
        )
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(run, backend="eager")(), run())
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _worker(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
