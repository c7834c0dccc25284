"""Fixtures and hooks for every test: devices, fresh flags, poisoned memory, one record per test."""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from bench import spent
from bench.records import emit
from nsa import failed, log, settled
from nsa.flags import Flags, clear_flags_cache

# NSA_TEST_<group>=1 means that the group's tests must run here, so a skip is a failure.
_GROUP_OF_FILE = {
    "test_triton_sel_parity_gpu.py": "test_triton_sel",
    "test_triton_sel_backward_gpu.py": "test_triton_sel",
    "test_fa2_gpu_varlen.py": "test_fa2",
    "test_backward_varlen.py": "test_train",
    "test_gradcheck_varlen.py": "test_train",
    "test_train_smoke.py": "test_train",
}


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@pytest.fixture
def kernel_device() -> str:
    """Where Triton kernels run here: "cuda", or "cpu" under TRITON_INTERPRET=1; else skip."""
    if _interpreting():
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("no CUDA device and TRITON_INTERPRET is not 1")


@pytest.fixture
def device(kernel_device: str, request: pytest.FixtureRequest) -> str:
    """kernel_device, if the test's `shape` or `case` is of a size for it."""
    params = request.node.callspec.params
    size = params.get("shape") or params["case"]
    if kernel_device == "cpu" and size.big:
        pytest.skip("a GPU's size: the interpreter would take hours")
    if kernel_device == "cuda" and not size.big and hasattr(size, "interpreted"):
        pytest.skip("the interpreter's size: a GPU's tiles are longer than these sequences")
    return kernel_device


