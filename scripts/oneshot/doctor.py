"""Is this box fit for the run? OK, WARN or BLOCK per check, each with one fix.

    python -m scripts.oneshot doctor [--profile standard] [--json]

Exit code: 0 nothing blocks, 3 something does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nsa.kernels import fa2_wheels
from scripts.oneshot import checkout
from scripts.oneshot import env as box
from scripts.oneshot.processes import usable_cores

ROOT = Path(__file__).resolve().parent.parent.parent
WANTED_MIB = 500
LEAST_TORCH, LEAST_TRITON = "2.10", "3.6"
# What the metadata of each torch names on Linux, for a torch whose own names none.
TRITON_OF = {
    "2.2": "2.2", "2.3": "2.3.1", "2.4": "3.0.0", "2.5": "3.1.0", "2.6": "3.2.0", "2.7": "3.3.1",
    "2.8": "3.4.0", "2.9": "3.5.1", "2.10": "3.6.0", "2.11": "3.6.0", "2.12": "3.7.1",
    "2.13": "3.7.1", "2.14": "3.8.0", "2.15": "3.9.0",
}  # fmt: skip


@dataclass(frozen=True)
class Check:
    name: str
    level: str  # OK | WARN | BLOCK
    text: str
    fix: str | None = None


def _number(text: str | None) -> tuple[int, ...]:
    return tuple(int(p) for p in re.findall(r"\d+", text or "")[:2])


def check_python(torch: Mapping[str, Any]) -> Check:
    version = torch.get("python")
    if version and _number(version) < (3, 10):
        return Check("python", "BLOCK", f"Python {version}", "use Python 3.10 or later: PYTHON=...")
    return Check("python", "OK", f"Python {version or sys.version.split()[0]}")


def check_torch(torch: Mapping[str, Any], gpu: bool) -> Check:
    if torch.get("torch_error"):
        fix = "pip install torch, or name an interpreter that has it: PYTHON=/path/to/python"
        return Check("torch", "BLOCK", f"torch does not import: {torch['torch_error']}", fix)
    version = torch["torch"]
    if not gpu:
        return _old("torch", version, LEAST_TORCH) or Check("torch", "OK", f"torch {version}")
    if torch.get("hip"):
        return Check("torch", "BLOCK", f"torch {version} is a ROCm build", "use a CUDA build")
    if not torch.get("cuda_build"):
        fix = "install a CUDA build of torch, or remove this one and run again"
        return Check("torch", "BLOCK", f"torch {version} is built without CUDA", fix)
    if not torch.get("cuda_works"):
        cause = torch.get("cuda_error") or "torch.cuda.is_available() is False"
        if re.search(r"driver.*(too old|insufficient)", cause):
            fix = f"update the driver, or use a torch built for an older CUDA than {version}"
        else:
            fix = "check CUDA_VISIBLE_DEVICES and that the container was started with its GPU"
        return Check("torch", "BLOCK", f"torch {version} cannot use the GPU: {cause}", fix)
    said = Check("torch", "OK", f"torch {version}, CUDA {torch['cuda_build']}")
    return _old("torch", version, LEAST_TORCH) or said


def _old(name: str, version: str, least: str) -> Check | None:
    """A WARN for a version below the least that this was ever tested with."""
    if _number(version) >= _number(least):
        return None
    text = f"{name} {version} is older than {least}: kernels may not compile, or be wrong"
    return Check(name, "WARN", text, f"install torch {LEAST_TORCH} or later; it names its triton")


def _pin_of(torch: Any) -> str | None:
    """Triton's release for a torch whose metadata names none, as that of CPU wheels."""
    release = TRITON_OF.get(".".join(str(torch).split("+")[0].split(".")[:2]))
    return release and f"triton=={release}"


