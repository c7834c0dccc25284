"""Launches: compiled from the second time on, anew for other arguments, on the right device."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime import build
from triton.runtime.jit import JITCallable

from nsa import NSAAttention, NSAConfig, kernels, launches
from nsa.kernels import cache_key, row_tiles
from nsa.kernels import launch as module
from nsa.kernels.decode import nsa_decode_triton
from nsa.kernels.launch import OPTIONS, launch, launch_planned, on_its_device
from nsa.tests.helpers import TRITON, randn

CONFIG = NSAConfig(dim=64, heads=8, groups=2, d_k=32, d_v=32, l=16, d=8, l_sel=16, n_sel=4, w=32)


class FakeKernel:
    """Like a JIT function: kernel[grid](*args, **constants) gives what it compiled."""

    __name__ = "_fake_kernel"
    arg_names = ("X", "n", "BLOCK", "MASKED")
    device_caches = None

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def kinds(self) -> list[str]:
        return [kind for kind, *_ in self.calls]

    def __getitem__(self, grid):
        return lambda *args, **constants: self.warmup(*args, grid=grid, how="jit", **constants)

    def warmup(self, *args, grid, how="warmup", **constants):
        self.calls.append((how, grid, args, constants))
        return Compiled(self.calls)


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: list[tuple]) -> None:
        self.calls = calls

    def _init_handles(self) -> None:
        self.calls.append(("loaded",))

    def __getitem__(self, grid):
        return lambda *args: self.calls.append(("hooked", grid, args))

    def run(self, x, y, z, stream, *args):
        assert args[:5] == ("function", "metadata", None, None, None)
        self.calls.append(("run", (x, y, z), stream, args[5:]))


@pytest.fixture
def driver(monkeypatch):
    """Triton's driver, on the device that `device` says."""

    def set_current_device(device):
        assert device == fake.device

    fake = SimpleNamespace(
        device=0, get_current_device=lambda: fake.device, set_current_device=set_current_device,
        get_current_stream=lambda device: f"stream of {device}",
    )  # fmt: skip
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=fake))
    monkeypatch.setattr(module, "_made", {})
    return fake


CONSTANTS = dict(MASKED=True, num_warps=4, BLOCK=64)
LAUNCHER = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "one_name", NULL, -1, methods};
PyMODINIT_FUNC PyInit_one_name(void) { return PyModule_Create(&module); }
"""


def test_threads_that_load_launchers_of_one_name_get_each_their_own():
    """As those of Triton 3.6 are, of which Python keeps one module."""
    if not (shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("no C compiler, which Triton compiles launchers with")
    load = lambda n: build.compile_module_from_src(src=LAUNCHER % n, name="one_name")
    for _ in range(2):  # Python gives the one module from the second time on
        modules = [load(n) for n in range(8)]
        assert [m.launch() for m in modules] == list(range(8))
    wanted = [*range(8)] * 300
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(lambda n: load(n).launch(), wanted)] == wanted
    finally:
        sys.setswitchinterval(before)


def test_the_second_launch_gets_every_parameter_in_the_order_of_the_signature(driver):
    """Another kernel of the same name is not taken for the compiled one."""
    kernel, same_name, compiled, other = FakeKernel(), FakeKernel(), {}, {}
    launches.reset()
    for n, cache in ((1, compiled), (2, compiled), (3, other)):
        launch_planned(kernel, (n, 2, 1), ("x", n), CONSTANTS, cache)
    launch_planned(same_name, (1, 2, 1), ("x", 1), CONSTANTS, compiled)
    assert kernel.calls == [
        ("jit", (1, 2, 1), ("x", 1), OPTIONS | CONSTANTS),
        ("run", (2, 2, 1), "stream of 0", ("x", 2, 64, True)),
        ("jit", (3, 2, 1), ("x", 3), OPTIONS | CONSTANTS),
    ]
    assert same_name.kinds() == ["jit"] and launches.counts()["_fake_kernel"] == 4


def test_what_was_prepared_is_launched_without_compiling(driver):
    kernel, compiled = FakeKernel(), {}
    launches.reset()
    for _ in range(2):
        module.prepare_planned(kernel, (1, 2, 1), ("x", 1), CONSTANTS, compiled)
    assert kernel.calls == [("warmup", (1, 2, 1), ("x", 1), OPTIONS | CONSTANTS), ("loaded",)]
    assert "_fake_kernel" not in launches.counts()
    launch_planned(kernel, (5, 2, 1), ("x", 1), CONSTANTS, compiled)
    assert kernel.calls[2:] == [("run", (5, 2, 1), "stream of 0", ("x", 1, 64, True))]


@pytest.fixture
def call(driver, monkeypatch):
    """A launcher of three kernels, one of them twice, and those kernels."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernels = [FakeKernel() for _ in range(3)]
    x = on_card(0)

    @on_its_device
    def launcher(x):
        for i, kernel in enumerate([*kernels, kernels[0]]):
            launch(kernel, (1,), 16, 16 * i + 16, **CONSTANTS)
        return "done"

    return (lambda: launcher(x)), kernels


