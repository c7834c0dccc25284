"""telemetry.csv: what the GPU did during the run, twice a second, where NVML is there.

Twice a second and not faster: each query takes the driver's lock, which a kernel of a few
microseconds would feel. Benches read the clocks around each case themselves.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

PERIOD_S = 0.5


class Background(threading.Thread):
    """A daemon thread that asks NVML of one GPU until it is stopped. Where that fails it ends
    quietly, for nothing may be decided from it, and `problem` says why."""

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
        readings = (
            ("sm_mhz", lambda: nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_SM)),
            ("mem_mhz", lambda: nv.nvmlDeviceGetClockInfo(handle, nv.NVML_CLOCK_MEM)),
            ("power_w", lambda: round(nv.nvmlDeviceGetPowerUsage(handle) / 1000, 1)),
            ("temp_c", lambda: nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU)),
            ("util_pct", lambda: nv.nvmlDeviceGetUtilizationRates(handle).gpu),
            ("mem_used_mib", lambda: nv.nvmlDeviceGetMemoryInfo(handle).used // 2**20),
            ("reasons_hex", lambda: hex(nv.nvmlDeviceGetCurrentClocksEventReasons(handle))),
        )
        with open(self._path, "w", encoding="ascii") as file:
            file.write(",".join(["t", *(name for name, _ in readings)]) + "\n")
            while not self._halt.wait(PERIOD_S):
                row: dict[str, Any] = {}
                for name, read in readings:
                    with suppress(nv.NVMLError):
                        row[name] = read()
                self.last = row
                if self.first_mib is None:
                    self.first_mib = row.get("mem_used_mib")
                cells = [f"{time.monotonic() - self._t0:.2f}"]
                file.write(",".join(cells + [str(row.get(n, "")) for n, _ in readings]) + "\n")
                file.flush()

    def wait_for_memory(self, limit_s: float) -> bool:
        """Wait until the GPU's memory is back near its start; False when it did not get there."""
        deadline = time.monotonic() + limit_s
        while self.first_mib is not None and self.is_alive():
            used = self.last.get("mem_used_mib")
            if used is None or used <= self.first_mib + 512:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(PERIOD_S)
        return True