def check_triton(torch: Mapping[str, Any]) -> Check:
    version = torch.get("triton")
    pin = torch.get("triton_pin") or _pin_of(torch.get("torch"))
    if not version:
        return Check(
            "triton",
            "BLOCK",
            "Triton is not installed",
            f"pip install the triton that torch names ({pin or 'see requirements'})",
        )
    if not _number(version):
        return Check("triton", "WARN", f"triton is {version}", "install the one torch names")
    if pin:
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            wanted = Requirement(pin)
        except InvalidRequirement:
            text = f"triton {version}, but torch names {pin}"
            return Check("triton", "WARN", text, "compare the two")
        if not wanted.specifier.contains(version, prereleases=True):
            exact = f"{wanted.name}{wanted.specifier}"
            text = f"triton {version}, but torch names {exact}"
            return Check("triton", "WARN", text, f"pip install '{exact}'")
    return _old("triton", version, LEAST_TRITON) or Check("triton", "OK", f"triton {version}")


def check_gpu(device: Mapping[str, Any], gpu: bool) -> Check | None:
    """Which GPU the run speaks of; the driver's own check speaks where none answers."""
    name = device.get("name")
    if gpu:
        return Check("gpu", "OK", f"{name}, SM {device.get('sm') or '?'}") if name else None
    if name or device.get("hardware"):
        return Check("gpu", "OK", "there is a GPU, but the cpu profile was chosen")
    return Check(
        "gpu",
        "WARN",
        "no NVIDIA hardware is visible: cpu profile, which says nothing about any GPU",
        PASS_THROUGH,
    )


# A box without a sign of NVIDIA hardware is no broken one.
PASS_THROUGH = "on a box with a GPU, start the container with it (docker: --gpus all)"


def check_cuda(torch: Mapping[str, Any]) -> Check | None:
    """The driver's CUDA against torch's: within a major version an older driver serves too."""
    build, driver = torch.get("cuda_build"), torch.get("cuda_driver")
    if not build or not driver:
        return None
    if _number(driver)[0] >= _number(build)[0]:
        return Check("cuda", "OK", f"the driver serves CUDA {driver}, torch wants {build}")
    return Check(
        "cuda",
        "WARN" if torch.get("cuda_works") else "BLOCK",
        f"the driver serves CUDA {driver} only, torch is built for {build}",
        f"update the driver, or install a torch for CUDA {_number(driver)[0]}",
    )


def check_driver(device: Mapping[str, Any]) -> Check:
    if device.get("driver"):
        return Check("driver", "OK", f"{device['name']}, driver {device['driver']}")
    reason = device.get("reason") or "nvidia-smi gives no driver version"
    if device.get("name"):
        return Check(
            "driver",
            "WARN",
            f"torch sees {device['name']}, but {reason}",
            "telemetry and power limits are missing; install nvidia-smi",
        )
    return Check(
        "driver",
        "BLOCK",
        f"no usable GPU: {reason}",
        "restart the box; if it stays so, take another one"
        if device.get("hardware")
        else PASS_THROUGH,
    )


def check_arch(torch: Mapping[str, Any]) -> Check | None:
    sm = (torch.get("device") or {}).get("sm")
    archs = torch.get("arch_list") or []
    if not sm or not archs:
        return None
    major, minor = (int(x) for x in sm.split("."))
    if major < 8:
        return Check(
            "arch",
            "BLOCK",
            f"compute capability {sm}: bf16 kernels need 8.0 or more",
            "take an Ampere or newer GPU",
        )
    binaries = [
        tuple(divmod(int(m.group(1)), 10)) for a in archs if (m := re.match(r"sm_(\d+)", a))
    ]
    fits = any(b[0] == major and b[1] <= minor for b in binaries)
    if fits or any(a.startswith("compute_") for a in archs):
        return Check("arch", "OK", f"sm_{major}{minor} is served by this torch")
    return Check(
        "arch",
        "BLOCK",
        f"torch has no kernels for sm_{major}{minor} ({' '.join(archs)})",
        "install a newer CUDA build of torch",
    )


def check_power(device: Mapping[str, Any]) -> Check | None:
    cap, full = device.get("power_limit_w"), device.get("power_default_w")
    if not isinstance(cap, (int, float)) or not isinstance(full, (int, float)):
        return None
    if cap < full:
        return Check(
            "power",
            "WARN",
            f"power limit {cap:g} W of {full:g} W",
            "times are those of a capped card; ask the host for the full limit",
        )
    return Check("power", "OK", f"power limit {cap:g} W")