@pytest.fixture(params=["reference", "sdpa"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each of PyTorch's routes."""
    return request.param


@pytest.fixture
def cuda() -> torch.device:
    """The CUDA device; skip where there is none."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")


def _forget_records() -> None:
    if "nsa.kernels.replay" in sys.modules:
        sys.modules["nsa.kernels.replay"].forget()


def _forget_all() -> None:
    settled._calls.clear()
    for reset in (clear_flags_cache, log.reset, failed.reset, _forget_records):
        reset()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No test knows of another: flags are read anew, what failed or was settled is forgotten."""
    _forget_all()
    yield
    _forget_all()


@pytest.fixture(autouse=True, scope="session")
def interpreter() -> Iterator[None]:
    """Triton's interpreter in half of its time, and with e4m3 as a GPU has it."""
    with pytest.MonkeyPatch.context() as patch:
        if _interpreting():
            quicken_interpreter(patch)
        yield


def quicken_interpreter(patch: pytest.MonkeyPatch) -> None:
    """Replace slow parts of Triton's interpreter, but for those that this release does not have."""
    module = pytest.importorskip("triton.runtime.interpreter")
    for change, needs in (
        (_patch_the_language_once, "_LangPatchScope"),
        (_check_no_overflow, "interpreter_builder"),
        (_convert_e4m3_as_pytorch_does, "_convert_float"),
        (_make_types_once, "_get_np_dtype"),
        (_check_types_once, "interpreter_semantic"),
        (_call_builtins_themselves, "_patch_attr"),
    ):
        if hasattr(module, needs):
            change(module, patch)


def _patch_the_language_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """It puts itself into triton.language at every call of a device function, though the kernel
    that calls it has done so: a fifth of the time."""
    real, done = interpreter._patch_lang, set()
    languages = interpreter.tl, interpreter.tl.core

    @functools.cache
    def seen_by(fn):
        return tuple(any(x is y for x in fn.__globals__.values()) for y in languages)

    def patch_once(fn):
        # Modules of device functions see one of the two or both; what is not restored stays.
        if (seen := seen_by(fn)) in done:
            return None
        scope, first = real(fn), not done
        done.add(seen)
        if first:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return scope

    patch.setattr(interpreter, "_patch_lang", patch_once)


def _check_no_overflow(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """It works out for every sum and product of integers whether it overflows, and asserts it in
    debug mode alone, which is off: a quarter of the time."""
    builder = interpreter.interpreter_builder
    options = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not options.debug:
        patch.setattr(builder, "options", dataclasses.replace(options, sanitize_overflow=False))


def _convert_e4m3_as_pytorch_does(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """Its own conversion loses what rounding carries into the exponent, and NaN both ways."""
    convert, e4m3 = interpreter._convert_float, interpreter.tl.float8e4nv

    def converted(x, from_type, to_type, rounding):
        if e4m3 not in (from_type, to_type):
            return convert(x, from_type, to_type, rounding)
        dtypes = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}
        one, other = (dtypes.get(t.name, torch.float32) for t in (from_type, to_type))
        made = torch.from_numpy(x.copy()).view(one).to(other)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[other.itemsize]
        return made.view(bits).numpy().reshape(x.shape)

    patch.setattr(interpreter, "_convert_float", converted)


def _make_types_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """It makes the type, the shape and NumPy's dtype of every value anew: a quarter of the time.
    They are kept by what they are made from."""
    core, dtype_of = interpreter.tl.core, interpreter._get_np_dtype
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    blocks, tensors, dtypes = {}, {}, {}

    def block(self, element_ty, shape):
        key = (element_ty.name, *shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def tensor(self, handle, type):
        key = type.name
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = {**vars(self), "handle": None}
        vars(self).update(tensors[key], handle=handle, type=type)

    def np_dtype(type):
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(type)
        return dtypes[name]

    patch.setattr(core.block_type, "__init__", block)
    patch.setattr(core.tensor, "__init__", tensor)
    patch.setattr(interpreter, "_get_np_dtype", np_dtype)


def _check_types_once(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """It works out anew for every two operands what type and shape they come to, and makes tensors
    of numbers: a third of the time."""
    semantic, core = type(interpreter.interpreter_semantic), interpreter.tl.core
    tensor, handle, spread = core.tensor, interpreter.TensorHandle, interpreter.np.broadcast_to
    floats = "fp16", "bf16", "fp32", "fp64"
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    cast = semantic.cast
    numbers: dict[tuple, Any] = {}
    shapes: dict[tuple, Any] = {}

    def as_number(self, kind, x):
        """x as a tensor of this kind, or None where their types come to another one."""
        key = kind.name, type(x), x, type(x) is float and math.copysign(1.0, x)
        if key not in numbers:
            scalar, made = kind.scalar, None
            fits = scalar.is_int() and not scalar.is_bool() and type(x) is int
            fits = fits and scalar.get_int_min_value() <= x <= scalar.get_int_max_value()
            if fits or scalar.name in floats:
                made = self.scalar_constant(x, dtype=scalar)
                if kind.is_block():
                    made = broadcast(self, SimpleNamespace(type=kind), made)[1]
            numbers[key] = made
        return numbers[key]

    def checked(self, x, y, x_ptr=False, y_ptr=False, arithmetic=True, divides=False):
        if not divides:
            if type(x) is type(y) is tensor:
                one, other = x.type.scalar, y.type.scalar
                if one.is_ptr() and x_ptr and other.is_int() or one.name == other.name:
                    if not other.is_ptr():
                        return shaped(self, x, y)
            elif arithmetic and type(x) is tensor and type(y) in (int, float):
                if (number := as_number(self, x.type, y)) is not None:
                    return x, number
            elif arithmetic and type(y) is tensor and type(x) in (int, float):
                if (number := as_number(self, y.type, x)) is not None:
                    return number, y
        return check(self, x, y, x_ptr, y_ptr, arithmetic, divides)

    def shaped(self, x, y):
        key = x.type.name, y.type.name
        if key not in shapes:
            made = broadcast(self, x, y)
            shapes[key] = [
                (z.type, [*z.type.shape]) if z.type.name != name else None
                for z, name in zip(made, key, strict=True)
            ]
            return made
        to_x, to_y = shapes[key]
        return like(x, *to_x) if to_x else x, like(y, *to_y) if to_y else y

    def like(x, kind, shape):
        return tensor(handle(spread(x.handle.data, shape), x.handle.dtype), kind)

    def cast_if_needed(self, x, kind, rounding=None):
        if rounding is None and x.type.scalar.name == kind.scalar.name:
            return x
        return cast(self, x, kind, rounding)

    patch.setattr(semantic, "cast", cast_if_needed)
    patch.setattr(semantic, "binary_op_type_checking_impl", checked)
    patch.setattr(semantic, "broadcast_impl_value", shaped)


def _call_builtins_themselves(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    """It calls them through two or three functions that check and sort out their arguments."""
    its_own = interpreter.interpreter_semantic

    def patch_attr(obj, name, member, builder, scope):
        inner = inspect.unwrap(member)

        def builtin(*args, **kwargs):
            kwargs["_semantic"] = its_own
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, builtin)

    patch.setattr(interpreter, "_patch_attr", patch_attr)


# `with torch.device(...)` notes at its first use which functions it serves: not the poisoned.
with torch.device("meta"):
    torch.empty(0)


def _poisoned(make):
    def poisoned(*args, **kwargs):
        tensor = make(*args, **kwargs)
        if tensor.device.type != "meta" and tensor.layout is torch.strided:
            # What watches a call, such as replay.Recorder, shall not take it for the call's own.
            with torch.no_grad(), _disable_current_modes():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
                elif tensor.dtype in (torch.int32, torch.int64):
                    # A block below 0 is none, which would hide that nobody wrote it. On a GPU the
                    # kernels were run with ints below 0 alone.
                    tensor.fill_(-(2**30) if tensor.is_cuda else 2**30)
                elif tensor.dtype is torch.uint8:  # a workspace: NaN, or -1
                    tensor.fill_(255)
        return tensor

    return poisoned


class _Forgetting(pytest.MonkeyPatch):
    """What it changes may be what a recorded call was decided by."""

    def setattr(self, *args, **kwargs) -> None:
        super().setattr(*args, **kwargs)
        _forget_records()

    def setitem(self, *args, **kwargs) -> None:
        super().setitem(*args, **kwargs)
        _forget_records()


@pytest.fixture
def monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    """pytest's own, after whose changes kernels are chosen anew."""
    patch = _Forgetting()
    yield patch
    patch.undo()
    _forget_records()


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN (integers: far off), so a value nobody wrote shows."""
    made = "empty", "empty_like", "empty_strided"
    for owner, name in (*((torch, name) for name in made), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Whoever asks where kernels run is a test of kernels."""
    if "kernel_device" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.kernel)


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "run the tests whose numbers (4 bytes each) this process reads here, as others do"
    parser.addoption("--tickets", type=int, metavar="FD", help=about)


def _of_one_process(item: pytest.Item) -> str:
    """What tests are taken together by: one alone, or those of what a file makes once for them."""
    found = getattr(item, "_fixtureinfo", None)
    made = found.name2fixturedefs.items() if found else ()
    shared = [name for name, defs in made if defs and defs[-1].scope in ("module", "class")]
    return " ".join([item.nodeid.split("::")[0], *shared]) if shared else item.nodeid


def _in_turn(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """The tests as processes take them: some together, long ones first, so that nobody waits for
    them at the end. Then the first cases of all tests come before the second ones: these find
    kernels compiled that they share."""
    together: dict[str, list[pytest.Item]] = {}
    turns: dict[str, tuple[bool, int]] = {}
    seen: Counter[str] = Counter()
    for item in items:
        key = _of_one_process(item)
        name = key.split("[")[0]
        if key not in together:
            turns[key] = item.get_closest_marker("long") is None, seen[name]
            seen[name] += 1
        together.setdefault(key, []).append(item)
    return [together[key] for key in sorted(together, key=turns.__getitem__)]


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """--tickets: run what this process draws. Whoever draws the first test announces all."""
    tickets = session.config.getoption("--tickets")
    if tickets is None or session.config.option.collectonly:
        return None
    if session.testsfailed and not session.config.option.continue_on_collection_errors:
        raise session.Interrupted(f"{session.testsfailed} errors while tests were collected")
    parts = _in_turn(session.items)
    draw = lambda: int.from_bytes(os.read(tickets, 4) or b"\xff" * 4, "little")
    number = draw()
    emit("session", {"tests": 0 if number else len(session.items), "ended": False})
    spent.begin()
    if torch.cuda.is_available():
        with spent.on("context"):
            torch.cuda.synchronize()
    gc.freeze()  # what is there by now: the compiler sets off one search for garbage after another
    with spent.on("tests"):
        while number < len(parts):
            part = parts[number]
            for item, following in zip(part, [*part[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            number = draw()
    spent.tell()
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    asked = os.environ.get("TEST_ALL") or torch.cuda.is_available()
    if item.get_closest_marker("nightly") and not asked:
        pytest.skip("for make test-all, which takes longer")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    group = _GROUP_OF_FILE.get(item.path.name)
    if group and report.skipped and not hasattr(report, "wasxfail"):
        if getattr(Flags.from_env(), group):
            told = "NSA_TEST_* says this must run, but it was skipped"
            report.outcome, report.longrepr = "failed", f"{told}: {_reason(report)}"
    return report


def _session(session: pytest.Session, ended: bool) -> None:
    """Tell the report what will be run, and that it was: what ends in between is not whole."""
    if not os.environ.get("PYTEST_XDIST_WORKER"):
        emit("session", {"tests": len(getattr(session, "items", ())), "ended": ended})


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()  # what is there by now stays; searches for garbage would walk through it
    if session.config.getoption("--tickets") is None:
        _session(session, False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    _session(session, True)


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr or "")[-2000:]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One "test" record per test, from the process that reports (never from an xdist worker)."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return
    if report.when == "call" or report.outcome != "passed":
        if report.when == "teardown" and report.outcome == "skipped":
            return
        outcome, reason = report.outcome, _reason(report)
        if outcome == "failed" and report.when != "call":
            outcome = "error"
        if hasattr(report, "wasxfail"):  # whoever expects a failure has proven nothing
            outcome, reason = "failed", f"marked as expected to fail: {report.wasxfail}"
        emit("test", {
            "nodeid": report.nodeid, "outcome": outcome, "duration_s": round(report.duration, 4),
            "reason": "" if outcome == "passed" else reason,
        })  # fmt: skip
