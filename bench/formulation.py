"""How a baseline computes attention, by the operators of PyTorch that it ran, and whether its time
is that of attention.

A baseline that is slower than its name says makes every kernel look fast: the math backend under
the name of flash, keys copied to every head, work done twice, a wait. So a call is watched once:
which attention operators ran and how often, and what the same operators take when they are run by
themselves.
"""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.cases import Contender
from bench.clock import Clock
from bench.recorded import Record

_FUSED = re.compile(r"(flash|efficient|cudnn)_attention")
_COPIES = ("clone", "copy_", "contiguous", "repeat", "cat", "index_select")
FAR = 4.0  # times what another size of it takes for its work
LEAST_SHARE = 0.15  # of its ceiling, which every fused attention reaches in longer calls
LONG_US = 150.0
# Over what the same baseline took in the same case on such a card. Committed times of several days
# and boxes differ by 3 % at most; a capped card or another cuDNN may take twice as long.
FAR_OVER_RECORD = 2.5
RECORD_SLACK_US = 30.0  # of what a slow host leaves between short kernels
OWN_FACTOR = 3.0  # what a baseline may take over its operators alone: Python, and cold caches
OWN_SLACK_US = {True: 20.0, False: 150.0}  # by whether the clock leaves the host out
REPLAYED = 64  # operators; a call of more is another kind of program


@dataclass
class Ran:
    """attention: which backend's operator ran how often ("math": a softmax by itself). expanded:
    heads were copied out of fewer. calls: every operator with what it got."""

    attention: Counter[str] = field(default_factory=Counter)
    expanded: bool = False
    calls: list[tuple[Any, tuple, dict]] = field(default_factory=list)

    def words(self) -> str | None:
        """For a row: "flash x1, heads expanded"; None where no attention operator ran."""
        if not self.attention:
            return None
        text = ", ".join(f"{name} x{n}" for name, n in sorted(self.attention.items()))
        return text + (", heads expanded" if self.expanded else "")

    def replay(self) -> None:
        """The same operators on the same tensors, with nothing in between."""
        for func, args, kwargs in self.calls:
            func(*args, **kwargs)


class _Watch(TorchDispatchMode):
    def __init__(self, ran: Ran) -> None:
        super().__init__()
        self.ran = ran

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        fused = _FUSED.search(name)
        if fused:
            self.ran.attention[fused[1]] += 1
        elif "softmax" in name:
            self.ran.attention["math"] += 1
        elif name in _COPIES and any(_expanded(x) for x in args):
            self.ran.expanded = True
        self.ran.calls.append((func, args, kwargs))
        return func(*args, **kwargs)


def _expanded(x: Any) -> bool:
    """Whether x shows one piece of memory several times, as heads of a group show their keys."""
    return isinstance(x, Tensor) and any(
        step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)
    )


def watch(call: Callable[[], Any]) -> Ran:
    """What one call runs."""
    ran = Ran()
    with _Watch(ran):
        call()
    return ran


def why_another(attends: str | None, name: str, ran: Ran) -> str | None:
    """Why what ran is not the formulation that a baseline's name promises."""
    if attends is None:
        return None
    if ran.attention != Counter({attends: 1}):
        return f"it is named {attends} and ran {ran.words() or 'no attention'}"
    if ran.expanded and "expanded" not in name:
        return "it copied the keys to every head, which its name does not say"
    return None


def why_not_attention(
    contender: Contender, ran: Ran, us: float, clock: Clock, cold: bool
) -> str | None:
    """Why the baseline's time is not that of the operators which it ran."""
    if contender.attends is None or len(ran.calls) > REPLAYED:
        return None
    with torch.no_grad():
        alone = statistics.median(clock.run([ran.replay] * 7, cold=cold)[2:])
    if us > OWN_FACTOR * alone + OWN_SLACK_US[clock.device_time]:
        return f"its operators take {alone:.1f} us by themselves, it takes {us:.1f}"
    return None


@dataclass(frozen=True)
class Reached:
    """What a formulation took for how much work: ideal_us at the ceiling, and its time."""

    ideal_us: float
    us: float

    @property
    def share(self) -> float:
        return self.ideal_us / self.us


def why_slow(
    contender: Contender, now: Reached, before: Sequence[Reached], device_time: bool
) -> str | None:
    """Why a baseline's time is far over what it can do: its floor, on a device of its own, and its
    other sizes."""
    fused = device_time and contender.attends in ("flash", "cudnn")
    if fused and now.us > LONG_US and now.share < LEAST_SHARE:
        return f"it reached {now.share:.1%} of its ceiling, where {LEAST_SHARE:.0%} is the least"
    for other in before:
        fair = other.us * max(1.0, now.ideal_us / other.ideal_us)
        if now.us > FAR * fair:
            return (
                f"it reached {now.share:.1%} of its ceiling in {now.us:.0f} us, and "
                f"{other.share:.1%} in {other.us:.0f} us at another size"
            )
    return None


def why_slower_than_recorded(us: float, record: Record | None) -> str | None:
    """Why a baseline's time is several times what the committed rows of such a card say."""
    if record is None or us <= FAR_OVER_RECORD * record.us + RECORD_SLACK_US:
        return None
    return f"it takes {us:.0f} us here, and on such a card it took {record.us:.0f} ({record.file})"
