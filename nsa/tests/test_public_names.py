"""Are the public names there for Python, type checkers and the wheel, and do their examples run?"""

from __future__ import annotations

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nsa


def test_type_checkers_see_what_loads_on_first_use():
    tree = ast.parse(Path(nsa.__file__).read_text())
    block = next(
        node for node in tree.body
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"
    )  # fmt: skip
    seen = {}
    for line in block.body:
        for alias in line.names:
            assert alias.asname == alias.name, "only `import X as X` is a public name of the module"
            seen[alias.name] = line.module
    assert seen == nsa._WHERE


def test_every_name_loads():
    for name in nsa.__all__:
        assert getattr(nsa, name) is not None
    for name, module in nsa._WHERE.items():
        assert getattr(importlib.import_module(module), name) is getattr(nsa, name)


def imported(path: Path) -> set[str]:
    """Modules that a file names in its imports, those inside functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_go_one_way():
    """docs/design.md, "Who imports whom"."""
    root = Path(nsa.__file__).parent
    packages = {p.parent.name for p in (root / "kernels").glob("*/__init__.py")}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        if parts[0] == "tests":
            continue
        names = imported(path)
        assert not [n for n in names if n.startswith(("bench", "scripts", "nsa.tests"))], path
        if parts == ("oracle.py",):
            outside = {n for n in names if n.split(".")[0] not in ("torch", "__future__", "math")}
            assert not outside, outside
        else:
            assert not [n for n in names if n.startswith("nsa.oracle")], path
        if parts[0] == "kernels" and len(parts) > 2:
            others = tuple(f"nsa.kernels.{p}" for p in packages - {parts[1]})
            above = () if parts[1] == "triton_sel_kernel" else ("nsa.dispatch", "nsa.reference")
            assert not [n for n in names if n.startswith((*others, *above))], path


EXAMPLES = ("attention", "cache", "kvcache", "layouts", "model", "module", "parallel")


@pytest.mark.parametrize("name", [*EXAMPLES, "integrations.transformers"])
def test_examples_in_docstrings_run(name):
    if name == "integrations.transformers":
        pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    failed, attempted = doctest.testmod(importlib.import_module(f"nsa.{name}"))
    assert attempted and not failed


def test_the_wheel_has_the_library_and_no_corpus(monkeypatch):
    setuptools = pytest.importorskip(
        "setuptools", minversion="77", reason="setuptools 77, which builds the wheel, is missing"
    )
    monkeypatch.chdir(Path(nsa.__file__).parents[1])
    whole = setuptools.Distribution({"script_name": "setup.py"})
    whole.parse_config_files(["pyproject.toml"])
    command = whole.get_command_obj("build_py")
    command.ensure_finalized()
    files = {path.partition("lib/")[2] for path in command.get_outputs()}
    assert {"nsa/py.typed", "nsa/attention.py", "nsa/integrations/transformers.py"} <= files
    assert "nsa/kernels/decode/cluster.cu" in files
    assert not [name for name in files if name.startswith(("nsa/tests", "nsa/data"))]
    assert all(name.endswith((".py", "py.typed", ".cu")) for name in files)


def test_public_modules_need_no_import_of_their_own():
    code = "import nsa; print(nsa.layouts.clean.__name__, nsa.parallel, nsa.compress)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("clean <module 'nsa.parallel'")
