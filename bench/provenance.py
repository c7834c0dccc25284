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

import torch

from bench.device import Gpu
from bench.records import out_dir

COLUMNS = ("device", "torch", "triton", "cuda", "driver", "commit", "date", "precision")


@functools.cache
def commit() -> str | None:
    """Short hash of the sources, with "-dirty" when tracked files differ; None when unknown.

    Inside a run it is what the run says of itself, and else NSA_COMMIT where it is set: a box may
    have the sources without git.
    """
    folder = out_dir()
    if folder is not None and (folder / "bundle.json").is_file():
        git = json.loads((folder / "bundle.json").read_text(encoding="utf-8")).get("git") or {}
        if git.get("short"):
            return git["short"] + ("-dirty" if git.get("dirty") else "")
    if given := os.environ.get("NSA_COMMIT", "").strip():
        return given[:7]
    return described(Path(__file__).parent)


def described(folder: Path) -> str | None:
    """The commit of a checkout, with "-dirty" when tracked files differ; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None if run.returncode == 0 else None


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
