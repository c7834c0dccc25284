"""A call that is played from its record does what its launcher does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from nsa import launches
from nsa.arrival import selection_waits
from nsa.errors import must_raise
from nsa.flags import Flags
from nsa.kernels import graph, record, replay
from nsa.kernels.launch import lane, launch
from nsa.tests.helpers import deterministic, make_layer

I32 = torch.int32


def memory(address: int, n: int) -> ctypes.Array:
    return (ctypes.c_int32 * n).from_address(address)


class Sum:
    """A kernel in Python that does OUT = A + B + step by addresses, as a GPU's does."""

    __name__ = "_sum_kernel"
    arg_names = ("A", "B", "OUT", "n", "step", "BLOCK")
    function = packed_metadata = "compiled"
    device_caches = warmup = None
    hooked = 0

    def __getitem__(self, grid):
        def started(*args, **constants):
            self.hooked += not constants  # which Triton alone is given
            self.compute(*args[:5])
            return self

        return started

    def run(self, x, y, z, stream, function, metadata, a, b, c, *args):
        assert args[5] == 64
        self.compute(*args[:5])

    def compute(self, a, b, out, n, step):
        at = lambda x: x if isinstance(x, int) else getattr(x, "base", x).data_ptr()
        a, b, out = (memory(at(x), n) for x in (a, b, out))
        out[:] = [x + y + step for x, y in zip(a, b, strict=True)]


