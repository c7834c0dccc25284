"""What records of real calls hold, against what the calls launched. For a process of its own:

    python -m nsa.tests.recorded_calls 90

The calls are those of scripts/lock.py, on CPU tensors that are taken for a GPU's; nothing is
compiled. Prints a line for each call and operator: recorded, or why not. Raises AssertionError
where a record does not name the memory that the call used, or lays two memories of one time over
each other.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from scripts import compile_as_launched as launched


class Made:
    """What Triton would compile; launched, it does nothing."""

    function = packed_metadata = None

    def run(self, *args: Any) -> None: ...


class Seen:
    """Launches of one operator's call, and the memory that they used, which stays alive."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, list[Any]]] = []
        self.storages: dict[int, Any] = {}

    def argument(self, x: Any) -> Any:
        """(memory, offset) of a tensor, or of a descriptor's."""
        x = getattr(x, "base", x) if hasattr(x, "kind") else x
        if not isinstance(x, Tensor):
            return x
        if not x.numel():
            return 0
        storage = x.untyped_storage()
        self.storages[storage._cdata] = storage
        return (storage._cdata, x.data_ptr() - storage.data_ptr())


def in_order(launches: list[tuple[str, list[Any]]]) -> list[tuple[str, list[Any]]]:
    """With memories numbered as they come up."""
    numbers: dict[Any, int] = {}
    number = lambda x: (numbers.setdefault(x[0], len(numbers)), x[1]) if type(x) is tuple else x
    return [(name, [number(x) for x in args]) for name, args in launches]


def of_record(record: Any) -> list[tuple[str, list[Any]]]:
    """The launches of a record, with (memory, offset) for what has an address."""
    found = []
    for step in [x for x in record.steps if hasattr(x, "made")]:
        args = list(step.args)
        for at, place in [*step.places, *step.descriptors]:
            args[at] = (place.memory, place.offset)
        found.append((step.name, args))
    return found


def check_apart(seen: Any) -> None:
    """No two memories that live at one time overlap in the workspace."""
    inner = [m for m in seen.memories if m is not None and m.last >= 0]
    for i, a in enumerate(inner):
        for b in inner[:i]:
            at_once = a.first <= b.last and b.first <= a.last
            beside = a.offset + a.size <= b.offset or b.offset + b.size <= a.offset
            assert not at_once or beside, (vars(a), vars(b))


def main(arch: int) -> None:
    launched.pretend(arch, {})
    from nsa.kernels import launch, replay

    JITFunction.__getitem__ = lambda self, grid: lambda *args, **constants: Made()
    replay.on_this_gpu = lambda x: isinstance(x, Tensor)
    now: list[Seen] = []
    key, recorder, outputs = launch._key, replay.Recorder, replay.Recorder.outputs
    said: list[str] = []

    def watched(kernel: Any, args: tuple, constants: dict, alike: bool) -> Any:
        if now:
            now[-1].launches.append((kernel.__name__, [now[-1].argument(x) for x in args]))
        return key(kernel, args, constants, alike)

    class Watched(recorder):  # type: ignore[misc, valid-type]
        def __enter__(self) -> Any:
            now.append(Seen())
            return super().__enter__()

        def outputs(self, result: Any) -> Any:
            mine = now.pop()
            try:
                found = outputs(self, result)
                record = replay.Record(self, found, isinstance(result, tuple))
            except replay.Refused as why:
                said.append(f"not recorded: {why}")
                raise
            said.append("recorded")
            got = [(name, args[: len(want)]) for (name, args), (_, want) in zip(
                of_record(record), mine.launches, strict=True)]  # fmt: skip
            assert in_order(got) == in_order(mine.launches)
            kept = {x.memory for x in found}
            for number, memory in enumerate(self.memories):
                if number in kept and memory is not None:
                    memory.last = -1  # outputs are no part of the workspace
            check_apart(self)
            return found

    launch._key, replay.Recorder = watched, Watched
    Watched.__torch_dispatch__ = recorder.__torch_dispatch__
    for call, shape in launched.some_calls():
        if call is launched.decode:
            continue
        said.clear()
        try:
            for _ in range(2):
                call(*shape)
        except NotImplementedError:
            continue
        print(f"sm_{arch} {call.__name__}{shape}: {'; '.join(said)}", flush=True)


if __name__ == "__main__":
    torch.autograd.set_multithreading_enabled(False)
    main(int(sys.argv[1]))
