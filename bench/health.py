"""Is this box as fast as its card should be? Fifteen seconds before any bench.

    python bench/health.py [--gpu NUMBER] [--deep]

Measures device copy bandwidth, bf16 GEMM, host-to-device bandwidth and launch latency, holds them
against the card's own nominal numbers (memory bus width x clock; a table of tensor peaks), looks
for power caps, throttling, ECC trouble and other users, and times identical code against itself:
that A/A ratio is the noise floor below which no speedup is reported. Then it looks for silent data
corruption (bench/corruption.py), in up to 8 GiB of the memory or with --deep in most of it.

The row goes to the runner and, inside a run, to health.json, from which the benches take their
measured ceilings. --gpu says which of several cards this is (by CUDA_VISIBLE_DEVICES it is the only
one to be seen); its row stands beside that of the card that is benched. Exit code: 0
measured, 1 the card corrupts data, 3 there is no CUDA device.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run by path, uninstalled

import torch

from bench.clock import CudaClock
from bench.corruption import check_memory, check_products
from bench.device import THROTTLED, Gpu
from bench.provenance import provenance
from bench.records import card_faults, doc_parser, emit, note, out_dir, write_atomic
from bench.stats import noise_floor
from bench.timing import Budget, sample

LEAST_SHARE = 0.70  # of the nominal numbers; below, something holds this card back
OTHERS_MIB = 500  # in use before this process came; above, someone else is on the card
PCIE_GBS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.97, 5: 3.94, 6: 7.56}  # per lane and direction


def median_us(clock: CudaClock, call: Any, n: int = 20) -> float:
    clock.run([call] * 5, cold=False)
    return statistics.median(clock.run([call] * n, cold=False))


def copy_gbs(clock: CudaClock, free: int) -> float:
    """Device-to-device copy, read plus written bytes."""
    size = min(2**30, free // 8)
    source = torch.empty(size, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * size / median_us(clock, lambda: target.copy_(source)) / 1e3


def gemm_tflops(clock: CudaClock, free: int) -> tuple[float, float]:
    """bf16 GEMM of 8192 (smaller with little memory): the first ones, and after half a second."""
    n = 8192 if free > 4 * 2**30 else 4096
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    call = lambda: torch.mm(a, b, out=out)
    burst = median_us(clock, call, 10)
    begin = time.perf_counter()
    while time.perf_counter() - begin < 0.5:
        long = median_us(clock, call, 20)
    return 2 * n**3 / burst / 1e6, 2 * n**3 / long / 1e6


def h2d_gbs(clock: CudaClock) -> float | None:
    """Pinned host to device, 256 MiB; None where memory cannot be pinned."""
    try:
        host = torch.empty(2**28, dtype=torch.int8, pin_memory=True)
    except RuntimeError:
        return None
    device = torch.empty(2**28, dtype=torch.int8, device="cuda")
    return 2**28 / median_us(clock, lambda: device.copy_(host, non_blocking=True), 5) / 1e3


def launch_us(clock: CudaClock) -> float:
    """Host time per launch of a kernel that does next to nothing, back to back."""
    x = torch.zeros(1, device="cuda")
    launch = lambda: x.add_(1)
    clock.wall(launch, 50)
    return statistics.median(clock.wall(launch, 200) for _ in range(5))


def aa_ratios(clock: CudaClock) -> list[float]:
    """Identical code against itself, as a bench would time it: a median ratio per trial."""
    budget = Budget(device_s=0.03, wall_s=0.4, min_n=30)
    small = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    large = torch.randn(64 * 2**20, device="cuda", dtype=torch.bfloat16)
    calls = [lambda: small @ small, lambda: large * 2, lambda: torch.softmax(small, -1)]
    return [
        statistics.median(sample(clock, call, call, True, budget).ratios)
        for call in calls
        for _ in range(6)
    ]


def memory_in_use() -> dict[str, int]:
    """MiB in use by uuid of the card, as NVML counts; {} without NVML.

    Asked for before this process has a CUDA context, whose 500 MiB nobody could tell from another
    user's: in a container NVML names no processes.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        out = {}
        for i in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(i)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
            try:  # the first version counts what the driver keeps for itself as well
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
            except (pynvml.NVMLError, AttributeError):
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = uuid.decode() if isinstance(uuid, bytes) else uuid
            out[name] = memory.used // 2**20
        return out
    except Exception:  # no library, no rights: all of them mean "no NVML"
        return {}


def hardware(gpu: Gpu, others_mib: int | None) -> tuple[dict[str, Any], list[str]]:
    """What NVML says of power, PCIe and ECC, and what is wrong with it; others_mib: of the memory,
    in use before this process came, None where nobody knows."""
    facts: dict[str, Any] = {}
    why: list[str] = []
    limit = gpu.ask("nvmlDeviceGetEnforcedPowerLimit")
    normal = gpu.ask("nvmlDeviceGetPowerManagementDefaultLimit")
    if limit and normal:
        facts |= {"power_limit_w": limit / 1e3, "power_default_w": normal / 1e3}
        if limit < 0.98 * normal:
            why.append(f"power-capped at {limit / 1e3:.0f} W of {normal / 1e3:.0f} W")
    gen, lanes = (gpu.ask(f"nvmlDeviceGetMaxPcieLink{n}") for n in ("Generation", "Width"))
    if gen and lanes:
        facts["pcie"] = f"gen{gen} x{lanes}"
        facts["pcie_gbs_nominal"] = PCIE_GBS.get(gen, 0) * lanes or None
    pynvml = gpu.nvml and gpu.nvml[0]
    if pynvml:
        errors = gpu.ask("nvmlDeviceGetTotalEccErrors", pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                         pynvml.NVML_VOLATILE_ECC)  # fmt: skip
        facts["ecc_uncorrected"] = errors
        if errors:
            why.append(f"{errors} uncorrected ECC errors since the driver was loaded")
        remap = gpu.ask("nvmlDeviceGetRemappedRows")
        if remap and (remap[2] or remap[3]):
            why.append("memory rows wait for a remap or could not be remapped: reset or change it")
    facts["memory_used_by_others_mib"] = others_mib
    if others_mib is not None and others_mib > OTHERS_MIB:
        why.append(f"{others_mib} MiB of the card are in use by others")
    return facts, why


