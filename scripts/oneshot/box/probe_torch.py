"""What one interpreter's torch sees, as one JSON line. Run as a child: an import may hang."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
import site
import sys
import sysconfig
from contextlib import suppress
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "numpy", "jinja2", "pytest", "pytest-timeout", "pyyaml", "packaging", "matplotlib",
    "nvidia-ml-py", "flash-attn", "hypothesis",
)  # fmt: skip


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _triton() -> str | None:
    """Return the version of what `import triton` gives, whatever its distribution is called."""
    if importlib.util.find_spec("triton") is None:
        return None
    if version := _version("triton") or _version("pytorch-triton"):
        return version
    try:
        import triton

        return str(triton.__version__)
    except Exception:  # a Triton without a version that can be had is there all the same
        return "of unknown version"


def _cuda_driver() -> str | None:
    """Return the newest CUDA that the driver serves, such as 13.0; None without a driver."""
    number = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def _flash_attn() -> str:
    """Return the version of flash-attn, or why its import fails, in one of four classes."""
    try:
        import flash_attn

        return str(flash_attn.__version__)
    except ModuleNotFoundError:
        return "not installed"
    except Exception as error:  # any binary mismatch: the class of it is the answer
        text = f"{type(error).__name__}: {error}"
        known = {
            "undefined symbol": "built for another torch (undefined symbol)",
            "libcudart": "built for another CUDA (libcudart missing)",
            "no kernel image": "built for another GPU (no kernel image)",
        }
        return f"broken: {next((known[word] for word in known if word in text), text[:200])}"


def _startup() -> list[str]:
    """Return files that this interpreter ran before the program, but for its own."""
    out = []
    for name in ("sitecustomize", "usercustomize"):
        spec = importlib.util.find_spec(name)
        if spec and spec.origin and not spec.origin.startswith(("/usr/lib/", "/etc/")):
            out.append(spec.origin)
    of_tools = ("distutils-precedence.pth", "_virtualenv.pth")
    for folder in {*site.getsitepackages(), site.getusersitepackages()}:
        for path in sorted(Path(folder).glob("*.pth")):
            with suppress(OSError):
                text = path.read_text(encoding="utf-8", errors="replace")
                if path.name not in of_tools and re.search(r"(?m)^import\s", text):
                    out.append(str(path))
    return out


def facts() -> dict:
    out: dict = {
        "python": sys.version.split()[0], "prefix": sys.prefix, "base_prefix": sys.base_prefix,
        "python_h": (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        "packages": {name: _version(name) for name in PACKAGES}, "startup": _startup(),
    }  # fmt: skip
    try:
        import torch
    except Exception as error:  # the report says so and goes on without
        return {**out, "torch_error": f"{type(error).__name__}: {error}"[:500]}
    abi, version = torch.compiled_with_cxx11_abi(), torch.version
    requires = metadata.requires("torch") or []
    named = re.compile(r"(pytorch[-_.])?triton\b(?![-_.][A-Za-z])", re.IGNORECASE)
    pin = next((r for r in requires if named.match(r)), None)
    out.update(torch=torch.__version__, cuda_build=version.cuda, hip=version.hip)
    out.update(cxx11abi=abi, triton_pin=pin)
    try:
        out["triton"] = _triton()
        out["cuda_driver"] = _cuda_driver()
        out["cuda_available"] = torch.cuda.is_available()
        if not out["cuda_available"]:
            if version.cuda:
                torch.cuda.init()  # the text of its error is the cause we are after
            return out
        p = torch.cuda.get_device_properties(0)
        out["device"] = {
            "name": p.name, "sm": f"{p.major}.{p.minor}", "sm_count": p.multi_processor_count,
            "l2_mib": round(getattr(p, "L2_cache_size", 0) / 2**20, 1) or None,
            "torch_mem_mib": p.total_memory // 2**20, "count": torch.cuda.device_count(),
        }  # fmt: skip
        out["arch_list"] = torch.cuda.get_arch_list()
        out["cudnn"] = torch.backends.cudnn.version()
        torch.ones(8, device="cuda").sum().item()
        out["cuda_works"] = True
    except Exception as error:
        out["cuda_error"] = f"{type(error).__name__}: {error}"[:500]
    if out.get("cuda_available") is not False:
        out["flash_attn"] = _flash_attn()
    return out


if __name__ == "__main__":
    print(json.dumps(facts()))
