"""Which flash-attn wheels its project publishes, and which fits a torch. Standard library only."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass

RELEASES = "https://github.com/Dao-AILab/flash-attention/releases"


@dataclass(frozen=True)
class Release:
    """The build matrix of one release: Linux wheels for every combination of these."""

    version: str
    torch: tuple[str, ...]
    cuda: tuple[str, ...]  # major versions
    python: tuple[str, ...]
    machine: tuple[str, ...]


# .github/workflows/publish.yml at tag v2.8.3, the same at v2.8.3.post1. That of the main branch has
# torch 2.6 to 2.10, CUDA 12 and 13: a row here once a release was built with it.
PUBLISHED = Release(
    "2.8.3", ("2.4", "2.5", "2.6", "2.7", "2.8"), ("12",),
    ("3.9", "3.10", "3.11", "3.12", "3.13"), ("x86_64",),
)  # fmt: skip


def wheel(torch: str, cuda: str | None, python: str, cxx11abi: bool) -> str:
    """Which wheel fits this machine, in words, for versions such as "2.11.0+cu130", "13.0", "3.12".

    cuda is what torch was built with, None for a torch without.
    """
    if cuda is None:
        return f"torch {torch} is built without CUDA: FlashAttention-2 cannot run"
    major, python, torch = cuda.split(".")[0], _minor(python), _minor(torch.split("+")[0])
    machine, r = platform.machine(), PUBLISHED
    published = torch in r.torch and major in r.cuda and python in r.python and machine in r.machine
    if not published or sys.platform != "linux" or (torch, python) == ("2.4", "3.13"):
        return (
            f"no official wheel for torch {torch}, CUDA {major}, Python {python} on {machine}: "
            "torch's own FA-2 is used, or build from source (docs/FA2-Install-Guide.md)"
        )
    tag = "cp" + python.replace(".", "")
    return (
        f"the wheel that fits is flash_attn-{r.version}+cu{major}torch{torch}cxx11abi"
        f"{str(cxx11abi).upper()}-{tag}-{tag}-linux_{machine}.whl from {RELEASES}"
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