def test_all_kernels_of_a_call_are_compiled_before_the_first_is_launched(call):
    go, kernels = call
    launches.reset()
    assert go() == "done" and go() == "done"
    made = ["warmup", "loaded"]
    assert [k.kinds() for k in kernels] == [made + ["run"] * 4, *[made + ["run"] * 2] * 2]
    assert launches.counts()["_fake_kernel"] == 8


def test_an_error_of_a_compilation_is_the_calls(call):
    go, kernels = call
    kernels[1].warmup = mock.Mock(side_effect=RuntimeError("PTX failed"))
    with pytest.raises(RuntimeError, match="PTX failed"):
        go()
    assert kernels[2].kinds() == ["warmup", "loaded"]


def test_a_planned_call_launches_nothing_and_says_what_it_would(call):
    go, kernels = call
    launches.reset()
    with module.planning() as planned:
        assert go() == "done" and module.is_planned("_other_kernel")
        assert module.pass_over("_faster_kernel", "heads must be 64 wide")
        assert not module.pass_over("_good_kernel", None)
    names = [one.kernel.__name__ for one in planned.launches]
    assert names == ["_fake_kernel"] * 4 + ["_other_kernel"]
    assert planned.passed_over == {"_faster_kernel": "heads must be 64 wide"}
    assert not any(k.calls for k in kernels) and "_fake_kernel" not in launches.counts()
    assert not module.is_planned("_other_kernel")
    go()
    assert kernels[1].kinds() == ["warmup", "loaded", "run"]


def test_a_launch_that_triton_would_compile_alike_is_not_looked_up_again(driver):
    kernel, x = FakeKernel(), torch.zeros(64, dtype=torch.float16)
    launches.reset()
    go = lambda *args, grid=(2,), **changed: launch(kernel, grid, *args, **{**CONSTANTS, **changed})
    go(x, 48)
    alike = [(x, 48), (x[8:], 16), (torch.ones(3, dtype=torch.float16), 1 << 20)]
    for args in alike:
        go(*args, grid=(3, 2))
    assert kernel.kinds() == ["jit"] + ["run"] * 3
    assert kernel.calls[1][1:] == ((3, 2, 1), "stream of 0", (x.data_ptr(), 48, 64, True))
    others = [
        (x, 1), (x, 47), (x, 1 << 31), (x, 1 << 63), (x, True), (x, 2.0), (x, None),
        (x[1:], 48), (x.float(), 48),
    ]  # fmt: skip
    for args in others:
        go(*args)
        go(*args)
        assert kernel.kinds()[-2:] == ["jit", "run"], args
    for changed in (dict(MASKED=False), dict(BLOCK=32), dict(num_warps=8)):
        go(x, 48, **changed)
        assert kernel.calls[-1][0] == "jit", changed
    driver.device = 1
    go(x, 48)
    assert kernel.kinds()[-1] == "jit"
    go(x, 48)
    assert kernel.calls[-1][:3] == ("run", (2, 1, 1), "stream of 1")
    F16, forms = x.view(1, 64).expand(32, -1).contiguous(), ((16, 64), (16, 32))
    for y, block, how in (
        (F16, forms[0], "jit"), (F16, forms[0], "run"), (F16[:16], forms[0], "run"),
        (F16, forms[1], "jit"), (F16.bfloat16(), forms[0], "jit"),
    ):  # fmt: skip
        go(row_tiles.descriptor(y, block), 16)
        assert kernel.calls[-1][0] == how, (y.shape, y.dtype, block)
    for _ in range(2):  # unknown kinds are Triton's business every time
        go(x, object())
        assert kernel.calls[-1][0] == "jit"
    assert launches.counts()["_fake_kernel"] == len(kernel.calls)


