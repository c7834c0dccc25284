"""Is this box fit for the run? OK, WARN or BLOCK per check, each with one fix.

    python -m scripts.oneshot doctor [--profile standard] [--json]

Exit code: 0 nothing blocks, 3 something does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nsa.kernels import fa2_wheels
from scripts.oneshot.box import checkout
from scripts.oneshot.box import env as box
from scripts.oneshot.box.processes import usable_cores

ROOT = Path(__file__).resolve().parents[3]
WANTED_MIB = 500
LEAST_TORCH, LEAST_TRITON = "2.10", "3.6"
# What the metadata of each torch names on Linux, for a torch whose own names none.
TRITON_OF = {
    "2.2": "2.2", "2.3": "2.3.1", "2.4": "3.0.0", "2.5": "3.1.0", "2.6": "3.2.0", "2.7": "3.3.1",
    "2.8": "3.4.0", "2.9": "3.5.1", "2.10": "3.6.0", "2.11": "3.6.0", "2.12": "3.7.1",
    "2.13": "3.7.1", "2.14": "3.8.0", "2.15": "3.9.0",
}  # fmt: skip
NEEDED = ("jinja2", "pytest", "numpy", "pyyaml")
OK, WARN, BLOCK = "OK", "WARN", "BLOCK"
PASS_THROUGH = "on a box with a GPU, start the container with it (docker: --gpus all)"


@dataclass(frozen=True)
class Check:
    """The outcome of one check. level: OK | WARN | BLOCK; fix: what to do about it, unless OK."""

    name: str
    level: str
    text: str
    fix: str | None = None


@dataclass(frozen=True)
class Box:
    """What the checks look at: the facts of env.py and checkout.py, and the variables."""

    gpu: bool
    out: Path
    device: Mapping[str, Any]
    torch: Mapping[str, Any]
    git: Mapping[str, Any]
    environ: Mapping[str, str]
    setup: Mapping[str, Any] | None = None


Said = tuple[str, ...]  # level, text and, unless the level is OK, a fix


def _number(text: str | None) -> tuple[int, ...]:
    return tuple(int(p) for p in re.findall(r"\d+", text or "")[:2])


def _old(name: str, version: str, least: str) -> Said | None:
    """Warn of a version below the least that was tested."""
    if _number(version) >= _number(least):
        return None
    text = f"{name} {version} is older than {least}: kernels may not compile, or be wrong"
    return WARN, text, f"install torch {LEAST_TORCH} or later; it names its triton"


def python(b: Box) -> Said:
    version = b.torch.get("python")
    if version and _number(version) < (3, 10):
        return BLOCK, f"Python {version}", "use Python 3.10 or later: PYTHON=..."
    return OK, f"Python {version or sys.version.split()[0]}"


def torch(b: Box) -> Said:
    torch = b.torch
    if b.gpu and (hidden := box.why_hidden(b.environ)):
        return BLOCK, hidden, "unset it, or name a card of nvidia-smi in it"
    if torch.get("torch_error"):
        fix = "pip install torch, or name an interpreter that has it: PYTHON=/path/to/python"
        return BLOCK, f"torch does not import: {torch['torch_error']}", fix
    version, text = torch["torch"], f"torch {torch['torch']}"
    if b.gpu and torch.get("hip"):
        return BLOCK, f"{text} is a ROCm build", "use a CUDA build"
    if b.gpu and not torch.get("cuda_build"):
        fix = "install a CUDA build of torch, or remove this one and run again"
        return BLOCK, f"{text} is built without CUDA", fix
    if b.gpu and not torch.get("cuda_works"):
        cause = torch.get("cuda_error") or "torch.cuda.is_available() is False"
        fix = "check CUDA_VISIBLE_DEVICES and that the container was started with its GPU"
        if re.search(r"driver.*(too old|insufficient)", cause):
            fix = f"update the driver, or use a torch built for an older CUDA than {version}"
        return BLOCK, f"{text} cannot use the GPU: {cause}", fix
    cuda = f", CUDA {torch['cuda_build']}" if b.gpu else ""
    return _old("torch", version, LEAST_TORCH) or (OK, text + cuda)


def triton(b: Box) -> Said | None:
    release = str(b.torch.get("torch")).split("+")[0]
    if not b.torch.get("torch"):
        return None
    version, pin = b.torch.get("triton"), b.torch.get("triton_pin")
    if not pin and (named := TRITON_OF.get(".".join(release.split(".")[:2]))):
        pin = f"triton=={named}"  # the metadata of a CPU wheel names none
    if not version:
        fix = f"pip install the triton that torch names ({pin or 'see requirements'})"
        return BLOCK, "Triton is not installed", fix
    if not _number(version):
        return WARN, f"triton is {version}", "install the one torch names"
    if pin:
        from packaging.requirements import InvalidRequirement, Requirement

        try:
            wanted = Requirement(pin)
        except InvalidRequirement:
            return WARN, f"triton {version}, but torch names {pin}", "compare the two"
        if not wanted.specifier.contains(version, prereleases=True):
            exact = f"{wanted.name}{wanted.specifier}"
            return WARN, f"triton {version}, but torch names {exact}", f"pip install '{exact}'"
    return _old("triton", version, LEAST_TRITON) or (OK, f"triton {version}")


def packages(b: Box) -> Said:
    there = b.torch.get("packages") or {}
    for kind, names in (("", NEEDED), (", optional", ("matplotlib", "nvidia-ml-py"))):
        if missing := [name for name in names if not there.get(name)]:
            level = BLOCK if "pytest" in missing else WARN
            return level, f"missing{kind}: {', '.join(missing)}", f"pip install {' '.join(missing)}"
    return OK, "all packages are there"


def compiler(b: Box) -> Said:
    """Look for what Triton builds its launcher with at the first launch."""
    if not (os.environ.get("CC") or any(shutil.which(c) for c in ("gcc", "clang", "cc"))):
        text = "no C compiler: Triton cannot build its launcher"
        return BLOCK, text, "apt-get install gcc, or set CC"
    if b.torch.get("python_h") is False:
        text = "Python.h is missing: Triton may not build its launcher"
        return WARN, text, "install the python3-dev package of this Python"
    return OK, "C compiler and Python.h are there"


def flags(b: Box) -> Said:
    """Check NSA_* variables: a typing error in one would be measured as something else."""
    from nsa.flags import Flags, unknown_names

    mine = {k: v for k, v in b.environ.items() if k != "NSA_COMMIT"}
    if unknown := unknown_names(mine):
        words = [f"{n} (did you mean {near}?)" if near else n for n, near in unknown]
        level = BLOCK if any(near for _, near in unknown) else WARN
        return level, f"unknown: {', '.join(words)}", "unset or correct them"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Flags.from_env(mine)
    except ValueError as error:
        return BLOCK, str(error), "correct it"
    except ImportError as error:  # no yaml in the supervisor's Python: the stages will read it
        return WARN, f"not checked: {error}", "pip install pyyaml"
    given = sorted(k for k in mine if k.startswith("NSA_"))
    return OK, f"set by you: {', '.join(given)}" if given else "none set"


def git(b: Box) -> Said:
    git = b.git
    if git.get("source") == "hash of the sources":
        fix = "clone with git, or name the commit: --commit or NSA_COMMIT"
        return WARN, f"no commit: {git.get('problem')}", fix
    if git.get("head"):
        text = f"the commit was given as {git['short']}, but git has {git['head'][:10]} checked "
        text += "out: which of them was measured, and whether it was clean, is unknown"
        return WARN, text, "leave --commit and NSA_COMMIT out, or check that commit out"
    if git.get("dirty"):
        names = ", ".join(git.get("hidden") or ())
        hidden = f"; git was told not to see {names}" if names else ""
        fix = "commit them, so that the report names what it measured"
        return WARN, f"{git['short']} with changes of yours{hidden}", fix
    if git.get("dirty") is None:
        text = f"commit {git['short']}, unknown whether clean: {git.get('problem')}"
        return WARN, text, "mend what `git status` complains about"
    return OK, f"commit {git['short']}"


def startup(b: Box) -> Said | None:
    """Look for code that Python runs before ours, or finds in its place."""
    paths = b.environ.get("PYTHONPATH", "").split(os.pathsep)
    said = [f"PYTHONPATH has {p}" for p in paths if p and f"{os.sep}.deps{os.sep}" not in p]
    said += [f"{name} is set" for name in ("PYTHONSTARTUP", "PYTHONHOME") if b.environ.get(name)]
    said += [f"{path} runs" for path in b.torch.get("startup") or ()]
    if not said:
        return None
    text = "not only the sources decide what runs: " + "; ".join(said)
    return WARN, text, "unset or remove it where you do not mean it"


def writable(b: Box) -> Said:
    for name, path in (("the output folder", b.out), ("the Triton cache", box.triton_cache())):
        if path is None:
            text = "this user has no home: Triton compiles every kernel anew in every process"
            return WARN, text, "set TRITON_CACHE_DIR to a folder of yours"
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f".write-probe-{os.getpid()}"
            probe.write_bytes(b"x")
            probe.unlink()
        except OSError as error:
            text = f"{name} cannot be written: {error.strerror}"
            fix = "set OUT or TRITON_CACHE_DIR to a folder of yours"
            return BLOCK if path == b.out else WARN, text, fix
    return OK, "output and Triton cache can be written"


def space(b: Box) -> Said:
    temporary = Path(os.environ.get("TMPDIR", "/tmp"))
    places = {"the output folder": b.out, "the Triton cache": box.triton_cache()}
    places["the temporary folder"] = temporary
    free = {name: box.free_mib(path) for name, path in places.items()}
    low = {name: mib for name, mib in free.items() if mib is not None and mib < WANTED_MIB}
    if low:
        text = "; ".join(f"{name} has {mib} MiB free" for name, mib in low.items())
        fix = f"free {WANTED_MIB} MiB, or set OUT, TRITON_CACHE_DIR and TMPDIR to a larger disk"
        return BLOCK if min(low.values()) < 10 else WARN, text, fix
    return OK, f"at least {WANTED_MIB} MiB free everywhere"


def memory(b: Box) -> Said | None:
    limit = box._cgroup(*box.MEMORY_LIMIT) or ""
    bounds = [box.memory_mib(), int(limit) // 2**20 if limit.isdigit() else None]
    if not (known := [mib for mib in bounds if mib is not None]):
        return None
    said = f"{min(known)} MiB of memory"
    return (WARN, said, "8 GiB are comfortable") if min(known) < 3500 else (OK, said)


def cpus(b: Box) -> Said:
    """Count the cores that this process may use, by affinity and by the cgroup's quota."""
    cores = float(usable_cores())
    quota = (box._cgroup(*box.CPU_LIMIT) or "max").split()
    if quota[0].isdigit():  # "max" and -1 are no limit; version 1 has its usual period
        cores = min(cores, int(quota[0]) / int(quota[1] if len(quota) > 1 else 100_000))
    if cores < 2:
        text = f"{cores:g} CPU cores: compiling kernels takes long, stages may time out"
        return WARN, text, "give the container 4 cores"
    return OK, f"{cores:g} CPU cores"


