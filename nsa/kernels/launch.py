"""How launchers launch: on the device of their tensors, without Triton's lookup from the second
time on, and with all kernels of a call compiled side by side before the first time."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor  # torch.library evaluates the annotations of what is wrapped here
from triton import knobs
from triton.runtime import JITFunction, build, driver

from nsa import launches
from nsa.kernels import cache_key

# Multiplications and additions in one: the default until 3.8, of which 3.9 warns that it changes.
# Kernels with assertions, which need `debug`, assert nothing but what they say.
OPTIONS = {"enable_fp_fusion": True, "sanitize_overflow": False}
LARGE = 1 << 31
NOT_COMPILED = "a kernel was not compiled yet"  # why a call is not recorded this time
MOST_MADE = 4096
Made = tuple[Any, Any, tuple]  # a kernel, what Triton compiled of it, the constexprs of that
_made: dict[tuple, Made] = {}
_of_all_lengths: dict[int, Any] = {}  # by the id of a kernel
LENGTHS = ("S", "SQ", "q_start")  # of a batch's sequences, by the names of parameters


_load, _loading = build._load_module_from_path, threading.Lock()


@functools.wraps(_load)
def _load_alone(name: str, path: str) -> Any:
    """Triton's loader of compiled launchers, safe under threads.

    Triton 3.6 names the extension module of every launcher alike. Python keeps one module of a name
    and writes what it loads again into that, so a thread could read another launcher's function.
    """
    with _loading:
        return SimpleNamespace(**vars(_load(name, path)))


build._load_module_from_path = _load_alone


class Launch(NamedTuple):
    """One launch that a planned call would make; memory[key] is where its compiled kernel goes."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    constants: dict[str, Any]
    memory: dict[Any, Made]
    key: Any


class Planned(NamedTuple):
    """What a call would launch, in order, and why faster kernels were passed over, by name."""

    launches: list[Launch]
    passed_over: dict[str, str]


class _State(threading.local):
    planned: Planned | None = None  # collects launches instead of making them
    recorder: Any = None  # is told of launches, see replay.py
    in_call: bool = False


class _Uncompiled(Exception):
    """A kernel of this call was not compiled yet."""


_state = _State()


@contextlib.contextmanager
def planning() -> Iterator[Planned]:
    """Collect the launches that this thread's launchers would make; no kernel runs.

    Outputs are what their memory held. Run a backward under
    torch.autograd.set_multithreading_enabled(False), so that it stays on this thread.
    """
    outer, _state.planned = _state.planned, Planned([], {})
    try:
        yield _state.planned
    finally:
        _state.planned = outer


@contextlib.contextmanager
def recorded(recorder: Any) -> Iterator[None]:
    """Tell a replay.Recorder of the launches that this thread's launchers make."""
    _state.recorder = recorder
    try:
        yield
    finally:
        _state.recorder = None


@contextlib.contextmanager
def lane() -> Iterator[None]:
    """Mark launches that neither need nor disturb those of the lane() blocks right before and
    behind this one: when the call is played again, such blocks run side by side."""
    recorder = _state.recorder
    if recorder is None:
        yield
        return
    recorder.fork()
    try:
        yield
    finally:
        recorder.join()


def busy() -> bool:
    """Return whether this thread is in a launcher, or plans or records one."""
    return _state.in_call or _state.planned is not None or _state.recorder is not None