class ClearedByAnother(dict):
    """What another thread empties right after each look into it."""

    def get(self, key):
        found = super().get(key)
        self.clear()
        return found

    def __contains__(self, key):
        return self.get(key) is not None


def test_nothing_is_compiled_for_an_address_when_another_thread_clears(driver, monkeypatch):
    monkeypatch.setattr(module, "_made", ClearedByAnother())
    kernel, x = FakeKernel(), torch.zeros(64, dtype=torch.float16)
    for _ in range(4):
        launch(kernel, (2,), x, 48, **CONSTANTS)
    assert kernel.kinds() == ["jit", "run"] * 2
    assert all(args[0] is x for how, _, args, *_ in kernel.calls if how == "jit")


def test_triton_calls_its_hooks_where_there_are_any(driver, monkeypatch):
    from triton import knobs

    kernel, compiled = FakeKernel(), {}
    go = lambda: launch_planned(kernel, (4, 1, 1), ("x", 1), CONSTANTS, compiled)
    go()
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook.add(print)
        try:
            go()
        finally:
            hook.remove(print)
        assert kernel.calls[-1] == ("hooked", (4, 1, 1), ("x", 1, 64, True))
    go()
    assert kernel.kinds()[-1] == "run"


def test_layouts_tell_types_alignment_and_ints_apart():
    x, memory = torch.zeros(64, dtype=torch.float16), {}
    of = lambda n, y: module.by_layout(memory, (n,), (y,))[0]
    assert module.by_layout({}, (), (x, x[1:])) == ({}, [x.data_ptr(), x.data_ptr() + 2])
    first = of(16, x)
    assert of(16, x[8:]) is first
    for n, y in ((16, x[1:]), (16, x.to(torch.bfloat16)), (32, x)):
        assert of(n, y) is not first
    assert len(memory) == 4


def on_card(index: int) -> Any:
    return SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=index))


def test_a_launcher_runs_on_the_device_of_its_first_argument(monkeypatch):
    current = [0]

    @contextlib.contextmanager
    def guard(device):
        before, current[0] = current[0], device.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", guard)
    where = on_its_device(lambda x, y=None: current[0])
    for call in (where, lambda x: where(x=x, y=1)):
        found = [call(x) for x in (on_card(1), on_card(0), torch.zeros(1), None)]
        assert found == [1, 0, 0, 0] and current == [0]


@pytest.mark.kernel
def test_a_step_of_unaligned_queries_after_aligned_ones_is_right(cuda):
    draw = lambda i, *shape: randn(*shape, seed=i, dtype=torch.float16, device=cuda)
    keys = [draw(i, 1, n, 2, 32) for i, n in enumerate((32, 32, 256, 256, 256, 256))]
    gates, room = draw(7, 1, 1, 8, 3).sigmoid(), draw(8, 8 * 32 + 8)
    lens = torch.tensor([200], dtype=torch.int32, device=cuda)
    sizes = dict(l=16, d=8, l_sel=16, n_sel=4, n_init=1, n_local=2, window=32, max_len=256)
    step = lambda q: nsa_decode_triton(q, *keys, gates, lens, **sizes)
    for at in (0, 1, 0, 8, 1):
        q = room[at : at + 256].view(1, 1, 8, 32)
        aligned = q.clone()  # a launch of its own
        torch.testing.assert_close(step(q), step(aligned), rtol=0, atol=0)
    with launches.recording() as counts:
        step(room[:256].view(1, 1, 8, 32))
    assert counts == dict(_decode_scan_kernel=1, _decode_selected_kernel=1, _decode_merge_kernel=1)


