"""What the card is, what it could do, and what it does while a case is timed (NVML)."""

import json
import statistics
import threading
import timeit
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

# Dense bf16 tensor-core peaks in TFLOP/s by the vendors' sheets; a device name contains its key.
TENSOR_PEAK = {
    "B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0,
    "H800": 989.0, "GH200": 989.0, "A100": 312.0, "A800": 312.0, "L40S": 362.0, "L40": 181.0,
    "L4": 121.0, "A10G": 70.0, "A10": 125.0, "RTX 5090": 209.5, "RTX 4090": 165.2,
    "RTX 3090": 71.0, "A6000": 154.8, "RTX 6000 Ada": 364.0,
}  # fmt: skip

# Reasons under which a sample says little about the card. SwPowerCap is normal on long GEMMs.
THROTTLED = {"HwSlowdown", "HwThermal", "SwThermal", "HwPowerBrake"}
_REASONS = {  # 0x1 is that of an idle card
    "AppClocks": 0x2, "SwPowerCap": 0x4, "HwSlowdown": 0x8, "SyncBoost": 0x10,
    "SwThermal": 0x20, "HwThermal": 0x40, "HwPowerBrake": 0x80, "DisplayClocks": 0x100,
}  # fmt: skip


@dataclass
class Ceilings:
    """Bytes/s and FLOP/s that a case is held against. source: measured on this box, or nominal."""

    gbs: float | None
    tflops: float | None
    source: str


class Gpu:
    """One CUDA device through torch and, where it answers, NVML."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)
        self.properties = torch.cuda.get_device_properties(self.device)
        self.name: str = self.properties.name

    @cached_property
    def nvml(self) -> tuple[Any, Any] | None:
        """(pynvml, handle) of this very device, or None."""
        try:
            import pynvml

            pynvml.nvmlInit()
            uuid = getattr(self.properties, "uuid", None)
            if uuid is not None:
                return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            return pynvml, pynvml.nvmlDeviceGetHandleByIndex(self.device.index or 0)
        except Exception:  # no library, no rights, MIG: all of them mean "no NVML"
            return None

    def ask(self, name: str, *args: Any) -> Any | None:
        """One NVML query by name; None where NVML or the card does not answer it."""
        if self.nvml is None:
            return None
        pynvml, handle = self.nvml
        try:
            return getattr(pynvml, name)(handle, *args)
        except (pynvml.NVMLError, AttributeError):
            return None

    @cached_property
    def bus_gbs(self) -> float | None:
        """Peak memory bandwidth: bus width x highest memory clock x 2 (DDR), in GB/s."""
        pynvml = self.nvml and self.nvml[0]
        width = self.ask("nvmlDeviceGetMemoryBusWidth")
        clock = pynvml and self.ask("nvmlDeviceGetMaxClockInfo", pynvml.NVML_CLOCK_MEM)
        return width / 8 * clock * 2 / 1e3 if width and clock else None

    @property
    def tensor_tflops(self) -> float | None:
        """Nominal dense bf16 peak, None for a card that the table does not know."""
        return next((peak for key, peak in TENSOR_PEAK.items() if key in self.name), None)

    def nominal(self) -> Ceilings:
        return Ceilings(self.bus_gbs, self.tensor_tflops, "nominal")

    def state(self) -> dict[str, Any]:
        """Clocks (MHz), power (W), temperature (C) and throttle reasons at this moment; None for
        what nobody tells."""
        pynvml = self.nvml and self.nvml[0]
        if not pynvml:
            return dict.fromkeys(("sm_mhz", "power_w", "temp_c", "reasons"))
        power = self.ask("nvmlDeviceGetPowerUsage")
        bits = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            bits = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return {
            "sm_mhz": self.ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
            "power_w": power / 1e3 if power is not None else None,
            "temp_c": self.ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
            "reasons": None if bits is None else [n for n, bit in _REASONS.items() if bits & bit],
        }

    def watch(self, every_s: float = 0.025) -> "Watch":
        return Watch(self, every_s)


@dataclass
class Watch:
    """Context manager that samples the card's state in a thread while a case runs."""

    gpu: Gpu | None
    every_s: float = 0.025
    states: list[dict[str, Any]] = field(default_factory=list)

    def __enter__(self) -> "Watch":
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        if self.gpu is not None and self.gpu.nvml is not None:
            self.states.append(self.gpu.state())
            self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(self.every_s):
            self.states.append(self.gpu.state())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
            self.states.append(self.gpu.state())

    def summary(self) -> dict[str, Any]:
        """sm_mhz [lowest, highest], sm_mhz_median, power_w (median) and every reason seen; None for
        what nobody told."""
        told = [s["reasons"] for s in self.states if s["reasons"] is not None]
        clocks = [s["sm_mhz"] for s in self.states if s["sm_mhz"]]
        power = [s["power_w"] for s in self.states if s["power_w"]]
        return {
            "sm_mhz": [min(clocks), max(clocks)] if clocks else None,
            "sm_mhz_median": statistics.median(clocks) if clocks else None,
            "power_w": round(statistics.median(power), 1) if power else None,
            "reasons": sorted({r for reasons in told for r in reasons}) if told else None,
        }


def host_ceilings() -> Ceilings:
    """What this process's threads copy within their caches and multiply in fp32, measured."""
    a = torch.ones(256, 256)
    b = torch.empty_like(a)

    best_s = lambda call: min(timeit.repeat(call, number=10, repeat=20)) / 10
    copy, product = best_s(lambda: b.copy_(a)), best_s(lambda: torch.mm(a, a, out=b))
    return Ceilings(2 * a.nbytes / copy / 1e9, 2 * 256**3 / product / 1e12, "measured")


def ceilings(gpu: Gpu | None, folder: str | Path | None) -> Ceilings:
    """What `folder`/health.json measured on this very card, else the card's nominal numbers."""
    if gpu is None:
        return Ceilings(None, None, "unknown")
    path = Path(folder) / "health.json" if folder else None
    if path and path.is_file():
        health = json.loads(path.read_text(encoding="utf-8"))
        if health.get("device") == gpu.name and health.get("copy_gbs"):
            return Ceilings(health["copy_gbs"], health.get("gemm_bf16_tflops"), "measured")
    return gpu.nominal()