def check_quiet(device: Mapping[str, Any]) -> Check | None:
    if device.get("shared") is None:
        return None
    if device["shared"]:
        return Check(
            "quiet",
            "WARN",
            "the GPU is in use before the run starts",
            "end other work on it; times will be noisy",
        )
    return Check("quiet", "OK", "nobody else uses the GPU")


def check_pcie(device: Mapping[str, Any]) -> Check | None:
    if "max" in str(device.get("pcie") or ""):
        return Check(
            "pcie",
            "WARN",
            f"PCIe {device['pcie']}",
            "copies to the GPU are slow on this box; kernels are not affected",
        )
    return None


def check_mig(device: Mapping[str, Any]) -> Check | None:
    if device.get("mig"):
        return Check(
            "mig",
            "WARN",
            "MIG is on: this is a slice of a GPU",
            "compare its times with the same slice only",
        )
    return None


def check_space(out: Path) -> Check:
    places = {
        "the output folder": out,
        "the Triton cache": box.triton_cache(),
        "the temporary folder": Path(os.environ.get("TMPDIR", "/tmp")),
    }
    low = []
    for name, path in places.items():
        free = box.free_mib(path)
        if free is not None and free < WANTED_MIB:
            low.append(f"{name} has {free} MiB free")
    if low:
        level = "BLOCK" if any(re.search(r" [0-9] MiB", text) for text in low) else "WARN"
        return Check(
            "space",
            level,
            "; ".join(low),
            f"free {WANTED_MIB} MiB, or set OUT, TRITON_CACHE_DIR and TMPDIR to a larger disk",
        )
    return Check("space", "OK", f"at least {WANTED_MIB} MiB free everywhere")