@pytest.mark.kernel
def test_a_layer_works_on_a_card_that_is_not_the_current_one(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    assert torch.cuda.current_device() == 0
    torch.manual_seed(3)
    layer = NSAAttention(CONFIG, flags=TRITON, backend="triton").half()
    x = torch.randn(2, 70, 64, dtype=torch.float16)
    found = []
    for card in ("cuda:0", "cuda:1"):
        there, mine = layer.to(card), x.to(card).requires_grad_()
        with launches.recording() as counts:
            out = there(mine)
            out.float().square().sum().backward()
            cache = there.make_cache(2, 80)
            steps = [there.step(mine[:, :69].detach(), cache)]
            steps.append(there.step(mine[:, 69:].detach(), cache))
        assert counts["_decode_append_kernel"] == counts["_decode_team_kernel"] == 1
        found.append([t.detach().cpu() for t in (out, mine.grad, *steps)])
        assert torch.cuda.current_device() == 0
    for a, b in zip(*found, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("gluon", [False, True])
def test_descriptors_are_those_that_triton_makes(gluon):
    """Layouts, too, and from the second on, which Triton does not check; one form is not taken for
    another."""
    from triton.experimental.gluon import language as gl

    for sizes in ((128, 16, 2), (0, 32, 1)):
        assert repr(row_tiles.shared_layout(*sizes)) == repr(gl.NVMMASharedLayout(*sizes))
    layout = row_tiles.shared_layout(128, 16, 2) if gluon else None
    more = () if layout is None else (layout,)
    row_tiles._forms.clear()
    F16, forms = torch.float16, [(24, 64, 8), (24, 128, 8), (16, 128, 8), (24, 128, 16)]
    for rows, stride, block, dtype in (*((*f, F16) for f in forms), (24, 128, 8, torch.bfloat16)):
        for _ in range(2):
            base = torch.zeros(rows, stride, dtype=dtype)[:, :64]
            got = row_tiles.descriptor(base, (block, 64), layout)
            want = type(got).from_tensor(base, [block, 64], *more)
            assert got.base is base and type(got) is type(want)
            assert {**vars(got), "base": None} == {**vars(want), "base": None, "kind": got.kind}
    assert len(row_tiles._forms) == 5
    assert all(fields["base"] is None for fields in row_tiles._forms.values())
    for _ in range(2):
        with pytest.raises(AssertionError, match="16-byte aligned"):
            row_tiles.descriptor(torch.zeros(24 * 64 + 1).half()[1:].view(24, 64), (8, 64), layout)


def test_keys_of_compiled_kernels_do_not_depend_on_what_came_before(monkeypatch):
    """Else a process compiles again what is on the disk: which of two kernels that share a function
    comes first is chance, since they compile side by side."""
    for found in pkgutil.walk_packages(kernels.__path__, "nsa.kernels."):
        importlib.import_module(found.name)
    modules = [m for name, m in sys.modules.items() if name.startswith("nsa.kernels.")]
    functions = {id(x): x for m in modules for x in vars(m).values() if isinstance(x, JITCallable)}
    ours = [x for x in functions.values() if x.__module__.startswith("nsa.")]
    assert len(ours) > 100

    def keys(order) -> dict[str, str]:
        for x in ours:
            monkeypatch.setattr(x, "hash", None)
            monkeypatch.setattr(x, "used_global_vals", {})
        for x in order:
            cache_key.settle(x)
            constants = {}  # of one name one value: Triton sorts them by name, then by address
            for (name, _), (value, _) in x.used_global_vals.items():
                assert constants.setdefault(name, value) == value, (x.__name__, name)
        return {f"{x.__module__}.{x.__name__}": x.cache_key for x in order}

    assert keys(ours) == keys(ours[::-1])