@pytest.fixture
def sums(monkeypatch):
    """Kernel `Sum`, launched on CPU tensors as if they were a GPU's."""
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    for owner in (replay.launch, replay):
        monkeypatch.setattr(owner, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(replay.launch, "_made", {})
    monkeypatch.setattr(replay, "on_this_gpu", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernel = Sum()

    def launched(a, b, out, step):
        launch(kernel, (1,), a, b, out, out.numel(), step, BLOCK=64)

    launched.kernel = kernel
    return launched


def ints(*values):
    return torch.tensor(values, dtype=I32)


def counted(launcher):
    """The launcher, played, and how often it was really called."""
    calls = []
    return replay.replayed(lambda *args: (calls.append(1), launcher(*args))[1]), calls


def chain(sums):
    """((a + b + step) + 1) + zeros, and twice a, through memory of its own."""

    def launcher(a, b, step, names=()):
        room = torch.empty(2, a.numel(), dtype=I32)
        zeros = torch.zeros(a.numel(), dtype=I32)
        out, double = torch.empty_like(a), a.new_empty(a.shape)
        sums(a, b, room[0], step)
        sums(room[0], zeros, room[1], 1)
        sums(room[1], zeros, out, 0)
        sums(a, a, double, 0)
        return out, double

    return launcher


A, B = ints(1, 2, 3), ints(4, 5, 6)  # chain() gives 11, 13, 15 of them and a step of 5


@pytest.fixture
def played(sums):
    """A chain whose calls are played from now on."""
    call, calls = counted(chain(sums))
    for _ in range(3):
        call(A, B, 5)
    assert len(calls) == 2
    return call, calls


def test_a_call_is_played_from_the_third_time_on(sums):
    call, calls = counted(chain(sums))
    kept = []
    for n in range(6):
        a, b = ints(n, 2, 3), ints(10, 20, n)
        launches.reset()
        out, double = call(a, b, 5)
        assert out.tolist() == (a + b + 6).tolist() and double.tolist() == (2 * a).tolist()
        assert launches.counts() == {"_sum_kernel": 4}
        kept.append((out, out.clone()))
    assert len(calls) == 2
    assert record.Recorder.__torch_dispatch__ is record._watch  # no compiler is imported for it
    assert all(torch.equal(x, then) for x, then in kept)  # no result is another's memory


def test_what_a_launcher_may_choose_by_has_records_of_its_own(sums, monkeypatch):
    """One tensor twice is not taken for two."""
    call, calls = counted(chain(sums))
    cases = [
        (A, B, 5), (A, B, 6), (ints(1), ints(2), 5), (A, A, 5), (A, B, 5, [1]), (A, B, 5, None),
        (ints(0, 1, 2, 3)[1:], B, 5), (ints(1, 1, 2, 1, 3, 1)[::2].clone(), B, 5),
    ]  # fmt: skip
    for _ in range(4):
        for given in cases:
            out, double = call(*given)
            assert out.tolist() == (given[0] + given[1] + given[2] + 1).tolist()
    made = 2 * 7  # the last is like the first
    assert len(calls) == made

    with deterministic():
        call(A, B, 5)
    call(A, B, 5)
    assert len(calls) == made + 1
    monkeypatch.setattr(replay, "get_flags", lambda: Flags(use_gluon=False))
    call(A, B, 5)
    call(A, B, 5)
    replay.forget()
    call(A, B, 5)
    assert len(calls) == made + 4


@pytest.mark.parametrize("how", ["copies", "fills", "reads", "input", "held", "overlap", "fails"])
def test_what_no_record_holds_is_launched_every_time(sums, how):
    held = ints(7, 7, 7)

    seconds = {
        "copies": torch.clone, "fills": lambda b: torch.full_like(b, 4),
        "reads": lambda b: b * b.max().item(), "held": lambda b: held,
    }  # fmt: skip

    def launcher(a, b):
        out = torch.empty_like(a)
        if how == "input":
            a = a.add_(1)
        sums(a, seconds.get(how, lambda b: b)(b), out, 0)
        if how == "fails":
            raise ValueError("no")
        return out

    call, calls = counted(launcher)
    for n in range(1, 5):
        both = torch.arange(6, dtype=I32)
        a, b = (both[:3], both[1:4]) if how == "overlap" else (ints(n, 2, 3), ints(n, n, n))
        first = a.clone()
        want = {"copies": n, "fills": 4, "reads": n * n, "input": n + 1, "held": 7}.get(how, b)
        with pytest.raises(ValueError) if how == "fails" else contextlib.nullcontext():
            assert call(a, b).tolist() == (first + want).tolist()
    assert len(calls) == 4


def test_what_is_computed_where_freed_memory_lay_is_no_view():
    """The allocator gives it out again: only who shares an argument's memory is a view."""
    aten = torch.ops.aten
    a, freed = torch.ones(8), torch.empty(8)
    seen = record.Recorder([a])
    seen._saw(aten.empty.memory_format, ([8],), {}, freed)
    seen._saw(aten.view.default, (freed, [2, 4]), {}, freed.view(2, 4))
    seen._saw(aten.split.Tensor, (a, 4), {}, a.split(4))
    with pytest.raises(record.Refused, match="neg"):
        seen._saw(aten.neg.default, (a,), {}, freed)
    with pytest.raises(record.Refused, match="out"):
        seen._saw(aten.zeros.out, ([8],), {"out": freed}, freed)


def test_results_of_a_played_call_share_no_memory(sums):
    """As PyTorch asks of a custom operator, of empty ones too."""

    def launcher(a):
        out = torch.empty_like(a)
        sums(a, a, out, 0)
        return out, a.new_empty(0), a.new_empty(0)

    call, _ = counted(launcher)
    for _ in range(4):
        _, x, y = call(ints(1, 2))
        assert x.untyped_storage()._cdata != y.untyped_storage()._cdata
        assert not x.is_inference()
        with torch.inference_mode():
            call(ints(1, 2))


def test_a_call_whose_kernel_was_not_compiled_is_recorded_the_next_time(sums):
    call, calls = counted(chain(sums))
    call(A, B, 5)
    replay.launch._made.clear()
    for _ in range(4):
        launches.reset()
        assert call(A, B, 5)[0].tolist() == [11, 13, 15]
        assert launches.counts() == {"_sum_kernel": 4}
    assert len(calls) == 3


@pytest.mark.parametrize("during", [
    lambda: mock.patch.object(replay.Record, "play", side_effect=torch.OutOfMemoryError),
    lambda: selection_waits(lambda: None),
], ids=["without room for a workspace", "while keys are on their way"])  # fmt: skip
def test_the_launcher_is_called_instead(played, during):
    call, calls = played
    with during():
        assert call(A, B, 5)[0].tolist() == [11, 13, 15]
    assert len(calls) == 3


def test_tritons_launch_hooks_see_what_is_played(sums, played, monkeypatch):
    monkeypatch.setattr(replay.launch, "hooked", lambda: True)
    for _ in range(3):
        assert played[0](A, B, 5)[0].tolist() == [11, 13, 15]
    assert sums.kernel.hooked == 4 * 3


class FakeGraph:
    """A graph whose launches are made by the host."""

    launched: list[int] = []

    def __init__(self, launch_on):
        self.launch_on = launch_on

    def launch(self, stream):
        self.launched.append(stream)
        self.launch_on(stream)


@pytest.fixture
def graphs(monkeypatch):
    """The streams on which graphs were launched; memory of a CPU has them, too."""
    monkeypatch.setattr(replay, "Graph", FakeGraph)
    monkeypatch.setattr(replay, "Lanes", mock.Mock())
    monkeypatch.setattr(replay, "zero", lambda at, size, stream: ctypes.memset(at, 0, size))
    monkeypatch.setattr(FakeGraph, "launched", [])
    return FakeGraph.launched


def test_zeros_between_launches_and_parts_that_are_zero(sums, graphs):
    def launcher(a):
        room = torch.empty(8, dtype=I32)
        room[4:].zero_()
        total = room[:4]
        sums(a, a, total, 0)
        total.zero_()
        out = torch.zeros(2, 4, dtype=I32)
        sums(a, room[4:], out[0], 0)
        sums(total, room[4:], room[4:], 3)
        return out[0], out[1], room[4:], torch.zeros(4, dtype=I32)

    call, calls = counted(launcher)
    for n in range(5):
        found = [x.tolist() for x in call(ints(n, 1, 2, 3))]
        assert found == [[n, 1, 2, 3], [0] * 4, [3] * 4, [0] * 4]
    assert len(calls) == 2
    kept, a = {}, ints(0, 1, 2, 3)

    def empty(shape, stride, dtype, device):
        where = (shape, dtype, len([x for x in given if x.shape == shape and x.dtype == dtype]))
        given.append(kept.setdefault(where, torch.empty(shape, dtype=dtype)).fill_(9))
        return given[-1]

    for n in range(5):
        a[0], given = n, []
        with mock.patch.object(replay, "_empty", empty):
            found = [x.tolist() for x in call(a)]
        assert found == [[n, 1, 2, 3], [0] * 4, [3] * 4, [0] * 4]
    assert len(graphs) == 4


def test_memory_is_used_again_within_a_call(sums, monkeypatch):
    def launcher(a):
        x = a
        for _ in range(6):
            y = torch.empty_like(a)
            sums(x, x, y, 0)
            x = y
        return x

    call, _ = counted(launcher)
    a = torch.ones(1024, dtype=I32)
    for _ in range(3):
        call(a)
    with mock.patch.object(replay, "_empty", side_effect=replay._empty) as empty:
        assert call(a).tolist() == [64] * 1024
    rooms = [call.args[0] for call in empty.call_args_list if call.args[2] == torch.uint8]
    assert rooms == [(2 * a.numel() * 4,)]
    monkeypatch.setattr(replay, "LARGEST", rooms[0][0] - 1)
    call, calls = counted(launcher)
    for _ in range(4):
        call(a)
    assert len(calls) == 4


def test_memory_that_comes_again_has_a_graph_of_its_launches(sums, graphs, monkeypatch):
    """And other memory is not taken for it."""
    call, _ = counted(chain(sums))
    monkeypatch.setattr(replay, "MOST_GRAPHS", 2)
    monkeypatch.setattr(replay, "_graphs", [])
    rooms = [torch.empty(4096, dtype=torch.uint8) for _ in range(2)]
    results = [torch.empty(3, dtype=I32) for _ in range(2)]
    inputs = [(A, B), (ints(7, 8, 9), ints(1, 1, 1))]
    for _ in range(3):
        call(*inputs[0], 5)
    for n in (0, 0, 0, 1, 1, 1, 0, 1):
        left = {torch.uint8: [rooms[n]], I32: results.copy()}
        empty = lambda shape, stride, dtype, device, left=left: left[dtype].pop()
        with mock.patch.object(replay, "_empty", empty):  # monkeypatch would have it forget
            out, _ = call(*inputs[n], 5)
        assert out.tolist() == (inputs[n][0] + inputs[n][1] + 6).tolist()
    assert graphs == [7] * 5  # of both from the second time on; the first memory is forgotten


def test_lanes_share_no_memory_and_keep_their_order(sums, graphs, monkeypatch):
    def launcher(a):
        first, outs = torch.empty_like(a), []
        sums(a, a, first, 0)
        for n in range(3):
            with lane():
                once, twice = torch.empty_like(a), torch.empty_like(a)
                twice.zero_()
                sums(first, a, once, n)
                sums(once, twice, twice, 0)
                outs.append(twice)
        total, out = torch.empty_like(a), torch.empty_like(a)
        sums(outs[0], outs[1], total, 0)
        sums(total, outs[2], out, 0)
        return out

    call, _ = counted(launcher)
    a, records = torch.ones(64, dtype=I32), []
    made = replay.Record.__init__
    keep = lambda self, seen, *more: (records.append((self, seen)), made(self, seen, *more))[1]
    with mock.patch.object(replay.Record, "__init__", keep):
        for _ in range(5):
            assert call(a).tolist() == [12] * 64
    record, seen = records[0]
    used = [m for m in seen.memories if m is not None and m.first in range(7)]  # not behind them
    assert len({m.offset for m in used}) == len(used) == 7
    lanes = [step.lane and step.lane[1] for step in record.steps]
    assert lanes == [None, None, 0, 0, 1, 1, 2, 2, None, None]  # zeros come before all


def test_a_lane_depends_on_what_was_before_the_fork(monkeypatch):
    """By a driver that captures: each launch is a node that depends on `last`."""
    last, needs = [], {}

    def call(name, stream, *args):
        if name == "cuStreamGetCaptureInfo_v2":
            nodes = (ctypes.c_void_p * len(last))(*last)
            args[3]._obj.contents = ctypes.cast(nodes, ctypes.POINTER(ctypes.c_void_p)).contents
            args[4]._obj.value = len(last)
            kept.append(nodes)
        else:
            assert name == "cuStreamUpdateCaptureDependencies" and args[2].value == 1
            last[:] = args[0][: args[1].value]

    kept = []
    monkeypatch.setattr(graph, "_call", call)
    lanes = graph.Lanes(7)
    for node, where in enumerate([None, (1, 0), (1, 0), (1, 1), None, (5, 0), (5, 1), (8, 0)], 1):
        lanes.to(where)
        needs[node] = {*last}
        last[:] = [node]
    lanes.to(None)
    assert needs == {1: set(), 2: {1}, 3: {2}, 4: {1}, 5: {3, 4}, 6: {5}, 7: {5}, 8: {6, 7}}
    assert last == [8]


@pytest.mark.parametrize("name, error, raised", [
    ("CUDA_ERROR_ILLEGAL_ADDRESS", RuntimeError, True),
    ("CUDA_ERROR_INVALID_VALUE", RuntimeError, False),
    ("CUDA_ERROR_OUT_OF_MEMORY", MemoryError, True),
])  # fmt: skip
def test_the_drivers_errors_go_by_their_names(name, error, raised, monkeypatch):
    """So that no other route hides what the process cannot recover from."""

    def say(number, said):
        said._obj.value = name.encode()

    driver = SimpleNamespace(cuGraphLaunch=lambda *args: 9, cuGetErrorName=say)
    monkeypatch.setattr(graph, "_loaded", driver)
    with pytest.raises(error, match=f"cuGraphLaunch gave {name}") as caught:
        graph._call("cuGraphLaunch")
    assert must_raise(caught.value) == raised
    with pytest.raises(RuntimeError, match="this driver has no cuMemsetD8Async"):
        graph.zero(0, 1, 7)


@pytest.mark.parametrize("why", ["hooked", "captured", "scratch", "refused", "no memory"])
def test_launches_that_no_graph_holds_are_made_one_by_one(why, sums, played, graphs, monkeypatch):
    call, _ = played
    if why == "hooked":
        monkeypatch.setattr(replay.launch, "hooked", lambda: True)
    if why == "captured":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    if why == "scratch":
        sums.kernel.metadata = SimpleNamespace(global_scratch_size=8, profile_scratch_size=0)
        call, _ = counted(chain(sums))
    if why == "no memory":
        monkeypatch.setattr(FakeGraph, "launch", mock.Mock(side_effect=MemoryError))
    if why == "refused":
        monkeypatch.setattr(FakeGraph, "__init__", mock.Mock(side_effect=RuntimeError))
    for _ in range(9):
        with mock.patch.object(replay, "_empty", side_effect=replay._empty) as empty:
            assert call(A, B, 5)[0].tolist() == [11, 13, 15]
    assert empty.called and not graphs


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.nightly), 90])
def test_records_of_real_calls_name_the_memory_that_the_calls_used(arch):
    """And no call falls out of being recorded unnoticed."""
    done = subprocess.run(
        [sys.executable, "-m", "nsa.tests.recorded_calls", str(arch)],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") > 20
    assert "not recorded" not in done.stdout, done.stdout


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("S, heads, D, dtype", [
    (200, (16, 1), 128, torch.bfloat16), (700, (64, 4), 128, torch.bfloat16),
    (3000, (16, 1), 128, torch.float16), (30000, (16, 1), 128, torch.bfloat16),
    (500, (8, 2), 64, torch.bfloat16), (300, (4, 2), 16, torch.float32),
], ids=str)  # fmt: skip
def test_prefill_is_played_as_it_is_launched(S, heads, D, dtype, fixed, cuda, monkeypatch):
    """Values change between calls; gradients, which atomics add to, are bitwise those of the
    launchers in deterministic mode."""
    from nsa.kernels.prefill import nsa_prefill_triton

    play, played, graph, graphs = replay.Record.play, [], replay.Graph.launch, []
    monkeypatch.setattr(replay.Record, "play", lambda *a: (played.append(1), play(*a))[1])
    monkeypatch.setattr(replay.Graph, "launch", lambda *a: (graphs.append(1), graph(*a))[1])
    sizes = dict(l=32, d=16, l_sel=64, n_sel=16, n_init=1, n_local=2, window=512)

    def run(tensors, grad):
        with torch.set_grad_enabled(grad):
            tensors = [x.detach().requires_grad_(grad) for x in tensors]
            out, aux = nsa_prefill_triton(*tensors, **sizes)
            grads = torch.autograd.grad(out, tensors, out.detach()) if grad else ()
            return [out, *aux.values(), *grads]

    base = make_layer(S, *heads, D, l=32, d=16, dtype=dtype, device=cuda)
    with deterministic(fixed):
        for grad in (False, True):
            tensors = [x.clone() for x in base]
            for n in (1, 2, 3, 4, 5):
                got = None  # results come to lie where those before lay
                for x, first in zip(tensors[:-1], base, strict=False):
                    torch.mul(first, n, out=x)
                got = run(tensors, grad)
            assert played and graphs, "nothing was played, or not by a graph"
            played.clear()
            replay.forget()
            want = run(tensors, grad)
            assert not played
            for a, b in zip(got, want, strict=True):
                if fixed or not grad:
                    assert torch.equal(a, b)
                else:  # rows that see nothing have a log-sum-exp of -inf
                    a, b = a.float().nan_to_num(), b.float().nan_to_num()
                    assert (a - b).norm() <= 4e-3 * b.norm()
