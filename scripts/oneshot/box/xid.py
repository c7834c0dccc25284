"""Xid errors: what the driver reports about the GPU itself, by NVML events.

An Xid that our own kernel causes (a bad address, a killed process) belongs to its stage and is only
noted. Any other speaks against the card: a result made beside it cannot stand.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from scripts.oneshot.box.telemetry import Background

WAIT_MS = 250

_KERNEL = "an error of the program that ran, not of the card; see the stage that was running"
_MEMORY = "a fault of the card's memory; change the box"
_RESET = "reset the GPU (nvidia-smi --gpu-reset) or restart the box, then run again"
# The driver's numbers, with what to do.
APPLICATION = {
    13: "graphics engine exception", 31: "memory page fault", 43: "stopped processing",
    45: "cleanup after a process ended", 68: "video decoder exception",
    109: "context switch timeout",
}  # fmt: skip
CARD = {
    48: ("double-bit ECC error", _MEMORY),
    61: ("internal micro-controller breakpoint", _RESET),
    62: ("internal micro-controller halt", _RESET),
    63: ("memory row remapping", _MEMORY),
    64: ("memory row remapping failed", _MEMORY),
    74: ("NVLink error", "check the links (nvidia-smi nvlink --errorcounters) or change the box"),
    79: ("the GPU has fallen off the bus", "it is lost; change the box"),
    92: ("many single-bit ECC errors", _MEMORY),
    94: ("contained ECC error", _MEMORY),
    95: ("uncontained ECC error", _MEMORY),
    119: ("the GPU's system processor does not answer", _RESET),
    120: ("error of the GPU's system processor", _RESET),
}
LOST = 79
DOUBLE_BIT = 48


@dataclass(frozen=True)
class Xid:
    number: int

    @property
    def critical(self) -> bool:
        """True for what speaks against the card, unknown numbers included."""
        return self.number not in APPLICATION

    @property
    def text(self) -> str:
        if not self.critical:
            return f"Xid {self.number} ({APPLICATION[self.number]}): {_KERNEL}"
        what, action = CARD.get(self.number, ("not in our list", "look it up in NVIDIA's Xid list"))
        return f"Xid {self.number} ({what}): {action}"


class XidListener(Background):
    """Waits for events in the background; `take()` hands them to the supervisor's own thread.

    Where NVML or its events are missing (a container, MIG, no library) `problem` says so and
    nothing is ever reported.
    """

    def __init__(self, uuid: str | None) -> None:
        super().__init__(uuid)
        self._seen: deque[Xid] = deque()

    def ask(self, nv: Any, handle: Any) -> None:
        double_bit = nv.nvmlEventTypeDoubleBitEccError
        wanted = nv.nvmlEventTypeXidCriticalError | double_bit
        wanted &= nv.nvmlDeviceGetSupportedEventTypes(handle)
        if not wanted:
            self.problem = "this GPU reports no Xid events"
            return
        events = nv.nvmlEventSetCreate()
        try:
            nv.nvmlDeviceRegisterEvents(handle, wanted, events)
            while not self._halt.is_set():
                try:
                    data = nv.nvmlEventSetWait_v2(events, WAIT_MS)
                except nv.NVMLError_Timeout:
                    continue
                except nv.NVMLError_GpuIsLost:
                    self._seen.append(Xid(LOST))
                    return
                ecc = data.eventType == double_bit
                self._seen.append(Xid(DOUBLE_BIT if ecc else int(data.eventData)))
        finally:
            with suppress(Exception):
                nv.nvmlEventSetFree(events)

    def take(self) -> list[Xid]:
        """Return what was reported since the last call."""
        return [self._seen.popleft() for _ in range(len(self._seen))]
