"""What the box is. Every probe is guarded: a failure is a value, and the report still comes."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from scripts.oneshot.box.processes import usable_cores
from scripts.oneshot.record.journal import dumps, utc_now
from scripts.oneshot.record.redact import may_be_shown
from scripts.oneshot.streams import last_answer

_SMI_FIELDS = {
    "uuid": "uuid", "name": "name", "driver": "driver_version", "mem_mib": "memory.total",
    "mem_used_mib": "memory.used", "util_pct": "utilization.gpu", "sm": "compute_cap",
    "power_limit_w": "power.limit", "power_default_w": "power.default_limit",
    "pcie_gen": "pcie.link.gen.current", "pcie_gen_max": "pcie.link.gen.max",
    "pcie_width": "pcie.link.width.current", "pcie_width_max": "pcie.link.width.max",
    "ecc": "ecc.mode.current", "mig": "mig.mode.current", "temp_c": "temperature.gpu",
    "persistence": "persistence_mode", "sm_mhz_max": "clocks.max.sm",
    "mem_mhz_max": "clocks.max.mem", "pci": "pci.bus_id",
}  # fmt: skip
# Files of cgroups, of version 2 and of version 1.
CPU_LIMIT = ("cpu.max", "cpu/cpu.cfs_quota_us")
MEMORY_LIMIT = ("memory.max", "memory/memory.limit_in_bytes")
_OF_TORCH = ("cuda_available", "cuda_error", "cudnn", "triton", "triton_pin", "flash_attn")
# Shown like the others, but where something lies or how it is built changes no result.
_NO_RESULT = ("NSA_COMMIT", "TRITON_CACHE_DIR", "MAX_JOBS", "VIRTUAL_ENV", "CONDA_PREFIX")


class ProbeFailed(Exception):
    """A probe that could not answer; its text is the value shown."""


def guarded(probe: Callable[[], Any]) -> Any:
    """Return what `probe()` returns, or the text "<probe failed: ...>"."""
    try:
        return probe()
    except Exception as error:  # whatever a broken box throws is the answer
        return f"<probe failed: {type(error).__name__}: {str(error)[:200]}>"


def command(argv: list[str], timeout_s: float = 10.0, **kwargs: Any) -> str:
    """Return stdout of a command. Raises ProbeFailed when it is missing, is slow or fails."""
    name = os.path.basename(argv[0])
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            encoding="utf-8", **{"errors": "replace", **kwargs},
        )  # fmt: skip
    except FileNotFoundError:
        raise ProbeFailed(f"{name} is not installed") from None
    except OSError as error:
        raise ProbeFailed(f"{name}: {error.strerror}") from None
    _asked.add(child)
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        # A child stuck in the driver does not die; its pipes are left to it.
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=1.0)
        raise ProbeFailed(f"{name} did not answer within {timeout_s:.0f} s") from None
    finally:
        _asked.discard(child)
    if child.returncode != 0:
        last = (stderr or stdout).strip().splitlines()[-1:]
        raise ProbeFailed(f"{name} ended with {child.returncode}: {' '.join(last)[:200]}")
    return stdout


_asked: set[subprocess.Popen[str]] = set()


def abort() -> None:
    """Kill every command that a probe still waits for."""
    for child in list(_asked):
        with suppress(OSError):
            child.kill()


def nvidia_hardware() -> str | None:
    """Return how we know of NVIDIA hardware, or None. Asks no driver, so it cannot hang."""
    if any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return "the kernel driver lists a GPU"
    if any(re.fullmatch(r"nvidia\d+", p.name) for p in Path("/dev").glob("nvidia*")):
        return "/dev/nvidia* is there"
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == "0x10de" and kind.startswith("0x03"):
                return "an NVIDIA GPU is on the PCI bus"
    if Path("/dev/dxg").exists() and shutil.which("nvidia-smi"):
        return "WSL with nvidia-smi"
    return None


def why_hidden(environ: Mapping[str, str]) -> str | None:
    """Say so where CUDA_VISIBLE_DEVICES shows no GPU to any process; None where it may show one."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None or re.match(r"\s*[^\s-]", given):
        return None
    return f"CUDA_VISIBLE_DEVICES={given!r} hides every GPU"


def _cell(text: str) -> Any:
    text = text.strip()
    if text in ("", "[N/A]", "N/A", "[Not Supported]", "[Unknown Error]"):
        return None
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return float(text) if "." in text else int(text)
    return text


