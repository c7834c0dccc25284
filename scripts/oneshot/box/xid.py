"""What NVML tells of a GPU during the run: telemetry.csv, and Xid errors, which are the driver's.

Telemetry comes twice a second and not faster: each query takes the driver's lock, which a kernel of
a few microseconds would feel. Benches read the clocks around each case themselves.
An Xid that our own kernel causes (a bad address, a killed process) belongs to its stage and is only
noted. Any other speaks against the card: a result made beside it cannot stand.
"""

from __future__ import annotations

import csv
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PERIOD_S = 0.5
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
    62: ("internal micro-controller halt", _RESET), 63: ("memory row remapping", _MEMORY),
    64: ("memory row remapping failed", _MEMORY),
    74: ("NVLink error", "check the links (nvidia-smi nvlink --errorcounters) or change the box"),
    79: ("the GPU has fallen off the bus", "it is lost; change the box"),
    92: ("many single-bit ECC errors", _MEMORY), 94: ("contained ECC error", _MEMORY),
    95: ("uncontained ECC error", _MEMORY),
    119: ("the GPU's system processor does not answer", _RESET),
    120: ("error of the GPU's system processor", _RESET),
}  # fmt: skip
LOST = 79
DOUBLE_BIT = 48


class Background(threading.Thread):
    """A daemon thread that asks NVML of one GPU; where that fails, `problem` says why."""

    def __init__(self, uuid: str | None) -> None:
        super().__init__(daemon=True)
        self._uuid, self._halt = uuid, threading.Event()
        self.problem: str | None = None

    def ask(self, nv: Any, handle: Any) -> None:
        raise NotImplementedError

    def run(self) -> None:
        try:
            import pynvml as nv

            nv.nvmlInit()
            by_uuid, first = nv.nvmlDeviceGetHandleByUUID, nv.nvmlDeviceGetHandleByIndex
            self.ask(nv, by_uuid(self._uuid) if self._uuid else first(0))
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"

    def stop(self) -> None:
        self._halt.set()
        if self.is_alive():
            self.join(1.0)


class Telemetry(Background):
    """Writes the samples, and keeps the last one and the first memory in use."""

    def __init__(self, path: Path, uuid: str | None, started: float) -> None:
        super().__init__(uuid)
        self._path, self._t0 = path, started
        self.last: dict[str, Any] = {}
        self.first_mib: float | None = None  # NVML counts the driver's own memory, nvidia-smi not

    def ask(self, nv: Any, handle: Any) -> None:
        readings = {
            "sm_mhz": lambda: nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_SM),
            "mem_mhz": lambda: nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_MEM),
            "power_w": lambda: round(nv.nvmlDeviceGetPowerUsage(handle) / 1000, 1),
            "temp_c": lambda: nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU),
            "util_pct": lambda: nv.nvmlDeviceGetUtilizationRates(handle).gpu,
            "mem_used_mib": lambda: nv.nvmlDeviceGetMemoryInfo(handle).used // 2**20,
            "reasons_hex": lambda: hex(nv.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        }
        with open(self._path, "w", encoding="ascii") as file:
            out = csv.DictWriter(file, ["t", *readings], restval="", lineterminator="\n")
            out.writeheader()
            while not self._halt.wait(PERIOD_S):
                row: dict[str, Any] = {}
                for name, read in readings.items():
                    with suppress(nv.NVMLError):
                        row[name] = read()
                self.last = row
                if self.first_mib is None:
                    self.first_mib = row.get("mem_used_mib")
                out.writerow({"t": f"{time.monotonic() - self._t0:.2f}", **row})
                file.flush()

    def wait_for_memory(self, limit_s: float) -> bool:
        """Wait until the GPU's memory is back near its start; False when it did not get there."""
        deadline = time.monotonic() + limit_s
        while self.first_mib is not None and self.is_alive():
            used = self.last.get("mem_used_mib")
            if used is None or used <= self.first_mib + 512:
                break
            if time.monotonic() >= deadline:
                return False
            time.sleep(PERIOD_S)
        return True


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
        return [self._seen.popleft() for _ in range(len(self._seen))]
