"""What one call allocates, sets to zero and launches, seen from outside while it does so."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SMALL = 1 << 20  # bytes which are set to zero with others where a part of them is

_aten = torch.ops.aten
_EMPTY = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty,
          _aten.new_empty_strided}  # fmt: skip
_ZEROS = {_aten.zeros, _aten.zeros_like, _aten.new_zeros}


class At:
    """What a descriptor needs of its tensor: an address."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class Place(NamedTuple):
    """An address: `offset` bytes into the memory of this number."""

    memory: int
    offset: int


class Memory:
    """What a call allocates: bytes, and the first and last step that uses them."""

    def __init__(self, size: int) -> None:
        self.size, self.first, self.last = size, -1, -1
        self.zeroed = False  # as a whole, before anything else happens to it
        self.offset = 0  # in the workspace

    def use(self, step: int) -> None:
        self.first, self.last = step if self.first < 0 else self.first, step


Lane = tuple[int, int]  # the numbers of the fork and of the lane in it


class Step(NamedTuple):
    """One launch: what Triton compiled, and its arguments, of which those at `places` are addresses
    and those at `descriptors` describe tiles of the memory at one."""

    made: Any
    name: str
    grid: tuple[int, int, int]
    args: list[Any]
    places: list[tuple[int, Place]]
    descriptors: list[tuple[int, Place]]
    lane: Lane | None

    def prepared(self, bases: list[int]) -> list[Any]:
        """The arguments for memories that begin at `bases`."""
        args = self.args.copy()
        for at, (memory, offset) in self.places:
            args[at] = bases[memory] + offset
        for at, (memory, offset) in self.descriptors:
            args[at] = _based(args[at], At(bases[memory] + offset))
        return args


class Zeroing(NamedTuple):
    """Bytes of a memory that are set to zero between launches."""

    place: Place
    size: int
    lane: Lane | None = None


class Output(NamedTuple):
    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements


class Refused(Exception):
    """A call does what no record holds."""


class Recorder(TorchDispatchMode):
    """Watches one call on these tensors."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.device = inputs[0].device
        self.ends = [(x.data_ptr(), x.data_ptr() + _extent(x)) for x in inputs]
        distinct = sorted(set(self.ends))
        overlap = any(a[1] > b[0] for a, b in zip(distinct, distinct[1:], strict=False))
        self.refused: str | None = "inputs overlap" if overlap else None
        self.memories: list[Memory | None] = [None] * len(inputs)
        self.at: dict[int, int] = {}  # where a storage begins -> its memory, the latest there
        self.steps: list[Step | Zeroing] = []
        self.lane: Lane | None = None

    def fork(self) -> None:
        """Begin a lane: launches up to join() may run beside those of the lanes right before it."""
        beside = self.steps[-1].lane if self.steps else None
        self.lane = (len(self.steps), 0) if beside is None else (beside[0], beside[1] + 1)

    def join(self) -> None:
        self.lane = None

    def _saw(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        packet = func.overloadpacket
        if packet is _aten.zero_:
            self._zeroed(args[0])
        elif func._schema.is_mutable:
            raise Refused(str(func))
        elif packet in _EMPTY or packet in _ZEROS:
            if result.device != self.device:
                raise Refused(f"memory on {result.device}")
            storage = result.untyped_storage()
            self.at[storage.data_ptr()] = len(self.memories)
            self.memories.append(Memory(storage.nbytes()))
            if packet in _ZEROS:
                self._zeroed(result)
        else:
            # Views are in an argument's memory. Where a result begins does not say so: memory that
            # was freed meanwhile is given out again.
            given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            storages = {x.untyped_storage()._cdata for x in given}
            for x in result if isinstance(result, (tuple, list)) else (result,):
                if not isinstance(x, Tensor) or x.untyped_storage()._cdata not in storages:
                    raise Refused(str(func))
                self._place(x, str(func))

    def refuse(self, why: str) -> None:
        self.refused = self.refused or why

    def launched(self, kernel: Any, made: Any, values: tuple, grid: tuple, args: tuple) -> None:
        """launch() tells of each launch here."""
        if self.refused is not None:
            return
        places, descriptors, plain = [], [], []
        try:
            for at, x in enumerate(args):
                if isinstance(x, Tensor):
                    if x.numel():
                        places.append((at, self._used(x)))
                    x = 0
                elif hasattr(x, "kind"):
                    descriptors.append((at, self._used(x.base)))
                    x = _based(x, None)
                plain.append(x)
        except Refused as why:
            self.refused = str(why)
            return
        grid = (*grid, 1, 1)[:3]
        name = kernel.__name__
        args = [*plain, *values]
        self.steps.append(Step(made, name, grid, args, places, descriptors, self.lane))

    def _place(self, x: Tensor, what: str = "a launch") -> Place:
        at = x.data_ptr()
        if not x.numel():
            return Place(0, 0)
        for number, (begin, end) in enumerate(self.ends):
            if begin <= at < end:
                return Place(number, at - begin)
        begin = x.untyped_storage().data_ptr()
        if begin not in self.at:
            raise Refused(f"{what} takes memory of another call")
        return Place(self.at[begin], at - begin)

    def _used(self, x: Tensor) -> Place:
        place = self._place(x)
        memory = self.memories[place.memory]
        if memory is not None:
            memory.use(len(self.steps))
        return place

    def _zeroed(self, x: Tensor) -> None:
        if not x.numel():
            return
        place, size = self._place(x), x.numel() * x.element_size()
        memory = self.memories[place.memory]
        if memory is None or not x.is_contiguous():
            raise Refused("zeros in an input, or here and there")
        if memory.first < 0 and (size == memory.size or memory.size <= SMALL):
            memory.zeroed = True  # what else is in it may hold anything
        else:
            self._used(x)
            self.steps.append(Zeroing(place, size, self.lane))

    def outputs(self, result: Any) -> list[Output]:
        """Where the call's result lies. Raises Refused for a call that no record holds."""
        if self.refused is not None:
            raise Refused(self.refused)
        found = []
        for x in result if isinstance(result, tuple) else (result,):
            if not isinstance(x, Tensor):
                raise Refused(f"a {type(x).__name__} among the results")
            memory, offset = -1, 0
            if x.numel():
                memory, offset = self._place(x)
                of = self.memories[memory]
                if of is None or of.size % x.element_size():
                    raise Refused("a result in an input's memory, or in odd bytes")
            offset //= x.element_size()
            found.append(Output(memory, x.dtype, tuple(x.shape), x.stride(), offset))
        return found


def _watch(
    self: Recorder, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
) -> Any:
    result = func(*args, **(kwargs or {}))
    if self.refused is None:
        try:
            self._saw(func, args, kwargs or {}, result)
        except Refused as why:
            self.refused = str(why)
    return result


# Of one that stands in the class PyTorch imports its compiler when it is first called: seconds.
Recorder.__torch_dispatch__ = _watch  # type: ignore[method-assign, assignment]


def _based(descriptor: Any, base: Any) -> Any:
    """The descriptor with another base, without what Triton checks of a new one."""
    made = object.__new__(type(descriptor))
    made.__dict__.update(descriptor.__dict__)
    made.base = base
    return made


def _extent(x: Tensor) -> int:
    """Bytes from x's first element to behind its last."""
    if not x.numel():
        return 0
    last = sum([(n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)])
    return (last + 1) * x.element_size()