def clock(b: Box) -> Said:
    wrong = WARN, "the clock is wrong", "set the date; downloads may fail too"
    return wrong if time.time() < 1_700_000_000 else (OK, "the clock is plausible")


def driver(b: Box) -> Said:
    name = b.device.get("name")
    if b.device.get("driver"):
        return OK, f"{name}, driver {b.device['driver']}"
    reason = b.device.get("reason") or "nvidia-smi gives no driver version"
    if name:
        fix = "telemetry and power limits are missing; install nvidia-smi"
        return WARN, f"torch sees {name}, but {reason}", fix
    fix = "restart the box; if it stays so, take another one"
    return BLOCK, f"no usable GPU: {reason}", fix if b.device.get("hardware") else PASS_THROUGH


def gpu(b: Box) -> Said | None:
    """Name the GPU that the run speaks of; driver() says why none answers."""
    name = b.device.get("name")
    if b.gpu:
        return (OK, f"{name}, SM {b.device.get('sm') or '?'}") if name else None
    if name or b.device.get("hardware"):
        return OK, "there is a GPU, but the cpu profile was chosen"
    text = "no NVIDIA hardware is visible: cpu profile, which says nothing about any GPU"
    return WARN, text, PASS_THROUGH


def cuda(b: Box) -> Said | None:
    """Compare the driver's CUDA with torch's: an older one of the same major version serves too."""
    build, driver = b.torch.get("cuda_build"), b.torch.get("cuda_driver")
    if not build or not driver:
        return None
    if _number(driver)[0] >= _number(build)[0]:
        return OK, f"the driver serves CUDA {driver}, torch wants {build}"
    level = WARN if b.torch.get("cuda_works") else BLOCK
    text = f"the driver serves CUDA {driver} only, torch is built for {build}"
    return level, text, f"update the driver, or install a torch for CUDA {_number(driver)[0]}"