def judge(row: dict[str, Any], gpu: Gpu) -> list[str]:
    """Sentences a renter can act on, for what falls short of the card's nominal numbers."""
    why = []
    cause = "; ".join(row["why"]) or "no cause seen in NVML"
    for share, what in (("copy_frac", "memory copies"), ("gemm_frac", "bf16 GEMM")):
        if row[share] is not None and row[share] < LEAST_SHARE:
            why.append(
                f"{what} run at {row[share]:.0%} of what a {gpu.name} should do ({cause}): "
                "rent another box, or lift the cap"
            )
    nominal, got = row.get("pcie_gbs_nominal"), row["h2d_gbs"]
    if nominal and got and got < 0.5 * nominal:
        why.append(f"upload runs at {got:.0f} GB/s of {nominal:.0f}: a shared or narrow slot")
    return why


def corruption(deep: bool) -> dict[str, int]:
    """Facts of bench/corruption.py about this card, found in some 3 seconds, or 20 if `deep`."""
    torch.cuda.empty_cache()
    most = int(0.8 * torch.cuda.mem_get_info()[0])
    size, limit_s = (most, 15.0) if deep else (min(most, 8 * 2**30), 2.0)
    facts = check_memory("cuda", size, limit_s)
    for dtype in (torch.bfloat16, torch.float32):
        facts |= check_products("cuda", dtype, limit_s / 5)
    return facts


def measure(gpu: Gpu, in_use: Mapping[str, int], deep: bool) -> dict[str, Any]:
    """The health row of `gpu`; in_use: what memory_in_use() said before."""
    others_mib = in_use.get(f"GPU-{getattr(gpu.properties, 'uuid', None)}")
    clock = CudaClock()
    torch.cuda.synchronize()
    free, _ = torch.cuda.mem_get_info()
    facts, why = hardware(gpu, others_mib)
    with gpu.watch() as watch:
        copy = copy_gbs(clock, free)
        torch.cuda.empty_cache()
        burst, long = gemm_tflops(clock, free)
        torch.cuda.empty_cache()
        upload, latency = h2d_gbs(clock), launch_us(clock)
        ratios = aa_ratios(clock)
    seen = watch.summary()
    throttled = sorted(THROTTLED & set(seen["reasons"] or ()))
    if throttled:
        why.append(f"throttled while measured: {', '.join(throttled)}")
    row = {
        "device": gpu.name, "copy_gbs": copy, "copy_nominal_gbs": gpu.bus_gbs,
        "copy_frac": copy / gpu.bus_gbs if gpu.bus_gbs else None,
        "gemm_bf16_tflops": burst, "gemm_sustained_tflops": long,
        "gemm_nominal_tflops": gpu.tensor_tflops,
        "gemm_frac": burst / gpu.tensor_tflops if gpu.tensor_tflops else None,
        "h2d_gbs": upload, "launch_us": latency, "aa_noise_floor": noise_floor(ratios),
        "aa_trials": len(ratios), "aa_worst": max(abs(r - 1) for r in ratios),
        "throttled": None if seen["reasons"] is None else bool(throttled),
        **{name: seen[name] for name in ("sm_mhz", "power_w", "reasons")}, **facts, "why": why,
        **corruption(deep), **provenance(gpu),
    }  # fmt: skip
    faults = card_faults(row)
    row["why"] = [*faults, *why, *judge(row, gpu)]
    row["status"] = "FAIL" if faults else "WARN" if row["why"] else "OK"
    return row


def main(argv: list[str] | None = None) -> int:
    parser = doc_parser(__doc__)
    parser.add_argument("--gpu", type=int, metavar="NUMBER", help="of a card that is not benched")
    parser.add_argument("--deep", action="store_true", help="test most of the memory")
    args = parser.parse_args(argv)
    in_use = memory_in_use()
    if not torch.cuda.is_available():
        note("torch sees no CUDA device: its health was not measured", "warn")
        return 3
    row = measure(Gpu(), in_use, args.deep) | ({} if args.gpu is None else {"gpu": args.gpu})
    emit("health", row)
    folder = out_dir()
    if folder and args.gpu is None:
        write_atomic(folder / "health.json", json.dumps(row, indent=1) + "\n")
    share = lambda x: "" if x is None else f"  ({x:.0%} of nominal)"
    worst = f"(worst of {row['aa_trials']} trials {row['aa_worst']:.1%})"
    print(f"""{row["device"]}, driver {row["driver"]}
copy       {row["copy_gbs"]:8.0f} GB/s{share(row["copy_frac"])}
bf16 GEMM  {row["gemm_bf16_tflops"]:8.0f} TFLOP/s{share(row["gemm_frac"])}, \
sustained {row["gemm_sustained_tflops"]:.0f}
upload     {row["h2d_gbs"] or math.nan:8.1f} GB/s
launch     {row["launch_us"]:8.2f} us
A/A floor  {row["aa_noise_floor"]:8.1%}  {worst}
{row["status"]}: {"; ".join(row["why"]) or "as fast as it should be"}""")
    return 1 if row["status"] == "FAIL" else 0


if __name__ == "__main__":
    raise SystemExit(main())
