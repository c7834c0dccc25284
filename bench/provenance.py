"""What a row was measured on: device, software, commit and day, the same columns in every CSV."""

import contextlib
import functools
import importlib.metadata
import json
import os
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from bench.device import Gpu
from bench.records import out_dir

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = ("device", "torch", "triton", "cuda", "driver", "commit", "date", "precision")


@functools.cache
def commit() -> str | None:
    """Short hash of the sources, with "-dirty" when tracked files differ; None when unknown.

    Inside a run it is what the run says of itself. Without git, as on a box that has the sources
    alone, it is NSA_COMMIT.
    """
    folder = out_dir()
    if folder is not None and (folder / "bundle.json").is_file():
        git = json.loads((folder / "bundle.json").read_text(encoding="utf-8")).get("git") or {}
        if git.get("short"):
            return git["short"] + ("-dirty" if git.get("dirty") else "")
    return described(ROOT) or os.environ.get("NSA_COMMIT", "").strip()[:7] or None


def described(folder: Path) -> str | None:
    """The commit of the checkout that holds a folder, with "-dirty" when tracked files differ; None
    without git. Of a folder in these sources it is theirs, and of others in their checkout, such as
    a package in its virtual environment or sources within another repository, nobody's."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or os.path.samefile(top, ROOT) != (folder == ROOT):
        return None
    if folder == ROOT or _git(folder, "ls-files", "--", "."):
        return _git(folder, "describe", "--always", "--dirty", "--exclude", "*")
    return None


def _git(folder: Path, *args: str) -> str | None:
    """Return git's answer about a folder, None where it has none. Variables GIT_* are left out: a
    hook sets them, and they name its own repository."""
    environ = {name: v for name, v in os.environ.items() if not name.startswith("GIT_")}
    how: dict[str, Any] = dict(capture_output=True, timeout=20, env=environ)
    try:
        run = subprocess.run(["git", "-c", "safe.directory=*", *args], cwd=folder, **how)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(run.stdout).strip() or None if run.returncode == 0 else None


def fix_precision() -> str:
    """Full precision of fp32 for the whole process, TF32 off; what holds then, in words.

    Neither a kernel nor a baseline may be faster by being less exact. Sums of bf16 and fp16
    products stay as torch has them; whether they may be rounded on the way is part of the words.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    matmul, word = torch.backends.cuda.matmul, {True: "on", False: "off"}.get
    return (
        f"fp32 matmul {torch.get_float32_matmul_precision()}, TF32 {word(matmul.allow_tf32)} "
        f"(cuDNN {word(torch.backends.cudnn.allow_tf32)}), reduced-precision reduction bf16 "
        f"{word(bool(matmul.allow_bf16_reduced_precision_reduction))} fp16 "
        f"{word(bool(matmul.allow_fp16_reduced_precision_reduction))}"
    )


def provenance(gpu: Gpu | None) -> dict[str, str | None]:
    """The columns of a row measured on `gpu`, or on the CPU for None; precision is fixed first."""
    driver = None
    # The Triton that was imported compiled the kernels; another may be installed.
    triton = getattr(sys.modules.get("triton"), "__version__", None)
    if triton is None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            triton = importlib.metadata.version("triton")
    if gpu is not None and gpu.nvml is not None:
        version = gpu.nvml[0].nvmlSystemGetDriverVersion()
        driver = version.decode() if isinstance(version, bytes) else version
    return {
        "device": "cpu" if gpu is None else gpu.name, "torch": torch.__version__,
        "triton": triton, "cuda": torch.version.cuda if gpu else None, "driver": driver,
        "commit": commit(), "date": datetime.now(timezone.utc).date().isoformat(),
        "precision": fix_precision(),
    }  # fmt: skip