def on_its_device(launcher: Callable, whole: Callable | None = None) -> Callable:
    """Return a launcher whose kernels run where its first argument is, as PyTorch's operators do.

    Triton launches on the current device, whichever device its pointers are of. A call that meets a
    kernel which is not compiled yet is planned, all its kernels are compiled side by side, and it
    is made again. whole: what is planned instead, such as the call with its backward.
    """

    @functools.wraps(launcher)
    def there(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not getattr(x, "is_cuda", False):
            return launcher(*args, **kwargs)
        if x.device.index != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                return there(*args, **kwargs)
        if _state.in_call or _state.planned is not None:
            return launcher(*args, **kwargs)
        _state.in_call = True
        try:
            return launcher(*args, **kwargs)
        except _Uncompiled:
            pass
        finally:
            _state.in_call = False
        with planning() as planned:
            (whole or launcher)(*args, **kwargs)
        compile_side_by_side(planned.launches)
        return launcher(*args, **kwargs)

    return there


def packed_ends(*cu_seqlens: Tensor | None) -> list[Tensor | None]:
    """cu_seqlens as kernels read them, which take no strides; None stays None."""
    return [None if x is None else x.contiguous() for x in cu_seqlens]


def pass_over(kernel: str, reason: str | None) -> bool:
    """Return whether there is a reason against a kernel, which a planned call keeps."""
    if reason is not None and _state.planned is not None:
        _state.planned.passed_over[kernel] = reason
    return reason is not None


def compile_side_by_side(wanted: Iterable[Launch]) -> None:
    """Compile and load what is not yet of these launches, in as many threads as there are cores.

    Most of a compilation runs outside Python's lock. Raises the first error, after all have ended.
    """
    missing: dict[tuple, Launch] = {}
    for one in wanted:
        if one.key is not None and one.key not in one.memory:
            missing.setdefault((id(one.memory), one.key), one)
    device = driver.active.get_current_device()

    def compile_one(one: Launch) -> None:
        driver.active.set_current_device(device)
        prepare_planned(one.kernel, one.grid, one.args, one.constants, one.memory, one.key)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(max(1, min(len(missing), cores or 1))) as pool:
        running = [pool.submit(compile_one, one) for one in missing.values()]
    for one in running:
        one.result()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """kernel[grid](*args, **constants) and its count, the second time without Triton's lookup.

    That lookup, and calling hooks where there are none, take 20 to 40 us of the host for every
    launch. args: all parameters but the constexprs, which follow them in the kernel's signature.
    Triton's settings (debug, instrumentation) count at the first launch alone, its launch hooks
    always.
    """
    if len(_made) >= MOST_MADE:
        _made.clear()
    alike = _lengths_alike(kernel, args, constants)
    if alike:
        kernel = _for_all_lengths(kernel, args)
    key, given = _key(kernel, args, constants, alike)
    found = _made.get(key)  # asked once: another thread may clear it any time
    if found is None or _state.planned is not None:
        return _launch(_made, key, kernel, grid, args, constants)
    _again(found, grid, given)  # `args` holds the tensors until they are launched with
    launches.bump(kernel.__name__)
    if _state.recorder is not None:
        _state.recorder.launched(*found, grid, args)


def launch_planned(
    kernel: Any, grid: tuple[int, int, int], args: tuple, constants: dict[str, Any],
    compiled: dict[int, Made],
) -> None:  # fmt: skip
    """launch() without looking at its arguments: `compiled`, from by_layout(), knows them.

    Of what is compiled already addresses will do for tensors, and are quicker: of a tensor Triton's
    launcher asks the driver whether the GPU can reach it, 1 us each.
    """
    found = compiled.get(id(kernel))
    if found is None or _state.planned is not None:
        return _launch(compiled, id(kernel), kernel, grid, args, constants)
    _again(found, grid, args)
    launches.bump(kernel.__name__)
    if _state.recorder is not None:
        _state.recorder.refuse(f"{kernel.__name__} is given addresses")


def prepare_planned(
    kernel: Any, grid: tuple, args: tuple, constants: dict[str, Any], compiled: dict[Any, Made],
    key: Any = None,
) -> None:  # fmt: skip
    """Compile and load a kernel, under `key` or as launch_planned() would, without launching it.

    Not for the interpreter.
    """
    key = id(kernel) if key is None else key
    if key not in compiled:
        cache_key.settle(kernel)
        made = kernel.warmup(*args, grid=grid, **OPTIONS, **constants)
        made._init_handles()
        compiled[key] = _kept(kernel, made, args, constants)


def is_planned(name: str) -> bool:
    """Return whether this thread plans, so that a launch which is not Triton's must not be made.

    Its name is then kept among the planned launches.
    """
    if _state.recorder is not None:
        _state.recorder.refuse(f"{name} is launched by another way")
    if _state.planned is None:
        return False
    kernel = SimpleNamespace(__name__=name)
    _state.planned.launches.append(Launch(kernel, (), (), {}, {}, None))
    return True


def _kept(kernel: Any, made: Any, args: tuple, constants: dict[str, Any]) -> Made:
    return kernel, made, tuple(constants[name] for name in kernel.arg_names[len(args) :])


def _launch(
    memory: dict[Any, Made], key: Any, kernel: Any, grid: tuple, args: tuple,
    constants: dict[str, Any],
) -> None:  # fmt: skip
    """By Triton, and what it compiled into memory[key]; a key of None is not kept."""
    if _state.planned is not None:
        _state.planned.launches.append(Launch(kernel, grid, args, constants, memory, key))
        return
    compiles = key is not None and hasattr(kernel, "warmup")
    if _state.recorder is not None:
        _state.recorder.refuse(NOT_COMPILED if compiles else f"{kernel.__name__} is not kept")
    if _state.in_call and compiles:
        raise _Uncompiled
    cache_key.settle(kernel)
    made = kernel[grid](*args, **OPTIONS, **constants)
    # Nothing comes back from the interpreter.
    if key is not None and hasattr(made, "packed_metadata"):
        memory[key] = _kept(kernel, made, args, constants)
    launches.bump(kernel.__name__)


def _again(found: Made, grid: tuple, args: tuple) -> None:
    _, made, values = found
    active = driver.active
    stream = active.get_current_stream(active.get_current_device())
    run(made, (*grid, 1, 1)[:3], stream, (*args, *values))


def run(made: Any, grid: tuple, stream: Any, args: Iterable[Any]) -> None:
    """Launch what Triton compiled, on all parameters of its kernel; where a hook waits, by Triton's
    own way, which calls it."""
    if hooked():
        made[grid](*args)
        return
    made.run(*grid, stream, made.function, made.packed_metadata, None, None, None, *args)


def _lengths_alike(kernel: Any, args: tuple, constants: dict[str, Any]) -> bool:
    """Return whether one kernel shall do for all lengths, in which packs and prompts differ from
    call to call. Sequences whose lengths are multiples of 16 have one of their own."""
    if "VARLEN" not in constants:
        return False
    lengths = zip(kernel.arg_names, args, strict=False)
    return constants["VARLEN"] or any([n in LENGTHS and x & 15 for n, x in lengths])


def _for_all_lengths(kernel: Any, args: tuple) -> Any:
    """The kernel, compiled once: Triton would do it anew, for some 20 s, where a number of rows or
    sequences is 1, and where one becomes a multiple of 16."""
    found = _of_all_lengths.get(id(kernel))
    if found is None:
        if not isinstance(kernel, JITFunction):  # the interpreter's
            return kernel
        numbers = [n for n, x in zip(kernel.arg_names, args, strict=False) if type(x) is int]
        made = type(kernel)(kernel.fn, do_not_specialize=numbers)
        found = _of_all_lengths.setdefault(id(kernel), made)
    return found


def _key(
    kernel: Any, args: tuple, constants: dict[str, Any], alike: bool
) -> tuple[tuple | None, list]:
    """What tells compiled kernels apart, as finely as Triton does, None for what it does not know;
    and the arguments with addresses for tensors.

    Of tensors dtype and alignment, and whether a GPU reaches them, which addresses do not tell; of
    ints whether they need more than 32 bits and, unless all lengths are alike, whether they are 1
    or a multiple of 16.
    """
    given: list[Any] = []
    if not hasattr(kernel, "device_caches"):  # the interpreter's
        return None, given
    key = [id(kernel), driver.active.get_current_device()]
    for x in args:
        kind = type(x)
        if kind is int:
            special = None if alike else x == 1 or x & 15 == 0 and 16
            key.append((special, -LARGE <= x < LARGE, x < LARGE << 32))
        elif kind is Tensor or isinstance(x, Tensor):
            at = x.data_ptr()
            key.append((x.dtype, at & 15 == 0, x.is_cuda))
            x = at
        elif kind is float or kind is bool or x is None:
            key.append(kind)
        elif hasattr(x, "kind"):  # of descriptor()
            key.append(x.kind)
        else:
            return None, given
        given.append(x)
    key.append(tuple(constants.items()))
    return tuple(key), given


def hooked() -> bool:
    """Does a profiler wait for Triton's launches?"""
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def by_layout(
    memory: dict[tuple, dict], numbers: tuple, tensors: tuple[Tensor, ...]
) -> tuple[dict[int, Made], list[int]]:
    """The part of `memory`, which is one device's, that launch_planned() may use for these
    arguments, and the tensors' addresses: of pointers Triton compiles for dtype and alignment, of
    ints for what they are. A tensor that a GPU does not reach is Triton's to refuse."""
    addresses = [x.data_ptr() for x in tensors]
    kinds = tuple(
        [(x.dtype, at % 16 == 0, x.is_cuda) for x, at in zip(tensors, addresses, strict=True)]
    )
    return memory.setdefault((numbers, kinds), {}), addresses