def arch(b: Box) -> Said | None:
    sm, archs = (b.torch.get("device") or {}).get("sm"), b.torch.get("arch_list") or []
    if not sm or not archs:
        return None
    major, minor = (int(x) for x in sm.split("."))
    if major < 8:
        text = f"compute capability {sm}: bf16 kernels need 8.0 or more"
        return BLOCK, text, "take an Ampere or newer GPU"
    built = [divmod(int(n), 10) for n in re.findall(r"\bsm_(\d+)", " ".join(archs))]
    fits = any(of == major and at <= minor for of, at in built)
    if fits or any(a.startswith("compute_") for a in archs):
        return OK, f"sm_{major}{minor} is served by this torch"
    text = f"torch has no kernels for sm_{major}{minor} ({' '.join(archs)})"
    return BLOCK, text, "install a newer CUDA build of torch"


def shm(b: Box) -> Said | None:
    """Check /dev/shm: Docker gives 64 MiB, which NCCL between several GPUs outgrows."""
    free, wanted = box.free_mib(Path("/dev/shm")), 32 * max(1, b.device.get("count") or 1)
    if free is None or free >= wanted:
        return None
    text = f"/dev/shm has {free} MiB free, {wanted} are wanted"
    return WARN, text, "start the container with --shm-size=1g"


