"""As a kernel of the Kernel Hub the package loads under another name, alone, and is the same."""

from __future__ import annotations

import json
import subprocess
import sys

from scripts import hf_kernel

# As the package `kernels` imports it, which need not be installed.
LOAD = """
import importlib.util, json, sys
from pathlib import Path
import torch
folder = Path(sys.argv[1])
name = json.loads((folder / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
nsa = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nsa)
torch.manual_seed(0)
config = nsa.NSAConfig(32, 4, 2, 8, 8, l=8, d=4, l_sel=8, n_sel=3, window=16)
out = nsa.NSAAttention(config)(torch.randn(1, 50, 32))
import importlib
older = importlib.import_module(f"{name}.nsa")
assert older.nsa_attention is nsa.nsa_attention
importlib.import_module(f"{name}.kernels.prefill.fused")
importlib.import_module(f"{name}.kernels.prefill.turn")
assert hasattr(torch.ops, name) and "prefill" in dir(getattr(torch.ops, name))
assert not [m for m in sys.modules if m.split(".")[0] == "nsa"]
print(out.double().sum().item(), nsa.__version__)
"""


def test_it_loads_alone_and_computes_the_same(tmp_path):
    import torch

    import nsa

    assert hf_kernel.main([str(tmp_path)]) == 0
    names = sorted(x.name for x in (tmp_path / "build").iterdir())
    assert names == ["torch-cpu", "torch-cuda"]
    folder = tmp_path / "build" / "torch-cuda"
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    config = nsa.NSAConfig(32, 4, 2, 8, 8, l=8, d=4, l_sel=8, n_sel=3, window=16)
    out = nsa.NSAAttention(config)(torch.randn(1, 50, 32))
    total, version = done.stdout.split()
    assert float(total) == out.double().sum().item() and version == nsa.__version__

    metadata = json.loads((folder / "metadata.json").read_text())
    files = {x.relative_to(folder).as_posix() for x in folder.rglob("*") if x.is_file()}
    files = {x for x in files if "__pycache__" not in x}
    assert files == set(metadata["digest"]["files"]) | {"metadata.json"}
    assert {"kernels/decode/cluster.cu", "base.yaml"} <= files and "tests/__init__.py" not in files
    assert metadata["backend"] == {"type": "cuda"} and metadata["id"].isidentifier()
    for name, told in metadata["digest"]["files"].items():
        assert hf_kernel.digest((folder / name).read_bytes()) == told