def smi_query(timeout_s: float = 10.0, index: int | None = None) -> list[dict[str, Any]]:
    """Return one dict per GPU from nvidia-smi, or of GPU `index` alone. Raises ProbeFailed."""
    names = list(_SMI_FIELDS)
    query = f"--query-gpu={','.join(_SMI_FIELDS.values())}"
    which = [] if index is None else ["-i", str(index)]
    text = command(["nvidia-smi", *which, query, "--format=csv,noheader,nounits"], timeout_s)
    gpus = []
    for cells in csv.reader(io.StringIO(text)):
        if len(cells) == len(names):
            gpu = dict(zip(names, (_cell(c) for c in cells), strict=True))
            versions = {n: str(gpu[n]) for n in ("sm", "driver") if gpu[n] is not None}
            gpus.append({**gpu, **versions})
    if not gpus:
        raise ProbeFailed("nvidia-smi names no GPU")
    return gpus


def smi_or_why(hardware: str | None) -> list[dict[str, Any]] | str:
    """Return what smi_query() gives, or why it gives none. hardware: of nvidia_hardware()."""
    try:
        return smi_query()
    except ProbeFailed as error:
        return str(error) if hardware else "no NVIDIA hardware"


def gpus_named(name: str, gpus: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return which of nvidia-smi's GPUs a name in CUDA_VISIBLE_DEVICES means: a number, or how a
    UUID begins; also the older name of a slice, MIG-GPU-<UUID of its card>/<instance>/<...>."""
    if name.isdecimal():
        return [int(name)] if int(name) < len(gpus) else []
    name = name.removeprefix("MIG-").split("/")[0]
    by_uuid = name.startswith("GPU-")
    return [i for i, g in enumerate(gpus) if by_uuid and str(g.get("uuid")).startswith(name)]


def visible_gpu(gpus: Sequence[dict[str, Any]], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the one of nvidia-smi's GPUs that a process of this environment sees first.

    Of a slice (MIG) only what is known of it: its own UUID, and what it shares with its card. Of a
    name that nvidia-smi does not explain nothing is known but the driver.
    """
    name = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if not name:
        return gpus[0]
    slice_of = name.startswith("MIG-")
    found = gpus_named(name, gpus) or (_card_of_slice(name, gpus) if slice_of else [])
    card = gpus[found[0] if found else 0]
    if found and not slice_of:
        return card
    shared = ("driver", "sm", "temp_c", "persistence") if found else ("driver",)
    known = {key: card.get(key) for key in shared}
    return {**known, "uuid": name, "mig": "Enabled" if slice_of else None}


def _card_of_slice(name: str, gpus: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the card under whose line `nvidia-smi -L` lists the slice."""
    card = ""
    with suppress(ProbeFailed):
        for uuid in re.findall(r"UUID: (\S+?)\)", command(["nvidia-smi", "-L"])):
            if uuid == name:
                return gpus_named(card, gpus)
            card = uuid if uuid.startswith("GPU-") else card
    return []


def device_facts(gpus: list[dict[str, Any]] | str, torch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bundle's `device`: the first visible GPU, by nvidia-smi and by torch."""
    seen = torch.get("device") or {}
    if isinstance(gpus, str) and not seen:
        return {"name": None, "reason": gpus}
    gpu = {} if isinstance(gpus, str) else visible_gpu(gpus, os.environ)
    width, most = gpu.get("pcie_width"), gpu.get("pcie_width_max")
    slot = f"gen{gpu.get('pcie_gen')} x{width}" + (f" (max x{most})" if width != most else "")
    pcie = slot if gpu.get("pcie_gen") else None
    used, util = gpu.get("mem_used_mib"), gpu.get("util_pct")
    return {
        **{name: seen.get(name) or gpu.get(name) for name in ("name", "sm")},
        "mem_mib": gpu.get("mem_mib") or seen.get("torch_mem_mib"),
        **{name: gpu.get(name) for name in ("driver", "power_limit_w", "power_default_w")},
        "pcie": pcie,
        "ecc": str(gpu.get("ecc") or "n/a").lower(),
        "mig": gpu.get("mig") == "Enabled",
        "shared": None if used is None else used > 500 or (util or 0) > 5,
        **{name: seen.get(name) for name in ("l2_mib", "sm_count")},
        "count": seen.get("count") or (0 if isinstance(gpus, str) else len(gpus)),
        **{name: gpu.get(name) for name in ("temp_c", "sm_mhz_max", "mem_mhz_max", "persistence")},
    }


def torch_facts(python: str, root: Path) -> dict[str, Any]:
    """Ask the chosen interpreter's torch about itself, in a child."""
    probe = str(root / "scripts/oneshot/box/probe_torch.py")
    try:
        text = command([python, probe], 120.0, cwd=root)
    except ProbeFailed as error:
        return {"torch_error": f"the probe gave no answer: {error}"}
    return last_answer(text) or {"torch_error": "the probe gave no answer"}


def _cgroup(*names: str) -> str | None:
    for name in names:
        with suppress(OSError):
            return Path("/sys/fs/cgroup", name).read_text().strip()
    return None


def _cpu_model() -> str:
    with suppress(OSError, TypeError):
        return re.search(r"(?m)^model name.*?:(.*)", Path("/proc/cpuinfo").read_text())[1].strip()
    return platform.processor() or platform.machine()


def _os_name() -> str:
    with suppress(OSError, KeyError):
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    return platform.platform()


def memory_mib() -> int | None:
    with suppress(OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    return None


def triton_cache() -> Path | None:
    """Return where Triton keeps what it compiled; None for a user without a home."""
    if given := os.environ.get("TRITON_CACHE_DIR"):
        return Path(given)
    home = os.path.expanduser("~")
    return Path(home) / ".triton" / "cache" if home not in ("~", "/") else None


def settle_triton_cache(out: Path) -> None:
    """Keep kernels below `out` where the user has no home that can be written."""
    cache = triton_cache()
    with suppress(OSError):
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)
            if os.access(cache, os.W_OK):
                return
    os.environ.setdefault("TRITON_CACHE_DIR", str(out / ".triton"))


def free_mib(path: Path | None) -> int | None:
    """Return the free space where `path` is or would be."""
    for place in (path, *path.parents) if path is not None else ():
        if place.exists():
            with suppress(OSError):
                return shutil.disk_usage(place).free // 2**20
            break
    return None


def system_facts(out: Path) -> dict[str, Any]:
    return {
        "os": guarded(_os_name), "kernel": platform.release(), "cpu": guarded(_cpu_model),
        "cores": os.cpu_count(), "cores_usable": usable_cores(),
        "cgroup_cpu": _cgroup(*CPU_LIMIT), "memory_mib": memory_mib(),
        "cgroup_memory": _cgroup(*MEMORY_LIMIT),
        "container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
        "shm_free_mib": free_mib(Path("/dev/shm")), "out_free_mib": free_mib(out),
        "tmp_free_mib": free_mib(Path(os.environ.get("TMPDIR", "/tmp"))),
        "triton_cache_free_mib": guarded(lambda: free_mib(triton_cache())), "utc": utc_now(),
    }  # fmt: skip


def fingerprint(
    device: Mapping[str, Any], torch: Mapping[str, Any], environ: Mapping[str, str],
    gpus: Sequence[Mapping[str, Any]] = (), cpu: str | None = None,
) -> str:  # fmt: skip
    """Hash what must be equal where times and results of an earlier run are taken over: this box
    (`gpus` of nvidia-smi, the model of its `cpu`), with the same software and variables."""
    flags = {k: v for k, v in environ.items() if may_be_shown(k) and k not in _NO_RESULT}
    parts = [
        [[gpu.get(k) for k in ("uuid", "pci", "mig")] for gpu in gpus], cpu,
        [device.get(k) for k in ("name", "driver", "power_limit_w")],
        [torch.get(k) for k in ("python", "torch", "cuda_build", "triton", "flash_attn")],
        sorted(flags.items()),
    ]  # fmt: skip
    return hashlib.sha256(dumps(parts).encode("utf-8", "surrogateescape")).hexdigest()


def collect(
    root: Path, out: Path, python: str, variables: Mapping[str, str],
    smi: list[dict[str, Any]] | str, setup: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:  # fmt: skip
    """Return (env sections, device, raw torch facts); only `variables` is redacted yet.

    `smi` is what smi_query() gave, or the text of its failure.
    """
    torch = torch_facts(python, root)
    smi_text = smi if isinstance(smi, str) else guarded(lambda: command(["nvidia-smi"]))
    device = {**device_facts(smi, torch), "hardware": guarded(nvidia_hardware)}
    packages = {name: v or "not installed" for name, v in (torch.get("packages") or {}).items()}
    about_python = {
        "version": torch.get("python"), "executable": python,
        "torch": torch.get("torch") or f"<probe failed: {torch.get('torch_error')}>",
        "cuda": torch.get("cuda_build"),
        **{name: torch.get(name) for name in _OF_TORCH},
        "arch_list": " ".join(torch.get("arch_list") or []) or None,
    }  # fmt: skip
    env = {
        "python": about_python, "gpu": dict(device), "system": system_facts(out),
        "packages": packages, "variables": dict(variables), "setup": dict(setup),
        "nvidia_smi": {"text": smi_text or None},
    }  # fmt: skip
    return env, device, torch


def as_text(env: Mapping[str, Any]) -> str:
    fact = lambda key, value: f"{key:24} {'-' if value is None else value}"
    lines = []
    for section, values in env.items():
        facts = [str(v) if key == "text" else fact(key, v) for key, v in values.items()]
        lines += [f"[{section}]", *facts, ""]
    return "\n".join(lines)