def power(b: Box) -> Said | None:
    cap, full = b.device.get("power_limit_w"), b.device.get("power_default_w")
    if not isinstance(cap, (int, float)) or not isinstance(full, (int, float)):
        return None
    fix = "times are those of a capped card; ask the host for the full limit"
    capped = WARN, f"power limit {cap:g} W of {full:g} W", fix
    return capped if cap < full else (OK, f"power limit {cap:g} W")


def quiet(b: Box) -> Said | None:
    shared, fix = b.device.get("shared"), "end other work on it; times will be noisy"
    if shared:
        return WARN, "the GPU is in use before the run starts", fix
    return None if shared is None else (OK, "nobody else uses the GPU")


def pcie(b: Box) -> Said | None:
    fix = "copies to the GPU are slow on this box; kernels are not affected"
    slot = str(b.device.get("pcie"))
    return (WARN, f"PCIe {slot}", fix) if "max" in slot else None


def mig(b: Box) -> Said | None:
    fix = "compare its times with the same slice only"
    return (WARN, "MIG is on: this is a slice of a GPU", fix) if b.device.get("mig") else None


def flash_attn(b: Box) -> Said | None:
    state = b.torch.get("flash_attn")
    if state is None:
        return None
    if state[0].isdigit():
        return OK, f"flash-attn {state}"
    versions = (b.torch.get(k) for k in ("torch", "cuda_build", "python"))
    fits = fa2_wheels.wheel(*versions, b.torch.get("cxx11abi", True))
    return WARN, f"flash-attn: {state}", f"optional; {fits}"


# In the order in which they are told. None: there is nothing to say.
CHECKS: dict[str, Callable[[Box], Said | None]] = {
    "python": python, "driver": driver, "gpu": gpu, "torch": torch, "triton": triton,
    "packages": packages, "compiler": compiler, "flags": flags, "writable": writable,
    "space": space, "memory": memory, "cpus": cpus, "git": git, "startup": startup,
    "clock": clock, "cuda": cuda, "arch": arch, "shm": shm, "power": power, "quiet": quiet,
    "pcie": pcie, "mig": mig, "flash-attn": flash_attn,
}  # fmt: skip
OF_A_GPU = "driver compiler cuda arch shm power quiet pcie mig flash-attn".split()


def examine(b: Box) -> list[Check]:
    """Run every check that applies; a check that fails itself is a WARN."""
    notes = (b.setup or {}).get("problems", [])
    checks = [Check("setup", WARN, str(note), "see the lines above the run") for note in notes]
    for name, check in CHECKS.items():
        if name in OF_A_GPU and not b.gpu:
            continue
        try:
            said = check(b)
        except Exception as error:  # a broken probe must not hide the others
            why = f"the check of {name} failed itself: {type(error).__name__}: {error}"
            name, said = "doctor", (WARN, why, "please report this")
        if said is not None:
            checks.append(Check(name, *said))
    return checks


def lines(checks: list[Check]) -> list[str]:
    out = []
    for check in checks:
        out.append(f"{check.level:5} {check.name:10} {check.text}")
        if check.fix and check.level != OK:
            out.append(f"      {'':10} fix: {check.fix}")
    return out


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="oneshot doctor", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--profile", choices=("cpu", "quick", "standard", "full"))
    parser.add_argument("--out", type=Path, default=ROOT / "artifacts" / "runner")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    torch, hardware = box.torch_facts(sys.executable, ROOT), box.guarded(box.nvidia_hardware)
    device = {**box.device_facts(box.smi_or_why(hardware), torch), "hardware": hardware}
    gpu = args.profile != "cpu" if args.profile else bool(hardware or device.get("name"))
    git = checkout.git_facts(ROOT, os.environ.get("NSA_COMMIT"))
    checks = examine(Box(gpu, args.out, device, torch, git, os.environ))
    as_json = json.dumps([asdict(c) for c in checks], indent=1)
    print(as_json if args.json else "\n".join(lines(checks)))
    return 3 if any(c.level == BLOCK for c in checks) else 0