def check_writable(out: Path) -> Check:
    for name, path in (("the output folder", out), ("the Triton cache", box.triton_cache())):
        if path is None:
            return Check(
                "writable",
                "WARN",
                "this user has no home: Triton compiles every kernel anew in every process",
                "set TRITON_CACHE_DIR to a folder of yours",
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f".write-probe-{os.getpid()}"
            probe.write_bytes(b"x")
            probe.unlink()
        except OSError as error:
            level = "BLOCK" if path == out else "WARN"
            return Check(
                "writable",
                level,
                f"{name} cannot be written: {error.strerror}",
                "set OUT or TRITON_CACHE_DIR to a folder of yours",
            )
    return Check("writable", "OK", "output and Triton cache can be written")


def check_compiler(torch: Mapping[str, Any]) -> Check | None:
    """Triton builds its launcher with a C compiler and Python.h at the first launch."""
    import shutil

    if not (os.environ.get("CC") or any(shutil.which(c) for c in ("gcc", "clang", "cc"))):
        return Check(
            "compiler",
            "BLOCK",
            "no C compiler: Triton cannot build its launcher",
            "apt-get install gcc, or set CC",
        )
    if torch.get("python_h") is False:
        return Check(
            "compiler",
            "WARN",
            "Python.h is missing: Triton may not build its launcher",
            "install the python3-dev package of this Python",
        )
    return Check("compiler", "OK", "C compiler and Python.h are there")


def check_flash_attn(torch: Mapping[str, Any]) -> Check | None:
    state = torch.get("flash_attn")
    if state is None:
        return None
    if state[0].isdigit():
        return Check("flash-attn", "OK", f"flash-attn {state}")
    fits = fa2_wheels.wheel(
        torch["torch"], torch.get("cuda_build"), torch["python"], torch.get("cxx11abi", True)
    )
    return Check("flash-attn", "WARN", f"flash-attn: {state}", f"optional; {fits}")


def check_packages(torch: Mapping[str, Any]) -> Check:
    packages = torch.get("packages") or {}
    needed = ("jinja2", "pytest", "numpy", "pyyaml")
    missing = [name for name in needed if not packages.get(name)]
    wanted = [n for n in ("psutil", "matplotlib", "nvidia-ml-py") if not packages.get(n)]
    if missing:
        return Check(
            "packages",
            "BLOCK" if "pytest" in missing else "WARN",
            f"missing: {', '.join(missing)}",
            f"pip install {' '.join(missing)}",
        )
    if wanted:
        return Check(
            "packages",
            "WARN",
            f"missing, optional: {', '.join(wanted)}",
            f"pip install {' '.join(wanted)}",
        )
    return Check("packages", "OK", "all packages are there")


def check_memory() -> Check | None:
    limit = box._cgroup("memory.max", "memory/memory.limit_in_bytes")
    total = box._memory_mib()
    if limit and limit.isdigit():
        total = min(total or 1 << 40, int(limit) // 2**20)
    if total is None:
        return None
    if total < 3500:
        return Check("memory", "WARN", f"{total} MiB of memory", "8 GiB are comfortable")
    return Check("memory", "OK", f"{total} MiB of memory")


def check_shm(device: Mapping[str, Any]) -> Check | None:
    """Docker gives 64 MiB, which NCCL between several GPUs outgrows."""
    free = box.free_mib(Path("/dev/shm"))
    wanted = 32 * max(1, device.get("count") or 1)
    if free is None or free >= wanted:
        return None
    text = f"/dev/shm has {free} MiB free, {wanted} are wanted"
    return Check("shm", "WARN", text, "start the container with --shm-size=1g")


def check_cpus() -> Check:
    """Cores that this process may use: by affinity and by the cgroup's quota."""
    cores = float(usable_cores())
    quota = (box._cgroup("cpu.max", "cpu/cpu.cfs_quota_us") or "max").split()
    if quota[0].isdigit():  # "max" and -1 are no limit; version 1 has its usual period
        cores = min(cores, int(quota[0]) / int(quota[1] if len(quota) > 1 else 100_000))
    if cores < 2:
        text = f"{cores:g} CPU cores: compiling kernels takes long, stages may time out"
        return Check("cpus", "WARN", text, "give the container 4 cores")
    return Check("cpus", "OK", f"{cores:g} CPU cores")


def check_git(git: Mapping[str, Any]) -> Check:
    if git.get("source") == "hash of the sources":
        return Check(
            "git",
            "WARN",
            f"no commit: {git.get('problem')}",
            "clone with git, or name the commit: --commit or NSA_COMMIT",
        )
    if git.get("head"):
        return Check(
            "git",
            "WARN",
            f"the commit was given as {git['short']}, but git has {git['head'][:10]} checked out: "
            "which of them was measured, and whether it was clean, is unknown",
            "leave --commit and NSA_COMMIT out, or check that commit out",
        )
    if git.get("dirty"):
        names = ", ".join(git.get("hidden") or ())
        hidden = f"; git was told not to see {names}" if names else ""
        return Check(
            "git",
            "WARN",
            f"{git['short']} with changes of yours{hidden}",
            "commit them, so that the report names what it measured",
        )
    return Check("git", "OK", f"commit {git['short']}")


def check_startup(torch: Mapping[str, Any], environ: Mapping[str, str]) -> Check | None:
    """Code that Python runs before ours, or finds in its place."""
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    said = [f"PYTHONPATH has {p}" for p in paths if p and f"{os.sep}.deps{os.sep}" not in p]
    said += [f"{name} is set" for name in ("PYTHONSTARTUP", "PYTHONHOME") if environ.get(name)]
    said += [f"{path} runs" for path in torch.get("startup") or ()]
    if not said:
        return None
    return Check(
        "startup",
        "WARN",
        "not only the sources decide what runs: " + "; ".join(said),
        "unset or remove it where you do not mean it",
    )


def check_clock() -> Check:
    if time.time() < 1_700_000_000:
        return Check("clock", "WARN", "the clock is wrong", "set the date; downloads may fail too")
    return Check("clock", "OK", "the clock is plausible")


def check_flags(environ: Mapping[str, str]) -> Check:
    """NSA_* variables of the caller: a typing error in one would be measured as something else."""
    from nsa.flags import Flags, unknown_names

    mine = {k: v for k, v in environ.items() if k != "NSA_COMMIT"}
    unknown = unknown_names(mine)
    if unknown:
        words = [f"{n} (did you mean {near}?)" if near else n for n, near in unknown]
        level = "BLOCK" if any(near for _, near in unknown) else "WARN"
        return Check("flags", level, f"unknown: {', '.join(words)}", "unset or correct them")
    try:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Flags.from_env(mine)
    except ValueError as error:
        return Check("flags", "BLOCK", str(error), "correct it")
    except ImportError as error:  # no yaml in the supervisor's Python: the stages will read it
        return Check("flags", "WARN", f"not checked: {error}", "pip install pyyaml")
    given = sorted(k for k in mine if k.startswith("NSA_"))
    return Check("flags", "OK", f"set by you: {', '.join(given)}" if given else "none set")


def examine(
    *,
    gpu: bool,
    out: Path,
    device: Mapping[str, Any],
    torch: Mapping[str, Any],
    git: Mapping[str, Any],
    environ: Mapping[str, str],
    setup: Mapping[str, Any] | None = None,
) -> list[Check]:
    """Every check that applies; a check that fails itself is a WARN."""
    probes: list[tuple[str, Any]] = [
        ("python", lambda: check_python(torch)),
        ("gpu", lambda: check_gpu(device, gpu)),
        ("torch", lambda: check_torch(torch, gpu)),
        ("triton", lambda: check_triton(torch) if torch.get("torch") else None),
        ("packages", lambda: check_packages(torch)),
        ("compiler", lambda: check_compiler(torch) if gpu else None),
        ("flags", lambda: check_flags(environ)),
        ("writable", lambda: check_writable(out)),
        ("space", lambda: check_space(out)),
        ("memory", check_memory),
        ("cpus", check_cpus),
        ("git", lambda: check_git(git)),
        ("startup", lambda: check_startup(torch, environ)),
        ("clock", check_clock),
    ]
    if gpu:
        probes[1:1] = [("driver", lambda: check_driver(device))]
        probes += [
            ("cuda", lambda: check_cuda(torch)),
            ("arch", lambda: check_arch(torch)),
            ("shm", lambda: check_shm(device)),
            ("power", lambda: check_power(device)),
            ("quiet", lambda: check_quiet(device)),
            ("pcie", lambda: check_pcie(device)),
            ("mig", lambda: check_mig(device)),
            ("flash-attn", lambda: check_flash_attn(torch)),
        ]
    checks = []
    for note in (setup or {}).get("problems", []):
        checks.append(Check("setup", "WARN", str(note), "see the lines above the run"))
    for name, probe in probes:
        try:
            check = probe()
        except Exception as error:  # a broken probe must not hide the others
            check = Check(
                "doctor",
                "WARN",
                f"the check of {name} failed itself: {type(error).__name__}: {error}",
                "please report this",
            )
        if check is not None:
            checks.append(check)
    return checks


def lines(checks: list[Check]) -> list[str]:
    out = []
    for check in checks:
        out.append(f"{check.level:5} {check.name:10} {check.text}")
        if check.fix and check.level != "OK":
            out.append(f"      {'':10} fix: {check.fix}")
    return out


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="oneshot doctor", description=__doc__.split("\n")[0])
    parser.add_argument("--profile", choices=("cpu", "quick", "standard", "full"))
    parser.add_argument("--out", type=Path, default=ROOT / "artifacts" / "runner")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    torch = box.torch_facts(sys.executable, ROOT)
    hardware = box.guarded(box.nvidia_hardware)
    try:
        smi: Any = box.smi_query()
    except box.ProbeFailed as error:
        smi = str(error) if hardware else "no NVIDIA hardware"
    device = {**box.device_facts(smi, torch), "hardware": hardware}
    gpu = args.profile != "cpu" if args.profile else bool(hardware or device.get("name"))
    checks = examine(
        gpu=gpu,
        out=args.out,
        device=device,
        torch=torch,
        git=checkout.git_facts(ROOT, os.environ.get("NSA_COMMIT")),
        environ=os.environ,
    )
    if args.json:
        print(json.dumps([asdict(c) for c in checks], indent=1))
    else:
        print("\n".join(lines(checks)))
    return 3 if any(c.level == "BLOCK" for c in checks) else 0
